"""Stored files of a source, local or remote: open, map, stream; and what their names say about their format.

`listing` finds them. The content of a file is not looked at here.
"""

from __future__ import annotations

import contextlib
import gzip
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import pyarrow as pa
from pyarrow import fs

from overlord.errors import ReaderError

_GZIP_BUFFER_BYTES = 64 << 10


class ByteStream(Protocol):
    """Bytes that are read front to back."""

    def read(self, count: int, /) -> bytes:
        """Return the next bytes: at most `count`, none at the end."""
        ...


class MappedFile:
    """A local file mapped read-only; its pages can be released while it is open.

    Every touched page of a mapping counts as memory of the process. A stream that reads a large file front to back
    releases the pages behind it, at no cost: they stay in the page cache.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self.native: pa.NativeFile = pa.BufferReader(pa.py_buffer(self._map))

    def release_pages(self) -> None:
        """Release the touched pages; views of them stay valid and fault in again."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a source as its listing found it."""

    path: str
    """The local path or the URL, for messages."""
    size: int
    mtime_ns: int
    filesystem: fs.FileSystem = field(repr=False, compare=False)
    location: str = field(repr=False)
    """The path on `filesystem`."""

    @property
    def is_local(self) -> bool:
        """Whether the file is on this host's disks."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def open(self) -> pa.NativeFile:
        """Open for random access; not mapped, so that what was read takes no memory."""
        return self.filesystem.open_input_file(self.location)

    def map(self) -> MappedFile | None:
        """Map the file, or return None when it is remote."""
        return MappedFile(self.location) if self.is_local else None

    @contextlib.contextmanager
    def open_stream(self, compression: Compression | None = None) -> Iterator[ByteStream]:
        """Open for reading front to back, decompressing on the way."""
        if compression != "gzip":
            with self.filesystem.open_input_stream(self.location, compression=compression) as native:
                yield native
            return
        # pyarrow would hold 1 MiB for every open stream; zlib holds 32 KiB and is as fast.
        with (
            self.filesystem.open_input_stream(
                self.location, compression=None, buffer_size=_GZIP_BUFFER_BYTES
            ) as native,
            gzip.GzipFile(fileobj=native) as unzipped,
        ):
            yield unzipped


def verify_unchanged(file: StoredFile) -> None:
    """Check that a file has not changed since it was listed.

    Raises:
        ReaderError: It has another size or modification time, or is gone.
    """
    info = file.filesystem.get_file_info(file.location)
    if info.type is not fs.FileType.File:
        found = "is gone"
    elif info.size != file.size:
        found = f"has {info.size} bytes where the listing found {file.size}"
    elif (info.mtime_ns or 0) != file.mtime_ns:
        found = "was written to after it was listed"
    else:
        return
    raise ReaderError(
        f"{file.path} {found}; a file that changes under a running job would change the stream. "
        "Restore the file, or start a new run."
    )


# Formats and compression by file name.


Compression = Literal["gzip", "zstd"]
SUFFIXES: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "jsonl": tuple(name + end for name in (".jsonl", ".ndjson", ".json") for end in ("", ".gz", ".zst")),
    "tar": (".tar", ".tar.gz", ".tgz"),
    "arrow": (".arrow", ".feather", ".ipc"),
}
"""The suffixes of the file names of each format."""
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that Hugging Face datasets write beside the data."""


def format_of_name(path: str) -> str | None:
    """Return the format that a file's name implies, or None.

    Example:
        >>> format_of_name("web/00.jsonl.gz"), format_of_name("README.md")
        ('jsonl', None)
    """
    name = path.lower()
    return next((f for f, ends in SUFFIXES.items() if name.endswith(ends)), None)


def compression_of_name(path: str) -> Compression | None:
    """Return how a file is compressed as a whole, by its name, or None.

    Example:
        >>> compression_of_name("a.tgz"), compression_of_name("a.jsonl.zst"), compression_of_name("a.tar")
        ('gzip', 'zstd', None)
    """
    name = path.lower()
    if name.endswith((".gz", ".tgz")):
        return "gzip"
    return "zstd" if name.endswith(".zst") else None


def is_data_file(path: str) -> bool:
    """Return whether a file found in a folder is data, not metadata beside it."""
    return format_of_name(path) is not None and path.rsplit("/", 1)[-1] not in _NOT_DATA
