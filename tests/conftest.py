"""Real files for the whole suite, written once."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from examples.demo.demo_data import demo_job, write_demo
from hypothesis import settings

import overlord as ol
from overlord.core.ragged import expand_ranges
from overlord.transforms.microbatches.per_microbatch import cut_runs

# A shell that runs the suite in the background ignores Ctrl-C, and so would every process the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.load_profile("dev")


def pytest_sessionstart() -> None:
    """Collect no garbage while modules are imported, which is half of their time: what they make stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what collecting made out of all later collections, each of which would look through it."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that starts many services is slow where each of them takes seconds; on Ray it also gets more time."""
    for item in items:
        if item.get_closest_marker("ray") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))
        if item.get_closest_marker("ray") and item.get_closest_marker("slow_on_ray"):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow_but_inline"):
            given = item.callspec.params  # type: ignore[attr-defined]
            if "inline" not in (given.get(name) for name in ("where", "runtime", "transport")):
                item.add_marker(pytest.mark.slow)
    # A run that may not get through all of the suite begins at another module with every commit.
    turn = int(os.environ.get("OVERLORD_TESTS_FROM", "0")[:8], 16)
    modules = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    if turn and modules:
        place = {module: (at - turn) % len(modules) for at, module in enumerate(modules)}
        items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins after the time that a run may take: CI ends a run that takes too long, whatever it found."""
    until = float(os.environ.get("OVERLORD_TESTS_UNTIL", "inf"))
    if time.time() > until:
        pytest.skip("the time of this run is over; run the suite without OVERLORD_TESTS_UNTIL")


def status_at(service: ol.Service, step: int) -> dict[str, Any]:
    """Return the status when rank 0 is known to be at a step: a client that looks ahead tells where it is beside it."""
    until = time.monotonic() + 10.0
    while (status := service.status())["clients"].get("0") != step and time.monotonic() < until:
        time.sleep(0.05)
    return status


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


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a Ray cluster of three nodes, which all processes of this test run share."""
    workers = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp().parent if workers else tmp_path_factory.getbasetemp()
    owner = os.getppid() if workers else os.getpid()
    file = folder / f"ray-address-{owner}"
    try:
        (folder / f"ray-started-{owner}").touch(exist_ok=False)
        start_ray(owner, file)
    except FileExistsError:
        pass  # another worker starts it
    return ray_started(file)


RAY_START_S = 90.0
"""How long the cluster may take to start: less than a test's own limit, which would hide the reason."""


def start_ray(owner: int, file: Path, nodes: list[dict[str, Any]] | None = None) -> None:
    """Start a cluster of three nodes that lives as long as a process, and writes its address to a file."""
    command = [sys.executable, str(Path(__file__).parent / "ray_nodes.py"), str(owner), str(file)]
    command += [] if nodes is None else [json.dumps(nodes)]
    # By a shell that goes at once: it ends by itself, and is nobody's child that a test could take for a leftover.
    shell = ["/bin/sh", "-c", '"$@" > "$0" 2>&1 < /dev/null &', str(file.with_suffix(".log"))]
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    subprocess.run([*shell, *command], check=True, start_new_session=True, env=environment)


def ray_started(file: Path) -> str:
    """Wait until a cluster has written its address."""
    failed, log = file.with_suffix(".failed"), file.with_suffix(".log")
    deadline = time.monotonic() + RAY_START_S
    while time.monotonic() < deadline:
        if file.exists():
            return file.read_text()
        if failed.exists():
            raise RuntimeError(f"the Ray cluster did not start: {failed.read_text()[-2000:]}")
        time.sleep(0.2)
    raise RuntimeError(f"no Ray cluster after {RAY_START_S:.0f} s; its log ends with: {log.read_text()[-2000:]}")


@pytest.fixture(params=["inline", "local", pytest.param("ray", marks=pytest.mark.ray)])
def where(request: pytest.FixtureRequest) -> dict[str, str]:
    """On which runtime a test runs, as `launch` takes it: one suite for all of them."""
    if request.param != "ray":
        return {"runtime": request.param}
    return {"runtime": "ray", "address": request.getfixturevalue("ray_address")}


def slice_indices(
    cu_seqlens: npt.NDArray[np.integer], cp: int, cp_rank: int, slicing: str = "zigzag", *, rows: bool = False
) -> npt.NDArray[np.int64]:
    """Return the tokens of one context-parallel rank, in its order.

    Example:
        >>> slice_indices(np.array([0, 8, 16]), 2, 0).tolist()
        [0, 1, 6, 7, 8, 9, 14, 15]
        >>> slice_indices(np.array([0, 8, 16]), 2, 0, "whole_zigzag").tolist()
        [0, 1, 2, 3, 12, 13, 14, 15]
        >>> slice_indices(np.array([0, 8, 16]), 2, 1, "contiguous").tolist()
        [8, 9, 10, 11, 12, 13, 14, 15]
    """
    runs = cut_runs(cu_seqlens, cp, slicing, rows=rows).of_part(cp_rank)
    order = np.argsort(runs.place, kind="stable")
    begin = cu_seqlens.astype(np.int64)[runs.segment] + runs.begin
    return expand_ranges(begin[order], runs.length[order])
