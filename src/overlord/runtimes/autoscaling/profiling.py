"""Profiling: what every source of a job costs, measured in this process on real samples and files.

One source after the other goes through the parts of a real run: its files, its order, its transform (in process
workers, where a custom function asks for them), its SourceLoader. Four things build on one another here: `Clock` counts
the seconds of one worker, `TimedTransform` and `TimedSource` time the samples of a source on their way through its
loader, `profile_job` makes a `SourceProfile` of that, and the functions behind it read and write the profile's file.

Rules of this file:
1. A source that fails is reported by name, and keeps no other from being measured.
2. A profile's file is written whole or not at all, and never unpickled.
3. Seconds are those of one worker that has a core: time on the wall, less what was waited for a core; or of the
   processor, where threads of a library share the work. On a busy host a worker would otherwise look many times slower
   than it is. Seconds of the processor are noted beside them, of the same rows.
4. Both count this process and the process workers that work for it. Programs that a function starts itself are seen as
   waiting: what they take is not counted.
5. The mean comes from rows that go together, as loaders take them. The spread comes from rows that go alone, less what
   a call costs that is made for one row only.
6. What happens once (a file is indexed, a decoder is loaded, a process worker starts) is in no figure.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from overlord.core.messages import LoaderOrder, MetaRequest, SourceFacts
from overlord.core.order import BEGIN, Group, SourceOrder, rows_per_read, stream_bytes
from overlord.core.ragged import RowBatch, concat_rows, num_bytes, num_rows, slice_rows, take_rows
from overlord.core.samples import SKIP, Cursor, MetaArray
from overlord.errors import OverlordError, SourceError, SpecError
from overlord.job.specs import Job, Source
from overlord.readers.source_files import SourceFiles
from overlord.roles.source_loader import AHEAD_ROWS, SourceLoader
from overlord.runtimes.hosts.loader_fleet import make_pool
from overlord.runtimes.hosts.prefetch import WORKER_BYTES, Executors, SerialWorkers, ThreadWorkers
from overlord.runtimes.launching.deployment import (
    Prepared,
    facts_of,
    open_files,
    order_of,
    prepare,
    try_files,
)
from overlord.runtimes.launching.service_options import Progress, ServiceOptions
from overlord.runtimes.supervision.fair_threads import WORKER_THREAD
from overlord.runtimes.supervision.process_workers import ProcessWorkers
from overlord.runtimes.supervision.work_clock import Spent, queued_s
from overlord.scaling.profiles import Entry, Profile, Running, SourceProfile, Spread, cost_digest
from overlord.storage import replacing
from overlord.transforms.samples.per_sample import (
    Bools,
    Fault,
    Finished,
    Int64s,
    Measured,
    MediaDecoder,
    SampleTransform,
    UInt64s,
    Workers,
    decode_media,
)

SAMPLES = 200
SECONDS = 2.0
_OPENERS = 16
"""Opening a source mostly waits for storage."""
_INDEX_ARRAYS = 5
"""Numbers that an index holds of each block: rows, bytes, where it starts and stops, its first row."""
_ORDER_ARRAYS = 4
"""Numbers that an order holds of each block of its window: file, block, rows, bytes."""
_LISTED_BYTES = 512
"""What a listed file takes beside its names: an object with sizes and times."""
_MOST_GROUPS = 256
"""Groups that are looked at for the largest."""
_EXPENSIVE_S = 0.005
"""A row that takes so long goes alone always: what a call costs beside it does not matter, and time is short."""
_TOGETHER_EVERY = 4
"""Of so many runs of rows, the first goes together."""
_TOGETHER, _COPY = -1, -2
_PASSES = 2
"""A small source is not read more often than this."""

Floats = npt.NDArray[np.float64]
Reads = list[tuple[tuple[int, int], int, Spent]]
"""((epoch, group), rows, what reading them took) of every run of rows."""


class Clock:
    """What was taken since it was made.

    Args:
        helpers: Returns the ids of the processes that work for this one; they are idle whenever it is called.

    Example:
        >>> clock = Clock()
        >>> time.sleep(0.02)
        >>> clock.took().cpu_s < 0.02
        True
    """

    def __init__(self, helpers: Callable[[], Sequence[int]] = tuple) -> None:
        self._helpers = helpers
        before = helpers()
        self._queued = _queued_s(("self", *before))
        self._helped = {pid: _processor_s(pid) for pid in before}
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def took(self) -> Spent:
        """Return what was taken."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        now = self._helpers()
        # What was started meanwhile, a process or a thread, has done all it did for this work; what has ended is gone.
        cpu += sum(max(_processor_s(pid) - self._helped.get(pid, 0.0), 0.0) for pid in now)
        later = _queued_s(("self", *now))
        queued = sum(max(waited - self._queued.get(thread, 0.0), 0.0) for thread, waited in later.items())
        # Threads of a tokenizer wait beside one another, and this one may have waited while it asked: what is taken off
        # may be too much.
        return Spent(cpu, max(wall - queued - cpu, 0.0))


