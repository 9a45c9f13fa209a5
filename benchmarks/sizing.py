"""How fast 306 sources are fed, predicted from a profile, over how fast they are.

A sample of a source waits for 0.5 ms to 500 ms: the spread of the paper's figure 5, three orders of magnitude, drawn
lognormally over the sources. It is that long so that some hundred samples a second keep all workers busy: waits decide
then, and not what one interpreter can do. They are profiled on a few samples each, a launch with
`loaders_per_source="auto"` and 32 workers starts what `overlord profile --plan` predicts the rate of, and is taken from
as fast as it goes, after a warm-up in which what was read ahead is used up. Once with all sources alike, once with
weights that fall off from source to source, so that some are drawn a hundred times as often as others.

With --work compute the samples keep process workers busy instead, a tenth as long, and there are as many workers as the
host has cores, less one for the service: for a host of 16 cores.

The figure is the larger of predicted / measured and measured / predicted, of the two mixtures.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import overlord as ol
from benchmarks.measuring import arguments, publish
from benchmarks.waiting_sources import measured_profile, waiting_source
from overlord.launch_spec import LaunchOptions
from overlord.runtimes.autoscaling.profiling import write_profile
from overlord.runtimes.autoscaling.sizing import plan_loaders
from overlord.runtimes.supervision.child import usable_cpus

SOURCES = 306
WORKERS = 32
BAR = 1.2
LEAST_S, MOST_S = 0.0005, 0.5
SAMPLES = 306
"""Of a step."""


def latencies(count: int) -> list[float]:
    """Return what a sample of each source waits for: lognormal, between the bounds of figure 5."""
    middle, half = np.log(LEAST_S * MOST_S) / 2, np.log(MOST_S / LEAST_S) / 2
    drawn = np.random.default_rng(5).normal(middle, half / 2.5, count)
    drawn[np.argsort(drawn)[[0, -1]]] = np.log([LEAST_S, MOST_S])
    return np.exp(np.clip(drawn, np.log(LEAST_S), np.log(MOST_S))).tolist()


def weights_of(count: int, skewed: bool) -> list[float]:
    """Return the weight of each source: all alike, or from 1 down to a hundredth in an order of their own."""
    if not skewed:
        return [1.0] * count
    places = np.random.default_rng(6).permutation(count)
    return (0.01 ** (places / max(count - 1, 1))).tolist()


def fed(job: ol.Job, launch: LaunchOptions, cache: str, warm_up_s: float, seconds: float) -> dict[str, float]:
    """Take from a launch as fast as it goes; return the samples a second, and how busy workers and CPUs were."""
    auto = {"loaders_per_source": "auto", "profile": launch.profile, "budget": launch.budget}
    with ol.launch(job, cache=cache, prefetch=2, **auto) as service:
        client = service.client()
        began = time.perf_counter()
        while time.perf_counter() - began < warm_up_s:
            next(client)
        before, began, steps = _done(service.status()), time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            next(client)
            steps += 1
        took = time.perf_counter() - began
        prepared, busy_s, cpu_s = (b - a for a, b in zip(before, _done(service.status()), strict=True))
    return {
        "measured_samples_per_s": steps * SAMPLES / took,
        "prepared_samples_per_s": prepared / took,
        "busy_workers": busy_s / took,
        "busy_cpus": cpu_s / took,
        "steps": steps,
    }


def _done(status: dict[str, Any]) -> tuple[float, float, float]:
    """Return what a service has prepared, how long its workers were busy, and the CPU seconds of its processes."""
    root, sources = psutil.Process(status["pid"]), status["sources"].values()
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    prepared, busy_s = sum(one["samples_prepared"] for one in sources), sum(one["busy_s"] for one in sources)
    return float(prepared), busy_s, sum(one.user + one.system for one in times)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--sources", type=int, default=SOURCES, help="how many")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each mixture")
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds before, of each mixture")
    parser.add_argument("--work", choices=("wait", "compute"), default="wait", help="what samples do")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    count, seconds, warm_up = (40, 2.0, 1.0) if options.quick else (options.sources, options.seconds, options.warm_up)
    computes = options.work == "compute"
    workers = max(usable_cpus() - 1, 1) if computes else WORKERS
    figures: dict[str, object] = {}
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="overlord-sizing-") as folder:
        waits = [one / 10 for one in latencies(count)] if computes else latencies(count)
        sources = [
            waiting_source(Path(folder), f"s{n:03d}", wait, 16, 400, computes=computes) for n, wait in enumerate(waits)
        ]
        batch, path = ol.Batch(64, global_samples=SAMPLES), Path(folder) / "sizing.profile.json"
        launch = LaunchOptions(budget=ol.Budget(cpus=workers), profile=str(path))
        began = time.perf_counter()
        profile = measured_profile(ol.Job(sources=sources, batch=batch), f"{folder}/cache", 6, 0.15)
        profiled_s = time.perf_counter() - began
        for name, skewed in (("uniform", False), ("skewed", True)):
            write_profile(path, profile)  # a service that ends brings it up to date
            weights = dict(zip((source.name for source in sources), weights_of(count, skewed), strict=True))
            job = ol.Job(sources=sources, mixture=ol.Mixture(weights), batch=batch)
            found = plan_loaders(job, launch, profile).found
            run = fed(job, launch, f"{folder}/cache", warm_up, seconds)
            ratios.append(found.samples_per_s / run["measured_samples_per_s"])
            print(f"sizing: {name} {ratios[-1]:.3f}", file=sys.stderr, flush=True)
            figures |= {
                f"predicted_over_measured_{name}": ratios[-1],
                f"predicted_samples_per_s_{name}": found.samples_per_s,
                **{f"{key}_{name}": value for key, value in run.items()},
                f"actors_{name}": len(found.actors),
                f"sources_with_more_than_one_worker_{name}": sum(n > 1 for n in found.workers),
                f"most_workers_of_a_source_{name}": max(found.workers),
                f"limit_{name}": found.limit,
            }
    off, costs = [max(ratio, 1 / ratio) for ratio in ratios], [one.transform_s for one in profile.sources]
    head: dict[str, object] = {
        "off_by": max(off),
        "bar": BAR,
        "predicted_over_measured": ratios[off.index(max(off))],
        "sources": count,
        "workers": workers,
        "profiled_s": profiled_s,
        "cost_ms_least_and_most": [1000 * min(costs), 1000 * max(costs)],
    }
    publish("sizing", head | figures, options.json)


if __name__ == "__main__":
    main()
