"""`balance` and `place`: nothing lost, capacities kept, the objectives met, the same answer everywhere."""

from __future__ import annotations

import heapq
import sys

import numpy as np
import pytest
from benchmarks.balance import makespan_bound
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import PlanError, SpecError
from overlord.planning.balancing import methods
from overlord.planning.balancing.balance import balance, place
from overlord.planning.balancing.evenness import lockstep_bound
from overlord.planning.balancing.methods import NO_LIMIT, Queue, fill, loads

METHODS = ("greedy", "karmarkar_karp", "zigzag")
OBJECTIVES = ("sum", "lockstep", "pipeline")
LEVELS = ("interleaved", "inter", "intra")

items = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 100)), max_size=80)


def columns(pairs) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()


def lengths(count: int, most: int = 32768, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(6.5, 1.2, count).clip(16, most).astype(np.int64)


def llm_cost(tokens: np.ndarray) -> np.ndarray:
    return tokens * tokens + 25_400 * tokens


def times(costs, places, num_buckets, num_microbatches, stages=1) -> dict[str, int]:
    load = loads(costs, places, num_buckets * num_microbatches).reshape(num_buckets, num_microbatches)
    return {
        "sum": int(load.sum(axis=1).max()),
        "lockstep": int(load.max(axis=0).sum()),
        "pipeline": int((load.sum(axis=1) + (stages - 1) * load.max(axis=1)).max()),
    }


@given(st.lists(st.integers(0, 10**12), max_size=200), st.integers(1, 20), st.sampled_from(METHODS))
def test_every_item_has_a_bin_and_none_beats_the_bound(costs, num_bins, method):
    bins = balance(costs, num_bins, method)
    assert bins.shape == (len(costs),)
    assert ((bins >= 0) & (bins < num_bins)).all()
    largest = int(loads(np.array(costs, np.int64), bins, num_bins).max())
    assert makespan_bound(costs, num_bins) <= largest <= sum(costs)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30)), min_size=1, max_size=20),
    st.sampled_from([12, 25, NO_LIMIT]),
    st.booleans(),
)
def test_filling_takes_the_least_loaded_bin_and_the_lower_one_of_equals(pairs, begun, limit, by_size):
    costs, sizes = columns(pairs)
    sizes = costs.copy() if by_size else sizes
    load, room = columns(begun)
    queue, heap, free = Queue(costs, sizes), [(int(n), at) for at, n in enumerate(load)], room.tolist()
    placed = fill(*queue.arrays, limit, load, room, queue.bins, 0)
    heapq.heapify(heap)  # the same with the heap of the standard library and a search of all items
    waiting, expected = sorted(range(len(costs)), key=lambda item: (-costs[item], item)), np.full(len(costs), -1)
    while heap and waiting:
        least, chosen = heapq.heappop(heap)
        fits = (item for item in waiting if costs[item] <= limit - least and sizes[item] <= free[chosen])
        item = next(fits, None)
        if item is not None:
            waiting.remove(item)
            expected[item] = chosen
            free[chosen] -= int(sizes[item])
            heapq.heappush(heap, (least + int(costs[item]), chosen))
    assert queue.in_order().tolist() == expected.tolist()
    assert placed == costs[expected >= 0].sum() and room.tolist() == free


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200), st.integers(1, 20))
def test_longest_first_keeps_its_guarantee_and_refining_never_harms(costs, num_bins):
    costs = np.array(costs, np.int64)
    queue, load = Queue(costs, costs * 0), np.zeros(num_bins, np.int64)
    fill(*queue.arrays, NO_LIMIT, load, load.copy(), queue.bins, 0)
    last = int(queue.costs[np.flatnonzero(queue.bins == load.argmax())[-1]])
    assert num_bins * load.max() <= costs.sum() + (num_bins - 1) * last
    assert loads(costs, balance(costs, num_bins), num_bins).max() <= load.max()


