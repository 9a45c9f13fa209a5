"""Files wherever they are: local disks, S3, Google Cloud Storage and HDFS through pyarrow.

`listing` finds them; nothing here looks inside a file.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from overlord.errors import ReaderError, SourceError, SpecError
from overlord.readers.suffixes import Compression

StorageOptions = Mapping[str, str | int | float | bool]

_GZIP_BUFFER_BYTES = 64 << 10


class ByteStream(Protocol):
    """Bytes that are read front to back."""

    def read(self, count: int, /) -> bytes:
        """Return the next bytes: at most `count`, none at the end."""
        ...


class MappedFile:
    """A local file mapped read-only, whose pages can be handed back while it is open.

    A mapping counts every page it ever touched as the process's memory; a stream that reads a large
    file front to back gives the passed pages back, and loses nothing: they stay in the page cache.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self.native: pa.NativeFile = pa.BufferReader(pa.py_buffer(self._map))

    def release_pages(self) -> None:
        """Give the touched pages back; views of them stay valid and fault in again."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a source as its listing found it."""

    path: str
    """What is shown to people: the local path or the URL."""
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
        """Open for random access; not mapped, so that what was read before costs no memory."""
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
    """Check that a file still is what its listing said.

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


def filesystem_of(url: str, options: StorageOptions) -> tuple[fs.FileSystem, str, str]:
    """Return (filesystem, path on it, prefix that turns such a path into a URL again).

    Raises:
        SpecError: The scheme or a storage option is unknown.
    """
    if "://" not in url:
        _check_options("local", options, {})
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(url)), ""
    scheme = url.split("://", 1)[0].lower()
    rest = url.split("://", 1)[1]
    if scheme not in _SCHEMES:
        known = ", ".join(f"{s}://" for s in _SCHEMES)
        raise SpecError(
            f"the path {url!r} has the unknown scheme {scheme!r}; nothing can be listed. "
            f"Use {known} or a path without a scheme."
        )
    return _SCHEMES[scheme](url, scheme, rest, options)


_Opened = tuple[fs.FileSystem, str, str]

_S3_OPTIONS: dict[str, type] = {
    "access_key": str,
    "secret_key": str,
    "session_token": str,
    "anonymous": bool,
    "region": str,
    "scheme": str,
    "endpoint_override": str,
    "role_arn": str,
    "session_name": str,
    "external_id": str,
    "load_frequency": int,
    "request_timeout": float,
    "connect_timeout": float,
    "proxy_options": str,
    "allow_delayed_open": bool,
    "allow_bucket_creation": bool,
    "force_virtual_addressing": bool,
    "tls_ca_file_path": str,
}
_GCS_OPTIONS: dict[str, type] = {
    "anonymous": bool,
    "endpoint_override": str,
    "scheme": str,
    "project_id": str,
    "target_service_account": str,
    "retry_time_limit": float,
}
_HDFS_OPTIONS: dict[str, type] = {"user": str, "buffer_size": int, "kerb_ticket": str}


def _check_options(scheme: str, options: StorageOptions, allowed: Mapping[str, type]) -> dict[str, Any]:
    for name, value in options.items():
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise SpecError(
                f"storage option {name!r} is unknown for {scheme} files; it would have no effect. Allowed are: {known}."
            )
        wanted = allowed[name]
        if not isinstance(value, (int, float) if wanted is float else wanted):
            raise SpecError(
                f"storage option {name!r} is {value!r}, not a {wanted.__name__}; the store would refuse it. "
                f"Give a {wanted.__name__}."
            )
    return dict(options)


def _open_local(url: str, scheme: str, rest: str, options: StorageOptions) -> _Opened:
    _check_options("local", options, {})
    path = rest[len("localhost") :] if rest.startswith("localhost/") else rest
    if not path.startswith("/"):
        raise SpecError(f"the path {url!r} names a host; only files of this host can be read. Write file:///path.")
    return fs.LocalFileSystem(), path, ""


def _open_s3(url: str, scheme: str, rest: str, options: StorageOptions) -> _Opened:
    chosen = _check_options("s3", options, _S3_OPTIONS)
    endpoint = chosen.get("endpoint_override")
    if endpoint is not None:
        if "://" in endpoint:
            chosen["scheme"], chosen["endpoint_override"] = endpoint.rstrip("/").split("://", 1)
        # Without a region the client asks a metadata server that other stores do not have.
        chosen.setdefault("region", "us-east-1")
    return _connect(url, lambda: fs.S3FileSystem(**chosen)), rest, f"{scheme}://"


def _open_gcs(url: str, scheme: str, rest: str, options: StorageOptions) -> _Opened:
    chosen = _check_options("gs", options, _GCS_OPTIONS)
    if "retry_time_limit" in chosen:
        chosen["retry_time_limit"] = datetime.timedelta(seconds=chosen["retry_time_limit"])
    return _connect(url, lambda: fs.GcsFileSystem(**chosen)), rest, f"{scheme}://"


def _open_hdfs(url: str, scheme: str, rest: str, options: StorageOptions) -> _Opened:
    chosen = _check_options("hdfs", options, _HDFS_OPTIONS)
    parts = urlsplit(url)
    host, port = parts.hostname or "default", parts.port or (8020 if parts.hostname else 0)
    root = f"{scheme}://{parts.netloc}"
    return _connect(url, lambda: fs.HadoopFileSystem(host, port, **chosen)), rest[len(parts.netloc) :], root


def _connect(url: str, make: Callable[[], fs.FileSystem]) -> fs.FileSystem:
    try:
        return make()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise SourceError(
            f"cannot reach the store of {url}: {' '.join(str(error).split())[:160]}; none of its files can "
            "be listed. Check the storage options and the credentials."
        ) from error


_SCHEMES: dict[str, Callable[[str, str, str, StorageOptions], _Opened]] = {
    "file": _open_local,
    "s3": _open_s3,
    "s3a": _open_s3,
    "gs": _open_gcs,
    "gcs": _open_gcs,
    "hdfs": _open_hdfs,
}
