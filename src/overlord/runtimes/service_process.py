"""A service seen from the process that launched it: starts its process, waits until it is ready, asks it, ends it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.plan_blob import plan_from_bytes
from overlord.core.specs import Job, Mixture, Source
from overlord.errors import ClosedError, ServiceLost, SpecError, error_named
from overlord.roles.client import Client
from overlord.roles.inputs import mixture_to_json, source_to_json
from overlord.runtimes.local import ask_service, connect_local
from overlord.runtimes.opening import Progress
from overlord.runtimes.planner_host import SourceChange

CLOSE_S = 15.0
"""How long a closing service may take before it is killed."""


class ServiceProcess:
    """A service whose process was started by this one."""

    def __init__(
        self,
        module: str,
        job: Job,
        options: Any,
        progress: Progress | None,
        *,
        close_s: float = CLOSE_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        try:
            bundle = cloudpickle.dumps((job, options))
        except Exception as error:  # whatever a user's object raises when it is pickled
            raise SpecError(
                f"the job cannot be sent to the service process ({type(error).__name__}: {error}); nothing could run. "
                "Let functions (Custom, strategy, learn) hold only what pickles (open files and locks do not), or use "
                "runtime='inline'."
            ) from error
        self._folder = _service_folder()
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C must not reach it; the closing pipe does
            # Few malloc arenas: with one for each of its threads, what they free stays with the process.
            env={"MALLOC_ARENA_MAX": "2", **(environment or {}), **os.environ, "PYTHONPATH": paths},
        )
        self._finalizer = weakref.finalize(self, _end_process, self._process, self._folder, close_s)
        try:
            assert self._process.stdin is not None
            try:
                for part in (os.fsencode(self._folder), bundle):
                    self._process.stdin.write(struct.pack("<Q", len(part)) + part)
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # it died while starting; the wait below says how
            self.address = self._wait_until_ready(progress)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self._process.pid

    def client(self, rank: int) -> Client:
        """Return the client of one rank in this process."""
        if not self._finalizer.alive:
            raise ClosedError("the service is closed; launch it again.")
        return connect_local(self.address, rank)

    def status(self) -> dict[str, Any]:
        """Return what every role holds and has met."""
        return self._ask({"op": "status"})["status"]

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
        if not self._finalizer.alive:
            raise ClosedError("the service is closed; launch it again.")
        return ask_service(self.address, message)

    def _wait_until_ready(self, progress: Progress | None) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if "ready" in event:
                return event["ready"]
            if "error" in event:
                raise error_named(event["error"], event["message"])
            if "progress" in event and progress is not None:
                progress(*event["progress"])
        code = self._process.wait()
        raise ServiceLost(
            f"the service process ended with code {code} before it was ready; nothing has run. Its messages stand "
            "above; if it was killed, the host may be out of memory."
        )


def _service_folder() -> Path:
    """Make a folder whose sockets have short paths: the kernel takes no more than 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="overlord-"))
    if len(os.fsencode(folder)) <= 40:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="overlord-", dir="/tmp"))


def _end_process(process: subprocess.Popen[bytes], folder: Path, close_s: float) -> None:
    """Close the pipe that keeps a service alive; kill it if it does not go."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # it is gone already, which is what we want
    try:
        process.wait(close_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
