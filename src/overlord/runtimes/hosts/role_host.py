"""The base class of the three role hosts, and the environment (threads, processes, clock) that a role runs in."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlord.core.memory_account import MemoryAccount
from overlord.core.messages import AddedSource, Alive, Close, Nothing, Prepare
from overlord.errors import SpecError
from overlord.job.specs import Job, Source, secret_options
from overlord.runtimes.hosts.peers import Blobs
from overlord.runtimes.hosts.prefetch import Executors, ThreadWorkers
from overlord.runtimes.hosts.shared_planner import Pace
from overlord.runtimes.launching.add_source import with_source
from overlord.runtimes.launching.deployment import (
    IsolateReader,
    Prepared,
    prepare,
)
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.supervision.child import Limits
from overlord.runtimes.supervision.cleanup import make_until_gone
from overlord.runtimes.supervision.process_workers import ProcessWorkers
from overlord.runtimes.supervision.reader_processes import ReaderProcesses
from overlord.runtimes.transport.peer_client import PeerClient
from overlord.storage import StorageOptions
from overlord.stores.places import Place, open_place
from overlord.transforms.samples.per_sample import Isolate, Workers

LOCK_FREE = frozenset({"where", "verdict", "learn", "alive"})
"""What a role answers while it is in the middle of a call."""


class RoleEnvironment:
    """The resources that a role gets from its runtime; this one is for a process that has threads."""

    runtime: str | None = None
    """What `status` calls the runtime; by default what the cluster of the launch says."""

    plans_ahead = True
    """Whether steps are planned ahead of the clients, as far as they prefetch."""

    def workers(self, count: int, name: str, ends: contextlib.ExitStack) -> Workers:
        """Return a pool for work that waits for no other role; it ends with the role."""
        workers = ThreadWorkers(count, f"overlord-{name}")
        ends.callback(workers.close)
        return workers

    def executors(self, threads: int, worker_threads: int, ends: contextlib.ExitStack) -> Executors:
        """Return the executors of a loader host; they end with the role."""
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))  # a tokenizer would have one for each core
        executors = Executors.of_threads(threads, worker_threads)
        ends.callback(executors.close)
        return executors

    def isolate(self, options: ServiceOptions, ends: contextlib.ExitStack) -> Isolate | None:
        """Return what brings Python code into process workers, until the role ends."""
        processes = ProcessWorkers(options.threads, Limits(options.heartbeat_s))
        ends.callback(processes.close)
        return processes.isolate

    def isolate_reader(self, options: ServiceOptions, ends: contextlib.ExitStack) -> IsolateReader | None:
        """Return what brings the reading of files into reader processes, until the role ends."""
        readers = ReaderProcesses(options.threads, Limits(options.heartbeat_s), parses=options.pooled)
        ends.callback(readers.close)
        return readers.isolate

    def memory(self, options: ServiceOptions) -> MemoryAccount:
        """Return the account of what the process holds in memory; roles of one process share it."""
        return MemoryAccount(options.budget_bytes)

    def progress(self, what: str, done: int, of: int) -> None:
        """Report how far the opening of sources is; a supervisor in another process asks for it instead."""

    def prepare(self, job: Job, options: ServiceOptions, **given: Any) -> Prepared:
        """Bring a job into the form its stream is made from; roles of one process may share what comes of it."""
        return prepare(job, options, **given)

    def open_place(self, store: str, options: StorageOptions | None = None) -> Place:
        """Open the place of a store."""
        return open_place(store, options)

    def pace(self) -> Pace:
        """Return how the planner's host waits."""
        return Pace()


class RoleHost:
    """A role host: it has the job, and a client of its peers. Every public method answers one message."""

    rewound = False
    """Whether all ranks go back to an earlier step: told with every beat, so that the service is started again."""
    clients = 0
    """How many clients are attached to a constructor host."""
    sources_opened = 0
    """How many sources a loader host has opened so far."""

    def __init__(
        self,
        job: Job,
        options: ServiceOptions,
        folder: str,
        site: Mapping[str, Any],
        peer_client: PeerClient,
        blobs: Blobs | None,
        environment: RoleEnvironment | None = None,
    ) -> None:
        self._job = job
        self._options = options
        self._folder = Path(folder)
        self._site = site
        self._peers = peer_client
        self._blobs = blobs
        self._environment = environment or RoleEnvironment()
        self._memory = self._environment.memory(options)
        self._ends = contextlib.ExitStack()

    @property
    def heartbeat_s(self) -> float:
        """How long the supervisor waits for a sign of life before it replaces a role."""
        return self._options.heartbeat_s

    @property
    def prepared(self) -> Prepared:
        """The job, made ready on this host."""
        return self._prepared

    def _hosts_of(self, world_size: int) -> int:
        """Return how many constructor hosts a mesh of so many ranks has."""
        return self._peers.membership.hosts.get(world_size, int(self._site["hosts"]))

    def await_progress(self, timeout_s: float) -> int:
        """Return the newest step that a client has come to (-1: none); at once where that is news."""
        time.sleep(timeout_s)
        return -1

    def alive(self, message: Nothing) -> Alive:
        """Tell the process this is, and how far it has started."""
        return Alive(os.getpid(), self.sources_opened)

    def prepare(self, message: Prepare) -> Nothing:
        """Bring the job into the form its stream is made from, with the sources that were added since."""
        isolate = self._environment.isolate(self._options, self._ends) if self._options.pooled else None
        prepared = self._environment.prepare(self._job, self._options, isolate=isolate, memory=self._memory)
        self._prepared = self._with_added(prepared, message)
        return Nothing()

    def _with_added(self, prepared: Prepared, message: Prepare) -> Prepared:
        given = dict(self._options.source_options)
        for added in message.added:
            source = Source.from_mapping(added.source)
            prepared = with_source(prepared, source)
            given[source.name] = secret_options(source)  # a planner meets the source in its journal, without them
        self._options = dataclasses.replace(self._options, source_options=given)
        return prepared

    def _learn_source(self, message: AddedSource) -> bool:
        """Learn of an added source; return whether it was not known before."""
        source = Source.from_mapping(message.source)
        if source.name in self._prepared.job.names:
            return False
        self._prepared = with_source(self._prepared, source)
        return True

    def interrupt(self) -> None:
        """End waits that may keep this role from closing."""

    def work_beside(self) -> None:
        """Do what threads do elsewhere: called between two messages where there are none."""

    def close(self, message: Close) -> Nothing:
        """End everything that runs here."""
        self._ends.close()
        return Nothing()

    def _workers_for(self, name: str, count: int | None = None) -> Workers:
        return self._environment.workers(count or self._options.threads, name, self._ends)

    def _claim_folder(self) -> Path:
        """Make the service's folder where it is not there yet; it goes with this process."""
        pipe = make_until_gone(self._folder)
        if pipe is not None:
            self._ends.callback(pipe.close)
            return self._folder
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise SpecError(
                f"the folder {self._folder} is there already and others than this user can write to it; trainers "
                "could be given data of another user's service. Remove it, and launch again."
            )
        return self._folder
