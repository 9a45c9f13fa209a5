"""The three digests of a stream, and the pieces that each bucket received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overlord.core.plan import chain_digest
from overlord.core.samples import SampleId
from overlord.job.layout_specs import Runtime
from overlord.job.specs import Job
from overlord.roles.client import Client, Step
from overlord.session import Service, launch


@dataclass(frozen=True, slots=True)
class StreamDigests:
    """The digests of some steps."""

    order: str
    """Which samples, in which order: depends on job and seed alone."""
    plan: str
    """Where each of them went: depends on the mesh and the strategy too."""
    content: str
    """The bytes of every rank's view; compare on one kind of host only."""
    steps: int


Before = Callable[[Service, int], object]
"""Called before each step, so that a test can make changes or inject faults."""
Report = Callable[[Step], Mapping[str, float]]
"""Makes the metrics that are reported of a step."""


def digest_service(
    service: Service, *, steps: int, before: Before | None = None, report: Report | None = None
) -> StreamDigests:
    """Consume steps of a service on every rank and return their digests.

    Args:
        service: The service.
        steps: Steps at most; fewer where the stream ends.
        before: Called with the service and the step that comes next.
        report: Makes what rank 0 reports of a step.
    """
    trainers = Trainers(service)
    order: list[str] = []
    plan: list[str] = []
    content: list[str] = []
    for _ in range(steps):
        if before is not None:
            before(service, trainers.next_step)
        opened = trainers.step()
        if not opened:
            break
        order.append(opened[0].order_digest)
        plan.append(opened[0].plan_digest)
        for step in opened:
            content += digests_of(step)
        if report is not None:
            trainers.first.report(opened[0].index, report(opened[0]))
    trainers.close()
    return StreamDigests(chain_digest(order), chain_digest(plan), chain_digest(content), len(order))


class Trainers:
    """The clients of all ranks, step by step, through every change of the mesh."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.first = service.client(rank=0)
        """The client of rank 0, which every mesh has."""
        self._others: dict[int, Client] = {}

    @property
    def next_step(self) -> int:
        """The step that comes next."""
        return self.first.next_step

    def step(self) -> list[Step]:
        """Take the next step on every rank that its mesh has; nothing at the end of the stream."""
        at = self.next_step
        for rank in range(1, self._service.mesh.world_size):
            if rank not in self._others:
                self._others[rank] = self._service.client(rank=rank)
        found = [next(self.first, None)]
        for rank, client in list(self._others.items()):
            if client.next_step == at and found[0] is not None:  # one that comes later begins later
                found.append(next(client, None))
                if found[-1] is None:
                    self._others.pop(rank).close()
        return [step for step in found if step is not None]

    def close(self) -> None:
        """Detach all of them."""
        for client in (self.first, *self._others.values()):
            client.close()


def digests_of(step: Step) -> list[str]:
    """Return the digests of everything that a rank gets in a step."""
    fetched = (batches for bucket, batches in step.fetched.items() if bucket != step.bucket)
    found = [batch.digest() for batches in (step.microbatches, *fetched) for batch in batches]
    return found + [one.digest() for one in (step.encoder, step.audio_encoder) if one is not None]


def stream_digests(job: Job, *, steps: int, runtime: Runtime = "inline", **options: Any) -> StreamDigests:
    """Launch a job, consume steps on every rank of the mesh, and return the digests; `options` are those of `launch`.

    Example:
        Two digests that must be equal whatever the scale::

            assert stream_digests(job, steps=50).order == stream_digests(job, steps=50, runtime="local").order
    """
    with launch(job, runtime=runtime, **options) as service:
        return digest_service(service, steps=steps)


def delivered_pieces(service: Service, *, steps: int | None = None) -> dict[SampleId, list[tuple[int, int]]]:
    """Consume a stream once per data-parallel bucket and return (offset, length) of every piece of every sample."""
    pieces: dict[SampleId, list[tuple[int, int]]] = defaultdict(list)
    tree = service.mesh
    for dp in range(tree.dp):
        with service.client(rank=tree.rank(dp=dp)) as client:
            for step in client:
                for batch in step.microbatches:
                    meta = batch.meta
                    columns = (meta.segment_offsets.tolist(), meta.segment_lengths.tolist())
                    for sample, offset, length in zip(meta.sample_ids, *columns, strict=True):
                        if sample.source:
                            pieces[sample].append((offset, length))
                if steps is not None and step.index + 1 >= steps:
                    break
    return dict(pieces)
