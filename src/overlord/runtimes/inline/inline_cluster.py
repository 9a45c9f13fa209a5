"""A supervised service in this process: the roles of a cluster as objects, for tests of what happens when they fail.

The same roles, messages and supervisor as on processes or on Ray; constructor hosts build in the caller instead of
ahead of it. Time is that of the clock that is given, and passes while somebody waits.
"""

from __future__ import annotations

import dataclasses
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.spec_errors import is_whole
from overlord.errors import ClosedError, Fenced, OverlordError, ReportMissing, Rewound, ServiceLost
from overlord.job.specs import Job
from overlord.roles.client import Client
from overlord.roles.views import RankView, StepHeader
from overlord.runtimes.client_feed import check_step
from overlord.runtimes.hosts.cluster_role import ClusterRole, Means
from overlord.runtimes.hosts.cluster_roles import ROLES
from overlord.runtimes.hosts.peers import RemoteLoaders, RemotePlanner
from overlord.runtimes.hosts.planner_host import STORE_DOWN, HostNews, Waiting
from overlord.runtimes.inline.inline_engine import InlineEngine, InlinePeer
from overlord.runtimes.inline.inline_messages import Clock, Gone, Weather
from overlord.runtimes.launching.cluster_placement import ClusterOptions, Node, place
from overlord.runtimes.launching.deployment import make_constructor
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.runtimes.launching.owner_asks import OwnerAsks
from overlord.runtimes.supervision.cleanup import remove_scratch, scratch_folder
from overlord.runtimes.supervision.host_changes import spares_of
from overlord.runtimes.supervision.supervisor import Supervisor, assignment_of, unbundled
from overlord.runtimes.transport.bundle import pack
from overlord.runtimes.transport.frames import Frame, frame_of, open_frame
from overlord.runtimes.transport.process_engine import InlineBlobs
from overlord.runtimes.transport.switchboard import PeerGone, Switchboard
from overlord.transforms.microbatches.per_microbatch import PackedMicrobatch
from overlord.transforms.microbatches.step_samples import StepSamples
from overlord.transforms.samples.per_sample import Isolate

CONSTRUCTOR = "constructor host 0"
START_TRIES = 64
"""How often a service that was killed is launched again, when roles die while it starts."""
KEPT_PACKED = 64
"""Microbatches that a constructor host remembers."""

T = TypeVar("T")


