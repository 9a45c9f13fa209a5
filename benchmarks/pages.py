"""What open pages of the dashboard cost a trainer: the wait of `benchmarks.fetch` with 50 of them, and with none.

One service, one trainer process that takes steps all the time, and `overlord dashboard` with open pages: clients of its
server-sent events, as a browser's tab is one. All of it is on one machine. Rounds with and without pages alternate; in
those without, the dashboard's process is stopped (SIGSTOP), so that it costs what one costs that was never started.
Every wait is taken against the copy of the same step, since the machine's speed wanders.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import overlord as ol
from benchmarks.fetch import PAUSE_S, eight_megabytes
from benchmarks.measuring import arguments, publish

BAR = 1.02
SETTLE_S = 1.0
"""Seconds at the beginning of a round that do not count."""


class Pages:
    """Open pages: connections that read what they are sent."""

    def __init__(self, url: str, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self.received = 0
        where = urlsplit(url)
        assert where.hostname is not None and where.port is not None, "a page has a host and a port"
        request = f"GET /events HTTP/1.1\r\nHost: {where.netloc}\r\nAccept: text/event-stream\r\n\r\n".encode()
        for _ in range(count):
            page = socket.create_connection((where.hostname, where.port), timeout=10)
            page.sendall(request)
            self._selector.register(page, selectors.EVENT_READ)

    def read_for(self, seconds: float) -> None:
        """Read all that comes."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                page = key.fileobj
                assert isinstance(page, socket.socket)
                data = page.recv(1 << 20)
                if not data:
                    raise RuntimeError("the dashboard closed a page; it cannot be told what pages cost.")
                self.received += len(data)

    def close(self) -> None:
        """Close all pages."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


def measure(address: str, pages: int, rounds: int, seconds: float) -> tuple[dict[str, list[float]], list[float], float]:
    """Return the waits over copies without and with pages, their ratio round by round, and kB/s that pages got."""
    overlord = [sys.executable, "-m", "overlord"]
    board = subprocess.Popen(
        [*overlord, "dashboard", address, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    )
    assert board.stdout is not None
    url = json.loads(board.stdout.readline())["url"]
    steps = int(2 * rounds * seconds / (2 * PAUSE_S)) + 10
    trainer = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fetch", "--trainer", address, "--steps", str(steps)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    spans: list[tuple[str, float, float]] = []
    received = 0
    try:
        time.sleep(5 * 2 * PAUSE_S + SETTLE_S)
        for _ in range(rounds):
            os.kill(board.pid, signal.SIGSTOP)
            began = time.monotonic()
            time.sleep(seconds)
            spans.append(("without", began + SETTLE_S, time.monotonic()))
            os.kill(board.pid, signal.SIGCONT)
            began, opened = time.monotonic(), Pages(url, pages)
            opened.read_for(seconds)
            spans.append(("with", began + SETTLE_S, time.monotonic()))
            received += opened.received
            opened.close()
        taken: dict[str, Any] = json.loads(trainer.communicate(timeout=120)[0].strip().splitlines()[-1])
    finally:
        for process in (trainer, board):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
    over = [wait / copy for wait, copy in zip(taken["waits"], taken["copies"], strict=True)]
    of_span = [[one for one, at in zip(over, taken["at"], strict=True) if low <= at <= high] for _, low, high in spans]
    found: dict[str, list[float]] = {"without": [], "with": []}
    for (kind, *_), some in zip(spans, of_span, strict=True):
        found[kind] += some
    medians = [statistics.median(some) for some in of_span if some]
    by_round = [after / before for before, after in zip(medians[::2], medians[1::2], strict=False)]
    return found, by_round, received / (rounds * seconds) / 1000


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--pages", type=int, default=50, help="open pages")
    parser.add_argument("--rounds", type=int, default=8, help="rounds without and with pages, one after the other")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each of them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = eight_megabytes(Path(folder))
        with ol.launch(job, cache=f"{folder}/cache", prefetch=3) as service:
            found, by_round, received = measure(str(service.address), options.pages, options.rounds, options.seconds)
    before, after = (statistics.median(found[kind]) for kind in ("without", "with"))
    figures: dict[str, object] = {
        "ratio": after / before,
        "bar": BAR,
        "ratio_by_round": by_round,
        "wait_over_copy_without": before,
        "wait_over_copy_with": after,
        "steps": [len(found["without"]), len(found["with"])],
        "pages": options.pages,
        "pages_kb_per_s": received,
    }
    publish("pages", figures, options.json)


if __name__ == "__main__":
    main()
