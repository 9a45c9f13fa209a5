"""Remote objects as files: opened for random access, read ahead, and listed.

    RangeFile      one open object; knows where it is read front to back and fetches ahead there
    RemoteFile     the same as a file of pyarrow, which readers take
    AheadQueue     fetches what will be read soon into the cache
    ObjectListing  lists a bucket as a filesystem of pyarrow, with as few requests as possible

How much is fetched: a read that does not follow another one takes what was asked for, or 64 KiB. Where reads follow
each other, the next ranges have 1, 4 and then 8 MiB, and one, later two of them are on their way while the one before
is read. Several places of a file may be read so at the same time (the columns of a row group). What is fetched ahead
is limited for the process as a whole (`BUDGET_BYTES`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import fs

from overlord.errors import ReaderError
from overlord.readers.remote.fetching import MOST_RANGE_BYTES, ObjectChanged, coalesced, fetcher
from overlord.readers.remote.object_store import Bucket, RemoteObject, checked_options, mtime_ns_of
from overlord.readers.remote.range_cache import BeingFetched, RangeCache
from overlord.storage import StorageOptions

logger = logging.getLogger("overlord")

_FIRST_BYTES = 64 << 10
"""What a read that follows no other one takes at least."""
_STEPS = (1 << 20, 4 << 20, MOST_RANGE_BYTES)
"""The ranges of a place that is read front to back."""
_NEAR_BYTES = 1 << 20
"""A read so little behind the one before follows it; what is between is fetched with it."""
_MOST_PLACES = 64
"""Places of a file that are read front to back at the same time; further ones begin anew."""
_MOST_AHEAD = 16
"""Ranges of the queue that are on their way at the same time."""
_MOST_QUEUED = 4096
"""Ranges that wait in it; the oldest are given up, and fetched when they are read."""
_GAP_BYTES = 256 << 10
"""Ranges that are asked for together and lie so close are fetched as one."""


@dataclass(slots=True)
class _Range:
    """A range that is in memory or on its way."""

    start: int
    stop: int
    data: Future[memoryview]
    reserved: int


class _Place:
    """A place of a file that is read front to back."""

    def __init__(self, at: int) -> None:
        self.begin = self.next = at
        self.reads = 0
        self.step = -1
        """Which of `_STEPS` was fetched last; -1 before the first."""
        self.until = 1 << 62
        """Where reading ends, as far as that is known."""
        self.ranges: deque[_Range] = deque()


class RangeFile(io.RawIOBase):
    """An object that is open for reading. Threads may share it, and then wait for each other.

    Args:
        remote: The object.
        cache: Where ranges are kept on disk; None for nowhere.
    """

    def __init__(self, remote: RemoteObject, cache: RangeCache | None = None) -> None:
        super().__init__()
        self._remote = remote
        self._cache = cache if cache is not None and cache.is_on else None
        self._fetcher = fetcher()
        self._lock = threading.RLock()
        self._at = 0
        self._places: list[_Place] = []

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._remote.size}[whence]
        return self._at

    def size(self) -> int:
        """Return the bytes of the object."""
        return self._remote.size

    def read(self, size: int | None = -1) -> Any:
        with self._lock:
            left = max(0, self._remote.size - self._at)
            count = left if size is None or size < 0 else min(size, left)
            data = self._bytes(self._at, count)
            self._at += count
            return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with self._lock:
                for place in self._places:
                    self._forget(place)
                self._places.clear()
        super().close()

    def will_read(self, start: int, stop: int) -> None:
        """Say that a range will be read front to back: it is fetched ahead in full steps from the beginning."""
        if not 0 <= start < stop:
            return  # a footer may claim anything
        with self._lock:
            place = self._place_at(start)
            place.step, place.until = len(_STEPS) - 1, stop
            self._look_ahead(place, start)

    def fetch(self, ranges: Sequence[tuple[int, int]], *, again: bool = False) -> list[memoryview]:
        """Return the bytes of some ranges, with as few requests as possible, all in flight at the same time.

        Args:
            ranges: Where each begins, and where it ends before.
            again: Whether most of it will be read again soon, so that the cache keeps it.

        Raises:
            OSError: A range is not inside of the object, or could not be fetched.
            ReaderError: The object has changed.
        """
        outside = next((one for one in ranges if not 0 <= one[0] <= one[1] <= self._remote.size), None)
        if outside is not None:
            raise OSError(f"bytes {outside[0]} to {outside[1]} are not in a file of {self._remote.size} bytes")
        spans = coalesced(ranges, _GAP_BYTES)
        with _errors(self._remote):
            data = {span[0]: self._begin(*span, again) for span in spans}
            parts = {start: _joined([future.result() for future in futures]) for start, futures in data.items()}
        starts = [start for start, _ in spans]
        parts_of: list[memoryview] = []
        for start, stop in ranges:
            base = max(begin for begin in starts if begin <= start)
            parts_of.append(parts[base][start - base : stop - base])
        return parts_of

    def _begin(self, start: int, stop: int, again: bool) -> list[Future[memoryview]]:
        """Begin to fetch what is not kept of a range."""
        futures: list[Future[memoryview]] = []
        while start < stop:
            cached = self._cache.read(self._remote, start, stop - start) if self._cache is not None else None
            if cached is not None:
                future: Future[memoryview] = Future()
                future.set_result(cached)
                futures.append(future)
                start += len(cached)
                continue
            flying = self._fetcher.in_flight(self._remote, start)
            if flying is not None:
                begin, end, data = flying
                futures.append(_sliced(data, start - begin, min(end, stop) - begin))
                start = end
                continue
            end = self._until_kept(start, stop)
            with contextlib.suppress(BeingFetched):  # then it is waited for
                futures.append(_fetch_and_keep(self._remote, self._cache, start, end, again=again))
                start = end
        return futures

    def _bytes(self, at: int, count: int) -> memoryview:
        if not count:
            return memoryview(b"")
        place = self._place_at(at)
        parts: list[memoryview] = []
        with _errors(self._remote):
            while count:
                part = self._part(place, at, count)
                parts.append(part)
                at += len(part)
                count -= len(part)
        place.next = at
        place.reads += 1
        return _joined(parts)

    def _end_of(self, place: _Place, at: int) -> int:
        """Return where reading ahead ends: what another place reads, such as the next column, is not fetched twice."""
        others = (p.begin for p in self._places if p is not place and p.reads > 1 and p.begin > at)
        return min(self._remote.size, place.until, *others)

    def _place_at(self, at: int) -> _Place:
        """Return the place that a read at an offset belongs to: the nearest one that it follows."""
        near: list[tuple[int, int]] = []
        for number, place in enumerate(self._places):
            first = min(place.next, place.ranges[0].start) if place.ranges else place.next
            last = place.ranges[-1].stop if place.ranges else place.next
            if first <= at <= last + _NEAR_BYTES:
                near.append((abs(at - place.next), number))
        if near:
            self._places.append(self._places.pop(min(near)[1]))  # the most recently read is last
            return self._places[-1]
        if len(self._places) == _MOST_PLACES:
            self._forget(self._places.pop(0))
        self._places.append(_Place(at))
        return self._places[-1]

    def _part(self, place: _Place, at: int, count: int) -> memoryview:
        """Return some bytes from an offset on: what the first range of its place has of them, or the cache."""
        while place.ranges and place.ranges[0].stop <= at:
            self._drop(place.ranges.popleft())
            if place.ranges:
                place.step = min(place.step + 1, len(_STEPS) - 1)
        if place.ranges and place.ranges[0].start > at:
            self._forget(place)
        if not place.ranges:
            flying = self._fetcher.in_flight(self._remote, at)
            if flying is not None:
                start, stop, data = flying
                return data.result()[at - start :][:count]
            cached = self._cache.read(self._remote, at, count) if self._cache is not None else None
            if cached is not None:
                return cached
            most = self._fetcher.allowance(_FIRST_BYTES if place.step < 0 else _STEPS[place.step])
            stop = max(min(self._remote.size, at + count), min(at + most, self._end_of(place, at)))
            place.step = min(place.step + 1, len(_STEPS) - 1)
            if not self._schedule(place, at, self._until_kept(at, stop), ahead=False):
                return self._part(place, at, count)
        self._look_ahead(place, at)
        first = place.ranges[0]
        try:
            return first.data.result()[at - first.start :][:count]
        except BaseException:
            self._forget(place)  # a caller that reads again begins anew
            raise

    def _look_ahead(self, place: _Place, at: int) -> None:
        """Begin to fetch what follows, where this place is read front to back."""
        end = self._end_of(place, at)
        last = place.ranges[-1].stop if place.ranges else at
        while len(place.ranges) <= place.step and place.step and last < end:
            if self._cache is not None and not self._cache.missing(self._remote, last, last + 1):
                return  # it is read from the cache when it is reached
            stop = self._until_kept(last, min(end, last + _STEPS[place.step]))
            if not self._schedule(place, last, stop, ahead=True):
                return
            last = stop

    def _schedule(self, place: _Place, start: int, stop: int, *, ahead: bool) -> bool:
        """Begin to fetch a range; return False where others do, or where the budget has no room for fetching ahead."""
        if not self._fetcher.reserve(stop - start, ahead=ahead):
            return False
        try:
            data = _fetch_and_keep(self._remote, self._cache, start, stop)
        except BeingFetched:
            self._fetcher.release(stop - start)
            return False
        place.ranges.append(_Range(start, stop, data, stop - start))
        return True

    def _until_kept(self, start: int, stop: int) -> int:
        """Return where the first stretch of a range ends that is neither kept nor being fetched."""
        if self._cache is None:
            return stop
        missing = self._cache.missing(self._remote, start, stop)
        return missing[0][1] if missing and missing[0][0] == start else stop

    def _forget(self, place: _Place) -> None:
        while place.ranges:
            self._drop(place.ranges.popleft())

    def _drop(self, dropped: _Range) -> None:
        # What is still on its way is not cancelled: it goes to the cache, or another reader waits for it.
        dropped.data.add_done_callback(lambda _: self._fetcher.release(dropped.reserved))


class RemoteFile(pa.PythonFile):  # type: ignore[misc]
    """A remote object as a file of pyarrow."""

    ranges: RangeFile

    @classmethod
    def open(cls, remote: RemoteObject, cache: RangeCache | None = None) -> RemoteFile:
        """Open an object; nothing is asked of the store yet."""
        ranges = RangeFile(remote, cache)
        opened = cls(ranges, mode="r")
        opened.ranges = ranges
        return opened


class AheadQueue:
    """Ranges that will be read soon and are fetched into the cache meanwhile, in order, as room comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[RemoteObject, RangeCache, int, int]] = deque(maxlen=_MOST_QUEUED)
        self._running = 0
        self._planners = ThreadPoolExecutor(2, thread_name_prefix="fetch-ahead")

    def plan(self, work: Callable[[], object]) -> None:
        """Find out in the background what to put; what fails is given up, and met again when it is read."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # of the storage, of a damaged file, of a service that closes
                logger.debug("nothing is fetched ahead: %s", error)

        self._planners.submit(run)

    def put(self, remote: RemoteObject, cache: RangeCache, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch ranges of an object, as far as they are not kept."""
        if not cache.is_on:
            return
        with self._lock:
            for start, stop in coalesced(ranges, _GAP_BYTES):
                for at in range(max(0, start), min(stop, remote.size), MOST_RANGE_BYTES):
                    self._queue.append((remote, cache, at, min(at + MOST_RANGE_BYTES, stop, remote.size)))
        self._start()

    def _start(self) -> None:
        fetches = fetcher()
        while True:
            with self._lock:
                if not self._queue or self._running >= _MOST_AHEAD:
                    return
                remote, cache, start, stop = self._queue.popleft()
            for begin, end in cache.missing(remote, start, stop):
                if not fetches.reserve(end - begin, ahead=True):
                    with self._lock:
                        self._queue.appendleft((remote, cache, begin, stop))
                    return
                try:
                    claim = cache.claim(remote, begin, end)
                except BeingFetched:
                    claim = None
                if claim is None:
                    fetches.release(end - begin)
                    continue
                with self._lock:
                    self._running += 1
                fetched = fetches.fetch(remote, begin, end, claim.fill)
                fetched.add_done_callback(lambda _, size=end - begin: self._landed(size))  # type: ignore[misc]

    def _landed(self, size: int) -> None:
        fetcher().release(size)
        with self._lock:
            self._running -= 1
        fetcher().run_soon(self._start)


