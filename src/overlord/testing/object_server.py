"""A small object store on the loopback device: ranged reads and listings as of S3 and HTTP, slow and faulty on demand.

    ObjectServer   serves the files of a folder from threads of this process
    ServerFaults   which requests go wrong, and how; tests change it while the server runs

`python -m overlord.testing.object_server FOLDER --latency 0.025 --faults 0.01` serves in a process of its own and
prints its port; a GET of `/-/counts` returns what was requested so far, and a POST there begins to count anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Fault = Literal["503", "cut", "short", "silence", "refused"]
FAULTS: tuple[Fault, ...] = ("503", "cut", "short", "silence")
"""What may happen to any request; credentials are refused only where a test says so."""
_LISTED = 1000


@dataclass
class ServerFaults:
    """Which requests go wrong."""

    choose: Callable[[int], Fault | None] = lambda number: None
    """Given the number of a ranged GET, from 0 on, what becomes of it."""
    silence_s: float = 5.0
    retry_after: str | None = None
    """Header of an answer 503."""
    busy_until: float = 0.0
    """By `time.monotonic`: until then all requests are answered 503."""
    token: str | None = None
    """The session token or bearer token that requests must have."""
    hold: threading.Event | None = None
    """Answers to ranged GETs wait for it."""


@dataclass
class _Request:
    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]


@dataclass
class ObjectServer:
    """Serves a folder: each folder in it is a bucket.

    Args:
        folder: What is served.
        latency_s: Time before each answer.
        faults: What goes wrong.

    Example:
        >>> import tempfile, urllib.request
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "bucket").mkdir()
        >>> _ = (folder / "bucket" / "a.txt").write_text("hello")
        >>> with ObjectServer(folder) as server:
        ...     urllib.request.urlopen(f"{server.url}/bucket/a.txt").read()
        b'hello'
    """

    folder: Path
    latency_s: float = 0.0
    faults: ServerFaults = field(default_factory=ServerFaults)
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by kind (`GET`, `HEAD`, `LIST`), `bytes` that were sent, and faults by their names."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ranged = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._accept, name="object-server", daemon=True)

    def __enter__(self) -> ObjectServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def wait(self) -> None:
        """Serve until the process ends."""
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            buffer = b""
            while True:
                while b"\r\n\r\n" not in buffer:
                    more = connection.recv(1 << 16)
                    if not more:
                        return
                    buffer += more
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                if not self._answer(connection, _parsed(head)):
                    return

    def _answer(self, connection: socket.socket, request: _Request) -> bool:
        """Answer a request; return whether the connection can be used again."""
        if request.path == "/-/counts":
            body = json.dumps(self.counts).encode()
            if request.method == "POST":
                self.counts.clear()
            return self._send(connection, 200, {}, body)
        if self.latency_s:
            time.sleep(self.latency_s)
        if time.monotonic() < self.faults.busy_until:
            self._count(**{"503": 1})
            return self._send(connection, 503, self._busy(), b"" if request.method == "HEAD" else b"slow down")
        if not self._is_allowed(request):
            self._count(refused=1)
            body = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
            return self._send(connection, 403, {}, b"" if request.method == "HEAD" else body)
        if "list-type" in request.query:
            self._count(LIST=1)
            return self._send_listing(connection, request)
        self._count(**{request.method: 1})
        path = self.folder / request.path.lstrip("/")
        try:
            handle = open(path, "rb")  # noqa: SIM115
        except OSError:
            return self._send(connection, 404, {}, b"")
        with handle:
            return self._send_object(connection, request, handle.fileno())

    def _is_allowed(self, request: _Request) -> bool:
        token = self.faults.token
        if token is None:
            return True
        return token in (
            request.headers.get("x-amz-security-token"),
            request.headers.get("authorization", "").removeprefix("Bearer "),
            *request.query.get("X-Amz-Security-Token", ()),
        )

    def _busy(self) -> dict[str, str]:
        return {} if self.faults.retry_after is None else {"Retry-After": self.faults.retry_after}

    def _send_object(self, connection: socket.socket, request: _Request, descriptor: int) -> bool:
        status = os.fstat(descriptor)
        etag = f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        headers = {
            "ETag": etag,
            "Last-Modified": formatdate(status.st_mtime, usegmt=True),
            "Content-Type": "binary/octet-stream",
            "Accept-Ranges": "bytes",
        }
        if request.headers.get("if-match", etag) != etag:
            return self._send(connection, 412, {}, b"")
        if request.method == "HEAD":
            return self._send_head(connection, 200, {**headers, "Content-Length": str(status.st_size)})
        bounds = re.match(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        start, stop, code = 0, status.st_size, 200
        fault: Fault | None = None
        if bounds is not None:
            start, stop, code = int(bounds[1]), min(int(bounds[2]) + 1, status.st_size), 206
            with self._lock:
                number, self._ranged = self._ranged, self._ranged + 1
            fault = self.faults.choose(number)
            if self.faults.hold is not None:
                self.faults.hold.wait(60)
        if fault is not None:
            self._count(**{fault: 1})
        if fault == "silence":
            time.sleep(self.faults.silence_s)
        if fault == "503":
            return self._send(connection, 503, self._busy(), b"slow down")
        sent = start + (stop - start) // 2 if fault in ("cut", "short") else stop
        length = sent - start if fault == "short" else stop - start
        headers["Content-Length"] = str(length)
        if code == 206:
            headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{status.st_size}"
        self._send_head(connection, code, headers)
        self._count(bytes=sent - start)
        while start < sent:
            start += os.sendfile(connection.fileno(), descriptor, start, sent - start)
        return fault != "cut"

    def _send_listing(self, connection: socket.socket, request: _Request) -> bool:
        bucket, *rest = request.path.strip("/").split("/", 1)
        root = self.folder / bucket
        if rest or not root.is_dir():
            return self._send(connection, 404, {}, b"<Error><Code>NoSuchBucket</Code></Error>")
        prefix = request.query.get("prefix", [""])[0]
        after = request.query.get("continuation-token", [""])[0]
        flat = "delimiter" in request.query
        keys = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        keys = [key for key in keys if key.startswith(prefix) and key > after]
        folders = sorted({prefix + key[len(prefix) :].split("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]})
        if flat:
            keys = [key for key in keys if "/" not in key[len(prefix) :]]
        more = len(keys) > _LISTED
        keys = keys[:_LISTED]
        contents = "".join(self._listed(root, key) for key in keys)
        if flat:
            contents += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        token = f"<NextContinuationToken>{escape(keys[-1])}</NextContinuationToken>" if more else ""
        body = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket}</Name><KeyCount>{len(keys)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{contents}</ListBucketResult>"
        )
        return self._send(connection, 200, {"Content-Type": "application/xml"}, body.encode())

    @staticmethod
    def _listed(root: Path, key: str) -> str:
        status = (root / key).stat()
        written = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        etag = f"&quot;{status.st_mtime_ns:x}-{status.st_size:x}&quot;"
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{written}</LastModified><ETag>{etag}</ETag>"
            f"<Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )

    def _send(self, connection: socket.socket, code: int, headers: Mapping[str, str], body: bytes) -> bool:
        head = _head(code, {**headers, "Content-Length": str(len(body))})
        connection.sendall(head + body)
        return True

    def _send_head(self, connection: socket.socket, code: int, headers: Mapping[str, str]) -> bool:
        connection.sendall(_head(code, headers))
        return True

    def _count(self, **counts: int) -> None:
        with self._lock:
            self.counts.update(counts)


def _head(code: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {code} X", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _parsed(head: bytes) -> _Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    url = urlsplit(target)
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return _Request(method, unquote(url.path), parse_qs(url.query, keep_blank_values=True), headers)


def main() -> None:
    """Serve a folder until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--faults", type=float, default=0.0, help="share of the ranged GETs that go wrong")
    options = parser.parse_args()
    every = round(1 / options.faults) if options.faults else 0

    def choose(number: int) -> Fault | None:
        # The first ones are answered, so that no run begins with a fault.
        return FAULTS[number // every % len(FAULTS)] if every and number % every == every - 1 else None

    with ObjectServer(options.folder, options.latency, ServerFaults(choose)) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        server.wait()


if __name__ == "__main__":
    main()