def _processor_s(pid: int) -> float:
    """Return the seconds of a processor that a process had, threads that have ended counted; 0 where it is gone."""
    clock = ctypes.c_int()
    # What /proc and psutil tell comes in hundredths of a second, which is longer than most samples take.
    if ctypes.CDLL(None).clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock)):
        return 0.0
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return 0.0  # it has ended just now


def _queued_s(processes: Iterable[int | str]) -> dict[str, float]:
    """Return how long each thread of some processes was ready and had no core; nothing where the system does not tell.

    By thread: one that ends takes what it had waited with it, and a sum of all would fall. Of this process, other
    threads of Python count for nothing but those that talk to process workers: the work is done by the calling one, and
    by those that libraries start.
    """
    working = (threading.current_thread().name, WORKER_THREAD)
    others = {str(one.native_id) for one in threading.enumerate() if one.name not in working}
    found: dict[str, float] = {}
    for process in processes:
        try:
            threads = os.listdir(f"/proc/{process}/task")
        except OSError:
            continue  # no such folder on this system, or a process that has just ended
        counted = set(threads) - others if process == "self" else threads
        found |= {thread: queued_s(f"{process}/task/{thread}") for thread in counted}
    return found


# -- timing the samples of one source ---------------------------------------------------------------------------


class Deadline:
    """When to stop measuring a source; what happens once puts it off."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether it is time to stop."""
        return time.monotonic() > self._at

    def put_off(self, seconds: float) -> None:
        """Stop later."""
        self._at += seconds


@dataclass(slots=True)
class Stage:
    """What one stage took, of rows together and of rows alone."""

    rows: int = 0
    together: Spent = field(default_factory=Spent)
    alone: list[Spent] = field(default_factory=list[Spent])
    first_s: float = 0.0
    """The very first row, which may have waited for what happens once."""
    probed: bool = False
    expensive: bool = False

    def add(self, rows: int, took: Spent) -> None:
        """Note what some rows took together."""
        self.rows += rows
        self.together = self.together.plus(took)

    def probe(self, seconds: float) -> None:
        """Note what one row took that is not counted: the first, or the one after it, which tells what to expect."""
        if not self.first_s:
            self.first_s = seconds
        self.expensive = seconds > _EXPENSIVE_S

    @property
    def mean(self) -> Spent:
        """What a row takes: of rows together, else of rows alone, else of the first one, all of it on a processor."""
        if self.rows:
            return self.together.times(1 / self.rows)
        return Spent(*np.mean(self.alone, axis=0).tolist()) if self.alone else Spent(self.first_s)

    def spread(self) -> Floats:
        """Return the seconds of every row that went alone, less what a call for one row costs."""
        alone, mean_s = np.array([took.seconds for took in self.alone]), self.mean.seconds
        if not len(alone):
            return alone
        # Of noise that fell on rows alone, most is taken for a part of the call; never all that the quick ones took.
        call = min(max(float(alone.mean()) - mean_s, 0.0), 0.9 * float(np.quantile(alone, 0.05)))
        rest = np.maximum(alone - call, 0.1 * alone)
        return rest * (mean_s / float(rest.mean()))


