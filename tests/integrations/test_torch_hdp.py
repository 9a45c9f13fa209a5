"""Plans of hybrid data parallelism train on real processes as one process trains on the whole sequences."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import overlord as ol
from overlord.core.messages import Payload
from overlord.core.plan import LoadingPlan
from overlord.core.ragged import Ragged
from overlord.errors import PlanError, ServiceLost, SpecError
from overlord.integrations.torch_batches import TorchStep
from overlord.integrations.torch_hdp import HybridParallel
from overlord.integrations.torch_loader import DataLoader
from overlord.integrations.torch_ring import ring_attention
from overlord.planning.checking import run_strategy
from overlord.roles.client import Batch, Microbatches, Place, RankView, Step
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.transforms.microbatches.per_microbatch import MediaShape, PackingJob
from overlord.transforms.microbatches.step_samples import Opening

WORLD, CONTEXT, VOCABULARY, RATE = 4, 64, 61, 0.3
WRAPPERS = ("replicated", "zero1", "fsdp2")

pytestmark = pytest.mark.timeout(400)  # four processes with torch in each, on a machine that may be busy


# ---- a model whose attention is a parameter


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * groups * self.size)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.size))
        k, v = self.kv(x).unflatten(-1, (-1, self.size)).chunk(2, dim=1)
        x = x + self.out(attend(q, k.contiguous(), v.contiguous()).flatten(1))
        return x + self.down(torch.tanh(self.up(x)))


class TinyLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embed, self.place = nn.Embedding(VOCABULARY, 16), nn.Embedding(CONTEXT, 16)
        self.layers = nn.ModuleList(Layer(16, heads=4, groups=2) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, ids: Tensor, positions: Tensor, attend: Any = ring_attention) -> Tensor:
        x = self.embed(ids) + self.place(positions)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x)


def summed_loss(model: nn.Module, batch: Any, attend: Any = ring_attention) -> Tensor:
    ids, positions = batch["input_ids"].view(-1), batch["position_ids"].view(-1)
    if "shift_labels" in batch:
        labels = batch["shift_labels"].view(-1)
    else:
        labels = torch.cat([batch["labels"].view(-1)[1:], torch.tensor([-100])])
    return nn.functional.cross_entropy(model(ids, positions, attend), labels, ignore_index=-100, reduction="sum")


def dense_in(cu: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention written down, over whole segments."""
    segment = torch.as_tensor(np.repeat(np.arange(len(cu) - 1), np.diff(cu)))
    place = torch.arange(len(segment))
    seen = (segment[:, None] == segment) & (place[:, None] >= place)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    return attend


# ---- the stream


def long_job(folder: Path) -> ol.Job:
    """Few long sequences, many short ones."""
    rng = np.random.default_rng(2)
    for source in ("a", "b"):
        lengths = np.minimum(np.exp(rng.normal(2.2, 1.0, 60)) + 2, 100).astype(int)
        rows = [json.dumps({"ids": rng.integers(1, VOCABULARY, n).tolist()}) for n in lengths.tolist()]
        (folder / f"{source}.jsonl").write_text("\n".join(rows) + "\n")
    return ol.Job(
        sources=[
            ol.Source(name, str(folder / f"{name}.jsonl"), sample=ol.Text("ids", tokenized=True)) for name in "ab"
        ],
        batch=ol.Batch(CONTEXT, global_samples=8, microbatch_tokens=CONTEXT),
        overlength="split",
        seed=5,
    )


PHASES = [({"cp": 4}, {}, 2), ({"dp": 2, "cp": 2}, {}, 1), ({"cp": 4}, {"equal_counts": True}, 1)]
"""Meshes, options of hdp(), and steps: each phase resumes from the state of the one before."""


