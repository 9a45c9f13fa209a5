"""Pictures of a DGraph: valid text, nothing lost or doubled, small at any size, safe with any name."""

from __future__ import annotations

import dataclasses
import html
import re
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.planning import costs
from overlord.planning.balancing.evenness import in_lockstep, over_ranks
from overlord.planning.dgraph import DGraph
from overlord.planning.low_level import summary_buffer
from overlord.reports.dgraph_picture import (
    dealt_loads,
    first_buckets,
    flows,
    fullest_bin,
    length_bins,
    picture_of,
    planned_loads,
    source_facts,
    source_groups,
)
from overlord.reports.summary import known_loads
from overlord.reports.svg import bucket_ranges

NASTY = 'a "quoted" <b>\\n [x] {y} |z| & #35; `m` \n%% end'
FORMATS = ("html", "mermaid", "dot")


def lengths(count, seed=0, most=4096):
    return np.clip(np.random.default_rng(seed).lognormal(6, 1, count), 4, most).astype(int)


def graph_of(sources=None, **mesh):
    sources = sources or {"web": lengths(60), "code": lengths(30, 1), "books": lengths(6, 2)}
    buffer = summary_buffer(sources, context_length=4096, microbatch_tokens=8192, step=3)
    return DGraph.from_buffer(buffer, ClientPlaceTree(**(mesh or {"dp": 4, "tp": 2})))


def balanced(graph):
    return graph.mix().distribute("DP").cost(costs.tokens).balance("greedy")


def stages():
    """A graph after each primitive, and graphs of other kinds."""
    one = graph_of()
    two = one.mix()
    three = two.distribute("DP")
    four = three.cost(costs.tokens)
    five = four.balance("greedy")
    images = graph_of({"coyo": {"tokens": [90] * 8, "images": [1] * 8, "image_tokens": range(8, 16)}, "web": [9]})
    images = DGraph.from_buffer(images.buffer, images.tree, "images").distribute("WORLD")
    by_hand = three.placed(np.arange(len(three.items)) % 8, 2)
    none = four.where(np.zeros(len(four.items), bool), "nothing")
    names = [
        "from_buffer",
        "mix",
        "distribute",
        "cost",
        "balance",
        "broadcast_at",
        "by_hand",
        "images",
        "hybrid",
        "none",
    ]
    some = images.placed(np.arange(8), 1)
    return dict(zip(names, [one, two, three, four, five, five.broadcast_at("TP"), by_hand, some, hybrid(), none],
                    strict=True))  # fmt: skip


def hybrid():
    """Four ranks of which two share the first item; they have two and one microbatches."""
    graph = graph_of({"web": [64, 16, 16, 8]}, dp=2, cp=2).distribute("CP").cost(costs.tokens)
    return dataclasses.replace(
        graph, places=np.array([0, 4, 6, 1]), num_microbatches=2, cp_sizes=np.array([2, 1, 1, 1]),
        counts=np.array([2, 2, 1, 1], np.int32),
    )  # fmt: skip


