"""Verdicts: which rows killed their worker twice and are not run again; a stand-in takes their place for good.

Rules of this file:
1. A verdict is on disk before it counts: what a plan was made with, a resume must know.
2. It is about a row of a source, from the epoch on in which it killed its worker; no rank, loader or time is in it.
   What was delivered of the row in earlier epochs stays, and is planned again as it was.
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
    """Why a row is given up, and since when."""

    reason: str
    epoch: int = 0
    """The first epoch of its source in which it is."""


class VerdictBook(Protocol):
    """What a SourceLoader asks of the verdicts, wherever they are written down."""

    def add(self, source: str, row: int, reason: str, epoch: int = 0) -> None:
        """Give up a row from an epoch on; on disk when this returns."""
        ...

    def known(self, source: str, rows: Int64s, epoch: int = 0) -> Bools:
        """Return which rows of a source are given up in an epoch."""
        ...

    def reason(self, source: str, row: int) -> str:
        """Return why a row was given up."""
        ...


class Verdicts:
    """The verdicts of one stream.

    Args:
        journal: Where a verdict is written down.
        known: Those of its state, as `verdicts_from_json` gives them.
        lock: Held while verdicts are read or changed; a runtime with threads gives one.

    Example:
        >>> import tempfile
        >>> from overlord.stores.places import open_place
        >>> verdicts = Verdicts(Journal(open_place(tempfile.mkdtemp()), lambda: None))
        >>> verdicts.add("web", 17, "killed its worker twice: signal 11")
        >>> verdicts.known("web", np.array([16, 17])).tolist()
        [False, True]
        >>> verdicts.to_json()
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
        self._given_up = {source: dict(rows) for source, rows in (known or {}).items()}
        self._lock: AbstractContextManager[Any] = lock or nullcontext()
        self.step = step
        """The step that is being planned: a verdict's record belongs to the lineage that reached it."""

    @classmethod
    def recover(
        cls,
        journal: Journal,
        state: Mapping[str, Any] | None,
        later: Iterable[Mapping[str, Any]],
        names: Sequence[str],
        lock: AbstractContextManager[Any] | None = None,
    ) -> Verdicts:
        """Return the verdicts a stream goes on with.

        Those of its state; and where it goes on in a lineage of its store, what was journaled after that (`later`). A
        state that was given may be of another lineage than the journal, so nothing but the state counts then: pass no
        `later`. Nothing is written again: either the journal goes on, or a new lineage begins with all of them.

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
        """Give up a row from an epoch on; the verdict is on disk when this returns. The first one stays."""
        with self._lock:
            if row in self._given_up.get(source, ()):
                return
            record = {"kind": "verdict", "step": self.step, "source": source, "row": row, "reason": reason}
            self._journal.append(record | ({"epoch": epoch} if epoch else {}), durable=True)
            self._given_up.setdefault(source, {})[row] = Verdict(reason, epoch)

    def known(self, source: str, rows: Int64s, epoch: int = 0) -> Bools:
        """Return which rows of a source are given up in an epoch."""
        with self._lock:
            return rows_given_up(self._given_up.get(source, {}), rows, epoch)

    def reason(self, source: str, row: int) -> str:
        """Return why a row was given up."""
        with self._lock:
            return self._given_up[source][row].reason

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return all verdicts by source name and row, sorted: the reason, and its epoch where that is not the first."""
        with self._lock:
            return {
                source: {str(row): list(rows[row]) if rows[row].epoch else rows[row].reason for row in sorted(rows)}
                for source, rows in sorted(self._given_up.items())
            }


def rows_given_up(verdicts: Mapping[int, Verdict], rows: Int64s, epoch: int) -> Bools:
    """Return which rows are given up in an epoch.

    Example:
        >>> rows_given_up({7: Verdict("why", epoch=1)}, np.array([6, 7]), 0).tolist()
        [False, False]
        >>> rows_given_up({7: Verdict("why", epoch=1)}, np.array([6, 7]), 1).tolist()
        [False, True]
    """
    return np.isin(rows, np.array([row for row, one in verdicts.items() if one.epoch <= epoch], np.int64))


def verdicts_from_json(given: Any, names: Sequence[str]) -> dict[str, dict[int, Verdict]]:
    """Read the verdicts of a state; a state may have none.

    Raises:
        StateError: for what `Verdicts.to_json` did not write.
    """
    if not given:
        return {}
    try:
        found = {source: {_row(row): _verdict(one) for row, one in rows.items()} for source, rows in given.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _damaged(f"{given!r:.80} are no verdicts ({error})") from None
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise _damaged(f"it has verdicts of {unknown[0]!r}, which is no source of the job")
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
        f"the state is damaged: {what}; rows that kill their workers would run again. Use an undamaged state, as "
        "client.state_dict() returned it."
    )
