"""Client: the trainer's side. Iterates over steps, reports metrics and positions, gives the state.

    Client         the stream of one rank, from a `Feed`: the DataConstructor of its host, as a runtime reaches it
    Step, Batch    what it delivers: a step, and its microbatches as mappings of arrays with their provenance
    Stage, needs   which keys of a batch a pipeline stage needs: the first embeds, the last computes the loss

Trainer processes import this module: it loads numpy, and neither numba nor what the other roles need.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from overlord.core.client_messages import MILLION, SLICINGS, StepHeader
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.samples import SampleId
from overlord.core.spec_errors import is_whole
from overlord.errors import ClosedError, SpecError

FIRST_STAGE_KEYS = (
    "input_ids",
    "tokens",
    "input",
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
    "input_features",
    "feature_attention_mask",
)
"""What embedding needs: token ids, and what the encoders read."""
LAST_STAGE_KEYS = ("labels", "shift_labels", "loss_mask")
"""What the loss needs."""
TOKEN_KEYS = ("input_ids", "tokens", "input")


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers that a pipeline rank (or one of its chunks) holds."""

    pp_rank: int = 0
    pp: int = 1
    chunk: int | None = None
    """Which of the rank's model chunks; None for all of them."""
    vpp: int = 1

    @property
    def embeds(self) -> bool:
        """Whether the embedding is among them."""
        return self.pp_rank == 0 and self.chunk in (None, 0)

    @property
    def has_loss(self) -> bool:
        """Whether the loss is computed here."""
        return self.pp_rank == self.pp - 1 and self.chunk in (None, self.vpp - 1)


def needs(stage: Stage, key: str, *, mtp: bool = False, rotary: bool = True) -> bool:
    """Return whether a pipeline stage needs a key: the first embeds, the last computes the loss.

    Args:
        stage: The stage.
        key: A key of the batch.
        mtp: Whether the last stage predicts several tokens.
        rotary: Whether every layer turns its queries by `position_ids` (all but Megatron's, which counts itself).

    Example:
        >>> [key for key in ("tokens", "labels", "cu_seqlens") if needs(Stage(1, 4), key)]
        ['cu_seqlens']
    """
    if key == "position_ids":
        return rotary or stage.embeds or (mtp and stage.has_loss)
    if key in FIRST_STAGE_KEYS:
        return stage.embeds or (mtp and stage.has_loss and key in TOKEN_KEYS)
    if key in LAST_STAGE_KEYS:
        return stage.has_loss
    return True  # what attention needs in every layer, and columns that a hook has added


# -- what a rank receives: steps, microbatches as mappings of arrays, and the provenance of every segment --------------


Array = npt.NDArray[Any]
AnyBatch = TypeVar("AnyBatch")

ENCODERS = {"encoder": -1, "audio_encoder": -2}
"""Encoders of a plan: the number of the microbatch that holds their inputs of a rank; its bucket is the rank itself."""

_ORIGIN = ("source", "epoch", "row", "segment_offsets", "segment_lengths")


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank's arrays of one microbatch, as a runtime delivers them."""

    arrays: Mapping[str, Array]
    """Batch keys, and `meta.x` columns of the provenance."""
    scalars: Mapping[str, int]


_NOWHERE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Place:
    """The rank that receives a batch, and the mesh it is in."""

    mesh: ClientPlaceTree
    rank: int

    def sharing(self, first: int, count: int) -> tuple[int, ...]:
        """Return the ranks of some neighbouring DP x CP places that have the same pp and tp coordinates as this one.

        Example:
            >>> Place(ClientPlaceTree(dp=2, cp=2, tp=2), rank=3).sharing(0, 2)
            (1, 3)
        """
        at, cp = self.mesh.coords(self.rank), self.mesh.cp
        places = (divmod(number, cp) for number in range(first, first + count))
        return tuple(self.mesh.rank(pp=at.pp, dp=dp, cp=part, tp=at.tp) for dp, part in places)

    def at_bucket(self, axis: str, bucket: int) -> Place:
        """Return the place in another bucket of a plan that corresponds to this one.

        Example:
            >>> Place(ClientPlaceTree(dp=2, cp=2, tp=2), rank=3).at_bucket("DP", 1).rank
            7
        """
        at = self.mesh.coords(self.rank)
        dp, cp = divmod(bucket, self.mesh.cp) if axis == "CP" else (bucket, at.cp)
        return Place(self.mesh, self.mesh.rank(pp=at.pp, dp=dp, cp=cp, tp=at.tp))


