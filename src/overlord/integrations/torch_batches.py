"""Steps and microbatches as torch tensors: each in its own memory, or a view of one flat buffer, which is copied to the
device ahead of the trainer, or broadcast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from overlord.core.samples import CLIP_MEAN, CLIP_STD
from overlord.errors import SpecError
from overlord.roles.client import Batch, BatchMeta, KeyedBatch, Microbatches, Place, RankView, Step

T = TypeVar("T")

ALIGNMENT = 256
"""Tensors begin at multiples of this many bytes, as vectorised kernels require."""

_STAY = ("send_splits", "recv_splits")
"""Numbers that an all-to-all takes as a list: reading them from the device would synchronise."""

_ROWS_OF_ORIGIN = ("source", "epoch", "row", "segment_offsets", "segment_lengths")

IMAGE_INDICES = ("image_positions", "image_rows", "audio_positions", "audio_rows")
"""Columns of the provenance that index tensors, and so are on the same device."""


class TorchMeta:
    """The provenance of a batch's segments: like `Batch.meta`, with indices as tensors."""

    def __init__(self, meta: BatchMeta, indices: Mapping[str, torch.Tensor] | None = None) -> None:
        found = indices or {name: torch.tensor(getattr(meta, name)) for name in IMAGE_INDICES}
        self._meta = meta.detached()  # a view would keep the shared segment
        self.image_positions = found["image_positions"]
        """The positions of image tokens in this rank's sequences (all rows concatenated)."""
        self.image_rows = found["image_rows"]
        """Which of the rows that `exchange_images` returns belongs at each of them."""
        self.audio_positions = found["audio_positions"]
        """The same of sounds that are encoded apart (`step.audio_encoder`)."""
        self.audio_rows = found["audio_rows"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meta, name)

    def __repr__(self) -> str:
        return repr(self._meta)


