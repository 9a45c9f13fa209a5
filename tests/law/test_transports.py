"""One runtime, four transports: the same promises by direct calls, with threads, with processes and on Ray."""

from __future__ import annotations

import os
import threading

import pytest
from tests.conftest import status_at, write_ids

import overlord as ol
from overlord.core.client_messages import AddSource, ChangeSource, GetMixture
from overlord.core.messages import HandedOver, HandOver
from overlord.roles.changes import source_to_json
from overlord.runtimes.transport.direct import DirectPeer

Tree = ol.ClientPlaceTree


@pytest.fixture(params=["inline", "threads", "processes", pytest.param("ray", marks=pytest.mark.ray)])
def transport(request):
    """What `launch` is told for each transport."""
    if request.param == "ray":
        return {"runtime": "ray", "address": request.getfixturevalue("ray_address")}
    return {
        "inline": {"runtime": "inline"},
        "threads": {"runtime": "local"},
        "processes": {"runtime": "local", "loader_hosts": 2},
    }[request.param]


def test_what_a_service_promises(ids_job, cache, tmp_path, transport):
    """Changes are made once by their id, a mesh is announced, and what is wrong is refused with the same errors."""
    store, new = tmp_path / "store", write_ids(tmp_path / "new.jsonl", range(3, 30))
    source = ol.Source("new", str(new), sample=ol.Text("ids", tokenized=True))
    before = set(os.listdir(tmp_path))
    with ol.launch(ids_job, mesh=Tree(dp=2), cache=cache, store=store, **transport) as service:
        clients = [service.client(rank) for rank in range(2)]
        order = [next(client).order_digest for client in clients]
        assert order[0] == order[1]

        runtime = service._runtime  # a change that is asked for again, as after a lost answer
        for _ in range(2):
            assert runtime.ask(AddSource(source_to_json(source), 1.0, 12, "one")).step == 12
            assert runtime.ask(ChangeSource("park_source", "b", 13, "two")).step == 13
        with pytest.raises(ol.SpecError, match="new"):
            service.add_source(source)

        mixture = ol.Mixture.from_mapping(runtime.ask(GetMixture()).content)
        assert (mixture.level, mixture.temperature) == (ids_job.mixture.level, ids_job.mixture.temperature)
        assert service.set_mixture({"a": 1, "b": 1, "c": 1}, at_step=9) == 9

        assert service.reshard(Tree(dp=1), at_step=10) == 10
        assert service.mesh == Tree(dp=1)
        meshes = {}
        for step in range(1, 14):
            for rank, client in enumerate(clients):
                found = next(client, None)
                assert (found is None) == (rank == 1 and step >= 10)
                if rank == 0:
                    assert found.index == step
                    meshes[step] = (found.mesh, client.mesh)
        assert [meshes[step][0].dp for step in (8, 9, 10, 11)] == [2, 2, 1, 1]
        assert meshes[9][1] == Tree(dp=1), "the mesh of the next step is announced with the last one of the old mesh"

        status = status_at(service, 13)
        assert status["runtime"] == transport["runtime"] and status["clients"]["0"] == 13
        assert set(status["sources"]) == {"a", "b", "c", "new"} and status["sources"]["b"]["parked"]["since"] == 13
        with pytest.raises(ol.SpecError, match="rank 2 is not in the mesh"):
            service.client(2)
        plan = service.plan_raw(12)
        assert plan is not None and plan.draw.names[-1] == "new"
    with pytest.raises(ol.ClosedError):
        service.status()
    assert set(os.listdir(tmp_path)) == before | {"store"}


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("wrong", ["files", "columns", "prefetch"])
@pytest.mark.slow_but_inline
def test_what_is_wrong_with_a_launch_is_told_as_it_is(ids_job, cache, tmp_path, transport, wrong):
    job, more = ids_job, {}
    if wrong == "files":
        job, kind, words = _with_path(job, tmp_path / "nothing"), ol.SpecError, "nothing"
    elif wrong == "columns":
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "no ids"}\n')
        job, kind, words = _with_path(job, path), ol.SpecError, "ids"
    else:
        more, kind, words = {"prefetch": ids_job.lag}, ol.SpecError, "lag is"
    with pytest.raises(kind, match=words) as raised:
        ol.launch(job, cache=cache, **transport, **more)
    assert type(raised.value).__module__ == "overlord.errors"


def _with_path(job, path):
    return job.replace(sources=[source.replace(path=str(path)) for source in job.sources[:1]])


def test_inline_is_one_thread_and_encodes_nothing(ids_job, cache, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a message was encoded")

    handed = []
    finish = DirectPeer.finish

    def watched(peer, answer):
        handed.append(finish(peer, answer))
        return handed[-1]

    monkeypatch.setattr(DirectPeer, "finish", watched)
    monkeypatch.setattr("overlord.runtimes.transport.codec.frame_of", refuse)
    monkeypatch.setattr("overlord.runtimes.transport.codec.Decoder.message", refuse)
    monkeypatch.setattr("overlord.runtimes.hosts.peers.plan_to_bytes", refuse)
    threads = threading.active_count()
    with ol.launch(ids_job, runtime="inline", cache=cache) as service:
        for step, _ in zip(service.client(), range(4), strict=False):
            assert threading.active_count() == threads and step.microbatches
            assert all(len(batch["input_ids"]) for batch in step.microbatches)
    assert handed and all(isinstance(one, HandedOver) for one in handed)
    columns = [column for one in handed for payload in one.payloads for column in (payload.tokens, payload.loss)]
    assert not any(column.values.flags.writeable for column in columns), "a role could change what another one keeps"
    assert HandOver.__struct_config__.frozen
