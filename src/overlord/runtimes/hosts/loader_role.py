"""A loader host: the SourceLoaders of many sources, asked by frames."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from overlord.core.order import BEGIN
from overlord.core.plan_codec import plan_from_bytes
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
    prepare,
)
from overlord.runtimes.launching.newcomers import open_newcomer, prepare_newcomer, without_newcomer
from overlord.runtimes.supervision.supervisor import check_same_files
from overlord.runtimes.transport.frames import (
    Frame,
    deltas_to_frame,
    frame_of,
    open_frame,
    payloads_to_frame,
    requests_from_frame,
)
from overlord.runtimes.transport.shared_memory import give_back_freed_memory


class LoaderRole(ClusterRole):
    """A loader host."""

    def open(self, frame: Frame) -> Frame:
        """Open the sources of this host; tell what a planner must know of them."""
        self._done = [0, 0]
        isolate = self._means.isolate(self._options.threads, self._ends)
        self._hands = self._means.hands(self._options.threads, self._options.lanes, self._ends)
        isolate_reader = self._means.isolate_reader(self._options.threads, self._ends)
        prepared = prepare(self._job, self._options, isolate, isolate_reader=isolate_reader)
        first, added = len(prepared.job.sources), open_frame(frame)[0].get("added", ())
        self._prepared = self._with_added(prepared, frame)
        mine = [first + at for at, one in enumerate(added) if one["mine"]]
        held = sorted({*self._site["sources"], *self._site["shadows"], *mine})
        self._files = open_files(self._prepared, held, self._hands.callers, self._count)
        names = self._prepared.job.names
        facts = {names[number]: SourceFacts.of(files) for number, files in self._files.items()}
        return frame_of({"facts": {n: [f.format, f.listing, f.total_bytes] for n, f in facts.items()}})

    def progress(self, frame: Frame) -> Frame:
        """Tell how many sources are open."""
        return frame_of({"done": getattr(self, "_done", [0, 0])[0]})

    def begin(self, frame: Frame) -> Frame:
        """Index the files that the first step reaches, and make the loaders."""
        given, job = open_frame(frame)[0], self._prepared.job
        # The planner knows cursors and weights of the sources that are drawn from by now. Newcomers may be numbered
        # behind them: they come at a later step, or are being added at this moment. They stand at their beginning.
        coming = len(job.sources) - len(given["cursors"])
        cursors = [*(Cursor(*cursor) for cursor in given["cursors"]), *[Cursor(0, BEGIN, 0)] * coming]
        weights = [*given["weights"], *[0.0] * (len(job.sources) - len(given["weights"]))]
        self._known, self._opening = given["facts"], threading.Lock()
        index_first_windows(job, self._files, cursors, weights, self._hands.callers, self._count)
        self._verdicts = RemoteVerdicts(self._board, verdicts_from_json(given["verdicts"], job.names))
        fleet = self._fleet = make_fleet(self._prepared, self._files, self._verdicts, self._hands)
        fleet.followers = self._workers_for("shadows")
        fleet.restore(given["snapshots"])
        self._ends.callback(fleet.interrupt)
        self._host = LoaderHost(fleet, hosts=self._site["hosts"], budget_bytes=self._options.budget_bytes // 2)
        give_back_freed_memory()
        return frame_of({})

    def take_sources(self, frame: Frame) -> Frame:
        """Open sources that come here from other hosts; whoever is asked for one that is not open does so anyway."""
        self._have(open_frame(frame)[0]["sources"])
        return frame_of({})

    def resize(self, frame: Frame) -> Frame:
        """Change how many workers sources have here, and which of their groups they prepare.

        Tells what was met of sources that have left: from now on others count that.
        """
        given = open_frame(frame)[0]
        sizes = {source: (count, Part(number, of)) for source, count, number, of in given["sizes"]}
        self._have(sizes)
        self._fleet.resize({s: n for s, (n, _) in sizes.items()}, {s: part for s, (_, part) in sizes.items()})
        met = self._fleet.leave(given["left"])
        return frame_of({"met": {source: {self._prepared.job.names[source]: one} for source, one in met.items()}})

    def workload(self, frame: Frame) -> Frame:
        """Tell what the workers of each source have done."""
        return frame_of({"sources": self._fleet.workload()})

    def summary_buffer(self, frame: Frame) -> Frame:
        """Tell what is known of some samples."""
        requests = requests_from_frame(frame)
        self._have([request.source for request in requests])
        return deltas_to_frame(self._host.summary_buffer(requests))

    def hand_over(self, frame: Frame, blob: np.ndarray[Any, Any]) -> Frame:
        """Hand a constructor host its part of a step."""
        given, plan = open_frame(frame)[0], plan_from_bytes(memoryview(blob))  # type: ignore[arg-type]
        parts = [(source, Part(number, of)) for source, number, of in given["parts"]]
        self._have([source for source, _ in parts])
        payloads = self._host.hand_over(plan, given["ranks"], parts)
        return payloads_to_frame(payloads, buffer_bytes=self._host.buffer_bytes)

    def follow(self, frame: Frame) -> Frame:
        """Keep up with the primaries of sources that are shadowed here."""
        passed = {int(source): Cursor(*cursor) for source, cursor in open_frame(frame)[0]["passed"].items()}
        requests = requests_from_frame(frame)
        self._have([*passed, *(request.source for request in requests)])
        self._host.follow(requests, passed)
        return frame_of({})

    def rest(self, frame: Frame) -> Frame:
        """Drop what is held of sources that are not drawn from."""
        given, here = open_frame(frame)[0]["cursors"], self._fleet.sources
        self._host.rest({source: Cursor(*cursor) for source, cursor in given if source in here})
        return frame_of({})

    def note_faults(self, frame: Frame) -> Frame:
        """Count samples whose media do not decode."""
        self._have({fault[0] for fault in open_frame(frame)[0]["faults"]})
        self._host.note_faults([tuple(fault) for fault in open_frame(frame)[0]["faults"]])
        return frame_of({})

    def add_source(self, frame: Frame) -> Frame:
        """Open a source that comes while the stream runs, and make its loaders; tell what a planner must know of it.

        The host that the source is dealt to has `mine`; the others learn that there is one more.
        """
        given = open_frame(frame)[0]
        source = Source.from_mapping(given["source"])
        if source.name not in self._prepared.job.names:  # else it was told before
            if not given["mine"]:
                self._prepared = prepare_newcomer(self._prepared, source)
                return frame_of({})
            new = open_newcomer(self._prepared, source, self._verdicts, self._hands)
            self._prepared = new.prepared
            self._files[new.number] = new.files
            self._fleet.add(new.number, new.crew)
        number = self._prepared.job.names.index(source.name)
        if number not in self._files:
            return frame_of({})
        fact = SourceFacts.of(self._files[number])
        return frame_of({"name": source.name, "fact": [fact.format, fact.listing, fact.total_bytes]})

    def drop_source(self, frame: Frame) -> Frame:
        """Forget a source that the planner did not take on."""
        name, number = open_frame(frame)[0]["name"], len(self._prepared.job.names) - 1
        if self._prepared.job.names[-1] == name:
            self._prepared = without_newcomer(self._prepared)
            if self._files.pop(number, None) is not None:
                self._fleet.drop(number)
        return frame_of({})

    def status(self, frame: Frame) -> Frame:
        """Tell what the loaders of some sources hold and have met."""
        asked, found = open_frame(frame)[0]["sources"], self._host.status()
        return frame_of({"sources": {source: found[source] for source in asked if source in found}})

    def snapshot(self, frame: Frame) -> Frame:
        """Tell what a loader that takes the place of one here must know, of some sources."""
        names = {self._prepared.job.names[source] for source in open_frame(frame)[0]["sources"]}
        return frame_of({"loaders": {name: met for name, met in self._host.snapshot().items() if name in names}})

    def restore(self, frame: Frame) -> Frame:
        """Take over what other loaders had met."""
        self._host.restore(open_frame(frame)[0]["loaders"])
        return frame_of({})

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
