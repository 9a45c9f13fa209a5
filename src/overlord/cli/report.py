"""The end of a run: one self-contained HTML page, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.markup import escape as escape_markup
from rich.table import Table

from overlord.cli import page
from overlord.cli.figures import all_figures
from overlord.cli.summary import (
    LoadHeatmap,
    MediaSummary,
    RunSummary,
    SourceSummary,
    StepSummary,
    count,
    number,
    percent,
    ratio,
    seconds,
    size,
)
from overlord.planning.costs import llama_12b

__all__ = [
    "LoadHeatmap",
    "MediaSummary",
    "RunSummary",
    "SourceSummary",
    "StepSummary",
    "media_tables",
    "render_report",
    "source_table",
    "summary_table",
]


def render_report(summary: RunSummary) -> str:
    """Return the report of a run as one HTML page."""
    steps, sources = number(summary.steps, "step"), number(len(summary.sources), "source")
    facts = (
        steps,
        f"mesh {summary.mesh}",
        f"strategy {summary.strategy}",
        f"layout {summary.layout}",
        f"{summary.runtime} runtime",
        sources,
    )
    body = (
        f"{page.tiles(_key_figures(summary))}{page.notes(summary.notes)}{page.figures(all_figures(summary))}"
        f"{_sources(summary)}{_footer(summary)}"
    )
    return page.page(summary.job_name, "overlord run", facts, body)


def summary_table(summary: RunSummary) -> Table:
    """Return the key figures of a run for the terminal."""
    title = f"{escape_markup(summary.job_name)}: {number(summary.steps, 'step')}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    table.add_row("strategy", escape_markup(summary.strategy), f"mesh {summary.mesh}, layout {summary.layout}")
    for name, value, detail in _key_figures(summary):
        table.add_row(name, value, detail)
    if summary.per_step:
        tokens = [step.tokens for step in summary.per_step]
        mean = sum(tokens) / len(tokens)
        table.add_row("tokens per step", count(mean), f"{count(min(tokens))} to {count(max(tokens))}")
    return table


def source_table(summary: RunSummary) -> Table:
    """Return the planned and realised mixture for the terminal."""
    table = Table(title=f"mixture, by {summary.mixture_level}", title_justify="left")
    table.add_column("source", style="bold")
    table.add_column("format", style="dim")
    for name in ("planned", "realised", "samples", "tokens", "epochs", "bad", "dropped"):
        table.add_column(name, justify="right")
    for source in summary.sources:
        table.add_row(
            escape_markup(source.name),
            escape_markup(source.format),
            _share(source.planned_share),
            _share(source.realised_share),
            count(source.samples),
            count(source.tokens),
            _epochs(source.epochs),
            f"[red]{source.bad:,}[/red]" if source.bad else "0",
            f"{source.dropped:,}",
        )
    return table


def media_tables(sources: Sequence[MediaSummary]) -> list[Table]:
    """Return where media are decoded and what travels for them, for the terminal; nothing without media."""
    table = Table(title="media", title_justify="left")
    table.add_column("source", style="bold")
    table.add_column("decoded in")
    table.add_column("handed over", justify="right")
    for one in sources:
        travels = "encoded" if one.decoded_in == "constructor" else "decoded"
        table.add_row(escape_markup(one.name), one.decoded_in, f"{size(one.handed_over_bytes)} {travels}")
    return [table] if sources else []


def _key_figures(summary: RunSummary) -> list[tuple[str, str, str]]:
    return [
        (
            "tokens per second",
            count(summary.tokens_per_s),
            f"{count(summary.tokens)} in {seconds(summary.wall_s)}",
        ),
        ("samples per second", count(summary.samples_per_s), f"{count(summary.samples)} samples"),
        (
            "imbalance",
            ratio(summary.imbalance_planned),
            f"round-robin {ratio(summary.imbalance_round_robin)}",
        ),
        ("padding", percent(summary.padding), "of delivered positions"),
        ("peak memory", size(summary.peak_memory_bytes), "service and clients"),
        ("start", seconds(summary.startup_s), "launch to first batch"),
    ]


def _share(share: float) -> str:
    return f"{100 * share:.2f}%"


def _epochs(epochs: float | None) -> str:
    return "–" if epochs is None else f"{epochs:.2f}"


def _sources(summary: RunSummary) -> str:
    largest = max((s.realised_share for s in summary.sources), default=0.0) or 1.0
    media = {one.name: one for one in summary.media}
    travelled = ["" if not media else _media_cells(media.get(source.name)) for source in summary.sources]
    rows = "".join(_source_row(s, largest, cells) for s, cells in zip(summary.sources, travelled, strict=True))
    names = ["planned", "realised", "difference", "samples", "tokens", "epochs", "bad", "dropped"]
    names += ["handed over", "decoded in"] if media else []
    numbers = "".join(f'<th scope="col">{name}</th>' for name in names)
    bad = sum(source.bad for source in summary.sources)
    found = "no sample was bad" if bad == 0 else number(bad, "bad sample")
    return (
        f'<section class="sources" id="sources"><h2>{number(len(summary.sources), "source")}, {found}</h2>'
        '<div class="scroll"><table><thead><tr><th scope="col">source</th><th scope="col">format</th>'
        f"{numbers}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p>Shares are of {summary.mixture_level}s over the whole run; differences are in points.</p>"
        "</section>"
    )


def _media_cells(media: MediaSummary | None) -> str:
    if media is None:
        return "<td>–</td><td>–</td>"
    return f"<td>{size(media.handed_over_bytes)}</td><td>{media.decoded_in}</td>"


def _source_row(source: SourceSummary, largest: float, more: str) -> str:
    bar = 100 * min(source.realised_share / largest, 1.0)
    points = 100 * (source.realised_share - source.planned_share)
    # A rounded zero has no sign.
    difference = f"{points:+.2f}".replace("-", "−") if abs(points) >= 0.005 else "0.00"
    cells = (
        f"{100 * source.planned_share:.2f} %",
        f"{100 * source.realised_share:.2f} %",
        difference,
        count(source.samples),
        count(source.tokens),
        _epochs(source.epochs),
    )
    numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    faults = "".join(f"<td{' class=fault' if n else ''}>{n:,}</td>" for n in (source.bad, source.dropped))
    return (
        f'<tr><th scope="row">{escape(source.name)}<i style="width:{bar:.1f}%"></i></th>'
        f"<td>{escape(source.format)}</td>{numbers}{faults}{more}</tr>"
    )


_METHODS = {
    "tokens, samples": "Counted in the plans of the steps that every rank has received; padding is not counted.",
    "per second": "Delivered to all ranks, over the time from the first request for a step to the last "
    "microbatch. A sample counts once, however many ranks share it. Clients hold every microbatch and train "
    "for no time.",
    "imbalance": "Cost of the busiest data-parallel group (with hdp: of the busiest rank) over the mean of all, per "
    "step; then the mean "
    f"over steps. The cost of a segment of s tokens is s² + {llama_12b.kappa:,.0f} s: attention and the rest of a "
    "layer. Round-robin deals the samples of the same step to the ranks in turn, as they were drawn.",
    "padding": "Positions that hold no token, over all positions delivered.",
    "handed over": "Bytes from the loaders to the constructor; media that the constructor decodes travel encoded.",
    "peak memory": "Largest sum of the proportional set sizes (PSS) of the service and its clients.",
    "wait": "From a client's request for a step until it holds all its microbatches; the longest of all ranks.",
}


def _footer(summary: RunSummary) -> str:
    digests = "".join(
        f"<dt>{escape(name)} digest</dt><dd><code>{escape(value)}</code></dd>"
        for name, value in summary.digests.items()
    )
    closing = (
        "<p>The same job and seed give the same order digest on any mesh, runtime and number of loaders; "
        "the same mesh and strategy also give the same plan digest.</p>"
    )
    return page.footer(_METHODS, digests, closing)
