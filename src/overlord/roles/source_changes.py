"""Sources that come, go, are parked and return while a stream runs: what is asked for is checked and written down.

Rules of this file:
1. A change takes effect at a step that is not planned yet. What is refused has changed nothing.
2. Who comes takes the next number, so sources come in the order of their steps.
3. What is refused does not depend on the order of the calls either: a change is held against all that were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from overlord.core.spec_errors import did_you_mean, is_finite, list_some
from overlord.core.specs import Source
from overlord.errors import SpecError
from overlord.roles.inputs import Change, InputLog
from overlord.roles.roster import Parked, Roster

Effective = Callable[[str, int | None], int]
"""Tells the step that a change takes effect at, from its name and what was asked for; refuses a planned one."""


class SourceChanges:
    """The changes of one stream's roster; a part of the Planner."""

    def __init__(self, inputs: InputLog, base: dict[str, float], effective: Effective) -> None:
        self._inputs = inputs
        self._base = base
        self._effective = effective

    def check_name(self, name: str) -> None:
        """Refuse the name of a new source that is taken."""
        if name in self._inputs.names:
            raise SpecError(
                f"add_source: there is a source {name!r} already (removed ones keep their name); cursors and weights "
                "are kept by name and would mix the two. Give it another name."
            )

    def step_of_add(self, at_step: int | None) -> int:
        """Return the step a new source comes at; not before another one that is still to come."""
        at = self._effective("add_source", at_step)
        last = max((change.at for change in self._inputs.changes if change.add is not None), default=0)
        if at_step is not None and at < last:
            raise SpecError(
                f"add_source: step {at} lies before step {last}, where another new source comes; sources are numbered "
                f"in the order in which they come, and ties go by number. Use at_step={last} or more, or leave it out."
            )
        return max(at, last)

    def made(self, change_id: str) -> int | None:
        """Return the step of a change that was asked for before, by the id its caller knows it by."""
        return self._inputs.step_of(change_id)

    def check_add(self, name: str, weight: float | None, at_step: int | None) -> None:
        """Refuse a new source before it is opened."""
        self.check_name(name)
        self._check_share(name, weight, self.step_of_add(at_step))

    def add(
        self, source: Source, weight: float | None, at: int, base: Mapping[str, float], change_id: str = ""
    ) -> None:
        """Write down that a source comes at a step; its loaders are there already.

        Args:
            source: The source, as it was opened.
            weight: Against the others' weights; None for their mean.
            at: What `step_of_add` gave.
            base: The weights that stand beside all sources, this one included.
            change_id: What its caller knows the change by.
        """
        self.check_name(source.name)
        self._check_share(source.name, weight, at)
        change = Change("sources", at, add=source, weight=weight, id=change_id)
        self._inputs.check("add_source", change, base)
        self._base.update(base)
        self._inputs.add_change(change)

    def _check_share(self, name: str, weight: float | None, at: int) -> None:
        """Refuse a weight that is none, and a mixture that no source can join."""
        if weight is not None and not (is_finite(weight) and weight >= 0):
            raise SpecError(
                f"add_source: weight is {weight!r}; it gives no share of the mixture. Give a number of 0 or more."
            )
        learn = self._inputs.mixture_at(at)[0].learn
        if learn is not None and learn.method == "function":
            raise SpecError(
                f"add_source: the mixture follows the function {learn.name!r}, which cannot be written down "
                f"with one more source; a resume could not repeat it. Put {name!r} into the job, and launch it again "
                "from a state with reconcile='allow_add'."
            )

    def mean_weight(self) -> float:
        """Return the mean of the weights that stand beside the sources."""
        others = [weight for weight in self._base.values() if weight > 0]
        return sum(others) / len(others) if others else 1.0

    def remove(self, name: str, at_step: int | None = None, *, change_id: str = "") -> int:
        """Take a source out of the mixture for good, from a step on; return that step."""
        made = self.made(change_id)
        if made is not None:
            return made
        at = self._effective("remove_source", at_step)
        self._find("remove_source", name, at)
        change = Change("sources", at, source=name, id=change_id)
        self._inputs.check("remove_source", change)
        self._inputs.add_change(change)
        return at

    def park(
        self,
        name: str,
        at_step: int | None = None,
        *,
        why: str = "asked for",
        failed: bool = False,
        change_id: str = "",
    ) -> int:
        """Draw nothing from a source from a step on, until it returns; return that step."""
        made = self.made(change_id)
        if made is not None:
            return made
        at = self._effective("park_source", at_step)
        number, roster = self._find("park_source", name, at)
        if number in roster.parked:
            raise SpecError(
                f"park_source: {name!r} is parked already, since step {roster.parked[number].since}; nothing would "
                "change. Call return_source to draw from it again."
            )
        self._inputs.add_change(Change("park", at, source=name, why=why, failed=failed, id=change_id))
        return at

    def give_back(self, name: str, at_step: int | None = None, *, change_id: str = "") -> int:
        """Draw from a parked source again, from a step on, where it stood; return that step."""
        made = self.made(change_id)
        if made is not None:
            return made
        at = self._effective("return_source", at_step)
        number, roster = self._find("return_source", name, at)
        if number not in roster.parked:
            raise SpecError(f"return_source: {name!r} is not parked at step {at}; nothing would change. Leave it.")
        self._inputs.add_change(Change("return", at, source=name, id=change_id))
        return at

    def parked(self, step: int) -> dict[str, Parked]:
        """Return the sources that are parked at a step, by name."""
        roster = self._inputs.roster_at(step)
        return {roster.names[number]: one for number, one in roster.parked.items()}

    def _find(self, what: str, name: str, at: int) -> tuple[int, Roster]:
        roster = self._inputs.roster_at(at)
        if name not in roster.names:
            raise SpecError(
                f"{what}: no source has the name {name!r} at step {at}; nothing would change."
                f"{did_you_mean(name, roster.names)} Sources: {list_some(roster.names)}."
            )
        number = roster.names.index(name)
        if number in roster.removed:
            raise SpecError(f"{what}: {name!r} is removed, for good; nothing would change. Add it under another name.")
        return number, roster
