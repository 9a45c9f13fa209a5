"""The broadcast of a strategy with `broadcast_at`: one rank fetches, the others of its group receive.

Rules of this file:
1. All ranks of a group make the same collective calls in the same order: for every microbatch in turn a header, then
   its buffer. If a microbatch is requested out of order, those before it are received first, and kept.
   Where the ranks of a group consume different buckets (`broadcast_at("DP")`), microbatch m of every bucket is sent
   before any rank goes on with its own: a rank that trains may wait for the others, which must have theirs. From the
   last microbatch on that all of them have, the rest of the step is sent at once, for the same reason.
2. A rank that takes the next step completes the step before: the rank that fetches announces the end of the step, the
   others receive up to there. So ranks may use different numbers of a step's microbatches.
3. A fetch that fails raises the same error on all ranks of the group.
4. Calls are made by the trainer's own thread only, so that their order among the trainer's collectives is fixed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import OverlordError, PlanError, SpecError, error_named
from overlord.integrations.torch_batches import Copies, DeviceCopies, FlatBatch, FlatHeader, TorchBatch
from overlord.roles.client import Place, Step

_BLOCK = 16 << 10
"""Bytes of the first message; most headers fit, so that one message is enough."""

_FETCHES, _RECEIVES, _ENDED, _FAILED = range(4)


class Channel:
    """A process group in which one rank broadcasts and the others receive."""

    def __init__(self, group: Any, source: int, stream: Any = None) -> None:
        """Take a process group (None: the world) and the global rank that broadcasts.

        Calls on device buffers go to `stream`, so that they do not wait for the model.
        """
        self.group = group
        self.source = source
        self.is_source = dist.get_rank() == source
        self._stream = stream
        self._backends = str(dist.get_backend_config(group))

    def is_on_device(self, device: torch.device) -> bool:
        """Whether buffers for a device are sent from device to device."""
        return device.type == "cuda" and "cuda:nccl" in self._backends

    def broadcast_message(self, message: bytes | None) -> bytes:
        """Broadcast a short message; the other ranks pass None. Returns the message on every rank."""
        framed = b"" if message is None else len(message).to_bytes(8, "little") + message
        head = self.broadcast(_as_tensor(framed[:_BLOCK].ljust(_BLOCK, b"\0")))
        size = int.from_bytes(_as_bytes(head[:8]), "little") + 8
        received = _as_bytes(head[8 : min(size, _BLOCK)])
        if size > _BLOCK:
            rest = _as_tensor(framed[_BLOCK:]) if self.is_source else torch.empty(size - _BLOCK, dtype=torch.uint8)
            received += _as_bytes(self.broadcast(rest))
        return received

    def broadcast(self, buffer: torch.Tensor) -> torch.Tensor:
        """Broadcast a host buffer, through the device if the group has no CPU backend."""
        if "cpu:" in self._backends:
            dist.broadcast(buffer, self.source, group=self.group)
            return buffer
        with self.on_stream():
            return self.broadcast_device(buffer.to("cuda")).to("cpu")

    def broadcast_device(self, buffer: torch.Tensor) -> torch.Tensor:
        """Broadcast a device buffer, on the current stream."""
        dist.broadcast(buffer, self.source, group=self.group)
        return buffer

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the channel's stream is current."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _as_bytes(data: torch.Tensor) -> bytes:
    return data.numpy().tobytes()


def share_outcome(make: Callable[[], str] | None, group: Any = None) -> str:
    """Return on every rank of a group the text that its rank 0 makes (others pass None); where it fails, all fail."""
    channel, error = Channel(group, _process_of(group, 0)), None
    message = b""
    if make is not None:
        try:
            message = json.dumps({"text": make()}).encode()
        except Exception as failure:  # any error: the other ranks must not wait forever
            error, message = failure, _failure(failure)
    words = json.loads(channel.broadcast_message(message if make is not None else None))
    if error is not None:
        raise error
    if "error" in words:
        raise error_named(words["error"], words["message"])
    return str(words["text"])


def _failure(error: BaseException) -> bytes:
    words = str(error) if isinstance(error, OverlordError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": type(error).__name__, "message": words}).encode() + b"\n"


def _process_of(group: Any, rank: int) -> int:
    """Return the process (its rank in the world) that has a rank of a group; None is the world."""
    return rank if group is None else int(dist.get_global_rank(group, rank))


class FetchingRanks:
    """The ranks that fetch, as all ranks agree at the first step of a stream."""

    def __init__(
        self,
        tree: ClientPlaceTree | None,
        rank: int,
        step: Step | None,
        *,
        failed: bool = False,
        group: Any = None,
    ) -> None:
        """Exchange the rank and the outcome of the first step with all ranks; all must call this.

        Args:
            tree: The mesh; None if this rank failed before it knew it.
            rank: This process's rank in the mesh.
            step: Its first step; None if the stream has no step.
            failed: Whether its first step failed.
            group: The process group of the ranks of the mesh; by default the world.
        """
        self._tree = tree
        self.group = group
        outcome = _FAILED if failed else _ENDED if step is None else _FETCHES if step.fetches else _RECEIVES
        mine = torch.tensor([rank, outcome, -1 if step is None else step.bucket])
        if "cpu:" not in str(dist.get_backend_config(group)):
            mine = mine.to("cuda")
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, mine, group=group)
        gathered = [one.tolist() for one in found]
        self._process = {place: process for process, (place, _, _) in enumerate(gathered)}
        """The process that has each rank of the mesh."""
        if len(self._process) < len(gathered):
            twice = next(place for process, (place, _, _) in enumerate(gathered) if self._process[place] != process)
            raise SpecError(
                f"DataLoader: several processes have rank {twice} of the mesh{f' {tree}' if tree else ''}; they would "
                "train on the same data, and no process on that of another rank. Leave rank= out, or give each process "
                "its own."
            )
        outcomes = {place: outcome for place, outcome, _ in gathered}
        self._bucket = {_process_of(group, process): bucket for process, (_, _, bucket) in enumerate(gathered)}
        self.failed = sorted(place for place in outcomes if outcomes[place] == _FAILED)
        """Ranks that could not take their first step."""
        known = set(outcomes.values()) <= {_FETCHES, _RECEIVES}
        fetching = sorted(place for place in outcomes if outcomes[place] == _FETCHES)
        self.axes: tuple[str, ...] = self._axes_of(fetching) if known else ()
        """Axes along which plans broadcast."""

    @property
    def _mesh(self) -> ClientPlaceTree:
        assert self._tree is not None, "only asked where no rank failed"
        return self._tree

    def _axes_of(self, fetching: list[int]) -> tuple[str, ...]:
        at = self._mesh.coordinates()
        alone = [axis for axis in ("dp", "cp", "tp") if not at[axis][fetching].any()]
        axes = tuple(axis for axis in alone if getattr(self._mesh, axis) > 1)
        if self._mesh.fetchers(broadcast=axes) != fetching:
            raise PlanError(
                f"the ranks that fetch ({len(fetching)} of the mesh {self._mesh}) are not those with coordinate 0 on "
                "some axes, so the broadcast groups are unknown. Make plans with broadcast_at(axis)."
            )
        return axes

    def groups(self) -> list[list[int]]:
        """Return the processes of every broadcast group, the one that fetches first."""
        at, members = self._mesh.coordinates(), dict[tuple[int, ...], list[int]]()
        fixed = [axis for axis in ("pp", "dp", "cp", "tp") if axis not in self.axes]
        for rank in range(self._mesh.world_size):
            members.setdefault(tuple(int(at[axis][rank]) for axis in fixed), []).append(rank)
        fetching = set(self._mesh.fetchers(broadcast=self.axes))
        ordered = [sorted(ranks, key=lambda rank: rank not in fetching) for ranks in members.values()]
        return [[_process_of(self.group, self._process[rank]) for rank in ranks] for ranks in ordered]

    def alike(self) -> list[list[int]]:
        """Return the broadcast groups divided by what their processes consume: all of a list get the same batches."""
        found: list[list[int]] = []
        for ranks in self.groups():
            buckets = dict.fromkeys(self._bucket[process] for process in ranks)
            found += [[process for process in ranks if self._bucket[process] == bucket] for bucket in buckets]
        return found


def open_channel(fetching: FetchingRanks, mesh: Any, stream: Any) -> tuple[Channel, Any]:
    """Return the channel of this process, and the group of those that get the same batches over it (None: it alone).

    All ranks of the world must call this. The process groups of a DeviceMesh are used if they fit, otherwise groups are
    made.
    """
    groups, alike = fetching.groups(), fetching.alike()
    group, first = _group_among(groups, mesh, fetching.group)
    if len(alike) == len(groups):
        same = group
    else:
        same = None if all(len(ranks) == 1 for ranks in alike) else _group_among(alike, mesh, fetching.group)[0]
    return Channel(group, first, stream), same


def _group_among(groups: list[list[int]], mesh: Any, within: Any) -> tuple[Any, int]:
    """Return that process group of some which this process is in, and the first process of it.

    `within` is the process group of the mesh's ranks; None for the world.
    """
    me = dist.get_rank()
    mine = next(ranks for ranks in groups if me in ranks)
    ready = _group_of_mesh(mesh, mine)
    if ready is not None:
        return ready, mine[0]
    if within is not None:  # processes outside the mesh do not call this
        made = dist.new_group(sorted(mine), timeout=_world_timeout(), use_local_synchronization=True)
        return made, mine[0]
    made = [dist.new_group(sorted(ranks), timeout=_world_timeout()) for ranks in groups]
    return made[groups.index(mine)], mine[0]


def _group_of_mesh(mesh: Any, ranks: list[int]) -> Any:
    """Return the mesh's own group of some ranks, if it has one; either all ranks of a mesh find theirs or none."""
    if mesh is None:
        return None
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        if sorted(dist.get_process_group_ranks(group)) == sorted(ranks):
            return group
    return None


