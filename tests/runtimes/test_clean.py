"""Nothing is left behind: after close, an exception, Ctrl-C, or SIGKILL of the trainer or the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

import overlord as ol
from overlord.runtimes.supervision import early_start
from overlord.runtimes.supervision.child import LIMITS
from overlord.runtimes.supervision.work_clock import WorkClock

DEADLINE_S = 20.0


def folders() -> set[str]:
    return {p.name for p in Path(tempfile.gettempdir()).glob("overlord-*")}


def segments() -> set[str]:
    # Folders are the scratch stores of fault tests, which other processes of a test run have at the same time.
    return {p.name for p in Path("/dev/shm").iterdir() if not p.is_dir()} if Path("/dev/shm").exists() else set()


def wait_gone(pid: int) -> None:
    try:
        psutil.Process(pid).wait(DEADLINE_S)
    except psutil.NoSuchProcess:
        return


@pytest.fixture
def nothing_left(monkeypatch):
    with tempfile.TemporaryDirectory() as alone:  # other services of this host have their folders in /tmp
        monkeypatch.setenv("TMPDIR", alone)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield from check_nothing_left()
        monkeypatch.undo()


def check_nothing_left():
    WorkClock()  # a thread that takes times keeps a descriptor for it
    before = (folders(), segments(), threading.active_count(), set(os.listdir("/proc/self/fd")))
    known = set(psutil.Process().children(recursive=True))  # of other tests of this process: a tracker of torch's spawn
    yield
    children = [child for child in psutil.Process().children(recursive=True) if child not in known]
    psutil.wait_procs(children, DEADLINE_S)
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    assert folders() <= before[0]
    assert segments() <= before[1]
    assert threading.active_count() <= before[2]
    assert len(os.listdir("/proc/self/fd")) <= len(before[3])


@pytest.mark.slow_on_ray
def test_close(ids_job, cache, nothing_left, where):
    with ol.launch(ids_job, **where, cache=cache) as service:
        client = service.client()
        next(client).microbatches[0]
        client.close()
    with pytest.raises(ol.ClosedError, match="the service is closed"):
        service.client()


@pytest.mark.parametrize("setting", [{}, {"loader_hosts": 2}], ids=["one", "hosts"])
def test_a_client_that_goes_after_its_service_does_not_wait(ids_job, cache, nothing_left, setting, caplog):
    began = time.monotonic()
    service = ol.launch(ids_job, cache=cache, **setting)
    client = service.client()
    next(client)
    starting = time.monotonic() - began
    service.close()
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < starting, "it does not look for a service that starts again"
    assert caplog.text == ""


@pytest.mark.slow_on_ray
def test_exception_in_the_trainer(ids_job, cache, nothing_left, where):
    def train():
        with ol.launch(ids_job, **where, cache=cache) as service, service.client() as client:
            next(client).microbatches[0]
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        train()


def test_launch_that_fails(ids_job, cache, nothing_left, where):
    with pytest.raises(ol.StateError):
        ol.launch(ids_job, **where, cache=cache, state={"version": 0})


def test_a_process_that_was_started_early_serves_or_ends(ids_job, cache, nothing_left, monkeypatch):
    """The `overlord` command starts its service before it reads the job; one that would be another is not taken."""
    early_start.start_early()
    early = early_start._early
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        assert service.pid == early.process.pid
        assert next(client).index == 0
    early_start.start_early()
    early = early_start._early
    monkeypatch.setenv("OVERLORD_LOG", "error")
    with ol.launch(ids_job, cache=cache) as service:
        assert service.pid != early.process.pid
        assert early.process.returncode == -signal.SIGKILL
    early_start.start_early()
    process = early_start._early.process
    early_start.end_early()
    assert process.returncode == -signal.SIGKILL


def test_service_is_killed_and_comes_back(ids_job, cache, nothing_left):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        held = list(next(client).microbatches)
        os.kill(service.status()["pid"], signal.SIGKILL)
        assert [next(client).index for _ in range(4)] == [1, 2, 3, 4]
        assert service.status()["restarts"] == 1
        del held


@pytest.mark.slow
def test_close_while_the_service_is_started_again(ids_job, cache, nothing_left):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        next(client)
        os.kill(service.status()["pid"], signal.SIGKILL)
        while service._runtime.restarts == 0:
            time.sleep(0.01)
        service.close()
        with pytest.raises(ol.ServiceLost, match="is gone"):
            for _ in range(2):  # the first of them may be in hand
                next(client)


@pytest.mark.parametrize(
    "runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_close_while_a_role_is_replaced(ids_job, cache, nothing_left, runtime):
    service = ol.launch(ids_job, cache=cache, runtime=runtime, loader_hosts=2, shadows=True)
    with service, service.client() as client:
        next(client)
        hosts = service.status()["hosts"]
        for host in hosts:
            if host["role"] != "constructor host 0":
                os.kill(host["pid"], signal.SIGKILL)
        time.sleep(0.3)


def test_client_learns_that_the_service_was_ended(ids_job, cache, nothing_left):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        next(client)
        os.kill(service.status()["pid"], signal.SIGTERM)
        with pytest.raises(ol.ServiceLost, match=r"is gone|was ended by a SIGTERM"):
            for _ in client:
                pass
        with pytest.raises(ol.ServiceLost, match="was ended by a SIGTERM"):
            service._runtime._supervisor._thread.join(DEADLINE_S)
            service.status()
        with pytest.raises(ol.ServiceLost, match="no service answers"):
            ol.connect(service.address, 0)


_LAUNCHER = """
import json, sys, time
import overlord as ol
job = ol.Job.from_mapping(json.loads(sys.argv[1]))
service = ol.launch(job, cache=sys.argv[2], mesh=ol.ClientPlaceTree(dp=2), **json.loads((sys.argv[3:] or ["{}"])[0]))
print(json.dumps([service.address, service.status()["pid"]]), flush=True)
client = service.client()
try:
    for step in client:
        batch = step.microbatches[0]
        if step.index == 3:
            print("at 3", flush=True)
            sys.stdin.read()
