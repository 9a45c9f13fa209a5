"""The six figures of a run's report: each with a title that states what it shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from overlord.cli import charts
from overlord.cli.charts import PALETTE, Frame
from overlord.cli.summary import (
    NARROW_SPACE,
    LoadHeatmap,
    RunSummary,
    count,
    excess,
    percent,
    ratio,
    seconds,
    without_zeros,
)

OURS, THEIRS = "var(--blue)", "var(--red)"
"""Set by the page, lighter in the dark."""
_MAX_POINTS = 180
_MAX_LAYERS = len(PALETTE)
_MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing for any width, with the words around it."""

    name: str
    title: str
    caption: str
    draw: Callable[[float], str]
    wide: bool = False


def all_figures(summary: RunSummary) -> list[Figure]:
    """Return the figures in reading order."""
    return [
        mixture_figure(summary),
        imbalance_figure(summary),
        length_figure(summary.length_histogram),
        heat_map_figure(summary.load_heatmap),
        token_figure(summary),
        wait_figure(summary),
    ]


def mixture_figure(summary: RunSummary) -> Figure:
    """Return the realised mixture as stacked areas under the planned borders."""
    worst = max(summary.sources, key=lambda s: abs(s.realised_share - s.planned_share), default=None)
    off = 100 * abs(worst.realised_share - worst.planned_share) if worst else 0.0
    if worst is None:
        title = "No source was drawn"
    elif off < 1:
        title = f"Over the run, every source gets its planned share to within {max(off, 0.01):.2f} points"
    else:
        title = f"Over the run, {worst.name} is {off:.1f} points away from its planned share"
    names, planned, realised, windows = _layers(summary)
    starts = [float(summary.per_step[w.start].index) for w in windows] if summary.per_step else []

    def draw(width: float) -> str:
        limit = 20 if width > 500 else 9
        labels = [
            f"{short_name(n, limit)} {percent(layer[-1])}" for n, layer in zip(names, realised, strict=True) if layer
        ]
        margin = 26 + 8 * max(map(len, labels), default=0)
        frame = charts.step_frame(width, 340 if width > 500 else 300, starts, (0, 1), right=margin)
        parts = charts.step_axes(frame, starts, f"share of {summary.mixture_level}s", [0, 0.25, 0.5, 0.75, 1], percent)
        if not starts:
            return charts.svg(width, frame.height, title, parts)
        parts += charts.stacked_areas(frame, starts, realised, planned)
        last, centres = 1.0, list[float]()
        for layer in realised:
            centres.append(last - layer[-1] / 2)
            last -= layer[-1]
        parts += charts.side_labels(frame, labels, centres, PALETTE[: len(names)])
        tips = [
            f"step {x:.0f} · "
            + " · ".join(f"{short_name(n, 8)} {100 * r[i]:.0f}" for n, r in zip(names, realised, strict=True))
            for i, x in enumerate(starts)
        ]
        parts += charts.hover_bands(frame, starts, tips if width > 500 else [t.split(" · ")[0] for t in tips])
        return charts.svg(width, frame.height, title, parts)

    caption = "Areas: what was delivered in each step. Dashed: what the schedule asked for. Labels: the last step."
    return Figure("mixture", title, caption + _window_note(summary), draw, wide=True)


def imbalance_figure(summary: RunSummary) -> Figure:
    """Return imbalance per step, planned and round-robin."""
    title = (
        f"The busiest rank carries {excess(summary.imbalance_planned)}; "
        f"dealt round-robin, {excess(summary.imbalance_round_robin).removesuffix(' than the mean')}"
    )
    starts, (ours, theirs) = _series(summary, [s.imbalance for s in summary.per_step],
                                     [s.imbalance_round_robin for s in summary.per_step])  # fmt: skip

    ends = (f"overlord {ratio(summary.imbalance_planned)}", f"round-robin {ratio(summary.imbalance_round_robin)}")
    caption = "1× is perfect: all ranks finish together. Labels: means over the run."
    draw = two_lines(title, "largest ÷ mean cost of a rank", starts, ours, theirs, ends)
    return Figure("imbalance", title, caption + _window_note(summary), draw)


