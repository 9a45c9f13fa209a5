"""Positions of multimodal rotary embeddings (M-RoPE): time, row and column of every token of a packed microbatch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel
from overlord.errors import SpecError

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


def mrope_positions(
    cu_seqlens: npt.ArrayLike,
    item_segment: npt.ArrayLike,
    item_start: npt.ArrayLike,
    item_length: npt.ArrayLike,
    grid_thw: npt.ArrayLike,
    merge: int = 2,
    seconds_step: npt.ArrayLike = 1.0,
    *,
    count_time: bool = True,
) -> Int64s:
    """Return the positions [3, total] (time, row, column) of packed segments, as Qwen2-VL and Qwen2.5-VL number them.

    Every segment begins at 0. Text has one number on all three axes; an image or clip of a grid of t x h x w patches
    has t * (h / merge) * (w / merge) tokens numbered by their place in it, from where the text before it stopped; the
    text after it continues after the largest number. Padding is numbered like text.

    Args:
        cu_seqlens: Where each segment begins in the microbatch, and the end.
        item_segment: The segment of each image or clip, in order.
        item_start: Its first token inside the segment, in order.
        item_length: Its tokens.
        grid_thw: [items, 3]: its patches in time, height and width.
        merge: Patches a side that become one token.
        seconds_step: How far apart two moments of a clip are, of each item or of all: 1 for Qwen2-VL and for every
            image; for clips of Qwen2.5-VL, seconds of one temporal patch x the model's tokens_per_second.
        count_time: Whether text also continues after the last moment of a clip, as transformers 4 numbers it. False:
            only after its rows and columns, as transformers 5 does. They differ where a clip is longer (moments times
            their step) than it is high and wide.

    Raises:
        SpecError: Items overlap, leave their segment, or are not as long as their grid.

    Example:
        >>> mrope_positions([0, 7], [0], [2], [4], [[1, 4, 4]]).tolist()
        [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    """
    bounds = _whole("cu_seqlens", cu_seqlens, 1)
    segment, start = _whole("item_segment", item_segment, 1), _whole("item_start", item_start, 1)
    length, grid = _whole("item_length", item_length, 1), _whole("grid_thw", grid_thw, 2)
    step = np.ascontiguousarray(np.broadcast_to(np.asarray(seconds_step, np.float32), segment.shape))
    _check(bounds, segment, start, length, grid, int(merge), step)
    out = np.empty((3, int(bounds[-1])), np.int64)
    _number(bounds, segment, start, length, grid, int(merge), step, bool(count_time), out)
    return out


@kernel
def _number(
    bounds: Int64s,
    segment: Int64s,
    start: Int64s,
    length: Int64s,
    grid: Int64s,
    merge: int,
    step: Float32s,
    count_time: bool,
    out: Int64s,
) -> None:
    item = 0
    for one in range(len(bounds) - 1):
        begin, end = bounds[one], bounds[one + 1]
        at, position = begin, 0
        while item < len(segment) and segment[item] == one:
            first = begin + start[item]
            _count_up(out, at, first, position)
            position += first - at
            position += _number_item(
                out,
                first,
                position,
                grid[item, 0],
                grid[item, 1] // merge,
                grid[item, 2] // merge,
                step[item],
                count_time,
            )
            at = first + length[item]
            item += 1
        _count_up(out, at, end, position)


@kernel
def _count_up(out: Int64s, begin: int, end: int, position: int) -> None:
    for axis in range(3):
        # Indices into a slice cannot be negative, which lets the compiler write several at once.
        run = out[axis, begin:end]
        for i in range(len(run)):
            run[i] = position + i


@kernel
def _number_item(
    out: Int64s, at: int, position: int, times: int, rows: int, columns: int, step: np.float32, count_time: bool
) -> int:
    """Write the numbers of one image or clip; return the offset of the text that follows it."""
    last = 0
    for time in range(times):
        # The model multiplies in float32 and truncates; the result must be the same to the last bit.
        last = int(np.float32(time) * step)
        for row in range(rows):
            moments, lines, places = out[0, at : at + columns], out[1, at : at + columns], out[2, at : at + columns]
            for column in range(len(moments)):
                moments[column] = position + last
                lines[column] = position + row
                places[column] = position + column
            at += columns
    largest = max(rows, columns)
    return max(largest, last + 1) if count_time else largest


def _whole(name: str, values: npt.ArrayLike, dimensions: int) -> Int64s:
    given = np.asarray(values)
    if given.size == 0 and name != "cu_seqlens":
        return np.zeros((0, 3)[:dimensions], np.int64)
    if given.ndim != dimensions or given.dtype.kind not in "iu" or (dimensions == 2 and given.shape[1] != 3):
        raise SpecError(
            f"mrope_positions: {name} has type {given.dtype} and shape {given.shape}; tokens would get no position. "
            f"Give whole numbers{', three' if dimensions == 2 else ''} for each."
        )
    return np.ascontiguousarray(given, np.int64)


def _check(
    bounds: Int64s, segment: Int64s, start: Int64s, length: Int64s, grid: Int64s, merge: int, step: Float32s
) -> None:
    if not len(bounds) or int(bounds[0]) != 0 or bool((np.diff(bounds) < 0).any()):
        raise SpecError("mrope_positions: cu_seqlens must begin at 0 and not fall; segments would overlap.")
    if not len(segment) == len(start) == len(length) == len(grid):
        raise SpecError(
            f"mrope_positions: {len(segment)} segments, {len(start)} starts, {len(length)} lengths and {len(grid)} "
            "grids; some item would have no place. Give one of each for every item."
        )
    if merge < 1:
        raise SpecError(f"mrope_positions: merge is {merge}; no token could be made of patches. Use 1 or more.")
    if not len(segment):
        return
    if int(segment.min()) < 0 or int(segment.max()) >= len(bounds) - 1:
        raise SpecError(
            f"mrope_positions: items are in segments {int(segment.min())} to {int(segment.max())}, and there are "
            f"{len(bounds) - 1}; they would be written elsewhere. Use 0 to {len(bounds) - 2}."
        )
    if not bool(np.isfinite(step).all()) or float(step.min()) < 0:
        raise SpecError("mrope_positions: seconds_step must be 0 or more; time would run backwards.")
    tokens = grid[:, 0] * (grid[:, 1] // merge) * (grid[:, 2] // merge)
    begin = bounds[segment] + start
    free = np.concatenate([bounds[:1], (begin + length)[:-1]])
    wrong = (tokens != length) | (grid < 1).any(axis=1) | (start < 0) | (begin + length > bounds[segment + 1])
    wrong |= (begin < free) | (np.diff(segment, prepend=0) < 0)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"mrope_positions: item {at} (grid {grid[at].tolist()}, {length[at]} tokens from token {start[at]} of "
            f"segment {segment[at]}) is not as long as its grid with merge={merge}, leaves its segment, or begins "
            "before the one before it ends; positions would be wrong. Give items in order, none in another."
        )
