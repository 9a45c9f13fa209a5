"""Roles on other hosts, behind the ports that roles ask: frames go out, and an answer must come within a deadline.

Rules of this file:
1. Payloads go from loader host to constructor host. The planner asks for metadata and gives out plans, nothing else.
2. One call a pair of hosts and step. The plan goes along by reference: it was put once, and every host reads it there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from overlord.core.messages import MetaDelta, MetaRequest, Payload
from overlord.core.plan import LoadingPlan
from overlord.core.plan_blob import plan_from_bytes
from overlord.core.samples import Cursor
from overlord.roles.ports import Collect
from overlord.runtimes.frames import (
    Frame,
    deltas_from_frame,
    frame_bytes,
    frame_of,
    open_frame,
    payloads_from_frame,
    requests_to_frame,
)
from overlord.runtimes.planner_host import HostNews, Waiting


class Pending(Protocol):
    """An answer that is under way."""

    def get(self) -> Frame:
        """Wait for it, up to the deadline.

        Raises:
            ServiceLost: when the other side is gone or too slow.
        """
        ...


class Peer(Protocol):
    """A role on another host."""

    def ask(self, method: str, frame: Frame, blob: Any = None) -> Pending:
        """Call a method of the role; a blob goes by reference."""
        ...


class Blobs(Protocol):
    """Blocks of bytes that are put once and read on any host."""

    def put(self, block: npt.NDArray[np.uint8]) -> Any:
        """Put a block; return what it is known by."""
        ...

    def get(self, blob: Any) -> npt.NDArray[np.uint8]:
        """Return a block that somebody put."""
        ...


class RemotePlanner:
    """The planner, as a constructor host sees it."""

    def __init__(self, peer: Peer, blobs: Blobs, host: int, first_step: int) -> None:
        self._peer = peer
        self._blobs = blobs
        self._host = host
        self.first_step = first_step
        # As long as anybody holds the plan: its columns are views into that very block.
        self._blob_of: WeakKeyDictionary[LoadingPlan, Any] = WeakKeyDictionary()

    def plan(self, step: int, news: HostNews) -> LoadingPlan | Waiting | None:
        """Take the plan of a step."""
        head, blob = self._ask(step, news)
        if head["missing"] is not None:
            return Waiting(head["missing"])
        if blob is None:
            return None
        plan = plan_from_bytes(memoryview(self._blobs.get(blob)))  # type: ignore[arg-type]
        self._blob_of[plan] = blob
        return plan

    def blob_of(self, plan: LoadingPlan) -> Any:
        """Return the reference of a plan that was taken here."""
        return self._blob_of[plan]

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Pass on what a client asks or tells."""
        return open_frame(self._peer.ask("ask", frame_of(message)).get())[0]["answer"]

    def tell(self, news: HostNews) -> None:
        """Tell how far the clients of this host are."""
        open_frame(self._peer.ask("tell", frame_of({"host": self._host, "news": news_to_json(news)})).get())

    def _ask(self, step: int, news: HostNews) -> tuple[dict[str, Any], Any]:
        message = {"step": step, "host": self._host, "news": news_to_json(news)}
        head, rest = open_frame(self._peer.ask("plan", frame_of(message)).get())
        return head, next(rest, None)


