"""Fetching ranges of objects: one thread of a process has many requests in flight.

    Fetcher         the requests of this process: deadlines, retries, hedges, a budget of bytes
    FetchCounters   what was asked and how long it took; counters of processes add up

How a range comes: the request names the version of the object that was listed, so that two versions are never mixed. It
is repeated with growing pauses, of random length, when the server refuses for a while (429, 5xx, with the Retry-After
that the server asks for), the connection breaks, the body is cut or has another length, or nothing comes within a
deadline. A request that takes longer than nearly all lately is sent a second time, and the first answer counts.
Credentials that are refused are looked up again. None of this changes what is read.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import functools
import itertools
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from overlord.errors import shortened
from overlord.readers.remote.object_store import REQUEST_S, Bucket, RemoteObject

logger = logging.getLogger("overlord")
T = TypeVar("T")

MOST_RANGE_BYTES = 8 << 20
"""A longer range is asked for in several requests at the same time."""
BUDGET_BYTES = 128 << 20
"""Bytes that one process fetches ahead of what is being read, held until they are read or on disk."""
MOST_REQUESTS = 64
"""Requests of a process in flight, without hedges."""
_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S = 10.0
_MOST_ASKED_PAUSE_S = 60.0
"""A server that asks for a longer pause is asked again after this."""
_SLOWEST_BYTES_S = 256 << 10
"""A range has this much longer for its bytes."""
_HEDGE_FLOOR_S = 0.05
_HEDGE_FROM = 20
"""Requests of about the same size that must have been seen before one counts as late."""
_HEDGE_SHARE = 0.05
"""Of all requests, at most so many are sent twice: where the whole store is slow, more requests would not help."""
_RECENT = 256
_WORDS_OF_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired", "InvalidAccessKeyId")
_STATUS = re.compile(r"status code: (\d{3})")


class RangeLost(OSError):
    """A range could not be fetched, however often it was tried."""


class ObjectChanged(OSError):
    """The object is not the version that was listed."""


class _Again(Exception):
    """A request failed and may be repeated."""

    def __init__(self, why: str, *, refused: bool = False, busy: bool = False) -> None:
        super().__init__(why)
        self.refused = refused
        """Whether the credentials were refused."""
        self.busy = busy
        """Whether the server asks for fewer requests."""


_BOUNDS_S = [0.001 * 2 ** (step / 2) for step in range(36)]
"""Upper bounds of the classes that latencies are counted in."""


class FetchCounters:
    """What was asked of stores and of the cache. Threads may share it.

    Example:
        >>> counters = FetchCounters()
        >>> counters.add(requests=2, bytes=100)
        >>> counters.record_latency(0.02)
        >>> other = FetchCounters()
        >>> other.merge(counters.take())
        >>> other.report()["requests"], counters.take()
        (2, {})
    """

    NAMES = ("requests", "bytes", "retries", "hedges", "refreshed", "hits", "hit_bytes", "damaged")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def add(self, **counts: int) -> None:
        """Count some of `NAMES`."""
        with self._lock:
            self._counts.update(counts)

    def record_latency(self, seconds: float) -> None:
        """Count a request by the time it took."""
        with self._lock:
            self._counts[f"l{bisect.bisect_left(_BOUNDS_S, seconds)}"] += 1

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call, in a form that `merge` takes, and begin again."""
        with self._lock:
            counts, self._counts = dict(self._counts), collections.Counter()
        return counts

    def totals(self) -> dict[str, int]:
        """Return what was counted so far, in a form that `merge` takes."""
        with self._lock:
            return dict(self._counts)

    def since(self, before: Mapping[str, int]) -> dict[str, int]:
        """Return what was counted since `totals` returned that."""
        return {name: count - before.get(name, 0) for name, count in self.totals().items()}

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add what another process has counted."""
        with self._lock:
            self._counts.update(counts)

    def report(self) -> dict[str, float]:
        """Return all counts, and the latency that half and 99 % of the requests stayed below."""
        counts = self.totals()
        found: dict[str, float] = {name: counts.get(name, 0) for name in self.NAMES}
        classes = [counts.get(f"l{step}", 0) for step in range(len(_BOUNDS_S) + 1)]
        for name, share in (("p50_s", 0.5), ("p99_s", 0.99)):
            found[name] = _quantile(classes, share)
        return found


def _quantile(classes: Sequence[int], share: float) -> float:
    total, passed = sum(classes), 0
    for step, count in enumerate(classes):
        passed += count
        if total and passed >= share * total:
            return _BOUNDS_S[min(step, len(_BOUNDS_S) - 1)]
    return 0.0


class _Latencies:
    """How long requests of about one size took lately."""

    def __init__(self) -> None:
        self._recent: dict[int, collections.deque[float]] = {}

    def add(self, size: int, seconds: float) -> None:
        self._recent.setdefault(size.bit_length(), collections.deque(maxlen=_RECENT)).append(seconds)

    def late_after(self, size: int) -> float | None:
        """Return after how many seconds a request counts as late; None before enough is known."""
        recent = self._recent.get(size.bit_length(), ())
        if len(recent) < _HEDGE_FROM:
            return None
        ordered = sorted(recent)
        # A late request would itself move the quantile: of 20, the slowest is passed over.
        p99 = ordered[min(len(ordered) - 2, int(0.99 * len(ordered)))]
        return max(_HEDGE_FLOOR_S, 1.5 * p99)


class Fetcher:
    """Fetches ranges for all threads of a process."""

    def __init__(self) -> None:
        self.counters = FetchCounters()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="fetched")
        self._clients: dict[tuple[Bucket, bool], Any] = {}
        self._renewed: dict[Bucket, float] = {}
        self._latencies = _Latencies()
        self._slots: asyncio.Semaphore | None = None
        self._in_flight: dict[RemoteObject, list[tuple[int, int, Future[memoryview]]]] = {}
        self._held = 0
        self._sent = self._hedges = 0

    # Bytes that are fetched ahead count until their reader gives them back.

    def reserve(self, nbytes: int, *, ahead: bool) -> bool:
        """Take some of the budget; what is needed now is always granted."""
        with self._lock:
            if ahead and self._held + nbytes > BUDGET_BYTES:
                return False
            self._held += nbytes
            return True

    def allowance(self, nbytes: int) -> int:
        """Return how much may be fetched where fewer bytes are needed: less, the more of the budget is used.

        Hundreds of files may be open at the same time, each with a range in memory.
        """
        used = self._held / BUDGET_BYTES
        return min(nbytes, 64 << 20 if used < 0.5 else 1 << 20 if used < 1 else 256 << 10 if used < 2 else 64 << 10)

    @property
    def held_bytes(self) -> int:
        """Bytes that were granted and not given back."""
        return self._held

    def release(self, nbytes: int) -> None:
        """Give back what `reserve` has granted."""
        with self._lock:
            self._held -= nbytes

    def fetch(
        self, remote: RemoteObject, start: int, stop: int, then: Callable[[memoryview], None] | None = None
    ) -> Future[memoryview]:
        """Begin to fetch a range.

        The future raises ObjectChanged, FileNotFoundError, or RangeLost after the last attempt.

        Args:
            remote: The object.
            start: The first byte.
            stop: The byte to end before.
            then: Called with the bytes in a thread of the fetcher, before the future has them; with none if they could
                not be fetched.
        """
        with self._lock:
            loop = self._started()
            fetched: Future[memoryview] = Future()
            entry = (start, stop, fetched)
            self._in_flight.setdefault(remote, []).append(entry)
        fetched.add_done_callback(lambda _: self._landed(remote, entry))
        asyncio.run_coroutine_threadsafe(self._deliver(remote, start, stop, then, fetched), loop)
        return fetched

    def in_flight(self, remote: RemoteObject, at: int) -> tuple[int, int, Future[memoryview]] | None:
        """Return the range being fetched that holds a byte, with its first byte and the one behind its last."""
        with self._lock:
            return next((entry for entry in self._in_flight.get(remote, ()) if entry[0] <= at < entry[1]), None)

    def call(self, bucket: Bucket, ask: Callable[[Any], T]) -> T:
        """Ask a store something else, such as a listing, with the same retries; the caller waits.

        Raises:
            FileNotFoundError: There is no such object.
            RangeLost: The store does not answer, or refuses.
        """
        first = time.perf_counter()
        for attempt in itertools.count():
            self.counters.add(requests=1)
            began = time.perf_counter()
            try:
                answer = ask(self._client(bucket))
            except Exception as error:
                again = _sorted_out(error, bucket.identity)
                if _is_last(attempt, first, bucket) or (again.refused and attempt):
                    raise RangeLost(str(again)) from error
                if again.refused:
                    self._renew(bucket, began)
                self.counters.add(retries=1)
                time.sleep(_pause(attempt))
                continue
            self.counters.record_latency(time.perf_counter() - began)
            return answer
        raise AssertionError("attempts end by an answer or an error")

    def run_soon(self, work: Callable[[], object]) -> None:
        """Run something short in a thread of the fetcher."""
        self._pool.submit(work)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._slots = asyncio.Semaphore(MOST_REQUESTS)
            threading.Thread(target=self._loop.run_forever, name="fetcher", daemon=True).start()
        return self._loop

    def _landed(self, remote: RemoteObject, entry: tuple[int, int, Future[memoryview]]) -> None:
        with self._lock:
            entries = self._in_flight[remote]
            entries.remove(entry)
            if not entries:
                del self._in_flight[remote]

    async def _deliver(
        self,
        remote: RemoteObject,
        start: int,
        stop: int,
        then: Callable[[memoryview], None] | None,
        fetched: Future[memoryview],
    ) -> None:
        data = memoryview(b"")
        error: BaseException | None = None
        try:
            bounds = [*range(start, stop, MOST_RANGE_BYTES), stop]
            if len(bounds) > 2 and stop - bounds[-2] < MOST_RANGE_BYTES // 4:
                del bounds[-2]  # no request for a small rest
            parts = await asyncio.gather(*(self._attempts(remote, a, b) for a, b in itertools.pairwise(bounds)))
            data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        except Exception as failed:
            error = failed
        if then is not None:
            await asyncio.get_running_loop().run_in_executor(self._pool, then, data)
        if error is None:
            fetched.set_result(data)
        else:
            fetched.set_exception(error)

    async def _attempts(self, remote: RemoteObject, start: int, stop: int) -> memoryview:
        assert self._slots is not None
        refusals, first = 0, time.perf_counter()
        for attempt in itertools.count():
            began = time.perf_counter()
            try:
                async with self._slots:
                    return await self._hedged(remote, start, stop)
            except _Again as again:
                refusals += again.refused
                if _is_last(attempt, first, remote.bucket) or refusals > _ATTEMPTS // 2:
                    raise RangeLost(
                        f"bytes {start} to {stop} of {remote.url} did not come in {attempt + 1} attempts: {again}"
                    ) from again
                logger.debug("bytes %d to %d of %s are fetched again: %s", start, stop, remote.url, again)
                loop = asyncio.get_running_loop()
                pause = _pause(attempt)
                if again.refused:
                    await loop.run_in_executor(self._pool, self._renew, remote.bucket, began)
                if again.busy:
                    asked = await loop.run_in_executor(self._pool, self._asked_pause, remote)
                    pause += asked
                self.counters.add(retries=1)
                await asyncio.sleep(pause)
        raise AssertionError("attempts end by an answer or an error")

    async def _hedged(self, remote: RemoteObject, start: int, stop: int) -> memoryview:
        """Send a request, and a second one when it is late; return what comes first."""
        deadline = remote.bucket.request_s + (stop - start) / _SLOWEST_BYTES_S
        until = time.perf_counter() + deadline
        tasks = {asyncio.ensure_future(self._request(remote, start, stop))}
        late = self._latencies.late_after(stop - start)
        try:
            failed: _Again | None = None
            while tasks:
                left = until - time.perf_counter()
                if left <= 0:
                    break
                wait = left if late is None else min(late, left)
                done, tasks = await asyncio.wait(tasks, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        return task.result()
                    except _Again as again:
                        failed = again
                if not done and late is not None and self._may_hedge():
                    tasks.add(asyncio.ensure_future(self._request(remote, start, stop)))
                late = None
            raise failed or _Again(f"nothing came within {deadline:.0f} s")
        finally:
            for task in tasks:
                task.cancel()

    def _may_hedge(self) -> bool:
        if self._hedges > _HEDGE_SHARE * self._sent + 1:
            return False
        self._hedges += 1
        self.counters.add(hedges=1)
        return True

    async def _request(self, remote: RemoteObject, start: int, stop: int) -> memoryview:
        options: Any = {"range": (start, stop)}
        if remote.condition is not None:
            options["if_match"] = remote.condition
        began = time.perf_counter()
        self.counters.add(requests=1)
        self._sent += 1
        try:
            import obstore

            response = await obstore.get_async(self._client(remote.bucket, ranges=True), remote.key, options=options)
            differs = remote.is_in(response.meta)
            if differs is not None:
                raise ObjectChanged(differs)
            data = memoryview(await response.bytes_async())  # type: ignore[arg-type]
        except ObjectChanged:
            raise
        except Exception as error:  # obstore raises its own for each kind of failure, and the network any other
            raise _sorted_out(error, remote.url) from error
        if len(data) != stop - start:
            raise _Again(f"{len(data)} bytes came where {stop - start} were asked for")
        seconds = time.perf_counter() - began
        self.counters.add(bytes=len(data))
        self.counters.record_latency(seconds)
        self._latencies.add(len(data), seconds)
        return data

    def _client(self, bucket: Bucket, *, ranges: bool = False) -> Any:
        """Return a client whose requests end in time: those for ranges have longer, for their bytes."""
        with self._lock:
            client = self._clients.get((bucket, ranges))
            if client is None:
                bytes_s = 2 * MOST_RANGE_BYTES / _SLOWEST_BYTES_S if ranges else 0.0
                client = self._clients[bucket, ranges] = bucket.connect(bytes_s)
            return client

    def _renew(self, bucket: Bucket, began: float) -> None:
        """Forget a client, unless another request that was refused has done so since this one began."""
        with self._lock:
            if self._renewed.get(bucket, 0.0) < began:
                self._renewed[bucket] = time.perf_counter()
                for ranges in (False, True):
                    self._clients.pop((bucket, ranges), None)
                self.counters.add(refreshed=1)

    def _asked_pause(self, remote: RemoteObject) -> float:
        """Return for how many seconds a busy server asks for no requests.

        obstore does not tell the headers of a refusal, so the server is asked once more, for no bytes.
        """
        try:
            import obstore

            client = self._client(remote.bucket)
            if remote.bucket.scheme in ("http", "https"):
                url = f"{remote.bucket.scheme}://{remote.bucket.name}/{remote.key}"
                headers = (client.client_options or {}).get("default_headers", {})
            else:
                url, headers = obstore.sign(client, "HEAD", remote.key, timedelta(minutes=1)), {}
            self.counters.add(requests=1)
            with urlopen(Request(url, method="HEAD", headers=dict(headers)), timeout=REQUEST_S):
                return 0.0
        except HTTPError as error:
            return _seconds_of(error.headers.get("Retry-After"))
        except Exception:  # a store that cannot sign, or a proxy: then the pauses are our own
            return 0.0


def _seconds_of(retry_after: str | None) -> float:
    """Return what a Retry-After says: seconds, or a date.

    Example:
        >>> _seconds_of("7"), _seconds_of(None), _seconds_of("Wed, 21 Oct 2015 07:28:00 GMT")
        (7.0, 0.0, 0.0)
    """
    if not retry_after:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), _MOST_ASKED_PAUSE_S)


def _is_last(attempt: int, first: float, bucket: Bucket) -> bool:
    """Return whether a request is given up after this attempt; the first one was made at `first`."""
    if bucket.retry_s is None:
        return attempt + 1 >= _ATTEMPTS
    return time.perf_counter() - first >= bucket.retry_s


def _pause(attempt: int) -> float:
    """Return a pause of random length, longer after each attempt: callers that failed together come back apart."""
    return random.uniform(0.5, 1.0) * min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 3 ** min(attempt, 9))


def _sorted_out(error: Exception, what: str) -> _Again:
    """Return how a failed request may be repeated.

    Raises:
        FileNotFoundError: There is no such object.
        ObjectChanged: It is another version.
        OSError: It will never succeed.
    """
    import obstore.exceptions as failures

    text, _, debug = str(error).partition("\n\nDebug source")
    text = text.replace("HTTP error: error sending request", _cause(debug))
    status = int(code[1]) if (code := _STATUS.search(text)) else 0
    if isinstance(error, FileNotFoundError):
        raise FileNotFoundError(f"{what} is not there") from error
    if isinstance(error, failures.PreconditionError):
        raise ObjectChanged("was written to after it was listed") from error
    if isinstance(error, failures.NotSupportedError) or "non-partial response" in text:
        raise OSError(
            f"the server of {what} sends whole files where a part is asked for, so it cannot be read"
        ) from error
    if isinstance(error, (failures.PermissionDeniedError, failures.UnauthenticatedError)) or any(
        word in text for word in _WORDS_OF_CREDENTIALS
    ):
        return _Again(f"the credentials are refused ({_short(text)})", refused=True)
    if 400 <= status < 500 and status not in (408, 425, 429):
        raise OSError(f"{what}: {_short(text)}") from error
    return _Again(_short(text), busy=status in (429, 503))


def _cause(debug: str) -> str:
    """Return why no response came; the first line of obstore's errors does not say it.

    Example:
        >>> _cause('Os { code: 111, kind: ConnectionRefused, message: "Connection refused" }')
        'Connection refused'
    """
    if "kind: Timeout" in debug:
        return "the request timed out"
    reason = re.search(r'(?:message|error): "([^"]+)"', debug)
    return reason[1] if reason else "no connection"


def _short(text: str) -> str:
    """Return what an error of obstore says, without the URL, which may be signed."""
    text = re.sub(r"https?://\S+", "the server", text)
    return shortened(re.sub(r"Error performing \w+ the server in \S+ - ", "", text))


def coalesced(ranges: Iterable[tuple[int, int]], gap: int) -> list[tuple[int, int]]:
    """Return ranges in order, with those joined that overlap or lie close to each other.

    Example:
        >>> coalesced([(50, 60), (0, 10), (12, 20)], gap=4)
        [(0, 20), (50, 60)]
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


@functools.cache
def fetcher() -> Fetcher:
    """Return the fetcher of this process."""
    return Fetcher()
