"""A service seen from the process that launched it: starts its process, keeps it up, asks it, ends it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlord.errors import ClosedError, Rewound, ServiceLost, SpecError
from overlord.job.specs import Job
from overlord.roles.client import Client
from overlord.runtimes.bundle import pack
from overlord.runtimes.launch_options import LaunchOptions
from overlord.runtimes.local import ask_once, connect_local, opened
from overlord.runtimes.opening import Progress
from overlord.runtimes.owner_asks import OwnerAsks
from overlord.runtimes.service_keeper import Order, ServiceKeeper

CLOSE_S = 15.0
"""How long a closing service may take before it is killed."""
RAY_WORDS = {
    "RAY_DEDUP_LOGS": "0", "RAY_worker_niceness": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
}  # fmt: skip
"""Ray takes lines that differ in numbers for repetitions, but two bad samples are two; it gives actors less of a busy
CPU than other processes; it warns of its plans; and any call after its end starts another cluster."""
RAY_CLOSE_S = 60.0
"""How long the end of a cluster service may take."""
ASK_AGAIN_S = 0.1
"""How long to wait before asking again a service that broke off: by then its keeper knows why."""


class ServiceProcess(OwnerAsks):
    """A service whose process was started by this one, and is started again when it dies or hangs."""

    def __init__(
        self,
        module: str,
        job: Job,
        options: LaunchOptions,
        progress: Progress | None,
        *,
        close_s: float = CLOSE_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        again = dataclasses.replace(options, recover=True)
        order = Order(
            module, dict(environment or {}), pack(job, options), pack(job, again), close_s, options.heartbeat_s
        )
        self._keeper = ServiceKeeper(order, _service_folder())
        self._seen: dict[str, Any] | None = None
        self._finalizer = weakref.finalize(self, self._keeper.close)
        try:
            self.address = self._keeper.begin(progress)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self._keeper.pid

    @property
    def restarts(self) -> int:
        """How often the service's process was started again."""
        return self._keeper.restarts

    def client(self, rank: int, step: int | None = None) -> Client:
        """Return the client of one rank in this process."""
        self._wait_up()
        return connect_local(self.address, rank, step)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met; while the service is started again, what was last seen of it.

        `["service"]["state"]` is "up", "starting again", or "failed" where a role cannot be replaced (`["why"]`).

        Raises:
            ServiceLost: when the service does not come back.
        """
        state = "up"
        while True:
            if self._seen is not None and self._keeper.starts_again:
                state = "starting again"
                break
            self._wait_up()
            try:
                self._seen = opened(ask_once(self.address, {"op": "status"}))["status"]
                break
            except ServiceLost:
                time.sleep(ASK_AGAIN_S)
        why = self._seen.get("failed")
        about = {"pid": self.pid, "restarts": self.restarts, "state": "failed" if why else state, "why": why}
        return {"hosts": [], "faults": []} | self._seen | {"service": about, "restarts": self.restarts}

    def close(self) -> None:
        """End the service and remove everything it had."""
        self._finalizer()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask the service; every message may be asked twice, so who is interrupted by its death asks again."""
        while True:
            self._wait_up()
            try:
                reply = ask_once(self.address, message)
            except ServiceLost:
                time.sleep(ASK_AGAIN_S)
                continue
            if reply.get("error") == Rewound.__name__:
                time.sleep(ASK_AGAIN_S)
                continue
            return opened(reply)

    def _wait_up(self) -> None:
        """Wait until the service runs; raise why it will not."""
        if not self._finalizer.alive:
            raise ClosedError("the service is closed; launch it again.")
        self._keeper.wait_up()


def ray_service(job: Job, options: LaunchOptions, progress: Progress | None) -> ServiceProcess:
    """Start a service on a Ray cluster.

    Raises:
        SpecError: when Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise SpecError(
            "launch: runtime is 'ray', and Ray is not installed; nothing could run. Install it with "
            "`pip install 'overlord-data[ray]'`, or use runtime='local' on one host."
        )
    return ServiceProcess(
        "overlord.runtimes.ray_cluster", job, options, progress, close_s=RAY_CLOSE_S, environment=RAY_WORDS
    )


def _service_folder() -> Path:
    """Make a folder whose sockets have short paths: the kernel takes no more than 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="overlord-"))
    if len(os.fsencode(folder)) <= 40:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="overlord-", dir="/tmp"))
