"""One client's connection to the constructor host of its machine: views go by descriptor of shared memory."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from overlord.core import client_messages as msg
from overlord.core.client_messages import Attach, Attached, Reply, StepHeader, Views, mesh_from_text
from overlord.errors import SpecError
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.planner_host import Plans, left_behind
from overlord.runtimes.hosts.step_server import Built, StepServer, view_facts
from overlord.runtimes.transport.listener import answer_requests
from overlord.runtimes.transport.shared_memory import Arena

TWICE_S = 2.0
"""How long a rank that attaches waits for a predecessor that is being killed."""


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What the connections of one host share."""

    planner: Plans
    server: StepServer
    constructor: DataConstructor
    arena: Arena
    budget_bytes: int
    served: Callable[[int], None]
    """Told the step that a client has come to."""
    connections: dict[int, ClientConnection] = field(default_factory=dict["int", "ClientConnection"])
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
        self._lease_bytes = context.budget_bytes // (2 * max(len(here), 1))
        if begin.first_step is None:
            return Attached(begin, self._lease_bytes)
        self._pid, found = request.pid, begin
        twice = self._refuse_second(rank)
        if at is not None and request.lineage != begin.lineage and at != begin.first_step:
            raise left_behind(f"step {at}, where rank {rank} is,", begin.first_step)
        if at is None and request.step is not None:
            context.planner.tell(context.server.news())  # also which ranks have gone
            joined = context.planner.ask(msg.Join(rank, request.step, request.state))
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
            facts = one.views.get(self._rank)
            if facts is None:  # a rank that came after it was built
                facts = view_facts(self._context.constructor, self._rank, one.plan, one.packed)
            new = segment.number not in self._known
            if new:
                self._known.add(segment.number)
                fds.append(segment.fd)
            views[microbatch] = msg.View(lease, segment.number, segment.capacity, new, facts)
        names = None
        if header is not None:
            if header.names != self._names:  # they go along when there are others than before
                names = self._names = header.names
            header = replace(header, names=())
        return Views(header, names, views, gone), fds
