"""TFRecord, ArrayRecord, litdata and Lance: equal to the libraries' own readers; damage, resume, idle sources.

The files in data/ are written by the libraries themselves, see the make_*.py beside them. Lance datasets are written
here, where the library is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

import overlord as ol
from overlord.core.ragged import unread_rows
from overlord.errors import ReaderError, SourceError, SpecError
from overlord.readers.files import StoredFile, list_files
from overlord.readers.hooked import array_record, tfrecord
from overlord.readers.source_files import HOOKED, reader_of
from overlord.testing import assert_resumes_anywhere, check_reader, stream_digests

from .conftest import read_all

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """A dataset, and the same rows as Parquet."""

    format: str
    path: str
    rows: str
    tokens: str = "ids"


CASES = [
    Case("tfrecord", "tfrecord/rows.tfrecord", "tfrecord/rows.parquet"),
    Case("tfrecord", "tfrecord/rows.tfrecord.gz", "tfrecord/rows.parquet"),
    Case("arrayrecord", "array_record/rows.array_record", "tfrecord/rows.parquet"),
    Case("litdata", "litdata/raw", "litdata/raw.parquet"),
    Case("litdata", "litdata/zstd", "litdata/raw.parquet"),
    Case("litdata", "litdata/arrow", "litdata/arrow.parquet"),
    Case("litdata", "litdata/tokens", "litdata/tokens.parquet", "tokens"),
    Case("lance", "rows.lance", "tfrecord/rows.parquet"),
]
LIBRARIES = {"lance": "lance", "arrayrecord": "array_record"}


@pytest.fixture(scope="module", autouse=True)
def no_warning_of_forks() -> Iterator[None]:
    """Lance warns of every fork of a process that has imported it, and tests of other modules fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "register_at_fork", lambda **_: None)
        if importlib.util.find_spec("lance") is not None:
            import lance  # noqa: F401
        yield


@pytest.fixture(scope="module")
def lance_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of several fragments, with rows that were deleted again."""
    lance = pytest.importorskip("lance")
    path = tmp_path_factory.mktemp("lance") / "rows.lance"
    table = pq.read_table(DATA / "tfrecord" / "rows.parquet")
    lance.write_dataset(
        pa.concat_tables([table.slice(0, 9), table.slice(3, 2), table.slice(9)]), path, max_rows_per_file=7
    )
    lance.dataset(path).delete("label = -2 AND score > 100")  # none
    dataset = lance.dataset(path)
    rows = dataset.to_table(columns=["label"], with_row_id=True).to_pylist()
    again = [row["_rowid"] for row in rows[9:11]]
    dataset.delete(f"_rowid IN ({', '.join(map(str, again))})")
    return path


@pytest.fixture(params=CASES, ids=lambda case: f"{case.format}-{Path(case.path).name}")
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    if found.format in LIBRARIES:
        pytest.importorskip(LIBRARIES[found.format])
    return found


@pytest.fixture
def path(case: Case, request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("lance_path") if case.format == "lance" else DATA / case.path


def expected(case: Case) -> list[dict[str, Any]]:
    """Return the rows that the library's own reader gave, as columns of ours."""
    rows: list[dict[str, Any]] = []
    for row in pq.read_table(DATA / case.rows).to_pylist():
        inner = row.pop("meta", {})
        row |= {f"meta.{name}": value for name, value in inner.items()}
        row |= {name: b"".join(value) for name, value in row.items() if name == "parts"}
        rows.append(row)
    return rows


def test_rows_are_those_of_the_librarys_own_reader(case: Case, path: Path):
    assert check_reader(case.format, path, rows=expected(case), flips=8) == len(expected(case))


@pytest.mark.parametrize("batch_rows", [1, 7, 100])
def test_rows_of_lance_are_those_of_its_reader(batch_rows: int, lance_path: Path, open_source):
    lance = pytest.importorskip("lance")
    table = lance.dataset(lance_path).to_table()
    assert len({fragment.fragment_id for fragment in lance.dataset(lance_path).get_fragments()}) > 3
    rows = read_all(open_source(lance_path), batch_rows)
    assert set(table.column_names) <= set(rows[0])
    for row, same in zip(rows, table.to_pylist(), strict=True):
        for name, value in same.items():
            found = row[name].decode() if isinstance(value, str) else row[name]
            assert found == (b"".join(value) if name == "parts" else value) and not row["__bad__"]


def test_records_of_array_record_are_those_of_its_reader(open_source):
    library = pytest.importorskip("array_record.python.array_record_module")
    path = DATA / "array_record" / "rows.array_record"
    reader = library.ArrayRecordReader(str(path))
    assert [row["record"] for row in read_all(open_source(path, columns=["record"]))] == reader.read_all()
    reader.close()