def alone(job: ol.Job, cache: str) -> tuple[list[Tensor], Tensor]:
    """Gradients and weights of one process with whole sequences."""
    model, gradients = TinyLM(), []
    with ol.launch(job, runtime="inline", cache=cache) as service:
        for step in service.client(0):
            for batch in step.microbatches:
                tensors = {key: torch.tensor(batch[key]) for key in ("input_ids", "position_ids", "labels")}
                attend = dense_in(batch["cu_seq_lens_q"])
                (summed_loss(model, tensors, attend) / step.global_loss_tokens).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            torch.optim.SGD(model.parameters(), RATE).step()
            model.zero_grad()
            if step.index + 1 == sum(steps for *_, steps in PHASES):
                break
    return gradients, torch.cat([p.detach().flatten() for p in model.parameters()])


def wrapped(name: str) -> tuple[nn.Module, Any]:
    model = TinyLM()
    if name == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    if name == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=RATE)
    return model, torch.optim.SGD(model.parameters(), RATE)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().flatten()


def train_phases(rank: int, job: ol.Job, cache: str) -> dict[str, Any]:
    """Train three models, one in each wrapper, on the same steps."""
    models = {name: wrapped(name) for name in WRAPPERS}
    found: dict[str, Any] = {name: [] for name in WRAPPERS}
    groups, made_late = dist.distributed_c10d._world.pg_map, 0  # all of this process, whichever call has made them
    state, counts, shared = None, [], set()
    for mesh, options, steps in PHASES:
        strategy = ol.strategies.hdp(**options)
        with DataLoader(
            job, mesh=ol.ClientPlaceTree(**mesh), strategy=strategy, runtime="local", cache=cache
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            hdp = HybridParallel(loader)
            there = len(groups)
            for number, step in enumerate(loader):
                counts.append(len(step.microbatches))
                for name, (model, optimizer) in models.items():
                    for batch in hdp.microbatches(step, model):
                        shared.add(len(batch.meta.ranks))
                        hdp.backward(summed_loss(model, batch))
                    found[name].append(torch.cat([whole(p.grad) for p in model.parameters()]))
                    optimizer.step()
                    optimizer.zero_grad()
                if number + 1 == steps:
                    break
            made_late += len(groups) - there
            state = loader.state_dict()
            dist.barrier()
    weights = {name: torch.cat([whole(p) for p in model.parameters()]) for name, (model, _) in models.items()}
    return {"gradients": found, "weights": weights, "counts": counts, "shared": shared, "groups": made_late}


@pytest.mark.slow
def test_three_wrappers_train_as_one_process_and_resume_on_another_mesh(tmp_path, cache):
    job = long_job(tmp_path)
    expected, weights = alone(job, str(cache))
    found = run_ranks(train_phases, WORLD, tmp_path / "ranks", job, str(cache))
    largest = max(float(one.abs().max()) for one in expected)
    for rank in found:
        for name in WRAPPERS:
            for got, wanted in zip(rank["gradients"][name], expected, strict=True):
                assert float((got - wanted).abs().max()) < 1e-9 * largest, name
            torch.testing.assert_close(rank["weights"][name], weights, rtol=1e-9, atol=1e-12)
        assert rank["groups"] == 0, "no group is made once training has begun"
    assert {size for rank in found for size in rank["shared"]} == {1, 2, 4}
    free, equal = ([rank["counts"][step] for rank in found] for step in (0, 3))
    assert any(len({rank["counts"][step] for rank in found}) > 1 for step in range(3)), free
    assert len(set(equal)) == 1


# ---- random plans


class Handed:
    """Loaders of one payload."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def loader_do_plan(self, plan: LoadingPlan, ranks: Any) -> Callable[[], list[Payload]]:
        return lambda: [self._payload]

    def note_faults(self, faults: Any) -> None:
        raise AssertionError(faults)


def made_step(lengths: list[int], mesh: ol.ClientPlaceTree, rank: int, index: int = 0, **options: Any) -> TorchStep:
    """A step of random tokens, planned and packed by the real parts."""
    rng = np.random.default_rng(index)
    tokens = [rng.integers(1, VOCABULARY, n).astype(np.int32) for n in lengths]
    payload = Payload(index, 0, Ragged.from_rows(tokens, np.int32), Ragged.from_rows([t > 0 for t in tokens], np.uint8))
    buffer = ol.summary_buffer({"a": lengths}, context_length=CONTEXT, microbatch_tokens=CONTEXT, step=index)
    strategy = options.pop("strategy", None) or ol.strategies.hdp(**options)
    plan = run_strategy(strategy, buffer, mesh)
    packing = PackingJob(ol.Layout(), MediaShape(12, 2), Opening([None], SerialWorkers()))
    constructor = DataConstructor(Handed(payload), packing)
    samples, bucket, place = constructor.gather(plan)(), mesh.bucket_of(plan.axis, rank), Place(mesh, rank)

    def fetch(microbatch: int) -> Batch:
        packed = constructor.constructor_do_plan(plan, samples, bucket, microbatch, lambda n: np.empty(n, np.uint8))
        names, scalars = constructor.view_of(rank, plan, packed)
        arrays = packed.named()
        return Batch(RankView({key: arrays[name] for key, name in names.items()}, scalars), ("a",), place)

    header = constructor.header_of(rank, plan, sum(n - 1 for n in lengths))
    return TorchStep(Step(header, Microbatches(fetch, header.num_microbatches), ("a",), None, place))


def random_lengths(seed: int) -> list[int]:
    """From one sequence, so that most ranks have nothing, to many; from all short to all over four ranks."""
    rng = np.random.default_rng(seed)
    count, spread = int(rng.integers(1, 14)), float(rng.uniform(0.2, 1.6))
    return np.clip(np.exp(rng.normal(2.5, spread, count)), 2, CONTEXT).astype(int).tolist()


def sleepy(
    rank: int, seeds: range, most: float, name: str, options: dict[str, Any]
) -> tuple[list[Tensor], set[tuple[int, ...]]]:
    """Gradients of random plans, with random sleeps before forward and backward of every microbatch."""
    mesh, rng = ol.ClientPlaceTree(cp=WORLD), np.random.default_rng(100 + rank)
    hdp, (model, _) = HybridParallel(SimpleNamespace(mesh=mesh, rank=rank, device=torch.device("cpu"))), wrapped(name)
    found, rings = [], set()
    for seed in seeds:
        step = made_step(random_lengths(seed), mesh, rank, seed, **options)
        for batch in hdp.microbatches(step, model):
            rings.add(batch.meta.ranks)
            time.sleep(rng.uniform(0, most))
            loss = summed_loss(model, batch)
            time.sleep(rng.uniform(0, most))
            hdp.backward(loss)
        found.append(torch.cat([whole(p.grad) for p in model.parameters()]))
        model.zero_grad()
    return found, rings


def expected_gradients(seeds: range) -> Iterator[Tensor]:
    mesh, model = ol.ClientPlaceTree(), TinyLM()
    for seed in seeds:
        step = made_step(random_lengths(seed), mesh, 0, seed, strategy=ol.strategies.vanilla())
        for batch in step.microbatches:
            (summed_loss(model, batch, dense_in(batch["cu_seq_lens_q"])) / step.global_loss_tokens).backward()
        yield torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()


@pytest.mark.parametrize(
    ("name", "count", "most", "options"),
    [
        pytest.param("fsdp2", 24, 0.005, {}, marks=pytest.mark.slow),
        pytest.param("fsdp2", 24, 0.005, {"objective": "lockstep", "blocks": "any"}, marks=pytest.mark.slow),
        pytest.param("fsdp2", 200, 0.05, {}, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
        pytest.param("fsdp2", 200, 0.05, {"blocks": "any"}, marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
        pytest.param("replicated", 200, 0.05, {}, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
    ids=str,
)
def test_random_plans_end_and_agree_whatever_the_speed_of_ranks(name, count, most, options, tmp_path):
    seeds = range(count)
    found = run_ranks(sleepy, WORLD, tmp_path, seeds, most, name, options)
    for number, expected in enumerate(expected_gradients(seeds)):
        for gradients, _ in found:
            assert float((gradients[number] - expected).abs().max()) < 1e-9 * float(expected.abs().max())
    sizes = {len(ring) for _, rings in found for ring in rings}
    assert sizes == ({1, 2, 3, 4} if options.get("blocks") == "any" else {1, 2, 4})


@pytest.mark.parametrize(
    ("mesh", "options", "least"),
    [
        ("cp=4", {}, 10),
        ("dp=2,cp=3", {"blocks": "any"}, 0),  # rounds hardly ever need a dummy
        pytest.param("dp=4,cp=2", {"objective": "lockstep", "blocks": "any"}, 0, marks=pytest.mark.slow),
        pytest.param("pp=2,dp=4,cp=2", {}, 0, marks=pytest.mark.slow),
        ("pp=2,dp=2,cp=2,vpp=2", {"objective": "sum"}, 10),
    ],
    ids=str,
)
def test_a_rank_does_not_end_with_a_microbatch_that_others_go_on_after(mesh, options, least):
    """Otherwise sharded gradients would wait in a circle: see `_meeting_counts`."""
    tree, added = ol.ClientPlaceTree.of(mesh), 0
    for seed in range(40):
        steps = [made_step(random_lengths(seed), tree, rank, seed, **options) for rank in range(tree.world_size)]
        counts = [len(step.microbatches) for step in steps]
        for step, count in zip(steps, counts, strict=True):
            assert count and count % tree.microbatch_multiple == 0
            orders = [batch.meta.order for batch in step.microbatches]
            assert orders == sorted(set(orders))
            batch = step.microbatches[count - 1]
            assert [counts[rank] for rank in batch.meta.ranks] == [count] * len(batch.meta.ranks)
            added += batch.meta.dummy
    assert added >= least


# ---- what cannot be trained, and ranks that end


def one_rank(mesh: ol.ClientPlaceTree) -> HybridParallel:
    return HybridParallel(SimpleNamespace(mesh=mesh, rank=0, device=torch.device("cpu")))


def test_one_process_needs_no_group_and_learns_the_same():
    mesh, model = ol.ClientPlaceTree(), TinyLM()
    step = made_step(random_lengths(3), mesh, 0, 3)
    hdp = one_rank(mesh)
    for batch in hdp.microbatches(step, model):
        hdp.backward(summed_loss(model, batch))
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float((found - next(expected_gradients(range(3, 4)))).abs().max()) < 1e-12
    with torch.no_grad():
        assert sum(float(summed_loss(model, batch)) for batch in hdp.microbatches(step)) > 0


def test_wrong_use_is_refused():
    mesh, model = ol.ClientPlaceTree(), TinyLM()
    hdp, step = one_rank(mesh), made_step([5, 9], mesh, 0)
    with pytest.raises(SpecError, match=r"taken without hdp.backward\(loss\)"):
        list(hdp.microbatches(step, model))
    with pytest.raises(SpecError, match="no microbatch to train on"):
        hdp.backward(torch.zeros(()))
    for batch in hdp.microbatches(step, model):
        hdp.backward(summed_loss(model, batch))
        with pytest.raises(SpecError, match="or its backward has run"):
            hdp.backward(torch.zeros(()))
    with pytest.raises(SpecError, match="gradients before its first microbatch"):
        next(hdp.microbatches(step, model))
    with pytest.raises(SpecError, match="4 ranks, and there is no process group"):
        one_rank(ol.ClientPlaceTree(cp=4))
    with pytest.raises(SpecError, match=r"has pp=2, and microbatches run here one after another"):
        one_rank(ol.ClientPlaceTree(pp=2, cp=2))
    with pytest.raises(PlanError, match="on the mesh is pp=1 dp=1 cp=2 tp=1, and this"):
        next(hdp.microbatches(made_step([5, 9], ol.ClientPlaceTree(cp=2), 0), model))


def without_a_ring(rank: int) -> str:
    mesh = ol.ClientPlaceTree(cp=2)
    hdp, model = HybridParallel(SimpleNamespace(mesh=mesh, rank=rank, device=torch.device("cpu"))), TinyLM()
    for batch in hdp.microbatches(made_step([CONTEXT], mesh, rank), model):
        cu = batch.meta.cu_seqlens // 2  # attention of the slice to itself
        with pytest.raises(SpecError) as caught:
            hdp.backward(summed_loss(model, batch, dense_in(cu)))
        return str(caught.value)
    raise AssertionError("nothing was shared")


@pytest.mark.slow
def test_a_model_that_does_not_attend_over_its_ring_is_refused(tmp_path):
    for message in run_ranks(without_a_ring, 2, tmp_path):
        assert "ranks [0, 1] share this microbatch, and the model did not call ring_attention" in message


def failing_rank(rank: int, world: int, folder: str, way: str, name: str) -> None:
    """Rank 2 runs out of memory, or is killed, in the middle of a step that all ranks share."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", world_size=world, rank=rank)
    mesh, (model, _) = ol.ClientPlaceTree(cp=world), wrapped(name)
    hdp = HybridParallel(SimpleNamespace(mesh=mesh, rank=rank, device=torch.device("cpu")))
    lengths = [CONTEXT, 4, 5, 6] if way != "raises alone" else [4, 5, 6, 7]
    for index in range(100):
        for batch in hdp.microbatches(made_step(lengths, mesh, rank, index), model):
            if (rank, index, way) == (2, 1, "raises alone"):
                raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
            loss = summed_loss(model, batch)
            if rank == 2 and index == 1:
                if way == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
            hdp.backward(loss)
        model.zero_grad()


