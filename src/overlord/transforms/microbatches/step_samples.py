"""The samples of one step, as the DataConstructor gathered them: joined columns, and the place of every media item."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Pieces
from overlord.core.messages import Media, Payload
from overlord.core.plan import LoadingPlan, Share, check_inside, count_labels
from overlord.core.ragged import Ragged, expand_ranges, offsets_of
from overlord.transforms.microbatches.packing_kernels import rows_of_ones
from overlord.transforms.samples.per_sample import MediaDecoder, Place, Workers, decode_into, decode_media

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KINDS = ("image", "video", "audio")


@dataclass(frozen=True, slots=True)
class Opening:
    """What the DataConstructor needs to decode media."""

    decoders: list[MediaDecoder | None]
    """One for each source by its number; live changes may append more."""
    workers: Workers


@dataclass(frozen=True, slots=True)
class Items:
    """Images, clips and sounds of a step, sorted by sample and place in it."""

    sample: Int64s
    start: Int64s
    """First placeholder token inside the sample."""
    length: Int64s
    kind: Int64s
    """Index into KINDS."""
    payload: Int64s
    number: Int64s
    """Which item of its payload it is."""

    def take(self, chosen: Int64s) -> Items:
        """Return some of the items."""
        columns = (self.sample, self.start, self.length, self.kind, self.payload, self.number)
        return Items(*(column[chosen] for column in columns))

    def __len__(self) -> int:
        return len(self.sample)


@dataclass(frozen=True, slots=True)
class PieceTable:
    """What packing needs of every piece of a plan, computed once per step and not once per microbatch."""

    first: Int64s
    """The piece's first token in the joined tokens; where a host has runs of its samples, its key in `runs`."""
    first_loss: Int64s
    """The same in the joined loss masks, which need not be of the same tokens."""
    runs: tuple[Int64s, Int64s]
    """The keys (row << 32 | first token) of the runs of tokens that are here, sorted, and where each begins in the
    joined tokens; empty where samples are whole."""
    loss_runs: tuple[Int64s, Int64s]
    """The same of the loss masks."""
    length: Int64s
    plain: Bools
    """Whether every token of its sample counts in the loss."""
    labels: Int64s
    """Tokens of the piece that count in the loss, and are not its first."""
    origin: Int64s
    """[5, pieces]: source, epoch, row, first token inside the sample, tokens."""
    behind: Int64s
    """Offsets of the pieces if all pieces of the step are concatenated, padding included; one more than there are."""

    @staticmethod
    def of(
        plan: LoadingPlan, tokens: Ragged, loss: Ragged, row_of: Int64s, share: Share | None, labels: Int64s | None
    ) -> PieceTable:
        """Compute it for the pieces of a share, by default for all; labels are counted here unless they are given."""
        chosen = None if share is None else share.pieces
        pieces = plan.pieces if chosen is None else plan.pieces.take(chosen)
        meta, rows = plan.draw.meta, row_of[pieces.sample]
        columns = (plan.draw.source, meta["epoch"], meta["row"])
        start = pieces.start + meta["start"][pieces.sample]
        origin = np.array([*(column[pieces.sample] for column in columns), start, pieces.length], np.int64)
        runs = loss_runs = (_NONE, _NONE)
        if share is None:
            first, marks = tokens.offsets[rows] + pieces.start, loss.offsets[rows] + pieces.start
        else:
            first = marks = (rows << 32) + pieces.start
            runs, loss_runs = _keyed(share.tokens, row_of, tokens), _keyed(share.loss, row_of, loss)
        plain = rows_of_ones(loss.values, loss.offsets)[rows] if len(loss) else np.zeros(len(rows), np.bool_)
        length = pieces.length.astype(np.int64)
        if share is None:
            check_inside("tokens", first, length, len(tokens.values))
        if labels is None:
            labels = count_labels(loss.values, marks, length)
        made: tuple[Any, ...] = (first, marks, length, plain, labels, origin)
        if chosen is not None:  # pieces keep their numbers; pages of those of other hosts are never touched
            made = tuple(_spread(column, chosen, len(plan.pieces)) for column in made)
        first, marks, length, plain, labels, origin = made
        behind = offsets_of(plan.in_batch)
        return PieceTable(first, marks, runs, loss_runs, length, plain, labels, origin, behind)

    def places(self, chosen: slice) -> Int64s:
        """Return the first token of some pieces, whose samples are whole, in the joined tokens."""
        keys, begins = self.runs
        if not len(keys):
            return self.first[chosen]
        at = np.searchsorted(keys, self.first[chosen], side="right") - 1
        return begins[at] + self.first[chosen] - keys[at]

    def alone(self, chosen: slice) -> PieceTable:
        """Return the table of a run of pieces whose tokens are one behind the other, without padding."""
        length = self.length[chosen]
        behind = offsets_of(length)
        origin = np.ascontiguousarray(self.origin[:, chosen])
        nothing, columns = (_NONE, _NONE), (length, self.plain[chosen], self.labels[chosen])
        return PieceTable(behind[:-1], behind[:-1], nothing, nothing, *columns, origin, behind)


