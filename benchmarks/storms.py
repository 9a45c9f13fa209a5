"""Random storms: short lives of services whose processes are killed and stopped during launch, run and close.

A storm is drawn from its seed: a small job, a mesh, a runtime, changes that its owner makes (mixture, sources that
come, go, are parked and return, skipped steps, another mesh), and faults (SIGKILL and SIGSTOP of the service process
and of roles, at random moments of the launch, the run and the close). `chaos` is one long run on Ray; here every storm
is a process of its own, of which is checked:

    the order, plan and content digests of all ranks are those of an undisturbed inline run with the same changes
    no process, no folder in TMPDIR and no segment in /dev/shm is left
    its log holds no warning but those that name a fault that was made, and no traceback
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import overlord as ol
from benchmarks.chaos import fingerprint
from benchmarks.measuring import arguments, publish
from overlord.testing.digests import Trainers

HEARTBEAT_S = 3.0
PACE_S = 0.02
GONE_S, RAY_GONE_S = 20.0, 90.0
"""How long what a service had may take to go after its end; agents of a cluster of its own take up to a minute."""
STORM_S = 600.0
"""A storm that takes longer hangs."""
MOST_LOST, NEAR_STEPS = 5, 6
"""How often the service process may end within so many steps: the launcher gives up after six ends without a new step
in between, and a client has some steps in hand."""
LAUNCHES = 4
"""A launch that a fault ended is tried again so many times in all."""
SETTINGS: dict[str, dict[str, Any]] = {
    "inline": {"runtime": "inline"},
    "local": {"runtime": "local"},
    "hosts": {"runtime": "local", "loader_hosts": 2},
    "shadows": {"runtime": "local", "loader_hosts": 2, "shadows": True},
    "ray": {"runtime": "ray", "loader_hosts": 2, "shadows": True},
}
SHARES = {"inline": 1, "local": 6, "hosts": 4, "shadows": 8, "ray": 1}
SERVICE_LINES = (
    r"the service process \d+ (was killed by SIGKILL|hung for .* killed); it is started again",
    r"the service runs again, as process",
    r"waits for the service at",
    r"the service could not be started again: .*\. It is tried once more",
)
"""What is logged when the service process is killed or stopped."""
ROLE_LINES = (
    r"the (planner|constructor host \d|loader host \d) (ended|did not answer for) .*; it is replaced",
    r"\(generation \d+\) was silent and has been replaced; it ends",
    r"the replacement of the .* did not come up: ",
    r"is asked again: ",
    r"has not answered .* asked again",
    r"\(raylet\)",
)
"""What is logged when a role is killed or stopped."""


@dataclass
class Outcome:
    """What became of one storm."""

    seed: int
    setting: str
    steps: int = 0
    differ: int = 0
    """Steps whose digests are not those of the undisturbed run."""
    faults: dict[str, int] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    launches: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What should not have been: an error, a leftover, a line of the log."""


# -- one storm, in a process of its own -----------------------------------------------------------


def job_of(luck: random.Random, folder: Path) -> tuple[ol.Job, list[ol.Source]]:
    """Write the rows of a small job; return it, and sources that may come later."""
    rows = np.random.default_rng(luck.randrange(1 << 30))

    def source(name: str, weight: float | None) -> ol.Source:
        for number in range(luck.randint(1, 3)):
            path = folder / name / f"{number}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lengths = rows.integers(1, 60, luck.randint(5, 60))
            lines = [json.dumps({"ids": rows.integers(1, 1000, length).tolist()}) for length in lengths]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        shuffle = luck.choice([0, 1 << 12, 1 << 20])
        sample = ol.Text("ids", tokenized=True)
        return ol.Source(name, str(folder / name), sample=sample, weight=weight, shuffle_bytes=shuffle)

    job = ol.Job(
        sources=[source(name, luck.randint(1, 4)) for name in "abc"[: luck.randint(2, 3)]],
        batch=ol.Batch(64, global_samples=luck.randint(4, 9)),
        overlength="split",
        seed=luck.randrange(1000),
    )
    return job, [source(f"new{number}", None) for number in range(3)]


