"""Contrastive pairs from plain text: the two hooks that `train_pairs.py` launches with.

`two_crops` makes every document an anchor and a positive: two crops of it, drawn by the sample's seed, one behind the
other. `pair_column` tells the trainer which tokens belong to which crop: the column `pair_ids`, as long as the sequence
of the microbatch, is 2i in the anchor of segment i, 2i + 1 in its positive, and -1 in all other places. Other documents
of the microbatch are the negatives. In a job file:

    launch: {loader_do_plan: "pair_hooks:two_crops", constructor_do_plan: "pair_hooks:pair_column"}

A document that is cut into pieces has no whole pair: use overlength "truncate" or "drop".
"""

from __future__ import annotations

from typing import Any

import numpy as np

import overlord as ol

MIN_CROP = 4
"""Tokens of the shortest crop: shorter documents make no pair."""


def crops(part: ol.hooks.LoaderPart | ol.hooks.MicrobatchPart) -> tuple[Any, Any, Any, Any]:
    """Return of every token its sample, its place there and its crop (0, 1, or -1 for the rest); and crop lengths."""
    lengths = part.tokens.lengths
    half = np.where(part.bad | (lengths < 2 * MIN_CROP), 0, lengths // 2)
    sample = np.repeat(np.arange(len(part)), lengths)
    place = np.arange(len(sample)) - np.repeat(part.tokens.offsets[:-1], lengths)
    crop = np.where(place < 2 * half[sample], place // np.maximum(half[sample], 1), -1)
    return sample, place, crop, half


def two_crops(part: ol.hooks.LoaderPart) -> dict[str, Any]:
    """Replace every document by two crops of itself; what is left over counts in no loss."""
    sample, place, crop, half = crops(part)
    room = (part.tokens.lengths - half + 1).astype(np.uint64)
    first = np.stack([part.seeds % room, (part.seeds >> np.uint64(32)) % room]).astype(np.int64)
    inside = np.where(crop >= 0, first[crop, sample] + place - crop * half[sample], place)
    return {"tokens": part.tokens.values[part.tokens.offsets[sample] + inside], "loss": crop >= 0}


def pair_column(part: ol.hooks.MicrobatchPart) -> dict[str, Any]:
    """Return which crop each token of the microbatch belongs to."""
    if part.starts.any():
        raise ValueError("a document is cut into pieces, and its crops with it; use overlength 'truncate' or 'drop'")
    sample, place, crop, _ = crops(part)
    pair_ids = np.full((1, int(part.cu_seqlens[-1])), -1, np.int64)
    pair_ids[0, part.cu_seqlens[sample] + place] = np.where(crop >= 0, 2 * sample + crop, -1)
    return {"pair_ids": pair_ids}


two_crops.version = "1"  # type: ignore[attr-defined]
pair_column.version = "1"  # type: ignore[attr-defined]
