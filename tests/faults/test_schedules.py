"""Schedules of faults in one process, on a clock of its own: whatever goes wrong, the trainers get the same stream."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import overlord as ol
from overlord.core.ragged import BAD_COLUMN, num_rows, take_rows
from overlord.core.samples import META, Cursor
from overlord.roles.source_loader import KNOWN_BYTES, Chunk, ReadBuffer, SourceLoader
from overlord.testing import (
    Fault,
    FaultScript,
    StreamDigests,
    assert_resumes_anywhere,
    digest_service,
    launch_for_faults,
    run_with_faults,
    stream_digests,
)
from overlord.testing.digests import Trainers
from tests.conftest import write_ids

pytestmark = pytest.mark.usefixtures("quiet")

MESH = ol.ClientPlaceTree(dp=2)
STEPS = 8
HOSTS = 4
"""Loader hosts of a random schedule; two of them sleep at first."""
WORKERS = 8 * HOSTS
"""What all of them have room for."""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> ol.Job:
    """Three small sources, of which every one begins again within a few steps; two have groups to hand over."""
    folder = tmp_path_factory.mktemp("small")
    rng = np.random.default_rng(0)
    for source, rows, files in (("a", 20, 5), ("b", 9, 1), ("c", 12, 4)):
        for number in range(files):
            write_ids(folder / source / f"{number}.jsonl", 1 + rng.integers(0, 40, rows // files), number * 1000)
    return ol.Job(
        sources=[
            ol.Source(
                name, str(folder / name), sample=ol.Text("ids", tokenized=True), weight=weight, shuffle_bytes=shuffle
            )
            for name, weight, shuffle in (("a", 3, 0), ("b", 1, 1 << 20), ("c", 2, 0))
        ],
        batch=ol.Batch(32, global_samples=5),
        overlength="split",
        seed=3,
    )


def learning(job: ol.Job) -> ol.Job:
    """The same sources, mixed as the losses say."""
    bare = [source.replace(weight=None) for source in job.sources]
    return job.replace(sources=bare, mixture=ol.Mixture({"a": 3, "b": 1, "c": 2}, learn="odm"))


@pytest.fixture(scope="module")
def expected(job, cache) -> StreamDigests:
    return stream_digests(job, mesh=MESH, steps=STEPS, cache=cache)


WINDOWS = {
    "a loader": FaultScript().kill("loader host 0", 3),
    "both loaders, so a primary with its shadow": FaultScript().kill("loader host 0", 3).kill("loader host 1", 3),
    "a loader and the planner that its successor asks": FaultScript().kill("planner", 3).kill("loader host 0", 3),
    "everybody": FaultScript()
    .kill("planner", 3).kill("loader host 0", 3).kill("loader host 1", 3).kill("constructor host 0", 3),
    "a loader in the middle of a draw, and the planner with it": FaultScript()
    .kill("loader host 0", 3, on="summary_buffer").kill("planner", 3),
    "a loader when it hands over": FaultScript().kill("loader host 1", 3, on="hand_over", after=True),
    "a loader that learns of the loss of another": FaultScript()
    .kill("loader host 0", 3).kill("loader host 1", 3, on="learn", after=True),
    "the planner when it has planned": FaultScript().kill("planner", 3, on="plan", after=True),
    "the planner when it is asked where a loader goes on": FaultScript()
    .kill("loader host 0", 3).kill("planner", 3, on="where"),
    "the constructor host": FaultScript().kill("constructor host 0", 3),
    "the service": FaultScript().kill("service", 3),
    "the service while a loader is replaced": FaultScript().kill("loader host 0", 3).kill("service", 3, on="open"),
    "the service, and in the next one the constructor host hears late of the others": FaultScript()
    .delay("constructor host 0", 3, 20.0, method="learn", times=3).kill("service", 3),
    "a planner that comes back from a pause, while a constructor host does not hear of its successor": FaultScript()
    .stop("planner", 5, for_s=45.0).partition("constructor host 0", "service", 5, for_s=20.0),
}  # fmt: skip


@pytest.mark.parametrize("shadows", [False, True])
@pytest.mark.parametrize(
    "window", [pytest.param(name, marks=pytest.mark.slow) if "comes back" in name else name for name in WINDOWS]
)
def test_killed_in_a_known_window(job, cache, expected, window, shadows):
    assert run_with_faults(job, WINDOWS[window], mesh=MESH, steps=STEPS, shadows=shadows, cache=cache) == expected


def test_a_lost_planner_has_nothing_read_again(tmp_path, cache, monkeypatch):
    """Its successor plans the steps since the last snapshot again, by what the loaders know of their rows."""
    write_ids(tmp_path / "a.jsonl", np.full(600, 30), 0)
    job = ol.Job(
        sources=[ol.Source("a", str(tmp_path / "a.jsonl"), sample=ol.Text("ids", tokenized=True))],
        batch=ol.Batch(32, global_samples=20),
    )
    read: list[int] = []
    read_rows = SourceLoader.read

    def counted(self, wanted):
        read.extend(cursor.offset for cursor, _, _ in wanted)
        return read_rows(self, wanted)

    monkeypatch.setattr(SourceLoader, "read", counted)
    script = FaultScript().kill("planner", 11)
    found = run_with_faults(job, script, mesh=MESH, steps=14, shadows=False, cache=cache)
    assert len(read) == len(set(read)) == 5
    assert found == stream_digests(job, mesh=MESH, steps=14)


def test_what_is_known_of_rows_is_bounded_and_the_same():
    """Chunks that were let go of are described as before, the newest of them; their rows are gone."""
    buffer = ReadBuffer()
    meta = np.zeros(64, META)
    for number in range(200):
        meta["row"] = np.arange(64) + 64 * number
        buffer.add(Chunk(0, 0, 64 * number, meta.copy(), {"ids": np.zeros(64)}))
        buffer.release(Cursor(0, 0, 64 * number + 70))
    assert buffer.covering(Cursor(0, 0, 64 * 190)) is None
    known = [offset for offset in range(0, 64 * 199, 64) if buffer.describing(Cursor(0, 0, offset))]
    assert 64 * 198 in known and sum(meta.nbytes for _ in known) <= KNOWN_BYTES < 199 * meta.nbytes
    found = buffer.describing(Cursor(0, 0, 64 * 190 + 3))
    assert found.meta["row"][3] == 64 * 190 + 3 and not found.kept


INPUTS = {
    "the planner between the record of a report and its answer": FaultScript()
    .kill("planner", 2, on="ask", after=True).kill("planner", 5, on="store.append", after=True),
    "the planner before it has written a report down": FaultScript().kill("planner", 3, on="store.append"),
    "reports that are lost, and answers to them": FaultScript()
    .drop("planner", "ask", 2, times=2).drop("planner", "ask", 4, times=2, answers=True),
    "reports that come twice": FaultScript()
    .duplicate("planner", "ask", 1, 3).duplicate("planner", "ask", 4, 2, late_s=45),
    "the planner in the middle of a snapshot": FaultScript()
    .kill("planner", 3, on="store.write").kill("planner", 5, on="store.write", after=True),
    "the planner while old snapshots are removed": FaultScript().kill("planner", 5, on="store.delete"),
    "the planner while it claims its store": FaultScript()
    .kill("planner", 3).kill("planner", 3, on="store.create", after=True).kill("planner", 3, on="store.read"),
    "the service between record and answer": FaultScript().kill("service", 3, on="store.append", after=True),
    "a planner that hangs, is replaced, and comes back with reports": FaultScript().stop("planner", 2, for_s=12.0),
    "a planner that nobody can kill": FaultScript().partition("planner", "service", 2, for_s=40.0),
    "a store that is down": FaultScript().store_errors(2, times=6).store_errors(5, times=2),
    "a disk that is full": FaultScript().full_disk(2, times=6).kill("planner", 2).full_disk(5),
    "a disk that is full for long while a planner comes up": FaultScript().kill("planner", 2).full_disk(2, times=20),
}  # fmt: skip


def losses(step):
    return {f"loss/{name}": 1.0 + ((step.index * 7 + at * 3) % 5) for at, name in enumerate("abc")}


@pytest.mark.parametrize("window", INPUTS)
def test_no_report_is_lost_or_counted_twice(job, cache, window):
    with launch_for_faults(learning(job), INPUTS[window], mesh=MESH, keep=4, cache=cache) as (service, storm):
        found = digest_service(service, steps=12, before=lambda _, step: storm.pass_step(step), report=losses)
    with ol.launch(learning(job), mesh=MESH, runtime="inline", cache=cache) as service:
        assert found == digest_service(service, steps=12, report=losses)


def by_loss(lengths, metrics):
    return lengths * (10.0 + metrics.get("loss/a", 0.0) * lengths)


@pytest.mark.parametrize(
    "window", [pytest.param(one, marks=pytest.mark.slow if at % 4 else ()) for at, one in enumerate(INPUTS)]
)
def test_plans_that_follow_the_reports_are_the_same(job, cache, window):
    following = {"mesh": MESH, "cache": cache, "strategy": ol.strategies.backbone_balance(by_loss)}
    job = job.replace(lag=3)
    with launch_for_faults(job, INPUTS[window], keep=4, **following) as (service, storm):
        found = digest_service(service, steps=12, before=lambda _, step: storm.pass_step(step), report=losses)
    with ol.launch(job, runtime="inline", **following) as service:
        assert found == digest_service(service, steps=12, report=losses)


def test_the_faults_of_a_script_happen(job, cache):
    """Else all of these tests would pass for nothing."""
    script = FaultScript().kill("planner", 2).stop("loader host 0", 3, for_s=30.0).kill("service", 6)
    with launch_for_faults(job, script, mesh=MESH, cache=cache) as (service, storm):
        seen = []

        def before(service, step):
            storm.pass_step(step)
            seen.extend(fault["role"] for fault in service.status()["faults"])

        digest_service(service, steps=STEPS, before=before)
        assert {"planner", "loader host 0"} <= set(seen)
        assert storm.cluster.restarts == 1


def run_scripts(job, cache, expected, shadows, seeds):
    for seed in seeds:
        script = FaultScript.random(seed, STEPS)
        found = run_with_faults(job, script, mesh=MESH, steps=STEPS, shadows=shadows, cache=cache)
        assert found == expected, f"seed {seed}: {script}"


@pytest.mark.parametrize(
    ("shadows", "seeds"),
    [
        (True, range(15)),
        pytest.param(True, range(15, 60), marks=pytest.mark.slow),
        pytest.param(False, range(60), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_scripts(job, cache, expected, shadows, seeds):
    run_scripts(job, cache, expected, shadows, seeds)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shadows", [False, True])
def test_very_many_random_scripts(job, cache, expected, shadows):
    run_scripts(job, cache, expected, shadows, range(1000, 1800))


ROLES = st.sampled_from(["planner", "constructor host 0", *(f"loader host {n}" for n in range(HOSTS))])
SECONDS = st.sampled_from([1.0, 4.0, 7.0, 20.0, 45.0])
TOUCHES = ("write", "append", "create", "open_append", "delete", "read")
MESSAGES = st.sampled_from(
    [("planner", method) for method in ("plan", "ask", "tell", "where", "open_store", "begin")]
    + [
        (f"loader host {n}", m)
        for n in range(HOSTS)
        for m in ("summary_buffer", "hand_over", "follow", "learn", "open")
    ]
    + [(f"loader host {n}", m) for n in range(HOSTS) for m in ("take_sources", "resize", "begin")]
    + [("planner", "check_source"), ("planner", "add_source"), ("constructor host 0", "add_source")]
    + [(f"loader host {n}", m) for n in range(HOSTS) for m in ("add_source", "drop_source")]
)


CHANGES = ("set_mixture", "skip_steps", "park_source", "return_source", "remove_source", "reshard", "add_source")
NAMES = ("a", "b", "c")
NEWCOMERS = ("new0", "new1", "new2")
"""Sources that may come while the stream runs."""


class Run:
    """A service and its trainers: what is done to it is written down, and what it delivers."""

    def __init__(self, service, learns):
        self.service = service
        self.trainers = Trainers(service)
        self.learns = learns
        self.steps = []
        self.pieces = Counter()

    def advance(self):
        opened = self.trainers.step()
        content = []
        for step in opened:
            for batch in step.microbatches:
                content.append(batch.digest())
                meta = batch.meta
                for sample, offset in zip(meta.sample_ids, meta.segment_offsets.tolist(), strict=True):
                    if sample.source:
                        self.pieces[sample, offset] += 1
        self.steps.append([(s.index, str(s.mesh), s.order_digest, s.plan_digest) for s in opened] + content)
        if opened and self.learns:
            self.report(opened[0].index, 0)

    def report(self, step, other):
        """Report losses; of a second, other report of a step nothing must be seen."""
        losses = {f"loss/{name}": 1.0 + ((step * 7 + at * 3 + other) % 5) for at, name in enumerate(NAMES)}
        self.trainers.first.report(step, losses)

    def change(self, name, argument, at_step):
        return getattr(self.service, name)(argument, at_step=at_step)

    def state(self):
        state = self.trainers.first.state_dict()
        changes = [{key: value for key, value in change.items() if key != "id"} for change in state["changes"]]
        return {**state, "changes": changes}


class Schedule(RuleBasedStateMachine):
    """Anything at any time; what was delivered is held against a run of the same inputs without faults."""

    job: ol.Job
    learned: ol.Job
    cache: str
    newcomers: dict[str, ol.Source]

    @initialize(shadows=st.booleans(), learns=st.booleans(), keep=st.sampled_from([4, 256]))
    def begin(self, shadows, learns, keep):
        self.shadows = shadows
        self.keep = keep
        self.learns = learns
        self.launch(None, MESH)

    @property
    def chosen(self):
        return self.learned if self.learns else self.job

    def launch(self, state, mesh):
        self.start = (state, mesh)
        self.events = []
        self.saved = []
        self.ends = ExitStack()
        service, self.storm = self.ends.enter_context(
            launch_for_faults(
                self.chosen,
                mesh=mesh,
                shadows=self.shadows,
                keep=self.keep,
                state=state,
                cache=self.cache,
                most_workers=WORKERS,
            )
        )
        self.run = Run(service, self.learns)

    # -- what trainers do -------------------------------------------------------------------------

    @rule(count=st.integers(1, 3))
    def advance(self, count):
        for _ in range(count):
            self.run.advance()
            self.events.append(("advance",))
            self.storm.wait(0.5)

    @rule()
    def checkpoint(self):
        self.events.append(("state", self.run.state()))
        self.saved.append(self.run.trainers.first.state_dict())

    @precondition(lambda self: self.learns and self.run.steps)
    @rule(back=st.integers(1, 6))
    def report_again(self, back):
        step = self.run.trainers.next_step - back
        if step >= (self.start[0] or {"step": 0})["step"]:
            self.run.report(step, 1)

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 99), dp=st.integers(1, 3))
    def resume(self, which, dp):
        """Go on from a state that was saved, on any mesh: a stream of its own from there on."""
        state = self.saved[which % len(self.saved)]
        self.check()
        self.launch(state, ol.ClientPlaceTree(dp=dp))

    # -- what the owner does ----------------------------------------------------------------------

    @rule(name=st.sampled_from(CHANGES), ahead=st.sampled_from([None, 2, 3, 5]), draw=st.data())
    def change(self, name, ahead, draw):
        if name == "set_mixture":
            argument = {n: draw.draw(st.integers(1, 4)) for n in NAMES}
            if self.learns:
                return
        elif name == "skip_steps":
            argument = draw.draw(st.integers(1, 2))
        elif name == "add_source":
            if self.learns:
                return  # its losses would have to be reported too
            argument = self.newcomers[draw.draw(st.sampled_from(NEWCOMERS))]
        elif name == "reshard":
            argument = ol.ClientPlaceTree(dp=draw.draw(st.integers(1, 4)))
        else:
            argument = draw.draw(st.sampled_from(NAMES))
        try:
            at = self.run.change(name, argument, None if ahead is None else self.run.trainers.next_step + ahead)
        except ol.SpecError:
            return  # planned already, parked already, the last source: nothing has changed
        self.events.append(("change", name, argument, at))

    # -- what the scaler does ---------------------------------------------------------------------

    @rule(workers=st.lists(st.sampled_from([0, 1, 1, 3, 8, 12, 20]), min_size=3, max_size=3), later=st.booleans())
    def resize(self, workers, later):
        """Sources are split over hosts and moved, hosts are woken and put to sleep."""
        self.storm.resize(workers, later=later)

    # -- what goes wrong --------------------------------------------------------------------------

    @rule(role=st.one_of(ROLES, st.just("service")))
    def kill(self, role):
        self.storm.happen(Fault(kind="kill", at_step=0, role=role))

    @rule(what=st.sampled_from(TOUCHES), after=st.booleans(), everybody=st.booleans())
    def kill_writing(self, what, after, everybody):
        """Between a journal's record and its answer, in the middle of a snapshot, while a store is claimed."""
        role = "service" if everybody else "planner"
        self.storm.happen(Fault(kind="kill", at_step=0, role=role, method=f"store.{what}", after=after))

    @rule(message=MESSAGES, after=st.booleans(), everybody=st.booleans())
    def kill_on(self, message, after, everybody):
        role, method = message
        role = "service" if everybody else role
        self.storm.happen(Fault(kind="kill", at_step=0, role=role, method=method, after=after))

    @rule(role=ROLES, seconds=SECONDS)
    def stop(self, role, seconds):
        self.storm.happen(Fault(kind="stop", at_step=0, role=role, seconds=seconds))

    @rule(message=MESSAGES, kind=st.sampled_from(["drop", "duplicate", "delay"]), seconds=SECONDS, after=st.booleans())
    def message(self, message, kind, seconds, after):
        role, method = message
        given = {"seconds": seconds} if kind != "drop" else {"after": after}
        self.storm.happen(Fault(kind=kind, at_step=0, role=role, method=method, **given))

    @rule(one=ROLES, other=st.sampled_from(["service", "planner", "loader host 0"]), seconds=SECONDS)
    def cut_off(self, one, other, seconds):
        self.storm.happen(Fault(kind="partition", at_step=0, role=one, other=other, seconds=seconds))

    @rule(kind=st.sampled_from(["store_errors", "full_disk"]), times=st.integers(1, 4))
    def spoil_the_store(self, kind, times):
        self.storm.happen(Fault(kind=kind, at_step=0, times=times))

    @rule(seconds=SECONDS)
    def wait(self, seconds):
        """Long enough for somebody to be taken for dead, or to come back as a zombie."""
        for _ in range(4):
            self.storm.wait(seconds / 4)

    # -- what must hold ---------------------------------------------------------------------------

    def check(self):
        with self.ends:
            pass
        assert max(self.run.pieces.values(), default=1) == 1, "a sample came twice"
        state, mesh = self.start
        with ol.launch(self.chosen, mesh=mesh, runtime="inline", state=state, cache=self.cache) as service:
            expected = Run(service, self.learns)
            for kind, *given in self.events:
                if kind == "advance":
                    expected.advance()
                elif kind == "change":
                    assert expected.change(*given) == given[-1]
                else:
                    assert expected.state() == given[0], f"the state before step {given[0]['step']}"
        assert self.run.steps == expected.steps

    def teardown(self):
        if hasattr(self, "ends"):
            self.check()


