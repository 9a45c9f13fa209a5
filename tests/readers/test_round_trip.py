"""Every format gives back exactly the rows that were written, from any row on, in any batch size."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles

from .conftest import read_all, read_block

Rows = list[dict[str, Any]]


def _table(rows: Rows) -> pa.Table:
    return pa.table(
        {
            "text": pa.array([r["text"] for r in rows], pa.string()),
            "ids": pa.array([r["ids"] for r in rows], pa.list_(pa.int64())),
            "stars": pa.array([r["stars"] for r in rows], pa.int64()),
        }
    )


def write_parquet(path: Path, rows: Rows) -> None:
    pq.write_table(_table(rows), path, row_group_size=5)


def write_arrow_file(path: Path, rows: Rows) -> None:
    with pa.ipc.new_file(path, _table(rows).schema) as writer:
        writer.write_table(_table(rows), max_chunksize=4)


def write_arrow_stream(path: Path, rows: Rows) -> None:
    with pa.ipc.new_stream(path, _table(rows).schema) as writer:
        writer.write_table(_table(rows), max_chunksize=4)


def _lines(rows: Rows) -> bytes:
    return b"\n\n".join(json.dumps(r).encode() for r in rows)


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_bytes(_lines(rows))


def write_jsonl_compressed(path: Path, rows: Rows) -> None:
    with pa.output_stream(path, compression={".gz": "gzip", ".zst": "zstd"}[path.suffix]) as out:
        out.write(_lines(rows))


def write_tar(path: Path, rows: Rows) -> None:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
        for number, row in enumerate(rows):
            info = tarfile.TarInfo(f"a/{number}.json")
            payload = json.dumps(row).encode()
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


FORMATS: dict[str, Callable[[Path, Rows], None]] = {
    "x.parquet": write_parquet,
    "x.arrow": write_arrow_file,
    "x.ipc": write_arrow_stream,
    "x.jsonl": write_jsonl,
    "x.jsonl.gz": write_jsonl_compressed,
    "x.ndjson.zst": write_jsonl_compressed,
    "x.tar": write_tar,
    "x.tar.gz": write_tar,
}

row_lists = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.text(st.characters(codec="utf-8"), max_size=12),
            "ids": st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
            "stars": st.integers(-(2**63), 2**63 - 1),
        }
    ),
    min_size=1,
    max_size=23,
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=row_lists, data=st.data())
def test_rows_come_back(name: str, rows: Rows, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("rows")
    FORMATS[name](folder / name, rows)
    prefix = "json." if "tar" in name else ""
    columns = [prefix + column for column in ("text", "ids", "stars")]
    source = SourceFiles("web", [str(folder / name)], cache=IndexCache(folder / "cache"), columns=columns)
    expected = [
        {
            prefix + "text": r["text"].encode(),
            prefix + "ids": r["ids"],
            prefix + "stars": r["stars"],
            "__bad__": False,
        }
        for r in rows
    ]

    batch_rows = data.draw(st.integers(1, 30))
    assert read_all(source, batch_rows) == expected

    blocks = source.blocks(0)
    block = data.draw(st.integers(0, len(blocks.rows) - 1))
    skip = data.draw(st.integers(0, int(blocks.rows[block])))
    first = source.row_base(0, block)
    stop = first + int(blocks.rows[block])
    assert read_block(source, 0, block, skip, batch_rows) == expected[first + skip : stop]


@pytest.mark.parametrize("name", ["x.jsonl", "x.tar"])
def test_a_large_file_has_blocks_of_about_a_mebibyte(name: str, tmp_path: Path, open_source):
    rows = [{"text": "ab" * 50_000, "ids": [n], "stars": n} for n in range(50)]
    FORMATS[name](tmp_path / name, rows)
    prefix = "json." if "tar" in name else ""
    source = open_source(tmp_path / name, columns=[prefix + "stars"])
    blocks = source.blocks(0)
    assert len(blocks.rows) == 5
    assert all(1 << 20 <= size < 1.2 * (1 << 20) for size in blocks.bytes[:-1])
    assert [row[prefix + "stars"] for row in read_all(source)] == list(range(50))
