"""Mixtures: weights over steps, temperature, and schedules that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.job.mixture_specs import Mixture


def test_static_weights() -> None:
    names = ["a", "b", "c"]
    assert Mixture({"b": 2, "a": 1}).weights_at(7, names, {"c": 9}) == [1.0, 2.0, 0.0]
    assert Mixture().weights_at(7, names, {"a": 1, "b": 0, "c": 3}) == [1.0, 0.0, 3.0]
    assert Mixture().weights_at(7, names, {}) == [1.0, 1.0, 1.0]


def test_schedules() -> None:
    stages = Mixture.stages([(0, {"a": 1}), (10, {"b": 2})], granularity="substep")
    assert [stages.weights_at(p, ["a", "b"], {}) for p in (0, 9.99, 10, 99)] == [
        [1, 0],
        [1, 0],
        [0, 2],
        [0, 2],
    ]
    linear = Mixture.linear({"a": {10: 1.0, 20: 0.0}, "b": {0: 1}})
    assert [linear.weights_at(p, ["a", "b"], {})[0] for p in (0, 10, 12.5, 20, 30)] == [1, 1, 0.75, 0, 0]
    step = Mixture.step({"a": {10: 1.0, 20: 0.5}, "b": {0: 1}})
    assert [step.weights_at(p, ["a"], {})[0] for p in (0, 9.5, 10, 19.9, 20)] == [0, 0, 1, 1, 0.5]
    assert [m.schedule for m in (Mixture(), stages, linear, step)] == ["static", "stages", "linear", "step"]


def test_positions_in_epochs() -> None:
    names, none = ["a", "b", "c"], [False] * 3
    of_one = Mixture.stages([(0, {"a": 1, "b": 1}), (2, {"c": 1})], unit="epoch:b")
    assert [of_one.position(99.5, names, epochs, none, {}) for epochs in ((5, 0, 0), (0, 2, 9))] == [0, 2]
    whole = Mixture.stages([(0, {"a": 1}), (1, {"b": 1}), (3, {"a": 1, "c": 1})], unit="epoch")
    found = [whole.position(7, names, epochs, none, {}) for epochs in ((0, 9, 9), (1, 0, 9), (1, 2, 0), (3, 2, 1))]
    assert found == [0, 1, 3, 4]
    assert whole.position(7, names, (0, 1, 1), [True, False, False], {}) == 2, "an epoch without sources is passed over"
    assert whole.position(7, names, (1, 2, 1), [True, False, False], {}) == 4
    both = Mixture.linear({"a": {0: 1.0, 4: 0.0}, "b": {0: 1}}, unit="epoch")
    assert both.position(7, names, (2, 9, 0), none, {}) == 2
    assert both.position(7, names, (2, 9, 0), [True, False, False], {}) == 9, "what is finished holds nothing up"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"unit": "epochs", "stages": [(0, {"a": 1})]}, ["unit is 'epochs'", '"epoch:web"']),
        ({"unit": "epoch:", "stages": [(0, {"a": 1})]}, ["unit is 'epoch:'"]),
        ({"unit": "epoch", "weights": {"a": 1}}, ["unit", "would have no effect", "Leave it out"]),
        ({"unit": "epoch", "stages": [(0, {"a": 1}), (1.5, {"b": 1})]}, ["1.5", "whole numbers"]),
    ],
)
def test_a_unit_that_cannot_be_is_refused(given: dict[str, object], words: list[str]) -> None:
    with pytest.raises(SpecError) as error:
        Mixture.model_validate(given)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_temperature() -> None:
    assert Mixture(temperature=2).weights_at(0, ["a", "b", "c"], {"a": 9, "b": 4, "c": 0}) == [3.0, 2.0, 0.0]
    sharp = Mixture(temperature=0.01).weights_at(0, ["a", "b"], {"a": 1e15, "b": 1e14})
    assert sharp[0] == 1.0 and sharp[1] == pytest.approx(1e-100)
    tiny = Mixture({"a": 1e-9, "b": 2e-9}, temperature=0.01).weights_at(0, ["a", "b"], {})
    assert tiny[1] == 1.0 and 0 < tiny[0] < 1e-20


@given(
    st.dictionaries(st.integers(0, 100), st.floats(0, 10), min_size=1),
    st.floats(0, 200),
)
def test_weights_are_never_negative_and_stay_between_points(points: dict[int, float], position: float) -> None:
    for build in (Mixture.linear, Mixture.step):
        weights = build({"a": points, "b": {0: 1}}).weights_at(position, ["a", "b"], {})
        assert weights[1] == 1.0 and 0 <= weights[0] <= max(points.values()) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("build", "points", "words"),
    [
        (Mixture.stages, [(5, {"a": 1})], ["stages[0][0] is 5", "first stage must start at step 0"]),
        (Mixture.stages, [(0, {"a": 1}), (0, {"a": 2})], ["stages[1][0] is 0", "starts at 0", "Sort them"]),
        (Mixture.stages, [(0, {"a": 1}), (9, {"a": 0})], ["weights of stage 1 (from step 9) sum to zero"]),
        (Mixture.stages, [], ["stages is []", "at least one stage"]),
        (Mixture.stages, [3], ["stages[0] is 3", "not a stage"]),
        (Mixture.stages, [(0, {"a": -2})], ["stages[0][1].a is -2", "0 or more"]),
        (Mixture.stages, [(-1, {"a": 1})], ["stages[0][0] is -1", "0 or more"]),
        (Mixture.linear, {"a": {0: 1, 8: 0}}, ["linear: the weights at step 8 sum to zero"]),
        (Mixture.linear, {"a": {}}, ["linear.a is {}", "map steps to weights"]),
        (Mixture.linear, {"a": {0: "x"}}, ["linear.a[0] is 'x'", "finite"]),
        (Mixture.step, {"a": {4: 1}}, ["step: the weights at step 0 sum to zero"]),
        (Mixture.step, {"a": {-4: 1}}, ["step.a[-4] is 1", "0 or more"]),
    ],
)
def test_schedules_refused(build: Any, points: Any, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        build(points)
    text = str(caught.value)
    assert text.startswith("Mixture: ")
    for word in words:
        assert word in text
