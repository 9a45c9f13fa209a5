"""What a rank encodes in a step, and how its image tokens travel to the backbone (`vlm_hybrid`)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlord.core.layout_specs import Layout
from overlord.core.plan import LoadingPlan
from overlord.core.ragged import offsets_of
from overlord.transforms.images import normalize_patches
from overlord.transforms.media_keys import MediaShape
from overlord.transforms.packed import Blueprint, PackedMicrobatch
from overlord.transforms.per_microbatch import Allocate
from overlord.transforms.step_samples import StepSamples

Int64s = npt.NDArray[np.int64]


def pack_encoder(
    plan: LoadingPlan, samples: StepSamples, rank: int, layout: Layout, shape: MediaShape, allocate: Allocate
) -> PackedMicrobatch:
    """Gather the images (or runs of one) that a rank encodes, in the plan's order, with the routes of their tokens.

    Keys: `pixel_values` [patches, ..], `image_grid_thw` (of the whole image, also for a run of one), `cu_seqlens`
    (attention segments: images, frames of clips, or what a rank has of them), `image_ids` (which image of the step; the
    same on all ranks that share one), `image_offsets` (the first patch of the run inside its image), `send_rows` (rows
    of the encoder's output, in the order in which they are sent), `send_splits` and `recv_splits` (rows to and from
    each rank of the world). A rank without images gets one of zeros with the id -1, whose output nobody receives.
    """
    assert plan.encoder is not None and plan.routing is not None
    runs, routing = plan.encoder.bin(rank, 0), plan.routing
    per_token = shape.merge**2
    image, first = plan.draw.image_at(runs.sample, runs.start)
    grids = samples.grids_of(samples.vision.take(image))
    begin = runs.start.astype(np.int64) - first
    counts = runs.length.astype(np.int64) * per_token
    dummy = not len(runs)
    rows = int(counts.sum()) if not dummy else per_token
    blueprint = Blueprint()
    number = max(1, len(runs))
    blueprint.add("pixel_values", "<f4" if layout.pixels == "float32" else "|u1", (rows, shape.patch_bytes))
    blueprint.add("image_grid_thw", "<i8", (number, 3))
    bounds = _segments(grids, begin * per_token, counts) if not dummy else np.array([0, per_token])
    blueprint.add("cu_seqlens", "<i4", (len(bounds),))
    blueprint.add("image_ids", "<i8", (number,))
    blueprint.add("image_offsets", "<i8", (number,))
    send = routing.send_rows(rank)
    blueprint.add("send_rows", "<i8", (len(send),))
    blueprint.add("send_splits", "<i8", (routing.world_size,))
    blueprint.add("recv_splits", "<i8", (routing.world_size,))
    buffer = allocate(blueprint.nbytes)
    named = {spec.name: spec.view(buffer) for spec in blueprint.arrays}
    named["image_grid_thw"][:] = (1, shape.merge, shape.merge) if dummy else grids
    named["cu_seqlens"][:] = bounds
    named["image_ids"][:] = -1 if dummy else image
    named["image_offsets"][:] = 0 if dummy else begin * per_token
    named["send_rows"][:] = send
    named["send_splits"][:] = routing.send_splits(rank)
    named["recv_splits"][:] = routing.recv_splits(rank)
    pixels = named["pixel_values"]
    raw = pixels if pixels.dtype == np.uint8 else np.zeros(pixels.shape, np.uint8)
    if dummy:
        raw[:] = 0
    ends = offsets_of(counts)
    for at, which in enumerate(image.tolist()):
        patch = int(begin[at]) * per_token
        whole = samples.data(which).reshape(-1, shape.patch_bytes)
        raw[int(ends[at]) : int(ends[at + 1])] = whole[patch : patch + int(counts[at])]
    if raw is not pixels:
        normalize_patches(raw, layout.mean, layout.std, 1 / 255, pixels)
    return PackedMicrobatch(buffer, tuple(blueprint.arrays), {}, 0 if dummy else int(runs.length.sum()))


def _segments(grids: npt.NDArray[np.int32], begin: Int64s, counts: Int64s) -> Int64s:
    """Return where attention segments begin: every image, and every frame of a clip, attends to itself alone."""
    frame = np.prod(grids[:, 1:].astype(np.int64), axis=1)
    first, last = begin // frame, (begin + counts - 1) // frame
    frames = last - first + 1
    run = np.repeat(np.arange(len(frames)), frames)
    number = first[run] + np.arange(len(run)) - np.repeat(np.cumsum(frames) - frames, frames)
    low = np.maximum(begin[run], number * frame[run])
    high = np.minimum((begin + counts)[run], (number + 1) * frame[run])
    return offsets_of(high - low)