def as_a_program(rank: int, world: int, folder: str, way: str, name: str) -> None:
    """Run a rank as the interpreter runs a program: an error goes to the hook, and the process ends."""
    with open(f"{folder}/{rank}.err", "w", buffering=1) as sys.stderr:
        try:
            failing_rank(rank, world, folder, way, name)
        except Exception:
            sys.excepthook(*sys.exc_info())
            os._exit(1)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param("raises", "replicated", marks=pytest.mark.slow),
        ("killed", "replicated"),
        pytest.param("raises", "fsdp2", marks=pytest.mark.slow),
        pytest.param("raises alone", "fsdp2", marks=pytest.mark.slow),
        pytest.param("killed", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_ends_the_others_with_its_reason(way, name, tmp_path):
    context = multiprocessing.get_context("forkserver")
    given = (WORLD, str(tmp_path), way, name)
    ranks = [context.Process(target=as_a_program, args=(rank, *given)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        process.join(timeout=200)
        ended = process.exitcode
        process.kill()
        assert ended == (-signal.SIGKILL if (rank, way) == (2, "killed") else 1), rank
    for rank in (0, 1, 3):
        error = (tmp_path / f"{rank}.err").read_text()
        if way == "raises alone":  # the others lose it where FSDP gathers parameters, in their forward
            assert "rank 2 ended with OutOfMemoryError: tried to allocate 20.00 GiB, before this rank ended" in error
        elif way == "raises":
            assert f"{ServiceLost.__name__}: this rank cannot go on: rank 2 ended with OutOfMemoryError" in error
            assert "tried to allocate 20.00 GiB. Fix that, and resume all ranks" in error
        else:  # it could not say why: ranks that lost it say that, the others that they lost those
            assert f"{ServiceLost.__name__}: this rank cannot go on: " in error
            assert "a rank ended or did not answer, and left no reason" in error
