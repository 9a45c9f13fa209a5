"""Packing kernels: a microbatch is written in one call, already cut for the ranks that share it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel

IGNORE_INDEX = -100

FIELDS = (
    "ids",
    "positions",
    "labels",
    "shifted",
    "mask",
    "attention",
    "origin",
    "bounds",
    "unpadded",
    "longest",
    "ranks",
)
"""The arrays that the kernel writes, in the order of its offsets."""

Array = npt.NDArray[Any]


@kernel
def pack(  # noqa: PLR0913 - a kernel takes plain arrays
    buffer: Array,
    offsets: tuple[int, ...],
    stride: int,
    values: Array,
    loss: Array,
    first: Array,
    first_loss: Array,
    runs: tuple[Array, Array],
    loss_runs: tuple[Array, Array],
    length: Array,
    plain: Array,
    counted: Array,
    origin: Array,
    pieces: tuple[int, int],
    silent: Array,
    cu: Array,
    slots: Array,
    cutting: tuple[int, int, int],
    run_segment: Array,
    run_begin: Array,
    run_length: Array,
    run_part: Array,
    run_place: Array,
) -> tuple[int, int, int]:
    """Write one microbatch, cut for its ranks; return its longest segment, its tokens and its labels.

    `offsets` say where arrays begin in the buffer (`FIELDS`), -1 for what is not there; `stride` how many elements the
    slices of two ranks are apart. `slots` [field, rank] says which slice of an array a rank's is, -1 where the array is
    not made for it. `first` (in the tokens), `first_loss`, `length`, `plain` (whether all tokens count), `counted`
    (labels) and `origin` are of all pieces of the step, `pieces` (first, count) those of this microbatch. Where only
    `runs` of samples are here, `first` and `first_loss` are keys of them. `cutting` is (slices, chunks of a segment,
    ranks that share it), with no chunks where the cut is given instead (`run_segment` and others).
    """
    # The whole microbatch is written in one call: a copy of 8,192 tokens takes 15 us, so the cost of every array made
    # in Python would be visible. Each key has its own loop over all runs: a call per run, with its reference counting,
    # would cost more than the run.
    begin, count = pieces
    of, chunks, ranks = cutting
    longest = real = 0
    for segment in range(len(cu) - 1):
        longest = max(longest, cu[segment + 1] - cu[segment])
        real += length[begin + segment] if segment < count else 0
    if chunks > 0:
        run_segment, run_begin, run_length, run_part, run_place = _cut(cu, of, chunks, slots)
    source, marks, filled, ahead, counts = _sources(
        first, first_loss, length, plain, begin, count, run_segment, run_begin, run_length
    )
    _look_up(source, runs[0], runs[1])
    _look_up(marks, loss_runs[0], loss_runs[1])
    places = np.empty((len(slots), len(run_place)), np.int64)
    for field in range(len(slots)):
        for run in range(len(run_place)):
            slot = slots[field, run_part[run]]
            places[field, run] = -1 if slot < 0 else slot * stride + run_place[run]
    elements = np.empty(len(slots), np.int64)
    for field in range(len(slots)):
        elements[field] = (slots[field].max() + 1) * stride
    if offsets[0] >= 0:
        _copy(_block(buffer, offsets[0], elements[0]), places[0], run_length, values, source, filled)
    if offsets[1] >= 0:
        _number(_block(buffer, offsets[1], elements[1]), places[1], run_length, run_begin)
    if offsets[5] >= 0:
        _mark(_block(buffer, offsets[5], elements[5]), places[5], run_length, filled)
    if len(silent):
        for run in range(len(run_segment)):
            if silent[run_segment[run]]:
                filled[run] = ahead[run] = 0
    if offsets[2] >= 0:
        labels = _block(buffer, offsets[2], elements[2])
        _label(labels, places[2], run_length, values, loss, source, marks, filled, counts)
        for run in range(len(run_place)):
            if run_begin[run] == 0 and run_length[run] > 0 and places[2, run] >= 0:
                labels[places[2, run]] = IGNORE_INDEX
    source += 1
    marks += 1
    if offsets[3] >= 0:
        shifted = _block(buffer, offsets[3], elements[3])
        _label(shifted, places[3], run_length, values, loss, source, marks, ahead, counts)
    if offsets[4] >= 0:
        mask = _block(buffer, offsets[4], elements[4] // 2).view(np.float32)
        _count(mask, places[4], run_length, loss, marks, ahead, counts)
    _write_origin(buffer, offsets, origin, length, cu, begin, count)
    for field, number in ((9, longest), (10, ranks)):
        if offsets[field] >= 0:
            buffer[offsets[field] : offsets[field] + 4].view(np.int32)[0] = number
    labelled = 0
    for segment in range(count):
        if not (len(silent) and silent[segment]):
            labelled += counted[begin + segment]
    return longest, real, labelled


@kernel
def _sources(
    first: Array,
    first_loss: Array,
    length: Array,
    plain: Array,
    begin: int,
    count: int,
    segment: Array,
    skipped: Array,
    size: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    """Return of each run its first token, that in the loss mask, its tokens, those before another, if all count."""
    source, filled = np.empty(len(segment), np.int64), np.empty(len(segment), np.int64)
    marks = np.empty(len(segment), np.int64)
    ahead, counts = np.empty(len(segment), np.int64), np.empty(len(segment), np.bool_)
    for run in range(len(segment)):
        there = segment[run] < count
        whole = length[begin + segment[run]] if there else 0
        source[run] = (first[begin + segment[run]] if there else 0) + skipped[run]
        marks[run] = (first_loss[begin + segment[run]] if there else 0) + skipped[run]
        filled[run] = min(max(whole - skipped[run], 0), size[run])
        ahead[run] = min(max(whole - 1 - skipped[run], 0), size[run])
        counts[run] = there and plain[begin + segment[run]]
    return source, marks, filled, ahead, counts


@kernel
def _look_up(places: Array, keys: Array, begins: Array) -> None:
    """Replace keys by the places of their tokens: each is in the last run that begins at or before it.

    Keys of tokens that are not here have no meaning, and are not read.
    """
    if len(keys):
        at = np.searchsorted(keys, places, side="right")
        for i in range(len(places)):
            run = max(at[i] - 1, 0)
            places[i] += begins[run] - keys[run]


# Indices below are unsigned: only where none can be negative does the compiler make vector code, which is four times
# as fast.


@kernel
def _copy(out: Array, place: Array, size: Array, values: Array, source: Array, count: Array) -> None:
    for run in range(len(place)):
        if place[run] < 0:
            continue
        at, start, some = np.uintp(place[run]), np.uintp(source[run]), np.uintp(count[run])
        for i in range(some):
            out[at + i] = values[start + i]
        for i in range(some, np.uintp(size[run])):
            out[at + i] = 0


@kernel
def _count(out: Array, place: Array, size: Array, loss: Array, source: Array, count: Array, plain: Array) -> None:
    for run in range(len(place)):
        if place[run] < 0:
            continue
        at, start, some = np.uintp(place[run]), np.uintp(source[run]), np.uintp(count[run])
        if plain[run]:
            for i in range(some):
                out[at + i] = 1.0
        else:
            for i in range(some):
                out[at + i] = np.float32(loss[start + i])
        for i in range(some, np.uintp(size[run])):
            out[at + i] = 0.0


@kernel
def _number(out: Array, place: Array, size: Array, begin: Array) -> None:
    for run in range(len(place)):
        if place[run] < 0:
            continue
        at, start = np.uintp(place[run]), begin[run]
        for i in range(np.uintp(size[run])):
            out[at + i] = start + np.int64(i)


@kernel
def _mark(out: Array, place: Array, size: Array, count: Array) -> None:
    for run in range(len(place)):
        if place[run] < 0:
            continue
        at, some = np.uintp(place[run]), np.uintp(count[run])
        for i in range(some):
            out[at + i] = 1
        for i in range(some, np.uintp(size[run])):
            out[at + i] = 0


@kernel
def _label(
    out: Array,
    place: Array,
    size: Array,
    values: Array,
    loss: Array,
    source: Array,
    marks: Array,
    count: Array,
    plain: Array,
) -> None:
    """Write tokens that count, and -100 for those that do not: by a product, which is half as slow as a choice.

    In most runs all count, and the mask is not even read.
    """
    ignored = np.int32(IGNORE_INDEX)
    for run in range(len(place)):
        if place[run] < 0:
            continue
        at, start, some = np.uintp(place[run]), np.uintp(source[run]), np.uintp(count[run])
        mark = np.uintp(marks[run])
        if plain[run]:
            for i in range(some):
                out[at + i] = values[start + i]
        else:
            for i in range(some):
                token = np.int32(values[start + i] - ignored)
                out[at + i] = np.int32(token * np.int32(loss[mark + i])) + ignored
        for i in range(some, np.uintp(size[run])):
            out[at + i] = IGNORE_INDEX


@kernel
def _block(buffer: Array, offset: int, elements: int) -> Array:
    """Return the block of one key for all ranks that share it; empty where the key is not there."""
    if offset < 0:
        return buffer[:0].view(np.int64)
    return buffer[offset : offset + 8 * elements].view(np.int64)


@kernel
def _cut(cu: Array, of: int, chunks: int, slots: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Cut every segment into chunks: rank r gets chunk r followed by the mirrored chunk 2 * ranks - 1 - r.

    Returns the segment, first token, length, rank and place in the rank's slice of each run that some array is made of.
    """
    runs = np.empty((5, (len(cu) - 1) * chunks), np.int64)
    made = 0
    absent = np.empty(of, np.bool_)
    for part in range(of):
        absent[part] = slots[:, part].max() < 0
    for segment in range(len(cu) - 1):
        size = (cu[segment + 1] - cu[segment]) // chunks
        for chunk in range(chunks):
            mirrored = chunk >= of
            part = 2 * of - 1 - chunk if mirrored else chunk
            if absent[part]:
                continue
            runs[0, made], runs[1, made], runs[2, made], runs[3, made] = segment, chunk * size, size, part
            runs[4, made] = cu[segment] // of + (size if mirrored else 0)
            made += 1
    return runs[0, :made], runs[1, :made], runs[2, :made], runs[3, :made], runs[4, :made]


