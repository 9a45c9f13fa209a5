"""A service in this process with injected faults: the inline runtime with a simulated clock and a faulty transport.

The roles, the supervisor, the constructor host and the feed are those of `runtime="inline"`; the transport differs.
Nothing is shared between two roles: every message is encoded to a frame and decoded again. What can happen to a process
can happen to an object here, at a point that a test chooses: it is killed (also in the middle of a call), it hangs and
continues, and messages to it are lost, late, duplicated or cut off by a partition.

Rules of this file:
1. One thread, and no time but that of the simulated clock. Time passes only while a caller waits.
2. A killed role does nothing more: its next message, wait or write raises `Killed` and unwinds it. Nothing is closed.
3. A hanging role keeps its messages, and processes them when it continues, though it may have a successor by then. It
   cannot be killed meanwhile, as a paused machine cannot.
4. A role in the middle of a call gets no other, except those that it answers without its lock.
5. Every operation on a store may fail, or be the last thing the role does. Its files are closed then as the kernel
   closes them: what was written is there, and nothing else. A write to a full disk has written half of its data.
   Operations have names that a script can use: "store.write", "store.append" and so on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import numpy as np

from overlord.core.client_messages import GetStatus, Request
from overlord.core.messages import Heartbeat, Nothing
from overlord.errors import Fenced, OverlordError, ServiceLost, SpecError, StoreError
from overlord.job.specs import Job
from overlord.runtimes.hosts.constructor_host import InlineConstructor
from overlord.runtimes.hosts.peers import Blobs
from overlord.runtimes.hosts.role_host import LOCK_FREE, RoleEnvironment
from overlord.runtimes.hosts.shared_planner import Pace
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.launching.inline_service import CONSTRUCTOR, InlineService
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.supervision.supervisor import Supervisor
from overlord.runtimes.transport.codec import Frame
from overlord.runtimes.transport.direct import CallerEnvironment, CallerPace, Clock, DirectEngine, DirectPeer, MakeRole
from overlord.runtimes.transport.engine import SERVICE, Membership, Peer, PeerGone, Pending, Sender
from overlord.runtimes.transport.peer_client import PeerClient
from overlord.runtimes.transport.role_codec import answer_from_frame, answer_to_frame, question_from_frame, to_frame
from overlord.runtimes.transport.role_endpoint import answer_of, finished
from overlord.storage import StorageOptions
from overlord.stores.places import Appender, Place, open_place
from overlord.testing.fault_script import SERVICE as WHOLE_SERVICE
from overlord.testing.fault_script import Fault, FaultScript
from overlord.transforms.samples.per_sample import Isolate

LEAST_S = 0.01
"""A wait of no length would never end."""
START_TRIES = 64
"""How often a service that was killed is launched again, when roles die while it starts."""
STEP_S = 0.5
"""How long a trainer works on a step, by the simulated clock."""
WRITES = frozenset({"store.write", "store.append", "store.create", "store.open_append"})
"""Operations on a store that can fail."""

R = TypeVar("R")
T = TypeVar("T")

StoreFailure = Literal["", "store_errors", "full_disk"]
"""How a write to a store fails, if it does."""
Touch = Callable[[str, Callable[[StoreFailure], Any]], Any]
"""Performs an operation of a role on its store, and tells it how to fail."""


class FakeClock(Clock):
    """A clock that advances only by `sleep`: what takes minutes is tested in no time.

    Example:
        >>> clock = FakeClock()
        >>> clock.sleep(90.0)
        >>> clock.now()
        90.0
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the seconds so far."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Advance the clock; it never goes back."""
        self._now += max(0.0, seconds)


@dataclass(frozen=True, slots=True)
class MessageFault:
    """What happens to one message, or to one operation on a store."""

    lost: bool = False
    """It never arrives."""
    reply_lost: bool = False
    """It arrives, and its reply does not."""
    twice: bool = False
    """It arrives twice: the second one late, where there is a delay."""
    delay_s: float = 0.0
    """It arrives late, perhaps behind later ones."""
    kills: Literal["", "before", "after"] = ""
    """Its receiver is killed: before the work, or between the work and the reply."""
    kills_service: bool = False
    """The whole service is killed, not only the receiver."""
    fails: StoreFailure = ""
    """How an operation on a store fails."""


