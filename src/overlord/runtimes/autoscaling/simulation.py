"""A dry run of a job on a mesh of any size: steps are drawn and planned for real, trainers and loaders are simulated.

    MeasuredLoaders   loaders that hold metadata of real rows in memory, and nothing else
    measured_rows     reads that metadata from the sources of a job
    StepClock         how long a planned step takes, by cost models
    simulate_mesh     plans some steps on a mesh, and returns what each strategy makes of them

What a trainer waits for comes of `scaling.feed_simulator`: workers of a profile's cost prepare the samples of the
planned steps, and the trainer takes as long as the cost model says.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Limits
from overlord.core.messages import MetaDelta, MetaRequest
from overlord.core.order import BEGIN
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, PlanSlice, Share, plan_to_bytes
from overlord.core.ragged import expand_ranges
from overlord.core.samples import ENDS_EPOCH, SKIP, Cursor, MetaArray, derive, hash64, take_meta
from overlord.core.states import StreamState
from overlord.errors import SpecError
from overlord.job.specs import Job, stream_parts
from overlord.planning.balancing.evenness import encoder_loads, rank_loads, runs_free, step_time
from overlord.planning.checking import Strategy, run_strategy
from overlord.planning.costs import CostModel
from overlord.planning.exhaustion import PROJECTED_STEPS, Course, SourceForecast, SourceSize, forecast
from overlord.planning.strategies import meets_once, name_of, vanilla
from overlord.roles.changes import InputLog
from overlord.roles.planner import MakePlan, Planner, PlannerStart
from overlord.roles.poisoned_rows import PoisonedRows
from overlord.roles.ports import Loaders
from overlord.runtimes.autoscaling.sizing import NO_LIMIT
from overlord.runtimes.launching.service_options import Progress
from overlord.scaling.feed_simulator import Outcome, World, simulate
from overlord.scaling.partition import Partition, partition
from overlord.scaling.profiles import Profile, Resources, SourceCost, counted_by_workers, demand
from overlord.stores.places import open_place
from overlord.stores.store import Store

Floats = npt.NDArray[np.float64]
Rows = tuple[MetaArray, npt.NDArray[np.int32]]
"""Metadata of some rows of a source, and their listed images, as a MetaDelta has them."""

_TICKS = 10
"""Ticks of the simulated clock in a step, or in the time that loaders need for one if that is longer."""
_MOST_STEPS = 2_000
"""Steps that a feed is simulated for at most: a steady feed does not change after that."""
_SAMPLED_HOSTS = 8
"""Hosts whose part of a plan is cut; the others are taken to be alike."""
_TOKEN_BYTES, _MASK_BYTES = 4, 1
"""What a token and its place in the loss mask take on their way to a host."""


# -- metadata of real rows ------------------------------------------------------------------------------------------


class MeasuredLoaders:
    """Loaders that hold metadata of some real rows, drawn again and again by a seeded hash; their seconds are counted.

    Only `summary_buffer` and `rest` are there: nothing is handed over.
    """

    def __init__(self, rows: Sequence[Rows], seed: int = 0) -> None:
        known = {id(meta): _without_epochs(meta) for meta, _ in rows}  # sources may share a table
        self._rows = [(known[id(meta)], items) for meta, items in rows]
        self._seed = seed
        self.spent_s = 0.0

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Return metadata from the cursors on; no epoch ends."""
        began = time.thread_time()
        found = [self._delta(request) for request in requests]
        self.spent_s += time.thread_time() - began
        return found

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Nothing is held."""

    def _delta(self, request: MetaRequest) -> MetaDelta:
        known, images = self._rows[request.source]
        at = np.arange(request.cursor.offset, request.cursor.offset + request.count)
        chosen = hash64(derive(self._seed, request.source), at) % np.uint64(len(known))
        meta = take_meta(known, chosen.astype(np.int64))
        meta["row"] = meta["offset"] = at
        listed = np.flatnonzero(meta["items"])
        items = None
        if len(listed):
            count = meta["images"][listed].astype(np.int64)
            items = images[expand_ranges(meta["items"][listed] - 1, count)]
            meta["items"][listed] = 1 + np.cumsum(count) - count
        return MetaDelta(request.source, meta, Cursor(0, 0, int(at[-1]) + 1), items)


def _without_epochs(meta: MetaArray) -> MetaArray:
    meta = meta.copy()
    meta["epoch"] = meta["group"] = 0
    meta["flags"] &= ~ENDS_EPOCH
    return meta


def measured_rows(loaders: Loaders, names: Sequence[str], rows: int, progress: Progress) -> list[Rows]:
    """Read the metadata of the first rows of each source, at most one epoch of it.

    Raises:
        SpecError: A source has no row.
    """
    found: list[Rows] = []
    for number, name in enumerate(names):
        cursor, metas, images, listed = Cursor(0, BEGIN, 0), list[MetaArray](), [np.empty((0, 4), np.int32)], 0
        while sum(map(len, metas)) < rows and cursor.epoch == 0:
            delta = loaders.summary_buffer([MetaRequest(number, cursor, rows - sum(map(len, metas)))])[0]
            meta, cursor = delta.meta.copy(), delta.next_cursor
            if delta.items is not None:
                meta["items"][meta["items"] > 0] += listed
                images.append(delta.items)
                listed += len(delta.items)
            metas.append(meta)
        if not sum(map(len, metas)):
            raise SpecError(f"source {name!r} has no row, so nothing is known of its lengths. Leave it out of the job.")
        found.append((np.concatenate(metas), np.concatenate(images)))
        progress("reading lengths", number + 1, len(names))
    return found


def metadata_planner(
    job: Job,
    loaders: MeasuredLoaders,
    make_plan: MakePlan,
    weights: Mapping[str, float],
    folder: Path,
    *,
    mesh: ClientPlaceTree,
    limits: Limits,
) -> Planner:
    """Return a planner as a launch has one (draw, checks, digests, journal), over loaders that hold only metadata."""
    store = Store(open_place(str(folder)))
    state, inputs = StreamState.begin(len(job.sources)), InputLog(job, store.journal, {}, [])
    state.group[:] = 0
    inputs.base.update(weights)
    parts = stream_parts(job, tokenizer_digest="", listings=dict.fromkeys(job.names, ""))
    start = PlannerStart(state, inputs, parts, PoisonedRows(store.journal))
    only_metadata: Any = loaders  # nothing is handed over in a dry run
    planner = Planner(job, only_metadata, store, start, make_plan, mesh=mesh, limits=lambda _: limits)
    planner.checkpoints.begin()
    return planner


# -- the time of a step ---------------------------------------------------------------------------------------------


def unit_seconds(model: CostModel, layers: float, tflops: float | None) -> float:
    """Return the seconds of one unit of a model's cost on one GPU.

    Args:
        model: In milliseconds (of one layer, as presets are), or in FLOPs of all layers.
        layers: How many times that.
        tflops: What a GPU reaches, for a model in FLOPs.

    Raises:
        SpecError: The cost has no time.

    Example:
        >>> from overlord.planning.costs import llama_12b
        >>> round(llama_12b.microbatch_time([8192]) / llama_12b.quantum * unit_seconds(llama_12b, 45, None), 2)
        1.28
    """
    if model.unit == "flops" and tflops is not None:
        return model.quantum * layers / (tflops * 1e12)
    return model.seconds(1.0) * layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClock:
    """How long a planned step takes: the images are encoded, then the microbatches go through the backbone."""

    backbone: CostModel
    backbone_unit_s: float
    """Seconds of one unit of cost on one GPU, all layers."""
    encoder: CostModel
    encoder_unit_s: float

    def seconds(self, plan: LoadingPlan, patches_per_token: int = 4, *, free: bool = False) -> tuple[float, float]:
        """Return the seconds of the backbone and of the encoder; `free` ranks meet once a step.

        Layers are divided over the pipeline stages, and what a sequence costs over the ranks of tp and cp. Without a
        plan of its own, an image is encoded by the tp x cp ranks that have its tokens, in equal parts.
        """
        tree, free = plan.mesh, free or runs_free(plan)
        unit_s, gamma = self.backbone_unit_s / tree.pp, float(self.backbone.per_microbatch)
        loads = rank_loads(plan, tree, self.backbone) / tree.tp
        backbone_s = unit_s * step_time(loads, stages=tree.pp, per_microbatch=gamma, free=free)
        if not len(plan.draw.images):
            return backbone_s, 0.0
        images = encoder_loads(plan, tree, self.encoder, patches_per_token)
        share = 1 if plan.encoder is not None else tree.tp * tree.cp
        return backbone_s, self.encoder_unit_s * (float(images.max()) / share + self.encoder.per_microbatch)


# -- what a trainer waits for -----------------------------------------------------------------------------------------


def simulated_feed(
    costs: Sequence[SourceCost],
    counts: Floats,
    workers: Sequence[int],
    step_s: float | Floats = 0.0,
    *,
    slots: float | None = None,
    decoders: float | None = None,
    plan_s: float = 0.0,
    prefetch: int = 2,
) -> Outcome:
    """Simulate workers that prepare the samples of steps, and a trainer that takes them.

    Args:
        costs: What each source costs.
        counts: Samples of each step and source.
        workers: Of each source.
        step_s: Seconds that the trainer takes for a step, or for each; 0 takes them as fast as they come.
        slots: Workers that run at the same time, at most; all by default.
        decoders: Threads that decode behind the hand-over; as many as there is work for by default.
        plan_s: Seconds of the planner for a step.
        prefetch: Steps that are prepared ahead.

    Example:
        >>> costs = [SourceCost(name="web", transform_s=0.02), SourceCost(name="photos", transform_s=0.05)]
        >>> out = simulated_feed(costs, np.full((100, 2), 10.0), [1, 5])
        >>> round(out.steps_per_s)  # web needs 0.2 s a step, photos 0.1 s
        5
    """
    samples = float(counts.sum(axis=1).mean())
    columns, given, lanes = [counts / samples], counted_by_workers(costs), list(map(float, workers))
    # What no worker does is a source of its own, with as many workers as there are threads for it.
    beside = {
        "plan": (np.full(len(counts), plan_s), 1.0),
        "handover": (counts @ [cost.handover_s for cost in costs], 1.0),
        "decode": (counts @ [cost.decode_s for cost in costs], decoders or 0.0),
    }
    for name, (seconds, threads) in beside.items():
        if threads and seconds.any():
            mean_s = float(seconds.mean()) / samples
            given.append(SourceCost(name=name, transform_s=mean_s, cpu_share=0.0))
            columns.append((seconds / seconds.mean())[:, None])
            lanes.append(threads)
    shares = np.concatenate(columns, axis=1)
    slots = slots or sum(lanes)
    work_s = shares.mean(axis=0) * samples * [cost.transform_s for cost in given]
    loading_s = max(float((work_s / lanes).max()), float(work_s[: len(costs)].sum()) / slots)
    world = World(
        costs=tuple(given),
        shares=shares,
        samples=samples,
        step_s=step_s,
        cpus=slots,
        prefetch=prefetch,
        tick_s=max(loading_s, float(np.mean(step_s)), 1e-6) / _TICKS,
    )
    return simulate(world, [math.ceil(lane) for lane in lanes])


# -- all of it on one mesh --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStrategy:
    """What one strategy makes of the steps."""

    strategy: str
    step_s: float
    """Mean time of a step by the cost model, without waits."""
    longest_step_s: float
    encoder_s: float
    """Of it, encoding images."""
    speedup: float
    """Over dealing samples round-robin."""
    plan_s: float
    """Seconds of a core to draw and place a step, and to cut the plan for all hosts: the median."""
    longest_plan_s: float
    cut_s: float
    """Of it, cutting the plan for all hosts."""
    plan_bytes: float
    """Of the plan, to all hosts together, in a step."""
    host_bytes: float
    """Of samples, to one host in a step; the mean."""
    most_host_bytes: float
    """Of the host that gets most."""
    read_bytes: float
    """From storage, in a step."""
    needed_samples_per_s: float
    """What the trainers take, if they never wait."""
    feed_samples_per_s: float
    """What the loaders can feed."""
    workers: int
    cpus: float
    """Cores that workers and decoding behind the hand-over keep busy, at the rate that the trainers take."""
    bytes: int
    """Memory of all roles."""
    actors: int
    limit: str
    """What bounds the feed."""
    waits: float
    """Share of the time that trainers wait for data."""
    tokens_per_s: float
    """With waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMesh:
    """What a mesh of some size gives."""

    gpus: int
    hosts: int
    mesh: str
    samples: float
    """Of a step."""
    tokens: float
    strategies: list[SimulatedStrategy]
    sources: list[SourceForecast]
    """When sources are read again or read up in a run with these batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is simulated, whatever the mesh."""

    rows: Sequence[Rows]
    """Metadata of real rows, in the order of the job's sources."""
    profile: Profile
    weights: Mapping[str, float]
    counted: Sequence[tuple[float | None, bool]]
    """Rows of each source in an epoch, and whether they were counted or estimated."""
    strategies: Sequence[Strategy]
    """The first deals samples round-robin; the others are compared with it."""
    clock: StepClock
    patches_per_token: int
    steps: int
    """Steps that are planned."""
    hours: float
    """How long the feed is simulated."""
    per_host: int
    """GPUs of a host."""
    cpus: int | None = None
    """Workers of all sources together; as many as the trainers need by default."""
    threads: int | None = None
    """Of each host, for decoding behind the hand-over; as many as there is work for by default."""
    prefetch: int = 2
    ahead: int = 512 << 20
    """Bytes that each host holds ahead of its trainers."""


