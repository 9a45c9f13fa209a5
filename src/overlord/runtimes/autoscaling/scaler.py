"""The AutoScaler at work: once an interval it looks at a running service, asks `decide`, and has workers changed.

Rules of this file:
1. Nothing here changes the stream: workers prepare what the planner would ask for anyway.
2. The rate that trainers want is what they took, and more while they waited: as long as they wait all the time, twice
   as much as they got.
3. What fails here is logged and tried again at the next interval. No step waits for this.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from overlord.core.client_messages import Document, GetWorkload
from overlord.core.messages import SourceFacts
from overlord.errors import OverlordError
from overlord.runtimes.autoscaling.profiling import digests_of, read_profile, refresh
from overlord.runtimes.launching.deployment import Prepared
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.scaling.autoscaler import Bottleneck, Fleet, Scaling, Waited, decide, find_bottleneck
from overlord.scaling.pressure import HostCounters, Pressure, pressure_between, shortages
from overlord.scaling.profiles import SourceCost, demand, sample_shares

logger = logging.getLogger("overlord")


def check_sizes(prepared: Prepared, facts: Mapping[str, SourceFacts]) -> None:
    """Refuse a profile that was measured on other sources than those that were opened.

    Raises:
        SpecError: it names them.
    """
    path = prepared.options.profile
    profile = None if path is None else read_profile(Path(path))
    if profile is not None:
        profile.check(digests_of(prepared, facts))


def refresh_profile(options: ServiceOptions, status: Callable[[], Mapping[str, Any]]) -> None:
    """Bring the profile of a launch up to date with what its workers did; a service that ends does not fail by it."""
    if options.profile is not None:
        try:
            refresh(Path(options.profile), status(), datetime.now(UTC).isoformat(timespec="seconds"))
        except (OverlordError, OSError) as error:
            logger.warning("the profile %s could not be brought up to date: %s", options.profile, error)


# -- while it runs ----------------------------------------------------------------------------------------------

KEPT_EVENTS = 64
LOOK_EVERY_S = 2.0
"""How often to look for a bottleneck where workers are left as they are."""
FEW_SAMPLES = 8
"""So many samples of a source tell what one costs."""
REMEMBERED = 256
"""What a source costs is the mean of about its last so many samples."""
_FALL = 0.1
"""How fast the rate that trainers want falls, in an interval in which they took less."""

RATES_S = 10.0
"""Rates and waits are those of the last seconds, as many as this..."""
MOST_RATES_S = 120.0
"""... and where no step was taken in them, of more, up to this."""
STALE_S = 30.0
"""What was seen longer ago is not told as the present."""

_NO_WORKLOAD = {
    "workers": 0, "samples_prepared": 0, "busy_s": 0.0, "cpu_s": 0.0, "waited_s": 0.0, "buffer_bytes": 0,
}  # fmt: skip
"""That of a source whose hosts do not report it."""

Watch = Callable[[Sequence[int]], Mapping[str, Any]]
"""Tells how a service does, and its weights so many steps ahead: what the planner's answer to `GetWorkload` says, under
"sources" what the workers of each source did, and under "machines" how the hosts of loaders do."""
Act = Callable[[Mapping[str, int], Mapping[str, float]], None]
"""Gives sources so many workers, of which they keep so many busy."""


class Workload(NamedTuple):
    """What loader hosts did."""

    sources: Mapping[int, Mapping[str, Any]]
    """The workers of each source, on all hosts together."""
    machines: Mapping[str, HostCounters]
    """What the kernels of the hosts have counted, by the hosts' names."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a service had done at a moment."""

    at: float
    step: int
    trained: int | None
    """The newest step that a trainer has; None where none is attached."""
    samples: int
    tokens: Mapping[str, int]
    waited_s: float
    sources: Mapping[str, Mapping[str, Any]]
    machines: Mapping[str, HostCounters]


