"""The paper's figure 16: what a trainer waits for its batches while roles are killed. Fault-free steps beside it.

64 Parquet sources of token ids, dealt to 8 loader hosts (processes), one trainer that takes a step every 2 / capacity
seconds, where capacity is what the slower setup (with shadows) delivers when nobody waits. Each setup runs the same
steps:

    planner killed (SIGKILL) every 15 steps after 5 steps of warm-up, prefetch 2, and prefetch 4
    a loader host (5 to 10 of the 64 loaders) killed at step 35 and every 30 steps from there, with shadows and without

A loader host is killed only when its shadow has been there for as long: a primary that is lost with its shadow is
another fault. Stall of a fault: what the 15 steps from it on were waited for beyond the median wait of all steps before
the first fault, less what 15 steps of the same setup are waited for beyond it when nobody is killed (steps in which all
sources read at once are waited for without any fault). The digests of all runs must be those of a run without faults.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from benchmarks.measuring import arguments, publish

SOURCES, HOSTS = 64, 8
WARM_UP, EVERY, LOADERS_EVERY, LOADERS_AT = 5, 15, 30, 35
BAR = 0.1
CALM = 160
"""Steps of each setup without faults, at most."""


def job_of(folder: Path, tokens: int) -> ol.Job:
    """Write the sources, and return a job over them."""
    luck = np.random.default_rng(0)
    sources = []
    for number in range(SOURCES):
        path = folder / f"s{number:02d}.parquet"
        lengths = luck.integers(50, 800, 2000)
        values = pa.array(luck.integers(1, 30_000, int(lengths.sum())).astype(np.int32))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        pq.write_table(pa.table({"ids": pa.ListArray.from_arrays(offsets, values)}), path, row_group_size=250)
        sources.append(ol.Source(f"s{number:02d}", str(path), sample=ol.Text("ids", tokenized=True)))
    return ol.Job(sources=sources, batch=ol.Batch(4096, global_tokens=tokens), lag=8)


@dataclass
class Run:
    """What one setup gave."""

    waits: list[float] = field(default_factory=list)
    """Seconds that each step was waited for."""
    digests: list[str] = field(default_factory=list)
    faults: list[tuple[int, float]] = field(default_factory=list)
    """(step, time of day) of each kill."""
    status: dict = field(default_factory=dict)

    def stalls(self, calm: Run) -> list[float]:
        """Return the stall of each fault, by a run of the same setup without any."""
        first = self.faults[0][0]
        usual = statistics.fmean(calm.excess(begin) for begin in range(first, len(calm.waits) - EVERY + 1, EVERY))
        return [self.excess(begin) - usual for begin, _ in self.faults]

    def excess(self, begin: int) -> float:
        """Return what some steps were waited for beyond the median wait."""
        usual = statistics.median(self.waits[1 : self.faults[0][0] if self.faults else len(self.waits)])
        return sum(max(0.0, wait - usual) for wait in self.waits[begin : begin + EVERY])


def train(
    job: ol.Job,
    folder: str,
    steps: int,
    pace_s: float,
    victim: str | None = None,
    first: int = 0,
    every: int = EVERY,
    **options,
) -> Run:
    """Take steps at a pace while somebody is killed now and then."""
    run, luck = Run(), random.Random(0)
    with ol.launch(job, cache=f"{folder}/cache", loader_hosts=HOSTS, threads=1, **options) as service:
        client = service.client()
        next_at = 0.0
        for number in range(steps):
            if victim is not None and number >= first and (number - first) % every == 0:
                pid = choose(service.status()["hosts"], victim, luck)
                run.faults.append((number, time.time()))
                os.kill(pid, signal.SIGKILL)
            began = time.perf_counter()
            step = next(client)
            batches = list(step.microbatches)
            run.waits.append(time.perf_counter() - began)
            run.digests.append(step.plan_digest + "".join(batch.digest() for batch in batches[:1]))
            del batches
            next_at = max(next_at, began) + pace_s
            time.sleep(max(0.0, next_at - time.perf_counter()))
        run.status = service.status()
    return run


def choose(hosts: list[dict], victim: str, luck: random.Random) -> int:
    """Return the process to kill: of a loader host one that has 5 to 10 loaders, where there is one."""
    up = [host for host in hosts if host["role"].startswith(victim) and host["up"]]
    fitting = [host for host in up if victim != "loader" or 5 <= host["sources"] <= 10]
    return luck.choice(fitting or up)["pid"]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--faults", type=int, default=20, help="faults of each setup")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    count, tokens = (2, 1 << 17) if options.quick else (options.faults, 1 << 17)
    steps = LOADERS_AT + LOADERS_EVERY * count
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(Path(folder), tokens)
        free = train(job, folder, steps, 0.0, shadows=True)
        usual = statistics.median(free.waits[WARM_UP:])
        pace = 2 * usual
        setups = {
            "planner_prefetch_2": {"victim": "planner", "first": WARM_UP, "prefetch": 2},
            "planner_prefetch_4": {"victim": "planner", "first": WARM_UP, "prefetch": 4},
            "loaders_with_shadows": {"victim": "loader", "first": LOADERS_AT, "every": LOADERS_EVERY, "shadows": True},
            "loaders_without_shadows": {"victim": "loader", "first": LOADERS_AT, "every": LOADERS_EVERY},
        }
        runs, calm = {}, {}
        for name, setup in setups.items():
            length = setup["first"] + setup.get("every", EVERY) * count
            runs[name] = train(job, folder, length, pace, **setup)
            options_of = {key: value for key, value in setup.items() if key in ("prefetch", "shadows")}
            calm[name] = train(job, folder, min(length, CALM), pace, **options_of)
    stalls = {name: run.stalls(calm[name]) for name, run in runs.items()}
    mean = {name: statistics.fmean(values) for name, values in stalls.items()}
    shadowed = runs["loaders_with_shadows"]
    told = shadowed.status["faults"]
    promote = [max(0.0, fault["at"] - at) for fault, (_, at) in zip(told, shadowed.faults, strict=False)]
    figures: dict[str, object] = {
        "ratio": max(0.0, mean["loaders_with_shadows"]) / max(mean["loaders_without_shadows"], 1e-9),
        "bar": BAR,
        "same_digests": all(run.digests == free.digests[: len(run.digests)] for run in runs.values()),
        "capacity_steps_per_s": 1 / usual,
        "pace_s": pace,
        "faults_each": count,
        **{f"stall_ms_{name}": 1000 * value for name, value in mean.items()},
        **{f"worst_stall_ms_{name}": 1000 * max(values) for name, values in stalls.items()},
        "promote_ms": 1000 * statistics.median(promote) if promote else 0.0,
        **{f"restart_ms_{name}": restart_ms(run) for name, run in runs.items()},
        "rows": {name: [round(1000 * wait, 2) for wait in run.waits] for name, run in runs.items()},
        "rounds_with": [1000 * value for value in stalls["loaders_with_shadows"]],
        "rounds_without": [1000 * value for value in stalls["loaders_without_shadows"]],
    }
    publish("faults", figures, options.json)


def restart_ms(run: Run) -> float:
    """Return how long a successor took to be up."""
    return 1000 * statistics.median([fault["took_s"] for fault in run.status["faults"] if "took_s" in fault] or [0.0])


if __name__ == "__main__":
    main()
