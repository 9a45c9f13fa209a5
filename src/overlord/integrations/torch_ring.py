"""Ring attention: causal attention over sequences that several ranks share (ByteScale's dist-attn).

    Ring             the ranks of one microbatch, and this rank's part of its segments
    ring_attention   attention of this rank's queries to the keys and values of all of them
    attention_in     makes a ring the one that attention layers of a model use, as `HybridParallel` does

A segment of N ranks is cut into 2 N chunks, and rank i has chunks i and 2 N - 1 - i one behind the other ("zigzag"), so
that causal attention costs every rank the same. Keys and values travel from rank to rank. With those of rank j:

    j = i   plain causal attention of the slice to itself: its two chunks are in order
    j < i   all queries attend to the first chunks of j; its second chunks are later than all queries
    j > i   only queries of the second chunks attend, to all of j: they are later than both of its chunks

A ring is a list of ranks in one process group; no group is made for it. NCCL lets some ranks of a group exchange with
`batch_isend_irecv` once all of them have met in one collective, which `HybridParallel` runs when it is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from overlord.errors import ServiceLost, SpecError
from overlord.integrations.torch_batches import TorchBatch

Int64s = npt.NDArray[np.int64]


class Bounds:
    """Where segments begin in a sequence of tokens, for the kernels."""

    def __init__(self, lengths: Int64s) -> None:
        ends = np.cumsum(lengths)
        self.spans: list[tuple[int, int]] = list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))
        self.longest = int(lengths.max(initial=0))
        self._cu = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the offsets of the segments as a tensor on a device, copied there once."""
        if self._cu.device != device:
            self._cu = self._cu.to(device)
        return self._cu