@given(items, st.integers(1, 8), st.integers(0, 400), st.sampled_from(METHODS))
def test_capacity_is_kept_or_refused(pairs, num_bins, capacity, method):
    costs, sizes = columns(pairs)
    try:
        bins = balance(costs, num_bins, method, sizes, capacity)
    except SpecError as error:
        assert sizes.max() > capacity and f"a bin holds {capacity}" in str(error)
    except PlanError:
        # Whatever takes half of the room or less is placed.
        assert 2 * sizes.sum() > num_bins * capacity
    else:
        assert len(bins) == len(costs)
        assert len(bins) == 0 or loads(sizes, bins, num_bins).max() <= capacity


@given(
    items,
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(0, 500),
    st.sampled_from(METHODS),
    st.sampled_from(OBJECTIVES),
    st.sampled_from(LEVELS),
    st.none() | st.integers(1, 4),
    st.integers(1, 4),
)
def test_places_lose_nothing_and_keep_the_capacity(
    pairs, num_buckets, num_microbatches, capacity, method, objective, level, group_size, stages
):
    costs, sizes = columns(pairs)
    shape = (num_buckets, num_microbatches)
    how = {"method": method, "objective": objective, "level": level, "group_size": group_size, "stages": stages}
    places = place(costs, sizes, *shape, capacity, **how)
    if places is None:
        assert level == "intra" or 2 * sizes.sum() > num_buckets * num_microbatches * capacity or sizes.max() > capacity
        return
    assert places.dtype == np.int64 and places.shape == costs.shape
    assert ((places >= 0) & (places < num_buckets * num_microbatches)).all()
    assert loads(sizes, places, num_buckets * num_microbatches).max() <= capacity
    assert lockstep_bound(costs, sizes, *shape, capacity) <= times(costs, places, *shape)["lockstep"]
    np.testing.assert_array_equal(places, place(costs.copy(), sizes.copy(), *shape, capacity, **how))


@given(st.lists(st.integers(1, 5), min_size=2, max_size=40), st.data())
def test_equal_items_may_change_places_without_any_change(costs, data):
    # Items alike in cost and size are taken in the order given: permuting them permutes nothing.
    order = data.draw(st.permutations(range(len(costs))))
    costs = np.array(costs, np.int64)
    bins, permuted = (balance(one, 3, sizes=one, capacity=10**6) for one in (costs, costs[order]))
    for cost in set(costs.tolist()):
        assert bins[costs == cost].tolist() == permuted[costs[order] == cost].tolist()


def test_many_items_reach_the_bound():
    costs = llm_cost(lengths(16384))
    assert loads(costs, balance(costs, 64), 64).max() <= 1.0001 * makespan_bound(costs, 64)


@pytest.mark.parametrize("cap", [1.5, 2.0, 4.0])
def test_lockstep_is_near_what_no_placement_can_beat(cap):
    shape, tokens = (32, 8), lengths(2048)
    capacity = int(cap * tokens.sum() / 256)
    tokens = np.minimum(tokens, capacity)
    costs = llm_cost(tokens)
    places = place(costs, tokens, *shape, capacity)
    assert times(costs, places, *shape)["lockstep"] <= 1.01 * lockstep_bound(costs, tokens, *shape, capacity)


def test_each_objective_is_best_at_what_it_is_for():
    tokens = lengths(1024, 8192)
    costs = llm_cost(tokens)
    found = {
        one: times(costs, place(costs, tokens, 16, 8, 20_000, objective=one, stages=4), 16, 8, stages=4)
        for one in OBJECTIVES
    }
    for one in OBJECTIVES:
        assert found[one][one] == min(other[one] for other in found.values())


def test_sizes_that_do_not_follow_costs():
    rng = np.random.default_rng(1)
    costs, sizes = rng.integers(1, 10**6, 4000), rng.integers(1, 1000, 4000)
    for objective in OBJECTIVES:
        places = place(costs, sizes, 16, 8, int(sizes.sum() / 128 * 1.05), objective=objective, stages=2)
        assert places is not None
        assert times(costs, places, 16, 8)["lockstep"] < 1.1 * costs.sum() / 16


