"""What one host needs of a step: the samples its ranks train on or encode, and whose media it must see."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from overlord.core.messages import Payload
from overlord.core.plan import LoadingPlan

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """One host's part of a step."""

    samples: Bools
    """Drawn samples whose tokens or media the host needs."""
    media: Bools
    """Those whose images and clips it needs byte by byte; of the others it learns shapes and faults."""
    whole: bool
    """Whether all ranks are there, so that nothing need be left out."""

    @classmethod
    def of(cls, plan: LoadingPlan, ranks: Collection[int]) -> Share:
        """Work out what some ranks need of a plan.

        Example:
            Which half of a step the second data-parallel rank needs::

                share = Share.of(plan, {1})
                assert share.samples[plan.bin(1, 0).sample].all()
        """
        tree = plan.mesh
        if len(set(ranks)) == tree.world_size:
            everything = np.ones(len(plan.draw), np.bool_)
            return cls(everything, everything, whole=True)
        samples = np.zeros(len(plan.draw), np.bool_)
        fetching = [rank for rank in ranks if tree.fetches(rank, plan.broadcast)]
        for bucket in {tree.bucket_of(plan.axis, rank) for rank in fetching}:
            samples[_of_bucket(plan, bucket)] = True
        if plan.encoder is None:
            return cls(samples, samples, whole=False)
        media = np.zeros(len(plan.draw), np.bool_)
        for rank in ranks:
            media[plan.encoder.bin(rank, 0).sample] = True
        return cls(samples | media, media, whole=False)

    def cut(self, plan: LoadingPlan, payload: Payload) -> Payload:
        """Return the host's part of a payload: all samples of its source, or those that one of its loaders has."""
        if self.whole:
            return payload
        mine = plan.draw.samples_of(payload.source)
        mine = mine if payload.chosen is None else mine[payload.chosen]
        chosen = np.flatnonzero(self.samples[mine])
        heard = payload.media is not None and payload.media.kind == "audio"  # sounds stay with their tokens
        part = payload.take(chosen, np.ones(len(chosen), np.bool_) if heard else self.media[mine[chosen]])
        return part if payload.chosen is None else replace(part, chosen=payload.chosen[chosen])


def with_labels(plan: LoadingPlan, payload: Payload) -> Payload:
    """Return a payload as it leaves its loader, with the labels that its samples have by the plan."""
    mine = plan.draw.samples_of(payload.source).astype(np.int64)
    labels = plan.labels_of(mine if payload.chosen is None else mine[payload.chosen], payload.loss)
    if payload.media is not None:  # a medium that does not decode silences all of its sample
        labels[np.repeat(np.arange(len(labels)), np.diff(payload.media.rows))[payload.media.bad]] = 0
    late = payload.media is not None and payload.media.encoded and len(payload.media.start) > 0
    return replace(payload, labels=int(labels.sum()), late=late)


def _of_bucket(plan: LoadingPlan, bucket: int) -> npt.NDArray[np.int32]:
    first, stop = plan.bin_offsets[[bucket * plan.num_microbatches, (bucket + 1) * plan.num_microbatches]]
    return plan.pieces.sample[int(first) : int(stop)]


def known_early(plan: LoadingPlan) -> Bools:
    """Return the drawn samples of which it must be known at once whether their media decode.

    That is where images are encoded elsewhere than where their tokens are, and where a sample is cut into pieces: a
    broken image must silence all of its sample, wherever that goes. Other media can be opened when they are packed.
    """
    early = np.full(len(plan.draw), plan.encoder is not None)
    early[plan.pieces.sample[plan.pieces.start > 0]] = True
    return early
