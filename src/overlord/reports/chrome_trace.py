"""Traces of a running service, as Chrome's trace event JSON: what was waited for, by role, source and step.

    Trace          tracks with slices, instants and counters; ui.perfetto.dev and chrome://tracing open the file
    trace_of       the trace of a service from snapshots of its status

Rules of this file:
1. Nothing runs in the service for it: counters of its status are polled many times a second. A wait is therefore
   placed at the end of the interval that counted it, with its exact length; the sum of a track is what status counted.
2. Slices of one track never overlap: what does not fit before the last one ended is carried over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

MAX_RANKS = 64
"""Ranks with a track of their own: the first ones; more would hide everything else."""


class Track(NamedTuple):
    """Where an event belongs: viewers show a group as a process, and a track as one of its threads."""

    group: int
    number: int
    name: str


class Trace:
    """Tracks and their events; times are nanoseconds since 1970.

    Example:
        >>> trace = Trace(began=1_000)
        >>> track = trace.track("rank 0", trace.group("trainers"))
        >>> trace.slice(track, "step 7", 1_000, 3_000)
        >>> json.loads(trace.to_json())["traceEvents"][-1]
        {'ph': 'X', 'pid': 1, 'tid': 1, 'name': 'step 7', 'ts': 0.0, 'dur': 2.0, 'args': {}}
    """

    def __init__(self, began: int) -> None:
        self._began = began
        self._described: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._groups = self._tracks = 0

    def group(self, name: str) -> int:
        """Add a group of tracks; return its number."""
        self._groups += 1
        self._described.append({"ph": "M", "pid": self._groups, "name": "process_name", "args": {"name": name}})
        return self._groups

    def track(self, name: str, group: int) -> Track:
        """Add a track for slices and instants."""
        self._tracks += 1
        track = Track(group, self._tracks, name)
        args = {"name": name}
        self._described.append({"ph": "M", "pid": group, "tid": track.number, "name": "thread_name", "args": args})
        return track

    def slice(self, track: Track, name: str, begin: int, end: int, **facts: object) -> None:
        """Add a period of time, with facts about it."""
        self._add("X", track, name, begin, dur=(end - begin) / 1000, args=facts)

    def instant(self, track: Track, name: str, at: int) -> None:
        """Add something that happened."""
        self._add("i", track, name, at, s="t")

    def count(self, name: str, group: int, value: float, at: int) -> None:
        """Add a value of a counter, which has a track by its name."""
        self._add("C", Track(group, 0, name), name, at, args={name: value})

    def to_json(self) -> str:
        """Return the content of the file."""
        began = datetime.fromtimestamp(self._began / 1e9, UTC).isoformat()
        events = self._described + sorted(self._events, key=lambda event: event["ts"])
        return json.dumps({"displayTimeUnit": "ms", "otherData": {"began": began}, "traceEvents": events})

    def _add(self, kind: str, track: Track, name: str, at: int, **content: Any) -> None:
        # In microseconds since the trace began: those since 1970 have no digits left for parts of a microsecond.
        since = (at - self._began) / 1000
        self._events.append({"ph": kind, "pid": track.group, "tid": track.number, "name": name, "ts": since} | content)


class _Waits:
    """A track of waits, from a counter of seconds that is polled."""

    def __init__(self, trace: Trace, track: Track, counted: float, at: int) -> None:
        self._trace = trace
        self._track = track
        self._counted = counted
        self._free = at
        self.owed = 0
        """Nanoseconds that did not fit into the intervals so far."""
        self.total = 0
        """Nanoseconds of all slices."""

    def update(self, counted: float, at: int, name: str) -> None:
        more = counted - self._counted
        self.owed += round(1e9 * (more if more >= 0 else counted))  # less than before: a replaced role counts anew
        self._counted = counted
        begin = max(self._free, at - self.owed)
        if self.owed > 0 and begin < at:
            self._trace.slice(self._track, name, begin, at)
            self.owed -= at - begin
            self.total += at - begin
            self._free = at


def trace_of(snapshots: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[Trace, dict[str, Any]]:
    """Return the trace of a service from snapshots of its status, and a summary.

    Args:
        snapshots: (nanoseconds since 1970, status), oldest first; at least one.
    """
    began, first = snapshots[0]
    trace = Trace(began)
    trainers, planner, sources = (trace.group(name) for name in ("trainers", "planner", "sources"))
    waiting = _Waits(trace, trace.track("wait for batches", trainers), first["waited_s"], began)
    reports = trace.track("wait for reports", planner)
    waits = {
        name: _Waits(trace, trace.track(f"{name} is waited for", sources), source["waited_s"], began)
        for name, source in first["sources"].items()
    }
    ranks: dict[str, tuple[Track, int, int]] = {}
    missing: tuple[int, int] | None = None
    for at, status in snapshots:
        clients: Mapping[str, int] = status["clients"]
        slowest = min(clients.values(), default=status["planner"]["next_step"])
        waiting.update(status["waited_s"], at, f"step {slowest}")
        trace.count("next step", planner, status["planner"]["next_step"], at)
        for name, source in status["sources"].items():
            if name not in waits:  # it was added while the service ran
                waits[name] = _Waits(trace, trace.track(f"{name} is waited for", sources), 0.0, began)
            waits[name].update(source["waited_s"], at, f"for step {status['planner']['next_step']}")
        for rank, step in clients.items():
            if rank not in ranks and len(ranks) < MAX_RANKS:
                ranks[rank] = (trace.track(f"rank {rank}", trainers), step, at)
            elif rank in ranks and ranks[rank][1] != step:
                track, old, since = ranks[rank]
                trace.slice(track, f"step {old}", since, at)
                ranks[rank] = (track, step, at)
        report = status["planner"]["waits_for_report"]
        if missing is not None and report != missing[0]:
            trace.slice(reports, f"report of step {missing[0]}", missing[1], at)
            missing = None
        if report is not None and missing is None:
            missing = (report, at)
    ended, last = snapshots[-1]
    for track, step, since in ranks.values():
        if since < ended:
            trace.slice(track, f"step {step}", since, ended)
    if missing is not None and missing[1] < ended:
        trace.slice(reports, f"report of step {missing[0]}", missing[1], ended)
    faults = [fault for fault in last.get("faults") or () if began <= 1e9 * fault["at"] <= ended]
    hosts = trace.group("roles") if faults else 0
    tracks = {role: trace.track(role, hosts) for role in sorted({fault["role"] for fault in faults})}
    for fault in faults:
        at = round(1e9 * fault["at"])
        if "took_s" in fault:
            trace.slice(tracks[fault["role"]], "replaced", at, at + round(1e9 * fault["took_s"]), why=fault["why"])
        else:
            trace.instant(tracks[fault["role"]], fault["why"], at)
    tracks_of_waits = {"trainers": waiting, **waits}
    return trace, {
        "seconds": (ended - began) / 1e9,
        "snapshots": len(snapshots),
        "steps": last["planner"]["next_step"] - first["planner"]["next_step"],
        "ranks": len(ranks),
        "faults": len(faults),
        "waited_s": {name: (track.total + track.owed) / 1e9 for name, track in tracks_of_waits.items()},
        "drawn_s": {name: track.total / 1e9 for name, track in tracks_of_waits.items()},
    }
