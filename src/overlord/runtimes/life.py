"""Whether a role that comes up lives: opening its sources may take long, saying that it lives may not."""

from __future__ import annotations

from collections.abc import Callable

from overlord.errors import ServiceLost
from overlord.runtimes.frames import frame_of
from overlord.runtimes.switchboard import Peer, Pending

LEAST_S = 10.0
"""How long nothing may be heard at least of a role that comes up."""


class Life:
    """The beats of one incarnation while somebody waits for another answer of it.

    Args:
        peer: The incarnation.
        heartbeat_s: How long nothing may be heard of it.
        first_s: How long its first sign of life may take.
        clock: Seconds that never go back.
    """

    def __init__(self, peer: Peer, heartbeat_s: float, first_s: float, clock: Callable[[], float]) -> None:
        self._peer = peer
        self._first_s = max(first_s, heartbeat_s)
        self._heartbeat_s = max(2 * heartbeat_s, LEAST_S)  # much is imported and parsed meanwhile
        self._clock = clock
        self._heard: float | None = None
        self._since = clock()
        self._beat: Pending | None = None

    def check(self) -> None:
        """Look once.

        Raises:
            ServiceLost: when nothing was heard for too long.
        """
        now = self._clock()
        if self._beat is not None and self._beat.poll(0) is not None:
            self._beat, self._heard = None, now
        if self._beat is None:
            self._beat = self._peer.ask("beat", frame_of({}))
        silent = now - (self._since if self._heard is None else self._heard)
        if silent > (self._first_s if self._heard is None else self._heartbeat_s):
            raise ServiceLost(f"nothing was heard of it for {silent:.1f} s while it came up")
