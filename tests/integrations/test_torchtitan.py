"""torchtitan on CPU: its own Config.build, CheckpointManager and optimizers, on our loader.

Version 0.3 has rows of `seq_len` tokens and its loader in `components.dataloader`; what follows it has flat batches and
`components.data.loader`. The tests ask for what the installed version's trainer asks for.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import overlord as ol
from overlord.job_files import dump_job_yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    from overlord.integrations.torchtitan import OverlordDataLoader

CONTEXT = 64
FLAT = importlib.util.find_spec("torchtitan.components.dataloader") is None
ROWS = {"seq_len": CONTEXT, "local_batch_size": 1, "snapshot_every_n_steps": 20}
TOKENS = {"max_context_length": CONTEXT, "num_tokens_per_batch": CONTEXT}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def job_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan")
    rng = np.random.default_rng(0)
    rows = [json.dumps({"ids": rng.integers(1, 60, rng.integers(4, 24)).tolist()}) for _ in range(400)]
    (folder / "web.jsonl").write_text("\n".join(rows))
    source = ol.Source("web", str(folder / "web.jsonl"), sample=ol.Text("ids", tokenized=True))
    for ranks in (1, 2):
        batch = ol.Batch(CONTEXT, global_tokens=160, microbatch_tokens=CONTEXT, microbatches=4 // ranks)
        (folder / f"{ranks}.yaml").write_text(dump_job_yaml(ol.Job([source], batch=batch, overlength="split", seed=3)))
    return folder


def build(folder, cache, dp, rank, **options):
    config = OverlordDataLoader.Config(job=str(folder / f"{dp}.yaml"), cache=cache)
    options = options or (TOKENS if FLAT else ROWS)
    return config.build(dp_world_size=dp, dp_rank=rank, tokenizer=None, **options)


class Predictor(nn.Module):
    """Predicts a token from the one before and its position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(64, 16), nn.Embedding(CONTEXT, 16)
        self.output = nn.Linear(16, 64)
        self.double()

    def forward(self, tokens, positions):
        return self.output(self.tokens(tokens) + self.places(positions))


def train(rank, world, folder, cache, where, steps):
    """Train as torchtitan's trainer does; return (tokens, loss) of each step. It goes on from a checkpoint."""
    warnings.simplefilter("ignore")
    loader = build(folder, cache, world, rank)
    model = Predictor()
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=20)
    checkpoints = CheckpointManager.Config(enable=True, interval=10, folder="saved").build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers, states={},
        sd_adapter=None, base_folder=where,
    )  # fmt: skip
    begun = 10 if checkpoints.load() else 0
    found, data = [], iter(loader)
    for step in range(begun + 1, steps + 1):
        optimizers.zero_grad()
        items = [next(data) for _ in range(4 // world)]
        valid = torch.tensor(sum(int((labels != -100).sum()) for _, labels in items))
        dist.all_reduce(valid)
        total, seen = torch.zeros((), dtype=torch.float64), []
        for inputs, labels in items:
            assert set(inputs) == {"input", "positions"} and inputs["input"].shape == labels.shape
            assert labels.dim() == (1 if FLAT else 2)
            seen += inputs["input"][inputs["input"] > 0].tolist()
            logits = model(inputs["input"], inputs["positions"])
            loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / valid
            loss.backward()
            total += loss.detach()
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(tensor)
        optimizers.step()
        schedulers.step()
        found.append((seen, float(total)))
        checkpoints.save(step)
    checkpoints.close()
    loader.close()
    return found


def merged(ranks):
    return [(sorted(token for seen, _ in step for token in seen), step[0][1]) for step in zip(*ranks, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_resumes_exactly_on_another_number_of_ranks(job_file, cache, tmp_path):
    whole = merged(run_ranks(train, 1, tmp_path / "a", 1, job_file, cache, str(tmp_path / "whole"), 20))
    merged(run_ranks(train, 1, tmp_path / "b", 1, job_file, cache, str(tmp_path / "parts"), 10))
    again = merged(run_ranks(train, 2, tmp_path / "c", 2, job_file, cache, str(tmp_path / "parts"), 20))
    assert len(again) == 10
    assert [seen for seen, _ in again] == [seen for seen, _ in whole[10:]]
    assert [loss for _, loss in again] == pytest.approx([loss for _, loss in whole[10:]], rel=1e-9)


def test_flat_batches_and_rows(job_file, cache):
    with build(job_file, cache, 1, 0).loader as rows:
        assert rows.layout == ol.Layout("torchtitan", slicing="whole")
    rows, flat = build(job_file, cache, 1, 0, **ROWS), build(job_file, cache, 1, 0, **TOKENS)
    (inputs, labels), (flat_inputs, flat_labels) = next(iter(rows)), next(iter(flat))
    assert torch.equal(inputs["input"][0], flat_inputs["input"]) and torch.equal(labels[0], flat_labels)
    with pytest.raises(ol.SpecError, match=r"is 4, and the trainer saves a checkpoint after 1 microbatches, inside"):
        rows.state_dict()
    rows.close()
    flat.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 32}, r"batch.context_length of .* is 64, and the trainer is configured for 32"),
        ({"local_batch_size": 8}, r"training.local_batch_size is 8, and a microbatch is one packed"),
        ({"snapshot_every_n_steps": 6}, r"batch.microbatches of the job is 4, and the trainer saves"),
    ],
)
def test_a_job_that_does_not_fit_is_refused(options, message, job_file, cache):
    with pytest.raises(ol.SpecError, match=message):
        build(job_file, cache, 1, 0, **ROWS | options)


MOVED = """
import sys, types, warnings
warnings.simplefilter("ignore")
import torchtitan.components.dataloader as real
sys.modules["torchtitan.components.data"] = types.ModuleType("data")
sys.modules["torchtitan.components.data.loader"] = real
sys.modules["torchtitan.components.dataloader"] = None
from overlord.integrations.torchtitan import OverlordDataLoader
assert issubclass(OverlordDataLoader, real.BaseDataLoader)
"""


@pytest.mark.skipif(FLAT, reason="the installed version has the loader there")
def test_the_import_path_of_later_versions_is_found():
    subprocess.run([sys.executable, "-c", MOVED], check=True)
