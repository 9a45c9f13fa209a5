"""Calls to roles that survive their replacement.

Every call is idempotent: one whose answer does not come is made again, to the instance that runs the role by then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from overlord.errors import AnswerLost, ServiceLost, Succeeded, Superseded
from overlord.runtimes.supervision.child import LIMITS
from overlord.runtimes.transport.engine import Membership, Peer, PeerGone, Pending, Sender
from overlord.runtimes.transport.role_codec import unwrap

logger = logging.getLogger("overlord")

SLICE_S = 0.25
"""How often a waiting call checks whether the role was replaced."""
REPEAT_S = LIMITS.repeat_call
"""A message without an answer for so long may be lost, and is sent again."""
SUCCESSOR_S = LIMITS.replacement
"""How long the replacement of a lost role may take before a call to it fails."""


class PeerClient:
    """Calls other roles, by the newest membership that this role has received.

    Args:
        me: The role that calls.
        clock: Seconds that never go back.
        idle: Called instead of waiting for other threads, where there are none.
        ended: Called when a peer refuses a message of this instance because it was replaced.
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
        self._membership: Membership | None = None

    @property
    def membership(self) -> Membership:
        """The newest membership."""
        assert self._membership is not None, "a role receives the membership before it is asked anything"
        return self._membership

    @property
    def version(self) -> int:
        """The version of the newest membership; 0 before there is one."""
        return 0 if self._membership is None else self._membership.version

    def learn(self, membership: Membership) -> None:
        """Take a membership, unless a newer one came before it."""
        with self._changed:
            if membership.version > self.version:
                self._membership = membership
                self._changed.notify_all()

    def check(self, sender: Sender) -> None:
        """Refuse a message of an instance that was replaced.

        Raises:
            Superseded: it tells the sender.
        """
        name, generation = sender
        newest = generation if self._membership is None else self._membership.generations.get(name, generation)
        if generation < newest:
            raise Superseded(
                f"generation {generation} of the {name} was taken for dead and replaced by generation {newest}; its "
                "messages are refused. It may end."
            )

    def generation(self, name: str) -> int:
        """Return the newest generation of a role."""
        return self.membership.generations.get(name, 0)

    def ask(self, name: str, method: str, message: Any) -> Call:
        """Call the instance that runs a role now; waits for a replacement where there is none."""
        return Call(self, name, method, message)

    def insist(self, name: str, method: str, message: Any) -> Any:
        """Call a role, and its replacements if need be, until there is an answer; an error of it is raised."""
        while True:
            found = self.ask(name, method, message).get()
            if found is not None:
                return unwrap(found)

    def find(self, name: str) -> tuple[Peer, int]:
        """Return the peer that runs a role, and its generation; waits until there is one.

        Raises:
            ServiceLost: when there is none in time, or the service has failed.
        """
        until = self.clock() + SUCCESSOR_S
        while True:
            with self._changed:
                membership = self.membership
                if membership.failed is not None:
                    raise ServiceLost(membership.failed)
                if name in membership.peers:
                    return membership.peers[name], membership.generations[name]
                if self.clock() > until:
                    raise ServiceLost(
                        f"the {name} is gone, and was not replaced within {SUCCESSOR_S:g} s; no data can come from it. "
                        "Its last messages are in the service's log; launch again from the last state."
                    )
            self.pause(membership.version, SLICE_S)

    def pause(self, version: int, timeout_s: float) -> None:
        """Wait until there is a newer membership than this version, or for a while."""
        if self._idle is not None:
            self._idle(timeout_s)
            return
        with self._changed:
            if self.version <= version:
                self._changed.wait(timeout_s)


class Call:
    """One message to one instance of a role, and the wait for its answer."""

    def __init__(self, peers: PeerClient, name: str, method: str, message: Any) -> None:
        self._peers = peers
        self._name = name
        self._asked = (method, message)
        self._send()

    def _send(self) -> None:
        peer, self._generation = self._peers.find(self._name)
        self._since = self._peers.clock()
        try:
            self._pending: Pending | None = peer.ask(*self._asked, sender=self._peers.me)
        except PeerGone:
            self._pending = None  # `get` returns None: another role may have by now what was asked for

    def get(self) -> Any:
        """Return the answer or an error; None if the instance died and the membership already names its replacement."""
        while True:
            try:
                if self._pending is None:
                    raise PeerGone("it was gone when it was asked")
                found = self._pending.poll(SLICE_S)
                if isinstance(found, Superseded) and self._peers.ended is not None:
                    self._peers.ended()
                if isinstance(found, AnswerLost):
                    raise found
                if isinstance(found, Succeeded):
                    raise PeerGone(str(found))  # it was paused and replaced; the newer membership is on its way
            except PeerGone:
                self._until_replaced()
                return None
            except AnswerLost as error:
                logger.warning("%r to the %s is asked again: %s", self._asked[0], self._name, error)
                self._peers.pause(self._peers.version, SLICE_S)
                return None
            if self._replaced():
                return None  # it hangs, or answers too late
            if found is not None:
                return found
            waited = self._peers.clock() - self._since
            if waited > REPEAT_S:
                logger.warning("the %s has not answered %r for %.0f s; asked again", self._name, self._asked[0], waited)
                self._send()

    def _replaced(self) -> bool:
        membership = self._peers.membership
        if membership.failed is not None:
            raise ServiceLost(membership.failed)
        return self._name not in membership.peers or membership.generations[self._name] != self._generation

    def _until_replaced(self) -> None:
        """Wait until the supervisor has noticed the loss too."""
        until = self._peers.clock() + SUCCESSOR_S
        while True:
            version = self._peers.version
            if self._replaced():
                return
            if self._peers.clock() > until:
                raise ServiceLost(
                    f"the {self._name} is gone, and its supervisor did not notice within {SUCCESSOR_S:g} s; no data "
                    "can come from it. The service's own process may hang; launch again from the last state."
                )
            self._peers.pause(version, SLICE_S)
