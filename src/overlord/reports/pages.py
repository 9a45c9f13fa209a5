"""One self-contained HTML page in one look, from templates: no network, no script; what came from a user is escaped.

Here is also what several pages and the terminal share: tables, and the figures of lengths and of loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import JustifyMethod
from rich.table import Table as TerminalTable
from rich.text import Text

from overlord.planning.balancing.evenness import in_lockstep
from overlord.reports import svg
from overlord.reports.summary import NARROW_SPACE, count, known_loads, made_by, percent

if TYPE_CHECKING:
    from jinja2 import Environment

STYLE = Path(__file__).parent / "templates" / "style.css"
"""The look that reports and the live page share."""

Tile = tuple[str, str, str]
"""A key figure: name, value, detail."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing for any width, with the words around it."""

    name: str
    title: str
    caption: str
    draw: Callable[[float], str]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    name: str
    cells: Sequence[str]
    bar: float | None = None
    """Length of the bar below the name, at most 1."""
    faults: Sequence[int] = ()
    """Cells that stand out."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page."""

    name: str
    title: str
    heads: Sequence[str]
    rows: Sequence[Row]
    note: str = ""
    code: bool = False
    """Whether names are identifiers."""


def render(
    template: str,
    title: str,
    kind: str,
    facts: Sequence[str],
    figures: Sequence[Figure],
    tables: Sequence[Table],
    **more: Any,
) -> str:
    """Return a whole page of a command (`kind`); `more` are tiles, notes, and what its own template shows."""
    return render_file(f"{template}.html", title=title, kind=kind, facts=facts, figures=figures, tables=tables, **more)


def render_file(template: str, **values: Any) -> str:
    """Return what a template makes of values; in HTML and SVG all of them are escaped."""
    return _templates().get_template(f"{template}.jinja").render(made=made_by(), **values).rstrip("\n") + "\n"


@cache
def _templates() -> Environment:
    # Terminal tables need no template: jinja2 is loaded with the first page.
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    return Environment(
        loader=PackageLoader("overlord.reports"),
        autoescape=select_autoescape(("html.jinja", "svg.jinja")),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )


def terminal_table(
    title: str | None, heads: Sequence[str], rows: Sequence[Row], left: Sequence[str] = ("format",), **look: Any
) -> TerminalTable:
    """Return a table for the terminal; names are shown as they are, cells may have markup.

    Args:
        title: Above the table.
        heads: Of the columns; the first holds the names.
        rows: The rows.
        left: Columns of words, which begin at the left as names do.
        look: More options of rich's table.
    """
    table = TerminalTable(title=title, title_justify="left", **look)
    for number, head in enumerate(heads):
        style = "bold" if number == 0 else "dim" if head == "format" else ""
        # A name that does not fit is folded, not cut: names of sources often differ at their ends.
        justify: JustifyMethod = "left" if number == 0 or head in left else "right"
        table.add_column(head, style=style, justify=justify, overflow="fold" if number == 0 else "ellipsis")
    for row in rows:
        table.add_row(Text(row.name), *row.cells)
    return table


def tile_table(title: str, tiles: Sequence[Tile]) -> TerminalTable:
    """Return key figures for the terminal."""
    table = TerminalTable(title=title, title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for tile in tiles:
        table.add_row(*(Text(words) for words in tile))
    return table


def length_figure(
    bins: Sequence[tuple[int, int, int, float]],
    median: float,
    tail: float,
    *,
    thing: str = "sample",
    unit: str = "tokens",
    about: str = "",
    wide: bool = False,
) -> Figure:
    """Return the distribution of lengths, by samples and by tokens, from bins (low, high, samples, tokens).

    `tail` is the share of the tokens in the longest 2 % of the samples; `about` is "about " where tokens are estimated
    by the middles of the bins.
    """
    title = (
        f"Half of the {thing}s have at most {about}{count(median)} {unit}; the longest 2{NARROW_SPACE}% hold "
        f"{about}{percent(tail)} of all {unit}"
        if bins
        else f"No {thing} was delivered"
    )
    estimated = ", estimated from the bins' middles" if about else ""
    caption = f"Filled: share of the {thing}s. Outlined: share of the {unit}{estimated}."
    return Figure("lengths", title, caption, lambda width: svg.histogram(width, thing, unit, bins, about), wide)


def load_figure(
    name: str,
    maps: Sequence[tuple[str, svg.Floats]],
    title: str = "",
    *,
    row: str = "",
    things: str = "ranks",
    at: str = "",
) -> Figure:
    """Return the loads [row, microbatch] as planned beside those as dealt; NaN where there is no microbatch.

    By default, the title says how much longer a step takes where all wait for each other after every microbatch.
    """
    planned, dealt = (loads for _, loads in maps)
    mean = float(np.nanmean(planned))
    if not title:
        ours, theirs = (percent(max(in_lockstep(known_loads(loads)) - 1, 0.0)) for loads in (planned, dealt))
        title = (
            f"Waiting for each other after every microbatch, {things} take {ours} longer than with perfect balance"
            f"{at}; dealt round-robin, {theirs}"
        )
    caption = "Load over the mean microbatch: orange above, blue below, no colour at the mean."
    if max(*planned.shape, *dealt.shape) > svg.MOST_ROWS:
        caption += " Where cells were joined, each is the largest of those it stands for."
    return Figure(name, title, caption, lambda width: svg.heat_maps(width, maps, mean, row), wide=True)
