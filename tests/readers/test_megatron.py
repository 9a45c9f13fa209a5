"""Megatron's .bin and .idx: files of the library's own builder, equal to its own reader; damage, resume, listing."""

from __future__ import annotations

import itertools
import shutil
import struct
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.core.ragged import num_rows
from overlord.errors import ReaderError, SourceError
from overlord.readers.files import list_files
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles
from overlord.testing import assert_resumes_anywhere, stream_digests

from .conftest import read_all, read_block

DATA = Path(__file__).parent / "data" / "megatron"
DATASETS = ["gpt_uint16_text_document", "gpt_int32_text_document", "bert_int32_text_sentence"]
MAGIC = b"MMIDIDX\0\0"


def write_dataset(
    path: Path, rows: list[list[int]], *, dtype: str = "<u2", code: int = 8, places: list[int] | None = None
) -> Path:
    """Write one sequence a document, as the library does; the places may be others."""
    lengths = np.array([len(row) for row in rows], np.int32)
    size = np.dtype(dtype).itemsize
    found = (np.cumsum(lengths) - lengths) * size if places is None else np.array(places)
    path.with_suffix(".bin").write_bytes(np.array([token for row in rows for token in row], dtype).tobytes())
    head = MAGIC + struct.pack("<QBQQ", 1, code, len(rows), len(rows) + 1)
    bounds = np.arange(len(rows) + 1, dtype=np.int64)
    index = head + lengths.tobytes() + found.astype(np.int64).tobytes() + bounds.tobytes()
    path.with_suffix(".idx").write_bytes(index)
    return path.with_suffix(".bin")


def copied(name: str, folder: Path) -> Path:
    for end in (".bin", ".idx"):
        shutil.copy(DATA / f"{name}{end}", folder / f"{name}{end}")
    return folder / name


def tokens_of(source: SourceFiles, **options: int) -> list[list[int]]:
    return [row["tokens"] for row in read_all(source, **options)]


@pytest.mark.parametrize("name", DATASETS)
def test_rows_are_those_of_the_librarys_own_reader(name: str, open_source):
    expected = pq.read_table(DATA / f"{name}.parquet")["tokens"].to_pylist()
    source = open_source(DATA / f"{name}.bin")
    assert source.format == "megatron" and source.kinds() == {"tokens": "int_list"}
    assert tokens_of(source) == tokens_of(source, batch_rows=1) == expected
    for skip in range(len(expected) + 1):
        assert [row["tokens"] for row in read_block(source, 0, 0, skip, 5)] == expected[skip:]


@pytest.mark.slow  # it imports torch
@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_rows_are_those_of_the_installed_library(name: str, open_source):
    library = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    dataset = library.IndexedDataset(str(DATA / name))
    bounds = dataset.document_indices
    joined = [[token for n in range(a, b) for token in dataset[n].tolist()] for a, b in itertools.pairwise(bounds)]
    assert tokens_of(open_source(DATA / f"{name}.bin")) == joined


def job_of(path: Path, column: str, shuffle_bytes: int) -> ol.Job:
    source = ol.Source("web", str(path), sample=ol.Text(column, tokenized=True), shuffle_bytes=shuffle_bytes)
    return ol.Job([source], batch=ol.Batch(64, global_samples=4), max_steps=40)


