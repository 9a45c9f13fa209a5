"""Hybrid data and context parallelism: blocks of neighbouring ranks share long items (ByteScale, arXiv 2502.21231).

The ranks of a block run what they share as the same number of their microbatches, so all ranks that take their
microbatches by number reach every block: no order of arrival can make two blocks wait for each other.

Two ways to place items, which `hybrid_microbatches` chooses by what is made small:

- *Nested blocks* (`_nested`), for ranks that run free: aligned blocks of 2^j ranks, as small as memory allows, from
  the largest to the smallest. When a block is placed, all its ranks have the same number of microbatches before it.
- *Even rounds* (`_even`), for ranks that meet at every microbatch, and for pipelines. A round is one microbatch of all
  ranks, and all rounds get the same height H = cost of all / (ranks x rounds). An item that costs more than H is shared
  by cost / H ranks, more than its memory needs: beside it no rank could be given as much work, as its memory would be
  full. What a block then lacks of its ranks x H is filled up with short items, like any other microbatch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from overlord.core.client_messages import MILLION
from overlord.core.draw import Buffer, Pieces
from overlord.core.kernels import kernel
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import least_offload, pad_lengths, tokens_on_device
from overlord.errors import PlanError, SpecError
from overlord.planning.balancing.balance import Method, Objective, kernel_of
from overlord.planning.balancing.methods import (
    NO_LIMIT,
    Int64s,
    Notes,
    Queue,
    fill,
    fill_in_turn,
    items_of_bins,
    largest_first,
    loads,
)
from overlord.planning.balancing.microbatches import SLACK, Placement, no_room
from overlord.planning.costs import Offload

Int32s = npt.NDArray[np.int32]
Blocks = Literal["aligned", "any"]
"""aligned: blocks of 2, 4, .. ranks that begin at a multiple of their number; any: of any number of neighbours."""


def place_hybrid(
    buffer: Buffer,
    items: Pieces,
    costs: Int64s,
    tree: ClientPlaceTree,
    *,
    objective: Objective,
    equal_counts: bool,
    blocks: Blocks = "aligned",
    method: Method = "greedy",
    rank_multiple: int = 1,
    offload: Offload | None = None,
) -> Placement:
    """Spread pieces over the DP x CP ranks: blocks of them share what one rank cannot hold, or not in time.

    Args:
        buffer: One step's draw with its limits.
        items: The pieces.
        costs: What each piece costs one rank.
        tree: The mesh. What is called a rank here is a pipeline where it has stages. Without context parallelism no
            piece is shared: its trainer expects whole sequences.
        objective: "sum", "lockstep" or "pipeline", see `hybrid_microbatches`.
        equal_counts: Whether all ranks get the same number of microbatches.
        blocks: Which ranks may form a block.
        method: How pieces get their blocks or microbatches.
        rank_multiple: What the tokens of a microbatch on one rank are rounded up to.
        offload: What computation hides of copies to the host, by which long pieces need fewer ranks.

    Raises:
        PlanError: A piece needs a block that the ranks cannot be cut into, or the pieces do not fit.
    """
    ranks, fixed = tree.num_buckets("CP"), buffer.limits.microbatches
    cap = max(1, buffer.limits.microbatch_tokens // tree.cp)
    if cap >= rank_multiple:
        cap -= cap % rank_multiple  # the padding behind the last piece counts, too
    lengths = items.length.astype(np.int64)
    rooms = lengths if offload is None else _rooms(lengths, cap, blocks, offload)
    needed = ranks_needed(rooms, cap, blocks)
    largest = int(needed.max(initial=1))
    nested = objective == "sum" and blocks == "aligned"
    if largest > ranks or (nested and ranks % largest):
        any_fits = int(ranks_needed(rooms, cap, "any").max(initial=1)) <= ranks
        raise PlanError(
            f"step {buffer.step}: a sample of {int(lengths.max())} tokens needs {largest} ranks of {cap} tokens "
            f"each, and {ranks} ranks cannot be cut into blocks of {largest}. Raise batch.microbatch_tokens, lower the "
            f"context, {'use blocks=any, ' if any_fits and blocks == 'aligned' else ''}or make dp x cp a multiple of "
            "it."
        )
    placed = hybrid_microbatches(
        costs, rooms, ranks, cap, objective=objective, equal_counts=equal_counts, blocks=blocks, method=method,
        widen=tree.cp > 1, multiple=tree.microbatch_multiple, count=fixed,
    )  # fmt: skip
    if placed is None:
        raise no_room(buffer, lengths, ranks)
    counts, most = placed.num_microbatches, max(1, int(placed.num_microbatches.max(initial=1)))
    places, widths = placed.first_rank.astype(np.int64) * most + placed.microbatch, placed.cp_size.astype(np.int64)
    detail = f"blocks of 1 to {int(widths.max(initial=1))} of {ranks} ranks, at most {most} microbatches"
    if offload is None:
        return Placement(places, most, widths, counts, detail, notes=placed.notes)
    shares = _offloaded(places, widths, lengths, ranks * most, cap, offload.layers)
    detail += f", {len(np.unique(places[shares > 0]))} of them with activations on the host"
    return Placement(places, most, widths, counts, detail, shares, placed.notes)


def _rooms(lengths: Int64s, cap: int, blocks: Blocks, offload: Offload) -> Int64s:
    """Return the tokens whose activations stay on the device, of each item; all where no rank would be saved."""
    hidden = np.floor(MILLION * offload.hidden(lengths)).astype(np.int64)
    kept = tokens_on_device(lengths, hidden, offload.layers)
    return np.where(ranks_needed(kept, cap, blocks) < ranks_needed(lengths, cap, blocks), kept, lengths)


def _offloaded(places: Int64s, widths: Int64s, lengths: Int64s, bins: int, cap: int, layers: int) -> Int64s:
    """Return which share of the activations of each item's microbatch must wait on the host, so that the rest fits.

    Copies of a microbatch are hidden as those of each of its items are: the share that it needs is at most the mean of
    theirs, by tokens. Padding (less than two tokens of an item on a rank) is not counted where something waits.
    """
    padded = pad_lengths(lengths, np.where(widths > 1, 2 * widths, 1))
    room = np.zeros(bins, np.int64)
    room[places] = widths * cap
    over = loads(padded, places, bins) > room
    share = np.maximum(1, least_offload(loads(lengths, places, bins), room, layers))
    return np.where(over, share, 0)[places]


def spread_over_blocks(places: Int64s, cp_sizes: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """Repeat every item for each rank of its block, which gets a slice of it; return (item, place) of each copy.

    Example:
        >>> spread_over_blocks(np.array([0, 8]), np.array([2, 1]), count=4)
        (array([0, 0, 1]), array([0, 4, 8]))
    """
    index = np.repeat(np.arange(len(places)), cp_sizes)
    within = np.arange(len(index)) - np.repeat(np.cumsum(cp_sizes) - cp_sizes, cp_sizes)
    return index, places[index] + within * count


@dataclass(frozen=True, slots=True)
class HybridPlacement:
    """Where items run: on `cp_size` ranks from the first on, on each of them as the same microbatch number."""

    first_rank: Int32s
    """Of each item: the first rank of its block."""
    cp_size: Int32s
    """Of each item: the ranks of its block."""
    microbatch: Int32s
    """Of each item: the number of its microbatch on every rank of its block."""
    num_microbatches: Int32s
    """Of each rank; some of them may be empty."""
    notes: frozenset[str] = frozenset()
    """Where the method could not be used: see `balance.in_words`."""

    def loads(self, costs: Int64s) -> Int64s:
        """Return the cost of every microbatch as one rank bears it: [rank, microbatch]."""
        count = int(self.num_microbatches.max(initial=0))
        width = self.cp_size.astype(np.int64)
        index, places = spread_over_blocks(self.first_rank.astype(np.int64) * count + self.microbatch, width, count)
        ranks = len(self.num_microbatches)
        return loads(-(-costs // width)[index], places, ranks * count).reshape(ranks, count)

    def free_time(self, costs: Int64s) -> int:
        """Return when the last rank ends if no rank waits but for the other ranks of its blocks."""
        load = self.loads(costs)
        ranks, count = load.shape
        first, width = np.tile(np.arange(ranks), (count, 1)), self.cp_size.astype(np.int64)
        index, places = spread_over_blocks(self.first_rank.astype(np.int64) * count + self.microbatch, width, count)
        first[places % max(count, 1), places // max(count, 1)] = self.first_rank[index]
        clock = np.zeros(ranks, np.int64)
        for microbatch in range(count):
            begins = np.unique(first[microbatch])
            ready = np.maximum.reduceat(clock, begins)
            clock = np.repeat(ready, np.diff(np.append(begins, ranks))) + load[:, microbatch]
        return int(clock.max(initial=0))


def ranks_needed(tokens: npt.ArrayLike, cap: int, blocks: Blocks = "aligned") -> Int64s:
    """Return how many ranks share each item: the fewest that leave each at most `cap` tokens.

    Ranks that share an item get two chunks of equal length each, so an odd token of their room stays free.

    Example:
        >>> ranks_needed([1, 4096, 4097, 8192, 8193, 16384, 32768], 4096).tolist()
        [1, 1, 2, 2, 4, 4, 8]
        >>> ranks_needed([4096, 12000, 20481], 4096, "any").tolist()
        [1, 3, 6]
    """
    lengths = np.asarray(tokens, np.int64)
    if cap < 1 or (cap == 1 and bool((lengths > 1).any())):
        raise SpecError(
            f"hybrid: the cap is {cap} tokens, no rank could hold {'an item' if cap < 1 else 'two chunks of an item'}; "
            f"give at least {1 if cap < 1 else 2}."
        )
    shares = np.where(lengths <= cap, 1, -(-lengths // max(1, cap - cap % 2)))
    return shares if blocks == "any" else _power_of_two(shares)


def _power_of_two(numbers: Int64s) -> Int64s:
    """Return the least power of two that is not below each number."""
    found = np.ones(len(numbers), np.int64)
    while (found < numbers).any():
        found[found < numbers] *= 2
    return found


def hybrid_microbatches(
    costs: Int64s,
    lengths: Int64s,
    num_ranks: int,
    cap: int,
    *,
    objective: Objective = "sum",
    equal_counts: bool = False,
    blocks: Blocks = "aligned",
    widen: bool = True,
    method: Method = "greedy",
    multiple: int = 1,
    count: int | None = None,
) -> HybridPlacement | None:
    """Return the block and the microbatch of each item, at most `cap` tokens per rank; None where they do not fit.

    A microbatch has one block; all its items are shared by all ranks of the block.

    Args:
        costs: What each item costs one rank; the ranks of a block bear equal parts of it.
        lengths: The tokens of each item.
        num_ranks: How many ranks there are.
        cap: The most tokens of a microbatch on one rank.
        objective: "sum": the largest sum of a rank, for ranks that run free. "lockstep": the sum over microbatches of
            the slowest rank, for ranks that meet in each. "pipeline": the slowest of the pipelines, each with the ranks
            of its stages: the sum of its microbatches, and its largest one again for every further stage.
        equal_counts: Whether all ranks get the same number of microbatches, some of them empty (expert parallelism,
            sharded parameters that are gathered for each).
        blocks: Which ranks may form a block.
        widen: Whether even rounds may give an item more ranks than its memory needs.
        method: How items that are shared by as many ranks get their blocks; in even rounds, how short items get their
            microbatches.
        multiple: What every count of microbatches is a multiple of (virtual pipelines).
        count: The number of microbatches of every rank, where it is given.

    Example:
        >>> placed = hybrid_microbatches(np.array([8, 3, 2]), np.array([8, 3, 2]), 2, 4)
        >>> placed.first_rank.tolist(), placed.microbatch.tolist(), placed.num_microbatches.tolist()
        ([0, 0, 1], [0, 1, 1], [2, 2])
        >>> placed = hybrid_microbatches(np.array([9, 3]), np.array([9, 3]), 4, 4, objective="lockstep", blocks="any")
        >>> placed.cp_size.tolist(), placed.first_rank.tolist(), placed.num_microbatches.tolist()
        ([3, 1], [0, 3], [1, 1, 1, 1])
    """
    problem = _Problem(costs, lengths, num_ranks, cap, blocks, widen, method, multiple, count, objective == "pipeline")
    best = None
    if objective == "sum" and num_ranks % int(ranks_needed(lengths, cap).max(initial=1)) == 0:
        best = _nested(problem)
    if objective != "sum" or (blocks == "any" and (best is None or best.free_time(costs) > problem.good_time)):
        found = [one for one in (best, _even(problem)) if one is not None]
        best = min(found, key=lambda one: one.free_time(costs)) if len(found) > 1 else found[0] if found else None
    if best is None:
        return None
    counts = -(-best.num_microbatches // multiple) * multiple
    if count is not None:
        counts = np.full(num_ranks, count)
    elif equal_counts:
        counts = np.full(num_ranks, counts.max(initial=0))
    return dataclasses.replace(best, num_microbatches=counts.astype(np.int32))


@dataclass(frozen=True)
class _Problem:
    """What is to be placed: the arguments of `hybrid_microbatches`."""

    costs: Int64s
    lengths: Int64s
    num_ranks: int
    cap: int
    blocks: Blocks
    widen: bool
    method: Method
    multiple: int
    count: int | None
    pipelined: bool

    @cached_property
    def order(self) -> Int64s:
        """Items by falling cost."""
        return largest_first(self.costs)

    @property
    def good_time(self) -> int:
        """The time at which no other placement is looked for: the mean of all ranks is the least there can be."""
        return int(GOOD * (int(self.costs.sum()) / self.num_ranks))

    def result(self, first: Int64s, width: Int64s, microbatch: Int64s, counts: Int64s) -> HybridPlacement:
        columns = [one.astype(np.int32) for one in (first, width, microbatch, counts)]
        return HybridPlacement(columns[0], columns[1], columns[2], columns[3])


# Nested blocks: every rank of a block has the same microbatches before it.


def buddy_lpt(
    costs: Int64s,
    cp_sizes: Int64s,
    num_ranks: int,
    tokens: Int64s | None = None,
    method: Method = "greedy",
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
            bins = kernel_of("balance", method, None)(share, taken, len(block_load), NO_LIMIT, set())
            assert bins is not None  # bins without a limit hold everything
            block_of, added = np.empty(len(block_load), np.int64), loads(share, bins, len(block_load))
            block_of[largest_first(added)] = np.argsort(block_load, kind="stable")
            block_load[block_of] += added
            blocks = block_of[bins]
        first[mine] = blocks * size
        load = np.repeat(block_load, size)
    return first, load


def _falling_sizes(cp_sizes: Int64s, num_ranks: int) -> list[int]:
    sizes: list[int] = np.unique(cp_sizes)[::-1].tolist()
    for size in sizes:
        if size < 1 or size & (size - 1):
            raise SpecError(f"hybrid: a cp size is {size}; nested blocks are powers of two, use ranks_needed.")
        if num_ranks % size:
            raise SpecError(
                f"hybrid: {num_ranks} ranks are no multiple of the cp size {size}, some would idle; "
                "change the number of ranks or the cap."
            )
    return sizes


def _nested(problem: _Problem) -> HybridPlacement | None:
    """Balance cost over ranks, then pack the items of each block into few microbatches."""
    costs, num_ranks = problem.costs, problem.num_ranks
    cp_sizes = ranks_needed(problem.lengths, problem.cap)
    tokens = pad_lengths(problem.lengths, np.where(cp_sizes > 1, 2 * cp_sizes, 1))
    first, _ = buddy_lpt(costs, cp_sizes, num_ranks, tokens, problem.method)
    microbatch, counts = np.zeros(len(costs), np.int64), np.zeros(num_ranks, np.int64)
    for size in _falling_sizes(cp_sizes, num_ranks):
        mine = np.flatnonzero(cp_sizes == size)
        blocks = first[mine] // size
        items, starts = np.empty(len(mine), np.int64), np.empty(num_ranks // size + 1, np.int64)
        items_of_bins(largest_first(tokens[mine]), blocks, items, starts)
        numbers, packed = _pack_each(tokens[mine][items], starts, problem.cap * size)
        microbatch[mine[items]] = numbers + counts[first[mine[items]]]
        counts += np.repeat(packed, size)
    if problem.count is not None and int(counts.max(initial=0)) > problem.count:
        return None
    return problem.result(first, cp_sizes, microbatch, counts)


@kernel
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


# Even rounds: blocks as wide as the height of a round asks for.


GOOD = 1.01
"""A placement whose lockstep time is within this of the mean of all ranks is taken; no other is looked for."""
_RELAXED = (1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.2, 1.5, 2.0, 4.0, 16.0, np.inf)
"""Where blocks do not fit into the rounds, or leave them uneven, items may be higher than the even height by this."""
_TRIES = 5
"""So many numbers of rounds, and so many heights of each, are tried from the first that fits on."""


def _even(problem: _Problem) -> HybridPlacement | None:
    """Return the placement of least lockstep time over a few numbers of rounds and heights; None where none fits."""
    most = problem.num_ranks
    if problem.blocks == "aligned":
        most = 1 << (most.bit_length() - 1)  # the ranks of the largest block
    needed = ranks_needed(problem.lengths, problem.cap, problem.blocks)
    if int(needed.max(initial=1)) > most:
        return None
    best, least, fitting = None, NO_LIMIT, 0
    count = problem.count or _first_count(problem, _shared(problem, *_widths(problem, needed, most, 1, np.inf))[1])
    last = 8 * (count + problem.multiple)  # blocks, ranks and rounds each leave less than half of their room unused
    while count <= last:
        tried, fits = 0, False
        for relaxed in _RELAXED if problem.widen else (np.inf,):
            blocks, widths = _shared(problem, *_widths(problem, needed, most, count, relaxed))
            if _tiled(widths, np.argsort(-widths, kind="stable"), problem.num_ranks, count) is None:
                continue
            found = _rounds(problem, blocks, widths, count)
            if found is not None and found[0] < least:
                least, best = found
            tried, fits = tried + 1, fits or found is not None
            if least <= problem.good_time or (tried >= _TRIES and (fits or problem.count is None)):
                break
        fitting += fits
        if fitting == _TRIES or least <= problem.good_time or problem.count is not None:
            break
        more = 1 if fits else count // 32 + 1
        count = -(-(count + more) // problem.multiple) * problem.multiple
    return best


def _first_count(problem: _Problem, widths: Int64s) -> int:
    """Return the first number of rounds to try: there the balancer has room for tokens and for cost.

    `widths` are the ranks of the blocks that memory needs.
    """
    costs, lengths, ranks = problem.costs, problem.lengths, problem.num_ranks
    total, room = int(lengths.sum()), ranks * problem.cap
    first = 1 if total <= room else math.ceil(total / (SLACK * room))
    short = lengths <= problem.cap
    if short.any():
        # Higher rounds than a rank full of short items would leave such ranks idle; wider blocks make rounds lower.
        full = room * (int(costs[short].sum()) / int(lengths[short].sum()))
        first = max(first, min(math.ceil(int(costs.sum()) / max(full, 1.0)), first + first // 2))
    # Fewer do not hold the blocks beside each other, nor the items of which a rank takes one only.
    beside, _ = _first_fit(widths, np.argsort(-widths, kind="stable"), ranks, len(widths))
    alone = int((short & (2 * lengths > problem.cap)).sum())
    first = max(first, int(beside.max(initial=-1)) + 1, -(-alone // ranks))
    return -(-first // problem.multiple) * problem.multiple


def _rounds(problem: _Problem, blocks: Int64s, shared: Int64s, count: int) -> tuple[int, HybridPlacement] | None:
    """Place items in so many rounds; return the lockstep time and the placement, or None where tokens do not fit."""
    num_ranks = problem.num_ranks
    widths = np.concatenate((shared, np.ones(num_ranks * count - int(shared.sum()), np.int64)))
    notes: Notes = set()
    filled = _filled(problem, blocks, widths, len(shared), notes)
    if filled is None:
        return None
    heights = -(-loads(problem.costs, filled, len(widths)) // widths)
    # Blocks of similar height share a round, as far as they fit beside each other.
    rounds = None
    for keys in ((-heights,), (-heights, widths == 1), (-heights, -widths)):
        rounds = _tiled(widths, np.lexsort(keys), num_ranks, count) if rounds is None else rounds
    assert rounds is not None  # widest first the shared ones fit, and the others are of one rank
    highest = np.zeros(count, np.int64)
    np.maximum.at(highest, rounds, heights)
    # Inside a round the widest come first: so blocks of 2^j ranks begin at a multiple of their number.
    if problem.pipelined:
        rounds = _small_at_the_ends(count)[rounds]
    order = np.lexsort((-heights, -widths, rounds))
    first = np.empty(len(widths), np.int64)
    first[order] = np.cumsum(widths[order]) - widths[order]
    first -= rounds * num_ranks
    used = np.flatnonzero(np.bincount(filled, minlength=len(widths)))
    index, rank = spread_over_blocks(first[used], widths[used], 1)
    counts = np.zeros(num_ranks, np.int64)  # up to the last microbatch that holds an item
    np.maximum.at(counts, rank, rounds[used][index] + 1)
    placed = problem.result(first[filled], widths[filled], rounds[filled], counts)
    return int(highest.sum()), dataclasses.replace(placed, notes=frozenset(notes))


def _small_at_the_ends(count: int) -> Int64s:
    """Return when each round runs, given by falling height: the ends of a pipeline's schedule have bubbles.

    The lowest is the last, so that what it lacks is no microbatch at all.

    Example:
        >>> _small_at_the_ends(5).tolist()
        [2, 1, 3, 0, 4]
    """
    falling, position = np.arange(count), np.empty(count, np.int64)
    position[np.concatenate((falling[count % 2 :: 2][::-1], falling[1 - count % 2 :: 2]))] = falling
    return position


def _widths(problem: _Problem, needed: Int64s, most: int, count: int, relaxed: float) -> tuple[Int64s, int]:
    """Return how many ranks share each item, and the height of a round."""
    costs, order = problem.costs, problem.order
    rest, rounds, at = int(costs.sum()), count, 0
    # An item that is higher than a round even on all ranks has a round of its own; the others share the rest.
    while at < len(order) and rounds > 1 and int(costs[order[at]]) * rounds > rest:
        rest, rounds, at = rest - int(costs[order[at]]), rounds - 1, at + 1
    even, top = -(-rest // (problem.num_ranks * rounds)), int(costs.max(initial=1))
    height = max(1, top if relaxed == np.inf else min(top, int(even * relaxed)))
    widths = np.maximum(needed, -(-costs // height))
    if problem.blocks == "aligned":
        widths = _power_of_two(widths)
    return np.minimum(widths, most), height


def _shared(problem: _Problem, widths: Int64s, height: int) -> tuple[Int64s, Int64s]:
    """Return the block of each item that several ranks share (-1: of one rank), and the ranks of each block."""
    blocks, several = np.full(len(widths), -1, np.int64), np.flatnonzero(widths > 1)
    queue = Queue(problem.costs[several], problem.lengths[several])
    block_widths = np.empty(len(several), np.int64)
    count = _open_blocks(*queue.arrays, widths[several][queue.order], height, problem.cap, queue.bins, block_widths)
    blocks[several] = queue.in_order()
    return blocks, block_widths[:count]


@kernel
def _open_blocks(
    costs: Int64s,
    sizes: Int64s,
    after: Int64s,
    tree: Int64s,
    widths: Int64s,
    height: int,
    cap: int,
    bins: Int64s,
    block_widths: Int64s,
) -> int:
    """Open a block for the largest waiting item, fill it up to the height with others; repeat. Return their number."""
    count = 0
    load, room, multiple = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    for item in range(len(costs)):
        if bins[item] >= 0:
            continue
        width = widths[item]
        load[0], room[0], multiple[0] = 0, width * cap, 2 * width
        limit = max(costs[item], min(height, NO_LIMIT // width) * width)
        fill(costs, sizes, after, tree, limit, load, room, bins, count, multiple)
        block_widths[count] = width
        count += 1
    return count


def _filled(problem: _Problem, blocks: Int64s, widths: Int64s, shared: int, notes: Notes) -> Int64s | None:
    """Give the items of one rank their blocks, so that all blocks get the same height; None where tokens do not fit.

    The first `shared` of the blocks are of several ranks and have theirs. `blocks` is that of each item, -1 for none.
    `notes` gets where another method than greedy could not be used.
    """
    costs, lengths, cap = problem.costs, problem.lengths, problem.cap
    rest, placed = np.flatnonzero(blocks < 0), np.flatnonzero(blocks >= 0)
    blocks = blocks.copy()
    if problem.method != "greedy":  # other methods know bins of one kind only
        bins = len(widths) - shared
        fits = 0 < int(lengths[rest].sum()) <= bins * cap  # what fits in no way is not asked: a function may refuse it
        ask = kernel_of("balance", problem.method, cap)
        found = ask(costs[rest], lengths[rest], bins, cap, notes) if fits else None
        if found is not None:
            blocks[rest] = shared + found
        return None if len(rest) and found is None else blocks
    multiple = np.where(widths > 1, 2 * widths, 1)
    load = loads(costs[placed], blocks[placed], len(widths))
    taken = pad_lengths(lengths[placed], multiple[blocks[placed]])
    room = widths * cap - loads(taken, blocks[placed], len(widths))
    level = _water_level(load, widths, int(costs[rest].sum()))
    # Seen by `fill`, a block of g ranks is one rank that has done all but what the level leaves of g times its height.
    # Blocks that are shared are filled first, by few large items: as little as possible is shared.
    load -= (widths - 1) * level
    queue, several = Queue(costs[rest], lengths[rest]), slice(0, shared)
    fill(*queue.arrays, level, load[several], room[several], queue.bins, 0, multiple[several])
    fill(*queue.arrays, NO_LIMIT, load, room, queue.bins, 0, multiple)
    if not queue.is_empty:
        return None
    blocks[rest] = queue.in_order()
    return blocks


def _water_level(load: Int64s, widths: Int64s, rest: int) -> int:
    """Return the height to which the rest fills up the blocks that are lower than it.

    Example:
        >>> _water_level(np.array([9, 2, 0]), np.array([1, 2, 1]), 5)
        3
    """
    height = load // widths
    order = np.argsort(height, kind="stable")
    levels = -(-(np.cumsum(load[order]) + rest) // np.cumsum(widths[order]))
    enough = np.append(height[order][1:] >= levels[:-1], True)
    return int(levels[np.argmax(enough)])


@kernel
def _first_fit(widths: Int64s, order: Int64s, num_ranks: int, count: int) -> tuple[Int64s, bool]:
    free, rounds = np.full(count, num_ranks, np.int64), np.zeros(len(widths), np.int64)
    first = 0
    for block in order:
        while first < count and free[first] == 0:
            first += 1
        at = first
        while at < count and free[at] < widths[block]:
            at += 1
        if at == count:
            return rounds, False
        free[at] -= widths[block]
        rounds[block] = at
    return rounds, True


def _tiled(widths: Int64s, order: Int64s, num_ranks: int, count: int) -> Int64s | None:
    """Return the round of each block, each the first that has the ranks; None where there are not enough."""
    rounds, fits = _first_fit(widths, order, num_ranks, count)
    return rounds if fits else None
