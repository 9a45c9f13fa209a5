"""The live page, asked by those who should not: other web sites, and clients that send too much or the wrong thing."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import shutil
import socket
import threading
import time

import pytest

import overlord as ol
from overlord.dashboard import serving_page
from overlord.dashboard.serving_page import TOKEN, PageServer
from overlord.runtimes.supervision.page_process import LOOPBACK, listening_socket

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CROSS_SITE = {"Sec-Fetch-Site": "cross-site", "Referer": "http://evil.example/"}


@pytest.fixture(scope="module")
def service(ids_job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    launch = ol.launch(ids_job, runtime="local", cache=folder, store=folder / "store")
    with launch as launched, launched.client(0) as client:
        for _ in range(3):
            next(client)
        yield launched


@pytest.fixture(scope="module")
def port(service):
    server = PageServer(service.address, listening_socket(LOOPBACK, 0), "the token")
    thread = threading.Thread(target=server.run)
    thread.start()
    number = int(server.url.rsplit(":", 1)[1].strip("/"))
    ends = time.monotonic() + 60
    while b"next_step" not in ask(number, "/now")[1] and time.monotonic() < ends:
        time.sleep(0.1)
    yield number
    server.stop()
    thread.join()


def ask(port, path, method="GET", body=None, **headers):
    """Return code and body of an answer."""
    with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=60)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def planned(service):
    return service.status()["planner"]["next_step"]


def test_no_question_makes_the_service_plan(service, port):
    before = planned(service)
    for path in ("/balance?step=1000000", "/samples?step=1000000&bucket=0", f"/balance?step={before}"):
        code, body = ask(port, path)
        assert code == 404
        assert "is not planned" in json.loads(body)["error"]
    assert ask(port, "/balance")[0] == 200
    assert planned(service) == before


@pytest.mark.parametrize(
    "path",
    [
        "/balance?step=" + "9" * 10_000,
        "/samples?step=1&bucket=" + "9" * 5_000,
        "/samples?step=-1",
        "/samples?step=1e3",
        "/balance?step=%D9%A3%C2%B2",
        "/steering?group=" + "a/" * 4_000,
        "/" + "x" * 30_000,
        "/page/../serving_page.py",
        "/page/%2e%2e/serving_page.py",
    ],
)
def test_odd_questions_are_answered_and_not_with_500(port, path):
    code, body = ask(port, path)
    assert code < 500, body
    assert b"Guard" not in body


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"change": "park_source", "value": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"change": "skip_steps", "value": ' + b"9" * 4_000 + b"}",
        b'{"change": "skip_steps", "value": 2, "at_step": ' + b"9" * 30 + b"}",
        b'{"change": "set_mixture", "value": {"a": ' + b"9" * 400 + b"}}",
        b'{"change": "reshard", "value": {"dp": 99999999999999999999}}',
        b'{"change": "reshard", "value": {"dp": {"dp": []}}}',
        b'{"change": "park_source", "value": "\\ud800"}',
        b"\xff\xfe\x00",
        b"",
        b" " * (1 << 17),
    ],
    ids=lambda body: f"{len(body)} bytes {body[:48]!r}",
)
def test_a_change_that_is_no_change_is_refused_in_words(service, port, body):
    before = service.history()["changes"]
    code, answer = ask(port, "/change", "POST", body, **{TOKEN: "the token"})
    assert 400 <= code < 500, answer
    assert json.loads(answer)["error"]
    assert service.history()["changes"] == before


@pytest.mark.parametrize("path", ["/now", "/balance", "/samples?step=1&bucket=0", "/events", "/page/page.js"])
@pytest.mark.parametrize(
    "headers",
    [
        CROSS_SITE,
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
    ],
    ids=lambda headers: " ".join(headers.values()),
)
def test_a_page_of_another_site_gets_nothing(port, path, headers):
    code, body = ask(port, path, **headers)
    assert code in (400, 403)
    assert list(json.loads(body)) == ["error"]


def test_a_link_to_the_page_may_stand_anywhere_but_a_frame_may_not(port):
    code, body = ask(port, "/", **CROSS_SITE, **{"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"})
    assert code == 200
    assert b"<html" in body
    with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=60)) as connection:
        connection.request("GET", "/")
        headers = connection.getresponse().headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers


def test_a_change_from_another_site_is_refused_even_with_the_token(service, port):
    body = json.dumps({"change": "park_source", "value": service.job.names[0]}).encode()
    code, _ = ask(port, "/change", "POST", body, Origin="http://evil.example", **{TOKEN: "the token"})
    assert code == 403
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "TRACE", "X" * 40):
        assert ask(port, "/change", method, **{TOKEN: "the token"})[0] in (400, 405)
    assert all(one["parked"] is None for one in service.status()["sources"].values())


def test_only_so_many_streams_are_open_and_the_page_answers_meanwhile(port):
    with contextlib.ExitStack() as stack:
        codes = []
        for _ in range(serving_page.MOST_STREAMS + 3):
            connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
            stack.callback(connection.close)
            connection.request("GET", "/events")
            codes.append(connection.getresponse().status)
        assert codes.count(200) == serving_page.MOST_STREAMS
        assert set(codes) == {200, 503}
        assert ask(port, "/balance")[0] == 200
    ends = time.monotonic() + 30
    while (code := ask_for_stream(port)) != 200 and time.monotonic() < ends:
        time.sleep(0.1)  # streams are given back
    assert code == 200


def ask_for_stream(port):
    with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=60)) as connection:
        connection.request("GET", "/events")
        return connection.getresponse().status


def test_many_questions_at_once_are_few_for_the_service(port):
    codes = []
    threads = [threading.Thread(target=lambda: codes.append(ask(port, "/samples?step=1")[0])) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(codes) == 40
    assert set(codes) <= {200, 503}
    assert 200 in codes


def test_a_connection_that_sends_no_request_is_closed(port, monkeypatch):
    monkeypatch.setattr(serving_page, "HEAD_S", 0.3)
    for sent in (b"", b"GET /now HTTP/1.1\r\nHost: loc", b"POST /change HTTP/1.1\r\n"):
        with socket.create_connection((LOOPBACK, port), timeout=30) as connection:
            connection.sendall(sent)
            assert connection.recv(100) == b""


def test_a_head_without_end_is_refused(port):
    with socket.create_connection((LOOPBACK, port), timeout=30) as connection:
        with contextlib.suppress(OSError):  # it may be closed meanwhile
            connection.sendall(b"GET /now HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100).startswith((b"HTTP/1.1 400", b""))
    assert ask(port, "/now")[0] == 200


def test_a_connection_whose_answers_are_not_read_is_ended(port, monkeypatch):
    monkeypatch.setattr(serving_page, "STUCK_S", 0.5)
    asked, size = 400, len(ask(port, "/page/page.js")[1])
    assert asked * size > 8 << 20  # more than the kernel takes
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect((LOOPBACK, port))
        connection.sendall(b"GET /page/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * asked)
        time.sleep(3)
        got = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                got += len(part)
    assert got < asked * size
    assert ask(port, "/now")[0] == 200


EVIL = """<!doctype html><title>evil</title><script>
const target = "TARGET", body = '{"change": "skip_steps", "value": 9}', log = [];
const read = what => log.push("read " + what), failed = () => 0;
const tag = (name, path) => new Promise(done => {
  const one = document.createElement(name);
  one.onload = () => done(read(name + " " + path));
  one.onerror = done;
  one.src = target + path;
  document.documentElement.append(one);
});
window.tries = Promise.all([
  ...["/now", "/balance?step=1000000", "/events"].map(path => fetch(target + path).then(read, failed)),
  fetch(target + "/balance?step=1000000", {mode: "no-cors"}).catch(failed),
  fetch(target + "/change", {method: "POST", mode: "no-cors", body}).catch(failed),
  fetch(target + "/change", {method: "POST", headers: {"x-overlord-token": "the token"}, body}).then(read, failed),
  new Promise(done => {
    const stream = new EventSource(target + "/events");
    stream.onopen = () => done(read("stream"));
    stream.onerror = done;
  }),
  tag("script", "/page/page.js"),
  tag("img", "/balance?step=1000000"),
]).then(() => log);
</script><iframe src="TARGET/"></iframe><iframe src="TARGET/balance?step=1000000"></iframe>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_site_in_a_real_browser_neither_reads_nor_stalls(service, port, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    target = f"http://{LOOPBACK}:{port}"
    (tmp_path / "index.html").write_text(EVIL.replace("TARGET", target))
    handler = http.server.SimpleHTTPRequestHandler
    site = http.server.ThreadingHTTPServer((LOOPBACK, 0), lambda *given: handler(*given, directory=str(tmp_path)))
    threading.Thread(target=site.serve_forever, daemon=True).start()
    before, made = planned(service), service.history()["changes"]
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        answered = []
        tab.on("response", lambda one: answered.append((one.status, one.url)))
        tab.goto(f"http://localhost:{site.server_port}/index.html")
        log = tab.evaluate("window.tries")
        browser.close()
    site.shutdown()
    site.server_close()
    assert log == []
    codes = [code for code, url in answered if url.startswith(target) and url != f"{target}/"]
    assert codes, answered
    assert set(codes) <= {400, 403, 405}
    assert planned(service) == before
    assert service.history()["changes"] == made
