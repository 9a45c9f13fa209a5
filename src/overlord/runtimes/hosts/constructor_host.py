"""A constructor host: builds the views of the ranks of one machine.

With threads it builds ahead, and serves trainers on a Unix socket; without, it builds when a client of its own process
asks.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from overlord.core import client_messages as msg
from overlord.core.client_messages import Attach, Attached, Reply, Request, StepHeader, Views, mesh_from_text
from overlord.core.memory_account import MemoryAccount
from overlord.core.messages import STORE_DOWN, AddedSource, Close, DropSource, FirstStep, HostNews, Nothing, Waiting
from overlord.core.place_tree import ranks_of_host
from overlord.core.plan import LoadingPlan
from overlord.errors import OverlordError, ReportMissing, SpecError, error_named
from overlord.roles.client import RankView
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.peers import RemoteLoaders, RemotePlanner
from overlord.runtimes.hosts.role_host import RoleHost
from overlord.runtimes.hosts.shared_planner import left_behind
from overlord.runtimes.hosts.step_server import Built, RanksOf, StepServer
from overlord.runtimes.launching.add_source import without_last_source
from overlord.runtimes.launching.deployment import make_constructor
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.transport.listener import answer_requests, listen, socket_name
from overlord.runtimes.transport.shared_memory import Arena
from overlord.transforms.microbatches.per_microbatch import PackedMicrobatch
from overlord.transforms.microbatches.step_samples import StepSamples

# --------------------------------------------------------------------------------------------------------------
# One client's connection to the constructor host of its machine: views go by descriptor of shared memory.


MOST_PACKERS = 8
"""Microbatches that are packed at once at most. With 4 for 16 workers that decode their images, an eighth of them have
nothing to do, and with 10 no more of them have work than with 7. Text is only copied: more threads wait more."""
TWICE_S = 2.0
"""How long a rank that attaches waits for a predecessor that is being killed."""


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What the connections of one host share."""

    planner: RemotePlanner
    server: StepServer
    constructor: DataConstructor
    arena: Arena
    memory: MemoryAccount
    served: Callable[[int], None]
    """Told the step that a client has come to."""
    connections: dict[int, ClientConnection] = field(default_factory=dict)
    """The connection of every rank that is attached."""


