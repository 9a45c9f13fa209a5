"""Strategies, meshes and mixtures that learn, in job files and on the command line."""

from __future__ import annotations

import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.errors import SpecError
from overlord.job_files import JobFile, LaunchOptions, dump_job_yaml, load_job_file
from overlord.planning.strategies import _KINDS as STRATEGIES
from overlord.planning.strategies import name_of

JOB = """\
sources:
  - {name: web, path: web/, sample: {kind: text, column: ids, tokenized: true}}
  - {name: code, path: code/, sample: {kind: text, column: ids, tokenized: true}}
batch: {context_length: 64, global_samples: 8}
"""
MESH = ol.ClientPlaceTree(dp=2, cp=2)


def load(folder: Path, more: str) -> JobFile:
    path = folder / "job.yaml"
    path.write_text(JOB + more)
    return load_job_file(path)


def refusal(folder: Path, more: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(folder, more)
    return str(caught.value).replace(f"{folder}/", "")


def buffer(step: int = 0) -> Any:
    return ol.summary_buffer({"web": [60, 9, 30, 3], "code": [64, 1]}, context_length=64, step=step)


# ---- what a file may say


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("vanilla", "vanilla"),
        ("hdp", "hdp"),
        ("{hdp: }", "hdp"),
        (
            "{backbone_balance: {method: karmarkar_karp, objective: sum, level: inter, broadcast: TP}}",
            "backbone_balance",
        ),
        ("{backbone_balance: {cost: tokens, group_size: 1, reorder: true}}", "backbone_balance"),
        ("{backbone_balance: {cost: {alpha: 1e-7, beta: 0.002, gamma: 0.3}}}", "backbone_balance"),
        ("{long_short: {threshold: 30, cost: {causal_lm: {layers: 32, hidden: 4096}}}}", "long_short"),
        ("{long_short: {cost: {moe: {layers: 4, hidden: 64, experts: 8, top_k: 2, expert_ffn: 128}}}}", "long_short"),
        ("{vlm_hybrid: {encoder: vit_2b, backbone: quadratic, scope: group, split: true}}", "vlm_hybrid"),
        ("{vlm_hybrid: {encoder: {vit: {layers: 24, hidden: 1024, frozen: true}}}}", "vlm_hybrid"),
        ("{hdp: {equal_counts: true, broadcast: [tp]}}", "hdp"),
        ("{curriculum: [[0, vanilla], [1000, {long_short: {threshold: 8}}]]}", "curriculum"),
    ],
)
def test_a_strategy_plans_and_reads_back(tmp_path: Path, written: str, name: str) -> None:
    found = load(tmp_path, f"launch: {{strategy: {written}}}\n")
    assert found.launch.strategy is not None
    assert name_of(found.launch.strategy) == name
    plan = found.launch.strategy(buffer(), MESH)
    assert isinstance(plan, ol.LoadingPlan | dict)
    again = tmp_path / "again.yaml"
    again.write_text(dump_job_yaml(found.job, found.launch))
    assert load_job_file(again).launch == found.launch


def test_options_reach_the_strategy(tmp_path: Path) -> None:
    found = load(tmp_path, "launch: {strategy: {backbone_balance: {broadcast: [TP], cost: tokens, objective: sum}}}\n")
    assert found.launch.strategy is not None
    plan = found.launch.strategy(buffer(), MESH)
    assert isinstance(plan, ol.LoadingPlan)
    assert plan.broadcast == ("TP",)
    by_hand = ol.strategies.backbone_balance(ol.costs.tokens, objective="sum", broadcast=["TP"])(buffer(), MESH)
    assert isinstance(by_hand, ol.LoadingPlan)
    assert plan.digest == by_hand.digest


def test_a_curriculum_changes_at_its_steps(tmp_path: Path) -> None:
    found = load(tmp_path, "launch: {strategy: {curriculum: [[0, vanilla], [5, hdp]]}}\n").launch.strategy
    assert found is not None
    axes = [plan.axis for plan in (found(buffer(step), MESH) for step in (4, 5)) if isinstance(plan, ol.LoadingPlan)]
    assert axes == ["DP", "CP"]


def test_no_strategy_is_the_default(tmp_path: Path) -> None:
    found = load(tmp_path, "")
    assert found.launch.strategy is None


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "curriculum"])
def test_a_name_in_a_file_is_the_strategy_of_python_with_its_defaults(tmp_path: Path, name: str) -> None:
    made = getattr(ol.strategies, name)()
    assert load(tmp_path, f"launch: {{strategy: {name}}}\n").launch.strategy == made
    assert {key: getattr(made, key) for key in type(made).model_fields} == {
        key: parameter.default for key, parameter in inspect.signature(getattr(ol.strategies, name)).parameters.items()
    }


