"""Sample transformations: measured before planning, finished after it. The interfaces and code of all sample kinds.

Rules of this folder:
1. `measure` decides every length. It reads headers and text, and never decodes an image, clip or sound.
2. `finish` delivers exactly the planned lengths: longer samples are cut, shorter ones are padded.
3. Media stay encoded through both; a `MediaDecoder` decodes them, in the SourceLoader or in the DataConstructor.
4. A fault belongs to one sample: it becomes a stand-in with a reason, never an exception.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from overlord.core.messages import Media
from overlord.core.ragged import (
    Ragged,
    RowBatch,
    Scattered,
    concat_rows,
    expand_ranges,
    num_rows,
    offsets_of,
    take_rows,
)
from overlord.core.samples import BAD
from overlord.errors import SpecError, pip_install

STAND_IN_TOKEN = 0

T = TypeVar("T")

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Place = npt.NDArray[np.uint8]
"""Memory that one decoded item is written into."""
Fault = tuple[int, str]
"""(row of the batch, what is wrong with it)."""

_NOWHERE = np.empty(0, np.int64)


@dataclass(slots=True)
class Measured:
    """The metadata of some rows before planning, and the columns to keep of them."""

    tokens: Int64s
    """Raw length, placeholders included, before the overlength policy."""
    image_tokens: Int64s
    """Placeholders of images and clips."""
    images: Int64s
    """Images and clips."""
    flags: npt.NDArray[np.int32]
    kept: RowBatch
    faults: list[Fault] = field(default_factory=list)
    front: Int64s | None = None
    """Tokens in front of the text that never count in the loss; by default the image tokens."""
    margin: tuple[int, int] = (0, 0)
    """Tokens before and after the placeholders of an item that are never cut off from it."""
    killed: list[Fault] = field(default_factory=list)
    """Rows that killed their process worker twice; the verdict is journaled before it takes effect."""
    wrong_lengths: list[Fault] = field(default_factory=list)
    """Rows with text that is left out because their known length is 0."""


@dataclass(slots=True)
class Finished:
    """Samples that are ready to be packed, except for their media, which are still encoded."""

    tokens: Ragged
    loss: Ragged
    media: Media | None
    faults: list[Fault]
    wrong_lengths: list[Fault]
    """Samples with another length than the measured one."""


class Workers(Protocol):
    """A pool that runs pure functions in parallel; results are in the order of the items."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Apply the function to every item."""
        ...


class MediaFault(Exception):
    """The bytes of one image, clip or sound are invalid; the reason is logged with the sample's id."""


DECODE_BYTES = 1 << 29
"""More memory than any decoder needs for an item within our limits."""


@contextmanager
def decoder_faults(what: str) -> Iterator[None]:
    """Turn any exception of a library over the bytes of one item into a MediaFault.

    Decoders raise far more than they document (RuntimeError, AssertionError, struct.error, IndexError). Memory is
    special: a decoder may request an absurd amount because the bytes say so, which is a fault of the item, or the host
    may be out of memory, which must not change the stream. To tell them apart, as much memory as any valid item needs
    is allocated; if that fails too, the MemoryError is raised again.
    """
    try:
        yield
    except MediaFault:
        raise
    except MemoryError as error:
        np.empty(DECODE_BYTES, np.uint8)
        raise MediaFault(f"{what}: it asks for more memory than an item of its size needs") from error
    except Exception as error:
        reason = getattr(error, "error_string", None) or getattr(error, "strerror", None) or error
        raise MediaFault(f"{what}: {str(reason) or type(error).__name__}") from error


class ViewedFile:
    """Bytes in memory as a file that copies none of them until they are read, as BytesIO does with a view."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def read(self, count: int) -> bytes:
        part = bytes(self._data[self._at : self._at + count])
        self._at += len(part)
        return part

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at


def media_library(name: str) -> Any:
    """Return a library that only sounds and clips need.

    Raises:
        SpecError: when it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpecError(
            f"a source of sounds or clips needs the library {name!r}, which cannot be imported ({error}); none of its "
            f"rows could be measured. Install it: {pip_install('media')}"
        ) from error


