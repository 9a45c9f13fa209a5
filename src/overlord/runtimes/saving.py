"""Writes what a planner has for the store: snapshots, its horizon, plan records in groups, what the loaders have met.

Rules of this file:
1. None of it is on the way of a step. Whoever plans only says what is due; it is written by a thread of the runtime, or
   on the inline runtime between two steps.
2. Snapshots cost at most a small share of the time between them, those of the loaders a smaller one: what takes longer
   is done less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from overlord.roles.planner import SNAPSHOT_EVERY, Due, Planner
from overlord.roles.ports import Loaders

PLANNER_SHARE = 0.02
"""Share of the time between two snapshots that one may take; then the interval is doubled, up to half of `keep`."""
LOADERS_SHARE = 0.01
LOADERS_EVERY = 4
"""The loaders are asked with every so manieth snapshot at first."""


class Saver:
    """Writes what is due.

    Args:
        planner: Whose state it is.
        loaders: Its loaders.
        lock: Held while the planner is asked; never while anything is written.
        most_steps: The longest interval between snapshots.
        met: What the loaders had met when the stream began.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        planner: Planner,
        loaders: Loaders,
        lock: AbstractContextManager[Any],
        *,
        most_steps: int,
        met: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._checkpoints = planner.checkpoints
        self._store = planner.checkpoints.store
        self._loaders = loaders
        self._lock = lock
        self._most_steps = max(1, most_steps)
        self.met: Mapping[str, Any] = met or {}
        """What the loaders had met when they were last asked."""
        self._last: float | None = None
        self._count = 0
        self._loaders_every = LOADERS_EVERY
        self._checkpoints.snapshot_every = min(SNAPSHOT_EVERY, self._most_steps)

    def work(self, *, probe: bool = False) -> None:
        """Write everything that is due now.

        Args:
            probe: Write something in any case, to see whether a store that failed works again.

        Raises:
            StoreError: The store failed; the same is due again.
        """
        if probe:
            self._store.journal.append({"kind": "probe", "step": -1}, durable=True)
        with self._lock:
            due = self._checkpoints.due()
        if due is None:
            self._store.journal.commit()
        elif due.state is None:
            self._store.reserve(due.horizon)
        else:
            self._snapshot(due)
        self._store.beat()

    def _snapshot(self, due: Due) -> None:
        assert due.state is not None
        began = self._clock()
        self._store.save(due.state, due.mark, horizon=due.horizon)
        ended = self._clock()
        with self._lock:
            self._checkpoints.saved(due)
        between = ended - self._last if self._last is not None else None
        self._last = ended
        if between:
            self._adapt((ended - began) / between)
        self._count += 1
        if self._count % self._loaders_every == 0:
            self.met = self._loaders.snapshot()
            self._store.save_loaders(int(due.state["step"]), self.met)
            if between is not None and self._clock() - ended > LOADERS_SHARE * between * self._loaders_every:
                self._loaders_every *= 2

    def _adapt(self, share: float) -> None:
        every = self._checkpoints.snapshot_every
        if share > PLANNER_SHARE:
            self._checkpoints.snapshot_every = min(2 * every, self._most_steps)
        elif share < PLANNER_SHARE / 8:  # it was slow for a moment only
            self._checkpoints.snapshot_every = max(every // 2, min(SNAPSHOT_EVERY, self._most_steps))
