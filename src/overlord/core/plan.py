"""The loading plan of one step: which samples were drawn, and where each piece of them goes.

A plan is a struct of arrays with a canonical form and two digests: `order` (which samples, in which
order: mesh and strategy do not matter) and `plan` (where every piece goes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from overlord.core.samples import MetaArray, SampleId

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """The samples of one global batch in drawing order, before any mesh or strategy is looked at."""

    step: int
    names: tuple[str, ...]
    """The job's sources; `source` indexes it."""
    source: Int32s
    meta: MetaArray
    weights: tuple[float, ...]
    """The mixture that was in force (at the beginning of the step)."""

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def digest(self) -> str:
        """The order digest of the step."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\n".join(self.names).encode())
        for column in (self.source, self.meta["row"], self.meta["epoch"]):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def sample_id(self, sample: int) -> SampleId:
        """Return the id of one drawn sample."""
        meta = self.meta[sample]
        return SampleId(self.names[self.source[sample]], int(meta["row"]), int(meta["epoch"]))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Drawn samples cut to the context length; most samples are one piece."""

    sample: Int32s
    """Index into the draw."""
    start: Int32s
    """First token of the piece inside its sample."""
    length: Int32s

    def take(self, order: npt.NDArray[np.integer]) -> Pieces:
        """Return the pieces in another order."""
        return Pieces(self.sample[order], self.start[order], self.length[order])


@dataclass(frozen=True)
class LoadingPlan:
    """Where every piece of one step goes."""

    draw: Draw
    pieces: Pieces
    """Sorted by bucket, microbatch and place inside it."""
    bin_offsets: Int64s
    """Pieces of bucket d, microbatch m are bin_offsets[d * M + m] .. bin_offsets[d * M + m + 1]."""
    num_buckets: int
    num_microbatches: int
    pad_multiple: int
    """Every piece is padded to a multiple of this, so that CP ranks can slice it."""
    global_loss_tokens: int

    @property
    def step(self) -> int:
        """The step this plan is for."""
        return self.draw.step

    def bin(self, bucket: int, microbatch: int) -> Pieces:
        """Return the pieces of one microbatch of one bucket, in their order."""
        at = bucket * self.num_microbatches + microbatch
        chosen = slice(int(self.bin_offsets[at]), int(self.bin_offsets[at + 1]))
        return Pieces(self.pieces.sample[chosen], self.pieces.start[chosen], self.pieces.length[chosen])

    @cached_property
    def digest(self) -> str:
        """The plan digest of the step."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(self.draw.digest.encode())
        digest.update(b"%d %d %d" % (self.num_buckets, self.num_microbatches, self.pad_multiple))
        for column in (self.pieces.sample, self.pieces.start, self.pieces.length, self.bin_offsets):
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def loads(self, costs: Int64s) -> Int64s:
        """Sum piece costs per bin: an array [bucket, microbatch]."""
        sums = np.zeros(len(self.bin_offsets) - 1, np.int64)
        bins = np.repeat(np.arange(len(sums)), np.diff(self.bin_offsets))
        np.add.at(sums, bins, costs)
        return sums.reshape(self.num_buckets, self.num_microbatches)


def cut_pieces(tokens: npt.NDArray[np.integer], context_length: int) -> Pieces:
    """Cut samples of these delivered lengths into pieces of at most the context length.

    Example:
        >>> pieces = cut_pieces(np.array([3, 10]), 4)
        >>> pieces.sample.tolist(), pieces.start.tolist(), pieces.length.tolist()
        ([0, 1, 1, 1], [0, 0, 4, 8], [3, 4, 4, 2])
    """
    counts = np.maximum(-(-tokens.astype(np.int64) // context_length), 1)
    sample = np.repeat(np.arange(len(tokens)), counts)
    first = np.cumsum(counts) - counts
    start = (np.arange(len(sample)) - first[sample]) * context_length
    length = np.minimum(tokens[sample] - start, context_length)
    return Pieces(sample.astype(np.int32), start.astype(np.int32), length.astype(np.int32))


def chain_digest(digests: Sequence[str]) -> str:
    """Return one digest for a sequence of step digests.

    Example:
        >>> chain_digest(["a", "b"]) == chain_digest(["a", "b"])
        True
    """
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=16).hexdigest()
