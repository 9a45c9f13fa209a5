"""SourceLoader: reads one source in its order, measures samples ahead of the plan, finishes planned ones.

Rules of this file:
1. What is delivered has the planned length, whatever was read.
2. Everything here is a cache: any position can be asked for again, and is read again.
3. A fault of one sample makes a stand-in and is counted; a fault of a file is raised.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Pieces, apply_overlength, cut_pieces
from overlord.core.messages import LoaderOrder, MetaDelta, MetaRequest, Payload
from overlord.core.order import BEGIN, NO_GROUP, Group, SourceOrder
from overlord.core.ragged import BAD_COLUMN, NOT_PARSED, RowBatch, expand_ranges, offsets_of
from overlord.core.samples import BAD, ENDS_EPOCH, META, PLAIN, Cursor, MetaArray, SampleId, derive, hash64
from overlord.errors import ReaderError, SourceError, StateError, ToleranceError
from overlord.job.launch_words import Placement
from overlord.job.specs import Source
from overlord.roles.poisoned_rows import VerdictBook
from overlord.roles.ports import Telemetry, Workers
from overlord.roles.read_buffer import Blocks, Chunk, GroupReader, ReadBuffer, gather
from overlord.transforms.samples.per_sample import (
    Fault,
    Finished,
    Measured,
    SampleTransform,
    count_loss_tokens,
    decode_media,
    flat,
    ragged_column,
)

# --------------------------------------------------------------------------------------------------------------
# Metadata of measured rows: bytes, images, and where images stand that do not just begin their sample. Pure.


def row_bytes_of(kept: RowBatch, count: int) -> npt.NDArray[np.int64]:
    """Return the bytes that each row holds."""
    total = np.zeros(count, np.int64)
    for column in kept.values():
        total += column.lengths * column.values.itemsize if hasattr(column, "lengths") else 0  # type: ignore[union-attr]
    return total


def media_items(measured: Measured) -> tuple[Pieces | None, Pieces | None]:
    """Return every image, clip and sound by its placeholders, and with the tokens around it that go with it."""
    if "media_start" not in measured.kept:
        return None, None
    start = ragged_column(measured.kept, "media_start")
    rows = np.repeat(np.arange(len(start)), start.lengths).astype(np.int32)
    first, length = flat(start), flat(ragged_column(measured.kept, "media_length"))
    before, behind = measured.margin
    return Pieces(rows, first, length), Pieces(rows, first - before, length + before + behind)


def count_images(meta: MetaArray, images: Pieces) -> None:
    """Count the images that are delivered; those of a sample that does not just begin with one are listed."""
    kept = images.start.astype(np.int64) + images.length <= meta["tokens"][images.sample]
    sample = images.sample[kept]
    meta["image_tokens"] = np.bincount(sample, images.length[kept], len(meta))
    meta["images"] = np.bincount(sample, minlength=len(meta))
    simple = (meta["images"] <= 1) & (np.bincount(sample, images.start[kept], len(meta)) == 0)
    meta["items"] = ~simple


def listed_items(meta: MetaArray, parts: list[tuple[MetaArray, Chunk]]) -> npt.NDArray[np.int32] | None:
    """List the images of samples that do not just begin with one, and let their metadata point into the list."""
    if not meta["items"].any():
        return None
    found: list[npt.NDArray[np.int32]] = []
    for part, chunk in parts:
        rows = np.flatnonzero(part["items"])
        start, length = ragged_column(chunk.kept, "media_start"), ragged_column(chunk.kept, "media_length")
        # Images come in the order of their tokens: those that the overlength policy leaves out are the last.
        places = expand_ranges(start.offsets[rows + int(part["offset"][0]) - chunk.offset], part["images"][rows])
        margins = np.broadcast_to(np.array(chunk.margin), (len(places), 2))
        found.append(np.concatenate([np.stack([start.values[places], length.values[places]], axis=1), margins], axis=1))
    listed = np.flatnonzero(meta["items"])
    meta["items"][listed] = 1 + offsets_of(meta["images"][listed])[:-1]
    return np.concatenate(found).astype(np.int32)


# --------------------------------------------------------------------------------------------------------------
# Where the media of a source are decoded: before the hand-over to the DataConstructor, or behind it.
#
# Decoding that makes bytes grow moves behind the hand-over (the paper's transformation reordering, section 6.2). The
# choice changes what travels and where the work is done, and never the stream.


class PlacementChoice:
    """The choice for one source; all of its loaders share it, under the lock that a runtime with threads gives.

    Example:
        >>> choice = PlacementChoice("auto")
        >>> choice.decodes_in_loader(encoded_bytes=10_000, decoded_bytes=150_000), choice.ratio
        (False, 15.0)
    """

    def __init__(self, wanted: Placement, lock: AbstractContextManager[Any] | None = None) -> None:
        self._wanted = wanted
        self._lock: AbstractContextManager[Any] = lock or nullcontext()
        self._in_loader: bool | None = None
        self.ratio: float | None = None
        """Decoded bytes over encoded ones, of the first samples seen."""

    def decodes_in_loader(self, encoded_bytes: int, decoded_bytes: int) -> bool:
        """Return whether media are decoded in the loader; the first samples decide, once and for all."""
        with self._lock:
            if self._in_loader is None:
                self.ratio = decoded_bytes / max(encoded_bytes, 1)
                self._in_loader = self._wanted == "loader" or (self._wanted == "auto" and self.ratio <= 1)
            return self._in_loader

    @property
    def where(self) -> str:
        """Where media are decoded: "loader" or "constructor"; "undecided" before the first."""
        return "undecided" if self._in_loader is None else "loader" if self._in_loader else "constructor"


# --------------------------------------------------------------------------------------------------------------


CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
AHEAD_ROWS = 64
AHEAD_BYTES = 128 << 10
"""A chunk holds at least about this much even when less is asked for: tokenizers like batches."""
FIRST_ROWS = 8
"""So many bad rows at the beginning of a source, and no good one, are a mistake in the job."""
FEW_SAMPLES = 1000
"""A tolerance is a share; it is judged as if at least this many samples had been seen."""

Lengths = Callable[[RowBatch, npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Gives known text lengths of some rows: from a column, or from a sidecar by row number."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of one group that were read and not measured yet."""

    cursor: Cursor
    rows: RowBatch
    numbers: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Staged:
    """Planned samples that have left the read buffer and are not finished yet."""

    order: LoaderOrder
    kept: RowBatch


