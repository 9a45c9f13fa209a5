"""`overlord explain`: what a job would do on a mesh, from metadata alone. Steps are planned and nothing is decoded."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from overlord.cli.options import layout_advice, layout_words, strategy_name
from overlord.cli.output import Tell
from overlord.cli.sources import context_notes, count_indexed, isolated
from overlord.core.client_messages import MILLION
from overlord.core.draw import Limits
from overlord.core.messages import LoaderOrder, MetaRequest
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.samples import BAD, SKIP, Cursor, MetaArray
from overlord.core.states import StreamState
from overlord.errors import SpecError
from overlord.job.specs import Audio, Job, Source, Video
from overlord.launch_spec import Launch, mapping_or_name
from overlord.planning.balancing.evenness import (
    encoder_loads,
    in_lockstep,
    in_pipeline,
    lockstep_bound,
    over_ranks,
    positions,
    runs_free,
    step_time,
)
from overlord.planning.balancing.hybrid import buddy_lpt, ranks_needed
from overlord.planning.costs import Cost, CostModel, llama_12b, vit_2b
from overlord.planning.exhaustion import PROJECTED_STEPS, Course, SourceSize, forecast
from overlord.planning.learning.repetition import effective_epochs
from overlord.planning.strategies import Strategy, StrategySpec, costs_of, follows_reports, meets_once
from overlord.readers.source_files import SourceFiles
from overlord.reports import summary
from overlord.reports.collecting import CollectedStep, Collector
from overlord.reports.explanation import (
    BalanceFacts,
    Explanation,
    LoaderFacts,
    SourceCosts,
    SourceFacts,
    StepFacts,
    draw_first_step,
)
from overlord.reports.summary import decoded_in, ratio
from overlord.roles.planner import Planner
from overlord.roles.source_loader import rows_at_once
from overlord.runtimes.hosts.loader_fleet import LoaderFleet
from overlord.runtimes.hosts.peers import PLANNER, loader_name
from overlord.runtimes.hosts.prefetch import Executors, InlineExecutor, SerialWorkers, ThreadWorkers
from overlord.runtimes.launching.deployment import (
    Prepared,
    base_weights,
    facts_of,
    limits_of,
    order_of,
)
from overlord.runtimes.launching.inline_service import InlineService
from overlord.runtimes.launching.service_options import ServiceOptions, few_samples
from overlord.runtimes.transport.direct import CallerEnvironment, CallerPace
from overlord.transforms.samples.per_sample import MediaDecoder, decode_media

# --------------------------------------------------------------------------------------------------------------
# How even the steps of `explain` are: as planned, as dealt round-robin, and what no placement can better.


_BOUNDED_PIECES = 20_000
"""Steps with more pieces than this are not held against the lockstep bound: it would take seconds."""
_BOUNDED_STEPS = 20
_UNEVEN = 1.2
"""An encoder that is this uneven gets a sentence."""
_REACHED, _MATTERS = 1.02, 1.03
"""A bound counts as the limit where the plan is this near to it and it is this far from even."""


Largest = tuple[int, float]
"""The largest item of all steps: its length, and how many even shares of its step it is."""


class Balance:
    """Adds up how even steps are, planned and dealt."""

    def __init__(
        self, tree: ClientPlaceTree, limits: Limits, cost: CostModel, encoder: CostModel, *, meets_once: bool = False
    ) -> None:
        self._tree = tree
        self._limits = limits
        self._cost = cost
        self._encoder = encoder
        self._meets_once = meets_once
        self._hybrid: list[float] = []
        self._splits = False
        self._rows: dict[str, list[tuple[float, float, float]]] = {}
        self._times: list[tuple[float, float, float]] = []
        self._counts: list[tuple[int, int]] = []
        self._dealt_positions = 0
        self._sums: list[tuple[int, int, int]] = []
        self._crossing: list[int] = []
        self._image_tokens: list[int] = []
        self._offloaded: list[tuple[int, int, int, int]] = []
        self._plan_notes: Counter[str] = Counter()
        self.first_step = 0
        self.free = False
        """Whether ranks have run free: with other numbers of microbatches than their neighbours, in any step."""
        self.by_rank = False
        """Whether every DP x CP rank is a consumer of its own."""
        self.images_planned = False
        """Whether the strategy says where images are encoded."""
        self.longest: Largest = (0, 0.0)
        self.largest_image: Largest = (0, 0.0)

    def add(self, step: CollectedStep) -> None:
        """Count one step."""
        tree, plan, dealt, ours, theirs = self._tree, step.plan, step.dealt, step.loads, step.dealt_loads
        if not self._counts:
            self.first_step = plan.step
        self.free |= runs_free(plan)
        self.by_rank |= plan.axis == "CP"
        self._add("ranks", over_ranks(theirs), over_ranks(ours), self._rank_bound(plan, ours))
        if tree.pp > 1:
            count = plan.num_microbatches  # one base for both: else the ratios would not give the speed-up
            self._add("pipeline", in_pipeline(theirs, tree.pp, count), in_pipeline(ours, tree.pp, count), np.nan)
        else:
            self._add("lockstep", in_lockstep(theirs), in_lockstep(ours), self._lockstep_bound(plan))
        dealt_time = self._time(theirs, free=self._meets_once)
        self._times.append((dealt_time, self._time(ours, free=False), self._time(ours, free=True)))
        self._counts.append((dealt.num_microbatches, plan.num_microbatches))
        self._dealt_positions += positions(dealt)
        self._sums.append((plan.total_tokens, plan.squared_tokens, plan.global_loss_tokens))
        self._add_images(plan, dealt)
        self._add_offloaded(plan)
        self._plan_notes.update(plan.notes)

    @property
    def speedup(self) -> float:
        """Time of the steps dealt round-robin over that of the planned ones, by the cost model."""
        before, locked, free = np.array(self._times).sum(axis=0).tolist()
        after = free if self.free or self._meets_once else locked
        return before / after if after > 0 else 1.0

    @property
    def waiting(self) -> str:
        """When ranks wait for each other, by which the time of a step is reckoned."""
        if self._tree.pp > 1:
            return "pipelines wait for each other once a step"
        if self._meets_once:
            return "ranks wait for each other once a step"
        if self.free:
            return "ranks wait for each other once a step; dealt round-robin, after every microbatch"
        return "ranks wait for each other after every microbatch"

    @property
    def by_hybrid(self) -> float:
        """What hdp would make of the row over the ranks; infinite where it would split nothing."""
        return float(np.mean(self._hybrid)) if self._hybrid and self._splits else np.inf

    @property
    def crossing_tokens(self) -> float | None:
        """Image tokens a step that leave the rank they are encoded on; None without images."""
        return float(np.mean(self._crossing)) if self._crossing else None

    @property
    def image_tokens(self) -> float:
        """Image tokens a step."""
        return float(np.mean(self._image_tokens)) if self._image_tokens else 0.0

    @property
    def offloading(self) -> list[str]:
        """What keeping activations on the host saves, where the strategy plans with it."""
        if not self._offloaded:
            return []
        count, plain, ranks, moved = np.array(self._offloaded).mean(axis=0).tolist()
        if not count:
            return ["Offloading saves no rank: no sequence is longer than a rank holds, or copies would not be hidden."]
        return [
            f"Offloading: {count:.3g} microbatches a step run on {ranks:.3g} ranks instead of {plain:.3g}, with "
            f"{moved / count / MILLION:.0%} of their activations on the host."
        ]

    @property
    def plan_notes(self) -> list[str]:
        """Where steps are planned in another way than the strategy was asked to."""
        steps = summary.number(len(self._counts), "step")
        return [f"In {many} of {steps} {words}" for words, many in self._plan_notes.items()]

    def facts(self) -> list[BalanceFacts]:
        """Return the axes in reading order."""
        single = "DP x CP ranks" if self.by_rank else "data-parallel groups"
        meanings = {
            "ranks": f"largest cost of the {single} over their mean",
            "lockstep": "time when all wait for each other after every microbatch, over that of even ranks",
            "pipeline": f"time of the slowest of the pipelines of {self._tree.pp} stages, over that of even ones",
            "encoder": "largest encoding cost of the ranks over their mean",
        }
        return [self._fact(axis, meaning) for axis, meaning in meanings.items() if axis in self._rows]

    def step_facts(self, collector: Collector) -> StepFacts:
        """Return the mean step."""
        tokens, squares, losses = np.array(self._sums).mean(axis=0).tolist()
        before, after = np.array(self._counts).mean(axis=0).tolist()
        total = int(collector.tokens.sum())
        padding, padding_before = (
            1 - total / held if held else 0.0 for held in (collector.positions, self._dealt_positions)
        )
        return StepFacts(
            tokens=tokens,
            squared_tokens=squares,
            samples=int(collector.samples.sum()) / max(collector.steps, 1),
            loss_tokens=losses,
            microbatches=after,
            microbatches_before=before,
            padding=padding,
            padding_before=padding_before,
            first_step=self.first_step,
            tokens_per_step=[step[0] for step in self._sums],
        )

    def _fact(self, axis: str, meaning: str) -> BalanceFacts:
        befores, afters, bounds = zip(*self._rows[axis], strict=True)
        before, after, bound = float(np.mean(befores)), float(np.mean(afters)), _known_mean(bounds)
        if axis == "lockstep" and self.free:
            # Ranks that run free do not wait after a microbatch, also where they happen to have as many.
            return BalanceFacts(axis, meaning, before, None, None, list(befores), [])
        return BalanceFacts(axis, meaning, before, after, bound, list(befores), list(afters))

    def _add(self, axis: str, before: float, after: float, bound: float) -> None:
        self._rows.setdefault(axis, []).append((before, after, bound))

    def _time(self, loads: np.ndarray, *, free: bool) -> float:
        # Every rank of a group spends the constant of a microbatch; only what sequences cost is shared.
        return step_time(loads, stages=self._tree.pp, per_microbatch=float(self._cost.per_microbatch), free=free)

    def _rank_bound(self, plan: LoadingPlan, loads: np.ndarray) -> float:
        """Return what the largest item alone makes of an even share; a split one counts by its parts."""
        sharing = plan.cp_sizes if plan.cp_sizes is not None else 1 if plan.axis == "CP" else self._tree.cp
        # Rows are padded to the longest beside them, which another placement may change; their tokens stay.
        share = self._cost(plan.pieces.length if plan.row_tokens else plan.padded) / sharing
        mean = float(loads.sum(axis=1).mean())
        if not len(share) or mean <= 0:
            return 1.0
        at = int(np.argmax(share))
        found = float(share[at]) / mean
        self._hybrid.append(max(1.0, self._hybrid_load(plan) / mean))
        if found > self.longest[1]:
            self.longest = (int(plan.pieces.length[at]), found)
        return max(1.0, found)

    def _hybrid_load(self, plan: LoadingPlan) -> float:
        """Return the largest load of a rank as hdp would place these sequences; infinite where it cannot."""
        tree, cap = self._tree, self._limits.microbatch_tokens // self._tree.cp
        ranks = tree.dp * tree.cp
        if plan.axis == "CP" or tree.pp > 1 or ranks == 1 or cap < 1:
            return np.inf
        needed = ranks_needed(plan.pieces.length, cap)
        if ranks % int(needed.max()):
            return np.inf
        self._splits |= int(needed.max()) > 1
        return float(buddy_lpt(self._cost(plan.pieces.length), needed, ranks)[1].max())

    def _add_offloaded(self, plan: LoadingPlan) -> None:
        """Count the microbatches with activations on the host, and the ranks that they would need without."""
        if plan.offload is None or plan.cp_sizes is None or plan.first_ranks is None:
            return
        leads = np.zeros(len(plan.offload), np.bool_)  # a microbatch that ranks share counts once
        leads[np.repeat(np.arange(len(leads)), np.diff(plan.bin_offsets))[plan.first_ranks == plan.buckets]] = True
        bins = np.flatnonzero(leads & (plan.offload > 0))
        tokens = plan.loads(plan.pieces.length.astype(np.int64)).reshape(-1)[bins]
        plain = ranks_needed(tokens, max(2, self._limits.microbatch_tokens // self._tree.cp), "any")
        width = plan.cp_sizes[plan.bin_offsets[bins]]
        self._offloaded.append((len(bins), int(plain.sum()), int(width.sum()), int(plan.offload[bins].sum())))

    def _lockstep_bound(self, plan: LoadingPlan) -> float:
        known = plan.axis == "DP" and len(plan.pieces) <= _BOUNDED_PIECES and len(self._counts) < _BOUNDED_STEPS
        known &= not plan.row_tokens or self._limits.full_rows  # else what a row costs depends on its neighbours
        costs = self._cost(plan.padded)
        if not known or not int(costs.sum()):
            return np.nan
        shape = (plan.num_buckets, plan.num_microbatches)
        least = lockstep_bound(costs, plan.padded, *shape, self._limits.microbatch_tokens)
        return max(1.0, least * plan.num_buckets / int(costs.sum()))

    def _add_images(self, plan: LoadingPlan, dealt: LoadingPlan) -> None:
        tokens = plan.draw.images.length.astype(np.int64)
        self._image_tokens.append(int(tokens.sum()))
        if not self._image_tokens[-1]:
            return
        self.images_planned |= plan.encoder is not None
        per_token = self._limits.patches_per_token
        before, after = (encoder_loads(one, self._tree, self._encoder, per_token) for one in (dealt, plan))
        # Split images are no items any more: each part is one.
        images = plan.encoder.pieces.length if plan.encoder is not None else tokens
        runs = None if plan.encoder is None else plan.encoder.pieces
        if runs is None:
            of = tokens
        else:
            of = plan.draw.media.length[plan.draw.media_at(runs.sample, runs.start)[0]].astype(np.int64)
        shares = self._encoder(of * per_token) * (images / np.maximum(of, 1)) / after.mean()
        at = int(np.argmax(shares))
        if shares[at] > self.largest_image[1]:
            self.largest_image = (int(images[at]) * per_token, float(shares[at]))
        rows = [over_ranks(one[:, None]) for one in (before, after)]
        self._add("encoder", rows[0], rows[1], max(1.0, float(shares[at])))
        self._crossing.append(plan.routing.crossing_tokens() if plan.routing is not None else 0)


def words_on_limits(balance: Balance, *, clips: bool = False) -> list[str]:
    """Say what keeps steps from being even that no better placement by this strategy could change.

    Args:
        balance: The steps.
        clips: Whether clips count among the images.
    """
    words: list[str] = []
    facts = {fact.axis: fact for fact in balance.facts()}
    length, shares = balance.longest
    if (bound := _limit(facts.get("ranks"))) is not None:
        splits = _REACHED * balance.by_hybrid < bound
        remedy = f"{'splitting it (hdp) or ' if splits else ''}a larger global batch would help"
        words.append(f"One sequence of {length:,} tokens is {ratio(shares)} an even share of a step: {remedy}.")
    elif (bound := _limit(facts.get("lockstep"))) is not None:
        splits = _REACHED * balance.by_hybrid < bound
        other = "or splitting (hdp)" if splits else "or a larger global batch"
        words.append(
            f"In lockstep no placement of these sequences comes below {ratio(bound)}: a microbatch takes as long "
            f"as its longest sequence. Larger microbatches (batch.microbatch_tokens) {other} would help."
        )
    encoder, (length, shares) = facts.get("encoder"), balance.largest_image
    if _limit(encoder) is not None:
        words.append(
            f"One image{' or clip' if clips else ''} of {length:,} patches is {ratio(shares)} an even share of the "
            "encoder's work: only cutting it (vlm_hybrid with split) would help."
        )
    elif encoder and encoder.after and not balance.images_planned and encoder.after >= _UNEVEN:
        words.append(
            f"The busiest encoder rank has {ratio(encoder.after)} the mean, since images"
            f"{' and clips' if clips else ''} are encoded with their tokens: vlm_hybrid would spread them over all "
            "ranks."
        )
    return words


def _limit(fact: BalanceFacts | None) -> float | None:
    """Return the bound of an axis where it is what keeps the plan from being even."""
    if fact is None or fact.after is None or fact.bound is None:
        return None
    return fact.bound if fact.bound >= _MATTERS and fact.after <= _REACHED * fact.bound else None


def _known_mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else None


# --------------------------------------------------------------------------------------------------------------
# What the loaders of a job need: CPU time and bytes, measured here on a few samples of each source.
#
# Reading and measuring (which tokenizes) is timed apart from finishing (which decodes images, clips and sounds, in the
# loader or behind it). Times are CPU seconds of this process: the work of its threads counts, waiting for storage does
# not. `overlord profile` measures more and longer; here a source gets a fraction of a second, and its costs are kept
# per token, image token or sample, because a plan tells how many of each a step draws.


Unit = Literal["image_tokens", "samples", "tokens"]

_FINISHED = 8
"""Samples of each source that are finished."""
_BUDGET_S = 0.3
"""A source that has taken so long is not finished any further."""


class Roles:
    """The roles of an inline service, and what they know of its sources."""

    def __init__(self, service: InlineService) -> None:
        self.planner: Planner = service.role(PLANNER).host.planner
        loader = service.role(loader_name(0))
        self.fleet: LoaderFleet = loader.fleet
        self.prepared: Prepared = loader.prepared
        self.job = self.prepared.job
        self.listings: dict[str, SourceFiles] = {self.job.names[n]: files for n, files in loader.files.items()}
        self.facts = {name: facts_of(files) for name, files in self.listings.items()}


class BufferWatch:
    """Steps over planned samples, and remembers how full the read buffers were and how much of images was drawn."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self.most = np.zeros(len(roles.job.sources), np.int64)
        self.image_tokens = np.zeros(len(roles.job.sources), np.int64)
        self.row_bytes = np.zeros(len(roles.job.sources), np.int64)

    def step_over(self, plan: LoadingPlan) -> None:
        """Drop the samples of a step from the read buffers, so that they do not grow with the steps."""
        now = np.array([one["buffer_bytes"] for one in self._roles.fleet.status().values()], np.int64)
        np.maximum(self.most, now, out=self.most)
        np.add.at(self.image_tokens, plan.draw.source, plan.draw.meta["image_tokens"])
        np.add.at(self.row_bytes, plan.draw.source, plan.draw.meta["bytes"])
        self._roles.fleet.loader_do_plan(plan, ())


