"""The journal and the snapshots survive torn and flipped bytes, and say plainly when a disk fails."""

from __future__ import annotations

import pytest

import overlord as ol
from overlord.stores.checkpoints import KEEP, CheckpointFolder
from overlord.stores.journal import Journal, read_journal


def _fill(path, count):
    with Journal(path) as journal:
        for step in range(count):
            journal.append({"step": step}, durable=step % 3 == 0)


def test_records_come_back_in_order(tmp_path):
    _fill(tmp_path / "j", 10)
    assert [record["step"] for record in read_journal(tmp_path / "j")] == list(range(10))


@pytest.mark.parametrize("cut", range(1, 18))
def test_a_torn_tail_is_dropped_and_written_over(tmp_path, cut):
    path = tmp_path / "j"
    _fill(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [record["step"] for record in read_journal(path)] == [0, 1]
    with Journal(path) as journal:
        journal.append({"step": 99}, durable=True)
    assert [record["step"] for record in read_journal(path)] == [0, 1, 99]


def test_a_flipped_bit_ends_the_journal_there(tmp_path):
    path = tmp_path / "j"
    _fill(path, 5)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert len(list(read_journal(path))) == 2


def test_damaged_snapshot_falls_back_to_the_one_before(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in range(6):
        folder.save({"step": step})
    assert len(list(tmp_path.glob("snapshot-*"))) == KEEP
    newest = sorted(tmp_path.glob("snapshot-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"X")
    assert folder.newest() == {"step": 4}
    assert CheckpointFolder(tmp_path / "none").newest() is None


def test_a_store_that_cannot_be_written_is_explained(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    with pytest.raises(ol.StoreError, match="cannot be written"):
        CheckpointFolder(blocker / "store")
    with pytest.raises(ol.StoreError, match="journal"):
        Journal(tmp_path / "missing" / "journal")


def _snapshots(folder):
    return sorted(int(path.stem.removeprefix("snapshot-")) for path in folder.glob("snapshot-*.json"))


def test_rolling_back_keeps_the_other_future_aside(ids_job, cache, tmp_path):
    def run(steps, state):
        with ol.launch(ids_job, runtime="inline", cache=cache, store=tmp_path, state=state) as service:
            client = service.client()
            for _ in range(steps):
                next(client)
            return client.state_dict()

    early = run(5, None)
    run(35, early)
    assert _snapshots(tmp_path) == [16, 32, 39]
    run(2, early)
    assert _snapshots(tmp_path) == [6]
    kept = [record["step"] for record in read_journal(tmp_path / "journal") if record["kind"] == "plan"]
    assert kept == sorted(set(kept)) and kept[-1] < 8
    asides = {p.name: [r["step"] for r in read_journal(p) if r["kind"] == "plan"] for p in tmp_path.glob("*.aside-*")}
    assert [max(steps) for steps in asides.values()] and max(map(max, asides.values())) >= 39
