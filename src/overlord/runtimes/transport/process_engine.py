"""Roles as processes of one host: forked by a fork server, called on Unix sockets, killed when they are replaced.

Rules of this file:
1. A connection carries one call at a time; a caller with many calls under way has as many connections.
2. A process ends with the service, also one that is stopped: its fork server does, and the kernel kills its children.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from overlord.core.messages import CallRole, Close, StartRole
from overlord.errors import ServiceLost
from overlord.runtimes.hosts.peers import Blobs
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.launching.deployment import warm_common
from overlord.runtimes.supervision.child import LIMITS, Backoff, Limits, name_process
from overlord.runtimes.supervision.fork_server import ForkedChild, ForkServer, start_template
from overlord.runtimes.transport.codec import Frame, frame_of, receive_frame, send_frame
from overlord.runtimes.transport.engine import SERVICE, Membership, Peer, PeerGone, Pending, Sender
from overlord.runtimes.transport.listener import listen
from overlord.runtimes.transport.role_codec import (
    answer_from_frame,
    from_frame,
    receive_message,
    send_message,
    to_frame,
)
from overlord.runtimes.transport.role_endpoint import RoleEndpoint


class ProcessPeer:
    """A role in another process of this host.

    Args:
        path: Its socket.
        process: The process, in the service that started it: it may not listen yet.
    """

    def __init__(self, path: str, process: ForkedChild | None = None) -> None:
        self.path = path
        self.process = process
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    def ask(self, method: str, message: Any, sender: Sender = SERVICE) -> SocketAnswer:
        """Call a method of the role."""
        frame, plan = to_frame(message)
        call = CallRole(method, sender, frame[0], plan is not None)
        return self.send(call, frame[1:] if plan is None else [*frame[1:], plan])

    def send(self, call: CallRole, arrays: Sequence[Any] = ()) -> SocketAnswer:
        """Send a call on a connection of its own."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            send_frame(connection, [*frame_of(call), *arrays])
        except ServiceLost as error:
            connection.close()
            raise PeerGone(str(error)) from error
        return SocketAnswer(self, connection)

    def keep(self, connection: socket.socket) -> None:
        """Take a connection back that has nothing under way."""
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close all connections that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connect(self) -> socket.socket:
        until, backoff = time.monotonic() + LIMITS.listen, Backoff(0.02, 0.02)
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self.path)
                return connection
            except OSError as error:
                connection.close()
                if self.process is None or not self.process.alive or time.monotonic() > until:
                    raise PeerGone(f"it does not listen: {error.strerror or error}") from error
            backoff.pause()


class SocketAnswer:
    """A call under way."""

    def __init__(self, peer: ProcessPeer, connection: socket.socket) -> None:
        self._peer = peer
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
                frame, _ = receive_frame(self.connection)
            except ServiceLost as error:
                self.connection.close()
                self._gone = f"its connection broke off: {error}"
                raise PeerGone(self._gone) from error
            self._peer.keep(self.connection)
            self.connection, self._answer = None, answer_from_frame(frame)
            return self._answer

    def __del__(self) -> None:
        if self.connection is not None:
            self.connection.close()  # the caller does not want the answer any more


