"""DeepSpeed's engine on CPU, with gloo: steps with different numbers of microbatches, its own checkpoints."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import overlord as ol
from overlord.integrations.deepspeed import train_step
from overlord.integrations.torch_loader import DataLoader

SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 7,  # steps have other numbers
}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> ol.Job:
    folder = tmp_path_factory.mktemp("deepspeed")
    rng = np.random.default_rng(0)
    rows = [json.dumps({"ids": rng.integers(1, 60, rng.integers(4, 60)).tolist()}) for _ in range(400)]
    (folder / "web.jsonl").write_text("\n".join(rows))
    source = ol.Source("web", str(folder / "web.jsonl"), sample=ol.Text("ids", tokenized=True))
    return ol.Job([source], batch=ol.Batch(64, global_samples=7, microbatch_tokens=64), seed=3)


class Predictor(nn.Module):
    """Predicts a token from the one before; returns the loss summed over labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.output = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, input_ids, labels):
        logits = self.output(self.table(input_ids[0]))[:-1]
        return nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum")


def train(rank, world, job, cache, folder, steps, resume):
    """Train to a step, save at the tenth; return (sample ids, number of microbatches, loss) of each step."""
    warnings.simplefilter("ignore")
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled; gloo is enough
    model = Predictor()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS, dist_init_required=False)
    found = []
    with DataLoader(job, mesh=f"dp={world}", cache=cache) as loader:
        if resume:
            _, saved = engine.load_checkpoint(folder)
            loader.load_state_dict(saved["data"])
        for step in loader:
            seen = []

            def summed_loss(batch, seen=seen):
                seen += [str(one) for one in batch.meta.sample_ids if one.source]
                return engine(batch["input_ids"], batch["labels"])

            loss = train_step(engine, step, summed_loss)
            dist.all_reduce(loss)
            found.append((seen, len(step.microbatches), float(loss)))
            if step.index == 9 and not resume:
                engine.save_checkpoint(folder, client_state={"data": loader.state_dict()})
            if step.index + 1 == steps:
                break
    return found


def merged(ranks):
    return [(sorted(i for ids, _, _ in step for i in ids), step[0][2]) for step in zip(*ranks, strict=True)]


@pytest.mark.slow
def test_an_engine_resumes_exactly_on_another_number_of_ranks(job, cache, tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    settings = (job, cache, str(tmp_path / "saved"))
    (alone,) = run_ranks(train, 1, tmp_path / "a", 1, *settings, 20, False)
    assert len({count for _, count, _ in alone}) > 1 and len(alone) == 20
    whole = merged([alone])
    again = merged(run_ranks(train, 2, tmp_path / "b", 2, *settings, 20, True))
    assert [ids for ids, _ in again] == [ids for ids, _ in whole[10:]]
    assert [loss for _, loss in again] == pytest.approx([loss for _, loss in whole[10:]], rel=1e-5)


class Engine:
    """The calls of an engine, in order."""

    dp_world_size = 2

    def __init__(self) -> None:
        self.calls = []

    def set_gradient_accumulation_boundary(self, last):
        self.calls.append(last)

    def backward(self, loss, *, scale_wrt_gas):
        assert scale_wrt_gas is False
        loss.backward()
        self.calls.append("backward")

    def step(self):
        self.calls.append("step")


def test_only_the_last_microbatch_is_a_boundary(job, cache):
    weight = torch.ones((), requires_grad=True)
    with DataLoader(job, cache=cache, runtime="inline") as loader:
        step = next(iter(loader))
        count, engine = len(step.microbatches), Engine()
        loss = train_step(engine, step, lambda batch: weight * (batch["labels"] != -100).sum())
    assert count > 1
    assert engine.calls == [False, "backward"] * (count - 1) + [True, "backward", "step"]
    assert float(loss) == pytest.approx(1) and float(weight.grad) == pytest.approx(2)  # two ranks average it
