"""The report: every section, well-formed, escaped, and steady on empty and degenerate runs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from overlord.reports.run_report import media_tables, render_report, source_table, summary_table
from overlord.reports.summary import LoadHeatmap, MediaSummary, RunSummary, SourceSummary, StepSummary
from overlord.reports.svg import nice_ticks, spread_labels

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "br", "link", "img", "hr", "input"}


def run(steps: int = 4, names: tuple[str, ...] = ("web", "coyo"), **changes: Any) -> RunSummary:
    share = 1 / len(names) if names else 0.0
    values: dict[str, Any] = {
        "job_name": "demo",
        "mesh": "dp=2 cp=2 tp=2",
        "runtime": "local",
        "strategy": "hdp",
        "steps": steps,
        "wall_s": 2.0,
        "startup_s": 0.5,
        "samples": 100 * steps,
        "tokens": 65_536 * steps,
        "samples_per_s": 50.0 * steps,
        "tokens_per_s": 32_768.0 * steps,
        "padding": 0.018,
        "imbalance_planned": 1.004,
        "imbalance_round_robin": 2.3,
        "peak_memory_bytes": 412_000_000,
        "sources": [SourceSummary(name, "parquet", share, share + 0.0004, 10, 1000, 0.5) for name in names],
        "per_step": [StepSummary(t, 65_000 + t, 100, 60_000, 2, 1.004, 2.3, 0.018, 0.002) for t in range(steps)],
        "mixture_level": "token",
        "weights_per_step": [dict.fromkeys(names, share) for _ in range(steps)],
        "realised_per_step": [dict.fromkeys(names, share) for _ in range(steps)],
        "length_histogram": [(1, 64, 980), (64, 4096, 20)],
        "load_heatmap": LoadHeatmap(2, [[1.0, 1.01], [0.99, 1.0]], [[0.4, 1.6], [1.2, 0.8]]),
        "digests": {"order": "0a" * 16, "plan": "1b" * 16},
        "notes": ["two images were bad"],
    }
    return RunSummary(**(values | changes))


class Tree(HTMLParser):
    """Collects tags, attributes and text; fails on a tag that is not closed where it should be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def words_of(page: str) -> str:
    return " ".join(Tree(page).words).replace("\u202f", " ")


def shown(table: object) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(table)
    return capture.get().replace("\u202f", " ")


def test_every_section_is_there_once() -> None:
    tree = Tree(render_report(run()))
    assert tree.ids == ["mixture", "imbalance", "lengths", "load", "tokens", "wait", "sources", "method"]
    assert tree.tags.count("svg") == 12


def test_titles_state_the_finding() -> None:
    words = words_of(render_report(run()))
    assert "The busiest rank carries 0.4 % more than the mean; dealt round-robin, 2.30× the mean" in words
    assert "every source gets its planned share to within 0.04 points" in words
    assert "ranks take 0.5 % longer than with perfect balance in step 2; dealt round-robin, 40 %" in words
    assert "1.8 % of the positions are padding" in words
    assert "A client waits 2.00 ms for a step" in words


def test_a_source_far_from_its_share_is_named() -> None:
    sources = [
        SourceSummary("web", "parquet", 0.5, 0.55, 1, 1, 0.1),
        SourceSummary("coyo", "tar", 0.5, 0.45, 1, 1, 0.1),
    ]
    assert "web is 5.0 points away from its planned share" in words_of(render_report(run(sources=sources)))


def test_digests_notes_and_faults_are_shown() -> None:
    sources = [SourceSummary("web", "parquet", 1.0, 1.0, 10, 1000, 0.5, bad=3, dropped=7)]
    words = words_of(render_report(run(names=("web",), sources=sources)))
    assert "0a" * 16 in words
    assert "two images were bad" in words
    assert "1 source, 3 bad samples" in words


def test_what_was_waited_for_is_told_and_when_where_and_by_what_it_was_made() -> None:
    assert "No source was waited for long" in words_of(render_report(run()))
    sources = [SourceSummary("web", "parquet", 1.0, 1.0, 10, 1000, 0.5, waited_s=1.25)]
    found = run(names=("web",), sources=sources, bottleneck="source 'web' is the bottleneck")
    words = words_of(render_report(found))
    assert "Steps waited for sources: web 1.25 s of 2.00 s, several at once. By the end, source 'web' is" in words
    made = json.loads(json.dumps(dataclasses.asdict(found)))["made"]
    assert made["host"] in words and made["version"] in words and made["command"] in words
    assert made["date"][:10] in words


def test_the_page_needs_nothing_from_outside() -> None:
    tree = Tree(render_report(run()))
    assert {"script", "link", "img", "iframe"}.isdisjoint(tree.tags)
    assert {"src", "href"}.isdisjoint(name for name, _ in tree.attributes)
    assert "url(" not in render_report(run())


def test_all_that_comes_from_a_user_is_escaped() -> None:
    evil = "<script>alert(1)</script>\"'&"
    loads = run(names=(evil, "b"), job_name=evil, mesh=evil, runtime=evil, notes=[evil], digests={evil: evil})
    sources = [dataclasses.replace(source, format=evil, realised_share=0.9) for source in loads.sources]
    tree = Tree(render_report(dataclasses.replace(loads, sources=sources)))
    assert "script" not in tree.tags
    assert tree.words.count(evil) >= 5


def test_dark_mode_and_phones_are_provided_for() -> None:
    page = render_report(run())
    assert "prefers-color-scheme:dark" in page
    assert 'name="viewport"' in page
    assert "max-width:640px" in page


