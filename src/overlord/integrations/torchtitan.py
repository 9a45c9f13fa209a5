"""torchtitan: a `BaseDataLoader` on the stream of a job; `Trainer.Config.dataloader` takes its Config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError:  # where later versions have it
    from torchtitan.components.data.loader import BaseDataLoader

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.integrations.torch_batches import TorchBatch
from overlord.integrations.torch_loader import DataLoader, loader_with_layout

__all__ = ["OverlordDataLoader"]


class OverlordDataLoader(BaseDataLoader):  # type: ignore[misc]
    """The microbatches of a job as torchtitan takes them: ({"input", "positions"}, labels).

    All ranks of one data-parallel rank get the same whole sequences: torchtitan cuts them for context parallelism, and
    reads labels on every pipeline stage. Its state has no rank in it: a run resumes on any number of ranks.

    Example:
        In a config of torchtitan::

            config.dataloader = OverlordDataLoader.Config(job="job.yaml")
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """What to read."""

        job: str
        """The job file. Its `batch.microbatches` are what a step of the trainer takes: gradient accumulation steps
        times microbatches of the pipeline. Its tokenizer is the one that is used."""
        context_parallel: int = 1
        """The trainer's context parallel degree: sequences are padded so that it can cut them."""
        cache: str | None = None
        """Folder of indices and length sidecars; by default that of the job's launches."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any = None,
        seq_len: int | None = None,
        local_batch_size: int | None = None,
        max_context_length: int | None = None,
        num_tokens_per_batch: int | None = None,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        """Take what torchtitan's trainer gives; nothing is started yet.

        Args:
            config: What to read.
            dp_world_size: Data-parallel ranks.
            dp_rank: That of this process.
            tokenizer: Not used: the job says how its sources are tokenized.
            seq_len: Tokens of a row, in versions whose batches have rows.
            local_batch_size: Rows of a batch; a packed batch is one row.
            max_context_length: Tokens of a sample at most, in versions whose batches are flat.
            num_tokens_per_batch: Tokens of a batch at most, in versions whose batches are flat.
            snapshot_every_n_steps: Microbatches from one checkpoint to the next.

        Raises:
            SpecError: The job does not fit the trainer.
        """
        self._has_rows = num_tokens_per_batch is None
        mesh, rank = _mesh_and_rank(dp_world_size, dp_rank, config.context_parallel)
        options: dict[str, Any] = {"mesh": mesh, "rank": rank, "device": "cpu", "cache": config.cache}
        needed = {"keys": "torchtitan", "slicing": "whole"}
        self.loader: DataLoader = loader_with_layout("torchtitan", config.job, needed, **options)
        """The loader, for `report`."""
        assert self.loader.job is not None and self.loader.layout is not None, "a running service was refused"
        batch, packed = self.loader.job.batch, self.loader.layout.rows == "packed"
        limits = {
            "batch.context_length": (batch.context_length, seq_len or max_context_length),
            "batch.microbatch_tokens": (batch.microbatch_cap, num_tokens_per_batch),
        }
        for name, (found, most) in limits.items():
            if most is not None and found > most:
                raise SpecError(
                    f"torchtitan: {name} of {config.job} is {found}, and the trainer is configured for {most}; the "
                    f"model would get positions or tokens that it has no room for. Set {name} to {most}, or raise the "
                    "trainer's."
                )
        if local_batch_size is not None and local_batch_size != 1 and packed:
            raise SpecError(
                f"torchtitan: training.local_batch_size is {local_batch_size}, and a microbatch is one packed "
                "sequence; the trainer would count its batches wrongly. Set it to 1."
            )
        for name, value in (("dataset", ""), ("dataset_path", None)):
            if getattr(config, name, value) not in ("", None):
                raise SpecError(
                    f"torchtitan: dataloader.{name} is {getattr(config, name)!r}, and the job file says what is read; "
                    "it would have no effect. Leave it out."
                )
        self._microbatches = self.loader.flat(batch.microbatches or 0)
        self._taken = 0
        if snapshot_every_n_steps is not None and snapshot_every_n_steps % self._microbatches.microbatches:
            raise SpecError(_mismatch(self._microbatches.microbatches, snapshot_every_n_steps))

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in self._microbatches:
            self._taken += 1
            yield self._item(batch)

    def _item(self, batch: TorchBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        found = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        if self._has_rows:  # [tokens] of a packed batch are one row
            flat = ("input", "positions", "labels")
            found |= {key: found[key][None] for key in flat if found[key].dim() == 1}
        return found, found.pop("labels")

    def state_dict(self) -> dict[str, Any]:
        """Return the state before the first step that was not trained on.

        Raises:
            SpecError: The trainer is inside a step of the job: it takes another number of microbatches.
        """
        if self._taken % self._microbatches.microbatches:
            raise SpecError(_mismatch(self._microbatches.microbatches, self._taken))
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, on any number of ranks."""
        self._taken = 0
        self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """End the service, if this loader started it."""
        self.loader.close()


def _mismatch(microbatches: int, taken: int) -> str:
    return (
        f"torchtitan: batch.microbatches of the job is {microbatches}, and the trainer saves a checkpoint after "
        f"{taken} microbatches, inside a step; a run that is resumed would repeat or lose some. Set batch.microbatches "
        "to the gradient accumulation steps times the microbatches of the pipeline."
    )


def _mesh_and_rank(dp: int, dp_rank: int, cp: int) -> tuple[ClientPlaceTree, int]:
    """Return the mesh of the stream, in which all ranks of a data-parallel rank are cp or tp, and this rank's place."""
    world, me = 1, 0
    places = [dp_rank]
    if dist.is_available() and dist.is_initialized():
        world, me = dist.get_world_size(), dist.get_rank()
        found: list[Any] = [None] * world
        dist.all_gather_object(found, dp_rank)
        places = found
    if world % (dp * cp):
        raise SpecError(
            f"torchtitan: {world} processes are not a multiple of dp={dp} x context_parallel={cp}; the ranks of a "
            "sequence are unclear. Set dataloader.context_parallel to the trainer's context parallel degree."
        )
    sharing = world // dp
    return ClientPlaceTree(dp=dp, cp=cp, tp=sharing // cp), dp_rank * sharing + places[:me].count(dp_rank)
