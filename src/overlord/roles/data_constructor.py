"""DataConstructor: gathers a step's samples and builds what each rank of its host gets to see."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
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

    def gather(self, plan: LoadingPlan) -> Callable[[], StepSamples]:
        """Ask the SourceLoaders for the samples of a step; call the result to wait for them."""
        drawn = np.flatnonzero(np.diff(plan.draw.by_source[1])).tolist()
        orders = [plan.order_of(source) for source in drawn]
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

    def view_names(self, rank: int, plan: LoadingPlan, packed: PackedMicrobatch) -> dict[str, str]:
        """Return which arrays of a microbatch a rank needs: batch key -> array name.

        None for a rank that gets them by the trainer's own broadcast.
        """
        if not self.fetches(rank, plan):
            return {}
        at = self._tree.coords(rank)
        names = {spec.name for spec in packed.arrays}
        wanted: dict[str, str] = {}
        for key in keys_of_stage(at.pp, self._tree.pp):
            for name in (key, f"{key}@{at.cp}"):
                if name in names:
                    wanted[key] = name
        return wanted | {name: name for name in names if name.startswith("meta.")}

    def bucket_of(self, rank: int, plan: LoadingPlan) -> int:
        """Return the bucket of a plan that feeds a rank."""
        return self._tree.bucket_of(plan.axis, rank)

    def buckets_of(self, ranks: Collection[int], plan: LoadingPlan) -> set[int]:
        """Return the buckets of a plan that some ranks fetch."""
        return {self.bucket_of(rank, plan) for rank in ranks if self.fetches(rank, plan)}

    def bins_of(self, ranks: Collection[int], plan: LoadingPlan) -> list[tuple[int, int]]:
        """Return (bucket, microbatch) of all that some ranks fetch, in the order in which it is needed."""
        counts, buckets = plan.microbatch_counts, sorted(self.buckets_of(ranks, plan))
        most = max((int(counts[bucket]) for bucket in buckets), default=0)
        return [(bucket, m) for m in range(most) for bucket in buckets if m < counts[bucket]]

    def fetches(self, rank: int, plan: LoadingPlan) -> bool:
        """Whether a rank fetches its data itself."""
        return not plan.broadcast or self._tree.fetches(rank, plan.broadcast)

    def header_of(self, rank: int, plan: LoadingPlan) -> StepHeader:
        """Return what the client of a rank learns of a step before its data."""
        count = int(plan.microbatch_counts[self.bucket_of(rank, plan)])
        return header_of(plan, count, fetches=self.fetches(rank, plan))


def header_of(plan: LoadingPlan, count: int, *, fetches: bool) -> StepHeader:
    """Return the header of a step with so many microbatches."""
    return StepHeader(
        index=plan.step,
        num_microbatches=count,
        fetches=fetches,
        mixture_version=plan.draw.mixture_version,
        weights=plan.draw.weights,
        global_loss_tokens=plan.global_loss_tokens,
        global_tokens=plan.total_tokens,
        global_squared_tokens=plan.squared_tokens,
        global_samples=len(plan.draw),
        order_digest=plan.draw.digest,
        plan_digest=plan.digest,
    )
