"""The loader host: answers the messages that other roles and the supervisor send to the SourceLoaders of a host."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping

from overlord.core.messages import (
    AddedSource,
    DropSource,
    Follow,
    HandedOver,
    HandOver,
    LeftSources,
    LoaderSnapshots,
    MetaDeltas,
    MetaRequests,
    NoteFaults,
    Nothing,
    OpenedSource,
    OpenedSources,
    Positions,
    Prepare,
    Resize,
    Rest,
    SomeSources,
    SourceFacts,
    SourceReports,
)
from overlord.core.order import BEGIN
from overlord.core.samples import Cursor
from overlord.errors import OverlordError, SourceError
from overlord.job.specs import Source, source_digest
from overlord.readers.remote.fetching import fetcher
from overlord.readers.source_files import SourceFiles
from overlord.roles.poisoned_rows import verdicts_from_json
from overlord.runtimes.hosts.host_counters import read_host_counters
from overlord.runtimes.hosts.loader_fleet import LoaderFleet, StagedSteps, make_fleet, make_pool
from overlord.runtimes.hosts.peers import RemoteVerdicts
from overlord.runtimes.hosts.role_host import RoleHost
from overlord.runtimes.launching.add_source import open_last_source, with_source, without_last_source
from overlord.runtimes.launching.deployment import facts_of, index_first_windows, try_files
from overlord.runtimes.supervision.supervisor import check_same_files
from overlord.runtimes.transport.role_codec import Unfinished
from overlord.runtimes.transport.shared_memory import give_back_freed_memory


class LoaderHost(RoleHost):
    """Opens the sources of one host, and answers for their SourceLoaders."""

    def open(self, message: Prepare) -> OpenedSources:
        """Open the sources of this host; tell what a planner must know of them."""
        # An actor of the auto-partition has its own number of cores, and of workers that run at the same time. Where
        # workers come and go, there is room for all that one actor may have.
        given, at_once = self._options, self._site.get("busy_workers", 0)
        self._options = dataclasses.replace(
            given,
            threads=self._site.get("threads") or given.threads,
            worker_threads=max(at_once, given.workers_per_actor if given.scaling else 0)
            if at_once
            else given.worker_threads,
        )
        self._fetched_before = (
            fetcher().counters.totals()
        )  # by another service of this process, with the inline runtime
        self._fleets: list[LoaderFleet] = []
        self._ends.callback(self._forget_files)  # last of all: no thread reads any more
        isolate = self._environment.isolate(self._options, self._ends)
        self._executors = self._environment.executors(self._options.threads, self._options.worker_threads, self._ends)
        isolate_reader = self._environment.isolate_reader(self._options, self._ends)
        prepared = self._environment.prepare(
            self._job, self._options, isolate=isolate, isolate_reader=isolate_reader, memory=self._memory
        )
        first = len(prepared.job.sources)
        self._prepared = self._with_added(prepared, message)
        mine = [first + at for at, one in enumerate(message.added) if one.mine]
        held = sorted({*self._site["sources"], *self._site["shadows"], *mine})
        # One that cannot be opened is opened when it is asked for. Whether a launch may go on without it, the planner
        # knows, as the journal says whether it is parked.
        found, names = try_files(self._prepared, held, self._executors.callers, self._count), self._prepared.job.names
        self._files = {number: files for number, files in found.items() if isinstance(files, SourceFiles)}
        wrong = {names[number]: error for number, error in found.items() if isinstance(error, OverlordError)}
        missing = {name: (type(error).__name__, str(error)) for name, error in wrong.items()}
        return OpenedSources(self._facts_of(self._files), missing)

    def _forget_files(self) -> None:
        for fleet in self._fleets:
            fleet.forget()

    @property
    def fleet(self) -> LoaderFleet:
        """The SourceLoaders of this host."""
        return self._fleet

    @property
    def files(self) -> Mapping[int, SourceFiles]:
        """The files of the sources that are open here, by the sources' numbers."""
        return self._files

    def interrupt(self) -> None:
        """End all waits for sources that cannot be read."""
        if hasattr(self, "_fleet"):
            self._fleet.interrupt()

    def begin(self, message: Positions) -> Nothing:
        """Index the files that the first step reaches, and make the loaders."""
        job = self._prepared.job
        # The planner knows cursors and weights of the sources that are drawn from by now. Added sources may be numbered
        # behind them: they come at a later step, or are being added at this moment. They stand at their beginning.
        cursors = [*message.cursors, *[Cursor(0, BEGIN, 0)] * (len(job.sources) - len(message.cursors))]
        weights = [*message.weights, *[0.0] * (len(job.sources) - len(message.weights))]
        self._known, self._away, self._opening = message.facts, message.away, threading.Lock()
        for number in [number for number in self._files if not self._is_same(number, self._files[number])]:
            del self._files[number]  # replaced while it is parked: it is opened again when it is asked for
        index_first_windows(job, self._files, cursors, weights, self._executors.callers, self._count)
        self._verdicts = RemoteVerdicts(self._peers, verdicts_from_json(message.verdicts, job.names))
        fleet = self._fleet = make_fleet(self._prepared, self._files, self._verdicts, self._executors)
        self._fleets.append(fleet)
        fleet.followers = self._workers_for("shadows")
        fleet.restore(message.snapshots)
        self._ends.callback(fleet.interrupt)
        self._host = StagedSteps(
            fleet,
            hosts_of=self._hosts_of,
            memory=self._memory,
            all_columns=self._options.constructor_do_plan is not None,
        )
        staged, role = self._host, self._peers.me[0]
        self._memory.add("read ahead", lambda: fleet.noted_bytes, role)
        self._memory.add("staged", lambda: staged.nbytes, role)
        self._memory.add("remote ranges", lambda: fetcher().held_bytes)
        give_back_freed_memory()
        return Nothing()

    def take_sources(self, message: SomeSources) -> Nothing:
        """Open sources that move here from other hosts, ahead of the first request, which would open them otherwise."""
        self._have(message.sources)
        return Nothing()

    def resize(self, message: Resize) -> LeftSources:
        """Change how many workers sources have here, and which of their groups they prepare.

        Returns the counters of sources that have moved away; their new hosts continue them.
        """
        sizes = message.sizes
        self._have(sizes)
        self._fleet.resize({s: n for s, (n, _) in sizes.items()}, {s: part for s, (_, part) in sizes.items()})
        met, names = self._fleet.leave(message.left), self._prepared.job.names
        return LeftSources({source: LoaderSnapshots({names[source]: one}) for source, one in met.items()})

    def workload(self, message: Nothing) -> SourceReports:
        """Tell what the workers of each source have done."""
        return SourceReports(self._fleet.workload(), dataclasses.asdict(read_host_counters(self._options.writes_to)))

    def summary_buffer(self, asked: MetaRequests) -> MetaDeltas:
        """Tell what is known of some samples."""
        self._have([request.source for request in asked.requests])
        return MetaDeltas(self._fleet.summary_buffer(asked.requests))

    def hand_over(self, asked: HandOver) -> Unfinished:
        """Hand a constructor host its part of a step: popped now, in the order of the calls, and finished later."""
        self._fleet.until_read(lambda: self._have([source for source, _ in asked.parts]))
        collect = self._host.hand_over(asked.plan, asked.ranks, asked.parts)
        return Unfinished(lambda: HandedOver(collect(), self._host.buffer_bytes))

    def follow(self, told: Follow) -> Nothing:
        """Keep up with the primaries of sources that are shadowed here."""
        self._have([request.source for request in told.requests])
        here = set(self._fleet.sources)  # without those that are away
        self._fleet.follow(told.requests, {source: at for source, at in told.passed.items() if source in here})
        return Nothing()

    def rest(self, message: Rest) -> Nothing:
        """Drop what is held of sources that are not drawn from."""
        here = self._fleet.sources
        self._fleet.rest({source: cursor for source, cursor in message.cursors.items() if source in here})
        return Nothing()

    def note_faults(self, message: NoteFaults) -> Nothing:
        """Count samples whose media do not decode."""
        self._have({fault[0] for fault in message.faults})
        self._fleet.note_faults(message.faults)
        return Nothing()

    def add_source(self, message: AddedSource) -> OpenedSource | Nothing:
        """Open a source that comes while the stream runs, and make its loaders; tell what a planner must know of it.

        The host that the source is dealt to has `mine`; the others learn that there is one more.
        """
        source = Source.from_mapping(message.source)
        if source.name not in self._prepared.job.names:  # else it was told before
            prepared = with_source(self._prepared, source)
            files = open_last_source(prepared, self._executors.callers) if message.mine else None
            self._prepared, number = prepared, len(prepared.job.sources) - 1
            if files is not None:
                self._fleet.add(number, make_pool(prepared, number, files, self._verdicts, self._executors))
                self._files[number] = files
        number = self._prepared.job.names.index(source.name)
        if number not in self._files:
            return Nothing()
        return OpenedSource(source.name, facts_of(self._files[number]))

    def drop_source(self, message: DropSource) -> Nothing:
        """Forget a source that the planner did not take on."""
        number = len(self._prepared.job.names) - 1
        if self._prepared.job.names[-1] == message.name:
            self._prepared = without_last_source(self._prepared)
            if self._files.pop(number, None) is not None:
                self._fleet.drop(number)
        return Nothing()

    def status(self, message: SomeSources) -> SourceReports:
        """Tell what the loaders of some sources hold and have met."""
        found = self._fleet.status()
        reports = {source: found[source] for source in message.sources if source in found}
        held = self._memory.held("read ahead", "staged", "shuffle groups", "remote ranges")
        return SourceReports(reports, fetched=fetcher().counters.since(self._fetched_before), memory=held)

    def snapshot(self, message: SomeSources) -> LoaderSnapshots:
        """Tell what a loader that takes the place of one here must know, of some sources."""
        names = {self._prepared.job.names[source] for source in message.sources}
        return LoaderSnapshots({name: met for name, met in self._fleet.snapshot().items() if name in names})

    def restore(self, message: LoaderSnapshots) -> Nothing:
        """Take over what other loaders had met."""
        self._fleet.restore(message.loaders)
        return Nothing()

    def _have(self, sources: Iterable[int]) -> None:
        """Open those of some sources that are not open here: one may have come here a moment ago."""
        if all(source in self._files for source in sources):
            return
        job = self._prepared.job
        with self._opening:
            missing = [source for source in sources if source not in self._files]
            found = try_files(self._prepared, missing, self._executors.callers)
            opened = {number: files for number, files in found.items() if isinstance(files, SourceFiles)}
            wrong = next((error for error in found.values() if isinstance(error, OverlordError)), None)
            if wrong is not None:
                raise wrong  # of one source, which may be parked; then of the next
            facts = self._facts_of(opened)
            check_same_files({**facts, **self._known}, facts)
            other = next((number for number in opened if not self._is_same(number, opened[number])), None)
            if other is not None:
                error = SourceError(
                    f"source {job.names[other]!r}: its files are not those that the stream began with; samples would "
                    "be lost or repeated. Restore them, or remove the source and add the new files under another name."
                )
                error.source = job.names[other]
                raise error
            for number, files in opened.items():
                self._fleet.add(number, make_pool(self._prepared, number, files, self._verdicts, self._executors))
                self._files[number] = files

    def _is_same(self, number: int, files: SourceFiles) -> bool:
        """Whether a source has the files that the stream began with, as far as it was away when the service started."""
        source = self._prepared.job.sources[number]
        known = self._away.get(source.name)
        return known is None or source_digest(source, files.listing_digest()) == known

    def _facts_of(self, opened: Mapping[int, SourceFiles]) -> dict[str, SourceFacts]:
        names = self._prepared.job.names
        return {names[number]: facts_of(files) for number, files in opened.items()}

    def _count(self, what: str, done: int, of: int) -> None:
        self.sources_opened = done
        self._environment.progress(what, done, of)