class TimedTransform:
    """A source's own transform, timed while its loader measures rows.

    Args:
        deadline: When to stop: rows behind it are stood in for by copies, and not counted.
    """

    def __init__(self, inner: SampleTransform, deadline: Deadline, clock: Callable[[], Clock] = Clock) -> None:
        self._inner = inner
        self._deadline = deadline
        self.clock = clock
        self.columns = inner.columns
        self.stage = Stage()
        self.alone = False
        """Whether the rows that come now go one by one."""
        self.places: list[int] = []
        """Of every row so far, in order: its place among the rows that went alone, `_TOGETHER`, or `_COPY`."""
        self.outside = Spent()
        """What was taken between `leave` and `enter`, which is outside of `measure`."""
        self._since = clock()
        self.read_bytes = 0
        self.kept_bytes = 0

    @property
    def decoder(self) -> MediaDecoder | None:
        """What opens this kind's media."""
        return self._inner.decoder

    def leave(self) -> None:
        """Begin to count what is taken outside.

        Taking what is inside off the whole would not do: where a process worker starts it is large, and its noise too.
        """
        self._since = self.clock()

    def enter(self) -> None:
        """Stop to count what is taken outside."""
        self.outside = self.outside.plus(self._since.took())

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        """Measure rows, together or one by one."""
        self.enter()
        count = num_rows(rows)

        def run(start: int, stop: int) -> tuple[Measured, Spent]:
            clock = self.clock()
            known = None if lengths is None else lengths[start:stop]
            found = self._inner.measure(slice_rows(rows, start, stop), known, seeds[start:stop])
            return found, clock.took()

        if not self.stage.probed:
            for row in range(min(2, count)):
                self.stage.probe(run(row, row + 1)[1].seconds)
            self.stage.probed = True
            self._deadline.put_off(self.stage.first_s)
        if self.alone or self.stage.expensive:
            parts: list[Measured] = []
            while len(parts) < count and not (parts and self._deadline.passed):
                found, took = run(len(parts), len(parts) + 1)
                parts.append(found)
                self.stage.alone.append(took)
            measured, last = _joined(parts), len(self.stage.alone)
            self.places += [*range(last - len(parts), last), *([_COPY] * (count - len(parts)))]
            if len(parts) < count:
                measured = _repeated(measured, count)
        else:
            measured, took = run(0, count)
            self.stage.add(count, took)
            self.places += [_TOGETHER] * count
        self.read_bytes += num_bytes(rows)
        self.kept_bytes += num_bytes(measured.kept)
        self.leave()
        return measured

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        """Finish rows; the loader's caller times that."""
        return self._inner.finish(kept, planned, bad, workers)


def _joined(parts: list[Measured]) -> Measured:
    """Join what single rows gave."""

    def moved(name: str) -> list[Fault]:
        return [(at + row, why) for at, part in enumerate(parts) for row, why in getattr(part, name)]

    arrays = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "image_tokens", "images")}
    fronts = [part.front for part in parts if part.front is not None]
    return Measured(
        **arrays,
        flags=np.concatenate([part.flags for part in parts]),
        kept=concat_rows([part.kept for part in parts]),
        faults=moved("faults"),
        front=np.concatenate(fronts) if fronts else None,
        margin=parts[0].margin,
        killed=moved("killed"),
        wrong_lengths=moved("wrong_lengths"),
    )


def _repeated(measured: Measured, count: int) -> Measured:
    """Return so many rows, the measured ones over and over; no fault is told twice."""
    rows = np.arange(count) % len(measured.tokens)
    return dataclasses.replace(
        measured,
        tokens=measured.tokens[rows],
        image_tokens=measured.image_tokens[rows],
        images=measured.images[rows],
        flags=measured.flags[rows],
        kept=take_rows(measured.kept, rows),
        front=None if measured.front is None else measured.front[rows],
    )


