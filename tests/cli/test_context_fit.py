"""What the context does to samples, as lint, explain and run tell it; and that lint foretells how a run ends."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.demo.demo_data import DemoFiles
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.cli.options import layout_advice
from overlord.cli.sources import ContextFit, context_words
from overlord.core.draw import apply_overlength
from overlord.core.samples import BAD, SKIP
from overlord.job_files import LaunchOptions, dump_job_yaml
from overlord.reports.summary import NARROW_SPACE
from overlord.transforms.samples.per_sample import Measured


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def result_of(*arguments: object) -> dict[str, Any]:
    outcome = call(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)


def written(folder: Path, *sources: ol.Source, context: int = 64, **changes: Any) -> Path:
    batch = changes.pop("batch", ol.Batch(context, global_samples=16))
    launch = LaunchOptions(**changes.pop("launch", {}))
    path = folder / "job.yaml"
    path.write_text(dump_job_yaml(ol.Job(list(sources), batch=batch, **changes), launch))
    return path


def ids(name: str, folder: Path, lengths: list[int], bad: int = 0, **options: Any) -> ol.Source:
    """Write rows of token ids, the first of which are no JSON."""
    lines = ["{no json"] * bad + [json.dumps({"ids": [7] * n}) for n in lengths[bad:]]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return ol.Source(name, str(folder / f"{name}.jsonl"), sample=ol.Text("ids", tokenized=True), **options)


def errors(path: Path, *options: object) -> list[str]:
    found = json.loads(call("sources", "lint", path, *options, "--json").stdout)["findings"]
    return [finding["message"].replace(NARROW_SPACE, " ") for finding in found if finding["severity"] == "error"]


def notes(found: dict[str, Any]) -> list[str]:
    return [note.replace(NARROW_SPACE, " ") for note in found["notes"]]


# ---- lint foretells a run


@pytest.mark.parametrize(
    ("bad", "tolerance"), [(0, 0.0), (1, 0.0), (1, 0.02), (1, 0.03), (4, 0.09), (4, 0.11), (30, 0.5), (30, 1.0)]
)
def test_lint_says_whether_bad_rows_stop_a_run(bad: int, tolerance: float, tmp_path: Path) -> None:
    source = ids("a", tmp_path, [5] * 40, bad, tolerance=tolerance)
    path = written(tmp_path, source, batch=ol.Batch(64, global_samples=64))
    run = call("run", path, "--runtime", "inline", "--steps", 20)
    stops = run.exit_code == 1
    assert stops == ("bad samples among" in run.stderr)
    told = errors(path)
    assert bool(told) == stops
    assert all("a run would stop" in message for message in told)


def test_one_bad_row_among_few_of_many_is_no_error(tmp_path: Path) -> None:
    path = written(tmp_path, ids("a", tmp_path, [5] * 400, bad=1, tolerance=0.01))
    assert errors(path, "--rows", 20) == []
    path = written(tmp_path, ids("a", tmp_path, [5] * 400, bad=2, tolerance=0.01))
    assert errors(path, "--rows", 20) == [
        "bad: 2 of 20 rows (10 %) are a larger share than tolerance: 0.01; a run would stop after about 101 rows"
    ]


def test_lint_says_where_a_run_finds_nothing_to_draw(tmp_path: Path) -> None:
    path = written(tmp_path, ids("long", tmp_path, [70] * 40), overlength="drop")
    assert errors(path) == [
        "all 40 rows looked at would be skipped (too long for 64 tokens); a run would find nothing to draw"
    ]
    run = call("run", path, "--runtime", "inline", "--steps", 1)
    assert run.exit_code == 1
    assert "has nothing to draw" in run.stderr
    path = written(tmp_path, ids("empty", tmp_path, [0] * 39 + [5]))
    assert errors(path) == []
    (told,) = errors(path, "--rows", 20)
    assert "(empty or filtered out); a run would find nothing to draw, if the others are alike" in told
    path = written(tmp_path, ids("half", tmp_path, [70, 5] * 20), overlength="drop")
    assert errors(path) == []


def test_a_source_that_is_never_drawn_may_hold_nothing(tmp_path: Path) -> None:
    long, short = ids("long", tmp_path, [70] * 40), ids("short", tmp_path, [5] * 40)
    path = written(tmp_path, long, short, overlength="drop", mixture={"short": 1.0})
    assert errors(path) == []
    assert call("run", path, "--runtime", "inline", "--steps", 1).exit_code == 0


def jpeg(side: int, row: int) -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(row).integers(0, 255, (side, side, 3), np.uint8)
    Image.fromarray(noise).save(out, "JPEG")
    return out.getvalue()


def test_the_share_that_is_dropped_is_what_the_stream_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a few large rows (here 9) is no measure of all: one of 28 is not 11 %."""
    monkeypatch.setattr("overlord.cli.sources._LOOKED_AT", 9)
    once = ol.Mixture(stopping="all_exhausted_without_replacement")
    path = written(tmp_path, ids("a", tmp_path, [70] + [5] * 27), mixture=once, overlength="drop")
    expected = "3.6 % of source a (1 of 28 rows) is dropped, since it does not fit into 64 tokens."
    assert expected in notes(result_of("run", path, "--runtime", "inline", "--steps", 9))
    assert expected in notes(result_of("explain", path, "--steps", 9))


