"""Roles as objects of this process, stepped in the caller: the supervisor's third engine, for tests of faults.

Nothing is shared between two roles: every message is copied. What can happen to a process can happen to an object
here, at a place that a test chooses: it is killed (also in the middle of a call), it hangs and comes back, and messages
to it are lost, late, doubled or cut off.

Rules of this file:
1. One thread, and no time but that of the clock that is given. Time passes only while somebody waits.
2. Who is killed does nothing more: its next word, its next wait and its next write unwind it. Nothing is closed.
3. Who hangs keeps its messages, and works through them when it comes back, though it may have a successor by then. It
   cannot be killed meanwhile, as a machine that is paused cannot.
4. A role that is in the middle of a call gets no other, save those that it answers without its lock.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from overlord.runtimes.hosts.cluster_role import Means
from overlord.runtimes.inline.inline_means import InlinePace, SerialMeans, StoreFailure
from overlord.runtimes.inline.inline_messages import Clock, Fate, Gone, Letter, Weather
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.transport.frames import Frame, error_frame, frame_of
from overlord.runtimes.transport.role_host import answer_of
from overlord.runtimes.transport.switchboard import SERVICE, Book, Peer, PeerGone, Pending, Sender, Switchboard
from overlord.transforms.samples.per_sample import Isolate

LOCK_FREE = frozenset({"where", "verdict", "learn", "pid", "progress"})
"""What a role answers while it is in the middle of a call."""
LEAST_S = 0.01
"""A wait of no length would be one without an end."""

T = TypeVar("T")


class InlinePeer:
    """One incarnation of a role in this process.

    Args:
        engine: Who carries its messages.
        name: The role.
        generation: Which incarnation it is.
        make: Makes the role itself, with its switchboard and its means.
    """

    def __init__(
        self, engine: InlineEngine, name: str, generation: int, make: Callable[[Switchboard, Means], Any]
    ) -> None:
        self._engine = engine
        self.name = name
        self.generation = generation
        self.state: Literal["up", "hangs", "dead"] = "up"
        self.letters: deque[Letter] = deque()
        """What came while it could not take it."""
        self.calls = 0
        """Calls that it is in the middle of."""
        self.board = Switchboard((name, generation), engine.clock.now, engine.pass_time)
        pace = InlinePace(engine.clock.now, engine.pass_time)
        self.means = SerialMeans(engine.isolate, pace, functools.partial(engine.touch_store, self))
        self.role: Any = None
        self.failed: Frame | None = None
        try:
            self.role = engine.acting(self, lambda: make(self.board, self.means))
        except Exception as error:  # told to whoever asks, as a process does
            self.failed = error_frame(error)

    def ask(self, method: str, frame: Frame, blob: Any = None, sender: Sender = SERVICE) -> Pending:
        """Call a method of the role."""
        if method == "beat":
            return _Beat(self._engine, self)
        return self._engine.carry(self, Letter(method, copied(frame), blob, sender))

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
                answer = self.failed or answer_of(self.role, letter.method, letter.frame, letter.blob)
        except Exception as error:  # the border of the role: who asked must learn what became of it
            answer = error_frame(error)
        if letter.fate.kills == "after":
            self._engine.die(self, letter.fate)
        elif not letter.fate.answer_lost:
            letter.answer = copied(answer)


@dataclass(slots=True)
class _Answer:
    """A call under way."""

    engine: InlineEngine
    peer: InlinePeer
    letter: Letter

    def poll(self, timeout_s: float) -> Frame | None:
        """Return the answer; where it has not come, time passes."""
        if self.letter.answer is None and self.letter.gone is None and timeout_s > 0:
            self.engine.pass_time(timeout_s)
        if self.letter.answer is None and self.letter.gone is not None:
            raise PeerGone(self.letter.gone)
        return self.letter.answer


@dataclass(slots=True)
class _Beat:
    """The question whether somebody lives: answered when it is looked at."""

    engine: InlineEngine
    peer: InlinePeer

    def poll(self, timeout_s: float) -> Frame | None:
        """Return the sign of life, if there is one."""
        if self.engine.weather.apart(SERVICE[0], self.peer.name) or self.peer.state == "hangs":
            return None
        if self.peer.state == "dead":
            raise PeerGone("it was killed")
        return frame_of({"version": self.peer.board.version, "busy_s": 0.0})


@dataclass(slots=True)
class InlineEngine:
    """Starts roles as objects, and carries messages between them.

    Args:
        clock: The time.
        weather: What happens to messages.
        make: Makes the role of a site, from its facts with the generation, its switchboard and its means.
        hosts: Constructor hosts.
        isolate: Stands in for process workers.
        on_time: Called when time has passed: the supervisor looks after everybody.
    """

    first_sign_s = 60.0
    """How long an incarnation may take until its first sign of life."""

    clock: Clock
    weather: Weather
    make: Callable[[Mapping[str, Any], Switchboard, Means], Any]
    hosts: int = 1
    isolate: Isolate | None = None
    on_time: Callable[[], None] = lambda: None
    peers: list[InlinePeer] = field(default_factory=list[InlinePeer])
    """All that live, or may come back."""
    crashed: bool = False
    """Whether the service itself was killed."""
    _acting: list[InlinePeer | None] = field(default_factory=list["InlinePeer | None"])
    _late: list[tuple[float, InlinePeer, Letter]] = field(default_factory=list[tuple[float, InlinePeer, Letter]])
    _working: int = 0
    _work: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])

    # -- what a supervisor asks -------------------------------------------------------------------

    def start(self, site: Site, generation: int) -> Peer:
        """Make the object of a role."""
        facts = site.facts(self.hosts) | {"generation": generation}
        peer = InlinePeer(self, site.name, generation, lambda board, means: self.make(facts, board, means))
        self.peers.append(peer)
        return peer

    def introduce(self, peer: Peer, book: Book) -> Pending:
        """Tell a role who is who."""
        assert isinstance(peer, InlinePeer)

        def learn() -> Frame:
            peer.board.learn(Book.from_head(book.head(), book.peers))
            return frame_of({})

        return self.carry(peer, Letter("learn", [], None, SERVICE, learn))

    def kill(self, peer: Peer, site: Site, pid: int) -> None:
        """Kill an incarnation, where it can be reached: one that hangs with its host, or behind a cut, lives on."""
        assert isinstance(peer, InlinePeer)
        if peer.state != "hangs" and not self.weather.apart(SERVICE[0], peer.name):
            self.kill_now(peer)

    def wait(self, pending: Sequence[Pending], timeout_s: float) -> None:
        """Let time pass."""
        self.pass_time(timeout_s)

    def place_again(self, site: Site) -> Site:
        """Return the same site: there is one host."""
        return site

    def describe(self, sites: Sequence[tuple[Site, int]]) -> dict[str, Any]:
        """Return nothing more than what the supervisor tells."""
        return {}

    def close(self) -> None:
        """Drop everybody, also those that nobody knows any more."""
        for peer in list(self.peers):
            self.kill_now(peer)

    # -- what a test does -------------------------------------------------------------------------

    def newest(self, name: str) -> InlinePeer | None:
        """Return the newest incarnation of a role, if there is one."""
        return next((peer for peer in reversed(self.peers) if peer.name == name), None)

    def kill_now(self, peer: InlinePeer) -> None:
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

    def hang(self, peer: InlinePeer) -> None:
        """Let an incarnation hang, with everything that comes for it."""
        if peer.state == "up":
            peer.state = "hangs"

    def resume(self, peer: InlinePeer) -> None:
        """Let an incarnation go on where it hung; it finds what has come meanwhile."""
        if peer.state == "hangs":
            peer.state = "up"
            self._catch_up(peer)

    def later(self, work: Callable[[], None]) -> None:
        """Do something beside what is being done: when somebody waits."""
        self._work.append(work)

    # -- carrying ---------------------------------------------------------------------------------

    def carry(self, peer: InlinePeer, letter: Letter) -> Pending:
        """Bring a letter to an incarnation, as far as the weather lets it through."""
        self._check_alive()
        answer, sender = _Answer(self, peer, letter), letter.sender[0]
        fate = self.weather.fate(sender, peer.name, letter.method)
        if fate.lost or self.weather.apart(sender, peer.name):
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

    def as_role(self, peer: InlinePeer, work: Callable[[], T]) -> T:
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

    def acting(self, peer: InlinePeer | None, work: Callable[[], T]) -> T:
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
        self.weather.passing()
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

    def _hand(self, peer: InlinePeer, letter: Letter, delay_s: float) -> None:
        if delay_s > 0:
            self._late.append((self.clock.now() + delay_s, peer, letter))
        elif peer.state == "dead":
            letter.gone = "it was killed"
        elif peer.state == "hangs" or (peer.calls and letter.method not in LOCK_FREE):
            peer.letters.append(letter)
        else:
            self._deliver(peer, letter)
            self._catch_up(peer)

    def _deliver(self, peer: InlinePeer, letter: Letter) -> None:
        try:
            self.acting(peer, lambda: peer.take(letter))
        except Gone:
            pass  # it was killed on the way
        if peer.state == "dead" and letter.answer is None:
            letter.gone = "it was killed"

    def _catch_up(self, peer: InlinePeer) -> None:
        """Let an incarnation take what has come for it, as far as it can."""
        for letter in list(peer.letters):
            if peer.state == "up" and letter in peer.letters and self._can_take(peer, letter):
                peer.letters.remove(letter)
                self._deliver(peer, letter)

    def _work_beside(self, peer: InlinePeer) -> None:
        """Let an incarnation do what a thread of its own would do."""
        if peer.state == "up" and not peer.calls and not self._working and peer.role is not None:
            try:
                self.acting(peer, peer.role.work_beside)
            except Gone:
                pass  # it was killed

    def touch_store(self, peer: InlinePeer, what: str, work: Callable[[StoreFailure], Any]) -> Any:
        """Let an incarnation do something to its store.

        Raises:
            Gone: it was killed before that, or of it.
        """
        self._check_killed(peer)
        fate = self.weather.fate(peer.name, peer.name, what)
        if fate.kills == "before":
            self.die(peer, fate)
        self._check_killed(peer)
        done = work(fate.fails)
        if fate.kills == "after":
            self.die(peer, fate)
        self._check_killed(peer)
        return done

    def die(self, peer: InlinePeer, fate: Fate) -> None:
        """Let an incarnation die of a message, or everybody."""
        if fate.everybody:
            self.crash()
        else:
            self.kill_now(peer)

    def _check_killed(self, peer: InlinePeer) -> None:
        if peer.state == "dead":
            raise Gone(peer.name)

    def _can_take(self, peer: InlinePeer, letter: Letter) -> bool:
        """Whether a call can be made now.

        Beside a replacement, only what that may wait for: another call could wait for the replacement itself, which
        stands below it on the stack and could not go on.
        """
        if letter.method in LOCK_FREE:
            return True
        return not peer.calls and (not self._working or letter.sender == SERVICE)

    def _lose_letters(self, peer: InlinePeer) -> None:
        if peer.state == "dead":
            for letter in peer.letters:
                letter.gone = "it was killed"
            peer.letters.clear()

    def _check_alive(self) -> None:
        """Unwind whoever acts, if it was killed."""
        peer = self._acting[-1] if self._acting else None
        if self.crashed or (peer is not None and peer.state == "dead"):
            raise Gone("the service" if peer is None else peer.name)


def copied(frame: Frame) -> Frame:
    """Return a frame of which nothing is shared: what a message is on the other side."""
    out: Frame = [bytes(frame[0])]
    for array in frame[1:]:
        copy = np.array(array)
        copy.flags.writeable = False
        out.append(copy)
    return out
