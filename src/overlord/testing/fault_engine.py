"""A service in this process on which a test lets things go wrong: the inline runtime with a simulated clock and faults.

The roles, the supervisor, the constructor host and the feed are those of `runtime="inline"`; the transport differs.
Nothing is shared between two roles: every message is written to a frame and read again. What can happen to a process
can happen to an object here, at a place that a test chooses: it is killed (also in the middle of a call), it hangs and
comes back, and messages to it are lost, late, doubled or cut off.

Rules of this file:
1. One thread, and no time but that of the clock that is given. Time passes only while somebody waits.
2. Who is killed does nothing more: its next word, its next wait and its next write unwind it. Nothing is closed.
3. Who hangs keeps its messages, and works through them when it comes back, though it may have a successor by then. It
   cannot be killed meanwhile, as a machine that is paused cannot.
4. A role that is in the middle of a call gets no other, save those that it answers without its lock.
5. Whatever is done to a store may fail, or be the last thing the role does. Its files are closed then as the kernel
   closes them: what was written is there, and nothing else. A write for which there is no room has written half of
   what it should have. What is done has a name that a test can speak of: "store.write", "store.append" and so on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from overlord.core.client_messages import GetStatus, Request
from overlord.errors import Fenced, OverlordError, ServiceLost, StoreError
from overlord.job.specs import Job
from overlord.runtimes.hosts.cluster_role import LOCK_FREE, Means
from overlord.runtimes.hosts.constructor_host import InlineConstructor
from overlord.runtimes.hosts.planner_host import Pace
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.launching.inline_service import CONSTRUCTOR, InlineService
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.runtimes.supervision.supervisor import Supervisor
from overlord.runtimes.transport.codec import Frame
from overlord.runtimes.transport.direct import CallerMeans, CallerPace, DirectEngine, DirectPeer, MakeRole
from overlord.runtimes.transport.process_engine import InlineBlobs
from overlord.runtimes.transport.role_codec import answer_from_frame, answer_to_frame, question_from_frame, to_frame
from overlord.runtimes.transport.role_host import answer_of, finished
from overlord.runtimes.transport.switchboard import SERVICE, Book, Peer, PeerGone, Pending, Sender, Switchboard
from overlord.storage import StorageOptions
from overlord.stores.places import Appender, Place, open_place
from overlord.testing.clock import FakeClock
from overlord.transforms.samples.per_sample import Isolate

LEAST_S = 0.01
"""A wait of no length would be one without an end."""
START_TRIES = 64
"""How often a service that was killed is launched again, when roles die while it starts."""

R = TypeVar("R")
T = TypeVar("T")

StoreFailure = Literal["", "store_errors", "full_disk"]
"""How a write to a store fails, if it does."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one message."""

    lost: bool = False
    """It never arrives."""
    answer_lost: bool = False
    """It arrives, and its answer does not."""
    twice: bool = False
    """It arrives twice: the second one late, where there is a delay."""
    delay_s: float = 0.0
    """It arrives late, perhaps behind later ones."""
    kills: Literal["", "before", "after"] = ""
    """Who gets it dies of it: before the work, or between the work and the answer."""
    everybody: bool = False
    """The whole service dies of it, not only who gets it."""
    fails: StoreFailure = ""
    """How it fails, where it is not a message but something that is done to a store."""


DELIVERED = Fate()


class Faults(Protocol):
    """Decides what happens to messages, and what happens as time passes."""

    def fate(self, sender: str, to: str, method: str) -> Fate:
        """Return what becomes of a message."""
        ...

    def apart(self, one: str, other: str) -> bool:
        """Whether nothing gets from one to the other at the moment."""
        ...

    def passing(self) -> None:
        """Learn that time has passed."""
        ...


class Gone(BaseException):
    """Unwinds a role that was killed in the middle of what it did."""


@dataclass(slots=True, eq=False)
class Letter:
    """A message on its way."""

    method: str
    message: Any
    sender: Sender
    work: Callable[[], Any] | None = None
    """What is done instead of calling a method."""
    answer: Any = None
    gone: str | None = None
    fate: Fate = DELIVERED


class Touch(Protocol):
    """Lets a role do something to its store, which is told how it fails."""

    def __call__(self, what: str, work: Callable[[StoreFailure], Any]) -> Any:
        """Do it, unless whoever does it is killed before."""
        ...


