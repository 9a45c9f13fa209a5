"""The draw of one step, before any mesh or strategy is looked at: its samples, their media, their pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.kernels import kernel
from overlord.core.ragged import expand_ranges, offsets_of
from overlord.core.samples import (
    CLIPS,
    CONTINUES,
    ENDS_EPOCH,
    OVERLONG,
    PLAIN,
    SKIP,
    SOUNDS,
    MetaArray,
    SampleId,
    take_meta,
)

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of every plan of a job, independent of the mesh."""

    context_length: int
    microbatch_tokens: int
    """Most tokens (padding included) in a microbatch of one rank: the memory cap."""
    microbatches: int | None = None
    """Microbatches of a step; chosen by the plan when None."""
    patches_per_token: int = 4
    """Image patches behind one image token."""
    frames_per_token: int = 4
    """Mel frames behind one token of a sound."""
    slicing: str = "zigzag"
    """How context-parallel ranks share a sequence: "zigzag" (of every segment), "whole_zigzag" or "contiguous"."""
    rank_multiple: int = 1
    """The tokens of a microbatch on one rank are a multiple of this: sequence parallelism, low-precision blocks."""
    row_tokens: int = 0
    """Tokens of a row where every piece is a padded row of its own; 0 where pieces are packed."""
    full_rows: bool = False
    """Whether rows always have that length; otherwise they are as long as the longest of their microbatch."""


