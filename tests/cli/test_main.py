"""The commands: what they print, their exit codes, and one clear paragraph for what is wrong."""

from __future__ import annotations

import html
import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.cli.running import MemoryWatch, processes_of
from overlord.job_files import LaunchOptions, dump_job_yaml, load_job_file
from overlord.launch_spec import CLUSTER_KEYS


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def result_of(*arguments: object) -> dict[str, Any]:
    """Run a command with --json; standard output must be one object and nothing else."""
    outcome = call(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)


@pytest.fixture(scope="module")
def job_file(ids_job: ol.Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    launch = LaunchOptions(mesh=ol.ClientPlaceTree(dp=2, cp=2), steps=6)
    path.write_text(dump_job_yaml(ids_job, launch))
    return path


def variant(job_file: Path, folder: Path, old: str, new: str) -> Path:
    text = job_file.read_text()
    assert old in text
    path = folder / "variant.yaml"
    path.write_text(text.replace(old, new))
    return path


def test_run_counts_what_the_clients_received(job_file: Path) -> None:
    found = result_of("run", job_file, "--runtime", "inline")
    assert found["steps"] == 6  # launch.steps of the file
    assert found["mesh"] == "pp=1 dp=2 cp=2 tp=1"
    assert found["samples"] == 66 == sum(step["samples"] for step in found["per_step"])
    assert found["tokens"] == sum(step["tokens"] for step in found["per_step"])
    assert [source["name"] for source in found["sources"]] == ["a", "b", "c"]
    assert [source["samples"] for source in found["sources"]] == [33, 11, 22]
    assert [source["planned_share"] for source in found["sources"]] == pytest.approx([1 / 2, 1 / 6, 1 / 3])
    assert [source["epochs"] for source in found["sources"]] == pytest.approx([33 / 90, 11 / 40, 22 / 64])
    assert sum(count for _, _, count in found["length_histogram"]) == 66
    assert 0 < found["padding"] < 0.2
    assert 1 <= found["imbalance_planned"] <= found["imbalance_round_robin"]
    assert found["peak_memory_bytes"] > 0


def test_both_runtimes_give_the_same_digests(job_file: Path) -> None:
    inline, local = (result_of("run", job_file, "--runtime", name, "--steps", 4) for name in ("inline", "local"))
    assert local["digests"] == inline["digests"]
    assert [one | {"waited_s": 0} for one in local["sources"]] == [one | {"waited_s": 0} for one in inline["sources"]]


def test_run_prints_tables_and_writes_the_report(job_file: Path, tmp_path: Path) -> None:
    outcome = call("run", job_file, "--runtime", "inline", "--report", tmp_path / "new" / "report.html")
    assert outcome.exit_code == 0
    assert "mixture, by sample" in outcome.stdout
    assert "round-robin" in outcome.stdout
    assert "steps: 6 of 6" in outcome.stderr
    assert (tmp_path / "new" / "report.html").read_text().startswith("<!doctype html>")


def test_run_writes_a_report_beside_the_job_unless_it_is_told_not_to(job_file: Path, tmp_path: Path) -> None:
    run = ("run", variant(job_file, tmp_path, "steps: 6", "steps: 2"), "--runtime", "inline")
    page = tmp_path / "variant.report.html"
    assert result_of(*run, "--no-report")["report"] is None and not page.exists()
    found = result_of(*run)
    assert found["report"] == str(page)
    text = page.read_text()
    assert set(found["made"]) == {"date", "host", "version", "command"} and socket.gethostname() in text
    assert found["made"]["version"] in text and "UTC" in text
    assert f"<code>{html.escape(found['made']['command'])}" in text
    told = r"Steps waited for sources: \w|No source was waited for long"  # which, is a matter of time
    assert re.search(told, text) and all(one["waited_s"] >= 0 for one in found["sources"])
    both = call(*run, "--report", tmp_path / "x.html", "--no-report")
    assert both.exit_code == 2 and "were both given" in both.stderr
    outcome = call(*run)
    assert outcome.exit_code == 0 and str(page) in outcome.stdout.replace("\n", "")
    assert re.search(told, outcome.stderr)


def test_run_says_when_it_chose_the_steps(job_file: Path, tmp_path: Path) -> None:
    path = variant(job_file, tmp_path, "steps: 6", "steps: null")
    outcome = call("run", path, "--runtime", "inline")
    assert outcome.exit_code == 0
    assert "neither --steps nor launch.steps is given; running 100 steps" in outcome.stderr


def test_a_finite_job_ends_by_itself(job_file: Path, tmp_path: Path) -> None:
    path = variant(job_file, tmp_path, "stopping: never_exhausted", "stopping: all_exhausted_without_replacement")
    found = result_of("run", path, "--runtime", "inline", "--steps", 1000)
    assert found["samples"] == 90 + 40 + 64
    assert [source["epochs"] for source in found["sources"]] == [1, 1, 1]
    assert found["notes"] == [f"The stream ended by itself after {found['steps']} of 1000 steps."]


def test_a_store_used_again_is_told(job_file: Path, tmp_path: Path) -> None:
    run = ("run", job_file, "--runtime", "inline", "--steps", 2, "--store", tmp_path / "store")
    assert result_of(*run)["notes"] == []
    again = result_of(*run)
    assert again["strategy"] == "backbone_balance"
    assert "holds a run up to step 2: it stays there as lineage 1, and this one begins another" in again["notes"][0]
    assert len(list((tmp_path / "store").glob("lineage-*"))) == 2
    assert not any("lineage" in note for note in result_of(*run, "--resume")["notes"])


def test_a_store_may_be_named_from_the_working_folder(job_file: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first", "runs/second"):
        result_of("run", job_file, "--runtime", "inline", "--steps", 2, "--store", name)
    sample = result_of("steps", "show", "--store", "runs/first", "--step", 1)["rows"][0]["sample"]
    assert result_of("steps", "show", "--store", "runs/first", "--sample", sample)["step"] == 1
    assert result_of("steps", "diff", "runs/first", "runs/second")["same"]


def test_resume_goes_on_from_the_newest_snapshot(job_file: Path, tmp_path: Path) -> None:
    whole = result_of("run", job_file, "--runtime", "inline", "--steps", 20)
    result_of("run", job_file, "--runtime", "inline", "--steps", 16, "--store", tmp_path / "store")
    rest = result_of(
        "run",
        job_file,
        "--runtime",
        "inline",
        "--steps",
        4,
        "--store",
        tmp_path / "store",
        "--resume",
        "--mesh",
        "dp=1",
    )
    assert [step["index"] for step in rest["per_step"]] == [16, 17, 18, 19]
    assert rest["realised_per_step"] == whole["realised_per_step"][16:]
    assert "training continues with step 16, which is delivered again if a trainer had begun it" in rest["notes"][0]


def test_a_run_writes_a_line_before_it_looks_at_the_sources(tmp_path: Path) -> None:
    """Also where its output is no terminal: the start of a service takes seconds."""
    path = tmp_path / "job.yaml"
    source = "{name: a, path: nowhere.jsonl, sample: {kind: text, column: ids, tokenized: true}}"
    path.write_text(f"sources: [{source}]\nbatch: {{context_length: 8, global_samples: 2}}\n")
    first, second, *_ = call("run", path, "--mesh", "dp=2", "--steps", 1).stderr.splitlines()
    assert first == f"starting {path}: 1 source, mesh pp=1 dp=2 cp=1 tp=1, runtime local"
    assert second.startswith("error: ")


@pytest.mark.parametrize("of", ["client", "DataLoader"])
def test_a_state_file_goes_on_where_the_checkpoint_is(of: str, job_file: Path, tmp_path: Path, cache: str) -> None:
    """Not where the store is, which is ahead of it."""
    run = ("run", job_file, "--runtime", "inline", "--store", tmp_path / "store")
    whole = result_of(*run, "--steps", 8)
    with ol.launch(load_job_file(job_file).job, runtime="inline", cache=cache) as service:
        client = service.client(0)
        for _ in range(6):
            next(client)
        saved = client.state_dict()
    (tmp_path / "state.json").write_text(json.dumps(saved if of == "client" else {"stream": json.dumps(saved)}))
    rest = result_of(*run, "--steps", 3, "--state", tmp_path / "state.json")
    step = saved["step"]
    assert [one["index"] for one in rest["per_step"]] == [step, step + 1, step + 2]
    assert rest["realised_per_step"][: 8 - step] == whole["realised_per_step"][step:]
    assert f"it stays there as lineage 1, and this one begins another at step {step}" in rest["notes"][0]
    assert rest["notes"][1].startswith(f"Resumed from the state --state gave: training continues with step {step}, ")


def test_a_state_of_a_stream_that_has_not_begun_begins_it(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"stream": "null"}))
    found = result_of("run", job_file, "--runtime", "inline", "--steps", 1, "--state", tmp_path / "state.json")
    assert [one["index"] for one in found["per_step"]] == [0]
    assert found["notes"] == []


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("[1]", [], "[1] is not a state of overlord"),
        ('{"stream": [1]}', [], "this is not JSON"),
        ('{"stream": "{}"}', [], "{} is not a state of overlord"),
        ('{"version": 0, "step": 3}', [], "the state has version 0"),
        ('{"version": 1, "step": "3"}', [], "is not a state of overlord"),
        ('{"version": 1, "step": 3}', ["--resume", "--store", "s"], "--resume and --state were both given"),
    ],
)
def test_a_file_that_is_no_state_is_refused(
    text: str, more: list[str], message: str, job_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_text(text)
    outcome = call("run", job_file, "--runtime", "inline", "--state", tmp_path / "state.json", *more)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_what_a_file_says_of_a_cluster_waits_for_a_run_on_it(ids_job: ol.Job, tmp_path: Path) -> None:
    launch = LaunchOptions(runtime="ray", address="10.0.0.1:6379", ranks_per_host=8, loader_hosts="per_source")
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(ids_job, launch))
    assert load_job_file(path).launch == launch
    assert result_of("run", path, "--runtime", "inline", "--steps", 1)["runtime"] == "inline"
    there, here = launch.call({"loader_hosts": 3}), launch.call({"runtime": "local"})
    assert [getattr(there, name) for name in CLUSTER_KEYS] == ["10.0.0.1:6379", 8, 3]
    assert [getattr(here, name) for name in CLUSTER_KEYS] == [None, None, None]


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("{ranks_per_host: 8}", "ranks_per_host: 8 is given and runtime is 'local', which has no cluster"),
        ("{runtime: inline, address: auto}", "address: 'auto' is given and runtime is 'inline'"),
        (
            "{runtime: ray, loader_hosts: 0}",
            "loader_hosts is 0: this must be a whole number of at least 1, or per_source",
        ),
        ("{runtime: ray, ranks_per_host: 0}", "ranks_per_host is 0: this must be at least 1"),
        ("{runtime: rai}", "runtime is 'rai'"),
        ("{threads: 0}", "threads is 0: this must be at least 1"),
    ],
)
def test_a_wrong_cluster_in_a_file_is_told_with_its_line(
    launch: str, message: str, ids_job: ol.Job, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    job = dump_job_yaml(ids_job).partition("launch:\n")[0]
    path.write_text(f"{job}launch: {launch}\n")
    outcome = call("run", path)
    assert outcome.exit_code == 2
    assert f"job.yaml:{job.count(chr(10)) + 1}: launch: {message}" in outcome.stderr


def test_a_service_in_this_process_is_not_served(ids_job: ol.Job, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(ids_job, LaunchOptions(runtime="inline")))
    outcome = call("serve", path)
    assert outcome.exit_code == 2
    assert "launch.runtime is 'inline', and no other process can attach" in outcome.stderr


def test_memory_is_that_of_all_processes_here() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        placed = [
            {"role": "planner", "host": socket.gethostname(), "pid": other.pid},
            {"role": "loader host 0", "host": "elsewhere", "pid": 1},
        ]
        status = {"pid": other.pid, "ray": {"placement": placed}}
        assert processes_of(status, {7}) == {os.getpid(), other.pid, 7}
        assert processes_of({"pid": other.pid}, {7}) == {os.getpid(), other.pid}
        small, both = MemoryWatch({other.pid}), MemoryWatch({os.getpid(), other.pid, 1 << 30})
        for watch in (small, both):
            watch.look(now=True)
        assert 0 < small.peak < both.peak
        other.kill()
    both.peak = 0
    both.look(now=True)  # one that is gone takes nothing from the others
    assert both.peak > 0


def test_what_a_python_job_prints_stays_out_of_the_result(ids_job: ol.Job, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    lines = [
        "import overlord as ol",
        "print('hello')",
        "def read(row):",
        "    print('a row')",
        "    return {'tokens': [int(row['n'])]}",
        f"sources = [ol.Source('a', {ids_job.sources[0].path[0]!r}, sample=ol.Custom(read, columns=['n']))]",
        "job = ol.Job(sources, batch=ol.Batch(8, global_samples=4))",
    ]
    path.write_text("\n".join(lines))
    found = result_of("run", path, "--runtime", "inline", "--steps", 2)
    assert found["samples"] == 8
    shown = call("sources", "preview", path, "--rows", 1)
    assert shown.exit_code == 0
    assert "token ids" in shown.stdout
    assert "a row" not in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "{folder}/none.yaml"], "there is no such file"),
        (["run", "{job}", "--mesh", "dp=0"], "dp is 0: it must be a whole number"),
        (["run", "{job}", "--mesh", "dq=2"], "unknown axis 'dq'"),
        (["run", "{job}", "--mesh", "dp=300"], "holds all of them in one process"),
        (["run", "{job}", "--mesh", "cp=3"], "not a multiple of 6"),
        (["run", "{job}", "--prefetch", "0"], "prefetch is 0"),
        (["run", "{job}", "--loaders", "0"], "--loaders is '0': this must be a whole number of at least 1"),
        (["run", "{job}", "--threads", "0"], "threads is 0"),
        (["run", "{job}", "--address", "auto"], "--address: 'auto' is given and runtime is 'inline'"),
        (
            ["run", "{job}", "--ranks-per-host", "2"],
            "--ranks-per-host: 2 is given and runtime is 'inline'",
        ),
        (["run", "{job}", "--loader-hosts", "2"], "--loader-hosts: 2 is given and runtime is 'inline'"),
        (
            ["serve", "{job}", "--runtime", "ray", "--ranks-per-host", "0"],
            "--ranks-per-host is 0: this must be at least 1",
        ),
        (
            ["serve", "{job}", "--runtime", "ray", "--loader-hosts", "all"],
            "--loader-hosts is 'all': this must be a",
        ),
        (["serve", "{job}", "--runtime", "ray", "--address", ""], "--address is '': this must not be empty"),
        (["run", "{job}", "--state", "{folder}/none.json"], "--state {folder}/none.json: there is no such file"),
        (["serve", "{job}", "--state", "{folder}"], "--state {folder}: it cannot be read"),
        (["serve", "{job}", "--state", "{job}"], "this is not JSON"),
        (["run", "{job}", "--resume"], "--resume was given without a store"),
        (["run", "{job}", "--resume", "--store", "{folder}/empty"], "holds no snapshot"),
        (["run", "{job}", "--store", "/dev/null/x"], "the folder cannot be made"),
        (["run", "{job}", "--report", "/dev/null/x.html"], "--report /dev/null/x.html: nothing can be written there"),
        (["serve", "{folder}/none.yaml"], "there is no such file"),
        (["serve", "{job}", "--address-file", "/dev/null/x"], "--address-file /dev/null/x: nothing can be written"),
        (["status", "nonsense"], "'nonsense' is not one"),
        (["status", "unix://{folder}/socket"], "no service answers at unix://"),
        (["sources", "list", "{folder}/none.yaml"], "there is no such file"),
        (["sources", "preview", "{job}", "aa"], "source 'aa' is not in the job"),
        (["sources", "lint", "{folder}/none.yaml"], "there is no such file"),
        (["sources", "measure", "{job}"], "no source has lengths: sidecar"),
        (["sources", "measure", "{job}", "zz"], "source 'zz' is not in the job"),
        (["demo", "--folder", "/dev/null/x"], "the demo's data cannot be written there"),
        (["demo", "--mesh", "dp"], "'dp' is not axis=size"),
        (["schema", "--out", "/dev/null/x"], "nothing can be written there"),
    ],
)
def test_wrong_input_is_one_paragraph_and_exit_code_2(
    arguments: list[str], message: str, job_file: Path, tmp_path: Path
) -> None:
    filled = [part.format(job=job_file, folder=tmp_path) for part in arguments]
    message = message.format(folder=tmp_path)
    if filled[0] == "run":
        filled += ["--runtime", "inline"]
    outcome = call(*filled, "--json")
    assert outcome.exit_code == 2
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in outcome.stderr
    error = json.loads(outcome.stdout)["error"]
    assert message in error["message"]
    assert error["kind"] in ("SpecError", "StateError", "SourceError")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sources:", "sourcs:", "sourcs: unknown key"),
        ("seed: 3", "seed: [3", "this is not plain YAML"),
        ("column: ids", "column: idz", "has no column 'idz'"),
        ("/a\n", "/nowhere\n", "matches no file"),
    ],
)
def test_a_wrong_job_file_is_told_by_every_command(
    old: str, new: str, message: str, job_file: Path, tmp_path: Path
) -> None:
    path = variant(job_file, tmp_path, old, new)
    for command in (["run", path, "--runtime", "inline"], ["sources", "preview", path], ["sources", "list", path]):
        outcome = call(*command)
        assert outcome.exit_code == 2, command
        assert message in outcome.stderr


