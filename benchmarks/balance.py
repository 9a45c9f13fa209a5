"""How near balancing comes to what no placement can beat, and how long it takes, against what others do.

Everything is a model: costs s^2 + 24576 s of made-up lengths, not seconds of training. The questions:
the largest of k bins; the lockstep time of D buckets x M microbatches under a cap of tokens, lengths cut to the cap
as a job's context is; and where blocks of ranks share long items (hybrid data parallelism): the end of ranks that run
free, the lockstep time with equal counts, and the slowest of pipelines. Every baseline gets the same items in
the same run; they are written here in the manner of the projects they are named after.

Bounds of hybrid data parallelism. The ranks that share an item bear equal parts of it: however items are shared, all
ranks together bear the cost W of all items, and one of the R ranks at least W / R. No time is below that, free or in
lockstep. Where an item has as few ranks as its memory needs, cost / ranks is a bound too. A pipeline of p stages takes
sum_m c + (p - 1) max_m c. With at most M microbatches (our own number: more would lower bound and time alike) max_m c
is at least sum_m c / M, so the slowest pipeline takes W / R (1 + (p - 1) / M). And if g ranks share the costliest item
C, each of these has max_m c >= C / g: the mean of all, with their bubbles, is at least W / R + (p - 1) C / R. A
simulated schedule may be a little shorter than that model of a pipeline: its bubble is that of the first and the last
microbatch, not of the largest. Communication costs nothing here: sharing is never dearer than not sharing.
"""

from __future__ import annotations

import heapq
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.measuring import arguments, publish
from benchmarks.schedules import first_ranks, simulate
from overlord.planning.balancing.balance import Objective, balance, deal_slabs, place
from overlord.planning.balancing.evenness import lockstep_bound
from overlord.planning.balancing.hybrid import Blocks, HybridPlacement, buddy_lpt, hybrid_microbatches, ranks_needed
from overlord.planning.balancing.methods import loads

Int64s = npt.NDArray[np.int64]
T = TypeVar("T")