@dataclass(slots=True)
class _Taken:
    """What the steps of one strategy added up to."""

    step_s: list[float] = field(default_factory=list[float])
    encoder_s: list[float] = field(default_factory=list[float])
    plan_s: list[float] = field(default_factory=list[float])
    cut_s: list[float] = field(default_factory=list[float])
    plan_bytes: list[float] = field(default_factory=list[float])
    host_bytes: list[float] = field(default_factory=list[float])
    most_bytes: list[float] = field(default_factory=list[float])


def simulate_mesh(
    job: Job, tree: ClientPlaceTree, limits: Limits, given: Rehearsal, progress: Progress
) -> SimulatedMesh:
    """Plan some steps on a mesh with each strategy, and simulate trainers and loaders on them.

    Raises:
        PlanError: A step cannot be planned.
        SpecError: The workers do not suffice for the sources.
    """
    most_steps, job = job.max_steps, job.model_copy(update={"max_steps": None})
    loaders = MeasuredLoaders(given.rows, job.seed)
    hosts = math.ceil(tree.world_size / given.per_host)
    media = _media_bytes(given, job)
    taken = [_Taken() for _ in given.strategies]
    counts, tokens, shares = list[Floats](), list[int](), list[tuple[float, ...]]()
    place_s = 0.0

    def place(strategy: Strategy, buffer: Buffer, mesh: ClientPlaceTree) -> LoadingPlan:
        nonlocal place_s
        if isinstance(strategy, vanilla):  # dealing takes the microbatches it needs, also where their number is fixed
            buffer = dataclasses.replace(buffer, limits=dataclasses.replace(limits, microbatches=None))
        began = time.thread_time()
        plan = run_strategy(strategy, buffer, mesh)
        place_s = time.thread_time() - began
        return plan

    with tempfile.TemporaryDirectory(prefix="overlord-simulate-") as folder:
        make_plan = partial(place, given.strategies[-1])
        planner = metadata_planner(job, loaders, make_plan, given.weights, Path(folder), mesh=tree, limits=limits)
        for step in range(given.steps + 1):  # the first one loads kernels and fills buffers, and does not count
            loaders.spent_s, began = 0.0, time.thread_time()
            plan = planner.plan_raw(step)
            assert plan is not None  # no epoch ends
            draw_s = time.thread_time() - began - loaders.spent_s - place_s
            buffer = Buffer(plan.draw, limits)
            for strategy, one in zip(reversed(given.strategies), reversed(taken), strict=True):
                placed = plan if strategy is given.strategies[-1] else place(strategy, buffer, tree)
                if step:
                    _take(one, placed, given, strategy, draw_s + place_s, media, hosts)
            if step:
                counts.append(np.bincount(plan.draw.source, minlength=len(job.sources)).astype(np.float64))
                tokens.append(plan.total_tokens)
                shares.append(plan.draw.weights)
            progress(f"planning steps for {tree}", step, given.steps)
        planner.close()
    drawn = np.array(counts)
    found: list[SimulatedStrategy] = []
    for strategy, one in zip(given.strategies, taken, strict=True):
        dealt_s = float(np.mean(taken[0].step_s))
        found.append(_fed(job, hosts, given, name_of(strategy), one, drawn, float(np.mean(tokens)), dealt_s))
        progress(f"simulating the feed of {tree}", len(found), len(taken))
    return SimulatedMesh(
        gpus=tree.world_size,
        hosts=hosts,
        mesh=str(tree),
        samples=float(drawn.sum(axis=1).mean()),
        tokens=float(np.mean(tokens)),
        strategies=found,
        sources=_forecast(job, given, float(np.mean(tokens)), shares[0], most_steps),
    )