@dataclass(frozen=True, slots=True)
class Timed:
    """CPU seconds and bytes of a source, for one unit of what they grow with."""

    finished: int = 0
    """Samples that were finished."""
    unit: Unit = "tokens"
    """What finishing grows with."""
    read_s: float = 0.0
    """Of a sample with media (their headers are read), or of a token of text (it is tokenized)."""
    finish_s: float = 0.0
    """Of a unit."""
    reads_media: bool = False
    """Whether its samples may have media."""
    token_bytes: float = 0.0
    """Bytes handed over of a token: its id, and whether it counts in the loss."""
    media_bytes: float = 0.0
    """Bytes of media handed over of a unit."""


def time_samples(roles: Roles, steps: int, tell: Tell) -> dict[int, Timed]:
    """Return what a sample of each source costs that the next steps may draw, behind what is planned by now."""
    job, state, begin = roles.job, roles.planner.latest_state, roles.planner.first_step
    names, base = [source.name for source in job.sources], base_weights(job, roles.facts)
    at = [float(begin + n) for n in range(1 if job.mixture.schedule == "static" else steps)]
    if job.mixture.unit != "step":  # when epochs end is not known: any point of the schedule may be met
        at = job.mixture.positions()
    weights = np.array([job.mixture.weights_at(position, names, base) for position in at])
    drawn = np.flatnonzero(weights.any(axis=0)).tolist()
    found: dict[int, Timed] = {}
    for done, number in enumerate(drawn):
        found[number] = _time_source(roles, number, state.cursor(number), roles.prepared.transforms[number].decoder)
        tell("measuring loaders", done + 1, len(drawn))
    return found


