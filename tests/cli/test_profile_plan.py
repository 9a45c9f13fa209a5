"""`overlord profile --plan`: a placement that a person can read, and the same for a program."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

import overlord as ol
from overlord.cli.profile import show_plan
from overlord.errors import SpecError
from overlord.launch_spec import LaunchOptions
from overlord.scaling.profiles import SourceCost, schedule_shares

MS = {"web": 0.3, "photos": 40.0, "audio": 160.0}
LAUNCH = LaunchOptions(budget=ol.Budget(cpus=16, memory=8 << 30), threads=4)


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
    text = " ".join(printed(show_plan(Known(), job_of(), LAUNCH, False)).split())
    limit = "one more worker for 'audio' does not fit the 16 workers of all sources"
    for words in ("web", "photos", "audio", "160 ms", "keep", "busy", "samples/s", limit, "are left"):
        assert words in text.replace("\u202f", " ")


def test_a_program_reads_the_same():
    told = json.loads(json.dumps(show_plan(Known(), job_of(), LAUNCH, True)))
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
    told = show_plan(Known(), job_of(mixture), LAUNCH, True)
    assert told["slowest"]["source"] == "audio" and told["slowest"]["step"] >= 100
    assert "The mixture changes" in printed(show_plan(Known(), job_of(mixture), LAUNCH, False))


def test_decoding_behind_the_hand_over_bounds_the_feed():
    class Decoded:
        def cost(self, name: str) -> SourceCost:
            return dataclasses.replace(Known().cost(name), decode_s=0.03)

    def told(launch: LaunchOptions, profile=Decoded):
        return show_plan(profile(), job_of(), launch, True)

    without = told(LAUNCH, Known)["samples_per_s"]
    assert without > 180
    four = told(LAUNCH)
    assert four["samples_per_s"] == pytest.approx(4 / 0.03) and "4 threads of the constructors" in four["limit"]
    # Two trainer hosts of a cluster decode side by side, with CPUs that are not those of the loaders.
    there = LAUNCH.model_copy(update={"runtime": "ray", "mesh": ol.ClientPlaceTree(dp=4), "ranks_per_host": 2})
    assert told(there)["samples_per_s"] == pytest.approx(without)
    # On one host they are the same: decoding leaves fewer for the workers.
    many = told(LAUNCH.model_copy(update={"threads": 64}))
    assert 4 / 0.03 < many["samples_per_s"] < without and "16 CPUs" in many["limit"]
    assert many["cpus"] <= 16 + 1e-6


def test_each_trainer_host_has_a_constructor():
    launch = LaunchOptions(runtime="ray", mesh=ol.ClientPlaceTree(dp=8), ranks_per_host=2, budget=LAUNCH.budget)
    told = show_plan(Known(), job_of(), launch, True)
    assert told["resources"]["constructors"] == 4 and told["resources"]["decoders"] == 8


def test_too_little_is_named():
    small = LaunchOptions(budget=ol.Budget(cpus=4, memory="70MB"))
    with pytest.raises(SpecError, match="are missing; source 'web' takes most"):
        show_plan(Known(), job_of(), small, False)


def test_a_source_that_was_not_profiled_is_refused():
    with pytest.raises(SpecError, match="not in the profile"):
        show_plan(Known(), job_of(names=("web", "new")), LAUNCH, False)
