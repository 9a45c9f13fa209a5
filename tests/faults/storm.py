"""A storm: random faults in every process of a run while its trainers go on, until so many faults were made.

The run is a real one: a launcher with a store and a page, its service, and a trainer process for each rank. `Storm`
kills (SIGKILL), stops for good (SIGSTOP) and pauses (SIGSTOP, later SIGCONT) processes of every kind that is there:
launcher, trainer, page, service, template, fork-server, worker, reader and, where roles are processes, planner,
constructor and loader, or the actors of Ray. It also does what the user's own tools do:

    a trainer that died             all trainers are started again at the last checkpoint, as torchrun does
    a launcher that died            the run is launched again from the last checkpoint, with its store
    a trainer or launcher that is   it is killed after a while, and then as above: no process of the run
    stopped for good                watches over these two

Everything else must recover by itself. What is checked:

    every step that any rank got, before or after a restart, has the digests of an inline run without faults
    neither a trainer nor the launcher ends for another reason than a fault of its own
    after every burst of faults, each rank gets its next step within a minute
    the page answers when the storm is over
    in the end no process, no file in TMPDIR and no segment of shared memory is left

`python -m tests.faults.storm --setting shadows --faults 500 --seed 1` runs one; the last line is its outcome as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from benchmarks.storms import leftovers, of_folder, segments
from examples.demo.demo_data import demo_job, write_demo

import overlord as ol
from overlord.testing.digests import digests_of

RANKS = 2
MESH = ol.ClientPlaceTree(dp=RANKS)
SETTINGS: dict[str, dict[str, Any]] = {
    "local": {},
    "hosts": {"loader_hosts": 2},
    "shadows": {"loader_hosts": 2, "shadows": True},
    "ray": {"runtime": "ray", "loader_hosts": 2, "shadows": True},
}
HEARTBEAT_S = 2.0
HUNG_S = dict.fromkeys(SETTINGS, 60.0) | {"ray": 120.0}
"""A rank that waits longer for a step, after the last fault, hangs. A launch on Ray starts a cluster."""
GONE_S = dict.fromkeys(SETTINGS, 20.0) | {"ray": 90.0}
"""How long processes and files may take to go after the end: agents of Ray take up to a minute."""
FIRST_S = 300.0
"""How long the first launch may take, on a busy host."""
PACE_S = 0.05
CHECKPOINT_STEPS = 5
WATCHDOG_S = 2.0
"""How long a trainer or launcher stays stopped before it is killed."""
MOST_SERVICES, NEAR_STEPS = 4, 6
"""How often the service process is hit within so many steps: a launcher gives up, as documented, when five restarts in
a row served no new step, and a client has some steps in hand."""
HOWS = ("kill", "kill", "stop", "pause")
SCALE = 0.03
"""Of the demo's data: eight sources of text and pictures, in every format."""


