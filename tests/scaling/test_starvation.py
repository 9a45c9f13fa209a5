"""Starvation: the source that is waited for is named, with what it needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlord.scaling.autoscaler import Waited, find_bottleneck


def waited(source: str, waited_s: float, demand: float = 1.0, workers: int = 1) -> Waited:
    return Waited(source=source, waited_s=waited_s, demand=demand, workers=workers)


def test_the_source_that_is_waited_for_most_is_named():
    found = find_bottleneck([waited("a", 1.0), waited("b", 4.0, 7.5, 3), waited("c", 0.0)], 10.0, 0.4)
    assert str(found) == "source 'b' is the bottleneck: it has 3 workers and needs 9"
    assert found is not None and found.waited == 0.4


def test_a_demand_that_is_underestimated_is_seen_by_the_wait():
    found = find_bottleneck([waited("a", 7.5, demand=0.5, workers=2)], 10.0, 0.7)
    assert found is not None and found.needs == 8


def test_no_bottleneck_where_trainers_do_not_wait():
    assert find_bottleneck([waited("a", 5.0)], 10.0, 0.0) is None


def test_no_source_is_named_where_more_workers_would_not_help():
    slow = [waited("a", 9.0, demand=4.0)]
    assert find_bottleneck(slow, 10.0, 0.9, spare_cpus=0.0) is None
    crowded, roomy = (find_bottleneck(slow, 10.0, 0.9, spare_cpus=cpus) for cpus in (2.5, 100.0))
    assert crowded is not None and roomy is not None and (crowded.needs, roomy.needs) == (3, 10)


def test_workers_that_wait_for_storage_share_a_cpu():
    slow = Waited(source="a", waited_s=9.0, demand=1.0, workers=1, cpu_share=0.1)
    found = find_bottleneck([slow], 10.0, 0.9, spare_cpus=0.5)
    assert found is not None and found.needs == 6


def test_no_source_is_blamed_where_none_was_waited_for():
    assert find_bottleneck([waited("a", 0.0), waited("b", 0.01)], 10.0, 0.9) is None
    assert find_bottleneck([], 10.0, 0.9) is None


@given(st.floats(0.2, 30), st.floats(0, 100), st.integers(0, 40))
def test_what_it_needs_is_more_than_it_has_and_finite(waited_s, demand, workers):
    found = find_bottleneck([waited("a", waited_s, demand, workers)], 10.0, 0.5)
    assert found is not None
    assert workers < found.needs <= max(10 * max(workers, 1) + 1, 1.2 * demand + 1)
    assert found.needs >= demand