def loader_facts(
    roles: Roles, collector: Collector, watch: BufferWatch, timed: Mapping[int, Timed], step_time_s: float
) -> LoaderFacts:
    """Return what the planned steps cost the loaders, from what samples of each source cost."""
    found: list[SourceCosts] = []
    statuses = roles.fleet.status()
    for number, source in enumerate(roles.job.sources):
        one, steps = timed.get(number, Timed()), max(collector.steps, 1)
        place = decoded_in(statuses[number])
        per_step, tokens = int(collector.samples[number]) / steps, int(collector.tokens[number]) / steps
        amounts = {"image_tokens": int(watch.image_tokens[number]) / steps, "samples": per_step, "tokens": tokens}
        found.append(
            SourceCosts(
                name=source.name,
                samples_per_step=per_step,
                measured_samples=one.finished,
                read_cpu_s=(per_step if one.reads_media else tokens) * one.read_s,
                finish_cpu_s=amounts[one.unit] * one.finish_s,
                # What travels encoded has the bytes that the loader read; they say little about its tokens.
                payload_bytes=int(watch.row_bytes[number]) / steps
                if place == "constructor"
                else tokens * one.token_bytes + amounts[one.unit] * one.media_bytes,
                decoded_in=place,
                buffer_bytes=int(watch.most[number]),
                index_bytes=count_indexed(roles.listings[source.name])[2],
            )
        )
    cpu_s = sum(one.cpu_s for one in found)
    return LoaderFacts(
        cpu_s_per_step=cpu_s,
        step_time_s=step_time_s,
        cores=max(1, math.ceil(cpu_s / step_time_s)),
        payload_bytes_per_step=sum(one.payload_bytes for one in found),
        buffer_bytes=sum(one.buffer_bytes for one in found),
        index_bytes=sum(one.index_bytes for one in found),
        measured_samples=sum(one.measured_samples for one in found),
        sources=found,
    )


