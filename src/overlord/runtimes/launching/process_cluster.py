"""A service of several processes on one host: started when sources have shadows, or are dealt to several loader hosts.

The service process supervises; planner, constructor host and loader hosts are processes of their own, so that none of
them takes another one with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from overlord.runtimes.launching.cluster_placement import ClusterOptions, Node, cpus_needed, place
from overlord.runtimes.launching.deployment import Progress
from overlord.runtimes.supervision.child import Limits
from overlord.runtimes.supervision.cleanup import check_file_limit
from overlord.runtimes.supervision.service_main import run_service
from overlord.runtimes.supervision.supervisor import supervised, unbundled
from overlord.runtimes.transport.process_engine import ProcessEngine


@contextlib.contextmanager
def serving(bundle: bytes, folder: Path, progress: Progress) -> Iterator[str]:
    """Serve a job with processes of this host."""
    job, options, bundle = unbundled(bundle, folder)
    check_file_limit(options.mesh.world_size)
    cluster = options.cluster or ClusterOptions()
    count, world = len(job.sources), options.mesh.world_size
    room = cpus_needed(cluster, num_sources=count, loader_cpus=options.threads)
    here = Node("here", "this host", cpus=room, here=True)
    sites = place([here], cluster, world_size=world, num_sources=count, loader_cpus=options.threads)
    engine = ProcessEngine(bundle, folder, hosts=1, limits=Limits(options.heartbeat_s))
    with supervised(engine, sites, options, folder, progress) as address:
        yield address


if __name__ == "__main__":
    run_service(serving)
