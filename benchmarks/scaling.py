"""Right-sized loaders: what a trainer waits for, and what the feed takes, while a curriculum moves the mixture.

31 sources: 19 of text (0.3 ms a sample), 4 of photos and 4 of documents (40 ms), 4 of audio (160 ms). Over 200 steps
the weight goes from text to photos, from photos to documents, and back to text; the trainer takes a step a second.
Four setups, each on 64 CPUs, of which the planner and a constructor have two:

    fixed       two workers for each source: as many as there are CPUs
    slowest     every source has what the slowest one needs at its worst; threads, so CPUs are shared, memory is not
    partition   workers of `partition` for the mean of the schedule, all CPUs and the memory of `fixed` given to it
    online      the same to begin with for the first step; `decide` once in two steps, within the CPUs and the memory
                of `fixed`, with measured costs that wander by 3 %; new workers take 1.5 s to start, in a new host 5 s

Simulated: see `overlord.scaling.feed_simulator`. Every worker has the same budget of bytes.

And the same four setups in a real run, smaller and with sources that wait: see scaling_real.py. What its setups hold in
read buffers and what their process takes is measured while they run. Figures of it begin with `real_`; those of a run
with sources that compute, on hosts with enough cores, with `computing_`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks.measuring import arguments, publish
from benchmarks.scaling_real import FEWEST_CORES, computing, real
from overlord.runtimes.supervision.child import usable_cpus
from overlord.scaling.autoscaler import Fleet, Scaling, decide
from overlord.scaling.feed_simulator import Outcome, World, simulate
from overlord.scaling.partition import partition, whole_workers
from overlord.scaling.profiles import Resources, SourceCost

CPUS = 64
BAR, MEMORY_BAR = 0.05, 1.0
MB = 1 << 20
GROUPS = (("text", 19, 0.0003, 4 * MB), ("photos", 4, 0.04, 12 * MB), ("documents", 4, 0.04, 12 * MB),
          ("audio", 4, 0.16, 12 * MB))  # fmt: skip
BUFFER = 16 * MB
NOISE = 0.03


def curriculum(steps: int) -> World:
    """Return the sources and how the mixture moves: points are shares of 200 steps."""
    costs = tuple(
        SourceCost(name=f"{group}-{n}", transform_s=cost, file_bytes=files, buffer_bytes=BUFFER)
        for group, count, cost, files in GROUPS
        for n in range(count)
    )
    at = np.arange(steps) * 200 / steps
    photos = np.interp(at, [30, 60, 90, 110], [0.02, 0.6, 0.6, 0.02])
    documents = np.interp(at, [90, 110, 140, 170], [0.02, 0.6, 0.6, 0.02])
    audio = np.interp(at, [40, 60, 140, 170], [0.004, 0.02, 0.02, 0.004])
    weights = [1 - photos - documents - audio, photos, documents, audio]
    columns = []
    for (_, count, _, _), share in zip(GROUPS, weights, strict=True):
        inside = np.arange(count, 0, -1.0) if count < 10 else np.ones(count)
        columns += [share * part for part in inside / inside.sum()]
    return World(costs=costs, shares=np.stack(columns, axis=1), samples=1024, step_s=1.0, cpus=CPUS - 2)


def fixed(world: World) -> Outcome:
    """The same workers for each source."""
    return simulate(world, [world.cpus // len(world.costs)] * len(world.costs))


def slowest(world: World) -> Outcome:
    """Every source gets what the slowest one needs at its worst."""
    busy = world.shares * world.samples / world.step_s * [cost.transform_s for cost in world.costs]
    return simulate(world, [whole_workers(1.2 * float(busy.max()))] * len(world.costs))


def resources_of(world: World, most_bytes: int) -> Resources:
    """Return what a setup may take: the CPUs, and as many bytes of loaders as the fixed one."""
    none = Resources(cpus=CPUS, bytes=0, constructors=1, per_actor=world.per_actor, actor_bytes=world.actor_bytes)
    return dataclasses.replace(none, bytes=most_bytes - none.loader_bytes)


def static(world: World, most_bytes: int) -> Outcome:
    """The offline partition for the mean of the schedule."""
    found = partition(world.costs, list(world.shares.mean(axis=0)), resources_of(world, most_bytes))
    return simulate(world, found.workers)


def online(world: World, most_bytes: int) -> Outcome:
    """The offline partition for how the schedule begins, and a decision in every interval."""
    luck = np.random.default_rng(1)
    rate = world.samples / world.step_s
    found = partition(world.costs, list(world.shares[0]), resources_of(world, most_bytes), samples_per_s=rate)
    hosts = -(-world.cpus // world.per_actor)
    settings = Scaling()

    def scale(step: int, workers: tuple[int, ...]) -> tuple[int, ...]:
        # An interval's shares are its mean; the last ones stay.
        rows = [world.shares[begin : begin + world.interval].mean(axis=0).tolist()
                for begin in range(0, len(world.shares), world.interval)]  # fmt: skip
        now = step // world.interval
        measured = [
            dataclasses.replace(cost, transform_s=cost.transform_s * (1 + luck.uniform(-NOISE, NOISE)))
            for cost in world.costs
        ]
        # Further copies of a source's files count too: two of them for the largest source of each group.
        fleet = Fleet(workers=workers, samples_per_s=rate, cpus=world.cpus,
                      bytes=most_bytes - hosts * world.actor_bytes - 6 * 12 * MB)  # fmt: skip
        return decide(rows[:now], rows[now:], measured, fleet, settings).workers

    return simulate(world, found.workers, scale)


def simulated(steps: int) -> dict[str, object]:
    """Return the figures of the four setups on the simulated clock."""
    world = curriculum(steps)
    first = fixed(world)
    outcomes = {
        "fixed": first,
        "slowest": slowest(world),
        "partition": static(world, first.peak_bytes),
        "online": online(world, first.peak_bytes),
    }
    last = outcomes["online"]
    return {
        "online_over_fixed_stall": last.stall_s / max(first.stall_s, 1e-9),
        "bar": BAR,
        "online_over_fixed_memory": last.peak_bytes / first.peak_bytes,
        "memory_bar": MEMORY_BAR,
        "online_over_fixed_worker_s": last.worker_s / first.worker_s,
        "events": last.events,
        **{f"stall_s_{name}": one.stall_s for name, one in outcomes.items()},
        **{f"worker_s_{name}": one.worker_s for name, one in outcomes.items()},
        **{f"used_cpu_s_{name}": one.used_cpu_s for name, one in outcomes.items()},
        **{f"peak_mb_{name}": one.peak_bytes / 1e6 for name, one in outcomes.items()},
        **{f"peak_workers_{name}": one.peak_workers for name, one in outcomes.items()},
        "rows": {name: [round(1000 * wait, 2) for wait in one.waits] for name, one in outcomes.items()},
    }


def main() -> None:
    """Simulate, run, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=200, help="steps of the curriculum")
    parser.add_argument(
        "--cores", type=int, help="cores for the sources that compute, which are run then (default: those there are)"
    )
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    steps = 40 if options.quick else options.steps
    cores: int = options.cores or usable_cpus()
    figures = simulated(steps) | real(steps)
    if cores >= FEWEST_CORES or options.cores:
        figures |= real(steps, computing(cores))
    worst = max(float(str(value)) for key, value in figures.items() if key.endswith("online_over_fixed_stall"))
    more = {"cores": cores, "cores_of_sources_that_compute": f"at least {FEWEST_CORES}, else they are not run"}
    publish("scaling", {"worst_online_over_fixed_stall": worst, **more, **figures}, options.json)


if __name__ == "__main__":
    main()
