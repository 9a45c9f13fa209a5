"""Keeps the roles of a service alive: notices which died, hang or are slow, has shadows promoted, and replaces them.

It does not know what roles run on: an engine starts processes, Ray actors or objects of this process.

How it works: every role is asked for a heartbeat, and answers within half a second, so that one is always under way
and a connection that breaks is noticed at once. `tick` looks at all of them:

    event                               what follows
    a process ended                     its heartbeat fails; at once
    it hangs, or its host is gone       its heartbeat does not come for `Limits.role_silence`; it is killed first
    a loader host is slow               a call runs for `Limits.slow_call` and all its sources have a shadow: as if hung
    any of these                        generation + 1, shadows promoted, new membership to all, replacement started
    replacements end again and again    after MOST_TRIES the service fails, and all callers that wait are told why

A replacement is brought up in a thread of its own (`_replace`), in the steps that all roles go through at the launch.
Meanwhile its signs of life are answers to `alive`, not heartbeats (`StartupLiveness`).

Rules of this file:
1. A role that is taken for dead is killed before it is replaced, and what it still sends is refused (fencing).
2. All roles that are found dead in one tick leave with one membership: no caller is sent to a shadow that is dead too.
3. The supervisor never decides what is in a step: what is lost is read or planned again by the replacement.
4. A role that comes up does not wait for another one: of two that were lost together each would wait for the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from overlord.core.client_messages import (
    AddSource,
    ChangedAt,
    Document,
    GetStatus,
    GetWorkload,
    Message,
    Request,
    Reshard,
)
from overlord.core.messages import (
    BeginPlanning,
    Close,
    FirstStep,
    Heartbeat,
    LeftSources,
    Nothing,
    OpenedSources,
    Positions,
    Prepare,
    Resize,
    SomeSources,
    SourceFacts,
    SourceReports,
)
from overlord.core.samples import Part
from overlord.errors import AnswerLost, ClosedError, Fenced, OverlordError, Rewound, ServiceLost, StoreError
from overlord.job.specs import Job
from overlord.roles.assignment import NO_HOST, Assignment, promote
from overlord.runtimes.autoscaling.scaler import Workload, refresh_profile, service_scaler
from overlord.runtimes.hosts.peers import PLANNER, add_up, loader_name
from overlord.runtimes.launching.add_source import AddedSources
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.launching.deployment import check_launch
from overlord.runtimes.launching.resume import canonical, peek, with_added_sources
from overlord.runtimes.launching.service_options import KeepOptions, Progress, ServiceOptions, unpack
from overlord.runtimes.supervision.child import Backoff, Limits, Liveness
from overlord.runtimes.supervision.role_table import MOST_TRIES, RoleInstance, RoleTable
from overlord.runtimes.supervision.service_process import REWOUND, SERVED
from overlord.runtimes.supervision.trainer_hosts import TrainerHosts
from overlord.runtimes.transport.engine import Engine, Peer, PeerGone, Pending
from overlord.runtimes.transport.listener import CONTROL, answer_requests, listen
from overlord.runtimes.transport.role_codec import unwrap
from overlord.scaling.dealing import Deal, deal
from overlord.scaling.pressure import HostCounters

logger = logging.getLogger("overlord")

KEPT_FAULTS = 256
ROOMY = 0.75
"""A spare host is ended when all workers fit into this share of the room of the other hosts."""


class StartupLiveness:
    """Waits for answers of a role that starts, for as long as it gives signs of life.

    A role that starts is sent no heartbeats: after the first, it ends itself when no more follow (its lease), and they
    are not sent while another role takes long to come up.
    """

    def __init__(
        self, peer: Peer, limits: Limits, first_s: float, clock: Callable[[], float], closing: Callable[[], bool]
    ) -> None:
        self._peer = peer
        self._closing = closing
        self._limits = limits
        self._clock = clock
        self._liveness = Liveness(max(first_s, limits.role_silence), limits.role_starting_silence, clock())
        self._until = clock() + limits.open_sources
        self._sign: Pending | None = None

    def answer(self, pending: Pending) -> Any:
        """Wait for an answer.

        Raises:
            ServiceLost: when the role was silent for too long, or took too long all in all.
            ClosedError: when the service closes.
        """
        while (answer := self._look(pending)) is None:
            pass
        return answer

    def introduce(self, introduce: Callable[[Peer], Pending]) -> None:
        """Send the membership until the role has it: a message may be lost, and no role must be called before."""
        while True:
            told, again = introduce(self._peer), self._clock() + self._limits.role_silence
            while self._clock() <= again:
                if self._look(told) is not None:
                    return

    def _look(self, pending: Pending) -> Any:
        if self._closing():
            raise ClosedError("the service is closing.")
        answer, now = pending.poll(0.5), self._clock()
        if answer is not None:
            return answer
        if self._sign is not None and self._sign.poll(0) is not None:
            self._sign = None
            self._liveness.heard(now)
        if self._sign is None:
            self._sign = self._peer.ask("alive", Nothing())
        if self._liveness.hangs(now):
            raise ServiceLost(f"nothing was heard of it for {self._liveness.silent_s(now):.1f} s while it came up")
        if now > self._until:
            limit_s = self._limits.open_sources
            raise ServiceLost(f"a role did not come up within {limit_s:g} s; its host may be overloaded.")
        return None


STATUS_S = 3.0
"""How long `status` waits for roles that are busy, where it can tell what they said before."""


def _fulfil(call: Future[dict[str, Any]], work: Callable[[], dict[str, Any]]) -> None:
    try:
        call.set_result(work())
    except BaseException as error:
        call.set_exception(error)


class Supervisor:
    """The supervisor of the roles of one service.

    Args:
        spawn: Starts work in the background; by default in a thread.
        idle: Called instead of waiting for other threads, where there are none.
        served: Told the newest step that a client has come to.
        rewound: Called when all ranks go back to an earlier step: the whole service must be started again.
    """

    def __init__(
        self,
        engine: Engine,
        sites: Sequence[Site],
        options: ServiceOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[Callable[[], None]], None] | None = None,
        idle: Callable[[float], None] | None = None,
        served: Callable[[int], None] | None = None,
        rewound: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._rewound = rewound
        self.ends_for: OverlordError | None = None
        """The error that waiting clients get when it closes; by default that the service was closed."""
        self._limits = Limits(options.heartbeat_s)
        self._clock = clock
        self._spawn = spawn or self._in_a_thread
        self._tell_served = served or (lambda step: None)
        self._served = -1
        self._facts: dict[str, SourceFacts] = {}
        self._positions = Positions([], [], {}, {}, {})
        self._last_status: dict[str, Any] = {}
        self._status_lock = threading.Lock()
        self._status_call: Future[dict[str, Any]] | None = None
        self._waits_itself = idle is not None
        """Whether there are no other threads."""
        self.first_step = 0
        spares, per_host = spares_of(options, sites)
        self.table = RoleTable(engine, sites, spares, self._limits, clock, idle)
        self._peers = self.table.peers
        self.hosts = HostChanges(self.table, engine, self._start, per_host)
        """Deals workers to loader hosts."""
        cluster = options.cluster is not None and options.cluster.engine == "ray"
        self.trainers = TrainerHosts(self.table, engine, self._start, self._limits, cluster=cluster)
        """Starts and ends constructor hosts."""
        self.added = AddedSources(self.table)
        """Adds sources."""
        self._closing = threading.Event()
        self._idle = idle or self._closing.wait
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
        roles = self.table.roles
        awake = self.table.running()
        for one in awake:
            one.peer = self._engine.start(one.site, one.generation)
        self.table.publish()
        for one in awake:
            self._wait_started(one)
        # Each host prepares while the sources are opened.
        ready = [(one, self._send(one, "prepare", Prepare())) for one in awake if one.site.role != "loader"]
        opened = self._open_sources(progress)
        for one, pending in ready:
            self._answer(one, pending)
        self._positions = self._call(roles[PLANNER], "open_store", opened)
        self._facts = self._positions.facts  # without parked sources whose files are away
        progress("indexing files", 0, 1)
        self._call_all("loader", "begin", self._positions)
        for one in self.table.running("loader"):
            if sizes := self.hosts.sizes_of(one.site.number):  # what the auto-partition gives it
                self._call(one, "resize", Resize(sizes))
        progress("planning the first step", 0, 1)
        first: FirstStep = self._call(roles[PLANNER], "begin", BeginPlanning())
        self.first_step = first.step
        self._call_all("constructor", "begin", first)
        for one in awake:
            one.pid = self._call(one, "alive", Nothing()).pid
            self.table.watch_from_now(one)
        self.trainers.resume(first.hosts, first.newest)

    def watch(self) -> None:
        """Look after the roles from now on, in a thread."""
        self._watcher.start()

    def ask(self, request: Request[Any]) -> Any:
        """Answer the owner of the service: its planner does."""
        if isinstance(request, AddSource):
            return ChangedAt(self.added.add(request))
        if isinstance(request, Reshard) and request.hosts is not None:
            return self.trainers.reshard(request)
        if isinstance(request, GetWorkload):
            self._ask_running("constructor", "tell_progress", Nothing(), self._limits.progress)
        if not isinstance(request, GetStatus):
            return self._peers.insist(PLANNER, "ask", request)
        if not self._last_status or not (self.table.failed or self.peer(PLANNER) is None):
            self._refresh_status(request)
        return Document(self._last_status | self.describe())  # a planner that is being replaced gave it before

    def _refresh_status(self, request: GetStatus) -> None:
        """Ask the planner how things are; where roles are busy and it was told before, only for a moment.

        A loader that waits for a worker process answers nothing else, and that is when a user asks what is waited for.
        """
        if self._waits_itself or not self._last_status:
            self._last_status = self._new_status(request)
            return
        with self._status_lock:
            call = self._status_call
            if call is None or call.done():
                call = self._status_call = Future()
                threading.Thread(
                    target=_fulfil, args=(call, lambda: self._new_status(request)), name="overlord-status", daemon=True
                ).start()
        with contextlib.suppress(TimeoutError):
            self._last_status = call.result(STATUS_S)

    def _new_status(self, request: GetStatus) -> dict[str, Any]:
        # Constructor hosts say first how far their clients are.
        self._ask_running("constructor", "tell_progress", Nothing(), self._limits.progress)
        found: dict[str, Any] = self._peers.insist(PLANNER, "ask", request).content
        return found

    def peer(self, name: str) -> Peer | None:
        """Return the peer of a role; None while it is being replaced."""
        with self.table.lock:
            return self.table.roles[name].peer

    def describe(self) -> dict[str, Any]:
        """Return which process runs each role, and what was lost so far."""
        with self.table.lock:
            return self.table.describe() | {"faults": list(self.faults)}

    def interrupt(self) -> None:
        """Replace no more roles, and end every wait of the supervisor's own threads for a role."""
        with self.table.lock:
            self._closing.set()
            if self._peers.version:  # else nothing is up yet
                membership = self._peers.membership
                self._peers.learn(
                    dataclasses.replace(membership, version=membership.version + 1, failed="the service is closing.")
                )

    def close(self) -> None:
        """End the roles: constructors report to the planner how far they came, the planner may call loaders once more.

        Threads that replace a role end first. One that went on would start a process that is not ended any more, and a
        call to Ray after its end starts a cluster of its own.
        """
        self.interrupt()
        why = None if self.ends_for is None else (type(self.ends_for).__name__, str(self.ends_for))
        if self._watcher.is_alive():
            self._watcher.join()
        end = time.monotonic() + self._limits.role_close
        for thread in self._replacing:
            thread.join(max(0.0, end - time.monotonic()))
        for role in ("constructor", "planner", "loader"):
            # One that does not end is killed below. Roles that are stopped must not keep others from their store.
            self._ask_running(role, "close", Close(why), max(end - time.monotonic(), self._limits.role_last_word))
        with self.table.lock:
            for one in self.table.roles.values():
                if one.peer is not None:
                    self._engine.kill(one.peer, one.site, one.pid)
        self._engine.close()

    # -- noticing ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at all roles once."""
        now = self._clock()
        with self.table.lock:
            if self._closing.is_set():
                return  # clients that wait are told that the service closes, not that a role ended
            roles = self.table.roles
            lost = [(one, why) for one in roles.values() if (why := self._problem(one, now)) is not None]
            if lost and not self._closing.is_set():
                self._lose(lost)
            served = max(one.served for one in roles.values())
            self.trainers.end_left(served, now)
            if roles[PLANNER].rewound:
                self._rewind()
        if served > self._served:
            self._served = served
            self._tell_served(served)

    def _rewind(self) -> None:
        rewound, self._rewound = self._rewound, None  # once
        if rewound is not None and not self._closing.is_set():
            rewound()

    def _watch(self) -> None:
        while not self._closing.is_set():
            with self.table.lock:
                beats = [one.beat for one in self.table.roles.values() if one.beat is not None]
            self._engine.wait(beats, 0.1)
            try:
                self.tick()
            except Exception:  # without this thread no role would be replaced any more
                logger.exception("looking at the roles failed; it is tried again")
                time.sleep(0.1)

    def _problem(self, one: RoleInstance, now: float) -> str | None:
        """Take a role's heartbeat and ask for the next; return what is wrong with the role, or None."""
        if one.peer is None or one.liveness is None:
            return None
        try:
            answer = one.beat.poll(0) if one.beat is not None else Heartbeat(0)
            if answer is None:  # judged after looking: a supervisor that was stopped itself finds answers waiting
                silent_s = one.liveness.silent_s(now)
                return f"did not answer for {silent_s:.1f} s" if one.liveness.hangs(now) else None
            heartbeat: Heartbeat = unwrap(answer)
            one.liveness.heard(now)
            one.rewound = heartbeat.rewound
            one.served = max(one.served, heartbeat.served)
            one.clients = heartbeat.clients
            one.attached |= heartbeat.clients > 0
            one.waits = heartbeat.waits
            one.beat = one.peer.ask("beat", Nothing())
            if heartbeat.version < self.table.version:
                one.told = self.table.introduce(one.peer)
            if heartbeat.busy_s > self._limits.slow_call and self._has_shadows(one):
                return f"was busy with one call for {heartbeat.busy_s:.0f} s"
        except PeerGone as error:
            return f"ended ({error})"
        except AnswerLost:
            one.beat = None  # it is asked for again with the next look
        return None

    def _has_shadows(self, one: RoleInstance) -> bool:
        """Whether a loader host that is slow can be replaced at once: all of its sources have a shadow that is up."""
        up = {other.site.number for other in self.table.running("loader") if other.peer is not None}
        assignment = self.table.assignment
        sources = assignment.sources_of(one.site.number) if one.site.role == "loader" else []
        return bool(sources) and all(assignment.shadow[source] in up for source in sources)

    # -- replacing --------------------------------------------------------------------------------

    def _lose(self, lost: Sequence[tuple[RoleInstance, str]]) -> None:
        for one, why in lost:
            assert one.peer is not None
            self._engine.kill(one.peer, one.site, one.pid)
            one.restarts.failed(why, self._clock() - one.started_at)
            one.restarts.count += 1
            leaves = self.trainers.leaves(one, self._served, self._clock())
            self.table.went_down(one, asleep=leaves)
            logger.warning("the %s %s; it is %s", one.site.name, why, "not needed any more" if leaves else "replaced")
            if leaves:
                self.trainers.forget(one)
        lost = [(one, why) for one, why in lost if not one.asleep]
        hosts = {one.site.number for one, _ in lost if one.site.role == "loader"}
        before, self.table.assignment = self.table.assignment, promote(self.table.assignment, hosts)
        promoted = sum(a != b for a, b in zip(before.primary, self.table.assignment.primary, strict=True))
        self.table.publish()
        for one, why in lost:
            fault = {"role": one.site.name, "why": why, "generation": one.generation, "promoted": promoted}
            fault["step"] = max(self._served, self.first_step)  # the newest that a trainer was known to have
            fault["at"] = time.time()  # when all roles had been told which host to call instead
            self.faults.append(fault)
            self._spawn(lambda one=one, fault=fault: self._replace(one, fault))  # type: ignore[misc]

    def _replace(self, one: RoleInstance, fault: dict[str, Any]) -> None:
        """Start a replacement, and another one where that does not come up.

        Every try has its own generation; a newer one means that the host was put to sleep, and ends the loop.
        """
        since, generation, backoff = self._clock(), int(fault["generation"]), Backoff(0.5, 4.0, self._idle)
        while not self._closing.is_set() and one.generation == generation:
            if one.restarts.exhausted:
                self._fail(f"{fault['why']}, and so did its successors, {MOST_TRIES} in a row", one)
                return
            try:
                peer, pid = self._start(one, self._site_now(one.site))
            except Exception as error:  # also what the host refuses, such as another process
                if self._closing.is_set():
                    return
                if isinstance(error, Rewound):
                    self._rewind()
                    return
                logger.warning("the replacement of the %s did not come up: %s", one.site.name, error)
                fault["why"] = str(error)
                with self.table.lock:
                    if not isinstance(error, StoreError) or isinstance(error, Fenced):  # a store comes back
                        one.restarts.failed(str(error))
                    if one.generation == generation:
                        one.generation = generation = generation + 1
                backoff.pause()
                continue
            with self.table.lock:
                if self._closing.is_set() or one.generation != generation:
                    self._engine.kill(peer, one.site, 0)
                    return
                self.table.came_up(one, peer, pid)
            fault["took_s"] = self._clock() - since
            return

    def _site_now(self, site: Site) -> Site:
        """Return the site of a role; of a loader host with the sources that it has by now."""
        if site.role != "loader":
            return site
        now = self.table.assignment
        sources, shadows = now.sources_of(site.number), now.shadows_of(site.number)
        return dataclasses.replace(site, sources=tuple(sources), shadows=tuple(shadows))

    def _start(self, one: RoleInstance, site: Site) -> tuple[Peer, int]:
        """Start a role at a site, or on another host if that one is gone, and bring it up; kill it if that fails."""
        with self.table.lock:
            one.site = self._engine.place_again(site)
        peer = one.coming = self._engine.start(one.site, one.generation)
        try:
            return peer, self._bring_up(one, peer)
        except BaseException:
            one.coming = None
            self._engine.kill(peer, one.site, 0)
            raise

    def _bring_up(self, one: RoleInstance, peer: Peer) -> int:
        """Take a role through the steps that all went through at the launch; return its process id."""
        starting = self._starting(peer)
        starting.introduce(self.table.introduce)

        def call(method: str, message: Message) -> Any:
            return unwrap(starting.answer(peer.ask(method, message)))

        added, facts = self.added.told(one.site, self.table.assignment), self._facts | self.added.facts
        if one.site.role == "loader":
            check_same_files(facts, call("open", added).facts)
            call("begin", self._positions_now())
            call("resize", Resize(self.hosts.sizes_of(one.site.number)))
        elif one.site.role == "planner":
            call("prepare", Prepare())
            self._positions = call("open_store", OpenedSources(facts))
            call("begin", BeginPlanning(successor=True))
        else:
            call("prepare", added)
            call("begin", FirstStep(self.first_step))
        return call("alive", Nothing()).pid

    def _positions_now(self) -> Positions:
        """Return where a replaced loader host resumes: as the planner says, or as the store said to the last one."""
        if PLANNER in self._peers.membership.peers:
            found = self._peers.ask(PLANNER, "where", Nothing()).get()
            if found is not None:
                return unwrap(found)
        return self._positions

    def _fail(self, why: str, one: RoleInstance) -> None:
        with self.table.lock:
            self.table.failed = (
                f"the {one.site.name} {why}; the service cannot go on. Its last messages stand in the service's log; "
                "mend the cause, and launch again from the last state."
            )
            logger.error("%s", self.table.failed)
            self.table.publish()

    def _in_a_thread(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="overlord-replace", daemon=True)
        self._replacing = [one for one in self._replacing if one.is_alive()] + [thread]
        thread.start()

    # -- calling ----------------------------------------------------------------------------------

    def _open_sources(self, progress: Progress) -> OpenedSources:
        loaders = self.table.running("loader")
        count, until = len(self.table.assignment.primary), self._clock() + self._limits.open_sources
        opening = [(one, self._send(one, "open", Prepare())) for one in loaders]
        while any(pending.poll(0.1) is None for _, pending in opening):
            done = sum(self._call(one, "alive", Nothing()).opened for one in loaders)
            progress("opening sources", min(done, count), count)
            if self._clock() > until:
                limit_s = self._limits.open_sources
                raise ServiceLost(f"the sources were not open after {limit_s:g} s; look at the storage they are on.")
        progress("opening sources", count, count)
        facts: dict[str, SourceFacts] = {}
        missing: dict[str, tuple[str, str]] = {}
        for one, pending in opening:
            opened: OpenedSources = self._answer(one, pending)
            facts |= opened.facts
            missing |= opened.missing
        return OpenedSources(dict(sorted(facts.items())), missing)

    def _wait_started(self, one: RoleInstance) -> None:
        assert one.peer is not None
        try:
            self._call(one, "alive", Nothing())
            self._starting(one.peer).introduce(self.table.introduce)
        except PeerGone as error:
            raise ServiceLost(
                f"the {one.site.name} did not start on {one.site.node.name} ({error}); nothing could run. Its last "
                "messages stand above. On a cluster: is that the one you meant, and is the same version of overlord "
                "installed on all of its hosts, with its extra 'ray'?"
            ) from error

    def _starting(self, peer: Peer) -> StartupLiveness:
        return StartupLiveness(peer, self._limits, self._engine.first_sign_s, self._clock, self._closing.is_set)

    def _send(self, one: RoleInstance, method: str, message: Message) -> Pending:
        assert one.peer is not None
        try:
            return one.peer.ask(method, message)
        except PeerGone as error:
            raise PeerGone(f"{method!r} did not reach the {one.site.name}: {error}") from error

    def _call(self, one: RoleInstance, method: str, message: Message) -> Any:
        return self._answer(one, self._send(one, method, message))

    def _call_all(self, role: str, method: str, message: Message) -> None:
        for one, pending in [(one, self._send(one, method, message)) for one in self.table.running(role)]:
            self._answer(one, pending)

    def _ask_running(self, role: str, method: str, message: Message, limit_s: float) -> None:
        """Call all roles of a kind that run; the answer of one that has ended, or is slow, is not waited for."""
        until, asked = self._clock() + limit_s, list[Pending]()
        for one in self.table.running(role):
            with contextlib.suppress(PeerGone):
                asked += [] if one.peer is None else [self._send(one, method, message)]
        for pending in asked:
            with contextlib.suppress(PeerGone, AnswerLost):
                pending.poll(max(0.0, until - self._clock()))

    def _answer(self, one: RoleInstance, pending: Pending) -> Any:
        assert one.peer is not None
        return unwrap(self._starting(one.peer).answer(pending))


