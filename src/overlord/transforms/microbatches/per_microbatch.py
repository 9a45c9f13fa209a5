"""Microbatch transformations: pieces packed into one sequence (or padded rows), in the keys a trainer takes.

    pack_microbatch   one microbatch of one bucket, cut for the ranks that share it
    pack_encoder      the images or sounds that one rank encodes in a step, and the routes of their tokens
    MediaKeys         the keys of images, clips and sounds in a microbatch
    Blueprint         the layout of all arrays in one block of memory

A microbatch is laid out first and filled second, so that it is written directly into shared memory, once per host,
already cut for the ranks that share it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overlord.core.client_messages import SLICINGS
from overlord.core.draw import Pieces
from overlord.core.plan import LoadingPlan
from overlord.core.ragged import offsets_of
from overlord.job.layout_specs import Layout
from overlord.transforms.hooks import MicrobatchPart, Result, RunningHook, microbatch_part
from overlord.transforms.microbatches.packing_kernels import FIELDS, copy_runs, pack
from overlord.transforms.microbatches.positions import mrope_positions
from overlord.transforms.microbatches.step_samples import KINDS, Items, Opening, StepSamples
from overlord.transforms.samples.images import normalize_patches
from overlord.transforms.samples.per_sample import Place

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Allocate = Callable[[int], Bytes]
"""Returns a buffer of a number of bytes."""
Wanted = Callable[[str], tuple[int, ...]]
"""Returns the context-parallel coordinates of the ranks that need a key; none: it is not made."""

_NAMES = {
    "hf": {"ids": "input_ids", "positions": "position_ids", "labels": "labels", "shifted": "shift_labels"},
    "megatron": {"ids": "tokens", "positions": "position_ids", "shifted": "labels", "mask": "loss_mask"},
    "torchtitan": {"ids": "input", "positions": "positions", "shifted": "labels"},
}
"""The names of a sequence's arrays in each layout."""
_NOWHERE = -1
_BOUNDS = {"hf": ("cu_seq_lens_q", "cu_seq_lens_k"), "megatron": ("cu_seqlens_padded",), "torchtitan": ()}
_AXES = {"plain": 0, "mrope": 3, "mrope_text": 4}
_NONE = np.empty(0, np.int64)
_NONE_SILENT = np.empty(0, np.bool_)
_VISION = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
_SLICED = FIELDS[:6]
"""What ranks that share a sequence have slices of."""
_KEYS = {name for names in _NAMES.values() for name in names.values()} - {"tokens"}
_KEYS |= {name for names in (*_BOUNDS.values(), *_VISION.values()) for name in names}
_KEYS |= {
    "attention_mask", "cu_seqlens", "max_seqlen", "local_cp_size", "max_length_q", "max_length_k", "use_cache",
    "second_per_grid_ts", "input_features", "feature_attention_mask", "send_rows",
}  # fmt: skip
"""Keys that batches of some layout have: no column of a hook may have such a name. Its "tokens" replace the tokens."""
_KIND_OF = {"encoder": "image", "audio_encoder": "audio"}
"""What each encoder of a plan takes, as keys of `meta` call it."""
_SIZES = {"<i8": 8, "<i4": 4, "<f4": 4, "|u1": 1}

ALIGNMENT = 64
"""Arrays begin at multiples of this inside a buffer."""
_STRIDE = 16
"""Slices of ranks begin at multiples of this many elements: at least one cache line for every type."""


@dataclass(frozen=True, slots=True)
class PackingJob:
    """What all microbatches of a service have in common."""

    layout: Layout
    media: MediaShape
    opening: Opening
    hook: RunningHook | None = None
    """What a user's `constructor_do_plan` does with the segments of a microbatch."""


class _Sharing(NamedTuple):
    """How the sequences of one microbatch are cut for the ranks that share them."""

    of: int
    """Slices; 1 where they are not cut."""
    part: int | None = None
    """The only slice that belongs to the bucket; None where each of its context-parallel ranks has one."""

    def parts(self, coordinates: tuple[int, ...]) -> tuple[int, ...]:
        """Return the slices that ranks at these context-parallel coordinates need."""
        return coordinates if self.part is None else (self.part,) * bool(coordinates)

    def name(self, key: str, part: int) -> str:
        """Return the name of a key's slice."""
        return key if self.part is not None else f"{key}@{part}"


