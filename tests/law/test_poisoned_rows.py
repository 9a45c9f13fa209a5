"""A row that kills its worker twice: a stand-in, a journaled verdict, and it is not run again."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.core.ragged import BAD_COLUMN, take_rows
from overlord.roles.poisoned_rows import PoisonedRows, Verdict, verdicts_from_json
from overlord.stores.journal import Journal
from overlord.stores.places import open_place
from overlord.stores.store import newest_lineage
from overlord.testing import FaultScript, digest_service, launch_for_faults, stream_digests
from overlord.transforms.samples.sample_kinds import CustomTransform

# As the functions of a script travel: by value. A fresh worker would else import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, AT = 60, 23
SEGFAULT = "killed its worker twice: signal 11 (SIGSEGV)"


def die(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "exit":
        os._exit(3)
    elif how == "sleep":
        time.sleep(1000)


def deadly_job(folder: Path, how: str, *, rows: int = ROWS, at: int = AT, **custom) -> ol.Job:
    """A job with a function that dies of one row, and records each time that it gets it."""
    folder.mkdir(exist_ok=True)
    (folder / "s.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(rows)))
    calls = str(folder / "calls")
    Path(calls).touch()

    def tokens(row):
        if row["n"] == at:
            with open(calls, "a") as file:
                file.write("x")
            die(how)
        return {"tokens": [1000 + row["n"]] * (2 + row["n"] % 5)}

    sample = ol.Custom(tokens, columns=["n"], deadline=0.4, **custom)
    return ol.Job(
        sources=[ol.Source("s", str(folder / "s.jsonl"), sample=sample, shuffle_bytes=0, tolerance=1.0)],
        mixture=ol.Mixture(stopping="all_exhausted_without_replacement"),
        batch=ol.Batch(64, global_samples=5),
    )


def calls_of(folder: Path) -> int:
    return len((folder / "calls").read_text())


def digests_of(service) -> list[tuple[str, list[str]]]:
    with service.client() as client:
        return [(step.plan_digest, [batch.digest() for batch in step.microbatches]) for step in client]


@pytest.mark.parametrize(
    ("how", "reason", "options"),
    [
        ("segfault", SEGFAULT, {"prefetch": 1, "threads": 1}),
        pytest.param(
            "exit",
            "killed its worker twice: exit code 3",
            {"prefetch": 6, "threads": 8, "loaders_per_source": 3},
            marks=pytest.mark.slow,
        ),
        ("sleep", "killed its worker twice: no answer within 0.4 s", {}),
    ],
    ids=["segfault", "exit", "sleep"],
)
def test_the_run_goes_on_and_a_resume_does_not_run_the_row(tmp_path, cache, capfd, caplog, how, reason, options):
    job = deadly_job(tmp_path, how)
    labels, found = {}, []
    with ol.launch(job, cache=cache, **options) as service, service.client() as client:
        states = [client.state_dict()]
        for step in client:
            found.append((step.plan_digest, [batch.digest() for batch in step.microbatches]))
            for batch in step.microbatches:
                parts = np.split(batch["labels"][0], batch["cu_seq_lens_q"][1:-1])
                labels |= dict(zip(batch.meta.sample_ids, parts, strict=True))
            states.append(client.state_dict())
        assert service.status()["sources"]["s"]["bad"] == 1
    assert len(labels) == ROWS and len(found) == ROWS // 5
    assert [sample.row for sample, part in labels.items() if (part == -100).all()] == [AT]
    assert f"bad sample s:0:{AT}@0: {reason}" in capfd.readouterr().err
    calls = calls_of(tmp_path)
    assert calls in (2, 3), "with the rows beside it, where some are, and alone twice"
    # Before the row, where it was met by then, and behind it; inline, the row would kill this very process.
    known = [number for number in (0, 2, 6) if "verdicts" in states[number]]
    assert known == [0, 2, 6] or (options.get("threads") != 1 and 6 in known)
    for number in known:
        state = json.loads(json.dumps(states[number]))
        assert state["verdicts"] == {"s": {str(AT): reason}}
        with ol.launch(job, cache=cache, state=state, runtime="inline") as service:
            assert digests_of(service) == found[number:], "the same stream, whatever the scale was"
    assert f"bad sample s:0:{AT}@0: {reason}" in caplog.text
    assert calls_of(tmp_path) == calls


@pytest.mark.slow_on_ray
def test_where_the_function_runs_is_no_part_of_the_stream(tmp_path, cache, where):
    job = deadly_job(tmp_path, "no")
    with ol.launch(job, cache=cache, runtime="inline") as service, service.client() as client:
        next(client)
        state = client.state_dict()
    assert "verdicts" not in state
    here = deadly_job(tmp_path, "no", process=False)
    assert not here.sources[0].sample.process
    expected = stream_digests(job, steps=99, cache=cache, state=state)
    assert stream_digests(here, steps=99, cache=cache, state=state) == expected
    CustomTransform(here.sources[0].sample, lambda *_: pytest.fail("process=False asks for no worker"))
    assert stream_digests(job, steps=99, cache=cache, state=state, **where) == expected


def test_the_fields_of_the_spec():
    custom = ol.Custom(len, process=False, deadline="2.5")
    assert (custom.process, custom.deadline) == (False, 2.5)
    assert not {"process", "deadline"} & set(custom.model_dump(mode="json"))
    with pytest.raises(ol.SpecError, match=r"deadline is 0.*at least 0.01; rows would be given up before they ran"):
        ol.Custom(len, deadline=0)


def kill_service(service) -> None:
    os.kill(service.status()["pid"], signal.SIGKILL)


def test_a_verdict_behind_the_newest_snapshot_survives_kills_of_the_service(tmp_path, cache):
    """Rows are read 64 at a time: with row 130 the verdict comes at step 25, the last snapshot is of an earlier one."""
    job = deadly_job(tmp_path, "exit", rows=200, at=130)
    store = tmp_path / "store"
    service = ol.launch(job, cache=cache, store=str(store))
    client = service.client()
    orders = [next(client).order_digest for _ in range(25)]
    limit = time.monotonic() + 30
    while not any(record["kind"] == "verdict" for record in newest_lineage(open_place(str(store))).records):
        assert time.monotonic() < limit
        time.sleep(0.01)
    kill_service(service)
    service.close()
    assert calls_of(tmp_path) == 3
    verdicts = {"s": {"130": "killed its worker twice: exit code 3"}}
    service = ol.launch(job, cache=cache, store=str(store), state="latest")
    client = service.client()
    step = next(client)
    first = step.index
    assert 16 <= first < 25  # a snapshot is taken at step 16, or when the planner gets to it
    assert step.order_digest == orders[first]
    assert client.state_dict()["verdicts"] == verdicts
    kill_service(service)  # before its first snapshot
    service.close()
    with ol.launch(job, cache=cache, store=str(store), state="latest", runtime="inline") as service:
        client = service.client()
        assert client.state_dict()["verdicts"] == verdicts
        later = [step.order_digest for step in client]
    assert later[: len(orders) - first] == orders[first:]
    assert len(later) == 200 // 5 - first
    assert calls_of(tmp_path) == 3


# -- the log itself ----------------------------------------------------------------------------


def journal_in(folder):
    journal = Journal(open_place(str(folder)), lambda: None)
    journal.begin("lineage-0001", owner=1)
    return journal


def test_a_function_that_hangs_on_every_row_is_named_and_ends_the_run(tmp_path, cache):
    def waits_for_ever(row):
        time.sleep(1000)

    (tmp_path / "s.jsonl").write_text('{"n": 1}\n' * 200)
    source = ol.Source("s", str(tmp_path / "s.jsonl"), sample=ol.Custom(waits_for_ever, deadline=0.3), tolerance=1.0)
    job = ol.Job(sources=[source], batch=ol.Batch(64, global_samples=5))
    with pytest.raises(ol.ToleranceError, match=r"source 's': the function '.*waits_for_ever' hangs.*limit of 0\.3 s"):
        ol.launch(job, cache=cache, runtime="local")


def test_a_verdict_is_on_disk_before_it_counts():
    class Full:
        def append(self, record, *, durable):
            assert durable
            raise ol.StoreError("no space left")

    verdicts = PoisonedRows(Full())
    with pytest.raises(ol.StoreError):
        verdicts.add("s", 1, "why")
    assert not verdicts.known("s", np.array([1])).any()
    assert verdicts.to_json() == {}


def test_threads_add_and_ask_at_once(tmp_path):
    journal = journal_in(tmp_path)
    verdicts = PoisonedRows(journal, lock=threading.Lock())

    def use(number):
        verdicts.add("ab"[number % 2], number // 4, f"why {number // 4}")
        return bool(verdicts.known("ab"[number % 2], np.arange(number // 4 + 1))[-1])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(80)))
    records = list(journal.records())
    assert len(records) == 40 == len({(record["source"], record["row"]) for record in records})
    assert list(verdicts.to_json()) == ["a", "b"]
    assert list(verdicts.to_json()["a"]) == [str(row) for row in range(20)]


def test_a_rollback_takes_no_verdict_of_the_future_it_leaves(tmp_path):
    journal = journal_in(tmp_path)
    verdicts = PoisonedRows(journal)
    for step, row in ((3, 30), (9, 90)):
        verdicts.step = step
        verdicts.add("s", row, "why")
    state = {"step": 5, "verdicts": {"s": {"30": "why"}}}
    rolled_back = PoisonedRows.recover(journal, state, [], ["s"])
    assert rolled_back.known("s", np.array([30, 90])).tolist() == [True, False]
    latest = PoisonedRows.recover(journal, state, list(journal.records()), ["s"])
    assert latest.known("s", np.array([30, 90])).tolist() == [True, True]
    assert [r["row"] for r in journal.records() if r["kind"] == "verdict"] == [30, 90]
    assert PoisonedRows.recover(journal, None, [], ["s"]).to_json() == {}


ROW = st.integers(0, 2**63 - 1)


VERDICT = st.builds(Verdict, st.text(min_size=1), st.integers(0, 5))


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.dictionaries(ROW, VERDICT, min_size=1)), ROW)
def test_verdicts_survive_json(known, other):
    verdicts = PoisonedRows(None, known)  # type: ignore[arg-type]
    text = json.dumps(verdicts.to_json())
    assert verdicts_from_json(json.loads(text), ["a", "b", "c"]) == known
    for source, rows in known.items():
        asked = np.array([*rows, other], np.int64)
        for epoch in (0, 3, 9):
            given_up = [row in rows and rows[row].epoch <= epoch for row in asked.tolist()]
            assert verdicts.known(source, asked, epoch).tolist() == given_up
        assert all(verdicts.reason(source, row) == verdict.reason for row, verdict in rows.items())


@pytest.mark.parametrize("role", ["planner", "service"])
def test_what_was_delivered_of_a_row_before_its_verdict_stays(tmp_path, cache, role):
    """A row is fine in its first epoch and kills its worker in the second: the first is planned again as it was."""
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(12)))
    runs: list[int] = []

    def deadly(function, name, deadline_s):
        def run(rows):
            here = [int(n) == 5 and not bad for n, bad in zip(rows["n"], rows[BAD_COLUMN], strict=True)]
            runs.extend([len(runs)] * any(here))
            dies = np.flatnonzero(here) if any(here) and len(runs) == 2 else np.empty(0, np.int64)
            alive = np.setdiff1d(np.arange(len(here)), dies)
            return function(take_rows(rows, alive)), [(int(at), "signal 9") for at in dies]

        return run

    sample = ol.Custom(lambda row: {"tokens": [1000 + row["n"]] * 3}, columns=["n"], process=True)
    source = ol.Source("s", str(tmp_path / "s.jsonl"), sample=sample, tolerance=1.0)
    job = ol.Job(sources=[source], batch=ol.Batch(8, global_samples=4))

    def stream(script):
        runs.clear()
        with launch_for_faults(job, script, isolate=deadly, cache=cache, shadows=False) as (service, storm):
            found = digest_service(service, steps=9, before=lambda _, step: storm.pass_step(step))
            return found, service.client(0).state_dict()["verdicts"]

    expected = stream(FaultScript())
    assert expected[1] == {"s": {"5": ["signal 9", 1]}}
    assert stream(FaultScript().kill(role, 7)) == expected


@pytest.mark.parametrize(
    "damaged",
    [
        ["s"],
        "s",
        3,
        {"s": 3},
        {"s": {"x": "why"}},
        {"s": {"-1": "why"}},
        {"s": {"01": "w"}},
        {"t": {"1": "w"}},
        {"s": {"1": ["w", 0]}},
        {"s": {"1": ["w", "1"]}},
        {"s": {"1": ["w"]}},
        {"s": {"1": None}},
    ],
)
def test_damaged_verdicts_are_refused(damaged):
    with pytest.raises(ol.StateError, match="the state is damaged"):
        verdicts_from_json(damaged, ["s"])
    assert verdicts_from_json([], ["s"]) == verdicts_from_json(None, ["s"]) == {}


def test_a_service_whose_function_hangs_closes_at_once(tmp_path, cache):
    job = deadly_job(tmp_path, "sleep", rows=200, at=130)
    patient = job.sources[0].replace(sample=job.sources[0].sample.replace(deadline=600.0))
    with ol.launch(job.replace(sources=[patient]), cache=cache) as service:
        process = psutil.Process(service.status()["pid"])
        client = service.client()

        def train():  # until the stretch of rows that holds the hanging one, wherever it begins
            with contextlib.suppress(ol.OverlordError):
                for _ in range(40):
                    next(client)

        threading.Thread(target=train, daemon=True).start()
        limit = time.monotonic() + 30
        while not calls_of(tmp_path):
            assert time.monotonic() < limit
            time.sleep(0.01)
        family = process.children(recursive=True)
        assert len(family) >= 2
        begin = time.monotonic()
    assert time.monotonic() - begin < 30  # its deadline is 600 s
    assert calls_of(tmp_path) == 1
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
