"""A client's wait for a prefetched step of 8 MB, on `local` and on `ray`, against one copy out of shared memory.

A trainer process attaches and sleeps, so that the next step is built. The wait is from asking for the step to having
the arrays of all its microbatches: views of the shared memory that the service wrote. Nothing is copied in that time;
a trainer that copies the arrays (to a GPU, say) pays for that itself. Then it sleeps as long again, and copies that
very step out of the shared memory into its own: the ratio of the two, each taken after the same idle moment, is the
figure. Beside them, in the same run: an actor of Ray that returns an array of 8 MB, called when it is needed, and
called three ahead so that it lies ready.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from benchmarks.measuring import arguments, publish

STEP_BYTES = 8 << 20
BYTES_A_TOKEN = 24
"""input_ids, labels and position_ids, 8 bytes each."""
MICROBATCHES = 4
PAUSE_S = 0.15
BAR = 1.5


def eight_megabytes(folder: Path) -> ol.Job:
    """Return a job whose steps are 8 MB for the only rank, in four microbatches."""
    tokens = STEP_BYTES // BYTES_A_TOKEN
    each = tokens // MICROBATCHES // 8
    ids = pa.ListArray.from_arrays(
        np.arange(257, dtype=np.int32) * each, pa.array(np.arange(256 * each, dtype=np.int32) % 1000)
    )
    pq.write_table(pa.table({"ids": ids}), folder / "ids.parquet", row_group_size=32)
    return ol.Job(
        sources=[ol.Source("s", str(folder / "ids.parquet"), sample=ol.Text("ids", tokenized=True))],
        batch=ol.Batch(8 * each, global_tokens=8 * each * MICROBATCHES, microbatches=MICROBATCHES),
        lag=4,
    )


def measure(take: Callable[[], list[np.ndarray]], steps: int) -> dict[str, list[float]]:
    """Take steps, and copy each of them; milliseconds of both, and when the step was asked for."""
    out = np.zeros(2 * STEP_BYTES, np.uint8)
    found: dict[str, list[float]] = {"waits": [], "copies": [], "at": []}
    for step in range(steps + 5):
        time.sleep(PAUSE_S)
        asked, began = time.monotonic(), time.perf_counter()
        arrays = take()
        waited = time.perf_counter() - began
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        at = 0
        for array in arrays:
            out[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
            at += array.nbytes
        copied = time.perf_counter() - began
        if step >= 5:  # segments are mapped and pages touched once
            found["at"].append(asked)
            found["waits"].append(1000 * waited)
            found["copies"].append(1000 * copied)
    return found


def be_a_trainer(address: str, steps: int) -> None:
    """Measure a service; print the figures."""
    client = ol.connect(address, rank=0)

    def take() -> list[np.ndarray]:
        batches = list(next(client).microbatches)
        return [value for batch in batches for value in batch.values() if isinstance(value, np.ndarray)]

    found = measure(take, steps)
    client.close()
    print(json.dumps(found))


def be_a_trainer_of_ray(ahead: int, steps: int) -> None:
    """Measure an actor that returns 8 MB."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    @ray.remote
    class Loader:
        def step(self) -> np.ndarray:
            return np.zeros(STEP_BYTES, np.uint8)

    loader = Loader.remote()
    ready = [loader.step.remote() for _ in range(ahead)]

    def take() -> list[np.ndarray]:
        ready.append(loader.step.remote())
        return [ray.get(ready.pop(0))]

    found = measure(take, steps)
    ray.shutdown()
    print(json.dumps(found))


_ATTACHED = """
import sys
import numpy as np, psutil
pss = lambda: psutil.Process().memory_full_info().pss / 2**20
before = pss()
import overlord as ol
client = ol.connect(sys.argv[1], rank=0)
for _ in range(3):
    held = [value for batch in next(client).microbatches for value in batch.values()]
print(pss() - before)
"""
_DRIVER = """
import numpy as np, psutil
pss = lambda: psutil.Process().memory_full_info().pss / 2**20
before = pss()
import ray
ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
@ray.remote
class Loader:
    def step(self):
        return np.zeros(8 << 20, np.uint8)
loader = Loader.remote()
for _ in range(3):
    held = ray.get(loader.step.remote())
print(pss() - before)
"""


def memory_of(script: str, *arguments: str) -> float:
    """Return what a script adds to the memory of a process that has numpy."""
    command = [sys.executable, "-c", script, *arguments]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[-1])


def in_a_process(*arguments: str) -> dict[str, Any]:
    """Run this file as a trainer."""
    environment = {**os.environ, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [sys.executable, "-m", "benchmarks.fetch", *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(ended.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=40, help="steps of each side and round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    parser.add_argument("--actor", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer is not None:
        be_a_trainer(options.trainer, options.steps)
        return
    if options.actor is not None:
        be_a_trainer_of_ray(options.actor, options.steps)
        return
    steps = ("--steps", str(options.steps))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("local", "ray", "actor", "actor_ahead")}
    memory = {"actor": memory_of(_DRIVER)}
    with tempfile.TemporaryDirectory() as folder:
        job = eight_megabytes(Path(folder))
        for _ in range(options.rounds):
            for runtime in ("local", "ray"):
                with ol.launch(job, runtime=runtime, cache=f"{folder}/cache", prefetch=3) as service:
                    found[runtime].append(in_a_process("--trainer", str(service.address), *steps))
                    memory[runtime] = memory_of(_ATTACHED, str(service.address))
            found["actor"].append(in_a_process("--actor", "0", *steps))
            found["actor_ahead"].append(in_a_process("--actor", "3", *steps))
    wait = {name: statistics.median(w for one in rounds for w in one["waits"]) for name, rounds in found.items()}
    # Each wait against the copy of its own moment: the machine's speed wanders.
    ratio = {
        name: statistics.median(w / c for one in rounds for w, c in zip(one["waits"], one["copies"], strict=True))
        for name, rounds in found.items()
    }
    figures: dict[str, object] = {
        "ratio": max(ratio["local"], ratio["ray"]),
        "bar": BAR,
        "ratio_local": ratio["local"],
        "ratio_ray": ratio["ray"],
        "ratio_actor_return": ratio["actor"],
        "ratio_actor_return_ahead": ratio["actor_ahead"],
        **{f"{name}_ms": value for name, value in wait.items()},
        "copy_ms": statistics.median(c for rounds in found.values() for one in rounds for c in one["copies"]),
        **{f"{name}_trainer_mb": value for name, value in memory.items()},
        "step_mb": STEP_BYTES / 2**20,
    }
    publish("fetch", figures, options.json)


if __name__ == "__main__":
    main()