MET_IDS = 4096
"""Samples that a snapshot of a loader names at most."""


@dataclass(frozen=True, slots=True)
class Met:
    """What loaders of one source have met: what a loader in their place must know to count on.

    Example:
        >>> Met.from_json(Met(100, {(7, 0)}, set()).to_json()).bad
        {(7, 0)}
    """

    seen: int
    """Samples measured."""
    bad: set[tuple[int, int]]
    """Samples (row, epoch) that a stand-in took the place of."""
    wrong_lengths: set[tuple[int, int]]
    """Samples that were cut or padded to the length that was promised, or left out where that is none."""

    @classmethod
    def joined(cls, parts: Sequence[Met]) -> Met:
        """Return what several loaders of a source have met together."""
        empty: set[tuple[int, int]] = set()
        bad, wrong = (empty.union(*sets) for sets in ([m.bad for m in parts], [m.wrong_lengths for m in parts]))
        return cls(sum(met.seen for met in parts), bad, wrong)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; of very many samples only the first are named."""
        named = {"bad": self.bad, "wrong_lengths": self.wrong_lengths}
        return {"seen": self.seen, **{key: [list(one) for one in sorted(ids)[:MET_IDS]] for key, ids in named.items()}}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Met:
        """Read what `to_json` returned."""
        bad, wrong = ({(int(row), int(epoch)) for row, epoch in given[key]} for key in ("bad", "wrong_lengths"))
        return cls(int(given["seen"]), bad, wrong)


class SourceLoader:
    """One source, or the groups of one source that this loader owns."""

    def __init__(  # noqa: PLR0913 - a loader is told everything and asks nobody
        self,
        number: int,
        source: Source,
        files: Blocks,
        order: SourceOrder,
        transform: SampleTransform,
        *,
        seed: int,
        context_length: int,
        overlength: str,
        lengths: Lengths | None,
        workers: Workers,
        telemetry: Telemetry,
        placement: PlacementChoice | None = None,
        verdicts: VerdictBook | None = None,
    ) -> None:
        self._number = number
        self._source = source
        self._files = files
        self._order = order
        self._transform = transform
        self._seed = seed
        self._context_length = context_length
        self._overlength = overlength
        self._lengths = lengths
        self._workers = workers
        self._telemetry = telemetry
        self._buffer = ReadBuffer()
        self._readers: dict[tuple[int, int], GroupReader] = {}
        self.open_groups = 1
        """Groups that may be open at once: one, unless several workers read ahead."""
        self._resting: Cursor | None = None
        self._popped = Cursor(-1, -1, -1)
        self.seen = 0
        """Samples measured so far, also by loaders before this one."""
        self._bad: set[tuple[int, int]] = set()
        self._first_bad: dict[int, str] | None = {}
        """Why the rows at the beginning of the first group are bad; None once a good one is among them."""
        self._lies: set[tuple[int, int]] = set()
        self._verdicts = verdicts
        self.placement = placement or PlacementChoice("loader")
        """Where this source's media are decoded."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes in the read buffer."""
        return self._buffer.nbytes

    def ahead_bytes(self, cursor: Cursor) -> int:
        """Bytes in the read buffer that lie beyond a cursor."""
        return self._buffer.bytes_from(cursor)

    @property
    def name(self) -> str:
        """The name of its source."""
        return self._source.name

    @property
    def met(self) -> Met:
        """What it has met so far: stand-ins, and samples cut or padded to their planned length."""
        return Met(self.seen, set(self._bad), set(self._lies))

    def take_over(self, met: Met) -> None:
        """Count on from what a loader before this one had met."""
        self.seen += met.seen
        self._first_bad = None if met.seen else self._first_bad
        self._bad |= met.bad
        self._lies |= met.wrong_lengths

    def give_away(self) -> Met:
        """Return what was met so far, and count anew."""
        met = self.met
        self.seen, self._bad, self._lies = 0, set(), set()
        return met

    def summary_buffer(self, request: MetaRequest) -> MetaDelta:
        """Tell what is known of the samples from a cursor on, reading and measuring them if need be."""
        cursor, group = self.wake(request.cursor)
        total = group.num_rows
        stop = min(cursor.offset + request.count, total)
        parts: list[tuple[MetaArray, Chunk]] = []
        at = cursor.offset
        while at < stop:
            place = Cursor(cursor.epoch, cursor.group, at)
            chunk = self._buffer.describing(place) or self._chunk_at(place, stop)
            parts.append((chunk.meta[at - chunk.offset : stop - chunk.offset], chunk))
            at = min(chunk.stop, stop)
        meta = np.concatenate([part for part, _ in parts])
        following = Cursor(cursor.epoch, cursor.group, stop)
        if stop == total:
            following, ended = self._after_group(cursor)
            if ended:
                meta["flags"][-1] |= ENDS_EPOCH
        return MetaDelta(self._number, meta, following, listed_items(meta, parts))

    def wake(self, cursor: Cursor) -> tuple[Cursor, Group]:
        """Begin to work, if it rests; return where a cursor lies, with its group."""
        self._resting = None
        cursor = self._resolve(cursor)
        with self.reading():
            return cursor, self._order.group(cursor.epoch, cursor.group)

    def missing(self, cursor: Cursor, stop: int) -> int:
        """Return the first offset of a group from a cursor on that is not measured yet; `stop` where all are."""
        at = cursor.offset
        while at < stop and (chunk := self._buffer.describing(Cursor(cursor.epoch, cursor.group, at))) is not None:
            at = chunk.stop
        return min(at, stop)

    def read(self, cursor: Cursor, group: Group, count: int) -> Stretch:
        """Read rows of a group; several groups may be read at once, each by one caller."""
        key = (cursor.epoch, cursor.group)
        with self.reading(key):
            reader = self._readers.get(key)
            if reader is None or reader.offset != cursor.offset:
                while len(self._readers) >= self.open_groups:
                    self._readers.pop(min(list(self._readers)), None)
                reader = self._readers[key] = GroupReader(group, self._files, cursor.offset)
            rows, numbers = reader.read(count)  # (5) new samples are read into the buffer
        if reader.offset == group.num_rows:
            self._readers.pop(key, None)  # nothing of a finished group stays open
        return Stretch(cursor, rows, numbers)

    def keep(self, measured: tuple[Chunk, list[Fault], list[Fault]]) -> Chunk:
        """Count what was found in measured rows: bad ones, lengths that lie. Take them into the read buffer."""
        chunk, faults, lies = measured
        self.seen += len(chunk.meta)
        self._note(chunk.meta, faults, self._bad, self._telemetry.bad_samples)
        self._note(chunk.meta, lies, self._lies, self._telemetry.wrong_lengths)
        self._judge_first_rows(chunk, faults)
        self._check_tolerance()
        self._buffer.add(chunk)
        return chunk

    def loader_do_plan(self, order: LoaderOrder) -> Staged:
        """Pop the planned samples from the buffer."""
        kept = gather(self._pick(order.meta))
        self.release(order.end)
        return Staged(order, kept)

    def release(self, cursor: Cursor) -> None:
        """Let go of what lies before a cursor."""
        self._buffer.release(cursor)
        self._popped = cursor
        self._drop_if_resting()

    def finish(self, staged: Staged) -> Finished:
        """Run the per-sample transforms; touches nothing of the loader, so steps may overlap here."""
        meta = staged.order.meta
        done = self._transform.finish(
            staged.kept, meta["tokens"].astype(np.int64), (meta["flags"] & BAD) > 0, self._workers
        )
        decoder = self._transform.decoder
        if done.media is None or decoder is None or not len(done.media.grids):
            return done
        decoded = int(decoder.item_bytes(done.media.grids).sum())
        if self.placement.decodes_in_loader(done.media.nbytes, decoded) or staged.order.open_media:
            done.media, faults = decode_media(done.media, decoder, self._workers)
            row_of = np.repeat(np.arange(len(meta)), np.diff(done.media.rows))
            done.faults += [(int(row_of[item]), reason) for item, reason in faults]
        return done

    def hand_over(self, staged: Staged, done: Finished) -> Payload:
        """Count what went wrong, and return the samples as columns."""
        meta = staged.order.meta
        self._note(meta, done.faults, self._bad, self._telemetry.bad_samples)
        self._note(meta, done.lies, self._lies, self._telemetry.wrong_lengths)
        self._check_tolerance()
        return Payload(staged.order.step, self._number, done.tokens, done.loss, done.media)

    def note_faults(self, faults: Sequence[tuple[int, int, str]]) -> None:
        """Count what the DataConstructor could not decode: (row, epoch, reason) of each sample."""
        self._note_rows(faults, self._bad, self._telemetry.bad_samples)
        self._check_tolerance()

    def rest(self, cursor: Cursor) -> None:
        """Keep nothing but what planned steps still need: a source that is not drawn costs no reader or index."""
        self._readers.clear()
        self._resting = cursor
        self._drop_if_resting()
        self._order.forget()
        self._files.forget()

    def _drop_if_resting(self) -> None:
        if self._resting is not None and self._popped >= self._resting:
            self._buffer = ReadBuffer()

    @contextmanager
    def reading(self, key: tuple[int, int] | None = None) -> Iterator[None]:
        """Name the source in the error of a file that cannot be read."""
        try:
            yield
        except (ReaderError, SourceError) as error:
            if key is not None:
                self._readers.pop(key, None)  # it may have come half-way
            error.source = self._source.name
            raise

    def _after_group(self, cursor: Cursor) -> tuple[Cursor, bool]:
        with self.reading():
            group = self._order.next_group(cursor.epoch, cursor.group)
        if group != NO_GROUP:
            return Cursor(cursor.epoch, group, 0), False
        return Cursor(cursor.epoch + 1, BEGIN, 0), True

    def _resolve(self, cursor: Cursor) -> Cursor:
        if cursor.group != BEGIN:
            self._check_inside(cursor)
            return cursor
        with self.reading():
            group = self._order.first_group(cursor.epoch)
        if group == NO_GROUP:
            raise SourceError(
                f"source {self._source.name!r} has no rows in {', '.join(self._source.path)}; the mixture would wait "
                "for it for ever. Remove the source or mend its path."
            )
        return Cursor(cursor.epoch, group, 0)

    def _check_inside(self, cursor: Cursor) -> None:
        epoch, group, offset = cursor
        with self.reading():
            inside = self._order.has_group(epoch, group) and offset < self._order.group(epoch, group).num_rows
        if not inside:
            raise StateError(
                f"source {self._source.name!r} has no row at epoch {epoch}, group {group}, offset {offset}, where the "
                "state says it stands; resuming would lose or repeat samples. The state is damaged, or it was saved by "
                "an older version, which did not shuffle inside blocks larger than shuffle_bytes. Use an undamaged "
                "state of this version, or start without one."
            )

    def _pick(self, meta: MetaArray) -> list[tuple[Chunk, npt.NDArray[np.int64]]]:
        """Find the chunks of planned rows, which are in the source's order."""
        picks: list[tuple[Chunk, npt.NDArray[np.int64]]] = []
        at = 0
        while at < len(meta):
            first = meta[at]
            cursor = Cursor(int(first["epoch"]), int(first["group"]), int(first["offset"]))
            same = (meta["epoch"][at:] == cursor.epoch) & (meta["group"][at:] == cursor.group)
            run = int(np.argmin(same)) if not same.all() else len(same)
            offsets = meta["offset"][at : at + run]
            chunk = self._chunk_at(cursor, int(offsets[-1]) + 1)
            inside = int(np.searchsorted(offsets, chunk.stop))
            picks.append((chunk, offsets[:inside] - chunk.offset))
            at += inside
        return picks

    def _chunk_at(self, cursor: Cursor, stop: int) -> Chunk:
        """Return the chunk that holds a row; a new one reads on to about `stop`."""
        chunk = self._buffer.covering(cursor)
        if chunk is None:
            with self.reading():
                group = self._order.group(cursor.epoch, cursor.group)
            rows = rows_at_once(group, stop - cursor.offset)
            chunk = self.keep(self.measure(self.read(cursor, group, rows)))
        return chunk

    def measure(self, stretch: Stretch) -> tuple[Chunk, list[Fault], list[Fault]]:
        """Measure rows that were read; touches nothing of the loader, so several workers may do this at once."""
        cursor, rows, numbers = stretch.cursor, stretch.rows, stretch.numbers
        lengths = self._lengths(rows, numbers) if self._lengths else None
        seeds = hash64(derive(self._seed, "augment", self._source.name, cursor.epoch), numbers)
        given_up = self._give_up(rows, numbers, cursor.epoch)
        try:
            measured = self._transform.measure(rows, lengths, seeds)
        except ToleranceError as error:
            raise ToleranceError(f"source {self._source.name!r}: {error}") from None
        for row, reason in measured.killed:
            assert self._verdicts is not None, "only process workers are killed, and they come with verdicts"
            # on disk before it counts
            self._verdicts.add(self._source.name, int(numbers[row]), reason, cursor.epoch)
        measured.faults = given_up + [fault for fault in measured.faults if fault[0] not in dict(given_up)]
        images, spans = media_items(measured)
        delivered, flags = apply_overlength(measured.tokens, spans, self._context_length, self._overlength)
        pieces = cut_pieces(delivered, self._context_length, spans)
        sample, start = pieces.sample.astype(np.int64), pieces.start.astype(np.int64)
        labels, plain = count_loss_tokens(measured, delivered, sample, start)
        meta = np.zeros(len(numbers), META)
        meta["epoch"] = cursor.epoch
        meta["group"] = cursor.group
        meta["offset"] = cursor.offset + np.arange(len(numbers))
        meta["row"] = numbers
        meta["flags"] = measured.flags | flags | np.where(plain, PLAIN, 0)
        meta["tokens"] = delivered
        meta["loss_tokens"] = labels
        if images is not None and measured.images.any():
            count_images(meta, images)
        meta["bytes"] = row_bytes_of(measured.kept, len(numbers))
        chunk = Chunk(cursor.epoch, cursor.group, cursor.offset, meta, measured.kept, measured.margin)
        return chunk, measured.faults, measured.lies

    def _give_up(self, rows: RowBatch, numbers: npt.NDArray[np.int64], epoch: int) -> list[Fault]:
        """Mark rows with a verdict as bad, so that nobody runs them again; return them with the reasons."""
        if self._verdicts is None:
            return []
        known = np.flatnonzero(self._verdicts.known(self._source.name, numbers, epoch))
        if len(known):
            rows[BAD_COLUMN] = np.array(rows[BAD_COLUMN])
            rows[BAD_COLUMN][known] = NOT_PARSED  # type: ignore[index]
        return [(int(at), self._verdicts.reason(self._source.name, int(numbers[at]))) for at in known]

    def _note(
        self,
        meta: MetaArray,
        faults: list[Fault],
        counted: set[tuple[int, int]],
        tell: Callable[[Sequence[tuple[SampleId, str]]], None],
    ) -> None:
        self._note_rows([(int(meta["row"][at]), int(meta["epoch"][at]), why) for at, why in faults], counted, tell)

    def _note_rows(
        self,
        faults: Sequence[tuple[int, int, str]],
        counted: set[tuple[int, int]],
        tell: Callable[[Sequence[tuple[SampleId, str]]], None],
    ) -> None:
        new: dict[SampleId, str] = {}
        for row, epoch, reason in faults:
            if (row, epoch) not in counted:  # a row that is read again is the same fault
                counted.add((row, epoch))
                new[SampleId(self._source.name, row, epoch)] = reason
        if new:
            tell(list(new.items()))

    def _judge_first_rows(self, chunk: Chunk, faults: list[Fault]) -> None:
        """Refuse a source whose first rows are all bad: its files are sound, and the job reads them in a wrong way.

        Exactly the first `FIRST_ROWS` rows of the source's order decide, in whatever chunks they are read: one good row
        among them, and the tolerance alone judges. A run of bad rows in the middle of a source is damage.
        """
        if self._first_bad is None or chunk.epoch != 0 or self._source.tolerance >= 1:
            return
        with self.reading():
            if chunk.group != self._order.first_group(0):
                return
        bad = {chunk.offset + at: reason for at, reason in faults}
        if any(row not in bad for row in range(chunk.offset, min(chunk.stop, FIRST_ROWS))):
            self._first_bad = None
            return
        self._first_bad.update(bad)
        if all(row in self._first_bad for row in range(FIRST_ROWS)):
            leading = next(row for row in itertools.count() if row not in self._first_bad)
            reasons = Counter(self._first_bad[row] for row in range(leading))
            (reason, count), *others = reasons.most_common()
            raise SourceError(
                f"source {self._source.name!r}: all of the first {leading} rows that were read are bad "
                f"({count} times: {reason}{'; and other reasons' if others else ''}). The sample kind "
                f"({self._source.sample.kind!r}) or a column it names probably does not fit these files; training "
                "would see stand-ins only. Look at the rows with `overlord sources preview`, and mend sample, or the "
                "files. A source that may be bad as a whole has tolerance 1."
            )

    def _check_tolerance(self) -> None:
        error = judge_tolerance(self._source, self.seen, len(self._bad), len(self._lies))
        if error is not None:
            raise error