def _time_source(roles: Roles, number: int, cursor: Cursor, decoder: MediaDecoder | None) -> Timed:
    count, fleet = _rows_to_read(roles, number, decoder is not None), roles.fleet
    # The first chunk opens the files, which a loader that is running does not do again.
    ahead = fleet.summary_buffer([MetaRequest(number, cursor, count)])[0]
    began = time.process_time()
    delta = fleet.summary_buffer([MetaRequest(number, ahead.next_cursor, count)])[0]
    unit = _unit_of(roles.job.sources[number], decoder)
    read = max(int(delta.meta["tokens"].sum()), 1) if unit == "tokens" else len(delta.meta)
    read_s = (time.process_time() - began) / read
    chosen = _samples_to_finish(delta.meta, unit)
    # Of several samples one goes first and is not counted: what happens once (a decoder is loaded) is no part of it.
    parts = [chosen[:1], chosen[1:]] if len(chosen) > 1 else [chosen]
    timed = Timed(0, unit, read_s, reads_media=unit != "tokens")
    for part in parts:
        if not len(part):
            break
        rows = delta.meta[part]
        end = Cursor(*(int(rows[-1][name]) for name in Cursor._fields))
        began = time.process_time()
        payloads = fleet.hand_over([LoaderOrder(roles.planner.next_step, number, rows, end)])()
        media = sum(payload.media.nbytes for payload in payloads if payload.media is not None)
        others = sum(payload.nbytes for payload in payloads) - media
        for payload in payloads:  # decode what comes encoded, as the constructor does
            if decoder is not None and payload.media is not None:
                decode_media(payload.media, decoder, SerialWorkers())
        seconds = time.process_time() - began
        tokens = max(int(rows["tokens"].sum()), 1)
        # Samples of a source with images may have none: what they cost grows with their text.
        grows = "tokens" if unit == "image_tokens" and not rows["image_tokens"].any() else unit
        units = len(rows) if grows == "samples" else max(int(rows[grows].sum()), 1)
        timed = Timed(len(part), grows, read_s, seconds / units, unit != "tokens", others / tokens, media / units)
        if seconds > _BUDGET_S:
            break
    return timed


