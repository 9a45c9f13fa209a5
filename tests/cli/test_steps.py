"""`overlord steps`: a past step shown is what every rank got, on any mesh and layout; nothing is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import slice_indices, write_ids
from typer.testing import CliRunner

import overlord as ol
from overlord.cli import steps
from overlord.cli.main import app
from overlord.cli.steps import Delivered, find_sample, rows_of
from overlord.job_files import LaunchOptions, dump_job_yaml
from overlord.planning.costs import llama_12b
from overlord.roles.client import TOKEN_KEYS
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.drawer import Drawer


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["steps", *map(str, arguments)])


def shown(*arguments: object) -> dict[str, Any]:
    outcome = call("show", *arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


def content_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)


@pytest.fixture(scope="module")
def run(mixed_job, cache, tmp_path_factory) -> tuple[Path, dict[int, list[set[str]]], dict[str, Any]]:
    """24 steps, with other weights from step 5 and another mesh from step 12 on: its store, the sample ids that every
    rank got of each step, and the state before step 3."""
    store, got, state = tmp_path_factory.mktemp("run") / "store", {}, {}
    with ol.launch(mixed_job, mesh="dp=2,cp=2", runtime="inline", cache=cache, store=store) as service:
        clients = {rank: service.client(rank) for rank in range(4)}
        for number in range(24):
            if number == 3:
                state = clients[0].state_dict()
            if number == 5:
                service.set_mixture(dict.fromkeys(mixed_job.names, 1.0), at_step=5)
            if number == 9:
                service.reshard(ol.ClientPlaceTree(dp=3, tp=2), at_step=12)
            if number == 12:
                clients |= {rank: service.client(rank) for rank in (4, 5)}
            steps = [next(clients[rank]) for rank in sorted(clients)]
            assert {step.index for step in steps} == {number}
            clients[0].report(number, {"loss": 2.0 - number / 100})
            got[number] = [{str(one) for b in step.microbatches for one in b.meta.sample_ids} for step in steps]
    return store, got, state


@pytest.mark.parametrize(("step", "ranks"), [(0, 4), (7, 4), (23, 6)])
def test_rows_are_those_that_every_rank_got_and_the_store_stays_as_it_is(run, step, ranks):
    store, got, _ = run
    before = content_of(store)
    found = shown("--store", store, "--step", step, "--texts", 0)
    assert len(got[step]) == ranks
    for rank in range(ranks):
        assert {row["sample"] for row in found["rows"] if rank in row["ranks"]} == got[step][rank]
    one = shown("--store", store, "--step", step, "--rank", ranks - 1, "--texts", 2)
    assert {row["sample"] for row in one["rows"]} == got[step][ranks - 1]
    assert found["reported"] == {"loss": 2.0 - step / 100}
    assert content_of(store) == before


def test_a_sample_is_found_with_its_step_text_and_mask(run, cache, tmp_path):
    store, got, _ = run
    for step in (0, 2, 6, 20, 23):
        for sample in sorted(set.union(*got[step]))[::5]:
            assert find_sample(str(store), sample, None, cache) == step
    sample = min(got[20][0])
    one = shown("--store", store, "--sample", sample)
    assert (one["step"], {row["sample"] for row in one["rows"]}) == (20, {sample})
    found = shown("--store", store, "--step", 20, "--texts", 100, "--html", tmp_path / "step.html")
    texts = {row["sample"]: row for row in found["rows"] if "text" in row}
    assert set(texts) == set.union(*got[20])
    pictured = [row for row in texts.values() if row["images"]]
    assert pictured and all(row["media"] and row["media"][0]["size"] for row in pictured if not row["bad"])
    assert all(0 < row["loss_tokens"] < row["tokens"] and row["loss_spans"] for row in texts.values() if not row["bad"])
    page = (tmp_path / "step.html").read_text()
    assert page.count("<img ") >= len(pictured) / 2 and "<mark>" in page
    terminal = call("show", "--store", store, "--step", 20, "--rank", 0)
    assert terminal.exit_code == 0
    # One line, also where it is wider than the table.
    assert terminal.stdout.splitlines()[0].startswith("step 20, mesh")
    assert terminal.stdout.splitlines()[0].endswith("costs by llama_12b, the default cost function")


def test_the_rows_that_are_shown_are_of_all_ranks(run, monkeypatch):
    monkeypatch.setattr(steps, "SHOWN_ROWS", 6)
    terminal = call("show", "--store", run[0], "--step", 0, "--texts", 0).stdout
    table = [[cell.strip() for cell in line[1:-1].split("│")] for line in terminal.splitlines() if line[:1] == "│"]
    assert [row[1] for row in table] == ["0-1"] * 3 + ["2-3"] * 3 and "more rows: --rank RANK" in terminal
    found = {row["sample"]: row for row in shown("--store", run[0], "--step", 0, "--texts", 0)["rows"]}
    for sample, _, microbatch, place, *_ in table:
        assert (found[sample]["microbatch"], found[sample]["position"]) == (int(microbatch), int(place))


def test_a_state_shows_what_follows_it(run, mixed_job, tmp_path):
    _, got, state = run
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "job.yaml").write_text(dump_job_yaml(mixed_job, LaunchOptions(mesh=ol.ClientPlaceTree(dp=2, cp=2))))
    for options, step in (((), 3), (("--step", 4), 4)):
        found = shown(tmp_path / "job.yaml", "--state", tmp_path / "state.json", *options, "--texts", 0)
        assert found["step"] == step
        assert {row["sample"] for row in found["rows"] if 3 in row["ranks"]} == got[step][3]


LAYOUTS = [
    ("dp=2,cp=2", {"keys": "hf"}),
    ("dp=1,cp=2,pp=2,tp=2", {"keys": "megatron", "slicing": "whole_zigzag"}),
    ("dp=2", {"keys": "torchtitan"}),
    ("dp=2,cp=2", {"keys": "hf", "rows": "padded", "slicing": "contiguous"}),
]


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS, ids=str)
def test_whole_sequences_have_the_slices_of_all_ranks(ids_job, cache, mesh, layout):
    """Token 1000 + row of every file: what a row's tokens must be is known without any code of the package."""
    with ol.launch(ids_job, mesh=mesh, layout=layout, runtime="inline", cache=cache) as service:
        delivered = Delivered(service, 0, ids_job, service.options.layout)
        rows = rows_of(delivered.plan, llama_12b)
        assert len({row.sample for row in rows}) >= 9
        for row in rows:
            ids, counts = delivered.tokens(row)
            assert len(ids) == row.tokens and (ids == 1000 + row.row + 1000 * row.file * (row.source != "b")).all()
            assert counts.tolist() == [0] + [1] * (row.tokens - 1)
        # and the other way: each rank's slice is cut from these
        step = next(service.client(0))
        for number, batch in enumerate(step.microbatches):
            key = next(name for name in TOKEN_KEYS if name in batch)
            meta = batch.meta
            mine = slice_indices(
                meta.cu_seqlens, meta.local_cp_size, meta.ranks.index(0), meta.slicing, rows="rows" in layout
            )
            whole = np.zeros(int(meta.cu_seqlens[-1]), np.int64)
            for row in (row for row in rows if 0 in row.ranks and row.microbatch == number):
                begin = int(meta.cu_seqlens[row.position])
                whole[begin : begin + row.tokens] = delivered.tokens(row)[0]
            filled = whole[mine] > 0
            assert (batch[key].reshape(-1)[filled] == whole[mine][filled]).all()


