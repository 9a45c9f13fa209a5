"""The service process of the local runtime: one per host, roles as threads, trainers on a Unix socket.

Started by `overlord.runtimes.local` with the job on standard input. It lives until its launcher closes
that pipe, by `close()` or by dying; nothing of it has a name in shared memory, and its socket lies in a
folder that it removes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

from overlord.core.plan_blob import plan_to_bytes
from overlord.core.specs import Job, Mixture
from overlord.errors import OverlordError, SpecError
from overlord.roles.inputs import FIXED_WHILE_RUNNING
from overlord.roles.planner import Planner
from overlord.roles.views import StepHeader
from overlord.runtimes.deployment import LaunchOptions, Roles, deploy, plan_first_step
from overlord.runtimes.memory import give_back_freed_memory
from overlord.runtimes.process_workers import ProcessWorkers
from overlord.runtimes.shared_memory import Arena
from overlord.runtimes.status import describe
from overlord.runtimes.step_server import Built, StepServer
from overlord.runtimes.wire import receive, send
from overlord.runtimes.workers import ThreadWorkers

LOADER_THREADS = 16
"""Calls to loaders that may wait for storage at the same time."""

PATIENCE_S = 3.0
"""How long a closing service waits for functions in process workers."""

logger = logging.getLogger("overlord")


class LocalHost:
    """Everything that runs in the service process."""

    def __init__(self, job: Job, options: LaunchOptions, folder: Path, tell: Any) -> None:
        self._callers = ThreadWorkers(LOADER_THREADS, "overlord-loaders")
        self._workers = ThreadWorkers(options.threads, "overlord-workers")
        self._processes = ProcessWorkers(options.threads)
        self._arena = Arena()
        self._options = options
        store = Path(options.store) if options.store else folder / "store"
        try:
            isolate = self._processes.isolate
            self.roles: Roles = deploy(job, options, store, self._callers, self._workers, tell, isolate)
            plan_first_step(self.roles.planner)
        except BaseException:
            self._callers.close()
            self._workers.close()
            self._processes.close()
            raise
        give_back_freed_memory()  # footers and listings of hundreds of sources were just parsed
        self.server = StepServer(self.roles, self._arena, prefetch=options.prefetch, budget_bytes=options.budget_bytes)
        self.server.start()

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """End all threads and let go of everything, whatever of it fails."""
        with contextlib.ExitStack() as ends:
            # The roles end first of these: a last snapshot may have to ask the loaders.
            for end in (self._arena.close, self._processes.close, self._workers.close, self._callers.close):
                ends.callback(end)
            ends.callback(lambda: self.server.with_planner(lambda _: self.roles.close()))
            # A function that hangs in a process worker must not keep a service from closing.
            hurry = threading.Timer(PATIENCE_S, self._processes.close)
            hurry.daemon = True
            hurry.start()
            ends.callback(hurry.cancel)
            self.server.close()

    def status(self) -> dict[str, Any]:
        """Return the service's picture of itself."""
        positions = self.server.positions()
        used = self._arena.used_bytes
        return self.server.with_planner(lambda _: describe(self.roles, "local", positions, view_bytes=used))

    def _converse(self, connection: socket.socket) -> None:
        with connection:
            talk = _Conversation(self, connection, self._arena, self._options)
            try:
                talk.run()
            except (OverlordError, OSError) as error:
                logger.debug("a client is gone: %s", error)
            finally:
                talk.close()


