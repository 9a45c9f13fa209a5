"""Ownership of a store: one service at a time, and one incarnation of it.

Rules of this file:
1. An owner has a number, one more than the owner before it. A process claims the store by creating the record
   `owner-N`, which only one process can; it then removes the records and marks of earlier owners. Only after that does
   it read the store.
2. An owner checks that its mark still exists before it reports anything as durable. So a process that was suspended and
   resumes after another one took over finds out; its successor has read everything it had reported until then.
3. The newest record is never removed. A process that was suspended between its look and its creation may create a
   number again after the records were removed; it is not the owner if a newer record exists. As a number may be given
   twice, the names of marks are unique.
4. A service that is alive keeps its store. The same service may always take it over: that is how it recovers.
5. A service whose launcher is gone ends by itself within seconds: a script that launches again at once waits for it.
   One that was stopped (SIGSTOP) after its launcher had gone could not: it is continued, which changes nothing for any
   other process.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from overlord.errors import Fenced, StoreError, Succeeded
from overlord.stores.places import Place

BEAT_S = 20.0
"""An owner writes a heartbeat at least this often."""
SILENT_S = 60.0
"""An owner on another host without a heartbeat for this long counts as dead."""
ENDING_S = 60.0
"""How long an owner on this host whose launcher is gone is given to end. Its service and its roles have 5 s each, which
take several times as long on a host whose cores are full."""
WARN_S = 5.0
"""When it is logged that such an owner is waited for."""
TRIES = 20

logger = logging.getLogger("overlord")

_LAUNCHER = b"OVERLORD_LAUNCHER="
"""In the environment of every process of a service: the process id of its launcher."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The record of an owner."""

    service: str
    """The id of its service, which it keeps over restarts."""
    generation: int
    """Which incarnation of the service it is."""
    host: str
    pid: int
    started: int
    """When its process started, in ticks of its kernel: pids are reused."""
    kernel: str
    """The kernel and the pid namespace of its pid."""
    since: float
    closed: bool = False
    """Whether it closed the store itself."""


_record_of = msgspec.json.Decoder(Owner).decode  # made once, at import: see `codec.Decoder`


class Claim:
    """The ownership of a store by this process."""

    def __init__(self, place: Place, number: int, name: str, mark: str, owner: Owner) -> None:
        self._place = place
        self._name = name
        self._mark = mark
        self._owner = owner
        self.number = number
        self._beaten = time.monotonic()

    def check(self) -> None:
        """Check that this process still owns the store.

        Raises:
            Fenced: Another process has taken it over.
        """
        if not self._place.exists(self._mark):
            self.check_newest()

    def check_newest(self) -> None:
        """Check by all records that this process still owns the store.

        Raises:
            Fenced: Another process has taken it over.
        """
        newest = _newest(self._place)
        if newest is not None and newest[0] == self.number and self._name in dict(newest[1]):
            return
        if newest is None:
            raise StoreError(
                f"the store {self._place.name!r} is gone: it holds no record of an owner; nothing can be made "
                "durable there. Bring it back (is it mounted?), or launch with another store."
            )
        newer = newest[1][0][1]
        same = newer is not None and newer.service == self._owner.service
        raise (Succeeded if same else Fenced)(
            f"{'a successor' if same else 'another service'} has taken over the store {self._place.name!r}: "
            f"{_shown(newer)} (owner {newest[0]}). What this process (owner {self.number}) writes could not be "
            "resumed, so it stops here. End it; its successor continues."
        )

    def beat(self) -> None:
        """Write a heartbeat if the last one is old enough."""
        if time.monotonic() - self._beaten >= BEAT_S:
            self.check()  # a successor writes its own heartbeat
            self._place.write("alive", json.dumps({"owner": self.number}).encode())
            self._beaten = time.monotonic()

    def close(self) -> None:
        """Give the store up: any service may claim it."""
        if self._place.exists(self._mark):
            self._place.write(self._name, json.dumps(asdict(replace(self._owner, closed=True))).encode())


def claim(place: Place, service: str) -> Claim:
    """Become the owner of a store.

    Raises:
        StoreError: A living service owns it.
        Fenced: Another incarnation of this service claimed it at the same time.

    Example:
        >>> import tempfile
        >>> from overlord.stores.places import open_place
        >>> place = open_place(tempfile.mkdtemp())
        >>> first, second = claim(place, "a"), claim(place, "a")
        >>> first.check()
        Traceback (most recent call last):
        ...
        overlord.errors.Succeeded: a successor has taken over the store ...
    """
    # Read the newest record, refuse if its owner is alive, and try to create the next number. If another process
    # created it first, begin again. After the creation the mark is written before older records go: a predecessor that
    # finds its own mark gone then always finds a newer record.
    for _ in range(TRIES):
        newest = _newest(place)
        number, found = newest if newest is not None else (0, [])
        for name, owner in found:
            if owner is not None and owner.service != service:
                _refuse_living(place, name, owner)
        before = [owner.generation for _, owner in found if owner is not None and owner.service == service]
        own = Owner(
            service,
            max(before, default=0) + 1,
            socket.gethostname(),
            os.getpid(),
            _started(os.getpid()) or 0,
            _kernel(),
            time.time(),
        )
        created = place.create(f"owner-{number + 1:06d}", json.dumps(asdict(own)).encode())
        if created is not None:
            mark = f"held-{number + 1:06d}.{uuid.uuid4().hex}"
            place.write(mark, b"")
            mine = Claim(place, number + 1, created, mark, own)
            _remove_older(place, number + 1)
            mine.check_newest()  # it may have been suspended while others claimed the store and removed records
            return mine
        time.sleep(random.uniform(0.02, 0.2))  # random, so that two processes do not collide again
    raise StoreError(
        f"the store {place.name!r} could not be claimed: other processes claimed it {TRIES} times meanwhile, and two "
        "services cannot write to one store. Give each its own store."
    )


