"""Runs a job with every rank of its mesh held by this process, and sums up what they received."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil

from overlord.cli.options import layout_advice, layout_words, resumed_words, strategy_name
from overlord.cli.output import Tell
from overlord.cli.sources import context_notes, count_indexed, isolated, open_each
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import is_whole
from overlord.errors import OverlordError, SpecError, StateError, joined
from overlord.job.layout_specs import Layout
from overlord.job.specs import Job, Source
from overlord.job_files import read_text
from overlord.launch_spec import Launch
from overlord.planning.strategies import follows_reports
from overlord.readers.index import IndexCache
from overlord.readers.remote.range_cache import range_cache
from overlord.readers.source_files import SourceFiles
from overlord.reports.collecting import Collector
from overlord.reports.live import held_up_by
from overlord.reports.summary import RunSummary, SourceSummary, media_of
from overlord.roles.client import Client
from overlord.roles.source_loader import judge_tolerance
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.runtimes.launching.deployment import check_multiples, limits_of, media_shape, try_sources
from overlord.session import Service, launch
from overlord.storage import make_private
from overlord.stores.places import open_place, store_path
from overlord.stores.store import newest_lineage
from overlord.transforms.samples.sample_kinds import make_transform

MOST_RANKS = 256
"""Ranks that one process can hold without running out of file descriptors."""
MOST_CHECKED = 64
"""Sources that the command line looks at before it starts a service, which looks at all."""
_LOOK_EVERY_S = 0.5


def run_job(job: Job, name: str, options: Launch, steps: int, tell: Tell, note: Callable[[str], None]) -> RunSummary:
    """Run some steps of a job and return what came out.

    Args:
        note: Told where the live page is, if there is one.

    Raises:
        OverlordError: as `launch` and the clients raise it; the service is closed.
    """
    if job.mixture.learn is not None and job.mixture.learn.follows_reports:
        raise SpecError(
            f"mixture.learn is {job.mixture.learn.method!r}: the weights follow the losses that a trainer reports, and "
            "`overlord run` trains nothing, so it would wait for the first report for ever. Use `overlord serve` with "
            "a trainer, or `overlord explain`, which shows the mixture that the run begins with."
        )
    if follows_reports(options.strategy):
        raise SpecError(
            "a cost function of the strategy takes the metrics that a trainer reports, and `overlord run` trains "
            "nothing, so it would wait for the first report for ever. Use `overlord serve` with a trainer, or "
            "`overlord explain`, which shows the plans that the run begins with."
        )
    began = time.perf_counter()
    aside = aside_notes(options)
    others = _descendants()
    with launch_for(job, options, tell) as service:
        if service.dashboard is not None:
            note(f"live page: {service.dashboard}")
        clients = [service.client(rank) for rank in range(options.mesh.world_size)]
        before = clients[0].state_dict()
        status = service.status()
        names = tuple(before["sources"])
        collector = Collector(job, names, limits_of(job, options.layout, options.mesh), options.mesh)
        memory = MemoryWatch(processes_of(status, _descendants() - others))
        with _first_interrupt() as interrupted:
            first_s, wall_s = _consume(service, clients, steps, collector, memory, tell, interrupted)
        after, waited = clients[0].state_dict(), {name: one["waited_s"] for name, one in status["sources"].items()}
        status = service.status()
        memory.look(now=True)
        for client in clients:
            client.close()  # orderly, so that a resume goes on behind the last step and repeats none
    facts = _Facts(steps, before, after, status, first_s - began, wall_s, memory.peak, aside, waited, interrupted())
    return _sum_up(job, name, options, collector, facts)


@contextmanager
def _first_interrupt() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end a run after the step under way, with its figures; a second one ends it at once.

    Gives a function that tells whether it came.
    """
    came = False
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True
        # Not sys.stderr: a signal may come while it is being written, and a buffer cannot be entered twice.
        os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread hears signals
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)


def aside_notes(options: Launch) -> list[str]:
    """Return a note where the store holds the snapshots of a run that this one does not go on from."""
    if options.state == "latest" or options.store is None:
        return []
    state = options.state
    begin = 0 if state is None else int(state["step"]) if isinstance(state, Mapping) else state
    if "://" not in options.store:
        _make_folder(options.store)
    found = newest_lineage(open_place(store_path(options.store), options.store_options))
    if found is None or found.newest.step <= begin:  # a snapshot of where this run begins is of this run too
        return []
    return [
        f"{options.store} holds a run up to step {found.newest.step}: it stays there as lineage {found.number}, and "
        f"this one begins another at step {begin}. To go on from it, use "
        f"--resume{'' if options.state is None else ' instead of --state'}."
    ]