class RemoteLoaders:
    """All SourceLoaders of a job, on the hosts they live on."""

    def __init__(self, peers: Sequence[Peer], host_of: Sequence[int], planner: RemotePlanner | None = None) -> None:
        self._peers = peers
        self._host_of = host_of
        """The loader host of each source."""
        self._planner = planner
        self._buffer_bytes = dict.fromkeys(range(len(peers)), 0)
        self.bytes_out = self.bytes_in = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes that the fullest loader host held when it last answered."""
        return max(self._buffer_bytes.values(), default=0)

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Ask every host that owns some of the sources, at once."""
        found: dict[int, MetaDelta] = {}
        asked = self._split(requests, [request.source for request in requests])
        for answer in self._ask_all("summary_buffer", {host: requests_to_frame(part) for host, part in asked.items()}):
            found.update((delta.source, delta) for delta in deltas_from_frame(answer))
        return [found[request.source] for request in requests]

    def loader_do_plan(self, plan: LoadingPlan, ranks: Collection[int]) -> Collect:
        """Ask every host that a plan draws from; the payloads come straight from there."""
        assert self._planner is not None, "only a constructor host asks for payloads"
        drawn = np.flatnonzero(np.diff(plan.draw.by_source[1])).tolist()
        blob, message = self._planner.blob_of(plan), frame_of({"ranks": sorted(ranks)})
        hosts = sorted({self._host_of[source] for source in drawn})
        pending = {host: self._peers[host].ask("hand_over", message, blob) for host in hosts}

        def collect() -> list[Payload]:
            payloads: list[Payload] = []
            for host, answer in pending.items():
                part, facts = payloads_from_frame(answer.get())
                payloads += part
                self._buffer_bytes[host] = facts["buffer_bytes"]
            pending.clear()  # the engine lets go of what came with them
            return sorted(payloads, key=lambda payload: payload.source)

        return collect

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Tell hosts that nothing is drawn from some of their sources for now."""
        asked = self._split(list(cursors.items()), list(cursors))
        messages = {host: {"cursors": [[s, list(cursor)] for s, cursor in part]} for host, part in asked.items()}
        for answer in self._ask_all("rest", {host: frame_of(message) for host, message in messages.items()}):
            open_frame(answer)

    def note_faults(self, faults: Sequence[tuple[int, int, int, str]]) -> None:
        """Tell hosts of samples whose media do not decode."""
        asked = self._split(faults, [fault[0] for fault in faults])
        for answer in self._ask_all("note_faults", {h: frame_of({"faults": part}) for h, part in asked.items()}):
            open_frame(answer)

    def status(self) -> dict[int, dict[str, Any]]:
        """Return what the loaders of every source hold and have met."""
        found: dict[int, dict[str, Any]] = {}
        for answer in self._ask_all("status", {host: frame_of({}) for host in range(len(self._peers))}):
            found.update((int(source), one) for source, one in open_frame(answer)[0]["sources"].items())
        return dict(sorted(found.items()))

    def _split(self, items: Sequence[Any], sources: Sequence[int]) -> dict[int, list[Any]]:
        parts: dict[int, list[Any]] = {}
        for item, source in zip(items, sources, strict=True):
            parts.setdefault(self._host_of[source], []).append(item)
        return parts

    def _ask_all(self, method: str, frames: Mapping[int, Frame]) -> list[Frame]:
        pending = [self._peers[host].ask(method, frame) for host, frame in frames.items()]
        answers = [one.get() for one in pending]
        self.bytes_out += sum(frame_bytes(frame) for frame in frames.values())
        self.bytes_in += sum(frame_bytes(answer) for answer in answers)
        return answers


class RemoteVerdicts:
    """The verdicts of some sources, which the planner writes down."""

    def __init__(self, peer: Peer, known: Mapping[str, Mapping[int, str]]) -> None:
        self._peer = peer
        self._reasons = {source: dict(rows) for source, rows in known.items()}

    def add(self, source: str, row: int, reason: str) -> None:
        """Give up a row; the planner has it on disk when this returns."""
        if row not in self._reasons.get(source, ()):
            open_frame(self._peer.ask("verdict", frame_of({"source": source, "row": row, "reason": reason})).get())
            self._reasons.setdefault(source, {})[row] = reason

    def known(self, source: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which rows of a source are given up."""
        return np.isin(rows, np.array(list(self._reasons.get(source, ())), np.int64))

    def reason(self, source: str, row: int) -> str:
        """Return why a row was given up."""
        return self._reasons[source][row]


def news_to_json(news: HostNews) -> dict[str, Any]:
    """Return what a host tells of itself as JSON."""
    by_rank = {"reached": news.reached, "positions": news.positions}
    named = {name: {str(rank): step for rank, step in given.items()} for name, given in by_rank.items()}
    return {**named, "view_bytes": news.view_bytes, "told": news.told_missing}


def news_from_json(given: Mapping[str, Any]) -> HostNews:
    """Read what a host tells of itself."""
    reached, positions = ({int(rank): step for rank, step in given[n].items()} for n in ("reached", "positions"))
    return HostNews(reached, positions, given["view_bytes"], given["told"])