def read_headers(
    items: Ragged, bad: Bools, read: Callable[[memoryview], T], otherwise: T
) -> tuple[list[T], list[Fault]]:
    """Return what `read` finds in the header of every item, and (item, reason) of those without a readable one.

    Those are marked bad; `otherwise` stands for every bad item.
    """
    found, faults = [otherwise] * len(items), list[Fault]()
    for item in np.flatnonzero(~bad).tolist():
        try:
            found[item] = read(row_memory(items, item))
        except MediaFault as fault:
            faults.append((item, str(fault)))
            bad[item] = True
    return found, faults


class MediaDecoder(Protocol):
    """Decodes the media of one source, item by item, into memory that the caller has laid out."""

    def item_bytes(self, grids: npt.NDArray[np.int32]) -> Int64s:
        """Return the bytes of each item after decoding."""
        ...

    def decode(self, data: memoryview, grid: npt.NDArray[np.int32], seed: int, out: npt.NDArray[np.uint8]) -> None:
        """Decode one item into its place, which it must fill completely.

        Raises:
            MediaFault: if the bytes do not decode; `out` may be partly written then.
        """
        ...


class SampleTransform(Protocol):
    """How the samples of one source are measured and finished."""

    columns: tuple[str, ...]
    """Columns it reads; empty for all."""

    @property
    def decoder(self) -> MediaDecoder | None:
        """What decodes this kind's media; None for text."""
        ...

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        """Measure rows; `lengths` are text lengths known from a column or sidecar, `seeds` the seeds of the rows."""
        ...

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        """Make the final form of kept rows, with exactly the planned lengths."""
        ...


# -- media: the columns of kept rows, and the message made of them ----------------------------------------------------


def media_columns(
    encoded: Ragged,
    *,
    items: npt.ArrayLike,
    nbytes: npt.ArrayLike,
    start: npt.ArrayLike,
    length: npt.ArrayLike,
    grid: npt.ArrayLike,
    seeds: npt.ArrayLike,
    seconds: npt.ArrayLike | None = None,
) -> RowBatch:
    """Return the columns of kept rows that hold media: all ragged, one ragged row for each sample.

    `encoded` are all encoded items of each row, concatenated, `items` how many each row has. The rest has one entry for
    each item, row after row: its bytes, its first placeholder inside the sample, how many it has, its grid (three
    numbers), what its augmentations are drawn from, and the seconds of a temporal patch (0 for images).
    """
    offsets = offsets_of(items)
    count = int(offsets[-1])
    return {
        "media": encoded,
        "media_bytes": Ragged(np.asarray(nbytes, np.int64), offsets),
        "media_start": Ragged(np.asarray(start, np.int32), offsets),
        "media_length": Ragged(np.asarray(length, np.int32), offsets),
        "media_grid": Ragged(np.asarray(grid, np.int32).reshape(-1), 3 * offsets),
        "media_seconds": Ragged(np.zeros(count, np.float32) if seconds is None else np.asarray(seconds, np.float32),
                                offsets),
        "media_seed": Ragged(np.asarray(seeds, np.uint64), offsets),
    }  # fmt: skip