class _Conversation:
    """One client's connection."""

    def __init__(self, host: LocalHost, connection: socket.socket, arena: Arena, options: LaunchOptions) -> None:
        self._host = host
        self._connection = connection
        self._arena = arena
        self._options = options
        self._seat: int | None = None
        self._leases: dict[int, int] = {}
        self._next_lease = 0
        self._known: set[int] = set()

    def run(self) -> None:
        while True:
            message, _ = receive(self._connection)
            for lease in message.get("release", ()):
                number = self._leases.pop(int(lease), None)
                if number is not None:
                    self._arena.release(number)
            try:
                reply, fds = self._answer(message)
            except OverlordError as error:
                reply, fds = {"error": type(error).__name__, "message": str(error)}, []
            except Exception as error:  # the border to the client: it must learn what became of its question
                logger.exception("the message %r failed", message.get("op"))
                reply, fds = {"error": "OverlordError", "message": f"{type(error).__name__}: {error}"}, []
            send(self._connection, reply, fds)

    def close(self) -> None:
        for number in self._leases.values():
            self._arena.release(number, reuse=False)  # a trainer that detached may keep its arrays
        self._leases.clear()
        if self._seat is not None:
            self._host.server.detach(self._seat)

    def _answer(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        op, server = message.get("op"), self._host.server
        if op == "status":
            return {"status": self._host.status()}, []
        if op == "hello":
            return self._hello(int(message["rank"])), []
        if op == "state":
            return {"state": server.with_planner(lambda planner: planner.state(int(message["step"])))}, []
        if op == "report":
            server.with_planner(lambda planner: planner.report(int(message["step"]), dict(message["metrics"])))
            return {}, []
        if op in ("set_mixture", "skip_steps", "mixture", "plan"):
            return server.with_planner(lambda planner: _steer(planner, message))
        if self._seat is None:
            raise SpecError(f"the message {op!r} came before hello; this is not an overlord client.")
        if op == "leave":
            server.leave(self._seat, int(message["next_step"]))
            return {}, []
        if op == "step":
            header = server.open_step(self._seat, int(message["step"]))
            return {"header": None if header is None else header_to_json(header)}, []
        if op == "microbatch":
            built = server.microbatch(self._seat, int(message["step"]), int(message["microbatch"]))
            return self._hand_over(built) if built is not None else ({"segment": None}, [])
        raise SpecError(f"the service does not know the message {op!r}; client and service differ in version.")

    def _hello(self, rank: int) -> dict[str, Any]:
        tree = self._host.roles.tree
        facts = {
            "names": [source.name for source in self._host.roles.job.sources],
            "world_size": tree.world_size,
            "mesh": str(tree),
            "lease_bytes": self._options.budget_bytes // (2 * tree.world_size),
        }
        if not 0 <= rank < tree.world_size:
            return {**facts, "first_step": 0}
        self._rank = rank
        self._seat, first = self._host.server.attach(rank)
        return {**facts, "first_step": first}

    def _hand_over(self, built: Built) -> tuple[dict[str, Any], list[int]]:
        segment, packed, plan = built.segment, built.packed, built.plan
        lease = self._next_lease
        self._next_lease += 1
        self._leases[lease] = segment.number
        names, scalars = self._host.roles.constructor.view_of(self._rank, plan, packed)
        specs = {spec.name: spec for spec in packed.arrays}
        gone = [number for number in self._known if not self._arena.alive(number)]
        self._known.difference_update(gone)
        reply = {
            "lease": lease,
            "segment": segment.number,
            "capacity": segment.capacity,
            "gone": gone,
            "scalars": scalars,
            "arrays": [[k, specs[n].dtype, list(specs[n].shape), specs[n].offset] for k, n in names.items()],
        }
        if segment.number in self._known:
            return reply, []
        self._known.add(segment.number)
        return reply, [segment.fd]


def _steer(planner: Planner, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Answer what a service's owner asks of the planner."""
    op, step = message["op"], message.get("step")
    if op == "set_mixture":
        return {"step": planner.set_mixture(Mixture.from_mapping(message["mixture"]), step)}, []
    if op == "skip_steps":
        return {"step": planner.skip_steps(int(message["count"]), step)}, []
    if op == "mixture":
        return {"mixture": {name: getattr(planner.mixture, name) for name in (*FIXED_WHILE_RUNNING, "temperature")}}, []
    plan = planner.plan_raw(int(message["step"]))
    return {"plan": None if plan is None else base64.b64encode(plan_to_bytes(plan)).decode()}, []


def header_to_json(header: StepHeader) -> dict[str, Any]:
    """Return a step header as JSON."""
    return {name: getattr(header, name) for name in StepHeader.__dataclass_fields__}


def main() -> None:
    """Run the service: job on standard input, one JSON line per event on standard output."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever prints from here on goes to the log, not into the protocol
    # A decoder that comes back from C waits for the interpreter; the default interval costs it up to 5 ms.
    sys.setswitchinterval(0.0005)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; its closing pipe tells us
    logging.basicConfig(format="overlord: %(levelname)s: %(message)s", level=logging.WARNING)

    def tell(event: dict[str, Any]) -> None:
        try:
            events.write(json.dumps(event).encode() + b"\n")
        except BrokenPipeError:
            pass  # the launcher is gone; the end of the input pipe is seen below

    bundle = _read_bundle(sys.stdin.buffer)
    if bundle is None:
        return
    job, options, folder = bundle
    try:
        host = LocalHost(job, options, folder, lambda what, done, of: tell({"progress": [what, done, of]}))
    except OverlordError as error:
        tell({"error": type(error).__name__, "message": str(error)})
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        _serve_until_closed(host, folder, tell)
    finally:  # also when the socket cannot be had: its threads would keep the process for ever
        host.close()
        shutil.rmtree(folder, ignore_errors=True)


def _serve_until_closed(host: LocalHost, folder: Path, tell: Any) -> None:
    # Not an Event: its lock may be held by the very thread that a signal interrupts, which would wait for itself.
    stopped, stop = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop, b"!"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address = folder / "socket"
        listener.bind(str(address))
        listener.listen(128)
        threading.Thread(target=host.serve, args=(listener,), daemon=True).start()
        threading.Thread(target=_watch_launcher, args=(stop,), daemon=True).start()
        tell({"ready": f"unix://{address}", "pid": os.getpid()})
        os.read(stopped, 1)
        listener.shutdown(socket.SHUT_RDWR)


def _watch_launcher(stop: int) -> None:
    # The descriptor, not sys.stdin: a thread inside its lock would abort the interpreter's end after a SIGTERM.
    while os.read(0, 1):
        pass
    os.write(stop, b"!")


def _read_bundle(pipe: BinaryIO) -> tuple[Job, LaunchOptions, Path] | None:
    """Read the folder and the job; code travels from the launching process to its own roles only."""
    parts: list[bytes] = []
    for _ in range(2):
        head = pipe.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        parts.append(pipe.read(length))
        if not length or len(parts[-1]) < length:
            return None  # the launcher is gone
    job, options = cloudpickle.loads(parts[1])
    return job, options, Path(os.fsdecode(parts[0]))


if __name__ == "__main__":
    main()
