"""Looks at a running service for its page: one question a second, however many pages are open.

Rules of this file:
1. Every figure comes from `service.status()` and the plans that the planner keeps; nothing is counted here.
2. What is shown is written as JSON once for each look, and shared by all pages.
3. A service that does not answer is shown as such, and asked again: the page outlives a restart.
"""

from __future__ import annotations

import base64
import dataclasses
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Limits
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.samples import SampleId
from overlord.errors import OverlordError, SpecError
from overlord.planning.balancing.evenness import in_lockstep, over_ranks, rank_loads
from overlord.planning.costs import llama_12b
from overlord.planning.strategies import vanilla
from overlord.reports.live import remote_words, sentence_of
from overlord.reports.repetition_panel import shown_repetition
from overlord.runtimes.client_feed import ask_once
from overlord.runtimes.transport.codec import raised
from overlord.session import RunningService
from overlord.version import VERSION

LOOK_EVERY_S = 1.0
KEPT_POINTS = 1800
"""Points of each line that a page gets when it is opened: half an hour."""
PLAN_EVERY_S = 3.0
"""How often a plan is asked for at most: one of thousands of ranks has megabytes."""
ASK_EVERY_S = 0.25
"""How often plans of steps that a page names are asked for at most."""
KEPT_PLANS = 4
SILENCE_S = 10.0
"""How long the service may take to answer."""
SHOWN_FAULTS = 50
LINE_POINTS = 600
"""Points of a line over the steps of a run: more than a screen shows."""
MOST_LINES = 12
"""Lines of one chart; more could not be told apart."""
SPARK_POINTS = 60
REPETITION_LINES = ("epochs", "losses", "spread")
"""What the panel of repeated sources draws over steps."""
LINES = ("at", "step", "steps_per_s", "tokens_per_s", "waited", "views_bytes", "held_bytes")
"""What a point of the history holds, in this order."""


class Watch:
    """What pages are told of one service."""

    def __init__(self, address: str, *, changes: bool = False) -> None:
        self.address = address
        self._service = RunningService(lambda request: raised(ask_once(address, request, SILENCE_S)))
        self._changes = changes
        self._points: deque[list[float | None]] = deque(maxlen=KEPT_POINTS)
        self._status: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._sparks: dict[str, deque[float]] = {}
        self._history: tuple[float, dict[str, Any]] | None = None
        self._plans: OrderedDict[tuple[Any, int], LoadingPlan] = OrderedDict()
        self._newest: tuple[float, LoadingPlan] | None = None
        self._asked_at = 0.0
        self.newest = b"{}"
        """The newest look as JSON, with its point of the history."""
        self.number = 0
        """How many looks there were."""

    def look(self) -> None:
        """Ask the service, and write down what pages show."""
        now = time.time()
        try:
            status, lost = self._service.status(), None
        except (OverlordError, OSError) as error:
            status, lost = None, str(error)
        shown: dict[str, Any] = {"lost": lost} if status is None else shown_status(status)
        point = [now, *(shown.get("rates", {}).get(name) for name in LINES[1:])]
        with self._lock:
            if status is not None:
                self._status = status
            for one in shown.get("sources", ()):
                kept = self._sparks.setdefault(one["name"], deque(maxlen=SPARK_POINTS))
                kept.append(one["tokens_per_s"] or 0.0)
            if shown.get("sources"):  # by columns: a third of the bytes, for hundreds of sources
                shown["sources"] = {key: [one[key] for one in shown["sources"]] for key in shown["sources"][0]}
            self._points.append(point)
            facts = {"at": now, "address": self.address, "version": VERSION, "changes": self._changes, "point": point}
            self.newest = msgspec.json.encode({**facts, **shown})
            self.number += 1

    def history(self) -> bytes:
        """Return the lines so far, for a page that is opened."""
        with self._lock:
            columns = list(zip(*self._points, strict=True)) or [()] * len(LINES)
            sources = {name: list(values) for name, values in self._sparks.items()}
        return msgspec.json.encode({**dict(zip(LINES, columns, strict=True)), "sources": sources})

    def balance(self, step: int | None) -> dict[str, Any] | None:
        """Return what `shown_balance` shows of a step; None where there is no plan so far.

        Raises:
            OverlordError: The service does not answer, or does not have the plan.
        """
        plan = self.plan(step)
        with self._lock:
            planner = self._status.get("planner")
        return None if plan is None or planner is None else shown_balance(plan, Limits(**planner["limits"]))

    def samples(self, step: int | None, bucket: int) -> dict[str, Any] | None:
        """Return what `shown_samples` shows of a step; None where there is no plan so far.

        Raises:
            OverlordError: The service does not answer, or does not have the plan.
            IndexError: There is no such bucket.
        """
        plan = self.plan(step)
        return None if plan is None else shown_samples(plan, bucket)

    def steering(self, group: str | None) -> dict[str, Any]:
        """Return what `shown_steering` shows; asked for once every few seconds, however many pages are open.

        Raises:
            OverlordError: The service does not answer.
        """
        with self._lock:
            faults = self._status.get("faults") or ()
        return shown_steering(self._steps(), faults, group)

    def repetition(self) -> dict[str, Any]:
        """Return the panel of repeated sources, from the history that `steering` shows.

        Raises:
            OverlordError: The service does not answer.
        """
        shown = shown_repetition(self._steps())
        lines = {key: {name: _thinned(line) for name, line in shown[key].items()} for key in REPETITION_LINES}
        return shown | lines

    def _steps(self) -> dict[str, Any]:
        """Return the history of the service, which is asked for once every few seconds."""
        with self._lock:
            held = self._history
        if held is None or time.monotonic() - held[0] > PLAN_EVERY_S:
            held = self._history = (time.monotonic(), self._service.history())
        return held[1]

    def plan(self, step: int | None = None) -> LoadingPlan | None:
        """Return the plan of a step that the planner has in memory; by default of the newest that a trainer has.

        Nothing is planned for it, and the service is asked a few times a second at most.

        Raises:
            OverlordError: The service does not answer, or does not have the plan.
        """
        if step is not None:
            return self._kept(step)
        if self._newest is not None and time.monotonic() - self._newest[0] < PLAN_EVERY_S:
            return self._newest[1]
        with self._lock:
            status = self._status
        at = newest_step(status)
        if at is None:
            return None
        try:
            plan = self._kept(at)
        except SpecError:  # trainers are so far behind that the planner has dropped it
            plan = self._kept(int(self._service.status()["planner"]["next_step"]) - 1)
        self._newest = (time.monotonic(), plan)
        return plan

    def _kept(self, step: int) -> LoadingPlan:
        with self._lock:
            store = self._status.get("store") or {}
        key = (store.get("lineage"), step)  # ranks that go back begin a lineage, with other plans
        plan = self._plans.get(key)
        if plan is None:
            time.sleep(max(0.0, self._asked_at + ASK_EVERY_S - time.monotonic()))
            self._asked_at = time.monotonic()
            plan = self._plans[key] = self._service.kept_plan(step)
            if len(self._plans) > KEPT_PLANS:
                self._plans.popitem(last=False)
        return plan

    def change(self, name: str, value: Any, at_step: int | None) -> int:
        """Make a change of the service; return the first step it holds for.

        Raises:
            OverlordError: The service refuses it, or does not answer; nothing has changed.
        """
        if name == "reshard":
            value = ClientPlaceTree.of(value if isinstance(value, Mapping) else str(value))
        step = int(getattr(self._service, name)(value, at_step))
        self._history = None  # it has the change now
        return step


