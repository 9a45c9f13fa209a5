"""`overlord sources`: listings, previews, lint findings on damaged data, and length sidecars that are used."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.demo.demo_data import DemoFiles
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.lint import Finding, lint_job
from overlord.cli.main import app
from overlord.cli.preview import half_blocks, preview_source, show_previews
from overlord.cli.sources import choose_sources, open_each
from overlord.job_files import LaunchOptions, dump_job_yaml


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)


@pytest.fixture(scope="module")
def demo_yaml(mixed_job: ol.Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text(dump_job_yaml(mixed_job, LaunchOptions(steps=3)))
    return path


def lint(job: ol.Job, folder: Path, rows: int = 200) -> list[Finding]:
    return lint_job(job, folder / "cache", rows, lambda *_: None).findings


def job_of(*sources: ol.Source, tokenizer: Path | None = None, **changes: Any) -> ol.Job:
    values: dict[str, Any] = {"batch": ol.Batch(256, global_samples=4)} | changes
    return ol.Job(list(sources), tokenizer=None if tokenizer is None else str(tokenizer), **values)


def write_ids(path: Path, lengths: list[int], claimed: list[int] | None = None) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"ids": [7] * n, "n": c} for n, c in zip(lengths, claimed or lengths, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ids(name: str, path: str | list[str], **options: Any) -> ol.Source:
    return ol.Source(name, path, sample=ol.Text("ids", tokenized=True), **options)


def messages(findings: list[Finding], severity: str) -> list[str]:
    return [f"{f.source}: {f.message}" for f in findings if f.severity == severity]


@pytest.mark.slow
def test_list_knows_rows_once_they_are_indexed(demo_yaml: Path, demo_files: DemoFiles, tmp_path: Path) -> None:
    new = ["--cache", tmp_path / "new"]
    before = call("sources", "list", demo_yaml, *new)
    assert before.exit_code == 0
    assert "--rows does it now" in before.stdout
    assert call("sources", "list", demo_yaml, "--rows", *new).exit_code == 0
    found = json.loads(call("sources", "list", demo_yaml, "--json", *new).stdout)["sources"]
    assert {one["name"]: one["rows"] for one in found} == demo_files.samples
    assert {one["name"]: one["format"] for one in found}["photos"] == "tar"


def test_list_shows_the_other_sources_beside_a_broken_one(tmp_path: Path) -> None:
    good = write_ids(tmp_path / "a.jsonl", [3, 4])
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job_of(ids("good", good), ids("gone", str(tmp_path / "none.jsonl")))))
    outcome = call("sources", "list", path, "--json")
    assert outcome.exit_code == 2
    assert re.search(r"^error: .*/job.yaml:\d+: source 'gone': .* can see it\.$", outcome.stderr, re.MULTILINE)
    found = json.loads(outcome.stdout)["sources"]
    assert [one["error"] is None for one in found] == [True, False]


def test_preview_shows_text_and_images(demo_yaml: Path, tmp_path: Path) -> None:
    outcome = call("sources", "preview", demo_yaml, "--rows", 2, "--html", tmp_path / "p.html")
    assert outcome.exit_code == 0
    for sample in ("web:0:0", "web:0:1", "photos:0:1", "charts:0:0"):
        assert sample in outcome.stdout
    page = (tmp_path / "p.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 6
    found = json.loads(call("sources", "preview", demo_yaml, "coyo", "--rows", 5, "--json").stdout)["sources"]
    assert list(found) == ["coyo"]
    assert len(found["coyo"]) == 5
    assert all(row["tokens"] > row["image_tokens"] > 0 for row in found["coyo"])


def test_preview_goes_on_in_the_next_block_and_file(tmp_path: Path) -> None:
    paths = [write_ids(tmp_path / f"{n}.jsonl", [1, 2]) for n in range(3)]
    job = job_of(ids("a", paths))
    one = open_each(job, job.sources, tmp_path / "cache", None)[0]
    assert [p.sample for p in preview_source(one, 5)] == ["a:0:0", "a:0:1", "a:1:0", "a:1:1", "a:2:0"]
    assert len(preview_source(one, 100)) == 6


def test_pictures_need_colours(mixed_job: ol.Job, cache: str) -> None:
    one = open_each(mixed_job, choose_sources(mixed_job, ["photos"]), Path(cache), None)[0]
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)
    console.print(show_previews(one, preview_source(one, 1), pictures=True))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert written.count("▀") > 100
    assert half_blocks(np.zeros((400, 10, 3), np.uint8)).plain.count("\n") == 9


def test_lint_finds_nothing_in_sound_data(demo_yaml: Path, tmp_path: Path) -> None:
    outcome = call("sources", "lint", demo_yaml, "--rows", 8)
    assert outcome.exit_code == 0
    assert "8 sources: 0 errors" in outcome.stdout
    assert all(line.startswith(("warning ", "note ")) for line in outcome.stdout.splitlines()[:-1])


def shuffle_findings(path: Path, budget: int, cache: Path) -> list[str]:
    sample = ol.Text("ids", tokenized=True)
    source = ol.Source("one", str(path), sample=sample, shuffle_bytes=budget)
    job = ol.Job(sources=[source], batch=ol.Batch(64, global_samples=4))
    return [finding.message for finding in lint(job, cache, 10) if "shuffle" in finding.message]


def test_lint_tells_what_it_costs_where_rows_are_unpacked(tmp_path: Path) -> None:
    table = pa.table({"ids": pa.array([list(range(50))] * 3000, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "one.parquet", use_dictionary=False)
    for name, compression in (("one.arrow", None), ("zstd.arrow", "zstd")):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(tmp_path / name, table.schema, options=options) as writer:
            writer.write_table(table)
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    (tmp_path / "one.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("zstd.arrow", "one.jsonl.gz"):
        (found,) = shuffle_findings(tmp_path / name, 100_000, tmp_path)
        assert "rows of 0.6 MiB are reached only by unpacking those before them" in found
        assert "once an epoch in each loader process, in blocks of up to 0.6 MiB" in found
        assert "takes up to 0.6 MiB of disk" in found
        assert not shuffle_findings(tmp_path / name, 4 << 20, tmp_path)
    for budget in (100_000, 4 << 20, 0):
        assert not shuffle_findings(tmp_path / "one.parquet", budget, tmp_path)  # rows are read by their pages,
        assert not shuffle_findings(tmp_path / "one.arrow", budget, tmp_path)  # or from where they are


def test_lint_tells_where_a_shuffle_has_too_few_blocks(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"ids": list(range(50))}) + "\n" for _ in range(7000))
    (tmp_path / "two.jsonl").write_text(lines)
    (found,) = shuffle_findings(tmp_path / "two.jsonl", 400_000, tmp_path)
    assert "2 blocks of 0.7 MiB" in found and "neighbours mostly stay neighbours" in found


def test_lint_names_every_damaged_file(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    table = pa.table({"ids": [[1, 2]] * 40})
    for name in ("a", "b", "c"):
        pq.write_table(table, folder / f"{name}.parquet")
    pq.write_table(table.rename_columns(["idx"]), folder / "d.parquet")
    whole = (folder / "b.parquet").read_bytes()
    (folder / "b.parquet").write_bytes(whole[:-6] + b"\0" * 6)
    job = job_of(ids("p", str(folder)), ids("gone", str(tmp_path / "none*.parquet")))
    errors = messages(lint(job, tmp_path), "error")
    assert len(errors) == 3
    assert any("b.parquet" in e and e.startswith("p: ") for e in errors)
    assert any("d.parquet has no column 'ids'" in e for e in errors)
    assert any(e.startswith("gone: ") and "matches no file" in e for e in errors)


def test_lint_gives_the_ids_of_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"ids": [1, 2]})] * 40
    lines[7] = "{not json"
    path.write_text("\n".join(lines) + "\n")
    findings = lint(job_of(ids("a", str(path), tolerance=0.03)), tmp_path)
    assert messages(findings, "warning") == [f"a: bad: a:0:7: the line is not a JSON object in UTF-8 (row 7 of {path})"]
    strict = lint(job_of(ids("a", str(path), tolerance=0.0)), tmp_path)
    assert any("more than tolerance=0 allows; a run would stop" in e for e in messages(strict, "error"))


def test_lint_and_preview_tell_of_images_that_stay_turned(demo_files: DemoFiles, tmp_path: Path) -> None:
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.new("RGB", (64, 32)).save(out, "JPEG", exif=exif)
    pq.write_table(pa.table({"jpg": [out.getvalue()] * 40, "txt": ["a"] * 40}), tmp_path / "a.parquet")
    for turn in (False, True):
        source = ol.Source("a", str(tmp_path / "a.parquet"), sample=ol.ImageText(exif_transpose=turn))
        job = job_of(source, tokenizer=demo_files.tokenizer)
        warned = [found for found in messages(lint(job, tmp_path, 10), "warning") if "exif_transpose" in found]
        assert len(warned) == (0 if turn else 1)
        [shown] = preview_source(open_each(job, job.sources, tmp_path / "cache", None)[0], 1)
        [image] = shown.media
        assert (image.facts["size"], "EXIF" in image.words) == (([32, 64], False) if turn else ([64, 32], True))


@pytest.mark.parametrize("whole", [True, False])
def test_lint_tells_what_a_tokenizer_loses(whole: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, markers = (pre_tokenizers.ByteLevel.alphabet(), ["<|im_start|>", "<|im_end|>"]) if whole else ([], [])
    trainer = BpeTrainer(vocab_size=500, special_tokens=markers, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["text of a user or an assistant"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [{"text": "a text" if row % 4 else "Z\u00fcrich!"} for row in range(40)]
    turns = [{"role": "user", "content": "a <tool> <|im_here|>"}, {"role": "assistant", "content": "an"}]
    for name, rows in (("texts", texts), ("chats", [{"messages": turns}] * 40)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = job_of(
        ol.Source("texts", str(tmp_path / "texts.jsonl")),
        ol.Source("chats", str(tmp_path / "chats.jsonl"), sample=ol.Chat(template="chatml")),
        tokenizer=tmp_path / "tokenizer.json",
    )
    found = messages(lint(job, tmp_path), "warning")
    if whole:
        assert found == []
        return
    assert (
        "texts: the tokenizer has no tokens for 5 characters ('Z', 'ü', 'c', 'h', '!'): in 10 of 40 texts" in found[0]
    )
    assert "chats: the tokenizer has no tokens for" in found[1] and "in 40 of 40 texts" in found[1]
    assert "chats: the chat template writes <|im_end|> (as" in found[2] and ", <|im_start|> (as" in found[2]
    assert "im_here" not in found[2] and len(found) == 3


def test_lint_decodes_images(demo_files: DemoFiles, tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(out, "JPEG")
    images = [out.getvalue()] * 40
    images[5] = out.getvalue()[:300]  # the header is whole, the picture is not
    images[6] = b"no image"
    pq.write_table(pa.table({"jpg": images, "caption": ["a word"] * 40}), tmp_path / "i.parquet")
    source = ol.Source("i", str(tmp_path / "i.parquet"), sample=ol.ImageText(image="jpg", text="caption"))
    found = messages(lint(job_of(source, tokenizer=demo_files.tokenizer), tmp_path), "warning")
    assert [f.split(": ")[2] for f in found] == ["i:0:5", "i:0:6"]


def test_lint_catches_lengths_that_lie(tmp_path: Path) -> None:
    true = [5] * 40
    claimed = [5] * 38 + [9, 2]
    path = write_ids(tmp_path / "a.jsonl", true, claimed)
    found = messages(lint(job_of(ids("a", path, lengths="n")), tmp_path), "warning")
    assert found == [
        f"a: wrong length: a:0:38: its length says 9 tokens, the text has 5 (row 38 of {path})",
        f"a: wrong length: a:0:39: its length says 2 tokens, the text has 5 (row 39 of {path})",
    ]


def test_lint_looks_at_the_whole_job(tmp_path: Path) -> None:
    a = write_ids(tmp_path / "a.jsonl", [3] * 40)
    copy = str(shutil.copy(a, tmp_path / "copy.jsonl"))
    tiny = write_ids(tmp_path / "t.jsonl", [300] * 3)
    job = job_of(
        ids("a", a), ids("again", a), ids("copy", copy), ids("tiny", tiny), mixture={"a": 1, "copy": 1, "tiny": 8}
    )
    found = messages(lint(job, tmp_path), "warning")
    assert "tiny: tiny: 3 rows; the model sees the same samples again and again" in found
    assert "tiny: one step takes about 1.1 times its 3 rows" in found
    assert "again: the mixture never gives it a weight above 0; it is never drawn" in found
    assert f"a: {a} is also a file of again" in found
    assert f"copy: {copy} looks like a copy of {a} (source again)" in found
    assert any(f.startswith("tiny: 100") and "are cut" in f for f in found)


def test_lint_exits_with_1_on_errors(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job_of(ids("gone", str(tmp_path / "none.jsonl")))))
    outcome = call("sources", "lint", path)
    assert outcome.exit_code == 1
    assert re.match(r"error gone \(.*/job.yaml:\d+\): ", outcome.stdout)
    told = json.loads(call("sources", "lint", path, "--json").stdout)
    assert (told["errors"], told["warnings"], told["findings"][0]["severity"]) == (1, 0, "error")


@pytest.mark.slow
def test_measured_lengths_are_used_and_change_nothing(demo_yaml: Path, mixed_job: ol.Job, tmp_path: Path) -> None:
    names = ("web", "forum", "coyo")
    changed = [s.replace(lengths="sidecar") if s.name in names else s for s in mixed_job.sources]
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(mixed_job.replace(sources=changed)))
    options = ["--cache", tmp_path / "cache", "--json"]
    missing = call("run", path, "--runtime", "inline", "--steps", 3, *options)
    assert missing.exit_code == 2
    assert "overlord sources measure JOB" in missing.stderr
    measured = call("sources", "measure", path, *options)
    assert measured.exit_code == 0
    assert sorted(json.loads(measured.stdout)["sources"]) == sorted(names)
    outcomes = [call("run", p, "--runtime", "inline", "--steps", 3, *options) for p in (path, demo_yaml)]
    with_sidecar, without = (json.loads(outcome.stdout) for outcome in outcomes)
    assert with_sidecar["digests"] == without["digests"]
    assert with_sidecar["tokens"] == without["tokens"]
    assert not any("wrong" in note for note in with_sidecar["notes"])


def test_measure_says_how_to_use_what_was_measured(demo_yaml: Path, tmp_path: Path) -> None:
    outcome = call("sources", "measure", demo_yaml, "forum", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0
    assert "write lengths: sidecar beside forum" in outcome.stderr