def _keyed(runs: Pieces, row_of: Int64s, column: Ragged) -> tuple[Int64s, Int64s]:
    """Return the sorted keys of runs whose rows hold them one behind the other, and where each begins."""
    keys = (row_of[runs.sample] << 32) + runs.start
    order = np.argsort(keys, kind="stable")
    lengths = runs.length[order].astype(np.int64)
    begins = column.offsets[0] + offsets_of(lengths)[:-1]
    check_inside("tokens", begins, lengths, len(column.values))
    return keys[order], begins


def _spread(column: npt.NDArray[Any], places: Int64s, count: int) -> npt.NDArray[Any]:
    out = np.zeros((*column.shape[:-1], count), column.dtype)
    out[..., places] = column
    return out


@dataclass(eq=False)
class StepSamples:
    """The payloads of one step, joined, so that pieces are gathered from one array."""

    tokens: Ragged
    loss: Ragged
    pieces: PieceTable
    items: Items
    count: int
    """Drawn samples."""
    media: list[Media]
    """The media of each payload that has some; `items.payload` counts these."""
    sources: list[int]
    """The source of each of them."""
    row_of: Int64s
    """The row of each drawn sample that is here."""
    row_labels: Int64s
    """Labels of each sample that is here, over all hosts."""
    counted: int = 0
    """Labels of the whole step, as the loaders counted them."""
    late: bool = False
    """Whether some media of the step arrived encoded, on this host or on others."""
    lost: dict[int, int] = field(default_factory=dict[int, int])
    """Labels of samples that were later found not to decode."""
    drawn: Pieces | None = None
    """All media of the draw, where some are encoded apart from their tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes held: token ids, loss masks and media; not what is known of them."""
        held = (self.tokens, self.loss)
        rows = sum(int(one.offsets[-1] - one.offsets[0]) * one.values.itemsize for one in held)
        return rows + sum(media.nbytes for media in self.media)

    @property
    def labels(self) -> int:
        """Labels of the whole step, on all hosts, without those of samples known not to decode."""
        return self.counted - sum(self.lost.values())

    def lose(self, samples: Iterable[int]) -> None:
        """Subtract the labels of samples that do not decode; may be repeated, and called from several threads."""
        chosen = np.array(sorted(set(samples)), np.int64)
        labels = self.row_labels[self.row_of[chosen]]
        self.lost.update(zip(chosen.tolist(), labels.tolist(), strict=True))

    def unopened(self, plan: LoadingPlan, *, here: bool = True) -> set[tuple[int, int]]:
        """Return every (bucket, microbatch) with media that are not decoded yet, and so may turn out to be bad.

        With `here` those that are decoded on this host, otherwise those that other hosts decode: the ranks here need
        only know which samples count in the loss.
        """
        encoded = np.array([media.encoded for media in self.media], np.bool_)
        if not encoded.any():
            return set()
        late = encoded[self.items.payload]
        late &= self._column(self.items, "here", np.empty(len(self.items), np.bool_)) == here
        samples = np.zeros(self.count, np.bool_)
        samples[self.items.sample[late]] = True
        pieces = np.flatnonzero(samples[plan.pieces.sample] & (plan.pieces.length > 0))  # a slice has some of them
        bins = np.unique(np.searchsorted(plan.bin_offsets, pieces, side="right") - 1)
        return {divmod(one, plan.num_microbatches) for one in bins.tolist()}

    @cached_property
    def _keys(self) -> Int64s:
        return (self.items.sample << 32) + self.items.start

    def items_in(self, pieces: Pieces) -> tuple[Items, Int64s]:
        """Return the items with tokens in the given pieces, in the order of the pieces, and the piece of each."""
        if not len(self.items):
            return self.items, np.empty(0, np.int64)
        first = (pieces.sample.astype(np.int64) << 32) + pieces.start
        low, high = np.searchsorted(self._keys, first), np.searchsorted(self._keys, first + pieces.length)
        chosen = expand_ranges(low, high - low)
        return self.items.take(chosen), np.repeat(np.arange(len(pieces)), high - low)

    def open_media(self, opening: Opening, samples: Bools) -> list[tuple[int, str]]:
        """Decode the encoded payloads that hold some of the samples; return (item, reason) of what fails."""
        faults: list[tuple[int, str]] = []
        wanted = set(self.items.payload[samples[self.items.sample]].tolist())
        for number, (media, source) in enumerate(zip(self.media, self.sources, strict=True)):
            decoder = opening.decoders[source]
            if number in wanted and media.encoded and decoder is not None:
                self.media[number], found = decode_media(media, decoder, opening.workers)
                faults += [(self._item_at(number, item), reason) for item, reason in found]
        return faults

    @cached_property
    def silent(self) -> Bools:
        """Drawn samples with an item that is known not to decode: none of their tokens counts in the loss.

        What other hosts find while they decode is added here before the samples are packed.
        """
        silent = np.zeros(self.count, np.bool_)
        silent[self.items.sample[self.bad(self.items)]] = True
        return silent

    def grids_of(self, items: Items) -> npt.NDArray[np.int32]:
        """Return the grids of items: [items, 3]."""
        return self._column(items, "grids", np.empty((len(items), 3), np.int32))

    def seconds_of(self, items: Items) -> npt.NDArray[np.float32]:
        """Return the seconds of a temporal patch of items."""
        return self._column(items, "seconds", np.empty(len(items), np.float32))

    def bad(self, items: Items) -> Bools:
        """Return which items are known to be stand-ins."""
        return self._column(items, "bad", np.empty(len(items), np.bool_))

    def fill(self, items: Items, places: Sequence[Place], opening: Opening) -> tuple[Bools, list[tuple[int, str]]]:
        """Write items into their places, decoding those that are still encoded.

        Returns which items are stand-ins, and (index into `items`, reason) of those that were found to be.
        """
        bad = self.bad(items)
        faults: list[tuple[int, str]] = []
        for number in np.unique(items.payload).tolist():
            media = self.media[number]
            mine = np.flatnonzero(items.payload == number)
            targets = [places[at] for at in mine.tolist()]
            if media.encoded:
                decoder = opening.decoders[self.sources[number]]
                assert decoder is not None, "only a source with a decoder has media"
                found = dict(decode_into(media, items.number[mine], decoder, targets, opening.workers))
                hit = [(int(at), found[item]) for at, item in zip(mine, items.number[mine].tolist(), strict=True)
                       if item in found]  # fmt: skip
                bad[[at for at, _ in hit]] = True
                faults += hit
            else:
                for item, place in zip(items.number[mine].tolist(), targets, strict=True):
                    begin = int(media.begin[item])
                    place[:] = media.values[begin : begin + len(place)]
        return bad, faults

    @cached_property
    def numbered(self) -> Items:
        """The items in the order of `draw.media`; what stands for those that are not here is meaningless."""
        assert self.drawn is not None, "media have numbers of their own where some are encoded apart"
        if not len(self.items):
            return self.items
        at = np.searchsorted(self._keys, (self.drawn.sample.astype(np.int64) << 32) + self.drawn.start)
        return self.items.take(np.minimum(at, len(self.items) - 1))

    def data(self, item: int) -> npt.NDArray[np.uint8]:
        """Return the decoded bytes of one item of `numbered`."""
        media, number = self.media[int(self.numbered.payload[item])], int(self.numbered.number[item])
        begin = int(media.begin[number])
        return media.values[begin : begin + int(media.nbytes_of[number])]

    def _column(self, items: Items, name: str, out: npt.NDArray[Any]) -> npt.NDArray[Any]:
        for number in np.unique(items.payload).tolist():
            mine = np.flatnonzero(items.payload == number)
            out[mine] = getattr(self.media[number], name)[items.number[mine]]
        return out

    def _item_at(self, payload: int, number: int) -> int:
        return int(np.flatnonzero((self.items.payload == payload) & (self.items.number == number))[0])


