"""Another user of the host, who tries every file, socket and process of a running service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import overlord as ol

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user"),
]
NOBODY = 65534

# Becomes another user; the interpreter itself may stand where only this one can execute it.
DROP = f"""
import json, os, socket, sys
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""
TRY = (
    DROP
    + r"""
folders, pids = json.loads(sys.stdin.read())
opened, seen = [], 0

def attempt(what, act):
    global seen
    seen += 1
    try:
        act()
    except OSError:
        return
    opened.append(what)

def connect(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)

for folder in folders:
    attempt("list " + folder, lambda: os.listdir(folder))
    attempt("write " + folder, lambda: os.close(os.open(folder + "/x", os.O_CREAT | os.O_WRONLY)))
for path in json.loads(sys.argv[1]):
    attempt("read " + path, lambda: open(path, "rb").read(1))
    attempt("write " + path, lambda: open(path, "ab"))
    attempt("connect " + path, lambda: connect(path))
    attempt("remove " + path, lambda: os.unlink(path))
for pid in pids:
    attempt(f"environ {pid}", lambda: open(f"/proc/{pid}/environ").read())
    attempt(f"memory {pid}", lambda: open(f"/proc/{pid}/mem", "rb"))
    attempt(f"maps {pid}", lambda: open(f"/proc/{pid}/maps").read())
    attempt(f"descriptors {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    for fd in range(64):
        attempt(f"descriptor {fd} of {pid}", lambda: open(f"/proc/{pid}/fd/{fd}", "rb"))
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
for name in os.listdir("/dev/shm"):
    if os.access("/dev/shm/" + name, os.R_OK) and "overlord" in name:
        opened.append("/dev/shm/" + name)
# Unix sockets without a file can be reached by every user.
with open("/proc/net/unix") as table:
    opened += [line.split()[-1] for line in table if "@" in line and "overlord" in line]
print(json.dumps([opened, seen]))
"""
)


def of(service):
    return [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]


@pytest.fixture
def open_folder(monkeypatch):
    """A folder that all users can enter; only what the service itself does keeps others out."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("hosts", [None, pytest.param(2, marks=pytest.mark.slow)], ids=["local", "hosts"])
def test_another_user_reaches_nothing_of_a_service(ids_job, demo_files, hosts, open_folder):
    job = ids_job.replace(tokenizer=str(demo_files.tokenizer))  # its trial leaves a mark in the cache
    (open_folder / "seen").touch()
    umask = os.umask(0)
    try:
        given = {"cache": open_folder / "cache", "store": open_folder / "store", "loader_hosts": hosts, "dashboard": 0}
        with ol.launch(job, **given, dashboard_changes=True) as service:
            client = service.client(0)
            for _ in range(20):
                next(client)
            socket_folder = Path(service.address.removeprefix("unix://"))
            socket_folder = socket_folder if socket_folder.is_dir() else socket_folder.parent
            folders = [socket_folder, *(folder for folder in open_folder.rglob("*") if folder.is_dir())]
            paths = [path for folder in folders for path in folder.iterdir() if not path.is_dir()]
            pids = [one.pid for one in of(service)] + [one.pid for one in psutil.Process().children()]
            assert len(paths) > 5
            done = subprocess.run(
                [sys.executable, "-I", "-c", TRY, json.dumps([str(path) for path in [*paths, open_folder / "seen"]])],
                input=json.dumps([[str(folder) for folder in folders], pids]),
                capture_output=True, text=True, cwd="/",
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            opened, tried = json.loads(done.stdout)
            next(client)
    finally:
        os.umask(umask)
    assert tried > 200
    assert opened == [f"read {open_folder / 'seen'}"]  # a file for all users, so that the tries are real ones
