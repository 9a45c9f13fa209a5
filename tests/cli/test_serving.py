"""`overlord serve` and `status` as a user meets them: other processes, signals, a service that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.job_files import LaunchOptions, dump_job_yaml
from overlord.cli.main import app
from overlord.cli.serving import _on_sigterm, status_tables

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
    process, told = serve("--address-file", tmp_path / "address")
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
    assert not Path(told["address"].removeprefix("unix://")).parent.exists()


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
    """Also one that comes while somebody begins to wait for it."""
    with _on_sigterm() as stopped_within:
        assert not stopped_within(0.0)
    for microseconds in range(0, 400, 2):
        timer = threading.Timer(microseconds / 1e6, os.kill, (os.getpid(), signal.SIGTERM))
        with _on_sigterm() as stopped_within:
            timer.start()
            assert stopped_within(20.0)
            timer.join()


def test_a_service_that_dies_is_told(serve: Serve) -> None:
    process, told = serve()
    os.kill(told["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert "is gone; attached trainers get no more data" in err.splitlines()[-1]


def test_a_service_without_clients_shows_its_sources_only(ids_job: ol.Job, cache: str) -> None:
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        assert len(status_tables(service.status())) == 1