class _Bin(NamedTuple):
    """One microbatch of one bucket."""

    begin: int
    """Its first piece."""
    cu: Int64s
    """Where segments (or rows) begin, padding included."""
    rows: bool
    """Whether segments are rows of a rectangle."""
    sharing: _Sharing

    @property
    def width(self) -> int:
        """Tokens of one rank."""
        return int(self.cu[-1]) // self.sharing.of


def pack_microbatch(
    plan: LoadingPlan,
    samples: StepSamples,
    bucket: int,
    microbatch: int,
    packing: PackingJob,
    allocate: Allocate,
    wanted: Wanted,
) -> tuple[PackedMicrobatch, list[tuple[int, str]]]:
    """Pack the pieces of one bin and cut the result for the ranks that share it; only what they want is made.

    A bucket is a data-parallel rank, or a rank of hybrid data parallelism. Also returns (drawn sample, reason) of media
    that do not decode.
    """
    layout, chosen = packing.layout, plan.bin_range(bucket, microbatch)
    ranks, first_place, sharing = _share(plan, chosen, bucket)
    one = _Bin(chosen.start, _boundaries(plan, samples, chosen, ranks), plan.row_tokens > 0, sharing)
    blueprint = Blueprint()
    offsets, slots, positions_at = _add_arrays(blueprint, plan, layout, one, wanted)
    silent = _NONE_SILENT
    items, segment_of = samples.items_in(plan.bin(bucket, microbatch)) if len(samples.items) else (samples.items, _NONE)
    media = None
    if chosen.stop > chosen.start and samples.silent.any():
        silent = samples.silent[plan.pieces.sample[chosen]]
    if len(items) or layout.dummy_image:
        media = MediaKeys(samples, items, layout, packing.media, routed=plan.encoders)
    filled = media if wanted("pixel_values") else None
    if filled is not None:
        filled.add_arrays(blueprint)
    made, given = _run_hook(plan, samples, (bucket, microbatch), packing.hook, one, (items, segment_of))
    for name in made.keys() - {"tokens"}:
        blueprint.add(name, made[name].dtype.str, made[name].shape)
    indices: dict[str, Int64s] = {}
    for encoder, (_, routing) in plan.encoders.items():
        assert routing is not None, "a plan that is checked has routes for its encoders"
        names = [f"meta.{_KIND_OF[encoder]}_{column}" for column in ("positions", "rows")]
        for part in sharing.parts(wanted(names[0])):
            head = routing.heads[bucket][part if sharing.part is None else 0]
            found = routing.arrivals(head, microbatch)
            indices |= {sharing.name(name, part): index for name, index in zip(names, found, strict=True)}
    for name, index in indices.items():
        blueprint.add(name, "<i8", index.shape)
    buffer = allocate(blueprint.nbytes)
    faults: list[tuple[int, str]] = []
    if filled is not None or indices:
        named = blueprint.views(buffer)
        if filled is not None:
            bad, faults = filled.fill(named, packing.opening)
            silent = silent.copy() if len(silent) else np.zeros(len(one.cu) - 1, np.bool_)
            silent[segment_of[bad]] = True
        for name, index in indices.items():
            named[name][:] = index
    table, tokens, loss, begin = samples.pieces, samples.tokens.values, samples.loss.values, one.begin
    if made:
        named = blueprint.views(buffer)
        for name in made.keys() - {"tokens"}:
            named[name][:] = made[name]
    if given is not None and "tokens" in made:  # only the pieces of this microbatch, one behind the other
        table, tokens, loss, begin = table.alone(chosen), made["tokens"], np.array(given.loss.values), 0
    longest, _, labels = pack(
        buffer, offsets, stride_of(one.width), tokens, loss, table.first, table.first_loss, table.runs,
        table.loss_runs, table.length, table.plain, table.labels, table.origin, (begin, chosen.stop - chosen.start),
        silent, one.cu, slots, *_cutting(plan, one, ranks),
    )  # fmt: skip
    if positions_at is not None:
        whole = _mrope(plan, packing, one, items, segment_of, media)
        _fill_mrope(buffer, *positions_at, layout, whole, one, plan.slicing)
    scalars = {
        "meta.local_cp_size": ranks,
        "meta.loss_tokens": labels,
        "meta.order": plan.order(bucket, microbatch),
    }
    if plan.offload is not None:
        scalars["meta.offload"] = plan.offload_of(bucket, microbatch)
    if ranks > 1:
        cut = "zigzag" if one.rows and plan.slicing == "whole_zigzag" else plan.slicing  # of rows it means the same
        scalars |= {"meta.first_place": first_place, "meta.slicing": SLICINGS.index(cut)}
    if layout.keys == "hf" and not one.rows:
        # With a cache, transformers' eager and sdpa attention do not look for packed samples: they would mix silently.
        scalars |= {"max_length_q": longest, "max_length_k": longest, "use_cache": False}
    packed = PackedMicrobatch(buffer, tuple(blueprint.arrays), scalars)
    return packed, [(int(items.sample[at]), reason) for at, reason in faults]