@dataclass
class Outcome:
    """What became of a storm."""

    setting: str
    seed: int
    faults: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    """How often each kind of process was hit, as "kill worker"."""
    steps: int = 0
    """Steps that ranks got, all in all."""
    differ: int = 0
    launches: int = 0
    launches_ended_by_a_fault: int = 0
    training_starts: int = 0
    longest_wait_s: float = 0.0
    """The longest time from one step of a rank to its next, with all that was restarted meanwhile."""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What should not have been; empty where all is well."""


def storm_job(data: Path) -> ol.Job:
    """Return the job that all storms run."""
    return demo_job(write_demo(data, scale=SCALE)).replace(batch=ol.Batch(512, global_samples=6), seed=7)


# -- the processes of the run, each started with `python -m tests.faults.storm --be ..` ----------------------------


def be_launcher(folder: Path, data: Path, setting: str, resume: str) -> None:
    """Launch the service, write its address to a file, and serve until standard input closes."""
    state = json.loads(resume)
    with ol.launch(
        storm_job(data), mesh=MESH, cache=folder / "cache", store=folder / "store", state=state, dashboard=0, threads=3,
        heartbeat=HEARTBEAT_S, **SETTINGS[setting],
    ) as service:  # fmt: skip
        _write(folder / "address", json.dumps([service.address, service.dashboard]))
        sys.stdin.read()


def be_trainer(folder: Path, address: str, rank: int, step: int | None, start: str) -> None:
    """Train on one rank, record every step, and as rank 0 write checkpoints."""
    ranks = Ranks(folder / f"ranks.{start}", rank)
    path = folder / f"rank-{rank}.{start}"
    with ol.connect(address, rank, step=step) as client, open(path, "w") as record:
        for taken in client:
            record.write(json.dumps([taken.index, digest(taken)]) + "\n")
            record.flush()
            ends = ranks.end_with(client.next_step, (folder / "finish").exists())
            if rank == 0 and client.next_step % CHECKPOINT_STEPS == 0:
                state = client.state_dict()
                _write(folder / "states" / str(state["step"]), json.dumps(state))
            if ends:
                return
            time.sleep(PACE_S)


class Ranks:
    """What the trainers of a run know of each other: they train in step, as those that exchange gradients do.

    Args:
        path: Of a file that all of them have.
        rank: Whose trainer this is.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._file, self._rank = os.open(path, os.O_RDWR | os.O_CREAT), rank

    def end_with(self, next_step: int, ends: bool) -> bool:
        """Wait until all ranks have the step before this one; return whether one of them ends with it: so all do.

        Args:
            next_step: The step that this rank would take next.
            ends: Whether this rank was told to end. Another one may have looked a moment before that.
        """
        self._write(RANKS + self._rank, next_step if ends else 0)
        self._write(self._rank, next_step)
        while min((numbers := self._read())[:RANKS]) < next_step:
            time.sleep(0.002)
        return next_step in numbers[RANKS:]

    def _write(self, place: int, number: int) -> None:
        os.pwrite(self._file, struct.pack("<q", number), 8 * place)

    def _read(self) -> tuple[int, ...]:
        size = 8 * 2 * RANKS
        return struct.unpack(f"<{2 * RANKS}q", os.pread(self._file, size, 0).ljust(size, b"\0"))


def digest(step: ol.Step) -> list[str]:
    """Return the three digests of what a rank got in a step."""
    return [step.order_digest, step.plan_digest, *digests_of(step)]


