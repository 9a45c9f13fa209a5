"""The live page: what it shows of a real service, over HTTP and in a real browser."""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest

import overlord as ol
from overlord.core import client_messages as msg
from overlord.core.plan import plan_to_bytes
from overlord.dashboard import serving_page
from overlord.dashboard.serving_page import TOKEN, PageServer
from overlord.dashboard.watching import Watch, newest_step, shown_status, shown_steering
from overlord.integrations.torch_loader import DataLoader
from overlord.job_files import dump_job_yaml
from overlord.launch_spec import LaunchOptions
from overlord.runtimes.supervision import page_process
from overlord.runtimes.supervision.early_start import start_python
from overlord.runtimes.supervision.page_process import LOOPBACK, PageProcess, listening_socket
from overlord.runtimes.transport.listener import answer_requests, listen

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MESH = ol.ClientPlaceTree(dp=2, cp=2)


@pytest.fixture(scope="module")
def service(ids_job, tmp_path_factory):
    """A service whose four ranks train slowly, so that figures change while they are looked at."""
    tmp_path = tmp_path_factory.mktemp("page")
    with ol.launch(ids_job, mesh=MESH, runtime="local", cache=tmp_path, store=tmp_path / "store") as launched:
        stop = threading.Event()

        def train(rank):
            with launched.client(rank) as client:
                for step in client:
                    list(step.microbatches)
                    if rank == 0:
                        client.report(step.index, {"lr": 1e-4, **{f"loss/{name}": 2.0 for name in ids_job.names}})
                    if stop.wait(0.1):
                        return

        ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(MESH.world_size)]
        for thread in ranks:
            thread.start()
        yield launched
        stop.set()
        for thread in ranks:
            thread.join()


@contextlib.contextmanager
def served(service, token=None):
    server = PageServer(service.address, listening_socket(LOOPBACK, 0), token)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture(scope="module")
def page(service):
    with served(service) as server:
        yield server


@pytest.fixture(scope="module")
def changing_page(service):
    with served(service, "the token") as server:
        yield server


