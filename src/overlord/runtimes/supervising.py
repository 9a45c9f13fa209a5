"""A supervisor with its door, while a service of several hosts is up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from overlord.roles.recovery import Assignment
from overlord.runtimes.cluster_placement import Site
from overlord.runtimes.deployment import LaunchOptions
from overlord.runtimes.doors import CONTROL, answer_all, open_door
from overlord.runtimes.engine import Engine
from overlord.runtimes.opening import Progress
from overlord.runtimes.supervisor import Supervisor


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