def _world_timeout() -> timedelta | None:
    """Return the timeout of the world group: a group made later would have torch's default."""
    world = dist.group.WORLD
    device = "cpu" if "cpu:" in str(dist.get_backend_config(None)) else "cuda"
    options = getattr(world._get_backend(torch.device(device)), "options", None)
    return getattr(options, "_timeout", None)


@dataclass(frozen=True)
class Sharing:
    """How a broadcast group shares the microbatches of one step."""

    counts: Mapping[int, int]
    """By bucket, how many microbatches the ranks that consume it have; the bucket of the rank that fetches first."""
    mine: int
    """This rank's bucket."""

    @classmethod
    def of(cls, step: Step) -> Sharing:
        """Return how a step is shared."""
        return cls(dict(step.group) or {step.bucket: len(step.microbatches)}, step.bucket)

    @cached_property
    def order(self) -> list[tuple[int, int]]:
        """(bucket, microbatch) of everything that is sent, in this order."""
        most = max(self.counts.values())
        return [(bucket, at) for at in range(most) for bucket, count in self.counts.items() if at < count]

    def sent_before(self, microbatch: int) -> int:
        """Return how many of `order` are sent before a rank goes on with one of its own microbatches; -1: with none."""
        counts = self.counts.values()
        together = microbatch + 1 < min(counts)  # all ranks come to the next microbatch too
        return sum(min(count, microbatch + 1) for count in counts) if together else len(self.order)


