"""The page of a DGraph: one self-contained HTML text that needs no network, no script and no library.

Every text that came from a user is escaped, and a page of thousands of buckets shows groups of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from overlord.planning.pictures import charts
from overlord.planning.pictures.facts import (
    Floats,
    Group,
    Int64s,
    SourceFacts,
    bucket_ranges,
    count,
    dealt_loads,
    evenness,
    excess,
    flows,
    fullest_bin,
    item_word,
    length_bins,
    number,
    percent,
    plain,
    planned_loads,
    rank_names,
    ratio,
    shorten,
    source_facts,
    source_groups,
    unit_word,
)

if TYPE_CHECKING:
    from overlord.planning.dgraph import DGraph

_WIDE, _HALF, _PHONE = 1000.0, 490.0, 345.0
_MOST_SOURCES, _MOST_ITEMS, _MOST_TRACES = 40, 12, 3


def page_of(graph: DGraph) -> str:
    """Return the page of a graph, as far as the graph has come."""
    sources, planned, dealt = source_facts(graph), planned_loads(graph), dealt_loads(graph)
    figures = [_flow_figure(graph, sources)] if len(graph.items) else []
    if dealt is not None:
        figures.append(_bar_figure(graph, planned, dealt))
        if planned is not None and max(planned.shape[1], dealt.shape[1]) > 1:
            figures.append(_heat_figure(graph, planned, dealt))
    if len(graph.items):
        figures.append(_length_figure(graph))
    title = f"Step {graph.buffer.step}: {_what(graph)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · DGraph</title><style>{HOUSE_CSS + _CSS}</style></head><body><main>"
        f"{_header(graph, title)}{_tiles(graph, planned, dealt)}{_pipeline(graph)}"
        f'<section class="figures">{"".join(figures)}</section>'
        f"{_source_table(graph, sources)}{_item_table(graph)}{_traces(graph)}{_footer(graph)}</main></body></html>\n"
    )


def _what(graph: DGraph) -> str:
    buckets = f" over {number(graph.num_buckets, 'bucket')}" if graph.axis is not None else ""
    return f"{number(len(graph.items), item_word(graph))}{buckets}"


def _header(graph: DGraph, title: str) -> str:
    state = "placed" if graph.places is not None else "not placed yet"
    facts = [f"mesh {graph.tree}", number(graph.tree.world_size, "rank"), f"seen by {graph.modality}", state]
    line = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return f'<header><p class="eyebrow">overlord DGraph</p><h1>{escape(title)}</h1><ul>{line}</ul></header>'


def _tiles(graph: DGraph, planned: Int64s | None, dealt: Int64s | None) -> str:
    unit, total = unit_word(graph), int(graph.items.length.sum(dtype=np.int64))
    found = [(unit, count(total), number(len(np.unique(graph.items.sample)), "sample"))]
    other = evenness(dealt) if dealt is not None else None
    if planned is not None:
        own = evenness(planned)
        beside = (f"round-robin {ratio(v)}" for v in ((other.imbalance, other.lockstep) if other else ()))
        found.append(("imbalance", ratio(own.imbalance), next(beside, "largest bucket ÷ mean")))
        if planned.shape[1] > 1 and not _has_own_pace(graph):
            found.append(("lockstep", ratio(own.lockstep), next(beside, "sum of the largest ÷ mean")))
        shape = f"over {graph.axis}, {'at most ' if graph.counts is not None else ''}" + (
            number(graph.num_microbatches, "microbatch") + " each"
        )
        found.append(("buckets", f"{graph.num_buckets:,}", shape))
    elif other is not None:
        found.append(("if dealt round-robin", ratio(other.imbalance), "largest bucket ÷ mean; not balanced yet"))
        found.append(("buckets", f"{graph.num_buckets:,}", f"over {graph.axis}"))
    full = fullest_bin(graph)
    if full is not None:
        found.append(("fullest microbatch", percent(full[0]), f"of the cap of {full[1]:,} tokens"))
    if graph.axis is not None:
        fetching = len(graph.tree.fetchers(graph.axis, graph.broadcast))
        how = f"broadcast along {', '.join(graph.broadcast)}" if graph.broadcast else "no broadcast"
        found.append(("ranks that fetch", f"{fetching:,}", f"of {graph.tree.world_size:,}: {how}"))
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(detail)}</dd></div>"
        for name, value, detail in found
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _pipeline(graph: DGraph) -> str:
    steps = "".join(
        f"<li><code>{escape(plain(edge.primitive))}</code><span>{escape(shorten(plain(edge.detail), 240))}</span></li>"
        for edge in graph.edges
    )
    return f'<ol class="pipeline" aria-label="primitives that were applied">{steps}</ol>'


def _figure(name: str, title: str, caption: str, draw: Callable[[float], str], *, wide: bool = True) -> str:
    kind = ' class="wide"' if wide else ""
    return (
        f'<figure id="{name}"{kind}><h2>{escape(title)}</h2><div class="desk">{draw(_WIDE if wide else _HALF)}</div>'
        f'<div class="phone">{draw(_PHONE)}</div><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _flow_figure(graph: DGraph, sources: Sequence[SourceFacts]) -> str:
    unit, present = unit_word(graph), [source for source in sources if source.tokens]
    title = f"{shorten(present[0].name, 40)} gives {percent(present[0].share)} of the {unit}" if present else "Flow"
    consumers = graph.tree.nodes(graph.axis) if graph.axis is not None and graph.places is not None else []
    if consumers and len(present) > 1:
        everyone = [Group("", np.array([source.index])) for source in present]
        met = (flows(graph, everyone, bucket_ranges(graph.num_buckets, graph.num_buckets))[1] > 0).sum(axis=0)
        title += (
            f"; a bucket holds {item_word(graph)}s of {met.mean():.3g} of {number(len(present), 'source')} on average"
        )

    def draw(width: float) -> str:
        left = source_groups(present, 12 if width > 600 else 7)
        if consumers:
            right = bucket_ranges(graph.num_buckets, 24 if width > 600 else 10)
            tokens = flows(graph, left, right)[0]
            ends = [(group.label, _named(_ranks(consumers, group))) for group in right]
        else:
            of = {source.index: float(source.tokens) for source in present}
            tokens = np.array([[sum(of[int(n)] for n in group.members)] for group in left])
            where = f"{graph.num_buckets:,} buckets wait" if graph.axis is not None else "no consumers chosen"
            ends = [("not placed yet", where)]
        return charts.sankey(width, title, [(group.label, group.is_rest) for group in left], ends, tokens)

    return _figure("flow", title, f"The width of a ribbon is its {unit}, without padding.", draw)


def _ranks(consumers: Sequence[Sequence[int]], group: Group) -> list[int]:
    return sorted(rank for bucket in group.members.tolist() for rank in consumers[bucket])


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {rank_names(ranks, 1)}"


def _bar_figure(graph: DGraph, planned: Int64s | None, dealt: Int64s) -> str:
    other, what = evenness(dealt), "cost" if graph.costs is not None else "tokens with padding"
    if planned is None:
        title = f"Not balanced yet: dealt round-robin, the busiest bucket would carry {excess(other.imbalance)}"
    else:
        theirs = excess(other.imbalance).removesuffix(" than the mean")
        title = f"The busiest bucket carries {excess(evenness(planned).imbalance)}; dealt round-robin, {theirs}"
    caption = (f"Filled: {what} of a bucket, cut into its microbatches. " if planned is not None else "") + (
        f"Outlined: {what} if the same {item_word(graph)}s were dealt "
        f"to the {'data-parallel groups' if graph.axis == 'CP' else 'buckets'} in turn."
    )
    caption += " Beyond 128 buckets a bar is the largest of its neighbours." if graph.num_buckets > 128 else ""
    loads = planned if planned is not None else dealt
    return _figure(
        "load", title, caption, lambda width: charts.load_bars(width, title, loads, dealt, planned is not None)
    )


def _has_own_pace(graph: DGraph) -> bool:
    return graph.counts is not None and bool((graph.counts != graph.counts[0]).any())


def _heat_figure(graph: DGraph, planned: Int64s, dealt: Int64s) -> str:
    ours, theirs = (percent(max(evenness(loads).lockstep - 1, 0.0)) for loads in (planned, dealt))
    title = (
        f"Waiting for each other after every microbatch, buckets take {ours} longer than with perfect balance; "
        f"dealt round-robin, {theirs}"
    )
    if _has_own_pace(graph):
        assert graph.counts is not None
        few, many = int(graph.counts.min()), int(graph.counts.max())
        title = f"Every bucket has its own pace: {few:,} to {many:,} microbatches, and nobody waits after each"
    cells: Floats = planned.astype(np.float64)
    if graph.counts is not None:
        cells[np.arange(planned.shape[1]) >= graph.counts[:, None]] = np.nan
    mean = float(np.nansum(cells)) / max(int((~np.isnan(cells)).sum()), 1)
    caption = "Load over the mean microbatch: orange above, blue below, no colour at the mean."
    if max(planned.shape[0], planned.shape[1], dealt.shape[1]) > 32:
        caption += " Where cells were joined, each is the largest of those it stands for."
    maps = [("as planned", cells), ("dealt round-robin", dealt.astype(np.float64))]
    return _figure("microbatches", title, caption, lambda width: charts.heat_maps(width, title, maps, mean))


def _length_figure(graph: DGraph) -> str:
    lengths, unit, thing = np.sort(graph.items.length.astype(np.int64)), unit_word(graph), item_word(graph)
    tail = lengths[-max(1, round(0.02 * len(lengths))) :].sum() / max(int(lengths.sum()), 1)
    title = f"Half of the {thing}s have at most {count(float(np.median(lengths)))} {unit}; " + (
        f"the longest 2\u202f% hold {percent(float(tail))} of all {unit}"
    )
    bins = length_bins(lengths)
    caption = f"Filled: share of the {thing}s. Outlined: share of the {unit}."
    return _figure(
        "lengths", title, caption, lambda width: charts.histogram(width, title, unit, thing, bins), wide=True
    )


def _source_table(graph: DGraph, sources: Sequence[SourceFacts]) -> str:
    narrowed = any(source.samples != source.drawn for source in sources)
    heads = [
        "samples",
        unit_word(graph),
        "planned",
        "realised, samples",
        "realised, tokens",
        *(["drawn"] if narrowed else []),
    ]
    largest = max((source.share for source in sources), default=0.0) or 1.0

    def row(name: str, some: Sequence[SourceFacts]) -> str:
        samples, tokens, drawn = (sum(getattr(s, field) for s in some) for field in ("samples", "tokens", "drawn"))
        shares = [sum(getattr(s, field) for s in some) for field in ("planned", "by_samples", "by_tokens")]
        bar = min(100.0, 100 * sum(s.share for s in some) / largest)
        cells = [f"{samples:,}", count(tokens), *(f"{100 * share:.2f}\u202f%" for share in shares)]
        numbers = "".join(f"<td>{cell}</td>" for cell in [*cells, *([f"{drawn:,}"] if narrowed else [])])
        return f'<tr><th scope="row">{escape(name)}<i style="width:{bar:.1f}%"></i></th>{numbers}</tr>'

    shown = sources if len(sources) <= _MOST_SOURCES else sources[: _MOST_SOURCES - 1]
    rows = [row(shorten(source.name, 60), [source]) for source in shown]
    rest = sources[len(shown) :]
    rows += [row(f"{len(rest):,} more sources", rest)] if rest else []
    note = "Planned is the mixture in force; realised shares are of everything that the step drew."
    return _table("sources", number(len(sources), "source"), "source", heads, rows, note)


def _item_table(graph: DGraph) -> str:
    if not len(graph.items):
        return ""
    weights = graph.costs if graph.costs is not None else graph.padded
    order = np.argsort(-weights, kind="stable")[:_MOST_ITEMS].tolist()
    heads = [unit_word(graph), *(["cost"] if graph.costs is not None else [])]
    if graph.places is not None:
        heads += ["bucket", "microbatch", "ranks"]
    consumers = graph.tree.nodes(graph.axis) if graph.axis is not None else []
    rows = [_item_row(graph, item, consumers) for item in order]
    held = percent(float(weights[order].sum(dtype=np.float64) / max(float(weights.sum(dtype=np.float64)), 1.0)))
    what = "cost" if graph.costs is not None else unit_word(graph)
    title = f"{number(len(order), item_word(graph))} of the greatest weight: {held} of the {what}"
    return _table("items", title, "sample", heads, rows, "A sample is source:file:row@epoch.")


def _item_row(graph: DGraph, item: int, consumers: Sequence[Sequence[int]]) -> str:
    start, length = int(graph.items.start[item]), int(graph.items.length[item])
    cells = [f"{length:,}" if start == 0 else f"{length:,} from {start:,}"]
    if graph.costs is not None:
        cells.append(count(float(graph.costs[item])))
    if graph.places is not None:
        first, microbatch = divmod(int(graph.places[item]), graph.num_microbatches)
        buckets = range(first, first + (int(graph.cp_sizes[item]) if graph.cp_sizes is not None else 1))
        ranks = sorted(rank for bucket in buckets for rank in consumers[bucket])
        own = [rank for rank in ranks if graph.tree.fetches(rank, graph.broadcast)]
        fetched = "" if len(own) == len(ranks) else f", fetched by {rank_names(own)}" if own else ", by broadcast"
        cells += [rank_names(list(buckets)), str(microbatch), rank_names(ranks) + fetched]
    sample = plain(str(graph.buffer.draw.sample_id(int(graph.items.sample[item]))))
    numbers = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row"><code>{escape(shorten(sample, 60))}</code></th>{numbers}</tr>'


def _table(name: str, title: str, first: str, heads: Sequence[str], rows: Sequence[str], note: str) -> str:
    columns = "".join(f'<th scope="col">{escape(head)}</th>' for head in (first, *heads))
    return (
        f'<section class="card" id="{name}"><h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{columns}'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div><p>{escape(note)}</p></section>"
    )


def _traces(graph: DGraph) -> str:
    """Return the ways of a few samples: one of the longest, one in the middle, one of the shortest."""
    if not len(graph.items):
        return ""
    order = np.argsort(-graph.items.length, kind="stable")
    chosen = dict.fromkeys(int(graph.items.sample[order[at]]) for at in (0, len(order) // 2, len(order) - 1))
    parts = []
    for sample in list(chosen)[:_MOST_TRACES]:
        trace = graph.trace(graph.buffer.draw.sample_id(sample))
        states = "".join(
            f"<dt><code>{escape(plain(state.name))}</code></dt><dd>{escape(shorten(plain(state.detail), 240))}</dd>"
            for state in trace.states
        )
        parts.append(f"<h3><code>{escape(shorten(plain(str(trace.sample)), 60))}</code></h3><dl>{states}</dl>")
    kinds = "a long one, one in the middle, a short one" if len(chosen) == _MOST_TRACES else "long to short"
    return f'<section class="card" id="traces"><h2>The way of single samples: {kinds}</h2>{"".join(parts)}</section>'


def _footer(graph: DGraph) -> str:
    return (
        '<footer id="method"><h2>How to read this</h2><dl>'
        "<dt>imbalance</dt><dd>Load of the busiest bucket over the mean of all buckets.</dd>"
        "<dt>lockstep</dt><dd>Sum over microbatches of the largest load, over the mean bucket: the time of a step in "
        "which all wait for each other after every microbatch (FSDP, EP).</dd>"
        "<dt>round-robin</dt><dd>The same step dealt in drawing order, each bucket filling one microbatch after the "
        "other: what loaders do when nobody plans.</dd>"
        f"<dt>order digest</dt><dd><code>{graph.buffer.draw.digest}</code></dd></dl></footer>"
    )


HOUSE_CSS = """
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
"""
"""Colours, type and frame that every page of overlord shares."""

_CSS = """
h3{font-size:15px;margin-top:18px}
header ul{list-style:none;padding:0;margin-top:8px;color:var(--soft);display:flex;flex-wrap:wrap;gap:2px 22px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:1px;margin:28px 0 20px;
  background:var(--line);border:1px solid var(--line);border-radius:12px;overflow:hidden}
