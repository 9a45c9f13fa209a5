"""What a supervisor needs of the transport that its roles run on, and what it knows of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.supervision.child import Liveness, Restarts
from overlord.runtimes.transport.membership import Membership, Peer, Pending


class Engine(Protocol):
    """Starts the processes, actors or objects that run roles, and carries messages to them."""

    first_sign_s: float
    """How long one may take until its first sign of life."""

    def start(self, site: Site, generation: int) -> Peer:
        """Start a role."""
        ...

    def introduce(self, peer: Peer, book: Membership) -> Pending:
        """Send a role the book of its peers."""
        ...

    def kill(self, peer: Peer, site: Site, pid: int) -> None:
        """End it for good, whatever state it is in; pid is 0 where it is not known."""
        ...

    def wait(self, pending: Sequence[Pending], timeout_s: float) -> None:
        """Wait until one of some answers is there, or for a while."""
        ...

    def place_again(self, site: Site) -> Site:
        """Return where a lost role goes: where it was, or to another host if that one is gone."""
        ...

    def describe(self, sites: Sequence[tuple[Site, int]]) -> dict[str, Any]:
        """Return what `status` shows of the engine, and of the roles with their process ids."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


@dataclass(slots=True)
class RoleInstance:
    """A role, and the process or actor that runs it at the moment."""

    site: Site
    restarts: Restarts
    generation: int = 1
    peer: Peer | None = None
    """None while there is none."""
    coming: Peer | None = None
    """The one that is being brought up: it is called by its supervisor only, but it must know the other roles."""
    beat: Pending | None = None
    """The heartbeat that it was asked for."""
    liveness: Liveness | None = None
    started_at: float = 0.0
    pid: int = 0
    served: int = -1
    """The newest step that a client of it is known to have come to."""
    asleep: bool = False
    """Whether it is not to run at the moment."""
    rewound: bool = False
    """Whether it reported that all ranks go back to an earlier step."""
    told: Pending | None = field(default=None, repr=False)
    """The last introduction: dropping it may drop the message with it."""
