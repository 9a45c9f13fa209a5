"""What all supervisors share: limits that follow the heartbeat, liveness, restarts, and the fork server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from overlord.errors import ServiceLost
from overlord.job.layout_specs import DEFAULT_HEARTBEAT_S
from overlord.runtimes.supervision.child import LIMITS, Backoff, Limits, Liveness, Restarts, usable_cpus
from overlord.runtimes.supervision.fork_server import ForkServer, _Template


def serve(connection: socket.socket) -> None:
    """What a child of these tests does: ends with the code that it is sent."""
    os._exit(connection.recv(1)[0])


@pytest.mark.parametrize("heartbeat", [0.2, 1.0, DEFAULT_HEARTBEAT_S, 20.0, 40.0])
def test_limits_follow_the_heartbeat(heartbeat):
    limits = Limits(heartbeat)
    assert limits.role_silence == heartbeat
    assert limits.service_silence > limits.role_silence, "a service must be able to wait for a role that hangs"
    assert limits.lease > limits.service_silence + limits.role_silence, "a role is replaced before its lease is over"
    assert limits.role_first_sign >= limits.role_silence and limits.service_first_sign >= limits.service_silence
    for name, limit in vars(limits).items():
        if not name.endswith("silence"):
            assert limit >= getattr(LIMITS, name), "a short heartbeat leaves the time that work takes"


def test_a_longer_heartbeat_makes_no_limit_shorter():
    short, long = vars(Limits(DEFAULT_HEARTBEAT_S)), vars(Limits(60.0))
    assert all(long[name] >= short[name] for name in short)
    assert all(long[name] > short[name] for name in short if name != "damaged_file")


def test_silence_counts_only_while_a_sign_of_life_is_due():
    liveness = Liveness(first_s=60.0, silence_s=5.0, now=0.0)
    assert not liveness.hangs(59.0) and liveness.hangs(61.0)
    assert liveness.hangs(11.0, limit_s=10.0), "one that is known to be stopped gets less"
    liveness.heard(61.0)
    assert not liveness.hangs(66.0) and liveness.hangs(66.5)
    liveness.excuse(100.0)  # the watching process was stopped itself
    assert not liveness.hangs(104.0)
    liveness.heard(104.0, expect=False)
    assert liveness.silent_s(1e9) == 0.0
    liveness.expect(200.0)
    liveness.expect(204.0)
    assert liveness.silent_s(204.0) == 4.0


def test_failures_count_until_there_is_progress():
    restarts = Restarts(most=2, steady_s=3.0)
    restarts.failed("a", lived_s=1.0)
    restarts.failed("b")
    restarts.failed("c", progress=True)
    assert restarts.failures == ["c"] and not restarts.exhausted
    restarts.failed("d", lived_s=2.9)
    restarts.failed("e")
    assert restarts.exhausted and restarts.failures == ["c", "d", "e"]


def test_pauses_grow_until_something_goes_well():
    pauses: list[float] = []
    backoff = Backoff(1.0, 3.0, sleep=pauses.append)
    for _ in range(4):
        backoff.pause()
    backoff.reset()
    backoff.pause()
    assert pauses == [1.0, 2.0, 3.0, 3.0, 1.0]


@pytest.fixture
def server():
    server = ForkServer(__name__)
    yield server
    server.close()


def test_a_child_tells_how_it_ended_once(server):
    assert server.pid is None, "it starts with its first child"
    child = server.fork()
    assert child.alive and child.ended is None
    child.connection.sendall(bytes([7]))
    while child.alive:
        time.sleep(0.01)
    child.end()
    assert (child.code, child.ended) == (7, "ended with code 7")
    child.close()
    again = server.fork()
    again.kill("was killed by a test")
    again.end()
    assert (again.code, again.ended) == (-signal.SIGKILL, "was killed by a test")
    again.note_end(3)
    assert again.code == -signal.SIGKILL
    again.close()


def test_a_lost_server_is_replaced_and_its_children_are_lost_with_it(server):
    child = server.fork()
    first = server.pid
    psutil.Process(first).kill()
    other = server.fork()
    assert server.pid != first and other.alive and not child.alive
    child.end()
    assert (child.code, child.ended) == (None, "was lost"), "a later server knows nothing of it"
    child.close()
    server.close()
    other.close()
    assert not psutil.pid_exists(other.pid)
    with pytest.raises(ServiceLost, match="closed"):
        server.fork()


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("", {}, 1000),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 1000),
        ("0::/a/b", {"a/b/cpu.max": "250000 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "10000 100000"}, 1),
        ("3:cpu,cpuacct:/k\n2:memory:/k", {"cpu,cpuacct/k/cpu.cfs_quota_us": "500000"}, 1000),
        ("3:cpu,cpuacct:/k", {"cpu,cpuacct/k/cpu.cfs_quota_us": "-1", "cpu,cpuacct/k/cpu.cfs_period_us": "1"}, 1000),
        ("3:cpu:/k", {"cpu/k/cpu.cfs_quota_us": "500000", "cpu/k/cpu.cfs_period_us": "100000"}, 5),
        ("0::/a", {"a/cpu.max": "nonsense"}, 1000),
    ],
)
def test_cores_are_those_of_the_control_groups(tmp_path, monkeypatch, lines, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1000))
    (tmp_path / "own").write_text(lines)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cpus(tmp_path / "groups", tmp_path / "own") == expected


ORPHAN = """
import socket
from overlord.runtimes.supervision.fork_server import _run_server
_run_server("tests.runtimes.test_child", socket.socketpair()[0], ())
"""


def test_a_server_whose_process_is_gone_before_it_starts_ends_in_silence():
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 1


TEMPLATE = """
import os, sys
from overlord.runtimes.supervision.fork_server import ForkServer, start_template
start_template()
server, children = ForkServer("tests.runtimes.test_child"), []
for line in sys.stdin:
    if line.strip() == "fork":
        children.append(child := server.fork())
        print(server.pid, child.pid, flush=True)
    else:
        server.close()
        server = ForkServer("tests.runtimes.test_child")
        print(flush=True)