def test_a_tight_capacity_is_still_met():
    tokens = lengths(4096, 8192)
    costs, capacity = llm_cost(tokens), int(tokens.sum() / 256 / 0.97)
    for objective in OBJECTIVES:
        assert place(costs, tokens, 64, 4, max(capacity, 8192), objective=objective) is not None


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 4), st.data())
def test_intra_composes_microbatches_without_looking_at_costs(sizes, num_buckets, num_microbatches, data):
    group_size = data.draw(st.none() | st.integers(1, 3))
    sizes = np.array(sizes, np.int64)
    numbers = []
    for _ in range(2):
        costs = np.array(data.draw(st.lists(st.integers(0, 99), min_size=len(sizes), max_size=len(sizes))), np.int64)
        places = place(costs, sizes, num_buckets, num_microbatches, 10**6, level="intra", group_size=group_size)
        numbers.append((places % num_microbatches).tolist())
    assert numbers[0] == numbers[1] == sorted(numbers[0])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 8))
def test_intra_finds_runs_that_fit_wherever_there_are_some(sizes, num_microbatches):
    runs, left = 0, 0
    for size in sizes:
        runs, left = (runs, left - size) if size <= left else (runs + 1, 24 - size)
    places = place(np.ones(len(sizes), np.int64), np.array(sizes), 1, num_microbatches, 24, level="intra")
    assert (places is not None) == (runs <= num_microbatches)


def test_inter_gives_buckets_the_same_sum_and_falling_microbatches():
    costs = llm_cost(lengths(2048, 8192))
    places = place(costs, np.zeros(2048, np.int64), 8, 4, 0, level="inter")
    load = loads(costs, places, 32).reshape(8, 4)
    assert load.sum(axis=1).max() <= 1.001 * load.sum(axis=1).mean()
    assert (np.diff(load, axis=1) <= 0).all()


def test_pipeline_orders_small_big_small():
    costs = np.arange(1, 41, dtype=np.int64) ** 3
    load = loads(costs, place(costs, costs * 0, 2, 5, 0, objective="pipeline", stages=4), 10).reshape(2, 5)
    for bucket in load:
        top = int(bucket.argmax())
        assert top == 2 and (np.diff(bucket[: top + 1]) >= 0).all() and (np.diff(bucket[top:]) <= 0).all()


def test_groups_are_balanced_by_themselves():
    tokens = lengths(4096, 8192)
    costs = llm_cost(tokens)
    for num_buckets, size in ((16, 4), (10, 4)):
        places = place(costs, tokens, num_buckets, 4, 10**6, objective="sum", group_size=size)
        load = loads(costs, places, num_buckets * 4).reshape(num_buckets, 4).sum(axis=1)
        assert load.max() <= 1.01 * load.mean()