class Faults:
    """Kills and stops processes of the service that this process launches, at random moments."""

    def __init__(self, luck: random.Random) -> None:
        self._luck = luck
        self._timers: list[threading.Timer] = []
        self._stopped: list[psutil.Process] = []
        self._lost_at: list[int] = []
        self.made: Counter[str] = Counter()
        self.at = 0
        """The step that is being trained."""

    def plan(self, count: int, within_s: float) -> None:
        """Make some faults within the next seconds."""
        for _ in range(count):
            kind, whom = self._luck.choice(["kill", "kill", "stop", "pause"]), self._luck.random()
            pause_s = self._luck.uniform(0.05, HEARTBEAT_S / 3)
            timer = threading.Timer(self._luck.uniform(0, within_s), self._strike, [kind, whom, pause_s])
            timer.daemon = True
            timer.start()
            self._timers.append(timer)

    def calm(self) -> None:
        """Make no more faults; what was stopped and lives goes on."""
        for timer in self._timers:
            timer.cancel()
            timer.join()
        for process in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def _strike(self, kind: str, whom: float, pause_s: float) -> None:
        service, roles = processes_of(psutil.Process())
        chosen, name = (service, "service") if whom < 0.25 or not roles else (roles, "role")
        if not chosen:
            return  # nothing is up at this moment
        if name == "service" and kind != "pause":
            if sum(at > self.at - NEAR_STEPS for at in self._lost_at) >= MOST_LOST:
                return  # a crash loop, which the launcher gives up
            self._lost_at.append(self.at)
        process = chosen[int(whom * 1000) % len(chosen)]
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self.made[f"{kind} {name}"] += 1
            if kind == "stop":
                self._stopped.append(process)
            elif kind == "pause":
                time.sleep(pause_s)
                process.resume()


def processes_of(launcher: psutil.Process) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Return the service process of a launcher, and the processes of its roles."""
    service: list[psutil.Process] = []
    roles: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in launcher.children():
            if any("overlord.runtimes" in word for word in child.cmdline()):
                service.append(child)
        for process in launcher.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                parent = process.parent()
                forked = (
                    "process_engine" in words and parent is not None and "process_engine" in " ".join(parent.cmdline())
                )
                if forked or words.startswith("ray::Host"):
                    roles.append(process)
    return service, roles


def change_of(luck: random.Random, names: list[str], newcomers: list[ol.Source]) -> tuple[str, Any]:
    """Draw a change that the owner of a service makes."""
    name = luck.choice(
        ["set_mixture", "skip_steps", "reshard", "reshard", "park_source", "return_source", "remove_source"]
        + ["add_source"] * 3
    )
    if name == "set_mixture":
        return name, {one: luck.randint(1, 4) for one in names}
    if name == "skip_steps":
        return name, luck.randint(1, 2)
    if name == "reshard":
        return name, ol.ClientPlaceTree(dp=luck.randint(1, 3))
    if name == "add_source":
        return name, luck.choice(newcomers)
    return name, luck.choice([*names[1:], "new0", "new1"])


def storm(seed: int, setting: str, folder: Path) -> Outcome:
    """Live through one storm."""
    luck = random.Random(seed)
    outcome = Outcome(seed, setting)
    job, newcomers = job_of(luck, folder)
    mesh = ol.ClientPlaceTree(dp=luck.randint(1, 3))
    steps = luck.randint(15, 40)
    script = {at: change_of(luck, list(job.names), newcomers) for at in luck.sample(range(steps), luck.randint(0, 4))}
    ahead = {at: luck.choice([None, None, 2, 30, 20_000]) for at in script}
    hits = {luck.choice([*script, luck.randrange(steps)]): luck.randint(1, 2) for _ in range(luck.randint(0, 3))}
    faults, made, found = Faults(luck), [], []
    during_launch, during_close = luck.random() < 0.3, luck.random() < 0.4
    if luck.random() < 0.1:  # more faults than restarts are allowed in a row without progress
        hits |= dict.fromkeys(range(2, steps, 4), 1)
    where: dict[str, Any] = {"mesh": mesh, "cache": f"{folder}/cache"}
    if setting != "inline":
        where |= {"heartbeat": HEARTBEAT_S, "threads": 1}
    began = time.monotonic()
    if during_launch:
        faults.plan(1, 4.0)
    service = None
    while service is None:
        outcome.launches += 1
        before = faults.made.total()
        try:
            service = ol.launch(job, **SETTINGS[setting], **where)
        except ol.ServiceLost as error:
            if outcome.launches == LAUNCHES or not during_launch or faults.made.total() == 0:
                raise
            print(f"a fault ended the launch ({before} made before): {error}", file=sys.stderr)
    try:
        trainers = Trainers(service)
        for at in range(steps):
            faults.at = at
            if at in hits:
                faults.plan(hits[at], 0.6)
            if at in script:
                name, argument = script[at]
                step = None if ahead[at] is None else trainers.next_step + ahead[at]
                with contextlib.suppress(ol.SpecError):  # planned already, parked already: nothing has changed
                    made.append((at, name, argument, getattr(service, name)(argument, at_step=step)))
                    outcome.changes[name] = outcome.changes.get(name, 0) + 1
            found.append(fingerprint(trainers.step()))
            time.sleep(PACE_S)
        trainers.close()
        if during_close:
            faults.plan(luck.randint(1, 2), 0.8)
    finally:
        service.close()
        faults.calm()
    outcome.faults = dict(faults.made)
    expected = []
    with ol.launch(job, runtime="inline", mesh=mesh, cache=f"{folder}/cache") as service:
        trainers = Trainers(service)
        for at in range(steps):
            for when, name, argument, step in made:
                if when == at and getattr(service, name)(argument, at_step=step) != step:
                    raise AssertionError(f"{name} at step {step} took effect at another step")
            expected.append(fingerprint(trainers.step()))
    outcome.steps = steps
    outcome.differ = sum(a != b for a, b in zip(found, expected, strict=True))
    outcome.seconds = time.monotonic() - began
    return outcome


# -- from outside ---------------------------------------------------------------------------------


def weather(seed: int, setting: str) -> Outcome:
    """Let a process live through one storm, and look at what it leaves behind."""
    before = segments()
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder, tempfile.TemporaryFile("w+") as log:
        data, own = Path(folder, "data"), Path(folder, "tmp")
        data.mkdir()
        own.mkdir()
        command = [sys.executable, "-m", "benchmarks.storms", "--seed", str(seed), "--setting", setting]
        child = subprocess.Popen(
            [*command, "--folder", str(data)],
            env={**os.environ, "TMPDIR": str(own)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        outcome = Outcome(seed, setting)
        try:
            out, _ = child.communicate(timeout=STORM_S)
            lines = out.strip().splitlines()
            if child.returncode == 0 and lines:
                outcome = Outcome(**json.loads(lines[-1]))
            else:
                outcome.wrong.append(f"ended with code {child.returncode}")
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)
            child.communicate()
            outcome.wrong.append(f"hung for {STORM_S:g} s")
        if outcome.differ:
            outcome.wrong.append(f"{outcome.differ} of {outcome.steps} steps differ")
        outcome.wrong += leftovers(own, before, RAY_GONE_S if setting == "ray" else GONE_S)
        log.seek(0)
        text = log.read()
        outcome.wrong += wrong_lines(text, outcome.faults)
        if outcome.wrong:
            sys.stderr.write(f"storm {seed} on {setting}: {'; '.join(outcome.wrong)}\n{text}\n")
    return outcome


def segments() -> set[str]:
    """Return the segments of shared memory that have the names that Python, Ray or this package would give them."""
    found = Path("/dev/shm").iterdir() if os.path.isdir("/dev/shm") else ()
    return {path.name for path in found if path.name.startswith(("overlord", "psm_", "plasma")) and path.is_file()}


def leftovers(own: Path, before: set[str], within_s: float) -> list[str]:
    """Return what is left of a storm whose processes had a temporary folder of their own, after a while."""
    until = time.monotonic() + within_s
    while True:
        left = [f"process {p.pid} is left: {' '.join(p.cmdline())[:80]}" for p in of_folder(own)]
        left += [f"folder {path.name} is left" for path in own.iterdir()]
        left += [f"segment {name} is left" for name in segments() - before]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.2)


def of_folder(own: Path) -> list[psutil.Process]:
    """Return the processes whose temporary folder this is."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(own) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wrong_lines(log: str, faults: dict[str, int]) -> list[str]:
    """Return the warnings of a log that name no fault that was made."""
    allowed = [*(SERVICE_LINES if any("service" in kind for kind in faults) else ())]
    allowed += ROLE_LINES if faults else ()
    found = [line for line in log.splitlines() if re.search(r"WARNING|ERROR|Traceback|Error:", line)]
    return [f"logged: {line[:300]}" for line in found if not any(re.search(one, line) for one in allowed)]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--storms", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first storm")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        import logging

        logging.basicConfig(format="overlord: %(levelname)s: %(message)s", level=logging.WARNING)
        print(json.dumps(asdict(storm(options.seed, options.setting, options.folder))))
        return
    publish("storms", run(range(options.first, options.first + options.storms), options.settings), options.json)