class ClientConnection:
    """One client's connection."""

    def __init__(self, context: ClientContext, connection: socket.socket) -> None:
        self._context = context
        self._connection = connection
        self._rank, self._pid = -1, 0
        self._client: int | None = None
        """Its number among the attached clients."""
        self._leases: dict[int, int] = {}
        self._next_lease = 0
        self._known: set[int] = set()
        self._moved_to: int | None = None
        self._lease_bytes = 0
        self._seen_gone = 0
        self._names: tuple[str, ...] = ()

    def run(self) -> None:
        """Answer until the client is gone."""
        answer_requests(self._connection, self._answer, self._after)

    def close(self) -> None:
        """Free what the client held."""
        for number in self._leases.values():
            self._context.arena.release(number, reuse=False)  # a trainer that detached may keep its arrays
        self._leases.clear()
        if self._client is not None:
            if self._context.connections.get(self._rank) is self:
                del self._context.connections[self._rank]
            self._context.server.detach(self._client)
            self._context.planner.tell(self._context.server.news())

    def _answer(self, request: Any) -> tuple[Reply, Sequence[int]]:
        for lease in request.release:
            number = self._leases.pop(lease, None)
            if number is not None:
                self._context.arena.release(number)
        match request:
            case Attach():
                return self._attach(request), []
            case msg.Leave() | msg.OpenStep() | msg.LookAhead() | msg.TakeMicrobatch():
                if self._client is None:
                    raise SpecError(f"{type(request).__name__} came before Attach; this is not an overlord client.")
                return self._serve(self._client, request)
        if isinstance(request, msg.GetStatus):
            self._context.planner.tell(self._context.server.news())
        return self._context.planner.ask(request), []

    def _serve(
        self, client: int, request: msg.Leave | msg.OpenStep | msg.LookAhead | msg.TakeMicrobatch
    ) -> tuple[Reply, Sequence[int]]:
        """Answer what only an attached client may ask."""
        server = self._context.server
        match request:
            case msg.Leave():
                server.leave(client, request.next_step)
                return msg.Done(), []
            case msg.OpenStep():
                opened = server.open_step(client, request.step)
                if opened is None:
                    return Views(), []
                self._moved_to = request.step
                return self._hand_over(opened[1], opened[0])
            case msg.LookAhead():
                opened = server.look_ahead(client, request.step, request.at, self._lease_bytes)
                # What follows from a move comes before the answer here: the client does not wait for it, and it may
                # fill the socket until the client comes back.
                self._moved_to = request.at
                self._after()
                return (Views(), []) if opened is None else self._hand_over(opened[1], opened[0])
            case msg.TakeMicrobatch():
                built = server.microbatch(client, request.step, request.microbatch)
                return self._hand_over({} if built is None else {request.microbatch: built})

    def _after(self) -> None:
        if self._moved_to is not None:
            self._context.server.moved()
            self._context.served(self._moved_to)
            self._moved_to = None

    def _attach(self, request: Attach) -> Attached | msg.RanksMissing:
        context, rank, at = self._context, request.rank, request.at
        begin = context.planner.ask(msg.FindBeginning(rank))
        here = context.server.ranks_of(mesh_from_text(begin.mesh))
        self._lease_bytes = context.memory.lease_bytes(len(here))
        if begin.first_step is None:
            return Attached(begin, self._lease_bytes)
        self._pid, found = request.pid, begin
        twice = self._refuse_second(rank)
        if at is not None and request.lineage != begin.lineage and at != begin.first_step:
            raise left_behind(f"step {at}, where rank {rank} is,", begin.first_step)
        if at is None and request.step is not None:
            for other in list(context.connections.values()):
                if other.hung_up:  # its thread may wait for a step, and does not notice
                    context.server.lose(other.client)
            joined = context.planner.join(msg.Join(rank, request.step, request.state), context.server.news())
            if isinstance(joined, msg.RanksMissing):
                return joined
            found, at = joined, request.step
        self._rank = rank
        self._client, reached = context.server.attach(rank, begin.first_step, at)
        if not twice:  # the first client of a process keeps the rank for as long as it is attached
            context.connections[rank] = self
        context.planner.tell(context.server.news())
        return Attached(found, self._lease_bytes, reached, twice)

    def _refuse_second(self, rank: int) -> bool:
        """Refuse a rank that another process has; return whether the process of this client has it already.

        A process that has just been killed is given a moment to go. One process may have several clients of a rank, to
        report on one of them while another one waits for a step.

        The other connection is looked at by itself: its thread may wait for a step, and does not notice that its client
        is gone.
        """
        until = time.monotonic() + TWICE_S
        while (other := self._context.connections.get(rank)) is not None and other is not self and not other.hung_up:
            if other.pid == self._pid:
                return True
            if time.monotonic() > until:
                raise SpecError(
                    f"rank {rank} is attached to this service already, by process {other.pid}; two processes would "
                    "train on the same samples. Give each process its own rank, and close a client before another one "
                    "takes its rank. A torch.utils.data.DataLoader runs what it wraps once in each of its workers: "
                    "give it num_workers=0, as the service reads ahead by itself."
                )
            time.sleep(0.05)
        return False

    @property
    def client(self) -> int | None:
        """The number of the client among those that are attached."""
        return self._client

    @property
    def pid(self) -> int:
        """The process of the client."""
        return self._pid

    @property
    def hung_up(self) -> bool:
        """Whether the client is gone, or its connection is being closed."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLRDHUP)
        except ValueError:
            return True  # it is closed here too
        return bool(poll.poll(0))

    def _hand_over(self, built: Mapping[int, Built], header: StepHeader | None = None) -> tuple[Views, Sequence[int]]:
        """Describe the views of some microbatches; descriptors of segments the client has not seen go along."""
        arena = self._context.arena
        gone: list[int] = []
        if arena.gone != self._seen_gone:  # rare, and looking costs more than the rest of an answer
            self._seen_gone = arena.gone
            gone = [number for number in self._known if not arena.alive(number)]
            self._known.difference_update(gone)
        views: dict[int, msg.View] = {}
        fds: list[int] = []
        for microbatch, one in built.items():
            segment, lease = one.segment, self._next_lease
            self._next_lease += 1
            self._leases[lease] = segment.number
            new = segment.number not in self._known
            if new:
                self._known.add(segment.number)
                fds.append(segment.fd)
            views[microbatch] = msg.View(lease, segment.number, segment.capacity, new, one.views[self._rank])
        names = None
        if header is not None:
            if header.names != self._names:  # they go along when there are others than before
                names = self._names = header.names
            header = replace(header, names=())
        return Views(header, names, views, gone), fds


# --------------------------------------------------------------------------------------------------------------


R = TypeVar("R")


class ClientServer:
    """The DataConstructor of one machine with its shared memory and its socket."""

    def __init__(
        self,
        options: ServiceOptions,
        constructor: DataConstructor,
        planner: RemotePlanner,
        *,
        ranks_of: RanksOf,
        memory: MemoryAccount,
        role: str,
        read_bytes: Callable[[], int],
        successor: bool = False,
        served: Callable[[int], None] | None = None,
    ) -> None:
        arena = Arena()
        self._planner = planner
        self._server = StepServer(
            constructor,
            planner,
            arena,
            ranks_of=ranks_of,
            prefetch=options.prefetch,
            memory=memory,
            read_bytes=read_bytes,
            packers=min(2 + options.threads // (3 if constructor.decodes else 8), MOST_PACKERS),
            early=not successor and not options.recover,
        )
        memory.add("views", lambda: arena.used_bytes, role)
        memory.add("samples", lambda: self._server.sample_bytes, role)
        self._context = ClientContext(planner, self._server, constructor, arena, memory, served or (lambda step: None))
        self.ends_for: OverlordError | None = None
        """What clients that wait are told when it is closed; by default that the service was."""
        self._server.start()

    @property
    def clients(self) -> int:
        """How many are attached."""
        return len(self._context.connections)

    def listen(self, path: Path) -> AbstractContextManager[None]:
        """Serve clients on a socket while the context is open."""
        return listen(path, self._serve)

    def tell_progress(self) -> None:
        """Tell the planner how far the clients are."""
        self._planner.tell(self._server.news())

    def close(self) -> None:
        """End the threads; tell the planner how far the clients came, and let go of the shared memory."""
        try:
            self._server.close(self.ends_for)
            self.tell_progress()
        finally:
            self._context.arena.close()

    def _serve(self, connection: socket.socket) -> None:
        client = ClientConnection(self._context, connection)
        try:
            client.run()
        finally:
            client.close()


# --------------------------------------------------------------------------------------------------------------
# The constructor host of one trainer host, asked by messages.


STORE_WAIT_S = 0.25
"""How long a client without threads waits before it asks again for a step that waits for the store."""


class ConstructorHost(RoleHost):
    """The constructor host of one trainer host."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._served = -1
        self._progress = threading.Event()

    @property
    def clients(self) -> int:  # type: ignore[override]
        """How many clients are attached."""
        return self._host.clients if hasattr(self, "_host") else 0

    def await_progress(self, timeout_s: float) -> int:
        self._progress.wait(timeout_s)
        self._progress.clear()
        return self._served

    def _note_served(self, step: int) -> None:
        if step > self._served:
            self._served = step
            self._progress.set()

    def begin(self, message: FirstStep) -> Nothing:
        """Build ahead, and listen for the trainers of this host."""
        workers = self._workers_for("workers")
        planner = RemotePlanner(self._peers, self._blobs, self._site["number"], message.step)
        loaders = RemoteLoaders(self._peers, planner)
        prepared, number = self._prepared, self._site["number"]
        self._constructor = make_constructor(prepared, loaders, workers)
        host = ClientServer(
            self._options,
            self._constructor,
            planner,
            ranks_of=lambda tree: ranks_of_host(number, self._hosts_of(tree.world_size), tree.world_size),
            memory=self._memory,
            role=self._peers.me[0],
            # The account has what loaders of this process hold.
            read_bytes=lambda: 0 if "read ahead" in self._memory else loaders.buffer_bytes,
            successor=self._peers.me[1] > 1,
            served=self._note_served,
        )
        self._host = host
        self._ends.callback(host.close)
        self._ends.enter_context(host.listen(self._claim_folder() / socket_name(number, self._site["hosts"])))
        return Nothing()

    def tell_progress(self, message: Nothing) -> Nothing:
        """Tell the planner how far the clients of this host are."""
        if hasattr(self, "_host"):
            self._host.tell_progress()
        return Nothing()

    def close(self, message: Close) -> Nothing:
        """End everything that runs here; clients that wait are told why."""
        if message.why is not None and hasattr(self, "_host"):
            self._host.ends_for = error_named(*message.why)
        return super().close(message)

    def add_source(self, message: AddedSource) -> Nothing:
        """Learn of a source that comes: how its media are decoded."""
        if self._learn_source(message):
            self._constructor.add_source(self._prepared.transforms[-1].decoder)
        return Nothing()

    def drop_source(self, message: DropSource) -> Nothing:
        """Forget a source that the planner did not take on."""
        if self._prepared.job.names[-1] == message.name:
            self._prepared = without_last_source(self._prepared)
            self._constructor.drop_last_source()
        return Nothing()


