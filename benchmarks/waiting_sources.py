"""Sources whose samples wait, as remote reads do, or compute: workers or cores bound what they cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import overlord as ol
from overlord.runtimes.autoscaling.profiling import profile_job
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.scaling.profiles import Profile, SourceCost, counted_by_workers


def waiting_source(
    folder: Path, name: str, seconds: float, tokens: int, rows: int, *, computes: bool = False
) -> ol.Source:
    """Write a file of rows, and return the source that waits for each of them.

    Args:
        folder: Where the file goes.
        name: Of the source.
        seconds: What a sample waits for on average; single ones for a fifth less up to a fifth more.
        tokens: Of a sample, on average.
        rows: Of the file.
        computes: Keep a process worker busy for as long, instead of waiting.
    """
    path = folder / f"{name}.jsonl"
    luck = np.random.default_rng(len(name) + 1000 * rows)
    lengths = luck.integers(max(tokens // 2, 1), 3 * tokens // 2 + 1, rows).tolist()
    pauses = (seconds * luck.uniform(0.8, 1.2, rows)).round(6).tolist()
    lines = [json.dumps({"ids": [7] * n, "pause": pause}) for n, pause in zip(lengths, pauses, strict=True)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    kind, function = ("computes", _computing()) if computes else ("waits", _waiting())
    sample = ol.Custom(function, columns=["ids", "pause"], process=computes, name=kind, code_digest=kind)
    return ol.Source(name, str(path), sample=sample, shuffle_bytes=1 << 20)


def _waiting() -> Callable[[dict[str, Any]], dict[str, Any]]:
    def wait(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(row["pause"])
        return {"tokens": row["ids"]}

    return wait


def _computing() -> Callable[[dict[str, Any]], dict[str, Any]]:
    def compute(row: dict[str, Any]) -> dict[str, Any]:
        end = time.thread_time() + row["pause"]
        while time.thread_time() < end:
            sum(row["ids"])
        return {"tokens": row["ids"]}

    return compute


def measured_profile(job: ol.Job, cache: str, samples: int, seconds: float) -> Profile:
    """Return what the sources cost, as `overlord profile` measures it."""
    options = ServiceOptions(mesh=ol.ClientPlaceTree(), cache=cache)
    found = profile_job(job, options, when="2030-01-01T00:00:00+00:00", samples=samples, seconds=seconds)
    if found.failed:
        raise RuntimeError(f"sources were not measured: {dict(found.failed)}")
    return found.profile


def measured_costs(job: ol.Job, cache: str, samples: int, seconds: float) -> list[SourceCost]:
    """Return what the sources cost, as `overlord profile` measures it; workers are what is bounded here."""
    profile = measured_profile(job, cache, samples, seconds)
    return counted_by_workers(profile.cost(name) for name in job.names)


def by_name(costs: Sequence[SourceCost], counts: Sequence[int]) -> dict[str, int]:
    """Return counts of workers as a launch takes them."""
    return {cost.name: count for cost, count in zip(costs, counts, strict=True)}