@functools.cache
def ahead_queue() -> AheadQueue:
    """Return the queue of this process."""
    return AheadQueue()


def changed(remote: RemoteObject) -> ReaderError:
    """Return the error for an object that is not what was listed, after looking at what it is now."""
    try:
        meta = fetcher().call(remote.bucket, lambda store: _head(store, remote.key))
        how = remote.is_in(meta) or "was written to after it was listed"
    except FileNotFoundError:
        how = "is gone"
    except OSError:
        how = "was written to after it was listed"
    return ReaderError(
        f"{remote.url} {how}; a file that changes under a running job would change the stream. "
        "Restore the file, or start a new run."
    )


@contextlib.contextmanager
def _errors(remote: RemoteObject) -> Iterator[None]:
    try:
        yield
    except (ObjectChanged, FileNotFoundError) as error:
        raise changed(remote) from error


def _fetch_and_keep(
    remote: RemoteObject, cache: RangeCache | None, start: int, stop: int, *, again: bool = False
) -> Future[memoryview]:
    claim = cache.claim(remote, start, stop) if cache is not None else None
    if claim is not None:
        claim.is_used = not again
    return fetcher().fetch(remote, start, stop, None if claim is None else claim.fill)


def _sliced(whole: Future[memoryview], start: int, stop: int) -> Future[memoryview]:
    part: Future[memoryview] = Future()

    def done(future: Future[memoryview]) -> None:
        error = future.exception()
        if error is None:
            part.set_result(future.result()[start:stop])
        else:
            part.set_exception(error)

    whole.add_done_callback(done)
    return part


