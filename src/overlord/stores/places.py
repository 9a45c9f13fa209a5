"""The place of a store: a folder of this host, a URL of any filesystem that pyarrow knows, or memory of this process.

Rules of this file:
1. When `write` or `append` returns, the data is on disk or in the object store. A written file appears completely or
   not at all.
2. An object store has no append and no exclusive creation. Appending writes one object after the other; creating writes
   an object under a unique name, and fails if there is another one of the same base name.
3. A local store is private: folders that are made here have mode 0700, files 0600, whatever the umask. Only plain
   files and folders count: links, pipes and devices are neither listed nor opened, and files beyond any size that a
   store can have are not read.
4. Every failure is a StoreError that says what failed, what it causes, and what to do. Nothing is retried here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
from pyarrow import fs

from overlord.core.spec_errors import unexpanded
from overlord.errors import SpecError, StoreError, shortened
from overlord.storage import StorageOptions, create_private, filesystem_of, make_private, replacing

ROOM = 1 << 16
"""Zeros written ahead of appended data: syncing into existing bytes does not wait for a change of the file's size."""
MOST_BYTES = 256 << 20
"""Bytes of a file of a local store; the largest have a few megabytes."""
ATTEMPTS = 2
"""How often a request to an object store is tried: the runtime retries the whole operation, and logs it."""


class Appender(Protocol):
    """A file that is open for appending."""

    def append(self, data: bytes) -> None:
        """Write at the end; on disk when this returns. A crash may leave zeros after the data."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


class Place(Protocol):
    """A tree of small files. Names are relative, with slashes."""

    name: str
    """The folder or the URL, for messages."""
    can_append: bool
    """Whether files can be appended to; otherwise every durable record is a file."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file; it appears completely or not at all."""
        ...

    def create(self, name: str, data: bytes) -> str | None:
        """Create a file exclusively; return its full name, or None if another process has created it."""
        ...

    def open_append(self, name: str) -> Appender:
        """Open a new file to append to."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        ...

    def exists(self, name: str) -> bool:
        """Whether a file of this name was created."""
        ...

    def names(self, folder: str = "") -> dict[str, int]:
        """Return the names in a folder (not below) with their sizes; folders end with a slash."""
        ...

    def written_at(self, name: str) -> float | None:
        """Return when a file was written, in seconds by the clock of the place; None if it does not exist."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file, or a folder if the name ends with a slash; missing ones are ignored."""
        ...


OpenPlace = Callable[[str, StorageOptions | None], Place]
"""Opens the place that a path or a URL names."""


def store_path(store: str | os.PathLike[str]) -> str:
    """Return a store as every process finds it: a URL as it is, a path from the root.

    Raises:
        SpecError: It names a variable of the environment, which would become the name of a folder.
    """
    if "://" in str(store):
        return str(store)
    path = Path(store).expanduser().absolute()
    if not path.exists() and (wrong := unexpanded(str(store))):
        raise SpecError(f"store: there is no folder {str(store)!r}.{wrong}")
    return str(path)


def open_place(store: str, options: StorageOptions | None = None) -> Place:
    """Return the place that a path or a URL names; a folder is made.

    Raises:
        SpecError: The URL or an option is wrong.
        StoreError: It cannot be reached.

    Example:
        >>> import tempfile
        >>> place = open_place(tempfile.mkdtemp())
        >>> place.write("a/b", b"hello")
        >>> place.read("a/b"), place.names("a")
        (b'hello', {'b': 5})
    """
    if store in _in_memory:
        return _in_memory[store]
    if "://" not in store or store.startswith("file://"):
        if "://" not in store and not Path(store).is_absolute():
            # `store_path` makes paths absolute. A relative one depends on the working folder of the process that opens
            # it, so the next one would not find the journal.
            raise SpecError(f"store: {store!r} is a relative path; a restart could not find it. Give an absolute one.")
        _, path, _ = filesystem_of(store, options or {})
        return LocalPlace(Path(path))
    try:
        filesystem, path, _ = filesystem_of(store, options or {}, attempts=ATTEMPTS)
    except SpecError as error:
        raise SpecError(f"store: {error}") from error
    return RemotePlace(filesystem, path.rstrip("/"), store.rstrip("/"))


