"""`overlord serve` and `status` as a user meets them: other processes, signals, a service that dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from tests.conftest import write_ids
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.cli.output import Screen
from overlord.cli.serving import _on_sigterm, announcement, serve_until_stopped, status_tables
from overlord.job_files import LaunchOptions, dump_job_yaml
from overlord.launch_spec import Launch

Serve = Callable[..., tuple["subprocess.Popen[str]", dict[str, Any]]]


@pytest.fixture(scope="module")
def job_file(ids_job: ol.Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text(dump_job_yaml(ids_job, LaunchOptions(mesh=ol.ClientPlaceTree(dp=2))))
    return path


@pytest.fixture
def serve(job_file: Path, cache: str) -> Iterator[Serve]:
    running: list[subprocess.Popen[str]] = []

    def start(*options: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, "-m", "overlord.cli.main", "serve", str(job_file), "--json", "--cache", cache]
        process = subprocess.Popen(
            [*command, *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_trainers_attach_and_ctrl_c_ends_it(serve: Serve, tmp_path: Path) -> None:
    process, told = serve("--address-file", tmp_path / "address", "--metrics", 0)
    with urllib.request.urlopen(told["metrics"], timeout=30) as answer:
        assert "overlord_up 1.0" in answer.read().decode()
    with ol.connect(told["address"], rank=1) as client:
        assert next(client).index == 0
        for where in (told["address"], tmp_path / "address"):
            status = CliRunner().invoke(app, ["status", str(where), "--json"])
            assert status.exit_code == 0
            assert json.loads(status.stdout)["clients"] == {"1": 0}
        shown = CliRunner().invoke(app, ["status", told["address"]])
        assert "planned" in shown.stdout
        assert "1 client attached" in shown.stdout
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert not (tmp_path / "address").exists()
    assert not Path(told["address"].removeprefix("unix://")).exists()


def test_sigterm_ends_it_in_peace(serve: Serve) -> None:
    process, told = serve()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    gone = CliRunner().invoke(app, ["status", told["address"]])
    assert gone.exit_code == 2
    assert "no service answers" in gone.stderr


def test_a_sigterm_at_any_moment_is_seen() -> None:
    """Also one that comes just when the wait for it begins."""
    with _on_sigterm() as stopped_within:
        assert not stopped_within(0.0)
    for microseconds in range(0, 400, 10):
        timer = threading.Timer(microseconds / 1e6, os.kill, (os.getpid(), signal.SIGTERM))
        with _on_sigterm() as stopped_within:
            timer.start()
            assert stopped_within(20.0)
            timer.join()


def test_a_service_that_dies_comes_back(serve: Serve) -> None:
    process, told = serve()
    with ol.connect(told["address"], rank=0) as client:
        assert next(client).index == 0
        os.kill(told["pid"], signal.SIGKILL)
        assert [next(client).index for _ in range(4)] == [1, 2, 3, 4]
        status = json.loads(CliRunner().invoke(app, ["status", told["address"], "--json"]).stdout)
        assert status["pid"] != told["pid"]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert f"the service process {told['pid']} was killed by SIGKILL; it is started again (restart 1)" in err


@pytest.mark.slow
def test_a_service_that_cannot_come_back_is_told(tmp_path: Path, cache: str) -> None:
    rows = write_ids(tmp_path / "a.jsonl", [5] * 40)
    job = ol.Job(
        [ol.Source("a", str(rows), sample=ol.Text("ids", tokenized=True))], batch=ol.Batch(32, global_samples=4)
    )
    (tmp_path / "job.yaml").write_text(dump_job_yaml(job, LaunchOptions()))
    command = [sys.executable, "-m", "overlord.cli.main", "serve", str(tmp_path / "job.yaml"), "--json"]
    with subprocess.Popen(
        [*command, "--cache", cache], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        rows.unlink()
        os.kill(told["pid"], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "(was killed by SIGKILL) and cannot be started again" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_service_without_clients_shows_its_sources_only(ids_job: ol.Job, cache: str) -> None:
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        sentence, _, memory = status_tables(service.status())
        assert "no trainer is attached" in sentence and memory.endswith(" a host)")


class _Stuck:
    """A service that is too busy to answer."""

    address = "unix:///nowhere"

    def status(self) -> dict[str, Any]:
        time.sleep(60)
        raise AssertionError("nobody waits for this")


def test_a_service_that_does_not_answer_can_be_ended() -> None:
    began = time.monotonic()
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
    serve_until_stopped(_Stuck(), Screen(as_json=True), None, timer.start)  # type: ignore[arg-type]
    assert time.monotonic() - began < 20


# A service on a cluster.


@pytest.fixture
def cluster_status(ids_job: ol.Job, cache: str) -> dict[str, Any]:
    """The status of a service, with what a cluster of two trainer hosts and a CPU host adds."""
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=16), runtime="inline", cache=cache) as service:
        next(service.client(0))
        status = service.status()
    own = {"memory": 1e12, "object_store_memory": 2e11, "node:10.0.0.1": 1.0, "accelerator_type:H200": 1.0}
    trainer = own | {"CPU": 96.0, "GPU": 8.0, "overlord_trainer": 1.0}
    first = status["planner"]["first_step"]
    status["planner"] |= {
        "next_step": first + 4,
        "traffic": {"plans": 2, "plan_bytes": 3000, "metadata_bytes": 8000, "other_bytes": 5},
    }
    return status | {
        "runtime": "ray",
        "ray": {
            "version": "2.60.0",
            "address": "10.0.0.1:6379",
            "nodes": [
                {"host": "gpu-0", "node": "a", "resources": trainer},
                {"host": "gpu-1", "node": "b", "resources": trainer},
                {"host": "cpu-0", "node": "c", "resources": own | {"CPU": 64.0}},
            ],
            "placement": [
                {"role": "planner", "host": "gpu-0", "node": "a", "cpus": 1.0, "pid": 11},
                {"role": "constructor host 0", "host": "gpu-0", "node": "a", "cpus": 1.0, "pid": 12, "ranks": "0-7"},
                {"role": "constructor host 1", "host": "gpu-1", "node": "b", "cpus": 1.0, "pid": 13, "ranks": "8-15"},
                {"role": "loader host 0", "host": "cpu-0", "node": "c", "cpus": 2.0, "pid": 14, "sources": 3},
            ],
        },
    }


def words_of(*parts: Any) -> list[list[str]]:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    return [line.replace("\u202f", " ").replace("│", " ").split() for line in console.export_text().splitlines()]


def test_a_cluster_shows_its_roles_and_its_traffic(cluster_status: dict[str, Any]) -> None:
    shown = words_of(*status_tables(cluster_status))
    for line in (
        "Ray 2.60.0 at 10.0.0.1:6379: 3 hosts (2 marked overlord_trainer), 256 CPUs, 600 GB object store, 16 GPU",
        "planner gpu-0 11 1",
        "constructor host 1 gpu-1 13 1 ranks 8-15",
        "loader host 0 cpu-0 14 2 3 sources",
        "planner, per step: a plan of 1.50 kB, 2.00 kB of metadata",
    ):
        assert line.split() in shown


def test_roles_and_faults_are_shown(ids_job: ol.Job, cache: str) -> None:
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        status = service.status()
    role = {"pid": 7, "generation": 2, "restarts": 1, "up": False}
    fault = {"role": "planner", "why": "ended (gone)", "generation": 2, "promoted": 0, "at": 0.0}
    status |= {
        "hosts": [{"role": "planner", **role}, {"role": "loader host 0", **role, "pid": 8, "up": True}],
        "faults": [fault | {"role": f"loader host {n}", "took_s": 0.25} for n in range(20)] + [fault],
        "failed": "the planner ended, and so did its successors",
    }
    shown = [" ".join(words) for words in words_of(*status_tables(status))]
    assert "planner 7 no 2 1" in shown and "loader host 0 8 yes 2 1" in shown
    assert any("the loader host 19 ended (gone); back after 0.25 s" in line for line in shown)
    assert any("the planner ended (gone); being replaced" in line for line in shown)
    assert not any("loader host 3 ended" in line for line in shown), "only the newest are shown"
    assert "the planner ended, and so did its successors" in shown


def test_before_the_first_plan_there_is_no_traffic(cluster_status: dict[str, Any]) -> None:
    planner = cluster_status["planner"]
    planner |= {"next_step": planner["first_step"], "traffic": dict.fromkeys(planner["traffic"], 0)}
    shown = [" ".join(words) for words in words_of(*status_tables(cluster_status))]
    assert "planner, per step: no plan sent so far, 0 B of metadata" in shown


def test_trainers_of_a_cluster_are_told_where_to_attach(cluster_status: dict[str, Any]) -> None:
    options = Launch(mesh=ol.ClientPlaceTree(dp=16))
    told = [" ".join(words) for words in words_of(*announcement("job.yaml", options, "unix:///x", cluster_status))]
    assert "ranks 0-7 on gpu-0, 8-15 on gpu-1" in told
    assert any("on the host of its rank" in line for line in told)
    assert 'client = ol.connect("unix:///x", rank=RANK)' in told


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_serves_until_sigterm(serve: Serve, ray_address: str, tmp_path: Path) -> None:
    where = ("--runtime", "ray", "--address", ray_address, "--ranks-per-host", 1, "--loader-hosts", "per_source")
    process, told = serve(*where, "--address-file", tmp_path / "address")
    assert [one["ranks"] for one in told["hosts"]] == ["0-0", "1-1"]
    with ol.connect(told["address"], rank=0) as first, ol.connect(told["address"], rank=1) as second:
        assert next(first).index == next(second).index == 0
        found = json.loads(CliRunner().invoke(app, ["status", str(tmp_path / "address"), "--json"]).stdout)
        shown = CliRunner().invoke(app, ["status", told["address"]]).stdout
    roles = found["ray"]["placement"]
    assert [one["role"].split()[0] for one in roles] == ["planner", *["constructor"] * 2, *["loader"] * 3]
    assert {one["host"] for one in roles} == {socket.gethostname()}
    assert f"Ray {found['ray']['version']} at {ray_address}: 3 hosts" in shown
    for one in roles:
        assert str(one["pid"]) in shown
        assert psutil.pid_exists(one["pid"])
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    _, alive = psutil.wait_procs([psutil.Process(o["pid"]) for o in roles if psutil.pid_exists(o["pid"])], timeout=20)
    assert alive == []
    assert not (tmp_path / "address").exists()
    assert not Path(told["address"].removeprefix("unix://")).exists()


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_on_a_cluster_gives_the_same_stream(job_file: Path, cache: str, ray_address: str) -> None:
    def run(*options: str) -> dict[str, Any]:
        arguments = ["run", str(job_file), "--steps", "3", "--cache", cache, "--json", "--runtime", *options]
        outcome = CliRunner().invoke(app, arguments)
        assert outcome.exit_code == 0, outcome.stderr
        return json.loads(outcome.stdout)

    inline, ray = run("inline"), run("ray", "--address", ray_address)
    assert ray["digests"] == inline["digests"]
    assert ray["runtime"] == "ray"
    assert ray["notes"] == inline["notes"]
    assert ray["peak_memory_bytes"] > inline["peak_memory_bytes"] + (100 << 20)  # three actors and their service