@dataclass(frozen=True, eq=False)
class Draw:
    """The samples of one global batch in drawing order, before any mesh or strategy is looked at."""

    step: int
    names: tuple[str, ...]
    """The job's sources; `source` indexes it."""
    source: Int32s
    meta: MetaArray
    weights: tuple[float, ...]
    """The weights of the mixture at the beginning of the step."""
    mixture_version: int = 0
    """The version of that mixture: it grows with every report that took effect and every live change."""
    items: Int32s | None = None
    """[images, 4]: first token, number of tokens, and how many tokens before and after it may not be cut off from it.
    Only for samples with several images (clips, sounds), or with one that is not at the beginning."""

    def __post_init__(self) -> None:
        # A strategy sees the draw and must not change it: the order would then depend on the strategy.
        for column in (self.source, self.meta):
            column.flags.writeable = False

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"Draw(step={self.step}, samples={len(self)}, sources={len(self.names)})"

    @cached_property
    def tokens(self) -> Int32s:
        """The tokens of each sample. Profiled: every pass over a column of `meta` reads all of it."""
        return np.ascontiguousarray(self.meta["tokens"])

    @cached_property
    def digest(self) -> str:
        """The order digest of the step. It does not depend on sources from which nothing is drawn."""
        digest = hashlib.blake2b(digest_size=16)
        drawn = np.bincount(self.source, minlength=len(self.names)) > 0
        names, source = self.names, self.source
        if not drawn.all():
            names = tuple(name for name, some in zip(names, drawn.tolist(), strict=True) if some)
            source = (np.cumsum(drawn) - 1).astype(np.int32)[source]
        digest.update("\n".join(names).encode())
        columns = [source, self.meta["row"], self.meta["epoch"]]
        if len(self.parts):
            columns += [self.meta["start"], self.meta["tokens"]]
        for column in columns:
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    @cached_property
    def parts(self) -> Int64s:
        """The samples of which the step has only a part: other steps have the rest."""
        return np.flatnonzero((self.meta["start"] > 0) | (self.meta["flags"] & CONTINUES > 0))

    @cached_property
    def media(self) -> Pieces:
        """Every image, clip and sound of the step: its sample, its first token inside the sample, its tokens."""
        meta = self.meta
        some = np.flatnonzero(meta["image_tokens"] > 0)
        if self.items is None:
            return Pieces(some.astype(np.int32), np.zeros(len(some), np.int32), meta["image_tokens"][some])
        listed = meta["items"][some] > 0
        count = np.where(listed, meta["images"][some], 1).astype(np.int64)
        sample = np.repeat(some, count)
        start, length = np.zeros(len(sample), np.int32), np.repeat(meta["image_tokens"][some], count)
        rows = expand_ranges(meta["items"][some[listed]] - 1, count[listed])
        places = np.repeat(listed, count)
        start[places], length[places] = self.items[rows, :2].T
        return Pieces(sample.astype(np.int32), start, length)

    def samples_with(self, modality: str) -> Bools:
        """Return which samples may hold media of a modality: a sample has images, clips or sounds, and no others."""
        flags = self.meta["flags"]
        return flags & SOUNDS == 0 if modality == "images" else flags & (CLIPS if modality == "videos" else SOUNDS) > 0

    @property
    def images(self) -> Pieces:
        """The images and clips of `media`: what a vision encoder takes."""
        return self.media.take(self.samples_with("images")[self.media.sample])

    @property
    def media_spans(self) -> Pieces:
        """All of `media`, each with the tokens around it that may not be cut off from it."""
        images = self.media
        if self.items is None:
            return images
        listed = self.meta["items"][images.sample] > 0
        before, behind = np.zeros((2, len(images)), np.int32)
        firsts = np.flatnonzero(np.diff(images.sample, prepend=-1))
        within = np.arange(len(images)) - np.repeat(firsts, np.diff(np.append(firsts, len(images))))
        rows = (self.meta["items"][images.sample] - 1 + within)[listed]
        before[listed], behind[listed] = self.items[rows, 2:].T
        return Pieces(images.sample, images.start - before, images.length + before + behind)

    @cached_property
    def _media_keys(self) -> tuple[Int64s, Int64s]:
        """Where each item begins among the media tokens of its sample; and (sample, that) as a sorted 64-bit key."""
        images = self.media
        length = images.length.astype(np.int64)
        before = np.cumsum(length) - length
        fresh = np.ones(len(length), np.bool_)
        fresh[1:] = images.sample[1:] != images.sample[:-1]
        first = before - before[np.maximum.accumulate(np.where(fresh, np.arange(len(length)), 0))]
        return first, (images.sample.astype(np.int64) << 32) + first

    def media_runs(self, modality: str) -> Pieces:
        """Return the media of a modality, each by its position among the media tokens of its sample, as plans do."""
        runs = Pieces(self.media.sample, self._media_keys[0].astype(np.int32), self.media.length)
        return runs.take(self.samples_with(modality)[runs.sample])

    def media_at(self, sample: Int32s, start: Int32s) -> tuple[Int64s, Int64s]:
        """Return which item of `media` holds a media token of a sample, and where that item begins.

        Both count the media tokens of the sample alone, as plans of media do.
        """
        first, keys = self._media_keys
        image = np.searchsorted(keys, (sample.astype(np.int64) << 32) + start, side="right") - 1
        return image, first[image]

    def sample_id(self, sample: int) -> SampleId:
        """Return the id of one drawn sample."""
        meta = self.meta[sample]
        return SampleId(self.names[self.source[sample]], int(meta["row"]), int(meta["epoch"]))

    @cached_property
    def by_source(self) -> tuple[Int32s, Int64s]:
        """The samples sorted by source (drawing order inside), and where each source begins."""
        narrow = self.source.astype(np.uint16) if len(self.names) < 1 << 16 else self.source
        order = np.argsort(narrow, kind="stable")  # numpy sorts 16-bit keys by radix, ten times as fast
        return order.astype(np.int32), offsets_of(np.bincount(self.source, minlength=len(self.names)))

    def samples_of(self, source: int) -> Int32s:
        """Return the drawn samples of one source, in their order."""
        order, offsets = self.by_source
        return order[int(offsets[source]) : int(offsets[source + 1])]

    @cached_property
    def _sorted_meta(self) -> MetaArray:
        """The metadata sorted by source."""
        order = self.by_source[0]
        if len(order) < len(self):  # a slice of a plan has few of the samples
            return take_meta(self.meta, order)
        # Profiled: a pass over all metadata for each source misses the cache at every sample. Read it once, in order.
        raw = np.dtype((np.void, self.meta.itemsize))
        places, out = np.empty(len(order), np.int32), np.empty(len(order), raw)
        places[order] = np.arange(len(order), dtype=np.int32)
        out[places] = np.ascontiguousarray(self.meta).view(raw)
        return out.view(self.meta.dtype)

    def meta_of(self, source: int) -> MetaArray:
        """Return the metadata of the drawn samples of one source, in their order."""
        offsets = self.by_source[1]
        return self._sorted_meta[int(offsets[source]) : int(offsets[source + 1])]


