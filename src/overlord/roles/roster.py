"""Which sources a stream has at a step: who has come, gone, is parked. Read from the log of changes by step alone.

Rules of this file:
1. A source keeps its number for good. Who comes takes the next one; who goes leaves its row behind.
2. Of several changes of one source the latest step counts, and of one step the latest word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from overlord.core.specs import Source


class RosterChange(Protocol):
    """What a change tells of a source; other changes have another kind."""

    @property
    def kind(self) -> str:
        """Which change it is, such as "park"."""
        ...

    @property
    def at(self) -> int:
        """The first step it holds for."""
        ...

    @property
    def add(self) -> Source | None:
        """The source that comes."""
        ...

    @property
    def source(self) -> str:
        """The source that goes, is parked or returns."""
        ...

    @property
    def why(self) -> str:
        """Why it is parked."""
        ...

    @property
    def failed(self) -> bool:
        """Whether it could not be read."""
        ...


@dataclass(frozen=True, slots=True)
class Parked:
    """A source that is not drawn from for now."""

    since: int
    why: str
    failed: bool
    """Whether it could not be read; otherwise somebody asked for it."""


@dataclass(frozen=True, slots=True)
class Roster:
    """The sources at one step.

    Example:
        >>> roster_at(["a", "b"], [], 0).names
        ('a', 'b')
    """

    names: tuple[str, ...]
    """Every source that has a number at this step."""
    removed: frozenset[int] = frozenset()
    """Those that were taken out of the mixture for good."""
    parked: Mapping[int, Parked] = field(default_factory=dict[int, Parked])
    """Those that keep their cursor and their deficit until they return."""

    @property
    def drawn(self) -> list[str]:
        """The sources that may be drawn from."""
        return [n for i, n in enumerate(self.names) if i not in self.removed and i not in self.parked]


def roster_at(names: Sequence[str], changes: Sequence[RosterChange], step: int) -> Roster:
    """Return the sources at a step.

    Args:
        names: All sources by number; those that come by a change stand behind the others, in the order they come.
        changes: The log.
        step: The step.
    """
    comes = {change.add.name: change.at for change in changes if change.add is not None}
    here = tuple(name for name in names if comes.get(name, step) <= step)
    numbers = {name: number for number, name in enumerate(here)}
    removed: set[int] = set()
    parked: dict[int, Parked] = {}
    for change in sorted((c for c in changes if c.source and c.at <= step), key=lambda c: c.at):
        number = numbers.get(change.source)
        if number is None:
            continue
        if change.kind == "sources":
            removed.add(number)
        elif change.kind == "park":
            parked[number] = Parked(change.at, change.why, change.failed)
        else:
            parked.pop(number, None)
    return Roster(here, frozenset(removed), {n: one for n, one in parked.items() if n not in removed})


C = TypeVar("C", bound=RosterChange)


def roster_changes_from(changes: Sequence[C], step: int) -> list[C]:
    """Return the changes of the roster that a stream which begins at a step must know.

    All who came and went: the job may not have them. Of parkings only those in force, and what is still ahead.
    """
    latest: dict[str, C] = {}
    for change in changes:
        if change.kind in ("park", "return") and change.at < step:
            before = latest.get(change.source)
            if before is None or before.at <= change.at:
                latest[change.source] = change
    kept = [one for one in changes if one.kind == "sources"]
    kept += [one for one in latest.values() if one.kind == "park"]
    return kept + [one for one in changes if one.kind in ("park", "return") and one.at >= step]
