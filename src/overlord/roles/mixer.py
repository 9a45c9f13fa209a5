"""Mixer: the weights of a step, from the job's schedule, a live change, or a rule that learns from reports.

Rules of this file:
1. The report of step s takes effect at step s + lag, whenever it arrives. If a rule needs a report that is missing,
   ReportMissing is raised before anything has changed.
2. The metrics of a source are weighted by the tokens that the plan gave it, not by numbers of the reporter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Draw
from overlord.core.spec_errors import did_you_mean
from overlord.errors import ReportMissing, SpecError, StateError
from overlord.job.reconcile import RULE_BEGINS
from overlord.job.specs import Job, Mixture
from overlord.planning.learning.learner import Learner
from overlord.planning.learning.rules import FunctionRule, make_rule
from overlord.roles.changes import InputLog, Report

Int64s = npt.NDArray[np.int64]

_METRICS = ("loss", "reference", "excess")
"""Kinds of metrics that rules use: the part of a key before the slash and the source's name."""


class Mixer:
    """The mixture of a stream, step by step; a part of the Drawer."""

    def __init__(
        self, job: Job, base: Mapping[str, float], inputs: InputLog, step: int, state: Mapping[str, Any] | None
    ) -> None:
        self._names = list(inputs.roster_at(step - 1).names)
        self._base = base
        self._inputs = inputs
        self._lag = job.lag
        self._version = 0
        self._pending: dict[int, tuple[int, list[int]]] = {}
        self._mixture, self._since = inputs.mixture_at(step - 1)
        self._rule = self._new_rule()
        self._rule_base = 0
        if state is not None:
            self._restore(state)
        elif self._rule is not None and step > 0:
            raise _damaged("it has none")

    @property
    def mixture(self) -> Mixture:
        """The mixture in force."""
        return self._mixture

    @property
    def version(self) -> int:
        """The version of the mixture: grows with every report that took effect and every change."""
        return self._version

    def missing_report(self, step: int) -> int | None:
        """Return the step of the report that is needed to draw `step` and has not arrived; None if there is none."""
        if self._inputs.mixture_at(step)[1] != self._since:
            return None  # a change takes effect here: reports on the old mixture do not matter
        needed = step - self._lag
        wanted = needed in self._pending and self._inputs.report_of(needed) is None
        return needed if wanted else None

    def begin(self, step: int) -> None:
        """Advance to a step: apply a change, or learn from the report that takes effect here."""
        missing = self.missing_report(step)
        if missing is not None:
            raise ReportMissing(
                f"step {step} needs the report of step {missing}: its mixture follows the losses with lag={self._lag}. "
                f"Call client.report({missing}, {{'loss/SOURCE': ..}}) on one rank before requesting step {step}."
            )
        mixture, since = self._inputs.mixture_at(step)
        self._names = list(self._inputs.roster_at(step).names)  # an added source also changes the mixture
        if since != self._since:
            self._mixture, self._since = mixture, since
            self._version += 1
            self._rule_base = self._version
            self._pending.clear()
            self._rule = self._new_rule()
        elif step - self._lag in self._pending:
            self._observe(step - self._lag)

    def check_report(self, step: int, report: Report) -> None:
        """Refuse a report that the rule cannot learn from, before it is journaled.

        Raises:
            SpecError: for an invalid loss, or a metric that the rule needs and does not find.
        """
        if self._rule is None:
            return
        if not isinstance(self._rule, FunctionRule):
            self._check_names(step, report)
        if step in self._pending:
            self._teach(copy.deepcopy(self._rule), step, report)

    def _check_names(self, step: int, report: Report) -> None:
        told = [key.split("/", 1) for key in report if key.split("/", 1)[0] in _METRICS and "/" in key]
        for kind, name in told:
            if name not in self._names:
                raise SpecError(
                    f"report: {kind}/{name} at step {step}: no source has the name {name!r}, so the mixture would not "
                    f"learn from it.{did_you_mean(name, self._names)} Sources: {', '.join(self._names[:12])}."
                )
        if not told:
            raise SpecError(
                f"report: the report of step {step} has no metric of a source ({', '.join(list(report)[:4]) or 'none'} "
                "given), and the mixture follows the losses; its weights would drift. Report as in {'loss/"
                f"{self._names[0]}': 2.1}}."
            )

    def weights(self, position: float) -> list[float]:
        """Return the weight of each source at a step, or inside one."""
        if self._rule is not None:
            return [float(w) for w in self._rule.weights(int(position))]
        return self._mixture.weights_at(position, self._names, self._base)

    def weights_ahead(self, step: int) -> list[float]:
        """Return the weights of a future step, as far as they are known now: later reports may change them.

        Sources that are parked or removed at that step have weight 0.
        """
        roster, (mixture, since) = self._inputs.roster_at(step), self._inputs.mixture_at(step)
        if self._rule is not None and since == self._since:
            weights = self.weights(step) + [0.0] * (len(roster.names) - len(self._names))
        else:
            weights = mixture.weights_at(float(step), list(roster.names), self._base)
        return [0.0 if i in roster.parked or i in roster.removed else w for i, w in enumerate(weights)]

    def end(self, draw: Draw) -> None:
        """Keep the loss tokens of each source in a drawn step until its report takes effect."""
        learn = self._mixture.learn
        if self._rule is not None and learn is not None and draw.step % learn.every == 0:
            counts = np.bincount(draw.source, draw.meta["loss_tokens"], len(self._names)).astype(np.int64)
            self._pending[draw.step] = (self._version, counts.tolist())

    def state(self) -> dict[str, Any] | None:
        """Return the state to save, as JSON; None for a mixture that has not changed."""
        if self._rule is None and self._version == 0:
            return None
        return {
            "version": self._version,
            "rule_base": self._rule_base,
            "rule": None if self._rule is None else self._rule.state_dict(),
            "pending": {str(step): [version, *counts] for step, (version, counts) in self._pending.items()},
        }

    def _new_rule(self) -> Learner | None:
        learn = self._mixture.learn
        if learn is None:
            return None
        prior = self._mixture.weights_at(0.0, self._names, self._base)
        given, options = dict(zip(self._names, prior, strict=True)), learn.options()
        if learn.graph is not None:
            # A source has influence 1 on itself unless the graph says otherwise.
            rows = [[learn.graph.get(a, {}).get(b, float(a == b)) for b in self._names] for a in self._names]
            options["graph"] = np.array(rows)
        return make_rule(learn.method, self._names, given, options, self._lag)

    def _observe(self, step: int) -> None:
        report = self._inputs.report_of(step)
        assert report is not None and self._rule is not None
        self._teach(self._rule, step, report)
        del self._pending[step]
        self._version = self._rule_base + self._rule.version

    def _teach(self, rule: Learner, step: int, report: Report) -> None:
        if isinstance(rule, FunctionRule):
            rule.observe_metrics(step, report)
            return
        version, counts = self._pending[step]
        loss, seen = _by_source(report, "loss", self._names)
        tokens = np.where(seen, np.asarray(counts, np.int64), 0)
        extra = {kind: _by_source(report, kind, self._names) for kind in _kinds(report) if kind != "loss"}
        means = {kind: np.where(found, values, np.nan) for kind, (values, found) in extra.items()}
        rule.observe(step, version - self._rule_base, loss * tokens, tokens, means)

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            self._version, self._rule_base = int(state["version"]), int(state["rule_base"])
            self._pending = {
                int(step): (int(row[0]), [int(n) for n in row[1:]]) for step, row in state["pending"].items()
            }
            saved = state["rule"]
            wrong = any(len(counts) != len(self._names) for _, counts in self._pending.values())
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise _damaged(error) from None
        if saved == RULE_BEGINS:
            return
        if wrong or (saved is None) != (self._rule is None):
            raise _damaged("its mixture does not belong to the job's")
        if self._rule is not None:
            self._rule.load_state_dict(saved)


def _kinds(report: Report) -> Sequence[str]:
    return sorted({key.split("/", 1)[0] for key in report if "/" in key})


def _by_source(
    report: Report, kind: str, names: Sequence[str]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return one number for each source, from keys such as "loss/web", and which were given."""
    given = [report.get(f"{kind}/{name}") for name in names]
    return np.array([v if v is not None else 0.0 for v in given]), np.array([v is not None for v in given])


def _damaged(what: object) -> StateError:
    return StateError(
        f"the state is damaged: the mixture in it cannot be read ({what}); the weights would continue differently. Use "
        "an undamaged state, as client.state_dict() returned it."
    )
