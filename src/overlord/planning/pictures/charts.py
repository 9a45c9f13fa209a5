"""The drawings on the page of a DGraph, as inline SVG: plain functions of numbers and a width.

Colours come from the page's CSS, so that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from overlord.planning.pictures.facts import Floats, Int64s, bucket_ranges, count, percent, shorten

PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
"""Okabe and Ito's colours, told apart with every kind of colour vision; their yellow is darkened."""
_REST = "#8a8a8a"
_MOST_BARS = 128
_MOST_ROWS = 32
_MOST_CUTS = 600
_LEVELS = 10


def sankey(
    width: float, title: str, sources: Sequence[tuple[str, bool]], buckets: Sequence[tuple[str, str]], tokens: Floats
) -> str:
    """Return ribbons from sources (label, is the rest) to buckets (label, ranks); their widths are tokens."""
    wide = width > 600
    left, right = (190.0, 262.0) if wide else (92.0, 118.0)
    total = float(tokens.sum()) or 1.0
    scale = (260.0 if wide else 200.0) / total
    giving, getting = tokens.sum(axis=1) * scale, tokens.sum(axis=0) * scale
    pitches = (34.0, 19.0 if wide else 34.0)
    height = max(_slots(giving, pitches[0]).sum(), _slots(getting, pitches[1]).sum())
    from_left, from_right = (_stack(a, height, pitch) for a, pitch in zip((giving, getting), pitches, strict=True))
    at_right = [top for top, _ in from_right]
    x0, x1 = left + 10, width - right - 10
    ribbons, marks = [], []
    for s, (name, is_rest) in enumerate(sources):
        colour = _REST if is_rest else PALETTE[s % len(PALETTE)]
        y = from_left[s][0]
        for b, (label, _) in enumerate(buckets):
            thick = float(tokens[s, b]) * scale
            if thick > 0:
                start, end = y + thick / 2, at_right[b] + thick / 2
                tip = escape(f"{name} → {label}: {count(tokens[s, b])}")
                ribbons.append(
                    f'<path d="M{x0:.0f} {start:.1f}C{(x0 + x1) / 2:.0f} {start:.1f} {(x0 + x1) / 2:.0f} {end:.1f} '
                    f'{x1:.0f} {end:.1f}" stroke="{colour}" stroke-width="{max(thick, 0.4):.1f}"><title>{tip}</title>'
                    "</path>"
                )
                at_right[b] += thick
            y += thick
        marks.append(_box(left, from_left[s][0], 10, from_left[s][1], f'fill="{colour}"'))
    marks += [_box(x1, top, 10, tall, 'class="node"') for top, tall in from_right]
    sums = tokens.sum(axis=1)
    if not wide:
        sources = [(name.removesuffix(" sources") if rest else name, rest) for name, rest in sources]
        buckets = [(name.removeprefix("buckets "), ranks) for name, ranks in buckets]
    names = [(name, f"{count(sums[s])} · {percent(sums[s] / total)}") for s, (name, _) in enumerate(sources)]
    marks += _labels(left - 8, from_left, names, "end", two_lines=True, limit=28 if wide else 13)
    marks += _labels(x1 + 18, from_right, buckets, "start", two_lines=not wide, limit=34 if wide else 15)
    return _svg(width, height, title, [f'<g class="flow">{"".join(ribbons)}</g>', *marks])


