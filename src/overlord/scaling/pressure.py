"""What a host is short of: its CPUs, its memory or its disks, from counters of its kernel at two moments.

A source that is waited for on a host whose CPUs are full does not get faster with more workers. So every diagnosis
looks at the hosts first (`shortages`), and names a source only where more workers help (`autoscaler.find_bottleneck`).
Counters are read by `runtimes/hosts/host_counters.py`; what the kernel does not tell is None, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CPUS_FULL = 0.95
"""Share of its CPU time that a host uses, from which its CPUs are full."""
THROTTLED = 0.1
"""Share of the time that a control group was stopped for its quota, from which the quota is the limit."""
STALLED = 0.5
"""Share of the time in which some process waits for a CPU, from which they are full, if nothing else is known."""
OVERLOADED = 1.5
"""The same of the load average, per CPU."""
MEMORY_STALLED = 0.1
"""Share of the time that all processes of a host wait for memory, from which it is short."""
MEMORY_LEFT = 0.03
"""Share of the memory that is available, below which it is short."""
DISKS_STALLED = 0.5
"""Share of the time that all processes of a host wait for its disks, from which they are the limit."""
DISK_LEFT = 64 << 20
"""Bytes free in a file system, below which it is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCounters:
    """What the kernel of a host has counted by a moment, for the processes of one control group."""

    machine: str = ""
    """Its name in the network."""
    at: float
    """Seconds of a monotonic clock."""
    cpus: float = 1.0
    """CPUs that the processes may use."""
    busy_s: float | None = None
    """CPU seconds that those CPUs were in use, by any process."""
    used_s: float | None = None
    """CPU seconds that the control group has used, where it has a quota."""
    throttled_s: float | None = None
    """Seconds that it was stopped since its quota was used up."""
    load: float | None = None
    """Load average of the last minute."""
    cpu_stalled_s: float | None = None
    """Seconds in which some process waited for a CPU."""
    memory_stalled_s: float | None = None
    """Seconds in which all processes waited for memory."""
    io_stalled_s: float | None = None
    """Seconds in which all processes waited for disks."""
    memory_bytes: int | None = None
    memory_available: int | None = None
    oom_kills: int | None = None
    """Processes that were killed for want of memory."""
    disks: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes free where the service writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How a host did between two moments; shares are from 0 to 1."""

    cpus: float = 1.0
    busy: float | None = None
    """Share of the CPUs' time that was used; of the quota, where that is the limit."""
    throttled: float | None = None
    load: float | None = None
    cpu_stalled: float | None = None
    memory_stalled: float | None = None
    io_stalled: float | None = None
    memory_bytes: int | None = None
    memory_available: int | None = None
    oom_kills: int = 0
    disks: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def spare_cpus(self) -> float:
        """CPUs that more workers could use; 0 where they are full, and all of them where nothing is known."""
        if _cpu_words(self):
            return 0.0
        return self.cpus * (1 - (self.busy or 0.0))


Resource = Literal["cpu", "memory", "disk", "space"]


@dataclass(frozen=True, slots=True)
class Shortage:
    """Something that a host is short of."""

    resource: Resource
    words: str
    """A clause that names it."""


def pressure_between(before: HostCounters, now: HostCounters) -> Pressure:
    """Return how a host did between two moments.

    Example:
        >>> first = HostCounters(at=10.0, cpus=2.0, busy_s=100.0)
        >>> pressure_between(first, HostCounters(at=20.0, cpus=2.0, busy_s=119.0)).busy
        0.95
    """
    seconds = max(now.at - before.at, 1e-9)

    def share(old: float | None, new: float | None, of: float = 1.0) -> float | None:
        return None if old is None or new is None else round(min(max((new - old) / (seconds * of), 0.0), 1.0), 4)

    of_host, of_quota = share(before.busy_s, now.busy_s, now.cpus), share(before.used_s, now.used_s, now.cpus)
    killed = 0 if before.oom_kills is None or now.oom_kills is None else now.oom_kills - before.oom_kills
    return Pressure(
        cpus=now.cpus,
        busy=max((one for one in (of_host, of_quota) if one is not None), default=None),
        throttled=share(before.throttled_s, now.throttled_s),
        load=now.load,
        cpu_stalled=share(before.cpu_stalled_s, now.cpu_stalled_s),
        memory_stalled=share(before.memory_stalled_s, now.memory_stalled_s),
        io_stalled=share(before.io_stalled_s, now.io_stalled_s),
        memory_bytes=now.memory_bytes,
        memory_available=now.memory_available,
        oom_kills=max(killed, 0),
        disks=now.disks,
    )


def shortages(pressure: Pressure, host: str = "this host") -> list[Shortage]:
    """Return what a host is short of, the most serious first.

    Example:
        >>> [one.words for one in shortages(Pressure(cpus=2.0, busy=0.99, load=33.0))]
        ['the CPUs of this host are full (2 CPUs, 99 % in use, load 33)']
    """
    found = [
        Shortage("space", f"the disk of {place} on this host is full ({free / 1e6:.0f} MB left)")
        for place, free in sorted(pressure.disks.items())
        if free < DISK_LEFT
    ]
    clauses: tuple[tuple[Resource, str], ...] = (
        ("memory", _memory_words(pressure)), ("cpu", _cpu_words(pressure)), ("disk", _disk_words(pressure)),
    )  # fmt: skip
    found += [Shortage(resource, words) for resource, words in clauses if words]
    return [Shortage(one.resource, one.words.replace("this host", host)) for one in found]


def _cpu_words(pressure: Pressure) -> str:
    cpus = f"{pressure.cpus:g} CPU{'' if pressure.cpus == 1 else 's'}"
    if (pressure.throttled or 0.0) >= THROTTLED:
        return (
            f"the CPU quota on this host is used up ({cpus}; processes are stopped "
            f"{100 * (pressure.throttled or 0.0):.0f} % of the time)"
        )
    # The time in use says it best. A kernel that does not tell it may tell of waits, or at least of a load.
    full = (
        pressure.busy >= CPUS_FULL
        if pressure.busy is not None
        else pressure.cpu_stalled >= STALLED
        if pressure.cpu_stalled is not None
        else (pressure.load or 0.0) >= OVERLOADED * pressure.cpus
    )
    if not full:
        return ""
    facts = [cpus]
    facts += [] if pressure.busy is None else [f"{100 * pressure.busy:.0f} % in use"]
    facts += [] if pressure.load is None else [f"load {pressure.load:.3g}"]
    return f"the CPUs of this host are full ({', '.join(facts)})"


def _memory_words(pressure: Pressure) -> str:
    left, total = pressure.memory_available, pressure.memory_bytes
    short = left is not None and total is not None and left < MEMORY_LEFT * total
    stalled = pressure.memory_stalled or 0.0
    if not (short or stalled >= MEMORY_STALLED or pressure.oom_kills):
        return ""
    facts = [] if left is None or total is None else [f"{left / 1e9:.2g} of {total / 1e9:.3g} GB available"]
    facts += [f"processes wait for it {100 * stalled:.0f} % of the time"] if stalled >= MEMORY_STALLED else []
    kills = pressure.oom_kills
    facts += [f"{kills} process{'' if kills == 1 else 'es'} killed for want of it"] if kills else []
    return f"the memory of this host is short ({', '.join(facts)})"


def _disk_words(pressure: Pressure) -> str:
    stalled = pressure.io_stalled or 0.0
    if stalled < DISKS_STALLED:
        return ""
    return f"the disks of this host are busy (processes wait for them {100 * stalled:.0f} % of the time)"
