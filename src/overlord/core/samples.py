"""Samples: their ids (SampleId), their metadata before decoding (META), positions in a source (Cursor, Part), seeds.

Metadata is one structured array per source or step, never an object per sample.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FILE_SHIFT = 32
"""A row number is file << 32 | row in the file: unique in its source, and the plain row for one file."""
META = np.dtype(
    [
        ("epoch", "<i4"),
        ("flags", "<i4"),
        ("group", "<i8"),
        ("offset", "<i8"),
        ("row", "<i8"),
        ("tokens", "<i4"),  # delivered tokens, after the overlength policy; of this part, where steps share a sample
        ("loss_tokens", "<i4"),
        ("image_tokens", "<i4"),  # of its images; of its clips or sounds where `flags` has CLIPS or SOUNDS
        ("images", "<i4"),
        ("bytes", "<u4"),
        ("start", "<i4"),  # first token of this part of the sample; 0 unless a step before has drawn its beginning
        ("items", "<i8"),  # 1 + the first row of its images in `Draw.items`; 0: at most one image, at the beginning
    ]
)
MetaArray = npt.NDArray[Any]
"""A one-dimensional array of dtype META."""
BAD = 1
"""Its bytes were read and cannot be decoded: a stand-in is delivered."""
ENDS_EPOCH = 2
"""The last row of its source in this epoch."""
SKIP = 4
"""Never drawn: filtered out, or dropped by the overlength policy."""
OVERLONG = 8
"""Longer than the context under overlength="error"."""
PLAIN = 16
"""Every token but the first of a piece counts in the loss, so that a cut costs exactly one label."""
CONTINUES = 32
"""The step has only a part of the sample: what follows it is drawn by a later step."""
CLIPS = 64
"""What `images` and `image_tokens` count are clips."""
SOUNDS = 128
"""What `images` and `image_tokens` count are sounds."""


class SampleId(NamedTuple):
    """One sample of one epoch.

    Example:
        >>> str(SampleId("web", (2 << 32) + 7, 0))
        'web:2:7@0'
    """

    source: str
    row: int
    epoch: int

    @property
    def file(self) -> int:
        """Which file of the source (in sorted order) holds the row."""
        return self.row >> FILE_SHIFT

    @property
    def row_in_file(self) -> int:
        """The row inside its file."""
        return self.row & ((1 << FILE_SHIFT) - 1)

    def __str__(self) -> str:
        return f"{self.source}:{self.file}:{self.row_in_file}@{self.epoch}"


class Cursor(NamedTuple):
    """A position in a source's order; the sample at it has not been taken yet."""

    epoch: int
    group: int
    offset: int


class Part(NamedTuple):
    """The groups of a source's order that one of several loader hosts owns: every `of`-th, from the `number`-th on."""

    number: int = 0
    of: int = 1

    def has(self, group: int) -> bool:
        """Whether a group is among them.

        Example:
            >>> [group for group in range(7) if Part(1, 3).has(group)]
            [1, 4]
        """
        return max(group, 0) % self.of == self.number

    def rows(self, meta: MetaArray) -> npt.NDArray[np.int64]:
        """Return which of some samples are in these groups."""
        return np.flatnonzero(np.maximum(meta["group"], 0) % self.of == self.number)


WHOLE = Part()
"""All of a source."""


def dtype_to_text(dtype: np.dtype[Any]) -> str:
    """Return a dtype as text, for arrays that travel or are stored as raw bytes.

    Raises:
        TypeError: for Python objects, and for records other than META.
    """
    if dtype.names is None and not dtype.hasobject:
        return dtype.str
    if dtype == META:
        return "META"
    raise TypeError(f"an array of dtype {dtype} cannot be written as raw bytes")


@functools.lru_cache(maxsize=256)
def dtype_from_text(text: str) -> np.dtype[Any]:
    """Read a dtype that `dtype_to_text` wrote."""
    return META if text == "META" else np.dtype(text)


def padded(nbytes: int) -> int:
    """Return a size rounded up, so that what follows begins at a multiple of 64 bytes.

    Example:
        >>> padded(0), padded(1), padded(64)
        (0, 64, 64)
    """
    return -(-nbytes // 64) * 64


def take_meta(meta: MetaArray, rows: npt.NDArray[np.integer]) -> MetaArray:
    """Return some rows of an array of dtype META.

    Rows are moved as whole words: numpy's own indexing copies a record field by field, several times as slow.
    """
    words = np.ascontiguousarray(meta).view(np.int64).reshape(len(meta), -1)
    return words.take(rows, axis=0).view(META).reshape(-1)


# Keys and permutations, the only source of randomness. numpy's generators may change between versions, so a
# permutation is the sort order of a bijective 64-bit hash of its key: the same on every machine and version.


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive(seed: int, *labels: str | int) -> int:
    """Return a 64-bit key for a purpose; other labels give an unrelated key.

    Example:
        >>> derive(0, "web", 1) == derive(0, "web", 1)
        True
        >>> derive(0, "web", 1) == derive(0, "web", 2)
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for label in (seed, *labels):
        part = str(label).encode()
        digest.update(b"%d:" % len(part) + part)
    return int.from_bytes(digest.digest(), "little")


def hash64(key: int, values: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Hash each value under a key (splitmix64; a bijection for one key, so there are no ties)."""
    x = values.astype(np.uint64) * _GOLDEN + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(key: int, count: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(count) that depends on nothing but the key.

    Example:
        >>> sorted(permutation(7, 4).tolist())
        [0, 1, 2, 3]
    """
    return np.argsort(hash64(key, np.arange(count)), kind="stable")


CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""The pixel normalisation that CLIP's and Qwen-VL's encoders were trained with; trainers import it without a job."""
