"""`overlord profile --plan`: a placement that a person can read, and the same for a program."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from rich.console import Console

import overlord as ol
from overlord.cli.profile import schedule_shares, show_plan
from overlord.errors import SpecError
from overlord.launch_spec import LaunchOptions
from overlord.scaling.profiles import Resources, SourceCost

MS = {"web": 0.3, "photos": 40.0, "audio": 160.0}
RESOURCES = Resources(cpus=16, bytes=8 << 30)


class Known:
    def cost(self, name: str) -> SourceCost:
        if name not in MS:
            raise SpecError(f"source {name!r} is not in the profile")
        return SourceCost(name=name, transform_s=MS[name] / 1000, tokens=100.0, buffer_bytes=8 << 20)


def job_of(mixture: ol.Mixture | None = None, names=tuple(MS)) -> ol.Job:
    sources = [ol.Source(name, f"{name}/*.parquet", sample=ol.Text("ids", tokenized=True)) for name in names]
    return ol.Job(sources=sources, mixture=mixture or ol.Mixture(), batch=ol.Batch(1024, global_samples=8))


def printed(shown) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shown)
    console.file.close()
    return console.export_text()


def test_a_person_reads_what_each_source_got_and_why():
    text = " ".join(printed(show_plan(Known(), job_of(), LaunchOptions(), RESOURCES, False)).split())
    limit = "one more worker for 'audio' does not fit the 16 CPUs"
    for words in ("web", "photos", "audio", "160 ms", "keep", "busy", "samples/s", limit, "are left"):
        assert words in text.replace("\u202f", " ")


def test_a_program_reads_the_same():
    told = json.loads(json.dumps(show_plan(Known(), job_of(), LaunchOptions(), RESOURCES, True)))
    by_name = {one["name"]: one for one in told["allotments"]}
    assert by_name["audio"]["workers"] > by_name["photos"]["workers"] >= by_name["web"]["workers"] == 1
    assert by_name["audio"]["share"] == pytest.approx(1 / 3)
    assert told["cpus"] + told["cpus_left"] == pytest.approx(16)
    assert told["bytes"] + told["bytes_left"] == 8 << 30
    assert told["samples_per_s"] > 0


def test_a_schedule_is_sized_for_its_mean_and_its_worst_is_told():
    mixture = ol.Mixture.stages([(0, {"web": 1.0}), (100, {"audio": 1.0})])
    points = schedule_shares(job_of(mixture), 200, [Known().cost(name) for name in MS])
    assert points[0][1] == [1.0, 0.0, 0.0] and points[-1][1] == [0.0, 0.0, 1.0]
    launch = LaunchOptions(steps=200)
    told = show_plan(Known(), job_of(mixture), launch, RESOURCES, True)
    assert told["slowest"]["source"] == "audio" and told["slowest"]["step"] >= 100
    assert "The mixture changes" in printed(show_plan(Known(), job_of(mixture), launch, RESOURCES, False))


def test_more_workers_than_cpus_are_told_only_where_somebody_waits():
    words = "A launch bounds workers"
    assert words not in printed(show_plan(Known(), job_of(), LaunchOptions(), RESOURCES, False))
    costs = {name: dataclasses.replace(Known().cost(name), cpu_share=0.1) for name in MS}

    class Waiting:
        def cost(self, name: str) -> SourceCost:
            return costs[name]

    text = " ".join(printed(show_plan(Waiting(), job_of(), LaunchOptions(), RESOURCES, False)).split())
    told = show_plan(Waiting(), job_of(), LaunchOptions(), RESOURCES, True)
    at_once = math.ceil(sum(one["busy"] if one["busy"] < 0.5 else one["workers"] for one in told["allotments"]))
    assert at_once > 14 and f"with --cpus {at_once} (budget=ol.Budget(cpus={at_once})) it has them all" in text


def test_each_trainer_host_has_a_constructor_that_is_paid_first():
    launch = LaunchOptions(runtime="ray", mesh=ol.ClientPlaceTree(dp=8), ranks_per_host=2)
    told = show_plan(Known(), job_of(), launch, RESOURCES, True)
    assert told["resources"]["constructors"] == 4


def test_too_little_is_named():
    with pytest.raises(SpecError, match="more are needed for one worker"):
        show_plan(Known(), job_of(), LaunchOptions(), Resources(cpus=1, bytes=8 << 30), False)


def test_a_source_that_was_not_profiled_is_refused():
    with pytest.raises(SpecError, match="not in the profile"):
        show_plan(Known(), job_of(names=("web", "new")), LaunchOptions(), RESOURCES, False)
