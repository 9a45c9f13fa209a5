"""The one format of messages between processes: a typed head, then arrays as raw bytes. Nothing is unpickled.

A packet on a socket is

    prefix    "overlord" and the sender's version, bytes of the head, of the table and of the arrays, descriptors
    head      the message, a msgspec Struct in msgpack; every array in it is replaced by its number
    table     dtype and shape of every array
    arrays    each begins at a multiple of 64 bytes, and is read in place
    byte      with the file descriptors, where there are any

Rules of this file:
1. The layout of the prefix never changes, so that processes of different versions recognise one another: a packet of
   another version is read to its end and refused with both versions in one sentence.
2. Where there is no socket (threads, Ray), a message travels as a frame: its head as bytes, then its arrays.
3. A service takes neither descriptors nor arrays from a client, and bounds what a client that sends half a message can
   hold: bytes of one message, bytes of all messages that are being read, and the time from first to last byte.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Union

import msgspec
import numpy as np
import numpy.typing as npt

from overlord.core.client_messages import Failure, Message, Reply, Request
from overlord.core.samples import dtype_from_text, dtype_to_text, padded
from overlord.errors import OverlordError, ServiceLost, SpecError, error_named
from overlord.runtimes.transport.file_limits import out_of_files
from overlord.version import VERSION

MAX_HEAD = 1 << 30
MAX_ARRAYS = 1 << 36
MAX_FDS = 64
MAX_ASKED = 8 << 20
"""Bytes of a message to a service: the largest are states, of a few hundred bytes a source."""
MAX_READING = 64 << 20
"""Bytes of all messages that a service is in the middle of reading."""
MESSAGE_S = 30.0
"""How long a message to a service may take from its first byte to its last."""
LOOK_S = 5.0
"""How often a service that waits for the rest of a message looks at the time."""
SMALL = 1 << 16
"""Arrays up to this size are joined before they are sent."""

Array = npt.NDArray[Any]
Frame = list[Any]
"""The head of a message as bytes, then its arrays."""
OnSilence = Callable[[], None]
"""Called whenever nothing could be sent or received for as long as the socket's time limit; raises to give up."""

_NAME = b"overlord "
_OURS = (_NAME + VERSION.encode())[:32].ljust(32, b"\0")
PREFIX = struct.Struct("<32sIIIQ")

# --------------------------------------------------------------------------------------------------------------
# Messages as frames.


class _Arrays(threading.local):
    """The arrays of the message that a thread is encoding or decoding."""

    now: Sequence[Array] = ()


_arrays = _Arrays()


def _array_to_number(given: Any) -> Any:
    if isinstance(given, np.ndarray):
        assert isinstance(_arrays.now, list)
        _arrays.now.append(given)
        return len(_arrays.now) - 1
    if isinstance(given, np.generic):
        return given.item()
    raise TypeError(f"{type(given).__name__} is no part of a message")


