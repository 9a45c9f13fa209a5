"""The cluster runtime on three real Ray nodes: who runs where, what goes through whom, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.job_files import dump_job_yaml
from overlord.testing import digest_service, stream_digests

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

DEADLINE_S = 30.0

TRAINER = """
import sys
import overlord as ol
with ol.connect(sys.argv[1], rank=int(sys.argv[2])) as client:
    for step, _ in zip(client, range(int(sys.argv[3]))):
        print(step.plan_digest, *(batch.digest() for batch in step.microbatches))
assert "ray" not in sys.modules, "a trainer needs no ray"
"""


def trainer(address: str, rank: int, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TRAINER, address, str(rank), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_trainers_of_one_data_parallel_group_on_two_nodes(mixed_job, cache, ray_address):
    tree, steps = ol.ClientPlaceTree(dp=1, cp=2, tp=2), 6
    expected = []
    with ol.launch(mixed_job, mesh=tree, runtime="inline", cache=cache) as service:
        for rank in range(4):
            client = service.client(rank)
            lines = [
                f"{step.plan_digest} {' '.join(batch.digest() for batch in step.microbatches)}"
                for step, _ in zip(client, range(steps), strict=False)
            ]
            expected.append("\n".join(lines) + "\n")
    options = {"runtime": "ray", "address": ray_address, "ranks_per_host": 2}
    with ol.launch(mixed_job, mesh=tree, cache=cache, **options) as service:
        trainers = [trainer(service.address, rank, steps) for rank in range(4)]
        assert [one.communicate(timeout=100)[0] for one in trainers] == expected
        status = service.status()
    placement = {one["role"]: one for one in status["ray"]["placement"]}
    nodes = [placement[f"constructor host {number}"]["node"] for number in (0, 1)]
    assert len(set(nodes)) == 2
    assert {placement[f"loader host {number}"]["node"] for number in (0, 1)} == set(nodes), "sidecars come first"
    assert [placement[f"constructor host {number}"]["ranks"] for number in (0, 1)] == ["0-1", "2-3"]
    assert status["runtime"] == "ray" and status["ray"]["version"]
    assert len(status["ray"]["nodes"]) == 3 and all(one["resources"]["CPU"] for one in status["ray"]["nodes"])
    traffic = status["planner"]["traffic"]
    hosts = 4
    assert traffic["plans"] >= steps
    assert traffic["metadata_bytes"] <= traffic["plan_bytes"]
    assert traffic["other_bytes"] <= 1024 * hosts * traffic["plans"]


@pytest.mark.slow
def test_two_services_in_one_cluster_do_not_meet(ids_job, cache, ray_address):
    jobs = [ids_job, ids_job.replace(seed=99)]
    expected = [stream_digests(job, steps=4, cache=cache) for job in jobs]
    where = {"runtime": "ray", "address": ray_address, "cache": cache}
    with ol.launch(jobs[0], **where) as one, ol.launch(jobs[1], **where) as other:
        assert [digest_service(service, steps=4) for service in (one, other)] == expected
        one.close()
        assert digest_service(other, steps=4) == expected[1]


@pytest.fixture
def heavy_job(tmp_path):
    """Steps of 4 MB of token ids."""
    rows = [np.full(32_000, n, np.int32) for n in range(400)]
    for part in range(2):
        table = pa.table({"ids": pa.array([row.tolist() for row in rows[part::2]], pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=20)
    source = ol.Source("s", str(tmp_path / "*.parquet"), sample=ol.Text("ids", tokenized=True))
    return ol.Job(sources=[source], batch=ol.Batch(32_000, global_samples=32))


PLASMA = """
import logging, sys, time
import ray
from ray._private.state import available_resources_per_node, total_resources_per_node
ray.init(sys.argv[1], logging_level=logging.ERROR)
held = "object_store_memory"
whole = sum(node[held] for node in total_resources_per_node().values())
most = 0.0
for _ in range(int(sys.argv[2])):
    most = max(most, whole - sum(node[held] for node in available_resources_per_node().values()))
    print(most / (1 << 20), flush=True)
    time.sleep(0.5)
