"""`overlord top` on a real service, at two widths, once and live; and what it says when nothing answers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from tests.conftest import write_ids
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.cli.output import Screen
from overlord.cli.serving import status_tables
from overlord.cli.top import top_view, watch
from overlord.dashboard.watching import Watch
from overlord.errors import ServiceLost


@pytest.fixture(scope="module")
def service(ids_job, cache):
    with ol.launch(ids_job, mesh="dp=2", cache=cache) as running:
        yield running


@pytest.fixture(scope="module")
def looked(service) -> dict[str, Any]:
    """The status of the service after ten steps of both ranks, with rates of some of them."""
    with service.client(0) as first, service.client(1) as second:
        for _ in range(10):
            step, _ = next(first), next(second)
            first.report(step.index, {"loss": 2.5, **{f"loss/{name}": 2.0 for name in "abcdefg"}})
        until = time.monotonic() + 60.0
        while not (status := service.status())["rates"] and time.monotonic() < until:
            time.sleep(0.1)
        return status


def drawn(status: dict[str, Any], width: int, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(top_view(status, width=width, height=height))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 200])
def test_a_look_fits_its_terminal(looked, width):
    text = drawn(looked, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "2 ranks at step" in text and "reported at step 9: loss 2.5, loss/a 2" in text and "2 more" in text
    assert ("workers" in text) == (width == 200)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│")] == ["a", "b", "c"]
    assert "service waited: for the source, while it prepared steps ahead of the trainers" in text
    assert f"{looked['rates']['steps_per_s']:.3g} steps/s" in text
    crowded = {**looked, "sources": {f"s{n:03d}": looked["sources"]["a"] for n in range(306)}}
    short = drawn(crowded, width, height=24)
    assert len(short.splitlines()) <= 26 and "297 more sources" in short


def test_it_shows_faults_and_roles(looked):
    fault = {"role": "planner host", "why": "hangs", "at": 0.0, "took_s": 0.5}
    host = {"role": "planner host", "host": "here", "pid": 1, "up": True, "generation": 2, "restarts": 1}
    text = drawn({**looked, "faults": [fault], "hosts": [host]}, 100)
    assert "the planner host hangs; back after 0.50 s" in text and "0 of 1 role up since the launch" in text


def test_a_service_that_has_just_begun_has_no_rates(looked):
    assert "– steps/s" in drawn({**looked, "rates": None}, 100)


@contextlib.contextmanager
def waiting_for_a_source(tmp_path, cache) -> Iterator[ol.Service]:
    """A service whose trainer waits for a row that does not come, so that not even a plan can be made."""

    def one_row_never_ends(row, come=str(tmp_path / "come")):
        while row["ids"][0] == 1100 and not os.path.exists(come):
            time.sleep(0.02)
        return {"tokens": row["ids"]}

    rows = write_ids(tmp_path / "rows.jsonl", [8] * 400)
    sample = ol.Custom(one_row_never_ends, columns=["ids"], process=False, name="slow", code_digest="slow")
    source = ol.Source("slow", str(rows), sample=sample, shuffle_bytes=0)
    job = ol.Job(sources=[source], batch=ol.Batch(64, global_samples=16), seed=1)
    with ol.launch(job, cache=cache) as running:
        trainer = threading.Thread(target=lambda: all(True for _ in zip(running.client(0), range(20), strict=False)))
        trainer.start()
        try:
            yield running
        finally:
            (tmp_path / "come").touch()
            trainer.join()


@pytest.mark.slow
def test_top_page_and_status_tell_of_the_same_wait(tmp_path, cache):
    with waiting_for_a_source(tmp_path, cache) as service:
        page = Watch(service.address)

        def said() -> list[str]:
            """What the three say, without the figures, which grow while they are asked for."""
            page.look()
            told = json.loads(CliRunner().invoke(app, ["top", service.address, "--json"]).stdout)["sentence"]
            listed = CliRunner().invoke(app, ["status", service.address]).stdout.splitlines()[0]
            shown = json.loads(page.newest).get("sentence", "").rstrip(".")
            return [re.sub(r"[\d.]+", "N", one[:1].lower() + one[1:]) for one in (told, listed, shown)]

        until = time.monotonic() + 90.0
        while not all("trainers have waited" in one for one in said()) and time.monotonic() < until:
            time.sleep(0.5)
        top, listed, shown = said()
        assert top == listed == shown and top.startswith("trainers have waited N s for their next step")


def test_once_and_json_for_scripts(service, looked):
    outcome = CliRunner().invoke(app, ["top", service.address, "--interval", "0.2", "--json"])
    assert outcome.exit_code == 0, outcome.stderr
    told = json.loads(outcome.stdout)
    assert told["status"]["reports"]["loss"]["value"] == 2.5 and set(told["rates"]["sources"]) == {"a", "b", "c"}
    shown = CliRunner().invoke(app, ["top", service.address, "--interval", "0.2", "--once"])
    assert shown.exit_code == 0 and "steps/s" in shown.stdout
    columns = [_columns(CliRunner().invoke(app, [name, service.address]).stdout) for name in ("status", "top")]
    assert [one for one in columns[0] if one in columns[1]] == [one for one in columns[1] if one in columns[0]]
    gone = CliRunner().invoke(app, ["top", "unix:///nowhere/at/all"])
    assert gone.exit_code == 2 and "/nowhere/at/all" in gone.stderr


def _columns(shown: str) -> list[str]:
    return [word.strip() for word in next(line for line in shown.splitlines() if "planned" in line)[1:-1].split("┃")]


def test_a_service_lists_its_sources_in_the_order_of_the_job(ids_job, cache):
    job = ids_job.replace(sources=[ids_job.sources[at] for at in (2, 0, 1)])
    with ol.launch(job, runtime="inline", cache=cache) as service:
        assert list(service.status()["sources"]) == list(job.names) == ["c", "a", "b"]


@pytest.mark.parametrize("command", ["top", "dashboard", "trace", "status"])
def test_a_job_file_is_not_an_address(command, tmp_path):
    (tmp_path / "job.yaml").write_text("sources: []\nseed: 0\n" * 50)
    (tmp_path / "notes.txt").write_text("nothing")
    outcome = CliRunner().invoke(app, [command, str(tmp_path / "job.yaml")])
    told = " ".join(outcome.stderr.split())
    assert outcome.exit_code == 2 and f"{tmp_path}/job.yaml is a job file, not an address" in told
    assert f"overlord serve {tmp_path}/job.yaml --address-file F" in told and "seed" not in told
    outcome = CliRunner().invoke(app, [command, str(tmp_path / "notes.txt")])
    assert outcome.exit_code == 2 and "holds no address" in outcome.stderr and "nothing" not in outcome.stderr


def test_live_until_ctrl_c_or_until_the_service_is_gone(service):
    def screen() -> Screen:
        found = Screen()
        found.out = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
        return found

    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    live = screen()
    watch(str(service.address), live, interval_s=0.5, once=False, sleep=sleep)
    assert looks == [0.5] * 3 and live.out.file.getvalue().count("steps/s") == 3  # type: ignore[attr-defined]
    with pytest.raises(ServiceLost, match="does not answer any more"):
        watch(str(service.address), screen(), interval_s=0.5, once=False, sleep=lambda _: service.close())


def test_repeated_sources_say_what_that_is_worth(looked):
    assert all(source["epochs"] == source["effective_epochs"] == 0 for source in looked["sources"].values())
    sources = {**looked["sources"], "b": {**looked["sources"]["b"], "epochs": 11.3, "effective_epochs": 8.51}}
    for width in (80, 200):
        text = drawn({**looked, "sources": sources}, width)
        assert "b: 11.3 epochs, worth 8.5" in text and all(len(line) <= width for line in text.splitlines())
    console = Console(file=io.StringIO(), width=200)
    console.print(*status_tables({**looked, "sources": sources}))
    assert "11.3, worth 8.5" in console.file.getvalue()  # type: ignore[attr-defined]
