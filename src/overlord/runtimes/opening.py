"""Opening sources: files listed, columns checked, the first window indexed, known lengths found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from overlord.core.order import DataFile, SourceOrder
from overlord.core.ragged import Ragged, RowBatch
from overlord.core.samples import FILE_SHIFT, Cursor
from overlord.errors import OverlordError, SourceError, SpecError, joined
from overlord.job.specs import Audio, ImageText, Job, Source, Text, Video
from overlord.readers.index import IndexCache
from overlord.readers.reader import Kind, Reader
from overlord.readers.source_files import LengthSidecars, SourceFiles
from overlord.roles.source_loader import Lengths
from overlord.transforms.samples.per_sample import SampleTransform, Workers

Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, of how much)."""


IsolateReader = Callable[[Reader], Reader]
"""Brings a reader into processes that a damaged file may end."""


def open_sources(
    sources: Sequence[Source],
    transforms: Sequence[SampleTransform],
    cache: IndexCache,
    workers: Workers,
    progress: Progress | None,
    isolate: IsolateReader | None = None,
) -> list[SourceFiles]:
    """List the files of every source and check that the columns exist.

    Raises:
        SpecError: for all sources that cannot be opened, a line for each.
    """
    done = 0
    wrong: dict[str, OverlordError] = {}

    def open_one(item: tuple[Source, SampleTransform]) -> SourceFiles | None:
        nonlocal done
        source, transform = item
        extra = (source.lengths,) if source.lengths not in (None, "sidecar") else ()
        columns = tuple(dict.fromkeys((*transform.columns, *extra)))
        try:
            opened = SourceFiles(
                source.name,
                source.path,
                format=source.format,
                columns=columns or None,
                storage_options=source.storage_options,
                cache=cache,
                isolate=isolate,
            )
            check_kinds(source, opened.kinds())  # a missing or wrong column shows here, before anything runs
        except SpecError as error:
            named = repr(source.name) in str(error)
            wrong[source.name] = error if named else type(error)(f"source {source.name!r}: {error}")
            return None
        done += 1
        if progress is not None:
            progress("opening sources", done, len(sources))
        return opened

    opened = workers.map(open_one, list(zip(sources, transforms, strict=True)))
    if wrong:
        raise joined([wrong[source.name] for source in sources if source.name in wrong])
    return opened


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
            order = order_of(job, job.sources[number], opened)
            epoch, group, _ = cursors[number]
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
