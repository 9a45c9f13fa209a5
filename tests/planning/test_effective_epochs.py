"""What passes over a source are worth, and weights that fall with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.planning.learning.learner import WEIGHT_ONE
from overlord.planning.learning.repetition import (
    DECAY_EPOCHS,
    Repetition,
    effective_epochs,
    epochs_of,
    repetitions,
)


def test_effective_epochs_follow_the_published_formula():
    for epochs in (1.0, 1.5, 2.0, 4.0, 11.3, 16.0, 100.0):
        repeated = epochs - 1
        assert effective_epochs(epochs) == pytest.approx(1 + 15.39 * (1 - math.exp(-repeated / 15.39)), rel=1e-12)
    assert [effective_epochs(epochs) for epochs in (0.0, 0.3, 1.0)] == [0.0, 0.3, 1.0]
    assert effective_epochs(11.3) == pytest.approx(8.51, abs=0.005)
    # At R = R* repeated data is worth 1 - 1/e of as much new data; nothing is ever worth more than 1 + R*.
    assert effective_epochs(1 + DECAY_EPOCHS) == pytest.approx(1 + DECAY_EPOCHS * (1 - 1 / math.e))
    assert effective_epochs(1e9) == pytest.approx(1 + DECAY_EPOCHS)
    assert effective_epochs(3.0, decay_epochs=1e6) == pytest.approx(3.0, rel=1e-5)


@given(st.floats(0, 1e6), st.floats(0, 1e3))
def test_effective_epochs_grow_and_are_worth_at_most_as_much(epochs, more):
    assert effective_epochs(epochs) <= effective_epochs(epochs + more) <= epochs + more


def test_the_value_of_one_more_pass_is_the_weight_of_the_rule():
    for epochs in (1.0, 2.5, 9.0):
        slope = (effective_epochs(epochs + 1e-6) - effective_epochs(epochs)) / 1e-6
        rule = Repetition()
        rule.count(np.array([0.0, epochs - 1]), np.ones(2, bool))
        new, repeated = rule.weights([1, 1])
        assert repeated / new == pytest.approx(slope, rel=1e-5)


def test_repetitions_come_from_the_columns_of_a_state():
    columns = [np.array(column) for column in ([0, 0, 1, 1, 5], [0, 7, 0, 3, 9], [0, 0, 10, 12, 12])]
    assert repetitions(*columns).tolist() == [0.0, 0.0, 0.0, 0.25, 4.75]
    rows = np.stack(columns, axis=1).tolist()
    assert [epochs_of(*row) for row in rows] == [0, 0, 1, 1.25, 5.75]


@given(
    st.lists(st.tuples(st.floats(0, 1e18), st.floats(0, 1e9), st.booleans()), min_size=1, max_size=40),
    st.floats(0.01, 1e6),
)
def test_no_weight_underflows_and_all_sum_to_one(sources, decay):
    prior, repeated, drawn = map(list, zip(*sources, strict=True))
    rule = Repetition(decay)
    rule.count(np.array(repeated), np.array(drawn))
    weights = rule.weights(prior)
    assert [weight > 0 for weight in weights] == [share > 0 for share in prior]
    if any(prior):
        units = [weight * WEIGHT_ONE for weight in weights]
        assert all(unit.is_integer() for unit in units) and sum(units) == WEIGHT_ONE


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 30)), min_size=2, max_size=20), st.floats(1, 100))
def test_weights_are_the_prior_times_the_exponential(sources, decay):
    prior, repeated = (np.array(column) for column in zip(*sources, strict=True))
    rule = Repetition(decay)
    rule.count(repeated, np.ones(len(prior), bool))
    expected = prior * np.exp(-repeated / decay)
    assert rule.weights(prior.tolist()) == pytest.approx(expected / expected.sum(), abs=2e-11)


def test_a_source_that_is_not_drawn_from_displaces_no_other():
    """With a decay of 0.01, a source of 20 repetitions has e^-2000 of the weight of a new one."""
    rule = Repetition(0.01)
    rule.count(np.array([0.0, 20.0, 20.01]), np.array([False, True, True]))
    _, first, second = rule.weights([1, 1, 1])
    assert second / first == pytest.approx(math.exp(-1))
    rule.count(np.array([0.0, 20.0, 20.0]), np.zeros(3, bool))
    assert rule.weights([2, 1, 1]) == [0.5, 0.25, 0.25]


def test_new_sources_and_no_weights():
    rule = Repetition(1.0)
    assert rule.weights([1, 3]) == [0.25, 0.75], "nothing is counted yet"
    rule.count(np.array([1.0]), np.ones(1, bool))
    old, new = rule.weights([1, 1])
    assert old / new == pytest.approx(math.exp(-1))
    assert rule.weights([0, 0]) == [0, 0]


def test_the_same_bits_on_every_machine():
    rule = Repetition(3.7)
    rule.count(np.array([0.1, 2.3, 17.9, 400.0]), np.ones(4, bool))
    assert [int(weight * WEIGHT_ONE) for weight in rule.weights([0.3, 1.0, 2.0, 5.0])] == GOLDEN


GOLDEN = [379985451689, 698902450490, 20623725596, 1]


@pytest.mark.parametrize("decay", [0, -1, 0.001, 1e7, float("nan"), True, "1"])
def test_a_decay_that_cannot_be_is_refused(decay):
    with pytest.raises(SpecError, match="decay_epochs"):
        Repetition(decay)
