"""A microbatch in one block of memory: which arrays lie where. Laid out first, filled second.

So it can be written straight into shared memory, once per host, already cut for the ranks that share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_SIZES = {"<i8": 8, "<i4": 4, "<f4": 4, "|u1": 1}

ALIGNMENT = 64
"""Arrays begin at multiples of this inside a buffer."""
_STRIDE = 16
"""Slices of ranks begin at multiples of so many elements, which is at least one cache line for every type."""

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class ArraySpec(NamedTuple):
    """One array inside a buffer. A tuple, since a microbatch has a dozen and little time for them."""

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
    real_tokens: int
    """Tokens that are not padding."""

    def named(self) -> dict[str, Array]:
        """Return every array by its name."""
        return {spec.name: spec.view(self.buffer) for spec in self.arrays}


class Blueprint:
    """Lays arrays out in a buffer that is still to be allocated."""

    def __init__(self) -> None:
        self.arrays: list[ArraySpec] = []
        self.nbytes = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...], *others: str) -> int:
        """Add one array, under several names if need be; return where it begins."""
        at = self.nbytes
        self.arrays.append(ArraySpec(name, dtype, shape, at))
        self.nbytes = at - (-math.prod(shape) * _SIZES[dtype] // ALIGNMENT) * ALIGNMENT
        for other in others:
            self.arrays.append(ArraySpec(other, dtype, shape, at))
        return at

    def add_slices(self, names: tuple[str, ...], dtype: str, shape: tuple[int, ...], stride: int) -> int:
        """Add one array for each rank that shares a sequence, `stride` elements apart; return where they begin."""
        begin = at = self.nbytes
        width = stride * _SIZES[dtype]
        for name in names:
            self.arrays.append(ArraySpec(name, dtype, shape, at))
            at += width
        self.nbytes = at
        return begin


def stride_of(elements: int) -> int:
    """Return how far apart the slices of two ranks begin, in elements.

    Example:
        >>> stride_of(100)
        112
    """
    return -(-elements // _STRIDE) * _STRIDE
