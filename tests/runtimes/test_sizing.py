"""The workers that a launch begins with: a budget bounds them, whatever they wait for."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.runtimes.autoscaling.profiling import write_profile
from overlord.runtimes.autoscaling.scaler import sizing_of
from overlord.scaling.profiles import Profile, SourceProfile, Spread


def measured(name: str, transform_s: float, cpu_share: float) -> SourceProfile:
    return SourceProfile(
        name=name, digest="a:b:c", samples=200, transform=Spread.of([transform_s]), read_s=transform_s, measure_s=0.0,
        finish_s=0.0, cpu_share=cpu_share, handover_s=0.0, file_bytes=0, buffer_bytes=0, tokens=1.0, read_bytes=1.0,
        kept_bytes=1.0, delivered_bytes=1.0,
    )  # fmt: skip


def sized(profile: Profile, cpus: int, scaling: bool) -> dict[str, int]:
    sources = [ol.Source(name, f"{name}.jsonl", sample=ol.Text("ids", tokenized=True)) for name in profile.names]
    job = ol.Job(sources, batch=ol.Batch(64, global_samples=4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.profile.json"
        write_profile(path, profile)
        return dict(sizing_of(job, "auto", scaling, ol.Budget(cpus=cpus), str(path))["workers"])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 0.1), st.floats(0.0, 1.0)), min_size=1, max_size=6),
    st.integers(6, 64),
    st.booleans(),
)
def test_sources_that_wait_do_not_get_more_workers_than_the_budget_has(
    drawn: list[tuple[float, float]], cpus: int, scaling: bool
) -> None:
    waiting = Profile(tuple(measured(f"s{n}", *one) for n, one in enumerate(drawn)))
    computing = Profile(tuple(measured(f"s{n}", seconds, 1.0) for n, (seconds, _) in enumerate(drawn)))
    found = sized(waiting, cpus, scaling)
    # Tiny sources take turns: each may have a worker beside those that are paid in full.
    assert sum(workers for workers in found.values() if workers > 1) <= cpus
    assert found == sized(computing, cpus, scaling)
