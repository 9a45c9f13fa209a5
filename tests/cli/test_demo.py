"""The demo from data to report, scaled down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overlord.cli.main import app
from overlord.core.place_tree import ClientPlaceTree
from overlord.job_files import LaunchOptions, load_job_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: str) -> Path:
    folder = tmp_path_factory.mktemp("work") / "overlord-demo"
    options = ["--folder", str(folder), "--steps", "3", "--scale", "0.02", "--cache", cache]
    outcome = CliRunner().invoke(app, ["demo", *options])
    assert outcome.exit_code == 0, outcome.stderr
    assert f"overlord run {folder}/job.yaml" in outcome.stdout
    for words in ("planned", "realised", "tokens per step", "padding", "round-robin", "samples per second", "memory"):
        assert words in outcome.stdout
    return folder


def test_it_leaves_a_report_and_numbers(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["mesh"], summary["runtime"]) == (3, "pp=1 dp=2 cp=2 tp=2", "local")
    assert len(summary["sources"]) == 8
    assert all(source["samples"] > 0 for source in summary["sources"])
    assert (folder / "report.html").read_text().count("<figure") == 6


def test_its_job_file_can_be_moved(folder: Path) -> None:
    loaded = load_job_file(folder / "job.yaml")
    assert loaded.launch == LaunchOptions(mesh=ClientPlaceTree(dp=2, cp=2, tp=2), steps=3)
    assert str(folder.parent) not in (folder / "job.yaml").read_text()


def test_an_edited_job_file_is_kept(folder: Path, cache: str) -> None:
    job = folder / "job.yaml"
    before = job.read_text()
    job.write_text(before.replace("seed: 0", "seed: 1"))
    options = ["--folder", str(folder), "--steps", "3", "--scale", "0.02", "--cache", cache, "--runtime", "inline"]
    outcome = CliRunner().invoke(app, ["demo", *options, "--json"])
    assert outcome.exit_code == 0
    assert json.loads(outcome.stdout)["job"] == str(job)
    assert "your version is now" in outcome.stderr
    assert "seed: 1" in (folder / "job.yaml.old").read_text()
    assert job.read_text() == before


def test_the_media_demo_counts_its_corrupt_clips(tmp_path: Path, cache: str) -> None:
    options = ["--folder", str(tmp_path), "--steps", "12", "--scale", "0.1", "--cache", cache, "--media", "--json"]
    outcome = CliRunner().invoke(app, ["demo", *options])
    assert outcome.exit_code == 0, outcome.stderr
    result = json.loads(outcome.stdout)
    bad = {source["name"]: source["bad"] for source in result["sources"]}
    assert bad["notes"] == 0 and bad["clips"] + bad["sounds"] > 0
    assert {one["name"]: one["decoded_in"] for one in result["media"]}["clips"] == "constructor"
