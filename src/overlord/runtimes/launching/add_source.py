"""Adding a source while the stream runs: `AddedSources` is the protocol, the functions are what each role does in it.

How it works: the supervisor asks the planner whether the source may be added, has one loader host open it, publishes
the new assignment, tells all other roles, and has the planner journal the change. The source is added when the planner
has journaled it, and not before.

Rules of this file:
1. What is wrong with a source is said before anything has changed.
2. Every message is idempotent: a replaced role is told of all added sources when it comes up, and may be told again.
3. Its loaders and decoders are there before a plan may draw from it.
4. A call that fails asks the planner whether the source is journaled, and takes back what the other roles were told if
   it is not: it ends as added or as not added.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from overlord.core.client_messages import AddSource, Message
from overlord.core.messages import (
    AddedSource,
    AdmitSource,
    DropSource,
    FindChange,
    OpenedSource,
    Prepare,
    SourceFacts,
)
from overlord.core.order import BEGIN
from overlord.core.samples import Cursor
from overlord.errors import OverlordError, SpecError
from overlord.job.specs import Source, secret_options
from overlord.readers.source_files import SourceFiles
from overlord.roles.assignment import NO_HOST, Assignment
from overlord.roles.changes import source_to_json
from overlord.roles.planner import Planner
from overlord.runtimes.hosts.peers import PLANNER, loader_name
from overlord.runtimes.launching.cluster_placement import Site
from overlord.runtimes.launching.deployment import (
    Prepared,
    base_weights,
    index_first_windows,
    media_shape,
    open_files,
    parts_of,
    transform_of,
    warm_job,
)
from overlord.runtimes.launching.resume import canonical
from overlord.runtimes.launching.service_options import KeepOptions
from overlord.runtimes.launching.tokenizer_trial import try_tokenizer
from overlord.runtimes.supervision.role_table import RoleTable
from overlord.transforms.samples.chat import inline_templates
from overlord.transforms.samples.per_sample import Workers
from overlord.transforms.samples.sample_kinds import reserve_placeholders
from overlord.transforms.samples.tokenize import TextTokenizer


class AddedSources:
    """The sources that were added since the service was started."""

    def __init__(self, table: RoleTable) -> None:
        self._table = table
        self.keep: KeepOptions = lambda name, options: None
        """Told of a source before it is written down, with those of its storage options that are not."""
        self._first = len(table.assignment.primary)
        self._added: list[dict[str, Any]] = []
        self.facts: dict[str, SourceFacts] = {}
        """What is known of their files."""

    def told(self, site: Site, assignment: Assignment) -> Prepare:
        """Return what a replaced role is told of them."""
        numbers = {*assignment.sources_of(site.number), *assignment.shadows_of(site.number)}
        loads = site.role == "loader"
        return Prepare(
            tuple(AddedSource(source, loads and self._first + at in numbers) for at, source in enumerate(self._added))
        )

    def add(self, request: AddSource) -> int:
        """Add a source; return the step it is drawn from on.

        Raises:
            OverlordError: It was not added, and nothing has changed.
        """
        with self._table.moving:
            made: int | None = self._ask(PLANNER, "check_source", request).step
            if made is not None:
                return made
            primary, shadow = self._choose(self._table.peers.membership.assignment)
            opened: OpenedSource = self._ask(loader_name(primary), "add_source", AddedSource(request.source, True))
            self._added.append(request.source)
            self.facts[opened.name] = opened.fact
            self._change(lambda now: Assignment((*now.primary, (primary,)), (*now.shadow, shadow)))
            try:
                for site in self._sites():
                    if site.role != "planner":
                        mine = site.role == "loader" and site.number in (primary, shadow)
                        self._ask(site.name, "add_source", AddedSource(request.source, mine))
                self.keep(opened.name, secret_options(Source.from_mapping(request.source)))
                return self._ask(PLANNER, "add_source", AdmitSource(request, opened.fact)).step
            except OverlordError as error:
                made = self._ask(PLANNER, "added_at", FindChange(request.id)).step
                if made is not None:
                    return made
                self._take_back(opened.name)
                if isinstance(error, SpecError):
                    raise
                raise type(error)(
                    f"add_source: {opened.name!r} was not added, and the stream goes on without it: {error}"
                ) from error

    def _take_back(self, name: str) -> None:
        self._added.pop()
        del self.facts[name]
        self._change(lambda now: Assignment(now.primary[:-1], now.shadow[:-1]))
        for site in self._sites():
            if site.role != "planner":
                self._ask(site.name, "drop_source", DropSource(name))

    def _sites(self) -> list[Site]:
        return [one.site for one in self._table.running()]

    def _change(self, change: Callable[[Assignment], Assignment]) -> None:
        """Change the assignment; a shadow may be promoted at the same moment, and then it is changed again."""
        now = self._table.peers.membership.assignment
        while not self._table.assign(change(now), now):
            now = self._table.peers.membership.assignment

    def _choose(self, now: Assignment) -> tuple[int, int]:
        """Return the loader host with the fewest sources; and another one, where sources have shadows."""
        hosts = [site.number for site in self._sites() if site.role == "loader"]
        held = Counter((*(host for each in now.primary for host in each), *now.shadow))
        primary, *others = sorted(hosts, key=lambda host: (held[host], host))
        return primary, others[0] if others and set(now.shadow) != {NO_HOST} else NO_HOST

    def _ask(self, name: str, method: str, message: Message) -> Any:
        return self._table.peers.insist(name, method, message)


# --------------------------------------------------------------------------------------------------------------
# In the roles.


def with_source(prepared: Prepared, source: Source) -> Prepared:
    """Return a prepared job with one more source, which has the last number; no file is opened.

    Raises:
        SpecError: for a source that cannot be added to the running job.
    """
    source_to_json(source)
    job = prepared.job
    weighted = any(one.weight is not None for one in job.sources)
    weight = (source.weight if source.weight is not None else 0.0) if weighted else None
    more = canonical(job.replace(sources=[*job.sources, source.replace(weight=weight)]))
    named = {one.name: one for one in more.sources}
    more = more.replace(sources=[named[name] for name in (*job.names, source.name)])  # the others keep their numbers
    if prepared.isolate is not None:  # otherwise the caller runs everything itself
        try_tokenizer(more, prepared.options.cache)
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
    added = more.sources[-1]
    transforms = [
        *prepared.transforms,
        transform_of(added, tokenizer, prepared.isolate, pooled=prepared.options.pools(added)),
    ]
    return dataclasses.replace(prepared, job=more, transforms=transforms)


def without_last_source(prepared: Prepared) -> Prepared:
    """Return a prepared job without its last source."""
    job = prepared.job.replace(sources=prepared.job.sources[:-1])
    return dataclasses.replace(prepared, job=job, transforms=prepared.transforms[:-1])


def open_last_source(prepared: Prepared, callers: Workers) -> SourceFiles:
    """Open the last source of a prepared job: its files are listed, its columns checked, its first files indexed.

    Raises:
        SpecError: for what is wrong with it.
    """
    count = len(prepared.job.sources)
    files = open_files(prepared, [count - 1], callers)
    index_first_windows(prepared.job, files, [Cursor(0, BEGIN, 0)] * count, [1.0] * count, callers, None)
    return files[count - 1]


def journal_last_source(
    planner: Planner,
    prepared: Prepared,
    facts: Mapping[str, SourceFacts],
    weight: float | None,
    at_step: int | None,
    change_id: str = "",
) -> tuple[Prepared, int]:
    """Journal that the last source of a prepared job is added; its loaders and decoders are there.

    Returns:
        The job with the source as it was journaled, and the step it is drawn from on.
    """
    changes, source = planner.sources, prepared.job.sources[-1]
    at = changes.step_of_add(at_step)
    if source.weight is not None:  # weights are given with the sources: this one needs one too
        source = source.replace(weight=weight if weight is not None else changes.mean_weight())
        prepared = dataclasses.replace(prepared, job=prepared.job.replace(sources=[*prepared.job.sources[:-1], source]))
    changes.add(source, weight, at, base_weights(prepared.job, facts), change_id)
    planner.parts = parts_of(prepared, facts)
    return prepared, at
