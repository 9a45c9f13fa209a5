"""Activations on the host between forward and backward: ByteScale's selective offloading, by saved-tensor hooks.

    Offloading   keeps a share of what forward saves for backward in pinned host memory

Forward copies a saved tensor to the host on a stream of its own, while it computes. Backward needs saved tensors in
about the reverse order, so while one is used, those that were saved just before it are copied back on another stream.
What forward saves last, backward needs at once: it stays on the device too, as no copy there and back could be hidden.
How much is fetched ahead follows from the largest tensor: a gated feed-forward saves four of them one after another,
and backward uses them up in a small part of the time that their copies take. Attention, before them, hides the copies.

Rules of this file:
1. Saved tensors are told apart by their storage: the projections of queries, keys and values save the same input, which
   is copied once.
2. Which tensors are offloaded depends on their order and sizes only, so that every run and every rank does the same.
3. Gradients are bit for bit those without offloading: bytes are copied, nothing is computed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from types import TracebackType
from typing import Any

import torch

from overlord.errors import SpecError

SMALLEST_BYTES = 1 << 16
"""Tensors below this stay on the device: copying them costs more than it frees."""
AHEAD_BYTES = 1 << 30
"""What backward fetches ahead at least, and the end of forward leaves on the device: about 20 ms of a host link."""
AHEAD_TENSORS = 4
"""How many of the largest tensors it fetches ahead, of those that went to the host. Profiled at 128k tokens, everything
on the host: with one tensor of 2.9 GB ahead, a step took 1.12 times as long."""


class Offloading:
    """Keeps a share of the tensors that autograd saves on the host, until backward needs them.

    Use it around the forward of each microbatch; backward runs outside. One object may be used for any number of
    microbatches, one after another: it keeps its host memory for the next ones.

    Example:
        Half of the activations of a microbatch::

            offloading = Offloading()
            with offloading(ratio=0.5):
                loss = model(**batch)
            loss.backward()
    """

    def __init__(self, *, ahead_bytes: int | None = None, smallest_bytes: int = SMALLEST_BYTES) -> None:
        """Make one for a device; host memory is taken when it is needed.

        Args:
            ahead_bytes: How much backward fetches before it is needed, and how much of what forward saved last stays on
                the device; at least one tensor. Without it: the offloaded share of four of the largest tensors, and at
                least 1 GiB.
            smallest_bytes: Tensors below this stay on the device.
        """
        self._given_ahead = ahead_bytes
        self._largest = 0
        self._smallest = smallest_bytes
        self._pool: dict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._ratio = 0.0
        self._seen = self._moved = 0
        self._hooks: Any = None
        self._by_storage: dict[tuple[int, int, int], tuple[weakref.ref[Any], weakref.ref[_Stored] | None]] = {}
        self._order: list[weakref.ref[_Stored]] = []
        self._resident: deque[tuple[weakref.ref[_Stored], int]] = deque()
        self._resident_bytes = 0
        self.pool_bytes = 0
        """Host memory taken so far; it is used again, and does not grow with the number of microbatches."""

    def __call__(self, ratio: float) -> Offloading:
        """Set the share of the saved bytes that goes to the host in the next `with`, 0 to 1."""
        if not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
            raise SpecError(f"offloading: ratio is {ratio!r:.80}; it is a share of the activations. Give 0 to 1.")
        self._ratio = float(ratio)
        return self

    @property
    def _ahead(self) -> int:
        """Bytes that are fetched ahead, and left on the device."""
        if self._given_ahead is not None:
            return self._given_ahead
        return max(AHEAD_BYTES, int(self._ratio * AHEAD_TENSORS * self._largest))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that went to the host in the current or last forward."""
        return self._moved

    def __enter__(self) -> Offloading:
        if self._hooks is not None:
            raise SpecError("offloading: it is entered already; what it saves would be mixed. Enter it once a forward.")
        self._seen = self._moved = self._largest = 0
        self._by_storage, self._order = {}, []
        self._resident, self._resident_bytes = deque(), 0
        if self._ratio > 0:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
            self._hooks = None

    # -- hooks ---------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps instead of a tensor: itself, or its place in a storage on the host."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        # Weights stay on the device anyway. Tensors of other classes (DTensor) have more than one storage.
        if nbytes < self._smallest or type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad):
            return tensor
        # The address alone does not name a storage: another one may be there once it is gone; and what is written into
        # it since (its version) is not in the copy.
        key = (storage.data_ptr(), nbytes, tensor._version)
        source, found = self._by_storage.get(key, (None, None))
        met = source is not None and source() is not None
        if met:
            moves = found is not None
        else:
            self._seen += nbytes
            moves = self._moved + nbytes <= self._ratio * self._seen
        if not moves:
            self._by_storage[key] = (weakref.ref(storage), None)
            return tensor
        stored = found() if met and found is not None else None
        if stored is None:
            self._moved += nbytes
            self._largest = max(self._largest, nbytes)
            stored = _Stored(self, tensor, len(self._order))
            self._by_storage[key] = (weakref.ref(storage), weakref.ref(stored))
            self._order.append(weakref.ref(stored))
            self._keep_resident(stored)
        return _Place(stored, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def _keep_resident(self, newest: _Stored) -> None:
        """Leave a tensor on the device until enough others were saved behind it."""
        self._resident.append((weakref.ref(newest), newest.nbytes))
        self._resident_bytes += newest.nbytes
        while self._resident_bytes > self._ahead and len(self._resident) > 1:
            reference, nbytes = self._resident.popleft()
            self._resident_bytes -= nbytes
            oldest = reference()
            if oldest is not None:
                oldest.leave_device()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        found = packed.stored.fetched()
        self._fetch_ahead(packed.stored)
        return packed.view_of(found)

    def _fetch_ahead(self, used: _Stored) -> None:
        """Begin to copy back what was saved just before a tensor that backward uses now."""
        waiting = 0
        for reference in reversed(used.neighbours[: used.number]):
            before = reference()
            if before is None:
                continue  # backward is done with it
            waiting += before.nbytes
            if waiting > self._ahead and waiting > before.nbytes:
                return
            before.fetch()

    # -- copies --------------------------------------------------------------------------------

    def buffer(self, nbytes: int, *, pinned: bool) -> tuple[torch.Tensor, Any]:
        """Return host memory of at least a size, and the event of its last use; None where there was none."""
        size = _rounded(nbytes)
        free = self._pool[size]
        if free:
            return free.pop()
        self.pool_bytes += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned), None

    def give_back(self, host: torch.Tensor, last_use: Any) -> None:
        """Take host memory back; the next copy into it waits for the event of its last use."""
        self._pool[host.numel()].append((host, last_use))

    def streams(self, device: torch.device) -> tuple[Any, Any]:
        """Return the streams that copy to the host, and back."""
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]

    @property
    def order(self) -> list[weakref.ref[_Stored]]:
        """What the current forward has offloaded, in order."""
        return self._order