MESHES = [
    ("dp=2", {}),
    ("dp=2,cp=2", {"strategy": "hdp"}),
    ("dp=2,tp=2", {"strategy": "vlm_hybrid"}),
    ("pp=2,dp=2", {"layout": "megatron"}),
    ("pp=2,dp=2,cp=2,tp=2", {"strategy": "vlm_hybrid"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
def test_what_is_read_of_a_kept_step_is_what_each_rank_got_on_any_mesh(mixed_job, cache, tmp_path, mesh, options):
    world, got = ol.ClientPlaceTree.parse(mesh).world_size, {}
    with ol.launch(mixed_job, mesh=mesh, runtime="inline", cache=cache, store=tmp_path, **options) as service:
        clients = [service.client(rank) for rank in range(world)]
        for number in range(20):
            steps = [next(client) for client in clients]
            got[number] = [{str(one) for b in step.microbatches for one in b.meta.sample_ids} for step in steps]
            if number in (0, 9, 19):
                got[number, "bytes"] = [[b.digest() for b in step.microbatches] for step in steps]
    before = content_of(tmp_path)
    for number in (0, 9, 19):
        rows = shown("--store", tmp_path, "--step", number, "--texts", 0)["rows"]
        for rank in range(world):
            found = {row["sample"] for row in rows if rank in row["ranks"]}
            assert found == got[number][rank] or not got[number][rank]  # it gets its samples by broadcast
        with ol.replay(tmp_path, number, cache=cache) as service:
            for rank in (0, world - 1):
                service.look_at([rank])
                step = next(service.client(rank, number))
                assert [b.digest() for b in step.microbatches] == got[number, "bytes"][rank]
    assert content_of(tmp_path) == before


def test_a_store_is_named_as_a_shell_names_it_and_no_step_is_drawn_for_another(run, monkeypatch):
    """The journal has the state at every step: only the step itself is drawn, and only its rank's samples are read."""
    drawn, read = [], []
    draw, gather = Drawer.draw, DataConstructor.gather
    monkeypatch.setattr(Drawer, "draw", lambda self: drawn.append(self.state.step) or draw(self))
    monkeypatch.setattr(DataConstructor, "gather", lambda *a, **k: read.append(list(a[2])) or gather(*a, **k))
    monkeypatch.chdir(run[0].parent)
    for step in (11, 23):
        found = shown("--store", run[0].name, "--step", step, "--rank", 1, "--texts", 2)
        assert {row["sample"] for row in found["rows"]} == run[1][step][1]
    assert drawn == [11, 23]
    assert read == [[0, 1], [0, 1]]  # ranks that share a sequence, or are its tp peers


def test_a_journal_without_states_is_drawn_from_its_snapshots(ids_job, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("overlord.roles.planner.MOST_ROWS", 2)
    with ol.launch(ids_job, mesh="dp=2", runtime="inline", cache=cache, store=tmp_path) as service:
        client = service.client(0)
        steps = [next(client) for _ in range(12)]
        got = [{str(one) for b in step.microbatches for one in b.meta.sample_ids} for step in steps]
    assert {row["sample"] for row in shown("--store", tmp_path, "--step", 9, "--rank", 0)["rows"]} == got[9]
    sample = min(got[9])
    assert shown("--store", tmp_path, "--sample", sample)["step"] == 9
    with ol.launch(ids_job, cache=cache) as service, pytest.raises(ol.SpecError, match="label counts would be wrong"):
        service.look_at([0])


def test_pictures_are_what_encoders_get_wherever_they_are_encoded(mixed_job, cache):
    def pictures(**options: Any) -> dict[str, list[Any]]:
        with ol.launch(mixed_job, mesh="dp=2", runtime="inline", cache=cache, **options) as service:
            delivered = Delivered(service, 0, mixed_job, service.options.layout)
            rows = [row for row in rows_of(delivered.plan, llama_12b) if row.images and not row.bad]
            return {row.sample: [item.picture for item in delivered.preview(row, None).media] for row in rows}

    beside = pictures()
    assert beside and all(one is not None and one.std() > 1 for pictured in beside.values() for one in pictured)
    for other in (pictures(strategy="vlm_hybrid"), pictures(layout={"pixels": "float32"})):
        assert other.keys() == beside.keys()
        for sample, found in other.items():
            assert all(np.array_equal(a, b) for a, b in zip(found, beside[sample], strict=True))


def test_diff_names_the_first_difference_and_its_cause(ids_job, cache, tmp_path):
    def stored(name: str, steps: int = 6, change: int | None = None, **options: Any) -> Path:
        with ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path / name, **options) as service:
            client = service.client(0)
            for number in range(steps):
                if number == change:
                    service.set_mixture({"a": 1, "b": 1, "c": 8}, at_step=change)
                next(client)
        return tmp_path / name

    first = stored("first")
    same = call("diff", first, stored("same"), "--json")
    assert same.exit_code == 0 and json.loads(same.stdout)["same"]
    other = call("diff", first, stored("other", change=3), "--json")
    told = json.loads(other.stdout)
    assert (other.exit_code, told["order_differs_at"], told["plan_differs_at"]) == (1, 3, 3)
    assert told["difference"]["what"] == "draw" and len(set(told["difference"]["samples"])) == 2
    assert any("only the second run was changed by" in cause and "'c': 8" in cause for cause in told["causes"])
    assert told["differing_steps"] == 3 and 0 <= told["difference"]["in_both"] < min(told["difference"]["drawn"])
    placed = json.loads(call("diff", first, stored("placed", mesh="dp=2"), "--json").stdout)
    assert "launch.mesh.dp is 1 in the first run, 2 in the second" in placed["causes"]
    assert placed["order_differs_at"] is None and placed["difference"]["meshes"] == [
        "pp=1 dp=1 cp=1 tp=1", "pp=1 dp=2 cp=1 tp=1",
    ]  # fmt: skip
    packed = call("diff", stored("zero", mesh="dp=2"), stored("packed", mesh="dp=2", strategy="packed"))
    shown = " ".join(packed.stdout.split())
    assert packed.exit_code == 1 and "same samples, at other places from step 0 on, in 6 of 6 steps" in shown
    assert "because: launch.strategy is None in the first run, 'packed' in the second" in shown
    assert f"first run {tmp_path / 'zero'}" in shown and "first run, step 0, rank " in shown
    assert f"overlord steps show --store {tmp_path / 'zero'} --step 0 --rank " in shown
    seeded = ids_job.replace(seed=77)
    with ol.launch(seeded, runtime="inline", cache=cache, store=tmp_path / "seeded") as service:
        next(service.client(0))
    other = call("diff", first, tmp_path / "seeded")
    assert f"because: seed is {ids_job.seed} in the first run, 77 in the second" in " ".join(other.stdout.split())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "needs what a step is computed from"),
        (("--store", "STORE", "--step", 99), "holds the steps up to 23"),
        (("--store", "STORE", "--step", 3, "--rank", 4), "--rank 4 is not in the mesh"),
        (("--store", "STORE", "--sample", "nowhere:0:1@0"), "the run has no source 'nowhere'"),
        (("--store", "STORE", "--sample", "17"), "is not the id of a sample"),
        (("--store", "/nowhere", "--step", 1), "is no folder"),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_refused(run, options, why):
    outcome = call("show", *(run[0] if one == "STORE" else one for one in options))
    assert outcome.exit_code in (1, 2)
    assert why in " ".join(outcome.stderr.split()), outcome.stderr


def test_a_step_is_shown_without_reading_more_than_it_needs(tmp_path, cache):
    """Of 24 files of 4 sources only those are opened that the step draws from, and of their rows hardly any other."""
    log = tmp_path / "rows.txt"

    def counted(row, log=str(log)):
        with open(log, "a") as file:
            file.write(f"{row['ids'][0]}\n")
        return {"tokens": row["ids"]}

    sources = []
    for number, name in enumerate("abcd"):
        for file in range(6):
            first = 10_000 * number + 1000 * file
            write_ids(tmp_path / name / f"{file}.jsonl", [3 + at % 5 for at in range(200)], first)
        sample = ol.Custom(counted, columns=["ids"], process=False, name=name, code_digest=name)
        sources.append(ol.Source(name, str(tmp_path / name), sample=sample, shuffle_bytes=2048))
    job = ol.Job(sources=sources, batch=ol.Batch(64, global_samples=24), seed=4)
    with ol.launch(job, runtime="inline", cache=cache, store=tmp_path / "store") as service:
        steps = [next(client) for client in [service.client()] for _ in range(10)]
        drawn = [one for batch in steps[7].microbatches for one in batch.meta.sample_ids]
    kept = {str(tmp_path / one.source / f"{one.file}.jsonl") for one in drawn}
    kept |= {str(tmp_path / name / "0.jsonl") for name in "abcd"}  # it has the columns of its source
    for path in [path for path in tmp_path.glob("?/*.jsonl") if str(path) not in kept]:
        found = path.stat()
        path.write_bytes(b"\xff" * found.st_size)  # no line of it can be read
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    log.write_text("")
    with ol.replay(tmp_path / "store", 7, job, cache=tmp_path / "empty cache") as service:
        again = next(service.client())
        assert [one for batch in again.microbatches for one in batch.meta.sample_ids] == drawn
    read = log.read_text().split()
    assert len(kept) < 20 and len(set(read)) == len(read)
    assert len(read) <= 1.5 * len(drawn)  # a few more, as their lengths are not known before
