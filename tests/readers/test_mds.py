"""Mosaic's MDS: shards of the library's own writer, equal to its own reader; damage, resume, what is refused."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import overlord as ol
from overlord.core.ragged import unread_rows
from overlord.errors import ReaderError, SourceError
from overlord.readers.files import list_files
from overlord.testing import assert_resumes_anywhere, stream_digests

from .conftest import read_all, read_block

DATA = Path(__file__).parent / "data" / "mds"
RAW = DATA / "raw"
PACKED = ["zstd", "gz", "bz2", "br"]
KINDS = {
    "text": "bytes",
    "ids": "int_list",
    "any": "int_list",
    "four": "int_list",
    "n": "int",
    "score": "float",
    "digits": "int",
    "meta": "json",
    "raw": "bytes",
    "image": "bytes",
    "images": "bytes_list",
}


def pixels(data: bytes) -> bytes:
    return np.asarray(Image.open(io.BytesIO(data))).tobytes()


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as the library's reader gives it."""
    assert not row.pop("__bad__")
    sizes, images = row.pop("__sizes__.images"), row["images"]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    return row | {
        "text": row["text"].decode(),
        "meta": json.loads(row["meta"]),
        "image": pixels(row["image"]),
        "images": [pixels(images[a:b]) for a, b in itertools.pairwise(bounds)],
    }


def expected() -> list[dict[str, Any]]:
    return [row | {"meta": json.loads(row["meta"])} for row in pq.read_table(DATA / "raw.parquet").to_pylist()]


def shard_of(samples: list[dict[str, bytes]], encodings: dict[str, str], sizes: dict[str, int] | None = None) -> bytes:
    """Return a shard as the library writes it, of cells that are encoded already."""
    fixed = sizes or {}
    config = {
        "version": 2,
        "format": "mds",
        "column_names": list(encodings),
        "column_encodings": list(encodings.values()),
        "column_sizes": [fixed.get(name) for name in encodings],
    }
    text = json.dumps(config).encode()
    rows = [
        np.array([len(row[name]) for name in encodings if name not in fixed], "<u4").tobytes()
        + b"".join(row[name] for name in encodings)
        for row in samples
    ]
    begin = 4 * (len(rows) + 2) + len(text)
    places = begin + np.cumsum([0, *map(len, rows)])
    return np.array([len(rows), *places], "<u4").tobytes() + text + b"".join(rows)


def test_rows_are_those_of_the_librarys_own_reader(open_source):
    source = open_source(RAW)
    assert source.format == "mds" and source.kinds() == dict(sorted(KINDS.items()))
    assert [plain(row) for row in read_all(source)] == expected()
    assert [plain(row) for row in read_all(source, batch_rows=1)] == expected()


@pytest.mark.parametrize("packed", PACKED)
def test_compressed_shards_hold_the_same_rows(packed: str, open_source):
    source = open_source(DATA / packed)
    assert source.format == "mds" and source.spills_parts(0)
    assert [plain(row) for row in read_all(source)] == expected()[:8]


@pytest.mark.parametrize("folder", ["raw", *PACKED])
def test_any_row_is_reached(folder: str, open_source):
    source = open_source(DATA / folder, columns=["n", "meta.lang", "text"])
    assert source.kinds() == {"n": "int", "meta.lang": "bytes", "text": "bytes"}
    whole = read_block(source, 0, 0)
    assert [row["meta.lang"] for row in whole][:2] == [b"en", b"de"]
    for skip in range(len(whole) + 1):
        assert read_block(source, 0, 0, skip, 3) == whole[skip:]
        parts = [batch["n"] for batch in source.stream(0, 0, skip=skip, stop=len(whole), batch_rows=2)]
        assert np.concatenate([[], *parts]).tolist() == [row["n"] for row in whole[skip:]]