@pytest.mark.parametrize(
    "strategy",
    [
        ol.strategies.hdp(),
        ol.strategies.hdp(ol.costs.tokens, equal_counts=True, broadcast="tp"),
        ol.strategies.hdp(objective="lockstep", blocks="any"),
        ol.strategies.hdp(offload=ol.costs.Offload(32, 153_000, 54e9, ol.costs.CostModel(1.55e-8, 4.8e-4), 7.0)),
        ol.strategies.backbone_balance(ol.costs.causal_lm(32, 4096, recompute=True), objective="sum"),
        ol.strategies.vlm_hybrid(ol.costs.vit(layers=24, hidden=1024), ol.costs.CostModel(1e-7, 0.002, 0.3)),
        ol.strategies.curriculum([(0, ol.strategies.vanilla()), (9, ol.strategies.long_short(threshold=8))]),
    ],
)
def test_a_strategy_made_in_python_goes_into_a_file_and_comes_back(tmp_path: Path, strategy: Any) -> None:
    path = tmp_path / "again.yaml"
    path.write_text(dump_job_yaml(load(tmp_path, "").job, LaunchOptions(strategy=strategy)))
    assert load_job_file(path).launch.strategy == strategy


@pytest.mark.parametrize(
    "strategy",
    [
        lambda buffer, tree: None,
        ol.strategies.hdp(lambda lengths: lengths),
        ol.strategies.hdp(ol.costs.scaled(ol.costs.causal_lm(2, 64), 3)),
        ol.strategies.backbone_balance(method=lambda *given: None),
        ol.strategies.curriculum([(0, lambda buffer, tree: None)]),
    ],
)
def test_a_strategy_that_is_python_does_not_go_into_a_file(tmp_path: Path, strategy: Any) -> None:
    with pytest.raises(SpecError, match=r"YAML cannot hold.*would not give the same plans.*Python file"):
        dump_job_yaml(load(tmp_path, "").job, LaunchOptions(strategy=strategy))


# ---- what it may not say


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("hpd", ["job.yaml:5: launch: strategy: there is no strategy 'hpd'", "Did you mean 'hdp'?"]),
        ("{hdpp: {}}", ["there is no strategy 'hdpp'", "Strategies: vanilla,"]),
        ("8", ["launch: strategy is 8"]),
        ("{}", ["holds nothing"]),
        ("{hdp: {}, vanilla: {}}", ["holds ['hdp', 'vanilla']; only one can decide"]),
        ("{vanilla: {cost: tokens}}", ["strategy.vanilla.cost: unknown key"]),
        ("{hdp: {equal_count: true}}", ["strategy.hdp.equal_count: unknown key", "Did you mean 'equal_counts'?"]),
        ("{hdp: {equal_counts: 3}}", ["strategy.hdp.equal_counts is 3", "true or false"]),
        ("{hdp: 3}", ["strategy.hdp is 3"]),
        ("{hdp: {blocks: odd}}", ["strategy.hdp.blocks is 'odd'", "aligned"]),
        ("{hdp: {offload: 0.5}}", ["strategy.hdp.offload is 0.5", "layers, act_bytes_per_token, bandwidth and time"]),
        (
            "{hdp: {offload: {layers: 4, act_bytes_per_token: 9, bandwidth: 1}}}",
            ["strategy.hdp.offload.time: missing (Milliseconds of the forward of one layer)"],
        ),
        (
            "{hdp: {offload: {layers: 4, act_bytes_per_token: 9, bandwidth: 0, time: {beta: 1}}}}",
            ["strategy.hdp.offload", "bandwidth is 0.0"],
        ),
        ("{backbone_balance: {objective: summ}}", ["strategy.backbone_balance.objective is 'summ'", "mean 'sum'?"]),
        ("{backbone_balance: {method: magic}}", ["expected 'greedy', 'karmarkar_karp' or 'zigzag'"]),
        ("{backbone_balance: {group_size: 0}}", ["group_size is 0", "at least 1"]),
        ("{backbone_balance: {broadcast: [PP]}}", ["broadcast[0] is 'PP'", "'TP', 'CP' or 'DP'"]),
        ("{backbone_balance: {broadcast: 3}}", ["broadcast is 3", "list of axes"]),
        ("{backbone_balance: {cost: lama_12b}}", ["no cost model 'lama_12b'", "Did you mean 'llama_12b'?"]),
        ("{backbone_balance: {cost: 3}}", ["strategy.backbone_balance.cost is 3"]),
        ("{backbone_balance: {cost: {}}}", ["nothing is given"]),
        ("{backbone_balance: {cost: {preset: tokens, alpha: 1}}}", ["preset and alpha are both given"]),
        ("{backbone_balance: {cost: {alpha: 0}}}", ["alpha and beta are both 0"]),
        ("{backbone_balance: {cost: {beta: -1}}}", ["cost.beta is -1", "cannot be negative"]),
        ("{backbone_balance: {cost: {causal_lm: {layers: 32}}}}", ["causal_lm.hidden: missing"]),
        ("{backbone_balance: {cost: {causal_lm: {layers: x, hidden: 8}}}}", ["causal_lm.layers is 'x'", "a number"]),
        ("{backbone_balance: {cost: {causal_lm: {layers: 0, hidden: 8}}}}", ["layers is 0", "at least 1"]),
        ("{backbone_balance: {cost: {causal_lm: {layer: 1, hidden: 8}}}}", ["layer: unknown key", "mean 'layers'?"]),
        ("{backbone_balance: {cost: {causal_lm: 7}}}", ["causal_lm is 7", "layers, hidden"]),
        ("{vlm_hybrid: {scope: groop}}", ["vlm_hybrid.scope is 'groop'", "Did you mean 'group'?"]),
        ("{long_short: {threshold: 0}}", ["long_short.threshold is 0"]),
        ("curriculum", ["at least one stage", "[[0, backbone_balance], [1000, long_short]]"]),
        ("{curriculum: [[1, hdp]]}", ["strategy.curriculum[0][0] is 1", "at 0"]),
        ("{curriculum: [[0, hdp], [0, vanilla]]}", ["curriculum[1][0] is 0", "1 or later"]),
        ("{curriculum: [[0, hdp, 3]]}", ["curriculum[0]", "not a stage"]),
        ("{curriculum: [[0, {hdp: {cost: x}}]]}", ["curriculum[0][1].hdp.cost: there is no cost model 'x'"]),
    ],
)
def test_a_wrong_strategy_is_refused_by_name(tmp_path: Path, written: str, words: list[str]) -> None:
    text = refusal(tmp_path, f"launch: {{strategy: {written}}}\n")
    assert text.startswith("job.yaml:5: launch: ")
    assert "\n" not in text and "pydantic" not in text
    for word in words:
        assert word in text


