"""What a rank receives: steps, microbatches as mappings of arrays, and the provenance of every segment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from overlord.core.client_messages import StepHeader
from overlord.core.samples import SampleId
from overlord.core.stage_keys import Stage, needs
from overlord.errors import SpecError

Array = npt.NDArray[Any]
AnyBatch = TypeVar("AnyBatch")

ENCODER = -1
"""The number of the microbatch that holds the encoder inputs of a rank; its bucket is the rank itself."""

_ORIGIN = ("source", "epoch", "row", "segment_offsets", "segment_lengths")


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank's arrays of one microbatch, as a runtime delivers them."""

    arrays: Mapping[str, Array]
    """Batch keys, and `meta.x` columns of the provenance."""
    scalars: Mapping[str, int]


_NOWHERE = np.empty(0, np.int64)


class BatchMeta:
    """The provenance of the segments of a microbatch, aligned with its cu_seqlens.

    A microbatch without pieces, which only keeps ranks in step, has one segment with source id -1.
    """

    def __init__(self, names: tuple[str, ...], columns: Mapping[str, Array], facts: Mapping[str, int]) -> None:
        self._names = names
        self._columns = columns
        self.cu_seqlens: npt.NDArray[np.int32] = columns["cu_seqlens"]
        """Where segments (or rows) begin in the whole sequence, padding included."""
        self.local_cp_size = facts.get("local_cp_size", 1)
        """Ranks that share this microbatch's sequences: cp, or less where hybrid data parallelism decides."""
        self.loss_tokens = facts.get("loss_tokens", 0)
        """Labels of this microbatch, over all ranks that share its sequences."""

    @property
    def dummy(self) -> bool:
        """Whether nothing of this microbatch counts in the loss, so that the mean over its labels is not a number.

        Such a microbatch keeps ranks in step, or all of its samples were found broken. Run it like any other, and
        divide the sum of its losses, which is 0, by `step.global_loss_tokens`.
        """
        return self.loss_tokens == 0

    @property
    def image_positions(self) -> npt.NDArray[np.int64]:
        """The positions of image tokens in this rank's sequence, if they are encoded elsewhere (`step.encoder`)."""
        return self._columns.get("image_positions", _NOWHERE)

    @property
    def image_rows(self) -> npt.NDArray[np.int64]:
        """Which row of all that the rank received belongs at each of `image_positions`."""
        return self._columns.get("image_rows", _NOWHERE)

    @property
    def source_ids(self) -> npt.NDArray[np.int64]:
        """The source of each segment, as an index into `source_names`."""
        return self._columns["source"]

    @property
    def source_names(self) -> tuple[str, ...]:
        """The job's sources."""
        return self._names

    @property
    def segment_offsets(self) -> npt.NDArray[np.int64]:
        """The first token of each segment inside its sample: 0, or more for later pieces of a split sample."""
        return self._columns["segment_offsets"]

    @property
    def segment_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each segment without padding."""
        return self._columns["segment_lengths"]

    def detached(self) -> BatchMeta:
        """Return a copy that does not refer to shared memory."""
        columns = {name: column.copy() for name, column in self._columns.items()}
        facts = {"local_cp_size": self.local_cp_size, "loss_tokens": self.loss_tokens}
        return BatchMeta(self._names, columns, facts)

    def __repr__(self) -> str:
        return f"BatchMeta({len(self.segment_lengths)} segments of {int(self.segment_lengths.sum())} tokens)"

    @cached_property
    def sample_ids(self) -> list[SampleId]:
        """The sample of each segment."""
        columns = (self._columns[k].tolist() for k in ("source", "row", "epoch"))
        return [SampleId(self._names[s] if s >= 0 else "", r, e) for s, r, e in zip(*columns, strict=True)]


class KeyedBatch(Mapping[str, Any]):
    """A mapping of keys, as a model takes them: what batches of arrays and of tensors have in common."""

    _values: dict[str, Any]
    _facts: Mapping[str, int]
    """Numbers about the rank and its microbatch."""

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k}{list(v.shape) if hasattr(v, 'shape') else '=' + str(v)}" for k, v in self.items())
        return f"{type(self).__name__}({shapes})"

    def chunk(self, number: int) -> dict[str, Any]:
        """Return what one model chunk of a virtual pipeline needs: the first embeds, the last computes the loss."""
        facts = self._facts
        stage = Stage(facts.get("pp_rank", 0), facts.get("pp", 1), number, facts.get("vpp", 1))
        if not 0 <= number < stage.vpp:
            raise SpecError(
                f"chunk: {number} is not one of the {stage.vpp} model chunks of a rank; it would get no data. Set vpp= "
                "of the mesh, and use 0 to vpp - 1."
            )
        mtp, rotary = bool(facts.get("mtp", 0)), bool(facts.get("rotary", 1))
        return {key: value for key, value in self.items() if needs(stage, key, mtp=mtp, rotary=rotary)}

    def pair(self) -> tuple[dict[str, Any], Any]:
        """Return (inputs, labels), as torchtitan's trainer takes a batch."""
        return {key: value for key, value in self.items() if key != "labels"}, self.get("labels")