class Relay:
    """The microbatches of one step, broadcast through a channel in order, and kept until the step ends."""

    def __init__(
        self,
        channel: Channel,
        copies: Copies,
        step: tuple[int, Sharing, tuple[str, ...], Place | None],
        fetch: Callable[[int], FlatBatch] | None,
    ) -> None:
        """Begin a step, given by its index, how it is shared, the names of sources, and this rank's place.

        Only the rank that fetches has `fetch`, which returns a microbatch by its number in `Sharing.order`.
        """
        self._channel = channel
        self._copies = copies
        self._index, self._sharing, self._names, self._place = step
        self._fetch = fetch
        self._done = 0
        """How many of `Sharing.order` were sent or received."""
        self._kept: list[FlatBatch] = []
        """This rank's own of them."""
        self._over: OverlordError | None = None
        self._complete(self._sharing.sent_before(-1))  # for ranks that will not take any

    def take(self, microbatch: int) -> TorchBatch:
        """Return a microbatch; those before it are sent or received first."""
        if len(self._kept) <= microbatch or self._done < self._sharing.sent_before(microbatch):
            if self._over is None:
                self._complete(self._sharing.sent_before(microbatch))
            if self._over is not None:
                raise self._over
        return self._kept[microbatch].batch(self._names, self._place)

    def finish(self) -> None:
        """Complete the step: the rank that fetches sends no more of it, the others receive what was sent."""
        count = len(self._sharing.order)
        if self._over is None and self._fetch is not None and self._done < count:
            self._channel.broadcast_message(json.dumps({"rest": [self._index, self._done]}).encode() + b"\n")
        if self._fetch is None:
            self._complete(count, keep=False)
        self._over = self._over or _gone(self._index)

    def _complete(self, count: int, *, keep: bool = True) -> None:
        """Send or receive up to a number of microbatches. An error is kept: it is raised where one is taken."""
        while self._over is None and self._done < count:
            bucket, _ = self._sharing.order[self._done]
            mine = keep and bucket == self._sharing.mine
            try:
                made = self._send() if self._fetch is not None else self._receive(mine)
            except OverlordError as error:
                self._over = error
                return
            self._done += 1
            self._kept += [made] if made is not None and mine else []

    def _send(self) -> FlatBatch:
        assert self._fetch is not None
        try:
            flat_batch = self._fetch(self._done)
        except Exception as error:  # any error: the other ranks of the group must not wait forever
            self._channel.broadcast_message(_failure(error))
            self._over = error if isinstance(error, OverlordError) else OverlordError(str(error))
            raise
        self._channel.broadcast_message(flat_batch.header.to_bytes(at=[self._index, *self._sharing.order[self._done]]))
        assert flat_batch.host is not None
        if not flat_batch.header.nbytes:
            return flat_batch
        if self._channel.is_on_device(self._copies.device):
            with self._channel.on_stream():
                self._channel.broadcast_device(flat_batch.flat)
                assert isinstance(self._copies, DeviceCopies)
                return self._copies.on_device(flat_batch.header, flat_batch.flat)
        self._channel.broadcast(flat_batch.host)
        return replace(flat_batch, host=None)  # pinned memory is scarce

    def _receive(self, mine: bool) -> FlatBatch | None:
        message = self._channel.broadcast_message(None)
        words = json.loads(message.partition(b"\n")[0])
        if "error" in words:
            raise error_named(words["error"], words["message"])
        if "rest" in words:
            raise _gone(self._index)
        # The buffer is received in any case: the other ranks are in the same call.
        flat_batch = self._receive_buffer(FlatHeader.from_bytes(message), mine)
        expected = [self._index, *self._sharing.order[self._done]]
        if words["at"] != expected:
            sent, wanted = (f"microbatch {at} of step {step}" for step, _, at in (words["at"], expected))
            raise PlanError(
                f"{sent} was broadcast where {wanted} was expected; ranks of a group would train on different data. "
                "Take the same steps on all of them, and load states on all of them."
            )
        return flat_batch

    def _receive_buffer(self, header: FlatHeader, mine: bool) -> FlatBatch | None:
        if not mine and header.nbytes and not self._channel.is_on_device(self._copies.device):
            self._channel.broadcast(torch.empty(header.nbytes, dtype=torch.uint8))  # for other ranks of the group
            return None
        if header.nbytes and self._channel.is_on_device(self._copies.device):
            assert isinstance(self._copies, DeviceCopies)
            with self._channel.on_stream():
                flat = torch.empty(header.nbytes, dtype=torch.uint8, device=self._copies.device)
                return self._copies.on_device(header, self._channel.broadcast_device(flat))
        host = self._copies.allocate(header.nbytes)
        return self._copies.copy(header, self._channel.broadcast(host) if header.nbytes else host)


def _gone(step: int) -> SpecError:
    return SpecError(
        f"step {step} is over: a rank of its broadcast group has taken the next step without this microbatch, so it is "
        "not sent any more. Take a step's microbatches before the next step, on every rank."
    )
