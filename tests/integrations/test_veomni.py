"""VeOmni's own registry, iterators, prefetcher and checkpoints on our steps."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import overlord as ol

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("veomni", reason="VeOmni is not installed")
    from veomni.data.data_loader import build_dataloader
    from veomni.distributed.parallel_state import init_parallel_state
    from veomni.trainer.base import VeOmniIter
    from veomni.trainer.callbacks.base import TrainerState
    from veomni.trainer.callbacks.checkpoint_callback import CheckpointerCallback
    from veomni.utils.loss_utils import count_loss_token, reduce_global_loss_token

    from overlord.integrations.veomni import register


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> ol.Job:
    folder = tmp_path_factory.mktemp("veomni")
    rng = np.random.default_rng(0)
    rows = [json.dumps({"ids": rng.integers(1, 60, rng.integers(4, 60)).tolist()}) for _ in range(400)]
    (folder / "web.jsonl").write_text("\n".join(rows))
    source = ol.Source("web", str(folder / "web.jsonl"), sample=ol.Text("ids", tokenized=True))
    return ol.Job([source], batch=ol.Batch(64, global_samples=7, microbatch_tokens=64), seed=3)


def build(job, cache, **options):
    register(job, cache=cache, runtime="local")
    return build_dataloader("overlord", dataset=None, **{"max_seq_len": 64, "micro_batch_size": 1} | options)


@pytest.mark.parametrize("ahead", [False, True], ids=["plain", "background prefetcher"])
def test_a_run_resumes_exactly(ahead, job, cache):
    first = build(job, cache)
    batches = VeOmniIter(first, use_background_prefetcher=ahead)
    for _ in range(3):
        step = next(batches)
        assert int(count_loss_token(step)["foundation_tokens"]) > 0
    state = batches.state_dict()
    following = [[batch["input_ids"].tolist() for batch in next(batches)] for _ in range(2)]
    batches.stop()
    first.loader.close()
    second = build(job, cache)
    second.load_state_dict(state)
    again = VeOmniIter(second)
    assert [[batch["input_ids"].tolist() for batch in next(again)] for _ in range(2)] == following
    assert json.loads(state["stream"])["step"] == 3
    second.loader.close()


def test_longer_samples_than_the_model_takes_are_refused(job, cache):
    with pytest.raises(ol.SpecError, match=r"batch.context_length of the job is 64, and data.max_seq_len is 32"):
        build(job, cache, max_seq_len=32)


class Predictor(nn.Module):
    """Predicts a token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.output = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.double()

    def forward(self, batch):
        logits = self.output(self.table(batch["input_ids"][0]))[:-1]
        return nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="sum")


class Meter(dict):
    """In place of VeOmni's meter, which counts FLOPs of its own models."""

    state_dict = dict.copy
    load_state_dict = dict.update


def train(rank, world, job, cache, folder, steps, resume):
    """Train as VeOmni's trainer does, and save by its callback; return (tokens, loss) of each step."""
    warnings.simplefilter("ignore")
    torch.cpu.empty_cache = lambda: None  # VeOmni calls it of its device, and knows GPUs and NPUs
    state = init_parallel_state(dp_size=world, dp_shard_size=world, dp_mode="ddp", device_type="cpu")
    loader, model = build(job, cache), Predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saving = {"save_path": folder, "load_path": f"{folder}/global_step_10" if resume else None, "save_steps": 10}
    saving |= {"save_epochs": 0, "save_async": False, "dcp_save_to_lowest_rank": False, "stage_dir": None}
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            train=SimpleNamespace(
                checkpoint=SimpleNamespace(**saving, manager="dcp"),
                accelerator=SimpleNamespace(fsdp_config=SimpleNamespace(fsdp_mode="ddp")),
            ),
            model=SimpleNamespace(), train_steps=1000,
        ),
        model=model, optimizer=optimizer, environ_meter=Meter(), train_dataloader=loader, state=TrainerState(),
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        parallel_state=state,
    )  # fmt: skip
    callback = CheckpointerCallback(trainer)
    callback.on_train_begin(trainer.state)
    trainer.data_iterator = VeOmniIter(loader, use_background_prefetcher=True)
    found = []
    while trainer.state.global_step < steps:
        trainer.state.global_step += 1
        microbatches = next(trainer.data_iterator)
        labels = reduce_global_loss_token(count_loss_token(microbatches))["foundation_tokens"]
        total, seen = torch.zeros((), dtype=torch.float64), []
        optimizer.zero_grad()
        for batch in microbatches:
            seen += batch["input_ids"][batch["input_ids"] > 0].tolist()
            loss = model(batch) / labels
            loss.backward()
            total += loss.detach()
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(tensor)
        optimizer.step()
        found.append((seen, float(total)))
        callback.on_step_end(trainer.state)
    trainer.data_iterator.stop()
    loader.loader.close()
    return found


def merged(ranks):
    return [(sorted(token for seen, _ in step for token in seen), step[0][1]) for step in zip(*ranks, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_resumes_exactly_on_another_number_of_ranks(job, cache, tmp_path):
    """VeOmni keeps a file of extra state for each rank, so it goes on with as many ranks or fewer."""
    whole = merged(run_ranks(train, 1, tmp_path / "a", 1, job, cache, str(tmp_path / "whole"), 20, False))
    half = merged(run_ranks(train, 2, tmp_path / "b", 2, job, cache, str(tmp_path / "parts"), 10, False))
    again = merged(run_ranks(train, 1, tmp_path / "c", 1, job, cache, str(tmp_path / "parts"), 20, True))
    assert len(again) == 10
    assert [seen for seen, _ in half + again] == [seen for seen, _ in whole]
    assert [loss for _, loss in half + again] == pytest.approx([loss for _, loss in whole], rel=1e-9)
