"""`overlord profile`: the table, the file beside the job, the page, what is refused, and exit codes."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.job_files import LaunchOptions, dump_job_yaml
from overlord.reports.profile_page import MOST_ROWS, profile_tables, render_profile
from overlord.runtimes.autoscaling.profiling import read_profile
from overlord.scaling.profiles import Profile, SourceProfile, Spread


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)


def write_rows(path: Path, lengths: list[int]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"ids": [7] * n}) + "\n" for n in lengths))
    return str(path)


def written(folder: Path, **paths: str) -> Path:
    sources = [ol.Source(name, path, sample=ol.Text("ids", tokenized=True)) for name, path in paths.items()]
    path = folder / "job.yaml"
    path.write_text(dump_job_yaml(ol.Job(sources, batch=ol.Batch(64, global_samples=4)), LaunchOptions()))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    short, long = write_rows(tmp_path / "short.jsonl", [3] * 90), write_rows(tmp_path / "long.jsonl", [60] * 90)
    return written(tmp_path, short=short, long=long)


def test_the_profile_lies_beside_the_job(job: Path) -> None:
    outcome = call("profile", job, "--samples", 70)
    assert outcome.exit_code == 0, outcome.stderr
    assert "2 sources of" in outcome.stdout and "P mean" in outcome.stdout and "the cheapest of 2" in outcome.stdout
    path = job.with_name("job.profile.json")
    assert str(path) in outcome.stdout.replace("\n", "")
    found = read_profile(path)
    assert found is not None
    assert {one.name: one.samples for one in found.sources} == {"short": 70, "long": 70}
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", found.sources[0].entries[0].when)


def test_json_holds_everything_the_most_expensive_first(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "p.json"
    outcome = call("profile", job, "--output", out, "--html", tmp_path / "p.html", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    told = json.loads(outcome.stdout)
    assert told["profile"] == str(out) and out.exists() and not job.with_name("job.profile.json").exists()
    assert told["failed"] == {}
    means = [one["transform"]["mean"] for one in told["sources"]]
    assert means == sorted(means, reverse=True)
    tokens = {one["name"]: one["tokens"] for one in told["sources"]}
    assert tokens == {"short": 3, "long": 60}
    HTMLParser().feed((tmp_path / "p.html").read_text())
    assert "<svg" in (tmp_path / "p.html").read_text()


def test_one_source_is_measured_anew_and_the_others_stay(job: Path) -> None:
    path = job.with_name("job.profile.json")
    assert call("profile", job, "--samples", 40).exit_code == 0
    before = read_profile(path)
    assert call("profile", job, "--source", "long", "--samples", 80).exit_code == 0
    after = read_profile(path)
    assert before is not None and after is not None
    old, new = ({one.name: one for one in profile.sources} for profile in (before, after))
    assert new["short"] == old["short"]
    assert new["long"].samples == 80
    assert [entry.samples for entry in new["long"].entries] == [40, 80]


def test_what_is_asked_wrongly_is_refused(job: Path) -> None:
    for arguments, words in (
        (["--source", "shrt"], "Did you mean 'short'?"),
        (["--seconds", "0"], "--seconds is 0"),
        (["--cpus", "4"], "--plan is not given"),
        (["--plan", "--memory", "lots"], "--memory is 'lots'"),
        (["--plan", "--cpus", "-1"], "--cpus is -1"),
        (["--output", job.parent], "it is a folder"),
    ):
        outcome = call("profile", job, *arguments)
        assert outcome.exit_code == 2
        assert words in outcome.stderr
    assert not job.with_name("job.profile.json").exists()


def test_a_plan_by_a_profile_of_other_files_is_refused(job: Path) -> None:
    assert call("profile", job).exit_code == 0
    write_rows(job.parent / "long.jsonl", [60] * 91)
    outcome = call("profile", job, "--plan")
    assert outcome.exit_code == 2
    assert "source 'long' is not what was profiled: its files changed" in outcome.stderr
    assert "Run `overlord profile` again" in outcome.stderr


def test_a_plan_is_shown_by_the_profile_that_is_there(job: Path) -> None:
    first = call("profile", job, "--plan", "--cpus", 8, "--memory", "16GiB")  # there is none: it is measured first
    assert first.exit_code == 0, first.stderr
    path = job.with_name("job.profile.json")
    before = path.read_bytes()
    again = call("profile", job, "--plan", "--cpus", 8, "--memory", "16GiB", "--json")
    assert again.exit_code == 0, again.stderr
    assert "is used as it is" in again.stderr and path.read_bytes() == before
    assert {"short", "long"} <= set(re.findall(r"\w+", json.dumps(json.loads(again.stdout)["plan"])))
    scarce = call("profile", job, "--plan", "--cpus", 8, "--memory", "1MB")
    assert scarce.exit_code == 2


WAITING = """
import time
import overlord as ol

def asks(row):
    time.sleep(0.02)
    return {"tokens": row["ids"]}

def computes(row):
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    return {"tokens": row["ids"]}

