"""`step.global_loss_tokens` is the number of labels that all ranks get, whatever is wrong with the data."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.law.test_bad_data import jpeg
from tests.runtimes.test_many_hosts import hosts_of

import overlord as ol

STEPS = 6


@pytest.fixture(scope="module")
def broken_job(tmp_path_factory, demo_files) -> ol.Job:
    """Texts with wrong lengths in their column, texts that are cut or do not decode, and images that do not."""
    folder = tmp_path_factory.mktemp("broken")
    rng = np.random.default_rng(3)
    rows = [
        {"ids": [1000 + i] * int(n), "n": int(n + d)}
        for i, (n, d) in enumerate(rng.integers((2, -1), (90, 9), (60, 2)))
    ]
    (folder / "lies.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    wild = [{"ids": [-5 if i % 5 == 0 else 7] * int(n), "n": int(n)} for i, n in enumerate(rng.integers(4, 30, 60))]
    (folder / "wild.jsonl").write_text("\n".join(json.dumps(row) for row in wild))
    good = [jpeg(64, 64, seed) for seed in range(40)]
    images = [one[: len(one) // 3] if i % 3 == 0 else one for i, one in enumerate(good)]
    pq.write_table(pa.table({"jpg": images, "txt": ["a picture of something"] * 40}), folder / "images.parquet")
    ids = ol.Text("ids", tokenized=True)
    return ol.Job(
        sources=[
            ol.Source("lies", str(folder / "lies.jsonl"), sample=ids, lengths="n", tolerance=1),
            ol.Source("wild", str(folder / "wild.jsonl"), sample=ids, lengths="n", tolerance=1),
            ol.Source("images", str(folder / "images.parquet"), sample=ol.ImageText("jpg", "txt"), tolerance=1),
        ],
        tokenizer=str(demo_files.tokenizer),
        overlength="split",
        batch=ol.Batch(32, global_samples=12),
    )


def labels_of(step, layout) -> int:
    if layout == "hf":
        keys = [batch.get("shift_labels", batch.get("labels")) for batch in step.microbatches]
        return sum(int((labels != -100).sum()) for labels in keys if labels is not None)
    return sum(int(batch["loss_mask"].sum()) for batch in step.microbatches if "loss_mask" in batch)


def counted(clients, layout="hf", copies=1) -> list[tuple[int, int]]:
    """Return (labels promised, labels delivered) of the first steps, over the given ranks."""
    found = []
    for _ in range(STEPS):
        steps = [next(client) for client in clients]
        promised = {step.global_loss_tokens for step in steps}
        assert len(promised) == 1, "ranks would divide their loss by different numbers"
        found.append((promised.pop(), sum(labels_of(step, layout) for step in steps) // copies))
    return found


def last_stage(tree) -> list[int]:
    """Return the ranks that compute the loss."""
    return [rank for rank in range(tree.world_size) if tree.coords(rank).pp == tree.pp - 1]


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("placement", ["loader", pytest.param("constructor", marks=pytest.mark.slow_but_inline)])
def test_it_is_what_is_delivered_where_data_are_broken(broken_job, cache, where, placement):
    tree = ol.ClientPlaceTree(dp=2)
    with ol.launch(broken_job, mesh=tree, cache=cache, placement=placement, **where) as service:
        found = counted([service.client(rank) for rank in range(2)])
        planned = [service.plan_raw(step).global_loss_tokens for step in range(STEPS)]
        bad = {name: source["bad"] for name, source in service.status()["sources"].items()}
    assert all(promised == delivered > 0 for promised, delivered in found)
    assert all(promised < measured for (promised, _), measured in zip(found, planned, strict=True))
    assert bad["images"] and bad["wild"]


@pytest.mark.parametrize("placement", ["loader", "constructor"])
def test_one_rank_alone_is_told_the_same(broken_job, cache, placement):
    """No other rank is attached, and the images of the others are not decoded."""
    tree = ol.ClientPlaceTree(dp=4)
    for runtime in ("inline", "local"):
        with ol.launch(broken_job, mesh=tree, cache=cache, placement=placement, runtime=runtime) as service:
            alone = [next(client).global_loss_tokens for client in [service.client(2)] for _ in range(STEPS)]
            assert alone == [promised for promised, _ in counted([service.client(rank) for rank in range(4)])]


@pytest.mark.parametrize(
    ("mesh", "strategy", "layout"),
    [
        ("dp=2,cp=2", None, "hf"),
        pytest.param("dp=1,cp=2,tp=2", None, "megatron", marks=pytest.mark.slow),
        pytest.param("pp=2,dp=2", None, "hf", marks=pytest.mark.slow),
        pytest.param("dp=4", ol.strategies.vlm_hybrid(split=True), "hf", marks=pytest.mark.slow),
        ("dp=2,cp=2", ol.strategies.hdp(), "hf"),
    ],
)
def test_it_holds_on_every_mesh_and_on_several_hosts(broken_job, tmp_path, cache, mesh, strategy, layout):
    tree = ol.ClientPlaceTree.parse(mesh)
    options = {"mesh": tree, "strategy": strategy, "layout": ol.Layout(keys=layout)}
    with ol.launch(broken_job, runtime="inline", cache=cache, **options) as service:
        found = counted([service.client(rank) for rank in last_stage(tree)], layout, copies=tree.tp)
    assert all(promised == delivered > 0 for promised, delivered in found)
    with hosts_of(broken_job, tmp_path, cache, ranks_per_host=2, loader_hosts=2, **options) as (service, _, _):
        everywhere = counted([service.client(rank) for rank in range(tree.world_size)], layout)
        assert [promised for promised, _ in everywhere] == [promised for promised, _ in found]
        state = service.client(0).state_dict()
    with ol.launch(broken_job, runtime="inline", cache=cache, state=state, **options) as service:
        resumed = [next(client).global_loss_tokens for client in [service.client(0)] for _ in range(2)]
    with ol.launch(broken_job, runtime="inline", cache=cache, **options) as service:
        steps = [step.global_loss_tokens for step, _ in zip(service.client(0), range(STEPS + 2), strict=False)]
    assert resumed == steps[state["step"] : state["step"] + 2]


@pytest.mark.parametrize("placement", ["loader", "constructor"])
def test_a_host_whose_neighbour_has_no_trainers_is_told_the_same(broken_job, tmp_path, cache, placement):
    tree = ol.ClientPlaceTree(dp=2)
    with ol.launch(broken_job, mesh=tree, runtime="inline", cache=cache) as service:
        expected = [step.global_loss_tokens for step, _ in zip(service.client(0), range(STEPS), strict=False)]
    options = {"mesh": tree, "ranks_per_host": 1, "loader_hosts": 2, "placement": placement}
    with hosts_of(broken_job, tmp_path, cache, **options) as (service, _, loaders):
        for rank in (1, 0):
            client = service.client(rank)
            assert [next(client).global_loss_tokens for _ in range(STEPS)] == expected
            client.close()
        where = {source["decoded_in"] for peer in loaders for source in peer.role._fleet.status().values()}
        assert placement in where


def test_a_sample_that_is_in_two_places_counts_once(tmp_path, cache):
    """The 35 of 40 labels of a short sample, and of one that is cut in pieces."""
    rows = [{"ids": [7] * 16, "n": 21}, {"ids": [8] * 21, "n": 21}]
    (tmp_path / "s.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    job = ol.Job(
        sources=[
            ol.Source("s", str(tmp_path / "s.jsonl"), sample=ol.Text("ids", tokenized=True), lengths="n", tolerance=1)
        ],
        mixture=ol.Mixture(stopping="all_exhausted_without_replacement"),
        batch=ol.Batch(64, global_samples=2),
    )
    with ol.launch(job, runtime="inline", cache=cache) as service:
        assert [step.global_loss_tokens for step in service.client()] == [35]