def run_schedules(job, cache, newcomers, *, examples, rules):
    given = {"job": job, "learned": learning(job), "cache": cache, "newcomers": newcomers}
    machine = type("Schedule", (Schedule,), given)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=rules,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def near_horizon(monkeypatch):
    """After a crash a change takes effect no sooner than at the horizon: let it be near, so that it does here."""
    monkeypatch.setattr("overlord.roles.planner.AHEAD", 4)


@pytest.fixture(scope="module")
def newcomers(tmp_path_factory) -> dict[str, ol.Source]:
    folder = tmp_path_factory.mktemp("new")
    paths = {name: write_ids(folder / f"{name}.jsonl", [7] * (5 + 3 * at)) for at, name in enumerate(NEWCOMERS)}
    return {name: ol.Source(name, str(path), sample=ol.Text("ids", tokenized=True)) for name, path in paths.items()}


@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_any_schedule(job, cache, newcomers, near_horizon, examples):
    run_schedules(job, cache, newcomers, examples=examples, rules=15)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_very_many_schedules(job, cache, newcomers, near_horizon):
    run_schedules(job, cache, newcomers, examples=600, rules=30)


def test_resumes_anywhere_of_a_run_with_changes_and_faults(job, cache, tmp_path):
    def before(service, step):
        if step == 2:
            service.set_mixture({"a": 1, "b": 5, "c": 1}, at_step=5)
        if step == 3:
            service.park_source("c", at_step=6)

    script = FaultScript().kill("loader host 0", 3).stop("planner", 5, for_s=8.0).kill("constructor host 0", 6)
    assert_resumes_anywhere(
        job, steps=STEPS, mesh=MESH, script=script, before=before, store=tmp_path / "store", cache=cache
    )


