"""The end of a run: one self-contained HTML page, and tables for the terminal.

The page needs no network, no script and no library; every text that came from a user is escaped.
"""

from __future__ import annotations

from html import escape

from rich.markup import escape as escape_markup
from rich.table import Table

from overlord.cli.figures import Figure, all_figures
from overlord.cli.summary import (
    LoadHeatmap,
    RunSummary,
    SourceSummary,
    StepSummary,
    count,
    percent,
    ratio,
    seconds,
    size,
)
from overlord.planning.costs import DEFAULT_KAPPA

__all__ = [
    "LoadHeatmap",
    "RunSummary",
    "SourceSummary",
    "StepSummary",
    "render_report",
    "source_table",
    "summary_table",
]

_WIDE, _HALF, _PHONE = 1000, 490, 345


def render_report(summary: RunSummary) -> str:
    """Return the report of a run as one HTML page."""
    figures = "".join(_figure(figure) for figure in all_figures(summary))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(summary.job_name)} · overlord run</title><style>{_CSS}</style></head><body><main>"
        f"{_header(summary)}{_tiles(summary)}{_notes(summary)}"
        f'<section class="figures">{figures}</section>'
        f"{_sources(summary)}{_footer(summary)}</main></body></html>\n"
    )


def summary_table(summary: RunSummary) -> Table:
    """Return the key figures of a run for the terminal."""
    table = Table(title=f"{escape_markup(summary.job_name)}: {summary.steps} steps", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for name, value, detail in _key_figures(summary):
        table.add_row(name, value, detail)
    if summary.per_step:
        tokens = [step.tokens for step in summary.per_step]
        mean = sum(tokens) / len(tokens)
        table.add_row("tokens per step", count(mean), f"{count(min(tokens))} to {count(max(tokens))}")
    return table


def source_table(summary: RunSummary) -> Table:
    """Return the planned and realised mixture for the terminal."""
    table = Table(title=f"mixture, by {summary.mixture_level}")
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


def _number(value: int, thing: str) -> str:
    return f"{value:,} {thing}{'' if value == 1 else 's'}"


def _header(summary: RunSummary) -> str:
    steps, sources = _number(summary.steps, "step"), _number(len(summary.sources), "source")
    facts = (steps, f"mesh {summary.mesh}", f"{summary.runtime} runtime", sources)
    line = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    name = escape(summary.job_name)
    return f'<header><p class="eyebrow">overlord run</p><h1>{name}</h1><ul>{line}</ul></header>'


def _tiles(summary: RunSummary) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(detail)}</dd></div>"
        for name, value, detail in _key_figures(summary)
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _notes(summary: RunSummary) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in summary.notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _figure(figure: Figure) -> str:
    desk = figure.draw(_WIDE if figure.wide else _HALF)
    kind = ' class="wide"' if figure.wide else ""
    return (
        f'<figure id="{figure.name}"{kind}><h2>{escape(figure.title)}</h2>'
        f'<div class="desk">{desk}</div><div class="phone">{figure.draw(_PHONE)}</div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _sources(summary: RunSummary) -> str:
    largest = max((s.realised_share for s in summary.sources), default=0.0) or 1.0
    rows = "".join(_source_row(source, largest) for source in summary.sources)
    numbers = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("planned", "realised", "difference", "samples", "tokens", "epochs", "bad", "dropped")
    )
    bad = sum(source.bad for source in summary.sources)
    found = "no sample was bad" if bad == 0 else _number(bad, "bad sample")
    return (
        f'<section class="sources" id="sources"><h2>{_number(len(summary.sources), "source")}, {found}</h2>'
        '<div class="scroll"><table><thead><tr><th scope="col">source</th><th scope="col">format</th>'
        f"{numbers}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p>Shares are of {summary.mixture_level}s over the whole run; differences are in points.</p>"
        "</section>"
    )


def _source_row(source: SourceSummary, largest: float) -> str:
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
        f"<td>{escape(source.format)}</td>{numbers}{faults}</tr>"
    )


_METHODS = {
    "tokens, samples": "Counted in what the first rank of each data-parallel group received; padding is not counted.",
    "per second": "Delivered to all ranks, over the time from the first request for a step to the last "
    "microbatch. A sample counts once, however many ranks share it. Clients hold every microbatch and train "
    "for no time.",
    "imbalance": "Cost of the busiest data-parallel rank over the mean of all ranks, per step; then the mean "
    f"over steps. The cost of a segment of s tokens is s² + {DEFAULT_KAPPA:,} s: attention and the rest of a layer. "
    "Round-robin deals the samples of the same step to the ranks in turn, in an order drawn by a hash of "
    "their ids, since clients do not see the order in which they were drawn.",
    "padding": "Positions that hold no token, over all positions delivered.",
    "peak memory": "Largest sum of the proportional set sizes (PSS) of the service and its clients.",
    "wait": "From a client's request for a step until it holds all its microbatches; the longest of all ranks.",
}


