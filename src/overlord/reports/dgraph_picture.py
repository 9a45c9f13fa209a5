"""Pictures of a DGraph: DOT, Mermaid and an HTML page, and the numbers behind them.

DOT and Mermaid show the same outline: sources, the primitives that were applied, buckets, and the ranks that consume
them. A page of thousands of buckets shows groups of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

import numpy as np
import numpy.typing as npt

from overlord.core.plan import pad_lengths, tokens_on_device
from overlord.core.spec_errors import did_you_mean
from overlord.errors import SpecError
from overlord.planning.balancing.evenness import in_lockstep, over_ranks
from overlord.planning.balancing.hybrid import spread_over_blocks
from overlord.planning.balancing.methods import deal
from overlord.planning.dgraph import DGraph
from overlord.reports import svg
from overlord.reports.pages import Figure, Row, Table, Tile, length_figure, load_figure, render, render_file
from overlord.reports.summary import (
    LENGTH_EDGES,
    busiest,
    count,
    excess,
    known_loads,
    number,
    percent,
    ratio,
    share,
    shorten,
    used_bins,
)
from overlord.reports.svg import Floats, Group, Int64s, bucket_ranges

_FORMATS = ("html", "mermaid", "dot")
_MOST = 24
"""Sources, buckets and single ranks that DOT and Mermaid draw; the others share one node."""
_MOST_FLOWS = 144
"""More lines than this cannot be followed; Mermaid refuses more than 500 edges."""
_MOST_SOURCES, _MOST_ITEMS = 40, 12
"""Rows of the page's tables."""

_FILLS = {"source": "#dbeaf5", "state": "#f5f5f2", "bucket": "#d6efe6", "rank": "#ffffff", "fetching": "#fbe8c8"}
"""Kinds of nodes, and their colours."""


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
    if format in ("mermaid", "dot"):
        label = _in_dot if format == "dot" else _in_mermaid
        title, columns, links = _outline(graph)
        return render_file(f"dgraph.{format}", title=title, columns=columns, links=links, fills=_FILLS, label=label)
    raise SpecError(
        f"visualize: format is {format!r}; nothing could be drawn.{did_you_mean(format, _FORMATS)} "
        "Use 'html', 'mermaid' or 'dot'."
    )


# --------------------------------------------------------------------------------------------------------------
# The numbers: what gives, what gets, and how even it is.


@dataclass(frozen=True, slots=True)
class GraphSource:
    """One source in the step, and in the graph where that was narrowed."""

    index: int
    name: str
    drawn: int
    """Samples in the step."""
    samples: int
    """Samples in the graph."""
    tokens: int
    """Tokens (or image tokens) of the graph's items."""
    share: float
    """Of the graph's tokens."""
    planned: float
    by_samples: float
    """Realised share of the step's samples."""
    by_tokens: float
    """Realised share of the step's tokens, whatever the modality."""


def source_facts(graph: DGraph) -> list[GraphSource]:
    """Return the sources that gave samples or were meant to, largest in the graph first."""
    buffer, items = graph.buffer, graph.items
    count = len(buffer.names)
    of_item = buffer.source[items.sample]
    tokens = _sums(of_item, items.length, count)
    samples = np.bincount(buffer.source[np.unique(items.sample)], minlength=count)
    drawn = np.bincount(buffer.source, minlength=count)
    drawn_tokens = _sums(buffer.source, buffer.meta["tokens"], count)
    weights = np.zeros(count)
    weights[: len(buffer.draw.weights)] = buffer.draw.weights
    shares = [_shares(column) for column in (tokens, weights, drawn, drawn_tokens)]
    seen = [n for n in np.lexsort((np.arange(count), -tokens)).tolist() if drawn[n] or weights[n] > 0]
    return [
        GraphSource(n, plain(buffer.names[n]), int(drawn[n]), int(samples[n]), int(tokens[n]),
                    *(float(share[n]) for share in shares))
        for n in seen
    ]  # fmt: skip


def source_groups(sources: Sequence[GraphSource], most: int) -> list[Group]:
    """Return at most `most` groups of sources: the largest alone, the others as "282 more sources"."""
    return _with_rest([Group(source.name, np.array([source.index])) for source in sources], most, "sources")


