"""What `make bench` runs is there once, and is what the report shows."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from benchmarks.__main__ import BENCHMARKS, HERE

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


@pytest.mark.slow
def test_open_pages_are_measured():
    """A short run: the figure itself needs a quiet machine."""
    command = [sys.executable, "-m", "benchmarks.pages", "--pages", "5", "--rounds", "1", "--seconds", "3", "--json"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    assert told["ratio"] > 0 and min(told["steps"]) >= 2 and told["pages_kb_per_s"] > 0
