"""DataConstructor: gathers a step's samples and builds what each rank of its host gets to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from overlord.core.messages import LoaderOrder
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.samples import Cursor
from overlord.roles.ports import Loaders
from overlord.roles.views import StepHeader
from overlord.transforms.per_microbatch import PackedMicrobatch, StepSamples, join_payloads, pack_microbatch
from overlord.transforms.per_rank import keys_of_stage

Allocate = Callable[[int], npt.NDArray[np.uint8]]


class DataConstructor:
    """The sink of the data-parallel groups on one host."""

    def __init__(self, tree: ClientPlaceTree, loaders: Loaders, *, patch_bytes: int) -> None:
        self._tree = tree
        self._loaders = loaders
        self._patch_bytes = patch_bytes

    def gather(self, plan: LoadingPlan, ends: Mapping[int, Cursor]) -> Callable[[], StepSamples]:
        """Ask the SourceLoaders for the samples of a step; call the result to wait for them.

        Args:
            plan: The step's plan.
            ends: Where the step leaves each source.
        """
        orders = [
            LoaderOrder(plan.step, int(source), plan.draw.meta[plan.draw.source == source], ends[int(source)])
            for source in np.unique(plan.draw.source)
        ]
        collect = self._loaders.loader_do_plan(orders)  # (2) positional fetches from the SourceLoaders
        return lambda: join_payloads(plan, collect())

    def constructor_do_plan(
        self, plan: LoadingPlan, samples: StepSamples, bucket: int, microbatch: int, allocate: Allocate
    ) -> PackedMicrobatch:
        """Build one microbatch of one bucket, cut for all of its ranks."""
        return pack_microbatch(
            plan,
            samples,
            bucket,
            microbatch,
            cp=self._tree.cp,
            patch_bytes=self._patch_bytes,
            allocate=allocate,
        )

    def view_names(self, rank: int, packed: PackedMicrobatch) -> dict[str, str]:
        """Return which arrays of a microbatch a rank needs: batch key -> array name."""
        at = self._tree.coords(rank)
        names = {spec.name for spec in packed.arrays}
        wanted: dict[str, str] = {}
        for key in keys_of_stage(at.pp, self._tree.pp):
            for name in (key, f"{key}@{at.cp}"):
                if name in names:
                    wanted[key] = name
        return wanted | {name: name for name in names if name.startswith("meta.")}

    def bucket_of(self, rank: int) -> int:
        """Return the data-parallel bucket that feeds a rank."""
        return self._tree.coords(rank).dp


def header_of(plan: LoadingPlan) -> StepHeader:
    """Return what clients learn of a step before its data."""
    return StepHeader(
        index=plan.step,
        num_microbatches=plan.num_microbatches,
        global_loss_tokens=plan.global_loss_tokens,
        global_tokens=int(plan.draw.meta["tokens"].sum()),
        global_samples=len(plan.draw),
        order_digest=plan.draw.digest,
        plan_digest=plan.digest,
    )