def check_same_files(known: Mapping[str, SourceFacts], opened: Mapping[str, SourceFacts]) -> None:
    """Refuse files that are not those that the stream began with.

    Raises:
        ServiceLost: it names the source.
    """
    # Of a source that was away when the service started nothing is known here; its loaders check its digest.
    changed = [name for name, facts in opened.items() if known.get(name, facts) != facts]
    if changed:
        raise ServiceLost(
            f"the files of source {changed[0]!r} have changed while the job ran; samples would be lost or repeated. "
            "Restore them, or start a new run."
        )


# --------------------------------------------------------------------------------------------------------------
# Workers dealt to loader hosts while a service runs: groups move between hosts, hosts are started and ended.
#
#   more workers than the hosts have room for       a spare host is started where CPUs can be reserved for it, beside
#                                                   trainers first, and brought up like a replaced one
#   a source moves to a host                        the host opens its files first, then all roles are told
#   a source leaves a host                          all roles are told first; it answers until no role calls it any more
#   a host that has nothing left                    is ended, if it was a spare one at the beginning: one that is beside
#                                                   no trainers first
#
# Rules of this part:
# 1. A host that is called can answer: one that has a source open serves any group of it, whichever host prepares it.
# 2. A source with a shadow stays where it is: its shadow follows one position, in another process.
# 3. What fails is tried again at the next interval. Nothing of it changes the stream.


