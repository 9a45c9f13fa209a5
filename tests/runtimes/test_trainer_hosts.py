"""Constructor hosts that come and go with the mesh."""

from __future__ import annotations

import os
import signal
import time

import pytest

import overlord as ol
from overlord.testing import digest_service

STEPS = 12
MORE, FEWER = (3, 5, ol.ClientPlaceTree(dp=3), 3), (4, 9, ol.ClientPlaceTree(dp=1, cp=2), 1)
"""Asked for before a step: the step it holds from, a mesh, and its hosts."""


@pytest.fixture(scope="module")
def expected(ids_job, cache):
    def before(service, step):
        for at, first, tree, _ in (MORE, FEWER):
            if step == at:
                service.reshard(tree, at_step=first)

    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), runtime="inline", cache=cache) as service:
        return digest_service(service, steps=STEPS, before=before)


def constructors(service):
    return [one for one in service.status()["hosts"] if one["role"].startswith("constructor") and one["up"]]


def until(done, patience_s=90.0):
    end = time.monotonic() + patience_s
    while not done() and time.monotonic() < end:
        time.sleep(0.2)
    return done()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", ["constructor host 2", "service"])
def test_hosts_come_and_go_with_the_mesh(ids_job, cache, ray_address, expected, killed):
    options = {"runtime": "ray", "address": ray_address, "ranks_per_host": 1, "prefetch": 1, "threads": 1}
    seen = {}
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), cache=cache, **options) as service:

        def before(service, step):
            for at, first, tree, hosts in (MORE, FEWER):
                if step == at:
                    service.reshard(tree, at_step=first, hosts=hosts)
            if step == 4:
                with pytest.raises(ol.SpecError, match="no further host of trainers"):
                    service.reshard(ol.ClientPlaceTree(dp=4), at_step=8, hosts=4)
                seen["more"] = constructors(service)
            if step == 6:  # the host that came is lost, and comes again
                pids = {one["role"]: one["pid"] for one in seen["more"]}
                os.kill(pids.get(killed) or service.status()["service"]["pid"], signal.SIGKILL)

        assert digest_service(service, steps=STEPS, before=before) == expected
        assert until(lambda: len(constructors(service)) == 1), "those without ranks are ended"
        faults = [fault["role"] for fault in service.status()["faults"]]
    assert len({one["node"] for one in seen["more"]}) == 3, "each on a host of its own"
    assert killed == "service" or faults == [killed]


@pytest.mark.parametrize(("hosts", "why"), [(2, "run on one host.*runtime='ray'"), (0, "hosts is 0"), (1.5, "1.5")])
def test_hosts_are_refused_where_there_are_none(ids_job, cache, hosts, why):
    with ol.launch(ids_job, mesh=ol.ClientPlaceTree(dp=2), runtime="inline", cache=cache) as service:
        with pytest.raises(ol.SpecError, match=f"reshard: .*{why}"):
            service.reshard(ol.ClientPlaceTree(dp=4), hosts=hosts)
        assert service.mesh.dp == 2
