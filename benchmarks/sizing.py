"""How fast 306 sources are fed, predicted from a profile, over how fast they are.

A sample of a source waits for 0.1 ms to 100 ms: the spread of the paper's figure 5, three orders of magnitude, drawn
lognormally over the sources. They are profiled on a few samples each, `partition` deals out 32 workers, and a launch
with those workers is fed from as fast as it goes. Once with all sources alike, once with weights that fall off from
source to source, so that some are drawn a hundred times as often as others.

The figure is the larger of predicted / measured and measured / predicted, of the two mixtures.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import overlord as ol
from benchmarks.measuring import arguments, publish
from benchmarks.waiting_sources import by_name, measured_costs, waiting_source
from overlord.scaling.costs import Resources, SourceCost
from overlord.scaling.partition import Partition, partition

SOURCES = 306
WORKERS = 32
BAR = 1.25
LEAST_S, MOST_S = 0.0001, 0.1
SAMPLES = 612
"""Of a step: two of each source, where all are alike."""


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


def sized(costs: Sequence[SourceCost], weights: Sequence[float]) -> Partition:
    """Return the partition: workers are what is bounded."""
    none = Resources(cpus=WORKERS + 2, bytes=64 << 30)
    return partition(costs, list(weights), none)


def fed(job: ol.Job, cache: str, workers: dict[str, int], warm_up_s: float, seconds: float) -> tuple[float, float]:
    """Return the samples a second of a launch that is taken from as fast as it goes, and the steps that it took."""
    limits = ol.Budget(cpus=WORKERS)
    with ol.launch(job, cache=cache, prefetch=2, loaders_per_source=workers, budget=limits) as service:
        client = service.client()
        began, steps, taken = time.perf_counter(), 0, 0
        while time.perf_counter() - began < warm_up_s:
            next(client)
            taken += 1
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            next(client)
            steps += 1
        took = time.perf_counter() - began
    return steps * SAMPLES / took, steps


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--sources", type=int, default=SOURCES, help="how many")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each mixture")
    parser.add_argument("--warm-up", type=float, default=8.0, help="seconds before, of each mixture")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    count, seconds, warm_up = (
        (40, 2.0, 1.0) if options.quick else (options.sources, options.seconds, options.warm_up)
    )
    figures: dict[str, object] = {}
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="overlord-sizing-") as folder:
        waits = latencies(count)
        sources = [waiting_source(Path(folder), f"s{n:03d}", wait, 16, 400) for n, wait in enumerate(waits)]
        batch = ol.Batch(64, global_samples=SAMPLES)
        began = time.perf_counter()
        costs = measured_costs(ol.Job(sources=sources, batch=batch), f"{folder}/cache", 12, 0.3)
        profiled_s = time.perf_counter() - began
        for name, skewed in (("uniform", False), ("skewed", True)):
            weights = weights_of(count, skewed)
            found = sized(costs, weights)
            mixture = ol.Mixture({cost.name: weight for cost, weight in zip(costs, weights, strict=True)})
            job = ol.Job(sources=sources, mixture=mixture, batch=batch)
            rate, steps = fed(job, f"{folder}/cache", by_name(costs, found.workers), warm_up, seconds)
            ratios.append(found.samples_per_s / rate)
            figures |= {
                f"predicted_over_measured_{name}": found.samples_per_s / rate,
                f"predicted_samples_per_s_{name}": found.samples_per_s,
                f"measured_samples_per_s_{name}": rate,
                f"steps_{name}": steps,
                f"sources_with_more_than_one_worker_{name}": sum(n > 1 for n in found.workers),
                f"most_workers_of_a_source_{name}": max(found.workers),
                f"limit_{name}": found.limit,
            }
    off = [max(ratio, 1 / ratio) for ratio in ratios]
    head: dict[str, object] = {
        "off_by": max(off),
        "bar": BAR,
        "predicted_over_measured": ratios[off.index(max(off))],
        "sources": count,
        "workers": WORKERS,
        "profiled_s": profiled_s,
        "cost_ms_least_and_most": [1000 * min(c.transform_s for c in costs), 1000 * max(c.transform_s for c in costs)],
    }
    publish("sizing", head | figures, options.json)


if __name__ == "__main__":
    main()
