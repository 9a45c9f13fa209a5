"""`overlord explain`: figures that agree with each other and with a run, the page, and what is refused."""

from __future__ import annotations

import io
import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.job_files import LaunchOptions, dump_job_yaml, load_job_file
from overlord.planning.checking import run_strategy
from overlord.reports.explanation import graph_of


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def explained(*arguments: object) -> dict[str, Any]:
    outcome = call("explain", *arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


def axis(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["balance"] if one["axis"] == name)


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)
    monkeypatch.setenv("HOME", cache)  # what a test launches itself must not fill the user's cache


def written(folder: Path, job: ol.Job, **launch: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(dump_job_yaml(job, LaunchOptions(**launch)))
    return path


@pytest.fixture(scope="module")
def demo_file(mixed_job: ol.Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = mixed_job.replace(batch=ol.Batch(2048, global_samples=64))
    return written(tmp_path_factory.mktemp("explain"), job, mesh=ol.ClientPlaceTree(dp=2))


@pytest.fixture(scope="module")
def ids_file(ids_job: ol.Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("explain"), ids_job, mesh=ol.ClientPlaceTree(dp=2))


# ---- figures


@pytest.fixture(scope="module")
def demo(demo_file: Path, cache: str) -> dict[str, Any]:
    return explained(demo_file, "--mesh", "dp=2,cp=2", "--strategy", "vlm_hybrid", "--steps", 6, "--cache", cache)


def test_a_plan_is_more_even_than_no_plan(demo: dict[str, Any]) -> None:
    assert [one["axis"] for one in demo["balance"]] == ["ranks", "lockstep", "encoder"]
    for one in demo["balance"]:
        assert 1 <= one["after"] <= one["before"]
        assert 1 <= one["bound"] <= one["after"] + 1e-9
        assert len(one["before_per_step"]) == len(one["after_per_step"]) == 6
        assert one["before"] == pytest.approx(np.mean(one["before_per_step"]))
    assert demo["expected_speedup"] > 1
    assert 0 <= demo["crossing_tokens"] <= 2 * demo["image_tokens"]
    assert demo["cost_model"].startswith("llama_12b (measured on")


def test_shares_sum_to_one_and_counts_agree(demo: dict[str, Any]) -> None:
    for key in ("planned_share", "realised_share"):
        assert sum(source[key] for source in demo["sources"]) == pytest.approx(1)
    assert sum(source["samples"] for source in demo["sources"]) == 6 * 64 == 6 * demo["step"]["samples"]
    assert sum(source["tokens"] for source in demo["sources"]) == sum(demo["step"]["tokens_per_step"])
    assert sum(n for _, _, n in demo["length_histogram"]) == 6 * 64
    assert demo["step"]["loss_tokens"] <= demo["step"]["tokens"] <= demo["step"]["squared_tokens"]
    assert 0 <= demo["step"]["padding"] < 0.2
    assert demo["step"]["microbatches"] <= demo["step"]["microbatches_before"]


def test_repetitions_follow_the_sizes_of_the_sources(demo: dict[str, Any]) -> None:
    assert demo["projected_steps"] == 10_000
    for source in demo["sources"]:
        assert source["rows_exact"]
        assert source["epochs"] == pytest.approx((source["samples"] + source["skipped"]) / source["rows"])
        assert source["projected_epochs"] > 100


def test_what_is_handed_over_is_what_a_run_hands_over(tmp_path: Path, demo_files: Any) -> None:
    """Also where most images have many bytes and few tokens, and a few have few bytes and many tokens."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    images = [jpeg_of(noise, 98)] * 64
    images[40:44:2] = [jpeg_of(np.zeros((1536, 1536, 3), np.uint8), 20)] * 2
    table = pa.table({"jpg": images, "text": ["a few words"] * 64})
    pq.write_table(table, tmp_path / "i.parquet")
    sample = ol.ImageText("jpg", "text", patch=16, merge=2)
    job = ol.Job(
        sources=[ol.Source("i", str(tmp_path / "i.parquet"), sample=sample)],
        tokenizer=str(demo_files.tokenizer),
        batch=ol.Batch(4096, global_samples=32),
    )
    path = written(tmp_path, job)
    (told,) = explained(path, "--steps", 4)["loaders"]["sources"]
    outcome = call("run", path, "--steps", 4, "--runtime", "inline", "--prefetch", 1, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    ran = json.loads(outcome.stdout)
    (media,) = ran["media"]
    assert told["decoded_in"] == media["decoded_in"] == "constructor"
    assert told["payload_bytes"] == pytest.approx(media["handed_over_bytes"] / ran["steps"], rel=0.5)


def jpeg_of(pixels: np.ndarray, quality: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=quality)
    return out.getvalue()


def test_what_loading_costs_is_measured(demo: dict[str, Any]) -> None:
    loaders = demo["loaders"]
    assert loaders["measured_samples"] == sum(one["measured_samples"] for one in loaders["sources"]) > 0
    assert loaders["cpu_s_per_step"] == pytest.approx(
        sum(one["read_cpu_s"] + one["finish_cpu_s"] for one in loaders["sources"])
    )
    assert loaders["cores"] == max(1, math.ceil(loaders["cpu_s_per_step"] / loaders["step_time_s"]))
    images = next(one for one in loaders["sources"] if one["name"] == "photos")
    text = next(one for one in loaders["sources"] if one["name"] == "wiki")
    assert images["payload_bytes"] / images["samples_per_step"] > 10 * text["payload_bytes"] / text["samples_per_step"]
    assert 1 <= images["measured_samples"] <= 8
    assert all(one["buffer_bytes"] > 0 for one in loaders["sources"])
    # Compressed lines are indexed as they are unpacked, and the index is kept once a whole file was.
    assert {one["name"] for one in loaders["sources"] if not one["index_bytes"]} <= {"code", "wiki"}


def test_every_key_is_documented(demo: dict[str, Any]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    parts = (demo, demo["sources"][0], demo["loaders"], demo["balance"][0], demo["step"])
    assert [key for part in parts for key in part if f"`{key}`" not in text] == []


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"ids": [1] * (n + 1)}) for n in range(64)))
    source = ol.Source("web", str(tmp_path / "a.jsonl"), sample=ol.Text("ids", tokenized=True))
    names: dict[str, Any] = {"job": ol.Job([source], batch=ol.Batch(128, global_samples=64))}
    text = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, names)  # noqa: S102 - our own page
    assert names["page"].startswith("<!doctype html>")
    assert (names["tree"].dp, names["larger"]) == (2, names["same"])


def test_it_plans_what_a_run_delivers(ids_file: Path) -> None:
    run = json.loads(call("run", ids_file, "--runtime", "inline", "--steps", 5, "--json").stdout)
    found = explained(ids_file, "--steps", 5, "--cost", "tokens")
    assert [source["samples"] for source in found["sources"]] == [source["samples"] for source in run["sources"]]
    assert [source["epochs"] for source in found["sources"]] == pytest.approx([s["epochs"] for s in run["sources"]])
    assert found["step"]["padding"] == pytest.approx(run["padding"])
    assert found["length_histogram"] == run["length_histogram"]
    assert found["cost_model"].startswith("tokens")


def test_a_step_with_fewer_samples_than_ranks_is_said(ids_file: Path, ids_job: ol.Job, cache: str, caplog) -> None:
    few = "global_samples=11 for dp=16 ranks"
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=16), runtime="inline", cache=cache):
        assert caplog.text.count(few) == 1 and "up to 1.45x" in caplog.text
    caplog.clear()
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=8), runtime="inline", cache=cache):
        assert "global_samples" not in caplog.text
    assert few in " ".join(explained(ids_file, "--mesh", "dp=16")["notes"])


def test_a_pipeline_is_judged_as_one(ids_file: Path) -> None:
    found = explained(ids_file, "--mesh", "pp=2,dp=2", "--strategy", "{backbone_balance: {objective: pipeline}}")
    assert [one["axis"] for one in found["balance"]] == ["ranks", "pipeline"]
    row = axis(found, "pipeline")
    assert 1 <= row["after"] <= row["before"]
    assert row["bound"] is None
    free = explained(ids_file, "--mesh", "pp=2,dp=2", "--cost", "tokens", "--steps", 1)
    row = axis(free, "pipeline")
    assert free["expected_speedup"] == pytest.approx(row["before"] / row["after"])


def test_the_speed_up_of_sums_is_that_over_the_ranks(ids_file: Path) -> None:
    summed = "{backbone_balance: {objective: sum, cost: tokens}}"
    found = explained(ids_file, "--mesh", "dp=4", "--strategy", summed, "--steps", 1, "--no-measure")
    row = axis(found, "ranks")
    assert found["expected_speedup"] == pytest.approx(row["before"] / row["after"])
    assert "wait for each other once a step" in found["headlines"][0]


def test_a_cost_model_may_be_a_shape(ids_file: Path) -> None:
    found = explained(ids_file, "--cost", "{causal_lm: {layers: 2, hidden: 64}}", "--steps", 1, "--no-measure")
    assert "2 layers of width 64" in found["cost_model"]
    assert "after every microbatch" in found["headlines"][0]


def test_one_rank_has_nothing_to_balance(ids_file: Path, tmp_path: Path) -> None:
    outcome = call("explain", ids_file, "--mesh", "dp=1", "--steps", 2, "--html", tmp_path / "p.html")
    assert "(1 rank)" in outcome.stdout
    assert "One rank: nothing to balance." in outcome.stdout
    assert "busiest rank" not in outcome.stdout + (tmp_path / "p.html").read_text()


def test_hybrid_ranks_have_no_lockstep(ids_file: Path) -> None:
    found = explained(ids_file, "--mesh", "dp=2,cp=2", "--strategy", "hdp", "--no-measure")
    assert found["loaders"] is None
    assert axis(found, "ranks")["after"] <= axis(found, "ranks")["before"]
    assert (axis(found, "lockstep")["after"], axis(found, "lockstep")["after_per_step"]) == (None, [])
    equal = explained(ids_file, "--mesh", "dp=2,cp=2", "--strategy", "{hdp: {equal_counts: true}}", "--no-measure")
    assert axis(equal, "lockstep")["after"] >= 1
    assert found["expected_speedup"] > 1
    assert found["load_heatmap"]["axis"] == "CP"
    assert len(found["load_heatmap"]["overlord"]) == len(found["load_heatmap"]["round_robin"]) == 4


def test_offloading_tells_the_ranks_it_saves(ids_file: Path) -> None:
    offload = "layers: 8, act_bytes_per_token: 1, bandwidth: 1.0e9, time: {beta: 1.0e-6}"
    strategy = f"{{hdp: {{offload: {{{offload}}}}}}}"
    found = explained(ids_file, "--mesh", "dp=2,cp=2", "--strategy", strategy, "--no-measure")
    (words,) = [note for note in found["notes"] if note.startswith("Offloading")]
    ranks, plain = re.findall(r"run on ([\d.]+) ranks instead of ([\d.]+)", words)[0]
    assert 0 < float(ranks) < float(plain)
    slow = strategy.replace("1.0e9", "1.0e-9")
    (words,) = [
        n for n in explained(ids_file, "--mesh", "cp=2", "--strategy", slow, "--no-measure")["notes"] if "Off" in n
    ]
    assert words.startswith("Offloading saves no rank")


def test_a_method_without_room_is_said(tmp_path: Path) -> None:
    lengths = [350, 300, 200, 450, 450, 350, 200, 250, 300, 50, 50, 250]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"ids": [1] * length}) for length in lengths))
    source = ol.Source("a", str(tmp_path / "a.jsonl"), sample=ol.Text("ids", tokenized=True), shuffle_bytes=0)
    batch = ol.Batch(500, global_samples=12, microbatch_tokens=840, microbatches=2)
    asked = ol.strategies.backbone_balance({"causal_lm": {"layers": 2, "hidden": 64}}, method="karmarkar_karp")
    path = written(tmp_path, ol.Job([source], batch=batch), mesh=ol.ClientPlaceTree(dp=2), strategy=asked)
    found = explained(path, "--steps", 2, "--no-measure")
    (words,) = [note for note in found["notes"] if "karmarkar_karp" in note]
    assert words.startswith("In 2 of 2 steps") and "karmarkar_karp would exceed batch.microbatch_tokens" in words
    assert any("karmarkar_karp would exceed" in what for _, what in found["largest_sample"]["states"])


def test_no_plan_is_told_as_such(ids_file: Path) -> None:
    found = explained(ids_file, "--strategy", "vanilla", "--no-measure")
    assert found["expected_speedup"] == 1.0
    assert found["headlines"][0].startswith("Samples are dealt round-robin")


def test_a_sequence_that_is_the_limit_is_named(tmp_path: Path) -> None:
    rows = [json.dumps({"ids": [1] * (900 if n % 8 == 0 else 10)}) for n in range(64)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    source = ol.Source("a", str(tmp_path / "a.jsonl"), sample=ol.Text("ids", tokenized=True), shuffle_bytes=0)
    path = written(tmp_path, ol.Job([source], batch=ol.Batch(1024, global_samples=8)), mesh=ol.ClientPlaceTree(dp=4))
    found = explained(path, "--steps", 4, "--cost", "tokens")
    words = "One sequence of 900 tokens is 3.71× an even share of a step: "
    assert found["limits"][0] == f"{words}a larger global batch would help."  # it fits one rank: hdp leaves it whole
    assert axis(found, "ranks")["bound"] == pytest.approx(4 * 900 / 970)
    assert found["limits"][0] in found["headlines"]
    spread = explained(path, "--steps", 4, "--cost", "tokens", "--mesh", "cp=4", "--strategy", "vanilla")
    assert spread["limits"] == []
    split = explained(path, "--steps", 4, "--cost", "tokens", "--mesh", "dp=4,cp=2", "--no-measure")
    assert split["limits"][0].endswith("a step: a larger global batch would help.")  # two ranks share it either way
    job = ol.Job([source], batch=ol.Batch(1026, global_samples=8))
    wider = explained(written(tmp_path, job), "--steps", 4, "--cost", "tokens", "--mesh", "dp=4,cp=3", "--no-measure")
    assert wider["limits"][0].endswith("a step: splitting it (hdp) or a larger global batch would help.")
    hybrid = ("--mesh", "dp=4,cp=3", "--strategy", "hdp", "--no-measure")
    by_hdp = explained(tmp_path / "job.yaml", "--steps", 4, "--cost", "tokens", *hybrid)
    assert axis(by_hdp, "ranks")["after"] < axis(wider, "ranks")["bound"]


def test_repetitions_follow_the_schedule(ids_job: ol.Job, tmp_path: Path) -> None:
    sources = [source.replace(weight=None) for source in ids_job.sources]
    mixture = ol.Mixture.stages([(0, {"a": 1}), (50, {"b": 1})])
    job = ids_job.replace(sources=sources, mixture=mixture, max_steps=100)
    found = explained(written(tmp_path, job), "--steps", 10, "--no-measure")
    projected = {source["name"]: source["projected_epochs"] for source in found["sources"]}
    assert found["projected_steps"] == 100
    assert projected["a"] == pytest.approx(50 * 11 / 90, rel=0.02)
    assert projected["c"] in (0, None)
    assert "a is read 6.1 times" in " ".join(found["headlines"]) or "a 6.1 times" in " ".join(found["headlines"])


def test_a_finite_stream_ends(ids_job: ol.Job, tmp_path: Path) -> None:
    job = ids_job.replace(mixture=ol.Mixture(stopping="all_exhausted_without_replacement"))
    found = explained(written(tmp_path, job), "--steps", 1000, "--no-measure")
    assert sum(source["samples"] for source in found["sources"]) == 90 + 40 + 64
    assert all(source["projected_epochs"] <= 1 for source in found["sources"])
    assert f"The stream ends by itself after {found['steps']} of 1000 steps." in found["notes"]


def test_a_mixture_that_learns_shows_where_it_begins(ids_job: ol.Job, tmp_path: Path) -> None:
    path = written(tmp_path, ids_job.replace(mixture=ol.Mixture(learn=ol.Learn("odm")), lag=5))
    found = explained(path, "--no-measure")
    assert found["steps"] == 5
    assert "The mixture learns (odm)" in found["notes"][0]
    shown = call("explain", path, "--no-measure").stdout
    assert shown.index("The mixture learns (odm)") < shown.index("balance (1 is even)")
    with ol.launch(load_job_file(path).job, runtime="inline") as service:
        weights = next(service.client()).weights
    shares = [weight / sum(weights) for weight in weights]
    assert [source["planned_share"] for source in found["sources"]] == pytest.approx(shares)


def test_a_strategy_of_your_own_is_explained(ids_job: ol.Job, tmp_path: Path) -> None:
    lines = [
        "import overlord as ol",
        "def mine(buffer, tree):",
        "    graph = ol.DGraph.from_buffer(buffer, tree).mix().distribute('DP').cost(ol.costs.tokens)",
        "    return graph.balance('karmarkar_karp', objective='sum').plan()",
        f"source = ol.Source('a', {ids_job.sources[0].path[0]!r}, sample=ol.Text('ids', tokenized=True))",
        "job = ol.Job([source], batch=ol.Batch(96, global_samples=16))",
        "strategy, mesh = mine, 'dp=4'",
    ]
    (tmp_path / "job.py").write_text("\n".join(lines))
    found = explained(tmp_path / "job.py", "--no-measure", "--cost", "tokens")
    assert found["strategy"] == "mine"
    assert found["notes"] == []
    judged = explained(tmp_path / "job.py", "--no-measure")["notes"]
    assert judged == ["mine is judged by llama_12b, since a function's own cost is not known here; set --cost."]
    assert axis(found, "ranks")["after"] < axis(found, "ranks")["before"]


@pytest.mark.slow
def test_the_time_of_hundreds_of_sources_grows_with_their_number_only(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(300):
        rows = [json.dumps({"ids": [7] * int(n)}) for n in 1 + rng.integers(0, 90, 40)]
        (tmp_path / f"s{number}.jsonl").write_text("\n".join(rows))
    text = ol.Text("ids", tokenized=True)
    sources = [ol.Source(f"s{n}", str(tmp_path / f"s{n}.jsonl"), sample=text) for n in range(300)]
    spent = []
    for count in (30, 300):
        path = written(tmp_path, ol.Job(sources[:count], batch=ol.Batch(128, global_samples=2 * count)))
        call("explain", path, "--steps", 1)  # compiles, and indexes the files
        began = time.process_time()
        outcome = call("explain", path, "--mesh", "dp=8", "--steps", 5, "--html", tmp_path / "page.html")
        spent.append(time.process_time() - began)
    assert spent[1] < 15 * spent[0]
    assert outcome.exit_code == 0, outcome.stderr
    assert "260 more sources are in --json and --html." in outcome.stdout
    assert "measuring loaders: 300 of 300" in outcome.stderr
    assert (tmp_path / "page.html").read_text().count('<i style="width:') == 300


# ---- the terminal and the page


def test_the_terminal_begins_with_what_matters(demo_file: Path) -> None:
    outcome = call("explain", demo_file, "--steps", 3, "--mesh", "dp=2,cp=2")
    assert outcome.exit_code == 0, outcome.stderr
    words = " ".join(outcome.stdout.split()).replace("\u202f", " ")
    assert "3 steps on pp=1 dp=2 cp=2 tp=1 (4 ranks), backbone_balance" in words
    assert words.index("as fast as dealt round-robin") < words.index("balance (1 is even)")
    for part in ("an estimate by the cost model llama_12b", "microbatches in lockstep", "least possible", "squared (Q)",
                 "sources, shares by token", "in 10,000 steps", "handed over", "read buffer", "is read"):  # fmt: skip
        assert part in words
    assert "vlm_hybrid would spread them over all ranks" in words
    assert "planning steps: 3 of 3" in outcome.stderr


class Page(HTMLParser):
    """Collects tags and attributes; fails on a tag that is not closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--no-measure"],
        pytest.param(["--strategy", "hdp"], marks=pytest.mark.slow),
        ["--strategy", "vlm_hybrid"],
    ],
)
def test_the_page_needs_nothing_from_outside(demo_file: Path, tmp_path: Path, more: list[str]) -> None:
    path = tmp_path / "new" / "page.html"
    outcome = call("explain", demo_file, "--mesh", "dp=2,cp=2", "--steps", 2, "--html", path, *more)
    assert outcome.exit_code == 0, outcome.stderr
    text = path.read_text()
    page = Page(text)
    inner = next(attributes["srcdoc"] for tag, attributes in page.found if tag == "iframe")
    assert inner is not None and inner.startswith("<!doctype html>")
    for one in (page, Page(inner)):
        assert {"script", "link", "img"}.isdisjoint(tag for tag, _ in one.found)
        assert {"src", "href"}.isdisjoint(name for tag, attributes in one.found for name in attributes if tag != "a")
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert {"balance-ranks", "load", "lengths", "sources", "sample", "method"} <= set(ids)
    assert ("cpu" in ids) == ("--no-measure" not in more)
    assert "http" not in text.replace("http://www.w3.org", "")
    assert ">nan" not in text and "url(" not in text


