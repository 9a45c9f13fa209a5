"""From a job and a mesh to roles: sources opened, what is wrong refused, loaders, planner and constructor made.

The same on every transport.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overlord.core.draw import Limits
from overlord.core.memory_account import MemoryAccount
from overlord.core.messages import OpenedSources, SourceFacts
from overlord.core.order import BEGIN, DataFile, SortedOrder, SourceOrder
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import count_labels
from overlord.core.ragged import Kind, Ragged, RowBatch, warm_ragged
from overlord.core.samples import FILE_SHIFT, Cursor
from overlord.core.spec_errors import list_some
from overlord.core.states import StreamState, restricted_parts
from overlord.errors import NothingToDraw, OverlordError, ReportMissing, SourceError, SpecError, error_named, joined
from overlord.job.hook_specs import HOOK_KINDS, HookKind
from overlord.job.layout_specs import Layout, bin_multiple, piece_multiple
from overlord.job.reconcile import reconcile_state, unweighted
from overlord.job.sample_specs import ImageSpec
from overlord.job.specs import Audio, Chat, ImageText, Job, Source, Text, Video, source_digest, stream_parts
from overlord.planning.checking import run_strategy
from overlord.planning.strategies import backbone_balance, built_in, encodes_apart
from overlord.planning.warm import warm_kernels, warm_launch
from overlord.readers.index import IndexCache
from overlord.readers.join import JoinedColumns
from overlord.readers.parquet_footer import warm_footer
from overlord.readers.parquet_pages import warm_pages
from overlord.readers.reader import Reader
from overlord.readers.remote.range_cache import range_cache
from overlord.readers.source_files import LengthSidecars, NoFiles, SourceFiles
from overlord.readers.spill import warm_spill
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.planner import Planner, PlannerStart
from overlord.roles.ports import Loaders
from overlord.roles.source_loader import Lengths
from overlord.runtimes.launching.resume import (
    History,
    ResumePoint,
    canonical,
    draw_again,
    earlier_states,
    names_gone,
    names_parked,
    names_to_come,
    pass_recorded,
    with_added_sources,
    with_source_options,
    without_files,
)
from overlord.runtimes.launching.service_options import Progress, ServiceOptions
from overlord.runtimes.transport.shared_memory import shared_heap
from overlord.transforms.hooks import RunningHook
from overlord.transforms.microbatches.packing_kernels import copy_runs, warm_packing
from overlord.transforms.microbatches.per_microbatch import MediaShape, PackingJob
from overlord.transforms.microbatches.positions import mrope_positions
from overlord.transforms.microbatches.step_samples import Opening
from overlord.transforms.samples.audio import log_mel
from overlord.transforms.samples.chat import inline_templates, loss_in_spans
from overlord.transforms.samples.image_values import ImageValues
from overlord.transforms.samples.images import normalize_patches, warm_images
from overlord.transforms.samples.per_sample import Isolate, SampleTransform, Workers
from overlord.transforms.samples.pooled import pooled_transform
from overlord.transforms.samples.sample_kinds import make_transform, reserve_placeholders
from overlord.transforms.samples.tokenize import TextTokenizer, TokenizerFile, TokenSpans

# --------------------------------------------------------------------------------------------------------------
# What batches of a job look like on a mesh: limits of its plans, shapes of its media; checked before anything runs.


def limits_of(job: Job, layout: Layout | None = None, mesh: ClientPlaceTree | None = None) -> Limits:
    """Return what plans of this job must respect."""
    layout, tp = layout or Layout(), mesh.tp if mesh is not None else 1
    return Limits(
        context_length=job.batch.context_length,
        microbatch_tokens=job.batch.microbatch_cap,
        microbatches=job.batch.microbatches,
        patches_per_token=media_shape(job).merge ** 2 if _vision(job) else 4,
        frames_per_token=max(
            (s.sample.frames_per_token for s in job.sources if isinstance(s.sample, Audio)), default=4
        ),
        slicing=layout.slicing,
        rank_multiple=layout.rank_multiple(tp),
        row_tokens=job.batch.context_length if layout.rows != "packed" else 0,
        full_rows=layout.rows == "full",
    )


def media_shape(job: Job) -> MediaShape:
    """Return the one shape that all images, clips and sounds of a job have in a batch.

    Raises:
        SpecError: where sources differ.
    """
    vision: dict[tuple[int, int, int], list[str]] = {}
    sounds: dict[tuple[int, int], list[str]] = {}
    for source in job.sources:
        spec = source.sample
        if isinstance(spec, (ImageSpec, Video)):
            vision.setdefault((spec.patch, spec.merge, spec.temporal), []).append(source.name)
        elif isinstance(spec, Audio):
            sounds.setdefault((spec.mels, spec.seconds * 100), []).append(source.name)
    if len(vision) > 1:
        shown = "; ".join(f"patch={p}, merge={m}, temporal={t} in {_some(n)}" for (p, m, t), n in vision.items())
        raise SpecError(
            f"sources use image patches of different kinds ({shown}); one batch holds one kind. Give all sources the "
            "same patch, merge and temporal."
        )
    if len(sounds) > 1:
        shown = "; ".join(f"mels={m}, seconds={f // 100} in {_some(n)}" for (m, f), n in sounds.items())
        raise SpecError(
            f"sources use sounds of different shapes ({shown}); one batch holds one shape. Give all sources the same "
            "mels and seconds."
        )
    patch, merge, temporal = next(iter(vision), (0, 1, 1))
    mels, frames = next(iter(sounds), (0, 0))
    return MediaShape(3 * temporal * patch**2, merge, mels, frames)


def check_mesh(job: Job, options: ServiceOptions, mesh: ClientPlaceTree) -> None:
    """Refuse a mesh that does not fit a job, and meshes of modules that no strategy would look at."""
    if mesh.modules and built_in(options.strategy):
        names = ", ".join(dict(mesh.modules))
        raise SpecError(
            f"mesh: modules has {names}, and the strategies of overlord place media on the ranks of the whole mesh; it "
            "would be ignored. Leave modules out, or use a strategy of your own that asks for tree.module(..)."
        )
    check_multiples(job, options.layout, mesh)


def check_decoding(job: Job, options: ServiceOptions, trainer_hosts: int) -> None:
    """Refuse a place of decoding that loaders on their way to several hosts of trainers would not look at."""
    kinds = _media_kinds(job)
    if options.placement == "constructor" and trainer_hosts > 1 and kinds and kinds <= encodes_apart(options.strategy):
        raise SpecError(
            f"launch: placement is 'constructor', the strategy encodes media apart from their tokens, and trainers run "
            f"on {trainer_hosts} hosts, which must know alike which media decode: loaders decode all of them, so "
            "placement would be ignored. Leave it out, or use a strategy that encodes media where their tokens are."
        )


def _media_kinds(job: Job) -> set[str]:
    """Return the media that a job has, as `encodes_apart` calls them."""
    sounds = any(isinstance(source.sample, Audio) for source in job.sources)
    return ({"images"} if _vision(job) else set()) | ({"audio"} if sounds else set())


def check_multiples(job: Job, layout: Layout, mesh: ClientPlaceTree) -> None:
    """Refuse a context or a memory cap that the ranks of a mesh cannot share evenly."""
    multiple = max(
        piece_multiple(layout.slicing, mesh.cp), bin_multiple(layout.slicing, layout.rank_multiple(mesh.tp), mesh.cp)
    )
    parts = [f"2 x cp={mesh.cp}"] if mesh.cp > 1 and layout.slicing != "contiguous" else []
    parts += [f"cp={mesh.cp}"] if mesh.cp > 1 and layout.slicing == "contiguous" else []
    parts += [f"tp={mesh.tp} of sequence parallelism"] if layout.sequence_parallel and mesh.tp > 1 else []
    parts += [f"block={layout.block}"] if layout.block > 1 else []
    for name, value in (("context_length", job.batch.context_length), ("microbatch_tokens", job.batch.microbatch_cap)):
        if value % multiple:
            raise SpecError(
                f"batch.{name} is {value}, which is not a multiple of {multiple} ({', '.join(parts)}): the ranks could "
                "not share a full sequence evenly. Round it to a multiple."
            )


def _some(names: list[str]) -> str:
    return f"source{'' if len(names) == 1 else 's'} {list_some(names, limit=4)}"


def _vision(job: Job) -> list[ImageSpec | Video]:
    return [s.sample for s in job.sources if isinstance(s.sample, (ImageSpec, Video))]


# --------------------------------------------------------------------------------------------------------------
# Opening sources: files listed, columns checked, the first window indexed, known lengths found.


IsolateReader = Callable[[Reader], Reader]
"""Brings a reader into processes that a damaged file may end."""


def try_sources(
    sources: Sequence[Source],
    transforms: Sequence[SampleTransform],
    cache: IndexCache,
    workers: Workers,
    progress: Progress | None = None,
    isolate: IsolateReader | None = None,
) -> list[SourceFiles | OverlordError]:
    """List the files of every source and check that the columns exist; return its files, or why they cannot be had."""
    done = 0

    def open_one(item: tuple[Source, SampleTransform]) -> SourceFiles | OverlordError:
        nonlocal done
        source, transform = item
        extra = (source.lengths,) if source.lengths not in (None, "sidecar") else ()
        wanted = tuple(dict.fromkeys((*transform.columns, *extra)))
        found: SourceFiles | OverlordError
        try:
            ImageValues.of(source).check()
            columns, join = joined_columns(source, wanted, cache, isolate)
            found = SourceFiles(
                source.name,
                source.path,
                format=source.format,
                columns=columns,
                join=join,
                config=source.config,
                split=source.split,
                storage_options=source.storage_options,
                max_row_bytes=source.max_row_bytes,
                cache=cache,
                isolate=isolate,
            )
            if source.order_by is not None:
                found.check_sortable(source.order_by)
            check_kinds(source, found.kinds())  # a missing or wrong column shows here, before anything runs
        except OverlordError as error:
            found = named_error(source, error)
            found.source = source.name
        done += 1
        if progress is not None:
            progress("opening sources", done, len(sources))
        return found

    return workers.map(open_one, list(zip(sources, transforms, strict=True)))


def joined_columns(
    source: Source, wanted: Sequence[str], cache: IndexCache, isolate: IsolateReader | None
) -> tuple[list[str] | None, Callable[[SourceFiles], JoinedColumns] | None]:
    """Return which columns are read from a source's own files (None: all), and what makes those of its join."""
    spec = source.join
    if spec is None:
        return list(wanted) or None, None
    unused = [name for name in spec.columns if wanted and name not in wanted]
    if unused:
        raise SpecError(
            f"source {source.name!r}: join.columns: {unused[0]!r} is not read by the sample ({', '.join(wanted)}); it "
            "would be joined for nothing. Name it in the sample, or leave it out."
        )
    other = SourceFiles(
        f"{source.name}.join",
        spec.path,
        format=spec.format,
        columns=list(dict.fromkeys(spec.columns.values())),
        config=spec.config,
        split=spec.split,
        storage_options=spec.storage_options,
        max_row_bytes=source.max_row_bytes,
        cache=cache,
        isolate=isolate,
    )
    own = [name for name in wanted if name not in spec.columns]
    keeps_key = spec.by is None or not wanted or spec.by in own
    if wanted and not keeps_key:
        own.append(spec.by or "")  # the last one, as `JoinedColumns` takes it
    return own if wanted else None, lambda files: JoinedColumns(spec, files, other, keeps_key=keeps_key)


