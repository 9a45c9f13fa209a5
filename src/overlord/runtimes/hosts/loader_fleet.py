"""The SourceLoaders of one host with their workers (`LoaderFleet`), and what they staged for several constructor hosts.

Rules of this file:
1. The first host that asks for a step has all of it popped and finished; the others find their part here. A step that
   is not asked for in time is dropped, and made again for a host that asks later: everything here is a cache.
2. What is staged stays within its room in the account of memory; the step that is asked for is always made.
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from overlord.core.memory_account import MemoryAccount
from overlord.core.messages import LoaderOrder, MetaDelta, MetaRequest, Payload
from overlord.core.plan import LoadingPlan, Share, known_early, with_labels
from overlord.core.samples import WHOLE, Cursor, Part, SampleId, take_meta
from overlord.errors import ReaderError, SourceError
from overlord.job.specs import Custom
from overlord.readers.source_files import LengthSidecars, SourceFiles
from overlord.roles.poisoned_rows import PoisonedRowLog
from overlord.roles.ports import Collect
from overlord.roles.source_loader import LoaderCounters, PlacementChoice, ShadowLoader, SourceLoader, Staged
from overlord.runtimes.hosts.prefetch import Executors, PrefetchPool, SourceWorkers
from overlord.runtimes.launching.deployment import Prepared, known_lengths, order_of
from overlord.runtimes.transport.shared_memory import give_back_freed_memory
from overlord.transforms.samples.per_sample import Workers
from overlord.transforms.samples.pooled import PooledTransform

logger = logging.getLogger("overlord")

TRY_EVERY_S = 1.0
"""How often promised samples are tried again."""
WARN_EVERY_S = 60.0
STATUS_S = 0.5
"""How long `status` waits for loaders that are at work."""
STATUS_IDS = 32
"""Bad samples of each source that `status` names."""


T = TypeVar("T")


class ReadRetry:
    """Tries again and again to read what is promised, until it is told to give up."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def until_read(self, read: Callable[[], T]) -> T:
        """Return what a reader gives, whenever that is.

        Raises:
            ReaderError: when the service ends before.
        """
        warn_at = 0.0
        while True:
            try:
                return read()
            except (ReaderError, SourceError) as error:
                if self._ended.is_set():
                    raise
                if time.monotonic() >= warn_at:
                    warn_at = time.monotonic() + WARN_EVERY_S
                    logger.warning("samples that are promised cannot be read, and are waited for: %s", error)
                self._ended.wait(TRY_EVERY_S)

    def end(self) -> None:
        """Give up waiting."""
        self._ended.set()


class FaultLog:
    """Logs what the loader of one source tells of single samples; the loader keeps the counts.

    A reason is a warning when it is met for the first time, and again each time ten times as many samples have had it;
    every sample is logged with its id, at level INFO where it is not part of a warning. Reasons that differ in numbers
    only are one.
    """

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._counts: Counter[str] = Counter()

    def bad_samples(self, found: Sequence[tuple[SampleId, str]]) -> None:
        """Log stand-ins."""
        self._log(found, "bad sample %s: %s; a stand-in takes its place")

    def wrong_lengths(self, found: Sequence[tuple[SampleId, str]]) -> None:
        """Log samples that were cut or padded to their planned length."""
        self._log(found, "sample %s was cut or padded: %s")

    def _log(self, found: Sequence[tuple[SampleId, str]], words: str) -> None:
        alike: dict[str, list[tuple[SampleId, str]]] = {}
        for sample, reason in found:
            alike.setdefault(words + re.sub(r"\d+", "#", reason), []).append((sample, reason))
        for kind, samples in alike.items():
            before = self._counts[kind]
            count = self._counts[kind] = before + len(samples)
            if len(str(count)) > (len(str(before)) if before else 0):
                sample, reason = samples.pop(0)
                more = "" if count == 1 else f" ({count:,} samples of source {sample.source!r} so far)"
                advice = "`overlord status` counts others like it, and OVERLORD_LOG=INFO logs each"
                logger.warning("%s%s. %s", words % (sample, reason + self._files.place(sample)), more, advice)
            for sample, reason in samples:
                logger.info("%s", words % (sample, reason + self._files.place(sample)))


