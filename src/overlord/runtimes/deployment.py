"""From a job and a mesh to wired roles: which there are, and who asks whom. Runtime-agnostic."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from overlord.core.messages import LoaderOrder, MetaDelta, MetaRequest, Payload
from overlord.core.order import DataFile, SourceOrder
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.ragged import Ragged, RowBatch
from overlord.core.samples import FILE_SHIFT, SampleId
from overlord.core.specs import ImageText, Job, Source, stream_parts
from overlord.core.states import StreamState
from overlord.errors import SourceError, SpecError
from overlord.planning.strategies import Limits, greedy_balance
from overlord.readers.index import IndexCache
from overlord.readers.sidecars import LengthSidecars
from overlord.readers.source_files import SourceFiles
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.planner import Planner
from overlord.roles.ports import Collect
from overlord.roles.source_loader import Lengths, SourceLoader, Staged
from overlord.stores.checkpoints import CheckpointFolder
from overlord.stores.journal import Journal, set_aside
from overlord.transforms.per_sample import SampleTransform, Workers, make_transform
from overlord.transforms.tokenize import TextTokenizer

logger = logging.getLogger("overlord")

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, of how much)."""


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


class SerialWorkers:
    """Does everything in the caller, one after the other."""

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item."""
        return [function(item) for item in items]


class ThreadWorkers:
    """Does leaf work on a few threads; decoders and tokenizers let go of the interpreter while they work."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def map(self, function: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """Apply the function to every item; results in order."""
        return list(self._pool.map(function, items))

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


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
    journal: Journal
    listings: Mapping[str, SourceFiles]
    close: Callable[[], None] = field(repr=False)


class LoaderFleet:
    """All SourceLoaders of a host; a group belongs to one loader of its source."""

    def __init__(self, loaders: Sequence[Sequence[SourceLoader]], workers: Workers) -> None:
        self._loaders = loaders
        self._locks = [[threading.Lock() for _ in of_source] for of_source in loaders]
        self._workers = workers

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Ask the loader that owns each request's group."""

        def ask(request: MetaRequest) -> MetaDelta:
            owner = self._owner(request.source, request.cursor.group)
            with self._locks[request.source][owner]:
                return self._loaders[request.source][owner].summary_buffer(request)

        return self._workers.map(ask, requests)

    def loader_do_plan(self, orders: Sequence[LoaderOrder]) -> Collect:
        """Split orders by the owner of each group, pop now, and join what is finished when collected."""
        runs = [run for order in orders for run in self._runs(order)]

        def pop(run: tuple[int, LoaderOrder]) -> Staged:
            owner, order = run
            with self._locks[order.source][owner]:
                return self._loaders[order.source][owner].loader_do_plan(order)

        def finish(run: tuple[int, Staged]) -> Payload:
            owner, staged = run
            loader = self._loaders[staged.order.source][owner]
            done = loader.finish(staged)
            with self._locks[staged.order.source][owner]:
                return loader.hand_over(staged, done)

        staged = self._workers.map(pop, runs)

        def collect() -> list[Payload]:
            done = self._workers.map(finish, [(owner, one) for (owner, _), one in zip(runs, staged, strict=True)])
            of_source: dict[int, list[Payload]] = {order.source: [] for order in orders}
            for payload in done:
                of_source[payload.source].append(payload)
            return [join_runs(parts) for parts in of_source.values()]

        return collect

    @property
    def buffer_bytes(self) -> int:
        """Bytes in the read buffers of all loaders."""
        return sum(one.buffer_bytes for of_source in self._loaders for one in of_source)

    def status(self) -> list[dict[str, int]]:
        """Return what each source's loaders hold and have met."""
        return [
            {
                "loaders": len(of_source),
                "buffer_bytes": sum(one.buffer_bytes for one in of_source),
                "bad": sum(one.bad_samples for one in of_source),
                "wrong_length": sum(one.wrong_lengths for one in of_source),
            }
            for of_source in self._loaders
        ]

    def _owner(self, source: int, group: int) -> int:
        return max(group, 0) % len(self._loaders[source])

    def _runs(self, order: LoaderOrder) -> list[tuple[int, LoaderOrder]]:
        count = len(self._loaders[order.source])
        owners = np.maximum(order.meta["group"], 0) % count
        bounds = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
        return [
            (int(owners[a]), LoaderOrder(order.step, order.source, order.meta[a:b], order.end))
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]


