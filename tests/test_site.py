"""The documentation site: built strictly, rendered as a forge renders its pages, and complete without a network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site without its plugins, built strictly: every link, every anchor, every page in the navigation."""
    folder = tmp_path_factory.mktemp("pages")
    build = (
        "import sys; from mkdocs.config import load_config; from mkdocs.commands.build import build; "
        "build(load_config('mkdocs.yml', plugins=[], site_dir=sys.argv[1]))"
    )
    run_in_root([sys.executable, "-c", build, str(folder)])
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    run_in_root([sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)])
    return folder


def run_in_root(command: list[str]) -> None:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def article(path: Path) -> str:
    text = path.read_text()
    return text[text.index("<article") : text.index("</article>")]


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda page: page.name)
def test_pages_have_the_parts_that_a_forge_shows(page, pages):
    """A list behind a paragraph, or a block inside a list, is read otherwise by some renderers."""
    markdown_it = pytest.importorskip("markdown_it")
    expected = markdown_it.MarkdownIt("commonmark").enable("table").render(page.read_text())
    built = pages / page.stem / "index.html" if page.stem != "index" else pages / "index.html"
    found = article(built)
    for part in ("<li>", "<pre", "<tr>", "<h2", "<h3", "<img"):
        assert found.count(part) == expected.count(part), part


@pytest.mark.slow
def test_the_site_names_everything_and_asks_no_other_host(site):
    text = article(site / "cli.html")
    assert all(command in text for command in ("overlord demo", "overlord steps diff", "--address-file"))
    names = article(site / "api" / "overlord.html")
    assert all(
        f'id="overlord.{name}"' in names for name in ("session.launch", "job.specs.Job", "roles.client.Client.report")
    )
    for page in site.rglob("*.html"):
        asked = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"(?:https?:)?//[^\"]*", page.read_text())
        assert asked == [], page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_pages_and_their_search_work_from_a_folder(site):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        told: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda line: told.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: told.append(str(error)))
        for name in ("index", "tour", "concepts", "operations", "cli", "api/overlord"):
            page.goto((site / f"{name}.html").as_uri())
            widths = page.evaluate("[...document.querySelectorAll('article img')].map(image => image.naturalWidth)")
            assert all(widths), f"{name}: a picture is not there"
        page.goto((site / "index.html").as_uri())
        page.fill("input[name=query]", "tolerance")
        page.wait_for_selector(".md-search-result__item", timeout=20_000)
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert told == []