class BatchMeta:
    """The provenance of the segments of a microbatch, aligned with its cu_seqlens.

    A microbatch without pieces, which only keeps ranks in step, has one segment with source id -1.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        columns: Mapping[str, Array],
        facts: Mapping[str, int],
        place: Place | None = None,
    ) -> None:
        self._columns = columns
        self._facts = facts
        self._place = place
        self.source_names = names
        """The job's sources."""
        self.cu_seqlens: npt.NDArray[np.int32] = columns["cu_seqlens"]
        """Where segments (or rows) begin in the whole sequence, padding included."""
        self.source_ids: npt.NDArray[np.int64] = columns["source"]
        """The source of each segment, as an index into `source_names`."""
        self.segment_offsets: npt.NDArray[np.int64] = columns["segment_offsets"]
        """The first token of each segment inside its sample: 0, or more for later pieces of a split sample."""
        self.segment_lengths: npt.NDArray[np.int64] = columns["segment_lengths"]
        """Tokens of each segment without padding."""
        self.image_positions: npt.NDArray[np.int64] = columns.get("image_positions", _NOWHERE)
        """The positions of image tokens in this rank's sequence, if they are encoded elsewhere (`step.encoder`)."""
        self.image_rows: npt.NDArray[np.int64] = columns.get("image_rows", _NOWHERE)
        """Which row of all that the rank received belongs at each of `image_positions`."""
        self.audio_positions: npt.NDArray[np.int64] = columns.get("audio_positions", _NOWHERE)
        """The positions of the tokens of sounds, if they are encoded elsewhere (`step.audio_encoder`)."""
        self.audio_rows: npt.NDArray[np.int64] = columns.get("audio_rows", _NOWHERE)
        """Which row of all that the rank received belongs at each of `audio_positions`."""
        self.local_cp_size = facts.get("local_cp_size", 1)
        """Ranks that share this microbatch's sequences: cp, or less where hybrid data parallelism decides."""
        self.loss_tokens = facts.get("loss_tokens", 0)
        """Labels of this microbatch, over all ranks that share its sequences."""
        self.order = facts.get("order", 0)
        """Where it stands among the microbatches of all ranks: the same on all ranks that share it.

        On every rank it grows from microbatch to microbatch. So all ranks that run theirs one after another meet the
        ranks they share one with in one global order, and no two of them wait for each other.
        """
        self.offload_ratio = facts.get("offload", 0) / MILLION
        """The share of its activations that must wait on the host between forward and backward, 0 to 1.

        It is 0 unless the strategy plans with offloading (`hdp(offload=..)`), and the same on all ranks that share it.
        """
        self.slicing = SLICINGS[facts.get("slicing", 0)]
        """How the ranks that share a sequence cut it: see `ol.Layout`."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that share this microbatch's sequences, in the order of their slices.

        All have this rank's pp and tp coordinates. A microbatch of one rank alone has only that.
        """
        if self._place is None:
            raise SpecError(
                "ranks: this batch was made without the place of its rank, so the ranks that share it are unknown. "
                "Take batches from a client or a DataLoader."
            )
        if self.local_cp_size == 1:
            return (self._place.rank,)
        return self._place.sharing(self._facts["first_place"], self.local_cp_size)

    @property
    def dummy(self) -> bool:
        """Whether nothing of this microbatch counts in the loss, so that the mean over its labels is not a number.

        Such a microbatch keeps ranks in step, or all of its samples were found broken. Run it like any other, and
        divide the sum of its losses, which is 0, by `step.global_loss_tokens`.
        """
        return self.loss_tokens == 0

    def detached(self) -> BatchMeta:
        """Return a copy that does not refer to shared memory."""
        columns = {name: column.copy() for name, column in self._columns.items()}
        return BatchMeta(self.source_names, columns, self._facts, self._place)

    def __repr__(self) -> str:
        return f"BatchMeta({len(self.segment_lengths)} segments of {int(self.segment_lengths.sum())} tokens)"

    @cached_property
    def sample_ids(self) -> list[SampleId]:
        """The sample of each segment."""
        columns = (self._columns[k].tolist() for k in ("source", "row", "epoch"))
        return [SampleId(self.source_names[s] if s >= 0 else "", r, e) for s, r, e in zip(*columns, strict=True)]


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

    def __init__(self, view: RankView, names: tuple[str, ...], place: Place | None = None) -> None:
        self._values, columns = _apart(view.arrays)
        numbers, facts = _apart(view.scalars)
        self._values.update(numbers)
        # A rank that gets its batch by broadcast fetches nothing, so its segments are not known here.
        columns = {"origin": np.zeros((5, 0), np.int64), "cu_seqlens": np.zeros(1, np.int32), **columns}
        self.meta = BatchMeta(names, columns | dict(zip(_ORIGIN, columns["origin"], strict=True)), facts, place)
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
        """Return the content digest: keys, types, shapes and bytes; and the places of media encoded elsewhere."""
        digest = hashlib.blake2b(digest_size=16)
        meta = self.meta
        for index in (meta.image_positions, meta.image_rows, meta.audio_positions, meta.audio_rows):
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
        return self._get(at)

    def _get(self, index: int) -> AnyBatch:
        return self._fetch(index)


