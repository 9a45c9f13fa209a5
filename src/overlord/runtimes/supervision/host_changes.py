"""Workers dealt to loader hosts while a service runs: groups change hands, hosts come and go.

    more workers than the hosts have room for       a sleeping host is woken, and brought up like a successor
    a source comes to a host                        the host opens its files first, then everybody is told
    a source leaves a host                          everybody is told first; it answers until nobody asks it any more
    a host that has nothing left                    is put to sleep, if it was asleep at the beginning

Rules of this file:
1. Whoever is asked can answer: any host that has a source open serves any of its groups, whoever prepares them.
2. A source with a shadow stays where it is: its shadow follows one position, in another process.
3. What does not come about is taken up at the next interval. Nothing of it changes the stream.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from overlord.core.samples import Part
from overlord.roles.assignment import NOBODY, Assignment
from overlord.runtimes.hosts.peers import add_up, loader_name
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.transport.engine import Engine, Incarnation
from overlord.runtimes.transport.role_messages import unwrap
from overlord.runtimes.transport.switchboard import Switchboard
from overlord.scaling.dealing import Deal, deal

logger = logging.getLogger("overlord")

ROOMY = 0.75
"""A host that was woken ends when the workers of all fill the others no more than so far."""

Sizes = Mapping[int, tuple[int, Part]]
"""Of some sources how many workers a host has, and which of the groups they prepare."""


class _Supervisor(Protocol):
    """What a change of hosts needs of whoever looks after them."""

    roles: dict[str, Incarnation]
    lock: threading.RLock

    def bring_up(self, one: Incarnation, peer: Any) -> int: ...
    def publish(self) -> None: ...
    def assign(self, assignment: Assignment, was: Assignment) -> bool: ...
    def clock(self) -> float: ...


class HostChanges:
    """Deals the workers of sources to loader hosts.

    Args:
        board: Who is who.
        engine: Starts hosts.
        supervisor: Looks after them.
        per_host: Workers that one host has room for.
    """

    def __init__(self, board: Switchboard, engine: Engine, supervisor: _Supervisor, per_host: int) -> None:
        self._board = board
        self._engine = engine
        self._supervisor = supervisor
        self._per_host = per_host
        self._spares = {one.site.number for one in supervisor.roles.values() if one.asleep}
        self.turn = threading.Lock()
        """Held while sources change hands, or come: nobody else deals them meanwhile."""
        self._sizes: dict[int, dict[int, tuple[int, Part]]] = {}

    def sizes_of(self, host: int) -> Sizes:
        """Return the workers that a successor of a host begins with."""
        return dict(self._sizes.get(host, {}))

    def workload(self) -> dict[int, dict[str, Any]]:
        """Return what the workers of every source have done, on all hosts together."""
        found: dict[int, dict[str, Any]] = {}
        for host in self._awake():
            answer = self._board.ask(loader_name(host), "workload", {}).get()
            for source, one in (unwrap(answer)["sources"] if answer is not None else {}).items():
                add_up(found, int(source), one)
        return found

    def resize(self, workers: Sequence[int], loads: Sequence[float]) -> None:
        """Give sources so many workers, on the hosts that have them or on others.

        Args:
            workers: Of every source.
            loads: How many of them each source keeps busy.
        """
        with self.turn:
            now = self._board.book.assignment
            if len(workers) != len(now.primary):
                return  # a source has come meanwhile
            fixed = self._fixed(workers, now)
            dealt = self._deal(workers, now, loads, fixed)
            if dealt.further:
                dealt = self._deal(workers, now, loads, fixed) if self._wake(dealt.further) else dealt
            wanted = self._assignment(now, dealt)
            for host in self._awake():
                new = [source for source in wanted.sources_of(host) if source not in now.sources_of(host)]
                if new:
                    self._ask(host, "take_sources", {"sources": new})
            if wanted != now and not self._supervisor.assign(wanted, now):
                return  # a shadow was promoted meanwhile
            self._sizes = self._dealt_sizes(wanted, dealt, fixed)
            for host in self._awake():
                left = [source for source in now.sources_of(host) if source not in wanted.sources_of(host)]
                met = self._ask(host, "resize", sizes_to_json(self._sizes.get(host, {}), left))["met"]
                self._pass_on(met, wanted)
            for host in self._awake():
                if host in self._spares and not wanted.sources_of(host) and not wanted.shadows_of(host):
                    self._put_to_sleep(host)

    def _fixed(self, workers: Sequence[int], now: Assignment) -> dict[int, int]:
        """Return the workers of the sources that stay where they are: rule 2, within the room that there is."""
        fixed: dict[int, int] = {}
        free = dict.fromkeys((host for hosts in now.primary for host in hosts), self._per_host)
        for source in (source for source, shadow in enumerate(now.shadow) if shadow != NOBODY):
            host = now.primary[source][0]
            fixed[source] = min(workers[source], max(free[host], 1))
            free[host] -= fixed[source]
        return fixed

    def _deal(self, workers: Sequence[int], now: Assignment, loads: Sequence[float], fixed: Mapping[int, int]) -> Deal:
        hosts = dict.fromkeys(self._awake(), self._per_host)
        for source, count in fixed.items():
            hosts[now.primary[source][0]] = max(0, hosts.get(now.primary[source][0], 0) - count)
        free = [0 if source in fixed else count for source, count in enumerate(workers)]
        dealt = deal(free, now.primary, hosts, self._per_host, loads=loads)
        for spare in sorted(self._spares & set(hosts), reverse=True):  # whoever came last goes first
            fewer = {host: room for host, room in hosts.items() if host != spare}
            if not dealt.further and sum(free) <= ROOMY * sum(fewer.values()):
                smaller = deal(free, now.primary, fewer, self._per_host, loads=loads)
                dealt, hosts = (smaller, fewer) if not smaller.further else (dealt, hosts)
        return dealt

    def _pass_on(self, met: Mapping[str, Any], wanted: Assignment) -> None:
        """Let somebody count on what was met of sources by a host that has left them."""
        for source, loaders in met.items():
            self._ask(wanted.primary[int(source)][0], "restore", {"loaders": loaders})

    def _assignment(self, now: Assignment, dealt: Deal) -> Assignment:
        """Return who has what: hosts that stay keep their place, so that few groups change hands."""
        primary: list[tuple[int, ...]] = []
        for source, hosts in enumerate(now.primary):
            new = dealt.hosts(source)
            fixed = now.shadow[source] != NOBODY or not new
            stay = tuple(host for host in hosts if host in new)
            primary.append(hosts if fixed else (*stay, *(host for host in new if host not in stay)))
        return Assignment(tuple(primary), now.shadow)

    def _dealt_sizes(
        self, wanted: Assignment, dealt: Deal, fixed: Mapping[int, int]
    ) -> dict[int, dict[int, tuple[int, Part]]]:
        sizes: dict[int, dict[int, tuple[int, Part]]] = {}
        for source, hosts in enumerate(wanted.primary):
            given = {hosts[0]: fixed[source]} if source in fixed else dict(dealt.places[source])
            for number, host in enumerate(hosts):
                sizes.setdefault(host, {})[source] = (given.get(host, 0), Part(number, len(hosts)))
        return sizes

    def _awake(self) -> list[int]:
        with self._supervisor.lock:
            roles = self._supervisor.roles.values()
            return sorted(one.site.number for one in roles if one.site.role == "loader" and not one.asleep)

    def _wake(self, count: int) -> int:
        """Bring up as many sleeping hosts; return how many came."""
        came = 0
        for host in sorted(self._spares - set(self._awake()))[:count]:
            try:
                self._start(self._supervisor.roles[loader_name(host)])
                came += 1
            except Exception as error:  # rule 3: what there is goes on
                logger.warning("loader host %d could not be started: %s", host, error)
                break
        return came

    def _start(self, one: Incarnation) -> None:
        with self._supervisor.lock:
            one.generation += 1
            one.site = self._engine.place_again(dataclasses.replace(one.site, sources=(), shadows=()))
        peer = one.coming = self._engine.start(one.site, one.generation)
        try:
            pid = self._supervisor.bring_up(one, peer)
        except BaseException:
            one.coming = None
            self._engine.kill(peer, one.site, 0)
            raise
        with self._supervisor.lock:
            one.peer, one.coming, one.pid, one.asleep = peer, None, pid, False
            one.heard = one.born = self._supervisor.clock()
            self._supervisor.publish()
        logger.info("loader host %d was started", one.site.number)

    def _put_to_sleep(self, host: int) -> None:
        """End a host that nobody has anything from; who still asks it is told that it is gone, and asks another."""
        with self._supervisor.lock:
            one = self._supervisor.roles[loader_name(host)]
            peer, pid = one.peer, one.pid
            one.asleep, one.peer, one.beat, one.told = True, None, None, None
            one.generation += 1
            self._supervisor.publish()
        if peer is not None:
            self._engine.kill(peer, one.site, pid)
        self._sizes.pop(host, None)
        logger.info("loader host %d has nothing left, and was ended", host)

    def _ask(self, host: int, method: str, message: dict[str, Any]) -> dict[str, Any]:
        return self._board.insist(loader_name(host), method, message)


def sizes_to_json(sizes: Sizes, left: Sequence[int] = ()) -> dict[str, Any]:
    """Return what a loader host is told of its workers."""
    return {"sizes": [[source, count, *part] for source, (count, part) in sizes.items()], "left": list(left)}


def spare_sites(sites: Sequence[Site], count: int) -> list[Site]:
    """Return sites for loader hosts that are not up at first, beside those that are."""
    loaders = [site for site in sites if site.role == "loader"]
    return [
        dataclasses.replace(loaders[number % len(loaders)], number=len(loaders) + number, sources=(), shadows=())
        for number in range(count)
    ]