def join_runs(parts: Sequence[Payload]) -> Payload:
    """Join the payloads of one source and step that came from several loaders."""
    if len(parts) == 1:
        return parts[0]
    patches = [p.patches for p in parts if p.patches is not None]
    grids = [p.grids for p in parts if p.grids is not None]
    return Payload(
        step=parts[0].step,
        source=parts[0].source,
        tokens=Ragged.concat([p.tokens for p in parts]),
        loss=Ragged.concat([p.loss for p in parts]),
        patches=Ragged.concat(patches) if patches else None,
        grids=np.concatenate(grids) if grids else None,
        bad=np.concatenate([p.bad for p in parts]),
    )


def deploy(
    job: Job, options: LaunchOptions, store: Path, callers: Workers, workers: Workers, progress: Progress | None = None
) -> Roles:
    """Open the sources, check everything that can be checked, and wire the roles.

    Args:
        job: The job.
        options: The launch.
        store: Folder of the journal and snapshots.
        callers: Runs calls to loaders side by side (they wait for I/O).
        workers: Runs leaf work (decoding).
        progress: Told how far the opening is.
    """
    job = canonical(job)
    tokenizer = TextTokenizer(job.tokenizer) if job.tokenizer else None
    check_launch(job, options)
    transforms = [make_transform(source, tokenizer) for source in job.sources]
    cache = IndexCache(Path(options.cache) / "index")
    files = open_sources(job.sources, transforms, cache, callers, progress)
    listings = {s.name: f for s, f in zip(job.sources, files, strict=True)}
    parts = stream_parts(
        job,
        tokenizer_digest=tokenizer.digest if tokenizer else "",
        listings={name: f.listing_digest() for name, f in listings.items()},
    )
    names = [s.name for s in job.sources]
    state = StreamState.begin(len(names))
    reports: dict[int, Any] = {}
    if options.state is not None:
        state = StreamState.from_json(options.state, names, parts)
        reports = {int(k): v for k, v in options.state["reports"].items()}
    sidecars = LengthSidecars(Path(options.cache) / "lengths")
    digest = tokenizer.digest if tokenizer else ""
    loaders = [
        [
            SourceLoader(
                number,
                source,
                opened,
                order_of(job, source, opened),
                transform,
                context_length=job.batch.context_length,
                overlength=job.overlength,
                lengths=known_lengths(source, opened, sidecars, digest),
                workers=workers,
                telemetry=FaultLog(),
            )
            for _ in range(options.loaders_per_source)
        ]
        for number, (source, opened, transform) in enumerate(zip(job.sources, files, transforms, strict=True))
    ]
    weights = job.mixture.weights_at(float(state.step), names, base_weights(job, listings))
    index_first_windows(job, files, state, weights, callers, progress)
    fleet = LoaderFleet(loaders, callers)
    limits = limits_of(job, options.mesh)
    checkpoints = CheckpointFolder(store)
    checkpoints.set_aside(state.step)
    set_aside(store / "journal", state.step)
    journal = Journal(store / "journal")
    planner = Planner(
        job,
        fleet,
        lambda draw: greedy_balance(draw, limits),
        state=state,
        reports=reports,
        parts=parts,
        base_weights=base_weights(job, listings),
        journal=journal,
        checkpoints=checkpoints,
    )
    constructor = DataConstructor(options.mesh, fleet, patch_bytes=patch_bytes(job))
    return Roles(job, options.mesh, planner, constructor, fleet, journal, listings, journal.close)


