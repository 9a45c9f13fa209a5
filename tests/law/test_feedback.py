"""Mixtures that follow the loss, and changes of a running stream: exact on resume, at every prefetch depth."""

from __future__ import annotations

import json
import logging
import shutil
import threading

import pytest

import overlord as ol
from overlord.core.states import sealed
from overlord.stores.places import open_place
from overlord.stores.store import newest_lineage

STEPS = 24
LAG = 5


def learning(job: ol.Job, learn="odm", **changes) -> ol.Job:
    sources = [source.replace(weight=None) for source in job.sources]
    mixture = ol.Mixture({"a": 3, "b": 1, "c": 2}, learn=learn)
    return job.replace(sources=sources, mixture=mixture, lag=LAG, **changes)


def losses(step: int) -> dict[str, float]:
    """A loss that stays high for b and falls for the others."""
    return {"loss/a": 3.0 / (1 + step), "loss/b": 6.0, "loss/c": 2.0 / (1 + step)}


def train(service: ol.Service, stop: int, states: dict | None = None) -> list[tuple]:
    seen = []
    with service.client(rank=0) as client:
        for step in client:
            content = [batch.digest() for batch in step.microbatches]
            seen.append((step.index, step.order_digest, step.plan_digest, step.mixture_version, step.weights, content))
            client.report(step.index, losses(step.index))
            if states is not None:
                states[step.index + 1] = json.loads(json.dumps(client.state_dict()))
            if step.index + 1 == stop:
                break
    return seen


RULES = {
    "odm": "odm",
    "smoothed": {"method": "odm", "smoothing": 0.9},
    "ado": {"method": "ado", "first_fit": 4, "refit_every": 3},
    "skill_it": {"method": "skill_it", "graph": {"a": {"b": 0.5}}, "eta": 0.1},
    "every": {"method": "odm", "every": 3},
}


@pytest.mark.parametrize(
    "rule",
    [pytest.param(rule, marks=pytest.mark.slow if rule in ("ado", "smoothed", "every") else ()) for rule in RULES],
)
def test_a_run_with_feedback_resumes_bit_exactly(rule, ids_job, cache):
    job = learning(ids_job, RULES[rule])
    states: dict = {}
    with ol.launch(job, runtime="inline", cache=cache) as service:
        whole = train(service, STEPS, states)
    assert len({weights for *_, weights, _ in whole}) > 3, "the mixture moves"
    assert [version for *_, version, _, _ in whole] == sorted(version for *_, version, _, _ in whole)
    for at in (1, LAG, LAG + 1, 13, STEPS - 1):
        with ol.launch(job, runtime="inline", cache=cache, state=states[at]) as service:
            assert train(service, STEPS) == whole[at:], at


