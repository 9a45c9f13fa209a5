"""Real files for the whole suite, written once."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

import overlord as ol
from overlord.cli.demo_data import demo_job, write_demo

# A shell that runs the suite in the background ignores Ctrl-C, and so would every process the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.load_profile("dev")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory: pytest.TempPathFactory):
    return write_demo(tmp_path_factory.mktemp("demo"), scale=0.03)


@pytest.fixture(scope="session")
def mixed_job(demo_files) -> ol.Job:
    """Eight sources of every format, text and images, packed into small batches."""
    return demo_job(demo_files).replace(batch=ol.Batch(2048, global_samples=16), seed=7)


def write_ids(path: Path, lengths, start: int = 0) -> Path:
    """Write a JSONL file whose rows hold `ids` of the given lengths; token = 1000 + row."""
    rows = [json.dumps({"ids": [1000 + start + i] * int(n), "n": int(n)}) for i, n in enumerate(lengths)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="session")
def ids_job(tmp_path_factory: pytest.TempPathFactory) -> ol.Job:
    """Three sources of token ids in several files, with lengths above the context."""
    folder = tmp_path_factory.mktemp("ids")
    rng = np.random.default_rng(0)
    for source, rows, files in (("a", 90, 3), ("b", 40, 1), ("c", 65, 2)):
        for number in range(files):
            write_ids(folder / source / f"{number}.jsonl", 1 + rng.integers(0, 90, rows // files), number * 1000)
    return ol.Job(
        sources=[
            ol.Source(name, str(folder / name), sample=ol.Text("ids", tokenized=True), weight=weight)
            for name, weight in (("a", 3), ("b", 1), ("c", 2))
        ],
        batch=ol.Batch(32, global_samples=11),
        overlength="split",
        seed=3,
    )
