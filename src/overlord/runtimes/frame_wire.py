"""Frames on a Unix socket: a JSON envelope, and the bytes of all parts behind it. No pickles."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.errors import ServiceLost
from overlord.runtimes.frames import Frame
from overlord.runtimes.wire import receive_exactly

_HEAD = struct.Struct("<IQ")
_ALIGN = 64
_SMALL = 1 << 16
"""Parts up to this are joined before they are sent."""
MAX_ENVELOPE = 64 << 20
MAX_BYTES = 1 << 36


def send_frame(connection: socket.socket, envelope: Mapping[str, Any], parts: Sequence[Any]) -> None:
    """Send an envelope and parts (bytes or arrays)."""
    arrays = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else np.asarray(part) for part in parts]
    table = [[array.dtype.str, list(array.shape)] for array in arrays]
    body = json.dumps({**envelope, "parts": table}, separators=(",", ":")).encode()
    total = sum(_padded(array.nbytes) for array in arrays)
    waiting = bytearray(_HEAD.pack(len(body), total) + body)
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        padding = bytes(_padded(array.nbytes) - array.nbytes)
        if array.nbytes <= _SMALL:
            waiting += data.tobytes() + padding
            continue
        connection.sendall(waiting)
        connection.sendall(data)  # type: ignore[arg-type]
        waiting = bytearray(padding)
    connection.sendall(waiting)


def receive_frame(connection: socket.socket) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
    """Wait for an envelope and its parts; arrays are views into one block.

    Raises:
        ServiceLost: when the other side is gone, or speaks another language.
    """
    length, total = _HEAD.unpack(receive_exactly(connection, _HEAD.size))
    if length > MAX_ENVELOPE or total > MAX_BYTES:
        raise ServiceLost(f"the peer announced a message of {length + total} bytes; this is not a role of overlord.")
    envelope = json.loads(receive_exactly(connection, length))
    block = np.empty(total, np.uint8)
    view, at = memoryview(block), 0  # type: ignore[arg-type]
    while at < total:
        count = connection.recv_into(view[at:])
        if not count:
            raise ServiceLost("the other side closed the connection")
        at += count
    parts: list[npt.NDArray[Any]] = []
    at = 0
    for name, shape in envelope.pop("parts"):
        kind = np.dtype(name)
        if kind.hasobject:
            raise ServiceLost("the peer sent objects; this is not a role of overlord.")
        nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        parts.append(block[at : at + nbytes].view(kind).reshape(shape))
        at += _padded(nbytes)
    return envelope, parts


def frame_from(parts: Sequence[npt.NDArray[Any]]) -> Frame:
    """Make a frame of received parts: the first one is its head."""
    return [parts[0].tobytes(), *parts[1:]]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
