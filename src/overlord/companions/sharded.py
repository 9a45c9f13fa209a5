"""Whole matrices out of shards: which rank has which part of a weight, which one measures it, and how it gets there.

    Pieces     which ranks hold which boxes of each weight, and the rank that owns it
    gather     the weights that this rank owns, whole
    shared     the floats of all owners, on every rank

Owner computes: each matrix is gathered on one rank, which measures it, so each is measured once and no rank holds more
than its share. A shard is described by the box that it is of the whole weight, whatever cut it: FSDP, tensor
parallelism by rows or columns, both, replicas of either. A stage of a pipeline has its own weights and owners.

What an owner measured is sent to all ranks as it is. Ranks that computed it again would differ in the last bits, and
their factors would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from overlord.companions.measured import Measured
from overlord.errors import SpecError
from overlord.planning.balancing.methods import balance_greedy

GATHERED_BYTES = 1 << 30
"""Weights that are under way to their owners at once."""
_COST_UNIT = 1 << 20
"""Costs are cubes of sides: divided by this, the sum of any model's fits an integer of the planner's balancing."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) of a part of a weight."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where one weight lies."""

    weight: Measured
    dtype: torch.dtype
    owner: int
    """The rank that measures it."""
    sources: Mapping[Box, int] = field(default_factory=dict)
    """The rank that each box is taken from."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return math.prod(self.weight.shape) * self.dtype.itemsize


