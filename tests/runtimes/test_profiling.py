"""Profiling on real files: what is slow is found slow, bytes and memory are those of the loader, faults are told."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import overlord as ol
from overlord.runtimes.autoscaling.profiling import (
    Clock,
    Profiled,
    Stage,
    check_profile,
    digests_of,
    profile_job,
    read_profile,
    refresh,
    write_profile,
)
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.runtimes.launching.deployment import facts_of, open_files, prepare
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.supervision.work_clock import Spent
from overlord.scaling.profiles import Profile, SourceProfile

NAP_S = 0.005


def napping(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(NAP_S)
    return {"tokens": row["ids"]}


def napping_long(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(4 * NAP_S)
    return {"tokens": row["ids"]}


def computing(row: dict[str, Any]) -> dict[str, Any]:
    end = time.thread_time() + NAP_S / 2
    while time.thread_time() < end:
        pass
    return {"tokens": row["ids"]}


def odd_ones(row: dict[str, Any]) -> dict[str, Any] | None:
    time.sleep(NAP_S)
    return {"tokens": row["ids"]} if len(row["ids"]) % 2 else None


def failing(row: dict[str, Any]) -> dict[str, Any]:
    if len(row["ids"]) == 5:
        raise ValueError("five")
    return {"tokens": row["ids"]}


def options(cache: str, **changes: Any) -> ServiceOptions:
    return ServiceOptions(**{"mesh": ol.ClientPlaceTree(), "cache": cache} | changes)


def profiled(job: ol.Job, cache: str, **changes: Any) -> Profiled:
    given = {"when": "2030-01-01T00:00:00+00:00", "samples": 60, "seconds": 1.0} | changes
    return profile_job(job, options(cache), **given)


def by_name(found: Profiled) -> dict[str, SourceProfile]:
    return {one.name: one for one in found.profile.sources}


def write_rows(path: Path, lengths: list[int]) -> str:
    path.write_text("".join(json.dumps({"ids": [7] * n}) + "\n" for n in lengths))
    return str(path)


def ids_source(name: str, path: str, **changes: Any) -> ol.Source:
    return ol.Source(name, path, **{"sample": ol.Text("ids", tokenized=True)} | changes)


def job_of(*sources: ol.Source) -> ol.Job:
    return ol.Job(list(sources), batch=ol.Batch(64, global_samples=4))


@pytest.fixture(scope="module")
def mixed(mixed_job: ol.Job, cache: str) -> dict[str, SourceProfile]:
    found = profiled(mixed_job, cache)
    assert not found.failed
    return by_name(found)


def test_every_source_of_the_demo_is_measured(mixed_job: ol.Job, mixed: dict[str, SourceProfile]) -> None:
    assert set(mixed) == set(mixed_job.names)
    for one in mixed.values():
        assert 0 < one.samples <= 60
        assert one.transform_s > 0 and one.handover_s > 0 and one.tokens > 0
        assert one.read_s + one.measure_s + one.finish_s == pytest.approx(one.transform_s, rel=1e-6)
        assert one.transform.quantiles[0] <= one.transform.p50 <= one.transform.p99 <= one.transform.max
        assert [entry.what for entry in one.entries] == ["measured"]
        assert 0 < one.file_bytes < 100_000 < one.buffer_bytes + 100_000


def test_bytes_are_those_of_the_stages(mixed: dict[str, SourceProfile]) -> None:
    photos, wiki = mixed["photos"], mixed["wiki"]
    assert photos.decoded_in == "constructor" and photos.decode_s > photos.finish_s
    assert wiki.decoded_in == "" and wiki.decode_s == 0
    # An encoded image goes through as it is; text becomes five bytes a token: an id, and whether it counts.
    assert photos.read_bytes == pytest.approx(photos.kept_bytes, rel=0.05)
    assert photos.read_bytes == pytest.approx(photos.delivered_bytes, rel=0.2)
    assert wiki.delivered_bytes == pytest.approx(5 * wiki.tokens, rel=0.05)


def test_where_media_are_decoded_moves_their_cost(mixed_job: ol.Job, cache: str) -> None:
    launch = options(cache, placement="loader")
    found = profile_job(mixed_job, launch, when="t", sources=["coyo"], samples=20, seconds=1.0)
    (coyo,) = found.profile.sources
    assert coyo.decoded_in == "loader" and coyo.decode_s == 0
    assert coyo.finish_s > coyo.measure_s
    assert coyo.delivered_bytes > 4 * coyo.read_bytes


@pytest.mark.parametrize("process", [False, True])
def test_a_known_nap_is_found_and_ranks_first(process: bool, tmp_path: Path, cache: str) -> None:
    lengths = [3 + n % 9 for n in range(300)]
    path = write_rows(tmp_path / "a.jsonl", lengths)
    slow = ol.Source("slow", path, sample=ol.Custom(napping, columns=["ids"], process=process))
    found = by_name(profiled(job_of(ids_source("quick", path), slow), cache))
    one, other = found["slow"], found["quick"]
    assert 0.8 * NAP_S <= one.measure_s <= 4 * NAP_S
    assert one.measure_s > 0.8 * one.transform_s
    assert one.transform_s > 10 * other.transform_s
    assert one.transform.p50 >= 0.8 * NAP_S
    assert other.tokens == pytest.approx(sum(lengths) / len(lengths), rel=0.2)


@pytest.fixture
def crowded() -> Iterator[None]:
    """For each core, another process that computes."""
    command = [sys.executable, "-c", "while True: pass"]
    crowd = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for one in crowd:
            one.kill()
            one.wait()


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("process", [False, True])
def test_who_waits_needs_no_cpu_and_who_computes_needs_one_on_a_busy_host_too(
    process: bool, tmp_path: Path, cache: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [3 + n % 9 for n in range(300)])
    kinds = {"waits": napping_long, "computes": computing}
    sources = [
        ol.Source(name, path, sample=ol.Custom(function, columns=["ids"], process=process))
        for name, function in kinds.items()
    ]
    found = by_name(profiled(job_of(*sources, ids_source("quick", path)), cache, samples=40))
    assert found["waits"].cpu_share < 0.2
    assert 0.8 <= found["computes"].cpu_share <= 1 and 0.8 <= found["quick"].cpu_share <= 1
    assert found["waits"].transform_s == pytest.approx(4 * NAP_S, rel=0.25)
    assert found["computes"].transform_s < 3 * NAP_S  # with a core of its own
    assert found["waits"].cost.cpu_share == found["waits"].cpu_share


def test_who_stops_in_time_does_not_pay_for_samples_it_did_not_finish(tmp_path: Path, cache: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [4] * 500)
    slow = ol.Source("slow", path, sample=ol.Custom(napping, columns=["ids"], process=False))
    found = by_name(profiled(job_of(slow), cache, samples=200, seconds=0.5))["slow"]
    assert 0.8 * NAP_S <= found.measure_s < 2 * NAP_S


def test_a_thread_that_ends_takes_no_time_along() -> None:
    """Threads that waited for a core and end meanwhile: what they waited was before, and is nobody's."""
    stop = threading.Event()
    others = [threading.Thread(target=_spin, args=(stop,)) for _ in range(8)]
    for other in others:
        other.start()
    time.sleep(0.3)
    clock = Clock()
    began = time.perf_counter()
    stop.set()
    for other in others:
        other.join()
    wall = time.perf_counter() - began
    took = clock.took()
    assert took.seconds <= max(1.5 * wall + 0.01, took.cpu_s)


