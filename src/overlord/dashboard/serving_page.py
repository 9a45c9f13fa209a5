"""Serves the page of one service over HTTP: static files, what was looked at as JSON, and server-sent events.

Rules of this file:
1. Only this host is answered, unless the user names another address. Other web sites can neither read the page nor make
   it work: `Guard` refuses requests for foreign host names (a name of theirs may resolve to this address) and requests
   that a browser marks as sent by another site, whatever they ask for.
2. The page needs nothing from anywhere else, and a policy in its header forbids it to ask.
3. Showing never makes the service plan, draw or write. What the service must be asked for goes through `Turns`: one
   question at a time, a few that wait, each with a deadline. Streams, bodies, heads and connections have limits too.
4. Changes are taken only where a token was made for them, from requests that carry it in a header of its own: a browser
   lets no other site send such a header here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from overlord.dashboard.watching import LOOK_EVERY_S, Watch
from overlord.errors import OverlordError, SpecError
from overlord.reports.pages import STYLE
from overlord.runtimes.supervision.child import name_process
from overlord.runtimes.supervision.page_process import LOOPBACKS, TOKEN_VARIABLE, end_with_launcher, url_of

R = TypeVar("R")

PAGE = Path(__file__).parent / "page"
TOKEN = "x-overlord-token"
"""The header that a request for a change carries."""
HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""What every answer carries."""
OWN_SITE = ("same-origin", "none")
"""What a browser says of a request that the page itself sends, or that a person typed in."""
MOST_DIGITS = 15
"""Digits of a step or a bucket."""
MOST_WAITING = 8
"""Requests that may wait for an answer of the service; further ones are refused at once."""
ANSWER_S = 15.0
"""How long a request may take that the service must be asked for."""
MOST_STREAMS = 32
"""Pages that are told of news at the same time."""
STREAM_S = 3600.0
"""How long one stream of events lasts; a browser then opens the next one by itself."""
STUCK_S = 60.0
"""How long a connection may take whose other side does not read; also how much longer a stream may."""
MOST_BODY = 1 << 16
"""Bytes of a change."""
HEAD_S = 10.0
"""How long a connection may take to send a request."""
MOST_CONNECTIONS = 256


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change that a page asks for: a call of the service's, with its first argument."""

    change: Literal["set_mixture", "park_source", "return_source", "skip_steps", "reshard"]
    value: Any
    at_step: int | None = None