def named_error(source: Source, error: OverlordError) -> OverlordError:
    """Return an error that names its source: a path alone is hard to find among hundreds of sources."""
    if not isinstance(error, SpecError) or f"source {source.name!r}" in str(error):
        return error
    return type(error)(f"source {source.name!r}: {error}")


_NUMBERS, _BYTES = ("int", "float"), ("bytes",)


def check_kinds(source: Source, kinds: Mapping[str, Kind]) -> None:
    """Refuse columns that cannot hold what a sample's field names them for.

    Raises:
        SourceError: A column is of another kind.
    """
    sample = source.sample
    wanted: dict[str, tuple[str, tuple[str, ...], str]] = {}
    if isinstance(sample, Text) and sample.tokenized:
        wanted[sample.column] = ("column", ("int_list",), "token ids (lists of whole numbers)")
    if isinstance(sample, ImageText):
        wanted[sample.image] = ("image", _BYTES, "one encoded image; of several use ol.Interleaved")
        for field in ("width", "height"):
            if getattr(sample, field) is not None:
                wanted[getattr(sample, field)] = (field, _NUMBERS, "numbers of pixels")
    if isinstance(sample, (Audio, Video)):
        field = "audio" if isinstance(sample, Audio) else "video"
        wanted[getattr(sample, field)] = (field, _BYTES, f"one encoded {'sound' if field == 'audio' else 'clip'}")
    for column, (field, allowed, what) in wanted.items():
        kind = kinds.get(column)
        if kind is not None and kind not in allowed:
            raise SourceError(
                f"source {source.name!r}: sample.{field}={column!r} holds {_KIND_WORDS[kind]}, and there must be {what}"
                "; samples would be nonsense. Name another column."
            )