def load_bars(width: float, title: str, loads: Int64s, dealt: Int64s | None, planned: bool) -> str:
    """Return a bar for every bucket with its microbatches, the mean as a line, and the round-robin loads."""
    groups = bucket_ranges(len(loads), _MOST_BARS if width > 600 else 48)
    sums = loads.sum(axis=1, dtype=np.float64)
    others = dealt.sum(axis=1, dtype=np.float64) if dealt is not None else sums
    mean, top = float(sums.mean()), max(float(sums.max()), float(others.max())) or 1.0
    left, right, base, roof = 52.0, 86.0, 232.0, 14.0
    step = (width - left - right) / len(groups)
    gap = 2.0 if step > 8 else 0.4

    def y(value: float) -> float:
        return base - (base - roof) * value / (1.04 * top)

    parts = []
    for value in _ticks(top):
        parts.append(_line(left, y(value), width - right, y(value), "grid"))
        parts.append(_text(left - 6, y(value) + 4, _tick(count(value)), anchor="end"))
    for n, group in enumerate(groups):
        x, own, other = left + n * step, sums[group.members], others[group.members]
        words = f"{group.label}: {percent(own.max() / mean if mean else 0)} of the mean" if planned else group.label
        if dealt is not None:
            words += f", dealt round-robin {percent(other.max() / mean if mean else 0)}"
        bars = _box(x + gap / 2, y(own.max()), step - gap, base - y(own.max()), 'class="load"') if planned else ""
        cuts = np.cumsum(loads[group.members[0]])[:-1].tolist()
        drawn = cuts if planned and len(groups) == len(loads) and step > 8 and loads.size <= _MOST_CUTS else []
        lines = "".join(_line(x + gap / 2, y(cut), x + step - gap / 2, y(cut), "cut") for cut in drawn)
        hull = _hull(x + gap / 2, y(other.max()), step - gap, base) if dealt is not None else ("", "")
        parts.append(f"<g><title>{escape(words)}</title>{hull[0]}{bars}{lines}{hull[1]}</g>")
        every = max(1, math.ceil((34 if len(groups) < len(loads) or len(loads) > 99 else 22) / step))
        if n % every == 0:
            parts.append(_text(x + step / 2, base + 17, str(group.members[0]), anchor="middle"))
    parts += [_line(left, base, width - right, base, "base"), _line(left, y(mean), width - right, y(mean), "mean")]
    parts.append(_text(width - right + 8, y(mean) + 4, f"mean {count(mean)}", "direct"))
    parts.append(_text((left + width - right) / 2, base + 36, "bucket", anchor="middle"))
    return _svg(width, base + 40, title, parts)


def heat_maps(width: float, title: str, maps: Sequence[tuple[str, Floats]], mean: float) -> str:
    """Return loads [bucket, microbatch] beside each other as colours: orange above the mean, blue below."""
    beside = width > 600
    share = (width - 32 * (len(maps) - 1)) / len(maps) if beside else width
    folded = [(name, *_folded(loads)) for name, loads in maps]
    largest = max((abs(float(np.nanmax(cells)) / mean - 1) for _, cells, _ in folded if mean > 0), default=0.0)
    # Below a quarter the colour stays pale, so that rounding noise does not look like imbalance.
    loudest = max(0.25, min(largest, 2.0))
    parts: list[str] = []
    tall = 0.0
    for n, (name, cells, labels) in enumerate(folded):
        drawn, height = _heat_map(share, name, cells, labels, mean, loudest)
        shift = (n * (share + 32), 0.0) if beside else (0.0, tall)
        parts.append(f'<g transform="translate({shift[0]:.0f} {shift[1]:.0f})">{"".join(drawn)}</g>')
        tall = max(tall, height) if beside else tall + height + 22
    return _svg(width, tall + 4, title, parts)


def histogram(width: float, title: str, unit: str, thing: str, bins: Sequence[tuple[int, int, int, int]]) -> str:
    """Return bins (low, high, items, tokens) on a log axis: items filled, tokens outlined, both as shares."""
    items, tokens = sum(b[2] for b in bins) or 1, sum(b[3] for b in bins) or 1
    top = max([0.01, *(max(b[2] / items, b[3] / tokens) for b in bins)])
    left, right, base, roof = 46.0, 12.0, 224.0, 26.0
    low, high = math.log(bins[0][0]), math.log(max(bins[-1][1], bins[0][0] + 1))

    def x(value: float) -> float:
        return left + (width - left - right) * (math.log(value) - low) / (high - low)

    def y(value: float) -> float:
        return base - (base - roof) * value / (1.08 * top)

    parts = [_text(0, 12, "share")]
    for value in _ticks(top):
        parts.append(_line(left, y(value), width - right, y(value), "grid"))
        parts.append(_text(left - 6, y(value) + 4, _tick(percent(value)), anchor="end"))
    for first, last, n, held in bins:
        words = f"{first:,} to {last - 1:,} {unit}: {n:,} {thing}s, {percent(held / tokens)} of the {unit}"
        size = x(last) - x(first) - 1
        bar = _box(x(first) + 0.5, y(n / items), size, base - y(n / items), 'class="load"')
        hull = _hull(x(first) + 0.5, y(held / tokens), size, base)
        parts.append(f"<g><title>{escape(words)}</title>{hull[0]}{bar}{hull[1]}</g>")
    powers = [2**n for n in range(64) if bins[0][0] <= 2**n <= bins[-1][1]]
    for value in powers[:: max(1, math.ceil(len(powers) * 46 / (width - left - right)))]:
        parts.append(_line(x(value), base, x(value), base + 4, "base"))
        parts.append(_text(x(value), base + 17, count(value), anchor="middle"))
    parts.append(_line(left, base, width - right, base, "base"))
    parts.append(_text((left + width - right) / 2, base + 36, f"{unit} in a {thing} (log scale)", anchor="middle"))
    return _svg(width, base + 40, title, parts)


