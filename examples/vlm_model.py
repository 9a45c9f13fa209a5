"""A small vision-language model, cut for tensor, context and pipeline parallelism in plain torch.

Every weight is made whole from its own name and then cut, so all meshes begin with the same model; and every parameter
has the name that it has in the whole model, so a checkpoint of one mesh fits any other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from overlord.integrations.torch_loader import TorchBatch, normalize_pixels

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys and values [heads, tokens, size]; returns what each query found."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int
    patch_values: int
    """Numbers of one patch: 3 colours x temporal x patch x patch."""
    merge: int
    """merge x merge patches become one token of the backbone."""
    width: int = 64
    heads: int = 4
    layers: int = 4
    encoder_layers: int = 2


# ---- weights and their cuts


def weight(name: str, *shape: int, tp: DeviceMesh | None = None, cut: int | None = None) -> nn.Parameter:
    """Return this rank's part of a weight; `cut` is the dimension that tensor-parallel ranks share."""
    seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=seed) * shape[-1] ** -0.5
    parameter = nn.Parameter(cut_part(whole, cut, tp))
    parameter.cut, parameter.tp = cut, tp  # what a checkpoint needs to make it whole again
    return parameter


def cut_part(whole: Tensor, cut: int | None, tp: DeviceMesh | None) -> Tensor:
    """Return the part of a whole tensor that belongs to this tensor-parallel rank."""
    if cut is None or tp is None:
        return whole
    if whole.shape[cut] % tp.size():
        raise SystemExit(f"tp={tp.size()} ranks cannot share {whole.shape[cut]} heads or columns evenly")
    return whole.chunk(tp.size(), cut)[tp.get_local_rank()].clone()


def make_whole(part: Tensor, cut: int | None, tp: DeviceMesh | None) -> Tensor:
    """Return the whole tensor; all tensor-parallel ranks call it together."""
    return part.detach() if cut is None or tp is None else torch.cat(all_parts(part.detach(), tp), cut)


def all_parts(part: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """Return the equally large tensors of all ranks along one axis of the mesh."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
    dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
    return parts


# ---- communication that gradients go through


class Spread(torch.autograd.Function):
    """Where tensor-parallel ranks begin to compute different things: their gradients add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: DeviceMesh) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.tp.get_group())
        return summed, None


class Reduce(torch.autograd.Function):
    """Where their results add up: from here on all compute the same, so each has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: DeviceMesh) -> Tensor:
        summed = x.contiguous().clone()
        dist.all_reduce(summed, group=tp.get_group())
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Gather(torch.autograd.Function):
    """The keys and values [.., tokens, size] of all context-parallel ranks; gradients go back to whose they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: DeviceMesh) -> Tensor:
        ctx.cp = cp
        return torch.cat(all_parts(x, cp), dim=-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.cp.get_group())
        return summed.chunk(ctx.cp.size(), dim=-2)[ctx.cp.get_local_rank()], None


# ---- the model


class Block(nn.Module):
    """A transformer layer; with `tp` its heads and its hidden columns are shared by tensor-parallel ranks."""

    def __init__(self, name: str, shape: Shape, tp: DeviceMesh | None = None) -> None:
        super().__init__()
        width, size = shape.width, shape.width // shape.heads
        self.tp = tp
        self.qkv = weight(f"{name}.qkv", 3, shape.heads, size, width, tp=tp, cut=1)
        self.out = weight(f"{name}.out", width, width, tp=tp, cut=1)  # the columns of a head lie together
        self.up = weight(f"{name}.up", 4 * width, width, tp=tp, cut=0)
        self.down = weight(f"{name}.down", width, 4 * width, tp=tp, cut=1)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        found = attend(*torch.einsum("td,chsd->chts", self._begin(x), self.qkv))
        x = x + self._end(functional.linear(found.transpose(0, 1).flatten(1), self.out))
        hidden = functional.gelu(functional.linear(self._begin(x), self.up))
        return x + self._end(functional.linear(hidden, self.down))

    def _begin(self, x: Tensor) -> Tensor:
        x = functional.rms_norm(x, x.shape[-1:])
        return x if self.tp is None else Spread.apply(x, self.tp)

    def _end(self, x: Tensor) -> Tensor:
        return x if self.tp is None else Reduce.apply(x, self.tp)


