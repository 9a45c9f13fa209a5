"""Learning at its limits: extreme losses, priors and graphs, functions that fail, copies that share a lock."""

from __future__ import annotations

import copy
import json
import math
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.errors import PlanError, SpecError, StateError
from overlord.planning.learning.learner import fixed_point, normalised_prior, softmax
from overlord.planning.learning.rules import ADO, ODM, DoReMi, FunctionRule, SkillIt, make_rule

LOSSES = [0.0, 5e-324, 1e-300, 1e-6, 1.0, 11.0, 1e6]
RULES = {
    "doremi": ("doremi", {}),
    "doremi steep": ("doremi", {"eta": 1e6, "eps": 0.0}),
    "odm": ("odm", {}),
    "odm floor": ("odm", {"floor": 0.5, "warmup": 2}),
    "odm smoothed": ("odm", {"smoothing": 0.5}),
    "odm frozen": ("odm", {"smoothing": 1.0}),
    "ado": ("ado", {"first_fit": 8, "refit_every": 3, "ignore": 0, "points": 8}),
    "skill_it": ("skill_it", {}),
    "skill_it steep": ("skill_it", {"eta": 1e6, "window": 5}),
    "skill_it normalised": ("skill_it", {"eta": 1e6, "normalise": True}),
}
priors = st.sampled_from([0.0, 5e-324, 1e-9, 1.0, 3.0, 1e308])


def rule_of(name, prior):
    kind, options = RULES[name]
    names = [f"s{i}" for i in range(len(prior))]
    if kind == "skill_it":
        options = {"graph": np.full((len(prior), len(prior)), 1e6 if "steep" in name else 0.5), **options}
    return make_rule(kind, names, dict(zip(names, prior, strict=True)), options, 4)


def teach(rule, step, loss, tokens, **extra):
    loss, tokens = np.asarray(loss, float), np.asarray(tokens)
    rule.observe(step, rule.version, loss * tokens, tokens, extra)


def check(rule, step):
    weights = rule.weights(step)
    assert np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() == 1.0
    json.dumps(rule.state_dict(), allow_nan=False)


@pytest.mark.parametrize("name", RULES)
@given(
    prior=st.lists(priors, min_size=1, max_size=4).filter(any),
    seed=st.integers(0, 1000),
    largest=st.sampled_from([1, 10**6, 10**12]),
)
@settings(max_examples=15, deadline=None)
def test_weights_stay_shares_whatever_the_losses(name, prior, seed, largest):
    rng, rule, size = np.random.default_rng(seed), rule_of(name, prior), len(prior)
    for step in range(24):
        tokens = rng.integers(0, 2, size) * rng.integers(1, largest + 1, size)
        teach(rule, step, rng.choice(LOSSES, size), tokens, reference=rng.choice([math.nan, *LOSSES], size))
        check(rule, step + 1)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("loss", [0.0, 5e-324, 1e6])
def test_a_loss_that_never_moves(name, loss):
    for size in (1, 306):
        rule = rule_of(name, [1.0] * size)
        for step in range(12):
            teach(rule, step, np.full(size, loss), np.full(size, 1000), reference=np.zeros(size))
            check(rule, step + 1)


@pytest.mark.parametrize("name", RULES)
def test_306_sources_with_extreme_losses(name):
    rule = rule_of(name, [0.0, *([5e-324] * 100), *([1.0] * 205)])
    rng = np.random.default_rng(0)
    for step in range(12):
        teach(rule, step, rng.choice(LOSSES, 306), rng.integers(0, 10**6, 306), reference=np.zeros(306))
        check(rule, step + 1)
    assert rule.weights(12)[0] == 0


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ([[0.0, 1e308], [1e308, 0.0]], r"graph\[0\]\[1\] is 1e\+308; .* Give numbers from 0 to 1e\+06"),
        ([[0.0, 1.0], [-1.0, 0.0]], r"graph\[1\]\[0\] is -1.0"),
        ([[0.0, math.nan], [0.0, 0.0]], r"graph\[0\]\[1\] is nan"),
        ([[0.0], [0.0, 0.0]], "must be 2 x 2"),
        ("text", "must be 2 x 2"),
        (None, "must be 2 x 2"),
        ({"a": {"b": "x"}}, "must be 2 x 2"),
        ({"a": 5}, "row 'a' of the graph is 5"),
    ],
)
def test_graphs_that_cannot_be_followed_are_refused(graph, message):
    with pytest.raises(SpecError, match=message):
        make_rule("skill_it", ["a", "b"], {}, {"graph": graph, "eta": 1e6}, 16)


def test_softmax_and_fixed_point_refuse_what_is_no_number():
    assert softmax(np.array([0.0, -math.inf])).tolist() == [1.0, 0.0]
    for bad in ([math.inf, 0.0], [math.nan, 0.0], [-math.inf, -math.inf]):
        with pytest.raises(SpecError, match=r"weights of the sources would be .* smaller eta"):
            softmax(np.array(bad))
    with pytest.raises(SpecError, match="nan"):
        fixed_point(np.array([math.nan, 1.0]))


