"""Packing: puts items of given lengths into few bins of one capacity by a fast heuristic; costs are ignored.

`pack` keeps items whole; `concat_split` lays them end to end and cuts them where a bin is full. Ties go to the
earlier item and the lower bin, so every machine gives the same result.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Pieces
from overlord.core.kernels import kernel
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.samples import PLAIN
from overlord.core.spec_errors import did_you_mean, is_whole, show
from overlord.errors import SpecError
from overlord.job.layout_specs import bin_multiple
from overlord.planning.balancing.balance import deal_slabs
from overlord.planning.balancing.methods import NO_LIMIT, Int64s, largest_first, loads
from overlord.planning.balancing.microbatches import Placement, least_labels, no_room, spread_labels

PackMethod = Literal["best_fit", "first_fit", "concat"]
"""How bins are filled: the longest item first into the fullest bin that takes it, every item into the first bin that
takes it, or all items end to end, cut where a bin is full."""

_BLOCK = 256
"""Keys in a block of the ordered set; a new key moves half of one on average."""


def pack(lengths: npt.ArrayLike, capacity: int, method: PackMethod = "best_fit") -> Int64s:
    """Return the bin of each item; bins are numbered in the order they are opened.

    Args:
        lengths: What each item takes of a bin (whole numbers).
        capacity: The most a bin holds.
        method: "best_fit": longest item first, into the fullest bin that still takes it; at most 11/9 of the fewest
            bins there can be, and 1. "first_fit": items as they come, into the first bin that takes them. ("concat"
            cuts items, which are then in several bins: see `concat_split`.)

    Raises:
        SpecError: An argument is invalid, or an item is longer than a bin.

    Example:
        >>> pack([5, 3, 6, 4, 2], 10).tolist()
        [1, 1, 0, 0, 1]
        >>> pack([5, 3, 6, 4, 2], 10, "first_fit").tolist()
        [0, 0, 1, 1, 0]
    """
    sizes, room = _lengths("pack", lengths), _capacity("pack", capacity)
    if method == "concat":
        raise SpecError(
            "pack: method is 'concat', which cuts items; one that is in several bins has no bin of its own. Use "
            "concat_split for the pieces, or 'best_fit' or 'first_fit'."
        )
    if method not in get_args(PackMethod):
        raise SpecError(
            f"pack: method is {show(method)}, which is unknown; no bin would be filled."
            f"{did_you_mean(method, get_args(PackMethod))} Use 'best_fit' or 'first_fit'."
        )
    _refuse_longer("pack", sizes, np.ones(len(sizes), np.bool_), room)
    # A capacity above the sum of all items limits nothing; clipping it keeps the keys of bins inside int64.
    room = max(1, min(room, int(sizes.sum())))
    bins = np.empty(len(sizes), np.int64)
    if method == "first_fit":
        _first_fit(sizes, room, bins)
        return bins
    if (room + 1) * (len(sizes) + 1) >= NO_LIMIT:
        raise SpecError(
            f"pack: {len(sizes)} items in bins of {room} are too many for int64 keys; give lengths in larger units."
        )
    order = largest_first(sizes)
    found = np.empty(len(sizes), np.int64)
    _best_fit(sizes[order], room, found)
    bins[order] = found
    return bins


def concat_split(
    lengths: npt.ArrayLike,
    capacity: int,
    whole: npt.ArrayLike | None = None,
    multiple: int = 1,
    *,
    longest: int | None = None,
) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Lay items end to end, cut them where a bin is full, and return (item, start, length, bin) of every piece.

    Pieces come in the order of the items; an item of no length has none.

    Args:
        lengths: Of the items (whole numbers).
        capacity: The most a bin holds, every piece rounded up to the multiple.
        whole: Which items are never cut; before one that does not fit, the bin is closed. By default none.
        multiple: What pieces are padded to. An item is only cut at multiples of it.
        longest: The most that a piece of an item that may be cut is long; by default as long as a bin.

    Raises:
        SpecError: An argument is invalid, or an item that is never cut is longer than a bin.

    Example:
        >>> [column.tolist() for column in concat_split([6, 7, 3], 8)]
        [[0, 1, 1, 2], [0, 0, 2, 0], [6, 2, 5, 3], [0, 0, 1, 1]]
        >>> [column.tolist() for column in concat_split([6, 7, 3], 8, whole=[False, True, False])]
        [[0, 1, 2, 2], [0, 0, 0, 1], [6, 7, 1, 2], [0, 1, 1, 2]]
    """
    sizes, room = _lengths("concat_split", lengths), _capacity("concat_split", capacity)
    uncut = np.zeros(len(sizes), np.bool_) if whole is None else np.asarray(whole)
    if uncut.dtype != np.bool_ or uncut.shape != sizes.shape:
        raise SpecError(
            f"concat_split: whole has type {uncut.dtype} and shape {uncut.shape}; it must say yes or no for each of "
            f"the {len(sizes)} items, or some would be cut that must not be."
        )
    longest = room if longest is None else longest
    for name, value in (("multiple", multiple), ("longest", longest)):
        if not is_whole(value, 1):
            raise SpecError(f"concat_split: {name} is {show(value)}, no piece could be cut; use 1 or more.")
    if multiple > room:
        raise SpecError(
            f"concat_split: a bin holds {room} and pieces are padded to {multiple}; not one would fit. Raise the "
            "capacity."
        )
    room -= room % multiple
    _refuse_longer("concat_split", sizes, uncut, room)
    none = np.empty(0, np.int64)
    arguments = (sizes, uncut, room, int(multiple), min(int(longest), room))
    count = _split(*arguments, none, none, none, none)
    item, start, length, bins = (np.empty(count, np.int64) for _ in range(4))
    _split(*arguments, item, start, length, bins)
    return item, start, length, bins