KAPPA = 24_576
KINDS = ("lognormal", "heavy", "bimodal")
BARS = {"bins": 1.001, "lockstep": 1.01, "hybrid": 1.02, "hybrid_lockstep": 1.01, "hybrid_pipelines": 1.05}
PLANNING_BAR = 3.0
HYBRID_CAP = 4096
STAGES = 4
HYBRID = ((512, 64), (2048, 64), (4096, 256))
"""Items and ranks."""
HYBRID_ODD = ((700, 12), (2000, 96))
"""The same, where the longest items need 8 ranks and wider blocks of 2^j ranks do not fit: for any blocks."""


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one instance."""

    instance: str
    method: str
    ratio: float
    """Its time over the bound."""
    seconds: float
    note: str = ""


def makespan_bound(costs: npt.ArrayLike, num_bins: int) -> int:
    """Return a lower bound of the largest of k bins: the mean, the largest item, and items k and k + 1 together.

    Of the k + 1 largest items two share a bin.
    """
    falling = np.sort(np.asarray(costs, np.int64))[::-1]
    if len(falling) == 0:
        return 0
    pair = int(falling[num_bins - 1] + falling[num_bins]) if len(falling) > num_bins else 0
    return max(-(-int(falling.sum()) // num_bins), int(falling[0]), pair)


def make_lengths(kind: str, count: int) -> Int64s:
    """Draw lengths between 16 and 32768 tokens, always the same ones."""
    rng = np.random.default_rng(0)
    if kind == "lognormal":
        drawn = rng.lognormal(6.5, 1.2, count)
    elif kind == "heavy":
        drawn = 200 * (1 + rng.pareto(1.1, count))
    else:
        drawn = np.where(rng.random(count) < 0.0011, rng.normal(16000, 6000, count), rng.lognormal(6.3, 0.8, count))
    return drawn.clip(16, 32768).astype(np.int64)


def cost_of(tokens: Int64s) -> Int64s:
    return tokens * tokens + KAPPA * tokens


def timed(work: Callable[[], T], rounds: int = 3) -> tuple[T, float]:
    """Return what the work returns and the median of its seconds."""
    found, seconds = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        found.append(work())
        seconds.append(time.perf_counter() - began)
    return found[-1], statistics.median(seconds)


def round_robin(costs: Int64s, num_bins: int) -> Int64s:
    return np.arange(len(costs)) % num_bins


def argmin_lpt(costs: Int64s, num_bins: int, sizes: Int64s | None = None, capacity: int = 0) -> Int64s:
    """Longest first, all bins looked at for every item (VeOmni); with sizes only the bins with room."""
    load, bins = np.zeros(num_bins, np.int64), np.empty(len(costs), np.int64)
    room = np.full(num_bins, capacity, np.int64)
    for item in np.argsort(-costs, kind="stable"):
        seen = load if sizes is None else np.where(room >= sizes[item], load, np.iinfo(np.int64).max)
        chosen = int(np.argmin(seen))
        bins[item] = chosen
        load[chosen] += costs[item]
        if sizes is not None:
            room[chosen] -= sizes[item]
    return bins


def equal_counts(costs: Int64s, num_bins: int) -> Int64s:
    """As many items to every bin (verl's `equal_size`): in rounds, the largest to the least loaded."""
    load, bins = np.zeros(num_bins, np.int64), np.empty(len(costs), np.int64)
    order = np.argsort(-costs, kind="stable")
    for start in range(0, len(costs), num_bins):
        items = order[start : start + num_bins]
        chosen = np.argsort(load, kind="stable")[: len(items)]
        bins[items] = chosen
        load[chosen] += costs[items]
    return bins


def dense_karmarkar_karp(costs: Int64s, num_bins: int) -> Int64s:
    """Largest differencing with a whole tuple of bins in every partial solution (verl), in plain Python."""
    heap = []
    for item, cost in enumerate(costs.tolist()):
        tuples = [(cost, [item])] + [(0, [])] * (num_bins - 1)
        heap.append((-cost, item, tuples))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + c, b + d) for (a, b), (c, d) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    bins = np.empty(len(costs), np.int64)
    for chosen, (_, items) in enumerate(heap[0][2]):
        bins[items] = chosen
    return bins


def next_fit(tokens: Int64s, capacity: int) -> Int64s:
    """In drawing order, a new bin when the next item does not fit (Megatron's order-preserving packing)."""
    bins, current, used = np.empty(len(tokens), np.int64), 0, 0
    for item, size in enumerate(tokens.tolist()):
        if used + size > capacity and used:
            current, used = current + 1, 0
        used += size
        bins[item] = current
    return bins


def hybrid_groups(costs: Int64s, cp_sizes: Int64s, num_ranks: int) -> float:
    """Blocks in groups with a barrier after each (Megatron's hybrid CP); return the sum of the groups' maxima.

    Costliest first: a block of free ranks, or else the least loaded block of that size, unless that would make the
    group more than 5 % longer: then it is closed. Not the project's code, but its shape.
    """
    waiting = np.argsort(-costs, kind="stable").tolist()
    total = 0.0
    while waiting:
        free, longest, kept, closed = num_ranks, 0.0, [], False
        blocks: dict[int, list[float]] = {}
        for item in waiting:
            size, share = int(cp_sizes[item]), float(costs[item] / cp_sizes[item])
            same = blocks.setdefault(size, [])
            if not closed and free >= size:
                heapq.heappush(same, share)
                free -= size
                longest = max(longest, share)
            elif not closed and same and same[0] + share <= 1.05 * longest:
                longest = max(longest, same[0] + share)
                heapq.heapreplace(same, same[0] + share)
            else:
                closed = closed or not same or size == 1
                kept.append(item)
        total += longest
        waiting = kept
    return total