def _refuse_living(place: Place, name: str, owner: Owner) -> None:
    if owner.closed:
        return
    if owner.kernel == _kernel():
        if _has_ended(owner):
            return
        remedy = f"Close it, or end the process (kill {owner.pid})"
    else:
        silent = _silent_s(place, name)
        if silent > SILENT_S:
            return
        remedy = f"Close it there; if it is dead, try again in {max(1, round(SILENT_S - silent))} s"
    raise StoreError(
        f"the store {place.name!r} belongs to {_shown(owner)}, which is alive; two services in one store would mix "
        f"their journals. {remedy}, or launch with another store."
    )


def _is_alive(owner: Owner) -> bool:
    return _started(owner.pid) == owner.started


def _has_ended(owner: Owner) -> bool:
    """Return whether an owner on this host has ended, or ends within a moment because its launcher is gone (rule 5)."""
    began, warned = time.monotonic(), False
    while _is_alive(owner) and _is_orphan(owner.pid) and time.monotonic() < began + ENDING_S:
        if not warned and time.monotonic() > began + WARN_S:
            logger.warning("waiting for %s to end and leave its store: its launcher is gone", _shown(owner))
            warned = True
        _continue(owner.pid)
        time.sleep(0.05)
    return not _is_alive(owner)


def _continue(pid: int) -> None:
    """Let an orphan and the orphans above it go on if they were stopped: a role ends when its service has ended."""
    while pid > 1 and _is_orphan(pid):
        try:
            if _stat(pid)[0] == "T":
                os.kill(pid, signal.SIGCONT)
            pid = int(_stat(pid)[1])
        except (OSError, IndexError, ValueError):  # it has just ended, or belongs to another user
            return


def _is_orphan(pid: int) -> bool:
    """Return whether a process is part of a service that was launched by a process of this host which is gone."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or belongs to another user
    launcher = next((text[len(_LAUNCHER) :] for text in variables if text.startswith(_LAUNCHER)), b"")
    return launcher.isdigit() and _started(int(launcher)) is None


def _newest(place: Place) -> tuple[int, list[tuple[str, Owner | None]]] | None:
    """Return the newest owner's number and its records: several, where processes collided and died."""
    numbers: dict[int, list[str]] = {}
    for name in place.names():
        kind, number = _kind_and_number(name)
        if kind == "owner":
            numbers.setdefault(number, []).append(name)
    if not numbers:
        return None
    newest = max(numbers)
    return newest, [(name, _read(place, name)) for name in sorted(numbers[newest])]


def _read(place: Place, name: str) -> Owner | None:
    try:
        return _record_of(place.read(name) or b"")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # torn by a crash, before its claim was complete, or written by no service


def _remove_older(place: Place, number: int) -> None:
    for name in place.names():
        kind, of = _kind_and_number(name)
        if kind in ("owner", "held") and of < number:
            place.delete(name)


def _kind_and_number(name: str) -> tuple[str, int]:
    kind, _, rest = name.partition("-")
    number = rest.split(".")[0]
    return (kind, int(number)) if number.isdecimal() else ("", 0)


def _silent_s(place: Place, name: str) -> float:
    """Return the seconds since an owner's last heartbeat, by the clock of the store: clocks of hosts differ."""
    probe = f"clock-{uuid.uuid4().hex}"
    place.write(probe, b"")
    now = place.written_at(probe) or 0.0
    place.delete(probe)
    said = [at for at in (place.written_at(name), place.written_at("alive")) if at is not None]
    return now - max(said, default=0.0)


def _shown(owner: Owner | None) -> str:
    if owner is None:
        return "an owner with a damaged record"
    return f"service {owner.service[:8] or 'without a name'} (pid {owner.pid} on {owner.host})"


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> int | None:
    """Return when a process of this host started; None when it is dead.

    In ticks, as stores have it: psutil gives a time of day, which is another one after the clock was set.
    """
    try:
        fields = _stat(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _stat(pid: int) -> list[str]:
    """Return what the kernel says about a process of this host: its state, its parent, and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
