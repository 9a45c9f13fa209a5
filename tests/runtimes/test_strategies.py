"""Strategies on real files: every rank gets its part, whatever the strategy, on all runtimes alike."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from tests.conftest import slice_indices

import overlord as ol
from overlord.testing import digest_service

SLOW = pytest.mark.slow_on_ray
MESH = ol.ClientPlaceTree(dp=2, cp=4)
STRATEGIES = {
    "vanilla": ol.strategies.vanilla(),
    "hdp": ol.strategies.hdp(),
    "hdp equal": ol.strategies.hdp(equal_counts=True),
    "vlm": ol.strategies.vlm_hybrid(split=True, broadcast=("TP",)),
    "long short": ol.strategies.long_short(),
    "by stages": ol.strategies.curriculum([(0, ol.strategies.vanilla()), (2, ol.strategies.hdp())]),
}


def tokens_by_sample(job, mesh, strategy, cache, steps, runtime="inline"):
    """Rebuild every sample from the slices of all ranks: {(step, sample, offset): token ids}."""
    found: dict = defaultdict(dict)
    with ol.launch(job, mesh=mesh, strategy=strategy, runtime=runtime, cache=cache) as service:
        for rank in range(mesh.world_size):
            with service.client(rank) as client:
                for step in client:
                    plan = service.plan_raw(step.index)
                    bucket = mesh.bucket_of(plan.axis, rank)
                    assert len(step.microbatches) == plan.microbatch_counts[bucket]
                    for number, batch in enumerate(step.microbatches):
                        collect(found, plan, mesh, rank, bucket, number, step.index, batch)
                    if step.index + 1 == steps:
                        break
    return {key: [ids[i] for i in range(len(ids))] for key, ids in found.items()}


def collect(found, plan, mesh, rank, bucket, number, step, batch):
    of, mine = batch.meta.local_cp_size, mesh.coords(rank).cp
    if plan.first_ranks is not None and (chosen := plan.bin_range(bucket, number)).stop > chosen.start:
        mine = bucket - int(plan.first_ranks[chosen.start])
    if mesh.coords(rank).pp:  # a later stage has the microbatches of the first, without their tokens
        assert "input_ids" not in batch
        drawn = plan.bin(bucket, number).sample
        assert not len(drawn) or list(batch.meta.sample_ids) == [plan.draw.sample_id(int(one)) for one in drawn]
        return
    cu = batch["cu_seq_lens_q"]
    where = slice_indices(cu, of, mine) if of > 1 else np.arange(int(cu[-1]))
    assert batch["input_ids"].shape == (1, len(where))
    segment = np.searchsorted(cu, where, side="right") - 1
    lengths, offsets = batch.meta.segment_lengths, batch.meta.segment_offsets
    for place, one, token in zip((where - cu[segment]).tolist(), segment.tolist(), batch["input_ids"][0], strict=True):
        if place < lengths[one]:
            key = (step, batch.meta.sample_ids[one], int(offsets[one]))
            assert place not in found[key], "two ranks got the same token"
            found[key][place] = int(token)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_slices_of_all_ranks_make_every_sample(name, ids_job, cache):
    job = ids_job.replace(batch=ol.Batch(32, global_samples=40, microbatch_tokens=64))
    expected = tokens_by_sample(job, ol.ClientPlaceTree(), None, cache, 3)
    assert tokens_by_sample(job, MESH, STRATEGIES[name], cache, 3) == expected


@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2, "cp": 3}, {"equal_counts": True}),
        ({"cp": 6}, {}),
        ({"pp": 2, "dp": 2, "cp": 3}, {}),
    ],
    ids=str,
)
def test_blocks_of_any_number_of_ranks_make_every_sample(mesh, options, runtime, ids_job, cache):
    job = ids_job.replace(batch=ol.Batch(36, global_samples=40))
    tree, strategy = ol.ClientPlaceTree(**mesh), ol.strategies.hdp(blocks="any", **options)
    expected = tokens_by_sample(job, ol.ClientPlaceTree(), None, cache, 2)
    assert tokens_by_sample(job, tree, strategy, cache, 2, runtime) == expected
    with ol.launch(job, mesh=tree, strategy=strategy, runtime="inline", cache=cache) as service:
        assert 3 in service.plan_raw(0).cp_sizes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("hdp", marks=pytest.mark.slow_on_ray),
        "vlm",
        pytest.param("by stages", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("where", ["local", pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
@pytest.mark.slow_on_ray
def test_all_runtimes_deliver_the_same(name, mixed_job, cache, where):
    found = []
    for options in ({"runtime": "inline"}, where):
        with ol.launch(mixed_job, mesh=MESH, strategy=STRATEGIES[name], **options, cache=cache) as service:
            found.append(digest_service(service, steps=4))
    assert found[0] == found[1]


def test_the_order_does_not_depend_on_the_strategy(mixed_job, cache):
    orders = set()
    for strategy in STRATEGIES.values():
        with ol.launch(mixed_job, mesh=MESH, strategy=strategy, runtime="inline", cache=cache) as service:
            orders.add(digest_service(service, steps=3).order)
    assert len(orders) == 1


@pytest.mark.slow_on_ray
def test_ranks_that_get_a_broadcast_fetch_nothing(where, ids_job, cache):
    mesh = ol.ClientPlaceTree(dp=2, cp=2, tp=2)
    strategy = ol.strategies.backbone_balance(broadcast=("TP", "CP"))
    with ol.launch(ids_job, mesh=mesh, strategy=strategy, **where, cache=cache) as service:
        for rank in range(mesh.world_size):
            with service.client(rank) as client:
                step = next(client)
                batch = step.microbatches[0]
                assert step.fetches is (rank in (0, 4))
                assert len(batch.meta.sample_ids) > 0 if step.fetches else dict(batch) == {}
                if step.fetches:  # the first rank broadcasts along CP, so it holds the whole sequence
                    assert batch["input_ids"].shape[1] == batch["cu_seq_lens_q"][-1]
                    assert batch.meta.local_cp_size == 1


def test_a_strategy_of_ones_own(ids_job, cache):
    def halves(buffer, tree):
        return ol.plan_raw(buffer, tree, bucket=np.arange(len(buffer)) % 2)

    job = ids_job.replace(overlength="truncate", batch=ol.Batch(32, global_samples=4, microbatch_tokens=128))
    with ol.launch(job, mesh=ol.ClientPlaceTree(dp=2), strategy=halves, cache=cache) as service:
        step = next(service.client(rank=1))
        assert len(step.microbatches) == 1 and len(step.microbatches[0].meta.sample_ids) == 2


def broken(buffer, tree):
    return {}["nothing"]


def losing(buffer, tree):
    graph = ol.DGraph.from_buffer(buffer, tree).where(np.arange(len(buffer)) > 0)
    return graph.distribute("DP").cost(ol.costs.tokens).balance("greedy").plan()


@pytest.mark.slow_but_inline
def test_a_wrong_strategy_is_explained_before_anything_runs(where, ids_job, cache):
    job = ids_job.replace(overlength="truncate")
    for strategy, message in (
        (broken, r"the strategy broken failed at step 0: KeyError.*\(test_strategies.py:\d+\)"),
        (losing, "1 samples are lost"),
        (lambda buffer, tree: 5, "returned int, not a plan"),
    ):
        with pytest.raises(ol.PlanError, match=message):
            ol.launch(job, strategy=strategy, **where, cache=cache)
    with pytest.raises(ol.SpecError, match=r"Call it: ol\.strategies\.hdp\(\)"):
        ol.launch(job, strategy=ol.strategies.hdp, cache=cache)
    with pytest.raises(ol.SpecError, match=r"there is no strategy 'hdq'.* Did you mean 'hdp'"):
        ol.launch(job, strategy="hdq", cache=cache)