@kernel
def _write_origin(
    buffer: Array, offsets: tuple[int, ...], origin: Array, length: Array, cu: Array, begin: int, count: int
) -> None:
    segments = len(cu) - 1
    facts = buffer[offsets[6] : offsets[6] + 40 * segments].view(np.int64)
    for row in range(5):
        absent = -1 if row < 3 else 0
        for segment in range(segments):
            facts[row * segments + segment] = origin[row, begin + segment] if segment < count else absent
    bounds = buffer[offsets[7] : offsets[7] + 4 * (segments + 1)].view(np.int32)
    for segment in range(segments + 1):
        bounds[segment] = cu[segment]
    if offsets[8] >= 0:
        unpadded = buffer[offsets[8] : offsets[8] + 4 * (segments + 1)].view(np.int32)
        unpadded[0] = 0
        for segment in range(segments):
            unpadded[segment + 1] = unpadded[segment] + (length[begin + segment] if segment < count else 0)


@kernel
def copy_runs(whole: Array, out: Array, begins: Array, lengths: Array, places: Array, width: int) -> None:
    """Copy runs of every row of `whole` to their places; the rows of a slice are `width` apart."""
    for run in range(len(begins)):
        begin, count = np.uintp(begins[run]), np.uintp(lengths[run])
        for axis in range(whole.shape[0]):
            row, at = whole[axis], np.uintp(places[run] + axis * width)
            for i in range(count):
                out[at + i] = row[begin + i]


