"""Whose fault it is that a child process ended or does not answer: one definition for process workers and readers.

Rules of this file:
1. Only what a process does itself counts against the row or file that it works on: a crash (SIGSEGV, SIGBUS, SIGABRT,
   SIGFPE, SIGILL, SIGTRAP), an exit without an answer, an answer that makes no sense, or a call that exceeds its time
   limit.
2. Every other signal comes from outside. SIGKILL above all: an operator, a job scheduler and the kernel's out-of-memory
   killer send it, and it says nothing about the work. Nor does SIGSTOP. Such work is done again, as often as it takes;
   it is an error only after very many losses without any progress of the whole pool (`Losses`).
3. That a process was killed because it used too much memory is believed only on evidence that no other process can
   produce: the kernel's own count of out-of-memory kills grew, and the peak of the process's own memory explains it
   (`MemoryTrial`).
4. Time is judged by what the kernel says about the process. The time that it was stopped, or was ready to run and had
   no core, counts for nothing; a limit of processor time counts nothing else. So a busy host, a suspended laptop or a
   stopped process makes no row look guilty.
5. A process that neither runs nor answers waits for storage or a server. It is replaced, and what it did is tried
   again; past a few tries that is a failure of the storage, and never a fault of a row.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from overlord.runtimes.supervision.child import control_groups
from overlord.runtimes.supervision.work_clock import queued_s

logger = logging.getLogger("overlord")

CRASH_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
TICK_S = 1.0
"""How often a process that has not answered is looked at, at least."""
TICKS = 16
"""A time limit is counted in so many parts at least, so that a host that was suspended meanwhile loses one of them."""
MOST_LOSSES, LOSSES_S = 100, 100.0
"""A pool gives up after so many lost processes, and so long, without any progress."""
PAUSES_S = 0.005, 0.5
"""The first and the longest pause before something is tried again."""
LATE_S = 3.0
"""When `status` says that a process does not answer."""
WARN_S = 10.0
"""When it is first logged that a process does not answer; then each time that the wait has doubled."""
ROOM_BYTES = 512 << 20
"""Where less memory than this is available, no process is ended for what it uses itself."""


class Blame(enum.Enum):
    """Whose fault the end of a process was."""

    ITSELF = "itself"
    OUTSIDE = "outside"
    STORAGE = "storage"


class ChildLost(Exception):
    """A child ended, or did not answer in time and was killed; the text says which.

    Args:
        how: In words.
        blame: Whose fault it was.
        late: Whether it was killed because it exceeded its time limit.
        code: Its exit code; None where nothing is left to tell it.
        peak_bytes: The most memory that it used; 0 where that is not known.
    """

    def __init__(
        self, how: str, blame: Blame, *, late: bool = False, code: int | None = None, peak_bytes: int = 0
    ) -> None:
        super().__init__(how)
        self.blame = blame
        self.late = late
        self.code = code
        self.peak_bytes = peak_bytes

    @property
    def killed(self) -> bool:
        """Whether it was ended by SIGKILL, which this process did not send."""
        return self.blame is Blame.OUTSIDE and self.code == -signal.SIGKILL


def blame_for(code: int | None) -> Blame:
    """Return whose fault it was that a process ended, by its exit code; None where that is not known.

    Example:
        >>> blame_for(-11), blame_for(3), blame_for(-9), blame_for(None)
        (<Blame.ITSELF: 'itself'>, <Blame.ITSELF: 'itself'>, <Blame.OUTSIDE: 'outside'>, <Blame.OUTSIDE: 'outside'>)
    """
    if code is None:  # its fork server is gone, and took it along
        return Blame.OUTSIDE
    return Blame.ITSELF if code >= 0 or -code in CRASH_SIGNALS else Blame.OUTSIDE


class Losses:
    """Counts the processes of a pool that were lost from outside, and pauses before the next try."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._since = math.inf
        """When the first of them was lost."""

    def progressed(self) -> None:
        """Forget them: something was done."""
        if self._count:  # without the lock: it is called for every answer
            with self._lock:
                self._count = 0

    def add(self, loss: Exception) -> None:
        """Pause, the longer the more there were.

        Raises:
            TooManyLosses: when there were too many without any progress.
        """
        now = time.monotonic()
        with self._lock:
            self._since = self._since if self._count else now
            self._count += 1
            count, since = self._count, self._since
        if count > MOST_LOSSES and now - since > LOSSES_S:
            raise TooManyLosses(f"{count} processes were lost within {now - since:.0f} s without any progress ({loss})")
        time.sleep(min(PAUSES_S[1], PAUSES_S[0] * 2 ** min(count - 1, 10)))


