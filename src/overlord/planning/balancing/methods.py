"""The balancing methods: greedy, Karmarkar-Karp and zigzag, and round-robin, which ignores costs.

The kernels see items largest first (`largest_first`). An item is in at most one bin; bins hold at most their room.
Every comparison is between integers; ties go to the earlier item and the lower bin.

Greedy: the least loaded bin takes the largest item that still fits. `Queue` holds the items that have no bin yet. Bins
are a tournament tree by load. `fill` takes the least loaded bin and finds the largest waiting item within the bin's
limits of cost and size (`_largest_fitting`): a binary search by cost, then the next waiting item; where sizes do not
fall with costs, a tree of least sizes finds the next one that fits. `refine` then lets bins exchange items in a fixed
number of rounds.

Karmarkar-Karp repeatedly combines the two partial solutions with the largest spread, large bins on small ones. A
partial solution stores only its nonempty bins, so the early ones are short.

Zigzag deals items largest first, forward and back over the bins; it is even only where many items share a bin.
Round-robin is the baseline: loading without a plan.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel

Int64s = npt.NDArray[np.int64]

NO_LIMIT = 1 << 62
"""Larger than any load or capacity: totals are checked to stay below."""
Notes = set[str]
"""How a placement differs from what was asked for: `SOME_GREEDY`, `ALL_GREEDY` and others of `balance`."""
SOME_GREEDY = "some greedy"
"""Some items had no room where the method put them, and were placed greedily."""
ALL_GREEDY = "all greedy"
"""The same of all items."""
_DIGIT_BITS = 11
_ROUNDS = 4
_SKIPS = 32

# Kernels of an inner loop that allocate nothing. Profiled: counting references to their arrays was half of `fill`.
_inner = functools.partial(kernel, _nrt=False)


def balance_greedy(
    costs: Int64s, sizes: Int64s, num_bins: int, capacity: int, notes: Notes | None = None
) -> Int64s | None:
    """Return the bin of each item, or None where the items do not fit.

    Items are placed by falling cost. If an item then has no room, they are placed by falling size; if that fails, by
    first fit decreasing, which always succeeds while the items take at most half of all room. There is nothing to note:
    the parameter is that of every method.

    Example:
        >>> balance_greedy(np.array([5, 4, 3, 2]), np.zeros(4, np.int64), 2, 0).tolist()
        [0, 1, 1, 0]
    """
    if not fits_at_all(sizes, num_bins, capacity):
        return None
    bins = None
    for keys in (costs, sizes):
        queue = Queue(keys, sizes)
        load, room = np.zeros(num_bins, np.int64), np.full(num_bins, capacity, np.int64)
        fill(*queue.arrays, NO_LIMIT, load, room, queue.bins, 0)
        if queue.is_empty:
            bins = queue.in_order()
            break
    if bins is None:
        bins = first_fit_decreasing(sizes, num_bins, capacity)
    if bins is not None:
        refine(costs, sizes, num_bins, capacity, bins)
    return bins


def place_rest(
    costs: Int64s, sizes: Int64s, num_bins: int, capacity: int, bins: Int64s, notes: Notes | None = None
) -> Int64s | None:
    """Place the items without a bin (-1) greedily; if they do not fit, place all items again from scratch."""
    rest = np.flatnonzero(bins < 0)
    if len(rest) == 0:
        return bins
    load, room = np.zeros(num_bins, np.int64), np.full(num_bins, capacity, np.int64)
    _add_up(costs, sizes, bins, load, room)
    queue = Queue(costs[rest], sizes[rest])
    fill(*queue.arrays, NO_LIMIT, load, room, queue.bins, 0)
    if notes is not None:
        notes.add(SOME_GREEDY if queue.is_empty else ALL_GREEDY)
    if not queue.is_empty:
        return balance_greedy(costs, sizes, num_bins, capacity)
    bins[rest] = queue.in_order()
    return bins


def fits_at_all(sizes: Int64s, num_bins: int, capacity: int) -> bool:
    """Return whether every item fits a bin and all items together fit all bins."""
    return int(sizes.max(initial=0)) <= capacity and int(sizes.sum()) <= num_bins * capacity


def loads(costs: Int64s, bins: Int64s, num_bins: int) -> Int64s:
    """Return the total cost of each bin.

    Example:
        >>> loads(np.array([5, 4, 3]), np.array([0, 1, 1]), 2).tolist()
        [5, 7]
    """
    total = np.zeros(num_bins, np.int64)
    _add_up(costs, costs, bins, total, np.zeros(num_bins, np.int64))
    return total


class Queue:
    """Items that wait for a bin, largest cost first, as the kernels take them."""

    def __init__(self, costs: Int64s, sizes: Int64s) -> None:
        self.order = largest_first(costs)
        self.costs, self.sizes = costs[self.order], sizes[self.order]
        self.after = np.arange(len(costs) + 1, dtype=np.int64)
        """Union-find: a waiting item points to itself, a placed one to a later item; see `_next_waiting`."""
        # If sizes fall with costs, as for plain text, one binary search finds an item that fits both limits: no tree.
        rises = bool(np.any(self.sizes[1:] > self.sizes[:-1]))
        self.tree = _size_tree(self.sizes) if rises else np.zeros(1, np.int64)
        self.bins = np.full(len(costs), -1, np.int64)

    @property
    def arrays(self) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """The first arguments of `fill`."""
        return self.costs, self.sizes, self.after, self.tree

    @property
    def is_empty(self) -> bool:
        """Whether every item has a bin."""
        return bool(_next_waiting(self.after, 0) == len(self.bins))

    def in_order(self) -> Int64s:
        """Return the bin of each item in the order they were given."""
        bins = np.empty(len(self.bins), np.int64)
        bins[self.order] = self.bins
        return bins


@kernel
def largest_first(costs: Int64s) -> Int64s:
    """Return the items by falling cost, equal ones in order. A radix sort: faster than one by comparison."""
    n = len(costs)
    top = np.int64(0)
    for i in range(n):
        top = max(top, costs[i])
    keys, order = np.empty(n, np.int64), np.arange(n)
    for i in range(n):
        keys[i] = top - costs[i]
    other_keys, other = np.empty(n, np.int64), np.empty(n, np.int64)
    shift, mask = 0, (1 << _DIGIT_BITS) - 1
    while top >> shift:
        starts = np.zeros((1 << _DIGIT_BITS) + 1, np.int64)
        for i in range(n):
            starts[((keys[i] >> shift) & mask) + 1] += 1
        for digit in range(1 << _DIGIT_BITS):
            starts[digit + 1] += starts[digit]
        for i in range(n):
            digit = (keys[i] >> shift) & mask
            other_keys[starts[digit]] = keys[i]
            other[starts[digit]] = order[i]
            starts[digit] += 1
        keys, other_keys, order, other = other_keys, keys, other, order
        shift += _DIGIT_BITS
    return order


@kernel
def fill(
    costs: Int64s,
    sizes: Int64s,
    after: Int64s,
    tree: Int64s,
    limit: int,
    load: Int64s,
    room: Int64s,
    bins: Int64s,
    first_bin: int,
    multiple: Int64s | None = None,
) -> np.int64:
    """Place waiting items: the least loaded bin takes the largest that fits, until none is left; return the cost
    placed.

    A bin that no waiting item fits is closed, so each iteration places an item or closes a bin.

    Args:
        costs: Of the items, largest first.
        sizes: Of the items.
        after: The items that wait (see `Queue`).
        tree: The least waiting size in each range of items; one element where sizes fall as costs do.
        limit: The most that a bin may cost.
        load: The cost in each bin so far; updated.
        room: The size free in each bin; updated.
        bins: Where the bin of each item placed is written.
        first_bin: The number of the first bin.
        multiple: What the size of an item is rounded up to in each bin; None where it is not.
    """
    n, open_bins, placed, head = len(costs), len(load), np.int64(0), np.int64(0)
    least_load, least_bin = _tournament(load)
    while open_bins > 0:
        head = _next_waiting(after, head)
        if head == n:
            break
        chosen, least = least_bin[1], least_load[1]
        free = room[chosen]
        if multiple is not None:
            free -= free % multiple[chosen]
        item = _largest_fitting(costs, sizes, after, tree, head, limit - least, free)
        if item == n:
            open_bins -= 1
            _replay(least_load, least_bin, chosen, NO_LIMIT)
            continue
        bins[item] = first_bin + chosen
        after[item] = item + 1
        if len(tree) > 1:
            _remove(tree, item)
        taken = sizes[item]
        if multiple is not None:
            taken += -taken % multiple[chosen]
        room[chosen] -= taken
        load[chosen] = least + costs[item]
        placed += costs[item]
        _replay(least_load, least_bin, chosen, load[chosen])
    return placed


@_inner
def _next_waiting(after: Int64s, item: int) -> int:
    """Return the first waiting item from `item` on, or their number; halves the path on the way."""
    while after[item] != item:
        after[item] = after[after[item]]
        item = after[item]
    return item


@_inner
def _largest_fitting(costs: Int64s, sizes: Int64s, after: Int64s, tree: Int64s, head: int, cost: int, size: int) -> int:
    """Return the first (the largest) waiting item from `head` on within a cost and a size, or the item count."""
    n = len(costs)
    if costs[head] <= cost and sizes[head] <= size:
        return head
    falling = len(tree) == 1
    low, high = head, n
    while low < high:
        middle = (low + high) // 2
        if costs[middle] > cost or (falling and sizes[middle] > size):
            low = middle + 1
        else:
            high = middle
    return _next_waiting(after, low) if falling else _first_of_size(tree, low, n, size)


@kernel
def _tournament(load: Int64s) -> tuple[Int64s, npt.NDArray[np.int32]]:
    """Return a binary tree of the least load in each range of bins, and its bin, the lower one of equals; root at 1."""
    width = 1
    while width < len(load):
        width *= 2
    least_load, least_bin = np.full(2 * width, NO_LIMIT, np.int64), np.empty(2 * width, np.int32)
    least_load[width : width + len(load)] = load
    for node in range(2 * width - 1, 0, -1):
        if node >= width:
            least_bin[node] = node - width
        else:
            child = 2 * node + (1 if least_load[2 * node + 1] < least_load[2 * node] else 0)
            least_load[node], least_bin[node] = least_load[child], least_bin[child]
    return least_load, least_bin


@_inner
def _replay(least_load: Int64s, least_bin: npt.NDArray[np.int32], chosen: int, load: int) -> None:
    """Give a bin another load."""
    # Profiled: a heap waits for mispredicted branches; a path from leaf to root is known in advance and has none.
    node = np.uintp(len(least_load) // 2 + chosen)
    winner = np.int32(chosen)
    least_load[node] = load
    while node > 1:
        other = node ^ np.uintp(1)
        rival, rival_bin = least_load[other], least_bin[other]
        wins = rival < load + np.int64(node & np.uintp(1))  # the left one wins a tie
        load = rival if wins else load
        winner = rival_bin if wins else winner
        node >>= np.uintp(1)
        least_load[node] = load
        least_bin[node] = winner


@kernel
def _size_tree(sizes: Int64s) -> Int64s:
    """Return a binary tree of the least size in each range: node i has the children 2 i and 2 i + 1, leaves last."""
    width = 1
    while width < len(sizes) + 1:
        width *= 2
    tree = np.full(2 * width, NO_LIMIT, np.int64)
    tree[width : width + len(sizes)] = sizes
    for node in range(width - 1, 0, -1):
        tree[node] = min(tree[2 * node], tree[2 * node + 1])
    return tree


@_inner
def _remove(tree: Int64s, item: int) -> None:
    node = len(tree) // 2 + item
    tree[node] = NO_LIMIT
    while node > 1:
        node //= 2
        tree[node] = min(tree[2 * node], tree[2 * node + 1])


@_inner
def _first_of_size(tree: Int64s, item: int, n: int, size: int) -> int:
    """Return the first waiting item from `item` on that is at most this large, or n."""
    width = len(tree) // 2
    node = width + item
    # Climb to the next subtree on the right that holds a small enough item, then descend to its first one.
    while tree[node] > size:
        while node % 2 == 1:
            node //= 2
        if node == 0:
            return n
        node += 1
    while node < width:
        node *= 2
        if tree[node] > size:
            node += 1
    return node - width


@kernel
def _add_up(costs: Int64s, sizes: Int64s, bins: Int64s, load: Int64s, room: Int64s) -> None:
    for i in range(len(bins)):
        if bins[i] >= 0:
            load[bins[i]] += costs[i]
            room[bins[i]] -= sizes[i]


def first_fit_decreasing(sizes: Int64s, num_bins: int, capacity: int) -> Int64s | None:
    """Return the bin of each item, bins filled one after the other; None if there are too few bins.

    Example:
        >>> first_fit_decreasing(np.array([2, 3, 3, 4]), 2, 6).tolist()
        [0, 1, 1, 0]
    """
    queue = Queue(sizes, sizes)
    fill_in_turn(queue.sizes, queue.after, num_bins, capacity, queue.bins)
    return queue.in_order() if queue.is_empty else None


@kernel
def fill_in_turn(sizes: Int64s, after: Int64s, num_bins: int, capacity: int, bins: Int64s) -> None:
    """Fill one bin after the other, always with the largest waiting item that fits; sizes must fall."""
    n, none = len(sizes), np.zeros(1, np.int64)
    for chosen in range(num_bins):
        room = capacity
        while True:
            head = _next_waiting(after, 0)
            if head == n:
                return
            item = _largest_fitting(sizes, sizes, after, none, head, room, room)
            if item == n:
                break
            bins[item] = chosen
            after[item] = item + 1
            room -= sizes[item]


def refine(costs: Int64s, sizes: Int64s, num_bins: int, capacity: int, bins: Int64s) -> None:
    """Lower the largest load in place: full bins move an item to empty ones, or swap it for a cheaper one.

    In a round the fullest bin is paired with the emptiest, the second fullest with the second emptiest, and so on. The
    number of rounds is fixed, so that every machine gives the same result.

    Example:
        >>> bins = np.array([0, 0, 1])
        >>> refine(np.array([4, 3, 2]), np.zeros(3, np.int64), 2, 0, bins)
        >>> bins.tolist()
        [1, 0, 0]
    """
    if num_bins > 1 and len(costs):
        _exchange_in_rounds(costs, sizes, largest_first(costs), num_bins, capacity, bins)


@kernel
def _exchange_in_rounds(
    costs: Int64s, sizes: Int64s, order: Int64s, num_bins: int, capacity: int, bins: Int64s
) -> None:
    load, room = np.zeros(num_bins, np.int64), np.full(num_bins, capacity, np.int64)
    _add_up(costs, sizes, bins, load, room)
    least = max(-(-load.sum() // num_bins), costs[order[0]])
    items, starts = np.empty(len(costs), np.int64), np.empty(num_bins + 1, np.int64)
    for _ in range(_ROUNDS):
        if load.max() <= least:
            return
        items_of_bins(order, bins, items, starts)
        ranks = np.argsort(load, kind="mergesort")
        changed = False
        for rank in range(num_bins // 2):
            low, high = ranks[rank], ranks[num_bins - 1 - rank]
            gap = load[high] - load[low]
            if gap < 2:
                break
            offers, wants = items[starts[high] : starts[high + 1]], items[starts[low] : starts[low + 1]]
            given, taken = _best_exchange(costs, sizes, offers, wants, gap, room[low], room[high])
            if given < 0:
                continue
            changed = True
            bins[given] = low
            cost, size = costs[given], sizes[given]
            if taken >= 0:
                bins[taken] = high
                cost, size = cost - costs[taken], size - sizes[taken]
            load[high], load[low] = load[high] - cost, load[low] + cost
            room[high], room[low] = room[high] + size, room[low] - size
        if not changed:
            return


@kernel
def items_of_bins(order: Int64s, bins: Int64s, items: Int64s, starts: Int64s) -> None:
    """Write the items grouped by bin, inside a bin in the order given, and where each bin starts (counting sort)."""
    starts[:] = 0
    for item in order:
        starts[bins[item]] += 1
    total = 0
    for one in range(len(starts)):
        total += starts[one]
        starts[one] = total
    for at in range(len(order) - 1, -1, -1):
        item = order[at]
        starts[bins[item]] -= 1
        items[starts[bins[item]]] = item


@kernel
def _best_exchange(
    costs: Int64s, sizes: Int64s, offers: Int64s, wants: Int64s, gap: int, low_room: int, high_room: int
) -> tuple[int, int]:
    """Return the item that the fuller bin gives and the one it takes (-1: none); both lists fall in cost.

    The best exchange has a difference d = cost given - cost taken nearest to half of the gap.
    """
    best, given, taken, at = gap, -1, -1, 0
    for item in offers:
        # Offers get cheaper, and so does the best item to take for them: `at` only moves forward.
        while at < len(wants) and 2 * (costs[item] - costs[wants[at]]) < gap:
            at += 1
        for near in range(at - 1, at + 2):
            back = wants[near] if 0 <= near < len(wants) and near <= at else -1
            less = costs[item] - (costs[back] if back >= 0 else 0)
            wider = sizes[item] - (sizes[back] if back >= 0 else 0)
            if 0 < less < gap and abs(2 * less - gap) < best and -high_room <= wider <= low_room:
                best, given, taken = abs(2 * less - gap), item, back
    return given, taken


# Karmarkar-Karp.


def balance_karmarkar_karp(
    costs: Int64s, sizes: Int64s, num_bins: int, capacity: int, notes: Notes | None = None
) -> Int64s | None:
    """Return the bin of each item by largest differencing, or None where the items do not fit.

    Differencing ignores the capacity. The cheapest items of overfull bins are removed and placed greedily; if that
    fails, all items are placed greedily. `notes` tells of both.

    Example:
        >>> balance_karmarkar_karp(np.array([8, 7, 6, 5, 4]), np.zeros(5, np.int64), 2, 0).tolist()
        [0, 1, 0, 1, 1]
    """
    if not fits_at_all(sizes, num_bins, capacity):
        return None
    if num_bins == 1 or len(costs) <= 1:
        return balance_greedy(costs, sizes, num_bins, capacity)
    order = largest_first(costs)
    bins = np.empty(len(costs), np.int64)
    bins[order] = _difference(costs[order], num_bins)
    _give_up(sizes, order, num_bins, capacity, bins)
    return place_rest(costs, sizes, num_bins, capacity, bins, notes)


@kernel
def _give_up(sizes: Int64s, order: Int64s, num_bins: int, capacity: int, bins: Int64s) -> None:
    room = np.full(num_bins, capacity, np.int64)
    for item in order:
        if room[bins[item]] >= sizes[item]:
            room[bins[item]] -= sizes[item]
        else:
            bins[item] = -1


@kernel
def _comes_first(key: Int64s, one: int, other: int) -> bool:
    return key[one] > key[other] or (key[one] == key[other] and one < other)


@kernel
def _sink(heap: Int64s, key: Int64s, end: int) -> None:
    at, moving = 0, heap[0]
    while True:
        child = 2 * at + 1
        if child >= end:
            break
        if child + 1 < end and _comes_first(key, heap[child + 1], heap[child]):
            child += 1
        if not _comes_first(key, heap[child], moving):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moving


@kernel
def _difference(costs: Int64s, num_bins: int) -> Int64s:
    """Return the bin of each item; costs must fall.

    A solution is identified by its first item. Its bins are consecutive in the pool (`begin`, `count`), by falling
    load; a bin is identified by one of its items, and `leader` links every other item of the bin to it (union-find).
    The heap orders solutions by their largest load, which is their spread: the least load of a full solution is
    subtracted. An iteration pops the largest solution, combines it with the new largest one, and puts the result at the
    root. A combined solution is written in place if the second one is a single item and there is room behind the first
    (`_absorb`), else at the top of the pool (`_combine`), which is compacted when it is full.
    """
    n = len(costs)
    leader, heap, key = np.arange(n), np.arange(n), costs.copy()
    begin, count = np.arange(n), np.ones(n, np.int64)
    pool_load, pool_name = np.empty(4 * n, np.int64), np.empty(4 * n, np.int64)
    pool_load[:n], pool_name[:n] = costs, np.arange(n)
    top, end = n, n
    while end > 1:
        one = heap[0]
        end -= 1
        heap[0] = heap[end]
        _sink(heap, key, end)
        other = heap[0]
        first, width = begin[one], count[one]
        grows = width < num_bins and first + width == top < len(pool_load)
        if count[other] == 1 and (width == num_bins or grows):
            value, name = pool_load[begin[other]], pool_name[begin[other]]
            width = _absorb(pool_load[first:], pool_name[first:], width, num_bins, value, name, leader)
            top += grows
        else:
            if top + width + count[other] > len(pool_load):
                pool_load, pool_name, top = _compact(pool_load, pool_name, begin, count, heap[:end], one)
            first = top
            width = _combine(pool_load, pool_name, begin[one], width, begin[other], count[other], top, num_bins, leader)
            top += width
        name = min(one, other)
        begin[name], count[name], key[name], heap[0] = first, width, pool_load[first], name
        _sink(heap, key, end)
    return _number_bins(leader)


@kernel
def _absorb(load: Int64s, name: Int64s, width: int, num_bins: int, value: int, item: int, leader: Int64s) -> int:
    """Add one item to a solution, in place; return its number of bins."""
    if width == num_bins:
        leader[item] = name[width - 1]
        value, item = value + load[width - 1], name[width - 1]
        width -= 1
    at = width
    while at > 0 and load[at - 1] < value:
        load[at], name[at] = load[at - 1], name[at - 1]
        at -= 1
    load[at], name[at] = value, item
    width += 1
    if width == num_bins:
        least = load[width - 1]
        for at in range(width):
            load[at] -= least  # only differences matter
    return width


@kernel
def _combine(
    load: Int64s,
    name: Int64s,
    one: int,
    one_width: int,
    other: int,
    other_width: int,
    top: int,
    num_bins: int,
    leader: Int64s,
) -> int:
    """Write two combined solutions to the top of the pool, largest bin on smallest; return the number of bins."""
    width = min(num_bins, one_width + other_width)
    sums, names = np.empty(width, np.int64), np.empty(width, np.int64)
    for at in range(width):
        opposite = width - 1 - at
        sums[at] = load[one + at] if at < one_width else load[other + opposite]
        names[at] = name[one + at] if at < one_width else name[other + opposite]
        if at < one_width and opposite < other_width:
            sums[at] += load[other + opposite]
            leader[name[other + opposite]] = names[at]
    least = sums.min() if width == num_bins else 0
    order = np.argsort(-sums, kind="mergesort")
    for at in range(width):
        load[top + at] = sums[order[at]] - least
        name[top + at] = names[order[at]]
    return width


@kernel
def _compact(
    load: Int64s, name: Int64s, begin: Int64s, count: Int64s, heap: Int64s, one: int
) -> tuple[Int64s, Int64s, int]:
    """Copy the solutions in use into a new pool; they have at most one bin per item, so it has room."""
    new_load, new_name, top = np.empty_like(load), np.empty_like(name), 0
    for at in range(-1, len(heap)):
        solution = one if at < 0 else heap[at]
        first, width = begin[solution], count[solution]
        new_load[top : top + width] = load[first : first + width]
        new_name[top : top + width] = name[first : first + width]
        begin[solution] = top
        top += width
    return new_load, new_name, top


@kernel
def _number_bins(leader: Int64s) -> Int64s:
    number, bins, used = np.full(len(leader), -1, np.int64), np.empty(len(leader), np.int64), 0
    for item in range(len(leader)):
        name = item
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        if number[name] < 0:
            number[name] = used
            used += 1
        bins[item] = number[name]
    return bins


# Zigzag and round-robin.


def balance_zigzag(
    costs: Int64s, sizes: Int64s, num_bins: int, capacity: int, notes: Notes | None = None
) -> Int64s | None:
    """Return the bin of each item, dealt largest first to bins 0 .. k-1, k-1 .. 0, ..; None without room.

    A full bin is skipped; an item that fits none of the next bins is placed greedily, which `notes` tells.

    Example:
        >>> balance_zigzag(np.array([5, 4, 3, 2]), np.zeros(4, np.int64), 2, 0).tolist()
        [0, 1, 1, 0]
    """
    if not fits_at_all(sizes, num_bins, capacity):
        return None
    order = largest_first(costs)
    bins = np.full(len(costs), -1, np.int64)
    _deal_zigzag(sizes, order, num_bins, capacity, bins)
    return place_rest(costs, sizes, num_bins, capacity, bins, notes)


def deal(sizes: Int64s, num_buckets: int, capacity: int) -> tuple[Int64s, Int64s]:
    """Deal items to buckets round-robin; each bucket fills one microbatch after the other. Returns both of each item.

    Example:
        >>> bucket, microbatch = deal(np.array([6, 1, 5, 1]), 2, 10)
        >>> bucket.tolist(), microbatch.tolist()
        ([0, 1, 0, 1], [0, 0, 1, 0])
    """
    return np.arange(len(sizes)) % num_buckets, _next_fit(sizes, num_buckets, capacity)


@kernel
def _deal_zigzag(sizes: Int64s, order: Int64s, num_bins: int, capacity: int, bins: Int64s) -> None:
    room = np.full(num_bins, capacity, np.int64)
    turn = 0
    for item in order:
        for skip in range(min(_SKIPS, 2 * num_bins)):
            place = (turn + skip) % (2 * num_bins)
            chosen = place if place < num_bins else 2 * num_bins - 1 - place
            if room[chosen] >= sizes[item]:
                bins[item] = chosen
                room[chosen] -= sizes[item]
                turn = place + 1
                break


@kernel
def _next_fit(sizes: Int64s, num_buckets: int, capacity: int) -> Int64s:
    microbatch = np.zeros(num_buckets, np.int64)
    used = np.zeros(num_buckets, np.int64)
    out = np.empty(len(sizes), np.int64)
    for i in range(len(sizes)):
        bucket = i % num_buckets
        if used[bucket] > 0 and used[bucket] + sizes[i] > capacity:
            microbatch[bucket] += 1
            used[bucket] = 0
        used[bucket] += sizes[i]
        out[i] = microbatch[bucket]
    return out
