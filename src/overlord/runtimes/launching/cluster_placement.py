"""Which role goes to which host of a cluster. Pure: nodes in, sites out.

Sidecar first (the paper's section 6.2): a constructor host on the host of the ranks it feeds, loader hosts on the idle
CPUs of those hosts, and on other hosts only when those are full.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from overlord.core.place_tree import ranks_of_host
from overlord.errors import SpecError
from overlord.roles.assignment import NO_HOST, Assignment

TRAINER = "overlord_trainer"
"""The custom resource that marks the hosts of trainers."""
PLANNER_CPUS = 1.0
CONSTRUCTOR_CPUS = 1.0

Role = Literal["planner", "loader", "constructor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """What of a launch concerns the cluster alone."""

    address: str | None = None
    """The cluster; None starts one on this host."""
    ranks_per_host: int | None = None
    """Ranks of one trainer host."""
    loader_hosts: int | Literal["per_source"] | None = None
    """Loader hosts; by default one for each trainer host."""
    shadows: tuple[bool, ...] = ()
    """Which sources have a shadow; none by default."""
    engine: Literal["ray", "local"] = "ray"
    """What roles run on: Ray's actors, or processes of this host."""


@dataclass(frozen=True, slots=True)
class Node:
    """One host of a cluster."""

    id: str
    name: str
    """What people call it."""
    cpus: float
    """Idle ones."""
    accelerators: float = 0.0
    trainer: bool = False
    """Whether it is marked as the host of trainers."""
    here: bool = False
    """Whether the launching process runs on it."""


