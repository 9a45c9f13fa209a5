"""`overlord top` on a real service, at two widths, once and live; and what it says when nothing answers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.cli.output import Screen
from overlord.cli.top import top_view, watch
from overlord.errors import ServiceLost
from overlord.reports.live import Rates, rates_of, sentence_of


@pytest.fixture(scope="module")
def service(ids_job, cache):
    with ol.launch(ids_job, mesh="dp=2", cache=cache) as running:
        yield running


@pytest.fixture(scope="module")
def looked(service) -> tuple[dict[str, Any], dict[str, Any]]:
    """The status of the service before and after ten steps of both ranks."""
    before = service.status()
    with service.client(0) as first, service.client(1) as second:
        for _ in range(10):
            step, _ = next(first), next(second)
            first.report(step.index, {"loss": 2.5, **{f"loss/{name}": 2.0 for name in "abcdefg"}})
        return before, service.status()


def drawn(status: dict[str, Any], rates: Rates, width: int, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(top_view(status, rates, width=width, height=height))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 200])
def test_a_look_fits_its_terminal(looked, width):
    rates = rates_of(*looked, 5.0)
    assert 1.4 <= rates.steps_per_s <= 2.8  # ten, and what the planner was and is ahead
    text = drawn(looked[1], rates, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "2 ranks at step" in text and "reported at step 9: loss 2.5, loss/a 2" in text and "2 more" in text
    assert ("workers" in text) == (width == 200)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│")] == ["a", "b", "c"]
    assert "service waited: for the source, while it prepared steps ahead of the trainers" in text
    crowded = {**looked[1], "sources": {f"s{n:03d}": looked[1]["sources"]["a"] for n in range(306)}}
    short = drawn(crowded, rates, width, height=24)
    assert len(short.splitlines()) <= 26 and "297 more sources" in short


def test_it_says_what_is_waited_for(looked):
    status = looked[1]
    busy, idle = Rates(1.0, 2.0, 100.0, 0.4), Rates(1.0, 2.0, 100.0, 0.0)
    slow = {**status, "scaling": {"bottleneck": "source 'a' is the bottleneck: it has 1 worker and needs 3"}}
    calm = {**status, "scaling": {"bottleneck": None}}
    assert sentence_of(slow, busy)[0].startswith("trainers wait 40")
    assert "source 'a' is the bottleneck" in sentence_of(slow, busy)[0]
    assert "no source alone" in sentence_of(calm, busy)[0]
    assert sentence_of(calm, idle)[0].startswith("training is not waiting for data")
    assert sentence_of({**calm, "clients": {}}, idle)[0] == "no trainer is attached"
    assert "store fails: full" in sentence_of({**calm, "store": {"error": "full"}}, idle)[0]
    late = {**calm, "planner": {**status["planner"], "waits_for_report": 7}}
    assert "waits for the report of step 7" in sentence_of(late, idle)[0]
    fault = {"role": "planner host", "why": "hangs", "at": 0.0, "took_s": 0.5}
    host = {"role": "planner host", "host": "here", "pid": 1, "up": True, "generation": 2, "restarts": 1}
    text = drawn({**calm, "faults": [fault], "hosts": [host]}, idle, 100)
    assert "the planner host hangs; back after 0.50 s" in text and "0 of 1 role up since the launch" in text


def test_once_and_json_for_scripts(service, looked):
    outcome = CliRunner().invoke(app, ["top", service.address, "--interval", "0.2", "--json"])
    assert outcome.exit_code == 0, outcome.stderr
    told = json.loads(outcome.stdout)
    assert told["status"]["reports"]["loss"]["value"] == 2.5 and set(told["rates"]["rows_per_s"]) == {"a", "b", "c"}
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
