"""A supervisor with its door, while a service of several hosts is up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlord.errors import OverlordError
from overlord.job.specs import Job
from overlord.roles.assignment import Assignment
from overlord.runtimes.bundle import pack, unpack
from overlord.runtimes.cluster_placement import Site
from overlord.runtimes.deployment import check_launch
from overlord.runtimes.doors import CONTROL, answer_all, open_door
from overlord.runtimes.engine import Engine
from overlord.runtimes.history import peek
from overlord.runtimes.host_changes import spare_sites
from overlord.runtimes.launch_options import LaunchOptions
from overlord.runtimes.numbering import canonical, with_newcomers
from overlord.runtimes.opening import Progress
from overlord.runtimes.scaler import Scaler, scaler_of
from overlord.runtimes.service_main import REWOUND, SERVED
from overlord.runtimes.sizing import refresh_profile
from overlord.runtimes.supervisor import Supervisor

WORKERS_PER_HOST = 8
"""w_actor: workers that a loader host has room for, unless there are to be more than all hosts have."""
IDLE = {"workers": 0, "samples_prepared": 0, "busy_s": 0.0, "waited_s": 0.0, "buffer_bytes": 0}
"""What is known of the workers of a source while nobody tells."""


def unbundled(bundle: bytes, folder: Path) -> tuple[Job, LaunchOptions, bytes]:
    """Read what the launcher sent: the job with the sources its store knows, the options, and the bundle for its roles.

    Raises:
        SpecError: for what cannot be launched.
    """
    job, options = unpack(bundle)
    options = dataclasses.replace(options, numbering=peek(options, options.store or str(folder / "store")))
    bundle = pack(job, options)
    job = with_newcomers(job, options.numbering)
    check_launch(canonical(job, options.numbering), options)
    return job, options, bundle


@contextlib.contextmanager
def supervised(
    engine: Engine, sites: Sequence[Site], options: LaunchOptions, folder: Path, progress: Progress
) -> Iterator[str]:
    """Bring up the roles of a service, look after them, and end them with the context; gives the address."""
    spares, per_host = spares_of(options, sites)
    supervisor = Supervisor(
        engine, sites, assignment_of(sites), heartbeat_s=options.heartbeat_s, spares=spares, per_host=per_host,
        served=lambda step: progress(SERVED, step, step),
        rewound=lambda: progress(REWOUND, 0, 1),
    )  # fmt: skip
    scaler = cluster_scaler(options, supervisor)

    def answer(message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        found = supervisor.ask(message)
        if "status" in found:
            found["status"]["scaling"] = scaler.describe()
        return found, []

    try:
        supervisor.begin(progress)
        supervisor.watch()
        scaler.start()
        with open_door(folder / CONTROL, lambda talk: answer_all(talk, answer)):
            try:
                yield f"unix://{folder}"
            except OverlordError as error:
                supervisor.ends_for = error
        refresh_profile(options, lambda: supervisor.ask({"op": "status"})["status"])
    finally:
        supervisor.interrupt()  # the scaler may wait for a role
        scaler.close()
        supervisor.close()


def cluster_scaler(options: LaunchOptions, supervisor: Supervisor) -> Scaler:
    """Make the Scaler of a service of several hosts."""
    names: list[str] = []

    def watch(ahead: Sequence[int]) -> Mapping[str, Any]:
        facts = supervisor.ask({"op": "workload", "ahead": list(ahead)})["workload"]
        names[:] = facts["names"]
        done = supervisor.hosts.workload()
        return {**facts, "sources": {name: done.get(number, IDLE) for number, name in enumerate(names)}}

    def act(workers: Mapping[str, int], loads: Mapping[str, float]) -> None:
        supervisor.hosts.resize([workers[name] for name in names], [loads[name] for name in names])

    return scaler_of(options, watch, act)


def spares_of(options: LaunchOptions, sites: Sequence[Site]) -> tuple[list[Site], int]:
    """Return loader hosts that sleep at first, and how many workers one has room for: all workers there may be fit."""
    hosts = sum(site.role == "loader" for site in sites)
    spares = 0 if options.scaling is None else max(0, -(-options.lanes // WORKERS_PER_HOST) - hosts)
    return spare_sites(sites, spares), max(WORKERS_PER_HOST, -(-options.lanes // (hosts + spares)))


def assignment_of(sites: Sequence[Site]) -> Assignment:
    """Return which loader host has which sources at first."""
    primary = {source: site.number for site in sites for source in site.sources}
    shadow = {source: site.number for site in sites for source in site.shadows}
    numbers = range(len(primary))
    return Assignment(tuple((primary[n],) for n in numbers), tuple(shadow.get(n, -1) for n in numbers))
