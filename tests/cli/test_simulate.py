"""`overlord simulate`: figures that agree with each other, with a plan and with simple cases; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.core.messages import MetaRequest
from overlord.core.samples import META, SKIP, Cursor
from overlord.job_files import LaunchOptions, dump_job_yaml, load_job_file
from overlord.planning.checking import run_strategy
from overlord.runtimes.autoscaling.profiling import profile_job, write_profile
from overlord.runtimes.autoscaling.simulation import MeasuredLoaders, StepClock, simulated_feed, unit_seconds
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.scaling.profiles import Profile, SourceCost


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def simulated(*arguments: object) -> dict[str, Any]:
    outcome = call("simulate", *arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.fixture(scope="module")
def job_file(mixed_job: ol.Job, cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = mixed_job.replace(batch=ol.Batch(2048, global_samples=64))
    path = tmp_path_factory.mktemp("simulate") / "job.yaml"
    path.write_text(dump_job_yaml(job, LaunchOptions(mesh=ol.ClientPlaceTree(dp=2))))
    write_profile(path.with_name("job.profile.json"), _profile(job, cache))
    return path


def _profile(job: ol.Job, cache: str) -> Profile:
    options = ServiceOptions(mesh=ol.ClientPlaceTree(), cache=cache)
    found = profile_job(job, options, when="2030-01-01T00:00:00+00:00", samples=8, seconds=0.05)
    assert not found.failed
    return found.profile


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)


# ---- the command on a real job


@pytest.fixture(scope="module")
def told(job_file: Path, cache: str) -> dict[str, Any]:
    arguments = ("--mesh", "dp=2,tp=2", "--gpus", "8,64", "--scale-batch", "--steps", 2, "--rows", 40)
    return simulated(job_file, *arguments, "--cache", cache, "--hours", 0.05)


def test_each_mesh_says_when_sources_are_read_again(
    told: dict[str, Any], mixed_job: ol.Job, tmp_path: Path, cache: str
) -> None:
    """It is what `explain` says of the job with the batch of that mesh; both estimate lengths from a few rows."""
    mesh, large = told["meshes"]
    job = mixed_job.replace(batch=ol.Batch(2048, global_samples=int(mesh["samples"])))
    (tmp_path / "job.yaml").write_text(dump_job_yaml(job))
    explained = call("explain", tmp_path / "job.yaml", "--steps", 20, "--no-measure", "--cache", cache, "--json")
    expected = {source["name"]: source["forecast"]["begins"] for source in json.loads(explained.stdout)["sources"]}
    assert {source["name"] for source in mesh["sources"]} == expected.keys()
    for source, sooner in zip(mesh["sources"], large["sources"], strict=True):
        assert not source["exact"] and list(source["begins"]) == ["2", "4", "16"]
        assert source["begins"]["16"] == pytest.approx(expected[source["name"]]["16"], rel=0.2, abs=2)
        assert sooner["begins"]["16"] < source["begins"]["16"] / 4


def test_each_mesh_has_its_strategies_beside_dealing(told: dict[str, Any]) -> None:
    assert [mesh["gpus"] for mesh in told["meshes"]] == [8, 64]
    assert [mesh["mesh"] for mesh in told["meshes"]] == ["pp=1 dp=4 cp=1 tp=2", "pp=1 dp=32 cp=1 tp=2"]
    for mesh in told["meshes"]:
        names = [one["strategy"] for one in mesh["strategies"]]
        assert names == ["vanilla", "backbone_balance", "vlm_hybrid"]
        dealt, *others = mesh["strategies"]
        assert dealt["speedup"] == 1
        for one in others:
            assert one["speedup"] == pytest.approx(dealt["step_s"] / one["step_s"]) and one["speedup"] > 1
            assert 0 < one["encoder_s"] < one["step_s"] <= one["longest_step_s"]
            assert 0 <= one["waits"] < 0.05  # it has the workers that it needs
            assert one["feed_samples_per_s"] >= one["needed_samples_per_s"] > 0
            assert one["tokens_per_s"] == pytest.approx(mesh["tokens"] / one["step_s"], rel=0.06)
            assert one["plan_s"] > 0 and one["plan_bytes"] > 0 and one["host_bytes"] <= one["most_host_bytes"]


@pytest.fixture(scope="module")
def text_job(ids_job: ol.Job, cache: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 640 tokens a step whose file names no mesh, and which has no images."""
    path = tmp_path_factory.mktemp("text") / "job.yaml"
    path.write_text(dump_job_yaml(ids_job.replace(batch=ol.Batch(32, global_tokens=640))))
    write_profile(path.with_name("job.profile.json"), _profile(ids_job, cache))
    return path