def _write(path: Path, text: str) -> None:
    """Write a file so that no reader sees half of it."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


# -- the storm ----------------------------------------------------------------------------------------------------


class RunEnded(Exception):
    """The run ended or hangs though it must not; the text says how."""


class Storm:
    """One run and the faults in it.

    Args:
        folder: For everything of this run.
        data: The demo's data; written if it is not there.
    """

    def __init__(self, setting: str, seed: int, folder: Path, data: Path) -> None:
        self._luck = random.Random(seed)
        self._folder, self._data = folder, data
        self._hung_s = HUNG_S[setting]
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        (folder / "states").mkdir()
        self._log = open(folder / "log", "w")  # noqa: SIM115 - closed in `close`
        self.outcome = Outcome(setting, seed)
        self.made: Counter[str] = Counter()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._trainers: list[subprocess.Popen[bytes]] = []
        self._hit: set[int] = set()
        """Launchers and trainers that a fault ended."""
        self._made_before_launch = 0
        self._due: list[tuple[float, psutil.Process, signal.Signals]] = []
        """Signals to send later: what was paused goes on, what nothing watches over is killed."""
        self._service_hits: list[int] = []
        self._records = [_Record() for _ in range(RANKS)]

    # -- the user's side --------------------------------------------------------------------------

    def begin(self) -> None:
        """Launch the run, and wait until every rank trains."""
        self._launch()
        self.wait_for_steps(within_s=FIRST_S)

    def wait_for_steps(self, further: int = 1, within_s: float | None = None) -> None:
        """Tend the run until every rank got further steps.

        Raises:
            RunEnded: It ended, or a rank waits for too long.
        """
        limit_s = within_s or self._hung_s
        until = time.monotonic() + limit_s
        wanted = [len(record.steps) + further for record in self._records]
        while any(len(record.steps) < count for record, count in zip(self._records, wanted, strict=True)):
            if time.monotonic() > until:
                raise RunEnded(f"no step for {limit_s:g} s: {self._what_is_there()}")
            self.tend_for(0.02)

    def tend_for(self, seconds: float) -> None:
        """Do what the user's tools do, for a while."""
        until = time.monotonic() + seconds
        while True:
            self._tend()
            if time.monotonic() >= until:
                return
            time.sleep(0.02)

    def _tend(self) -> None:
        now = time.monotonic()
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            with contextlib.suppress(psutil.NoSuchProcess):
                due[1].send_signal(due[2])
        for record in self._records:
            record.read()
        assert self._launcher is not None
        if self._launcher.poll() is not None:
            self._launch_again()
            return
        ended = [trainer for trainer in self._trainers if trainer.poll() is not None]
        if ended:
            # A launcher that was killed ends its service, and so the trainers; all are noticed in any order.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(0.0 if any(one.pid in self._hit for one in ended) else 2.0)
            if self._launcher.poll() is None and not any(one.pid in self._hit for one in ended):
                raise RunEnded(f"a trainer ended with code {ended[0].returncode}")
            self._end_trainers()
        elif not self._trainers and (self._folder / "address").exists():
            self._train()

    def _launch(self) -> None:
        (self._folder / "address").unlink(missing_ok=True)
        self.outcome.launches += 1
        self._made_before_launch = self.made.total()
        state = self._checkpoint()
        if state is not None and self._luck.random() < 0.5:
            state = state["step"]  # the store has it too
        self._launcher = self._start("launcher", str(self._data), self.outcome.setting, json.dumps(state))

    def _launch_again(self) -> None:
        assert self._launcher is not None
        was_up = (self._folder / "address").exists()
        if self._launcher.pid not in self._hit:
            if was_up or self.made.total() == self._made_before_launch:
                raise RunEnded(f"the launcher ended with code {self._launcher.returncode}")
            self.outcome.launches_ended_by_a_fault += 1
        self._end_trainers()
        _end(self._launcher)
        self._launch()

    def _train(self) -> None:
        self.outcome.training_starts += 1
        address, _ = json.loads((self._folder / "address").read_text())
        state = self._checkpoint()
        step = None if state is None else state["step"]
        start = str(self.outcome.training_starts)
        for rank, record in enumerate(self._records):
            record.follow(self._folder / f"rank-{rank}.{start}", step or 0)
            self._trainers.append(self._start("trainer", address, str(rank), json.dumps(step), start))

    def _end_trainers(self) -> None:
        for trainer in self._trainers:
            _end(trainer)
        for record in self._records:
            record.close()
        self._trainers.clear()

    def _checkpoint(self) -> dict[str, Any] | None:
        """Return the newest state of a step that every rank has come to."""
        reached = min(record.next_step for record in self._records)
        steps = [int(path.name) for path in (self._folder / "states").iterdir() if path.name.isdigit()]
        newest = max((step for step in steps if step <= reached), default=None)
        return None if newest is None else json.loads((self._folder / "states" / str(newest)).read_text())

    def _start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.faults.storm", "--be", what, str(self._folder), *arguments],
            env={**os.environ, "TMPDIR": str(self._temporary)},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    # -- the faults -------------------------------------------------------------------------------

    def strike(self, kinds: tuple[str, ...] = (), hows: tuple[str, ...] = HOWS) -> None:
        """Make one fault, if there is a process that it could happen to; of some kinds only, if they are given."""
        there = self._processes()
        chosen = sorted(kind for kind in there if not kinds or kind in kinds)
        if not chosen:
            return
        kind, how = self._luck.choice(chosen), self._luck.choice(hows)
        process = self._luck.choice(sorted(there[kind], key=lambda one: one.pid))
        pause_s = self._luck.uniform(0.05, 1.5)
        if kind == "service" and not self._may_hit_service():
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            self.made[f"{how} {kind}"] += 1
            if how == "pause":
                self._due.append((time.monotonic() + pause_s, process, signal.SIGCONT))
            elif kind in ("launcher", "trainer"):
                self._hit.add(process.pid)
                if how == "stop":
                    self._due.append((time.monotonic() + WATCHDOG_S, process, signal.SIGKILL))

    def _may_hit_service(self) -> bool:
        reached = min(record.next_step for record in self._records)
        self._service_hits = [at for at in self._service_hits if reached - NEAR_STEPS < at <= reached]
        if len(self._service_hits) >= MOST_SERVICES:
            return False
        self._service_hits.append(reached)
        return True

    def _processes(self) -> dict[str, list[psutil.Process]]:
        """Return the processes of the run that faults happen to, by their kind."""
        known = {trainer.pid: "trainer" for trainer in self._trainers}
        if self._launcher is not None:
            known[self._launcher.pid] = "launcher"
        found: dict[str, list[psutil.Process]] = {}
        for process in of_folder(self._temporary):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # it has just ended
                kind = known.get(process.pid) or kind_of(process)
                if kind is not None:
                    found.setdefault(kind, []).append(process)
        return found

    def _what_is_there(self) -> str:
        there = {
            kind: [f"{one.pid} {one.status()}" for one in processes if one.is_running()]
            for kind, processes in self._processes().items()
        }
        return f"ranks at {[record.next_step for record in self._records]}, processes {there}"

    # -- the end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let the run recover and end as usual; compare what it gave, and look for what it left.

        Raises:
            RunEnded: It does not recover, or does not end.
        """
        while self._due:  # what is paused, or what nothing watches over, is still stopped
            self.tend_for(0.1)
        self.wait_for_steps(2)
        self._await_page()
        (self._folder / "finish").touch()
        assert self._launcher is not None and self._launcher.stdin is not None
        for process in (*self._trainers, self._launcher):
            if process is self._launcher:
                for record in self._records:
                    record.close()  # now: the close of the launcher is no wait for a step
                self._launcher.stdin.close()
            try:
                if process.wait(self._hung_s) != 0:
                    raise RunEnded(f"a process that was asked to end had exit code {process.returncode}")
            except subprocess.TimeoutExpired:
                raise RunEnded(f"it does not end: {self._what_is_there()}") from None

    def _await_page(self) -> None:
        """Wait until the page shows the service."""
        until = time.monotonic() + self._hung_s
        while True:
            try:
                _, url = json.loads((self._folder / "address").read_text())
                with urllib.request.urlopen(f"{url}now", timeout=2.0) as answer:
                    json.load(answer)
                    return
            except (OSError, ValueError):  # it is being started
                if time.monotonic() > until:
                    raise RunEnded(f"the page does not answer: {self._what_is_there()}") from None
            self.tend_for(0.1)

    def compare(self) -> None:
        """Compare every step that any rank got with an inline run without faults."""
        given = [record.steps for record in self._records]
        furthest = max((index for steps in given for index, _ in steps), default=-1)
        job = storm_job(self._data)
        with (
            ol.launch(job, mesh=MESH, runtime="inline", cache=self._folder / "cache") as service,
            contextlib.ExitStack() as opened,
        ):
            clients = [opened.enter_context(service.client(rank)) for rank in range(RANKS)]
            # All ranks side by side: a service keeps only some steps behind the slowest of its clients.
            expected = [[digest(next(client)) for client in clients] for _ in range(furthest + 1)]
        for rank, steps in enumerate(given):
            self.outcome.differ += sum(found != expected[index][rank] for index, found in steps)
        self.outcome.steps = sum(len(steps) for steps in given)
        self.outcome.longest_wait_s = max(record.longest_wait_s for record in self._records)

    def close(self) -> str:
        """End whatever is left; return what all processes have logged."""
        for process in of_folder(self._temporary):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._end_trainers()
        if self._launcher is not None:
            _end(self._launcher)
        self._log.close()
        return (self._folder / "log").read_text()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


class _Record:
    """The steps that one rank got, over all its trainer processes; each process writes a file of its own."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._last_at: float | None = None
        self.next_step = 0
        """The step that comes next."""
        self.steps: list[tuple[int, list[str]]] = []
        self.longest_wait_s = 0.0

    def follow(self, path: Path, step: int) -> None:
        """Read the file of a new trainer process, which begins at a step."""
        self.close()
        path.touch()
        self._file, self.next_step = open(path, "rb"), step  # noqa: SIM115 - closed in `close`

    def read(self) -> None:
        """Take what was written since the last time."""
        while self._file is not None:
            begin = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):  # nothing more, or half a line: a kill cut it short, or the rest comes soon
                self._file.seek(begin)
                return
            index, digests = json.loads(line)
            self.steps.append((index, digests))
            self.next_step, now = index + 1, time.monotonic()
            self.longest_wait_s = max(self.longest_wait_s, now - (self._last_at or now))
            self._last_at = now

    def close(self) -> None:
        """Take what is left of the last file, and close it."""
        self.read()
        if self._file is not None:
            self._file.close()
            self._file = None


