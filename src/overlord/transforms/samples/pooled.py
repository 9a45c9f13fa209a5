"""Sample transforms in the host's pool of workers: measuring, tokenizing and decoding run there, the rest here.

    service                                       worker
    PooledTransform.measure     rows, lines  ->   MeasureRows      lines parsed; the source's transform, from its spec
    PooledTransform.finish      raw texts    ->   EncodeRows       only where lengths were known before planning
    PooledDecoder.decode_items  encoded      ->   DecodeRows       pixels or features, straight into their places

Rules of this file:
1. Every function here makes a row from that row alone, so the stream does not depend on how rows are cut into runs or
   how many workers there are.
2. A row that kills its worker twice is measured as one that could not be read: its content is never looked at here.
3. What is made after the plan must not depend on the host, as no verdict of it is journaled. An item that crashes its
   worker, or takes far more processor time than any item should, does so on every host, and becomes a stand-in. One
   that needs more memory than this host has is an error: on another host it would be delivered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from overlord.core.messages import Media
from overlord.core.ragged import (
    BAD_COLUMN,
    NOT_PARSED,
    Ragged,
    RowBatch,
    Scattered,
    blank_rows,
    concat_rows,
    num_rows,
    take_rows,
)
from overlord.errors import OverlordError
from overlord.job.specs import Custom, Source, Text
from overlord.transforms.samples.per_sample import (
    OUT_OF_MEMORY,
    Bools,
    Fault,
    Finished,
    Int64s,
    Isolate,
    Measured,
    MediaDecoder,
    MediaFault,
    Place,
    PooledRows,
    SampleTransform,
    UInt64s,
    Workers,
    check_media,
    ragged_column,
)
from overlord.transforms.samples.sample_kinds import make_transform
from overlord.transforms.samples.tokenize import TokenizerFile, load_tokenizer

_LENGTHS, _SEEDS, _FAULT, _WRONG, _NUMBERS = "=lengths", "=seeds", "=fault", "=wrong", "=numbers"
"""Columns that travel beside those of the rows; "=" keeps their names apart from those of a source's columns."""

Parse = Callable[[RowBatch], RowBatch]
"""Makes columns of rows that are read as they lie in their files; it can be pickled."""


def pooled_transform(
    source: Source, transform: SampleTransform, tokenizer: TokenizerFile | None, isolate: Isolate
) -> SampleTransform:
    """Return a transform whose work runs in the pool, where there is enough of it: token ids are only copied."""
    sample = source.sample
    if isinstance(sample, Custom) or (isinstance(sample, Text) and sample.tokenized):
        return transform  # Custom has its function in the pool already
    if not getattr(sample, "process", True):
        return transform
    return PooledTransform(source, transform, tokenizer, isolate)


