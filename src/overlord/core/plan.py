"""The loading plan of one step: which samples were drawn, and where each piece of them goes.

`LoadingPlan` is a struct of arrays with a canonical form and two digests: `order` (which samples, in which order: mesh
and strategy do not matter) and `plan` (where every piece goes). `Share` is the part of a plan that one host needs,
`Routing` says how encoded images reach the ranks of their tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import operator
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from overlord.core.client_messages import MILLION
from overlord.core.draw import Draw, Pieces
from overlord.core.kernels import kernel
from overlord.core.messages import LoaderOrder, Media, Payload
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.ragged import Ragged, expand_ranges, offsets_of
from overlord.core.samples import Cursor, MetaArray, dtype_from_text, dtype_to_text, padded, take_meta
from overlord.errors import PlanError, StateError

if TYPE_CHECKING:
    from overlord.core.place_tree import ClientPlaceTree

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ENCODED_BY = {"encoder": "images", "audio_encoder": "audio"}
"""What each encoder of a plan takes, by the name of its field; "images" are images and clips."""


@dataclass(frozen=True, eq=False)
class LoadingPlan:
    """Where every piece of one step goes."""

    draw: Draw
    pieces: Pieces
    """Sorted by bucket, microbatch and place inside it."""
    bin_offsets: Int64s
    """Pieces of bucket d, microbatch m are bin_offsets[d * M + m] .. bin_offsets[d * M + m + 1]."""
    num_buckets: int
    num_microbatches: int
    """Microbatches of the bucket that has most; the bins of the others are empty from their count on."""
    pad_multiple: int = 1
    """Every piece is padded to a multiple of this, so that CP ranks can slice it."""
    axis: str = "DP"
    """Which consumers the buckets are: "DP", "CP" (data parallel x context parallel ranks alike) or "WORLD"."""
    modality: str = "tokens"
    """What a length counts: "tokens", or the media tokens of "images" (and clips), "videos" or "audio"."""
    broadcast: tuple[str, ...] = ()
    """Axes along which the trainer broadcasts: there only coordinate 0 fetches, for all buckets of its group."""
    cp_sizes: Int32s | None = None
    """Hybrid data parallelism: over how many ranks each piece is spread (uniform inside a microbatch)."""
    first_ranks: Int32s | None = None
    """The first bucket of the block of neighbouring ranks that shares each piece."""
    counts: Int32s | None = None
    """Microbatches of each bucket where they differ; otherwise all have `num_microbatches`."""
    offload: Int32s | None = None
    """Which share of the activations of each bin waits on the host between forward and backward, in millionths."""
    offload_layers: int = 0
    """Layers of a rank, by which `offload` was computed; 0 without it."""
    encoder: LoadingPlan | None = None
    """Where the images and clips are encoded, when that is not where their tokens are."""
    routing: Routing | None = None
    """How encoded images and clips reach the ranks of their tokens."""
    audio_encoder: LoadingPlan | None = None
    """Where the sounds are encoded, when that is not where their tokens are."""
    audio_routing: Routing | None = None
    """How encoded sounds reach the ranks of their tokens."""
    ends: Int64s | None = None
    """Where the step leaves each source: rows of (epoch, group, offset); set by the planner."""
    slicing: str = "zigzag"
    """How context-parallel ranks share a sequence; see `Limits`."""
    bin_multiple: int = 1
    """What the tokens of a microbatch (or of a row) are a multiple of; over CP, what those of one rank are."""
    row_tokens: int = 0
    """Tokens of a row where every piece is a row of its own; 0 where pieces are packed."""
    context_cuts: int | None = None
    """Set where a strategy cuts samples elsewhere than at the context length: how many cuts the context makes."""
    tree: ClientPlaceTree | None = None
    """The mesh of the step, set when the plan is checked; see `mesh`."""
    ranks: frozenset[int] | None = None
    """Of a slice for one host: the ranks that it is enough for; None for the whole plan. See `PlanSlice`."""
    metrics: Mapping[str, float] | None = None
    """The report that the strategy followed; None where it followed none."""
    notes: tuple[str, ...] = ()
    """Where the strategy could not place pieces as it was asked to, in sentences; known where the plan is made."""

    def __repr__(self) -> str:
        shape = f"{self.num_buckets} {self.axis} buckets x {self.num_microbatches} microbatches"
        return f"LoadingPlan(step={self.step}, {len(self.pieces)} pieces of {self.modality}, {shape})"

    @property
    def step(self) -> int:
        """The step this plan is for."""
        return self.draw.step

    @property
    def mesh(self) -> ClientPlaceTree:
        """The mesh the plan was made for. The mesh may change between steps: use this one, not that of the launch."""
        if self.tree is None:
            raise ValueError("this plan has no mesh; take it from a planner, or call plan.on(mesh)")
        return self.tree

    @property
    def encoders(self) -> dict[str, tuple[LoadingPlan, Routing | None]]:
        """The plan and the routes of every encoder that runs apart from the backbone, by the name of its field."""
        found = {"encoder": (self.encoder, self.routing), "audio_encoder": (self.audio_encoder, self.audio_routing)}
        return {name: (plan, routing) for name, (plan, routing) in found.items() if plan is not None}

    @property
    def encoded_apart(self) -> Bools:
        """Drawn samples whose media, if they have any, are encoded apart from their tokens."""
        apart = np.zeros(len(self.draw), np.bool_)
        for name in self.encoders:
            apart |= self.draw.samples_with(ENCODED_BY[name])
        return apart

    @property
    def nbytes(self) -> int:
        """Bytes of its columns and of its draw's, about."""
        return self.draw.source.nbytes + self.draw.meta.nbytes + 3 * self.pieces.sample.nbytes + self.bin_offsets.nbytes

    @cached_property
    def global_loss_tokens(self) -> int:
        """Labels of the whole step, by the measured metadata; `labels_of` counts those that are delivered."""
        meta = self.draw.meta
        labels = int(meta["loss_tokens"].sum(dtype=np.int64))
        if self.context_cuts is None:
            return labels
        # The metadata accounts for the cuts at the context length; every further cut of a strategy costs one label.
        return labels - (int((self._once("start") > 0).sum()) - self.context_cuts)

    @cached_property
    def _cuts(self) -> Pieces:
        """The pieces that do not begin their sample, each once, sorted by sample."""
        starts = self._once("start")
        later = np.flatnonzero(starts > 0)
        found = Pieces(self._once("sample")[later], starts[later], self._once("length")[later])
        return found.take(np.argsort(found.sample, kind="stable"))

    def labels_of(self, samples: Int64s, loss: Ragged) -> Int64s:
        """Return how many labels each of some drawn samples has as delivered, whatever its metadata says.

        The first token of a piece predicts nothing, so every cut of a sample costs a label where that token counts.

        Args:
            samples: The drawn samples.
            loss: 1 where a token counts in the loss; row i is of sample i of them.
        """
        if not len(samples):
            return np.zeros(0, np.int64)
        first = loss.offsets[:-1]
        labels = np.add.reduceat(loss.values[: loss.offsets[-1]], first, dtype=np.int64) - loss.values[first]
        cuts = self._cuts
        if len(cuts):
            low, high = np.searchsorted(cuts.sample, samples), np.searchsorted(cuts.sample, samples, side="right")
            row = np.repeat(np.arange(len(samples)), high - low)
            start = cuts.start[expand_ranges(low, high - low)]
            np.subtract.at(labels, row, loss.values[first[row] + start].astype(np.int64))
        return labels

    @cached_property
    def total_tokens(self) -> int:
        """T: delivered tokens of the step, without padding."""
        return int(self._once("length").sum(dtype=np.int64))

    @cached_property
    def squared_tokens(self) -> int:
        """Q: the sum of squared piece lengths, which attention pays for."""
        length = self._once("length").astype(np.int64)
        return int(np.dot(length, length))

    @cached_property
    def microbatch_counts(self) -> Int32s:
        """Microbatches of each bucket."""
        return self.counts if self.counts is not None else np.full(self.num_buckets, self.num_microbatches, np.int32)

    def _once(self, column: str) -> Int32s:
        """Return a column of the pieces, each piece once also where several ranks share it."""
        values: Int32s = getattr(self.pieces, column)
        if self.first_ranks is None:
            return values
        return values[self.first_ranks == self.buckets]

    @cached_property
    def buckets(self) -> Int32s:
        """The bucket of each piece."""
        per_bucket = np.diff(self.bin_offsets[:: self.num_microbatches])
        return np.repeat(np.arange(self.num_buckets, dtype=np.int32), per_bucket)

    @cached_property
    def padded(self) -> Int64s:
        """The length of each piece with its padding; the last piece of a microbatch also fills up `bin_multiple`."""
        if self.row_tokens:
            return np.full(len(self.pieces), self.row_tokens, np.int64)
        if self.cp_sizes is None:
            lengths = pad_lengths(self.pieces.length, self.pad_multiple)
            return lengths if self.bin_multiple == 1 else self._filled(lengths, self.bin_multiple)
        lengths = pad_lengths(self.pieces.length, np.where(self.cp_sizes > 1, 2 * self.cp_sizes.astype(np.int64), 1))
        return lengths if self.bin_multiple == 1 else self._filled(lengths, self.bin_multiple * self.cp_sizes)

    def _filled(self, lengths: Int64s, multiple: int | npt.NDArray[np.integer]) -> Int64s:
        filled = np.flatnonzero(np.diff(self.bin_offsets))
        last = self.bin_offsets[filled + 1] - 1
        totals = self.loads(lengths).reshape(-1)[filled]
        wanted = multiple if isinstance(multiple, int) else multiple[last].astype(np.int64)
        out = lengths.copy()
        out[last] += -(-totals // wanted) * wanted - totals
        return out

    @cached_property
    def in_batch(self) -> Int64s:
        """The length of each piece in its batch, padding included: rows are as long as the longest of them."""
        if not self.row_tokens:
            return self.padded
        counts = np.diff(self.bin_offsets)
        longest = np.zeros(len(counts), np.int64)
        filled = np.flatnonzero(counts)
        if len(filled):
            longest[filled] = np.maximum.reduceat(self.pieces.length, self.bin_offsets[filled])
        return np.repeat(pad_lengths(longest, self.bin_multiple), counts)

    @cached_property
    def in_sequence(self) -> tuple[Int64s, Int64s, Int64s]:
        """Where each piece begins in the sequence of its microbatch, its length there, and that of the sequence."""
        room, bins = self.in_batch, np.repeat(np.arange(len(self.bin_offsets) - 1), np.diff(self.bin_offsets))
        behind = offsets_of(room)
        first = behind[self.bin_offsets]
        return behind[:-1] - first[bins], room, np.diff(first)[bins]

    def slices(self, pieces: Int64s, ranks: Int64s, of: Int64s) -> tuple[Int64s, Pieces]:
        """Return what context-parallel ranks get of pieces: which of the given ones, and the runs of their samples.

        Args:
            pieces: Numbers of pieces, each once for every rank that gets some of it.
            ranks: Which of the ranks that share the piece.
            of: How many ranks share it.
        """
        begin, room, total = (column[pieces] for column in self.in_sequence)
        apart = self.slicing == "zigzag" or self.row_tokens > 0  # every segment, or row, is cut by itself
        unit, size = (np.zeros_like(begin), room) if apart else (-begin, total)
        mirrored = self.slicing != "contiguous"
        chunk = size // (2 * of if mirrored else of)
        numbers = [ranks, 2 * of - 1 - ranks] if mirrored else [ranks]
        which = np.tile(np.arange(len(pieces)), len(numbers))
        low = np.concatenate([unit + number * chunk for number in numbers])
        taken = self.pieces.take(pieces[which])
        low, high = (np.clip(place, 0, taken.length) for place in (low, low + chunk[which]))
        alone = of[which] == 1  # has all of it, once
        low[alone], high[alone] = 0, np.where(which == np.arange(len(which)), taken.length, 0)[alone]
        some = np.flatnonzero(high > low)
        start, length = (taken.start + low)[some], (high - low)[some]
        return which[some], Pieces(taken.sample[some], start.astype(np.int32), length.astype(np.int32))

    @cached_property
    def drawn(self) -> tuple[Int32s, MetaArray]:
        """One sample of each group that the step draws from: its source and its metadata, sorted by source."""
        order = self.draw.by_source[0]
        source, meta = self.draw.source[order], self.draw.meta
        fresh = np.ones(len(order), np.bool_)
        fresh[1:] = (np.diff(source) != 0) | (np.diff(meta["group"][order]) != 0)
        return source[fresh], take_meta(meta, order[fresh])

    @cached_property
    def _by_sample(self) -> tuple[Int64s, Int64s]:
        """The pieces sorted by sample, and where those of each sample begin."""
        order = order_in_bins(self.pieces.sample)
        return order, offsets_of(np.bincount(self.pieces.sample, minlength=len(self.draw)))

    def pieces_of(self, samples: npt.NDArray[np.integer]) -> Int64s:
        """Return the pieces of some samples, in the order of the plan."""
        order, offsets = self._by_sample
        return np.sort(order[expand_ranges(offsets[samples], np.diff(offsets)[samples])])

    def covers(self, ranks: Collection[int]) -> bool:
        """Whether the plan, or this slice of it, is enough for some ranks."""
        return self.ranks is None or self.ranks.issuperset(ranks)

    def bin_range(self, bucket: int, microbatch: int) -> slice:
        """Return which pieces are in one microbatch of one bucket."""
        at = bucket * self.num_microbatches + microbatch
        return slice(int(self.bin_offsets[at]), int(self.bin_offsets[at + 1]))

    def bin(self, bucket: int, microbatch: int) -> Pieces:
        """Return the pieces of one microbatch of one bucket, in their order."""
        return self.pieces.take(self.bin_range(bucket, microbatch))

    def bucket_pieces(self, bucket: int) -> Int64s:
        """Return the pieces of all microbatches of a bucket, as far as a slice has them."""
        at = bucket * self.num_microbatches
        first, stop = int(self.bin_offsets[at]), int(self.bin_offsets[at + self.num_microbatches])
        return first + np.flatnonzero(self.pieces.length[first:stop])

    def order(self, bucket: int, microbatch: int) -> int:
        """Return where a microbatch stands among those of all buckets: the same for all that share it.

        A shared microbatch has the same number in every bucket of its block, so what every bucket runs in the order of
        its own numbers is in the order of these.
        """
        pieces = self.bin_range(bucket, microbatch)
        shared = self.first_ranks is not None and pieces.stop > pieces.start
        first = int(self.first_ranks[pieces.start]) if shared and self.first_ranks is not None else bucket
        return microbatch * self.num_buckets + first

    def offload_of(self, bucket: int, microbatch: int) -> int:
        """Return which share of the activations of a microbatch waits on the host, in millionths."""
        return 0 if self.offload is None else int(self.offload[bucket * self.num_microbatches + microbatch])

    def part_of(self, buckets: range) -> tuple[Pieces, Int64s]:
        """Return a constructor's part: the pieces of neighbouring buckets, and where each microbatch begins in them."""
        offsets = self.bin_offsets[buckets.start * self.num_microbatches : buckets.stop * self.num_microbatches + 1]
        return self.pieces.take(slice(int(offsets[0]), int(offsets[-1]))), offsets - offsets[0]

    def order_of(self, source: int) -> LoaderOrder:
        """Return the loaders' part: the samples of one source, and where the step leaves it."""
        if self.ends is None:
            raise ValueError("the planner has not set where this plan leaves its sources")
        end = Cursor(*self.ends[source].tolist())
        return LoaderOrder(self.step, source, self.draw.meta_of(source), end)

    @cached_property
    def digest(self) -> str:
        """The plan digest of the step."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.draw.digest.encode())
        shape = f"{self.num_buckets} {self.num_microbatches} {self.pad_multiple} {self.axis} {self.modality}"
        digest.update(f"{shape} {' '.join(self.broadcast)}".encode())
        if (self.slicing, self.bin_multiple, self.row_tokens) != ("zigzag", 1, 0):
            digest.update(f"{self.slicing} {self.bin_multiple} {self.row_tokens}".encode())
        # Most samples are one piece; its start and length follow from the draw, so only the other pieces are hashed.
        cut = np.flatnonzero((self.pieces.start > 0) | (self.pieces.length != self.drawn_lengths))
        columns = (self.pieces.sample, self.bin_offsets, cut, self.pieces.start[cut], self.pieces.length[cut])
        optional = (self.cp_sizes, self.first_ranks, self.counts)
        for column in (*columns, *(c for c in optional if c is not None)):
            digest.update(np.ascontiguousarray(column).data)
        if self.offload is not None:
            digest.update(f"offload {self.offload_layers}".encode())
            digest.update(np.ascontiguousarray(self.offload).data)
        for encoder, _ in self.encoders.values():
            digest.update(encoder.digest.encode())
        return digest.hexdigest()

    @cached_property
    def drawn_lengths(self) -> Int32s:
        """The whole length of the sample (or of its media) of each piece."""
        draw = self.draw
        lengths = draw.tokens if self.modality == "tokens" else np.ascontiguousarray(draw.meta["image_tokens"])
        return lengths[self.pieces.sample]

    def loads(self, costs: Int64s) -> Int64s:
        """Sum piece costs per bin: an array [bucket, microbatch]."""
        sums = np.zeros(len(self.bin_offsets) - 1, np.int64)
        filled = np.flatnonzero(np.diff(self.bin_offsets))
        if len(filled):
            sums[filled] = np.add.reduceat(costs, self.bin_offsets[filled])
        return sums.reshape(self.num_buckets, self.num_microbatches)

    def with_ends(self, after: Int64s, metrics: Mapping[str, float] | None = None) -> LoadingPlan:
        """Return the plan that also says where it leaves its sources, and which report its strategy followed."""
        return self._revised(("buckets", "drawn_lengths", "padded", "digest"), ends=after, metrics=metrics)

    def with_kind(self, axis: str, modality: str, broadcast: tuple[str, ...]) -> LoadingPlan:
        """Return the plan for other consumers."""
        return self._revised(("buckets", "drawn_lengths"), axis=axis, modality=modality, broadcast=broadcast)

    def on(self, tree: ClientPlaceTree) -> LoadingPlan:
        """Return the plan that also says for which mesh it was made."""
        return self._revised(("buckets", "drawn_lengths", "padded"), tree=tree)

    def _revised(self, kept: tuple[str, ...], **changes: Any) -> LoadingPlan:
        # Derived columns (up to 300,000 pieces) stay valid when a scalar changes: keep them instead of computing again.
        plan = dataclasses.replace(self, **changes)
        plan.__dict__.update({name: self.__dict__[name] for name in kept if name in self.__dict__})
        return plan

    def then(self, other: LoadingPlan) -> LoadingPlan:
        """Return a plan with the microbatches of this plan followed by those of another one for the same buckets."""
        kind = operator.attrgetter("num_buckets", "axis", "pad_multiple", "modality")
        if kind(self) != kind(other):
            raise PlanError(
                f"a plan of {self.num_buckets} buckets over {self.axis} cannot be followed by one of another "
                "kind; ranks would get different numbers of microbatches. Join plans of one mesh and axis."
            )
        both, counts = (self, other), (self.num_microbatches, other.num_microbatches)
        sizes = np.concatenate(
            [np.diff(p.bin_offsets).reshape(p.num_buckets, n) for p, n in zip(both, counts, strict=True)], axis=1
        )
        offsets = offsets_of(sizes.reshape(-1))
        order = np.argsort(np.concatenate([self.buckets, other.buckets]), kind="stable")
        joined = Pieces(
            *(
                np.concatenate([getattr(self.pieces, name), getattr(other.pieces, name)])[order]
                for name in ("sample", "start", "length")
            )
        )
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        return dataclasses.replace(self, pieces=joined, bin_offsets=offsets, num_microbatches=sum(counts), notes=notes)


def order_in_bins(places: npt.NDArray[np.integer], priority: Int64s | None = None) -> Int64s:
    """Return the items sorted by bin; inside a bin as they came, or the largest priority first.

    Example:
        >>> places = np.array([1, 0, 1])
        >>> order_in_bins(places).tolist(), order_in_bins(places, np.array([1, 5, 9])).tolist()
        ([1, 0, 2], [1, 2, 0])
    """
    wide = places.astype(np.int64, copy=False)
    if priority is None:
        return _count_out(wide)
    first = np.argsort(-priority, kind="stable")
    return first[_count_out(wide[first])]


@kernel
def _count_out(places: Int64s) -> Int64s:
    """Return the stable sort order by counting sort: one pass to count, one to place, for any number of bins."""
    begin = np.zeros((places.max() if len(places) else 0) + 2, np.int64)
    for place in places:
        begin[place + 1] += 1
    for i in range(1, len(begin)):
        begin[i] += begin[i - 1]
    order = np.empty(len(places), np.int64)
    for i in range(len(places)):
        order[begin[places[i]]] = i
        begin[places[i]] += 1
    return order


def lay_out(
    draw: Draw,
    pieces: Pieces,
    places: Int64s,
    num_buckets: int,
    num_microbatches: int,
    *,
    order: Int64s | None = None,
    pad_multiple: int = 1,
) -> LoadingPlan:
    """Return the plan in which piece i goes to bin `places[i]` = bucket * M + microbatch.

    `order` is what `order_in_bins` gave; by default pieces of a bin stay in the order they came.
    """
    offsets = offsets_of(np.bincount(places, minlength=num_buckets * num_microbatches))
    laid = pieces.take(order_in_bins(places) if order is None else order)
    plan = LoadingPlan(draw, laid, offsets, num_buckets, num_microbatches, pad_multiple)
    if len(pieces) == len(draw) and np.array_equal(pieces.length, draw.tokens):
        plan.__dict__["drawn_lengths"] = laid.length  # no sample is cut: a lookup would take as long as the sort
    return plan


def pad_lengths(lengths: npt.NDArray[np.integer], multiple: int | Int64s) -> Int64s:
    """Round lengths up to a multiple.

    Example:
        >>> pad_lengths(np.array([1, 4, 5]), 4).tolist()
        [4, 4, 8]
    """
    wide = lengths.astype(np.int64)
    return wide if isinstance(multiple, int) and multiple == 1 else -(-wide // multiple) * multiple


def tokens_on_device(tokens: Int64s, offload: npt.NDArray[np.integer], layers: int) -> Int64s:
    """Return of how many tokens a rank holds the activations, while a share of them waits on the host.

    Two layers stay on the device: the one that is computed, and the one that is copied.

    Example:
        >>> tokens_on_device(np.array([32_000]), np.array([500_000]), layers=32).tolist()
        [17000]
    """
    moved = offload.astype(np.int64) * max(0, layers - 2) // layers
    return tokens - tokens * moved // MILLION


def least_offload(tokens: Int64s, room: Int64s, layers: int) -> Int64s:
    """Return the least share, in millionths, that leaves no more than `room` of the tokens on the device.

    Example:
        >>> least_offload(np.array([32_000, 8000]), np.array([17_000, 9000]), layers=32).tolist()
        [500000, 0]
    """
    moved = -(-np.maximum(tokens - room, 0) * MILLION // np.maximum(tokens, 1))
    return -(-moved * layers // max(1, layers - 2))


def chain_digest(digests: Sequence[str]) -> str:
    """Return one digest for a sequence of step digests.

    Example:
        >>> chain_digest(["a", "b"]) == chain_digest(["a", "b"])
        True
    """
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()


# The part of a step that one host needs: the samples that its ranks train on or encode.


@dataclass(frozen=True, eq=False)
class Share:
    """One host's part of a step: the samples in its ranks' views, and which columns of each.

    The first pipeline stage embeds, so it needs token ids and media; the last one computes the loss, so it needs token
    ids (as labels) and the loss mask; stages between them need neither. What every stage needs (where segments begin,
    where they come from, how many labels they have, the shapes of media) is metadata. Of ranks that share a sequence
    each needs its slice, and for the loss the token behind every run of it, which is the label of the last one.
    """

    plan: LoadingPlan
    samples: Bools
    """Drawn samples with a segment, or with media to encode, in a view of this host."""
    tokens: Pieces
    """Runs of those samples of which the host needs the token ids, sorted; no two of them touch."""
    loss: Pieces
    """Runs of which it needs the loss mask."""
    media: Bools
    """Those whose media it needs, where these are encoded with their tokens; of others only shapes and bad marks."""
    encoded: Bools | None
    """Where media are encoded apart from their tokens: which of `draw.media` its ranks encode."""
    pieces: Int64s
    """The pieces in its views, in the order of the plan."""
    whole: bool
    """Whether the host has all ranks, so that it needs every sample."""

    @classmethod
    def of(cls, plan: LoadingPlan, ranks: Collection[int], *, all_columns: bool = False) -> Share:
        """Work out what some ranks need of a plan.

        With `all_columns` they need tokens and loss of all their samples as a whole, as a hook of the constructor does.

        Example:
            Which half of a step the second data-parallel rank needs::

                share = Share.of(plan, {1})
                assert share.samples[plan.bin(1, 0).sample].all()
        """
        tree = plan.mesh
        if len(set(ranks)) == tree.world_size:
            everything = np.ones(len(plan.draw), np.bool_)
            runs = _whole_samples(plan, np.arange(len(plan.draw)))
            return cls(plan, everything, runs, runs, everything, None, np.arange(len(plan.pieces)), whole=True)
        samples, media = np.zeros((2, len(plan.draw)), np.bool_)
        places: dict[int, set[tuple[int, int]]] = {}
        for rank in ranks:
            at = tree.coords(rank)
            for bucket in tree.fetched_buckets(plan.axis, rank, plan.broadcast):
                places.setdefault(bucket, set()).add((at.pp, at.cp))
        pieces = [_NO_PIECES]
        tokens: list[Pieces] = []
        loss: list[Pieces] = []
        for bucket, here in sorted(places.items()):
            mine = plan.bucket_pieces(bucket)
            pieces.append(mine)
            samples[plan.pieces.sample[mine]] = True
            for pp in {pp for pp, _ in here} & {0, tree.pp - 1}:
                which, runs = _slices_of(plan, bucket, mine, sorted(cp for stage, cp in here if stage == pp))
                if pp == 0:
                    media[plan.pieces.sample[mine]] = True
                if pp == tree.pp - 1:
                    left = plan.pieces.start[which] + plan.pieces.length[which] - runs.start
                    runs = Pieces(runs.sample, runs.start, np.minimum(runs.length + 1, left))
                    loss.append(runs)
                tokens.append(runs)
        encoded = None
        if plan.encoders:
            media &= ~plan.encoded_apart
            encoded = np.zeros(len(plan.draw.media), np.bool_)
            for encoder, rank in itertools.product((encoder for encoder, _ in plan.encoders.values()), ranks):
                runs = encoder.pieces.take(encoder.bucket_pieces(rank))
                encoded[plan.draw.media_at(runs.sample, runs.start)[0]] = True
                samples[runs.sample] = True
        if all_columns:
            tokens = loss = [_whole_samples(plan, np.flatnonzero(samples))]
        columns = (_joined_runs(tokens), _joined_runs(loss), media, encoded)
        return cls(plan, samples, *columns, np.concatenate(pieces), whole=False)

    @cached_property
    def _of_source(self) -> dict[int, Int64s]:
        """For each source, those of `pieces` that are of its samples."""
        source = self.plan.draw.source[self.plan.pieces.sample[self.pieces]]
        order = np.argsort(source, kind="stable")
        bounds = np.flatnonzero(np.diff(source[order])) + 1
        return {int(source[part[0]]): self.pieces[part] for part in np.split(order, bounds) if len(part)}

    def cut(self, payload: Payload) -> Payload:
        """Return the host's part of a payload: all samples of its source, or those that one of its loaders has."""
        if self.whole:
            return payload
        plan = self.plan
        mine = plan.draw.samples_of(payload.source)
        mine = mine if payload.chosen is None else mine[payload.chosen]
        chosen = np.flatnonzero(self.samples[mine])
        rows = mine[chosen]
        tokens = _runs_of(payload.tokens, self.tokens, rows, chosen)
        loss = _runs_of(payload.loss, self.loss, rows, chosen)
        part = payload.take(chosen, tokens, loss, self._items(payload.media, mine, chosen))
        if payload.chosen is not None:
            part = replace(part, chosen=payload.chosen[chosen])
        # Labels of a piece are counted here, where the loss mask is: most hosts do not get it.
        numbers = self._of_source.get(payload.source, _NO_PIECES)
        if payload.chosen is not None:
            numbers = numbers[np.isin(plan.pieces.sample[numbers], mine)]
        pieces = plan.pieces.take(numbers)
        first = payload.loss.offsets[np.searchsorted(mine, pieces.sample)] + pieces.start
        labels = count_labels(payload.loss.values, first, pieces.length.astype(np.int64))
        return replace(part, pieces=numbers, piece_labels=labels)

    def _items(self, media: Media | None, mine: Int32s, chosen: Int64s) -> Bools | None:
        """Return of which media items of some samples this host needs the bytes."""
        if media is None:
            return None
        counts = np.diff(media.rows)[chosen]
        with_tokens = np.repeat(self.media[mine[chosen]], counts)
        if self.encoded is None:
            return with_tokens
        listed = self.plan.draw.media
        keys = (listed.sample.astype(np.int64) << 32) + listed.start
        start = media.start[expand_ranges(media.rows[:-1][chosen], counts)]
        numbers = np.searchsorted(keys, (np.repeat(mine[chosen], counts).astype(np.int64) << 32) + start)
        return with_tokens | self.encoded[numbers]


_NO_PIECES = np.empty(0, np.int64)


def _whole_samples(plan: LoadingPlan, samples: Int64s) -> Pieces:
    """Return drawn samples as one run each."""
    lengths = plan.draw.meta["tokens"][samples].astype(np.int32)
    return Pieces(samples.astype(np.int32), np.zeros(len(samples), np.int32), lengths)


def _slices_of(plan: LoadingPlan, bucket: int, pieces: Int64s, cps: list[int]) -> tuple[Int64s, Pieces]:
    """Return what ranks at some context-parallel coordinates get of the pieces of a bucket: (piece, run) of each."""
    cp = plan.mesh.cp
    if plan.cp_sizes is not None and plan.first_ranks is not None:
        ranks, of = bucket - plan.first_ranks[pieces].astype(np.int64), plan.cp_sizes[pieces].astype(np.int64)
    elif cp == 1 or plan.axis == "CP" or "CP" in plan.broadcast:  # not cut: the trainer cuts what it broadcasts
        return pieces, plan.pieces.take(pieces)
    else:
        ranks = np.repeat(np.array(cps, np.int64), len(pieces))
        pieces, of = np.tile(pieces, len(cps)), np.full(len(ranks), cp, np.int64)
    which, runs = plan.slices(pieces, ranks, of)
    return pieces[which], runs


def _joined_runs(parts: list[Pieces]) -> Pieces:
    """Return runs of samples sorted, with those that overlap or touch as one."""
    columns = ([_NO_PIECES, *(getattr(part, name) for part in parts)] for name in _PIECE)
    sample, start, length = (np.concatenate(column) for column in columns)
    keys = (sample << 32) + start
    order = np.argsort(keys, kind="stable")
    keys, ends = keys[order], np.maximum.accumulate((keys + length)[order])
    fresh = np.ones(len(keys), np.bool_)
    fresh[1:] = keys[1:] > ends[:-1]
    first = np.flatnonzero(fresh)
    last = np.append(first[1:], len(keys))[: len(first)] - 1
    found = (keys[first] >> 32, keys[first] & 0xFFFFFFFF, ends[last] - keys[first])
    return Pieces(*(column.astype(np.int32) for column in found))


def _runs_of(column: Ragged, runs: Pieces, samples: npt.NDArray[np.integer], rows: Int64s) -> Ragged:
    """Return the runs of some samples, whose rows of a column are given."""
    low, high = np.searchsorted(runs.sample, samples), np.searchsorted(runs.sample, samples, side="right")
    chosen = expand_ranges(low, high - low)
    return column.take_runs(rows, high - low, runs.start[chosen], runs.length[chosen])


def count_labels(loss: npt.NDArray[np.uint8], first: Int64s, length: Int64s) -> Int64s:
    """Return the labels of pieces by their first places in a loss mask: the first token of a piece predicts nothing.

    Raises:
        IndexError: A piece reaches beyond the mask.
    """
    check_inside("loss masks", first, length, len(loss))
    return _count_labels(loss, first, length)


def check_inside(what: str, first: Int64s, length: Int64s, end: int) -> None:
    """Raise IndexError where pieces reach outside the tokens that loaders sent: kernels would read other memory."""
    if len(first) and not (int(first.min()) >= 0 and int(length.min()) >= 0 and int((first + length).max()) <= end):
        raise IndexError(f"the plan has pieces outside of the {end} {what} that were sent for them")


@kernel
def _count_labels(loss: npt.NDArray[np.uint8], first: Int64s, length: Int64s) -> Int64s:
    out = np.zeros(len(first), np.int64)
    for piece in range(len(first)):
        for i in range(np.uintp(first[piece] + 1), np.uintp(first[piece] + length[piece])):
            out[piece] += loss[i]
    return out


def with_labels(plan: LoadingPlan, payload: Payload) -> Payload:
    """Return a payload as it leaves its loader, with the labels that its samples have by the plan."""
    mine = plan.draw.samples_of(payload.source).astype(np.int64)
    labels = plan.labels_of(mine if payload.chosen is None else mine[payload.chosen], payload.loss)
    if payload.media is not None:  # an item that cannot be decoded masks its whole sample
        labels[np.repeat(np.arange(len(labels)), np.diff(payload.media.rows))[payload.media.bad]] = 0
    late = payload.media is not None and payload.media.encoded and len(payload.media.start) > 0
    return replace(payload, labels=int(labels.sum()), row_labels=labels, late=late)


def known_early(plan: LoadingPlan) -> Bools:
    """Return the drawn samples of which the loader must decode the media to know whether they are bad.

    A bad image masks the loss of its whole sample. Where media are encoded on other ranks than their tokens, or a
    sample is cut into pieces, several hosts must know that. Other media are decoded when they are packed.
    """
    early = plan.encoded_apart
    early[plan.pieces.sample[plan.pieces.start > 0]] = True
    return early


# Routing: how encoded images get from the ranks that encode them to the ranks that hold their tokens. A route is a run
# of tokens of one image that goes from one rank to another. Routes are columns sorted by (sender, receiver, microbatch,
# position): the order in which a sender concatenates what it sends, computed the same way on every rank. The backward
# pass swaps senders and receivers.


@dataclass(frozen=True, eq=False)
class Routing:
    """All routes of one step."""

    world_size: int
    sender: Int32s
    receiver: Int32s
    microbatch: Int32s
    """The backbone microbatch that needs the tokens."""
    position: Int32s
    """The position of the first token of the run in the receiver's sequence of that microbatch."""
    length: Int32s
    """Tokens of the run."""
    sample: Int32s
    """The image's sample, as an index into the draw."""
    start: Int32s
    """The first token of the run inside its image."""
    row: Int32s
    """The first row of the run in what its sender has encoded."""
    heads: Int64s
    """[bucket, cp]: the ranks of the first pipeline stage that hold the tokens (the first of each TP group)."""
    images: tuple[Int64s, Int64s]
    """Patches of each image (or run of one; frames of each sound) in encoding order, and the first of each rank."""

    @cached_property
    def _sender_offsets(self) -> Int64s:
        return np.searchsorted(self.sender, np.arange(self.world_size + 1)).astype(np.int64)

    @cached_property
    def _arrivals(self) -> tuple[Int64s, Int64s]:
        """Routes sorted by receiver, then sender (as all-to-all delivers), and where each receiver begins."""
        order = order_in_bins(self.receiver)
        return order, offsets_of(np.bincount(self.receiver, minlength=self.world_size))

    def vit_cu_seqlens(self, rank: int) -> Int64s:
        """Return where the images of a rank begin in its sequence of patches (a clip counts as one).

        The images themselves are those of `plan.encoder.bin(rank, 0)`, in this order, which is the order in which
        their tokens are sent.
        """
        patches, offsets = self.images
        return offsets_of(patches[int(offsets[rank]) : int(offsets[rank + 1])])

    def sent_by(self, rank: int) -> slice:
        """Return the routes that begin at a rank."""
        return slice(int(self._sender_offsets[rank]), int(self._sender_offsets[rank + 1]))

    def received_by(self, rank: int) -> Int64s:
        """Return the routes that end at a rank, in the order in which they arrive."""
        order, offsets = self._arrivals
        return order[int(offsets[rank]) : int(offsets[rank + 1])]

    def send_splits(self, rank: int) -> Int64s:
        """Return how many tokens a rank sends to each rank of the world."""
        mine = self.sent_by(rank)
        return np.bincount(self.receiver[mine], self.length[mine], self.world_size).astype(np.int64)

    def recv_splits(self, rank: int) -> Int64s:
        """Return how many tokens a rank gets from each rank of the world."""
        mine = self.received_by(rank)
        return np.bincount(self.sender[mine], self.length[mine], self.world_size).astype(np.int64)

    def recv_perm(self, rank: int) -> Int64s:
        """Return the arrivals of a rank in the order of its sequences: by microbatch, then position."""
        mine = self.received_by(rank)
        return np.lexsort((self.position[mine], self.microbatch[mine]))

    def send_rows(self, rank: int) -> Int64s:
        """Return the rows of what a rank has encoded, in the order in which it sends them."""
        mine = self.sent_by(rank)
        return expand_ranges(self.row[mine].astype(np.int64), self.length[mine].astype(np.int64))

    def arrivals(self, rank: int, microbatch: int) -> tuple[Int64s, Int64s]:
        """Return the positions of a microbatch's image tokens in the rank's sequence, and their rows as received.

        So `embeddings[positions] = received[rows]` puts every image in its place.
        """
        mine = self.received_by(int(rank))
        lengths = self.length[mine].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        chosen = np.flatnonzero(self.microbatch[mine] == microbatch)
        chosen = chosen[np.argsort(self.position[mine[chosen]], kind="stable")]
        at = self.position[mine[chosen]].astype(np.int64)
        return expand_ranges(at, lengths[chosen]), expand_ranges(before[chosen], lengths[chosen])

    def scatter_index(self, rank: int, microbatch: int) -> Int64s:
        """Return the places of a microbatch's image tokens in the rank's sequence, in sequence order."""
        return self.arrivals(rank, microbatch)[0]

    def crossing_tokens(self) -> int:
        """Return how many tokens leave their rank."""
        return int(self.length[self.sender != self.receiver].sum(dtype=np.int64))


# A slice of a plan: what one host reads of it. Samples and pieces keep their numbers, so that a slice is used like the
# whole plan: what it leaves out has zeros there (no piece of a plan has the length 0), in pages that are never touched.


@dataclass(frozen=True, eq=False, slots=True)
class PlanSlice:
    """Which samples, pieces, media to encode and routes of a plan one host needs."""

    samples: Int64s
    pieces: Int64s
    encoded: Mapping[str, Int64s]
    """Pieces of the plan of each encoder."""
    routes: Mapping[str, Int64s]
    """Routes to and from each encoder."""
    ranks: tuple[int, ...]
    """The ranks it is enough for; none for a loader host."""

    @classmethod
    def for_ranks(cls, plan: LoadingPlan, ranks: Collection[int]) -> PlanSlice:
        """Return what a constructor host needs: the pieces of its ranks' buckets, the media that they encode."""
        tree, mine = plan.mesh, sorted(ranks)
        fetched = (tree.fetched_buckets(plan.axis, rank, plan.broadcast) for rank in mine)
        buckets = sorted({*itertools.chain(*fetched), *(tree.bucket_of(plan.axis, rank) for rank in mine)})
        pieces = np.concatenate([_NO_PIECES, *(plan.bucket_pieces(bucket) for bucket in buckets)])
        samples = np.zeros(len(plan.draw), np.bool_)
        samples[plan.pieces.sample[pieces]] = True
        encoded: dict[str, Int64s] = {}
        routes: dict[str, Int64s] = {}
        for name, (encoder, routing) in plan.encoders.items():
            encoded[name] = np.concatenate([_NO_PIECES, *(encoder.bucket_pieces(rank) for rank in mine)])
            samples[encoder.pieces.sample[encoded[name]]] = True
            if routing is not None:
                # Profiled: a pass over all routes (millions) for each host was most of a cut; these are indexed once.
                ends = sorted({*mine, *routing.heads[buckets].ravel().tolist()})
                sent = (np.r_[routing.sent_by(rank)] for rank in ends)
                got = (routing.received_by(rank) for rank in ends)
                found = np.sort(np.concatenate([_NO_PIECES, *sent, *got]), kind="stable")  # of sorted runs
                routes[name] = found[np.diff(found, prepend=-1) > 0]
        return cls(np.flatnonzero(samples), pieces, encoded, routes, tuple(mine))

    @classmethod
    def for_sources(cls, plan: LoadingPlan, sources: Collection[int]) -> PlanSlice:
        """Return what a loader host needs: the samples of its sources, and where their pieces and media go."""
        mine = np.concatenate([_NO_PIECES, *(plan.draw.samples_of(source) for source in sources)])
        mine = np.sort(mine).astype(np.int64)
        encoded = {name: encoder.pieces_of(mine) for name, (encoder, _) in plan.encoders.items()}
        return cls(mine, plan.pieces_of(mine), encoded, dict.fromkeys(encoded, _NO_PIECES), ())


# Plans as bytes: encoded once per step; every role reads its part without copying. A block is a JSON header (names,
# numbers, the offset of each column) followed by the aligned columns. Decoding makes views into the block, so a loader
# or a constructor touches only the part it uses. A slice has only some rows of the columns, and their numbers.


MAGIC = b"OVERPLAN"
BLOB_VERSION = 5

Arrays = dict[str, npt.NDArray[Any]]

_PLAN_SCALARS = (
    "num_buckets",
    "num_microbatches",
    "pad_multiple",
    "axis",
    "modality",
    "broadcast",
    "slicing",
    "bin_multiple",
    "row_tokens",
    "context_cuts",
    "metrics",
    "offload_layers",
)
_PIECE = ("sample", "start", "length")
_PER_PIECE = ("cp_sizes", "first_ranks")
_OPTIONAL = (*_PER_PIECE, "counts", "offload", "ends")
_IN_SEQUENCE = ("begin", "room", "total")
_TOTALS = ("global_loss_tokens", "total_tokens", "squared_tokens")
_ROUTING = {"encoder": "routing", "audio_encoder": "audio_routing"}
_ROUTES = ("sender", "receiver", "microbatch", "position", "length", "sample", "start", "row", "heads")


def plan_to_bytes(plan: LoadingPlan, part: PlanSlice | None = None) -> memoryview:
    """Return a plan, or a slice of it, as one block of bytes."""
    draw = plan.draw
    order, offsets = draw.by_source
    arrays: Arrays = {"source": draw.source, "meta": draw.meta, "by_source": order, "source_offsets": offsets}
    if draw.items is not None:
        arrays["items"] = draw.items
    scalars: dict[str, Any] = {
        "step": draw.step,
        "names": draw.names,
        "weights": draw.weights,
        "mixture_version": draw.mixture_version,
        "order_digest": draw.digest,
        "plan_digest": plan.digest,
        "totals": {name: getattr(plan, name) for name in _TOTALS},
        "plan": _plan_columns(plan, "", arrays),
    }
    if plan.tree is not None:
        scalars["tree"] = plan.tree.sizes()
    for name, (encoder, routing) in plan.encoders.items():
        scalars[name] = _plan_columns(encoder, f"{name}.", arrays)
        if routing is not None:
            lead = f"{_ROUTING[name]}."
            scalars["world_size"] = routing.world_size
            arrays.update({f"{lead}{column}": getattr(routing, column) for column in _ROUTES})
            arrays.update({f"{lead}patches": routing.images[0], f"{lead}begins": routing.images[1]})
    if part is not None:
        scalars["slice"] = {"samples": len(draw), "ranks": part.ranks}
        _cut_columns(plan, part, arrays)
    return _write(scalars, arrays)


def _cut_columns(plan: LoadingPlan, part: PlanSlice, arrays: Arrays) -> None:
    """Leave only the rows of a slice in the columns of a plan."""
    draw, samples = plan.draw, part.samples
    source = draw.source[samples]
    arrays.pop("items", None)
    if plan.encoders:  # media are numbered over the whole step
        arrays.update({f"media.{name}": getattr(draw.media, name) for name in _PIECE})
    arrays["by_source"] = samples[np.argsort(source, kind="stable")].astype(np.int32)
    arrays["source_offsets"] = offsets_of(np.bincount(source, minlength=len(draw.names)))
    arrays["drawn.source"], arrays["drawn.meta"] = plan.drawn
    arrays["source"], arrays["meta"] = source, take_meta(draw.meta, samples)
    cut = {"": (plan, part.pieces)}
    cut |= {f"{name}.": (encoder, part.encoded[name]) for name, (encoder, _) in plan.encoders.items()}
    for prefix, (one, rows) in cut.items():
        for name in (*_PIECE, *(n for n in _PER_PIECE if getattr(one, n) is not None)):
            arrays[f"{prefix}{name}"] = arrays[f"{prefix}{name}"][rows]
        counts = np.diff(one.bin_offsets)
        arrays[f"{prefix}bin_offsets"] = counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
        arrays[f"slice.{prefix}pieces"] = rows
    for name, (_, routing) in plan.encoders.items():
        if routing is not None:
            columns = [f"{_ROUTING[name]}.{column}" for column in _ROUTES if column != "heads"]
            arrays.update({column: arrays[column][part.routes[name]] for column in columns})
    arrays["slice.samples"] = samples
    if plan.tree is not None and plan.tree.cp > 1:  # which tokens a rank has of a piece depends on those around it
        arrays.update(
            {f"in_sequence.{name}": one[part.pieces] for name, one in zip(_IN_SEQUENCE, plan.in_sequence, strict=True)}
        )


def _fill_columns(scalars: dict[str, Any], arrays: Arrays) -> None:
    """Give the columns of a slice the length of those of the plan."""

    def spread(name: str, rows: Int64s, count: int, fill: int = 0) -> None:
        column = np.zeros(count, arrays[name].dtype) if not fill else np.full(count, fill, arrays[name].dtype)
        column[rows] = arrays[name]
        arrays[name] = column

    for name in ("source", "meta"):
        spread(name, arrays["slice.samples"], scalars["slice"]["samples"])
    for prefix in ("", *(f"{name}." for name in _ROUTING)):
        if f"{prefix}bin_offsets" in arrays:
            rows = arrays[f"slice.{prefix}pieces"]
            offsets = arrays[f"{prefix}bin_offsets"] = offsets_of(arrays[f"{prefix}bin_offsets"])
            for name in (*_PIECE, *_PER_PIECE):
                if f"{prefix}{name}" in arrays:
                    spread(f"{prefix}{name}", rows, int(offsets[-1]), int(name == "cp_sizes"))
    for name in _IN_SEQUENCE:
        if f"in_sequence.{name}" in arrays:
            spread(f"in_sequence.{name}", arrays["slice.pieces"], int(arrays["bin_offsets"][-1]))


def plan_from_bytes(blob: bytes | memoryview) -> LoadingPlan:
    """Read a plan back; its columns are views into the block.

    Raises:
        StateError: for bytes that are no plan of this version.
    """
    scalars, arrays = _read(memoryview(blob))
    part = scalars.get("slice")
    if part is not None:
        _fill_columns(scalars, arrays)
    draw = Draw(
        scalars["step"],
        tuple(scalars["names"]),
        arrays["source"],
        arrays["meta"],
        tuple(scalars["weights"]),
        scalars["mixture_version"],
        arrays.get("items"),
    )
    # Digests and indices travel with the plan: a role that needs only a part must not compute them again.
    draw.__dict__.update(digest=scalars["order_digest"], by_source=(arrays["by_source"], arrays["source_offsets"]))
    plan = _plan_of(draw, scalars["plan"], "", arrays)
    found: dict[str, Any] = {}
    for name, routing in _ROUTING.items():
        if name in scalars:
            found[name] = _plan_of(draw, scalars[name], f"{name}.", arrays)
        if f"{routing}.sender" in arrays:
            routes = {column: arrays[f"{routing}.{column}"] for column in _ROUTES}
            images = (arrays[f"{routing}.patches"], arrays[f"{routing}.begins"])
            found[routing] = Routing(scalars["world_size"], **routes, images=images)
    if "tree" in scalars:
        found["tree"] = ClientPlaceTree.from_sizes(scalars["tree"], what="the mesh of a plan")
    if part is not None:
        found["ranks"] = frozenset(part["ranks"])
    plan = dataclasses.replace(plan, **found)
    if part is not None:
        plan.__dict__["drawn"] = (arrays["drawn.source"], arrays["drawn.meta"])
        if "in_sequence.begin" in arrays:
            plan.__dict__["in_sequence"] = tuple(arrays[f"in_sequence.{name}"] for name in _IN_SEQUENCE)
        if plan.encoders:
            draw.__dict__["media"] = Pieces(*(arrays[f"media.{name}"] for name in _PIECE))
    plan.__dict__.update(scalars["totals"], digest=scalars["plan_digest"])
    return plan


def _plan_columns(plan: LoadingPlan, prefix: str, arrays: Arrays) -> dict[str, Any]:
    arrays[f"{prefix}bin_offsets"] = plan.bin_offsets
    for name in _PIECE:
        arrays[f"{prefix}{name}"] = getattr(plan.pieces, name)
    arrays.update({f"{prefix}{n}": getattr(plan, n) for n in _OPTIONAL if getattr(plan, n) is not None})
    return {name: getattr(plan, name) for name in _PLAN_SCALARS}


def _plan_of(draw: Draw, scalars: dict[str, Any], prefix: str, arrays: Arrays) -> LoadingPlan:
    pieces = Pieces(*(arrays[f"{prefix}{name}"] for name in _PIECE))
    found: dict[str, Any] = {name: arrays.get(f"{prefix}{name}") for name in _OPTIONAL}
    found |= {**scalars, "broadcast": tuple(scalars["broadcast"])}
    return LoadingPlan(draw=draw, pieces=pieces, bin_offsets=arrays[f"{prefix}bin_offsets"], **found)


def _write(scalars: dict[str, Any], arrays: Arrays) -> memoryview:
    table: dict[str, tuple[str, list[int], int]] = {}
    at = 0
    for name, array in arrays.items():
        table[name] = (dtype_to_text(array.dtype), list(array.shape), at)
        at += padded(array.nbytes)
    head = json.dumps({"version": BLOB_VERSION, "arrays": table, **scalars}).encode()
    lead = MAGIC + struct.pack("<Q", len(head)) + head
    begin = padded(len(lead))
    # numpy allocates in huge pages; joining into a new `bytes` spends four times the copy on page faults.
    blob = np.empty(begin + at, np.uint8)
    blob[: len(lead)] = np.frombuffer(lead, np.uint8)
    for name, array in arrays.items():
        place = begin + table[name][2]
        blob[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return blob.data


def _read(blob: memoryview) -> tuple[dict[str, Any], Arrays]:
    if len(blob) < len(MAGIC) + 8 or bytes(blob[: len(MAGIC)]) != MAGIC:
        raise StateError("these bytes are not a plan of overlord; a rank would load nothing. Pass what a planner gave.")
    (length,) = struct.unpack("<Q", blob[len(MAGIC) : len(MAGIC) + 8])
    head: dict[str, Any] = json.loads(bytes(blob[len(MAGIC) + 8 : len(MAGIC) + 8 + length]))
    if head.pop("version") != BLOB_VERSION:
        raise StateError("the plan was written by another version of overlord. Use one version for all hosts of a job.")
    begin = padded(len(MAGIC) + 8 + length)
    arrays: Arrays = {}
    for name, (dtype, shape, at) in head.pop("arrays").items():
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(blob, dtype_from_text(dtype), count, begin + at).reshape(shape)
    return head, arrays
