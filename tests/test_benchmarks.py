"""What `make bench` runs is there once, and is what the report shows."""

from __future__ import annotations

import importlib.util
import re

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
