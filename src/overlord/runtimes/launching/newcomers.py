"""Sources that come while a stream runs: opened and checked first, then known to every role, then written down.

Rules of this file:
1. What is wrong with a source is said before anything has changed.
2. Its loaders and decoders are there before a plan may draw from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from overlord.core.order import BEGIN
from overlord.core.samples import Cursor
from overlord.errors import SpecError
from overlord.job.specs import Job, Source
from overlord.readers.source_files import SourceFiles
from overlord.roles.changes import source_to_json
from overlord.roles.planner import Planner
from overlord.roles.poisoned_rows import PoisonedRowLog
from overlord.runtimes.autoscaling.warming import warm_job
from overlord.runtimes.hosts.prefetch import Executors, PrefetchPool
from overlord.runtimes.launching.deployment import (
    Prepared,
    SourceFacts,
    base_weights,
    index_first_windows,
    make_crew,
    media_shape,
    open_files,
    parts_of,
    transform_of,
)
from overlord.runtimes.launching.resume import canonical
from overlord.transforms.samples.chat import inline_templates
from overlord.transforms.samples.sample_kinds import reserve_placeholders
from overlord.transforms.samples.tokenize import TextTokenizer


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A source that is open and not yet known to anybody."""

    prepared: Prepared
    """The job with it: it has the last number."""
    files: SourceFiles
    crew: PrefetchPool

    @property
    def number(self) -> int:
        """The number it will have."""
        return len(self.prepared.job.sources) - 1

    @property
    def source(self) -> Source:
        """The source, as it is read."""
        return self.prepared.job.sources[-1]


def prepare_newcomer(prepared: Prepared, source: Source) -> Prepared:
    """Return a prepared job with one more source behind the others; no file is opened.

    Raises:
        SpecError: for a source that the running job cannot take on.
    """
    source_to_json(source)
    job = prepared.job
    beside = any(one.weight is not None for one in job.sources)
    weight = (source.weight if source.weight is not None else 0.0) if beside else None
    more = _behind(job, canonical(job.replace(sources=[*job.sources, source.replace(weight=weight)])), source.name)
    tokenizer = TextTokenizer(more.tokenizer) if more.tokenizer else None
    if tokenizer is not None:
        more = inline_templates(more, tokenizer)
        reserve_placeholders(more, tokenizer)
    if media_shape(more) != media_shape(job):
        raise SpecError(
            f"add_source: {source.name!r} brings images, clips or sounds of a shape that the running job does not "
            "have; its batches would change their keys. Put it into the job, and launch it again from a state with "
            "reconcile='allow_add'."
        )
    warm_job(more, prepared.options.layout)
    transforms = [*prepared.transforms, transform_of(more.sources[-1], tokenizer, prepared.isolate)]
    return dataclasses.replace(prepared, job=more, transforms=transforms)


def without_newcomer(prepared: Prepared) -> Prepared:
    """Return a prepared job without its last source."""
    job = prepared.job.replace(sources=prepared.job.sources[:-1])
    return dataclasses.replace(prepared, job=job, transforms=prepared.transforms[:-1])


def open_newcomer(prepared: Prepared, source: Source, verdicts: PoisonedRowLog, hands: Executors) -> Newcomer:
    """Open a source: its files are listed, its columns checked, its first files indexed.

    Raises:
        SpecError: for what is wrong with it; nothing has changed.
    """
    more = prepare_newcomer(prepared, source)
    number = len(more.job.sources) - 1
    files = open_files(more, [number], hands.callers)[number]
    index_first_windows(
        more.job, {number: files}, [Cursor(0, BEGIN, 0)] * (number + 1), [1.0] * (number + 1), hands.callers, None
    )
    return Newcomer(more, files, make_crew(more, number, files, verdicts, hands))


def admit(
    planner: Planner,
    prepared: Prepared,
    facts: Mapping[str, SourceFacts],
    weight: float | None,
    at_step: int | None,
    change_id: str = "",
) -> tuple[Prepared, int]:
    """Write down that the last source of a prepared job comes; its loaders and decoders are there.

    Returns:
        The job with the source as it was written down, and the step it comes at.
    """
    changes, source = planner.sources, prepared.job.sources[-1]
    at = changes.step_of_add(at_step)
    if source.weight is not None:  # weights stand beside the sources: this one's too
        source = source.replace(weight=weight if weight is not None else changes.mean_weight())
        prepared = dataclasses.replace(prepared, job=prepared.job.replace(sources=[*prepared.job.sources[:-1], source]))
    changes.add(source, weight, at, base_weights(prepared.job, facts), change_id)
    planner.parts = parts_of(prepared, facts)
    return prepared, at


def _behind(job: Job, more: Job, name: str) -> Job:
    """Return a job with its sources numbered as they were, and one behind them."""
    named = {source.name: source for source in more.sources}
    return more.replace(sources=[named[one] for one in (*job.names, name)])
