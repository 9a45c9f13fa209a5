"""Reads what the kernel of this host counts of its CPUs, memory and disks, for `scaling/pressure.py`.

Sources, each of which may be missing (in a container, with an old kernel, in a sandbox):

    /proc/stat                      how long each CPU was in use; only those in the affinity mask of this process count
    cpu.stat, cpu.max, cpuacct      of the control groups, version 1 or 2: what a quota of CPU time leaves
    /proc/pressure, *.pressure      pressure stall information, of the control group where it has its own
    /proc/loadavg                   for kernels that tell none of these
    /proc/meminfo, memory.*         the memory that is available, to the host or to the control group
    statvfs                         the space that is left where the service writes
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from overlord.runtimes.supervision.child import control_groups, usable_cpus
from overlord.scaling.pressure import HostCounters

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)
"""Columns of a CPU in /proc/stat that are idle time: idle, iowait."""
_COUNTED = 8
"""Columns that are time of their own; guests' are counted twice, as user time too."""


def read_host_counters(writes_to: Iterable[str | Path] = (), root: Path = Path("/")) -> HostCounters:
    """Return what the kernel has counted so far.

    Args:
        writes_to: Folders in which the service writes.
        root: Where `proc` and `sys` are.
    """
    groups, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    cpu, memory = (list(control_groups(name, groups, own)) for name in ("cpu", "memory"))
    accounts, io = (list(control_groups(name, groups, own)) for name in ("cpuacct", "io"))
    quota, limited = _quota(cpu)
    total, available = _memory(root, memory)
    return HostCounters(
        machine=os.uname().nodename,
        at=time.monotonic(),
        cpus=min(float(usable_cpus(groups, own)), quota),
        busy_s=_busy_s(root),
        used_s=None if limited is None else _used_s([limited], accounts),
        throttled_s=_throttled_s(cpu),
        load=_first_number(root / "proc/loadavg"),
        cpu_stalled_s=_stalled_s(root, "cpu", cpu, "some"),
        memory_stalled_s=_stalled_s(root, "memory", memory, "full"),
        io_stalled_s=_stalled_s(root, "io", io, "full"),
        memory_bytes=total,
        memory_available=available,
        oom_kills=_oom_kills(root, memory),
        disks=_free_bytes(writes_to),
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _first_number(path: Path) -> float | None:
    try:
        return float((_text(path) or "").split()[0])
    except (IndexError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    """Return a file of lines "name value", or "name: value kB", in its own units."""
    found: dict[str, int] = {}
    for line in (_text(path) or "").splitlines():
        parts = line.split()
        if len(parts) >= 2 and parts[1].isdecimal():
            found[parts[0].rstrip(":")] = int(parts[1])
    return found


def _busy_s(root: Path) -> float | None:
    """Return how long the CPUs that this process may run on were in use, all of them together."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks, idle = 0, 0
    for line in (_text(root / "proc/stat") or "").splitlines():
        name, *columns = line.split()
        if name in mine:
            counted = [int(column) for column in columns[:_COUNTED]]
            ticks += sum(counted)
            idle += sum(counted[at] for at in _IDLE if at < len(counted))
    return (ticks - idle) / _TICKS if ticks else None  # a sandbox has the file, and only zeros in it


def _quota(groups: Sequence[Path]) -> tuple[float, Path | None]:
    """Return the CPUs that the tightest quota allows, which may be a fraction, and the control group that has it."""
    found: tuple[float, Path | None] = (math.inf, None)
    for group in groups:
        quota, period = (_first_number(group / f"cpu.cfs_{one}_us") for one in ("quota", "period"))
        words = (_text(group / "cpu.max") or "").split()
        if len(words) == 2 and words[0] != "max":
            quota, period = float(words[0]), float(words[1])
        if quota is not None and period and 0 < quota / period < found[0]:
            found = (quota / period, group)
    return found


def _used_s(groups: Sequence[Path], accounts: Sequence[Path]) -> float | None:
    for group in groups:
        if (usage := _table(group / "cpu.stat").get("usage_usec")) is not None:
            return usage / 1e6
    for group in accounts:
        if (used := _first_number(group / "cpuacct.usage")) is not None:
            return used / 1e9
    return None


def _throttled_s(groups: Sequence[Path]) -> float | None:
    """Return how long the groups of this process were stopped: of nested ones, the one that was stopped longest."""
    found: list[float] = []
    for group in groups:
        stat = _table(group / "cpu.stat")
        if "throttled_usec" in stat:
            found.append(stat["throttled_usec"] / 1e6)
        elif "throttled_time" in stat:
            found.append(stat["throttled_time"] / 1e9)
    return max(found, default=None)


def _stalled_s(root: Path, resource: str, groups: Sequence[Path], kind: str) -> float | None:
    """Return how long processes of the control group waited for a resource; of all of the host, if it has no file."""
    for path in (*(group / f"{resource}.pressure" for group in groups), root / "proc/pressure" / resource):
        for line in (_text(path) or "").splitlines():
            name, *values = line.split()
            totals = [value.removeprefix("total=") for value in values if value.startswith("total=")]
            if name == kind and totals and totals[0].isdecimal():
                return int(totals[0]) / 1e6
    return None


def _memory(root: Path, groups: Sequence[Path]) -> tuple[int | None, int | None]:
    """Return the bytes that there are, and those that are available: of the control group that has fewest left."""
    info = _table(root / "proc/meminfo")
    if "MemTotal" not in info:
        return None, None
    total = 1024 * info["MemTotal"]
    available = 1024 * info.get("MemAvailable", info["MemTotal"])
    for group in groups:
        limits = [_first_number(group / name) for name in ("memory.max", "memory.limit_in_bytes")]
        used = [_first_number(group / name) for name in ("memory.current", "memory.usage_in_bytes")]
        limit, usage = (next((one for one in found if one is not None), None) for found in (limits, used))
        if limit is None or usage is None or limit >= total:
            continue
        stat = _table(group / "memory.stat")
        # The page cache that is not in use is given back before anything is killed.
        cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        left = max(0, int(limit - usage) + cache)
        if left < available:
            total, available = int(limit), left
    return total, available


def _oom_kills(root: Path, groups: Sequence[Path]) -> int | None:
    for group in groups:
        for name in ("memory.events", "memory.oom_control"):
            if (kills := _table(group / name).get("oom_kill")) is not None:
                return kills
    return _table(root / "proc/vmstat").get("oom_kill")


def _free_bytes(folders: Iterable[str | Path]) -> dict[str, int]:
    found: dict[str, int] = {}
    for folder in folders:
        try:
            told = os.statvfs(folder)
        except OSError:
            continue  # it is not there so far, or not on this host
        found[str(folder)] = told.f_bavail * told.f_frsize
    return found
