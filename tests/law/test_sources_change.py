"""Sources come, go, are parked and return while a stream runs; a resume at any step gives the same stream."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import write_ids

import overlord as ol

SAMPLE = ol.Text("ids", tokenized=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sources of token ids; some of them are in the job from the beginning."""
    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(1)
    for number, name in enumerate("abcdef"):
        write_ids(folder / f"{name}.jsonl", 1 + rng.integers(0, 40, 20 + 9 * number), number * 1000)
    return folder


def source(folder: Path, name: str, **fields) -> ol.Source:
    return ol.Source(name, str(folder / f"{name}.jsonl"), sample=SAMPLE, **fields)


def job_of(folder: Path, names: str = "bdf", mixture=None, **fields) -> ol.Job:
    return ol.Job(
        [source(folder, name) for name in names], mixture, batch=ol.Batch(32, global_samples=9), seed=2, **fields
    )


def take(client: ol.Client, count: int) -> list[tuple[str, str, tuple[str, ...]]]:
    steps = [next(client) for _ in range(count)]
    return [(step.order_digest, step.plan_digest, step.source_names) for step in steps]


def samples(client: ol.Client, count: int) -> list[list[tuple[str, int, int]]]:
    """Which samples each step holds, by name: the same whatever numbers the sources have."""
    steps = [next(client) for _ in range(count)]
    return [[tuple(s) for batch in step.microbatches for s in batch.meta.sample_ids] for step in steps]


def digests(job: ol.Job, state, cache: str, count: int, **options) -> list[str]:
    with ol.launch(job, runtime="inline", cache=cache, state=state, **options) as service:
        client = service.client()
        return [next(client).order_digest for _ in range(count)]


def plain(state):
    return json.loads(json.dumps(state, sort_keys=True))


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("where", ["inline", "local"], indirect=True)
def test_a_source_comes_and_is_drawn_from_that_step_on(folder, cache, where):
    with ol.launch(job_of(folder), cache=cache, **where) as service, service.client() as client:
        before = [next(client) for _ in range(3)]
        at = service.add_source(source(folder, "a"), weight=3, at_step=7)
        steps = before + [next(client) for _ in range(9)]
        drawn = [[s.source for batch in step.microbatches for s in batch.meta.sample_ids] for step in steps]
        status = service.status()["sources"]
    assert at == 7
    assert ["a" in names for names in drawn] == [False] * 7 + [True] * 5
    assert sum(names.count("a") for names in drawn) == pytest.approx(5 * 9 / 2, abs=1)
    assert [step.source_names for step in steps] == [("b", "d", "f")] * 7 + [("b", "d", "f", "a")] * 5
    assert steps[7].weights == (1, 1, 1, 3), "the others stay in their ratio"
    assert list(status) == ["b", "d", "f", "a"]


def test_the_inline_and_the_local_stream_are_the_same(folder, cache):
    def run(runtime):
        with ol.launch(job_of(folder), runtime=runtime, cache=cache) as service, service.client() as client:
            seen = take(client, 2)
            service.add_source(source(folder, "a"), at_step=6)
            service.remove_source("d", at_step=8)
            service.park_source("f", at_step=9)
            service.return_source("f", at_step=11)
            return seen + take(client, 12), plain(client.state_dict())

    assert run("inline") == run("local")


@pytest.mark.parametrize("mixture", [None, {"b": 3, "d": 1, "f": 2}], ids=["equal", "weights"])
def test_a_resume_opens_what_has_come_with_the_old_job_and_with_the_new(folder, cache, mixture):
    job = job_of(folder, mixture=mixture)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        take(client, 2)
        early = plain(client.state_dict())
        service.add_source(source(folder, "a"), weight=2 if mixture else None, at_step=4)
        pending = plain(client.state_dict())
        take(client, 4)
        late = plain(client.state_dict())
        expected = [next(client).order_digest for _ in range(6)]
    assert set(early["sources"]) == set(pending["sources"]) == set("bdf")
    assert late["order"] == ["b", "d", "f", "a"]
    new = job_of(folder, "abdf", mixture and {**mixture, "a": 2})
    assert digests(job, late, cache, 6) == expected
    assert digests(job, pending, cache, 10)[4:] == expected
    how = {"reconcile": "allow_add"} if mixture else {}
    assert digests(new, late, cache, 6, **how) == expected
    assert digests(new, pending, cache, 10, **how)[4:] == expected


