"""The index cache: where the blocks of a file are, found once and kept on disk.

Rules of this file:
1. The name of an entry is a hash of all that it depends on (format, path, size, time, columns): the entry
   of a file that has changed is never found, and nothing is ever updated in place.
2. Entries are written beside and renamed: other processes see a whole entry or none.
3. An entry that does not look as written is built again, not trusted.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from overlord.errors import SourceError
from overlord.readers.filesystems import StoredFile, verify_unchanged
from overlord.readers.reader import READ_FAILURES, BlockIndex, Int64s, Reader, reason_of, unreadable
from overlord.storage import replacing

_VERSION = 1
_MAGIC = 0x6F766C64
_FIELDS = 5
_NUM_LOCKS = 256
_MAP_FROM_BYTES = 64 << 10
"""A smaller entry is read: a mapping holds a file descriptor, and there are thousands of files."""
_REMOTE_ATTEMPTS = 3


class IndexCache:
    """Indices of files, kept in a folder; threads and processes may share it.

    Args:
        folder: Where the entries are kept; made if missing. Removing it costs only time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.scratch = folder / "spill"
        """Where streams may keep files while they are open; nothing in it has a name."""
        # Two threads that ask for one file get the same lock; that some files share one does no harm.
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]

    def index(self, file: StoredFile, reader: Reader, columns: Sequence[str]) -> BlockIndex:
        """Return the index of a file, built now if it is not in the folder.

        Raises:
            SourceError: The file cannot be read, or a column is missing.
            ReaderError: The file is not what the listing found.
        """
        path = self._path(file, reader, columns)
        found = _load(path)
        if found is not None:
            return found
        with self._locks[int(path.stem[:8], 16) % _NUM_LOCKS]:
            found = _load(path)
            if found is None:
                self._store(path, _build(file, reader, columns))
                found = _load(path)
        if found is None:
            raise SourceError(
                f"the index of {file.path} was written to {path} and cannot be read back; it would be built "
                "again for every read. Check that the disk is not full, or choose another cache folder."
            )
        return found

    def find(self, file: StoredFile, reader: Reader, columns: Sequence[str]) -> BlockIndex | None:
        """Return the index of a file if it is in the folder already."""
        return _load(self._path(file, reader, columns))

    def _path(self, file: StoredFile, reader: Reader, columns: Sequence[str]) -> Path:
        key = _entry_key(file, reader.name, columns)
        return self._folder / key[:2] / f"{key}.npy"

    def _store(self, path: Path, index: BlockIndex) -> None:
        head = np.full(_FIELDS, len(index.rows), np.int64)
        head[0] = _MAGIC + _VERSION
        parts = (index.rows, index.bytes, index.start, index.stop, index.first_row)
        table = np.concatenate([head[:, None], np.stack(parts)], axis=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as scratch, scratch.open("wb") as handle:
                np.save(handle, table)
        except OSError as error:
            raise SourceError(
                f"cannot write the index {path}: {reason_of(error)}; every start would index all files "
                "again. Choose a cache folder that can be written."
            ) from error


def build_indices(
    cache: IndexCache,
    files: Sequence[StoredFile],
    reader: Reader,
    columns: Sequence[str],
    *,
    threads: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[BlockIndex]:
    """Return the indices of many files, built in parallel.

    Args:
        cache: Where they are kept.
        files: The files, all of one format.
        reader: The reader of that format.
        columns: The columns that will be read.
        threads: How many files are indexed at once.
        progress: Called with (files done, files in all) in the calling thread.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="index") as pool:
        tasks = [pool.submit(cache.index, file, reader, columns) for file in files]
        try:
            for done, task in enumerate(as_completed(tasks), 1):
                task.result()
                if progress is not None:
                    progress(done, len(files))
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
            index = reader.index(file, columns)
            verify_unchanged(file)  # an entry made of two versions of a file would be found by neither
            return index
        except READ_FAILURES as error:
            if not attempts:
                raise unreadable(file, reason_of(error)) from error


def _entry_key(file: StoredFile, format: str, columns: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    kind = "local" if file.is_local else file.path.split("://", 1)[0]
    for part in (_VERSION, format, kind, file.location, file.size, file.mtime_ns, *sorted(set(columns))):
        text = str(part).encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()


def _load(path: Path) -> BlockIndex | None:
    """Return an entry, or None if there is none that can be trusted."""
    try:
        large = path.stat().st_size >= _MAP_FROM_BYTES
        table = np.load(path, mmap_mode="r" if large else None, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[0] != _FIELDS or table.shape[1] < 1:
        return None
    if table[0, 0] != _MAGIC + _VERSION or (table[1:, 0] != table.shape[1] - 1).any():
        return None
    rows, size, start, stop, first = (np.asarray(line[1:]) for line in table)
    return BlockIndex(rows, size, start, stop, first) if _is_sane(rows, size, start, stop, first) else None


def _is_sane(rows: Int64s, size: Int64s, start: Int64s, stop: Int64s, first: Int64s) -> bool:
    if not len(rows):
        return True
    in_order = first[0] == 0 and bool((first[1:] == first[:-1] + rows[:-1]).all())
    return in_order and bool((rows >= 0).all() and (size >= 0).all() and (start >= 0).all() and (stop >= start).all())
