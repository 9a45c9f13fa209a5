"""Sources that come to a service of several hosts: opened by one loader host, known to all, then written down.

Rules of this file:
1. What is wrong with a source is said before anything has changed.
2. Every message may come twice: a host that is lost on the way is told again by whoever brings up its successor.
3. Its loaders and decoders are there before a plan may draw from it.
4. A source is added when the planner has written it down, and not before. A call that fails on the way asks the planner
   whether it has, and takes back what the other roles were told if not: it ends as added or as not added.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from overlord.core.client_messages import AddSource, Message
from overlord.core.messages import AdmitSource
from overlord.errors import OverlordError, SpecError
from overlord.roles.assignment import NO_HOST, Assignment
from overlord.runtimes.hosts.peers import PLANNER, loader_name
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.transport.engine import RoleInstance
from overlord.runtimes.transport.switchboard import Switchboard


class LiveSources:
    """What came since the service was started.

    Args:
        board: Who is who.
        awake: Returns who plays a role.
        first: The number that the first newcomer will have.
        assign: Tells everybody who has which source, unless somebody else has meanwhile.
        turn: Held while sources come, or change hands: hosts neither come nor go meanwhile.
    """

    def __init__(
        self,
        board: Switchboard,
        awake: Callable[[], Sequence[RoleInstance]],
        first: int,
        assign: Callable[[Assignment, Assignment], bool],
        turn: threading.Lock,
    ) -> None:
        self._board = board
        self._awake = awake
        self._first = first
        self._assign = assign
        self._turn = turn
        self._added: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        """What is known of their files."""

    def told(self, site: Site, assignment: Assignment) -> list[dict[str, Any]]:
        """Return what a successor must be told of them."""
        numbers = {*assignment.sources_of(site.number), *assignment.shadows_of(site.number)}
        return [
            {"source": source, "mine": site.role == "loader" and self._first + at in numbers}
            for at, source in enumerate(self._added)
        ]

    def add(self, request: AddSource) -> int:
        """Let a source come; return the step it comes at.

        Raises:
            OverlordError: It was not added, and nothing has changed.
        """
        with self._turn:
            made = self._ask(PLANNER, "check_source", request)["step"]
            if made is not None:
                return int(made)
            primary, shadow = self._choose(self._board.book.assignment)
            opened = self._ask(loader_name(primary), "add_source", {"source": request.source, "mine": True})
            self._added.append(request.source)
            self.facts[opened["name"]] = opened["fact"]
            self._change(lambda now: Assignment((*now.primary, (primary,)), (*now.shadow, shadow)))
            try:
                for site in self._sites():
                    if site.role != "planner":
                        mine = site.role == "loader" and site.number in (primary, shadow)
                        self._ask(site.name, "add_source", {"source": request.source, "mine": mine})
                return int(self._ask(PLANNER, "add_source", AdmitSource(request, opened["fact"]))["step"])
            except OverlordError as error:
                made = self._ask(PLANNER, "added_at", {"id": request.id})["step"]
                if made is not None:
                    return int(made)
                self._take_back(opened["name"])
                if isinstance(error, SpecError):
                    raise
                raise type(error)(
                    f"add_source: {opened['name']!r} was not added, and the stream goes on without it: {error}"
                ) from error

    def _take_back(self, name: str) -> None:
        self._added.pop()
        del self.facts[name]
        self._change(lambda now: Assignment(now.primary[:-1], now.shadow[:-1]))
        for site in self._sites():
            if site.role != "planner":
                self._ask(site.name, "drop_source", {"name": name})

    def _sites(self) -> list[Site]:
        return [one.site for one in self._awake()]

    def _change(self, change: Callable[[Assignment], Assignment]) -> None:
        """Change who has what; a shadow may be promoted at the same moment."""
        now = self._board.book.assignment
        while not self._assign(change(now), now):
            now = self._board.book.assignment

    def _choose(self, now: Assignment) -> tuple[int, int]:
        """Return the loader host with the fewest sources; and another one, where sources have shadows."""
        hosts = [site.number for site in self._sites() if site.role == "loader"]
        held = Counter((*(host for each in now.primary for host in each), *now.shadow))
        primary, *others = sorted(hosts, key=lambda host: (held[host], host))
        return primary, others[0] if others and set(now.shadow) != {NO_HOST} else NO_HOST

    def _ask(self, name: str, method: str, message: Message | dict[str, Any]) -> dict[str, Any]:
        return self._board.insist(name, method, message)
