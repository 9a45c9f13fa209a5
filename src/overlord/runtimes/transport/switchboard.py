"""Who answers for each role of a service at the moment, and calls that outlive those they were made to.

Rules of this file:
1. Every incarnation of a role has a generation. The book names the newest; a message of an older one is refused.
2. Every call is idempotent: one whose answer does not come is made again, to whoever answers for the role by then.
3. Nobody here decides that somebody is dead. The supervisor does, and says so with the next version of the book.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from overlord.errors import AnswerLost, ServiceLost, Succeeded, Superseded
from overlord.roles.assignment import Assignment
from overlord.runtimes.supervision.child import LIMITS
from overlord.runtimes.transport.role_codec import unwrap

logger = logging.getLogger("overlord")

SLICE_S = 0.25
"""How often a waiting call looks whether somebody else answers by now."""
REPEAT_S = LIMITS.repeat_call
"""A message without an answer for so long may be lost, and is sent again."""
SUCCESSOR_S = LIMITS.replacement
"""How long the successor of a lost host may take before a call to it fails."""

Sender = tuple[str, int]
"""A role's name and generation."""
SERVICE: Sender = ("service", 0)
"""The supervisor itself, which has no successor."""


class PeerGone(ServiceLost):
    """The process behind a peer has ended, or cannot be reached."""


class Pending(Protocol):
    """An answer that is under way."""

    def poll(self, timeout_s: float) -> Any:
        """Wait a while for it; None where it has not come. An error of whoever was asked is an answer too.

        Raises:
            PeerGone: when it will not come.
            AnswerLost: when it will not come, and may if it is asked for again.
        """
        ...


