"""One client's connection to the constructor host of its machine: asks are JSON, views go by descriptor."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from overlord.errors import SpecError
from overlord.roles.client import StepHeader
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.planner_host import Plans, left_behind
from overlord.runtimes.hosts.step_server import Built, StepServer, view_text
from overlord.runtimes.transport.doors import answer_all
from overlord.runtimes.transport.shared_memory import Arena
from overlord.runtimes.transport.wire import header_to_json, mesh_from_text, to_text

SEATED = ("leave", "step", "ahead", "microbatch")
"""Messages that only a rank with a seat may send."""
TWICE_S = 2.0
"""How long a rank that attaches waits for a predecessor that is being killed."""
NOT_YET = '{"header":null,"views":{},"gone":[]}'
"""The answer to who looks ahead too early."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What conversations are held over: the same for all of a host."""

    planner: Plans
    server: StepServer
    constructor: DataConstructor
    arena: Arena
    budget_bytes: int
    served: Callable[[int], None]
    """Told the step that a client has come to."""
    talks: dict[int, Conversation] = field(default_factory=dict["int", "Conversation"])
    """The connection of every rank that is attached."""


class Conversation:
    """One client's connection."""

    def __init__(self, desk: Desk, connection: socket.socket) -> None:
        self._desk = desk
        self._connection = connection
        self._rank, self._pid = -1, 0
        self._seat: int | None = None
        self._leases: dict[int, int] = {}
        self._next_lease = 0
        self._known: set[int] = set()
        self._moved_to: int | None = None
        self._lease_bytes = 0
        self._seen_gone = 0
        self._names: tuple[str, ...] = ()

    def run(self) -> None:
        """Answer until the client is gone."""
        answer_all(self._connection, self._answer, self._after)

    def close(self) -> None:
        """Free what the client held."""
        for number in self._leases.values():
            self._desk.arena.release(number, reuse=False)  # a trainer that detached may keep its arrays
        self._leases.clear()
        if self._seat is not None:
            if self._desk.talks.get(self._rank) is self:
                del self._desk.talks[self._rank]
            self._desk.server.detach(self._seat)
            self._desk.planner.tell(self._desk.server.news())

    def _answer(self, message: dict[str, Any]) -> tuple[dict[str, Any] | str, list[int]]:
        op, server = message.get("op"), self._desk.server
        for lease in message.pop("release", ()):
            number = self._leases.pop(int(lease), None)
            if number is not None:
                self._desk.arena.release(number)
        if op == "hello":
            return self._hello(message), []
        if op not in SEATED:
            if op == "status":
                self._desk.planner.tell(server.news())
            return self._desk.planner.ask(message), []
        if self._seat is None:
            raise SpecError(f"the message {op!r} came before hello; this is not an overlord client.")
        if op == "leave":
            server.leave(self._seat, int(message["next_step"]))
            return {}, []
        if op == "step":
            step = int(message["step"])
            opened = server.open_step(self._seat, step)
            if opened is None:
                return {"header": None}, []
            self._moved_to = step
            return self._hand_over(opened[1], self._header_text(opened[0]))
        if op == "ahead":
            return self._look_ahead(self._seat, int(message["step"]), message.get("at"))
        number = int(message["microbatch"])
        built = server.microbatch(self._seat, int(message["step"]), number)
        return self._hand_over({number: built} if built is not None else {})

    def _header_text(self, header: StepHeader) -> str:
        """Write a step header; the names of the sources go along when there are others than before."""
        text = f'"header":{to_text(header_to_json(header))},'
        if header.names == self._names:
            return text
        self._names = header.names
        return f'"names":{to_text(header.names)},{text}'

    def _after(self) -> None:
        if self._moved_to is not None:
            self._desk.server.moved()
            self._desk.served(self._moved_to)
            self._moved_to = None

    def _look_ahead(self, seat: int, step: int, at: int | None) -> tuple[str, list[int]]:
        opened = self._desk.server.look_ahead(seat, step, at, self._lease_bytes)
        # What follows from a move comes before the answer here: nobody waits for that, and it may fill the socket
        # until the client comes back.
        self._moved_to = at
        self._after()
        if opened is None:
            return NOT_YET, []
        return self._hand_over(opened[1], self._header_text(opened[0]))

    def _hello(self, message: dict[str, Any]) -> dict[str, Any]:
        """Seat a client: where its rank begins, where it stood before its connection broke (`at`), or at a `step`."""
        rank, at, step = int(message["rank"]), message.get("at"), message.get("step")
        desk, stands = self._desk, self._desk.planner.ask({"op": "begins", "rank": rank})
        here = desk.server.ranks_of(mesh_from_text(stands["mesh"]))
        self._lease_bytes = desk.budget_bytes // (2 * max(len(here), 1))
        facts = {"lease_bytes": self._lease_bytes, **stands}
        if stands["first_step"] is None:
            return facts
        self._pid = int(message.get("pid", 0))
        twice = self._refuse_second(rank)
        if at is not None and message.get("lineage") != stands["lineage"] and at != stands["first_step"]:
            raise left_behind(f"step {at}, where rank {rank} is,", stands["first_step"])
        if at is None and step is not None:
            desk.planner.tell(desk.server.news())  # also who has gone
            joined = desk.planner.ask({"op": "join", "rank": rank, "step": int(step), "state": message.get("state")})
            if "waits" in joined:
                return joined
            facts |= joined
            at = int(step)
        self._rank = rank
        self._seat, reached = desk.server.attach(rank, int(stands["first_step"]), at)
        if not twice:  # the first client of a process keeps the rank for as long as it is attached
            desk.talks[rank] = self
        desk.planner.tell(desk.server.news())
        return {**facts, "reached": reached, "twice": twice}

    def _refuse_second(self, rank: int) -> bool:
        """Refuse a rank that another process has; return whether the process of this client has it already.

        A process that has just been killed is given a moment to go. One process may have several clients of a rank, to
        report on one of them while another one waits for a step.

        The other connection is looked at by itself: its thread may wait for a step, and does not notice that its client
        is gone.
        """
        until = time.monotonic() + TWICE_S
        while (other := self._desk.talks.get(rank)) is not None and other is not self and not other.hung_up:
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

    def _hand_over(self, built: Mapping[int, Built], header: str = "") -> tuple[str, list[int]]:
        """Write the views of some microbatches; descriptors of segments the client has not seen go along."""
        arena = self._desk.arena
        gone: list[int] = []
        if arena.gone != self._seen_gone:  # rare, and looking costs more than the rest of an answer
            self._seen_gone = arena.gone
            gone = [number for number in self._known if not arena.alive(number)]
            self._known.difference_update(gone)
        views: list[str] = []
        fds: list[int] = []
        for microbatch, one in built.items():
            segment, lease = one.segment, self._next_lease
            self._next_lease += 1
            self._leases[lease] = segment.number
            told = one.views.get(self._rank)
            if told is None:  # a rank that came after it was built
                told = view_text(self._desk.constructor, self._rank, one.plan, one.packed)
            new = segment.number not in self._known
            if new:
                self._known.add(segment.number)
                fds.append(segment.fd)
            views.append(
                f'"{microbatch}":{{"lease":{lease},"segment":{segment.number},"capacity":{segment.capacity},'
                f'"new":{"true" if new else "false"},{told}}}'
            )
        return f'{{{header}"views":{{{",".join(views)}}},"gone":{gone}}}', fds
