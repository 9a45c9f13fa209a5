"""The number of microbatches of a step, and the microbatch of each piece: the work of `DGraph.balance`.

Hybrid data and context parallelism: aligned blocks of 2^j ranks share long items. Blocks are placed from the largest
size to the smallest. So when a block is placed, all its ranks have the same number of microbatches before it and run it
at the same place: no rank waits for another rank of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Pieces
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import pad_lengths
from overlord.errors import PlanError, SpecError
from overlord.planning.balancing.balance import Method, fill_slabs, kernel_of
from overlord.planning.balancing.methods import (
    NO_LIMIT,
    Int64s,
    Queue,
    fill,
    fill_in_turn,
    first_fit_decreasing,
    items_of_bins,
    largest_first,
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

    def placed(count: int) -> Int64s | None:
        places = how(costs, sizes, num_buckets, count, limits.microbatch_tokens, stages=tree.pp)
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
        return Placement(places, count, detail=f"{count} microbatches a bucket")
    raise no_room(buffer, sizes, num_buckets)


def place_hybrid(
    buffer: Buffer,
    items: Pieces,
    costs: Int64s,
    tree: ClientPlaceTree,
    *,
    equal_counts: bool,
    method: Method = "greedy",
) -> Placement:
    """Spread pieces over the DP x CP ranks: one rank each where it fits, an aligned block of 2, 4, .. where not.

    Args:
        equal_counts: Whether all ranks get the same number of microbatches, as those of `tree` that meet in each must.
        method: How pieces that are shared by as many ranks get their blocks, or with equal counts their microbatches.

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
    placed = hybrid_microbatches(costs, tokens, sizes, ranks, cap, equal_counts=equal_counts, method=method)
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
        f"blocks of 1 to {largest} of {ranks} ranks, at most {most} microbatches",
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


# Hybrid data and context parallelism.


@dataclass(frozen=True, slots=True)
class HybridPlacement:
    """Where items run: on `cp_size` ranks from the first on, on each of them as the same microbatch number."""

    first_rank: Int32s
    """Of each item: the first rank of its block."""
    microbatch: Int32s
    """Of each item: the number of its microbatch on every rank of its block."""
    num_microbatches: Int32s
    """Of each rank; with equal counts some of them are empty."""