def test_who_was_removed_may_be_left_out_of_the_job(folder, cache):
    job = job_of(folder, "abdf", {"a": 3, "b": 1, "d": 2, "f": 1})
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        take(client, 3)
        assert service.remove_source("b") == 3
        with pytest.raises(ol.SpecError, match="'b' is removed"):
            service.remove_source("b")
        with pytest.raises(ol.SpecError, match="no source has the name 'b'"):
            service.set_mixture({"b": 1})
        steps = samples(client, 2)
        state = plain(client.state_dict())
        expected = [next(client).order_digest for _ in range(6)]
        assert service.status()["sources"]["b"]["removed"]
    assert not any(name == "b" for step in steps for name, *_ in step)
    assert "b" in state["sources"]
    fewer = job_of(folder, "adf", {"a": 3, "d": 2, "f": 1})
    with pytest.raises(ol.StateError, match=r"missing sources: 'b'.*allow_add_remove"):
        ol.launch(fewer, runtime="inline", cache=cache, state=state)
    assert digests(fewer, state, cache, 6, reconcile="allow_add_remove") == expected
    assert digests(job, state, cache, 6) == expected


def test_a_visitor_is_not_looked_for_again(tmp_path, folder, cache):
    write_ids(tmp_path / "guest.jsonl", range(1, 30))
    guest = ol.Source("guest", str(tmp_path / "guest.jsonl"), sample=SAMPLE)
    with ol.launch(job_of(folder), runtime="inline", cache=cache) as service:
        client = service.client()
        service.add_source(guest, at_step=2)
        service.remove_source("guest", at_step=4)
        take(client, 5)
        state = plain(client.state_dict())
        expected = [next(client).order_digest for _ in range(4)]
    (tmp_path / "guest.jsonl").unlink()
    assert digests(job_of(folder), state, cache, 4) == expected


@pytest.mark.parametrize("how", [pytest.param("strict", marks=pytest.mark.slow), "allow_add_remove"])
@pytest.mark.parametrize("mixture", [None, ol.Mixture({"b": 1, "d": 1, "f": 2}, learn="odm")], ids=["equal", "learned"])
def test_numbers_stay_when_a_source_came_and_went(tmp_path, folder, cache, how, mixture):
    """A guest comes, another source behind it, the guest goes: a resume numbers and weighs the others as before."""
    write_ids(tmp_path / "guest.jsonl", range(1, 30))
    guest = ol.Source("guest", str(tmp_path / "guest.jsonl"), sample=SAMPLE)
    job = job_of(folder, mixture=mixture, lag=3)

    def train(service, stop):
        seen = []
        with service.client() as client:
            while client.next_step < stop:
                step = next(client)
                ids = [batch.meta.source_ids.tolist() for batch in step.microbatches]
                seen.append((step.order_digest, step.plan_digest, step.source_names, step.weights, ids))
                client.report(step.index, {f"loss/{name}": 1.0 + len(name) for name in step.source_names})
            return seen, plain(client.state_dict())

    with ol.launch(job, runtime="inline", cache=cache) as service:
        service.add_source(guest, 3, at_step=2)
        service.add_source(source(folder, "a"), 2, at_step=3)
        service.remove_source("guest", at_step=5)
        _, state = train(service, 6)
        whole, _ = train(service, 12)
    assert whole[-1][2] == ("b", "d", "f", "guest", "a")
    (tmp_path / "guest.jsonl").unlink()
    with ol.launch(job, runtime="inline", cache=cache, state=state, reconcile=how) as service:
        again, later = train(service, 9)
        assert again == whole[6:9]
        assert service.status()["sources"]["guest"]["removed"]
        with pytest.raises(ol.SpecError, match="another name"):
            service.add_source(source(folder, "c").replace(name="guest"))
        service.add_source(source(folder, "c"), at_step=10)
        rest, _ = train(service, 12)
    assert rest[:4] == whole[6:10] and rest[-1][2] == ("b", "d", "f", "guest", "a", "c")
    with ol.launch(job, runtime="inline", cache=cache, state=later) as service:
        assert train(service, 12)[0] == whole[9:]


def test_a_parked_source_stands_still_and_is_owed_nothing(folder, cache):
    with ol.launch(job_of(folder), runtime="inline", cache=cache) as service:
        client = service.client()
        take(client, 2)
        service.park_source("d", at_step=2)
        before = client.state_dict()
        assert service.status()["sources"]["d"]["parked"] == {"since": 2, "why": "asked for"}
        away = samples(client, 4)
        during = client.state_dict()
        assert service.return_source("d") == 6
        assert service.status()["sources"]["d"]["parked"] is None
        back = samples(client, 3)
    assert not any(name == "d" for step in away for name, *_ in step)
    assert before["sources"]["d"] == during["sources"]["d"]
    share = [sum(name == "d" for name, *_ in step) for step in back]
    assert share == pytest.approx([3, 3, 3], abs=1), "nothing is made up for"