_KIND_WORDS: dict[Kind, str] = {
    "bytes": "text or bytes",
    "json": "nested values",
    "int": "whole numbers",
    "float": "fractions",
    "int_list": "lists of whole numbers",
    "float_list": "lists of fractions",
    "bytes_list": "lists of bytes",
}


def order_of(job: Job, source: Source, files: SourceFiles) -> SourceOrder:
    """Return the order of one source."""
    column = source.order_by
    if column is not None:
        return SortedOrder(source.name, listing_of(files), rows=lambda: files.sorted_rows(column), index=files.blocks)
    return SourceOrder(
        job.seed,
        source.name,
        listing_of(files),
        shuffle_bytes=source.shuffle_bytes,
        index=files.first_blocks,
        prepare=files.prepare,
    )


def index_first_windows(
    job: Job,
    files: Mapping[int, SourceFiles],
    cursors: Sequence[Cursor],
    weights: Sequence[float],
    workers: Workers,
    progress: Progress | None,
) -> None:
    """Index the files that the first step reaches, side by side; the rest is indexed when it is reached."""
    tasks: list[tuple[SourceFiles, int]] = []
    for number, opened in files.items():
        if weights[number] > 0:
            if opened.join is not None:
                opened.join.prepare()
            order = order_of(job, job.sources[number], opened)
            epoch, group, _ = cursors[number]
            tasks += [(opened, int(file)) for file in order.files_of(epoch, max(group, 0))]
            if isinstance(order, SortedOrder):
                order.first_group(epoch)  # sorts the source, unless that is in the cache: a wrong value shows here
    done = 0

    def index_one(task: tuple[SourceFiles, int]) -> None:
        nonlocal done
        task[0].first_blocks(task[1])
        done += 1
        if progress is not None:
            progress("indexing files", done, len(tasks))

    workers.map(index_one, tasks)


