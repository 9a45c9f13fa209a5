"""A store that somebody else wrote: nothing in it runs, nothing stalls, and what is wrong is said in words."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import yaml

import overlord as ol
from overlord.job_files import dump_job_yaml
from overlord.stores.journal import encode
from overlord.stores.store import checked_json

LINEAGE = "lineage-0001"


@pytest.fixture(scope="module")
def written(ids_job, tmp_path_factory):
    """The store of a short run."""
    folder = tmp_path_factory.mktemp("hostile")
    with ol.launch(ids_job, cache=folder / "cache", store=folder / "store", runtime="inline") as service:
        client = service.client(0)
        for _ in range(40):
            client.report(next(client).index, {"loss": 1.0})
    return folder / "store"


@pytest.fixture
def store(written, tmp_path):
    shutil.copytree(written, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def ran(tmp_path):
    """A file that is there when code of the store has run."""
    return tmp_path / "ran"


def put_code(store, ran, change):
    """Put a module into a store, everywhere, and have its job name it."""
    code = f"open({str(ran)!r}, 'w').close()\ndef f(part): return None\nf.version = '1'\nclass R: pass\n"
    for folder in (store, store / LINEAGE):
        for name in ("evil.py", "sitecustomize.py", "yaml.py", "job.py"):
            (folder / name).write_text(code)
    job = yaml.safe_load((store / LINEAGE / "job.yaml").read_text())
    change(job)
    (store / LINEAGE / "job.yaml").write_text(yaml.safe_dump(job))


def with_hook(job):
    job["launch"]["loader_do_plan"] = "evil:f"


def with_reader(job):
    job["sources"][0]["format"] = "evil:R"


def with_reader_of_join(job):
    job["sources"][0]["join"] = {"path": "x.parquet", "columns": ["x"], "format": "evil:R"}


def with_python_tag(job):
    job["seed"] = "SEED"


@pytest.mark.parametrize("change", [with_hook, with_reader, with_reader_of_join])
def test_modules_that_a_store_names_are_not_imported(store, ran, tmp_path, change):
    put_code(store, ran, change)
    before = list(sys.path)
    with pytest.raises(ol.SpecError, match=r"evil:.*code is not taken from a store.*Give the job"):
        ol.replay(store, 3, cache=tmp_path / "cache")
    assert sys.path == before
    assert "evil" not in sys.modules
    assert not ran.exists()


@pytest.mark.slow
def test_commands_that_look_at_a_store_run_nothing_of_it(store, ran, tmp_path):
    put_code(store, ran, with_hook)
    python = [sys.executable, "-m", "overlord", "steps"]
    looks = [["show", "--step", "3"], ["show", "--sample", "a:0:3@0"], ["show", "--step", "3", "--rank", "0"]]
    for look in looks:
        command = [*python, *look, "--store", str(store), "--cache", str(tmp_path / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert not ran.exists()
        assert "Traceback" not in done.stderr
    done = subprocess.run([*python, "diff", str(store), str(store)], capture_output=True, text=True, cwd=store.parent)
    assert done.returncode == 0, done.stderr
    assert not ran.exists()


def test_a_tag_of_python_in_a_kept_job_makes_nothing(store, ran, tmp_path):
    put_code(store, ran, with_python_tag)
    path = store / LINEAGE / "job.yaml"
    tag = f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{ran}]]"
    path.write_text(path.read_text().replace("SEED", tag))
    with pytest.raises(ol.SpecError):
        ol.replay(store, 3, cache=tmp_path / "cache")
    assert not ran.exists()


def test_a_kept_job_does_not_name_a_manifest_with_code(store, ran, tmp_path, monkeypatch):
    """A store that lies in a folder of `sys.path`, such as the working folder of `python -m overlord`."""
    monkeypatch.syspath_prepend(str(store))

    def through_a_manifest(job):
        sources = [{**source, "format": "evil:R"} for source in job["sources"]]
        (store / LINEAGE / "sources.jsonl").write_text("".join(json.dumps(source) + "\n" for source in sources))
        job["sources"] = str(store / LINEAGE / "sources.jsonl")

    put_code(store, ran, through_a_manifest)
    with pytest.raises(ol.SpecError, match=r"the job\.yaml of the store: sources.*manifest"):
        ol.replay(store, 3, cache=tmp_path / "cache")
    assert not ran.exists()
    assert "evil" not in sys.modules


def test_code_of_the_run_comes_from_the_job_that_is_named(ids_job, tmp_path):
    (tmp_path / "kept_hooks_of_test.py").write_text("def same(part): return None\nsame.version = '1'\n")
    (tmp_path / "job.yaml").write_text(
        dump_job_yaml(ids_job).replace("loader_do_plan: null", "loader_do_plan: kept_hooks_of_test:same")
    )
    paths = list(sys.path)
    try:
        with ol.launch(
            tmp_path / "job.yaml", cache=tmp_path / "cache", store=tmp_path / "store", runtime="inline"
        ) as one:
            client = one.client(0)
            expected = [[str(i) for b in next(client).microbatches for i in b.meta.sample_ids] for _ in range(20)]
        with pytest.raises(ol.SpecError, match="kept_hooks_of_test:same"):
            ol.replay(tmp_path / "store", 3, cache=tmp_path / "cache")
        with ol.replay(tmp_path / "store", 3, tmp_path / "job.yaml", cache=tmp_path / "cache") as again:
            step = next(again.client(0))
            assert [str(i) for b in step.microbatches for i in b.meta.sample_ids] == expected[3]
    finally:
        sys.path[:] = paths


def test_a_source_in_a_state_does_not_choose_a_reader(ids_job, store, ran, tmp_path, monkeypatch):
    (tmp_path / "chosen_by_state.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass R: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    added = {"name": "z", "path": ["/nowhere"], "sample": {"kind": "text", "column": "ids", "tokenized": True},
             "format": "chosen_by_state:R", "weight": 1.0}  # fmt: skip
    for path in (store / LINEAGE).glob("snapshot-*"):
        content = json.loads(path.read_bytes().partition(b"\n")[2])
        content["state"]["changes"] = [{"kind": "sources", "at": 90, "add": added, "weight": 1.0}]
        path.write_bytes(checked_json(content))
    with pytest.raises(ol.SpecError, match="code is not taken from a store or a state"):
        ol.launch(ids_job, cache=tmp_path / "cache", store=store, state="latest", runtime="inline")
    assert not ran.exists()


# -- files that are no files of a store -----------------------------------------------------------------------------


def look(store, job, cache):
    """Look at a store in every way; return the errors. Only errors of overlord may be raised."""
    errors = []
    for call in (
        lambda: ol.replay(store, 20, cache=cache).close(),
        lambda: ol.replay(store, 39, job, cache=cache).close(),
        lambda: ol.launch(job, cache=cache, store=store, state="latest", runtime="inline").close(),
        lambda: ol.launch(job, cache=cache, store=store, state=25, runtime="inline").close(),
    ):
        try:
            call()
        except ol.OverlordError as error:
            errors.append(str(error))
    return errors


def test_pipes_links_and_folders_are_passed_over(ids_job, store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    lineage = store / LINEAGE
    os.mkfifo(lineage / "snapshot-000000000999.json")
    os.mkfifo(lineage / "journal-000009-00000001")
    os.mkfifo(store / "owner-000009")
    (lineage / "snapshot-000000000998.json").symlink_to("/dev/zero")
    (lineage / "journal-000008-00000001").symlink_to(outside / "precious")
    (lineage / "loaders-000000000998.json").mkdir()
    (store / "lineage-0002").symlink_to(outside)
    errors = look(store, ids_job, tmp_path / "cache")
    assert len(errors) == 2  # a launch would begin lineage 2
    assert all("lineage-0002 is a link" in error for error in errors)
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "precious"


def test_a_pipe_or_a_link_in_the_place_of_the_job_is_refused(store, tmp_path):
    path = store / LINEAGE / "job.yaml"
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/etc/passwd")):
        path.unlink()
        make()
        with pytest.raises(ol.OverlordError) as refused:
            ol.replay(store, 3, cache=tmp_path / "cache")
        assert "root:" not in str(refused.value)


def test_a_file_of_any_size_is_not_read(ids_job, store, tmp_path):
    with (store / LINEAGE / "snapshot-000000000999.json").open("wb") as file:
        file.truncate(1 << 40)
    errors = look(store, ids_job, tmp_path / "cache")
    assert len(errors) == 4
    assert all("1,099,511,627,776 bytes" in error for error in errors)


def test_names_of_any_form_are_no_lineages_and_no_segments(ids_job, store, tmp_path):
    for name in (
        "lineage-",
        "lineage-x",
        "lineage--1",
        "lineage-²",
        "owner-x",
        "owner-",
        "held-...",
        "..x",
        "lineage-0001..",
    ):
        (store / name).mkdir()
    for name in ("journal-x-1", "journal--", "journal-000001", "snapshot-", "snapshot-x.json", "loaders-x", "history-"):
        (store / LINEAGE / name).write_bytes(b"x\n")
    assert look(store, ids_job, tmp_path / "cache") == []


DEEP = b"[" * 200_000 + b"]" * 200_000
OWNER = {"service": "x", "generation": 1, "host": "h", "pid": 1, "started": 1, "kernel": "k", "since": 1.0}


@pytest.mark.parametrize(
    "record",
    [
        DEEP,
        b"null",
        b"\xff",
        *(
            json.dumps({**OWNER, **other}).encode()
            for other in ({"service": 3}, {"pid": "../../etc/passwd"}, {"host": []}, {"closed": "no"}, {"since": None})
        ),
    ],
    ids=lambda record: f"{record[:40]!r}",
)
def test_records_of_owners_are_not_trusted(ids_job, store, tmp_path, record):
    (store / "owner-000009").write_bytes(record)
    assert look(store, ids_job, tmp_path / "cache") == []


@pytest.mark.parametrize(
    "body", [DEEP, b"null", b"[]", b"{}", b'"x"', b'{"version":1}', b'{"version":1,"state":[]}', b"\xff", b"1e999"]
)
def test_snapshots_with_a_fitting_checksum_are_not_trusted(ids_job, store, tmp_path, body):
    for name in ("snapshot-000000000999.json", "loaders-000000000999.json", "history-000000000999.json"):
        (store / LINEAGE / name).write_bytes(b"%08x\n%s" % (zlib.crc32(body), body))
    errors = look(store, ids_job, tmp_path / "cache")
    assert all("version" in error for error in errors), errors


@pytest.mark.parametrize(
    "body",
    [DEEP, b"null", b"{}", b'{"kind":1,"step":1}', b'{"kind":"plan","step":"x"}',
     b'{"kind":"segment","step":-1,"before":3,"cut":[]}'],
)  # fmt: skip
def test_records_with_a_fitting_checksum_are_not_trusted(ids_job, store, tmp_path, body):
    line = b"%08x %s\n" % (zlib.crc32(body), body)
    (store / LINEAGE / "journal-999999-00000001").write_bytes(line * 3)
    look(store, ids_job, tmp_path / "cache")  # nothing but errors of overlord


@pytest.mark.slow
def test_bytes_that_are_flipped_or_cut_end_in_words(ids_job, written, tmp_path):
    """A thousandth of a store's bytes are others: every look works, or says what is wrong."""
    dice = random.Random(5)
    files = [path for path in written.rglob("*") if path.is_file()]
    for number in range(30):
        store = tmp_path / f"store-{number}"
        shutil.copytree(written, store)
        for path in dice.sample(files, 3):
            data = bytearray((store / path.relative_to(written)).read_bytes())
            for _ in range(1 + len(data) // 1000):
                if data:
                    data[dice.randrange(len(data))] = dice.randrange(256)
            (store / path.relative_to(written)).write_bytes(data[: dice.choice([None, None, len(data) // 2])])
        look(store, ids_job, tmp_path / "cache")
        shutil.rmtree(store)


@pytest.mark.slow
def test_values_that_no_store_writes_end_in_words(ids_job, written, tmp_path):
    """Values inside of snapshots and records are replaced, with checksums that fit."""
    dice = random.Random(7)
    odd = [None, -1, 1 << 70, 1e300, "x", "../../etc/passwd", [], {}, [[]], True]

    def spoil(value):
        places = []

        def walk(node):
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                if isinstance(node[key], (dict, list)):
                    walk(node[key])

        walk(value)
        node, key = dice.choice(places)
        node[key] = dice.choice(odd)
        return value

    for number in range(60):
        store = tmp_path / f"store-{number}"
        shutil.copytree(written, store)
        path = dice.choice([*(store / LINEAGE).glob("snapshot-*"), *(store / LINEAGE).glob("journal-*")])
        if path.name.startswith("snapshot"):
            path.write_bytes(checked_json(spoil(json.loads(path.read_bytes().partition(b"\n")[2]))))
        else:
            lines = path.read_bytes().splitlines()
            at = dice.randrange(len(lines))
            lines[at] = encode(spoil(json.loads(lines[at].partition(b" ")[2]))).rstrip()
            path.write_bytes(b"\n".join(lines) + b"\n")
        look(store, ids_job, tmp_path / "cache")
        shutil.rmtree(store)


def test_the_folder_of_a_store_is_only_read_by_a_replay(store, tmp_path):
    def content():
        return {str(path): path.read_bytes() for path in Path(store).rglob("*") if path.is_file()}

    before = content()
    ol.replay(store, 3, cache=tmp_path / "cache").close()
    assert content() == before


def test_errors_of_a_replay_name_the_store_and_no_scratch_folder(store, tmp_path):
    job = store / LINEAGE / "job.yaml"
    whole = job.read_text()
    job.write_text(whole + "\nsead: 3\n")
    with pytest.raises(ol.SpecError, match=r"the job\.yaml of the store:\d+: sead: unknown key"):
        ol.replay(store, 30, cache=tmp_path / "cache")
    job.write_text(whole)
    for snapshot in sorted((store / LINEAGE).glob("snapshot-*"))[:-1]:
        snapshot.unlink()
    with pytest.raises(ol.StateError, match=rf"of the store '{store}' keeps the steps"):
        ol.replay(store, 1, cache=tmp_path / "cache")
