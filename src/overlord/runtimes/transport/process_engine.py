"""Roles in processes of one host: started here, asked on Unix sockets, killed when they must go.

Rules of this file:
1. A connection carries one call at a time; who has many calls under way has as many connections.
2. A process ends with the service, also one that is stopped: its nursery does, and the kernel kills what it forked.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.errors import ServiceLost
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.transport.frames import frame_from, frame_of, receive_frame, send_frame
from overlord.runtimes.transport.nursery import Nursery, WorkerProcess
from overlord.runtimes.transport.role_messages import answer_from_frame, message_to_frame
from overlord.runtimes.transport.switchboard import SERVICE, Book, Peer, PeerGone, Pending, Sender

ROLES = "overlord.runtimes.transport.role_main"
"""The nursery of roles."""
START_S = 120.0
"""How long a process may take until it listens; its imports take a second or two."""


class ProcessPeer:
    """A role in another process of this host.

    Args:
        path: Its socket.
        process: The process, for whoever started it: it may not listen yet.
    """

    def __init__(self, path: str, process: WorkerProcess | None = None) -> None:
        self.path = path
        self.process = process
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def ask(self, method: str, message: Any, sender: Sender = SERVICE) -> SocketAnswer:
        """Call a method of the role."""
        frame, blob = message_to_frame(method, message)
        envelope = {"method": method, "sender": list(sender), "blob": blob is not None}
        return self.send(envelope, frame if blob is None else [*frame, blob])

    def send(self, envelope: Mapping[str, Any], parts: Sequence[Any]) -> SocketAnswer:
        """Send a message on a connection of its own."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            send_frame(connection, envelope, parts)
        except OSError as error:
            connection.close()
            raise PeerGone(f"{error.strerror or error}") from error
        return SocketAnswer(self, connection, str(envelope["method"]))

    def keep(self, connection: socket.socket) -> None:
        """Take a connection back that has nothing under way."""
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close all connections that nobody waits on."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connect(self) -> socket.socket:
        until = time.monotonic() + START_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self.path)
                return connection
            except OSError as error:
                connection.close()
                if self.process is None or not self.process.alive or time.monotonic() > until:
                    raise PeerGone(f"it does not listen: {error.strerror or error}") from error
            time.sleep(0.02)


class SocketAnswer:
    """A call under way."""

    def __init__(self, peer: ProcessPeer, connection: socket.socket, method: str) -> None:
        self._peer = peer
        self._method = method
        self.connection: socket.socket | None = connection
        """None when the answer has come."""
        self._answer: Any = None
        self._gone: str | None = None
        self._lock = threading.Lock()

    def poll(self, timeout_s: float) -> Any:
        """Wait a while for the answer."""
        with self._lock:
            if self._gone is not None:
                raise PeerGone(self._gone)
            if self.connection is None:
                return self._answer
            if not _readable([self.connection], timeout_s):
                return None
            try:
                _, parts = receive_frame(self.connection)
            except (ServiceLost, OSError) as error:
                self.connection.close()
                self._gone = f"its connection broke off: {error}"
                raise PeerGone(self._gone) from error
            self._peer.keep(self.connection)
            self.connection, self._answer = None, answer_from_frame(self._method, frame_from(parts))
            return self._answer

    def __del__(self) -> None:
        if self.connection is not None:
            self.connection.close()  # nobody waits for the answer


class InlineBlobs:
    """Blobs that travel with the message: on one host a copy is cheaper than another place to keep them."""

    def put(self, block: npt.NDArray[np.uint8]) -> Any:
        """Return the block itself."""
        return block

    def get(self, blob: Any) -> npt.NDArray[np.uint8]:
        """Return the block itself."""
        return blob


class ProcessEngine:
    """Starts each role as a process of this host.

    Args:
        bundle: The job and its options, as the launcher sent them.
        folder: The service's folder, for sockets.
        hosts: Constructor hosts.
    """

    first_sign_s = 10.0
    """How long an incarnation may take until its first sign of life."""

    def __init__(self, bundle: bytes, folder: Path, hosts: int) -> None:
        self._bundle = bundle
        self._folder = folder
        self._hosts = hosts
        self._lock = threading.Lock()
        self._nursery = Nursery(ROLES)

    def start(self, site: Site, generation: int) -> Peer:
        """Start a process for a role."""
        path = str(self._folder / f"{site.name.replace(' ', '-')}.{generation}")
        site_facts = site.facts(self._hosts) | {"generation": generation}
        told = {"folder": str(self._folder), "socket": path, "site": site_facts, "paths": sys.path}
        with self._lock:
            if self._nursery.lost:  # killed like anything else may be; its roles went with it
                self._nursery.close()
                self._nursery = Nursery(ROLES)
            process = self._nursery.fork()
        try:
            send_frame(process.connection, told, [self._bundle])
        except OSError as error:
            process.end()
            raise PeerGone(f"it died while it was started: {error.strerror or error}") from error
        return ProcessPeer(path, process)

    def introduce(self, peer: Peer, book: Book) -> Pending:
        """Tell a role who is who: peers are known by their sockets."""
        assert isinstance(peer, ProcessPeer)
        paths = {name: one.path for name, one in book.peers.items() if isinstance(one, ProcessPeer)}
        return peer.send({"method": "learn", "paths": paths}, frame_of(book.head()))

    def kill(self, peer: Peer, site: Site, pid: int) -> None:
        """Kill a process and wait for its end."""
        assert isinstance(peer, ProcessPeer) and peer.process is not None
        peer.close()
        with contextlib.suppress(ProcessLookupError):  # nobody else has its id: its nursery has not reaped it
            os.kill(peer.process.pid, signal.SIGKILL)
        # The nursery may hang as well, and nobody who waits for a shadow waits for that.
        threading.Thread(target=peer.process.end, name="overlord-reap", daemon=True).start()
        Path(peer.path).unlink(missing_ok=True)

    def wait(self, pending: Sequence[Pending], timeout_s: float) -> None:
        """Wait until an answer is there, or for a while."""
        waiting = [p.connection for p in pending if isinstance(p, SocketAnswer) and p.connection is not None]
        if waiting:
            _readable(waiting, timeout_s)
        else:
            time.sleep(timeout_s)

    def place_again(self, site: Site) -> Site:
        """Return the same site: there is one host."""
        return site

    def describe(self, sites: Sequence[tuple[Site, int]]) -> dict[str, Any]:
        """Return nothing more than what the supervisor tells."""
        return {}

    def close(self) -> None:
        """End the nursery, and whoever it still has."""
        self._nursery.close()


def _readable(connections: Sequence[socket.socket], timeout_s: float) -> bool:
    ready = select.poll()  # not select.select, which knows only the first 1024 descriptors
    for connection in connections:
        if connection.fileno() >= 0:
            ready.register(connection, select.POLLIN)
    return bool(ready.poll(timeout_s * 1000))
