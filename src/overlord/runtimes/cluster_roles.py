"""The three kinds of hosts of a cluster service, without the engine that carries their calls.

Every public method takes a frame (and a blob) and returns a frame. The book of who is who comes first, then what the
supervisor asks in this order: the others `prepare` while loaders `open`, the planner `open_store`, loaders `begin`,
the planner `begin`, constructors `begin`. A successor goes through the same steps while the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from overlord.core.plan import LoadingPlan
from overlord.core.plan_blob import plan_from_bytes, plan_to_bytes
from overlord.core.samples import Cursor
from overlord.core.specs import Source
from overlord.errors import SpecError
from overlord.roles.verdicts import verdicts_from_json
from overlord.runtimes.cluster_placement import ranks_of_host
from overlord.runtimes.constructor_host import ConstructorHost
from overlord.runtimes.deployment import (
    Prepared,
    SourceFacts,
    first_needs,
    make_constructor,
    make_fleet,
    open_files,
    plan_first_step,
    prepare,
    start_planner,
    where_it_stands,
)
from overlord.runtimes.doors import door_name
from overlord.runtimes.frames import (
    Frame,
    deltas_to_frame,
    frame_bytes,
    frame_of,
    open_frame,
    payloads_to_frame,
    requests_from_frame,
)
from overlord.runtimes.history import History, open_store, read_history
from overlord.runtimes.leftovers import remove_when_gone
from overlord.runtimes.loader_fleet import LOADER_THREADS
from overlord.runtimes.loader_host import LoaderHost
from overlord.runtimes.memory import give_back_freed_memory
from overlord.runtimes.newcomers import admit, open_newcomer, prepare_newcomer, without_newcomer
from overlord.runtimes.opening import index_first_windows
from overlord.runtimes.peers import Blobs, RemoteLoaders, RemotePlanner, RemoteVerdicts, news_from_json
from overlord.runtimes.planner_host import Pace, PlannerHost, Waiting
from overlord.runtimes.process_workers import ProcessWorkers
from overlord.runtimes.status import describe
from overlord.runtimes.switchboard import Switchboard
from overlord.runtimes.workers import ThreadWorkers
from overlord.storage import StorageOptions
from overlord.stores.places import Place, open_place
from overlord.transforms.isolation import Isolate
from overlord.transforms.per_sample import Workers

KEPT_BLOBS = 16
"""Plans that the planner keeps put, for hosts that are behind."""


class Means:
    """What a role takes from whoever runs it. These are the means of a process that has threads."""

    def workers(self, count: int, name: str, ends: contextlib.ExitStack) -> Workers:
        """Return who does leaf work, until the role ends."""
        workers = ThreadWorkers(count, f"overlord-{name}")
        ends.callback(workers.close)
        return workers

    def isolate(self, count: int, ends: contextlib.ExitStack) -> Isolate | None:
        """Return what brings Python code into process workers, until the role ends."""
        processes = ProcessWorkers(count)
        ends.callback(processes.close)
        return processes.isolate

    def open_place(self, store: str, options: StorageOptions | None = None) -> Place:
        """Open the place of a store."""
        return open_place(store, options)

    def pace(self) -> Pace:
        """Return how the planner's host waits."""
        return Pace()