finally:
    client.close()
    service.close()
"""

_TRAINER = """
import sys
import overlord as ol
client = ol.connect(sys.argv[1], int(sys.argv[2]))
for step in client:
    held = step.microbatches[0]
    if step.index == 3:
        print("at 3", flush=True)
        sys.stdin.read()
"""


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def started_launcher(ids_job, cache, setting=None):
    launcher = start(_LAUNCHER, ids_job.model_dump_json(by_alias=True), cache, json.dumps(setting or {}))
    address, pid = json.loads(launcher.stdout.readline())
    assert launcher.stdout.readline() == "at 3\n"
    return launcher, address, pid


def end(process) -> None:
    process.stdin.close()
    process.stdout.close()
    process.wait(DEADLINE_S)


def wait_removed(address: str) -> None:
    folder, until = Path(address.removeprefix("unix://")), time.monotonic() + DEADLINE_S
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C", "SIGKILL", "SIGTERM"],
)
def test_launcher_is_stopped(ids_job, cache, nothing_left, how):
    launcher, address, pid = started_launcher(ids_job, cache)
    launcher.send_signal(how)
    launcher.wait(DEADLINE_S)
    wait_gone(pid)
    wait_removed(address)
    end(launcher)


_WAITING = """
import sys
import overlord as ol
client = ol.connect(sys.argv[1], 0)
print("attached", flush=True)
try:
    for step in client:  # which waits for a report that nobody gives
        print("at", step.index, flush=True)
