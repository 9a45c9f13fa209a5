"""The service process of the local runtime: one per host, trainers on a Unix socket.

Its roles are threads of it. Where sources have shadows, or are dealt to several loader hosts, planner, constructor host
and loader hosts are processes of their own, which it supervises, so that none of them takes another one with it.

Started, and started again, by `runtimes/supervision/service_process.py`. Nothing of it has a name in shared memory, and
its sockets lie in the folder of its launcher.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # nothing of what is imported is garbage, and looking for some is a tenth of a start

from overlord.readers.parquet_footer import warm_footer
from overlord.readers.parquet_pages import warm_pages
from overlord.runtimes.hosts.role_host import RoleEnvironment, RoleHost
from overlord.runtimes.launching.cluster_placement import place_here
from overlord.runtimes.launching.deployment import tell_of_compiling
from overlord.runtimes.launching.service_options import KeepOptions, Progress, pack
from overlord.runtimes.launching.tokenizer_trial import try_tokenizer
from overlord.runtimes.supervision.child import Limits
from overlord.runtimes.supervision.fork_server import start_template
from overlord.runtimes.supervision.service_process import run_service
from overlord.runtimes.supervision.supervisor import supervised, unbundled
from overlord.runtimes.transport.direct import ThreadEngine, ThreadEnvironment
from overlord.runtimes.transport.file_limits import check_file_limit
from overlord.runtimes.transport.peer_client import PeerClient
from overlord.runtimes.transport.process_engine import ProcessEngine
from overlord.runtimes.transport.role_endpoint import ROLES


@contextlib.contextmanager
def serving(bundle: bytes, folder: Path, progress: Progress, keep: KeepOptions) -> Iterator[str]:
    """Serve a job with threads of this process, or with processes of this host."""
    tell_of_compiling().progress = progress
    job, options, names = unbundled(bundle, folder)
    check_file_limit(options.mesh.world_size)
    try_tokenizer(job, options.cache, Limits(options.heartbeat_s))
    sites = place_here(options.cluster, world_size=options.mesh.world_size, names=names, threads=options.threads)
    if options.cluster is not None:
        processes = ProcessEngine(pack(job, options), folder, hosts=1, limits=Limits(options.heartbeat_s))
        with supervised(processes, sites, options, folder, progress, keep) as address:
            yield address
        return

    def make(site: Mapping[str, Any], peer_client: PeerClient, environment: RoleEnvironment) -> RoleHost:
        return ROLES[site["role"]](job, options, str(folder), site, peer_client, None, environment)

    threads = ThreadEngine(make, ThreadEnvironment("local", options, progress))
    with supervised(threads, sites, options, folder, progress, keep) as address:
        try:
            yield address
        finally:
            threads.interrupt()


if __name__ == "__main__":
    # All processes that are forked share numba, and the kernels that reader processes need.
    tell_of_compiling()
    warm_footer()
    warm_pages()
    start_template()  # now: a process with threads must not be copied
    gc.freeze()
    gc.enable()
    run_service(serving)
