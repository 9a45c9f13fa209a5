"""What every benchmark shares: the machine described, figures printed, the last line as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable

import psutil


def machine() -> dict[str, object]:
    """Describe where the figures were measured."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def median_of(rounds: int, measure: Callable[[], float]) -> float:
    """Return the median of several rounds."""
    return statistics.median(measure() for _ in range(rounds))


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object on the last line")
    return parser


def publish(name: str, figures: dict[str, object], as_json: bool) -> None:
    """Print the figures, for people or for programs."""
    if as_json:
        print(json.dumps({"benchmark": name, "machine": machine(), **figures}))
        return
    print(f"\n{name}")
    for key, value in figures.items():
        print(f"  {key:<44} {_short(value)}")


def _short(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_short(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
