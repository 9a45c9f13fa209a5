"""The filesystem of a path or a URL: local disks, S3, Google Cloud Storage and HDFS through pyarrow.

Readers of sources and stores both use it.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from overlord.errors import SourceError, SpecError, shortened

StorageOptions = Mapping[str, str | int | float | bool]
"""Credentials and other options, where pyarrow's filesystems know them under the same names."""


def make_private(folder: Path) -> None:
    """Make a folder, and those above it, that only this user can enter, whatever the umask.

    Folders that are there keep their modes, which were chosen when they were made.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return  # another process has just made it
    folder.chmod(0o700)


def create_private(path: str | Path) -> int:
    """Create a file that only this user can read, whatever the umask; return its descriptor, to be written.

    Raises:
        FileExistsError: There is something of that name, be it a link.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a local file atomically: yields a scratch path in the same folder, which is renamed at the end.

    The scratch name is unique, so that threads, processes and hosts can write the same file at the same time: each
    renames a complete file of its own, and the last one wins.
    """
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)  # a partial file on a full disk takes space that is needed


def filesystem_of(url: str, options: StorageOptions, *, attempts: int | None = None) -> tuple[fs.FileSystem, str, str]:
    """Return (filesystem, path on it, prefix that turns such a path into a URL again).

    Args:
        url: A path of this host, or a URL.
        options: Credentials and other options.
        attempts: How often an S3 request is tried before it fails; pyarrow's default if None.

    Raises:
        SpecError: The scheme or a storage option is unknown.
    """
    scheme, is_url, rest = url.partition("://")
    scheme = scheme.lower()
    if not is_url:
        check_options("local", options, {})
        return fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(url)), ""
    if scheme == "file":
        check_options("local", options, {})
        path = rest[len("localhost") :] if rest.startswith("localhost/") else rest
        if not path.startswith("/"):
            raise SpecError(f"the path {url!r} names a host; only files of this host can be read. Write file:///path.")
        return fs.LocalFileSystem(), path, ""
    if scheme in ("s3", "s3a"):
        chosen = check_options("s3", options, S3_OPTIONS)
        endpoint = chosen.get("endpoint_override")
        if endpoint is not None:
            if "://" in endpoint:
                chosen["scheme"], chosen["endpoint_override"] = endpoint.rstrip("/").split("://", 1)
            # Without a region the client queries a metadata server, which stores other than S3 do not have.
            chosen.setdefault("region", "us-east-1")
        if attempts is not None:
            chosen["retry_strategy"] = fs.AwsStandardS3RetryStrategy(max_attempts=attempts)
            chosen.setdefault("allow_delayed_open", True)  # a small object then takes one request, not three
        return _connect(url, lambda: fs.S3FileSystem(**chosen)), rest, f"{scheme}://"
    if scheme in ("gs", "gcs"):
        chosen = check_options("gs", options, GCS_OPTIONS)
        if "retry_time_limit" in chosen:
            chosen["retry_time_limit"] = datetime.timedelta(seconds=chosen["retry_time_limit"])
        return _connect(url, lambda: fs.GcsFileSystem(**chosen)), rest, f"{scheme}://"
    if scheme == "hdfs":
        chosen = check_options("hdfs", options, _HDFS_OPTIONS)
        parts = urlsplit(url)
        host, port = parts.hostname or "default", parts.port or (8020 if parts.hostname else 0)
        found = _connect(url, lambda: fs.HadoopFileSystem(host, port, **chosen))
        return found, rest[len(parts.netloc) :], f"{scheme}://{parts.netloc}"
    raise SpecError(
        f"the path {url!r} has the unknown scheme {scheme!r}; nothing can be listed. "
        "Use file://, s3://, s3a://, gs://, gcs://, hdfs:// or a path without a scheme; a source may also be "
        "at az://, https://, http:// or hf://."
    )


S3_OPTIONS: dict[str, type] = {
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
GCS_OPTIONS: dict[str, type] = {
    "anonymous": bool,
    "endpoint_override": str,
    "scheme": str,
    "project_id": str,
    "target_service_account": str,
    "retry_time_limit": float,
}
_HDFS_OPTIONS: dict[str, type] = {"user": str, "buffer_size": int, "kerb_ticket": str}


def check_options(scheme: str, options: StorageOptions, allowed: Mapping[str, type]) -> dict[str, Any]:
    """Return the options of a filesystem.

    Raises:
        SpecError: One is unknown, or of another type.
    """
    for name, value in options.items():
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise SpecError(
                f"storage option {name!r} is unknown for {scheme} files; it would have no effect. Allowed are: {known}."
            )
        wanted = allowed[name]
        if not isinstance(value, (int, float) if wanted is float else wanted):
            raise SpecError(
                f"storage option {name!r} is a {type(value).__name__}, not a {wanted.__name__}; the store would refuse "
                f"it. Give a {wanted.__name__}."
            )
    return dict(options)


def _connect(url: str, make: Callable[[], fs.FileSystem]) -> fs.FileSystem:
    try:
        return make()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise SourceError(
            f"cannot reach the store of {url}: {shortened(error)}; none of its files can "
            "be listed. Check the storage options and the credentials."
        ) from error
