"""The states of a stream that are remembered, so that an older step can be planned again; a part of the Planner.

Rules of this file:
1. Recent states are all kept, older ones now and then, and none of them for ever: what lies `keep` steps behind every
   client is let go of, except the one that the oldest step which can still be asked for is drawn from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from overlord.core.states import StreamState
from overlord.errors import SpecError

KEPT_STATES = 256
"""States of this many recent steps are kept, and of every step that is a multiple of it."""
KEPT_REPLAYED = 64
"""Old states that were computed again are kept too: a client that comes late asks for one step after the other."""


class KeptStates:
    """Some states of a stream, by step.

    Args:
        states: Those that are known from the beginning.
        keep: Steps behind the slowest client that can be asked for again.

    Example:
        >>> states = KeptStates([StreamState.begin(1)], keep=256)
        >>> states.nearest(3).step
        0
    """

    def __init__(self, states: Iterable[StreamState], *, keep: int) -> None:
        self._keep = keep
        self._states = {state.step: state for state in states}
        self._first = max(self._states)
        self._replayed: OrderedDict[int, StreamState] = OrderedDict()

    def add(self, state: StreamState, passed: int) -> None:
        """Keep the state behind a new step; thin out the older ones, but for the one that clients stand at."""
        self._states[state.step] = state
        old = state.step - KEPT_STATES
        if old in self._states and old % KEPT_STATES and old not in (self._first, passed):
            del self._states[old]

    def add_replayed(self, state: StreamState) -> None:
        """Keep a state that was computed again, for a while."""
        if state.step not in self._states:
            self._replayed[state.step] = state
            self._replayed.move_to_end(state.step)
            while len(self._replayed) > KEPT_REPLAYED:
                self._replayed.popitem(last=False)

    def forget(self, passed: int) -> None:
        """Let go of what no client can ask for any more, now that all are done with the steps before this one."""
        behind = sorted(step for step in self._states if step <= passed - self._keep)
        for step in behind[:-1]:
            del self._states[step]

    def nearest(self, step: int) -> StreamState:
        """Return the newest known state at or before a step.

        Raises:
            SpecError: The step is not kept any more.
        """
        self.check(step)
        known = self._states.get(step) or self._replayed.get(step)
        if known is not None:
            return known
        start = max(one for one in (*list(self._states), *list(self._replayed)) if one <= step)
        return self._states.get(start) or self._replayed[start]

    @property
    def oldest(self) -> int:
        """The oldest step that can be asked for."""
        return min(list(self._states))  # a copy: others may add to them

    def check(self, step: int) -> None:
        """Refuse a step that is not kept any more."""
        oldest = self.oldest
        if step < oldest:
            raise SpecError(
                f"step {step} is not kept any more: {self._keep} steps behind the slowest client are (keep=), and the "
                f"oldest is step {oldest}; its samples could not be told exactly. Attach with the step of your "
                f"checkpoint, ol.connect(address, rank, step=..) with {oldest} or more, or launch with a larger keep."
            )