def _joined(parts: Sequence[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


# Listing.


def _head(store: Any, key: str) -> Any:
    import obstore

    return obstore.head(store, key)


class ObjectListing(fs.FileSystemHandler):  # type: ignore[misc]
    """Lists objects, and opens them. What was listed is answered again without a request until `forget`.

    Args:
        scheme: Of the URL: one of `OBJECT_SCHEMES`.
        options: Storage options.

    Raises:
        SpecError: An option is unknown, or of another type.
    """

    def __init__(self, scheme: str, options: StorageOptions) -> None:
        checked_options(scheme, options)
        self._scheme = scheme
        self._options = dict(options)
        self._buckets: dict[str, Bucket] = {}
        self._objects: dict[str, RemoteObject | None] = {}
        self._folders: dict[str, bool] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectListing, (self._scheme, self._options)

    def forget(self) -> None:
        """Ask again from now on."""
        self._objects.clear()
        self._folders.clear()

    def object_at(self, path: str) -> RemoteObject:
        """Return an object that was listed, or look it up.

        Raises:
            FileNotFoundError: There is none.
        """
        remote = self._look_up(path)
        if remote is None:
            raise FileNotFoundError(f"{self._scheme}://{path} is not there")
        return remote

    def get_type_name(self) -> str:
        return self._scheme

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        return [self._info(path.rstrip("/")) for path in paths]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        folder = selector.base_dir.rstrip("/")
        self._list(folder, recursive=selector.recursive)
        begin = f"{folder}/"
        return [
            _file_info(path, remote)
            for path, remote in self._objects.items()
            if remote is not None and path.startswith(begin) and (selector.recursive or "/" not in path[len(begin) :])
        ]

    def open_input_file(self, path: str) -> RemoteFile:
        return RemoteFile.open(self.object_at(path))

    def open_input_stream(self, path: str) -> RemoteFile:
        return self.open_input_file(path)

    def _info(self, path: str) -> fs.FileInfo:
        base, recursive = _base_of_glob(path)
        if base is not None:  # one listing answers whether there is such a name, and then what matches
            self._list(base, recursive=recursive)
            remote = self._objects.get(path)
            return fs.FileInfo(path, fs.FileType.NotFound) if remote is None else _file_info(path, remote)
        # A name with a suffix is most often a file, another one a folder: the likelier request comes first.
        for looks in (self._look_up, self._has_files) if "." in path.rpartition("/")[2] else (
            self._has_files, self._look_up
        ):  # fmt: skip
            found = looks(path)
            if isinstance(found, RemoteObject):
                return _file_info(path, found)
            if found:
                return fs.FileInfo(path, fs.FileType.Directory)
        return fs.FileInfo(path, fs.FileType.NotFound)

    def _has_files(self, folder: str) -> bool:
        if self._scheme in ("http", "https"):  # such a server has no listings
            return False
        self._list(folder, recursive=True)
        return any(remote is not None and path.startswith(f"{folder}/") for path, remote in self._objects.items())

    def _look_up(self, path: str) -> RemoteObject | None:
        if path not in self._objects and not self._is_listed(path):
            bucket, key = self._bucket_of(path)
            try:
                meta = fetcher().call(bucket, lambda store: _head(store, key)) if key else None
            except FileNotFoundError:
                meta = None
            self._objects[path] = self._object_of(bucket, path, key, meta) if meta is not None else None
        return self._objects.get(path)

    def _is_listed(self, path: str) -> bool:
        """Return whether a listing would have had this path."""
        parent = path.rpartition("/")[0]
        if parent in self._folders:
            return True
        while parent:
            if self._folders.get(parent):
                return True
            parent = parent.rpartition("/")[0]
        return False

    def _list(self, folder: str, *, recursive: bool) -> None:
        if self._folders.get(folder, False) or (not recursive and folder in self._folders):
            return
        if self._is_listed(f"{folder}/") and self._is_listed(f"{folder}/x"):
            return
        if self._scheme in ("http", "https"):
            raise OSError("an HTTP server lists no folders. Name each file by its URL")
        bucket, prefix = self._bucket_of(folder)
        if not bucket.name:
            raise OSError("the URL names no bucket")
        for meta in fetcher().call(bucket, lambda store: _listed(store, prefix, recursive)):
            path = f"{bucket.name}/{meta['path']}"
            if path != folder:  # the mark of an empty folder
                self._objects[path] = self._object_of(bucket, path, meta["path"], meta)
        self._folders[folder] = recursive

    def _bucket_of(self, path: str) -> tuple[Bucket, str]:
        name, _, key = path.partition("/")
        if name not in self._buckets:
            self._buckets[name] = Bucket.of(self._scheme, name, self._options)
        return self._buckets[name], key

    def _object_of(self, bucket: Bucket, path: str, key: str, meta: Any) -> RemoteObject:
        url = f"{self._scheme}://{path}"
        return RemoteObject(bucket, key, meta["size"], mtime_ns_of(meta), meta["e_tag"], url)

    def _refuse(self, *_: object, **__: object) -> Any:
        raise NotImplementedError("sources are read, never written")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


def _listed(store: Any, prefix: str, recursive: bool) -> list[Any]:
    import obstore

    if not recursive:
        return list(obstore.list_with_delimiter(store, prefix or None)["objects"])
    return [meta for chunk in obstore.list(store, prefix or None, chunk_size=1000) for meta in chunk]


def _file_info(path: str, remote: RemoteObject) -> fs.FileInfo:
    return fs.FileInfo(path, fs.FileType.File, size=remote.size, mtime_ns=remote.mtime_ns)


def _base_of_glob(path: str) -> tuple[str | None, bool]:
    """Return the folder that a pattern begins with and whether it reaches below; None for no pattern."""
    parts = path.split("/")
    first = next((n for n, part in enumerate(parts) if any(char in part for char in "*?[")), None)
    if not first:
        return None, False
    return "/".join(parts[:first]), first + 1 < len(parts) or "**" in parts[first]
