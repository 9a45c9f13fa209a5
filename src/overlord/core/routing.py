"""How encoded images travel from the ranks that encode them to the ranks that hold their tokens.

A route is a run of tokens of one image that goes from one rank to another in one piece. Routes are
columns sorted by (sender, receiver, microbatch, position): the order in which a sender concatenates
what it sends, and the same arithmetic on every rank. The backward pass swaps senders and receivers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import expand_ranges

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Routing:
    """All routes of one step."""

    world_size: int
    sender: Int32s
    receiver: Int32s
    microbatch: Int32s
    """The backbone microbatch that needs the tokens."""
    position: Int32s
    """Where the first token of the run stands in the receiver's sequence of that microbatch."""
    length: Int32s
    """Tokens of the run."""
    sample: Int32s
    """The image's sample, as an index into the draw."""
    start: Int32s
    """The first token of the run inside its image."""
    row: Int32s
    """The first row of the run in what its sender has encoded."""
    heads: Int64s
    """[bucket, cp]: the ranks of the first pipeline stage that hold the tokens (the first of each TP group)."""
    images: tuple[Int64s, Int64s]
    """Patches of all images (or runs of one) in the order in which ranks encode them, and where each rank begins."""

    @cached_property
    def _sender_offsets(self) -> Int64s:
        return np.searchsorted(self.sender, np.arange(self.world_size + 1)).astype(np.int64)

    @cached_property
    def _arrivals(self) -> tuple[Int64s, Int64s]:
        """Routes sorted by receiver, then sender (as all-to-all delivers), and where each receiver begins."""
        order = np.argsort(self.receiver, kind="stable")
        return order, np.searchsorted(self.receiver[order], np.arange(self.world_size + 1)).astype(np.int64)

    def vit_cu_seqlens(self, rank: int) -> Int64s:
        """Return where the images of a rank begin in its sequence of patches (a clip counts as one).

        The images themselves are those of `plan.encoder.bin(rank, 0)`, in this order, which is the order in which
        their tokens are sent.
        """
        patches, offsets = self.images
        mine = patches[int(offsets[rank]) : int(offsets[rank + 1])]
        return np.concatenate([[0], np.cumsum(mine)]).astype(np.int64)

    def sent_by(self, rank: int) -> slice:
        """Return the routes that begin at a rank."""
        return slice(int(self._sender_offsets[rank]), int(self._sender_offsets[rank + 1]))

    def received_by(self, rank: int) -> Int64s:
        """Return the routes that end at a rank, in the order in which they arrive."""
        order, offsets = self._arrivals
        return order[int(offsets[rank]) : int(offsets[rank + 1])]

    def send_splits(self, rank: int) -> Int64s:
        """Return how many tokens a rank sends to each rank of the world."""
        mine = self.sent_by(rank)
        return np.bincount(self.receiver[mine], self.length[mine], self.world_size).astype(np.int64)

    def recv_splits(self, rank: int) -> Int64s:
        """Return how many tokens a rank gets from each rank of the world."""
        mine = self.received_by(rank)
        return np.bincount(self.sender[mine], self.length[mine], self.world_size).astype(np.int64)

    def recv_perm(self, rank: int) -> Int64s:
        """Return the arrivals of a rank in the order of its sequences: by microbatch, then position."""
        mine = self.received_by(rank)
        return np.lexsort((self.position[mine], self.microbatch[mine]))

    def send_rows(self, rank: int) -> Int64s:
        """Return the rows of what a rank has encoded, in the order in which it sends them."""
        mine = self.sent_by(rank)
        return expand_ranges(self.row[mine].astype(np.int64), self.length[mine].astype(np.int64))

    def arrivals(self, rank: int, microbatch: int) -> tuple[Int64s, Int64s]:
        """Return where a microbatch's image tokens stand in the rank's sequence, and their rows among all it received.

        So `embeddings[positions] = received[rows]` puts every image in its place.
        """
        mine = self.received_by(int(rank))
        lengths = self.length[mine].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        chosen = np.flatnonzero(self.microbatch[mine] == microbatch)
        chosen = chosen[np.argsort(self.position[mine[chosen]], kind="stable")]
        at = self.position[mine[chosen]].astype(np.int64)
        return expand_ranges(at, lengths[chosen]), expand_ranges(before[chosen], lengths[chosen])

    def scatter_index(self, rank: int, microbatch: int) -> Int64s:
        """Return the places of a microbatch's image tokens in the rank's sequence, in sequence order."""
        mine = self.received_by(rank)[self.recv_perm(rank)]
        mine = mine[self.microbatch[mine] == microbatch]
        return expand_ranges(self.position[mine].astype(np.int64), self.length[mine].astype(np.int64))

    def crossing_tokens(self) -> int:
        """Return how many tokens leave their rank."""
        return int(self.length[self.sender != self.receiver].sum(dtype=np.int64))