def two_lines(
    title: str,
    label: str,
    starts: Sequence[float],
    ours: Sequence[float],
    theirs: Sequence[float],
    ends: tuple[str, str],
) -> Callable[[float], str]:
    """Return the drawing of two ratios to one over steps, each with its own words at the end."""

    def draw(width: float) -> str:
        high = max([1.1, *ours, *theirs])
        frame = charts.step_frame(
            width, 270, starts, (1.0, high + (high - 1) * 0.08), right=30 + 8 * max(map(len, ends))
        )
        ticks = charts.nice_ticks(1.0, frame.y_range[1])
        parts = charts.step_axes(frame, starts, label, ticks, without_zeros(lambda v: f"{v:.2f}×"))
        if starts:
            lines = [(theirs, ends[1], THEIRS), (ours, ends[0], OURS)]
            for values, _, colour in lines:
                line = [(frame.x(x), frame.y(y)) for x, y in zip(starts, values, strict=True)]
                parts.append(charts.polyline(line, f'stroke="{colour}" class="line"'))
            lines.sort(key=lambda line: -statistics.fmean(line[0][-3:]))
            centres = [statistics.fmean(values[-3:]) for values, _, _ in lines]
            parts += charts.side_labels(frame, [words for _, words, _ in lines], centres, [c for _, _, c in lines])
            tips = [
                f"step {x:.0f}: {_first(ends[0])} {ratio(a)}, {_first(ends[1])} {ratio(b)}"
                for x, a, b in zip(starts, ours, theirs, strict=True)
            ]
            parts += charts.hover_bands(frame, starts, tips)
        return charts.svg(width, frame.height, title, parts)

    return draw


def _first(words: str) -> str:
    return words.rsplit(" ", 1)[0]


def heat_map_figure(loads: LoadHeatmap | None, name: str = "overlord") -> Figure:
    """Return the cost of every microbatch of one step, planned beside round-robin."""
    ours = loads.overlord[:_MAX_RANKS] if loads else []
    theirs = loads.round_robin[:_MAX_RANKS] if loads else []
    cells, other = ([cost for row in rows for cost in row] for rows in (ours, theirs))
    if loads is None or not cells:
        return Figure("load", "No step was chosen for the load map", "", lambda width: charts.svg(width, 20, "", []))
    mean = statistics.fmean(cells)
    title = (
        f"Waiting for each other after every microbatch, ranks take {_lockstep(ours)} longer than with perfect "
        f"balance in step {loads.step}; dealt round-robin, {_lockstep(theirs)}"
    )
    if loads.axis == "CP":  # single ranks run through their microbatches without waiting after each
        busiest, dealt = (excess(_busiest(rows)) for rows in (ours, theirs))
        title = f"In step {loads.step} the busiest rank carries {busiest}; dealt round-robin, {dealt}"
    deviations = [abs(c / mean - 1) for c in cells + other] if mean > 0 else [0.0]
    # Below a quarter the colour stays pale, so that rounding noise does not look like imbalance.
    loudest = max(0.25, *deviations)

    def draw(width: float) -> str:
        beside = width > 500
        share = (width - 32) / 2 if beside else width
        row = "rank " if loads.axis == "CP" else "dp"
        parts, tall = charts.heat_map(0, share, name, ours, mean, loudest, row)
        more, other_tall = charts.heat_map(
            share + 32 if beside else 0, share, "round-robin", theirs, mean, loudest, row
        )
        if beside:
            return charts.svg(width, max(tall, other_tall) + 4, title, parts + more)
        moved = f'<g transform="translate(0 {tall + 22:.0f})">{"".join(more)}</g>'
        return charts.svg(width, tall + other_tall + 26, title, [*parts, moved])

    hidden = (
        f" The first {_MAX_RANKS} of {len(loads.overlord)} ranks are shown." if len(loads.overlord) > _MAX_RANKS else ""
    )
    caption = f"Planned cost over the step's mean: orange above, blue below, no colour at the mean.{hidden}"
    return Figure("load", title, caption, draw, wide=True)


