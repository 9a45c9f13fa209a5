"""What a client that waits is told of its service: that it starts, what it does meanwhile, or that it is busy."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time

import pytest
from tests.conftest import write_ids

import overlord as ol
from overlord.errors import ServiceLost
from overlord.runtimes import client_feed


def until(holds, seconds: float = 90.0) -> bool:
    end = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(found)


@pytest.fixture
def impatient(monkeypatch, caplog):
    """Clients that speak at once, and give up soon a service that does not exist."""
    monkeypatch.setattr(client_feed, "FIRST_WARNING_S", 0.01)
    monkeypatch.setattr(client_feed, "NEXT_WARNING_S", 0.01)
    monkeypatch.setattr(client_feed, "SILENCE_S", 0.2)
    monkeypatch.setattr(client_feed, "FIRST_ATTACH_S", 0.5)
    caplog.set_level(logging.WARNING, "overlord")
    return caplog


def test_a_rank_attaches_however_long_a_step_takes_to_plan(impatient, tmp_path, cache):
    def one_row_is_slow(row, come=str(tmp_path / "come")):
        while row["ids"][0] == 1100 and not os.path.exists(come):
            time.sleep(0.02)
        return {"tokens": row["ids"]}

    rows = write_ids(tmp_path / "rows.jsonl", [8] * 400)
    sample = ol.Custom(one_row_is_slow, columns=["ids"], process=False, name="slow", code_digest="slow")
    source = ol.Source("slow", str(rows), sample=sample, shuffle_bytes=0)
    job = ol.Job(sources=[source], batch=ol.Batch(64, global_samples=16), seed=1)
    got: list[list[int]] = [[], []]

    def train(rank: int) -> None:
        with ol.connect(service.address, rank) as client:
            got[rank] = [next(client).index for _ in range(24)]

    with ol.launch(job, mesh="dp=2", cache=cache) as service:
        ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        ranks[0].start()
        assert until(lambda: (service.status()["rates"] or {}).get("wait_share", 0) > 0.5)  # for the slow row
        ranks[1].start()
        assert until(lambda: "rank 1 (attaching) waits for the service" in impatient.text)
        time.sleep(1.0)  # longer than an absent service would be waited for
        (tmp_path / "come").touch()
        for thread in ranks:
            thread.join()
    assert got == [list(range(24))] * 2
    told = [one.getMessage() for one in impatient.records if "waits for the service" in one.getMessage()]
    assert told and all("it is up, and busy with something else" in one for one in told)


@pytest.mark.slow
def test_a_client_is_told_what_a_service_that_starts_again_does(impatient, ids_job, cache):
    with ol.launch(ids_job, cache=cache) as service, service.client() as client:
        next(client)
        os.kill(service.pid, signal.SIGKILL)
        seen = [next(client).index for _ in range(8)]
        assert seen == list(range(1, 9))
        assert until(lambda: service.status()["service"]["state"] == "up")
    told = [one.getMessage() for one in impatient.records if "waits for the service" in one.getMessage()]
    assert any("it is being started again (its process loads what it needs)" in one for one in told), told
    assert not any("it is starting" in one for one in told)


def test_a_rank_that_attaches_waits_for_a_service_that_is_being_started_however_long(impatient, tmp_path):
    """Trainers that were lost together with their service come back first, and its start may take minutes."""
    with socket.socket(socket.AF_UNIX) as killed:  # one that was killed leaves its socket
        killed.bind(str(tmp_path / "host-0-of-1"))
    began = time.monotonic()
    with pytest.raises(ServiceLost, match="no service answers"):
        ol.connect(f"unix://{tmp_path}", 0, step=2)
    assert time.monotonic() - began > client_feed.FIRST_ATTACH_S
    (tmp_path / "host-0-of-1").unlink()  # as while a constructor host is replaced
    began = time.monotonic()
    with pytest.raises(ServiceLost, match="no constructor host"):
        ol.connect(f"unix://{tmp_path}", 0, step=2)
    assert time.monotonic() - began > client_feed.FIRST_ATTACH_S
    client_feed.write_start(tmp_path, "opening sources, 120 of 306", again=True)
    over = threading.Timer(3.0, client_feed.write_failure, (tmp_path, ServiceLost("it died six times")))
    over.start()
    with pytest.raises(ServiceLost, match="it died six times"):
        ol.connect(f"unix://{tmp_path}", 0, step=2)
    over.join()
    assert "it is being started again (opening sources, 120 of 306)" in impatient.text
