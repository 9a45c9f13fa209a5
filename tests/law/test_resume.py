"""Resume anywhere: in a fresh process, on another mesh, at every step; and refuse what does not fit."""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
import sys

import pytest
from tests.conftest import write_ids

import overlord as ol
from overlord.core.plan import chain_digest
from overlord.core.states import sealed
from overlord.testing import assert_resumes_anywhere, stream_digests


def test_resumes_before_every_step(mixed_job, cache):
    assert_resumes_anywhere(mixed_job, steps=8, mesh=ol.ClientPlaceTree(dp=2), cache=cache)


@pytest.mark.parametrize(
    ("level", "stopping"),
    [
        ("sample", "all_exhausted_without_replacement"),
        pytest.param("sample", "all_exhausted", marks=pytest.mark.slow),
        pytest.param("sample", "never_exhausted", marks=pytest.mark.slow),
        pytest.param("token", "all_exhausted_without_replacement", marks=pytest.mark.slow),
        pytest.param("token", "all_exhausted", marks=pytest.mark.slow),
        pytest.param("token", "never_exhausted", marks=pytest.mark.slow),
    ],
)
def test_resumes_before_every_step_of_a_finite_stream(ids_job, cache, stopping, level):
    job = ids_job.replace(mixture=ol.Mixture(stopping=stopping, level=level), batch=ol.Batch(32, global_tokens=400))
    assert_resumes_anywhere(job, steps=30, cache=cache)


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("where", ["local", pytest.param("ray", marks=pytest.mark.ray)], indirect=True)
@pytest.mark.slow
def test_resumes_before_every_step_in_a_fresh_service_process(ids_job, cache, where):
    steps = 3 if where["runtime"] == "ray" else 5
    assert_resumes_anywhere(ids_job, steps=steps, mesh=ol.ClientPlaceTree(dp=2), **where, cache=cache)


_SCRIPT = """
import json, sys
import overlord as ol
from overlord.core.plan import chain_digest
job = ol.Job.from_mapping(json.loads(sys.argv[1]))
state = json.loads(sys.argv[2])
mesh = ol.ClientPlaceTree.parse(sys.argv[3])
with ol.launch(job, mesh=mesh, state=state, cache=sys.argv[4], **json.loads(sys.argv[5])) as s:
    client = s.client(rank=0)
    print(chain_digest([next(client).order_digest for _ in range(5)]))
"""


@pytest.mark.slow_on_ray
def test_resumes_in_a_fresh_process_on_another_mesh(ids_job, cache, where):
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), cache=cache, **where) as service:
        client = service.client(rank=1)
        for _ in range(4):
            next(client)
        state = client.state_dict()
        expected = chain_digest([next(client).order_digest for _ in range(5)])
    job = ids_job.model_dump_json(by_alias=True, exclude_defaults=False)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, job, json.dumps(state), "dp=3,cp=2", cache, json.dumps(where)],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.slow_on_ray
def test_state_is_the_same_on_every_rank_and_runtime(ids_job, cache, where):
    states = []
    for options in ({"runtime": "inline"}, where):
        with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2, tp=2), cache=cache, **options) as service:
            for rank in (0, 3):
                client = service.client(rank=rank)
                for _ in range(3):
                    next(client)
                states.append(json.dumps(client.state_dict(), sort_keys=True))
    assert len(set(states)) == 1


def test_state_of_306_sources_is_small(tmp_path, cache):
    sources = []
    for i in range(306):
        path = write_ids(tmp_path / f"{i}.jsonl", [3, 5, 2])
        sources.append(ol.Source(f"a-source-with-a-name-{i:03d}", str(path), sample=ol.Text("ids", tokenized=True)))
    job = ol.Job(sources=sources, batch=ol.Batch(16, global_samples=600))
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client(rank=0)
        next(client)
        client.report(0, {f"loss/{s.name}": 1.0 for s in sources[:10]})
        assert len(json.dumps(client.state_dict())) < 64 * 1024


def test_newest_snapshot_of_a_store_resumes(ids_job, cache, tmp_path):
    store = tmp_path / "store"
    with ol.launch(ids_job, runtime="inline", cache=cache, store=store) as service:
        client = service.client(rank=0)
        digests = [next(client).order_digest for _ in range(20)]
    with ol.launch(ids_job, runtime="inline", cache=cache, store=store, state="latest") as service:
        step = next(service.client(rank=0))
    # The client was at step 19 and never said that it was done with it: it comes again.
    assert step.index == 19
    assert step.order_digest == digests[19]


def _state(job, cache, steps=2):
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client(rank=0)
        for _ in range(steps):
            next(client)
        return client.state_dict()


def _refusal(job, state, cache) -> str:
    with pytest.raises(ol.StateError) as caught:
        ol.launch(job, runtime="inline", state=state, cache=cache)
    return str(caught.value)


