"""Unix sockets that a service listens on, and how a client finds the one for its rank."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from overlord.core.client_messages import Beat, Done, Failure, FindBeginning, Message, Request, mesh_from_text
from overlord.core.place_tree import ranks_of_host
from overlord.errors import OverlordError, ServiceLost, SpecError
from overlord.runtimes.transport.codec import LOOK_S, expect_within, failure_of, receive, receive_request, send
from overlord.runtimes.transport.file_limits import out_of_files

logger = logging.getLogger("overlord")

CONTROL = "control"
"""The socket of a cluster service's own process: it answers, and has no views."""

NO_FILES_PAUSE_S = 1.0
"""How long a service that may have no more files open waits before it accepts the next connection."""

Serve = Callable[[socket.socket], None]
"""Serves one connection until its end."""


@contextlib.contextmanager
def listen(path: Path, serve: Serve) -> Iterator[None]:
    """Listen on a socket while the context is open, and serve each connection in a thread."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path.unlink(missing_ok=True)  # left by a process that was killed, which this one replaces
        listener.bind(str(path))
        ours = path.stat().st_ino
        listener.listen(128)
        threading.Thread(target=_accept, args=(listener, serve), daemon=True).start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == ours:  # and not that of a successor
                    path.unlink()


def _accept(listener: socket.socket, serve: Serve) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            failed = out_of_files(error, "no further trainer can attach")
            if failed is None:
                return  # the listener was closed
            logger.error("%s", failed)
            time.sleep(NO_FILES_PAUSE_S)  # the connection stays in the queue of the kernel until others have ended
            continue
        threading.Thread(target=_serve, args=(connection, serve), daemon=True).start()


def _serve(connection: socket.socket, serve: Serve) -> None:
    with connection:
        try:
            serve(connection)
        except (OverlordError, OSError) as error:
            logger.debug("a client is gone: %s", error)


Answer = Callable[[Any], tuple[Message, Sequence[int]]]
"""Answers a request, with descriptors if there are any."""


def answer_requests(connection: socket.socket, answer: Answer, after: Callable[[], None] | None = None) -> None:
    """Answer requests until the client is gone; an error is an answer too.

    Args:
        connection: The client's.
        answer: Makes the answers.
        after: Called when an answer is on its way.

    Raises:
        ServiceLost: when the client is gone.
        SpecError: when the client runs another version, or is none; it was told so.
    """
    expect_within(connection, LOOK_S)
    while True:
        try:
            request = receive_request(connection)
        except SpecError as error:
            send(connection, failure_of(error))
            raise
        reply, fds = _answer(request, answer)
        try:
            send(connection, reply, fds)
        except SpecError as error:  # the reply cannot be encoded: nothing of it was sent
            send(connection, failure_of(error))
        if after is not None:
            after()


def _answer(request: Request[Any], answer: Answer) -> tuple[Message, Sequence[int]]:
    if isinstance(request, Beat):
        return Done(), []
    try:
        return answer(request)
    except OverlordError as error:
        return failure_of(error), []
    except Exception as error:  # the border to the client: it must learn what became of its question
        logger.exception("the request %s failed", type(request).__name__)
        return failure_of(error), []


def socket_name(number: int, hosts: int) -> str:
    """Return the file name of the socket of one of several constructor hosts; which ranks it has, the mesh decides.

    Example:
        >>> socket_name(2, 4)
        'host-2-of-4'
    """
    return f"host-{number}-of-{hosts}"


def read_address(address: str) -> str:
    """Return an address, or the one that a file holds (`--address-file`).

    Raises:
        SpecError: for what is neither.
    """
    if isinstance(address, str) and not address.startswith("unix://"):
        address = _held_by(address)
    if not isinstance(address, str) or not address.startswith("unix://") or address == "unix://":
        raise SpecError(
            f"address: {address!r:.200} is not one, and no file of that name holds one; no service can be reached. Use "
            "what `service.address` or `overlord serve` shows, such as 'unix:///tmp/overlord-x', or the file of "
            "--address-file, which goes when the service ends."
        )
    return address


def _held_by(file: str) -> str:
    """Return the address that a file holds; a name that no file has stays as it is."""
    path = Path(file)
    try:
        if not path.is_file():
            return file
        held = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise SpecError(
            f"{file}: no address can be read from there ({error.strerror}); no service can be reached. Give the "
            "address that `overlord serve` shows."
        ) from error
    if held.startswith("unix://"):
        return held
    if path.suffix in (".yaml", ".yml", ".json", ".py"):
        raise SpecError(
            f"{file} is a job file, not an address; no service can be reached. Start one with `overlord serve {file} "
            "--address-file F`, and give F or the address that it shows."
        )
    raise SpecError(
        f"{file} holds no address; no service can be reached. Give the file that `overlord serve --address-file F` "
        "writes, or the address that it shows."
    )


def socket_path(address: str) -> Path:
    """Return the socket of an address; or the folder of the sockets, of a service that has several.

    Example:
        >>> socket_path("unix:///tmp/overlord-x/socket").parent.name
        'overlord-x'
    """
    return Path(address.removeprefix("unix://"))


def connect_socket(address: str, rank: int | None = None) -> socket.socket:
    """Connect to a service: to the socket that serves a rank, or to any that answers.

    Raises:
        SpecError: for what is no address.
        ServiceLost: when no service answers.
        OverlordError: when this process may have no more files open.
    """
    address = read_address(address)
    path = socket_path(address)
    with contextlib.ExitStack() as opened:
        try:
            connection = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.connect(str(_socket_of(path, rank, address) if path.is_dir() else path))
        except OSError as error:
            raise out_of_files(error, f"the service at {address} cannot be asked for data") or ServiceLost(
                f"no service answers at {address} ({error.strerror or error}); there is no data to train on. Start one "
                "with `overlord serve` or `overlord.launch` on this host and use the address it shows."
            ) from error
        opened.pop_all()
    return connection


def _socket_of(folder: Path, rank: int | None, address: str) -> Path:
    """Find a rank's socket in the folder of a cluster service; a host that serves other ranks takes this one too."""
    sockets = sorted(folder.glob("host-*-of-*"))
    if rank is None:
        return next(iter([path for path in (folder / CONTROL,) if path.exists()] or sockets), folder / CONTROL)
    if len(sockets) == 1:
        return sockets[0]
    if not sockets:
        raise ServiceLost(
            f"no constructor host of {address} listens here; rank {rank} has no data until one does. One "
            "that starts, or is started again, listens soon; if none is to run here, launch on a cluster that has this "
            "host in it, with ranks_per_host= as your trainers are started."
        )
    ranks = _ranks_with(sockets, rank)
    places = {path: [int(part) for part in path.name.split("-")[1::2]] for path in sockets}
    hosts = max((of for _, of in places.values()), default=1)  # those that came with another mesh know of more
    planned = [path for path, (number, _) in places.items() if rank in ranks_of_host(number, hosts, ranks)]
    if not planned:
        raise ServiceLost(
            f"no constructor host on this machine serves rank {rank} of {address} (here: "
            f"{', '.join(path.name for path in sockets)}); it would have no data. Launch with "
            "ranks_per_host= as your trainers are started, on a cluster that has this host in it."
        )
    return planned[0]


def _ranks_with(sockets: Sequence[Path], rank: int) -> int:
    """Ask at any socket how many ranks there are where a rank begins."""
    for path in sockets:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(str(path))
            except OSError:
                continue  # its host is gone, and another one may know
            send(connection, FindBeginning(rank))
            reply, _ = receive(connection)
            if not isinstance(reply, Failure):
                return mesh_from_text(reply.mesh).world_size
    return 0