@pytest.mark.slow
def test_large_images_are_dropped_and_not_cut(tmp_path: Path, demo_files: DemoFiles) -> None:
    """An image is never cut, whatever happens to text; and one that is never decoded cannot be bad."""
    sides = [320, 64, 64, 64] * 10  # 100 tokens and 4
    images = [jpeg(side, row) for row, side in enumerate(sides)]
    images[0] = images[0][: len(images[0]) // 2]  # the header is whole, and the image is dropped by its size
    pq.write_table(pa.table({"jpg": images, "caption": ["some words"] * 40}), tmp_path / "i.parquet")
    sample = ol.ImageText("jpg", "caption", patch=16, merge=2)
    source = ol.Source("i", str(tmp_path / "i.parquet"), sample=sample, tolerance=0.0)
    path = written(tmp_path, source, tokenizer=str(demo_files.tokenizer))
    found = json.loads(call("sources", "lint", path, "--json").stdout)
    (message,) = [one["message"].replace(NARROW_SPACE, " ") for one in found["findings"]]
    assert message == "25 % of 40 rows have an image, clip or sound longer than context_length: 64 and are dropped"
    ran = result_of("run", path, "--runtime", "inline", "--steps", 1)
    (one,) = ran["sources"]
    assert one["dropped"] > 0
    passed = one["dropped"] + one["samples"]
    (told,) = notes(ran)
    assert re.match(rf"\d+(\.\d+)? % of source i \({one['dropped']} of {passed} rows\) is dropped, since it does", told)
    rows = result_of("sources", "preview", path, "--rows", 2)["sources"]["i"]
    assert [row["dropped"] for row in rows] == [True, False]
    assert "does not fit into the context: dropped" in call("sources", "preview", path).stdout


@pytest.mark.parametrize("rows", [1, 64, 150, 200])
def test_lint_looks_at_as_many_rows_as_it_was_told(rows: int, tmp_path: Path) -> None:
    path = written(tmp_path, ids("a", tmp_path, [5] * 180), ids("b", tmp_path, [5] * 300))
    looked = min(rows, 180) + min(rows, 300)
    assert result_of("sources", "lint", path, "--rows", rows)["looked_at"] == looked
    last = call("sources", "lint", path, "--rows", rows).stdout.splitlines()[-1]
    assert f"{looked:,} of 480 rows looked at (--rows {rows} of every file)" in last


def test_one_is_no_plural(tmp_path: Path) -> None:
    path = written(tmp_path, ids("a", tmp_path, [5] * 40, bad=1, tolerance=0.0))
    assert "1 source: 1 error, 1 warning; 40 of 40 rows" in call("sources", "lint", path).stdout
    assert "1 source of " in call("sources", "list", path).stdout


# ---- explain and run


def test_both_say_what_is_cut(tmp_path: Path) -> None:
    source = ids("a", tmp_path, [8] * 30 + [128] * 10)
    path = written(tmp_path, source)
    sentence = "25 % of source a is cut at 64 tokens, which loses 42 % of its tokens."  # 640 of 1,520
    assert sentence in notes(result_of("explain", path, "--steps", 2))
    assert sentence in notes(result_of("run", path, "--runtime", "inline", "--steps", 2))
    (told,) = json.loads(call("sources", "lint", path, "--json").stdout)["findings"]
    assert told["message"].replace(NARROW_SPACE, " ") == (
        "25 % of 40 rows are longer than context_length: 64 and are cut, which loses 42 % of the tokens"
    )


@pytest.mark.parametrize("lengths", [[8] * 40, [64] * 40])
def test_nothing_is_said_of_samples_that_fit(lengths: list[int], tmp_path: Path) -> None:
    path = written(tmp_path, ids("a", tmp_path, lengths))
    for command in (("explain",), ("run", "--runtime", "inline")):
        assert notes(result_of(*command, path, "--steps", 1)) == []


def test_split_samples_lose_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, ids("a", tmp_path, [8] * 30 + [128] * 10), overlength="split")
    assert notes(result_of("run", path, "--runtime", "inline", "--steps", 1)) == []


