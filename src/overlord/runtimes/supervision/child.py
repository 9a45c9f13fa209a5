"""What every supervisor of a child process needs: time limits, liveness, restarts, back-off, and how a child ended.

Three pairs of processes use it: a launcher and its service, a service and its roles, a host and its workers. All follow
one policy:

    start           a first sign of life is due within `first_sign`; a child that starts is busy, so this is generous
    run             a child that is silent for longer than its limit hangs, and is killed before it is replaced
    end             an exit is noticed at once; `how_it_ended` puts it in words
    replace         after a pause that grows (Backoff), until too many failures in a row had no progress (Restarts)

Every limit stands in `Limits`, which derives them from the heartbeat.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from overlord.job.layout_specs import DEFAULT_HEARTBEAT_S


class Limits:
    """The time limits of all supervisors, in seconds, derived from the heartbeat.

    Silences are multiples of it. The others bound work, which a short heartbeat does not make faster: up to the default
    heartbeat they are as written here, and they grow with a longer one, which says that the hosts are slow.

    Example:
        >>> Limits(5.0).lease, Limits(40.0).lease, Limits(0.5).service_silence
        (30.0, 240.0, 1.0)
    """

    def __init__(self, heartbeat_s: float = DEFAULT_HEARTBEAT_S) -> None:
        slow = max(1.0, heartbeat_s / DEFAULT_HEARTBEAT_S)
        # Silence: a process that says nothing for longer hangs, and is killed.
        self.role_silence: Final = heartbeat_s  # a role that serves
        self.stopped_silence: Final = max(1.0, heartbeat_s)  # a worker, reader or fork server that is stopped (SIGSTOP)
        self.service_silence: Final = 2 * heartbeat_s  # the service process, which may itself be waiting for a role
        self.role_starting_silence: Final = max(10.0, 2 * heartbeat_s)  # a role that imports and parses
        self.service_starting_silence: Final = 4 * heartbeat_s  # a service process that opens sources
        self.lease: Final = max(30.0, 6 * heartbeat_s)  # a role that is asked for no heartbeat was replaced, and exits
        self.away: Final = 2.0 * slow  # a supervisor that did not look for so long was stopped itself: no child hangs
        # Starts: how long each may take.
        self.service_first_sign: Final = 60.0 * slow  # the interpreter of a service process, on a busy host
        self.role_first_sign: Final = 10.0 * slow  # a role process, which is forked
        self.actor_first_sign: Final = 60.0 * slow  # a Ray actor
        self.open_sources: Final = 1800.0 * slow  # all sources of a job: listings of object stores are slow
        self.listen: Final = 120.0 * slow  # a role process, until its socket takes connections
        self.fork_first: Final = 120.0 * slow  # a fork server, to import all that its children share
        self.fork: Final = 10.0 * slow  # a fork server, to fork or end a child
        self.replacement: Final = 300.0 * slow  # the replacement of a lost role, before calls to that role fail
        self.ray_reach: Final = 10.0 * slow  # a connection to the address of a Ray cluster
        self.ray_reserve: Final = 60.0 * slow  # Ray, to reserve what was idle a moment ago
        # Work.
        self.repeat_call: Final = 30.0 * slow  # a call between roles without an answer may be lost, and is made again
        self.progress: Final = 1.0 * slow  # status(), for constructor hosts to say how far their clients are
        self.slow_call: Final = 60.0 * slow  # a call to a loader host; then its shadows take over, if it has some
        self.load_function: Final = 120.0 * slow  # a worker that loads a function, which may import a large library
        self.run_cpu: Final = 60.0 * slow  # of processor time, one row in a worker; a source of slow rows has more
        self.read: Final = 120.0 * slow  # a read; alone in a process, so much of processor time
        self.idle: Final = 60.0 * slow  # a worker or reader that uses no processor: it waits for storage
        self.damaged_file: Final = 60.0  # a file that crashed its readers is read again then: it may be restored
        self.ray_plan: Final = 60.0 * slow  # the transfer of a plan through Ray's object store
        # Ends: how long each may take before it is killed, or exits without cleaning up.
        self.last_output: Final = 5.0 * slow  # a service process that has closed its output
        self.rewind: Final = 3.0 * slow  # a service process that goes back to an earlier step: trainers wait for it
        self.service_close: Final = 15.0 * slow  # a service on one host
        self.ray_close: Final = 60.0 * slow  # a service on a cluster
        self.role_close: Final = 10.0 * slow  # all roles, and all threads that replace roles
        self.role_last_word: Final = 2.0 * slow  # the roles of one kind, where others have taken that time
        self.closed_service: Final = 45.0 * slow  # a service that its launcher closes
        self.orphaned_service: Final = 5.0 * slow  # a service whose launcher is gone
        self.orphaned_role: Final = 5.0 * slow  # a role whose service is gone
        self.fork_close: Final = 2.0 * slow  # a fork server that ends its children
        # Steadiness: a child that lived for so long did not fail because it was started.
        self.role_steady: Final = 3.0 * slow
        self.service_steady: Final = 12.0 * slow


LIMITS = Limits()
"""Those of the default heartbeat, for children that are started without launch options."""


class Backoff:
    """Pauses between tries of the same thing: they double from the first to the longest.

    Args:
        sleep: How to pause; simulated time has its own.
    """

    def __init__(self, first_s: float, longest_s: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s
        self._sleep = sleep

    def pause(self) -> None:
        """Wait before the next try."""
        pause_s = self._next_s
        self._next_s = min(self._longest_s, 2 * pause_s)
        self._sleep(pause_s)

    def reset(self) -> None:
        """Begin with the first pause again: the last try went well."""
        self._next_s = self._first_s


@dataclass(slots=True)
class Restarts:
    """Whether a child that failed is started again: not after too many failures in a row without progress."""

    most: int
    steady_s: float
    """A child that lived for so long made progress."""
    count: int = 0
    """How often it was started again, all in all."""
    failures: list[str] = field(default_factory=list)
    """How it failed since there was progress."""

    def failed(self, why: str, lived_s: float = 0.0, *, progress: bool = False) -> None:
        """Count a failure of a child that had served for so long, and may have made progress meanwhile."""
        if progress or lived_s >= self.steady_s:
            self.failures.clear()
        self.failures.append(why)

    @property
    def exhausted(self) -> bool:
        """Whether to give it up."""
        return len(self.failures) > self.most


class Liveness:
    """How long a child has been silent while a sign of life was due.

    Args:
        first_s: Its first sign of life may take so long.
        silence_s: Each further one.
        now: When it was started.
    """

    def __init__(self, first_s: float, silence_s: float, now: float) -> None:
        self._limit_s = first_s
        self._silence_s = silence_s
        self._due_since: float | None = now

    def expect(self, now: float) -> None:
        """Count from now on, if no sign of life was due before."""
        if self._due_since is None:
            self._due_since = now

    def heard(self, now: float, *, expect: bool = True) -> None:
        """Note a sign of life; the next one is due at once, or from `expect` on."""
        self._limit_s = self._silence_s
        self._due_since = now if expect else None

    def excuse(self, now: float) -> None:
        """Count from now on: the process that watches was stopped itself."""
        if self._due_since is not None:
            self._due_since = now

    def silent_s(self, now: float) -> float:
        """Return how long it has been silent."""
        return 0.0 if self._due_since is None else now - self._due_since

    def hangs(self, now: float, *, limit_s: float | None = None) -> bool:
        """Whether it has been silent for too long."""
        return self.silent_s(now) > (self._limit_s if limit_s is None else min(limit_s, self._limit_s))


class ChildProcess:
    """A process that this one started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        """Its exit code (negative: the signal), once it has ended and the code is known."""
        self.ended: str | None = None
        """How it ended, once it has."""
        self.killed_for = ""
        """Why it was killed by this process, if it was."""

    def kill(self, reason: str) -> None:
        """Send SIGKILL, and give this reason for its end; safe as long as it has not been waited for."""
        self.killed_for = self.killed_for or reason
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, signal.SIGKILL)

    def note_end(self, code: int | None) -> None:
        """Note that it has ended; the first note counts."""
        if self.ended is None:
            self.code = code
            self.ended = self.killed_for or ("was lost" if code is None else how_it_ended(code))


