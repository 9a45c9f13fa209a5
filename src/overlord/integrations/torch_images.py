"""Images and sounds that are encoded apart from their tokens: pixel normalisation, the exchange between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlord.core.samples import CLIP_MEAN, CLIP_STD


def normalize_pixels(
    pixel_values: torch.Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD
) -> torch.Tensor:
    """Return uint8 patch rows as normalised floats, on the device they are on.

    By default with the mean and deviation of CLIP's and Qwen-VL's encoders.

    Example:
        >>> black = torch.zeros(1, 3 * 4, dtype=torch.uint8)
        >>> normalize_pixels(black, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).unique().tolist()
        [-1.0]
    """
    colours = pixel_values.to(torch.float32).div_(255.0).unflatten(-1, (3, -1))
    shift = torch.tensor(mean, device=pixel_values.device, dtype=torch.float32)[:, None]
    scale = torch.tensor(std, device=pixel_values.device, dtype=torch.float32)[:, None]
    return colours.sub_(shift).div_(scale).flatten(-2)


def exchange_images(output: torch.Tensor, encoder: Mapping[str, Any], group: Any = None) -> torch.Tensor:
    """Send the encoder's output to the ranks that hold its tokens; gradients come back the same way.

    Call it on every rank once a step, with the rows of the encoder's output (one for each image token) and
    `step.encoder`. Then, for every microbatch: `embeddings[batch.meta.image_positions] = rows[batch.meta.image_rows]`.
    The loss of every rank must depend on what this returns, be it by `+ 0 * rows.sum()`: the gradients come back by
    another all-to-all, which waits for all ranks.

    Args:
        output: [image tokens of this rank, hidden].
        encoder: `step.encoder`; or `step.audio_encoder`, with the rows of sounds (`audio_lengths` of each).
        group: The process group of all ranks (default: the world).
    """
    rows = output[torch.as_tensor(encoder["send_rows"], device=output.device)]
    if not (dist.is_available() and dist.is_initialized()):
        return rows  # one process sends to itself
    return _Exchange.apply(rows, encoder["send_splits"].tolist(), encoder["recv_splits"].tolist(), group)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """An all-to-all; its backward pass swaps senders and receivers."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.splits = (send, receive, group)
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        send, receive, group = ctx.splits
        return _all_to_all(grads[0].contiguous(), receive, send, group), None, None, None


def _all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out
