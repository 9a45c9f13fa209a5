"""The local runtime seen from outside: starts the service process, and attaches trainers to it."""

from __future__ import annotations

import base64
import json
import mmap
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from overlord.core.plan import LoadingPlan
from overlord.core.plan_blob import plan_from_bytes
from overlord.core.spec_model import is_whole
from overlord.core.specs import Job, Mixture
from overlord.errors import ClosedError, ServiceLost, SpecError, error_named
from overlord.roles.client import Client
from overlord.roles.inputs import mixture_to_json
from overlord.roles.views import RankView, StepHeader
from overlord.runtimes.deployment import LaunchOptions
from overlord.runtimes.opening import Progress
from overlord.runtimes.wire import receive, send

CLOSE_S = 15.0
"""How long a closing service may take before it is killed."""


class LocalService:
    """A service process of this host, started by this process."""

    def __init__(self, job: Job, options: LaunchOptions, progress: Progress | None) -> None:
        try:
            bundle = cloudpickle.dumps((job, options))
        except Exception as error:  # whatever a user's object raises when it is pickled
            raise SpecError(
                f"the job cannot be sent to the service process ({type(error).__name__}: {error}); nothing could run. "
                "Let functions (Custom, strategy, learn) hold only what pickles (open files and locks do not), or use "
                "runtime='inline'."
            ) from error
        self._folder = _service_folder()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "overlord.runtimes.local_service"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C must not reach it; the closing pipe does
            # Few malloc arenas: with one for each of its threads, what they free stays with the process.
            env={"MALLOC_ARENA_MAX": "2", **os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        self._finalizer = weakref.finalize(self, _end_process, self._process, self._folder)
        try:
            assert self._process.stdin is not None
            try:
                for part in (os.fsencode(self._folder), bundle):
                    self._process.stdin.write(struct.pack("<Q", len(part)) + part)
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # it died while starting; the wait below says how
            self.address = self._wait_until_ready(progress)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self._process.pid

    def client(self, rank: int) -> Client:
        """Return the client of one rank in this process."""
        if not self._finalizer.alive:
            raise ClosedError("the service is closed; launch it again.")
        return connect_local(self.address, rank)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met."""
        return self._ask({"op": "status"})["status"]

    def set_mixture(self, mixture: Mixture, at_step: int | None) -> int:
        """Change the mixture from a step on."""
        message = {"op": "set_mixture", "mixture": mixture_to_json(mixture), "step": at_step}
        return int(self._ask(message)["step"])

    def skip_steps(self, count: int, at_step: int | None) -> int:
        """Pass over global batches before a step."""
        return int(self._ask({"op": "skip_steps", "count": count, "step": at_step})["step"])

    def mixture(self) -> Mixture:
        """Return the mixture in force, without its weights."""
        return Mixture.from_mapping(self._ask({"op": "mixture"})["mixture"])

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step."""
        blob = self._ask({"op": "plan", "step": step})["plan"]
        return None if blob is None else plan_from_bytes(base64.b64decode(blob))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self._finalizer.alive:
            raise ClosedError("the service is closed; launch it again.")
        return ask_service(self.address, message)

    def close(self) -> None:
        """End the service and remove everything it had."""
        self._finalizer()

    def _wait_until_ready(self, progress: Progress | None) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if "ready" in event:
                return event["ready"]
            if "error" in event:
                raise error_named(event["error"], event["message"])
            if "progress" in event and progress is not None:
                progress(*event["progress"])
        code = self._process.wait()
        raise ServiceLost(
            f"the service process ended with code {code} before it was ready; nothing has run. Its messages stand "
            "above; if it was killed, the host may be out of memory."
        )


def _service_folder() -> Path:
    """Make a folder whose socket has a short path: the kernel takes no more than 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="overlord-"))
    if len(os.fsencode(folder / "socket")) <= 107:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="overlord-", dir="/tmp"))


def _end_process(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Close the pipe that keeps a service alive; kill it if it does not go."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # it is gone already, which is what we want
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


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
    with _open(address) as connection:
        send(connection, message)
        reply, _ = receive(connection)
    if "error" in reply:
        raise error_named(reply["error"], reply["message"])
    return reply


class LocalFeed:
    """A rank's door to the service of its host. Arrays lie in shared memory until nothing refers to them."""

    def __init__(self, address: str, rank: int) -> None:
        self._address = address
        self._connection = _open(address)
        self._finalizer = weakref.finalize(self, self._connection.close)
        self._lock = threading.RLock()
        self._maps: dict[int, mmap.mmap] = {}
        self._released: deque[int] = deque()
        self._leased: dict[int, int] = {}
        facts = self._ask({"op": "hello", "rank": rank})[0]
        self.names: tuple[str, ...] = tuple(facts["names"])
        self.world_size: int = facts["world_size"]
        self.mesh: str = facts["mesh"]
        self.first_step: int = facts["first_step"]
        self._lease_bytes: int = facts["lease_bytes"]

    def open_step(self, step: int) -> StepHeader | None:
        """Return the header of a step; waits until it is planned."""
        header = self._ask({"op": "step", "step": step})[0]["header"]
        return None if header is None else StepHeader(**header)

    def microbatch(self, step: int, microbatch: int) -> RankView:
        """Return one microbatch; waits until it is built."""
        with self._lock:  # a segment's descriptor comes once: who asks next must find it mapped
            reply, fds = self._ask({"op": "microbatch", "step": step, "microbatch": microbatch})
            if reply["segment"] is None:
                return RankView({}, {})
            number, capacity = reply["segment"], reply["capacity"]
            if fds:
                self._maps[number] = mmap.mmap(fds[0], capacity, prot=mmap.PROT_READ)
                os.close(fds[0])
            root = np.frombuffer(self._maps[number], np.uint8)
            for old in reply["gone"]:
                self._maps.pop(old, None)
        # Every array below is a view of `root`: the lease ends when the last of them is gone.
        arrays = {k: _view(root, dtype, shape, offset) for k, dtype, shape, offset in reply["arrays"]}
        nbytes = sum(a.nbytes for a in arrays.values())
        if sum(self._leased.values()) + nbytes > self._lease_bytes:
            # A trainer that keeps many batches must not hold the service's memory: it gets copies.
            arrays = {k: a.copy() for k, a in arrays.items()}
            self._released.append(reply["lease"])
        else:
            self._leased[reply["lease"]] = nbytes
            weakref.finalize(root, _let_go, self._leased, self._released, reply["lease"]).atexit = False
        return RankView(arrays, reply["scalars"])

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
                    f"the service at {self._address} is gone ({error}); no more data will come. Look at its log, then "
                    "launch again from the last state."
                ) from error
        if "error" in reply:
            raise error_named(reply["error"], reply["message"])
        return reply, fds


def _view(root: Any, dtype: str, shape: list[int], offset: int) -> Any:
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return root[offset : offset + count].view(dtype).reshape(shape)


def _let_go(leased: dict[int, int], released: deque[int], lease: int) -> None:
    leased.pop(lease, None)
    released.append(lease)


def _open(address: str) -> socket.socket:
    path = address.removeprefix("unix://") if isinstance(address, str) else ""
    if path == address or not path:
        raise SpecError(
            f"address: {address!r} is not one; nobody could be reached. Use what `service.address` or `overlord serve` "
            "shows, such as 'unix:///tmp/overlord-x/socket'."
        )
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise ServiceLost(
            f"no service answers at {address} ({error.strerror or error}); there is no data to train on. Start one "
            "with `overlord serve` or `overlord.launch` on this host and use the address it shows."
        ) from error
    return connection