class Peer(Protocol):
    """One incarnation of a role."""

    def ask(self, method: str, message: Any, sender: Sender = SERVICE) -> Pending:
        """Call a method of the role: with the object itself, or with a copy where the transport leaves the process."""
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is who. Roles that are being replaced are not in it."""

    version: int
    generations: Mapping[str, int]
    """The newest generation of every role, alive or not."""
    peers: Mapping[str, Peer]
    assignment: Assignment
    failed: str | None = None
    """Why the service cannot go on, if so."""

    def head(self) -> dict[str, Any]:
        """Return all but the peers, as JSON."""
        return {
            "version": self.version,
            "generations": dict(self.generations),
            "assignment": self.assignment.to_json(),
            "failed": self.failed,
        }

    @classmethod
    def from_head(cls, head: Mapping[str, Any], peers: Mapping[str, Peer]) -> Membership:
        """Read a book whose peers came beside it."""
        assignment = Assignment.from_json(head["assignment"])
        return cls(head["version"], head["generations"], peers, assignment, head["failed"])


class PeerClient:
    """The book as one role knows it.

    Args:
        me: The role that asks.
        clock: Seconds that never go back.
        idle: Called instead of waiting for other threads, where there are none.
        ended: Called when others refuse what this role says, since it has a successor: its clients go to that one.
    """

    def __init__(
        self,
        me: Sender,
        clock: Callable[[], float] = time.monotonic,
        idle: Callable[[float], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self.me = me
        self.clock = clock
        self._idle = idle
        self.ended = ended
        self._changed = threading.Condition()
        self._book: Membership | None = None

    @property
    def book(self) -> Membership:
        """The newest book."""
        assert self._book is not None, "a role is introduced before it is asked anything"
        return self._book

    @property
    def version(self) -> int:
        """The version of the newest book; 0 before there is one."""
        return 0 if self._book is None else self._book.version

    def learn(self, book: Membership) -> None:
        """Take the newest book; one that was overtaken on its way is no news."""
        with self._changed:
            if book.version > self.version:
                self._book = book
                self._changed.notify_all()

    def check(self, sender: Sender) -> None:
        """Refuse a message of an incarnation that has a successor.

        Raises:
            Superseded: so that it learns of it.
        """
        name, generation = sender
        newest = self._book.generations.get(name, generation) if self._book is not None else generation
        if generation < newest:
            raise Superseded(
                f"generation {generation} of the {name} was taken for dead and has a successor ({newest}); what it "
                "says does not count any more. It may end."
            )

    def generation(self, name: str) -> int:
        """Return the newest generation of a role."""
        return self.book.generations.get(name, 0)

    def ask(self, name: str, method: str, message: Any) -> Call:
        """Ask whoever answers for a role now; waits for a successor where there is nobody."""
        return Call(self, name, method, message)

    def insist(self, name: str, method: str, message: Any) -> Any:
        """Ask a role, and its successors if need be, until there is an answer; an error of it is raised."""
        while True:
            found = self.ask(name, method, message).get()
            if found is not None:
                return unwrap(found)

    def find(self, name: str) -> tuple[Peer, int]:
        """Return who answers for a role, and its generation; waits until there is somebody.

        Raises:
            ServiceLost: when nobody comes, or the service has failed.
        """
        until = self.clock() + SUCCESSOR_S
        while True:
            with self._changed:
                book = self.book
                if book.failed is not None:
                    raise ServiceLost(book.failed)
                if name in book.peers:
                    return book.peers[name], book.generations[name]
                if self.clock() > until:
                    raise ServiceLost(
                        f"the {name} is gone, and nobody took its place within {SUCCESSOR_S:g} s; no data can come "
                        "from it. Its last words stand in the service's log; launch again from the last state."
                    )
            self.pause(book.version, SLICE_S)

    def pause(self, version: int, timeout_s: float) -> None:
        """Wait until there is a newer book than this version, or for a while."""
        if self._idle is not None:
            self._idle(timeout_s)
            return
        with self._changed:
            if self.version <= version:
                self._changed.wait(timeout_s)


class Call:
    """One message to one incarnation, and the wait for its answer."""

    def __init__(self, board: PeerClient, name: str, method: str, message: Any) -> None:
        self._board = board
        self._name = name
        self._asked = (method, message)
        self._send()

    def _send(self) -> None:
        peer, self._generation = self._board.find(self._name)
        self._since = self._board.clock()
        try:
            self._pending: Pending | None = peer.ask(*self._asked, sender=self._board.me)
        except PeerGone:
            self._pending = None  # told to who waits: what it asked for may be with somebody else by now

    def get(self) -> Any:
        """Return the answer or an error; None when who was asked is gone, and the book says who comes after it."""
        while True:
            try:
                if self._pending is None:
                    raise PeerGone("it was gone when it was asked")
                found = self._pending.poll(SLICE_S)
                if isinstance(found, Superseded) and self._board.ended is not None:
                    self._board.ended()
                if isinstance(found, AnswerLost):
                    raise found
                if isinstance(found, Succeeded):
                    raise PeerGone(str(found))  # it came back from a pause; the book that says so is on its way
            except PeerGone:
                self._until_replaced()
                return None
            except AnswerLost as error:
                logger.warning("%r to the %s is asked again: %s", self._asked[0], self._name, error)
                self._board.pause(self._board.version, SLICE_S)
                return None
            if self._replaced():
                return None  # it hangs, or comes back too late: somebody else answers for it
            if found is not None:
                return found
            waited = self._board.clock() - self._since
            if waited > REPEAT_S:
                logger.warning("the %s has not answered %r for %.0f s; asked again", self._name, self._asked[0], waited)
                self._send()

    def _replaced(self) -> bool:
        book = self._board.membership
        if book.failed is not None:
            raise ServiceLost(book.failed)
        return self._name not in book.peers or book.generations[self._name] != self._generation

    def _until_replaced(self) -> None:
        """Wait until the supervisor has seen it too."""
        until = self._board.clock() + SUCCESSOR_S
        while True:
            version = self._board.version
            if self._replaced():
                return
            if self._board.clock() > until:
                raise ServiceLost(
                    f"the {self._name} is gone, and nobody noticed within {SUCCESSOR_S:g} s; no data can come from it. "
                    "The service's own process may hang; launch again from the last state."
                )
            self._board.pause(version, SLICE_S)
