"""The index cache: built once, never stale, never trusted blindly."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from overlord.errors import ReaderError, SourceError
from overlord.readers.files import StoredFile, list_files
from overlord.readers.index import IndexCache, build_indices
from overlord.readers.jsonl import JsonlReader
from overlord.readers.reader import BlockIndex


class CountingReader(JsonlReader):
    """Counts how often a file is indexed, and can wait for a signal while it does."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        self.built.append(file.path)
        self.gate.wait(10)
        return super().index(file, columns)


def write(path: Path, rows: int) -> StoredFile:
    path.write_text('{"text": "a"}\n' * rows)
    return list_files([str(path)])[0]


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_an_index_is_built_once_and_found_by_another_cache(tmp_path: Path):
    file, reader = write(tmp_path / "x.jsonl", 7), CountingReader()
    for _ in range(2):
        for cache in (IndexCache(tmp_path / "c"), IndexCache(tmp_path / "c")):
            assert cache.index(file, reader, ["text"]).rows.tolist() == [7]
    assert len(reader.built) == 1
    assert [p.suffix for p in entries(tmp_path / "c")] == [".index"]


def test_a_changed_file_and_other_columns_have_entries_of_their_own(tmp_path: Path):
    cache, reader = IndexCache(tmp_path / "c"), CountingReader()
    file = write(tmp_path / "x.jsonl", 7)
    cache.index(file, reader, ["text", "id"])
    cache.index(file, reader, ["id", "text"])
    assert len(reader.built) == 1
    cache.index(file, reader, ["text"])
    assert len(reader.built) == 2
    os.utime(file.location, ns=(0, file.mtime_ns + 5_000_000))
    cache.index(list_files([file.path])[0], reader, ["text"])
    assert len(reader.built) == 3
    assert cache.index(write(tmp_path / "x.jsonl", 8), reader, ["text"]).rows.tolist() == [8]


def test_a_file_that_changed_after_its_listing_is_not_indexed(tmp_path: Path):
    file = write(tmp_path / "x.jsonl", 7)
    write(tmp_path / "x.jsonl", 8)
    with pytest.raises(ReaderError, match=r"would change the stream"):
        IndexCache(tmp_path / "c").index(file, JsonlReader(), ["text"])


@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "longer", "old"])
def test_a_damaged_entry_is_built_again(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cache, reader, file = IndexCache(tmp_path / "c"), CountingReader(), write(tmp_path / "x.jsonl", 7)
    cache.index(file, reader, ["text"])
    (entry,) = entries(tmp_path / "c")
    match damage:
        case "empty":
            entry.write_bytes(b"")
        case "cut":
            entry.write_bytes(entry.read_bytes()[:-8])
        case "noise":
            entry.write_bytes(os.urandom(200))
        case "longer":
            entry.write_bytes(entry.read_bytes() + bytes(8))
        case _:
            with entry.open("wb") as handle:
                np.save(handle, np.zeros((5, 2), np.int64))
    assert cache.find(file, reader, ["text"]) is None
    assert cache.index(file, reader, ["text"]).rows.tolist() == [7]
    assert len(reader.built) == 2
    (told,) = caplog.records
    assert file.path in told.message and "is damaged; it is built again" in told.message


def test_any_flipped_bit_of_an_entry_is_noticed(tmp_path: Path):
    cache, reader, file = IndexCache(tmp_path / "c"), CountingReader(), write(tmp_path / "x.jsonl", 7)
    cache.index(file, reader, ["text"])
    (entry,) = entries(tmp_path / "c")
    whole = entry.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        entry.write_bytes(damaged)
        assert cache.find(file, reader, ["text"]) is None, f"bit {bit}"


@pytest.mark.parametrize("rows", [-1, 1 << 32, 1 << 62])
def test_a_file_that_claims_an_absurd_number_of_rows_is_refused(rows: int, tmp_path: Path):
    class Liar(JsonlReader):
        def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
            return BlockIndex.of([(rows, 2, 0, 1), (rows, 2, 1, 2)])

    with pytest.raises(SourceError, match=r"it claims -?\d+ rows"):
        IndexCache(tmp_path / "c").index(write(tmp_path / "x.jsonl", 7), Liar(), ["text"])


def test_threads_that_ask_for_one_file_build_it_once(tmp_path: Path):
    cache, reader, file = IndexCache(tmp_path / "c"), CountingReader(), write(tmp_path / "x.jsonl", 7)
    reader.gate.clear()
    found: list[BlockIndex] = []
    threads = [threading.Thread(target=lambda: found.append(cache.index(file, reader, ["text"]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    reader.gate.set()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(reader.built) == 1


def test_a_large_index_is_mapped_and_a_small_one_holds_no_file(tmp_path: Path):
    class ManyBlocks(JsonlReader):
        def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
            return BlockIndex.of([(1, 2, n, n + 1) for n in range(int(columns[0]))])

    cache, file = IndexCache(tmp_path / "c"), write(tmp_path / "x.jsonl", 7)
    large = cache.index(file, ManyBlocks(), ["5000"])
    assert large.first_row.tolist() == list(range(5000))
    assert not large.rows.flags.owndata and not large.rows.flags.writeable
    assert len(cache.index(file, ManyBlocks(), ["0"]).rows) == 0


def test_many_files_are_indexed_in_order(tmp_path: Path):
    files = [write(tmp_path / f"{n}.jsonl", n + 1) for n in range(9)]
    done = build_indices(IndexCache(tmp_path / "c"), files, JsonlReader(), ["text"])
    assert [int(index.rows.sum()) for index in done] == list(range(1, 10))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "c").write_text("a file, not a folder")
    with pytest.raises(SourceError, match=r"cannot write the index .*Choose a cache folder that can be written"):
        IndexCache(tmp_path / "c").index(write(tmp_path / "x.jsonl", 7), JsonlReader(), ["text"])