@pytest.mark.usefixtures("crowded")
def test_other_threads_that_wait_for_a_core_take_nothing_off() -> None:
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.002):
            pass

    others = [threading.Thread(target=poll) for _ in range(4)]
    for other in others:
        other.start()
    clock = Clock()
    for _ in range(20):
        time.sleep(NAP_S)
    took = clock.took()
    stop.set()
    for other in others:
        other.join()
    assert took.seconds >= 0.9 * 20 * NAP_S


def _spin(stop: threading.Event) -> None:
    while not stop.is_set():
        hashlib.blake2b(bytes(1 << 20))  # lets go of the interpreter


def test_time_is_kept_where_samples_are_slow(tmp_path: Path, cache: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [4] * 500)
    slow = ol.Source("slow", path, sample=ol.Custom(napping, columns=["ids"], process=False))
    found = by_name(profiled(job_of(slow), cache, samples=10_000, seconds=0.2))["slow"]
    assert 1 <= found.samples < 100, "not all 500"
    assert found.measure_s >= 0.8 * NAP_S


def test_no_row_is_read_twice(tmp_path: Path, cache: str) -> None:
    """Rows so large that a loader takes few at a time: whoever pops them in disorder makes it read them again."""
    path, seen = write_rows(tmp_path / "a.jsonl", [8000 + n for n in range(60)]), []

    def counted(row: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(row["ids"]))
        return {"tokens": row["ids"]}

    source = ol.Source("large", path, sample=ol.Custom(counted, columns=["ids"], process=False))
    found = by_name(profiled(job_of(source), cache, samples=60, seconds=20.0))["large"]
    assert found.samples == 60
    assert len(seen) == 60 + 2  # two are run before, and not counted


def test_rows_that_are_passed_over_are_paid_by_the_others(tmp_path: Path, cache: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [3 + n % 2 for n in range(400)])
    few = ol.Source("few", path, sample=ol.Custom(odd_ones, columns=["ids"], process=False))
    found = by_name(profiled(job_of(few), cache, samples=60, seconds=20.0))[
        "few"
    ]  # enough rows for the mean of the draw
    assert found.tokens == 3  # the even ones are no samples, and take their nap all the same
    assert 1.6 * NAP_S <= found.measure_s <= 8 * NAP_S


def test_bad_samples_are_counted_and_measured_all_the_same(tmp_path: Path, cache: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [5] * 20 + [6] * 20)
    job = job_of(ol.Source("some", path, sample=ol.Custom(failing, columns=["ids"], process=False), tolerance=0.0))
    found = profiled(job, cache)
    assert not found.failed
    assert found.profile.sources[0].bad == 20


