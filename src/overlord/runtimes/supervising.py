"""A supervisor with its door, while a service of several hosts is up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import cloudpickle

from overlord.core.specs import Job
from overlord.roles.recovery import Assignment
from overlord.runtimes.cluster_placement import Site
from overlord.runtimes.deployment import LaunchOptions, check_launch
from overlord.runtimes.doors import CONTROL, answer_all, open_door
from overlord.runtimes.engine import Engine
from overlord.runtimes.history import peek
from overlord.runtimes.numbering import canonical, with_newcomers
from overlord.runtimes.opening import Progress
from overlord.runtimes.supervisor import Supervisor


def unbundled(bundle: bytes, folder: Path) -> tuple[Job, LaunchOptions, bytes]:
    """Read what the launcher sent: the job with the sources its store knows, the options, and the bundle for its roles.

    Raises:
        SpecError: for what cannot be launched.
    """
    job, options = cloudpickle.loads(bundle)  # from the launching process to its own roles
    options = dataclasses.replace(options, numbering=peek(options, options.store or str(folder / "store")))
    bundle = cloudpickle.dumps((job, options))
    job = with_newcomers(job, options.numbering)
    check_launch(canonical(job, options.numbering), options)
    return job, options, bundle


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
    return Assignment(tuple((primary[n],) for n in numbers), tuple(shadow.get(n, -1) for n in numbers))
