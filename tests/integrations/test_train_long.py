"""`examples/train_long.py` under torchrun: it learns, shares long sequences, and resumes on another mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ol
from overlord.job_files import LaunchOptions, dump_job_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_long.py"
LIMIT = 200
"""Seconds for one run: four processes that import torch, on a machine that may be busy."""

pytestmark = pytest.mark.timeout(3 * LIMIT)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources of token ids that follow each other by a rule, some of them longer than one rank may hold."""
    folder, rng = tmp_path_factory.mktemp("long"), np.random.default_rng(1)
    for name, step in (("near", 1), ("far", 7)):
        lengths = np.clip(np.exp(rng.normal(4.5, 1.2, 80)), 4, 1500).astype(int).tolist()
        rows = [(int(rng.integers(1, 90)) + step * np.arange(n)) % 97 + 1 for n in lengths]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"ids": row.tolist()}) + "\n" for row in rows))
    sample = ol.Text("ids", tokenized=True)
    sources = [ol.Source(name, str(folder / f"{name}.jsonl"), sample=sample) for name in ("near", "far")]
    (folder / "job.yaml").write_text(
        dump_job_yaml(ol.Job(sources=sources, batch=ol.Batch(64, global_samples=8), seed=1), LaunchOptions())
    )
    return folder / "job.yaml"


def train(job: Path, folder: Path, *options: object, ranks: int = 4) -> list[dict[str, Any]]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(EXAMPLE), str(job), "--json", str(folder / "log"), *map(str, options)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(job.parent)}
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            output, _ = process.communicate()
    assert process.returncode == 0, output[-8000:]
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@pytest.mark.slow
def test_it_learns_and_shares_long_sequences(job, tmp_path):
    lines = train(job, tmp_path / "run", "--steps", 6)
    assert [line["step"] for line in lines] == list(range(6))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"] and set(lines[-1]["sources"]) == {"near", "far"}
    sizes = {len(ring) for line in lines for rank in line["rings"] for ring in rank}
    assert {1, 4} <= sizes
    assert any(len({len(rank) for rank in line["rings"]}) > 1 for line in lines), "counts differ between ranks"


@pytest.mark.slow
def test_it_resumes_on_another_mesh_and_wrapper(job, tmp_path):
    whole = train(job, tmp_path / "whole", "--steps", 4, "--wrapper", "replicated", ranks=2)
    train(job, tmp_path / "first", "--steps", 2, "--save", tmp_path / "saved")
    again = ("--mesh", "dp=2,cp=2", "--resume", tmp_path / "saved", "--offload", 50)
    rest = train(job, tmp_path / "rest", "--steps", 4, *again)
    assert [line["step"] for line in rest] == [2, 3]
    assert any(share > 0 for line in rest for rank in line["offloaded"] for share in rank)
    assert not any(share for line in whole for rank in line["offloaded"] for share in rank)
    for got, expected in zip(rest, whole[2:], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert got["sources"] == pytest.approx(expected["sources"], rel=1e-4)