def listing_of(files: SourceFiles) -> list[DataFile]:
    """Return what the order may know of a source's files before they are opened."""
    return [DataFile(file.path, file.size) for file in files.files]


def known_lengths(
    source: Source, files: SourceFiles, sidecars: LengthSidecars, tokenizer_digest: str
) -> Lengths | None:
    """Return how a source's text lengths are known before its text is tokenized, if they are."""
    if source.lengths is None:
        return None
    if source.lengths != "sidecar":
        column = source.lengths

        def from_column(rows: RowBatch, _: np.ndarray) -> np.ndarray:
            values = rows[column]
            if isinstance(values, Ragged):
                raise SourceError(
                    f"source {source.name!r}: the length column {column!r} does not hold whole numbers; no sample "
                    "could be planned by it. Name a numeric column, or leave lengths out."
                )
            return values.astype(np.int64)

        return from_column
    tables = sidecars.open_all(source, files, tokenizer_digest)

    def from_sidecar(_: RowBatch, numbers: np.ndarray) -> np.ndarray:
        file, row = numbers >> FILE_SHIFT, numbers & ((1 << FILE_SHIFT) - 1)
        return np.array([tables[f][r] for f, r in zip(file.tolist(), row.tolist(), strict=True)], np.int64)

    return from_sidecar


# --------------------------------------------------------------------------------------------------------------


logger = logging.getLogger("overlord")


def facts_of(files: SourceFiles) -> SourceFacts:
    """Return what a planner must know of the files of an open source."""
    return SourceFacts(files.format, files.listing_digest(), files.total_bytes)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job made ready on one host: what every role of it may need, and no file open."""

    job: Job
    """Canonical, with the chat templates of its tokenizer."""
    options: ServiceOptions
    tokenizer_digest: str
    transforms: Sequence[SampleTransform]
    """One for each source."""
    cache: IndexCache
    """Indices of files, and the shuffle groups that are held of all sources."""
    isolate: Isolate | None = None
    """Brings Python code that holds the interpreter into process workers."""
    isolate_reader: IsolateReader | None = None
    """Brings the reading of files into reader processes."""
    coming: int = 0
    """How many of the sources, the last ones, come only at a later step."""
    hooks: Mapping[HookKind, RunningHook] = field(default_factory=dict[HookKind, RunningHook])
    """The user's hooks; a host starts those of its own roles."""
    gone: frozenset[str] = frozenset()
    """Sources that came and were removed while the stream ran: they keep their numbers, and are not opened again."""
    away: Mapping[str, str] = field(default_factory=dict[str, str])
    """Parked sources whose files cannot be opened, with the digests that the fingerprint has of them."""