class Batch(KeyedBatch):
    """One microbatch of one rank: a mapping of arrays that a model takes as keyword arguments.

    Arrays of the local runtime lie in shared memory and stay valid as long as they are referenced;
    treat them as read-only.
    """

    def __init__(self, view: RankView, names: tuple[str, ...]) -> None:
        self._values, columns = _apart(view.arrays)
        numbers, facts = _apart(view.scalars)
        self._values.update(numbers)
        # A rank that gets its batch by broadcast fetches nothing, so its segments are not known here.
        columns = {"origin": np.zeros((5, 0), np.int64), "cu_seqlens": np.zeros(1, np.int32), **columns}
        self.meta = BatchMeta(names, columns | dict(zip(_ORIGIN, columns["origin"], strict=True)), facts)
        self._facts = facts

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays: what this rank reads of the microbatch."""
        return sum(v.nbytes for v in self.values() if isinstance(v, np.ndarray))

    @property
    def facts(self) -> Mapping[str, int]:
        """Numbers about the rank and its microbatch."""
        return self._facts

    def digest(self) -> str:
        """Return the content digest: keys, types, shapes and bytes; and the places of images encoded elsewhere."""
        digest = hashlib.blake2b(digest_size=16)
        for index in (self.meta.image_positions, self.meta.image_rows):
            digest.update(np.ascontiguousarray(index).data)
        for key in sorted(self):
            value = self[key]
            if isinstance(value, np.ndarray):
                digest.update(f"{key} {value.dtype.str} {value.shape}".encode())
                digest.update(np.ascontiguousarray(value).data)
            else:
                digest.update(f"{key} {value}".encode())
        return digest.hexdigest()


def _apart(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is for the model, and what is about the batch (`meta.x`)."""
    values: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for key, value in given.items():
        if key.startswith("meta."):
            about[key[5:]] = value
        else:
            values[key] = value
    return values, about


class Microbatches(Sequence[AnyBatch]):
    """The microbatches of one step, each fetched when it is accessed."""

    def __init__(self, fetch: Callable[[int], AnyBatch], count: int) -> None:
        self._fetch = fetch
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        at = index + self._count if index < 0 else index
        if not 0 <= at < self._count:
            raise IndexError(f"microbatch {index} of a step with {self._count}")
        return self._fetch(at)


class Step:
    """One step of one rank."""

    def __init__(
        self,
        header: StepHeader,
        microbatches: Microbatches[Batch],
        source_names: tuple[str, ...] = (),
        encoder: Callable[[], Batch] | None = None,
    ) -> None:
        self.index = header.index
        self.global_loss_tokens = header.global_loss_tokens
        """Labels of the whole global batch: divide the summed loss by this on every rank.

        The same on every rank and host, and exactly the labels that all ranks get: samples that do not decode, and what
        is missing of samples that are shorter than their length column says, are not in it.
        """
        self.global_tokens = header.global_tokens
        self.global_squared_tokens = header.global_squared_tokens
        """Sum of squared sequence lengths of the whole global batch: the attention part of a FLOPs count."""
        self.global_samples = header.global_samples
        self.order_digest = header.order_digest
        self.plan_digest = header.plan_digest
        self.mesh = header.mesh
        """The mesh of this step: another one from the step on that `service.reshard` returned."""
        self.mixture_version = header.mixture_version
        """The version of the mixture that the step was drawn with; reports and live changes increase it."""
        self.weights = tuple(header.weights)
        """That mixture's weights, one for each of `source_names`."""
        self.source_names = source_names
        """The job's sources, in alphabetical order, followed by those added while the stream ran."""
        self.fetches = header.fetches
        """False where the trainer broadcasts to this rank: its batches are empty."""
        self.microbatches = microbatches
        self._fetch_encoder = encoder

    @cached_property
    def encoder(self) -> Batch | None:
        """What this rank encodes in this step, and how the tokens travel; None where images come with their tokens.

        Run the encoder once a step on its `pixel_values`, send `output[send_rows]` by an all-to-all over all ranks with
        `send_splits` and `recv_splits`, and put the received rows into each microbatch's embeddings:
        `embeddings[batch.meta.image_positions] = received[batch.meta.image_rows]`.
        """
        return self._fetch_encoder() if self._fetch_encoder is not None else None

    def __repr__(self) -> str:
        return f"Step(index={self.index}, microbatches={len(self.microbatches)}, samples={self.global_samples})"
