"""The journal of a lineage: segments of checksummed JSON records, one after the other.

Rules of this file:
1. A record is one line: crc32 of the rest in hex, a space, the record as JSON. A line without an end, or with zeros in
   it (files are extended with zeros ahead of their lines), was torn by a crash and is dropped. A damaged line is
   skipped and counted; its neighbours have their own checksums.
2. Inputs (reports, changes, verdicts) are on disk, and the ownership of the store is checked, before `append` returns.
   Plan records can be derived again: they are written by `commit`, or together with the next durable record.
3. A write that failed may have left half a line, or a complete one that was never reported as durable. The next record
   then goes to a new segment; its first record says how many bytes of each earlier segment are valid.
4. A process that takes a store over writes down how far it has read. Anything that a predecessor writes after that is
   invalid.
"""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic_core import to_json

from overlord.errors import StoreError
from overlord.stores.places import Appender, Place

VERSION = 1

Record = dict[str, Any]
_UNWRITTEN = bytes(2)
_NAME = re.compile(r"journal-[0-9]{6,18}-[0-9]{8,18}")


@dataclass(slots=True)
class Segment:
    """One file of a journal."""

    name: str
    """Names sort by the owner that wrote them, then by a number."""
    bytes: int = 0
    """How many bytes of it are valid."""
    newest: int = -1
    """The highest step of its records."""

    @property
    def owner(self) -> int:
        """The number of the owner that wrote it."""
        return int(self.name.split("-")[1])


@dataclass(frozen=True, slots=True)
class FoundJournal:
    """The content of a journal as read."""

    records: Sequence[Record]
    segments: Sequence[Segment]
    damaged: int
    """Damaged records that were skipped."""


class Journal:
    """Writes the journal of one lineage. Records are buffered until a lineage begins.

    Args:
        place: The place of the store.
        check: Raises when this process does not own the store any more.

    Example:
        >>> import tempfile
        >>> from overlord.stores.places import open_place
        >>> place = open_place(tempfile.mkdtemp())
        >>> journal = Journal(place, lambda: None)
        >>> journal.begin("lineage-0001", owner=1)
        >>> journal.append({"kind": "report", "step": 3}, durable=True)
        >>> list(journal.records())
        [{'kind': 'report', 'step': 3}]
    """

    def __init__(self, place: Place, check: Callable[[], None]) -> None:
        self._place = place
        self._check = check
        self._folder = ""
        self._owner = 0
        self._number = 0
        self._file: Appender | None = None
        self._segments: list[Segment] = []
        self._cut: dict[str, int] = {}
        self._torn = False
        self._before: dict[str, int] = {}
        self._waiting: list[tuple[int, bytes]] = []
        # A plan record must not wait for the disk, so the buffer has a lock of its own.
        self._adding, self._writing = threading.Lock(), threading.Lock()

    def begin(self, folder: str, owner: int, found: FoundJournal | None = None) -> None:
        """Begin to write in the folder of a lineage, after the segments found there."""
        self._folder, self._owner = folder, owner
        if found is not None:
            self._segments = [Segment(s.name, s.bytes, s.newest) for s in found.segments]
            self._before = {s.name: s.bytes for s in found.segments}
        with self._writing:
            self._write([], force=True)

    def append(self, record: Record, *, durable: bool) -> None:
        """Write one record; a durable one is on disk when this returns.

        Raises:
            StoreError: The store failed; the record counts as not written, and may be written again.
            Fenced: Another process owns the store.
        """
        line = (record["step"], encode(record))
        if not durable or not self._folder:
            with self._adding:
                self._waiting.append(line)
            return
        with self._writing:
            self._write([line])

    def commit(self, *, force: bool = False) -> None:
        """Write buffered records; on an object store only when forced, as each write is an object."""
        if self._waiting and (force or self._place.can_append):
            with self._writing:
                self._write([])

    def settle(self) -> None:
        """Make sure that no record of a failed write is ever read: the cut is on disk when this returns.

        Raises:
            StoreError: The store still fails.
        """
        if self._torn:
            with self._writing:
                self._write([], force=True)

    def mark(self) -> str:
        """Return the name of the first segment that may hold later records."""
        # Buffered records may be on their way into the newest segment.
        return self._segments[-1].name

    def rotate(self) -> None:
        """Write buffered records, and begin a new segment."""
        with self._writing:
            if self._waiting:
                self._write([])
            if self._file is not None:
                self._end_segment()
                self._write([], force=True)

    def first_needed(self, step: int, mark: str) -> str:
        """Return the first segment that has a record of a step or later, or is not before a mark."""
        with self._writing:
            return next((s.name for s in self._segments if s.newest >= step or s.name >= mark), mark)

    def forget(self, until: str) -> None:
        """Remove the segments before one."""
        with self._writing:
            while len(self._segments) > 1 and self._segments[0].name < until:
                old = self._segments[0].name
                self._place.delete(f"{self._folder}/{old}")
                del self._segments[0]
                self._cut.pop(old, None)
                self._before.pop(old, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.bytes for segment in self._segments)

    def records(self) -> Iterator[Record]:
        """Yield every record written so far."""
        self.commit(force=True)
        yield from read_journal(self._place, self._folder).records

    def close(self) -> None:
        """Close the file. Buffered records are lost: commit before."""
        with self._writing:
            self._end_segment()

    def _end_segment(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, lines: list[tuple[int, bytes]], *, force: bool = False) -> None:
        # Buffered plan records go first, in the order in which they were appended. If the write fails they return to
        # the front of the buffer; the durable lines do not, their caller gets the error and may append them again.
        with self._adding:
            waiting, self._waiting = self._waiting, []
        chosen = waiting + lines if waiting else lines
        if not chosen and not force:
            return
        try:
            self._put(b"".join([line for _, line in chosen]), max([step for step, _ in chosen], default=-1))
        except StoreError:
            with self._adding:
                self._waiting = waiting + self._waiting
            raise

    def _put(self, data: bytes, newest: int) -> None:
        """Append data to the current segment; to a new one after a failure, and always on an object store."""
        if self._file is None:
            data = self._new_segment() + data
        segment = self._segments[-1]
        try:
            if self._file is None:
                self._place.write(f"{self._folder}/{segment.name}", data)
            else:
                self._file.append(data)
            self._check()
        except StoreError:
            # Part or all of it may be there, but it was not reported as durable.
            self._cut[segment.name] = segment.bytes
            self._torn = True
            self._end_segment()
            raise
        self._torn = False
        segment.bytes += len(data)
        segment.newest = max(segment.newest, newest)

    def _new_segment(self) -> bytes:
        """Begin a segment; return the line it begins with."""
        self._number += 1
        name = f"journal-{self._owner:06d}-{self._number:08d}"
        if self._place.can_append:
            self._file = self._place.open_append(f"{self._folder}/{name}")
        self._segments.append(Segment(name))
        return encode({"kind": "segment", "step": -1, "version": VERSION, "before": self._before, "cut": self._cut})


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line."""
    try:
        body = to_json(record)  # five times as fast as `json`, which took a tenth of the time of a durable report
    except ValueError:
        body = json.dumps(record, separators=(",", ":")).encode()  # the name of a file that is not UTF-8
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_journal(place: Place, folder: str, first: str = "") -> FoundJournal:
    """Read the good records of a lineage's journal, from a segment on, in the order in which they were written."""
    names = sorted(name for name in place.names(folder) if _NAME.fullmatch(name) and name >= first)
    parts = {name: list(_lines(place.read(f"{folder}/{name}") or b"")) for name in names}
    valid = _valid_bytes(parts)
    records: list[Record] = []
    segments: list[Segment] = []
    damaged = 0
    for name, lines in parts.items():
        segment = Segment(name)
        for end, record in lines:
            if end > valid[name]:
                continue
            if record is None:
                damaged += 1
                continue
            segment.bytes = end
            if record["kind"] != "segment":
                segment.newest = max(segment.newest, record["step"])
                records.append(record)
        segments.append(segment)
    return FoundJournal(records, segments, damaged)


