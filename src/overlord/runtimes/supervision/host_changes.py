"""Workers dealt to loader hosts while a service runs: groups move between hosts, hosts are started and ended.

    more workers than the hosts have room for       a spare host is started, and brought up like a replaced one
    a source moves to a host                        the host opens its files first, then all roles are told
    a source leaves a host                          all roles are told first; it answers until no role calls it any more
    a host that has nothing left                    is ended, if it was a spare one at the beginning

Rules of this file:
1. A host that is called can answer: any host that has a source open serves any of its groups, whichever prepares them.
2. A source with a shadow stays where it is: its shadow follows one position, in another process.
3. What fails is tried again at the next interval. Nothing of it changes the stream.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlord.core.samples import Part
from overlord.roles.assignment import NO_HOST, Assignment
from overlord.runtimes.hosts.peers import add_up, loader_name
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.launching.launch_options import LaunchOptions
from overlord.runtimes.supervision.role_table import RoleTable
from overlord.runtimes.transport.engine import Engine, RoleInstance
from overlord.runtimes.transport.role_codec import unwrap
from overlord.runtimes.transport.switchboard import Peer
from overlord.scaling.dealing import Deal, deal

logger = logging.getLogger("overlord")

WORKERS_PER_HOST = 8
"""w_actor: workers that a loader host has room for, unless there are to be more than all hosts have."""
ROOMY = 0.75
"""A host that was woken ends when the workers of all fill the others no more than so far."""

Sizes = Mapping[int, tuple[int, Part]]
"""Of some sources how many workers a host has, and which of the groups they prepare."""


class HostChanges:
    """Deals the workers of sources to loader hosts.

    Args:
        table: The roles.
        engine: Starts hosts.
        start: Starts a host at a site, and brings it up; returns its peer and its process id.
        per_host: Workers that one host has room for.
    """

    def __init__(
        self,
        table: RoleTable,
        engine: Engine,
        start: Callable[[RoleInstance, Site], tuple[Peer, int]],
        per_host: int,
    ) -> None:
        self._table = table
        self._engine = engine
        self._start = start
        self._per_host = per_host
        self._spares = {one.site.number for one in table.roles.values() if one.asleep}
        self.turn = threading.Lock()
        """Held while sources move or are added: one change at a time."""
        self._sizes: dict[int, dict[int, tuple[int, Part]]] = {}

    def sizes_of(self, host: int) -> Sizes:
        """Return the workers that a replaced host begins with."""
        return dict(self._sizes.get(host, {}))

    def workload(self) -> dict[int, dict[str, Any]]:
        """Return what the workers of every source have done, on all hosts together."""
        found: dict[int, dict[str, Any]] = {}
        for host in self._awake():
            answer = self._table.board.ask(loader_name(host), "workload", {}).get()
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
            now = self._table.board.book.assignment
            if len(workers) != len(now.primary):
                return  # a source was added meanwhile
            fixed = self._fixed(workers, now)
            dealt = self._deal(workers, now, loads, fixed)
            if dealt.further:
                dealt = self._deal(workers, now, loads, fixed) if self._wake(dealt.further) else dealt
            wanted = self._assignment(now, dealt)
            for host in self._awake():
                new = [source for source in wanted.sources_of(host) if source not in now.sources_of(host)]
                if new:
                    self._ask(host, "take_sources", {"sources": new})
            if wanted != now and not self._table.assign(wanted, now):
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
        for source in (source for source, shadow in enumerate(now.shadow) if shadow != NO_HOST):
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
        for spare in sorted(self._spares & set(hosts), reverse=True):  # the one that was started last goes first
            fewer = {host: room for host, room in hosts.items() if host != spare}
            if not dealt.further and sum(free) <= ROOMY * sum(fewer.values()):
                smaller = deal(free, now.primary, fewer, self._per_host, loads=loads)
                dealt, hosts = (smaller, fewer) if not smaller.further else (dealt, hosts)
        return dealt

    def _pass_on(self, met: Mapping[str, Any], wanted: Assignment) -> None:
        """Let another host continue the counters of sources that a host has left."""
        for source, loaders in met.items():
            self._ask(wanted.primary[int(source)][0], "restore", {"loaders": loaders})

    def _assignment(self, now: Assignment, dealt: Deal) -> Assignment:
        """Return which host has what: hosts that stay keep their place, so that few groups move."""
        primary: list[tuple[int, ...]] = []
        for source, hosts in enumerate(now.primary):
            new = dealt.hosts(source)
            fixed = now.shadow[source] != NO_HOST or not new
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
        return sorted(one.site.number for one in self._table.running("loader"))

    def _wake(self, count: int) -> int:
        """Start as many spare hosts; return how many came up."""
        came = 0
        for host in sorted(self._spares - set(self._awake()))[:count]:
            one = self._table.roles[loader_name(host)]
            with self._table.lock:
                one.generation += 1
            try:
                peer, pid = self._start(one, dataclasses.replace(one.site, sources=(), shadows=()))
            except Exception as error:  # rule 3
                logger.warning("loader host %d could not be started: %s", host, error)
                break
            self._table.came_up(one, peer, pid)
            logger.info("loader host %d was started", host)
            came += 1
        return came

    def _put_to_sleep(self, host: int) -> None:
        """End a host that has no sources left. Late callers get PeerGone and call the host that has the source now."""
        with self._table.lock:
            one = self._table.roles[loader_name(host)]
            peer, pid = one.peer, one.pid
            self._table.went_down(one, asleep=True)
            self._table.publish()
        if peer is not None:
            self._engine.kill(peer, one.site, pid)
        self._sizes.pop(host, None)
        logger.info("loader host %d has nothing left, and was ended", host)

    def _ask(self, host: int, method: str, message: dict[str, Any]) -> dict[str, Any]:
        return self._table.board.insist(loader_name(host), method, message)


def sizes_to_json(sizes: Sizes, left: Sequence[int] = ()) -> dict[str, Any]:
    """Return the message to a loader host about its workers."""
    return {"sizes": [[source, count, *part] for source, (count, part) in sizes.items()], "left": list(left)}


def spares_of(options: LaunchOptions, sites: Sequence[Site]) -> tuple[list[Site], int]:
    """Return loader hosts that sleep at first, and how many workers one has room for: all workers there may be fit."""
    if options.cluster is None:  # one process has room for all workers
        return [], options.lanes
    loaders = [site for site in sites if site.role == "loader"]
    hosts = len(loaders)
    spares = 0 if options.scaling is None else max(0, -(-options.lanes // WORKERS_PER_HOST) - hosts)
    asleep = [
        dataclasses.replace(loaders[number % hosts], number=hosts + number, sources=(), shadows=())
        for number in range(spares)
    ]
    return asleep, max(WORKERS_PER_HOST, -(-options.lanes // (hosts + spares)))
