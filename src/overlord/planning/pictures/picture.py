"""Pictures of a DGraph: DOT and Mermaid here, the HTML page in `page`.

Both show the same outline: sources, the primitives that were applied, buckets, and the ranks that consume them.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

import numpy as np

from overlord.core.spec_errors import did_you_mean
from overlord.errors import SpecError
from overlord.planning.pictures.facts import (
    Group,
    count,
    evenness,
    first_buckets,
    flows,
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
from overlord.planning.pictures.page import page_of

if TYPE_CHECKING:
    from overlord.planning.dgraph import DGraph

_FORMATS = ("html", "mermaid", "dot")
_MOST = 24
"""Sources, buckets and single ranks that are drawn; the others share one node."""
_MOST_FLOWS = 144
"""More lines than this cannot be followed; Mermaid refuses more than 500 edges."""

Kind = Literal["source", "state", "bucket", "rank", "fetching"]


@dataclass(frozen=True, slots=True)
class _Node:
    key: str
    lines: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True, slots=True)
class _Link:
    tail: str
    head: str
    words: str = ""
    dashed: bool = False
    """A flow, or a rank that gets its data by broadcast: it does not shape the drawing."""


@dataclass(frozen=True, slots=True)
class _Outline:
    title: str
    columns: tuple[tuple[str, tuple[_Node, ...]], ...]
    links: tuple[_Link, ...]


def picture_of(graph: DGraph, format: str) -> str:
    """Return a picture of the graph: "html" (a page that needs nothing else), "mermaid" or "dot".

    Example:
        >>> from overlord.core.place_tree import ClientPlaceTree
        >>> from overlord.planning.dgraph import DGraph
        >>> from overlord.planning.low_level import summary_buffer
        >>> graph = DGraph.from_buffer(summary_buffer({"web": [9, 3]}, context_length=16), ClientPlaceTree(dp=2))
        >>> picture_of(graph, "mermaid").splitlines()[1]
        'flowchart LR'
    """
    if format == "html":
        return page_of(graph)
    if format == "mermaid":
        return _mermaid(_outline(graph))
    if format == "dot":
        return _dot(_outline(graph))
    raise SpecError(
        f"visualize: format is {format!r}; nothing could be drawn.{did_you_mean(format, _FORMATS)} "
        "Use 'html', 'mermaid' or 'dot'."
    )


def _outline(graph: DGraph) -> _Outline:
    facts = source_facts(graph)
    sources = source_groups(facts, _MOST)
    of = {source.index: source for source in facts}
    unit, nodes, links = unit_word(graph), [], []
    for n, group in enumerate(sources):
        members = [of[index] for index in group.members.tolist()]
        drawn, samples, tokens = (sum(getattr(one, name) for one in members) for name in ("drawn", "samples", "tokens"))
        given = number(drawn, "sample") if samples == drawn else f"{samples:,} of {number(drawn, 'sample')}"
        held = f"{count(tokens)} {unit}, {percent(sum(one.share for one in members))}"
        nodes.append(_Node(f"s{n}", (group.label, given, held), "source"))
        links.append(_Link(f"s{n}", "p0", f"{drawn:,}"))
    states = [
        _Node(f"p{n}", (edge.primitive, *wrap(edge.detail, 36, max_lines=3, placeholder=" …")), "state")
        for n, edge in enumerate(graph.edges)
    ]
    links += [_Link(f"p{n}", f"p{n + 1}") for n in range(len(states) - 1)]
    columns = [("sources", tuple(nodes)), ("primitives", tuple(states))]
    title = f"step {graph.buffer.step}, mesh {graph.tree}, {graph.modality}"
    if graph.axis is not None:
        buckets = first_buckets(graph.num_buckets, _MOST)
        drawn, more, left_out = _buckets(graph, sources, buckets, len(states) - 1)
        ranks, consumers = _ranks(graph, buckets)
        columns += [(f"buckets over {graph.axis}", drawn), ("ranks", ranks)]
        links += [*more, *consumers]
        loads = planned_loads(graph)
        title += f", imbalance {ratio(evenness(loads).imbalance)}" if loads is not None else ", not balanced yet"
        title += f" ({number(left_out, 'smaller flow')} not drawn)" if left_out else ""
    return _Outline(title, tuple(columns), tuple(links))


def _buckets(
    graph: DGraph, sources: list[Group], buckets: list[Group], last: int
) -> tuple[tuple[_Node, ...], list[_Link], int]:
    """Return the buckets, the links to them, and how many flows were left out."""
    loads, unit = planned_loads(graph), unit_word(graph)
    tokens, counts = flows(graph, sources, buckets)
    what, sums = "load" if graph.costs is not None else "padded", loads.sum(axis=1) if loads is not None else None
    nodes, links = [], []
    for n, group in enumerate(buckets):
        lines: tuple[str, ...] = (group.label,)
        if sums is not None:
            load = count(float(sums[group.members].sum(dtype=np.float64)))
            lines = (group.label, f"{what} {load}", f"{count(tokens[:, n].sum())} {unit}")
        nodes.append(_Node(f"b{n}", lines, "bucket"))
        links.append(_Link(f"p{last}", f"b{n}", f"{counts[:, n].sum():,}" if sums is not None else ""))
    cells = [(int(s), int(b)) for s, b in zip(*np.nonzero(counts), strict=True)]
    kept = set(sorted(cells, key=lambda cell: (-float(tokens[cell]), cell))[:_MOST_FLOWS])
    links += [_Link(f"s{s}", f"b{b}", f"{counts[s, b]:,}", dashed=True) for s, b in cells if (s, b) in kept]
    return tuple(nodes), links, len(cells) - len(kept)


def _ranks(graph: DGraph, buckets: list[Group]) -> tuple[tuple[_Node, ...], list[_Link]]:
    """Return the consumers: rank by rank in a small world, else those of a bucket together."""
    assert graph.axis is not None
    consumers = graph.tree.nodes(graph.axis)
    fetching = set(graph.tree.fetchers(graph.axis, graph.broadcast))
    one_by_one = graph.tree.world_size <= _MOST
    nodes: list[_Node] = []
    links: list[_Link] = []
    for n, group in enumerate(buckets):
        ranks = sorted(rank for bucket in group.members.tolist() for rank in consumers[bucket])
        for some in [[rank] for rank in ranks] if one_by_one else [ranks]:
            own = [rank for rank in some if rank in fetching]
            named = f"rank {some[0]}" if len(some) == 1 else f"ranks {rank_names(some)}"
            if len(own) == len(some):
                how = "fetches" if len(some) == 1 else f"all {len(some):,} fetch"
            else:
                how = f"{len(own):,} of {len(some):,} fetch: {rank_names(own)}" if own else "by broadcast"
            nodes.append(_Node(f"r{some[0]}", (named, how), "fetching" if own else "rank"))
            links.append(_Link(f"b{n}", f"r{some[0]}", dashed=not own))
    return tuple(nodes), links


_FILLS: dict[Kind, str] = {
    "source": "#dbeaf5",
    "state": "#f5f5f2",
    "bucket": "#d6efe6",
    "rank": "#ffffff",
    "fetching": "#fbe8c8",
}


def _dot(outline: _Outline) -> str:
    lines = [
        "digraph dgraph {",
        f'  graph [rankdir=LR, labelloc=t, fontname="Helvetica", label="{_in_dot(outline.title)}"];',
        '  node [shape=box, style="filled,rounded", color="#5d636e", fontname="Helvetica", fontsize=11];',
        '  edge [color="#5d636e", fontname="Helvetica", fontsize=9];',
    ]
    for n, (title, nodes) in enumerate(outline.columns):
        lines += [f"  subgraph cluster_{n} {{", f'    label="{_in_dot(title)}"; color="#e3e3de";']
        for node in nodes:
            label = "\\n".join(_in_dot(shorten(plain(line), 60)) for line in node.lines)
            style = ', style="filled,rounded,dashed"' if node.kind == "rank" else ""
            lines.append(f'    {node.key} [label="{label}", fillcolor="{_FILLS[node.kind]}"{style}];')
        lines.append("  }")
    for link in outline.links:
        words = [f'label="{_in_dot(link.words)}"'] if link.words else []
        attributes = ", ".join([*words, *(["style=dashed", "constraint=false"] if link.dashed else [])])
        lines.append(f"  {link.tail} -> {link.head}{f' [{attributes}]' if attributes else ''};")
    return "\n".join([*lines, "}"]) + "\n"


def _mermaid(outline: _Outline) -> str:
    lines = [f"%% {plain(outline.title)}", "flowchart LR"]
    for n, (title, nodes) in enumerate(outline.columns):
        lines.append(f'  subgraph g{n}["{_in_mermaid(title)}"]')
        for node in nodes:
            label = "<br/>".join(_in_mermaid(shorten(plain(line), 60)) for line in node.lines)
            lines.append(f'    {node.key}["{label}"]:::{node.kind}')
        lines.append("  end")
    for link in outline.links:
        arrow = "-.->" if link.dashed else "-->"
        words = f'|"{_in_mermaid(link.words)}"|' if link.words else ""
        lines.append(f"  {link.tail} {arrow}{words} {link.head}")
    for kind, fill in _FILLS.items():
        dash = ",stroke-dasharray:4 3" if kind == "rank" else ""
        lines.append(f"  classDef {kind} fill:{fill},stroke:#5d636e,color:#1b1e23{dash}")
    return "\n".join(lines) + "\n"


def _in_dot(words: str) -> str:
    # Graphviz reads HTML entities and backslash escapes inside quoted labels.
    return escape(words).replace("\\", "\\\\")


def _in_mermaid(words: str) -> str:
    # Mermaid writes entities as #39; and may read other marks as Markdown, so all but plain text is an entity.
    return "".join(c if c.isalnum() or c in " ,.:/=()%-–…" else f"#{ord(c)};" for c in words)
