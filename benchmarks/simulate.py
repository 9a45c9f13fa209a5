"""What `overlord simulate` says of a feed, over what a real one does, at 2, 4, 8 and 16 workers.

Four sources whose samples wait for 20 to 120 ms are profiled, and a `local` launch with `loaders_per_source="auto"` and
so many workers is taken from as fast as it goes. Then a trainer that takes as long for a step as the loaders need for
one, so that it sometimes waits, with 8 workers. Last, sources that compute for a tenth as long, with as many workers as
there are cores, also at 2, 4 and 8 where there are more. The simulator gets the same profile and the same workers; both
sides are of one run.

The figure is the larger of simulated / measured and measured / simulated steps a second, of the worst case.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

import overlord as ol
from benchmarks.measuring import arguments, publish
from benchmarks.waiting_sources import measured_profile, waiting_source
from overlord.launch_spec import LaunchOptions
from overlord.runtimes.autoscaling.profiling import write_profile
from overlord.runtimes.autoscaling.simulation import simulated_feed
from overlord.runtimes.autoscaling.sizing import plan_loaders
from overlord.runtimes.supervision.child import usable_cpus
from overlord.scaling.profiles import Profile

WAITS_S = (0.02, 0.04, 0.06, 0.12)
SAMPLES = 48
"""Of a step."""
BAR = 1.15
PREFETCH = 2


class Feed:
    """Four sources, profiled; simulated and run with any number of workers."""

    def __init__(self, folder: Path, computes: bool) -> None:
        waits = [one / 10 if computes else one for one in WAITS_S]
        sources = [
            waiting_source(folder, f"s{number}", wait, 16, 2000, computes=computes) for number, wait in enumerate(waits)
        ]
        self._folder = folder
        self._job = ol.Job(sources=sources, batch=ol.Batch(64, global_samples=SAMPLES))
        self._profile: Profile = measured_profile(self._job, str(folder / "cache"), 60, 2.0)

    def measure(self, workers: int, seconds: float, step_s: float = 0.0) -> dict[str, float]:
        """Return the steps a second that are simulated and that a launch gives, and what was waited for."""
        path = self._folder / "simulate.profile.json"
        write_profile(path, self._profile)  # a service that ends brings it up to date
        options = LaunchOptions(budget=ol.Budget(cpus=workers), profile=str(path))
        plan = plan_loaders(self._job, options, self._profile)
        counts = np.tile(np.array(plan.shares) * SAMPLES, (600, 1))
        fed = simulated_feed(plan.costs, counts, plan.found.workers, step_s, slots=workers, prefetch=PREFETCH)
        steps = max(round(seconds * fed.steps_per_s), 4)
        warm_up = 8 + 2 * PREFETCH  # what was read ahead is used up by then
        auto = {"loaders_per_source": "auto", "profile": str(path), "budget": options.budget}
        with ol.launch(self._job, cache=str(self._folder / "cache"), prefetch=PREFETCH, **auto) as service:
            client, waited_s, began, cpu_s = service.client(), 0.0, 0.0, 0.0
            for number in range(warm_up + steps):
                if number == warm_up:
                    waited_s, began, cpu_s = 0.0, time.perf_counter(), _cpu_s(service.pid)
                asked = time.perf_counter()
                next(client)
                waited_s += time.perf_counter() - asked
                time.sleep(step_s)
            took, cpu_s = time.perf_counter() - began, _cpu_s(service.pid) - cpu_s
        return {
            "simulated": fed.steps_per_s,
            "measured": steps / took,
            "simulated_over_measured": fed.steps_per_s * took / steps,
            "simulated_waits": fed.stall_s / fed.seconds,
            "measured_waits": waited_s / took,
            "cores_had": cpu_s / took,
        }


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a service and its processes: a busy host gives sources that compute fewer cores."""
    root = psutil.Process(pid)
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each case, about")
    parser.add_argument("--cores", type=int, help="cores for sources that compute (default: those there are)")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    cores = min(options.cores or usable_cpus(), 16)
    seconds, most = (1.0, 4) if options.quick else (options.seconds, 16)
    counts = [workers for workers in (2, 4, 8, 16) if workers <= most]
    computing = sorted({cores, *(workers for workers in (2, 4, 8) if workers < cores)})
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="overlord-simulate-") as folder:
        for kind, cases in (("waiting", counts), ("computing", computing)):
            (place := Path(folder) / kind).mkdir()
            feed = Feed(place, kind == "computing")
            for workers in cases:
                found[f"{kind}_{workers}"] = feed.measure(workers, seconds)
            if kind == "waiting":
                pace = 1 / found[f"{kind}_{min(most, 8)}"]["simulated"]
                found["paced"] = feed.measure(min(most, 8), seconds, pace)
    for name, one in found.items():
        print(f"simulate: {name} {one['simulated_over_measured']:.3f}", file=sys.stderr, flush=True)
    ratios = {name: one["simulated_over_measured"] for name, one in found.items()}
    figures: dict[str, object] = {
        "off_by": max(max(ratio, 1 / ratio) for ratio in ratios.values()),
        "bar": BAR,
        "cores": cores,
        "workers_waiting": counts,
        "workers_computing": computing,
        **{f"{kind}_simulated_over_measured": [ratios[name] for name in ratios if name.startswith(kind)]
           for kind in ("waiting", "computing")},
        "slowest_waiting": ratios[f"waiting_{counts[0]}"],
        "fastest_waiting": ratios[f"waiting_{counts[-1]}"],
        "computing": ratios[f"computing_{cores}"],
        # The same for each second of a core: on a busy host workers do not have a core each.
        "computing_by_cpu_time": ratios[f"computing_{cores}"] * found[f"computing_{cores}"]["cores_had"] / cores,
        **{f"{key}_{name}": value for name, one in found.items() for key, value in one.items()},
    }  # fmt: skip
    publish("simulate", figures, options.json)


if __name__ == "__main__":
    main()
