"""One client's connection to the constructor host of its machine: asks are JSON, views go by descriptor."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.views import StepHeader
from overlord.runtimes.doors import answer_all
from overlord.runtimes.planner_host import Plans
from overlord.runtimes.shared_memory import Arena
from overlord.runtimes.step_server import Built, StepServer

SEATED = ("leave", "step", "microbatch")
"""Messages that only a rank with a seat may send."""


@dataclass(frozen=True, slots=True)
class Desk:
    """What conversations are held over: the same for all of a host."""

    names: tuple[str, ...]
    """The job's sources."""
    tree: ClientPlaceTree
    planner: Plans
    server: StepServer
    constructor: DataConstructor
    arena: Arena
    budget_bytes: int


class Conversation:
    """One client's connection."""

    def __init__(self, desk: Desk, connection: socket.socket) -> None:
        self._desk = desk
        self._connection = connection
        self._rank = -1
        self._seat: int | None = None
        self._leases: dict[int, int] = {}
        self._next_lease = 0
        self._known: set[int] = set()

    def run(self) -> None:
        """Answer until the client is gone."""
        answer_all(self._connection, self._answer)

    def close(self) -> None:
        """Free what the client held."""
        for number in self._leases.values():
            self._desk.arena.release(number, reuse=False)  # a trainer that detached may keep its arrays
        self._leases.clear()
        if self._seat is not None:
            self._desk.server.detach(self._seat)

    def _answer(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        op, server = message.get("op"), self._desk.server
        for lease in message.pop("release", ()):
            number = self._leases.pop(int(lease), None)
            if number is not None:
                self._desk.arena.release(number)
        if op == "hello":
            return self._hello(int(message["rank"])), []
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
            header = server.open_step(self._seat, int(message["step"]))
            return {"header": None if header is None else header_to_json(header)}, []
        built = server.microbatch(self._seat, int(message["step"]), int(message["microbatch"]))
        return self._hand_over(built) if built is not None else ({"segment": None}, [])

    def _hello(self, rank: int) -> dict[str, Any]:
        tree, server = self._desk.tree, self._desk.server
        facts = {
            "names": self._desk.names,
            "world_size": tree.world_size,
            "mesh": str(tree),
            "lease_bytes": self._desk.budget_bytes // (2 * len(server.world_ranks)),
        }
        if not 0 <= rank < tree.world_size:
            return {**facts, "first_step": 0}
        self._rank = rank
        self._seat, first = server.attach(rank)
        return {**facts, "first_step": first}

    def _hand_over(self, built: Built) -> tuple[dict[str, Any], list[int]]:
        segment, packed, plan = built.segment, built.packed, built.plan
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = segment.number
        names, scalars = self._desk.constructor.view_of(self._rank, plan, packed)
        specs = {spec.name: spec for spec in packed.arrays}
        gone = [number for number in self._known if not self._desk.arena.alive(number)]
        self._known.difference_update(gone)
        reply = {
            "lease": lease,
            "segment": segment.number,
            "capacity": segment.capacity,
            "gone": gone,
            "scalars": scalars,
            "arrays": [[k, specs[n].dtype, list(specs[n].shape), specs[n].offset] for k, n in names.items()],
        }
        if segment.number in self._known:
            return reply, []
        self._known.add(segment.number)
        return reply, [segment.fd]


def header_to_json(header: StepHeader) -> dict[str, Any]:
    """Return a step header as JSON."""
    return {name: getattr(header, name) for name in StepHeader.__dataclass_fields__}
