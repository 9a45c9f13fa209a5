"""`HybridParallel`: trains on plans of hybrid data parallelism (`ol.strategies.hdp`) with plain torch.

In such a plan every DP x CP rank has its own number of microbatches, and each of them is its own or shared with some
other ranks. Parameters are replicated on all DP x CP ranks, or sharded over them by FSDP2. Ranks meet only

- in the rings of the microbatches they share (`ring_attention`), all in one process group that is made once; and
- when gradients are summed: once a step, behind the last microbatch.

Rules of this file:
1. Nothing waits for a rank in an order of its own: microbatches run in the order of the plan (`batch.meta.order`), and
   sums of gradients come behind all of them. So no two ranks wait for each other, whatever their speed.
2. Gradients are sums over tokens, divided by the labels of the whole step: it does not matter which rank has which
   sample, nor how many microbatches it has.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DistributedDataParallel

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import PlanError, ServiceLost, SpecError
from overlord.integrations.torch_batches import TorchBatch, TorchStep
from overlord.integrations.torch_loader import DataLoader
from overlord.integrations.torch_offload import Offloading
from overlord.integrations.torch_ring import Ring, attention_in

__all__ = ["HybridParallel"]

BUCKET_BYTES = 1 << 27
"""Gradients are summed in buffers of about this size."""
_FAILURE = "overlord/failed_rank"


class HybridParallel:
    """Runs the microbatches of a plan on the ranks of a process group, and sums their gradients.

    It works with a plain module (like DDP, but with one sum a step), with `ZeroRedundancyOptimizer` (ZeRO-1) and with
    FSDP2 (`fully_shard`). The attention of the model must be `ring_attention`, or that of `ring_models`.

    Example:
        A training loop::

            loader = DataLoader(job, mesh=mesh, strategy=ol.strategies.hdp())
            hdp = HybridParallel(loader)
            for step in loader:
                for batch in hdp.microbatches(step, model):
                    hdp.backward(loss_summed_over_tokens(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(
        self, loader: DataLoader, *, group: Any = None, offload: float | Callable[[TorchBatch], float] | None = None
    ) -> None:
        """Make the process group; all ranks of the world must call this together.

        Args:
            loader: Where the steps come from; its mesh decides which ranks train on the same parameters.
            group: A process group of this rank's DP x CP ranks, where there is one already. By default it is the
                world, or where the mesh has tp above 1 a group that is made here.
            offload: The share of the activations that waits on the host between forward and backward, 0 to 1: one for
                all microbatches, or a function of each. By default that of the plan (`hdp(offload=..)`), or none.

        Raises:
            SpecError: The mesh has pipeline stages, or its ranks are not those of the process group.
        """
        self.mesh: ClientPlaceTree = loader.mesh
        self.rank: int = loader.rank
        if self.mesh.pp > 1:
            raise SpecError(
                f"HybridParallel: the mesh {self.mesh} has pp={self.mesh.pp}, and microbatches run here one after "
                "another, forward and backward; stages would train without the ones before them. Use a mesh with pp=1, "
                "or Ring.of(batch) in a trainer with a pipeline schedule."
            )
        grouped = dist.is_available() and dist.is_initialized()
        if grouped and dist.get_rank() != self.rank:
            raise SpecError(
                f"HybridParallel: this process is rank {dist.get_rank()} of the process group and rank {self.rank} of "
                "the mesh; neighbours in a ring would be the wrong ones. Leave out rank= of the DataLoader."
            )
        if self.mesh.world_size > 1 and not grouped:
            raise SpecError(
                f"HybridParallel: the mesh {self.mesh} has {self.mesh.world_size} ranks, and there is no process "
                "group; sequences that they share could not be computed. Call dist.init_process_group first."
            )
        self.ranks: tuple[int, ...] = _replicas(self.mesh, self.rank)
        """The ranks that train on the same parameters: all DP x CP ranks with this rank's tp coordinate."""
        self._device = loader.device
        self.group: Any = self._joined(group) if grouped else None
        """The process group of `ranks`."""
        self._step: TorchStep | None = None
        self._ring: Ring | None = None
        self._sharded: dict[int, list[Any]] = {}
        self._ratio = offload
        self._offloading = Offloading()
        if offload is not None and not callable(offload):
            self._offloading(offload)  # refuses what is no share
        self._forward = contextlib.ExitStack()
        if grouped:
            _tell_failure(self.rank)

    def _joined(self, given: Any) -> Any:
        """Return the group of the DP x CP ranks, after all of them have met in it."""
        group = given
        if group is None and self.mesh.tp == 1:
            group = dist.group.WORLD
        elif group is None:
            for replicas in sorted({_replicas(self.mesh, rank) for rank in range(self.mesh.world_size)}):
                made = dist.new_group(list(replicas))
                group = made if self.rank in replicas else group
        if sorted(dist.get_process_group_ranks(group)) != sorted(self.ranks):
            raise SpecError(
                f"HybridParallel: group has the ranks {dist.get_process_group_ranks(group)}, and those that train on "
                f"the same parameters are {list(self.ranks)}; gradients would be wrong. Give their group, or none."
            )
        # NCCL opens one communicator for the group here; rings of some of its ranks then use it.
        dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return group

    # -- the microbatches of a step ------------------------------------------------------------

    def microbatches(self, step: TorchStep, model: nn.Module | None = None) -> Iterator[TorchBatch]:
        """Return the microbatches of a step, in order; behind the last one, gradients are summed over all ranks.

        Call `backward` once for each of them before the next. Without a model nothing is trained, as in evaluation:
        then there is no backward, and nothing is summed.

        Raises:
            SpecError: The model cannot be trained this way, or it has gradients already.
            PlanError: The plan is of another mesh.
            ServiceLost: Another rank ended.
        """
        self._check_step(step)
        sharded = [] if model is None else self._prepared(model)
        count = len(step.microbatches)
        if sharded and not count:
            raise PlanError(
                f"step {step.index}: rank {self.rank} has no microbatch, and FSDP gathers parameters in the forward of "
                "every rank; the others would wait for it. Use ol.strategies.hdp(), which gives every rank one."
            )
        self._step = step if model is not None else None
        try:
            for number in range(count):
                batch = step.microbatches[number]
                for module in sharded:
                    _meet(module, last=number + 1 == count)
                with self._computing(batch) as ring:
                    yield batch
                    if model is not None and self._ring is ring:
                        raise SpecError(
                            f"step {step.index}: microbatch {number} was taken without hdp.backward(loss); ranks that "
                            "share it would wait for its gradients. Call backward for each, or leave out the model "
                            "where nothing is trained."
                        )
            if model is not None and not sharded:
                self._sum_gradients(model)
        finally:
            self._step = None

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the current microbatch.

        Args:
            loss: The sum of the losses of its tokens on this rank; it is divided by `step.global_loss_tokens`, the
                labels of all ranks. A microbatch without labels has the sum 0, and must be run like any other.

        Raises:
            SpecError: There is no current microbatch, or the model's attention did not use its ring.
            ServiceLost: Another rank ended.
        """
        step, ring = self._step, self._ring
        if step is None or ring is None:
            raise SpecError(
                "backward: there is no microbatch to train on, or its backward has run. Call it once for each that "
                "hdp.microbatches(step, model) returns."
            )
        if len(ring) > 1 and not ring.calls:
            raise SpecError(
                f"step {step.index}: ranks {list(ring.ranks)} share this microbatch, and the model did not call "
                "ring_attention; its tokens would see only those of their own rank. Use ring_attention in the model, "
                "or attn_implementation='overlord_ring' (overlord.integrations.ring_models)."
            )
        self._ring = None
        self._forward.close()
        try:
            (loss / max(1, step.global_loss_tokens)).backward()  # 0 where all samples of a step are broken
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _failed_rank():
                raise
            raise _lost(error) from error

    @contextlib.contextmanager
    def _computing(self, batch: TorchBatch) -> Iterator[Ring]:
        ring = Ring.of(batch, group=self.group, lost=_lost)
        self._ring = ring
        if self._step is not None:  # otherwise there is no backward
            self._forward.enter_context(self._offloading(self._ratio_of(batch)))
        try:
            with attention_in(ring):
                yield ring
        finally:
            self._ring = None
            self._forward.close()

    def _ratio_of(self, batch: TorchBatch) -> float:
        planned = batch.meta.offload_ratio
        if self._ratio is None:
            return planned
        given = self._ratio(batch) if callable(self._ratio) else self._ratio
        if planned > given:
            raise SpecError(
                f"HybridParallel: offload is {given:g}, and the plan counts on {planned:g} of this microbatch's "
                "activations on the host; this rank would run out of memory. Leave offload out here, or out of hdp()."
            )
        return given

    def _check_step(self, step: TorchStep) -> None:
        if step.mesh != self.mesh:
            raise PlanError(
                f"from step {step.index} on the mesh is {step.mesh}, and this HybridParallel was made for {self.mesh}; "
                "rings would join the wrong ranks. Make another one on the process group of the new mesh."
            )

    # -- models --------------------------------------------------------------------------------

    def _prepared(self, model: nn.Module) -> list[Any]:
        """Return the modules that FSDP2 shards, made ready for ranks with different numbers of microbatches."""
        if isinstance(model, (DistributedDataParallel, FSDP1)):
            raise SpecError(
                f"HybridParallel: the model is wrapped in {type(model).__name__}, which meets all ranks in every "
                "backward; ranks with fewer microbatches would be waited for. Give the module itself, or use "
                "fully_shard (FSDP2)."
            )
        if any(parameter.grad is not None for parameter in model.parameters()):
            raise SpecError(
                "HybridParallel: the model has gradients before its first microbatch; those of the last step would be "
                "summed again over all ranks. Call optimizer.zero_grad() after every step, which sets them to None."
            )
        found = self._sharded.get(id(model))
        if found is None:
            found = [module for module in model.modules() if isinstance(module, FSDPModule)]
            for module in found:
                self._check_shards(cast("nn.Module", module))
                # Sums, not means; these are not recursive. Gloo has no sum with a factor, not even with 1.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # Gathering again for every microbatch would meet ranks that have fewer of them.
                module.set_reshard_after_forward(False, recurse=False)
            self._sharded = {id(model): found}
        return found

    def _check_shards(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and not set(self.ranks) <= set(mesh.mesh.flatten().tolist()):
                raise SpecError(
                    f"HybridParallel: FSDP shards parameters over ranks {mesh.mesh.flatten().tolist()}, and the DP x "
                    f"CP ranks that share them are {list(self.ranks)}; gradients of some would be missing. Call "
                    "fully_shard with a device mesh of all DP x CP ranks."
                )

    def _sum_gradients(self, model: nn.Module) -> None:
        """Sum the gradients of all replicas, in few large buffers; a rank without work adds zeros."""
        if self.group is None or len(self.ranks) == 1:
            return
        for bucket in _buckets([p for p in model.parameters() if p.requires_grad]):
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([cast("torch.Tensor", parameter.grad).reshape(-1) for parameter in bucket])
            try:
                dist.all_reduce(flat, group=self.group)
            except RuntimeError as error:
                raise _lost(error) from error
            sums = flat.split([parameter.numel() for parameter in bucket])
            for parameter, total in zip(bucket, sums, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(total.view_as(parameter))


def _replicas(mesh: ClientPlaceTree, rank: int) -> tuple[int, ...]:
    """Return the ranks that have the tp coordinate of one, by their DP x CP place."""
    tp = mesh.coords(rank).tp
    return tuple(mesh.rank(pp=0, dp=dp, cp=cp, tp=tp) for dp in range(mesh.dp) for cp in range(mesh.cp))


def _meet(module: Any, *, last: bool) -> None:
    """Let FSDP2 keep gradients to itself until the last microbatch, where all ranks sum theirs."""
    module.set_requires_gradient_sync(last, recurse=False)
    module.set_reshard_after_backward(last, recurse=False)
    module.set_is_last_backward(last)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Return parameters of one type and device together, in the same order on every rank."""
    by_kind: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in by_kind.values():
        bucket: list[nn.Parameter] = []
        filled = 0
        for parameter in alike:
            bucket.append(parameter)
            filled += parameter.numel() * parameter.element_size()
            if filled >= BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
        if bucket:
            yield bucket


# A rank that ends with an error writes it into the store of the process group, so that ranks that fail because of it
# can name the cause. The first one counts: those that follow only lost it.


def _tell_failure(rank: int) -> None:
    """Let an error that ends this process be known to the other ranks; once a process."""
    before = sys.excepthook
    if getattr(before, "tells_failure", False):
        return

    def told(kind: Any, error: BaseException, trace: Any) -> None:
        why = _failed_rank()
        if not isinstance(error, KeyboardInterrupt):
            _record_failure(f"rank {rank} ended with {kind.__name__}: {error}")
        if why and not isinstance(error, ServiceLost):  # such as from FSDP, which gathers in the user's own forward
            error.add_note(f"{why}, before this rank ended.")
        before(kind, error, trace)

    told.tells_failure = True  # type: ignore[attr-defined]
    sys.excepthook = told


def _record_failure(text: str) -> None:
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        if store.add(f"{_FAILURE}/count", 1) == 1:
            store.set(_FAILURE, text[:2000])
    except Exception:  # the process ends anyway, and says why itself
        pass


def _failed_rank() -> str:
    """Return the error that ended another rank; empty if none is known."""
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        return store.get(_FAILURE).decode() if store.check([_FAILURE]) else ""
    except Exception:  # the store is gone with its rank
        return ""


def _lost(error: Exception) -> Exception:
    why = _failed_rank() or f"a rank ended or did not answer, and left no reason ({error}); its own log may have one"
    return ServiceLost(f"this rank cannot go on: {why}. Fix that, and resume all ranks from the last checkpoint.")