class TorchBatch(KeyedBatch):
    """One microbatch as tensors: `model(**batch)` works. `batch.meta` has the provenance of its segments."""

    def __init__(self, batch: Batch, arrived: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take a batch of arrays; or one without them, and the tensors; names of indices begin with `meta.`."""
        if arrived is None:
            # One copy out of shared memory: tensors may be written to, and the shared segment is free again.
            self._values = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}
            self.meta = TorchMeta(batch.meta)
        else:
            self._values = {key: tensor for key, tensor in arrived.items() if not key.startswith("meta.")}
            self._values |= dict(batch)
            self.meta = TorchMeta(batch.meta, {name: arrived[f"meta.{name}"] for name in IMAGE_INDICES})
        self._facts = batch.facts
        self.on_use: Callable[[], None] | None = None
        """Called when a value is taken out: what a trainer only fetched ahead is not touched."""
        self.step: TorchStep | None = None
        """The step it belongs to, where `loader.flat(..)` handed it out."""

    def __getitem__(self, key: str) -> Any:
        if self.on_use is not None:
            self.on_use()
        return super().__getitem__(key)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> TorchBatch:
        """Move the tensors to a device, and the indices of `meta` with them; return this batch."""
        move = {k: v.to(device, non_blocking=non_blocking) for k, v in self.items() if isinstance(v, torch.Tensor)}
        self._values |= move
        for name in IMAGE_INDICES:
            setattr(self.meta, name, getattr(self.meta, name).to(device, non_blocking=non_blocking))
        return self


def _copied(batch: Batch | None) -> TorchBatch | None:
    return None if batch is None else TorchBatch(batch)


class TorchMicrobatches(Microbatches[TorchBatch]):
    """The microbatches of one step, fetched and copied when they are accessed."""


@dataclass(slots=True)
class StepProgress:
    """How far a trainer is with a step that it was handed."""

    index: int
    used: bool = False
    """Whether one of its microbatches, or what this rank encodes, was used: a step that was fetched ahead is not."""

    def use(self) -> None:
        """Note that it is used."""
        self.used = True


class TorchStep:
    """One step of one rank."""

    def __init__(
        self,
        step: Step,
        take: Callable[[int], TorchBatch] | None = None,
        encode: Callable[[int], TorchBatch | None] | None = None,
        group: Any = None,
    ) -> None:
        """Take a step of arrays.

        Args:
            step: The step as this rank's client has it.
            take: Returns a microbatch by its number; by default it is copied out of shared memory.
            encode: Returns what this rank encodes, images (0) or sounds (1); by default it is copied out of shared
                memory.
            group: The process group of the ranks that get the same microbatches by broadcast.
        """
        self.index = step.index
        self.global_loss_tokens = step.global_loss_tokens
        self.global_tokens = step.global_tokens
        self.global_squared_tokens = step.global_squared_tokens
        self.global_samples = step.global_samples
        self.mixture_version = step.mixture_version
        self.weights = step.weights
        self.source_names = step.source_names
        self.mesh = step.mesh
        """The mesh of this step: another one from the step on that `service.reshard` returned."""
        self.fetches = step.fetches
        """False where the microbatches come from another rank, by broadcast.

        They are the same on all ranks of `group`; without a process group they are empty.
        """
        self.group = group
        """The process group that shares its microbatches (`broadcast_at`); None if each rank has its own.

        Rows of `exchange_images` come to its first rank: where there are images, broadcast these too.
        """
        self.progress = StepProgress(step.index)
        self.take = take or (lambda index: TorchBatch(step.microbatches[index]))
        """Return a microbatch by its number; the step does not count as used by that."""
        self.microbatches = TorchMicrobatches(self._use, len(step.microbatches))
        self._encode = encode or (lambda which: _copied((step.encoder, step.audio_encoder)[which]))

    def _use(self, index: int) -> TorchBatch:
        self.progress.use()
        return self.take(index)

    @cached_property
    def encoder(self) -> TorchBatch | None:
        """What this rank encodes in this step (`vlm_hybrid`), and how the tokens travel; see `exchange_images`."""
        self.progress.use()
        return self._encode(0)

    @cached_property
    def audio_encoder(self) -> TorchBatch | None:
        """The sounds that this rank encodes in this step (`vlm_hybrid` with `audio`); see `exchange_images`."""
        self.progress.use()
        return self._encode(1)

    def __repr__(self) -> str:
        return f"TorchStep(index={self.index}, microbatches={len(self.microbatches)}, samples={self.global_samples})"


# Flat buffers.


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor in the flat buffer."""

    key: str
    """The batch's key; `meta.` stands before an index of the provenance."""
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class FlatHeader:
    """A microbatch without its tensors: their places, the batch's scalars, and its provenance."""

    slots: tuple[Slot, ...]
    nbytes: int
    scalars: Mapping[str, int]
    columns: Mapping[str, npt.NDArray[Any]]
    """The provenance, as `meta.` columns; and arrays that stay on the host."""

    def to_bytes(self, **more: Any) -> bytes:
        """Return the header as one line of JSON, with further entries, and the bytes of its columns."""
        slots = [[slot.key, slot.dtype, slot.shape, slot.offset] for slot in self.slots]
        columns = [[name, column.dtype.str, column.shape] for name, column in self.columns.items()]
        words = {"slots": slots, "nbytes": self.nbytes, "scalars": dict(self.scalars), "columns": columns, **more}
        line = json.dumps(words, default=int).encode() + b"\n"
        return line + b"".join(np.ascontiguousarray(column).tobytes() for column in self.columns.values())

    @classmethod
    def from_bytes(cls, data: bytes) -> FlatHeader:
        """Read a header."""
        line, _, rest = data.partition(b"\n")
        words = json.loads(line)
        columns, at = {}, 0
        for name, dtype, shape in words["columns"]:
            count = int(np.prod(shape, dtype=np.int64))
            columns[name] = np.frombuffer(rest, dtype, count, at).reshape(shape)
            at += columns[name].nbytes
        slots = tuple(Slot(key, dtype, tuple(shape), offset) for key, dtype, shape, offset in words["slots"])
        return cls(slots, words["nbytes"], words["scalars"], columns)


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A microbatch in one flat buffer."""

    header: FlatHeader
    host: torch.Tensor | None
    """The buffer on the host; None if it was received on the device."""
    flat: torch.Tensor
    """The buffer on the trainer's device."""
    landed: Any = None
    """A CUDA event after which the buffer holds the microbatch; None on the host."""

    def batch(self, names: tuple[str, ...], place: Place | None = None) -> TorchBatch:
        """Return the microbatch of the rank at a place: its tensors are views of the buffer.

        The current stream waits for the copy, and the buffer is not reused before that stream has finished with it.
        """
        if self.landed is not None:
            stream = torch.cuda.current_stream(self.flat.device)
            stream.wait_event(self.landed)
            self.flat.record_stream(stream)
        tensors = {slot.key: _cut(self.flat, slot) for slot in self.header.slots}
        columns = self.header.columns
        tensors |= {key: torch.tensor(columns[key]) for key in _STAY if key in columns}
        provenance = {name: column for name, column in columns.items() if name not in _STAY}
        return TorchBatch(Batch(RankView(provenance, self.header.scalars), names, place), tensors)


def _cut(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, slot.dtype)).dtype
    return flat[slot.offset : slot.offset + slot.nbytes].view(dtype).view(slot.shape)