def read_state(path: Path) -> Mapping[str, Any] | None:
    """Return the state in a JSON file, of a client or of a `DataLoader`; None for a stream that has not begun.

    Raises:
        SpecError: The file cannot be read, or holds no state.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "state.json"
        >>> _ = path.write_text(json.dumps({"stream": json.dumps({"version": 1, "step": 16})}))
        >>> read_state(path)
        {'version': 1, 'step': 16}
    """
    try:
        text = read_text(path)
    except SpecError as error:
        raise SpecError(f"--state {error}") from None
    try:
        found = json.loads(text)
        if isinstance(found, dict) and set(cast("dict[str, Any]", found)) == {"stream"}:
            found = json.loads(found["stream"])
            if found is None:
                return None
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"--state {path}: this is not JSON ({error}); where to go on cannot be told. Write what state_dict() of a "
            "client or a DataLoader returned with json.dump; a snapshot of a store is read by --store DIR --resume."
        ) from None
    if not isinstance(found, dict) or "version" not in found or not is_whole(found.get("step")):
        raise StateError(
            f"--state {path}: {found!r:.80} is not a state of overlord; resuming from it would start an unknown "
            "stream. Give what state_dict() of a client or a DataLoader returned, as JSON."
        )
    return cast("dict[str, Any]", found)


def check_job(
    job: Job, mesh: ClientPlaceTree, layout: Layout, cache: str, *, here: bool = True, look: bool = True
) -> None:
    """Check all that can be checked of a job before a service is started, and tell all that is wrong at once.

    Of very many sources the first are looked at; a launch looks at the others.

    Args:
        job: The job.
        mesh: The mesh it is run on.
        layout: The layout of its batches.
        cache: Folder of indices.
        here: Whether all ranks are held by this process.
        look: Whether this host can see the sources; else only the hosts of a cluster can.

    Raises:
        SpecError: a line for each mistake.
    """
    problems: list[OverlordError] = []

    def attempt(check: Callable[[], object]) -> None:
        try:
            check()
        except SpecError as error:
            problems.append(error)

    if here:
        attempt(lambda: _check_ranks(mesh))
    attempt(lambda: check_multiples(job, layout, mesh))
    attempt(lambda: media_shape(job))
    sources = job.sources[:MOST_CHECKED] if look else ()
    try:
        opened = open_each(job, sources, Path(cache), None)
        problems += [one.error for one in opened if one.error is not None]
    except SpecError as error:  # of the tokenizer, without which only the files can be looked at
        problems.append(error)
        for source in sources:
            attempt(lambda source=source: _list_source(source, cache))  # type: ignore[misc]
    if problems:
        raise joined(problems)


def _list_source(source: Source, cache: str) -> None:
    """Check the files of a source whose tokenizer cannot be loaded; its columns too, if it needs none."""
    index = IndexCache(Path(cache) / "index", ranges=range_cache(Path(cache)))
    try:
        transform = make_transform(source, None)
    except SpecError:
        try:
            SourceFiles(
                source.name,
                source.path,
                cache=index,
                format=source.format,
                columns=[],
                config=source.config,
                split=source.split,
                storage_options=source.storage_options,
                max_row_bytes=source.max_row_bytes,
                isolate=isolated(),
            )
        except SpecError as error:
            raise type(error)(f"source {source.name!r}: {error}") from error
    else:
        [found] = try_sources([source], [transform], index, SerialWorkers(), isolate=isolated())
        if isinstance(found, OverlordError):
            raise found


def _check_ranks(mesh: ClientPlaceTree) -> None:
    ranks = mesh.world_size
    if ranks > MOST_RANKS:
        raise SpecError(
            f"mesh {mesh} has {ranks} ranks; this command holds all of them in one process, which would run "
            f"out of file descriptors beyond {MOST_RANKS}. Use a smaller mesh: shares and digests of the order stay "
            "the same."
        )


def launch_for(job: Job, options: Launch, tell: Tell, *, any_mesh: bool = False) -> Service:
    """Launch the service of a job; `any_mesh` when its ranks live in other processes."""
    if not any_mesh:
        _check_ranks(options.mesh)
    if options.store is not None and "://" not in options.store:
        _make_folder(options.store)
    given = {name: getattr(options, name) for name in Launch.known_keys()} | {"progress": tell}
    if options.runtime == "ray" and options.ranks_per_host is None and not any_mesh:
        given["ranks_per_host"] = options.mesh.world_size  # all of them are in this process
    return launch(job, **given)


def with_state(options: Launch, resume: bool, state: Path | None) -> Launch:
    """Return the options with where to go on, as --resume and --state say it.

    Raises:
        SpecError: They do not go together, or the state cannot be read.
    """
    if resume and options.store is None:
        raise SpecError(
            "--resume was given without a store; there is no snapshot to continue from. Add --store DIR, or "
            "launch.store to the job file."
        )
    if resume and state is not None:
        raise SpecError(
            "--resume and --state were both given; the newest snapshot of the store may be ahead of the model's "
            "checkpoint. Give --state to go on where the checkpoint is, or --resume to go on where the store is."
        )
    if state is None:
        return options.model_copy(update={"state": "latest"}) if resume else options
    found = int(str(state)) if str(state).isdecimal() else read_state(state)
    return options.model_copy(update={"state": found})