except ol.OverlordError as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("killed", "ServiceLost the process that launched the service is gone"),
        pytest.param("closed", "ClosedError the service was closed by its launcher", marks=pytest.mark.slow),
        pytest.param("killed processes", "ServiceLost the process that launched", marks=pytest.mark.slow),
        pytest.param("closed processes", "ClosedError the service was closed by", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_learns_why_the_service_ended(ids_job, cache, nothing_left, how, kind):
    """A trainer that waits for data is told whether the service was closed, or its launcher died."""
    sources = [source.replace(weight=None) for source in ids_job.sources]
    job = ids_job.replace(sources=sources, mixture=ol.Mixture({"a": 3, "b": 1, "c": 2}, learn="odm"), lag=4)
    script = _LAUNCHER.replace("client = service.client()", "sys.stdin.readline(); service.close(); sys.exit()")
    if "processes" in how:
        script = script.replace("mesh=ol.ClientPlaceTree(dp=2)", "loader_hosts=2")
    launcher = start(script, job.model_dump_json(by_alias=True), cache)
    address, pid = json.loads(launcher.stdout.readline())
    trainer = start(_WAITING, address)
    lines = [trainer.stdout.readline()]
    while lines[-1] != "at 3\n":
        lines.append(trainer.stdout.readline())
    time.sleep(0.5)
    if "killed" in how:
        launcher.kill()
    else:
        launcher.stdin.write("close\n")
        launcher.stdin.flush()
    launcher.wait(DEADLINE_S)
    assert trainer.stdout.readline().startswith(kind)
    wait_gone(pid)
    wait_removed(address)
    end(launcher)
    end(trainer)


@pytest.mark.parametrize("replays", [False, True], ids=["launch", "replay"])
def test_an_inline_service_that_is_killed_leaves_nothing(ids_job, cache, tmp_path, replays):
    script = """
import json, os, signal, sys
import overlord as ol
job = ol.Job.from_mapping(json.loads(sys.argv[1]))
if sys.argv[3]:
    with ol.launch(job, cache=sys.argv[2], runtime="inline", store=sys.argv[3]) as service:
        next(service.client())
    service = ol.replay(sys.argv[3], 0, cache=sys.argv[2])
else:
    service = ol.launch(job, cache=sys.argv[2], runtime="inline")
next(service.client())
print("serves", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    store = str(tmp_path / "store") if replays else ""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, ids_job.model_dump_json(by_alias=True), cache, store],
        env={**os.environ, "TMPDIR": str(temporary)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "serves\n", done.stderr
    until = time.monotonic() + DEADLINE_S
    while list(temporary.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not list(temporary.iterdir())


def test_launcher_and_service_are_killed(ids_job, cache, nothing_left):
    launcher, address, pid = started_launcher(ids_job, cache)
    launcher.send_signal(signal.SIGSTOP)  # so that it cannot start the service again in between
    os.kill(pid, signal.SIGKILL)
    launcher.kill()
    launcher.wait(DEADLINE_S)
    wait_removed(address)
    end(launcher)


@pytest.mark.parametrize(
    "setting", [{"dashboard": 0}, pytest.param({"loader_hosts": 2}, marks=pytest.mark.slow)], ids=["one", "hosts"]
)
def test_what_is_stopped_when_its_launcher_is_killed_goes_too(mixed_job, cache, nothing_left, setting):
    """A process that is stopped cannot see that its launcher or its service is gone."""
    launcher, address, _ = started_launcher(mixed_job, cache, setting)
    there = psutil.Process(launcher.pid).children(recursive=True)
    assert len(there) > 3
    for process in there:
        process.send_signal(signal.SIGSTOP)
    launcher.kill()
    _, left = psutil.wait_procs(there, DEADLINE_S)
    names = [Path(f"/proc/{process.pid}/comm").read_text() for process in left]
    for process in left:
        process.kill()
    assert names == []
    wait_removed(address)
    end(launcher)


def test_a_page_that_is_stopped_after_its_launcher_was_killed_goes_too(ids_job, cache, nothing_left):
    """It takes a moment to end, in which a SIGSTOP may still meet it; no process watches over it then."""
    launcher, address, _ = started_launcher(ids_job, cache, {"dashboard": 0})
    (page,) = (p for p in psutil.Process(launcher.pid).children() if "overlord.dashboard.serving_page" in p.cmdline())
    launcher.kill()
    launcher.wait(DEADLINE_S)  # its end of the pipe is closed
    with contextlib.suppress(psutil.NoSuchProcess):
        page.send_signal(signal.SIGSTOP)
    _, left = psutil.wait_procs([page], 2 * LIMITS.orphaned_role)
    for process in left:
        process.kill()
    assert left == []
    wait_removed(address)
    end(launcher)


@pytest.mark.slow
def test_launcher_is_killed_while_it_starts_the_service_again(ids_job, cache, nothing_left):
    launcher, address, pid = started_launcher(ids_job, cache)
    os.kill(pid, signal.SIGKILL)
    children = psutil.Process(launcher.pid).children
    while not [child.pid for child in children() if child.pid != pid]:
        time.sleep(0.01)
    again = children()[-1].pid
    launcher.kill()
    launcher.wait(DEADLINE_S)
    wait_gone(again)
    wait_removed(address)
    end(launcher)


def test_trainer_is_killed_and_another_takes_its_rank(ids_job, cache, nothing_left):
    with ol.launch(ids_job, cache=cache, mesh=ol.ClientPlaceTree(dp=2), budget=1 << 20) as service:
        trainer = start(_TRAINER, service.address, "1")
        assert trainer.stdout.readline() == "at 3\n"
        trainer.kill()
        end(trainer)
        with service.client(rank=1) as client:
            assert [next(client).index for _ in range(6)] == list(range(6))
        # A client goes when the service has seen its socket close, and a microbatch in the making is dropped when made.
        seen = (service.status() for _ in range(2000))
        assert any(not status["clients"] and status["memory"]["held"]["views"] == 0 for status in seen)


def test_arrays_outlive_the_client_and_the_service(ids_job, cache, nothing_left):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        batches = [batch for _, step in zip(range(4), client, strict=False) for batch in step.microbatches]
        digests = [batch.digest() for batch in batches]
    assert [batch.digest() for batch in batches] == digests
    del batches


def test_a_trainer_that_keeps_every_batch_does_not_stop_the_feed(mixed_job, cache, nothing_left):
    with ol.launch(mixed_job, cache=cache, budget=4 << 20) as service, service.client() as client:
        kept = [batch for _, step in zip(range(12), client, strict=False) for batch in step.microbatches]
        assert sum(batch.nbytes for batch in kept) > 8 << 20
        digests = [batch.digest() for batch in kept]
        assert service.status()["memory"]["held"]["views"] < 24 << 20
    with ol.launch(mixed_job, cache=cache, runtime="inline") as service:
        client = service.client()
        fresh = [b.digest() for _, step in zip(range(12), client, strict=False) for b in step.microbatches]
    assert digests == fresh
    del kept


def test_the_end_of_a_service_process_does_not_search_what_its_imports_made():
    """The interpreter collects garbage as it ends: half a second of a close with numba and Arrow loaded."""
    script = """
import atexit, gc
from overlord.runtimes.supervision.cleanup import set_up_process
atexit.register(lambda: print(gc.get_freeze_count(), gc.get_freeze_count() > len(gc.get_objects())))
set_up_process()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["True"], done.stdout
