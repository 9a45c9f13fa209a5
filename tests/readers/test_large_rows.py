"""Rows with more bytes than `max_row_bytes` are bad samples, never held in memory; so are lines that are not UTF-8."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import overlord as ol
from overlord.core.ragged import BAD_COLUMN, NOT_PARSED, TOO_LARGE
from overlord.errors import SourceError, SpecError
from overlord.readers import jsonl, tar_shards
from overlord.readers.index import IndexCache
from overlord.readers.jsonl import LineReader, ParseLines
from overlord.readers.source_files import SourceFiles

ROWS = [{"text": f"w{n}"} for n in range(5)]
LARGE = {"text": "x" * 300_000}  # over several chunks


def write_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    compressed = path.suffix == ".zst"
    with pa.CompressedOutputStream(str(path), "zstd") if compressed else path.open("wb") as file:
        file.write(data)
    return path


def write_shard(path: Path, rows: list[dict[str, str]]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as shard:
        for number, row in enumerate(rows):
            member = tarfile.TarInfo(f"{number}.text")
            member.size = len(row["text"])
            shard.addfile(member, io.BytesIO(row["text"].encode()))
    return path


def marks_of(path: Path, tmp_path: Path, most: int) -> list[int]:
    files = SourceFiles("a", [str(path)], cache=IndexCache(tmp_path / "cache"), columns=["text"], max_row_bytes=most)
    blocks = files.blocks(0)
    found = [batch for block in range(len(blocks.rows)) for batch in files.stream(0, block, batch_rows=2)]
    return np.concatenate([np.asarray(batch[BAD_COLUMN]) for batch in found]).tolist()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.tar", "a.tar.gz"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_row_beyond_the_limit_is_bad_and_the_others_are_not(name: str, at: int, tmp_path: Path):
    rows = [*ROWS[:at], LARGE, *ROWS[at:], LARGE]
    path = (write_lines if "jsonl" in name else write_shard)(tmp_path / name, rows)
    expected = [TOO_LARGE if row is LARGE else 0 for row in rows]
    assert marks_of(path, tmp_path, 1000) == expected
    assert marks_of(path, tmp_path, 400_000) == [0] * len(rows)


@pytest.mark.parametrize("rows", [[LARGE, *ROWS], [*ROWS, LARGE], [*ROWS[:2], LARGE, LARGE, *ROWS[2:]]])
@pytest.mark.parametrize("most", [3, 1000, 400_000])
def test_lines_that_are_parsed_by_workers_have_the_same_limit(rows: list[dict[str, str]], most: int, tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", rows)
    files = SourceFiles("a", [str(path)], cache=IndexCache(tmp_path / "cache"), columns=["text"], max_row_bytes=most)
    reader, file = LineReader(), files.files[0]
    index, kinds = reader.index(file, ["text"]), {"text": "bytes"}
    expected = [TOO_LARGE if len(json.dumps(row)) > most else 0 for row in rows]
    for skip in (0, 1, 3):
        found: list[int] = []
        for block in range(len(index.rows)):
            for batch in reader.stream(
                file,
                index,
                block,
                columns=kinds,
                skip=skip,
                batch_rows=2,
                scratch=None,  # type: ignore[arg-type]
            ):
                parsed = ParseLines(kinds)(batch)  # type: ignore[arg-type]
                found += np.asarray(parsed[BAD_COLUMN]).tolist()
        assert found == expected[skip:]


LIMITED = """
import resource, sys
import overlord as ol
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles
from pathlib import Path
import numpy as np
files = SourceFiles("a", [sys.argv[1]], cache=IndexCache(Path(sys.argv[2])), columns=["text"], max_row_bytes=1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
marks = [m for b in range(len(files.blocks(0).rows)) for batch in files.stream(0, b, batch_rows=16)
         for m in np.asarray(batch["__bad__"]).tolist()]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(marks.count(-3), len(marks), grown >> 10)
"""


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_a_line_of_hundreds_of_megabytes_takes_no_memory(name: str, tmp_path: Path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    path = tmp_path / name
    with pa.CompressedOutputStream(str(path), "zstd") if "zst" in name else path.open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(400):
            file.write(b"a" * (1 << 20))
        file.write(b'"}\n' + lines)
    command = [sys.executable, "-c", LIMITED, str(path), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    large, rows, grown = map(int, done.stdout.split())
    assert (large, rows) == (1, 6)
    assert grown < 100  # MiB


def test_gigabytes_of_blank_lines_are_not_passed_over_to_find_a_head(tmp_path: Path):
    path = tmp_path / "a.jsonl.zst"
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        for _ in range(2048):
            file.write(b"\n" * (1 << 20))  # minutes, if all of them were looked at
        file.write(b'{"text": "a"}\n')
    with pytest.raises(SourceError, match="has no rows in"):
        SourceFiles("a", [str(path)], cache=IndexCache(tmp_path / "cache"), columns=["text"]).kinds()


def test_a_line_of_too_many_values_is_bad_and_the_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jsonl, "_MOST_VALUES", 1000)
    rows = [{"text": "a"}, {"text": "b", "x": [[]] * 1001}, {"text": "c" * 2000, "x": [1] * 900}, {"text": "d"}]
    marks = marks_of(write_lines(tmp_path / "a.jsonl.zst", rows), tmp_path, 1 << 20)
    assert marks == [0, NOT_PARSED, 0, 0]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_sample_of_too_many_members_is_bad_and_the_others_are_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tar_shards, "_MOST_MEMBERS", 10)
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith(".gz") else "w") as shard:
        for key, count in enumerate((1, 10, 11, 50, 1)):
            for number in range(count):
                member = tarfile.TarInfo(f"{key}.{f'x{number}' if number else 'text'}")
                shard.addfile(member, io.BytesIO())
    assert marks_of(tmp_path / name, tmp_path, 1000) == [0, 0, TOO_LARGE, TOO_LARGE, 0]


def job_of(path: Path, **fields: object) -> ol.Job:
    source = ol.Source("a", path, sample=ol.Text("ids", tokenized=True), **fields)
    return ol.Job(sources=[source], batch=ol.Batch(context_length=64, global_samples=4))


def test_a_large_row_is_counted_and_the_run_goes_on(tmp_path: Path):
    rows = [{"ids": [1, 2, 3]}] * 60
    rows[7] = {"ids": [1] * 2000}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = job_of(tmp_path / "a.jsonl", max_row_bytes="1KiB", tolerance=0.5)
    with ol.launch(job, runtime="inline", cache=tmp_path / "cache") as service:
        client = service.client(0)
        for _ in range(15):
            next(client)
        assert service.status()["sources"]["a"]["bad"] == 1


def test_a_file_of_large_rows_only_is_refused_with_the_option(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [1] * 2000}) + "\n")
    with pytest.raises(SourceError, match="its first line has more than max_row_bytes=1024 of the source"):
        ol.launch(job_of(tmp_path / "a.jsonl", max_row_bytes=1024), runtime="inline", cache=tmp_path / "cache")


@pytest.mark.parametrize("value", [0, -1, "x"])
def test_a_limit_that_no_row_fits_is_refused(value: object):
    with pytest.raises(SpecError, match="max_row_bytes"):
        ol.Source("a", "a.jsonl", max_row_bytes=value)


def test_the_usual_limit_does_not_change_the_fingerprint_of_older_states():
    assert "max_row_bytes" not in ol.Source("a", "a.jsonl").model_dump(mode="json")
    assert ol.Source("a", "a.jsonl", max_row_bytes=1).model_dump(mode="json")["max_row_bytes"] == 1


def test_a_file_in_latin_1_is_refused_with_the_reason_and_the_remedy(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes('{"text": "caf\u00e9"}\n'.encode("latin-1") * 5)
    source = ol.Source("a", tmp_path / "a.jsonl", sample=ol.Text("text"))
    job = ol.Job([source], tokenizer="none.json", batch=ol.Batch(64, global_samples=4))
    with pytest.raises(SourceError, match=r"not UTF-8 \(byte 13 of line 1 is b'\\xe9'\); convert it.*iconv"):
        SourceFiles("a", job.sources[0].path, cache=IndexCache(tmp_path / "cache"), columns=["text"]).kinds()


def test_a_line_in_latin_1_is_a_bad_sample_with_this_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lines = [json.dumps({"ids": [1, 2, 3], "text": "cafe"}).encode()] * 40
    lines[3] = lines[3].replace(b"cafe", b"caf\xe9")
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with ol.launch(job_of(tmp_path / "a.jsonl", tolerance=0.5), runtime="inline", cache=tmp_path / "cache") as service:
        client = service.client(0)
        for _ in range(10):
            next(client)
    assert "the line is not UTF-8; convert the file" in caplog.text
    assert "(row 3 of " in caplog.text