def join_payloads(plan: LoadingPlan, payloads: list[Payload], share: Share | None = None) -> StepSamples:
    """Join the payloads of a step; every source's rows are in drawing order already.

    Args:
        plan: The plan of the step.
        payloads: All of the step, or the part of one host.
        share: What that host needs of the plan.
    """
    share = None if share is None or share.whole else share
    row_of = np.zeros(len(plan.draw), np.int64)  # samples of other hosts are never looked up here
    base = 0
    chosen = None if share is None else share.pieces
    labels = None if chosen is None else np.zeros(len(chosen), np.int64)
    row_labels: list[Int64s] = [_NONE]
    columns: list[tuple[Int64s, ...]] = []
    media: list[Media] = []
    sources: list[int] = []
    for payload in payloads:
        mine = plan.draw.samples_of(payload.source).astype(np.int64)
        mine = mine if share is None else mine[share.samples[mine]]
        row_of[mine] = base + np.arange(len(mine))
        base += len(mine)
        known = payload.row_labels
        row_labels.append(plan.labels_of(mine, payload.loss) if known is None else known)
        if chosen is not None and labels is not None and payload.pieces is not None:
            labels[np.searchsorted(chosen, payload.pieces)] = payload.piece_labels  # type: ignore[assignment]
        if payload.media is None:
            continue
        held = payload.media
        count = len(held.start)
        kind = np.full(count, KINDS.index(held.kind), np.int64)
        sample = np.repeat(mine, np.diff(held.rows))
        columns.append((sample, held.start.astype(np.int64), held.length.astype(np.int64), kind,
                        np.full(count, len(media), np.int64), np.arange(count)))  # fmt: skip
        media.append(held)
        sources.append(payload.source)
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)] if columns else [_NONE] * 6
    items = Items(*joined)
    items = items.take(np.lexsort((items.start, items.sample)))
    tokens = Ragged.concat([p.tokens for p in payloads] or [Ragged.empty(np.int32)])
    loss = Ragged.concat([p.loss for p in payloads] or [Ragged.empty(np.uint8)])
    return StepSamples(
        tokens=tokens,
        loss=loss,
        pieces=PieceTable.of(plan, tokens, loss, row_of, share, labels),
        drawn=plan.draw.media if plan.encoders else None,
        items=items,
        count=len(plan.draw),
        media=media,
        sources=sources,
        row_of=row_of,
        row_labels=np.concatenate(row_labels),
        counted=sum(payload.labels for payload in payloads),
        late=any(payload.late for payload in payloads),
    )


_NONE = np.empty(0, np.int64)