"""


def test_a_server_is_forked_from_the_template_and_started_where_that_is_lost():
    """All of them end with the process that asked for them, however it ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", TEMPLATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def ask(what: str) -> list[psutil.Process]:
        process.stdin.write(what + "\n")
        process.stdin.flush()
        return [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]

    try:
        server, child = ask("fork")
        (template,) = psutil.Process(process.pid).children()
        assert server.pid != template.pid and child.pid != template.pid
        ask("close")
        assert not psutil.wait_procs([server, child], 10)[1], "closed with all its children"
        again, other = ask("fork")
        assert again.ppid() == template.pid and other.ppid() == again.pid
        template.kill()
        assert ask("fork")[0] == again, "a server outlives the template"
        ask("close")
        third, last = ask("fork")
        assert third.ppid() == process.pid, "the template is gone: it was started"
        assert not psutil.pid_exists(template.pid), "and its exit was collected"
    finally:
        process.kill()
        process.wait()
    assert not psutil.wait_procs([third, last], 10)[1]
    process.stdin.close()
    process.stdout.close()


def test_two_servers_that_find_the_template_lost_at_once_both_go_on():
    """Its end is noticed once: the second one must not signal or collect a process that is gone."""
    gone = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], dict(os.environ))
    ours, theirs = socket.socketpair()
    theirs.close()
    template, found = _Template(gone, ours), []

    class Slow:
        """A lock whose next owner is faster than the last one."""

        lock = threading.Lock()

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()
            time.sleep(0.3)

    template._lock = Slow()

    def start():
        control, other = socket.socketpair()
        with control, other:
            try:
                found.append(template.start("overlord", control, ()))
            except BaseException as error:
                found.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours.close()
    assert found == [None, None]
    assert not psutil.pid_exists(gone), "and its exit was collected"