def _valid_bytes(parts: Mapping[str, Sequence[tuple[int, Record | None]]]) -> dict[str, int]:
    """Return how many bytes of each segment are valid: without failed writes, and writes of a fenced owner.

    The first record of a segment has `before`, the bytes of older owners' segments that its owner had read, and `cut`,
    the valid bytes of its own owner's segments in which a write failed.
    """
    valid = {name: max((end for end, _ in lines), default=0) for name, lines in parts.items()}
    for name, lines in parts.items():
        owner = Segment(name).owner
        for head in (record for _, record in lines[:1] if record is not None and record["kind"] == "segment"):
            for other in valid:
                if Segment(other).owner < owner:
                    valid[other] = min(valid[other], head["before"].get(other, 0))
            for other, length in head["cut"].items():
                valid[other] = min(valid.get(other, 0), length)
    return valid


def _lines(data: bytes) -> Iterator[tuple[int, Record | None]]:
    """Yield where each line ends, with its record, None for a damaged one. A line without an end was torn: dropped."""
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        line, at = data[at:end], end + 1
        head, _, body = line.partition(b" ")
        if head == b"%08x" % zlib.crc32(body):
            yield at, _record_in(body)
        elif _UNWRITTEN not in line:
            yield at, None


def _record_in(body: bytes) -> Record | None:
    """Return a record; None for what no journal writes, though its checksum fits."""
    try:
        found = json.loads(body)
        kind = found["kind"]
        if kind.startswith("change."):
            kind = "change"
        return found if msgspec.convert(found, _FORMS.get(kind, _Any)) is not None else None
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):  # a ValidationError is a ValueError
        return None


_Step = Annotated[int, msgspec.Meta(ge=-1, le=1 << 60)]
_Cell = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Any(msgspec.Struct, frozen=True):
    step: _Step


class _Segment(_Any, frozen=True):
    before: dict[str, int]
    cut: dict[str, int]


class _Report(_Any, frozen=True):
    metrics: dict[str, float | None] = {}


class _Plan(_Any, frozen=True):
    order: str = ""
    plan: str = ""
    rows: dict[str, list[_Cell]] | None = None
    cursors: dict[str, list[_Cell]] | None = None
    mixer: dict[str, Any] | None = None


class _Verdict(_Any, frozen=True):
    source: str = ""
    row: _Cell = 0
    reason: str = ""
    epoch: _Cell = 0


class _Change(_Any, frozen=True):
    at: _Step = 0


class _Rewind(_Any, frozen=True):
    mesh: dict[str, Any] = {}


_FORMS: dict[str, type[_Any]] = {
    "segment": _Segment, "report": _Report, "plan": _Plan, "verdict": _Verdict, "change": _Change, "rewind": _Rewind,
}  # fmt: skip
"""What the fields of each kind of record must be, where they are there; changes are checked where they are read."""

for _form in (_Any, *_FORMS.values()):
    msgspec.json.Decoder(_form)  # at import, by one thread: see `codec.Decoder`