def first_buckets(count: int, most: int) -> list[Group]:
    """Return at most `most` groups of buckets: the first alone, the others as "4,073 more buckets"."""
    return _with_rest([Group(f"bucket {n}", np.array([n])) for n in range(count)], most, "buckets")


def _with_rest(groups: list[Group], most: int, things: str) -> list[Group]:
    if len(groups) <= most:
        return groups
    rest = np.concatenate([group.members for group in groups[most - 1 :]])
    return [*groups[: most - 1], Group(f"{len(rest):,} more {things}", rest, True)]


def flows(graph: DGraph, sources: Sequence[Group], buckets: Sequence[Group]) -> tuple[Floats, Int64s]:
    """Return the tokens and the number of items that go from each group of sources to each group of buckets.

    Of an item that several ranks share, each gets an even part of the tokens; it counts on every one.
    """
    item, bins = placed_items(graph)
    at_source = _group_of(sources, len(graph.buffer.names))[graph.buffer.source[graph.items.sample[item]]]
    at_bucket = _group_of(buckets, graph.num_buckets)[bins // max(graph.num_microbatches, 1)]
    cell, shape = at_source * len(buckets) + at_bucket, (len(sources), len(buckets))
    lengths = graph.items.length[item] / _widths(graph)[item]
    tokens: Floats = np.bincount(cell, weights=lengths, minlength=shape[0] * shape[1]).astype(np.float64)
    counts = np.bincount(cell, minlength=shape[0] * shape[1]).astype(np.int64)
    return tokens.reshape(shape), counts.reshape(shape)


def placed_items(graph: DGraph) -> tuple[Int64s, Int64s]:
    """Return (item, bin) of every place: an item that a block of ranks shares stands on each of them."""
    if graph.places is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return spread_over_blocks(graph.places, _widths(graph), graph.num_microbatches)


def planned_loads(graph: DGraph) -> Int64s | None:
    """Return what every [bucket, microbatch] carries: cost, or tokens where no cost was given; None if unplaced."""
    if graph.places is None or graph.axis is None:
        return None
    return (graph if graph.costs is not None else dataclasses.replace(graph, costs=graph.padded)).loads


def dealt_loads(graph: DGraph) -> Int64s | None:
    """Return the loads if the same items were dealt round-robin; None where the consumers are not known.

    Tokens go to data-parallel groups in turn and fill microbatches in turn. Over "CP", all ranks of a group
    share each item, as without hybrid data parallelism. Media go to ranks in turn and are not split.
    """
    if graph.axis is None or not len(graph.items):
        return None
    weights = graph.costs if graph.costs is not None else graph.padded
    if graph.modality != "tokens":
        _, whole = np.unique(graph.items.sample, return_inverse=True)
        weights = _sums(whole, weights, int(whole.max()) + 1)
        return _sums(np.arange(len(weights)) % graph.num_buckets, weights, graph.num_buckets)[:, None]
    share = graph.tree.cp if graph.axis == "CP" else 1
    groups = graph.num_buckets // share
    bucket, microbatch = deal(graph.padded, groups, graph.buffer.limits.microbatch_tokens)
    most = int(microbatch.max()) + 1
    sums = _sums(bucket * most + microbatch, weights, groups * most).reshape(groups, most)
    return np.repeat(sums // share, share, axis=0)


def fullest_bin(graph: DGraph) -> tuple[float, int] | None:
    """Return which share of the memory cap the fullest microbatch uses, and the cap; None where none holds."""
    if graph.places is None or graph.modality != "tokens" or not len(graph.items):
        return None
    widths = _widths(graph)
    multiple = graph.pad_multiple if graph.cp_sizes is None else np.where(widths > 1, 2 * widths, 1)
    sizes = pad_lengths(graph.items.length, multiple) // widths
    if graph.offload is not None:
        kept = tokens_on_device(graph.items.length.astype(np.int64), graph.offload, graph.offload_layers)
        sizes = np.where(graph.offload > 0, kept // widths, sizes)
    item, bins = placed_items(graph)
    cap = max(1, graph.buffer.limits.microbatch_tokens // (graph.tree.cp if graph.cp_sizes is not None else 1))
    return float(np.bincount(bins, weights=sizes[item]).max()) / cap, cap


def length_bins(lengths: npt.NDArray[np.integer]) -> list[tuple[int, int, int, int]]:
    """Return (low, high, items, tokens) of bins that double every second time; high is not in the bin.

    Example:
        >>> length_bins(np.array([4, 5, 6]))
        [(4, 6, 2, 9), (6, 8, 1, 6)]
    """
    at = np.searchsorted(LENGTH_EDGES, np.maximum(lengths, 1), "right") - 1
    items, tokens = np.bincount(at, minlength=len(LENGTH_EDGES)), _sums(at, lengths, len(LENGTH_EDGES))
    return [(*bounds, int(items[n]), int(tokens[n])) for n, bounds in used_bins(items)]


def rank_names(ranks: Sequence[int], most: int = 4) -> str:
    """Write ranks shortly.

    Example:
        >>> rank_names([0, 1, 2, 8]), rank_names([0, 4, 8, 12, 16, 20])
        ('0–2, 8', '0, 4, 8, 12 and 2 more')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:most]]
    hidden = sum(len(run) for run in runs[most:])
    return ", ".join(named) + (f" and {hidden:,} more" if hidden else "")


def _ranks_of(consumers: Sequence[Sequence[int]], buckets: Sequence[int]) -> list[int]:
    return sorted(rank for bucket in buckets for rank in consumers[bucket])


def _named(ranks: Sequence[int], most: int = 4) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {rank_names(ranks, most)}"


def item_word(graph: DGraph) -> str:
    """Return what the graph's items are: samples, pieces of them, or runs of patches."""
    if len(np.unique(graph.items.sample)) == len(graph.items):
        return "sample"
    return "piece" if graph.modality == "tokens" else "run"


def unit_word(graph: DGraph) -> str:
    """Return what a length counts."""
    return "tokens" if graph.modality == "tokens" else "image tokens"


def plain(name: str) -> str:
    """Return a name on one line, without characters that cannot be shown."""
    return "".join(c if c.isprintable() else " " for c in name)


def _widths(graph: DGraph) -> Int64s:
    return graph.cp_sizes if graph.cp_sizes is not None else np.ones(len(graph.items), np.int64)


def _group_of(groups: Sequence[Group], count: int) -> Int64s:
    found = np.zeros(count, np.int64)
    for at, group in enumerate(groups):
        found[group.members] = at
    return found


def _sums(at: npt.NDArray[np.integer], values: npt.NDArray[np.integer], count: int) -> Int64s:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, at, values)
    return sums


def _shares(values: npt.NDArray[np.integer] | Floats) -> Floats:
    total = float(values.sum())
    return values / total if total > 0 else np.zeros(len(values))


# --------------------------------------------------------------------------------------------------------------
# DOT and Mermaid.


@dataclass(frozen=True, slots=True)
class _Node:
    key: str
    lines: tuple[str, ...]
    kind: str

    @property
    def shown(self) -> list[str]:
        """Its lines, short and printable."""
        return [shorten(plain(line), 60) for line in self.lines]


@dataclass(frozen=True, slots=True)
class _Link:
    tail: str
    head: str
    words: str = ""
    dashed: bool = False
    """A flow, or a rank that gets its data by broadcast: it does not shape the drawing."""


def _outline(graph: DGraph) -> tuple[str, list[tuple[str, list[_Node]]], list[_Link]]:
    """Return the title, the columns of nodes, and the links between them."""
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
    columns = [("sources", nodes), ("primitives", states)]
    title = f"step {graph.buffer.step}, mesh {graph.tree}, {graph.modality}"
    if graph.axis is not None:
        buckets = first_buckets(graph.num_buckets, _MOST)
        drawn, more, left_out = _buckets(graph, sources, buckets, len(states) - 1)
        ranks, consumers = _ranks(graph, buckets)
        columns += [(f"buckets over {graph.axis}", drawn), ("ranks", ranks)]
        links += [*more, *consumers]
        loads = planned_loads(graph)
        title += f", imbalance {ratio(over_ranks(known_loads(loads)))}" if loads is not None else ", not balanced yet"
        title += f" ({number(left_out, 'smaller flow')} not drawn)" if left_out else ""
    return plain(title), columns, links


def _buckets(
    graph: DGraph, sources: list[Group], buckets: list[Group], last: int
) -> tuple[list[_Node], list[_Link], int]:
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
    return nodes, links, len(cells) - len(kept)


def _ranks(graph: DGraph, buckets: list[Group]) -> tuple[list[_Node], list[_Link]]:
    """Return the consumers: rank by rank in a small world, else those of a bucket together."""
    assert graph.axis is not None
    consumers = graph.tree.nodes(graph.axis)
    fetching = set(graph.tree.fetchers(graph.axis, graph.broadcast))
    one_by_one = graph.tree.world_size <= _MOST
    nodes: list[_Node] = []
    links: list[_Link] = []
    for n, group in enumerate(buckets):
        ranks = _ranks_of(consumers, group.members.tolist())
        for some in [[rank] for rank in ranks] if one_by_one else [ranks]:
            own = [rank for rank in some if rank in fetching]
            if len(own) == len(some):
                how = "fetches" if len(some) == 1 else f"all {len(some):,} fetch"
            else:
                how = f"{len(own):,} of {len(some):,} fetch: {rank_names(own)}" if own else "by broadcast"
            nodes.append(_Node(f"r{some[0]}", (_named(some), how), "fetching" if own else "rank"))
            links.append(_Link(f"b{n}", f"r{some[0]}", dashed=not own))
    return nodes, links


def _in_dot(words: str) -> str:
    # Graphviz reads HTML entities and backslash escapes inside quoted labels.
    return escape(words).replace("\\", "\\\\")


def _in_mermaid(words: str) -> str:
    # Mermaid writes entities as #39; and may read other marks as Markdown, so all but plain text is an entity.
    return "".join(c if c.isalnum() or c in " ,.:/=()%-–…" else f"#{ord(c)};" for c in words)


# --------------------------------------------------------------------------------------------------------------
# The page.


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
    over = f" over {number(graph.num_buckets, 'bucket')}" if graph.axis is not None else ""
    state = "placed" if graph.places is not None else "not placed yet"
    return render(
        "dgraph",
        f"Step {graph.buffer.step}: {number(len(graph.items), item_word(graph))}{over}",
        "overlord DGraph",
        [f"mesh {graph.tree}", number(graph.tree.world_size, "rank"), f"seen by {graph.modality}", state],
        figures,
        [_source_table(graph, sources), *([_item_table(graph)] if len(graph.items) else [])],
        tiles=_tiles(graph, planned, dealt),
        edges=[(plain(edge.primitive), shorten(plain(edge.detail), 240)) for edge in graph.edges],
        traces=_traces(graph),
        digest=graph.buffer.draw.digest,
    )


def _tiles(graph: DGraph, planned: Int64s | None, dealt: Int64s | None) -> list[Tile]:
    total = count(int(graph.items.length.sum(dtype=np.int64)))
    found = [(unit_word(graph), total, number(len(np.unique(graph.items.sample)), "sample"))]
    if planned is not None:

        def against(measure: Callable[[Floats], float], otherwise: str) -> tuple[str, str]:
            beside = otherwise if dealt is None else f"round-robin {ratio(measure(known_loads(dealt)))}"
            return ratio(measure(known_loads(planned))), beside

        found.append(("imbalance", *against(over_ranks, "largest bucket ÷ mean")))
        if planned.shape[1] > 1 and not _has_own_pace(graph):
            found.append(("lockstep", *against(in_lockstep, "sum of the largest ÷ mean")))
        most = "at most " if graph.counts is not None else ""
        each = f"over {graph.axis}, {most}{number(graph.num_microbatches, 'microbatch')} each"
        found.append(("buckets", f"{graph.num_buckets:,}", each))
    elif dealt is not None:
        found.append(
            ("if dealt round-robin", ratio(over_ranks(known_loads(dealt))), "largest bucket ÷ mean; not balanced yet")
        )
        found.append(("buckets", f"{graph.num_buckets:,}", f"over {graph.axis}"))
    full = fullest_bin(graph)
    if full is not None:
        found.append(("fullest microbatch", percent(full[0]), f"of the cap of {full[1]:,} tokens"))
    if graph.axis is not None:
        fetching = len(graph.tree.fetchers(graph.axis, graph.broadcast))
        how = f"broadcast along {', '.join(graph.broadcast)}" if graph.broadcast else "no broadcast"
        found.append(("ranks that fetch", f"{fetching:,}", f"of {graph.tree.world_size:,}: {how}"))
    return found


def _flow_figure(graph: DGraph, sources: Sequence[GraphSource]) -> Figure:
    unit, present = unit_word(graph), [source for source in sources if source.tokens]
    title = f"{shorten(present[0].name, 40)} gives {percent(present[0].share)} of the {unit}" if present else "Flow"
    consumers = graph.tree.nodes(graph.axis) if graph.axis is not None and graph.places is not None else []
    if consumers and len(present) > 1:
        every = source_groups(present, len(present)), bucket_ranges(graph.num_buckets, graph.num_buckets)
        met = float((flows(graph, *every)[1] > 0).sum(axis=0).mean())
        title += f"; a bucket holds {item_word(graph)}s of {met:.3g} of {number(len(present), 'source')} on average"

    def draw(width: float) -> str:
        left = source_groups(present, 12 if width > 600 else 7)
        if consumers:
            right = bucket_ranges(graph.num_buckets, 24 if width > 600 else 10)
            ends = [(group.label, _named(_ranks_of(consumers, group.members.tolist()), 1)) for group in right]
            return svg.sankey(width, left, ends, flows(graph, left, right)[0])
        of = {source.index: float(source.tokens) for source in present}
        tokens = np.array([[sum(of[int(n)] for n in group.members)] for group in left])
        where = f"{graph.num_buckets:,} buckets wait" if graph.axis is not None else "no consumers chosen"
        return svg.sankey(width, left, [("not placed yet", where)], tokens)

    return Figure("flow", title, f"The width of a ribbon is its {unit}, without padding.", draw, wide=True)


def _bar_figure(graph: DGraph, planned: Int64s | None, dealt: Int64s) -> Figure:
    other, what = over_ranks(known_loads(dealt)), "cost" if graph.costs is not None else "tokens with padding"
    groups = "data-parallel groups" if graph.axis == "CP" else "buckets"
    caption = f"Outlined: {what} if the same {item_word(graph)}s were dealt to the {groups} in turn."
    title = f"Not balanced yet: dealt round-robin, the busiest bucket would carry {excess(other)}"
    if planned is not None:
        title = busiest("bucket", over_ranks(known_loads(planned)), other)
        caption = f"Filled: {what} of a bucket, cut into its microbatches. {caption}"
    if graph.num_buckets > svg.MOST_BARS:
        caption += f" Beyond {svg.MOST_BARS} buckets a bar is the largest of its neighbours."
    loads, placed = (planned, True) if planned is not None else (dealt, False)
    return Figure("load", title, caption, lambda width: svg.load_bars(width, loads, dealt, placed), wide=True)


def _has_own_pace(graph: DGraph) -> bool:
    return graph.counts is not None and bool((graph.counts != graph.counts[0]).any())


def _heat_figure(graph: DGraph, planned: Int64s, dealt: Int64s) -> Figure:
    title, cells = "", planned.astype(np.float64)
    if graph.counts is not None:
        cells[np.arange(planned.shape[1]) >= graph.counts[:, None]] = np.nan
        if _has_own_pace(graph):
            few, many = int(graph.counts.min()), int(graph.counts.max())
            title = f"Every bucket has its own pace: {few:,} to {many:,} microbatches, with no waiting after each"
    maps = [("as planned", cells), ("dealt round-robin", dealt.astype(np.float64))]
    return load_figure("microbatches", maps, title, row="bucket", things="buckets")


def _length_figure(graph: DGraph) -> Figure:
    lengths = np.sort(graph.items.length.astype(np.int64))
    tail = lengths[-max(1, round(0.02 * len(lengths))) :].sum() / max(int(lengths.sum()), 1)
    return length_figure(
        length_bins(lengths),
        float(np.median(lengths)),
        float(tail),
        thing=item_word(graph),
        unit=unit_word(graph),
        wide=True,
    )


def _source_table(graph: DGraph, sources: Sequence[GraphSource]) -> Table:
    narrowed = any(source.samples != source.drawn for source in sources)
    heads = ["source", "samples", unit_word(graph), "planned", "realised, samples", "realised, tokens"]
    largest = max((source.share for source in sources), default=0.0) or 1.0

    def row(name: str, some: Sequence[GraphSource]) -> Row:
        def total(field: str) -> float:
            return sum(getattr(one, field) for one in some)

        cells = [f"{total('samples'):,}", count(total("tokens"))]
        cells += [share(total(field)) for field in ("planned", "by_samples", "by_tokens")]
        return Row(name, [*cells, *([f"{total('drawn'):,}"] if narrowed else [])], total("share") / largest)

    shown = sources if len(sources) <= _MOST_SOURCES else sources[: _MOST_SOURCES - 1]
    rows = [row(shorten(source.name, 60), [source]) for source in shown]
    rest = sources[len(shown) :]
    rows += [row(f"{len(rest):,} more sources", rest)] if rest else []
    note = "Planned is the mixture in force; realised shares are of everything that the step drew."
    heads += ["drawn"] if narrowed else []
    return Table("sources", number(len(sources), "source"), heads, rows, note)


def _item_table(graph: DGraph) -> Table:
    weights, what = (graph.costs, "cost") if graph.costs is not None else (graph.padded, unit_word(graph))
    order = np.argsort(-weights, kind="stable")[:_MOST_ITEMS].tolist()
    heads = ["sample", unit_word(graph), *(["cost"] if graph.costs is not None else [])]
    heads += ["bucket", "microbatch", "ranks"] if graph.places is not None else []
    consumers = graph.tree.nodes(graph.axis) if graph.axis is not None else []
    held = percent(float(weights[order].sum(dtype=np.float64) / max(float(weights.sum(dtype=np.float64)), 1.0)))
    title = f"{number(len(order), item_word(graph))} of the greatest weight: {held} of the {what}"
    rows = [_item_row(graph, item, consumers) for item in order]
    return Table("items", title, heads, rows, "A sample is source:file:row@epoch.", code=True)


def _item_row(graph: DGraph, item: int, consumers: Sequence[Sequence[int]]) -> Row:
    start, length = int(graph.items.start[item]), int(graph.items.length[item])
    cells = [f"{length:,}" if start == 0 else f"{length:,} from {start:,}"]
    if graph.costs is not None:
        cells.append(count(float(graph.costs[item])))
    if graph.places is not None:
        first, microbatch = divmod(int(graph.places[item]), graph.num_microbatches)
        buckets = range(first, first + int(_widths(graph)[item]))
        ranks = _ranks_of(consumers, buckets)
        own = [rank for rank in ranks if graph.tree.fetches(rank, graph.broadcast)]
        fetched = "" if len(own) == len(ranks) else f", fetched by {rank_names(own)}" if own else ", by broadcast"
        cells += [rank_names(list(buckets)), str(microbatch), rank_names(ranks) + fetched]
    sample = plain(str(graph.buffer.draw.sample_id(int(graph.items.sample[item]))))
    return Row(shorten(sample, 60), cells)


def _traces(graph: DGraph) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the ways of a few samples: one of the longest, one in the middle, one of the shortest."""
    if not len(graph.items):
        return []
    order = np.argsort(-graph.items.length, kind="stable")
    chosen = dict.fromkeys(int(graph.items.sample[order[at]]) for at in (0, len(order) // 2, len(order) - 1))
    traces = [graph.trace(graph.buffer.draw.sample_id(sample)) for sample in chosen]
    return [
        (
            shorten(plain(str(trace.sample)), 60),
            [(plain(state.name), shorten(plain(state.detail), 240)) for state in trace.states],
        )
        for trace in traces
    ]
