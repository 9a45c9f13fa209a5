"""Tar shards as WebDataset writes them: consecutive members with the same key are a sample.

The key is the path up to the first dot of the file's name, the column the rest: `dog/1.jpg` and
`dog/1.json` are the columns `jpg` and `json` of `dog/1`. `json.caption` reaches into the json member, `*.jpg`
is the list of all members with such an extension (`dog/1.0.jpg`, `dog/1.1.jpg`), in the order of the archive; it may be
empty. A block is a run of whole samples of about 1 MiB.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from overlord.core.ragged import TOO_LARGE, Kind, RowBatch
from overlord.readers.files import ByteStream, StoredFile
from overlord.readers.jsonl import batches_of, kind_of_values, parse_object, reach
from overlord.readers.reader import (
    BLOCK_BYTES,
    HEAD_ROWS,
    BlockIndex,
    CompressibleReader,
    DamagedFile,
    FileBytes,
    ForwardBytes,
    cut_short,
    missing_column,
    open_bytes,
    read_exactly,
)

KEY_COLUMN = "__key__"
_HEAD_BYTES = 64 << 20
"""The head of a shard, at most."""
_MOST_MEMBERS = 1 << 16
"""Members of one sample; names of members take memory too, and a gigabyte of empty ones is compressed to a megabyte."""
_SHOWN_COLUMNS = 1000
"""Columns of a shard that an error may name."""


class TarReader(CompressibleReader):
    """Reads tar shards. In its index, start and stop are byte offsets in the archive."""

    name = "tar"

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the blocks of a shard by its headers; payloads are not read."""
        with open_bytes(file) as source:
            return BlockIndex.of(list(_find_blocks(file, source, columns)))

    def find_blocks(
        self, file: StoredFile, native: ByteStream, columns: Sequence[str]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield (rows, bytes, start, stop) of the blocks of a stream, each as soon as its end is read."""
        return _find_blocks(file, ForwardBytes(native), columns)

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
        """Yield the samples of one block; only the wanted members are read."""
        start, stop = int(index.start[block]), int(index.stop[block])
        with open_bytes(file) as source:
            samples = _samples(source, start, stop, _members_of(columns), skip, file.max_row_bytes)
            rows = (TOO_LARGE if sample.too_large else _values(sample, columns) for sample in samples)
            yield from batches_of(rows, columns, batch_rows)

    def columns(self, file: StoredFile) -> list[str]:
        """Return the extensions in the head of the shard, and the key."""
        return [*dict.fromkeys(e for sample in self._head(file, ()) for e in sample.members), KEY_COLUMN]

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns: bytes, except values inside a json member and lists of members."""
        inside = [column for column in columns if json_path_of(column) is not None]
        head = self._head(file, inside)
        seen = {extension for sample in head for extension in sample.members}
        found: dict[str, Kind | None] = {}
        for column in columns:
            if column not in inside and (column in seen or column == KEY_COLUMN):
                found[column] = "bytes"
            elif is_pattern(column) and any(map(_members_of([column]), seen)):
                found[column] = "bytes_list"
            elif column in inside and extension_of(column) in seen:
                values = [_values(sample, [column])[0] for sample in head]
                if any(value is not None for value in values):
                    found[column] = kind_of_values(values)
        return found

    def _head(self, file: StoredFile, columns: Sequence[str]) -> list[Sample]:
        head: list[Sample] = []
        with open_bytes(file) as source:
            for sample in _samples(source, 0, None, _members_of(columns), most=file.max_row_bytes):
                head.append(sample)
                if len(head) == HEAD_ROWS or sample.stop >= _HEAD_BYTES:
                    break
        return head


def _find_blocks(file: StoredFile, source: FileBytes, columns: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    wanted = _members_of(columns)
    seen: dict[str, None] = {}
    lacking = [column for column in columns if column != KEY_COLUMN]
    rows, size, start, stop = 0, 0, 0, 0
    for sample in _samples(source, 0, None, _members_of(())):
        if rows and sample.start - start >= BLOCK_BYTES:
            yield rows, size, start, sample.start
            rows, size, start = 0, 0, sample.start
        rows, stop = rows + 1, sample.stop
        size += sum(m.size for e, m in sample.members.items() if wanted(e))
        if len(seen) < _SHOWN_COLUMNS:
            seen.update(dict.fromkeys(sample.members))
        lacking = [column for column in lacking if not any(map(_members_of([column]), sample.members))]
    if rows:
        if lacking:
            raise missing_column(file.path, lacking[0], [*list(seen)[:_SHOWN_COLUMNS], KEY_COLUMN])
        yield rows, size, start, stop


@dataclass(slots=True)
class Sample:
    """The members of one sample by extension, and the bytes of the wanted ones."""

    key: str
    start: int
    members: dict[str, Member] = field(default_factory=dict)
    payloads: dict[str, bytes] = field(default_factory=dict)
    payload_bytes: int = 0
    """Of all wanted members."""
    too_large: bool = False
    """Whether they, or the members, are more than may be read; then there are no payloads."""
    stop: int = 0
    """Where the next sample begins."""


def split_name(name: str) -> tuple[str, str] | None:
    """Return (key, extension) of a member, None if its name has no extension.

    Example:
        >>> split_name("dog/1.seg.PNG"), split_name("dog/.hidden"), split_name("README")
        (('dog/1', 'seg.png'), None, None)
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    return (folder + slash + stem, extension.lower()) if stem and dot else None


def is_pattern(column: str) -> bool:
    """Return whether a column is a pattern: the list of all members with a matching extension.

    Example:
        >>> is_pattern("*.jpg"), is_pattern("0.jpg")
        (True, False)
    """
    return "*" in column


def json_path_of(column: str) -> str | None:
    """Return the path of a column inside a json member; None if the column is a member itself.

    Example:
        >>> json_path_of("json.meta.lang"), json_path_of("json"), json_path_of("seg.png")
        ('meta.lang', None, None)
    """
    _, found, after = f".{column}".partition(".json.")
    return after if found else None


def extension_of(column: str) -> str:
    """Return the extension of the member that a column reads."""
    path = json_path_of(column)
    return column if path is None else column[: -len(path) - 1]


def _members_of(columns: Iterable[str]) -> Callable[[str], bool]:
    """Return the function that tells whether some columns read the member with an extension."""
    names = {extension_of(column) for column in columns if column != KEY_COLUMN}
    patterns = [name for name in names if is_pattern(name)]
    return lambda extension: extension in names or any(fnmatchcase(extension, pattern) for pattern in patterns)


def _samples(
    source: FileBytes,
    start: int,
    stop: int | None,
    wanted: Callable[[str], bool],
    skip: int = 0,
    most: int = 1 << 62,
) -> Iterator[Sample]:
    """Yield the samples of a range, without the first `skip`, with the bytes of the wanted members, `most` in all."""
    current: Sample | None = None
    for member in walk_members(source, start, stop):
        names = split_name(member.name)
        if names is None:
            continue
        key, extension = names
        # A second member of the same extension begins another sample with the same key.
        if current is None or current.key != key or extension in current.members:
            if current is not None and not skip:
                yield current
            elif current is not None:
                skip -= 1
            current = Sample(key, member.start)
        current.stop = member.stop
        if len(current.members) == _MOST_MEMBERS:  # the others are passed over
            current.too_large = True
            current.payloads.clear()
            continue
        current.members[extension] = member
        if not skip and wanted(extension):
            current.payload_bytes += member.size
            if current.payload_bytes > most:
                current.too_large = True
                current.payloads.clear()
            else:
                current.payloads[extension] = read_exactly(source, member.data, member.size)
    if current is not None and not skip:
        yield current


def _values(sample: Sample, columns: Mapping[str, Kind] | Sequence[str]) -> list[Any]:
    values: list[Any] = []
    parsed: dict[str, Any] = {}
    for column in columns:
        if column == KEY_COLUMN:
            values.append(sample.key.encode("utf-8", "surrogateescape"))
            continue
        if is_pattern(column):
            values.append([data for name, data in sample.payloads.items() if fnmatchcase(name, column)])
            continue
        path, extension = json_path_of(column), extension_of(column)
        payload = sample.payloads.get(extension)
        if path is not None and payload is not None:
            if extension not in parsed:
                parsed[extension] = parse_object(payload)
            values.append(reach(parsed[extension], path))
        else:
            values.append(payload)
    return values


# The members of an archive (ustar, GNU and pax), found by their headers without extracting anything. Python's `tarfile`
# reports no error where an archive is cut between two headers, and keeps every member in memory; neither is acceptable.


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


@dataclass(frozen=True, slots=True)
class Member:
    """One regular file in an archive."""

    name: str
    start: int
    """Where its first header is; extended headers count."""
    data: int
    size: int

    @property
    def stop(self) -> int:
        """Where the next header is."""
        return self.data + _padded(self.size)


def walk_members(source: FileBytes, start: int = 0, stop: int | None = None) -> Iterator[Member]:
    """Yield the regular files of an archive; links, folders and devices are skipped.

    A member may have several headers: extended ones (pax, GNU long name) that give the next header another path or
    size, then its own. `extended` collects them, `first` is where the first one is.

    Raises:
        DamagedFile: The archive is cut short, or there is no header where one must be.
    """
    at, first = start, start
    extended: dict[str, str] = {}
    while stop is None or at < stop:
        block = source.read(at, _BLOCK)
        if not block and not extended:
            return  # some writers leave out the two empty blocks that end an archive
        if len(block) < _BLOCK:
            raise cut_short(at + len(block))
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
            continue  # they do not concern a regular file's name or size
        if info.type in _REGULAR:
            yield member
        extended, first = {}, at


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
    """Return the path and the size that an extended header gives to the next member."""
    if len(payload) < info.size:
        raise cut_short(at + len(payload))
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