@pytest.mark.parametrize("gpus", [(), ("--gpus", "2"), ("--gpus", "4")], ids=str)
def test_a_mesh_has_the_step_that_a_run_on_it_has(text_job: Path, cache: str, gpus: tuple[str, ...]) -> None:
    told = simulated(text_job, "--mesh", "dp=2", *gpus, "--steps", 2, "--rows", 40, "--hours", 0.001)
    mesh, job = told["meshes"][0], load_job_file(text_job).job
    with ol.launch(job, mesh=f"dp={mesh['gpus']}", runtime="inline", cache=cache) as service:
        run = [service.plan_raw(step).total_tokens for step in (1, 2)]
    assert mesh["tokens"] == pytest.approx(np.mean(run), rel=0.05) and mesh["tokens"] == pytest.approx(640, rel=0.05)
    assert any(words.startswith("batch: 640 tokens as in the job file, on every mesh") for words in told["assumed"])


def test_a_job_without_images_has_no_encoder(text_job: Path) -> None:
    outcome = call("simulate", text_job, "--steps", 1, "--rows", 10, "--hours", 0.001)
    assert outcome.exit_code == 0, outcome.stderr
    assert "1 GPU on 1 host" in outcome.stdout and "backbone_balance" in outcome.stdout
    assert "vit_2b" not in outcome.stdout and "encode" not in outcome.stdout
    refused = call("simulate", text_job, "--encoder-layers", 4)
    assert refused.exit_code == 2 and "no source has images; it would have no effect" in refused.stderr


def test_the_batch_grows_with_the_data_parallel_groups_where_asked_for(told: dict[str, Any]) -> None:
    assert [mesh["samples"] for mesh in told["meshes"]] == [32 * 4, 32 * 32]  # 64 on the given mesh of dp=2
    assert [mesh["hosts"] for mesh in told["meshes"]] == [1, 8]
    assert any("64 samples as in the job file on a mesh of dp=2; --scale-batch" in one for one in told["assumed"])


def test_more_gpus_need_more_of_everything(told: dict[str, Any]) -> None:
    small, large = (mesh["strategies"][-1] for mesh in told["meshes"])
    for figure in ("plan_bytes", "needed_samples_per_s", "cpus", "bytes", "read_bytes", "tokens_per_s"):
        assert large[figure] > small[figure], figure


@pytest.mark.slow
def test_too_few_workers_make_trainers_wait(job_file: Path) -> None:
    # A GPU a thousand times as fast takes more than one worker can prepare.
    fast = ("--gpus", 64, "--global-samples", 64, "--gpu-speed", 1000, "--hours", 0.0001, "--cpus", 1)
    outcome = call("simulate", job_file, *fast, "--steps", 1, "--rows", 10, "--strategy", "backbone_balance")
    assert outcome.exit_code == 0, outcome.stderr
    text = " ".join(outcome.stdout.replace("\u202f", " ").split())
    assert "epoch begins at" in text
    assert "64 GPUs, backbone_balance: trainers wait" in text
    assert "1 worker of all sources together" in text and "64 GPUs on 8 hosts: pp=1 dp=64" in text


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "12"), "a data-parallel group of the mesh pp=1 dp=2 cp=1 tp=8 has 8 GPUs"),
        (("--gpus", "many"), "'many' is no number of GPUs"),
        (("--gpus", "0"), "'0' is no number of GPUs"),
        (("--scale-batch",), "--scale-batch is given without --gpus; no batch would grow"),
        (("--steps", "0"), "--steps is 0: this must be at least 1"),
        (("--gpu-speed", "0"), "--gpu-speed is 0.0: this must be at least 0.001"),
        (("--cpus", "0"), "--cpus is 0"),
        (("--global-samples", "8", "--global-tokens", "4096"), "a step has one size"),
        (("--global-tokens", "100"), "less than context_length"),
        (("--cost", "quadratic"), "has no time"),
        (("--cost", "lama"), "there is no cost model 'lama'"),
        (("--cost", "{causal_lm: {layers: 8, hidden: 512}}"), "Give --tflops"),
        (("--cost", "{causal_lm: {layers: 8, hidden: 512}}", "--tflops", "9", "--layers", "8"), "--layers is 8"),
        (("--tflops", "400"), "it would have no effect"),
        (("--strategy", "nothing"), "there is no strategy 'nothing'"),
        (("--profile", "nowhere.json"), "there is no such file"),
    ],
)
def test_bad_input_ends_with_words_and_2(job_file: Path, arguments: tuple[str, ...], words: str) -> None:
    outcome = call("simulate", job_file, "--mesh", "dp=2,tp=8", *arguments)
    assert outcome.exit_code == 2, outcome.output
    assert words in " ".join(outcome.stderr.split()) and "Traceback" not in outcome.stderr