class Page(HTMLParser):
    """Reads a page: checks that every element is closed, and keeps ids, texts and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.words, self.loads, self.tags = [], [], [], [], set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def dot_labels(text):
    """Return the labels of nodes by key, as graphviz would show them, after looking at every line's form."""
    quoted = r'"(?:[^"\\\n]|\\.)*"'
    attribute = rf"\w+=(?:{quoted}|\w+)"
    forms = [
        r"digraph dgraph \{",
        rf"(graph|node|edge|[a-z]\d+)( -> [a-z]\d+)?( \[{attribute}(, {attribute})*\])?;",
        r"subgraph cluster_\d+ \{",
        rf"{attribute}; {attribute};",
        r"\}",
    ]
    for line in text.splitlines():
        assert any(re.fullmatch(form, line.strip()) for form in forms), line
    assert text.count("{\n") == len(re.findall(r"^\s*\}$", text, re.M))
    found = re.findall(rf"^    (\w+) \[label=({quoted})", text, re.M)
    return {key: html.unescape(label[1:-1].replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\"))
            for key, label in found}  # fmt: skip


def mermaid_labels(text):
    """Return the labels of nodes by key, after looking at every line's form."""
    label = r'"[^"\n`\[\]{}|]*"'
    forms = [
        r"%% [^{].*",
        r"flowchart LR",
        rf"subgraph \w+\[{label}\]",
        rf"\w+\[{label}\]:::\w+",
        r"end",
        rf"\w+ (-->|-\.->)(\|{label}\|)? \w+",
        r"classDef \w+ [\w:#,\- ]+",
    ]
    for line in text.splitlines():
        assert any(re.fullmatch(form, line.strip()) for form in forms), line
    found = re.findall(rf"^    (\w+)\[({label})\]", text, re.M)
    return {key: re.sub(r"#(\d+);", lambda m: chr(int(m[1])), words[1:-1].replace("<br/>", "\n"))
            for key, words in found}  # fmt: skip


def links_of(text):
    """Return (tail, head, words) of every link of either text form."""
    plain = re.findall(r'^  (\w+) -> (\w+)(?: \[(?:label="([^"]*)")?.*\])?;$', text, re.M)
    return plain or re.findall(r'^  (\w+) -[.-]+>(?:\|"([^"]*)"\|)? (\w+)$', text, re.M)


def test_an_unknown_format_is_refused_with_the_nearest_known_one():
    with pytest.raises(SpecError, match=r"format is 'dott'; .*Did you mean 'dot'\?"):
        picture_of(graph_of(), "dott")


@pytest.mark.parametrize("name", list(stages()))
def test_every_stage_has_a_picture_in_every_format(name):
    graph = stages()[name]
    page = Page(picture_of(graph, "html"))
    assert {"sources", "method"} <= set(page.ids)
    assert ("flow" in page.ids) == (name != "none")
    assert page.loads == [] and "script" not in page.tags
    for labels in (dot_labels(picture_of(graph, "dot")), mermaid_labels(picture_of(graph, "mermaid"))):
        states = [label.split("\n")[0] for key, label in labels.items() if key.startswith("p")]
        assert states == [edge.primitive for edge in graph.edges]
        shown = sum(key.startswith("b") for key in labels)
        assert shown == (graph.num_buckets if graph.axis is not None else 0)


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_graph_gives_the_same_text(format):
    assert picture_of(balanced(graph_of()), format) == picture_of(balanced(graph_of()), format)


def test_links_only_join_nodes_and_flows_count_every_item_once():
    graph = balanced(graph_of())
    text = picture_of(graph, "dot")
    labels, links = dot_labels(text), links_of(text)
    assert all(tail in labels and head in labels for tail, head, _ in links)
    given = [int(words) for tail, head, words in links if tail[0] == "s" and head[0] == "b"]
    assert sum(given) == len(graph.items)
    assert sum(int(w) for _, head, w in links if head == "p0" and w) == len(graph.buffer)
    assert len(links_of(picture_of(graph, "mermaid"))) == len(links)


def test_ranks_that_get_their_data_by_broadcast_are_told_apart():
    graph = balanced(graph_of(dp=2, tp=2))
    assert "by broadcast" not in picture_of(graph, "dot")
    for format, labels in (("dot", dot_labels), ("mermaid", mermaid_labels)):
        found = labels(picture_of(graph.broadcast_at("TP"), format))
        assert [found[f"r{n}"].split("\n")[1] for n in range(4)] == ["fetches", "by broadcast"] * 2
    large = dot_labels(picture_of(balanced(graph_of(dp=8, tp=8)).broadcast_at("TP"), "dot"))
    assert large["r8"] == "ranks 8–15\n1 of 8 fetch: 8"


def test_many_sources_and_buckets_share_a_node():
    many = {f"s{n:03d}": [10 + n] * 40 for n in range(306)}
    graph = balanced(graph_of(many, dp=64))
    for format, labels in (("dot", dot_labels), ("mermaid", mermaid_labels)):
        text = picture_of(graph, format)
        found = labels(text)
        assert sum(key.startswith("s") for key in found) == sum(key.startswith("b") for key in found) == 24
        assert found["s23"].startswith("283 more sources\n11,320 samples")
        assert found["b23"].startswith("41 more buckets")
        assert "smaller flow" in text
        # Mermaid's own limits: it refuses larger texts unless it is told otherwise.
        assert len(links_of(text)) < 500 and len(text) < 50_000


@pytest.mark.parametrize("name", [NASTY, "x" * 500, "-->", "end", "été 数据", "\x00\u2028\u202e", "1. - * _a_ <br/>"])
def test_any_name_is_shown_and_breaks_nothing(name):
    graph = balanced(graph_of({name: [30, 20, 10], "web": [5]}, dp=2))
    shown = "".join(c if c.isprintable() else " " for c in name)
    if len(shown) <= 40:
        page = Page(picture_of(graph, "html"))
        assert shown in "".join(page.words)
    for format, labels in (("dot", dot_labels), ("mermaid", mermaid_labels)):
        text = picture_of(graph, format)
        text.encode()
        first = labels(text)["s0"].split("\n")[0]
        assert first == shown or (len(shown) > 60 and len(first) == 60)
    assert "b" not in Page(picture_of(graph, "html")).tags


@given(st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_names_come_back_from_every_format(name):
    graph = graph_of({name: [9, 8]}, dp=2)
    shown = "".join(c if c.isprintable() else " " for c in name)
    assert dot_labels(picture_of(graph, "dot"))["s0"].split("\n")[0] == shown
    assert mermaid_labels(picture_of(graph, "mermaid"))["s0"].split("\n")[0] == shown
    assert shown in "".join(Page(picture_of(graph, "html")).words)


def test_a_page_tells_the_step_the_mesh_and_what_was_done():
    graph = balanced(graph_of()).broadcast_at("TP")
    page = Page(picture_of(graph, "html"))
    words = " ".join(page.words)
    assert page.ids == ["flow", "load", "microbatches", "lengths", "sources", "items", "traces", "method"]
    for edge in graph.edges:
        assert edge.primitive in words and edge.detail in words
    for told in ("Step 3: 96 samples over 4 buckets", "mesh pp=1 dp=4 cp=1 tp=2", graph.buffer.draw.digest):
        assert told in words
    heaviest = int(np.argmax(graph.costs))
    assert str(graph.buffer.draw.sample_id(int(graph.items.sample[heaviest]))) in words
    assert "planned" in words and "web" in words


@pytest.mark.parametrize("name", ["balance", "images", "hybrid"])
def test_every_mark_has_a_rule_in_the_style_sheet(name):
    style, body = picture_of(stages()[name], "html").split("</style>")
    classes = {one for names in re.findall(r'class="([^"]+)"', body) for one in names.split()}
    assert len(classes) > 10 and {one for one in classes if not re.search(rf"\.{one}\b", style)} == set()


def test_a_page_compares_with_round_robin_also_before_it_is_balanced():
    graph = graph_of({"web": [3900, 100, 3900, 100]}, dp=2).distribute("DP").cost(costs.tokens)
    assert dealt_loads(graph).sum(axis=1).tolist() == [7800, 200]
    waiting = " ".join(Page(picture_of(graph, "html")).words)
    assert "Not balanced yet: dealt round-robin, the busiest bucket would carry 95\u202f% more" in waiting
    done = " ".join(Page(picture_of(graph.balance("greedy", objective="sum"), "html")).words)
    assert "The busiest bucket carries just the mean; dealt round-robin, " in done
    assert "not placed yet" in waiting and "not placed yet" not in done


@pytest.mark.parametrize(("buckets", "samples"), [(4096, 12_000), (96, 20_000)])
def test_a_page_of_many_buckets_stays_small(buckets, samples):
    rng = np.random.default_rng(0)
    per_source = rng.multinomial(samples, rng.dirichlet(np.ones(306))) + 1
    sources = {f"source_{n:03d}": lengths(count, n) for n, count in enumerate(per_source)}
    text = picture_of(balanced(graph_of(sources, dp=buckets, tp=4)), "html")
    assert len(text.encode()) < 300_000
    words = " ".join(Page(text).words)
    assert "267 more sources" in words and "buckets 0–" in words


def test_loads_are_those_of_the_graph_also_where_ranks_share_items():
    graph = stages()["balance"]
    assert planned_loads(graph).tolist() == graph.loads.tolist()
    shared = hybrid()
    assert planned_loads(shared).tolist() == [[32, 8], [32, 0], [16, 0], [16, 0]] == shared.loads.tolist()
    without = dataclasses.replace(shared, costs=None)
    assert planned_loads(without).tolist() == shared.loads.tolist()
    tokens, counts = flows(shared, source_groups(source_facts(shared), 4), first_buckets(4, 4))
    assert tokens.tolist() == [[40, 32, 16, 16]] and counts.tolist() == [[2, 1, 1, 1]]
    assert fullest_bin(shared) == (32 / 4096, 4096)
    page = picture_of(shared, "html")
    assert (
        "<td>0–1</td>" in page and "its own pace: 1 to 2 microbatches" in page and "<dt>lockstep</dt><dd>1" not in page
    )


def test_split_images_are_compared_with_whole_ones():
    graph = stages()["images"]
    runs = dataclasses.replace(
        graph, items=graph.items.take(np.repeat(np.arange(8), 2)), places=np.arange(16) % 8, costs=np.full(16, 5)
    )
    assert dealt_loads(runs).tolist() == [[10]] * 8
    assert "16 runs over 8 buckets" in picture_of(runs, "html")


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=60))
def test_length_bins_hold_every_item_and_touch(values):
    bins = length_bins(np.array(values))
    assert sum(b[2] for b in bins) == len(values) and sum(b[3] for b in bins) == sum(values)
    assert all(a[1] == b[0] for a, b in pairwise(bins))
    assert bins[0][2] and bins[-1][2]
    for low, high, items, _ in bins:
        assert items == sum(low <= value < high for value in values)


@given(st.integers(1, 5000), st.integers(2, 130))
def test_ranges_cover_every_bucket_once(count, most):
    groups = bucket_ranges(count, most)
    assert len(groups) <= most
    assert np.concatenate([group.members for group in groups]).tolist() == list(range(count))


def test_the_largest_source_comes_first_and_evenness_is_one_at_best():
    graph = graph_of()
    facts = source_facts(graph)
    tokens = [fact.tokens for fact in facts]
    assert tokens == sorted(tokens, reverse=True)
    assert sum(fact.share for fact in facts) == pytest.approx(1) == sum(fact.planned for fact in facts)
    assert over_ranks(known_loads(np.zeros((3, 2), np.int64))) == 1
    assert in_lockstep(known_loads(np.array([[2, 2, np.nan], [2, 2, 0]]))) == 1
