"""A service of several processes on one host: started when sources have shadows, or are dealt to several loader hosts.

The service process supervises; planner, constructor host and loader hosts are processes of their own, so that none of
them takes another one with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import cloudpickle

from overlord.roles.recovery import Assignment
from overlord.runtimes.cluster_placement import ClusterOptions, Node, Site, cpus_needed, place
from overlord.runtimes.deployment import LaunchOptions, check_launch
from overlord.runtimes.doors import CONTROL, answer_all, open_door
from overlord.runtimes.history import peek
from overlord.runtimes.numbering import canonical, with_newcomers
from overlord.runtimes.opening import Progress
from overlord.runtimes.process_engine import ProcessEngine
from overlord.runtimes.service_main import run_service
from overlord.runtimes.supervisor import Engine, Supervisor


@contextlib.contextmanager
def supervised(
    engine: Engine, sites: Sequence[Site], options: LaunchOptions, folder: Path, progress: Progress
) -> Iterator[str]:
    """Bring up the roles of a service, look after them, and end them with the context; gives the address."""
    supervisor = Supervisor(engine, sites, assignment_of(sites), heartbeat_s=options.heartbeat_s)
    try:
        supervisor.begin(progress)
        supervisor.watch()
        with open_door(folder / CONTROL, lambda talk: answer_all(talk, lambda message: (supervisor.ask(message), []))):
            yield f"unix://{folder}"
    finally:
        supervisor.close()


def assignment_of(sites: Sequence[Site]) -> Assignment:
    """Return which loader host has which sources at first."""
    primary = {source: site.number for site in sites for source in site.sources}
    shadow = {source: site.number for site in sites for source in site.shadows}
    numbers = range(len(primary))
    return Assignment(tuple(primary[n] for n in numbers), tuple(shadow.get(n, -1) for n in numbers))


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
