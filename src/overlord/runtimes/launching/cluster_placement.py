"""Which role goes to which host of a cluster. Pure: nodes in, sites out.

Sidecar first (the paper's section 6.2): a constructor host on the host of the ranks it feeds, loader hosts on the idle
CPUs of those hosts, and on other hosts only when those are full. Loader hosts are the actors of the auto-partition
where a launch has one, each with its own sources, workers, CPUs and bytes; else sources are dealt to them in turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from overlord.core.place_tree import ranks_of_host
from overlord.core.spec_errors import list_some
from overlord.errors import SpecError
from overlord.roles.assignment import NO_HOST, Assignment
from overlord.scaling.partition import Actor

TRAINER = "overlord_trainer"
"""The custom resource that marks the hosts of trainers."""
PLANNER_CPUS = 1.0
CONSTRUCTOR_CPUS = 1.0
LEAST_CPUS = 0.1
"""Of an actor whose workers wait nearly all the time."""
_ROUNDING = 1e-6

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
    actors: tuple[Actor, ...] = ()
    """The loader hosts of the auto-partition; without them sources are dealt to `loader_hosts`."""
    threads: int | None = None
    """Cores of each loader host, where the launch says; else what its actor needs."""
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
    bytes: float = math.inf
    """Idle memory."""
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
    workers: tuple[int, ...] = ()
    """Of an actor of the auto-partition: the workers of each of its sources."""
    busy_workers: int = 0
    """Of such an actor: how many of them may run at the same time; 0 where the launch says."""
    threads: int = 0
    """Of such an actor: cores for what its workers compute; 0 where the launch says."""
    bytes: int = 0
    """Of such an actor: its memory."""

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
            "busy_workers": self.busy_workers,
            "threads": self.threads,
        }

    def to_json(self) -> dict[str, Any]:
        """Return it for people to read."""
        found: dict[str, Any] = {"role": self.name, "host": self.node.name, "node": self.node.id, "cpus": self.cpus}
        if self.ranks:
            found["ranks"] = f"{self.ranks[0]}-{self.ranks[-1]}"
        found |= {"bytes": self.bytes} if self.bytes else {}
        found |= {"sources": len(self.sources)} if self.sources else {}
        return found | ({"shadows": len(self.shadows)} if self.shadows else {})


def place(
    nodes: Sequence[Node], options: ClusterOptions, *, world_size: int, names: Sequence[str], loader_cpus: int
) -> list[Site]:
    """Return a site for every role: the planner, then constructor hosts, then loader hosts.

    `names` are those of the sources, by their numbers.

    Raises:
        SpecError: where the cluster is too small for the mesh; it says what is missing.

    Example:
        >>> nodes = [Node("a", "gpu-0", cpus=8, accelerators=8), Node("b", "cpu-0", cpus=64)]
        >>> sites = place(nodes, ClusterOptions(), world_size=8, names=["a", "b", "c"], loader_cpus=2)
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
    if options.actors:
        loaders = _actors(nodes, chosen, idle, options)
        primary = _actors_of_sources(options.actors, names)
    else:
        loaders = _loaders(nodes, chosen, idle, options, len(names), loader_cpus)
        primary = [(source % len(loaders),) for source in range(len(names))]
    dealt = Assignment(tuple(primary), shadow_hosts(loaders, options, primary))
    return sites + [_with_sources(site, dealt, options, names) for site in loaders]


def room_for(site: Site, nodes: Sequence[Node], sidecars: Collection[str]) -> Node:
    """Return where a further loader host goes while the service runs: on a host of trainers, or else on another one.

    `sidecars` are the ids of the hosts of trainers.

    Raises:
        SpecError: No host has room.

    Example:
        >>> spare = Site("loader", Node("a", "gpu-0", 0), cpus=2.0, number=1)
        >>> room_for(spare, [Node("a", "gpu-0", 1), Node("b", "cpu-0", 8), Node("c", "cpu-1", 32)], {"a"}).name
        'cpu-1'
    """
    roomy = [node for node in nodes if node.cpus + _ROUNDING >= site.cpus and node.bytes >= site.bytes]
    if not roomy:
        idle = {node.id: node.cpus for node in nodes}
        raise SpecError(
            f"no host of the cluster has {site.cpus:g} idle CPUs for {site.name} (idle: {_idle(nodes, idle)}); sources "
            "keep the workers that fit. Add CPU hosts, they are taken up."
        )
    return min(roomy, key=lambda node: (node.id not in sidecars, -node.cpus, node.id))


def next_trainer_host(site: Site, nodes: Sequence[Node], taken: Collection[str]) -> Node:
    """Return where a further constructor host goes while the service runs: on a host of trainers that has none.

    Raises:
        SpecError: No such host has room.

    Example:
        >>> nodes = [Node("a", "gpu-0", 8, accelerators=8), Node("b", "gpu-1", 8, accelerators=8), Node("c", "cpu", 64)]
        >>> next_trainer_host(Site("constructor", nodes[0], 1.0, 1), nodes, {"a"}).name
        'gpu-1'
    """
    free = [node for node in _trainer_hosts(nodes) if node.id not in taken]
    roomy = [node for node in free if node.cpus + _ROUNDING >= site.cpus]
    if not roomy:
        raise SpecError(
            f"reshard: no further host of trainers for the {site.name} (without one: {_names(free) or 'none'}); ranks "
            f"there would have no data, and nothing has changed. Add hosts, mark them with the resource {TRAINER!r}, "
            "or give fewer hosts=."
        )
    return roomy[0]


