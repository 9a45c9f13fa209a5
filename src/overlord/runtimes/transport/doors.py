"""Unix sockets that a service listens on, and how a client finds the one for its rank."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from overlord.core.place_tree import ranks_of_host
from overlord.errors import OverlordError, ServiceLost, SpecError
from overlord.runtimes.transport.wire import LOOK_S, expect_within, mesh_from_text, receive, receive_asked, send

logger = logging.getLogger("overlord")

CONTROL = "control"
"""The door of a cluster service's own process: it answers, and has no views."""

BEAT = "beat"
"""The message that every door answers at once: whoever gets no answer takes the process for hung."""

Converse = Callable[[socket.socket], None]


@contextlib.contextmanager
def open_door(path: Path, converse: Converse) -> Iterator[None]:
    """Listen on a socket while the context is open, and hold a conversation with whoever comes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path.unlink(missing_ok=True)  # of a process that was killed, in whose place this one is
        listener.bind(str(path))
        ours = path.stat().st_ino
        listener.listen(128)
        threading.Thread(target=_accept, args=(listener, converse), daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == ours:  # and not that of a successor
                    path.unlink()


def _accept(listener: socket.socket, converse: Converse) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the door was closed
        threading.Thread(target=_host, args=(connection, converse), daemon=True).start()


def _host(connection: socket.socket, converse: Converse) -> None:
    with connection:
        try:
            converse(connection)
        except (OverlordError, OSError, ValueError) as error:  # a ValueError: what is no JSON
            logger.debug("a client is gone: %s", error)


Answer = Callable[[dict[str, Any]], tuple[dict[str, Any] | str, Sequence[int]]]
"""Answers a message (as JSON, where that is written already), with descriptors if there are any."""


def answer_all(connection: socket.socket, answer: Answer, after: Callable[[], None] | None = None) -> None:
    """Answer messages until the client is gone; an error is an answer too.

    Args:
        connection: The client's.
        answer: Makes the answers.
        after: Called when an answer is on its way.
    """
    expect_within(connection, LOOK_S)
    while True:
        message = receive_asked(connection)
        reply: dict[str, Any] | str
        fds: Sequence[int]
        try:
            # Whoever asks whether this process lives does not ask for more.
            reply, fds = ({}, []) if message.get("op") == BEAT else answer(message)
        except OverlordError as error:
            reply, fds = {"error": type(error).__name__, "message": str(error)}, []
        except Exception as error:  # the border to the client: it must learn what became of its question
            logger.exception("the message %r failed", message.get("op"))
            reply, fds = {"error": "OverlordError", "message": f"{type(error).__name__}: {error}"}, []
        send(connection, reply, list(fds))
        if after is not None:
            after()


def door_name(number: int, hosts: int) -> str:
    """Return the file name of the door of one of several constructor hosts; which ranks it has, the mesh decides.

    Example:
        >>> door_name(2, 4)
        'host-2-of-4'
    """
    return f"host-{number}-of-{hosts}"


def written_out(address: str) -> str:
    """Return an address, or the one that a file holds (`--address-file`).

    Raises:
        SpecError: for what is neither.
    """
    if isinstance(address, str) and not address.startswith("unix://") and Path(address).is_file():
        address = Path(address).read_text(encoding="utf-8", errors="replace").strip()
    if not isinstance(address, str) or not address.startswith("unix://") or address == "unix://":
        raise SpecError(
            f"address: {address!r:.200} is not one, and no file of that name holds one; nobody could be reached. Use "
            "what `service.address` or `overlord serve` shows, such as 'unix:///tmp/overlord-x/socket', or the file of "
            "--address-file, which goes when the service ends."
        )
    return address


def path_of(address: str) -> Path:
    """Return the socket of an address; or the folder of the doors, of a service that has several.

    Example:
        >>> path_of("unix:///tmp/overlord-x/socket").parent.name
        'overlord-x'
    """
    return Path(address.removeprefix("unix://"))


def knock(address: str, rank: int | None = None) -> socket.socket:
    """Connect to a service: to the door that serves a rank, or to any that answers.

    Raises:
        SpecError: for what is no address.
        ServiceLost: when nobody answers.
    """
    address = written_out(address)
    path = path_of(address)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(_door_of(path, rank, address) if path.is_dir() else path))
    except OSError as error:
        connection.close()
        raise ServiceLost(
            f"no service answers at {address} ({error.strerror or error}); there is no data to train on. Start one "
            "with `overlord serve` or `overlord.launch` on this host and use the address it shows."
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _door_of(folder: Path, rank: int | None, address: str) -> Path:
    """Find the door in the folder of a cluster service; a host that serves other ranks than planned takes this one."""
    doors = sorted(folder.glob("host-*-of-*"))
    if rank is None:
        return next(iter([path for path in (folder / CONTROL,) if path.exists()] or doors), folder / CONTROL)
    if len(doors) == 1:
        return doors[0]
    ranks = _ranks_with(doors, rank)
    places = {path: path.name.split("-")[1::2] for path in doors}
    planned = [path for path, (number, of) in places.items() if rank in ranks_of_host(int(number), int(of), ranks)]
    if not planned:
        raise ServiceLost(
            f"no constructor host on this machine serves rank {rank} of {address} (here: "
            f"{', '.join(path.name for path in doors) or 'none'}); it would have no data. Launch with ranks_per_host= "
            "as your trainers are started, on a cluster that has this host in it."
        )
    return planned[0]


def _ranks_with(doors: Sequence[Path], rank: int) -> int:
    """Ask at any door how many ranks there are where a rank begins."""
    for door in doors:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(str(door))
            except OSError:
                continue  # its host is gone, and another one may know
            send(connection, {"op": "begins", "rank": rank})
            reply, _ = receive(connection)
            if "error" not in reply:
                return mesh_from_text(reply["mesh"]).world_size
    return 0
