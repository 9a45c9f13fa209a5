"""From a job and a mesh to wired roles: which there are, and who asks whom. Runtime-agnostic."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlord.core.layout_specs import Layout
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.samples import SampleId
from overlord.core.specs import Job, Source, stream_parts
from overlord.core.states import StreamState
from overlord.errors import SpecError
from overlord.planning.checking import Strategy, run_strategy
from overlord.planning.strategies import backbone_balance
from overlord.readers.index import IndexCache
from overlord.readers.sidecars import LengthSidecars
from overlord.readers.source_files import SourceFiles
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.inputs import InputLog, changes_from_json
from overlord.roles.placement import Placement, PlacementChoice
from overlord.roles.planner import Planner
from overlord.roles.source_loader import Lengths, SourceLoader
from overlord.roles.verdicts import Verdicts
from overlord.runtimes.loader_fleet import LoaderFleet
from overlord.runtimes.opening import Progress, index_first_windows, known_lengths, open_sources, order_of
from overlord.runtimes.shapes import check_multiples, limits_of, media_shape
from overlord.runtimes.warming import warm_job
from overlord.stores.checkpoints import CheckpointFolder
from overlord.stores.journal import Journal, read_journal, set_aside
from overlord.transforms.chat import inline_templates
from overlord.transforms.isolation import Isolate
from overlord.transforms.per_microbatch import PackingJob
from overlord.transforms.per_sample import SampleTransform, Workers
from overlord.transforms.processor import fill_from_processor, read_processor
from overlord.transforms.sample_kinds import make_transform, reserve_placeholders
from overlord.transforms.step_samples import Opening
from overlord.transforms.tokenize import TextTokenizer

logger = logging.getLogger("overlord")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """Everything of a launch that does not change which samples are drawn."""

    mesh: ClientPlaceTree
    prefetch: int = 2
    loaders_per_source: int = 1
    budget_bytes: int = 512 << 20
    """Most bytes of payloads and views held ahead of the trainers."""
    threads: int = 2
    """Threads for decoding and other heavy work."""
    store: str | None = None
    cache: str
    """Folder of indices and length sidecars."""
    state: Mapping[str, Any] | None = None
    latest: bool = False
    """Whether the state is the store's own newest snapshot."""
    strategy: Strategy | None = None
    """Where samples go; `backbone_balance()` by default."""
    skip_steps: int = 0
    """Global batches to pass over before the first step."""
    layout: Layout = field(default_factory=Layout)
    """Keys and shapes of the batches."""
    placement: Placement = "auto"
    """Where media are decoded."""


class FaultLog:
    """Logs what roles tell of single samples; the loaders keep the counts."""

    def bad_sample(self, sample: SampleId, reason: str) -> None:
        """Log a stand-in."""
        logger.warning("bad sample %s: %s; a stand-in takes its place", sample, reason)

    def wrong_length(self, sample: SampleId, reason: str) -> None:
        """Log a sample that was cut or padded to its planned length."""
        logger.warning("sample %s was cut or padded: %s", sample, reason)


@dataclass(frozen=True, slots=True)
class Roles:
    """The wired roles of one host."""

    job: Job
    tree: ClientPlaceTree
    planner: Planner
    constructor: DataConstructor
    fleet: LoaderFleet
    listings: Mapping[str, SourceFiles]
    close: Callable[[], None] = field(repr=False)