def is_stopped(pid: int) -> bool:
    """Whether a child of this process was stopped by a signal, and has not been continued."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False  # it was waited for a moment ago


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
"""Of linux/prctl.h."""


def name_process(name: str) -> None:
    """Have `top`, `pstree` and `ps -o comm` show what this process is: its command line is that of all its siblings.

    Call it in the main thread. The kernel keeps 15 bytes.
    """
    _prctl(_PR_SET_NAME, f"ol:{name}".encode())


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: also one that is stopped, which no other signal ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int | bytes) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(option, value)


def usable_cpus(folder: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many cores this process may use: by its affinity mask, and by the quotas of its control groups."""
    quotas = [_quota_of(group) for group in control_groups("cpu", folder, own)]
    return max(1, math.ceil(min([float(len(os.sched_getaffinity(0))), *quotas])))


def control_groups(
    controller: str, folder: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[Path]:
    """Yield the folders of the control groups that limit what this process uses of something, innermost first."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = folder / controllers  # all of version 2 have the top itself, and no controllers here
        inner = top / path.lstrip("/")
        for group in (inner, *inner.parents):
            if not group.is_relative_to(top):
                break
            yield group


def _quota_of(group: Path) -> float:
    """Return the cores that a control group may use together."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{one}_us").read_text() for one in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return math.inf


def how_it_ended(code: int) -> str:
    """Return what an exit code (negative: a signal) says.

    Example:
        >>> how_it_ended(-9), how_it_ended(3)
        ('was killed by SIGKILL', 'ended with code 3')
    """
    return f"ended with code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"


def exit_status(code: int) -> str:
    """Return the same as a noun, as it stands in the records of rows and files that end processes.

    Example:
        >>> exit_status(-11), exit_status(3)
        ('signal 11 (SIGSEGV)', 'exit code 3')
    """
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({_signal_name(-code)})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