class InlineConstructor(ClusterRole):
    """A constructor host that builds when it is asked, and plans as far ahead as one with threads does."""

    def begin(self, frame: Frame) -> Frame:
        """Make the DataConstructor."""
        first_step = int(open_frame(frame)[0]["first_step"])
        self._planner = RemotePlanner(self._board, self._blobs, self._site["number"], first_step)
        self._constructor = make_constructor(
            self._prepared, RemoteLoaders(self._board, self._planner), self._workers_for("workers")
        )
        self._plans: OrderedDict[int, LoadingPlan] = OrderedDict()
        self._samples: OrderedDict[int, StepSamples] = OrderedDict()
        self._packed: OrderedDict[tuple[int, int, int], PackedMicrobatch] = OrderedDict()
        self._reached: dict[int, int] = {}
        self._labels: dict[int, int] = {}
        return frame_of({})

    def add_source(self, frame: Frame) -> Frame:
        """Learn of a source that comes: how its media are decoded."""
        if self._learn_source(frame):
            self._constructor.add_source(self._prepared.transforms[-1].decoder)
        return frame_of({})

    def open_step(self, rank: int, step: int) -> StepHeader | None:
        """Tell a rank what a step consists of; None past the end."""
        self._reached[rank] = step
        plan = self._plan(step)
        if plan is None or rank >= plan.mesh.world_size:
            return None
        for ahead in range(step + 1, step + self._options.prefetch):
            if isinstance(self._ask_plan(ahead), Waiting):
                break
        if step not in self._labels:
            self._labels[step] = self._gathered(plan).labels
            self._labels = {s: count for s, count in self._labels.items() if s >= min(self._reached.values())}
        return self._constructor.header_of(rank, plan, self._labels[step])

    def _gathered(self, plan: LoadingPlan) -> StepSamples:
        if plan.step not in self._samples:
            self._samples[plan.step] = self._constructor.gather(plan, open_all=True)()
            while len(self._samples) > 1:
                self._samples.popitem(last=False)
        return self._samples[plan.step]

    def microbatch(self, rank: int, step: int, microbatch: int) -> RankView:
        """Build a rank's view of a microbatch."""
        plan = self._plan(step)
        assert plan is not None
        bin_of = self._constructor.bin_of(rank, plan, microbatch)
        if bin_of is None:
            return RankView({}, {})
        key = (step, *bin_of)
        if key not in self._packed:
            samples = self._gathered(plan)
            self._packed[key] = self._constructor.constructor_do_plan(plan, samples, *bin_of, _new_buffer)
            while len(self._packed) > KEPT_PACKED:
                self._packed.popitem(last=False)
        packed = self._packed[key]
        names, scalars = self._constructor.view_of(rank, plan, packed)
        arrays = packed.named()
        return RankView({key: arrays[name] for key, name in names.items()}, scalars)

    def pass_on(self, message: dict[str, Any]) -> dict[str, Any]:
        """Pass on what a client asks or tells."""
        return self._planner.ask(message)

    def left(self, rank: int, next_step: int) -> None:
        """Tell how far a client came that goes."""
        self._reached[rank] = next_step
        self._planner.tell(HostNews(dict(self._reached)))

    def _plan(self, step: int) -> LoadingPlan | None:
        found = self._ask_plan(step)
        if isinstance(found, Waiting):
            raise ReportMissing(
                f"step {step} needs the report of step {found.missing}; nothing can be planned before. Call "
                f"client.report({found.missing}, ..) on one rank before asking for step {step}."
            )
        return found

    def _ask_plan(self, step: int) -> LoadingPlan | Waiting | None:
        if step in self._plans:
            return self._plans[step]
        found = self._planner.plan(step, HostNews(dict(self._reached), dict(self._reached)))
        while isinstance(found, Waiting) and found.missing == STORE_DOWN:  # as a trainer waits beyond its prefetch
            self._board.pause(self._board.version, 0.5)
            found = self._planner.plan(step, HostNews(dict(self._reached), dict(self._reached)))
        if isinstance(found, LoadingPlan):
            self._plans[step] = found
            while len(self._plans) > self._options.prefetch + 2:
                self._plans.popitem(last=False)
        return found