class PooledTransform:
    """The transform of one source, in the pool.

    Args:
        transform: The same one in this process, for what costs little.
        parse: Makes columns of rows that are read as they lie in their files; None where readers have done so.
    """

    def __init__(
        self,
        source: Source,
        transform: SampleTransform,
        tokenizer: TokenizerFile | None,
        isolate: Isolate,
        parse: Parse | None = None,
    ) -> None:
        self._given = source, transform, tokenizer, isolate
        self._local = transform
        self._parse = parse
        self.columns = transform.columns
        name = source.name
        measure = MeasureRows(source, tokenizer, parse)
        self._measure = isolate(measure, name, getattr(source.sample, "deadline", None))
        self._name = name
        self._encode = isolate(EncodeRows(source, tokenizer), name, None)
        decoder = transform.decoder
        self.decoder: MediaDecoder | None = None
        if decoder is not None:
            self.decoder = PooledDecoder(name, decoder, isolate(DecodeRows(source, tokenizer), name, None))

    def parsing(self, parse: Parse) -> PooledTransform:
        """Return the same transform for rows that are still to be parsed, which workers do too."""
        return PooledTransform(*self._given, parse)

    def measure(self, rows: RowBatch, lengths: Int64s | None, seeds: UInt64s) -> Measured:
        """Measure rows in the pool."""
        given = {**rows, _SEEDS: seeds}
        if lengths is not None:
            given[_LENGTHS] = lengths
        made, killed = self._measure(given)
        if killed:
            made = self._with_killed(made, given, np.array([row for row, _ in killed], np.int64))
        measured = rows_to_measured(made)
        reasons = dict(killed)
        measured.faults = [fault for fault in measured.faults if fault[0] not in reasons] + killed
        measured.killed = killed
        return measured

    def _with_killed(self, made: RowBatch, given: RowBatch, killed: Int64s) -> RowBatch:
        """Put the rows that killed their workers back into their places, as rows that could not be read."""
        dead = np.zeros(num_rows(given), np.bool_)
        dead[killed] = True
        unread = take_rows(blank_rows(given, dead), killed)
        unread[BAD_COLUMN] = np.full(len(killed), NOT_PARSED, np.asarray(given[BAD_COLUMN]).dtype)
        stand_ins = measure_rows(self._local, unread, self._parse)
        if dead.all():
            return stand_ins
        return _put_back(made, stand_ins, dead)

    def finish(self, kept: RowBatch, planned: Int64s, bad: Bools, workers: Workers) -> Finished:
        """Make the final form of kept rows; texts that are not tokenized yet go through the pool."""
        if "raw" not in kept:
            return self._local.finish(kept, planned, bad, workers)
        given: RowBatch = {"raw": kept["raw"], "claimed": kept["claimed"], BAD_COLUMN: bad}
        made, killed = self._encode(given)
        if killed:
            made = self._with_killed_texts(made, given, killed)
        encoded = {name: column for name, column in kept.items() if name not in ("raw", "claimed")}
        done = self._local.finish(encoded | {"tokens": made["tokens"]}, planned, bad, workers)
        faults = _texts(made, _FAULT) + killed
        loss = np.array(done.loss.values)
        for row, _ in faults:
            loss[done.loss.offsets[row] : done.loss.offsets[row + 1]] = 0
        done.loss = Ragged(loss, done.loss.offsets)
        done.faults += faults
        done.wrong_lengths += _texts(made, _WRONG)
        return done

    def _with_killed_texts(self, made: RowBatch, given: RowBatch, killed: list[Fault]) -> RowBatch:
        """Put texts that ended their workers twice back into their places, as stand-ins."""
        _check_memory(self._name, killed)
        dead = np.zeros(num_rows(given), np.bool_)
        dead[[row for row, _ in killed]] = True
        return _put_back(made, concat_rows([_NOT_ENCODED] * len(killed)), dead)


class PooledDecoder:
    """The decoder of one source, in the pool."""

    def __init__(self, name: str, decoder: MediaDecoder, run: PooledRows) -> None:
        self._name = name
        self._local = decoder
        self._run = run

    def item_bytes(self, grids: Any) -> Int64s:
        """Return the bytes of each item after decoding."""
        return self._local.item_bytes(grids)

    def decode(self, data: memoryview, grid: Any, seed: int, out: Place) -> None:
        """Decode one item here: for a caller that looks at single items."""
        self._local.decode(data, grid, seed, out)

    def decode_items(self, media: Media, items: Int64s, places: Sequence[Place]) -> list[Fault]:
        """Decode items in the pool, into their places; return (item, reason) of those that do not decode."""
        wanted = ~media.bad[items]
        for at in np.flatnonzero(~wanted).tolist():
            places[at][:] = 0
        at_of = np.flatnonzero(wanted)
        chosen = items[at_of]
        if not len(chosen):
            return []
        data = Scattered(media.values, media.begin[chosen], media.nbytes_of[chosen], np.dtype(np.uint8))
        rows: RowBatch = {"data": data, "grid": media.grids[chosen], "seed": media.seeds[chosen]}  # type: ignore[dict-item]
        made, killed = self._run(rows, [places[at] for at in at_of.tolist()])
        survived = np.delete(chosen, [row for row, _ in killed])
        faults = [(int(survived[row]), reason) for row, reason in _texts(made, _FAULT)]
        _check_memory(self._name, killed)
        for row, reason in killed:
            places[int(at_of[row])][:] = 0
            faults.append((int(chosen[row]), reason))
        return sorted(faults)


