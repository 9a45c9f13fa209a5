"""Assigns sources and their workers to loader hosts, with few moves from the current assignment.

A move is expensive: another host opens the files and takes over groups of the order. So a source stays while its hosts
have room, gets a further host only if they have none (data parallel), and leaves a host only if its workers fit into
fewer.

How it works: `_Table` first places sources of at most one worker, then one worker of every other source on its present
hosts, then fills those hosts, then spreads the remaining workers over further hosts. Where a host is full, `_augment`
looks for a chain of moves that frees a place on it: a breadth-first search over hosts, as in bipartite matching.

Rules of this file:
- Every source has a host, drained ones too: a host must keep its position in the order.
- No host has more workers than its capacity, except where there is not enough of it in all.
- Deterministic and stable: the same arguments give the same result, and dealing again changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Deal:
    """Which hosts hold which sources."""

    places: tuple[tuple[tuple[int, int], ...], ...]
    """Of each source: (host, workers there), by host."""
    moves: tuple[tuple[int, int], ...]
    """(source, host): sources that come to a host that does not have them now."""
    leaves: tuple[tuple[int, int], ...]
    """(source, host): sources that leave a host."""
    drained: tuple[int, ...]
    """Hosts that hold nothing and can be shut down."""
    further: int
    """How many more hosts are needed for all the workers; those of this deal are placed as far as they fit."""

    def hosts(self, source: int) -> tuple[int, ...]:
        """Return the hosts of a source."""
        return tuple(host for host, _ in self.places[source])


def deal(
    workers: Sequence[int],
    now: Sequence[Sequence[int]],
    hosts: Mapping[int, int],
    per_actor: int,
    *,
    loads: Sequence[float] | None = None,
) -> Deal:
    """Return which hosts hold each source, and how many of its workers.

    Args:
        workers: Workers of each source; 0 for one that is drained.
        now: Hosts that have each source now; hosts that are gone are ignored.
        hosts: Each host's number and its capacity in workers.
        per_actor: Workers of one source in one host at most (w_actor).
        loads: Workers that each source keeps busy: one with a single worker takes no more room than that, so that
            tiny sources share a host. None: every worker takes a place.

    Example:
        >>> deal([6, 2, 1], [[0], [0], [0]], {0: 8, 1: 8}, per_actor=8).places
        (((0, 6),), ((1, 2),), ((0, 1),))
    """
    table = _Table(workers, now, hosts, per_actor, loads)
    table.place_singles()
    table.place_firsts()
    table.fill_present_hosts()
    left, before_that = table.spread(), -1
    while left != before_that:  # a place that one source left may serve another
        table.withdraw()
        left, before_that = table.spread(), left
    places = tuple(tuple(sorted(one.items())) for one in table.placed)
    used = {host for one in table.placed for host in one}
    before = [[host for host in one if host in hosts] for one in now]
    each = max(min(per_actor, max(hosts.values(), default=per_actor)), 1)
    return Deal(
        places=places,
        moves=tuple((s, host) for s, one in enumerate(places) for host, _ in one if host not in before[s]),
        leaves=tuple((s, host) for s, one in enumerate(before) for host in one if host not in table.placed[s]),
        drained=tuple(host for host in sorted(hosts) if host not in used),
        further=math.ceil(left / each - _ROUNDING) if hosts else max(1, math.ceil(sum(workers) / each)),
    )


class _Table:
    """The hosts while workers are being dealt to them."""

    def __init__(
        self,
        workers: Sequence[int],
        now: Sequence[Sequence[int]],
        hosts: Mapping[int, int],
        per_actor: int,
        loads: Sequence[float] | None,
    ) -> None:
        self.workers = list(workers)
        self.loads = [float(min(n, 1)) if loads is None else min(1.0, loads[s]) for s, n in enumerate(workers)]
        self.free: dict[int, float] = {host: float(hosts[host]) for host in sorted(hosts)}
        self.now = [[host for host in dict.fromkeys(one) if host in self.free] for one in now]
        self.per_actor = per_actor
        self.placed: list[dict[int, int]] = [{} for _ in workers]
        self.over = 0.0
        """Workers that were placed beyond the capacity of their host."""

    def place_singles(self) -> None:
        """Place sources of one worker or none: where they are, if there is room."""
        if not self.free:
            return
        counts = dict.fromkeys(self.free, 0)
        for one in self.now:
            for host in one:
                counts[host] += 1
        unplaced = []
        for s in self._by_size(several=False):
            load = self.loads[s] if self.workers[s] else 0.0
            # Of several hosts it stays on the one with the most sources, so that another may become empty.
            roomy = [host for host in self.now[s] if self.free[host] + _ROUNDING >= load]
            if roomy:
                self._put(s, min(roomy, key=lambda host: (-counts[host], host)), load)
            else:
                unplaced.append((s, load))
        for s, load in unplaced:
            self._settle(s, load)

    def place_firsts(self) -> None:
        """Place one worker of each source of several workers on its present hosts, so that it keeps them."""
        if not self.free:
            return
        unplaced = []
        for s in self._by_size(several=True):
            roomy = [host for host in self.now[s] if self.free[host] >= 1 - _ROUNDING]
            if not roomy:
                unplaced.append(s)
            for host in roomy[: self.workers[s]]:
                self._put(s, host, 1.0)
        for s in unplaced:
            self._settle(s, 1.0)

    def fill_present_hosts(self) -> None:
        """Place further workers on hosts that have their sources; workers of others are moved to make room."""
        for s in self._by_size(several=True):
            while self._missing(s) and self._augment(s):
                pass

    def spread(self) -> int:
        """Place the remaining workers on further hosts, the emptiest first, or where others can make room.

        Returns:
            How many workers found no host.
        """
        for s in self._by_size(several=True):
            while self._missing(s):
                roomy = [h for h, free in self.free.items() if free >= 1 - _ROUNDING and h not in self.placed[s]]
                if not roomy:
                    break
                host = max(roomy, key=lambda h: (self.free[h], -h))
                count = min(self._missing(s), self.per_actor, int(self.free[host] + _ROUNDING))
                self._put(s, host, float(count), count)
            while self._missing(s) and self._augment(s, anywhere=True):
                pass
        return sum(map(self._missing, range(len(self.workers)))) + math.ceil(self.over - _ROUNDING)

    def withdraw(self) -> None:
        """Let a source leave hosts where its workers fit into fewer of those that it has."""
        for s, placed in enumerate(self.placed):
            least = max(1, math.ceil(self.workers[s] / self.per_actor))
            for host in sorted(placed, key=lambda h: (h in self.now[s], placed[h], -h)):
                others = [other for other in placed if other != host]
                room = {h: min(self.per_actor - placed[h], int(self.free[h] + _ROUNDING)) for h in others}
                if len(placed) <= least or sum(max(0, n) for n in room.values()) < placed[host]:
                    continue
                moving = placed.pop(host)
                self.free[host] += moving
                for other in sorted(others, key=lambda h: (-room[h], h)):
                    count = max(0, min(moving, room[other]))
                    placed[other] += count
                    self.free[other] -= count
                    moving -= count

    def _augment(self, source: int, *, anywhere: bool = False) -> bool:
        """Place one more worker of a source on a host it is on, if need be by moving workers of others between theirs.

        With `anywhere` the source and the others may also come to hosts that they are not on.
        """
        came: dict[int, tuple[int, int | None]] = {}  # host: (source that takes a place there, host it comes from)
        queue: list[int] = []
        for host in self.free if anywhere else self.placed[source]:
            if self.placed[source].get(host, 0) < self.per_actor:
                came[host] = (source, None)
                queue.append(host)
        for host in queue:
            if self.free[host] >= 1 - _ROUNDING:
                self._shift(came, host)
                return True
            for other, placed in enumerate(self.placed):
                # A source keeps at least one worker on the host: otherwise it would leave it.
                if other == source or placed.get(host, 0) <= 1:
                    continue
                for further in self.free if anywhere else placed:
                    if further not in came and placed.get(further, 0) < self.per_actor:
                        came[further] = (other, host)
                        queue.append(further)
        return False

    def _shift(self, came: Mapping[int, tuple[int, int | None]], host: int) -> None:
        self.free[host] -= 1
        at: int | None = host
        while at is not None:
            source, origin = came[at]
            self.placed[source][at] = self.placed[source].get(at, 0) + 1
            if origin is not None:
                self.placed[source][origin] -= 1
            at = origin

    def _by_size(self, *, several: bool) -> list[int]:
        chosen = [s for s, n in enumerate(self.workers) if (n > 1) is several]
        return sorted(chosen, key=lambda s: (-self.workers[s], s))

    def _missing(self, source: int) -> int:
        return max(0, self.workers[source] - sum(self.placed[source].values())) if self.workers[source] > 1 else 0

    def _settle(self, source: int, load: float) -> None:
        """Place a source that has no room on its hosts: on the emptiest host, or on its own if all are full."""
        host = max(self.free, key=lambda h: (self.free[h], -h))
        if self.free[host] + _ROUNDING < load:
            host = next(iter(self.now[source]), host)
            self.over += load
        self._put(source, host, load)

    def _put(self, source: int, host: int, load: float, count: int | None = None) -> None:
        if count is None:
            count = min(1, self.workers[source])
        self.placed[source][host] = self.placed[source].get(host, 0) + count
        self.free[host] -= load