def pack(batch: Batch, *, pinned: bool = False) -> FlatBatch:
    """Copy a batch out of shared memory into one flat buffer; nothing of the shared segment is held afterwards."""
    arrays = {key: value for key, value in batch.items() if isinstance(value, np.ndarray)}
    columns = {key: arrays.pop(key).copy() for key in _STAY if key in arrays}
    scalars = {key: value for key, value in batch.items() if not isinstance(value, np.ndarray)}
    scalars |= {f"meta.{key}": value for key, value in batch.facts.items()}
    arrays |= {f"meta.{name}": getattr(batch.meta, name) for name in IMAGE_INDICES}
    skipped = (*_ROWS_OF_ORIGIN, *IMAGE_INDICES)  # rows of `origin`, which travels whole
    kept = {name: column for name, column in batch.meta._columns.items() if name not in skipped}
    columns |= {f"meta.{name}": column.copy() for name, column in kept.items()}
    slots, end = [], 0
    for key, array in arrays.items():
        slots.append(Slot(key, array.dtype.str, array.shape, end))
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
    memory = host.numpy()
    for slot in slots:
        place = memory[slot.offset : slot.offset + slot.nbytes].view(slot.dtype).reshape(slot.shape)
        np.copyto(place, arrays[slot.key])
    return FlatBatch(FlatHeader(tuple(slots), end, scalars, columns), host, host)


class HostCopies:
    """Flat batches that stay on the host."""

    device = torch.device("cpu")
    stream = None
    pool = None

    def send(self, batch: Batch) -> FlatBatch:
        """Pack a batch."""
        return pack(batch)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a host buffer to receive into."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, header: FlatHeader, host: torch.Tensor) -> FlatBatch:
        """Return the batch of a host buffer."""
        return FlatBatch(header, host, host)

    def close(self) -> None:
        """There is nothing to end."""


