"""DataLoader as a Stateful of torch.distributed.checkpoint: saved by two ranks, loaded by four, or by one."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes

import overlord as ol
from overlord.integrations.torch_loader import DataLoader

pytestmark = pytest.mark.timeout(200)  # processes that import torch, on a machine that may be busy


def samples_of(loader: DataLoader, steps: int) -> list[list[str]]:
    """The samples that this rank sees in each of the next steps."""
    taken = zip(range(steps), loader, strict=False)
    return [sorted({str(s) for b in step.microbatches for s in b.meta.sample_ids if s.source}) for _, step in taken]


def union(ranks: list[list[list[str]]]) -> list[list[str]]:
    return [sorted(set().union(*step)) for step in zip(*ranks, strict=True)]


def rank_main(rank: int, world: int, folder: str, job: ol.Job, cache: str) -> None:
    """Two ranks train and save; four load and go on."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    where = f"file://{folder}/ranks-{world}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=limit)
    model = {"weight": torch.arange(4.0) if world == 2 else torch.zeros(4)}
    with DataLoader(job, mesh=ol.ClientPlaceTree(dp=world), cache=cache) as loader:
        if world == 2:
            for step in loader:
                if rank == 0:
                    loader.report(step.index, {"loss/a": 2.5})
                if step.index == 2:
                    break
            dist.barrier()
            dcp.save({"model": model, "data": loader}, checkpoint_id=f"{folder}/checkpoint")
        else:
            dcp.load({"model": model, "data": loader}, checkpoint_id=f"{folder}/checkpoint")
        state = json.loads(loader.state_dict()["stream"])
        seen = samples_of(loader, 3)
        dist.barrier()
    Path(folder, f"{world}-{rank}.json").write_text(json.dumps([state, seen, model["weight"].tolist()]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_save_and_four_go_on(ids_job, cache, tmp_path):
    found: dict[int, list[Any]] = {}
    for world in (2, 4):
        processes.spawn(rank_main, (world, str(tmp_path), ids_job, cache), nprocs=world)
        found[world] = [json.loads((tmp_path / f"{world}-{rank}.json").read_text()) for rank in range(world)]
    states = [state for ranks in found.values() for state, _, _ in ranks]
    assert all(state == states[0] for state in states)
    assert states[0]["step"] == 3 and states[0]["reports"]["2"] == {"loss/a": 2.5}
    assert all(weights == [0.0, 1.0, 2.0, 3.0] for _, _, weights in found[4])
    seen = {world: union([seen for _, seen, _ in ranks]) for world, ranks in found.items()}
    assert seen[2] == seen[4] and all(seen[2])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_needs_no_process_group(ids_job, cache, tmp_path):
    with DataLoader(ids_job, runtime="inline", cache=cache) as loader:
        samples_of(loader, 2)
        dcp.save({"data": loader}, checkpoint_id=tmp_path / "one")
        expected = samples_of(loader, 2)
    with DataLoader(ids_job, runtime="inline", cache=cache) as fresh:
        dcp.load({"data": fresh}, checkpoint_id=tmp_path / "one")
        assert samples_of(fresh, 2) == expected


def test_a_stream_that_has_not_begun_is_not_launched_to_tell_its_state(ids_job, cache, monkeypatch):
    loader = DataLoader(ids_job, runtime="inline", cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr("overlord.session.launch", lambda *_, **__: pytest.fail("launched"))
        begin = loader.state_dict()
        assert set(begin) == {"stream"} and isinstance(begin["stream"], str)
        loader.load_state_dict(begin)
        assert loader.state_dict() == begin
    with loader:
        first = samples_of(loader, 2)
        later = loader.state_dict()
        third = samples_of(loader, 1)
        loader.load_state_dict(begin)  # from the beginning, also after some steps
        assert samples_of(loader, 2) == first
        loader.load_state_dict(json.loads(later["stream"]))  # the stream's own state, as a client gives it
        assert loader.state_dict() == later
        assert samples_of(loader, 1) == third
    for use in (loader.state_dict, lambda: next(iter(loader)), lambda: loader.report(0, {"loss": 1.0})):
        with pytest.raises(ol.ClosedError, match=r"this loader is closed.*load it into a loader"):
            use()
    loader.load_state_dict(later)
    assert samples_of(loader, 1) == third
    loader.close()
    loader.close()


@pytest.mark.parametrize("state", [{"stream": "{"}, {"stream": 3}, {"stream": "[1]"}, {"step": 3}, [], "latest"])
def test_what_is_no_state_is_refused_at_once(state, ids_job):
    with pytest.raises(ol.StateError, match=r"is not a state of overlord.*state_dict\(\) of a DataLoader or a client"):
        DataLoader(ids_job).load_state_dict(state)
