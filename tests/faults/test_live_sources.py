"""Sources that come to a service of several processes, also while its roles are killed."""

from __future__ import annotations

import os
import signal

import pytest

import overlord as ol
from overlord.core.plan import chain_digest
from tests.conftest import write_ids


def run(job, newcomer, cache, disturb=None, **where) -> tuple[str, list[str]]:
    with ol.launch(job, cache=cache, **where) as service, service.client() as client:
        plans, contents, names = [], [], ()
        assert service.add_source(newcomer, weight=2.0, at_step=60) == 60
        for step in range(80):
            if disturb is not None:
                disturb(service, step)
            opened = next(client)
            plans.append(opened.plan_digest)
            contents += [batch.digest() for batch in opened.microbatches]
            names = opened.source_names
        return chain_digest(plans), chain_digest(contents), list(names)


@pytest.mark.parametrize("role", [None, pytest.param("planner", marks=pytest.mark.slow),
                                  pytest.param("constructor", marks=pytest.mark.slow),
                                  pytest.param("loader", marks=pytest.mark.slow)])  # fmt: skip
def test_a_source_comes_to_several_hosts(ids_job, cache, tmp_path, role):
    rows = write_ids(tmp_path / "new.jsonl", [7] * 50)
    newcomer = ol.Source("new", str(rows), sample=ol.Text("ids", tokenized=True))
    expected = run(ids_job, newcomer, cache, runtime="inline")
    assert "new" in expected[2]

    def disturb(service, step):
        if role is not None and step in (30, 65):
            up = [host for host in service.status()["hosts"] if host["role"].startswith(role) and host["up"]]
            os.kill(up[0]["pid"], signal.SIGKILL)

    assert run(ids_job, newcomer, cache, disturb, shadows=True, loader_hosts=3) == expected


def test_what_is_refused_has_changed_nothing(ids_job, cache, tmp_path):
    good = write_ids(tmp_path / "new.jsonl", [7] * 50)
    sample = ol.Text("ids", tokenized=True)
    with ol.launch(ids_job, cache=cache, loader_hosts=2) as service, service.client() as client:
        with pytest.raises(ol.SpecError, match="matches no file"):
            service.add_source(ol.Source("new", str(tmp_path / "none.jsonl"), sample=sample))
        with pytest.raises(ol.SpecError, match="there is a source 'a' already"):
            service.add_source(ol.Source("a", str(good), sample=sample))
        at = service.add_source(ol.Source("new", str(good), sample=sample), weight=5.0)
        while client.next_step <= at:
            step = next(client)
        assert "new" in step.source_names
