"""What every supervisor of a child process needs: time limits, liveness, restarts, back-off, and how a child ended.

Three pairs of processes use it: a launcher and its service, a service and its roles, a host and its workers. All follow
one policy:

    start           a first sign of life is due within `first_sign`; a child that starts is busy, so this is generous
    run             a child that is silent for longer than its limit hangs, and is killed before it is replaced
    end             an exit is noticed at once; `how_it_ended` puts it in words
    replace         after a pause that grows (Backoff), until too many failures in a row had no progress (Restarts)

Every limit stands in `Limits`, and one function derives them from the heartbeat.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

HEARTBEAT_S = 5.0
"""The default of `launch(heartbeat=)`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits in seconds; made by `limits_of`."""

    # Silence: a process that runs and says nothing for longer hangs, and is killed.
    role_silence: float
    """A role that serves."""
    service_silence: float
    """The service process. Longer than that of a role: the service itself must be able to wait for one."""
    role_starting_silence: float
    """A role between its first sign of life and its first call: it imports and parses meanwhile."""
    service_starting_silence: float
    """The service process between its first sign of life and its address: it opens sources meanwhile."""
    lease: float
    """A role that is asked for no heartbeat. It was replaced, and ends itself. Longer than the two silences above."""
    away: float
    """A supervisor that did not look for so long was stopped itself; its children are not blamed for that time."""

    # Starts.
    service_first_sign: float
    """The interpreter of a service process, on a busy host."""
    role_first_sign: float
    """A role process, which is forked."""
    actor_first_sign: float
    """A Ray actor."""
    open_sources: float
    """All sources of a job: listings of object stores are slow, and progress is shown."""
    listen: float
    """A role process until its socket takes connections."""
    fork_first: float
    """A fork server until its first answer: it imports all that its children share."""
    fork: float
    """A fork server from then on."""
    ray_reach: float
    """A connection to the address of a Ray cluster."""
    ray_reserve: float
    """Ray, to reserve what was idle a moment ago."""

    # Work.
    slow_call: float
    """A call to a loader host; then its shadows take over, where it has some."""
    load_function: float
    """A worker that loads a function: it may import a large library."""
    read: float
    """A read of a local file in a reader process. Remote ones have the limits of their filesystem."""
    damaged_file: float
    """How long a file that crashed its readers is refused without another try: it may have been restored then."""
    ray_plan: float
    """The transfer of a plan through Ray's object store."""

    # Ends.
    last_output: float
    """A service process that has closed its output, until it is gone."""
    rewind: float
    """A service process that goes back to an earlier step, until it is gone: trainers wait for the next one."""
    service_close: float
    """A service on one host that closes."""
    ray_close: float
    """A service on a cluster that closes."""
    role_close: float
    """All roles of one kind that close, and all threads that replace roles."""
    orphaned_service: float
    """A service whose launcher is gone, until it exits without cleaning up."""
    orphaned_role: float
    """A role whose service is gone, until it exits without cleaning up."""
    fork_close: float
    """A fork server that ends its children, until its process group is killed."""

    # Steadiness: a child that lived for so long did not fail because it was started.
    role_steady: float
    service_steady: float


def limits_of(heartbeat_s: float = HEARTBEAT_S) -> Limits:
    """Derive all limits from the heartbeat.

    Silences are multiples of it. The others bound work, which a short heartbeat does not make faster: they are as below
    up to the default heartbeat, and grow with a longer one, which says that the hosts are slow.

    Example:
        >>> limits_of(5.0).lease, limits_of(40.0).lease, limits_of(0.5).service_silence
        (30.0, 240.0, 1.0)
    """
    beat, slow = heartbeat_s, max(1.0, heartbeat_s / HEARTBEAT_S)
    return Limits(
        role_silence=beat,
        service_silence=2 * beat,
        role_starting_silence=max(10.0, 2 * beat),
        service_starting_silence=4 * beat,
        lease=max(30.0, 6 * beat),
        away=2.0 * slow,
        service_first_sign=60.0 * slow,
        role_first_sign=10.0 * slow,
        actor_first_sign=60.0 * slow,
        open_sources=1800.0 * slow,
        listen=120.0 * slow,
        fork_first=120.0 * slow,
        fork=10.0 * slow,
        ray_reach=10.0 * slow,
        ray_reserve=60.0 * slow,
        slow_call=60.0 * slow,
        load_function=120.0 * slow,
        read=600.0 * slow,
        damaged_file=60.0,
        ray_plan=60.0 * slow,
        last_output=5.0 * slow,
        rewind=3.0 * slow,
        service_close=15.0 * slow,
        ray_close=60.0 * slow,
        role_close=10.0 * slow,
        orphaned_service=45.0 * slow,
        orphaned_role=5.0 * slow,
        fork_close=2.0 * slow,
        role_steady=3.0 * slow,
        service_steady=12.0 * slow,
    )


LIMITS = limits_of()
"""Those of the default heartbeat, for children that are started without launch options."""


class Backoff:
    """Pauses between tries of the same thing: they double from the first to the longest.

    Args:
        first_s: The first pause.
        longest_s: No pause is longer.
        sleep: How to pause; simulated time has its own.

    Example:
        >>> pauses = []
        >>> backoff = Backoff(1.0, 3.0, sleep=pauses.append)
        >>> for _ in range(3):
        ...     backoff.pause()
        >>> pauses
        [1.0, 2.0, 3.0]
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
    """Whether a child that failed is started again: not after too many failures in a row without progress.

    Example:
        >>> restarts = Restarts(most=1, steady_s=3.0)
        >>> restarts.failed("was killed", lived_s=0.1)
        >>> restarts.failed("was killed", lived_s=9.0)
        >>> restarts.exhausted
        False
        >>> restarts.failed("ended with code 1")
        >>> restarts.exhausted
        True
    """

    most: int
    steady_s: float
    """A child that lived for so long made progress."""
    count: int = 0
    """How often it was started again, all in all."""
    failures: list[str] = field(default_factory=list)
    """How it failed since there was progress."""

    def failed(self, why: str, lived_s: float = 0.0, *, progress: bool = False) -> None:
        """Count a failure.

        Args:
            why: How it ended, or why it did not start.
            lived_s: How long it had served.
            progress: Whether it did something new before.
        """
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
        """Note a sign of life; the next one is due at once, or when somebody asks for it."""
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
    """A process that this one started.

    Args:
        pid: Its process id.
    """

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


def start_python(
    arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int], **options: object
) -> subprocess.Popen[bytes]:
    """Start a Python process that finds the same modules as this one, and has its life line on standard input.

    Args:
        arguments: Of the interpreter.
        environment: Variables that this process's own environment overrules.
        fds: Descriptors that it inherits.
        options: Of `subprocess.Popen`.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    # Few malloc arenas: with one for each of its threads, what they free stays with the process.
    env = {"MALLOC_ARENA_MAX": "2", **environment, **os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, *arguments], stdin=subprocess.PIPE, pass_fds=fds, env=env, **options
    )


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