# --------------------------------------------------------------------------------------------------------------
# In a worker.


class _OfSource:
    """A function over rows of one source; its transform is made in the worker."""

    only_reads = True
    """It neither keeps nor changes what it is given, which may lie in shared memory."""

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerFile | None,
        parse: Parse | None = None,
    ) -> None:
        self._source = source
        self._parse = parse
        self.tokenizer = tokenizer
        """What the process that forks workers loads ahead."""
        self._made: SampleTransform | None = None

    def prepare(self) -> None:
        """Do now what would make the first row take longer than others."""
        self.transform  # noqa: B018

    @property
    def transform(self) -> SampleTransform:
        """The transform of the source."""
        if self._made is None:
            self._made = make_transform(self._source, load_tokenizer(self.tokenizer) if self.tokenizer else None)
        return self._made


class MeasureRows(_OfSource):
    """Measures rows."""

    def __call__(self, rows: RowBatch) -> RowBatch:
        return measure_rows(self.transform, rows, self._parse)

    @staticmethod
    def check(made: RowBatch) -> None:
        """Raise ValueError for what no row is measured as; the kernels that place samples do not look."""
        numbers = np.asarray(made[_NUMBERS])
        if numbers.ndim != 2 or numbers.dtype != np.int64 or numbers.shape[1] not in (6, 7):
            raise ValueError(f"lengths of {numbers.dtype} {numbers.shape}")
        if numbers.size and (numbers.min() < 0 or numbers.max() > np.iinfo(np.int32).max):
            raise ValueError(f"lengths from {numbers.min()} to {numbers.max()}")
        for _, reasons in _texts(made, _FAULT):
            told = json.loads(reasons)
            if not (isinstance(told, list) and len(told) == 2 and all(isinstance(one, str) for one in told)):
                raise ValueError(f"the reasons {reasons:.80}")
        if "kept media" in made:
            check_media({name.removeprefix("kept "): column for name, column in made.items()}, numbers[:, 0])


class EncodeRows(_OfSource):
    """Tokenizes texts whose lengths were known before planning."""

    @staticmethod
    def check(made: RowBatch) -> None:
        """Raise ValueError for what no text is tokenized to."""
        if ragged_column(made, "tokens").values.dtype != np.int32:
            raise ValueError("tokens that are no 32-bit integers")
        _ = _texts(made, _FAULT), _texts(made, _WRONG)

    def __call__(self, rows: RowBatch) -> RowBatch:
        transform: Any = self.transform
        faults: list[Fault] = []
        tokens, wrong = transform.kept_tokens(rows, np.asarray(rows[BAD_COLUMN], np.bool_), faults)
        return {"tokens": tokens, _FAULT: _column(faults, len(tokens)), _WRONG: _column(wrong, len(tokens))}


class DecodeRows(_OfSource):
    """Decodes items into their places: pixels are too many to be copied once more."""

    @staticmethod
    def check(made: RowBatch) -> None:
        """Raise ValueError for anything but the reasons of faults."""
        _texts(made, _FAULT)

    def __call__(self, rows: RowBatch, places: Sequence[Place]) -> RowBatch:
        decoder = self.transform.decoder
        assert decoder is not None, "only a source with media has items"
        data, grids, faults = rows["data"], np.asarray(rows["grid"]), list[Fault]()
        for row, (seed, place) in enumerate(zip(np.asarray(rows["seed"]).tolist(), places, strict=True)):
            try:
                decoder.decode(memoryview(data[row]), grids[row], seed, place)  # type: ignore[arg-type]
            except MediaFault as fault:
                place[:] = 0
                faults.append((row, str(fault)))
        return {_FAULT: _column(faults, len(data))}


_NOT_ENCODED: RowBatch = {
    "tokens": Ragged.from_rows([np.zeros(1)], np.int32),
    _FAULT: Ragged.from_rows([b""]),
    _WRONG: Ragged.from_rows([b""]),
}