@pytest.mark.parametrize(
    ("prefetch", "loaders"),
    [pytest.param(1, 1, marks=pytest.mark.slow), (2, 3), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_digests_do_not_depend_on_prefetch_runtime_or_loaders(ids_job, cache, prefetch, loaders):
    job = learning(ids_job)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        expected = train(service, STEPS)
    with ol.launch(job, cache=cache, prefetch=prefetch, loaders_per_source=loaders) as service:
        assert train(service, STEPS) == expected


def test_the_loss_that_stays_high_gets_more(ids_job, cache):
    with ol.launch(learning(ids_job, {"method": "odm", "smoothing": 0.9}), runtime="inline", cache=cache) as service:
        seen = train(service, STEPS)
    first, last = seen[0][4], seen[-1][4]
    assert last[1] / sum(last) > first[1] / sum(first)


def test_a_users_function_of_step_and_metrics(ids_job, cache):
    def follow(step, metrics):
        return {"a": 1.0, "b": metrics.get("loss/b", 0.0) + step / 100, "c": 1.0}

    job = learning(ids_job, ol.Learn("function", fn=follow))
    with ol.launch(job, cache=cache) as service:
        seen = train(service, 12)
    assert [weights[1] / weights[0] for *_, weights, _ in seen] == pytest.approx(
        [(6.0 if step >= LAG else 0.0) + step / 100 for step in range(12)], abs=1e-6
    )


def test_a_missing_report_is_named(ids_job, cache):
    with ol.launch(learning(ids_job), runtime="inline", cache=cache) as service:
        client = service.client()
        for _ in range(LAG):
            next(client)
        with pytest.raises(ol.ReportMissing, match=r"step 5 needs the report of step 0.*client\.report\(0"):
            next(client)
        client.report(0, losses(0))
        assert next(client).index == LAG


def test_a_service_waits_for_the_report_and_says_so(ids_job, cache, capfd):
    with ol.launch(learning(ids_job), cache=cache) as service:
        client = service.client()
        for _ in range(LAG):
            next(client)
        assert service.status()["planner"]["waits_for_report"] == 0
        threading.Timer(0.3, lambda: client_report(service)).start()
        assert next(client).index == LAG
    assert "waits for the report of step 0" in capfd.readouterr().err


def client_report(service):
    with service.client(rank=0) as other:
        other.report(0, losses(0))


def test_a_report_nobody_could_learn_from_is_refused_before_it_is_kept(ids_job, cache):
    with ol.launch(learning(ids_job, "doremi"), runtime="inline", cache=cache) as service:
        client = service.client()
        next(client)
        with pytest.raises(ol.SpecError, match="reference"):
            client.report(0, {"loss/a": 1.0})
        client.report(0, {"loss/a": 3.0, "reference/a": 1.0, "loss/b": 1.0, "reference/b": 1.0})


def test_reports_with_names_of_no_source_are_refused(ids_job, cache):
    with ol.launch(learning(ids_job), runtime="inline", cache=cache) as service:
        client = service.client()
        step = next(client)
        assert step.source_names == ("a", "b", "c") and len(step.weights) == 3
        with pytest.raises(ol.SpecError, match=r"loss/bb at step 0: no source has the name 'bb'.*Sources: a, b, c"):
            client.report(0, {"loss/bb": 2.0})
        for nothing in ({}, {"Loss/a": 1.0}, {"grad_norm": 1.0}):
            with pytest.raises(ol.SpecError, match="no metric of a source"):
                client.report(0, nothing)
        client.report(0, {"loss/a": 2.0, "grad_norm": 1.0})


def test_a_report_gets_through_while_another_thread_of_the_client_waits(ids_job, cache):
    with ol.launch(learning(ids_job), cache=cache) as service:
        client = service.client()
        for _ in range(LAG):
            next(client)
        waiting = threading.Thread(target=lambda: next(client))
        waiting.start()
        client.report(0, losses(0))
        waiting.join(30)
        assert not waiting.is_alive()


def test_a_state_without_the_last_report_waits_for_it(ids_job, cache, caplog):
    job = learning(ids_job)
    states: dict = {}
    with ol.launch(job, runtime="inline", cache=cache) as service:
        whole = train(service, 14, states)
    state = states[10]
    del state["reports"]["5"]
    with (
        caplog.at_level(logging.WARNING, "overlord"),
        ol.launch(job, runtime="inline", cache=cache, state=sealed(state)) as service,
    ):
        assert "report of step 5" in caplog.text
        service.client().report(5, losses(5))
        assert train(service, 14) == whole[10:]


def test_a_damaged_mixture_in_a_state_is_refused(ids_job, cache):
    states: dict = {}
    with ol.launch(learning(ids_job), runtime="inline", cache=cache) as service:
        train(service, 8, states)
    for wrong in (5, {}, {**states[8]["mixer"], "rule": None}, {**states[8]["mixer"], "pending": {"3": [1, 2]}}):
        with pytest.raises(ol.StateError, match="damaged"):
            ol.launch(learning(ids_job), runtime="inline", cache=cache, state=sealed(states[8] | {"mixer": wrong}))


# -- changes while it runs ----------------------------------------------------------------------


@pytest.mark.slow_on_ray
def test_weights_change_while_it_runs_and_a_resume_repeats_it(where, ids_job, cache, tmp_path):
    job = learning(ids_job, None)
    with ol.launch(job, **where, cache=cache, store=tmp_path / "one") as service:
        client = service.client()
        before = [next(client) for _ in range(4)]
        at = service.set_mixture({"b": 1}, at_step=9)
        assert at == 9
        steps = [next(client) for _ in range(8)]
        sources = {sample.source for sample in steps[-1].microbatches[0].meta.sample_ids}
        state = client.state_dict()
        rest = [next(client).order_digest for _ in range(4)]
        versions = [step.mixture_version for step in (*before, *steps)]
    assert versions == [0] * 9 + [1] * 3
    assert [step.weights for step in steps[5:]] == [(0.0, 1.0, 0.0)] * 3
    assert sources == {"b"}
    assert state["changes"] == [{"kind": "mixture", "at": 9, "mixture": state["changes"][0]["mixture"]}]
    with ol.launch(job, **where, cache=cache, state=json.loads(json.dumps(state))) as service:
        client = service.client()
        assert [next(client).order_digest for _ in range(4)] == rest
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        plain = [next(client).order_digest for _ in range(12)]
    ours = [step.order_digest for step in (*before, *steps)]
    assert ours[:9] == plain[:9] and ours[9:] != plain[9:]


def test_skipped_steps_are_drawn_and_not_delivered(ids_job, cache):
    job = learning(ids_job, None)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        plain = [next(client).order_digest for _ in range(12)]
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        seen = [next(client).order_digest for _ in range(3)]
        assert service.skip_steps(4) == 3
        seen += [next(client).order_digest for _ in range(5)]
        state = client.state_dict()
    assert seen == plain[:3] + plain[7:]
    with ol.launch(job, runtime="inline", cache=cache, state=state, skip_steps=2) as service:
        client = service.client()
        assert next(client).index == 8
    with ol.launch(job, runtime="inline", cache=cache, skip_steps=3) as service:
        client = service.client()
        assert [next(client).order_digest for _ in range(2)] == plain[3:5]


def test_a_change_begins_a_new_rule(ids_job, cache):
    job = learning(ids_job)
    states: dict = {}
    with ol.launch(job, runtime="inline", cache=cache) as service:
        first = train(service, 9)
        service.set_mixture(ol.Mixture({"a": 1, "c": 1}, learn=ol.Learn("odm", floor=0.5)))
        seen = train(service, STEPS, states)
    assert seen[:9] == first
    assert all(weights[1] == 0 for *_, weights, _ in seen[9:])
    with ol.launch(job, runtime="inline", cache=cache, state=states[16]) as service:
        assert train(service, STEPS) == seen[16:]


def test_a_later_word_for_an_earlier_step_keeps_the_change_ahead(ids_job, cache):
    with ol.launch(learning(ids_job, None), runtime="inline", cache=cache) as service:
        service.set_mixture({"a": 1}, at_step=8)
        service.set_mixture({"b": 1}, at_step=4)
        service.set_mixture({"c": 1}, at_step=4)
        client = service.client()
        weights = [next(client).weights for _ in range(10)]
    assert weights[4:8] == [(0.0, 0.0, 1.0)] * 4 and weights[8:] == [(1.0, 0.0, 0.0)] * 2


def test_a_state_holds_only_the_changes_it_needs(ids_job, cache):
    with ol.launch(learning(ids_job, None), runtime="inline", cache=cache) as service:
        client = service.client()
        for number in range(6):
            for _ in range(3):
                service.set_mixture({"a": number + 1, "b": 1})
            service.skip_steps(1)
            next(client)
        state = client.state_dict()
        rest = [next(client).order_digest for _ in range(3)]
    assert len(state["changes"]) <= 2
    with ol.launch(learning(ids_job, None), runtime="inline", cache=cache, state=state) as service:
        client = service.client()
        assert [next(client).order_digest for _ in range(3)] == rest


def test_reports_of_another_lineage_do_not_leak_into_a_state(ids_job, cache, tmp_path):
    job, store = learning(ids_job), tmp_path / "store"
    states: dict = {}
    with ol.launch(job, runtime="inline", cache=cache, store=store) as service:
        whole = train(service, 14, states)
    del states[8]["reports"]["7"]  # taken before the report came
    fork = ol.launch(job, runtime="inline", cache=cache, store=store, state=states[3])
    with fork, fork.client() as client:
        for step in client:
            client.report(step.index, {"loss/a": 9.0, "loss/b": 0.1, "loss/c": 9.0})
            if step.index == 9:
                break
    with ol.launch(job, runtime="inline", cache=cache, store=store, state=sealed(states[8])) as service:
        client = service.client()
        for _ in range(4):
            next(client)
        with pytest.raises(ol.ReportMissing, match="report of step 7"):
            next(client)
        client.report(7, losses(7))
        client.close()
        assert [seen[:3] for seen in train(service, 14)] == [seen[:3] for seen in whole[8:]]


def test_the_newest_snapshot_goes_on_with_the_changes_made_after_it(ids_job, cache, tmp_path):
    job, store = learning(ids_job, None), tmp_path / "store"
    with ol.launch(job, runtime="inline", cache=cache, store=store) as service:
        client = service.client()
        for _ in range(18):
            next(client)
        at = service.set_mixture({"a": 1})
        service.skip_steps(2)
        expected = [next(client).order_digest for _ in range(4)]
        # As if the process had been killed: nothing is closed, the snapshot is that of step 16.
        shutil.copytree(store, tmp_path / "copy", ignore=shutil.ignore_patterns("owner-*"))
        with ol.launch(job, runtime="inline", cache=cache, store=tmp_path / "copy", state="latest") as again:
            client = again.client()
            assert client.next_step == 16
            seen = {step.index: step for step in (next(client) for _ in range(6))}
            assert [seen[at + n].order_digest for n in range(4)] == expected


def test_damaged_reports_and_changes_are_refused(ids_job, cache):
    states: dict = {}
    with ol.launch(learning(ids_job), runtime="inline", cache=cache) as service:
        train(service, 8, states)
    for key, wrong in (
        ("reports", {"7": {"loss/a": "x"}}),
        ("reports", {"7": {"loss/a": None}}),
        ("changes", [{"kind": "skip", "at": 9, "count": -2}]),
        ("changes", [{"kind": "skip", "at": float("inf"), "count": 2}]),
        ("changes", [{"kind": "mixture", "at": 9, "mixture": {"weights": {"a": 1}, "level": "token"}}]),
        ("changes", "soon"),
        ("mixer", None),
    ):
        with pytest.raises(ol.StateError, match="damaged"):
            ol.launch(learning(ids_job), runtime="inline", cache=cache, state=states[8] | {key: wrong})


def test_a_change_away_from_a_function(ids_job, cache):
    job = learning(ids_job, ol.Learn("function", fn=lambda step, metrics: {"a": 1}))
    with ol.launch(job, cache=cache) as service:
        assert service.set_mixture({"b": 1}) >= 1


def test_a_strategy_that_failed_once_leaves_no_gap_in_the_journal(ids_job, cache, tmp_path):
    failed = []

    def shaky(buffer, tree):
        if buffer.step == 1 and not failed:
            failed.append(1)
            raise OSError("a moment, please")
        return ol.strategies.backbone_balance()(buffer, tree)

    with ol.launch(ids_job, strategy=shaky, runtime="inline", cache=cache, store=tmp_path) as service:
        client = service.client()
        next(client)
        with pytest.raises(ol.PlanError, match="a moment"):
            next(client)
        assert [next(client).index for _ in range(2)] == [1, 2]
    records = [r for r in newest_lineage(open_place(str(tmp_path))).records if r["kind"] == "plan"]
    assert sorted(record["step"] for record in records) == [0, 1, 2]


def test_wrong_changes_are_refused(ids_job, cache):
    with ol.launch(learning(ids_job, None), runtime="inline", cache=cache) as service:
        client = service.client()
        for _ in range(3):
            next(client)
        with pytest.raises(ol.SpecError, match="no source has the name 'web'"):
            service.set_mixture({"web": 1})
        with pytest.raises(ol.SpecError, match="sum to zero"):
            service.set_mixture({"a": 0})
        with pytest.raises(ol.SpecError, match="step 1 is already planned"):
            service.set_mixture({"a": 1}, at_step=1)
        with pytest.raises(ol.SpecError, match="level"):
            service.set_mixture(ol.Mixture({"a": 1}, level="token"))
        with pytest.raises(ol.SpecError, match="count is 0"):
            service.skip_steps(0)


# -- strategies that follow the reports --------------------------------------------------------------


def slower(lengths, metrics):
    """A cost whose attention part is what the trainer measured."""
    return lengths * (100.0 + metrics.get("attention", 0.0) * lengths)


def by_metrics(buffer, tree):
    """A strategy of the user that reads the metrics itself."""
    cost = ol.costs.CostModel(alpha=buffer.metrics.get("attention", 0.0), beta=100.0)
    return ol.DGraph.from_buffer(buffer, tree).distribute("DP").cost(cost).balance(reorder=False).plan()


FOLLOWING = {"cost": ol.strategies.backbone_balance(slower), "strategy": by_metrics}


def plans(service, stop, states=None, silent=()):
    """Train, report what attention took, and return the digests of all steps."""
    seen = []
    with service.client(rank=0) as client:
        for step in client:
            seen.append((step.index, step.order_digest, step.plan_digest, [b.digest() for b in step.microbatches]))
            if step.index not in silent:
                client.report(step.index, {"attention": float(step.index), "loss/a": 1.0})
            if states is not None:
                states[step.index + 1] = json.loads(json.dumps(client.state_dict()))
            if step.index + 1 == stop:
                break
    return seen


@pytest.mark.parametrize("name", ["cost", pytest.param("strategy", marks=pytest.mark.slow)])
def test_plans_that_follow_the_reports_resume_bit_exactly(name, ids_job, cache):
    options = {"cache": cache, "mesh": ol.ClientPlaceTree(dp=2), "strategy": FOLLOWING[name]}
    job, states = ids_job.replace(lag=LAG), {}
    with ol.launch(job, runtime="inline", **options) as service:
        whole = plans(service, STEPS, states)
        assert service.plan_raw(STEPS - 1).metrics == {"attention": float(STEPS - 1 - LAG), "loss/a": 1.0}
        assert service.summary_buffer(LAG - 1).metrics == {}
    plain = {**options, "strategy": ol.strategies.backbone_balance(lambda lengths: lengths * 100.0)}
    with ol.launch(job, runtime="inline", **plain) as service:
        others = plans(service, STEPS)
    assert [one[1] for one in others] == [one[1] for one in whole], "the order does not depend on the strategy"
    assert [a[2] == b[2] for a, b in zip(others, whole, strict=True)][: LAG + 1] == [True] * (LAG + 1)
    assert sum(a[2] != b[2] for a, b in zip(others, whole, strict=True)) > STEPS // 2, "the plans do"
    for at in (1, LAG, 13, STEPS - 1):
        with ol.launch(job, runtime="inline", state=states[at], **options) as service:
            assert plans(service, STEPS) == whole[at:], at
    with ol.launch(job, prefetch=3, loaders_per_source=2, **options) as service:
        assert plans(service, STEPS) == whole, "another runtime"


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_plan_waits_for_the_report_it_follows(name, ids_job, cache, tmp_path):
    job, options = ids_job.replace(lag=LAG), {"cache": cache, "strategy": FOLLOWING[name], "runtime": "inline"}
    with ol.launch(job, **options) as service:
        with pytest.raises(ol.ReportMissing, match=r"step 5 needs the report of step 0.*client\.report\(0"):
            plans(service, STEPS, silent={0})
        assert service.status()["planner"]["waits_for_report"] == 0
    with ol.launch(job, **options) as service:
        whole = plans(service, STEPS)
    # The state is taken before its step is reported, so that the resumed stream waits for that report.
    with ol.launch(job, store=tmp_path / "store", **options) as service, service.client() as client:
        for _ in range(9):
            step = next(client)
            if step.index < 4:
                client.report(step.index, {"attention": float(step.index), "loss/a": 1.0})
        state = client.state_dict()
    with ol.launch(job, state=state, **options) as service, service.client() as client:
        with pytest.raises(ol.ReportMissing, match="step 9 needs the report of step 4"):
            next(client)
        for late in range(4, 9):
            client.report(late, {"attention": float(late), "loss/a": 1.0})
        assert next(client).plan_digest == whole[9][2]


def test_a_service_waits_for_the_report_that_a_cost_follows(ids_job, cache):
    job = ids_job.replace(lag=LAG)
    with ol.launch(job, cache=cache, strategy=FOLLOWING["cost"]) as service, service.client() as client:
        for _ in range(LAG):
            next(client)
        later = threading.Timer(1.0, lambda: client.report(0, {"attention": 1.0}))
        later.start()
        assert next(client).index == LAG
        later.join()


def test_a_recovered_planner_makes_the_same_plans(ids_job, cache, tmp_path):
    job, options = ids_job.replace(lag=LAG), {"cache": cache, "strategy": FOLLOWING["strategy"], "runtime": "inline"}
    with ol.launch(job, **options) as service:
        whole = plans(service, STEPS)
    with ol.launch(job, store=tmp_path / "store", **options) as service:
        assert plans(service, 13) == whole[:13]
    with ol.launch(job, store=tmp_path / "store", **options) as service:
        seen = plans(service, STEPS)
    assert seen == whole[seen[0][0] :] and len(seen) >= STEPS - 13