def canonical(job: Job) -> Job:
    """Return the job with its sources by name: the order they are written in must not matter."""
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
    multiple = pad_multiple(options.mesh)
    for name, value in (
        ("context_length", job.batch.context_length),
        ("microbatch_tokens", job.batch.microbatch_cap),
    ):
        if value % multiple:
            raise SpecError(
                f"batch.{name} is {value}, which is not a multiple of {multiple} (2 x cp={options.mesh.cp}): "
                "context-parallel ranks could not share a full sequence evenly. Round it to a multiple."
            )
    patches = {(s.sample.patch) for s in job.sources if isinstance(s.sample, ImageText)}
    if len(patches) > 1:
        raise SpecError(
            f"sources use image patches of {sorted(patches)} pixels; one batch holds one patch size. Use one."
        )


def limits_of(job: Job, tree: ClientPlaceTree) -> Limits:
    """Return what plans of this job must respect on this mesh."""
    return Limits(
        num_buckets=tree.dp,
        context_length=job.batch.context_length,
        microbatch_tokens=job.batch.microbatch_cap,
        microbatches=job.batch.microbatches,
        pad_multiple=pad_multiple(tree),
    )


def pad_multiple(tree: ClientPlaceTree) -> int:
    """Return what every piece's length is rounded up to: zigzag slices need two chunks a rank."""
    return 2 * tree.cp if tree.cp > 1 else 1


def patch_bytes(job: Job) -> int:
    """Return the bytes of one image patch, or 0 for a job without images."""
    return max((3 * s.sample.patch**2 for s in job.sources if isinstance(s.sample, ImageText)), default=0)


def open_sources(
    sources: Sequence[Source],
    transforms: Sequence[SampleTransform],
    cache: IndexCache,
    workers: Workers,
    progress: Progress | None,
) -> list[SourceFiles]:
    """List the files of every source and check that the columns exist."""
    done = 0

    def open_one(item: tuple[Source, SampleTransform]) -> SourceFiles:
        nonlocal done
        source, transform = item
        extra = (source.lengths,) if source.lengths not in (None, "sidecar") else ()
        columns = tuple(dict.fromkeys((*transform.columns, *extra)))
        opened = SourceFiles(
            source.name,
            source.path,
            format=source.format,
            columns=columns or None,
            storage_options=source.storage_options,
            cache=cache,
        )
        opened.kinds()  # a missing column shows here, before anything runs
        done += 1
        if progress is not None:
            progress("opening sources", done, len(sources))
        return opened

    return workers.map(open_one, list(zip(sources, transforms, strict=True)))


def order_of(job: Job, source: Source, files: SourceFiles) -> SourceOrder:
    """Return the order of one source."""
    return SourceOrder(
        job.seed,
        source.name,
        listing_of(files),
        shuffle_bytes=source.shuffle_bytes,
        index=files.blocks,
        prepare=files.prepare,
    )


def index_first_windows(
    job: Job,
    files: Sequence[SourceFiles],
    state: StreamState,
    weights: Sequence[float],
    workers: Workers,
    progress: Progress | None,
) -> None:
    """Index the files that the first step reaches, side by side; the rest is indexed when it is reached."""
    tasks: list[tuple[SourceFiles, int]] = []
    for number, (source, opened) in enumerate(zip(job.sources, files, strict=True)):
        if weights[number] > 0:
            order = order_of(job, source, opened)
            epoch, group, _ = state.cursor(number)
            tasks += [(opened, int(file)) for file in order.files_of(epoch, max(group, 0))]
    done = 0

    def index_one(task: tuple[SourceFiles, int]) -> None:
        nonlocal done
        task[0].blocks(task[1])
        done += 1
        if progress is not None:
            progress("indexing files", done, len(tasks))

    workers.map(index_one, tasks)


def listing_of(files: SourceFiles) -> list[DataFile]:
    """Return what the order may know of a source's files before they are opened."""
    return [DataFile(file.path, file.size) for file in files.files]


def base_weights(job: Job, listings: Mapping[str, SourceFiles]) -> dict[str, float]:
    """Return the weights that stand beside the sources; by size where a temperature asks for it."""
    given = {s.name: s.weight for s in job.sources if s.weight is not None}
    if given:
        return {s.name: given.get(s.name, 0.0) for s in job.sources}
    if job.mixture.temperature is not None:
        return {name: float(files.total_bytes) for name, files in listings.items()}
    return {s.name: 1.0 for s in job.sources}


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
