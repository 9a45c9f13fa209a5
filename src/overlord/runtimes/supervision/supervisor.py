"""Keeps the roles of a service alive: sees who died, hangs or is slow, has shadows promoted, and starts successors.

Engine-free: processes and Ray's actors are looked after in the same way.

    event                               what follows
    a process ended                     its beat breaks off; at once
    it hangs, or its host is gone       its beat does not come for `heartbeat_s`; it is killed first
    a loader host is slow               a call runs for SLOW_S and all of its sources have a shadow: as if it hung
    any of these                        generation + 1, shadows promoted, the new book to all, a successor is started
    its successors die young            after MOST_TRIES the service fails, and everybody who waits is told why

Rules of this file:
1. Whoever is taken for dead is killed before it gets a successor, and what it still says is refused (fencing).
2. All losses of one moment become one new book: nobody is sent to a shadow that is lost as well.
3. Nothing here knows what a step is. What is lost is read or planned again by the successor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlord.errors import AnswerLost, ClosedError, Fenced, OverlordError, Rewound, ServiceLost, StoreError
from overlord.job.specs import Job
from overlord.roles.assignment import NOBODY, Assignment, promote
from overlord.runtimes.autoscaling.scaler import Scaler, refresh_profile, scaler_of
from overlord.runtimes.hosts.peers import PLANNER
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.launching.deployment import Progress, check_launch
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.runtimes.launching.live_sources import LiveSources
from overlord.runtimes.launching.resume import canonical, peek, with_newcomers
from overlord.runtimes.supervision.host_changes import HostChanges, sizes_to_json, spare_sites
from overlord.runtimes.supervision.service_main import REWOUND, SERVED
from overlord.runtimes.transport.bundle import pack, unpack
from overlord.runtimes.transport.doors import CONTROL, answer_all, open_door
from overlord.runtimes.transport.engine import OPEN_S, Engine, Incarnation
from overlord.runtimes.transport.role_messages import unwrap
from overlord.runtimes.transport.switchboard import Book, Peer, PeerGone, Pending, Switchboard

# --------------------------------------------------------------------------------------------------------------
# Whether a role lives: what it does may take long, saying that it lives may not.


LEAST_S = 10.0
"""How long nothing may be heard at least of a role that comes up."""


class Life:
    """The signs of life of one incarnation while somebody waits for another answer of it.

    It is not asked for its beat: whoever has heard one ends when no more come, and nobody sends them to all roles while
    one of them takes long to come up.

    Args:
        peer: The incarnation.
        heartbeat_s: How long nothing may be heard of it.
        first_s: How long its first sign of life may take.
        clock: Seconds that never go back.
        closing: Tells whether nobody wants the answer any more.
    """

    def __init__(
        self, peer: Peer, heartbeat_s: float, first_s: float, clock: Callable[[], float], closing: Callable[[], bool]
    ) -> None:
        self._peer = peer
        self._closing = closing
        self._again_s = heartbeat_s
        self._first_s = max(first_s, heartbeat_s)
        self._heartbeat_s = max(2 * heartbeat_s, LEAST_S)  # much is imported and parsed meanwhile
        self._clock = clock
        self._heard: float | None = None
        self._since = clock()
        self._sign: Pending | None = None

    def answer(self, pending: Pending) -> Any:
        """Wait for an answer for as long as it lives.

        Raises:
            ServiceLost: when nothing was heard for too long, or it took too long all in all.
            ClosedError: when nobody wants it any more.
        """
        while (answer := self._look(pending)) is None:
            pass
        return answer

    def acquaint(self, introduce: Callable[[Peer], Pending]) -> None:
        """Tell it who is who until it says that it knows: a message may be lost, and nobody must ask it before."""
        while True:
            told, again = introduce(self._peer), self._clock() + self._again_s
            while self._clock() <= again:
                if self._look(told) is not None:
                    return

    def _look(self, pending: Pending) -> Any:
        if self._closing():
            raise ClosedError("the service is closing.")
        answer = pending.poll(0.5)
        if answer is None:
            self._check()
            if self._clock() > self._since + OPEN_S:
                raise ServiceLost(f"a role did not come up within {OPEN_S:g} s; its host may be overloaded.")
        return answer

    def _check(self) -> None:
        """Look once.

        Raises:
            ServiceLost: when nothing was heard for too long.
        """
        now = self._clock()
        if self._sign is not None and self._sign.poll(0) is not None:
            self._sign, self._heard = None, now
        if self._sign is None:
            self._sign = self._peer.ask("pid", {})
        silent = now - (self._since if self._heard is None else self._heard)
        if silent > (self._first_s if self._heard is None else self._heartbeat_s):
            raise ServiceLost(f"nothing was heard of it for {silent:.1f} s while it came up")


def look_at(
    one: Incarnation, now: float, heartbeat_s: float, version: int, introduce: Callable[[Peer], Pending]
) -> tuple[str | None, float]:
    """Look once after an incarnation; who has missed the newest book is told again.

    Args:
        one: Who is looked after.
        now: The time.
        heartbeat_s: How long nothing may be heard of it.
        version: Of the newest book.
        introduce: Tells somebody who is who.

    Returns:
        What is wrong with it, and for how long it has been busy with one call.
    """
    if one.peer is None:
        return None, 0.0
    try:
        answer = one.beat.poll(0) if one.beat is not None else {"version": 0, "busy_s": 0.0}
        if answer is None:  # judged after looking: a supervisor that was stopped itself finds answers waiting
            silent = now - one.heard
            return None if silent <= heartbeat_s else f"did not answer for {silent:.1f} s", 0.0
        head = unwrap(answer)
        one.heard, one.rewound = now, bool(head.get("rewound"))
        one.served = max(one.served, int(head.get("served", -1)))
        one.beat = one.peer.ask("beat", {})
        if head["version"] < version:
            one.told = introduce(one.peer)
        return None, float(head["busy_s"])
    except PeerGone as error:
        return f"ended ({error})", 0.0
    except AnswerLost:
        one.beat = None  # it is asked again with the next look
    return None, 0.0


# --------------------------------------------------------------------------------------------------------------
# What the successor of a lost role is told, and what must be the same with it.
#
# Rules of this file:
# 1. Nobody who comes up waits for another role: of two that were lost together each would wait for the other.


def where_to_go_on(board: Switchboard, otherwise: dict[str, Any]) -> dict[str, Any]:
    """Return where the successor of a loader host goes on.

    Args:
        board: Who is who.
        otherwise: What the store said to the last planner, for when there is none.
    """
    if PLANNER in board.book.peers:
        found = board.ask(PLANNER, "where", {}).get()
        if found is not None:
            return unwrap(found)
    return otherwise


def check_same_files(known: Mapping[str, Any], opened: Mapping[str, Any]) -> None:
    """Refuse files that are not those that the stream began with.

    Raises:
        ServiceLost: it names the source.
    """
    changed = [name for name, facts in opened.items() if known[name] != facts]
    if changed:
        raise ServiceLost(
            f"the files of source {changed[0]!r} have changed while the job ran; samples would be lost or repeated. "
            "Restore them, or start a new run."
        )


def did_not_start(site: Site, error: Exception) -> ServiceLost:
    """Say that a role did not come up when the service was launched."""
    return ServiceLost(
        f"the {site.name} did not start on {site.node.name} ({error}); nothing could run. Its last words stand above. "
        "On a cluster: is that the one you meant, and is the same version of overlord-data[ray] installed on all of "
        "its hosts?"
    )


def why_failed(site: Site, why: str) -> str:
    """Say that a role cannot be replaced."""
    return (
        f"the {site.name} {why}; the service cannot go on. Its last words stand in the service's log; mend the cause, "
        "and launch again from the last state."
    )


def show_opening(
    opening: Sequence[Pending], done: Callable[[], int], count: int, progress: Progress, clock: Callable[[], float]
) -> None:
    """Show how many sources are open, until all are.

    Raises:
        ServiceLost: when that takes too long.
    """
    until = clock() + OPEN_S
    while any(pending.poll(0.1) is None for pending in opening):
        progress("opening sources", min(done(), count), count)
        if clock() > until:
            raise ServiceLost(f"the sources were not open after {OPEN_S:g} s; look at the storage they are on.")
    progress("opening sources", count, count)


def as_dealt(site: Site, assignment: Assignment) -> Site:
    """Return the site of a loader host with the sources that it has by now."""
    if site.role != "loader":
        return site
    sources, shadows = assignment.sources_of(site.number), assignment.shadows_of(site.number)
    return dataclasses.replace(site, sources=tuple(sources), shadows=tuple(shadows))


def can_do_without(one: Incarnation, assignment: Assignment, loaders: Sequence[Incarnation]) -> bool:
    """Whether a loader host that is slow can be replaced at once: all of its sources have a shadow that is up."""
    up = {other.site.number for other in loaders if other.peer is not None}
    mine = assignment.sources_of(one.site.number) if one.site.role == "loader" else []
    return bool(mine) and all(assignment.shadow[source] in up for source in mine)


# --------------------------------------------------------------------------------------------------------------


logger = logging.getLogger("overlord")

CLOSE_S = 10.0
SLOW_S = 60.0
"""A call to a loader host that runs for longer goes to the shadows, where there are some."""
MOST_TRIES = 30
"""Successors in a row that die young, or do not come up, before the service gives up."""
YOUNG_S = 3.0
"""An incarnation that lived for longer has done something."""
KEPT_FAULTS = 256


class Supervisor:
    """The roles of one service.

    Args:
        engine: Starts them.
        sites: Where they go.
        assignment: Which loader host has which sources, and shadows which.
        heartbeat_s: How long nothing may be heard of anybody.
        spares: Where loader hosts go that are not up at first.
        per_host: Workers that one loader host has room for.
        clock: Seconds that never go back.
        spawn: Starts work beside this; in the caller where there are no threads.
        served: Told the newest step that a client has come to.
        rewound: Called when all ranks go back to an earlier step: the whole service must be started again.
    """

    def __init__(
        self,
        engine: Engine,
        sites: Sequence[Site],
        assignment: Assignment,
        *,
        heartbeat_s: float,
        spares: Sequence[Site] = (),
        per_host: int = 8,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[Callable[[], None]], None] | None = None,
        idle: Callable[[float], None] | None = None,
        served: Callable[[int], None] | None = None,
        rewound: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._rewound = rewound
        self.ends_for: OverlordError | None = None
        """What clients that wait are told when it closes; by default that the service was closed."""
        self._heartbeat_s = heartbeat_s
        self.clock = clock
        self._spawn = spawn or self._in_a_thread
        self._idle = idle
        self._tell_served = served or (lambda step: None)
        self._served = -1
        self.roles = {site.name: Incarnation(site) for site in sites}
        """Every role, and who plays it."""
        self.roles |= {site.name: Incarnation(site, asleep=True) for site in spares}
        self._assignment = assignment
        self._version = 0
        self._failed: str | None = None
        self._facts: dict[str, Any] = {}
        self._stands: dict[str, Any] = {}
        self._seen: dict[str, Any] = {}
        self.first_step = 0
        """The step that the stream was launched at."""
        self._board = Switchboard(("service", 0), clock, idle)
        self.lock = threading.RLock()
        """Held while roles change hands."""
        self.hosts = HostChanges(self._board, engine, self, per_host)
        """Deals workers to loader hosts."""
        self._live = LiveSources(self._board, self._of, len(assignment.primary), self.assign, self.hosts.turn)
        self._closing = threading.Event()
        self._replacing: list[threading.Thread] = []
        self._watcher = threading.Thread(target=self._watch, name="overlord-supervisor", daemon=True)
        self.faults: deque[dict[str, Any]] = deque(maxlen=KEPT_FAULTS)
        """What was lost, why, and how long it took to replace it."""

    def begin(self, progress: Progress) -> None:
        """Bring all roles up, side by side; what is wrong with the job shows here.

        Raises:
            ServiceLost: when a role ends meanwhile.
        """
        try:
            self._begin(progress)
        except PeerGone as error:
            raise ServiceLost(
                f"a role ended while the service was launched ({error}); no data would come. What it logged stands on "
                "standard error: mend that if it tells of a fault, and launch again."
            ) from error

    def _begin(self, progress: Progress) -> None:
        awake = self._of()
        for one in awake:
            one.peer = self._engine.start(one.site, one.generation)
        self.publish()
        for one in awake:
            self._started(one)
        # What takes time on each host goes on while the sources are opened.
        ready = [(one, self._send(one, "prepare")) for one in awake if one.site.role != "loader"]
        self._facts = self._open_sources(progress)
        for one, pending in ready:
            self._answer(one, pending)
        self._stands = self._call(self.roles[PLANNER], "open_store", {"facts": self._facts})
        progress("indexing files", 0, 1)
        self._call_all("loader", "begin", self._stands)
        progress("planning the first step", 0, 1)
        self.first_step = int(self._call(self.roles[PLANNER], "begin", {})["first_step"])
        self._call_all("constructor", "begin", {"first_step": self.first_step})
        for one in awake:
            one.pid = self._call(one, "pid", {})["pid"]
            one.heard = one.born = self.clock()

    def watch(self) -> None:
        """Look after the roles from now on, in a thread."""
        self._watcher.start()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer the owner of the service: its planner does, whoever plays it."""
        if message.get("op") == "beat":
            return {}
        if message.get("op") == "add_source":
            return {"step": self._live.add(message)}
        if message.get("op") == "status" and self._seen and (self._failed or self.peer(PLANNER) is None):
            return {"status": self._seen | self.describe()}  # what the planner last told, and that it is away
        answer = self._board.insist(PLANNER, "ask", message)["answer"]
        if message.get("op") == "status":
            self._seen = answer["status"]
            answer["status"] |= self.describe()
        return answer

    def peer(self, name: str) -> Peer | None:
        """Return who plays a role now; None while nobody does."""
        with self.lock:
            return self.roles[name].peer

    def describe(self) -> dict[str, Any]:
        """Return who plays which role, and what was lost so far."""
        with self.lock:
            found = _describe_all(self._of(), self._assignment)
            found |= self._engine.describe([(one.site, one.pid) for one in self._of()])
            return found | {"faults": list(self.faults), "failed": self._failed}

    def interrupt(self) -> None:
        """Start no more successors, and end every wait of the supervisor's own threads for a role."""
        with self.lock:
            self._closing.set()
            if self._board.version:  # else nothing is up yet
                book = self._board.book
                self._board.learn(dataclasses.replace(book, version=book.version + 1, failed="the service is closing."))

    def close(self) -> None:
        """End the roles: constructors tell the planner how far they came, the planner may ask loaders once more.

        Threads that replace a role end first. One that went on would start a process that is not ended any more, and a
        call to Ray after its end starts a cluster of its own.
        """
        self.interrupt()
        why = {} if self.ends_for is None else {"why": [type(self.ends_for).__name__, str(self.ends_for)]}
        if self._watcher.is_alive():
            self._watcher.join()
        end = time.monotonic() + CLOSE_S
        for thread in self._replacing:
            thread.join(max(0.0, end - time.monotonic()))
        for role in ("constructor", "planner", "loader"):
            asked: list[Pending] = []
            until = time.monotonic() + CLOSE_S
            for one in self._of(role):
                with contextlib.suppress(PeerGone):  # it has ended already
                    asked += [] if one.peer is None else [self._send(one, "close", why)]
            for pending in asked:
                with contextlib.suppress(PeerGone):  # which is what we want; who does not end is killed
                    pending.poll(max(0.0, until - time.monotonic()))
        with self.lock:
            for one in self.roles.values():
                if one.peer is not None:
                    self._engine.kill(one.peer, one.site, one.pid)
        self._engine.close()

    # -- seeing -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look once after everybody."""
        now = self.clock()
        with self.lock:
            if self._closing.is_set():
                return  # its own book says so by now, which is not what clients that wait are to be told
            lost = [(one, why) for one in self.roles.values() if (why := self._health(one, now)) is not None]
            if lost and not self._closing.is_set():
                self._lose(lost)
            served = max(one.served for one in self.roles.values())
            if self.roles[PLANNER].rewound:
                self._go_back()
        if served > self._served:
            self._served = served
            self._tell_served(served)

    def _go_back(self) -> None:
        rewound, self._rewound = self._rewound, None  # once
        if rewound is not None and not self._closing.is_set():
            rewound()

    def _watch(self) -> None:
        while not self._closing.is_set():
            with self.lock:
                beats = [one.beat for one in self.roles.values() if one.beat is not None]
            self._engine.wait(beats, 0.1)
            try:
                self.tick()
            except Exception:  # whatever it is, nobody else looks after the roles
                logger.exception("looking after the roles failed; it goes on")
                time.sleep(0.1)

    def _health(self, one: Incarnation, now: float) -> str | None:
        """Return what is wrong with an incarnation, or None."""
        wrong, busy_s = look_at(one, now, self._heartbeat_s, self._version, self._introduce)
        if wrong is None and busy_s > SLOW_S and can_do_without(one, self._assignment, self._of("loader")):
            return f"was busy with one call for {busy_s:.0f} s"
        return wrong

    def _introduce(self, peer: Peer) -> Pending:
        return self._engine.introduce(peer, self._board.book)

    # -- losing and replacing ---------------------------------------------------------------------

    def _lose(self, lost: Sequence[tuple[Incarnation, str]]) -> None:
        for one, why in lost:
            assert one.peer is not None
            self._engine.kill(one.peer, one.site, one.pid)
            one.young = one.young + 1 if self.clock() - one.born < YOUNG_S else 0
            one.peer, one.beat, one.told = None, None, None
            one.generation += 1
            one.restarts += 1
            logger.warning("the %s %s; its successor is started", one.site.name, why)
        hosts = {one.site.number for one, _ in lost if one.site.role == "loader"}
        before, self._assignment = self._assignment, promote(self._assignment, hosts)
        promoted = sum(a != b for a, b in zip(before.primary, self._assignment.primary, strict=True))
        self.publish()
        for one, why in lost:
            fault = {"role": one.site.name, "why": why, "generation": one.generation, "promoted": promoted}
            fault["at"] = time.time()  # when everybody had been told whom to ask instead
            self.faults.append(fault)
            self._spawn(lambda one=one, fault=fault: self._replace(one, fault))  # type: ignore[misc]

    def _replace(self, one: Incarnation, fault: dict[str, Any]) -> None:
        """Start a successor, and another one where that does not come up."""
        since, tries, generation = self.clock(), 0, int(fault["generation"])
        while not self._closing.is_set() and one.generation == generation:  # else it was put to sleep meanwhile
            if one.young >= MOST_TRIES:
                self._fail(f"{fault['why']}, and so did its successors, {MOST_TRIES} in a row", one)
                return
            peer = None
            try:
                with self.lock:
                    one.site = self._engine.place_again(as_dealt(one.site, self._assignment))
                peer = one.coming = self._engine.start(one.site, one.generation)
                pid = self.bring_up(one, peer)
            except Exception as error:  # also what the host refuses, such as another process
                one.coming = None
                if peer is not None:
                    self._engine.kill(peer, one.site, 0)
                if self._closing.is_set():
                    return
                if isinstance(error, Rewound):
                    self._go_back()
                    return
                logger.warning("the successor of the %s did not come up: %s", one.site.name, error)
                fault["why"] = str(error)
                tries += 1
                with self.lock:
                    one.young += not isinstance(error, StoreError) or isinstance(error, Fenced)  # a store comes back
                    if one.generation == generation:
                        one.generation = generation = generation + 1
                (self._idle or self._closing.wait)(min(4.0, 0.25 * 2**tries))
                continue
            with self.lock:
                if self._closing.is_set() or one.generation != generation:
                    self._engine.kill(peer, one.site, 0)
                    return
                one.peer, one.coming, one.pid = peer, None, pid
                one.heard = one.born = self.clock()
                self.publish()
            fault["took_s"] = self.clock() - since
            return

    def bring_up(self, one: Incarnation, peer: Peer) -> int:
        """Take a successor through what all went through at the beginning; return its process id."""
        life = self._life(peer)
        life.acquaint(self._introduce)

        def call(method: str, message: dict[str, Any]) -> Any:
            return unwrap(life.answer(peer.ask(method, message)))

        added, facts = self._live.told(one.site, self._assignment), self._facts | self._live.facts
        if one.site.role == "loader":
            check_same_files(facts, call("open", {"added": added})["facts"])
            call("begin", where_to_go_on(self._board, self._stands))
            call("resize", sizes_to_json(self.hosts.sizes_of(one.site.number)))
        elif one.site.role == "planner":
            call("prepare", {})
            self._stands = call("open_store", {"facts": facts})
            call("begin", {"successor": True})
        else:
            call("prepare", {"added": added})
            call("begin", {"first_step": self.first_step})
        return int(call("pid", {})["pid"])

    def _fail(self, why: str, one: Incarnation) -> None:
        with self.lock:
            self._failed = why_failed(one.site, why)
            logger.error("%s", self._failed)
            self.publish()

    def assign(self, assignment: Assignment, was: Assignment) -> bool:
        """Let everybody know who has which source, unless that has changed meanwhile: a shadow may be promoted."""
        with self.lock:
            if self._assignment == was:
                self._assignment = assignment
                self.publish()
            return self._assignment is assignment

    def publish(self) -> None:
        """Give everybody the newest book; who misses it is found out by its beat."""
        with self.lock:
            self._version += 1
            living = {name: one.peer for name, one in self.roles.items() if one.peer is not None}
            generations = {name: one.generation for name, one in self.roles.items()}
            book = Book(self._version, generations, living, self._assignment, self._failed)
            self._board.learn(book)
            for one in self.roles.values():
                peer = one.peer or one.coming
                try:
                    one.told = None if peer is None else self._engine.introduce(peer, book)
                except PeerGone:
                    pass  # its beat says so too, or whoever brings it up

    def _in_a_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="overlord-replace", daemon=True)
        self._replacing = [one for one in self._replacing if one.is_alive()] + [thread]
        thread.start()

    # -- asking -----------------------------------------------------------------------------------

    def _open_sources(self, progress: Progress) -> dict[str, Any]:
        loaders = self._of("loader")
        opening = [(one, self._send(one, "open")) for one in loaders]

        def done() -> int:
            return sum(self._call(one, "progress", {})["done"] for one in loaders)

        show_opening([pending for _, pending in opening], done, len(self._assignment.primary), progress, self.clock)
        facts: dict[str, Any] = {}
        for one, pending in opening:
            facts |= self._answer(one, pending)["facts"]
        return dict(sorted(facts.items()))

    def _started(self, one: Incarnation) -> None:
        assert one.peer is not None
        try:
            self._call(one, "pid", {})
            self._life(one.peer).acquaint(self._introduce)
        except PeerGone as error:
            raise did_not_start(one.site, error) from error

    def _life(self, peer: Peer) -> Life:
        return Life(peer, self._heartbeat_s, self._engine.first_sign_s, self.clock, self._closing.is_set)

    def _send(self, one: Incarnation, method: str, message: dict[str, Any] | None = None) -> Pending:
        assert one.peer is not None
        try:
            return one.peer.ask(method, message or {})
        except PeerGone as error:
            raise PeerGone(f"{method!r} did not reach the {one.site.name}: {error}") from error

    def _call(self, one: Incarnation, method: str, message: dict[str, Any]) -> Any:
        return self._answer(one, self._send(one, method, message))

    def _call_all(self, role: str, method: str, message: dict[str, Any]) -> list[Any]:
        asked = [(one, self._send(one, method, message)) for one in self._of(role)]
        return [self._answer(one, pending) for one, pending in asked]

    def _answer(self, one: Incarnation, pending: Pending) -> Any:
        assert one.peer is not None
        return unwrap(self._life(one.peer).answer(pending))

    def _of(self, role: str | None = None) -> list[Incarnation]:
        return [one for one in self.roles.values() if role in (None, one.site.role) and not one.asleep]