@dataclass(frozen=True, slots=True)
class ResumedState:
    """Where a stream stands when it is launched."""

    parts: Mapping[str, Any]
    """What its fingerprint covers, with sources that are still to come."""
    state: StreamState
    given: Mapping[str, Any] | None
    """The state it was given, as one of this job; None at the beginning."""


def prepare(
    job: Job,
    options: ServiceOptions,
    isolate: Isolate | None = None,
    state: Mapping[str, Any] | None = None,
    isolate_reader: IsolateReader | None = None,
    memory: MemoryAccount | None = None,
) -> Prepared:
    """Bring a job into the form its stream is made from, and refuse what it and the launch cannot do together.

    Args:
        state: The state it goes on from, with changes that were journaled after it; by default that of the launch.
        memory: Counts what this process holds; by default nothing else of it is counted.
    """
    state = state or options.numbering or options.state
    gone = names_gone(job, state)
    job = with_source_options(canonical(with_added_sources(job, state), state), options, state, job)
    tokenizer = TextTokenizer(job.tokenizer) if job.tokenizer else None
    if tokenizer is not None:
        job = inline_templates(job, tokenizer)
        reserve_placeholders(job, tokenizer)
    check_launch(job, options)
    transforms = [transform_of(source, tokenizer, isolate, pooled=options.pools(source)) for source in job.sources]
    digest = tokenizer.digest if tokenizer else ""
    warm_job(job, options.layout)  # no step may wait for a compiler; a wrong job need not either
    given = {kind: getattr(options, kind) for kind in HOOK_KINDS}
    hooks = {kind: RunningHook(hook, kind, job.seed) for kind, hook in given.items() if hook is not None}
    account = memory or MemoryAccount(options.budget_bytes)
    ranges = range_cache(Path(options.cache), options.cache_bytes)
    cache = IndexCache(Path(options.cache) / "index", lambda: account.room("shuffle groups"), ranges)
    account.add("shuffle groups", lambda: cache.groups.nbytes)
    if isolate is not None and any(options.pools(source) for source in job.sources):
        cache.memory = shared_heap()
    return Prepared(
        job, options, digest, transforms, cache, isolate, isolate_reader,
        coming=len(names_to_come(state)), hooks=hooks, gone=gone,
    )  # fmt: skip


def try_files(
    prepared: Prepared, numbers: Sequence[int], callers: Workers, progress: Progress | None = None
) -> dict[int, SourceFiles | OverlordError]:
    """Open some of a job's sources; return the files of each, or why they cannot be had."""
    sources, cache = prepared.job.sources, prepared.cache
    found: dict[int, SourceFiles | OverlordError] = {
        number: NoFiles(sources[number].name, sources[number].format, cache) for number in numbers
    }
    here = [number for number in numbers if sources[number].name not in prepared.gone]
    chosen, transforms = [sources[number] for number in here], [prepared.transforms[number] for number in here]
    opened = try_sources(chosen, transforms, cache, callers, progress, prepared.isolate_reader)
    return found | dict(zip(here, opened, strict=True))


def open_files(
    prepared: Prepared, numbers: Sequence[int], callers: Workers, progress: Progress | None = None
) -> dict[int, SourceFiles]:
    """Open some of a job's sources.

    Raises:
        OverlordError: for all sources that cannot be opened, a line for each.
    """
    found = try_files(prepared, numbers, callers, progress)
    wrong = [one for one in found.values() if isinstance(one, OverlordError)]
    if wrong:
        raise joined(wrong)
    return {number: files for number, files in found.items() if isinstance(files, SourceFiles)}


