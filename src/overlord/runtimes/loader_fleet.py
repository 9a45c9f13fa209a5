"""The SourceLoaders of one host behind the port that planner and constructor ask."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from overlord.core.messages import LoaderOrder, MetaDelta, MetaRequest
from overlord.core.plan import LoadingPlan, with_labels
from overlord.core.samples import Cursor, Part, SampleId
from overlord.roles.ports import Collect, Workers
from overlord.roles.source_loader import Met, ShadowLoader, Staged
from overlord.runtimes.crews import Crew
from overlord.runtimes.memory import give_back_freed_memory
from overlord.runtimes.parking import Patience

STATUS_IDS = 32
"""Bad samples of each source that `status` names."""


class LoaderFleet:
    """The SourceLoaders of a host by the number of their source, each with its workers."""

    def __init__(self, crews: Mapping[int, Crew], callers: Workers, patience: Patience | None = None) -> None:
        self._crews: dict[int, Crew] = {}
        self._callers = callers
        self._patience = patience
        self.followers = callers
        """Who repeats what primaries elsewhere were asked for. Few: a new shadow reads its groups anew in the very
        moment in which its primary has taken over, and must not take the machine away from it."""
        self._shadows: dict[int, ShadowLoader] = {}
        for source, crew in crews.items():
            self.add(source, crew)

    def add(self, source: int, crew: Crew) -> None:
        """Take in the loader of a source that has come."""
        self._shadows[source] = ShadowLoader(crew.loader)
        self._crews = {**self._crews, source: crew}  # others may be looking through the old ones

    def drop(self, source: int) -> None:
        """Forget the loader of a source that nothing was drawn from."""
        self._crews = {number: crew for number, crew in self._crews.items() if number != source}

    def resize(self, workers: Mapping[int, int], parts: Mapping[int, Part] | None = None) -> None:
        """Change how many workers sources have here, and which of their groups they prepare."""
        for source, count in workers.items():
            if source in self._crews:
                self._crews[source].resize(count, (parts or {}).get(source))

    def leave(self, sources: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Let go of what is held of sources that others have now; whoever asks late is answered, and waits.

        Returns:
            What was met of each of them, which is counted elsewhere from now on.
        """
        met: dict[int, dict[str, Any]] = {}
        for source in sources:
            if source in self._crews:
                self._crews[source].resize(0)
                self._crews[source].rest(Cursor(-1, -1, -1))
                met[source] = self._crews[source].alone(lambda loader: loader.give_away()).to_json()
        return met

    def interrupt(self) -> None:
        """Let nobody wait any longer for a source that cannot be read."""
        if self._patience is not None:
            self._patience.end()

    @property
    def sources(self) -> Sequence[int]:
        """The sources that are loaded here."""
        return tuple(self._crews)

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Ask the loader of each request's source."""
        return self._callers.map(lambda request: self._crews[request.source].summary_buffer(request), requests)

    def loader_do_plan(self, plan: LoadingPlan, ranks: Collection[int]) -> Collect:
        """Hand over what a plan draws from the sources of this host; all of it, whichever ranks ask."""
        collect = self.hand_over([plan.order_of(source) for source in self.drawn(plan)])
        return lambda: [with_labels(plan, payload) for payload in collect()]

    def drawn(self, plan: LoadingPlan) -> list[int]:
        """Return the sources of this host that a plan draws from."""
        return [s for s in np.flatnonzero(np.diff(plan.draw.by_source[1])).tolist() if s in self._crews]

    def hand_over(self, orders: Sequence[LoaderOrder]) -> Collect:
        """Pop planned samples now, and finish them when they are collected."""

        def pop(order: LoaderOrder) -> Staged:
            def take() -> Staged:
                return self._crews[order.source].pop(order)

            return take() if self._patience is None else self._patience.until_read(take)

        staged = self._callers.map(pop, orders)
        return lambda: self._callers.map(lambda one: self._crews[one.order.source].finish(one), staged)

    def follow(self, requests: Sequence[MetaRequest], passed: Mapping[int, Cursor]) -> None:
        """Repeat what the primaries of some sources were asked for: they are shadowed here."""

        def repeat(source: int) -> None:
            mine = [request for request in requests if request.source == source]
            self._crews[source].alone(lambda _: self._shadows[source].follow(mine, passed.get(source)))

        self.followers.map(repeat, sorted({request.source for request in requests} | set(passed)))

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Let the loaders of some sources drop what they hold."""
        for source, cursor in cursors.items():
            self._crews[source].rest(cursor)
        give_back_freed_memory()

    def note_faults(self, faults: Sequence[tuple[int, int, int, str]]) -> None:
        """Let the loaders count samples whose media do not decode; beyond a source's tolerance this raises."""
        for source in sorted({fault[0] for fault in faults}):
            mine = [(row, epoch, reason) for at, row, epoch, reason in faults if at == source]
            self._crews[source].alone(lambda loader, mine=mine: loader.note_faults(mine))  # type: ignore[misc]

    @property
    def buffer_bytes(self) -> int:
        """Bytes in the read buffers of all loaders."""
        return sum(crew.loader.buffer_bytes for crew in self._crews.values())

    @property
    def names(self) -> dict[int, str]:
        """The names of the sources that are loaded here."""
        return {number: crew.loader.name for number, crew in self._crews.items()}

    def workload(self) -> dict[int, dict[str, Any]]:
        """Return what the workers of each source have done, without waiting for anybody who works."""
        return {
            number: {**crew.work(), "buffer_bytes": crew.loader.buffer_bytes} for number, crew in self._crews.items()
        }

    def status(self) -> dict[int, dict[str, Any]]:
        """Return what each source's loader holds and has met."""
        met = {number: crew.alone(lambda loader: loader.met) for number, crew in self._crews.items()}
        return {
            number: {
                "decoded_in": crew.loader.placement.where,
                "decoded_ratio": crew.loader.placement.ratio,
                **crew.work(),
                "followed": self._shadows[number].followed,
                "buffer_bytes": crew.loader.buffer_bytes,
                "rows_read": met[number].seen,
                "bad": len(met[number].bad),
                "bad_ids": [
                    str(SampleId(crew.loader.name, row, epoch))
                    for row, epoch in heapq.nsmallest(STATUS_IDS, met[number].bad)
                ],
                "wrong_length": len(met[number].wrong_lengths),
            }
            for number, crew in self._crews.items()
        }

    def snapshot(self) -> dict[str, Any]:
        """Return what each source's loader has met, by the source's name: what a restart would count anew."""
        return {crew.loader.name: crew.alone(lambda loader: loader.met).to_json() for crew in self._crews.values()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what other loaders of these sources had met."""
        for crew in self._crews.values():
            given = snapshot.get(crew.loader.name)
            if given is not None:
                met = Met.from_json(given)
                crew.alone(lambda loader, met=met: loader.take_over(met))  # type: ignore[misc]