@pytest.mark.parametrize("name", DATASETS)
def test_the_stream_is_that_of_the_same_rows_as_parquet(name: str, tmp_path: Path):
    found = [
        stream_digests(job_of(DATA / f"{name}{end}", "tokens", 0), steps=12, cache=str(tmp_path / "cache"))
        for end in (".bin", ".parquet")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("shuffle_bytes", [0, 256, 1 << 20])
def test_a_run_resumes_at_any_step(shuffle_bytes: int, tmp_path: Path):
    job = job_of(DATA / f"{DATASETS[0]}.bin", "tokens", shuffle_bytes)
    assert_resumes_anywhere(job, steps=6, cache=str(tmp_path / "cache"))


@pytest.mark.parametrize("path", ["{0}.bin", "{0}.idx", "{0}", "{1}", "{1}/*", "{1}/*.bin", "{1}/*.idx"])
def test_both_files_their_prefix_and_their_folder_name_a_dataset(path: str, tmp_path: Path):
    prefix = copied(DATASETS[0], tmp_path)
    (file,) = list_files([path.format(prefix, tmp_path)])
    assert file.path == f"{prefix}.bin"
    assert file.beside is not None and file.beside.path == f"{prefix}.idx"


def test_other_bin_files_in_a_folder_are_no_data(tmp_path: Path):
    prefix = copied(DATASETS[0], tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    assert [file.path for file in list_files([str(tmp_path)])] == [f"{prefix}.bin"]
    with pytest.raises(
        SourceError, match=r"cannot read .*pytorch_model.bin: it has no .idx of the same name beside it"
    ):
        SourceFiles("web", [str(tmp_path / "pytorch_model.bin")], cache=IndexCache(tmp_path / "cache")).kinds()


def test_a_column_that_is_not_there_is_refused(open_source):
    with pytest.raises(SourceError, match=r"has no column 'text' \(it has: tokens\)"):
        open_source(DATA / f"{DATASETS[0]}.bin", columns=["text"]).kinds()


def test_a_changed_length_or_place_is_found_wherever_it_is(tmp_path: Path, open_source, monkeypatch):
    monkeypatch.setattr("overlord.readers.megatron_files._ROWS_AT_A_TIME", 3)
    path = write_dataset(tmp_path / "x", [[1, 2, 3], [], [4, 5], [6], [7, 8, 9], [10, 11], [12]])
    whole = path.with_suffix(".idx").read_bytes()
    assert len(tokens_of(open_source(path))) == 7
    for at in range(34, 34 + 12 * 7):  # the lengths and the places
        for flip in (1, 2, 3, 0x80):
            index = bytearray(whole)
            index[at] ^= flip
            path.with_suffix(".idx").write_bytes(index)
            with pytest.raises(SourceError, match=r"a length or a place is damaged"):
                open_source(path).blocks(0)


def test_blocks_are_cut_by_bytes_and_any_row_is_reached_at_once(tmp_path: Path, open_source, monkeypatch):
    monkeypatch.setattr("overlord.readers.reader.SEEKABLE_BLOCK_BYTES", 64)
    monkeypatch.setattr("overlord.readers.megatron_files._ROWS_AT_A_TIME", 7)
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 99, n).tolist() for n in rng.integers(0, 30, 200)]
    source = open_source(write_dataset(tmp_path / "x", rows, dtype="<i4", code=4))
    blocks = source.blocks(0)
    assert len(blocks.rows) > 50 and blocks.bytes.sum() == sum(4 * len(row) for row in rows)
    assert tokens_of(source) == rows and not source.spills_parts(0)
    for block, count in enumerate(blocks.rows.tolist()):
        first = source.row_base(0, block)
        for start in range(count):
            got = list(source.stream(0, block, skip=start, stop=count, batch_rows=3))
            assert sum(map(num_rows, got)) == count - start
            assert got[0]["tokens"][0].tolist() == rows[first + start]


@pytest.mark.parametrize(("dtype", "code"), [("u1", 1), ("i1", 2), ("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)])
def test_all_types_of_tokens(dtype: str, code: int, tmp_path: Path, open_source):
    source = open_source(write_dataset(tmp_path / "x", [[1, 2], [100]], dtype=dtype, code=code))
    (batch,) = source.stream(0, 0, batch_rows=9)
    assert [batch["tokens"][row].tolist() for row in range(2)] == [[1, 2], [100]]


def test_floats_do_not_mix_with_tokens(tmp_path: Path, open_source):
    write_dataset(tmp_path / "a", [[1, 2]])
    write_dataset(tmp_path / "b", [[1, 2]], dtype="<f4", code=7)
    assert open_source(tmp_path / "b.bin").kinds() == {"tokens": "float_list"}
    with pytest.raises(ReaderError, match=r"b.bin holds float32 numbers, which reads as .float_list., but in"):
        read_all(open_source(tmp_path))


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_truncated_file_is_named(end: str, tmp_path: Path, open_source):
    path = write_dataset(tmp_path / "x", [[1, 2, 3], [4, 5]]).with_suffix(end)
    whole = path.read_bytes()
    for size in range(1, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"cannot read .*x\.bin: .*(cut short|promises|what follows)"):
            read_all(open_source(tmp_path / "x.bin"))


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"X", "does not begin like"),
        (9, b"\x02", "does not begin like"),
        (17, b"\x09", "does not begin like"),
        (18, b"\x03", "has 82 bytes where its header promises 94"),
        (34, b"\xff\xff\xff\xff", "sequence 0 has -1 tokens from byte 0 on, and what follows begins at byte 6"),
        (34, b"\x04", "sequence 0 has 4 tokens from byte 0 on, and what follows begins at byte 6"),
        (34, b"\x02", "sequence 0 has 2 tokens from byte 0 on, and what follows begins at byte 6"),
        (38, b"\x01", "sequence 1 has 1 tokens from byte 6 on, and what follows begins at byte 10"),
        (50, b"\x05", "sequence 0 has 3 tokens from byte 0 on, and what follows begins at byte 5"),
        (42, b"\x02", "it begins at byte 0, and what follows begins at byte 2"),
        (66, b"\x05", "documents 0 to 2 of its index are not in order"),
        (74, b"\x07", "documents 0 to 2 of its index are not in order"),
        (74, b"\x01", "has 2 sequences, and not all of them belong to a document"),
    ],
)
def test_an_index_that_lies_is_refused(at: int, value: bytes, why: str, tmp_path: Path, open_source):
    path = write_dataset(tmp_path / "x", [[1, 2, 3], [4, 5]])
    index = bytearray(path.with_suffix(".idx").read_bytes())
    index[at : at + len(value)] = value
    path.with_suffix(".idx").write_bytes(index)
    with pytest.raises(SourceError, match=why):
        read_all(open_source(path))


