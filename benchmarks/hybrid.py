"""Plans of hybrid data parallelism against megatron-core's own scheduler, `BalancedCPScheduler`, if it is installed.

Both get the same lognormal lengths, the same tokens a rank may hold, and the scheduler's own cost s^2 / cp. Its groups
of sequences end with a barrier each, as Megatron's training loop runs them; `without_barriers` is what they would cost
if ranks went on. Costs are a model, not seconds of training; the time to plan is measured.

    python -m pip install --no-deps megatron-core
    python -m benchmarks.hybrid
"""

from __future__ import annotations

import sys
import time
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

import overlord as ol
from benchmarks.measuring import arguments, publish

CAP, LONGEST = 8192, 16
"""Tokens that a rank may hold, and ranks that the longest sequence may need."""
SIZES = {16: 300, 64: 1500, 256: 6000}
"""Sequences of a step, by ranks."""
BAR = 1.012
"""The most that the slowest rank may have over what no placement can beat."""

Int64s = npt.NDArray[np.int64]


def lengths_of(ranks: int, count: int) -> Int64s:
    """Return long-tailed lengths: most fit one rank, few need many."""
    rng = np.random.default_rng(ranks)
    most = CAP * min(ranks, LONGEST)
    return np.clip(np.exp(rng.normal(7.5, 1.4, count)), 64, most).astype(np.int64)


def bound_of(lengths: Int64s, sizes: Int64s, ranks: int) -> float:
    """Return what no placement can beat: the mean load, and the largest share."""
    cost = lengths.astype(np.float64) ** 2
    return float(max(cost.sum() / ranks, (cost / sizes).max()))


def ours(lengths: Int64s, ranks: int) -> tuple[float, Int64s]:
    """Return the largest load of a rank in our plan, and how many ranks share each sequence."""
    buffer = ol.summary_buffer(
        {"web": lengths.tolist()}, context_length=CAP * LONGEST, microbatch_tokens=CAP * max(ranks, LONGEST)
    )
    plan = ol.strategies.hdp(ol.costs.quadratic)(buffer, ol.ClientPlaceTree(cp=ranks))
    assert plan.cp_sizes is not None
    share = plan.pieces.length.astype(np.float64) ** 2 / plan.cp_sizes
    sizes = np.zeros(len(lengths), np.int64)
    sizes[plan.pieces.sample] = plan.cp_sizes
    return float(np.bincount(plan.buckets, share, ranks).max()), sizes


def theirs(scheduler: type[Any], lengths: Int64s, ranks: int) -> tuple[float, float, int]:
    """Return the time of Megatron's groups with a barrier behind each, without barriers, and how many there are."""
    made = scheduler(CAP, SimpleNamespace(size=lambda: ranks))
    groups, samples = made.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    load = np.zeros((len(groups), ranks))
    for number, group in enumerate(samples):
        members: dict[int, list[int]] = {}
        for rank, mine in enumerate(group):
            for sample in mine:
                members.setdefault(sample, []).append(rank)
        for sample, sharing in members.items():
            load[number, sharing] += float(lengths[sample]) ** 2 / len(sharing)
    assert load.sum() > 0.999 * float((lengths.astype(np.float64) ** 2).sum()), "a sequence was not placed"
    return float(load.max(axis=1).sum()), float(load.sum(axis=0).max()), len(groups)


def timed(work: Any, rounds: int) -> tuple[Any, float]:
    """Return a result, and the shortest time of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        made = work()
        best = min(best, time.perf_counter() - began)
    return made, best


def main() -> None:
    parser = arguments("Plans of hybrid data parallelism against megatron-core's scheduler.")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(SIZES), choices=list(SIZES), help="which meshes")
    options = parser.parse_args()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it names what is not installed
            from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError as error:
        sys.exit(f"benchmarks.hybrid compares with megatron-core, which is not installed ({error}). Install it first.")
    rows: list[dict[str, object]] = []
    for ranks in options.ranks:
        lengths = lengths_of(ranks, SIZES[ranks])
        ours(lengths, ranks)  # compiled kernels are loaded
        (load, sizes), seconds = timed(lambda n=lengths, r=ranks: ours(n, r), 5)
        bound = bound_of(lengths, sizes, ranks)
        (barriers, free, groups), longer = timed(lambda n=lengths, r=ranks: theirs(BalancedCPScheduler, n, r), 1)
        row: dict[str, object] = {
            "ranks": ranks,
            "sequences": len(lengths),
            "ours_over_bound": load / bound,
            "ours_s": seconds,
        }
        row |= {"megatron_over_bound": barriers / bound, "megatron_without_barriers": free / bound}
        row |= {"megatron_groups": groups, "megatron_s": longer}
        rows.append(row)
        if not options.json:
            shown = (
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print("  ".join(shown))
    figures = {f"{key}_{row['ranks']}_ranks": value for row in rows for key, value in row.items() if key != "ranks"}
    worst = max(float(str(row["ours_over_bound"])) for row in rows)
    gain = min(float(str(row["megatron_over_bound"])) / float(str(row["ours_over_bound"])) for row in rows)
    publish("hybrid", {"worst_over_bound": worst, "bar": BAR, "least_gain": gain, **figures}, options.json)


if __name__ == "__main__":
    main()
