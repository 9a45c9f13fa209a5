"""How a trainer attaches to the service of its host: a Unix socket to ask on, shared memory to read from.

Rules of this file:
1. A service that dies is started again, and a client goes on where it was: every request may be sent twice, and a
   client that comes back says at which step it is. Nothing is raised as long as the service may return.
2. The folder of a service is there as long as its launcher will start it again. A client waits as long as that, and no
   longer; of the folder on another host of a cluster, which goes with its constructor host, it waits for the return.
   Why a service will not come back is written in its folder, and raised by the clients that wait.
3. Leases are those of one connection. Arrays outlive it, and what they hold of it must not be released on another.
4. The step behind the one that was handed out is fetched before the trainer waits for it, as soon as it is built: a
   client whose service is gone has it already.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from overlord.core import client_messages as msg
from overlord.core.client_messages import Attach, Failure, Request, StepHeader, Views, mesh_from_text
from overlord.core.spec_errors import is_whole, named_arguments
from overlord.errors import ClosedError, OverlordError, Rewound, ServiceLost, SpecError, StateError, error_named
from overlord.roles.client import Client, RankView
from overlord.runtimes.transport.codec import expect_within, raised, receive, send
from overlord.runtimes.transport.file_limits import out_of_files
from overlord.runtimes.transport.listener import CONTROL, connect_socket, read_address, socket_path

FAILED = "failed"
"""The file in a service's folder that says why it will not come back."""
STARTING = "starting"
"""The file in a service's folder that says what it does while it starts."""
RETURN_S = 30.0
"""How long the folder of a cluster's host may be away."""
FIRST_WARNING_S = 5.0
NEXT_WARNING_S = 30.0
PAUSES_S = (0.02, 0.5)
"""The first and the longest pause between two attempts."""

logger = logging.getLogger("overlord")

R = TypeVar("R")


class Barrier:
    """One wait of a client for its service."""

    def __init__(self, address: str, folder: Path, *, returns: bool, what: str) -> None:
        """Begin to wait.

        Args:
            address: The service's.
            folder: The service's.
            returns: Whether the folder comes back after it went (`folder_of`).
            what: What the client wants, for the warnings.
        """
        self._address = address
        self._folder = folder
        self._returns = returns
        self._what = what
        self._began = self._seen = time.monotonic()
        self.away_since = self._began
        """Since when the service neither answers nor is known to start."""
        self._warn_at = self._began + FIRST_WARNING_S
        self._pause_s = PAUSES_S[0]

    @property
    def waited_s(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._began

    def wait(self, error: Exception) -> None:
        """Wait a moment before the next attempt.

        Args:
            error: What the last attempt met.

        Raises:
            ServiceLost: when the service will not come back.
            OverlordError: what it was given up for, as its launcher wrote it down.
        """
        failed = why_it_failed(self._folder)
        if failed is not None:
            raise failed
        now, reason = time.monotonic(), error.__cause__ or error
        if self._folder.exists():
            self._seen = now
        elif not self._returns or now - self._seen > RETURN_S:
            raise ServiceLost(
                f"the service at {self._address} is gone ({reason}); no more data will come. Why stands on the "
                "standard error of the process that launched it. Launch again from the last state."
            ) from error
        self._warn(what_it_does(self._folder) or f"its launcher should be starting it again ({reason})")
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])

    def is_up(self) -> None:
        """Note that the service lives, and has not answered so far."""
        self.away_since = time.monotonic()
        does = "it is up, and busy with something else"
        self._warn(what_it_does(self._folder) or f"{does}; `overlord top {self._address}` says what it waits for")

    def _warn(self, does: str) -> None:
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + NEXT_WARNING_S
            logger.warning(
                "%s waits for the service at %s since %.0f s: %s", self._what, self._address, self.waited_s, does
            )


def folder_of(address: str) -> tuple[Path, bool]:
    """Return the folder of a service, and whether it comes back after it went.

    The folder of the launcher, which has the control socket, goes for good. On another host of a cluster the folder
    goes with the constructor host, and its replacement makes it again.
    """
    path = socket_path(address)
    return (path, not (path / CONTROL).exists()) if path.is_dir() else (path.parent, False)


