"""The number of microbatches of a step, and the microbatch of each piece: the work of `DGraph.balance`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Pieces
from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import PlanError
from overlord.planning.balancing.methods import (
    Int64s,
    Notes,
    loads,
)

Int32s = npt.NDArray[np.int32]

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
    offload: Int64s | None = None
    """Which share of the activations of each item's microbatch waits on the host, in millionths."""
    notes: frozenset[str] = frozenset()
    """Where this is another placement than was asked for: see `balance.in_words`."""


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
    in exchange for its own largest piece. Other bins stay as they are. `labels` are those of each piece at least.

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
    how: Callable[..., Int64s | None],
) -> Placement:
    """Balance pieces over the smallest number of microbatches that leaves the balancer room; `how` is `balance.place`.

    If some microbatches would have no label and fewer microbatches also hold the pieces, fewer are used.

    Raises:
        PlanError: when they do not fit.
    """
    limits, multiple, num_buckets = buffer.limits, tree.microbatch_multiple, tree.dp
    labels = least_labels(buffer, items)
    notes = dict[int, Notes]()

    def placed(count: int) -> Int64s | None:
        noted = notes[count] = set[str]()
        places = how(costs, sizes, num_buckets, count, limits.microbatch_tokens, stages=tree.pp, notes=noted)
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
        return Placement(places, count, detail=f"{count} microbatches a bucket", notes=frozenset(notes[count]))
    raise no_room(buffer, sizes, num_buckets)


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