def test_all_parked_is_an_error_that_says_so(folder, cache):
    with ol.launch(job_of(folder, "bd"), runtime="inline", cache=cache) as service:
        client = service.client()
        next(client)
        service.park_source("b")
        service.park_source("d")
        with pytest.raises(ol.PlanError, match=r"all sources .* parked: 'b' since step 1 .*return_source"):
            next(client)
        service.return_source("b")
        assert next(client).index == 1


def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path, folder, cache):
    def refused(service, match, *args, **options):
        with pytest.raises(ol.SpecError, match=match):
            service.add_source(*args, **options)

    custom = ol.Source("own", str(folder / "a.jsonl"), sample=ol.Custom(lambda row: {"tokens": row["ids"]}))
    with ol.launch(job_of(folder), runtime="inline", cache=cache) as service:
        client = service.client()
        next(client)
        state = plain(client.state_dict())
        refused(service, "another name", source(folder, "b"))
        refused(service, r"cannot be serialized.*allow_add", custom)
        refused(service, "nothing|no file|not found|found", ol.Source("no", str(tmp_path / "no"), sample=SAMPLE))
        refused(service, "txet", source(folder, "a").replace(sample=ol.Text("txet", tokenized=True)))
        refused(service, "tokenizer", source(folder, "a").replace(sample=ol.Text("ids")))
        refused(service, "already planned", source(folder, "a"), at_step=0)
        refused(service, "Give a number from 0 to", source(folder, "a"), weight=-1)
        refused(service, "not an ol.Source", "a")
        service.add_source(source(folder, "a"), at_step=9)
        refused(service, "at_step=9", source(folder, "c"), at_step=5)
        for method, name, match in (
            ("remove_source", "bb", "no source has the name 'bb'"),
            ("return_source", "b", "not parked"),
            ("park_source", "a", "no source has the name 'a' at step 1"),
        ):
            with pytest.raises(ol.SpecError, match=match):
                getattr(service, method)(name)
        service.remove_source("b")
        service.remove_source("d")
        with pytest.raises(ol.SpecError, match="nothing could be drawn"):
            service.remove_source("f")
        assert set(state["sources"]) == set("bdf")


def test_weights_of_newcomers(folder, cache):
    def weights(job, weight=None, own=None):
        with ol.launch(job, runtime="inline", cache=cache) as service:
            service.add_source(source(folder, "a", weight=own), weight)
            client = service.client()
            steps = [next(client) for _ in range(4)]
        return [step.weights[-1] for step in steps[1:]]

    assert weights(job_of(folder, mixture={"b": 3, "d": 1})) == [2, 2, 2]
    assert weights(job_of(folder, mixture={"b": 3, "d": 1}), 7) == [7, 7, 7]
    assert weights(job_of(folder, mixture={"b": 3, "d": 1}), own=5) == [5, 5, 5]
    stages = ol.Mixture.stages([(0, {"b": 2}), (2, {"b": 4, "d": 2})])
    assert weights(job_of(folder, mixture=stages)) == [2, 3, 3]
    linear = ol.Mixture.linear({"b": {0: 1, 10: 1}, "d": {0: 3}})
    assert weights(job_of(folder, mixture=linear)) == [2, 2, 2]
    beside = ol.Job(
        [source(folder, name, weight=w) for name, w in (("b", 1), ("d", 3))], batch=ol.Batch(32, global_samples=9)
    )
    assert weights(beside) == [2, 2, 2]


def test_a_rule_begins_anew_with_a_newcomer(folder, cache):
    job = job_of(folder, mixture=ol.Mixture({"b": 1, "d": 1, "f": 1}, learn="odm"), lag=3)

    def train(service, stop):
        seen = []
        with service.client() as client:
            for step in client:
                seen.append((step.order_digest, step.weights))
                client.report(step.index, {f"loss/{name}": 1.0 + len(name) for name in step.source_names})
                if step.index + 1 == stop:
                    return seen, plain(client.state_dict())
        raise AssertionError("the stream has ended")

    with ol.launch(job, runtime="inline", cache=cache) as service:
        train(service, 5)
        service.add_source(source(folder, "a"), weight=1)
        _, state = train(service, 9)
        whole, _ = train(service, 14)
    assert whole[5][1] == pytest.approx((0.25,) * 4)
    with ol.launch(job, runtime="inline", cache=cache, state=state) as service:
        assert train(service, 14)[0] == whole[9:]


