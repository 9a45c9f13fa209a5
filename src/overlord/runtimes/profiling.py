"""Profiling: what every source of a job costs, measured in this process on real samples and files.

One source after the other goes through the parts of a real run: its files, its order, its transform (in process
workers, where a custom function asks for them), its SourceLoader.

Rules of this file:
1. What one source does wrong is told of it and keeps no other from being measured.
2. A profile's file is written whole or not at all, and never unpickled.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from overlord.core.order import Group, SourceOrder, rows_per_read, stream_bytes
from overlord.errors import OverlordError, SpecError
from overlord.job.specs import Job, Source
from overlord.readers.source_files import SourceFiles
from overlord.runtimes.crews import WORKER_BYTES
from overlord.runtimes.deployment import Prepared, SourceFacts, make_crew, open_files, prepare
from overlord.runtimes.launch_options import LaunchOptions
from overlord.runtimes.opening import Progress, order_of
from overlord.runtimes.process_workers import ProcessWorkers
from overlord.runtimes.timed_source import Deadline, TimedSource, TimedTransform, read_seconds
from overlord.runtimes.worker_clock import Clock
from overlord.runtimes.workers import Hands, SerialWorkers, ThreadWorkers
from overlord.scaling.profiles import Entry, Profile, Running, SourceProfile, Spread, cost_digest
from overlord.storage import replacing

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


@dataclass(frozen=True, slots=True)
class Profiled:
    """What profiling a job found."""

    profile: Profile
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Sources that could not be measured, and why."""


