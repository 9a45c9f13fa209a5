"""The protocol on the Unix socket: JSON messages with a length before them, descriptors beside them. No pickles."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
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


def receive(
    connection: socket.socket, in_silence: Callable[[], None] | None = None
) -> tuple[dict[str, Any], list[int]]:
    """Wait for one message.

    Args:
        connection: Where it comes from.
        in_silence: Called whenever nothing came for as long as the connection may be silent; it may raise.

    Raises:
        ServiceLost: when the other side is gone.
    """
    length, num_fds = _HEAD.unpack(receive_exactly(connection, _HEAD.size, in_silence))
    if length > MAX_MESSAGE:
        raise ServiceLost(f"the peer announced a message of {length} bytes; this is not an overlord service.")
    message = json.loads(receive_exactly(connection, length, in_silence))
    fds: list[int] = []
    if num_fds:
        _, fds, _, _ = socket.recv_fds(connection, 1, num_fds)
        if len(fds) < num_fds:  # it was killed between the message and what goes along
            for fd in fds:
                os.close(fd)
            raise ServiceLost("the other side closed the connection")
    return message, fds


def expect_within(connection: socket.socket, seconds: float) -> None:
    """Let a connection be silent for so long at most.

    By the kernel, not by `settimeout`, with which every call would poll first.
    """
    whole = int(seconds)
    limit = struct.pack("@ll", whole, int(1e6 * (seconds - whole)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def receive_exactly(connection: socket.socket, count: int, in_silence: Callable[[], None] | None = None) -> bytes:
    """Wait for so many bytes.

    Raises:
        ServiceLost: when the other side is gone.
    """
    parts: list[bytes] = []
    while count:
        try:
            part = connection.recv(count)
        except BlockingIOError as error:
            if in_silence is None:
                raise ServiceLost("the other side does not answer") from error
            in_silence()
            continue
        except OSError as error:
            raise ServiceLost(f"the connection broke: {error}") from error
        if not part:
            raise ServiceLost("the other side closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