class HostChanges:
    """Deals the workers of sources to loader hosts."""

    def __init__(
        self,
        table: RoleTable,
        engine: Engine,
        start: Callable[[RoleInstance, Site], tuple[Peer, int]],
        per_host: int,
    ) -> None:
        self._table = table
        self._engine = engine
        self._start = start
        self._per_host = per_host
        self._spares = {one.site.number for one in table.roles.values() if one.asleep}
        self._sizes = _launched_sizes(table)
        self._no_room = ""

    def sizes_of(self, host: int) -> dict[int, tuple[int, Part]]:
        """Return the workers that a replaced host begins with."""
        return dict(self._sizes.get(host, {}))

    def workload(self) -> Workload:
        """Return what the workers of every source have done, on all hosts together, and how their machines do."""
        sources: dict[int, dict[str, Any]] = {}
        machines: dict[str, HostCounters] = {}
        for host in self._running():
            answer = self._table.peers.ask(loader_name(host), "workload", Nothing()).get()
            if answer is None:
                continue
            reports: SourceReports = unwrap(answer)
            for source, one in reports.sources.items():
                add_up(sources, source, one)
            if reports.machine is not None:
                counters = HostCounters(**reports.machine)
                machines[counters.machine] = counters
        return Workload(sources, machines)

    def resize(self, workers: Sequence[int], loads: Sequence[float]) -> None:
        """Give sources so many workers, on the hosts that have them or on others.

        Args:
            loads: How many of them each source keeps busy.
        """
        with self._table.moving:
            now = self._table.peers.membership.assignment
            if len(workers) != len(now.primary):
                return  # a source was added meanwhile
            fixed = self._fixed(workers, now)
            dealt = self._deal(workers, now, loads, fixed)
            if dealt.further:
                dealt = self._deal(workers, now, loads, fixed) if self._start_spares(dealt.further) else dealt
            wanted = self._assignment(now, dealt)
            for host in self._running():
                new = [source for source in wanted.sources_of(host) if source not in now.sources_of(host)]
                if new:
                    self._ask(host, "take_sources", SomeSources(new))
            if wanted != now and not self._table.assign(wanted, now):
                return  # a shadow was promoted meanwhile
            self._sizes = self._dealt_sizes(wanted, dealt, fixed)
            for host in self._running():
                left = [source for source in now.sources_of(host) if source not in wanted.sources_of(host)]
                found: LeftSources = self._ask(host, "resize", Resize(self._sizes.get(host, {}), tuple(left)))
                # Another host continues the counters of sources that this one has left.
                for source, met in found.met.items():
                    self._ask(wanted.primary[source][0], "restore", met)
            for host in self._running():
                if host in self._spares and not wanted.sources_of(host) and not wanted.shadows_of(host):
                    self._end_spare(host)

    def _fixed(self, workers: Sequence[int], now: Assignment) -> dict[int, int]:
        """Return the workers of the sources that stay where they are: rule 2, within the room that there is."""
        fixed: dict[int, int] = {}
        free = dict.fromkeys((host for hosts in now.primary for host in hosts), self._per_host)
        for source in (source for source, shadow in enumerate(now.shadow) if shadow != NO_HOST):
            host = now.primary[source][0]
            fixed[source] = min(workers[source], max(free[host], 1))
            free[host] -= fixed[source]
        return fixed

    def _deal(self, workers: Sequence[int], now: Assignment, loads: Sequence[float], fixed: Mapping[int, int]) -> Deal:
        hosts = dict.fromkeys(self._running(), self._per_host)
        for source, count in fixed.items():
            hosts[now.primary[source][0]] = max(0, hosts.get(now.primary[source][0], 0) - count)
        free = [0 if source in fixed else count for source, count in enumerate(workers)]
        dealt = deal(free, now.primary, hosts, self._per_host, loads=loads)
        for spare in sorted(self._spares & set(hosts), key=self._goes_last, reverse=True):
            fewer = {host: room for host, room in hosts.items() if host != spare}
            if not dealt.further and sum(free) <= ROOMY * sum(fewer.values()):
                smaller = deal(free, now.primary, fewer, self._per_host, loads=loads)
                dealt, hosts = (smaller, fewer) if not smaller.further else (dealt, hosts)
        return dealt

    def _goes_last(self, host: int) -> tuple[bool, int]:
        """Rank spare hosts: one beside no trainers is ended first, then the one that was started last."""
        return self._table.roles[loader_name(host)].site.node.id not in self._sidecars(), host

    def _sidecars(self) -> set[str]:
        return {one.site.node.id for one in self._table.running("constructor")}

    def _assignment(self, now: Assignment, dealt: Deal) -> Assignment:
        """Return which host has what: hosts that stay keep their place, so that few groups move."""
        primary: list[tuple[int, ...]] = []
        for source, hosts in enumerate(now.primary):
            new = dealt.hosts(source)
            fixed = now.shadow[source] != NO_HOST or not new
            stay = tuple(host for host in hosts if host in new)
            primary.append(hosts if fixed else (*stay, *(host for host in new if host not in stay)))
        return Assignment(tuple(primary), now.shadow)

    def _dealt_sizes(
        self, wanted: Assignment, dealt: Deal, fixed: Mapping[int, int]
    ) -> dict[int, dict[int, tuple[int, Part]]]:
        sizes: dict[int, dict[int, tuple[int, Part]]] = {}
        for source, hosts in enumerate(wanted.primary):
            given = {hosts[0]: fixed[source]} if source in fixed else dict(dealt.places[source])
            for number, host in enumerate(hosts):
                sizes.setdefault(host, {})[source] = (given.get(host, 0), Part(number, len(hosts)))
        return sizes

    def _running(self) -> list[int]:
        return sorted(one.site.number for one in self._table.running("loader"))

    def _start_spares(self, count: int) -> int:
        """Start as many spare hosts; return how many came up."""
        came = 0
        for host in sorted(self._spares - set(self._running()))[:count]:
            one = self._table.roles[loader_name(host)]
            try:
                site = self._engine.reserve(dataclasses.replace(one.site, sources=(), shadows=()), self._sidecars())
            except Exception as error:  # rule 3
                if str(error) != self._no_room:  # told once, not at every interval
                    logger.warning("loader host %d could not be started: %s", host, error)
                self._no_room = str(error)
                break
            with self._table.lock:
                one.generation += 1
            try:
                peer, pid = self._start(one, site)
            except Exception as error:  # rule 3
                logger.warning("loader host %d could not be started: %s", host, error)
                self._engine.release(site)
                break
            self._table.came_up(one, peer, pid)
            logger.info("loader host %d was started on %s", host, one.site.node.name)
            came += 1
        return came

    def _end_spare(self, host: int) -> None:
        """End a host that has no sources left. Late callers get PeerGone and call the host that has the source now."""
        with self._table.lock:
            one = self._table.roles[loader_name(host)]
            peer, pid = one.peer, one.pid
            self._table.went_down(one, asleep=True)
            self._table.publish()
        if peer is not None:
            self._engine.kill(peer, one.site, pid)
        self._engine.release(one.site)
        self._sizes.pop(host, None)
        logger.info("loader host %d has nothing left, and was ended", host)

    def _ask(self, host: int, method: str, message: Message) -> Any:
        return self._table.peers.insist(loader_name(host), method, message)


