"""ArrayRecord, as Grain and TensorFlow Datasets write it, read by the library `array-record` (extra `array-record`).

A record is a `tf.train.Example`, or anything else, which is then the column `record`. Any record is reached at once; a
block is a run of records of about 1 MiB. The library decodes natively and opens paths, so files are on this host's
disks, and are read in reader processes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from overlord.core.ragged import Kind, RowBatch, offsets_of
from overlord.errors import SourceError, pip_install
from overlord.readers.files import StoredFile
from overlord.readers.hooked.examples import RECORD, Bytes, example_columns, example_rows, require_features
from overlord.readers.index import file_identity
from overlord.readers.reader import BLOCK_BYTES, HEAD_ROWS, BlockIndex, DamagedFile, Int64s, SeekableReader

_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # no threads, and nothing is read ahead
_BUFFER_BYTES = 16 << 10
_END_BYTES = 64 << 10
"""The end of a file says where its records are, and takes a block of its own."""
_KEPT_FILES, _KEPT_RECORDS = 8, 1_000_000
_kept: dict[tuple[object, ...], Any] = {}
"""Open files of this process that no stream uses, the longest unused first. To open one reads where all of its records
are, which takes longer than a block of small records; held, it takes 8 bytes a record."""
_kept_lock = threading.Lock()


class ArrayRecordReader(SeekableReader):
    """Reads ArrayRecord files. In its index, start and stop are numbers of records; bytes are those on disk."""

    name = "arrayrecord"
    native = True

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Cut the records of a file into blocks of about one size."""
        with _opened(file) as records:
            count = records.num_records()
        require_features(_head(file), columns, file.path)
        size = max(1, file.size - _END_BYTES)
        rows = max(1, count * BLOCK_BYTES // size)
        bounds = itertools.pairwise([*range(0, count, rows), count])
        return BlockIndex.of([(stop - start, (stop - start) * size // count, start, stop) for start, stop in bounds])

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
        """Yield the records of one block; skipped ones cost nothing."""
        stop = int(index.stop[block])
        for at in range(int(index.start[block]) + skip, stop, batch_rows):
            with _opened(file) as records:  # each time, so that streams of one file share it
                data, begins, sizes = _joined(records, at, min(at + batch_rows, stop))
            yield example_rows(data, begins, sizes, np.ones(len(sizes), np.bool_), columns)

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the features in the head of the file; `record` where it holds no Examples."""
        return list(_head(file))

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns, by the head of the file."""
        known: dict[str, Kind | None] = {RECORD: "bytes", **_head(file)}
        return {column: known[column] for column in columns if column in known}


def _head(file: StoredFile) -> dict[str, Kind | None]:
    with _opened(file) as records:
        return example_columns(*_joined(records, 0, min(records.num_records(), HEAD_ROWS)))


def _joined(records: Any, start: int, stop: int) -> tuple[Bytes, Int64s, Int64s]:
    """Return some records one behind the other, where they begin, and their sizes."""
    if records.record_index() != start:
        records.seek(start)
    # One by one: of a range, the library hands every few records to a thread, which costs three times as much.
    found: list[bytes] = [records.read() for _ in range(start, stop)]
    if records.record_index() != stop:
        raise DamagedFile(f"it does not have all of the records {start} to {stop}")
    sizes = np.array([len(record) for record in found], np.int64)
    return np.frombuffer(b"".join(found), np.uint8), offsets_of(sizes)[:-1], sizes


@contextlib.contextmanager
def _opened(file: StoredFile) -> Iterator[Any]:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise SourceError(
            f"{file.path} is an ArrayRecord file, which needs the package array-record; it cannot be read. Install it "
            f"(`{pip_install('array-record')}`)."
        ) from error
    if not file.is_local:
        raise SourceError(
            f"{file.path} is an ArrayRecord file on a remote store, and the library reads this host's disks only; "
            "nothing could be read. Mount the store, or copy the files."
        )
    key = file_identity(file)
    with _kept_lock:
        records = _kept.pop(key, None)
    if records is None:
        records = array_record_module.ArrayRecordReader(
            file.location, options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
        )
    try:
        # A file without a readable end has no records for the library.
        if not records.ok() or not records.num_records():
            raise DamagedFile("it has no list of its records at its end: it is cut short, or not an ArrayRecord file")
        yield records
    finally:
        _keep(key, records)


def _keep(key: tuple[object, ...], records: Any) -> None:
    """Hold an open file for the next stream, unless it is damaged."""
    unused = [records]
    with _kept_lock:
        if key not in _kept and records.ok():
            _kept[key] = unused.pop()
        while len(_kept) > 1 and (
            len(_kept) > _KEPT_FILES or sum(one.num_records() for one in _kept.values()) > _KEPT_RECORDS
        ):
            unused.append(_kept.pop(next(iter(_kept))))
    for one in unused:
        one.close()
