"""The keys of images, clips and sounds in a microbatch: what there is room for, and how it is filled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from overlord.core.layout_specs import Layout
from overlord.transforms.images import normalize_patches
from overlord.transforms.media import Place
from overlord.transforms.packed import Array, Blueprint
from overlord.transforms.step_samples import KINDS, Items, Opening, StepSamples

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_VISION = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


@dataclass(frozen=True, slots=True)
class MediaShape:
    """What the media of a job look like in a batch: one shape for all of its sources."""

    patch_bytes: int = 0
    """Bytes of an image patch; 0 for a job without images and clips."""
    merge: int = 1
    """merge x merge patches become one token."""
    mels: int = 0
    """Mel bands of a sound; 0 for a job without sounds."""
    frames: int = 0
    """Frames of a sound, padding included."""


class MediaKeys:
    """The media of one microbatch."""

    def __init__(self, samples: StepSamples, items: Items, layout: Layout, shape: MediaShape, *, routed: bool) -> None:
        self._samples = samples
        self._items = items
        self._layout = layout
        self._shape = shape
        self._routed = routed
        """Whether images are encoded elsewhere, so that only their tokens are here."""
        self._grids = samples.grids_of(items)

    def vision_grids(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Return the grids of images and clips in the order of their tokens, and their seconds a temporal patch."""
        vision = self._items.take(np.flatnonzero(self._items.kind < 2))
        return self._samples.grids_of(vision), self._samples.seconds_of(vision)

    @cached_property
    def _of_kind(self) -> dict[str, Int64s]:
        found = {name: np.flatnonzero(self._items.kind == number) for number, name in enumerate(KINDS)}
        return {name: which for name, which in found.items() if len(which) and not (self._routed and name != "audio")}

    @property
    def _dummy(self) -> bool:
        return self._layout.dummy_image and self._shape.patch_bytes > 0 and not self._routed and not (
            "image" in self._of_kind or "video" in self._of_kind
        )  # fmt: skip

    def draw_up(self, blueprint: Blueprint) -> None:
        """Make room for what there is."""
        width = self._shape.patch_bytes
        dtype = "<f4" if self._layout.pixels == "float32" else "|u1"
        for kind, (pixels, grid) in _VISION.items():
            if kind in self._of_kind or (self._dummy and kind == "image"):
                grids = self._grids[self._of_kind[kind]] if kind in self._of_kind else self._dummy_grid
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
        """Fill the keys; return which of the items are stand-ins, and those that were found to be, with the reason."""
        bad = self._samples.bad(self._items)
        faults: list[tuple[int, str]] = []
        if self._dummy:
            named["pixel_values"][:] = 0
            named["image_grid_thw"][:] = self._dummy_grid
        for kind, which in self._of_kind.items():
            items = self._items.take(which)
            if kind == "audio":
                found, wrong = self._samples.fill(items, self._sounds(named, which), opening)
            else:
                found, wrong = self._fill_pixels(named, kind, which, items, opening)
            bad[which] = found
            faults += [(int(which[at]), reason) for at, reason in wrong]
        return bad, faults

    @property
    def _dummy_grid(self) -> npt.NDArray[np.int32]:
        return np.array([[1, self._shape.merge, self._shape.merge]], np.int32)

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
