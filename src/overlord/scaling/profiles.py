"""Costs of sources (the paper's P, T, M): the profile of a job, measured on real samples and refreshed by runs; the
resources of a launch, and demand by mixture and rate.

A worker is one task slot of a SourceLoader: it reads and measures rows ahead of the plan, and finishes planned ones. An
actor is a loader host: it holds the files of some sources open, and their workers run in it.

Rules of a profile:
1. A figure belongs to a source as it was when it was measured: files, sample, tokenizer. `Profile.check` refuses it for
   another one.
2. A profile records the origin of each figure: when and how it was measured, and on how many samples. That journal is
   bounded.
3. A file is used completely or not at all: its checksum covers all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from overlord.core.spec_errors import is_finite, list_some
from overlord.errors import SpecError
from overlord.job.specs import Job, Source

TINY = 0.5
"""A source that keeps less than this part of one worker busy is tiny: it needs no CPU and no actor of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCost:
    """The cost of one source.

    Example:
        >>> SourceCost(name="web", transform_s=0.0002, file_bytes=1 << 20, buffer_bytes=4 << 20).samples_per_s
        5000.0
    """

    name: str
    transform_s: float
    """P: seconds that one worker needs for a sample, from reading to finishing it."""
    handover_s: float = 0.0
    """T: seconds for planning and handing over a sample, outside of workers."""
    file_bytes: int = 0
    """M_d: bytes that an actor holds for the open files of the source."""
    buffer_bytes: int = 0
    """M_b: bytes of rows that one worker holds."""
    tokens: float = 1.0
    """Tokens of a sample, on average."""
    cpu_share: float = 1.0
    """The part of P that needs a CPU: 1.0 for decoding, near 0 for waiting on remote reads. The rest is bounded by
    workers alone."""
    decode_s: float = 0.0
    """Seconds of a CPU for decoding the media of a sample behind the hand-over, in a constructor; not in P."""
    groups: int = 0
    """Groups of its order in an epoch, at least; 0 where that is not known."""
    group_rows: float = 0.0
    """Rows of one of them, on average."""

    @property
    def samples_per_s(self) -> float:
        """Samples that one worker prepares in a second."""
        return 1.0 / max(self.transform_s, 1e-12)

    def held_bytes(self, workers: int) -> int:
        """Return the bytes that an actor holds for the source and so many of its workers."""
        return self.file_bytes + workers * self.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources for loading, and what planner and constructors take of them."""

    cpus: float
    bytes: int
    planner_cpus: float = 1.0
    planner_bytes: int = 64 << 20
    constructors: int = 1
    constructor_cpus: float = 1.0
    constructor_bytes: int = 512 << 20
    """Bytes of the steps that one constructor holds ahead of its trainers."""
    actor_bytes: int = 64 << 20
    """Bytes of a loader host before it has opened a file."""
    per_source: int = 16
    """w_src: workers that one source may have."""
    per_actor: int = 8
    """w_actor: workers that one actor may have."""
    bytes_per_actor: int | None = None
    """Bytes of one actor at most, where a pod or a host sets a limit; None: only the total `bytes` is limited."""
    workers: float | None = None
    """Workers of all sources together, where a launch bounds them, whatever they wait for; those of tiny sources count
    as much as they are busy. None: only the CPUs limit them."""
    decoders: float | None = None
    """Threads of all constructors that decode behind the hand-over; None: as many as there is work for."""
    one_host: bool = False
    """Whether decoding behind the hand-over takes the CPUs of the workers, since all roles are on one host."""

    @property
    def loader_cpus(self) -> float:
        """CPUs left for workers beside the planner and the constructors."""
        return self.cpus - self.planner_cpus - self.constructors * self.constructor_cpus

    @property
    def loader_bytes(self) -> int:
        """Bytes left for actors beside the planner and the constructors."""
        return self.bytes - self.planner_bytes - self.constructors * self.constructor_bytes


def counted_by_workers(costs: Iterable[SourceCost]) -> list[SourceCost]:
    """Return costs for a budget of workers instead of CPUs: a waiting worker counts as much as a computing one.

    Example:
        >>> counted_by_workers([SourceCost(name="remote", transform_s=0.1, cpu_share=0.02)])[0].cpu_share
        1.0
    """
    return [replace(cost, cpu_share=1.0) for cost in costs]


def sample_shares(
    weights: Sequence[float], costs: Sequence[SourceCost], level: Literal["sample", "token"] = "sample"
) -> list[float]:
    """Return the share of each source in the samples drawn; weights may be shares of tokens.

    Example:
        >>> costs = [SourceCost(name=n, transform_s=1.0, tokens=t) for n, t in (("a", 100.0), ("b", 300.0))]
        >>> sample_shares([1.0, 1.0], costs, "token")
        [0.75, 0.25]
    """
    rates = [
        weight / max(cost.tokens, 1e-9) if level == "token" else weight
        for weight, cost in zip(weights, costs, strict=True)
    ]
    total = sum(rates) or 1.0
    return [rate / total for rate in rates]


def demand(shares: Sequence[float], costs: Sequence[SourceCost], samples_per_s: float) -> list[float]:
    """Return how many workers of each source are busy at a rate of samples of all sources together.

    Example:
        >>> demand([0.75, 0.25], [SourceCost(name=n, transform_s=0.01) for n in "ab"], 400.0)
        [3.0, 1.0]
    """
    return [samples_per_s * share * cost.transform_s for share, cost in zip(shares, costs, strict=True)]


AHEAD = 8
"""Requests of a planner that the workers of a source prepare ahead."""


def most_actors(cost: SourceCost, rows_per_step: float) -> int | None:
    """Return how many actors a source can be divided over (data parallel); None where that is not known.

    Actors take the groups of its order in turn, and prepare `AHEAD` requests of theirs while the groups of others are
    handed out: of groups that are much larger, one actor would make nearly all while the others wait for their turn.
    The paper bounds this degree by the batch size.

    Example:
        >>> cost = SourceCost(name="web", transform_s=0.01, groups=100, group_rows=200)
        >>> [most_actors(cost, rows) for rows in (1, 13, 17, 30)]
        [1, 2, 3, 100]
    """
    if not cost.groups:
        return None
    ahead = AHEAD * rows_per_step
    if cost.group_rows <= ahead:
        return cost.groups
    return min(cost.groups, math.floor(1 / (1 - ahead / cost.group_rows) + 1e-9))


# The shares of the sources over the schedule of a job.

_POINTS = 200
"""Steps of a schedule that are sampled."""


def schedule_shares(job: Job, steps: int | None, costs: Sequence[SourceCost]) -> list[tuple[int, list[float]]]:
    """Return the share of each source in the samples, at steps spread over the schedule of a job.

    Learned weights count with their initial values. A temperature without weights depends on file sizes, which are not
    known here: it counts as equal weights.
    """
    given = {source.name: source.weight for source in job.sources if source.weight is not None}
    base = {name: given.get(name, 0.0) for name in job.names} if given else dict.fromkeys(job.names, 1.0)
    mixture = job.mixture
    if mixture.schedule == "static":
        at = [0]
    elif mixture.unit != "step":  # how long each epoch takes is not known: all points of the schedule count alike
        at = [int(point) for point in mixture.positions()]
    else:
        last = steps or _last_point(job) + 1
        at = sorted({round(n * (last - 1) / max(_POINTS - 1, 1)) for n in range(_POINTS)})
    found = [(step, mixture.weights_at(float(step), job.names, base)) for step in at]
    return [(step, sample_shares(weights, costs, mixture.level)) for step, weights in found if sum(weights) > 0]


def _last_point(job: Job) -> int:
    """Return the last step at which the schedule changes."""
    mixture = job.mixture
    if mixture.stage_weights is not None:
        starts = [start for start, _ in mixture.stage_weights]
        # The last stage has no end; it counts for as long as the ones before it.
        return math.ceil(2 * max(starts)) if max(starts) else 1
    curves = (mixture.linear_points or mixture.step_points or {}).values()
    return math.ceil(max((float(at) for points in curves for at in points), default=0.0))


def mean_shares(points: Sequence[tuple[int, Sequence[float]]]) -> list[float]:
    """Return the mean share of each source over the points of a schedule.

    Example:
        >>> mean_shares([(0, [1.0, 0.0]), (10, [0.5, 0.5])])
        [0.75, 0.25]
    """
    return [sum(column) / len(points) for column in zip(*(one for _, one in points), strict=True)]


# The profile of a job.


PROFILE_VERSION = 1
MOST_ENTRIES = 16
"""Entries of a source's journal; the first stays, the oldest behind it go."""
MOST_OLD_WEIGHT = 2000
"""The weight of the previous figures in samples, at most: a long run outweighs them."""
QUANTILES = 21
"""How many quantiles of a distribution are kept: 0 %, 5 %, .. 100 %."""