def place_here(options: ClusterOptions | None, *, world_size: int, names: Sequence[str], threads: int) -> list[Site]:
    """Return sites on this host, which has room for all of them; without options, in this process."""
    name = "this process" if options is None else "this host"
    here = Node("here", name, cpus=math.inf, here=True)
    loader_cpus = 1 if options is None else threads
    return place([here], options or ClusterOptions(), world_size=world_size, names=names, loader_cpus=loader_cpus)


def cpus_needed(options: ClusterOptions, *, num_sources: int, loader_cpus: int) -> int:
    """Return the CPUs of a cluster of one host that fits everything."""
    actors = [_actor_cpus(actor, options) for actor in options.actors]
    loaders = sum(actors) if actors else _loader_count(options, 1, num_sources) * loader_cpus
    spare = LEAST_CPUS if len(actors) == 1 and any(options.shadows) else 0.0
    return math.ceil(PLANNER_CPUS + CONSTRUCTOR_CPUS + loaders + spare)


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
    return sites


def _actors(
    nodes: Sequence[Node], trainers: Sequence[Node], idle: dict[str, float], options: ClusterOptions
) -> list[Site]:
    """Place the actors of a partition, the largest first: each on the trainer host, or else the other, with most room.

    The actors of one source are on different hosts where that does not bring them off the trainer hosts.
    """
    memory = {node.id: node.bytes for node in nodes}
    held: dict[str, Counter[str]] = {node.id: Counter() for node in nodes}
    placed: dict[int, Site] = {}
    actors = list(options.actors)
    if len(actors) == 1 and any(options.shadows):  # a shadow never shares its primary's process
        actors.append(Actor(number=1, sources=(), source_workers=(), workers=1, cpus=0.0, bytes=0))

    def by_room(actor: Actor) -> list[Node]:
        def key(node: Node) -> tuple[int, bool, int, float]:
            here = held[node.id]
            spread = here.total() if any(options.shadows) else 0  # a shadow is worth most on another machine
            return spread, node not in trainers, sum(here[name] for name in actor.sources), -idle[node.id]

        return sorted(nodes, key=key)

    for actor in sorted(actors, key=lambda one: (-_actor_cpus(one, options), -one.bytes, one.number)):
        cpus = _actor_cpus(actor, options)
        fitting = [n for n in by_room(actor) if idle[n.id] + _ROUNDING >= cpus and memory[n.id] >= actor.bytes]
        if not fitting:
            raise SpecError(
                f"the cluster has no host with {cpus:g} idle CPUs and {actor.bytes / 1e6:,.0f} MB for actor "
                f"{actor.number} of the partition's {len(actors)} ({_few(actor.sources)}; idle: {_idle(nodes, idle)}). "
                "Add CPU hosts, or lower budget.cpus, budget.workers_per_actor or budget.memory_per_actor."
            )
        node = fitting[0]
        idle[node.id] -= cpus
        memory[node.id] -= actor.bytes
        held[node.id].update(actor.sources)
        threads = options.threads or max(1, math.ceil(actor.cpus - _ROUNDING))
        placed[actor.number] = Site(
            "loader", node, cpus, actor.number, busy_workers=actor.workers, threads=threads, bytes=actor.bytes
        )
    return [placed[number] for number in sorted(placed)]


def _actor_cpus(actor: Actor, options: ClusterOptions) -> float:
    """Return the CPUs that are reserved for an actor."""
    return float(options.threads or max(LEAST_CPUS, math.ceil(100 * actor.cpus - _ROUNDING) / 100))


def _actors_of_sources(actors: Sequence[Actor], names: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the actors of each source; one that came after the partition was made joins the actor with the fewest."""
    held = Counter({actor.number: len(actor.sources) for actor in actors})
    found: list[tuple[int, ...]] = []
    for name in names:
        own = tuple(actor.number for actor in actors if name in actor.sources)
        if not own:
            own = (min(held, key=lambda number: (held[number], number)),)
            held[own[0]] += 1
        found.append(own)
    return found


def _with_sources(site: Site, dealt: Assignment, options: ClusterOptions, names: Sequence[str]) -> Site:
    sources = tuple(dealt.sources_of(site.number))
    actor = next((one for one in options.actors if one.number == site.number), None)
    counts = {} if actor is None else dict(zip(actor.sources, actor.source_workers, strict=True))
    workers = tuple(counts.get(names[source], 1) for source in sources) if actor is not None else ()
    return dataclasses.replace(site, sources=sources, shadows=tuple(dealt.shadows_of(site.number)), workers=workers)


def shadow_hosts(sites: Sequence[Site], options: ClusterOptions, primary: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the host of each source's shadow: on another machine, where there is one."""
    count = len(sites)
    shadow = [NO_HOST] * len(primary)
    for source, wanted in enumerate(options.shadows):
        if wanted:
            first = primary[source][0]
            others = [(first + step) % count for step in range(1, count)]
            far = [at for at in others if sites[at].node.id != sites[first].node.id]
            # Taken in turn, so that those of one host are spread over the others.
            near = far or others
            shadow[source] = near[(source // count) % len(near)]
    return tuple(shadow)


def _few(names: Sequence[str]) -> str:
    return list_some(names, limit=4) if names else "of shadows"


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