def newest_step(status: Mapping[str, Any]) -> int | None:
    """Return the newest step that a trainer has, or the newest that is planned; None before the first plan."""
    taken = [int(step) for step in (status.get("clients") or {}).values()]
    planned = (status.get("planner") or {}).get("next_step", 0) - 1
    step = min(max(taken, default=planned), planned)
    return step if step >= 0 else None


def shown_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a status."""
    rates: Mapping[str, Any] = status.get("rates") or {}
    of_sources: Mapping[str, Mapping[str, float]] = rates.get("sources") or {}
    words, mood = sentence_of(status)
    steps = [int(step) for step in (status.get("clients") or {}).values()]
    service = status.get("service") or {}
    return {
        "sentence": f"{words[:1].upper()}{words[1:]}.",
        "mood": mood,
        "runtime": status.get("runtime"),
        "mesh": status.get("mesh"),
        "next_mesh": status.get("next_mesh"),
        "restarts": service.get("restarts", 0),
        "next_step": status["planner"]["next_step"],
        "clients": {"count": len(steps), "first": min(steps, default=None), "last": max(steps, default=None)},
        "store": status.get("store"),
        "remote": remote_words(status.get("remote") or {}),
        "rates": {
            "step": max(steps, default=None),
            "steps_per_s": rates.get("steps_per_s"),
            "tokens_per_s": rates.get("tokens_per_s"),
            "waited": rates.get("wait_share"),
            "seconds": rates.get("seconds"),
            "views_bytes": status["memory"]["held"].get("views", 0),
            "held_bytes": sum(status["memory"]["held"].values()),
        },
        "sources": [
            {
                "name": name,
                "tokens_per_s": of_sources.get(name, {}).get("tokens_per_s"),
                "waited_share": of_sources.get(name, {}).get("waited_share"),
                **one,
            }
            for name, one in status["sources"].items()
        ],
        "reports": status.get("reports") or {},
        "hosts": list(status.get("hosts") or ()),
        "faults": list(status.get("faults") or ())[-SHOWN_FAULTS:],
        "scaling": list((status.get("scaling") or {}).get("events") or ())[-SHOWN_FAULTS:],
    }


def shown_balance(plan: LoadingPlan, limits: Limits) -> dict[str, Any]:
    """Return the work of every bucket's microbatches: as samples were drawn and dealt in turn, and as planned.

    Work is what a Llama of 12 billion parameters has of a microbatch, as in the reports: a sequence of twice the length
    is more than twice of it.
    """
    # What dealing in turn needs is its own business: it must not fail where the plan did not.
    drawn = Buffer(plan.draw, dataclasses.replace(limits, microbatches=None))
    dealt = vanilla()(drawn, plan.mesh)
    loads = {"before": rank_loads(dealt, plan.mesh, llama_12b), "after": rank_loads(plan, plan.mesh, llama_12b)}
    filled, tokens = loads["after"][loads["after"] > 0], plan.loads(plan.in_batch)
    mean = float(filled.mean()) if len(filled) else 1.0
    return {
        "step": plan.step,
        "axis": plan.axis,
        "mesh": str(plan.mesh),
        "mean": float(tokens[tokens > 0].mean()) if tokens.any() else 0.0,
        "most": int(tokens.max(initial=0)),
        "cp_sizes": sorted({int(size) for size in plan.cp_sizes}) if plan.cp_sizes is not None else None,
        **{name: _shown_loads(found, mean) for name, found in loads.items()},
    }


def _shown_loads(loads: npt.NDArray[np.float64], mean: float) -> dict[str, Any]:
    # One byte for each, so that thousands of ranks stay a few kilobytes: 0 is empty, 128 the mean, 255 twice the mean.
    scaled = np.clip(np.rint(loads * (128 / mean)), loads > 0, 255).astype(np.uint8)
    return {
        "buckets": len(loads),
        "microbatches": loads.shape[1],
        "loads": base64.b64encode(scaled.tobytes()).decode(),
        "over_ranks": over_ranks(loads),
        "in_lockstep": in_lockstep(loads),
    }


def shown_steering(
    history: Mapping[str, Any], faults: Sequence[Mapping[str, Any]], group: str | None
) -> dict[str, Any]:
    """Return reported values, shares of the mixture, changes and faults over the steps of the run.

    Args:
        history: What `service.history()` returned.
        faults: Those of the status.
        group: The reports to show: those whose names begin so, up to a "/"; by default the losses, if there are some.
    """
    groups = sorted({name.split("/")[0] for name in history["reports"]}, key=lambda one: ("loss" not in one, one))
    chosen = group if group in groups else next(iter(groups), None)
    reports = {name: series for name, series in history["reports"].items() if name.split("/")[0] == chosen}
    shares = {name[6:]: series for name, series in history["measured"].items() if name.startswith("share/")}
    largest = sorted(shares, key=lambda name: -shares[name]["mean"][-1])
    marks = [{"step": one["step"], "role": one["role"], "why": one["why"]} for one in faults if "step" in one]
    return {
        "groups": groups,
        "group": chosen,
        "reports": {name: _thinned(reports[name]) for name in list(reports)[:MOST_LINES]},
        "shares": {name: _thinned(shares[name]) for name in largest[:MOST_LINES]},
        "left_out": [max(0, len(one) - MOST_LINES) for one in (reports, shares)],
        "changes": history["changes"],
        "faults": marks[-SHOWN_FAULTS:],
    }


def _thinned(series: Mapping[str, Sequence[float]]) -> list[list[float]]:
    """Return steps and values of a series; of too many, the lowest and the highest of every few."""
    steps, values = np.asarray(series["step"]), np.asarray(series["mean"])
    every = -(-2 * len(steps) // LINE_POINTS)
    if every > 2:
        runs = [(at, values[at : at + every]) for at in range(0, len(values), every)]
        kept = np.unique([at + found for at, run in runs for found in (run.argmin(), run.argmax())])
        steps, values = steps[kept], values[kept]
    return [steps.tolist(), values.tolist()]


def shown_samples(plan: LoadingPlan, bucket: int) -> dict[str, Any]:
    """Return the pieces of one bucket: which samples, of which length, in which microbatch.

    Raises:
        IndexError: There is no such bucket.
    """
    if not 0 <= bucket < plan.num_buckets:
        raise IndexError(f"bucket {bucket} is not among the {plan.num_buckets} of step {plan.step}")
    names, meta = plan.draw.names, plan.draw.meta
    rows: list[dict[str, Any]] = []
    for microbatch in range(plan.num_microbatches):
        pieces = plan.bin(bucket, microbatch)
        of, first = meta[pieces.sample], pieces.start + meta["start"][pieces.sample]
        columns = (plan.draw.source[pieces.sample], of["row"], of["epoch"], first, pieces.length)
        for source, row, epoch, begin, tokens in zip(*(column.tolist() for column in columns), strict=True):
            one = SampleId(names[source], row, epoch)
            facts = {"source": one.source, "id": str(one), "epoch": epoch, "from": begin, "tokens": tokens}
            rows.append({"microbatch": microbatch, **facts})
    return {"step": plan.step, "bucket": bucket, "ranks": plan.mesh.consumers(plan.axis, bucket), "samples": rows}
