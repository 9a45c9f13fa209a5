"""What a running service does, in one sentence: what holds up its trainers, or what it is doing.

`overlord top`, `overlord status`, the live page and the report of a run all say what `sentence_of` makes of a status.
The rates in it are those that the service itself took, so all of them say the same, however often they ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from overlord.reports.summary import count, percent, size
from overlord.scaling.autoscaler import WAITING

Mood = Literal["well", "waiting", "failing"]

UNEXPLAINED = 0.05
"""Share of the time that trainers must wait before a wait without a known reason is mentioned."""
LONG_S = 10.0
"""A step that is waited for longer than this is mentioned as such."""


def remote_words(remote: Mapping[str, float]) -> str | None:
    """Return what was asked of object stores, in one line; None where nothing is remote.

    Example:
        >>> counts = {"requests": 1200, "bytes": 9.6e9, "retries": 3, "hedges": 0, "hits": 100, "hit_bytes": 3.2e9}
        >>> remote_words({**counts, "refreshed": 0, "damaged": 0, "p50_s": 0.032, "p99_s": 0.09}).replace("\u202f", " ")
        'remote files: 9.60 GB in 1,200 requests of 32 ms (99 %: 90 ms), 3 repeated, 25 % from the cache'
    """
    if not remote.get("requests") and not remote.get("hits"):
        return None
    took = f"{1e3 * remote['p50_s']:.0f} ms (99 %: {1e3 * remote['p99_s']:.0f} ms)"
    words = f"remote files: {size(remote['bytes'])} in {count(remote['requests'])} requests of {took}"
    said = {"retries": "repeated", "hedges": "sent twice", "damaged": "damaged entries of the cache"}
    words += "".join(f", {count(remote[name])} {what}" for name, what in said.items() if remote[name])
    if remote["hits"]:
        words += f", {percent(remote['hit_bytes'] / max(1.0, remote['hit_bytes'] + remote['bytes']))} from the cache"
    return words


def sentence_of(status: Mapping[str, Any]) -> tuple[str, Mood]:
    """Return what holds up the trainers in one sentence, and how serious that is.

    Example:
        >>> status = {"store": {"error": None}, "planner": {"waits_for_report": None}, "clients": {"0": 7}}
        >>> full = {"resource": "cpu", "words": "the CPUs of this host are full (2 CPUs, load 33)"}
        >>> rates = {"wait_share": 0.4, "since_step_s": 1.0, "worker_cpus": 0.5}
        >>> sentence_of({**status, "rates": rates, "pressure": {"here": {"short_of": [full]}}})[0].split(":")[0]
        'trainers wait 40\u202f% of the time'
    """
    if status.get("failed"):
        return str(status["failed"]), "failing"
    service = status.get("service") or {}
    if service.get("state", "up") != "up":
        does = f" ({service['doing']})" if service.get("doing") else ""
        return f"the service process is being started again{does}; trainers go on with what they have", "failing"
    if status["store"]["error"]:
        return f"planning pauses, since the store fails: {status['store']['error']}", "failing"
    if not status["clients"]:
        return "no trainer is attached", "waiting"
    waits = status["planner"]["waits_for_report"]
    if waits is not None:
        return (
            f"the next step waits for the report of step {waits}, which the mixture or the strategy follows",
            "waiting",
        )
    rates = status.get("rates")
    if rates is None:
        return "trainers are attached, and it is not known yet how long they wait", "well"
    share, reason = rates["wait_share"], held_up_by(status)
    waited = f"trainers wait {percent(share)} of the time"
    if share >= UNEXPLAINED and rates["since_step_s"] >= LONG_S:
        waited = f"trainers have waited {rates['since_step_s']:.0f} s for their next step"
    if reason:
        return f"{waited}: {reason}", "waiting"
    if share >= UNEXPLAINED:
        return f"{waited}, and no source alone is the reason", "waiting"
    well = f"training is not waiting for data ({percent(share)} of the time)"
    lasting = [words for resource, words in _short_of(status) if resource in ("space", "memory")]
    return (f"{well}, but {'; '.join(lasting)}", "waiting") if lasting else (well, "well")


def held_up_by(status: Mapping[str, Any]) -> str | None:
    """Return why trainers wait, if they do: what hosts are short of comes before any source."""
    if ((status.get("rates") or {}).get("wait_share") or 0.0) < WAITING:
        return None
    short = _short_of(status)
    if not short:
        return (status.get("scaling") or {}).get("bottleneck")
    reason = "; ".join(words for _, words in short)
    if any(resource == "cpu" for resource, _ in short):
        used = status["rates"]["worker_cpus"]
        reason += f"; {used:.1f} of them are used by the workers of this service, and more workers would not help"
    return reason


def _short_of(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the hosts of the service are short of, as (resource, words)."""
    found = [one for host in (status.get("pressure") or {}).values() for one in host["short_of"]]
    return [(one["resource"], one["words"]) for one in found]