# ---- Python files

PYTHON = """\
import overlord as ol
sources = [ol.Source("web", "web/", sample=ol.Text("ids", tokenized=True))]
job = ol.Job(sources, batch=ol.Batch(64, global_samples=8))
strategy = {strategy}
"""


def test_a_python_file_holds_a_strategy_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(PYTHON.format(strategy="ol.strategies.backbone_balance(lambda s: s * 2)"))
    found = load_job_file(path).launch.strategy
    assert isinstance(found, ol.strategies.backbone_balance) and found.cost(3) == 6
    path.write_text(PYTHON.format(strategy='{"hdp": {"equal_counts": True}}'))
    assert load_job_file(path).launch.strategy == ol.strategies.hdp(equal_counts=True)
    path.write_text(PYTHON.format(strategy="8"))
    with pytest.raises(SpecError, match="strategy is 8: this must be a strategy, its name, or a function"):
        load_job_file(path)
    path.write_text(PYTHON.format(strategy="'hpd'"))
    with pytest.raises(SpecError, match="no strategy 'hpd'"):
        load_job_file(path)


# ---- meshes


@pytest.mark.parametrize(
    "mesh",
    [
        ol.ClientPlaceTree(dp=4, dp_replicate=2, ep=2),
        ol.ClientPlaceTree(pp=2, dp=2, vpp=2, microbatch_group=4, order="dp-pp-cp-tp"),
        ol.ClientPlaceTree(dp=2, tp=2, modules={"encoder": ol.ClientPlaceTree(dp=4)}),
    ],
)
def test_every_mesh_reads_back(tmp_path: Path, mesh: ol.ClientPlaceTree) -> None:
    path = tmp_path / "again.yaml"
    path.write_text(dump_job_yaml(load(tmp_path, "").job, LaunchOptions(mesh=mesh)))
    assert load_job_file(path).launch.mesh == mesh


# ---- mixtures that learn


