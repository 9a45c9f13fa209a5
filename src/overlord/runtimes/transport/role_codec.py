"""What roles say to one another, and a service to the processes it starts, as frames of the codec.

Rules of this file:
1. A role is asked with a message and gives an answer, both objects of core/messages.py or core/client_messages.py. A
   direct call passes them as they are; for other transports they are encoded here.
2. An error is an answer too: `unwrap` raises it.
3. A plan travels beside its message, as the block of bytes that the planner has put once.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from overlord.core.client_messages import Message
from overlord.core.messages import HandedOver, Rows, WithPlan, WorkerMessage
from overlord.core.plan import plan_from_bytes
from overlord.core.ragged import Ragged, RowBatch
from overlord.errors import OverlordError, ServiceLost
from overlord.runtimes.transport import codec
from overlord.runtimes.transport.codec import Frame, OnSilence, error_of, failure_of, receive_frame, send_frame


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
        (FirstStep(step=3), OverlordError('no'))
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
    """Encode an answer, or the error that comes instead of one; the plan beside it is its last part."""
    frame, plan = to_frame(answer)
    return frame if plan is None else [*frame, plan]


def answer_from_frame(frame: Frame) -> Any:
    """Decode an answer, or the error that comes instead of one."""
    message = from_frame(frame)
    return replace(message, plan=frame[-1]) if isinstance(message, WithPlan) and len(frame) > 1 else message


_decoder = functools.cache(lambda: codec.Decoder(Message))


def send_message(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message to a process of this service, with file descriptors if there are any.

    Raises:
        ServiceLost: when the other side is gone.
    """
    send_frame(connection, codec.frame_of(message), fds)


def receive_message(connection: socket.socket) -> tuple[Any, list[int]]:
    """Wait for a message of a process of this service; return it with the file descriptors that came along.

    Raises:
        ServiceLost: when the other side is gone.
    """
    frame, fds = receive_frame(connection)
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
    columns = {name: _arrays_of(name, column) for name, column in rows.items()}
    send_frame(connection, codec.frame_of(Rows(head, columns)), (), on_silence)


def receive_rows(connection: socket.socket, on_silence: OnSilence | None = None) -> tuple[WorkerMessage, RowBatch]:
    """Wait for a message; its columns are views into one block of memory.

    Raises:
        ServiceLost: when the other side is gone, or what it sends are no rows.
    """
    frame, _ = receive_frame(connection, on_silence)
    try:
        found: Rows = _rows_decoder().message(frame)
    except OverlordError as error:
        raise ServiceLost(str(error)) from error
    return found.head, {n: a[0] if len(a) == 1 else Ragged(a[0], a[1]) for n, a in found.columns.items() if a}


def _arrays_of(name: str, column: Any) -> list[np.ndarray[Any, Any]]:
    arrays = [column]
    if isinstance(column, Ragged):
        cut = column.compact()
        arrays = [cut.values, cut.offsets]
    if any(array.dtype.hasobject for array in arrays):
        raise TypeError(f"column {name!r} holds Python objects; rows travel as numbers, text and bytes only")
    return arrays
