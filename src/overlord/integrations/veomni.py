"""VeOmni: its dataloader type "overlord" is the stream of a job. An item is the list of the microbatches of a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from veomni.data.data_loader import DATALOADER_REGISTRY
from veomni.distributed.parallel_state import get_parallel_state

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.integrations.torch_loader import WrappedLoader, loader_with_layout

if TYPE_CHECKING:
    from overlord.job.specs import Job

__all__ = ["StepLists", "register"]


class StepLists(WrappedLoader):
    """The steps of a loader as lists of dictionaries of tensors.

    A step counts as trained on once its list is made: VeOmni saves the state that it read behind the list it trains on,
    also where its background prefetcher is ahead.
    """

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for step in self.loader:
            yield [dict(batch) for batch in step.microbatches]


def register(job: Job | str | os.PathLike[str], **options: Any) -> None:
    """Make `data.dataloader.type: overlord` known to VeOmni; once a process, before its trainer is made.

    Args:
        job: A job or a job file, as for `DataLoader`.
        **options: Of `DataLoader`: the arguments of `overlord.launch`.
    """

    def build(max_seq_len: int, **settings: Any) -> StepLists:
        # The other settings of VeOmni's loader are about its own dataset, sampler and workers, which are not used.
        state = get_parallel_state()
        shared = {name: getattr(state, f"{name}_size") for name in ("pp", "tp", "sp")}
        if any(size > 1 for size in shared.values()):
            told = ", ".join(f"{name}={size}" for name, size in shared.items())
            raise SpecError(
                f"VeOmni: its ranks share samples ({told}), and the dataloader type 'overlord' gives each rank its "
                "own; ranks would train on different parts. Use data parallelism (and experts) only."
            )
        mesh = ClientPlaceTree(dp=state.dp_size)
        loader = loader_with_layout("VeOmni", job, {"keys": "hf"}, mesh=mesh, **options)
        assert loader.job is not None, "a running service was refused"
        length = loader.job.batch.context_length
        if length > max_seq_len:
            raise SpecError(
                f"VeOmni: batch.context_length of the job is {length}, and data.max_seq_len is {max_seq_len}; the "
                f"model would get longer samples than it is configured for. Set batch.context_length to {max_seq_len}."
            )
        return StepLists(loader)

    DATALOADER_REGISTRY.register("overlord", build)