def test_a_source_that_cannot_be_read_keeps_no_other_from_it(tmp_path: Path, cache: str) -> None:
    good = write_rows(tmp_path / "a.jsonl", [3] * 50)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 this is no parquet file PAR1")
    nothing = write_rows(tmp_path / "none.jsonl", [])
    job = job_of(
        ids_source("good", good),
        ids_source("gone", str(tmp_path / "gone.jsonl")),
        ids_source("torn", str(torn)),
        ids_source("nothing", nothing),
    )
    found = profiled(job, cache)
    assert found.profile.names == ["good"]
    assert set(found.failed) == {"gone", "torn", "nothing"}
    assert all(repr(name) in words for name, words in found.failed.items())


def test_the_buffer_is_that_of_a_whole_group(tmp_path: Path, cache: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [100] * 1000)
    small = by_name(profiled(job_of(ids_source("a", path)), cache))["a"]
    rows_held = 1000 * (small.read_bytes + small.kept_bytes)
    assert rows_held <= small.buffer_bytes <= 2 * rows_held + 1000 * 200
    shuffled_less = by_name(profiled(job_of(ids_source("a", path, shuffle_bytes=64_000)), cache))["a"]
    assert shuffled_less.buffer_bytes < small.buffer_bytes


def test_a_status_has_what_a_refresh_asks_for(tmp_path: Path, ids_job: ol.Job, cache: str) -> None:
    path = tmp_path / "job.profile.json"
    write_profile(path, profiled(ids_job, cache).profile)
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        client = service.client()
        for _ in range(5):
            next(client)
        status = service.status()
    after = refresh(path, status, "t")
    assert after is not None
    for one in after.sources:
        assert one.entries[-1].what.startswith("refreshed at step ") and one.entries[-1].samples > 0


def test_progress_is_told(ids_job: ol.Job, cache: str) -> None:
    told: list[tuple[str, int, int]] = []
    profiled(ids_job, cache, progress=lambda *what: told.append(what))
    assert ("opening sources", 3, 3) in told
    assert told[-1] == ("measuring sources", 3, 3)


# ---- the file


def test_a_profile_holds_until_a_source_changes(tmp_path: Path, cache: str, ids_job: ol.Job) -> None:
    folder = Path(shutil.copytree(Path(ids_job.sources[0].path[0]).parent, tmp_path / "data"))
    sources = [ids_source(name, str(folder / name)) for name in "abc"]
    job = job_of(*sources)
    launch = options(cache)
    found = profiled(job, cache).profile
    check_profile(found, job, launch)
    check_profile(found, job.replace(seed=9), launch)  # no cost depends on it
    with pytest.raises(ol.SpecError, match="'b' is not what was profiled: how its samples are made"):
        check_profile(found, job_of(sources[0], sources[1].replace(shuffle_bytes=1), sources[2]), launch)
    write_rows(folder / "c" / "new.jsonl", [4])
    with pytest.raises(ol.SpecError, match=r"'c' is not what was profiled: its files changed.*overlord profile"):
        check_profile(found, job, launch)


def test_digests_are_known_from_a_launchs_own_facts(ids_job: ol.Job, cache: str) -> None:
    found = profiled(ids_job, cache).profile
    prepared = prepare(ids_job, options(cache))
    opened = open_files(prepared, range(3), SerialWorkers())
    digests = digests_of(prepared, {prepared.job.names[n]: facts_of(files) for n, files in opened.items()})
    assert digests == {one.name: one.digest for one in found.sources}


def test_a_running_job_refreshes_its_profile(tmp_path: Path, ids_job: ol.Job, cache: str) -> None:
    path = tmp_path / "job.profile.json"
    status = {
        "planner": {"next_step": 40},
        "sources": {
            "a": {"samples_prepared": 20_000, "busy_s": 50.0, "cpu_s": 50.0, "samples": 500, "skipped": 500},
            "b": {"samples_prepared": 0, "busy_s": 0.0, "cpu_s": 0.0, "samples": 0, "skipped": 0},
        },
    }
    assert refresh(path, status, "t") is None and not path.exists()
    before = profiled(ids_job, cache).profile
    write_profile(path, before)
    assert read_profile(path) == before
    after = refresh(path, status, "2030-01-02T00:00:00+00:00")
    assert after is not None and read_profile(path) == after
    assert after.cost("a").transform_s == pytest.approx(0.005, rel=0.05)
    assert after.cost("b") == before.cost("b")
    assert after.sources[0].entries[-1].what == "refreshed at step 40"
    assert [file.name for file in tmp_path.iterdir()] == ["job.profile.json"]  # nothing half written stays


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.profile.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ol.SpecError, match="is damaged"):
        read_profile(path)
    with pytest.raises(ol.SpecError, match="cannot be written"):
        write_profile(path / "below", Profile(()))


# ---- figures of a stage


def test_what_a_call_costs_is_not_taken_for_a_samples_own() -> None:
    stage = Stage(rows=100, together=Spent(100 * 0.001), alone=[Spent(0.003 + 0.0001 * n) for n in range(20)])
    spread = stage.spread()
    assert spread.mean() == pytest.approx(0.001)
    assert spread.max() > 2 * spread.min() > 0
    assert sorted(spread) == list(spread)
