"""The protocol on the Unix socket: JSON messages with a length before them, descriptors beside them. No pickles."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from overlord.errors import ServiceLost

_HEAD = struct.Struct("<II")
to_text = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` makes an encoder for every message
MAX_MESSAGE = 64 << 20


def send(connection: socket.socket, message: dict[str, Any] | str, fds: list[int] | None = None) -> None:
    """Send one message (or its JSON), with file descriptors if there are any."""
    body = (message if isinstance(message, str) else to_text(message)).encode()
    connection.sendall(_HEAD.pack(len(body), len(fds or ())) + body)
    if fds:
        socket.send_fds(connection, [b"F"], fds)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for one message.

    Raises:
        ServiceLost: when the other side is gone.
    """
    length, num_fds = _HEAD.unpack(receive_exactly(connection, _HEAD.size))
    if length > MAX_MESSAGE:
        raise ServiceLost(f"the peer announced a message of {length} bytes; this is not an overlord service.")
    message = json.loads(receive_exactly(connection, length))
    fds: list[int] = []
    if num_fds:
        _, fds, _, _ = socket.recv_fds(connection, 1, num_fds)
    return message, fds


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Wait for so many bytes.

    Raises:
        ServiceLost: when the other side is gone.
    """
    parts: list[bytes] = []
    while count:
        try:
            part = connection.recv(count)
        except OSError as error:
            raise ServiceLost(f"the connection broke: {error}") from error
        if not part:
            raise ServiceLost("the other side closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
