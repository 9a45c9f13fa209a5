"""A service that dies in the middle of a message is gone; nobody takes half of what it said for the whole."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

import overlord as ol
from overlord.core.client_messages import Beat, Done, Failure, GetStatus, Views
from overlord.runtimes.client_feed import connect
from overlord.runtimes.transport import codec
from overlord.runtimes.transport.codec import PREFIX, receive, send
from overlord.runtimes.transport.listener import answer_requests, connect_socket, listen
from overlord.version import VERSION

OURS = f"overlord {VERSION}".encode()


@pytest.mark.parametrize("cut", ["prefix", "head", "descriptors"])
def test_half_a_message_is_none(cut):
    here, there = socket.socketpair(socket.AF_UNIX)
    with here:

        class Half:
            """A socket that dies on the way."""

            def send(self, data):
                there.sendall(data if cut == "descriptors" else data[: {"prefix": 4, "head": -1}[cut]])
                there.close()
                return len(data)

        try:
            send(Half(), Views(), [0] if cut == "descriptors" else ())
        except (OSError, AttributeError):
            pass  # which is what happens to who dies
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ol.ServiceLost):
            receive(here)
        assert len(os.listdir("/proc/self/fd")) == len(before)


def packet(head: bytes, *, length: int | None = None, name: bytes = OURS) -> bytes:
    """The bytes of a message, whose prefix may tell a lie."""
    return PREFIX.pack(name, len(head) if length is None else length, 0, 0, 0) + head


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def settled(pid: int, most: int) -> bool:
    """Whether a process comes to have no more descriptors than that."""
    until = time.monotonic() + 20
    while (found := descriptors(pid)) > most and time.monotonic() < until:
        time.sleep(0.05)
    return found <= most


def test_descriptors_that_nobody_asked_for_are_not_kept(ids_job, cache):
    with ol.launch(ids_job, cache=cache) as service:
        with service.client() as client:
            next(client)
        time.sleep(0.5)
        before = descriptors(service.pid)
        with open(os.devnull, "rb") as file:
            for _ in range(50):
                with connect_socket(service.address) as connection, contextlib.suppress(ol.ServiceLost):
                    send(connection, GetStatus(), [file.fileno()] * 4)  # the service may hang up before they are sent
                with connect_socket(service.address) as connection:  # beside bytes that do not announce any
                    socket.send_fds(connection, [packet(codec.frame_of(Beat())[0])], [file.fileno()] * 4)
        assert settled(service.pid, before + 3)
        with service.client() as client:
            assert next(client).index == 0


@pytest.mark.parametrize("sent", ["too long", "no overlord", "no message", "no request"])
def test_what_no_client_sends_ends_its_connection(sent):
    here, there = socket.socketpair(socket.AF_UNIX)
    head = codec.frame_of(Done())[0] if sent == "no request" else b"no"
    there.sendall(packet(head, length=codec.MAX_ASKED + 1 if sent == "too long" else None,
                         name=b"GET / HTTP/1.1" if sent == "no overlord" else OURS))  # fmt: skip
    with here, there:
        with pytest.raises((ol.ServiceLost, ol.SpecError)):
            answer_requests(here, lambda message: (Done(), []))
        if sent.startswith("no re") or sent == "no message":
            assert "no request to a service" in receive(there)[0].message


def test_a_client_of_another_version_is_refused_with_both_versions(ids_job, cache):
    with ol.launch(ids_job, cache=cache) as service:
        with connect_socket(service.address) as connection:
            connection.sendall(packet(b"whatever that version sends", name=b"overlord 9.8.7"))
            reply, _ = receive(connection)
        assert isinstance(reply, Failure) and reply.error == "SpecError"
        assert "overlord 9.8.7 and overlord " + VERSION in reply.message
        with service.client() as client:
            assert next(client).index == 0


def test_a_service_of_another_version_is_refused_with_both_versions(tmp_path):
    def serve(connection):
        connection.recv(1 << 16)
        connection.sendall(packet(b"whatever that version sends", name=b"overlord 9.8.7"))

    said = rf"overlord 9\.8\.7 and overlord {VERSION} cannot"
    with listen(tmp_path / "socket", serve), pytest.raises(ol.SpecError, match=said) as refused:
        connect(f"unix://{tmp_path / 'socket'}", 0)
    assert str(refused.value).count(". ") == 0, "one sentence"


def test_half_sent_messages_are_bounded_in_bytes_and_time(monkeypatch):
    monkeypatch.setattr(codec, "MESSAGE_S", 0.5)
    monkeypatch.setattr(codec, "MAX_READING", 3000)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        codec.expect_within(here, 0.1)
        there.sendall(packet(b"x" * 100, length=2000))
        began = time.monotonic()
        with pytest.raises(ol.ServiceLost, match="not complete"):
            codec.receive_request(here)
        assert time.monotonic() - began < 5
    with codec._reading.room(2000):
        here, there = socket.socketpair(socket.AF_UNIX)
        with here, there:
            there.sendall(packet(b"", length=2000))
            with pytest.raises(ol.ServiceLost, match="messages of 2000 bytes are being read"):
                codec.receive_request(here)
    with codec._reading.room(2900):
        pass  # what was given up is given back


FIRST_MESSAGES = """
import os, random, sys, threading
from overlord.core.client_messages import Labels, Views
from overlord.runtimes.transport import codec

sys.setswitchinterval(1e-6)
frames = [codec.frame_of(Views(None, ("a", "b"), {}, [1, 2])), codec.frame_of(Labels([1], [(1, 2)], True))]
for _ in range(150):
    child = os.fork()
    if child == 0:
        together = threading.Barrier(4)

        def receive():
            together.wait()
            for _ in range(random.randrange(3000)):
                pass
            for frame in frames:
                codec._replies().message(frame)

        threads = [threading.Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(1)
"""


def test_threads_that_receive_their_first_messages_at_once_do_not_end_the_process():
    """Of such processes one in eight was ended by SIGSEGV; trainers have several threads that receive."""
    subprocess.run([sys.executable, "-c", FIRST_MESSAGES], check=True)