def test_state_of_another_job_is_refused_with_what_differs(ids_job, cache):
    state = _state(ids_job, cache)
    assert "seed was 3, is now 4" in _refusal(ids_job.replace(seed=4), state, cache)
    assert "context_length was 32, is now 64" in _refusal(
        ids_job.replace(batch=ol.Batch(64, global_samples=11)), state, cache
    )
    fewer = ids_job.replace(sources=ids_job.sources[:2])
    refusal = _refusal(fewer, state, cache)
    assert "missing sources: 'c'" in refusal and "weights.c" not in refusal


def test_state_of_another_version_is_refused(ids_job, cache):
    state = {**_state(ids_job, cache), "version": 99}
    assert "version 99" in _refusal(ids_job, state, cache)
    assert "not a state of overlord" in _refusal(ids_job, {"hello": 1}, cache)


def test_changed_file_is_refused(tmp_path, cache):
    path = write_ids(tmp_path / "a.jsonl", range(1, 30))
    job = ol.Job(
        sources=[ol.Source("a", str(path), sample=ol.Text("ids", tokenized=True))], batch=ol.Batch(32, global_samples=4)
    )
    state = _state(job, cache)
    write_ids(path, range(1, 31))
    refusal = _refusal(job, state, cache)
    assert "the files of source 'a' differ" in refusal
    assert not re.search(r"[0-9a-f]{16}", refusal), "digests mean nothing to a reader"


def test_knobs_outside_the_fingerprint_may_change(ids_job, cache):
    state = _state(ids_job, cache)
    other = ids_job.replace(sources=[s.replace(tolerance=0.5) for s in ids_job.sources], max_steps=7)
    continued = stream_digests(other, steps=5, state=state, cache=cache, mesh=ol.ClientPlaceTree(dp=2))
    assert continued.steps == 5


@pytest.mark.slow_on_ray
def test_a_snapshot_never_runs_ahead_of_the_clients(ids_job, cache, tmp_path, where):
    def run(steps, state=None):
        with ol.launch(
            ids_job, **where, cache=cache, store=tmp_path, state=state, mesh=ol.ClientPlaceTree(dp=2)
        ) as service:
            clients = [service.client(rank=rank) for rank in range(2)]
            indices = [[next(client).index for client in clients] for _ in range(steps)]
            for client in clients:
                client.close()
        return [pair[0] for pair in indices]

    assert run(19) == list(range(19))
    assert run(5, "latest") == [19, 20, 21, 22, 23]


def test_after_a_kill_the_snapshot_repeats_rather_than_loses(ids_job, cache, tmp_path):
    script = """
import json, os, sys
import overlord as ol
service = ol.launch(ol.Job.from_mapping(json.loads(sys.argv[1])), cache=sys.argv[2], store=sys.argv[3])
for step in service.client():
    if step.index == 40:
        os.kill(service.status()["pid"], 9)
        os._exit(0)
"""
    job = ids_job.model_dump_json(by_alias=True)
    subprocess.run([sys.executable, "-c", script, job, cache, str(tmp_path)], check=True)
    with ol.launch(ids_job, cache=cache, store=tmp_path, state="latest") as service, service.client() as client:
        assert 16 <= next(client).index <= 40


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
def test_a_stream_that_has_ended_stays_ended(ids_job, cache, stopping):
    job = ids_job.replace(mixture=ol.Mixture(stopping=stopping))
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        assert len(list(client)) > 3
        state = client.state_dict()
    with ol.launch(job, runtime="inline", cache=cache, state=state) as service:
        assert list(service.client()) == []


def test_a_state_does_not_tell_how_far_somebody_looked_ahead(tmp_path, cache):
    path = write_ids(tmp_path / "a.jsonl", [30, 19])
    source = ol.Source("a", str(path), sample=ol.Text("ids", tokenized=True))
    job = ol.Job([source], batch=ol.Batch(32, global_tokens=64))

    def states(state=None, steps=6):
        with ol.launch(job, runtime="inline", cache=cache, state=state) as service:
            client = service.client()
            found = [client.state_dict()]
            for _ in range(steps):
                next(client)
                found.append(client.state_dict())
        return found

    whole = states()
    for at in range(6):
        assert states(whole[at], 6 - at) == whole[at:]


