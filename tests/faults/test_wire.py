"""A service that dies in the middle of a message is gone; nobody takes half of what it said for the whole."""

from __future__ import annotations

import os
import socket

import pytest

import overlord as ol
from overlord.runtimes.wire import receive, send


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
