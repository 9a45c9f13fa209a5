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
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from overlord.runtimes.autoscaling.warming import warm_common
from overlord.runtimes.supervision.worker_main import run_nursery
from overlord.runtimes.transport.doors import open_door
from overlord.runtimes.transport.frames import Frame, frame_from, frame_of, receive_frame, send_frame
from overlord.runtimes.transport.process_engine import InlineBlobs, ProcessPeer
from overlord.runtimes.transport.role_host import RoleHost

END_S = 5.0
"""How long a role may take to end when its service is gone; then its process ends hard."""


def serve(connection: socket.socket) -> None:
    """Be a role: what it is comes first on the connection, whose end is the end of the service."""
    told, parts = receive_frame(connection)
    coming: Future[_Desk] = Future()  # whoever comes early waits for it at the open door
    with contextlib.ExitStack() as door:
        try:
            door.enter_context(open_door(Path(told["socket"]), lambda talk: coming.result().converse(talk)))
        except FileNotFoundError:
            return  # the service is gone, and its folder with it
        desk = _Desk(RoleHost(parts[0].tobytes(), told["paths"], told["folder"], told["site"], InlineBlobs()))
        coming.set_result(desk)
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

    def converse(self, connection: socket.socket) -> None:
        """Answer messages until whoever asked is gone."""
        while True:
            envelope, parts = receive_frame(connection)
            send_frame(connection, {}, self.answer(envelope, frame_from(parts)))

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


if __name__ == "__main__":
    warm_common()  # once, for all that are forked
    run_nursery(serve)