class TooManyLosses(Exception):
    """A pool lost very many processes from outside without any progress; the text says how many."""


# --------------------------------------------------------------------------------------------------------------
# Time: what a process that has not answered does, by what the kernel says.


class CallLimits(NamedTuple):
    """How long a call may take; None: for ever."""

    elapsed_s: float | None = None
    """Time on the wall during which the process was not stopped and had a core, or waited for something."""
    cpu_s: float | None = None
    """Time of a processor."""
    idle_s: float | None = None
    """Time during which the process used no processor at all and was not ready to run."""
    stopped_s: float = math.inf
    """Time during which the process was stopped."""


class Overdue(Exception):
    """A call has exceeded a limit; the text says which."""

    def __init__(self, how: str, blame: Blame) -> None:
        super().__init__(how)
        self.blame = blame


class _Seen(NamedTuple):
    """What the kernel says about a process."""

    state: str
    cpu_s: float
    queued_s: float


_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "D": "it waits for storage",
    "R": "it is running",
    "S": "it sleeps",
    "Z": "it has ended",
}


def _look_at(pid: int) -> _Seen | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return _Seen(fields[0].decode(), (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS, queued_s(str(pid)))
    except (OSError, IndexError, ValueError):
        return None  # it has just ended, or this system does not tell


def never_runs_again(pid: int) -> bool:
    """Whether a process that was sent SIGKILL executes no further instruction of its own.

    One that is blocked in the kernel does not end before the device or server answers, but then it ends at once.
    """
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in (b"D", b"Z", b"X"):
                    return False
    except (OSError, IndexError):
        pass  # it has ended
    return True


class CallClock:
    """Watches a call that a child process has not answered.

    `tick` is called whenever nothing came for `tick_s`; nothing is looked at before, so a call that is answered soon
    costs nothing.

    Args:
        pid: The process.
        limits: How long the call may take.
        what: What the process was asked, for messages.
    """

    def __init__(self, pid: int, limits: CallLimits, what: str) -> None:
        self.tick_s = min([TICK_S, *(limit / TICKS for limit in limits if limit is not None)])
        self._pid = pid
        self._limits = limits
        self._what = what
        self._seen: _Seen | None = None
        self._elapsed = self._cpu = self._idle = self._stopped = 0.0
        self._ran_last = self._queued_last = 0.0
        self._asked = time.monotonic()
        self.thread = threading.get_ident()
        self._warn_at = WARN_S

    def tick(self, *, first: bool = True) -> None:
        """Look at the process.

        Args:
            first: Whether no call to the process is older: only that one can be late.

        Raises:
            Overdue: when a limit is exceeded.
        """
        before, seen = self._seen, _look_at(self._pid)
        self._seen = seen
        _late[self] = None
        if self.waited_s >= self._warn_at:
            self._warn_at *= 2
            logger.warning("%s", self)
        if seen is not None and seen.state == "T":
            self._stopped += self.tick_s
            if self._stopped >= self._limits.stopped_s:
                raise Overdue(f"it was stopped (SIGSTOP) for {self._stopped:.0f} s", Blame.OUTSIDE)
            return
        self._stopped = 0.0
        if not first:
            self._elapsed = self._cpu = self._idle = 0.0
            return
        ran = queued = 0.0
        if before is not None and seen is not None:
            ran, queued = seen.cpu_s - before.cpu_s, seen.queued_s - before.queued_s
            self._ran_last, self._queued_last = ran, queued
            self._idle = 0.0 if ran else self._idle + max(self.tick_s - queued, 0.0)
        self._elapsed += max(self.tick_s - queued, 0.0)
        self._cpu += ran
        elapsed_s, cpu_s, idle_s, _ = self._limits
        if elapsed_s is not None and self._elapsed >= elapsed_s:
            blocked = seen is not None and seen.state == "D"
            raise Overdue(f"no answer within {elapsed_s:g} s", Blame.STORAGE if blocked else Blame.ITSELF)
        if cpu_s is not None and self._cpu >= cpu_s:
            raise Overdue(f"no answer within {cpu_s:g} s of processor time", Blame.ITSELF)
        if idle_s is not None and self._idle >= idle_s:
            raise Overdue(f"it used no processor for {idle_s:g} s, and {_state(seen)}", Blame.STORAGE)

    def done(self) -> None:
        """Note that the answer has come, or is not waited for any more."""
        _late.pop(self, None)

    @property
    def waited_s(self) -> float:
        """How long the answer has not come."""
        return time.monotonic() - self._asked

    def __str__(self) -> str:
        return f"process {self._pid} has not answered for {self.waited_s:.0f} s while it {self._what}; {self._state()}"

    def _state(self) -> str:
        if self._seen is not None and self._seen.state == "R" and self._queued_last > self._ran_last:
            return "it waits for a free CPU"
        return _state(self._seen)


def _state(seen: _Seen | None) -> str:
    return "its state is not known" if seen is None else _STATES.get(seen.state, f"its state is {seen.state}")


_late: dict[CallClock, None] = {}
"""The calls of this process that are not answered and were looked at."""


_reads: dict[int, tuple[float, str]] = {}
"""Since when a thread of this process reads a source, and which."""


@contextlib.contextmanager
def noted_read(source: str) -> Iterator[None]:
    """Note that the calling thread reads a source: what it reads itself may wait for storage without any child."""
    me = threading.get_ident()
    _reads[me] = time.monotonic(), source
    try:
        yield
    finally:
        del _reads[me]


def late_calls() -> list[str]:
    """Return what has kept this process waiting for some seconds, longest first: its children, or storage."""
    late = [clock for clock in list(_late) if clock.waited_s >= LATE_S]
    told = [(clock.waited_s, str(clock)) for clock in late]
    named = {clock.thread for clock in late}  # a read that waits for a reader process is told once
    sources: dict[str, float] = {}
    for thread, (began, source) in list(_reads.items()):
        waited_s = time.monotonic() - began
        if thread not in named and waited_s >= LATE_S:
            sources[source] = max(waited_s, sources.get(source, 0.0))
    told += [(waited_s, _slow_read(source, waited_s)) for source, waited_s in sources.items()]
    return [text for _, text in sorted(told, reverse=True)]


def _slow_read(source: str, waited_s: float) -> str:
    return f"rows of source {source!r} have been read for {waited_s:.0f} s: its storage is slow, or does not answer"


# --------------------------------------------------------------------------------------------------------------
# Memory: evidence that the kernel ended a process because of what it used itself.


def oom_kills() -> int | None:
    """Return how many processes the kernel has ended on this host because memory ran out; None where it does not say.

    Those that exceed the limit of a control group count too.
    """
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def available_bytes() -> int:
    """Return how much more memory this process may use: what the host has, and what its control groups allow."""
    found = math.inf
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    for group in control_groups("memory"):
        found = min(found, _left_in(group))
    return 0 if math.isinf(found) else int(found)


def _left_in(group: Path) -> float:
    """Return how much more memory a control group may use; the kernel can drop cached files that are not in use."""
    old = not (group / "memory.max").exists()
    try:
        most = int((group / ("memory.limit_in_bytes" if old else "memory.max")).read_text())
        used = int((group / ("memory.usage_in_bytes" if old else "memory.current")).read_text())
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return most - used + int(cached["total_inactive_file" if old else "inactive_file"])
    except (OSError, ValueError, KeyError):  # there is no such file, or it says "max"
        return math.inf


class MemoryTrial:
    """Whether the out-of-memory killer ends a process that begins now because of what the process itself uses.

    That is so if there was room when it began, the kernel's count of such kills has grown meanwhile, and the process
    used at least half of the room. A kill from outside can produce neither of the last two.
    """

    def __init__(self) -> None:
        self._kills = oom_kills()
        self._room = available_bytes()

    def convicts(self, loss: ChildLost) -> bool:
        """Whether the process was ended for what it used."""
        kills = oom_kills()
        return (
            loss.killed
            and self._kills is not None
            and kills is not None
            and kills > self._kills
            and self._room >= ROOM_BYTES
            and loss.peak_bytes >= self._room // 2
        )