class ClusterRole:
    """What the three have in common: the job, and who is who."""

    def __init__(
        self,
        bundle: bytes,
        folder: str,
        site: Mapping[str, Any],
        board: Switchboard,
        blobs: Blobs,
        means: Means | None = None,
    ) -> None:
        self._job, self._options = cloudpickle.loads(bundle)  # from the launching process to its own roles
        self._folder = Path(folder)
        self._site = site
        self._board = board
        self._blobs = blobs
        self._means = means or Means()
        self._ends = contextlib.ExitStack()

    def pid(self, frame: Frame) -> Frame:
        """Tell the process this is."""
        return frame_of({"pid": os.getpid()})

    def prepare(self, frame: Frame) -> Frame:
        """Bring the job into the form its stream is made from, with the sources that have come since."""
        self._prepared = self._with_added(prepare(self._job, self._options), frame)
        return frame_of({})

    def _with_added(self, prepared: Prepared, frame: Frame) -> Prepared:
        for added in open_frame(frame)[0].get("added", ()):
            prepared = prepare_newcomer(prepared, Source.from_mapping(added["source"]))
        return prepared

    def work_beside(self) -> None:
        """Do what threads do elsewhere: called between two messages where there are none."""

    def close(self, frame: Frame) -> Frame:
        """End everything that runs here."""
        self._ends.close()
        return frame_of({})

    def _workers_for(self, name: str, count: int | None = None) -> Workers:
        return self._means.workers(count or self._options.threads, name, self._ends)

    def _claim_folder(self) -> Path:
        """Make the service's folder where it is not there yet; it goes with this process."""
        try:
            self._folder.mkdir(mode=0o700)
        except FileExistsError:
            found = self._folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise SpecError(
                    f"the folder {self._folder} is there already and others than this user can write to it; trainers "
                    "could be given somebody else's data. Remove it, and launch again."
                ) from None
            return self._folder  # the launching host's own, which has somebody to remove it
        self._ends.callback(remove_when_gone(self._folder).close)
        return self._folder


class LoaderRole(ClusterRole):
    """A loader host."""

    def open(self, frame: Frame) -> Frame:
        """Open the sources of this host; tell what a planner must know of them."""
        self._done = [0, 0]
        isolate = self._means.isolate(self._options.threads, self._ends)
        self._callers = self._workers_for("loaders", LOADER_THREADS)
        self._workers = self._workers_for("workers")
        prepared = prepare(self._job, self._options, isolate)
        first, added = len(prepared.job.sources), open_frame(frame)[0].get("added", ())
        self._prepared = self._with_added(prepared, frame)
        mine = [first + at for at, one in enumerate(added) if one["mine"]]
        held = sorted({*self._site["sources"], *self._site["shadows"], *mine})
        self._files = open_files(self._prepared, held, self._callers, self._count)
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
        index_first_windows(job, self._files, cursors, given["weights"], self._callers, self._count)
        self._verdicts = RemoteVerdicts(self._board, verdicts_from_json(given["verdicts"], job.names))
        fleet = self._fleet = make_fleet(self._prepared, self._files, self._verdicts, self._callers, self._workers)
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
        payloads = self._host.hand_over(plan, given["ranks"], given["sources"])
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
            new = open_newcomer(self._prepared, source, self._verdicts, self._callers, self._workers)
            self._prepared = new.prepared
            self._files[new.number] = new.files
            self._fleet.add(new.number, new.loaders)
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


