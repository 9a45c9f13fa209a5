"""Roles as objects of this process: a message is a call in the caller's thread, and nothing is encoded.

Rules of this file:
1. Messages and answers are passed by reference. The columns of samples that are handed over are read-only from then
   on: loaders keep them for other hosts.
2. A role may be asked while it waits for another one (a loader reports a bad row while the planner waits for its
   metadata): the call is made at once, on top of the other. What a role does beside its calls waits until none is made.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlord.core.memory_account import MemoryAccount
from overlord.core.messages import HandedOver, Heartbeat, Media, Nothing, Payload
from overlord.job.specs import Job
from overlord.runtimes.hosts.prefetch import Executors, SerialWorkers
from overlord.runtimes.hosts.role_host import RoleEnvironment
from overlord.runtimes.hosts.shared_planner import Pace
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.launching.deployment import IsolateReader, Prepared
from overlord.runtimes.launching.service_options import Progress, ServiceOptions
from overlord.runtimes.supervision.blame import late_calls
from overlord.runtimes.supervision.child import Limits
from overlord.runtimes.supervision.process_workers import ProcessWorkers
from overlord.runtimes.supervision.reader_processes import ReaderProcesses
from overlord.runtimes.transport.engine import SERVICE, Membership, Peer, Pending, Sender
from overlord.runtimes.transport.peer_client import PeerClient
from overlord.runtimes.transport.role_codec import Unfinished
from overlord.runtimes.transport.role_endpoint import answer_of
from overlord.transforms.samples.per_sample import Isolate, Workers

STORE_PATIENCE_S = 1.0
"""How long a store that is down is tried before the caller gets the error."""

HURRY_S = 3.0
"""How long a closing service waits for functions in process workers."""

MakeRole = Callable[[Mapping[str, Any], PeerClient, RoleEnvironment], Any]
"""Makes the role of a site: from its facts and generation, the client of its peers, and its environment."""


class Clock:
    """The time of this machine."""

    def now(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


class CallerPace(Pace):
    """How a planner host without threads waits: in the caller, which makes time pass for all roles."""

    threads = False

    def __init__(
        self, now: Callable[[], float], pass_time: Callable[[float], None], patience_s: float = math.inf
    ) -> None:
        self._now = now
        self._pass_time = pass_time
        self.patience_s = patience_s

    def now(self) -> float:
        return self._now()

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        self._pass_time(seconds)
        return True


class SharedEnvironment(RoleEnvironment):
    """The environment of all roles of one process: what a job is prepared to is the same for all, and made once."""

    _prepared: Prepared | None = None
    _memory: MemoryAccount | None = None

    def memory(self, options: ServiceOptions) -> MemoryAccount:
        if self._memory is None:
            self._memory = super().memory(options)
        return self._memory

    def prepare(self, job: Job, options: ServiceOptions, **given: Any) -> Prepared:
        if self._prepared is None:
            self._prepared = super().prepare(job, options, **given)
        return self._prepared


class CallerEnvironment(SharedEnvironment):
    """The environment of roles that have neither threads nor processes: the caller does everything."""

    runtime: str | None = "inline"
    plans_ahead = False

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def workers(self, count: int, name: str, ends: contextlib.ExitStack) -> Workers:
        return SerialWorkers()

    def executors(self, threads: int, worker_threads: int, ends: contextlib.ExitStack) -> Executors:
        return Executors.of_caller()

    def isolate(self, options: ServiceOptions, ends: contextlib.ExitStack) -> Isolate | None:
        return None

    def isolate_reader(self, options: ServiceOptions, ends: contextlib.ExitStack) -> IsolateReader | None:
        return None

    def pace(self) -> Pace:
        return self._pace


class DirectPeer:
    """A role of this process, as the others ask it."""

    role: Any = None

    def __init__(self, peer_client: PeerClient) -> None:
        self.peer_client = peer_client
        self.calls = 0
        """Calls that it is in the middle of."""

    def ask(self, method: str, message: Any, sender: Sender = SERVICE) -> Pending:
        """Call a method of the role."""
        if method == "beat":
            served, rewound = self.role.await_progress(0.0), self.role.rewound
            waits = tuple(late_calls())
            return Answered(Heartbeat(self.peer_client.version, rewound=rewound, served=served, waits=waits))

        def work() -> Any:
            self.peer_client.check(sender)
            return answer_of(self.role, method, message)

        answer = self._do(work)
        return Unanswered(self, answer) if isinstance(answer, Unfinished) else Answered(answer)

    def finish(self, answer: Unfinished) -> Any:
        """Work out an answer to its end."""
        return sealed(self._do(answer.finish))

    def _do(self, work: Callable[[], Any]) -> Any:
        self.calls += 1
        try:
            return work()
        except Exception as error:  # an error is an answer, and is raised where the answer is taken
            return error
        finally:
            self.calls -= 1


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that is there."""

    answer: Any

    def poll(self, timeout_s: float) -> Any:
        """Return it."""
        return self.answer


@dataclass(slots=True)
class Unanswered:
    """An answer that is worked out when it is taken."""

    peer: DirectPeer
    answer: Any

    def poll(self, timeout_s: float) -> Any:
        """Return it."""
        if isinstance(self.answer, Unfinished):
            self.answer = self.peer.finish(self.answer)
        return self.answer


