"""500 random faults on Ray, while a trainer of four ranks goes on: nothing lost, nothing repeated, the same digests.

Faults, at random moments and of random roles (planner, constructor host, loader hosts, the service process itself):
kill -9; SIGSTOP until the supervisor takes it for dead; SIGSTOP for a moment (slowness); two roles at once. What every
rank gets, step by step, is compared with an inline run without faults.
What was waited for is reported: with a fault about every second the trainer waits for most of the run (532 of 585 s in
the report), so this measures correctness, not speed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import overlord as ol
from benchmarks.faults import job_of
from benchmarks.measuring import arguments, publish

MESH = ol.ClientPlaceTree(dp=2, cp=2)
KINDS = ("kill", "kill", "stop", "pause", "pause", "pause", "pause", "two")
SERVICE_SHARE = 0.01
"""Faults that hit the service process: everything is started again after one."""
HEARTBEAT_S = 2.0


class Trouble(threading.Thread):
    """Makes faults until there are enough."""

    def __init__(self, service: ol.Service, count: int, seed: int, most_s: float) -> None:
        super().__init__(daemon=True)
        self._service = service
        self._luck = random.Random(seed)
        self._count = count
        self._until = time.monotonic() + most_s
        self.made: Counter[str] = Counter()
        self.failed: BaseException | None = None

    def run(self) -> None:
        """Make them."""
        try:
            while self.made.total() < self._count and time.monotonic() < self._until:
                time.sleep(self._luck.uniform(0.02, 0.4))
                self._strike()
        except BaseException as error:  # seen by whoever waits for this thread
            self.failed = error

    def _strike(self) -> None:
        status = self._service.status()
        up = [host for host in status["hosts"] if host["up"]]
        if not up:
            return
        kind = self._luck.choice(KINDS)
        if self._luck.random() < SERVICE_SHARE:
            kind, chosen = "service", [status["service"]["pid"]]
        else:
            chosen = [host["pid"] for host in self._luck.sample(up, min(len(up), 2 if kind == "two" else 1))]
        for pid in chosen:
            try:
                os.kill(pid, signal.SIGSTOP if kind in ("stop", "pause") else signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went before
            if kind == "pause":
                time.sleep(self._luck.uniform(0.05, HEARTBEAT_S / 4))
                with contextlib.suppress(ProcessLookupError):  # it was taken for dead meanwhile
                    os.kill(pid, signal.SIGCONT)
            self.made[kind] += 1


def fingerprint(steps: list) -> tuple[str, str, tuple[str, ...]]:
    """Return what all ranks got of one step."""
    content = tuple(batch.digest() for step in steps for batch in step.microbatches)
    return steps[0].order_digest, steps[0].plan_digest, content


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--pace", type=float, default=0.2, help="seconds of one training step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="no fault is made after so long")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    count = 4 if options.quick else options.faults
    waits: list[float] = []
    found: list[tuple[str, str, tuple[str, ...]]] = []
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(Path(folder), 1 << 15)
        launched = {"mesh": MESH, "cache": f"{folder}/cache"}
        began = time.monotonic()
        with ol.launch(
            job, runtime="ray", threads=1, loader_hosts=4, shadows=True, heartbeat=HEARTBEAT_S, **launched
        ) as service:
            clients = [service.client(rank) for rank in range(MESH.world_size)]
            trouble = Trouble(service, count, options.seed, 60 * options.minutes)
            trouble.start()
            while trouble.is_alive() or len(found) < 10:
                since = time.perf_counter()
                steps = [next(client) for client in clients]
                found.append(fingerprint(steps))
                waits.append(time.perf_counter() - since)
                time.sleep(options.pace)
            if trouble.failed is not None:
                raise trouble.failed
            restarts = sum(host["restarts"] for host in service.status()["hosts"])
        seconds = time.monotonic() - began
        with ol.launch(job, runtime="inline", **launched) as service:
            clients = [service.client(rank) for rank in range(MESH.world_size)]
            expected = [fingerprint([next(client) for client in clients]) for _ in found]
    wrong = sum(a != b for a, b in zip(found, expected, strict=True))
    usual = statistics.median(waits)
    figures: dict[str, object] = {
        "wrong_steps": wrong,
        "bar": 0,
        "faults": trouble.made.total(),
        **{f"faults_{kind}": number for kind, number in sorted(trouble.made.items())},
        "restarts_since_the_last_start_of_the_service": restarts,
        "steps": len(found),
        "seconds": seconds,
        "usual_wait_ms": 1000 * usual,
        "stall_s_in_all": sum(max(0.0, wait - usual) for wait in waits),
        "longest_wait_s": max(waits),
        "steps_that_waited_over_1_s": sum(wait > 1 for wait in waits),
        "rows": {"chaos": [round(1000 * wait, 2) for wait in waits]},
    }
    publish("chaos", figures, options.json)


if __name__ == "__main__":
    main()
