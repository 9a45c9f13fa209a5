"""Steps as torch tensors: `DataLoader`, with `state_dict` and `load_state_dict` as checkpointers expect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord.core.layout_specs import CLIP_MEAN, CLIP_STD, Keys, Layout
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.specs import Job
from overlord.errors import SpecError, StateError
from overlord.planning.checking import Strategy
from overlord.roles.client import Client
from overlord.roles.views import Batch, BatchMeta, KeyedBatch, Step
from overlord.session import DEFAULT_CACHE, Service, connect, launch


class TorchMeta:
    """Where the segments of a batch came from: what `Batch.meta` has, with indices as tensors."""

    def __init__(self, meta: BatchMeta) -> None:
        self._meta = meta.detached()  # a view would keep the shared segment
        self.image_positions = torch.tensor(meta.image_positions)
        """Where image tokens stand in this rank's sequences (all rows one behind the other)."""
        self.image_rows = torch.tensor(meta.image_rows)
        """Which of the rows that `exchange_images` returns belongs at each of them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meta, name)

    def __repr__(self) -> str:
        return repr(self._meta)


class TorchBatch(KeyedBatch):
    """One microbatch as tensors: `model(**batch)` works. `batch.meta` tells where its segments came from."""

    def __init__(self, batch: Batch) -> None:
        # One copy out of shared memory: tensors may be written to, and the shared segment is free again.
        self._values = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}
        self._facts = batch.facts
        self.meta = TorchMeta(batch.meta)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TorchBatch:
        """Move the tensors to a device; return this batch."""
        move = {k: v.to(device, non_blocking=non_blocking) for k, v in self.items() if isinstance(v, torch.Tensor)}
        self._values |= move
        return self


class TorchMicrobatches(Sequence[TorchBatch]):
    """The microbatches of one step, fetched and copied when they are looked at."""

    def __init__(self, microbatches: Sequence[Batch]) -> None:
        self._microbatches = microbatches

    def __len__(self) -> int:
        return len(self._microbatches)

    def __getitem__(self, index: Any) -> Any:
        found = self._microbatches[index]
        return [TorchBatch(one) for one in found] if isinstance(index, slice) else TorchBatch(found)


class TorchStep:
    """One step of one rank."""

    def __init__(self, step: Step) -> None:
        self.index = step.index
        self.global_loss_tokens = step.global_loss_tokens
        self.global_tokens = step.global_tokens
        self.global_squared_tokens = step.global_squared_tokens
        self.global_samples = step.global_samples
        self.mixture_version = step.mixture_version
        self.weights = step.weights
        self.source_names = step.source_names
        self.fetches = step.fetches
        """False where the trainer broadcasts to this rank: its batches are empty."""
        self.microbatches = TorchMicrobatches(step.microbatches)
        self._step = step

    @cached_property
    def encoder(self) -> TorchBatch | None:
        """What this rank encodes in this step (`vlm_hybrid`), and how the tokens travel; see `exchange_images`."""
        encoder = self._step.encoder
        return None if encoder is None else TorchBatch(encoder)


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
        encoder: `step.encoder`.
        group: The process group of all ranks (default: the world).
    """
    rows = output[torch.as_tensor(encoder["send_rows"], device=output.device)]
    if not (dist.is_available() and dist.is_initialized()):
        return rows  # one process: what it sends is what it gets
    return _Exchange.apply(rows, encoder["send_splits"].tolist(), encoder["recv_splits"].tolist(), group)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """An all-to-all whose backward pass swaps senders and receivers."""

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


class DataLoader:
    """The stream of this rank as torch tensors.

    Give it a job, and the service is launched at the first step (by rank 0 of the process group, if there
    is one); or give it the address of a running service (`overlord serve`), which `torchrun` ranks share.

    Example:
        A training loop::

            loader = DataLoader(job, mesh=tree, rank=rank)
            for step in loader:
                for batch in step.microbatches:
                    loss = model(**batch).loss
            torch.save({"data": loader.state_dict()}, "checkpoint.pt")
    """

    def __init__(
        self,
        job: Job | str,
        *,
        mesh: ClientPlaceTree | None = None,
        rank: int | None = None,
        strategy: Strategy | None = None,
        layout: Keys | Layout = "hf",
        runtime: str = "local",
        prefetch: int = 2,
        store: str | None = None,
        cache: str = DEFAULT_CACHE,
    ) -> None:
        self._job = job
        self._mesh = mesh or ClientPlaceTree()
        self._grouped = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else (dist.get_rank() if self._grouped else 0)
        if self._grouped and not isinstance(job, str):
            self._mesh.check_world_size(dist.get_world_size())
        self._options: dict[str, Any] = {"strategy": strategy, "layout": layout, "runtime": runtime}
        self._options["prefetch"] = prefetch
        self._options |= {"store": store, "cache": cache}
        self._state: Mapping[str, Any] | None = None
        self._service: Service | None = None
        self._client: Client | None = None

    def __iter__(self) -> Iterator[TorchStep]:
        for step in self._attached():
            yield TorchStep(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step handed out: the same on every rank, on any mesh."""
        if self._client is None and self._state is not None:
            return dict(self._state)
        return self._attached().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; call it before the first step."""
        if isinstance(self._job, str):
            raise StateError(
                "load_state_dict: this loader is attached to a service that somebody else started, and a stream "
                "cannot be moved under its other ranks. Start the service from the state (`overlord serve --resume`, "
                "or launch(..., state=state))."
            )
        self.close()
        self._state = state

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics of a step; call it on one rank."""
        self._attached().report(step, metrics)

    def close(self) -> None:
        """Detach, and end the service if this loader started it."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._service is not None:
            self._service.close()
            self._service = None

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attached(self) -> Client:
        if self._client is None:
            self._client = self._attach()
        return self._client

    def _attach(self) -> Client:
        if isinstance(self._job, str):
            return connect(self._job, self._rank)
        shared = self._grouped and dist.get_world_size() > 1
        if shared and self._options["runtime"] != "local":
            raise SpecError("runtime: several processes can only share a 'local' service; use runtime='local'.")
        if not shared or dist.get_rank() == 0:
            self._service = launch(self._job, mesh=self._mesh, state=self._state, **self._options)
        if not shared:
            assert self._service is not None
            return self._service.client(self._rank)
        return connect(_share_text(self._service.address if self._service else None), self._rank)


def _share_text(text: str | None) -> str:
    """Broadcast a text from rank 0 as plain bytes."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    raw = torch.tensor(list((text or "").encode()), dtype=torch.uint8, device=device)
    size = torch.tensor([len(raw)], device=device)
    dist.broadcast(size, 0)
    raw = raw if text is not None else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(raw, 0)
    return bytes(raw.cpu().tolist()).decode()
