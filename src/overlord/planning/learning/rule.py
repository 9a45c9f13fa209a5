"""Mixing that learns from reported losses: the protocol of a rule, and rules by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from overlord.errors import SpecError
from overlord.planning.learning.ado import ADO
from overlord.planning.learning.learner import NO_EXTRA, Int64s
from overlord.planning.learning.portable_math import Float64s
from overlord.planning.learning.rules import ODM, DoReMi, FunctionRule, SkillIt

__all__ = ["ADO", "ODM", "RULES", "DoReMi", "FunctionRule", "MixingRule", "SkillIt", "make_rule"]


class MixingRule(Protocol):
    """Weights that depend on reports. The same reports give the same weights on every machine."""

    @property
    def version(self) -> int:
        """Which mixture `weights` gives now: one more with every observe that counts."""
        ...

    def weights(self, step: int) -> Float64s:
        """Return K weights with sum 1 for a step that is drawn now. Changes nothing."""
        ...

    def observe(
        self,
        step: int,
        mixture_version: int,
        loss_sum: Float64s,
        token_count: Int64s,
        extra: Mapping[str, Float64s] = NO_EXTRA,
    ) -> None:
        """Learn from a step's report. Called once for each step, in order; a step seen before is ignored.

        Args:
            step: The reported step.
            mixture_version: `version` when that step was drawn: plans are made ahead, reports come later.
            loss_sum: Sum of the losses of each source's tokens.
            token_count: Number of these tokens; 0 for a source that was not in the step or is not reported.
            extra: Further values for each source by name, nan where missing, such as "reference" for DoReMi.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned: JSON, bounded in size, exact."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; a damaged one, or one of another rule, raises StateError."""
        ...


RULES: Mapping[str, type[DoReMi | ODM | ADO | SkillIt | FunctionRule]] = {
    rule.kind: rule for rule in (DoReMi, ODM, ADO, SkillIt, FunctionRule)
}
"""Every rule by its name."""


def make_rule(
    kind: str, names: Sequence[str], prior: Mapping[str, float], options: Mapping[str, Any], lag: int
) -> MixingRule:
    """Return a rule by its name, for sources in a certain order.

    Args:
        kind: "doremi", "odm", "ado", "skill_it" or "function".
        names: The sources, in the order of all arrays.
        prior: Weight of each source; 0 for one that is not named. Empty makes all equal.
        options: The rule's own options, such as {"eta": 0.5}; a graph may map names to names to numbers.
        lag: Steps after which a report takes effect.

    Example:
        >>> rule = make_rule("odm", ["web", "code"], {"web": 3, "code": 1}, {"warmup": 100}, lag=16)
        >>> rule.weights(0).tolist()
        [0.75, 0.25]
    """
    if not isinstance(cast("object", kind), str) or kind not in RULES:
        raise SpecError(f"there is no learning rule {kind!r}. Choose one of {', '.join(RULES)}")
    unknown = sorted(set(prior) - set(names))
    if unknown:
        raise SpecError(
            f"the prior of {kind} names {unknown[0]!r}, which is no source. The sources are {list(names)[:8]}"
        )
    weights = [prior.get(name, 0.0) for name in names] if prior else [1.0] * len(names)
    rule = RULES[kind]
    given = dict(options)
    known = [name for name in inspect.signature(rule).parameters if name not in ("prior", "names", "lag")]
    for name in given:
        if name not in known:
            raise SpecError(
                f"{kind} has no option {name!r}, so it would do nothing. Its options are {', '.join(known)}"
            )
    for name in ("graph", "fn"):
        if name in known and name not in given:
            raise SpecError(f"{kind} needs the option {name!r}; without it the rule cannot learn. Give it")
    if isinstance(given.get("graph"), Mapping):
        given["graph"] = _as_table(given["graph"], names)
    if rule is FunctionRule:
        given["names"] = names
    return rule(prior=weights, lag=lag, **given)


def _as_table(graph: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[list[float]]:
    for teacher, row in graph.items():
        if not isinstance(cast("object", row), Mapping):
            raise SpecError(
                f"row {teacher!r} of the graph is {row!r}, not a mapping of sources to numbers. Write it as in "
                "{'math': {'code': 0.4}}"
            )
    for name in (*graph, *(taught for row in graph.values() for taught in row)):
        if name not in names:
            raise SpecError(
                f"the graph of skill_it names {name!r}, which is no source. The sources are {list(names)[:8]}"
            )
    return [[graph.get(teacher, {}).get(taught, 0.0) for taught in names] for teacher in names]
