"""The number of microbatches of a step, and the microbatch of each piece: the work of `DGraph.balance`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Pieces
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import pad_lengths
from overlord.errors import PlanError
from overlord.planning.balancing.balance import Level, Method, Objective, place
from overlord.planning.balancing.greedy import Int64s, loads
from overlord.planning.balancing.hybrid import hybrid_microbatches, ranks_needed

SLACK = 0.95
"""The number of microbatches leaves 5 % free: without slack a balancer could only fill bins."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where items go: bucket * count + microbatch of each."""

    places: Int64s
    count: int
    cp_sizes: Int64s | None = None
    """Over how many buckets each item is spread, beginning with that of `places`."""
    counts: npt.NDArray[np.int32] | None = None
    """Microbatches of each bucket, where they differ."""
    detail: str = ""


def least_labels(buffer: Buffer, items: Pieces) -> Int64s:
    """Return a lower bound of the labels of each piece, from the metadata.

    It is exact for a whole sample, and for pieces of a sample in which every token counts in the loss. Of other samples
    that are cut only the sum is known: a piece has at least the labels that do not fit into the other pieces.

    Example:
        >>> from overlord.core.draw import context_pieces
        >>> from overlord.planning.low_level import summary_buffer
        >>> buffer = summary_buffer({"web": [3, 1, 9]}, context_length=4)
        >>> least_labels(buffer, context_pieces(buffer)).tolist()
        [2, 0, 3, 3, 0]
    """
    meta = buffer.meta
    if len(items) == len(meta) and bool((items.start == 0).all()):
        return meta["loss_tokens"][items.sample].astype(np.int64)
    tokens, labels = (
        np.ascontiguousarray(meta[name])[items.sample].astype(np.int64) for name in ("tokens", "loss_tokens")
    )
    parts = np.bincount(items.sample, minlength=len(meta))[items.sample]
    length = items.length.astype(np.int64)
    elsewhere = tokens - length - (parts - 1)
    return np.clip(labels - elsewhere, 0, np.maximum(length - 1, 0))


def without_labels(places: Int64s, labels: Int64s, num_bins: int) -> Int64s:
    """Return the bins in which no piece is known to have a label."""
    return np.flatnonzero(np.bincount(places[labels > 0], minlength=num_bins) == 0)


def spread_labels(places: Int64s, labels: Int64s, sizes: Int64s, num_bins: int, capacity: int) -> Int64s:
    """Return places in which as many bins as possible have a label: the mean loss of one without is not a number.

    A bin without one gets the smallest piece with labels from a bin that has several such pieces; if there is no room,
    in exchange for its own largest piece. Other bins stay as they are.

    Args:
        places: The bin of each piece.
        labels: Labels of each piece at least.
        sizes: What each takes of its bin's capacity.
        num_bins: Bins.
        capacity: The most that a bin holds.

    Example:
        >>> spread_labels(np.array([0, 0, 1]), np.array([7, 3, 0]), np.array([8, 4, 1]), 2, 16).tolist()
        [0, 1, 1]
    """
    unlabelled = without_labels(places, labels, num_bins)
    if not len(unlabelled):
        return places
    places = places.copy()
    have = np.bincount(places[labels > 0], minlength=num_bins)
    load = loads(sizes, places, num_bins)
    labelled = np.flatnonzero(labels > 0)
    smallest_first = labelled[np.argsort(sizes[labelled], kind="stable")].tolist()

    def spare() -> Iterator[int]:
        return (piece for piece in smallest_first if have[places[piece]] > 1)

    for one in unlabelled.tolist():
        piece = next(spare(), None)
        if piece is None:
            break
        other = -1
        if load[one] + sizes[piece] > capacity:  # exchange it for the largest that is there
            mine = np.flatnonzero(places == one)
            other = int(mine[np.argmax(sizes[mine])])
            grows = sizes[other] - sizes
            fits = (p for p in spare() if load[one] - grows[p] <= capacity and load[places[p]] + grows[p] <= capacity)
            piece = next(fits, None)
        if piece is None:
            continue
        for moved, target in ((piece, one), (other, int(places[piece]))):
            if moved >= 0:
                load[places[moved]] -= sizes[moved]
                load[target] += sizes[moved]
        have[places[piece]] -= 1
        have[one] += 1
        if other >= 0:
            places[other] = places[piece]
        places[piece] = one
    return places


def place_tokens(
    buffer: Buffer,
    items: Pieces,
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

    If some microbatches would have no label and fewer microbatches also hold the pieces, fewer are used.

    Raises:
        PlanError: when they do not fit.
    """
    limits, multiple = buffer.limits, tree.microbatch_multiple
    labels = least_labels(buffer, items)

    def placed(count: int) -> Int64s | None:
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
        bins = num_buckets * count
        return None if places is None else spread_labels(places, labels, sizes, bins, limits.microbatch_tokens)

    def unlabelled(places: Int64s, count: int) -> int:
        return len(without_labels(places, labels, num_buckets * count))

    for count in _counts(buffer, sizes, num_buckets, multiple):
        places = placed(count)
        if places is None:
            continue
        fewer = count - multiple if limits.microbatches is None else 0
        while fewer > 0 and unlabelled(places, count):
            found = placed(fewer)
            if found is None:
                break
            if unlabelled(found, fewer) < unlabelled(places, count):
                places, count = found, fewer
            fewer -= multiple
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
    # Expert parallelism synchronises in every microbatch: a rank with fewer would hang the others.
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
    """Repeat every item for each rank of its block, which gets a slice of it; return (item, place) of each copy.

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
