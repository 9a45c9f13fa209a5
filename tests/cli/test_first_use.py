"""What a new user meets: own files of the wrong kind, mistakes in a job file, Ctrl-C, too few file descriptors."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from overlord.cli.main import app

OWN = "{kind: text, column: ids, tokenized: true}"


def job(folder: Path, path: str, sample: str = OWN, more: str = "", batch: str = "", tail: str = "") -> Path:
    file = folder / "job.yaml"
    file.write_text(
        f"sources:\n  - name: s\n    path: {path}\n    sample: {sample}\n{more}"
        f"batch: {{context_length: 64, global_samples: 16{batch}}}\n{tail}"
    )
    return file


def lines(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def good(count: int) -> list[str]:
    return [json.dumps({"ids": list(range(1, 4 + n % 9))}) for n in range(count)]


def run(file: Path, cache: str, *options: object) -> Any:
    words = ["run", str(file), "--runtime", "inline", "--cache", cache, "--steps", "4", *map(str, options)]
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize(
    ("name", "content", "more", "words"),
    [
        ("d/a.csv", "text,label\nhello,1\n", "", ["holds 1 file (a.csv)", "CSV and TSV are not read"]),
        ("d/a.bin", "hello", "", ["holds 1 file (a.bin)", "set format"]),
        ("d/a.jsonl", '{"ids": [1]}\n', "    format: parquet\n", ["none is of format 'parquet'", "'jsonl'"]),
        ("d/a.json", '[{"ids": [1]}, {"ids": [2]}]', "", ["holds a JSON array", "one object a line"]),
        ("d/a.json", '[\n {\n "ids": [1]\n }\n]', "", ["holds a JSON array"]),
        ("d/a.jsonl", "this is no json\nnor this\n", "", ["line 1 begins with 'this is no json'"]),
    ],
)
def test_files_of_another_kind_are_named(name, content, more, words, tmp_path: Path, cache: str) -> None:
    lines(tmp_path / name, [content])
    outcome = run(job(tmp_path, "d", more=more), cache)
    assert outcome.exit_code == 2, outcome.stderr
    assert "source 's'" in outcome.stderr
    for word in words:
        assert word in outcome.stderr


def test_bytes_that_are_no_text_are_escaped(tmp_path: Path, cache: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xfe\x81\x1b\xff\n")
    outcome = run(job(tmp_path, "a.jsonl"), cache)
    assert outcome.exit_code == 2 and r"not UTF-8 (byte 0 of line 1 is b'\xfe')" in outcome.stderr


def test_a_pattern_that_matches_nothing_tells_what_is_there(tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "d/part-1.jsonl", good(3))
    outcome = run(job(tmp_path, "d/*.parquet"), cache)
    assert outcome.exit_code == 2 and "(part-1.jsonl)" in outcome.stderr and "Check the pattern" in outcome.stderr


def test_a_column_of_another_kind_ends_the_launch(tmp_path: Path, cache: str, demo_files) -> None:
    pq.write_table(pa.table({"text": ["hello"] * 64, "none": pa.nulls(64, pa.string())}), tmp_path / "a.parquet")
    tail = f"tokenizer: {demo_files.tokenizer}\n"
    for sample, reason in (
        ("{kind: text, column: none}", "column 'none' is missing or null in this row"),
        ("{kind: image_text, image: text, text: text}", "'hello' is neither base64 nor a data: URL"),
    ):
        outcome = run(job(tmp_path, "a.parquet", sample, tail=tail), cache)
        assert outcome.exit_code == 2, outcome.stderr
        assert "all of the first 64 rows" in outcome.stderr and reason in outcome.stderr


def test_the_tolerance_is_judged_at_the_end_too(tmp_path: Path, cache: str) -> None:
    rows = good(100)
    rows[7::20] = ["{broken"] * len(rows[7::20])
    lines(tmp_path / "a.jsonl", rows)
    outcome = run(job(tmp_path, "a.jsonl"), cache, "--json")
    assert outcome.exit_code == 1
    assert "its tolerance of 0.01 allows 1" in outcome.stderr
    summary = json.loads(outcome.stdout)  # the figures are there all the same
    assert summary["steps"] == 4 and len(summary["over_tolerance"]) == 1
    assert run(job(tmp_path, "a.jsonl", more="    tolerance: 0.1\n"), cache).exit_code == 0


def test_all_mistakes_of_a_job_file_are_told_at_once(tmp_path: Path, cache: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "sources:\n"
        "  - {name: a, path: a, weigth: 3, sample: {kind: text, colunm: text}}\n"
        "  - {name: b, sample: {kind: text, column: ids, tokenized: true}}\n"
        "mixtur: {}\n"
        "batch: {context_length: 0, global_samples: 16}\n"
        "seed: x\n"
        "launch: {steps: 0, mehs: 3}\n"
    )
    outcome = run(file, cache)
    assert outcome.exit_code == 2
    told = outcome.stderr.splitlines()
    assert len(told) == 8 and all(line.startswith(f"error: {file}:") for line in told)
    for word in ("weigth", "colunm", "path", "mixtur", "context_length", "seed", "steps", "mehs"):
        assert any(word in line for line in told), word


def test_all_that_is_wrong_with_sources_tokenizer_and_mesh_is_told_at_once(tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "c/a.jsonl", good(3))
    file = tmp_path / "job.yaml"
    file.write_text(
        "sources:\n"
        "  - {name: a, path: nowhere-a, sample: {kind: text, column: text}}\n"
        f"  - {{name: b, path: nowhere-b, sample: {OWN}}}\n"
        "  - {name: c, path: c, sample: {kind: text, column: idds, tokenized: true}}\n"
        "tokenizer: nowhere.json\n"
        "batch: {context_length: 64, global_samples: 16}\n"
        "launch: {mesh: dp=512, steps: 3}\n"
    )
    for command in (["run", str(file)], ["serve", str(file)], ["explain", str(file)]):
        outcome = CliRunner().invoke(app, [*command, "--cache", cache])
        assert outcome.exit_code == 2
        told = [line for line in outcome.stderr.splitlines() if not line.startswith("starting ")]
        ranks = ["512 ranks"] if command[0] == "run" else []  # trainers of a service live elsewhere
        words = [*ranks, "nowhere.json", "source 'a'", "source 'b'", "has no column 'idds'"]
        assert len(told) == len(words), told  # no source was opened by a service
        for word, line in zip(words, told, strict=True):
            assert word in line


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "overlord", *map(str, words)]


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_its_figures(tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "a.jsonl", good(2000))
    words = command("run", job(tmp_path, "a.jsonl"), "--steps", 1_000_000, "--cache", cache, "--json")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        assert "Traceback" not in line
        if line.startswith("steps:"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130 and "Traceback" not in err, err
    summary = json.loads(out)
    assert summary["interrupted"] and f"Interrupted after {summary['steps']} of" in " ".join(summary["notes"])


@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_ctrl_c_is_heard_while_modules_are_imported(after_s: float, tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "a.jsonl", good(200))
    words = command("run", job(tmp_path, "a.jsonl"), "--steps", 1_000_000, "--cache", cache)
    begun = (
        "import sys, runpy; sys.argv = sys.argv[1:]; "
        "sys.addaudithook(lambda e, of: e == 'import' and of[0] == 'overlord.cli.main' and print('b', flush=True)); "
        "runpy.run_module('overlord', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", begun, *words[2:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "b\n"
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130 and "Traceback" not in err, err


def limited(soft: int, hard: int) -> Any:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_file_descriptors_are_named_with_what_to_do(tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "a.jsonl", good(200))
    words = command("run", job(tmp_path, "a.jsonl"), "--steps", 3, "--mesh", "dp=4", "--cache", cache)
    few = subprocess.run(words, preexec_fn=limited(64, 64), capture_output=True, text=True, timeout=120, check=False)
    assert few.returncode == 2, few.stderr
    assert "Traceback" not in few.stderr
    assert "64 files" in few.stderr and "ulimit -n" in few.stderr and "at least 144" in few.stderr


@pytest.mark.slow
def test_the_soft_limit_of_descriptors_is_raised(tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "a.jsonl", good(200))
    words = command("run", job(tmp_path, "a.jsonl"), "--steps", 3, "--mesh", "dp=4", "--cache", cache)
    enough = subprocess.run(
        words, preexec_fn=limited(48, 4096), capture_output=True, text=True, timeout=120, check=False
    )
    assert enough.returncode == 0, enough.stderr
    assert os.path.isdir(cache)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("d/own_rows.jsonl", "own-rows.jsonl"),
        ("dd/*.jsonl", "d"),
        ("s_/*.jsonl", "s"),  # the name of the source, too
        ("d/*.parquet", None),
        ("elsewhere/x.jsonl", None),
        ("d/x.jsonl", None),
    ],
)
def test_a_path_that_leads_nowhere_gets_a_suggestion(path: str, meant: str | None, tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "d" / "own-rows.jsonl", good(20))
    (tmp_path / "s").mkdir()
    outcome = run(job(tmp_path, path), cache)
    assert outcome.exit_code == 2 and "job.yaml:2: source 's': " in outcome.stderr
    assert ("Did you mean" in outcome.stderr) == (meant is not None)
    assert meant is None or f"Did you mean {meant!r}?" in outcome.stderr


def test_a_number_out_of_range_is_refused_like_any_other_mistake(tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "a.jsonl", good(20))
    file = job(tmp_path, "a.jsonl")
    outcome = run(file, cache, "--steps", 0)
    assert (outcome.exit_code, outcome.stderr) == (2, "error: --steps is 0, which is out of range. Give 1 or more.\n")
    outcome = CliRunner().invoke(app, ["sources", "preview", str(file), "--rows", "1001"])
    assert (outcome.exit_code, "--rows is 1001" in outcome.stderr, "1 to 1000" in outcome.stderr) == (2, True, True)


@pytest.mark.parametrize(
    ("tokenizer", "sample", "words"),
    [
        ("gpt2", "{text: ids}", ["job.yaml:5: tokenizer: ", "on the Hub is not downloaded", "save_pretrained(FOLDER)"]),
        (None, "{kind: chat, messages: ids, template: chatlm}", ["job.yaml:2: source 's':", "Did you mean 'chatml'?"]),
    ],
)
def test_mistakes_in_tokenizers_and_templates(tokenizer, sample, words, demo_files, tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "a.jsonl", good(20))
    file = job(tmp_path, "a.jsonl", sample, more=f"tokenizer: {tokenizer or demo_files.tokenizer}\n")
    outcome = run(file, cache)
    assert outcome.exit_code == 2
    assert all(word in outcome.stderr for word in words), outcome.stderr
    assert "Errno" not in outcome.stderr


def test_lint_writes_options_as_the_job_file_has_them(demo_files, tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "a.jsonl", ['{"messages": [{"role": "user", "content": "hello"}]}'] * 20)
    file = job(tmp_path, "a.jsonl", "{kind: chat}", more=f"tokenizer: {demo_files.tokenizer}\n")
    outcome = CliRunner().invoke(app, ["sources", "lint", str(file), "--cache", cache])
    assert outcome.exit_code == 1 and 'write template: "chatml"' in outcome.stdout


@pytest.mark.parametrize(
    ("given", "folder"),
    [("/x/cache", "/x/cache/overlord"), ("x/cache", "~/.cache/overlord"), ("", "~/.cache/overlord")],
)
def test_the_cache_is_in_the_folder_of_the_user_s_caches(given: str, folder: str) -> None:
    code = "from overlord.launch_spec import Launch; print(Launch().cache)"
    environment = os.environ | {"XDG_CACHE_HOME": given}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == folder


@pytest.mark.parametrize(
    "command",
    [
        "run",
        pytest.param("explain", marks=pytest.mark.slow),
        pytest.param("sources preview", marks=pytest.mark.slow),
        pytest.param("sources lint", marks=pytest.mark.slow),
    ],
)
def test_no_command_renders_a_template_that_has_not_been_tried(command, demo_files, tmp_path: Path, cache: str) -> None:
    lines(tmp_path / "a.jsonl", ['{"messages": [{"role": "user", "content": "hello"}]}'] * 20)
    doubled = "{% set n = namespace(x='a') %}{% for _ in range(31) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
    (tmp_path / "large.jinja").write_text(doubled)  # 2 GiB
    sample = "{kind: chat, template: large.jinja}"
    file = job(tmp_path, "a.jsonl", sample, more=f"tokenizer: {demo_files.tokenizer}\n")
    outcome = CliRunner().invoke(app, [*command.split(), str(file), "--cache", cache])
    assert outcome.exit_code == 2, outcome.stdout
    assert "a chat template of source 's', needed more than 2 GiB of memory" in outcome.stderr
