"""Mixture-driven scaling: still where nothing moves, in time where something does, within budgets always."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.scaling.autoscaler import Decision, Fleet, Scaling, bytes_used, cpus_used, decide
from overlord.scaling.profiles import SourceCost, demand

RATE = 1000.0
SETTINGS = Scaling()


def costs_of(*ms: float, **more) -> list[SourceCost]:
    return [SourceCost(name=f"s{n}", transform_s=one / 1000, **more) for n, one in enumerate(ms)]


def fleet_of(*workers: int, cpus: int = 1000, most: int = 1 << 50, per_source: int = 1000) -> Fleet:
    return Fleet(workers=workers, samples_per_s=RATE, cpus=cpus, bytes=most, per_source=per_source)


def wandering(costs, luck: np.random.Generator, by: float) -> list[SourceCost]:
    """Costs as they are measured: a few per cent off, each time others."""
    return [dataclasses.replace(c, transform_s=c.transform_s * (1 + luck.uniform(-by, by))) for c in costs]


def simulate(shares, costs, fleet, *, known: bool, by: float = 0.0, settings: Scaling = SETTINGS) -> list[Decision]:
    """Decide once an interval and act at once; `known`: whether the schedule is."""
    luck = np.random.default_rng(0)
    shares = [list(map(float, one)) for one in shares]
    decisions = []
    for now in range(1, len(shares) + 1):
        history = shares[max(0, now - 20) : now]
        coming = shares[now : now + 10] if known else []
        decisions.append(decide(history, coming, wandering(costs, luck, by), fleet, settings))
        fleet = dataclasses.replace(fleet, workers=decisions[-1].workers)
    return decisions


def events(decisions) -> list[int]:
    return [number for number, one in enumerate(decisions) if one.changes]


@given(st.floats(0.0, 1.0), st.integers(3, 40))
def test_a_running_fleet_is_bounded_by_workers_also_where_they_wait(cpu_share: float, cpus: int):
    shares, fleet = [[0.2, 0.5, 0.3]] * 8, fleet_of(1, 1, 1, cpus=cpus)
    waiting, computing = (
        simulate(shares, costs_of(10, 80, 160, cpu_share=part), fleet, known=True) for part in (cpu_share, 1.0)
    )
    assert waiting == computing
    assert sum(waiting[-1].workers) <= cpus


# still


@pytest.mark.parametrize("known", [True, False])
def test_constant_weights_never_cause_an_event(known):
    costs = costs_of(0.3, 0.5, 40, 40, 160)
    shares = [[0.4, 0.3, 0.2, 0.09, 0.01]] * 10_000
    settled = simulate(shares[:10], costs, fleet_of(1, 1, 1, 1, 1), known=known)[-1].workers
    assert settled == (1, 1, 10, 5, 2)
    decisions = simulate(shares, costs, fleet_of(*settled), known=known, by=0.04)
    assert events(decisions) == []


@given(
    st.lists(st.tuples(st.floats(0.1, 200), st.floats(0.01, 1)), min_size=1, max_size=8),
    st.lists(st.integers(0, 60), min_size=8, max_size=8),
    st.booleans(),
)
def test_constant_weights_change_a_source_at_most_once(drawn, workers, known):
    """Whatever there is at first, and though the measured costs wander by 4 %."""
    costs = costs_of(*(ms for ms, _ in drawn))
    total = sum(weight for _, weight in drawn)
    shares = [[weight / total for _, weight in drawn]] * 60
    decisions = simulate(shares, costs, fleet_of(*workers[: len(drawn)]), known=known, by=0.04)
    changed = [change.source for one in decisions for change in one.changes if change.before > 0]
    assert len(changed) == len(set(changed))


def test_too_few_cpus_for_all_are_not_handed_around():
    costs = costs_of(*range(10, 60, 5))
    shares = [[0.1] * 10] * 2000
    fleet = fleet_of(*[1] * 10, cpus=20)
    decisions = simulate(shares, costs, fleet, known=True, by=0.02)
    assert sum(decisions[-1].workers) == 20
    assert events(decisions) == [0]


# in time


@pytest.mark.parametrize("down", [False, True])
def test_an_unscheduled_step_settles_within_window_and_patience(down):
    costs = costs_of(40, 40)
    first, second = ([0.9, 0.1], [0.1, 0.9]) if down else ([0.1, 0.9], [0.9, 0.1])
    shares = [first] * 20 + [second] * 100
    decisions = simulate(shares, costs, fleet_of(5, 44), known=False)
    settled = decisions[20 + SETTINGS.window + SETTINGS.patience - 1].workers
    needed = demand(second, costs, RATE)
    assert all(n >= load for n, load in zip(settled, needed, strict=True))
    assert all(n <= load / SETTINGS.down + 1 for n, load in zip(settled, needed, strict=True))
    assert not events(decisions[20 + SETTINGS.window + SETTINGS.patience :])


def test_one_odd_interval_changes_nothing():
    costs = costs_of(40, 40)
    shares = [[0.5, 0.5]] * 20 + [[0.6, 0.4]] + [[0.5, 0.5]] * 20
    assert events(simulate(shares, costs, fleet_of(24, 24), known=False)) == []


def test_what_is_coming_is_there_before():
    costs = costs_of(0.3, 40)
    shares = [[1.0, 0.0]] * 20 + [[0.5, 0.5]] * 20
    decisions = simulate(shares, costs, fleet_of(1, 0), known=True)
    rise = next(number for number, one in enumerate(decisions) if one.workers[1] >= 20)
    # decisions[n] is made when interval n is over; the share is there in interval 20.
    assert rise == 20 - SETTINGS.lookahead
    assert "the schedule comes to 20 busy workers within 4 intervals" in decisions[rise].changes[0].why
    assert all(one.workers[1] == 24 for one in decisions[rise:])


def test_all_along_a_ramp_there_are_enough():
    costs = costs_of(0.3, 40)
    ramp = [[1 - x, x] for x in np.concatenate([np.zeros(10), np.linspace(0, 0.8, 60), np.linspace(0.8, 0, 60)])]
    decisions = simulate(ramp, costs, fleet_of(1, 0), known=True)
    for number, one in enumerate(decisions[:-1]):
        assert one.workers[1] >= demand(ramp[number + 1], costs, RATE)[1]
    assert len(events(decisions)) < 40


def test_nothing_goes_that_is_needed_again_soon():
    costs = costs_of(40, 40)
    shares = [[0.5, 0.5]] * 10 + [[0.9, 0.1]] * 4 + [[0.5, 0.5]] * 10
    decisions = simulate(shares, costs, fleet_of(24, 24), known=True)
    assert all(one.workers[1] == 24 for one in decisions)


def test_a_source_that_is_not_drawn_and_not_coming_is_drained():
    costs = costs_of(1, 1)
    decisions = simulate([[0.5, 0.5]] * 5 + [[1.0, 0.0]] * 20, costs, fleet_of(1, 1), known=True)
    assert decisions[6].workers == (1, 1)
    assert decisions[-1].workers[1] == 0
    (change,) = [c for one in decisions for c in one.changes if c.source == "s1"]
    assert change.why == "it is not drawn and not coming"


def test_a_drained_source_is_back_before_it_is_drawn():
    costs = costs_of(1, 1)
    decisions = simulate([[1.0, 0.0]] * 10 + [[0.99, 0.01]] * 5, costs, fleet_of(2, 0), known=True)
    assert decisions[9].workers[1] == 1


# within budgets


def test_idle_workers_are_given_back_first():
    costs = costs_of(40, 40)
    decision = decide([[0.2, 0.8]] * 2, [[0.2, 0.8]] * 4, costs, fleet_of(30, 20, cpus=50))
    assert decision.workers == (10, 39)
    assert [change.source for change in decision.changes] == ["s0", "s1"]


def test_the_largest_shortfall_is_filled_first():
    costs = costs_of(40, 40, 20)
    decision = decide([[0.4, 0.4, 0.2]], [[0.4, 0.4, 0.2]], costs, fleet_of(1, 1, 1, cpus=18))
    assert decision.workers == (8, 8, 2)


def test_bytes_bound_what_cpus_would_allow():
    costs = costs_of(40, 40, file_bytes=100, buffer_bytes=10)
    decision = decide([[0.5, 0.5]], [[0.5, 0.5]], costs, fleet_of(1, 1, most=300))
    assert decision.workers == (5, 5)
    assert "there is no more than this" in decision.changes[0].why


def test_what_is_needed_now_comes_before_what_is_needed_later():
    costs = costs_of(40, 40)
    decision = decide([[0.5, 0.1]], [[0.5, 0.1], [0.1, 0.9]], costs, fleet_of(20, 4, cpus=40))
    assert decision.workers[0] >= 20
    assert decision.workers[1] == 40 - decision.workers[0]


def test_hundreds_of_tiny_sources_take_turns():
    costs = costs_of(*[0.3] * 300, 40)
    shares = [0.8 / 300] * 300 + [0.2]
    decision = decide([shares], [shares] * 4, costs, fleet_of(*[1] * 301, cpus=14))
    assert decision.workers[:300] == (1,) * 300
    assert decision.workers[300] == 10


@given(st.data(), st.integers(2, 6), st.integers(4, 40), st.integers(200, 4000), st.integers(1, 20))
def test_budgets_are_never_exceeded(data, sources, cpus, most, per_source):
    weights = st.lists(st.floats(0, 1).map(lambda x: x if x > 0.05 else 0.0), min_size=sources, max_size=sources)
    shares = [
        [w / (sum(one) or 1) for w in one] for one in data.draw(st.lists(weights, min_size=1, max_size=25), "weights")
    ]
    costs = costs_of(*data.draw(st.lists(st.floats(0.1, 200), min_size=sources, max_size=sources), "ms"))
    costs = [dataclasses.replace(one, file_bytes=20, buffer_bytes=10) for one in costs]
    fleet = fleet_of(*[1] * sources, cpus=cpus, most=most, per_source=per_source)
    known = data.draw(st.booleans(), "known")
    for number, one in enumerate(simulate(shares, costs, fleet, known=known)):
        assert all(0 <= n <= per_source for n in one.workers)
        coming = shares[number + 1 : number + 1 + SETTINGS.lookahead] if known else []
        drawn = [any(x[s] > 0 for x in [shares[number], *coming]) for s in range(sources)]
        assert all(n >= 1 for n, here in zip(one.workers, drawn, strict=True) if here)
        # A source's only worker takes the part of a CPU that it keeps busy.
        last = shares[max(0, number + 1 - SETTINGS.window) : number + 1]
        looked_at = (
            [shares[number], *coming] if coming else [[sum(column) / len(last) for column in zip(*last, strict=True)]]
        )
        busy = [max(column) for column in zip(*(demand(x, costs, RATE) for x in looked_at), strict=True)]
        least = [min(n, 1) for n in one.workers]
        assert cpus_used(one.workers, busy) <= max(cpus, cpus_used(least, busy)) + 1e-9
        assert sum(n for n in one.workers if n > 1) <= cpus
        assert bytes_used(one.workers, costs) <= max(most, bytes_used(least, costs))


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 40))
def test_a_fleet_that_is_too_large_shrinks_at_once(first, second, cpus):
    decision = decide([[0.5, 0.5]], [], costs_of(80, 80), fleet_of(first, second, cpus=cpus))
    assert sum(decision.workers) <= cpus


@pytest.mark.parametrize("more", [{"window": 0}, {"patience": 0}, {"lookahead": -1}, {"down": 0.9}, {"headroom": 0.9}])
def test_settings_that_would_flap_are_refused(more):
    with pytest.raises(SpecError):
        Scaling(**more)
