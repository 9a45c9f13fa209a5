"""Readers of the user's own: found by name, checked by `check_reader`, run like the built-in ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import overlord as ol
from overlord.errors import SourceError, SpecError
from overlord.readers.files import format_of_name
from overlord.readers.source_files import FORMATS, reader_of
from overlord.testing import assert_resumes_anywhere, check_reader, stream_digests

from . import record_reader
from .conftest import read_all
from .test_round_trip import FORMATS as WRITERS

HERE = record_reader.__name__
TEXTS = [f"row {n} ünï " * (n % 3 + 1) for n in range(11)]
DATA = Path(__file__).parent / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    record_reader.write(tmp_path / "data" / "a.rec", TEXTS[:7])
    record_reader.write(tmp_path / "data" / "b.rec", TEXTS[7:])
    (tmp_path / "data" / "notes.txt").write_text("not data")
    return tmp_path / "data"


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["?", "row", "ünï", *"0123456789"])}, "?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", ["RecordReader", "NativeRecordReader"])
def test_a_reader_of_ones_own_passes_and_reads(name: str, folder: Path, open_source):
    format = f"{HERE}:{name}"
    assert check_reader(format, folder, rows=[{"text": text} for text in TEXTS], flips=60) == 11
    source = open_source(folder, format=format)
    assert source.format == format and [row["text"].decode() for row in read_all(source)] == TEXTS


def job_of(folder: Path, format: str | None, tokenizer: str) -> ol.Job:
    source = ol.Source("own", str(folder), format=format, shuffle_bytes=64)
    return ol.Job([source], tokenizer=tokenizer, batch=ol.Batch(64, global_samples=3))


def test_it_runs_in_a_service_and_resumes(folder: Path, tokenizer: str, tmp_path: Path):
    cache = str(tmp_path / "cache")
    job = job_of(folder, f"{HERE}:RecordReader", tokenizer)
    assert_resumes_anywhere(job, steps=4, cache=cache)
    native = job_of(folder, f"{HERE}:NativeRecordReader", tokenizer)  # in a reader process of the service
    assert stream_digests(job, steps=5, cache=cache) == stream_digests(native, steps=5, cache=cache, runtime="local")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SkipsNothing", "from row 1 on, 1 at a time, the rows are others"),
        ("LosesRows", "promises 4 rows and 3 came"),
        ("LargeBatches", "a batch has 4 rows, and at most 1 were asked for"),
        ("OtherKinds", "column 'text' is not what kind 'int' says"),
        ("TakesAnyColumn", "a column that does not exist is not refused"),
        ("OneStream", "two streams side by side disturb each other"),
        ("OtherOrder", "index\\(\\) tells another 'bytes' when it is called again"),
    ],
)
def test_what_violates_the_law_is_told(name: str, why: str, folder: Path):
    with pytest.raises(AssertionError, match=why):
        check_reader(f"{HERE}:{name}", folder, flips=0)


def test_other_rows_are_told(folder: Path):
    with pytest.raises(AssertionError, match="there are 11 rows, and 1 were expected"):
        check_reader(f"{HERE}:RecordReader", folder, rows=[{"text": "a"}], flips=0)
    with pytest.raises(AssertionError, match="row 0, column 'text': b'row 0"):
        check_reader(f"{HERE}:RecordReader", folder, rows=[{"text": "a"}] * 11, flips=0)


@pytest.mark.parametrize(
    ("format", "why"),
    [
        ("csv", "is not a format; .* or to a reader of your own as 'module:Class'"),
        ("no_such_module:Reader", r"cannot be made \(ModuleNotFoundError: No module named 'no_such_module'\)"),
        (f"{HERE}:Missing", r"cannot be made \(AttributeError: .*has no attribute 'Missing'\)"),
        (f"{HERE}:NoReader", "the class has no index, stream, divides, seeks, columns, kinds; it cannot read files"),
    ],
)
def test_what_is_no_reader_is_refused(format: str, why: str, folder: Path, open_source):
    with pytest.raises(SpecError, match=why):
        open_source(folder, format=format)


def test_a_folder_without_its_files_is_refused(tmp_path: Path, open_source):
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(SourceError, match="holds 1 file"):
        open_source(tmp_path, format=f"{HERE}:RecordReader")


def test_the_reader_of_the_documents_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = Path(__file__).parents[2] / "docs" / "formats.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_formats.py").write_text(code)
    (tmp_path / "a.log").write_text("first\nsecond\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert check_reader("my_formats:LogReader", tmp_path, rows=[{"line": "first"}, {"line": "second"}], flips=20) == 2


def test_indices_of_other_readers_are_not_taken(folder: Path):
    assert reader_of(f"{HERE}:RecordReader").name == f"{HERE}:RecordReader"
    assert {reader_of(name).name for name in FORMATS} == set(FORMATS)


@pytest.mark.parametrize("name", WRITERS)
def test_the_built_in_readers_pass(name: str, tmp_path: Path):
    rows = [{"text": f"row {n}", "ids": list(range(n + 1)), "stars": n} for n in range(12)]
    WRITERS[name](tmp_path / name, rows)
    format = format_of_name(name) or ""
    expected = None if format == "tar" else rows
    assert check_reader(format, tmp_path / name, rows=expected, flips=24) == 12


@pytest.mark.parametrize(
    ("format", "path", "rows"),
    [
        ("megatron", "megatron/gpt_uint16_text_document.bin", 60),
        ("megatron", "megatron/bert_int32_text_sentence.bin", 20),
        ("mds", "mds/raw/shard.00006.mds", 1),
        ("mds", "mds/raw/shard.00000.mds", 6),
        ("mds", "mds/gz/shard.00000.mds.gz", 6),
    ],
)
def test_the_readers_of_other_loaders_files_pass(format: str, path: str, rows: int):
    assert check_reader(format, DATA / path, flips=24) == rows
