"""Microbatch transformations: pieces packed into one sequence (or padded rows), in the keys a trainer takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlord.core.layout_specs import Layout
from overlord.core.plan import LoadingPlan
from overlord.transforms.media_keys import MediaKeys, MediaShape
from overlord.transforms.packed import Blueprint, Bytes, PackedMicrobatch, stride_of
from overlord.transforms.packing_kernels import FIELDS, copy_runs, pack
from overlord.transforms.per_rank import Runs, cut_runs
from overlord.transforms.positions import mrope_positions
from overlord.transforms.step_samples import Items, Opening, StepSamples

Int64s = npt.NDArray[np.int64]
Allocate = Callable[[int], Bytes]
"""Gives a buffer of so many bytes."""

_NAMES = {
    "hf": {"ids": "input_ids", "positions": "position_ids", "labels": "labels", "shifted": "shift_labels"},
    "megatron": {"ids": "tokens", "positions": "position_ids", "shifted": "labels", "mask": "loss_mask"},
    "torchtitan": {"ids": "input", "positions": "positions", "shifted": "labels"},
}
"""What each layout calls the arrays of a sequence."""
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class PackingJob:
    """What stays the same for all microbatches of a service."""

    layout: Layout
    media: MediaShape
    opening: Opening


class _Sharing(NamedTuple):
    """How ranks share the sequences of one microbatch."""

    of: int
    """Ranks that share them."""
    suffixes: tuple[str, ...]
    """Of the names of the slices that are made here."""
    part: int | None = None
    """The only slice that is made here; None for all."""


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
    plan: LoadingPlan, samples: StepSamples, bucket: int, microbatch: int, packing: PackingJob, allocate: Allocate
) -> tuple[PackedMicrobatch, list[tuple[int, str]]]:
    """Pack the pieces of one bin and cut the result for the ranks that share it.

    Args:
        plan: The step's plan.
        samples: The step's samples.
        bucket: The consumer: a data-parallel rank, or a rank of hybrid data parallelism.
        microbatch: Microbatch of the step.
        packing: Layout and media of the service.
        allocate: Gives the buffer.

    Returns:
        The microbatch, and (drawn sample, reason) of media that do not decode.
    """
    layout, chosen = packing.layout, plan.bin_range(bucket, microbatch)
    sharing = _share(plan, chosen, bucket)
    one = _Bin(chosen.start, _boundaries(plan, samples, chosen, sharing.of), plan.row_tokens > 0, sharing)
    blueprint = Blueprint()
    offsets, positions_at = _draw_up(blueprint, plan, layout, one)
    silent = _ALL_SPEAK
    items, segment_of = samples.items_in(plan.bin(bucket, microbatch)) if len(samples.items) else (samples.items, _NONE)
    media = None
    if len(samples.items) and chosen.stop > chosen.start and samples.silent.any():
        silent = samples.silent[plan.pieces.sample[chosen]]
    if len(items) or layout.dummy_image:
        media = MediaKeys(samples, items, layout, packing.media, routed=plan.encoder is not None)
        media.draw_up(blueprint)
    if plan.routing is not None:
        arrivals = [plan.routing.arrivals(rank, microbatch) for rank in plan.routing.heads[bucket]]
        for (places, _), suffix in zip(arrivals, sharing.suffixes, strict=False):
            blueprint.add(f"meta.image_positions{suffix}", "<i8", (len(places),))
            blueprint.add(f"meta.image_rows{suffix}", "<i8", (len(places),))
    buffer = allocate(blueprint.nbytes)
    faults: list[tuple[int, str]] = []
    if media is not None or plan.routing is not None:
        named = {spec.name: spec.view(buffer) for spec in blueprint.arrays}
        if media is not None:
            bad, faults = media.fill(named, packing.opening)
            silent = silent.copy() if len(silent) else np.zeros(len(one.cu) - 1, np.bool_)
            silent[segment_of[bad]] = True
        if plan.routing is not None:
            for pair, suffix in zip(arrivals, sharing.suffixes, strict=False):
                named[f"meta.image_positions{suffix}"][:], named[f"meta.image_rows{suffix}"][:] = pair
    table = samples.pieces
    longest, real, labels = pack(
        buffer, offsets, stride_of(one.width), samples.tokens.values, samples.loss.values, table.first, table.length,
        table.plain, table.origin, (one.begin, chosen.stop - chosen.start), silent, one.cu, *_cutting(plan, one),
    )  # fmt: skip
    if layout.positions != "plain":
        whole = _mrope(plan, packing, one, items, segment_of, media)
        _fill_mrope(buffer, positions_at, layout, whole, one, plan.slicing)
    scalars = {"meta.local_cp_size": sharing.of, "meta.loss_tokens": labels}
    if layout.keys == "hf" and not one.rows:
        # With a cache, transformers' eager and sdpa attention do not look for packed samples: they would mix silently.
        scalars |= {"max_length_q": longest, "max_length_k": longest, "use_cache": False}
    packed = PackedMicrobatch(buffer, tuple(blueprint.arrays), scalars, real)
    return packed, [(int(items.sample[at]), reason) for at, reason in faults]


def _cutting(plan: LoadingPlan, one: _Bin) -> tuple[tuple[int, int, int], Int64s, Int64s, Int64s, Int64s]:
    """Return how the kernel cuts: (ranks, chunks of a segment, the only part), or runs where chunks cross segments."""
    of, part = one.sharing.of, one.sharing.part
    only = -1 if part is None else part
    if of == 1:
        return (1, 1, only), _NONE, _NONE, _NONE, _NONE
    if one.rows or plan.slicing == "zigzag":
        return (of, of if plan.slicing == "contiguous" else 2 * of, only), _NONE, _NONE, _NONE, _NONE
    runs = _runs(plan.slicing, one)
    return (of, 0, only), runs.segment, runs.begin, runs.length, runs.part * stride_of(one.width) + runs.place


def _runs(slicing: str, one: _Bin) -> Runs:
    runs = cut_runs(one.cu, one.sharing.of, slicing, rows=one.rows)
    return runs if one.sharing.part is None else runs.of_part(one.sharing.part)


def _share(plan: LoadingPlan, chosen: slice, bucket: int) -> _Sharing:
    if plan.cp_sizes is not None and plan.first_ranks is not None and chosen.stop > chosen.start:
        return _Sharing(int(plan.cp_sizes[chosen.start]), ("",), bucket - int(plan.first_ranks[chosen.start]))
    cp = plan.mesh.cp
    if cp == 1 or plan.axis == "CP" or "CP" in plan.broadcast:
        return _Sharing(1, ("",))  # whole: the trainer cuts what it broadcasts
    return _Sharing(cp, _suffixes(cp))


@functools.cache
def _suffixes(cp: int) -> tuple[str, ...]:
    return tuple(f"@{rank}" for rank in range(cp))


def _boundaries(plan: LoadingPlan, samples: StepSamples, chosen: slice, of: int) -> Int64s:
    """Return where segments (or rows) begin, padding included."""
    if chosen.stop == chosen.start:  # a dummy that keeps ranks in step
        least = plan.bin_multiple if plan.axis != "CP" else plan.bin_multiple * of
        return np.array([0, max(plan.pad_multiple, least)], np.int64)
    behind = samples.pieces.behind
    return behind[chosen.start : chosen.stop + 1] - behind[chosen.start]


def _draw_up(blueprint: Blueprint, plan: LoadingPlan, layout: Layout, one: _Bin) -> tuple[tuple[int, ...], int]:
    """Make room for the arrays of the sequence.

    Returns:
        Where each begins that the kernel writes (-1 for what is not there), and where positions of several rows do.
    """
    segments, width = len(one.cu) - 1, one.width
    shape: tuple[int, ...] = (segments, width // segments) if one.rows else (1, width)
    if layout.keys == "torchtitan" and not one.rows:
        shape = (width,)
    at, stride = dict.fromkeys(FIELDS, _NOWHERE), stride_of(width)
    for field, names in _slice_names(layout.keys, one.rows, plan.mesh.cp, one.sharing.suffixes):
        if field == "positions" and layout.positions != "plain":
            axes = _AXES[layout.positions]
            several = blueprint.add_slices(names, "<i8", (axes, *shape), stride_of(axes * width))
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
    return tuple(at.values()), several if layout.positions != "plain" else _NOWHERE


@functools.cache
def _slice_names(keys: str, rows: bool, cp: int, suffixes: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the fields that a layout has, and the names of their slices."""
    # The label of a slice's last token lies in another rank's, so ranks that share get shifted ones.
    wanted = {f: name for f, name in _NAMES[keys].items() if f != "shifted" or keys != "hf" or cp > 1}
    if keys == "hf" and rows:
        wanted["attention"] = "attention_mask"
    return [(field, tuple(name + suffix for suffix in suffixes)) for field, name in wanted.items()]


_BOUNDS = {"hf": ("cu_seq_lens_q", "cu_seq_lens_k"), "megatron": ("cu_seqlens_padded",), "torchtitan": ()}
_AXES = {"plain": 0, "mrope": 3, "mrope_text": 4}
_NONE = np.empty(0, np.int64)
_ALL_SPEAK = np.empty(0, np.bool_)


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


def _fill_mrope(buffer: Bytes, offset: int, layout: Layout, whole: Int64s, one: _Bin, slicing: str) -> None:
    """Write positions of several rows into the slices of the ranks."""
    axes, width, runs = _AXES[layout.positions], one.width, _runs(slicing, one)
    stride = stride_of(axes * width)
    if axes == 4:  # the first row is that of plain text
        whole = np.concatenate([[np.arange(int(one.cu[-1])) - np.repeat(one.cu[:-1], np.diff(one.cu))], whole])
    block = buffer[offset : offset + 8 * stride * len(one.sharing.suffixes)].view(np.int64)
    copy_runs(whole, block, one.cu[runs.segment] + runs.begin, runs.length, runs.part * stride + runs.place, width)