def test_names_are_escaped(ids_job: ol.Job, tmp_path: Path) -> None:
    path = tmp_path / "<b>.yaml"
    path.write_text(dump_job_yaml(ids_job))
    assert call("explain", path, "--steps", 1, "--no-measure", "--html", tmp_path / "p.html").exit_code == 0
    assert "&lt;b&gt;.yaml" in (tmp_path / "p.html").read_text()
    assert "<b>" not in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    "strategy", [ol.strategies.backbone_balance(), ol.strategies.hdp(), ol.strategies.long_short()]
)
def test_the_graph_of_a_plan_has_its_places(strategy: Any) -> None:
    tree = ol.ClientPlaceTree(dp=2, cp=2)
    buffer = ol.summary_buffer({"web": [90, 3, 40, 64, 7, 8]}, context_length=64, microbatch_tokens=64)
    plan = run_strategy(strategy, buffer, tree)
    graph = graph_of(plan, buffer, tree, ol.costs.tokens, "mine")
    again = graph.plan()
    assert again.loads(again.padded).tolist() == plan.loads(plan.padded).tolist()
    trace = str(graph.trace(buffer.draw.sample_id(0)))
    assert "bucket" in trace and "ranks" in trace


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{folder}/none.yaml"], 2, "there is no such file"),
        (["{job}", "--mesh", "dq=2"], 2, "unknown axis 'dq'"),
        (["{job}", "--mesh", "cp=3"], 2, "not a multiple of 6"),
        (["{job}", "--mesh", "cp=2", "--strategy", "{{hdp: {{objective: pipeline}}}}"], 2, "has one stage"),
        (["{job}", "--strategy", "best"], 2, "there is no strategy 'best'"),
        (["{job}", "--cost", "lama"], 2, "--cost: there is no cost model 'lama'"),
        (["{job}", "--cost", "{{causal_lm: {{layers: 2}}}}"], 2, "missing; without it the model has no cost"),
        (["{job}", "--strategy", "{{hdp: {{equal: true}}}}"], 2, "Did you mean 'equal_counts'?"),
        (["{job}", "--steps", "0"], 2, "--steps is 0"),
        (["{job}", "--step-time", "0"], 2, "--step-time is 0"),
        (["{job}", "--html", "/dev/null/x.html"], 2, "--html /dev/null/x.html: nothing can be written there"),
        (["{job}", "--loaders", "0"], 2, "--loaders is '0': this must be a whole number of at least 1"),
    ],
)
def test_wrong_input_is_one_paragraph(
    arguments: list[str], code: int, message: str, ids_file: Path, tmp_path: Path
) -> None:
    outcome = call("explain", *(part.format(job=ids_file, folder=tmp_path) for part in arguments), "--json")
    assert outcome.exit_code == code
    assert outcome.stderr.splitlines()[-1].startswith("error: ")
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert message in json.loads(outcome.stdout)["error"]["message"]