def test_usage_errors_keep_exit_code_2(job_file: Path) -> None:
    for arguments in (["run"], ["run", job_file, "--steps", "0"], ["run", job_file, "--runtime", "rai"], ["nosuch"]):
        outcome = call(*arguments)
        assert outcome.exit_code == 2
        assert outcome.stdout == ""


def test_a_run_that_fails_has_exit_code_1(job_file: Path, tmp_path: Path) -> None:
    path = variant(job_file, tmp_path, "overlength: split", "overlength: error")
    outcome = call("run", path, "--runtime", "inline", "--json")
    assert outcome.exit_code == 1
    assert json.loads(outcome.stdout)["error"]["kind"] == "PlanError"
    assert "more than context_length=32" in outcome.stderr


def test_ctrl_c_has_exit_code_130(ids_job: ol.Job, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    source = f"ol.Source('a', {ids_job.sources[0].path[0]!r}, sample=ol.Custom(stop, columns=['n']))"
    lines = [
        "import overlord as ol",
        "def stop(row):",
        "    raise KeyboardInterrupt",
        f"job = ol.Job([{source}], batch=ol.Batch(8, global_samples=4))",
    ]
    path.write_text("\n".join(lines))
    outcome = call("run", path, "--runtime", "inline")
    assert outcome.exit_code == 130
    assert outcome.stderr.splitlines()[-1] == "interrupted"


def test_version_and_schema() -> None:
    assert call("version").stdout == f"overlord {ol.__version__}\n"
    assert result_of("version") == {"version": ol.__version__}
    assert result_of("schema")["properties"]["launch"] == {"$ref": "#/$defs/LaunchOptions"}


def test_schema_goes_into_a_file(tmp_path: Path) -> None:
    assert result_of("schema", "--out", tmp_path / "job.json") == {"schema": str(tmp_path / "job.json")}
    assert json.loads((tmp_path / "job.json").read_text())["title"] == "Job"


def test_help_shows_the_commands() -> None:
    outcome = call("--help")
    assert outcome.exit_code == 0
    for name in ("demo", "explain", "run", "serve", "status", "sources", "schema", "version"):
        assert name in outcome.stdout
