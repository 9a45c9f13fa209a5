"""Starts Python processes; and the service process of a command before the command has read its job.

A command and its service load libraries for about a second each. The `overlord` command starts the process first, so
that both load at the same time; nothing but the standard library is loaded here before.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlord.runtimes.supervision.cleanup import remove_when_gone

LAUNCHER_VARIABLE = "OVERLORD_LAUNCHER"
"""In the environment of every process of a service: the process id of its launcher, which a launch into the same store
looks for (stores/owners.py)."""
LOCAL_SERVICE = "overlord.runtimes.launching.local_service"
"""The module that a service process of the local runtime runs."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}  # fmt: skip
"""The environment of a process that forks. It must have one thread: OpenBLAS and Arrow's jemalloc start more on import.
Its children have a core each: a library that starts a thread for each core would only crowd it. Arrow's own allocators
keep twice what hundreds of open files need, as every thread has a heap."""


def signal_at_end(pipe: int, signum: signal.Signals, owner: int) -> None:
    """Have the kernel send a signal when the last writer of a pipe is gone, and whenever something is written to it.

    A process that watches the pipe itself does not see its end while it is stopped. SIGCONT lets a stopped process go
    on, and changes nothing for others; SIGKILL ends it.

    Args:
        pipe: The end that is read.
        owner: The process that gets the signal, or minus the process group.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return  # not Linux
    fcntl.fcntl(pipe, fcntl.F_SETOWN, owner)
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signum)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def start_python(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    fds: Sequence[int],
    own: Mapping[str, str] | None = None,
    at_end: signal.Signals = signal.SIGCONT,
    **options: object,
) -> subprocess.Popen[bytes]:
    """Start a Python process with the modules of this one; its standard input is a pipe that ends with this process.

    Args:
        environment: Variables that this process's own environment overrules.
        fds: Descriptors that it inherits.
        own: Variables that overrule this process's own environment.
        at_end: What the kernel sends it at the end of the pipe: it may be stopped, and must go on to end.
    """
    paths = os.pathsep.join(path for path in sys.path if path)
    # Few malloc arenas: with one for each of its threads, what they free stays with the process.
    env = {"MALLOC_ARENA_MAX": "2", **environment, **os.environ, "PYTHONPATH": paths, **(own or {})}
    line, ours = os.pipe()
    try:
        process: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, *arguments], stdin=line, pass_fds=fds, env=env, **options
        )
        signal_at_end(line, at_end, process.pid)
        process.stdin = os.fdopen(ours, "wb")
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(line)
    return process


def start_service(module: str, environment: Mapping[str, str], keeps_folder: int) -> subprocess.Popen[bytes]:
    """Start a service process; it waits for its job on its standard input.

    Args:
        keeps_folder: The pipe whose end removes the folder of the service; the process holds it too.
    """
    # A session of its own: the terminal's Ctrl-C must not reach it; the closing pipe does.
    return start_python(
        ["-m", module], environment, [keeps_folder], own={LAUNCHER_VARIABLE: str(os.getpid())},
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


class StartedService:
    """A service process that waits for its job, and the folder of its sockets."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._made_for = _surroundings(module, environment)
        self.folder = _service_folder()
        self.keeps_folder = remove_when_gone(self.folder)
        self.process = start_service(module, environment, self.keeps_folder.fileno())

    def fits(self, module: str, environment: Mapping[str, str]) -> bool:
        """Whether a process that is started now would be the same."""
        return self._made_for == _surroundings(module, environment)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.keeps_folder.close()


_early: StartedService | None = None


def start_early() -> None:
    """Start the process of a local service that this process will probably launch."""
    global _early
    _early = StartedService(LOCAL_SERVICE, ONE_THREAD)


def take_started(module: str, environment: Mapping[str, str]) -> StartedService:
    """Return the process that was started early, or start one where there is none that fits."""
    global _early
    early, _early = _early, None
    if early is not None and not early.fits(module, environment):
        early.end()
        early = None
    return early or StartedService(module, environment)


def end_early() -> None:
    """End the process that was started early, if no service took it."""
    global _early
    if _early is not None:
        _early.end()
        _early = None


def _surroundings(module: str, environment: Mapping[str, str]) -> tuple[object, ...]:
    return module, dict(environment), list(sys.path), dict(os.environ)


def _service_folder() -> Path:
    """Make a folder whose sockets have short paths: the kernel takes no more than 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="overlord-"))
    if len(os.fsencode(folder)) <= 40 and str(folder).isprintable():  # messages are UTF-8
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="overlord-", dir="/tmp"))
