"""How a trainer attaches to the service of its host: a Unix socket to ask on, shared memory to read from."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from overlord.core.spec_model import is_whole
from overlord.errors import ClosedError, ServiceLost, SpecError, error_named
from overlord.roles.client import Client
from overlord.roles.views import RankView, StepHeader
from overlord.runtimes.doors import knock
from overlord.runtimes.headers import header_from_json, mesh_from_text
from overlord.runtimes.wire import receive, send

logger = logging.getLogger("overlord")


def connect_local(address: str, rank: int) -> Client:
    """Attach to a running service as one rank."""
    if not is_whole(rank):
        raise SpecError(f"rank is {rank!r:.80}, not a whole number; it has no data. Give the trainer's global rank.")
    feed = LocalFeed(address, int(rank))
    try:
        return Client(feed, rank, feed.first_step)
    except BaseException:
        feed.close()
        raise


def status_of(address: str) -> dict[str, Any]:
    """Ask a running service for its status."""
    return ask_service(address, {"op": "status"})["status"]


def ask_service(address: str, message: dict[str, Any]) -> dict[str, Any]:
    """Ask a running service one thing, without a seat in it."""
    with knock(address) as connection:
        send(connection, message)
        reply, _ = receive(connection)
    if "error" in reply:
        raise error_named(reply["error"], reply["message"])
    return reply


class LocalFeed:
    """A rank's door to the service of its host. Arrays lie in shared memory until nothing refers to them."""

    def __init__(self, address: str, rank: int) -> None:
        self._address = address
        self._connection = knock(address, rank)
        self._finalizer = weakref.finalize(self, self._connection.close)
        self._lock = threading.RLock()
        self._maps: dict[int, mmap.mmap] = {}
        self._released: deque[int] = deque()
        self._leased: dict[int, int] = {}
        self._ready: dict[tuple[int, int], tuple[dict[str, Any], mmap.mmap]] = {}
        facts = self._ask({"op": "hello", "rank": rank})[0]
        self._names: tuple[str, ...] = ()
        self.mesh = mesh_from_text(facts["mesh"])
        """The mesh of the step at which this rank begins; of a rank that none has, the newest."""
        self.first_step: int = facts["first_step"] or 0
        self._lease_bytes: int = facts["lease_bytes"]
        if facts.get("seated"):
            logger.warning(
                "rank %d is attached to %s already: two trainers would train on the same data, and nobody on that of "
                "another rank. Give each process its own rank", rank, address,
            )  # fmt: skip
        elif (facts.get("reached") or 0) > self.first_step:
            logger.warning(
                "rank %d of %s was at step %d before, and begins again at step %d. To go on from a checkpoint, start "
                "the service from its state", rank, address, facts["reached"], self.first_step,
            )  # fmt: skip

    def open_step(self, step: int) -> StepHeader | None:
        """Return the header of a step; waits until it is planned. What is built of it comes along."""
        with self._lock:
            self._released.extend(view["lease"] for view, _ in self._ready.values())  # nobody looked at them
            self._ready.clear()
            reply, fds = self._ask({"op": "step", "step": step})
            if reply["header"] is None:
                return None
            self._take(step, reply, fds)
            self._names = tuple(reply.get("names", self._names))
            return header_from_json(reply["header"], self._names)

    def microbatch(self, step: int, microbatch: int) -> RankView:
        """Return one microbatch; waits until it is built."""
        key = (step, microbatch)
        with self._lock:  # a segment's descriptor comes once: who asks next must find it mapped
            if key not in self._ready:
                self._take(step, *self._ask({"op": "microbatch", "step": step, "microbatch": microbatch}))
            if key not in self._ready:
                return RankView({}, {})
            view, segment = self._ready.pop(key)
        root = np.frombuffer(segment, np.uint8)
        # Every array below is a view of `root`: the lease ends when the last of them is gone.
        arrays = {k: _view(root, dtype, shape, offset) for k, dtype, shape, offset in view["arrays"]}
        nbytes = sum(a.nbytes for a in arrays.values())
        if sum(self._leased.values()) + nbytes > self._lease_bytes:
            # A trainer that keeps many batches must not hold the service's memory: it gets copies.
            arrays = {k: a.copy() for k, a in arrays.items()}
            self._released.append(view["lease"])
        else:
            self._leased[view["lease"]] = nbytes
            weakref.finalize(root, _let_go, self._leased, self._released, view["lease"]).atexit = False
        return RankView(arrays, view["scalars"])

    def _take(self, step: int, reply: dict[str, Any], fds: list[int]) -> None:
        """Keep the views that came, with their segments mapped."""
        unseen = iter(fds)
        for microbatch, view in reply["views"].items():
            number = view["segment"]
            if view["new"]:
                fd = next(unseen)
                self._maps[number] = mmap.mmap(fd, view["capacity"], prot=mmap.PROT_READ)
                os.close(fd)
            self._ready[step, int(microbatch)] = (view, self._maps[number])
        for old in reply["gone"]:
            self._maps.pop(old, None)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Hand over metrics; durable when it returns.

        By a connection of its own: another thread may wait for the very step that this report lets go on.
        """
        ask_service(self._address, {"op": "report", "step": step, "metrics": metrics})

    def state(self, step: int) -> dict[str, Any]:
        """Return the state before a step."""
        return self._ask({"op": "state", "step": step})[0]["state"]

    def close(self, next_step: int | None = None) -> None:
        """Detach; arrays that are still referenced stay readable."""
        if next_step is not None and self._finalizer.alive:
            try:
                self._ask({"op": "leave", "next_step": next_step})
            except ServiceLost:
                pass  # it went first; there is nobody to take leave of
        self._finalizer()
        self._maps.clear()
        self._ready.clear()

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            if not self._finalizer.alive:
                raise ClosedError("the client is closed. Take another one from the service.")
            # One by one: an array that goes while this runs must not be forgotten.
            released = [self._released.popleft() for _ in range(len(self._released))]
            try:
                send(self._connection, {**message, "release": released})
                reply, fds = receive(self._connection)
            except (OSError, ServiceLost) as error:
                raise ServiceLost(
                    f"the service at {self._address} is gone ({error}); no more data will come. Why stands on the "
                    "standard error of the process that launched it. Launch again from the last state."
                ) from error
        if "error" in reply:
            raise error_named(reply["error"], reply["message"])
        return reply, fds


def _view(root: Any, dtype: str, shape: list[int], offset: int) -> Any:
    return np.ndarray(shape, dtype, root, offset)  # its base is `root`, whose end is the end of the lease


def _let_go(leased: dict[int, int], released: deque[int], lease: int) -> None:
    leased.pop(lease, None)
    released.append(lease)