def _samples_to_finish(meta: MetaArray, unit: Unit) -> npt.NDArray[np.int64]:
    """Return which of some measured rows are finished: in the order of the source, sound ones with media at first."""
    drawn = np.flatnonzero((meta["flags"] & SKIP) == 0)
    drawn = drawn[np.argsort(meta["flags"][drawn] & BAD, kind="stable")]
    if unit == "image_tokens":
        drawn = drawn[np.argsort(meta["image_tokens"][drawn] == 0, kind="stable")]
    return np.sort(drawn[: _FINISHED + 1])


def _unit_of(source: Source, decoder: MediaDecoder | None) -> Unit:
    if decoder is None:
        return "tokens"
    # The window of a sound is as long for every sound, and is no image.
    return "samples" if isinstance(source.sample, Audio) else "image_tokens"


def _rows_to_read(roles: Roles, number: int, media: bool) -> int:
    """Return how many rows are read and measured: as many as a loader reads at once."""
    source = roles.job.sources[number]
    order = order_of(roles.job, source, roles.listings[source.name])
    return rows_at_once(order.group(0, order.first_group(0)), _FINISHED + 1 if media else _FINISHED // 2)


# --------------------------------------------------------------------------------------------------------------
# What `explain` tells of each source: its shares, and how often it is read.


def source_facts(roles: Roles, collector: Collector, state: StreamState, horizon: int) -> list[SourceFacts]:
    """Return the facts of each source, in the order of the planner."""
    job, counted = roles.job, [count_indexed(roles.listings[source.name])[:2] for source in roles.job.sources]
    for number, rows in enumerate(state.epoch_rows.tolist()):
        if rows:
            counted[number] = (float(rows), True)
    passed = state.samples + state.skipped
    sizes = [
        SourceSize(rows, tokens / samples if samples else None, samples / whole if samples else 1.0, exact)
        for (rows, exact), tokens, samples, whole in zip(
            counted, state.tokens.tolist(), state.samples.tolist(), passed.tolist(), strict=True
        )
    ]
    per_step = int(collector.tokens.sum()) / max(collector.steps, 1)
    learn = job.mixture.learn
    course = Course(
        mixture=job.mixture,
        batch=job.batch,
        names=job.names,
        base=base_weights(job, roles.facts),
        filled=min(per_step / job.batch.global_tokens, 1.0) if job.batch.global_tokens else 1.0,
        constant=collector.planned if learn is not None and learn.follows_reports else None,
    )
    ahead = forecast(course, sizes, steps=horizon, most_steps=job.max_steps)
    return [
        SourceFacts(
            name=source.name,
            format=roles.listings[source.name].format,
            planned_share=collector.planned[number],
            realised_share=collector.realised[number],
            samples=int(collector.samples[number]),
            tokens=int(collector.tokens[number]),
            skipped=int(state.skipped[number]),
            rows=rows,
            rows_exact=exact and rows is not None,
            epochs=float(passed[number]) / rows if rows else None,
            projected_epochs=ahead[number].epochs,
            projected_effective_epochs=None if (n := ahead[number].epochs) is None else effective_epochs(n),
            forecast=ahead[number],
        )
        for number, (source, (rows, exact)) in enumerate(zip(job.sources, counted, strict=True))
    ]


# --------------------------------------------------------------------------------------------------------------


_CALLERS = 8


Costs = tuple[CostModel, CostModel, bool]
"""What a sequence costs the backbone, what an image costs the encoder, and whether the former is only assumed."""


def cost_models(strategy: Strategy | None, given: str | None) -> Costs:
    """Return the costs that a job is judged by.

    The command line says them, or the strategy, unless it is a Python function or balances by one.
    """
    backbone, encoder = costs_of(strategy)
    image = encoder if isinstance(encoder, CostModel) else vit_2b
    if given is not None:
        return Cost.from_mapping(mapping_or_name(given), lambda _: "--cost").model(), image, False
    if isinstance(backbone, CostModel):
        return backbone, image, False
    return llama_12b, image, backbone is not None or not isinstance(strategy, StrategySpec | None)


def explain_job(
    job: Job, name: str, launch: Launch, costs: Costs, *, steps: int, step_time_s: float, measure: bool, tell: Tell
) -> tuple[Explanation, str]:
    """Plan some steps of a job without running it, and return what they look like.

    Args:
        job: The job.
        name: What it is called.
        launch: Its mesh, strategy, layout and loaders.
        costs: As `cost_models` returns them.
        steps: Steps to plan.
        step_time_s: Seconds of a training step, for which the loaders' cores are counted.
        measure: Whether a few samples are decoded, to know the CPU time of the loaders.
        tell: Told how far it is.

    Returns:
        What was found, and the page of the first step's graph.

    Raises:
        SpecError: The job, the mesh or the strategy is wrong.
        PlanError: A step cannot be planned.
    """
    steps, notes = steps_to_plan(job, launch.strategy, steps)
    if costs[2]:
        notes.append(
            f"{strategy_name(launch)} is judged by {costs[0].name}, since a function's own cost is not known here; "
            "set --cost."
        )
    with dry_run(job, launch, tell) as roles:
        names, tree, (cost, encoder, _) = tuple(source.name for source in roles.job.sources), launch.mesh, costs
        limits = limits_of(roles.job, launch.layout, tree)
        collector = Collector(job, names, limits, tree, cost)
        balance = Balance(tree, limits, cost, encoder, meets_once=meets_once(launch.strategy))
        watch = BufferWatch(roles)

        def take(plan: LoadingPlan) -> None:
            balance.add(collector.add(plan))
            watch.step_over(plan)

        timed = time_samples(roles, steps, tell) if measure else None
        first = _plan_steps(roles, steps, take, tell)
        if collector.steps < steps:
            notes.append(f"The stream ends by itself after {collector.steps} of {steps} steps.")
        state = roles.planner.latest_state
        horizon = job.max_steps or PROJECTED_STEPS
        share = (collector.full / np.maximum(collector.samples, 1)).tolist()
        passed = (state.samples + state.skipped).tolist()
        full, skipped, met = (
            dict(zip(names, values, strict=True)) for values in (share, state.skipped.tolist(), passed)
        )
        few = few_samples(job, tree)
        notes += [few] if few is not None else []
        notes += balance.offloading + balance.plan_notes
        notes += context_notes(job, Path(launch.cache), full, skipped, met) + layout_advice(job, launch.layout)
        clips = any(isinstance(source.sample, Video) for source in job.sources)
        sources = source_facts(roles, collector, state, horizon)
        loaders = None
        if timed is not None:
            loaders = loader_facts(roles, collector, watch, timed, step_time_s)
        buffer = roles.planner.summary_buffer(first.step)
        assert buffer is not None  # it was planned before
        page, traced = draw_first_step(first, buffer, tree, cost, strategy_name(launch))
        order = {source.name: number for number, source in enumerate(job.sources)}
        facts = Explanation(
            job=name,
            mesh=str(tree),
            ranks=tree.world_size,
            strategy=strategy_name(launch),
            layout=layout_words(launch.layout),
            cost_model=f"{cost.name} ({cost.origin})",
            steps=collector.steps,
            expected_speedup=balance.speedup,
            waiting=balance.waiting,
            balance=balance.facts(),
            step=balance.step_facts(collector),
            sources=sorted(sources, key=lambda source: order[source.name]),
            projected_steps=horizon,
            mixture_level=job.mixture.level,
            loaders=loaders,
            crossing_tokens=balance.crossing_tokens,
            image_tokens=balance.image_tokens,
            has_clips=clips,
            length_histogram=collector.histogram,
            load_heatmap=collector.typical_load(),
            largest_sample=traced,
            limits=words_on_limits(balance, clips=clips),
            notes=notes + _fault_notes(roles, names),
        )
        return facts, page


@contextmanager
def dry_run(job: Job, launch: Launch, tell: Tell) -> Iterator[Roles]:
    """Open the sources of a job, and hold its roles in this process while the block runs."""
    options = ServiceOptions(
        mesh=launch.mesh,
        prefetch=launch.prefetch,
        # A dry run plans with one worker where their number is not the same for all sources.
        loaders_per_source=launch.loaders_per_source if isinstance(launch.loaders_per_source, int) else 1,
        cache=launch.cache,
        strategy=launch.strategy,
        layout=launch.layout,
        loader_do_plan=launch.loader_do_plan,
        placement=launch.placement,
    )
    with closing(InlineService(job, options, tell, _ExplainEnvironment(tell))) as service:
        yield Roles(service)


class _ExplainEnvironment(CallerEnvironment):
    """What the roles of an explained job run on: the caller, and threads where sources are opened."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(CallerPace(time.monotonic, time.sleep))
        self._tell = tell

    def progress(self, what: str, done: int, of: int) -> None:
        self._tell(what, done, of)

    def executors(self, threads: int, worker_threads: int, ends: ExitStack) -> Executors:
        callers = ThreadWorkers(_CALLERS, "overlord-explain")
        ends.callback(callers.close)
        return Executors(callers, SerialWorkers(), InlineExecutor())

    def prepare(self, job: Job, options: ServiceOptions, **given: Any) -> Prepared:
        return super().prepare(job, options, **given | {"isolate_reader": isolated()})


def steps_to_plan(job: Job, strategy: Strategy | None, wanted: int) -> tuple[int, list[str]]:
    """Return how many steps can be planned without a trainer's reports, and why, where these are fewer than wanted."""
    learn = job.mixture.learn
    # The report of step s counts from step s + lag on: before that the mixture is what it begins with.
    steps = min(wanted, job.lag)
    if learn is not None and not learn.follows_reports:
        learn = None
    if learn is None and not follows_reports(strategy):
        return wanted, []
    if learn is None:
        return steps, [
            f"A cost of the strategy follows what a trainer reports: {steps} steps are shown, planned before the first "
            f"report counts (lag {job.lag})."
        ]
    return steps, [
        f"The mixture learns ({learn.method}) from reports, which only a trainer has: {steps} steps are shown, drawn "
        f"before the first report counts (lag {job.lag}), and everything here holds for the weights it begins with."
    ]


def _plan_steps(roles: Roles, steps: int, take: Callable[[LoadingPlan], None], tell: Tell) -> LoadingPlan:
    """Plan so many steps, or as many as there are; return the first plan."""
    first: LoadingPlan | None = None
    begin = roles.planner.first_step
    for number in range(steps):
        plan = roles.planner.plan_raw(begin + number)
        if plan is None:
            break
        take(plan)
        first = first or plan
        tell("planning steps", number + 1, steps)
    if first is None:
        raise SpecError(
            "the stream of this job has no step: its sources hold less than one step, and drop_last leaves that out. "
            "Make the batch smaller, or set drop_last to false."
        )
    return first


def _fault_notes(roles: Roles, names: Sequence[str]) -> list[str]:
    notes: list[str] = []
    for name, one in zip(names, roles.fleet.status().values(), strict=True):
        if one["bad"]:
            samples = "sample was" if one["bad"] == 1 else "samples were"
            notes.append(f"{name}: {one['bad']} bad {samples} met; the log names them.")
        if one["wrong_length"]:
            notes.append(f"{name}: {one['wrong_length']} samples have another length than their length column says.")
    return notes