def page_app(watch: Watch, hosts: Collection[str], token: str | None = None) -> Starlette:
    """Return the application that serves the page.

    Args:
        watch: What is shown.
        hosts: The names that the page may be opened by, beside bare IP addresses.
        token: What a request for a change must carry; None where the page changes nothing.
    """
    showing, changing = Turns(), Turns()

    async def page(request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def style(request: Request) -> Response:
        return FileResponse(STYLE)

    async def now(request: Request) -> Response:
        return Response(watch.newest, media_type="application/json")

    routes = [
        Route("/", page),
        Route("/style.css", style),
        Route("/now", now),
        Route("/events", functools.partial(_events, watch, Streams())),
        Route("/balance", functools.partial(_of_step, showing, lambda step, _: watch.balance(step))),
        Route("/samples", functools.partial(_of_step, showing, watch.samples)),
        Route("/steering", functools.partial(_steering, showing, watch)),
        Route("/repetition", functools.partial(_repetition, showing, watch)),
        Route("/change", functools.partial(_change, changing, watch, token), methods=["POST"]),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    return Starlette(
        routes=routes, middleware=[Middleware(Guard, hosts=hosts)], lifespan=functools.partial(_looking, watch)
    )


class Guard:
    """Refuses what other sites make a browser send here, and adds the headers of the page to every answer."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":  # the start and the end of the server
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._refusal_of(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal_of(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._knows(_without_port(host)):
            return _refusal(
                400, f"this page is not served as {host[:100]!r}. Open it by the address that it was shown by."
            )
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        linked = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"  # a person followed a link
        if origin not in (None, f"{scope['scheme']}://{host}") or (site not in OWN_SITE and not linked):
            return _refusal(403, "this was sent by a page of another site, which may not use this one.")
        return None

    def _knows(self, name: str) -> bool:
        """Whether the page is opened by a name that no other site can let lead here."""
        if name.lower() in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _without_port(host: str) -> str:
    """Return a Host header without port and brackets.

    Example:
        >>> _without_port("[::1]:9500"), _without_port("localhost:9500"), _without_port("here")
        ('::1', 'localhost', 'here')
    """
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


class Busy(Exception):
    """Too many requests wait already."""


class Turns:
    """Lets requests ask the service one after the other, so that no number of them becomes load for it."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, call: Callable[..., R], *given: Any) -> R:
        """Call a function in a thread when it is its turn.

        Raises:
            Busy: Too many wait already.
            TimeoutError: It took too long. It keeps its turn until it is done.
        """
        if len(self._tasks) >= MOST_WAITING:
            raise Busy
        task = asyncio.create_task(self._run(call, *given))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.wait_for(asyncio.shield(task), ANSWER_S)

    async def _run(self, call: Callable[..., R], *given: Any) -> R:
        async with self._turn:
            return await asyncio.to_thread(call, *given)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whether or not its request still waits for it


class Streams:
    """Counts the open streams of events."""

    def __init__(self) -> None:
        self.count = 0


class _Stream(StreamingResponse):
    """A stream that ends in time, also where its reader does not read."""

    def __init__(self, events: AsyncIterator[bytes], streams: Streams) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.count += 1
        try:
            async with asyncio.timeout(STREAM_S + STUCK_S):
                await super().__call__(scope, receive, send)
        finally:
            self._streams.count -= 1


@contextlib.asynccontextmanager
async def _looking(watch: Watch, app: Starlette) -> AsyncIterator[None]:
    """Look at the service as long as the page is served."""

    async def look() -> None:
        while True:
            await asyncio.to_thread(watch.look)
            await asyncio.sleep(LOOK_EVERY_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


async def _events(watch: Watch, streams: Streams, request: Request) -> Response:
    if streams.count >= MOST_STREAMS:
        return _refusal(503, f"{MOST_STREAMS} pages are open already. Close some of them.")

    async def news() -> AsyncIterator[bytes]:
        yield b"retry: 200\nevent: history\ndata: " + watch.history() + b"\n\n"
        seen, ends = -1, time.monotonic() + STREAM_S
        while time.monotonic() < ends and not await request.is_disconnected():
            if watch.number != seen:
                seen = watch.number
                yield b"event: now\ndata: " + watch.newest + b"\n\n"
            await asyncio.sleep(LOOK_EVERY_S / 4)

    return _Stream(news(), streams)


async def _answered(turns: Turns, refused: int, call: Callable[..., Any], *given: Any) -> Response:
    """Answer with what a call returns; what the service refuses is answered in its own words.

    Args:
        turns: The others that ask.
        refused: The code of a refusal.
        call: Asks the service; None stands for something that is not there.
        given: What the call takes.
    """
    try:
        shown = await turns.run(call, *given)
    except Busy:
        return _refusal(503, "too many requests wait for the service. Try again in a few seconds.")
    except TimeoutError:
        return _refusal(504, f"the service did not answer within {ANSWER_S:g} s. Try again.")
    except (OverlordError, IndexError, OSError) as error:
        return _refusal(refused, str(error))
    if shown is None:
        return _refusal(404, "there is no plan so far, or the stream has ended")
    return Response(msgspec.json.encode(shown), media_type="application/json")


async def _steering(turns: Turns, watch: Watch, request: Request) -> Response:
    return await _answered(turns, 404, watch.steering, request.query_params.get("group"))


async def _repetition(turns: Turns, watch: Watch, request: Request) -> Response:
    return await _answered(turns, 404, watch.repetition)


async def _of_step(
    turns: Turns, show: Callable[[int | None, int], dict[str, Any] | None], request: Request
) -> Response:
    """Answer from the plan of a step."""
    given = {name: request.query_params.get(name) for name in ("step", "bucket")}
    if any(value is not None and not (value.isdecimal() and len(value) <= MOST_DIGITS) for value in given.values()):
        return _refusal(400, f"step and bucket are numbers of 0 or more, of {MOST_DIGITS} digits at most")
    step = None if given["step"] is None else int(given["step"])
    return await _answered(turns, 404, show, step, int(given["bucket"] or 0))


async def _change(turns: Turns, watch: Watch, token: str | None, request: Request) -> Response:
    """Make a change."""
    if token is None:
        return _refusal(
            403,
            "this page only shows. Start one that may change: overlord dashboard ADDRESS --allow-changes, or launch "
            "with dashboard_changes",
        )
    if not secrets.compare_digest(request.headers.get(TOKEN, "").encode(), token.encode()):
        return _refusal(403, "the token is missing or wrong, and nothing was changed. The page's start showed it.")
    body = bytearray()
    try:
        async with asyncio.timeout(HEAD_S):
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY:
                    return _refusal(413, f"a change has at most {MOST_BODY} bytes, and nothing was changed")
        wanted = msgspec.json.decode(body, type=Wanted)
    except (TimeoutError, ClientDisconnect):
        return _refusal(408, "the change did not arrive completely, and nothing was changed")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _refusal(400, str(error))

    def make() -> dict[str, int]:
        try:
            return {"step": watch.change(wanted.change, wanted.value, wanted.at_step)}
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            # Whatever JSON holds reaches the service's methods, which are made for callers in Python.
            raise SpecError(f"{wanted.change}: this is no value for it ({error}), and nothing was changed") from error

    return await _answered(turns, 400, make)


def _refusal(code: int, why: str) -> Response:
    return Response(msgspec.json.encode({"error": why}), code, media_type="application/json")


class _Protocol(H11Protocol):
    """HTTP over one connection. It ends where the head of a request does not come in time, or an answer is not read."""

    _closes: asyncio.TimerHandle | None = None
    _aborts: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._closes, self._aborts):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._aborts = self.loop.call_later(STUCK_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._aborts is not None:
            self._aborts.cancel()

    def _limit_head(self) -> None:
        """Begin to count when a request may come, and stop when one is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._closes is not None:
                self._closes.cancel()
            self._closes = None
        elif self._closes is None:
            self._closes = self.loop.call_later(HEAD_S, self.transport.close)


class PageServer:
    """The page of a service, served by this process."""

    def __init__(
        self, address: str, listening: socket.socket, token: str | None = None, *, host: str = "localhost"
    ) -> None:
        """Serve a service at an address on a socket that listens already.

        Args:
            address: Of the service.
            listening: The socket.
            token: What a request for a change must carry; None where the page changes nothing.
            host: The name that the user gave for the socket.
        """
        self._socket = listening
        self.url = url_of(listening)
        names = {"localhost", host.lower()}
        if listening.getsockname()[0] not in LOOPBACKS:
            names |= {name.lower() for name in (socket.gethostname(), socket.getfqdn())}
        app = page_app(Watch(address, changes=token is not None), names, token)
        config = uvicorn.Config(
            app, http=_Protocol, ws="none", log_level="warning", timeout_graceful_shutdown=1, lifespan="on",
            limit_concurrency=MOST_CONNECTIONS,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Let `run` return."""
        self._server.should_exit = True


if __name__ == "__main__":  # the process of `launch(dashboard=PORT)`: an address, and the descriptor of its socket
    name_process("page")
    page = PageServer(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), os.environ.get(TOKEN_VARIABLE))
    end_with_launcher()
    page.run()
