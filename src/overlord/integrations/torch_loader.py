"""Steps as torch tensors: `DataLoader`, with `state_dict` and `load_state_dict` as checkpointers expect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.specs import Job
from overlord.errors import SpecError, StateError
from overlord.planning.checking import Strategy
from overlord.roles.client import Client
from overlord.roles.views import Batch, BatchMeta, Step
from overlord.session import DEFAULT_CACHE, Service, connect, launch


class TorchBatch(Mapping[str, Any]):
    """One microbatch as tensors: `model(**batch)` works. `batch.meta` tells where its segments came from."""

    def __init__(self, batch: Batch) -> None:
        # One copy out of shared memory: tensors may be written to, and the shared segment is free again.
        self._values = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}
        self.meta: BatchMeta = batch.meta

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


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
        self.global_samples = step.global_samples
        self.mixture_version = step.mixture_version
        self.weights = step.weights
        self.source_names = step.source_names
        self.fetches = step.fetches
        """False where the trainer broadcasts to this rank: its batches are empty."""
        self.microbatches = TorchMicrobatches(step.microbatches)


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
        self._options: dict[str, Any] = {"strategy": strategy, "runtime": runtime, "prefetch": prefetch}
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
