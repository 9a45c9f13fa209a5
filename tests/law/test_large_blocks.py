"""Large row groups as pyarrow and pandas write them, and compressed lines: shuffled, exactly once, resumed anywhere."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import overlord as ol
from overlord.core.states import sealed
from overlord.errors import StateError
from overlord.readers.spill import HeldRows
from overlord.testing import assert_resumes_anywhere, stream_digests

ROWS = 3_000
FEW_ROWS = 1_500
SHUFFLE_BYTES = 64 << 10


def job_of(folder: Path, kind: str, *, samples: int = 100, rows: int = ROWS, **options: Any) -> ol.Job:
    """Write rows as one row group, 1 MB or more of ROWS, and return a job that reads it with a smaller shuffle."""
    random = np.random.default_rng(0)
    if kind in ("text", "lines"):
        column = pa.array([f"{row} {random.bytes(150).hex()}" for row in range(rows)])
        table, sample = pa.table({"text": column}), ol.Text("text")
    elif kind == "tokens":
        ids = [random.integers(0, 30_000, 1 + int(n)) for n in random.integers(0, 200, rows)]
        table, sample = pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), ol.Text("ids", tokenized=True)
    else:
        images = []
        for _ in range(400):
            out = io.BytesIO()
            Image.fromarray(random.integers(0, 255, (56, 56, 3), np.uint8)).save(out, "JPEG", quality=95)
            images.append(out.getvalue())
        table = pa.table({"jpg": pa.array(images, pa.binary()), "text": [f"{n}" for n in range(400)]})
        sample = ol.ImageText("jpg", "text", patch=14, min_pixels=56 * 56, max_pixels=56 * 56)
    path = folder / f"{kind}.parquet"
    pq.write_table(table, path)
    assert pq.read_metadata(path).num_row_groups == 1
    if kind == "lines":
        path = folder / "lines.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode(), 1))
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<image>": 1}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    source = ol.Source("one", str(path), sample=sample, shuffle_bytes=SHUFFLE_BYTES)
    tokenizer = None if kind == "tokens" else str(folder / "tokenizer.json")
    return ol.Job([source], tokenizer=tokenizer, batch=ol.Batch(256, global_samples=samples), seed=1, **options)


def drawn_rows(service: Any, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return row and epoch of every sample of the first steps, in the order in which they are drawn."""
    draws = [service.plan_raw(step).draw.meta for step in range(steps)]
    meta = np.concatenate(draws)
    return meta["row"], meta["epoch"]


@pytest.mark.parametrize("kind", ["text", "tokens", "images", "lines"])
def test_a_file_of_one_row_group_is_shuffled_anew_in_every_epoch(kind: str, tmp_path: Path, cache):
    job = job_of(tmp_path, kind)
    rows = 400 if kind == "images" else ROWS
    with ol.launch(job, runtime="inline", cache=cache) as service:
        row, epoch = drawn_rows(service, 2 * rows // 100)
    first, second = row[epoch == 0], row[epoch == 1]
    assert sorted(first) == sorted(second) == list(range(rows)), "a row is missing or comes twice in an epoch"
    for order in (first, second):
        # What is unpacked is read front to back, in spans that double.
        assert kind == "lines" or abs(np.corrcoef(np.arange(rows), order)[0, 1]) < 0.3
        assert np.mean(np.diff(order) == 1) < (0.04 if kind == "lines" else 0.02)
    assert np.mean(first == second) < 0.02


@pytest.mark.parametrize("kind", ["tokens", pytest.param("lines", marks=pytest.mark.slow)])
def test_it_is_resumed_at_any_row(kind: str, tmp_path: Path, cache):
    job = job_of(tmp_path, kind, samples=61, rows=FEW_ROWS)  # group ends lie anywhere in a step
    assert_resumes_anywhere(job, steps=12, mesh=ol.ClientPlaceTree(dp=2), cache=cache)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        whole = drawn_rows(service, 35)[0].tolist()
    for steps in (3, 24, 25, 30):  # an epoch ends in step 24
        with ol.launch(job, runtime="inline", cache=cache) as service:
            client = service.client()
            for _ in range(steps):
                next(client)
            state = json.loads(json.dumps(client.state_dict()))
        with ol.launch(job, runtime="inline", cache=cache, state=state) as service:
            rows = np.concatenate([service.plan_raw(step).draw.meta["row"] for step in range(steps, steps + 5)])
        assert rows.tolist() == whole[61 * steps : 61 * (steps + 5)]


@pytest.mark.parametrize(
    "options",
    [
        {"loaders_per_source": 3},
        pytest.param(
            {"runtime": "local", "prefetch": 6, "threads": 4, "loaders_per_source": 2}, marks=pytest.mark.slow
        ),
        pytest.param({"runtime": "local", "loader_hosts": 2, "loaders_per_source": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["tokens", pytest.param("lines", marks=pytest.mark.slow)])
def test_the_stream_is_the_same_at_any_scale(kind: str, options: dict[str, Any], tmp_path: Path, cache):
    job = job_of(tmp_path, kind, rows=FEW_ROWS)
    expected = stream_digests(job, steps=20, cache=cache)
    assert stream_digests(job, steps=20, cache=cache, **options) == expected


def test_a_state_of_the_old_order_is_refused(tmp_path: Path, cache):
    job = job_of(tmp_path, "tokens")
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        next(client)
        state = client.state_dict()
    old = sealed({**state, "version": 3})
    with pytest.raises(StateError, match=r"has version 3, this overlord reads version 4; resuming would misread its"):
        ol.launch(job, runtime="inline", cache=cache, state=old).close()
    older = sealed({**state, "fingerprint": {**state["fingerprint"], "version": 3}})
    with pytest.raises(StateError, match=r"belongs to another stream: version was 3, is now 4"):
        ol.launch(job, runtime="inline", cache=cache, state=older).close()
    state["sources"]["one"][state["columns"].index("group")] = 1 << 20  # no group of this order
    with (
        pytest.raises(StateError, match=r"source 'one' has no row at epoch 0, group 1048576, offset"),
        ol.launch(job, runtime="inline", cache=cache, state=sealed(state)) as service,
    ):
        next(service.client())


def test_the_stream_is_the_same_however_much_of_the_shuffle_is_on_disk(ids_job, cache, monkeypatch):
    """Of sources whose groups are whole blocks: parts of large blocks are on disk already."""
    spills: list[int] = []
    plain = HeldRows.spill
    monkeypatch.setattr(HeldRows, "spill", lambda rows, folder: (spills.append(rows.nbytes), plain(rows, folder)))
    found: list[list[str]] = []
    for budget in ("512MiB", "8KiB"):
        with ol.launch(ids_job, runtime="inline", cache=cache, budget=budget) as service, service.client() as client:
            taken = [next(client) for _ in range(20)]
            found.append(
                [digest for step in taken for digest in (step.plan_digest, *(b.digest() for b in step.microbatches))]
            )
        assert bool(spills) == (budget == "8KiB")
    assert found[0] == found[1]
