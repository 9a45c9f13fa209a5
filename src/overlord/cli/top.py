"""A running service over time: in the terminal (`overlord top`), and recorded for a trace (`overlord trace`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from overlord.cli.output import Screen, Tell
from overlord.cli.serving import COLOURS, find_status, where_it_is
from overlord.errors import OverlordError, ServiceLost
from overlord.reports.live import sentence_of
from overlord.reports.pages import Row, terminal_table
from overlord.reports.passes import passes, repetition_words
from overlord.reports.summary import count, number, percent, share, size

WIDE = 110
"""Columns from which all figures of a source are shown."""
SHOWN_REPORTS = 6
SHOWN_FAULTS = 4
LEAST_ROWS = 3
"""Sources that are shown in a terminal of any height."""
OTHER_LINES = 15
"""About so many lines are for everything but the sources."""


def top_view(status: Mapping[str, Any], *, width: int, height: int | None = None) -> RenderableType:
    """Return a look at a service for a terminal of a size; without a height all sources are shown."""
    words, mood = sentence_of(status)
    rates = status.get("rates") or {}
    steps = sorted(status["clients"].values())
    at = str(steps[0]) if steps and steps[0] == steps[-1] else f"{steps[0]} to {steps[-1]}" if steps else ""
    held = size(sum(status["memory"]["held"].values()))
    balance = status["measured"].get("balance")
    figures = [
        f"{number(len(steps), 'rank')} at step {at}" if steps else "no rank attached",
        "– steps/s" if not rates else f"{rates['steps_per_s']:.3g} steps/s",
        "– tokens/s" if not rates else f"{count(rates['tokens_per_s'])} tokens/s",
        f"planned to {status['planner']['next_step'] - 1}",
        f"{held} ahead",
        *([] if balance is None else [f"busiest rank {balance:.3f} of the mean"]),
    ]
    parts: list[RenderableType] = [
        Text(words, style=COLOURS[mood]),
        Text(" · ".join(figures)),
        Text(f"{status['runtime']} service, mesh {status['mesh']}", style="dim"),
        _sources(status, rates.get("sources", {}), width, height),
    ]
    parts += [table for table in (_hosts(status),) if table is not None]
    reports = list(status["reports"].items())
    if reports:
        shown = [f"{name} {one['value']:.4g}" for name, one in reports[:SHOWN_REPORTS]]
        more = f", {len(reports) - SHOWN_REPORTS} more" if len(reports) > SHOWN_REPORTS else ""
        parts.append(Text(f"reported at step {max(one['step'] for _, one in reports)}: {', '.join(shown)}{more}"))
    for fault in list(status.get("faults", ()))[-SHOWN_FAULTS:]:
        then = f"back after {fault['took_s']:.2f} s" if "took_s" in fault else "being replaced"
        clock = time.strftime("%H:%M:%S", time.localtime(fault["at"]))
        parts.append(Text(f"{clock} the {fault['role']} {fault['why']}; {then}", style="red"))
    parts += [Text(wait, style="yellow") for wait in status.get("waits", ())]
    return Group(*parts)


def _sources(
    status: Mapping[str, Any], rates: Mapping[str, Mapping[str, float]], width: int, height: int | None
) -> RenderableType:
    """Return the sources in the order of the job; where there is no room for all, those that are waited for most."""
    sources: Mapping[str, Mapping[str, Any]] = status["sources"]

    def rate(name: str, key: str) -> float:
        return rates.get(name, {}).get(key, 0.0)

    most = sorted(sources, key=lambda n: (-round(rate(n, "waited_share"), 2), -sources[n]["planned_share"], n))
    room = len(sources) if height is None else max(LEAST_ROWS, height - OTHER_LINES)
    shown = set(most[:room])
    heads = ["source", "planned", "realised", *(["tokens"] if width >= WIDE else []), "epochs", "bad"]
    heads += ["rows/s", "service waited", *(["workers", "buffer"] if width >= WIDE else [])]
    rows: list[Row] = []
    for name, one in sources.items():
        if name not in shown:
            continue
        bad = f"[red]{one['bad']:,}[/red]" if one["bad"] else "0"
        waited = percent(rate(name, "waited_share"))
        cells = [share(one["planned_share"]), share(one["realised_share"])]
        cells += [count(one["tokens"])] if width >= WIDE else []
        cells += [f"{passes(one['epochs'])}{where_it_is(one)}", bad, f"{rate(name, 'rows_per_s'):,.0f}", waited]
        cells += [str(one["workers"]), size(one["buffer_bytes"])] if width >= WIDE else []
        rows.append(Row(name, cells))
    notes = [f"{len(sources) - room} more sources, which the service waited for less"] if len(sources) > room else []
    repeated = repetition_words(sources)
    notes += [] if repeated is None else [repeated]
    notes.append("service waited: for the source, while it prepared steps ahead of the trainers")
    return Group(terminal_table(None, heads, rows, expand=False), *(Text(note, style="dim") for note in notes))


def _hosts(status: Mapping[str, Any]) -> RenderableType | None:
    """Return the processes that are down or were replaced; all that are up and well are one line."""
    hosts = list(status.get("hosts") or ())
    if not hosts:
        return None
    odd = [one for one in hosts if not one["up"] or one["restarts"]]
    well = Text(f"{len(hosts) - len(odd)} of {number(len(hosts), 'role')} up since the launch", style="dim")
    if not odd:
        return well
    rows = [
        Row(one["role"], (escape(one["host"]), "yes" if one["up"] else "[red]no[/red]", str(one["restarts"])))
        for one in odd
    ]
    return Group(well, terminal_table(None, ("role", "host", "up", "restarts"), rows, left=("host",)))


def watch(
    address: str, screen: Screen, *, interval_s: float, once: bool, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show a service until Ctrl-C, or once.

    Raises:
        SpecError: No service answers at the address.
        ServiceLost: It does not answer any more.
    """
    with screen.progress():
        status = find_status(address)
    if once or not screen.out.is_terminal:
        screen.show(top_view(status, width=screen.out.width))
        screen.give({"sentence": sentence_of(status)[0], "rates": status.get("rates"), "status": status})
        return
    with Live(console=screen.out, auto_refresh=False, screen=True) as live:
        try:
            while True:
                live.update(top_view(status, width=screen.out.width, height=screen.out.height), refresh=True)
                sleep(interval_s)
                status = _again(address)
        except KeyboardInterrupt:
            return  # the way to end it


def record(
    address: str, seconds: float, interval_s: float, tell: Tell, sleep: Callable[[float], None] = time.sleep
) -> list[tuple[int, dict[str, Any]]]:
    """Look at a service many times; return (nanoseconds since 1970, status) of every look. Ctrl-C ends it early.

    Raises:
        SpecError: No service answers at the address.
        ServiceLost: It does not answer any more.
    """
    looks = [(time.time_ns(), find_status(address))]
    began = time.monotonic()
    try:
        while (passed := time.monotonic() - began) < seconds:
            tell("recording, in seconds", int(passed), max(int(seconds), 1))
            sleep(interval_s)
            looks.append((time.time_ns(), _again(address)))
    except KeyboardInterrupt:
        pass  # what was seen so far is a trace too
    tell("recording, in seconds", max(int(seconds), 1), max(int(seconds), 1))
    return looks


def _again(address: str) -> dict[str, Any]:
    try:
        return find_status(address)
    except OverlordError as error:
        raise ServiceLost(f"the service at {address} does not answer any more ({error})") from error