class PlannerRole(ClusterRole):
    """The host of the planner."""

    _history: History | None = None

    def open_store(self, frame: Frame) -> Frame:
        """Open the store, now that the sources are known; tell where they stand, and the verdicts it holds."""
        facts = {name: SourceFacts(*fact) for name, fact in open_frame(frame)[0]["facts"].items()}
        options = self._options
        if self._board.me[1] > 1:  # it comes in the place of another planner
            options = dataclasses.replace(options, recover=True)
        store, beginning = open_store(
            options, options.store or str(self._claim_folder() / "store"), self._means.open_place
        )
        try:
            if beginning.recovered:  # sources that came while its predecessor planned stand in the journal
                self._prepared = prepare(self._job, options, state=beginning.numbering)
            job = self._prepared.job
            self._facts = {name: facts[name] for name in job.names}
            self._standing = where_it_stands(self._prepared, self._facts, beginning)
            self._history = read_history(job, store, beginning, self._standing.given)
            cursors, weights = first_needs(job, self._facts, self._standing.state)
        except BaseException:
            store.close()
            raise
        met = {"verdicts": self._history.verdicts.to_json(), "snapshots": beginning.loaders}
        return frame_of({**met, "cursors": cursors, "weights": weights})

    def where(self, frame: Frame) -> Frame:
        """Tell the successor of a loader host where its sources stand."""
        assert self._history is not None
        passed = self._planner_host.passed_cursors()
        weights = self._planner_host.latest_weights or [1.0] * len(passed)
        met = {"verdicts": self._history.verdicts.to_json(), "snapshots": self._planner_host.loaders_met}
        return frame_of({**met, "cursors": passed, "weights": weights})

    def begin(self, frame: Frame) -> Frame:
        """Plan the first step, so that what is wrong shows before anything runs; a successor plans when it is asked."""
        assert self._history is not None
        loaders = self._remote = RemoteLoaders(self._board)
        prepared = self._prepared
        try:
            planner = start_planner(prepared, loaders, self._standing, self._facts, self._history)
            if not open_frame(frame)[0].get("successor"):
                plan_first_step(planner)
        except BaseException:
            self._history.store.close()
            raise

        def picture(positions: Any, view_bytes: int) -> dict[str, Any]:
            statuses = loaders.status()
            engine = prepared.options.cluster.engine if prepared.options.cluster else "ray"
            found = describe(
                self._prepared.job, planner, self._facts, statuses, engine, positions, view_bytes=view_bytes
            )
            found["planner"]["traffic"] = self._traffic()
            return found

        options, met = self._options, self._history.beginning.loaders
        self._planner_host = PlannerHost(
            planner, picture, loaders, keep=options.keep, met=met, on_source_failure=options.on_source_failure,
            pace=self._means.pace(),
        )  # fmt: skip
        self._ends.callback(self._planner_host.close)
        self._put: OrderedDict[int, Any] = OrderedDict()
        self._put_bytes = self._plans_put = self._bytes_out = self._bytes_in = 0
        self._led = -1
        self._putting = threading.Lock()
        return frame_of({"first_step": planner.first_step})

    def work_beside(self) -> None:
        """Write what is due, where no thread does."""
        if hasattr(self, "_planner_host"):
            self._planner_host.write_due()

    def plan(self, frame: Frame) -> Frame:
        """Give a host the plan of a step: put once, whoever asks."""
        message = open_frame(frame)[0]
        step = int(message["step"])
        found = self._planner_host.plan(step, news_from_json(message["news"]), int(message["host"]))
        waits = isinstance(found, Waiting)
        answer = frame_of({"waits": waits, "missing": found.missing if isinstance(found, Waiting) else None})
        if isinstance(found, LoadingPlan):  # not for a step that only somebody waits for
            self._lead_shadows(step)
        self._bytes_in += frame_bytes(frame)
        self._bytes_out += frame_bytes(answer)
        return [*answer, self._blob_of(found)] if isinstance(found, LoadingPlan) else answer

    def ask(self, frame: Frame) -> Frame:
        """Answer a client, or the owner of the service."""
        return frame_of({"answer": self._planner_host.ask(open_frame(frame)[0])})

    def tell(self, frame: Frame) -> Frame:
        """Hear how far the clients of a host are."""
        message = open_frame(frame)[0]
        self._planner_host.tell(news_from_json(message["news"]), int(message["host"]))
        return frame_of({})

    def check_source(self, frame: Frame) -> Frame:
        """Refuse a source that cannot come; tell the step that it comes at already, if it was asked for before."""
        given = open_frame(frame)[0]
        with self._planner_host.alone():
            made = self._planner_host.planner.sources.made(given["id"])
            if made is None:
                source = Source.from_mapping(given["source"])
                self._planner_host.planner.sources.check_add(source.name, given["weight"], given["step"])
        return frame_of({"step": made})

    def add_source(self, frame: Frame) -> Frame:
        """Write down a source that loaders and constructors know already; tell the step it comes at."""
        given = open_frame(frame)[0]
        with self._planner_host.alone():
            made = self._planner_host.planner.sources.made(given["id"])
            if made is not None:
                return frame_of({"step": made})
            source = Source.from_mapping(given["source"])
            weight = source.weight if given["weight"] is None else given["weight"]
            prepared = prepare_newcomer(self._prepared, source)
            facts = {**self._facts, prepared.job.names[-1]: SourceFacts(*given["fact"])}
            planner = self._planner_host.planner
            self._prepared, at = admit(planner, prepared, facts, weight, given["step"], given["id"])
            self._facts = facts
        return frame_of({"step": at})

    def verdict(self, frame: Frame) -> Frame:
        """Write down a row that kills its workers, before it counts."""
        assert self._history is not None
        given = open_frame(frame)[0]
        self._history.verdicts.add(given["source"], int(given["row"]), given["reason"])
        return frame_of({})

    def _traffic(self) -> dict[str, int]:
        """Return what went through this host: frames both ways, and plans, each of which was put once."""
        return {
            "plans": self._plans_put,
            "plan_bytes": self._put_bytes,
            "metadata_bytes": self._remote.bytes_in,
            "other_bytes": self._remote.bytes_out + self._bytes_in + self._bytes_out,
        }

    def _lead_shadows(self, step: int) -> None:
        """Tell shadows of the positions, once for every new step."""
        with self._putting:
            if step > self._led and any(host >= 0 for host in self._board.book.assignment.shadow):
                self._led = step
                self._remote.follow(dict(enumerate(self._planner_host.passed_cursors())))

    def _blob_of(self, plan: LoadingPlan) -> Any:
        with self._putting:
            if plan.step not in self._put:
                block = np.frombuffer(plan_to_bytes(plan), np.uint8)
                self._put[plan.step] = self._blobs.put(block)
                self._put_bytes += block.nbytes
                self._plans_put += 1
                while len(self._put) > KEPT_BLOBS:
                    self._put.popitem(last=False)
            return self._put[plan.step]


