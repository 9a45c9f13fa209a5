"""Megatron's indexed datasets: `x.bin` holds the tokens of all documents, `x.idx` where each of them is.

The index is a header (magic, version, type of the tokens, counts), the length of every sequence (int32), its place in
the `.bin` (int64), and the first sequence of every document (int64). A row is a document, with one column `tokens`; a
dataset that was split into sentences has several sequences in a document, which are joined. So the lengths of all rows
are known without a look at the tokens. The index is read in slices as rows are reached, and never held.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from overlord.core.ragged import BAD_COLUMN, Kind, Ragged, RowBatch, offsets_of
from overlord.readers.files import StoredFile
from overlord.readers.reader import (
    BlockIndex,
    DamagedFile,
    Int64s,
    RandomBytes,
    blocks_of_sizes,
    missing_column,
    random_bytes,
    read_exactly,
    require_kind,
)

COLUMN = "tokens"
_MAGIC = b"MMIDIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, code of the type, sequences, entries of the document index
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_ROWS_AT_A_TIME = 1 << 18
"""Documents of the index that are checked at once; bounds the memory of indexing."""


class MegatronReader:
    """Reads Megatron's .bin and .idx. In its index, start and stop are numbers of documents."""

    name = "megatron"

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Cut the documents of a file into blocks by their lengths; every entry of its .idx is checked."""
        wrong = next((column for column in columns if column != COLUMN), None)
        if wrong is not None:
            raise missing_column(file.path, wrong, [COLUMN])
        with _DocumentIndex.open(file) as documents:
            starts = range(0, documents.rows, _ROWS_AT_A_TIME)
            return blocks_of_sizes(
                documents.check(at, min(at + _ROWS_AT_A_TIME, documents.rows), file.size) for at in starts
            )

    def stream(
        self,
        file: StoredFile,
        index: BlockIndex,
        block: int,
        *,
        columns: Mapping[str, Kind],
        skip: int,
        batch_rows: int,
        scratch: Path | None,
    ) -> Iterator[RowBatch]:
        """Yield the documents of one block; skipped ones cost nothing."""
        start, stop = int(index.start[block]) + skip, int(index.stop[block])
        with _DocumentIndex.open(file) as documents, file.open() as native:
            holds = f"{documents.dtype.name} numbers"
            for column, wanted in columns.items():
                require_kind(_kind_of(documents.dtype), wanted, path=file.path, column=column, holds=holds)
            tokens = random_bytes(file, native)
            for at in range(start, stop, batch_rows):
                rows = _read(documents, tokens, at, min(at + batch_rows, stop))
                yield {**dict.fromkeys(columns, rows), BAD_COLUMN: np.zeros(len(rows), np.int16)}

    def divides(self, file: StoredFile) -> bool:
        """Return True: blocks are larger than most shuffles."""
        return True

    def seeks(self, file: StoredFile) -> bool:
        """Return True: the index tells where a row is."""
        return True

    def columns(self, file: StoredFile) -> list[str]:
        """Return the only column."""
        return [COLUMN]

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kind of the tokens, by the header of the index."""
        with _DocumentIndex.open(file) as documents:
            return {column: _kind_of(documents.dtype) for column in columns if column == COLUMN}


def _kind_of(dtype: np.dtype[Any]) -> Kind:
    return "float_list" if dtype.kind == "f" else "int_list"


def _read(documents: _DocumentIndex, tokens: RandomBytes, start: int, stop: int) -> Ragged:
    """Return some documents, which lie one behind the other."""
    bounds = documents.bounds(start, stop)
    lengths, places = documents.sequences(int(bounds[0]), int(bounds[-1]))
    offsets = offsets_of(lengths)
    place, count = int(places[0]) if len(places) else 0, int(offsets[-1]) * documents.dtype.itemsize
    return Ragged(np.frombuffer(read_exactly(tokens, place, count), documents.dtype), offsets[bounds - bounds[0]])