def fill_bins(
    buffer: Buffer, items: Pieces, padded: Int64s, tree: ClientPlaceTree, multiple: int, method: PackMethod
) -> tuple[Pieces, Int64s]:
    """Fill microbatches with the pieces of a step; return the pieces and the bin of each.

    The pieces are those given, unless "concat" cuts samples flagged PLAIN anew, at the ends of microbatches. These are
    filled up to what the ranks of the mesh can share. `padded` is the room of each piece, `multiple` what it is padded
    to.

    Raises:
        PlanError: A piece that may not be cut is longer than a microbatch.
    """
    limits = buffer.limits
    plain = (buffer.meta["flags"][items.sample] & PLAIN) > 0
    capacity = _room(buffer, tree)
    cut = plain if method == "concat" else np.zeros(len(items), np.bool_)
    if capacity < multiple or int(padded[~cut].max(initial=0)) > capacity:
        raise no_room(buffer, padded, tree.dp)
    if method != "concat":
        return items, pack(padded, capacity, method)
    # Join the pieces that were cut only at the context length, or they would be cut there and at the ends of bins.
    fresh = np.ones(len(items), np.bool_)
    ends = items.start[:-1] + items.length[:-1]
    fresh[1:] = ~plain[1:] | (items.sample[1:] != items.sample[:-1]) | (items.start[1:] != ends)
    first = np.flatnonzero(fresh)
    lengths = np.add.reduceat(items.length.astype(np.int64), first) if len(first) else np.zeros(0, np.int64)
    run, start, length, bins = concat_split(lengths, capacity, ~plain[first], multiple, longest=limits.context_length)
    origin = first[run]
    begin = (items.start[origin] + start).astype(np.int32)
    return Pieces(items.sample[origin], begin, length.astype(np.int32)), bins


def _room(buffer: Buffer, tree: ClientPlaceTree) -> int:
    """Return how many tokens a microbatch may hold."""
    limits = buffer.limits
    # A microbatch is padded to a multiple: tokens beyond the last multiple would be padded over the cap.
    shared = 1 if limits.row_tokens else bin_multiple(limits.slicing, limits.rank_multiple, tree.cp)
    return limits.microbatch_tokens - limits.microbatch_tokens % shared


