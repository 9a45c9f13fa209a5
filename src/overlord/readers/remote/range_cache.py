"""Ranges of remote objects kept on this host's disk, within a limit, for all processes and services of the host.

    RangeCache    a folder of entries; each is a range of one version of one object, as it came
    Claim         an entry that is being fetched; other processes wait for it instead of fetching it too

Layout: `objects/xx/<hash of the object's version>/<first byte>-<byte behind the last>`, both in hexadecimal, with
`.end` behind it at the ends of an object. The name `.<..>.part` is an entry that is being fetched, locked by the
process that does so. `total` has the bytes of all entries, and its lock is held while they change. `live/` has a file
for each process that reads: its limit, and a line for each object that it may read again, with the time when its epoch
began. `limit` has that of the last launch, for commands that only look at sources.

Rules of this file:
1. It is a cache: an entry is never the only copy of anything, any of it can be removed at any time, and what cannot be
   written is not kept. A full disk turns it off for this process, with one warning.
2. A process that is killed leaves at most a `.part`, which the next one removes: its lock is gone.
3. Entries have a checksum for every 128 KiB, verified whenever they are read. A damaged entry is removed and counted.
4. Eviction follows the order of reading. All of a source is read once an epoch, window by window of its files. So what
   was read since its epoch began is needed last and goes first, the most recently used before all others. Then go the
   entries of objects that this epoch has not come to, as far as those that it has need the room. What an object that
   it has come to still needs stays: where there is no room, what is fetched is not kept. That keeps nearly as many hits
   an epoch as fit the limit, which no other policy exceeds (of the least recently used ones none would be there when
   they are needed). Before all of them go the objects that no running process may read again. The ends of objects
   (footers, tables) are read again and again and stay.
5. An entry counts as used when most of its pieces were read. What is being written or read never goes: the one is
   locked, of the other a part was read within the last minutes.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overlord.job.layout_specs import DEFAULT_CACHE_BYTES
from overlord.readers.remote.fetching import fetcher
from overlord.readers.remote.object_store import RemoteObject
from overlord.storage import create_private, make_private, replacing

try:
    from isal.isal_zlib import crc32
except ImportError:  # a platform without wheels
    from zlib import crc32  # type: ignore[assignment]

logger = logging.getLogger("overlord")

PIECE_BYTES = 128 << 10
END_BYTES = 1 << 20
"""An entry of at most so many bytes at an end of its object holds what is read again and again."""
_END, _LIMIT = ".end", "limit"
_STAYS = 4
"""Entries of this rank and above are removed only with all others."""
_MAGIC = b"ovlrng\x002"
_HEAD = struct.Struct("<8sqqI")  # magic, first byte, bytes, checksum of what is before the times of uses
_SLACK = 32
"""One part in so many of the limit is freed at a time: every eviction looks at all entries."""
_WAIT_S = (0.002, 0.02)
_MOST_WAIT_S = 60.0
"""A process that was stopped holds its locks; after so long others fetch what it wanted to."""
_IDLE_NS = 10 * 60 * 10**9
"""An entry of which only a part was read, or nothing, counts as used after so long."""
_TRIES = 3
"""Entries that cannot be opened, one after the other, before the range is fetched: a process may be out of files."""
_FULL_S = 1.0
"""Where all entries are still needed, nothing is kept for so long: looking for room takes time."""
_FRESH_NS = 50_000_000
"""A folder that changed so lately may change again without another time."""


@dataclass(slots=True)
class _Listing:
    """The entries of an object as this process last saw them."""

    changed_ns: int = -1
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)


class BeingFetched(Exception):
    """Another thread or process has just begun to fetch the same range: it can be waited for."""


class Claim:
    """An entry that this process fetches: filled or given up, once."""

    def __init__(self, cache: RangeCache, remote: RemoteObject, start: int, stop: int, descriptor: int) -> None:
        self._cache = cache
        self._remote = remote
        self.start, self.stop = start, stop
        self.is_used = False
        """Whether this process reads what it fetches without the cache."""
        self._descriptor = descriptor

    def fill(self, data: memoryview) -> None:
        """Keep the bytes, or give up where there are none."""
        folder = self._cache.folder_of(self._remote)
        part = folder / _part_name(self.start, self.stop)
        is_kept = False
        try:
            if len(data) == self.stop - self.start:
                os.writev(self._descriptor, [_head(self.start, data, self.is_used)])
                _write_all(self._descriptor, data)
                if not _is_at(part, self._descriptor):  # the wait for this process was given up
                    return
                part.rename(folder / _name(self._remote, self.start, self.stop))
                is_kept = True
        except FileNotFoundError:
            pass  # the folder was removed
        except OSError as error:
            self._cache.give_up(error)
        finally:
            if _is_at(part, self._descriptor):
                part.unlink(missing_ok=True)
            os.close(self._descriptor)
            if not is_kept:
                self._cache.give_back_room(self.stop - self.start)


class RangeCache:
    """The cache of one folder, in this process.

    Args:
        folder: Where the entries are; made private when it is first written to.
        limit: Bytes of all entries, at most; 0 keeps nothing.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._counters = fetcher().counters
        self._lock = threading.Lock()
        self._listings: dict[Path, _Listing] = {}
        self._live: int | None = None
        self._live_since: dict[str, int] = {}
        self._full_until = 0.0
        self._bytes_coming = 0
        self._off = limit <= 0

    def __reduce__(self) -> tuple[Any, ...]:
        return range_cache, (self.folder.parent, self.limit)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return not self._off

    def read(self, remote: RemoteObject, at: int, count: int) -> memoryview | None:
        """Return bytes from `at` on, at most `count`, as many as one entry has; None where no entry has them.

        An entry that another process is fetching is waited for.
        """
        if self._off:
            return None
        waited, tries = 0.0, 0
        while True:
            listing = self._listing(remote)
            entry = _covering(listing, at)
            if entry is not None:
                tries += 1
                if tries > _TRIES:
                    return None
                data = self._read_entry(remote, *entry, at, min(count, entry[1] - at))
                if data is not None:
                    self._counters.add(hits=1, hit_bytes=len(data))
                    return data
                listing.changed_ns = -1  # another process has removed it, or it was damaged
                continue
            part = next((part for part in listing.parts if part[0] <= at < part[1]), None)
            if part is None or not self._is_fetched(remote, *part):
                return None
            if waited > _MOST_WAIT_S:
                (self.folder_of(remote) / _part_name(*part)).unlink(missing_ok=True)
                return None
            time.sleep(_WAIT_S[0] if waited < _WAIT_S[1] else _WAIT_S[1])
            waited += _WAIT_S[0] if waited < _WAIT_S[1] else _WAIT_S[1]

    def missing(self, remote: RemoteObject, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are neither kept nor being fetched."""
        if self._off:
            return [(start, stop)]
        listing = self._listing(remote)
        left: list[tuple[int, int]] = []
        for begin, end in sorted([*zip(listing.starts, listing.stops, strict=True), *listing.parts]):
            if end <= start or begin >= stop:
                continue
            if begin > start:
                left.append((start, begin))
            start = max(start, end)
        return [*left, (start, stop)] if start < stop else left

    def claim(self, remote: RemoteObject, start: int, stop: int) -> Claim | None:
        """Begin an entry; None where nothing is kept, or there is no room.

        Raises:
            BeingFetched: Another thread or process was faster.
        """
        if self._off or not self._take_room(stop - start):
            return None
        folder = self.folder_of(remote)
        descriptor: int | None = None
        try:
            if folder not in self._listings or not folder.exists():
                make_private(folder)
                with contextlib.suppress(FileExistsError), open(create_private(folder / "name"), "w") as handle:
                    handle.write(remote.url)
            descriptor = create_private(folder / _part_name(start, stop))
        except FileExistsError:
            self.give_back_room(stop - start)
            self._listings.pop(folder, None)
            raise BeingFetched from None
        except FileNotFoundError:
            pass  # the folder was removed at this moment
        except OSError as error:
            self.give_up(error)
        if descriptor is None:
            self.give_back_room(stop - start)
            return None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not _is_at(folder / _part_name(start, stop), descriptor):
            os.close(descriptor)  # another process took it for abandoned, in the moment before it was locked
            self.give_back_room(stop - start)
            raise BeingFetched
        return Claim(self, remote, start, stop, descriptor)

    def folder_of(self, remote: RemoteObject) -> Path:
        """Return the folder of an object's entries."""
        name = _hash_of(remote)
        return self.folder / "objects" / name[:2] / name

    def give_up(self, error: OSError) -> None:
        """Keep nothing any more in this process: the disk is full, or the folder cannot be written."""
        if not self._off:
            self._off = True
            logger.warning(
                "the cache of remote files in %s cannot be written (%s): nothing is kept there from now on, and what "
                "is read again is fetched again. Free some of the disk, or set a smaller cache_bytes.",
                self.folder, error.strerror or error,
            )  # fmt: skip

    def keep_for(self, remotes: Iterable[RemoteObject], *, begins: bool = False) -> None:
        """Say that this process may read some objects again and again: their entries outlive those of other runs.

        Args:
            remotes: The objects.
            begins: Whether an epoch of them begins now, so that all entries that are there are needed in it.
        """
        if self._off:
            return
        names = {_hash_of(remote) for remote in remotes}
        with self._lock:
            if not begins and names <= self._live_since.keys():
                return
            since = time.time_ns() if begins else 0
            self._live_since |= {name: since for name in names if begins or name not in self._live_since}
            try:
                if self._live is None:
                    make_private(self.folder / "live")
                    self._live = create_private(self.folder / "live" / uuid.uuid4().hex)
                    fcntl.flock(self._live, fcntl.LOCK_SH)
                    with replacing(self.folder / _LIMIT) as scratch, open(create_private(scratch), "w") as handle:
                        handle.write(str(self.limit))
                lines = (f"{name} {since:20d}\n" for name, since in self._live_since.items())
                os.pwrite(self._live, "".join([f"{_LIMIT} {self.limit:20d}\n", *lines]).encode(), 0)
            except OSError as error:
                self.give_up(error)

    # The account of bytes, and eviction.

    def _take_room(self, nbytes: int) -> bool:
        """Count bytes that will be written, after evicting entries where there is no room; False if there is none."""
        if time.monotonic() < self._full_until or nbytes > self.limit:
            return False
        try:
            with self._total() as total:
                limit = self.limit if total.value + nbytes <= self.limit else self._limit_in_force()
                if total.value + nbytes > limit:
                    total.value = self._evict(limit - nbytes - limit // _SLACK)
                if total.value + nbytes > limit:
                    self._full_until = time.monotonic() + _FULL_S
                    return False
                total.value += nbytes
                return True
        except OSError as error:
            self.give_up(error)
            return False

    def give_back_room(self, nbytes: int) -> None:
        """Count bytes no more that were not written after all."""
        with contextlib.suppress(OSError), self._total() as total:
            total.value -= nbytes

    def usage(self) -> tuple[int, int, int]:
        """Return how many objects and entries there are, and their bytes."""
        entries = list(self._entries())
        return len({entry.folder for entry in entries}), len(entries), sum(entry.size for entry in entries)

    def names(self) -> dict[str, tuple[int, int]]:
        """Return the entries and bytes of each object, by its URL."""
        found: dict[str, tuple[int, int]] = {}
        for entry in self._entries():
            url = _text(entry.folder / "name") or entry.folder.name
            count, size = found.get(url, (0, 0))
            found[url] = count + 1, size + entry.size
        return found

    def clear(self) -> int:
        """Remove all entries but those that are being read or written; return the bytes that were freed."""
        if not self.folder.is_dir():
            return 0
        with self._total() as total:
            before = self.usage()[2] + self._bytes_coming
            total.value = self._evict(0)
            return before - total.value

    @contextlib.contextmanager
    def _total(self) -> Iterator[_Total]:
        make_private(self.folder)
        descriptor = os.open(self.folder / "total", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.pread(descriptor, 8, 0)
            begun = int.from_bytes(text, "little") if len(text) == 8 else self.usage()[2]
            total = _Total(begun)
            yield total
            if total.value != begun or len(text) != 8:
                os.pwrite(descriptor, max(0, total.value).to_bytes(8, "little"), 0)
        finally:
            os.close(descriptor)

    def _evict(self, most: int) -> int:
        """Remove entries until at most so many bytes are left; return how many are. The caller holds the lock.

        Those that are being fetched count.
        """
        live = self._live_everywhere()
        there = list(self._entries())
        reached = {entry.folder for entry in there if entry.changed_ns >= live.get(entry.folder.name, 0)}
        entries = sorted((entry.rank(live, entry.folder in reached), entry) for entry in there)
        left = sum(entry.size for _, entry in entries) + self._bytes_coming
        for rank, entry in entries:
            if left <= most or (most > 0 and rank[0] >= _STAYS):
                break
            if _remove_unused(entry.path):
                left -= entry.size
        return left

    def _entries(self) -> Iterator[_Entry]:
        """Yield all entries, count those that are being fetched, and remove what killed processes have left."""
        self._bytes_coming = 0
        for shelf in _folders(self.folder / "objects"):
            for folder in _folders(shelf):
                for path in _files(folder):
                    if path.name.endswith(".part"):
                        part = _bounds(path.name[1:-5])
                        if not _remove_abandoned(path) and part is not None:
                            self._bytes_coming += part[1] - part[0]
                        continue
                    bounds = _bounds(path.name)
                    if bounds is None:
                        continue
                    with contextlib.suppress(OSError):  # another process has removed it
                        status = path.stat()
                        yield _Entry(path, folder, *bounds, status.st_mtime_ns)

    def _limit_in_force(self) -> int:
        """Return the largest limit of all processes that read: none makes others lose what they have room for."""
        return max(self.limit, self._live_everywhere().get(_LIMIT, 0))

    def _live_everywhere(self) -> dict[str, int]:
        """Return the objects that any process may read again, and when their newest epoch began; and the limit."""
        live: dict[str, int] = {}
        for path in _files(self.folder / "live"):
            text = _text(path)
            if _remove_abandoned(path):
                continue
            for line in text.splitlines():
                name, _, since = line.partition(" ")
                if since.strip().isdecimal():
                    live[name] = max(live.get(name, 0), int(since))
        return live

    # Reading.

    def _listing(self, remote: RemoteObject) -> _Listing:
        folder = self.folder_of(remote)
        with self._lock:
            listing = self._listings.setdefault(folder, _Listing())
        try:
            changed = os.stat(folder).st_mtime_ns
        except OSError:
            return _Listing()
        if changed == listing.changed_ns and time.time_ns() - changed > _FRESH_NS:
            return listing
        new, bounds = _Listing(changed), list[tuple[int, int]]()
        for path in _files(folder):
            if path.name.endswith(".part"):
                part = _bounds(path.name[1:-5])
                if part is not None:
                    new.parts.append(part)
            elif (entry := _bounds(path.name)) is not None:
                bounds.append(entry)
        new.starts, new.stops = [start for start, _ in sorted(bounds)], [stop for _, stop in sorted(bounds)]
        with self._lock:
            self._listings[folder] = new
        return new

    def _is_fetched(self, remote: RemoteObject, start: int, stop: int) -> bool:
        """Return whether an entry that is not there yet may come; one of a process that is gone is removed."""
        path = self.folder_of(remote) / _part_name(start, stop)
        if _remove_abandoned(path):
            return False
        return path.exists() or (path.parent / _name(remote, start, stop)).exists()

    def _read_entry(self, remote: RemoteObject, start: int, stop: int, at: int, count: int) -> memoryview | None:
        path = self.folder_of(remote) / _name(remote, start, stop)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            data = _read_pieces(descriptor, start, stop, at, count)
        except OSError:
            data = None
        finally:
            os.close(descriptor)
        if data is None:
            self._counters.add(damaged=1)
            logger.warning("%s is damaged; bytes %d to %d of %s are fetched again", path, start, stop, remote.url)
            with self._total() as total:
                path.unlink(missing_ok=True)
                total.value -= stop - start
        return data


@dataclass(slots=True)
class _Total:
    value: int


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    path: Path
    folder: Path
    start: int
    stop: int
    changed_ns: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def rank(self, live: Mapping[str, int], is_reached: bool) -> tuple[int, int]:
        """Return what entries are removed by, the smallest first: see rule 4.

        Args:
            live: The objects that may be read again, with the time when their epoch began.
            is_reached: Whether this epoch has come to its object.
        """
        since = live.get(self.folder.name)
        if since is None:
            return 0, self.changed_ns
        if self.path.name.endswith(_END):
            return 6, -self.changed_ns
        if self.changed_ns < since:
            return 5 if is_reached else 3, -self.changed_ns
        use = _use_of(self.path, self.size, since)
        if use != 1 and time.time_ns() - self.changed_ns > _IDLE_NS:
            use = 1
        return 1 if use == 1 else 3 + use, -self.changed_ns


# One entry: a head with the checksums of its pieces and when each was read last (0 if never); the bytes.


def _head(start: int, data: memoryview, is_used: bool) -> bytes:
    sums = [crc32(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)]
    table = np.array(sums, "<u4").tobytes()
    check = zlib.crc32(table, zlib.crc32(struct.pack("<qq", start, len(data))))
    times = np.full(len(sums), time.time_ns() if is_used else 0, "<i8")
    return _HEAD.pack(_MAGIC, start, len(data), check) + table + times.tobytes()


def _read_pieces(descriptor: int, start: int, stop: int, at: int, count: int) -> memoryview | None:
    """Return some bytes of an entry and note when their pieces were read; None if it is damaged."""
    size = stop - start
    pieces = -(-size // PIECE_BYTES)
    body = _HEAD.size + 12 * pieces
    head = os.pread(descriptor, body, 0)
    if len(head) < body:
        return None
    magic, begin, length, check = _HEAD.unpack_from(head)
    table = head[_HEAD.size : _HEAD.size + 4 * pieces]
    if magic != _MAGIC or (begin, length) != (start, size):
        return None
    if zlib.crc32(table, zlib.crc32(struct.pack("<qq", start, size))) != check:
        return None
    first, last = (at - start) // PIECE_BYTES, (at - start + count - 1) // PIECE_BYTES
    data = bytearray(min((last + 1) * PIECE_BYTES, size) - first * PIECE_BYTES)
    if os.preadv(descriptor, [data], body + first * PIECE_BYTES) != len(data):
        return None
    view = memoryview(data)
    sums = np.frombuffer(table, "<u4")
    for piece in range(first, last + 1):
        begin = (piece - first) * PIECE_BYTES
        if crc32(view[begin : begin + PIECE_BYTES]) != sums[piece]:
            return None
    # A piece is used when its end is read: pieces are often read in several steps.
    ends = last + 1 if at + count == stop or (at + count - start) % PIECE_BYTES == 0 else last
    if ends > first:
        times = np.full(ends - first, time.time_ns(), "<i8")
        os.pwrite(descriptor, times.tobytes(), _HEAD.size + 4 * pieces + 8 * first)
    offset = at - start - first * PIECE_BYTES
    return view[offset : offset + count].toreadonly()


def _use_of(path: Path, size: int, since_ns: int) -> int:
    """Return 1 for an entry that was used since a time, 2 for one that is being used, 3 for one that was not."""
    pieces = -(-size // PIECE_BYTES)
    try:
        with open(path, "rb") as handle:
            handle.seek(_HEAD.size + 4 * pieces)
            times = np.frombuffer(handle.read(8 * pieces), "<i8")
    except (OSError, ValueError):
        return 1
    read = int((times >= max(1, since_ns)).sum())
    return 1 if 4 * read >= 3 * pieces else 2 if read else 3


def _name(remote: RemoteObject, start: int, stop: int) -> str:
    is_end = (start == 0 or stop == remote.size) and stop - start <= END_BYTES
    return f"{start:x}-{stop:x}" + (_END if is_end else "")


def _part_name(start: int, stop: int) -> str:
    return f".{start:x}-{stop:x}.part"


def _bounds(name: str) -> tuple[int, int] | None:
    start, dash, stop = name.removesuffix(_END).partition("-")
    try:
        return (int(start, 16), int(stop, 16)) if dash else None
    except ValueError:
        return None


def _covering(listing: _Listing, at: int) -> tuple[int, int] | None:
    """Return the entry that has a byte, and most behind it."""
    place = bisect.bisect_right(listing.starts, at)
    # Entries may overlap a little, where ranges were joined differently: a few before are looked at.
    entries = [(listing.starts[n], listing.stops[n]) for n in range(max(0, place - 4), place) if listing.stops[n] > at]
    return max(entries, key=lambda entry: entry[1], default=None)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file still has its name."""
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def _remove_unused(path: Path) -> bool:
    """Remove an entry unless a process reads it; return whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


_remove_abandoned = _remove_unused
"""Remove what a process was writing when it was killed: nothing locks it any more. Return whether it is gone."""


def _hash_of(remote: RemoteObject) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in remote.version:
        text = str(part).encode("utf-8", "surrogateescape")
        digest.update(b"%d:" % len(text) + text)
    return digest.hexdigest()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _files(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []


@functools.cache
def range_cache(cache: Path, limit: int | None = None) -> RangeCache:
    """Return what keeps ranges in a cache folder, the same for all callers of this process.

    Without a limit, that of the last launch counts.
    """
    if limit is None:
        text = _text(cache / "remote" / _LIMIT)
        limit = int(text) if text.isdecimal() else DEFAULT_CACHE_BYTES
    return RangeCache(cache / "remote", limit)