def _launched_sizes(table: RoleTable) -> dict[int, dict[int, tuple[int, Part]]]:
    """Return the workers that the auto-partition gives each loader host, by its sources; nothing without one."""
    sites = [one.site for one in table.roles.values() if one.site.workers]
    of_source = {source: table.assignment.primary[source] for site in sites for source in site.sources}
    return {
        site.number: {
            source: (count, Part(of_source[source].index(site.number), len(of_source[source])))
            for source, count in zip(site.sources, site.workers, strict=True)
        }
        for site in sites
    }


def spares_of(options: ServiceOptions, sites: Sequence[Site]) -> tuple[list[Site], int]:
    """Return loader hosts that sleep at first, and how many workers one has room for (w_actor): all that may be fit."""
    if options.cluster is None:  # one process has room for all workers
        return [], options.worker_threads
    loaders = [site for site in sites if site.role == "loader"]
    hosts, room = len(loaders), options.workers_per_actor
    spares = 0 if options.scaling is None else max(0, -(-options.worker_threads // room) - hosts)
    like = max(loaders, key=lambda site: site.cpus)  # one that is started has the CPUs of the largest one
    asleep = [
        dataclasses.replace(like, number=hosts + number, sources=(), shadows=(), workers=(), busy_workers=0)
        for number in range(spares)
    ]
    return asleep, max(room, -(-options.worker_threads // (hosts + spares)))


# --------------------------------------------------------------------------------------------------------------
# The service process of a service whose roles run apart from it.


def unbundled(bundle: bytes, folder: Path) -> tuple[Job, ServiceOptions, list[str]]:
    """Read what the launcher sent: the job, the options, and the sources by number, with those its store knows.

    Raises:
        SpecError: for what cannot be launched.
    """
    job, options = unpack(bundle)
    options = dataclasses.replace(options, numbering=peek(options, options.store or str(folder / "store")))
    known = canonical(with_added_sources(job, options.numbering), options.numbering)
    check_launch(known, options)
    return job, options, list(known.names)


@contextlib.contextmanager
def supervised(
    engine: Engine, sites: Sequence[Site], options: ServiceOptions, folder: Path, progress: Progress, keep: KeepOptions
) -> Iterator[str]:
    """Start the roles of a service, supervise them, and end them with the context; gives the address."""
    supervisor = Supervisor(
        engine,
        sites,
        options,
        served=lambda step: progress(SERVED, step, step),
        rewound=lambda: progress(REWOUND, 0, 1),
    )
    supervisor.added.keep = keep
    scaler = service_scaler(options, supervisor.ask, supervisor.hosts.workload, supervisor.hosts.resize)

    def answer(request: Request[Any]) -> tuple[Any, list[int]]:
        found = supervisor.ask(request)
        if isinstance(request, GetStatus):
            found = Document(found.content | scaler.describe())
        return found, []

    try:
        supervisor.begin(progress)
        supervisor.watch()
        scaler.start()
        with listen(folder / CONTROL, lambda connection: answer_requests(connection, answer)):
            try:
                yield f"unix://{folder}"
            except OverlordError as error:
                supervisor.ends_for = error
        refresh_profile(options, lambda: supervisor.ask(GetStatus()).content)
    finally:
        supervisor.interrupt()  # the scaler may wait for a role
        scaler.close()
        supervisor.close()
