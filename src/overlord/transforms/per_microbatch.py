"""Microbatch transformations: pieces packed into one sequence, in the keys a Hugging Face model takes.

A microbatch is laid out first (names, types, shapes) and filled second, so that it can be written
straight into shared memory, once per host, already cut for the context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from overlord.core.messages import Payload
from overlord.core.plan import LoadingPlan, Pieces
from overlord.core.ragged import Ragged, offsets_of
from overlord.transforms.per_rank import zigzag_indices

IGNORE_INDEX = -100
ALIGNMENT = 64
"""Arrays begin at multiples of this inside a buffer."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array inside a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    def view(self, buffer: npt.NDArray[np.uint8]) -> Array:
        """Return the array inside its buffer."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class PackedMicrobatch:
    """One microbatch of one bucket, written into one buffer."""

    buffer: npt.NDArray[np.uint8]
    arrays: tuple[ArraySpec, ...]
    """Named `key` when all ranks share it, `key@r` for context-parallel rank r, `meta.x` for provenance."""
    scalars: Mapping[str, int]
    real_tokens: int
    """Tokens that are not padding."""


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The payloads of one step joined, so that pieces can be gathered from one array."""

    tokens: Ragged
    loss: Ragged
    row_of: npt.NDArray[np.int64]
    """Row of each drawn sample in the joined arrays."""
    image_of: npt.NDArray[np.int64]
    """(payload, row) of each drawn sample's image as payload << 32 | row, or -1."""
    payloads: tuple[Payload, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.tokens.nbytes + self.loss.nbytes + sum(p.patches.nbytes for p in self.payloads if p.patches)


def join_payloads(plan: LoadingPlan, payloads: list[Payload]) -> StepSamples:
    """Join the payloads of a step; every source's rows are in drawing order already."""
    row_of = np.empty(len(plan.draw), np.int64)
    image_of = np.full(len(plan.draw), -1, np.int64)
    base = 0
    for number, payload in enumerate(payloads):
        mine = np.flatnonzero(plan.draw.source == payload.source)
        row_of[mine] = base + np.arange(len(mine))
        if payload.patches is not None:
            image_of[mine] = (number << 32) + np.arange(len(mine))
        base += len(mine)
    return StepSamples(
        tokens=Ragged.concat([p.tokens for p in payloads]),
        loss=Ragged.concat([p.loss for p in payloads]),
        row_of=row_of,
        image_of=image_of,
        payloads=tuple(payloads),
    )


def pack_microbatch(
    plan: LoadingPlan,
    samples: StepSamples,
    bucket: int,
    microbatch: int,
    *,
    cp: int,
    patch_bytes: int,
    allocate: Callable[[int], npt.NDArray[np.uint8]],
) -> PackedMicrobatch:
    """Pack the pieces of one bin into one sequence and cut it for the context-parallel ranks.

    Args:
        plan: The step's plan.
        samples: The step's samples.
        bucket: The consumer: a data-parallel rank, or a rank of hybrid data parallelism.
        microbatch: Microbatch of the step.
        cp: Context-parallel ranks of the mesh.
        patch_bytes: Bytes of one image patch; 0 for a job without images.
        allocate: Gives a buffer of so many bytes.
    """
    pieces, chosen = plan.bin(bucket, microbatch), plan.bin_range(bucket, microbatch)
    padded = plan.padded[chosen]
    dummy = len(padded) == 0
    slices = _slices(plan, chosen, bucket, cp)
    cu_seqlens = offsets_of([plan.pad_multiple] if dummy else padded).astype(np.int32)
    total = int(cu_seqlens[-1])
    images = _images_of(samples, pieces)
    patches = sum(_patch_count(samples, image) for image in images)
    layout = _layout(total, slices, cp > 1, len(cu_seqlens) - 1, len(images), patches, patch_bytes)
    buffer = allocate(layout[-1].offset + layout[-1].nbytes + ALIGNMENT)
    arrays = {spec.name: spec.view(buffer) for spec in layout}
    _fill_tokens(arrays, samples, pieces, cu_seqlens, slices)
    _fill_images(arrays, samples, images, patch_bytes)
    _fill_meta(arrays, plan, pieces, dummy)
    return PackedMicrobatch(
        buffer=buffer,
        arrays=tuple(layout),
        scalars={
            "max_length_q": int(np.diff(cu_seqlens).max()),
            "max_length_k": int(np.diff(cu_seqlens).max()),
            "meta.local_cp_size": slices[0].of,
        },
        real_tokens=int(pieces.length.sum()),
    )


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's part of a sequence."""

    suffix: str
    """Of the names of its arrays."""
    rank: int
    of: int
    """Ranks that share the sequence."""


def _slices(plan: LoadingPlan, chosen: slice, bucket: int, cp: int) -> list[Slice]:
    if plan.cp_sizes is not None and plan.first_ranks is not None and chosen.stop > chosen.start:
        shared = int(plan.cp_sizes[chosen.start])
        return [Slice("", bucket - int(plan.first_ranks[chosen.start]), shared)]
    if cp == 1 or plan.axis == "CP" or "CP" in plan.broadcast:
        return [Slice("", 0, 1)]  # whole: the trainer cuts what it broadcasts
    return [Slice(f"@{rank}", rank, cp) for rank in range(cp)]


def _layout(
    total: int, slices: list[Slice], shifted: bool, segments: int, images: int, patches: int, patch_bytes: int
) -> list[ArraySpec]:
    wanted: list[tuple[str, str, tuple[int, ...]]] = []
    keys = ["input_ids", "position_ids", "labels"] + (["shift_labels"] if shifted else [])
    for key in keys:
        wanted += [(f"{key}{one.suffix}", "<i8", (1, total // one.of)) for one in slices]
    wanted += [("cu_seq_lens_q", "<i4", (segments + 1,)), ("cu_seq_lens_k", "<i4", (segments + 1,))]
    if patch_bytes:
        wanted += [("pixel_values", "|u1", (patches, patch_bytes)), ("image_grid_thw", "<i8", (images, 3))]
    wanted += [
        ("meta.source", "<i4", (segments,)),
        ("meta.epoch", "<i4", (segments,)),
        ("meta.row", "<i8", (segments,)),
    ]
    wanted += [("meta.segment_offsets", "<i4", (segments,)), ("meta.segment_lengths", "<i4", (segments,))]
    specs: list[ArraySpec] = []
    offset = 0
    for name, dtype, shape in wanted:
        specs.append(ArraySpec(name, dtype, shape, offset))
        offset += -(-specs[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return specs


def _fill_tokens(
    arrays: dict[str, Array], samples: StepSamples, pieces: Pieces, cu: Array, slices: list[Slice]
) -> None:
    starts = samples.tokens.offsets[samples.row_of[pieces.sample]] + pieces.start
    whole = slices[0].of == 1
    keys = ("input_ids", "labels", "position_ids")
    full = [arrays[key].reshape(-1) if whole else np.empty(int(cu[-1]), np.int64) for key in keys]
    _pack(samples.tokens.values, samples.loss.values, starts, pieces.length, cu, *full)
    # The label of a slice's last token lies in another rank's slice, so the shift is done before slicing.
    shifted = np.append(full[1][1:], IGNORE_INDEX)
    if whole and "shift_labels" in arrays:
        arrays["shift_labels"].reshape(-1)[:] = shifted
    for one in [] if whole else slices:
        chosen = zigzag_indices(cu, one.of, one.rank)
        for key, values in zip((*keys, "shift_labels"), (*full, shifted), strict=True):
            np.take(values, chosen, out=arrays[f"{key}{one.suffix}"].reshape(-1))
    arrays["cu_seq_lens_q"][:] = cu
    arrays["cu_seq_lens_k"][:] = cu


@numba.njit(nogil=True, cache=True)
def _pack(
    values: Array, loss: Array, starts: Array, lengths: Array, cu: Array, ids: Array, labels: Array, positions: Array
) -> None:
    for segment in range(len(cu) - 1):
        begin, end = cu[segment], cu[segment + 1]
        length = lengths[segment] if segment < len(lengths) else 0
        for i in range(end - begin):
            at = begin + i
            positions[at] = i
            if i < length:
                token = values[starts[segment] + i]
                ids[at] = token
                labels[at] = token if i > 0 and loss[starts[segment] + i] else IGNORE_INDEX
            else:
                ids[at] = 0
                labels[at] = IGNORE_INDEX


def warm_packing() -> None:
    """Load the kernels of a microbatch's way, so that the first one does not wait for a compiler."""
    ids, labels, positions = np.empty((3, 2), np.int64)
    for kind in (np.int32, np.int64, np.uint8):
        Ragged(np.ones(2, kind), np.arange(3)).take(np.array([1, 0]))
    ragged = Ragged(np.ones(2, np.int32), np.array([0, 2]))
    ones = np.ones(1, np.int32)
    cu_seqlens = np.array([0, 2], np.int32)
    _pack(ragged.values, np.ones(2, np.uint8), ragged.offsets[:1], ones, cu_seqlens, ids, labels, positions)


def _images_of(samples: StepSamples, pieces: Pieces) -> list[tuple[int, int]]:
    """Return (payload, row) of the images of a bin, in sequence order; an image is in its sample's first piece."""
    found = samples.image_of[pieces.sample[pieces.start == 0]]
    return [(int(i) >> 32, int(i) & 0xFFFFFFFF) for i in found[found >= 0]]


def _patch_count(samples: StepSamples, image: tuple[int, int]) -> int:
    grids = samples.payloads[image[0]].grids
    assert grids is not None
    return int(np.prod(grids[image[1]]))


def _fill_images(
    arrays: dict[str, Array], samples: StepSamples, images: list[tuple[int, int]], patch_bytes: int
) -> None:
    at = 0
    for number, (payload_number, row) in enumerate(images):
        payload = samples.payloads[payload_number]
        assert payload.patches is not None and payload.grids is not None
        pixels = payload.patches[row]
        count = len(pixels) // patch_bytes
        arrays["pixel_values"][at : at + count] = pixels.reshape(count, patch_bytes)
        arrays["image_grid_thw"][number] = payload.grids[row]
        at += count


def _fill_meta(arrays: dict[str, Array], plan: LoadingPlan, pieces: Pieces, dummy: bool) -> None:
    if dummy:
        for name in ("meta.source", "meta.epoch", "meta.row"):
            arrays[name][:] = -1
        arrays["meta.segment_offsets"][:] = 0
        arrays["meta.segment_lengths"][:] = 0
        return
    arrays["meta.source"][:] = plan.draw.source[pieces.sample]
    arrays["meta.epoch"][:] = plan.draw.meta["epoch"][pieces.sample]
    arrays["meta.row"][:] = plan.draw.meta["row"][pieces.sample]
    arrays["meta.segment_offsets"][:] = pieces.start
    arrays["meta.segment_lengths"][:] = pieces.length
