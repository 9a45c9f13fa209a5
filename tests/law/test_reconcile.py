"""Resume with other sources: what may differ, what is refused, and that numbers stay."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import write_ids

import overlord as ol
from overlord.core.order import BEGIN
from overlord.core.states import sealed
from overlord.job.reconcile import number_names

SAMPLE = ol.Text("ids", tokenized=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(4)
    for number, name in enumerate("abcd"):
        write_ids(folder / f"{name}.jsonl", 1 + rng.integers(0, 40, 25 + 6 * number), number * 1000)
    return folder


def job_of(folder, names, mixture=None, weights=None, **fields) -> ol.Job:
    sources = [
        ol.Source(n, str(folder / f"{n}.jsonl"), sample=SAMPLE, weight=weights[n] if weights else None) for n in names
    ]
    return ol.Job(sources, mixture, batch=ol.Batch(32, global_samples=8), seed=1, **fields)


def launch(job, cache, state=None, **options):
    return ol.launch(job, runtime="inline", cache=cache, state=state, **options)


def state_of(job, cache, steps=4, change=None) -> dict:
    with launch(job, cache) as service:
        client = service.client()
        for _ in range(steps):
            next(client)
        if change is not None:
            change(service)
            next(client)
        return json.loads(json.dumps(client.state_dict(), sort_keys=True))


def steps_of(service, count):
    client = service.client()
    steps = [next(client) for _ in range(count)]
    return [(s.order_digest, s.weights) for s in steps], json.loads(json.dumps(client.state_dict()))


def test_a_new_source_begins_at_its_start_and_the_others_go_on(folder, cache):
    state = state_of(job_of(folder, "bcd"), cache)
    more = job_of(folder, "abcd")
    with pytest.raises(ol.StateError, match=r"new sources: 'a'.*reconcile='allow_add'"):
        launch(more, cache, state)
    with launch(more, cache, state, reconcile="allow_add") as service:
        client = service.client()
        first = client.state_dict()
        assert client.next_step == 4
        step = next(client)
        seen = [step.order_digest]
        after = json.loads(json.dumps(client.state_dict(), sort_keys=True))
        seen += [next(client).order_digest for _ in range(4)]
    assert step.source_names == ("b", "c", "d", "a"), "numbers stay, new sources come last"
    assert {name: first["sources"][name] for name in "bcd"} == state["sources"]
    assert first["sources"]["a"] == [0, BEGIN, *[0] * 8]
    with launch(more, cache, after) as service:  # strictly
        assert [digest for digest, _ in steps_of(service, 4)[0]] == seen[1:]


def test_a_source_that_is_gone_is_dropped_with_its_deficit(folder, cache):
    state = state_of(job_of(folder, "abcd"), cache)
    fewer = job_of(folder, "acd")
    for how in ("strict", "allow_add"):
        with pytest.raises(ol.StateError, match=r"b.*allow_add_remove"):
            launch(fewer, cache, state, reconcile=how)
    with launch(fewer, cache, state, reconcile="allow_add_remove") as service:
        _, after = steps_of(service, 4)
    assert set(after["sources"]) == set("acd")
    with launch(fewer, cache, after) as service:
        assert service.client().next_step == 8


def test_weights_may_differ_and_hold_from_the_states_step_on(folder, cache):
    state = state_of(job_of(folder, "abc", {"a": 1, "b": 2, "c": 3}), cache)
    with launch(job_of(folder, "abd", {"a": 1, "b": 2, "d": 5}), cache, state, reconcile="allow_add_remove") as service:
        steps, after = steps_of(service, 3)
    assert [weights for _, weights in steps] == [(1, 2, 5)] * 3
    assert after["mixer"]["version"] == 1
    beside = state_of(job_of(folder, "abc", weights={"a": 1, "b": 2, "c": 3}), cache)
    more = job_of(folder, "abcd", weights={"a": 1, "b": 2, "c": 3, "d": 4})
    with launch(more, cache, beside, reconcile="allow_add") as service:
        assert steps_of(service, 2)[0][1][1] == (1, 2, 3, 4)


def test_a_mixture_set_while_it_ran_stays_unless_the_job_has_other_weights(folder, cache, caplog):
    job = job_of(folder, "abc", {"a": 1, "b": 2, "c": 3})
    state = state_of(job, cache, change=lambda service: service.set_mixture({"a": 7, "c": 1}))
    with launch(job, cache, state, reconcile="allow_add") as service:
        assert steps_of(service, 1)[0][0][1] == (7, 0, 1)
    other = job_of(folder, "abcd", {"a": 1, "b": 2, "c": 3, "d": 4})
    with launch(other, cache, state, reconcile="allow_add") as service:
        assert steps_of(service, 1)[0][0][1] == (1, 2, 3, 4)
    same = job_of(folder, "abcd", {"a": 1, "b": 2, "c": 3})
    with (
        caplog.at_level(logging.WARNING, "overlord"),
        launch(same, cache, state, reconcile="allow_add") as service,
    ):
        assert steps_of(service, 1)[0][0][1] == (7, 0, 1, 0)
    assert "source 'd' is new" in caplog.text
    fewer = job_of(folder, "ab", {"a": 1, "b": 2})
    with launch(fewer, cache, state, reconcile="allow_add_remove") as service:
        assert steps_of(service, 1)[0][0][1] == (7, 0)


def test_everything_else_stays_refused(folder, cache, tmp_path):
    job = job_of(folder, "abc", {"a": 1, "b": 2, "c": 3})
    state = state_of(job, cache)

    def refusal(other):
        with pytest.raises(ol.StateError) as caught:
            launch(other, cache, state, reconcile="allow_add_remove")
        return str(caught.value)

    mixture = {"a": 1, "b": 2, "c": 3}
    assert "seed was 1, is now 2" in refusal(job.replace(seed=2))
    assert "mixture.level was 'sample', is now 'token'" in refusal(
        job.replace(mixture=ol.Mixture(mixture, level="token"))
    )
    changed = write_ids(tmp_path / "b.jsonl", range(1, 40))
    renewed = [s.replace(path=(str(changed),)) if s.name == "b" else s for s in job.sources]
    assert "source 'b' is not the one that the state knows: its files are others" in refusal(
        job.replace(sources=renewed)
    )
    other_way = [s.replace(shuffle_bytes=0) if s.name == "b" else s for s in job.sources]
    assert "'b' is not the one that the state knows: it is read in another way" in refusal(
        job.replace(sources=other_way)
    )
    with pytest.raises(ol.SpecError, match="reconcile is 'maybe'"):
        launch(job, cache, state, reconcile="maybe")


def test_a_rule_begins_anew_when_sources_come_or_go(folder, cache):
    mixture = ol.Mixture(learn="odm")

    def train(service, stop):
        seen = []
        with service.client() as client:
            for step in client:
                seen.append((step.order_digest, step.mixture_version, step.weights))
                client.report(step.index, {f"loss/{name}": 1.0 + 2 * (name == "b") for name in step.source_names})
                if step.index + 1 == stop:
                    return seen, json.loads(json.dumps(client.state_dict()))
        raise AssertionError("the stream has ended")

    with launch(job_of(folder, "abc", mixture, lag=3), cache) as service:
        seen, state = train(service, 8)
    assert len(set(seen[-1][2])) > 1, "it has learned"
    other = job_of(folder, "abd", mixture, lag=3)
    with launch(other, cache, state, reconcile="allow_add_remove") as service:
        again, _ = train(service, 12)
        _, later = train(service, 14)
        rest, _ = train(service, 18)
    assert again[0][2] == pytest.approx((1 / 3,) * 3)
    assert again[0][1] == state["mixer"]["version"] + 1
    with launch(other, cache, later) as service:
        assert train(service, 18)[0] == rest[6:]


def test_a_damaged_state_is_refused_whatever_may_differ(folder, cache):
    job = job_of(folder, "abc")
    state = state_of(job, cache)
    for key, wrong in (
        ("changes", [5]),
        ("changes", [{"kind": "sources", "at": 2, "add": {"name": 3}}]),
        ("changes", [{"kind": "sources", "at": 2}]),
        ("changes", [{"kind": "park", "at": 2, "source": "nobody", "why": "", "failed": False}]),
        ("changes", [{"kind": "mixture", "at": 2}]),
        ("order", ["a"]),
        ("order", 5),
        ("columns", []),
        ("sources", {**state["sources"], "a": [1]}),
    ):
        for how in ("strict", "allow_add_remove"):
            with pytest.raises(ol.StateError, match="damaged"):
                launch(job, cache, sealed({**state, key: wrong}), reconcile=how)


NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)


@given(NAMES, NAMES)
def test_numbers_of_a_state_stay_and_new_names_are_sorted(names, known):
    state = {"sources": {}, "order": known}
    found = number_names(names, state, keep_order=False)
    assert sorted(found) == sorted(names)
    kept = [name for name in known if name in names]
    assert found[: len(kept)] == kept
    assert found[len(kept) :] == sorted(set(names) - set(known))
    assert number_names(names, None, keep_order=False) == sorted(names)
    assert number_names(names, None, keep_order=True) == names
