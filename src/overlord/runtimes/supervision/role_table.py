"""The roles of a service: which process runs each of them, which host has which source, and what all of them are told.

A supervisor changes the table when it replaces a role, and `HostChanges` when it moves sources between loader hosts.
Every change is published to all roles as a new version of the membership.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlord.roles.assignment import NO_HOST, Assignment
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.supervision.child import Limits, Liveness, Restarts
from overlord.runtimes.transport.engine import Engine, Membership, Peer, PeerGone, Pending
from overlord.runtimes.transport.peer_client import PeerClient

MOST_TRIES = 30
"""Replacements in a row of one role that end soon or do not come up, before the service gives up."""


@dataclass(slots=True)
class RoleInstance:
    """A role, and the process or actor that runs it at the moment."""

    site: Site
    restarts: Restarts
    generation: int = 1
    peer: Peer | None = None
    """None while there is none."""
    coming: Peer | None = None
    """The one that is being started: only its supervisor calls it, but it must know the other roles."""
    beat: Pending | None = None
    """The heartbeat that it was asked for."""
    liveness: Liveness | None = None
    started_at: float = 0.0
    pid: int = 0
    served: int = -1
    """The newest step that a client of it is known to have come to."""
    asleep: bool = False
    """Whether it is not to run at the moment."""
    clients: int = 0
    """Clients that are attached to it."""
    attached: bool = False
    """Whether any client has been attached to it since it was started."""
    waits: tuple[str, ...] = ()
    """What its worker and reader processes have not answered for some seconds."""
    rewound: bool = False
    """Whether it reported that all ranks go back to an earlier step."""
    told: Pending | None = field(default=None, repr=False)
    """The last membership that was sent: dropping it may drop the message with it."""


class RoleTable:
    """All roles of one service."""

    def __init__(
        self,
        engine: Engine,
        sites: Sequence[Site],
        spares: Sequence[Site],
        limits: Limits,
        clock: Callable[[], float],
        idle: Callable[[float], None] | None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self.roles = {
            site.name: RoleInstance(site, Restarts(MOST_TRIES, limits.role_steady), asleep=asleep)
            for some, asleep in ((sites, False), (spares, True))
            for site in some
        }
        self.lock = threading.RLock()
        """Held while the table changes."""
        self.moving = threading.Lock()
        """Held while sources move or are added: one change of the assignment at a time, beside promotions."""
        primary: dict[int, tuple[int, ...]] = {}
        for site in sites:
            primary |= {source: (*primary.get(source, ()), site.number) for source in site.sources}
        shadow = {source: site.number for site in sites for source in site.shadows}
        self.assignment = Assignment(
            tuple(primary[source] for source in range(len(primary))),
            tuple(shadow.get(source, NO_HOST) for source in range(len(primary))),
        )
        """Which loader host has which sources, and shadows which."""
        self.peers = PeerClient(("service", 0), clock, idle)
        self.version = 0
        """Of the newest membership."""
        self.failed: str | None = None
        """Why the service cannot go on, if so."""
        self.hosts: dict[int, int] = {}
        """Constructor hosts of meshes that were given others than the launch, by their number of ranks."""

    def running(self, role: str | None = None) -> list[RoleInstance]:
        """Return the roles that are to run, all or of one kind."""
        with self.lock:
            return [one for one in self.roles.values() if role in (None, one.site.role) and not one.asleep]

    def came_up(self, one: RoleInstance, peer: Peer, pid: int) -> None:
        """Note that a role was started or replaced, and publish it."""
        with self.lock:
            one.peer, one.coming, one.pid, one.asleep, one.attached = peer, None, pid, False, False
            self.watch_from_now(one)
            self.publish()

    def watch_from_now(self, one: RoleInstance) -> None:
        """Begin to count the silence of a role."""
        one.started_at = self._clock()
        one.liveness = Liveness(self._limits.role_silence, self._limits.role_silence, one.started_at)

    def went_down(self, one: RoleInstance, *, asleep: bool = False) -> None:
        """Note that a role does not run any more; what its process still sends is refused (fencing)."""
        one.peer, one.beat, one.told, one.asleep = None, None, None, asleep
        one.generation += 1

    def assign(self, assignment: Assignment, was: Assignment) -> bool:
        """Publish which host has which source, unless that has changed meanwhile: a shadow may be promoted."""
        with self.lock:
            if self.assignment == was:
                self.assignment = assignment
                self.publish()
            return self.assignment is assignment

    def publish(self) -> None:
        """Send all roles the newest membership; the heartbeat of one that misses it shows its version."""
        with self.lock:
            self.version += 1
            living = {name: one.peer for name, one in self.roles.items() if one.peer is not None}
            generations = {name: one.generation for name, one in self.roles.items()}
            membership = Membership(self.version, generations, living, self.assignment, self.failed, dict(self.hosts))
            self.peers.learn(membership)
            for one in self.roles.values():
                peer = one.peer or one.coming
                try:
                    one.told = None if peer is None else self._engine.introduce(peer, membership)
                except PeerGone:
                    pass  # its heartbeat fails too, or the call of the thread that brings it up

    def introduce(self, peer: Peer) -> Pending:
        """Send one role the newest membership."""
        return self._engine.introduce(peer, self.peers.membership)

    def describe(self) -> dict[str, Any]:
        """Return which process runs each role, and what it has."""
        with self.lock:
            hosts = self.running()
            shadows = sum(host != NO_HOST for host in self.assignment.shadow)
            # Roles of one process tell the same.
            waits = list(dict.fromkeys(wait for one in hosts if one.peer is not None for wait in one.waits))
            found = {"hosts": [self._describe(one) for one in hosts], "shadows": shadows, "waits": waits}
            return found | self._engine.describe([(one.site, one.pid) for one in hosts]) | {"failed": self.failed}

    def _describe(self, one: RoleInstance) -> dict[str, Any]:
        found = one.site.to_json()
        if one.site.role == "loader":  # as it is now, not as it began
            found["sources"] = len(self.assignment.sources_of(one.site.number))
            found["shadows"] = len(self.assignment.shadows_of(one.site.number))
        up = {"pid": one.pid, "generation": one.generation, "restarts": one.restarts.count, "up": one.peer is not None}
        return found | up
