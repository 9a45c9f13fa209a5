"""A loader host: the SourceLoaders of many sources, asked by messages."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from overlord.core.messages import Follow, HandedOver, HandOver, MetaDeltas, MetaRequests
from overlord.core.order import BEGIN
from overlord.core.samples import Cursor, Part
from overlord.job.specs import Source
from overlord.roles.poisoned_rows import verdicts_from_json
from overlord.runtimes.hosts.cluster_role import ClusterRole
from overlord.runtimes.hosts.loader_host import LoaderHost
from overlord.runtimes.hosts.peers import RemoteVerdicts
from overlord.runtimes.launching.deployment import (
    SourceFacts,
    index_first_windows,
    make_crew,
    make_fleet,
    open_files,
)
from overlord.runtimes.launching.newcomers import open_newcomer, prepare_newcomer, without_newcomer
from overlord.runtimes.supervision.supervisor import check_same_files
from overlord.runtimes.transport.role_codec import Unfinished
from overlord.runtimes.transport.shared_memory import give_back_freed_memory


class LoaderRole(ClusterRole):
    """A loader host."""

    def open(self, message: Any) -> Any:
        """Open the sources of this host; tell what a planner must know of them."""
        self._done = [0, 0]
        isolate = self._means.isolate(self._options.threads, self._ends)
        self._hands = self._means.hands(self._options.threads, self._options.lanes, self._ends)
        isolate_reader = self._means.isolate_reader(self._options.threads, self._ends)
        prepared = self._means.prepare(self._job, self._options, isolate=isolate, isolate_reader=isolate_reader)
        first, added = len(prepared.job.sources), message.get("added", ())
        self._prepared = self._with_added(prepared, message)
        mine = [first + at for at, one in enumerate(added) if one["mine"]]
        held = sorted({*self._site["sources"], *self._site["shadows"], *mine})
        self._files = open_files(self._prepared, held, self._hands.callers, self._count)
        names = self._prepared.job.names
        facts = {names[number]: SourceFacts.of(files) for number, files in self._files.items()}
        return {"facts": {n: [f.format, f.listing, f.total_bytes] for n, f in facts.items()}}

    def interrupt(self) -> None:
        """Let nothing wait any longer for a source that cannot be read."""
        if hasattr(self, "_fleet"):
            self._fleet.interrupt()

    def progress(self, message: Any) -> Any:
        """Tell how many sources are open."""
        return {"done": getattr(self, "_done", [0, 0])[0]}

    def begin(self, message: Any) -> Any:
        """Index the files that the first step reaches, and make the loaders."""
        job = self._prepared.job
        # The planner knows cursors and weights of the sources that are drawn from by now. Newcomers may be numbered
        # behind them: they come at a later step, or are being added at this moment. They stand at their beginning.
        coming = len(job.sources) - len(message["cursors"])
        cursors = [*(Cursor(*cursor) for cursor in message["cursors"]), *[Cursor(0, BEGIN, 0)] * coming]
        weights = [*message["weights"], *[0.0] * (len(job.sources) - len(message["weights"]))]
        self._known, self._opening = message["facts"], threading.Lock()
        index_first_windows(job, self._files, cursors, weights, self._hands.callers, self._count)
        self._verdicts = RemoteVerdicts(self._board, verdicts_from_json(message["verdicts"], job.names))
        fleet = self._fleet = make_fleet(self._prepared, self._files, self._verdicts, self._hands)
        fleet.followers = self._workers_for("shadows")
        fleet.restore(message["snapshots"])
        self._ends.callback(fleet.interrupt)
        self._host = LoaderHost(fleet, hosts=self._site["hosts"], budget_bytes=self._options.budget_bytes // 2)
        give_back_freed_memory()
        return {}

    def take_sources(self, message: Any) -> Any:
        """Open sources that come here from other hosts; whoever is asked for one that is not open does so anyway."""
        self._have(message["sources"])
        return {}

    def resize(self, message: Any) -> Any:
        """Change how many workers sources have here, and which of their groups they prepare.

        Tells what was met of sources that have left: from now on others count that.
        """
        sizes = {source: (count, Part(number, of)) for source, count, number, of in message["sizes"]}
        self._have(sizes)
        self._fleet.resize({s: n for s, (n, _) in sizes.items()}, {s: part for s, (_, part) in sizes.items()})
        met = self._fleet.leave(message["left"])
        return {"met": {source: {self._prepared.job.names[source]: one} for source, one in met.items()}}

    def workload(self, message: Any) -> Any:
        """Tell what the workers of each source have done."""
        return {"sources": self._fleet.workload()}

    def summary_buffer(self, asked: MetaRequests) -> MetaDeltas:
        """Tell what is known of some samples."""
        self._have([request.source for request in asked.requests])
        return MetaDeltas(self._fleet.summary_buffer(asked.requests))

    def hand_over(self, asked: HandOver) -> Unfinished:
        """Hand a constructor host its part of a step: popped now, in the order of the calls, and finished later."""
        self._have([source for source, _ in asked.parts])
        collect = self._host.hand_over(asked.plan, asked.ranks, asked.parts)
        return Unfinished(lambda: HandedOver(collect(), self._host.buffer_bytes))

    def follow(self, told: Follow) -> Any:
        """Keep up with the primaries of sources that are shadowed here."""
        self._have([*told.passed, *(request.source for request in told.requests)])
        self._fleet.follow(told.requests, told.passed)
        return {}

    def rest(self, message: Any) -> Any:
        """Drop what is held of sources that are not drawn from."""
        given, here = message["cursors"], self._fleet.sources
        self._fleet.rest({source: Cursor(*cursor) for source, cursor in given if source in here})
        return {}

    def note_faults(self, message: Any) -> Any:
        """Count samples whose media do not decode."""
        self._have({fault[0] for fault in message["faults"]})
        self._fleet.note_faults([tuple(fault) for fault in message["faults"]])
        return {}

    def add_source(self, message: Any) -> Any:
        """Open a source that comes while the stream runs, and make its loaders; tell what a planner must know of it.

        The host that the source is dealt to has `mine`; the others learn that there is one more.
        """
        source = Source.from_mapping(message["source"])
        if source.name not in self._prepared.job.names:  # else it was told before
            if not message["mine"]:
                self._prepared = prepare_newcomer(self._prepared, source)
                return {}
            new = open_newcomer(self._prepared, source, self._verdicts, self._hands)
            self._prepared = new.prepared
            self._files[new.number] = new.files
            self._fleet.add(new.number, new.crew)
        number = self._prepared.job.names.index(source.name)
        if number not in self._files:
            return {}
        fact = SourceFacts.of(self._files[number])
        return {"name": source.name, "fact": [fact.format, fact.listing, fact.total_bytes]}

    def drop_source(self, message: Any) -> Any:
        """Forget a source that the planner did not take on."""
        name, number = message["name"], len(self._prepared.job.names) - 1
        if self._prepared.job.names[-1] == name:
            self._prepared = without_newcomer(self._prepared)
            if self._files.pop(number, None) is not None:
                self._fleet.drop(number)
        return {}

    def status(self, message: Any) -> Any:
        """Tell what the loaders of some sources hold and have met."""
        asked, found = message["sources"], self._fleet.status()
        return {"sources": {source: found[source] for source in asked if source in found}}

    def snapshot(self, message: Any) -> Any:
        """Tell what a loader that takes the place of one here must know, of some sources."""
        names = {self._prepared.job.names[source] for source in message["sources"]}
        return {"loaders": {name: met for name, met in self._fleet.snapshot().items() if name in names}}

    def restore(self, message: Any) -> Any:
        """Take over what other loaders had met."""
        self._fleet.restore(message["loaders"])
        return {}

    def _have(self, sources: Iterable[int]) -> None:
        """Open those of some sources that are not open here: one may have come here a moment ago."""
        if all(source in self._files for source in sources):
            return
        with self._opening:
            missing = [source for source in sources if source not in self._files]
            opened = open_files(self._prepared, missing, self._hands.callers)
            names = self._prepared.job.names
            facts = {names[number]: SourceFacts.of(files) for number, files in opened.items()}
            told = {name: [fact.format, fact.listing, fact.total_bytes] for name, fact in facts.items()}
            check_same_files({**told, **self._known}, told)
            for number, files in opened.items():
                self._fleet.add(number, make_crew(self._prepared, number, files, self._verdicts, self._hands))
                self._files[number] = files

    def _count(self, what: str, done: int, of: int) -> None:
        self._done = [done, of]
        self._means.progress(what, done, of)
