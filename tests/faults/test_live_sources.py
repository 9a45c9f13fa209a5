"""Sources that come to a service of several processes, also while its roles are killed."""

from __future__ import annotations

import os
import signal

import pytest

import overlord as ol
from overlord.core.plan import chain_digest
from overlord.testing import Fault, FaultScript, launch_for_faults
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
        with pytest.raises(ol.SpecError, match="already has a source 'a'"):
            service.add_source(ol.Source("a", str(good), sample=sample))
        at = service.add_source(ol.Source("new", str(good), sample=sample), weight=5.0)
        while client.next_step <= at:
            step = next(client)
        assert "new" in step.source_names


def undisturbed(job, cache, newcomer, at_step, steps=10) -> list[tuple[str, str]]:
    """The digests of a stream that a source comes to after two steps."""
    with ol.launch(job, runtime="inline", cache=cache) as service, service.client() as client:
        found = [digests(next(client)) for _ in range(2)]
        assert service.add_source(newcomer, weight=2.0, at_step=at_step) == at_step
        return found + [digests(next(client)) for _ in range(steps - 2)]


def digests(step) -> tuple[str, str]:
    return step.plan_digest, chain_digest([batch.digest() for batch in step.microbatches])


@pytest.fixture
def newcomer(tmp_path) -> ol.Source:
    rows = write_ids(tmp_path / "new.jsonl", [7] * 50)
    return ol.Source("new", str(rows), sample=ol.Text("ids", tokenized=True))


ROLES = ["planner", "constructor host 0", "loader host 0", "loader host 1", "service"]


@pytest.fixture
def near_horizon(monkeypatch):
    """After a crash a change takes effect no sooner than at the horizon: let it be near, so that it does here."""
    monkeypatch.setattr("overlord.roles.planner.AHEAD", 4)


WINDOWS = [
    pytest.param(
        role, on, after, shadows,
        marks=[] if (role, on, after, shadows) == ("loader host 1", "add_source", True, True) else pytest.mark.slow,
    )
    for role in ROLES for on in ("add_source", "check_source", "learn") for after in (False, True)
    for shadows in (False, True)
]  # fmt: skip


@pytest.mark.usefixtures("quiet", "near_horizon")
@pytest.mark.parametrize(("role", "on", "after", "shadows"), WINDOWS)
def test_a_role_that_dies_while_a_source_is_added(ids_job, cache, newcomer, role, on, after, shadows):
    """Whoever dies of whichever message: the source is added, at the step that was asked for."""
    expected = undisturbed(ids_job, cache, newcomer, 20, steps=24)
    script = FaultScript().kill(role, 2, on=on, after=after)
    with launch_for_faults(ids_job, script, shadows=shadows, cache=cache) as (service, storm):
        client = service.client()
        found = [digests(next(client)) for _ in range(2)]
        storm.reach(2)
        assert service.add_source(newcomer, weight=2.0, at_step=20) == 20
        storm.wait(30.0)
        found += [digests(next(client)) for _ in range(22)]
    assert found == expected


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("shadows", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "role", [pytest.param(r, marks=[] if r == "loader host 0" else pytest.mark.slow) for r in ROLES]
)
def test_a_role_that_dies_while_a_source_is_pending(ids_job, cache, newcomer, role, shadows):
    """A source that comes much later has no cursor and no weight yet; the successors of roles come up all the same."""
    expected = undisturbed(ids_job, cache, newcomer, 20_000)
    with launch_for_faults(ids_job, shadows=shadows, cache=cache) as (service, storm):
        client = service.client()
        found = [digests(next(client)) for _ in range(2)]
        assert service.add_source(newcomer, weight=2.0, at_step=20_000) == 20_000
        storm.happen(Fault(kind="kill", at_step=0, role=role))
        for _ in range(8):
            storm.wait(5.0)
            found.append(digests(next(client)))
        assert all(host["up"] for host in service.status()["hosts"])
    assert found == expected
