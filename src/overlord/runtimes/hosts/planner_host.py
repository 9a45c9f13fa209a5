"""The planner host: opens the store, makes the planner, and answers the messages that other roles send to it."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from overlord.core.client_messages import AddSource, Request, mesh_to_text
from overlord.core.memory_account import HOLDERS
from overlord.core.messages import (
    UNKNOWN_FILES,
    AdmitSource,
    BeginPlanning,
    ChangeStep,
    FindChange,
    FirstStep,
    GiveUpRow,
    HostProgress,
    JoinRequest,
    Nothing,
    OpenedSources,
    PlanAnswer,
    PlanRequest,
    Positions,
    SourceFacts,
)
from overlord.core.place_tree import ranks_of_host
from overlord.core.plan import LoadingPlan, PlanSlice, plan_to_bytes
from overlord.errors import Rewound, StoreError
from overlord.job.specs import Source
from overlord.planning.learning.repetition import effective_epochs, epochs_of
from overlord.runtimes.autoscaling.scaler import check_sizes
from overlord.runtimes.hosts.peers import NO_REPORT, RemoteLoaders
from overlord.runtimes.hosts.role_host import RoleHost
from overlord.runtimes.hosts.shared_planner import SharedPlanner
from overlord.runtimes.launching.add_source import journal_last_source, with_source
from overlord.runtimes.launching.deployment import (
    base_weights,
    first_needs,
    limits_of,
    plan_first_step,
    sources_away,
    start_planner,
    state_to_resume,
)
from overlord.runtimes.launching.resume import History, ResumePoint, open_store, read_history

NUMBERS, NUMBER_BYTES = 8, 8
"""Of a message beside its columns: about so many numbers, and the bytes of one."""
KEPT_BLOBS = 16
"""Steps whose plans the planner keeps put, for hosts that are behind."""


class PlannerHost(RoleHost):
    """The host of the planner."""

    _history: History | None = None

    def open_store(self, message: OpenedSources) -> Positions:
        """Open the store, now that the sources are known; tell where they stand, and the verdicts it holds."""
        options = self._options
        if message.missing and not (options.recover or options.latest or options.state or options.before_step):
            sources_away(self._prepared, message, ResumePoint(None))  # it raises before the store is touched
        if self._peers.me[1] > 1:  # it comes in the place of another planner
            options = dataclasses.replace(options, recover=True)
        store, point = open_store(options, options.store or self._own_store(), self._environment.open_place)
        try:
            if self._peers.me[1] > 1 and point.mesh is not None:  # its predecessor died behind the order to go back
                raise Rewound(f"the service goes back to step {point.replay_to}, and is started again as a whole")
            if point.recovered:  # sources that came while its predecessor planned stand in the journal
                self._prepared = self._environment.prepare(self._job, options, state=point.numbering)
            job, away = self._prepared.job, sources_away(self._prepared, message, point)
            self._prepared = dataclasses.replace(self._prepared, away=away)
            self._facts = {name: UNKNOWN_FILES if name in away else message.facts[name] for name in job.names}
            check_sizes(self._prepared, self._facts)
            self._resumed = state_to_resume(self._prepared, self._facts, point)
            self._history = read_history(job, store, point, self._resumed.given)
            cursors, weights = first_needs(self._prepared, self._facts, self._resumed.state)
        except BaseException:
            store.close()
            raise
        verdicts = self._history.verdicts.to_json()
        return Positions(cursors, weights, self._known_facts(), verdicts, dict(point.loaders), dict(away))

    def _known_facts(self) -> dict[str, SourceFacts]:
        return {name: fact for name, fact in self._facts.items() if fact != UNKNOWN_FILES}

    def _own_store(self) -> str:
        """Return the store of a service that was given none: a folder in that of the service.

        It is made alone: a planner that starts while its service ends would make the service's folder again, behind the
        shell that removes it.
        """
        folder = self._claim_folder() / "store"
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            raise StoreError(
                f"the folder {folder.parent} is gone: the service has ended, and nothing is served."
            ) from None
        return str(folder)

    def where(self, message: Nothing) -> Positions:
        """Tell the successor of a loader host where its sources stand."""
        assert self._history is not None
        passed, verdicts = self._host.passed_cursors(), self._history.verdicts.to_json()
        weights = list(self._host.latest_weights) or [1.0] * len(passed)
        met, away = dict(self._host.loaders_met), dict(self._prepared.away)
        return Positions(passed, weights, self._known_facts(), verdicts, met, away)

    def begin(self, message: BeginPlanning) -> FirstStep:
        """Plan the first step, so that what is wrong shows before anything runs; a successor plans when it is asked."""
        assert self._history is not None
        loaders = self._remote = RemoteLoaders(self._peers)
        prepared = self._prepared
        try:
            planner = start_planner(prepared, loaders, self._resumed, self._facts, self._history)
            if not message.successor:
                plan_first_step(planner)
        except BaseException:
            self._history.store.close()
            raise

        options, met = self._options, self._history.point.loaders
        self._host = SharedPlanner(
            planner, self._status, loaders, keep=options.keep, met=met, on_source_failure=options.on_source_failure,
            pace=self._environment.pace(), rewound=self._go_back, measured=self._history.measured,
        )  # fmt: skip
        self._ends.callback(self._host.close)
        self._put: OrderedDict[int, dict[tuple[Any, ...], Any]] = OrderedDict()
        self._put_bytes = self._plans_put = self._numbers = 0
        self._led = -1
        self._putting = threading.Lock()
        given = planner.inputs.hosts()
        newest = (given[-1][0], given[-1][2]) if given else None
        return FirstStep(planner.first_step, {ranks: hosts for _, ranks, hosts in given}, newest)

    def _go_back(self) -> None:
        self.rewound = True

    @property
    def host(self) -> SharedPlanner:
        """The planner behind its lock."""
        return self._host

    def interrupt(self) -> None:
        """Send home whatever waits for a report."""
        if hasattr(self, "_host"):
            self._host.interrupt()

    def work_beside(self) -> None:
        """Write what is due, where no thread does."""
        if hasattr(self, "_host"):
            self._host.write_due()

    def plan(self, asked: PlanRequest) -> PlanAnswer:
        """Give a host its slice of the plan of a step, and those of the loader hosts, each put into storage once."""
        found = self._host.plan(asked.step, asked.news, asked.host)
        self._numbers += NUMBERS + 2 * (len(asked.news.reached) + len(asked.news.positions))
        if isinstance(found, LoadingPlan):  # not where the host must wait for a report
            self._lead_shadows(asked.step)
            following = self._host.planner.meshes.at(asked.step + 1)
            next_mesh = None if following == found.mesh else mesh_to_text(following)
            world_size = found.mesh.world_size
            ranks = ranks_of_host(asked.host, self._hosts_of(world_size), world_size)
            others = {rank for rank in asked.news.positions if rank < world_size} - set(ranks)
            if self._blobs is None:
                return PlanAnswer(next_mesh=next_mesh, plan=found)
            if asked.whole or others or len(ranks) == world_size:
                return PlanAnswer(next_mesh=next_mesh, plan=[self._put_once(found, ("whole",), lambda: None)])
            mine = self._put_once(found, ("ranks", *ranks), lambda: PlanSlice.for_ranks(found, ranks))
            loaders = self._sources_of_loaders(found)
            slices = [self._put_once(found, of, lambda of=of: PlanSlice.for_sources(found, of)) for of in loaders]  # type: ignore[misc]
            return PlanAnswer(next_mesh=next_mesh, plan=[mine, *slices], loaders=tuple(loaders))
        return PlanAnswer(found)

    def _sources_of_loaders(self, plan: LoadingPlan) -> list[tuple[int, ...]]:
        """Return the sources that a plan draws from, by the loader hosts that have them now."""
        hosts: dict[int, list[int]] = {}
        assignment = self._peers.membership.assignment
        for source in np.unique(plan.drawn[0]).tolist():
            for host in set(assignment.primary[source]):
                hosts.setdefault(host, []).append(source)
        return sorted({tuple(sources) for sources in hosts.values()})

    def ask(self, request: Request[Any]) -> Any:
        """Answer a client, or the owner of the service."""
        return self._host.ask(request)

    def join(self, request: JoinRequest) -> Any:
        """Let a rank go on at a step, knowing how far the clients of its host are."""
        self._host.tell(request.news, request.host)
        return self._host.ask(request.join)

    def tell(self, progress: HostProgress) -> Nothing:
        """Hear how far the clients of a host are."""
        self._host.tell(progress.news, progress.host)
        return Nothing()

    def check_source(self, request: AddSource) -> ChangeStep:
        """Refuse a source that cannot come; tell the step that it comes at already, if it was asked for before."""
        with self._host.alone():
            made = self._host.planner.sources.made(request.id)
            if made is None:
                source = Source.from_mapping(request.source)
                self._host.planner.sources.check_add(source.name, request.weight, request.step)
        return ChangeStep(made)

    def add_source(self, message: AdmitSource) -> ChangeStep:
        """Write down a source that loaders and constructors know already; tell the step it comes at.

        Waits for a store that is down, as every other change does.
        """
        return ChangeStep(self._host.durably(self._admit, message))

    def added_at(self, message: FindChange) -> ChangeStep:
        """Tell the step that a source comes at by the id of its change; None where it was not written down."""
        with self._host.alone():
            return ChangeStep(self._host.planner.sources.made(message.id))

    def _admit(self, message: AdmitSource) -> int:
        request = message.request
        with self._host.alone():
            made = self._host.planner.sources.made(request.id)
            if made is not None:
                return made
            source = Source.from_mapping(request.source)
            weight = source.weight if request.weight is None else request.weight
            prepared = with_source(self._prepared, source)
            facts = {**self._facts, prepared.job.names[-1]: message.fact}
            planner = self._host.planner
            self._prepared, at = journal_last_source(planner, prepared, facts, weight, request.step, request.id)
            self._facts = facts
            return at

    def verdict(self, message: GiveUpRow) -> Nothing:
        """Write down a row that kills its workers, before it counts."""
        assert self._history is not None
        self._history.verdicts.add(message.source, message.row, message.reason, message.epoch)
        return Nothing()

    def _status(self, positions: Mapping[int, int], held: Mapping[str, int]) -> dict[str, Any]:
        """Return what `service.status()` tells: roles, positions, buffers, planned and realised mixture."""
        planner, cluster = self._host.planner, self._options.cluster
        statuses, fetched, memory = self._remote.status()
        memory = {name: memory.get(name, 0) + held.get(name, 0) for name in HOLDERS if name in {*memory, *held}}
        names = planner.inputs.names
        state = planner.latest_state.grown(len(names))
        roster = planner.inputs.roster_at(planner.next_step)
        mixture = planner.mixture
        weights = planner.latest_weights or mixture.weights_at(
            0.0, names, base_weights(self._prepared.job, self._facts)
        )
        weights = (*weights, *([0.0] * (len(names) - len(weights))))
        counted = state.tokens if mixture.level == "token" else state.samples
        total, realised = sum(weights) or 1.0, max(int(counted.sum()), 1)
        passes = [epochs_of(*row) for row in np.stack([state.epoch, state.passed, state.epoch_rows], axis=1).tolist()]
        sources = {
            name: {
                "planned_share": weights[i] / total,
                "realised_share": int(counted[i]) / realised,
                "samples": int(state.samples[i]),
                "tokens": int(state.tokens[i]),
                "skipped": int(state.skipped[i]),
                "epoch": int(state.epoch[i]),
                "epochs": passes[i],
                "effective_epochs": effective_epochs(passes[i]),
                "finished": bool(state.finished[i]),
                "removed": i in roster.removed,
                "parked": None if (why := roster.parked.get(i)) is None else {"since": why.since, "why": why.why},
                "format": self._facts[name].format,
                **statuses.get(i, NO_REPORT),
            }
            for i, name in enumerate(names)
        }
        written = [name for name in self._job.names if name in sources]  # those that came later follow
        newest_plan = max(planner.next_step - 1, planner.first_step)
        mesh, coming = planner.meshes.at(newest_plan), planner.meshes.after(newest_plan)
        return {
            "runtime": self._environment.runtime or (cluster.engine if cluster is not None else "ray"),
            "pid": os.getpid(),
            "restarts": 0,
            "mesh": str(mesh),
            "next_mesh": None if coming is None else {"step": coming[0], "mesh": str(coming[1])},
            "planner": {
                "next_step": planner.next_step,
                "first_step": planner.first_step,
                "waits_for_report": planner.missing_report(planner.next_step),
                "limits": dataclasses.asdict(limits_of(self._prepared.job, self._options.layout, mesh)),
                "traffic": self._traffic(),
            },
            "store": planner.checkpoints.store.status(),
            "clients": {str(rank): step for rank, step in sorted(positions.items())},
            "memory": {"budget_bytes": self._options.budget_bytes, "held": memory},
            "remote": fetched,
            "mixture_level": mixture.level,
            "sources": {name: sources[name] for name in dict.fromkeys((*written, *sources))},
        }

    def _traffic(self) -> dict[str, int]:
        """Return what went through this host: plans and their slices as put, metadata, and numbers both ways."""
        numbers = self._numbers + NUMBERS * self._remote.requests_made
        return {
            "plans": self._plans_put,
            "plan_bytes": self._put_bytes,
            "metadata_bytes": self._remote.metadata_bytes,
            "other_bytes": NUMBER_BYTES * numbers,
        }

    def _lead_shadows(self, step: int) -> None:
        """Tell shadows of the positions, once for every new step."""
        with self._putting:
            if step > self._led and any(host >= 0 for host in self._peers.membership.assignment.shadow):
                self._led = step
                self._remote.follow(dict(enumerate(self._host.passed_cursors())))

    def _put_once(self, plan: LoadingPlan, key: tuple[Any, ...], part: Callable[[], PlanSlice | None]) -> Any:
        """Return what a plan, or a slice of it, is known by: it is put when it is first asked for."""
        with self._putting:
            if plan.step not in self._put:
                self._put[plan.step] = {}
                self._plans_put += 1
                while len(self._put) > KEPT_BLOBS:
                    self._put.popitem(last=False)
            put = self._put[plan.step]
            if key not in put:
                block = np.frombuffer(plan_to_bytes(plan, part()), np.uint8)
                self._put_bytes += block.nbytes
                assert self._blobs is not None
                put[key] = self._blobs.put(block)
            return put[key]