def place_bins(
    buffer: Buffer, items: Pieces, bins: Int64s, costs: Int64s, sizes: Int64s, tree: ClientPlaceTree
) -> Placement:
    """Deal filled bins to buckets: bins of similar cost share a microbatch, and the buckets end up even.

    Every bucket gets the same number, a multiple of what the mesh needs; missing bins are empty.

    Raises:
        PlanError: The job fixes the number of microbatches, and the bins are more.
    """
    filled, fixed, multiple = int(bins.max(initial=0)) + 1, buffer.limits.microbatches, tree.microbatch_multiple
    num_buckets = tree.dp
    count = fixed or -(-filled // (num_buckets * multiple)) * multiple
    if filled > num_buckets * count:
        raise no_room(buffer, sizes, num_buckets)
    # Filled bins get labels. Bins that are only there for equal counts stay empty, unless there is a single bucket.
    labels, spread = least_labels(buffer, items), count if num_buckets == 1 else filled
    bins = spread_labels(bins, labels, sizes, spread, _room(buffer, tree))
    places = deal_slabs(loads(costs, bins, num_buckets * count), num_buckets, count, tree.pp)
    full = int(sizes.sum()) / (num_buckets * count * buffer.limits.microbatch_tokens)
    return Placement(places[bins], count, detail=f"{count} microbatches a bucket, {full:.1%} full")


@kernel
def _first_fit(sizes: Int64s, capacity: int, bins: Int64s) -> None:
    """Find the first bin with room by a tree of the most room in each range of bins, opened or not."""
    width = 1
    while width < len(sizes):
        width *= 2
    tree = np.full(2 * width, capacity, np.int64)
    for item in range(len(sizes)):
        size = sizes[item]
        node = 1
        while node < width:
            node *= 2
            if tree[node] < size:
                node += 1
        bins[item] = node - width
        tree[node] -= size
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])