def measure_bins(quick: bool) -> list[Row]:
    """The largest of k bins over the bound."""
    rows = []
    instances = [(2000, 64), (16_384, 1024)] + ([] if quick else [(300_000, 4096)])
    for count, num_bins in instances:
        for kind in KINDS:
            costs = cost_of(make_lengths(kind, count))
            bound = makespan_bound(costs, num_bins)
            methods: dict[str, Callable[[], Int64s]] = {
                "overlord greedy": lambda c=costs, k=num_bins: balance(c, k),
                "overlord karmarkar_karp": lambda c=costs, k=num_bins: balance(c, k, "karmarkar_karp"),
                "round robin": lambda c=costs, k=num_bins: round_robin(c, k),
                "argmin longest first (VeOmni)": lambda c=costs, k=num_bins: argmin_lpt(c, k),
                "equal counts (verl)": lambda c=costs, k=num_bins: equal_counts(c, k),
            }
            if count == 2000:
                methods["dense Karmarkar-Karp (verl)"] = lambda c=costs, k=num_bins: dense_karmarkar_karp(c, k)
            for name, method in methods.items():
                bins, seconds = timed(method, 3 if name.startswith("overlord") else 1)
                ratio = float(loads(costs, bins, num_bins).max() / bound)
                rows.append(Row(f"{count} in {num_bins} bins, {kind}", name, ratio, seconds))
    return rows


def lockstep_time(costs: Int64s, bins: Int64s, num_buckets: int) -> int:
    """Sum the slabs' maxima where bin b is microbatch b // D of bucket b % D."""
    num_slabs = int(bins.max()) // num_buckets + 1
    return int(loads(costs, bins, num_slabs * num_buckets).reshape(num_slabs, num_buckets).max(axis=1).sum())


def measure_lockstep(quick: bool) -> list[Row]:
    """The sum over microbatches of the slowest bucket, over the bound that knows the cap."""
    rows = []
    instances = [(16_384, 256, 8)] + ([] if quick else [(300_000, 4096, 8)])
    for count, num_buckets, num_microbatches in instances:
        for kind in KINDS:
            for factor in (1.5, 2.0, 4.0):
                tokens = make_lengths(kind, count)
                capacity = int(factor * tokens.sum() / (num_buckets * num_microbatches))
                tokens = np.minimum(tokens, capacity)
                label = f"{count} in {num_buckets} x {num_microbatches}, {kind}, cap {factor:g} x mean"
                rows += lockstep_rows(label, tokens, num_buckets, num_microbatches, capacity)
    return rows


def lockstep_rows(label: str, tokens: Int64s, num_buckets: int, num_microbatches: int, capacity: int) -> list[Row]:
    """Measure one instance."""
    costs, num_bins = cost_of(tokens), num_buckets * num_microbatches
    bound = lockstep_bound(costs, tokens, num_buckets, num_microbatches, capacity)
    limit = what_limits(costs, bound, num_buckets)

    def slabs(bins: Int64s) -> Int64s:
        bucket, microbatch = np.divmod(
            deal_slabs(loads(costs, bins, num_bins), num_buckets, num_microbatches), num_microbatches
        )
        return (microbatch * num_buckets + bucket)[bins]

    def ours() -> Int64s:
        places = place(costs, tokens, num_buckets, num_microbatches, capacity)
        if places is None:
            raise RuntimeError(f"{label}: no placement found")
        bucket, microbatch = np.divmod(places, num_microbatches)
        return microbatch * num_buckets + bucket

    def dealt() -> Int64s:
        bins = np.empty(len(tokens), np.int64)
        for bucket in range(num_buckets):
            mine = slice(bucket, None, num_buckets)
            bins[mine] = next_fit(tokens[mine], capacity) * num_buckets + bucket
        return bins

    methods: dict[str, Callable[[], Int64s]] = {
        "overlord lockstep": ours,
        "round robin, next fit inside": dealt,
        "next fit in order (Megatron)": lambda: next_fit(tokens, capacity),
        "equal counts (verl), then slabs": lambda: slabs(equal_counts(costs, num_bins)),
    }
    if num_bins <= 2048:
        methods["argmin longest first (VeOmni), then slabs"] = lambda: slabs(
            argmin_lpt(costs, num_bins, tokens, capacity)
        )
    rows = []
    for name, method in methods.items():
        bins, seconds = timed(method, 3 if name.startswith("overlord") else 1)
        over = int((loads(tokens, bins, int(bins.max()) + 1) > capacity).sum())
        note = f"{over} bins over the cap" if over else limit if name.startswith("overlord") else ""
        rows.append(Row(label, name, lockstep_time(costs, bins, num_buckets) / bound, seconds, note))
    return rows


