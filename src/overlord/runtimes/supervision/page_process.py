"""The live page of a service as a process of its own, started by `launch(dashboard=PORT)`.

It costs the service one status a second, and the launcher nothing. Its standard input is a pipe from the launcher: when
that ends, by `close()` or because the launcher was killed, the page ends too.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable

from overlord.errors import SpecError
from overlord.runtimes.supervision.child import LIMITS
from overlord.runtimes.supervision.early_start import start_python

LOOPBACK = "127.0.0.1"
LOOPBACKS = (LOOPBACK, "::1")
MOST_PORT = 65535
NEEDS = ("starlette", "uvicorn")


class PageProcess:
    """The page of a service that is being launched.

    Args:
        port: Of this host; 0 takes any that is free.

    Raises:
        SpecError: Another process has the port, or the libraries of the page are not installed.
    """

    def __init__(self, port: int) -> None:
        for name in NEEDS:
            if importlib.util.find_spec(name) is None:
                raise needs_library(name)
        self._socket = listening_socket(LOOPBACK, port)
        self.url = url_of(self._socket)
        """Where a browser finds the page."""
        self._end: Callable[[], object] = self._socket.close

    def start(self, address: str) -> None:
        """Show the service at an address."""
        fd = self._socket.fileno()
        command = ["-m", "overlord.dashboard.serving_page", address, str(fd)]
        # A session of its own: the terminal's Ctrl-C must not reach it; the end of the pipe does.
        process = start_python(command, {}, [fd], stdout=subprocess.DEVNULL, start_new_session=True)
        self._socket.close()
        self._end = weakref.finalize(self, _end, process)

    def close(self) -> None:
        """End the page."""
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(LIMITS.orphaned_role)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_with_launcher(stop: Callable[[], None]) -> None:
    """Call `stop` in this process, a page, when its launcher ends it or is gone."""

    def watch() -> None:
        os.read(0, 1)
        stop()
        time.sleep(LIMITS.orphaned_role)
        os._exit(1)  # it waits for a service that does not answer

    threading.Thread(target=watch, daemon=True).start()


def needs_library(name: str | None) -> SpecError:
    """Return the error for a library of the page that is not installed."""
    return SpecError(
        f"the page needs {name}, which is not installed; nothing is served. Run "
        "`pip install 'overlord-data[dashboard]'`, or leave the page out."
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
