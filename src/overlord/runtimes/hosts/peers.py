"""Roles on other hosts, behind the ports of roles: calls that are made again where a host is lost and replaced.

Rules of this file:
1. Payloads go from loader host to constructor host. The planner asks for metadata and gives out plans, nothing else.
2. One call a pair of hosts and step. The plan goes along by reference: the planner puts a slice for each host once.
   Where a slice does not do (a source has come to a loader host since, or its planner is gone), the whole plan goes.
3. A shadow is told afterwards what its primary was asked for: no caller waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from overlord.core.client_messages import Beginning, Join, RanksMissing, Request
from overlord.core.messages import (
    Follow,
    GiveUpRow,
    HandedOver,
    HandOver,
    HostNews,
    HostProgress,
    JoinRequest,
    LoaderSnapshots,
    MetaDelta,
    MetaRequest,
    MetaRequests,
    NoteFaults,
    Payload,
    PlanAnswer,
    PlanRequest,
    Rest,
    SomeSources,
    Waiting,
)
from overlord.core.plan import LoadingPlan, plan_from_bytes, plan_to_bytes
from overlord.core.samples import WHOLE, Cursor, Part
from overlord.errors import PlanError
from overlord.readers.remote.fetching import FetchCounters
from overlord.roles.assignment import NO_HOST
from overlord.roles.poisoned_rows import Verdict, poisoned_in
from overlord.roles.ports import Collect
from overlord.roles.source_loader import LoaderCounters
from overlord.runtimes.transport.engine import PeerGone, Pending
from overlord.runtimes.transport.peer_client import Call, PeerClient
from overlord.runtimes.transport.role_codec import unwrap

PLANNER = "planner"
ADDED = frozenset(
    ("workers", "samples_prepared", "busy_s", "cpu_s", "waited_s", "handed_over_bytes", "buffer_bytes", "rows_read",
     "bad", "bad_ids", "bad_rows", "wrong_length", "followed")
)  # fmt: skip
"""What is added up over the hosts of a source, where `status` tells of it."""
NO_REPORT: Mapping[str, Any] = {
    "decoded_in": "undecided", "decoded_ratio": None, **dict.fromkeys(sorted(ADDED), 0), "bad_ids": [], "bad_rows": [],
}  # fmt: skip
"""What `status` tells of a source that no host has open at this moment: it is on its way from one to another."""
MOST_UNFOLLOWED = 64
"""Requests of one source that a shadow is told of at most: the older ones lie behind its position."""

R = TypeVar("R")


def loader_name(host: int) -> str:
    """Return what a loader host is called."""
    return f"loader host {host}"


class Blobs:
    """Blocks of bytes for other hosts. These travel with the message: on one host a copy costs less than a store."""

    def put(self, block: npt.NDArray[np.uint8]) -> Any:
        """Put a block; return what it is known by."""
        return block

    def get(self, blob: Any) -> npt.NDArray[np.uint8]:
        """Return a block that was put."""
        return blob


@dataclass(frozen=True, slots=True)
class _Slices:
    """What a plan is known by, for the loader hosts that are asked for its samples."""

    generation: int
    """Of the planner that put it."""
    whole: Any
    """The whole plan; None where there are slices."""
    of_sources: list[tuple[set[int], Any]]
    """Slices by the sources that they are enough for."""


class RemotePlanner:
    """The planner, as a constructor host sees it."""

    def __init__(self, peer_client: PeerClient, blobs: Blobs | None, host: int, first_step: int) -> None:
        self._peers = peer_client
        self._blobs = blobs
        self._host = host
        self.first_step = first_step
        self.next_mesh: str | None = None
        """The mesh of the step behind the one whose plan was taken last, where it is known to have another one."""
        # For as long as the plan is in use: its columns are views into that very block.
        self._slices: WeakKeyDictionary[LoadingPlan, _Slices] = WeakKeyDictionary()
        self._news = HostNews()

    def plan(self, step: int, news: HostNews) -> LoadingPlan | Waiting | None:
        """Take the plan of a step, as far as the ranks of this host need it."""
        self._news = news
        found, self.next_mesh = self._take(step, whole=False)
        return found

    def whole_plan(self, step: int) -> LoadingPlan:
        """Take the whole plan of a step that was planned before: what ranks of other hosts need is in it too."""
        while True:
            found, _ = self._take(step, whole=True)
            if isinstance(found, LoadingPlan):
                return found
            self._peers.pause(self._peers.version, 0.1)  # a planner that came in the place of another catches up

    def _take(self, step: int, *, whole: bool) -> tuple[LoadingPlan | Waiting | None, str | None]:
        """Take a plan; also return the mesh of the step behind it, where that is another one."""
        while True:
            generation = self._peers.generation(PLANNER)
            request = PlanRequest(step, self._host, self._news, whole)
            answer: PlanAnswer = self._peers.insist(PLANNER, "plan", request)
            if answer.waits is not None or answer.plan is None or self._blobs is None:
                return answer.waits or answer.plan, answer.next_mesh
            mine, *others = answer.plan
            try:
                plan = plan_from_bytes(memoryview(self._blobs.get(mine)))  # type: ignore[arg-type]
            except PeerGone:
                self._peers.pause(self._peers.version, 0.1)  # it went with the planner that had put it
                continue
            slices = list(zip(map(set, answer.loaders), others, strict=True))
            self._slices[plan] = _Slices(generation, mine if plan.ranks is None else None, slices)
            return plan, answer.next_mesh

    def blob_of(self, plan: LoadingPlan, sources: Collection[int]) -> Any:
        """Return what messages hold of a plan that was taken here, for a loader host that has some sources."""
        if self._blobs is None:
            return plan
        known, newest = self._slices[plan], self._peers.generation(PLANNER)
        if known.generation != newest and plan.ranks is None:  # what its planner had put may have gone with it
            block = self._blobs.put(np.frombuffer(plan_to_bytes(plan), np.uint8))
            known = self._slices[plan] = _Slices(newest, block, [])
        if known.whole is not None:
            return known.whole
        fitting = [blob for of, blob in known.of_sources if of.issuperset(sources)]
        if fitting and known.generation == newest:
            return fitting[0]
        found = self.whole_plan(plan.step)
        if found.digest != plan.digest:
            raise PlanError(
                f"step {plan.step} was planned anew, and differently; ranks would train on different samples. Is the "
                "strategy a pure function of (buffer, tree)?"
            )
        self._slices[plan] = known = self._slices[found]
        return known.whole

    def ask(self, request: Request[R]) -> R:
        """Pass on what a client asks or tells."""
        return self._peers.insist(PLANNER, "ask", request)

    def join(self, join: Join, news: HostNews) -> Beginning | RanksMissing:
        """Ask to let a rank go on at a step."""
        return self._peers.insist(PLANNER, "join", JoinRequest(join, self._host, news))

    def tell(self, news: HostNews) -> None:
        """Tell how far the clients of this host are."""
        self._peers.insist(PLANNER, "tell", HostProgress(self._host, news))


_Asked = tuple[int, Part]
"""A part of a source."""


class _Round:
    """One message to all hosts that have some parts of sources; what is lost goes to the hosts that have it by then."""

    def __init__(
        self,
        peer_client: PeerClient,
        method: str,
        parts: Sequence[_Asked],
        message: Callable[[Sequence[_Asked]], Any],
    ) -> None:
        self._peers = peer_client
        self._method = method
        self._message = message
        self._calls: list[tuple[str, Sequence[_Asked], Call]] = []
        self._ask(parts)

    def _ask(self, parts: Sequence[_Asked]) -> None:
        membership, of_host = self._peers.membership, dict[str, list[_Asked]]()
        for asked in parts:
            of_host.setdefault(loader_name(membership.assignment.host_of(*asked)), []).append(asked)
        # Hosts that are there are asked first, and do not wait for those that are being replaced.
        for name in sorted(of_host, key=lambda name: name not in membership.peers):
            self._calls.append((name, of_host[name], self._peers.ask(name, self._method, self._message(of_host[name]))))

    def answers(self) -> Iterator[tuple[str, Any]]:
        """Wait for all of them: (name of the host, its answer). An error of one is raised."""
        while self._calls:
            lost: list[_Asked] = []
            for name, part, call in self._calls:
                answer = call.get()
                if answer is None:
                    lost += part
                else:
                    yield name, unwrap(answer)
            self._calls.clear()  # the engine lets go of what came with them
            self._ask(lost)


class RemoteLoaders:
    """All SourceLoaders of a job, on the hosts that have them at the moment."""

    def __init__(self, peer_client: PeerClient, planner: RemotePlanner | None = None) -> None:
        self._peers = peer_client
        self._planner = planner
        self._buffer_bytes: dict[str, int] = {}
        self._unfollowed: dict[int, list[MetaRequest]] = {}
        self._following: dict[str, Pending] = {}
        self.requests_made = self.metadata_bytes = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes that the fullest loader host held when it last answered."""
        return max(self._buffer_bytes.values(), default=0)

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Ask every host that has some of the sources, at once."""
        asked = {request.source: request for request in requests}
        found: dict[int, MetaDelta] = {}
        assignment = self._peers.membership.assignment
        parts = [
            next((r.source, part) for part in assignment.parts_of(r.source) if part.has(r.cursor.group))
            for r in requests
        ]

        def message(part: Sequence[_Asked]) -> MetaRequests:
            return MetaRequests([asked[source] for source, _ in part])

        for answer in self._ask_all("summary_buffer", parts, message):
            found.update((delta.source, delta) for delta in answer.deltas)
        self.requests_made += len(requests)
        for delta in found.values():
            self.metadata_bytes += delta.meta.nbytes + (0 if delta.items is None else delta.items.nbytes)
        shadow = self._peers.membership.assignment.shadow
        for request in requests:
            if shadow[request.source] != NO_HOST:
                behind = self._unfollowed.setdefault(request.source, [])
                behind.append(request)
                del behind[:-MOST_UNFOLLOWED]
        return [found[request.source] for request in requests]

    def loader_do_plan(self, plan: LoadingPlan, ranks: Collection[int]) -> Collect:
        """Ask every host that a plan draws from; the payloads come straight from there."""
        assert self._planner is not None, "only a constructor host asks for payloads"
        planner, asking = self._planner, sorted(ranks)
        asked = _Round(
            self._peers,
            "hand_over",
            self._drawn(plan),
            lambda part: HandOver(asking, list(part), plan=planner.blob_of(plan, {source for source, _ in part})),
        )

        def collect() -> list[Payload]:
            payloads: list[Payload] = []
            for host, answer in asked.answers():
                handed: HandedOver = answer
                payloads += handed.payloads
                self._buffer_bytes[host] = handed.buffer_bytes
            by_source = groupby(sorted(payloads, key=lambda payload: payload.source), lambda payload: payload.source)
            return [Payload.joined(list(parts)) for _, parts in by_source]

        return collect

    def _drawn(self, plan: LoadingPlan) -> list[_Asked]:
        """Return the parts of sources that a plan draws from."""
        sources, meta = plan.drawn
        drawn = np.unique(sources).tolist()
        parts = {source: self._peers.membership.assignment.parts_of(source) for source in drawn}
        return [(s, p) for s in drawn for p in parts[s] if len(parts[s]) == 1 or len(p.rows(meta[sources == s]))]

    def _all_parts(self, sources: Iterable[int] | None = None) -> list[_Asked]:
        assignment = self._peers.membership.assignment
        chosen = range(len(assignment.primary)) if sources is None else sources
        return [(source, part) for source in chosen for part in assignment.parts_of(source)]

    def follow(self, passed: Mapping[int, Cursor]) -> None:
        """Let shadows read what their primaries were asked for, and drop what every trainer has passed."""
        membership = self._peers.membership
        for name, peer in membership.peers.items():
            shadows = enumerate(membership.assignment.shadow)
            mine = [source for source, host in shadows if host != NO_HOST and loader_name(host) == name]
            try:
                if not mine or (name in self._following and self._following[name].poll(0) is None):
                    continue  # it is still busy with the last ones; these wait for the next time
                requests = [request for source in mine for request in self._unfollowed.pop(source, ())]
                message = Follow(requests, {source: passed[source] for source in mine if source in passed})
                self._following[name] = peer.ask("follow", message, self._peers.me)
            except PeerGone:
                self._following.pop(name, None)  # the supervisor sees it too, and raises another shadow

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Tell hosts that nothing is drawn from some of their sources for now."""

        def message(part: Sequence[_Asked]) -> Rest:
            return Rest({source: cursors[source] for source, _ in part})

        self._tell_all("rest", self._all_parts(cursors), message)

    def note_faults(self, faults: Sequence[tuple[int, int, int, str]]) -> None:
        """Tell hosts of samples whose media do not decode."""

        def message(part: Sequence[_Asked]) -> NoteFaults:
            sources = {source for source, _ in part}
            return NoteFaults([fault for fault in faults if fault[0] in sources])

        counted = [(source, WHOLE) for source in sorted({fault[0] for fault in faults})]  # by one of its hosts
        self._tell_all("note_faults", counted, message)

    def status(self) -> tuple[dict[int, dict[str, Any]], dict[str, float], dict[str, int]]:
        """Return what loaders report of every source, of requests to remote stores, and of the memory they hold."""
        found: dict[int, dict[str, Any]] = {}
        fetched, memory = FetchCounters(), Counter[str]()
        for answer in self._ask_all("status", self._all_parts(), _sources_of):
            fetched.merge(answer.fetched)
            memory.update(answer.memory)
            for source, one in answer.sources.items():
                add_up(found, source, one)
        return dict(sorted(found.items())), fetched.report(), dict(memory)

    def snapshot(self) -> dict[str, Any]:
        """Return what the loaders of every source have met, by its name."""
        found: dict[str, Any] = {}
        for answer in self._ask_all("snapshot", self._all_parts(), _sources_of):
            for name, met in answer.loaders.items():
                parts = [LoaderCounters.from_json(one) for one in (found.get(name), met) if one is not None]
                found[name] = LoaderCounters.joined(parts).to_json()
        return found

    def restore(self, loaders: Mapping[str, Any]) -> None:
        """Tell every host what loaders had met; it takes what is of its sources."""
        self._tell_all("restore", self._all_parts(), lambda _: LoaderSnapshots(dict(loaders)))

    def _ask_all(
        self, method: str, parts: Sequence[_Asked], message: Callable[[Sequence[_Asked]], Any]
    ) -> Iterator[Any]:
        return (answer for _, answer in _Round(self._peers, method, parts, message).answers())

    def _tell_all(self, method: str, parts: Sequence[_Asked], message: Callable[[Sequence[_Asked]], Any]) -> None:
        for _ in self._ask_all(method, parts, message):
            pass


