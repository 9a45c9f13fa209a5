"""Whether a role lives: what it does may take long, saying that it lives may not."""

from __future__ import annotations

from collections.abc import Callable

from overlord.errors import AnswerLost, ClosedError, ServiceLost
from overlord.runtimes.engine import OPEN_S, Incarnation
from overlord.runtimes.frames import Frame, frame_of, open_frame
from overlord.runtimes.switchboard import Peer, PeerGone, Pending

LEAST_S = 10.0
"""How long nothing may be heard at least of a role that comes up."""


class Life:
    """The signs of life of one incarnation while somebody waits for another answer of it.

    It is not asked for its beat: whoever has heard one ends when no more come, and nobody sends them to all roles while
    one of them takes long to come up.

    Args:
        peer: The incarnation.
        heartbeat_s: How long nothing may be heard of it.
        first_s: How long its first sign of life may take.
        clock: Seconds that never go back.
        closing: Tells whether nobody wants the answer any more.
    """

    def __init__(
        self, peer: Peer, heartbeat_s: float, first_s: float, clock: Callable[[], float], closing: Callable[[], bool]
    ) -> None:
        self._peer = peer
        self._closing = closing
        self._again_s = heartbeat_s
        self._first_s = max(first_s, heartbeat_s)
        self._heartbeat_s = max(2 * heartbeat_s, LEAST_S)  # much is imported and parsed meanwhile
        self._clock = clock
        self._heard: float | None = None
        self._since = clock()
        self._sign: Pending | None = None

    def answer(self, pending: Pending) -> Frame:
        """Wait for an answer for as long as it lives.

        Raises:
            ServiceLost: when nothing was heard for too long, or it took too long all in all.
            ClosedError: when nobody wants it any more.
        """
        while (answer := self._look(pending)) is None:
            pass
        return answer

    def acquaint(self, introduce: Callable[[Peer], Pending]) -> None:
        """Tell it who is who until it says that it knows: a message may be lost, and nobody must ask it before."""
        while True:
            told, again = introduce(self._peer), self._clock() + self._again_s
            while self._clock() <= again:
                if self._look(told) is not None:
                    return

    def _look(self, pending: Pending) -> Frame | None:
        if self._closing():
            raise ClosedError("the service is closing.")
        answer = pending.poll(0.5)
        if answer is None:
            self._check()
            if self._clock() > self._since + OPEN_S:
                raise ServiceLost(f"a role did not come up within {OPEN_S:g} s; its host may be overloaded.")
        return answer

    def _check(self) -> None:
        """Look once.

        Raises:
            ServiceLost: when nothing was heard for too long.
        """
        now = self._clock()
        if self._sign is not None and self._sign.poll(0) is not None:
            self._sign, self._heard = None, now
        if self._sign is None:
            self._sign = self._peer.ask("pid", frame_of({}))
        silent = now - (self._since if self._heard is None else self._heard)
        if silent > (self._first_s if self._heard is None else self._heartbeat_s):
            raise ServiceLost(f"nothing was heard of it for {silent:.1f} s while it came up")


def look_at(
    one: Incarnation, now: float, heartbeat_s: float, version: int, introduce: Callable[[Peer], Pending]
) -> tuple[str | None, float]:
    """Look once after an incarnation; who has missed the newest book is told again.

    Args:
        one: Who is looked after.
        now: The time.
        heartbeat_s: How long nothing may be heard of it.
        version: Of the newest book.
        introduce: Tells somebody who is who.

    Returns:
        What is wrong with it, and for how long it has been busy with one call.
    """
    if one.peer is None:
        return None, 0.0
    try:
        answer = one.beat.poll(0) if one.beat is not None else frame_of({"version": 0, "busy_s": 0.0})
        if answer is None:  # judged after looking: a supervisor that was stopped itself finds answers waiting
            silent = now - one.heard
            return None if silent <= heartbeat_s else f"did not answer for {silent:.1f} s", 0.0
        head = open_frame(answer)[0]
        one.heard, one.rewound = now, bool(head.get("rewound"))
        one.served = max(one.served, int(head.get("served", -1)))
        one.beat = one.peer.ask("beat", frame_of({}))
        if head["version"] < version:
            one.told = introduce(one.peer)
        return None, float(head["busy_s"])
    except PeerGone as error:
        return f"ended ({error})", 0.0
    except AnswerLost:
        one.beat = None  # it is asked again with the next look
    return None, 0.0
