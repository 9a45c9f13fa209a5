"""The files of one source: listed once, indexed when reached, streamed block by block; and their length sidecars.

An I/O error is retried from the row that was reached. A file that changed, or cannot be read, raises: it never changes
the stream.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overlord.core.order import FileBlocks
from overlord.core.ragged import (
    BAD_COLUMN,
    NOT_PARSED,
    NOT_UTF8,
    NOT_WHOLE,
    TOO_LARGE,
    Kind,
    RowBatch,
    SharedMemory,
    concat_rows,
    gather_columns,
    num_rows,
    offsets_of,
    slice_rows,
    take_rows,
)
from overlord.core.samples import FILE_SHIFT, SampleId
from overlord.errors import OverlordError, ReaderError, SourceError, SpecError
from overlord.job.specs import MAX_ROW_BYTES, Source
from overlord.readers.arrow import ArrowReader
from overlord.readers.dataset_card import split_files
from overlord.readers.files import StoredFile, format_of_name, list_files, verify_unchanged
from overlord.readers.index import IndexCache, build_indices, file_identity, read_array, write_array
from overlord.readers.jsonl import JsonlReader, LineReader, ParseLines, why_no_row
from overlord.readers.mds import MdsReader
from overlord.readers.megatron_files import MegatronReader
from overlord.readers.parquet import ParquetReader
from overlord.readers.reader import BlockIndex, Reader, Rows, missing_column, reason_of, unreadable
from overlord.readers.remote.range_files import ahead_queue
from overlord.readers.spill import HeldRows, SpilledBlock, SpilledBlocks, SpilledFiles, SpillPlace, spill_rows
from overlord.readers.tar_shards import TarReader
from overlord.readers.unpacked import UnpackedFile, UnpackedFiles
from overlord.storage import StorageOptions

logger = logging.getLogger("overlord")
FORMATS: dict[str, Reader] = {
    "parquet": ParquetReader(),
    "jsonl": JsonlReader(),
    "tar": TarReader(),
    "arrow": ArrowReader(),
    "megatron": MegatronReader(),
    "mds": MdsReader(),
}
"""The formats whose readers are imported at once."""
HOOKED = {
    "tfrecord": "overlord.readers.hooked.tfrecord:TfrecordReader",
    "arrayrecord": "overlord.readers.hooked.array_record:ArrayRecordReader",
    "litdata": "overlord.readers.hooked.litdata_chunks:LitdataReader",
    "lance": "overlord.readers.hooked.lance_datasets:LanceReader",
}
"""Those that are found as the user's own are, "module:Class", and imported when a source has them."""
_ATTEMPTS = 4
"""One attempt and three retries."""
_FIRST_PAUSE_S = 0.25
_KINDS_FILES = 8
"""How many files are searched for a column before it counts as missing."""
_KEPT_INDICES = 16
_SORT_BATCH_ROWS = 8192


class Join(Protocol):
    """Columns that come from another dataset; `readers/join.py` has them."""

    def kinds(self, own: dict[str, Kind]) -> dict[str, Kind]:
        """Return the kinds of all columns, given those of the source's own."""
        ...

    def prepare(self) -> None:
        """Check what concerns all rows."""
        ...

    def attach(self, batch: RowBatch, numbers: npt.NDArray[np.int64]) -> RowBatch:
        """Return rows, given by their numbers too, with the joined columns."""
        ...

    @property
    def row_bytes(self) -> int:
        """About how many bytes they add to a row."""
        ...

    def listing_digest(self) -> str:
        """Return a hash of the other dataset's files."""
        ...

    def forget(self) -> None:
        """Drop what is held in memory."""
        ...