def deploy(
    job: Job,
    options: LaunchOptions,
    store: Path,
    callers: Workers,
    workers: Workers,
    progress: Progress | None = None,
    isolate: Isolate | None = None,
) -> Roles:
    """Open the sources, check everything that can be checked, and wire the roles.

    Args:
        job: The job.
        options: The launch.
        store: Folder of the journal and snapshots.
        callers: Runs calls to loaders side by side (they wait for I/O).
        workers: Runs leaf work (decoding).
        progress: Told how far the opening is.
        isolate: Brings Python code that holds the interpreter into process workers.
    """
    job = canonical(job)
    warm_job(job, options.layout)  # no step may wait for a compiler
    tokenizer = TextTokenizer(job.tokenizer) if job.tokenizer else None
    if tokenizer is not None:
        job = inline_templates(job, tokenizer)
        reserve_placeholders(job, tokenizer)
    check_launch(job, options)
    transforms = [_transform_of(source, tokenizer, isolate) for source in job.sources]
    cache = IndexCache(Path(options.cache) / "index")
    files = open_sources(job.sources, transforms, cache, callers, progress)
    listings = {s.name: f for s, f in zip(job.sources, files, strict=True)}
    digest = tokenizer.digest if tokenizer else ""
    parts = stream_parts(
        job,
        tokenizer_digest=digest,
        listings={name: f.listing_digest() for name, f in listings.items()},
    )
    names = [s.name for s in job.sources]
    state = StreamState.begin(len(names))
    if options.state is not None:
        state = StreamState.from_json(options.state, names, parts)
    base = base_weights(job, listings)
    sidecars = LengthSidecars(Path(options.cache) / "lengths")
    lengths = [known_lengths(source, listings[source.name], sidecars, digest) for source in job.sources]
    index_first_windows(job, files, state, job.mixture.weights_at(float(state.step), names, base), callers, progress)

    history = _open_store(job, options, store, state.step)
    try:
        fleet = _make_fleet(job, options, files, transforms, lengths, history.verdicts, callers, workers)
        planner = _start_planner(job, options, fleet, state, parts, base, history)
    except BaseException:
        history.journal.close()
        raise
    opening = Opening([transform.decoder for transform in transforms], workers)
    packing = PackingJob(options.layout, options.mesh.cp, media_shape(job), opening)
    constructor = DataConstructor(options.mesh, fleet, packing)
    return Roles(job, options.mesh, planner, constructor, fleet, listings, planner.close)


def _make_fleet(
    job: Job,
    options: LaunchOptions,
    files: Sequence[SourceFiles],
    transforms: Sequence[SampleTransform],
    lengths: Sequence[Lengths | None],
    verdicts: Verdicts,
    callers: Workers,
    workers: Workers,
) -> LoaderFleet:
    choices = [PlacementChoice(options.placement, threading.Lock()) for _ in job.sources]

    def make_loader(number: int) -> SourceLoader:
        source, opened = job.sources[number], files[number]
        return SourceLoader(
            number,
            source,
            opened,
            order_of(job, source, opened),
            transforms[number],
            seed=job.seed,
            context_length=job.batch.context_length,
            overlength=job.overlength,
            lengths=lengths[number],
            workers=workers,
            telemetry=FaultLog(),
            placement=choices[number],
            verdicts=verdicts,
        )

    count = options.loaders_per_source
    return LoaderFleet([[make_loader(n) for _ in range(count)] for n in range(len(files))], callers)