def get(url, body=None, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return answer.read()


def change(page, token, what, value, at_step=None):
    """Ask for a change as the page does; return the answer, and its code."""
    body = json.dumps({"change": what, "value": value, "at_step": at_step}).encode()
    try:
        return 200, json.loads(get(f"{page.url}change", body, **({} if token is None else {TOKEN: token})))
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


def until(find, within_s=60.0):
    ends = time.monotonic() + within_s
    while not (found := find()) and time.monotonic() < ends:
        time.sleep(0.1)
    return found


def kept(service, step):
    """Plans are written in groups while a run goes on."""
    with contextlib.suppress(ol.StateError):
        return ol.replay(service.status()["store"]["place"], step, mesh=MESH)


def test_it_shows_the_service_and_its_plans(service, page):
    seen = until(lambda: (now := json.loads(get(f"{page.url}now"))).get("rates", {}).get("steps_per_s") and now)
    assert "data" in seen["sentence"] or ("time" in seen["sentence"] and seen["mesh"] == str(MESH))
    assert seen["sources"]["name"] == list(service.status()["sources"])
    balance = json.loads(get(f"{page.url}balance"))
    plan = service.plan_raw(balance["step"])
    loads, after = plan.loads(plan.in_batch), balance["after"]
    assert (after["buckets"], after["microbatches"]) == loads.shape and balance["most"] == loads.max()
    assert [load > 0 for load in base64.b64decode(after["loads"])] == (loads > 0).ravel().tolist()
    assert after["in_lockstep"] <= balance["before"]["in_lockstep"] and balance["before"]["buckets"] == MESH.dp
    shown = json.loads(get(f"{page.url}samples?step={balance['step']}&bucket=1"))
    assert shown["ranks"] == MESH.consumers("dp", 1)
    with until(lambda: kept(service, balance["step"])) as again:
        step = next(again.client(shown["ranks"][0]))
        held = {str(one) for batch in step.microbatches for one in batch.meta.sample_ids}
    assert {one["id"] for one in shown["samples"]} == held


def test_pages_of_the_web_cannot_read_it(page):
    with pytest.raises(urllib.error.HTTPError, match="400"):
        get(f"{page.url}now", Host="rebound.example")
    with urllib.request.urlopen(page.url) as answer:
        assert "default-src 'self'" in answer.headers["content-security-policy"]


def test_changes_need_a_page_that_allows_them_and_its_token(service, page, changing_page):
    before = service.status()["sources"]
    for where, token, words in [
        (page, None, "--allow-changes"),
        (page, "the token", "--allow-changes"),
        (changing_page, None, "token is missing"),
        (changing_page, "the toke", "token is missing"),
    ]:
        code, answer = change(where, token, "park_source", next(iter(before)))
        assert code == 403 and words in answer["error"]
    with pytest.raises(urllib.error.HTTPError, match="405"):  # a link or a picture of another site is a GET
        get(f"{changing_page.url}change", **{TOKEN: "the token"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        get(f"{changing_page.url}change", b"{}", Host="rebound.example", **{TOKEN: "the token"})
    assert [one["parked"] for one in service.status()["sources"].values()] == [None] * len(before)


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("set_mixture", {"no such source": 1.0}, "no such source"),
        ("set_mixture", 3, "is not a mixture"),
        ("park_source", "no such source", "no such source"),
        ("park_source", 3, "not text"),
        ("skip_steps", 0, "nothing would be skipped"),
        ("skip_steps", "many", "nothing would be skipped"),
        ("reshard", "dp=none", "dp"),
        ("reshard", [2], "mesh"),
        ("close", None, "Invalid enum value"),
    ],
)
def test_a_change_that_is_refused_is_answered_in_the_words_of_the_service(changing_page, what, value, words):
    code, answer = change(changing_page, "the token", what, value)
    assert code == 400 and words in answer["error"]


@pytest.mark.slow
def test_the_command_shows_the_token_once_and_only_to_this_host(service):
    command = [
        sys.executable,
        "-m",
        "overlord",
        "dashboard",
        service.address,
        "--port",
        "0",
        "--allow-changes",
        "--json",
    ]
    refused = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True)
    assert refused.returncode == 2 and "use a tunnel" in refused.stdout + refused.stderr
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with shown:
        told = json.loads(shown.stdout.readline())
        code, answer = change(argparse.Namespace(url=told["url"]), told["token"], "park_source", "no such source")
        shown.terminate()
    assert (code, "no such source" in answer["error"]) == (400, True)


def test_changes_are_those_of_the_service(ids_job, tmp_path):
    with ol.launch(ids_job, cache=tmp_path, mesh="dp=2") as service, served(service, "the token") as page:
        first, second = ids_job.names[:2]
        assert change(page, "the token", "set_mixture", {first: 3, second: 1}, 3) == (200, {"step": 3})
        assert change(page, "the token", "park_source", second, 4) == (200, {"step": 4})
        assert change(page, "the token", "return_source", second, 6) == (200, {"step": 6})
        assert change(page, "the token", "skip_steps", 2, 8) == (200, {"step": 8})
        assert change(page, "the token", "reshard", "dp=4", 9) == (200, {"step": 9})
        weights = service.plan_raw(3).draw.weights
        assert weights[0] == pytest.approx(3 * weights[1])
        assert service.plan_raw(9).mesh == ol.ClientPlaceTree(dp=4)
        made = [(one["step"], one["kind"], one["of"]) for one in service.history()["changes"]]
        assert made[:4] == [(3, "mixture", ""), (4, "park", second), (6, "return", second), (8, "skip", "2")]
        assert made[4][:2] == (9, "mesh") and "dp=4" in made[4][2]


@pytest.mark.parametrize(("path", "words"), [("samples?bucket=99", "not among"), ("samples?step=x", "numbers")])
def test_wrong_questions_are_refused(page, path, words):
    until(lambda: json.loads(get(f"{page.url}now")).get("clients"))
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(page.url + path)
    assert words in json.loads(refused.value.read())["error"]


@pytest.mark.parametrize("port", [None, 70000])
def test_a_port_that_cannot_be_had_is_named_before_anything_runs(page, ids_job, tmp_path, port):
    taken = int(page.url.rsplit(":")[-1].strip("/")) if port is None else port
    with pytest.raises(ol.SpecError, match=rf"{taken}: (another process has it|ports end).*another port"):
        ol.launch(ids_job, cache=tmp_path, store=tmp_path / "store", dashboard=taken)
    assert not (tmp_path / "store").exists()