class Scaler:
    """Right-sizes the workers of one service.

    Args:
        act: Changes it; None only looks, and names the bottleneck.
        known: What sources cost, as far as that is known before they run.
    """

    def __init__(
        self,
        watch: Watch,
        act: Act | None,
        scaling: Scaling,
        *,
        cpus: int,
        memory: int,
        per_source: int | None = None,
        known: Mapping[str, SourceCost] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._act = act
        self._scaling = scaling
        self._cpus, self._memory, self._per_source = cpus, memory, min(per_source or cpus, cpus)
        self._costs = dict(known or {})
        # Seconds and samples are summed up apart, since workers may end their stretches all at once: few samples come
        # in one interval of many busy seconds, many in the next. The mean of such quotients is far too high.
        self._done = {name: (cost.transform_s * REMEMBERED / 4, REMEMBERED / 4) for name, cost in self._costs.items()}
        self._counted: dict[str, tuple[float, int]] = {}
        self._clock = clock
        self._seen: deque[_Seen] = deque(maxlen=scaling.window + 1)
        self._history: deque[Mapping[str, float]] = deque(maxlen=scaling.window + scaling.patience)
        self._kept: deque[_Seen] = deque(maxlen=512)
        """What was seen in the time that rates are taken over, the oldest first."""
        self._trained_at = clock()
        self._pressure: dict[str, Pressure] = {}
        self._wanted = 0.0
        self._bottleneck: Bottleneck | None = None
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overlord-scaler", daemon=True)

    def start(self) -> None:
        """Look once an interval from now on, in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._scaling.interval_s + 1.0)

    def describe(self) -> dict[str, Any]:
        """Return what was seen and decided so far, for `status`."""
        found = self._bottleneck
        scaling = {
            "on": self._act is not None,
            "interval_s": self._scaling.interval_s,
            "most_workers": self._cpus,
            "wanted_samples_per_s": round(self._wanted, 2),
            "bottleneck": None if found is None else str(found),
            "needs": {} if found is None else {found.source: found.needs},
            "events": list(self._events),
        }
        named = len(self._pressure) > 1
        pressure = {
            machine: {
                **asdict(one),
                "short_of": [asdict(short) for short in shortages(one, f"host {machine}" if named else "this host")],
            }
            for machine, one in self._pressure.items()
        }
        return {"scaling": scaling, "rates": self._rates(), "pressure": pressure}

    def _rates(self) -> dict[str, Any] | None:
        """Return what happened a second, lately; None while nothing is known of it."""
        kept = list(self._kept)
        if len(kept) < 2 or self._clock() - kept[-1].at > STALE_S:
            return None
        first, last = kept[0], kept[-1]
        seconds = max(last.at - first.at, 1e-9)
        trained = [one.trained for one in kept if one.trained is not None]

        def rate(old: float, new: float) -> float:
            return max(new - old, 0.0) / seconds

        def work(name: str, key: str) -> float:
            new = last.sources[name][key]
            return rate(first.sources[name][key] if name in first.sources else new, new)

        sources = {
            name: {
                "tokens_per_s": rate(first.tokens.get(name, tokens), tokens),
                "rows_per_s": work(name, "samples_prepared"),
                "waited_share": min(work(name, "waited_s"), 1.0),
            }
            for name, tokens in last.tokens.items()
        }
        return {
            "seconds": seconds,
            "steps_per_s": rate(min(trained, default=0), last.trained or 0),
            "since_step_s": self._clock() - self._trained_at,
            "tokens_per_s": sum(one["tokens_per_s"] for one in sources.values()),
            "wait_share": min(rate(first.waited_s, last.waited_s), 1.0),
            "worker_cpus": sum(work(name, "cpu_s") for name in last.tokens),
            "sources": sources,
        }

    @property
    def costs(self) -> Mapping[str, SourceCost]:
        """What sources cost, as measured so far."""
        return dict(self._costs)

    def look(self) -> None:
        """Look once, and do what follows."""
        newest = self._seen[-1] if self._seen else None
        per_interval = self._steps_per_interval()
        ahead = [max(1, round(number * per_interval)) for number in range(1, self._scaling.lookahead + 1)]
        facts = self._watch(ahead if self._scaling.lookahead else ())
        names = list(facts["names"])
        seen = _Seen(
            at=self._clock(), step=facts["step"], trained=facts["trained"], samples=sum(facts["samples"]),
            tokens=dict(zip(names, facts["tokens"], strict=True)), waited_s=facts["waited_s"],
            sources=facts["sources"], machines=facts["machines"],
        )  # fmt: skip
        if newest is not None and (seen.step < newest.step or seen.waited_s < newest.waited_s):
            self._seen.clear()  # a replaced role counts anew
            self._kept.clear()
            newest = None
        self._seen.append(seen)
        self._keep(seen)
        for name, source in seen.sources.items():
            self._counted.setdefault(name, (source["busy_s"], source["samples_prepared"]))
        if newest is None:
            return
        costs = [self._cost(name, number, facts) for number, name in enumerate(names)]
        shares = sample_shares(facts["weights"], costs, facts["level"])
        self._history.append(dict(zip(names, shares, strict=True)))
        self._wanted = self._rate_wanted()
        self._find_bottleneck(names, shares, costs)
        if self._act is None or not self._wanted:
            return
        workers = tuple(int(seen.sources[name]["workers"]) for name in names)
        fleet = Fleet(
            workers=workers,
            samples_per_s=self._wanted,
            cpus=self._cpus,
            bytes=self._memory,
            per_source=self._per_source,
        )
        history = [[past.get(name, 0.0) for name in names] for past in self._history]
        coming = [sample_shares(weights, costs, facts["level"]) for weights in facts["coming"]]
        decision = decide(history, coming, costs, fleet, self._scaling)
        if decision.workers != workers:
            for change in decision.changes:
                self._events.append({"step": seen.step, **change._asdict()})
                logger.info("%s: %d -> %d workers: %s", *change)
            busy = demand(history[-1], costs, self._wanted)
            self._act(dict(zip(names, decision.workers, strict=True)), dict(zip(names, busy, strict=True)))

    def _keep(self, seen: _Seen) -> None:
        """Remember what was seen for as long as rates are taken over it."""
        kept = self._kept
        if not kept or seen.trained != kept[-1].trained:
            self._trained_at = seen.at
        kept.append(seen)
        while len(kept) > 2 and seen.at - kept[1].at >= RATES_S:
            if kept[1].trained == seen.trained and seen.at - kept[1].at < MOST_RATES_S:
                break  # no step since then: a step may take longer than the usual window
            kept.popleft()
        first = kept[0]
        self._pressure = {
            name: pressure_between(first.machines[name], counters)
            for name, counters in seen.machines.items()
            if name in first.machines and counters.at > first.machines[name].at
        }

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:  # rule 3
                logger.debug("looking at the workers failed: %s", error, exc_info=True)
            if self._ended.wait(self._scaling.interval_s):
                return

    def _seconds(self, name: str, busy_s: float, prepared: int) -> float:
        """Return the seconds of one worker for a sample; 0 before that is known."""
        busy, samples = self._done.get(name, (0.0, 0.0))
        last_s, last = self._counted[name]
        if prepared - last >= FEW_SAMPLES:
            busy, samples = busy + max(busy_s - last_s, 0.0), samples + prepared - last
            kept = min(1.0, REMEMBERED / samples)
            self._done[name] = kept * busy, kept * samples
        if prepared < last or prepared - last >= FEW_SAMPLES:  # less than before: a replaced role counts anew
            self._counted[name] = busy_s, prepared
        return busy / samples if samples else 0.0

    def _cost(self, name: str, number: int, facts: Mapping[str, Any]) -> SourceCost:
        """Return what a source costs by now."""
        now, old = facts["sources"][name], self._costs.get(name)
        drawn = facts["samples"][number]
        tokens = facts["tokens"][number] / drawn if drawn else 1.0 if old is None else old.tokens
        seconds = self._seconds(name, now["busy_s"], now["samples_prepared"])
        held = max(now["buffer_bytes"] // max(now["workers"], 1), 0 if old is None else old.buffer_bytes)
        cost = SourceCost(
            name=name, transform_s=seconds, tokens=max(tokens, 1e-6), buffer_bytes=held,
            file_bytes=0 if old is None else old.file_bytes, handover_s=0.0 if old is None else old.handover_s,
        )  # fmt: skip
        if seconds:
            self._costs[name] = cost
        return cost

    def _steps_per_interval(self) -> float:
        if len(self._seen) < 2:
            return 1.0
        first, last = self._seen[0], self._seen[-1]
        return self._scaling.interval_s * (last.step - first.step) / max(last.at - first.at, 1e-9)

    def _rate_wanted(self) -> float:
        """Return the samples a second that trainers want, over the last intervals."""
        first, last = self._seen[0], self._seen[-1]
        seconds = max(last.at - first.at, 1e-9)
        rate, waited = (last.samples - first.samples) / seconds, (last.waited_s - first.waited_s) / seconds
        wanted = rate * (1 + min(waited, 1.0)) if last.samples > first.samples else self._wanted
        # Up at once, down slowly: a trainer that pauses comes back.
        return max(wanted, self._wanted + _FALL * (wanted - self._wanted))

    def _find_bottleneck(self, names: Sequence[str], shares: Sequence[float], costs: Sequence[SourceCost]) -> None:
        """Find the source that holds up the trainers, over the time of the rates that are shown beside it."""
        before, now = self._kept[0], self._kept[-1]
        busy = demand(shares, costs, self._wanted)
        interval = max(now.at - before.at, 1e-9)

        def since(name: str, key: str) -> float:
            return float(now.sources[name][key] - before.sources.get(name, {}).get(key, 0.0))

        waited = [
            Waited(
                source=name,
                waited_s=since(name, "waited_s"),
                demand=load,
                workers=int(now.sources[name]["workers"]),
                cpu_share=min(since(name, "cpu_s") / max(since(name, "busy_s"), 1e-9), 1.0),
            )
            for name, load in zip(names, busy, strict=True)
        ]
        share = min((now.waited_s - before.waited_s) / interval, 1.0)
        spare = math.inf
        if self._pressure:
            usable = [one for one in self._pressure.values() if {s.resource for s in shortages(one)} <= {"space"}]
            spare = sum(one.spare_cpus for one in usable)
        self._bottleneck = find_bottleneck(waited, interval, share, headroom=self._scaling.headroom, spare_cpus=spare)


def service_scaler(
    options: ServiceOptions,
    ask: Callable[[GetWorkload], Document],
    workload: Callable[[], Workload],
    resize: Callable[[Sequence[int], Sequence[float]], None],
) -> Scaler:
    """Make the Scaler of a service; where it does not scale, it only looks.

    Args:
        workload: Returns what loader hosts did.
        resize: Gives every source so many workers, of which it keeps so many busy.
    """
    names: list[str] = []

    def watch(ahead: Sequence[int]) -> Mapping[str, Any]:
        facts = ask(GetWorkload(list(ahead))).content
        names[:] = facts["names"]
        done = workload()
        sources = {name: done.sources.get(number, _NO_WORKLOAD) for number, name in enumerate(names)}
        return {**facts, "sources": sources, "machines": done.machines}

    def act(workers: Mapping[str, int], loads: Mapping[str, float]) -> None:
        resize([workers[name] for name in names], [loads[name] for name in names])

    return Scaler(
        watch,
        act if options.scaling is not None else None,
        options.scaling or Scaling(interval_s=LOOK_EVERY_S),
        cpus=options.worker_threads,
        memory=options.memory,
        per_source=options.workers_per_source,
        known=_known_costs(options),
    )


def _known_costs(options: ServiceOptions) -> dict[str, SourceCost]:
    profile = None if options.profile is None else read_profile(Path(options.profile))
    return {} if profile is None else {name: profile.cost(name) for name in profile.names}
