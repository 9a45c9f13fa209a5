"""What roles say to one another across hosts: a JSON head and plain arrays. No Python object of ours is ever pickled.

Rules of this file:
1. A frame is a list: the head as bytes, then the arrays it speaks of, in its order. An engine carries arrays without
   looking into them, and hands them out without a copy where it can.
2. An error travels as its name, its message and the source it is about, like everything else.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.messages import Media, MetaDelta, MetaRequest, Payload
from overlord.core.ragged import Ragged, RowBatch
from overlord.core.samples import META, Cursor
from overlord.errors import OverlordError, ServiceLost, error_named
from overlord.runtimes.transport.wire import receive_exactly, to_text

Frame = list[Any]
"""The head, then arrays."""

_ERROR = "!"
"""The key of an error; heads hold no names of users beside it."""
_ERROR_BEGINS = b'{"!":'
_MEDIA = ("rows", "start", "length", "grids", "seconds", "seeds", "bad", "values", "begin", "nbytes_of")


def frame_of(head: Any, arrays: Sequence[npt.NDArray[Any]] = ()) -> Frame:
    """Make a frame.

    Example:
        >>> head, arrays = open_frame(frame_of({"step": 3}, [np.arange(2)]))
        >>> head["step"], next(arrays).tolist()
        (3, [0, 1])
    """
    return [json.dumps(head, separators=(",", ":")).encode(), *arrays]


def open_frame(frame: Frame) -> tuple[Any, Iterator[npt.NDArray[Any]]]:
    """Return the head of a frame, and its arrays one after the other.

    Raises:
        OverlordError: the error that was sent instead of an answer.
    """
    head = json.loads(frame[0])
    if isinstance(head, dict) and _ERROR in head:
        raise error_named(*head[_ERROR])
    return head, iter(frame[1:])


def error_in(frame: Frame) -> OverlordError | None:
    """Return the error that was sent instead of an answer, if it is one.

    Example:
        >>> error_in(error_frame(OverlordError("no"))), error_in(frame_of({"step": 3}))
        (OverlordError('no'), None)
    """
    if not frame[0].startswith(_ERROR_BEGINS):
        return None
    return error_named(*json.loads(frame[0])[_ERROR])


def error_frame(error: BaseException) -> Frame:
    """Make the frame that raises an error where it is opened."""
    if isinstance(error, OverlordError):
        return frame_of({_ERROR: [type(error).__name__, str(error), error.source]})
    return frame_of({_ERROR: ["OverlordError", f"{type(error).__name__}: {error}"]})


def frame_bytes(frame: Frame) -> int:
    """Return how many bytes a frame holds."""
    return len(frame[0]) + sum(array.nbytes for array in frame[1:])


def requests_to_frame(requests: Sequence[MetaRequest], **facts: Any) -> Frame:
    """Write what a planner asks of loaders, and what it tells them beside."""
    return frame_of({"requests": [[r.source, list(r.cursor), r.count] for r in requests], **facts})


def requests_from_frame(frame: Frame) -> list[MetaRequest]:
    """Read what a planner asks of loaders."""
    head, _ = open_frame(frame)
    return [MetaRequest(source, Cursor(*cursor), count) for source, cursor, count in head["requests"]]


def deltas_to_frame(deltas: Sequence[MetaDelta]) -> Frame:
    """Write what loaders know of samples."""
    head = [[d.source, len(d.meta), list(d.next_cursor), -1 if d.items is None else len(d.items)] for d in deltas]
    listed = [d.items for d in deltas if d.items is not None]
    meta = np.concatenate([d.meta for d in deltas]).view(np.uint8) if deltas else np.empty(0, np.uint8)
    return frame_of({"deltas": head}, [meta, *([np.concatenate(listed)] if listed else [])])


def deltas_from_frame(frame: Frame) -> list[MetaDelta]:
    """Read what loaders know of samples."""
    head, arrays = open_frame(frame)
    meta, items = next(arrays).view(META), next(arrays, np.empty((0, 4), np.int32))
    deltas: list[MetaDelta] = []
    row = item = 0
    for source, rows, cursor, listed in head["deltas"]:
        mine = items[item : item + listed] if listed >= 0 else None
        deltas.append(MetaDelta(source, meta[row : row + rows], Cursor(*cursor), mine))
        row, item = row + rows, item + max(listed, 0)
    return deltas


def payloads_to_frame(payloads: Sequence[Payload], **facts: Any) -> Frame:
    """Write the samples that loaders hand over, and some numbers beside them."""
    heads: list[dict[str, Any]] = []
    arrays: list[npt.NDArray[Any]] = []
    for payload in payloads:
        media = payload.media
        heads.append({"step": payload.step, "source": payload.source, "labels": payload.labels, "late": payload.late,
                      "part": payload.chosen is not None,
                      "media": None if media is None else [media.kind, media.encoded]})  # fmt: skip
        for column in (payload.tokens, payload.loss):
            first, last = int(column.offsets[0]), int(column.offsets[-1])
            arrays += [column.values[first:last], column.offsets - first]
        arrays += [] if payload.chosen is None else [payload.chosen]
        arrays += [] if media is None else [np.ascontiguousarray(getattr(media, name)) for name in _MEDIA]
    return frame_of({"payloads": heads, **facts}, arrays)


def payloads_from_frame(frame: Frame) -> tuple[list[Payload], dict[str, Any]]:
    """Read the samples that loaders handed over, and the numbers beside them; columns are views into the frame."""
    head, arrays = open_frame(frame)
    payloads: list[Payload] = []
    for one in head.pop("payloads"):
        tokens, loss = (Ragged(next(arrays), next(arrays)) for _ in range(2))
        chosen = next(arrays) if one["part"] else None
        media = None
        if one["media"] is not None:
            columns = {name: next(arrays) for name in _MEDIA}
            media = Media(kind=one["media"][0], encoded=one["media"][1], **columns)
        payloads.append(Payload(one["step"], one["source"], tokens, loss, media, chosen, one["labels"], one["late"]))
    return payloads, head


# --------------------------------------------------------------------------------------------------------------
# Frames on a Unix socket: a JSON envelope, and the bytes of all parts behind it. No pickles.


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


# --------------------------------------------------------------------------------------------------------------
# Rows on a socket: a JSON head, and the columns behind it as raw bytes. No pickles.
#
# Rules of this file:
# 1. A frame is two lengths, the head, the body; every column begins on a multiple of 8 bytes: it is read in place.
# 2. A side that must not wait for ever gives its socket a timeout and a `tick`, which is called each time that runs
#    out.


_LENGTHS = struct.Struct("<QQ")
_ROW_ALIGN = 8

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
    text += b" " * (-len(text) % _ROW_ALIGN)
    sizes = [_row_padded(array.nbytes) for array in arrays]
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
        at += _row_padded(nbytes)
        if part == "values":
            values = array
        else:
            rows[name] = array if part == "numbers" or values is None else Ragged(values, array)
    return rows


def _row_padded(nbytes: int) -> int:
    return -(-nbytes // _ROW_ALIGN) * _ROW_ALIGN


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