@contextlib.contextmanager
def _asking(place: str, what: str) -> Iterator[None]:
    """Turn errors of a filesystem into StoreError."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise _failure(place, what, error) from error


def _failure(place: str, what: str, error: Exception) -> StoreError:
    why = getattr(error, "strerror", None) or shortened(error, 200)
    if what == "be read":
        effect = "the run that it holds can be neither resumed nor shown. Repair the store, or give another one."
    else:
        effect = (
            "steps are not planned as long as they could not be resumed. Free space or repair the store; or launch "
            "with another one."
        )
    return StoreError(f"the store {place!r} cannot {what} ({why}); {effect}")


class LocalPlace:
    """A folder of this host."""

    can_append = True

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._folder = folder
        with _asking(self.name, "be written"):
            make_private(folder)

    def write(self, name: str, data: bytes) -> None:
        """Write a scratch file, then rename it: a reader sees the old file or the new one."""
        target = self._target(name)
        with _asking(self.name, "be written"):
            with replacing(target) as scratch:
                self._put(scratch, data)
            _sync_folder(target.parent)

    def create(self, name: str, data: bytes) -> str | None:
        """Write a scratch file, then link it to the name, which only one process can."""
        target = self._target(name)
        scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        with _asking(self.name, "be written"):
            try:
                self._put(scratch, data)
                _link(scratch, target, data)
            except FileExistsError:
                return None
            finally:
                scratch.unlink(missing_ok=True)
            _sync_folder(target.parent)
        return name

    def open_append(self, name: str) -> Appender:
        target = self._target(name)
        with _asking(self.name, "be written"):
            descriptor = create_private(target)
            _sync_folder(target.parent)
        return _LocalAppender(self.name, descriptor)

    def read(self, name: str) -> bytes | None:
        with _asking(self.name, "be read"):
            try:
                # O_NONBLOCK: a pipe without a writer would be waited for.
                descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with open(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(errno.EINVAL, f"{name} is not a plain file")
                if found.st_size > MOST_BYTES:
                    raise OSError(
                        errno.EFBIG, f"{name} has {found.st_size:,} bytes, and no file of a store has so many"
                    )
                return file.read()

    def exists(self, name: str) -> bool:
        # Called for every durable record; `os.path.exists` takes three times as long.
        return os.access(f"{self.name}/{name}", os.F_OK)

    def names(self, folder: str = "") -> dict[str, int]:
        with _asking(self.name, "be read"):
            try:
                with os.scandir(self._folder / folder) as entries:
                    # Scratch files that a dead process left begin with a dot.
                    found = [entry for entry in entries if not entry.name.startswith(".")]
            except FileNotFoundError:
                return {}
            sizes: dict[str, int] = {}
            for entry in found:
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    if entry.is_dir(follow_symlinks=False):
                        sizes[f"{entry.name}/"] = 0
                    elif entry.is_file(follow_symlinks=False):
                        sizes[entry.name] = entry.stat().st_size
            return sizes

    def written_at(self, name: str) -> float | None:
        with _asking(self.name, "be read"):
            try:
                return (self._folder / name).stat().st_mtime
            except FileNotFoundError:
                return None

    def delete(self, name: str) -> None:
        with _asking(self.name, "be written"):
            if name.endswith("/"):
                shutil.rmtree(self._folder / name, ignore_errors=True)
            else:
                (self._folder / name).unlink(missing_ok=True)

    def _target(self, name: str) -> Path:
        target = self._folder / name
        if "/" in name:
            with _asking(self.name, "be written"):
                if target.parent.is_symlink():
                    raise OSError(errno.ELOOP, f"{target.parent.name} is a link, which would lead out of the store")
                if not target.parent.is_dir():
                    target.parent.mkdir(mode=0o700, exist_ok=True)  # not the store's own folder: it may be unmounted
                    target.parent.chmod(0o700)
                    _sync_folder(self._folder)
        return target

    def _put(self, path: Path, data: bytes) -> None:
        descriptor = create_private(path)
        try:
            _write_all(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _LocalAppender:
    def __init__(self, place: str, descriptor: int) -> None:
        self._place = place
        self._descriptor = descriptor
        self._end = 0
        self._room = 0

    def append(self, data: bytes) -> None:
        end = self._end + len(data)
        try:
            if end > self._room:
                _write_all(self._descriptor, bytes(end + ROOM - self._room), self._room)
                self._room = end + ROOM
            _write_all(self._descriptor, data, self._end)
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise _failure(self._place, "be written", error) from error
        self._end = end

    def close(self) -> None:
        try:
            with contextlib.suppress(OSError):  # zeros at the end only take space
                os.ftruncate(self._descriptor, self._end)
        finally:
            os.close(self._descriptor)


class MemoryPlace:
    """Files in the memory of this process, for a store that needs not outlive it: however it ends, nothing is left.

    `open_place` finds it by its name as long as something refers to it.

    Example:
        >>> place = MemoryPlace()
        >>> place.write("a/b", b"hello")
        >>> open_place(place.name).names(), place.names("a")
        ({'a/': 0}, {'b': 5})
    """

    can_append = True

    def __init__(self) -> None:
        self.name = f"memory://{uuid.uuid4().hex}"
        self._files: dict[str, tuple[bytearray, float]] = {}
        _in_memory[self.name] = self

    def write(self, name: str, data: bytes) -> None:
        self._files[name] = bytearray(data), time.time()

    def create(self, name: str, data: bytes) -> str | None:
        if name in self._files:
            return None
        self.write(name, data)
        return name

    def open_append(self, name: str) -> Appender:
        self.write(name, b"")
        return _MemoryAppender(self._files[name][0])

    def read(self, name: str) -> bytes | None:
        return bytes(self._files[name][0]) if name in self._files else None

    def exists(self, name: str) -> bool:
        return name in self._files

    def names(self, folder: str = "") -> dict[str, int]:
        prefix, sizes = f"{folder.rstrip('/')}/" if folder else "", dict[str, int]()
        for path, (data, _) in self._files.items():
            if path.startswith(prefix):
                name, below, _ = path.removeprefix(prefix).partition("/")
                sizes[name + below] = 0 if below else len(data)
        return sizes

    def written_at(self, name: str) -> float | None:
        return self._files[name][1] if name in self._files else None

    def delete(self, name: str) -> None:
        for path in [path for path in self._files if path == name or (name.endswith("/") and path.startswith(name))]:
            del self._files[path]


_in_memory: weakref.WeakValueDictionary[str, MemoryPlace] = weakref.WeakValueDictionary()


class _MemoryAppender:
    def __init__(self, data: bytearray) -> None:
        self._data = data

    def append(self, data: bytes) -> None:
        self._data += data

    def close(self) -> None:
        pass  # it holds nothing


class RemotePlace:
    """A folder of an object store, or of another filesystem that has no append."""

    can_append = False

    def __init__(self, filesystem: fs.FileSystem, path: str, name: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self.name = name

    def write(self, name: str, data: bytes) -> None:
        with _asking(self.name, "be written"):
            if not isinstance(self._filesystem, (fs.S3FileSystem, fs.GcsFileSystem)):
                self._filesystem.create_dir(os.path.dirname(f"{self._path}/{name}"), recursive=True)
            with self._filesystem.open_output_stream(f"{self._path}/{name}", compression=None) as stream:
                stream.write(data)

    def create(self, name: str, data: bytes) -> str | None:
        """Put an object under a unique name; the creation fails if there is then another one of the same base name.

        Of two processes that do this at once both may fail, but never both succeed: the later put sees the earlier one.
        """
        if self.exists(name):
            return None
        own = f"{name}.{uuid.uuid4().hex}"
        self.write(own, data)
        if len(self._of(name)) == 1:
            return own
        self.delete(own)
        return None

    def open_append(self, name: str) -> Appender:
        """Raise NotImplementedError: object stores have no append."""
        raise NotImplementedError(f"{self.name} has no append; write {name} as an object of its own")

    def read(self, name: str) -> bytes | None:
        with _asking(self.name, "be read"):
            try:
                with self._filesystem.open_input_stream(f"{self._path}/{name}", compression=None) as stream:
                    return stream.read()
            except FileNotFoundError:
                return None
            except OSError:
                # An object that is deleted between the look at its size and the read raises whatever the client library
                # makes of an answer that is longer than the object was.
                if self._filesystem.get_file_info(f"{self._path}/{name}").type is fs.FileType.NotFound:
                    return None
                raise

    def exists(self, name: str) -> bool:
        """Look for the name, and for unique names made from it."""
        return bool(self._of(name))

    def names(self, folder: str = "") -> dict[str, int]:
        with _asking(self.name, "be read"):
            selector = fs.FileSelector(f"{self._path}/{folder}".rstrip("/"), allow_not_found=True)
            found = self._filesystem.get_file_info(selector)
        folders = fs.FileType.Directory
        return {info.base_name + "/" * (info.type is folders): info.size or 0 for info in found}

    def written_at(self, name: str) -> float | None:
        with _asking(self.name, "be read"):
            info = self._filesystem.get_file_info(f"{self._path}/{name}")
        return None if info.type is fs.FileType.NotFound else (info.mtime_ns or 0) / 1e9

    def delete(self, name: str) -> None:
        with _asking(self.name, "be written"):
            try:
                if name.endswith("/"):
                    self._filesystem.delete_dir(f"{self._path}/{name}".rstrip("/"))
                else:
                    self._filesystem.delete_file(f"{self._path}/{name}")
            except FileNotFoundError:
                pass  # removed by another process, or by an earlier try

    def _of(self, name: str) -> list[str]:
        folder, _, base = name.rpartition("/")
        return [one for one in self.names(folder) if one == base or one.startswith(f"{base}.")]


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    done = os.pwrite(descriptor, data, at)
    while done < len(data):
        done += os.pwrite(descriptor, memoryview(data)[done:], at + done)


def _link(scratch: Path, target: Path, data: bytes) -> None:
    try:
        os.link(scratch, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # No hard links here: exclusive creation decides, and a concurrent reader may find the file empty.
        with open(create_private(target), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