class ConstructorRole(ClusterRole):
    """The constructor host of one trainer host."""

    def begin(self, frame: Frame) -> Frame:
        """Build ahead, and open the door for the trainers of this host."""
        given = open_frame(frame)[0]
        workers = self._workers_for("workers")
        planner = RemotePlanner(self._board, self._blobs, self._site["number"], given["first_step"])
        loaders = RemoteLoaders(self._board, planner)
        prepared, number, hosts = self._prepared, self._site["number"], self._site["hosts"]
        self._constructor = make_constructor(prepared, loaders, workers)
        host = ConstructorHost(
            self._options,
            self._constructor,
            planner,
            ranks_of=lambda tree: ranks_of_host(number, hosts, tree.world_size),
            read_bytes=lambda: loaders.buffer_bytes,
        )
        self._ends.callback(host.close)
        door = self._claim_folder() / door_name(number, hosts)
        door.unlink(missing_ok=True)  # a predecessor that was killed has left it
        self._ends.enter_context(host.open_door(door))
        return frame_of({})

    def add_source(self, frame: Frame) -> Frame:
        """Learn of a source that comes: how its media are decoded."""
        source = Source.from_mapping(open_frame(frame)[0]["source"])
        if source.name not in self._prepared.job.names:  # else it was told before
            self._prepared = prepare_newcomer(self._prepared, source)
            self._constructor.add_source(self._prepared.transforms[-1].decoder)
        return frame_of({})

    def drop_source(self, frame: Frame) -> Frame:
        """Forget a source that the planner did not take on."""
        if self._prepared.job.names[-1] == open_frame(frame)[0]["name"]:
            self._prepared = without_newcomer(self._prepared)
            self._constructor.drop_last_source()
        return frame_of({})


ROLES: dict[str, type[ClusterRole]] = {"loader": LoaderRole, "planner": PlannerRole, "constructor": ConstructorRole}
