"""Any prefix, tear or flipped bit of a journal or a snapshot leaves the rest good, and nothing wrong counts as good."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.stores.journal import Journal, encode, read_journal
from overlord.stores.places import LocalPlace, open_place
from overlord.stores.store import Snapshot, Store, newest_lineage

FOLDER = "lineage-0001"


def journal_in(place, owner=1, found=None, check=lambda: None):
    journal = Journal(place, check)
    journal.begin(FOLDER, owner, found)
    return journal


def steps_of(place):
    return [record["step"] for record in read_journal(place, FOLDER).records]


@pytest.fixture
def place(tmp_path):
    return open_place(str(tmp_path))


def test_records_come_back_in_order_and_what_waits_goes_along(place):
    journal = journal_in(place)
    for step in range(10):
        journal.append({"kind": "x", "step": step}, durable=step % 3 == 2)
    assert steps_of(place) == list(range(9)), "the last one waits"
    journal.commit()
    journal.rotate()
    journal.append({"kind": "x", "step": 10}, durable=True)
    assert steps_of(place) == list(range(11))
    assert len(read_journal(place, FOLDER).segments) == 2


LINES = [encode({"kind": "x", "step": step, "text": "a" * step}) for step in range(5)]
HEAD = encode({"kind": "segment", "step": -1, "version": 1, "before": {}, "cut": {}})


@given(st.integers(0, len(HEAD + b"".join(LINES))))
def test_any_prefix_gives_the_records_that_are_whole(tmp_path_factory, length):
    folder = tmp_path_factory.mktemp("store") / FOLDER
    folder.mkdir()
    whole = HEAD + b"".join(LINES)
    (folder / "journal-000001-00000001").write_bytes(whole[:length])
    ends = [len(HEAD + b"".join(LINES[: n + 1])) for n in range(5)]
    found = read_journal(open_place(str(folder.parent)), FOLDER)
    assert [record["step"] for record in found.records] == [n for n in range(5) if ends[n] <= length]
    assert found.damaged == 0


@given(st.lists(st.integers(1, 900), min_size=1, max_size=6), st.sets(st.integers(0, 7)))
def test_blocks_of_a_promised_ones_successor_may_be_lost_in_any_order(tmp_path_factory, sizes, lost):
    """The machine fails within a sync: some blocks of the last write are there, others are zeros, and no line lies."""
    folder = tmp_path_factory.mktemp("store") / FOLDER
    folder.mkdir()
    place = open_place(str(folder.parent))
    journal = Journal(place, lambda: None)
    journal.begin(FOLDER, owner=1)
    journal.append({"kind": "report", "step": 0}, durable=True)
    path = folder / "journal-000001-00000001"
    promised = path.read_bytes().rindex(b"\n") + 1
    for step, size in enumerate(sizes, 1):
        journal.append({"kind": "plan", "step": step, "digest": "a" * size}, durable=False)
    journal.commit()
    data = bytearray(path.read_bytes())
    for block in lost:
        stretch = slice(max(promised, 512 * block), max(promised, 512 * (block + 1)))
        data[stretch] = bytes(stretch.stop - stretch.start)
    path.write_bytes(data)
    found = read_journal(place, FOLDER)
    assert found.records[0] == {"kind": "report", "step": 0}
    assert all(record == {"kind": "plan", "step": at, "digest": "a" * sizes[at - 1]}
               for record in found.records[1:] for at in [record["step"]])  # fmt: skip
    assert found.damaged == 0
    journal.close()


@given(st.integers(0, len(b"".join(LINES)) * 8 - 1))
def test_any_flipped_bit_loses_what_it_is_in_and_nothing_else(tmp_path_factory, bit):
    folder = tmp_path_factory.mktemp("store") / FOLDER
    folder.mkdir()
    data = bytearray(b"".join(LINES))
    data[bit // 8] ^= 1 << bit % 8
    (folder / "journal-000001-00000001").write_bytes(HEAD + data)
    hit = next(n for n in range(5) if len(b"".join(LINES[: n + 1])) > bit // 8)
    found = read_journal(open_place(str(folder.parent)), FOLDER)
    left = [record["step"] for record in found.records]
    at_the_end = bit // 8 == len(b"".join(LINES[: hit + 1])) - 1  # the newline: two lines have become one
    assert left == [n for n in range(5) if n != hit and not (at_the_end and n == hit + 1)]
    assert found.damaged >= (0 if at_the_end and hit == 4 else 1)


@given(st.integers(0, 400))
def test_a_damaged_snapshot_is_never_good(bit):
    good = Snapshot({"step": 16, "reports": {}}, 0, "s", "journal-000001-00000001", 80).to_bytes()
    data = bytearray(good)
    data[(bit // 8) % len(good)] ^= 1 << bit % 8
    assert Snapshot.from_bytes(bytes(data), "here") is None
    assert Snapshot.from_bytes(good[: bit % len(good)], "here") is None


def test_a_snapshot_of_a_later_version_is_refused():
    body = json.dumps({"version": 99}).encode()

    with pytest.raises(ol.StateError, match="version 99"):
        Snapshot.from_bytes(b"%08x\n%s" % (zlib.crc32(body), body), "here")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner)))  # fmt: skip
def test_any_record_comes_back(value):
    record = {"kind": "report", "step": 3, "value": value}
    line = encode(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert repr(json.loads(line.partition(b" ")[2])) == repr(record)


class Failing(LocalPlace):
    """A disk that is full in the middle of a write, when told so."""

    def __init__(self, folder, keep_bytes=None):
        super().__init__(folder)
        self.keep_bytes = keep_bytes
        self.full = False

    def open_append(self, name):
        return FailingFile(self, super().open_append(name), name)

    def write(self, name, data):
        if self.full:
            raise ol.StoreError("no space left on device")
        super().write(name, data)


class FailingFile:
    def __init__(self, place, file, name):
        self.place, self.file, self.name = place, file, name

    def append(self, data):
        if self.place.full:
            with open(f"{self.place.name}/{self.name}", "ab") as file:
                file.write(data[: self.place.keep_bytes])
            raise ol.StoreError("no space left on device")
        self.file.append(data)

    def close(self):
        self.file.close()


@pytest.mark.parametrize("keep_bytes", [0, 1, 20, None])
def test_what_failed_is_never_glued_to_what_comes_next(tmp_path, keep_bytes):
    """Also a record that reached the disk whole was not promised, and does not count."""
    place = Failing(tmp_path, keep_bytes)
    journal = journal_in(place)
    journal.append({"kind": "x", "step": 0}, durable=True)
    journal.append({"kind": "plan", "step": 1}, durable=False)
    place.full = True
    for _ in range(2):
        with pytest.raises(ol.StoreError):
            journal.append({"kind": "x", "step": 7}, durable=True)
    place.full = False
    journal.append({"kind": "x", "step": 2}, durable=True)
    assert steps_of(place) == [0, 1, 2], "the plan record waited, the failed one is gone"
    assert read_journal(place, FOLDER).damaged == 0


def test_what_a_fenced_owner_writes_later_is_void(place):
    old = journal_in(place, owner=1)
    old.append({"kind": "x", "step": 0}, durable=True)
    new = journal_in(place, owner=2, found=read_journal(place, FOLDER))
    old.append({"kind": "zombie", "step": 1}, durable=True)
    old.rotate()
    old.append({"kind": "zombie", "step": 2}, durable=True)
    new.append({"kind": "x", "step": 3}, durable=True)
    assert steps_of(place) == [0, 3]
    third = journal_in(place, owner=3, found=read_journal(place, FOLDER))
    third.append({"kind": "x", "step": 4}, durable=True)
    assert steps_of(place) == [0, 3, 4]


def save(store, step, *, mark=None):
    store.save({"step": step}, mark or store.journal.mark(), horizon=step + 64)


def test_a_damaged_snapshot_falls_back_to_the_one_before_and_its_journal(place, tmp_path, caplog):
    store = Store(place, "s")
    store.begin({"step": 0}, horizon=64)
    for step in range(40):
        store.journal.append({"kind": "plan", "step": step}, durable=False)
        if step % 16 == 0 and step:
            save(store, step)
    store.close()
    newest = tmp_path / FOLDER / "snapshot-000000000032.json"
    newest.write_bytes(newest.read_bytes()[:-1] + b"X")
    found = newest_lineage(place)
    assert found.newest.step == 16
    assert [r["step"] for r in found.records if r["kind"] == "plan"] == list(range(40))
    assert "is damaged and was skipped" in caplog.text


def test_a_report_that_comes_while_a_snapshot_is_taken_is_behind_it(place):
    """It is of an earlier step than the snapshot, and the snapshot does not hold it."""
    store = Store(place, "s", keep=16)
    store.begin({"step": 0}, horizon=64)
    store.journal.rotate()
    mark = store.journal.mark()
    store.journal.append({"kind": "report", "step": 30}, durable=True)  # after the state was taken
    store.save({"step": 32}, mark, horizon=96)
    assert newest_lineage(place).newest.segment == mark
    save(store, 48)
    found = newest_lineage(place)
    assert [snapshot.step for snapshot in found.snapshots] == [32, 48]
    assert {"kind": "report", "step": 30} in found.records


def test_compaction_keeps_what_can_be_asked_for(place, tmp_path):
    store = Store(place, "s", keep=64)
    store.begin({"step": 0}, horizon=64)
    sizes = {}
    for step in range(1, 513):
        store.journal.append({"kind": "plan", "step": step - 1, "digest": "a" * 60}, durable=False)
        store.journal.append({"kind": "report", "step": step - 1}, durable=True)
        if step % 16 == 0:
            save(store, step)
            sizes[step] = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    assert sizes[512] <= 1.1 * sizes[256]
    store.journal.close()  # the newest segment has room for what comes
    assert store.nbytes == sum(p.stat().st_size for p in (tmp_path / FOLDER).iterdir())
    found = newest_lineage(place)
    assert found.snapshots[0].step == 512 - 64
    reports = [r["step"] for r in found.records if r["kind"] == "report"]
    assert reports[-64:] == list(range(448, 512))
    assert len(reports) < 120


def test_old_lineages_go(place, tmp_path):
    for number in range(6):
        store = Store(place, f"service {number}")
        store.begin({"step": number}, horizon=64)
        store.close()
    assert sorted(p.name for p in tmp_path.glob("lineage-*")) == [f"lineage-000{n}" for n in range(3, 7)]
    assert newest_lineage(place).newest.step == 5
    for snapshot in (tmp_path / "lineage-0006").glob("snapshot-*"):
        snapshot.write_bytes(b"")
    assert newest_lineage(place).newest.step == 4, "a lineage without a good snapshot does not count"


def test_a_store_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ol.StoreError, match=r"cannot be written.*Free space"):
        open_place(str(tmp_path / "file" / "store"))


def test_a_relative_path_is_refused_and_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ol.SpecError, match="relative path"):
        open_place("0500e974ba1b45e1be0a85ef86e00945")
    assert not list(tmp_path.iterdir())