@dataclass(frozen=True, slots=True)
class Site:
    """One role on one host."""

    role: Role
    node: Node
    cpus: float
    number: int = 0
    """Which of its kind it is."""
    ranks: tuple[int, ...] = ()
    """Of a constructor host: the ranks it is made for."""
    sources: tuple[int, ...] = ()
    """Of a loader host: the sources it has at first."""
    shadows: tuple[int, ...] = ()
    """Of a loader host: the sources it follows at first."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.role if self.role == "planner" else f"{self.role} host {self.number}"

    def facts(self, hosts: int) -> dict[str, Any]:
        """Return what the role itself must know, as JSON; `hosts` are the constructor hosts."""
        return {
            "name": self.name,
            "role": self.role,
            "number": self.number,
            "ranks": list(self.ranks),
            "sources": list(self.sources),
            "shadows": list(self.shadows),
            "hosts": hosts,
        }

    def to_json(self) -> dict[str, Any]:
        """Return it for people to read."""
        found: dict[str, Any] = {"role": self.name, "host": self.node.name, "node": self.node.id, "cpus": self.cpus}
        if self.ranks:
            found["ranks"] = f"{self.ranks[0]}-{self.ranks[-1]}"
        found |= {"sources": len(self.sources)} if self.sources else {}
        return found | ({"shadows": len(self.shadows)} if self.shadows else {})


def place(
    nodes: Sequence[Node], options: ClusterOptions, *, world_size: int, num_sources: int, loader_cpus: int
) -> list[Site]:
    """Return a site for every role: the planner, then constructor hosts, then loader hosts.

    Raises:
        SpecError: where the cluster is too small for the mesh; it says what is missing.

    Example:
        >>> nodes = [Node("a", "gpu-0", cpus=8, accelerators=8), Node("b", "cpu-0", cpus=64)]
        >>> sites = place(nodes, ClusterOptions(), world_size=8, num_sources=3, loader_cpus=2)
        >>> [(site.name, site.node.name) for site in sites]
        [('planner', 'gpu-0'), ('constructor host 0', 'gpu-0'), ('loader host 0', 'gpu-0')]
    """
    trainers = _trainer_hosts(nodes)
    per_host = options.ranks_per_host or _ranks_per_host(trainers, world_size)
    if world_size % per_host:
        raise SpecError(
            f"ranks_per_host: {per_host} does not divide the mesh's {world_size} ranks; some would have no host. Give "
            "the number of trainer processes of one host (torchrun's --nproc-per-node)."
        )
    count = world_size // per_host
    if count > len(trainers):
        raise SpecError(
            f"the mesh has {world_size} ranks, {per_host} a host: {count} trainer hosts, and the cluster has "
            f"{len(trainers)} ({_names(trainers)}). Add hosts, mark them with the resource {TRAINER!r}, or give a "
            "larger ranks_per_host=."
        )
    idle = {node.id: node.cpus for node in nodes}
    chosen = trainers[:count]
    sites = [_planner(nodes, chosen, idle)]
    for number, node in enumerate(chosen):
        ranks = tuple(ranks_of_host(number, count, world_size))
        sites.append(Site("constructor", node, _take(idle, node, CONSTRUCTOR_CPUS, "constructor host"), number, ranks))
    return sites + _loaders(nodes, chosen, idle, options, num_sources, loader_cpus)


def place_here(options: ClusterOptions | None, *, world_size: int, num_sources: int, threads: int) -> list[Site]:
    """Return sites on this host, which has room for all of them; without options, in this process."""
    name = "this process" if options is None else "this host"
    here = Node("here", name, cpus=math.inf, here=True)
    loader_cpus = 1 if options is None else threads
    return place(
        [here], options or ClusterOptions(), world_size=world_size, num_sources=num_sources, loader_cpus=loader_cpus
    )


def cpus_needed(options: ClusterOptions, *, num_sources: int, loader_cpus: int) -> int:
    """Return the CPUs of a cluster of one host that fits everything."""
    return int(PLANNER_CPUS + CONSTRUCTOR_CPUS) + _loader_count(options, 1, num_sources) * loader_cpus


def _trainer_hosts(nodes: Sequence[Node]) -> list[Node]:
    for chosen in ([n for n in nodes if n.trainer], [n for n in nodes if n.accelerators > 0], list(nodes)):
        if chosen:
            return sorted(chosen, key=lambda node: not node.here)
    raise SpecError(
        "the cluster has no hosts; nothing could run. Start `ray start --head` first, or leave address out."
    )


def _ranks_per_host(trainers: Sequence[Node], world_size: int) -> int:
    marked = any(node.trainer or node.accelerators for node in trainers)
    if not marked:
        return world_size  # no host is marked as one of trainers: all of them are here
    if trainers[0].accelerators and world_size % int(trainers[0].accelerators) == 0:
        return min(world_size, int(trainers[0].accelerators))
    return world_size // len(trainers) if world_size % len(trainers) == 0 else world_size


def _planner(nodes: Sequence[Node], trainers: Sequence[Node], idle: dict[str, float]) -> Site:
    # On the launching host where possible: its store is there.
    candidates = sorted(nodes, key=lambda node: (not node.here, node not in trainers, -idle[node.id]))
    fitting = [node for node in candidates if idle[node.id] >= PLANNER_CPUS]
    node = fitting[0] if fitting else candidates[0]
    return Site("planner", node, _take(idle, node, PLANNER_CPUS, "planner"))


def _loaders(
    nodes: Sequence[Node],
    trainers: Sequence[Node],
    idle: dict[str, float],
    options: ClusterOptions,
    num_sources: int,
    cpus: int,
) -> list[Site]:
    count = _loader_count(options, len(trainers), num_sources)
    sites: list[Site] = []
    for number in range(count):
        held = Counter(site.node.id for site in sites)  # every trainer host gets one before any gets two
        # A shadow is worth most on another machine: then every host gets one before any gets two.
        spread = Counter(held) if any(options.shadows) else Counter[str]()
        by_room = sorted(nodes, key=lambda node: (spread[node.id], node not in trainers, held[node.id], -idle[node.id]))
        fitting = [node for node in by_room if idle[node.id] >= cpus]
        if not fitting:
            raise SpecError(
                f"the cluster has no host with {cpus} idle CPUs for loader host {number} of {count} (idle: "
                f"{_idle(nodes, idle)}). Add CPU hosts, lower threads= (CPUs of a loader host) or loader_hosts=."
            )
        sites.append(Site("loader", fitting[0], _take(idle, fitting[0], cpus, "loader host"), number))
    dealt = deal(sites, options, num_sources)
    return [
        dataclasses.replace(site, sources=tuple(dealt.sources_of(at)), shadows=tuple(dealt.shadows_of(at)))
        for at, site in enumerate(sites)
    ]


def deal(sites: Sequence[Site], options: ClusterOptions, num_sources: int) -> Assignment:
    """Deal sources to loader hosts, and shadows to other ones: on another machine, where there is one."""
    count = len(sites)
    primary = [source % count for source in range(num_sources)]
    shadow = [NO_HOST] * num_sources
    for source, wanted in enumerate(options.shadows):
        if wanted:
            mine = sites[primary[source]]
            others = [(primary[source] + step) % count for step in range(1, count)]
            far = [at for at in others if sites[at].node.id != mine.node.id]
            # Taken in turn, so that those of one host are spread over the others.
            near = far or others
            shadow[source] = near[(source // count) % len(near)]
    return Assignment(tuple((host,) for host in primary), tuple(shadow))


def _loader_count(options: ClusterOptions, trainers: int, num_sources: int) -> int:
    least = 2 if any(options.shadows) else 1  # a shadow never shares its primary's process
    if options.loader_hosts == "per_source":
        return max(num_sources, least)
    return max(min(options.loader_hosts or trainers, num_sources), least)


def _take(idle: dict[str, float], node: Node, cpus: float, what: str) -> float:
    if idle[node.id] < cpus:
        raise SpecError(
            f"host {node.name} has {idle[node.id]:g} idle CPUs, and a {what} takes {cpus:g}; ranks there would have no "
            "data. Free some (other Ray jobs hold them), or start Ray there with more --num-cpus."
        )
    idle[node.id] -= cpus
    return cpus


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(node.name for node in nodes[:8]) + (", .." if len(nodes) > 8 else "")


def _idle(nodes: Sequence[Node], idle: Mapping[str, float]) -> str:
    return ", ".join(f"{node.name} {idle[node.id]:g}" for node in nodes[:8])
