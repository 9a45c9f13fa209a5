"""A real run of the curriculum: sources that wait as remote reads do, a service of threads, a trainer at a pace.

12 sources: 7 of text (0.2 ms a sample), 2 of photos and 2 of documents (50 ms), one of audio (150 ms). The weight goes
from text to photos, from photos to documents, and back, over 200 steps of 60 samples; the trainer takes a step every
0.1 s. At the peak 22 of 36 workers are busy, two thirds when those of idle sources are counted. The four setups are
those of scaling.py; costs come from a profile.

And once more with photos, documents and audio that compute in process workers, on hosts with `FEWEST_CORES` or more:
as many workers as cores, and costs such that 0.6 of the cores are busy at the peak. Text still waits.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import overlord as ol
from benchmarks.waiting_sources import by_name, measured_costs, waiting_source
from overlord.scaling.partition import partition, whole_workers
from overlord.scaling.profiles import Resources, SourceCost, demand

SAMPLES, STEP_S = 60, 0.1
GROUPS = (("text", 7, 0.0002), ("photos", 2, 0.05), ("documents", 2, 0.05), ("audio", 1, 0.15))
FEWEST_CORES = 8
"""With fewer, one worker for each source is more than the cores can keep busy, and there is nothing to scale."""
BUSY_AT_PEAK = 22.0
"""Workers that sources with the costs of `GROUPS` keep busy."""
TOKENS = 64
"""Of a sample of every source, so that read buffers of all hold the same."""
INTERVAL_S = 0.25
ALLOWED_S = 0.01
"""What a step may be waited for without being a stall: it is fetched and opened."""
LOOK_S = 0.1
"""How often workers and memory are looked at."""


@dataclass(frozen=True)
class Setting:
    """What a run of the four setups has, and what its samples cost."""

    workers: int
    computes: bool = False
    """Whether all but text compute, for so many times what they would wait."""
    cost_factor: float = 1.0


WAITING = Setting(workers=36)


def computing(cores: int) -> Setting:
    """Return the setting of sources that keep 0.6 of the cores busy at the peak."""
    return Setting(workers=cores, computes=True, cost_factor=0.6 * cores / BUSY_AT_PEAK)


@dataclass
class Run:
    """What one setup gave."""

    waits: list[float] = field(default_factory=list)
    digest: str = ""
    """Of all steps: plans and bytes."""
    workers: list[dict[str, int]] = field(default_factory=list)
    """Of each kind of source, at each step."""
    worker_s: float = 0.0
    cpu_s: float = 0.0
    """Of the service's process."""
    peak_buffers: int = 0
    peak_pss: int = 0
    peak_workers: int = 0
    events: int = 0

    @property
    def stall_s(self) -> float:
        """Seconds that the trainer waited beyond what is allowed, the first step left out: that is the start."""
        return sum(max(0.0, wait - ALLOWED_S) for wait in self.waits[1:])


