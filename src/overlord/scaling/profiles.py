"""The profile of a job: the cost of every source, measured on real samples and refreshed by runs.

Rules of this file:
1. A figure belongs to a source as it was when it was measured: files, sample, tokenizer. `Profile.check` refuses it for
   another one.
2. A profile records the origin of each figure: when and how it was measured, and on how many samples. That journal is
   bounded.
3. A file is used completely or not at all: its checksum covers all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.core.spec_errors import is_finite, list_some
from overlord.errors import SpecError
from overlord.job.specs import Source
from overlord.scaling.source_costs import SourceCost

PROFILE_VERSION = 1
MOST_ENTRIES = 16
"""Entries of a source's journal; the first stays, the oldest behind it go."""
MOST_OLD_WEIGHT = 2000
"""The weight of the previous figures in samples, at most: a long run outweighs them."""
QUANTILES = 21
"""How many quantiles of a distribution are kept: 0 %, 5 %, .. 100 %."""

_REMEDY = "Run `overlord profile` again"
_PARTS = ("how its samples are made (path, format, sample or lengths)", "its files", "the tokenizer")


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is distributed over samples.

    Example:
        >>> Spread.of([1.0, 2.0, 3.0, 10.0]).p50
        2.5
    """

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    quantiles: tuple[float, ...]
    """From the smallest to the largest, evenly spaced."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Describe some values, of which there is at least one."""
        found = np.fromiter(values, np.float64)
        p50, p90, p99 = np.quantile(found, (0.5, 0.9, 0.99)).tolist()
        quantiles = np.quantile(found, np.linspace(0, 1, QUANTILES)).tolist()
        return cls(float(found.mean()), p50, p90, p99, float(found.max()), tuple(quantiles))

    def scaled(self, factor: float) -> Spread:
        """Return the same shape around another mean."""
        mean, p50, p90, p99, most = (factor * value for value in (self.mean, self.p50, self.p90, self.p99, self.max))
        return Spread(mean, p50, p90, p99, most, tuple(factor * value for value in self.quantiles))


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a source's journal."""

    when: str
    """ISO time."""
    what: str
    """ "measured", or "refreshed at step N"."""
    samples: int
    """Samples that were measured."""
    transform_s: float
    """P that came of it."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a running job has measured of one source."""

    samples: int
    """Samples prepared."""
    busy_s: float
    """Seconds that its workers were busy with them, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceProfile:
    """The measured cost of one source. Seconds and bytes are per sample unless stated otherwise."""

    name: str
    digest: str
    """Of what was measured; see `cost_digest`."""
    samples: int
    """Samples that the figures are based on."""
    bad: int = 0
    """Of the measured samples, how many were bad."""
    transform: Spread
    """P: seconds of one worker, from reading a sample to finishing it."""
    read_s: float
    """Of P: reading rows, with opening their files spread over the rows that come of it."""
    measure_s: float
    """Of P: knowing the length, which tokenizes and runs custom functions."""
    finish_s: float
    """Of P: token ids, and media where the loader decodes them."""
    cpu_share: float = 1.0
    """The part of P that needs a CPU; the rest is waiting. 1.0 if it was not measured."""
    decode_s: float = 0.0
    """Decoding media behind the hand-over, in the DataConstructor; not in P."""
    decoded_in: str = ""
    """Where media are decoded: "loader", "constructor", or "" for a source without."""
    handover_s: float
    """T: cutting a sample out of the read buffer and copying it to where it goes."""
    file_bytes: int
    """M_d: bytes of an actor for the listing and the indices of the files."""
    buffer_bytes: int
    """M_b: bytes of one worker at the end of its group: its open readers and the rows kept."""
    tokens: float
    """Tokens, on average."""
    read_bytes: float
    """Bytes of a row as read."""
    kept_bytes: float
    """Bytes of it that are kept once it is measured."""
    delivered_bytes: float
    """Bytes of it that are handed over."""
    entries: tuple[Entry, ...] = ()
    """How the figures came about, oldest first."""

    @property
    def transform_s(self) -> float:
        """P on average."""
        return self.transform.mean

    @property
    def cost(self) -> SourceCost:
        """The input of partition and autoscaler."""
        return SourceCost(
            name=self.name,
            transform_s=self.transform_s,
            handover_s=self.handover_s,
            file_bytes=self.file_bytes,
            buffer_bytes=self.buffer_bytes,
            tokens=self.tokens,
            cpu_share=self.cpu_share,
        )

    def noted(self, entry: Entry) -> SourceProfile:
        """Return the profile with one more line in its journal."""
        entries = (*self.entries, entry)
        if len(entries) > MOST_ENTRIES:
            entries = (entries[0], *entries[len(entries) - MOST_ENTRIES + 1 :])
        return dataclasses.replace(self, entries=entries)

    def refreshed(self, running: Running, when: str, what: str) -> SourceProfile:
        """Return the profile updated by a run: a mean weighted by samples, with a cap on the old weight.

        A run measures only the mean of P: its distribution, its parts and the CPU share keep their proportions.
        """
        old, new = min(self.samples, MOST_OLD_WEIGHT), running.samples
        mean = (old * self.transform_s + running.busy_s) / (old + new)
        factor = mean / self.transform_s
        moved = dataclasses.replace(
            self,
            samples=self.samples + new,
            transform=self.transform.scaled(factor),
            read_s=factor * self.read_s,
            measure_s=factor * self.measure_s,
            finish_s=factor * self.finish_s,
        )
        return moved.noted(Entry(when, what, new, moved.transform_s))


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of the sources of a job."""

    sources: tuple[SourceProfile, ...]

    @property
    def names(self) -> list[str]:
        """Names of the sources that were measured."""
        return [one.name for one in self.sources]

    def cost(self, name: str) -> SourceCost:
        """Return the cost of a source.

        Raises:
            SpecError: It was not measured.
        """
        for one in self.sources:
            if one.name == name:
                return one.cost
        raise SpecError(f"source {name!r} is not in the profile; its cost is unknown. {_REMEDY}.")

    def joined(self, newer: Profile) -> Profile:
        """Return the profile updated by a newer one; the journal of an unchanged source is continued."""
        known = {one.name: one for one in self.sources}
        for one in newer.sources:
            before = known.get(one.name)
            if before is not None and before.digest == one.digest:
                carried = dataclasses.replace(one, entries=before.entries)
                for entry in one.entries:
                    carried = carried.noted(entry)
                known[one.name] = carried
            else:
                known[one.name] = one
        return Profile(tuple(known.values()))

    def refreshed(self, running: Mapping[str, Running], when: str, what: str) -> Profile:
        """Return the profile updated by a run; sources that it did not prepare stay as they are.

        Args:
            running: What was measured of each source; names that the profile does not know are ignored.
            when: ISO time.
            what: The line of the journal, such as "refreshed at step 400".
        """

        def one(source: SourceProfile) -> SourceProfile:
            found = running.get(source.name)
            worth = found is not None and found.samples > 0 and found.busy_s > 0
            return source.refreshed(found, when, what) if found is not None and worth else source

        return Profile(tuple(one(source) for source in self.sources))

    def check(self, digests: Mapping[str, str]) -> None:
        """Refuse the profile if sources differ from those it was measured on.

        Args:
            digests: What `cost_digest` gives for each source now.

        Raises:
            SpecError: Sources have changed, or were never measured; it names them.
        """
        known = {one.name: one.digest for one in self.sources}
        changed = [name for name, digest in digests.items() if name in known and known[name] != digest]
        if changed:
            name = changed[0]
            pairs = zip(_PARTS, known[name].split(":"), digests[name].split(":"), strict=False)
            what = [part for part, old, new in pairs if old != new] or ["it"]
            others = f" (and {len(changed) - 1} other sources)" if len(changed) > 1 else ""
            raise SpecError(
                f"source {name!r} is not what was profiled{others}: {' and '.join(what)} changed since; its loaders "
                f"would be sized by figures of something else. {_REMEDY}."
            )
        missing = [name for name in digests if name not in known]
        if missing:
            are = "source {} is" if len(missing) == 1 else "sources {} are"
            raise SpecError(
                f"{are.format(list_some(missing))} not in the profile; how many workers to give is unknown. {_REMEDY}."
            )

    def to_json(self) -> str:
        """Return the profile as text for a file: one figure a line, so that two versions can be compared."""
        sources = {one.name: _without_name(one) for one in self.sources}
        parts = [
            f"{_text(name)}: {{\n"
            + ",\n".join(f"  {_text(key)}: {_text(value)}" for key, value in given.items())
            + "\n }"
            for name, given in sources.items()
        ]
        head = f'"version": {PROFILE_VERSION},\n"checksum": {_text(_checksum(sources))},\n'
        return "{" + head + '"sources": {\n ' + ",\n ".join(parts) + "\n}}\n"

    @classmethod
    def from_json(cls, text: str, file: str) -> Profile:
        """Read what `to_json` returned.

        Args:
            text: The content of the file.
            file: Its name, for messages.

        Raises:
            SpecError: The file is damaged, or of another version.
        """
        try:
            whole = json.loads(text)
            version = whole["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(file, "it is no profile") from error
        if version != PROFILE_VERSION:
            raise SpecError(
                f"{file} is a profile of version {version!r:.40}, and this overlord reads version {PROFILE_VERSION}; "
                f"its figures could mean something else. {_REMEDY}."
            )
        try:
            if whole["checksum"] != _checksum(whole["sources"]):
                raise _damaged(file, "its checksum does not fit")
            return cls(tuple(_source(name, given) for name, given in whole["sources"].items()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(file, f"{type(error).__name__}: {error}"[:120]) from error


def cost_digest(source: Source, listing: str, tokenizer_digest: str, placement: str) -> str:
    """Return "how:files:tokenizer": hashes of what decides the cost of a source, so that a refusal names the part.

    Args:
        source: The source.
        listing: Digest of its list of files.
        tokenizer_digest: Digest of the tokenizer's files.
        placement: Where media are decoded, as the launch says.
    """
    how = source.model_dump(mode="json", include={"path", "sample", "lengths", "format", "shuffle_bytes"})
    texts = (json.dumps([how, placement], sort_keys=True), listing, tokenizer_digest)
    return ":".join(hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts)


def _damaged(file: str, why: str) -> SpecError:
    return SpecError(
        f"{file} is damaged: {why}; loaders would be sized by wrong figures. {_REMEDY} for all sources, and do not "
        "edit the file by hand."
    )


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _checksum(sources: Mapping[str, Any]) -> str:
    text = json.dumps(sources, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _without_name(one: SourceProfile) -> dict[str, Any]:
    given = dataclasses.asdict(one)
    del given["name"]
    return given


def _source(name: str, given: Mapping[str, Any]) -> SourceProfile:
    fields = dict(given)
    spread, entries = dict(fields.pop("transform")), fields.pop("entries")
    quantiles = tuple(spread.pop("quantiles"))
    _check_numbers((*fields.values(), *spread.values(), *quantiles))
    return SourceProfile(
        name=name,
        transform=Spread(**spread, quantiles=quantiles),
        entries=tuple(Entry(**entry) for entry in entries),
        **fields,
    )


def _check_numbers(values: Sequence[object]) -> None:
    for value in values:
        if not isinstance(value, str) and not (is_finite(value) and value >= 0):
            raise ValueError(f"{value!r} is no amount")
