"""What a role may ask of the world. Runtimes implement these; roles know their peers in no other way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from overlord.core.messages import MetaDelta, MetaRequest, Payload
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.samples import Cursor, SampleId
from overlord.roles.views import RankView, StepHeader
from overlord.transforms.samples.per_sample import Workers

__all__ = ["Collect", "Feed", "Loaders", "Telemetry", "Workers"]


Collect = Callable[[], list[Payload]]
"""Waits for payloads that were asked for; one a source, in the order of the sources."""


class Loaders(Protocol):
    """All SourceLoaders of the job, each asked at most once per call."""

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Ask loaders for metadata, side by side where the runtime can; answers in the order of requests."""
        ...

    def loader_do_plan(self, plan: LoadingPlan, ranks: Collection[int]) -> Collect:
        """Ask loaders for the samples of a plan that some ranks need.

        The samples have left the read buffers when this returns, so steps must be asked for in order; they
        may still be in the making until they are collected.
        """
        ...

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Tell the loaders of some sources that nothing is drawn from these cursors on for now."""
        ...

    def note_faults(self, faults: Sequence[tuple[int, int, int, str]]) -> None:
        """Tell loaders of samples whose media the DataConstructor could not decode: (source, row, epoch, reason)."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return what the loaders have met, by the names of their sources: what one in their place must know."""
        ...


class Telemetry(Protocol):
    """Where roles say what they saw. Nothing here may change the stream."""

    def bad_samples(self, found: Sequence[tuple[SampleId, str]]) -> None:
        """Tell that stand-ins take the places of these samples, each with the reason."""
        ...

    def wrong_lengths(self, found: Sequence[tuple[SampleId, str]]) -> None:
        """Tell that these samples were cut or padded to their planned length, each with the reason."""
        ...


class Feed(Protocol):
    """What a Client asks for: served by the DataConstructor of its host."""

    mesh: ClientPlaceTree
    """The mesh of the step at which this rank begins; of a rank that none has, the newest."""

    def open_step(self, step: int) -> StepHeader | None:
        """Return what a step consists of, or None past the end of the stream. Waits until it is planned.

        Also None for a step whose mesh does not have this rank.

        Asking for a step also tells that the trainer has finished with the steps before it.
        """
        ...

    def microbatch(self, step: int, microbatch: int) -> RankView:
        """Return this rank's view of one microbatch. Waits until it is built."""
        ...

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Hand over the trainer's metrics; durable when it returns."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the stream before a step."""
        ...

    def close(self, next_step: int) -> None:
        """Let go of everything held for this rank; the steps before `next_step` have been trained on."""
        ...
