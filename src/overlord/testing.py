"""Public test tools: the three digests of a stream, who delivered what, and resume at every step.

The law says that the digests of a stream are the same at every scale, on every runtime; these
functions let a user hold his own job against it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import chain_digest
from overlord.core.samples import SampleId
from overlord.core.specs import Job
from overlord.session import DEFAULT_CACHE, Runtime, Service, launch


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


def digest_service(service: Service, *, steps: int) -> StreamDigests:
    """Consume steps of a service on every rank and return their digests."""
    clients = [service.client(rank=rank) for rank in range(service.mesh.world_size)]
    order: list[str] = []
    plan: list[str] = []
    content: list[str] = []
    for _ in range(steps):
        opened = [next(client, None) for client in clients]
        if any(step is None for step in opened):
            break
        first = opened[0]
        assert first is not None
        order.append(first.order_digest)
        plan.append(first.plan_digest)
        for step in opened:
            assert step is not None
            content.extend(batch.digest() for batch in step.microbatches)
            if step.encoder is not None:
                content.append(step.encoder.digest())
    for client in clients:
        client.close()
    return StreamDigests(chain_digest(order), chain_digest(plan), chain_digest(content), len(order))


def stream_digests(
    job: Job,
    *,
    mesh: ClientPlaceTree | None = None,
    steps: int,
    runtime: Runtime = "inline",
    prefetch: int = 2,
    loaders_per_source: int = 1,
    threads: int | None = None,
    address: str | None = None,
    ranks_per_host: int | None = None,
    loader_hosts: int | Literal["per_source"] | None = None,
    state: Mapping[str, Any] | None = None,
    cache: str = DEFAULT_CACHE,
) -> StreamDigests:
    """Launch a job, consume steps on every rank of the mesh, and return the digests.

    Example:
        Two digests that must be equal whatever the scale::

            assert stream_digests(job, steps=50).order == stream_digests(job, steps=50, runtime="local").order
    """
    with launch(
        job,
        mesh=mesh,
        runtime=runtime,
        prefetch=prefetch,
        loaders_per_source=loaders_per_source,
        threads=threads,
        address=address,
        ranks_per_host=ranks_per_host,
        loader_hosts=loader_hosts,
        state=state,
        cache=cache,
    ) as service:
        return digest_service(service, steps=steps)


def assert_resumes_anywhere(
    job: Job,
    *,
    steps: int,
    mesh: ClientPlaceTree | None = None,
    runtime: Runtime = "inline",
    address: str | None = None,
    cache: str = DEFAULT_CACHE,
) -> None:
    """Take the state before every step, restore each, and check that the rest of the stream is identical."""
    with launch(job, mesh=mesh, runtime=runtime, address=address, cache=cache) as service:
        client = service.client(rank=0)
        states = [client.state_dict()]
        expected: list[tuple[str, list[str]]] = []
        for step in client:
            expected.append((step.plan_digest, [batch.digest() for batch in step.microbatches]))
            states.append(client.state_dict())
            if len(expected) == steps:
                break
    for at, state in enumerate(states[: len(expected)]):
        with launch(job, mesh=mesh, runtime=runtime, address=address, state=state, cache=cache) as service:
            found: list[tuple[str, list[str]]] = []
            for step in service.client(rank=0):
                found.append((step.plan_digest, [batch.digest() for batch in step.microbatches]))
                if len(found) == len(expected) - at:
                    break
        if found != expected[at:]:
            wrong = next(i for i, pair in enumerate(zip(found, expected[at:], strict=False)) if pair[0] != pair[1])
            raise AssertionError(f"resumed before step {at}, the stream differs at step {at + wrong}")


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