class TimedSource:
    """Takes the samples of one source through its loader until enough of them are timed."""

    def __init__(self, number: int, loader: SourceLoader, timed: TimedTransform, deadline: Deadline) -> None:
        self._number = number
        self._loader = loader
        self._timed = timed
        self._deadline = deadline
        self._seen = 0
        self.read: Reads = []
        self.finished = Stage()
        self.handed_over = Stage()
        self.decode_s: list[float] = []
        """Seconds of the samples whose media are decoded behind the hand-over."""
        self.pairs: list[tuple[int, int]] = []
        """Places of samples among those measured alone, and finished alone; `_TOGETHER` where they were not."""
        self.rows = 0
        self.drawn = 0
        """Of the rows, those that are samples."""
        self.samples = 0
        """Of these, those that were handed over before it was time to stop."""
        self.tokens = 0
        self.delivered_bytes = 0
        self.buffer_row_bytes = 0.0
        """Bytes of a row in the read buffer, its metadata counted."""
        self.pool_bytes = 0
        """Bytes that Arrow holds for the open readers of the first group."""

    def run(self, samples: int, grown: Callable[[], int]) -> None:
        """Time about so many samples.

        Args:
            grown: Tells how many bytes Arrow's pool has grown by; asked when the first group is open.

        Raises:
            OverlordError: The source cannot be read.
        """
        cursor, runs = Cursor(0, BEGIN, 0), 0
        while self.samples < samples and cursor.epoch < _PASSES:
            if runs and self._deadline.passed:
                break
            self._timed.alone = runs % _TOGETHER_EVERY > 0
            self._timed.outside = Spent()
            count = min(AHEAD_ROWS, samples - self.samples)
            self._timed.leave()
            delta = self._loader.summary_buffer(MetaRequest(self._number, cursor, count), one_group=True)
            self._timed.enter()
            reading, meta = self._timed.outside, delta.meta
            where = (int(meta["epoch"][0]), int(meta["group"][0]))
            self.read.append((where, len(meta), reading))
            if not runs:
                self.pool_bytes = grown()
                self.buffer_row_bytes = self._loader.buffer_bytes / len(self._timed.places)
            self._finish(meta, np.array(self._timed.places[self._seen : self._seen + len(meta)]))
            self._seen += len(meta)
            cursor = delta.next_cursor
            runs += 1
        if not self.samples:
            raise SourceError(
                f"source {self._loader.name!r}: none of the {self.rows} rows that were read is a sample (they are "
                "empty, filtered out, or too long for overlength='drop'); what one costs cannot be known. Look at them "
                "with `overlord sources preview`."
            )

    def _finish(self, meta: MetaArray, places: Int64s) -> None:
        """Finish and hand over the samples among some rows, which were measured at these places."""
        counted = places != _COPY
        self.rows += int(counted.sum())
        drawn = np.flatnonzero(counted & ((meta["flags"] & SKIP) == 0))
        self.drawn += len(drawn)
        if not len(drawn):
            return
        if not self.finished.probed:
            clock = self._timed.clock()
            self.finished.probe(self._hand_over(meta[drawn[:1]], keep=False)[0].seconds)
            self._deadline.put_off(clock.took().seconds)
            self.decode_s.clear()
            # The same one again: behind a later one, the loader would let go of those before it.
            self.finished.probe(self._hand_over(meta[drawn[:1]], keep=False)[0].seconds)
            self.finished.probed = True
        if not (self._timed.alone or self.finished.expensive):
            finishing, handing = self._hand_over(meta[drawn])
            self.finished.add(len(drawn), finishing)
            self.handed_over.add(len(drawn), handing)
            self.pairs += [(int(place), _TOGETHER) for place in places[drawn] if place != _TOGETHER]
            return
        for row in drawn.tolist():
            finishing, handing = self._hand_over(meta[row : row + 1])
            self.pairs.append((int(places[row]), len(self.finished.alone)))
            self.finished.alone.append(finishing)
            self.handed_over.alone.append(handing)
            if self._deadline.passed:
                break

    def _hand_over(self, meta: MetaArray, keep: bool = True) -> tuple[Spent, Spent]:
        """Take planned samples to where they go; return what finishing them took, and all beside it."""
        end = Cursor(*(int(meta[-1][name]) for name in Cursor._fields))
        clock = self._timed.clock()
        staged = self._loader.loader_do_plan(LoaderOrder(0, self._number, meta, end))()
        popping, clock = clock.took(), self._timed.clock()
        done = self._loader.finish(staged)
        finishing, clock = clock.took(), self._timed.clock()
        payload = self._loader.hand_over(staged, done)
        payload = payload.take(np.arange(len(meta)))  # the copy to the constructor
        handing = popping.plus(clock.took())
        if keep:
            self.samples += len(meta)
            self.tokens += int(meta["tokens"].sum())
            self.delivered_bytes += payload.nbytes
        decoder, media = self._timed.decoder, payload.media
        if len(meta) == 1 and decoder is not None and media is not None and media.encoded and len(media.start):
            clock = self._timed.clock()
            decode_media(media, decoder, SerialWorkers())
            self.decode_s.append(clock.took().seconds)
        return finishing, handing

    @property
    def rows_per_sample(self) -> float:
        """Rows that are read for a sample: those that are read for nothing are paid by the others."""
        return self.rows / self.drawn

    def mean(self, read: Spent) -> Spent:
        """Return what the mean sample takes: P, and how much of it needs a processor."""
        return read.plus(self._timed.stage.mean).times(self.rows_per_sample).plus(self.finished.mean)

    def transform_seconds(self, read: Spent) -> Floats:
        """Return P of every sample that went alone; of the mean sample where none did."""
        mean_s, measure, finish = self.mean(read).seconds, self._timed.stage, self.finished
        if not self.pairs:
            return np.array([mean_s])
        places, ends = np.array(self.pairs).T
        # What went together stands behind the others, where its place, -1, finds it.
        measured = np.append(measure.spread(), measure.mean.seconds)[places]
        finished = np.append(finish.spread(), finish.mean.seconds)[ends]
        found = self.rows_per_sample * (read.seconds + measured) + finished
        return found * (mean_s / float(found.mean()))


