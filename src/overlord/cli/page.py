"""One self-contained HTML page in the house's look: its frame, tiles, notes and figures.

A page needs no network, no script and no library; every text that came from a user is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from overlord.cli.figures import Figure
from overlord.planning.pictures.page import HOUSE_CSS

_WIDE, _HALF, _PHONE = 1000, 490, 345


def page(title: str, kind: str, facts: Sequence[str], body: str) -> str:
    """Return a whole page.

    Args:
        title: What the page is about; it is escaped.
        kind: Which command wrote it, such as "overlord run".
        facts: What stands below the title; escaped.
        body: HTML of the rest.
    """
    line = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · {escape(kind)}</title><style>{HOUSE_CSS + _CSS}</style></head><body><main>"
        f'<header><p class="eyebrow">{escape(kind)}</p><h1>{escape(title)}</h1><ul>{line}</ul></header>'
        f"{body}</main></body></html>\n"
    )


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """Return key figures side by side: (name, value, detail)."""
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(detail)}</dd></div>"
        for name, value, detail in figures
    )
    return f'<dl class="tiles">{shown}</dl>'


def notes(words: Sequence[str]) -> str:
    """Return sentences that stand out, or nothing."""
    items = "".join(f"<li>{escape(note)}</li>" for note in words)
    return f'<ul class="notes">{items}</ul>' if items else ""


def figures(drawn: Sequence[Figure]) -> str:
    """Return figures, each drawn once for a desk and once for a phone."""
    return f'<section class="figures">{"".join(_figure(figure) for figure in drawn)}</section>'


def footer(how: Mapping[str, str], more: str = "", closing: str = "") -> str:
    """Return how the figures came about: name and explanation, then HTML of further terms and of a last word."""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in how.items())
    return f'<footer id="method"><h2>How this is measured</h2><dl>{listed}{more}</dl>{closing}</footer>'


def _figure(figure: Figure) -> str:
    desk = figure.draw(_WIDE if figure.wide else _HALF)
    kind = ' class="wide"' if figure.wide else ""
    return (
        f'<figure id="{figure.name}"{kind}><h2>{escape(figure.title)}</h2>'
        f'<div class="desk">{desk}</div><div class="phone">{figure.draw(_PHONE)}</div>'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


_CSS = """
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
.loaders td:nth-child(2),.loaders thead th:nth-child(2){text-align:right;padding-left:12px}
.fault{color:var(--red);font-weight:600}
footer{margin-top:36px;color:var(--soft)}
footer h2{color:var(--ink)}
footer dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 24px;margin-top:12px;font-size:14px}
footer dt{color:var(--ink)}
details{margin-top:14px}
summary{cursor:pointer;color:var(--blue)}
iframe{width:100%;height:80vh;border:1px solid var(--line);border-radius:8px;margin-top:12px}
.trace td{text-align:left;white-space:normal}
.trace th:first-child{white-space:nowrap}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
  overflow-wrap:anywhere}
@media(max-width:900px){.tiles{grid-template-columns:repeat(3,1fr)}.figures{grid-template-columns:1fr}}
@media(max-width:640px){main{padding:24px 14px 40px}h1{font-size:27px}.tiles{grid-template-columns:1fr 1fr}
figure,.sources{padding:16px 14px 12px}.desk{display:none}.phone{display:block}
  footer dl{grid-template-columns:1fr;gap:0}footer dd{margin-bottom:8px}}
@media print{figure,.sources{break-inside:avoid}}
"""
