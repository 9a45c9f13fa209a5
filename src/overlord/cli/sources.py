"""Opens the sources of a job one by one: what they hold, how many rows they have, and their length sidecars."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text as Words

from overlord.cli.output import Tell, current_command
from overlord.core.spec_errors import did_you_mean, list_some
from overlord.errors import SpecError
from overlord.job.specs import Audio, Chat, Custom, ImageText, Interleaved, Job, Source, Text, Video
from overlord.readers.index import IndexCache
from overlord.readers.source_files import LengthSidecars, SourceFiles
from overlord.reports.summary import number, size
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.runtimes.launching.deployment import IsolateReader, open_sources
from overlord.runtimes.supervision.reader_processes import ReaderProcesses
from overlord.transforms.samples.per_sample import SampleTransform, no_seeds
from overlord.transforms.samples.sample_kinds import make_transform, reserve_placeholders
from overlord.transforms.samples.tokenize import TextTokenizer

LISTING_THREADS = 16
"""Opening a source mostly waits for storage."""
MEASURE_ROWS = 256
INDEX_ARRAYS = 5
"""Numbers that an index holds of each block: rows, bytes, where it starts and stops, its first row."""

_readers: ReaderProcesses | None = None
"""The reader processes of the command under way, once it has needed some."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opened:
    """The files of a source, and what makes samples of their rows."""

    source: Source
    files: SourceFiles
    transform: SampleTransform
    tokenizer: TextTokenizer | None
    context_length: int
    overlength: str


@dataclass(frozen=True, slots=True)
class OpenSource:
    """A source and its files, or why they cannot be had."""

    source: Source
    opened: Opened | None
    error: SpecError | None = None

    @property
    def files(self) -> SourceFiles | None:
        """Its files, if they can be had."""
        return None if self.opened is None else self.opened.files

    def open_or_raise(self) -> Opened:
        """Return the opened source.

        Raises:
            SpecError: It could not be opened; the message says why.
        """
        if self.opened is None:
            assert self.error is not None
            raise self.error
        return self.opened


def load_tokenizer(job: Job) -> TextTokenizer | None:
    """Return the tokenizer of a job, if it has one, as a run uses it."""
    if not job.tokenizer:
        return None
    tokenizer = TextTokenizer(job.tokenizer)
    reserve_placeholders(job, tokenizer)
    return tokenizer


def isolated() -> IsolateReader | None:
    """Return what reads Parquet and Arrow files in other processes: a damaged file must not end the command under way.

    The processes end with the command. Call it in the thread that runs the command; outside of one it is None.
    """
    global _readers
    ends = current_command()
    if ends is None:
        return None
    if _readers is None:
        _readers = ReaderProcesses(cores())
        ends.callback(_end_readers)
    return _readers.isolate


def _end_readers() -> None:
    global _readers
    readers, _readers = _readers, None
    if readers is not None:
        readers.close()


def open_each(job: Job, sources: Sequence[Source], cache: Path, tell: Tell | None) -> list[OpenSource]:
    """Open some sources of a job; the fault of one does not keep the others from being opened."""
    if not sources:
        return []
    tokenizer, isolate = load_tokenizer(job), isolated()
    index = IndexCache(cache / "index")

    def open_one(source: Source) -> OpenSource:
        try:
            transform = make_transform(source, tokenizer)
            files = open_sources([source], [transform], index, SerialWorkers(), None, isolate)[0]
            opened = Opened(source, files, transform, tokenizer, job.batch.context_length, job.overlength)
            return OpenSource(source, opened)
        except SpecError as error:
            return OpenSource(source, None, _naming(source, error))

    return side_by_side(open_one, sources, LISTING_THREADS, counter(tell, "opening sources", len(sources)))


def _naming(source: Source, error: SpecError) -> SpecError:
    """Return the error with the source in front: a path alone is hard to find among hundreds of sources."""
    start = f"source {source.name!r}: "
    return error if str(error).startswith(start) else type(error)(start + str(error))