class FetchedMicrobatches(Microbatches["Batch"]):
    """Microbatches in shared memory, each fetched once."""

    def __init__(self, fetch: Callable[[int], Batch], count: int) -> None:
        super().__init__(fetch, count)
        self._held: dict[int, Batch] = {}

    def _get(self, index: int) -> Batch:
        if index not in self._held:
            self._held[index] = self._fetch(index)
        return self._held[index]

    def take(self, index: int) -> Batch:
        """Return a microbatch and do not hold it: it leaves shared memory with the last of its arrays."""
        return self._held.pop(index) if index in self._held else self._fetch(index)


class Step:
    """One step of one rank."""

    def __init__(
        self,
        header: StepHeader,
        microbatches: FetchedMicrobatches,
        source_names: tuple[str, ...] = (),
        encoders: Mapping[str, Callable[[], Batch]] | None = None,
        place: Place | None = None,
        others: Mapping[int, FetchedMicrobatches] | None = None,
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
        self.place = place
        """This rank in the mesh of the step."""
        self.microbatches = microbatches
        self.axis = header.axis
        """What the step distributes samples over: "DP", or "CP" (hybrid data parallelism)."""
        self.bucket = header.bucket
        """The bucket of that axis that this rank consumes; `mesh.consumers(axis, bucket)` are all ranks that do."""
        self.group = tuple(header.group)
        """(bucket, number of microbatches) of all buckets that the ranks of its broadcast group consume, where these
        are several (`broadcast_at("DP")`)."""
        self.fetched: Mapping[int, FetchedMicrobatches] = {header.bucket: microbatches} if header.fetches else {}
        """By bucket all microbatches that this rank fetches: its own, and those that it broadcasts to others."""
        self.fetched = {**self.fetched, **(others or {})}
        self._encoders = encoders or {}

    @cached_property
    def encoder(self) -> Batch | None:
        """What this rank encodes in this step, and how the tokens travel; None where images come with their tokens.

        Run the encoder once a step on its `pixel_values`, send `output[send_rows]` by an all-to-all over all ranks with
        `send_splits` and `recv_splits`, and put the received rows into each microbatch's embeddings:
        `embeddings[batch.meta.image_positions] = received[batch.meta.image_rows]`.
        """
        return self._encoders["encoder"]() if "encoder" in self._encoders else None

    @cached_property
    def audio_encoder(self) -> Batch | None:
        """The sounds that this rank encodes in this step; None where sounds come with their tokens.

        Use it as `encoder`, on its `input_features`: of each sound send the first `audio_lengths` rows of the output,
        and put what is received at `batch.meta.audio_positions`, by `batch.meta.audio_rows`.
        """
        return self._encoders["audio_encoder"]() if "audio_encoder" in self._encoders else None

    def __repr__(self) -> str:
        return f"Step(index={self.index}, microbatches={len(self.microbatches)}, samples={self.global_samples})"


# -- the client ----------------------------------------------------------------------------------------------------


class Feed(Protocol):
    """What a Client requests: served by the DataConstructor of its host."""

    mesh: ClientPlaceTree
    """The mesh of this rank's first step; the newest mesh for a rank that no mesh has."""

    def open_step(self, step: int) -> StepHeader | None:
        """Wait until a step is planned, and return its header; None past the end of the stream.

        Also None for a step with a mesh that does not have this rank. The request also reports that the trainer has
        finished the steps before it.
        """
        ...

    def microbatch(self, step: int, microbatch: int) -> RankView:
        """Wait until a microbatch is built, and return this rank's view of it."""
        ...

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Send the trainer's metrics; they are durable when this returns."""
        ...

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the stream before a step."""
        ...

    def close(self, next_step: int) -> None:
        """Release everything held for this rank; the steps before `next_step` have been trained on."""
        ...


class Client:
    """The stream of one rank: iterate over it to train.

    `state_dict()` between two steps is the state after the last step that was delivered. The stream ends where the job
    does, or before the first step with a mesh that does not have this rank.
    """

    def __init__(self, feed: Feed, rank: int, first_step: int) -> None:
        ranks = feed.mesh.world_size
        if not is_whole(rank, 0, ranks - 1):
            raise SpecError(
                f"rank {rank!r} is not in the mesh of {ranks} ranks; it would wait for data forever. "
                f"Use a rank from 0 to {ranks - 1}, launch with a larger mesh, or call service.reshard first."
            )
        self.rank = int(rank)
        self._feed = feed
        self._next_step = first_step
        self._closed = False
        self._pid = os.getpid()
        self.mesh = feed.mesh
        """The mesh of the next step, as far as it is known; `step.mesh` is the mesh of a step."""
        self.fetched_bytes = 0
        """Bytes of all batches delivered so far: what this rank needs, and nothing else."""

    @property
    def next_step(self) -> int:
        """The index of the next step."""
        return self._next_step

    def __repr__(self) -> str:
        return f"Client(rank={self.rank}, next_step={self._next_step})"

    def __iter__(self) -> Client:
        return self

    def __next__(self) -> Step:
        header = self._open_feed().open_step(self._next_step)  # (1) the client asks its DataConstructor
        if header is None:
            raise StopIteration
        self._next_step += 1
        self.mesh = header.next_mesh or header.mesh
        step, feed, place = header.index, self._feed, Place(header.mesh, self.rank)

        def fetch(microbatch: int, to: Place = place, first: int = 0) -> Batch:
            batch = Batch(feed.microbatch(step, first + microbatch), header.names, to)
            self.fetched_bytes += batch.nbytes
            return batch

        encoders = {name: partial(fetch, ENCODERS[name]) for name in header.encodes}
        own, others = header.num_microbatches, dict[int, FetchedMicrobatches]()
        for bucket, count in header.group[1:] if header.fetches else ():
            fetch_other = partial(fetch, to=place.at_bucket(header.axis, bucket), first=own)
            others[bucket] = FetchedMicrobatches(fetch_other, count)
            own += count
        return Step(header, FetchedMicrobatches(fetch, header.num_microbatches), header.names, encoders, place, others)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics of a step to the planner, such as `{"loss/web": 2.1}`. They take effect at step + lag."""
        if not is_whole(step, 0):
            raise SpecError(f"report: step is {step!r}, which is not a step. Report `step.index`.")
        if not isinstance(metrics, Mapping):
            raise SpecError(f"report: metrics are {metrics!r:.80}, not a mapping. Report as in {{'loss/web': 2.1}}.")
        clean: dict[str, float] = {}
        for key, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                raise SpecError(
                    f"report: {key} at step {step} is {value!r:.80}; a mixture that follows it would break. "
                    "Report finite numbers, or leave the metric out."
                )
            clean[str(key)] = number
        self._open_feed().report(int(step), clean)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the state of the stream at this position: small, JSON-able, the same on every rank.

        With `step` it is the state before one of the last steps that were delivered.
        """
        return self._open_feed().state(self._next_step if step is None else step)

    def close(self) -> None:
        """Detach from the service."""
        if not self._closed:
            self._closed = True
            if self._pid == os.getpid():  # in a fork, the connection belongs to the parent
                self._feed.close(self._next_step)

    def _open_feed(self) -> Feed:
        if self._closed:
            raise ClosedError(f"the client of rank {self.rank} is closed. Take another one from the service.")
        if self._pid != os.getpid():
            raise SpecError(
                f"the client of rank {self.rank} was made in process {self._pid} and is used in process {os.getpid()}, "
                "a fork of it; both would deliver the same samples, over one connection. Attach in the process that "
                "trains. A torch.utils.data.DataLoader forks workers: use num_workers=0, since the service reads "
                "ahead by itself."
            )
        return self._feed

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
