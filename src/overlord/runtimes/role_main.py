"""The processes of roles on a host without an engine: each answers frames on a Unix socket until its service is gone.

They are forked by a nursery that has everything imported: a successor is there in milliseconds, and the libraries are
in memory once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from typing import Any

from overlord.errors import OverlordError
from overlord.runtimes.frame_wire import frame_from, receive_frame, send_frame
from overlord.runtimes.frames import Frame, frame_of
from overlord.runtimes.process_engine import InlineBlobs, ProcessPeer
from overlord.runtimes.role_host import RoleHost
from overlord.runtimes.warming import warm_common
from overlord.runtimes.worker_main import run_nursery

END_S = 5.0
"""How long a role may take to end when its service is gone; then its process ends hard."""


def serve(connection: socket.socket) -> None:
    """Be a role: what it is comes first on the connection, whose end is the end of the service."""
    told, parts = receive_frame(connection)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(told["socket"])  # of a service that was killed, in whose folder this one goes on
        try:
            listener.bind(told["socket"])
        except FileNotFoundError:
            return  # the service is gone, and its folder with it
        listener.listen(128)
        desk = _Desk(RoleHost(parts[0].tobytes(), told["paths"], told["folder"], told["site"], InlineBlobs()))
        threading.Thread(target=_accept, args=(listener, desk), daemon=True).start()
        connection.recv(1)  # nothing ever comes
    hurry = threading.Timer(END_S, os._exit, (1,))
    hurry.daemon = True
    hurry.start()
    desk.answer({"method": "close", "sender": ("service", 0), "blob": False}, frame_of({}))
    os._exit(0)  # threads may still wait for peers that are gone too


class _Desk:
    """Reads messages as calls."""

    def __init__(self, host: RoleHost) -> None:
        self._host = host
        self._peers: dict[str, ProcessPeer] = {}

    def answer(self, envelope: dict[str, Any], frame: Frame) -> Frame:
        """Answer one message."""
        if envelope["method"] == "learn":
            return self._learn(envelope["paths"], frame)
        blob = frame.pop() if envelope["blob"] else None
        name, generation = envelope["sender"]
        return self._host.ask(envelope["method"], frame, blob, (name, generation))

    def _learn(self, paths: dict[str, str], frame: Frame) -> Frame:
        # One peer for each incarnation: it keeps its connections from book to book.
        peers = {name: self._peers.get(path) or ProcessPeer(path) for name, path in paths.items()}
        self._peers = {peer.path: peer for peer in peers.values()}
        return self._host.learn(json.loads(frame[0]), peers)


def _accept(listener: socket.socket, desk: _Desk) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the service is gone
        threading.Thread(target=_converse, args=(connection, desk), daemon=True).start()


def _converse(connection: socket.socket, desk: _Desk) -> None:
    with connection:
        try:
            while True:
                envelope, parts = receive_frame(connection)
                send_frame(connection, {}, desk.answer(envelope, frame_from(parts)))
        except (OverlordError, OSError):
            return  # whoever asked is gone


if __name__ == "__main__":
    warm_common()  # once, for all that are forked
    run_nursery(serve)