def what_limits(costs: Int64s, bound: int, num_buckets: int) -> str:
    """Say what keeps the bound above even slabs."""
    mean = costs.sum() / num_buckets
    if bound <= 1.001 * mean:
        return "bound: the mean"
    return (
        f"bound: {bound / mean:.2f} x the mean: beside the longest items bins are full of tokens before they are high"
    )


def hybrid_instances(quick: bool) -> list[tuple[str, Int64s, int, Blocks]]:
    """Return label, lengths, ranks and blocks of each instance of hybrid data parallelism."""
    both: tuple[Blocks, ...] = ("aligned", "any")
    sizes = [(one, both) for one in (HYBRID[:2] if quick else HYBRID)] + [(one, both[1:]) for one in HYBRID_ODD]
    return [
        (f"{count} on {ranks} ranks, {kind}, cap {HYBRID_CAP}, blocks {one}", make_lengths(kind, count), ranks, one)
        for (count, ranks), blocks in sizes
        for kind in KINDS
        for one in blocks
    ]


def measure_hybrid(quick: bool) -> list[Row]:
    """When the last rank ends where ranks run free and blocks of them share long items, over the bound."""
    rows = []
    for label, tokens, num_ranks, blocks in hybrid_instances(quick):
        costs, cp = cost_of(tokens), ranks_needed(tokens, HYBRID_CAP)
        mean = costs.sum() / num_ranks
        if blocks == "any":
            placed, seconds = timed(lambda c=costs, s=tokens, r=num_ranks: hybrid(c, s, r, "sum", blocks="any"))
            rows.append(Row(label, "overlord, any blocks", placed.free_time(costs) / mean, seconds, widths(placed)))
            continue
        bound = max(mean, float((costs / cp).max()))
        (_, load), seconds = timed(lambda c=costs, g=cp, r=num_ranks: buddy_lpt(c, g, r))
        rows.append(Row(label, "overlord buddy blocks", float(load.max() / bound), seconds))
        groups, seconds = timed(lambda c=costs, g=cp, r=num_ranks: hybrid_groups(c, g, r), 1)
        rows.append(Row(label, "groups with barriers (Megatron)", groups / bound, seconds))
    return rows


def hybrid(costs: Int64s, tokens: Int64s, num_ranks: int, objective: Objective, **options: Any) -> HybridPlacement:
    """Place items as the strategy hdp does."""
    placed = hybrid_microbatches(costs, tokens, num_ranks, HYBRID_CAP, objective=objective, **options)
    if placed is None:
        raise RuntimeError(f"{len(costs)} items do not fit on {num_ranks} ranks")
    return placed


def widths(placed: HybridPlacement) -> str:
    """Say how items are shared."""
    shared, most = float((placed.cp_size > 1).mean()), placed.num_microbatches.max()
    return f"{most} microbatches; {shared:.0%} of items shared, by up to {placed.cp_size.max()} ranks"


