"""Failures and misuse: what fails belongs to its step, reaches whoever waits, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
from tests.conftest import write_ids

import overlord as ol
from overlord.runtimes.client_feed import LocalFeed


def ids_source(path, **options) -> ol.Source:
    return ol.Source("a", str(path), sample=ol.Text("ids", tokenized=True), shuffle_bytes=0, **options)


@pytest.fixture
def failing_job(tmp_path) -> ol.Job:
    """Six steps are fine; the seventh holds a sample that overlength="error" refuses."""
    path = write_ids(tmp_path / "a.jsonl", [3] * 20 + [50] + [3] * 8)
    return ol.Job([ids_source(path)], batch=ol.Batch(32, global_samples=3), overlength="error")


def rows_until_failure(client) -> tuple[list[int], str]:
    rows: list[int] = []
    try:
        for step in client:
            rows += [s.row for batch in step.microbatches for s in batch.meta.sample_ids]
    except ol.OverlordError as error:
        return sorted(rows), str(error)
    return sorted(rows), ""


@pytest.mark.slow_on_ray
def test_a_failure_belongs_to_its_step_also_for_late_clients(failing_job, cache, where):
    with ol.launch(failing_job, **where, cache=cache) as service:
        for _ in range(2):
            rows, message = rows_until_failure(service.client())
            assert rows == list(range(18))
            assert "has 50 tokens" in message


@pytest.mark.slow_on_ray
def test_asking_again_after_a_failure_loses_nothing(failing_job, cache, where):
    with ol.launch(failing_job, **where, cache=cache) as service:
        client = service.client()
        assert rows_until_failure(client)[0] == list(range(18))
        state = client.state_dict()
        assert rows_until_failure(client) == ([], rows_until_failure(client)[1])
        assert client.state_dict() == state
    with ol.launch(failing_job.replace(max_steps=6), **where, cache=cache, state=state) as service:
        assert list(service.client()) == []


def test_a_panic_below_python_reaches_the_clients(tmp_path, cache):
    class Panic(BaseException):
        """As a Rust library raises it: not an Exception."""

    def fn(row):
        if row["n"] == 50:
            raise Panic("at the disco")
        return {"tokens": [1, 2]}

    path = write_ids(tmp_path / "a.jsonl", [3] * 300 + [50])
    source = ol.Source("a", str(path), sample=ol.Custom(fn, columns=["n"], process=False), shuffle_bytes=0)
    job = ol.Job([source], batch=ol.Batch(32, global_samples=10))
    with (
        ol.launch(job, cache=cache) as service,
        pytest.raises(ol.OverlordError, match="Panic: at the disco"),
    ):
        list(service.client())


def test_a_source_with_nothing_to_draw_is_an_error_and_not_a_search(tmp_path, cache):
    path = write_ids(tmp_path / "a.jsonl", [50] * 5)
    job = ol.Job([ids_source(path)], batch=ol.Batch(32, global_samples=3), overlength="drop")
    with pytest.raises(ol.PlanError, match=r"source 'a' has nothing to draw: all of its 5 rows"):
        ol.launch(job, runtime="inline", cache=cache)


def test_a_late_client_replays_each_old_step_once(tmp_path, cache, monkeypatch):
    from overlord.roles import planner

    draws = []
    draw = planner.Drawer.draw
    monkeypatch.setattr(planner, "KEPT_STATES", 4)
    monkeypatch.setattr(planner, "CACHED_PLANS", 2)
    monkeypatch.setattr(planner.Drawer, "draw", lambda self: draws.append(self.state.step) or draw(self))
    path = write_ids(tmp_path / "a.jsonl", [3] * 20)
    job = ol.Job([ids_source(path)], batch=ol.Batch(32, global_samples=3), max_steps=60)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        first = [step.plan_digest for step in service.client()]
        draws.clear()
        assert [step.plan_digest for step in service.client()] == first
    assert len(draws) <= 60


def test_sigterm_ends_the_service_quietly(ids_job, cache, capfd):
    service = ol.launch(ids_job, cache=cache)
    next(service.client())
    supervisor = service._runtime._supervisor
    os.kill(supervisor.pid, signal.SIGTERM)
    supervisor._thread.join(20)
    assert supervisor._process.ended == "ended with code 0"
    assert supervisor.restarts == 0
    service.close()
    assert "Fatal" not in capfd.readouterr().err


def test_a_long_temporary_folder_has_room_for_the_socket(ids_job, cache, tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with ol.launch(ids_job, cache=cache) as service:
        assert next(service.client()).index == 0
    assert list(deep.iterdir()) == []


def test_a_job_that_cannot_be_sent_is_refused(tmp_path, cache):
    lock = threading.Lock()
    path = write_ids(tmp_path / "a.jsonl", [3])
    source = ol.Source("a", str(path), sample=ol.Custom(lambda row: {"tokens": [lock.locked()]}))
    with pytest.raises(ol.SpecError, match="cannot be sent to the service process"):
        ol.launch(ol.Job([source], batch=ol.Batch(32, global_samples=3)), cache=cache)


@pytest.mark.slow_on_ray
@pytest.mark.slow_but_inline
def test_a_closed_client_says_so(ids_job, cache, where):
    with ol.launch(ids_job, **where, cache=cache) as service:
        client = service.client()
        next(client)
        client.close()
        client.close()
        for use in (client.state_dict, lambda: next(client), lambda: client.report(0, {"loss": 1.0})):
            with pytest.raises(ol.ClosedError):
                use()


def test_an_array_that_goes_while_a_client_asks_is_given_back(ids_job, cache):
    """Many threads take and drop microbatches of one client: every lease but the living ones is returned."""
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        steps = [next(client) for _ in range(3)]
        feed = client._feed
        assert isinstance(feed, LocalFeed)
        failures: list[BaseException] = []

        def take() -> None:
            try:
                for _ in range(40):
                    for step in steps[-2:]:
                        feed.microbatch(step.index, 0)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert feed._connection.leased == {}


@pytest.mark.slow_on_ray
@pytest.mark.slow_but_inline
def test_wrong_arguments_are_spec_errors(ids_job, cache, where):
    def refused(**options) -> str:
        with pytest.raises(ol.SpecError) as caught:
            ol.launch(ids_job, **{**where, "cache": cache, **options})
        return str(caught.value)

    assert "mesh is 2" in refused(mesh=2)
    assert "prefetch is 'many'" in refused(prefetch="many")
    assert "prefetch is 1.5" in refused(prefetch=1.5)
    assert "threads is -1" in refused(threads=-1)
    assert "budget is 'much'" in refused(budget="much")
    assert "loaders_per_source is True" in refused(loaders_per_source=True)
    assert "store is 5" in refused(store=5)
    assert "cache is 5" in refused(cache=5)
    assert "runtime is ['local']" in refused(runtime=["local"])
    with ol.launch(ids_job, **where, cache=cache) as service:
        for rank in ("0", 0.5, None, True, -1, 10**9):
            with pytest.raises(ol.SpecError, match="rank"):
                service.client(rank=rank)
        with service.client(rank=0) as client:
            next(client)
            client.report(0, {"loss": 1})
            for step, metrics in ((0, "loss"), ("0", {}), (-1, {}), (0.5, {}), (0, {"loss": "much"}), (10**9, {})):
                with pytest.raises(ol.SpecError, match="report"):
                    client.report(step, metrics)
    for address in (None, 5, ""):
        with pytest.raises(ol.SpecError, match="address"):
            ol.connect(address, 0)


def test_a_rank_that_attaches_twice_or_again_is_told(ids_job, cache, caplog):
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), cache=cache) as service:
        with service.client(1) as client:
            for _ in range(3):
                next(client)
            assert not caplog.text
            service.client(1).close()
            assert "rank 1 of" in caplog.text and "has a client in this process already" in caplog.text
            assert next(client).index == 3, "the first one goes on"
            attach = f"import overlord as ol; ol.connect({service.address!r}, 1)"
            other = subprocess.run([sys.executable, "-c", attach], capture_output=True, text=True, timeout=100)
            assert re.search(
                rf"SpecError: rank 1 is attached .* by process {os.getpid()};.*its own rank.*num_workers=0",
                other.stderr,
            )
        caplog.clear()
        with service.client(1) as client:
            assert "rank 1 of" in caplog.text and "was at step 4 before, and begins again at step 0" in caplog.text
            assert next(client).index == 0
        caplog.clear()
        service.client(0).close()
        assert not caplog.text


def test_an_address_file_is_as_good_as_its_address(ids_job, cache, tmp_path):
    with ol.launch(ids_job, cache=cache) as service:
        (tmp_path / "address").write_text(f"{service.address}\n")
        with ol.connect(str(tmp_path / "address"), 0) as client:
            assert next(client).index == 0
    with pytest.raises(ol.SpecError, match="no file of that name holds one"):
        ol.connect(str(tmp_path / "none"), 0)


@pytest.mark.parametrize("where", [{}, pytest.param({"loader_hosts": 2}, marks=pytest.mark.slow)], ids=["one", "hosts"])
def test_a_trainer_does_not_wait_for_a_service_that_was_closed(where, ids_job, cache, caplog):
    with ol.launch(ids_job, cache=cache, **where) as service:
        client = ol.connect(service.address, 0)
        next(client)
    with pytest.raises(ol.ServiceLost, match=r"is gone \(\[Errno \d+\] [\w ]+\); no more data will come"):
        for _ in client:
            pass
    assert not [record for record in caplog.records if "waits for the service" in record.message]


def test_microbatches_that_nobody_looked_at_are_let_go(mixed_job, cache):
    """What is built comes with its step; a client that passes over it must not hold the service's memory."""
    with ol.launch(mixed_job, cache=cache, budget=16 << 20, prefetch=2) as service, service.client() as client:
        for _ in range(25):
            assert len(next(client).microbatches)
        assert len(client._feed._connection.leased) == 0
        assert service.status()["memory"]["held"]["views"] < 16 << 20