def test_the_stream_is_that_of_the_same_rows_as_parquet(tmp_path: Path):
    def digests(path: Path):
        source = ol.Source("web", str(path), sample=ol.Text("ids", tokenized=True), shuffle_bytes=0)
        job = ol.Job([source], batch=ol.Batch(512, global_samples=4))
        return stream_digests(job, steps=10, cache=str(tmp_path / "cache"))

    one = tmp_path / "x.mds"
    rows = [np.array(row["ids"], np.int32).tobytes() for row in expected()]
    cells = [bytes([1 << 2 | 1]) + np.uint16(len(row) // 4).tobytes() + row for row in rows]
    one.write_bytes(shard_of([{"ids": cell} for cell in cells], {"ids": "ndarray:int32"}))
    assert digests(one) == digests(DATA / "raw.parquet")  # sample ids name the file: one each
    assert digests(RAW).content == digests(DATA / "raw.parquet").content


@pytest.mark.parametrize("folder", ["raw", "zstd"])
@pytest.mark.parametrize("shuffle_bytes", [0, 2048])
def test_a_run_resumes_at_any_step(folder: str, shuffle_bytes: int, tmp_path: Path):
    sample = ol.Text("ids", tokenized=True)
    source = ol.Source("web", str(DATA / folder), sample=sample, shuffle_bytes=shuffle_bytes)
    job = ol.Job([source], batch=ol.Batch(512, global_samples=3))
    assert_resumes_anywhere(job, steps=5, cache=str(tmp_path / "cache"))


def test_what_the_library_writes_beside_shards_is_no_data(tmp_path: Path):
    shutil.copytree(RAW, tmp_path / "train")
    shutil.copy(RAW / "index.json", tmp_path / "index.json")  # of a merged dataset
    shutil.copy(DATA / "zstd" / "shard.00000.mds.zstd", tmp_path / "train")  # keep_local keeps both
    names = [f"shard.{n:05d}.mds" for n in range(7)]
    assert [Path(file.path).name for file in list_files([str(tmp_path)])] == names
    assert [Path(file.path).name for file in list_files([str(tmp_path / "train" / "*")])] == names


@pytest.mark.parametrize(
    ("encoding", "why"),
    [
        ("pkl", "it would have to be unpickled, which runs what is in it"),
        ("pil", "it is not read"),
        ("ndarray:object", "it is not read"),
        ("ndarray:int32:3,4", r"holds arrays of shape \(3,4\); only arrays of one dimension are read"),
    ],
)
def test_other_encodings_are_refused_where_they_are_wanted(encoding: str, why: str, tmp_path: Path, open_source):
    path = tmp_path / "x.mds"
    path.write_bytes(shard_of([{"a": b"x", "b": b"cbuiltins\nexit\n."}], {"a": "str", "b": encoding}))
    with pytest.raises(SourceError, match=why):
        open_source(path, columns=["a", "b"]).kinds()
    assert [row["a"] for row in read_all(open_source(path, columns=["a"]))] == [b"x"]


def test_a_missing_column_is_refused(open_source):
    with pytest.raises(SourceError, match=r"has no column 'texts' .* Did you mean 'text'"):
        open_source(RAW, columns=["texts"]).kinds()


def test_arrays_that_are_no_lists_are_bad_rows(tmp_path: Path, open_source):
    cells = {
        "one": b"\x04\x02" + np.array([7, 8], "<i4").tobytes(),
        "two dimensions": b"\x08\x01\x02" + np.array([7, 8], "<i4").tobytes(),
        "half a value": b"\x04\x02" + np.array([7, 8], "<i4").tobytes()[:-1],
        "no shape": b"",
    }
    path = tmp_path / "x.mds"
    path.write_bytes(shard_of([{"a": cell} for cell in cells.values()], {"a": "ndarray:int32"}))
    rows = read_all(open_source(path))
    assert [row["a"] for row in rows] == [[7, 8], [], [], []]
    assert [row["__bad__"] for row in rows] == [False, True, True, True]


def test_other_types_of_arrays_in_another_shard(tmp_path: Path, open_source):
    (tmp_path / "a.mds").write_bytes(shard_of([{"a": b"\x04\x01\x05\0\0\0"}], {"a": "ndarray:int32"}))
    (tmp_path / "b.mds").write_bytes(shard_of([{"a": b"\x22\x04\x01" + np.float32(0.5).tobytes()}], {"a": "ndarray"}))
    (tmp_path / "c.mds").write_bytes(shard_of([{"a": b"five"}], {"a": "str"}))
    rows = read_all(open_source(tmp_path / "[ab].mds"))
    assert [(row["a"], row["__bad__"]) for row in rows] == [([5], False), ([], True)]
    with pytest.raises(ReaderError, match=r"holds values of encoding 'str', which reads as 'bytes', but in"):
        read_all(open_source(tmp_path / "[ac].mds"))


def test_rows_whose_columns_do_not_add_up_are_bad(tmp_path: Path, open_source):
    data = bytearray(shard_of([{"a": b"one"}, {"a": b"two"}, {"a": b"three"}], {"a": "str"}))
    at = data.index(b"two") - 4
    data[at] = 200
    (tmp_path / "x.mds").write_bytes(data)
    rows = read_all(open_source(tmp_path / "x.mds"))
    assert [(row["a"], row["__bad__"]) for row in rows] == [(b"one", False), (b"", True), (b"three", False)]
    (batch,) = open_source(tmp_path / "x.mds").stream(0, 0, batch_rows=9)
    why = "it is damaged: its columns do not add up to its size, or its checksum is another"
    assert unread_rows(batch) == [(1, why)]


@pytest.mark.parametrize("name", ["shard.00006.mds", "shard.00001.mds.zstd", "shard.00001.mds.gz"])
def test_a_truncated_shard_is_named(name: str, tmp_path: Path, open_source):
    folder = {"mds": "raw"}.get(name.rpartition(".")[2], name.rpartition(".")[2])
    whole, path = (DATA / folder / name).read_bytes(), tmp_path / name
    for size in [*range(1, 64), *range(64, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises((SourceError, ReaderError), match=name):
            read_all(open_source(path))


def test_a_flip_in_the_table_or_the_sizes_is_noticed(tmp_path: Path, open_source):
    texts = [b"one", b"", b"three", b"four"]
    whole = shard_of([{"a": text, "b": text * 2} for text in texts], {"a": "str", "b": "bytes"})
    path, begin = tmp_path / "x.mds", int.from_bytes(whole[4:8], "little")
    sizes = [begin + sum(8 + 3 * len(text) for text in texts[:n]) + k for n in range(len(texts)) for k in range(8)]
    for at in [*range(4 * (len(texts) + 2)), *sizes]:
        for flip in (1, 2, 0x80):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                rows = read_all(open_source(path))
            except (SourceError, ReaderError) as error:
                assert "x.mds" in str(error)
                continue
            assert any(row["__bad__"] for row in rows)
            good = [(row["a"], row["b"]) for row in rows if not row["__bad__"]]
            assert set(good) <= {(text, text * 2) for text in texts}


@pytest.mark.parametrize("folder", ["raw", "zstd"])
def test_a_flip_anywhere_is_noticed_where_shards_have_hashes(folder: str, tmp_path: Path, open_source):
    expected = [(f"row {n} ünï " * (n % 4), n - 5) for n in range(12)]
    assert [(row["text"].decode(), row["n"]) for row in read_all(open_source(DATA / "hashed" / folder))] == expected
    shutil.copytree(DATA / "hashed" / folder, tmp_path / "copy")
    shard = next((tmp_path / "copy").glob("shard.00001.*"))
    whole = shard.read_bytes()
    for at in range(len(whole)):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(SourceError, match=r"shard.00001.*: its sha1 is not the one in the index.json beside it"):
            read_all(open_source(tmp_path / "copy", columns=["text", "n"]))
    index = json.loads((tmp_path / "copy" / "index.json").read_text())
    for one in index["shards"]:  # hashes that are not known are not compared
        for part in filter(None, (one["raw_data"], one["zip_data"])):
            del part["hashes"]["sha1"]
    (tmp_path / "copy" / "index.json").write_text(json.dumps(index))
    shard.write_bytes(whole)
    assert len(read_all(open_source(tmp_path / "copy"))) == 12
    (tmp_path / "copy" / "index.json").write_text("{")
    os.utime(shard, ns=(1, 1))  # another version of the file
    with pytest.raises(SourceError, match=r"shard.00001.*: the index.json beside it, .* is not one of MDS"):
        read_all(open_source(tmp_path / "copy"))
    os.truncate(tmp_path / "copy" / "index.json", 1 << 40)
    os.utime(shard, ns=(2, 2))
    with pytest.raises(SourceError, match=r"shard.00001.*: the index.json beside it has 1099511627776 bytes"):
        read_all(open_source(tmp_path / "copy"))