def _heat_map(
    width: float, name: str, cells: Floats, labels: Sequence[str], mean: float, loudest: float
) -> tuple[list[str], float]:
    rows, columns = cells.shape
    top, gutter = 44.0, 12.0 + 6.5 * max(map(len, labels))
    wide, tall = min(112.0, (width - gutter) / columns), min(30.0, max(8.0, 420.0 / rows))
    valued = tall >= 15 and wide >= 34
    parts = [_text(0, 14, name, "direct"), _text(gutter, 34, "microbatch →")]
    shades: dict[tuple[int, int], list[str]] = {}
    written: list[str] = []
    for row, label in enumerate(labels):
        y = top + row * tall
        if tall >= 12 or row % 2 == 0:
            parts.append(_text(gutter - 6, y + tall / 2 + 4, label, anchor="end"))
        for column in range(columns):
            cell = float(cells[row, column])
            if math.isnan(cell):
                continue
            relative = cell / mean if mean > 0 else 1.0
            level = round(min(1.0, abs(relative - 1) / loudest) * _LEVELS)
            x = gutter + column * wide
            # Cells of one shade are one path: a thousand cells take a few kilobytes.
            shades.setdefault((relative > 1, level), []).append(
                f"M{x + 0.5:.1f} {y + 0.5:.1f}h{max(wide - 1, 0.5):.1f}v{tall - 1:.1f}h-{max(wide - 1, 0.5):.1f}z"
            )
            if valued:
                written.append(_text(x + wide / 2, y + tall / 2 + 4, f"{relative:.2f}", "value", "middle"))
    for (above, level), paths in sorted(shades.items()):
        style = f'class="cell {"above" if above else "below"}" fill-opacity="{0.8 * level / _LEVELS:.2f}"'
        parts.append(f'<path d="{"".join(paths)}" {style}/>')
    return parts + written, top + rows * tall


def _folded(loads: Floats) -> tuple[Floats, list[str]]:
    """Return at most 32 x 32 cells, each the largest of those it stands for, and labels of the rows."""
    rows = bucket_ranges(loads.shape[0], _MOST_ROWS)
    columns = bucket_ranges(loads.shape[1], _MOST_ROWS)
    gaps = np.where(np.isnan(loads), -1.0, loads)
    by_row = np.stack([gaps[row.members].max(axis=0) for row in rows])
    cells = np.stack([by_row[:, column.members].max(axis=1) for column in columns], axis=1)
    return np.where(cells < 0, np.nan, cells), [row.label.split()[1] for row in rows]


def _slots(sizes: Floats, pitch: float) -> Floats:
    """Return the room of each node: its size, or that of its label."""
    return np.maximum(sizes + 6.0, pitch)


def _stack(sizes: Floats, height: float, pitch: float) -> list[tuple[float, float]]:
    """Return (top, height) of nodes one above the other, in the middle of the height."""
    slots = _slots(sizes, pitch)
    slots += min(20.0, (height - slots.sum()) / len(slots))
    starts = np.cumsum(slots) - slots + (height - slots.sum()) / 2
    tops = starts + (slots - sizes) / 2
    return [(float(top), max(float(size), 1.0)) for top, size in zip(tops, sizes, strict=True)]


def _labels(
    x: float,
    nodes: Sequence[tuple[float, float]],
    names: Sequence[tuple[str, str]],
    anchor: str,
    *,
    two_lines: bool,
    limit: int,
) -> list[str]:
    parts = []
    for (name, detail), (top, tall) in zip(names, nodes, strict=True):
        y, short = top + tall / 2, shorten(name, limit)
        if two_lines:
            parts += [_text(x, y - 2, short, "direct", anchor), _text(x, y + 12, detail, "", anchor)]
        else:
            words = f'<tspan class="direct">{escape(short)}</tspan> {escape(detail)}'
            parts.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{words}</text>')
    return parts


def _hull(x: float, top: float, width: float, base: float) -> tuple[str, str]:
    """Return an outlined bar in two parts: its body goes behind the filled bar, its top edge in front."""
    return _box(x, top, width, base - top, 'class="hull"'), _line(x, top, x + width, top, "brim")


def _tick(label: str) -> str:
    """Return "20 %" for "20.0 %"."""
    digits = label.rstrip("kMGTP%\u202f")
    short = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return short + label[len(digits) :]


def _ticks(top: float) -> list[float]:
    if not top > 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda size: abs(size - top / 4))
    return [n * step for n in range(int(top / step) + 1)]


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, style: str) -> str:
    w, h = max(width, 0.1), max(height, 0.0)
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" {style}/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
