"""DataConstructor: gathers a step's samples, packs microbatches, and cuts the view of each rank of its host.

Rules of this file:
1. The place of a rank comes from the plan's own mesh: the next step may have another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from overlord.core.client_messages import StepHeader, mesh_to_text
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, Share, known_early
from overlord.roles.client import ENCODERS, Stage, needs
from overlord.roles.ports import Loaders
from overlord.transforms.microbatches.per_microbatch import (
    Allocate,
    PackedMicrobatch,
    PackingJob,
    Wanted,
    pack_encoder,
    pack_microbatch,
)
from overlord.transforms.microbatches.step_samples import StepSamples, join_payloads
from overlord.transforms.samples.per_sample import MediaDecoder

KEPT_MESHES = 4
"""Meshes with cached places: clients may be on both sides of a boundary."""


class _Places:
    """The places of the ranks of one mesh, cached: the lookup is in the path of a client's request."""

    def __init__(self, tree: ClientPlaceTree) -> None:
        self.bucket_of = functools.cache(tree.bucket_of)
        self.fetches = functools.cache(tree.fetches)
        self.group = functools.cache(lambda *at: tuple(tree.group_buckets(*at)))
        self.views: dict[tuple[int, tuple[str, ...]], tuple[dict[str, str], dict[str, int]]] = {}
        """By rank and array names, the view of a rank."""
        self.wanted: dict[Any, Wanted] = {}
        """What ranks that share a bucket need of its microbatches: by the bucket and the ranks, and by their places."""