def test_a_state_that_overflows_is_refused_and_a_failed_observe_changes_nothing():
    rule = SkillIt([1, 1], np.eye(2), eta=1e6)
    teach(rule, 0, [1.0, 2.0], [1, 1])
    rule.load_state_dict({**rule.state_dict(), "entries": [[1e308, 1e308]]})
    before = json.dumps(rule.state_dict())
    with pytest.raises(SpecError, match="smaller eta"), np.errstate(over="ignore"):
        teach(rule, 1, [1.0, 2.0], [1, 1])
    assert json.dumps(rule.state_dict()) == before
    odm = ODM([1, 1])
    with pytest.raises(StateError, match="version"):
        odm.load_state_dict({**odm.state_dict(), "version": 10**400})
    ado = ADO([1, 1])
    with pytest.raises(StateError, match="laws"):
        ado.load_state_dict({**ado.state_dict(), "laws": [[1e308] * 3, [1.0] * 3]})


@pytest.mark.parametrize(
    ("sums", "tokens", "message"),
    [
        (["x", 1.0], [1, 1], "loss_sum of step 0"),
        ([[1.0], [1.0, 2.0]], [1, 1], "loss_sum of step 0"),
        (None, [1, 1], "loss_sum of step 0"),
        ([1.0, 1.0], [[1], [1, 2]], "token_count of step 0"),
        ([1.0, 1.0], ["x", "y"], "token_count of step 0"),
        ([1.0, 1.0], [2**62, 2**62], "token_count of step 0"),
    ],
)
def test_reports_that_are_no_numbers_are_refused(sums, tokens, message):
    with pytest.raises(SpecError, match=message):
        ODM([1, 1]).observe(0, 0, sums, tokens)
    with pytest.raises(SpecError, match="reference of step 0"):
        DoReMi([1, 1]).observe(0, 0, [1.0, 1.0], [1, 1], {"reference": np.array(["x", "y"])})


@pytest.mark.parametrize("prior", [["x", 1], None, [[1], [1, 2]], [10**400, 1], []])
def test_priors_that_are_no_numbers_are_refused(prior):
    with pytest.raises(SpecError, match=r"the prior is .*nothing could be drawn"):
        normalised_prior(prior)


def test_a_kind_that_is_no_text_is_refused():
    with pytest.raises(SpecError, match=r"no learning rule \[\]"):
        make_rule([], ["a"], {}, {}, 1)
    with pytest.raises(SpecError, match="the prior is"):
        make_rule("odm", ["a"], {"a": "x"}, {}, 1)
    with pytest.raises(SpecError, match="fn is 5, not a function"):
        make_rule("function", ["a"], {}, {"fn": 5}, 1)


# Functions.


def fails(step, metrics):
    raise RuntimeError("no luck")


def leaves(step, metrics):
    sys.exit("enough")


def takes_one(step):
    return None


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (fails, "the mixing function fails failed at step 7 with RuntimeError: no luck"),
        (leaves, "the mixing function leaves failed at step 7 with SystemExit: enough"),
        (takes_one, "the mixing function takes_one failed at step 7 with TypeError"),
        (threading.Lock().acquire, "the mixing function lock.acquire failed at step 7 with"),
    ],
)
def test_a_function_that_fails_is_named_with_its_step(fn, words):
    with pytest.raises(PlanError, match=words):
        FunctionRule(fn, [1, 1], ["a", "b"]).weights(7)


def broken_weights():
    yield 1.0
    raise KeyError("b")


@pytest.mark.parametrize(
    "answer",
    ["12", {"a": "1"}, {5: 1.0, "c": 1.0}, [10**400, 1], broken_weights(), {"a": None}, 7, b"ab", [math.inf, 1.0]],
)
def test_garbage_of_a_function_is_refused(answer):
    def garbage(step, metrics):
        return answer

    with pytest.raises(SpecError, match=r"mixing function .*garbage .* step 3"):
        FunctionRule(garbage, [1, 1], ["a", "b"]).weights(3)


def test_metrics_that_are_no_numbers_are_refused():
    rule = FunctionRule(fails, [1, 1], ["a", "b"])
    for value in (1j, 10**400, "x", None, np.complex128(1j), True):
        with pytest.raises(SpecError, match="the metric 'x' of step 0"):
            rule.observe_metrics(0, {"x": value})


# Copies.


class Locked:
    """A function object that cannot be copied."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, step, metrics):
        with self.lock:
            return [1.0, metrics.get("loss/b", 1.0)]


def test_a_copied_rule_shares_its_function_and_learns_alone():
    rule = FunctionRule(Locked(), [1, 1], ["a", "b"])
    rule.observe_metrics(0, {"loss/b": 3.0})
    trial = copy.deepcopy(rule)
    trial.observe_metrics(1, {"loss/b": 1.0})
    assert trial.weights(2).tolist() == [0.5, 0.5] and rule.weights(2).tolist() == [0.25, 0.75]
    assert (rule.version, trial.version) == (1, 2)


@pytest.mark.parametrize("name", RULES)
def test_a_copy_learns_alone_and_like_its_original(name):
    rule = rule_of(name, [3.0, 1.0, 0.0])
    for step in range(10):
        teach(rule, step, [4.0 / (1 + step), 2.0, 1.0], [100, 200, 0], reference=np.zeros(3))
    before = json.dumps(rule.state_dict())
    trial = copy.deepcopy(rule)
    for step in range(10, 20):
        teach(trial, step, [4.0 / (1 + step), 3.0, 1.0], [100, 200, 0], reference=np.zeros(3))
    assert json.dumps(rule.state_dict()) == before
    for step in range(10, 20):
        teach(rule, step, [4.0 / (1 + step), 3.0, 1.0], [100, 200, 0], reference=np.zeros(3))
    assert json.dumps(rule.state_dict()) == json.dumps(trial.state_dict())