class DeviceCopies:
    """Flat batches that a side stream copies to a CUDA device out of pinned memory, while the trainer computes.

    Rules: a batch leaves shared memory before `send` returns. Torch's allocator does not reuse
    pinned memory while a copy still reads it. The stream that uses a batch waits for its event.
    """

    def __init__(self, device: torch.device, *, ahead: bool) -> None:
        """Make the side stream; `ahead` allows a thread that fetches the next microbatch while one is in use."""
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = ThreadPoolExecutor(1, "overlord-copies") if ahead else None

    def send(self, batch: Batch) -> FlatBatch:
        """Pack a batch into pinned memory and begin to copy it."""
        packed = pack(batch, pinned=True)
        return self.copy(packed.header, packed.flat)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a pinned host buffer to receive into."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, header: FlatHeader, host: torch.Tensor) -> FlatBatch:
        """Begin to copy a pinned buffer to the device."""
        with torch.cuda.stream(self.stream):
            return self.on_device(header, host.to(self.device, non_blocking=True), host)

    def on_device(self, header: FlatHeader, flat: torch.Tensor, host: torch.Tensor | None = None) -> FlatBatch:
        """Return the batch of a device buffer, valid once the side stream has reached this point."""
        landed = torch.cuda.Event()
        landed.record(self.stream)
        return FlatBatch(header, host, flat, landed)

    def close(self) -> None:
        """End the thread; a microbatch that it fetches is still waited for."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


Copies = HostCopies | DeviceCopies


def device_of(given: torch.device | str | None) -> torch.device:
    """Return the device that batches go to, a CUDA device with its index.

    By default it is this process's CUDA device where the process group uses NCCL, and the host otherwise.
    """
    if given is None:
        grouped = dist.is_available() and dist.is_initialized()
        given = "cuda" if grouped and "cuda:nccl" in str(dist.get_backend_config(None)) else "cpu"
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise SpecError(
            f"DataLoader: device is {given!r:.80}; batches cannot be copied there ahead. Use 'cpu', 'cuda' or "
            "'cuda:0', and batch.to(device) for others."
        )
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise SpecError(
            f"DataLoader: device is {str(device)!r}, but torch sees {count} CUDA devices here; there is nowhere to "
            "copy batches to. Use 'cpu', or a device that is there."
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def copies_to(device: torch.device, *, ahead: bool) -> Copies:
    """Return the object that copies batches to a device; `ahead` allows a thread that fetches them."""
    return DeviceCopies(device, ahead=ahead) if device.type == "cuda" else HostCopies()


class Ahead(Generic[T]):
    """Items that are made one by one; while one is in use, a thread makes the next.

    Example:
        >>> squares = Ahead(lambda number: number * number, 4, None)
        >>> squares.take(2), squares.take(0)
        (4, 0)
    """

    def __init__(self, make: Callable[[int], T], count: int, pool: ThreadPoolExecutor | None) -> None:
        """Begin to make the first of `count` items; without a pool of one thread, each is made on request."""
        self._make = make
        self._count = count
        self._pool = pool
        self._expected = 0
        self._coming: tuple[int, Future[T]] | None = None
        self._start(0)

    def take(self, index: int) -> T:
        """Return one, and begin to make the next if they are taken in order."""
        coming = self._coming
        if coming is not None and coming[0] == index and not coming[1].cancelled():  # as by a loader that was closed
            self._coming = None
            made = coming[1].result()
        else:
            made = self._make(index)
        if index == self._expected:
            self._expected += 1
            self._start(self._expected)
        return made

    def _start(self, index: int) -> None:
        if self._pool is not None and index < self._count:
            try:
                self._coming = (index, self._pool.submit(self._make, index))
            except RuntimeError:
                pass  # the loader is closed: further items are made on request


# Images and sounds that are encoded apart from their tokens: normalised pixels, the exchange between ranks.


def normalize_pixels(
    pixel_values: torch.Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD
) -> torch.Tensor:
    """Return uint8 patch rows as normalised floats, on the device they are on.

    By default with the mean and deviation of CLIP's and Qwen-VL's encoders.

    Example:
        >>> black = torch.zeros(1, 3 * 4, dtype=torch.uint8)
        >>> normalize_pixels(black, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)).unique().tolist()
        [-1.0]
    """
    colours = pixel_values.to(torch.float32).div_(255.0).unflatten(-1, (3, -1))
    shift = torch.tensor(mean, device=pixel_values.device, dtype=torch.float32)[:, None]
    scale = torch.tensor(std, device=pixel_values.device, dtype=torch.float32)[:, None]
    return colours.sub_(shift).div_(scale).flatten(-2)


def exchange_images(output: torch.Tensor, encoder: Mapping[str, Any], group: Any = None) -> torch.Tensor:
    """Send the encoder's output to the ranks that hold its tokens; gradients come back the same way.

    Call it on every rank once a step, with the rows of the encoder's output (one for each image token) and
    `step.encoder`. Then, for every microbatch: `embeddings[batch.meta.image_positions] = rows[batch.meta.image_rows]`.
    The loss of every rank must depend on what this returns, be it by `+ 0 * rows.sum()`: the gradients come back by
    another all-to-all, which waits for all ranks.

    Args:
        output: [image tokens of this rank, hidden].
        encoder: `step.encoder`; or `step.audio_encoder`, with the rows of sounds (`audio_lengths` of each).
        group: The process group of all ranks (default: the world).
    """
    rows = output[torch.as_tensor(encoder["send_rows"], device=output.device)]
    if not (dist.is_available() and dist.is_initialized()):
        return rows  # one process sends to itself
    return _Exchange.apply(rows, encoder["send_splits"].tolist(), encoder["recv_splits"].tolist(), group)


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    """An all-to-all; its backward pass swaps senders and receivers."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.splits = (send, receive, group)
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        send, receive, group = ctx.splits
        return _all_to_all(grads[0].contiguous(), receive, send, group), None, None, None


def _all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out