@dataclass(frozen=True, eq=False)
class Buffer:
    """The input of a strategy: one step's draw with its metadata, the job's limits, what the trainer reported."""

    draw: Draw
    limits: Limits
    reported: Callable[[], Mapping[str, float]] | None = field(default=None, repr=False)
    """Returns the report in force; raises ReportMissing where it has not arrived."""

    @property
    def metrics(self) -> dict[str, float]:
        """What the trainer reported for the step `lag` before this one; empty before the first such step.

        A strategy that reads it follows the reports: a step is planned once its report is there.
        """
        return {} if self.reported is None else dict(self.reported())

    @property
    def step(self) -> int:
        """The step."""
        return self.draw.step

    @property
    def names(self) -> tuple[str, ...]:
        """The job's sources."""
        return self.draw.names

    @property
    def source(self) -> Int32s:
        """The source of each drawn sample, as an index into `names`."""
        return self.draw.source

    @property
    def meta(self) -> MetaArray:
        """Metadata of each drawn sample: tokens, loss_tokens, image_tokens, images, bytes, row, epoch."""
        return self.draw.meta

    def __len__(self) -> int:
        return len(self.draw)

    def __repr__(self) -> str:
        tokens = int(self.meta["tokens"].sum())
        return f"Buffer(step={self.step}, samples={len(self)}, tokens={tokens}, sources={len(self.names)})"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Drawn samples cut to the context length; most samples are one piece."""

    sample: Int32s
    """Index into the draw."""
    start: Int32s
    """First token of the piece inside its sample (or of a piece of an image inside its image)."""
    length: Int32s

    def __len__(self) -> int:
        return len(self.sample)

    def take(self, order: npt.NDArray[np.integer] | npt.NDArray[np.bool_] | slice) -> Pieces:
        """Return some of the pieces, or all in another order."""
        return Pieces(self.sample[order], self.start[order], self.length[order])


def cut_pieces(tokens: npt.NDArray[np.integer], context_length: int, images: Pieces | None = None) -> Pieces:
    """Cut samples of these delivered lengths into pieces of at most the context length.

    An image is never cut: a piece ends before one that does not fit wholly.

    Example:
        >>> pieces = cut_pieces(np.array([3, 10]), 4)
        >>> pieces.sample.tolist(), pieces.start.tolist(), pieces.length.tolist()
        ([0, 1, 1, 1], [0, 0, 4, 8], [3, 4, 4, 2])
        >>> image = Pieces(np.array([0]), np.array([3]), np.array([3]))
        >>> cut_pieces(np.array([7]), 4, image).length.tolist()
        [3, 4]
    """
    if not len(tokens) or int(tokens.max()) <= context_length:
        count = np.arange(len(tokens), dtype=np.int32)
        return Pieces(count, np.zeros(len(tokens), np.int32), tokens.astype(np.int32))
    if images is not None and bool((tokens[images.sample] > context_length).any()):
        begin = offsets_of(np.bincount(images.sample, minlength=len(tokens)))
        wide = tokens.astype(np.int64)
        count = _cut_around(wide, context_length, begin, images.start, images.length, np.empty((0, 3), np.int32))
        out = np.empty((count, 3), np.int32)
        _cut_around(wide, context_length, begin, images.start, images.length, out)
        return Pieces(*np.ascontiguousarray(out.T))
    counts = np.maximum(-(-tokens.astype(np.int64) // context_length), 1)
    sample = np.repeat(np.arange(len(tokens)), counts)
    first = np.cumsum(counts) - counts
    start = (np.arange(len(sample)) - first[sample]) * context_length
    length = np.minimum(tokens[sample] - start, context_length)
    return Pieces(sample.astype(np.int32), start.astype(np.int32), length.astype(np.int32))


def last_cut(meta: Any, items: Int32s | None, most: int) -> int:
    """Return the last token at or before `most` where a sample may be cut: not inside an image.

    Args:
        meta: The metadata of the sample.
        items: Its images, as in `Draw.items`; None for at most one image, at the beginning.
        most: Tokens.

    Example:
        >>> from overlord.core.samples import META
        >>> meta = np.zeros(1, META)[0]
        >>> last_cut(meta, np.array([[4, 6, 1, 1]]), 9), last_cut(meta, np.array([[4, 6, 1, 1]]), 11)
        (3, 11)
    """
    if items is None:
        return most if most >= int(meta["image_tokens"]) else 0
    begin, end = items[:, 0] - items[:, 2], items[:, 0] + items[:, 1] + items[:, 3]
    inside = np.flatnonzero((begin < most) & (most < end))
    return int(begin[inside[0]]) if len(inside) else most


def part_of_sample(
    meta: Any, items: Int32s | None, begin: int, end: int, context_length: int
) -> tuple[Any, Int32s | None]:
    """Return the metadata and the images of the tokens begin .. end of a sample, as if they were a sample.

    Labels are exact where every token counts in the loss; of other samples they are the least there can be: the loss
    of a step is divided by what its loaders count.

    Example:
        >>> from overlord.core.samples import META
        >>> meta = np.zeros(1, META)[0]
        >>> meta["tokens"], meta["loss_tokens"], meta["flags"] = 100, 90, 0
        >>> part, _ = part_of_sample(meta, None, 40, 100, 30)
        >>> int(part["start"]), int(part["tokens"]), int(part["loss_tokens"])
        (40, 60, 50)
    """
    part, whole, tokens = meta.copy(), int(meta["tokens"]), end - begin
    part["start"], part["tokens"] = begin, tokens
    if end < whole:
        part["flags"] = int(part["flags"]) & ~ENDS_EPOCH | CONTINUES
    plain = int(meta["flags"]) & PLAIN
    part["loss_tokens"] = (
        tokens - -(-tokens // context_length) if plain else max(meta["loss_tokens"] - whole + tokens, 0)
    )
    if meta["image_tokens"]:
        if items is None:
            items = np.array([[0, int(meta["image_tokens"]), 0, 0]], np.int32)
        items = items[(items[:, 0] >= begin) & (items[:, 0] < end)] - np.array([[begin, 0, 0, 0]], np.int32)
        part["images"], part["image_tokens"] = len(items), items[:, 1].sum()
        part["items"] = len(items) > 1 or (len(items) == 1 and items[0, 0] > 0)
    return part, items if part["items"] else None


def context_pieces(buffer: Buffer) -> Pieces:
    """Cut a step's samples at the context length."""
    tokens, most = buffer.draw.tokens, buffer.limits.context_length
    long = len(tokens) and int(tokens.max()) > most
    return cut_pieces(tokens, most, buffer.draw.media_spans if long else None)


