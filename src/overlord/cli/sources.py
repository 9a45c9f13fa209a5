"""What the sources of a job hold: files, rows, lengths, what the context leaves of samples, tokens around media."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich.table import Table

from overlord.cli.output import Tell, current_command
from overlord.core.ragged import RowBatch, num_rows, slice_rows
from overlord.core.samples import BAD, FILE_SHIFT, OVERLONG, SKIP
from overlord.core.spec_errors import did_you_mean, list_some
from overlord.errors import OverlordError, SpecError
from overlord.job.specs import (
    Audio,
    Chat,
    Custom,
    ImageChat,
    ImageSpec,
    ImageText,
    Interleaved,
    Job,
    Source,
    Text,
    Video,
    tokenizer_file,
)
from overlord.readers.index import IndexCache
from overlord.readers.remote.range_cache import range_cache
from overlord.readers.source_files import LengthSidecars, SourceFiles
from overlord.reports.pages import Row, terminal_table
from overlord.reports.summary import number, percent, size
from overlord.roles.source_loader import fit_context
from overlord.runtimes.hosts.prefetch import LOADER_THREADS, ThreadWorkers
from overlord.runtimes.launching.deployment import IsolateReader, transform_of, try_sources
from overlord.runtimes.launching.tokenizer_trial import try_tokenizer
from overlord.runtimes.supervision.child import usable_cpus
from overlord.runtimes.supervision.reader_processes import ReaderProcesses
from overlord.transforms.samples.per_sample import Measured, SampleTransform, no_seeds, ragged_column
from overlord.transforms.samples.sample_kinds import reserve_placeholders
from overlord.transforms.samples.tokenize import TextTokenizer

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

    @property
    def tokenizer_digest(self) -> str:
        """What length sidecars are kept by: the digest of its tokenizer; "" without one."""
        return self.tokenizer.digest if self.tokenizer else ""


@dataclass(frozen=True, slots=True)
class OpenSource:
    """A source and its files, or why they cannot be opened."""

    source: Source
    opened: Opened | None
    error: OverlordError | None = None

    @property
    def files(self) -> SourceFiles | None:
        """Its files, if they could be opened."""
        return None if self.opened is None else self.opened.files

    def open_or_raise(self) -> Opened:
        """Return the opened source.

        Raises:
            OverlordError: It could not be opened; the message says why.
        """
        if self.opened is None:
            assert self.error is not None
            raise self.error
        return self.opened


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
    """Open some sources of a job as a launch does; the fault of one does not keep the others from being opened."""
    if not sources:
        return []
    if job.tokenizer is not None:
        tokenizer_file(job.tokenizer)
    try_tokenizer(job, str(cache))  # before its files, and the chat templates, are used in this process
    tokenizer = TextTokenizer(job.tokenizer) if job.tokenizer else None
    if tokenizer is not None:
        reserve_placeholders(job, tokenizer)
    transforms: dict[str, SampleTransform] = {}
    found: dict[str, OpenSource] = {}
    for source in sources:
        try:
            transforms[source.name] = transform_of(source, tokenizer)
        except SpecError as error:
            found[source.name] = OpenSource(source, None, error)
    able = [source for source in sources if source.name in transforms]
    index, isolate = IndexCache(cache / "index", ranges=range_cache(cache)), isolated()
    with closing(ThreadWorkers(LOADER_THREADS, "overlord-cli")) as workers:
        tried = try_sources(able, list(transforms.values()), index, workers, tell, isolate)
    for (name, transform), source, files in zip(transforms.items(), able, tried, strict=True):
        if isinstance(files, OverlordError):
            found[name] = OpenSource(source, None, files)
            continue
        opened = Opened(source, files, transform, tokenizer, job.batch.context_length, job.overlength)
        found[name] = OpenSource(source, opened)
    return [found[source.name] for source in sources]


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

    with closing(ThreadWorkers(threads, "overlord-cli")) as workers:
        return workers.map(one, items)


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


def first_rows(files: SourceFiles, number: int, most: int, at_once: int) -> Iterator[tuple[int, RowBatch]]:
    """Yield the first rows of a file in batches, each with the number that its first row has in the source.

    Args:
        files: The source.
        number: Which of its files.
        most: Rows in all.
        at_once: Rows of a batch.
    """
    seen = 0
    for block in range(len(files.blocks(number).rows)):
        if seen >= most:
            return
        for batch in files.stream(number, block, batch_rows=min(at_once, most - seen)):
            rows = slice_rows(batch, 0, min(num_rows(batch), most - seen))
            yield (number << FILE_SHIFT) + seen, rows
            seen += num_rows(rows)
            if seen >= most:
                break


def cores() -> int:
    """Return how many threads of heavy work this host is good for."""
    return usable_cpus()


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

    side_by_side(index, files, LOADER_THREADS, counter(tell, "indexing files", len(files)))


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
    rows: list[Row] = []
    for one in found:
        cells = ["[red]error[/red]", "", "", ""]
        if one["error"] is None:
            known = "?" if one["rows"] is None else f"{one['rows']:,}"
            cells = [one["format"], f"{one['files']:,}", size(one["bytes"]), known]
        rows.append(Row(one["name"], (one["sample"], *cells)))
    heads = ("source", "sample", "format", "files", "bytes", "rows")
    return terminal_table(f"{number(len(found), 'source')} of {job_name}", heads, rows, left=("sample", "format"))


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
    """Return why only its samples tell the lengths of a source; None where a column or a sidecar can."""
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
    sidecars = LengthSidecars(cache / "lengths")
    plain = [_text_only(source) for source in sources]
    opened = open_each(job, plain, cache, tell)
    tasks = [(i, one.open_or_raise()) for i, one in enumerate(opened)]
    files = [(i, one, n) for i, one in tasks for n in range(len(one.files.files))]
    count_rows(opened, tell)
    did = counter(tell, "measuring rows", sum(int(one.files.blocks(n).rows.sum()) for _, one, n in files))
    totals = {source.name: {"files": 0, "rows": 0, "tokens": 0, "bad": 0} for source in sources}

    def measure(task: tuple[int, Opened, int]) -> tuple[str, int, int, int]:
        index, one, number = task
        lengths, bad = _file_lengths(one.files, number, one.transform, did)
        sidecars.write(sources[index], one.files, number, one.tokenizer_digest, lengths)
        return sources[index].name, len(lengths), int(lengths.sum()), bad

    for name, rows, tokens, bad in side_by_side(measure, files, cores(), lambda _: None):
        for key, more in (("files", 1), ("rows", rows), ("tokens", tokens), ("bad", bad)):
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
    for _, rows in first_rows(files, number, int(files.blocks(number).rows.sum()), MEASURE_ROWS):
        measured = transform.measure(rows, None, no_seeds(rows))
        parts.append(measured.tokens)
        bad += len({row for row, _ in measured.faults})
        did(len(measured.tokens))
    return np.concatenate(parts).astype(np.int32), bad


# --------------------------------------------------------------------------------------------------------------
# What a context leaves of a source: how many of its samples are cut or dropped, and how many tokens that loses.


_LOOKED_AT = 64
"""Rows of a file that are measured to know what a context leaves of them."""
_LOOKED_INTO = 4
"""Files that are looked into."""
_READ_BYTES = 8 << 20
"""No more than this is read of a file, so that clips cost no more than texts."""
_NAMED = 3
"""Sources that get a sentence of their own."""

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class ContextFit:
    """How the rows of a source that were looked at fit into the context."""

    rows: int = 0
    bad: int = 0
    empty: int = 0
    """Never drawn, whatever the context: nothing in them, or filtered out."""
    dropped: int = 0
    """Never drawn because of the context."""
    cut: int = 0
    refused: int = 0
    """Longer than the context under overlength="error"."""
    tokens: int = 0
    """Tokens of the rows that are drawn, before they are cut."""
    lost: int = 0
    """Of these, tokens that are cut off."""

    def add(self, measured: Measured, delivered: Int32s, flags: Int32s) -> None:
        """Count measured rows; `delivered` and `flags` are what `fit_context` returned for them."""
        bad = (measured.flags & BAD) > 0
        empty = ((measured.flags & SKIP) > 0) & ~bad
        dropped = ((flags & SKIP) > 0) & ~empty & ~bad
        drawn = ~bad & ~empty & ~dropped
        less = np.where(drawn, measured.tokens - delivered, 0)
        self.rows += len(bad)
        self.bad += int(bad.sum())
        self.empty += int(empty.sum())
        self.dropped += int(dropped.sum())
        self.cut += int((less > 0).sum())
        self.refused += int(((flags & OVERLONG) > 0).sum())
        self.tokens += int(measured.tokens[drawn].sum())
        self.lost += int(less.sum())

    @property
    def cut_share(self) -> float:
        """Share of the rows that are cut."""
        return self.cut / max(self.rows, 1)

    @property
    def dropped_share(self) -> float:
        """Share of the rows that are dropped."""
        return self.dropped / max(self.rows, 1)

    @property
    def lost_share(self) -> float:
        """Share of the tokens of drawn rows that is cut off."""
        return self.lost / max(self.tokens, 1)


def sum_fits(fits: Sequence[ContextFit]) -> ContextFit:
    """Return what several looks found together."""
    return ContextFit(*(sum(getattr(fit, one.name) for fit in fits) for one in fields(ContextFit)))


def look_at_context(one: Opened) -> ContextFit:
    """Measure some rows of a source and return how they fit; only files that are indexed already are looked into."""
    found, files = ContextFit(), one.files
    every = max(1, len(files.files) // _LOOKED_INTO)
    for file in range(0, every * _LOOKED_INTO, every):
        index = files.indexed(file) if file < len(files.files) else None
        if index is None or not index.rows.any():
            continue
        block = int(np.argmax(index.rows))
        row_bytes = max(float(index.bytes[block]) / int(index.rows[block]), 1.0)
        wanted = int(np.clip(_READ_BYTES / row_bytes, 1, _LOOKED_AT))
        for batch in files.stream(file, block, batch_rows=wanted):
            rows = slice_rows(batch, 0, min(wanted, num_rows(batch)))
            measured = one.transform.measure(rows, None, no_seeds(rows))
            found.add(measured, *fit_context(measured, one.context_length, one.overlength))
            break
    return found


def context_notes(
    job: Job, cache: Path, full: Mapping[str, float], skipped: Mapping[str, int], passed: Mapping[str, int]
) -> list[str]:
    """Say what the context cuts and drops of sources of which it may have cut or dropped something.

    Args:
        job: The job.
        cache: Folder of indices.
        full: Share of the drawn samples of each source that fill the context.
        skipped: Rows of each source that were passed over: empty, filtered out, or dropped as too long.
        passed: Rows of each source that the stream has drawn or passed over.
    """
    cuts, length = job.overlength == "truncate", job.batch.context_length
    # A cut in front of an image leaves less than the context.
    known = {s.name for s in job.sources if cuts and (full[s.name] or isinstance(s.sample, (Interleaved, ImageChat)))}
    asked = [s for s in job.sources if s.name in known or skipped[s.name]]
    # A user's function may crash, and only loaders have somewhere to run it.
    functions = [s.name for s in asked if isinstance(s.sample, Custom) and s.name in known]
    found: list[tuple[str, ContextFit]] = []
    for one in open_each(job, [s for s in asked if not isinstance(s.sample, Custom)], cache, None):
        try:
            found.append((one.source.name, look_at_context(one.open_or_raise())))
        except OverlordError:
            pass  # the loaders have reported it already; this note is optional
    words = context_words(found, length, {name: (skipped[name], passed[name]) for name, _ in found})
    for name in functions[:_NAMED]:
        words.append(f"Up to {percent(full[name])} of source {name} is cut: so many samples fill {length:,} tokens.")
    return words


def context_words(
    found: Sequence[tuple[str, ContextFit]],
    context_length: int,
    counted: Mapping[str, tuple[int, int]] | None = None,
) -> list[str]:
    """Say which sources are cut or dropped by the context, those that lose most first.

    Args:
        found: Sources, and how the rows that were looked at fit.
        context_length: Tokens of the context.
        counted: Rows that a stream has passed over, and all that it has come to: what it met itself is told before
            what a look at a few rows makes likely. Of rows that are passed over for several reasons the look tells
            how many are too long.

    Example:
        >>> context_words([("text", ContextFit(rows=100, cut=93, tokens=4000, lost=3240))], 8)[0].replace("\u202f", " ")
        '93 % of source text is cut at 8 tokens, which loses 81 % of its tokens.'
    """
    cut = sorted((one for one in found if one[1].cut), key=lambda one: -one[1].lost_share)
    gone = sorted((one for one in found if one[1].dropped), key=lambda one: -one[1].dropped_share)
    words = [
        f"{percent(fit.cut_share)} of source {name} is cut at {context_length:,} tokens, which loses "
        f"{percent(fit.lost_share)} of its tokens."
        for name, fit in cut[:_NAMED]
    ]
    words += _more(len(cut), "cut")
    for name, fit in gone[:_NAMED]:
        skipped, passed = (counted or {}).get(name, (0, 0))
        dropped = round(skipped * fit.dropped / max(fit.dropped + fit.empty, 1))
        known = f" ({dropped:,} of {passed:,} rows)" if dropped else ""
        share = dropped / passed if dropped else fit.dropped_share
        words.append(
            f"{percent(share)} of source {name}{known} is dropped, since it does not fit into {context_length:,} "
            "tokens."
        )
    return words + _more(len(gone), "dropped")


def _more(count: int, what: str) -> list[str]:
    rest = count - _NAMED
    return [f"Samples of {number(rest, 'more source')} are {what} too."] if rest > 0 else []


# --------------------------------------------------------------------------------------------------------------
# Which tokens stand for images, clips and sounds in the text, and which ones a tokenizer has to put around them.


_VISION = (("<|vision_start|>", "<|vision_end|>"), ("<|vision_bos|>", "<|vision_eos|>"))
_ALIKE = 4
"""Sources that are named where several have the same tokens."""
_SOUND = (("<|audio_bos|>", "<|audio_eos|>"), ("<|audio_start|>", "<|audio_end|>"))


def token_words(one: Opened) -> str | None:
    """Return which token stands for an image, clip or sound of a source, in words; None where it has none.

    Tokens may come from a processor folder, so that the job file alone does not tell them.
    """
    spec = one.source.sample
    if isinstance(spec, ImageSpec):
        token, what = spec.image_token, "an image"
    elif isinstance(spec, Video):
        token, what = spec.video_token, "a clip"
    elif isinstance(spec, Audio):
        token, what = spec.audio_token, "a sound"
    else:
        return None
    found = f"{_shown(one, token)} stands for {what}"
    if spec.before is not None and spec.after is not None:
        return f"{found}, between {_shown(one, spec.before)} and {_shown(one, spec.after)}"
    if spec.before is not None:
        return f"{found}, behind {_shown(one, spec.before)}"
    return found if spec.after is None else f"{found}, in front of {_shown(one, spec.after)}"


def tokens_told(opened: Sequence[Opened]) -> list[str]:
    """Return one line for all sources whose images, clips or sounds have the same tokens."""
    alike: dict[str, list[str]] = {}
    for one in opened:
        if (words := token_words(one)) is not None:
            alike.setdefault(words, []).append(one.source.name)
    return [
        f"{', '.join(names[:_ALIKE])}{f' and {len(names) - _ALIKE} more' if len(names) > _ALIKE else ''}: {words}"
        for words, names in alike.items()
    ]


def borders_left_out(one: Opened) -> tuple[str, str] | None:
    """Return the pair of tokens that the tokenizer has to stand around media, where a source uses no such tokens."""
    spec, tokenizer = one.source.sample, one.tokenizer
    if not isinstance(spec, (ImageSpec, Video, Audio)) or tokenizer is None:
        return None
    if spec.before is not None or spec.after is not None:
        return None
    pairs = _SOUND if isinstance(spec, Audio) else _VISION
    return next((pair for pair in pairs if all(tokenizer.find(token) is not None for token in pair)), None)


def has_borders(one: Opened, measured: Measured) -> bool:
    """Whether the text of measured rows itself has the tokens that `borders_left_out` names."""
    pair = borders_left_out(one)
    if pair is None or one.tokenizer is None or not isinstance(one.source.sample, (Interleaved, ImageChat)):
        return False
    return bool((ragged_column(measured.kept, "tokens").values == one.tokenizer.find(pair[0])).any())


def _shown(one: Opened, token: str | int) -> str:
    """Return a token by its text and its id, whichever of them the spec gives."""
    tokenizer = one.tokenizer
    if isinstance(token, int):
        written = "" if tokenizer is None else tokenizer.decode([token])
        return f"{written} (id {token})" if written else f"id {token}"
    found = None if tokenizer is None else tokenizer.find(token)
    return token if found is None else f"{token} (id {found})"