def test_inline_has_no_page(ids_job, tmp_path):
    with pytest.raises(ol.SpecError, match="dashboard is 0 and runtime is 'inline'"):
        ol.launch(ids_job, cache=tmp_path, runtime="inline", dashboard=0)
    with pytest.raises(ol.SpecError, match="at least 0; no browser"):
        ol.launch(ids_job, cache=tmp_path, dashboard=-1)


def refused(url):
    try:
        get(url)
    except urllib.error.HTTPError:
        raise
    except OSError:
        return True
    return False


def test_a_launched_page_is_there_as_long_as_its_service(ids_job, tmp_path):
    with ol.launch(ids_job, cache=tmp_path, dashboard=0) as service:
        url = service.dashboard
        seen = until(lambda: (now := json.loads(get(f"{url}now"))).get("sentence") and now)
        assert seen["address"] == service.address
    assert service.dashboard is None and refused(url)


def page_of(service):
    """The process of a launched page: a child of this one that serves its address."""
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it may have just ended
            if {"overlord.dashboard.serving_page", service.address} <= set(one.cmdline()):
                return one
    return None


@pytest.mark.slow
def test_a_launched_page_that_is_killed_is_started_again(ids_job, tmp_path, caplog):
    with ol.launch(ids_job, cache=tmp_path, dashboard=0) as service:
        url, pids = service.dashboard, set()
        for _ in range(2):
            process = until(lambda: (one := page_of(service)) and one.pid not in pids and one)
            assert b"overlord" in get(url)  # a request that comes before the process is up waits for it
            pids.add(process.pid)
            process.kill()
        assert b"overlord" in get(url) and page_of(service).pid not in pids
    assert refused(url)
    assert [r.message for r in caplog.records if "live page" in r.message] == [
        f"the process of the live page {url} ended (exit code -9); it is started again"
    ]


@pytest.mark.slow
def test_a_launched_page_that_is_stopped_for_good_is_started_again(ids_job, tmp_path):
    with ol.launch(ids_job, cache=tmp_path, dashboard=0) as service:
        process = until(lambda: page_of(service))
        assert b"overlord" in get(service.dashboard)
        process.suspend()
        assert until(lambda: (one := page_of(service)) and one.pid != process.pid)
        assert b"overlord" in get(service.dashboard)


def test_a_page_that_cannot_run_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(page_process, "RESTARTS", 1)
    page = PageProcess(0)
    monkeypatch.setattr(
        page_process, "start_python", lambda *a, **b: start_python(["-c", "raise SystemExit(3)"], {}, [])
    )
    page.start("unix:///nowhere")
    assert until(lambda: "is not served any more" in caplog.text) and refused(page.url)
    page.close()


def test_a_launched_page_changes_the_service_only_with_its_token(ids_job, tmp_path):
    with ol.launch(ids_job, cache=tmp_path, dashboard=0, dashboard_changes=True) as service:
        url, _, token = service.dashboard.partition("#token=")
        assert token not in " ".join(until(lambda: page_of(service)).cmdline())  # all users could read it there

        def change(headers):
            wanted = json.dumps({"change": "park_source", "value": "a"}).encode()
            request = urllib.request.Request(f"{url}change", wanted, headers)
            return json.loads(urllib.request.urlopen(request, timeout=20).read())

        with pytest.raises(urllib.error.HTTPError, match="403"):
            change({})
        assert service.status()["sources"]["a"]["parked"] is None
        step = change({TOKEN: token})["step"]
        assert service.status()["sources"]["a"]["parked"]["since"] == step
    with pytest.raises(ol.SpecError, match=r"dashboard_changes.*given without dashboard"):
        ol.launch(ids_job, cache=tmp_path, dashboard_changes=True)


def test_a_torch_loader_has_a_page_too(ids_job, tmp_path):
    with DataLoader(ids_job, cache=tmp_path, dashboard=0) as loader:
        assert loader.dashboard is None  # the service is launched at the first step
        next(iter(loader))
        url = loader.dashboard
        assert b"overlord" in get(url)
    assert refused(url)


