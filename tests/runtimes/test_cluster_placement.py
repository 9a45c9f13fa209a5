"""Which role goes where: sidecar first, remote hosts only when those are full, errors that name the shortfall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.runtimes.launching.cluster_placement import ClusterOptions, Node, Site, cpus_needed, place, room_for
from overlord.scaling.partition import Actor


def gpu(number: int, cpus: float = 8, **kind) -> Node:
    return Node(f"g{number}", f"gpu-{number}", cpus, accelerators=8, **kind)


def cpu(number: int, cpus: float = 32, **kind) -> Node:
    return Node(f"c{number}", f"cpu-{number}", cpus, **kind)


def sites_of(nodes, options=None, *, world_size=16, num_sources=20, loader_cpus=2):
    names = [f"s{number}" for number in range(num_sources)]
    return place(nodes, options or ClusterOptions(), world_size=world_size, names=names, loader_cpus=loader_cpus)


def where(sites, role):
    return [site.node.id for site in sites if site.role == role]


def test_constructors_are_on_the_hosts_of_their_ranks_and_loaders_beside_them():
    sites = sites_of([cpu(0, here=True), gpu(0), gpu(1)])
    assert where(sites, "planner") == ["c0"], "where the launching process and its store are"
    assert where(sites, "constructor") == ["g0", "g1"]
    assert where(sites, "loader") == ["g0", "g1"]
    assert [site.ranks for site in sites if site.role == "constructor"] == [tuple(range(8)), tuple(range(8, 16))]


def test_loaders_leave_for_cpu_hosts_only_when_the_trainers_hosts_are_full():
    sites = sites_of([gpu(0, 4), gpu(1, 4), cpu(0)], ClusterOptions(loader_hosts=5), loader_cpus=2)
    assert sorted(where(sites, "loader")) == ["c0", "c0", "c0", "g0", "g1"]


def test_a_mark_says_where_trainers_are_and_accelerators_do_not_matter_then():
    nodes = [gpu(0), cpu(0, trainer=True), cpu(1, trainer=True)]
    sites = sites_of(nodes, world_size=6)
    assert where(sites, "constructor") == ["c0", "c1"]
    assert [len(site.ranks) for site in sites if site.role == "constructor"] == [3, 3]


def test_without_any_sign_all_trainers_are_here():
    sites = sites_of([cpu(0), cpu(1, here=True)])
    assert where(sites, "constructor") == ["c1"]
    assert sites[1].ranks == tuple(range(16))
    assert where(sites, "loader") == ["c1"]


def test_one_actor_a_source_stays_possible():
    sites = sites_of([cpu(0)], ClusterOptions(loader_hosts="per_source"), num_sources=5, loader_cpus=1)
    assert [site.sources for site in sites if site.role == "loader"] == [(0,), (1,), (2,), (3,), (4,)]
    few = sites_of([cpu(0)], ClusterOptions(loader_hosts=9), num_sources=3, loader_cpus=1)
    assert len(where(few, "loader")) == 3, "a loader host without a source would be idle"


def actor(number: int, sources: dict[str, int], cpus: float, megabytes: int = 0) -> Actor:
    return Actor(
        number=number, sources=tuple(sources), source_workers=tuple(sources.values()), workers=sum(sources.values()),
        cpus=cpus, bytes=megabytes << 20,
    )  # fmt: skip


FLEET = (actor(0, {"s0": 1, "s2": 1}, 0.3), actor(1, {"s1": 3}, 3), actor(2, {"s1": 3}, 3), actor(3, {"s3": 2}, 1.5))


def test_actors_of_a_partition_are_placed_with_their_sources_and_workers():
    sites = sites_of([gpu(0, 8), gpu(1, 8), cpu(0)], ClusterOptions(actors=FLEET), num_sources=4)
    loaders = [site for site in sites if site.role == "loader"]
    assert [site.sources for site in loaders] == [(0, 2), (1,), (1,), (3,)]
    assert [site.workers for site in loaders] == [(1, 1), (3,), (3,), (2,)]
    assert [(site.cpus, site.threads, site.busy_workers) for site in loaders] == [
        (0.3, 1, 2), (3, 3, 3), (3, 3, 3), (1.5, 2, 2)
    ]  # fmt: skip
    assert {site.node.id for site in loaders} == {"g0", "g1"}, "sidecars suffice"
    assert loaders[1].node != loaders[2].node, "the actors of one source are on two hosts"


def test_actors_leave_for_cpu_hosts_only_when_the_trainers_hosts_are_full():
    sites = sites_of([gpu(0, 5), gpu(1, 3), cpu(0)], ClusterOptions(actors=FLEET), num_sources=4)
    at = {site.number: site.node.id for site in sites if site.role == "loader"}
    assert (at[1], at[2]) == ("g0", "c0") and at[3] == "g1"


def test_actors_need_memory_too():
    nodes = [Node("g0", "gpu-0", 32, bytes=3 << 30, accelerators=8), Node("c0", "cpu-0", 32, bytes=9 << 30)]
    options = ClusterOptions(actors=(actor(0, {"s0": 2}, 2, 2048), actor(1, {"s1": 2}, 2, 2048)))
    sites = sites_of(nodes, options, world_size=8, num_sources=2)
    assert sorted(where(sites, "loader")) == ["c0", "g0"]
    with pytest.raises(ol.SpecError, match=r"no host with 2 idle CPUs and 2,147 MB for actor 1 of the partition's 2"):
        sites_of(nodes[:1], options, world_size=8, num_sources=2)


def test_a_further_loader_host_goes_beside_trainers_first_and_then_to_the_emptiest_host():
    spare = Site("loader", gpu(0), cpus=2.0, number=2)
    nodes = [gpu(0, 2), gpu(1, 3), cpu(0, 16), cpu(1, 32)]
    assert room_for(spare, nodes, {"g0", "g1"}).id == "g1"
    assert room_for(spare, [gpu(0, 1), gpu(1, 1), *nodes[2:]], {"g0", "g1"}).id == "c1"
    with pytest.raises(ol.SpecError, match=r"no host of the cluster has 2 idle CPUs for loader host 2.*gpu-0 1"):
        room_for(spare, [gpu(0, 1)], {"g0"})


def test_sources_that_came_after_the_partition_join_an_actor_and_shadows_another():
    options = ClusterOptions(actors=FLEET[:1], shadows=(True, False, True, False, False))
    loaders = [site for site in sites_of([cpu(0)], options, num_sources=5) if site.role == "loader"]
    assert [(site.sources, site.shadows) for site in loaders] == [((0, 1, 2, 3, 4), ()), ((), (0, 2))]


@pytest.mark.parametrize(
    ("nodes", "options", "message"),
    [
        ([], ClusterOptions(), "no hosts"),
        ([gpu(0)], ClusterOptions(ranks_per_host=8), "2 trainer hosts, and the cluster has 1"),
        ([gpu(0), gpu(1)], ClusterOptions(ranks_per_host=3), "3 does not divide the mesh's 16 ranks"),
        ([gpu(0, 1), gpu(1, 1)], ClusterOptions(), "gpu-0 has 0 idle CPUs, and a constructor host takes 1"),
        (
            [gpu(0, 3), gpu(1, 2)],
            ClusterOptions(),
            r"no host with 2 idle CPUs for loader host 0 of 2.*gpu-0 1, gpu-1 1",
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_told_what_it_lacks(nodes, options, message):
    with pytest.raises(ol.SpecError, match=message):
        sites_of(nodes, options)


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 9), st.just("per_source")),
    st.integers(1, 30),
    st.integers(1, 4),
)
def test_nobody_gets_more_than_there_is_and_everybody_has_a_place(cpus, hosts, per_host, loaders, sources, threads):
    nodes = [cpu(number, have) for number, have in enumerate(cpus)]
    options = ClusterOptions(ranks_per_host=per_host, loader_hosts=loaders)
    try:
        sites = sites_of(nodes, options, world_size=hosts * per_host, num_sources=sources, loader_cpus=threads)
    except ol.SpecError:
        whole = Node("w", "whole", cpus_needed(options, num_sources=sources, loader_cpus=threads))
        sites = sites_of([whole], options, world_size=per_host, num_sources=sources, loader_cpus=threads)
        nodes = [whole]
        hosts = 1
    for node in nodes:
        assert sum(site.cpus for site in sites if site.node == node) <= node.cpus
    assert sorted(rank for site in sites for rank in site.ranks) == list(range(hosts * per_host))
    assert sorted(source for site in sites for source in site.sources) == list(range(sources))
    assert sites[0].role == "planner"
