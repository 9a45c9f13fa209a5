"""A profile for people: tables for the terminal, one HTML page of latency and memory, and the plan it leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as TerminalTable
from rich.text import Text

from overlord.reports import svg
from overlord.reports.pages import Figure, Row, Table, render, terminal_table
from overlord.reports.summary import count, number, percent, seconds, shorten, size, without_zeros
from overlord.reports.svg import OURS, ROW, THEIRS, Frame
from overlord.scaling.partition import Allotment, Partition
from overlord.scaling.profiles import Profile, Resources, SourceCost, SourceProfile

MOST_ROWS = 40
"""Sources that a table of the terminal and a figure hold, the most expensive ones."""
_WAITING = 0.5
"""Workers of a source mostly wait where less than this part of P needs a CPU."""
_COLUMNS = ("source", "P mean", "p50", "p99", "T", "memory", "bytes in→out", "samples/s", "cost")


def ranked(profile: Profile) -> list[SourceProfile]:
    """Return the sources, the most expensive one first."""
    return sorted(profile.sources, key=lambda one: (-one.transform_s, one.name))


def headlines(profile: Profile) -> list[str]:
    """Return what matters most, in sentences."""
    order = ranked(profile)
    if not order:
        return []
    first, last = order[0], order[-1]
    words = [f"A sample of {first.name} takes one worker {seconds(first.transform_s)}: {_part_words(first)}."]
    if len(order) > 1:
        words.append(
            f"That is {_times(first, last)} a sample of {last.name} ({seconds(last.transform_s)}), the cheapest of "
            f"{number(len(order), 'source')}."
        )
    waiting = [one for one in order if one.cpu_share < _WAITING]
    if waiting:
        most = min(waiting, key=lambda one: one.cpu_share)
        words.append(
            f"Workers of {number(len(waiting), 'source')} mostly wait: those of {most.name} need a CPU for "
            f"{percent(most.cpu_share)} of their time."
        )
    behind = [one for one in order if one.decoded_in == "constructor" and one.decode_s > 0]
    if behind:
        most = max(behind, key=lambda one: one.decode_s)
        words.append(
            f"Media of {number(len(behind), 'source')} are decoded behind the hand-over, which P does not count: "
            f"{seconds(most.decode_s)} a sample of {most.name}."
        )
    bad = [one for one in order if one.bad]
    if bad:
        words.append(
            f"Bad samples were met in {', '.join(f'{one.name} ({one.bad})' for one in bad[:5])}"
            f"{f' and {len(bad) - 5} more' if len(bad) > 5 else ''}; the log names them."
        )
    return words


def profile_tables(job: str, profile: Profile) -> list[RenderableType]:
    """Return a profile for the terminal."""
    order = ranked(profile)
    measured = sum(one.entries[-1].samples if one.entries else one.samples for one in order)
    title = f"{number(len(order), 'source')} of {job}, measured on {number(measured, 'sample')}"
    rows = [Row(shorten(one.name, 18), _cells(one, order[-1])) for one in order[:MOST_ROWS]]
    # Without lines between the columns, names have room on a terminal of 100 columns.
    table = terminal_table(title, _COLUMNS, rows, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    parts: list[RenderableType] = [table]
    rest = order[MOST_ROWS:]
    if rest:
        parts.append(Text(_rest_words(rest), style="dim"))
    return [Group(*parts), *(Text(words) for words in headlines(profile))]


def _cells(one: SourceProfile, cheapest: SourceProfile) -> list[str]:
    return [
        seconds(one.transform_s),
        seconds(one.transform.p50),
        seconds(one.transform.p99),
        seconds(one.handover_s),
        size(one.file_bytes + one.buffer_bytes),
        f"{size(one.read_bytes)}→{size(one.delivered_bytes)}",
        count(1 / max(one.transform_s, 1e-12)),
        _times(one, cheapest),
    ]


def _times(one: SourceProfile, cheapest: SourceProfile) -> str:
    value = one.transform_s / max(cheapest.transform_s, 1e-12)
    return f"{value:.1f}×" if value < 10 else f"{count(round(value))}×"


def _rest_words(rest: Sequence[SourceProfile]) -> str:
    memory = sum(one.file_bytes + one.buffer_bytes for one in rest)
    return (
        f"These are the {MOST_ROWS} most expensive sources. {number(len(rest), 'cheaper source')}: P from "
        f"{seconds(rest[0].transform_s)} down to {seconds(rest[-1].transform_s)}, {size(memory)} of memory together; "
        "all are in --json and in the profile."
    )


def _part_words(one: SourceProfile) -> str:
    parts = {"reading": one.read_s, "measuring": one.measure_s, "finishing": one.finish_s}
    return ", ".join(f"{seconds(value)} {name}" for name, value in sorted(parts.items(), key=lambda part: -part[1]))


def render_profile(job: str, profile: Profile, failed: Mapping[str, str]) -> str:
    """Return a profile as one HTML page."""
    order = ranked(profile)
    rows = [Row(one.name, (*_cells(one, order[-1]), percent(one.cpu_share), count(one.samples))) for one in order]
    table = Table("sources", "All sources, the most expensive first", (*_COLUMNS, "CPU", "samples"), rows)
    figures = [latency_figure(order), memory_figure(order)] if order else []
    facts = (number(len(order), "source"), number(sum(one.samples for one in order), "sample"))
    words = [*headlines(profile), *failed.values()]
    return render("profile", job, "overlord profile", facts, figures, [table], notes=words)


def latency_figure(order: Sequence[SourceProfile]) -> Figure:
    """Return how P is spread over the samples of each source, on a log axis."""
    shown = order[:MOST_ROWS]
    title = f"{shown[0].name} takes {_times(shown[0], order[-1])} as long a sample as {order[-1].name}"
    low = max(min(one.transform.quantiles[1] for one in shown), 1e-7)
    high = max(max(one.transform.max for one in shown), 1e-6)

    def draw(width: float) -> str:
        frame = Frame(width, 66 + ROW * len(shown), (low, high), (0, 1), left=118, right=20, x_log=True)
        parts = [svg.text(0, 12, "seconds of one worker a sample (log scale)", kind="y-title")]
        parts += svg.vertical_grid(frame, 20, svg.log_ticks(low, high, 10), without_zeros(seconds))
        for row, one in enumerate(shown):
            parts += _box(frame, one, 26 + row * ROW)
        return svg.svg(width, frame.height, parts)

    caption = "Bar: a quarter to three quarters of the samples; line: 5 % to 99 %; dot: the mean."
    return Figure("latency", title, caption + _left_out(order), draw)


def _box(frame: Frame, one: SourceProfile, y: float) -> list[str]:
    quantiles, spread = one.transform.quantiles, one.transform
    quarter = (len(quantiles) - 1) // 4
    x05, x25, x75 = (frame.x(quantiles[at]) for at in (1, quarter, 3 * quarter))
    middle, x50 = y + ROW / 2, frame.x(spread.p50)
    words = (
        f"{one.name}: mean {seconds(spread.mean)}, half below {seconds(spread.p50)}, 99 % below "
        f"{seconds(spread.p99)}, at most {seconds(spread.max)}; {_part_words(one)}"
    )
    return [
        svg.text(frame.left - 8, middle + 4, shorten(one.name, 15), anchor="end"),
        svg.with_tip(
            words,
            svg.rectangle(frame.left, y, frame.end - frame.left, ROW, 'fill="transparent"'),
            svg.segment(x05, middle, frame.x(spread.p99), middle, "base"),
            svg.rectangle(x25, y + 5, max(x75 - x25, 2.0), ROW - 10, f'fill="{OURS}" fill-opacity=".75"'),
            svg.segment(x50, y + 3, x50, y + ROW - 3, "guide"),
            svg.dot(frame.x(spread.mean), middle, 3.2, f'fill="{THEIRS}" class="dot"'),
        ),
    ]


def memory_figure(order: Sequence[SourceProfile]) -> Figure:
    """Return what one worker of each source holds, in the order of the figure beside it."""
    shown = order[:MOST_ROWS]
    most = max(shown, key=lambda one: one.buffer_bytes)
    title = f"A worker of {most.name} holds {size(most.buffer_bytes)}, the most of all"
    rows = [
        (
            one.name,
            f"{one.name}: {size(one.buffer_bytes)} in a worker, {size(one.file_bytes)} of file state",
            (one.file_bytes, one.buffer_bytes),
            size(one.file_bytes + one.buffer_bytes),
        )
        for one in shown
    ]
    label, colours = "bytes of one worker, and of the files it reads", (THEIRS, OURS)
    caption = "Blue: readers and rows of a worker that has read on to the end of its group. Orange: names and indices."
    return Figure(
        "memory", title, caption + _left_out(order), lambda width: svg.row_bars(width, label, rows, colours, 40)
    )


def _left_out(order: Sequence[SourceProfile]) -> str:
    return f" The {MOST_ROWS} most expensive of {len(order):,} sources." if len(order) > MOST_ROWS else ""


def plan_table(
    found: Partition,
    costs: Sequence[SourceCost],
    shares: Sequence[float],
    resources: Resources,
    worst: tuple[int, float, str],
) -> RenderableType:
    """Return a placement of sources for the terminal: workers and actors of each, and what matters most of it."""
    table = TerminalTable(title="workers and actors", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("source", style="bold")
    for name in ("cluster", "P", "share", "workers", "CPUs", "actors"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", style="dim", ratio=1)
    rows = sorted(
        zip(found.allotments, costs, shares, strict=True), key=lambda row: (-row[0].workers, -row[0].busy, row[0].name)
    )
    for one, cost, share in rows[:MOST_ROWS]:
        table.add_row(
            Text(one.name), str(one.cluster), seconds(cost.transform_s), percent(share), str(one.workers),
            f"{one.cpus:.2g}", _actors(one), Text(one.why),
        )  # fmt: skip
    rest = rows[MOST_ROWS:]
    parts: list[RenderableType] = [table]
    if rest:
        workers = number(sum(one.workers for one, _, _ in rest), "worker")
        parts.append(Text(f"and {number(len(rest), 'source')} more, {workers}", style="dim"))
    return Group(*parts, *(Text(words) for words in plan_words(found, resources, worst)))


def _actors(one: Allotment) -> str:
    """Write the actors of a source, those of a long row as a range.

    A source's own actors have numbers that follow each other.
    """
    first, last = one.actors[0], one.actors[-1]
    return str(first) if first == last else f"{first}–{last}"


def plan_words(found: Partition, resources: Resources, worst: tuple[int, float, str]) -> list[str]:
    """Return what matters most of a plan, in sentences."""
    shared = sum(one.parallelism == "source" for one in found.allotments)
    spread = sum(one.parallelism == "data" for one in found.allotments)
    bounded = resources.bytes < 1 << 62
    busy = number(sum(one.workers for one in found.allotments), "worker")
    clusters = number(1 + max(one.cluster for one in found.allotments), "cluster")
    within = f" of {size(resources.bytes)}; {size(resources.bytes - found.bytes)} are left" if bounded else ""
    words = [
        f"Expected: {count(found.samples_per_s)} samples/s; {found.limit}.",
        f"{clusters} of up to {number(found.cluster_size, 'source')}. {busy} in {number(len(found.actors), 'actor')}: "
        f"{number(shared, 'source')} share actors, {spread} {'is' if spread == 1 else 'are'} spread over several.",
        f"CPUs: {found.cpus:.3g} of {resources.cpus:g}; {resources.cpus - found.cpus:.3g} are left. "
        f"{number(resources.constructors, 'constructor host')} and the planner have their own.",
        f"Memory of the actors: {size(found.bytes)}{within}.",
    ]
    step, rate, source = worst
    if rate < 0.99 * found.samples_per_s:
        words.append(
            f"The mixture changes: sized for its mean, the feed falls to {count(rate)} samples/s around step {step:,}, "
            f"when {source} is drawn most. Online scaling follows the schedule."
        )
    return words
