"""Dealing workers to hosts: all placed, capacities kept, no unnecessary moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlord.scaling.dealing import deal


def test_nothing_moves_where_everything_fits():
    found = deal([3, 2, 1], [[1], [0], [1]], {0: 4, 1: 4}, 4)
    assert found.places == (((1, 3),), ((0, 2),), ((1, 1),))
    assert (found.moves, found.leaves, found.drained, found.further) == ((), (), (), 0)


def test_a_source_that_outgrows_its_host_gets_another():
    found = deal([12], [[0]], {0: 8, 1: 8}, 8)
    assert found.places == (((0, 8), (1, 4)),)
    assert found.moves == ((0, 1),)


def test_a_source_that_shrinks_leaves_and_its_host_can_go():
    found = deal([5, 1], [[0, 1], [0]], {0: 8, 1: 8}, 8)
    assert found.places == (((0, 5),), ((0, 1),))
    assert found.leaves == ((0, 1),)
    assert found.drained == (1,)


def test_workers_change_between_hosts_before_a_source_moves():
    # The first source stands on both hosts, and makes room on the second one's only host.
    found = deal([6, 4], [[0, 1], [0]], {0: 5, 1: 5}, 8)
    assert found.moves == ()
    assert found.places == (((0, 1), (1, 5)), ((0, 4),))


def test_further_hosts_are_counted():
    found = deal([20, 1], [[0], [0]], {0: 8}, 8)
    assert found.places == (((0, 7),), ((0, 1),))
    assert found.further == 2


def test_a_host_that_is_gone_is_passed_over():
    found = deal([2, 2], [[7], [0]], {0: 4, 1: 4}, 4)
    assert found.hosts(0) == (1,)
    assert found.moves == ((0, 1),)


def test_tiny_sources_share_a_host():
    found = deal([1] * 306, [[0]] * 306, {0: 8}, 8, loads=[0.02] * 306)
    assert (found.moves, found.further) == ((), 0)


def test_a_drained_source_keeps_a_place_and_takes_no_room():
    found = deal([0, 4], [[0], [0]], {0: 4}, 4)
    assert found.places == (((0, 0),), ((0, 4),))
    assert found.further == 0


def test_without_hosts_it_says_how_many_are_needed():
    found = deal([9, 1], [[], []], {}, 4)
    assert (found.places, found.further) == (((), ()), 3)


@st.composite
def tables(draw):
    hosts = {number: draw(st.integers(1, 10)) for number in draw(st.sets(st.integers(0, 9), min_size=1, max_size=6))}
    workers = draw(st.lists(st.integers(0, 14), min_size=1, max_size=12))
    now = [draw(st.lists(st.integers(0, 9), max_size=3, unique=True)) for _ in workers]
    return workers, now, hosts, draw(st.integers(1, 8))


@given(tables())
def test_all_are_placed_and_no_host_is_overfull(table):
    workers, now, hosts, per_actor = table
    found = deal(workers, now, hosts, per_actor)
    held = dict.fromkeys(hosts, 0)
    for n, places in zip(workers, found.places, strict=True):
        assert len(places) >= 1
        assert len({host for host, _ in places}) == len(places)
        assert sum(there for _, there in places) <= n
        assert all(there <= per_actor for _, there in places)
        assert all(there >= min(n, 1) for _, there in places)
        for host, there in places:
            held[host] += there
    assert set(found.drained) == {host for host in hosts if not any(host in found.hosts(s) for s in range(len(now)))}
    if len([n for n in workers if n]) <= min(hosts.values()) * len(hosts) // 2:
        assert all(held[host] <= hosts[host] for host in hosts)
    if not found.further:
        assert all(sum(t for _, t in p) == n for n, p in zip(workers, found.places, strict=True))
        assert all(held[host] <= hosts[host] for host in hosts)
    assert found == deal(workers, now, hosts, per_actor)


@given(tables())
def test_what_was_dealt_stays(table):
    workers, now, hosts, per_actor = table
    first = deal(workers, now, hosts, per_actor)
    again = deal(workers, [first.hosts(s) for s in range(len(workers))], hosts, per_actor)
    assert again.moves == ()
    assert again.further == first.further


@given(tables())
def test_a_source_comes_only_to_hosts_it_needs(table):
    """Where the hosts that have the sources have room for all of them, no source comes to another host."""
    workers, now, hosts, per_actor = table
    now = [[host for host in one if host in hosts] for one in now]
    roomy = {host: 14 * len(workers) for host in hosts}
    found = deal(workers, now, roomy, per_actor)
    for s, n in enumerate(workers):
        if now[s] and n <= per_actor * len(now[s]):
            assert set(found.hosts(s)) <= set(now[s])