@pytest.mark.parametrize(
    ("script", "shadows"),
    [
        (FaultScript().kill("planner", 3).kill("loader host 0", 3), False),
        (
            FaultScript().stop("loader host 1", 3, for_s=2.5).kill("loader host 0", 4).kill("constructor host 0", 4),
            True,
        ),
        (FaultScript().kill("service", 3).kill("planner", 6), True),
    ],
)
@pytest.mark.slow
def test_scripts_on_processes(job, cache, expected, script, shadows):
    found = run_with_faults(
        job, script, mesh=MESH, steps=STEPS, runtime="local", shadows=shadows, heartbeat=1.0, cache=cache
    )
    assert found == expected


def test_what_cannot_be_done_is_refused(job, cache):
    with pytest.raises(ol.SpecError, match=r"no role is called 'loader host 7'.*loader host 0"):
        run_with_faults(job, FaultScript().kill("loader host 7", 0), steps=1, cache=cache)
    with pytest.raises(ol.SpecError, match=r"no role is sent a message 'plann'.*never happen.*Did you mean 'plan'"):
        FaultScript().kill("planner", 3, on="plann")
    with pytest.raises(ol.SpecError, match="it would never happen"):
        FaultScript().drop("planner", "plan", 3, times=0)
    with pytest.raises(ol.SpecError, match=r"'drop' on a message at step 3 cannot be done to processes"):
        run_with_faults(job, FaultScript().drop("planner", "plan", 3), steps=1, runtime="local", cache=cache)


