"""A constructor host: builds the views of the ranks of one machine and serves them on a Unix socket.

The same on every runtime: beside the other roles in the local service, or as a sidecar of a trainer host.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from overlord.errors import OverlordError
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.conversation import Conversation, Desk
from overlord.runtimes.hosts.planner_host import Plans
from overlord.runtimes.hosts.step_server import RanksOf, StepServer
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.runtimes.transport.doors import open_door
from overlord.runtimes.transport.shared_memory import Arena


class ConstructorHost:
    """The DataConstructor of one machine with its shared memory and its door."""

    def __init__(
        self,
        options: LaunchOptions,
        constructor: DataConstructor,
        planner: Plans,
        *,
        ranks_of: RanksOf,
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
            budget_bytes=options.budget_bytes,
            read_bytes=read_bytes,
            early=not successor and not options.recover,
        )
        self._desk = Desk(
            planner, self._server, constructor, arena, options.budget_bytes, served or (lambda step: None)
        )
        self.ends_for: OverlordError | None = None
        """What clients that wait are told when it is closed; by default that the service was."""
        self._server.start()

    @property
    def view_bytes(self) -> int:
        """Shared memory in use."""
        return self._desk.arena.used_bytes

    def open_door(self, address: Path) -> AbstractContextManager[None]:
        """Serve clients on a socket while the context is open."""
        return open_door(address, self._converse)

    def close(self) -> None:
        """End the threads; tell the planner how far the clients came, and let go of the shared memory."""
        try:
            self._server.close(self.ends_for)
            self._planner.tell(self._server.news())
        finally:
            self._desk.arena.close()

    def _converse(self, connection: socket.socket) -> None:
        talk = Conversation(self._desk, connection)
        try:
            talk.run()
        finally:
            talk.close()
