"""Hybrid data and context parallelism: aligned blocks of 2^j ranks share long items.

Blocks are placed from the largest size to the smallest. So when a block is placed, all its ranks have the same number
of microbatches before it and run it at the same place: no rank waits for another rank of its block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from overlord.errors import SpecError
from overlord.planning.balancing.greedy import (
    NO_LIMIT,
    Int64s,
    Queue,
    balance_greedy,
    fill,
    fill_in_turn,
    items_of_bins,
    largest_first,
    loads,
)
from overlord.planning.balancing.lockstep import fill_slabs

Int32s = npt.NDArray[np.int32]


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


def buddy_lpt(costs: Int64s, cp_sizes: Int64s, num_ranks: int) -> tuple[Int64s, Int64s]:
    """Return the first rank of each item's block, and the load of each rank.

    Sizes from the largest to the smallest; inside a size the least loaded block takes the costliest item, which adds
    cost / size, rounded up, to each of its ranks.

    Example:
        >>> first, load = buddy_lpt(np.array([8, 3, 2]), np.array([2, 1, 1]), 2)
        >>> first.tolist(), load.tolist()
        ([0, 0, 1], [7, 6])
    """
    first, load = np.zeros(len(costs), np.int64), np.zeros(num_ranks, np.int64)
    for size in _falling_sizes(cp_sizes, num_ranks):
        mine = np.flatnonzero(cp_sizes == size)
        queue = Queue(-(-costs[mine] // size), np.zeros(len(mine), np.int64))
        block_load = load[::size].copy()
        fill(*queue.arrays, NO_LIMIT, block_load, np.zeros(len(block_load), np.int64), queue.bins, 0)
        first[mine] = queue.in_order() * size
        load = np.repeat(block_load, size)
    return first, load


def hybrid_microbatches(
    costs: Int64s, tokens: Int64s, cp_sizes: Int64s, num_ranks: int, cap: int, *, equal_counts: bool
) -> HybridPlacement:
    """Return the block and the microbatch of each item: one block size per microbatch, at most `cap` tokens per rank.

    Args:
        costs: What each item takes of time on one rank.
        tokens: What each item takes of memory, shared by its ranks.
        cp_sizes: How many ranks share each item, powers of two (`ranks_needed`).
        num_ranks: A multiple of the largest size.
        cap: The most tokens of a microbatch on one rank.
        equal_counts: Whether ranks synchronise at every microbatch (sharded parameters, expert parallelism): all ranks
            then get the same count, with empty microbatches. Else each rank has as many as its work needs.

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
    first, microbatch, counts = place(costs, tokens, cp_sizes, num_ranks, cap)
    if equal_counts:
        counts = np.full(num_ranks, counts.max(initial=0))
    return HybridPlacement(first.astype(np.int32), microbatch.astype(np.int32), counts.astype(np.int32))


def _free_counts(
    costs: Int64s, tokens: Int64s, cp_sizes: Int64s, num_ranks: int, cap: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Balance cost over ranks, then pack the items of each block into few microbatches."""
    first, _ = buddy_lpt(costs, cp_sizes, num_ranks)
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
    costs: Int64s, tokens: Int64s, cp_sizes: Int64s, num_ranks: int, cap: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Pack the items of each size into as few microbatches (packs) as needed; packs of similar cost run together."""
    first, microbatch = np.zeros(len(costs), np.int64), np.zeros(len(costs), np.int64)
    counts, load = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    height = 0  # cost of the slowest rank in the last microbatch
    for size in _falling_sizes(cp_sizes, num_ranks):
        mine = np.flatnonzero(cp_sizes == size)
        free = int((counts.max() - counts[::size]).sum())
        share = -(-costs[mine] // size)
        packs, waiting = _packs_of(share, tokens[mine], cap * size, num_ranks // size, free, height)
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
    costs: Int64s, tokens: Int64s, capacity: int, num_blocks: int, free: int, height: int
) -> tuple[Int64s, Int64s]:
    """Return the pack of each item, within the capacity, and the order in which packs are dealt to blocks.

    The number of packs is what first fit decreasing needs, rounded up to the free microbatches of the blocks plus whole
    rounds over all blocks: more packs are lighter, and an empty microbatch saves nothing. Two ways are tried, packs of
    equal cost, and packs that fill each microbatch up to its slowest rank; the faster one is taken.

    Args:
        costs: What each item takes of time on each rank of its block.
        tokens: What each item takes of memory.
        capacity: The most tokens of a pack.
        num_blocks: Blocks of this size.
        free: Blocks that have one microbatch less than the others.
        height: Cost of that microbatch on the other blocks.
    """
    queue = Queue(tokens, tokens)
    fill_in_turn(queue.sizes, queue.after, len(tokens), capacity, queue.bins)
    first_fit = queue.in_order()
    rounds = max(0, -(-(int(first_fit.max()) + 1 - free) // num_blocks))
    even = balance_greedy(costs, tokens, free + rounds * num_blocks, capacity)
    ways = [_dealt(costs, first_fit if even is None else even, 0)]
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