def _describe_all(roles: Sequence[Incarnation], assignment: Assignment) -> dict[str, Any]:
    shadows = sum(host != NOBODY for host in assignment.shadow)
    return {"hosts": [_describe(one, assignment) for one in roles], "shadows": shadows}


def _describe(one: Incarnation, assignment: Assignment) -> dict[str, Any]:
    found = one.site.to_json()
    if one.site.role == "loader":  # as it is now, not as it began
        found["sources"] = len(assignment.sources_of(one.site.number))
        found["shadows"] = len(assignment.shadows_of(one.site.number))
    return found | {"pid": one.pid, "generation": one.generation, "restarts": one.restarts, "up": one.peer is not None}


# --------------------------------------------------------------------------------------------------------------
# A supervisor with its door, while a service of several hosts is up.


WORKERS_PER_HOST = 8
"""w_actor: workers that a loader host has room for, unless there are to be more than all hosts have."""
IDLE = {"workers": 0, "samples_prepared": 0, "busy_s": 0.0, "waited_s": 0.0, "buffer_bytes": 0}
"""What is known of the workers of a source while nobody tells."""


def unbundled(bundle: bytes, folder: Path) -> tuple[Job, LaunchOptions, bytes]:
    """Read what the launcher sent: the job with the sources its store knows, the options, and the bundle for its roles.

    Raises:
        SpecError: for what cannot be launched.
    """
    job, options = unpack(bundle)
    options = dataclasses.replace(options, numbering=peek(options, options.store or str(folder / "store")))
    bundle = pack(job, options)
    job = with_newcomers(job, options.numbering)
    check_launch(canonical(job, options.numbering), options)
    return job, options, bundle