def sources_away(prepared: Prepared, opened: OpenedSources, point: ResumePoint) -> dict[str, str]:
    """Return the parked sources whose files are gone or replaced, with their digests: the stream goes on without them.

    Raises:
        OverlordError: for all sources that cannot be opened and are needed, a line for each.
    """
    job, known = prepared.job, {} if point.state is None else point.state["fingerprint"]["sources"]
    parked = names_parked(point.numbering)
    by_size = job.mixture.temperature is not None and all(source.weight is None for source in job.sources)
    spared = set() if by_size else {name for name in parked if name in known}
    needed = [name for name in opened.missing if name not in spared]
    if needed:
        raise joined([error_named(*opened.missing[name]) for name in needed])
    now = {source.name: source_digest(source, opened.facts[source.name].listing)
           for source in job.sources if source.name in opened.facts}  # fmt: skip
    replaced = {name for name in spared if now.get(name, known[name]) != known[name]}
    for name in sorted(replaced | set(opened.missing)):
        why = opened.missing.get(name, ("", "its files are not those that the stream began with"))[1]
        logger.warning("source %r is parked, and the stream goes on without it: %s", name, why)
    # A planner that is replaced is told of no errors: what nothing is known of was away when the service started.
    return {name: known[name] for name in job.names if name in {*replaced, *opened.missing} or name not in opened.facts}


def state_to_resume(prepared: Prepared, facts: Mapping[str, SourceFacts], point: ResumePoint) -> ResumedState:
    """Return what the stream's fingerprint covers, and the state it goes on from.

    Raises:
        StateError: when the state is of another stream, beyond what the launch lets differ.
    """
    job, given = prepared.job, point.state
    parts = parts_of(prepared, facts)
    if given is None:
        return ResumedState(parts, StreamState.begin(len(job.sources)), None)
    names = job.names[: len(job.names) - prepared.coming]
    now = restricted_parts(parts, names)
    given = without_files(given, now, prepared.gone)
    found = reconcile_state(given, now, "strict" if point.recovered else prepared.options.reconcile)
    state = StreamState.from_json(found, names, now)
    for name in unweighted(given, found):
        logger.warning(
            "source %r is new, and the mixture that was set while the stream ran does not name it: nothing is drawn "
            "from it. Call service.set_mixture(..), or write the weights into the job", name,
        )  # fmt: skip
    return ResumedState(parts, state, found)


def parts_of(prepared: Prepared, facts: Mapping[str, SourceFacts]) -> dict[str, Any]:
    """Return what the stream's fingerprint covers; hooks only where there are some, as older states know none."""
    listings = {name: fact.listing for name, fact in facts.items()}
    parts = stream_parts(prepared.job, tokenizer_digest=prepared.tokenizer_digest, listings=listings)
    parts["sources"] |= prepared.away
    given = {kind: getattr(prepared.options, kind) for kind in prepared.hooks}
    return parts | ({"hooks": {kind: hook.identity for kind, hook in given.items()}} if given else {})


def first_needs(
    prepared: Prepared, facts: Mapping[str, SourceFacts], state: StreamState
) -> tuple[list[Cursor], list[float]]:
    """Return where each source stands before the first step, and the weight it has there."""
    job, here, begin = prepared.job, len(state.epoch), Cursor(0, BEGIN, 0)
    base, epochs = base_weights(job, facts), [*state.epoch.tolist(), *[0] * (len(job.names) - here)]
    done = [number < here and bool(state.finished[number]) for number in range(len(job.names))]
    position = job.mixture.position(float(state.step), job.names, epochs, done, base)
    weights = job.mixture.weights_at(position, job.names, base)
    cursors = [state.cursor(number) if number < here else begin for number in range(len(job.sources))]
    there = [number < here and name not in prepared.gone for number, name in enumerate(job.names)]
    return cursors, [weight if drawn else 0.0 for weight, drawn in zip(weights, there, strict=True)]


def make_constructor(prepared: Prepared, loaders: Loaders, workers: Workers) -> DataConstructor:
    """Make the DataConstructor of one host."""
    options = prepared.options
    opening = Opening([transform.decoder for transform in prepared.transforms], workers)
    hook = prepared.hooks.get("constructor_do_plan")
    hook = None if hook is None else hook.start()
    return DataConstructor(loaders, PackingJob(options.layout, media_shape(prepared.job), opening, hook))


def transform_of(
    source: Source, tokenizer: TextTokenizer | None, isolate: Isolate | None = None, *, pooled: bool = False
) -> SampleTransform:
    """Make the transform of a source; what is wrong with it is said with its name.

    Args:
        pooled: Whether all its work runs in the process workers, and not only Python code that holds the interpreter.
    """
    try:
        made = make_transform(source, tokenizer, isolate)
        if isolate is None or not pooled:
            return made
        file = None if tokenizer is None else TokenizerFile(tokenizer.path, tokenizer.reserved, tokenizer.digest)
        return pooled_transform(source, made, file, isolate)
    except SpecError as error:
        raise named_error(source, error) from error