@dataclass(frozen=True, slots=True)
class _DocumentIndex:
    """An open .idx: three arrays, of which slices are read."""

    native: pa.NativeFile
    dtype: np.dtype[Any]
    """Type of the tokens."""
    num_sequences: int
    rows: int
    """Number of documents."""
    arrays: tuple[RandomBytes, RandomBytes, RandomBytes]
    """Windows into the file, one for each array: reading one does not lose the window of another."""

    @classmethod
    def open(cls, file: StoredFile) -> _DocumentIndex:
        index = file.beside
        if index is None:
            raise DamagedFile("it has no .idx of the same name beside it, which tells where its documents are")
        native = index.open()
        head = native.read_at(_HEAD.size, 0)
        if len(head) < _HEAD.size:
            raise DamagedFile(f"{index.path} is cut short at byte {len(head)}")
        magic, version, code, sequences, entries = _HEAD.unpack(head)
        if magic != _MAGIC or version != 1 or code not in _TYPES:
            raise DamagedFile(f"{index.path} does not begin like the index of a Megatron dataset of version 1")
        size = _HEAD.size + 12 * sequences + 8 * entries
        if sequences and index.size == size + sequences:
            raise DamagedFile(f"{index.path} has modes of sequences (a multimodal dataset), which are not read")
        if index.size != size:
            raise DamagedFile(f"{index.path} has {index.size} bytes where its header promises {size}")
        windows = tuple(random_bytes(index, native) for _ in range(3))
        return cls(native, np.dtype(_TYPES[code]), sequences, max(0, entries - 1), windows)  # type: ignore[arg-type]

    def __enter__(self) -> _DocumentIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.native.close()

    def bounds(self, start: int, stop: int) -> Int64s:
        """Return the first sequence of documents start..stop, and of the one behind them."""
        at = _HEAD.size + 12 * self.num_sequences
        bounds = self._slice(2, at, np.dtype("<i8"), start, stop + 1)
        if bounds[0] < 0 or bounds[-1] > self.num_sequences or (bounds[1:] < bounds[:-1]).any():
            raise DamagedFile(f"the documents {start} to {stop} of its index are not in order")
        return bounds

    def sequences(self, start: int, stop: int) -> tuple[Int64s, Int64s]:
        """Return the lengths of some sequences in tokens, and where they begin in the .bin."""
        lengths = self._slice(0, _HEAD.size, np.dtype("<i4"), start, stop).astype(np.int64)
        places = self._slice(1, _HEAD.size + 4 * self.num_sequences, np.dtype("<i8"), start, stop)
        return lengths, places

    def check(self, start: int, stop: int, data_bytes: int) -> Int64s:
        """Return the bytes of some documents, after checking that their sequences fill the .bin without gaps.

        Megatron writes them so. A length or a place that was changed by damage does not fit what follows: the next
        sequence, or the end of the file.
        """
        bounds = self.bounds(start, stop)
        if (start == 0 and bounds[0] != 0) or (stop == self.rows and bounds[-1] != self.num_sequences):
            raise DamagedFile(f"its index has {self.num_sequences} sequences, and not all of them belong to a document")
        first, last = int(bounds[0]), int(bounds[-1])
        lengths, places = self.sequences(first, last)
        # Where each of them and what follows must begin by the lengths, and where by the places. What precedes the
        # first one was checked with the documents before.
        places = np.append(places, data_bytes if last == self.num_sequences else self.sequences(last, last + 1)[1])
        begins = offsets_of(lengths)
        begins *= self.dtype.itemsize
        begins += places[0] if first else 0
        wrong = begins != places
        wrong[1:] |= lengths < 0
        if wrong.any():
            at = int(wrong.argmax())
            why = f"sequence {first + at - 1} has {lengths[at - 1]} tokens from byte {places[at - 1]} on" if at else ""
            raise DamagedFile(
                f"by its index, {why or 'it begins at byte 0'}, and what follows begins at byte {places[at]}: a length "
                "or a place is damaged, or the two files do not belong together"
            )
        return np.diff(begins[bounds - first])

    def _slice(self, array: int, at: int, dtype: np.dtype[Any], start: int, stop: int) -> npt.NDArray[Any]:
        data = self.arrays[array].read(at + start * dtype.itemsize, (stop - start) * dtype.itemsize)
        if len(data) < (stop - start) * dtype.itemsize:
            raise DamagedFile("its index is cut short")
        return np.frombuffer(data, dtype)