def _run_hook(
    plan: LoadingPlan,
    samples: StepSamples,
    where: tuple[int, int],
    hook: RunningHook | None,
    one: _Bin,
    media: tuple[Items, Int64s],
) -> tuple[Result, MicrobatchPart | None]:
    """Return what a user's hook makes of the microbatch `where` (bucket, microbatch), and what it was given."""
    if hook is None:
        return {}, None
    given = microbatch_part(plan, samples, plan.bin_range(*where), one.cu, media, hook.seed)
    told = f"step {plan.step}, microbatch {where[1]} of bucket {where[0]}"
    made = hook.run(given, told)
    for name in made:
        if name in _KEYS:
            raise hook.column_taken(given, told, name)
    return made, given


def _cutting(
    plan: LoadingPlan, one: _Bin, ranks: int
) -> tuple[tuple[int, int, int], Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Return how the kernel cuts: (slices, chunks of a segment, ranks), or runs if chunks cross segments."""
    of = one.sharing.of
    if of == 1:
        return (1, 1, ranks), _NONE, _NONE, _NONE, _NONE, _NONE
    if one.rows or plan.slicing == "zigzag":
        return (of, of if plan.slicing == "contiguous" else 2 * of, ranks), _NONE, _NONE, _NONE, _NONE, _NONE
    runs = cut_runs(one.cu, of, plan.slicing)
    return (of, 0, ranks), runs.segment, runs.begin, runs.length, runs.part, runs.place


def _share(plan: LoadingPlan, chosen: slice, bucket: int) -> tuple[int, int, _Sharing]:
    """Return how many ranks share a microbatch, the first of their DP x CP places, and how it is cut for them."""
    cp, whole = plan.mesh.cp, plan.slicing == "whole"
    if plan.cp_sizes is not None and plan.first_ranks is not None and chosen.stop > chosen.start:
        ranks, first = int(plan.cp_sizes[chosen.start]), int(plan.first_ranks[chosen.start])
        return ranks, first, _Sharing(1, 0) if whole else _Sharing(ranks, bucket - first)
    if cp == 1 or plan.axis == "CP" or "CP" in plan.broadcast:
        return 1, bucket, _Sharing(1, 0)  # not cut: the trainer cuts what it broadcasts
    return cp, bucket * cp, _Sharing(1, 0) if whole else _Sharing(cp)


def _boundaries(plan: LoadingPlan, samples: StepSamples, chosen: slice, of: int) -> Int64s:
    """Return where segments (or rows) begin, padding included."""
    if chosen.stop == chosen.start:  # a dummy, so that all ranks have the same number of microbatches
        least = plan.bin_multiple if plan.axis != "CP" else plan.bin_multiple * of
        return np.array([0, max(plan.pad_multiple, least)], np.int64)
    behind = samples.pieces.behind
    return behind[chosen.start : chosen.stop + 1] - behind[chosen.start]


def _add_arrays(
    blueprint: Blueprint, plan: LoadingPlan, layout: Layout, one: _Bin, wanted: Wanted
) -> tuple[tuple[int, ...], Int64s, tuple[int, Int64s] | None]:
    """Add the arrays of the sequence; return the offset of each that the kernel writes (-1 if absent), and the slots.

    Also returns the offset and the slots of positions with several axes.
    """
    segments, width = len(one.cu) - 1, one.width
    shape: tuple[int, ...] = (segments, width // segments) if one.rows else (1, width)
    if layout.keys == "torchtitan" and not one.rows:
        shape = (width,)
    at, stride = dict.fromkeys(FIELDS, _NOWHERE), stride_of(width)
    several: tuple[int, Int64s] | None = None
    names_of, slots = _slices(layout.keys, one.rows, plan.mesh.cp, one.sharing, wanted)
    for field, names in names_of:
        if field == "positions" and layout.positions != "plain":
            axes = _AXES[layout.positions]
            place = blueprint.add_slices(names, "<i8", (axes, *shape), stride_of(axes * width))
            several = (place, slots[_SLICED.index(field)])
            continue
        at[field] = blueprint.add_slices(names, "<f4" if field == "mask" else "<i8", shape, stride)
    at["origin"] = blueprint.add("meta.origin", "<i8", (5, segments))
    also = () if one.rows else _BOUNDS[layout.keys]
    at["bounds"] = blueprint.add("meta.cu_seqlens", "<i4", (segments + 1,), *also)
    if layout.keys == "megatron":
        if not one.rows:
            at["unpadded"] = blueprint.add("cu_seqlens", "<i4", (segments + 1,))
            at["longest"] = blueprint.add("max_seqlen", "<i4", (1,))
        if plan.cp_sizes is not None:
            at["ranks"] = blueprint.add("local_cp_size", "<i4", (1,))
    return tuple(at.values()), slots, several


@functools.lru_cache(1024)
def _slices(
    keys: str, rows: bool, cp: int, sharing: _Sharing, wanted: Wanted
) -> tuple[list[tuple[str, tuple[str, ...]]], Int64s]:
    """Return the fields that are made and the names of their slices; and [field, rank]: which slice is a rank's.

    A rank without one has -1 there.
    """
    # The label of a slice's last token is in another rank's slice, so ranks that share a sequence get shifted labels.
    fields = {f: name for f, name in _NAMES[keys].items() if f != "shifted" or keys != "hf" or cp > 1}
    if keys == "hf" and rows:
        fields["attention"] = "attention_mask"
    made: list[tuple[str, tuple[str, ...]]] = []
    slots = np.full((len(_SLICED), sharing.of), -1, np.int64)
    for field, key in fields.items():
        parts = sharing.parts(wanted(key))
        slots[_SLICED.index(field), list(parts)] = np.arange(len(parts))
        if parts:
            made.append((field, tuple(sharing.name(key, part) for part in parts)))
    return made, slots


def _mrope(
    plan: LoadingPlan, packing: PackingJob, one: _Bin, items: Items, segment_of: Int64s, media: MediaKeys | None
) -> Int64s:
    """Return the positions of the whole sequence on three axes; ranks cut it afterwards."""
    at = np.flatnonzero(items.kind < 2)
    nothing = (np.empty((0, 3), np.int32), np.empty(0, np.float32))
    grids, seconds = media.vision_grids() if media is not None else nothing
    inside = items.start[at] - plan.pieces.start[one.begin + segment_of[at]]
    rate = packing.layout.tokens_per_second
    step = np.where((seconds > 0) & (rate > 0), seconds.astype(np.float64) * rate, 1.0)
    return mrope_positions(
        one.cu, segment_of[at], inside, items.length[at], grids, packing.media.merge, step,
        count_time=packing.layout.count_time,
    )  # fmt: skip


def _fill_mrope(
    buffer: Bytes, offset: int, slots: Int64s, layout: Layout, whole: Int64s, one: _Bin, slicing: str
) -> None:
    """Write positions of several rows into the slices of the ranks."""
    axes, width = _AXES[layout.positions], one.width
    runs = cut_runs(one.cu, one.sharing.of, slicing, rows=one.rows)
    here = np.flatnonzero(slots[runs.part] >= 0)
    stride = stride_of(axes * width)
    if axes == 4:  # the first row is that of plain text
        whole = np.concatenate([[np.arange(int(one.cu[-1])) - np.repeat(one.cu[:-1], np.diff(one.cu))], whole])
    block = buffer[offset : offset + 8 * stride * (int(slots.max()) + 1)].view(np.int64)
    begins = (one.cu[runs.segment] + runs.begin)[here]
    copy_runs(whole, block, begins, runs.length[here], (slots[runs.part] * stride + runs.place)[here], width)


# -- the inputs of an encoder that runs apart from the backbone ------------------------------------------------------


def pack_encoder(
    plan: LoadingPlan, samples: StepSamples, encoder: str, rank: int, packing: PackingJob, allocate: Allocate
) -> PackedMicrobatch:
    """Gather what a rank encodes for one encoder of a plan, in the plan's order, with the routes of its tokens."""
    one, routing = plan.encoders[encoder]
    assert routing is not None, "a plan that is checked has routes for its encoders"
    runs = one.bin(rank, 0)
    numbers: dict[str, Array] = {
        "send_rows": routing.send_rows(rank),
        "send_splits": routing.send_splits(rank),
        "recv_splits": routing.recv_splits(rank),
    }
    if encoder == "audio_encoder":
        return _pack_sounds(plan, samples, runs, numbers, packing.media, allocate)
    return _pack_images(plan, samples, runs, numbers, packing.layout, packing.media, allocate)


def _pack_sounds(
    plan: LoadingPlan, samples: StepSamples, runs: Pieces, routes: dict[str, Array], shape: MediaShape,
    allocate: Allocate,
) -> PackedMicrobatch:  # fmt: skip
    """Gather the sounds that a rank encodes.

    Keys: `input_features` and `feature_attention_mask` as in a microbatch, `audio_lengths` (tokens of each sound: so
    many rows of its output are sent), `audio_ids` (which item of the step), and the routes as of images. A rank without
    sounds gets one of zeros with the id -1 and no rows; its output is not sent.
    """
    sound, _ = plan.draw.media_at(runs.sample, runs.start)
    dummy, count = not len(runs), max(1, len(runs))
    heard = np.full(1, shape.frames) if dummy else samples.grids_of(samples.numbered.take(sound))[:, 0]
    numbers: dict[str, Array] = {
        "feature_attention_mask": np.arange(shape.frames) < heard[:, None],
        "audio_lengths": np.zeros(1, np.int64) if dummy else runs.length,
        "audio_ids": np.array([-1]) if dummy else sound,
        **routes,
    }
    blueprint = Blueprint()
    blueprint.add("input_features", "<f4", (count, shape.mels, shape.frames))
    for name, value in numbers.items():
        blueprint.add(name, "<i8", value.shape)
    buffer = allocate(blueprint.nbytes)
    named = blueprint.views(buffer)
    for name, value in numbers.items():
        named[name][:] = value
    named["input_features"][:] = 0
    for at, which in enumerate(sound.tolist()):
        named["input_features"][at].reshape(-1).view(np.uint8)[:] = samples.data(which)
    return PackedMicrobatch(buffer, tuple(blueprint.arrays), {})


def _pack_images(
    plan: LoadingPlan, samples: StepSamples, runs: Pieces, routes: dict[str, Array], layout: Layout, shape: MediaShape,
    allocate: Allocate,
) -> PackedMicrobatch:  # fmt: skip
    """Gather the images (or runs of one) that a rank encodes, in the plan's order, with the routes of their tokens.

    Keys: `pixel_values` [patches, ..], `image_grid_thw` (of the whole image, also for a run of one), `cu_seqlens`
    (attention segments: images, frames of clips, or what a rank has of them), `image_ids` (which image of the step; the
    same on all ranks that share one), `image_offsets` (the first patch of the run inside its image), `send_rows` (rows
    of the encoder's output, in the order in which they are sent), `send_splits` and `recv_splits` (rows to and from
    each rank of the world). A rank without images gets one of zeros with the id -1; its output is not sent.
    """
    per_token = shape.merge**2
    image, first = plan.draw.media_at(runs.sample, runs.start)
    grids = samples.grids_of(samples.numbered.take(image))
    begin = (runs.start.astype(np.int64) - first) * per_token
    counts = runs.length.astype(np.int64) * per_token
    dummy = not len(runs)
    numbers: dict[str, Array] = {
        "image_grid_thw": _dummy_grid(shape) if dummy else grids,
        "cu_seqlens": np.array([0, per_token]) if dummy else _segments(grids, begin, counts),
        "image_ids": np.array([-1]) if dummy else image,
        "image_offsets": np.array([0]) if dummy else begin,
        **routes,
    }
    blueprint = Blueprint()
    rows = per_token if dummy else int(counts.sum())
    blueprint.add("pixel_values", "<f4" if layout.pixels == "float32" else "|u1", (rows, shape.patch_bytes))
    for name, value in numbers.items():
        blueprint.add(name, "<i4" if name == "cu_seqlens" else "<i8", value.shape)
    buffer = allocate(blueprint.nbytes)
    named = blueprint.views(buffer)
    for name, value in numbers.items():
        named[name][:] = value
    pixels = named["pixel_values"]
    raw = pixels if pixels.dtype == np.uint8 else np.zeros(pixels.shape, np.uint8)
    if dummy:
        raw[:] = 0
    ends = offsets_of(counts)
    for at, which in enumerate(image.tolist()):
        patch = int(begin[at])
        whole = samples.data(which).reshape(-1, shape.patch_bytes)
        raw[int(ends[at]) : int(ends[at + 1])] = whole[patch : patch + int(counts[at])]
    if raw is not pixels:
        normalize_patches(raw, layout.mean, layout.std, 1 / 255, pixels)
    return PackedMicrobatch(buffer, tuple(blueprint.arrays), {})


def _segments(grids: npt.NDArray[np.int32], begin: Int64s, counts: Int64s) -> Int64s:
    """Return the bounds of attention segments: every image, and every frame of a clip, attends to itself only."""
    frame = np.prod(grids[:, 1:].astype(np.int64), axis=1)
    first, last = begin // frame, (begin + counts - 1) // frame
    frames = last - first + 1
    run = np.repeat(np.arange(len(frames)), frames)
    number = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(frames) - frames, frames)
    low = np.maximum(begin[run], number * frame[run])
    high = np.minimum((begin + counts)[run], (number + 1) * frame[run])
    return offsets_of(high - low)


