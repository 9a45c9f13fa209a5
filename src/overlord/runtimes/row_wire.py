"""Rows on a socket: a JSON head, and the columns behind it as raw bytes. No pickles.

Rules of this file:
1. A frame is two lengths, the head, the body; every column begins on a multiple of 8 bytes: it is read in place.
2. A side that must not wait for ever gives its socket a timeout and a `tick`, which is called each time that runs out.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import Ragged, RowBatch
from overlord.errors import ServiceLost
from overlord.runtimes.wire import to_text

_LENGTHS = struct.Struct("<QQ")
_ALIGN = 8

Bytes = npt.NDArray[np.uint8]
Tick = Callable[[], None]
"""Called when the socket's timeout has run out once; raises to give up."""


def send_rows(connection: socket.socket, head: dict[str, Any], rows: RowBatch, tick: Tick | None = None) -> None:
    """Send a message with some rows.

    Raises:
        TypeError: for a column of Python objects, before anything is sent.
        ServiceLost: when the other side is gone.
    """
    frame = memoryview(rows_to_bytes(head, rows))  # type: ignore[arg-type]
    while frame:
        try:
            frame = frame[connection.send(frame) :]
        except TimeoutError:
            _wait_on(tick)
        except OSError as error:
            raise ServiceLost(f"the connection broke: {error}") from error


def receive_rows(connection: socket.socket, tick: Tick | None = None) -> tuple[dict[str, Any], RowBatch]:
    """Wait for a message; its columns are views into one block of memory.

    Raises:
        ServiceLost: when the other side is gone, or what it sends is no frame.
    """
    head, body = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size, tick).tobytes())
    block = _exactly(connection, head + body, tick)
    try:
        message: dict[str, Any] = json.loads(block[:head].tobytes().decode())
        return message, _columns(message.pop("columns"), block[head:])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ServiceLost(f"the other side sent {head + body} bytes that are no rows ({error})") from error


def rows_to_bytes(head: dict[str, Any], rows: RowBatch) -> Bytes:
    """Return one frame: lengths, head and columns."""
    if not rows:
        text = to_text({**head, "columns": []}).encode()
        return np.frombuffer(_LENGTHS.pack(len(text), 0) + text, np.uint8)
    table: list[tuple[str, str, str, list[int]]] = []
    arrays: list[npt.NDArray[Any]] = []
    for name, column in rows.items():
        if isinstance(column, Ragged):
            first, last = column.offsets[0], column.offsets[-1]
            parts = {"values": column.values[first:last], "offsets": column.offsets - first}
        else:
            parts = {"numbers": column}
        for part, array in parts.items():
            if array.dtype.hasobject:
                raise TypeError(f"column {name!r} holds Python objects; rows travel as numbers, text and bytes only")
            table.append((name, part, array.dtype.str, list(array.shape)))
            arrays.append(array)
    text = to_text({**head, "columns": table}).encode()
    text += b" " * (-len(text) % _ALIGN)
    sizes = [_padded(array.nbytes) for array in arrays]
    frame = np.empty(_LENGTHS.size + len(text) + sum(sizes), np.uint8)
    lead = _LENGTHS.pack(len(text), sum(sizes)) + text
    frame[: len(lead)] = np.frombuffer(lead, np.uint8)
    at = len(lead)
    for array, size in zip(arrays, sizes, strict=True):
        frame[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        frame[at + array.nbytes : at + size] = 0
        at += size
    return frame


def _columns(table: list[tuple[str, str, str, list[int]]], body: Bytes) -> RowBatch:
    rows: RowBatch = {}
    values: npt.NDArray[Any] | None = None
    at = 0
    for name, part, kind, shape in table:
        dtype = np.dtype(kind)
        nbytes = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or nbytes < 0 or at + nbytes > len(body):
            raise ValueError(f"column {name!r} leaves the frame")
        array = body[at : at + nbytes].view(dtype).reshape(shape)
        at += _padded(nbytes)
        if part == "values":
            values = array
        else:
            rows[name] = array if part == "numbers" or values is None else Ragged(values, array)
    return rows


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _exactly(connection: socket.socket, count: int, tick: Tick | None) -> Bytes:
    block = np.empty(count, np.uint8)
    left = memoryview(block)  # type: ignore[arg-type]
    while left:
        try:
            received = connection.recv_into(left)
        except TimeoutError:
            _wait_on(tick)
            continue
        except OSError as error:
            raise ServiceLost(f"the connection broke: {error}") from error
        if not received:
            raise ServiceLost("the other side closed the connection")
        left = left[received:]
    return block


def _wait_on(tick: Tick | None) -> None:
    if tick is None:
        raise ServiceLost("the other side does not answer")
    tick()