@pytest.mark.slow
def test_a_launched_page_ends_with_a_launcher_that_is_killed(ids_job, tmp_path):
    (tmp_path / "job.yaml").write_text(dump_job_yaml(ids_job, LaunchOptions(dashboard=0)))
    command = [sys.executable, "-m", "overlord", "serve", str(tmp_path / "job.yaml"), "--json"]
    launcher = subprocess.Popen([*command, "--cache", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    url = json.loads(launcher.stdout.readline())["dashboard"]
    assert until(lambda: json.loads(get(f"{url}now")).get("sentence"))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert until(lambda: refused(url))


def test_a_service_that_is_gone_is_shown_as_such(tmp_path):
    watch = Watch(f"unix://{tmp_path}")
    watch.look()
    assert "service" in json.loads(watch.newest)["lost"] and watch.number == 1


def test_a_service_that_has_just_begun_has_no_rates(service):
    first = shown_status({**service.status(), "rates": None})
    assert first["rates"]["steps_per_s"] is None and first["sources"][0]["tokens_per_s"] is None
    later = until(lambda: (status := service.status())["rates"] and status)
    assert shown_status(later)["rates"]["steps_per_s"] == later["rates"]["steps_per_s"]
    assert newest_step({}) is None and newest_step({"clients": {"0": 1}, "planner": {"next_step": 3}}) == 1


def test_steering_has_reports_shares_changes_and_faults_on_one_axis():
    def series(values):
        return {"step": list(range(len(values))), "mean": values}

    spiky = [2.0] * 50_000
    spiky[31_234] = 9.0
    history = {
        "reports": {"lr": series([1e-4]), "loss/a": series(spiky), "loss/b": series([float("nan")])},
        "measured": {"share/a": series([0.5]), "share/b": series([0.6]), "balance": series([1.0])},
        "changes": [{"step": 3, "kind": "park", "of": "a"}],
    }
    faults = [{"step": 4, "role": "planner", "why": "hung", "at": 0.0}]
    shown = shown_steering(history, faults, None)
    assert (
        shown["groups"] == ["loss", "lr"]
        and shown["group"] == "loss"
        and list(shown["reports"]) == ["loss/a", "loss/b"]
    )
    assert list(shown["shares"]) == ["b", "a"] and shown["left_out"] == [0, 0]
    steps, values = shown["reports"]["loss/a"]
    assert len(steps) < 700 and values[steps.index(31_234)] == 9.0
    assert (shown["changes"], shown["faults"]) == (history["changes"], [{"step": 4, "role": "planner", "why": "hung"}])
    assert list(shown_steering(history, [], "lr")["reports"]) == ["lr"]
    many = {**history, "reports": {}, "measured": {f"share/{at}": series([at]) for at in range(306)}}
    crowded = shown_steering(many, [], "loss")
    assert crowded["group"] is None and crowded["left_out"] == [0, 294] and next(iter(crowded["shares"])) == "305"


def test_steering_is_the_history_of_the_service(service, page):
    shown = until(lambda: (found := json.loads(get(f"{page.url}steering?group=lr"))).get("reports") and found)
    assert shown["groups"] == ["loss", "lr"]
    steps, values = shown["reports"]["lr"]
    every = steps[1] - steps[0]  # more than 1 where the service has made more steps than a page is wide
    assert steps == list(range(0, every * len(steps), every)) and set(values) == {1e-4}
    assert set(shown["shares"]) <= set(service.job.names)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser(service, changing_page):
    sync_api = pytest.importorskip("playwright.sync_api")
    expect, page, names = sync_api.expect, changing_page, service.job.names
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        wrong, asked = [], set()
        for scheme in ("light", "dark"):
            tab = browser.new_page(color_scheme=scheme)
            tab.on("console", lambda said: wrong.append(said.text))
            tab.on("pageerror", lambda error: wrong.append(str(error)))
            tab.on("request", lambda request: asked.add(request.url))
            tab.goto(f"{page.url}#token=the%20token")
            steps = tab.locator("#tiles div:first-child dd:nth-child(2)")
            steps.wait_for()
            first = steps.text_content()
            tab.wait_for_function("text => document.querySelector('#tiles dd').textContent !== text", arg=first)
            tab.locator("#source-rows tr").first.click()
            expect(tab.locator("#source-detail h3")).to_be_visible()
            tab.locator("#balance").scroll_into_view_if_needed()
            expect(tab.locator("#balance-words")).to_contain_text("microbatches", timeout=15000)
            tab.locator("#heat-after").click(position={"x": 20, "y": 300})
            expect(tab.locator("#sample-words")).to_contain_text("bucket 1", timeout=15000)
            assert tab.locator("#sample-rows tr").count() > 0
            tab.locator("#steering").scroll_into_view_if_needed()
            expect(tab.locator("#plot-reports .u-series")).to_have_count(1 + len(names), timeout=15000)
            expect(tab.locator("#plot-shares .u-series")).to_have_count(1 + len(names))
            assert tab.locator(".plot canvas").count() == tab.locator(".plot").count()
            tab.locator("#change-value").fill("no such source=1")
            with tab.expect_response("**/change"):
                tab.locator("#change button").click()
            expect(tab.locator("#change-words")).to_contain_text("no such source")
            assert all("400" in text for text in wrong)  # the browser logs the answer
            wrong.clear()
            tab.locator("#change-value").fill(f"{names[0]}=9, {names[1]}=1")
            tab.locator("#change button").click()
            expect(tab.locator("#change-words")).to_contain_text("It holds from step")
            expect(tab.locator("#marks li").first).to_contain_text("the mixture was set")
            tab.locator("#find").scroll_into_view_if_needed()  # a table that is out of sight is not kept up
            share = tab.locator("#source-rows tr", has_text=names[0]).locator("td:nth-child(3)")
            expect(share).to_have_text("90 %", timeout=15000)
            assert wrong == [] and all(url.startswith((page.url, "data:")) for url in asked)
            assert "token" not in tab.url
            tab.close()
            service.set_mixture(dict.fromkeys(names, 1.0))
        browser.close()


class Crowd:
    """A service of 4,096 ranks and 306 sources as its page sees it: real messages and a real plan, and no training."""

    def __init__(self, address, status):
        self.address, self._status = address, status
        lengths = np.random.default_rng(0).lognormal(6.5, 1.2, (306, 200)).clip(16, 8192).astype(int)
        self.names = [f"source-{number:03}" for number in range(306)]
        tree = ol.ClientPlaceTree(dp=4096)
        buffer = ol.summary_buffer(dict(zip(self.names, lengths, strict=True)), context_length=8192)
        self._plan = ol.strategies.backbone_balance()(buffer, tree).on(tree)
        self._limits, self._began = dataclasses.asdict(buffer.limits), time.monotonic()

    def answer(self, request):
        step = int(10 * (time.monotonic() - self._began))
        if isinstance(request, msg.GetPlan):
            return msg.PlanBytes(bytes(plan_to_bytes(self._plan))), []
        if isinstance(request, msg.GetHistory):
            steps = list(range(2000))
            lines = {name: [math.sin(at / 90) + number for at in steps] for number, name in enumerate(self.names[:150])}
            series = {name: {"step": steps, "mean": values} for name, values in lines.items()}
            both = {f"{kind}/{name}": one for kind in ("loss", "share") for name, one in series.items()}
            marks = [{"step": at, "kind": "mixture", "of": ""} for at in range(0, 2000, 5)]
            return msg.Document({"reports": both, "measured": both, "changes": marks}), []
        one = next(iter(self._status["sources"].values()))
        sources = {name: {**one, "tokens": one["tokens"] + step * number} for number, name in enumerate(self.names)}
        hosts = [{"role": f"constructor host {at}", "host": "h", "pid": at, "up": True, "generation": 0, "restarts": 0}
                 for at in range(600)]  # fmt: skip
        planner = {**self._status["planner"], "next_step": step + 2, "limits": self._limits}
        clients = {str(rank): step for rank in range(4096)}
        return msg.Document(
            {**self._status, "planner": planner, "clients": clients, "sources": sources, "hosts": hosts}
        ), []


class JustBegun:
    """A service of many sources with long names that no trainer has attached to."""

    def __init__(self, address, status):
        self.address, self._status = address, status
        self.names = [f"a_collection_of_documents_from_somewhere_with_a_long_name_part_{at:02}" for at in range(18)]

    def answer(self, request):
        if isinstance(request, msg.GetHistory):
            return msg.Document({"reports": {}, "measured": {}, "changes": []}), []
        if isinstance(request, msg.GetPlan):
            raise ol.StateError("step 0 is not planned")
        one = {**next(iter(self._status["sources"].values())), "samples": 123_456_789, "parked": {"since": 12_345}}
        sources = {name: {**one, "format": "parquet", "buffer_bytes": 123_456_789} for name in self.names}
        return msg.Document({**self._status, "clients": {}, "rates": None, "sources": sources}), []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_no_column_is_cut_and_empty_charts_say_what_they_wait_for(service, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    begun = JustBegun(f"unix://{tmp_path}/socket", service.status())
    serving = listen(tmp_path / "socket", lambda connection: answer_requests(connection, begun.answer))
    with serving, served(begun) as page, sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.goto(page.url)
        sync_api.expect(tab.locator("#source-count")).to_have_text("18 of 18", timeout=60000)
        sync_api.expect(tab.locator("#source-rows tr").first).to_contain_text(begun.names[0])
        wide, shown = tab.evaluate("(({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth])"
                                   "(document.querySelector('#sources .scroll'))")  # fmt: skip
        assert wide <= shown, "a column is cut"
        tab.locator("#steering").scroll_into_view_if_needed()
        for name, words in [("steps", "takes steps"), ("waited", "takes steps"), ("reports", "client.report")]:
            chart = tab.locator(f"#plot-{name}")
            sync_api.expect(chart).to_have_attribute("data-empty", re.compile(words), timeout=30000)
        browser.close()


def longest_tasks(browser, tab, seconds=8):
    """Return ms of a processor that tasks of the page's thread take: the longest, and the 99th percentile."""
    browser.start_tracing(page=tab, categories=["toplevel", "__metadata"])
    tab.wait_for_timeout(1000 * seconds)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    tasks = [one for one in events if one["name"].endswith("RunTask") and one["ph"] == "X" and "tdur" in one]
    took = sorted(one["tdur"] / 1e3 for one in tasks if names.get((one["pid"], one["tid"])) == "CrRendererMain")
    return round(took[-1], 1), round(took[int(0.99 * len(took))], 1)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_thousands_of_ranks_and_hundreds_of_sources_take_few_elements(service, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    crowd = Crowd(f"unix://{tmp_path}/socket", service.status())
    serving = listen(tmp_path / "socket", lambda connection: answer_requests(connection, crowd.answer))
    with serving, served(crowd) as page, sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        wrong = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(page.url)
        sync_api.expect(tab.locator("#source-count")).to_have_text("306 of 306", timeout=30000)
        found = {}
        shown = [
            ("now", "#tiles div"),
            ("sources", "#source-rows tr"),
            ("balance", "#heat-after"),
            ("steering", "#plot-shares .u-legend"),
        ]
        for part, filled in shown:
            tab.locator(f"#{part}").scroll_into_view_if_needed()
            tab.locator(filled).first.wait_for(timeout=30000)
            tab.wait_for_timeout(4000)  # a chart is made once, and then kept
            found[part] = longest_tasks(browser, tab)
        sync_api.expect(tab.locator("#balance-words")).to_contain_text("4,096 DP buckets")
        tab.evaluate("document.querySelector('#sources .scroll').scrollTop = 1e6")
        sync_api.expect(tab.locator("#source-rows tr").last).to_contain_text("source-305")
        elements = tab.evaluate("document.querySelectorAll('*').length")
        print(f"{elements} elements; longest task and 99th percentile in ms: {found}")
        assert elements < 2500 and wrong == []  # 306 x 14 cells and 600 hosts would be 8,000
        assert tab.locator("canvas").count() < 60
        browser.close()


def test_what_comes_from_others_is_what_it_says():
    vendor = Path(serving_page.__file__).parent / "page" / "vendor"
    written = re.findall(r"([0-9a-f]{64})  (\S+)", (vendor / "README.md").read_text())
    assert len(written) == 2
    for digest, name in written:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest
