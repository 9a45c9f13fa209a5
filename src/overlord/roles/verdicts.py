"""Verdicts: which rows killed their worker twice and are not run again; a stand-in takes their place for good.

Rules of this file:
1. A verdict is on disk before it counts: what a plan was made with, a resume must know.
2. It is about a row of a source, in every epoch; no rank, loader or time is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overlord.errors import StateError
from overlord.stores.journal import Journal

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class VerdictBook(Protocol):
    """What a SourceLoader asks of the verdicts, wherever they are written down."""

    def add(self, source: str, row: int, reason: str) -> None:
        """Give up a row; on disk when this returns."""
        ...

    def known(self, source: str, rows: Int64s) -> Bools:
        """Return which rows of a source are given up."""
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
        known: Mapping[str, Mapping[int, str]] | None = None,
        *,
        step: int = 0,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._journal = journal
        self._reasons = {source: dict(rows) for source, rows in (known or {}).items()}
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
                known.setdefault(record["source"], {}).setdefault(record["row"], record["reason"])
        return cls(journal, known, step=state["step"], lock=lock)

    def add(self, source: str, row: int, reason: str) -> None:
        """Give up a row; the verdict is on disk when this returns. The first reason stays."""
        with self._lock:
            if row in self._reasons.get(source, ()):
                return
            record = {"kind": "verdict", "step": self.step, "source": source, "row": row, "reason": reason}
            self._journal.append(record, durable=True)
            self._reasons.setdefault(source, {})[row] = reason

    def known(self, source: str, rows: Int64s) -> Bools:
        """Return which rows of a source are given up."""
        with self._lock:
            given_up = list(self._reasons.get(source, ()))
        if not given_up:
            return np.zeros(len(rows), np.bool_)
        return np.isin(rows, np.array(given_up, np.int64))

    def reason(self, source: str, row: int) -> str:
        """Return why a row was given up."""
        with self._lock:
            return self._reasons[source][row]

    def to_json(self) -> dict[str, dict[str, str]]:
        """Return all verdicts by source name and row, sorted."""
        with self._lock:
            return {
                source: {str(row): rows[row] for row in sorted(rows)} for source, rows in sorted(self._reasons.items())
            }


def verdicts_from_json(given: Any, names: Sequence[str]) -> dict[str, dict[int, str]]:
    """Read the verdicts of a state; a state may have none.

    Raises:
        StateError: for what `Verdicts.to_json` did not write.
    """
    if not given:
        return {}
    try:
        found = {source: {_row(row): str(reason) for row, reason in rows.items()} for source, rows in given.items()}
    except (AttributeError, ValueError) as error:
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


def _damaged(what: str) -> StateError:
    return StateError(
        f"the state is damaged: {what}; rows that kill their workers would run again. Use an undamaged state, as "
        "client.state_dict() returned it."
    )
