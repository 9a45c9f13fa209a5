"""A service that dies in the middle of a message is gone; nobody takes half of what it said for the whole."""

from __future__ import annotations

import os
import socket
import struct
import time

import pytest

import overlord as ol
from overlord.runtimes.transport import wire
from overlord.runtimes.transport.doors import answer_all, knock
from overlord.runtimes.transport.wire import receive, send


@pytest.mark.parametrize("cut", ["head", "body", "descriptors"])
def test_half_a_message_is_none(cut):
    here, there = socket.socketpair(socket.AF_UNIX)
    with here:

        class Half:
            """A socket that dies on the way."""

            def sendall(self, data):
                there.sendall(data if cut == "descriptors" else data[: 4 if cut == "head" else -1])
                there.close()

        try:
            send(Half(), {"views": {}}, [0] if cut == "descriptors" else None)
        except (OSError, AttributeError):
            pass  # which is what happens to who dies
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ol.ServiceLost):
            receive(here)
        assert len(os.listdir("/proc/self/fd")) == len(before)


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
                with knock(service.address) as connection:
                    send(connection, {"op": "status"}, [file.fileno()] * 4)
                with knock(service.address) as connection:  # beside bytes that do not announce any
                    socket.send_fds(connection, [struct.pack("<II", 2, 0) + b"{}"], [file.fileno()] * 4)
        assert settled(service.pid, before + 3)
        with service.client() as client:
            assert next(client).index == 0


@pytest.mark.parametrize("sent", ["too long", "no JSON", "no object"])
def test_what_no_client_sends_ends_its_connection(ids_job, cache, sent):
    here, there = socket.socketpair(socket.AF_UNIX)
    length = wire.MAX_ASKED + 1 if sent == "too long" else 2
    there.sendall(struct.pack("<II", length, 0) + (b"[]" if sent == "no object" else b"no"))
    with here, there, pytest.raises((ol.ServiceLost, ValueError)):
        answer_all(here, lambda message: ({}, []))


def test_half_sent_messages_are_bounded_in_bytes_and_time(monkeypatch):
    monkeypatch.setattr(wire, "MESSAGE_S", 0.5)
    monkeypatch.setattr(wire, "MAX_READING", 3000)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        wire.expect_within(here, 0.1)
        there.sendall(struct.pack("<II", 2000, 0) + b"x" * 100)
        began = time.monotonic()
        with pytest.raises(ol.ServiceLost, match="not complete"):
            wire.receive_asked(here)
        assert time.monotonic() - began < 5
    with wire._reading.room(2000):
        here, there = socket.socketpair(socket.AF_UNIX)
        with here, there:
            there.sendall(struct.pack("<II", 2000, 0))
            with pytest.raises(ol.ServiceLost, match="messages of 2000 bytes are being read"):
                wire.receive_asked(here)
    with wire._reading.room(2900):
        pass  # what was given up is given back