def judge_tolerance(
    source: Source, seen: int, bad: int, wrong_lengths: int, *, at_end: bool = False
) -> ToleranceError | None:
    """Return the error for a source with more bad samples than it may have; None where it has not.

    While a run goes on, a tolerance is judged as if at least `FEW_SAMPLES` had been read: one early fault stops
    nothing. At its end the share of what was read counts, and one bad sample is no share.

    Args:
        source: The source.
        seen: Rows that were read.
        bad: Bad samples among them.
        wrong_lengths: Samples of another length than promised.
        at_end: Whether the run is over.
    """
    least = (1.0 if source.tolerance else 0.0) if at_end else source.tolerance * FEW_SAMPLES
    allowed = max(source.tolerance * seen, least)
    for what, found in (("bad samples", bad), ("samples of another length than promised", wrong_lengths)):
        if found > allowed:
            goes_on = "The run went on with stand-ins" if at_end else "Training would go on with stand-ins"
            return ToleranceError(
                f"source {source.name!r} has {found} {what} among {seen} read; its tolerance of "
                f"{source.tolerance:g} allows {int(allowed)}. {goes_on}. `overlord sources lint` names each sample: "
                "mend the files, or raise the source's tolerance."
            )
    return None


def rows_at_once(group: Group, wanted: int) -> int:
    """Return how many rows are read and measured at once, where so many are wanted."""
    row_bytes = max(group.row_bytes, 1.0)
    most = max(1, min(CHUNK_ROWS, int(CHUNK_BYTES / row_bytes)))
    return min(most, max(wanted, min(AHEAD_ROWS, int(AHEAD_BYTES / row_bytes))))