class DataConstructor:
    """Builds the batches of the ranks of one host."""

    def __init__(self, loaders: Loaders, packing: PackingJob) -> None:
        self._loaders = loaders
        self._packing = packing
        self._places = functools.lru_cache(KEPT_MESHES)(_Places)

    @property
    def decodes(self) -> bool:
        """Whether a source has media that are decoded here."""
        return any(decoder is not None for decoder in self._packing.opening.decoders)

    def add_source(self, decoder: MediaDecoder | None) -> None:
        """Add the decoder of a new source, before any plan draws from it."""
        self._packing.opening.decoders.append(decoder)

    def drop_last_source(self) -> None:
        """Remove the source that was added last; no plan has drawn from it."""
        self._packing.opening.decoders.pop()

    def gather(
        self, plan: LoadingPlan, ranks: Collection[int] | None = None, *, open_all: bool = False
    ) -> Callable[[], StepSamples]:
        """Request the samples that some ranks (by default all) need of a step; call the result to wait for them.

        With `open_all` all media are decoded at once, so that `labels` is final. Otherwise it is final once everything
        that is `unopened` has been packed.
        """
        asking = range(plan.mesh.world_size) if ranks is None else ranks
        collect = self._loaders.loader_do_plan(plan, asking)  # (2) positional fetches from the SourceLoaders

        def join() -> StepSamples:
            share = Share.of(plan, asking, all_columns=self._packing.hook is not None)
            samples = join_payloads(plan, collect(), share)
            if len(samples.items):
                early = np.ones(len(plan.draw), np.bool_) if open_all else known_early(plan)
                faults = samples.open_media(self._packing.opening, early)
                self._found(plan, samples, [(int(samples.items.sample[item]), reason) for item, reason in faults])
            return samples

        return join

    def constructor_do_plan(
        self,
        plan: LoadingPlan,
        samples: StepSamples,
        bucket: int,
        microbatch: int,
        allocate: Allocate,
        ranks: tuple[int, ...] | None = None,
    ) -> PackedMicrobatch:
        """Build one microbatch of one bucket, cut for those of its ranks that are given; by default for all.

        Or the encoder inputs of one rank.
        """
        packing = self._packing
        encoder = next((name for name, number in ENCODERS.items() if number == microbatch), None)
        if encoder is not None:
            return pack_encoder(plan, samples, encoder, bucket, packing, allocate)
        wanted = self._wanted_by(plan, bucket, ranks)
        packed, faults = pack_microbatch(plan, samples, bucket, microbatch, packing, allocate, wanted)
        self._found(plan, samples, faults)
        return packed

    def _wanted_by(self, plan: LoadingPlan, bucket: int, ranks: tuple[int, ...] | None) -> Wanted:
        """Return which keys of a bucket's microbatches some of its ranks need."""
        known, tree = self._places(plan.mesh).wanted, plan.mesh
        by_ranks = (plan.axis, plan.broadcast, bucket, ranks)
        if by_ranks not in known:
            there = ranks
            if there is None:
                there = tuple({tree.fetcher_of(r, plan.broadcast) for r in tree.consumers(plan.axis, bucket)})
            places = tuple(sorted({(at.cp, at.pp) for r in there if self.fetches(r, plan) for at in [tree.coords(r)]}))

            def wanted(key: str) -> tuple[int, ...]:
                return tuple(sorted({cp for cp, pp in places if self._needs(tree, pp, key)}))

            known[by_ranks] = known.setdefault(places, functools.cache(wanted))
        return known[by_ranks]

    @property
    def _rotary(self) -> bool:
        return self._packing.layout.keys != "megatron" or self._packing.layout.positions != "plain"

    def _needs(self, tree: ClientPlaceTree, pp: int, key: str) -> bool:
        """Whether the ranks of a pipeline stage need a key."""
        stage = Stage(pp, tree.pp, None, tree.vpp)
        if key.startswith("meta."):
            return stage.embeds or not key.startswith(("meta.image_", "meta.audio_"))
        return needs(stage, key, mtp=self._packing.layout.mtp, rotary=self._rotary)

    def view_of(self, rank: int, plan: LoadingPlan, packed: PackedMicrobatch) -> tuple[dict[str, str], dict[str, int]]:
        """Return what a rank needs of a microbatch: batch key -> array name, and its scalars.

        Nothing for a rank that gets its tokens by the trainer's own broadcast.
        """
        names = tuple(spec.name for spec in packed.arrays)
        if "send_rows" in names:  # encoder inputs belong to one rank
            return {name: name for name in names}, {}
        if not self.fetches(rank, plan):
            return {}, {}
        views = self._places(plan.mesh).views
        found = views.get((rank, names))
        if found is None:  # microbatches differ only in which media they have
            found = views[rank, names] = self._view_of(plan.mesh, rank, names)
        return found[0], {**packed.scalars, **found[1]}

    def _view_of(
        self, tree: ClientPlaceTree, rank: int, names: tuple[str, ...]
    ) -> tuple[dict[str, str], dict[str, int]]:
        at, layout = tree.coords(rank), self._packing.layout
        wanted: dict[str, str] = {}
        for name in names:
            key, _, part = name.partition("@")
            if (not part or int(part) == at.cp) and self._needs(tree, at.pp, key):
                wanted[key] = name
        facts = {"meta.pp_rank": at.pp, "meta.pp": tree.pp, "meta.vpp": tree.vpp, "meta.mtp": layout.mtp}
        return wanted, {**facts, "meta.rotary": self._rotary}

    def _found(self, plan: LoadingPlan, samples: StepSamples, faults: list[tuple[int, str]]) -> None:
        """Take samples that do not decode out of the label count, and report them to their loaders."""
        if faults:
            draw = plan.draw
            samples.lose([sample for sample, _ in faults])
            self._loaders.note_faults(
                [(int(draw.source[s]), int(draw.meta["row"][s]), int(draw.meta["epoch"][s]), why) for s, why in faults]
            )

    def bucket_of(self, rank: int, plan: LoadingPlan) -> int:
        """Return the bucket of a plan that feeds a rank."""
        return self._places(plan.mesh).bucket_of(plan.axis, rank)

    def bins_of(self, ranks: Collection[int], plan: LoadingPlan) -> list[tuple[int, int]]:
        """Return every (bucket, microbatch) that some ranks fetch, in the order in which they are needed."""
        buckets = sorted({bucket for rank in ranks for bucket in self._fetched(rank, plan)})
        encoded = [(rank, ENCODERS[name]) for name in plan.encoders for rank in sorted(set(ranks))]
        counts = plan.microbatch_counts
        most = max((int(counts[bucket]) for bucket in buckets), default=0)
        return encoded + [(bucket, m) for m in range(most) for bucket in buckets if m < counts[bucket]]

    def wanted_by(self, ranks: Collection[int], plan: LoadingPlan) -> Callable[[int, int], bool]:
        """Return a function that says whether some ranks fetch a (bucket, microbatch), without listing them all."""
        buckets = {bucket for rank in ranks for bucket in self._fetched(rank, plan)}
        return lambda bucket, microbatch: bucket in (ranks if microbatch < 0 else buckets)

    def bin_of(self, rank: int, plan: LoadingPlan, microbatch: int) -> tuple[int, int] | None:
        """Return the (bucket, microbatch) that holds a rank's view; None if it has none.

        A rank that fetches several buckets for its broadcast group counts on from its own microbatches to those of the
        next bucket.
        """
        if microbatch < 0:
            return (rank, microbatch) if any(ENCODERS[name] == microbatch for name in plan.encoders) else None
        for bucket in self._fetched(rank, plan):
            count = int(plan.microbatch_counts[bucket])
            if microbatch < count:
                return bucket, microbatch
            microbatch -= count
        return None

    def takes(self, rank: int, plan: LoadingPlan, place: tuple[int, int]) -> bool:
        """Whether a rank fetches a (bucket, microbatch)."""
        bucket, microbatch = place
        return bucket == rank if microbatch < 0 else bucket in self._fetched(rank, plan)

    def _fetched(self, rank: int, plan: LoadingPlan) -> tuple[int, ...]:
        """Return the buckets that a rank fetches, its own first."""
        return self._group(rank, plan) if self.fetches(rank, plan) else ()

    def _group(self, rank: int, plan: LoadingPlan) -> tuple[int, ...]:
        """Return the buckets that a rank's broadcast group consumes."""
        return self._places(plan.mesh).group(plan.axis, rank, plan.broadcast)

    def fetches(self, rank: int, plan: LoadingPlan) -> bool:
        """Whether a rank fetches its data itself."""
        return self._places(plan.mesh).fetches(rank, plan.broadcast)

    def header_of(self, rank: int, plan: LoadingPlan, labels: int) -> StepHeader:
        """Return the header of a step for the client of a rank; `labels` are those of all ranks."""
        bucket, group = self.bucket_of(rank, plan), self._group(rank, plan)
        return StepHeader(
            index=plan.step,
            names=plan.draw.names,
            num_microbatches=int(plan.microbatch_counts[bucket]),
            axis=plan.axis,
            bucket=bucket,
            group=tuple((one, int(plan.microbatch_counts[one])) for one in group) if len(group) > 1 else (),
            fetches=self.fetches(rank, plan),
            encodes=tuple(plan.encoders),
            mixture_version=plan.draw.mixture_version,
            weights=plan.draw.weights,
            global_loss_tokens=labels,
            global_tokens=plan.total_tokens,
            global_squared_tokens=plan.squared_tokens,
            global_samples=len(plan.draw),
            order_digest=plan.draw.digest,
            plan_digest=plan.digest,
            mesh_text=mesh_to_text(plan.mesh),
        )