def test_a_function_places_items_and_its_answer_is_checked():
    def backwards(costs, num_bins, sizes, capacity):
        return (num_bins - 1 - np.arange(len(costs))) % num_bins

    assert balance([1, 2, 3], 2, backwards).tolist() == [1, 0, 1]
    assert place(np.ones(4, np.int64), np.ones(4, np.int64), 2, 2, 1, method=backwards) is not None
    assert (
        place(np.ones(4, np.int64), np.ones(4, np.int64), 2, 2, 1, method=lambda c, *_: np.zeros(len(c), int)) is None
    )
    for answer, words in (
        ([0], r"returned shape \(1,\) for 2 items"),
        ([0.0, 1.0], "returned float64"),
        ([0, 2], "put item 1 into bin 2"),
        ([-1, 0], "put item 0 into bin -1"),
    ):
        with pytest.raises(SpecError, match=words):
            balance([1, 1], 2, lambda *_, answer=answer: answer)
    with pytest.raises(PlanError, match=r"do not fit into 2 bins of 3 as .*lambda.* places them"):
        balance([1, 1], 2, lambda *_: [0, 0], sizes=[2, 2], capacity=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1], 1, "magic"), "method is 'magic'"),
        (([1], 1, 7), "method is 7"),
        (([1], 0), "num_bins is 0"),
        (([1], 1.5), "num_bins is 1.5"),
        (([1, -2], 1), r"costs\[1\] is -2"),
        (([1.0, float("nan")], 1), r"costs\[1\] is nan"),
        (([float("inf")], 1), r"costs\[0\] is inf"),
        (([2**61, 2**61], 1), "costs add up to more than 2"),
        (([[1]], 1), r"costs have shape \(1, 1\)"),
        ((["a"], 1), "costs are <U1"),
        (([1, 2], 1, "greedy", [1], 5), "1 sizes for 2 costs"),
        (([1, 2], 1, "greedy", [1, 6], 5), "item 1 takes 6, a bin holds 5"),
        (([1], 1, "greedy", None, 5), "capacity is 5 but there are no sizes"),
        (([1], 1, "greedy", [1], "x"), "capacity is 'x'"),
        (([1], 1, "greedy", [1], 1.5), "capacity is 1.5"),
        (([1], 1, "greedy", [1], -1), "capacity is -1"),
        (([1], 2**70), "num_bins is 1180591620717411303424"),
        (([[1], [1, 2]], 1), r"costs are \[\[1\], \[1, 2\]\].* Give a list of numbers"),
        ((None, 1), r"costs have shape \(\)"),
        (([1], 1, "greedy", [[1], [1, 2]]), "sizes are"),
    ],
)
def test_bad_arguments_are_explained(arguments, words):
    with pytest.raises(SpecError, match=words):
        balance(*arguments)


def deals_no_items(costs):
    return np.zeros(len(costs), int)


def writes_to_costs(costs, num_bins, sizes, capacity):
    costs += 1


def leaves(costs, num_bins, sizes, capacity):
    sys.exit("enough")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (deals_no_items, "the function deals_no_items failed on 2 items .* TypeError"),
        (writes_to_costs, "the function writes_to_costs failed on 2 items .* ValueError"),
        (leaves, "the function leaves failed on 2 items .* SystemExit: enough"),
        (lambda *_: [[0], [0, 1]], "the function .*lambda.* failed on 2 items .* ValueError"),
    ],
)
def test_a_function_that_fails_is_named(method, words):
    with pytest.raises(PlanError, match=words):
        balance([1, 1], 2, method)
    for objective in OBJECTIVES:
        with pytest.raises(PlanError, match=words):
            place(np.ones(2, np.int64), np.ones(2, np.int64), 2, 2, 2, method=method, objective=objective)


@pytest.mark.parametrize("answer", [None, "ab", {0: 1}, [0, None], [True, False], object()])
def test_garbage_of_a_function_is_refused(answer):
    for ask in (balance, lambda costs, bins, method: place(costs, costs, bins, 1, 2, method=method)):
        with pytest.raises(SpecError, match=r"the function .*lambda.* returned"):
            ask(np.ones(2, np.int64), 2, lambda *_: answer)


def test_errors_of_overlord_pass_through_a_function():
    with pytest.raises(SpecError, match="method is 'magic'"):
        balance([1, 1], 2, lambda costs, num_bins, *_: balance(costs, num_bins, "magic"))


