"""The host of the planner, asked by frames."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from overlord.core.plan import LoadingPlan
from overlord.core.plan_codec import plan_to_bytes
from overlord.errors import Rewound
from overlord.job.specs import Source
from overlord.runtimes.autoscaling.scaler import check_sizes
from overlord.runtimes.autoscaling.status import describe
from overlord.runtimes.hosts.cluster_role import ClusterRole
from overlord.runtimes.hosts.peers import RemoteLoaders, news_from_json
from overlord.runtimes.hosts.planner_host import PlannerHost, Waiting
from overlord.runtimes.launching.deployment import (
    SourceFacts,
    first_needs,
    plan_first_step,
    prepare,
    start_planner,
    where_it_stands,
)
from overlord.runtimes.launching.newcomers import admit, prepare_newcomer
from overlord.runtimes.launching.resume import History, open_store, read_history
from overlord.runtimes.transport.frames import (
    Frame,
    frame_bytes,
    frame_of,
    open_frame,
)

KEPT_BLOBS = 16
"""Plans that the planner keeps put, for hosts that are behind."""


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
            if self._board.me[1] > 1 and beginning.mesh is not None:  # its predecessor died behind the order to go back
                raise Rewound(f"the service goes back to step {beginning.replay_to}, and is started again as a whole")
            if beginning.recovered:  # sources that came while its predecessor planned stand in the journal
                self._prepared = prepare(self._job, options, state=beginning.numbering)
            job = self._prepared.job
            self._facts = {name: facts[name] for name in job.names}
            check_sizes(self._prepared, self._facts)
            self._standing = where_it_stands(self._prepared, self._facts, beginning)
            self._history = read_history(job, store, beginning, self._standing.given)
            cursors, weights = first_needs(self._prepared, self._facts, self._standing.state)
        except BaseException:
            store.close()
            raise
        met = {
            "verdicts": self._history.verdicts.to_json(),
            "snapshots": beginning.loaders,
            "facts": self._told_facts(),
        }
        return frame_of({**met, "cursors": cursors, "weights": weights})

    def where(self, frame: Frame) -> Frame:
        """Tell the successor of a loader host where its sources stand."""
        assert self._history is not None
        passed = self._planner_host.passed_cursors()
        weights = self._planner_host.latest_weights or [1.0] * len(passed)
        met = {"verdicts": self._history.verdicts.to_json(), "snapshots": self._planner_host.loaders_met}
        met["facts"] = self._told_facts()
        return frame_of({**met, "cursors": passed, "weights": weights})

    def _told_facts(self) -> dict[str, Any]:
        """Return what loaders must find where they open a source that others had open."""
        return {name: [fact.format, fact.listing, fact.total_bytes] for name, fact in self._facts.items()}

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
            pace=self._means.pace(), rewound=self._go_back,
        )  # fmt: skip
        self._ends.callback(self._planner_host.close)
        self._put: OrderedDict[int, Any] = OrderedDict()
        self._put_bytes = self._plans_put = self._bytes_out = self._bytes_in = 0
        self._led = -1
        self._putting = threading.Lock()
        return frame_of({"first_step": planner.first_step})

    def _go_back(self) -> None:
        self.rewound = True

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
        """Write down a source that loaders and constructors know already; tell the step it comes at.

        Waits for a store that is down, as every other change does.
        """
        return frame_of({"step": self._planner_host.durably(self._admit, open_frame(frame)[0])})

    def added_at(self, frame: Frame) -> Frame:
        """Tell the step that a source comes at by the id of its change; None where it was not written down."""
        with self._planner_host.alone():
            return frame_of({"step": self._planner_host.planner.sources.made(open_frame(frame)[0]["id"])})

    def _admit(self, given: dict[str, Any]) -> int:
        with self._planner_host.alone():
            made = self._planner_host.planner.sources.made(given["id"])
            if made is not None:
                return made
            source = Source.from_mapping(given["source"])
            weight = source.weight if given["weight"] is None else given["weight"]
            prepared = prepare_newcomer(self._prepared, source)
            facts = {**self._facts, prepared.job.names[-1]: SourceFacts(*given["fact"])}
            planner = self._planner_host.planner
            self._prepared, at = admit(planner, prepared, facts, weight, given["step"], given["id"])
            self._facts = facts
            return at

    def verdict(self, frame: Frame) -> Frame:
        """Write down a row that kills its workers, before it counts."""
        assert self._history is not None
        given = open_frame(frame)[0]
        self._history.verdicts.add(given["source"], int(given["row"]), given["reason"], int(given["epoch"]))
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
