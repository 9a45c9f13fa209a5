"""The page of a run in which a small source is repeated twenty times, in a real browser."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import urllib.request

import numpy as np
import pytest

import overlord as ol
from overlord.dashboard.serving_page import PageServer
from overlord.runtimes.supervision.page_process import LOOPBACK, listening_socket

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROWS, STEPS = 20, 130


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """Train for twenty epochs of a small source, report what `LayerBalance` and an evaluation would, and go on."""
    folder = tmp_path_factory.mktemp("repeated")
    rng = np.random.default_rng(0)
    for name, rows in (("web", 3000), ("math", ROWS)):
        lines = [json.dumps({"ids": rng.integers(1, 99, 8).tolist()}) for _ in range(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    job = ol.Job(
        sources=[
            ol.Source(name, str(folder / f"{name}.jsonl"), sample=ol.Text("ids", tokenized=True))
            for name in ("web", "math")
        ],
        mixture=ol.Mixture({"web": 0.7, "math": 0.3}),
        batch=ol.Batch(32, global_samples=11),
    )
    counts: list[int] = []
    with (
        ol.launch(job, mesh=ol.ClientPlaceTree(), cache=folder / "cache") as service,
        service.client() as client,
        page_of(service) as url,
    ):
        for step in client:
            counts.append(sum(id.source == "math" for m in step.microbatches for id in m.meta.sample_ids))
            passes = sum(counts) / ROWS
            late = max(0.0, passes - 4)
            losses = {"loss/math": 2.0 - 0.05 * passes, "heldout/math": 2.2 + 0.02 * late, "loss/web": 2.5}
            client.report(step.index, losses | {"alpha/std": 0.3 + 0.01 * late})
            if step.index in (40, 80):
                assert panel(url)["warnings"] == [], "not all signs are there"
            if step.index + 1 == STEPS:
                break
        yield url, counts


@contextlib.contextmanager
def page_of(service):
    server = PageServer(service.address, listening_socket(LOOPBACK, 0), None)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()


def until(find, within_s=60.0):
    ends = time.monotonic() + within_s
    while not (answer := find()):
        assert time.monotonic() < ends, "it has not come to that"
        time.sleep(0.1)
    return answer


def panel(url):
    with urllib.request.urlopen(f"{url}repetition", timeout=30) as answer:
        return json.load(answer)


def test_marks_stand_at_the_steps_at_which_epochs_are_passed(repeated):
    url, counts = repeated
    passes = np.cumsum(counts) / ROWS
    # An answer is kept for a moment, and a step is measured after it is planned.
    shown = until(lambda: (answer := panel(url))["epochs"]["math"][1][-1] >= 19 and answer)
    assert [mark["epochs"] for mark in shown["marks"]] == [4, 16]
    measured = np.array(shown["epochs"]["math"][0])
    for mark in shown["marks"]:  # the first measured step at which so many epochs are over
        reached = int(np.argmax(passes >= mark["epochs"]))
        assert mark["step"] == measured[measured >= reached][0]
    assert "web" not in shown["epochs"]
    (warning,) = shown["warnings"]
    assert warning.startswith("math was read ") and "learned by heart" in warning


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser(repeated, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    url, _ = repeated
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        wrong: list[str] = []
        for scheme in ("light", "dark"):
            tab = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
            tab.on("pageerror", lambda error: wrong.append(str(error)))
            tab.goto(url)
            tab.locator("#repetition").scroll_into_view_if_needed()
            sync_api.expect(tab.locator("#repetition-words")).to_contain_text("math: ", timeout=15000)
            sync_api.expect(tab.locator("#repetition-warnings li")).to_contain_text("learned by heart")
            sync_api.expect(tab.locator("#repetition-marks li")).to_have_count(2)
            sync_api.expect(tab.locator("#plot-losses .u-series")).to_have_count(3)
            sync_api.expect(tab.locator("#plot-alpha .u-series")).to_have_count(2)
            tab.locator("#repetition").scroll_into_view_if_needed()
            tab.locator("#repetition").screenshot(path=tmp_path / f"repetition-{scheme}.png")
            print(tmp_path / f"repetition-{scheme}.png")
            assert tab.evaluate("document.documentElement.scrollWidth <= 1280")
        assert wrong == []
        browser.close()
