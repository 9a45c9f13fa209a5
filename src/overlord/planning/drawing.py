"""The draw: which samples make global batch t (the law, "Draw").

Sources are served like packets in worst-case fair queueing (WF2Q): among the sources that are owed
something, the next sample comes from the one that would finish it first in the ideal fluid mixture. That
keeps every source within one sample (or one sample's tokens) of its schedule at every draw; simply
taking the largest deficit strays by several samples when there are hundreds of sources.

Rules of this file:
1. Everything is exact (integers, and fractions compared without rounding). A draw may pause anywhere and be continued
   later; the drawn samples do not depend on where it paused.
2. The cost of a draw does not depend on the number of sources. Time is counted in samples or tokens drawn. Sources are
   in rings of time slots, ordered by when they are owed something, then by when their next sample would finish; only
   those that finish next are in a heap.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel
from overlord.core.samples import ENDS_EPOCH, SKIP

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
SCALE = 1 << 36
"""Fixed-point one: the integer weights of a step sum to exactly this."""
SUBSTEPS = 16
"""A step is divided into this many parts where the mixture changes inside steps."""


class Pause(enum.IntEnum):
    """Why the kernel returned."""

    FULL = 0
    """The budget is met."""
    STARVED = 1
    """The next row of a source is needed, and its metadata has not arrived."""
    ENDED = 2
    """A source passed the last row of an epoch."""
    DRY = 3
    """No source with weight has anything left."""


class Supply(NamedTuple):
    """The metadata that has arrived, and how far each source has been drawn."""

    tokens: Int32s
    flags: Int32s
    base: Int64s
    """Where a source's rows begin in `tokens` and `flags`."""
    held: Int64s
    """Rows of each source that have arrived."""
    taken: Int64s
    """How many of them were drawn or skipped."""


class Tally(NamedTuple):
    """The counters of the draw, by source."""

    deficit: Int64s
    """What the source is owed, in fixed point."""
    samples: Int64s
    tokens: Int64s
    skipped: Int64s


@dataclass(slots=True)
class Budget:
    """When a step is full."""

    max_samples: int
    max_tokens: int
    samples: int = 0
    tokens: int = 0


def draw_more(
    supply: Supply,
    weights: Int64s,
    tally: Tally,
    budget: Budget,
    *,
    by_tokens: bool,
    sequential: bool,
    strict: bool = False,
) -> tuple[Pause, int, Int32s, Int64s]:
    """Draw until the budget is met or the caller must act (see `Pause`).

    Changes `supply.taken`, the tally and the budget's counters. Unless `strict`, the first sample of a step is drawn
    also where it alone is longer than the budget.

    Returns:
        Why it paused, the source that caused it (with FULL the one whose next sample has too many tokens, or -1), and
        the drawn samples as (source, row in the supply).
    """
    room, num = budget.max_samples - budget.samples, len(weights)
    rows = supply.held - supply.taken
    most = max(min(room, int(rows.sum())), 1)
    out_source, out_row = np.empty(most, np.int32), np.empty(most, np.int64)
    sizes = supply.tokens[(supply.base + supply.taken)[rows > 0]] if by_tokens else np.empty(0)
    slot_bits = int(sizes.mean()).bit_length() if len(sizes) else 0
    work: list[Any] = [*np.empty((5, num), np.int64), *np.empty((3, num), np.uint32)]
    work += [*np.empty((2, _SLOTS), np.uint32)]
    queue = _Queue(weights, tally, by_tokens, sequential, slot_bits, np.empty(5, np.int64), *work)
    left = budget.max_tokens - budget.tokens
    begun = strict or budget.samples > 0
    pause, which, drawn, tokens = _draw(supply, queue, room, left, begun, out_source, out_row)
    budget.samples += int(drawn)
    budget.tokens += int(tokens)
    return Pause(pause), int(which), out_source[:drawn], out_row[:drawn]