@kernel
def _best_fit(sizes: Int64s, capacity: int, bins: Int64s) -> None:
    """Place items in the given order; the opened bins are an ordered set of keys, room * n + bin.

    The first key from size * n on is the fullest bin that takes the item, and of equal ones the lowest. The set is a
    list of sorted blocks of `_BLOCK` keys (`order` has the blocks in order of their keys): a search is two binary
    searches, an insertion moves keys inside one block and splits a full one.
    """
    n = len(sizes)
    # A full block becomes two halves, so every further block takes half a block of new keys: this many suffice.
    keys = np.empty((2 * n // _BLOCK + 2, _BLOCK), np.int64)
    used = np.zeros(len(keys), np.int64)
    order = np.zeros(len(keys), np.int64)  # the blocks in order of their keys
    blocks, made, opened = 1, 1, 0
    for item in range(n):
        size = sizes[item]
        at, place = _first_from(keys, used, order, blocks, size * n)
        if at < blocks:
            key = keys[order[at], place]
            blocks = _take_out(keys, used, order, blocks, at, place)
            chosen, room = key % n, key // n - size
        else:
            chosen, room = opened, capacity - size
            opened += 1
        bins[item] = chosen
        blocks, made = _put_in(keys, used, order, blocks, made, room * n + chosen)


@kernel
def _block_of(keys: Int64s, order: Int64s, blocks: int, key: int) -> int:
    """Return the last block that begins at or before a key, or the first."""
    low, high = 1, blocks
    while low < high:
        middle = (low + high) // 2
        if keys[order[middle], 0] <= key:
            low = middle + 1
        else:
            high = middle
    return low - 1


@kernel
def _first_from(keys: Int64s, used: Int64s, order: Int64s, blocks: int, key: int) -> tuple[int, int]:
    """Return block and place of the first key that is not smaller; the block after the last where there is none."""
    at = _block_of(keys, order, blocks, key)
    block = keys[order[at]]
    low, high = 0, used[order[at]]
    while low < high:
        middle = (low + high) // 2
        if block[middle] < key:
            low = middle + 1
        else:
            high = middle
    return (at, low) if low < used[order[at]] else (at + 1, 0)


@kernel
def _take_out(keys: Int64s, used: Int64s, order: Int64s, blocks: int, at: int, place: int) -> int:
    """Remove a key; return how many blocks there still are (one at least, be it empty)."""
    block = order[at]
    used[block] -= 1
    for i in range(place, used[block]):
        keys[block, i] = keys[block, i + 1]
    if used[block] > 0 or blocks == 1:
        return blocks
    for i in range(at, blocks - 1):
        order[i] = order[i + 1]
    return blocks - 1


@kernel
def _put_in(keys: Int64s, used: Int64s, order: Int64s, blocks: int, made: int, key: int) -> tuple[int, int]:
    """Add a key; return how many blocks there are, and how many were ever made."""
    at = _block_of(keys, order, blocks, key)
    block, half = order[at], _BLOCK // 2
    if used[block] == _BLOCK:
        for i in range(blocks, at + 1, -1):
            order[i] = order[i - 1]
        order[at + 1] = made
        keys[made, :half] = keys[block, half:]
        used[made], used[block] = half, half
        if keys[made, 0] <= key:
            block = made
        blocks, made = blocks + 1, made + 1
    i = used[block]
    while i > 0 and keys[block, i - 1] > key:
        keys[block, i] = keys[block, i - 1]
        i -= 1
    keys[block, i] = key
    used[block] += 1
    return blocks, made


@kernel
def _split(
    sizes: Int64s,
    whole: npt.NDArray[np.bool_],
    capacity: int,
    multiple: int,
    longest: int,
    out_item: Int64s,
    out_start: Int64s,
    out_length: Int64s,
    out_bin: Int64s,
) -> int:
    """Return the number of pieces; write them as far as the outputs are long. The capacity is a multiple."""
    # Cut at multiples, or an item would be padded in its middle; a limit below one multiple leaves no choice.
    cut = longest - longest % multiple if longest >= multiple else longest
    count, room, chosen = 0, capacity, 0
    for item in range(len(sizes)):
        rest = sizes[item]
        while rest > 0:
            padded = -(-rest // multiple) * multiple
            if room == 0 or (whole[item] and padded > room):
                room, chosen = capacity, chosen + 1
            length = rest
            if not whole[item] and (padded > room or rest > longest):
                length = min(cut, room)
            if count < len(out_item):
                out_item[count], out_start[count] = item, sizes[item] - rest
                out_length[count], out_bin[count] = length, chosen
            count += 1
            rest -= length
            room -= -(-length // multiple) * multiple
    return count


def _lengths(where: str, lengths: npt.ArrayLike) -> Int64s:
    given = np.asarray(lengths)
    if given.size == 0 and given.ndim == 1:
        return np.zeros(0, np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise SpecError(
            f"{where}: lengths have type {given.dtype} and shape {given.shape}; they would not add up. Give a list of "
            "whole numbers, one for each item."
        )
    if int(given.min()) < 0:
        at = int(np.argmin(given))
        raise SpecError(f"{where}: lengths[{at}] is {given[at]}; a bin would hold more than fits. Give 0 or more.")
    if float(given.sum(dtype=np.float64)) >= NO_LIMIT:
        raise SpecError(f"{where}: lengths add up to more than 2**62, which int64 cannot hold; use larger units.")
    return given.astype(np.int64, copy=False)


def _capacity(where: str, capacity: int) -> int:
    if not is_whole(capacity, 1):
        raise SpecError(f"{where}: capacity is {show(capacity)}, no bin could be filled; use a whole number from 1.")
    return min(int(capacity), NO_LIMIT)


def _refuse_longer(where: str, sizes: Int64s, whole: npt.NDArray[np.bool_], capacity: int) -> None:
    longer = np.flatnonzero(whole & (sizes > capacity))
    if len(longer):
        at = int(longer[0])
        raise SpecError(
            f"{where}: item {at} takes {sizes[at]}, a bin holds {capacity}; it would have no place. Raise the capacity "
            "or cut the item."
        )
