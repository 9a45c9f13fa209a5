"""Client: the trainer's side. Iterates over steps, reports metrics and positions, gives the state."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlord.core.spec_errors import is_whole
from overlord.errors import ClosedError, SpecError
from overlord.roles.views import ENCODER, Batch, Microbatches, Step

if TYPE_CHECKING:  # it names every message between roles, and a trainer loads none of them
    from overlord.roles.ports import Feed


class Client:
    """The stream of one rank: iterate over it to train.

    `state_dict()` between two steps is the state after the last step that was delivered. The stream ends where the job
    does, or before the first step with a mesh that does not have this rank.
    """

    def __init__(self, feed: Feed, rank: int, first_step: int) -> None:
        ranks = feed.mesh.world_size
        if not is_whole(rank, 0, ranks - 1):
            raise SpecError(
                f"rank {rank!r} is not in the mesh of {ranks} ranks; it would wait for data forever. "
                f"Use a rank from 0 to {ranks - 1}, launch with a larger mesh, or call service.reshard first."
            )
        self.rank = int(rank)
        self._feed = feed
        self._next_step = first_step
        self._closed = False
        self._pid = os.getpid()
        self.mesh = feed.mesh
        """The mesh of the next step, as far as it is known; `step.mesh` is the mesh of a step."""
        self.fetched_bytes = 0
        """Bytes of all batches delivered so far: what this rank needs, and nothing else."""

    @property
    def next_step(self) -> int:
        """The index of the next step."""
        return self._next_step

    def __repr__(self) -> str:
        return f"Client(rank={self.rank}, next_step={self._next_step})"

    def __iter__(self) -> Client:
        return self

    def __next__(self) -> Step:
        header = self._open_feed().open_step(self._next_step)  # (1) the client asks its DataConstructor
        if header is None:
            raise StopIteration
        self._next_step += 1
        self.mesh = header.next_mesh or header.mesh
        step, feed = header.index, self._feed

        @functools.cache
        def fetch(microbatch: int) -> Batch:
            batch = Batch(feed.microbatch(step, microbatch), header.names)
            self.fetched_bytes += batch.nbytes
            return batch

        encoder = (lambda: fetch(ENCODER)) if header.encodes else None
        return Step(header, Microbatches(fetch, header.num_microbatches), header.names, encoder)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics of a step to the planner, such as `{"loss/web": 2.1}`. They take effect at step + lag."""
        if not is_whole(step, 0):
            raise SpecError(f"report: step is {step!r}, which is not a step. Report `step.index`.")
        if not isinstance(metrics, Mapping):
            raise SpecError(f"report: metrics are {metrics!r:.80}, not a mapping. Report as in {{'loss/web': 2.1}}.")
        clean: dict[str, float] = {}
        for key, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                raise SpecError(
                    f"report: {key} at step {step} is {value!r:.80}; a mixture that follows it would break. "
                    "Report finite numbers, or leave the metric out."
                )
            clean[str(key)] = number
        self._open_feed().report(int(step), clean)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream at this position: small, JSON-able, the same on every rank."""
        return self._open_feed().state(self._next_step)

    def close(self) -> None:
        """Detach from the service."""
        if not self._closed:
            self._closed = True
            if self._pid == os.getpid():  # in a fork, the connection belongs to the parent
                self._feed.close(self._next_step)

    def _open_feed(self) -> Feed:
        if self._closed:
            raise ClosedError(f"the client of rank {self.rank} is closed. Take another one from the service.")
        if self._pid != os.getpid():
            raise SpecError(
                f"the client of rank {self.rank} was made in process {self._pid} and is used in process {os.getpid()}, "
                "a fork of it; both would deliver the same samples, over one connection. Attach in the process that "
                "trains. A torch.utils.data.DataLoader forks workers: use num_workers=0, since the service reads "
                "ahead by itself."
            )
        return self._feed

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