"""


@pytest.mark.slow
def test_payloads_in_flight_stay_within_the_budget_of_a_slow_trainer(heavy_job, cache, ray_address):
    budget = 24 << 20
    options = {"runtime": "ray", "address": ray_address, "budget": budget, "prefetch": 8}
    with ol.launch(heavy_job.replace(lag=9), cache=cache, **options) as service, service.client() as client:
        looking = [sys.executable, "-c", PLASMA, ray_address, "12"]
        with subprocess.Popen(looking, stdout=subprocess.PIPE, text=True) as look:
            while look.poll() is None:  # eight steps of 4 MB would be wanted, and more than a few do not fit
                time.sleep(0.8)
                step = next(client)
                assert sum(batch.nbytes for batch in step.microbatches) > 8 << 20
            assert look.stdout is not None
            most = float(look.stdout.read().split()[-1])
        status = service.status()
    assert 0 < most < (budget >> 20) + 8, "MiB in the object store"
    traffic = status["planner"]["traffic"]
    payload_bytes = sum(one["handed_over_bytes"] for one in status["sources"].values())
    assert payload_bytes > 4 << 20
    through = traffic["plan_bytes"] + traffic["metadata_bytes"] + traffic["other_bytes"]
    assert through < payload_bytes / 100, "the planner sees no data"


LAUNCHER = """
import json, sys, time
import overlord as ol
if __name__ == "__main__":
    job = ol.Job.from_mapping(json.loads(sys.argv[1]))
    service = ol.launch(job, runtime="ray", cache=sys.argv[2], **json.loads(sys.argv[3]))
    client = service.client()
    next(client).microbatches[0]
    print(json.dumps({"status": service.status(), "address": service.address, "pid": service._runtime.pid}), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("victim", "attached"),
    [
        pytest.param("driver", True, id="attached", marks=pytest.mark.slow),
        pytest.param("driver", False, id="own cluster"),
        pytest.param("driver and service", True, id="with the service, attached", marks=pytest.mark.slow),
        pytest.param("driver and service", False, id="with the service, own cluster", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_nothing(ids_job, cache, ray_address, tmp_path, attached, victim):
    options = {"address": ray_address} if attached else {}
    job = ids_job.model_dump_json(by_alias=True, exclude_defaults=False)
    short = Path("/tmp") / f"ovlkill{os.getpid()}"
    short.mkdir()
    command = [sys.executable, "-c", LAUNCHER, job, cache, json.dumps(options)]
    # Whoever asks for a cluster of his own gets one, whatever other cluster the environment names.
    environment = {**os.environ, "TMPDIR": str(short), "RAY_ADDRESS": "127.0.0.1:1"}
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert launcher.stdout is not None
    said = json.loads(launcher.stdout.readline())
    folder = Path(said["address"].removeprefix("unix://"))
    assert folder.is_dir() and folder.parent == short
    pids = [one["pid"] for one in said["status"]["ray"]["placement"]] + [said["pid"]]
    ours = [child.pid for child in psutil.Process(said["pid"]).children(recursive=True)] if not attached else []
    launcher.kill()
    launcher.wait()
    if victim == "driver and service":
        os.kill(said["pid"], signal.SIGKILL)
        ours = []  # agents of Ray look for their parents once a minute only; they end by themselves
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        left = [pid for pid in (*pids, *ours) if running(pid)]
        if not left and not list(short.iterdir()):
            break
        time.sleep(0.5)
    launcher.stdout.close()
    assert not left, [psutil.Process(pid).cmdline() for pid in left]
    assert not list(short.iterdir())
    assert not [path for path in Path("/dev/shm").glob("*") if "overlord" in path.name]
    short.rmdir()


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_a_loader_host_that_is_gone_or_silent_has_a_shadow(ids_job, cache, ray_address, signum):
    expected = stream_digests(ids_job, steps=30, cache=cache)
    options = {"runtime": "ray", "address": ray_address, "threads": 1, "shadows": True, "heartbeat": 2.0}
    with ol.launch(ids_job, cache=cache, **options) as service:
        before = service.status()
        pid = next(host["pid"] for host in before["hosts"] if host["role"] == "loader host 0")
        os.kill(pid, signum)
        assert digest_service(service, steps=30) == expected
        after = service.status()
    assert [fault["role"] for fault in after["faults"]] == ["loader host 0"]
    assert after["faults"][0]["promoted"] > 0
    assert not running(pid)


def slow_to_read(row):
    time.sleep(0.7)
    return {"tokens": row["ids"]}


@pytest.mark.slow
def test_a_loader_host_that_is_busy_and_alive_is_waited_for(tmp_path, cache, ray_address):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"ids": [n, n]}) for n in range(8)))
    sample = ol.Custom(slow_to_read, columns=["ids"])
    job = ol.Job(
        sources=[ol.Source("a", str(tmp_path / "a.jsonl"), sample=sample)], batch=ol.Batch(8, global_samples=4)
    )
    options = {"runtime": "ray", "address": ray_address, "threads": 1, "heartbeat": 1.0}
    with ol.launch(job, cache=cache, **options) as service, service.client(0) as client:
        assert next(client).global_samples == 4
        assert service.status()["faults"] == []


