"""join: columns of another dataset by row or by key, the same stream as from files that have them already."""

from __future__ import annotations

import io
import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import overlord as ol
from overlord.errors import SourceError, SpecError
from overlord.job_files import load_job_file
from overlord.testing import assert_resumes_anywhere, stream_digests

ROWS = 120
IMAGES = {"patch": 16, "merge": 1, "min_pixels": 256}
TEXTS = [f"w{n % 40} w{n % 7}" for n in range(ROWS)]


def png(number: int) -> bytes:
    out = io.BytesIO()
    side = 16 + 16 * (number % 3)
    Image.fromarray(np.full((side, 32, 3), number % 256, np.uint8)).save(out, "PNG")
    return out.getvalue()


PNGS = [png(number) for number in range(ROWS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Captions in three files of Parquet and of JSONL; images in two files of Parquet, also in another order."""
    path = tmp_path_factory.mktemp("join")
    ids = [f"id-{n}" for n in range(ROWS)]
    whole = pa.table({"id": ids, "n": list(range(ROWS)), "caption": TEXTS, "image": PNGS})
    mixed = whole.take(np.random.default_rng(0).permutation(ROWS))
    for number, (low, high) in enumerate(((0, 30), (30, 31), (31, ROWS))):
        part = whole.slice(low, high - low)
        pq.write_table(part, path / f"whole-{number}.parquet", row_group_size=16)
        captions = part.select(["id", "n", "caption"])
        pq.write_table(captions, path / f"captions-{number}.parquet", row_group_size=16)
        lines = [json.dumps(row) + "\n" for row in captions.to_pylist()]
        (path / f"captions-{number}.jsonl").write_text("".join(lines))
    for number, (low, high) in enumerate(((0, 70), (70, ROWS))):
        pq.write_table(whole.slice(low, high - low).select(["image"]), path / f"rows-{number}.parquet")
        keyed = mixed.slice(low, high - low).rename_columns(["key", "number", "caption", "picture"])
        pq.write_table(keyed.select(["key", "number", "picture"]), path / f"keys-{number}.parquet", row_group_size=9)
    return path


def job_of(tokenizer, path, join=None, **source) -> ol.Job:
    sample = ol.ImageText("image", "caption", **IMAGES)
    joined = ol.Source("s", str(path), sample=sample, join=join, **({"shuffle_bytes": 0} | source))
    return ol.Job([joined], tokenizer=tokenizer, batch=ol.Batch(64, global_samples=16))


def content(job, cache, steps=9):
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        return [
            ([str(i) for i in batch.meta.sample_ids], {key: np.array(values) for key, values in batch.items()})
            for _ in range(steps)
            for batch in next(client).microbatches
        ]


def same(ours, theirs) -> None:
    assert len(ours) == len(theirs)
    for (ids, one), (other_ids, other) in zip(ours, theirs, strict=True):
        assert ids == other_ids and one.keys() == other.keys() and "pixel_values" in one
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], key)


def test_joined_columns_are_those_of_one_file(folder, tokenizer, cache):
    """By row, by text and by number, from formats that cannot seek; into the second epoch."""
    reference = content(job_of(tokenizer, folder / "whole-*.parquet"), cache)
    by_row = ol.Join(folder / "rows-*.parquet", "image")
    by_text = ol.Join(str(folder / "keys-*.parquet"), {"image": "picture"}, by="id", key="key")
    by_number = ol.Join(str(folder / "keys-*.parquet"), {"image": "picture"}, by="n", key="number", missing="error")
    for files, join in (("*.parquet", by_row), ("*.jsonl", by_text), ("*.parquet", by_number)):
        same(content(job_of(tokenizer, folder / f"captions-{files}", join), cache), reference)


def test_the_law_holds(folder, tokenizer, cache):
    join = ol.Join(str(folder / "keys-*.parquet"), {"image": "picture"}, by="id", key="key")
    job = job_of(tokenizer, folder / "captions-*.parquet", join, shuffle_bytes=4096)
    mesh = ol.ClientPlaceTree(dp=2)
    reference = stream_digests(job, mesh=mesh, steps=5, cache=cache)
    assert stream_digests(job, mesh=mesh, steps=5, cache=cache, loaders_per_source=2) == reference
    assert_resumes_anywhere(job, steps=3, mesh=mesh, cache=cache)
    # Beside order_by: rows of both are reached one by one.
    ordered = content(job_of(tokenizer, folder / "captions-*.jsonl", join, order_by="-n"), cache, steps=2)
    plain = content(job_of(tokenizer, folder / "whole-*.parquet", order_by="-n"), cache, steps=2)
    same(ordered, plain)


@pytest.mark.slow
def test_the_law_holds_over_processes(folder, tokenizer, cache):
    join = ol.Join(str(folder / "keys-*.parquet"), {"image": "picture"}, by="id", key="key")
    job = job_of(tokenizer, folder / "captions-*.parquet", join, shuffle_bytes=4096)
    mesh = ol.ClientPlaceTree(dp=2)
    reference = stream_digests(job, mesh=mesh, steps=5, cache=cache)
    for options in ({"loaders_per_source": 2}, {"loader_hosts": 2}):
        assert stream_digests(job, mesh=mesh, steps=5, cache=cache, runtime="local", threads=4, **options) == reference


def test_another_joined_dataset_is_another_stream(folder, tokenizer, cache, tmp_path):
    def launch(join, state=None):
        job = job_of(tokenizer, folder / "captions-*.parquet", join)
        with ol.launch(job, runtime="inline", cache=cache, state=state) as service:
            client = service.client()
            next(client)
            return client.state_dict()

    pq.write_table(pa.table({"image": PNGS}), tmp_path / "others.parquet")
    state = launch(ol.Join(folder / "rows-*.parquet", "image"))
    assert launch(ol.Join(folder / "rows-*.parquet", "image"), state)["step"] == 2
    with pytest.raises(ol.StateError, match="another stream"):
        launch(ol.Join(tmp_path / "others.parquet", "image"), state)


def test_rows_without_a_partner_are_bad_samples_or_refused(folder, tokenizer, cache, tmp_path, caplog):
    rows = [{"id": f"id-{n}", "caption": "w1"} for n in range(15)]
    rows[4]["id"], rows[9]["id"] = "id-x", None
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    join = ol.Join(str(folder / "keys-*.parquet"), {"image": "picture"}, by="id", key="key")
    job = job_of(tokenizer, tmp_path / "captions.jsonl", join).replace(batch=ol.Batch(64, global_samples=15))
    with caplog.at_level(logging.WARNING, "overlord"), ol.launch(job, runtime="inline", cache=cache) as service:
        next(service.client())
        assert service.status()["sources"]["s"]["bad"] == 2
    assert "bad sample s:0:4@0: no row of the joined dataset has the key of this row" in caplog.text
    strict = job.replace(sources=[job.sources[0].replace(join=join.replace(missing="error"))])
    with pytest.raises(SourceError, match=r"row 4 of .*captions.jsonl has the key 'id-x', which no row of"):
        content(strict, cache)


def test_wrong_joins_are_refused_before_anything_runs(folder, tokenizer, cache, tmp_path):
    def launch(join, path=folder / "captions-*.parquet", **source):
        content(job_of(tokenizer, path, join, **source), cache)

    keys = str(folder / "keys-*.parquet")
    with pytest.raises(SourceError, match=r"'s' has 120 rows, and the dataset that is joined by row .* has 70"):
        launch(ol.Join(folder / "rows-0.parquet", "image"))
    with pytest.raises(SourceError, match=r"has no column 'image' \(it has: key, number, picture\)"):
        launch(ol.Join(keys, "image", by="id", key="key"))
    with pytest.raises(SourceError, match=r"join.by='n' holds 'int' values, and 'key' of .* 'bytes'"):
        launch(ol.Join(keys, {"image": "picture"}, by="n", key="key"))
    with pytest.raises(SourceError, match="has no column 'idd'"):
        launch(ol.Join(keys, {"image": "picture"}, by="idd", key="key"))
    with pytest.raises(SourceError, match="the source has a column 'image' of its own"):
        launch(ol.Join(keys, {"image": "picture"}, by="id", key="key"), folder / "whole-*.parquet")
    with pytest.raises(SpecError, match="'picture' is not read by the sample"):
        launch(ol.Join(keys, ["picture"], by="id", key="key"))
    pq.write_table(pa.table({"id": ["a", "b", "a"], "image": PNGS[:3]}), tmp_path / "twice.parquet")
    with pytest.raises(SourceError, match=r"row 0 of .*twice.parquet and row 2 of .* have the same 'id' \('a'\)"):
        launch(ol.Join(tmp_path / "twice.parquet", "image", by="id"))
    with pytest.raises(SpecError, match="would not be used: without by rows"):
        ol.Join(keys, "image", key="id")
    with pytest.raises(SpecError, match="columns is"):
        ol.Join(keys, [])
    with pytest.raises(SpecError, match="a sidecar would not notice"):
        launch(ol.Join(keys, {"image": "picture"}, by="id", key="key"), lengths="sidecar")


def test_job_files_name_joins_beside_them(tmp_path):
    text = """
        sources:
          - name: a
            path: a.parquet
            sample: {image: image, text: caption}
            join: {path: images/, columns: {image: picture}, by: id}
        tokenizer: t.json
        batch: {context_length: 512, global_samples: 4}
    """
    (tmp_path / "job.yaml").write_text(text)
    join = load_job_file(tmp_path / "job.yaml").job.sources[0].join
    assert join is not None and join.path == (f"{tmp_path}/images/",) and join.columns == {"image": "picture"}


def test_a_custom_sample_gets_every_column(folder, cache):
    def tokens(row):
        return {"tokens": [row["n"], len(row["image"])]}

    for columns in (None, ["n", "image"]):
        source = ol.Source("s", str(folder / "captions-*.parquet"), sample=ol.Custom(tokens, columns=columns),
                           join=ol.Join(folder / "rows-*.parquet", "image"))  # fmt: skip
        job = ol.Job([source], batch=ol.Batch(8, global_samples=8))
        with ol.launch(job, runtime="inline", cache=cache) as service:
            ids = next(service.client()).microbatches[0]["input_ids"][0]
        assert all(int(size) == len(PNGS[int(n)]) for n, size in zip(ids[0:8:2], ids[1:8:2], strict=True))
    # Also where the sample reads no column of the source itself.
    source = source.replace(
        sample=ol.Custom(lambda row: {"tokens": [1, len(row["image"])]}, columns=["image"], name="t")
    )
    with ol.launch(job.replace(sources=[source]), runtime="inline", cache=cache) as service:
        ids = next(service.client()).microbatches[0]
        sizes = dict(zip(ids.meta.sample_ids, ids["input_ids"][0][1::2].tolist(), strict=False))
    first = {0: 0, 1: 30, 2: 31}
    assert sizes and all(size == len(PNGS[first[one.file] + one.row_in_file]) for one, size in sizes.items())
    whole = ol.Source("s", str(folder / "captions-0.parquet"), sample=ol.ImageText("image", "words"))
    assert whole.replace(join={"path": "x", "columns": ["image", "words"]}).join == ol.Join("x", ["image", "words"])