def _lockstep(loads: Sequence[Sequence[float]]) -> str:
    """Return by how much a step takes longer when its slowest rank decides over every microbatch."""
    slowest = sum(max(column) for column in zip_longest(*loads, fillvalue=0.0))
    mean = sum(sum(row) for row in loads) / len(loads) if loads else 0.0
    return percent(max(slowest / mean - 1, 0.0)) if mean > 0 else percent(0.0)


def _busiest(loads: Sequence[Sequence[float]]) -> float:
    sums = [sum(row) for row in loads]
    return max(sums) / statistics.fmean(sums) if sums and any(sums) else 1.0


def length_figure(histogram: Sequence[tuple[int, int, int]]) -> Figure:
    """Return the distribution of sample lengths, by samples and by tokens."""
    bins = [(max(low, 1), max(high, low + 1, 2), n) for low, high, n in histogram if n > 0]
    total = sum(n for _, _, n in bins)
    # The histogram does not hold the tokens of a bin; its geometric middle stands for each sample in it.
    tokens = [n * math.sqrt(low * high) for low, high, n in bins]
    median, tail = _median(bins, total), _tail_share(bins, tokens, total)
    title = (
        f"Half of the samples have at most about {count(round(median))} tokens; "
        f"the longest 2{NARROW_SPACE}% hold about {percent(tail)} of all tokens"
        if bins
        else "No sample was delivered"
    )

    def draw(width: float) -> str:
        low = min((b[0] for b in bins), default=1)
        high = max((b[1] for b in bins), default=2)
        shares = [n / total for _, _, n in bins]
        weights = [t / sum(tokens) for t in tokens]
        top = max([0.01, *shares, *weights])
        frame = Frame(width, 270, (low, high), (0, top * 1.12), x_log=True)
        parts = charts.axes(
            frame,
            x_label="tokens in a sample (log scale)",
            y_label="share",
            x_ticks=charts.log_ticks(low, high, 2),
            y_ticks=charts.nice_ticks(0, top),
            x_format=count,
            y_format=without_zeros(percent),
        )
        for (left, right, n), share, weight in zip(bins, shares, weights, strict=True):
            x, end, base = frame.x(left), frame.x(right), frame.y(0)
            words = f"{left:,} to {right - 1:,} tokens: {n:,} samples, about {percent(weight)} of the tokens"
            bar = charts.rectangle(x + 0.5, frame.y(share), end - x - 1, base - frame.y(share), f'fill="{OURS}"')
            hull = charts.rectangle(x + 0.5, frame.y(weight), end - x - 1, base - frame.y(weight), 'class="hull"')
            parts.append(f"<g><title>{words}</title>{bar}{hull}</g>")
        parts += _length_labels(frame, bins, shares, weights)
        return charts.svg(width, frame.height, title, parts)

    caption = "Filled: share of the samples. Outlined: share of the tokens, estimated from the bins' middles."
    return Figure("lengths", title, caption, draw)


