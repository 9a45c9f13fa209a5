"""Fault scripts: which fault happens at which step.

A script is a value: it can be printed, compared, drawn at random and run again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from overlord.core.spec_errors import did_you_mean
from overlord.errors import SpecError
from overlord.runtimes.transport.role_endpoint import ROLES as ROLE_HOSTS

Kind = Literal["kill", "stop", "delay", "drop", "duplicate", "partition", "store_errors", "full_disk"]

SERVICE = "service"
"""The service itself: its supervisor and all roles."""
ROLES = ("planner", "constructor host 0", "loader host 0", "loader host 1")
"""The roles of a service with two loader hosts."""
MESSAGES = {
    "planner": ("plan", "ask", "tell", "where"),
    "loader": ("summary_buffer", "hand_over", "follow", "learn"),
    "constructor": ("learn",),
}
"""The messages of each role while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    kind: Kind
    at_step: int
    """It happens when a trainer is about to ask for this step, or at the first such message from then on."""
    role: str = ""
    """The role it happens to: a name as in `service.status()["hosts"]`, or "service"."""
    other: str = ""
    """The other role of a partition."""
    method: str = ""
    """The message that it happens to; empty for any message."""
    seconds: float = 0.0
    """How long it lasts, or how late a message is."""
    times: int = 1
    """How many messages, or writes to the store, it happens to."""
    after: bool = False
    """Whether it happens between the work and the answer, instead of before the work."""


@dataclass(frozen=True, slots=True)
class FaultScript:
    """Faults in the order of their steps; each method returns a longer script.

    Example:
        >>> script = FaultScript().kill("planner", 3).stop("loader host 0", 5, for_s=8.0)
        >>> [(fault.kind, fault.role, fault.at_step) for fault in script.faults]
        [('kill', 'planner', 3), ('stop', 'loader host 0', 5)]
        >>> FaultScript.random(7, steps=10) == FaultScript.random(7, steps=10)
        True
    """

    faults: tuple[Fault, ...] = ()

    def kill(self, role: str, at_step: int, *, on: str = "", after: bool = False) -> FaultScript:
        """Kill a role as kill -9 does.

        Args:
            role: The role to kill; "service" is the service with all roles.
            at_step: Before this step.
            on: The message at which it dies, such as "plan"; empty for at once. On `inline` only.
            after: Whether it dies between the work and the answer, instead of before the work.
        """
        return self.add(Fault(kind="kill", role=role, at_step=at_step, method=on, after=after))

    def stop(self, role: str, at_step: int, for_s: float) -> FaultScript:
        """Let a role hang as SIGSTOP does, and come back; it may have a successor by then."""
        return self.add(Fault(kind="stop", role=role, at_step=at_step, seconds=for_s))

    def delay(self, role: str, at_step: int, seconds: float, *, method: str = "", times: int = 1) -> FaultScript:
        """Delay messages to a role; later messages may overtake them."""
        return self.add(Fault(kind="delay", role=role, at_step=at_step, seconds=seconds, method=method, times=times))

    def drop(self, role: str, method: str, at_step: int, times: int = 1, *, answers: bool = False) -> FaultScript:
        """Drop messages to a role, or with `answers` its replies after the work is done."""
        return self.add(Fault(kind="drop", role=role, method=method, at_step=at_step, times=times, after=answers))

    def duplicate(self, role: str, method: str, at_step: int, times: int = 1, *, late_s: float = 0.0) -> FaultScript:
        """Deliver messages to a role twice, the second time `late_s` later."""
        return self.add(Fault(kind="duplicate", role=role, method=method, at_step=at_step, times=times, seconds=late_s))

    def partition(self, a: str, b: str, at_step: int, for_s: float) -> FaultScript:
        """Cut two roles off from each other, in both directions; "service" is the supervisor."""
        return self.add(Fault(kind="partition", role=a, other=b, at_step=at_step, seconds=for_s))

    def store_errors(self, at_step: int, times: int = 1) -> FaultScript:
        """Make the store fail this many times, like a server that answers 500."""
        return self.add(Fault(kind="store_errors", at_step=at_step, times=times))

    def full_disk(self, at_step: int, times: int = 1) -> FaultScript:
        """Make this many writes to the store stop half-way: the disk is full."""
        return self.add(Fault(kind="full_disk", at_step=at_step, times=times))

    def add(self, fault: Fault) -> FaultScript:
        """Return the script with one fault more."""
        if fault.at_step < 0 or fault.times < 1 or fault.seconds < 0:
            raise SpecError(
                f"FaultScript: {fault} has a negative step or time, or times of 0; it would never happen. Give "
                "a step of 0 or more, and times of 1 or more."
            )
        known = {name for role in ROLE_HOSTS.values() for name in dir(role) if not name.startswith("_")} | {"learn"}
        if fault.method and fault.method not in known and not fault.method.startswith("store."):
            raise SpecError(
                f"FaultScript: no role is sent a message {fault.method!r}; the fault would never happen."
                f"{did_you_mean(fault.method, sorted(known))} Messages of running roles: "
                f"{', '.join(sorted({name for names in MESSAGES.values() for name in names}))}."
            )
        return replace(self, faults=tuple(sorted((*self.faults, fault), key=lambda one: one.at_step)))

    def __add__(self, other: FaultScript) -> FaultScript:
        """Return both scripts as one."""
        return FaultScript(tuple(sorted((*self.faults, *other.faults), key=lambda one: one.at_step)))

    @classmethod
    def random(
        cls, seed: int, steps: int, *, most: int = 6, roles: Sequence[str] = ROLES, service: bool = True
    ) -> FaultScript:
        """Draw a script: up to `most` faults, some of them at once, in the steps before `steps`.

        Args:
            seed: The same seed draws the same script.
            steps: Steps of the run.
            most: Faults at most.
            roles: The roles they happen to.
            service: Whether the service itself is killed too.
        """
        rng = random.Random(seed)
        script = cls()
        for _ in range(rng.randint(1, most)):
            again = bool(script.faults) and rng.random() < 0.3  # two faults at the same step
            at = script.faults[-1].at_step if again else rng.randrange(steps)
            script = script.add(_any_fault(rng, at, roles, service))
        return script


def _any_fault(rng: random.Random, at: int, roles: Sequence[str], service: bool) -> Fault:
    role = rng.choice(roles)
    method = rng.choice(MESSAGES[role.split()[0]])
    long_s = rng.choice([1.0, 4.0, 7.0, 20.0, 45.0])
    kinds: list[Kind] = ["kill", "kill", "stop", "delay", "drop", "duplicate", "partition", "store_errors", "full_disk"]
    kind = rng.choice(kinds)
    if kind == "kill":
        killed = SERVICE if service and rng.random() < 0.15 else role
        return Fault(kind=kind, role=killed, at_step=at, method=rng.choice(["", method]), after=rng.random() < 0.5)
    if kind == "stop":
        return Fault(kind=kind, role=role, at_step=at, seconds=long_s)
    if kind == "partition":
        other = rng.choice([SERVICE, *(one for one in roles if one != role)])
        return Fault(kind=kind, role=role, other=other, at_step=at, seconds=long_s)
    if kind in ("store_errors", "full_disk"):
        return Fault(kind=kind, at_step=at, times=rng.randint(1, 4))
    return Fault(
        kind=kind, role=role, method=method, at_step=at, seconds=0.0 if kind == "drop" else long_s,
        times=rng.randint(1, 3), after=kind == "drop" and rng.random() < 0.5,
    )  # fmt: skip
