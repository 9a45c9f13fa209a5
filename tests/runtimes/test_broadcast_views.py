"""Ranks that broadcast along an axis fetch for all ranks of it; the others fetch nothing."""

from __future__ import annotations

import pytest
from tests.runtimes.test_many_hosts import hosts_of

import overlord as ol
from overlord.core.client_messages import GetStatus

STEPS = 2
CASES = {
    "dp": ("dp=2,cp=2,tp=2", "backbone_balance", ("DP",)),
    "dp and tp": ("pp=2,dp=2,tp=2", "backbone_balance", ("DP", "TP")),
    "all": ("dp=2,cp=2,tp=2", "backbone_balance", ("DP", "CP", "TP")),
    "encoders": ("dp=4,tp=2", "vlm_hybrid", ("DP",)),
    "hybrid": ("dp=2,cp=2", "hdp", ("DP",)),
    "hybrid, cp": ("dp=2,cp=2", "hdp", ("CP",)),
}


def batches_of(client):
    """All that the client of a rank gets: (step, bucket, microbatch) -> digest and the ranks that share it."""
    steps = []
    for _, step in zip(range(STEPS), client, strict=False):
        found = {(bucket, number): (batch.digest(), batch.meta.ranks, batch.meta.sample_ids)
                 for bucket, batches in step.fetched.items() for number, batch in enumerate(batches)}  # fmt: skip
        encoded = None if step.encoder is None else step.encoder.digest()
        steps.append((step, found, encoded))
        if not step.fetches:
            assert not found and all(dict(batch) == {} for batch in step.microbatches)
    return steps


def expected_of(job, cache, mesh, strategy, broadcast):
    """What every rank gets without broadcast along axes whose ranks consume different samples."""
    split = {"DP", "CP"} if strategy == "hdp" else {"DP"}
    made = getattr(ol.strategies, strategy)(broadcast=[axis for axis in broadcast if axis not in split])
    with ol.launch(job, mesh=mesh, strategy=made, runtime="inline", cache=cache) as service:
        return [batches_of(service.client(rank)) for rank in range(mesh.world_size)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow_but_inline
def test_the_first_rank_fetches_what_all_ranks_of_its_group_consume(name, mixed_job, cache, where):
    sizes, strategy, broadcast = CASES[name]
    mesh, job = ol.ClientPlaceTree.parse(sizes), mixed_job.replace(max_steps=STEPS)
    expected = expected_of(job, cache, mesh, strategy, broadcast)
    made = getattr(ol.strategies, strategy)(broadcast=broadcast)
    with ol.launch(job, mesh=mesh, strategy=made, cache=cache, **where) as service:
        found = [batches_of(service.client(rank)) for rank in range(mesh.world_size)]
    for rank in range(mesh.world_size):
        group = [one for one in range(mesh.world_size) if mesh.fetcher_of(one, broadcast) == rank]
        for at, (step, batches, encoded) in enumerate(found[rank]):
            assert step.fetches is bool(group)
            assert encoded == expected[rank][at][2], "what a rank encodes is its own"
            fetched = {place: batch for one in group for place, batch in expected[one][at][1].items()}
            assert batches == fetched
            counts = {bucket: 1 + max(m for b, m in fetched if b == bucket) for bucket, _ in fetched}
            assert step.group == (tuple(sorted(counts.items())) if len(counts) > 1 else ()) or not group
    assert sum(len(batches) for rank in found for _, batches, _ in rank) > 0


def test_a_host_without_the_first_rank_fetches_nothing(ids_job, tmp_path, cache):
    tree, strategy = ol.ClientPlaceTree(dp=4), ol.strategies.backbone_balance(broadcast=("DP",))
    job = ids_job.replace(max_steps=STEPS)
    with hosts_of(job, tmp_path, cache, mesh=tree, hosts=2, loader_hosts=2, prefetch=1, strategy=strategy) as (
        service,
        planner,
        _,
    ):
        clients = [service.client(rank) for rank in range(4)]
        for _ in range(STEPS):
            first, *others = [next(client) for client in clients]
            assert list(first.fetched) == [0, 1, 2, 3]
            batches = [batch for batches in first.fetched.values() for batch in batches]
            assert (
                len({one for batch in batches for one in batch.meta.sample_ids if one.source}) == first.global_samples
            )
            assert all(not step.fetched and step.group == first.group for step in others)
        for client in clients:
            client.close()
        told = planner.role.ask(GetStatus()).content["constructors"]
    assert told["0"]["fetched_bytes"] > 0 and not any(told["1"].values())