def _rounded(nbytes: int) -> int:
    """Round up to one of four sizes between powers of two, so that microbatches of other lengths use the same memory.

    Example:
        >>> [_rounded(n) for n in (1000, 1025, 1300, 2048)]
        [1024, 1280, 1536, 2048]
    """
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class _Stored:
    """One storage on the host; autograd's saved tensors hold it, so that it ends with their graph."""

    def __init__(self, owner: Offloading, tensor: torch.Tensor, number: int) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.number = number
        self.neighbours = owner.order
        self._owner = owner
        self._device = tensor.device
        self._back: torch.Tensor | None = None
        self._landed: Any = None
        # It shares the version of the tensor, which shows whether it was written since.
        self._resident: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        cuda = self._device.type == "cuda"
        self._memory, last_use = owner.buffer(self.nbytes, pinned=cuda)
        self._host = self._memory[: self.nbytes]
        # Nothing of autograd is in a view of the raw bytes.
        raw = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        if not cuda:
            self._host.copy_(raw)
            self._left: Any = None
            return
        out, _ = owner.streams(self._device)
        if last_use is not None:
            out.wait_event(last_use)  # on the device: the host must not wait, or backward's kernels come too late
        out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(out):
            self._host.copy_(raw, non_blocking=True)
            self._left = torch.cuda.Event()
            self._left.record(out)
        raw.record_stream(out)  # the allocator must not reuse it before it is copied

    def leave_device(self) -> None:
        """Have it on the host only."""
        self._resident = None

    def fetch(self) -> None:
        """Begin to copy it back to the device, where it is not there still, as it was saved."""
        if self._resident is not None and self._resident._version == self._version:
            self._back = torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._resident.untyped_storage())
        self._resident = None
        if self._back is not None:
            return
        if self._device.type != "cuda":
            self._back = self._host.clone()
            return
        _, back = self._owner.streams(self._device)
        back.wait_event(self._left)
        with torch.cuda.stream(back):
            self._back = torch.empty(self.nbytes, dtype=torch.uint8, device=self._device)
            self._back.copy_(self._host, non_blocking=True)
            self._landed = torch.cuda.Event()
            self._landed.record(back)

    def fetched(self) -> torch.Tensor:
        """Return its bytes on the device, for the current stream."""
        self.fetch()
        assert self._back is not None
        if self._landed is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._landed)
            self._back.record_stream(stream)
        return self._back

    def __del__(self) -> None:
        self._owner.give_back(self._memory, self._landed or self._left)


class _Place:
    """A saved tensor as a view of a storage on the host."""

    def __init__(
        self, stored: _Stored, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> None:
        self.stored = stored
        self._view = (dtype, shape, stride, offset)

    def view_of(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        dtype, shape, stride, offset = self._view
        return torch.empty(0, dtype=dtype, device=raw.device).set_(raw.untyped_storage(), offset, shape, stride)