class InlineCluster(OwnerAsks):
    """A supervised service whose roles are objects of this process.

    Args:
        job: The job.
        options: The launch; its `cluster` says how many loader hosts there are, and which sources have shadows.
        clock: The time.
        weather: What happens to messages.
        isolate: Stands in for process workers.
    """

    address = None
    pid = os.getpid()

    def __init__(
        self, job: Job, options: LaunchOptions, clock: Clock, weather: Weather, isolate: Isolate | None = None
    ) -> None:
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # nothing of it must outlive this process
        self._scratch = None if options.store else scratch_folder(memory)
        self._options = dataclasses.replace(options, store=options.store or self._scratch)
        self._job = job
        self._clock = clock
        self._weather = weather
        self._isolate = isolate
        self._closed = False
        self.restarts = -1
        """How often the service itself was started again."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # -- the service ------------------------------------------------------------------------------

    def client(self, rank: int, step: int | None = None) -> Client:
        """Return the client of one rank, at a step where one is given: there are no others that could be waited for."""
        check_step(step)
        found = self._ask({"op": "begins", "rank": int(rank) if is_whole(rank) else -1})
        if step is not None and found["first_step"] is not None:
            message = {"op": "join", "rank": int(rank), "step": int(step), "alone": True}
            try:
                found = self._ask(message)
            except Rewound:
                self.crash()  # and the next who asks finds it launched again, at that step
                found = self._ask(message)
        mesh = ClientPlaceTree.parse(found["mesh"])
        return Client(_Feed(self, rank, mesh), rank, found["first_step"] or 0)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met."""
        return self._ask({"op": "status"})["status"]

    def close(self) -> None:
        """End the roles and remove what is temporary."""
        if not self._closed:
            self._closed = True
            if self.restarts >= 0 and not self.engine.crashed:
                self.supervisor.close()
            if self._scratch is not None:
                remove_scratch(self._scratch)

    # -- what clients ask -------------------------------------------------------------------------

    def as_constructor(self, work: Callable[[InlineConstructor], T]) -> T:
        """Ask the constructor host, and its successors if need be."""
        while True:
            self._revive()
            peer = self.supervisor.peer(CONSTRUCTOR)
            try:
                if isinstance(peer, InlinePeer) and peer.state == "up":
                    return self.engine.as_role(peer, lambda role=peer.role: work(role))  # type: ignore[misc]
                self.engine.pass_time(0.25)
            except (PeerGone, Gone):
                pass  # a successor comes, and is asked the same
            except (ServiceLost, Fenced):
                if self.supervisor.peer(CONSTRUCTOR) is peer:
                    raise
                self.engine.pass_time(0.25)  # it was cut off and ends, as its process would; a successor is there

    def crash(self) -> None:
        """Kill the service with everything in it; whoever asks next finds it launched again."""
        self.engine.crash()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        while True:
            self._revive()
            try:
                return self.supervisor.ask(message)
            except Gone:
                pass  # the service was killed meanwhile

    def _revive(self) -> None:
        if self._closed:
            raise ClosedError("the service is closed; launch it again.")
        tries = 0
        while self.engine.crashed:
            try:
                self._start()
            except (Gone, OverlordError) as error:  # somebody was killed while it started: as a launcher, try again
                tries += 1
                self.engine.crash()
                if tries > START_TRIES:
                    raise ServiceLost(f"the service did not start again, {tries} times in a row: {error}") from error

    def _start(self) -> None:
        given = dataclasses.replace(self._options, recover=self.restarts >= 0)
        sent = pack(self._job, given)
        job, options, self._bundle = unbundled(sent, Path(str(given.store)))
        self.restarts += 1
        cluster = options.cluster or ClusterOptions()
        world, count = options.mesh.world_size, len(job.sources)
        here = Node("here", "this process", cpus=1e6, here=True)
        self.sites = place([here], cluster, world_size=world, num_sources=count, loader_cpus=1)
        spares, per_host = spares_of(options, self.sites)
        self.engine = InlineEngine(self._clock, self._weather, self._make_role, isolate=self._isolate)
        self.supervisor = Supervisor(
            self.engine,
            self.sites,
            assignment_of(self.sites),
            heartbeat_s=options.heartbeat_s,
            spares=spares,
            per_host=per_host,
            clock=self._clock.now,
            spawn=self.engine.later,
            idle=self.engine.pass_time,
        )
        self.supervisor.begin(lambda what, done, of: None)
        self.engine.on_time = self.supervisor.tick

    def _make_role(self, site: Mapping[str, Any], board: Switchboard, means: Means) -> ClusterRole:
        kinds = {**ROLES, "constructor": InlineConstructor}
        return kinds[site["role"]](self._bundle, str(self._options.store), site, board, InlineBlobs(), means)


class _Feed:
    """A rank's door to its constructor host."""

    def __init__(self, cluster: InlineCluster, rank: int, mesh: ClientPlaceTree) -> None:
        self._cluster = cluster
        self._rank = rank
        self.mesh = mesh

    def open_step(self, step: int) -> StepHeader | None:
        return self._cluster.as_constructor(lambda host: host.open_step(self._rank, step))

    def microbatch(self, step: int, microbatch: int) -> RankView:
        return self._cluster.as_constructor(lambda host: host.microbatch(self._rank, step, microbatch))

    def report(self, step: int, metrics: dict[str, float]) -> None:
        self._ask({"op": "report", "step": step, "metrics": metrics})

    def state(self, step: int) -> dict[str, Any]:
        return self._ask({"op": "state", "step": step})["state"]

    def close(self, next_step: int) -> None:
        try:
            self._cluster.as_constructor(lambda host: host.left(self._rank, next_step))
        except ClosedError:
            pass  # a client may go after its service

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return self._cluster.as_constructor(lambda host: host.pass_on(message))


def _new_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)
