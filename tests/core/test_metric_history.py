"""The history of metrics: bounded however long a run is, exact in what it sums up, and detailed where it is recent."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.core.metric_history import MOST_POINTS, MetricHistory, Series

values = st.floats(-1e6, 1e6, width=32)


@given(st.lists(values, min_size=1, max_size=400), st.integers(4, 64))
def test_a_series_is_bounded_and_joins_only_neighbours(numbers, capacity):
    series = Series()
    for step, value in enumerate(numbers):
        series.add(step, value, capacity=capacity)
        assert len(series) <= capacity
    steps, counts, means, lows, highs = series.columns.values()
    assert sum(counts) == len(numbers)
    assert series.newest[0] == len(numbers) - 1
    bounds = [*steps, len(numbers)]
    for at, (begin, end) in enumerate(itertools.pairwise(bounds)):
        joined = numbers[begin:end]
        assert counts[at] == len(joined)
        assert (lows[at], highs[at]) == (min(joined), max(joined))
        assert means[at] == pytest.approx(math.fsum(joined) / len(joined), rel=1e-9, abs=1e-6)


@given(st.permutations(range(40)))
def test_steps_may_come_in_any_order(order):
    series = Series()
    for step in order:
        series.add(step, float(step))
    assert series.columns["step"].tolist() == list(range(40)) == series.columns["mean"].tolist()


def test_detail_falls_with_age_and_no_era_is_lost():
    series = Series()
    for step in range(100_000):
        series.add(step, 0.0, capacity=275)
    steps = series.columns["step"].tolist()
    assert steps[0] == 0
    assert steps[-10:] == list(range(99_990, 100_000))
    for begin, end in itertools.pairwise(steps):
        assert end - begin <= 1 + (100_000 - begin) / 6, "a point is a fraction of its age wide"
    assert sum(step < 50_000 for step in steps) >= 8


@given(st.lists(st.dictionaries(st.sampled_from("abcdefgh"), values, max_size=6), max_size=80), st.integers(0, 90))
def test_it_is_the_same_after_a_store_and_goes_back(reports, back):
    history = MetricHistory(most_names=5, most_points=64)
    for step, metrics in enumerate(reports):
        history.add(step, metrics)
        assert sum(len(history[name]) for name in history) <= 64
    assert len(history) <= 5
    kept = sum(sum(history[name].columns["count"]) for name in history)
    assert kept + history.left_out == sum(map(len, reports))
    again = MetricHistory.from_json(history.to_json())
    assert again.points() == history.points()
    again.forget_from(back)
    assert again.last_step() < max(back, 1) if back else again.last_step() == -1


def test_two_hundred_names_over_100_000_steps_take_less_than_2_mb():
    history = MetricHistory()
    names = [f"loss/source-{number}" for number in range(300)]
    history.add(0, dict.fromkeys(names, 1.0))
    assert (len(history), history.left_out) == (200, 100)
    for step in range(1, 100_000):  # every name would take a minute: those of one series are as many
        history.add(step, {names[0]: 1.0})
    assert len(history[names[0]]) <= MOST_POINTS // 200
    assert 200 * history[names[0]].nbytes <= 2_000_000
    assert 200 * sum(sys.getsizeof(column) for column in history[names[0]].columns.values()) <= 2_100_000


@pytest.mark.parametrize(
    "damaged", [None, [], {}, {"columns": ["step:q"], "series": {}, "left_out": 0}, "packed", "cut", "uneven"], ids=str
)
def test_a_damaged_history_is_empty(damaged):
    history = MetricHistory()
    history.add(3, {"loss": 1.0})
    whole = history.to_json()
    if damaged == "packed":
        damaged = {**whole, "series": {"loss": ["?"] * 5}}
    elif damaged == "cut":
        damaged = {**whole, "series": {"loss": whole["series"]["loss"][:-1]}}
    elif damaged == "uneven":
        damaged = {**whole, "series": {"loss": ["", *whole["series"]["loss"][1:]]}}
    assert len(MetricHistory.from_json(damaged)) == 0