class Watcher:
    """Looks at a service now and then, from a thread of its own."""

    def __init__(self, service: Any, run: Run) -> None:
        self._service, self._run = service, run
        self._process = psutil.Process(service.status()["pid"])
        self._ended = threading.Event()
        self.kinds: dict[str, int] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watcher:
        """Begin."""
        self._look(0.0)
        self._before = self._process.cpu_times()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look a last time."""
        self._ended.set()
        self._thread.join()
        times = self._process.cpu_times()
        self._run.cpu_s = times.user + times.system - self._before.user - self._before.system
        self._run.events = len(self._service.status()["scaling"]["events"])

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(LOOK_S):
            now = time.perf_counter()
            self._look(now - last)
            last = now

    def _look(self, seconds: float) -> None:
        sources: Mapping[str, Mapping[str, Any]] = self._service.status()["sources"]
        kinds = {kind: 0 for kind, _, _ in GROUPS}
        for name, one in sources.items():
            kinds[name.partition("-")[0]] += one["workers"]
        run, total = self._run, sum(kinds.values())
        run.worker_s += seconds * total
        run.peak_workers = max(run.peak_workers, total)
        run.peak_buffers = max(run.peak_buffers, sum(one["buffer_bytes"] for one in sources.values()))
        run.peak_pss = max(run.peak_pss, self._process.memory_full_info().pss)
        self.kinds = kinds


def curves(steps: int) -> dict[str, dict[float, float]]:
    """Return the weight of each source over the steps: straight lines between points that are shares of 200 steps."""
    points = [0, 30, 40, 60, 90, 110, 140, 170, 200]
    photos = np.interp(points, [30, 60, 90, 110], [0.02, 0.6, 0.6, 0.02])
    documents = np.interp(points, [90, 110, 140, 170], [0.02, 0.6, 0.6, 0.02])
    audio = np.interp(points, [40, 60, 140, 170], [0.004, 0.04, 0.04, 0.004])
    shares = [1 - photos - documents - audio, photos, documents, audio]
    return {
        f"{kind}-{n}": {point * steps / 200: float(share) / count for point, share in zip(points, values, strict=True)}
        for (kind, count, _), values in zip(GROUPS, shares, strict=True)
        for n in range(count)
    }


def job_of(folder: Path, steps: int, setting: Setting) -> ol.Job:
    """Write the files and return the job."""
    folder.mkdir()
    rows = {"text": 1500, "photos": 2000, "documents": 2000, "audio": 500}
    return ol.Job(
        sources=[
            waiting_source(
                folder,
                f"{kind}-{n}",
                seconds if kind == "text" else seconds * setting.cost_factor,
                TOKENS,
                rows[kind],
                computes=setting.computes and kind != "text",
            )
            for kind, count, seconds in GROUPS
            for n in range(count)
        ],
        mixture=ol.Mixture.linear(curves(steps)),
        batch=ol.Batch(1024, global_samples=SAMPLES),
    )


def train(job: ol.Job, folder: str, steps: int, workers: int | dict[str, int], most: int, **options: Any) -> Run:
    """Take steps at a pace."""
    run, digests = Run(), hashlib.blake2b(digest_size=8)
    options |= {"cache": f"{folder}/cache", "prefetch": 4, "budget": ol.Budget(cpus=most)}
    with ol.launch(job, loaders_per_source=workers, **options) as service, Watcher(service, run) as watcher:
        client = service.client()
        next_at = 0.0
        for _ in range(steps):
            began = time.perf_counter()
            step = next(client)
            batches = list(step.microbatches)
            run.waits.append(time.perf_counter() - began)
            digests.update("".join([step.plan_digest, *(batch.digest() for batch in batches)]).encode())
            del batches
            run.workers.append(dict(watcher.kinds))
            next_at = max(next_at, began) + STEP_S
            time.sleep(max(0.0, next_at - time.perf_counter()))
    run.digest = digests.hexdigest()
    return run


def setups(job: ol.Job, costs: list[SourceCost], steps: int, total: int) -> dict[str, dict[str, Any]]:
    """Return the workers of each setup, and how many there may be."""
    weights = np.array([job.mixture.weights_at(step, job.names, {}) for step in range(steps)])
    rate = SAMPLES / STEP_S
    # Planner and constructor are paid; what is left are the workers.
    have = Resources(cpus=total + 2, bytes=64 << 30)
    busiest = max(max(demand(row.tolist(), costs, rate)) for row in weights)
    each = whole_workers(1.2 * busiest)
    mean = partition(costs, weights.mean(axis=0).tolist(), have)
    first = partition(costs, weights[0].tolist(), have, samples_per_s=rate)
    return {
        "fixed": {"workers": max(total // len(costs), 1), "most": total},
        "slowest": {"workers": each, "most": each * len(costs)},
        "partition": {"workers": by_name(costs, mean.workers), "most": total},
        "online": {
            "workers": by_name(costs, first.workers),
            "most": total,
            "scaling": ol.Scaling(interval_s=INTERVAL_S),
        },
    }


def real(steps: int, setting: Setting = WAITING) -> dict[str, object]:
    """Return the figures of the four setups, as they really ran."""
    name_of, threads = ("computing_", {"threads": setting.workers}) if setting.computes else ("real_", {})
    with tempfile.TemporaryDirectory(prefix="overlord-scaling-") as folder:
        job = job_of(Path(folder) / "data", steps, setting)
        costs = measured_costs(job, f"{folder}/cache", 24, 1.0)
        runs: dict[str, Run] = {}
        for name, setup in setups(job, costs, steps, setting.workers).items():
            began = time.perf_counter()
            runs[name] = train(job, folder, steps, **setup, **threads)
            print(f"scaling: {name_of}{name} took {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    first, last = runs["fixed"], runs["online"]
    figures = {
        "online_over_fixed_stall": last.stall_s / max(first.stall_s, 1e-9),
        "online_over_fixed_memory": last.peak_buffers / first.peak_buffers,
        "online_over_fixed_pss": last.peak_pss / first.peak_pss,
        "online_over_fixed_worker_s": last.worker_s / first.worker_s,
        "same_digests": len({run.digest for run in runs.values()}) == 1,
        "events": last.events,
        **{f"stall_s_{name}": run.stall_s for name, run in runs.items()},
        **{f"worker_s_{name}": run.worker_s for name, run in runs.items()},
        **{f"cpu_s_{name}": run.cpu_s for name, run in runs.items()},
        **{f"peak_buffers_mb_{name}": run.peak_buffers / 1e6 for name, run in runs.items()},
        **{f"peak_pss_mb_{name}": run.peak_pss / 1e6 for name, run in runs.items()},
        **{f"peak_workers_{name}": run.peak_workers for name, run in runs.items()},
        "rows": {name: [round(1000 * wait, 2) for wait in run.waits] for name, run in runs.items()},
        "workers": {kind: [one[kind] for one in last.workers] for kind, _, _ in GROUPS},
    }
    return {f"{name_of}{key}": value for key, value in figures.items()}
