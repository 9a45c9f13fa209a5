"""What roles say to one another, and a service to the processes it starts, as frames of the codec.

Rules of this file:
1. A role is asked with a message and gives an answer, both objects of core/messages.py or core/client_messages.py. A
   direct call passes them as they are; for other transports they are encoded here.
2. An error is an answer too: `unwrap` raises it.
3. A plan travels beside its message, as the block of bytes that the planner has put once.
"""

from __future__ import annotations

import functools
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from overlord.core.client_messages import Message
from overlord.core.messages import HandedOver, Rows, SharedArray, SharedRows, WithPlan, WorkerMessage
from overlord.core.plan import plan_from_bytes
from overlord.core.ragged import Ragged, RowBatch, Scattered
from overlord.core.samples import dtype_from_text, dtype_to_text, padded
from overlord.errors import OverlordError
from overlord.runtimes.transport import codec
from overlord.runtimes.transport.codec import (
    Frame,
    Garbled,
    OnSilence,
    error_of,
    failure_of,
    receive_frame,
    send_frame,
)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An answer whose last part is worked out when it is taken: what comes before is in the order of the calls."""

    finish: Callable[[], Any]


def unwrap(answer: Any) -> Any:
    """Return an answer.

    Raises:
        Exception: the error that came instead of one.
    """
    if isinstance(answer, Exception):
        raise answer
    return answer


def to_frame(message: Message | BaseException) -> tuple[Frame, Any]:
    """Encode a message or an error; return the frame, and the plan that goes beside it.

    Example:
        >>> from overlord.core.messages import FirstStep
        >>> from_frame(to_frame(FirstStep(3))[0]), from_frame(to_frame(OverlordError("no"))[0])
        (FirstStep(step=3, hosts={}, newest=None), OverlordError('no'))
    """
    if isinstance(message, BaseException):
        return codec.frame_of(failure_of(message)), None
    if isinstance(message, HandedOver):
        message = replace(message, payloads=[payload.compact() for payload in message.payloads])
    if isinstance(message, WithPlan):
        return codec.frame_of(replace(message, plan=None)), message.plan
    return codec.frame_of(message), None


def from_frame(frame: Frame, plan: Any = None) -> Any:
    """Decode what `to_frame` wrote: a message or an error.

    Args:
        frame: The frame.
        plan: What came beside it.
    """
    message = _decoder().message(frame)
    if plan is not None:
        return replace(message, plan=plan)
    return error_of(message) or message


def question_from_frame(frame: Frame, plan: Any = None) -> Any:
    """Decode a message to a role; the plan beside it is the block of its bytes."""
    return from_frame(frame, None if plan is None else plan_from_bytes(memoryview(plan)))


def answer_to_frame(answer: Any) -> Frame:
    """Encode an answer, or the error that comes instead of one; the slices of a plan beside it are its last parts."""
    frame, plan = to_frame(answer)
    return frame if plan is None else [*frame, *plan]


def answer_from_frame(frame: Frame) -> Any:
    """Decode an answer, or the error that comes instead of one."""
    message = from_frame(frame)
    return replace(message, plan=frame[1:]) if isinstance(message, WithPlan) and len(frame) > 1 else message


_decoder = functools.cache(lambda: codec.Decoder(Message))


def send_message(
    connection: socket.socket, message: Message, fds: Sequence[int] = (), on_silence: OnSilence | None = None
) -> None:
    """Send a message to a process of this service, with file descriptors if there are any.

    Raises:
        ServiceLost: when the other side is gone.
    """
    send_frame(connection, codec.frame_of(message), fds, on_silence)


def receive_message(connection: socket.socket, on_silence: OnSilence | None = None) -> tuple[Any, list[int]]:
    """Wait for a message of a process of this service; return it with the file descriptors that came along.

    Raises:
        ServiceLost: when the other side is gone.
    """
    frame, fds = receive_frame(connection, on_silence)
    return from_frame(frame), fds


# --------------------------------------------------------------------------------------------------------------
# Rows that a service and its workers exchange.

_rows_decoder = functools.cache(lambda: codec.Decoder(Rows))


def send_rows(
    connection: socket.socket, head: WorkerMessage, rows: RowBatch, on_silence: OnSilence | None = None
) -> None:
    """Send a message with some rows.

    Raises:
        TypeError: for a column of Python objects, before anything is sent.
        ServiceLost: when the other side is gone.
    """
    send_frame(connection, codec.frame_of(_rows_of(head, rows)), (), on_silence)


def receive_rows(connection: socket.socket, on_silence: OnSilence | None = None) -> tuple[WorkerMessage, RowBatch]:
    """Wait for a message; its columns are views into one block of memory.

    Raises:
        ServiceLost: when the other side is gone.
        Garbled: when what it sends are no rows.
    """
    frame, _ = receive_frame(connection, on_silence)
    try:
        found: Rows = _rows_decoder().message(frame)
    except OverlordError as error:
        raise Garbled(str(error)) from error
    return rows_from(found)


def _rows_of(head: WorkerMessage, rows: RowBatch) -> Rows:
    return Rows(head, {name: _arrays_of(name, column) for name, column in rows.items()})


def rows_from(found: Rows) -> tuple[WorkerMessage, RowBatch]:
    """Return the rows of a message.

    Raises:
        Garbled: when a column reaches out of its values; the kernels that read them do not look.
    """
    return found.head, {name: _column_of(name, arrays) for name, arrays in found.columns.items() if arrays}


def copied_bytes(rows: RowBatch, heap: npt.NDArray[np.uint8]) -> int:
    """Return how many bytes of a question `RowMemory` copies."""
    return sum(16 * len(column) + 8 if _lies_in(heap, column) else column.nbytes for column in rows.values())


def _lies_in(heap: npt.NDArray[np.uint8], column: Any) -> bool:
    """Whether a column is told by its place in the heap."""
    if isinstance(column, Scattered):
        return column.dtype == np.uint8 and _offset_in(heap, column.memory) is not None
    return isinstance(column, Ragged) and _offset_in(heap, column.values) is not None


class RowMemory:
    """Shared memory for the rows that a service and one process worker exchange, one block for each direction.

    What an array of an answer shares with the question (the encoded images of rows that were measured) is told by its
    place there, and not copied. Nor is what lies in the heap of the service.

    Args:
        asked: Memory of what the service sends.
        answered: Memory of the answers.
        heap: That of the service's `SharedHeap`.
    """

    def __init__(
        self,
        asked: npt.NDArray[np.uint8],
        answered: npt.NDArray[np.uint8],
        heap: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        self.asked = asked
        self.answered = answered
        self._heap = np.empty(0, np.uint8) if heap is None else heap
        self._sent: list[tuple[int, npt.NDArray[np.uint8]]] = []
        self._root = answered.base if isinstance(answered.base, np.ndarray) else answered
        """What arrays of an answer are views of: their `base`."""

    def fits(self, asked_bytes: int, answer_bytes: int) -> bool:
        """Whether a question and an answer of so many bytes fit."""
        return len(self.asked) >= asked_bytes and len(self.answered) >= answer_bytes

    def kept(self, rows: RowBatch) -> RowBatch:
        """Return the rows of an answer with copies of what the next answer overwrites."""

        def keep(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.array(array) if array.base is self._root else array

        return {
            name: Ragged(keep(one.values), keep(one.offsets)) if isinstance(one, Ragged) else keep(one)
            for name, one in rows.items()
        }

    def ask(self, head: WorkerMessage, rows: RowBatch) -> Message:
        """Write a question into the memory; return the message that tells of it, whole where it does not fit."""
        given, at = dict(rows), 0
        for name, column in rows.items():
            if isinstance(column, Scattered) and not _lies_in(self._heap, column):  # straight into the memory
                given[name] = column.gathered(self.asked[at:] if at + column.nbytes <= len(self.asked) else None)
                at += padded(column.nbytes)
        return self._write(head, given, self.asked, None, at)

    def answer(self, head: WorkerMessage, rows: RowBatch) -> Message:
        """Write an answer into the memory; return the message that tells of it, whole where it does not fit."""
        return self._write(head, rows, self.answered, self.asked)

    def question_of(self, message: SharedRows) -> tuple[WorkerMessage, RowBatch]:
        """Read a question; its columns are views of the memory."""
        return self._read(message, lambda array: self._heap if array.offset >= _IN_HEAP else self.asked)

    def answer_of(self, message: SharedRows) -> tuple[WorkerMessage, RowBatch]:
        """Read an answer; its columns are views of the memory, or of the rows that were sent.

        Raises:
            Garbled: when it points outside of them.
        """
        found = self._read(message, lambda array: None if array.asked else self.answered)
        self._sent = []
        return found

    def receive_answer(self, connection: socket.socket, on_silence: OnSilence) -> tuple[WorkerMessage, RowBatch, int]:
        """Wait for an answer; return also how many bytes of it did not fit into the memory.

        Raises:
            ServiceLost: when the other side is gone.
            Garbled: when it sends something else than rows, or points outside of its memory.
        """
        frame, _ = receive_frame(connection, on_silence)
        try:
            found = _decoder().message(frame)
        except OverlordError as error:
            raise Garbled(str(error)) from error
        if isinstance(found, SharedRows):
            return *self.answer_of(found), 0
        if not isinstance(found, Rows):
            raise Garbled(f"the other side sent {type(found).__name__} instead of rows")
        return *rows_from(found), sum(padded(array.nbytes) for array in frame[1:])

    def _write(
        self, head: WorkerMessage, rows: RowBatch, memory: npt.NDArray[np.uint8],
        shared: npt.NDArray[np.uint8] | None, at: int = 0,
    ) -> Message:  # fmt: skip
        self._sent = []
        frame, table = codec.frame_of(_rows_of(head, rows)), list[SharedArray]()
        for array in frame[1:]:
            data = np.ascontiguousarray(array)
            kind, offset, in_heap = dtype_to_text(array.dtype), _offset_in(shared, data), _offset_in(self._heap, data)
            if in_heap is not None:
                offset = _IN_HEAP + in_heap
            there = _offset_in(memory, data) if shared is None and at else None
            if there is not None:  # it was gathered there; an answer cannot point to it
                table.append(SharedArray(kind, array.shape, there, False))
            elif offset is None:
                if at + data.nbytes > len(memory):
                    return _rows_of(head, {n: c.gathered() if isinstance(c, Scattered) else c for n, c in rows.items()})
                memory[at : at + data.nbytes] = data.reshape(-1).view(np.uint8)
                if shared is None:  # a part of an answer may be told by its place here
                    self._sent.append((at, data.reshape(-1).view(np.uint8)))
                table.append(SharedArray(kind, array.shape, at, False))
                at += padded(data.nbytes)
            else:
                if shared is None:
                    self._sent.append((offset, data.reshape(-1).view(np.uint8)))
                table.append(SharedArray(kind, array.shape, offset, True))
        return SharedRows(frame[0], table)

    def _read(
        self, message: SharedRows, memory_of: Callable[[SharedArray], npt.NDArray[np.uint8] | None]
    ) -> tuple[WorkerMessage, RowBatch]:
        arrays: list[np.ndarray[Any, Any]] = []
        try:
            for one in message.arrays:
                dtype, memory, at = dtype_from_text(one.dtype), memory_of(one), one.offset
                nbytes = math.prod(one.shape) * dtype.itemsize
                if memory is None:  # a part of what was sent
                    begin, memory = next((b, s) for b, s in self._sent if b <= at < b + len(s))
                    at -= begin
                elif at >= _IN_HEAP:
                    at -= _IN_HEAP
                if dtype.hasobject or min(one.shape, default=0) < 0 or at < 0 or at + nbytes > len(memory):
                    raise ValueError(f"an array of {one.dtype} {one.shape} at {one.offset} leaves its memory")
                arrays.append(memory[at : at + nbytes].view(dtype).reshape(one.shape))
            return rows_from(_rows_decoder().message([message.head, *arrays]))
        except (OverlordError, ValueError, TypeError, OverflowError, SyntaxError, StopIteration) as error:
            raise Garbled(f"the other side sent something else than rows ({error})") from error


_IN_HEAP = 1 << 48
"""What the offsets of arrays in the heap begin with."""


def _offset_in(memory: npt.NDArray[np.uint8] | None, array: np.ndarray[Any, Any]) -> int | None:
    """Return where an array lies in some memory; None where it does not."""
    if memory is None or not array.nbytes:
        return None
    offset = array.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    return offset if offset >= 0 and offset + array.nbytes <= len(memory) else None


def _column_of(name: str, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    # The bounds are copied before they are checked: a process that is out of order could still change the memory.
    values, bounds = arrays[0], [np.array(one) for one in arrays[1:]]
    whole = values.ndim > 0 and all(one.ndim == 1 and one.dtype.kind == "i" for one in bounds)
    if whole and len(bounds) == 1:
        offsets = bounds[0]
        if len(offsets) and offsets[0] >= 0 and offsets[-1] <= len(values) and not (offsets[1:] < offsets[:-1]).any():
            return Ragged(values, offsets)
    if whole and len(bounds) == 2 and len(bounds[0]) == len(bounds[1]) and values.dtype == np.uint8:
        begin, sizes = bounds
        if not len(begin) or (begin.min() >= 0 and sizes.min() >= 0 and not (sizes > len(values) - begin).any()):
            return Scattered(values, begin, sizes, values.dtype)
    raise Garbled(f"the rows of column {name!r} leave their values")


def _arrays_of(name: str, column: Any) -> list[np.ndarray[Any, Any]]:
    arrays = [column]
    if isinstance(column, Scattered):
        arrays = [column.memory, column.begin, column.sizes]
    if isinstance(column, Ragged):
        cut = column.compact()
        arrays = [cut.values, cut.offsets]
    if any(array.dtype.hasobject for array in arrays):
        raise TypeError(f"column {name!r} holds Python objects; rows travel as numbers, text and bytes only")
    return arrays
