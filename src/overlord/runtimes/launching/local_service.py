"""The service process of the local runtime: one per host, roles as threads, trainers on a Unix socket.

Started, and started again, by `runtimes/supervision/service_process.py`. Nothing of it has a name in shared memory, and
its socket lies in the folder of its launcher.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from overlord.errors import OverlordError
from overlord.job.specs import Job
from overlord.runtimes.autoscaling.scaler import check_sizes, refresh_profile, service_scaler
from overlord.runtimes.autoscaling.status import describe_roles
from overlord.runtimes.hosts.constructor_host import ConstructorHost
from overlord.runtimes.hosts.planner_host import PlannerHost
from overlord.runtimes.hosts.prefetch import Executors
from overlord.runtimes.launching.deployment import Progress, deploy, plan_first_step
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.runtimes.launching.newcomers import Newcomers
from overlord.runtimes.supervision.cleanup import check_file_limit
from overlord.runtimes.supervision.process_workers import ProcessWorkers
from overlord.runtimes.supervision.reader_processes import ReaderProcesses
from overlord.runtimes.supervision.service_main import REWOUND, SERVED, run_service
from overlord.runtimes.transport.bundle import unpack
from overlord.runtimes.transport.shared_memory import give_back_freed_memory

TELL_S = 0.1
"""The launcher is not told more often how far the clients are."""
PATIENCE_S = 3.0
"""How long a closing service waits for functions in process workers."""


class LocalHost:
    """Everything that runs in the service process."""

    def __init__(self, job: Job, options: LaunchOptions, folder: Path, tell: Progress) -> None:
        self._options = options
        self._hands = Executors.of_threads(options.threads, options.lanes)
        self._processes = ProcessWorkers(options.threads)
        self._readers = ReaderProcesses(options.threads)
        store = options.store or str(folder / "store")
        try:
            roles = deploy(job, options, store, self._hands, tell, self._processes.isolate, self._readers.isolate)
            check_sizes(roles.prepared, roles.facts)
            plan_first_step(roles.planner)
        except BaseException:
            self._hands.close()
            self._processes.close()
            self._readers.close()
            raise
        give_back_freed_memory()  # footers and listings of hundreds of sources were just parsed
        fleet = roles.fleet
        self._scaler = service_scaler(
            options,
            lambda message: self._planner.ask(message),
            fleet.workload,
            lambda workers, loads: fleet.resize({n: count for n, count in enumerate(workers) if n in fleet.names}),
        )
        self._planner = PlannerHost(
            roles.planner,
            lambda positions, view_bytes: {
                **describe_roles(roles, "local", positions, view_bytes),
                "scaling": self._scaler.describe(),
            },
            roles.fleet,
            keep=options.keep,
            add_source=Newcomers(roles, self._hands).add,
            on_source_failure=options.on_source_failure,
            rewound=lambda: tell(REWOUND, 0, 1),
        )
        self._fleet, progress = roles.fleet, _Progress(tell)
        self.constructor = ConstructorHost(
            options, roles.constructor, self._planner, ranks_of=lambda tree: range(tree.world_size),
            read_bytes=lambda: roles.fleet.buffer_bytes, served=progress.served,
        )  # fmt: skip
        self._scaler.start()

    def close(self) -> None:
        """End all threads and let go of everything, whatever of it fails."""
        with contextlib.ExitStack() as ends:
            # The planner ends first of these: a last snapshot may have to ask the loaders.
            for end in (self._readers.close, self._processes.close, self._hands.close, self._planner.close):
                ends.callback(end)
            # A function that hangs in a process worker must not keep a service from closing.
            hurry = threading.Timer(PATIENCE_S, self._processes.close)
            hurry.daemon = True
            hurry.start()
            ends.callback(hurry.cancel)
            self._scaler.close()
            refresh_profile(self._options, lambda: self._planner.ask({"op": "status"})["status"])
            self._planner.interrupt()
            self._fleet.interrupt()
            self.constructor.close()


class _Progress:
    """Tells the launcher how far the clients are: a service that is killed over and over, and serves, does not hang."""

    def __init__(self, tell: Progress) -> None:
        self._tell = tell
        self._step = -1
        self._told_at = -math.inf

    def served(self, step: int) -> None:
        """Hear of the step that a client has come to."""
        now = time.monotonic()
        if step > self._step and now - self._told_at > TELL_S:
            self._step, self._told_at = step, now
            self._tell(SERVED, step, step)


@contextlib.contextmanager
def serving(bundle: bytes, folder: Path, progress: Progress) -> Iterator[str]:
    """Serve a job on this host."""
    job, options = unpack(bundle)
    check_file_limit(options.mesh.world_size)
    host = LocalHost(job, options, folder, progress)
    try:
        with host.constructor.open_door(folder / "socket"):
            try:
                yield f"unix://{folder / 'socket'}"
            except OverlordError as error:
                host.constructor.ends_for = error
    finally:  # also when the socket cannot be had: its threads would keep the process for ever
        host.close()


if __name__ == "__main__":
    run_service(serving)
