"""SourceLoader: reads one source in its order, measures samples ahead of the plan, finishes planned ones.

    SourceLoader     summary_buffer: metadata of the samples from a cursor on; loader_do_plan, finish, hand_over: the
                     planned samples, popped, transformed and returned as columns
    ReadBuffer       chunks of measured rows, in the source's order, until a plan pops them
    GroupReader      reads one group in its keyed order: k streams merged, or a small group held whole (on disk, where
                     the groups of all sources are more than the host's budget for them)
    ShadowLoader     a standby with a warm read buffer, which follows the position of a SourceLoader (paper section 6.1)
    LoaderCounters   what a loader has counted: samples seen, bad samples, wrong lengths
    PlacementChoice  whether media are decoded here or in the DataConstructor (paper section 6.2)

Rules of this file:
1. What is delivered has the planned length, whatever was read.
2. Everything here is a cache: any position can be requested again, and is read again. A chunk never crosses a group.
3. A fault of one sample makes a stand-in and is counted; a fault of a file is raised.
4. The placement of decoding changes what travels and where the work is done, never the stream.
5. A shadow reads and measures what its primary was asked for, and delivers nothing. It holds what a step that is
   planned and not delivered may need, so it can take over between two calls. It learns of positions after the fact and
   may lag: what it lacks when it is promoted, it reads then. It never runs in its primary's process, and never promotes
   itself.
6. Rows before `release` are not needed by a later step and are dropped chunk by chunk. The metadata of the last of them
   is kept: the replacement of a planner plans the steps since the last snapshot again, and would otherwise read whole
   groups again for lengths that were measured a moment ago.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Pieces, apply_overlength, cut_pieces
from overlord.core.messages import LoaderOrder, MetaDelta, MetaRequest, Payload
from overlord.core.order import BEGIN, NO_GROUP, FileBlocks, Group, SourceOrder, rows_per_read
from overlord.core.ragged import (
    BAD_COLUMN,
    NOT_PARSED,
    RowBatch,
    Scattered,
    SharedMemory,
    blank_rows,
    concat_rows,
    copied_run,
    expand_ranges,
    gather_rows,
    num_bytes,
    num_rows,
    offsets_of,
    rows_in_place,
    slice_rows,
    take_rows,
)
from overlord.core.samples import (
    BAD,
    ENDS_EPOCH,
    FILE_SHIFT,
    META,
    PLAIN,
    Cursor,
    MetaArray,
    SampleId,
    derive,
    hash64,
)
from overlord.errors import ReaderError, SourceError, StateError, ToleranceError
from overlord.job.layout_specs import Placement
from overlord.job.specs import Job, Source
from overlord.roles.poisoned_rows import PoisonedRowLog
from overlord.roles.ports import Telemetry
from overlord.transforms.hooks import RunningHook, run_loader_hook
from overlord.transforms.samples.per_sample import (
    Fault,
    Finished,
    Measured,
    SampleTransform,
    Workers,
    count_loss_tokens,
    decode_media,
    flat,
    ragged_column,
    without_beginning,
)

Int64s = npt.NDArray[np.int64]

KNOWN_BYTES = 128 << 10
"""Bytes of metadata that each loader keeps of dropped rows."""
ITEM_COLUMNS = ("media_start", "media_length")
"""Columns of a chunk that belong to the metadata of its rows."""
MEDIA = "media"
"""The column of a chunk with its encoded images, clips and sounds."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one group."""

    epoch: int
    group: int
    offset: int
    meta: MetaArray
    kept: RowBatch
    margin: tuple[int, int] = (0, 0)
    """Tokens before and after an image's placeholders that are never cut off from it."""
    stop: int = field(init=False)
    """The offset after the last row."""
    nbytes: int = field(init=False)
    """Bytes held."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", self.offset + len(self.meta))
        object.__setattr__(self, "nbytes", self.meta.nbytes + num_bytes(self.kept))


class ReadBuffer:
    """Chunks by position."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        self._known: dict[tuple[int, int], deque[Chunk]] = {}
        self._known_bytes = 0
        self.nbytes = 0

    def add(self, chunk: Chunk) -> None:
        """Keep a chunk."""
        self._chunks.setdefault((chunk.epoch, chunk.group), []).append(chunk)
        self.nbytes += chunk.nbytes

    def covering(self, cursor: Cursor) -> Chunk | None:
        """Return the chunk that holds the row at a cursor."""
        return _covering(self._chunks.get(cursor[:2], ()), cursor.offset)

    def bytes_from(self, cursor: Cursor) -> int:
        """Return the bytes of chunks that reach beyond a cursor."""
        return sum(
            chunk.nbytes
            for key, chunks in self._chunks.items()
            if key >= cursor[:2]
            for chunk in chunks
            if key > cursor[:2] or chunk.stop > cursor.offset
        )

    def describing(self, cursor: Cursor) -> Chunk | None:
        """Return a chunk with the metadata of the row at a cursor; the row itself may have been dropped from it."""
        return self.covering(cursor) or _covering(self._known.get(cursor[:2], ()), cursor.offset)

    def release(self, before: Cursor) -> None:
        """Drop the chunks that end before a cursor."""
        for key in list(self._chunks):
            if key > before[:2]:
                continue
            keep = [c for c in self._chunks[key] if key == before[:2] and c.stop > before.offset]
            for chunk in self._chunks[key]:
                if not any(chunk is one for one in keep):
                    self.nbytes -= chunk.nbytes
                    self._remember(chunk)
            if keep:
                self._chunks[key] = keep
            else:
                del self._chunks[key]

    def _remember(self, chunk: Chunk) -> None:
        items = {name: chunk.kept[name] for name in ITEM_COLUMNS if name in chunk.kept}
        known = Chunk(chunk.epoch, chunk.group, chunk.offset, chunk.meta, items, chunk.margin)
        self._known.setdefault((chunk.epoch, chunk.group), deque()).append(known)
        self._known_bytes += known.nbytes
        while self._known_bytes > KNOWN_BYTES:
            oldest = next(iter(self._known))
            self._known_bytes -= self._known[oldest].popleft().nbytes
            if not self._known[oldest]:
                del self._known[oldest]


