"""Charts as inline SVG, made by plain functions of numbers and a width: no files, no scripts, no libraries.

Colours come from the page's style sheet, so one drawing serves light and dark; a page draws it once for a wide screen
and once for a phone. Values under the pointer are shown by CSS alone (`.hit:hover`) or by the browser (`<title>`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from overlord.reports.summary import count, percent, ratio, shorten, without_zeros

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8a8a8a")
"""Okabe and Ito's colours, told apart with every kind of colour vision; their yellow is darkened. The last is grey."""
OURS, THEIRS = "var(--blue)", "var(--red)"
"""Set by the style sheet, lighter in the dark."""

MOST_BARS, MOST_ROWS, _MOST_MARKS = 128, 32, 600
_LEVELS = 10
ROW = 20.0
"""Height of a row of bars."""

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Point = tuple[float, float]
Write = Callable[[float], str]
End = tuple[str, float, str]
"""What stands at the right end of a line: words, value, colour."""


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

    @property
    def end(self) -> float:
        """The right edge."""
        return self.width - self.right

    @property
    def base(self) -> float:
        """The lower edge."""
        return self.height - self.bottom

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return _position(value, self.x_range, self.x_log, self.left, self.end)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        return _position(value, self.y_range, self.y_log, self.base, self.top)


def _position(value: float, bounds: Point, log: bool, start: float, stop: float) -> float:
    low, high = bounds
    if log:
        low, high, value = math.log(low), math.log(high), math.log(max(value, low))
    share = (value - low) / (high - low) if high > low else 0.5
    return start + min(max(share, 0.0), 1.0) * (stop - start)


# --------------------------------------------------------------------------------------------------------------
# Marks.


def svg(width: float, height: float, parts: Sequence[str]) -> str:
    """Return an SVG element that scales with its container; the page says what it shows."""
    return f'<svg viewBox="0 0 {width:g} {height:g}">{"".join(parts)}</svg>'


def svg_file(width: float, height: float, title: str, style: str, parts: Sequence[str]) -> str:
    """Return an SVG file that needs nothing else."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img"><title>{escape(title)}</title><style>{style}</style>{"".join(parts)}</svg>\n'
    )


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    """Return a text element; the words are escaped."""
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a rectangle; a negative size becomes zero."""
    w, h = max(width, 0.0), max(height, 0.0)
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" {style}/>'


def outlined_bar(x: float, top: float, width: float, base: float) -> tuple[str, str]:
    """Return an outlined bar in two parts: its body goes behind the filled bar, its top edge in front."""
    return rectangle(x, top, width, base - top, 'class="hull"'), segment(x, top, x + width, top, "edge")