def integer_weights(weights: Sequence[float], active: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Scale the weights of the active sources to integers that sum to SCALE (largest remainder).

    All zeros when no active source has weight.

    Example:
        >>> w = integer_weights([1.0, 2.0, 5.0], np.array([True, True, False]))
        >>> int(w.sum()) == SCALE, int(w[2])
        (True, 0)
    """
    chosen = np.where(active, np.asarray(weights, np.float64), 0.0)
    largest = chosen.max(initial=0.0)
    if largest <= 0:
        return np.zeros(len(chosen), np.int64)
    some = chosen[chosen > 0]
    if largest > np.finfo(np.float64).max / len(some):
        chosen, some = chosen / largest, some / largest  # only ratios count, and the sum would overflow
    total = some.sum()  # without the zeros: a source that is left out must not change how the sum is rounded
    exact = chosen / total * SCALE
    floor = np.floor(exact).astype(np.int64)
    missing = SCALE - int(floor.sum())
    # Ties go to the earlier source, so that every machine rounds alike.
    order = np.lexsort((np.arange(len(chosen)), -(exact - floor)))
    order = order[chosen[order] > 0]
    floor[order[np.arange(abs(missing)) % len(order)]] += np.sign(missing)
    return floor


# The kernels. One call of `_draw` runs as follows; times are charges (samples or tokens) since the last settling.
#
# 1. `_begin` puts every source with weight into the ring `waiting`, in the slot from which on it is owed something.
# 2. `_choose` first moves the sources that have become due (`_release`): into the heap `near` if their next sample
#    finishes within the horizon, else into the ring `later`; sources without a drawable row are `blocked` and
#    looked at by number, which may end the call. When the heap is empty, `_advance` moves the horizon to the next slot
#    of `later` that holds a source. The top of the heap is drawn.
# 3. `_take` passes the row and puts the source back into `waiting`, due when the drawn sample would have finished.
# 4. At the end, and whenever the charges approach the range of int64, times are settled into `tally.deficit`. A call
#    that continues from there draws the same samples as one that never stopped.
#
# A ring has a fixed number of slots, each a linked list; a source more than a round ahead stays in its list until its
# round comes. So drawing a sample costs O(1) on average, plus the heap of the sources that finish in one slot.


_READY, _STARVED, _ENDED, _DRY = (int(pause) for pause in Pause)  # ready: the next row has arrived and may be drawn
_SETTLE, _NONE = 4, -1
_LAST = np.uint32(0xFFFFFFFF)  # ends the list of a slot; unsigned, so that numba does not check indices for their sign
_LONGEST = 1 << 25
"""Charges between two settlings, at most: multiplied by a weight (up to 2^36) they stay far below 2^63."""
_SLOTS = 4096
"""Time slots of a ring; sources more than a round ahead are skipped until their round."""
_FRACTION, _FAR = 27, 1 << 35
"""Fractional bits of a key (a remainder below 2^36 still fits), and the time from which on all keys are equal."""
_UNKNOWN = -(1 << 63)  # the key of a source before its next row was looked at
_NEAR, _LATER, _BLOCKED, _HORIZON, _SEEN = range(5)
"""Fields of `counts`: sources in near, later and blocked, the last slot in the heap, the last slot released."""


class _Queue(NamedTuple):
    """The queues of the sources; times are charges since the last settling."""

    weights: Int64s
    tally: Tally
    by_tokens: bool
    sequential: bool
    slot_bits: int
    """log2 of the length of a time slot, about one sample. The draw does not depend on it."""
    counts: Int64s
    start: Int64s
    """The source is owed something from time start / weight on: its deficit is weight * time - start."""
    finish: Int64s
    """Its next sample would finish at time finish / weight; there the sample after it starts."""
    key: Int64s
    """finish / weight, rounded down to fixed point: where keys differ, the exact fractions differ in the same way."""
    due: Int64s
    """start / weight, rounded up."""
    next_due: Int64s
    """finish / weight, rounded up."""
    near: UInt32s
    """Heap of sources that are owed something and finish up to the horizon."""
    blocked: UInt32s
    """Sources that are due, but the next row has not arrived or must be skipped."""
    link: UInt32s
    """The next source in the same slot of a ring."""
    waiting: UInt32s
    """Ring of sources that are not owed anything yet, by `due`: the first source of each slot."""
    later: UInt32s
    """Ring of sources that are owed something and finish beyond the horizon, by `key`."""


# The kernels allocate nothing, so reference counting is off: it would take half of their time.
_kernel = functools.partial(kernel, error_model="numpy", _nrt=False)
_inline = functools.partial(kernel, error_model="numpy", _nrt=False, forceinline=True)


@_kernel
def _draw(
    supply: Supply, queue: _Queue, room: int, max_tokens: int, begun: bool, out_source: Int32s, out_row: Int64s
) -> tuple[int, int, int, int]:
    drawn, total = 0, 0
    while True:
        _begin(queue)
        time, pause, which = 0, _READY, _NONE
        while drawn < room:
            pause, best = _choose(supply, queue, time)
            if pause != _READY:
                which = best
                break
            row = supply.base[best] + supply.taken[best]
            tokens = int(supply.tokens[row])
            if begun and total + tokens > max_tokens:
                which = best
                break
            charge = tokens if queue.by_tokens else 1
            if time > 0 and time + charge > _LONGEST:
                pause = _SETTLE
                break
            begun = True
            out_source[drawn] = best
            out_row[drawn] = row
            drawn += 1
            total += tokens
            time += charge
            queue.tally.samples[best] += 1
            queue.tally.tokens[best] += tokens
            _take(supply, queue, best, time)
            if supply.flags[row] & ENDS_EPOCH:
                pause, which = _ENDED, best
                break
        for i in range(len(queue.weights)):
            queue.tally.deficit[i] = queue.weights[i] * time - queue.start[i]
        if pause != _SETTLE:
            return pause, which, drawn, total


@_inline
def _begin(queue: _Queue) -> None:
    """Put every source with weight into `waiting`; sequential draws only the first one. Times start at 0."""
    queue.counts[:] = 0
    queue.waiting[:] = _LAST
    queue.later[:] = _LAST
    queue.key[:] = _UNKNOWN
    alone = _NONE
    for i in range(len(queue.weights)):
        queue.start[i] = -queue.tally.deficit[i]
        if queue.weights[i] > 0 and alone < 0:
            alone = i if queue.sequential else _NONE
            queue.due[i] = 0 if queue.sequential else max(-(queue.tally.deficit[i] // queue.weights[i]), 0)
            _wait(queue, i)


@_inline
def _take(supply: Supply, queue: _Queue, best: int, time: int) -> None:
    """Pass the next row of the chosen source, and put the source back into `waiting`."""
    supply.taken[best] += 1
    queue.start[best] = queue.finish[best]
    queue.due[best] = time if queue.sequential else max(queue.next_due[best], time)
    queue.key[best] = _UNKNOWN
    if queue.counts[_NEAR] > 0:  # a source that `_choose_ahead` chose is still in `waiting`
        _pop(queue)
        _wait(queue, best)


@_inline
def _wait(queue: _Queue, i: int) -> None:
    slot = queue.due[i] >> queue.slot_bits & (_SLOTS - 1)
    queue.link[i] = queue.waiting[slot]
    queue.waiting[slot] = i


@_inline
def _choose(supply: Supply, queue: _Queue, time: int) -> tuple[int, int]:
    """Return (_READY, the next source), or (why there is none, the source that caused it)."""
    _release(supply, queue, time)
    if queue.counts[_BLOCKED] > 0:
        pause, which = _check_blocked(supply, queue)
        if pause != _READY:
            return pause, which
    if queue.counts[_NEAR] == 0 and queue.counts[_LATER] > 0:
        _advance(queue)
    if queue.counts[_NEAR] > 0:
        return _READY, queue.near[0]
    return _choose_ahead(supply, queue)


@_inline
def _release(supply: Supply, queue: _Queue, time: int) -> None:
    """Schedule the sources that are due by their finish; set those aside that have no drawable row."""
    now = time >> queue.slot_bits
    slot = max(queue.counts[_SEEN], now - _SLOTS + 1)
    blocked = 0
    while slot <= now:
        i = queue.waiting[slot & (_SLOTS - 1)]
        queue.waiting[slot & (_SLOTS - 1)] = _LAST
        while i != _LAST:
            following = queue.link[i]
            if queue.due[i] > time:
                _wait(queue, i)
            elif supply.taken[i] < supply.held[i] and not supply.flags[supply.base[i] + supply.taken[i]] & SKIP:
                _schedule(supply, queue, i)
            else:
                queue.blocked[blocked] = i
                blocked += 1
            i = following
        slot += 1
    queue.counts[_SEEN] = now
    queue.counts[_BLOCKED] = blocked


@_inline
def _schedule(supply: Supply, queue: _Queue, i: int) -> None:
    """Put a source that is due into the heap, or into `later` if it finishes beyond the horizon."""
    _measure(supply, queue, i)
    when = queue.key[i] >> (queue.slot_bits + _FRACTION)
    if when <= queue.counts[_HORIZON]:
        _push(queue, i)
    else:
        slot = when & (_SLOTS - 1)
        queue.link[i] = queue.later[slot]
        queue.later[slot] = i
        queue.counts[_LATER] += 1


@_inline
def _measure(supply: Supply, queue: _Queue, i: int) -> None:
    """Compute when the next sample of a source would finish."""
    if queue.key[i] != _UNKNOWN:
        return
    size = int(supply.tokens[supply.base[i] + supply.taken[i]]) if queue.by_tokens else 1
    weight = queue.weights[i]
    finish = queue.start[i] + size * SCALE
    whole = finish // weight
    rest = finish - whole * weight
    queue.finish[i] = finish
    queue.next_due[i] = whole + (rest > 0)
    if -_FAR <= whole < _FAR:
        queue.key[i] = (whole << _FRACTION) + (rest << _FRACTION) // weight
    else:
        queue.key[i] = (_FAR if whole > 0 else -_FAR) << _FRACTION


@_kernel
def _check_blocked(supply: Supply, queue: _Queue) -> tuple[int, int]:
    """Check the sources set aside, in the order of their numbers, so that pauses do not depend on arrival."""
    blocked = queue.blocked[: queue.counts[_BLOCKED]]
    for k in range(len(blocked)):
        least = k + np.argmin(blocked[k:])
        blocked[k], blocked[least] = blocked[least], blocked[k]
        pause = _check_row(supply, queue, blocked[k])
        if pause != _READY:
            return pause, blocked[k]
        _schedule(supply, queue, blocked[k])
    return _READY, _NONE


@_inline
def _check_row(supply: Supply, queue: _Queue, i: int) -> int:
    """Skip rows that are never drawn; return _READY if the next row may be drawn."""
    while supply.taken[i] < supply.held[i]:
        flags = supply.flags[supply.base[i] + supply.taken[i]]
        if not flags & SKIP:
            return _READY
        supply.taken[i] += 1
        queue.tally.skipped[i] += 1
        if flags & ENDS_EPOCH:
            return _ENDED
    return _STARVED


@_inline
def _advance(queue: _Queue) -> None:
    """Move the horizon to the next finish, and the sources that finish there into the heap."""
    counts, bits, walked = queue.counts, queue.slot_bits + _FRACTION, 0
    while counts[_NEAR] == 0:
        walked += 1
        counts[_HORIZON] = counts[_HORIZON] + 1 if walked <= _SLOTS else _next_horizon(queue, bits)
        slot = counts[_HORIZON] & (_SLOTS - 1)
        i = queue.later[slot]
        queue.later[slot] = _LAST
        while i != _LAST:
            following = queue.link[i]
            if queue.key[i] >> bits <= counts[_HORIZON]:
                _push(queue, i)
                counts[_LATER] -= 1
            else:
                queue.link[i] = queue.later[slot]
                queue.later[slot] = i
            i = following


@_kernel
def _next_horizon(queue: _Queue, bits: int) -> int:
    # A whole round of slots held no source of this round: the next one is far away, so look at all of them.
    horizon = _FAR
    for slot in range(_SLOTS):
        i = queue.later[slot]
        while i != _LAST:
            horizon = min(horizon, queue.key[i] >> bits)
            i = queue.link[i]
    return horizon


@_kernel
def _choose_ahead(supply: Supply, queue: _Queue) -> tuple[int, int]:
    """Choose among all sources where none is owed anything, which can happen after one left the mixture."""
    best = _NONE
    for i in range(len(queue.weights)):
        if queue.weights[i] <= 0:
            continue
        if queue.key[i] == _UNKNOWN:
            pause = _check_row(supply, queue, i)
            if pause != _READY:
                return pause, i
            _measure(supply, queue, i)
        if best < 0 or _goes_before(queue, i, best):
            best = i
    return (_READY if best >= 0 else _DRY), best


@_inline
def _goes_before(queue: _Queue, i: int, j: int) -> bool:
    """Return whether the next sample of i finishes before that of j; ties go to the lower number."""
    if queue.key[i] != queue.key[j]:
        return bool(queue.key[i] < queue.key[j])
    if queue.weights[i] == queue.weights[j]:
        order = queue.finish[i] - queue.finish[j]
    else:
        order = _compare(queue.finish[i], queue.weights[i], queue.finish[j], queue.weights[j])
    return bool(order < 0 or (order == 0 and i < j))


@_kernel
def _compare(above: int, below: int, other_above: int, other_below: int) -> int:
    """Compare two fractions exactly: negative, 0 or positive."""
    whole, other_whole = above // below, other_above // other_below
    if whole != other_whole:
        return -1 if whole < other_whole else 1
    # Products of remainders and denominators take 72 bits: the lowest 18 are kept separately.
    rest, other_rest, mask = above - whole * below, other_above - other_whole * other_below, (1 << 18) - 1
    low, other_low = (rest & mask) * other_below, (other_rest & mask) * below
    high = (rest >> 18) * other_below + (low >> 18)
    other_high = (other_rest >> 18) * below + (other_low >> 18)
    if high != other_high:
        return -1 if high < other_high else 1
    return (low & mask) - (other_low & mask)


@_inline
def _push(queue: _Queue, i: int) -> None:
    near, place = queue.near, queue.counts[_NEAR]
    queue.counts[_NEAR] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if not _goes_before(queue, i, near[parent]):
            break
        near[place] = near[parent]
        place = parent
    near[place] = i


@_inline
def _pop(queue: _Queue) -> None:
    near, last = queue.near, queue.counts[_NEAR] - 1
    queue.counts[_NEAR] = last
    i, place, child = near[last], 0, 1
    while child < last:
        if child + 1 < last and _goes_before(queue, near[child + 1], near[child]):
            child += 1
        if not _goes_before(queue, near[child], i):
            break
        near[place] = near[child]
        place, child = child, 2 * child + 1
    near[place] = i
