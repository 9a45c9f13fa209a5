"""The service process of the local runtime: one per host, roles as threads, trainers on a Unix socket.

Started, and started again, by `runtimes/supervision/service_process.py`. Nothing of it has a name in shared memory, and
its sockets lie in the folder of its launcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from overlord.runtimes.hosts.cluster_role import ClusterRole, Means
from overlord.runtimes.hosts.cluster_roles import ROLES
from overlord.runtimes.launching.cluster_placement import ClusterOptions, Node, place
from overlord.runtimes.launching.deployment import Progress
from overlord.runtimes.supervision.cleanup import check_file_limit
from overlord.runtimes.supervision.service_main import run_service
from overlord.runtimes.supervision.supervisor import supervised, unbundled
from overlord.runtimes.transport.bundle import unpack
from overlord.runtimes.transport.direct import ThreadEngine, ThreadMeans
from overlord.runtimes.transport.switchboard import Switchboard


@contextlib.contextmanager
def serving(bundle: bytes, folder: Path, progress: Progress) -> Iterator[str]:
    """Serve a job with threads of this process."""
    known, _, bundle = unbundled(bundle, folder)
    job, options = unpack(bundle)
    check_file_limit(options.mesh.world_size)

    def make(site: Mapping[str, Any], board: Switchboard, means: Means) -> ClusterRole:
        return ROLES[site["role"]](job, options, str(folder), site, board, None, means)

    here = Node("here", "this process", cpus=1e6, here=True)
    world = options.mesh.world_size
    sites = place([here], ClusterOptions(), world_size=world, num_sources=len(known.sources), loader_cpus=1)
    engine = ThreadEngine(make, ThreadMeans("local", options, progress))
    with supervised(engine, sites, options, folder, progress) as address:
        try:
            yield address
        finally:
            engine.interrupt()


if __name__ == "__main__":
    run_service(serving)