class SourceFiles:
    """The files of one source and how to read them. Threads may share it.

    Args:
        name: The source's name, for messages.
        paths: Files, folders, globs or URLs; see `list_files`.
        format: One of `FORMATS` or `HOOKED`, a reader as "module:Class", or None to go by the names of the files.
        columns: The columns to read; None for all.
        config: Configuration of a dataset as on the Hub; None for its default one.
        split: Split of such a dataset; None for the only one.
        storage_options: How to reach a remote store.
        max_row_bytes: Lines and samples of tar shards with more are bad rows.
        cache: Where the indices of the files are kept, and row groups too large to be held in memory.
        isolate: Wraps the reader so that it runs in other processes, which a damaged file may crash; None reads in
            the caller.
        join: Makes the columns that come from another dataset, given these files with their own columns.
        pause: Sleeps between attempts after an I/O error.

    Raises:
        SpecError: A path, an option or the format is wrong.
        SourceError: Nothing is found.
    """

    join: Join | None
    """Adds the columns that come from another dataset; None where there are none."""

    def __init__(
        self,
        name: str,
        paths: Sequence[str],
        *,
        cache: IndexCache,
        format: str | None = None,
        columns: Sequence[str] | None = None,
        config: str | None = None,
        split: str | None = None,
        storage_options: StorageOptions | None = None,
        max_row_bytes: int = MAX_ROW_BYTES,
        isolate: Callable[[Reader], Reader] | None = None,
        join: Callable[[SourceFiles], Join] | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = name
        suffixes = getattr(reader_of(format), "suffixes", ()) if format is not None else ()
        choose = functools.partial(split_files, config=config, split=split)
        listed = list_files(paths, storage_options, format=format, suffixes=suffixes, choose=choose)
        self.files: list[StoredFile] = cache.with_ranges(listed, max_row_bytes=max_row_bytes)
        self.format = format_of(self.files, format)
        self._plain_reader: Reader = reader_of(self.format)
        self._reader = isolate(self._plain_reader) if isolate else self._plain_reader
        self._cache = cache
        self._pause = pause
        self._hold_nothing(columns)
        if join is not None:
            self.join = join(copy.copy(self))

    def _hold_nothing(self, columns: Sequence[str] | None) -> None:
        """Begin without anything in memory, and with these columns to read; None for all."""
        self._wanted = list(columns) if columns is not None else None
        self._lock = threading.Lock()
        self._kinds: dict[str, Kind] | None = None
        self._indices: OrderedDict[int, BlockIndex] = OrderedDict()
        self._spilled = SpilledBlocks()
        self._spilled_files = SpilledFiles()
        self._unpacked = UnpackedFiles()
        self.join = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all files as they are stored."""
        return sum(file.size for file in self.files)

    def place(self, sample: SampleId) -> str:
        """Return the file and row of a sample, in brackets behind what a message says of it."""
        file = self.files[sample.file].path if sample.file < len(self.files) else f"file {sample.file}"
        return f" (row {sample.row_in_file} of {file})"

    def columns(self) -> list[str]:
        """Return the columns that the first file has."""
        with _parser_errors(self.files[0]) as file:
            return self._reader.columns(file)

    def kinds(self) -> dict[str, Kind]:
        """Return the kind of each column that is read: the same for every batch of every file."""
        return self._own_kinds() if self.join is None else self.join.kinds(self._own_kinds())

    def _own_kinds(self) -> dict[str, Kind]:
        """Return the kinds of the columns that are read from these files.

        JSON has no schema, so the first files are searched in turn; a column that is null or an empty list in
        all of their heads counts as bytes.

        Raises:
            SourceError: A wanted column is in none of them.
        """
        with self._lock:
            if self._kinds is None:
                self._kinds = self._decide_kinds()
            return self._kinds

    def blocks(self, file_number: int) -> FileBlocks:
        """Return the blocks of a file; it is indexed now if it is not in the cache."""
        return self._file_blocks(file_number, self._index(file_number))

    def first_blocks(self, file_number: int) -> FileBlocks:
        """Return the blocks of a file, as far as they are known without unpacking more of it than its first one."""
        if not self._is_unpacked(file_number):
            return self.blocks(file_number)
        with self._lock:
            known = self._indices.get(file_number)
        known = known or self._cache.find(self.files[file_number], self._reader, list(self._own_kinds()))
        return self._found_blocks(file_number, 1) if known is None else self._file_blocks(file_number, known)

    def _found_blocks(self, file_number: int, count: int) -> FileBlocks:
        with _parser_errors(self.files[file_number]):
            index, complete = self._unpacked_file(file_number).blocks(count)
        found = self._file_blocks(file_number, index)
        return (
            found if complete else dataclasses.replace(found, more=functools.partial(self._found_blocks, file_number))
        )

    def indexed(self, file_number: int) -> FileBlocks | None:
        """Return the blocks of a file if it is in the cache, else None; the file is not read."""
        index = self._cache.find(self.files[file_number], self._reader, list(self._own_kinds()))
        return None if index is None else self._file_blocks(file_number, index)

    def prepare(self, file_numbers: Sequence[int]) -> None:
        """Index the files that are not in the cache, in parallel; not those that are indexed as they are unpacked."""
        with self._lock:
            unknown = [number for number in file_numbers if number not in self._indices]
        files = [self.files[number] for number in unknown if not self._is_unpacked(number)]
        if len(files) < 2:
            return
        columns = list(self._own_kinds())
        missing = [file for file in files if self._cache.find(file, self._reader, columns) is None]
        if len(missing) > 1:
            build_indices(self._cache, missing, self._reader, columns)

    @property
    def memory(self) -> SharedMemory | None:
        """Where rows that go to workers are copied to."""
        return self._cache.memory

    def hold(self, rows: RowBatch) -> HeldRows:
        """Hold the rows of a shuffle group, in memory or on disk."""
        return self._cache.groups.hold(rows)

    def forget(self) -> None:
        """Drop indices in memory (they stay in the cache folder) and spilled blocks."""
        with self._lock:
            self._indices.clear()
        self._spilled.forget()
        self._spilled_files.forget()
        self._unpacked.forget()
        if self.join is not None:
            self.join.forget()

    def spills_parts(self, file_number: int) -> bool:
        """Return whether a block of a file that is read in parts must first be unpacked to disk."""
        if self._is_unpacked(file_number):
            return True
        blocks = range(len(self._index(file_number).rows))
        divides = self._reader.divides(self.files[file_number])
        return divides and not all(self._reaches(file_number, block) for block in blocks)

    def _reaches(self, file_number: int, block: int) -> bool:
        """Return whether rows of a block are read without unpacking all of it; a remote record batch is read whole."""
        local = self.files[file_number].is_local or self.format != "arrow"
        return local and bool(self._index(file_number).seeks[block])

    @property
    def fetches(self) -> bool:
        """Whether there are remote files, of which blocks can be fetched ahead."""
        ranges = self._cache.ranges
        return ranges is not None and ranges.is_on and any(file.remote is not None for file in self.files[:1])

    def begin_epoch(self) -> None:
        """Say that all files are read from now on: what the cache has of them is needed."""
        if self._cache.ranges is not None:
            self._cache.ranges.keep_for([file.remote for file in self.files if file.remote is not None], begins=True)

    def fetch_ahead(self, files: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        """Begin to fetch blocks of remote files that will be read soon, in the background.

        What cannot be fetched is no error here: it is one when it is read.
        """
        wanted: dict[int, list[int]] = {}
        for file, block in zip(files.tolist(), blocks.tolist(), strict=True):
            if self.files[file].remote is not None:
                wanted.setdefault(file, []).append(block)

        def begin(number: int, blocks: Sequence[int]) -> None:
            # The blocks of a compressed file are found while it is unpacked; its beginning is fetched.
            index = BlockIndex.of([]) if self._is_unpacked(number) else self._index(number)
            file, columns = self.files[number], list(self._own_kinds())
            remote_ahead = getattr(self._reader, "fetch_ahead", None)
            if remote_ahead is not None:
                remote_ahead(file, index, blocks, columns)
            else:
                begin_to_fetch(self._reader, file, index, blocks, columns)

        for number, numbers in wanted.items():
            ahead_queue().plan(lambda number=number, numbers=numbers: begin(number, numbers))  # type: ignore[misc]

    def row_base(self, file_number: int, block: int) -> int:
        """Return the row of the file at which a block begins."""
        return int(self._index_to(file_number, block).first_row[block])

    def stream(
        self, file_number: int, block: int, *, skip: int = 0, stop: int | None = None, batch_rows: int
    ) -> Iterator[RowBatch]:
        """Yield the rows of one block front to back after skipping `skip`, at most `batch_rows` at a time.

        With `stop`, the row to end before, a block is read in parts: where its reader reaches no row without those
        before it, it is decoded once for all of them and spilled to disk. An I/O error is retried from the row that was
        reached; rows are never lost or duplicated.

        Raises:
            ReaderError: The file has changed, is gone, or cannot be read after four attempts; or the disk of the
                cache is full.
        """
        if self.join is not None:
            number = (file_number << FILE_SHIFT) + self.row_base(file_number, block) + skip
            for batch in self._stream_own(file_number, block, skip, stop, batch_rows):
                yield self.join.attach(batch, np.arange(number, number + num_rows(batch)))
                number += num_rows(batch)
            return
        yield from self._stream_own(file_number, block, skip, stop, batch_rows)

    def _stream_own(
        self, file_number: int, block: int, skip: int, stop: int | None, batch_rows: int
    ) -> Iterator[RowBatch]:
        file = self.files[file_number]
        end = int(self._index_to(file_number, block).rows[block]) if stop is None else stop
        # `at` is the next row; every batch moves it on and resets the attempts, so that a retry begins where the stream
        # was, and only failures without any progress between them add up.
        at, attempt = skip, 0
        while at < end:
            try:
                for batch in self._attempt(file_number, block, at, stop, batch_rows):
                    at += num_rows(batch)
                    attempt = 0
                    yield batch
                break
            except OverlordError:
                raise
            except Exception as error:  # a parser may raise anything on damaged bytes
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise self._lost(file, block, at, reason_of(error)) from error
                self._pause(_FIRST_PAUSE_S * 2**attempt)
        if at != max(end, skip):
            raise self._lost(file, block, at, f"its index promises {end} rows and {at} were found")

    def _attempt(
        self, file_number: int, block: int, start: int, stop: int | None, batch_rows: int
    ) -> Iterator[RowBatch]:
        """Yield rows of a block until something fails.

        A whole block, or a part of one whose rows are reached, is read directly, a compressed file as it is unpacked.
        Otherwise the first part decodes the block once into a spill, from which all parts are read.
        """
        if self._is_unpacked(file_number):
            yield from self._read_unpacked(file_number, block, start, stop, batch_rows)
            return
        file, index, reader = self.files[file_number], self._index(file_number), self._reader

        def decode(count: int, skip: int, scratch: Path | None) -> Rows:
            columns = self._own_kinds()
            yield from reader.stream(file, index, block, columns=columns, skip=skip, batch_rows=count, scratch=scratch)

        spilled = self._spilled.find((file_number, block)) if stop is not None else None
        if spilled is None:
            verify_unchanged(file)
            if stop is None:
                yield from decode(batch_rows, start, self._cache.scratch)
                return
            if self._reaches(file_number, block):
                rows = rows_of_block(reader, file, index, block, columns=self._own_kinds(), start=start, stop=stop)
                for at in range(0, num_rows(rows), batch_rows):
                    yield slice_rows(rows, at, min(at + batch_rows, num_rows(rows)))
                return
            size = int(index.bytes[block])
            place = SpillPlace(self._cache.scratch, f"block {block} of {file.path}", size)
            count = spill_rows(size / max(1, int(index.rows[block])))
            spilled = self._spilled.add((file_number, block), lambda: decode(count, 0, None), place)
        if spilled is not None:
            yield from spilled.rows(start, stop or 0, batch_rows)

    def _read_unpacked(
        self, file_number: int, block: int, start: int, stop: int | None, batch_rows: int
    ) -> Iterator[RowBatch]:
        unpacked = self._unpacked_file(file_number)
        index, _ = unpacked.blocks(block + 1)
        plain, end = unpacked.plain(int(index.stop[block])), int(index.rows[block]) if stop is None else stop
        batches = self._plain_reader.stream(
            plain, index, block, columns=self._own_kinds(), skip=start, batch_rows=batch_rows, scratch=None
        )
        try:
            yield from _first_rows(batches, end - start)  # type: ignore[arg-type]
        finally:
            unpacked.release()

    def _is_unpacked(self, file_number: int) -> bool:
        """Return whether a file is unpacked front to back as far as it is needed."""
        return self.files[file_number].compression is not None and hasattr(self._plain_reader, "find_blocks")

    def _unpacked_file(self, file_number: int) -> UnpackedFile:
        file = self.files[file_number]

        def new() -> UnpackedFile:
            found: Any = reader_of(self.format)
            find = functools.partial(found.find_blocks, file, columns=list(self._own_kinds()))
            return UnpackedFile(file, find, SpillPlace(self._cache.scratch, file.path, file.size))

        return self._unpacked.of(file_number, new)

    def _index_to(self, file_number: int, block: int) -> BlockIndex:
        """Return an index that has a block."""
        if not self._is_unpacked(file_number):
            return self._index(file_number)
        with _parser_errors(self.files[file_number]):
            return self._unpacked_file(file_number).blocks(block + 1)[0]

    def take(self, numbers: npt.NDArray[np.int64]) -> RowBatch:
        """Return rows by their numbers (file << 32 | row), in this order; a number may come twice.

        In a format that cannot seek, the files of these rows are decoded once and spilled to disk as a whole.

        Raises:
            ReaderError: As of `stream`.
        """
        wanted, places = np.unique(numbers, return_inverse=True)
        files = wanted >> FILE_SHIFT
        parts: list[RowBatch] = []
        for file in np.unique(files).tolist():
            rows = wanted[files == file] & ((1 << FILE_SHIFT) - 1)
            if self._reader.seeks(self.files[file]):
                # Rows that follow each other are read together.
                runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
                parts += [part for run in runs for part in self._run_of_rows(file, int(run[0]), int(run[-1]) + 1)]
            else:
                parts.append(self._spilled_file(file).take(rows))
        found = take_rows(concat_rows(parts), places)
        return found if self.join is None else self.join.attach(found, numbers)

    def _run_of_rows(self, file_number: int, start: int, stop: int) -> Iterator[RowBatch]:
        index = self._index(file_number)
        while start < stop:
            block = int(np.searchsorted(index.first_row, start, side="right")) - 1
            first = int(index.first_row[block])
            end = min(stop, first + int(index.rows[block]))
            yield from self._stream_own(file_number, block, start - first, end - first, end - start)
            start = end

    def _spilled_file(self, file_number: int) -> SpilledBlock:
        index = self._index(file_number)
        size, rows = int(index.bytes.sum()), max(1, int(index.rows.sum()))
        place = SpillPlace(self._cache.scratch, self.files[file_number].path, size)
        return self._spilled_files.rows(
            file_number, lambda: self._all_own_rows(file_number, spill_rows(size / rows)), place
        )

    def all_rows(self, file_number: int, batch_rows: int) -> Rows:
        """Yield all rows of a file, block by block."""
        for block in range(len(self._index(file_number).rows)):
            yield from self.stream(file_number, block, batch_rows=batch_rows)

    def _all_own_rows(self, file_number: int, batch_rows: int) -> Rows:
        for block in range(len(self._index(file_number).rows)):
            yield from self._stream_own(file_number, block, 0, None, batch_rows)

    def rows_before(self) -> npt.NDArray[np.int64]:
        """Return how many rows are in the files before each file, and in all; indexes all files."""
        self.prepare(range(len(self.files)))
        return offsets_of([int(self._index(number).rows.sum()) for number in range(len(self.files))])

    def table(self, what: Sequence[object], build: Callable[[], npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Return an array of whole numbers that follows from these files, from the cache or built now."""
        identities = [part for file in self.files for part in file_identity(file)]
        return self._cache.table([*what, self.format, *identities], build)

    def with_columns(self, columns: Sequence[str]) -> SourceFiles:
        """Return the same files with other columns to read."""
        other = copy.copy(self)
        other._hold_nothing(columns)
        return other

    def unparsed(self) -> tuple[SourceFiles, ParseLines] | None:
        """Return the same files with rows that are not parsed, and what parses them; None where that is not apart."""
        if self.format != "jsonl" or self.join is not None:
            return None
        parse, other = ParseLines(self.kinds()), copy.copy(self)  # both have the same indices and unpacked files
        other._reader = other._plain_reader = LineReader()
        other._spilled, other._spilled_files = SpilledBlocks(), SpilledFiles()
        return other, parse

    def check_sortable(self, order_by: str) -> None:
        """Refuse a column that rows cannot be ordered by, as far as its type tells.

        Raises:
            SourceError: It is missing, or does not hold numbers.
        """
        column = order_by.removeprefix("-")
        try:
            kind = self.with_columns([column]).kinds()[column]
        except SourceError as error:
            raise SourceError(f"source {self.name!r}: order_by={order_by!r}: {error}") from error
        if kind not in ("int", "float"):
            raise SourceError(
                f"source {self.name!r}: order_by={order_by!r} holds {kind!r} values, and rows are ordered by numbers; "
                "they would have no order. Name a column of whole numbers or fractions."
            )

    def sorted_rows(self, order_by: str) -> npt.NDArray[np.int64]:
        """Return the numbers (file << 32 | row) of all rows, ordered by a column; ties by file and row.

        The column of every file is read once; the result is kept in the cache, and mapped. Rows that are damaged as a
        whole have no value and come last.

        Raises:
            SourceError: The column is missing, or a row has no number in it.
        """
        return self.table(["sorted rows", order_by], lambda: self._sort_rows(order_by))

    def _sort_rows(self, order_by: str) -> npt.NDArray[np.int64]:
        column, source = order_by.removeprefix("-"), self.with_columns([order_by.removeprefix("-")])
        values: list[npt.NDArray[Any]] = []
        numbers: list[npt.NDArray[np.int64]] = []
        damaged: list[npt.NDArray[np.int64]] = []
        for file in range(len(self.files)):
            row = file << FILE_SHIFT
            for batch in source.all_rows(file, _SORT_BATCH_ROWS):
                found, marks = np.asarray(batch[column]), np.asarray(batch[BAD_COLUMN])
                rows = row + np.arange(len(marks))
                unread = np.isin(marks, (NOT_PARSED, NOT_WHOLE, TOO_LARGE, NOT_UTF8))
                wrong = ~unread & ((marks != 0) | (np.isnan(found) if found.dtype.kind == "f" else False))
                if wrong.any():
                    first = int(rows[wrong][0]) - (file << FILE_SHIFT)
                    raise SourceError(
                        f"source {self.name!r}: order_by={order_by!r}: row {first} of "
                        f"{self.files[file].path} has no number in this column (null, NaN or another type); the row "
                        "would have no place. Write a number into every row, or name another column."
                    )
                values.append(found[~unread])
                numbers.append(rows[~unread])
                damaged.append(rows[unread])
                row += len(marks)
        if not values:
            return np.empty(0, np.int64)
        # Falling values are sorted from behind, so that ties stay in the order of the files.
        joined, falling = np.concatenate(values), order_by.startswith("-")
        order = np.argsort(joined[::-1] if falling else joined, kind="stable")
        order = len(joined) - 1 - order[::-1] if falling else order
        return np.concatenate([np.concatenate(numbers)[order], *damaged])

    def pick(
        self, file_numbers: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
    ) -> RowBatch | None:
        """Return rows of blocks that are read in parts, in any order: the file, the block and the row in it of each.

        None where parts cannot be looked up in spilled blocks; `stream` reads them. Where a part is a row or two, a
        stream for each would cost more than its rows.

        Raises:
            As `stream`.
        """
        if self.join is not None:
            return None
        places = file_numbers << 32 | blocks
        order = np.argsort(places, kind="stable")
        found, first = np.unique(places[order], return_index=True)
        parts: list[tuple[SpilledBlock, npt.NDArray[np.int64]]] = []
        for place, chosen in zip(found.tolist(), np.split(order, first[1:]), strict=True):
            spilled = self._spilled_block(place >> 32, place & 0xFFFFFFFF, int(rows[chosen[0]]))
            if spilled is None:
                return None
            parts.append((spilled, chosen))
        columns = parts[0][0].columns if parts else None
        if columns is None or any(block.columns != columns for block, _ in parts):
            return None
        begin, sizes = np.empty((2, len(columns), len(rows)), np.int64)
        try:
            located = [(block.locate(rows[chosen], chosen, begin, sizes), chosen) for block, chosen in parts]
            return gather_columns(columns, located, begin, sizes, self.memory)
        finally:
            for block, _ in parts:
                block.release()

    def _spilled_block(self, file_number: int, block: int, row: int) -> SpilledBlock | None:
        """Return a block from which parts are read, decoded now if it has to be; None where it needs no spill."""
        found = self._spilled.find((file_number, block))
        if self._is_unpacked(file_number):
            return None
        if found is None and self._reader.divides(self.files[file_number]) and not self._reaches(file_number, block):
            for _ in self.stream(file_number, block, skip=row, stop=row + 1, batch_rows=1):
                pass  # reading one row decodes the block, with the usual retries
            found = self._spilled.find((file_number, block))
        return found

    def listing_digest(self) -> str:
        """Return a hash of the names and sizes of the files, on which the stream depends.

        Names are relative to the folder that all files share, so that a source may be moved; times do not count.
        """
        parts = [file.location.strip("/").split("/") for file in self.files]
        shared = 0
        while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
            shared += 1
        digest = hashlib.blake2b(digest_size=16)
        names = sorted(
            ("/".join(p[shared:]), file.size, file.beside.size if file.beside else None)
            for p, file in zip(parts, self.files, strict=True)
        )
        for name, size, beside in names:
            sizes = f"{size}" if beside is None else f"{size}+{beside}"
            digest.update(f"{len(name)}:{name}:{sizes};".encode("utf-8", "surrogateescape"))
        if self.join is not None:
            digest.update(self.join.listing_digest().encode())
        return digest.hexdigest()

    def _file_blocks(self, file_number: int, index: BlockIndex) -> FileBlocks:
        more = 0 if self.join is None else self.join.row_bytes
        divides = self._reader.divides(self.files[file_number])
        unpacked = divides and (self._is_unpacked(file_number) or not index.seeks.all())
        return FileBlocks(index.rows, index.bytes + more * index.rows, divides, unpacked)

    def _index(self, file_number: int) -> BlockIndex:
        with self._lock:
            if file_number in self._indices:
                self._indices.move_to_end(file_number)
                return self._indices[file_number]
        index = self._cache.index(self.files[file_number], self._reader, list(self._own_kinds()))
        with self._lock:
            self._indices[file_number] = index
            if len(self._indices) > _KEPT_INDICES:
                self._indices.popitem(last=False)
        return index

    def _decide_kinds(self) -> dict[str, Kind]:
        wanted = self.columns() if self._wanted is None else self._wanted
        seen: dict[str, Kind | None] = {}
        for file in self.files[:_KINDS_FILES]:
            with _parser_errors(file):
                found = self._reader.kinds(file, wanted)
            seen.update((c, k) for c, k in found.items() if seen.get(c) is None)
            if all(seen.get(column) is not None for column in wanted):
                break
        if not seen and not self.columns():
            looked_at = self.files[:_KINDS_FILES] if self.format == "jsonl" else []
            why = next(filter(None, map(why_no_row, looked_at)), None)
            if why is not None:
                named = format_of_name(self.files[0].path)
                other = f", or set format to {named!r}, as the name of the file says"
                raise SourceError(
                    f"source {self.name!r}: no row can be read from {self.files[0].path}: {why}; the source would have "
                    f"no samples. Write it as JSON lines{'' if named in (None, self.format) else other}."
                )
            raise SourceError(
                f"source {self.name!r} has no rows in {self.files[0].path} or the files behind it; the mixture would "
                "wait for it for ever. Remove the source or correct its path."
            )
        missing = next((column for column in wanted if column not in seen), None)
        if missing is not None:
            raise SourceError(f"source {self.name!r}: {missing_column(self.files[0].path, missing, self.columns())}")
        return {column: seen[column] or "bytes" for column in wanted}

    def _lost(self, file: StoredFile, block: int, row: int, reason: str) -> ReaderError:
        return ReaderError(
            f"source {self.name!r}: {file.path} cannot be read at row {row} of block {block}: {reason}; "
            "going on without it would change the stream. Restore the file or the connection to it, and "
            "start again from the last checkpoint."
        )


class NoFiles(SourceFiles):
    """The files of a source that was removed: none. The source keeps its number, and nothing is read."""

    def __init__(self, name: str, format: str | None, cache: IndexCache) -> None:
        self.name = name
        self.files = []
        self.format = format or "removed"
        self._cache = cache
        self._hold_nothing(())
        self._kinds = {}

    def listing_digest(self) -> str:
        """Return a constant: the files may be gone."""
        return "removed"


@functools.cache
def reader_of(format: str) -> Reader:
    """Return the reader of a format: of `FORMATS` or `HOOKED`, or the user's own class, written "module:Class".

    The class is called without arguments, and its name is the format, so that indices of other readers are not taken
    for its own.

    Raises:
        SpecError: There is no such format, the module cannot be imported, or its class is no reader.
    """
    if format in FORMATS:
        return FORMATS[format]
    module, colon, name = HOOKED.get(format, format).partition(":")
    if not colon:
        raise SpecError(
            f"format={format!r} is not a format; the files could not be read. Set format= to one of "
            f"{', '.join(map(repr, (*FORMATS, *HOOKED)))}, or to a reader of your own as 'module:Class'."
        )
    try:
        reader = getattr(importlib.import_module(module), name)()
        reader.name = format
    except Exception as error:  # whatever the user's module raises when it is imported
        raise SpecError(
            f"format={format!r}: the reader cannot be made ({type(error).__name__}: {reason_of(error)}); the files "
            "could not be read. Give the module as `import` takes it and a class in it that needs no arguments, and "
            "see that the module is installed, or beside the script that launches."
        ) from error
    wanted = ("index", "stream", "divides", "seeks", "columns", "kinds")
    missing = [method for method in wanted if not callable(getattr(reader, method, None))]
    if missing:
        raise SpecError(
            f"format={format!r}: the class has no {', '.join(missing)}; it cannot read files. Give it all methods of "
            "overlord.readers.reader.Reader; overlord.testing.check_reader tries them."
        )
    return reader


def format_of(files: Sequence[StoredFile], declared: str | None) -> str:
    """Return the format of a source: the declared one, or the one that the names of its files imply.

    Raises:
        SpecError: The declared format does not exist.
        SourceError: The names imply no format, or several.
    """
    choice = f"Set format= to one of {', '.join(map(repr, (*FORMATS, *HOOKED)))}"
    if declared is not None:
        return reader_of(declared).name
    found = format_of_name(files[0].path)
    if found is None:
        tables = files[0].path.lower().endswith((".csv", ".tsv"))
        raise SourceError(
            f"the name of {files[0].path} does not say which format it has; it could not be read. "
            + ("CSV and TSV are not read: write it as Parquet or JSON lines." if tables else f"{choice}.")
        )
    for file in files:
        other = format_of_name(file.path)
        if other != found:
            raise SourceError(
                f"{files[0].path} is {found} but {file.path} is {other or 'of no known format'}; a source "
                f"has one format. {choice}, or narrow the source's paths with a glob."
            )
    return found


@contextlib.contextmanager
def _parser_errors(file: StoredFile) -> Iterator[StoredFile]:
    """Turn errors of a parser, which may raise anything on damaged bytes, into SourceError."""
    try:
        yield file
    except OverlordError:
        raise
    except Exception as error:
        raise unreadable(file, reason_of(error)) from error


def begin_to_fetch(
    reader: Reader, file: StoredFile, index: BlockIndex, blocks: Sequence[int], columns: Sequence[str]
) -> None:
    """Begin to fetch blocks of a remote file into the cache, where its reader knows their bytes before it reads."""
    ranges = getattr(reader, "ranges", None)
    if ranges is not None and file.remote is not None and file.ranges is not None:
        spans = [span for block in blocks for span in ranges(file, index, block, columns)]
        ahead_queue().put(file.remote, file.ranges, spans)


def rows_of_block(
    reader: Reader,
    file: StoredFile,
    index: BlockIndex,
    block: int,
    *,
    columns: Mapping[str, Kind],
    start: int,
    stop: int,
) -> RowBatch:
    """Return rows start .. stop of a block that seeks."""
    read = getattr(reader, "rows", None)
    if read is not None:
        return read(file, index, block, columns=columns, start=start, stop=stop)  # type: ignore[no-any-return]
    batches = reader.stream(file, index, block, columns=columns, skip=start, batch_rows=stop - start, scratch=None)
    return concat_rows(list(_first_rows(batches, stop - start)))  # type: ignore[arg-type]


def _first_rows(batches: Rows, count: int) -> Iterator[RowBatch]:
    with contextlib.closing(batches):
        for batch in batches:
            yield slice_rows(batch, 0, min(count, num_rows(batch)))
            count -= num_rows(batch)
            if count <= 0:
                break


# Length sidecars: token counts of a source's rows, written by a one-off pass and memory-mapped from then on. A sidecar
# belongs to one version of a file, one sample spec and one tokenizer: its name is the hash of all three.


class LengthSidecars:
    """A folder of sidecars."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open_all(self, source: Source, files: SourceFiles, tokenizer_digest: str) -> list[npt.NDArray[np.int32]]:
        """Return the lengths of every file of a source, memory-mapped."""
        paths = [self._path(source, files, number, tokenizer_digest) for number in range(len(files.files))]
        were_there = [path.exists() for path in paths]  # before reading: another process may write one in between
        tables = [read_array(path, np.int32) for path in paths]
        missing = [number for number, table in enumerate(tables) if table is None]
        damaged = [str(paths[number]) for number in missing if were_there[number]]
        if damaged:
            logger.warning(
                "%d length sidecars are damaged (the first is %s); they count as missing", len(damaged), damaged[0]
            )
        if missing:
            raise SourceError(
                f"source {source.name!r}: lengths='sidecar', but {len(missing)} of {len(paths)} files have none for "
                f"this tokenizer (the first is {files.files[missing[0]].path!r}); no sample could be planned. Write "
                "them once with `overlord sources measure JOB`, or leave lengths out to tokenize on read."
            )
        return [table[0] for table in tables if table is not None]

    def write(
        self,
        source: Source,
        files: SourceFiles,
        number: int,
        tokenizer_digest: str,
        lengths: npt.NDArray[np.int32],
    ) -> None:
        """Write the lengths of one file; the sidecar appears completely or not at all."""
        write_array(self._path(source, files, number, tokenizer_digest), lengths.astype(np.int32)[None])

    def _path(self, source: Source, files: SourceFiles, number: int, tokenizer_digest: str) -> Path:
        file = files.files[number]
        identity = (file.location, file.size, file.mtime_ns, source.sample.model_dump_json(), tokenizer_digest)
        return self._folder / f"{hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()}.lengths"