class RemoteVerdicts:
    """The verdicts of some sources, which the planner writes down."""

    def __init__(self, peer_client: PeerClient, known: Mapping[str, Mapping[int, Verdict]]) -> None:
        self._peers = peer_client
        self._given_up = {source: dict(rows) for source, rows in known.items()}

    def add(self, source: str, row: int, reason: str, epoch: int = 0) -> None:
        """Give up a row from an epoch on; the planner has it on disk when this returns."""
        if row not in self._given_up.get(source, ()):
            self._peers.insist(PLANNER, "verdict", GiveUpRow(source, row, reason, epoch))
            self._given_up[source] = {**self._given_up.get(source, {}), row: Verdict(reason, epoch)}

    def known(self, source: str, rows: npt.NDArray[np.int64], epoch: int = 0) -> npt.NDArray[np.bool_]:
        """Return which rows of a source are given up in an epoch."""
        return poisoned_in(self._given_up.get(source, {}), rows, epoch)

    def reason(self, source: str, row: int) -> str:
        """Return why a row was given up."""
        return self._given_up[source][row].reason


def add_up(found: dict[int, dict[str, Any]], source: int, one: dict[str, Any]) -> None:
    """Add what one of a source's hosts tells to what the others told.

    Example:
        >>> found = {3: {"workers": 2, "format": "jsonl"}}
        >>> add_up(found, 3, {"workers": 1, "format": "jsonl"})
        >>> found
        {3: {'workers': 3, 'format': 'jsonl'}}
    """
    known = found.setdefault(source, one)
    if known is not one:
        known |= {key: known[key] + one[key] for key in one if key in ADDED}


def _sources_of(part: Sequence[_Asked]) -> SomeSources:
    return SomeSources(sorted({source for source, _ in part}))
