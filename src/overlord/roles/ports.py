"""The interfaces through which roles reach their peers. Runtimes implement them.

The thread pool that transforms run on is `Workers`, in `transforms.samples.per_sample`, where it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from overlord.core.client_messages import StepHeader
from overlord.core.messages import MetaDelta, MetaRequest, Payload
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.samples import Cursor, SampleId
from overlord.roles.views import RankView

Collect = Callable[[], list[Payload]]
"""Waits for the requested payloads: one for each source, in the order of the sources."""


class Loaders(Protocol):
    """All SourceLoaders of the job; a call sends at most one request to each."""

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Request metadata from loaders, concurrently where the runtime can; answers are in the order of requests."""
        ...

    def loader_do_plan(self, plan: LoadingPlan, ranks: Collection[int]) -> Collect:
        """Request the samples of a plan that some ranks need.

        The samples have left the read buffers when this returns, so steps must be requested in order. Their transforms
        may still run until they are collected.
        """
        ...

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Tell the loaders of some sources that nothing will be drawn from these cursors on for now."""
        ...

    def note_faults(self, faults: Sequence[tuple[int, int, int, str]]) -> None:
        """Report samples with media that the DataConstructor could not decode: (source, row, epoch, reason)."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """Return the loaders' counters (`LoaderCounters` as JSON) by source name: a replacement continues from them."""
        ...


class Telemetry(Protocol):
    """Where loaders report single samples. Nothing here may change the stream."""

    def bad_samples(self, found: Sequence[tuple[SampleId, str]]) -> None:
        """Report samples that are replaced by stand-ins, each with the reason."""
        ...

    def wrong_lengths(self, found: Sequence[tuple[SampleId, str]]) -> None:
        """Report samples that were cut or padded to their planned length, each with the reason."""
        ...


class Feed(Protocol):
    """What a Client requests: served by the DataConstructor of its host."""

    mesh: ClientPlaceTree
    """The mesh of this rank's first step; the newest mesh for a rank that no mesh has."""

    def open_step(self, step: int) -> StepHeader | None:
        """Wait until a step is planned, and return its header; None past the end of the stream.

        Also None for a step with a mesh that does not have this rank. The request also reports that the trainer has
        finished the steps before it.
        """
        ...

    def microbatch(self, step: int, microbatch: int) -> RankView:
        """Wait until a microbatch is built, and return this rank's view of it."""
        ...

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Send the trainer's metrics; they are durable when this returns."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the stream before a step."""
        ...

    def close(self, next_step: int) -> None:
        """Release everything held for this rank; the steps before `next_step` have been trained on."""
        ...