def _number_to_array(kind: type, given: Any) -> Any:
    if isinstance(given, int) and 0 <= given < len(_arrays.now):
        return _arrays.now[given]
    raise ValueError(f"array {given!r} of {len(_arrays.now)}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_number)


def frame_of(message: Any) -> Frame:
    """Encode a message; arrays are not copied."""
    _arrays.now = arrays = list[Array]()
    try:
        return [_encoder.encode(message), *arrays]
    finally:
        _arrays.now = ()


class Decoder:
    """Decodes messages of all kinds that are derived from the given one.

    Decoders are made one at a time. msgspec keeps what it knows of a class with the class, and publishes it before it
    is complete: a second thread that makes a decoder for the same class meanwhile would use it, and end the process
    with SIGSEGV at its first message.
    """

    _making = threading.Lock()

    def __init__(self, kind: type) -> None:
        leaves = tuple(_leaves(kind))
        with Decoder._making:
            self._decoder: Any = msgspec.msgpack.Decoder(Union.__getitem__(leaves), dec_hook=_number_to_array)

    def message(self, frame: Frame) -> Any:
        """Decode a message; its arrays are those of the frame.

        Raises:
            OverlordError: for bytes that are none of the messages; asking again would not help.
        """
        _arrays.now = frame[1:]
        try:
            return self._decoder.decode(frame[0])
        except (msgspec.DecodeError, ValueError) as error:
            raise OverlordError(f"the other side sent {len(frame[0])} bytes that are no message ({error})") from error
        finally:
            _arrays.now = ()


def _leaves(kind: type) -> Iterator[type]:
    derived: list[type] = kind.__subclasses__()
    yield from (leaf for one in derived for leaf in _leaves(one)) if derived else [kind]


def failure_of(error: BaseException) -> Failure:
    """Return the message that raises an error where it is received."""
    if isinstance(error, OverlordError):
        return Failure(type(error).__name__, _as_text(str(error)), error.source)
    return Failure("OverlordError", _as_text(f"{type(error).__name__}: {error}"))


def _as_text(given: str) -> str:
    return given.encode(errors="backslashreplace").decode()  # file names may hold bytes that are not UTF-8


def raised(message: Any) -> Any:
    """Return a message; raise it if it is an error.

    Raises:
        OverlordError: the error that was sent instead of an answer.
    """
    error = error_of(message)
    if error is not None:
        raise error
    return message


def error_of(message: Any) -> OverlordError | None:
    """Return the error that a message is, if it is one."""
    if isinstance(message, Failure):
        return error_named(message.error, message.message, message.source)
    return None


# --------------------------------------------------------------------------------------------------------------
# Frames on sockets.


def send_frame(
    connection: socket.socket, frame: Frame, fds: Sequence[int] = (), on_silence: OnSilence | None = None
) -> None:
    """Send a frame, with file descriptors if there are any.

    Raises:
        TypeError: for an array of Python objects, before anything is sent.
        ServiceLost: when the other side is gone.
    """
    head, arrays = frame[0], frame[1:]
    table = _encoder.encode([(dtype_to_text(array.dtype), array.shape) for array in arrays]) if arrays else b""
    total = sum(padded(array.nbytes) for array in arrays)
    waiting = bytearray(PREFIX.pack(_OURS, len(head), len(table), len(fds), total))
    waiting += head
    waiting += table
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        padding = bytes(padded(array.nbytes) - array.nbytes)
        if array.nbytes <= SMALL:
            waiting += data.tobytes() + padding
            continue
        _send(connection, waiting, on_silence)
        _send(connection, data, on_silence)
        waiting = bytearray(padding)
    _send(connection, waiting, on_silence)
    while fds:
        try:
            socket.send_fds(connection, [b"F"], fds)
            return
        except (BlockingIOError, TimeoutError) as error:
            _wait_longer(on_silence, error)
        except OSError as error:
            raise ServiceLost(f"the connection broke: {error}") from error


class Garbled(ServiceLost):
    """The other side sent bytes that are no message: a process whose memory is damaged, or no process of overlord."""


def receive_frame(connection: socket.socket, on_silence: OnSilence | None = None) -> tuple[Frame, list[int]]:
    """Wait for a frame of a peer that is trusted; its arrays are views into one block of memory.

    Raises:
        ServiceLost: when the other side is gone.
        Garbled: when it sends no message.
        SpecError: when it runs another version.
    """
    read = _Reader(connection, on_silence)
    name, head, table, num_fds, total = _read_prefix(read)
    if head + table > MAX_HEAD or total > MAX_ARRAYS or num_fds > MAX_FDS:
        raise Garbled(f"the peer announced a message of {head + table + total} bytes; it is no part of overlord.")
    try:
        frame: Frame = [read(head)]
        kinds, block = read(table), np.empty(total, np.uint8)
    except MemoryError as error:
        raise Garbled(f"there is no memory for a message of {head + table + total} bytes") from error
    read.into(block)
    fds = _receive_fds(connection, num_fds, on_silence) if num_fds else []
    try:
        _check_version(name)
        frame += _cut(kinds, block)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return frame, fds


def _cut(table: bytearray, block: npt.NDArray[np.uint8]) -> Iterator[Array]:
    """Cut a block of memory into its arrays."""
    at = 0
    try:
        for kind, shape in msgspec.msgpack.decode(table, type=list[tuple[str, tuple[int, ...]]]) if table else ():
            dtype = dtype_from_text(kind)
            flat = len(shape) == 1  # as nearly all of them are, and steps of many sources have thousands
            nbytes = (shape[0] if flat else math.prod(shape)) * dtype.itemsize
            if dtype.hasobject or min(shape, default=0) < 0 or at + nbytes > len(block):
                raise ValueError(f"an array of {kind} {shape} leaves its message")
            array = block[at : at + nbytes].view(dtype)
            yield array if flat else array.reshape(shape)
            at += padded(nbytes)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, SyntaxError) as error:
        raise Garbled(f"the other side sent bytes that are no arrays ({error})") from error


def _receive_fds(connection: socket.socket, count: int, on_silence: OnSilence | None) -> list[int]:
    while True:
        try:
            _, fds, flags, _ = socket.recv_fds(connection, 1, count)
            break
        except (BlockingIOError, TimeoutError) as error:
            _wait_longer(on_silence, error)
        except OSError as error:
            raise ServiceLost(f"the connection broke: {error}") from error
    if len(fds) < count:
        for fd in fds:
            os.close(fd)
        if flags & socket.MSG_CTRUNC:  # the kernel drops those for which this process has no room
            full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise out_of_files(full, "memory that another process shares with it cannot be mapped") or full
        raise ServiceLost("the other side closed the connection")  # it was killed in the middle of the message
    return fds