def test_a_function_is_not_run_again_to_know_what_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"n": 128 if n % 4 == 0 else 9}) + "\n" for n in range(40)))
    path = tmp_path / "job.py"
    path.write_text(
        "import os\nimport overlord as ol\n\n\n"
        "def repeat(row):\n"
        "    with open(os.environ['CALLS'], 'a') as calls:\n        calls.write('x')\n"
        "    return {'tokens': [7] * int(row['n'])}\n\n\n"
        f"source = ol.Source('own', {str(tmp_path / 'a.jsonl')!r}, "
        "sample=ol.Custom(repeat, columns=['n'], process=False))\n"
        "job = ol.Job([source], batch=ol.Batch(64, global_samples=40))\n"
    )
    calls = tmp_path / "calls"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CALLS", str(calls))
        found = result_of("run", path, "--runtime", "inline", "--steps", 1)
    assert notes(found) == ["Up to 25 % of source own is cut: so many samples fill 64 tokens."]
    assert len(calls.read_text()) % 40 == 0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, BAD, SKIP])), min_size=1, max_size=30),
    st.integers(1, 40),
    st.sampled_from(["truncate", "drop", "split", "error"]),
)
def test_every_row_is_counted_once(rows: list[tuple[int, int]], context: int, policy: str) -> None:
    tokens = np.array([n for n, _ in rows], np.int64)
    zeros, flags = np.zeros(len(rows), np.int64), np.array([flag for _, flag in rows], np.int32)
    fit = ContextFit()
    fit.add(Measured(tokens, zeros, zeros, flags, {}), *apply_overlength(tokens, None, context, policy))
    good = [n for n, flag in rows if flag == 0]
    over = [n for n in good if n > context]
    assert (fit.rows, fit.bad, fit.empty) == (len(rows), (flags == BAD).sum(), (flags == SKIP).sum())
    assert fit.cut == (len(over) if policy == "truncate" else 0)
    assert fit.dropped == (len(over) if policy == "drop" else 0)
    assert fit.lost == (sum(over) - context * len(over) if policy == "truncate" else 0)
    assert fit.tokens == sum(good) - (sum(over) if policy == "drop" else 0)


def test_of_many_sources_the_worst_are_named() -> None:
    found = [(f"s{n}", ContextFit(rows=10, cut=1, tokens=100, lost=10 * n)) for n in range(1, 6)]
    words = context_words(found, 8)
    assert [line.split(" is cut")[0][-2:] for line in words[:3]] == ["s5", "s4", "s3"]
    assert words[3:] == ["Samples of 2 more sources are cut too."]


# ---- rows of a layout


@pytest.mark.parametrize(("rows", "tokens", "advised"), [("packed", 64, False), ("padded", 64, True),
                                                        ("full", 127, True), ("padded", 128, False)])  # fmt: skip
def test_one_row_in_a_microbatch_is_told(rows: Any, tokens: int, advised: bool, tmp_path: Path) -> None:
    batch = ol.Batch(64, global_samples=16, microbatch_tokens=tokens)
    path = written(tmp_path, ids("a", tmp_path, [8] * 40), batch=batch, launch={"layout": ol.Layout(rows=rows)})
    explained = result_of("explain", path, "--steps", 2)
    assert (explained["step"]["microbatches"] >= 16) == advised  # one for every sample
    for found in (explained, result_of("run", path, "--runtime", "inline", "--steps", 1)):
        assert any("raise batch.microbatch_tokens, to 512 for eight rows" in note for note in found["notes"]) == advised
        assert found["layout"] == ("hf" if rows == "packed" else f"hf, rows={rows}")


def test_the_advice_helps(tmp_path: Path) -> None:
    job = ol.Job([ids("a", tmp_path, [8] * 40)], batch=ol.Batch(64, global_samples=16, microbatch_tokens=512))
    assert layout_advice(job, ol.Layout(rows="padded")) == []