def test_a_multimodal_dataset_is_refused(tmp_path: Path, open_source):
    path = write_dataset(tmp_path / "x", [[1, 2, 3], [4, 5]])
    with path.with_suffix(".idx").open("ab") as index:
        index.write(b"\0\1")
    with pytest.raises(SourceError, match=r"x.idx has modes of sequences \(a multimodal dataset\), which are not read"):
        open_source(path).kinds()


def test_an_index_that_changes_under_a_job_is_noticed(tmp_path: Path, open_source):
    path = write_dataset(tmp_path / "x", [[1, 2, 3], [4, 5]])
    source = open_source(path)
    assert len(read_all(source)) == 2
    write_dataset(tmp_path / "x", [[1, 2], [3, 4, 5]])  # the .bin keeps its size
    with pytest.raises(ReaderError, match=r"x.(bin|idx) was written to after it was listed"):
        read_all(source)
    changed = open_source(path)
    assert tokens_of(changed) == [[1, 2], [3, 4, 5]]


def write_sparse(prefix: Path, documents: int) -> Path:
    """Write a dataset whose .bin is a hole in the disk."""
    lengths = np.random.default_rng(0).integers(1, 1000, documents, np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with prefix.with_suffix(".idx").open("wb") as index:
        index.write(MAGIC + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        for array in (lengths, np.append(0, ends[:-1]), np.arange(documents + 1)):
            array.tofile(index)
    with prefix.with_suffix(".bin").open("wb") as tokens:
        tokens.truncate(int(ends[-1]))
    return prefix.with_suffix(".bin")


def start_of(path: Path, cache: Path) -> dict[str, float]:
    """Return what a service has used when the first microbatch is there."""
    source = ol.Source("web", str(path), sample=ol.Text("tokens", tokenized=True))
    job = ol.Job([source], batch=ol.Batch(4096, global_tokens=8192))
    with ol.launch(job, cache=str(cache)) as service:
        assert next(service.client()).microbatches[0]["input_ids"].size
        root = psutil.Process(service.status()["pid"])
        used = {"cpu_s": 0.0, "pss_mb": 0.0, "read_mb": 0.0}
        for process in (root, *root.children(recursive=True)):
            used["cpu_s"] += sum(process.cpu_times()[:2])
            used["pss_mb"] += process.memory_full_info().pss / 2**20
            used["read_mb"] += process.io_counters().read_chars / 2**20
        return used


@pytest.mark.slow
def test_ten_million_documents_begin_with_less_than_twice_the_work_of_a_thousand(tmp_path: Path):
    """A start is serial work: its processor time, unlike its wall time, is the same on a busy machine."""
    few, many = write_sparse(tmp_path / "few", 1_000), write_sparse(tmp_path / "many", 10_000_000)
    start_of(few, tmp_path / "cache")  # kernels and files are warm
    base, found = start_of(few, tmp_path / "base"), start_of(many, tmp_path / "first")
    assert found["cpu_s"] < 2 * base["cpu_s"]
    assert found["pss_mb"] - base["pss_mb"] < 100
    # The .idx is read once (200 MB), and of the .bin (10 GB) what the first groups hold: nothing is measured.
    assert found["read_mb"] - base["read_mb"] < 200 + 100