class InlineConstructor(ConstructorHost):
    """A constructor host without threads: it builds when it is asked, for clients of its own process."""

    def begin(self, message: FirstStep) -> Nothing:
        """Make the DataConstructor."""
        self._planner = RemotePlanner(self._peers, self._blobs, self._site["number"], message.step)
        loaders = RemoteLoaders(self._peers, self._planner)
        self._constructor = make_constructor(self._prepared, loaders, self._workers_for("workers"))
        self._plans: OrderedDict[int, LoadingPlan] = OrderedDict()
        self._samples: tuple[int, StepSamples] | None = None
        self._looked_at: tuple[int, ...] | None = None
        self._packed: OrderedDict[tuple[int, int, int], PackedMicrobatch] = OrderedDict()
        self._packed_bytes = 0
        self._labels: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._memory.add("microbatches", lambda: self._packed_bytes, self._peers.me[0])
        return Nothing()

    def look_at(self, ranks: Collection[int]) -> None:
        """Gather only what some ranks need from now on; media are decoded when they are packed."""
        self._looked_at, self._samples, self._packed_bytes = tuple(sorted(ranks)), None, 0
        self._packed.clear()

    def open_step(self, rank: int, step: int) -> StepHeader | None:
        """Tell a rank what a step consists of; None past the end."""
        if self._looked_at is not None and rank not in self._looked_at:
            raise SpecError(f"rank {rank} was not given to look_at, so nothing of it is read. Give it too.")
        self._positions[rank] = self._reached[rank] = step
        self._forget_passed()
        plan, next_mesh = self._plan(step), self._planner.next_mesh
        if plan is None or rank >= plan.mesh.world_size:
            return None
        last = step + self._options.prefetch if self._environment.plans_ahead else step + 1
        for ahead in range(step + 1, last):
            if not isinstance(self._ask_plan(ahead), LoadingPlan):
                break
        if step not in self._labels:
            self._labels[step] = self._gathered(plan).labels
        header = self._constructor.header_of(rank, plan, self._labels[step])
        return replace(header, next_mesh_text=next_mesh)

    def microbatch(self, rank: int, step: int, microbatch: int) -> RankView:
        """Build a rank's view of a microbatch; the last few are remembered."""
        plan = self._plans.get(step) or self._plan(step)
        assert plan is not None
        place = self._constructor.bin_of(rank, plan, microbatch)
        if place is None:
            return RankView({}, {})
        key = (step, *place)
        if key not in self._packed:
            takes, seen = self._constructor.takes, self._looked_at
            ranks = None if seen is None else tuple(one for one in seen if takes(one, plan, place))
            packed = self._constructor.constructor_do_plan(plan, self._gathered(plan), *place, _new_buffer, ranks)
            self._packed[key] = packed
            self._packed_bytes += packed.buffer.nbytes
            while len(self._packed) > 1 and self._packed_bytes > self._memory.room("microbatches"):
                self._packed_bytes -= self._packed.popitem(last=False)[1].buffer.nbytes
        names, scalars = self._constructor.view_of(rank, plan, self._packed[key])
        arrays = self._packed[key].named()
        return RankView({key: arrays[name] for key, name in names.items()}, scalars)

    def ask(self, request: Request[R]) -> R:
        """Pass on what a client asks or tells."""
        return self._planner.ask(request)

    def left(self, rank: int, next_step: int) -> None:
        """Tell how far a client came that goes."""
        if self._positions.pop(rank, None) is not None:
            self._reached[rank] = next_step
            self._planner.tell(self._news())

    def close(self, message: Close) -> Nothing:
        """Let go of everything; clients may keep what they were given."""
        if hasattr(self, "_packed"):
            self._packed.clear()
        return super().close(message)

    def _news(self) -> HostNews:
        held = self._memory.held("microbatches")
        return HostNews(dict(self._reached), dict(self._positions), memory=held)

    def _forget_passed(self) -> None:
        """Forget what every client has passed."""
        slowest = min(self._positions.values())
        for key in [key for key in self._packed if key[0] < slowest]:
            self._packed_bytes -= self._packed.pop(key).buffer.nbytes
        self._labels = {step: count for step, count in self._labels.items() if step >= slowest}

    def _gathered(self, plan: LoadingPlan) -> StepSamples:
        if self._samples is None or self._samples[0] != plan.step:
            gather = self._constructor.gather(plan, self._looked_at, open_all=self._looked_at is None)
            self._samples = (plan.step, gather())
        return self._samples[1]

    def _plan(self, step: int) -> LoadingPlan | None:
        found = self._ask_plan(step)
        if isinstance(found, Waiting):
            raise ReportMissing(
                f"step {step} needs the report of step {found.missing}; nothing can be planned before. Call "
                f"client.report({found.missing}, ..) on one rank before asking for step {step}."
            )
        return found

    def _ask_plan(self, step: int) -> LoadingPlan | Waiting | None:
        found = self._planner.plan(step, self._news())
        while isinstance(found, Waiting) and found.missing == STORE_DOWN:  # as a trainer waits beyond its prefetch
            self._peers.pause(self._peers.version, STORE_WAIT_S)
            found = self._planner.plan(step, self._news())
        if isinstance(found, LoadingPlan):
            self._plans[step] = found
            while len(self._plans) > self._options.prefetch + 2:
                self._plans.popitem(last=False)
        return found


def _new_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)
