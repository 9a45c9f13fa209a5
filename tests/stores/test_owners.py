"""One owner at a time: claims, fencing, refusals, and which owners count as alive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import overlord as ol
from overlord.errors import Fenced, Succeeded
from overlord.stores.owners import claim
from overlord.stores.places import open_place
from overlord.stores.store import Store


@pytest.fixture
def place(tmp_path):
    return open_place(str(tmp_path))


def test_numbers_grow_and_the_old_owner_is_fenced(place):
    first = claim(place, "a")
    first.check()
    second = claim(place, "a")
    assert (first.number, second.number) == (1, 2)
    with pytest.raises(Succeeded, match=r"a successor has taken over .*pid"):
        first.check()
    second.check()
    first.close()  # it has nothing to close any more
    second.check()
    assert json.loads(place.read("owner-000002"))["generation"] == 2


def test_a_service_that_lost_its_store_to_another_one_has_no_successor(place):
    first = claim(place, "a")
    first.close()
    claim(place, "b")
    with pytest.raises(Fenced, match="another service has taken over") as lost:
        first.check()
    assert not isinstance(lost.value, Succeeded)


def test_a_fenced_store_promises_nothing(place):
    old = Store(place, "a")
    old.begin({"step": 0}, horizon=64)
    old.journal.append({"kind": "report", "step": 0}, durable=True)
    new = Store(place, "a")
    found = new.newest()
    new.go_on(found)
    with pytest.raises(Fenced):
        old.journal.append({"kind": "report", "step": 1}, durable=True)
    with pytest.raises(Fenced):
        old.save({"step": 16}, old.journal.mark(), horizon=80)
    assert [r["step"] for r in new.newest().records] == [0]


def test_a_living_service_keeps_its_store(place):
    owner = claim(place, "a")
    with pytest.raises(ol.StoreError, match=rf"belongs to service a \(pid {os.getpid()} .*alive.*another store"):
        claim(place, "b")
    owner.check()
    owner.close()
    assert claim(place, "b").number == 2


def test_a_dead_process_gives_its_store_up(place, tmp_path):
    script = "import sys; from overlord.stores.owners import claim; from overlord.stores.places import open_place; "
    script += "claim(open_place(sys.argv[1]), 'a')"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    assert claim(place, "b").number == 2


@pytest.mark.parametrize("stopped", [False, True])
def test_a_service_whose_launcher_is_gone_is_waited_for(place, tmp_path, stopped):
    script = (
        "import sys, time; from overlord.stores.owners import claim; from overlord.stores.places import open_place; "
    )
    script += "claim(open_place(sys.argv[1]), 'a'); print(flush=True); time.sleep(0.3)"
    gone = subprocess.Popen(["true"])
    gone.wait()
    variables = {**os.environ, "OVERLORD_LAUNCHER": str(gone.pid)}
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables) as service:
        service.stdout.readline()
        if stopped:  # after its launcher had gone: the kernel does not let it go on again
            service.send_signal(signal.SIGSTOP)
        assert claim(place, "b").number == 2
        assert service.wait() == 0


def test_a_service_whose_launcher_lives_keeps_its_store(place, tmp_path):
    script = "import sys; from overlord.stores.owners import claim; from overlord.stores.places import open_place; "
    script += "claim(open_place(sys.argv[1]), 'a'); print(flush=True); sys.stdin.read()"
    variables = {**os.environ, "OVERLORD_LAUNCHER": str(os.getpid())}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
    ) as service:
        service.stdout.readline()
        with pytest.raises(ol.StoreError, match=f"kill {service.pid}"):
            claim(place, "b")
        service.stdin.close()


def test_another_process_with_its_number_is_not_it(place):
    claim(place, "a")
    record = json.loads(place.read("owner-000001"))
    place.write("owner-000001", json.dumps({**record, "started": record["started"] + 1}).encode())
    assert claim(place, "b").number == 2


@pytest.mark.parametrize("silent", [False, True])
def test_an_owner_on_another_host_lives_as_long_as_it_says_so(place, tmp_path, silent):
    claim(place, "a")
    record = json.loads(place.read("owner-000001"))
    place.write("owner-000001", json.dumps({**record, "kernel": "elsewhere", "host": "far"}).encode())
    place.write("alive", b"{}")
    if silent:
        for name in ("alive", "owner-000001"):
            os.utime(tmp_path / name, (time.time() - 100,) * 2)
        assert claim(place, "b").number == 2
    else:
        with pytest.raises(ol.StoreError, match=r"pid \d+ on far.*try again in \d+ s"):
            claim(place, "b")
    assert not list(tmp_path.glob("clock-*"))


def test_files_removed_while_they_are_listed_hide_no_others(place, tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        place.write(name, b"x")
    listed = os.scandir

    @contextlib.contextmanager
    def slow(folder):
        with listed(folder) as entries:
            found = list(entries)
        (tmp_path / "b").unlink()
        yield found

    monkeypatch.setattr(os, "scandir", slow)
    assert place.names() == {"a": 1, "c": 1}


def owns(one):
    try:
        one.check()
    except Fenced:
        return False
    return True


def test_of_many_that_claim_at_once_all_get_another_number(place):
    claims, overtaken = [], []

    def run():
        try:
            claims.append(claim(place, "a"))
        except Fenced as error:  # another one came before it could look whether it was the newest
            overtaken.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [one.number for one in claims]
    assert len(set(numbers)) == len(numbers) == 8 - len(overtaken)
    assert [one.number for one in claims if owns(one)] == [max(numbers)], "no owner comes after the last one"


def test_records_of_owners_do_not_grow_for_ever(place, tmp_path):
    first = claim(place, "a")
    for _ in range(10):
        claim(place, "a")
    assert [path.name for path in tmp_path.glob("owner-*")] == ["owner-000011"]
    with pytest.raises(Fenced):
        first.check()


def test_a_damaged_record_is_nobodys(place):
    place.write("owner-000007", b"{")
    assert claim(place, "b").number == 8


def test_a_process_suspended_while_records_were_removed_owns_nothing(place, monkeypatch):
    """It saw owner 1, and creates the record of owner 2 when that one came and went."""
    claim(place, "a")
    create = place.create

    def late(name, data):
        monkeypatch.undo()
        others = [claim(place, "a") for _ in range(4)]
        others[-1].close()
        assert not place.exists(name), "otherwise it proves nothing"
        return create(name, data)

    monkeypatch.setattr(place, "create", late)
    with pytest.raises(Fenced, match="a successor has taken over"):
        claim(place, "a")
    newest = claim(place, "a")
    newest.check()
    kept = [name for name in place.names() if name.startswith("owner-")]
    assert kept == [f"owner-{newest.number:06d}"]


def test_a_number_that_is_given_twice_revives_no_owner(place, monkeypatch):
    """Owner 2 was stopped and replaced; a process that had seen only owner 1 creates the record of owner 2 again."""
    claim(place, "a")
    create, stopped = place.create, []

    def late(name, data):
        monkeypatch.undo()
        stopped.append(claim(place, "a"))
        claim(place, "a")
        assert stopped[0].number == 2 and name == "owner-000002" and not place.exists(name)
        return create(name, data)

    monkeypatch.setattr(place, "create", late)
    with pytest.raises(Fenced):
        claim(place, "a")
    assert place.exists("owner-000002"), "otherwise it proves nothing"
    with pytest.raises(Fenced):
        stopped[0].check()


def test_an_owner_without_its_record_writes_none(place):
    first = claim(place, "a")
    for _ in range(2):
        newest = claim(place, "a")
    first.close()
    assert not place.exists("owner-000001")
    with pytest.raises(Fenced):
        first.check()
    newest.check()


def test_threads_and_processes_that_write_one_file_do_not_disturb_each_other(place, tmp_path):
    """The planner's host writes its owner's beat from two threads; a stopped owner may do so beside its successor."""
    code = (
        "import sys; from overlord.stores.places import open_place\n"
        "place = open_place(sys.argv[1])\n"
        "for _ in range(200): place.write('alive', b'other')"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    failed: list[BaseException] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(200):
                place.write("alive", data)
                assert place.read("alive") in (b"one", b"two", b"other")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=[data]) for data in (b"one", b"two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.wait() == 0
    assert not failed
    assert [path.name for path in tmp_path.iterdir()] == ["alive"]
