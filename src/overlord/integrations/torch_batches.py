"""Steps and microbatches as torch tensors, each in its own memory or a view of one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from overlord.roles.client import Batch, BatchMeta, KeyedBatch, Microbatches, Step

IMAGE_INDICES = ("image_positions", "image_rows")
"""Columns of the provenance that index tensors, and so are on the same device."""


class TorchMeta:
    """The provenance of a batch's segments: like `Batch.meta`, with indices as tensors."""

    def __init__(self, meta: BatchMeta, indices: Mapping[str, torch.Tensor] | None = None) -> None:
        found = indices or {name: torch.tensor(getattr(meta, name)) for name in IMAGE_INDICES}
        self._meta = meta.detached()  # a view would keep the shared segment
        self.image_positions = found["image_positions"]
        """The positions of image tokens in this rank's sequences (all rows concatenated)."""
        self.image_rows = found["image_rows"]
        """Which of the rows that `exchange_images` returns belongs at each of them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meta, name)

    def __repr__(self) -> str:
        return repr(self._meta)


class TorchBatch(KeyedBatch):
    """One microbatch as tensors: `model(**batch)` works. `batch.meta` has the provenance of its segments."""

    def __init__(self, batch: Batch, arrived: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take a batch of arrays.

        Args:
            batch: Arrays, numbers and provenance.
            arrived: The tensors, where the batch has only numbers and provenance; with `meta.` before the indices.
        """
        if arrived is None:
            # One copy out of shared memory: tensors may be written to, and the shared segment is free again.
            self._values = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}
            self.meta = TorchMeta(batch.meta)
        else:
            self._values = {key: tensor for key, tensor in arrived.items() if not key.startswith("meta.")}
            self._values |= dict(batch)
            self.meta = TorchMeta(batch.meta, {name: arrived[f"meta.{name}"] for name in IMAGE_INDICES})
        self._facts = batch.facts

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TorchBatch:
        """Move the tensors to a device, and the indices of `meta` with them; return this batch."""
        move = {k: v.to(device, non_blocking=non_blocking) for k, v in self.items() if isinstance(v, torch.Tensor)}
        self._values |= move
        for name in IMAGE_INDICES:
            setattr(self.meta, name, getattr(self.meta, name).to(device, non_blocking=non_blocking))
        return self


class TorchMicrobatches(Microbatches[TorchBatch]):
    """The microbatches of one step, fetched and copied when they are accessed."""


class TorchStep:
    """One step of one rank."""

    def __init__(
        self,
        step: Step,
        take: Callable[[int], TorchBatch] | None = None,
        encoder: Callable[[], TorchBatch | None] | None = None,
        group: Any = None,
    ) -> None:
        """Take a step of arrays.

        Args:
            step: The step as this rank's client has it.
            take: Returns a microbatch by its number; by default it is copied out of shared memory.
            encoder: Returns what this rank encodes; by default it is copied out of shared memory.
            group: The process group in which microbatches are broadcast.
        """
        self.index = step.index
        self.global_loss_tokens = step.global_loss_tokens
        self.global_tokens = step.global_tokens
        self.global_squared_tokens = step.global_squared_tokens
        self.global_samples = step.global_samples
        self.mixture_version = step.mixture_version
        self.weights = step.weights
        self.source_names = step.source_names
        self.fetches = step.fetches
        """False where the microbatches come from another rank, by broadcast.

        They are the same on all ranks of `group`; without a process group they are empty.
        """
        self.group = group
        """The process group that shares its microbatches (`broadcast_at`); None if each rank fetches its own.

        Rows of `exchange_images` come to the rank that fetches: where there are images, broadcast these too.
        """
        self.microbatches = TorchMicrobatches(
            take or (lambda index: TorchBatch(step.microbatches[index])), len(step.microbatches)
        )
        self._encode = encoder or (lambda: None if step.encoder is None else TorchBatch(step.encoder))

    @cached_property
    def encoder(self) -> TorchBatch | None:
        """What this rank encodes in this step (`vlm_hybrid`), and how the tokens travel; see `exchange_images`."""
        return self._encode()

    def __repr__(self) -> str:
        return f"TorchStep(index={self.index}, microbatches={len(self.microbatches)}, samples={self.global_samples})"
