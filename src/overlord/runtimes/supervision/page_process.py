"""The live page of a service as a process of its own, started by `launch(dashboard=PORT)`.

It costs the service one status a second, and the launcher nothing. Its standard input is a pipe from the launcher: when
that ends, by `close()` or because the launcher was killed, the page ends too.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable

from overlord.errors import SpecError, pip_install
from overlord.runtimes.supervision.child import LIMITS, is_stopped
from overlord.runtimes.supervision.early_start import start_python

LOOPBACK = "127.0.0.1"
LOOPBACKS = (LOOPBACK, "::1")
MOST_PORT = 65535
NEEDS = ("starlette", "uvicorn")
TOKEN_VARIABLE = "OVERLORD_PAGE_TOKEN"
"""Holds the token of a page that may change the service. Arguments could be read by every user of the host."""
LOOK_EVERY_S = 1.0
"""How often it is looked at whether the page is stopped."""
RESTARTS = 5
"""How often a page that ends soon after its start is started again."""

logger = logging.getLogger(__name__)


class PageProcess:
    """The page of a service that is being launched.

    Args:
        port: Of this host; 0 takes any that is free.
        changes: Whether the page may change the service, with a token that its address ends in.

    Raises:
        SpecError: Another process has the port, or the libraries of the page are not installed.
    """

    def __init__(self, port: int, *, changes: bool = False) -> None:
        for name in NEEDS:
            if importlib.util.find_spec(name) is None:
                raise needs_library(name)
        self._socket = listening_socket(LOOPBACK, port)
        self._token = secrets.token_urlsafe(24) if changes else None
        self.url = url_of(self._socket) + ("" if self._token is None else f"#token={self._token}")
        """Where a browser finds the page."""
        self._end: Callable[[], object] = self._socket.close

    def start(self, address: str) -> None:
        """Show the service at an address."""
        self._end = weakref.finalize(self, _KeptProcess(self._socket, address, self._token).end)

    def close(self) -> None:
        """End the page."""
        self._end()


class _KeptProcess:
    """The process of a page. One that ends by itself is started again, on the same socket: browsers wait meanwhile."""

    def __init__(self, listening: socket.socket, address: str, token: str | None) -> None:
        self._socket, self._address, self._token = listening, address, token
        self._lock = threading.Lock()
        self._ended = False
        self._process = self._start()
        threading.Thread(target=self._keep, name="overlord-page", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        fd = self._socket.fileno()
        command = ["-m", "overlord.dashboard.serving_page", self._address, str(fd)]
        token = {} if self._token is None else {TOKEN_VARIABLE: self._token}
        self._began_s = time.monotonic()
        # A session of its own: the terminal's Ctrl-C must not reach it; the end of the pipe does. The kernel kills it
        # then: it has nothing to bring to an end, and a SIGSTOP that comes after the launcher's end would keep it.
        return start_python(
            command, token, [fd], at_end=signal.SIGKILL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def _keep(self) -> None:
        restarts, told = 0, False
        while True:
            code = self._wait()
            with self._lock:
                if self._ended:
                    return
                self._close_pipe()
                steady = time.monotonic() - self._began_s > LIMITS.role_steady
                restarts = 1 if steady else restarts + 1
                url = url_of(self._socket)
                if restarts > RESTARTS:
                    self._socket.close()  # else browsers would wait for ever
                    logger.error("the live page %s ended %d times in a row and is not served any more", url, restarts)
                    return
                if not told:
                    told = True
                    logger.warning(
                        "the process of the live page %s ended (exit code %d); it is started again", url, code
                    )
                self._process = self._start()

    def _wait(self) -> int:
        """Return the exit code of the process when it has ended; kill one that is stopped: browsers wait for it."""
        stopped_at: float | None = None
        while True:
            try:
                return self._process.wait(LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                stopped_at = (stopped_at or time.monotonic()) if is_stopped(self._process.pid) else None
                if stopped_at is not None and time.monotonic() - stopped_at > LIMITS.role_silence:
                    self._process.kill()

    def end(self) -> None:
        """End the process, and start no other."""
        with self._lock:
            self._ended = True
        self._socket.close()
        self._close_pipe()
        try:
            self._process.wait(LIMITS.orphaned_role)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.close()


def end_with_launcher() -> None:
    """End this process, a page, when its launcher ends it or is gone, where the kernel has not done so."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def needs_library(name: str | None) -> SpecError:
    """Return the error for a library of the page that is not installed."""
    return SpecError(
        f"the page needs {name}, which is not installed; nothing is served. Run "
        f"`{pip_install('dashboard')}`, or leave the page out."
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """Take a port; it listens at once, so that a browser that comes before the server is up waits for it.

    Raises:
        SpecError: It cannot be had.
    """
    try:
        if port > MOST_PORT:
            raise OSError(f"ports end at {MOST_PORT}")
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = "another process has it" if error.errno == errno.EADDRINUSE else error.strerror or error
        raise SpecError(
            f"the page cannot be served at {host}:{port}: {why}. Give another port, or 0 for any that is free."
        ) from error


def url_of(listening: socket.socket) -> str:
    """Return the address of the page that a socket serves."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