def time_of_reading(runs: Reads, covered: dict[tuple[int, int], int]) -> Spent:
    """Return what reading a row takes: what a group's first run took stands for all rows that it fetched.

    Args:
        runs: Every run.
        covered: Rows that the first run of each group fetched: all of a group that is held whole, a batch of every
            stream of another one.

    Example:
        >>> time_of_reading([((0, 0), 10, Spent(0.5, 0.5)), ((0, 0), 10, Spent())], {(0, 0): 100})
        Spent(cpu_s=0.005, waited_s=0.005)
    """
    found: list[Floats] = []
    for group, fetched in covered.items():
        counts, times = zip(*(run[1:] for run in runs if run[0] == group), strict=True)
        took = np.array(times)
        if sum(counts) > fetched:
            found.append(took.sum(axis=0) / sum(counts))
        else:
            found.append(took[0] / fetched + took[1:].sum(axis=0) / max(sum(counts[1:]), 1))
    return Spent(*np.mean(found, axis=0).tolist())


# -- profiles of jobs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Profiled:
    """What profiling a job found."""

    profile: Profile
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Sources that could not be measured, and why."""


def profile_job(
    job: Job,
    options: ServiceOptions,
    *,
    when: str,
    sources: Sequence[str] | None = None,
    samples: int = SAMPLES,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Profiled:
    """Measure the sources of a job on real samples.

    Args:
        options: The launch; where media are decoded matters, and where indices are kept.
        when: ISO time of now, for the profile's journal.
        samples: Samples of each source, about.
        seconds: Seconds for each source, about: one of them is finished whatever it takes.

    Raises:
        SpecError: The job or the launch is wrong.
    """
    options = dataclasses.replace(options, loaders_per_source=1, workers={}, threads=1)  # one worker's seconds
    with ProcessWorkers(1) as processes:
        prepared = prepare(_tolerant(job), options, processes.isolate)
        numbers = [n for n, name in enumerate(prepared.job.names) if sources is None or name in sources]
        with closing(ThreadWorkers(_OPENERS, "overlord-profile")) as callers:
            tried = try_files(prepared, numbers, callers, progress)
        failed = {prepared.job.names[n]: str(why) for n, why in tried.items() if isinstance(why, OverlordError)}
        opened = {number: files for number, files in tried.items() if isinstance(files, SourceFiles)}
        found: list[SourceProfile] = []
        for done, (number, files) in enumerate(opened.items()):
            try:
                found.append(_measure(prepared, number, files, processes, samples, seconds, when))
            except OverlordError as error:
                failed[prepared.job.names[number]] = str(error)
            if progress is not None:
                progress("measuring sources", done + 1, len(opened))
    return Profiled(Profile(tuple(found)), failed)


def digests_of(prepared: Prepared, facts: Mapping[str, SourceFacts]) -> dict[str, str]:
    """Return what `Profile.check` compares: the digest of every source whose files are known."""
    return {
        source.name: _digest(prepared, source, facts[source.name].listing)
        for source in prepared.job.sources
        if source.name in facts
    }


def check_profile(profile: Profile, job: Job, options: ServiceOptions, progress: Progress | None = None) -> None:
    """Refuse a profile that was measured on other sources than a job's, as they are now.

    Raises:
        SpecError: A source has changed, was not measured or cannot be opened, or the job is wrong.
    """
    prepared = prepare(job, options)
    with closing(ThreadWorkers(_OPENERS, "overlord-profile")) as callers:
        opened = open_files(prepared, range(len(prepared.job.sources)), callers, progress)
    facts = {prepared.job.names[number]: facts_of(files) for number, files in opened.items()}
    profile.check(digests_of(prepared, facts))


def read_profile(path: Path) -> Profile | None:
    """Read a profile's file; None where there is none.

    Raises:
        SpecError: It is damaged, of another version, or cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        return Profile.from_json("", f"{path} ({error.reason})")
    except OSError as error:
        raise SpecError(f"{path}: it cannot be read ({error.strerror}); loaders cannot be sized by it.") from error
    return Profile.from_json(text, str(path))


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile's file: a process that reads it meanwhile sees the old one or the new one.

    Raises:
        SpecError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch, scratch.open("w", encoding="utf-8") as file:
            file.write(profile.to_json())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SpecError(f"{path}: it cannot be written ({error.strerror}). Name another file.") from error


