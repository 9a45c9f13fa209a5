"""What `make bench` runs is there once, and is what the report shows."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from benchmarks.__main__ import BENCHMARKS, HERE, write_report

NAMES = [one.name for one in BENCHMARKS]
REPORT = (HERE / "REPORT.md").read_text(encoding="utf-8")


def test_every_benchmark_is_there_once():
    assert len(set(NAMES)) == len(NAMES)
    assert all(importlib.util.find_spec(f"benchmarks.{name}") for name in NAMES)


def test_the_report_shows_each_of_them_with_its_plots():
    assert sorted(re.findall(r"^## (\w+)$", REPORT, re.M)) == sorted(NAMES)
    shown = set(re.findall(r"\]\((plots/[^)]+)\)", REPORT))
    assert shown and all((HERE / path).is_file() for path in shown)


def test_the_report_shows_what_is_measured_today():
    for one in BENCHMARKS:
        assert f"Measured: {one.what}." in REPORT and f"Against: {one.against}." in REPORT, one.name


def test_figures_of_another_machine_are_entered_with_its_name(tmp_path: Path):
    speeds = {
        f"{name}_{kind}": 2.0
        for name in ("vanilla", "backbone_balance", "hdp")
        for kind in ("step_ms", "mean_ms", "lockstep_ms")
    }
    machine = {"cpus": 96, "machine": "x86_64", "memory_gb": 1000.0, "system": "Linux", "python": "3.12.3"}
    told = {
        "benchmark": "replay",
        "machine": machine,
        "device": "a GPU",
        **speeds,
        "hdp_step_over_mean": 1.02,
        "bar": 1.05,
    }
    (tmp_path / "replay.json").write_text("some log\n" + json.dumps(told) + "\n")
    command = [sys.executable, "-m", "benchmarks", "--out", str(tmp_path), "--enter"]
    subprocess.run([*command, str(tmp_path / "replay.json")], cwd=HERE.parent, check=True)
    report = (tmp_path / "REPORT.md").read_text(encoding="utf-8")
    assert "| [replay](#replay) | 1.02× | at most 1.05× | reached |" in report
    assert "96 cores (x86_64), 1000.0 GB, a GPU" in report and "| [feed](#feed) | – | – | not run |" in report
    (tmp_path / "other.json").write_text('{"benchmark": "nonsense"}')
    refused = subprocess.run([*command, str(tmp_path / "other.json")], cwd=HERE.parent, capture_output=True, text=True)
    assert refused.returncode == 2 and "other.json" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_verdict_is_that_of_all_bars():
    formats = next(one for one in BENCHMARKS if one.name == "formats")
    figures = {"ratio": 0.9, "bar": 0.8, "first_batch_s": 2.0, "bar_s": 3.0, "further_mb": 9.0, "bar_mb": 100.0}
    assert formats.passed(figures) and not formats.passed(figures | {"ratio": 0.7})
    assert [one.figure for one in formats.missed(figures | {"first_batch_s": 12.0})] == ["first_batch_s"]


def test_the_verdicts_of_the_report_are_those_of_its_figures(tmp_path: Path):
    """Every figure whose name is that of a bar is judged, and the report is what its own figures give."""
    for one in BENCHMARKS:
        section = REPORT.split(f"\n## {one.name}\n")[1].split("\n## ")[0]
        bars = set(re.findall(r"^\| (\w*bar(?:_\w+)?) \|", section, re.M)) - {"worst_share_of_what_the_bars_allow"}
        judged = {one.bar, *(more.bar for more in one.also)}
        assert one.name == "balance" or bars <= judged, "its share of what the bars allow is judged"
    shutil.copytree(HERE / "plots", tmp_path / "plots")
    (tmp_path / "REPORT.md").write_text(REPORT, encoding="utf-8")
    write_report(tmp_path, {}, quick=False, whole=False)
    assert (tmp_path / "REPORT.md").read_text(encoding="utf-8") == REPORT


@pytest.mark.slow
def test_open_pages_are_measured():
    """A short run: the figure itself needs a quiet machine."""
    command = [sys.executable, "-m", "benchmarks.pages", "--pages", "5", "--rounds", "1", "--seconds", "3", "--json"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    assert told["ratio"] > 0 and min(told["steps"]) >= 2 and told["pages_kb_per_s"] > 0


@pytest.mark.slow
def test_the_loop_with_the_fastest_decoder_is_compared_by_pictures_a_second(tmp_path: Path):
    """A short run over small pictures: both sides do far more than a few of them, and less than any machine can."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    (tmp_path / "0.jpg").write_bytes(simplejpeg.encode_jpeg(noise, quality=90))
    command = [sys.executable, "-m", "benchmarks.fastest", "--pictures", tmp_path, "--rounds", "1", "--seconds", "1"]
    printed = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout
    told = json.loads(printed.splitlines()[-1])
    assert all(
        told[f"{name}_rounds"] == [told[f"{name}_samples_per_s"]] for name in ("overlord", "jpeg_scaling", "loop")
    )
    assert told["ratio"] == pytest.approx(told["overlord_samples_per_s"] / told["loop_samples_per_s"], rel=0.01)


@pytest.mark.slow
def test_pictures_as_people_have_them_are_compared_by_work():
    """A short run over few pictures; a peer that is not installed is a row that says so."""
    command = [sys.executable, "-m", "benchmarks.pictures", "--distinct", "2", "--rounds", "1", "--seconds", "1"]
    printed = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout
    told = json.loads(printed.splitlines()[-1])
    for side in ("pillow", "overlord"):
        assert told[f"{side}_rounds"] == [told[f"{side}_work_per_s"]] and told[f"{side}_pictures_per_s"] > 1
    assert told["ratio_to_pillow"] == pytest.approx(told["overlord_work_per_s"] / told["pillow_work_per_s"])
    for peer in ("spdl", "grain"):
        assert told.get(peer, "not measured").startswith("not measured") != (f"ratio_to_{peer}" in told)