class Half:
    """The first or the second chunks of all segments of a slice."""

    def __init__(self, bounds: Bounds, tokens: Int64s) -> None:
        self.bounds = bounds
        # The chunk of a single segment is a view of its slice.
        self._view = (int(tokens[0]), len(tokens)) if len(bounds.spans) == 1 else None
        self._index = torch.from_numpy(tokens)

    def _on(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._index.device != tensor.device:
            self._index = self._index.to(tensor.device)
        return self._index

    def of(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the part of a tensor of the slice, along the dimension of its tokens."""
        return tensor.narrow(dim, *self._view) if self._view else tensor.index_select(dim, self._on(tensor))

    def add(self, tensor: torch.Tensor, part: torch.Tensor) -> None:
        """Add to the part of a tensor."""
        if self._view:
            tensor.narrow(0, *self._view).add_(part)
        else:
            tensor.index_add_(0, self._on(tensor), part.to(tensor.dtype))

    def put(self, tensor: torch.Tensor, part: torch.Tensor, dim: int = 0) -> None:
        """Write the part of a tensor."""
        if self._view:
            tensor.narrow(dim, *self._view).copy_(part)
        else:
            tensor.index_copy_(dim, self._on(tensor), part)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A tensor on its way to the next rank of a ring, and the one that comes from the rank before."""

    works: list[Any]
    sent: torch.Tensor
    """Kept until it is sent."""
    arriving: torch.Tensor


class Ring:
    """The ranks that share the sequences of one microbatch, and this rank's slices of them.

    Example:
        The attention of one layer, without `HybridParallel`::

            ring = Ring.of(batch)
            out = ring_attention(q, k, v, ring)      # [tokens, heads, size] of this rank
    """

    def __init__(
        self,
        cu_seqlens: npt.ArrayLike,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        *,
        group: Any = None,
        lost: Callable[[Exception], Exception] | None = None,
    ) -> None:
        """Say which ranks share a microbatch.

        Args:
            cu_seqlens: Where segments begin in the whole sequence, padding included: `batch.meta.cu_seqlens`.
            ranks: The global ranks that share them, in the order of their slices: `batch.meta.ranks`.
            rank: This rank.
            group: A process group that all of them are in (default: the world).
            lost: Returns the error to raise where an exchange with a neighbour fails.

        Raises:
            SpecError: The segments cannot be cut for so many ranks.
        """
        whole: Int64s = np.diff(np.asarray(cu_seqlens, np.int64)).astype(np.int64)
        count = len(ranks)
        if rank not in ranks or len(set(ranks)) != count:
            raise SpecError(
                f"Ring: rank {rank} is not one of {list(ranks)}, each once; its neighbours are unknown. Give "
                "`batch.meta.ranks` and the rank that the batch was delivered to."
            )
        wrong = np.flatnonzero(whole % (2 * count)) if count > 1 else np.empty(0, np.int64)
        if len(wrong):
            raise SpecError(
                f"Ring: segment {int(wrong[0])} has {int(whole[wrong[0]])} tokens, which {count} ranks cannot cut into "
                f"{2 * count} chunks. Take batches with slicing='zigzag', whose segments are padded for that."
            )
        self.ranks = tuple(ranks)
        self.place = self.ranks.index(rank)
        """The place of this rank in the ring."""
        self.group = group
        self.calls = 0
        """How often attention was computed over this ring."""
        self._lengths = whole // count
        self._lost = lost or _lost

    @classmethod
    def of(cls, batch: TorchBatch, *, group: Any = None, lost: Callable[[Exception], Exception] | None = None) -> Ring:
        """Return the ring of a microbatch.

        Raises:
            SpecError: Its sequences are cut in another way than rings need.
        """
        meta = batch.meta
        if meta.local_cp_size > 1 and meta.slicing != "zigzag":
            raise SpecError(
                f"ring attention: the layout's slicing is {meta.slicing!r}, and a ring needs slices of equal cost from "
                "every segment; queries would see keys of later tokens. Launch with slicing='zigzag'."
            )
        rank = dist.get_rank() if dist.is_initialized() else meta.ranks[0]
        return cls(meta.cu_seqlens, meta.ranks, rank, group=group, lost=lost)

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Ring(ranks={list(self.ranks)}, place={self.place}, tokens={self.tokens})"

    @property
    def tokens(self) -> int:
        """Tokens of this rank's slices."""
        return int(self._lengths.sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest segment, over all ranks."""
        return int(self._lengths.max(initial=0)) * len(self)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position of each token of this rank inside its segment."""
        within = np.arange(self.tokens) - np.repeat(np.cumsum(self._lengths) - self._lengths, self._lengths)
        chunk = np.repeat(self._lengths // 2, self._lengths)
        # The chunks before the first one, or between the two: place 0 begins at 0, and the last one has neighbours.
        skipped = np.where(within < chunk, self.place, 2 * len(self) - 2 - self.place) if len(self) > 1 else 0
        return torch.from_numpy(within + skipped * chunk)

    @cached_property
    def bounds(self) -> Bounds:
        """Where this rank's slices begin."""
        return Bounds(self._lengths)

    @cached_property
    def halves(self) -> tuple[Half, Half]:
        """The first and the second chunks of this rank's slices."""
        chunk = self._lengths // 2
        begins = np.cumsum(self._lengths) - self._lengths
        within = np.arange(int(chunk.sum())) - np.repeat(np.cumsum(chunk) - chunk, chunk)
        bounds, first = Bounds(chunk), np.repeat(begins, chunk) + within
        return Half(bounds, first), Half(bounds, first + np.repeat(chunk, chunk))

    def send_on(self, tensor: torch.Tensor) -> Exchange:
        """Begin to send a tensor to the next rank, and to receive the one of the rank before."""
        arriving = torch.empty_like(tensor)
        ahead = self.ranks[(self.place + 1) % len(self)]
        behind = self.ranks[self.place - 1]
        try:
            sending = dist.P2POp(dist.isend, tensor, ahead, self.group)
            receiving = dist.P2POp(dist.irecv, arriving, behind, self.group)
            return Exchange(dist.batch_isend_irecv([sending, receiving]), tensor, arriving)
        except RuntimeError as error:
            raise self._lost(error) from error

    def received(self, exchange: Exchange) -> torch.Tensor:
        """Wait for an exchange, and return what arrived."""
        try:
            for work in exchange.works:
                work.wait()
            return exchange.arriving
        except RuntimeError as error:  # a rank of the ring ended, or did not answer in time
            raise self._lost(error) from error


def _lost(error: Exception) -> Exception:
    return ServiceLost(
        f"a rank of this ring ended or did not answer, so the microbatch cannot be computed ({error}). Its own message "
        "says why."
    )


# The ring that attention layers use. Backward of a CUDA graph runs in threads of autograd, and checkpointed layers run
# their forward there again: so it belongs to the process, not to a context or a thread.
_current: Ring | None = None


@contextlib.contextmanager
def attention_in(ring: Ring) -> Iterator[Ring]:
    """Let attention layers of models use a ring (`ring_attention` without one), until its backward is done."""
    global _current
    before, _current = _current, ring
    try:
        yield ring
    finally:
        _current = before


def current_ring() -> Ring:
    """Return the ring of the microbatch that is computed.

    Raises:
        SpecError: None is.
    """
    if _current is None:
        raise SpecError(
            "ring attention: no microbatch is being computed, so the ranks that share its sequences are unknown. Take "
            "batches from HybridParallel.microbatches(), or run the model inside attention_in(Ring.of(batch))."
        )
    return _current


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: Ring | TorchBatch | None = None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Return causal attention of this rank's tokens, each to its own segment, over all ranks that share it.

    Every rank of the ring must call it, in the same order of microbatches and layers. Gradients come back through the
    ring too, so every rank must run its backward.

    Args:
        q: Queries [tokens, heads, size] of this rank's slices.
        k: Keys [tokens, groups, size]; heads are a multiple of groups.
        v: Values, like the keys.
        ring: The ring of the microbatch, or its batch; by default that of the microbatch `HybridParallel` has handed
            out.
        scale: The factor of the scores (default: 1 / sqrt(size)).

    Raises:
        SpecError: The shapes do not fit each other or the microbatch, or the type has no kernel.
        ServiceLost: A rank of the ring ended.
    """
    found = current_ring() if ring is None else ring if isinstance(ring, Ring) else Ring.of(ring)
    _check_shapes(q, k, v, found)
    found.calls += 1
    return _RingAttention.apply(q, k, v, found, q.shape[-1] ** -0.5 if scale is None else float(scale))


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring) -> None:
    fits = q.dim() == 3 and k.shape == v.shape and k.dim() == 3 and q.shape[2] == k.shape[2]
    if not fits or q.shape[1] % k.shape[1] or not q.dtype == k.dtype == v.dtype:
        shapes = ", ".join(f"{name} {list(one.shape)} {one.dtype}" for name, one in zip("qkv", (q, k, v), strict=True))
        raise SpecError(
            f"ring_attention: {shapes}; it takes q [tokens, heads, size] and k and v [tokens, groups, size] of one "
            "type and size, heads a multiple of groups."
        )
    if not len(q) == len(k) == ring.tokens:
        raise SpecError(
            f"ring_attention: {len(q)} queries and {len(k)} keys, where this rank has {ring.tokens} tokens of the "
            "microbatch; segments would be cut in wrong places. Pass all tokens of the batch, and no others."
        )
    if q.is_cuda and q.dtype not in (torch.float16, torch.bfloat16):
        raise SpecError(
            f"ring_attention: {q.dtype} on {q.device}, and flash attention there computes in float16 and bfloat16 "
            "only. Run the model in bfloat16, or under torch.autocast."
        )


class _RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """The rounds of the ring, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring, scale: float) -> torch.Tensor:
        if len(ring) == 1:
            out, lse = forward_block(ring, 0, q, k, v, scale)
        else:
            out, lse = _all_turns(ring, q, torch.stack((k, v)), scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, scale, known = ctx.ring, ctx.scale, (grad.contiguous(), out, lse)
        if len(ring) == 1:
            return (*backward_block(ring, 0, known, q, k, v, scale), None, None)
        dq, dkv = _all_turns_back(ring, known, q, torch.stack((k, v)), scale)
        return dq, dkv[0], dkv[1], None, None


def _all_turns(ring: Ring, q: torch.Tensor, kv: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and its log-sum-exp over the keys of all ranks; the next ones arrive while a block computes."""
    last, coming = len(ring) - 1, ring.send_on(kv)
    out, lse = forward_block(ring, ring.place, q, kv[0], kv[1], scale)
    out = out.to(torch.promote_types(q.dtype, torch.float32))  # partial results are summed in this type
    for turn in range(1, len(ring)):
        of, kv = (ring.place - turn) % len(ring), ring.received(coming)
        if turn < last:
            coming = ring.send_on(kv)
        merge_block(ring, of, (out, lse), forward_block(ring, of, q, kv[0], kv[1], scale))
    return out.to(q.dtype), lse


def _all_turns_back(
    ring: Ring, known: tuple[torch.Tensor, torch.Tensor, torch.Tensor], q: torch.Tensor, kv: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of this rank's queries, and of its keys and values.

    The gradients of keys and values follow them from rank to rank, one turn behind; one more turn returns them to their
    own rank. Both neighbours begin their exchanges in the same order: keys and values, then gradients.
    """
    exact, kind = torch.promote_types(q.dtype, torch.float32), kv.dtype
    dq, last = torch.zeros_like(q, dtype=exact), len(ring) - 1
    coming = returning = None
    for turn in range(len(ring)):
        of = (ring.place - turn) % len(ring)
        kv = kv if coming is None else ring.received(coming)
        coming = ring.send_on(kv) if turn < last else None
        added = torch.zeros(kv.shape, dtype=exact, device=kv.device)
        add_gradients(ring, of, (dq, added[0], added[1]), backward_block(ring, of, known, q, kv[0], kv[1], scale))
        if returning is not None:
            added += ring.received(returning)
        returning = ring.send_on(added)
    assert returning is not None
    return dq.to(q.dtype), ring.received(returning).to(kind)


# One block: the queries of this rank and the keys of another one, as the module's docstring says.


def forward_block(
    ring: Ring, of: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to the keys of the rank at place `of`, and its log-sum-exp [heads, tokens].

    Where that is a later place, only of the queries that see its keys.
    """
    queries, keys = _cut(ring, of)
    if queries is not None:
        q = queries.of(q)
    if keys is not None:
        k, v = keys.of(k), keys.of(v)
    bounds = (ring.bounds if queries is None else queries.bounds, ring.bounds if keys is None else keys.bounds)
    run = _forward_each if _calls_each(q, bounds) else _flash_forward
    return run(q, k, v, bounds, of == ring.place, scale)


def merge_block(
    ring: Ring, of: int, into: tuple[torch.Tensor, torch.Tensor], block: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Merge a block into what is known so far, in place: outputs are averaged by their weights exp(lse)."""
    out, lse = into
    queries, _ = _cut(ring, of)
    if queries is None:
        weight = torch.sigmoid(block[1] - lse)
        out.lerp_(block[0].to(out.dtype), weight.to(out.dtype).transpose(0, 1).unsqueeze(-1))
        torch.logaddexp(lse, block[1], out=lse)
        return
    before, known = queries.of(lse, 1), queries.of(out)
    weight = torch.sigmoid(block[1] - before).to(out.dtype).transpose(0, 1).unsqueeze(-1)
    queries.put(out, torch.lerp(known, block[0].to(out.dtype), weight))
    queries.put(lse, torch.logaddexp(before, block[1]), 1)


def backward_block(
    ring: Ring,
    of: int,
    known: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what one block adds to the gradients of queries, keys and values; only of those that it computes on.

    `known` are the gradient of the output, the output, and its log-sum-exp over all blocks.
    """
    queries, keys = _cut(ring, of)
    grad, out, lse = known
    if queries is not None:
        q, grad, out, lse = queries.of(q), queries.of(grad), queries.of(out), queries.of(lse, 1)
    if keys is not None:
        k, v = keys.of(k), keys.of(v)
    bounds = (ring.bounds if queries is None else queries.bounds, ring.bounds if keys is None else keys.bounds)
    run = _backward_each if _calls_each(q, bounds) else _flash_backward
    return run((grad, out, lse), q, k, v, bounds, of == ring.place, scale)


def add_gradients(
    ring: Ring, of: int, into: tuple[torch.Tensor, torch.Tensor, torch.Tensor], block: tuple[torch.Tensor, ...]
) -> None:
    """Add the gradients of one block to those of all queries, keys and values."""
    queries, keys = _cut(ring, of)
    for half, total, part in zip((queries, keys, keys), into, block, strict=True):
        if half is None:
            total.add_(part)
        else:
            half.add(total, part)


def _cut(ring: Ring, of: int) -> tuple[Half | None, Half | None]:
    """Return the queries and the keys that see each other, for keys of the rank at place `of`; None for all."""
    if of == ring.place:
        return None, None
    first, second = ring.halves
    return (None, first) if of < ring.place else (second, None)


# Kernels. Those of a CPU and of cuDNN do not support packed segments: each segment is a call. On GPUs of Hopper's kind
# and later, cuDNN's take 0.6 of the time of those that do, so long segments are computed one by one there.

CUDNN_TOKENS = 2048
"""Mean length of the segments from which a call for each of them is worth while."""


def _calls_each(q: torch.Tensor, bounds: tuple[Bounds, Bounds]) -> bool:
    """Whether segments are computed one by one: on a CPU, and on a GPU with cuDNN where they are long."""
    if not q.is_cuda:
        return True
    tokens = min(one.spans[-1][1] if one.spans else 0 for one in bounds)
    return (
        tokens >= CUDNN_TOKENS * len(bounds[0].spans)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in (64, 128)
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
    )


def _forward_each(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[Bounds, Bounds], causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    outs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for (a, b), (c, d) in zip(bounds[0].spans, bounds[1].spans, strict=True):
        given = _heads_first(q[a:b]), _heads_first(k[c:d]), _heads_first(v[c:d])
        if q.is_cuda:
            one = torch.ops.aten._scaled_dot_product_cudnn_attention(*given, None, True, 0.0, causal, scale=scale)
        else:
            one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal, scale=scale)
        outs.append(one[0][0].transpose(0, 1))
        sums.append(one[1].view(q.shape[1], b - a))
    return _joined(outs), _joined(sums, 1)


def _backward_each(
    known: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: tuple[Bounds, Bounds],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad, out, lse = known
    gradients: tuple[list[torch.Tensor], ...] = ([], [], [])
    for (a, b), (c, d) in zip(bounds[0].spans, bounds[1].spans, strict=True):
        given = (
            *(_heads_first(grad[a:b]), _heads_first(q[a:b]), _heads_first(k[c:d]), _heads_first(v[c:d])),
            *(_heads_first(out[a:b]), lse[None, :, a:b].contiguous()),
        )
        if q.is_cuda:
            random = torch.zeros(2, dtype=torch.int64, device=q.device)  # the state of dropout, of which there is none
            made = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *given[:5], given[5].unsqueeze(-1), random[0], random[1], None, None, None, b - a, d - c, 0.0, causal,
                scale=scale,
            )  # fmt: skip
        else:
            made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
        for parts, part in zip(gradients, made, strict=True):
            parts.append(part[0].transpose(0, 1))
    dq, dk, dv = (_joined(parts) for parts in gradients)
    return dq, dk, dv


def _joined(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return the parts of all segments as one contiguous tensor, which models can view."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


def _heads_first(tensor: torch.Tensor) -> torch.Tensor:
    first = tensor.transpose(0, 1).unsqueeze(0)
    return first if tensor.is_cuda else first.contiguous()  # cuDNN takes any strides


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[Bounds, Bounds], causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, keys = bounds
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, queries.on(q.device), keys.on(q.device), queries.longest, keys.longest, 0.0, causal, False, scale=scale
    )
    return out, lse


def _flash_backward(
    known: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: tuple[Bounds, Bounds],
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    queries, keys = bounds
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of dropout, of which there is none
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(known[0], q, k, v, known[1], known[2].contiguous()), queries.on(q.device), keys.on(q.device),
        queries.longest, keys.longest, 0.0, causal, random, torch.empty(0, device=q.device), scale=scale,
    )  # fmt: skip
    return dq, dk, dv