def _covering(chunks: Iterable[Chunk], offset: int) -> Chunk | None:
    for chunk in chunks:
        if chunk.offset <= offset < chunk.stop:
            return chunk
    return None


def gather(picks: list[tuple[Chunk, npt.NDArray[np.int64]]], memory: SharedMemory | None) -> RowBatch:
    """Return the kept columns of picked rows (chunk, rows in the chunk), concatenated.

    Encoded media in shared memory are not copied: workers find them there.
    """
    media = [ragged_column(chunk.kept, MEDIA) for chunk, _ in picks if MEDIA in chunk.kept]
    found = memory.spanning([one.values for one in media]) if media and memory is not None else None
    if found is not None:
        parts = [(rows, one.offsets, begin) for one, begin, (_, rows) in zip(media, found[1], picks, strict=True)]
        begin = np.concatenate([offsets[rows] + at for rows, offsets, at in parts])
        end = np.concatenate([offsets[rows + 1] + at for rows, offsets, at in parts])
        shared: Any = Scattered(found[0], begin, end - begin, np.dtype(np.uint8))
        others = [(replace(c, kept={n: v for n, v in c.kept.items() if n != MEDIA}), rows) for c, rows in picks]
        return {**gather(others, None), MEDIA: shared}
    chunk, rows = picks[0]
    if len(picks) == 1 and (rows[1:] - rows[:-1] == 1).all():  # most often: a step takes the next few rows of a chunk
        return copied_run(chunk.kept, int(rows[0]), int(rows[-1]) + 1)
    bounds = offsets_of([len(rows) for _, rows in picks])
    places = [np.arange(begin, end) for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    return gather_rows(
        [(rows_in_place(chunk.kept, rows), place) for (chunk, rows), place in zip(picks, places, strict=True)]
    )


class HeldRows(Protocol):
    """The rows of a group, in memory or on disk."""

    def take(self, rows: Int64s) -> RowBatch:
        """Return copies of the given rows, in that order."""
        ...


class Blocks(Protocol):
    """The files of one source, block by block."""

    def blocks(self, file: int) -> FileBlocks:
        """Return the blocks of a file, indexing it if needed."""
        ...

    def stream(self, file: int, block: int, *, skip: int, stop: int | None, batch_rows: int) -> Iterator[RowBatch]:
        """Yield the rows of a block in file order; with `stop`, those of a part of it."""
        ...

    def take(self, numbers: Int64s) -> RowBatch:
        """Return rows by their numbers (file << 32 | row), in this order."""
        ...

    def pick(self, files: Int64s, blocks: Int64s, rows: Int64s) -> RowBatch | None:
        """Return rows of blocks that are read in parts, in any order; None where only `stream` reads them."""
        ...

    @property
    def fetches(self) -> bool:
        """Whether there are remote files, of which blocks can be fetched ahead."""
        ...

    def begin_epoch(self) -> None:
        """Say that an epoch begins: all that is kept of remote files is needed in it."""
        ...

    def fetch_ahead(self, files: Int64s, blocks: Int64s) -> None:
        """Begin to fetch blocks that will be read soon."""
        ...

    def row_base(self, file: int, block: int) -> int:
        """Return the first row of a block, counted from the start of its file."""
        ...

    def hold(self, rows: RowBatch) -> HeldRows:
        """Hold the rows of a group, in memory or on disk."""
        ...

    @property
    def memory(self) -> SharedMemory | None:
        """Where rows that go to workers are."""
        ...

    def forget(self) -> None:
        """Drop the indices held in memory."""
        ...

    def place(self, sample: SampleId) -> str:
        """Return the file and row of a sample, in brackets behind what a message says of it."""
        ...


class GroupReader:
    """Reads the rows of one group; its position only moves forward."""

    def __init__(self, group: Group, files: Blocks, offset: int) -> None:
        self.group = group
        self.offset = offset
        self._files = files
        self._streams: dict[int, _BlockStream] = {}
        self._whole: HeldRows | None = None
        self._picks = group.scattered
        """Whether rows are looked up one by one, and not read as streams."""
        self._base = np.array(
            [
                (int(f) << FILE_SHIFT) + files.row_base(int(f), int(b)) + int(first)
                for f, b, first in zip(group.files, group.blocks, group.first, strict=True)
            ],
            np.int64,
        )

    def read(self, count: int) -> tuple[RowBatch, Int64s]:
        """Return the next rows of the group and their row numbers (file << 32 | row)."""
        return read_together([self], [count])[0]

    def _take_numbers(self, count: int) -> tuple[RowBatch, Int64s]:
        """Return the next rows of a group whose rows are named one by one."""
        assert self.group.numbers is not None
        numbers = self.group.numbers[self.offset : self.offset + count]
        self.offset += len(numbers)
        return self._files.take(numbers), numbers

    def _locate(self, count: int) -> tuple[Int64s, Int64s]:
        """Return slot and row in the slot of the next rows, and go on behind them."""
        slots, rows = self.group.locate(self.offset, count)
        self.offset += len(slots)
        return slots, rows

    def _read(self, slots: Int64s, rows: Int64s) -> RowBatch:
        return self._read_whole(slots, rows) if self.group.whole else self._read_streams(slots, rows)

    def _read_whole(self, slots: Int64s, rows: Int64s) -> RowBatch:
        if self._whole is None:
            parts: list[RowBatch] = []
            held: list[_BlockStream] = []
            for slot, count in enumerate(self.group.rows.tolist()):
                stream = self._open(slot, 0, count)
                parts += stream.take(count)
                if self.group.is_part[slot]:
                    held.append(stream)  # its rows may be views of a mapped file: keep it open until they are copied
            self._whole = self._files.hold(concat_rows(parts))
        base = np.cumsum(self.group.rows) - self.group.rows
        return self._whole.take(base[slots] + rows)

    def _read_streams(self, slots: Int64s, rows: Int64s) -> RowBatch:
        # Rows of the k blocks are interleaved: take the rows of each block from its stream at once, then restore the
        # order.
        order = np.argsort(slots, kind="stable")
        used, first, counts = np.unique(slots[order], return_index=True, return_counts=True)
        parts: list[RowBatch] = []
        for slot, at, count in zip(used.tolist(), first.tolist(), counts.tolist(), strict=True):
            if slot not in self._streams:
                self._streams[slot] = self._open(slot, int(rows[order[at]]), count)
            parts += self._streams[slot].take(count)
            if rows[order[at]] + count == self.group.rows[slot]:
                del self._streams[slot]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        joined = concat_rows(parts)
        return joined if len(used) == 1 else take_rows(joined, place)

    def _open(self, slot: int, skip: int, count: int) -> _BlockStream:
        """Open a block at a row; so many rows are read from it at a time."""
        file, block = int(self.group.files[slot]), int(self.group.blocks[slot])
        size = 256
        if not self.group.whole:
            # Where many rows are needed at a time, they are read in one piece, as long as that is not large.
            most = rows_per_read(self.group.row_bytes, 1)
            size = max(rows_per_read(self.group.row_bytes, len(self.group.files)), min(count, most))
        first = int(self.group.first[slot])
        stop = first + int(self.group.rows[slot]) if self.group.is_part[slot] else None
        return _BlockStream(self._files.stream(file, block, skip=first + skip, stop=stop, batch_rows=size), file, block)


def read_together(readers: Sequence[GroupReader], counts: Sequence[int]) -> list[tuple[RowBatch, Int64s]]:
    """Return the next rows of several groups of a source, and their row numbers.

    Where all of them are parts of spilled blocks, every block is looked at once for all groups, and the rows lie one
    behind the other in one piece of memory.
    """
    if any(reader.group.numbers is not None for reader in readers):
        return [reader._take_numbers(count) for reader, count in zip(readers, counts, strict=True)]
    found = [reader._locate(count) for reader, count in zip(readers, counts, strict=True)]
    numbers = [reader._base[slots] + rows for reader, (slots, rows) in zip(readers, found, strict=True)]
    batch = None
    if all(reader._picks for reader in readers):
        columns = [
            (reader.group.files[slots], reader.group.blocks[slots], reader.group.first[slots] + rows)
            for reader, (slots, rows) in zip(readers, found, strict=True)
        ]
        batch = readers[0]._files.pick(*(np.concatenate(column) for column in zip(*columns, strict=True)))
    if batch is not None:
        bounds = offsets_of([len(one) for one in numbers]).tolist()
        batches = [slice_rows(batch, begin, end) for begin, end in itertools.pairwise(bounds)]
    else:
        for reader in readers:
            reader._picks = False
        batches = [reader._read(*where) for reader, where in zip(readers, found, strict=True)]
    return list(zip(batches, numbers, strict=True))


class _BlockStream:
    """Takes any number of rows at a time from a stream of batches."""

    def __init__(self, batches: Iterator[RowBatch], file: int, block: int) -> None:
        self._batches = batches
        self._rest: RowBatch | None = None
        self._where = f"block {block} of file {file}"

    def take(self, count: int) -> list[RowBatch]:
        """Return the next rows, in as many parts as they were read in."""
        parts: list[RowBatch] = []
        while count > 0:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise ReaderError(
                    f"{self._where} has fewer rows than its index says; the stream would lose samples. The file "
                    "changed while it was read: restore it, or start a new run."
                )
            size = num_rows(batch)
            used = min(size, count)
            parts.append(slice_rows(batch, 0, used))
            self._rest = slice_rows(batch, used, size) if used < size else None
            count -= used
        return parts


CHUNK_ROWS = 1024
"""Rows of a chunk at most: each costs the service's interpreter the same, however many rows it has."""
CHUNK_BYTES = 4 << 20
AHEAD_ROWS = 64
AHEAD_BYTES = 128 << 10
"""A chunk holds at least about this much even if less is requested: tokenizers are faster on batches."""
_DETAILS = re.compile(r"[a-z0-9]+://[^\s'\"]+|'[^']*'|\"[^\"]*\"|\d+")
"""What of a reason is of one row only: a URL, a name in quotes, a number."""
FIRST_ROWS = 8
"""If this many rows at the beginning of a source are all bad, it is an error in the job."""
FEW_SAMPLES = 1000
"""A tolerance is a share; it is applied as if at least this many samples had been seen."""

Lengths = Callable[[RowBatch, npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Gives known text lengths of some rows: from a column, or from a sidecar by row number."""
COUNTED_IDS = 4096
"""A snapshot of a loader lists at most this many samples of each kind."""


@dataclass(frozen=True, slots=True)
class LoaderCounters:
    """What loaders of one source have counted: a replacement of a loader continues from it.

    Example:
        >>> LoaderCounters.from_json(LoaderCounters(100, {(7, 0)}, set()).to_json()).bad
        {(7, 0)}
    """

    seen: int
    """Samples measured."""
    bad: set[tuple[int, int]]
    """Samples (row, epoch) that were replaced by a stand-in."""
    wrong_lengths: set[tuple[int, int]]
    """Samples that were cut or padded to the promised length, or left out where that is 0."""

    @classmethod
    def joined(cls, parts: Sequence[LoaderCounters]) -> LoaderCounters:
        """Return the sum of what several loaders of a source have counted."""
        empty: set[tuple[int, int]] = set()
        bad, wrong = (
            empty.union(*sets) for sets in ([part.bad for part in parts], [part.wrong_lengths for part in parts])
        )
        return cls(sum(part.seen for part in parts), bad, wrong)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; of very many samples only the first are listed."""
        named = {"bad": self.bad, "wrong_lengths": self.wrong_lengths}
        return {
            "seen": self.seen,
            **{key: [list(one) for one in sorted(ids)[:COUNTED_IDS]] for key, ids in named.items()},
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> LoaderCounters:
        """Read the output of `to_json`."""
        bad, wrong = ({(int(row), int(epoch)) for row, epoch in given[key]} for key in ("bad", "wrong_lengths"))
        return cls(int(given["seen"]), bad, wrong)


class PlacementChoice:
    """Where the media of one source are decoded: in its loaders, or in the DataConstructor.

    With "auto", decoding that makes bytes grow moves to the DataConstructor (the paper's transformation reordering).
    All loaders of the source share one choice, under a lock where the runtime has threads.

    Example:
        >>> choice = PlacementChoice("auto")
        >>> choice.decodes_in_loader(encoded_bytes=10_000, decoded_bytes=150_000), choice.ratio
        (False, 15.0)
    """

    def __init__(self, wanted: Placement, lock: AbstractContextManager[Any] | None = None) -> None:
        self._wanted = wanted
        self._lock: AbstractContextManager[Any] = lock or nullcontext()
        self._in_loader: bool | None = None
        self.ratio: float | None = None
        """Decoded bytes over encoded ones, of the first samples seen."""

    def decodes_in_loader(self, encoded_bytes: int, decoded_bytes: int) -> bool:
        """Return whether media are decoded in the loader; the first samples decide, once."""
        with self._lock:
            if self._in_loader is None:
                self.ratio = decoded_bytes / max(encoded_bytes, 1)
                self._in_loader = self._wanted == "loader" or (self._wanted == "auto" and self.ratio <= 1)
            return self._in_loader

    @property
    def where(self) -> str:
        """Where media are decoded: "loader" or "constructor"; "undecided" before the first."""
        return "undecided" if self._in_loader is None else "loader" if self._in_loader else "constructor"


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of one group that were read and are not measured."""

    cursor: Cursor
    rows: RowBatch
    numbers: npt.NDArray[np.int64]


MeasuredChunk = tuple[Chunk, list[Fault], list[Fault]]
"""Rows that were measured; those that are bad, and those of a wrong length."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Planned samples that were popped from the read buffer and are not finished."""

    order: LoaderOrder
    kept: RowBatch


class SourceLoader:
    """One source, or the groups of one source that this loader owns."""

    def __init__(
        self,
        job: Job,
        number: int,
        files: Blocks,
        order: SourceOrder,
        transform: SampleTransform,
        *,
        lengths: Lengths | None,
        workers: Workers,
        telemetry: Telemetry,
        placement: PlacementChoice | None = None,
        poisoned: PoisonedRowLog | None = None,
        hook: RunningHook | None = None,
    ) -> None:
        self._number = number
        self._source = job.sources[number]
        self.name = self._source.name
        """The name of its source."""
        self._files = files
        self._order = order
        self._fetched_for: tuple[int, int] | None = None
        self._transform = transform
        self._seed = job.seed
        self._context_length = job.batch.context_length
        self._overlength = job.overlength
        self._lengths = lengths
        self._workers = workers
        self._telemetry = telemetry
        self._buffer = ReadBuffer()
        self._readers: dict[tuple[int, int], GroupReader] = {}
        self.open_groups = 1
        """Groups that may be open at once: one, unless several workers read ahead."""
        self.reads_ahead = True
        """Whether more rows than are asked for are read and measured at once, as the next step will ask for them."""
        self._resting: Cursor | None = None
        self._woken: tuple[tuple[int, int], Group] | None = None
        """The group of the last request: the next one is mostly for rows of the same."""
        self._popped = Cursor(-1, -1, -1)
        self.seen = 0
        """Samples measured so far, also by loaders before this one."""
        self._bad: set[tuple[int, int]] = set()
        self._first_bad: dict[int, str] | None = {}
        """Offset -> reason of the bad rows that begin the first group; None once a good row is found there."""
        self._wrong_lengths: set[tuple[int, int]] = set()
        self._poisoned = poisoned
        self._hook = hook
        self.placement = placement or PlacementChoice("loader")
        """Where this source's media are decoded."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes in the read buffer."""
        return self._buffer.nbytes

    def ahead_bytes(self, cursor: Cursor) -> int:
        """Bytes in the read buffer beyond a cursor."""
        return self._buffer.bytes_from(cursor)

    @property
    def counters(self) -> LoaderCounters:
        """What it has counted so far."""
        return LoaderCounters(self.seen, set(self._bad), set(self._wrong_lengths))

    def take_over(self, counters: LoaderCounters) -> None:
        """Continue from the counters of a loader that this one replaces."""
        self.seen += counters.seen
        self._first_bad = None if counters.seen else self._first_bad
        self._bad |= counters.bad
        self._wrong_lengths |= counters.wrong_lengths

    def give_away(self) -> LoaderCounters:
        """Return the counters, and start from zero."""
        counters = self.counters
        self.seen, self._bad, self._wrong_lengths = 0, set(), set()
        return counters

    def summary_buffer(self, request: MetaRequest, *, one_group: bool = False) -> MetaDelta:
        """Return the metadata of the samples from a cursor on; rows that are not measured are read and measured.

        The answer may be shorter than requested: it ends at the end of the epoch or, if asked for, of the group; and
        where the next row cannot be read.
        """
        cursor, group = self.wake(request.cursor)
        parts: list[tuple[MetaArray, Chunk]] = []
        left, ended = request.count, False
        while True:
            stop = min(cursor.offset + left, group.num_rows)
            left -= stop - cursor.offset
            try:
                while cursor.offset < stop:
                    chunk = self._buffer.describing(cursor) or self._chunk_at(cursor, stop)
                    parts.append((chunk.meta[cursor.offset - chunk.offset : stop - chunk.offset], chunk))
                    cursor = cursor._replace(offset=min(chunk.stop, stop))
            except (ReaderError, SourceError):
                if not parts:
                    raise
                break  # the request for what comes next meets the error
            if stop == group.num_rows:
                cursor, ended = self.after_group(cursor)
            if not left or stop < group.num_rows or ended or one_group:
                break
            group = self.group(cursor)
        meta = parts[0][0].copy() if len(parts) == 1 else np.concatenate([part for part, _ in parts])
        if ended:
            meta["flags"][-1] |= ENDS_EPOCH
        return MetaDelta(self._number, meta, cursor, listed_items(meta, parts))

    def wake(self, cursor: Cursor) -> tuple[Cursor, Group]:
        """Leave the idle state; return the cursor with its group resolved, and the group."""
        self._resting, woken = None, self._woken
        if woken is not None and woken[0] == cursor[:2] and cursor.offset < woken[1].num_rows:
            return cursor, woken[1]
        cursor = self._resolve(cursor)
        self._woken = cursor[:2], self.group(cursor)
        return cursor, self._woken[1]

    def group(self, cursor: Cursor) -> Group:
        """Return the group of a cursor."""
        with self.reading():
            group = self._order.group(cursor.epoch, cursor.group)
            if self._files.fetches and self._fetched_for != cursor[:2]:
                is_first = self._fetched_for is None
                if self._fetched_for is None or self._fetched_for[0] < cursor.epoch:
                    self._files.begin_epoch()
                self._fetched_for = cursor[:2]
                if not is_first:  # the first step of all sources comes before the second group of any
                    self._fetch_ahead(cursor.epoch, cursor.group, group)
            return group

    def _fetch_ahead(self, epoch: int, number: int, group: Group) -> None:
        """Begin to fetch a group that begins, and the one behind it in its window."""
        groups = [group, *([self._order.group(epoch, number + 1)] if self._order.has_group(epoch, number + 1) else [])]
        for one in groups:
            self._files.fetch_ahead(one.files, one.blocks)

    def missing(self, cursor: Cursor, stop: int) -> int:
        """Return the first offset from a cursor on that is not measured; `stop` if all are."""
        at = cursor.offset
        while at < stop and (chunk := self._buffer.describing(Cursor(cursor.epoch, cursor.group, at))) is not None:
            at = chunk.stop
        return min(at, stop)

    def read(self, wanted: Sequence[tuple[Cursor, Group, int]]) -> list[Stretch]:
        """Read rows of groups: from each cursor on so many. Others may be read concurrently, each by one caller."""
        if all(group.scattered for _, group, _ in wanted):
            return self._read_together(wanted)
        return [stretch for one in wanted for stretch in self._read_together([one])]  # no more streams than needed

    def _read_together(self, wanted: Sequence[tuple[Cursor, Group, int]]) -> list[Stretch]:
        keys = [cursor[:2] for cursor, _, _ in wanted]
        with self.reading(keys):
            readers = [self._reader_at(cursor, group, keys) for cursor, group, _ in wanted]
            found = read_together(readers, [count for _, _, count in wanted])  # (5) new samples go into the buffer
        for key, reader in zip(keys, readers, strict=True):
            if reader.offset == reader.group.num_rows:
                self._readers.pop(key, None)  # a finished group holds no open file
        return [Stretch(cursor, *rows) for (cursor, _, _), rows in zip(wanted, found, strict=True)]

    def _reader_at(self, cursor: Cursor, group: Group, kept: Sequence[tuple[int, int]]) -> GroupReader:
        key = cursor[:2]
        reader = self._readers.get(key)
        if reader is None or reader.offset != cursor.offset:
            while len(others := [one for one in list(self._readers) if one not in kept]) >= self.open_groups:
                self._readers.pop(min(others), None)
            reader = self._readers[key] = GroupReader(group, self._files, cursor.offset)
        return reader

    def keep(self, measured: MeasuredChunk) -> Chunk:
        """Count the faults of measured rows, and add the rows to the read buffer."""
        chunk, faults, wrong_lengths = measured
        self.seen += len(chunk.meta)
        self._note(chunk.meta, faults, wrong_lengths)
        self._judge_first_rows(chunk, faults)
        self._check_tolerance()
        self._buffer.add(chunk)
        return chunk

    def loader_do_plan(self, order: LoaderOrder) -> Callable[[], Staged]:
        """Pop the planned samples from the buffer; call the result to copy them, which changes nothing here."""
        picks = self._pick(order.meta)
        self.release(order.end)
        return lambda: Staged(order, gather(picks, self._files.memory))

    def release(self, cursor: Cursor) -> None:
        """Drop the rows before a cursor."""
        self._buffer.release(cursor)
        self._popped = cursor
        self._drop_if_resting()

    def finish(self, staged: Staged) -> Finished:
        """Run the per-sample transforms and the hook. It changes no state of the loader, so steps may overlap here."""
        meta = staged.order.meta
        start = meta["start"].astype(np.int64)
        done = self._transform.finish(staged.kept, start + meta["tokens"], (meta["flags"] & BAD) > 0, self._workers)
        if start.any():
            without_beginning(done, start)
        if self._hook is not None:
            done = run_loader_hook(self._hook, self.name, staged.order, done)
        decoder = self._transform.decoder
        if done.media is None or decoder is None or not len(done.media.grids):
            return done
        decoded = int(decoder.item_bytes(done.media.grids).sum())
        if self.placement.decodes_in_loader(done.media.nbytes, decoded) or staged.order.open_media:
            done.media, faults = decode_media(done.media, decoder, self._workers)
            row_of = np.repeat(np.arange(len(meta)), np.diff(done.media.rows))
            done.faults += [(int(row_of[item]), reason) for item, reason in faults]
        return done

    def hand_over(self, staged: Staged, done: Finished) -> Payload:
        """Count the faults of finished samples, and return the samples as columns."""
        meta = staged.order.meta
        self._note(meta, done.faults, done.wrong_lengths)
        self._check_tolerance()
        return Payload(staged.order.step, self._number, done.tokens, done.loss, done.media)

    def named(self, row: int, epoch: int) -> str:
        """Return the id of a sample with its file and row, for messages."""
        sample = SampleId(self.name, row, epoch)
        return f"{sample}{self._files.place(sample)}"

    def note_faults(self, faults: Sequence[tuple[int, int, str]]) -> None:
        """Count samples with media that the DataConstructor could not decode: (row, epoch, reason) of each."""
        self._note_rows(faults, self._bad, self._telemetry.bad_samples)
        self._check_tolerance()

    def rest(self, cursor: Cursor) -> None:
        """Release readers, indices, and all rows that no planned step needs: nothing is drawn from the cursor on."""
        self._readers.clear()
        self._resting, self._woken = cursor, None
        self._drop_if_resting()
        self._order.forget()
        self._files.forget()

    def _drop_if_resting(self) -> None:
        if self._resting is not None and self._popped >= self._resting:
            self._buffer = ReadBuffer()

    @contextmanager
    def reading(self, keys: Sequence[tuple[int, int]] = ()) -> Iterator[None]:
        """Set the name of the source on the error of a file that cannot be read."""
        try:
            yield
        except (ReaderError, SourceError) as error:
            for key in keys:
                self._readers.pop(key, None)  # it may have stopped half-way
            error.source = self.name
            raise

    def after_group(self, cursor: Cursor) -> tuple[Cursor, bool]:
        """Return where the stream goes on behind the group of a cursor, and whether its epoch ends there."""
        with self.reading():
            group = self._order.next_group(cursor.epoch, cursor.group)
        if group != NO_GROUP:
            return Cursor(cursor.epoch, group, 0), False
        return Cursor(cursor.epoch + 1, BEGIN, 0), True

    def _resolve(self, cursor: Cursor) -> Cursor:
        if cursor.group != BEGIN:
            self._check_inside(cursor)
            return cursor
        with self.reading():
            group = self._order.first_group(cursor.epoch)
        if group == NO_GROUP:
            raise SourceError(
                f"source {self.name!r} has no rows in {', '.join(self._source.path)}; the mixture would wait "
                "for it forever. Remove the source or correct its path."
            )
        return Cursor(cursor.epoch, group, 0)

    def _check_inside(self, cursor: Cursor) -> None:
        epoch, group, offset = cursor
        with self.reading():
            inside = self._order.has_group(epoch, group) and offset < self._order.group(epoch, group).num_rows
        if not inside:
            raise StateError(
                f"source {self.name!r} has no row at epoch {epoch}, group {group}, offset {offset}, which is "
                "its cursor in the state; resuming would lose or repeat samples. The state is damaged, or files of the "
                "source were replaced by others of the same names and sizes. Use an undamaged state, put the files "
                "back, or start without a state."
            )

    def _pick(self, meta: MetaArray) -> list[tuple[Chunk, npt.NDArray[np.int64]]]:
        """Return (chunk, rows in it) of planned rows, which are in the source's order.

        Each pass takes the longest run of rows in one group, gets the chunk of its first row (read again if it is not
        buffered), and picks the rows of the run that this chunk holds.
        """
        picks: list[tuple[Chunk, npt.NDArray[np.int64]]] = []
        epochs, groups, at = meta["epoch"], meta["group"], 0
        while at < len(meta):
            offsets = meta["offset"][at:]
            cursor = Cursor(int(epochs[at]), int(groups[at]), int(offsets[0]))
            if (epochs[-1], groups[-1]) != cursor[:2]:
                offsets = offsets[: np.argmin((epochs[at:] == cursor.epoch) & (groups[at:] == cursor.group))]
            chunk = self._chunk_at(cursor, int(offsets[-1]) + 1)
            inside = len(offsets) if offsets[-1] < chunk.stop else int(np.searchsorted(offsets, chunk.stop))
            picks.append((chunk, offsets[:inside] - chunk.offset))
            at += inside
        return picks

    def _chunk_at(self, cursor: Cursor, stop: int) -> Chunk:
        """Return the chunk that holds a row; if there is none, read one that reaches about to `stop`."""
        chunk = self._buffer.covering(cursor)
        if chunk is None:
            with self.reading():
                group = self._order.group(cursor.epoch, cursor.group)
            rows = rows_at_once(group, stop - cursor.offset)
            rows = rows if self.reads_ahead else min(rows, stop - cursor.offset)
            chunk = self.keep(*self.measure(self.read([(cursor, group, rows)])))
        return chunk

    def measure(self, stretches: Sequence[Stretch]) -> list[MeasuredChunk]:
        """Measure rows that were read, together. It changes no state of the loader: several workers may run it at once.

        Where groups are small, a call for each of them would cost more than its rows.
        """
        numbers = np.concatenate([one.numbers for one in stretches])
        bounds = offsets_of([len(one.numbers) for one in stretches])
        cursors = np.repeat(np.array([one.cursor for one in stretches], np.int64), np.diff(bounds), axis=0)
        given_up = [
            (int(begin) + row, reason)
            for one, begin in zip(stretches, bounds[:-1], strict=True)
            for row, reason in self._mark_poisoned(one)
        ]
        rows = stretches[0].rows if len(stretches) == 1 else concat_rows([one.rows for one in stretches])
        lengths = self._lengths(rows, numbers) if self._lengths else None
        seeds = np.concatenate(
            [hash64(derive(self._seed, "augment", self.name, one.cursor.epoch), one.numbers) for one in stretches]
        )
        try:
            with self.reading():  # images that are given by their paths are read here
                measured = self._transform.measure(rows, lengths, seeds)
        except ToleranceError as error:
            raise ToleranceError(f"source {self.name!r}: {error}") from None
        for row, reason in measured.killed:
            assert self._poisoned is not None, "only process workers are killed, and they come with such a log"
            # on disk before it takes effect
            self._poisoned.add(self.name, int(numbers[row]), reason, int(cursors[row, 0]))
        measured.faults = given_up + [fault for fault in measured.faults if fault[0] not in dict(given_up)]
        images, spans = media_items(measured)
        delivered, flags = apply_overlength(measured.tokens, spans, self._context_length, self._overlength)
        pieces = cut_pieces(delivered, self._context_length, spans)
        sample, start = pieces.sample.astype(np.int64), pieces.start.astype(np.int64)
        labels, plain = count_loss_tokens(measured, delivered, sample, start)
        meta = np.zeros(len(numbers), META)
        meta["epoch"], meta["group"] = cursors[:, 0], cursors[:, 1]
        meta["offset"] = cursors[:, 2] + np.arange(len(numbers)) - np.repeat(bounds[:-1], np.diff(bounds))
        meta["row"] = numbers
        meta["flags"] = measured.flags | flags | np.where(plain, PLAIN, 0)
        meta["tokens"] = delivered
        meta["loss_tokens"] = labels
        if images is not None and measured.images.any():
            count_images(meta, images)
        meta["bytes"] = np.minimum(row_bytes_of(measured.kept, len(numbers)), np.iinfo(np.uint32).max)
        return [
            (
                Chunk(*one.cursor, meta[begin:end], slice_rows(measured.kept, begin, end), measured.margin),
                _between(measured.faults, begin, end),
                _between(measured.wrong_lengths, begin, end),
            )
            for one, begin, end in zip(stretches, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]

    def _mark_poisoned(self, stretch: Stretch) -> list[Fault]:
        """Mark rows with a verdict as bad, so that no worker runs them again; return them with the reasons."""
        if self._poisoned is None:
            return []
        rows, numbers = stretch.rows, stretch.numbers
        known = np.flatnonzero(self._poisoned.known(self.name, numbers, stretch.cursor.epoch))
        if len(known):
            marks, which = np.array(rows[BAD_COLUMN]), np.zeros(len(numbers), np.bool_)
            marks[known], which[known] = NOT_PARSED, True
            rows.update(blank_rows(rows, which) | {BAD_COLUMN: marks})  # what killed a worker is not looked at again
        return [(int(at), self._poisoned.reason(self.name, int(numbers[at]))) for at in known]

    def _note(self, meta: MetaArray, faults: list[Fault], wrong_lengths: list[Fault]) -> None:
        """Count bad samples and those of a wrong length, given as (row of `meta`, reason)."""
        for found, counted, tell in (
            (faults, self._bad, self._telemetry.bad_samples),
            (wrong_lengths, self._wrong_lengths, self._telemetry.wrong_lengths),
        ):
            rows = [(int(meta["row"][at]), int(meta["epoch"][at]), why) for at, why in found]
            self._note_rows(rows, counted, tell)

    def _note_rows(
        self,
        faults: Sequence[tuple[int, int, str]],
        counted: set[tuple[int, int]],
        tell: Callable[[Sequence[tuple[SampleId, str]]], None],
    ) -> None:
        new: dict[SampleId, str] = {}
        for row, epoch, reason in faults:
            if (row, epoch) not in counted:  # a row that is read again is not counted twice
                counted.add((row, epoch))
                new[SampleId(self.name, row, epoch)] = reason
        if new:
            tell(list(new.items()))

    def _judge_first_rows(self, chunk: Chunk, faults: list[Fault]) -> None:
        """Refuse a source if its first rows are all bad: the job probably reads sound files in a wrong way.

        Exactly the first `FIRST_ROWS` rows of the source's order decide, in whatever chunks they are read. With one
        good row among them, only the tolerance applies. A run of bad rows in the middle of a source is damage.
        """
        if self._first_bad is None or chunk.epoch != 0 or self._source.tolerance >= 1:
            return
        with self.reading():
            if chunk.group != self._order.first_group(0):
                return
        bad = {chunk.offset + at: reason for at, reason in faults}
        if any(row not in bad for row in range(chunk.offset, min(chunk.stop, FIRST_ROWS))):
            self._first_bad = None
            return
        self._first_bad.update(bad)
        if all(row in self._first_bad for row in range(FIRST_ROWS)):
            leading = next(row for row in itertools.count() if row not in self._first_bad)
            # Reasons that differ in a URL, a quoted value or a number only are one: the first of them is shown.
            kinds = {row: _DETAILS.sub("..", self._first_bad[row]) for row in range(leading)}
            (kind, count), *others = Counter(kinds.values()).most_common()
            reason = next(self._first_bad[row] for row in range(leading) if kinds[row] == kind)
            alike = any(kinds[row] == kind and self._first_bad[row] != reason for row in range(leading))
            raise SourceError(
                f"source {self.name!r}: all of the first {leading} rows that were read are bad ({count} times: "
                f"{'for instance, ' if alike else ''}{reason}{'; and other reasons' if others else ''}). The sample "
                f"kind ({self._source.sample.kind!r}) or a column it names probably does not fit these files; training "
                "would get stand-ins only. Look at the rows with `overlord sources preview`, and correct sample, or "
                "the files. Set tolerance to 1 for a source that may be bad as a whole."
            )

    def _check_tolerance(self) -> None:
        error = judge_tolerance(self._source, self.seen, len(self._bad), len(self._wrong_lengths))
        if error is not None:
            raise error


class ShadowLoader:
    """A standby for a SourceLoader."""

    def __init__(self, loader: SourceLoader) -> None:
        self._loader = loader
        self._passed = Cursor(-1, BEGIN, -1)
        self.followed = 0
        """Requests of its primary that it has repeated."""

    def follow(self, requests: Sequence[MetaRequest], passed: Cursor | None) -> None:
        """Repeat requests to the primary, and drop the rows that every trainer has passed."""
        if passed is not None and passed > self._passed:
            self._passed = passed
        for request in requests:
            if request.cursor.group == BEGIN or request.cursor >= self._passed or self._holds_end(request):
                self._loader.summary_buffer(request)
                self.followed += 1
        if passed is not None:
            self._loader.release(self._passed)

    def promote(self) -> SourceLoader:
        """Return the loader, which serves requests itself from now on."""
        return self._loader

    def _holds_end(self, request: MetaRequest) -> bool:
        """Whether a request reaches beyond the passed position, so that its later rows are still needed."""
        epoch, group, offset = request.cursor
        return (epoch, group) == self._passed[:2] and offset + request.count > self._passed.offset


def judge_tolerance(
    source: Source, seen: int, bad: int, wrong_lengths: int, *, at_end: bool = False
) -> ToleranceError | None:
    """Return the error for a source with more faults than its tolerance allows, or None.

    During a run, the tolerance is applied as if at least `FEW_SAMPLES` had been read, so that one early fault does not
    stop it. At the end the share of the rows that were read (`seen`) counts, and one bad sample is always allowed
    (unless the tolerance is 0).
    """
    least = (1.0 if source.tolerance else 0.0) if at_end else source.tolerance * FEW_SAMPLES
    allowed = max(source.tolerance * seen, least)
    for what, found in (("bad samples", bad), ("samples of another length than promised", wrong_lengths)):
        if found > allowed:
            effect = "The run continued with stand-ins" if at_end else "Training would continue with stand-ins"
            return ToleranceError(
                f"source {source.name!r} has {found} {what} among {seen} read; its tolerance of "
                f"{source.tolerance:g} allows {int(allowed)}. {effect}. `overlord sources lint` lists each sample: "
                "correct the files, or raise the source's tolerance."
            )
    return None


def _between(faults: list[Fault], begin: int, end: int) -> list[Fault]:
    return [(row - begin, reason) for row, reason in faults if begin <= row < end]


def rows_at_once(group: Group, wanted: int, most_bytes: int = 0) -> int:
    """Return how many rows to read and measure at once if `wanted` are needed, of CHUNK_BYTES or `most_bytes`."""
    row_bytes = max(group.row_bytes, 1.0)
    most = max(1, min(CHUNK_ROWS, int(max(most_bytes, CHUNK_BYTES) / row_bytes)))
    return min(most, max(wanted, min(AHEAD_ROWS, int(AHEAD_BYTES / row_bytes))))


# -- metadata of measured rows: bytes, images, and the images that are not the first of their sample. Pure. -------


def row_bytes_of(kept: RowBatch, count: int) -> npt.NDArray[np.int64]:
    """Return the bytes that each row holds."""
    total = np.zeros(count, np.int64)
    for column in kept.values():
        total += column.lengths * column.values.itemsize if hasattr(column, "lengths") else 0  # type: ignore[union-attr]
    return total


def media_items(measured: Measured) -> tuple[Pieces | None, Pieces | None]:
    """Return every image, clip and sound as pieces: its placeholders alone, and with the tokens kept around it."""
    if "media_start" not in measured.kept:
        return None, None
    start = ragged_column(measured.kept, "media_start")
    rows = np.repeat(np.arange(len(start)), start.lengths).astype(np.int32)
    first, length = flat(start), flat(ragged_column(measured.kept, "media_length"))
    before, behind = measured.margin
    return Pieces(rows, first, length), Pieces(rows, first - before, length + before + behind)


def fit_context(
    measured: Measured, context_length: int, overlength: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return (delivered tokens, flags) of measured rows, as a loader decides them."""
    return apply_overlength(measured.tokens, media_items(measured)[1], context_length, overlength)


def count_images(meta: MetaArray, images: Pieces) -> None:
    """Count the delivered images; samples with images elsewhere than one at the start get `items` set."""
    kept = images.start.astype(np.int64) + images.length <= meta["tokens"][images.sample]
    sample = images.sample[kept]
    meta["image_tokens"] = np.bincount(sample, images.length[kept], len(meta))
    meta["images"] = np.bincount(sample, minlength=len(meta))
    simple = (meta["images"] <= 1) & (np.bincount(sample, images.start[kept], len(meta)) == 0)
    meta["items"] = ~simple


def listed_items(meta: MetaArray, parts: list[tuple[MetaArray, Chunk]]) -> npt.NDArray[np.int32] | None:
    """Return the list of images of samples with `items` set, and make their metadata point into it."""
    if not meta["items"].any():
        return None
    found: list[npt.NDArray[np.int32]] = []
    for part, chunk in parts:
        rows = np.flatnonzero(part["items"])
        start, length = ragged_column(chunk.kept, "media_start"), ragged_column(chunk.kept, "media_length")
        # Images are in the order of their tokens, so those that the overlength policy leaves out are the last.
        places = expand_ranges(start.offsets[rows + int(part["offset"][0]) - chunk.offset], part["images"][rows])
        margins = np.broadcast_to(np.array(chunk.margin), (len(places), 2))
        found.append(np.concatenate([np.stack([start.values[places], length.values[places]], axis=1), margins], axis=1))
    listed = np.flatnonzero(meta["items"])
    meta["items"][listed] = 1 + offsets_of(meta["images"][listed])[:-1]
    return np.concatenate(found).astype(np.int32)
