"""What a running service does, from two looks at its status: rates, and one sentence about what holds it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlord.reports.summary import percent

Mood = Literal["well", "waiting", "failing"]


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two looks at a service."""

    seconds: float
    steps_per_s: float
    tokens_per_s: float
    wait_share: float
    """Share of the time that trainers waited for batches: those of the host where they waited most."""
    source_tokens_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    rows_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rows of each source that its workers have read and measured."""
    waited_share: Mapping[str, float] = field(default_factory=dict[str, float])
    """Share of the time that planner and constructors waited for a source."""


def rates_of(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Rates:
    """Return the rates between two statuses; of counters that began anew in between, since then.

    Example:
        >>> idle = {"planner": {"next_step": 5}, "waited_s": 1.0, "clients": {}, "sources": {}}
        >>> rates_of(idle, {**idle, "planner": {"next_step": 9}, "waited_s": 1.5}, 2.0).steps_per_s
        2.0
    """
    seconds = max(seconds, 1e-9)

    def rate(old: float, new: float) -> float:
        return (new - old if new >= old else new) / seconds

    pairs = {name: (before["sources"].get(name, one), one) for name, one in after["sources"].items()}
    tokens = {name: rate(old["tokens"], new["tokens"]) for name, (old, new) in pairs.items()}
    return Rates(
        seconds=seconds,
        steps_per_s=rate(before["planner"]["next_step"], after["planner"]["next_step"]),
        tokens_per_s=sum(tokens.values()),
        source_tokens_per_s=tokens,
        wait_share=min(rate(before["waited_s"], after["waited_s"]), 1.0),
        rows_per_s={n: rate(old["samples_prepared"], new["samples_prepared"]) for n, (old, new) in pairs.items()},
        waited_share={n: min(rate(old["waited_s"], new["waited_s"]), 1.0) for n, (old, new) in pairs.items()},
    )


def sentence_of(status: Mapping[str, Any], rates: Rates) -> tuple[str, Mood]:
    """Return what holds up the trainers in one sentence, and how serious that is."""
    if status.get("failed"):
        return str(status["failed"]), "failing"
    if (status.get("service") or {}).get("state", "up") != "up":
        return "the service process is being started again; trainers go on with what they have", "failing"
    if status["store"]["error"]:
        return f"planning pauses, since the store fails: {status['store']['error']}", "failing"
    waits = status["planner"]["waits_for_report"]
    found = (status.get("scaling") or {}).get("bottleneck")
    if not status["clients"]:
        return "no trainer is attached", "waiting"
    if waits is not None:
        return (
            f"the next step waits for the report of step {waits}, which the mixture or the strategy follows",
            "waiting",
        )
    if found:
        return f"trainers wait {percent(rates.wait_share)} of the time: {found}", "waiting"
    if rates.wait_share >= 0.05:
        return f"trainers wait {percent(rates.wait_share)} of the time, and no source alone is the reason", "waiting"
    return f"training is not waiting for data ({percent(rates.wait_share)} of the time)", "well"