class FaultMeans(CallerMeans):
    """The means of a role that may be killed.

    Args:
        isolate: Stands in for process workers.
        pace: How it waits.
        touch: Does what the role does to its store.
    """

    runtime = None
    plans_ahead = True
    prepare = Means.prepare  # nothing is shared between two roles

    def __init__(self, isolate: Isolate | None, pace: Pace, touch: Touch) -> None:
        super().__init__(pace)
        self._isolate = isolate
        self._touch = touch
        self._places: list[MortalPlace] = []

    def isolate(self, count: int, ends: contextlib.ExitStack) -> Isolate | None:
        return self._isolate

    def open_place(self, store: str, options: StorageOptions | None = None) -> Place:
        place = MortalPlace(open_place(store, options), self._touch)
        self._places.append(place)
        return place

    def drop(self) -> None:
        """Let go of what the kernel lets go of when a process is killed."""
        for place in self._places:
            place.drop()


class MortalPlace:
    """A place that fails when a test says so.

    Args:
        place: The place itself.
        touch: Does everything that is done to it.
    """

    def __init__(self, place: Place, touch: Touch) -> None:
        self._place = place
        self._touch = touch
        self._open: list[Appender] = []
        self.name = place.name
        self.can_append = place.can_append

    def write(self, name: str, data: bytes) -> None:
        """Write a file, whole or not at all."""
        self._touch("store.write", self._or_fails(lambda: self._place.write(name, data)))

    def create(self, name: str, data: bytes) -> str | None:
        """Write a file that nobody has written."""
        return self._touch("store.create", self._or_fails(lambda: self._place.create(name, data)))

    def open_append(self, name: str) -> Appender:
        """Open a new file to append to."""

        def opened() -> Appender:
            appender = self._place.open_append(name)
            self._open.append(appender)
            return _MortalAppender(self, appender)

        return self._touch("store.open_append", self._or_fails(opened))

    def read(self, name: str) -> bytes | None:
        """Return what a file holds."""
        return self._touch("store.read", lambda failure: self._place.read(name))

    def exists(self, name: str) -> bool:
        """Whether somebody has created a file of this name."""
        return self._touch("store.exists", lambda failure: self._place.exists(name))

    def names(self, folder: str = "") -> dict[str, int]:
        """Return the names in a folder."""
        return self._touch("store.names", lambda failure: self._place.names(folder))

    def written_at(self, name: str) -> float | None:
        """Return when a file was written."""
        return self._touch("store.written_at", lambda failure: self._place.written_at(name))

    def delete(self, name: str) -> None:
        """Remove a file or a folder."""
        self._touch("store.delete", self._or_fails(lambda: self._place.delete(name)))

    def append(self, appender: Appender, data: bytes) -> None:
        """Append to a file; half of it where there is no room."""

        def put(failure: StoreFailure) -> None:
            if failure == "full_disk":
                appender.append(data[: len(data) // 2])
            self._or_fails(lambda: appender.append(data))(failure)

        self._touch("store.append", put)

    def let_go(self, appender: Appender) -> None:
        """Close a file."""
        if appender in self._open:
            self._open.remove(appender)
            appender.close()

    def drop(self) -> None:
        """Close what is open, as the kernel does when a process is killed."""
        while self._open:
            self._open.pop().close()

    def _or_fails(self, work: Callable[[], Any]) -> Callable[[StoreFailure], Any]:
        def done(failure: StoreFailure) -> Any:
            if not failure:
                return work()
            why = "No space left on device" if failure == "full_disk" else "it answers 500"
            raise StoreError(
                f"the store {self.name!r} cannot be written ({why}); no step can be planned that could not be resumed. "
                "A test has asked for this: take the fault out of its script."
            )

        return done


class _MortalAppender:
    """One open file of a place that may fail."""

    def __init__(self, place: MortalPlace, appender: Appender) -> None:
        self._place = place
        self._appender = appender

    def append(self, data: bytes) -> None:
        self._place.append(self._appender, data)

    def close(self) -> None:
        self._place.let_go(self._appender)


class FaultPeer(DirectPeer):
    """One incarnation of a role, as the others ask it.

    Args:
        engine: Carries its messages.
        name: The role.
        generation: Which incarnation it is.
        make: Makes the role itself, with its switchboard and its means.
    """

    def __init__(
        self, engine: FaultEngine, name: str, generation: int, make: Callable[[Switchboard, Means], Any]
    ) -> None:
        super().__init__(Switchboard((name, generation), engine.clock.now, engine.pass_time))
        self._engine = engine
        self.name = name
        self.generation = generation
        self.state: Literal["up", "hangs", "dead"] = "up"
        self.letters: deque[Letter] = deque()
        """What came while it could not take it."""
        pace = CallerPace(engine.clock.now, engine.pass_time)
        self.means = FaultMeans(engine.isolate, pace, functools.partial(engine.touch_store, self))
        self.failed: Exception | None = None
        try:
            self.role = engine.acting(self, lambda: make(self.board, self.means))
        except Exception as error:  # told to whoever asks, as a process does
            self.failed = error

    def ask(self, method: str, message: Any, sender: Sender = SERVICE) -> Pending:
        """Call a method of the role."""
        if method == "beat":
            return _Beat(self._engine, self)
        frame, plan = to_frame(message)
        copy = question_from_frame(copied(frame), plan)
        return self._engine.carry(self, Letter(method, copy, sender))

    def take(self, letter: Letter) -> None:
        """Do what a letter asks for."""
        if letter.fate.kills == "before":
            self._engine.die(self, letter.fate)
            return
        try:
            self.board.check(letter.sender)
            if letter.work is not None:
                answer = letter.work()
            else:
                answer = self.failed or finished(answer_of(self.role, letter.method, letter.message))
        except Exception as error:  # the border of the role: whoever asked must learn what became of it
            answer = error
        if letter.fate.kills == "after":
            self._engine.die(self, letter.fate)
        elif not letter.fate.answer_lost:
            letter.answer = answer_from_frame(copied(answer_to_frame(answer)))


@dataclass(slots=True)
class _Answer:
    """A call under way."""

    engine: FaultEngine
    peer: FaultPeer
    letter: Letter

    def poll(self, timeout_s: float) -> Any:
        """Return the answer; where it has not come, time passes."""
        if self.letter.answer is None and self.letter.gone is None and timeout_s > 0:
            self.engine.pass_time(timeout_s)
        if self.letter.answer is None and self.letter.gone is not None:
            raise PeerGone(self.letter.gone)
        return self.letter.answer


@dataclass(slots=True)
class _Beat:
    """The question whether somebody lives: answered when it is looked at."""

    engine: FaultEngine
    peer: FaultPeer

    def poll(self, timeout_s: float) -> Any:
        """Return the sign of life, if there is one."""
        if self.engine.faults.apart(SERVICE[0], self.peer.name) or self.peer.state == "hangs":
            return None
        if self.peer.state == "dead":
            raise PeerGone("it was killed")
        return {"version": self.peer.board.version, "busy_s": 0.0}


class FaultEngine(DirectEngine):
    """Makes roles as objects, and carries copies of messages between them.

    Args:
        make: Makes a role.
        clock: The time.
        faults: What happens to messages.
        isolate: Stands in for process workers.
    """

    def __init__(self, make: MakeRole, clock: FakeClock, faults: Faults, isolate: Isolate | None = None) -> None:
        super().__init__(make, clock)
        self.faults = faults
        self.isolate = isolate
        self.on_time: Callable[[], None] = lambda: None
        """Called when time has passed: the supervisor looks after all roles."""
        self.crashed = False
        """Whether the service itself was killed."""
        self._acting: list[FaultPeer | None] = []
        self._late: list[tuple[float, FaultPeer, Letter]] = []
        self._working = 0
        self._work: deque[Callable[[], None]] = deque()

    # -- what a supervisor asks -------------------------------------------------------------------

    def start(self, site: Site, generation: int) -> Peer:
        """Make the object of a role."""
        facts = site.facts(1) | {"generation": generation}
        peer = FaultPeer(self, site.name, generation, lambda board, means: self.make(facts, board, means))
        self.peers.append(peer)
        return peer

    def introduce(self, peer: Peer, book: Book) -> Pending:
        """Tell a role who is who."""
        assert isinstance(peer, FaultPeer)

        def learn() -> Any:
            peer.board.learn(Book.from_head(book.head(), book.peers))
            return {}

        return self.carry(peer, Letter("learn", None, SERVICE, learn))

    def kill(self, peer: Peer, site: Site, pid: int) -> None:
        """Kill an incarnation, where it can be reached: one that hangs with its host, or behind a cut, lives on."""
        assert isinstance(peer, FaultPeer)
        if peer.state != "hangs" and not self.faults.apart(SERVICE[0], peer.name):
            self.kill_now(peer)

    def close(self) -> None:
        """Drop everybody, also those that nobody knows any more."""
        for peer in list(self.peers):
            self.kill_now(peer)

    # -- what a test does -------------------------------------------------------------------------

    def newest(self, name: str) -> FaultPeer | None:
        """Return the newest incarnation of a role, if there is one."""
        return next((peer for peer in reversed(self.peers) if peer.name == name), None)

    def kill_now(self, peer: FaultPeer) -> None:
        """Kill an incarnation as SIGKILL does: nothing of it is closed, and nobody is told."""
        if peer.state != "dead":
            peer.state = "dead"
            peer.means.drop()
            if peer in self.peers:
                self.peers.remove(peer)
            self._lose_letters(peer)

    def crash(self) -> None:
        """Kill everybody and the supervisor too, whatever they are doing."""
        self.close()
        self.crashed = True

    def hang(self, peer: FaultPeer) -> None:
        """Let an incarnation hang, with everything that comes for it."""
        if peer.state == "up":
            peer.state = "hangs"

    def resume(self, peer: FaultPeer) -> None:
        """Let an incarnation go on where it hung; it finds what has come meanwhile."""
        if peer.state == "hangs":
            peer.state = "up"
            self._catch_up(peer)

    def later(self, work: Callable[[], None]) -> None:
        """Do something beside what is being done: when somebody waits."""
        self._work.append(work)

    # -- carrying ---------------------------------------------------------------------------------

    def carry(self, peer: FaultPeer, letter: Letter) -> Pending:
        """Bring a letter to an incarnation, as far as the faults let it through."""
        self._check_alive()
        answer, sender = _Answer(self, peer, letter), letter.sender[0]
        fate = self.faults.fate(sender, peer.name, letter.method)
        if fate.lost or self.faults.apart(sender, peer.name):
            return answer
        if peer.state == "dead":
            raise PeerGone("it was killed")
        again = dataclasses.replace(letter)
        letter.fate = fate
        self._hand(peer, letter, 0.0 if fate.twice else fate.delay_s)
        if fate.twice:  # nobody waits for the answer to the second one
            self._hand(peer, again, fate.delay_s)
        self._check_alive()  # it may have been killed while it waited for the answer
        return answer

    def as_role(self, peer: FaultPeer, work: Callable[[], T]) -> T:
        """Let a client of this process ask a role.

        Raises:
            PeerGone: when it died of that.
        """
        try:
            done = self.acting(peer, work)
            self._check_alive()
        except Gone as error:
            raise PeerGone(f"the {error} was killed") from error
        if peer.state == "dead":
            raise PeerGone(f"the {peer.name} was killed")
        return done

    def acting(self, peer: FaultPeer | None, work: Callable[[], T]) -> T:
        """Do something as a role, or as nobody: the caller itself."""
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
        """Wait: the clock goes on, what is due happens, and the supervisor looks after everybody."""
        self.clock.sleep(max(seconds, LEAST_S))
        self.acting(None, self._happen)
        self._check_alive()

    def _happen(self) -> None:
        self.faults.passing()
        due = [late for late in self._late if late[0] <= self.clock.now()]
        self._late = [late for late in self._late if late[0] > self.clock.now()]
        for _, peer, letter in due:
            peer.letters.append(letter)
            self._lose_letters(peer)
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

    def _hand(self, peer: FaultPeer, letter: Letter, delay_s: float) -> None:
        if delay_s > 0:
            self._late.append((self.clock.now() + delay_s, peer, letter))
        elif peer.state == "dead":
            letter.gone = "it was killed"
        elif peer.state == "hangs" or (peer.calls and letter.method not in LOCK_FREE):
            peer.letters.append(letter)
        else:
            self._deliver(peer, letter)
            self._catch_up(peer)

    def _deliver(self, peer: FaultPeer, letter: Letter) -> None:
        try:
            self.acting(peer, lambda: peer.take(letter))
        except Gone:
            pass  # it was killed on the way
        if peer.state == "dead" and letter.answer is None:
            letter.gone = "it was killed"

    def _catch_up(self, peer: FaultPeer) -> None:
        """Let an incarnation take what has come for it, as far as it can."""
        for letter in list(peer.letters):
            if peer.state == "up" and letter in peer.letters and self._can_take(peer, letter):
                peer.letters.remove(letter)
                self._deliver(peer, letter)

    def _work_beside(self, peer: FaultPeer) -> None:
        """Let an incarnation do what a thread of its own would do."""
        if peer.state == "up" and not peer.calls and not self._working and peer.role is not None:
            try:
                self.acting(peer, peer.role.work_beside)
            except Gone:
                pass  # it was killed

    def touch_store(self, peer: FaultPeer, what: str, work: Callable[[StoreFailure], Any]) -> Any:
        """Let an incarnation do something to its store.

        Raises:
            Gone: it was killed before that, or of it.
        """
        self._check_killed(peer)
        fate = self.faults.fate(peer.name, peer.name, what)
        if fate.kills == "before":
            self.die(peer, fate)
        self._check_killed(peer)
        done = work(fate.fails)
        if fate.kills == "after":
            self.die(peer, fate)
        self._check_killed(peer)
        return done

    def die(self, peer: FaultPeer, fate: Fate) -> None:
        """Let an incarnation die of a message, or everybody."""
        if fate.everybody:
            self.crash()
        else:
            self.kill_now(peer)

    def _check_killed(self, peer: FaultPeer) -> None:
        if peer.state == "dead":
            raise Gone(peer.name)

    def _can_take(self, peer: FaultPeer, letter: Letter) -> bool:
        """Whether a call can be made now.

        Beside a replacement, only what that may wait for: another call could wait for the replacement itself, which
        stands below it on the stack and could not go on.
        """
        if letter.method in LOCK_FREE:
            return True
        return not peer.calls and (not self._working or letter.sender == SERVICE)

    def _lose_letters(self, peer: FaultPeer) -> None:
        if peer.state == "dead":
            for letter in peer.letters:
                letter.gone = "it was killed"
            peer.letters.clear()

    def _check_alive(self) -> None:
        """Unwind whoever acts, if it was killed."""
        peer = self._acting[-1] if self._acting else None
        if self.crashed or (peer is not None and peer.state == "dead"):
            raise Gone("the service" if peer is None else peer.name)


class FaultService(InlineService):
    """The inline runtime under faults: roles are replaced, and a service that was killed is launched again.

    Args:
        job: The job.
        options: The launch; its `cluster` says how many loader hosts there are, and which sources have shadows.
        clock: The time.
        faults: What happens to messages.
        isolate: Stands in for process workers.
    """

    blobs = InlineBlobs()
    scratch_in = "/dev/shm" if os.path.isdir("/dev/shm") else None  # nothing of it must outlive this process

    def __init__(
        self, job: Job, options: LaunchOptions, clock: FakeClock, faults: Faults, isolate: Isolate | None = None
    ) -> None:
        self._clock = clock
        self._faults = faults
        self._isolate = isolate
        super().__init__(job, options)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met, and what was lost."""
        return self._ask(GetStatus()).content

    @property
    def supervisor(self) -> Supervisor:
        """The roles; launched again where they were killed."""
        tries = 0
        while not self._closed and self.engine.crashed:
            try:
                self._start()
            except (Gone, OverlordError) as error:  # a role was killed while it started: as a launcher, try again
                tries += 1
                self.engine.crash()
                if tries > START_TRIES:
                    raise ServiceLost(f"the service did not start again, {tries} times in a row: {error}") from error
        return super().supervisor

    def as_constructor(self, work: Callable[[InlineConstructor], T]) -> T:
        """Ask the constructor host, and its successors if need be."""
        while True:
            supervisor = self.supervisor
            peer = supervisor.peer(CONSTRUCTOR)
            try:
                if isinstance(peer, FaultPeer) and peer.state == "up":
                    return self.engine.as_role(peer, lambda role=peer.role: work(role))  # type: ignore[misc]
                self.engine.pass_time(0.25)
            except (PeerGone, Gone):
                pass  # a successor comes, and is asked the same
            except (ServiceLost, Fenced):
                if supervisor.peer(CONSTRUCTOR) is peer:
                    raise
                self.engine.pass_time(0.25)  # it was cut off and ends, as its process would; a successor is there

    def write_due(self) -> None:
        """Do nothing: the planner writes when time passes, as a thread of it would."""

    def crash(self) -> None:
        """Kill the service with everything in it; whoever asks next finds it launched again."""
        self.engine.crash()

    def _end(self) -> None:
        if self._supervisor is not None and not self.engine.crashed:
            super()._end()

    def _start(self) -> None:
        super()._start()
        assert self._supervisor is not None
        self.engine.on_time = self._supervisor.tick

    def _ask(self, request: Request[R]) -> R:
        while True:
            try:
                return self.supervisor.ask(request)
            except Gone:
                pass  # the service was killed meanwhile

    def _make_supervisor(self, sites: Sequence[Site]) -> Supervisor:
        engine = self.engine = FaultEngine(self._make_role, self._clock, self._faults, self._isolate)
        return Supervisor(engine, sites, self._given, clock=self._clock.now, spawn=engine.later, idle=engine.pass_time)


def copied(frame: Frame) -> Frame:
    """Return a frame of which nothing is shared: what a message is on the other side."""
    out: Frame = [bytes(frame[0])]
    for array in frame[1:]:
        copy = np.array(array)
        copy.flags.writeable = False
        out.append(copy)
    return out