def measure_hybrid_lockstep(quick: bool) -> list[Row]:
    """The sum over microbatches of the slowest rank, all ranks with equal counts, over the mean of all ranks."""
    rows = []
    for label, tokens, num_ranks, blocks in hybrid_instances(quick):
        costs = cost_of(tokens)
        mean = costs.sum() / num_ranks
        for name, widen in (("overlord", True), ("no more ranks than memory needs", False)):
            options = {"equal_counts": True, "blocks": blocks, "widen": widen}
            placed, seconds = timed(
                lambda c=costs, s=tokens, r=num_ranks, o=options: hybrid(c, s, r, "lockstep", **o), 3 if widen else 1
            )
            time = placed.loads(costs).max(axis=0).sum()
            rows.append(Row(label, name, float(time / mean), seconds, widths(placed)))
        if blocks == "aligned":
            cp = ranks_needed(tokens, HYBRID_CAP)
            groups, seconds = timed(lambda c=costs, g=cp, r=num_ranks: hybrid_groups(c, g, r), 1)
            rows.append(Row(label, "groups with barriers (Megatron)", groups / mean, seconds))
    return rows


def measure_hybrid_pipelines(quick: bool) -> list[Row]:
    """The slowest pipeline over the bound, and against data-parallel groups of context-parallel ranks."""
    rows = []
    for label, tokens, num_ranks, blocks in hybrid_instances(quick):
        costs = cost_of(tokens)
        placed, seconds = timed(lambda c=costs, s=tokens, r=num_ranks, b=blocks: hybrid(c, s, r, "pipeline", blocks=b))
        load, most, mean = placed.loads(costs), int(placed.num_microbatches.max()), costs.sum() / num_ranks
        bound = mean + (STAGES - 1) * max(mean / most, costs.max() / num_ranks)
        simulated = simulate(load, first_ranks(placed), placed.num_microbatches, STAGES)
        note = f"{widths(placed)}; simulated 1F1B {simulated / bound:.3f}"
        instance = f"{label}, {STAGES} stages"
        rows.append(Row(instance, "overlord hdp", pipeline_time(load) / bound, seconds, note))
        cp = 8 if num_ranks % 8 == 0 else num_ranks
        groups, seconds = timed(lambda c=costs, s=tokens, r=num_ranks, m=most, g=cp: by_groups(c, s, r, m, g), 1)
        alone = np.tile(np.arange(len(groups))[:, None], (1, groups.shape[1]))
        simulated = simulate(groups, alone, np.full(len(groups), groups.shape[1]), STAGES)
        note = f"{groups.shape[1]} microbatches; simulated 1F1B {simulated / bound:.3f}"
        name = f"overlord backbone_balance, cp {cp}"
        rows.append(Row(instance, name, pipeline_time(groups) / bound, seconds, note))
    return rows


def pipeline_time(load: Int64s) -> float:
    return float((load.sum(axis=1) + (STAGES - 1) * load.max(axis=1)).max())


