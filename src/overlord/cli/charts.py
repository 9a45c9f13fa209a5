"""Charts as inline SVG, made by plain functions of numbers: no files, no scripts, no libraries.

Colours come from the page's CSS variables, so one drawing serves light and dark. Every chart is a
function of its width: a page draws it once for a desk and once for a phone.
Values under the pointer are shown by CSS alone (`.hit:hover`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8a8a8a")
"""Okabe and Ito's colours, told apart with every kind of colour vision; their yellow is darkened."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Frame:
    """The plotting area inside an SVG, and the ranges it shows."""

    width: float
    height: float
    x_range: Point
    y_range: Point
    left: float = 46
    right: float = 12
    top: float = 26
    bottom: float = 36
    y_log: bool = False
    x_log: bool = False

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return _position(value, self.x_range, self.x_log, self.left, self.width - self.right)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        return _position(value, self.y_range, self.y_log, self.height - self.bottom, self.top)


def _position(value: float, bounds: Point, log: bool, start: float, stop: float) -> float:
    low, high = bounds
    if log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    share = (value - low) / (high - low) if high > low else 0.5
    return start + min(max(share, 0.0), 1.0) * (stop - start)


def svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """Return an SVG element that scales with its container and reads as one image."""
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    """Return a text element; the words are escaped."""
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a rectangle; a negative size becomes zero."""
    w, h = max(width, 0.0), max(height, 0.0)
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" {style}/>'


def tip(words: str) -> str:
    """Return what a browser shows when the pointer rests on the group that this stands in."""
    return f"<title>{escape(words)}</title>"


def polyline(points: Sequence[Point], style: str) -> str:
    """Return a line through the points, or a dot where there is only one."""
    if len(points) == 1:
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" {style} stroke-linecap="round"/>'
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" {style}/>'


def segment(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a straight line of a CSS class."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def nice_ticks(low: float, high: float, target: int = 4) -> list[float]:
    """Return round values from low to high, about `target` of them.

    Example:
        >>> nice_ticks(0, 70)
        [0.0, 20.0, 40.0, 60.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / max(target, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda size: abs(size - rough))
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, base: int, limit: int = 7) -> list[float]:
    """Return powers of `base` inside the range, thinned to at most `limit`."""
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    every = max(1, -(-(last - first + 1) // limit))
    return [float(base) ** power for power in range(first, last + 1, every)]


def axes(
    frame: Frame,
    *,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_format: Callable[[float], str],
    y_format: Callable[[float], str],
) -> list[str]:
    """Return the grid, tick labels and axis titles; the y title stands above the axis, to be read level."""
    base = frame.height - frame.bottom
    parts = [text(0, 12, y_label, kind="y-title")]
    for value in y_ticks:
        at = frame.y(value)
        parts.append(segment(frame.left, at, frame.width - frame.right, at, "grid"))
        parts.append(text(frame.left - 6, at + 4, y_format(value), anchor="end"))
    for value in x_ticks:
        parts.append(segment(frame.x(value), base, frame.x(value), base + 4, "tick"))
        parts.append(text(frame.x(value), base + 17, x_format(value), anchor="middle"))
    parts.append(segment(frame.left, base, frame.width - frame.right, base, "base"))
    parts.append(text((frame.left + frame.width - frame.right) / 2, frame.height - 3, x_label, anchor="middle"))
    return parts


def step_frame(
    width: float,
    height: float,
    starts: Sequence[float],
    y_range: Point,
    *,
    right: float,
    left: float = 50,
    y_log: bool = False,
) -> Frame:
    """Return a frame whose x is the step number, with half a step of room at both ends."""
    half = (starts[1] - starts[0]) / 2 if len(starts) > 1 else 0.5
    x_range = (starts[0] - half, starts[-1] + half) if starts else (0.0, 1.0)
    return Frame(width, height, x_range, y_range, left=left, right=right, y_log=y_log)


def step_axes(
    frame: Frame, starts: Sequence[float], label: str, ticks: Sequence[float], write: Callable[[float], str]
) -> list[str]:
    """Return axes with whole step numbers along x, as many as there is room for."""
    room = int((frame.width - frame.left - frame.right) / 60)
    steps = nice_ticks(starts[0], starts[-1], min(room, 7)) if starts else []
    whole = [tick for tick in steps if tick == int(tick)]
    return axes(
        frame,
        x_label="step",
        y_label=label,
        x_ticks=whole,
        y_ticks=ticks,
        x_format=lambda step: f"{step:,.0f}",
        y_format=write,
    )


def hover_bands(frame: Frame, xs: Sequence[float], tips: Sequence[str]) -> list[str]:
    """Return one invisible band per x: under the pointer it shows a guide line and, top right, a tip."""
    at = [frame.x(x) for x in xs]
    edges = band_edges(frame, xs)
    base = frame.height - frame.bottom
    return [
        '<g class="hit">'
        + rectangle(edges[n], 0, edges[n + 1] - edges[n], base, 'fill="transparent"')
        + segment(at[n], frame.top - 6, at[n], base, "guide")
        + text(frame.width, 12, tip, kind="tip", anchor="end")
        + "</g>"
        for n, tip in enumerate(tips)
    ]


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions at least `gap` apart, in the given order, near the wanted ones and in the range.

    Example:
        >>> spread_labels([10, 12, 40], 10, 0, 50)
        [10, 20, 40]
    """
    gap = min(gap, (high - low) / max(len(wanted) - 1, 1))
    placed: list[float] = []
    for position in wanted:
        floor = placed[-1] + gap if placed else low
        placed.append(max(position, floor))
    ceiling = high
    for n in range(len(placed) - 1, -1, -1):
        placed[n] = min(placed[n], ceiling)
        ceiling = placed[n] - gap
    return placed


def stacked_areas(
    frame: Frame, xs: Sequence[float], layers: Sequence[Sequence[float]], planned: Sequence[Sequence[float]]
) -> list[str]:
    """Return areas stacked from the top down, with the planned borders dashed over them.

    Shares hold for a whole step, so an area is a row of plateaus: a sudden change looks sudden.
    """
    areas: list[str] = []
    dashes: list[str] = []
    edges = band_edges(frame, xs)
    upper = [1.0] * len(xs)
    border = [1.0] * len(xs)
    for number, (layer, plan) in enumerate(zip(layers, planned, strict=True)):
        lower = [top - share for top, share in zip(upper, layer, strict=True)]
        border = [top - share for top, share in zip(border, plan, strict=True)]
        outline = [*_plateaus(frame, edges, upper), *reversed(_plateaus(frame, edges, lower))]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        areas.append(f'<polygon points="{points}" fill="{PALETTE[number % len(PALETTE)]}" class="layer"/>')
        if number + 1 < len(layers):
            dashes.append(polyline(_plateaus(frame, edges, border), 'class="planned"'))
        upper = lower
    return areas + dashes


def band_edges(frame: Frame, xs: Sequence[float]) -> list[float]:
    """Return where the band of each x begins, and where the last one ends."""
    at = [frame.x(x) for x in xs]
    return [frame.left, *((a + b) / 2 for a, b in pairwise(at)), frame.width - frame.right]


def _plateaus(frame: Frame, edges: Sequence[float], values: Sequence[float]) -> list[Point]:
    return [(x, frame.y(value)) for n, value in enumerate(values) for x in (edges[n], edges[n + 1])]


def side_labels(
    frame: Frame, names: Sequence[str], centres: Sequence[float], colours: Sequence[str], gap: float = 17
) -> list[str]:
    """Return labels right of the plot, each beside its mark and moved apart where they would overlap."""
    x = frame.width - frame.right
    wanted = [frame.y(value) for value in centres]
    placed = spread_labels(wanted, gap, frame.top + 6, frame.height - frame.bottom - 4)
    parts: list[str] = []
    for name, colour, mark, at in zip(names, colours, wanted, placed, strict=True):
        parts.append(f'<path d="M{x + 2:.1f},{mark:.1f} L{x + 9:.1f},{at:.1f} h5" stroke="{colour}" class="leader"/>')
        parts.append(text(x + 18, at + 4, name, kind="direct"))
    return parts


def heat_map(
    left: float,
    width: float,
    title: str,
    rows: Sequence[Sequence[float]],
    mean: float,
    loudest: float,
    row_name: str = "dp",
) -> tuple[list[str], float]:
    """Return a grid of ranks by microbatches and the height it takes.

    A cell at the mean has no colour; orange is above, blue below, so a balanced step looks calm.
    """
    columns = max((len(row) for row in rows), default=0)
    top, gutter = 44.0, 34.0 if len(row_name) < 3 else 56.0
    cell = min(112.0, (width - gutter) / max(columns, 1))
    tall = min(34.0, max(6.0, 420.0 / max(len(rows), 1)))
    labelled = tall >= 15
    parts = [text(left, 14, title, kind="direct"), text(left + gutter, 34, "microbatch →")]
    for row, costs in enumerate(rows):
        y = top + row * tall
        if labelled or row % 8 == 0:
            parts.append(text(left + gutter - 6, y + tall / 2 + 4, f"{row_name}{row}", anchor="end"))
        for column, cost in enumerate(costs):
            ratio = cost / mean if mean > 0 else 1.0
            strength = min(1.0, abs(ratio - 1) / loudest) * 0.8
            colour = PALETTE[5] if ratio > 1 else PALETTE[0]
            x = left + gutter + column * cell
            style = f'fill="{colour}" fill-opacity="{strength:.2f}" class="cell"'
            tip = f"<title>{row_name.strip()} {row}, microbatch {column}: {ratio:.3f} of the mean</title>"
            parts.append(f"<g>{tip}{rectangle(x + 1, y + 1, cell - 2, tall - 2, style)}</g>")
            if labelled and cell >= 34:
                parts.append(text(x + cell / 2, y + tall / 2 + 4, f"{ratio:.2f}", kind="value", anchor="middle"))
    return parts, top + len(rows) * tall