def source(function, name):
    sample = ol.Custom(function, columns=["ids"], process=False)
    return ol.Source(name, PATH, sample=sample)

job = ol.Job([source(asks, "remote"), source(computes, "local")], batch=ol.Batch(64, global_samples=4))
"""


def test_a_source_that_waits_takes_workers_and_few_cpus(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [5] * 80)
    job = tmp_path / "job.py"
    job.write_text(WAITING.replace("PATH", repr(rows)))
    asked = ("profile", job, "--plan", "--cpus", 4, "--memory", "16GiB")
    told = json.loads(call(*asked, "--samples", 30, "--json").stdout)
    assert {one["name"]: one["cpu_share"] < 0.5 for one in told["sources"]} == {"remote": True, "local": False}
    assert any("Workers of 1 source mostly wait: those of remote need a CPU" in words for words in told["headlines"])
    remote, local = told["plan"]["allotments"]
    # A budget bounds workers, whatever they wait for: what a launch starts is what is shown here.
    assert remote["workers"] + local["workers"] <= 4 and remote["workers"] > local["workers"]
    assert remote["cpus"] < 1 and told["plan"]["cpus"] <= 4
    assert "of the time with a CPU" in remote["why"] and "of the time with a CPU" not in local["why"]
    more = json.loads(call("profile", job, "--plan", "--cpus", 12, "--json").stdout)["plan"]
    assert more["samples_per_s"] > 1.5 * told["plan"]["samples_per_s"]
    text = " ".join(call(*asked).stdout.split())
    assert "does not fit the 4 workers of all sources" in text


def test_a_damaged_profile_is_named(job: Path) -> None:
    path = job.with_name("job.profile.json")
    path.write_text("{}")
    for arguments in (["--plan"], ["--source", "long"]):
        outcome = call("profile", job, *arguments, "--json")
        assert outcome.exit_code == 2
        assert "job.profile.json is damaged" in json.loads(outcome.stdout)["error"]["message"]
    outcome = call("profile", job)  # what the message advises
    assert outcome.exit_code == 0 and "is replaced" in outcome.stderr
    assert read_profile(path) is not None


def test_a_missing_source_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "a.jsonl", [3] * 30)
    job = written(tmp_path, good=good, gone=str(tmp_path / "gone.jsonl"))
    outcome = call("profile", job, "--json")
    assert outcome.exit_code == 2
    assert "source 'gone'" in outcome.stderr
    told = json.loads(outcome.stdout)
    assert list(told["failed"]) == ["gone"] and [one["name"] for one in told["sources"]] == ["good"]
    found = read_profile(tmp_path / "job.profile.json")
    assert found is not None and found.names == ["good"]


def test_nothing_measured_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    job = written(tmp_path, one=str(tmp_path / "one.jsonl"), two=str(tmp_path / "two.jsonl"))
    outcome = call("profile", job)
    assert outcome.exit_code == 2
    assert "nothing could be measured" in outcome.stderr and "1 other" in outcome.stderr
    assert not (tmp_path / "job.profile.json").exists()


def many(count: int) -> Profile:
    def one(number: int) -> SourceProfile:
        mean = 1e-5 * 1000 ** (number / count)
        return SourceProfile(
            name=f"a_source_with_a_long_name_{number:03}", digest="a:b:c", samples=200,
            transform=Spread.of([mean / 2, mean, 1.5 * mean]), read_s=mean / 2, measure_s=mean / 4, finish_s=mean / 4,
            handover_s=1e-6, file_bytes=20_000, buffer_bytes=4 << 20, tokens=100.0, read_bytes=123_456.0,
            kept_bytes=1e5, delivered_bytes=234_567.0,
        )  # fmt: skip

    return Profile(tuple(one(number) for number in range(count)))


def test_hundreds_of_sources_fit_a_terminal_of_100_columns() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(*profile_tables("job.yaml", many(306)), sep="\n")
    lines = console.export_text().splitlines()
    assert max(len(line) for line in lines) <= 100
    rows = [line for line in lines if "name_" in line and "×" in line and "→" in line]
    assert len(rows) == MOST_ROWS == 40
    assert "_305 " in rows[0] and "_266 " in rows[-1]
    assert "…" not in "".join(row[20:] for row in rows)  # no figure is cut
    text = " ".join(" ".join(lines).split())
    assert "These are the 40 most expensive sources. 266 cheaper sources: P from" in text


def test_a_page_has_all_sources_and_escapes_their_names() -> None:
    (first, *rest) = many(50).sources
    evil = SourceProfile(**{name: getattr(first, name) for name in first.__dataclass_fields__} | {"name": "<b>&"})
    text = render_profile("job.yaml", Profile((evil, *rest)), {"gone": "source 'gone' <is gone>"})
    assert "<b>&" not in text.replace("<b>&amp;", "") and "&lt;b&gt;&amp;" in text
    assert text.count('<tr><th scope="row">') == 50
    assert "&lt;is gone&gt;" in text
