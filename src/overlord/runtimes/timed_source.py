"""Times the samples of one source on their way through a real SourceLoader: read, measured, finished, handed over.

Rules of this file:
1. Seconds are those of one worker that has a core, as `worker_clock` counts them; those of the processor are noted
   beside them, of the same rows.
2. The mean comes from rows that go together, as loaders take them. The spread comes from rows that go alone, less what
   a call costs that is made for one row only.
3. What happens once (a file is indexed, a decoder is loaded, a process worker starts) is in no figure.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from overlord.core.messages import LoaderOrder, MetaRequest
from overlord.core.order import BEGIN
from overlord.core.ragged import RowBatch, concat_rows, num_bytes, num_rows, slice_rows, take_rows
from overlord.core.samples import SKIP, Cursor, MetaArray
from overlord.errors import SourceError
from overlord.roles.source_loader import AHEAD_ROWS, SourceLoader
from overlord.runtimes.worker_clock import Clock, Took
from overlord.runtimes.workers import SerialWorkers
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

Floats = npt.NDArray[np.float64]
Reads = list[tuple[tuple[int, int], int, float]]
"""((epoch, group), rows, seconds) of every run of rows."""

_EXPENSIVE_S = 0.005
"""A row that takes so long goes alone always: what a call costs beside it does not matter, and time is short."""
_TOGETHER_EVERY = 4
"""Of so many runs of rows, the first goes together."""
_TOGETHER, _COPY = -1, -2
_PASSES = 2
"""A small source is not read more often than this."""


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
    """Seconds of one stage of the way, of rows together and of rows alone."""

    rows: int = 0
    together_s: float = 0.0
    together_cpu_s: float = 0.0
    alone: list[float] = field(default_factory=list[float])
    alone_cpu_s: float = 0.0
    """Of the processor, of all rows alone."""
    first_s: float = 0.0
    """The very first row, which may have waited for what happens once."""
    probed: bool = False
    expensive: bool = False

    def add(self, rows: int, took: Took) -> None:
        """Note what some rows took together."""
        self.rows += rows
        self.together_s += took.seconds
        self.together_cpu_s += took.cpu_s

    def add_alone(self, took: Took) -> None:
        """Note what one row took alone."""
        self.alone.append(took.seconds)
        self.alone_cpu_s += took.cpu_s

    def probe(self, seconds: float) -> None:
        """Note what one row took that is not counted: the first, or the one after it, which tells what to expect."""
        if not self.first_s:
            self.first_s = seconds
        self.expensive = seconds > _EXPENSIVE_S

    @property
    def mean(self) -> float:
        """Seconds a row."""
        if self.rows:
            return self.together_s / self.rows
        return float(np.mean(self.alone)) if self.alone else self.first_s

    @property
    def cpu_mean(self) -> float:
        """Seconds of the processor a row, of the rows that `mean` is of; all of it where there are none."""
        if self.rows:
            return self.together_cpu_s / self.rows
        return self.alone_cpu_s / len(self.alone) if self.alone else self.first_s

    def spread(self) -> Floats:
        """Return the seconds of every row that went alone, less what a call for one row costs."""
        alone = np.array(self.alone)
        if not len(alone):
            return alone
        # Of noise that fell on rows alone, most is taken for a part of the call; never all that the quick ones took.
        call = min(max(float(alone.mean()) - self.mean, 0.0), 0.9 * float(np.quantile(alone, 0.05)))
        rest = np.maximum(alone - call, 0.1 * alone)
        return rest * (self.mean / float(rest.mean()))


class TimedTransform:
    """A source's own transform, timed while its loader measures rows.

    Args:
        inner: The transform.
        deadline: When to stop: rows behind it are stood in for by copies, and not counted.
        clock: Makes a clock that starts now.
    """

    def __init__(self, inner: SampleTransform, deadline: Deadline, clock: Callable[[], Clock] = Clock) -> None:
        self._inner = inner
        self._deadline = deadline
        self.clock = clock
        self.columns = inner.columns
        self.facts = inner.facts
        self.stage = Stage()
        self.alone = False
        """Whether the rows that come now go one by one."""
        self.places: list[int] = []
        """Of every row so far, in order: its place among the rows that went alone, `_TOGETHER`, or `_COPY`."""
        self.outside = Took()
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
        self.outside = self.outside.and_also(self._since.took())

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        """Measure rows, together or one by one."""
        self.enter()
        count = num_rows(rows)

        def run(start: int, stop: int) -> tuple[Measured, Took]:
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
                self.stage.add_alone(took)
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
        lies=moved("lies"),
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
    """Takes the samples of one source through its loader until enough of them are timed.

    Args:
        number: The source's number in its job.
        loader: Its loader, made with `timed`.
        timed: Its transform.
        deadline: When to stop.
    """

    def __init__(self, number: int, loader: SourceLoader, timed: TimedTransform, deadline: Deadline) -> None:
        self._number = number
        self._loader = loader
        self._timed = timed
        self._deadline = deadline
        self._seen = 0
        self.read: Reads = []
        self.read_cpu: Reads = []
        """The same runs, their seconds of the processor."""
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
            samples: How many.
            grown: Tells how many bytes Arrow's pool has grown by; asked when the first group is open.

        Raises:
            OverlordError: The source cannot be read.
        """
        cursor, runs = Cursor(0, BEGIN, 0), 0
        while self.samples < samples and cursor.epoch < _PASSES:
            if runs and self._deadline.passed:
                break
            self._timed.alone = runs % _TOGETHER_EVERY > 0
            self._timed.outside = Took()
            count = min(AHEAD_ROWS, samples - self.samples)
            self._timed.leave()
            delta = self._loader.summary_buffer(MetaRequest(self._number, cursor, count))
            self._timed.enter()
            reading, meta = self._timed.outside, delta.meta
            where = (int(meta["epoch"][0]), int(meta["group"][0]))
            self.read.append((where, len(meta), reading.seconds))
            self.read_cpu.append((where, len(meta), reading.cpu_s))
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
            self.finished.add_alone(finishing)
            self.handed_over.add_alone(handing)
            if self._deadline.passed:
                break

    def _hand_over(self, meta: MetaArray, keep: bool = True) -> tuple[Took, Took]:
        """Take planned samples to where they go; return what finishing them took, and all beside it."""
        end = Cursor(*(int(meta[-1][name]) for name in Cursor._fields))
        clock = self._timed.clock()
        staged = self._loader.loader_do_plan(LoaderOrder(0, self._number, meta, end))
        popping, clock = clock.took(), self._timed.clock()
        done = self._loader.finish(staged)
        finishing, clock = clock.took(), self._timed.clock()
        payload = self._loader.hand_over(staged, done)
        payload = payload.take(np.arange(len(meta)), np.ones(len(meta), np.bool_))  # the copy to who needs them
        handing = popping.and_also(clock.took())
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

    def transform_seconds(self, read_s: float) -> Floats:
        """Return P of every sample that went alone; of the mean sample where none did."""
        per_sample, measure, finish = self.rows_per_sample, self._timed.stage, self.finished
        mean = per_sample * (read_s + measure.mean) + finish.mean
        if not self.pairs:
            return np.array([mean])
        places, ends = np.array(self.pairs).T
        # What went together stands behind the others, where its place, -1, finds it.
        measured = np.append(measure.spread(), measure.mean)[places]
        found = per_sample * (read_s + measured) + np.append(finish.spread(), finish.mean)[ends]
        return found * (mean / float(found.mean()))

    def cpu_share(self, read_s: float, read_cpu_s: float) -> float:
        """Return the part of P that needs a CPU.

        Args:
            read_s: Seconds of reading a row.
            read_cpu_s: Of them, seconds of the processor.
        """
        per_sample, measure, finish = self.rows_per_sample, self._timed.stage, self.finished
        seconds = per_sample * (read_s + measure.mean) + finish.mean
        cpu_s = per_sample * (read_cpu_s + measure.cpu_mean) + finish.cpu_mean
        return min(cpu_s / seconds, 1.0) if seconds > 0 else 1.0


def read_seconds(runs: Reads, covered: dict[tuple[int, int], int]) -> float:
    """Return the seconds of reading a row: those of a group's first run stand for all rows that it fetched.

    Args:
        runs: Every run; or its seconds of the processor, which are shared out the same way.
        covered: Rows that the first run of each group fetched: all of a group that is held whole, a batch of every
            stream of another one.

    Example:
        >>> read_seconds([((0, 0), 10, 1.0), ((0, 0), 10, 0.0)], {(0, 0): 100})
        0.01
    """
    found: list[float] = []
    for group, fetched in covered.items():
        counts, seconds = zip(*(run[1:] for run in runs if run[0] == group), strict=True)
        if sum(counts) > fetched:
            found.append(sum(seconds) / sum(counts))
        else:
            found.append(seconds[0] / fetched + sum(seconds[1:]) / max(sum(counts[1:]), 1))
    return float(np.mean(found))