def token_figure(summary: RunSummary) -> Figure:
    """Return tokens per step with the padding on top of them."""
    steps = summary.per_step
    mean = statistics.fmean(s.tokens for s in steps) if steps else 0.0
    title = f"A step delivers {count(mean)} tokens; {percent(summary.padding)} of the positions are padding"
    pads = [s.tokens * s.padding / (1 - s.padding) if s.padding < 1 else 0.0 for s in steps]
    starts, (tokens, losses, padding) = _series(
        summary, [float(s.tokens) for s in steps], [float(s.loss_tokens) for s in steps], pads
    )

    def draw(width: float) -> str:
        high = max([1.0, *(a + b for a, b in zip(tokens, padding, strict=True))])
        frame = charts.step_frame(width, 270, starts, (0, high * 1.05), right=104)
        inset = min(18.0, 0.4 * (width - frame.left - frame.right) / max(len(starts), 1))
        parts = charts.step_axes(frame, starts, "tokens in a step", charts.nice_ticks(0, high), without_zeros(count))
        for x, whole, pad in zip(starts, tokens, padding, strict=True):
            left, top, cap = frame.x(x) - inset, frame.y(whole), frame.y(whole + pad)
            parts.append(charts.rectangle(left, top, 2 * inset, frame.y(0) - top, f'fill="{OURS}"'))
            parts.append(charts.rectangle(left, cap, 2 * inset, top - cap, f'fill="{THEIRS}"'))
        if starts:
            loss_line = [(frame.x(x), frame.y(y)) for x, y in zip(starts, losses, strict=True)]
            parts.append(charts.polyline(loss_line, 'class="loss"'))
            names = ["padding", "tokens", "in the loss"]
            centres = [tokens[-1] + padding[-1] / 2, tokens[-1] * 0.86, min(losses[-1], tokens[-1] * 0.8)]
            parts += charts.side_labels(frame, names, centres, (THEIRS, OURS, "var(--ink)"))
            tips = [
                f"step {x:.0f}: {t:,.0f} tokens, {p:,.0f} padding, {loss:,.0f} in the loss"
                for x, t, p, loss in zip(starts, tokens, padding, losses, strict=True)
            ]
            parts += charts.hover_bands(frame, starts, tips)
        return charts.svg(width, frame.height, title, parts)

    return Figure("tokens", title, "All ranks together." + _window_note(summary), draw)


def wait_figure(summary: RunSummary) -> Figure:
    """Return the longest wait of a client in each step."""
    waits = [s.wait_s for s in summary.per_step]
    later = waits[1:] or waits
    typical = statistics.median(later) if later else 0.0
    title = f"A client waits {seconds(typical)} for a step" + (
        f", {seconds(waits[0])} for the first" if len(waits) > 1 else ""
    )
    starts, (values,) = _series(summary, waits, reduce=max)

    def draw(width: float) -> str:
        positive = [v for v in values if v > 0] or [1e-3]
        log = max(positive) > 30 * min(positive)
        bounds = (min(positive) / 1.5, max(positive) * 1.5) if log else (0.0, max(positive) * 1.1)
        frame = charts.step_frame(width, 270, starts, bounds, right=138, left=58, y_log=log)
        ticks = charts.log_ticks(*bounds, 10) if log else charts.nice_ticks(*bounds)
        label = "longest wait of a client" + (" (log scale)" if log else "")
        parts = charts.step_axes(frame, starts, label, ticks, without_zeros(seconds))
        if starts:
            at = frame.y(typical)
            parts.append(charts.segment(frame.left, at, width - frame.right, at, "median"))
            parts += charts.side_labels(frame, [f"median {seconds(typical)}"], [typical], ["var(--soft)"])
            parts += [
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5" fill="{OURS}" class="dot"/>'
                for x, y in zip(starts, values, strict=True)
            ]
            tips = [f"step {x:.0f}: {seconds(y)}" for x, y in zip(starts, values, strict=True)]
            parts += charts.hover_bands(frame, starts, tips)
        return charts.svg(width, frame.height, title, parts)

    caption = (
        "From asking for a step to holding all of it. These clients ask again at once, so this is the time the "
        "service needs for a step, not what a training run would wait. The median leaves the first step out."
    )
    return Figure("wait", title, caption + _window_note(summary, "largest"), draw)


