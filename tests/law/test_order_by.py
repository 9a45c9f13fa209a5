"""order_by: a source in the order of a column, from every format, at every scale, resumed at any row."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

import overlord as ol
from overlord.core.order import SORTED_ROWS
from overlord.errors import SourceError, SpecError
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles
from overlord.testing import assert_resumes_anywhere, stream_digests

ROWS = 400
SAMPLE = ol.Text("ids", tokenized=True)
SCORES = np.random.default_rng(0).integers(0, 50, ROWS)  # with many ties


def rows_of(low: int, high: int) -> list[dict[str, object]]:
    return [{"ids": [n, *range(n % 7)], "score": int(SCORES[n]), "name": str(n)} for n in range(low, high)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same rows, in two files, in formats that seek (Arrow), decode whole blocks (Parquet) and read lines."""
    path = tmp_path_factory.mktemp("ordered")
    for number, (low, high) in enumerate(((0, 150), (150, ROWS))):
        table = pa.Table.from_pylist(rows_of(low, high))
        pq.write_table(table, path / f"{number}.parquet", row_group_size=32)
        with ipc.new_file(path / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=64)
        (path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(low, high)))
    return path


def job_of(folder, suffix: str = "parquet", order_by: str = "score", samples: int = 40, **source) -> ol.Job:
    ordered = ol.Source("s", str(folder / f"*.{suffix}"), sample=SAMPLE, order_by=order_by, **source)
    return ol.Job([ordered], batch=ol.Batch(64, global_samples=samples))


def drawn(job: ol.Job, cache, steps: int, **options) -> list[int]:
    """Return the first token of every sample, which is its number, in the order of the stream."""
    with ol.launch(job, runtime="inline", cache=cache, **options) as service:
        client = service.client()
        found = []
        for _ in range(steps):
            ids = [
                (i, int(part[0]))
                for batch in next(client).microbatches
                for i, part in zip(
                    batch.meta.sample_ids, np.split(batch["input_ids"][0], batch["cu_seq_lens_q"][1:-1]), strict=True
                )
            ]
            found += [value for _, value in sorted(ids, key=lambda one: expected_place(one[1], job))]
        return found


def expected(order_by: str) -> list[int]:
    sign = -1 if order_by.startswith("-") else 1
    return sorted(range(ROWS), key=lambda n: (sign * int(SCORES[n]), n))


def expected_place(value: int, job: ol.Job) -> int:
    return expected(job.sources[0].order_by).index(value)


@pytest.mark.parametrize(("suffix", "order_by"), [("parquet", "-score"), ("arrow", "score"), ("jsonl", "score")])
def test_steps_go_up_or_down_in_every_format_and_epoch(folder, cache, suffix, order_by):
    # A step has the next 100 of the order: which of them is where in the step is up to the plan.
    assert drawn(job_of(folder, suffix, order_by, samples=100), cache, 8) == expected(order_by) * 2


def test_the_law_holds(folder, cache):
    job = job_of(folder, samples=24)
    mesh = ol.ClientPlaceTree(dp=2)
    reference = stream_digests(job, mesh=mesh, steps=6, cache=cache)
    assert reference != stream_digests(job_of(folder, order_by="-score", samples=24), mesh=mesh, steps=6, cache=cache)
    assert stream_digests(job, mesh=mesh, steps=6, cache=cache, loaders_per_source=3) == reference
    assert_resumes_anywhere(job.replace(batch=ol.Batch(64, global_samples=150)), steps=4, mesh=mesh, cache=cache)


@pytest.mark.slow
def test_the_law_holds_over_processes(folder, cache):
    job, mesh = job_of(folder, samples=24), ol.ClientPlaceTree(dp=2)
    reference = stream_digests(job, mesh=mesh, steps=6, cache=cache)
    for options in ({"loaders_per_source": 2}, {"loader_hosts": 2}):
        assert stream_digests(job, mesh=mesh, steps=6, cache=cache, runtime="local", threads=4, **options) == reference


def test_a_state_of_another_order_is_refused(folder, cache):
    def state_of(job):
        with ol.launch(job, runtime="inline", cache=cache) as service:
            client = service.client()
            next(client)
            return client.state_dict()

    state = state_of(job_of(folder))
    with (
        pytest.raises(ol.StateError, match="another stream"),
        ol.launch(job_of(folder, order_by="-score"), runtime="inline", state=state, cache=cache),
    ):
        pass


def test_an_idle_source_holds_neither_its_order_nor_a_spill(folder, tmp_path):
    files = SourceFiles("s", [str(folder / "*.jsonl")], columns=["ids"], cache=IndexCache(tmp_path))
    numbers = files.sorted_rows("score")
    assert [int(files.take(numbers[n : n + 1])["ids"].values[0]) for n in (0, 1, ROWS - 1)] == [
        expected("score")[n] for n in (0, 1, ROWS - 1)
    ]
    assert files._spilled_files._files
    files.forget()
    assert not files._spilled_files._files and files._spilled_files._handle is None
    again = IndexCache(tmp_path).table(["x"], lambda: np.arange(3))
    assert again.tolist() == [0, 1, 2]
    assert IndexCache(tmp_path).table(["x"], lambda: pytest.fail("it is in the cache")).tolist() == [0, 1, 2]


@pytest.mark.slow
def test_groups_are_runs_of_the_order(tmp_path, cache):
    count = SORTED_ROWS + 100
    rng = np.random.default_rng(1)
    scores = rng.permutation(count)
    table = pa.table({"ids": [[int(n)] for n in range(count)], "score": scores})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=500)
    job = ol.Job(
        [ol.Source("s", str(tmp_path), sample=SAMPLE, order_by="score")], batch=ol.Batch(2, global_samples=count // 2)
    )
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        for half in range(2):
            found = {int(i.row) for batch in next(client).microbatches for i in batch.meta.sample_ids}
            assert found == set(np.argsort(scores)[half * (count // 2) : (half + 1) * (count // 2)].tolist())


def test_what_has_no_order_is_refused_before_anything_runs(folder, tmp_path, cache):
    def launch(order_by, path=folder / "*.parquet", **source):
        job = ol.Job([ol.Source("s", str(path), sample=SAMPLE, order_by=order_by, **source)],
                     batch=ol.Batch(64, global_samples=4))  # fmt: skip
        with ol.launch(job, runtime="inline", cache=cache):
            pytest.fail("it must not run")

    with pytest.raises(SourceError, match=r"order_by='scores': .*has no column 'scores'.*Did you mean 'score'"):
        launch("scores")
    with pytest.raises(SourceError, match=r"order_by='-name' holds 'bytes' values, and rows are ordered by numbers"):
        launch("-name")
    for text in ("null", "NaN", '"easy"'):
        lines = [f'{{"ids": [1], "score": {value}}}\n' for value in ("1", text, "2")]
        (tmp_path / "wrong.jsonl").write_text("".join(lines))
        with pytest.raises(SourceError, match=r"order_by='score': row 1 of .*wrong.jsonl has no number in this column"):
            launch("score", tmp_path / "wrong.jsonl")
    with pytest.raises(SpecError, match=r"shuffle_bytes: 1000 would not be used: order_by='score' keeps"):
        launch("score", shuffle_bytes=1000)
    with pytest.raises(SpecError, match="'-' names no column"):
        launch("-")
    # A line that is no row at all is a bad sample, and comes last.
    (tmp_path / "damaged.jsonl").write_text('{"ids": [1], "score": 2}\n{oops\n{"ids": [2], "score": 1}\n')
    files = SourceFiles("s", [str(tmp_path / "damaged.jsonl")], columns=["ids"], cache=IndexCache(tmp_path / "cache"))
    assert files.sorted_rows("score").tolist() == [2, 0, 1]