class Encoder(nn.Module):
    """Patches of images to tokens of the backbone. Whole on every rank: each encodes other images."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.merge = shape.merge
        self.patch = weight("encoder.patch", shape.width, shape.patch_values)
        self.place = weight("encoder.place", shape.width, 2)
        self.merger = weight("encoder.merger", shape.width, shape.merge**2 * shape.width)
        self.layers = nn.ModuleList(Block(f"encoder.{n}", shape) for n in range(shape.encoder_layers))

    def forward(self, images: Mapping[str, Tensor]) -> Tensor:
        """Encode `step.encoder`: one row for each image token."""
        lengths = images["cu_seqlens"].diff().tolist()

        def attend(*qkv: Tensor) -> Tensor:
            # Every image attends to itself alone. On a GPU, a kernel for sequences of various lengths does it at once.
            return torch.cat([attention(*one) for one in zip(*(x.split(lengths, 1) for x in qkv), strict=True)], 1)

        places = patch_places(images["image_grid_thw"], self.merge).to(self.place.device)
        x = functional.linear(normalize_pixels(images["pixel_values"]), self.patch)
        x = x + functional.linear(places, self.place)
        for layer in self.layers:
            x = layer(x, attend)
        return functional.linear(x.view(-1, self.merger.shape[1]), self.merger)


class Stage(nn.Module):
    """The backbone's layers on this rank's pipeline stage; the first stage embeds, the last predicts."""

    def __init__(self, shape: Shape, mesh: DeviceMesh) -> None:
        super().__init__()
        stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
        first, last = shape.layers * stage // stages, shape.layers * (stage + 1) // stages
        self.width, self.cp = shape.width, mesh["cp"]
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first:
            self.embedding = weight("embedding", shape.vocabulary, shape.width)
        if self.is_last:
            self.head = weight("head", shape.vocabulary, shape.width)
        self.layers = nn.ModuleDict({str(n): Block(f"layers.{n}", shape, mesh["tp"]) for n in range(first, last)})

    def embed(self, batch: TorchBatch, images: Tensor) -> Tensor:
        """Return the embeddings of this rank's tokens, with the rows that arrived from encoders in their places."""
        places, rows = (index.to(images.device) for index in (batch.meta.image_positions, batch.meta.image_rows))
        return functional.embedding(batch["input"], self.embedding).index_copy(0, places, images[rows])

    def forward(self, x: Tensor, batch: TorchBatch) -> Tensor:
        """Return what the next stage takes; on the last stage, the logits."""
        positions, segments = batch["positions"], token_segments(batch)
        # A token sees those of its own sample that do not come later, whichever rank of the CP group has them.
        seen_positions, seen_segments = (torch.cat(all_parts(index, self.cp)) for index in (positions, segments))
        mask = (segments[:, None] == seen_segments) & (positions[:, None] >= seen_positions)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = Gather.apply(torch.stack([rotate(k, positions), v]), self.cp)
            return attention(rotate(q, positions), keys, values, mask)

        for layer in self.layers.values():
            x = layer(x, attend)
        return functional.linear(functional.rms_norm(x, x.shape[-1:]), self.head) if self.is_last else x


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn [heads, tokens, size] by their positions (RoPE)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def token_segments(batch: TorchBatch) -> Tensor:
    """Return the segment of each token of this rank: the "zigzag" slicing gives every rank as many of each."""
    lengths = torch.as_tensor(batch.meta.cu_seqlens, dtype=torch.int64).diff() // batch.meta.local_cp_size
    return torch.arange(len(lengths)).repeat_interleave(lengths).to(batch["positions"].device)


def patch_places(grids: Tensor, merge: int) -> Tensor:
    """Return row and column of every patch as shares of its image, in their order: those that merge are neighbours."""
    found = []
    for frames, rows, columns in grids.tolist():
        place = torch.cartesian_prod(torch.arange(rows) / rows, torch.arange(columns) / columns)
        blocks = place.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
        found.append(blocks.reshape(-1, 2).repeat(frames, 1))
    return torch.cat(found)