def test_an_empty_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    source = ol.Source("a", str(tmp_path / "a.jsonl"), sample=ol.Text("ids", tokenized=True))
    outcome = call("explain", written(tmp_path, ol.Job([source], batch=ol.Batch(8, global_samples=1))))
    assert outcome.exit_code == 2
    assert "source 'a': the only file" in outcome.stderr
    assert "is empty" in outcome.stderr


def test_less_than_a_step_is_told(ids_job: ol.Job, tmp_path: Path) -> None:
    mixture = ol.Mixture(stopping="all_exhausted_without_replacement")
    job = ids_job.replace(mixture=mixture, drop_last=True, batch=ol.Batch(32, global_samples=1000))
    outcome = call("explain", written(tmp_path, job), "--no-measure")
    assert outcome.exit_code == 2
    assert "has no step" in outcome.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no luck')", "the strategy mine failed at step 0: ValueError: no luck"),
        ("return 3", "the strategy mine returned int, not a plan"),
    ],
)
def test_a_strategy_that_fails_has_exit_code_1(body: str, message: str, ids_job: ol.Job, tmp_path: Path) -> None:
    lines = [
        "import overlord as ol",
        "def mine(buffer, tree):",
        f"    {body}",
        f"source = ol.Source('a', {ids_job.sources[0].path[0]!r}, sample=ol.Text('ids', tokenized=True))",
        "job = ol.Job([source], batch=ol.Batch(96, global_samples=16))",
        "strategy = mine",
    ]
    (tmp_path / "job.py").write_text("\n".join(lines))
    outcome = call("explain", tmp_path / "job.py")
    assert outcome.exit_code == 1
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr


# ---- repetition


def test_the_forecast_is_the_step_of_the_run(tmp_path: Path) -> None:
    """Next to a large source, a small one is read for the second and the fourth time by a real inline run."""
    rows = {"math": 240, "web": 9000}
    for name, count in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"ids": [1] * (1 + n % 9)}) for n in range(count)))
    sample = ol.Text("ids", tokenized=True)
    mixture = ol.Mixture.stages([(0, {"math": 1, "web": 9}), (100, {"math": 1, "web": 3})])
    job = ol.Job(
        sources=[ol.Source(name, str(tmp_path / f"{name}.jsonl"), sample=sample) for name in rows],
        mixture=mixture,
        batch=ol.Batch(64, global_samples=8),
    )
    path = written(tmp_path, job)
    facts = explained(path, "--steps", 4, "--no-measure")
    ahead = {source["name"]: source["forecast"] for source in facts["sources"]}
    assert ahead["math"]["exact"] and ahead["math"]["read_up"] is None
    real: dict[int, int] = {}
    with ol.launch(job, runtime="inline") as service:
        for step in service.client():
            for batch in step.microbatches:
                for sample_id in batch.meta.sample_ids:
                    if sample_id.source == "math":
                        real.setdefault(sample_id.epoch + 1, step.index)
            if 4 in real:
                break
    forecast = {int(epoch): step for epoch, step in ahead["math"]["begins"].items()}
    assert real[2] > 100
    for epoch in (2, 4):
        assert abs(forecast[epoch] - real[epoch]) <= max(1, 0.005 * real[epoch])
    second, fourth, sixteenth = (f"at step {forecast[epoch]:,}" for epoch in (2, 4, 16))
    words = f"math: second epoch begins {second}, fourth {fourth}, sixteenth {sixteenth}"
    assert words in " ".join(facts["headlines"])
    worth = next(source for source in facts["sources"] if source["name"] == "math")["projected_effective_epochs"]
    assert worth == pytest.approx(16.39, abs=0.3)
    assert f"math is read {facts['sources'][0]['projected_epochs']:,.1f} times (worth {worth:.1f} of new data)" in (
        " ".join(facts["headlines"])
    )