def media_of(kind: str, kept: RowBatch, planned: Int64s, bad: Bools) -> Media:
    """Return the media of kept rows, still encoded, without the items that the planned length cuts off.

    Items of bad rows are marked bad: they are delivered as zeros.
    """
    start, length = ragged_column(kept, "media_start"), ragged_column(kept, "media_length")
    rows = np.repeat(np.arange(len(start)), start.lengths)
    begin, count = flat(start).astype(np.int64), flat(length).astype(np.int64)
    nbytes = flat(ragged_column(kept, "media_bytes"))
    encoded: Any = kept["media"]
    if not isinstance(encoded, Scattered):
        encoded = Scattered.of(encoded, slice(None))
    ends = np.cumsum(nbytes)
    # The bytes of an item begin where those of its row begin, after the items before it in the row.
    before = ends - nbytes
    first = np.concatenate([[0], np.cumsum(start.lengths)])[:-1]
    base = np.where(start.lengths > 0, before[np.minimum(first, max(len(before) - 1, 0))] if len(before) else 0, 0)
    at = encoded.begin[rows] + before - base[rows]
    inside = begin + count <= planned[rows]
    grids = flat(ragged_column(kept, "media_grid")).reshape(-1, 3)
    return Media(
        kind=kind,
        rows=offsets_of(np.bincount(rows[inside], minlength=len(start))),
        start=begin[inside].astype(np.int32),
        length=count[inside].astype(np.int32),
        grids=grids[inside],
        seconds=flat(ragged_column(kept, "media_seconds"))[inside],
        seeds=flat(ragged_column(kept, "media_seed"))[inside],
        bad=bad[rows][inside],
        values=encoded.memory,
        begin=at[inside],
        nbytes_of=nbytes[inside],
        encoded=True,
    )


# -- rows of tokens and of loss masks -------------------------------------------------------------------------------


def no_seeds(rows: RowBatch) -> UInt64s:
    """Return seeds for rows that are only inspected: every row has the same one."""
    return np.zeros(num_rows(rows), np.uint64)


_MEDIA_COLUMNS = {
    "media_bytes": np.int64, "media_start": np.int32, "media_length": np.int32, "media_grid": np.int32,
    "media_seconds": np.float32, "media_seed": np.uint64,
}  # fmt: skip
MOST_PATCHES = 1 << 31


def check_media(kept: RowBatch, tokens: Int64s) -> None:
    """Raise ValueError for columns of media that point outside of their rows, whatever made them."""
    columns = {name: ragged_column(kept, name) for name in _MEDIA_COLUMNS}
    start, encoded = columns["media_start"], ragged_column(kept, "media")
    for name, column in columns.items():
        items = column.lengths // 3 if name == "media_grid" else column.lengths
        if column.values.dtype != _MEDIA_COLUMNS[name] or (items != start.lengths).any():
            raise ValueError(f"{name} of {column.values.dtype} for other items than media_start")
    begin, length, nbytes = (flat(columns[f"media_{name}"]).astype(np.int64) for name in ("start", "length", "bytes"))
    grids = flat(columns["media_grid"]).reshape(-1, 3).astype(np.float64)
    rows = np.repeat(np.arange(len(start)), start.lengths)
    if len(rows) == 0:
        return
    if begin.min() < 0 or length.min() < 0 or (begin + length > tokens[rows]).any():
        raise ValueError("items of media outside of the tokens of their rows")
    room = encoded.lengths * encoded.values.itemsize
    if nbytes.min() < 0 or nbytes.max() > room.max() or (np.bincount(rows, nbytes, len(start)) > room).any():
        raise ValueError("items of media outside of the bytes of their rows")
    if grids.min() < 0 or grids.prod(axis=1).max() > MOST_PATCHES:
        raise ValueError("items of media of impossible sizes")


def flat(rows: Ragged) -> npt.NDArray[Any]:
    """Return the values of all rows, concatenated."""
    return rows.values[rows.offsets[0] : rows.offsets[-1]]


def fit_rows(rows: Ragged, lengths: Int64s) -> tuple[Ragged, Int64s]:
    """Cut or pad every row to its length; return the rows and the places that are padding."""
    have = rows.lengths
    if len(have) == len(lengths) and (have == lengths).all():
        return Ragged(rows.values[rows.offsets[0] : rows.offsets[-1]], rows.offsets - rows.offsets[0]), _NOWHERE
    copied = np.minimum(have, lengths)
    offsets = offsets_of(lengths)
    out = np.full(int(offsets[-1]), STAND_IN_TOKEN, rows.values.dtype)
    out[expand_ranges(offsets[:-1], copied)] = rows.values[expand_ranges(rows.offsets[:-1], copied)]
    return Ragged(out, offsets), expand_ranges(offsets[:-1] + copied, lengths - copied)


