"""The end of a run: one HTML page with six figures that state what they show, and tables for the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from rich.markup import escape
from rich.table import Table as TerminalTable

from overlord.planning.balancing.evenness import over_ranks
from overlord.planning.costs import llama_12b
from overlord.reports import svg
from overlord.reports.pages import (
    Figure,
    Row,
    Table,
    Tile,
    length_figure,
    load_figure,
    render,
    terminal_table,
    tile_table,
)
from overlord.reports.summary import (
    LoadHeatmap,
    MediaSummary,
    RunSummary,
    SourceSummary,
    busiest,
    count,
    excess,
    known_loads,
    number,
    percent,
    ratio,
    seconds,
    share,
    shorten,
    size,
    waited_for,
    without_zeros,
)
from overlord.reports.svg import OURS, PALETTE, THEIRS, Frame

_MAX_POINTS = 180


def render_report(summary: RunSummary) -> str:
    """Return the report of a run as one HTML page."""
    facts = (
        number(summary.steps, "step"),
        f"mesh {summary.mesh}",
        f"strategy {summary.strategy}",
        f"layout {summary.layout}",
        f"{summary.runtime} runtime",
        number(len(summary.sources), "source"),
    )
    figures = [
        mixture_figure(summary),
        imbalance_figure(summary),
        binned_length_figure(summary.length_histogram),
        heat_map_figure(summary.load_heatmap),
        token_figure(summary),
        wait_figure(summary),
    ]
    return render(
        "run",
        summary.job_name,
        "overlord run",
        facts,
        figures,
        [_sources(summary)],
        tiles=_key_figures(summary),
        notes=[waited_for(summary), *summary.notes],
        digests=summary.digests,
        kappa=f"{llama_12b.kappa:,.0f}",
    )


def summary_table(summary: RunSummary) -> TerminalTable:
    """Return the key figures of a run for the terminal."""
    tiles = [("strategy", summary.strategy, f"mesh {summary.mesh}, layout {summary.layout}"), *_key_figures(summary)]
    if summary.per_step:
        tokens = [step.tokens for step in summary.per_step]
        spread = f"{count(min(tokens))} to {count(max(tokens))}"
        tiles.append(("tokens per step", count(statistics.fmean(tokens)), spread))
    return tile_table(f"{escape(summary.job_name)}: {number(summary.steps, 'step')}", tiles)


def source_table(summary: RunSummary) -> TerminalTable:
    """Return the planned and realised mixture for the terminal."""
    heads = ("source", "format", "planned", "realised", "samples", "tokens", "epochs", "bad", "dropped")
    rows: list[Row] = []
    for one in summary.sources:
        bad = f"[red]{one.bad:,}[/red]" if one.bad else "0"
        rows.append(Row(one.name, (escape(one.format), *_shares(one), *_amounts(one), bad, f"{one.dropped:,}")))
    return terminal_table(f"mixture, by {summary.mixture_level}", heads, rows)


def media_tables(sources: Sequence[MediaSummary]) -> list[TerminalTable]:
    """Return where media are decoded and what travels for them, for the terminal; nothing without media."""
    travels = {"constructor": "encoded"}
    rows = [
        Row(one.name, (one.decoded_in, f"{size(one.handed_over_bytes)} {travels.get(one.decoded_in, 'decoded')}"))
        for one in sources
    ]
    return [terminal_table("media", ("source", "decoded in", "handed over"), rows)] if sources else []


def _key_figures(summary: RunSummary) -> list[Tile]:
    spent = f"{count(summary.tokens)} in {seconds(summary.wall_s)}"
    return [
        ("tokens per second", count(summary.tokens_per_s), spent),
        ("samples per second", count(summary.samples_per_s), f"{count(summary.samples)} samples"),
        ("imbalance", ratio(summary.imbalance_planned), f"round-robin {ratio(summary.imbalance_round_robin)}"),
        ("padding", percent(summary.padding), "of delivered positions"),
        ("peak memory", size(summary.peak_memory_bytes), "service and clients"),
        ("start", seconds(summary.startup_s), "launch to first batch"),
    ]


def _shares(source: SourceSummary) -> list[str]:
    return [share(source.planned_share), share(source.realised_share)]


def _amounts(source: SourceSummary) -> list[str]:
    epochs = "–" if source.epochs is None else f"{source.epochs:.2f}"
    return [count(source.samples), count(source.tokens), epochs]


def _sources(summary: RunSummary) -> Table:
    largest = max((source.realised_share for source in summary.sources), default=0.0) or 1.0
    media = {one.name: one for one in summary.media}
    heads = ["source", "format", "planned", "realised", "difference", "samples", "tokens", "epochs", "bad", "dropped"]
    heads.append("waited for")
    heads += ["handed over", "decoded in"] if media else []
    rows: list[Row] = []
    for source in summary.sources:
        points = 100 * (source.realised_share - source.planned_share)
        # A rounded zero has no sign.
        difference = f"{points:+.2f}".replace("-", "−") if abs(points) >= 0.005 else "0.00"
        cells = [
            source.format,
            *_shares(source),
            difference,
            *_amounts(source),
            f"{source.bad:,}",
            f"{source.dropped:,}",
            seconds(source.waited_s),
        ]
        faults = [at for at, found in ((7, source.bad), (8, source.dropped)) if found]
        if media:
            one = media.get(source.name)
            cells += ["–", "–"] if one is None else [size(one.handed_over_bytes), one.decoded_in]
        rows.append(Row(source.name, cells, source.realised_share / largest, faults))
    bad = sum(source.bad for source in summary.sources)
    found = "no sample was bad" if bad == 0 else number(bad, "bad sample")
    note = f"Shares are of {summary.mixture_level}s over the whole run; differences are in points."
    return Table("sources", f"{number(len(summary.sources), 'source')}, {found}", heads, rows, note)


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
        wide, upper, ends = width > 500, 1.0, list[svg.End]()
        for name, layer, colour in zip(names, realised, PALETTE, strict=False):
            last = layer[-1] if layer else 0.0
            ends.append((f"{shorten(name, 20 if wide else 9)} {percent(last)}", upper - last / 2, colour))
            upper -= last
        tips = [f"step {x:.0f}" for x in starts]
        if wide:
            each = [[f"{shorten(n, 8)} {100 * value:.0f}" for value in r] for n, r in zip(names, realised, strict=True)]
            tips = [" · ".join((tip, *(values[i] for values in each))) for i, tip in enumerate(tips)]
        return svg.step_chart(
            width,
            starts,
            (0, 1),
            f"share of {summary.mixture_level}s",
            ([0, 0.25, 0.5, 0.75, 1], percent),
            lambda frame: svg.stacked_areas(frame, starts, realised, planned),
            ends,
            tips,
            height=340 if wide else 300,
        )

    caption = "Areas: what was delivered in each step. Dashed: what the schedule asked for. Labels: the last step."
    return Figure("mixture", title, caption + _window_note(summary), draw, wide=True)


def imbalance_figure(summary: RunSummary) -> Figure:
    """Return imbalance per step, planned and round-robin."""
    title = busiest("rank", summary.imbalance_planned, summary.imbalance_round_robin)
    columns = [s.imbalance for s in summary.per_step], [s.imbalance_round_robin for s in summary.per_step]
    starts, (ours, theirs) = _series(summary, *columns)
    lines = ("overlord", summary.imbalance_planned, ours), ("round-robin", summary.imbalance_round_robin, theirs)
    caption = "1× is perfect: all ranks finish together. Labels: means over the run."
    label = "largest ÷ mean cost of a rank"
    return Figure(
        "imbalance",
        title,
        caption + _window_note(summary),
        lambda width: svg.two_lines(width, label, starts, *lines),
    )


def heat_map_figure(loads: LoadHeatmap | None, name: str = "overlord") -> Figure:
    """Return the cost of every microbatch of one step, planned beside round-robin."""
    if loads is None or not any(loads.overlord) or not any(loads.round_robin):
        return Figure("load", "No step was chosen for the load map", "", lambda width: svg.svg(width, 20, []))
    ours, theirs = (_cells(rows) for rows in (loads.overlord, loads.round_robin))
    by_rank, title = loads.axis == "CP", ""
    if by_rank:  # single ranks run through their microbatches without waiting after each
        planned, dealt = (excess(over_ranks(known_loads(rows))) for rows in (ours, theirs))
        title = f"In step {loads.step} the busiest rank carries {planned}; dealt round-robin, {dealt}"
    maps, at = [(name, ours), ("round-robin", theirs)], f" in step {loads.step}"
    return load_figure("load", maps, title, row="rank" if by_rank else "dp", at=at)


def _cells(rows: Sequence[Sequence[float]]) -> svg.Floats:
    """Return rows of any lengths as one array, NaN where a row has ended."""
    cells = np.full((len(rows), max(map(len, rows))), np.nan)
    for at, row in enumerate(rows):
        cells[at, : len(row)] = row
    return cells


def binned_length_figure(histogram: Sequence[tuple[int, int, int]]) -> Figure:
    """Return the distribution of sample lengths (low, high, count)."""
    # The histogram does not hold the tokens of a bin; its geometric middle stands for each sample in it.
    found = [(max(low, 1), max(high, low + 1, 2), n) for low, high, n in histogram if n > 0]
    bins = [(low, high, n, n * math.sqrt(low * high)) for low, high, n in found]
    total, tokens = sum(each[2] for each in bins), sum(each[3] for each in bins)
    median, seen = 0.0, 0
    for low, high, n, _ in bins:
        if seen < total / 2 <= seen + n:
            median = low * (high / low) ** ((total / 2 - seen) / n)
        seen += n
    left, held = 0.02 * total, 0.0
    for _, _, n, weight in reversed(bins):
        taken = min(n, left)
        held += weight * taken / n
        left -= taken
    return length_figure(bins, round(median), held / tokens if bins else 0.0, about="about ")


def token_figure(summary: RunSummary) -> Figure:
    """Return tokens per step with the padding on top of them."""
    steps = summary.per_step
    mean = statistics.fmean(s.tokens for s in steps) if steps else 0.0
    title = f"A step delivers {count(mean)} tokens; {percent(summary.padding)} of the positions are padding"
    pads = [s.tokens * s.padding / (1 - s.padding) if s.padding < 1 else 0.0 for s in steps]
    starts, (tokens, losses, padding) = _series(
        summary, [float(s.tokens) for s in steps], [float(s.loss_tokens) for s in steps], pads
    )
    high = max([1.0, *(a + b for a, b in zip(tokens, padding, strict=True))])

    def bars(frame: Frame) -> list[str]:
        inset = min(18.0, 0.4 * (frame.end - frame.left) / len(starts))
        parts: list[str] = []
        for x, whole, pad in zip(starts, tokens, padding, strict=True):
            left, top, cap = frame.x(x) - inset, frame.y(whole), frame.y(whole + pad)
            parts.append(svg.rectangle(left, top, 2 * inset, frame.base - top, f'fill="{OURS}"'))
            parts.append(svg.rectangle(left, cap, 2 * inset, top - cap, f'fill="{THEIRS}"'))
        line = [(frame.x(x), frame.y(y)) for x, y in zip(starts, losses, strict=True)]
        return [*parts, svg.polyline(line, 'class="loss"')]

    ends: list[svg.End] = []
    if starts:
        ends = [("padding", tokens[-1] + padding[-1] / 2, THEIRS), ("tokens", tokens[-1] * 0.86, OURS)]
        ends.append(("in the loss", min(losses[-1], tokens[-1] * 0.8), "var(--ink)"))
    tips = [
        f"step {x:.0f}: {t:,.0f} tokens, {p:,.0f} padding, {loss:,.0f} in the loss"
        for x, t, p, loss in zip(starts, tokens, padding, losses, strict=True)
    ]
    ticks = (svg.nice_ticks(0, high), without_zeros(count))

    def draw(width: float) -> str:
        return svg.step_chart(width, starts, (0, high * 1.05), "tokens in a step", ticks, bars, ends, tips)

    return Figure("tokens", title, "All ranks together." + _window_note(summary), draw)


def wait_figure(summary: RunSummary) -> Figure:
    """Return the longest wait of a client in each step."""
    waits = [s.wait_s for s in summary.per_step]
    later = waits[1:] or waits
    typical = statistics.median(later) if later else 0.0
    first = f", {seconds(waits[0])} for the first" if len(waits) > 1 else ""
    title = f"A client waits {seconds(typical)} for a step{first}"
    starts, (values,) = _series(summary, waits, reduce=max)
    positive = [v for v in values if v > 0] or [1e-3]
    log = max(positive) > 30 * min(positive)
    bounds = (min(positive) / 1.5, max(positive) * 1.5) if log else (0.0, max(positive) * 1.1)
    ticks = (svg.log_ticks(*bounds, 10) if log else svg.nice_ticks(*bounds), without_zeros(seconds))
    label = "longest wait of a client" + (" (log scale)" if log else "")
    tips = [f"step {x:.0f}: {seconds(y)}" for x, y in zip(starts, values, strict=True)]
    ends = [(f"median {seconds(typical)}", typical, "var(--soft)")]

    def dots(frame: Frame) -> list[str]:
        at, style = frame.y(typical), f'fill="{OURS}" class="dot"'
        each = (svg.dot(frame.x(x), frame.y(y), 3.5, style) for x, y in zip(starts, values, strict=True))
        return [svg.segment(frame.left, at, frame.end, at, "median"), *each]

    def draw(width: float) -> str:
        return svg.step_chart(width, starts, bounds, label, ticks, dots, ends, tips, left=58, y_log=log)

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
    if len(names) > len(PALETTE):
        by_share = sorted(summary.sources, key=lambda s: -s.realised_share)[: len(PALETTE) - 1]
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