def by_groups(costs: Int64s, tokens: Int64s, num_ranks: int, least: int, cp: int) -> Int64s:
    """Return the load [group, microbatch] of a rank where every sequence is shared by all ranks of a group."""
    for count in range(least, 4 * least):
        places = place(costs, tokens, num_ranks // cp, count, cp * HYBRID_CAP, objective="pipeline", stages=STAGES)
        if places is not None:
            return loads(costs, places, num_ranks // cp * count).reshape(-1, count) // cp
    raise RuntimeError("no placement found")


def measure_hybrid_planning(quick: bool) -> float:
    """Return the time to place items on blocks of ranks over that on the same ranks in groups of 8, at worst."""
    count, num_ranks = (16_384, 256) if quick else (65_536, 1024)
    ways: list[tuple[Objective, dict[str, Any]]] = [
        ("sum", {}), ("sum", {"blocks": "any"}), ("lockstep", {"equal_counts": True}),
        ("lockstep", {"equal_counts": True, "blocks": "any"}), ("pipeline", {}),
    ]  # fmt: skip
    worst = 0.0
    print(f"\nPlacing {count} items on {num_ranks} ranks, over placing them on {num_ranks // 8} groups of 8; bar 3")
    for kind in KINDS:
        tokens = make_lengths(kind, count)
        costs = cost_of(tokens)
        room = num_ranks // 8, int(np.ceil(tokens.sum() / (0.95 * num_ranks * HYBRID_CAP))), 8 * HYBRID_CAP
        for objective, options in ways:
            times = []
            for _ in range(4):  # side by side, as the machine's speed changes; the first is not counted
                one = timed(lambda c=costs, s=tokens, o=objective, x=options: hybrid(c, s, num_ranks, o, **x), 1)[1]
                times.append(one / timed(lambda c=costs, s=tokens, r=room: place(c, s, *r), 1)[1])
            worst = max(worst, statistics.median(times[1:]))
            print(
                f"  {kind:<10} {objective:<9} {options.get('blocks', 'aligned'):<8} {statistics.median(times[1:]):.2f}"
            )
    return worst


def show(title: str, rows: list[Row], bar: float) -> None:
    """Print a table; the time is ours over theirs."""
    print(f"\n{title}; bar {bar:g}")
    ours: dict[str, float] = {}
    for row in rows:
        first = row.instance not in ours
        if first:
            ours[row.instance] = row.seconds
            print(f"  {row.instance}")
        relative = "" if first else f"our time / theirs {ours[row.instance] / row.seconds:9.3g}"
        print(f"    {row.method:<44} {row.ratio:9.5f} {1e3 * row.seconds:10.2f} ms  {relative:<28} {row.note}".rstrip())


def judged(rows: list[Row]) -> list[Row]:
    """Return our rows that have a bar: the first of each instance."""
    return list({row.instance: row for row in reversed(rows)}.values())


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="small instances only")
    options = parser.parse_args()
    measured = {
        "bins": measure_bins(options.quick),
        "lockstep": measure_lockstep(options.quick),
        "hybrid": measure_hybrid(options.quick),
        "hybrid_lockstep": measure_hybrid_lockstep(options.quick),
        "hybrid_pipelines": measure_hybrid_pipelines(options.quick),
    }
    titles = {
        "bins": "Largest bin over the bound (dense Karmarkar-Karp on the small instance only: it is slow)",
        "lockstep": "Lockstep time over the bound that knows the cap (argmin only where D x M is small: it is slow)",
        "hybrid": "End of the last rank over the bound, long items shared by blocks",
        "hybrid_lockstep": "The same with equal counts, lockstep time over the mean of all ranks",
        "hybrid_pipelines": f"The same in pipelines of {STAGES} stages, the slowest one over the bound",
    }
    for name, rows in measured.items():
        show(titles[name], rows, BARS[name])
    planning = measure_hybrid_planning(options.quick)
    worst = {name: max(row.ratio for row in judged(rows)) for name, rows in measured.items()}
    shown = {row.method: row.ratio for row in measured["lockstep"] if "lognormal, cap 2 " in row.instance}
    figures: dict[str, object] = {
        "worst_share_of_what_the_bars_allow": max(
            planning / PLANNING_BAR, *((worst[name] - 1) / (BARS[name] - 1) for name in BARS)
        ),
        "bar": 1.0,
        **{f"{name}_worst_over_bound": worst[name] for name in BARS},
        **{f"{name}_bar": BARS[name] for name in BARS},
        "hybrid_planning_over_plain": planning,
        "hybrid_planning_bar": PLANNING_BAR,
        "lockstep_overlord": shown["overlord lockstep"],
        "lockstep_equal_counts": shown["equal counts (verl), then slabs"],
        "lockstep_next_fit": shown["next fit in order (Megatron)"],
        "lockstep_round_robin": shown["round robin, next fit inside"],
        "rows": [
            f"{row.instance} | {row.method} | {row.ratio:.5f} | {1e3 * row.seconds:.2f} ms | {row.note}"
            for rows in measured.values()
            for row in rows
        ],
    }
    if not options.json:
        figures.pop("rows")
    publish("balance", figures, options.json)


if __name__ == "__main__":
    main()