def choose_sources(job: Job, names: Sequence[str]) -> list[Source]:
    """Return the named sources, or all if none is named.

    Raises:
        SpecError: A name is not in the job.
    """
    by_name = {source.name: source for source in job.sources}
    for name in names:
        if name not in by_name:
            raise SpecError(
                f"source {name!r} is not in the job; there is nothing to look at.{did_you_mean(name, by_name)} "
                f"Sources: {list_some(list(by_name))}."
            )
    return [by_name[name] for name in dict.fromkeys(names)] or list(job.sources)


def side_by_side(
    function: Callable[[Any], T], items: Iterable[Any], threads: int, did: Callable[[int], None]
) -> list[T]:
    """Apply a function on a few threads, results in order; Ctrl-C and errors do not wait for what is left."""

    def one(item: Any) -> T:
        result = function(item)
        did(1)
        return result

    pool = ThreadPoolExecutor(threads, thread_name_prefix="overlord-cli")
    try:
        return list(pool.map(one, items))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def counter(tell: Tell | None, what: str, of: int) -> Callable[[int], None]:
    """Return a function that adds to a count of things done and tells it; threads may share it."""
    lock, done = threading.Lock(), 0

    def did(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            now = done
        if tell is not None:
            tell(what, now, of)

    return did


def cores() -> int:
    """Return how many threads of heavy work this host is good for."""
    return os.cpu_count() or 1


def indexed_rows(files: SourceFiles) -> float | None:
    """Return the rows of a source as far as its files are indexed, scaled up by bytes; None if none is."""
    return count_indexed(files)[0]


def count_indexed(files: SourceFiles) -> tuple[float | None, bool, int]:
    """Return the rows of a source (None if none of its files is indexed), whether all are, and the index's bytes."""
    found = [(files.indexed(number), file.size) for number, file in enumerate(files.files)]
    known = [(blocks, size) for blocks, size in found if blocks is not None]
    index_bytes = sum(INDEX_ARRAYS * blocks.rows.nbytes for blocks, _ in known)
    if not known:
        return None, False, index_bytes
    rows, size = sum(int(blocks.rows.sum()) for blocks, _ in known), sum(size for _, size in known)
    exact = len(known) == len(found)
    return float(rows) if exact else rows * files.total_bytes / max(size, 1), exact, index_bytes


def count_rows(opened: Sequence[OpenSource], tell: Tell) -> None:
    """Index every file of the sources that could be opened, in parallel; faults show up when rows are asked for."""
    files = [(one.files, n) for one in opened if one.files is not None for n in range(len(one.files.files))]

    def index(item: tuple[SourceFiles, int]) -> None:
        try:
            item[0].blocks(item[1])
        except SpecError:
            pass  # the row count of its source stays unknown, which is what the table shows; lint says why

    side_by_side(index, files, LISTING_THREADS, counter(tell, "indexing files", len(files)))


def describe_source(one: OpenSource) -> dict[str, Any]:
    """Return what a listing shows of a source, JSON-able."""
    kind = type(one.source.sample).__name__
    if one.files is None:
        return {"name": one.source.name, "sample": kind, "path": list(one.source.path), "error": str(one.error)}
    indexed = [one.files.indexed(number) for number in range(len(one.files.files))]
    rows = [int(blocks.rows.sum()) for blocks in indexed if blocks is not None]
    return {
        "name": one.source.name,
        "sample": kind,
        "path": list(one.source.path),
        "format": one.files.format,
        "files": len(one.files.files),
        "bytes": one.files.total_bytes,
        "rows": sum(rows) if len(rows) == len(indexed) else None,
        "indexed_files": len(rows),
        "error": None,
    }


def source_listing(job_name: str, found: Sequence[Mapping[str, Any]]) -> Table:
    """Return what `describe_source` tells of each source, for the terminal."""
    table = Table(
        "source", "sample", "format", title=f"{number(len(found), 'source')} of {job_name}", title_justify="left"
    )
    for name in ("files", "bytes", "rows"):
        table.add_column(name, justify="right")
    for one in found:
        if one["error"] is not None:
            table.add_row(Words(one["name"]), one["sample"], Words("error", style="red"), "", "", "")
            continue
        rows = "?" if one["rows"] is None else f"{one['rows']:,}"
        cells = (one["sample"], one["format"], f"{one['files']:,}", size(one["bytes"]), rows)
        table.add_row(Words(one["name"]), *cells)
    return table


def sources_to_measure(job: Job, names: Sequence[str]) -> list[Source]:
    """Return the sources whose sidecars are to be written: the named ones, or all with lengths="sidecar".

    Raises:
        SpecError: There is nothing to measure, or a named source cannot be measured.
    """
    chosen = choose_sources(job, names) if names else [s for s in job.sources if s.lengths == "sidecar"]
    if not chosen:
        raise SpecError(
            "no source has lengths: sidecar, so the sidecars would not be used. Set it in the job file for sources "
            "whose text is slow to tokenize, or name the sources to measure."
        )
    for source in chosen:
        if (why := own_lengths(source)) is not None:
            raise SpecError(
                f"source {source.name!r}: {why}; a sidecar would never be read. Leave this source out"
                f"{', and its lengths too.' if source.lengths else '.'}"
            )
    return chosen


def own_lengths(source: Source) -> str | None:
    """Return why nobody else can know the lengths of a source's samples; None where a column or a sidecar can."""
    sample = source.sample
    if isinstance(sample, Custom):
        return "it has a custom sample, whose function decides its own lengths"
    if isinstance(sample, Chat):
        return "its samples are chats: which tokens count in the loss is known only once they are rendered"
    if isinstance(sample, Interleaved):
        return "its samples are interleaved: where their images stand is known only once all text is tokenized"
    return None


def measure_sources(job: Job, sources: Sequence[Source], cache: Path, tell: Tell) -> dict[str, dict[str, int]]:
    """Count the text tokens of every row and write the sidecars; return rows, tokens and bad rows of each source.

    Raises:
        OverlordError: A file cannot be read. Sidecars of other files stay.
    """
    tokenizer = load_tokenizer(job)
    digest = tokenizer.digest if tokenizer else ""
    sidecars = LengthSidecars(cache / "lengths")
    plain = [_text_only(source) for source in sources]
    opened = open_each(job, plain, cache, tell)
    tasks = [(i, one.open_or_raise()) for i, one in enumerate(opened)]
    files = [(i, one, n) for i, one in tasks for n in range(len(one.files.files))]
    count_rows(opened, tell)
    rows = sum(int(one.files.blocks(number).rows.sum()) for _, one, number in files)
    did = counter(tell, "measuring rows", rows)
    totals = {source.name: {"files": 0, "rows": 0, "tokens": 0, "bad": 0} for source in sources}

    def measure(task: tuple[int, Opened, int]) -> tuple[str, int, int, int]:
        index, one, number = task
        lengths, bad = _file_lengths(one.files, number, one.transform, did)
        sidecars.write(sources[index], one.files, number, digest, lengths)
        return sources[index].name, len(lengths), int(lengths.sum()), bad

    for name, num_rows, tokens, bad in side_by_side(measure, files, cores(), lambda _: None):
        for key, more in (("files", 1), ("rows", num_rows), ("tokens", tokens), ("bad", bad)):
            totals[name][key] += more
    return totals


def _text_only(source: Source) -> Source:
    """Return a source that reads the text of its samples: sidecars count text, headers tell the tokens of media."""
    if isinstance(source.sample, ImageText | Audio | Video):
        return source.replace(sample=Text(source.sample.text), lengths=None)
    return source.replace(lengths=None)


def _file_lengths(
    files: SourceFiles, number: int, transform: SampleTransform, did: Callable[[int], None]
) -> tuple[npt.NDArray[np.int32], int]:
    parts: list[npt.NDArray[Any]] = [np.empty(0, np.int32)]
    bad = 0
    for block in range(len(files.blocks(number).rows)):
        for rows in files.stream(number, block, batch_rows=MEASURE_ROWS):
            measured = transform.measure(rows, None, no_seeds(rows))
            parts.append(measured.tokens)
            bad += len({row for row, _ in measured.faults})
            did(len(measured.tokens))
    return np.concatenate(parts).astype(np.int32), bad
