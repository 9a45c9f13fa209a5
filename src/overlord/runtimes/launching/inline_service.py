"""The inline runtime: the roles of a service as objects of this process, stepped in the caller; nothing runs beside it.

The same roles, messages and supervisor as with processes or on Ray, by direct calls.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from overlord.core.client_messages import (
    Beginning,
    FindBeginning,
    GetState,
    GetStatus,
    Join,
    Report,
    Request,
    StepHeader,
    mesh_from_text,
)
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import is_whole
from overlord.errors import ClosedError, Rewound
from overlord.job.specs import Job
from overlord.roles.client import Client, RankView
from overlord.runtimes.client_feed import check_step
from overlord.runtimes.hosts.constructor_host import InlineConstructor
from overlord.runtimes.hosts.peers import PLANNER, Blobs
from overlord.runtimes.hosts.role_host import RoleEnvironment, RoleHost
from overlord.runtimes.hosts.shared_planner import left_behind
from overlord.runtimes.launching.cluster_placement import Site, place_here
from overlord.runtimes.launching.resume import canonical, peek, with_added_sources
from overlord.runtimes.launching.service_options import Progress, ServiceOptions
from overlord.runtimes.supervision.supervisor import Supervisor
from overlord.runtimes.transport.direct import DirectEngine
from overlord.runtimes.transport.peer_client import PeerClient
from overlord.runtimes.transport.role_endpoint import ROLES
from overlord.stores.places import MemoryPlace

CONSTRUCTOR = "constructor host 0"

R = TypeVar("R")
T = TypeVar("T")


class InlineService:
    """A service whose roles are objects of this process.

    Args:
        job: The job.
        options: The launch.
        progress: Told how far the launch is.
        environment: What the roles take from this process; by default everything is done by the caller.
    """

    address = None
    pid = os.getpid()
    blobs: Blobs | None = None
    """How plans travel: as they are."""

    def __init__(
        self,
        job: Job,
        options: ServiceOptions,
        progress: Progress | None = None,
        environment: RoleEnvironment | None = None,
    ) -> None:
        self._memory = None if options.store else MemoryPlace()  # a service in this process cannot outlive it either
        self._options = options if self._memory is None else dataclasses.replace(options, store=self._memory.name)
        self._job = job
        self._environment = environment
        self._progress = progress or (lambda what, done, of: None)
        self._closed = False
        self._supervisor: Supervisor | None = None
        self.restarts = -1
        """How often the service was started again: to go back to an earlier step."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # -- what the owner asks ----------------------------------------------------------------------

    def client(self, rank: int, step: int | None = None, state: Mapping[str, Any] | None = None) -> Client:
        """Return the client of one rank, at a step where one is given: there are no others that could be waited for."""
        check_step(step)
        found = self.ask(FindBeginning(int(rank) if is_whole(rank) else -1))
        if step is not None and found.first_step is not None:
            request = Join(int(rank), int(step), None if state is None else dict(state), alone=True)
            try:
                joined = self.ask(request)
            except Rewound:
                self.crash()  # the next request starts it again, at that step
                joined = self.ask(request)
            assert isinstance(joined, Beginning), "it waits for no other rank"
            found = joined
        return Client(Feed(self, rank, mesh_from_text(found.mesh), found.lineage), rank, found.first_step or 0)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met; there are no hosts that could be lost."""
        return self.ask(GetStatus()).content | {"hosts": [], "faults": [], "waits": []}

    def close(self) -> None:
        """End the roles and remove what is temporary."""
        if not self._closed:
            self._closed = True
            try:
                self._end()
            finally:
                self._memory = None

    @property
    def supervisor(self) -> Supervisor:
        """The roles; started again where they were ended to go back."""
        if self._closed:
            raise ClosedError("the service is closed; launch it again.")
        if self._supervisor is None:
            try:
                self._start()
            except BaseException:
                self._end()
                raise
        assert self._supervisor is not None
        return self._supervisor

    def role(self, name: str) -> Any:
        """Return the object of a role."""
        return getattr(self.supervisor.peer(name), "role", None)

    def ask(self, request: Request[R]) -> R:
        """Ask the planner."""
        return self.supervisor.ask(request)

    # -- what clients ask -------------------------------------------------------------------------

    def as_constructor(self, work: Callable[[InlineConstructor], T]) -> T:
        """Ask the constructor host."""
        return work(self.role(CONSTRUCTOR))

    def look_at(self, ranks: Collection[int]) -> None:
        """Read only what some ranks get."""
        self.as_constructor(lambda host: host.look_at(ranks))

    def write_due(self) -> None:
        """Write to the store what is due, between two steps."""
        self.role(PLANNER).host.write_if_due()

    # -- starting and ending ----------------------------------------------------------------------

    def crash(self) -> None:
        """End the roles; the next call starts them again."""
        self._end()

    def _end(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()

    def _start(self) -> None:
        options = dataclasses.replace(self._options, recover=self._options.recover or self.restarts >= 0)
        numbering = peek(options, str(options.store))
        self._given = dataclasses.replace(options, numbering=numbering)
        self.restarts += 1
        names, world = canonical(with_added_sources(self._job, numbering), numbering).names, options.mesh.world_size
        sites = place_here(options.cluster, world_size=world, names=names, threads=1)
        self._supervisor = self._make_supervisor(sites)
        self._supervisor.begin(self._progress)

    def _make_supervisor(self, sites: Sequence[Site]) -> Supervisor:
        engine = DirectEngine(self._make_role, environment=self._environment)
        return Supervisor(engine, sites, self._given, idle=engine.pass_time)

    def _make_role(self, site: Mapping[str, Any], peers: PeerClient, environment: RoleEnvironment) -> RoleHost:
        kind = {**ROLES, "constructor": InlineConstructor}[site["role"]]
        return kind(self._job, self._given, str(self._options.store), site, peers, self.blobs, environment)


class Feed:
    """A rank's connection to its constructor host."""

    def __init__(self, service: InlineService, rank: int, mesh: ClientPlaceTree, lineage: int) -> None:
        self._service = service
        self._rank = rank
        self._lineage = lineage
        self._restarts = service.restarts
        self.mesh = mesh

    def open_step(self, step: int) -> StepHeader | None:
        """Return what a step consists of; None past the end."""
        self._follow(f"step {step}, where rank {self._rank} is,", step)
        header = self._service.as_constructor(lambda host: host.open_step(self._rank, step))
        self._service.write_due()
        return header

    def microbatch(self, step: int, microbatch: int) -> RankView:
        """Return the rank's view of a microbatch."""
        return self._service.as_constructor(lambda host: host.microbatch(self._rank, step, microbatch))

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Tell the planner of a step."""
        self._follow(f"the report of step {step}", step)
        self._ask(Report(step, metrics))

    def state(self, step: int) -> dict[str, Any]:
        """Return the state before a step."""
        return self._ask(GetState(step)).content

    def close(self, next_step: int) -> None:
        """Tell how far the client came."""
        try:
            self._service.as_constructor(lambda host: host.left(self._rank, next_step))
        except ClosedError:
            pass  # a client may go after its service

    def _ask(self, request: Request[R]) -> R:
        return self._service.as_constructor(lambda host: host.ask(request))

    def _follow(self, what: str, step: int) -> None:
        """Follow a service that was started again; one that went back only from the very step that it went back to."""
        supervisor = self._service.supervisor
        if self._restarts != self._service.restarts:
            lineage = self._ask(FindBeginning(self._rank)).lineage
            if lineage != self._lineage and step > supervisor.first_step:
                raise left_behind(what, supervisor.first_step)
            self._restarts, self._lineage = self._service.restarts, lineage