# --------------------------------------------------------------------------------------------------------------
# ShadowLoader: follows the position of an active SourceLoader with a warm read buffer (paper section 6.1).
#
# Rules of this file:
# 1. A shadow reads and measures what its primary was asked for, and hands nothing over. What it holds is what a step
#    that is planned and not delivered yet may need, so that it can take over between two calls.
# 2. It is told of positions after the fact and may lag behind: what it lacks when it is promoted, it reads then.
# 3. It never lives in its primary's process, and never promotes itself.


class ShadowLoader:
    """A SourceLoader in waiting."""

    def __init__(self, loader: SourceLoader) -> None:
        self._loader = loader
        self._passed = Cursor(-1, BEGIN, -1)
        self.followed = 0
        """Requests of its primary that it has repeated."""

    def follow(self, requests: Sequence[MetaRequest], passed: Cursor | None) -> None:
        """Repeat what the primary was asked, and let go of what every trainer has passed."""
        if passed is not None and passed > self._passed:
            self._passed = passed
        for request in requests:
            if request.cursor.group == BEGIN or request.cursor >= self._passed or self._holds_end(request):
                self._loader.summary_buffer(request)
                self.followed += 1
        if passed is not None:
            self._loader.release(self._passed)

    def promote(self) -> SourceLoader:
        """Return the loader, which is asked itself from now on."""
        return self._loader

    def _holds_end(self, request: MetaRequest) -> bool:
        """Whether a request reaches beyond what was passed: then its later rows are still needed."""
        epoch, group, offset = request.cursor
        return (epoch, group) == self._passed[:2] and offset + request.count > self._passed.offset
