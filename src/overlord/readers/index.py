"""The index cache: the blocks of a file, found once and kept on disk.

Rules of this file:
1. The name of an entry is a hash of all that it depends on (format, path, size, time, columns): the entry of a file
   that has changed is never found, and nothing is updated in place.
2. Entries are written to a scratch file and renamed: other processes see a complete one or none.
3. A checksum covers every byte. An entry that does not fit is not used but built again; reading never raises.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import SharedMemory
from overlord.core.samples import FILE_SHIFT
from overlord.errors import OverlordError, SourceError
from overlord.readers.files import StoredFile, verify_unchanged
from overlord.readers.reader import BlockIndex, DamagedFile, Reader, reason_of, unreadable
from overlord.readers.remote.range_cache import RangeCache
from overlord.readers.spill import HeldGroups
from overlord.storage import create_private, make_private, replacing

logger = logging.getLogger("overlord")
_VERSION = 3
_FIELDS = 6
_NUM_LOCKS = 256
_MAP_FROM_BYTES = 64 << 10
"""Smaller entries are read, not mapped: a mapping holds a file descriptor, and there are thousands of files."""
_REMOTE_ATTEMPTS = 3
_THREADS = 4
"""How many files are indexed at once."""
GROUP_BYTES = 64 << 20
"""Shuffle groups that are held in memory where there is no account of memory."""


class IndexCache:
    """Indices of files, kept in a folder; threads and processes may share it.

    The folder is created if it is missing, and can be removed at any time: what is needed is built again.
    """

    def __init__(
        self, folder: Path, group_room: Callable[[], int] = lambda: GROUP_BYTES, ranges: RangeCache | None = None
    ) -> None:
        self._folder = folder
        self.ranges = ranges
        """What is kept of remote files."""
        self.scratch = folder / "spill"
        """Folder for spilled rows; its files have no name, and are deleted when they are closed."""
        self.groups = HeldGroups(self.scratch, group_room)
        """The shuffle groups of all sources with this cache; as many are in memory as there is room for."""
        self.memory: SharedMemory | None = None
        """For rows that go to workers."""
        # Threads that want the same file get the same lock; files may share a lock.
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]
        self._table_lock = threading.Lock()  # building a table indexes files

    def index(self, file: StoredFile, reader: Reader, columns: Sequence[str]) -> BlockIndex:
        """Return the index of a file, built now if it is not in the folder.

        Raises:
            SourceError: The file cannot be read, or a column is missing.
            ReaderError: The file has changed since it was listed.
        """
        path = self._path(file, reader, columns)
        found = _load(path)
        if found is not None:
            return found
        with self._locks[int(path.stem[:8], 16) % _NUM_LOCKS]:
            was_there = path.exists()  # before reading: another process may write it in between
            found = _load(path)
            if found is None:
                if was_there:
                    logger.warning("the index of %s in %s is damaged; it is built again", file.path, path)
                self._store(path, _build(file, reader, columns))
                found = _load(path)
        if found is None:
            raise SourceError(
                f"the index of {file.path} was written to {path} and cannot be read back; it would be built "
                "again for every read. Check that the disk is not full, or choose another cache folder."
            )
        return found

    def find(self, file: StoredFile, reader: Reader, columns: Sequence[str]) -> BlockIndex | None:
        """Return the index of a file if it is in the folder, else None."""
        return _load(self._path(file, reader, columns))

    def table(self, key: Sequence[object], build: Callable[[], npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Return an array of whole numbers that follows from a key: mapped, and built now if it is not in the folder.

        Raises:
            SourceError: It cannot be built, or not be written.
        """
        name = _digest_of(key)
        path = self._folder / name[:2] / f"{name}.table"
        with self._table_lock:
            found = read_array(path, np.int64, map_from=_MAP_FROM_BYTES)
            if found is None:
                self._write(path, build()[None])
                found = read_array(path, np.int64, map_from=_MAP_FROM_BYTES)
        if found is None:
            raise SourceError(
                f"{path} was written and cannot be read back; it would be built again for every read. Check that the "
                "disk is not full, or choose another cache folder."
            )
        return found[0]

    def _path(self, file: StoredFile, reader: Reader, columns: Sequence[str]) -> Path:
        key = _entry_key(file, reader.name, columns)
        return self._folder / key[:2] / f"{key}.index"

    def _store(self, path: Path, index: BlockIndex) -> None:
        self._write(path, np.stack([getattr(index, name) for name in BlockIndex.__slots__]))

    def _write(self, path: Path, table: npt.NDArray[np.int64]) -> None:
        try:
            write_array(path, table)
        except OSError as error:
            raise SourceError(
                f"cannot write the index {path}: {reason_of(error)}; every start would index all files "
                "again. Choose a cache folder that can be written."
            ) from error

    def with_ranges(self, files: Sequence[StoredFile], **changes: Any) -> list[StoredFile]:
        """Return files whose ranges are kept here as they are fetched, with other changes."""
        beside = [file.beside for file in files if file.beside is not None]
        if self.ranges is not None:
            self.ranges.keep_for([file.remote for file in [*files, *beside] if file.remote is not None])
        return [
            replace(
                file, ranges=self.ranges, beside=file.beside and replace(file.beside, ranges=self.ranges), **changes
            )
            for file in files
        ]


