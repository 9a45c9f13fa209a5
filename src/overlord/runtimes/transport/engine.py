"""What a transport implements: an `Engine` starts roles and introduces them, a `Peer` carries messages to one of them.

Rules of this file:
1. Every instance of a role has a generation. The membership names the newest; a message of an older one is refused.
2. Only the supervisor declares an instance dead, with the next version of the membership.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from overlord.core.messages import MembershipHead
from overlord.errors import ServiceLost
from overlord.roles.assignment import Assignment
from overlord.runtimes.launching.cluster_placement import Site

Sender = tuple[str, int]
"""A role's name and generation."""
SERVICE: Sender = ("service", 0)
"""The supervisor itself, which is never replaced."""


class PeerGone(ServiceLost):
    """The process behind a peer has ended, or cannot be reached."""


class Pending(Protocol):
    """An answer that is under way."""

    def poll(self, timeout_s: float) -> Any:
        """Wait a while for it; None where it has not come. An error of the role is an answer too.

        Raises:
            PeerGone: when it will not come.
            AnswerLost: when it will not come, and may if it is asked for again.
        """
        ...


class Peer(Protocol):
    """One instance of a role."""

    def ask(self, method: str, message: Any, sender: Sender = SERVICE) -> Pending:
        """Call a method of the role: with the object itself, or with a copy where the transport leaves the process."""
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """The peers of a service and what each of them has. Roles that are being replaced have no peer in it."""

    version: int
    generations: Mapping[str, int]
    """The newest generation of every role, alive or not."""
    peers: Mapping[str, Peer]
    assignment: Assignment
    failed: str | None = None
    """Why the service cannot go on, if so."""
    hosts: Mapping[int, int] = field(default_factory=dict[int, int])
    """Constructor hosts of meshes that were given others than the launch, by their number of ranks."""

    def head(self) -> MembershipHead:
        """Return all but the peers."""
        now = self.assignment
        return MembershipHead(
            self.version, dict(self.generations), now.primary, now.shadow, self.failed, dict(self.hosts)
        )

    @classmethod
    def from_head(cls, head: MembershipHead, peers: Mapping[str, Peer]) -> Membership:
        """Read a membership whose peers came beside it."""
        assignment = Assignment(head.primary, head.shadow)
        return cls(head.version, head.generations, peers, assignment, head.failed, head.hosts)


class Engine(Protocol):
    """Starts the processes, actors or objects that run roles, and carries messages to them."""

    first_sign_s: float
    """How long one may take until its first sign of life."""

    def start(self, site: Site, generation: int) -> Peer:
        """Start a role."""
        ...

    def introduce(self, peer: Peer, membership: Membership) -> Pending:
        """Send a role the membership."""
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

    def reserve(self, site: Site, sidecars: Collection[str]) -> Site:
        """Find room for a host beyond those of the launch, and reserve it; `sidecars` are the hosts of trainers in use.

        A loader host goes there first, a constructor host to the next host of trainers.

        Raises:
            SpecError: There is none.
        """
        ...

    def release(self, site: Site) -> None:
        """Give back what was reserved for such a host."""
        ...

    def describe(self, sites: Sequence[tuple[Site, int]]) -> dict[str, Any]:
        """Return what `status` shows of the engine, and of the roles with their process ids."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
