"""The protocol on the Unix socket: JSON messages with a length before them, descriptors beside them. No pickles.

A service takes no descriptors, and bounds what a peer that sends half a message can hold: bytes of one message, bytes
of all messages that are being read, and the time from the first byte of a message to its last.
"""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import ServiceLost
from overlord.roles.client import StepHeader

_HEAD = struct.Struct("<II")
to_text = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` makes an encoder for every message
MAX_MESSAGE = 64 << 20
MAX_ASKED = 8 << 20
"""Bytes of a message to a service: the largest are states, of a few hundred bytes a source."""
MAX_READING = 64 << 20
"""Bytes of all messages that a service is in the middle of reading."""
MESSAGE_S = 30.0
"""How long a message to a service may take from its first byte to its last."""
LOOK_S = 5.0
"""How often a service that waits for the rest of a message looks at the time."""
_SLICE = 1 << 20


class _Reading:
    """Counts the bytes of messages that are being read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        with self._lock:
            if self._bytes + count > MAX_READING:
                raise ServiceLost(f"messages of {self._bytes} bytes are being read; one of {count} does not fit beside")
            self._bytes += count
        try:
            yield
        finally:
            with self._lock:
                self._bytes -= count


_reading = _Reading()


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


def receive_asked(connection: socket.socket) -> dict[str, Any]:
    """Wait for one message to a service, for as long as none begins; `expect_within(connection, LOOK_S)` comes first.

    Raises:
        ServiceLost: when the other side is gone, sends what no client sends, or stops in the middle of a message.
    """
    until = math.inf

    def read(count: int) -> bytes:
        nonlocal until
        parts: list[bytes] = []
        while count:
            parts.append(_receive_some(connection, min(count, _SLICE), check))
            count -= len(parts[-1])
            until = min(until, time.monotonic() + MESSAGE_S)
            check()  # also where something comes now and then
        return b"".join(parts)

    def check() -> None:
        if time.monotonic() > until:
            raise ServiceLost(f"a message was not complete {MESSAGE_S:g} s after it began")

    length, num_fds = _HEAD.unpack(read(_HEAD.size))
    if length > MAX_ASKED or num_fds:
        raise ServiceLost(f"a message of {length} bytes with {num_fds} descriptors was announced; no client sends that")
    with _reading.room(length):
        message = json.loads(read(length))
    if not isinstance(message, dict):
        raise ServiceLost("a message is not an object; no client sends that")
    return message


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
        parts.append(_receive_some(connection, count, in_silence))
        count -= len(parts[-1])
    return b"".join(parts)


def _receive_some(connection: socket.socket, most: int, in_silence: Callable[[], None] | None) -> bytes:
    while True:
        try:
            part = connection.recv(most)
        except BlockingIOError as error:
            if in_silence is None:
                raise ServiceLost("the other side does not answer") from error
            in_silence()
            continue
        except OSError as error:
            raise ServiceLost(f"the connection broke: {error}") from error
        if not part:
            raise ServiceLost("the other side closed the connection")
        return part


# --------------------------------------------------------------------------------------------------------------
# What a client is told of a step, as JSON between its process and the service's.


def header_to_json(header: StepHeader) -> dict[str, Any]:
    """Return a step header as JSON, without the names of the sources: they are told once."""
    found = {name: getattr(header, name) for name in StepHeader.__dataclass_fields__ if name != "names"}
    for name in ("mesh", "next_mesh"):
        found[name] = None if found[name] is None else mesh_to_text(found[name])
    return found


def header_from_json(given: Mapping[str, Any], names: tuple[str, ...]) -> StepHeader:
    """Read a step header; the names of the sources were told before, or with it."""
    meshes = {name: mesh_from_text(given[name]) for name in ("mesh", "next_mesh") if given[name] is not None}
    return StepHeader(**{**given, **meshes}, names=names)


@functools.lru_cache(maxsize=16)
def mesh_to_text(tree: ClientPlaceTree) -> str:
    """Write a mesh; that of many steps is the same one."""
    return str(tree)


@functools.lru_cache(maxsize=16)
def mesh_from_text(text: str) -> ClientPlaceTree:
    """Read a mesh that `mesh_to_text` wrote."""
    return ClientPlaceTree.parse(text)
