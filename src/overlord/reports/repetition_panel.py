"""Repeated sources over the steps of a run: passes, losses and the spread of alpha, and when to worry.

    shown_repetition   what the live page draws, from the history of a service
    overfitting        sources of which three signs agree that their repetition is learned by heart

Training losses are reported as "loss/NAME", held-out losses as "heldout/NAME", and the spread of alpha over the blocks
of the model as "alpha/std", as `LayerBalance.metrics` does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from overlord.planning.learning.repetition import effective_epochs
from overlord.reports.passes import ORDINALS, passes, worth_of

MARKED = (4, 16)
"""Passes that are marked: up to 4, repeated data is worth about as much as new data, beyond 16 little."""
MOST_SOURCES = 12
GROWN = 4 / 3
"""How much the spread of alpha has grown since the fourth epoch of a source where that is a sign."""
FEWEST = 4
"""Values of a loss since the fourth epoch that a trend needs."""

Series = Mapping[str, Sequence[float]]


class Trend(NamedTuple):
    """A loss since a step: the means of the third and of the last quarter of its values."""

    before: float
    now: float


def shown_repetition(history: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lines, marks and warnings of the panel.

    Args:
        history: What `service.history()` returned.
    """
    measured, reports = history["measured"], history["reports"]
    epochs: dict[str, Series] = {
        name.removeprefix("epochs/"): series for name, series in measured.items() if name.startswith("epochs/")
    }
    repeated = sorted(epochs, key=lambda name: (-epochs[name]["mean"][-1], name))
    shown = repeated[:MOST_SOURCES]
    losses = {f"{kind}/{name}": reports.get(f"{kind}/{name}") for name in shown for kind in ("loss", "heldout")}
    spread = reports.get("alpha/std")
    marks = [
        {"step": step, "source": name, "epochs": passed}
        for name in shown
        for passed in MARKED
        if (step := first_step(epochs[name], passed)) is not None
    ]
    return {
        "epochs": {name: epochs[name] for name in shown},
        "worth": {name: effective_epochs(epochs[name]["mean"][-1]) for name in shown},
        "losses": {name: series for name, series in losses.items() if series is not None},
        "spread": {} if spread is None else {"alpha/std": spread},
        "marks": sorted(marks, key=lambda mark: (mark["step"], mark["source"])),
        "left_out": len(repeated) - len(shown),
        "warnings": [warning for name in repeated if (warning := overfitting(name, epochs[name], reports))],
    }


def first_step(epochs: Series, passed: float) -> int | None:
    """Return the first step at which a source has been passed over so often; None where it was not yet.

    Example:
        >>> first_step({"step": [0, 10, 20], "mean": [0.5, 3.9, 4.1]}, 4)
        20
    """
    return next((int(step) for step, mean in zip(epochs["step"], epochs["mean"], strict=True) if mean >= passed), None)


def overfitting(name: str, epochs: Series, reports: Mapping[str, Series]) -> str | None:
    """Return a warning where three signs agree that a source was repeated too often; None otherwise.

    The signs: more passes than are worth anything; a held-out loss that rises while the training loss falls; and
    blocks of the model that have come apart, by a third, since the fourth epoch of the source. One sign alone is no
    reason: losses rise for many reasons, and alpha moves in every run.
    """
    since = first_step(epochs, MARKED[0])
    if since is None or epochs["mean"][-1] < MARKED[-1]:
        return None
    trained, held_out = trend(reports.get(f"loss/{name}"), since), trend(reports.get(f"heldout/{name}"), since)
    if trained is None or held_out is None or trained.now >= trained.before or held_out.now <= held_out.before:
        return None
    spread = reports.get("alpha/std")
    if spread is None or not len(spread["mean"]):
        return None
    at_fourth = spread["mean"][max(bisect_right(spread["step"], since) - 1, 0)]
    if not at_fourth > 0 or spread["mean"][-1] < GROWN * at_fourth:
        return None
    count = epochs["mean"][-1]
    return (
        f"{name} was read {passes(count)} times, {worth_of(count)}. Since its "
        f"{ORDINALS[MARKED[0]]} epoch, at step {since:,}, its held-out loss rises ({held_out.before:.3g} to "
        f"{held_out.now:.3g}) while its training loss falls ({trained.before:.3g} to {trained.now:.3g}), and alpha/std "
        f"grew from {at_fourth:.3g} to {spread['mean'][-1]:.3g}: it is learned by heart. Lower its weight, let weights "
        "follow repetition (learn: repetition), limit it (max_repetition), or add data to it."
    )


def trend(series: Series | None, since: int) -> Trend | None:
    """Return how a loss has moved since a step; None while there are too few values.

    Example:
        >>> trend({"step": [0, 1, 2, 3, 4], "mean": [9.0, 4.0, 3.0, 2.0, 1.0]}, 1)
        Trend(before=2.0, now=1.0)
    """
    if series is None:
        return None
    values = [mean for step, mean in zip(series["step"], series["mean"], strict=True) if step >= since]
    if len(values) < FEWEST:
        return None
    quarter = len(values) // 4
    return Trend(sum(values[-2 * quarter : -quarter]) / quarter, sum(values[-quarter:]) / quarter)
