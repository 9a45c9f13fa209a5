"""Auto-partition: the paper's rule, bounds and budgets that hold for all, and errors that name what is missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.scaling.partition import Partition, cluster_sources, levels, partition
from overlord.scaling.profiles import Resources, SourceCost

MB, GB = 1 << 20, 1 << 30


def cost(name: str, ms: float, **more) -> SourceCost:
    return SourceCost(name=name, transform_s=ms / 1000, **more)


def plenty(cpus: float, **more) -> Resources:
    return Resources(cpus=cpus + 2, bytes=1 << 50, **more)


def figure_5(count: int = 306) -> list[SourceCost]:
    """Costs over three orders of magnitude, as the paper's figure 5 has them."""
    return [
        cost(f"s{n:03d}", float(ms), file_bytes=4 * MB, buffer_bytes=4 * MB)
        for n, ms in enumerate(np.logspace(-0.5, 2.5, count))
    ]


def feed_of(found: Partition, costs: list[SourceCost], shares: list[float]) -> float:
    """What the workers deliver, by the model that the docstring states."""
    total = sum(shares)
    rates = [n / (c.transform_s * s / total) for n, c, s in zip(found.workers, costs, shares, strict=True) if s]
    handover = sum(s / total * c.handover_s for c, s in zip(costs, shares, strict=True))
    return min([*rates, 1 / handover if handover else float("inf")])


# the paper's rule


def test_clusters_are_cut_from_the_dearest_down():
    costs = [cost(f"s{ms}", ms) for ms in (1, 9, 5, 3, 7, 8, 2, 6, 4)]
    assert cluster_sources(costs) == [2, 0, 1, 1, 0, 0, 1, 0, 1]