def refresh(path: Path, status: Mapping[str, Any], when: str) -> Profile | None:
    """Move a profile's file toward what a running job has measured; nothing happens where there is none.

    Args:
        path: The profile's file.
        status: What `service.status()` tells: of each source `samples_prepared` (rows measured), `busy_s` (seconds of
            workers) and `cpu_s` (of a processor), and the `samples` and `skipped` rows that the stream has drawn and
            passed over.
        when: ISO time of now.

    Raises:
        SpecError: The file is damaged or cannot be written.
    """
    profile = read_profile(path)
    if profile is None:
        return None
    running = {name: _running(one) for name, one in status["sources"].items()}
    refreshed = profile.refreshed(running, when, f"refreshed at step {status['planner']['next_step']}")
    if refreshed != profile:
        write_profile(path, refreshed)
    return refreshed


def _running(one: Mapping[str, Any]) -> Running:
    """Return what a status tells of a source, by samples: rows that are passed over are paid by the others."""
    drawn, skipped = int(one["samples"]), int(one["skipped"])
    share = drawn / (drawn + skipped) if drawn else 1.0
    return Running(round(share * int(one["samples_prepared"])), float(one["busy_s"]), float(one["cpu_s"]))


def _tolerant(job: Job) -> Job:
    """Return a job whose bad samples are counted and stop nothing: what they cost is measured all the same."""
    return job.model_copy(update={"sources": tuple(source.replace(tolerance=1.0) for source in job.sources)})


def _digest(prepared: Prepared, source: Source, listing: str) -> str:
    return cost_digest(source, listing, prepared.tokenizer_digest, prepared.options.placement)