def build_indices(
    cache: IndexCache, files: Sequence[StoredFile], reader: Reader, columns: Sequence[str]
) -> list[BlockIndex]:
    """Return the indices of many files of one format, built in parallel."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="index") as pool:
        tasks = [pool.submit(cache.index, file, reader, columns) for file in files]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [task.result() for task in tasks]


def _build(file: StoredFile, reader: Reader, columns: Sequence[str]) -> BlockIndex:
    attempts = 1 if file.is_local else _REMOTE_ATTEMPTS
    while True:
        attempts -= 1
        try:
            verify_unchanged(file)
            index = reader.index(file, columns).completed(lambda: reader.seeks(file))
            verify_unchanged(file)  # an index of a file that changed meanwhile would be wrong
            _check(index)
            return index
        except OverlordError:
            raise
        except Exception as error:  # a parser may raise anything on damaged bytes
            if not attempts:
                raise unreadable(file, reason_of(error)) from error


def file_identity(file: StoredFile) -> tuple[object, ...]:
    """Return all that tells one version of a file from others."""
    kind = "local" if file.is_local else file.path.split("://", 1)[0]
    beside = (file.beside.location, file.beside.size, file.beside.mtime_ns) if file.beside else ()
    return (kind, file.location, file.size, file.mtime_ns, *beside)


def _entry_key(file: StoredFile, format: str, columns: Sequence[str]) -> str:
    return _digest_of([_VERSION, format, *file_identity(file), *sorted(set(columns))])


def _digest_of(parts: Iterable[object]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        text = str(part).encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()


def _load(path: Path) -> BlockIndex | None:
    """Return an entry, or None if it is missing or damaged."""
    table = read_array(path, np.int64, map_from=_MAP_FROM_BYTES)
    return BlockIndex(*table) if table is not None and len(table) == _FIELDS else None


def _check(index: BlockIndex) -> None:
    """Refuse an index with impossible numbers, which a damaged file may claim.

    Raises:
        DamagedFile: with what is wrong.
    """
    rows = [int(count) for count in index.rows]
    if min(rows, default=0) < 0 or sum(rows) >= 1 << FILE_SHIFT:
        raise DamagedFile(f"it claims {sum(rows)} rows, and a file has less than {1 << FILE_SHIFT}")
    if (index.bytes < 0).any() or (index.start < 0).any() or (index.stop < index.start).any():
        raise DamagedFile("it claims blocks of a negative size")


# Arrays on disk, with a checksum over every byte; also used for length sidecars.


_MAGIC = b"ovlarr\x001"
_SHAPE = struct.Struct("<8s8sqq")  # magic, dtype, rows, columns
_CHECKSUM = struct.Struct("<Q")
_HEAD_BYTES = _SHAPE.size + _CHECKSUM.size
_CHUNK_BYTES = 1 << 20


def write_array(path: Path, table: npt.NDArray[Any]) -> None:
    """Write a table of two dimensions.

    Raises:
        OSError: It cannot be written; no scratch file is left.
    """
    shape = _SHAPE.pack(_MAGIC, table.dtype.str.encode(), *table.shape)
    data = np.ascontiguousarray(table).tobytes()
    make_private(path.parent)
    with replacing(path) as scratch, open(create_private(scratch), "wb") as handle:
        handle.write(shape + _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(shape))) + data)


def read_array(path: Path, dtype: npt.DTypeLike, *, map_from: int = 0) -> npt.NDArray[Any] | None:
    """Return a read-only table of a dtype, or None if it is missing or damaged.

    A file of at least `map_from` bytes is mapped; a smaller one is read, and holds no descriptor.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "array"
        >>> write_array(path, np.array([[1, 2], [3, 4]]))
        >>> read_array(path, np.int64).tolist()
        [[1, 2], [3, 4]]
        >>> damaged = bytearray(path.read_bytes())
        >>> damaged[-3] ^= 1
        >>> _ = path.write_bytes(damaged)
        >>> read_array(path, np.int64) is None
        True
    """
    kind = np.dtype(dtype)
    try:
        with path.open("rb") as handle:
            head, size = handle.read(_HEAD_BYTES), os.fstat(handle.fileno()).st_size
            if len(head) < _HEAD_BYTES:
                return None
            magic, name, rows, columns = _SHAPE.unpack_from(head)
            if magic != _MAGIC or name.rstrip(b"\0") != kind.str.encode() or rows < 0 or columns < 0:
                return None
            if size != _HEAD_BYTES + rows * columns * kind.itemsize:
                return None
            checksum = zlib.crc32(head[: _SHAPE.size])
            # The checksum is computed by reading: pages of a mapping would count as memory of this process.
            parts: list[bytes] = []
            while chunk := handle.read(_CHUNK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
                if size < map_from:
                    parts.append(chunk)
            if _CHECKSUM.pack(checksum) != head[_SHAPE.size :]:
                return None
            if size < map_from:
                return np.frombuffer(b"".join(parts), kind).reshape(rows, columns)
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            return np.frombuffer(mapped, kind, offset=_HEAD_BYTES).reshape(rows, columns)
    except (OSError, ValueError):
        return None
