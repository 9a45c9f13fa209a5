"""The loss of each source, beside a trainer's own loss: what a mixture that learns from losses is told."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from overlord.errors import SpecError
from overlord.integrations.torch_batches import TorchBatch, TorchStep
from overlord.integrations.torch_loader import DataLoader


def losses_by_source(batch: TorchBatch, made: torch.Tensor, num_sources: int) -> torch.Tensor:
    """Return [sources, 2]: the summed loss of each source in one packed microbatch, and its labels; without gradients.

    Args:
        batch: The microbatch. Its sequences are whole: not cut for context parallelism.
        made: What the model made of it: logits [.., tokens, vocabulary]; or, with the keys of Megatron and torchtitan,
            whose labels are shifted already, the loss of every token [.., tokens].
        num_sources: Sources of the job.
    """
    shifted = "input_ids" not in batch
    labels = batch["labels"] if shifted else batch["labels"][..., 1:]
    with torch.no_grad():
        if shifted and made.numel() == labels.numel():
            each = made.float().flatten()
        else:
            logits = made if shifted else made[..., :-1, :]
            each = functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    labels = labels.flatten()
    meta = batch.meta
    lengths = torch.as_tensor(meta.cu_seqlens).diff()
    source = torch.repeat_interleave(torch.as_tensor(meta.source_ids), lengths)[int(not shifted) :].to(labels.device)
    counted = (labels != -100) & (source >= 0)  # tokens that only pad belong to no source
    found = torch.zeros(num_sources, 2, dtype=torch.float64, device=labels.device)
    found[:, 0].index_add_(0, source[counted], each[counted].double())
    found[:, 1].index_add_(0, source[counted], torch.ones_like(each[counted], dtype=torch.float64))
    return found


class SourceLosses:
    """Sums the losses of each source over the microbatches of a step and over all ranks, and reports their means.

    Rank 0 reports. All ranks of the loader's process group must add all their microbatches.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._sums: torch.Tensor | None = None
        self._added = 0

    def add(self, batch: TorchBatch, made: torch.Tensor, step: TorchStep | None = None) -> None:
        """Add a microbatch and what the model made of it; with the last one of its step, report the step.

        Microbatches of `loader.flat(..)` know their step; for those of `step.microbatches` it is given.

        Raises:
            SpecError: The step is not known.
        """
        step = step or batch.step
        if step is None:
            raise SpecError(
                "SourceLosses.add: the step of the microbatch is not known, so the losses cannot be reported. Give it "
                "(`add(batch, logits, step)`), or take the microbatches of loader.flat(..)."
            )
        found = losses_by_source(batch, made, len(step.source_names))
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