def start_planner(
    prepared: Prepared,
    loaders: Loaders,
    resumed: ResumedState,
    facts: Mapping[str, SourceFacts],
    history: History,
) -> Planner:
    """Make the Planner of a stream, at the state it goes on from."""
    job, options = prepared.job, prepared.options
    strategy = options.strategy or backbone_balance()
    history.inputs.base.update(base_weights(job, facts))

    @functools.lru_cache(maxsize=16)
    def limits(tree: ClientPlaceTree) -> Limits:
        check_mesh(job, options, tree)
        return limits_of(job, options.layout, tree)

    earlier = earlier_states(job, resumed.parts, history, prepared.gone)
    state = pass_recorded(job, resumed.state, history, prepared.away)
    if state.step > resumed.state.step:
        earlier.append(resumed.state)
    start = PlannerStart(
        state=draw_again(job, loaders, state, history),
        inputs=history.inputs,
        parts=resumed.parts,
        poisoned=history.verdicts,
        earlier=earlier,
        digests=history.digests,
    )
    planner = Planner(
        job,
        loaders,
        history.store,
        start,
        functools.partial(run_strategy, strategy),
        mesh=options.mesh,
        limits=limits,
        parks_failing=options.on_source_failure != "stop",
        keep=options.keep,
    )
    planner.checkpoints.begin()
    if options.job_text is not None and not history.point.recovered:
        history.store.keep_job(options.job_text)
    begins = not history.point.recovered and history.point.mesh is None
    if options.skip_steps and begins:  # otherwise it is in the journal
        planner.skip_steps(options.skip_steps)
    return planner


def plan_first_step(planner: Planner) -> None:
    """Plan the first step, so that what is wrong shows before anything runs; unless it waits for a report."""
    step = planner.next_step
    missing = planner.missing_report(step)
    if missing is None:
        try:
            planner.plan_raw(step)
        except NothingToDraw as error:
            logger.warning("%s", error)  # a source may return while the service runs
        except ReportMissing:  # of the strategy, known only now
            missing = planner.missing_report(step)
    if missing is not None:
        logger.warning(
            "step %d waits for the report of step %d, which the state does not hold: report before you save. Call "
            "client.report(%d, ..) again", step, missing, missing,
        )  # fmt: skip


def check_launch(job: Job, options: ServiceOptions) -> None:
    """Refuse what a job and a mesh cannot do together."""
    if options.prefetch < 1:
        raise SpecError(f"prefetch is {options.prefetch}; every step would be waited for. Use 1 or more.")
    if job.lag <= options.prefetch:
        raise SpecError(
            f"lag is {job.lag} and prefetch is {options.prefetch}: a step would be planned before the report it "
            f"follows can arrive. Set lag to at least {options.prefetch + 1} or lower prefetch."
        )
    if options.loaders_per_source < 1:
        raise SpecError(f"loaders_per_source is {options.loaders_per_source}; no source would be read. Use 1 or more.")
    check_mesh(job, options, options.mesh)
    if options.placement != "auto" and not _media_kinds(job):
        raise SpecError(
            f"launch: placement is {options.placement!r}, and no source of the job has images, clips or sounds; it "
            "would be ignored. Leave placement out."
        )
    media_shape(job)


def base_weights(job: Job, facts: Mapping[str, SourceFacts]) -> dict[str, float]:
    """Return the weights that stand beside the sources; by size where a temperature asks for it."""
    given = {s.name: s.weight for s in job.sources if s.weight is not None}
    if given:
        return {s.name: given.get(s.name, 0.0) for s in job.sources}
    if job.mixture.temperature is not None:
        # The size of such a source is that of the list of its files.
        unsized = next((name for name in job.names if facts[name].format == "lance"), None)
        if unsized is not None:
            raise SpecError(
                f"mixture.temperature is {job.mixture.temperature}, which makes weights of the sizes of sources, and "
                f"that of {unsized!r}, a Lance dataset, is not known; its share would be wrong. Give weights."
            )
        return {name: float(facts[name].total_bytes) for name in job.names}
    return {s.name: 1.0 for s in job.sources}


# --------------------------------------------------------------------------------------------------------------
# Kernels loaded before a run begins, so that no step waits for a compiler.
#
# numba keeps what it compiled beside the sources; call `warm_everything` when installing, and the first launch starts
# fast too.


