"""A store in an object store, against a real S3 server on the loopback device that fails for a while."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

import overlord as ol
from overlord.errors import Fenced
from overlord.stores.journal import Journal, read_journal
from overlord.stores.owners import Claim, claim
from overlord.stores.places import open_place
from overlord.stores.store import newest_lineage


class Proxy:
    """Passes bytes on; answers 500 while it is told to."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: set[socket.socket] = set()
        self._failing = False
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def fail(self, failing: bool) -> None:
        self._failing = failing
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._door.close()
        self.fail(True)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._pass, args=(self._door.accept()[0],), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if self._failing:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with socket.create_connection(("127.0.0.1", self._to)) as server:
                self._open |= {client, server}
                back = threading.Thread(target=self._relay, args=(server, client), daemon=True)
                back.start()
                self._relay(client, server)
                back.join()
                self._open -= {client, server}

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Proxy, dict[str, str]]]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", aws_access_key_id="key",
                          aws_secret_access_key="secret", region_name="us-east-1")  # fmt: skip
    client.create_bucket(Bucket="bucket")
    client.close()
    proxy = Proxy(port)
    options = {
        "endpoint_override": f"http://127.0.0.1:{proxy.port}",
        "access_key": "key",
        "secret_key": "secret",
    }
    yield proxy, options
    proxy.close()
    moto.stop()


@pytest.fixture
def store(server, request):
    return {"store": f"s3://bucket/{request.node.name}", "store_options": server[1]}


def place_of(store):
    return open_place(store["store"], store["store_options"])


def test_objects_are_written_listed_and_removed(store):
    place = place_of(store)
    place.write("lineage-0001/a", b"hello")
    assert place.read("lineage-0001/a") == b"hello"
    assert place.read("lineage-0001/b") is None
    assert place.names("lineage-0001") == {"a": 5}
    assert place.names() == {"lineage-0001/": 0}
    assert abs(place.written_at("lineage-0001/a") - time.time()) < 60
    place.delete("lineage-0001/")
    place.delete("lineage-0001/a")
    assert place.names("lineage-0001") == {}


def test_an_object_that_is_deleted_while_it_is_read_is_not_there(store):
    place = place_of(store)
    real = place._filesystem

    class Deleting:
        def open_input_stream(self, path: str, **options: Any) -> Any:
            stream = real.open_input_stream(path, **options)  # it looks at the object's size
            real.delete_file(path)
            return stream

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    place.write("a", b"hello")
    place._filesystem = Deleting()
    assert place.read("a") is None


def test_claims_are_exclusive_without_exclusive_creation(store):
    place = place_of(store)
    claims: list[Claim] = []
    fenced: list[Fenced] = []

    def take() -> None:
        try:
            claims.append(claim(place, "a"))
        except Fenced as error:  # another one came while it looked back at its own claim
            fenced.append(error)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [one.number for one in claims]
    assert len(set(numbers)) == len(numbers) == 3 - len(fenced)
    max(claims, key=lambda one: one.number).check()
    first = claim(place, "a")
    claim(place, "a")
    with pytest.raises(Fenced):
        first.check()
    with pytest.raises(ol.StoreError, match="is alive"):
        claim(place, "b")


def test_every_durable_record_is_an_object_and_plans_go_along(store):
    place = place_of(store)
    journal = Journal(place, lambda: None)
    journal.begin("lineage-0001", owner=1)
    for step in range(3):
        journal.append({"kind": "plan", "step": step}, durable=False)
    journal.commit()
    assert len(place.names("lineage-0001")) == 1
    journal.append({"kind": "report", "step": 0}, durable=True)
    assert len(place.names("lineage-0001")) == 2
    found = read_journal(place, "lineage-0001")
    assert [(r["kind"], r["step"]) for r in found.records] == [("plan", 0), ("plan", 1), ("plan", 2), ("report", 0)]


def test_a_run_resumes_from_an_object_store(ids_job, cache, store):
    def run(steps, **more):
        with ol.launch(ids_job, runtime="inline", cache=cache, **store, **more) as service, service.client() as client:
            return [(step.index, step.order_digest) for step in (next(client) for _ in range(steps))]

    whole = run(24)
    assert run(3, state=20) == whole[20:23]
    assert run(1, state="latest")[0][0] == 23
    assert newest_lineage(place_of(store)).number == 3


@pytest.mark.parametrize("for_s", [2.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_a_service_waits_for_a_store_that_answers_500(ids_job, cache, server, store, for_s):
    proxy = server[0]
    with ol.launch(ids_job, cache=cache, **store) as service:
        client = service.client()
        found = []
        for _ in range(4):
            found.append(next(client).order_digest)
            client.report(len(found) - 1, {"loss": 1.0})
        proxy.fail(True)
        began, done = time.monotonic(), threading.Event()

        def train():
            for step in range(4, 20):
                found.append(next(client).order_digest)
                client.report(step, {"loss": float(step)})
            done.set()

        threading.Thread(target=train, daemon=True).start()
        while service.status()["store"]["error"] is None:
            assert time.monotonic() < began + 30
            time.sleep(0.1)
        assert not done.wait(for_s)
        proxy.fail(False)
        assert done.wait(60)
    with ol.launch(ids_job, runtime="inline", cache=cache) as service, service.client() as client:
        assert found == [next(client).order_digest for _ in range(20)]
    reports = [r["step"] for r in newest_lineage(place_of(store)).records if r["kind"] == "report"]
    assert sorted(set(reports)) == list(range(20))
