"""Walks the headers of a tar archive (ustar, GNU and pax) without extracting anything.

Python's `tarfile` ends quietly where an archive is cut between two headers and keeps every member in
memory; a loader must notice the first and cannot afford the second.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from overlord.readers.filesystems import ByteStream
from overlord.readers.reader import DamagedFile

_BLOCK = 512
_NO_PAYLOAD = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_EXTENSIONS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME)
_MAX_EXTENSION_BYTES = 1 << 20


class RandomBytes:
    """Bytes at any offset, read through a window: one request serves many small members."""

    def __init__(self, native: pa.NativeFile, size: int, window_bytes: int) -> None:
        self._native = native
        self._size = size
        self._window_bytes = window_bytes
        self._window = b""
        self._window_at = 0

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes, fewer at the end of the file."""
        if at > self._size:
            raise _cut_short(self._size)
        if not self._window_at <= at <= at + count <= self._window_at + len(self._window):
            self._window = self._native.read_at(min(max(count, self._window_bytes), self._size - at), at)
            self._window_at = at
        return self._window[at - self._window_at :][:count]


class ForwardBytes:
    """Bytes of a stream that can only go forward (a compressed archive)."""

    def __init__(self, native: ByteStream) -> None:
        self._native = native
        self._at = 0

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes, fewer at the end; `at` never goes back."""
        while self._at < at:
            passed = self._native.read(min(at - self._at, 1 << 20))
            if not passed:
                raise _cut_short(self._at)
            self._at += len(passed)
        parts: list[bytes] = []
        while count:
            part = self._native.read(count)
            if not part:
                break
            parts.append(part)
            count -= len(part)
            self._at += len(part)
        return b"".join(parts)


class ArchiveBytes(Protocol):
    """Where the bytes of an archive come from."""

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes at an offset, fewer at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file in an archive."""

    name: str
    start: int
    """Where its first header is, those that only extend the next one included."""
    data: int
    size: int

    @property
    def stop(self) -> int:
        """Where the next header is."""
        return self.data + _padded(self.size)


def walk_members(source: ArchiveBytes, start: int = 0, stop: int | None = None) -> Iterator[Member]:
    """Yield the regular files of an archive; links, folders and devices are passed over.

    Raises:
        DamagedFile: The archive is cut short, or something that is no header is where one must be.
    """
    at, first = start, start
    extended: dict[str, str] = {}
    while stop is None or at < stop:
        block = source.read(at, _BLOCK)
        if not block and not extended:
            return  # some writers leave out the two empty blocks that end an archive
        if len(block) < _BLOCK:
            raise _cut_short(at + len(block))
        if not block.strip(b"\0"):
            return
        info = _parse_header(block, at)
        data = at + _BLOCK
        if info.type in _EXTENSIONS:
            extended.update(_extension(info, source.read(data, min(info.size, _MAX_EXTENSION_BYTES)), data))
            at = data + _padded(info.size)
            continue
        size = int(extended.get("size", info.size)) if info.type not in _NO_PAYLOAD else 0
        member = Member(extended.get("path", info.name), first, data, size)
        at = member.stop
        if info.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            continue  # they say nothing of a regular file's name or size
        if info.type in _REGULAR:
            yield member
        extended, first = {}, at


def read_payload(source: ArchiveBytes, member: Member) -> bytes:
    """Return the bytes of a member.

    Raises:
        DamagedFile: The archive ends before they do.
    """
    data = source.read(member.data, member.size)
    if len(data) < member.size:
        raise _cut_short(member.data + len(data))
    return data


def _cut_short(at: int) -> DamagedFile:
    return DamagedFile(f"it is cut short at byte {at}")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _parse_header(block: bytes, at: int) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise DamagedFile(f"there is no tar header at byte {at}") from error
    if info.size < 0:
        raise DamagedFile(f"the tar header at byte {at} has the size {info.size}")
    return info


def _extension(info: tarfile.TarInfo, payload: bytes, at: int) -> dict[str, str]:
    """Return the path and the size that an extended header gives to the member behind it."""
    if len(payload) < info.size:
        raise _cut_short(at + len(payload))
    if info.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": payload.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    found: dict[str, str] = {}
    while payload.strip(b"\0"):
        length, space, _ = payload.partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(payload):
            raise DamagedFile(f"the extended tar header at byte {at} is damaged")
        key, _, value = payload[len(length) + 1 : int(length) - 1].partition(b"=")
        if key in (b"path", b"size"):
            found[key.decode()] = value.decode("utf-8", "surrogateescape")
        payload = payload[int(length) :]
    if not found.get("size", "0").isdigit():
        raise DamagedFile(f"the extended tar header at byte {at} has the size {found['size']!r}")
    return found