def measure_rows(transform: SampleTransform, given: RowBatch, parse: Parse | None = None) -> RowBatch:
    """Measure rows, with their lengths and seeds beside them; return everything as columns."""
    rows = {name: column for name, column in given.items() if name not in (_LENGTHS, _SEEDS)}
    rows = rows if parse is None else parse(rows)
    lengths = np.asarray(given[_LENGTHS]) if _LENGTHS in given else None
    measured = transform.measure(rows, lengths, np.asarray(given[_SEEDS]))
    count = len(measured.tokens)
    # Few columns: a run has some dozen rows, and the service spends more on each array than on the numbers in it.
    before, behind = (np.full(count, one, np.int64) for one in measured.margin)
    flags = measured.flags.astype(np.int64)
    numbers = [measured.tokens, measured.image_tokens, measured.images, flags, before, behind]
    if measured.front is not None:
        numbers.append(measured.front)
    told = {row: ["", reason] for row, reason in measured.wrong_lengths[::-1]}
    for row, reason in measured.faults[::-1]:  # of several, the first
        told[row] = [reason, told.get(row, ["", ""])[1]]
    made: RowBatch = {
        _NUMBERS: np.stack(numbers, axis=1).astype(np.int64, copy=False),
        _FAULT: _column([(row, json.dumps(reasons, ensure_ascii=False)) for row, reasons in told.items()], count),
    }
    return made | {f"kept {name}": column for name, column in measured.kept.items()}


def rows_to_measured(made: RowBatch) -> Measured:
    """Return what `measure_rows` wrote as columns.

    Example:
        >>> made = {"=numbers": np.ones((1, 6), np.int64), "=fault": Ragged.from_rows([b'["no", ""]'])}
        >>> found = rows_to_measured(made | {"kept n": np.arange(1)})
        >>> found.margin, found.faults, found.wrong_lengths, list(found.kept)
        ((1, 1), [(0, 'no')], [], ['n'])
    """
    numbers = np.ascontiguousarray(np.asarray(made[_NUMBERS]).T)
    told = [(row, json.loads(reasons)) for row, reasons in _texts(made, _FAULT)]
    return Measured(
        tokens=numbers[0],
        image_tokens=numbers[1],
        images=numbers[2],
        flags=numbers[3].astype(np.int32),
        kept={name.removeprefix("kept "): column for name, column in made.items() if name.startswith("kept ")},
        faults=[(row, fault) for row, (fault, _) in told if fault],
        front=numbers[6] if len(numbers) > 6 else None,
        margin=(int(numbers[4, 0]), int(numbers[5, 0])) if numbers.size else (0, 0),
        wrong_lengths=[(row, wrong) for row, (_, wrong) in told if wrong],
    )


def _put_back(made: RowBatch, others: RowBatch, dead: Bools) -> RowBatch:
    """Return all rows in their order: `others` where the mask says so, `made` elsewhere."""
    places = np.cumsum(~dead) - 1
    places[dead] = num_rows(made) + np.arange(num_rows(others))
    return take_rows(concat_rows([made, others]), places)


def _check_memory(name: str, killed: Sequence[Fault]) -> None:
    """Raise for an item that was planned, and that this host has not the memory to make."""
    for _, reason in killed:
        if reason.startswith(OUT_OF_MEMORY):
            raise OverlordError(
                f"source {name!r}: a sample of a planned step cannot be made: {reason}; without it the stream would be "
                "another one. Free memory or use a host with more, and start again from the last checkpoint."
            )


def _column(texts: Sequence[Fault], count: int) -> Ragged:
    found = [b""] * count
    for row, reason in texts:
        found[row] = found[row] or reason.encode(errors="replace")
    return Ragged.from_rows(found)


def _texts(rows: RowBatch, name: str) -> list[Fault]:
    column = ragged_column(rows, name)
    return [(row, bytes(column[row]).decode()) for row in np.flatnonzero(column.lengths).tolist()]
