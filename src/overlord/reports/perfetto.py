"""Traces for Perfetto (ui.perfetto.dev): what a running service waited for, by role, source and step.

    Trace          a file of tracks with slices, instants and counters, in Perfetto's own format (TrackEvent)
    trace_of       the trace of a service from looks at its status

Rules of this file:
1. Nothing runs in the service for it: counters of its status are looked at many times a second. A wait is therefore
   placed at the end of the look it was counted in, with its exact length; the sum of a track is what status counted.
2. Slices of one track never overlap: what does not fit before the last one ended is carried over.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

MOST_RANKS = 64
"""Ranks with a track of their own: the first ones; more would hide everything else."""

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_SEQUENCE = 1
"""All packets of a trace are of one sequence."""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


class Trace:
    """Tracks and their events; times are nanoseconds since 1970.

    Example:
        >>> trace = Trace()
        >>> track = trace.track("rank 0", trace.group("trainers"))
        >>> trace.slice(track, "step 7", 1_000, 3_000)
        >>> len(trace.to_bytes()) > 40
        True
    """

    def __init__(self) -> None:
        self._packets: list[tuple[int, int, bytes]] = []
        self._tracks = 0

    def group(self, name: str) -> int:
        """Add a group of tracks, which Perfetto shows as a process; return its number."""
        return self._describe(lambda uuid: _bytes(3, _number(1, uuid) + _text(6, name)))

    def track(self, name: str, group: int) -> int:
        """Add a track for slices and instants; return its number."""
        return self._describe(lambda _: _text(2, name) + _number(5, group))

    def counter(self, name: str, group: int) -> int:
        """Add a track for numbers over time; return its number."""
        return self._describe(lambda _: _text(2, name) + _number(5, group) + _bytes(8, b""))

    def slice(self, track: int, name: str, begin: int, end: int, **facts: object) -> None:
        """Add a stretch of time, with facts about it."""
        notes = b"".join(_bytes(4, _text(10, key) + _text(6, str(value))) for key, value in facts.items())
        self._event(begin, track, _BEGIN, _text(23, name) + notes)
        self._event(end, track, _END, b"")

    def instant(self, track: int, name: str, at: int) -> None:
        """Add something that happened."""
        self._event(at, track, _INSTANT, _text(23, name))

    def count(self, counter: int, value: float, at: int) -> None:
        """Add a value of a counter."""
        self._event(at, counter, _COUNTER, _varint(44 << 3 | 1) + struct.pack("<d", value))

    def to_bytes(self) -> bytes:
        """Return the file."""
        # Of one moment, what ends comes before what begins; descriptors come first of all.
        return b"".join(_bytes(1, packet) for *_, packet in sorted(self._packets, key=lambda one: one[:2]))

    def _describe(self, content: Any) -> int:
        self._tracks += 1
        packet = _bytes(60, _number(1, self._tracks) + content(self._tracks)) + _number(10, _SEQUENCE)
        self._packets.append((-1, self._tracks, packet))
        return self._tracks

    def _event(self, at: int, track: int, kind: int, content: bytes) -> None:
        event = _bytes(11, _number(9, kind) + _number(11, track) + content)
        self._packets.append((at, 0 if kind == _END else 1, _number(8, at) + event + _number(10, _SEQUENCE)))


class _Waits:
    """A track of waits, from a counter of seconds that is looked at now and then."""

    def __init__(self, trace: Trace, track: int, counted: float, at: int) -> None:
        self._trace = trace
        self._track = track
        self._counted = counted
        self._free = at
        self.owed = 0
        """Nanoseconds that did not fit between the looks so far."""
        self.total = 0
        """Nanoseconds of all slices."""

    def look(self, counted: float, at: int, name: str) -> None:
        more = counted - self._counted
        self.owed += round(1e9 * (more if more >= 0 else counted))  # less than before: a replaced role counts anew
        self._counted = counted
        begin = max(self._free, at - self.owed)
        if self.owed > 0 and begin < at:
            self._trace.slice(self._track, name, begin, at)
            self.owed -= at - begin
            self.total += at - begin
            self._free = at


def trace_of(looks: Sequence[tuple[int, Mapping[str, Any]]]) -> tuple[Trace, dict[str, Any]]:
    """Return the trace of a service from looks at its status, and what it holds.

    Args:
        looks: (nanoseconds since 1970, status), oldest first; at least one.
    """
    trace = Trace()
    began, first = looks[0]
    trainers, planner, sources = (trace.group(name) for name in ("trainers", "planner", "sources"))
    waiting = _Waits(trace, trace.track("wait for batches", trainers), first["waited_s"], began)
    planned = trace.counter("next step", planner)
    reports = trace.track("wait for reports", planner)
    waits = {
        name: _Waits(trace, trace.track(f"{name} is waited for", sources), one["waited_s"], began)
        for name, one in first["sources"].items()
    }
    ranks: dict[str, tuple[int, int, int]] = {}
    missing: tuple[int, int] | None = None
    for at, status in looks:
        clients: Mapping[str, int] = status["clients"]
        slowest = min(clients.values(), default=status["planner"]["next_step"])
        waiting.look(status["waited_s"], at, f"step {slowest}")
        trace.count(planned, float(status["planner"]["next_step"]), at)
        for name, one in status["sources"].items():
            if name not in waits:  # it came while the service ran
                waits[name] = _Waits(trace, trace.track(f"{name} is waited for", sources), 0.0, began)
            waits[name].look(one["waited_s"], at, f"for step {status['planner']['next_step']}")
        for rank, step in clients.items():
            if rank not in ranks and len(ranks) < MOST_RANKS:
                ranks[rank] = (trace.track(f"rank {rank}", trainers), step, at)
            elif rank in ranks and ranks[rank][1] != step:
                track, old, since = ranks[rank]
                trace.slice(track, f"step {old}", since, at)
                ranks[rank] = (track, step, at)
        found = status["planner"]["waits_for_report"]
        if missing is not None and found != missing[0]:
            trace.slice(reports, f"report of step {missing[0]}", missing[1], at)
            missing = None
        if found is not None and missing is None:
            missing = (found, at)
    ended, last = looks[-1]
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
    everything = {"trainers": waiting, **waits}
    return trace, {
        "seconds": (ended - began) / 1e9,
        "looks": len(looks),
        "steps": last["planner"]["next_step"] - first["planner"]["next_step"],
        "ranks": len(ranks),
        "faults": len(faults),
        "waited_s": {name: (one.total + one.owed) / 1e9 for name, one in everything.items()},
        "drawn_s": {name: one.total / 1e9 for name, one in everything.items()},
    }