.tiles div{background:var(--card);padding:14px 16px}
.tiles dt,.tiles dd+dd{font-size:13px;color:var(--soft)}
.tiles dd{font-size:25px;font-weight:650;letter-spacing:-.01em;font-variant-numeric:tabular-nums;white-space:nowrap}
.tiles dd+dd{font-weight:400;letter-spacing:0;white-space:normal;line-height:1.35}
.pipeline{list-style:none;padding:0;margin:0 0 20px;display:flex;flex-wrap:wrap;gap:10px 26px}
.pipeline li{position:relative;flex:1 1 132px;min-width:0;background:var(--card);border:1px solid var(--line);
  border-top:3px solid var(--blue);border-radius:8px;padding:9px 12px 10px}
.pipeline li+li:before{content:"→";position:absolute;left:-22px;top:50%;transform:translateY(-50%);color:var(--soft)}
.pipeline code{font-weight:650}
.pipeline span{display:block;margin-top:2px;font-size:13px;line-height:1.4;color:var(--soft);overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:minmax(0,1fr);gap:20px}
figure,.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 22px 16px;min-width:0}
figure h2{margin-bottom:16px}
figcaption,.card p,footer p{margin-top:10px;font-size:14px;color:var(--soft)}
.phone{display:none}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .direct{fill:var(--ink);font-weight:600;font-size:12.5px}
svg .value{fill:var(--ink)}
.grid{stroke:var(--line)}.base{stroke:var(--soft);stroke-opacity:.55}
.flow path{fill:none;stroke-opacity:.42}
.flow path:hover{stroke-opacity:.85}
.node{fill:var(--soft)}
.load{fill:var(--blue)}.cut{stroke:var(--card);stroke-opacity:.8}
.mean{stroke:var(--ink);stroke-dasharray:5 4}
.hull{fill:var(--red);fill-opacity:.1;stroke:var(--red);stroke-opacity:.5}.brim{stroke:var(--red);stroke-width:2}
.cell{stroke:var(--line);stroke-width:.6}.above{fill:#d55e00}.below{fill:#0072b2}
.card{margin-top:20px}
.scroll{overflow-x:auto;margin-top:12px}
table{border-collapse:collapse;width:100%;font-size:15px;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:13px}
th:first-child{text-align:left;padding-left:0}
tbody th{font-weight:600;min-width:120px}
tbody th i{display:block;height:3px;margin-top:3px;border-radius:2px;background:var(--blue)}
#traces dl,footer dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 24px;margin-top:8px;font-size:14px}
#traces dd{color:var(--soft);overflow-wrap:anywhere;min-width:0}
footer{margin-top:36px;color:var(--soft)}
footer h2,footer dt{color:var(--ink)}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
@media(max-width:640px){main{padding:24px 14px 40px}h1{font-size:27px}.tiles{grid-template-columns:1fr 1fr}
  figure,.card{padding:16px 14px 12px}.desk{display:none}.phone{display:block}
  .pipeline{flex-direction:column;gap:8px}.pipeline li{flex:none}.pipeline li+li:before{content:""}
  #traces dl,footer dl{grid-template-columns:1fr;gap:0}footer dd,#traces dd{margin-bottom:8px}}
@media print{figure,.card{break-inside:avoid}}
"""