def _forecast(
    job: Job, rehearsal: Rehearsal, tokens: float, begins_with: Sequence[float], most_steps: int | None
) -> list[SourceForecast]:
    """Return when the sources of a job are read again, from the lengths of the rows that were read."""
    sizes: list[SourceSize] = []
    for (meta, _), (rows, exact) in zip(rehearsal.rows, rehearsal.counted, strict=True):
        drawn = meta["tokens"][(meta["flags"] & SKIP) == 0]
        sizes.append(SourceSize(rows, float(drawn.mean()) if len(drawn) else None, len(drawn) / len(meta), exact))
    learn, most = job.mixture.learn, job.batch.global_tokens
    course = Course(
        mixture=job.mixture,
        batch=job.batch,
        names=job.names,
        base=rehearsal.weights,
        filled=min(tokens / most, 1.0) if most else 1.0,
        constant=begins_with if learn is not None and learn.follows_reports else None,
    )
    return forecast(course, sizes, steps=most_steps or PROJECTED_STEPS, most_steps=most_steps)


def _take(
    one: _Taken, plan: LoadingPlan, given: Rehearsal, strategy: Strategy, plan_s: float, media: Floats, hosts: int
) -> None:
    """Add a step: how long it takes, and what it sends to hosts, of which some are looked at."""
    tree, draw = plan.mesh, plan.draw
    backbone_s, encoder_s = given.clock.seconds(plan, given.patches_per_token, free=meets_once(strategy))
    chosen = sorted({round(n) for n in np.linspace(0, hosts - 1, min(hosts, _SAMPLED_HOSTS))})
    blocks, cut_s, sent = list[int](), list[float](), list[float]()
    for host in chosen:
        ranks = range(host * given.per_host, min((host + 1) * given.per_host, tree.world_size))
        began = time.thread_time()
        blocks.append(len(plan_to_bytes(plan, PlanSlice.for_ranks(plan, ranks))))
        cut_s.append(time.thread_time() - began)
        share = Share.of(plan, ranks)
        items = share.media[draw.media.sample]
        items = items if share.encoded is None else items | share.encoded
        inside = draw.media.length[items] @ media[draw.source[draw.media.sample[items]]]
        text = _TOKEN_BYTES * share.tokens.length.sum() + _MASK_BYTES * share.loss.length.sum()
        sent.append(float(inside + text))
    one.step_s.append(backbone_s + encoder_s)
    one.encoder_s.append(encoder_s)
    # The first cut also indexes the plan, once for all hosts.
    one.cut_s.append(cut_s[0] + (hosts - 1) * float(np.mean(cut_s[1:])) if hosts > 1 else cut_s[0])
    one.plan_s.append(plan_s + one.cut_s[-1])
    one.plan_bytes.append(hosts * float(np.mean(blocks)))
    one.host_bytes.append(float(np.mean(sent)))
    one.most_bytes.append(max(sent))