def write_failure(folder: Path, error: OverlordError) -> None:
    """Write down why a service will not come back; the file appears whole or not at all."""
    scratch = folder / f"{FAILED}.tmp"
    scratch.write_text(json.dumps({"error": type(error).__name__, "message": str(error)}), encoding="utf-8")
    scratch.replace(folder / FAILED)


def write_start(folder: Path, doing: str, *, again: bool) -> None:
    """Write down what a service process that starts is doing, for clients that wait for it."""
    scratch = folder / f"{STARTING}.tmp"
    scratch.write_text(json.dumps({"doing": doing, "again": again}), encoding="utf-8")
    scratch.replace(folder / STARTING)


def what_it_does(folder: Path) -> str | None:
    """Return what the service of a folder does, if it is being started.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_start(folder, "opening sources, 120 of 306", again=False)
        >>> what_it_does(folder)
        'it is starting (opening sources, 120 of 306)'
    """
    try:
        told = json.loads((folder / STARTING).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return f"it is {'being started again' if told['again'] else 'starting'} ({told['doing']})"


def why_it_failed(folder: Path) -> OverlordError | None:
    """Return why the service of a folder will not come back, if that is so.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> why_it_failed(folder)
        >>> write_failure(folder, ServiceLost("it died six times"))
        >>> why_it_failed(folder)
        ServiceLost('it died six times')
    """
    try:
        told = json.loads((folder / FAILED).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return error_named(told["error"], told["message"])


SILENCE_S = 5.0
"""After so long without an answer a client asks whether the service still lives: a step may take longer."""
BEAT_S = 10.0
"""How long a living service may take to say so."""
FIRST_ATTACH_S = 60.0
"""How long a client that attaches for the first time waits for a service of which nothing says that it is starting."""
JOIN_S = 120.0
"""How long a rank that goes back waits for the others to come back too."""
WARN_S = 5.0
LEAVE_S = 10.0
"""How long a client that goes waits for a service that is away, to say how far it came."""


@named_arguments
def connect(address: str, rank: int, step: int | None = None, state: Mapping[str, Any] | None = None) -> Client:
    """Attach to a service of this host as one rank, from any process.

    A trainer that comes back after a crash gives the step of its checkpoint, `state["step"]`. If later steps were
    handed out, the service goes back: this waits until all ranks have asked for the same step, and the stream goes on
    there exactly as `launch(.., state=step)` would. Reports of the steps that are trained again count anew.

    Args:
        address: What `service.address` or `overlord serve` shows.
        rank: The trainer's global rank in the service's mesh.
        step: Where to go on: any step that the service's store keeps. By default where the service was launched.
        state: The state before that step: one that is not of the service's stream is refused.

    Raises:
        StateError: The ranks ask for different steps, the store does not keep the step any more, or the state is not
            one of the service's stream.
        SpecError: Another process is attached as this rank.
    """
    if not is_whole(rank):
        raise SpecError(f"rank is {rank!r:.80}, not a whole number; it has no data. Give the trainer's global rank.")
    check_step(step)
    if isinstance(state, Mapping) and set(state) == {"stream"}:
        raise SpecError(f"connect: state {_OF_LOADER}")
    feed = LocalFeed(address, int(rank), None if step is None else int(step), state)
    try:
        return Client(feed, rank, feed.first_step)
    except BaseException:
        feed.close()
        raise


def refuse_torch_workers(what: str) -> None:
    """Refuse to hand out a whole stream in each of several workers of torch's DataLoader.

    Raises:
        SpecError: in such a worker.
    """
    torch_data = sys.modules.get("torch.utils.data")  # without torch there is no such worker
    info = None if torch_data is None else torch_data.get_worker_info()
    if info is not None and info.num_workers > 1:
        raise SpecError(
            f"{what}: this is worker {info.id} of {info.num_workers} of a torch.utils.data.DataLoader; each of them "
            "would hand out the whole stream, and every sample would be trained on more than once. Give it "
            "num_workers=0, as the service reads ahead by itself, or use overlord.integrations.torch_loader.DataLoader "
            "without a wrapper."
        )


_OF_LOADER = (
    "is what state_dict() of a DataLoader returned; it holds the stream's own state as text. Pass it to "
    'load_state_dict() of a DataLoader, or go on with own = json.loads(state["stream"]): step=own["step"], state=own.'
)


def check_step(step: object) -> None:
    """Refuse what is no step to go on at."""
    if isinstance(step, Mapping):
        own = 'is a whole state, not a number of steps. Pass step=state["step"].'
        raise SpecError(f"step {_OF_LOADER if set(step) == {'stream'} else own}")
    if step is not None and (not is_whole(step) or int(cast("int", step)) < 0):
        raise SpecError(
            f"step is {step!r:.80}, not a number of steps; there is nothing to go on at. Give the step of your "
            "checkpoint: state['step'] of what client.state_dict() returned."
        )


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as it is sent; a value that cannot be, such as a number beyond 64 bits, is in no state."""
    try:
        msgspec.msgpack.encode(found := dict(state))
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise StateError(
            f"the state is damaged: {error}; resuming from it would start an unknown stream. Pass what "
            "client.state_dict() returned, unchanged."
        ) from error
    return found


def check_state_at(address: str, state: Mapping[str, Any]) -> None:
    """Refuse a state that is not one of the stream of a running service, without attaching.

    Raises:
        StateError: it says what differs.
    """
    folder, returns = folder_of(read_address(address))
    barrier = Barrier(read_address(address), folder, returns=returns, what="a trainer")
    while True:
        try:
            raised(ask_once(address, msg.CheckState(_plain(state))))
            return
        except Rewound as error:
            barrier.wait(error)


def status_of(address: str) -> dict[str, Any]:
    """Ask a running service for its status."""
    return raised(ask_once(address, msg.GetStatus())).content


def ask_once(address: str, request: Request[R], within_s: float | None = None) -> R | Failure:
    """Ask a running service one thing without attaching to it; an error is an answer, see `raised`.

    Args:
        address: Of the service.
        request: The question.
        within_s: How long it may be silent; no limit if None.

    Raises:
        ServiceLost: when it is gone, or silent for longer.
    """
    with connect_socket(address) as connection:
        if within_s is not None:
            expect_within(connection, within_s)
        send(connection, request)
        return receive(connection)[0]


class _Connection:
    """A connection to a service, and what is leased over it."""

    def __init__(
        self,
        connection: socket.socket,
        request: Attach,
        on_silence: Callable[[], None],
        waits: Callable[[list[Any]], None] | None = None,
    ) -> None:
        """Attach.

        Args:
            connection: To the service.
            request: As which rank, and where.
            on_silence: Called when nothing has come for a while: a service that plans its first step answers late.
            waits: Told of the ranks (with the steps they are at) that must ask for the same step first; it may raise.
        """
        self.socket = connection
        self.close = weakref.finalize(self, connection.close)
        self.maps: dict[int, mmap.mmap] = {}
        self.released: deque[int] = deque()
        self.leased: dict[int, int] = {}
        self.ahead: int | None = None
        """The step that was asked for ahead, and whose answer has not been read."""
        try:
            expect_within(connection, SILENCE_S)
            while True:
                send(connection, request)
                reply = raised(receive(connection, on_silence)[0])
                if not isinstance(reply, msg.RanksMissing) or waits is None:
                    break
                waits(reply.waits)
        except BaseException:
            self.close()
            raise
        assert isinstance(reply, msg.Attached)
        self.facts = reply

    def send(self, request: Request[Any]) -> None:
        """Send a request, and give back leases whose arrays are gone."""
        # One by one: an array that goes while this runs must not be forgotten.
        released = tuple(self.released.popleft() for _ in range(len(self.released)))
        send(self.socket, msgspec.structs.replace(request, release=released) if released else request)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A view that lies in mapped memory."""

    view: msg.View
    segment: mmap.mmap
    connection: _Connection

    def release(self) -> None:
        self.connection.released.append(self.view.lease)


class LocalFeed:
    """A rank's connection to the service of its host. Arrays lie in shared memory until nothing refers to them."""

    def __init__(
        self, address: str, rank: int, step: int | None = None, state: Mapping[str, Any] | None = None
    ) -> None:
        self._address = read_address(address)
        self._folder, self._returns = folder_of(self._address)
        self._rank = rank
        self._lock = threading.RLock()
        self._ready: dict[tuple[int, int], _Ready] = {}
        self._prefetched: dict[int, StepHeader] = {}
        self._at: int | None = None
        self._looks_after: tuple[int, bool] | None = None
        """The step whose first microbatch is waited for before the one behind is asked for; and whether the service
        knows that this client is at it."""
        self._closed = False
        self._lineage = 0
        self._connection: _Connection | None = self._first_connection(step, state)
        self._names: tuple[str, ...] = ()
        facts = self._connection.facts
        self.mesh = mesh_from_text(facts.begin.mesh)
        """The mesh of the step at which this rank begins; of a rank that none has, the newest."""
        self.first_step: int = facts.begin.first_step or 0
        if facts.twice:
            logger.warning(
                "rank %d of %s has a client in this process already: both get the same samples. Close the one that is "
                "not needed, or give each its own rank", rank, address,
            )  # fmt: skip
        if step is not None:
            self._at = self.first_step  # one that comes back before it took a step must not begin elsewhere
        elif (facts.reached or 0) > self.first_step and not facts.twice:
            logger.warning(
                "rank %d of %s was at step %d before, and begins again at step %d, where the service was launched. To "
                "go on from a checkpoint, attach with its step: ol.connect(address, rank, step=..), which may be %d to "
                "%d, or load its state into a DataLoader", rank, address, facts.reached, self.first_step,
                *facts.begin.steps,
            )  # fmt: skip

    def open_step(self, step: int) -> StepHeader | None:
        """Return the header of a step; waits until it is planned. What is built of it comes along."""
        with self._lock:
            self._check_open()
            self._at = step
            for key in [key for key in self._ready if key[0] != step]:  # the trainer did not look at them
                self._ready.pop(key).release()
            header, told = self._take_prefetched(step), False
            if header is None:
                reply, fds = self._ask("step", msg.OpenStep(step))
                if reply.header is None:
                    return None
                self._take(step, reply, fds)
                header, told = self._header_of(reply.header, reply.names), True
            if header.fetches and header.num_microbatches:
                # Not before the trainer takes a microbatch: then it has let go of the step before, whose memory goes
                # back with this request. Until then the service would have room for one step less.
                self._looks_after = (step, told)
            else:
                self._look_ahead(step, told)
            return header

    def microbatch(self, step: int, microbatch: int) -> RankView:
        """Return one microbatch; waits until it is built."""
        key = (step, microbatch)
        with self._lock:  # a segment's descriptor comes once: the next request must find it mapped
            if key not in self._ready:
                self._take(step, *self._ask("microbatch", msg.TakeMicrobatch(step, microbatch)))
            if key not in self._ready:
                return RankView({}, {})
            ready = self._ready.pop(key)
            if self._looks_after is not None and self._looks_after[0] == step:
                self._look_ahead(*self._looks_after)
        view, connection = ready.view, ready.connection
        root = np.frombuffer(ready.segment, np.uint8)
        # Every array below is a view of `root`: the lease ends when the last of them is gone.
        arrays = {k: _view(root, dtype, shape, offset) for k, dtype, shape, offset in view.facts.arrays}
        nbytes = sum(a.nbytes for a in arrays.values())
        if sum(connection.leased.values()) + nbytes > connection.facts.lease_bytes:
            # A trainer that keeps many batches must not hold the service's memory: it gets copies.
            arrays = {k: a.copy() for k, a in arrays.items()}
            ready.release()
        else:
            connection.leased[view.lease] = nbytes
            weakref.finalize(root, _release_lease, connection.leased, connection.released, view.lease).atexit = False
        return RankView(arrays, view.facts.scalars)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Hand over metrics; durable when it returns.

        By a connection of its own: another thread may wait for the very step that this report lets go on.
        """
        self._check_open()
        # A service that has just come back may not have planned again what this client has had for long.
        request = msg.Report(step, metrics, self._at, self._lineage)
        barrier = self._barrier("report")
        while True:
            try:
                reply = _unless_rewound(ask_once(self._address, request))
                break
            except (OSError, ServiceLost) as error:
                self._check_open()
                barrier.wait(error)
        raised(reply)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state before a step."""
        return self._ask("state", msg.GetState(step))[0].content

    def close(self, next_step: int | None = None) -> None:
        """Detach; arrays that are still referenced stay readable."""
        if self._closed:
            return
        self._closed = True  # a thread that waits for the service to come back gives up
        with self._lock:
            if next_step is not None and self._folder.exists():  # without its folder the service was closed before
                try:
                    self._ask("leave", msg.Leave(next_step), patience_s=LEAVE_S)
                except OverlordError:
                    pass  # it went first, is too busy, or another process has the rank
            self._drop_connection()
            self._ready.clear()

    # -- the prefetched step ----------------------------------------------------------------------

    def _take_prefetched(self, step: int) -> StepHeader | None:
        """Return the header of a step that was fetched ahead, if it was."""
        connection = self._connection
        if connection is not None and connection.ahead is not None:
            try:
                self._receive_ahead(connection)
            except (OSError, ServiceLost):
                self._drop_connection()  # the next request finds out whether it comes back
        header = self._prefetched.pop(step, None)
        self._prefetched.clear()
        return header

    def _look_ahead(self, step: int, told: bool) -> None:
        """Ask for the step behind the one that is handed out, and do not wait for the answer."""
        self._looks_after = None
        if self._connection is None:
            return
        try:
            self._connection.send(msg.LookAhead(step + 1, None if told else step))
            self._connection.ahead = step + 1
        except ServiceLost:
            self._drop_connection()

    def _receive_ahead(self, connection: _Connection) -> None:
        """Read the answer to having looked ahead."""
        step, connection.ahead = connection.ahead, None
        if step is None:
            return
        reply, fds = receive(connection.socket, self._check_alive)
        _unless_rewound(reply)
        if isinstance(reply, Views) and reply.header is not None:
            self._take(step, reply, fds)
            self._prefetched[step] = self._header_of(reply.header, reply.names)

    def _header_of(self, header: StepHeader, names: tuple[str, ...] | None) -> StepHeader:
        if names is not None:
            self._names = names
        return msgspec.structs.replace(header, names=self._names)

    def _take(self, step: int, reply: Views, fds: list[int]) -> None:
        """Keep the views that came, with their segments mapped."""
        connection = self._connection
        assert connection is not None, "views come over a connection"
        try:
            for microbatch, view in reply.views.items():
                if view.new:
                    connection.maps[view.segment] = _map(fds.pop(0), view.capacity)
                self._ready[step, microbatch] = _Ready(view, connection.maps[view.segment], connection)
        except BaseException:
            for fd in fds:
                os.close(fd)
            self._drop_connection()  # the service sends a descriptor only once over a connection
            raise
        for old in reply.gone:
            connection.maps.pop(old, None)

    # -- asking, and coming back ---------------------------------------------------------------

    def _ask(self, what: str, request: Request[R], patience_s: float | None = None) -> tuple[R, list[int]]:
        """Ask until there is an answer, over as many connections as it takes.

        Args:
            what: What it asks for, for the warnings.
            request: The question.
            patience_s: How long to wait for a service that is away; as long as it may come back, by default.
        """
        with self._lock:
            barrier: Barrier | None = None
            while True:
                if patience_s is None:
                    self._check_open()
                try:
                    if self._connection is None:
                        again = Attach(self._rank, os.getpid(), self._at, self._lineage)
                        barrier = barrier or self._barrier(what)
                        found = connect_socket(self._address, self._rank)
                        self._connection = _Connection(found, again, self._still_up(barrier))
                        self._lineage = self._connection.facts.begin.lineage
                    self._connection.send(request)
                    self._receive_ahead(self._connection)
                    reply, fds = receive(self._connection.socket, self._check_alive)
                    _unless_rewound(reply)
                    break
                except (OSError, ServiceLost) as error:
                    self._drop_connection()
                    barrier = barrier or self._barrier(what)
                    if patience_s is not None and barrier.waited_s > patience_s:
                        raise ServiceLost(f"the service at {self._address} is away ({error})") from error
                    barrier.wait(error)
                except BaseException:  # as a Ctrl-C: the answer would be taken for that of the next request
                    self._drop_connection()
                    raise
        return raised(reply), fds

    def _first_connection(self, step: int | None, state: Mapping[str, Any] | None) -> _Connection:
        """Attach for the first time. A service that was killed a moment ago has left its socket, and comes back."""
        barrier = self._barrier("attaching")
        reached = False
        others = None if step is None else _Others(self._rank, step)
        request = Attach(self._rank, os.getpid(), step=step, state=None if state is None else _plain(state))
        while True:
            try:
                found, reached = connect_socket(self._address, self._rank), True
                connection = _Connection(found, request, self._still_up(barrier), others)
                self._lineage = connection.facts.begin.lineage
                return connection
            except Rewound as error:  # it is started again at that very step, however long that takes
                barrier = self._barrier("attaching")
                barrier.wait(error)
            except (OSError, ServiceLost) as error:
                # Where there is no socket the address is wrong; where there is one without an answer, it is not. In the
                # folder of a service with several processes the sockets are away while their processes are replaced.
                there = reached or isinstance(error.__cause__, ConnectionRefusedError)
                there = there or socket_path(self._address).is_dir()
                if what_it_does(self._folder) is not None:  # its launcher is starting it, however long that takes
                    barrier.away_since = time.monotonic()
                if not there or time.monotonic() - barrier.away_since > FIRST_ATTACH_S:
                    raise
                barrier.wait(error)

    def _barrier(self, doing: str) -> Barrier:
        what = f"rank {self._rank} ({doing}{'' if self._at is None else f', at step {self._at}'})"
        return Barrier(self._address, self._folder, returns=self._returns, what=what)

    def _still_up(self, barrier: Barrier) -> Callable[[], None]:
        """Return what is called while a service is silent: it finds out whether it lives, and says so."""

        def look() -> None:
            self._check_alive()
            barrier.is_up()

        return look

    def _check_alive(self) -> None:
        """Find out whether a service that is silent lives: a stopped process keeps its connections open.

        Raises:
            ServiceLost: when it does not answer.
        """
        self._check_open()
        with connect_socket(self._address, self._rank) as connection:
            expect_within(connection, BEAT_S)
            send(connection, msg.Beat())
            receive(connection)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the client is closed. Take another one from the service.")

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            connection.maps.clear()


class _Others:
    """Waits for the other ranks to ask for the same step."""

    def __init__(self, rank: int, step: int) -> None:
        self._rank = rank
        self._step = step
        self._since = time.monotonic()
        self._warned = False

    def __call__(self, waits: list[Any]) -> None:
        """Hear which ranks have not asked for the step, and where they are; none while the service plans up to it.

        Raises:
            StateError: They did not come.
        """
        if not waits:
            self._since = time.monotonic()
            return
        waited = time.monotonic() - self._since
        told = ", ".join(
            f"rank {rank} " + ("is not attached" if at is None else f"is attached at step {at}") for rank, at in waits
        )
        if waited > JOIN_S:
            raise StateError(
                f"rank {self._rank} asks for step {self._step}, which is behind what was handed out, and for "
                f"{waited:.0f} s not all ranks have asked for it: {told}. A stream goes back for all ranks at once. "
                "Start all trainers again from the same checkpoint, each with step= or its state."
            )
        if waited > WARN_S and not self._warned:
            self._warned = True
            logger.warning("rank %d waits for all ranks to ask for step %d: %s", self._rank, self._step, told)


def _unless_rewound(reply: Any) -> Any:
    """Return an answer; raise that of a service that is being started again at an earlier step: ask that one."""
    if isinstance(reply, Failure) and reply.error == Rewound.__name__:
        raise Rewound(reply.message)
    return reply


def _map(fd: int, length: int) -> mmap.mmap:
    """Map shared memory whose descriptor came from the service; the mapping holds a descriptor of its own."""
    try:
        return mmap.mmap(fd, length, prot=mmap.PROT_READ)
    except OSError as error:
        raise out_of_files(error, "a batch of the service cannot be mapped into it") or error from error
    finally:
        os.close(fd)


def _view(root: Any, dtype: str, shape: tuple[int, ...], offset: int) -> Any:
    return np.ndarray(shape, dtype, root, offset)  # its base is `root`, whose end is the end of the lease


def _release_lease(leased: dict[int, int], released: deque[int], lease: int) -> None:
    leased.pop(lease, None)
    released.append(lease)