def kind_of(process: psutil.Process) -> str | None:
    """Return what a process of a service is, by the name that it gave itself; None for what is not of us."""
    name = Path(f"/proc/{process.pid}/comm").read_text().strip()
    if name.startswith("ol:"):
        return name.removeprefix("ol:").rstrip("0123456789")
    return "role" if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Host") else None


def run_storm(
    setting: str, seed: int, faults: int, data: Path | None = None, kinds: tuple[str, ...] = (), every_s: float = 0.25
) -> Outcome:
    """Let one run live through faults, in bursts of up to three with `every_s` between them on average.

    Args:
        data: Where the demo's data is, or may be written.
        kinds: The kinds of processes that faults happen to; all of them by default.
    """
    before, began = segments(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:  # short: paths of sockets are
        storm = Storm(setting, seed, Path(folder), data or Path(folder, "data"))
        outcome, luck = storm.outcome, random.Random(-seed)
        try:
            storm.begin()
            while storm.made.total() < faults:
                storm.tend_for(luck.expovariate(1 / every_s))
                for _ in range(luck.choice([1, 1, 2, 3])):
                    storm.strike(kinds)
                storm.wait_for_steps()
            storm.finish()
            outcome.wrong += leftovers(Path(folder, "tmp"), before, GONE_S[setting])
        except RunEnded as error:
            outcome.wrong.append(str(error))
        finally:
            log = storm.close()
        outcome.by_kind, outcome.faults = dict(sorted(storm.made.items())), storm.made.total()
        storm.compare()
        if outcome.differ:
            outcome.wrong.append(f"{outcome.differ} of {outcome.steps} steps differ")
        if "Traceback" in log:
            outcome.wrong.append("there is a traceback in the log")
        outcome.seconds = time.monotonic() - began
        if outcome.wrong:
            sys.stderr.write(f"{log}\n{outcome}\n")
    return outcome


def main() -> None:
    """Run a storm, or be a process of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--every", type=float, default=0.25, help="seconds between bursts of faults, on average")
    parser.add_argument("--kinds", nargs="*", default=(), help="only processes of these kinds")
    parser.add_argument("--be", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be is None:
        outcome = run_storm(
            options.setting, options.seed, options.faults, kinds=tuple(options.kinds), every_s=options.every
        )
        print(json.dumps(asdict(outcome)))
        sys.exit(bool(outcome.wrong))
    logging.basicConfig(format="%(asctime)s %(process)d overlord: %(levelname)s: %(message)s", level=logging.WARNING)
    try:
        be(*options.be)
    except ol.OverlordError as error:  # a traceback in the log is an error that nothing has handled
        sys.exit(str(error))


def be(what: str, folder: str, *arguments: str) -> None:
    """Be a process of a storm."""
    if what == "launcher":
        data, setting, resume = arguments
        be_launcher(Path(folder), Path(data), setting, resume)
    else:
        address, rank, step, start = arguments
        be_trainer(Path(folder), address, int(rank), json.loads(step), start)


if __name__ == "__main__":
    main()
