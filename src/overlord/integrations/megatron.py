"""Megatron-core: iterators for `--dataloader-type external`, packed sequences, and hybrid context parallelism.

Only the first tensor-parallel rank takes batches, whole ones: Megatron broadcasts them and cuts them for context
parallelism itself. So the stream has a mesh without tp, of the processes with tensor-parallel rank 0.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError, StateError
from overlord.integrations.torch_batches import TorchBatch
from overlord.integrations.torch_loader import DataLoader, loader_with_layout

if TYPE_CHECKING:
    from overlord.job.specs import Job

__all__ = ["DataIterator", "HybridIterator", "data_iterator", "dataset_provider", "packed_seq_params", "read_state"]

_SAMPLE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class DataIterator:
    """The microbatches of a loader as Megatron's `get_batch` takes them.

    `cu_seqlens` are [1, segments + 1]. Without context parallelism they count padding as part of the last segment, and
    there is no `cu_seqlens_padded`: Megatron broadcasts that along tp only where cp > 1, and ranks would differ.
    """

    def __init__(self, loader: DataLoader, microbatches: int) -> None:
        """Take a loader with the layout "megatron"; `microbatches` are those of one iteration of the trainer.

        Raises:
            SpecError: The loader's batches are not what Megatron takes.
        """
        _check_layout(loader)
        self.loader = loader
        self.batch: TorchBatch | None = None
        """The microbatch that was handed out last: its `meta` says which samples it holds, its `step` which step."""
        self._batches = iter(loader.flat(microbatches))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        self.batch = batch = next(self._batches)
        found = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        padded = found.pop("cu_seqlens_padded")
        if self.loader.mesh.cp == 1:
            return found | {"cu_seqlens": padded[None]}
        return found | {"cu_seqlens": found["cu_seqlens"][None], "cu_seqlens_padded": padded[None]}

    def save_state(self) -> dict[str, Any]:
        """Return the state of the stream: what `--dataloader-save` writes. It has no rank in it."""
        return self.loader.state_dict()


class HybridIterator:
    """The steps of a loader with `ol.strategies.hdp()`, as Megatron's hybrid context parallelism takes them.

    An item is (samples by id, groups of sample ids): what `HybridCPDataLoaderWrapper` returns, which this replaces with
    its gathers and exchanges of samples between GPUs. All samples of a step are in one group: the plan orders them so
    that no two ranks wait for each other, so Megatron need not let ranks wait between groups.
    """

    def __init__(self, loader: DataLoader) -> None:
        """Take a loader with the layout "megatron".

        Raises:
            SpecError: The loader's batches are not what Megatron takes.
        """
        _check_layout(loader)
        self.loader = loader
        self._steps = iter(loader)

    def __iter__(self) -> Iterator[tuple[dict[int, dict[str, torch.Tensor]], list[list[list[int]]]]]:
        return self

    def __next__(self) -> tuple[dict[int, dict[str, torch.Tensor]], list[list[list[int]]]]:
        step = next(self._steps)
        mesh = step.mesh
        samples: dict[int, dict[str, torch.Tensor]] = {}
        ranks: list[list[int]] = [[] for _ in range(mesh.dp * mesh.cp)]
        for batch in step.microbatches:
            places = [at.dp * mesh.cp + at.cp for at in map(mesh.coords, batch.meta.ranks)]
            if places[0] % len(places) or len(places) & (len(places) - 1):
                raise SpecError(
                    f"step {step.index}: ranks {list(batch.meta.ranks)} share a sequence, and Megatron has process "
                    "groups of 2, 4, .. ranks from a multiple of their number on. Use ol.strategies.hdp with "
                    "blocks='aligned'."
                )
            bounds = batch.meta.cu_seqlens.tolist()
            for begin, end in itertools.pairwise(bounds):
                # Ids only tell the samples of this rank apart: Megatron counts the ranks that list one.
                number = len(samples)
                samples[number] = {key: batch[key][0, begin:end] for key in _SAMPLE_KEYS if key in batch}
                for place in places:
                    ranks[place].append(number)
        return samples, [ranks]

    def save_state(self) -> dict[str, Any]:
        """Return the state of the stream: what `--dataloader-save` writes. It has no rank in it."""
        return self.loader.state_dict()


def data_iterator(loader: DataLoader, microbatches: int | None = None) -> DataIterator | HybridIterator:
    """Return the loader as an iterator for Megatron; without `microbatches` for its hybrid context parallelism.

    Example:
        Behind a provider of your own::

            layout = ol.Layout("megatron", slicing="whole", block=args.seq_length // args.context_parallel_size)
            loader = DataLoader("job.yaml", mesh=mesh, group=first_tensor_ranks, layout=layout)
            return data_iterator(loader, get_num_microbatches()), None, None
    """
    return HybridIterator(loader) if microbatches is None else DataIterator(loader, microbatches)


def packed_seq_params(batch: Mapping[str, torch.Tensor]) -> PackedSeqParams:
    """Return what the attention of megatron-core must know of a packed batch, before or after it is cut."""
    padded = batch.get("cu_seqlens_padded")
    bounds = (batch["cu_seqlens"] if padded is None else padded).flatten()
    longest = int(batch["max_seqlen"].max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=None if padded is None else bounds,
        cu_seqlens_kv_padded=None if padded is None else bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def dataset_provider(
    job: Job | str | os.PathLike[str], get_args: Callable[[], Any], **options: Any
) -> Callable[..., tuple[DataIterator | HybridIterator | None, None, None]]:
    """Return a `train_valid_test_datasets_provider` for Megatron's `pretrain`, with `--dataloader-type external`.

    It must be called on all processes, as `pretrain` does, and reads the settings of the run from `get_args()` of
    megatron.training. A run that resumes goes on from what `--dataloader-save` wrote, on any number of ranks.

    Args:
        job: A job or a job file, as for `DataLoader`.
        get_args: Returns Megatron's arguments.
        **options: Of `DataLoader`: device, and the arguments of `overlord.launch`.
    """

    def provider(train_val_test_num_samples: Any, vp_stage: int | None = None) -> Any:
        args = get_args()
        _check_args(args, vp_stage)
        tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
        world = dist.get_world_size()
        group = dist.new_group(list(range(0, world, tp))) if tp > 1 else None  # made by all processes
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return None, None, None
        mesh = ClientPlaceTree.from_megatron(
            "tp-cp-ep-pp-dp" if getattr(args, "use_tp_pp_dp_mapping", False) else "tp-cp-ep-dp-pp",
            world_size=world // tp,
            cp=cp,
            ep=args.expert_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
        )
        hybrid = getattr(args, "hybrid_context_parallel", False)
        needed: dict[str, Any] = {"keys": "megatron", "slicing": "whole"}
        if not hybrid:
            # Megatron's receive buffers, of tp and of the pipeline, have the sequence length: microbatches are filled
            # up to it. Ranks of a block count it each for its own part.
            needed["block"] = args.seq_length // cp
        loader = loader_with_layout("Megatron", job, needed, mesh=mesh, group=group, **options)
        _check_lengths(loader, args, mesh, hybrid=hybrid)
        state = read_state(args.dataloader_save, args.iteration) if args.iteration else None
        if state is not None:
            loader.load_state_dict(state)
        count = None if hybrid else args.global_batch_size // (args.micro_batch_size * mesh.dp)
        return data_iterator(loader, count), None, None

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


def read_state(folder: str | os.PathLike[str] | None, iteration: int) -> dict[str, Any]:
    """Return the state of the stream that `--dataloader-save` wrote into a folder at an iteration.

    Every data-parallel rank has written the same: the first file is read, whatever the number of ranks was.

    Raises:
        StateError: There is none.
    """
    pattern = f"iter_{iteration:07d}/mp_rank_*/train_dataloader_dprank*.pt"
    found = sorted(Path(folder).glob(pattern)) if folder else []
    if not found:
        raise StateError(
            f"--dataloader-save is {str(folder) if folder else 'not given'}, and iteration {iteration} has no state of "
            f"the stream there ({pattern}); the stream would begin anew and repeat samples. Give the folder that the "
            "run before was given."
        )
    state = torch.load(found[0], weights_only=True)["dataloader_state_dict"]
    return dict(state)


def _check_layout(loader: DataLoader) -> None:
    layout = loader.layout
    if layout is None:
        return  # a service that runs: its batches have the layout that it was launched with
    cut = loader.mesh.cp > 1 and layout.slicing != "whole"
    if layout.keys != "megatron" or layout.rows != "packed" or cut:
        raise SpecError(
            f"Megatron: the loader's layout is {layout!r}; `get_batch` takes packed whole sequences with Megatron's "
            "keys. Use ol.Layout('megatron', slicing='whole')."
        )


def _check_args(args: Any, vp_stage: int | None) -> None:
    """Refuse settings with which Megatron would ask for other batches than the loader has."""
    packed = getattr(args, "sft", False) or getattr(args, "dataloader_inter_document_masking", False)
    wrong = {
        "--dataloader-type": (args.dataloader_type, "external", args.dataloader_type != "external"),
        "--micro-batch-size": (
            args.micro_batch_size,
            "1: a microbatch is one packed sequence",
            args.micro_batch_size != 1,
        ),
        "--rampup-batch-size": (
            getattr(args, "rampup_batch_size", None),
            "none: the job says what a step holds",
            bool(getattr(args, "rampup_batch_size", None)),
        ),
        "--virtual-pipeline": (vp_stage, "none: each chunk would take batches of its own", vp_stage is not None),
        "--sft or --dataloader-inter-document-masking": (
            False,
            "one of them: else samples that share a sequence would attend to each other",
            not packed,
        ),
    }
    for name, (value, needed, refused) in wrong.items():
        if refused:
            raise SpecError(f"Megatron: {name} is {value!r}, and overlord's iterator needs {needed}.")


def _check_lengths(loader: DataLoader, args: Any, mesh: ClientPlaceTree, *, hybrid: bool) -> None:
    assert loader.job is not None, "a loader of a running service was refused"
    cap = loader.job.batch.microbatch_cap
    if not hybrid and cap != args.seq_length:
        raise SpecError(
            f"Megatron: --seq-length is {args.seq_length}, and microbatch_tokens of the job is {cap}; Megatron's "
            f"buffers would not fit the batches. Set batch.microbatch_tokens to {args.seq_length}."
        )
    if not hybrid and args.global_batch_size % (args.micro_batch_size * mesh.dp):
        raise SpecError(
            f"Megatron: --global-batch-size is {args.global_batch_size}, which dp={mesh.dp} ranks cannot share evenly; "
            f"the number of microbatches is unclear. Give {mesh.dp} times batch.microbatches of the job."
        )
