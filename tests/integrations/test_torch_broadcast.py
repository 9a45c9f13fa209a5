"""Four real processes: where a plan broadcasts, every rank of a group gets what the one that fetches has."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh

import overlord as ol
from overlord.integrations.torch_batches import HostCopies, pack
from overlord.integrations.torch_broadcast import Channel, Relay, Sharing
from overlord.integrations.torch_loader import DataLoader
from overlord.roles.client import Batch, RankView

WORLD, STEPS, PATIENCE = 4, 3, datetime.timedelta(seconds=45)

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]  # four processes with torch in each


@dataclass(frozen=True)
class Scenario:
    """A mesh of four ranks and a plan that broadcasts."""

    mesh: dict[str, int]
    broadcast: tuple[str, ...] = ("TP",)
    layout: str = "hf"
    job: str = "ids"
    device_mesh: bool = False
    strategy: str = "backbone_balance"
    order: Callable[[int, int], list[int]] = field(default=lambda rank, count: list(range(count)))
    """Which microbatches a rank looks at, and in what order."""


def at_random(rank: int, count: int) -> list[int]:
    """Other microbatches on every rank, some twice, some not at all; the last one on every rank."""
    return [*np.random.default_rng(rank).integers(0, count, 1 + count // 2).tolist(), -1]


def from_the_end(rank: int, count: int) -> list[int]:
    """All microbatches, the last one first."""
    return list(range(count))[::-1]


def some_not(rank: int) -> list[int]:
    """Only the first, and not on every rank; rank 0 fetches."""
    return [] if rank % 2 else [0]


SCENARIOS = {
    "tp": Scenario({"dp": 2, "tp": 2}),
    "slices": Scenario({"cp": 2, "tp": 2}, job="mixed"),
    "whole": Scenario({"cp": 2, "tp": 2}, ("TP", "CP"), layout="megatron", order=at_random),
    "stages": Scenario({"pp": 2, "tp": 2}, layout="torchtitan", device_mesh=True),
    "images": Scenario({"dp": 2, "tp": 2}, job="mixed", strategy="vlm_hybrid"),
    "hybrid": Scenario({"cp": 2, "tp": 2}, strategy="hdp"),
    "buckets": Scenario({"dp": 2, "tp": 2}, ("DP",), job="mixed", device_mesh=True),
    "everything": Scenario({"dp": 2, "tp": 2}, ("DP", "TP"), job="mixed", strategy="vlm_hybrid", order=at_random),
    "counts": Scenario({"dp": 2, "cp": 2}, ("DP", "CP"), strategy="hdp", order=from_the_end),
}


def split_axes(scenario: Scenario) -> set[str]:
    """The axes along which ranks consume different samples."""
    return {"DP", "CP"} if scenario.strategy == "hdp" else {"DP"}


def strategy_of(scenario: Scenario, broadcast: tuple[str, ...] | None = None) -> Any:
    return getattr(ol.strategies, scenario.strategy)(broadcast=scenario.broadcast if broadcast is None else broadcast)


def facts_of(batch: Any) -> dict[str, Any]:
    """All that a batch holds and knows, in plain words."""
    found = {key: (str(v.dtype).removeprefix("torch."), v.tolist()) for key, v in batch.items() if hasattr(v, "dtype")}
    found |= {key: value for key, value in batch.items() if not hasattr(value, "dtype")}
    meta = batch.meta
    columns = ("cu_seqlens", "source_ids", "segment_offsets", "segment_lengths", "image_positions", "image_rows")
    found |= {f"meta.{name}": np.asarray(getattr(meta, name)).tolist() for name in columns}
    found["meta.samples"] = [str(sample) for sample in meta.sample_ids]
    found["meta.others"] = (meta.source_names, meta.local_cp_size, sorted(batch.chunk(0)))
    return found


def expected_of(scenario: Scenario, job: ol.Job, cache: str) -> list[list[list[dict[str, Any]]]]:
    """What every rank should get: the batches of the rank at the beginning of the axes that are broadcast.

    Along axes where ranks consume different samples it is what they get without that broadcast.
    """
    tree = ol.ClientPlaceTree(**scenario.mesh)
    broadcast = tuple(axis for axis in scenario.broadcast if axis not in split_axes(scenario))
    options = {"mesh": tree, "strategy": strategy_of(scenario, broadcast), "layout": scenario.layout, "cache": cache}
    fetched: dict[int, list[list[dict[str, Any]]]] = {}
    found = []
    with ol.launch(job, runtime="inline", **options) as service:
        for rank in range(WORLD):
            at = tree.coords(rank)
            zero = {axis.lower(): 0 for axis in broadcast}
            first = tree.rank(**{axis: getattr(at, axis) for axis in ("pp", "dp", "cp", "tp")} | zero)
            if first not in fetched:
                steps = zip(range(STEPS), service.client(first), strict=False)
                fetched[first] = [[facts_of(batch) for batch in step.microbatches] for _, step in steps]
            found.append(fetched[first])
    return found


# ---- one rank


def run_scenario(rank: int, scenario: Scenario, job: ol.Job, cache: str) -> dict[str, Any]:
    mesh: Any = ol.ClientPlaceTree(**scenario.mesh)
    if scenario.device_mesh:
        names = tuple(scenario.mesh)
        mesh = init_device_mesh("cpu", tuple(scenario.mesh.values()), mesh_dim_names=names)
    found: dict[str, Any] = {"steps": [], "fetches": [], "encoders": []}
    options = {"mesh": mesh, "strategy": strategy_of(scenario), "layout": scenario.layout, "cache": cache}
    with DataLoader(job, **options) as loader:
        for _, step in zip(range(STEPS), loader, strict=False):
            seen = {at % len(step.microbatches): facts_of(step.microbatches[at])
                    for at in scenario.order(rank, len(step.microbatches))}  # fmt: skip
            found["steps"].append((len(step.microbatches), seen))
            found["fetches"].append(step.fetches)
            found["encoders"].append(None if step.encoder is None else step.encoder["recv_splits"].tolist())
            if step.group is not None:
                found["group"] = dist.get_process_group_ranks(step.group)
                found["patience"] = step.group._get_backend(torch.device("cpu")).options._timeout
                found["own"] = scenario.device_mesh and step.group is mesh.get_group("tp")
            if rank == 0:
                loader.report(step.index, {"loss": 1.0})
        dist.barrier()  # rank 0 has reported
        found["state"] = loader.state_dict()
        dist.barrier()
    loader.close()  # once more
    return found


def skip_some(rank: int, job: ol.Job, cache: str) -> dict[str, Any]:
    """Ranks that look at some microbatches only, and go on; then at one that is not sent any more."""
    strategy, seen = ol.strategies.backbone_balance(broadcast=["TP"]), []
    with DataLoader(job, mesh=ol.ClientPlaceTree(tp=WORLD), strategy=strategy, cache=cache) as loader:
        steps = [step for _, step in zip(range(STEPS), looked_at(loader, rank, seen), strict=False)]
        again = [facts_of(steps[0].microbatches[at]) for at in some_not(rank)]
        with pytest.raises(ol.SpecError, match=r"step 0 is over.*taken the next step without this microbatch"):
            steps[0].microbatches[1]
        seen.append([facts_of(steps[-1].microbatches[1])])
        dist.barrier()
    return {"seen": seen, "again": again}


def looked_at(loader: DataLoader, rank: int, seen: list[Any]) -> Iterator[Any]:
    for step in loader:
        seen.append([facts_of(step.microbatches[at]) for at in some_not(rank)])
        yield step


def a_batch(number: int) -> Batch:
    arrays = {"input_ids": np.full((1, 5), number), "meta.origin": np.zeros((5, 1), np.int64)}
    return Batch(RankView(arrays, {"number": number}), ("a",))


def fail_in_turn(rank: int) -> dict[str, Any]:
    """What cannot be fetched is said on every rank of the group; the next step goes on."""
    channel, copies = Channel(None, 2), HostCopies()

    def fetch(number: int) -> Any:
        if number == 2:
            raise ol.ToleranceError("source 'a' has more bad samples than it may have")
        return pack(a_batch(number))

    def of(count: int) -> Sharing:
        return Sharing({0: count}, 0)

    relay = Relay(channel, copies, (7, of(4), ("a",), None), fetch if rank == 2 else None)
    seen = [relay.take(number)["number"] for number in (1, 0)]
    words = []
    for _ in range(2):
        with pytest.raises(ol.ToleranceError) as caught:
            relay.take(3)
        words.append(str(caught.value))
    relay.finish()
    relay = Relay(channel, copies, (8, of(2), ("a",), None), fetch if rank == 2 else None)
    seen.append(relay.take(1)["number"])
    relay.finish()
    long = channel.broadcast_message(b"x" * 100_000 + b"y" if rank == 2 else None)
    # A rank that is a step behind is told, and does not train on what was meant for another.
    relay = Relay(channel, copies, (9 + (rank == 3), of(1), ("a",), None), fetch if rank == 2 else None)
    try:
        seen.append(relay.take(0)["number"])
    except ol.PlanError as error:
        words.append(str(error))
    return {"seen": seen, "words": words, "long": (len(long), long[-2:])}


def bad_inputs(rank: int, job: ol.Job, cache: str, address: str) -> list[str]:
    """What each wrong argument is answered with, on every rank alike; no rank hangs."""
    tree = ol.ClientPlaceTree(dp=2, tp=2)
    strategy = ol.strategies.backbone_balance(broadcast=["TP"])
    absent = job.replace(sources=[ol.Source("a", "/nowhere/a.jsonl", sample=ol.Text("ids", tokenized=True))])
    odd = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "rows"))
    tries: list[Callable[[], Any]] = [
        lambda: DataLoader(job, mesh=ol.ClientPlaceTree(dp=2)),
        lambda: DataLoader(job, mesh=tree, rank=4),
        lambda: DataLoader(job, mesh=tree, runtime="inline"),
        lambda: DataLoader(job, mesh=odd),
        lambda: next(iter(DataLoader(absent, mesh=tree, cache=cache))),
        lambda: next(iter(DataLoader(address, mesh=ol.ClientPlaceTree(tp=4)))),
        lambda: next(iter(DataLoader(address, rank=rank // 2))),
        lambda: DataLoader(job, mesh=tree).report(0, {"loss": 1.0}),
    ]
    said = []
    for one in tries:
        try:
            one()
            said.append("nothing")
        except ol.OverlordError as error:
            said.append(f"{type(error).__name__}: {error}")
    with DataLoader(job, mesh=tree, strategy=strategy if rank else None, cache=cache) as loader:  # rank 0's counts
        said.append(f"{next(iter(loader)).group}")
        dist.barrier()
    return said


def changing(rank: int, job: ol.Job, cache: str) -> str:
    """A strategy that broadcasts from its second step on is refused where it can be seen."""

    def strategy(buffer: Any, tree: Any) -> Any:
        return ol.strategies.backbone_balance(broadcast=["TP"] if buffer.step else [])(buffer, tree)

    with DataLoader(job, mesh=ol.ClientPlaceTree(dp=2, tp=2), strategy=strategy, cache=cache) as loader:
        steps = iter(loader)
        next(steps)
        try:
            next(steps)
            return "went on"
        except ol.PlanError as error:
            return str(error)
        finally:
            dist.barrier()


def rank_main(rank: int, folder: str, jobs: dict[str, ol.Job], cache: str, address: str) -> None:
    """What one process does: everything in turn."""
    torch.set_num_threads(1)
    where = f"file://{folder}/ranks"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORLD, timeout=PATIENCE)
    found: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        found[name] = run_scenario(rank, scenario, jobs[scenario.job], cache)
    found["skipped"] = skip_some(rank, jobs["ids"], cache)
    found["failing"] = fail_in_turn(rank)
    found["bad"] = bad_inputs(rank, jobs["ids"], cache, address)
    found["changing"] = changing(rank, jobs["ids"], cache)
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- all of them


@pytest.fixture(scope="module")
def jobs(ids_job, mixed_job) -> dict[str, ol.Job]:
    return {"ids": ids_job, "mixed": mixed_job}


@pytest.fixture(scope="module")
def found(jobs, cache, tmp_path_factory) -> list[dict[str, Any]]:
    """What every rank saw in every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    mesh, strategy = ol.ClientPlaceTree(dp=2, tp=2), ol.strategies.backbone_balance(broadcast=["TP"])
    with ol.launch(jobs["ids"], mesh=mesh, strategy=strategy, cache=cache) as service:
        processes.spawn(rank_main, (str(folder), jobs, cache, service.address), nprocs=WORLD)
    return [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rank_gets_what_the_fetching_rank_has(name, found, jobs, cache):
    scenario = SCENARIOS[name]
    expected = expected_of(scenario, jobs[scenario.job], cache)
    tree = ol.ClientPlaceTree(**scenario.mesh)
    looked = 0
    for rank in range(WORLD):
        mine = found[rank][name]
        assert mine["fetches"] == [tree.fetches(rank, scenario.broadcast)] * STEPS
        assert [count for count, _ in mine["steps"]] == [len(step) for step in expected[rank]]
        for (_, seen), step in zip(mine["steps"], expected[rank], strict=True):
            for at, facts in seen.items():
                assert facts == step[at], (rank, at)
                looked += 1
        assert mine["state"] == found[0][name]["state"]
        shared = set(scenario.broadcast) - split_axes(scenario)
        assert ("group" in mine) == bool(shared)
        if shared:
            at = tree.coords(rank)
            alike = {axis for axis in ("pp", "dp", "cp", "tp") if axis.upper() not in shared}
            same = [r for r in range(WORLD) if all(getattr(tree.coords(r), a) == getattr(at, a) for a in alike)]
            assert mine["group"] == same
            assert mine["own"] == scenario.device_mesh
            assert mine["own"] or mine["patience"] == PATIENCE  # groups of our own wait as long as the world's
        for splits in mine["encoders"]:
            # What it encodes is each rank's own, also where its tokens come by broadcast: these ranks get no rows.
            assert (splits is not None) == (scenario.strategy == "vlm_hybrid")
            assert splits is None or tree.fetches(rank, shared) or not any(splits)
    assert looked >= WORLD * STEPS


def test_slices_and_stages_are_each_ranks_own(found):
    def keys(name, rank):
        return set(found[rank][name]["steps"][0][1][0])

    assert "labels" in keys("stages", 3) and "labels" not in keys("stages", 1)
    first = [found[rank]["slices"]["steps"][0][1][0]["input_ids"] for rank in range(WORLD)]
    assert first[0] == first[1] != first[2] == first[3]
    whole = [found[rank]["whole"]["steps"][0][1] for rank in range(WORLD)]
    last = max(whole[0])
    assert len({str(seen[last]["tokens"]) for seen in whole}) == 1
    assert any("pixel_values" in batch for _, seen in found[1]["slices"]["steps"] for batch in seen.values())


def test_microbatches_that_nobody_looks_at_are_passed_over(found, jobs, cache):
    expected = expected_of(Scenario({"tp": WORLD}), jobs["ids"], cache)[0]
    for rank in range(WORLD):
        mine, looks = found[rank]["skipped"], some_not(rank)
        assert mine["seen"] == [*([step[at] for at in looks] for step in expected), [expected[-1][1]]]
        assert mine["again"] == mine["seen"][0]


def test_what_fails_on_the_fetching_rank_is_said_on_all(found):
    for rank in range(WORLD):
        mine = found[rank]["failing"]
        assert mine["words"][:2] == ["source 'a' has more bad samples than it may have"] * 2
        assert mine["seen"] == [1, 0, 1] + [0] * (rank != 3)
        assert mine["long"] == (100_001, b"xy")
        assert len(mine["words"]) == 2 + (rank == 3)
    assert "microbatch 0 of step 9 was broadcast where microbatch 0 of step 10 was expected" in mine["words"][2]


def test_wrong_arguments_are_answered_on_every_rank(found):
    words = [
        ["SpecError", "has 2 ranks but the world has 4"],
        ["SpecError", "rank 4 is not in the mesh"],
        ["SpecError", "runtime is 'inline'", "4; they would each", "'local' or 'ray'"],
        ["SpecError", "unknown dimension 'rows'"],
        ["SourceError", "/nowhere/a.jsonl"],
        ["SpecError", "mesh is pp=1 dp=1 cp=1 tp=4, but the service at unix://", "dp=2"],
        ["SpecError", "several processes have rank 0 of the mesh"],
        ["SpecError", "reported before this loader's first step"],
    ]
    for rank in range(WORLD):
        said = found[rank]["bad"]
        assert len(said) == len(words) + 1
        for text, parts in zip(said, words, strict=False):
            assert all(part in text for part in parts), (rank, text)
        assert said[-1] == "None"
    assert found[0]["changing"] == found[2]["changing"] == "went on"
    for rank in (1, 3):
        assert "step 1 is broadcast along other axes than the first step, which was nowhere" in found[rank]["changing"]