class ProcessEngine:
    """Starts each role as a process of this host.

    Args:
        bundle: The job and its options, as the launcher sent them.
        folder: The service's folder, for sockets.
        hosts: Constructor hosts.
        limits: How long a process may take to start.
    """

    def __init__(self, bundle: bytes, folder: Path, hosts: int, limits: Limits = LIMITS) -> None:
        self._bundle = bundle
        self._folder = folder
        self._hosts = hosts
        self._limits = limits
        self.first_sign_s = limits.role_first_sign
        self._server = ForkServer("overlord.runtimes.transport.process_engine", limits)

    def start(self, site: Site, generation: int) -> Peer:
        """Start a process for a role."""
        path = str(self._folder / f"{site.name.replace(' ', '-')}.{generation}")
        site_facts = site.facts(self._hosts) | {"generation": generation}
        bundle, end_s = np.frombuffer(self._bundle, np.uint8), self._limits.orphaned_role
        process = self._server.fork()
        try:
            send_message(
                process.connection, StartRole(str(self._folder), path, site_facts, list(sys.path), end_s, bundle)
            )
        except ServiceLost as error:
            process.close()
            raise PeerGone(f"it died while it was started: {error}") from error
        return ProcessPeer(path, process)

    def introduce(self, peer: Peer, membership: Membership) -> Pending:
        """Send a role the membership of its peers, which are known by their sockets."""
        assert isinstance(peer, ProcessPeer)
        paths = {name: one.path for name, one in membership.peers.items() if isinstance(one, ProcessPeer)}
        return peer.send(CallRole("learn", SERVICE, to_frame(membership.head())[0][0], paths=paths))

    def kill(self, peer: Peer, site: Site, pid: int) -> None:
        """Kill a process; its exit is collected beside."""
        assert isinstance(peer, ProcessPeer) and peer.process is not None
        peer.close()
        peer.process.kill("was killed by its supervisor")
        # The fork server may hang as well, and the promotion of a shadow must not wait for that.
        threading.Thread(target=peer.process.close, name="overlord-reap", daemon=True).start()
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

    def reserve(self, site: Site, sidecars: Collection[str]) -> Site:
        """Return the same site: there is one host, and nothing of it is reserved."""
        return site

    def release(self, site: Site) -> None:
        """Nothing was reserved."""

    def describe(self, sites: Sequence[tuple[Site, int]]) -> dict[str, Any]:
        """Return nothing more than what the supervisor tells."""
        return {}

    def close(self) -> None:
        """End the fork server and all its children."""
        self._server.close()


def _readable(connections: Sequence[socket.socket], timeout_s: float) -> bool:
    ready = select.poll()  # not select.select, which knows only the first 1024 descriptors
    for connection in connections:
        if connection.fileno() >= 0:
            ready.register(connection, select.POLLIN)
    return bool(ready.poll(timeout_s * 1000))


# --------------------------------------------------------------------------------------------------------------
# In the process of a role, which answers frames on a Unix socket until its service is gone.


def preload() -> None:
    """Import and compile what all roles use, once for all that are forked."""
    warm_common()


def serve(connection: socket.socket) -> None:
    """Be a role: which one is the first message on the connection, and the end of the connection ends it."""
    told: StartRole = receive_message(connection)[0]
    name_process(f"{told.site['role']}{told.site['number']}")
    if told.site["role"] != "planner":
        start_template()  # for its process workers and reader processes; now, before it has threads
    coming: Future[_RoleServer] = Future()  # early callers wait for it
    with contextlib.ExitStack() as listening:
        try:
            listening.enter_context(listen(Path(told.socket), lambda caller: coming.result().answer_all(caller)))
        except FileNotFoundError:
            return  # the service is gone, and its folder with it
        server = _RoleServer(RoleEndpoint(told.bundle.tobytes(), told.paths, told.folder, told.site, Blobs()))
        coming.set_result(server)
        connection.recv(1)  # nothing ever comes
    hurry = threading.Timer(told.end_s, os._exit, (1,))
    hurry.daemon = True
    hurry.start()
    server.answer(CallRole("close", SERVICE, to_frame(Close())[0][0]), [])
    os._exit(0)  # threads may still wait for peers that are gone too


class _RoleServer:
    """Turns messages into calls of the role."""

    def __init__(self, host: RoleEndpoint) -> None:
        self._host = host
        self._peers: dict[str, ProcessPeer] = {}

    def answer_all(self, connection: socket.socket) -> None:
        """Answer messages until the caller closes the connection."""
        while True:
            frame, _ = receive_frame(connection)
            send_frame(connection, self.answer(from_frame(frame), frame[1:]))

    def answer(self, call: CallRole, arrays: list[Any]) -> Frame:
        """Answer one call."""
        if call.method == "learn":
            return self._learn(call)
        plan = arrays.pop() if call.plan else None
        return self._host.ask(call.method, [call.head, *arrays], plan, call.sender)

    def _learn(self, call: CallRole) -> Frame:
        # One peer for each instance of a role: it keeps its connections from one membership to the next.
        peers = {name: self._peers.get(path) or ProcessPeer(path) for name, path in call.paths.items()}
        self._peers = {peer.path: peer for peer in peers.values()}
        return self._host.learn(from_frame([call.head]), peers)