@contextlib.contextmanager
def supervised(
    engine: Engine, sites: Sequence[Site], options: LaunchOptions, folder: Path, progress: Progress
) -> Iterator[str]:
    """Bring up the roles of a service, look after them, and end them with the context; gives the address."""
    spares, per_host = spares_of(options, sites)
    supervisor = Supervisor(
        engine, sites, assignment_of(sites), heartbeat_s=options.heartbeat_s, spares=spares, per_host=per_host,
        served=lambda step: progress(SERVED, step, step),
        rewound=lambda: progress(REWOUND, 0, 1),
    )  # fmt: skip
    scaler = cluster_scaler(options, supervisor)

    def answer(message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        found = supervisor.ask(message)
        if "status" in found:
            found["status"]["scaling"] = scaler.describe()
        return found, []

    try:
        supervisor.begin(progress)
        supervisor.watch()
        scaler.start()
        with open_door(folder / CONTROL, lambda talk: answer_all(talk, answer)):
            try:
                yield f"unix://{folder}"
            except OverlordError as error:
                supervisor.ends_for = error
        refresh_profile(options, lambda: supervisor.ask({"op": "status"})["status"])
    finally:
        supervisor.interrupt()  # the scaler may wait for a role
        scaler.close()
        supervisor.close()


def cluster_scaler(options: LaunchOptions, supervisor: Supervisor) -> Scaler:
    """Make the Scaler of a service of several hosts."""
    names: list[str] = []

    def watch(ahead: Sequence[int]) -> Mapping[str, Any]:
        facts = supervisor.ask({"op": "workload", "ahead": list(ahead)})["workload"]
        names[:] = facts["names"]
        done = supervisor.hosts.workload()
        return {**facts, "sources": {name: done.get(number, IDLE) for number, name in enumerate(names)}}

    def act(workers: Mapping[str, int], loads: Mapping[str, float]) -> None:
        supervisor.hosts.resize([workers[name] for name in names], [loads[name] for name in names])

    return scaler_of(options, watch, act)


def spares_of(options: LaunchOptions, sites: Sequence[Site]) -> tuple[list[Site], int]:
    """Return loader hosts that sleep at first, and how many workers one has room for: all workers there may be fit."""
    if options.cluster is None:  # one process has room for all
        return [], options.lanes
    hosts = sum(site.role == "loader" for site in sites)
    spares = 0 if options.scaling is None else max(0, -(-options.lanes // WORKERS_PER_HOST) - hosts)
    return spare_sites(sites, spares), max(WORKERS_PER_HOST, -(-options.lanes // (hosts + spares)))


def assignment_of(sites: Sequence[Site]) -> Assignment:
    """Return which loader host has which sources at first."""
    primary = {source: site.number for site in sites for source in site.sources}
    shadow = {source: site.number for site in sites for source in site.shadows}
    numbers = range(len(primary))
    return Assignment(tuple((primary[n],) for n in numbers), tuple(shadow.get(n, -1) for n in numbers))