_REMEDY = "Run `overlord profile` again"
_PARTS = ("how its samples are made (path, format, sample or lengths)", "its files", "the tokenizer")


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is distributed over samples.

    Example:
        >>> Spread.of([1.0, 2.0, 3.0, 10.0]).p50
        2.5
    """

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    quantiles: tuple[float, ...]
    """From the smallest to the largest, evenly spaced."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Describe some values, of which there is at least one."""
        found = np.fromiter(values, np.float64)
        p50, p90, p99 = np.quantile(found, (0.5, 0.9, 0.99)).tolist()
        quantiles = np.quantile(found, np.linspace(0, 1, QUANTILES)).tolist()
        return cls(float(found.mean()), p50, p90, p99, float(found.max()), tuple(quantiles))

    def scaled(self, factor: float) -> Spread:
        """Return the same shape around another mean."""
        mean, p50, p90, p99, most = (factor * value for value in (self.mean, self.p50, self.p90, self.p99, self.max))
        return Spread(mean, p50, p90, p99, most, tuple(factor * value for value in self.quantiles))


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a source's journal."""

    when: str
    """ISO time."""
    what: str
    """ "measured", or "refreshed at step N"."""
    samples: int
    """Samples that were measured."""
    transform_s: float
    """P that came of it."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a running job has measured of one source."""

    samples: int
    """Samples prepared."""
    busy_s: float
    """Seconds that its workers needed for them, together."""
    cpu_s: float
    """Of them, seconds of a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProfile:
    """The measured cost of one source. Seconds and bytes are per sample unless stated otherwise."""

    name: str
    digest: str
    """Of what was measured; see `cost_digest`."""
    samples: int
    """Samples that the figures are based on."""
    bad: int = 0
    """Of the measured samples, how many were bad."""
    transform: Spread
    """P: seconds of one worker, from reading a sample to finishing it."""
    read_s: float
    """Of P: reading rows, with opening their files spread over the rows that come of it."""
    measure_s: float
    """Of P: knowing the length, which tokenizes and runs custom functions."""
    finish_s: float
    """Of P: token ids, and media where the loader decodes them."""
    cpu_share: float = 1.0
    """The part of P that needs a CPU; the rest is waiting. 1.0 if it was not measured."""
    decode_s: float = 0.0
    """Decoding media behind the hand-over, in the DataConstructor; not in P."""
    decoded_in: str = ""
    """Where media are decoded: "loader", "constructor", or "" for a source without."""
    handover_s: float
    """T: cutting a sample out of the read buffer and copying it to where it goes."""
    file_bytes: int
    """M_d: bytes of an actor for the listing and the indices of the files."""
    buffer_bytes: int
    """M_b: bytes of one worker at the end of its group: its open readers and the rows kept."""
    tokens: float
    """Tokens, on average."""
    read_bytes: float
    """Bytes of a row as read."""
    kept_bytes: float
    """Bytes of it that are kept once it is measured."""
    delivered_bytes: float
    """Bytes of it that are handed over."""
    groups: int = 0
    """Groups of its order in an epoch, at least; 0 in a profile from before they were counted."""
    group_rows: float = 0.0
    """Rows of one of them, on average."""
    entries: tuple[Entry, ...] = ()
    """How the figures came about, oldest first."""

    @property
    def transform_s(self) -> float:
        """P on average."""
        return self.transform.mean

    @property
    def cost(self) -> SourceCost:
        """The input of partition and autoscaler."""
        return SourceCost(**{field.name: getattr(self, field.name) for field in dataclasses.fields(SourceCost)})

    def noted(self, entry: Entry) -> SourceProfile:
        """Return the profile with one more line in its journal."""
        entries = (*self.entries, entry)
        if len(entries) > MOST_ENTRIES:
            entries = (entries[0], *entries[len(entries) - MOST_ENTRIES + 1 :])
        return dataclasses.replace(self, entries=entries)

    def refreshed(self, running: Running, when: str, what: str) -> SourceProfile:
        """Return the profile updated by a run: a mean weighted by samples, with a cap on the old weight.

        A run measures only the mean of P and its CPU share: its distribution and its parts keep their proportions.
        """
        old, new = min(self.samples, MOST_OLD_WEIGHT), running.samples
        mean = (old * self.transform_s + running.busy_s) / (old + new)
        factor = mean / self.transform_s
        cpu = (old * self.transform_s * self.cpu_share + min(running.cpu_s, running.busy_s)) / (old + new)
        moved = dataclasses.replace(
            self,
            samples=self.samples + new,
            transform=self.transform.scaled(factor),
            read_s=factor * self.read_s,
            measure_s=factor * self.measure_s,
            finish_s=factor * self.finish_s,
            cpu_share=cpu / mean,
        )
        return moved.noted(Entry(when, what, new, moved.transform_s))


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of the sources of a job."""

    sources: tuple[SourceProfile, ...]

    @property
    def names(self) -> list[str]:
        """Names of the sources that were measured."""
        return [one.name for one in self.sources]

    def cost(self, name: str) -> SourceCost:
        """Return the cost of a source; SpecError where it was not measured."""
        return self.source(name).cost

    def source(self, name: str) -> SourceProfile:
        """Return what was measured of a source; SpecError where nothing was."""
        for one in self.sources:
            if one.name == name:
                return one
        raise SpecError(f"source {name!r} is not in the profile; its cost is unknown. {_REMEDY}.")

    def joined(self, newer: Profile) -> Profile:
        """Return the profile updated by a newer one; the journal of an unchanged source is continued."""
        known = {one.name: one for one in self.sources}
        for one in newer.sources:
            before = known.get(one.name)
            if before is not None and before.digest == one.digest:
                carried = dataclasses.replace(one, entries=before.entries)
                for entry in one.entries:
                    carried = carried.noted(entry)
                known[one.name] = carried
            else:
                known[one.name] = one
        return Profile(tuple(known.values()))

    def refreshed(self, running: Mapping[str, Running], when: str, what: str) -> Profile:
        """Return the profile updated by a run; sources that it did not prepare stay, unknown names are ignored.

        `what` is the line of the journal, such as "refreshed at step 400"; `when` its ISO time.
        """

        def one(source: SourceProfile) -> SourceProfile:
            found = running.get(source.name)
            worth = found is not None and found.samples > 0 and found.busy_s > 0
            return source.refreshed(found, when, what) if found is not None and worth else source

        return Profile(tuple(one(source) for source in self.sources))

    def check(self, digests: Mapping[str, str]) -> None:
        """Raise SpecError, which names them, if sources were never measured or have changed since.

        `digests` are what `cost_digest` gives for each source now.
        """
        known = {one.name: one.digest for one in self.sources}
        changed = [name for name, digest in digests.items() if name in known and known[name] != digest]
        if changed:
            name = changed[0]
            pairs = zip(_PARTS, known[name].split(":"), digests[name].split(":"), strict=False)
            what = [part for part, old, new in pairs if old != new] or ["it"]
            others = f" (and {len(changed) - 1} other sources)" if len(changed) > 1 else ""
            raise SpecError(
                f"source {name!r} is not what was profiled{others}: {' and '.join(what)} changed since; its loaders "
                f"would be sized by figures of something else. {_REMEDY}."
            )
        missing = [name for name in digests if name not in known]
        if missing:
            are = "source {} is" if len(missing) == 1 else "sources {} are"
            raise SpecError(
                f"{are.format(list_some(missing))} not in the profile; how many workers to give is unknown. {_REMEDY}."
            )

    def to_json(self) -> str:
        """Return the profile as text for a file: one figure a line, so that two versions can be compared."""
        sources = {given.pop("name"): given for given in map(dataclasses.asdict, self.sources)}
        parts = [
            f"{_text(name)}: {{\n"
            + ",\n".join(f"  {_text(key)}: {_text(value)}" for key, value in given.items())
            + "\n }"
            for name, given in sources.items()
        ]
        head = f'"version": {PROFILE_VERSION},\n"checksum": {_text(_checksum(sources))},\n'
        return "{" + head + '"sources": {\n ' + ",\n ".join(parts) + "\n}}\n"

    @classmethod
    def from_json(cls, text: str, file: str) -> Profile:
        """Read what `to_json` returned; SpecError names the file where it is damaged, or of another version."""
        try:
            whole = json.loads(text)
            version = whole["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(file, "it is no profile") from error
        if version != PROFILE_VERSION:
            raise SpecError(
                f"{file} is a profile of version {version!r:.40}, and this overlord reads version {PROFILE_VERSION}; "
                f"its figures could mean something else. {_REMEDY}."
            )
        try:
            if whole["checksum"] != _checksum(whole["sources"]):
                raise _damaged(file, "its checksum does not fit")
            return cls(tuple(_source(name, given) for name, given in whole["sources"].items()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(file, f"{type(error).__name__}: {error}"[:120]) from error


def cost_digest(source: Source, listing: str, tokenizer_digest: str, placement: str) -> str:
    """Return "how:files:tokenizer": hashes of what decides the cost of a source, so that a refusal names the part.

    `listing` is the digest of its list of files, `placement` where media are decoded, as the launch says.
    """
    how = source.model_dump(
        mode="json", include={"path", "sample", "lengths", "format", "shuffle_bytes", "order_by", "join"}
    )
    texts = (json.dumps([how, placement], sort_keys=True), listing, tokenizer_digest)
    return ":".join(hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts)


def _damaged(file: str, why: str) -> SpecError:
    return SpecError(
        f"{file} is damaged: {why}; loaders would be sized by wrong figures. {_REMEDY} for all sources, and do not "
        "edit the file by hand."
    )


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _checksum(sources: Mapping[str, Any]) -> str:
    text = json.dumps(sources, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _source(name: str, given: Mapping[str, Any]) -> SourceProfile:
    fields = dict(given)
    spread, entries = dict(fields.pop("transform")), fields.pop("entries")
    quantiles = tuple(spread.pop("quantiles"))
    for value in (*fields.values(), *spread.values(), *quantiles):
        if not isinstance(value, str) and not (is_finite(value) and value >= 0):
            raise ValueError(f"{value!r} is no amount")
    return SourceProfile(
        name=name,
        transform=Spread(**spread, quantiles=quantiles),
        entries=tuple(Entry(**entry) for entry in entries),
        **fields,
    )