class DirectEngine:
    """Makes roles as objects, and calls their methods.

    Args:
        make: Makes a role.
        clock: The time.
        environment: What the roles take from the process they run in; by default everything is done by the caller.
    """

    first_sign_s = 60.0
    """How long a role may take until its first sign of life."""

    def __init__(self, make: MakeRole, clock: Clock | None = None, environment: RoleEnvironment | None = None) -> None:
        self.make = make
        self.clock = clock or Clock()
        self.peers: list[Any] = []
        """All roles that are up."""
        self._environment = environment or CallerEnvironment(
            CallerPace(self.clock.now, self.pass_time, STORE_PATIENCE_S)
        )
        self._idle: Callable[[float], None] | None = self.pass_time

    def start(self, site: Site, generation: int) -> Peer:
        """Make the object of a role."""
        peer = DirectPeer(PeerClient((site.name, generation), self.clock.now, self._idle))
        peer.role = self.make(site.facts(1) | {"generation": generation}, peer.peer_client, self._environment)
        self.peers.append(peer)
        return peer

    def introduce(self, peer: Peer, membership: Membership) -> Pending:
        """Give a role the membership."""
        assert isinstance(peer, DirectPeer)
        peer.peer_client.learn(membership)
        return Answered(Nothing())

    def kill(self, peer: Peer, site: Site, pid: int) -> None:
        """Drop a role."""
        if peer in self.peers:
            self.peers.remove(peer)

    def wait(self, pending: Sequence[Pending], timeout_s: float) -> None:
        """Let time pass."""
        self.pass_time(timeout_s)

    def place_again(self, site: Site) -> Site:
        """Return the same site: there is one host."""
        return site

    def reserve(self, site: Site, sidecars: Collection[str]) -> Site:
        """Return the same site: there is one host, and nothing of it is reserved."""
        return site

    def release(self, site: Site) -> None:
        """Nothing was reserved."""

    def describe(self, sites: Sequence[tuple[Site, int]]) -> dict[str, Any]:
        """Return that there are no hosts that could be lost by themselves."""
        return {"hosts": []}

    def close(self) -> None:
        """Drop all roles."""
        self.peers.clear()

    def pass_time(self, seconds: float) -> None:
        """Wait; roles do what threads of theirs would do meanwhile."""
        self.clock.sleep(seconds)
        for peer in self.peers:
            if not peer.calls:
                peer.role.work_beside()


class ThreadEnvironment(SharedEnvironment):
    """The environment of the roles of one process that has threads: they also share worker and reader processes."""

    def __init__(self, runtime: str, options: ServiceOptions, progress: Progress) -> None:
        self.runtime = runtime
        self._progress = progress
        limits = Limits(options.heartbeat_s)
        self._processes = ProcessWorkers(options.threads, limits)
        self._readers = ReaderProcesses(options.threads, limits, parses=options.pooled)

    def progress(self, what: str, done: int, of: int) -> None:
        self._progress(what, done, of)

    def isolate(self, options: ServiceOptions, ends: contextlib.ExitStack) -> Isolate | None:
        return self._processes.isolate

    def isolate_reader(self, options: ServiceOptions, ends: contextlib.ExitStack) -> IsolateReader | None:
        return self._readers.isolate

    def prepare(self, job: Job, options: ServiceOptions, **given: Any) -> Prepared:
        given |= {"isolate": self._processes.isolate, "isolate_reader": self._readers.isolate}
        return super().prepare(job, options, **given)

    def hurry(self) -> None:
        """End the process workers, whatever they do."""
        self._processes.close()

    def close(self) -> None:
        """End all processes."""
        self._processes.close()
        self._readers.close()


class ThreadEngine(DirectEngine):
    """Makes roles as objects of a process that has threads: a role is called in the thread of the caller.

    Args:
        make: Makes a role.
        environment: What they share.
    """

    def __init__(self, make: MakeRole, environment: ThreadEnvironment) -> None:
        super().__init__(make)
        self._environment = self._shared = environment
        self._idle = None

    def wait(self, pending: Sequence[Pending], timeout_s: float) -> None:
        """Wait: answers are there."""
        time.sleep(timeout_s)

    def interrupt(self) -> None:
        """End waits that may keep the roles from closing; before long also functions that hang in process workers."""
        hurry = threading.Timer(HURRY_S, self._shared.hurry)
        hurry.daemon = True
        hurry.start()
        for peer in self.peers:
            peer.role.interrupt()

    def close(self) -> None:
        """Drop all roles, and end their processes."""
        super().close()
        self._shared.close()


def sealed(answer: Any) -> Any:
    """Return an answer whose columns of samples cannot be written to: the role that gave it may keep them."""
    if isinstance(answer, HandedOver):
        for payload in answer.payloads:
            for array in _columns(payload):
                array.flags.writeable = False
    return answer


def _columns(payload: Payload) -> list[Any]:
    ragged = [array for column in (payload.tokens, payload.loss) for array in (column.values, column.offsets)]
    media = payload.media
    names = [] if media is None else Media.__slots__
    return ragged + [one for name in names if hasattr(one := getattr(media, name), "flags")]
