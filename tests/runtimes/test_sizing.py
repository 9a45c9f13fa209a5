"""The workers and actors that a launch begins with: what the plan says, within the budget, or a refusal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.launch_spec import LaunchOptions
from overlord.runtimes.autoscaling.profiling import write_profile
from overlord.runtimes.autoscaling.sizing import plan_loaders, sizing_of
from overlord.scaling.profiles import Profile, SourceProfile, Spread


def measured(name: str, transform_s: float, cpu_share: float) -> SourceProfile:
    return SourceProfile(
        name=name, digest="a:b:c", samples=200, transform=Spread.of([transform_s]), read_s=transform_s, measure_s=0.0,
        finish_s=0.0, cpu_share=cpu_share, handover_s=0.0, file_bytes=0, buffer_bytes=0, tokens=1.0, read_bytes=1.0,
        kept_bytes=1.0, delivered_bytes=1.0,
    )  # fmt: skip


def job_of(names) -> ol.Job:
    sources = [ol.Source(name, f"{name}.jsonl", sample=ol.Text("ids", tokenized=True)) for name in names]
    return ol.Job(sources, batch=ol.Batch(64, global_samples=4))


def options_of(profile: Profile, **launch):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.profile.json"
        write_profile(path, profile)
        given = LaunchOptions(loaders_per_source="auto", profile=str(path), **launch)
        return sizing_of(job_of(profile.names), given)


def sized(profile: Profile, cpus: int, scaling: bool) -> dict[str, int]:
    return dict(options_of(profile, scaling=scaling, budget=ol.Budget(cpus=cpus))["workers"])


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


MS = {"video": 80.0, "photos": 40.0, "chat": 6.0, "web": 0.3, "code": 0.2}


def five() -> Profile:
    return Profile(tuple(measured(name, ms / 1000, 1.0) for name, ms in MS.items()))


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize(
    "budget",
    [
        ol.Budget(cpus=24),
        ol.Budget(cpus=24, workers_per_source=6, workers_per_actor=4),
        ol.Budget(cpus=24, cluster_size=1, memory="2GiB", memory_per_actor="65MiB"),
    ],
    ids=["defaults", "w_src and w_actor", "cluster size and memory"],
)
def test_a_launch_starts_the_actors_that_the_plan_names(runtime, budget):
    launch = LaunchOptions(runtime=runtime, budget=budget)
    planned = plan_loaders(job_of(MS), launch, five())
    found, told = options_of(five(), runtime=runtime, budget=budget), planned.found
    assert found["workers"] == {one.name: one.workers for one in told.allotments}
    assert found["cluster"].actors == told.actors and len(told.actors) > 1
    assert found["cluster"].engine == ("ray" if runtime == "ray" else "local")
    assert max(found["workers"].values()) <= (budget.workers_per_source or 24)
    assert max(actor.workers for actor in told.actors) <= (budget.workers_per_actor or 8)
    assert planned.resources.bytes_per_actor == budget.memory_per_actor
    assert found["workers_per_actor"] == (budget.workers_per_actor or 8)


def test_a_single_actor_of_one_host_is_the_service_itself():
    few = ol.Budget(cpus=2)
    tiny = Profile((measured("web", 0.001, 1.0), measured("code", 0.001, 1.0)))
    many = options_of(tiny, budget=few.replace(workers_per_actor=1))
    assert len(many["cluster"].actors) == 2
    assert options_of(Profile((measured("web", 0.001, 1.0),)), budget=few)["cluster"] is None
    assert len(options_of(Profile((measured("web", 0.001, 1.0),)), runtime="ray", budget=few)["cluster"].actors) == 1


def test_a_source_with_a_shadow_is_held_by_one_actor():
    split = options_of(five(), budget=ol.Budget(cpus=24, workers_per_actor=4))
    whole = options_of(five(), budget=ol.Budget(cpus=24, workers_per_actor=4), shadows=["video"])
    holding = [[a for a in found["cluster"].actors if "video" in a.sources] for found in (split, whole)]
    assert len(holding[0]) > 1 == len(holding[1])
    assert whole["workers"]["video"] <= 4


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"loaders_per_source": 4, "budget": {"cluster_size": 4}}, "budget.cluster_size is 4"),
        ({"loaders_per_source": 4, "budget": {"memory_per_actor": "1GiB"}, "scaling": True}, "budget.memory_per_actor"),
        ({"loaders_per_source": 4, "budget": {"workers_per_source": 4}}, "budget.workers_per_source is 4"),
        ({"scaling": True, "budget": {"workers_per_actor": 4}}, "budget.workers_per_actor is 4"),
        ({"loaders_per_source": "auto", "loader_hosts": 2}, "loader_hosts is 2 and loaders_per_source is 'auto'"),
        ({"loaders_per_source": "auto"}, "there is no profile="),
    ],
)
def test_what_would_have_no_effect_is_refused(launch, words):
    with pytest.raises(ol.SpecError, match=words):
        sizing_of(job_of(MS), LaunchOptions(**launch))


def test_bounds_of_scaling_are_used():
    found = sizing_of(
        job_of(MS),
        LaunchOptions(scaling=True, loader_hosts=2, budget={"workers_per_actor": 4, "workers_per_source": 3}),
    )
    assert (found["workers_per_actor"], found["workers_per_source"]) == (4, 3)