def test_damaged_states_are_refused(ids_job, cache):
    state = _state(ids_job, cache)
    columns = state["columns"]

    def with_cell(column, value):
        rows = {name: list(row) for name, row in state["sources"].items()}
        rows["a"][columns.index(column)] = value
        return sealed({**state, "sources": rows})

    for column, value in (
        ("offset", -1),
        ("offset", 10**6),
        ("group", -1),
        ("group", -7),
        ("group", 5),
        ("group", 1 << 40),
        ("epoch", 1 << 31),
        ("epoch", -1),
        ("deficit", 1 << 63),
        ("finished", 2),
        ("samples", 1.5),
        ("tokens", "7"),
        ("passed", None),
    ):
        assert "damaged" in _refusal(ids_job, with_cell(column, value), cache), (column, value)
    for key, value in (
        ("step", -1),
        ("step", "3"),
        ("fingerprint", None),
        ("sources", []),
        ("sources", {**state["sources"], "a": [1, 2]}),
        ("sources", {**state["sources"], "a": 5}),
        ("reports", []),
        ("reports", {"x": {}}),
        ("reports", {"0": 5}),
        ("columns", []),
    ):
        assert "damaged" in _refusal(ids_job, sealed({**state, key: value}), cache), (key, value)
    for key in ("reports", "step", "sources"):
        lacking = {k: v for k, v in state.items() if k != key}
        assert "not a state of overlord" in _refusal(ids_job, sealed(lacking), cache)


def test_an_edited_state_is_refused(ids_job, cache):
    state = json.loads(json.dumps(_state(ids_job, cache), indent=1, sort_keys=True))
    edited = copy.deepcopy(state)
    edited["sources"]["a"][edited["columns"].index("samples")] += 1
    assert "it was edited or cut" in _refusal(ids_job, edited, cache)
    del edited["checksum"]
    assert "it has no 'checksum'" in _refusal(ids_job, edited, cache)
    with ol.launch(ids_job, runtime="inline", state=state, cache=cache) as service:
        assert service.client().next_step == 2


def _places(value, path=()):
    """Every place in a JSON value, as the keys that lead there."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from _places(one, (*path, key))


def _mutated(state, dice: random.Random):
    """A copy of a state with one value replaced, taken out, put in or nested."""
    deep: list = []
    for _ in range(dice.choice([1, 40, 3000])):
        deep = [deep]
    values = [None, True, -1, 0, 1, 7, 1 << 31, 1 << 63, 10**400, -(10**30), 0.5, 1e308, float("nan"), float("inf")]
    values += ["", "a", "7", "x" * 5000, [], {}, [0] * 10, {"a": 1}, {"name": "a"}, deep, [[0, {"a": 1.0}]]]
    found = copy.deepcopy(state)
    *way, last = dice.choice([place for place in _places(found) if place])
    inside = found
    for key in way:
        inside = inside[key]
    how = dice.randrange(4)
    if how == 0:
        del inside[last]
    elif how == 1 and isinstance(inside, dict):
        inside[dice.choice(["a", "b", "9", "kind", "at", "mixture", "rule"])] = dice.choice(values)
    elif how == 2:
        inside[last] = dice.choice([[inside[last]], {str(last): inside[last]}])
    else:
        inside[last] = dice.choice(values)
    return found


@pytest.mark.parametrize("sources", [None, [], "abc"])
def test_a_state_without_the_digests_of_its_sources_is_damaged(ids_job, cache, sources):
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        state = service.client().state_dict()
    state["fingerprint"] = state["fingerprint"] | {"sources": sources}
    with pytest.raises(ol.StateError, match="damaged"):
        ol.launch(ids_job, runtime="inline", state=sealed(state), cache=cache)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.nightly)])
def test_mutated_states_raise_nothing_but_our_errors(ids_job, cache, count):
    job, dice = ids_job.replace(mixture=ol.Mixture(learn="odm"), lag=3), random.Random(count)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        for step in range(5):
            client.report(next(client).index, {f"loss/{name}": 1.0 + step for name in "abc"})
            if step == 1:
                service.park_source("b", at_step=3)
                service.set_mixture(ol.Mixture({"a": 1, "b": 2, "c": 3}, learn="odm"), at_step=3)
                service.skip_steps(2, at_step=9)
        state = json.loads(json.dumps(client.state_dict()))
    for _ in range(count):
        other = _mutated(state, dice)
        if other == state:
            continue
        with pytest.raises(ol.StateError, match=r"damaged|not a state|version"):
            ol.launch(job, runtime="inline", state=other, cache=cache)
        try:
            again = sealed(other)
        except (ValueError, RecursionError):
            continue  # it is no JSON
        try:  # one that was sealed again is refused for what it says, or goes on
            with ol.launch(job, runtime="inline", state=again, cache=cache) as service:
                next(service.client(), None)
        except ol.OverlordError:
            pass


@pytest.mark.slow_on_ray
@pytest.mark.slow_but_inline
def test_a_rank_that_left_long_ago_holds_the_snapshot_where_it_was(ids_job, cache, tmp_path, monkeypatch, where):
    monkeypatch.setattr("overlord.roles.planner.KEPT_STATES", 8)
    with (
        ol.launch(ids_job, **where, cache=cache, store=tmp_path, mesh=ol.ClientPlaceTree(dp=2)) as service,
        service.client(0) as gone,
        service.client(1) as going,
    ):
        for _ in range(3):
            next(gone)
        gone.close()
        for _ in range(30):
            next(going)
    with ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path, state="latest") as service:
        assert next(service.client()).index == 3
