"""Serves the page of one service over HTTP: static files, what was looked at as JSON, and server-sent events.

Rules of this file:
1. Only this host is answered, unless the user names another address. Requests for other host names are refused, so that
   no page of the web can read this one through a name that leads here.
2. The page needs nothing from anywhere else, and a policy in its header forbids it to ask.
3. The service is asked by one thread; what a page costs is a write of bytes that are there.
4. Changes are taken only where a token was made for them, from requests that carry it in a header of its own: a browser
   lets no other site send such a header here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from overlord.dashboard.watching import LOOK_EVERY_S, Watch
from overlord.errors import OverlordError
from overlord.reports.pages import STYLE
from overlord.runtimes.supervision.child import name_process
from overlord.runtimes.supervision.page_process import LOOPBACK, LOOPBACKS, TOKEN_VARIABLE, end_with_launcher, url_of

PAGE = Path(__file__).parent / "page"
TOKEN = "x-overlord-token"
"""The header that a request for a change carries."""
HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change that a page asks for: a call of the service's, with its first argument."""

    change: Literal["set_mixture", "park_source", "return_source", "skip_steps", "reshard"]
    value: Any
    at_step: int | None = None


def page_app(watch: Watch, hosts: list[str], token: str | None = None) -> Starlette:
    """Return the application that serves the page.

    Args:
        watch: What is shown.
        hosts: The names that the page may be opened by.
        token: What a request for a change must carry; None where the page changes nothing.
    """

    async def page(request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers=HEADERS)

    async def style(request: Request) -> Response:
        return FileResponse(STYLE, headers=HEADERS)

    async def now(request: Request) -> Response:
        return Response(watch.newest, media_type="application/json", headers=HEADERS)

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(watch, request), media_type="text/event-stream", headers=HEADERS)

    routes = [
        Route("/", page),
        Route("/style.css", style),
        Route("/now", now),
        Route("/events", events),
        Route("/balance", functools.partial(_of_step, lambda step, _: watch.balance(step))),
        Route("/samples", functools.partial(_of_step, watch.samples)),
        Route("/steering", functools.partial(_steering, watch)),
        Route("/change", functools.partial(_change, watch, token), methods=["POST"]),
        Mount("/page", StaticFiles(directory=PAGE)),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        lifespan=functools.partial(_looking, watch),
    )


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


async def _events(watch: Watch, request: Request) -> AsyncIterator[bytes]:
    yield b"event: history\ndata: " + watch.history() + b"\n\n"
    seen = -1
    while not await request.is_disconnected():
        if watch.number != seen:
            seen = watch.number
            yield b"event: now\ndata: " + watch.newest + b"\n\n"
        await asyncio.sleep(LOOK_EVERY_S / 4)


async def _steering(watch: Watch, request: Request) -> Response:
    try:
        shown = await asyncio.to_thread(watch.steering, request.query_params.get("group"))
    except (OverlordError, OSError) as error:
        return _refusal(404, str(error))
    return Response(msgspec.json.encode(shown), media_type="application/json", headers=HEADERS)


async def _of_step(show: Callable[[int | None, int], dict[str, Any] | None], request: Request) -> Response:
    """Answer from the plan of a step."""
    given = {name: request.query_params.get(name) for name in ("step", "bucket")}
    if any(value is not None and not value.isdecimal() for value in given.values()):
        return _refusal(400, "step and bucket are numbers of 0 or more")
    step = None if given["step"] is None else int(given["step"])
    try:
        shown = await asyncio.to_thread(show, step, int(given["bucket"] or 0))
        if shown is None:
            return _refusal(404, "there is no plan so far, or the stream has ended")
    except (OverlordError, IndexError, OSError) as error:
        return _refusal(404, str(error))
    return Response(msgspec.json.encode(shown), media_type="application/json", headers=HEADERS)


async def _change(watch: Watch, token: str | None, request: Request) -> Response:
    """Make a change; what the service refuses is answered in its own words."""
    if token is None:
        return _refusal(
            403,
            "this page only shows. Start one that may change: overlord dashboard ADDRESS --allow-changes, or launch "
            "with dashboard_changes",
        )
    if not secrets.compare_digest(request.headers.get(TOKEN, "").encode(), token.encode()):
        return _refusal(403, "the token is missing or wrong, and nothing was changed. The page's start showed it.")
    try:
        wanted = msgspec.json.decode(await request.body(), type=Wanted)
        step = await asyncio.to_thread(watch.change, wanted.change, wanted.value, wanted.at_step)
    except (msgspec.MsgspecError, OverlordError, OSError) as error:
        return _refusal(400, str(error))
    return Response(msgspec.json.encode({"step": step}), media_type="application/json", headers=HEADERS)


def _refusal(code: int, why: str) -> Response:
    return Response(msgspec.json.encode({"error": why}), code, media_type="application/json", headers=HEADERS)


class PageServer:
    """The page of a service, served by this process."""

    def __init__(self, address: str, listening: socket.socket, token: str | None = None) -> None:
        self._socket = listening
        self.url = url_of(listening)
        names = [LOOPBACK, "localhost", "[::1]"] if listening.getsockname()[0] in LOOPBACKS else ["*"]
        app = page_app(Watch(address, changes=token is not None), names, token)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, lifespan="on")
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
    end_with_launcher(page.stop)
    page.run()