def test_levels_of_equal_shares_are_the_papers_ratio_of_cluster_means():
    costs = [cost(f"s{n}", ms) for n, ms in enumerate((50, 40, 40, 30, 16, 14, 12, 6, 5, 3, 1, 1))]
    means = [40, 12, 2.5]
    assert levels(costs, [1 / 12] * 12) == pytest.approx([means[n // 4] / means[2] for n in range(12)])


def test_equal_shares_give_the_papers_workers():
    costs = [cost(f"i{n}", 40) for n in range(4)] + [cost(f"t{n}", 10) for n in range(4)]
    found = partition(costs, [1.0] * 8, plenty(20))
    assert found.workers == (4, 4, 4, 4, 1, 1, 1, 1)
    assert [one.level for one in found.allotments] == [4, 4, 4, 4, 1, 1, 1, 1]
    assert found.samples_per_s == pytest.approx(8 / 0.01)
    assert found.cpus == pytest.approx(22)
    assert found.block_cpus == pytest.approx(1.0)


def test_a_source_that_is_drawn_less_gets_less():
    costs = [cost("often", 10), cost("seldom", 10)]
    assert partition(costs, [3, 1], plenty(8)).workers == (6, 2)


GOLDEN = {
    1: ((8, 6, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1), 1200, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    2: ((7, 6, 5, 4, 3, 3, 2, 1, 1, 1, 1, 1), 1029, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
    3: ((7, 5, 5, 4, 3, 3, 1, 1, 1, 1, 1, 1), 947, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
    4: ((7, 6, 5, 5, 3, 2, 2, 1, 1, 1, 1, 1), 1043, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
    6: ((7, 6, 5, 4, 4, 2, 2, 1, 1, 1, 1, 1), 1029, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]),
    12: ((7, 6, 5, 4, 3, 3, 2, 1, 1, 1, 1, 1), 1050, [0] * 12),
    40: ((7, 6, 5, 4, 3, 3, 2, 1, 1, 1, 1, 1), 1050, [0] * 12),
}


@pytest.mark.parametrize("size", GOLDEN)
def test_golden_fleets_by_the_size_of_a_cluster(size):
    workers, rate, clusters = GOLDEN[size]
    costs = [cost(f"s{n}", ms) for n, ms in enumerate((80, 60, 50, 40, 30, 20, 12, 8, 4, 2, 1, 0.5))]
    found = partition(costs, [1.0] * 12, plenty(32), cluster_size=size)
    assert found.workers == workers and round(found.samples_per_s) == rate
    assert [one.cluster for one in found.allotments] == clusters
    assert found.samples_per_s <= feed_of(found, costs, [1.0] * 12) * (1 + 1e-9)


def test_a_cluster_gives_sources_that_cost_about_the_same_alike():
    """Figures of few samples differ by chance; sources far from the mean have what they need themselves."""
    costs = [cost(name, ms) for name, ms in (("a", 45), ("b", 40), ("c", 36), ("d", 3))]
    alone, together = (partition(costs, [1.0] * 4, plenty(40), cluster_size=size) for size in (1, 4))
    assert alone.workers == (14, 13, 12, 1) == together.workers
    near = [cost(name, ms) for name, ms in (("a", 45), ("b", 40), ("c", 36), ("d", 31))]
    alone, together = (partition(near, [1.0] * 4, plenty(40), cluster_size=size) for size in (1, 4))
    assert alone.workers == (12, 11, 9, 8) and together.workers == (11, 10, 9, 9)


# bounds of a launch


def test_workers_of_all_sources_are_bounded_whatever_they_wait_for():
    remote = [cost("a", 100, cpu_share=0.01), cost("b", 100, cpu_share=0.01)]
    found = partition(remote, [1, 1], plenty(32, workers=10.0))
    assert found.workers == (5, 5) and "does not fit the 10 workers of all sources" in found.limit


def test_decoding_behind_the_hand_over_is_counted():
    photos = cost("photos", 10, decode_s=0.02)
    assert partition([photos], [1], plenty(8)).samples_per_s == pytest.approx(800)
    bounded = partition([photos], [1], plenty(8, decoders=4.0))
    assert bounded.samples_per_s == pytest.approx(200) and bounded.workers == (2,)
    shared = partition([photos], [1], plenty(8, decoders=8.0, one_host=True))
    assert shared.samples_per_s < 8 / 0.03 and shared.cpus <= 10 + 1e-6
    with pytest.raises(SpecError, match=r"20 threads busy with decoding.*At most 200"):
        partition([photos], [1], plenty(16, decoders=4.0), samples_per_s=1000)


def test_a_source_that_cannot_be_divided_has_one_actor():
    costs = [cost("video", 100), cost("web", 20)]
    found = partition(costs, [1, 1], plenty(16, per_actor=4), most_actors={"video": 1})
    assert [one.workers_per_actor for one in found.allotments] == [(4,), (1,)]
    assert "it can be divided over 1 actor" in found.limit


# the three parallelisms


def test_more_workers_than_an_actor_may_have_are_data_parallel():
    found = partition([cost("video", 100)], [1], plenty(11, per_actor=4))
    (one,) = found.allotments
    assert (one.parallelism, one.workers, one.workers_per_actor) == ("data", 11, (4, 4, 3))
    assert one.actors == (0, 1, 2)
    assert "more than the 4 that one actor may have" in one.why


def test_workers_of_one_actor_are_worker_parallel():
    (one,) = partition([cost("video", 100)], [1], plenty(8)).allotments
    assert (one.parallelism, one.workers_per_actor) == ("worker", (8,))
    assert "an actor of its own" in one.why


def test_tiny_sources_share_an_actor():
    costs = [cost("video", 100), cost("a", 0.1), cost("b", 0.1)]
    video, a, b = partition(costs, [1, 1, 1], plenty(8)).allotments
    assert (video.parallelism, a.parallelism, b.parallelism) == ("worker", "source", "source")
    assert a.actors == b.actors != video.actors
    assert "takes turns with 1 other source" in a.why


def test_a_tiny_source_alone_is_taken_in_by_another():
    video, text = partition([cost("video", 100), cost("text", 0.1)], [1, 1], plenty(8, per_actor=5)).allotments
    assert video.workers_per_actor == (4, 3)
    assert text.actors == (1,)


def test_an_actor_with_little_memory_holds_fewer_workers():
    costs = [cost("video", 100, file_bytes=20 * MB, buffer_bytes=30 * MB)]
    (one,) = partition(costs, [1], plenty(8, bytes_per_actor=64 * MB + 110 * MB)).allotments
    assert (one.parallelism, one.workers_per_actor) == ("data", (3, 3, 2))
    assert "has memory for" in one.why


def test_sources_are_spread_where_an_actor_could_not_hold_their_files():
    costs = [cost("video", 100)] + [cost(f"t{n}", 0.001, file_bytes=30 * MB) for n in range(10)]
    found = partition(costs, [1] * 11, plenty(4, bytes_per_actor=64 * MB + 100 * MB))
    assert all(actor.bytes <= 164 * MB for actor in found.actors)
    assert len([actor for actor in found.actors if len(actor.sources) > 1]) == 4


# hundreds of sources


def test_306_sources_fit_16_cpus_and_few_processes():
    costs = figure_5()
    found = partition(costs, [1 / 306] * 306, Resources(cpus=16, bytes=8 * GB))
    assert len(found.actors) <= 14
    assert found.cpus <= 16
    # No fleet of 14 CPUs can do more work than 14 seconds a second.
    bound = 14 / np.mean([one.transform_s for one in costs])
    assert 0.75 * bound < found.samples_per_s <= bound * (1 + 1e-6)


def test_short_memory_puts_more_sources_into_one_actor_before_it_slows_the_feed():
    costs = [cost(f"s{n}", 10) for n in range(8)]
    wide = partition(costs, [1] * 8, plenty(8))
    tight = partition(costs, [1] * 8, Resources(cpus=10, bytes=wide.bytes - 4 * 64 * MB))
    assert len(tight.actors) < len(wide.actors) == 8
    assert tight.samples_per_s == pytest.approx(wide.samples_per_s)


# rates asked for


def test_the_smallest_fleet_that_reaches_a_rate_with_headroom():
    found = partition([cost("a", 10), cost("b", 1)], [1, 1], plenty(32), samples_per_s=1000)
    assert found.samples_per_s == pytest.approx(1200)
    assert found.workers == (6, 1)
    assert "asked for" in found.limit


def test_less_headroom_than_wished_for_is_no_error():
    found = partition([cost("a", 10)], [1], plenty(11), samples_per_s=1000)
    assert found.workers == (11,)


def test_work_that_waits_is_bounded_by_workers_not_by_cpus():
    remote = cost("remote", 100, cpu_share=0.05)
    found = partition([remote], [1], plenty(1, per_source=64))
    assert found.workers == (20,)
    assert found.allotments[0].cpus == pytest.approx(1)
    assert "20 workers busy, 5 % of the time with a CPU (1 in all)" in found.allotments[0].why


def test_the_limit_names_the_source_that_needs_cpus_not_one_that_waits():
    costs = [cost("remote", 100, cpu_share=0.01), cost("video", 50)]
    with pytest.raises(SpecError, match="source 'video' alone needs 10 workers"):
        partition(costs, [1, 1], plenty(8, per_source=64), samples_per_s=400, cluster_size=1)


def test_a_source_that_only_waits_is_not_limited_by_cpus():
    costs = [cost("remote", 20, cpu_share=0.02), cost("local", 2)]
    assert "one more worker for 'local' does not fit the 4 CPUs" in partition(costs, [1, 1], plenty(2)).limit
    assert "a whole worker for 'local' does not fit the 3 CPUs" in partition(costs, [1, 1], plenty(1)).limit


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(1, 40))
def test_less_need_of_a_cpu_never_slows_the_feed(one: float, other: float, cpus: float):
    less, more = sorted((one, other))
    quick, slow = (
        partition([cost("a", 20, cpu_share=part), cost("b", 4)], [1, 1], plenty(cpus)) for part in (less, more)
    )
    assert quick.samples_per_s >= slow.samples_per_s * (1 - 1e-9)
    for found in (quick, slow):
        assert sum(one.cpus for one in found.allotments) <= cpus + 1e-6
        assert found.samples_per_s <= feed_of(found, [cost("a", 20), cost("b", 4)], [1, 1]) * (1 + 1e-6)


def test_the_hand_over_bounds_the_rate():
    found = partition([cost("a", 1, handover_s=0.002)], [1], plenty(16))
    assert found.samples_per_s == pytest.approx(500)
    assert "handing over" in found.limit


def test_a_source_that_is_not_drawn_is_held_all_the_same():
    found = partition([cost("a", 1), cost("b", 1)], [1, 0], plenty(4))
    assert found.workers == (4, 1)
    assert "not drawn" in found.allotments[1].why


# what cannot be had


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"resources": Resources(cpus=1.5, bytes=GB)}, "at least 1.5 more are needed"),
        ({"resources": Resources(cpus=8, bytes=GB // 2)}, "'video' takes most"),
        ({"resources": plenty(8), "samples_per_s": 1000}, "'video' .* 34 are missing.* At most"),
        ({"resources": plenty(8), "samples_per_s": 200}, "2.2 are missing; source 'video' alone needs 10 workers"),
        (
            {"resources": Resources(cpus=32, bytes=900 * MB, per_source=20), "samples_per_s": 200},
            "MB are missing.*At most",
        ),
        ({"resources": plenty(8, bytes_per_actor=70 * MB)}, "'video' needs .* in an actor with one worker"),
        ({"resources": plenty(8), "samples_per_s": 0}, "samples_per_s is 0"),
        ({"resources": plenty(8, per_actor=0)}, "per_actor is 0"),
        ({"resources": plenty(8), "shares": [0, 0]}, "no source has a share"),
        ({"resources": plenty(8), "shares": [1, float("nan")]}, "the share of source 'web'"),
    ],
)
def test_what_is_missing_is_named(more, words):
    costs = [cost("video", 100, file_bytes=10 * MB, buffer_bytes=50 * MB), cost("web", 2, file_bytes=MB)]
    with pytest.raises(SpecError, match=words):
        partition(costs, more.pop("shares", [1, 1]), more.pop("resources"), **more)


# what holds for all

sources = st.lists(
    st.tuples(st.floats(1e-5, 1.0), st.floats(0.0, 1.0), st.integers(0, 64 * MB), st.integers(0, 64 * MB)),
    min_size=1,
    max_size=40,
)


def built(drawn) -> tuple[list[SourceCost], list[float]]:
    costs = [
        SourceCost(name=f"s{n}", transform_s=p, file_bytes=files, buffer_bytes=buffer)
        for n, (p, _, files, buffer) in enumerate(drawn)
    ]
    shares = [share if share > 1e-3 else 0.0 for _, share, _, _ in drawn]
    return costs, shares if sum(shares) else [1.0] * len(shares)


@given(sources, st.integers(3, 70), st.integers(1, 40), st.integers(1, 20), st.integers(1, 12))
def test_budgets_and_bounds_hold(drawn, cpus, gigabytes, per_source, per_actor):
    costs, shares = built(drawn)
    resources = Resources(cpus=cpus, bytes=gigabytes * GB, per_source=per_source, per_actor=per_actor)
    try:
        found = partition(costs, shares, resources)
    except SpecError as error:
        assert "missing" in str(error)
        return
    assert found.cpus <= cpus + 1e-6
    assert found.bytes <= resources.bytes
    assert sum(actor.workers for actor in found.actors) >= 1
    assert all(1 <= one.workers <= per_source for one in found.allotments)
    assert all(actor.workers <= per_actor for actor in found.actors)
    for one in found.allotments:
        assert len(one.actors) == len(set(one.actors)) == len(one.workers_per_actor) >= 1
        assert sum(one.workers_per_actor) == one.workers
        assert min(one.workers_per_actor) >= 1
        for actor, there in zip(one.actors, one.workers_per_actor, strict=True):
            held = found.actors[actor]
            assert dict(zip(held.sources, held.source_workers, strict=True))[one.name] == there
    assert sum(actor.cpus for actor in found.actors) == pytest.approx(sum(one.cpus for one in found.allotments))
    # What it promises is what its workers deliver.
    assert found.samples_per_s <= feed_of(found, costs, shares) * (1 + 1e-6)
    whole = [one.workers for one in found.allotments if one.busy >= 0.5]
    assert sum(whole) <= cpus - 2 + 1e-6


@given(sources, st.integers(3, 60), st.integers(1, 10), st.integers(2, 30))
def test_more_is_never_slower(drawn, cpus, more, gigabytes):
    costs, shares = built(drawn)
    rates = []
    for given_cpus, given_bytes in ((cpus, gigabytes), (cpus + more, gigabytes), (cpus + more, gigabytes + more)):
        try:
            rates.append(partition(costs, shares, Resources(cpus=given_cpus, bytes=given_bytes * GB)).samples_per_s)
        except SpecError:
            rates.append(0.0)
    assert rates[0] <= rates[1] * (1 + 1e-9) <= rates[2] * (1 + 2e-9)


@given(sources, st.floats(0.1, 0.99))
def test_a_rate_that_can_be_had_is_reached(drawn, part):
    costs, shares = built(drawn)
    resources = plenty(32)
    best = partition(costs, shares, resources)
    found = partition(costs, shares, resources, samples_per_s=part * best.samples_per_s)
    assert found.samples_per_s >= part * best.samples_per_s * (1 - 1e-9)
    assert found.cpus <= best.cpus + 1e-6
    assert found.bytes <= best.bytes


@given(sources)
def test_the_same_question_has_the_same_answer(drawn):
    costs, shares = built(drawn)
    assert partition(costs, shares, plenty(16)) == partition(costs, shares, plenty(16))
