"""A profile for people: a table for the terminal, and one HTML page with the spread of latency and the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlord.cli import charts, page
from overlord.cli.charts import Frame
from overlord.cli.figures import OURS, THEIRS, Figure, short_name
from overlord.cli.summary import count, number, percent, seconds, size, without_zeros
from overlord.scaling.profiles import Profile, SourceProfile

MOST_ROWS = 40
"""Sources that a table of the terminal and a figure hold, the most expensive ones."""
_WAITING = 0.5
"""Workers of a source mostly wait where less than this part of P needs a CPU."""
_ROW = 20.0
_COLUMNS = ("P mean", "p50", "p99", "T", "memory", "bytes in→out", "samples/s", "cost")


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
    # Without lines between the columns, names have room on a terminal of 100 columns.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("source", style="bold", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for one in order[:MOST_ROWS]:
        table.add_row(Text(short_name(one.name, 18)), *_cells(one, order[-1]))
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
    samples = sum(one.samples for one in order)
    words = [*headlines(profile), *failed.values()]
    figures = [latency_figure(order), memory_figure(order)] if order else []
    body = f"{page.notes(words)}{page.figures(figures)}{_html_table(order)}{page.footer(_METHODS)}"
    return page.page(job, "overlord profile", (number(len(order), "source"), number(samples, "sample")), body)


def latency_figure(order: Sequence[SourceProfile]) -> Figure:
    """Return how P is spread over the samples of each source, on a log axis."""
    shown = order[:MOST_ROWS]
    title = f"{shown[0].name} takes {_times(shown[0], order[-1])} as long a sample as {order[-1].name}"

    def draw(width: float) -> str:
        low = min(one.transform.quantiles[1] for one in shown)
        high = max(one.transform.max for one in shown)
        height = 26 + _ROW * len(shown) + 40
        frame = Frame(width, height, (max(low, 1e-7), max(high, 1e-6)), (0, 1), left=118, right=20, x_log=True)
        ticks = charts.log_ticks(*frame.x_range, 10)
        parts = [charts.text(0, 12, "seconds of one worker a sample (log scale)", kind="y-title")]
        base = height - frame.bottom
        for tick in ticks:
            parts.append(charts.segment(frame.x(tick), 20, frame.x(tick), base, "grid"))
            parts.append(charts.text(frame.x(tick), base + 17, without_zeros(seconds)(tick), anchor="middle"))
        for row, one in enumerate(shown):
            parts += _box(frame, one, 26 + row * _ROW)
        return charts.svg(width, height, title, parts)

    return Figure("latency", title, "Bar: a quarter to three quarters of the samples; line: 5 % to 99 %; dot: the mean."
                  + _left_out(order), draw)  # fmt: skip


def _box(frame: Frame, one: SourceProfile, y: float) -> list[str]:
    quantiles, spread = one.transform.quantiles, one.transform
    quarter = (len(quantiles) - 1) // 4
    x05, x25, x75 = (frame.x(quantiles[at]) for at in (1, quarter, 3 * quarter))
    middle = y + _ROW / 2
    words = (
        f"{one.name}: mean {seconds(spread.mean)}, half below {seconds(spread.p50)}, 99 % below "
        f"{seconds(spread.p99)}, at most {seconds(spread.max)}; {_part_words(one)}"
    )
    return [
        charts.text(frame.left - 8, middle + 4, short_name(one.name, 15), anchor="end"),
        f"<g>{charts.tip(words)}",
        charts.rectangle(frame.left, y, frame.width - frame.left - frame.right, _ROW, 'fill="transparent"'),
        charts.segment(x05, middle, frame.x(spread.p99), middle, "base"),
        charts.rectangle(x25, y + 5, max(x75 - x25, 2.0), _ROW - 10, f'fill="{OURS}" fill-opacity=".75"'),
        charts.segment(frame.x(spread.p50), y + 3, frame.x(spread.p50), y + _ROW - 3, "guide"),
        f'<circle cx="{frame.x(spread.mean):.1f}" cy="{middle:.1f}" r="3.2" fill="{THEIRS}" class="dot"/>',
        "</g>",
    ]


def memory_figure(order: Sequence[SourceProfile]) -> Figure:
    """Return what one worker of each source holds, in the order of the figure beside it."""
    shown = order[:MOST_ROWS]
    most = max(shown, key=lambda one: one.buffer_bytes)
    title = f"A worker of {most.name} holds {size(most.buffer_bytes)}, the most of all"

    def draw(width: float) -> str:
        left, right, top = 118.0, 74.0, 26.0
        largest, room = max(one.file_bytes + one.buffer_bytes for one in shown) or 1, width - left - right
        parts = [charts.text(0, 12, "bytes of one worker, and of the files it reads", kind="y-title")]
        for row, one in enumerate(shown):
            y, files = top + row * _ROW, room * one.file_bytes / largest
            buffer = room * one.buffer_bytes / largest
            words = f"{one.name}: {size(one.buffer_bytes)} in a worker, {size(one.file_bytes)} of file state"
            parts += [
                charts.text(left - 8, y + 14, short_name(one.name, 15), anchor="end"),
                f"<g>{charts.tip(words)}",
                charts.rectangle(left, y + 4, files, _ROW - 8, f'fill="{THEIRS}"'),
                charts.rectangle(left + files, y + 4, buffer, _ROW - 8, f'fill="{OURS}"'),
                "</g>",
                charts.text(left + files + buffer + 6, y + 14, size(one.file_bytes + one.buffer_bytes), kind="value"),
            ]
        return charts.svg(width, top + _ROW * len(shown) + 40, title, parts)

    caption = "Blue: readers and rows of a worker that has read on to the end of its group. Orange: names and indices."
    return Figure("memory", title, caption + _left_out(order), draw)


def _left_out(order: Sequence[SourceProfile]) -> str:
    return f" The {MOST_ROWS} most expensive of {len(order):,} sources." if len(order) > MOST_ROWS else ""


def _html_table(order: Sequence[SourceProfile]) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("source", *_COLUMNS, "CPU", "samples"))
    rows: list[str] = []
    for one in order:
        more = (percent(one.cpu_share), count(one.samples))
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (*_cells(one, order[-1]), *more))
        rows.append(f'<tr><th scope="row">{escape(one.name)}</th>{cells}</tr>')
    return (
        '<section class="sources loaders" id="sources"><h2>All sources, the most expensive first</h2>'
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        "</section>"
    )


_METHODS = {
    "P": "Seconds that one worker with a core of its own takes for a sample: reading it, measuring it (tokenizing, "
    "custom functions) and finishing it. Rows that are read and passed over are paid by the others.",
    "T": "Seconds of cutting a sample out of the read buffer and copying it to where it goes.",
    "memory": "What an actor holds of the files (names, indices), and one worker at the end of its largest group.",
    "bytes in→out": "Bytes of a row as read, and as handed over: encoded or decoded, as it travels.",
    "samples/s": "Samples that one worker prepares in a second.",
    "CPU": "The part of P that needs a CPU: 100 % where a worker only computes, near 0 % where it waits for a server.",
    "cost": "P over that of the cheapest source.",
}