def doomed(rows):
    """Which rows kill the worker that runs them, as long as anybody runs them."""
    good = [at for at in range(num_rows(rows)) if not rows[BAD_COLUMN][at]]
    return [at for at in good if int(rows["ids"][at][0]) % 4 == 0]


def deadly(function, name, deadline_s):
    """Stand in for process workers that some rows kill."""

    def run(rows):
        killed = doomed(rows)
        alive = np.setdiff1d(np.arange(num_rows(rows)), killed)
        return function(take_rows(rows, alive)), [(at, "signal 9") for at in killed]

    return run


def as_tokens(row):
    return {"tokens": row["ids"]}


def run_deadly(job, cache, script):
    """Run a job whose rows kill their workers: its digests, its verdicts, and what was counted."""
    custom = ol.Custom(as_tokens, columns=["ids"], process=True)
    given = job.replace(sources=[source.replace(sample=custom, tolerance=1.0) for source in job.sources])
    with launch_for_faults(given, script, mesh=MESH, isolate=deadly, cache=cache) as (service, storm):
        found = digest_service(service, steps=STEPS, before=lambda _, step: storm.pass_step(step))
        bad = {name: source["bad"] for name, source in service.status()["sources"].items()}
        return found, service.client(0).state_dict()["verdicts"], bad


@pytest.fixture(scope="module")
def deadly_run(job, cache):
    return run_deadly(job, cache, FaultScript())


@pytest.mark.parametrize("on", ["verdict", "summary_buffer", "follow", "hand_over", "plan"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("role", ["planner", "loader host 0"])
def test_a_verdict_is_given_once(job, cache, deadly_run, role, on, after):
    stream, verdicts, bad = deadly_run
    assert sum(map(len, verdicts.values())) > 3
    script = FaultScript().kill(role, 0, on=on, after=after).kill(role, 3, on=on, after=after)
    faulty = run_deadly(job, cache, script)
    assert faulty[:2] == (stream, verdicts)
    assert all(count <= bad[name] for name, count in faulty[2].items()), "no row is counted twice"
