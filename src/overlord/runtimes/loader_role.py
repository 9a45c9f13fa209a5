"""A loader host: the SourceLoaders of many sources, asked by frames."""

from __future__ import annotations

from typing import Any

import numpy as np

from overlord.core.parts import Part
from overlord.core.plan_blob import plan_from_bytes
from overlord.core.samples import Cursor
from overlord.core.specs import Source
from overlord.roles.verdicts import verdicts_from_json
from overlord.runtimes.cluster_role import ClusterRole
from overlord.runtimes.deployment import (
    SourceFacts,
    make_fleet,
    open_files,
    prepare,
)
from overlord.runtimes.frames import (
    Frame,
    deltas_to_frame,
    frame_of,
    open_frame,
    payloads_to_frame,
    requests_from_frame,
)
from overlord.runtimes.loader_host import LoaderHost
from overlord.runtimes.memory import give_back_freed_memory
from overlord.runtimes.newcomers import open_newcomer, prepare_newcomer, without_newcomer
from overlord.runtimes.opening import index_first_windows
from overlord.runtimes.peers import RemoteVerdicts


class LoaderRole(ClusterRole):
    """A loader host."""

    def open(self, frame: Frame) -> Frame:
        """Open the sources of this host; tell what a planner must know of them."""
        self._done = [0, 0]
        isolate = self._means.isolate(self._options.threads, self._ends)
        self._hands = self._means.hands(self._options.threads, self._options.lanes, self._ends)
        prepared = prepare(self._job, self._options, isolate)
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
        cursors = [Cursor(*cursor) for cursor in given["cursors"]]
        index_first_windows(job, self._files, cursors, given["weights"], self._hands.callers, self._count)
        self._verdicts = RemoteVerdicts(self._board, verdicts_from_json(given["verdicts"], job.names))
        fleet = self._fleet = make_fleet(self._prepared, self._files, self._verdicts, self._hands)
        fleet.followers = self._workers_for("shadows")
        fleet.restore(given["snapshots"])
        self._ends.callback(fleet.interrupt)
        self._host = LoaderHost(fleet, hosts=self._site["hosts"], budget_bytes=self._options.budget_bytes // 2)
        give_back_freed_memory()
        return frame_of({})

    def summary_buffer(self, frame: Frame) -> Frame:
        """Tell what is known of some samples."""
        return deltas_to_frame(self._host.summary_buffer(requests_from_frame(frame)))

    def hand_over(self, frame: Frame, blob: np.ndarray[Any, Any]) -> Frame:
        """Hand a constructor host its part of a step."""
        given, plan = open_frame(frame)[0], plan_from_bytes(memoryview(blob))  # type: ignore[arg-type]
        parts = [(source, Part(number, of)) for source, number, of in given["parts"]]
        payloads = self._host.hand_over(plan, given["ranks"], parts)
        return payloads_to_frame(payloads, buffer_bytes=self._host.buffer_bytes)

    def follow(self, frame: Frame) -> Frame:
        """Keep up with the primaries of sources that are shadowed here."""
        passed = {int(source): Cursor(*cursor) for source, cursor in open_frame(frame)[0]["passed"].items()}
        self._host.follow(requests_from_frame(frame), passed)
        return frame_of({})

    def rest(self, frame: Frame) -> Frame:
        """Drop what is held of sources that are not drawn from."""
        self._host.rest({source: Cursor(*cursor) for source, cursor in open_frame(frame)[0]["cursors"]})
        return frame_of({})

    def note_faults(self, frame: Frame) -> Frame:
        """Count samples whose media do not decode."""
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

    def _count(self, what: str, done: int, of: int) -> None:
        self._done = [done, of]