def _windows(steps: int) -> list[range]:
    every = max(1, -(-steps // _MAX_POINTS))
    return [range(start, min(start + every, steps)) for start in range(0, steps, every)]


def _window_note(summary: RunSummary, what: str = "mean") -> str:
    every = -(-len(summary.per_step) // _MAX_POINTS) * summary.steps_per_point
    return f" Each point is the {what} of {every} steps." if every > 1 else ""


def _series(
    summary: RunSummary,
    *columns: Sequence[float],
    reduce: Callable[[Sequence[float]], float] = statistics.fmean,
) -> tuple[list[float], list[list[float]]]:
    """Return step numbers and columns, thinned to what a chart can show."""
    windows = _windows(len(summary.per_step))
    starts = [float(summary.per_step[w.start].index) for w in windows]
    return starts, [[reduce(column[w.start : w.stop]) for w in windows] for column in columns]


def _layers(summary: RunSummary) -> tuple[list[str], list[list[float]], list[list[float]], list[range]]:
    """Return names, planned and realised shares of each layer; small sources share the last layer."""
    names = [source.name for source in summary.sources]
    if len(names) > _MAX_LAYERS:
        by_share = sorted(summary.sources, key=lambda s: -s.realised_share)[: _MAX_LAYERS - 1]
        kept = {source.name for source in by_share}
        names = [name for name in names if name in kept]
    windows = _windows(min(len(summary.per_step), len(summary.realised_per_step), len(summary.weights_per_step)))

    def columns(shares: list[dict[str, float]]) -> list[list[float]]:
        scales = [sum(row.values()) or 1.0 for row in shares]
        normal = [{n: v / scale for n, v in row.items()} for row, scale in zip(shares, scales, strict=True)]
        return [[statistics.fmean(row.get(n, 0.0) for row in normal[w.start : w.stop]) for w in windows] for n in names]

    planned, realised = columns(summary.weights_per_step), columns(summary.realised_per_step)
    if len(names) < len(summary.sources):
        for layers in (planned, realised):
            layers.append([max(0.0, 1 - sum(layer[i] for layer in layers)) for i in range(len(windows))])
        names.append(f"{len(summary.sources) - len(names)} others")
    return names, planned, realised, windows


def _median(bins: Sequence[tuple[int, int, int]], total: int) -> float:
    seen = 0
    for low, high, n in bins:
        if seen + n >= total / 2:
            return low * (high / low) ** ((total / 2 - seen) / n)
        seen += n
    return 0.0


def _tail_share(bins: Sequence[tuple[int, int, int]], tokens: Sequence[float], total: int) -> float:
    """Return the share of the tokens that the longest 2 % of the samples hold."""
    left, held = 0.02 * total, 0.0
    for (_, _, n), weight in zip(reversed(bins), reversed(tokens), strict=True):
        taken = min(n, left)
        held += weight * taken / n
        left -= taken
    return held / sum(tokens) if tokens else 0.0


def _length_labels(
    frame: Frame, bins: Sequence[tuple[int, int, int]], shares: Sequence[float], weights: Sequence[float]
) -> list[str]:
    """Name the two shapes above their highest bins; side by side where those are neighbours."""
    if not bins:
        return []
    peaks = [max(range(len(values)), key=values.__getitem__) for values in (shares, weights)]
    xs = [(frame.x(bins[at][0]) + frame.x(bins[at][1])) / 2 for at in peaks]
    near = abs(xs[0] - xs[1]) < 56
    parts: list[str] = []
    for name, at, x, outer in zip(("samples", "tokens"), peaks, xs, ("end", "start"), strict=True):
        anchor = (outer if xs[0] <= xs[1] else {"end": "start", "start": "end"}[outer]) if near else "middle"
        x = min(max(x, frame.left + 30), frame.width - frame.right - 30)
        parts.append(charts.text(x, frame.y(max(shares[at], weights[at])) - 6, name, kind="direct", anchor=anchor))
    return parts


def short_name(name: str, limit: int) -> str:
    """Return the name, cut in the middle if long: names of many sources often differ at the end."""
    return name if len(name) <= limit else f"{name[: limit // 2]}…{name[limit // 2 + 1 - limit :]}"
