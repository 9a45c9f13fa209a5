"""Bars as SVG files that a page can show as images: their colours follow the reader's light or dark mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlord.reports.svg import (
    PALETTE,
    Frame,
    log_ticks,
    nice_ticks,
    polyline,
    rectangle,
    segment,
    svg_file,
    text,
    vertical_grid,
)

WIDTH, ROW, TOP, BOTTOM, LEFT, RIGHT = 760.0, 44.0, 58.0, 44.0, 230.0, 90.0

_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#5d636e}
.title{font-size:15px;font-weight:650;fill:#1b1e23}.value{font-weight:600;fill:#1b1e23}
.grid{stroke:#e3e3de}.spread{stroke:#1b1e23;stroke-width:1.5}
.bar{stroke:#c14a00;stroke-width:1.6;stroke-dasharray:5 4}.limit{fill:#c14a00}
@media(prefers-color-scheme:dark){text{fill:#a0a7b3}.title,.value{fill:#eceef1}.grid{stroke:#30353d}
.spread{stroke:#eceef1}.bar{stroke:#f0884a}.limit{fill:#f0884a}}
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing measured."""

    name: str
    value: float
    rounds: Sequence[float] = ()
    """What single rounds gave, where there were several: shown as a line from the least to the most."""


def draw_bars(title: str, unit: str, bars: Sequence[Bar], limit: tuple[str, float], *, log: bool = False) -> str:
    """Return an SVG file: a bar for each thing, and a dashed line at the bar to reach.

    Args:
        title: What is shown.
        unit: What the values are in.
        bars: The things, from top to bottom.
        limit: The words beside the dashed line, and where it is.
        log: Whether the scale is logarithmic: for things that differ by orders of magnitude.
    """
    height = TOP + ROW * len(bars) + BOTTOM
    values = [limit[1], *(one for bar in bars for one in (bar.value, *bar.rounds))]
    above_zero = min(value for value in values if value > 0)
    low, high = (above_zero / 4, max(values) * 1.3) if log else (0.0, max(values) * 1.05)
    frame = Frame(WIDTH, height, (low, high), (0, 1), left=LEFT, right=RIGHT, top=TOP, bottom=BOTTOM, x_log=log)
    ticks = log_ticks(low, high, 10) if log else nice_ticks(low, high, 5)
    parts = [text(0, 18, title, kind="title")]
    parts += vertical_grid(frame, TOP - 6, ticks, lambda tick: f"{tick:g}")
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, height - 6, unit + (", logarithmic" if log else ""), anchor="middle"))
    for number, bar in enumerate(bars):
        parts += _row(frame, bar, TOP + number * ROW, PALETTE[0] if number == 0 else PALETTE[7])
    at = frame.x(limit[1])
    parts.append(segment(at, TOP - 8, at, height - BOTTOM, "bar"))
    parts.append(text(at, TOP - 14, limit[0], kind="limit", anchor="middle"))
    return svg_file(WIDTH, height, title, _STYLE, parts)


def _row(frame: Frame, bar: Bar, top: float, colour: str) -> list[str]:
    middle, end = top + ROW / 2, frame.x(bar.value)
    parts = [
        text(LEFT - 12, middle + 4, bar.name, anchor="end"),
        rectangle(LEFT, top + 8, end - LEFT, ROW - 16, f'fill="{colour}" rx="2"'),
    ]
    if len(bar.rounds) > 1:
        parts.append(segment(frame.x(min(bar.rounds)), middle, frame.x(max(bar.rounds)), middle, "spread"))
        end = max(end, frame.x(max(bar.rounds)))
    return [*parts, text(end + 8, middle + 4, f"{bar.value:.3g}", kind="value")]


def draw_steps(title: str, unit: str, series: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG file: what each step of several runs was waited for, one strip below the other, logarithmic.

    Args:
        title: What is shown.
        unit: What the values are in.
        series: The values of each run, step after step.
    """
    strip, gap, left, right = 120.0, 34.0, 64.0, 16.0
    height = TOP + (strip + gap) * len(series)
    values = [max(value, 0.1) for one in series.values() for value in one]
    low, high = min(values) / 1.5, max(values) * 1.5
    parts = [text(0, 18, title, kind="title")]
    for number, (name, one) in enumerate(series.items()):
        top = TOP + number * (strip + gap)
        steps = (0.0, float(max(len(one) - 1, 1)))
        frame = Frame(WIDTH, top + strip, steps, (low, high), left=left, right=right, top=top, bottom=0.0, y_log=True)
        parts.append(text(left, top - 8, f"{name.replace('_', ' ')} ({unit})"))
        for tick in log_ticks(low, high, 4):
            parts.append(segment(left, frame.y(tick), WIDTH - right, frame.y(tick), "grid"))
            parts.append(text(left - 8, frame.y(tick) + 4, f"{tick:g}", anchor="end"))
        points = [(frame.x(at), frame.y(max(value, 0.1))) for at, value in enumerate(one)]
        parts.append(polyline(points, f'stroke="{PALETTE[number]}" stroke-width="1.4"'))
    parts.append(text(WIDTH / 2, height - 6, "step", anchor="middle"))
    return svg_file(WIDTH, height, title, _STYLE, parts)


def draw_by_workers(title: str, panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> str:
    """Return an SVG file: rates by the number of workers, a panel for each kind of data, a line for each side.

    Args:
        title: What is shown.
        panels: Of each panel, named with its unit: the lines, each as (workers, rate).
    """
    wide, high, gap, left = 300.0, 220.0, 80.0, 70.0
    parts = [text(0, 18, title, kind="title")]
    for number, (name, lines) in enumerate(panels.items()):
        begin = number * (wide + gap)
        most = max(rate for points in lines.values() for _, rate in points) * 1.08
        last = max(workers for points in lines.values() for workers, _ in points)
        frame = Frame(
            begin + left + wide, TOP + high, (0.0, float(last)), (0.0, most), left=begin + left, right=0.0, top=TOP,
            bottom=0.0,
        )  # fmt: skip
        parts.append(text(begin + left, TOP - 12, name))
        for tick in nice_ticks(0.0, most, 4):
            parts.append(segment(begin + left, frame.y(tick), begin + left + wide, frame.y(tick), "grid"))
            parts.append(text(begin + left - 8, frame.y(tick) + 4, f"{tick:,g}", anchor="end"))
        for workers in sorted({workers for points in lines.values() for workers, _ in points}):
            parts.append(text(frame.x(workers), TOP + high + 18, str(workers), anchor="middle"))
        for line, (label, points) in enumerate(lines.items()):
            colour = PALETTE[0] if line == 0 else PALETTE[7]
            places = [(frame.x(workers), frame.y(rate)) for workers, rate in points]
            parts.append(polyline(places, f'stroke="{colour}" stroke-width="2"'))
            parts.append(text(places[-1][0] - 6, places[-1][1] + (18 if line == 0 else -6), label, anchor="end"))
    width = left + len(panels) * wide + (len(panels) - 1) * gap + 20
    parts.append(text(width / 2, TOP + high + 40, "workers, and as many bare processes", anchor="middle"))
    return svg_file(width, TOP + high + 50, title, _STYLE, parts)