def test_a_source_that_is_read_up_is_named_and_four_have_a_table(ids_job: ol.Job, tmp_path: Path) -> None:
    once = ids_job.replace(mixture=ol.Mixture(stopping="all_exhausted_without_replacement"))
    facts = explained(written(tmp_path, once), "--steps", 30, "--no-measure")
    forecast = {source["name"]: source["forecast"]["read_up"] for source in facts["sources"]}
    with ol.launch(once, runtime="inline") as service:
        last = {s.source: step.index for step in service.client() for b in step.microbatches for s in b.meta.sample_ids}
    assert all(abs(forecast[name] - step) <= 1 for name, step in last.items())
    assert "read up at step" in " ".join(facts["headlines"])
    few = [ids_job.sources[0].replace(name=f"s{n}", weight=None) for n in range(4)]
    shown = call("explain", written(tmp_path, ids_job.replace(sources=few)), "--steps", 2, "--no-measure", "--html",
                 tmp_path / "page.html")  # fmt: skip
    assert shown.exit_code == 0 and "steps at which epochs begin" in shown.stdout and "sixteenth" in shown.stdout
    assert "Steps at which epochs begin" in (tmp_path / "page.html").read_text()


def test_a_mixture_that_follows_repetitions_is_planned_as_any_other(ids_job: ol.Job, tmp_path: Path) -> None:
    path = written(tmp_path, ids_job.replace(mixture=ol.Mixture(learn="repetition"), lag=5))
    facts = explained(path, "--steps", 20, "--no-measure")
    assert facts["steps"] == 20 and not any("learns" in note for note in facts["notes"])