def test_what_does_not_fit_is_refused():
    with pytest.raises(PlanError, match="3 items of 12 in all do not fit into 2 bins of 5"):
        balance([1, 1, 1], 2, sizes=[4, 4, 4], capacity=5)
    with pytest.raises(SpecError, match="objective is 'fast'"):
        place(np.ones(1, np.int64), np.ones(1, np.int64), 1, 1, 1, objective="fast")
    with pytest.raises(SpecError, match="2 sizes for 1 costs"):
        place(np.ones(1, np.int64), np.ones(2, np.int64), 1, 1, 1)
    with pytest.raises(SpecError, match="group_size is 0"):
        place(np.ones(1, np.int64), np.ones(1, np.int64), 1, 1, 1, group_size=0)
    with pytest.raises(SpecError, match="level is 'deep'"):
        place(np.ones(1, np.int64), np.ones(1, np.int64), 1, 1, 1, level="deep")
    with pytest.raises(SpecError, match=r"level is \['deep'\]"):
        place(np.ones(1, np.int64), np.ones(1, np.int64), 1, 1, 1, level=["deep"])
    with pytest.raises(SpecError, match="capacity is 'x'"):
        place(np.ones(1, np.int64), np.ones(1, np.int64), 1, 1, "x")


def test_nothing_gives_nothing():
    nothing = np.zeros(0, np.int64)
    assert balance([], 3).tolist() == []
    for objective in OBJECTIVES:
        for level in LEVELS:
            assert place(nothing, nothing, 2, 2, 5, objective=objective, level=level, group_size=1).tolist() == []


def test_floats_are_scaled_and_not_rounded():
    assert balance([4.6, 5.4], 2).tolist() == [1, 0], "they differ"
    assert balance([0.4, 0.3, 0.3], 2).tolist() == balance([4, 3, 3], 2).tolist()
    assert balance([5.0, 4.0, 3.0, 2.0], 2).tolist() == balance([5, 4, 3, 2], 2).tolist()
    assert sorted(balance([1e-300] * 4, 4).tolist()) == sorted(balance([1e300] * 4, 4).tolist()) == [0, 1, 2, 3]
    assert balance([0.0, 0.0], 2).tolist() == balance([0, 0], 2).tolist()
    mixed = [1e18, 1e-12, 1e18, 1e-12]
    assert sorted(balance(mixed, 2)[[0, 2]].tolist()) == [0, 1]
    with pytest.raises(SpecError, match="item 1 takes 3, a bin holds 2"):
        balance([1, 1], 2, sizes=[0.5, 2.1], capacity=2)


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=120),
    st.integers(1, 20),
    st.sampled_from(METHODS),
    st.integers(-40, 60),
)
def test_floats_of_any_scale_are_balanced_like_integers(costs, num_bins, method, exponent):
    """1e-12 to 1e18 are 2**-40 to 2**60: multiplied by a power of two, floats are the integers in another unit."""
    exact = np.array(costs, np.int64)
    floats = np.ldexp(exact.astype(np.float64), exponent)
    load = loads(exact, balance(floats, num_bins, method), num_bins)
    wide = loads(exact, balance([cost << 30 for cost in costs], num_bins, method), num_bins)
    assert load.max() in (wide.max(), loads(exact, balance(costs, num_bins, method), num_bins).max())


@given(st.lists(st.floats(1e-12, 1e18), min_size=1, max_size=60), st.integers(1, 12))
def test_floats_of_mixed_scales_keep_the_guarantee_of_longest_first(costs, num_bins):
    costs = np.array(costs)
    largest = np.bincount(balance(costs, num_bins), costs).max()
    bound = costs.max() if len(costs) <= num_bins else costs.sum() / num_bins + costs.max()
    assert largest <= bound * (1 + 1e-9)


def test_read_only_numbers_compile_no_kernel_anew():
    """A user's method gets read-only arrays, and may hand them to `balance`: seconds of compiling in a step."""
    costs, sizes = np.arange(9, 0, -1), np.arange(9)
    expected = balance(costs, 3, "greedy", sizes, 20).tolist()
    compiled = {name: list(getattr(methods, name).signatures) for name in ("largest_first", "_exchange_in_rounds")}
    costs.flags.writeable = sizes.flags.writeable = False
    assert balance(costs, 3, "greedy", sizes, 20).tolist() == expected
    assert {name: getattr(methods, name).signatures for name in compiled} == compiled
