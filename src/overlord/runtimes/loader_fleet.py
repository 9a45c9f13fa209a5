"""The SourceLoaders of one host behind the port that planner and constructor ask."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from overlord.core.messages import LoaderOrder, Media, MetaDelta, MetaRequest, Payload
from overlord.core.plan import LoadingPlan
from overlord.core.ragged import Ragged
from overlord.core.samples import Cursor
from overlord.roles.ports import Collect, Workers
from overlord.roles.shadow_loader import ShadowLoader
from overlord.roles.source_loader import Met, SourceLoader, Staged
from overlord.runtimes.memory import give_back_freed_memory
from overlord.runtimes.parking import Patience

LOADER_THREADS = 16
"""Calls to the loaders of one host that may wait for storage at the same time."""


class LoaderFleet:
    """The SourceLoaders of a host by the number of their source; a group belongs to one loader of its source."""

    def __init__(
        self, loaders: Mapping[int, Sequence[SourceLoader]], workers: Workers, patience: Patience | None = None
    ) -> None:
        self._loaders: dict[int, Sequence[SourceLoader]] = {}
        self._locks: dict[int, list[threading.Lock]] = {}
        self._workers = workers
        self._patience = patience
        self._handed_over: dict[int, int] = {}
        self._shadows: dict[int, list[ShadowLoader]] = {}
        for source, of_source in loaders.items():
            self.add(source, of_source)

    def add(self, source: int, loaders: Sequence[SourceLoader]) -> None:
        """Take in the loaders of a source that has come."""
        self._locks[source] = [threading.Lock() for _ in loaders]
        self._handed_over[source] = 0
        self._shadows[source] = [ShadowLoader(one) for one in loaders]
        self._loaders = {**self._loaders, source: loaders}  # others may be looking through the old ones

    def drop(self, source: int) -> None:
        """Forget the loaders of a source that nothing was drawn from."""
        self._loaders = {number: loaders for number, loaders in self._loaders.items() if number != source}

    def interrupt(self) -> None:
        """Let nobody wait any longer for a source that cannot be read."""
        if self._patience is not None:
            self._patience.end()

    @property
    def sources(self) -> Sequence[int]:
        """The sources that are loaded here."""
        return tuple(self._loaders)

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Ask the loader that owns each request's group."""

        def ask(request: MetaRequest) -> MetaDelta:
            owner = self._owner(request.source, request.cursor.group)
            with self._locks[request.source][owner]:
                return self._loaders[request.source][owner].summary_buffer(request)

        return self._workers.map(ask, requests)

    def loader_do_plan(self, plan: LoadingPlan, ranks: Collection[int]) -> Collect:
        """Hand over what a plan draws from the sources of this host; all of it, whichever ranks ask."""
        return self.hand_over([plan.order_of(source) for source in self.drawn(plan)])

    def drawn(self, plan: LoadingPlan) -> list[int]:
        """Return the sources of this host that a plan draws from."""
        return [s for s in np.flatnonzero(np.diff(plan.draw.by_source[1])).tolist() if s in self._loaders]

    def hand_over(self, orders: Sequence[LoaderOrder]) -> Collect:
        """Split orders by the owner of each group, pop now, and join what is finished when collected."""
        runs = [run for order in orders for run in self._runs(order)]

        def pop(run: tuple[int, LoaderOrder]) -> Staged:
            owner, order = run

            def take() -> Staged:
                with self._locks[order.source][owner]:
                    return self._loaders[order.source][owner].loader_do_plan(order)

            return take() if self._patience is None else self._patience.until_read(take)

        def finish(run: tuple[int, Staged]) -> Payload:
            owner, staged = run
            loader = self._loaders[staged.order.source][owner]
            done = loader.finish(staged)
            with self._locks[staged.order.source][owner]:
                payload = loader.hand_over(staged, done)
                self._handed_over[payload.source] += payload.nbytes
                return payload

        staged = self._workers.map(pop, runs)

        def collect() -> list[Payload]:
            done = self._workers.map(finish, [(owner, one) for (owner, _), one in zip(runs, staged, strict=True)])
            of_source: dict[int, list[Payload]] = {order.source: [] for order in orders}
            for payload in done:
                of_source[payload.source].append(payload)
            return [join_runs(parts) for parts in of_source.values()]

        return collect

    def follow(self, requests: Sequence[MetaRequest], passed: Mapping[int, Cursor]) -> None:
        """Repeat what the primaries of some sources were asked for: they are shadowed here."""

        def repeat(source: int) -> None:
            for number, shadow in enumerate(self._shadows[source]):
                mine = [r for r in requests if r.source == source and self._owner(source, r.cursor.group) == number]
                with self._locks[source][number]:
                    shadow.follow(mine, passed.get(source))

        self._workers.map(repeat, sorted({request.source for request in requests} | set(passed)))

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Let the loaders of some sources drop what they hold."""
        for source, cursor in cursors.items():
            for loader, lock in zip(self._loaders[source], self._locks[source], strict=True):
                with lock:
                    loader.rest(cursor)
        give_back_freed_memory()

    def note_faults(self, faults: Sequence[tuple[int, int, int, str]]) -> None:
        """Let the loaders count samples whose media do not decode; beyond a source's tolerance this raises."""
        for source in sorted({fault[0] for fault in faults}):
            loader, lock = self._loaders[source][0], self._locks[source][0]
            with lock:
                loader.note_faults([(row, epoch, reason) for at, row, epoch, reason in faults if at == source])

    @property
    def buffer_bytes(self) -> int:
        """Bytes in the read buffers of all loaders."""
        return sum(one.buffer_bytes for of_source in self._loaders.values() for one in of_source)

    def status(self) -> dict[int, dict[str, Any]]:
        """Return what each source's loaders hold and have met."""
        met = {number: Met.joined([one.met for one in of_source]) for number, of_source in self._loaders.items()}
        return {
            number: {
                "decoded_in": of_source[0].placement.where,
                "decoded_ratio": of_source[0].placement.ratio,
                "handed_over_bytes": self._handed_over[number],
                "loaders": len(of_source),
                "followed": sum(one.followed for one in self._shadows[number]),
                "buffer_bytes": sum(one.buffer_bytes for one in of_source),
                "bad": len(met[number].bad),
                "wrong_length": len(met[number].wrong_lengths),
            }
            for number, of_source in self._loaders.items()
        }

    def snapshot(self) -> dict[str, Any]:
        """Return what each source's loaders have met, by the source's name: what a restart would count anew."""
        found: dict[str, Any] = {}
        for number, of_source in self._loaders.items():
            met: list[Met] = []
            for loader, lock in zip(of_source, self._locks[number], strict=True):
                with lock:
                    met.append(loader.met)
            found[of_source[0].name] = Met.joined(met).to_json()
        return found

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what other loaders of these sources had met; the first loader of a source counts it."""
        for number, of_source in self._loaders.items():
            given = snapshot.get(of_source[0].name)
            if given is not None:
                with self._locks[number][0]:
                    of_source[0].take_over(Met.from_json(given))

    def _owner(self, source: int, group: int) -> int:
        return max(group, 0) % len(self._loaders[source])

    def _runs(self, order: LoaderOrder) -> list[tuple[int, LoaderOrder]]:
        count = len(self._loaders[order.source])
        owners = np.maximum(order.meta["group"], 0) % count
        bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        # A run must not let go of the later runs of its own loader: it ends where the next run begins.
        ends = [Cursor(*(int(order.meta[name][b]) for name in Cursor._fields)) for b in bounds[1:-1]] + [order.end]
        return [
            (int(owners[a]), LoaderOrder(order.step, order.source, order.meta[a:b], end, order.open_media))
            for (a, b), end in zip(itertools.pairwise(bounds), ends, strict=True)
        ]


def join_runs(parts: Sequence[Payload]) -> Payload:
    """Join the payloads of one source and step that came from several loaders."""
    if len(parts) == 1:
        return parts[0]
    media = [p.media for p in parts if p.media is not None]
    return Payload(
        step=parts[0].step,
        source=parts[0].source,
        tokens=Ragged.concat([p.tokens for p in parts]),
        loss=Ragged.concat([p.loss for p in parts]),
        media=Media.concat(media) if media else None,
    )