def _read_prefix(read: _Reader) -> tuple[bytes, int, int, int, int]:
    name, *sizes = PREFIX.unpack(read(PREFIX.size))
    if not name.startswith(_NAME):
        raise Garbled(f"the other side sent {name[:16]!r}, which no process of overlord does")
    return name, *sizes


def _check_version(name: bytes) -> None:
    if name != _OURS:
        theirs = name.rstrip(b"\0").decode(errors="backslashreplace")
        raise SpecError(
            f"{theirs} and overlord {VERSION} cannot read one another's messages: install one version for the "
            "launcher, the service and all trainers, and restart what runs the other one."
        )


def _send(connection: socket.socket, data: Any, on_silence: OnSilence | None) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left) :]
        except (BlockingIOError, TimeoutError) as error:
            _wait_longer(on_silence, error)
        except OSError as error:
            raise ServiceLost(f"the connection broke: {error}") from error


class _Reader:
    """Reads an exact number of bytes, however they come.

    Args:
        connection: Where they come from.
        on_silence: See `OnSilence`.
        within_s: How long it may take from the first byte that was read to the last.
    """

    def __init__(self, connection: socket.socket, on_silence: OnSilence | None, within_s: float = math.inf) -> None:
        self._connection = connection
        self._on_silence = on_silence
        self._within_s = within_s
        self._until = math.inf

    def __call__(self, count: int) -> bytearray:
        block = bytearray(count)
        self.into(block)
        return block

    def into(self, block: Any) -> None:
        """Fill a block of memory."""
        left = memoryview(block)
        while left:
            try:
                count = self._connection.recv_into(left)
            except (BlockingIOError, TimeoutError) as error:
                self._check_time()
                _wait_longer(self._on_silence, error)
                continue
            except OSError as error:
                raise ServiceLost(f"the connection broke: {error}") from error
            if not count:
                raise ServiceLost("the other side closed the connection")
            left = left[count:]
            if self._within_s < math.inf:
                self._until = min(self._until, time.monotonic() + self._within_s)
                self._check_time()  # also where something comes now and then

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise ServiceLost(f"a message was not complete {self._within_s:g} s after it began")


def _wait_longer(on_silence: OnSilence | None, error: Exception) -> None:
    if on_silence is None:
        raise ServiceLost("the other side does not answer") from error
    on_silence()


def expect_within(connection: socket.socket, seconds: float) -> None:
    """Let a connection be silent for so long at most.

    By the kernel, not by `settimeout`, with which every call would poll first.
    """
    whole = int(seconds)
    limit = struct.pack("@ll", whole, int(1e6 * (seconds - whole)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


# --------------------------------------------------------------------------------------------------------------
# What clients and owners exchange with a service.

_requests = functools.cache(functools.partial(Decoder, Request))
_replies = functools.cache(functools.partial(Decoder, Reply))


def send(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a request or a reply, with file descriptors if there are any.

    Raises:
        SpecError: for a message that holds what cannot be sent, such as a state that is not plain JSON.
        ServiceLost: when the other side is gone.
    """
    try:
        frame = frame_of(message)
        if len(frame) > 1:
            raise TypeError("it holds an array")
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise SpecError(f"{type(message).__name__} cannot be sent to or from the service: {error}") from error
    if isinstance(message, Request) and len(frame[0]) > MAX_ASKED:
        raise SpecError(
            f"{type(message).__name__} has {len(frame[0])} bytes, and a service takes {MAX_ASKED}; it was not sent, "
            "and nothing has changed. Name many files by a glob or their folder, and leave out what is not needed."
        )
    send_frame(connection, frame, fds)


def receive(connection: socket.socket, on_silence: OnSilence | None = None) -> tuple[Any, list[int]]:
    """Wait for a reply; an error is one, see `raised`."""
    frame, fds = receive_frame(connection, on_silence)
    return _replies().message(frame), fds


def receive_request(connection: socket.socket) -> Request[Any]:
    """Wait for a request to a service, for as long as none begins; `expect_within(connection, LOOK_S)` comes first.

    Raises:
        ServiceLost: when the other side is gone, sends what no client sends, or stops in the middle of a message.
        SpecError: when it runs another version, or asks for what is not known here; tell it so.
    """
    read = _Reader(connection, lambda: None, MESSAGE_S)
    name, head, *rest = _read_prefix(read)
    if head > MAX_ASKED or any(rest):
        raise ServiceLost(f"a message of {head} bytes with {rest} of other things was announced; no client sends that")
    with _reading.room(head):
        frame = [read(head)]
    _check_version(name)
    try:
        return _requests().message(frame)
    except OverlordError as error:
        raise SpecError(f"this is no request to a service: {error}") from error


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
