"""A stream that crashed goes on as if nothing had happened; one that is rolled back begins a lineage of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import write_ids

import overlord as ol
from overlord.core.client_messages import ChangeSource, GetPlan, SetMixture, SkipSteps
from overlord.core.messages import HostNews
from overlord.errors import Fenced
from overlord.roles.changes import mixture_to_json
from overlord.roles.client import Client
from overlord.runtimes.launching.inline_service import Feed, InlineService
from overlord.runtimes.launching.resume import with_changes
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.stores.places import open_place
from overlord.stores.store import Store, newest_lineage


def options_of(store, cache, **more):
    return ServiceOptions(mesh=ol.ClientPlaceTree(dp=2), cache=cache, store=str(store), service="it", **more)


def planner_of(service):
    return service.role("planner").host.planner


def attach(service, rank, step):
    planner = planner_of(service)
    lineage = planner.checkpoints.store.lineage
    return Client(Feed(service, rank, planner.meshes.at(step), lineage), rank, step)


class Run:
    """A stream with a process that dies now and then: the service is abandoned, and another one takes its store."""

    def __init__(self, job, options):
        self.job, self.options = job, options
        self.service = InlineService(job, options, None)
        self.step = planner_of(self.service).first_step
        self.digests = {}
        self._attach()

    def _attach(self):
        self.client = attach(self.service, 0, self.step)

    def crash(self):
        self.dead = self.service
        self.service = InlineService(self.job, dataclasses.replace(self.options, recover=True), None)
        self._attach()

    def advance(self, *, report=True):
        step = next(self.client)
        seen = (step.order_digest, step.plan_digest)
        assert self.digests.setdefault(step.index, seen) == seen
        self.step = step.index + 1
        if report:
            self.client.report(step.index, {f"loss/{name}": 2.0 + (step.index * 7 % 5) / 10 for name in "abc"})


def learned(job):
    return job.replace(mixture=ol.Mixture(learn=ol.Learn("odm")), lag=3)


ACTIONS = st.lists(st.sampled_from(["step"] * 5 + ["crash", "mixture", "skip"]), min_size=4, max_size=25)


@settings(max_examples=8)
@given(actions=ACTIONS, learn=st.booleans())
def test_any_crashes_leave_the_stream_as_it_would_have_been(ids_job, cache, tmp_path_factory, actions, learn):
    folder = tmp_path_factory.mktemp("run")
    job = learned(ids_job) if learn else ids_job
    run = Run(job, options_of(folder / "a", cache))
    changes = []
    for action in actions:
        if action == "step":
            run.advance()
        elif action == "crash":
            run.crash()
        elif action == "mixture" and not learn:
            changes.append(
                (
                    "mixture",
                    run.service.ask(
                        SetMixture(
                            mixture_to_json(ol.Mixture({"a": 1 + len(changes), "c": 1})), None, f"{len(changes)}"
                        )
                    ).step,
                )
            )
        elif action == "skip":
            changes.append(("skip", run.service.ask(SkipSteps(1, None, f"{len(changes)}")).step))
    for _ in range(3):
        run.advance()
    other = Run(job, options_of(folder / "b", cache))
    for number, (kind, at) in enumerate(changes):
        if kind == "skip":
            other.service.ask(SkipSteps(1, at, f"{number}")).step
        else:
            other.service.ask(SetMixture(mixture_to_json(ol.Mixture({"a": 1 + number, "c": 1})), at, f"{number}")).step
    for _ in range(run.step):
        other.advance()
    assert other.digests == run.digests
    run.service.close()
    other.service.close()


def test_a_recovered_stream_begins_where_its_lineage_does(ids_job, cache, tmp_path):
    run = Run(ids_job, options_of(tmp_path, cache))
    for _ in range(40):
        run.advance(report=False)
    run.crash()
    assert planner_of(run.service).first_step == 0
    assert planner_of(run.service).next_step == 33, "the newest snapshot is of step 32, and its first step is planned"
    fresh = attach(run.service, 1, 0)
    assert [next(fresh).order_digest for _ in range(3)] == [run.digests[step][0] for step in range(3)]
    for _ in range(3):
        run.advance()
    with pytest.raises(Fenced, match="a successor has taken over"):
        planner_of(run.dead).report(0, {"loss/a": 1.0})
    assert len(list(tmp_path.glob("lineage-*"))) == 1


def test_what_may_have_been_handed_out_is_not_changed_after_a_crash(ids_job, cache, tmp_path):
    run = Run(ids_job, options_of(tmp_path, cache))
    for _ in range(20):
        run.advance(report=False)
    run.crash()
    at = run.service.ask(SkipSteps(1, None, "one")).step
    assert at >= 20
    with pytest.raises(ol.SpecError, match="step 18 may have been handed out before"):
        run.service.ask(SkipSteps(1, 18, "another")).step
    run.client.report(19, {"loss/a": 1.0})  # planned before the crash, and not again yet


def test_a_plan_that_comes_out_differently_is_refused(ids_job, cache, tmp_path):
    run = Run(ids_job, options_of(tmp_path, cache))
    for _ in range(20):
        run.advance()
    run.options = dataclasses.replace(run.options, strategy=ol.strategies.vanilla())
    with pytest.raises(ol.PlanError, match="planned again with a different result"):
        run.crash()
        run.advance()


def test_a_service_that_never_began_begins(ids_job, cache, tmp_path):
    run = Run(ids_job, options_of(tmp_path, cache, recover=True))
    run.advance()
    run.service.close()
    other = InlineService(ids_job, dataclasses.replace(run.options, service="other", recover=True), None)
    assert planner_of(other).checkpoints.store.lineage == 2, "it does not go on in what is not its own"
    other.close()


def launch(job, cache, store, **more):
    return ol.launch(job, runtime="inline", cache=cache, store=store, **more)


def orders(service, count):
    with service.client() as client:
        return [(step.index, step.order_digest) for step in (next(client) for _ in range(count))]


def test_a_run_forks_at_any_kept_step(ids_job, cache, tmp_path):
    job = learned(ids_job)
    states = []
    with launch(job, cache, tmp_path / "store", keep=32) as service, service.client() as client:
        seen = []
        for step in client:
            seen.append((step.index, step.order_digest))
            client.report(step.index, {f"loss/{name}": 2.0 + step.index % 3 for name in "abc"})
            states.append(client.state_dict())
            if step.index == 30:
                service.skip_steps(1, 40)
            if step.index == 99:
                break
    for step in (64, 70, 83, 99):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(tmp_path / "store", copy)
        with launch(job, cache, copy, state=step) as again:
            expected = seen[step : step + 3]
            assert orders(again, min(3, len(expected))) == expected
            assert again.status()["store"]["lineage"] == 2
        first = newest_lineage(open_place(str(copy))).snapshots[0].state
        assert first["step"] == step and first["sources"] == states[step - 1]["sources"]
    for step in (0, 63, 101, 5000):
        with pytest.raises(ol.StateError, match=rf"step {step} .*keeps the steps 64 to 100"):
            launch(job, cache, tmp_path / "store", state=step)
    with launch(job, cache, tmp_path / "store") as service:
        assert orders(service, 1) == seen[:1], "a launch without a state begins, beside what is there"


def test_a_successor_that_closes_early_hides_no_step_that_was_handed_out(tmp_path):
    """Its predecessor was killed with plan records that were not written yet: trainers may have come to the horizon."""

    def plan(store, step):
        store.journal.append({"kind": "plan", "step": step}, durable=True)

    place = open_place(str(tmp_path))
    killed = Store(place, "it")
    killed.begin({"step": 0}, horizon=64)
    plan(killed, 0)
    successor = Store(place, "it")
    successor.go_on(successor.newest())
    plan(successor, 1)
    successor.close()
    assert newest_lineage(place).last_resumable == 64
    another = Store(place, "it")
    another.begin({"step": 0}, horizon=64)
    plan(another, 0)
    another.close()
    assert newest_lineage(place).last_resumable == 1, "nothing was lost: only step 0 has a plan"


def test_nothing_of_a_future_that_is_left_comes_back(ids_job, cache, tmp_path):
    with launch(ids_job, cache, tmp_path) as service, service.client() as client:
        for _ in range(5):
            next(client)
        early = client.state_dict()
        service.set_mixture({"a": 1}, at_step=8)
        for _ in range(20):
            next(client)
    with launch(ids_job, cache, tmp_path, state=early) as service:
        forked = orders(service, 20)
    with launch(ids_job, cache, tmp_path / "other") as service:
        assert orders(service, 25)[5:] == forked
    with launch(ids_job, cache, tmp_path, state="latest") as service:
        assert service.status()["planner"]["first_step"] == 25
        assert "a" not in json.dumps(service.client().state_dict()["changes"])


def test_wrong_states_and_stores_are_refused(ids_job, cache, tmp_path):
    for state in ("newest", -1, True, 1.5):
        with pytest.raises(ol.StateError, match="state is"):
            launch(ids_job, cache, tmp_path, state=state)
    for state in ("latest", 3):
        with pytest.raises(ol.StateError, match="needs store="):
            ol.launch(ids_job, runtime="inline", cache=cache, state=state)
        with pytest.raises(ol.StateError, match="holds no snapshot"):
            launch(ids_job, cache, tmp_path / "empty", state=state)
    with pytest.raises(ol.SpecError, match="keep is 0"):
        launch(ids_job, cache, tmp_path, keep=0)
    with pytest.raises(ol.SpecError, match="storage option 'region' is unknown"):
        launch(ids_job, cache, tmp_path, store_options={"region": "x"})
    with launch(ids_job, cache, tmp_path), pytest.raises(ol.StoreError, match=r"is alive.*another store"):
        launch(ids_job, cache, tmp_path)


def test_steps_behind_keep_are_gone(ids_job, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("overlord.roles.planner.KEPT_STATES", 16)
    with launch(ids_job, cache, tmp_path, keep=32) as service, service.client() as client:
        for _ in range(100):
            next(client)
        assert service.plan_raw(80).step == 80
        with pytest.raises(ol.SpecError, match=r"step 3 is not kept any more.*keep"):
            service.plan_raw(3)


def test_what_the_loaders_met_is_known_after_a_crash(cache, tmp_path, monkeypatch):
    monkeypatch.setattr("overlord.runtimes.hosts.shared_planner.LOADERS_EVERY", 2)
    rows = ['{"ids": [1, 2, 3]}', '{"ids": "no"}'] * 60
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    source = ol.Source("a", str(tmp_path / "a.jsonl"), sample=ol.Text("ids", tokenized=True), tolerance=1.0)
    job = ol.Job([source], batch=ol.Batch(32, global_samples=1))
    run = Run(job, options_of(tmp_path / "store", cache))
    for _ in range(40):
        run.advance(report=False)
    before = run.service.status()["sources"]["a"]["bad"]
    assert before > 20
    run.crash()
    assert run.service.status()["sources"]["a"]["bad"] >= before / 2
    assert len(list((tmp_path / "store" / "lineage-0001").glob("loaders-*"))) == 1


@pytest.mark.slow
def test_the_store_stays_flat_and_snapshots_small(tmp_path, cache):
    path = write_ids(tmp_path / "a.jsonl", range(1, 9))
    job = ol.Job(
        [ol.Source("a", str(path), sample=ol.Text("ids", tokenized=True))], batch=ol.Batch(16, global_samples=1)
    )
    sizes = {}
    with launch(job, cache, tmp_path / "store") as service:
        runtime = service._runtime
        for step in range(1, 2001):
            runtime.ask(GetPlan(step - 1))
            runtime.role("planner").host.tell(HostNews({0: step}, {0: step}))
            runtime.write_due()
            if step % 1000 == 0:
                files = [p for p in (tmp_path / "store").rglob("*") if p.is_file()]
                history = sum(p.stat().st_size for p in files if p.name.startswith("history-"))
                sizes[step] = sum(p.stat().st_size for p in files) - history
                assert history < 1 << 18  # it is thinned, and bounded by itself
    assert sizes[2000] <= 1.1 * sizes[1000]
    assert sizes[2000] < 1 << 20


@pytest.mark.slow
def test_sizes_at_306_sources_and_256_ranks(tmp_path, cache):
    path = write_ids(tmp_path / "a.jsonl", [3, 5, 2])
    names = [f"a-source-with-a-name-{number:03d}" for number in range(306)]
    job = ol.Job(
        [ol.Source(name, str(path), sample=ol.Text("ids", tokenized=True)) for name in names],
        batch=ol.Batch(16, global_samples=600),
    )
    with ol.launch(
        job, mesh=ol.ClientPlaceTree(dp=256), runtime="inline", cache=cache, store=tmp_path / "store"
    ) as service:
        client = service.client()
        for _ in range(18):
            next(client)
        state = len(json.dumps(client.state_dict()))
    snapshots = [p.stat().st_size for p in (tmp_path / "store" / "lineage-0001").glob("snapshot-*")]
    assert len(snapshots) == 3
    assert max(snapshots) < state + 512 < 64 * 1024


def mixture_at(service, step):
    return dict(planner_of(service).inputs.mixture_at(step)[0].weights)


@pytest.mark.parametrize(("keep", "at"), [(256, 40), (16, 80)])
def test_of_two_words_for_one_step_the_later_holds_after_a_crash(ids_job, cache, tmp_path, keep, at):
    run = Run(ids_job, options_of(tmp_path, cache, keep=keep))
    run.advance(report=False)
    run.service.ask(SetMixture(mixture_to_json(ol.Mixture({"a": 1})), at, "one")).step
    run.service.ask(SetMixture(mixture_to_json(ol.Mixture({"c": 1})), at, "two")).step
    for _ in range(at - 20):
        run.advance(report=False)
    run.crash()
    assert mixture_at(run.service, at + 1) == {"c": 1}
    run.service.close()
    resumed = InlineService(ids_job, dataclasses.replace(run.options, latest=True, service="x"), None)
    assert mixture_at(resumed, at + 1) == {"c": 1}
    resumed.close()


@pytest.mark.parametrize("ids", [("", "", ""), ("one", "two", "three")])
def test_every_word_counts_as_often_as_it_was_said(ids_job, cache, tmp_path, ids):
    run = Run(ids_job, options_of(tmp_path, cache))
    run.advance(report=False)
    for change, name in zip(("park_source", "return_source", "park_source"), ids, strict=True):
        run.service.ask(ChangeSource(change, "b", 30, name))
    for _ in range(20):
        run.advance(report=False)
    run.crash()
    assert list(planner_of(run.service).sources.parked(32)) == ["b"]
    changes = planner_of(run.service).inputs.changes
    assert [change.kind for change in changes] == ["park", "return", "park"]
    run.service.close()


CHANGE = st.fixed_dictionaries({"kind": st.sampled_from(["park", "return"]), "at": st.integers(0, 2)})


@given(said=st.lists(CHANGE, max_size=8), named=st.booleans(), data=st.data())
def test_a_log_is_put_together_as_it_was_said(said, named, data):
    said = [{**change, "id": f"{number}"} if named else change for number, change in enumerate(said)]
    forgotten = data.draw(st.integers(0, len(said)))
    saved = data.draw(st.integers(forgotten, len(said)))
    if not named and forgotten:  # the same said again later could not be told apart
        saved = len(said)
    assert with_changes(said[:saved], said[forgotten:]) == said


def test_a_service_does_not_begin_anew_behind_another(ids_job, cache, tmp_path):
    run = Run(ids_job, options_of(tmp_path, cache))
    run.advance()
    run.service.close()
    InlineService(ids_job, dataclasses.replace(run.options, service="other"), None).close()
    with pytest.raises(Fenced, match="another service has taken over"):
        run.crash()


def test_launches_that_failed_push_no_lineage_out(ids_job, cache, tmp_path, monkeypatch):
    run = Run(ids_job, options_of(tmp_path, cache))
    run.advance()
    run.service.close()

    def full(*_):
        raise ol.StoreError("the disk is full.")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "_write_snapshot", full)
        for number in range(5):
            with pytest.raises(ol.StoreError, match="full"):
                InlineService(ids_job, dataclasses.replace(run.options, service=f"{number}"), None)
    InlineService(ids_job, dataclasses.replace(run.options, service="last"), None).close()
    assert sorted(path.name for path in tmp_path.glob("lineage-*")) == ["lineage-0001", "lineage-0007"]


def test_a_change_that_was_not_promised_does_not_come_back(ids_job, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("overlord.runtimes.transport.direct.STORE_PATIENCE_S", 0.1)
    run = Run(ids_job, options_of(tmp_path, cache))
    for _ in range(10):
        run.advance(report=False)

    def broken_disk(_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("os.fdatasync", broken_disk)
        with pytest.raises(ol.StoreError):
            run.service.ask(SetMixture(mixture_to_json(ol.Mixture({"c": 1})), None, "x")).step
    for _ in range(5):
        run.advance(report=False)
    run.crash()
    run.step = 10
    run._attach()
    for _ in range(5):
        run.advance(report=False)
    run.service.close()