class LoaderFleet:
    """The SourceLoaders of a host by the number of their source, each with its workers."""

    def __init__(self, pools: Mapping[int, PrefetchPool], callers: Workers, retry: ReadRetry | None = None) -> None:
        self._pools: dict[int, PrefetchPool] = {}
        self._callers = callers
        self._retry = retry
        self.followers = callers
        """Threads that repeat what primaries elsewhere were asked for. Few: a new shadow reads its groups anew when
        its primary has taken over, and must not take the cores away from it."""
        self._shadows: dict[int, ShadowLoader] = {}
        self.noted_bytes = 0
        """What `buffer_bytes` was when it was last computed, which takes a while with hundreds of sources."""
        for source, pool in pools.items():
            self.add(source, pool)

    def add(self, source: int, pool: PrefetchPool) -> None:
        """Take in the loader of a source that has come."""
        self._shadows[source] = ShadowLoader(pool.loader)
        self._pools = {**self._pools, source: pool}  # others may be looking through the old ones

    def drop(self, source: int) -> None:
        """Forget the loader of a source that nothing was drawn from."""
        self._pools = {number: pool for number, pool in self._pools.items() if number != source}

    def resize(self, workers: Mapping[int, int], parts: Mapping[int, Part] | None = None) -> None:
        """Change how many workers sources have here, and which of their groups they prepare."""
        for source, count in workers.items():
            if source in self._pools:
                self._pools[source].resize(count, (parts or {}).get(source))

    def leave(self, sources: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Drop what is held of sources that other hosts have now; a late request is answered, and waits.

        Returns:
            What was met of each of them, which is counted elsewhere from now on.
        """
        met: dict[int, dict[str, Any]] = {}
        for source in sources:
            if source in self._pools:
                self._pools[source].resize(0)
                self._pools[source].rest(Cursor(-1, -1, -1))
                met[source] = self._pools[source].alone(lambda loader: loader.give_away()).to_json()
        return met

    def interrupt(self) -> None:
        """End all waits for a source that cannot be read."""
        if self._retry is not None:
            self._retry.end()

    def forget(self) -> None:
        """Let go of open and unpacked files: a service that was closed may be referred to for long."""
        for pool in self._pools.values():
            pool.rest(Cursor(-1, -1, -1))

    @property
    def sources(self) -> Sequence[int]:
        """The sources that are loaded here."""
        return tuple(self._pools)

    def until_read(self, read: Callable[[], T]) -> T:
        """Read what is promised: again and again where the launch lets sources fail, otherwise once."""
        return read() if self._retry is None else self._retry.until_read(read)

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Ask the loader of each request's source."""
        return self._callers.map(lambda request: self._pools[request.source].summary_buffer(request), requests)

    def loader_do_plan(self, plan: LoadingPlan, ranks: Collection[int]) -> Collect:
        """Hand over what a plan draws from the sources of this host; all of it, whichever ranks ask."""
        collect = self.hand_over([plan.order_of(source) for source in self.drawn(plan)])
        return lambda: [with_labels(plan, payload) for payload in collect()]

    def drawn(self, plan: LoadingPlan) -> list[int]:
        """Return the sources of this host that a plan draws from."""
        return [s for s in np.flatnonzero(np.diff(plan.draw.by_source[1])).tolist() if s in self._pools]

    def hand_over(self, orders: Sequence[LoaderOrder]) -> Collect:
        """Pop planned samples now, and finish them when they are collected."""

        def pop(order: LoaderOrder) -> Staged:
            def take() -> Staged:
                return self._pools[order.source].pop(order)

            return self.until_read(take)

        staged = self._callers.map(pop, orders)
        return lambda: self._callers.map(lambda one: self._pools[one.order.source].finish(one), staged)

    def follow(self, requests: Sequence[MetaRequest], passed: Mapping[int, Cursor]) -> None:
        """Repeat what the primaries of some sources were asked for: they are shadowed here."""

        def repeat(source: int) -> None:
            mine = [request for request in requests if request.source == source]
            self._pools[source].alone(lambda _: self._shadows[source].follow(mine, passed.get(source)))

        self.followers.map(repeat, sorted({request.source for request in requests} | set(passed)))

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Let the loaders of some sources drop what they hold."""
        for source, cursor in cursors.items():
            self._pools[source].rest(cursor)
        give_back_freed_memory()

    def note_faults(self, faults: Sequence[tuple[int, int, int, str]]) -> None:
        """Let the loaders count samples whose media do not decode; beyond a source's tolerance this raises."""
        for source in sorted({fault[0] for fault in faults}):
            mine = [(row, epoch, reason) for at, row, epoch, reason in faults if at == source]
            self._pools[source].alone(lambda loader, mine=mine: loader.note_faults(mine))  # type: ignore[misc]

    @property
    def buffer_bytes(self) -> int:
        """Bytes in the read buffers of all loaders."""
        self.noted_bytes = sum(pool.loader.buffer_bytes for pool in self._pools.values())
        return self.noted_bytes

    @property
    def names(self) -> dict[int, str]:
        """The names of the sources that are loaded here."""
        return {number: pool.loader.name for number, pool in self._pools.items()}

    def workload(self) -> dict[int, dict[str, Any]]:
        """Return what the workers of each source have done, without waiting for their work."""
        return {
            number: {**pool.work(), "buffer_bytes": pool.loader.buffer_bytes} for number, pool in self._pools.items()
        }

    def status(self) -> dict[int, dict[str, Any]]:
        """Return what each source's loader holds and has met, without waiting for a source that does not answer."""
        pools = self._pools  # a source may come while a loader is waited for
        until = time.monotonic() + STATUS_S
        met = {number: pool.counters(until - time.monotonic()) for number, pool in pools.items()}
        bad = {number: heapq.nsmallest(STATUS_IDS, one.bad) for number, one in met.items()}
        return {
            number: {
                "decoded_in": pool.loader.placement.where,
                "decoded_ratio": pool.loader.placement.ratio,
                **pool.work(),
                "followed": self._shadows[number].followed,
                "buffer_bytes": pool.loader.buffer_bytes,
                "rows_read": met[number].seen,
                "bad": len(met[number].bad),
                "bad_ids": [str(SampleId(pool.loader.name, row, epoch)) for row, epoch in bad[number]],
                "bad_rows": [pool.loader.named(row, epoch) for row, epoch in bad[number]],
                "wrong_length": len(met[number].wrong_lengths),
            }
            for number, pool in pools.items()
        }

    def snapshot(self) -> dict[str, Any]:
        """Return what each source's loader has met, by the source's name: what a restart would count anew."""
        return {pool.loader.name: pool.alone(lambda loader: loader.counters).to_json() for pool in self._pools.values()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what other loaders of these sources had met."""
        for pool in self._pools.values():
            given = snapshot.get(pool.loader.name)
            if given is not None:
                met = LoaderCounters.from_json(given)
                pool.alone(lambda loader, met=met: loader.take_over(met))  # type: ignore[misc]


def make_fleet(
    prepared: Prepared, files: Mapping[int, SourceFiles], verdicts: PoisonedRowLog, executors: Executors
) -> LoaderFleet:
    """Make the SourceLoaders of open sources."""
    pools = {number: make_pool(prepared, number, opened, verdicts, executors) for number, opened in files.items()}
    retry = ReadRetry() if prepared.options.on_source_failure != "stop" else None
    return LoaderFleet(pools, executors.callers, retry)


def make_pool(
    prepared: Prepared, number: int, opened: SourceFiles, verdicts: PoisonedRowLog, executors: Executors
) -> PrefetchPool:
    """Make the SourceLoader of one open source, with its workers."""
    job, options = prepared.job, prepared.options
    source = job.sources[number]
    sidecars = LengthSidecars(Path(options.cache) / "lengths")
    choice = PlacementChoice(options.placement, threading.Lock())
    lengths = known_lengths(source, opened, sidecars, prepared.tokenizer_digest) if opened.files else None
    count = options.workers.get(source.name, options.loaders_per_source)
    transform = prepared.transforms[number]
    if isinstance(transform, PooledTransform) and opened.files and lengths is None:
        unparsed = opened.unparsed()  # workers parse what they measure: the service's interpreter limits a feed
        if unparsed is not None:
            opened, transform = unparsed[0], transform.parsing(unparsed[1])
    isolated = isinstance(source.sample, Custom) and source.sample.process and prepared.isolate is not None
    pool = options.threads if isinstance(transform, PooledTransform) or (isolated and options.pooled) else 0
    several = count > 1 or source.name in options.workers or options.scaling is not None
    helpers = SourceWorkers(executors.prefetch) if several else None
    hook = prepared.hooks.get("loader_do_plan")
    loader = SourceLoader(
        job,
        number,
        opened,
        order_of(job, source, opened),
        transform,
        lengths=lengths,
        workers=helpers or executors.leaf,
        telemetry=FaultLog(opened),
        placement=choice,
        poisoned=verdicts,
        hook=None if hook is None else hook.start(),
    )
    loader.reads_ahead = not prepared.options.replays  # of a replay, one step is looked at
    if not (several or pool):
        return PrefetchPool(loader)
    return PrefetchPool(loader, order_of(job, source, opened), executors.prefetch, count, helpers, pool)


# --------------------------------------------------------------------------------------------------------------


KEPT = 64
"""Steps behind the newest that are kept at most for a host that has not asked: it may have no clients."""


_Asked = tuple[int, tuple[tuple[int, Part], ...]]
"""A step, and the parts of sources of it that were asked for together."""


class _StagedStep:
    """What was popped of one step, until every rank's host has taken its part."""

    def __init__(self, collect: Collect) -> None:
        self._collect: Collect | None = collect
        self._lock = threading.Lock()
        self._payloads: list[Payload] | None = None

    def payloads(self) -> list[Payload]:
        """Return the finished samples; the first caller finishes them, the others wait for that."""
        with self._lock:
            if self._payloads is None:
                assert self._collect is not None
                self._payloads = self._collect()
                self._collect = None  # it holds the rows as they were read
            return self._payloads

    @property
    def nbytes(self) -> int:
        """Bytes of what is finished."""
        return sum(payload.nbytes for payload in self._payloads or ())


class StagedSteps:
    """Hands every constructor host its part of each step."""

    def __init__(
        self, fleet: LoaderFleet, *, hosts_of: Callable[[int], int], memory: MemoryAccount, all_columns: bool = False
    ) -> None:
        self._fleet = fleet
        self._all_columns = all_columns
        self._hosts_of = hosts_of
        self._memory = memory
        self._staged: OrderedDict[_Asked, _StagedStep] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._taken: dict[_Asked, set[int]] = {}

    def hand_over(
        self, plan: LoadingPlan, ranks: Collection[int], parts: Sequence[tuple[int, Part]] | None = None
    ) -> Collect:
        """Pop what some ranks need of some sources of a step; call the result for it, one payload a source.

        Also where that is nothing but how many labels the source's samples have, which every host must know.

        Sources that were taken over in the middle of a step are asked for by themselves. Any part of a source can be
        asked for, whichever one is prepared here.
        """
        drawn = self._fleet.drawn(plan)
        given = [(source, WHOLE) for source in drawn] if parts is None else parts
        asked = (plan.step, tuple((source, part) for source, part in given if source in drawn))
        staged = self._stage(plan, asked)

        def collect() -> list[Payload]:
            try:
                share = Share.of(plan, ranks, all_columns=self._all_columns)
                return [share.cut(payload) for payload in staged.payloads()]
            finally:
                self._let_go(plan, ranks, asked)

        return collect

    @property
    def buffer_bytes(self) -> int:
        """Bytes in the read buffers and of what is staged."""
        return self._fleet.buffer_bytes + self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of what is staged."""
        return sum(staged.nbytes for staged in list(self._staged.values()))

    def _stage(self, plan: LoadingPlan, asked: _Asked) -> _StagedStep:
        with self._turn:  # steps leave the read buffers in the order in which they are asked for
            with self._lock:
                found = self._staged.get(asked)
            if found is not None:
                return found
            orders = [_order_of(plan, source, part) for source, part in asked[1]]
            if (
                self._hosts_of(plan.mesh.world_size) > 1
            ):  # several hosts must know alike which media decode: they are told
                early, samples_of = known_early(plan), plan.draw.samples_of
                orders = [dataclasses.replace(o, open_media=bool(early[samples_of(o.source)].any())) for o in orders]
            staged = _StagedStep(_told(plan, asked[1], self._fleet.hand_over(orders)))
            with self._lock:
                self._staged[asked] = staged
            return staged

    def _let_go(self, plan: LoadingPlan, ranks: Collection[int], asked: _Asked) -> None:
        with self._lock:
            self._taken.setdefault(asked, set()).update(ranks)
            if len(self._taken[asked]) >= plan.mesh.world_size:  # also hosts that need no more than to know the labels
                self._staged.pop(asked, None)
                del self._taken[asked]
            for old in [one for one in (*self._taken, *self._staged) if one[0] < plan.step - KEPT]:
                self._taken.pop(old, None)
                self._staged.pop(old, None)
            room = self._memory.room("staged")
            while len(self._staged) > 1 and self.nbytes > room:
                self._staged.popitem(last=False)


def _order_of(plan: LoadingPlan, source: int, part: Part) -> LoaderOrder:
    order = plan.order_of(source)
    return order if part == WHOLE else dataclasses.replace(order, meta=take_meta(order.meta, part.rows(order.meta)))


def _told(plan: LoadingPlan, parts: Sequence[tuple[int, Part]], collect: Collect) -> Collect:
    """Let payloads of a part say which samples of their source they hold, and how many labels those have."""

    def told(payload: Payload, part: Part) -> Payload:
        if part != WHOLE:
            payload = dataclasses.replace(payload, chosen=part.rows(plan.order_of(payload.source).meta))
        return with_labels(plan, payload)

    return lambda: [told(payload, part) for payload, (_, part) in zip(collect(), parts, strict=True)]
