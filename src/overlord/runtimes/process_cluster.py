"""A service of several processes on one host: started when sources have shadows, or are dealt to several loader hosts.

The service process supervises; planner, constructor host and loader hosts are processes of their own, so that none of
them takes another one with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import cloudpickle

from overlord.runtimes.cluster_placement import ClusterOptions, Node, cpus_needed, place
from overlord.runtimes.deployment import check_launch
from overlord.runtimes.history import peek
from overlord.runtimes.numbering import canonical, with_newcomers
from overlord.runtimes.opening import Progress
from overlord.runtimes.process_engine import ProcessEngine
from overlord.runtimes.service_main import run_service
from overlord.runtimes.supervising import supervised


@contextlib.contextmanager
def serving(bundle: bytes, folder: Path, progress: Progress) -> Iterator[str]:
    """Serve a job with processes of this host."""
    job, options = cloudpickle.loads(bundle)  # from the launching process to its own roles
    options = dataclasses.replace(options, numbering=peek(options, options.store or str(folder / "store")))
    bundle = cloudpickle.dumps((job, options))
    job = with_newcomers(job, options.numbering)
    check_launch(canonical(job, options.numbering), options)
    cluster = options.cluster or ClusterOptions()
    count, world = len(job.sources), options.mesh.world_size
    room = cpus_needed(cluster, num_sources=count, loader_cpus=options.threads)
    here = Node("here", "this host", cpus=room, here=True)
    sites = place([here], cluster, world_size=world, num_sources=count, loader_cpus=options.threads)
    with supervised(ProcessEngine(bundle, folder, hosts=1), sites, options, folder, progress) as address:
        yield address


if __name__ == "__main__":
    run_service(serving)