def ranks_needed(tokens: npt.ArrayLike, cap: int) -> Int64s:
    """Return how many ranks share each item: the least power of two that leaves each at most `cap` tokens.

    Example:
        >>> ranks_needed([1, 4096, 4097, 8192, 8193, 16384, 32768], 4096).tolist()
        [1, 1, 2, 2, 4, 4, 8]
    """
    if cap < 1:
        raise SpecError(f"hybrid: the cap is {cap} tokens, no rank could hold an item; give at least 1.")
    shares = -(-np.asarray(tokens, np.int64) // cap)
    ranks = np.ones(len(shares), np.int64)
    while (ranks < shares).any():
        ranks[ranks < shares] *= 2
    return ranks


def buddy_lpt(
    costs: Int64s, cp_sizes: Int64s, num_ranks: int, tokens: Int64s | None = None, method: Method = "greedy"
) -> tuple[Int64s, Int64s]:
    """Return the first rank of each item's block, and the load of each rank.

    Sizes from the largest to the smallest; inside a size the least loaded block takes the costliest item, which adds
    cost / size, rounded up, to each of its ranks. Other methods make as many bins as there are blocks; the costliest
    bin goes to the least loaded block.

    Example:
        >>> first, load = buddy_lpt(np.array([8, 3, 2]), np.array([2, 1, 1]), 2)
        >>> first.tolist(), load.tolist()
        ([0, 0, 1], [7, 6])
    """
    first, load = np.zeros(len(costs), np.int64), np.zeros(num_ranks, np.int64)
    for size in _falling_sizes(cp_sizes, num_ranks):
        mine = np.flatnonzero(cp_sizes == size)
        share, block_load = -(-costs[mine] // size), load[::size].copy()
        if method == "greedy":
            queue = Queue(share, np.zeros(len(mine), np.int64))
            fill(*queue.arrays, NO_LIMIT, block_load, np.zeros(len(block_load), np.int64), queue.bins, 0)
            blocks = queue.in_order()
        else:
            taken = share * 0 if tokens is None else tokens[mine]
            bins = kernel_of("balance", method, None)(share, taken, len(block_load), NO_LIMIT)
            assert bins is not None  # bins without a limit hold everything
            block_of, added = np.empty(len(block_load), np.int64), loads(share, bins, len(block_load))
            block_of[largest_first(added)] = np.argsort(block_load, kind="stable")
            block_load[block_of] += added
            blocks = block_of[bins]
        first[mine] = blocks * size
        load = np.repeat(block_load, size)
    return first, load


def hybrid_microbatches(
    costs: Int64s,
    tokens: Int64s,
    cp_sizes: Int64s,
    num_ranks: int,
    cap: int,
    *,
    equal_counts: bool,
    method: Method = "greedy",
) -> HybridPlacement:
    """Return the block and the microbatch of each item: one block size per microbatch, at most `cap` tokens per rank.

    Costs are times on one rank; the `cp_sizes` ranks of an item (`ranks_needed`) share its tokens. Where ranks
    synchronise at every microbatch (sharded parameters, expert parallelism), `equal_counts` gives all of them the same
    count, with empty microbatches. Else each rank has as many as its work needs.

    Example:
        >>> placed = hybrid_microbatches(
        ...     np.array([8, 3, 2]), np.array([8, 3, 2]), np.array([2, 1, 1]), 2, 4, equal_counts=True
        ... )
        >>> placed.first_rank.tolist(), placed.microbatch.tolist(), placed.num_microbatches.tolist()
        ([0, 0, 1], [0, 1, 1], [2, 2])
    """
    over = np.flatnonzero(tokens > cap * cp_sizes)
    if len(over):
        at = int(over[0])
        raise SpecError(
            f"hybrid: item {at} has {tokens[at]} tokens for {cp_sizes[at]} ranks of {cap}; a rank would run out of "
            "memory. Give it more ranks (ranks_needed) or raise the cap."
        )
    place = _even_counts if equal_counts else _free_counts
    first, microbatch, counts = place(costs, tokens, cp_sizes, num_ranks, cap, method)
    if equal_counts:
        counts = np.full(num_ranks, counts.max(initial=0))
    return HybridPlacement(first.astype(np.int32), microbatch.astype(np.int32), counts.astype(np.int32))


def _free_counts(
    costs: Int64s, tokens: Int64s, cp_sizes: Int64s, num_ranks: int, cap: int, method: Method
) -> tuple[Int64s, Int64s, Int64s]:
    """Balance cost over ranks, then pack the items of each block into few microbatches."""
    first, _ = buddy_lpt(costs, cp_sizes, num_ranks, tokens, method)
    microbatch, counts = np.zeros(len(costs), np.int64), np.zeros(num_ranks, np.int64)
    for size in _falling_sizes(cp_sizes, num_ranks):
        mine = np.flatnonzero(cp_sizes == size)
        blocks = first[mine] // size
        items, starts = np.empty(len(mine), np.int64), np.empty(num_ranks // size + 1, np.int64)
        items_of_bins(largest_first(tokens[mine]), blocks, items, starts)
        numbers, packed = _pack_each(tokens[mine][items], starts, cap * size)
        microbatch[mine[items]] = numbers + counts[first[mine[items]]]
        counts += np.repeat(packed, size)
    return first, microbatch, counts


@numba.njit(nogil=True, cache=True)
def _pack_each(tokens: Int64s, starts: Int64s, capacity: int) -> tuple[Int64s, Int64s]:
    """Pack each block's items, largest first, into its microbatches; return their numbers and the counts."""
    numbers, counts = np.zeros(len(tokens), np.int64), np.zeros(len(starts) - 1, np.int64)
    for block in range(len(counts)):
        mine = slice(starts[block], starts[block + 1])
        count = starts[block + 1] - starts[block]
        if count:
            fill_in_turn(tokens[mine], np.arange(count + 1), count, capacity, numbers[mine])
            counts[block] = numbers[mine].max() + 1
    return numbers, counts


def _even_counts(
    costs: Int64s, tokens: Int64s, cp_sizes: Int64s, num_ranks: int, cap: int, method: Method
) -> tuple[Int64s, Int64s, Int64s]:
    """Pack the items of each size into as few microbatches (packs) as needed; packs of similar cost run together."""
    first, microbatch = np.zeros(len(costs), np.int64), np.zeros(len(costs), np.int64)
    counts, load = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    height = 0  # cost of the slowest rank in the last microbatch
    for size in _falling_sizes(cp_sizes, num_ranks):
        mine = np.flatnonzero(cp_sizes == size)
        free = int((counts.max() - counts[::size]).sum())
        share = -(-costs[mine] // size)
        packs, waiting = _packs_of(share, tokens[mine], cap * size, num_ranks // size, free, height, method)
        pack_cost = loads(share, packs, len(waiting))
        block_of, number_of = np.empty(len(waiting), np.int64), np.empty(len(waiting), np.int64)
        block_count, block_load = counts[::size].copy(), load[::size].copy()
        while len(waiting):
            # Blocks with fewer microbatches go first, so that counts never differ by more than one.
            behind = np.flatnonzero(block_count == block_count.min())
            behind = behind[np.argsort(block_load[behind], kind="stable")][: len(waiting)]
            now, waiting = waiting[: len(behind)], waiting[len(behind) :]
            is_new = int(block_count.min()) == int(block_count.max())
            height = max(0 if is_new else height, int(pack_cost[now].max()))
            block_of[now], number_of[now] = behind, block_count[behind]
            block_count[behind] += 1
            block_load[behind] += pack_cost[now]
        first[mine], microbatch[mine] = block_of[packs] * size, number_of[packs]
        counts, load = np.repeat(block_count, size), np.repeat(block_load, size)
    return first, microbatch, counts


def _packs_of(
    costs: Int64s, tokens: Int64s, capacity: int, num_blocks: int, free: int, height: int, method: Method
) -> tuple[Int64s, Int64s]:
    """Return the pack of each item, within the capacity, and the order in which packs are dealt to blocks.

    The number of packs is what first fit decreasing needs, rounded up to the free microbatches of the blocks plus whole
    rounds over all blocks: more packs are lighter, and an empty microbatch saves nothing. Two ways are tried, packs of
    equal cost, and packs that fill each microbatch up to its slowest rank; the faster one is taken. Methods other than
    "greedy" are asked for packs of equal cost only. `free` blocks have one microbatch less than the others, which costs
    these `height`.
    """
    first_fit = first_fit_decreasing(tokens, len(tokens), capacity)
    assert first_fit is not None  # no item is larger than a pack
    rounds = max(0, -(-(int(first_fit.max()) + 1 - free) // num_blocks))
    even = kernel_of("balance", method, capacity)(costs, tokens, free + rounds * num_blocks, capacity)
    ways = [_dealt(costs, first_fit if even is None else even, 0)]
    beside = None
    if method == "greedy":
        beside = _fill_beside(costs, tokens, capacity, num_blocks, rounds, free, height)
    if beside is not None:
        ways.append(_dealt(costs, beside, free))

    def time(way: tuple[Int64s, Int64s]) -> int:
        cost = loads(costs, way[0], len(way[1]))[way[1]]
        return max(0, int(cost[:free].max(initial=0)) - height) + int(cost[free::num_blocks].sum())

    return min(ways, key=time)


def _fill_beside(
    costs: Int64s, tokens: Int64s, capacity: int, num_blocks: int, rounds: int, free: int, height: int
) -> Int64s | None:
    """Return packs of which the first `free` cost at most the height; None where that is impossible."""
    queue = Queue(costs, tokens)
    fill(*queue.arrays, height, np.zeros(free, np.int64), np.full(free, capacity), queue.bins, 0)
    packs = queue.in_order()
    rest = np.flatnonzero(packs < 0)
    # A free block that stays empty would have two microbatches less than the others.
    if not rounds or len(np.unique(packs[packs >= 0])) < free:
        return None
    slabs = fill_slabs(costs[rest], tokens[rest], num_blocks, rounds, capacity)
    if slabs is None:
        return None
    packs[rest] = free + slabs
    return packs


def _dealt(costs: Int64s, packs: Int64s, begin: int) -> tuple[Int64s, Int64s]:
    """Return packs without empty ones, and their order: the first `begin`, then the others by falling cost."""
    packs = np.unique(packs, return_inverse=True)[1]
    cost = loads(costs, packs, int(packs.max()) + 1)
    return packs, np.concatenate((np.arange(begin), begin + largest_first(cost[begin:])))


def _falling_sizes(cp_sizes: Int64s, num_ranks: int) -> list[int]:
    sizes: list[int] = np.unique(cp_sizes)[::-1].tolist()
    for size in sizes:
        if size < 1 or size & (size - 1):
            raise SpecError(f"hybrid: a cp size is {size}; blocks are powers of two, use ranks_needed.")
        if num_ranks % size:
            raise SpecError(
                f"hybrid: {num_ranks} ranks are no multiple of the cp size {size}, some would idle; "
                "change the number of ranks or the cap."
            )
    return sizes