class _Verdicts:
    """Remembers rows that killed their process worker while they are measured; a profile writes down none of them."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}

    def add(self, source: str, row: int, reason: str, epoch: int = 0) -> None:
        self._reasons[row] = reason

    def known(self, source: str, rows: npt.NDArray[np.int64], epoch: int = 0) -> npt.NDArray[np.bool_]:
        return np.isin(rows, list(self._reasons))

    def reason(self, source: str, row: int) -> str:
        return self._reasons[row]


def _measure(
    prepared: Prepared,
    number: int,
    files: SourceFiles,
    processes: ProcessWorkers,
    samples: int,
    seconds: float,
    when: str,
) -> SourceProfile:
    source = prepared.job.sources[number]
    order = order_of(prepared.job, source, files)
    order.first_group(0)  # indexes what the first group needs, which happens once and is no sample's cost
    deadline = Deadline(seconds)
    timed = TimedTransform(prepared.transforms[number], deadline, lambda: Clock(lambda: processes.resting))
    transforms = [*prepared.transforms[:number], timed, *prepared.transforms[number + 1 :]]
    ready = dataclasses.replace(prepared, transforms=transforms)
    loader = make_pool(ready, number, files, _Verdicts(), Executors.of_caller()).loader
    timing = TimedSource(number, loader, timed, deadline)
    before = pa.total_allocated_bytes()
    timing.run(samples, lambda: pa.total_allocated_bytes() - before)
    fetched = {where: _fetched(order.group(*where)) for where, _, _ in timing.read}
    read = time_of_reading(timing.read, fetched)
    mean, per_sample, rows = timing.mean(read), timing.rows_per_sample, len(timed.places)
    groups = _first_groups(order)
    found = SourceProfile(
        name=source.name,
        digest=_digest(prepared, source, files.listing_digest()),
        samples=timing.samples,
        bad=len({row for row, _ in loader.counters.bad}),
        transform=Spread.of(timing.transform_seconds(read)),
        read_s=per_sample * read.seconds,
        measure_s=per_sample * timed.stage.mean.seconds,
        finish_s=timing.finished.mean.seconds,
        cpu_share=min(mean.cpu_s / mean.seconds, 1.0) if mean.seconds > 0 else 1.0,
        decode_s=float(np.mean(timing.decode_s)) if timing.decode_s else 0.0,
        decoded_in="" if timed.decoder is None else loader.placement.where,
        handover_s=timing.handed_over.mean.seconds,
        file_bytes=_file_bytes(files, order),
        buffer_bytes=_buffer_bytes(groups, timed.read_bytes / rows, timing),
        tokens=timing.tokens / timing.samples,
        read_bytes=timed.read_bytes / rows,
        kept_bytes=timed.kept_bytes / rows,
        delivered_bytes=timing.delivered_bytes / timing.samples,
        groups=len(groups) + len(order.windows(0)) - 1,
        group_rows=sum(group.num_rows for group in groups) / len(groups),
    )
    return found.noted(Entry(when, "measured", timing.samples, found.transform_s))


def _fetched(group: Group) -> int:
    """Return the rows that the first read of a group fetches."""
    streams = len(group.rows)
    return group.num_rows if group.whole else min(group.num_rows, streams * rows_per_read(group.row_bytes, streams))


def _file_bytes(files: SourceFiles, order: SourceOrder) -> int:
    """Return what a listed and indexed source holds: its files' names, and the index and order of one window.

    Counted, since it is too little to be seen in the memory of a process: tens of kilobytes.
    """
    listed = sum(len(file.path) + len(file.location) + _LISTED_BYTES for file in files.files)
    blocks = sum(len(files.blocks(int(file)).rows) for file in order.windows(0)[0])
    return listed + 8 * (_INDEX_ARRAYS + _ORDER_ARRAYS) * blocks


def _first_groups(order: SourceOrder) -> list[Group]:
    """Return the first groups of the first window."""
    first = order.first_group(0)
    return [order.group(0, n) for n in range(first, first + _MOST_GROUPS) if order.has_group(0, n)]


def _buffer_bytes(groups: Sequence[Group], row_bytes: float, timing: TimedSource) -> int:
    """Return what one worker holds at the end of the largest of some groups.

    Its open readers (a group held whole, or k streams: the bytes of their rows, or what Arrow's pool grew by when they
    were opened, if that is more) and the rows that it has measured, by the bytes that the loader itself reports. The
    resident memory of this process would tell nothing: allocators keep what the source before has freed, and Python's
    own tracing does not see Arrow. A worker stops at `WORKER_BYTES` of rows kept ahead of the plan.
    """
    largest = max(groups, key=lambda group: group.num_rows)
    streams = len(largest.rows)
    held = largest.num_rows * row_bytes if largest.whole else streams * stream_bytes(largest.row_bytes, streams)
    kept = min(largest.num_rows * timing.buffer_row_bytes, max(WORKER_BYTES, timing.buffer_row_bytes))
    return int(max(held, timing.pool_bytes) + kept)
