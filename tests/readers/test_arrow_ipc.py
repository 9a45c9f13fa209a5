"""Arrow IPC: both formats, and the folders that Hugging Face datasets save."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from overlord.core.ragged import Ragged
from overlord.errors import SourceError

from .conftest import read_all


def test_a_saved_hugging_face_dataset_is_read_from_its_folder(tmp_path: Path, open_source):
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    for note in ("dataset_info.json", "state.json"):
        (folder / note).write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for shard in range(2):
        table = pa.table(
            {
                "image": pa.array([{"bytes": b"%d" % (shard * 5 + n), "path": None} for n in range(5)], image),
                "label": list(range(5)),
            }
        )
        with pa.ipc.new_stream(folder / f"data-0000{shard}-of-00002.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    source = open_source(tmp_path / "saved", columns=["image", "label"])
    assert source.format == "arrow" and len(source.files) == 2
    assert source.blocks(0).rows.tolist() == [2, 2, 1]
    assert [row["image"] for row in read_all(source)] == [b"%d" % n for n in range(10)]


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_values_are_views_of_the_mapped_file(new, tmp_path: Path, open_source):
    table = pa.table({"text": pa.array(["abc"] * 1000, pa.large_string()), "n": np.arange(1000)})
    with new(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    before = pa.total_allocated_bytes()
    (batch,) = open_source(tmp_path / "x.arrow").stream(0, 0, batch_rows=1000)
    assert isinstance(batch["text"], Ragged)
    assert not batch["text"].values.flags.owndata and not batch["n"].flags.owndata
    assert pa.total_allocated_bytes() - before < 1000


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_dictionaries_are_decoded_in_every_batch(new, tmp_path: Path, open_source):
    table = pa.table({"word": pa.array(["a", "b", "c", "a"]).dictionary_encode()})
    with new(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    assert [row["word"] for row in read_all(open_source(tmp_path / "x.arrow"))] == [b"a", b"b", b"c", b"a"]


def test_a_file_that_is_not_arrow_is_named(tmp_path: Path, open_source):
    (tmp_path / "x.arrow").write_bytes(b"not arrow at all")
    with pytest.raises(SourceError, match=r"cannot read .*x.arrow"):
        open_source(tmp_path / "x.arrow").blocks(0)


def test_a_stream_that_is_cut_short_is_named(tmp_path: Path, open_source):
    table = pa.table({"n": np.arange(10_000)})
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    (tmp_path / "x.arrow").write_bytes((tmp_path / "x.arrow").read_bytes()[:50_000])
    with pytest.raises(SourceError, match=r"cannot read .*x.arrow"):
        open_source(tmp_path / "x.arrow").blocks(0)
