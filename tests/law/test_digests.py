"""The heart of the suite: the stream is a pure function of job and seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import overlord as ol
from overlord.core.plan import chain_digest
from overlord.testing import stream_digests

MESH = ol.ClientPlaceTree(dp=2, cp=2)
STEPS = 30


@pytest.fixture(scope="module")
def reference(mixed_job, cache):
    return stream_digests(mixed_job, mesh=MESH, steps=STEPS, cache=cache)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"loaders_per_source": 2}, marks=pytest.mark.slow),
        {"loaders_per_source": 4},
        pytest.param({"runtime": "local", "prefetch": 1, "threads": 1}, marks=pytest.mark.slow),
        {"runtime": "local", "prefetch": 8, "threads": 4, "loaders_per_source": 2},
        {"runtime": "local", "threads": 4, "loader_hosts": 2},
        pytest.param({"runtime": "ray", "prefetch": 1, "threads": 1}, marks=[pytest.mark.ray, pytest.mark.slow]),
        # The quick suite has the digests of a stream on Ray in faults/test_ray_roles.py, whose loader host is killed.
        pytest.param(
            {"runtime": "ray", "loader_hosts": 3, "loaders_per_source": 2}, marks=[pytest.mark.ray, pytest.mark.slow]
        ),
        pytest.param(
            {"runtime": "ray", "ranks_per_host": 2, "prefetch": 4}, marks=[pytest.mark.ray, pytest.mark.nightly]
        ),
        pytest.param({"runtime": "ray", "loader_hosts": "per_source"}, marks=[pytest.mark.ray, pytest.mark.slow]),
    ],
    ids=str,
)
def test_scale_and_runtime_change_nothing(mixed_job, cache, reference, options, request):
    assert reference.steps == STEPS
    if options.get("runtime") == "ray":
        options = {**options, "address": request.getfixturevalue("ray_address")}
    assert stream_digests(mixed_job, mesh=MESH, steps=STEPS, cache=cache, **options) == reference


@pytest.mark.parametrize("mesh", ["dp=1", pytest.param("dp=4", marks=pytest.mark.slow), "dp=2,cp=2", "dp=2,tp=2,pp=2"])
def test_mesh_changes_the_plan_but_not_the_order(mixed_job, cache, reference, mesh):
    with ol.launch(mixed_job, mesh=ol.ClientPlaceTree.parse(mesh), runtime="inline", cache=cache) as service:
        steps = [step for step, _ in zip(service.client(), range(STEPS), strict=False)]
    assert chain_digest([step.order_digest for step in steps]) == reference.order
    same = chain_digest([step.plan_digest for step in steps]) == reference.plan
    assert same == (mesh == "dp=2,cp=2")


def test_what_waits_on_the_host_is_a_part_of_the_plan(ids_job, cache):
    """The share of every microbatch: on every rank, at every scale, and after a resume."""
    hidden = ol.costs.Offload(8, act_bytes_per_token=1, bandwidth=1e9, time=ol.costs.CostModel(0, 1e-6))

    def shares(steps, **options):
        strategy = ol.strategies.hdp(offload=hidden)
        with ol.launch(ids_job, mesh=MESH, strategy=strategy, cache=cache, **options) as service:
            clients, found = [service.client(rank) for rank in range(4)], []
            for _ in range(steps):
                taken = [next(client) for client in clients]
                metas = [batch.meta for step in taken for batch in step.microbatches]
                found.append((taken[0].plan_digest, [(meta.order, meta.ranks, meta.offload_ratio) for meta in metas]))
            return found, clients[0].state_dict()

    first, state = shares(2, runtime="inline")
    rest, _ = shares(2, runtime="inline", state=state)
    assert shares(4, runtime="local", threads=2, loaders_per_source=2)[0] == first + rest
    assert len({share for _, metas in first + rest for _, _, share in metas}) > 2


def test_other_seed_is_another_stream(ids_job, cache):
    other = stream_digests(ids_job.replace(seed=99), steps=5, cache=cache)
    assert other.order != stream_digests(ids_job, steps=5, cache=cache).order


def test_order_of_sources_in_the_job_does_not_matter(ids_job, cache):
    turned = ids_job.replace(sources=tuple(reversed(ids_job.sources)))
    assert stream_digests(turned, steps=8, cache=cache) == stream_digests(ids_job, steps=8, cache=cache)


_SCRIPT = """
import sys
from pathlib import Path
import overlord as ol
from examples.demo.demo_data import demo_job, write_demo
from overlord.core.plan import chain_digest
from overlord.testing import stream_digests
job = demo_job(write_demo(Path(sys.argv[1]), scale=0.03)).replace(batch=ol.Batch(2048, global_samples=16), seed=7)
print(stream_digests(job, mesh=ol.ClientPlaceTree(dp=2, cp=2), steps=int(sys.argv[3]), cache=sys.argv[2]))
"""


@pytest.mark.parametrize("hash_seed", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_python_hash_seed_changes_nothing(demo_files, cache, reference, hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(demo_files.folder), cache, str(STEPS)],
        env=environment,
        cwd=Path(__file__).parents[2],  # where the script finds examples/
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(reference)
