"""A service seen from the process that launched it: starts its process, keeps it up, asks it, ends it."""

from __future__ import annotations

import base64
import dataclasses
import os
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.plan_blob import plan_from_bytes
from overlord.core.specs import Job, Mixture, Source
from overlord.errors import ClosedError, ServiceLost, SpecError
from overlord.roles.client import Client
from overlord.roles.inputs import mixture_to_json, source_to_json
from overlord.runtimes.deployment import LaunchOptions
from overlord.runtimes.local import ask_once, connect_local, opened
from overlord.runtimes.opening import Progress
from overlord.runtimes.planner_host import SourceChange
from overlord.runtimes.service_keeper import Order, ServiceKeeper

CLOSE_S = 15.0
"""How long a closing service may take before it is killed."""
ASK_AGAIN_S = 0.1
"""How long to wait before asking again a service that broke off: by then its keeper knows why."""


class ServiceProcess:
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
            module, dict(environment or {}), _bundle(job, options), _bundle(job, again), close_s, options.heartbeat_s
        )
        self._keeper = ServiceKeeper(order, _service_folder())
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

    def client(self, rank: int) -> Client:
        """Return the client of one rank in this process."""
        self._wait_up()
        return connect_local(self.address, rank)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met."""
        return self._ask({"op": "status"})["status"] | {"restarts": self.restarts}

    def set_mixture(self, mixture: Mixture, at_step: int | None, change_id: str) -> int:
        """Change the mixture from a step on."""
        message = {"op": "set_mixture", "mixture": mixture_to_json(mixture), "step": at_step, "id": change_id}
        return int(self._ask(message)["step"])

    def skip_steps(self, count: int, at_step: int | None, change_id: str) -> int:
        """Pass over global batches before a step."""
        return int(self._ask({"op": "skip_steps", "count": count, "step": at_step, "id": change_id})["step"])

    def reshard(self, tree: ClientPlaceTree, at_step: int | None, change_id: str) -> tuple[int, ClientPlaceTree]:
        """Change the mesh from a step on; return that step, and the mesh behind all changes."""
        reply = self._ask({"op": "reshard", "mesh": tree.sizes(), "step": at_step, "id": change_id})
        return int(reply["step"]), ClientPlaceTree.from_sizes(reply["newest"])

    def add_source(self, source: Source, weight: float | None, at_step: int | None) -> int:
        """Let a source come at a step."""
        message = {"op": "add_source", "source": source_to_json(source), "weight": weight, "step": at_step}
        return int(self._ask(message)["step"])

    def change_source(self, change: SourceChange, name: str, at_step: int | None) -> int:
        """Remove a source, park it, or let it return."""
        return int(self._ask({"op": change, "source": name, "step": at_step})["step"])

    def mixture(self) -> Mixture:
        """Return the mixture in force, without its weights."""
        return Mixture.from_mapping(self._ask({"op": "mixture"})["mixture"])

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step."""
        blob = self._ask({"op": "plan", "step": step})["plan"]
        return None if blob is None else plan_from_bytes(base64.b64decode(blob))

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
            return opened(reply)

    def _wait_up(self) -> None:
        """Wait until the service runs; raise why it will not."""
        if not self._finalizer.alive:
            raise ClosedError("the service is closed; launch it again.")
        self._keeper.wait_up()


def _bundle(job: Job, options: LaunchOptions) -> bytes:
    try:
        return cloudpickle.dumps((job, options))
    except Exception as error:  # whatever a user's object raises when it is pickled
        raise SpecError(
            f"the job cannot be sent to the service process ({type(error).__name__}: {error}); nothing could run. "
            "Let functions (Custom, strategy, learn) hold only what pickles (open files and locks do not), or use "
            "runtime='inline'."
        ) from error


def _service_folder() -> Path:
    """Make a folder whose sockets have short paths: the kernel takes no more than 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="overlord-"))
    if len(os.fsencode(folder)) <= 40:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="overlord-", dir="/tmp"))
