"""Balancing: assigns items with costs to bins so that consumers wait little for each other. Integers in, places out.

`balance` fills one row of bins, `place` buckets x microbatches. The kernels are in `methods`; `evenness` has a
lower bound for any placement.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel
from overlord.core.spec_errors import show
from overlord.errors import OverlordError, PlanError, SpecError
from overlord.planning.balancing.methods import (
    ALL_GREEDY,
    NO_LIMIT,
    SOME_GREEDY,
    Int64s,
    Notes,
    Queue,
    balance_greedy,
    balance_karmarkar_karp,
    balance_zigzag,
    fill,
    fits_at_all,
    items_of_bins,
    largest_first,
    loads,
)

MethodName = Literal["greedy", "karmarkar_karp", "zigzag"]
Method = MethodName | Callable[..., npt.ArrayLike]
"""How items are assigned to bins: a name, or a function fn(costs, num_bins, sizes, capacity) -> bin of each item."""
Objective = Literal["sum", "lockstep", "pipeline"]
Level = Literal["inter", "intra", "interleaved"]
Kernel = Callable[[Int64s, Int64s, int, int, Notes], Int64s | None]
"""A method: (costs, sizes, number of bins, capacity, notes) -> bin of each item, or None where they do not fit."""
_NOT_ASKED = "not asked"
"""The method had nothing to place: all items were needed to fill up microbatches beside those above an even share."""
_ONE_GROUP = "one group"
"""A group of buckets had no room for its items, so all buckets were balanced together."""

_MOST_BINS = 1 << 28
_SUM_BITS = 61
"""Bits of the sum of all costs, which stays below NO_LIMIT."""

METHODS: dict[MethodName, Callable[..., Int64s | None]] = {
    "greedy": balance_greedy,
    "karmarkar_karp": balance_karmarkar_karp,
    "zigzag": balance_zigzag,
}


def balance(
    costs: npt.ArrayLike,
    num_bins: int,
    method: Method = "greedy",
    sizes: npt.ArrayLike | None = None,
    capacity: int | None = None,
) -> Int64s:
    """Return the bin of each item, the largest bin as small as the method gets it.

    Ties go to the earlier item and the lower bin, so every machine gives the same answer.

    Args:
        costs: What each item adds to its bin. Floats of any magnitude: only their ratios count.
        num_bins: How many bins there are.
        method: "greedy": the least loaded bin takes the largest item that fits, then the fullest and the emptiest
            bin exchange items. "karmarkar_karp": largest differencing, better with few items to a bin and slower.
            "zigzag": dealt largest first, forth and back. Or a function fn(costs, num_bins, sizes, capacity) that
            returns the bin of each item.
        sizes: What each item takes of a bin's capacity; fractions are rounded up.
        capacity: The most a bin may hold in sizes.

    Raises:
        SpecError: An argument, or what the function returned, is invalid.
        PlanError: The items do not fit into the bins, or the function failed.

    Example:
        >>> balance([5, 4, 3, 2], 2).tolist()
        [0, 1, 1, 0]
        >>> balance([5, 4, 3, 2], 2, lambda costs, num_bins, sizes, capacity: [0, 0, 1, 1]).tolist()
        [0, 0, 1, 1]
    """
    cost = _whole_numbers("costs", costs)
    num_bins = _count("balance", "num_bins", num_bins)
    if sizes is None and capacity is not None:
        raise SpecError(f"balance: capacity is {capacity} but there are no sizes, so nothing would count; give sizes.")
    size = np.zeros(len(cost), np.int64) if sizes is None else _whole_numbers("sizes", sizes)
    if len(size) != len(cost):
        raise SpecError(f"balance: {len(size)} sizes for {len(cost)} costs; give one of each for every item.")
    room = int(size.sum()) if capacity is None else min(_count("balance", "capacity", capacity, least=0), NO_LIMIT)
    if len(size) and int(size.max()) > room:
        at = int(np.argmax(size > room))
        raise SpecError(f"balance: item {at} takes {size[at]}, a bin holds {room}; raise the capacity or cut the item.")
    kernel = kernel_of("balance", method, given_capacity=capacity)
    bins = kernel(cost, size, num_bins, room, set()) if len(cost) else np.zeros(0, np.int64)
    if bins is None:
        by = "" if isinstance(method, str) else f" as {_name(method)} places them"
        raise PlanError(
            f"balance: {len(cost)} items of {int(size.sum())} in all do not fit into {num_bins} bins of {room}{by}; "
            "use more bins or a larger capacity."
        )
    return bins


def place(
    costs: Int64s,
    sizes: Int64s,
    num_buckets: int,
    num_microbatches: int,
    capacity: int,
    *,
    method: Method = "greedy",
    objective: Objective = "lockstep",
    level: Level = "interleaved",
    group_size: int | None = None,
    stages: int = 1,
    notes: Notes | None = None,
) -> Int64s | None:
    """Return bucket * num_microbatches + microbatch of each item, or None where the items do not fit.

    With c the cost of bucket d's microbatch m, D buckets and M microbatches, each at most `capacity` in sizes:

    Args:
        costs: What each item takes of time.
        sizes: What each item takes of memory.
        num_buckets: D, one for each consumer.
        num_microbatches: M.
        capacity: The most that a microbatch of a bucket may hold in sizes.
        method: How items get their bins, see `balance`. A function is asked for the D * M bins, or with
            "sum" or "inter" for the buckets and then for each bucket's microbatches, or with "intra" for the buckets of
            each microbatch; a bin over the capacity means None.
        objective: "sum": the least max_d sum_m c, for consumers that meet once a step; the microbatches of a bucket are
            in falling order. "lockstep": the least sum_m max_d c, for consumers that meet at every microbatch; the
            first microbatch is the heaviest. "pipeline": the least max_d [sum_m c + (stages - 1) * max_m c]; a
            bucket's microbatches are ordered small, big, small, as the ends of a pipeline's schedule have bubbles.
        level: "interleaved": any item may go to any microbatch of any bucket. "inter": items are balanced over buckets
            first, then each bucket's over its microbatches. "intra": microbatch m holds the m-th run of items in
            drawing order, about equal in size, whatever they cost; inside it items are balanced over buckets.
        group_size: Buckets are taken in groups of so many: items are dealt to the groups by cost, then each
            group is balanced by itself ("intra": inside each run). Where one has no room, all buckets are one group.
        stages: Pipeline stages, for the objective "pipeline".
        notes: Gets where the method or the groups could not be used; `in_words` reads it.

    Raises:
        SpecError: An argument, or what the function returned, is invalid.
        PlanError: The function failed.

    Example:
        >>> place(np.array([9, 4, 3, 2]), np.array([3, 2, 2, 1]), 2, 2, 4).tolist()
        [0, 2, 2, 3]
    """
    for name, count in (("buckets", num_buckets), ("microbatches", num_microbatches), ("stages", stages)):
        _count("place", name, count)
    check_names(objective, level)
    costs, sizes = _whole_numbers("costs", costs, times=stages), _whole_numbers("sizes", sizes)
    if len(sizes) != len(costs):
        raise SpecError(f"place: {len(sizes)} sizes for {len(costs)} costs; give one of each for every item.")
    capacity = _count("place", "capacity", capacity, least=0)
    groups = None if group_size is None else _count("place", "group_size", group_size)
    kernel = kernel_of("place", method, capacity)
    if not fits_at_all(sizes, num_buckets * num_microbatches, capacity):
        return None
    # A capacity above the sum of sizes limits nothing; clipping it keeps products inside int64.
    capacity = min(capacity, int(sizes.sum()))
    placer = _Placer(num_microbatches, capacity, method, kernel, objective, level, groups, stages)
    noted: Notes = set() if notes is None else notes
    if level == "intra":
        return placer.by_runs(costs, sizes, num_buckets, noted)
    if placer.has_groups(num_buckets):
        places = placer.by_groups(costs, sizes, num_buckets, noted)
        if places is not None:
            return places
        noted.clear()
        noted.add(_ONE_GROUP)
    return placer.place(costs, sizes, num_buckets, noted)


def in_words(notes: Collection[str], method: str, group_size: int | None = None) -> tuple[str, ...]:
    """Return sentences on where a placement is another than was asked for.

    Example:
        >>> in_words({ALL_GREEDY}, "zigzag")
        ('zigzag would exceed batch.microbatch_tokens, so all pieces were placed greedily.',)
    """
    words = {
        ALL_GREEDY: f"{method} would exceed batch.microbatch_tokens, so all pieces were placed greedily.",
        SOME_GREEDY: f"where {method} would exceed batch.microbatch_tokens, pieces were placed greedily.",
        _NOT_ASKED: f"{method} had nothing to place: in lockstep a piece above an even share sets the height of its "
        "microbatch, and all others fill up these.",
        _ONE_GROUP: f"groups of {group_size} buckets have no room for their pieces under batch.microbatch_tokens, so "
        "all buckets were balanced as one group.",
    }
    hidden = {SOME_GREEDY} if ALL_GREEDY in notes else set()
    return tuple(sentence for note, sentence in words.items() if note in notes and note not in hidden)


def _note_parts(notes: Notes, parts: Sequence[Notes]) -> None:
    """Note of all items what was noted of parts of them."""
    for note in set[str]().union(*parts):
        whole = note not in (ALL_GREEDY, _NOT_ASKED) or all(note in part for part in parts)
        if whole or note == ALL_GREEDY:
            notes.add(note if whole else SOME_GREEDY)


def check_names(objective: Objective | None, level: Level | None) -> None:
    """Raise SpecError for an objective or a level that there is not."""
    for name, value, known in (("objective", objective, Objective), ("level", level, Level)):
        if value is not None and value not in get_args(known):
            raise SpecError(f"balance: {name} is {value!r}, which is unknown; use one of {', '.join(get_args(known))}.")


@dataclass(frozen=True, slots=True)
class _Placer:
    """How items are placed: the arguments of `place` but for the items and their buckets."""

    num_microbatches: int
    capacity: int
    method: Method
    kernel: Kernel
    objective: Objective
    level: Level
    group_size: int | None
    stages: int

    def place(self, costs: Int64s, sizes: Int64s, num_buckets: int, notes: Notes) -> Int64s | None:
        """Place items without groups of buckets."""
        of_flat: Notes = set()
        of_even: Notes = set()
        if self.level == "inter" or self.objective == "sum":
            places = self._by_buckets(costs, sizes, num_buckets, of_even)
            if places is None:
                places = self._by_bins(costs, sizes, num_buckets, of_flat)
                of_even = of_flat
            notes |= of_even
            return places
        flat = self._by_bins(costs, sizes, num_buckets, of_flat)
        even = None
        if self.objective == "pipeline" and flat is not None:
            # Bins of similar load are best where many items share a bin. Where one item is most of a bucket, even
            # buckets are.
            even = self._by_buckets(costs, sizes, num_buckets, of_even)
        if flat is not None and even is not None:
            times = [self._pipeline_time(costs, one, num_buckets) for one in (flat, even)]
            if times[1] < times[0]:
                notes |= of_even
                return even
        notes |= of_flat
        return flat

    def has_groups(self, num_buckets: int) -> bool:
        """Whether buckets are balanced in groups."""
        return self.group_size is not None and self.group_size < num_buckets

    def by_groups(self, costs: Int64s, sizes: Int64s, num_buckets: int, notes: Notes) -> Int64s | None:
        """Deal items to groups of buckets by cost, then place each group by itself; None without room."""
        group_size = self.group_size
        assert group_size is not None
        starts = np.arange(0, num_buckets, group_size)
        widths = np.minimum(group_size, num_buckets - starts)
        # A group with fewer buckets starts with the load that the missing ones would have.
        load = int(costs.sum()) // num_buckets * (group_size - widths)
        room = widths * self.num_microbatches * self.capacity
        queue = Queue(costs, sizes)
        fill(*queue.arrays, NO_LIMIT, load, room, queue.bins, 0)
        if not queue.is_empty:
            return None
        groups = queue.in_order()
        order = np.argsort(groups, kind="stable")
        ends = np.searchsorted(groups[order], np.arange(len(starts) + 1))
        places, parts = np.empty(len(costs), np.int64), list[Notes]()
        for group, (start, width) in enumerate(zip(starts.tolist(), widths.tolist(), strict=True)):
            mine = order[ends[group] : ends[group + 1]]
            parts.append(set())
            found = self.place(costs[mine], sizes[mine], width, parts[-1])
            if found is None:
                return None
            places[mine] = found + start * self.num_microbatches
        _note_parts(notes, parts)
        return places

    def by_runs(self, costs: Int64s, sizes: Int64s, num_buckets: int, notes: Notes) -> Int64s | None:
        """Cut items into runs in drawing order, then balance each run over the buckets."""
        ends = _equal_runs(sizes, self.num_microbatches, num_buckets * self.capacity)
        if ends is None:
            return None
        places = np.empty(len(costs), np.int64)
        sums = np.zeros(num_buckets, np.int64)
        single, parts = dataclasses.replace(self, num_microbatches=1), list[Notes]()
        for microbatch in range(self.num_microbatches):
            run, noted, bins = slice(int(ends[microbatch]), int(ends[microbatch + 1])), Notes(), None
            if single.has_groups(num_buckets):
                bins = single.by_groups(costs[run], sizes[run], num_buckets, noted)
                noted = {_ONE_GROUP} if bins is None else noted
            if bins is None:
                bins = self.kernel(costs[run], sizes[run], num_buckets, self.capacity, noted)
            if bins is None:
                return None
            parts.append(noted)
            load = loads(costs[run], bins, num_buckets)
            buckets = np.empty(num_buckets, np.int64)
            buckets[np.argsort(-load, kind="stable")] = np.argsort(sums, kind="stable")
            sums[buckets] += load
            places[run] = buckets[bins] * self.num_microbatches + microbatch
        _note_parts(notes, parts)
        return places

    def _by_bins(self, costs: Int64s, sizes: Int64s, num_buckets: int, notes: Notes) -> Int64s | None:
        """Place items into D * M bins, then deal the bins to buckets."""
        num_bins = num_buckets * self.num_microbatches
        if self.objective == "lockstep" and isinstance(self.method, str):
            spread = None if self.method == "greedy" else self.kernel
            bins = fill_slabs(costs, sizes, num_buckets, self.num_microbatches, self.capacity, spread, notes)
        else:
            bins = self.kernel(costs, sizes, num_bins, self.capacity, notes)
        if bins is None:
            return None
        stages = self.stages if self.objective == "pipeline" else 1
        places = deal_slabs(loads(costs, bins, num_bins), num_buckets, self.num_microbatches, stages)
        return self._in_schedule_order(places)[bins]

    def _by_buckets(self, costs: Int64s, sizes: Int64s, num_buckets: int, notes: Notes) -> Int64s | None:
        """Balance over buckets, then inside each over its microbatches."""
        count = self.num_microbatches
        buckets = self.kernel(costs, sizes, num_buckets, count * self.capacity, notes)
        if buckets is None:
            return None
        order = largest_first(costs)
        items, ends = np.empty(len(costs), np.int64), np.empty(num_buckets + 1, np.int64)
        items_of_bins(order, buckets, items, ends)
        bins = np.full(len(costs), -1, np.int64)
        failed = np.arange(num_buckets)
        if self.method == "greedy":
            bins[items], failed = _fill_each(costs[items], sizes[items], ends, count, self.capacity)
        parts = list[Notes]()
        for bucket in failed:
            mine = np.sort(items[ends[bucket] : ends[bucket + 1]])
            parts.append(set())
            found = self.kernel(costs[mine], sizes[mine], count, self.capacity, parts[-1])
            if found is None:
                return None
            bins[mine] = found
        _note_parts(notes, parts)
        load = loads(costs, buckets * count + bins, num_buckets * count).reshape(num_buckets, count)
        rank = np.argsort(np.argsort(-load, axis=1, kind="stable"), axis=1, kind="stable")
        places = (np.arange(num_buckets)[:, None] * count + rank).ravel()
        return self._in_schedule_order(places)[buckets * count + bins]

    def _in_schedule_order(self, places: Int64s) -> Int64s:
        """Turn microbatches in falling order of cost into the order in which they run: small, big, small."""
        if self.objective != "pipeline":
            return places
        falling = np.arange(self.num_microbatches)
        position = np.empty(self.num_microbatches, np.int64)
        position[np.concatenate((falling[::2][::-1], falling[1::2]))] = falling
        bucket, microbatch = np.divmod(places, self.num_microbatches)
        return bucket * self.num_microbatches + position[microbatch]

    def _pipeline_time(self, costs: Int64s, places: Int64s, num_buckets: int) -> int:
        load = loads(costs, places, num_buckets * self.num_microbatches).reshape(num_buckets, -1)
        return int((load.sum(axis=1) + (self.stages - 1) * load.max(axis=1)).max())


@kernel
def _fill_each(costs: Int64s, sizes: Int64s, ends: Int64s, num_bins: int, capacity: int) -> tuple[Int64s, Int64s]:
    """Fill the bins of each bucket; its items are consecutive, largest first. Return bins and failed buckets."""
    bins = np.full(len(costs), -1, np.int64)
    failed = np.zeros(len(ends) - 1, np.bool_)
    for bucket in range(len(ends) - 1):
        mine = slice(ends[bucket], ends[bucket + 1])
        size = sizes[mine]
        # Sizes that do not fall with the costs need the tree of sizes: left to the caller's slower way.
        failed[bucket] = np.any(size[1:] > size[:-1])
        if not failed[bucket] and len(size):
            load, room = np.zeros(num_bins, np.int64), np.full(num_bins, capacity, np.int64)
            fill(
                costs[mine], size, np.arange(len(size) + 1), np.zeros(1, np.int64), NO_LIMIT, load, room, bins[mine], 0
            )
            failed[bucket] = np.any(bins[mine] < 0)
    return bins, np.flatnonzero(failed)


def _equal_runs(sizes: Int64s, num_runs: int, most: int) -> Int64s | None:
    """Return where each run begins, and the end: about equal sizes; if one is too large, the least largest one."""
    # Items of no size count by their number.
    size = sizes if sizes.any() else np.ones(len(sizes), np.int64)
    reach = np.concatenate((np.zeros(1, np.int64), np.cumsum(size)))
    targets = [int(reach[-1]) * run // num_runs for run in range(num_runs)]
    begins = np.searchsorted(reach[:-1] + size // 2, targets)  # an item belongs where its middle is
    ends = np.concatenate((begins, [len(sizes)]))
    if not sizes.any() or int(np.diff(reach[ends]).max()) <= most:
        return ends
    # Binary search for the least size of the largest run with which `num_runs` runs hold all items.
    low, high, best = 0, most, None
    while low <= high:
        middle = (low + high) // 2
        ends = np.zeros(num_runs + 1, np.int64)
        for run in range(num_runs):
            ends[run + 1] = np.searchsorted(reach, reach[ends[run]] + middle, side="right") - 1
        if ends[-1] == len(sizes):
            best, high = ends, middle - 1
        else:
            low = middle + 1
    return best


def kernel_of(where: str, method: Method, given_capacity: int | None) -> Kernel:
    """Return the kernel of a method; a function is called with the capacity if one is given, and its answer checked.

    Raises:
        SpecError: There is no such method.
    """
    if isinstance(method, str):
        if method not in METHODS:
            raise SpecError(
                f"{where}: method is {method!r}, which is unknown; use one of {', '.join(METHODS)}, or a function."
            )
        return METHODS[method]
    if not callable(method):
        raise SpecError(
            f"{where}: method is {method!r}, neither a name nor a function; use one of {', '.join(METHODS)}."
        )
    function = method

    def ask(costs: Int64s, sizes: Int64s, num_bins: int, capacity: int, notes: Notes) -> Int64s | None:
        limit = None if given_capacity is None else capacity
        try:
            answer = np.asarray(function(_frozen(costs), num_bins, _frozen(sizes), limit))
        except OverlordError:
            raise
        except (Exception, SystemExit) as error:  # code of the user may raise anything
            raise PlanError(
                f"{where}: the function {_name(function)} failed on {len(costs)} items and {num_bins} bins with "
                f"{type(error).__name__}: {error}. It is called as fn(costs, num_bins, sizes, capacity), with arrays "
                "it must not change, and returns the bin of each item."
            ) from error
        return _checked_answer(f"{where}: the function {_name(function)}", answer, sizes, num_bins, capacity)

    return ask


def _checked_answer(name: str, bins: npt.NDArray[Any], sizes: Int64s, num_bins: int, capacity: int) -> Int64s | None:
    if bins.shape != sizes.shape:
        raise SpecError(f"{name} returned shape {bins.shape} for {len(sizes)} items; return one bin for each.")
    if len(bins) and bins.dtype.kind not in "iu":
        raise SpecError(f"{name} returned {bins.dtype}, bins are numbered by integers; return integers.")
    wrong = np.flatnonzero((bins < 0) | (bins >= num_bins))
    if len(wrong):
        at = int(wrong[0])
        raise SpecError(f"{name} put item {at} into bin {bins[at]}; return 0 to {num_bins - 1}, or it would be lost.")
    bins = bins.astype(np.int64)
    return bins if int(loads(sizes, bins, num_bins).max()) <= capacity else None


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))


def _frozen(values: Int64s) -> Int64s:
    view = values.view()
    view.flags.writeable = False
    return view


def _count(where: str, name: str, value: int, least: int = 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise SpecError(f"{where}: {name} is {show(value)}, which is not a count; give a whole number.") from None
    if number < least:
        raise SpecError(f"{where}: {name} is {number}, nothing could be placed; give at least {least}.")
    if least and number > _MOST_BINS:
        raise SpecError(f"{where}: {name} is {number}, more than memory can hold; give at most {_MOST_BINS}.")
    return number


def _whole_numbers(name: str, values: npt.ArrayLike, times: int = 1) -> Int64s:
    """Return values as int64, or raise for what cannot be added up."""
    try:
        given = np.asarray(values)
    except ValueError:
        raise SpecError(
            f"balance: {name} are {show(values)}, lists of several lengths; items would have no number of their own. "
            "Give a list of numbers, one for each item."
        ) from None
    if given.ndim != 1:
        raise SpecError(f"balance: {name} have shape {given.shape}; give a list of numbers, one for each item.")
    if len(given) == 0:
        return np.zeros(0, np.int64)
    if given.dtype.kind not in "biuf":
        raise SpecError(f"balance: {name} are {given.dtype}, which do not compare alike everywhere; give numbers.")
    bad = np.flatnonzero(~(given >= 0) | ~np.isfinite(given) if given.dtype.kind == "f" else given < 0)
    if len(bad):
        at = int(bad[0])
        raise SpecError(
            f"balance: {name}[{at}] is {given[at]}; a bin could not be compared. Give finite numbers from 0."
        )
    if given.dtype.kind == "f" and name == "costs":
        return _scaled(given.astype(np.float64), times)
    if float(given.sum(dtype=np.float64)) * times >= NO_LIMIT:
        raise SpecError(
            f"balance: {name} add up to more than 2**62, which int64 cannot hold; give them in larger units."
        )
    # Kernels are compiled for arrays that may be written; read-only ones, as a user's method gets, would compile anew.
    copied = not given.flags.writeable
    return np.ceil(given).astype(np.int64) if given.dtype.kind == "f" else given.astype(np.int64, copy=copied)


def _scaled(costs: npt.NDArray[np.float64], times: int) -> Int64s:
    """Return float costs as integers in the same ratios.

    Whole numbers stay what they are. Others are multiplied by the power of two that brings the largest as high as sums
    of all of them allow: to round them as they are would make costs below 0.5 equal to nothing, and a power of two
    keeps every bit that fits.
    """
    most_bits = _SUM_BITS - (len(costs) * times).bit_length()
    largest = math.frexp(costs.max())[1]
    if largest > most_bits or not np.array_equal(costs, np.rint(costs)):
        costs = np.rint(np.ldexp(costs, most_bits - largest))
    return costs.astype(np.int64)


# The lockstep objective: buckets wait for one another at every microbatch, so the sum of the slowest counts.
#
# A slab is one microbatch of all buckets. While the largest waiting item costs more than an even share, the next slab
# gets the height of that item and is filled up to it, within the capacity. When no item exceeds the even share, the
# remaining items are spread evenly over the remaining slabs.


_EVENLY, _BY_SLAB, _SPREAD = 0, 1, 2
"""Once no item exceeds the even share: fill all remaining slabs together; one by one; leave them to another method."""
SMALL = 1 << 16
"""Up to this many items, filling slab by slab is tried too: it takes a few milliseconds and is sometimes better."""


def fill_slabs(
    costs: Int64s,
    sizes: Int64s,
    num_buckets: int,
    num_microbatches: int,
    capacity: int,
    spread: Kernel | None = None,
    notes: Notes | None = None,
) -> Int64s | None:
    """Return the bin of each item in D * M bins that make even slabs, or None where the items do not fit.

    The bins still have to be dealt to buckets (`deal_slabs`). `spread` fills the even slabs; None is greedy. `notes`
    tells where it could not.

    Example:
        >>> fill_slabs(np.array([9, 4, 3, 2, 1, 1]), np.ones(6, np.int64), 2, 2, 3).tolist()
        [0, 1, 1, 1, 2, 3]
    """
    num_bins = num_buckets * num_microbatches
    if not fits_at_all(sizes, num_bins, capacity):
        return None
    best, least = None, NO_LIMIT
    noted: Notes = set()
    ways = (_SPREAD,) if spread else (_EVENLY, _BY_SLAB) if len(costs) <= SMALL else (_EVENLY,)
    for way in ways:
        queue = Queue(costs, sizes)
        slab = _water_fill(*queue.arrays, num_buckets, num_microbatches, capacity, way, queue.bins)
        bins = queue.in_order()
        if spread and slab < num_microbatches:
            rest = np.flatnonzero(bins < 0)
            found = spread(costs[rest], sizes[rest], num_bins - slab * num_buckets, capacity, noted)
            if found is not None:
                bins[rest] = found + slab * num_buckets
        elif spread:
            noted.add(_NOT_ASKED)
        if bins.min(initial=0) >= 0:
            height = slab_heights(loads(costs, bins, num_bins), num_buckets)
            if height < least:
                best, least = bins, height
    if best is None:
        noted = {ALL_GREEDY} if spread else noted
        best = balance_greedy(costs, sizes, num_bins, capacity)
    if notes is not None:
        notes |= noted
    return best


def slab_heights(load: Int64s, num_buckets: int) -> int:
    """Return the sum of the slabs' maxima when bins of similar load share a slab, which is the least possible.

    Example:
        >>> slab_heights(np.array([9, 1, 8, 2]), 2)
        11
    """
    return int(np.sort(load)[::-1][::num_buckets].sum())


def deal_slabs(load: Int64s, num_buckets: int, num_microbatches: int, stages: int = 1) -> Int64s:
    """Return the place bucket * M + microbatch of each bin: similar loads share a microbatch, buckets end up even.

    With p pipeline stages a bucket's heaviest bin counts p times.

    Example:
        >>> deal_slabs(np.array([9, 1, 8, 2]), 2, 2).tolist()
        [0, 1, 2, 3]
    """
    slabs = np.argsort(-load, kind="stable").reshape(num_microbatches, num_buckets)
    place = np.empty(len(load), np.int64)
    place[slabs[0]] = np.arange(num_buckets) * num_microbatches
    sums = load[slabs[0]] * stages
    for microbatch in range(1, num_microbatches):
        bins = slabs[microbatch]
        buckets = np.argsort(sums, kind="stable")  # the heaviest bin goes to the lightest bucket
        place[bins] = buckets * num_microbatches + microbatch
        sums[buckets] += load[bins]
    return place


@kernel
def _water_fill(
    costs: Int64s,
    sizes: Int64s,
    after: Int64s,
    tree: Int64s,
    num_buckets: int,
    num_microbatches: int,
    capacity: int,
    way: int,
    bins: Int64s,
) -> int:
    """Fill slabs from the highest to the lowest; return how many were filled."""
    n, rest, slab, head = len(costs), np.int64(0), 0, 0
    for i in range(n):
        rest += costs[i]
    while slab < num_microbatches:
        while head < n and bins[head] >= 0:
            head += 1
        if head == n:
            return num_microbatches
        left = num_microbatches - slab
        share = -(-rest // (num_buckets * left))
        if way == _SPREAD and costs[head] <= share:
            return slab
        at_once = left if way != _BY_SLAB and costs[head] <= share else 1
        limit = NO_LIMIT if at_once == left else max(costs[head], share + share // 50)
        load, room = np.zeros(at_once * num_buckets, np.int64), np.full(at_once * num_buckets, capacity, np.int64)
        rest -= fill(costs, sizes, after, tree, limit, load, room, bins, slab * num_buckets)
        slab += at_once
    return slab
