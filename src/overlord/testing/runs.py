"""Runs under faults: the stream must be the same as without faults, and must resume at every step."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from overlord.errors import SpecError
from overlord.job.layout_specs import Runtime
from overlord.job.specs import Job
from overlord.launch_spec import LaunchOptions
from overlord.session import Service, launch, service_options
from overlord.testing.digests import Before, Report, StreamDigests, digest_service, digests_of
from overlord.testing.fault_engine import FaultInjector, FaultService, unknown_role
from overlord.testing.fault_script import SERVICE, Fault, FaultScript
from overlord.transforms.samples.per_sample import Isolate

UP_S = 30.0
"""How long a fault on a real process waits for the role to be up."""
CHANGES = (
    "set_mixture", "skip_steps", "reshard", "add_source", "remove_source", "park_source", "return_source"
)  # fmt: skip
"""What can be changed of a service while it runs."""

_Watched = list[tuple[str, list[str]]]


@contextmanager
def launch_for_faults(
    job: Job,
    script: FaultScript | None = None,
    *,
    most_workers: int = 0,
    isolate: Isolate | None = None,
    **options: Any,
) -> Iterator[tuple[Service, FaultInjector]]:
    """Launch a supervised service in this process, on a simulated clock; yield it and its fault injector.

    One process and one thread, as on the inline runtime, but with the roles, messages and the supervisor of a cluster.
    With `most_workers` of all sources `FaultInjector.resize` assigns them, and some loader hosts sleep at first.
    The other options are those of `launch`; all sources have a shadow, and there are two loader hosts, by default.
    """
    sizes: dict[str, Any] = {"scaling": True, "budget": {"cpus": most_workers}} if most_workers else {}
    given = LaunchOptions().call({"shadows": True, "loader_hosts": 2, "threads": 1} | sizes | options)
    faults = FaultInjector(script or FaultScript())
    cluster = FaultService(job, service_options(job, given), faults, isolate)
    with Service(cluster, job, given) as service:
        yield service, faults
        faults.calm()


def run_with_faults(
    job: Job,
    script: FaultScript,
    *,
    steps: int,
    runtime: Runtime = "inline",
    before: Before | None = None,
    report: Report | None = None,
    **options: Any,
) -> StreamDigests:
    r"""Run a job under a fault script; return the digests of what the trainers got.

    On "inline" everything happens in this process, at exact points, and waits take no time. On "local" and "ray" real
    processes are killed and stopped; a script for them has no other kinds.

    Args:
        job: The job.
        script: The faults.
        steps: Steps at most.
        runtime: Where it runs.
        before: Called before each step with the service and the step: where a test changes something. Give every
            change its `at_step`, so that it is the same one in a run without faults.
        report: Makes what rank 0 reports of a step.
        **options: Of `launch`; all sources have a shadow, and there are two loader hosts, by default.

    Example:
        >>> import tempfile, pathlib, json
        >>> import overlord as ol
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> rows = [json.dumps({"ids": list(range(1, n))}) for n in range(3, 30)]
        >>> _ = (folder / "a.jsonl").write_text("\n".join(rows))
        >>> job = ol.Job(sources=[ol.Source("a", str(folder / "a.jsonl"), sample=ol.Text("ids", tokenized=True))],
        ...              batch=ol.Batch(64, global_samples=8))
        >>> from overlord.testing import FaultScript, stream_digests
        >>> script = FaultScript().kill("planner", 1).stop("loader host 0", 2, for_s=30.0)
        >>> found = run_with_faults(job, script, steps=4, cache=folder / "cache")
        >>> found == stream_digests(job, steps=4, cache=str(folder / "cache"))
        True
    """
    given: dict[str, Any] = {"shadows": True, "loader_hosts": 2} | options
    reach: Callable[[int], None]
    with ExitStack() as ends:
        if runtime == "inline":
            service, faults = ends.enter_context(launch_for_faults(job, script, **given))
            reach = faults.pass_step
        else:
            check_for_processes(script)
            service = ends.enter_context(launch(job, runtime=runtime, **given))
            signals = ProcessFaults(script, service)
            ends.callback(signals.calm)
            reach = signals.reach

        def at_step(service: Service, step: int) -> None:
            reach(step)
            if before is not None:
                before(service, step)

        return digest_service(service, steps=steps, before=at_step, report=report)


class ProcessFaults:
    """Makes the faults of a script happen to the processes of a running service: those of kind kill and stop."""

    def __init__(self, script: FaultScript, service: Service) -> None:
        self._coming = list(script.faults)
        self._service = service
        self._stopped: dict[int, threading.Timer] = {}

    def reach(self, step: int) -> None:
        """Make the faults happen that come before a trainer asks for a step."""
        while self._coming and self._coming[0].at_step <= step:
            self._happen(self._coming.pop(0))

    def calm(self) -> None:
        """Continue every stopped process that is alive."""
        self._coming.clear()
        for pid in list(self._stopped):
            self._continue(pid)

    def _happen(self, fault: Fault) -> None:
        pid = self._service.pid if fault.role == SERVICE else self._pid_of(fault.role)
        try:
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            return  # it died just now of something else
        if fault.kind == "stop":  # by a timer thread: the trainer may be waiting for this process
            self._stopped[pid] = timer = threading.Timer(fault.seconds, self._continue, [pid])
            timer.daemon = True
            timer.start()

    def _continue(self, pid: int) -> None:
        self._stopped.pop(pid).cancel()
        with suppress(ProcessLookupError):  # it was taken for dead, and killed
            os.kill(pid, signal.SIGCONT)

    def _pid_of(self, role: str) -> int:
        until = time.monotonic() + UP_S
        while True:
            hosts: list[dict[str, Any]] = self._service.status()["hosts"]
            found = [host for host in hosts if host["role"] == role]
            if not found:
                raise unknown_role(role, [host["role"] for host in hosts])
            if found[0]["up"] or time.monotonic() > until:
                return int(found[0]["pid"])
            time.sleep(0.05)


def check_for_processes(script: FaultScript) -> None:
    """Refuse a script with faults that signals cannot make.

    Raises:
        SpecError: it names the fault.
    """
    for fault in script.faults:
        if fault.kind not in ("kill", "stop") or fault.method:
            raise SpecError(
                f"FaultScript: {fault.kind!r}{' on a message' if fault.method else ''} at step {fault.at_step} "
                "cannot be done to processes; it would not happen. Use runtime='inline' for it."
            )


def assert_resumes_anywhere(
    job: Job,
    *,
    steps: int,
    script: FaultScript | None = None,
    before: Before | None = None,
    report: Report | None = None,
    store: str | os.PathLike[str] | None = None,
    runtime: Runtime = "inline",
    **options: Any,
) -> None:
    """Take the state before every step, restore each, and check that the rest of the stream is identical.

    Args:
        job: The job.
        steps: Steps at most.
        script: Faults meanwhile, on "inline"; the states must be those of a run without faults.
        before: Called before each step with the service and the step: where a test changes something.
        report: Makes what rank 0 reports of a step.
        store: An empty folder, of this host, to keep the run in: every step is then also resumed from there, with
            `launch(state=STEP)`.
        runtime: Where it runs.
        **options: Of `launch`.

    Raises:
        AssertionError: it says where a resumed stream differs.
    """
    with ExitStack() as ends:
        reach: Callable[[int], None] = lambda step: None  # noqa: E731 - without faults
        if script is not None:
            service, faults = ends.enter_context(launch_for_faults(job, script, store=store, **options))
            reach = faults.pass_step
        else:
            service = ends.enter_context(launch(job, runtime=runtime, store=store, **options))
        notes = _Notes(service)
        expected, states = _watched(service, steps, notes.before(before), report, reach)
    for at, state in enumerate(states[: len(expected)]):
        step = int(state["step"])
        resumes: list[tuple[str, dict[str, Any], list[_Change]]] = [("its state", {"state": state}, [])]
        with tempfile.TemporaryDirectory(prefix="overlord-") as folder:
            if store is not None:  # a copy: a resume begins a new lineage in its store
                shutil.copytree(store, folder, dirs_exist_ok=True)
                # The state before a step does not hold changes that take effect later.
                later = [one for one in notes.made if one.made <= step < one.at]
                resumes.append(("the store", {"state": step, "store": folder}, later))
            for what, begin, missing in resumes:
                again = [*(replace(one, made=step) for one in missing), *(one for one in notes.made if one.made > step)]
                with launch(job, runtime=runtime, **begin, **options) as service:
                    found, _ = _watched(service, len(expected) - at, _made_again(again), report)
                _compare(found, expected[at:], at, what)


@dataclass(frozen=True, slots=True)
class _Change:
    """A live change of a service."""

    made: int
    """Before which step it was made."""
    name: str
    given: tuple[Any, ...]
    at: int
    """From which step on it holds."""


class _Notes:
    """A service that records its live changes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._step = 0
        self.made: list[_Change] = []

    def before(self, before: Before | None) -> Before | None:
        """Return a function that runs `before` and records the changes it makes."""

        def noted(service: Service, step: int) -> None:
            assert before is not None
            self._step = step
            before(cast("Service", self), step)

        return None if before is None else noted

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._service, name)
        if name not in CHANGES:
            return found

        def change(*given: Any, **named: Any) -> int:
            at = found(*given, **named)
            what = [value for key, value in named.items() if key != "at_step"]
            self.made.append(_Change(self._step, name, (*given, *what)[: 2 if name == "add_source" else 1], at))
            return at

        return change


def _made_again(changes: Sequence[_Change]) -> Before:
    def before(service: Service, step: int) -> None:
        for change in changes:
            if change.made == step:
                getattr(service, change.name)(*change.given, at_step=change.at)

    return before


def _compare(found: _Watched, expected: _Watched, at: int, what: str) -> None:
    if found != expected:
        pairs = enumerate(zip(found, expected, strict=False))
        wrong = next((number for number, (one, other) in pairs if one != other), len(found))
        raise AssertionError(f"resumed from {what} before step {at}, the stream differs at step {at + wrong}")


def _watched(
    service: Service,
    steps: int,
    before: Before | None,
    report: Report | None,
    reach: Callable[[int], None] = lambda step: None,
) -> tuple[_Watched, list[dict[str, Any]]]:
    """Consume steps; return what each was, and the state before each of them."""
    found: _Watched = []
    client = service.client(rank=0)
    states: list[dict[str, Any]] = []
    for _ in range(steps):
        reach(client.next_step)
        if before is not None:
            before(service, client.next_step)
        states.append(client.state_dict())
        step = next(client, None)
        if step is None:
            break
        found.append((step.plan_digest, digests_of(step)))
        if report is not None:
            client.report(step.index, report(step))
    return found, states
