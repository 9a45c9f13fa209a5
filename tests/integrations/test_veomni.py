"""VeOmni's own registry, iterators and prefetcher on our steps."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

import overlord as ol

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("veomni", reason="VeOmni is not installed")
    from veomni.data.data_loader import build_dataloader
    from veomni.trainer.base import VeOmniIter
    from veomni.utils.loss_utils import count_loss_token

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
