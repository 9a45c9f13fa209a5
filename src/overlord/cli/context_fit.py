"""What a context leaves of a source: how many of its samples are cut or dropped, and how many tokens that loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overlord.cli.sources import Opened, open_each
from overlord.cli.summary import percent
from overlord.core.draw import apply_overlength
from overlord.core.ragged import RowBatch, num_rows, slice_rows
from overlord.core.samples import BAD, OVERLONG, SKIP
from overlord.errors import OverlordError
from overlord.job.specs import Custom, Interleaved, Job
from overlord.roles.source_loader import media_items
from overlord.transforms.samples.per_sample import Measured, no_seeds

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


def fit_context(one: Opened, measured: Measured) -> tuple[Int32s, Int32s]:
    """Return (delivered tokens, flags) of measured rows, as a loader decides them."""
    return apply_overlength(measured.tokens, media_items(measured)[1], one.context_length, one.overlength)


def look_at_context(one: Opened) -> ContextFit:
    """Measure some rows of a source and return how they fit; only files that are indexed already are looked into."""
    found, files = ContextFit(), one.files
    every = max(1, len(files.files) // _LOOKED_INTO)
    for number in range(0, every * _LOOKED_INTO, every):
        index = files.indexed(number) if number < len(files.files) else None
        if index is None or not index.rows.any():
            continue
        block = int(np.argmax(index.rows))
        row_bytes = max(float(index.bytes[block]) / int(index.rows[block]), 1.0)
        wanted = int(np.clip(_READ_BYTES / row_bytes, 1, _LOOKED_AT))
        for batch in files.stream(number, block, batch_rows=wanted):
            _count(one, slice_rows(batch, 0, min(wanted, num_rows(batch))), found)
            break
    return found


def _count(one: Opened, rows: RowBatch, found: ContextFit) -> None:
    measured = one.transform.measure(rows, None, no_seeds(rows))
    found.add(measured, *fit_context(one, measured))


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
    known = {s.name for s in job.sources if cuts and (full[s.name] or isinstance(s.sample, Interleaved))}
    asked = [s for s in job.sources if s.name in known or skipped[s.name]]
    # A user's function may crash, and only loaders have somewhere to run it.
    functions = [s.name for s in asked if isinstance(s.sample, Custom) and s.name in known]
    found: list[tuple[str, ContextFit]] = []
    for one in open_each(job, [s for s in asked if not isinstance(s.sample, Custom)], cache, None):
        try:
            found.append((one.source.name, look_at_context(one.open_or_raise())))
        except OverlordError:
            pass  # who could not read it has said so; a figure that nobody asked for is no reason to stop
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
    return [f"Samples of {rest} more source{'' if rest == 1 else 's'} are {what} too."] if rest > 0 else []