def test_wrong_clusters_are_refused(ids_job, cache, ray_address):
    def refused(**options) -> str:
        with pytest.raises(ol.SpecError) as caught:
            ol.launch(ids_job, cache=cache, **{"runtime": "ray", "address": ray_address, **options})
        return str(caught.value)

    assert "address is 5" in refused(address=5)
    assert "loader_hosts is 'many'" in refused(loader_hosts="many")
    assert "ranks_per_host is 0" in refused(ranks_per_host=0)
    assert "runtime is 'local', which has no cluster" in refused(runtime="local")
    tree = ol.ClientPlaceTree(dp=8)
    assert "8 trainer hosts, and the cluster has 3" in refused(mesh=tree, ranks_per_host=1)
    assert "idle CPUs for loader host" in refused(threads=1000)


def test_a_port_that_never_answers_is_told_in_seconds(ids_job, cache):
    """Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(
            ol.SpecError, match=rf"no Ray cluster could be reached at '127\.0\.0\.1:{port}' \(timed out"
        ):
            ol.launch(ids_job, cache=cache, runtime="ray", address=f"127.0.0.1:{port}")


def test_a_ray_that_cannot_authenticate_is_refused(ids_job, cache, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.51.1")
    with pytest.raises(ol.SpecError, match=r"Ray 2\.51\.1 is installed.*token.*2\.52 or newer"):
        ol.launch(ids_job, cache=cache, runtime="ray")


@pytest.mark.slow
def test_a_cluster_that_does_not_come_up_is_told_without_a_traceback(ids_job, tmp_path):
    """Ray raises a bare Exception where its daemon does not come up; here it cannot be executed."""
    (tmp_path / "job.yaml").write_text(dump_job_yaml(ids_job))
    stub = "import ray._private.services as s; s.RAYLET_EXECUTABLE = '/bin/false'\n"
    (tmp_path / "sitecustomize.py").write_text(stub)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "overlord", "run", str(tmp_path / "job.yaml"), "--runtime", "ray", "--steps", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 2, done.stderr
    assert "no Ray cluster could be started on this host" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_cluster_of_our_own_listens_here_only_and_asks_for_a_token(ids_job, cache):
    with ol.launch(ids_job, cache=cache, runtime="ray") as service:
        next(service.client(0))
        processes = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
        listening = {
            one.laddr.ip
            for process in processes
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }
        address = service.status()["ray"]["address"]
        question = "import ray, sys; ray.init(sys.argv[1]); print('inside')"
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(cache),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 64,
        }
        tried = subprocess.Popen([sys.executable, "-c", question, address], env=environment, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True)  # fmt: skip
        try:
            said, _ = tried.communicate(timeout=60)
        except subprocess.TimeoutExpired:  # it tries again and again
            tried.kill()
            said, _ = tried.communicate()
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
    assert "inside" not in said


def test_an_address_where_no_cluster_is(ids_job, cache):
    with pytest.raises(ol.SpecError, match=r"no Ray cluster could be reached.*'127\.0\.0\.1:1'.*ray start"):
        ol.launch(ids_job, cache=cache, runtime="ray", address="127.0.0.1:1")
