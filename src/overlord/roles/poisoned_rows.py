"""Poisoned rows: rows that killed their worker twice. They are not run again; a stand-in replaces them permanently.

A verdict is the journaled record that a row is poisoned.

Rules of this file:
1. A verdict is on disk before it takes effect: a resume must know every verdict that a plan was made with.
2. It names a row of a source, and the epoch from which it holds: the one in which the row killed its worker. No rank,
   loader or time is in it. What was delivered of the row in earlier epochs stays, and a replay plans it as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from overlord.errors import StateError
from overlord.stores.journal import Journal

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Verdict(NamedTuple):
    """Why a row is poisoned, and from which epoch."""

    reason: str
    epoch: int = 0
    """The first epoch of its source in which it holds."""


class PoisonedRowLog(Protocol):
    """What a SourceLoader needs of the verdicts; the runtime sends `add` to the planner, which owns the journal."""

    def add(self, source: str, row: int, reason: str, epoch: int = 0) -> None:
        """Record a row as poisoned from an epoch on; the verdict is on disk when this returns."""
        ...

    def known(self, source: str, rows: Int64s, epoch: int = 0) -> Bools:
        """Return which rows of a source are poisoned in an epoch."""
        ...

    def reason(self, source: str, row: int) -> str:
        """Return why a row is poisoned."""
        ...


class PoisonedRows:
    """The poisoned rows of one stream: those `known` from its state, and those that are added.

    A runtime with threads gives a lock, which is held while verdicts are read or changed.

    Example:
        >>> import tempfile
        >>> from overlord.stores.places import open_place
        >>> rows = PoisonedRows(Journal(open_place(tempfile.mkdtemp()), lambda: None))
        >>> rows.add("web", 17, "killed its worker twice: signal 11")
        >>> rows.known("web", np.array([16, 17])).tolist()
        [False, True]
        >>> rows.to_json()
        {'web': {'17': 'killed its worker twice: signal 11'}}
    """

    def __init__(
        self,
        journal: Journal,
        known: Mapping[str, Mapping[int, Verdict]] | None = None,
        *,
        step: int = 0,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._journal = journal
        self._verdicts = {source: dict(rows) for source, rows in (known or {}).items()}
        self._lock: AbstractContextManager[Any] = lock or nullcontext()
        self.step = step
        """The step that is being planned: the record of a verdict belongs to the lineage that reached it."""

    @classmethod
    def recover(
        cls,
        journal: Journal,
        state: Mapping[str, Any] | None,
        later: Iterable[Mapping[str, Any]],
        names: Sequence[str],
        lock: AbstractContextManager[Any] | None = None,
    ) -> PoisonedRows:
        """Return the poisoned rows that a stream continues with.

        They are those of its state and, if the stream continues a lineage of its store, those journaled after that
        state (`later`). A state given by the user may belong to another lineage than the journal, so then only the
        state counts: pass no `later`. Nothing is written again: either the journal is continued, or a new lineage
        starts with all of them.

        Raises:
            StateError: when the state's verdicts are damaged.
        """
        if state is None:
            return cls(journal, lock=lock)
        known = verdicts_from_json(state.get("verdicts"), names)
        for record in later:
            if record["kind"] == "verdict" and record["source"] in names:
                verdict = Verdict(record["reason"], record.get("epoch", 0))
                known.setdefault(record["source"], {}).setdefault(record["row"], verdict)
        return cls(journal, known, step=state["step"], lock=lock)

    def add(self, source: str, row: int, reason: str, epoch: int = 0) -> None:
        """Record a row as poisoned from an epoch on; on disk when this returns. The first verdict of a row stays."""
        with self._lock:
            if row in self._verdicts.get(source, ()):
                return
            record = {"kind": "verdict", "step": self.step, "source": source, "row": row, "reason": reason}
            self._journal.append(record | ({"epoch": epoch} if epoch else {}), durable=True)
            self._verdicts.setdefault(source, {})[row] = Verdict(reason, epoch)

    def known(self, source: str, rows: Int64s, epoch: int = 0) -> Bools:
        """Return which rows of a source are poisoned in an epoch."""
        with self._lock:
            return poisoned_in(self._verdicts.get(source, {}), rows, epoch)

    def reason(self, source: str, row: int) -> str:
        """Return why a row is poisoned."""
        with self._lock:
            return self._verdicts[source][row].reason

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return all verdicts by source name and row, sorted: the reason, with the epoch where that is not 0."""
        with self._lock:
            return {
                source: {str(row): list(rows[row]) if rows[row].epoch else rows[row].reason for row in sorted(rows)}
                for source, rows in sorted(self._verdicts.items())
            }


def poisoned_in(verdicts: Mapping[int, Verdict], rows: Int64s, epoch: int) -> Bools:
    """Return which rows are poisoned in an epoch.

    Example:
        >>> poisoned_in({7: Verdict("why", epoch=1)}, np.array([6, 7]), 0).tolist()
        [False, False]
        >>> poisoned_in({7: Verdict("why", epoch=1)}, np.array([6, 7]), 1).tolist()
        [False, True]
    """
    if not verdicts:  # as in nearly all sources
        return np.zeros(len(rows), np.bool_)
    return np.isin(rows, np.array([row for row, one in verdicts.items() if one.epoch <= epoch], np.int64))


def verdicts_from_json(given: Any, names: Sequence[str]) -> dict[str, dict[int, Verdict]]:
    """Read the verdicts of a state; a state may have none.

    Raises:
        StateError: for anything but the output of `PoisonedRows.to_json`.
    """
    if not given:
        return {}
    try:
        found = {source: {_row(row): _verdict(one) for row, one in rows.items()} for source, rows in given.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _damaged(f"{given!r:.80} are no verdicts ({error})") from None
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise _damaged(f"it has verdicts of {unknown[0]!r}, which is not a source of the job")
    return found


def _row(text: str) -> int:
    row = int(text)
    if not 0 <= row < 1 << 63 or str(row) != text:
        raise ValueError(f"row {text!r}")
    return row


def _verdict(given: Any) -> Verdict:
    if isinstance(given, str):
        return Verdict(given)
    reason, epoch = given
    if type(epoch) is not int or epoch < 1:
        raise ValueError(f"epoch {epoch!r}")
    return Verdict(str(reason), epoch)


def _damaged(what: str) -> StateError:
    return StateError(
        f"the state is damaged: {what}; rows that kill their workers would be run again. Use an undamaged state, as "
        "client.state_dict() returned it."
    )