def test_every_mark_has_a_rule_in_the_style_sheet() -> None:
    sources = [SourceSummary("web", "parquet", 1.0, 1.0, 10, 1000, 0.5, bad=3)]
    style, body = render_report(run(sources=sources)).split("</style>")
    classes = {one for names in re.findall(r'class="([^"]+)"', body) for one in names.split()}
    assert "fault" in classes and {one for one in classes if not re.search(rf"\.{one}\b", style)} == set()


def test_a_load_map_of_many_ranks_joins_neighbours_and_tells_their_largest() -> None:
    loads = [[1.0, 1.0]] * 199 + [[3.0, 1.0]]
    words = words_of(render_report(run(load_heatmap=LoadHeatmap(0, loads, loads))))
    assert "dp 192–199, microbatch 0: 2.985 of the mean" in words
    assert "each is the largest of those it stands for" in words


DEGENERATE = {
    "one step": run(steps=1, names=("web",)),
    "nothing": run(steps=0, names=()),
    "no step": run(steps=0),
    "no load map": run(load_heatmap=None),
    "zero loads": run(load_heatmap=LoadHeatmap(0, [[0.0]], [[0.0]])),
    "empty loads": run(load_heatmap=LoadHeatmap(0, [], [])),
    "ragged loads": run(load_heatmap=LoadHeatmap(0, [[1.0, 2.0], [1.0]], [[3.0]])),
    "no lengths": run(length_histogram=[]),
    "zero length": run(length_histogram=[(0, 1, 5)]),
    "empty bin": run(length_histogram=[(0, 0, 0)]),
    "zero steps": run(per_step=[StepSummary(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)] * 2),
    "all padding": run(per_step=[StepSummary(0, 0, 0, 0, 0, 1.0, 1.0, 1.0, 0.0)]),
    "no weights": run(weights_per_step=[{}] * 4, realised_per_step=[{"web": 0.0}] * 4),
    "zero figures": run(
        wall_s=0.0, startup_s=0.0, tokens=0, samples=0, tokens_per_s=0.0, samples_per_s=0.0, padding=0.0
    ),
    "many": run(steps=2000, names=tuple(f"source-number-{n}" for n in range(306))),
    "many ranks": run(load_heatmap=LoadHeatmap(0, [[1.0] * 4] * 200, [[1.0] * 4] * 200)),
}


@pytest.mark.parametrize("summary", DEGENERATE.values(), ids=DEGENERATE.keys())
def test_degenerate_runs_render(summary: RunSummary) -> None:
    page = render_report(summary)
    Tree(page)
    assert "nan" not in page
    assert "inf" not in page.replace("information", "")
    assert shown(summary_table(summary))
    assert "mixture, by token" in shown(source_table(summary))


def test_hundreds_of_sources_share_a_layer_and_steps_are_thinned() -> None:
    page = render_report(run(steps=2000, names=tuple(f"source-number-{n}" for n in range(306))))
    words = words_of(page)
    assert "299 others" in words
    assert "Each point is the mean of 12 steps." in words
    assert len(page) < 1_000_000


def test_a_summary_is_json() -> None:
    summary = run()
    again = json.loads(json.dumps(dataclasses.asdict(summary)))
    assert again["per_step"][1]["tokens"] == 65_001
    assert again["load_heatmap"]["step"] == 2


def test_terminal_tables_hold_the_key_figures() -> None:
    text = shown(summary_table(run()))
    for figure in ("131k", "200", "1.004×", "round-robin 2.30×", "1.8 %", "412 MB", "65.0k"):
        assert figure in text


def test_terminal_tables_do_not_read_names_as_markup() -> None:
    text = shown(source_table(run(names=("[red]web[/red]", "coyo"))))
    assert "[red]web[/red]" in text
    assert "50.04%" in text


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0, 70) == [0, 20, 40, 60]
    assert nice_ticks(1.0, 1.65) == [1.0, 1.2, 1.4, 1.6]
    assert nice_ticks(3, 3) == [3]


def test_labels_keep_apart_and_inside() -> None:
    placed = spread_labels([90, 95, 99], 10, 0, 100)
    assert placed == [80, 90, 100]
    assert spread_labels([], 10, 0, 100) == []


def test_titles_stand_at_the_left_of_every_table() -> None:
    summary = dataclasses.replace(run(), media=[MediaSummary("photos", "loader", 10)])
    tables = [summary_table(summary), source_table(summary), *media_tables(summary.media)]
    assert {table.title_justify for table in tables} == {"left"}
    assert shown(summary_table(dataclasses.replace(summary, steps=1))).split("\n")[0].rstrip() == "demo: 1 step"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_no_column_is_cut_on_a_screen_of_1280_pixels(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    names = [f"a_collection_of_documents_from_somewhere_with_a_long_name_part_{at:02}" for at in range(18)]
    sources = [SourceSummary(name, "parquet", 0.0556, 0.0561, 123_456, 10**9, 12.34, 5, 10**5, 123.0) for name in names]
    media = [MediaSummary(name, "constructor", 123_456_789) for name in names]
    page = tmp_path / "report.html"
    page.write_text(render_report(run(names=tuple(names), sources=sources, media=media)), encoding="utf-8")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(page.as_uri())
        sizes = "(boxes) => boxes.map(({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth])"
        found = tab.locator(".scroll").evaluate_all(sizes)
        browser.close()
    assert found and all(wide <= shown for wide, shown in found)