def _media_bytes(given: Rehearsal, job: Job) -> Floats:
    """Return the bytes of media that are handed over for one token of them, of each source."""
    found: list[float] = []
    for name, (meta, _) in zip(job.names, given.rows, strict=True):
        text = (_TOKEN_BYTES + _MASK_BYTES) * float(meta["tokens"].mean())
        left = max(given.profile.source(name).delivered_bytes - text, 0.0)
        found.append(left / max(float(meta["image_tokens"].mean()), 1e-9) if meta["image_tokens"].any() else 0.0)
    return np.array(found)


def _fed(
    job: Job, hosts: int, given: Rehearsal, strategy: str, one: _Taken, drawn: Floats, tokens: float, dealt_s: float
) -> SimulatedStrategy:
    """Return what a strategy gives once its loaders are sized and its feed is simulated."""
    profiles = [given.profile.source(name) for name in job.names]
    # Every host hands over its own part: the time of a sample there is shared.
    costs = [dataclasses.replace(source.cost, handover_s=source.handover_s / hosts) for source in profiles]
    step_s, samples = float(np.mean(one.step_s)), float(drawn.sum(axis=1).mean())
    shares, rate = (drawn.mean(axis=0) / samples).tolist(), samples / step_s
    fleet = _fleet(costs, shares, rate, hosts, given)
    count = min(max(math.ceil(3600 * given.hours / step_s), len(drawn)), _MOST_STEPS)
    rounds = math.ceil(count / len(drawn))
    decoders = None if given.threads is None else float(hosts * given.threads)
    out = simulated_feed(
        costs,
        np.tile(drawn, (rounds, 1))[:count],
        fleet.workers,
        np.tile(one.step_s, rounds)[:count],
        slots=given.cpus,
        decoders=decoders,
        plan_s=median(one.plan_s),
        prefetch=given.prefetch,
    )
    busy = rate * sum(s * (c.transform_s * c.cpu_share + c.decode_s) for s, c in zip(shares, costs, strict=True))
    return SimulatedStrategy(
        strategy=strategy,
        step_s=step_s,
        longest_step_s=max(one.step_s),
        encoder_s=float(np.mean(one.encoder_s)),
        speedup=dealt_s / step_s,
        plan_s=median(one.plan_s),
        longest_plan_s=max(one.plan_s),
        cut_s=median(one.cut_s),
        plan_bytes=float(np.mean(one.plan_bytes)),
        host_bytes=float(np.mean(one.host_bytes)),
        most_host_bytes=max(one.most_bytes),
        read_bytes=float(drawn.mean(axis=0) @ [source.read_bytes for source in profiles]),
        needed_samples_per_s=rate,
        feed_samples_per_s=fleet.samples_per_s,
        workers=sum(fleet.workers),
        cpus=busy,
        bytes=fleet.bytes,
        actors=len(fleet.actors),
        limit=fleet.limit,
        waits=out.stall_s / out.seconds,
        tokens_per_s=tokens * out.steps_per_s,
    )


def _fleet(
    costs: Sequence[SourceCost], shares: Sequence[float], rate: float, hosts: int, given: Rehearsal
) -> Partition:
    """Return the workers: the fastest that the given ones allow, or as many as the trainers need and a fifth more."""
    busy = demand(shares, costs, rate)
    most = given.cpus or math.ceil(2 * sum(busy)) + 2 * len(costs)
    resources = Resources(
        cpus=float(most),
        bytes=NO_LIMIT,
        planner_cpus=0.0,
        constructors=hosts,
        constructor_cpus=0.0,
        constructor_bytes=given.ahead,
        per_source=given.cpus or math.ceil(2 * max(busy)) + 2,
        workers=float(most),
        decoders=None if given.threads is None else float(hosts * given.threads),
    )
    if given.cpus is not None:
        return partition(costs, shares, resources)
    fastest = partition(costs, shares, resources).samples_per_s
    # The hand-over, or threads that decode, may be slower than the trainers, whatever the workers.
    return partition(costs, shares, resources, samples_per_s=min(rate, fastest))