def job_of(path: Path, case: Case, shuffle_bytes: int) -> ol.Job:
    sample = ol.Text(case.tokens, tokenized=True)
    source = ol.Source("web", str(path), sample=sample, shuffle_bytes=shuffle_bytes, tolerance=1)
    return ol.Job([source], batch=ol.Batch(64, global_samples=4))


def test_the_stream_is_that_of_the_same_rows_as_parquet(case: Case, path: Path, tmp_path: Path):
    found, same = (
        stream_digests(job_of(one, case, 0), steps=12, cache=str(tmp_path / "cache"))
        for one in (path, DATA / case.rows)
    )
    assert found.content == same.content
    if case.path != "litdata/tokens":  # of several files, which sample ids name
        assert found == same


def test_a_run_resumes_at_any_step(case: Case, path: Path, tmp_path: Path):
    assert_resumes_anywhere(job_of(path, case, 512), steps=3, cache=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "name", ["rows.lance", *(pytest.param(name, marks=pytest.mark.slow) for name in ("litdata/raw", CASES[2].path))]
)
def test_a_service_reads_it_in_reader_processes(name: str, tmp_path: Path, request: pytest.FixtureRequest):
    (case,) = (case for case in CASES if case.path == name)
    if case.format in LIBRARIES:
        pytest.importorskip(LIBRARIES[case.format])
    path = request.getfixturevalue("lance_path") if case.format == "lance" else DATA / name
    job, cache = job_of(path, case, 512), str(tmp_path / "cache")
    assert stream_digests(job, steps=4, cache=cache, runtime="local") == stream_digests(job, steps=4, cache=cache)


def copied(path: Path, folder: Path) -> tuple[Path, list[Path]]:
    """Return a copy of a dataset, and its files."""
    to = folder / "copy" / path.name
    shutil.rmtree(folder / "copy", ignore_errors=True)
    to.parent.mkdir()
    if path.is_dir():
        shutil.copytree(path, to)
    else:
        shutil.copy(path, to)
    return to, sorted(one for one in (to.rglob("*") if to.is_dir() else [to]) if one.is_file())


def data_of(files: list[Path]) -> Path:
    return next(one for one in files if one.suffix in (".bin", ".lance", ".tfrecord", ".gz", ".array_record"))


