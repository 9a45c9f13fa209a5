"""Replay: any kept step of a stored run again, as it was delivered; the store stays byte for byte as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import overlord as ol
from overlord.job_files import JobFile
from overlord.roles.drawer import Drawer
from overlord.session import service_options

MESH = ol.ClientPlaceTree(dp=2, cp=2)


def content_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def digests_of(step: ol.Client) -> tuple[str, str, list[str]]:
    return step.order_digest, step.plan_digest, [batch.digest() for batch in step.microbatches]


@pytest.fixture(scope="module")
def run(mixed_job, cache, tmp_path_factory):
    """A run of 40 steps with a change of the mixture: its store, and what every rank got."""
    store, delivered = tmp_path_factory.mktemp("run") / "store", {}
    with ol.launch(mixed_job, mesh=MESH, runtime="inline", cache=cache, store=store) as service:
        clients = [service.client(rank) for rank in range(MESH.world_size)]
        for number in range(40):
            if number == 20:
                service.set_mixture(ol.Mixture(dict.fromkeys(mixed_job.names, 1.0), level="token"))
            delivered[number] = [digests_of(next(client)) for client in clients]
    return store, delivered


@pytest.mark.parametrize("step", [0, 1, 15, 16, 17, 21, 39])
def test_a_step_is_what_was_delivered_and_nothing_is_written(run, mixed_job, cache, step):
    store, delivered = run
    before = content_of(store)
    with ol.replay(store, step, cache=cache) as service:
        found = [digests_of(next(service.client(rank))) for rank in range(MESH.world_size)]
    assert found == delivered[step]
    assert content_of(store) == before


def test_steps_go_on_behind_it_also_in_a_store_that_cannot_be_written(run, mixed_job, cache):
    store, delivered = run
    modes = [(path, path.stat().st_mode) for path in (store, *store.rglob("*"))]
    for path, mode in modes:
        path.chmod(mode & ~0o222)
    try:
        with (
            ol.replay(str(store), 30, mixed_job, mesh="dp=2,cp=2", cache=cache) as service,
            service.client(1) as client,
        ):
            assert [digests_of(next(client)) for _ in range(10)] == [delivered[step][1] for step in range(30, 40)]
    finally:
        for path, mode in modes:
            path.chmod(mode)


def test_steps_behind_it_have_the_changes_and_reports_that_the_run_had(ids_job, cache, tmp_path):
    few, later = ids_job.replace(sources=ids_job.sources[:2]), ids_job.sources[2].replace(weight=None)
    learning = few.replace(mixture=ol.Mixture(learn=ol.Learn("odm", warmup=2)), lag=4)
    with ol.launch(learning, mesh="dp=2", prefetch=1, runtime="inline", cache=cache, store=tmp_path) as service:
        client, delivered = service.client(0), []
        for number in range(30):
            if number == 8:
                service.skip_steps(2)
            if number == 12:
                service.add_source(later, weight=2.0)
            if number == 16:
                service.set_mixture({"a": 1.0, "b": 3.0, "c": 1.0})
            if number == 20:
                service.park_source("b")
            if number == 24:
                service.reshard(ol.ClientPlaceTree(dp=1))
            delivered.append(digests_of(next(client)))
            client.report(number, {"loss/a": 2.0, "loss/b": 1.0 + number})
    for first in (1, 10, 18):
        with ol.replay(tmp_path, first, cache=cache) as again:
            client = again.client(0)
            assert [digests_of(next(client)) for _ in range(first, 30)] == delivered[first:]


def test_a_run_that_still_goes_on(ids_job, cache, tmp_path):
    with ol.launch(ids_job, cache=cache, store=tmp_path) as service, service.client() as client:
        delivered = [digests_of(next(client)) for _ in range(40)]
        with ol.replay(tmp_path, 3, ids_job, cache=cache) as again:
            assert digests_of(next(again.client())) == delivered[3]
        delivered.append(digests_of(next(client)))
    with ol.replay(tmp_path, 40, ids_job, cache=cache) as again:
        assert digests_of(next(again.client())) == delivered[40]
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("lineage-")) == ["lineage-0001"]


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"step": 41}, ol.StateError, r"step 41 was asked for.*holds the steps up to"),
        ({"step": -1}, ol.SpecError, "replay: -1 is not a number"),
        ({"step": "3"}, ol.SpecError, "replay: '3' is not a number"),
        ({"mesh": "dp=4"}, ol.StateError, r"step 5 came out with another plan.*mesh, strategy and layout"),
        ({"strategy": "packed"}, ol.StateError, "another plan"),
        ({"store": "/nowhere/at/all"}, ol.StateError, r"'/nowhere/at/all' is no folder"),
    ],
    ids=str,
)
def test_what_cannot_be_replayed_is_refused(run, mixed_job, cache, changes, error, why):
    given = {"store": run[0], "step": 5, "mesh": MESH} | changes
    before = content_of(run[0])
    with pytest.raises(error, match=why):
        ol.replay(given.pop("store"), given.pop("step"), mixed_job, cache=cache, **given)
    assert content_of(run[0]) == before
    assert not Path("/nowhere").exists()


def test_a_job_with_functions_is_given(ids_job, cache, tmp_path):
    def strategy(buffer, tree):
        return ol.DGraph.from_buffer(buffer, tree).distribute("DP").cost(ol.costs.tokens).balance("zigzag").plan()

    with ol.launch(ids_job, strategy=strategy, mesh="dp=2", runtime="inline", cache=cache, store=tmp_path) as service:
        delivered = digests_of(next(service.client()))
    with pytest.raises(ol.SpecError, match=r"does not hold the job of its run.*Give job="):
        ol.replay(tmp_path, 0, cache=cache)
    with ol.replay(tmp_path, 0, ids_job, strategy=strategy, mesh="dp=2", cache=cache) as service:
        assert digests_of(next(service.client())) == delivered


def test_credentials_are_not_kept(ids_job, cache, tmp_path):
    source = ids_job.sources[0].replace(storage_options={"anonymous": True, "secret_key": "hidden"})
    job = ids_job.replace(sources=[source])
    assert "hidden" not in str(service_options(job, JobFile(job).call({"store": str(tmp_path)})).job_text)


def test_an_empty_folder_and_another_job(tmp_path, run, ids_job, cache):
    with pytest.raises(ol.StateError, match="holds no snapshot; there is nothing to replay"):
        ol.replay(tmp_path, 0, ids_job, cache=cache)
    with pytest.raises(ol.StateError):
        ol.replay(run[0], 0, ids_job, cache=cache)


def test_the_state_at_every_step_is_in_the_journal_also_after_changes(ids_job, cache, tmp_path, monkeypatch):
    """What the journal says a step changed is what drawing it again from a snapshot changes."""
    few, later = ids_job.replace(sources=ids_job.sources[:2]), ids_job.sources[2].replace(weight=None)
    states = {}
    with ol.launch(few, mesh="dp=2", runtime="inline", cache=cache, store=tmp_path) as service:
        client = service.client(0)
        for number in range(30):
            if number == 5:
                service.add_source(later, weight=2.0)
            if number == 9:
                service.skip_steps(2)
            if number == 13:
                service.set_mixture({"a": 1.0, "b": 3.0, "c": 1.0})
            if number == 20:
                service.park_source("b")
            next(client)
            states[number + 1] = client.state_dict()
    drawn: list[int] = []
    draw = Drawer.draw
    monkeypatch.setattr(Drawer, "draw", lambda self: drawn.append(self.state.step) or draw(self))
    for number in (1, 6, 9, 11, 14, 15, 21, 29):
        with ol.replay(tmp_path, number, cache=cache) as service:
            found = service.client(0).state_dict(number)
            assert {key: found[key] for key in ("step", "columns", "sources", "mixer")} == {
                key: states[number][key] for key in ("step", "columns", "sources", "mixer")
            }
    assert drawn == [1, 6, 9, 11, 14, 15, 21, 29]
