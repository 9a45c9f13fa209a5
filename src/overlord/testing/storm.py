"""A fault script at work: on the roles of an inline cluster, or on the processes of a running service."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from overlord.errors import OverlordError, SpecError
from overlord.testing.clock import FakeClock
from overlord.testing.fault_engine import DELIVERED, Fate, FaultEngine, FaultPeer, FaultService, Gone
from overlord.testing.fault_script import SERVICE, Fault, FaultScript

STEP_S = 0.5
"""How long a trainer works on a step, by the clock of an inline cluster."""
WRITES = frozenset({"store.write", "store.append", "store.create", "store.open_append"})
"""What is done to a store that can fail."""
UP_S = 30.0
"""How long a fault on a real process waits for the role to have one."""


class Storm:
    """Makes the faults of a script happen to the objects of an inline cluster.

    Args:
        script: What goes wrong.
        clock: The time of the cluster.
    """

    def __init__(self, script: FaultScript, clock: FakeClock) -> None:
        self.clock = clock
        self.cluster: FaultService | None = None
        """Whom it happens to."""
        self._coming = list(script.faults)
        self._armed: list[Fault] = []
        self._cuts: list[tuple[str, str, float]] = []
        self._hanging: list[tuple[FaultPeer, float]] = []
        self._resizing = False

    def pass_step(self, step: int) -> None:
        """Let the time of a step pass, and what comes before the next one happen."""
        self.wait(STEP_S)
        self.reach(step)

    def reach(self, step: int) -> None:
        """Learn that a trainer is about to ask for a step."""
        while self._coming and self._coming[0].at_step <= step:
            self.happen(self._coming.pop(0))

    def happen(self, fault: Fault) -> None:
        """Let one fault happen now, or to the next message or write that it is about."""
        if fault.kind == "partition":
            self._cuts.append((fault.role, fault.other, self.clock.now() + fault.seconds))
        elif fault.kind == "stop":
            peer = self._peer(fault.role)
            if peer is not None:
                self.engine.hang(peer)
                self._hanging.append((peer, self.clock.now() + fault.seconds))
        elif fault.kind == "kill" and not fault.method:
            self._kill(fault.role)
        else:
            self._armed.append(fault)

    def wait(self, seconds: float) -> None:
        """Let time pass for everybody, as a trainer that works on a step does."""
        if not self.engine.crashed:
            try:
                self.engine.pass_time(seconds)
            except Gone:
                pass  # the service was killed meanwhile; whoever asks next finds it launched again

    def resize(self, workers: Sequence[int], *, later: bool = False) -> None:
        """Give sources so many workers, as the scaler of a service does: groups change hands, hosts come and go.

        Args:
            workers: Of every source.
            later: When somebody waits the next time, so in the middle of something; else at once.
        """
        if later:
            self.engine.later(lambda: self.resize(workers))
        elif not self._resizing and not self.engine.crashed:  # there is one scaler, which does one thing at a time
            self._resizing = True
            try:
                assert self.cluster is not None
                self.cluster.supervisor.hosts.resize(workers, [float(count) for count in workers])
            except (Gone, OverlordError):
                pass  # as the scaler does: what did not come about is taken up the next time
            finally:
                self._resizing = False

    @property
    def engine(self) -> FaultEngine:
        """The engine of the cluster."""
        assert self.cluster is not None
        return self.cluster.engine

    def calm(self) -> None:
        """Let nothing more go wrong; who hangs comes back, and cuts are mended."""
        self._coming.clear()
        self._armed.clear()
        self._cuts.clear()
        for peer, _ in self._hanging:
            self.engine.resume(peer)
        self._hanging.clear()

    # -- what the engine asks ---------------------------------------------------------------------

    def fate(self, sender: str, to: str, method: str) -> Fate:
        """Return what becomes of a message."""
        for at, fault in enumerate(self._armed):
            if _is_about(fault, to, method):
                if fault.times > 1:
                    self._armed[at] = replace(fault, times=fault.times - 1)
                else:
                    del self._armed[at]
                return _fate_of(fault)
        return DELIVERED

    def apart(self, one: str, other: str) -> bool:
        """Whether nothing gets from one to the other now."""
        return any({one, other} == {a, b} for a, b, _ in self._cuts)

    def passing(self) -> None:
        """Mend what is over by now."""
        now = self.clock.now()
        self._cuts = [cut for cut in self._cuts if cut[2] > now]
        over = [peer for peer, until in self._hanging if until <= now]
        self._hanging = [(peer, until) for peer, until in self._hanging if until > now]
        for peer in over:
            self.engine.resume(peer)

    def _kill(self, role: str) -> None:
        assert self.cluster is not None
        if role == SERVICE:
            self.cluster.crash()
        elif (peer := self._peer(role)) is not None:
            self.engine.kill_now(peer)

    def _peer(self, role: str) -> FaultPeer | None:
        assert self.cluster is not None
        names = list(self.cluster.supervisor.table.roles)
        if role not in names:
            raise SpecError(
                f"FaultScript: no role is called {role!r}; nothing would happen to it. There are {', '.join(names)} "
                f"and {SERVICE!r}."
            )
        return self.engine.newest(role)


def _is_about(fault: Fault, to: str, method: str) -> bool:
    """Whether a fault happens to a message, or to something that is done to a store."""
    if fault.kind in ("store_errors", "full_disk"):
        return method in WRITES
    if fault.role not in (to, SERVICE):
        return False
    return fault.method == method or (not fault.method and not method.startswith("store."))


def _fate_of(fault: Fault) -> Fate:
    if fault.kind == "store_errors" or fault.kind == "full_disk":
        return Fate(fails=fault.kind)
    if fault.kind == "kill":
        return Fate(kills="after" if fault.after else "before", everybody=fault.role == SERVICE)
    if fault.kind == "drop":
        return Fate(lost=not fault.after, answer_lost=fault.after)
    return Fate(twice=fault.kind == "duplicate", delay_s=fault.seconds)


class Signals:
    """Makes the faults of a script happen to the processes of a running service: those of kind kill and stop.

    Args:
        script: What goes wrong.
        hosts: Returns `service.status()["hosts"]`.
        service_pid: Returns the process id of the service itself.
    """

    def __init__(
        self, script: FaultScript, hosts: Callable[[], list[dict[str, Any]]], service_pid: Callable[[], int]
    ) -> None:
        check_for_processes(script)
        self._coming = list(script.faults)
        self._hosts = hosts
        self._service_pid = service_pid
        self._stopped: dict[int, threading.Timer] = {}

    def reach(self, step: int) -> None:
        """Learn that a trainer is about to ask for a step."""
        while self._coming and self._coming[0].at_step <= step:
            self._strike(self._coming.pop(0))

    def calm(self) -> None:
        """Let everybody go on who was stopped and lives."""
        self._coming.clear()
        for pid in list(self._stopped):
            self._continue(pid)

    def _strike(self, fault: Fault) -> None:
        pid = self._service_pid() if fault.role == SERVICE else self._pid_of(fault.role)
        try:
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            return  # it died just now of something else
        if fault.kind == "stop":  # by a thread: whoever trains may wait for just this process
            self._stopped[pid] = timer = threading.Timer(fault.seconds, self._continue, [pid])
            timer.daemon = True
            timer.start()

    def _continue(self, pid: int) -> None:
        self._stopped.pop(pid).cancel()
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it was taken for dead, and killed

    def _pid_of(self, role: str) -> int:
        until = time.monotonic() + UP_S
        while True:
            hosts = self._hosts()
            found = [host for host in hosts if host["role"] == role]
            if not found:
                names = ", ".join(host["role"] for host in hosts)
                raise SpecError(
                    f"FaultScript: no role is called {role!r}; nothing would happen to it. There are {names} and "
                    f"{SERVICE!r}."
                )
            if found[0]["up"] or time.monotonic() > until:
                return int(found[0]["pid"])
            time.sleep(0.05)


def check_for_processes(script: FaultScript) -> None:
    """Refuse a script with faults that signals cannot make.

    Raises:
        SpecError: it names the fault.
    """
    for fault in script.faults:
        if fault.kind not in ("kill", "stop") or fault.method:
            raise SpecError(
                f"FaultScript: {fault.kind!r}{' on a message' if fault.method else ''} at step {fault.at_step} "
                "cannot be done to processes; it would not happen. Use runtime='inline' for it."
            )