def profile_job(
    job: Job,
    options: LaunchOptions,
    *,
    when: str,
    sources: Sequence[str] | None = None,
    samples: int = SAMPLES,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Profiled:
    """Measure the sources of a job on real samples.

    Args:
        job: The job.
        options: The launch; where media are decoded matters, and where indices are kept.
        when: ISO time of now, for the profile's journal.
        sources: Only these; by default all.
        samples: Samples of each source, about.
        seconds: Seconds for each source, about: one of them is finished whatever it takes.
        progress: Told how far it is.

    Raises:
        SpecError: The job or the launch is wrong.
    """
    options = dataclasses.replace(options, loaders_per_source=1, workers={})  # one worker's seconds
    with ProcessWorkers(1) as processes:
        prepared = prepare(_tolerant(job), options, processes.isolate)
        numbers = [n for n, name in enumerate(prepared.job.names) if sources is None or name in sources]
        opened, failed = open_each(prepared, numbers, progress)
        found: list[SourceProfile] = []
        for done, (number, files) in enumerate(opened.items()):
            source = prepared.job.sources[number]
            try:
                found.append(_measure(prepared, number, files, processes, samples, seconds, when))
            except OverlordError as error:
                failed[source.name] = str(error)
            if progress is not None:
                progress("measuring sources", done + 1, len(opened))
    return Profiled(Profile(tuple(found)), failed)


def open_each(
    prepared: Prepared, numbers: Sequence[int], progress: Progress | None = None
) -> tuple[dict[int, SourceFiles], dict[str, str]]:
    """Open sources side by side; return those that can be opened, and why the others cannot."""
    callers, failed, opened = ThreadWorkers(_OPENERS, "overlord-profile"), dict[str, str](), dict[int, SourceFiles]()

    def open_one(number: int) -> None:
        try:
            opened.update(open_files(prepared, [number], SerialWorkers()))
        except OverlordError as error:
            failed[prepared.job.names[number]] = str(error)
        if progress is not None:
            progress("opening sources", len(opened) + len(failed), len(numbers))

    try:
        callers.map(open_one, numbers)
    finally:
        callers.close()
    return {number: opened[number] for number in numbers if number in opened}, failed


def digests_of(prepared: Prepared, facts: Mapping[str, SourceFacts]) -> dict[str, str]:
    """Return what `Profile.check` compares: the digest of every source whose files are known."""
    return {
        source.name: _digest(prepared, source, facts[source.name].listing)
        for source in prepared.job.sources
        if source.name in facts
    }


def check_profile(profile: Profile, job: Job, options: LaunchOptions, progress: Progress | None = None) -> None:
    """Refuse a profile that was measured on other sources than a job's, as they are now.

    Raises:
        SpecError: A source has changed or was not measured, or the job is wrong.
    """
    prepared = prepare(job, options)
    opened, failed = open_each(prepared, range(len(prepared.job.sources)), progress)
    if failed:
        raise SpecError(next(iter(failed.values())))
    facts = {prepared.job.names[number]: SourceFacts.of(files) for number, files in opened.items()}
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
    """Write a profile's file: who reads it meanwhile sees the old one or the new one.

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
            workers), and the `samples` and `skipped` rows that the stream has drawn and passed over.
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
    return Running(round(share * int(one["samples_prepared"])), float(one["busy_s"]))


def _tolerant(job: Job) -> Job:
    """Return a job whose bad samples are counted and stop nobody: what they cost is measured all the same."""
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
    loader = make_crew(ready, number, files, _Verdicts(), Hands.of_caller()).loader
    way = TimedSource(number, loader, timed, deadline)
    before = pa.total_allocated_bytes()
    way.run(samples, lambda: pa.total_allocated_bytes() - before)
    fetched = {where: _fetched(order.group(*where)) for where, _, _ in way.read}
    read_s, read_cpu_s = read_seconds(way.read, fetched), read_seconds(way.read_cpu, fetched)
    seconds_of = way.transform_seconds(read_s)
    per_sample, rows = way.rows_per_sample, len(timed.places)
    found = SourceProfile(
        name=source.name,
        digest=_digest(prepared, source, files.listing_digest()),
        samples=way.samples,
        bad=len({row for row, _ in loader.met.bad}),
        transform=Spread.of(seconds_of),
        read_s=per_sample * read_s,
        measure_s=per_sample * timed.stage.mean,
        finish_s=way.finished.mean,
        cpu_share=way.cpu_share(read_s, read_cpu_s),
        decode_s=float(np.mean(way.decode_s)) if way.decode_s else 0.0,
        decoded_in="" if timed.decoder is None else loader.placement.where,
        handover_s=way.handed_over.mean,
        file_bytes=_file_bytes(files, order),
        buffer_bytes=_buffer_bytes(order, timed.read_bytes / rows, way),
        tokens=way.tokens / way.samples,
        read_bytes=timed.read_bytes / rows,
        kept_bytes=timed.kept_bytes / rows,
        delivered_bytes=way.delivered_bytes / way.samples,
    )
    return found.noted(Entry(when, "measured", way.samples, found.transform_s))


def _fetched(group: Group) -> int:
    """Return the rows that the first read of a group fetches."""
    return group.num_rows if group.whole else min(group.num_rows, len(group.rows) * rows_per_read(group.row_bytes))


def _file_bytes(files: SourceFiles, order: SourceOrder) -> int:
    """Return what a listed and indexed source holds: its files' names, and the index and order of one window.

    Counted, since it is too little to be seen in the memory of a process: tens of kilobytes.
    """
    listed = sum(len(file.path) + len(file.location) + _LISTED_BYTES for file in files.files)
    blocks = sum(len(files.blocks(int(file)).rows) for file in order.windows(0)[0])
    return listed + 8 * (_INDEX_ARRAYS + _ORDER_ARRAYS) * blocks


def _buffer_bytes(order: SourceOrder, row_bytes: float, way: TimedSource) -> int:
    """Return what one worker holds at the end of the largest group of the first window.

    Its open readers (a group held whole, or k streams: the bytes of their rows, or what Arrow's pool grew by when they
    were opened, if that is more) and the rows that it has measured, by the bytes that the loader itself reports. The
    resident memory of this process would tell nothing: allocators keep what the source before has freed, and Python's
    own tracing does not see Arrow. A worker stops at `WORKER_BYTES` of rows kept ahead of the plan.
    """
    first = order.first_group(0)
    numbers = range(first, first + _MOST_GROUPS)
    groups = [order.group(0, number) for number in numbers if order.has_group(0, number)]
    largest = max(groups, key=lambda group: group.num_rows)
    held = largest.num_rows * row_bytes if largest.whole else len(largest.rows) * stream_bytes(largest.row_bytes)
    kept = min(largest.num_rows * way.buffer_row_bytes, max(WORKER_BYTES, way.buffer_row_bytes))
    return int(max(held, way.pool_bytes) + kept)