DELIVERED = MessageFault()


class Killed(BaseException):
    """Unwinds a role that was killed in the middle of its work."""


@dataclass(slots=True, eq=False)
class Message:
    """A message on its way."""

    method: str
    content: Any
    sender: Sender
    work: Callable[[], Any] | None = None
    """What is done instead of calling a method."""
    reply: Any = None
    gone: str | None = None
    fault: MessageFault = DELIVERED


class FaultEnvironment(CallerEnvironment):
    """The environment of a role that may be killed.

    Args:
        isolate: Stands in for process workers.
        pace: How it waits.
        touch: Performs its operations on a store.
    """

    runtime = None
    plans_ahead = True
    prepare = RoleEnvironment.prepare  # nothing is shared between two roles

    def __init__(self, isolate: Isolate | None, pace: Pace, touch: Touch) -> None:
        super().__init__(pace)
        self._isolate = isolate
        self._touch = touch
        self._places: list[_FaultyPlace] = []

    def isolate(self, options: ServiceOptions, ends: contextlib.ExitStack) -> Isolate | None:
        return self._isolate

    def open_place(self, store: str, options: StorageOptions | None = None) -> Place:
        place = _FaultyPlace(open_place(store, options), self._touch)
        self._places.append(place)
        return cast("Place", place)

    def drop(self) -> None:
        """Release what the kernel releases when a process is killed."""
        for place in self._places:
            place.drop()