# ---- the parts


@settings(max_examples=15, deadline=None)
@given(
    seconds=st.lists(st.floats(0.001, 0.2), min_size=1, max_size=5),
    workers=st.integers(1, 8),
    slots=st.integers(1, 12),
    step_s=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_a_feed_is_never_faster_than_its_slowest_part(seconds, workers, slots, step_s) -> None:
    costs = [SourceCost(name=str(n), transform_s=one) for n, one in enumerate(seconds)]
    counts = np.full((40, len(costs)), 10.0)
    out = simulated_feed(costs, counts, [workers] * len(costs), step_s, slots=slots)
    bound = max(10 * max(seconds) / workers, 10 * sum(seconds) / slots, step_s)
    # The samples of a run may cost less than the mean; half a per cent of work is rounding.
    assert 1 / out.steps_per_s > 0.8 * bound
    assert len(out.waits) == 40 and out.stall_s == pytest.approx(out.seconds - 40 * step_s, abs=1e-6)
    # Slots that are short are never idle while a source has work; the first and last steps overlap less.
    assert 1 / out.steps_per_s < 1.5 * bound + 10 * max(seconds)


def test_planning_decoding_and_the_hand_over_bound_a_feed_too() -> None:
    cost = SourceCost(name="photos", transform_s=0.001, handover_s=0.01, decode_s=0.1)
    counts = np.full((50, 1), 20.0)
    assert simulated_feed([cost], counts, [4]).steps_per_s == pytest.approx(1 / 0.2, rel=0.1)
    assert simulated_feed([cost], counts, [4], decoders=2).steps_per_s == pytest.approx(1 / 1.0, rel=0.1)
    assert simulated_feed([cost], counts, [4], plan_s=2.0).steps_per_s == pytest.approx(1 / 2.0, rel=0.1)


def test_a_step_takes_what_the_cost_model_says() -> None:
    buffer = ol.summary_buffer({"web": [4000, 4000, 4000, 4000]}, context_length=8192)
    unit_s = unit_seconds(ol.costs.llama_12b, 45, None)
    clock = StepClock(backbone=ol.costs.llama_12b, backbone_unit_s=unit_s, encoder=ol.costs.vit_2b, encoder_unit_s=1.0)

    def differs(**sizes: int) -> float:
        """Return the seconds over those of two sequences and of the microbatches that they are in."""
        tree = ol.ClientPlaceTree(**sizes)
        plan = run_strategy(ol.strategies.backbone_balance(), buffer, tree)
        backbone_s, encoder_s = clock.seconds(plan)
        assert encoder_s == 0
        sequences = 2 * (ol.costs.llama_12b.microbatch_time([4000]) - gamma) * 2 / tree.dp / tree.tp
        stages = plan.num_microbatches + tree.pp - 1  # every stage has its part of the layers
        expected = (sequences / plan.num_microbatches + gamma) * stages / tree.pp
        return backbone_s / (45 * expected / 1000)

    gamma = ol.costs.llama_12b.gamma
    for sizes in ({"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 4}, {"dp": 2, "pp": 2}):
        assert differs(**sizes) == pytest.approx(1, rel=1e-3), sizes


def test_flops_have_a_time_with_what_a_gpu_reaches() -> None:
    model = ol.costs.causal_lm(layers=32, hidden=4096)
    flops = model.microbatch_time([8192])
    assert flops / model.quantum * unit_seconds(model, 1, 400.0) == pytest.approx(flops / 400e12)


def test_measured_rows_are_drawn_again_and_never_end() -> None:
    meta = np.zeros(10, META)
    meta["tokens"] = np.arange(100, 110)
    meta["flags"][3] = SKIP | 2
    meta["images"], meta["items"] = 2, 1 + 2 * np.arange(10)
    items = np.arange(80, dtype=np.int32).reshape(20, 4)
    loaders = MeasuredLoaders([(meta, items)])
    delta = loaders.summary_buffer([MetaRequest(0, Cursor(0, 0, 5), 1000)])[0]
    assert delta.next_cursor == Cursor(0, 0, 1005) and delta.meta["row"].tolist() == list(range(5, 1005))
    assert set(delta.meta["tokens"].tolist()) == set(range(100, 110)) and not (delta.meta["flags"] & 2).any()
    assert (delta.meta["flags"] == SKIP).any()
    # The images of a row stay its own.
    first = delta.items[delta.meta["items"] - 1, 0]
    assert (first == 8 * (delta.meta["tokens"] - 100)).all()
    again = loaders.summary_buffer([MetaRequest(0, Cursor(0, 0, 505), 500)])[0]
    assert (again.meta["tokens"] == delta.meta["tokens"][500:]).all()
