"""Constructor hosts that come and go with the mesh, while a service runs.

    a mesh with more hosts      constructor hosts are started on further hosts of trainers, then the mesh is changed
    a mesh with fewer hosts     the last ones leave: each is ended when the stream has come to the mesh and its clients
                                have been told and are gone; one that is lost then is not replaced

Which ranks a host expects follows from the hosts of the mesh (`RoleTable.hosts`), and is published to all roles. A host
serves any rank that attaches to it, so roles that hear of a change at different times need nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

from overlord.core.client_messages import Reshard, Resharded
from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import OverlordError, SpecError
from overlord.runtimes.hosts.peers import PLANNER
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.supervision.child import Limits, Restarts
from overlord.runtimes.supervision.role_table import MOST_TRIES, RoleInstance, RoleTable
from overlord.runtimes.transport.engine import Engine, Peer

logger = logging.getLogger("overlord")

RETURN_S = 60.0
"""How long a host that leaves waits for clients where none has been attached to it: after a restart they come back when
they need their next step, and must be told by this host that the mesh has no place for them."""


class TrainerHosts:
    """Starts and ends constructor hosts.

    Args:
        table: The roles.
        engine: What they run on.
        start: Starts a role at a site and brings it up.
        limits: How long things may take.
        cluster: Whether the engine has hosts to choose from.
    """

    def __init__(
        self,
        table: RoleTable,
        engine: Engine,
        start: Callable[[RoleInstance, Site], tuple[Peer, int]],
        limits: Limits,
        *,
        cluster: bool,
    ) -> None:
        self._table = table
        self._engine = engine
        self._start = start
        self._limits = limits
        self._cluster = cluster
        self._leaving: dict[str, int] = {}
        """Constructor hosts that the newest mesh does not have, and its first step."""
        self._reached_at: dict[str, float] = {}
        """When the stream had come to that step."""

    def reshard(self, request: Reshard) -> Resharded:
        """Change the mesh to one with its own number of hosts; what fails leaves everything as it was.

        Raises:
            SpecError: for hosts that the cluster or the mesh does not have, or a mesh that the planner refuses.
        """
        hosts, ranks = request.hosts or 1, ClientPlaceTree.from_sizes(request.mesh).world_size
        if not self._cluster:
            raise SpecError(
                f"reshard: hosts is {hosts}, and all roles of this service run on one host; no rank would be served "
                "elsewhere. Leave hosts= out, or launch with runtime='ray'."
            )
        if hosts > ranks:
            raise SpecError(
                f"reshard: hosts is {hosts}, and the mesh has {ranks} ranks; some hosts would have none. Give at most "
                f"{ranks}."
            )
        with self._table.moving:
            before, came = dict(self._table.hosts), list[RoleInstance]()
            try:
                self._provide(hosts, came)
                self._publish(before | {ranks: hosts})
                done: Resharded = self._table.peers.insist(PLANNER, "ask", request)
            except BaseException:
                for one in came:
                    self._end(one)
                self._publish(before)
                raise
            self._let_leave(done.step, hosts)
            return done

    def _let_leave(self, first_step: int, hosts: int) -> None:
        running = self._table.running("constructor")
        self._leaving = {one.site.name: first_step for one in running if one.site.number >= hosts}
        self._reached_at = {}

    def resume(self, hosts: Mapping[int, int], newest: tuple[int, int] | None) -> None:
        """Start the hosts that meshes were given, in a service that recovers; ranks of one that fails have no data.

        Those of older meshes are needed until the stream has come to the newest one, whose first step and hosts are
        given; then they leave.
        """
        if newest is None or not self._cluster:
            return
        try:
            self._provide(max(hosts.values()), [])
        except OverlordError as error:
            logger.warning("not all hosts of the mesh are there again: %s", error)
        self._publish(hosts)
        self._let_leave(*newest)

    def leaves(self, one: RoleInstance, served: int, now: float) -> bool:
        """Whether no client needs a host any more, so that it is ended, and is not replaced when it is lost.

        Args:
            one: The host.
            served: The newest step that any client has come to.
            now: The supervisor's clock.
        """
        first_step = self._leaving.get(one.site.name)
        if first_step is None or served < first_step:
            return False
        reached_at = self._reached_at.setdefault(one.site.name, now)
        return not one.clients and (one.attached or now - reached_at > RETURN_S)

    def end_left(self, served: int, now: float) -> None:
        """End the hosts that no client needs any more."""
        for one in self._table.running("constructor"):
            if self.leaves(one, served, now):
                self._end(one)
                logger.info("the %s has no ranks any more, and was ended", one.site.name)

    def forget(self, one: RoleInstance) -> None:
        """Note that a host that was leaving is gone."""
        self._leaving.pop(one.site.name, None)
        self._reached_at.pop(one.site.name, None)
        self._engine.release(one.site)

    def _publish(self, hosts: Mapping[int, int]) -> None:
        with self._table.lock:
            if self._table.hosts != hosts:
                self._table.hosts = dict(hosts)
                self._table.publish()

    def _provide(self, hosts: int, came: list[RoleInstance]) -> None:
        """Start the constructor hosts that are missing."""
        running = {one.site.number: one for one in self._table.running("constructor")}
        like = next(iter(running.values())).site
        for number in sorted(set(range(hosts)) - running.keys()):
            taken = {one.site.node.id for one in self._table.running("constructor")}
            site = self._engine.reserve(dataclasses.replace(like, number=number, ranks=()), taken)
            with self._table.lock:
                one = self._table.roles.setdefault(
                    site.name, RoleInstance(site, Restarts(MOST_TRIES, self._limits.role_steady), 0, asleep=True)
                )
                one.generation += 1
            try:
                peer, pid = self._start(one, site)
            except BaseException:
                self._engine.release(site)
                raise
            self._table.came_up(one, peer, pid)
            came.append(one)
            logger.info("the %s was started on %s", site.name, one.site.node.name)

    def _end(self, one: RoleInstance) -> None:
        with self._table.lock:
            peer, pid = one.peer, one.pid
            self._table.went_down(one, asleep=True)
            self._table.publish()
        if peer is not None:
            self._engine.kill(peer, one.site, pid)
        self.forget(one)