def count_loss_tokens(
    measured: Measured, delivered: npt.NDArray[np.integer], sample: Int64s, start: Int64s
) -> tuple[Int64s, Bools]:
    """Return how many labels each sample will have, and which samples lose exactly one label by any further cut.

    The first token of a piece predicts nothing; pieces are given by their sample and first token.
    """
    if "loss" not in measured.kept:
        front = measured.image_tokens if measured.front is None else measured.front
        behind = np.bincount(sample[start >= front[sample]], minlength=len(delivered))
        silent = (measured.flags & BAD > 0) | np.asarray(measured.kept["empty"], np.bool_)
        return np.where(silent, 0, np.maximum(delivered - front - behind, 0)), ~silent & (front == 0)
    loss = ragged_column(measured.kept, "loss")
    sums = np.concatenate([[0], np.cumsum(loss.values, dtype=np.int64)])
    first = loss.offsets[:-1]
    total = sums[first + np.minimum(delivered, loss.lengths)] - sums[first]
    plain = (total == delivered) & (measured.flags & BAD == 0)
    at_start = loss.values[first[sample] + np.minimum(start, loss.lengths[sample] - 1)] * (start < delivered[sample])
    np.subtract.at(total, sample, at_start.astype(np.int64))
    return total, plain


def measured_text(tokens: Int64s, flags: npt.NDArray[Any], kept: RowBatch, faults: list[Fault]) -> Measured:
    """Return the metadata of rows without images."""
    zeros = np.zeros(len(tokens), np.int64)
    return Measured(tokens.astype(np.int64), zeros, zeros, flags.astype(np.int32), kept, faults)


def ragged_column(rows: RowBatch, column: str) -> Ragged:
    """Return a column of text, bytes or lists."""
    found = rows[column]
    if not isinstance(found, Ragged):
        raise SpecError(
            f"column {column!r} holds single numbers; a sample needs text, bytes or lists of token ids there. "
            "Name another column."
        )
    return found


def row_memory(rows: Ragged, row: int) -> memoryview:
    """Return the bytes of one row without copying them."""
    return memoryview(rows[row])  # type: ignore[arg-type]


def with_stand_ins(tokens: Ragged, replaced: Bools) -> Ragged:
    """Return rows of tokens (or of their loss), some of them replaced by one stand-in token, a zero."""
    if not replaced.any():
        return tokens
    kept = np.where(replaced, 0, tokens.lengths)
    offsets = offsets_of(np.where(replaced, 1, tokens.lengths))
    out = np.full(int(offsets[-1]), STAND_IN_TOKEN, tokens.values.dtype)
    out[expand_ranges(offsets[:-1], kept)] = tokens.values[expand_ranges(tokens.offsets[:-1], kept)]
    return Ragged(out, offsets)


def finish_tokens(kept: RowBatch, planned: Int64s, bad: Bools, kind: str | None = None) -> Finished:
    """Return rows that were tokenized before planning at exactly their planned lengths, with media of a kind.

    No token of a bad row counts in the loss.
    """
    tokens, _ = fit_rows(ragged_column(kept, "tokens"), planned)
    loss, _ = fit_rows(ragged_column(kept, "loss"), planned)
    counted = loss.values * np.repeat(~bad, planned) if bad.any() else loss.values
    media = None if kind is None else media_of(kind, kept, planned, bad)
    return Finished(tokens, Ragged(counted, loss.offsets), media, [], [])