def test_the_newest_snapshot_goes_on_with_a_source_that_came_after_it(folder, cache, tmp_path):
    job, store = job_of(folder), tmp_path / "store"
    with ol.launch(job, runtime="inline", cache=cache, store=store) as service:
        client = service.client()
        take(client, 18)
        at = service.add_source(source(folder, "a"))
        expected = take(client, 4)
        # As if the process had been killed: nothing is closed, the snapshot is that of step 16.
        shutil.copytree(store, tmp_path / "copy", ignore=shutil.ignore_patterns("owner-*"))
        with ol.launch(job, runtime="inline", cache=cache, store=tmp_path / "copy", state="latest") as again:
            client = again.client()
            assert client.next_step == 16 and at == 18
            assert take(client, 6)[2:] == expected


# -- what holds at a step follows from the steps named, not from the order of the calls ----------


def ask(service: ol.Service, folder: Path, kind: str, at: int, *given) -> bool:
    """Ask for a change; tell whether it was taken."""
    try:
        if kind == "add":
            service.add_source(source(folder, given[0]), given[1], at)
        elif kind == "mixture":
            service.set_mixture(given[0], at)
        elif kind == "skip":
            service.skip_steps(given[0], at)
        else:
            getattr(service, f"{kind}_source")(given[0], at)
    except ol.SpecError:
        return False
    return True


def changed(job, folder, cache, calls, steps=9):
    """The stream after some calls in their order, and which of them were taken."""
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        next(client)
        taken = frozenset(number for number, call in calls if ask(service, folder, *call))
        seen: list = []
        try:
            for _ in range(steps):
                step = next(client)
                seen.append((step.order_digest, step.weights, step.source_names))
        except ol.PlanError as error:
            seen.append(str(error))
        except StopIteration:
            seen.append("the end")
    return taken, seen


@pytest.mark.parametrize(
    "other",
    [("add", 6, "a", None), ("add", 6, "a", 2), ("park", 6, "d"), ("remove", 6, "d"), ("skip", 6, 2)],
    ids=lambda call: f"{call[0]}-{call[-1]}",
)
@pytest.mark.parametrize("at", [3, 6, 8])
def test_two_changes_give_one_stream_in_either_order(folder, cache, other, at):
    mixture = ("mixture", at, {"b": 5, "d": 1} if other[0] != "remove" else {"b": 5, "f": 1})
    job = job_of(folder, mixture={"b": 1, "d": 2, "f": 3})
    (taken, one), (_, two) = (
        changed(job, folder, cache, calls) for calls in ([(0, mixture), (1, other)], [(1, other), (0, mixture)])
    )
    assert taken == {0, 1}
    assert one == two
    assert one[at - 1][1][0] == 5, "the mixture holds from its step on"
    if other[0] == "add":
        weights = [dict(zip(names, weights, strict=True)).get("a") for _, weights, names in one]
        share = other[3] or (2 if at > 6 else 3)
        assert weights == [None] * 5 + [share] * (at - 6 if at > 6 else 4) + [0] * (2 if at > 6 else 0)


CALLS = st.lists(
    st.one_of(
        st.tuples(
            st.just("mixture"), st.sampled_from([{"b": 2, "d": 1}, {"f": 1}, {"b": 1, "f": 5}, {"d": 1, "a": 2}])
        ),
        st.tuples(st.sampled_from(["park", "return", "remove"]), st.sampled_from("abdf")),
        st.tuples(st.just("add"), st.sampled_from("ac"), st.sampled_from([None, 2])),
        st.tuples(st.just("skip"), st.integers(1, 2)),
    ),
    min_size=2,
    max_size=5,
    unique_by=repr,
)
STAGES = ol.Mixture.stages([(0, {"b": 1, "d": 1}), (4, {"f": 1, "d": 2}), (7, {"f": 1})])


@given(CALLS, st.permutations(range(1, 9)), st.randoms(use_true_random=False), st.sampled_from([None, STAGES]))
@settings(max_examples=25)
@pytest.mark.slow
def test_the_order_of_calls_does_not_matter(folder, calls, steps, dice, mixture):
    """Calls with steps of their own, in several orders: where the same ones are taken, the stream is the same.

    Which of two that cannot be together is taken depends on the order: the second is refused.
    """
    numbered = [(n, (kind, at, *given)) for n, ((kind, *given), at) in enumerate(zip(calls, steps, strict=False))]
    streams: dict = {}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(4):
            dice.shuffle(numbered)
            taken, seen = changed(job_of(folder, mixture=mixture), folder, cache, numbered)
            assert streams.setdefault(taken, seen) == seen
            assert "the end" not in seen, "a stream that never ends does not stop silently"