@kernel
def rows_of_ones(values: Array, offsets: Array) -> Array:
    """Return which rows of a mask are all ones; one that reaches outside of the mask is not."""
    out = np.zeros(len(offsets) - 1, np.bool_)
    for row in range(len(out)):
        if not 0 <= offsets[row] <= offsets[row + 1] <= len(values):
            continue
        total = 0
        for i in range(np.uintp(offsets[row]), np.uintp(offsets[row + 1])):
            total += values[i]
        out[row] = total == offsets[row + 1] - offsets[row]
    return out


def warm_packing() -> None:
    """Compile or load the kernels, so that the first microbatch does not wait for the compiler."""
    one, nothing = np.ones(1, np.int64), np.empty(0, np.int64)
    pack(
        np.empty(512, np.uint8), (0, -1, -1, -1, -1, -1, 128, 256, -1, -1, -1), 2, np.ones(1, np.int32),
        np.ones(1, np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64), (nothing, nothing), (nothing, nothing),
        one, np.ones(1, np.bool_), one,
        np.zeros((5, 1), np.int64), (0, 1), np.zeros(0, np.bool_), np.arange(2), np.zeros((6, 1), np.int64), (1, 1, 1),
        nothing, nothing, nothing, nothing, nothing,
    )  # fmt: skip
    rows_of_ones(np.ones(1, np.uint8), np.arange(2))