def _transform_of(source: Source, tokenizer: TextTokenizer | None, isolate: Isolate | None) -> SampleTransform:
    try:
        return make_transform(source, tokenizer, isolate)
    except SpecError as error:
        named = repr(source.name) in str(error)
        raise error if named else type(error)(f"source {source.name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class _History:
    """What a store holds of a stream, and where it goes on."""

    journal: Journal
    checkpoints: CheckpointFolder
    inputs: InputLog
    verdicts: Verdicts


def _open_store(job: Job, options: LaunchOptions, store: Path, step: int) -> _History:
    checkpoints = CheckpointFolder(store)
    checkpoints.set_aside(step)
    later = list(read_journal(store / "journal")) if options.latest else []
    set_aside(store / "journal", step)
    journal = Journal(store / "journal")
    try:
        inputs = recover_inputs(job, journal, options.state, later)
        verdicts = Verdicts.recover(journal, options.state, later, job.names, threading.Lock())
    except BaseException:
        journal.close()
        raise
    return _History(journal, checkpoints, inputs, verdicts)


def _start_planner(
    job: Job,
    options: LaunchOptions,
    fleet: LoaderFleet,
    state: StreamState,
    parts: Mapping[str, Any],
    base: Mapping[str, float],
    history: _History,
) -> Planner:
    strategy = options.strategy or backbone_balance()
    planner = Planner(
        job,
        fleet,
        lambda buffer: run_strategy(strategy, buffer, options.mesh),
        limits=limits_of(job, options.layout, options.mesh),
        state=state,
        inputs=history.inputs,
        parts=parts,
        base_weights=base,
        journal=history.journal,
        checkpoints=history.checkpoints,
        verdicts=history.verdicts,
    )
    if options.skip_steps:
        planner.skip_steps(options.skip_steps)
    return planner


def recover_inputs(
    job: Job, journal: Journal, state: Mapping[str, Any] | None, later: Sequence[Mapping[str, Any]]
) -> InputLog:
    """Return the reports and changes a stream goes on with.

    Those of its state; and where it goes on from its own newest snapshot, what came in after that (`later`). A state
    that was given may be of another lineage than the journal, so nothing but the state counts then.
    """
    if state is None:
        return InputLog(job, journal, {}, [])
    reports = {int(step): report for step, report in state["reports"].items()}
    changes = list(state["changes"]) if isinstance(state["changes"], list) else [state["changes"]]
    for record in later:
        if record["kind"] == "report" and state["step"] - job.lag <= record["step"] < state["step"]:
            reports.setdefault(record["step"], record["metrics"])
        if record["kind"].startswith("change.") and record["at"] >= state["step"]:
            change = {key: value for key, value in record.items() if key != "step"}
            change["kind"] = record["kind"].removeprefix("change.")
            if change not in changes:
                changes.append(change)
    inputs = InputLog(job, journal, reports, changes_from_json(changes, job))
    for recovered in inputs.changes[len(state["changes"]) :]:
        inputs.write_again(recovered)
    return inputs


def plan_first_step(planner: Planner) -> None:
    """Plan the first step, so that what is wrong shows before anything runs; unless it waits for a report."""
    missing = planner.missing_report(planner.first_step)
    if missing is None:
        planner.plan_raw(planner.first_step)
    else:
        logger.warning(
            "step %d waits for the report of step %d, which the state does not hold: report before you save. Call "
            "client.report(%d, ..) again", planner.first_step, missing, missing,
        )  # fmt: skip


def canonical(job: Job) -> Job:
    """Return the job as its stream is made: what its processor folder says filled in, its sources by name.

    The order that sources are written in must not matter.
    """
    if job.tokenizer is not None and Path(job.tokenizer).is_dir():
        job = fill_from_processor(job, read_processor(job.tokenizer))
    if job.mixture.order == "sequential":
        return job
    return job.replace(sources=sorted(job.sources, key=lambda source: source.name))


def check_launch(job: Job, options: LaunchOptions) -> None:
    """Refuse what a job and a mesh cannot do together."""
    if options.prefetch < 1:
        raise SpecError(f"prefetch is {options.prefetch}; every step would be waited for. Use 1 or more.")
    if job.lag <= options.prefetch:
        raise SpecError(
            f"lag is {job.lag} and prefetch is {options.prefetch}: a step would be planned before the report it "
            f"follows can arrive. Set lag to at least {options.prefetch + 1} or lower prefetch."
        )
    if options.loaders_per_source < 1:
        raise SpecError(f"loaders_per_source is {options.loaders_per_source}; nobody would read. Use 1 or more.")
    check_multiples(job, options.layout, options.mesh)
    media_shape(job)


def base_weights(job: Job, listings: Mapping[str, SourceFiles]) -> dict[str, float]:
    """Return the weights that stand beside the sources; by size where a temperature asks for it."""
    given = {s.name: s.weight for s in job.sources if s.weight is not None}
    if given:
        return {s.name: given.get(s.name, 0.0) for s in job.sources}
    if job.mixture.temperature is not None:
        return {name: float(files.total_bytes) for name, files in listings.items()}
    return {s.name: 1.0 for s in job.sources}