@pytest.mark.parametrize(
    "learn",
    [
        "odm",
        "{method: odm, warmup: 10, floor: 0.05}",
        "{method: skill_it, graph: {web: {code: 0.4}}, window: 3}",
        "{method: doremi, eta: 0.5, every: 4}",
    ],
)
def test_a_mixture_that_learns_reads_back(tmp_path: Path, learn: str) -> None:
    job = load(tmp_path, f"mixture: {{weights: {{web: 2, code: 1}}, learn: {learn}}}\n").job
    assert job.mixture.learn is not None
    path = tmp_path / "again.yaml"
    path.write_text(dump_job_yaml(job))
    assert load_job_file(path).job == job


@pytest.mark.parametrize("learn", ["function", "{method: function}", "{method: function, fn: mine}"])
def test_a_rule_of_your_own_needs_python(tmp_path: Path, learn: str) -> None:
    text = refusal(tmp_path, f"mixture: {{learn: {learn}}}\n")
    assert "job.yaml:5: mixture.learn: a rule of your own is a Python function" in text
    assert "Python file" in text
    job = load(tmp_path, "").job
    with pytest.raises(SpecError, match=r"mixture.learn: its rule is the Python function '.*mine'.*Python file"):
        dump_job_yaml(job.replace(mixture=ol.Mixture(learn=ol.Learn("function", fn=mine))))


def mine(step: int, metrics: Any) -> dict[str, float]:
    return {"web": 1.0, "code": 1.0}


# ---- the command line


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def ids_file(ids_job: ol.Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text(dump_job_yaml(ids_job, LaunchOptions(mesh=ol.ClientPlaceTree(dp=2, cp=2, tp=2), steps=4)))
    return path


@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "strategy", ["hdp", "{hdp: {equal_counts: true}}", "{backbone_balance: {broadcast: [TP, CP]}}"]
)
def test_run_counts_every_sample_once_under_any_strategy(
    ids_file: Path, cache: str, strategy: str, runtime: str
) -> None:
    options = ("--runtime", runtime, "--cache", cache, "--json")
    plain = json.loads(call("run", ids_file, *options).stdout)
    outcome = call("run", ids_file, "--strategy", strategy, *options)
    assert outcome.exit_code == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    for key in ("samples", "tokens", "length_histogram", "realised_per_step"):
        assert found[key] == plain[key]
    assert found["digests"]["order"] == plain["digests"]["order"]
    assert found["digests"]["plan"] != plain["digests"]["plan"]


def test_the_command_line_wins_over_the_file(ids_file: Path, cache: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(ids_file.read_text().replace("strategy: null", "strategy: vanilla"))
    options = ("--runtime", "inline", "--cache", cache, "--json")
    as_written, other = (json.loads(call("run", path, *more, *options).stdout) for more in ((), ("--strategy", "hdp")))
    assert as_written["imbalance_planned"] == as_written["imbalance_round_robin"]
    assert other["load_heatmap"]["axis"] == "CP"


def test_run_refuses_a_mixture_that_learns(ids_file: Path, cache: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    text = ids_file.read_text()
    assert "mixture: {level: sample, stopping: never_exhausted}" in text
    learning = text.replace("stopping: never_exhausted}", "stopping: never_exhausted, learn: odm}")
    path.write_text(learning)
    outcome = call("run", path, "--runtime", "inline", "--cache", cache)
    assert outcome.exit_code == 2
    assert "mixture.learn is 'odm'" in outcome.stderr
    assert "overlord serve" in outcome.stderr and "overlord explain" in outcome.stderr


@pytest.mark.parametrize("command", ["run", "serve", "explain"])
def test_a_wrong_strategy_is_one_paragraph(command: str, ids_file: Path) -> None:
    outcome = call(command, ids_file, "--strategy", "hpd")
    assert outcome.exit_code == 2
    assert "error: --strategy: there is no strategy 'hpd'" in outcome.stderr
    assert "Did you mean 'hdp'?" in outcome.stderr


# ---- the document

DOCUMENT = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


def test_the_documents_examples_load_and_run(tmp_path: Path) -> None:
    assert len(blocks("yaml")) == 1 and len(blocks("python")) == 7
    assert load(tmp_path, blocks("yaml")[0]).launch.strategy is not None
    for text in blocks("python")[:3]:
        names: dict[str, Any] = runpy.run_path(str(in_file(tmp_path, text)))
        assert isinstance(names.get("plan") or names["plans"]["backbone"], ol.LoadingPlan)


def in_file(folder: Path, text: str) -> Path:
    path = folder / "example.py"
    path.write_text(text)
    return path


def test_the_document_names_every_strategy_and_option() -> None:
    known = {*STRATEGIES}
    for kind in STRATEGIES.values():
        known |= {*kind.model_fields}
    assert [
        name for name in sorted(known - {"encoder", "backbone", "reorder", "stages"}) if f"`{name}`" not in DOCUMENT
    ] == []