OUT_OF_FILES = """
import os, resource, sys
import overlord as ol

resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
client = ol.connect(sys.argv[1], 0)
steps = [next(client).index]
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for what in ("report", "steps"):
    try:
        while what == "steps":
            step = next(client)
            [batch.digest() for batch in step.microbatches]
            steps.append(step.index)
        client.report(0, {"loss": 1.0})
        print("reported")
    except ol.OverlordError as error:
        print(type(error).__name__, what, str(error))
for fd in taken:
    os.close(fd)
step = next(client)
[batch.digest() for batch in step.microbatches]
print(steps + [step.index] == list(range(len(steps) + 1)))
"""


def test_a_trainer_that_runs_out_of_descriptors_is_told_so(mixed_job, cache):
    """It neither waits for ever nor takes the service for gone, and goes on once it has descriptors again."""
    with ol.launch(mixed_job.replace(max_steps=50), cache=cache) as service:
        command = [sys.executable, "-c", OUT_OF_FILES, service.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    *failures, exact = done.stdout.splitlines()
    assert len(failures) == 2, done.stdout + done.stderr
    for told in failures:
        assert re.match(r"OverlordError .*has 64 files open.*ulimit -n 65536.*raise its limit", told), done.stdout
    assert exact == "True", done.stdout


@pytest.mark.parametrize("runtime", ["inline", "local"])
@pytest.mark.slow_but_inline
def test_an_absurd_change_is_refused_before_it_is_journaled(ids_job, cache, tmp_path, runtime):
    job = ids_job.replace(
        sources=[source.replace(weight=None) for source in ids_job.sources],
        mixture=ol.Mixture({"a": 1, "b": 1, "c": 1}),
    )
    path = write_ids(tmp_path / "d.jsonl", [3] * 9)

    def new(paths=path, **options) -> ol.Source:
        return ol.Source("d", paths, sample=ol.Text("ids", tokenized=True), **options)

    absurd = {
        "at most 10000 global batches": lambda: service.skip_steps(10**12),
        "no run comes to a step beyond": lambda: service.skip_steps(1, at_step=10**15),
        "with 9000 that are skipped before step 500 already": lambda: service.skip_steps(2000, at_step=500),
        "weights.a is 1e.300.*1e.18 or less": lambda: service.set_mixture({"a": 1e300, "b": 1}),
        "weights.b is nan": lambda: service.set_mixture({"a": 1, "b": float("nan")}),
        "weights.b is inf": lambda: service.set_mixture({"a": 1, "b": float("inf")}),
        "set_mixture: at_step is 10000000000": lambda: service.set_mixture({"a": 1}, at_step=10**10),
        "add_source: weight is 1e.300": lambda: service.add_source(new(), weight=1e300),
        "add_source: weight is 1.7e.308": lambda: service.add_source(new(weight=1.7e308)),
        "add_source: at_step is": lambda: service.add_source(new(), at_step=10**15),
        "park_source: at_step is": lambda: service.park_source("a", at_step=10**15),
        "remove_source: at_step is": lambda: service.remove_source("a", at_step=10**15),
        "reshard: at_step is": lambda: service.reshard(ol.ClientPlaceTree(dp=2), at_step=10**15),
        "ranks and chunks, and the most is": lambda: service.reshard(ol.ClientPlaceTree(dp=10**9)),
        "has 1000000000000 ranks": lambda: service.reshard(ol.ClientPlaceTree(pp=10**6, tp=10**6)),
        "has 2000000000000 ranks": lambda: service.reshard(ol.ClientPlaceTree(pp=2, vpp=10**12)),
        "loss at step 0 is nan": lambda: client.report(0, {"loss": float("nan")}),
        "step 1000000000000 has not been planned": lambda: client.report(10**12, {"loss": 1.0}),
    }
    if runtime == "local":
        many = [f"{tmp_path}/missing-{number}.jsonl" for number in range(200_000)]
        absurd["AddSource has .* bytes"] = lambda: service.add_source(new(many))
    with ol.launch(job, runtime=runtime, cache=cache, store=tmp_path / "store") as service, service.client() as client:
        next(client)
        service.skip_steps(9000, at_step=500)
        before = service.history()["changes"]
        for message, change in absurd.items():
            with pytest.raises(ol.SpecError, match=message):
                change()
        assert service.history()["changes"] == before
        assert next(client).index == 1