def test_a_truncated_file_is_named(case: Case, path: Path, tmp_path: Path, open_source):
    to, files = copied(path, tmp_path)
    whole = data_of(files).read_bytes()
    for size in sorted({1, 3, 11, 12, 13, len(whole) - 1, *range(16, len(whole), len(whole) // 7)}):
        data_of(files).write_bytes(whole[:size])
        try:
            rows = read_all(open_source(to, format=case.format))
        except (SourceError, ReaderError) as error:
            assert str(to) in str(error)
        else:  # TFRecord has no end: a file that is cut between two records is a shorter one
            assert case.format == "tfrecord" and len(rows) < len(expected(case))


def test_a_flipped_byte_is_noticed_or_harmless(case: Case, path: Path, tmp_path: Path, open_source):
    to, files = copied(path, tmp_path)
    good, whole = read_all(open_source(to, format=case.format)), data_of(files).read_bytes()
    checked = case.format in ("tfrecord", "arrayrecord")
    noticed = 0
    places = [at for at, byte in enumerate(whole) if byte]  # an ArrayRecord is padded with much nothing
    for at in places[:: max(1, len(places) // 40)]:
        data_of(files).write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            rows = read_all(open_source(to, format=case.format))
        except (SourceError, ReaderError) as error:
            assert str(to) in str(error)
            noticed += 1
            continue
        assert len(rows) == len(good)
        changed = [n for n, (row, same) in enumerate(zip(rows, good, strict=True)) if row != same]
        noticed += bool(changed)
        if checked:  # by a checksum: no row is another one
            assert all(rows[n]["__bad__"] for n in changed)
    assert noticed > 3


def check_idle(open_source: Any, path: Path, format: str) -> None:
    process = psutil.Process()

    def opened() -> Any:
        source = open_source(path, format=format)
        source.blocks(0)
        source.forget()
        return source

    kept = [opened() for _ in range(20)]
    files, before = process.num_fds(), process.memory_full_info().uss
    kept += [opened() for _ in range(60)]
    assert process.num_fds() <= files
    assert (process.memory_full_info().uss - before) / 60 < 0.1 * 2**20
    assert len(kept) == 80


def test_an_idle_source_holds_nothing_open(case: Case, path: Path, open_source):
    check_idle(open_source, path, case.format)


@pytest.mark.parametrize(
    ("format", "path"), [("megatron", "megatron/gpt_uint16_text_document.bin"), ("mds", "mds/raw"), ("mds", "mds/zstd")]
)
def test_an_idle_source_of_other_loaders_files_holds_nothing_open(format: str, path: str, open_source):
    check_idle(open_source, DATA / path, format)


def test_a_missing_column_is_refused(case: Case, path: Path, open_source):
    with pytest.raises(SourceError, match=r"has no column 'idz'"):
        open_source(path, format=case.format, columns=["idz"]).kinds()


@pytest.mark.parametrize(("format", "library"), [("lance", "pylance"), ("arrayrecord", "array-record")])
def test_a_library_that_is_missing_is_named(format: str, library: str, tmp_path: Path, open_source, monkeypatch):
    monkeypatch.setitem(sys.modules, {"lance": "lance", "arrayrecord": "array_record.python"}[format], None)
    (tmp_path / "x.dat").write_bytes(b"x")
    with pytest.raises(SourceError, match=rf"needs the package {library}; it cannot be read. Install it"):
        open_source(tmp_path / "x.dat", format=format).kinds()


@pytest.mark.parametrize("format", ["lance", "arrayrecord"])
def test_a_remote_file_of_a_library_that_opens_paths_is_refused(format: str):
    pytest.importorskip(LIBRARIES[format])
    remote = fs.SubTreeFileSystem("/", fs.LocalFileSystem())
    file = StoredFile("s3://bucket/x", 9, 0, remote, "bucket/x")
    with pytest.raises(SourceError, match=r"on a remote store"):
        reader_of(format).columns(file)


@pytest.mark.parametrize("format", HOOKED)
def test_names_of_formats_stand_for_classes(format: str):
    assert reader_of(format).name == format
    assert type(reader_of(HOOKED[format])) is type(reader_of(format))


# TFRecord


def field(number: int, value: bytes) -> bytes:
    """Return a field of a protobuf message with a length."""
    return bytes([number << 3 | 2, len(value)]) + value


def example(**features: bytes) -> bytes:
    return field(1, b"".join(field(1, field(1, name.encode()) + field(2, one)) for name, one in features.items()))


def ints(*values: int) -> bytes:
    return field(3, field(1, bytes(values)))


def write_records(path: Path, records: list[bytes]) -> Path:
    def crc(data: bytes) -> bytes:
        return int(tfrecord._masked_crc(np.frombuffer(data, np.uint8), 0, len(data), tfrecord._TABLES)).to_bytes(
            4, "little"
        )

    framed = [struct.pack("<Q", len(one)) + crc(struct.pack("<Q", len(one))) + one + crc(one) for one in records]
    path.write_bytes(b"".join(framed))
    return path


def test_records_that_are_no_examples_are_one_column(open_source):
    source = open_source(DATA / "tfrecord" / "plain.tfrecord-00000-of-00001")
    assert source.format == "tfrecord" and source.kinds() == {"record": "bytes"}
    assert [row["record"].decode() for row in read_all(source)] == [f"row {n} ünï " * (n % 4) for n in range(1, 9)]


def test_lists_that_are_not_packed_and_unknown_fields_are_read(tmp_path: Path, open_source):
    unpacked = field(3, b"\x08\x05\x08\x96\x01")  # 5, 150
    unknown = b"\x18\x07" + field(9, b"later") + b"\x21" + bytes(8)
    path = write_records(tmp_path / "x.tfrecord", [unknown + example(a=unpacked), example(a=ints(1, 2, 3)) + unknown])
    assert [row["a"] for row in read_all(open_source(path))] == [[5, 150], [1, 2, 3]]


def test_rows_with_other_or_no_values_are_bad(tmp_path: Path, open_source):
    records = [example(a=ints(1), b=ints(2)), example(a=ints(3, 4), b=ints(2)), example(b=ints(2)), b"\xff\xff"]
    texts = field(1, field(1, b"text"))
    path = write_records(tmp_path / "x.tfrecord", [records[0]] * 256 + [*records, example(a=texts, b=ints(7))])
    (*_, batch) = open_source(path, columns=["a", "b"]).stream(0, 0, skip=256, batch_rows=9)
    assert batch["a"].tolist() == [1, 0, 0, 0, 0] and batch["b"].tolist() == [2, 2, 2, 0, 7]
    other = "column 'a' holds a value of another type than in the rows before"
    damaged = "it is damaged: its columns do not add up to its size, or its checksum is another"
    missing = "column 'a' is missing or null in this row"
    assert unread_rows(batch) == [(1, other), (2, missing), (3, damaged), (4, other)]


def test_blocks_are_runs_of_whole_records(tmp_path: Path, open_source, monkeypatch):
    monkeypatch.setattr(tfrecord, "BLOCK_BYTES", 300)
    monkeypatch.setattr(tfrecord, "_CHUNK_BYTES", 64)  # smaller than some records
    records = [example(a=ints(*range(n % 100))) for n in range(200)]
    source = open_source(write_records(tmp_path / "x.tfrecord", records))
    blocks = source.blocks(0)
    assert len(blocks.rows) > 20 and blocks.bytes.sum() == (tmp_path / "x.tfrecord").stat().st_size
    assert [row["a"] for row in read_all(source)] == [list(range(n % 100)) for n in range(200)]


# ArrayRecord


def test_streams_of_a_file_share_it_open_and_few_files_are_kept(tmp_path: Path, open_source, monkeypatch):
    module = pytest.importorskip("array_record.python.array_record_module")
    opened, real = [], module.ArrayRecordReader
    monkeypatch.setattr(module, "ArrayRecordReader", lambda *a, **k: opened.append(real(*a, **k)) or opened[-1])
    monkeypatch.setattr(array_record, "_kept", {})
    monkeypatch.setattr(array_record, "BLOCK_BYTES", 20_000)
    whole = (DATA / "array_record" / "rows.array_record").read_bytes()
    for n in range(12):
        (tmp_path / f"{n:02}.array_record").write_bytes(whole)
    source = open_source(tmp_path)
    alone = open_source(tmp_path / "00.array_record")
    blocks = len(alone.blocks(0).rows)
    streams = [alone.stream(0, block, batch_rows=1) for block in range(blocks)]
    assert blocks > 3 and len(list(zip(*streams, strict=False))) > 1  # side by side
    assert len(opened) == 1
    assert len(read_all(source)) == 12 * 40 and len(array_record._kept) == 8
    assert sum(one.is_open() for one in opened) == 8
    monkeypatch.setattr(array_record, "_KEPT_RECORDS", 100)  # of 40 each
    read_all(source)
    assert len(array_record._kept) == 2 == sum(one.is_open() for one in opened)


# litdata


def test_what_is_written_beside_chunks_is_no_data(tmp_path: Path):
    shutil.copytree(DATA / "litdata" / "tokens", tmp_path / "tokens")
    files = list_files([str(tmp_path)])
    assert [Path(file.path).name for file in files] == [f"chunk-0-{n}.bin" for n in range(3)]
    assert all(file.beside is not None and Path(file.beside.path).name == "index.json" for file in files)


def test_frames_inside_of_a_chunk_are_refused(open_source):
    with pytest.raises(SourceError, match=r"written with compression_level='batch', which is not read"):
        open_source(DATA / "litdata" / "batch").kinds()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"encryption": {"algorithm": "fernet"}}, "written with encryption=.*, which is not read"),
        ({"data_format": ["str"]}, "does not describe items of litdata"),
        ({"data_format": ["str", "pickle", "int", "int", "int", "int", "int"]}, "it would have to be unpickled"),
        ({"data_format": ["str", "no_header_tensor:4", "int", "int", "int", "int", "int"]}, "it is not read"),
        ({"data_format": ["str", "pil", "int", "int", "int", "int", "int"]}, "it is not read"),
    ],
)
def test_what_is_not_read_is_refused(change: dict[str, Any], why: str, tmp_path: Path, open_source):
    to, _ = copied(DATA / "litdata" / "raw", tmp_path)
    index = json.loads((to / "index.json").read_text())
    index["config"] |= change
    (to / "index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=why):
        open_source(to, columns=["text", "ids"]).kinds()


# Lance


def test_a_version_never_changes(lance_path: Path, tmp_path: Path, open_source):
    lance = pytest.importorskip("lance")
    to, _ = copied(lance_path, tmp_path)
    source = open_source(to, columns=["label"])
    rows = read_all(source)
    lance.write_dataset(pq.read_table(DATA / "tfrecord" / "rows.parquet"), to, mode="append")
    assert read_all(source) == rows and len(rows) == 40
    assert len(read_all(open_source(to, columns=["label"]))) == 80
    (old,) = source.files
    assert read_all(open_source(old.path, columns=["label"])) == rows  # a manifest names a version


def test_datasets_in_a_folder_are_found(lance_path: Path, tmp_path: Path):
    for name in ("a.lance", "b.lance"):
        shutil.copytree(lance_path, tmp_path / "all" / name)
    (tmp_path / "all" / "notes.manifest").write_text("not data")
    found = [Path(file.path).relative_to(tmp_path / "all").parts[0] for file in list_files([str(tmp_path / "all")])]
    assert found == ["a.lance", "b.lance"]


def test_weights_by_size_are_refused(lance_path: Path, tmp_path: Path):
    job = job_of(lance_path, CASES[-1], 0)
    hot = ol.Job(job.sources, batch=job.batch, mixture=ol.Mixture(temperature=2.0))
    with pytest.raises(SpecError, match=r"the sizes of sources, and that of 'web', a Lance dataset, is not known"):
        stream_digests(hot, steps=1, cache=str(tmp_path / "cache"))