COMPILING = "compiling kernels"
SAY_AFTER_S = 2.0
"""Seconds of compiling after which a process says that it compiles."""


class _CompilingNotice:
    """Logs once that kernels are being compiled, when that takes long; loading them from the cache does not count."""

    def __init__(self) -> None:
        self._began = self._total = 0.0
        self._depth = 0
        self._told = False
        self.progress: Progress | None = None
        """Also told, where a service process starts."""

    def on_start(self, event: Any) -> None:
        """Note that a kernel is being compiled, maybe for another one."""
        self._began = self._began if self._depth else time.monotonic()
        self._depth += 1
        self._tell_if_long()

    def on_end(self, event: Any) -> None:
        """Note that it is compiled."""
        self._tell_if_long()
        self._depth -= 1
        self._total += 0.0 if self._depth else time.monotonic() - self._began
        if self._told and not self._depth and self.progress is not None:
            self.progress(COMPILING, 1, 1)

    def _tell_if_long(self) -> None:
        if not self._told and self._total + time.monotonic() - self._began > SAY_AFTER_S:
            self._told = True
            logger.warning(
                "kernels are being compiled, which takes up to a minute or two. It is done once after an install: the "
                "next start finds them in numba's cache, if its folder can be written (see NUMBA_CACHE_DIR)."
            )
        if self._told and self.progress is not None:
            self.progress(COMPILING, 0, 1)


@functools.cache
def tell_of_compiling() -> _CompilingNotice:
    """From now on, say in the log when this process compiles for long."""
    from numba.core import event  # numba is loaded where a kernel is called

    notice = type("CompilingNotice", (_CompilingNotice, event.Listener), {})()
    event.register("numba:compile", notice)
    return notice  # type: ignore[no-any-return]


def warm_job(job: Job, layout: Layout) -> None:
    """Load what a job and a layout will need."""
    warm_common()
    if layout.positions != "plain":
        _warm_positions()
    if any(isinstance(source.sample, (ImageSpec, Video)) for source in job.sources):
        warm_images()
    if layout.pixels == "float32":
        _warm_normalizing()
    if any(isinstance(source.sample, Audio) for source in job.sources):
        _warm_sounds()
    if any(isinstance(source.sample, Chat) for source in job.sources):
        _warm_spans()


def warm_common() -> None:
    """Load what every job needs."""
    tell_of_compiling()
    warm_launch()
    warm_packing()
    warm_ragged()
    for values in (np.zeros(1, np.uint8), np.frombuffer(b"0", np.uint8)):  # payloads are read-only
        count_labels(values, np.zeros(1, np.int64), np.ones(1, np.int64))
    warm_spill()


def _warm_positions() -> None:
    whole = mrope_positions(np.array([0, 4]), [0], [0], [4], [[1, 4, 4]])
    zero = np.zeros(1, np.int64)
    copy_runs(whole, np.empty(12, np.int64), zero, zero + 4, zero, 4)


def _warm_normalizing() -> None:
    normalize_patches(np.zeros((1, 3), np.uint8), (0, 0, 0), (1, 1, 1), 1.0, np.empty((1, 3), np.float32))


def _warm_sounds() -> None:
    log_mel(np.zeros(400, np.float32), mels=8, sample_rate=16000, frames=2)


def _warm_spans() -> None:
    one = Ragged(np.zeros(1, np.int32), np.arange(2))
    encoded = TokenSpans(one, np.zeros(1, np.int32), np.ones(1, np.int32))
    loss_in_spans(encoded, Ragged(np.array([0, 1]), np.array([0, 2])), np.ones(1, np.int64))


def warm_everything(tell: Callable[[str], object] = lambda what: None) -> None:
    """Compile every kernel there is, for every type of argument that a run gives it.

    Args:
        tell: Is told what comes next; all of it takes a minute or two.
    """
    from overlord.readers.hooked.tfrecord import warm_examples  # no launch needs it

    parts: dict[str, tuple[Callable[[], None], ...]] = {
        "draw, balance and packing": (warm_common,),
        "strategies": (warm_kernels,),
        "images": (warm_images, _warm_normalizing),
        "positions, sounds and chats": (_warm_positions, _warm_sounds, _warm_spans),
        "file formats": (warm_footer, warm_pages, warm_examples),
    }
    for number, (what, warmed) in enumerate(parts.items(), 1):
        tell(f"{number} of {len(parts)}: {what}")
        for warm in warmed:
            warm()