def _footer(summary: RunSummary) -> str:
    methods = "".join(f"<dt>{escape(name)}</dt><dd>{escape(how)}</dd>" for name, how in _METHODS.items())
    digests = "".join(
        f"<dt>{escape(name)} digest</dt><dd><code>{escape(value)}</code></dd>"
        for name, value in summary.digests.items()
    )
    return (
        f'<footer id="method"><h2>How this is measured</h2><dl>{methods}{digests}</dl>'
        "<p>The same job and seed give the same order digest on any mesh, runtime and number of loaders; "
        "the same mesh and strategy also give the same plan digest.</p></footer>"
    )


_CSS = """
:root{color-scheme:light dark;--page:#f5f5f2;--card:#fff;--ink:#1b1e23;--soft:#5d636e;--line:#e3e3de;
  --blue:#0072b2;--red:#c14a00}
@media(prefers-color-scheme:dark){:root{--page:#121417;--card:#1b1e23;--ink:#eceef1;--soft:#a0a7b3;
  --line:#30353d;--blue:#56b4e9;--red:#f0884a}}
*{box-sizing:border-box;margin:0}
body{background:var(--page);color:var(--ink);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 24px 56px}
.eyebrow{color:var(--soft);font-size:14px}
h1{font-size:34px;line-height:1.15;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:17px;line-height:1.35;font-weight:650;text-wrap:pretty;overflow-wrap:anywhere}
header ul{list-style:none;padding:0;margin-top:8px;color:var(--soft);display:flex;flex-wrap:wrap;
  gap:2px 22px}
.tiles{display:grid;grid-template-columns:repeat(6,1fr);gap:1px;margin:28px 0 20px;
  background:var(--line);border:1px solid var(--line);border-radius:12px;overflow:hidden}
.tiles div{background:var(--card);padding:14px 16px}
.tiles dt,.tiles dd+dd{font-size:13px;color:var(--soft)}
.tiles dd{font-size:25px;font-weight:650;letter-spacing:-.01em;font-variant-numeric:tabular-nums;
  white-space:nowrap}
.tiles dd+dd{font-weight:400;letter-spacing:0;white-space:normal;line-height:1.35}
.notes{margin:0 0 20px;padding:12px 16px 12px 34px;border-left:3px solid var(--blue);
  background:var(--card);border-radius:0 8px 8px 0;font-size:15px}
.figures{display:grid;grid-template-columns:1fr 1fr;gap:20px}
figure,.sources{background:var(--card);border:1px solid var(--line);border-radius:12px;
  padding:20px 22px 16px;min-width:0}
figure{display:flex;flex-direction:column}
figure .desk{margin-top:auto}
figure.wide{grid-column:1/-1}
figure h2{margin-bottom:16px}
figcaption,.sources p,footer p{margin-top:10px;font-size:14px;color:var(--soft)}
.phone{display:none}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .direct{fill:var(--ink);font-weight:600;font-size:12.5px}
svg .value{fill:var(--ink)}
.grid{stroke:var(--line)}.tick,.base{stroke:var(--soft);stroke-opacity:.55}
.layer{stroke:var(--card);stroke-width:1;fill-opacity:.88}
.planned{stroke:var(--ink);stroke-width:1.3;stroke-dasharray:5 4}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}
.loss{fill:none;stroke:var(--ink);stroke-width:1.6;stroke-dasharray:2 3}
.leader{fill:none;stroke-width:2}
.median{stroke:var(--ink);stroke-dasharray:5 4;stroke-opacity:.7}
.hull{fill:var(--red);fill-opacity:.14;stroke:var(--red);stroke-width:1.4}
.cell{stroke:var(--line)}.dot{stroke:var(--card)}
.guide{stroke:var(--ink);stroke-opacity:.5}
.hit .guide,.hit .tip{opacity:0;pointer-events:none}
.hit:hover .guide,.hit:hover .tip{opacity:1}
svg:has(.hit:hover) .y-title{opacity:0}
svg .tip{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:6px}
.sources{margin-top:20px}
.scroll{overflow-x:auto;margin-top:12px}
table{border-collapse:collapse;width:100%;font-size:15px;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:13px}
th:first-child,td:nth-child(2),thead th:nth-child(2){text-align:left;padding-left:0}
tbody th{font-weight:600;min-width:120px;max-width:260px;overflow:hidden;text-overflow:ellipsis}
tbody th i{display:block;height:3px;margin-top:3px;border-radius:2px;background:var(--blue)}
.fault{color:var(--red);font-weight:600}
footer{margin-top:36px;color:var(--soft)}
footer h2{color:var(--ink)}
footer dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 24px;margin-top:12px;font-size:14px}
footer dt{color:var(--ink)}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
  overflow-wrap:anywhere}
@media(max-width:900px){.tiles{grid-template-columns:repeat(3,1fr)}.figures{grid-template-columns:1fr}}
@media(max-width:640px){main{padding:24px 14px 40px}h1{font-size:27px}.tiles{grid-template-columns:1fr 1fr}
figure,.sources{padding:16px 14px 12px}.desk{display:none}.phone{display:block}
  footer dl{grid-template-columns:1fr;gap:0}footer dd{margin-bottom:8px}}
@media print{figure,.sources{break-inside:avoid}}
"""