def innermost_line(error: Exception) -> str:
    """Return where an exception of the user's code was raised, as " (file.py, line 7)"; "" where that is not known."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"


def without_beginning(done: Finished, start: Int64s) -> None:
    """Drop the first tokens of some samples, and the media among them: earlier steps have delivered those."""
    lengths = done.tokens.lengths - start
    offsets = offsets_of(lengths)
    done.tokens, done.loss = (
        Ragged(rows.values[expand_ranges(rows.offsets[:-1] + start, lengths)], offsets)
        for rows in (done.tokens, done.loss)
    )
    if done.media is not None:
        rows = np.repeat(np.arange(len(start)), np.diff(done.media.rows))
        done.media = done.media.keep(done.media.start >= start[rows])
        rows = np.repeat(np.arange(len(start)), np.diff(done.media.rows))
        done.media = dataclasses.replace(done.media, start=(done.media.start - start[rows]).astype(np.int32))


# -- where a function over rows runs: in this thread, or in process workers, which a row may kill ------------------

RowFunction = Callable[..., RowBatch]
"""A pure function: as many rows out as in, each made from its own row alone; beside the rows it may be given places."""


class PooledRows(Protocol):
    """Such a function in process workers."""

    def __call__(self, rows: RowBatch, places: Sequence[Place] | None = None) -> tuple[RowBatch, list[Fault]]:
        """Return the results of the surviving rows, in order, and the rows that killed a worker.

        With places, the function is given them beside the rows, one for each row, and writes there.
        """
        ...


Isolate = Callable[[RowFunction, str, float | None], PooledRows]
"""Moves a function (with its name for messages, and a deadline in seconds or None) into process workers."""
OUT_OF_MEMORY = "it needs more memory than this host has"
"""How the reason begins for which a row is given up that the out-of-memory killer ended alone, with room, twice."""


def run_rows(
    function: RowFunction, run: PooledRows | None, rows: RowBatch, stand_in: RowBatch
) -> tuple[RowBatch, list[Fault]]:
    """Apply a function to rows; a row that killed its worker becomes the one row of `stand_in`.

    Example:
        >>> double = lambda rows: {"n": np.asarray(rows["n"]) * 2}
        >>> deadly = lambda rows: ({"n": np.array([2, 6])}, [(1, "signal 11")])
        >>> rows, killed = run_rows(double, deadly, {"n": np.array([1, 2, 3])}, {"n": np.array([0])})
        >>> rows["n"].tolist(), killed
        ([2, 0, 6], [(1, 'signal 11')])
    """
    if run is None:
        return function(rows), []
    done, killed = run(rows)
    if not killed:
        return done, []
    dead = np.zeros(num_rows(rows), np.bool_)
    dead[[row for row, _ in killed]] = True
    if dead.all():
        return take_rows(stand_in, np.zeros(len(dead), np.int64)), killed
    places = np.where(dead, num_rows(done), np.cumsum(~dead) - 1)
    return take_rows(concat_rows([done, stand_in]), places), killed


# -- decoding of media items, in parallel, in a SourceLoader or in a DataConstructor --------------------------------


def decode_media(media: Media, decoder: MediaDecoder, workers: Workers) -> tuple[Media, list[Fault]]:
    """Return the media decoded into one array, and (item, reason) of those that do not decode.

    Items whose bytes are on other hosts stay as they are.
    """
    if not media.encoded:
        return media, []
    here = media.here
    sizes = np.where(here, decoder.item_bytes(media.grids), 0)
    offsets, items = offsets_of(sizes), np.flatnonzero(here)
    values = np.empty(int(offsets[-1]), np.uint8)
    places = [values[offsets[item] : offsets[item + 1]] for item in items.tolist()]
    faults = decode_into(media, items, decoder, places, workers)
    bad = media.bad.copy()
    bad[[item for item, _ in faults]] = True
    begin = np.where(here, offsets[:-1], -1)
    return dataclasses.replace(media, values=values, begin=begin, nbytes_of=sizes, bad=bad, encoded=False), faults


def decode_into(
    media: Media, items: Int64s, decoder: MediaDecoder, places: Sequence[Place], workers: Workers
) -> list[Fault]:
    """Decode items into their places; return (item, reason) of those that do not decode, which become zeros."""
    decode_items = getattr(decoder, "decode_items", None)
    if decode_items is not None:  # all at once, in the pool of the host
        return decode_items(media, items, places)

    def prepare(at: int) -> list[Fault]:
        item, place = int(items[at]), places[at]
        if media.bad[item]:
            place[:] = 0
            return []
        try:
            decoder.decode(media.data(item), media.grids[item], int(media.seeds[item]), place)
        except MediaFault as fault:
            place[:] = 0
            return [(item, str(fault))]
        return []

    return [fault for found in workers.map(prepare, range(len(items))) for fault in found]
