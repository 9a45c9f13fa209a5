"""The loss of each source, beside a trainer's own loss: what a mixture that learns from losses is told."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from overlord.integrations.torch_batches import TorchBatch
from overlord.integrations.torch_loader import DataLoader


def losses_by_source(batch: TorchBatch, logits: torch.Tensor, num_sources: int) -> torch.Tensor:
    """Return [sources, 2]: the summed loss of each source in one packed microbatch, and its labels; without gradients.

    Args:
        batch: The microbatch, in the layout of Hugging Face models: labels at the places of their tokens.
        logits: What the model made of it: [1, tokens, vocabulary].
        num_sources: Sources of the job.
    """
    labels = batch["labels"][..., 1:].flatten()
    with torch.no_grad():
        each = functional.cross_entropy(logits[..., :-1, :].float().flatten(0, -2), labels, reduction="none")
    meta = batch.meta
    lengths = torch.as_tensor(meta.cu_seqlens).diff()
    source = torch.repeat_interleave(torch.as_tensor(meta.source_ids), lengths)[1:].to(labels.device)
    counted = (labels != -100) & (source >= 0)  # tokens that only pad belong to no source
    found = torch.zeros(num_sources, 2, dtype=torch.float64, device=labels.device)
    found[:, 0].index_add_(0, source[counted], each[counted].double())
    found[:, 1].index_add_(0, source[counted], torch.ones_like(each[counted], dtype=torch.float64))
    return found


class SourceLosses:
    """Sums the losses of each source over the microbatches of a step and over all ranks, and reports their means.

    Rank 0 reports. All ranks of the process group must add all their microbatches, those of `loader.flat(..)`.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._sums: torch.Tensor | None = None
        self._added = 0

    def add(self, batch: TorchBatch, logits: torch.Tensor) -> None:
        """Add a microbatch; with the last one of its step, report the step."""
        step = batch.step
        assert step is not None, "microbatches of loader.flat() know their step"
        found = losses_by_source(batch, logits, len(step.source_names))
        self._sums = found if self._sums is None else self._sums + found
        self._added += 1
        if self._added < len(step.microbatches):
            return
        sums, self._sums, self._added = self._sums, None, 0
        shared = dist.is_available() and dist.is_initialized()
        if shared:
            dist.all_reduce(sums, group=self._loader.group)
        if not shared or dist.get_rank(self._loader.group) == 0:
            self._loader.report(step.index, _means(step.source_names, sums))


def _means(names: Any, sums: torch.Tensor) -> dict[str, float]:
    rows = zip(names, sums.tolist(), strict=True)
    return {f"loss/{name}": total / count for name, (total, count) in rows if count}