def test_calls_that_cannot_be_together_are_refused_in_either_order(folder, cache):
    pairs = [
        (("mixture", 3, {"d": 1}), ("remove", 6, "d")),  # nothing would be left at step 6
        (("mixture", 8, {"d": 1, "b": 1}), ("remove", 6, "d")),  # it names a source that is removed
    ]
    for pair in pairs:
        for calls in (list(enumerate(pair)), list(enumerate(pair))[::-1]):
            taken, seen = changed(job_of(folder), folder, cache, calls)
            assert taken == {calls[0][0]}, calls
            assert len(seen) == 9
    with ol.launch(job_of(folder), runtime="inline", cache=cache) as service:
        service.set_mixture({"d": 1, "b": 1}, at_step=8)
        with pytest.raises(ol.SpecError, match=r"remove_source: the mixture .* step 8 names 'd'.* without it"):
            service.remove_source("d", at_step=6)
        service.set_mixture({"b": 1}, at_step=8)  # in place of the one before
        assert service.remove_source("d", at_step=6) == 6


def test_a_source_is_not_removed_before_a_stage_that_only_has_it(folder, cache):
    job = job_of(folder, mixture=ol.Mixture.stages([(0, {"b": 1, "d": 1}), (20, {"f": 1}), (30, {"b": 1})]))
    with ol.launch(job, runtime="inline", cache=cache) as service:
        with pytest.raises(ol.SpecError, match=r"remove_source: no source has a weight at step 20.*\('f'\)"):
            service.remove_source("f", at_step=5)
        with pytest.raises(ol.SpecError, match="no source has a weight at step 25"):
            service.remove_source("f", at_step=25)
        service.remove_source("f", at_step=30)
        with pytest.raises(ol.SpecError, match=r"set_mixture: no source has a weight at step 30"):
            service.set_mixture({"f": 1}, at_step=4)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        service.set_mixture({"b": 1, "d": 1}, at_step=10)  # the stages are no more
        assert service.remove_source("f", at_step=15) == 15


# -- any sequence of changes, resumed at every step ----------------------------------------------

STEPS = 8
CHANGES = st.lists(
    st.tuples(
        st.integers(0, STEPS - 1),
        st.sampled_from(["add", "remove", "park", "return", "mixture", "skip"]),
        st.sampled_from("abcdef"),
        st.integers(0, 3),
    ),
    max_size=7,
)


def apply(service: ol.Service, folder: Path, kind: str, name: str, number: int) -> None:
    """Ask for a change; what cannot be is refused, and that is as good."""
    at = service.status()["planner"]["next_step"] + number
    try:
        if kind == "add":
            service.add_source(source(folder, name), number or None, at)
        elif kind == "mixture":
            service.set_mixture({"b": number, "d": 1, name: 2}, at)
        elif kind == "skip":
            service.skip_steps(1, at)
        else:
            getattr(service, f"{kind}_source")(name, at)
    except ol.SpecError:
        pass


def run(job, folder, cache, changes, state=None, states=None) -> dict[int, tuple]:
    """Consume the stream up to STEPS, and ask for every change when its step comes next."""
    seen = {}
    with ol.launch(job, runtime="inline", cache=cache, state=state) as service:
        client = service.client()
        first = client.next_step
        for step in range(first, STEPS):
            for at, *change in changes:
                if at == step and step > first:
                    apply(service, folder, *change)
            if states is not None:
                states.append(plain(client.state_dict()))
            try:
                seen[step] = take(client, 1)[0]
            except ol.PlanError as error:
                seen[step] = (str(error),)  # all are parked
                break
    return seen


@given(CHANGES)
@settings(max_examples=15)
@pytest.mark.slow
def test_any_changes_resume_at_every_step(folder, changes):
    job, states = job_of(folder), []
    with tempfile.TemporaryDirectory() as cache:
        whole = run(job, folder, cache, changes, states=states)
        for at, state in enumerate(states):
            if len(whole[at]) == 1:
                continue  # it ends here: a launch plans its first step
            assert run(job, folder, cache, changes, state) == {s: one for s, one in whole.items() if s >= at}, at