def _make_folder(store: str) -> None:
    try:
        make_private(Path(store))
    except OSError as error:
        raise SpecError(
            f"store {store!r}: the folder cannot be made ({error.strerror}); the run could not be resumed. Name "
            "another folder."
        ) from error


def processes_of(status: Mapping[str, Any], started: set[int]) -> set[int]:
    """Return the processes of this host that a run consists of.

    Args:
        status: Of the service.
        started: Processes that came while it was launched: those of a cluster that belongs to it, among others.
    """
    cluster = status.get("ray")
    if cluster is None:
        return {os.getpid(), int(status["pid"])}
    here = socket.gethostname()
    return {os.getpid(), *started, *(int(one["pid"]) for one in cluster["placement"] if one["host"] == here)}


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


class MemoryWatch:
    """The largest sum of the proportional set sizes of some processes that was seen."""

    def __init__(self, pids: set[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        self._next_s = 0.0
        self.peak = 0

    def look(self, *, now: bool = False) -> None:
        """Measure, if it is time to: each look costs some milliseconds."""
        if not now and time.perf_counter() < self._next_s:
            return
        self._next_s = time.perf_counter() + _LOOK_EVERY_S
        total = 0
        for process in tuple(self._processes):
            try:
                total += _proportional(process)
            except psutil.Error:
                self._processes.remove(process)  # it is gone; the clients that wait for its data get the reason
        self.peak = max(self.peak, total)


def _proportional(process: psutil.Process) -> int:
    # Only Linux shares out shared pages; elsewhere they are counted in every process.
    return int(getattr(process.memory_full_info(), "pss", 0) or process.memory_info().rss)


def _consume(
    service: Service,
    clients: list[Client],
    steps: int,
    collector: Collector,
    memory: MemoryWatch,
    tell: Tell,
    interrupted: Callable[[], bool],
) -> tuple[float, float]:
    """Let every rank hold every microbatch; return when the first step was complete, and the seconds of all."""
    tell("first step", 0, 1)  # the first one of an installation compiles, which takes some seconds
    began = first_s = time.perf_counter()
    for number in range(steps):
        if interrupted():
            break
        longest_s, index = 0.0, 0
        for client in clients:
            asked = time.perf_counter()
            step = next(client, None)
            if step is None:
                return first_s, time.perf_counter() - began
            index = step.index
            for microbatches in step.fetched.values() or [step.microbatches]:
                for _ in microbatches:
                    pass  # a rank may have fewer than another, or empty ones that it gets by broadcast
            longest_s = max(longest_s, time.perf_counter() - asked)
        if number == 0:
            first_s = time.perf_counter()
        plan = service.plan_raw(index)
        assert plan is not None  # every mesh has at least one rank, which has just received it
        collector.add(plan, longest_s)
        memory.look()
        tell("steps", number + 1, steps)
    return first_s, time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class _Facts:
    steps: int
    """Steps that were asked for."""
    before: dict[str, Any]
    after: dict[str, Any]
    status: dict[str, Any]
    startup_s: float
    wall_s: float
    peak_memory: int
    aside: list[str]
    waited: Mapping[str, float]
    """Seconds that each source was waited for before the first step was asked for."""
    interrupted: bool = False


def _sum_up(job: Job, name: str, options: Launch, collector: Collector, facts: _Facts) -> RunSummary:
    every, per_step, planned, realised = collector.per_step()
    samples, tokens = int(collector.samples.sum()), int(collector.tokens.sum())
    wall_s = max(facts.wall_s, 1e-9)
    ours, theirs = collector.imbalance
    sources = _sources(job, options, collector, facts)
    return RunSummary(
        job_name=name,
        mesh=str(options.mesh),
        runtime=options.runtime,
        strategy=strategy_name(options),
        layout=layout_words(options.layout),
        steps=collector.steps,
        wall_s=facts.wall_s,
        startup_s=facts.startup_s,
        samples=samples,
        tokens=tokens,
        samples_per_s=samples / wall_s,
        tokens_per_s=tokens / wall_s,
        padding=1 - tokens / collector.positions if collector.positions else 0.0,
        imbalance_planned=ours,
        imbalance_round_robin=theirs,
        peak_memory_bytes=facts.peak_memory,
        sources=sources,
        per_step=per_step,
        steps_per_point=every,
        mixture_level=job.mixture.level,
        weights_per_step=planned,
        realised_per_step=realised,
        length_histogram=collector.histogram,
        load_heatmap=collector.typical_load(),
        digests=collector.digests,
        notes=_notes(options, collector, facts) + _shape_notes(job, options, collector, facts, sources),
        media=media_of(facts.status["sources"]),
        bottleneck=held_up_by(facts.status),
        interrupted=facts.interrupted,
        over_tolerance=_over_tolerance(job, facts.status["sources"]),
    )


def _over_tolerance(job: Job, statuses: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with sources that had more bad samples than they may have, over the whole run."""
    errors = [
        judge_tolerance(source, one["rows_read"], one["bad"], one["wrong_length"], at_end=True)
        for source in job.sources
        if (one := statuses.get(source.name)) is not None
    ]
    return [str(error) for error in errors if error is not None]


def _notes(options: Launch, collector: Collector, facts: _Facts) -> list[str]:
    notes = list(facts.aside)
    if options.state is not None:
        whence = f"the newest snapshot in {options.store}" if options.state == "latest" else "the state --state gave"
        notes.append(f"Resumed from {whence}: {resumed_words(facts.before['step'])}.")
    elsewhere = [o for o in facts.status.get("ray", {}).get("placement", ()) if o["host"] != socket.gethostname()]
    if elsewhere:
        hosts = ", ".join(sorted({one["host"] for one in elsewhere}))
        notes.append(f"The peak memory is that of this host; of the service's roles {len(elsewhere)} ran on {hosts}.")
    if facts.interrupted:
        notes.append(f"Interrupted after {collector.steps} of {facts.steps} steps; the figures are of these.")
    elif collector.steps < facts.steps:
        notes.append(f"The stream ended by itself after {collector.steps} of {facts.steps} steps.")
    faults = {name: (s["bad"], s["wrong_length"]) for name, s in facts.status["sources"].items()}
    for name, (bad, wrong) in faults.items():
        if bad:
            replaced = (
                "sample was replaced by a masked stand-in" if bad == 1 else "samples were replaced by masked stand-ins"
            )
            ids = facts.status["sources"][name]["bad_rows"]
            shown = ", ".join(ids[:3]) + (", ..." if bad > 3 else "")
            notes.append(f"{name}: {bad} bad {replaced} ({shown}); OVERLORD_LOG=INFO logs the reason of each.")
        if wrong:
            notes.append(f"{name}: {wrong} samples were cut or padded, since their length column was wrong.")
    return notes


def _shape_notes(
    job: Job, options: Launch, collector: Collector, facts: _Facts, sources: list[SourceSummary]
) -> list[str]:
    """Say what the context cuts and drops, and where rows waste room."""
    share = collector.full / np.maximum(collector.samples, 1)
    full = dict(zip(facts.after["sources"], share.tolist(), strict=True))
    dropped = {source.name: source.dropped for source in sources}
    at = facts.after["columns"].index("samples")  # rows; the collector counts pieces of them
    drawn = {name: row[at] - facts.before["sources"][name][at] for name, row in facts.after["sources"].items()}
    passed = {name: drawn[name] + count for name, count in dropped.items()}
    return context_notes(job, Path(options.cache), full, dropped, passed) + layout_advice(job, options.layout)


def _sources(job: Job, options: Launch, collector: Collector, facts: _Facts) -> list[SourceSummary]:
    before, after = (
        {name: dict(zip(state["columns"], row, strict=True)) for name, row in state["sources"].items()}
        for state in (facts.before, facts.after)
    )
    rows = _epoch_rows(job, options, {name: row["epoch_rows"] for name, row in after.items()})
    found: dict[str, SourceSummary] = {}
    for number, name in enumerate(after):
        drawn, skipped = (after[name][c] - before[name][c] for c in ("samples", "skipped"))
        found[name] = SourceSummary(
            name=name,
            format=facts.status["sources"][name]["format"],
            planned_share=collector.planned[number],
            realised_share=collector.realised[number],
            samples=int(collector.samples[number]),
            tokens=int(collector.tokens[number]),
            epochs=(drawn + skipped) / rows[name] if rows.get(name) else None,
            bad=facts.status["sources"][name]["bad"],
            dropped=skipped,
            waited_s=max(facts.status["sources"][name]["waited_s"] - facts.waited.get(name, 0.0), 0.0),
        )
    return [found[source.name] for source in job.sources]


def _epoch_rows(job: Job, options: Launch, counted: dict[str, int]) -> dict[str, float]:
    """Return the rows of each source: counted in a whole epoch, or by the indices that the run left behind."""
    rows: dict[str, float] = {name: float(count) for name, count in counted.items() if count}
    rest = [source for source in job.sources if source.name not in rows]
    for one in open_each(job, rest, Path(options.cache), None):
        known = count_indexed(one.files)[0] if one.files is not None else None
        if known is not None:
            rows[one.source.name] = known
    return rows
