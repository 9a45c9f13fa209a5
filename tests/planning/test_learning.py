"""Learning mixtures: each rule follows its formula, and continues bit for bit from any state."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.errors import PlanError, SpecError, StateError
from overlord.planning.learning import learner
from overlord.planning.learning.rules import ADO, ODM, RULES, DoReMi, FunctionRule, SkillIt, fit_power_laws, make_rule

KINDS = ["doremi", "odm", "smoothed", "ado", "skill_it", "function"]
K = 4
NAMES = [f"s{i}" for i in range(K)]


def by_loss(step, metrics):
    return {name: 1 + step % 3 + metrics.get(f"loss/{name}", 0.0) for name in NAMES} if metrics else None


def rule_of(kind, lag=3):
    options = {
        "odm": {"warmup": 2, "floor": 0.1},
        "smoothed": {"smoothing": 0.9},
        "ado": {"first_fit": 6, "refit_every": 10, "ignore": 1, "points": 8},
        "skill_it": {"graph": np.eye(K) + 0.5 * np.eye(K, k=1), "window": 2, "update_every": 2},
        "function": {"fn": by_loss},
    }
    prior = dict(zip(NAMES, [4, 2, 1, 0], strict=True))
    return make_rule("odm" if kind == "smoothed" else kind, NAMES, prior, options.get(kind, {}), lag)


def report(rule, step, loss, tokens, version=None, **extra):
    loss, tokens = np.asarray(loss, float), np.asarray(tokens)
    rule.observe(step, rule.version if version is None else version, loss * tokens, tokens, extra)


def random_report(rule, step, seed):
    rng = np.random.default_rng([seed, step])
    tokens = rng.integers(0, 2, K) * rng.integers(1, 10**6, K)
    loss = rng.uniform(0.5, 6.0, K)
    version = max(0, rule.version - int(rng.integers(0, 4)))
    report(rule, step, loss, tokens, version, reference=np.where(rng.random(K) < 0.3, math.nan, loss - rng.random(K)))


# What every rule promises.


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 30))
@settings(max_examples=8)
def test_a_state_continues_bit_for_bit_from_any_step(kind, seed, cut):
    rule, other = rule_of(kind), rule_of(kind)
    for step in range(cut):
        random_report(rule, step, seed)
    text = json.dumps(rule.state_dict(), allow_nan=False)
    other.load_state_dict(json.loads(text))
    for step in range(cut, cut + 12):
        assert other.version == rule.version == step
        assert other.weights(step).tolist() == rule.weights(step).tolist()
        random_report(rule, step, seed)
        random_report(other, step, seed)
    assert json.dumps(other.state_dict()) == json.dumps(rule.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1000))
@settings(max_examples=5)
def test_weights_are_exact_shares_and_asking_changes_nothing(kind, seed):
    rule = rule_of(kind)
    for step in range(20):
        before = json.dumps(rule.state_dict())
        weights = rule.weights(step)
        assert weights.sum() == 1.0 and (weights >= 0).all()
        assert (weights * 2**40 == np.rint(weights * 2**40)).all()
        assert kind == "function" or (weights[3] == 0 and (weights[:3] > 0).all()), "prior 0 is not in the mixture"
        assert json.dumps(rule.state_dict()) == before
        random_report(rule, step, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_counts_once(kind):
    rule = rule_of(kind)
    for step in range(8):
        random_report(rule, step, 1)
    before = json.dumps(rule.state_dict())
    for step in range(8):
        report(rule, step, [9.0] * K, [100] * K, reference=np.zeros(K))
    assert json.dumps(rule.state_dict()) == before and rule.version == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_losses_is_a_version_too(kind):
    rule = rule_of(kind)
    report(rule, 0, [0.0] * K, [0] * K, reference=np.full(K, math.nan))
    assert rule.version == 1 and rule.weights(1).sum() == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("loss", "tokens", "version", "message"),
    [
        ([1, 1, math.nan, 1], [1] * 4, 0, "is nan for source 2"),
        ([1, -1, 1, 1], [1] * 4, 0, "is -1.0 for source 1"),
        ([1, math.inf, 1, 1], [1] * 4, 0, "is inf for source 1"),
        ([1, 1, 1], [1] * 3, 0, "has shape"),
        ([1] * 4, [1, 1, 1, -1], 0, "token_count of step 5"),
        ([1] * 4, [1.5] * 4, 0, "token_count of step 5"),
        ([1] * 4, [1] * 4, 7, "drawn with mixture 7, but only 0 to 0 are known"),
    ],
)
def test_bad_reports_are_refused_and_change_nothing(kind, loss, tokens, version, message):
    rule = rule_of(kind)
    before = json.dumps(rule.state_dict())
    with pytest.raises(SpecError, match=message):
        report(rule, 5, loss, tokens, version, reference=np.zeros(len(loss)))
    assert json.dumps(rule.state_dict()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_states_are_refused_and_change_nothing(kind):
    rule = rule_of(kind)
    for step in range(15):
        random_report(rule, step, 2)
    good = rule.state_dict()
    before = json.dumps(good)
    wrong = ["text", [[1]], -1e9, {"a": "b"}, math.inf]
    for field in good:
        for value in (*wrong, "missing"):
            bad = copy.deepcopy(good)
            bad[field] = value
            if value == "missing":
                del bad[field]
            with pytest.raises(StateError, match="the state of the mixture"):
                rule.load_state_dict(bad)
            assert json.dumps(rule.state_dict()) == before, field
    with pytest.raises(StateError):
        rule.load_state_dict("nonsense")
    with pytest.raises(StateError, match="learns by"):
        rule.load_state_dict(rule_of("ado" if kind == "doremi" else "doremi").state_dict())


def test_a_report_of_a_forgotten_mixture_is_refused():
    rule = ODM([1, 1], lag=2)
    for step in range(5):
        report(rule, step, [1, 2], [10, 10])
    with pytest.raises(SpecError, match="drawn with mixture 2, but only 3 to 5 are known"):
        report(rule, 5, [1, 2], [10, 10], version=2)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_small_at_306_sources(kind):
    names = [f"s{i}" for i in range(306)]
    options = {
        "smoothed": {"smoothing": 0.9},
        "ado": {"first_fit": 30, "refit_every": 1000},
        "skill_it": {"graph": np.eye(306)},
        "function": {"fn": lambda step, metrics: None},
    }
    rule = make_rule("odm" if kind == "smoothed" else kind, names, {}, options.get(kind, {}), 16)
    rng = np.random.default_rng(0)
    if rule.kind == "odm":
        # Late in a run, where the weights of Exp3 differ and every version is another one.
        late = rule.state_dict()
        rule.load_state_dict({**late, "version": 10_000})
    for step in range(60):
        tokens = rng.integers(1, 10**5, 306)
        report(rule, step, rng.uniform(1, 5, 306), tokens, reference=rng.uniform(1, 5, 306))
    assert len(json.dumps(rule.state_dict(), separators=(",", ":"))) < 150_000


@pytest.mark.parametrize("kind", KINDS)
def test_time_is_counted_in_reports(kind):
    every, tenth = rule_of(kind), rule_of(kind)
    for step in range(20):
        tokens, loss = [100, 200, 300, 0], [3.0 / (1 + step), 2.0, 1.0 + 1.0 / (1 + step), 0.0]
        report(every, step, loss, tokens, reference=np.ones(K), unrelated=np.full(K, 1e30))
        report(tenth, 10 * step, loss, tokens, reference=np.ones(K), unrelated=np.full(K, 1e30))
    assert every.weights(200).tolist() == tenth.weights(200).tolist()


# DoReMi.


def test_doremi_raises_the_largest_excess_by_its_formula():
    rule = DoReMi([1, 1, 2], eta=0.5, eps=0.1)
    report(rule, 0, [3.0, 2.0, 5.0], [10, 10, 10], reference=np.array([1.0, 2.5, 5.0]))
    raw = np.array([0.25, 0.25, 0.5]) * np.exp(0.5 * np.array([2.0, 0.0, 0.0]))
    expected = 0.9 * raw / raw.sum() + 0.1 / 3
    assert rule.weights(1) == pytest.approx(expected, abs=1e-11)
    assert rule.weights(1)[0] == rule.weights(1)[:2].max() > 0.25
    # A source that is missing keeps its last score.
    report(rule, 1, [0.0, 2.0, 5.0], [0, 10, 10], reference=np.array([math.nan, 2.0, 5.0]))
    raw = expected * np.exp(0.5 * np.array([2.0, 0.0, 0.0]))
    second = 0.9 * raw / raw.sum() + 0.1 / 3
    assert rule.weights(2) == pytest.approx(second, abs=1e-11)
    assert rule.average == pytest.approx((expected + second) / 2, abs=1e-11)


def test_doremi_takes_the_clipped_excess_of_tokens_and_needs_some_reference():
    given_excess, given_reference = DoReMi([1, 1]), DoReMi([1, 1])
    report(given_excess, 0, [3.0, 2.0], [10, 10], excess=np.array([2.0, 0.0]))
    report(given_reference, 0, [3.0, 2.0], [10, 10], reference=np.array([1.0, 2.0]))
    assert given_excess.weights(1).tolist() == given_reference.weights(1).tolist()
    with pytest.raises(SpecError, match="reference of step 1 has values above"):
        report(given_reference, 1, [3.0, 2.0], [10, 10], reference=np.array([math.inf, 2.0]))
    with pytest.raises(SpecError, match="has no reference losses"):
        report(given_excess, 1, [3.0, 2.0], [10, 10])


# ODM.


def test_exp3_starts_uniform():
    rule = ODM([5.0] + [1.0] * 305)
    for step in range(50):
        assert rule.weights(step) == pytest.approx(np.full(306, 1 / 306), abs=1e-9)
        report(rule, step, np.linspace(1, 5, 306), np.full(306, 100))
    assert ODM([3, 1], warmup=10).weights(0).tolist() == [0.75, 0.25]


def test_exp3_by_its_formula():
    rule = ODM([1, 1])
    p, reward, rate = np.full(2, 0.5), np.zeros(2), 0.5
    for step in range(40):
        loss = np.array([2.0 + step % 3, 1.0])
        report(rule, step, loss, [10, 20])
        reward += loss / 10 / p
        before, rate = rate, min(0.5, math.sqrt(math.log(2) / (2 * (step + 1))))
        share = np.exp(before * reward) / np.exp(before * reward).sum()
        p = (1 - 2 * rate) * share + rate
        assert rule.weights(step + 1) == pytest.approx(p, abs=1e-9)


@pytest.mark.parametrize("smoothing", [None, 0.9])
def test_odm_moves_to_the_source_with_the_higher_loss(smoothing):
    rule = ODM([1, 1], smoothing=smoothing)
    for step in range(300):
        report(rule, step, [1.0 + 3.0 / (1 + step), 4.0], [100, 100])
    assert rule.weights(300)[1] > 0.6
    floored = ODM([3, 1], smoothing=smoothing, floor=0.5)
    for step in range(300):
        report(floored, step, [1.0, 4.0], [100, 100])
    assert floored.weights(300)[0] >= 0.375


def test_the_importance_weight_is_that_of_the_reported_mixture():
    rule = ODM([9, 1], warmup=1, lag=4)
    for step in range(4):
        report(rule, step, [2.0, 4.0], [10, 10])
    used, now = rule.weights(4), None
    for step in range(4, 7):
        report(rule, step, [2.0, 4.0], [10, 10])
    now = rule.weights(7)
    assert used.tolist() != now.tolist()
    before = np.array(rule.state_dict()["reward"])
    report(rule, 7, [2.0, 4.0], [10, 10], version=4)
    gained = np.array(rule.state_dict()["reward"]) - before
    assert gained == pytest.approx(np.array([0.2, 0.4]) / used, rel=1e-9)


def test_huge_losses_do_not_overflow():
    for rule in (ODM([1, 1], smoothing=0.5), ODM([1, 1]), DoReMi([1, 1], eps=0.0)):
        for step in range(200):
            report(rule, step, [1e6, 1.0], [1, 1], reference=np.zeros(2))
        weights = rule.weights(200)
        assert np.isfinite(weights).all() and weights.sum() == 1.0 and weights[1] > 0


# ADO.


def power_law(n, floor, factor, alpha):
    return floor + factor / n**alpha


def test_planted_exponents_are_found():
    n = np.geomspace(5e8, 1e11, 30)
    alpha = np.array([0.1, 0.2, 0.3, 0.5, 0.7])
    losses = power_law(n[:, None], np.array([1.0, 1.8, 2.2, 0.6, 2.0]), np.array([20, 60, 900, 8e3, 4e5]), alpha)
    assert fit_power_laws(n, losses, np.ones(30))[:, 2] == pytest.approx(alpha, abs=1e-4)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.002, losses.shape))
    assert fit_power_laws(n, losses * noise, np.ones(30))[:, 2] == pytest.approx(alpha, abs=0.03)
    losses[::2, 1] = math.nan
    losses[3:, 2] = math.nan
    found = fit_power_laws(n, losses, np.ones(30))
    assert found[1, 2] == pytest.approx(0.2, abs=1e-4) and np.isnan(found[2]).all()


def test_ado_recovers_laws_and_prefers_what_still_falls():
    rule = ADO([1, 1, 1], first_fit=400, refit_every=200, ignore=20)
    laws = np.array([[1.0, 400.0, 0.5], [2.0, 60.0, 0.3], [3.0, 1.0, 0.2]])
    for step in range(800):
        tokens = np.array([4000, 5000, 3000])
        losses = power_law((step + 1) * 12000.0, *laws.T)
        if step < 399:
            assert rule.weights(step) == pytest.approx([1 / 3] * 3)
        report(rule, step, losses, tokens)
    assert rule.laws[:, 2] == pytest.approx(laws[:, 2], abs=0.02)
    falling = laws[:, 1] * laws[:, 2] / (800 * 12000.0) ** laws[:, 2]
    weights = rule.weights(800)
    assert np.argmax(weights) == np.argmax(falling) and np.argmin(weights) == np.argmin(falling)
    assert weights.min() >= 0.01


def test_ado_keeps_a_bounded_history_and_learns_over_hundreds_of_sources():
    rule = ADO(np.ones(306), first_fit=40, refit_every=1000, ignore=0, points=16)
    alpha = np.linspace(0.1, 0.6, 306)
    for step in range(45):
        report(rule, step, 1 + (1e4 / ((step + 1) * 306e2)) ** alpha, np.full(306, 100))
        assert len(rule.state_dict()["at"]) < 16
    assert rule.weights(45).min() > 1e-3
    assert rule.weights(45).max() > 1.02 / 306


# Skill-It.


def test_skill_it_follows_the_graph_by_its_formula():
    graph = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 1.0]]
    rule = SkillIt([1, 1, 1], graph, eta=0.5, window=2)
    losses = [[1.0, 3.0, 1.0], [1.0, 2.0, 1.0], [1.0, 2.5, 0.5]]
    for step, loss in enumerate(losses):
        report(rule, step, loss, [10, 10, 10])
    raw = np.exp(0.5 * np.array(graph) @ np.array(losses[1:]).sum(axis=0))
    assert rule.weights(3) == pytest.approx(raw / raw.sum(), abs=1e-11)
    assert rule.weights(3)[2] > rule.weights(3)[0], "the source that teaches the hard one is raised"


def test_skill_it_waits_for_validation_losses():
    rule = SkillIt([1, 1], np.eye(2), eta=1.0, metric="validation", normalise=True)
    report(rule, 0, [5.0, 1.0], [10, 10])
    assert rule.weights(1).tolist() == [0.5, 0.5]
    report(rule, 1, [5.0, 1.0], [10, 10], validation=np.array([4.0, 2.0]))
    assert rule.weights(2).tolist() == [0.5, 0.5], "relative to its first loss every source is at 1"
    report(rule, 2, [5.0, 1.0], [10, 10], validation=np.array([2.0, math.nan]))
    raw = np.exp([1.5, 2.0])
    assert rule.weights(3) == pytest.approx(raw / raw.sum(), abs=1e-11)


# Functions and the factory.


def test_a_function_sees_the_metrics_in_force():
    seen = []

    def function(step, metrics):
        seen.append((step, metrics))
        return [1.0, metrics.get("loss/b", 1.0)]

    rule = FunctionRule(function, [1, 1], ["a", "b"])
    assert rule.weights(3).tolist() == [0.5, 0.5]
    report(rule, 0, [2.0, 3.0], [10, 10], reference=np.array([1.0, math.nan]))
    assert rule.weights(4).tolist() == [0.25, 0.75]
    rule.observe_metrics(1, {"loss/b": 1.0, "grad_norm": 0.3})
    rule.observe_metrics(1, {"loss/b": 9.0})
    assert rule.weights(5).tolist() == [0.5, 0.5] and rule.version == 2
    assert seen == [
        (3, {}),
        (4, {"loss/a": 2.0, "loss/b": 3.0, "reference/a": 1.0}),
        (5, {"loss/b": 1.0, "grad_norm": 0.3}),
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "returned"),
        ("ab", "returned"),
        (3, "returned"),
        ({"c": 1.0}, "gave 'c' a weight"),
        ({"a": -1.0}, "nothing could be drawn"),
        ([0.0, 0.0], "nothing could be drawn"),
        ([math.nan, 1.0], "nothing could be drawn"),
    ],
)
def test_bad_answers_of_a_function_are_explained(answer, message):
    with pytest.raises(SpecError, match=message):
        FunctionRule(lambda step, metrics: answer, [1, 1], ["a", "b"]).weights(0)
    with pytest.raises(PlanError, match="failed at step 0 with KeyError"):
        FunctionRule(lambda step, metrics: metrics["loss/a"], [1, 1], ["a", "b"]).weights(0)
    with pytest.raises(SpecError, match="'x' of step 0 is nan"):
        FunctionRule(lambda step, metrics: None, [1, 1], ["a", "b"]).observe_metrics(0, {"x": math.nan})


def test_rules_are_made_by_name():
    assert set(RULES) == {"doremi", "odm", "ado", "skill_it", "function"}
    graph = {"a": {"a": 1.0, "b": 0.5}}
    rule = make_rule("skill_it", ["a", "b"], {"a": 1, "b": 1}, {"graph": graph, "eta": 1.0}, 16)
    report(rule, 0, [1.0, 2.0], [1, 1])
    assert rule.weights(1)[0] == pytest.approx(1 / (1 + math.exp(-2.0)), abs=1e-11)


@pytest.mark.parametrize(
    ("kind", "prior", "options", "message"),
    [
        ("magic", {}, {}, "no learning rule 'magic'"),
        ("odm", {"c": 1}, {}, "names 'c', which is no source"),
        ("odm", {"a": 0.0}, {}, "nothing could be drawn"),
        ("odm", {"a": math.inf}, {}, "nothing could be drawn"),
        ("odm", {}, {"eta": 1.0}, "no option 'eta'"),
        ("skill_it", {}, {"graph": [[1, 0], [0, 1]], "update_every": 0}, "update_every is 0"),
        ("odm", {}, {"floor": 2.0}, "floor is 2.0"),
        ("doremi", {}, {"eta": math.nan}, "eta is nan"),
        ("skill_it", {}, {}, "needs the option 'graph'"),
        ("skill_it", {}, {"graph": [[1.0]]}, "must be 2 x 2"),
        ("skill_it", {}, {"graph": {"a": {"z": 1.0}}}, "graph of skill_it names 'z'"),
        ("ado", {}, {"points": 3}, "points is 3"),
    ],
)
def test_bad_options_are_explained(kind, prior, options, message):
    with pytest.raises(SpecError, match=message):
        make_rule(kind, ["a", "b"], prior, options, 16)


# Portable mathematics.


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=50))
def test_exp_and_log_are_accurate(values):
    assert learner.exp(values) == pytest.approx(np.exp(values), rel=1e-15)
    positive = np.abs(values) + 1e-300
    assert learner.log(positive) == pytest.approx(np.log(positive), rel=1e-15, abs=1e-300)


def plain_exp(x):
    k = float(round(x * learner._INVERSE_LN2))
    rest = (x - k * learner._LN2_HIGH) - k * learner._LN2_LOW
    total = learner._EXP_TERMS[-1]
    for term in learner._EXP_TERMS[-2::-1]:
        total = total * rest + term
    return math.ldexp(total, int(k))


def test_vectors_are_computed_like_single_numbers():
    # A processor that joins multiplication and addition, or that sums in another order, would show here.
    x = np.arange(-5000, 5001) * 0.06
    assert learner.exp(x).tolist() == [plain_exp(v) for v in x.tolist()]
    positive = learner.exp(x)
    assert learner.log(positive).tolist() == [float(learner.log(v)) for v in positive.tolist()]


def test_the_same_bits_everywhere():
    # Taken once; another processor or library must not change them.
    x = np.arange(-500, 501) * 0.06
    assert int(learner.exp(x).view(np.int64).sum() & 0xFFFFFFFF) == 2118822975
    assert int(learner.log(learner.exp(x)).view(np.int64).sum() & 0xFFFFFFFF) == 1546188002
    n = np.arange(1.0, 21.0)
    law = fit_power_laws(n, (1 + 2 / np.sqrt(n) + n % 3 / 50)[:, None], np.ones(20))
    assert law[0].tolist() == [0.02261395084, 0.6921489788, 0.5014539473]
    rule = rule_of("odm")
    for step in range(40):
        report(rule, step, [1.0, 2.0 + step % 5, 3.0, 0.0], [10, 20, 30, 0])
    assert (rule.weights(40) * 2**40).astype(int).tolist() == [204867963017, 509747062939, 384896601820, 0]
