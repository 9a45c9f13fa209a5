"""What a planner has for its store: when a snapshot is due, and how far steps may be handed out; a part of the Planner.

Rules of this file:
1. Nothing is written while a step is planned: `due` hands out what a runtime writes in its own time.
2. The horizon, up to which steps may be handed out, must be on disk before. It is moved long before it is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overlord.stores.store import Store

SNAPSHOT_EVERY = 16
"""Steps between snapshots at first; a runtime that finds them slow takes them less often."""
AHEAD = 32
"""How far the horizon is moved ahead; after a crash a change can take effect no sooner than there."""
SLACK = 24
"""It is moved when less than this is left: so many steps may be planned while that is written."""


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be written to the store."""

    state: Mapping[str, Any] | None
    """The state of a snapshot; None where only the horizon moves."""
    mark: str
    """Where the journal stood when the state was taken."""
    horizon: int


class Checkpoints:
    """When one stream is written down.

    Args:
        store: Where.
        step: The step it goes on at.
        state_of: Returns the state before a step.
        next_step: Returns the step that is not planned yet.
    """

    def __init__(
        self, store: Store, step: int, state_of: Callable[[int], Mapping[str, Any]], next_step: Callable[[], int]
    ) -> None:
        self.store = store
        self._state_of = state_of
        self._next_step = next_step
        self._saved = step
        self.began = step
        """The step it goes on at."""
        self.passed = step
        """The step before which every client is done."""
        self.snapshot_every = SNAPSHOT_EVERY
        """Steps between snapshots."""

    def begin(self) -> None:
        """Begin a lineage in the store, unless the stream goes on in one; nothing can be planned before."""
        if not self.store.lineage:
            step = self._next_step()
            self.store.begin(self._state_of(step), horizon=step + AHEAD)

    def reserve(self, step: int) -> None:
        """See to it that a step may be handed out: what it is made without must not come back after a crash."""
        self.store.journal.settle()
        if step >= self.store.horizon:
            self.store.reserve(step + AHEAD)

    @property
    def is_due(self) -> bool:
        """Whether there is anything to be written."""
        return self._snapshot_due or self._horizon_due

    def due(self, *, last: bool = False) -> Due | None:
        """Return what is to be written now, if anything; `saved` must be told when it is.

        Args:
            last: Whether this is the end, so that a snapshot is due for any step.
        """
        mark, horizon = self.store.journal.mark(), self._next_step() + AHEAD  # before the state: more may come in
        if self._snapshot_due or (last and self.passed > self._saved):
            return Due(self._state_of(self.passed), mark, horizon)
        return Due(None, mark, horizon) if self._horizon_due and not last else None

    def saved(self, due: Due) -> None:
        """Learn that something is written."""
        if due.state is not None:
            self._saved = int(due.state["step"])

    def close(self) -> None:
        """Save where the clients stand, and leave the store."""
        try:
            due = self.due(last=True) if self.store.lineage else None
            if due is not None and due.state is not None:
                self.store.save(due.state, due.mark, horizon=due.horizon)
        finally:
            self.store.close()

    @property
    def _snapshot_due(self) -> bool:
        return self.passed // self.snapshot_every > self._saved // self.snapshot_every

    @property
    def _horizon_due(self) -> bool:
        return self.store.horizon - self._next_step() < SLACK