class _FaultyPlace:
    """The place of a store; each of its operations can fail, or be the last one of its role."""

    def __init__(self, place: Place, touch: Touch) -> None:
        self._place = place
        self._touch = touch
        self._open: list[Appender] = []

    def __getattr__(self, operation: str) -> Any:
        found = getattr(self._place, operation)
        if operation in ("name", "can_append"):
            return found
        return lambda *given: self._perform(operation, lambda: found(*given))

    def open_append(self, name: str) -> Appender:
        """Open a new file to append to."""

        def opened() -> Appender:
            appender = self._place.open_append(name)
            self._open.append(appender)
            return _FaultyAppender(self, appender)

        return self._perform("open_append", opened)

    def append(self, appender: Appender, data: bytes) -> None:
        """Append to a file; half of the data if the disk is full."""
        half = data[: len(data) // 2]
        self._perform("append", lambda: appender.append(data), if_full=lambda: appender.append(half))

    def close_file(self, appender: Appender) -> None:
        """Close a file."""
        if appender in self._open:
            self._open.remove(appender)
            appender.close()

    def drop(self) -> None:
        """Close what is open, as the kernel does when a process is killed."""
        while self._open:
            self._open.pop().close()

    def _perform(self, operation: str, work: Callable[[], Any], if_full: Callable[[], None] = lambda: None) -> Any:
        def perform(failure: StoreFailure) -> Any:
            if not failure:
                return work()
            if failure == "full_disk":
                if_full()
            why = "No space left on device" if failure == "full_disk" else "it answers 500"
            raise StoreError(
                f"the store {self._place.name!r} cannot be written ({why}); no step can be planned that could not be "
                "resumed. A test has asked for this: take the fault out of its script."
            )

        return self._touch(f"store.{operation}", perform)


@dataclass(slots=True)
class _FaultyAppender:
    """One open file of such a place."""

    place: _FaultyPlace
    appender: Appender

    def append(self, data: bytes) -> None:
        self.place.append(self.appender, data)

    def close(self) -> None:
        self.place.close_file(self.appender)


class FaultPeer(DirectPeer):
    """One instance of a role, as the other roles call it.

    Args:
        engine: Delivers its messages.
        name: The role.
        generation: Which instance of the role it is.
        make: Makes the role itself, with its peer client and its environment.
    """

    def __init__(
        self, engine: FaultEngine, name: str, generation: int, make: Callable[[PeerClient, RoleEnvironment], Any]
    ) -> None:
        super().__init__(PeerClient((name, generation), engine.clock.now, engine.pass_time))
        self._engine = engine
        self.name = name
        self.generation = generation
        self.state: Literal["up", "hangs", "dead"] = "up"
        self.inbox: deque[Message] = deque()
        """Messages that came while it could not take them."""
        pace = CallerPace(engine.clock.now, engine.pass_time)
        self.environment = FaultEnvironment(engine.isolate, pace, functools.partial(engine.touch_store, self))
        self.failed: Exception | None = None
        try:
            self.role = engine.acting(self, lambda: make(self.peer_client, self.environment))
        except Exception as error:  # the reply to every call, as of a process
            self.failed = error

    def ask(self, method: str, message: Any, sender: Sender = SERVICE) -> Pending:
        """Call a method of the role."""
        if method == "beat":
            return _Heartbeat(self._engine, self)
        frame, plan = to_frame(message)
        copy = question_from_frame(copied(frame), plan)
        return self._engine.send(self, Message(method, copy, sender))

    def take(self, message: Message) -> None:
        """Do the work of a message."""
        if message.fault.kills == "before":
            self._engine.kill_by(message.fault, self)
            return
        try:
            self.peer_client.check(message.sender)
            if message.work is not None:
                reply = message.work()
            else:
                reply = self.failed or finished(answer_of(self.role, message.method, message.content))
        except Exception as error:  # the border of the role: the error is the reply
            reply = error
        if message.fault.kills == "after":
            self._engine.kill_by(message.fault, self)
        elif not message.fault.reply_lost:
            message.reply = answer_from_frame(copied(answer_to_frame(reply)))


@dataclass(slots=True)
class _Reply:
    """A call under way."""

    engine: FaultEngine
    message: Message

    def poll(self, timeout_s: float) -> Any:
        """Return the reply; while there is none, time passes."""
        if self.message.reply is None and self.message.gone is None and timeout_s > 0:
            self.engine.pass_time(timeout_s)
        if self.message.reply is None and self.message.gone is not None:
            raise PeerGone(self.message.gone)
        return self.message.reply


@dataclass(slots=True)
class _Heartbeat:
    """A liveness check: answered when it is polled."""

    engine: FaultEngine
    peer: FaultPeer

    def poll(self, timeout_s: float) -> Any:
        """Return the heartbeat, if there is one."""
        if self.engine.faults.is_cut(SERVICE[0], self.peer.name) or self.peer.state == "hangs":
            return None
        if self.peer.state == "dead":
            raise PeerGone("it was killed")
        return Heartbeat(self.peer.peer_client.version)


class FaultEngine(DirectEngine):
    """Makes roles as objects, and delivers copies of messages between them.

    Args:
        make: Makes a role.
        faults: The clock, and what happens to messages.
        isolate: Stands in for process workers.
    """

    def __init__(self, make: MakeRole, faults: FaultInjector, isolate: Isolate | None = None) -> None:
        super().__init__(make, faults.clock)
        self.faults = faults
        self.isolate = isolate
        self.on_time: Callable[[], None] = lambda: None
        """Called when time has passed: the supervisor checks all roles."""
        self.crashed = False
        """Whether the service itself was killed."""
        self._acting: list[FaultPeer | None] = []
        self._late: list[tuple[float, FaultPeer, Message]] = []
        self._working = 0
        self._work: deque[Callable[[], None]] = deque()

    # -- what a supervisor calls ------------------------------------------------------------------

    def start(self, site: Site, generation: int) -> Peer:
        """Make the object of a role."""
        facts = site.facts(1) | {"generation": generation}
        peer = FaultPeer(self, site.name, generation, functools.partial(self.make, facts))
        self.peers.append(peer)
        return peer

    def introduce(self, peer: Peer, membership: Membership) -> Pending:
        """Tell a role which peers there are."""
        assert isinstance(peer, FaultPeer)

        def learn() -> Any:
            peer.peer_client.learn(Membership.from_head(membership.head(), membership.peers))
            return Nothing()

        return self.send(peer, Message("learn", None, SERVICE, learn))

    def kill(self, peer: Peer, site: Site, pid: int) -> None:
        """Kill an instance if it can be reached: one that hangs with its host, or is behind a partition, lives on."""
        assert isinstance(peer, FaultPeer)
        if peer.state != "hangs" and not self.faults.is_cut(SERVICE[0], peer.name):
            self.kill_now(peer)

    def close(self) -> None:
        """Drop all instances, also those that were replaced."""
        for peer in list(self.peers):
            self.kill_now(peer)

    # -- what a test calls ------------------------------------------------------------------------

    def newest(self, name: str) -> FaultPeer | None:
        """Return the newest instance of a role, if there is one."""
        return next((peer for peer in reversed(self.peers) if peer.name == name), None)

    def kill_now(self, peer: FaultPeer) -> None:
        """Kill an instance as SIGKILL does: nothing of it is closed, and no peer is notified."""
        if peer.state != "dead":
            peer.state = "dead"
            peer.environment.drop()
            if peer in self.peers:
                self.peers.remove(peer)
            self._lose_messages(peer)

    def crash(self) -> None:
        """Kill all instances and the supervisor, whatever they are doing."""
        self.close()
        self.crashed = True

    def hang(self, peer: FaultPeer) -> None:
        """Let an instance hang, with every message for it."""
        if peer.state == "up":
            peer.state = "hangs"

    def resume(self, peer: FaultPeer) -> None:
        """Let a hanging instance continue; it finds the messages that have come meanwhile."""
        if peer.state == "hangs":
            peer.state = "up"
            self._catch_up(peer)

    def later(self, work: Callable[[], None]) -> None:
        """Do something in the middle of other work: at the next wait."""
        self._work.append(work)

    # -- delivery ---------------------------------------------------------------------------------

    def send(self, peer: FaultPeer, message: Message) -> Pending:
        """Deliver a message to an instance, as far as the faults let it through."""
        self._check_alive()
        reply, sender = _Reply(self, message), message.sender[0]
        fault = self.faults.next_fault(peer.name, message.method)
        if fault.lost or self.faults.is_cut(sender, peer.name):
            return reply
        if peer.state == "dead":
            raise PeerGone("it was killed")
        again = dataclasses.replace(message)
        message.fault = fault
        self._hand(peer, message, 0.0 if fault.twice else fault.delay_s)
        if fault.twice:  # the reply to the second one is dropped
            self._hand(peer, again, fault.delay_s)
        self._check_alive()  # the sender may have been killed while it waited for the reply
        return reply

    def as_role(self, peer: FaultPeer, work: Callable[[], T]) -> T:
        """Let a client of this process call a role.

        Raises:
            PeerGone: The call has killed it.
        """
        try:
            done = self.acting(peer, work)
            self._check_alive()
        except Killed as error:
            raise PeerGone(f"the {error} was killed") from error
        if peer.state == "dead":
            raise PeerGone(f"the {peer.name} was killed")
        return done

    def acting(self, peer: FaultPeer | None, work: Callable[[], T]) -> T:
        """Do something as a role, or with None as the caller itself."""
        self._acting.append(peer)
        if peer is not None:
            peer.calls += 1
        try:
            return work()
        finally:
            self._acting.pop()
            if peer is not None:
                peer.calls -= 1

    def pass_time(self, seconds: float) -> None:
        """Wait: the clock advances, what is due happens, and the supervisor checks all roles."""
        self.clock.sleep(max(seconds, LEAST_S))
        self.acting(None, self._do_what_is_due)
        self._check_alive()

    def _do_what_is_due(self) -> None:
        self.faults.end_those_over()
        due = [late for late in self._late if late[0] <= self.clock.now()]
        self._late = [late for late in self._late if late[0] > self.clock.now()]
        for _, peer, message in due:
            peer.inbox.append(message)
            self._lose_messages(peer)
        for peer in list(self.peers):
            self._catch_up(peer)
            self._work_beside(peer)
        self.on_time()
        while self._work:
            self._working += 1
            try:
                self._work.popleft()()
            finally:
                self._working -= 1

    def _hand(self, peer: FaultPeer, message: Message, delay_s: float) -> None:
        if delay_s > 0:
            self._late.append((self.clock.now() + delay_s, peer, message))
        elif peer.state == "dead":
            message.gone = "it was killed"
        elif peer.state == "hangs" or (peer.calls and message.method not in LOCK_FREE):
            peer.inbox.append(message)
        else:
            self._deliver(peer, message)
            self._catch_up(peer)

    def _deliver(self, peer: FaultPeer, message: Message) -> None:
        with contextlib.suppress(Killed):
            self.acting(peer, lambda: peer.take(message))
        if peer.state == "dead" and message.reply is None:
            message.gone = "it was killed"

    def _catch_up(self, peer: FaultPeer) -> None:
        """Deliver the messages that wait for an instance, as far as it can take them."""
        for message in list(peer.inbox):
            if peer.state == "up" and message in peer.inbox and self._can_take(peer, message):
                peer.inbox.remove(message)
                self._deliver(peer, message)

    def _work_beside(self, peer: FaultPeer) -> None:
        """Let an instance do what a thread of its own would do."""
        if peer.state == "up" and not peer.calls and not self._working and peer.role is not None:
            with contextlib.suppress(Killed):
                self.acting(peer, peer.role.work_beside)

    def touch_store(self, peer: FaultPeer, what: str, work: Callable[[StoreFailure], Any]) -> Any:
        """Perform an operation of an instance on its store.

        Raises:
            Killed: The instance was killed before the operation, or by it.
        """
        self._check_killed(peer)
        fault = self.faults.next_fault(peer.name, what)
        if fault.kills == "before":
            self.kill_by(fault, peer)
        self._check_killed(peer)
        done = work(fault.fails)
        if fault.kills == "after":
            self.kill_by(fault, peer)
        self._check_killed(peer)
        return done

    def kill_by(self, fault: MessageFault, peer: FaultPeer) -> None:
        """Kill the receiver of a message, or the whole service."""
        if fault.kills_service:
            self.crash()
        else:
            self.kill_now(peer)

    def _check_killed(self, peer: FaultPeer) -> None:
        if peer.state == "dead":
            raise Killed(peer.name)

    def _can_take(self, peer: FaultPeer, message: Message) -> bool:
        """Whether a call can be made now.

        During a replacement, only calls that the replacement may wait for: another call could wait for the replacement
        itself, which is below it on the stack and could not continue.
        """
        if message.method in LOCK_FREE:
            return True
        return not peer.calls and (not self._working or message.sender == SERVICE)

    def _lose_messages(self, peer: FaultPeer) -> None:
        if peer.state == "dead":
            for message in peer.inbox:
                message.gone = "it was killed"
            peer.inbox.clear()

    def _check_alive(self) -> None:
        """Unwind the acting role if it was killed."""
        peer = self._acting[-1] if self._acting else None
        if self.crashed or (peer is not None and peer.state == "dead"):
            raise Killed("the service" if peer is None else peer.name)


class FaultService(InlineService):
    """The inline runtime under faults: roles are replaced, and a service that was killed is launched again.

    Args:
        job: The job.
        options: The launch; its `cluster` says how many loader hosts there are, and which sources have shadows.
        faults: The clock, and what happens to messages.
        isolate: Stands in for process workers.
    """

    blobs = Blobs()

    def __init__(
        self, job: Job, options: ServiceOptions, faults: FaultInjector, isolate: Isolate | None = None
    ) -> None:
        self._faults = faults
        self._isolate = isolate
        faults.cluster = self
        super().__init__(job, options)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met, and what was lost."""
        return self.ask(GetStatus()).content

    @property
    def supervisor(self) -> Supervisor:
        """The roles; launched again where they were killed."""
        tries = 0
        while not self._closed and self.engine.crashed:
            try:
                self._start()
            except (Killed, OverlordError) as error:  # a role was killed while it started: as a launcher, try again
                tries += 1
                self.engine.crash()
                if tries > START_TRIES:
                    raise ServiceLost(f"the service did not start again, {tries} times in a row: {error}") from error
        return super().supervisor

    def as_constructor(self, work: Callable[[InlineConstructor], T]) -> T:
        """Call the constructor host, and its successors if need be."""
        while True:
            supervisor = self.supervisor
            peer = supervisor.peer(CONSTRUCTOR)
            try:
                if isinstance(peer, FaultPeer) and peer.state == "up":
                    return self.engine.as_role(peer, lambda role=peer.role: work(role))  # type: ignore[misc]
                self.engine.pass_time(0.25)
            except (PeerGone, Killed):
                pass  # the same call is made to its successor
            except (ServiceLost, Fenced):
                if supervisor.peer(CONSTRUCTOR) is peer:
                    raise
                self.engine.pass_time(0.25)  # it was cut off and ends, as its process would; there is a successor

    def write_due(self) -> None:
        """Do nothing: the planner writes when time passes, as a thread of it would."""

    def crash(self) -> None:
        """Kill the service with all its roles; the next call launches it again."""
        self.engine.crash()

    def _end(self) -> None:
        if self._supervisor is not None and not self.engine.crashed:
            super()._end()

    def _start(self) -> None:
        super()._start()
        assert self._supervisor is not None
        self.engine.on_time = self._supervisor.tick

    def ask(self, request: Request[R]) -> R:
        """Ask the planner; a service that was killed meanwhile is launched again, and asked the same."""
        while True:
            try:
                return self.supervisor.ask(request)
            except Killed:
                pass  # the service was killed meanwhile

    def _make_supervisor(self, sites: Sequence[Site]) -> Supervisor:
        engine = self.engine = FaultEngine(self._make_role, self._faults, self._isolate)
        return Supervisor(engine, sites, self._given, clock=engine.clock.now, spawn=engine.later, idle=engine.pass_time)


class FaultInjector:
    """Makes the faults of a script happen to the roles of a `FaultService`.

    Args:
        script: The faults.
    """

    def __init__(self, script: FaultScript) -> None:
        self.clock = FakeClock()
        self.cluster: FaultService | None = None
        self._coming = list(script.faults)
        self._armed: list[Fault] = []
        """Faults that happen to the next message or write that they are about."""
        self._cuts: list[tuple[str, str, float]] = []
        self._hanging: list[tuple[FaultPeer, float]] = []
        self._resizing = False

    @property
    def engine(self) -> FaultEngine:
        """The engine of the cluster."""
        assert self.cluster is not None
        return self.cluster.engine

    def pass_step(self, step: int) -> None:
        """Let the time of a step pass, and the faults before the next one happen."""
        self.wait(STEP_S)
        self.reach(step)

    def reach(self, step: int) -> None:
        """Make the faults happen that come before a trainer asks for a step."""
        while self._coming and self._coming[0].at_step <= step:
            self.happen(self._coming.pop(0))

    def happen(self, fault: Fault) -> None:
        """Make one fault happen now, or to the next message or write that it is about."""
        if fault.kind == "partition":
            self._cuts.append((fault.role, fault.other, self.clock.now() + fault.seconds))
        elif fault.kind == "stop":
            if (peer := self._peer(fault.role)) is not None:
                self.engine.hang(peer)
                self._hanging.append((peer, self.clock.now() + fault.seconds))
        elif fault.kind != "kill" or fault.method:
            self._armed.append(fault)
        elif fault.role == WHOLE_SERVICE:
            self.engine.crash()
        elif (peer := self._peer(fault.role)) is not None:
            self.engine.kill_now(peer)

    def wait(self, seconds: float) -> None:
        """Let time pass, as a trainer that works on a step does."""
        if not self.engine.crashed:
            with contextlib.suppress(Killed):  # the service was killed meanwhile; the next call launches it again
                self.engine.pass_time(seconds)

    def resize(self, workers: Sequence[int], *, later: bool = False) -> None:
        """Give sources so many workers, as the scaler of a service does: groups move, and hosts start and end.

        Args:
            workers: Of every source.
            later: At the next wait, in the middle of other work; otherwise at once.
        """
        if later:
            self.engine.later(lambda: self.resize(workers))
        elif not self._resizing and not self.engine.crashed:  # there is one scaler, which does one thing at a time
            self._resizing = True
            try:
                assert self.cluster is not None
                self.cluster.supervisor.hosts.resize(workers, [float(count) for count in workers])
            except (Killed, OverlordError):
                pass  # as the scaler does: what failed is tried again the next time
            finally:
                self._resizing = False

    def calm(self) -> None:
        """End all faults: hanging roles continue, and partitions are healed."""
        self._coming.clear()
        self._armed.clear()
        self._cuts.clear()
        for peer, _ in self._hanging:
            self.engine.resume(peer)
        self._hanging.clear()

    # -- what the engine asks ---------------------------------------------------------------------

    def next_fault(self, to: str, method: str) -> MessageFault:
        """Return what happens to a message, or to an operation of a role on its store."""
        for at, fault in enumerate(self._armed):
            if _is_about(fault, to, method):
                if fault.times > 1:
                    self._armed[at] = dataclasses.replace(fault, times=fault.times - 1)
                else:
                    del self._armed[at]
                return _message_fault(fault)
        return DELIVERED

    def is_cut(self, one: str, other: str) -> bool:
        """Whether a partition separates two roles now."""
        return any({one, other} == {a, b} for a, b, _ in self._cuts)

    def end_those_over(self) -> None:
        """End the partitions and hangs whose time is over."""
        now = self.clock.now()
        self._cuts = [cut for cut in self._cuts if cut[2] > now]
        over = [peer for peer, until in self._hanging if until <= now]
        self._hanging = [(peer, until) for peer, until in self._hanging if until > now]
        for peer in over:
            self.engine.resume(peer)

    def _peer(self, role: str) -> FaultPeer | None:
        assert self.cluster is not None
        names = list(self.cluster.supervisor.table.roles)
        if role not in names:
            raise unknown_role(role, names)
        return self.engine.newest(role)


def unknown_role(role: str, names: Sequence[str]) -> SpecError:
    """Return the error for a fault that happens to a role which a service does not have."""
    return SpecError(
        f"FaultScript: no role is called {role!r}; nothing would happen to it. There are {', '.join(names)} and "
        f"{WHOLE_SERVICE!r}."
    )


def _is_about(fault: Fault, to: str, method: str) -> bool:
    """Whether a fault happens to a message, or to an operation on a store."""
    if fault.kind in ("store_errors", "full_disk"):
        return method in WRITES
    if fault.role not in (to, WHOLE_SERVICE):
        return False
    return fault.method == method or (not fault.method and not method.startswith("store."))


def _message_fault(fault: Fault) -> MessageFault:
    if fault.kind == "store_errors" or fault.kind == "full_disk":
        return MessageFault(fails=fault.kind)
    if fault.kind == "kill":
        return MessageFault(kills="after" if fault.after else "before", kills_service=fault.role == WHOLE_SERVICE)
    if fault.kind == "drop":
        return MessageFault(lost=not fault.after, reply_lost=fault.after)
    return MessageFault(twice=fault.kind == "duplicate", delay_s=fault.seconds)


def copied(frame: Frame) -> Frame:
    """Return a frame that shares no memory with another: a message as its receiver gets it."""
    out: Frame = [bytes(frame[0])]
    for array in frame[1:]:
        copy = np.array(array)
        copy.flags.writeable = False
        out.append(copy)
    return out