def run(seeds: range, settings: list[str]) -> dict[str, object]:
    """Live through storms; return the figures."""
    outcomes: list[Outcome] = []
    for seed in seeds:
        shares = [SHARES[setting] for setting in settings]
        setting = random.Random(seed).choices(settings, shares)[0]
        outcomes.append(weather(seed, setting))
    faults: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
        changes.update(outcome.changes)
    bad = [outcome for outcome in outcomes if outcome.wrong]
    return {
        "storms": len(outcomes),
        "storms_with_something_wrong": len(bad),
        "bar": 0,
        "steps_compared": sum(outcome.steps for outcome in outcomes),
        "steps_that_differ": sum(outcome.differ for outcome in outcomes),
        "launches_ended_by_a_fault": sum(max(0, outcome.launches - 1) for outcome in outcomes),
        **{f"storms_on_{setting}": sum(o.setting == setting for o in outcomes) for setting in settings},
        **{f"faults_{kind.replace(' ', '_')}": number for kind, number in sorted(faults.items())},
        **{f"changes_{name}": number for name, number in sorted(changes.items())},
        "wrong": [f"{outcome.seed} on {outcome.setting}: {'; '.join(outcome.wrong)}" for outcome in bad],
        "seconds": sum(outcome.seconds for outcome in outcomes),
    }


if __name__ == "__main__":
    main()