def dot(x: float, y: float, radius: float, style: str) -> str:
    """Return a filled circle."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {style}/>'


def polyline(points: Sequence[Point], style: str) -> str:
    """Return a line through the points, or a dot where there is only one."""
    if len(points) == 1:
        return dot(*points[0], 3, f'{style} stroke-linecap="round"')
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" {style}/>'


def segment(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a straight line of a CSS class."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def with_tip(words: str, *parts: str) -> str:
    """Return marks that show words when the pointer rests on them."""
    return f"<g><title>{escape(words)}</title>{''.join(parts)}</g>"


# --------------------------------------------------------------------------------------------------------------
# Axes and labels.


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
    labels: tuple[str, str],
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_format: Write,
    y_format: Write,
) -> list[str]:
    """Return the grid, tick labels and the titles (x, y); the y title stands above the axis, to be read level."""
    parts = [text(0, 12, labels[1], kind="y-title")]
    for value in y_ticks:
        at = frame.y(value)
        parts.append(segment(frame.left, at, frame.end, at, "grid"))
        parts.append(text(frame.left - 6, at + 4, y_format(value), anchor="end"))
    for value in x_ticks:
        parts.append(segment(frame.x(value), frame.base, frame.x(value), frame.base + 4, "tick"))
        parts.append(text(frame.x(value), frame.base + 17, x_format(value), anchor="middle"))
    parts.append(segment(frame.left, frame.base, frame.end, frame.base, "base"))
    parts.append(text((frame.left + frame.end) / 2, frame.height - 3, labels[0], anchor="middle"))
    return parts


def vertical_grid(frame: Frame, top: float, ticks: Sequence[float], write: Write) -> list[str]:
    """Return lines from `top` down at values along x, and the values below them."""
    lines = [segment(frame.x(tick), top, frame.x(tick), frame.base, "grid") for tick in ticks]
    return lines + [text(frame.x(tick), frame.base + 17, write(tick), anchor="middle") for tick in ticks]


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


def side_labels(frame: Frame, ends: Sequence[End], gap: float = 17) -> list[str]:
    """Return labels right of the plot, each beside its value and moved apart where they would overlap."""
    ordered = sorted(ends, key=lambda end: -end[1])
    marks = [frame.y(value) for _, value, _ in ordered]
    placed = spread_labels(marks, gap, frame.top + 6, frame.base - 4)
    parts: list[str] = []
    for (words, _, colour), mark, at in zip(ordered, marks, placed, strict=True):
        leader = f"M{frame.end + 2:.1f},{mark:.1f} L{frame.end + 9:.1f},{at:.1f} h5"
        parts.append(f'<path d="{leader}" stroke="{colour}" class="leader"/>')
        parts.append(text(frame.end + 18, at + 4, words, kind="direct"))
    return parts


# --------------------------------------------------------------------------------------------------------------
# Charts over steps.


def step_chart(
    width: float,
    starts: Sequence[float],
    y_range: Point,
    y_label: str,
    y_ticks: tuple[Sequence[float], Write],
    draw: Callable[[Frame], list[str]],
    ends: Sequence[End],
    tips: Sequence[str],
    *,
    height: float = 270,
    left: float = 50,
    y_log: bool = False,
) -> str:
    """Return a chart over step numbers: `draw` returns its marks, `tips` are shown under the pointer at each step."""
    # Half a step of room at both ends, so that the first and the last mark are whole.
    half = (starts[1] - starts[0]) / 2 if len(starts) > 1 else 0.5
    x_range = (starts[0] - half, starts[-1] + half) if starts else (0.0, 1.0)
    right = 26.0 + 8 * max((len(words) for words, _, _ in ends), default=0)
    frame = Frame(width, height, x_range, y_range, left=left, right=right, y_log=y_log)
    steps = nice_ticks(starts[0], starts[-1], min(int((frame.end - left) / 60), 7)) if starts else []
    whole = [step for step in steps if step == int(step)]
    parts = axes(frame, ("step", y_label), whole, y_ticks[0], lambda step: f"{step:,.0f}", y_ticks[1])
    if starts:
        parts += [*draw(frame), *side_labels(frame, ends), *_hover_bands(frame, starts, tips)]
    return svg(width, height, parts)


def _hover_bands(frame: Frame, xs: Sequence[float], tips: Sequence[str]) -> list[str]:
    """Return one invisible band per x: under the pointer it shows a guide line and, top right, a tip."""
    at, edges = [frame.x(x) for x in xs], band_edges(frame, xs)
    return [
        '<g class="hit">'
        + rectangle(edges[n], 0, edges[n + 1] - edges[n], frame.base, 'fill="transparent"')
        + segment(at[n], frame.top - 6, at[n], frame.base, "guide")
        + text(frame.width, 12, words, kind="tip", anchor="end")
        + "</g>"
        for n, words in enumerate(tips)
    ]


def band_edges(frame: Frame, xs: Sequence[float]) -> list[float]:
    """Return where the band of each x begins, and where the last one ends."""
    at = [frame.x(x) for x in xs]
    return [frame.left, *((a + b) / 2 for a, b in pairwise(at)), frame.end]


def stacked_areas(
    frame: Frame, xs: Sequence[float], layers: Sequence[Sequence[float]], planned: Sequence[Sequence[float]]
) -> list[str]:
    """Return areas stacked from the top down, with the planned borders dashed over them.

    Shares hold for a whole step, so an area is a row of plateaus: a sudden change looks sudden.
    """
    edges = band_edges(frame, xs)

    def plateaus(values: Sequence[float]) -> list[Point]:
        return [(x, frame.y(value)) for n, value in enumerate(values) for x in (edges[n], edges[n + 1])]

    areas: list[str] = []
    dashes: list[str] = []
    upper = border = [1.0] * len(xs)
    for number, (layer, plan) in enumerate(zip(layers, planned, strict=True)):
        lower = [top - share for top, share in zip(upper, layer, strict=True)]
        border = [top - share for top, share in zip(border, plan, strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*plateaus(upper), *reversed(plateaus(lower))])
        areas.append(f'<polygon points="{points}" fill="{PALETTE[number % len(PALETTE)]}" class="layer"/>')
        if number + 1 < len(layers):
            dashes.append(polyline(plateaus(border), 'class="planned"'))
        upper = lower
    return areas + dashes


def two_lines(
    width: float,
    label: str,
    starts: Sequence[float],
    ours: tuple[str, float, Sequence[float]],
    theirs: tuple[str, float, Sequence[float]],
) -> str:
    """Return two ratios to one over steps; each has a name, a mean that is written at its end, and its values."""
    high = max([1.1, *ours[2], *theirs[2]])
    lines = [(theirs, THEIRS), (ours, OURS)]

    def draw(frame: Frame) -> list[str]:
        return [
            polyline(
                [(frame.x(x), frame.y(y)) for x, y in zip(starts, values, strict=True)],
                f'stroke="{colour}" class="line"',
            )
            for (_, _, values), colour in lines
        ]

    ends = [
        (f"{name} {ratio(mean)}", statistics.fmean(values[-3:]) if values else 1.0, colour)
        for (name, mean, values), colour in lines
    ]
    tips = [
        f"step {x:.0f}: {ours[0]} {ratio(a)}, {theirs[0]} {ratio(b)}"
        for x, a, b in zip(starts, ours[2], theirs[2], strict=True)
    ]
    y_range = (1.0, high + (high - 1) * 0.08)
    ticks = (nice_ticks(*y_range), without_zeros(lambda value: f"{value:.2f}×"))
    return step_chart(width, starts, y_range, label, ticks, draw, ends, tips)


# --------------------------------------------------------------------------------------------------------------
# Bars, histogram, heat maps, flows.


@dataclass(frozen=True, slots=True)
class Group:
    """Some sources or buckets that are drawn as one."""

    label: str
    members: Int64s
    is_rest: bool = False


def bucket_ranges(count: int, most: int) -> list[Group]:
    """Return at most `most` groups of neighbouring buckets, all but the last of one size, a power of two.

    Example:
        >>> [group.label for group in bucket_ranges(5, 2)]
        ['buckets 0–3', 'bucket 4']
    """
    size = 1 << (-(-count // most) - 1).bit_length()
    cuts = [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
    return [
        Group(f"bucket {cut[0]}" if len(cut) == 1 else f"buckets {cut[0]}–{cut[-1]}", cut.astype(np.int64))
        for cut in cuts
    ]


def row_bars(
    width: float,
    label: str,
    rows: Sequence[tuple[str, str, Sequence[float], str]],
    colours: Sequence[str],
    bottom: float = 8.0,
) -> str:
    """Return one bar a row (name, words under the pointer, the sizes of its parts, words at its end)."""
    left, right, top = 118.0, 74.0, 26.0
    largest = max((sum(parts) for _, _, parts, _ in rows), default=0.0) or 1.0
    drawn = [text(0, 12, label, kind="y-title")]
    for row, (name, words, sizes, written) in enumerate(rows):
        x, y, bars = left, top + row * ROW, list[str]()
        for size, colour in zip(sizes, colours, strict=True):
            wide = (width - left - right) * size / largest
            bars.append(rectangle(x, y + 4, wide, ROW - 8, f'fill="{colour}"'))
            x += wide
        drawn.append(text(left - 8, y + 14, shorten(name, 15), anchor="end"))
        drawn += [with_tip(words, *bars), text(x + 6, y + 14, written, kind="value")]
    return svg(width, top + len(rows) * ROW + bottom, drawn)


def load_bars(width: float, loads: Int64s, dealt: Int64s, planned: bool) -> str:
    """Return a bar for every bucket with its microbatches, the mean as a line, and the round-robin loads outlined."""
    groups = bucket_ranges(len(loads), MOST_BARS if width > 600 else 48)
    sums, others = (one.sum(axis=1, dtype=np.float64) for one in (loads, dealt))
    mean, top = float(sums.mean()), max(float(sums.max()), float(others.max())) or 1.0
    frame = Frame(width, 272, (0, len(groups)), (0, 1.04 * top), left=52, right=86, top=14, bottom=40)
    step = (frame.end - frame.left) / len(groups)
    gap = 2.0 if step > 8 else 0.4
    every = max(1, math.ceil((34 if len(groups) < len(loads) or len(loads) > 99 else 22) / step))
    shown = [n + 0.5 for n in range(0, len(groups), every)]
    parts = axes(
        frame, ("bucket", ""), shown, nice_ticks(0, top), lambda n: str(groups[int(n)].members[0]), without_zeros(count)
    )
    cut = planned and len(groups) == len(loads) and step > 8 and loads.size <= _MOST_MARKS
    for n, group in enumerate(groups):
        x, wide = frame.x(n) + gap / 2, step - gap
        own, other = float(sums[group.members].max()), float(others[group.members].max())
        behind, edge = outlined_bar(x, frame.y(other), wide, frame.base)
        bars = [rectangle(x, frame.y(own), wide, frame.base - frame.y(own), 'class="load"')] if planned else []
        cuts = np.cumsum(loads[group.members[0]])[:-1].tolist() if cut else []
        bars += [segment(x, frame.y(value), x + wide, frame.y(value), "cut") for value in cuts]
        words = f"{group.label}: {percent(own / mean if mean else 0)} of the mean" if planned else group.label
        words += f", dealt round-robin {percent(other / mean if mean else 0)}"
        parts.append(with_tip(words, behind, *bars, edge))
    parts.append(segment(frame.left, frame.y(mean), frame.end, frame.y(mean), "mean"))
    parts.append(text(frame.end + 8, frame.y(mean) + 4, f"mean {count(mean)}", kind="direct"))
    return svg(width, frame.height, parts)


def histogram(width: float, thing: str, unit: str, bins: Sequence[tuple[int, int, int, float]], about: str = "") -> str:
    """Return bins (low, high, items, tokens) on a log axis: items filled, tokens outlined, both as shares.

    An item is a `thing`, its length counts `unit`; no bin may begin below 1. `about` stands before estimated shares.
    """
    items, tokens = sum(each[2] for each in bins) or 1, sum(each[3] for each in bins) or 1
    shares = [(n / items, held / tokens) for _, _, n, held in bins]
    low, high = (bins[0][0], max(bins[-1][1], bins[0][0] + 1)) if bins else (1, 2)
    top = max([0.01, *(max(pair) for pair in shares)])
    frame = Frame(width, 270, (low, high), (0, top * 1.12), x_log=True)
    x_ticks = log_ticks(low, high, 2, int((frame.end - frame.left) / 46))
    labels = (f"{unit} in a {thing} (log scale)", "share")
    parts = axes(frame, labels, x_ticks, nice_ticks(0, top), count, without_zeros(percent))
    for (first, last, n, _), (share, weight) in zip(bins, shares, strict=True):
        x, wide = frame.x(first) + 0.5, frame.x(last) - frame.x(first) - 1
        behind, edge = outlined_bar(x, frame.y(weight), wide, frame.base)
        bar = rectangle(x, frame.y(share), wide, frame.base - frame.y(share), 'class="load"')
        words = f"{first:,} to {last - 1:,} {unit}: {n:,} {thing}s, {about}{percent(weight)} of the {unit}"
        parts.append(with_tip(words, behind, bar, edge))
    if bins:
        parts += _peak_labels(frame, bins, shares, (f"{thing}s", unit))
    return svg(width, frame.height, parts)


def _peak_labels(
    frame: Frame, bins: Sequence[tuple[int, int, int, float]], shares: Sequence[Point], names: tuple[str, str]
) -> list[str]:
    """Name the two shapes above their highest bins; side by side where those are neighbours."""
    peaks = [max(range(len(shares)), key=lambda at, n=n: shares[at][n]) for n in (0, 1)]  # type: ignore[misc]
    xs = [(frame.x(bins[at][0]) + frame.x(bins[at][1])) / 2 for at in peaks]
    outwards = ("end", "start") if xs[0] <= xs[1] else ("start", "end")
    parts: list[str] = []
    for name, at, x, outer in zip(names, peaks, xs, outwards, strict=True):
        near = abs(xs[0] - xs[1]) < 56
        inside = min(max(x, frame.left + 30), frame.end - 30) + near * (4 if outer == "start" else -4)
        anchor = outer if near else "middle"
        parts.append(text(inside, frame.y(max(shares[at])) - 6, name, kind="direct", anchor=anchor))
    return parts


def heat_maps(width: float, maps: Sequence[tuple[str, Floats]], mean: float, row: str = "") -> str:
    """Return loads [row, microbatch] beside each other as colours: none at the mean, orange above, blue below.

    Loads are NaN where there is no microbatch; `row` is what a row is called.
    """
    beside = width > 500
    share = (width - 32 * (len(maps) - 1)) / len(maps) if beside else width
    folded = [(name, *_folded(loads, row)) for name, loads in maps]
    largest = max((float(np.nanmax(np.abs(cells / mean - 1))) for _, cells, _ in folded if mean > 0), default=0.0)
    # Below a quarter the colour stays pale, so that rounding noise does not look like imbalance.
    loudest = max(0.25, min(largest, 2.0))
    parts: list[str] = []
    tall = 0.0
    for n, (name, cells, labels) in enumerate(folded):
        drawn, height = _heat_map(share, name, cells, labels, mean, loudest)
        shift = (n * (share + 32), 0.0) if beside else (0.0, tall)
        parts.append(f'<g transform="translate({shift[0]:.0f} {shift[1]:.0f})">{"".join(drawn)}</g>')
        tall = max(tall, height) if beside else tall + height + 22
    return svg(width, round(tall + 4), parts)


def _folded(loads: Floats, row: str) -> tuple[Floats, list[str]]:
    """Return at most 32 x 32 cells, each the largest of those it stands for, and labels of the rows."""
    rows, columns = (bucket_ranges(size, MOST_ROWS) for size in loads.shape)
    gaps = np.where(np.isnan(loads), -1.0, loads)
    by_row = np.stack([gaps[group.members].max(axis=0) for group in rows])
    cells = np.stack([by_row[:, group.members].max(axis=1) for group in columns], axis=1)
    return np.where(cells < 0, np.nan, cells), [f"{row} {group.label.split()[1]}".strip() for group in rows]


def _heat_map(
    width: float, name: str, cells: Floats, labels: Sequence[str], mean: float, loudest: float
) -> tuple[list[str], float]:
    rows, columns = cells.shape
    top, gutter = 44.0, 12.0 + 6.5 * max(map(len, labels))
    wide, tall = min(112.0, (width - gutter) / columns), min(32.0, max(8.0, 420.0 / rows))
    parts = [text(0, 14, name, kind="direct"), text(gutter, 34, "microbatch →")]
    shades: dict[tuple[bool, int, str], list[str]] = {}
    written: list[str] = []
    for row, label in enumerate(labels):
        y = top + row * tall
        if tall >= 12 or row % 2 == 0:
            parts.append(text(gutter - 6, y + tall / 2 + 4, label, anchor="end"))
        for column in np.flatnonzero(~np.isnan(cells[row])).tolist():
            relative = float(cells[row, column]) / mean if mean > 0 else 1.0
            level = round(min(1.0, abs(relative - 1) / loudest) * _LEVELS)
            x, size = gutter + column * wide, max(wide - 1, 0.5)
            # Up to some hundred cells, each tells its own number. Beyond, cells of one shade are one path: a thousand
            # of them take a few kilobytes.
            tip = f"{label}, microbatch {column}: {relative:.3f} of the mean" if cells.size <= _MOST_MARKS // 4 else ""
            path = f"M{x + 0.5:.1f} {y + 0.5:.1f}h{size:.1f}v{tall - 1:.1f}h-{size:.1f}z"
            shades.setdefault((relative > 1, level, tip), []).append(path)
            if tall >= 15 and wide >= 34:
                written.append(text(x + wide / 2, y + tall / 2 + 4, f"{relative:.2f}", kind="value", anchor="middle"))
    for (above, level, tip), paths in sorted(shades.items()):
        style = f'class="cell {"above" if above else "below"}" fill-opacity="{0.8 * level / _LEVELS:.2f}"'
        parts.append(f'<path d="{"".join(paths)}" {style}>{f"<title>{escape(tip)}</title>" if tip else ""}</path>')
    return parts + written, top + rows * tall


def sankey(width: float, sources: Sequence[Group], buckets: Sequence[tuple[str, str]], tokens: Floats) -> str:
    """Return ribbons from sources to buckets (label, ranks); their widths are tokens [source, bucket]."""
    wide = width > 600
    left, right = (190.0, 262.0) if wide else (92.0, 118.0)
    total = float(tokens.sum()) or 1.0
    scale = (260.0 if wide else 200.0) / total
    sums = tokens.sum(axis=1)
    sizes, pitches = (sums * scale, tokens.sum(axis=0) * scale), (34.0, 19.0 if wide else 34.0)
    # The room of a node is its size, or that of its label.
    slots = [np.maximum(one + 6.0, pitch) for one, pitch in zip(sizes, pitches, strict=True)]
    height = max(float(one.sum()) for one in slots)
    from_left, from_right = (_stack(one, room, height) for one, room in zip(sizes, slots, strict=True))
    at_right = [top for top, _ in from_right]
    x0, x1 = left + 10, width - right - 10
    ribbons: list[str] = []
    marks: list[str] = []
    for s, source in enumerate(sources):
        colour = PALETTE[-1] if source.is_rest else PALETTE[s % (len(PALETTE) - 1)]
        y = from_left[s][0]
        for b, (label, _) in enumerate(buckets):
            thick = float(tokens[s, b]) * scale
            if thick > 0:
                start, end, middle = y + thick / 2, at_right[b] + thick / 2, (x0 + x1) / 2
                path = f"M{x0:.0f} {start:.1f}C{middle:.0f} {start:.1f} {middle:.0f} {end:.1f} {x1:.0f} {end:.1f}"
                tip = escape(f"{source.label} → {label}: {count(tokens[s, b])}")
                style = f'stroke="{colour}" stroke-width="{max(thick, 0.4):.1f}"'
                ribbons.append(f'<path d="{path}" {style}><title>{tip}</title></path>')
                at_right[b] += thick
            y += thick
        marks.append(rectangle(left, from_left[s][0], 10, from_left[s][1], f'fill="{colour}"'))
    marks += [rectangle(x1, top, 10, tall, 'class="node"') for top, tall in from_right]
    names = [group.label if wide or not group.is_rest else group.label.removesuffix(" sources") for group in sources]
    given = [(name, f"{count(held)} · {percent(held / total)}") for name, held in zip(names, sums, strict=True)]
    ends = buckets if wide else [(name.removeprefix("buckets "), ranks) for name, ranks in buckets]
    marks += _node_labels(left - 8, from_left, given, "end", two_lines=True, limit=28 if wide else 13)
    marks += _node_labels(x1 + 18, from_right, ends, "start", two_lines=not wide, limit=34 if wide else 15)
    return svg(width, round(height), [f'<g class="flow">{"".join(ribbons)}</g>', *marks])


def _stack(sizes: Floats, slots: Floats, height: float) -> list[Point]:
    """Return (top, height) of nodes one above the other, in the middle of the height."""
    slots = slots + min(20.0, (height - slots.sum()) / len(slots))
    starts = np.cumsum(slots) - slots + (height - slots.sum()) / 2
    tops = starts + (slots - sizes) / 2
    return [(float(top), max(float(size), 1.0)) for top, size in zip(tops, sizes, strict=True)]


def _node_labels(
    x: float, nodes: Sequence[Point], names: Sequence[tuple[str, str]], anchor: str, *, two_lines: bool, limit: int
) -> list[str]:
    parts: list[str] = []
    for (name, detail), (top, tall) in zip(names, nodes, strict=True):
        y, short = top + tall / 2, shorten(name, limit)
        if two_lines:
            parts.append(text(x, y - 2, short, kind="direct", anchor=anchor))
            parts.append(text(x, y + 12, detail, anchor=anchor))
        else:
            words = f'<tspan class="direct">{escape(short)}</tspan> {escape(detail)}'
            parts.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{words}</text>')
    return parts
