"""How many microbatches a step has, and which of them each piece goes to: what `DGraph.balance` asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Pieces
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import pad_lengths
from overlord.errors import PlanError
from overlord.planning.balancing.balance import Level, Method, Objective, place
from overlord.planning.balancing.hybrid import hybrid_microbatches, ranks_needed

SLACK = 0.95
"""The microbatch count leaves one part in twenty free: a balancer without slack only fills bins."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where items go: bucket * count + microbatch of each."""

    places: Int64s
    count: int
    cp_sizes: Int64s | None = None
    """Over how many buckets each item is spread, the first of them being that of `places`."""
    counts: npt.NDArray[np.int32] | None = None
    """Microbatches of each bucket, where they differ."""
    detail: str = ""


def place_tokens(
    buffer: Buffer,
    costs: Int64s,
    sizes: Int64s,
    tree: ClientPlaceTree,
    num_buckets: int,
    *,
    method: Method,
    objective: Objective,
    level: Level,
    group_size: int | None,
) -> Placement:
    """Balance pieces over buckets and the smallest number of microbatches that leaves the balancer room.

    Raises:
        PlanError: when they do not fit.
    """
    limits = buffer.limits
    for count in _counts(buffer, sizes, num_buckets, tree.microbatch_multiple):
        places = place(
            costs,
            sizes,
            num_buckets,
            count,
            limits.microbatch_tokens,
            method=method,
            objective=objective,
            level=level,
            group_size=group_size,
            stages=tree.pp,
        )
        if places is not None:
            return Placement(places, count, detail=f"{objective}, {level}: {count} microbatches a bucket")
    raise no_room(buffer, sizes, num_buckets)


def place_hybrid(
    buffer: Buffer, items: Pieces, costs: Int64s, tree: ClientPlaceTree, *, equal_counts: bool
) -> Placement:
    """Spread pieces over the DP x CP ranks: one rank each where it fits, an aligned block of 2, 4, .. where not.

    Raises:
        PlanError: when a piece needs a block that the ranks cannot be cut into.
    """
    ranks = tree.num_buckets("CP")
    cap = max(1, buffer.limits.microbatch_tokens // tree.cp)
    sizes = ranks_needed(items.length.astype(np.int64), cap)
    largest = int(sizes.max(initial=1))
    if ranks % largest:
        raise PlanError(
            f"step {buffer.step}: a sample of {int(items.length.max())} tokens needs {largest} ranks of {cap} tokens "
            f"each, and {ranks} ranks cannot be cut into blocks of {largest}. Raise batch.microbatch_tokens, lower the "
            "context, or make dp x cp a multiple of it."
        )
    tokens = pad_lengths(items.length, np.where(sizes > 1, 2 * sizes, 1))
    # Expert parallelism meets in every microbatch: ranks with fewer would hang the others.
    equal_counts = equal_counts or tree.is_lockstep
    placed = hybrid_microbatches(costs, tokens, sizes, ranks, cap, equal_counts=equal_counts)
    counts, most = placed.num_microbatches.astype(np.int32), max(1, int(placed.num_microbatches.max(initial=1)))
    fixed = buffer.limits.microbatches
    if fixed is not None:
        if most > fixed:
            raise no_room(buffer, tokens, ranks)
        counts, most = np.full(ranks, fixed, np.int32), fixed
    return Placement(
        placed.first_rank.astype(np.int64) * most + placed.microbatch,
        most,
        sizes,
        counts,
        f"buddy-LPT: blocks of 1 to {largest} of {ranks} ranks, at most {most} microbatches",
    )


def spread_over_blocks(places: Int64s, cp_sizes: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """List every item on each rank of its block, which gets its slice of it; return (item, place) of each listing.

    Example:
        >>> spread_over_blocks(np.array([0, 8]), np.array([2, 1]), count=4)
        (array([0, 0, 1]), array([0, 4, 8]))
    """
    index = np.repeat(np.arange(len(places)), cp_sizes)
    within = np.arange(len(index)) - np.repeat(np.cumsum(cp_sizes) - cp_sizes, cp_sizes)
    return index, places[index] + within * count


def no_room(buffer: Buffer, sizes: Int64s, num_buckets: int) -> PlanError:
    """Return the error of a step that does not fit."""
    limits = buffer.limits
    return PlanError(
        f"step {buffer.step}: {len(sizes)} pieces of {int(sizes.sum())} tokens do not fit into {num_buckets} "
        f"data-parallel ranks x {limits.microbatches or 'any number of'} microbatches of {limits.microbatch_tokens} "
        "tokens; a rank would run out of memory. Raise batch.microbatches or batch.microbatch_tokens, or lower the "
        "global batch."
    )


def _counts(buffer: Buffer, sizes: Int64s, num_buckets: int, multiple: int) -> Sequence[int]:
    limits = buffer.limits
    if limits.microbatches is not None:
        return [limits.microbatches]
    total, room = int(sizes.sum()), num_buckets * limits.microbatch_tokens
    least = max(1, -(-total // room))
    first = least if least == 1 and total <= SLACK * room else max(1, int(np.ceil(total / (SLACK * room))))
    # A balancer that respects the capacity places every piece once each bin is at most half full.
    last = max(2 * least + 1, first)
    return range(-(-first // multiple) * multiple, -(-last // multiple) * multiple + 1, multiple)