def apply_overlength(
    tokens: npt.NDArray[np.integer],
    items: Pieces | None,
    context_length: int,
    policy: str,
) -> tuple[Int32s, Int32s]:
    """Return (delivered tokens, flags) of samples with these raw lengths.

    An image, clip or sound is never cut. A sample with one longer than the context is skipped. Where the end of the
    context would cut one, the sample ends before it.

    Args:
        tokens: Raw lengths.
        items: Every image, clip and sound with the tokens that go with it; None where there are none.
        context_length: Most tokens of a piece.
        policy: "truncate", "split", "drop" or "error".

    Example:
        >>> apply_overlength(np.array([5, 12]), None, 8, "truncate")[0].tolist()
        [5, 8]
        >>> image = Pieces(np.array([0]), np.array([6]), np.array([4]))
        >>> apply_overlength(np.array([12]), image, 8, "truncate")[0].tolist()
        [6]
    """
    over = tokens > context_length
    flags = np.zeros(len(tokens), np.int32)
    delivered = tokens.astype(np.int64)
    if policy == "truncate":
        delivered = np.minimum(delivered, context_length)
    elif policy == "drop":
        flags[over] |= SKIP
    if items is not None:
        row, start, length = (column.astype(np.int64) for column in (items.sample, items.start, items.length))
        flags[row[length > context_length]] |= SKIP
        hit = (start < delivered[row]) & (delivered[row] < start + length)
        np.minimum.at(delivered, row[hit], start[hit])
        flags[delivered < 1] |= SKIP
        delivered = np.maximum(delivered, 1)
    if policy == "error":
        flags = np.where(over, OVERLONG, 0).astype(np.int32)
    return delivered.astype(np.int32), flags


@kernel
def _cut_around(tokens: Int64s, most: int, begin: Int64s, start: Int32s, length: Int32s, out: Int32s) -> int:
    """Return the number of pieces; write (sample, start, length) of each where `out` is not empty."""
    # Called twice: with an empty `out` to count, then with one of that size. A piece is `most` tokens long, unless its
    # end would lie inside an image (`start`, `length`; `begin` has the first image of each sample): then it ends before
    # the image. `image` moves past the images that the piece holds completely.
    count = 0
    for sample in range(len(tokens)):
        at = 0
        image = begin[sample]
        while at < tokens[sample]:
            end = min(at + most, tokens[sample])
            while image < begin[sample + 1] and start[image] + length[image] <= end:
                image += 1
            # An image at the very beginning of a piece cannot move on; one longer than a piece is never delivered.
            if image < begin[sample + 1] and at < start[image] < end:
                end = start[image]
            if len(out):
                out[count, 0], out[count, 1], out[count, 2] = sample, at, end - at
            count += 1
            at = end
    return count