# -- media keys ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MediaShape:
    """The shape of a job's media in a batch, the same for all of its sources."""

    patch_bytes: int = 0
    """Bytes of an image patch; 0 for a job without images and clips."""
    merge: int = 1
    """merge x merge patches become one token."""
    mels: int = 0
    """Mel bands of a sound; 0 for a job without sounds."""
    frames: int = 0
    """Frames of a sound, padding included."""


def _dummy_grid(shape: MediaShape) -> npt.NDArray[np.int32]:
    return np.array([[1, shape.merge, shape.merge]], np.int32)


class MediaKeys:
    """The media of one microbatch."""

    def __init__(
        self, samples: StepSamples, items: Items, layout: Layout, shape: MediaShape, *, routed: Collection[str]
    ) -> None:
        self._samples = samples
        self._items = items
        self._layout = layout
        self._shape = shape
        self._routed = {kind for kind in KINDS if ("audio_encoder" if kind == "audio" else "encoder") in routed}
        """Kinds that are encoded elsewhere, so that this microbatch holds only their tokens."""
        self._grids = samples.grids_of(items)

    def vision_grids(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return the grids of images and clips in the order of their tokens, and their seconds a temporal patch."""
        vision = self._items.take(np.flatnonzero(self._items.kind < 2))
        return self._samples.grids_of(vision), self._samples.seconds_of(vision)

    @cached_property
    def _of_kind(self) -> dict[str, Int64s]:
        found = {name: np.flatnonzero(self._items.kind == number) for number, name in enumerate(KINDS)}
        return {name: which for name, which in found.items() if len(which) and name not in self._routed}

    @property
    def _dummy(self) -> bool:
        return self._layout.dummy_image and self._shape.patch_bytes > 0 and "image" not in self._routed and not (
            "image" in self._of_kind or "video" in self._of_kind
        )  # fmt: skip

    def add_arrays(self, blueprint: Blueprint) -> None:
        """Add the arrays of the media that this microbatch has."""
        width = self._shape.patch_bytes
        dtype = "<f4" if self._layout.pixels == "float32" else "|u1"
        for kind, (pixels, grid) in _VISION.items():
            if kind in self._of_kind or (self._dummy and kind == "image"):
                grids = self._grids[self._of_kind[kind]] if kind in self._of_kind else _dummy_grid(self._shape)
                patches = int(np.prod(grids.astype(np.int64), axis=1).sum())
                blueprint.add(pixels, dtype, (patches, width))
                blueprint.add(grid, "<i8", (len(grids), 3))
        if "video" in self._of_kind:
            blueprint.add("second_per_grid_ts", "<f4", (len(self._of_kind["video"]),))
        if "audio" in self._of_kind:
            count = len(self._of_kind["audio"])
            blueprint.add("input_features", "<f4", (count, self._shape.mels, self._shape.frames))
            blueprint.add("feature_attention_mask", "<i8", (count, self._shape.frames))

    def fill(self, named: dict[str, Array], opening: Opening) -> tuple[Bools, list[tuple[int, str]]]:
        """Fill the keys; return which items are stand-ins, and (item, reason) of those that failed to decode here."""
        bad = self._samples.bad(self._items)
        faults: list[tuple[int, str]] = []
        if self._dummy:
            named["pixel_values"][:] = 0
            named["image_grid_thw"][:] = _dummy_grid(self._shape)
        for kind, which in self._of_kind.items():
            items = self._items.take(which)
            if kind == "audio":
                found, wrong = self._samples.fill(items, self._sounds(named, which), opening)
            else:
                found, wrong = self._fill_pixels(named, kind, which, items, opening)
            bad[which] = found
            faults += [(int(which[at]), reason) for at, reason in wrong]
        return bad, faults

    def _fill_pixels(
        self, named: dict[str, Array], kind: str, which: Int64s, items: Items, opening: Opening
    ) -> tuple[Bools, list[tuple[int, str]]]:
        pixels, grid = _VISION[kind]
        named[grid][:] = self._grids[which]
        if kind == "video":
            named["second_per_grid_ts"][:] = self._samples.seconds_of(items)
        out = named[pixels]
        raw = out if out.dtype == np.uint8 else np.empty(out.shape, np.uint8)
        counts = np.prod(self._grids[which].astype(np.int64), axis=1)
        ends = np.cumsum(counts)
        places: list[Place] = [raw[end - n : end].reshape(-1) for n, end in zip(counts.tolist(), ends.tolist(),
                                                                               strict=True)]  # fmt: skip
        result = self._samples.fill(items, places, opening)
        if raw is not out:
            normalize_patches(raw, self._layout.mean, self._layout.std, 1 / 255, out)
        return result

    def _sounds(self, named: dict[str, Array], which: Int64s) -> list[Place]:
        out = named["input_features"]
        heard = self._grids[which, 0]
        named["feature_attention_mask"][:] = np.arange(self._shape.frames) < heard[:, None]
        return [out[number].reshape(-1).view(np.uint8) for number in range(len(which))]


# -- the layout of a microbatch in one block of memory -------------------------------------------------------------


class ArraySpec(NamedTuple):
    """One array inside a buffer. A tuple, since a microbatch makes a dozen of them and must be fast."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * _SIZES[self.dtype]

    def view(self, buffer: Bytes) -> Array:
        """Return the array inside its buffer."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).reshape(self.shape)


class PackedMicrobatch(NamedTuple):
    """One microbatch of one bucket (or the encoder's inputs of one rank), written into one buffer."""

    buffer: Bytes
    arrays: tuple[ArraySpec, ...]
    """Named `key` when all ranks share it, `key@r` for context-parallel rank r, `meta.x` for provenance."""
    scalars: Mapping[str, int]

    def named(self) -> dict[str, Array]:
        """Return every array by its name."""
        return {spec.name: spec.view(self.buffer) for spec in self.arrays}

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays; one with several names counts once."""
        return sum({spec.offset: spec.nbytes for spec in self.arrays}.values())


class Blueprint:
    """Lays out arrays in a buffer that is not allocated yet."""

    def __init__(self) -> None:
        self.arrays: list[ArraySpec] = []
        self.nbytes = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], *others: str) -> int:
        """Add one array, under one or more names; return its offset."""
        at = self.nbytes
        self.arrays.append(ArraySpec(name, dtype, shape, at))
        self.nbytes = at - (-math.prod(shape) * _SIZES[dtype] // ALIGNMENT) * ALIGNMENT
        for other in others:
            self.arrays.append(ArraySpec(other, dtype, shape, at))
        return at

    def views(self, buffer: Bytes) -> dict[str, Array]:
        """Return every array by its name."""
        return {spec.name: spec.view(buffer) for spec in self.arrays}

    def add_slices(self, names: tuple[str, ...], dtype: str, shape: tuple[int, ...], stride: int) -> int:
        """Add one array for each rank that shares a sequence, `stride` elements apart; return the first offset."""
        begin = at = self.nbytes
        width = stride * _SIZES[dtype]
        for name in names:
            self.arrays.append(ArraySpec(name, dtype, shape, at))
            at += width
        self.nbytes = at
        return begin


def stride_of(elements: int) -> int:
    """Return the distance of the slices of two ranks, in elements.

    Example:
        >>> stride_of(100)
        112
    """
    return -(-elements // _STRIDE) * _STRIDE


# Parallelism transformations: which tokens and which keys of a microbatch each rank needs.


@dataclass(frozen=True, slots=True)
class Runs:
    """A sequence cut at the bounds of segments and of the ranks' slices: each run is inside one of both."""

    segment: Int64s
    begin: Int64s
    """The run's first token inside its segment."""
    length: Int64s
    part: Int64s
    """The rank that gets it."""
    place: Int64s
    """Where it begins in that rank's slice."""

    def of_part(self, part: int) -> Runs:
        """Return the runs of one rank, as if it were the only one."""
        mine = np.flatnonzero(self.part == part)
        return Runs(self.segment[mine], self.begin[mine], self.length[mine], np.zeros(len(mine), np.int64),
                    self.place[mine])  # fmt: skip


def cut_runs(cu_seqlens: npt.NDArray[np.integer], cp: int, slicing: str, *, rows: bool = False) -> Runs:
    """Cut a sequence of segments for the ranks that share it; `rows` of a rectangle are each cut by itself.

    Example:
        >>> runs = cut_runs(np.array([0, 8, 16]), 2, "zigzag").of_part(0)
        >>> (runs.begin.tolist(), runs.place.tolist())
        ([0, 6, 0, 6], [0, 2, 4, 6])
    """
    cu = cu_seqlens.astype(np.int64)
    if cp == 1:
        number = np.arange(len(cu) - 1)
        return Runs(number, np.zeros(len(number), np.int64), np.diff(cu), np.zeros(len(number), np.int64), cu[:-1])
    per_segment = rows or slicing == "zigzag"
    units = cu if per_segment else cu[[0, -1]]
    chunks = cp if slicing == "contiguous" else 2 * cp
    size: Int64s = np.diff(units) // chunks
    starts: Int64s = (units[:-1, None] + size[:, None] * np.arange(chunks)).reshape(-1)
    number = np.tile(np.arange(chunks), len(size))
    mirrored = number >= cp
    part = np.where(mirrored, 2 * cp - 1 - number, number)
    # A rank's slice of a unit begins at the unit's share; its second chunk follows the first.
    place: Int64s = np.repeat(units[:-1] // cp, chunks) + np.where(mirrored, np.repeat(size, chunks), 0)
    lengths = np.repeat(size, chunks)
    if per_segment:
        segment = np.repeat(np.arange(len(size)), chunks)
        return Runs(segment, starts - cu[segment], lengths, part, place)
    # Chunks of the whole sequence are cut again at the bounds of segments.
    bounds: Int64s = np.union1d(starts, cu[:-1])
    chunk = np.searchsorted(starts, bounds, side="right") - 1
    segment = np.searchsorted(cu, bounds, side="right") - 1
    return Runs(
        segment,
        bounds - cu[segment],
        np.diff(np.append(bounds, cu[-1])),
        part[chunk],
        place[chunk] + bounds - starts[chunk],
    )