class Ranks:
    """The ranks that have parts of one model, one of which is this process.

    Args:
        group: Their process group; None for all ranks, or for this process alone where there are no others.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._alone = not (dist.is_available() and dist.is_initialized())
        self._group = group
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.count = 1 if self._alone else dist.get_world_size(group)
        if self.rank < 0:
            raise SpecError(
                "this process is not in the process group of group=; it has no part in the exchange and the others "
                "would wait for it. Pass a group with all ranks of the model."
            )

    def everyones(self, mine: Any) -> list[Any]:
        """Return what each rank has."""
        if self.count == 1:
            return [mine]
        all_of_them: list[Any] = [None] * self.count
        dist.all_gather_object(all_of_them, mine, group=self._group)
        return all_of_them

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send tensors to ranks while others arrive; both sides list those between two ranks in the same order."""
        steps = [dist.P2POp(dist.isend, tensor, self._global(rank), self._group) for rank, tensor in sends]
        steps += [dist.P2POp(dist.irecv, tensor, self._global(rank), self._group) for rank, tensor in receives]
        if steps:
            for work in dist.batch_isend_irecv(steps):
                work.wait()

    def shared(self, mine: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the values of all ranks: each has NaN where another one has a value, or none has."""
        if self.count == 1:
            return mine
        has = ~np.isnan(mine)
        # The sum of one number and zeros is that number, bit for bit, in whatever order they are added.
        table = torch.from_numpy(np.stack([np.where(has, mine, 0.0), has.astype(np.float64)])).to(self._device())
        dist.all_reduce(table, group=self._group)
        values, holders = table.cpu().numpy()
        return np.where(holders > 0, values, np.nan)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _device(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend(self._group) == "nccl" else "cpu")


def box_of(name: str, parameter: torch.Tensor) -> Box | None:
    """Return the part of a weight that this rank holds, None where its shard is empty.

    Raises:
        SpecError: It is sharded in a way that is no box of the weight.
    """
    if not isinstance(parameter, DTensor):
        if getattr(parameter, "tensor_model_parallel", False) and getattr(parameter, "partition_dim", -1) >= 0:
            raise SpecError(
                f"the weight {name!r} is cut over tensor parallel ranks by Megatron, which does not say how in the "
                "parameter; its parts could not be put together. Measure with tensor parallelism of DTensor, or with "
                "tensor_model_parallel_size=1."
            )
        return (0,) * parameter.ndim, tuple(parameter.shape)
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(isinstance(placement, Partial) for placement in parameter.placements):
        raise SpecError(
            f"the weight {name!r} is a DTensor with partial sums ({parameter.placements}); no rank has its values. "
            "Redistribute it to shards or replicas."
        )
    sizes, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return (tuple(offset), tuple(sizes)) if math.prod(sizes) else None


def pieces_of(weights: Sequence[Measured], parameters: Mapping[str, torch.Tensor], ranks: Ranks) -> list[Pieces]:
    """Return the weights of all ranks, in the order of ranks, dealt to owners; every rank calls it.

    Raises:
        SpecError: Ranks disagree about a weight, or their parts do not make up the whole.
    """
    mine = [(weight, parameters[weight.name].dtype, box_of(weight.name, parameters[weight.name])) for weight in weights]
    first: dict[str, tuple[Measured, torch.dtype]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, theirs in enumerate(ranks.everyones(mine)):
        for weight, dtype, box in theirs:
            known_as, _ = first.setdefault(weight.name, (weight, dtype))
            if known_as != weight:
                raise SpecError(
                    f"the weight {weight.name!r} is {known_as.shape} on one rank and {weight.shape} on rank {rank}; "
                    "their parts could not be put together. Give stages of a pipeline names of their own, as "
                    "torch.distributed.pipelining does."
                )
            boxes = holders.setdefault(weight.name, {})
            if box is not None:
                boxes.setdefault(box, []).append(rank)
    for name, (weight, _) in first.items():
        _check_whole(name, weight.shape, list(holders[name]))
    owners = _dealt([weight for weight, _ in first.values()], holders)
    return [
        Pieces(weight, dtype, owners[name], {box: _nearest(some, owners[name]) for box, some in holders[name].items()})
        for name, (weight, dtype) in first.items()
    ]


def gather(pieces: Sequence[Pieces], parameters: Mapping[str, torch.Tensor], ranks: Ranks) -> Iterator[torch.Tensor]:
    """Yield copies of the weights that this rank owns, in their order; every rank goes through all of them."""
    for window in _windows(pieces):
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        parts: list[list[tuple[Box, torch.Tensor]]] = []
        for piece in window:
            parts.append([])
            for box, source in piece.sources.items():
                if source == ranks.rank:
                    local = _local(parameters[piece.weight.name])
                    if piece.owner == ranks.rank:
                        parts[-1].append((box, local))
                    else:
                        sends.append((piece.owner, local.contiguous()))
                elif piece.owner == ranks.rank:
                    buffer = torch.empty(box[1], dtype=piece.dtype, device=_local_device(parameters))
                    receives.append((source, buffer))
                    parts[-1].append((box, buffer))
        ranks.exchange(sends, receives)
        for piece, some in zip(window, parts, strict=True):
            if piece.owner == ranks.rank:
                yield _whole(piece.weight.shape, some)


def _whole(shape: tuple[int, ...], parts: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    whole = torch.empty(shape, dtype=parts[0][1].dtype, device=parts[0][1].device)
    for (offset, sizes), part in parts:
        place = tuple(slice(begin, begin + size) for begin, size in zip(offset, sizes, strict=True))
        whole[place] = part
    return whole


def _windows(pieces: Sequence[Pieces]) -> Iterator[list[Pieces]]:
    window: list[Pieces] = []
    nbytes = 0
    for piece in pieces:
        if window and nbytes + piece.nbytes > GATHERED_BYTES:
            yield window
            window, nbytes = [], 0
        window.append(piece)
        nbytes += piece.nbytes
    if window:
        yield window


def _local(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_device(parameters: Mapping[str, torch.Tensor]) -> torch.device:
    return next(iter(parameters.values())).device


def _dealt(weights: Sequence[Measured], holders: Mapping[str, Mapping[Box, Sequence[int]]]) -> dict[str, int]:
    """Return the owner of each weight: the largest first, to the rank with the least so far of those with a part."""
    by_ranks: dict[tuple[int, ...], list[Measured]] = {}
    for weight in weights:
        having = sorted({rank for ranks in holders[weight.name].values() for rank in ranks})
        by_ranks.setdefault(tuple(having), []).append(weight)
    owners: dict[str, int] = {}
    for candidates, theirs in by_ranks.items():
        costs = np.array([-(-weight.cost // _COST_UNIT) for weight in theirs], np.int64)
        bins = balance_greedy(costs, np.zeros(len(costs), np.int64), len(candidates), 0)
        assert bins is not None, "items of size 0 always fit"
        owners |= {weight.name: candidates[place] for weight, place in zip(theirs, bins.tolist(), strict=True)}
    return owners


def _nearest(ranks: Sequence[int], owner: int) -> int:
    """Return the rank that sends a part which several hold: neighbours are in the same replica, on the same host."""
    return min(ranks, key=lambda rank: (abs(rank - owner), rank))


def _check_whole(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    volume = sum(math.prod(sizes) for _, sizes in boxes)
    inside = all(
        begin + size <= side for offset, sizes in boxes for begin, size, side in zip(offset, sizes, shape, strict=True)
    )
    if volume != math.prod(shape) or not inside:
        raise SpecError(
            f"the parts of the weight {name!r} on all ranks do not make up {shape}: {sorted(boxes)[:4]}; it could not "
            "be measured. Pass group= with all ranks that hold parts of the model."
        )
