"""Hooks of the user: what `loader_do_plan` and `constructor_do_plan` are given, and what of their results is taken.

    LoaderPart        what a SourceLoader hands over together: the samples of a step from one group of its source
    MicrobatchPart    the segments of one microbatch, before the DataConstructor packs them
    RunningHook       a hook in the process of its role: it is called, its result checked, its errors attributed

Rules of this file:
1. A hook sees only what is the same on every runtime, for every number of loaders and hosts, and wherever media are
   decoded. So a SourceLoader calls it for each group of its source's order: loaders own whole groups. Seeds are derived
   from the job's seed and the ids of samples.
2. Lengths were promised to the planner, and placeholders stand for media: a result that changes them is refused.
3. Labels are counted when samples leave their loader, so only `loader_do_plan` changes what counts in the loss.
4. Arguments are read-only: their memory belongs to the role. Several threads may call a hook at the same time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.messages import LoaderOrder
from overlord.core.plan import LoadingPlan
from overlord.core.ragged import Ragged, expand_ranges, offsets_of
from overlord.core.samples import BAD, SampleId, derive, hash64
from overlord.core.spec_errors import list_some
from overlord.errors import HookError
from overlord.job.hook_specs import Hook, HookKind
from overlord.transforms.microbatches.step_samples import Items, StepSamples
from overlord.transforms.samples.per_sample import Finished, innermost_line

__all__ = ["LoaderPart", "MicrobatchPart", "Ragged"]

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

COLUMN_TYPES = ("bool", "uint8", "int32", "int64", "float32")
"""Types of the columns that a hook may add to a batch."""
_SHOWN_IDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples, or segments of them, as columns: one entry of each array for each of them."""

    step: int
    source_names: tuple[str, ...]
    source_ids: Int64s
    """The source of each, as an index into `source_names`."""
    epochs: Int64s
    rows: Int64s
    """Row number in the source: file << 32 | row of the file."""
    starts: Int64s
    """The first token inside the sample; not 0 for later pieces, and where an earlier step has the beginning."""
    tokens: Ragged
    """Token ids (int32): `tokens[i]` are those of sample i, `tokens.values` and `tokens.offsets` those of all."""
    loss: Ragged
    """1 where the token counts in the loss (uint8)."""
    placeholders: Bools
    """Of each of `tokens.values`, whether it stands for an image, clip or sound; those must stay as they are."""
    bad: Bools
    """Which are stand-ins of samples that could not be read: nothing of them counts in the loss."""
    seeds: npt.NDArray[np.uint64]
    """A seed for each, from the job's seed, its source, row, epoch and first token."""

    @property
    def sample_ids(self) -> list[SampleId]:
        """The ids of the samples."""
        columns = (self.source_ids.tolist(), self.rows.tolist(), self.epochs.tolist())
        return [SampleId(self.source_names[source], row, epoch) for source, row, epoch in zip(*columns, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPart(Samples):
    """The samples of a step from one group of one source's order, with their planned lengths: of a sample that is split
    over steps, what this step has.

    `loader_do_plan` returns {"tokens": .., "loss": ..}, or one of them: rows as long as planned, as a `Ragged`, or as
    one array of all rows. None leaves everything as it is.
    """

    @property
    def source(self) -> str:
        """The name of the source."""
        return self.source_names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchPart(Samples):
    """The segments of one microbatch, in their order; none in a microbatch that only keeps ranks in step.

    `constructor_do_plan` returns a mapping: "tokens" are rows as long as planned, every other key is a new column of
    the batch. None leaves everything as it is.
    """

    cu_seqlens: Int64s
    """Where segments (or padded rows) begin in the sequence of the microbatch, padding included, and where it ends."""


Result = dict[str, Array]
"""What a hook returned, checked: values of `tokens` and `loss`, and new columns."""


class RunningHook:
    """A hook in the process of its role."""

    def __init__(self, hook: Hook, kind: HookKind, seed: int) -> None:
        self._hook = hook
        self._kind = kind
        self.seed = seed
        self._call: Any = None
        self._compared = False

    def start(self) -> RunningHook:
        """Make the object of a class, before anything is asked of the role."""
        if self._call is None:
            try:
                self._call = self._hook.fn() if isinstance(self._hook.fn, type) else self._hook.fn
            except Exception as error:  # the boundary to the user's code
                raise HookError(
                    f"{self._words} could not be made: it raised {type(error).__name__}: {error}"
                    f"{innermost_line(error)}; no sample could be passed through it. Its __init__ takes no arguments."
                ) from error
        return self

    def run(self, part: Samples, where: str) -> Result:
        """Call the hook; its first result in this process is compared with that of a second call.

        Raises:
            HookError: The hook raised, or returned something else than what was planned.
        """
        made = self._checked(part, where)
        if not self._compared and len(part):
            self._compared = True
            again = self._checked(part, where)
            if made.keys() != again.keys() or any(made[key].tobytes() != again[key].tobytes() for key in made):
                raise self._refuse(
                    part, where, "returned something else when it was called again with the same arguments",
                    "a resumed run, or another host, would get other batches. Draw random numbers from part.seeds, "
                    "and keep nothing between calls",
                )  # fmt: skip
        return made

    def _checked(self, part: Samples, where: str) -> Result:
        assert self._call is not None, "it is started with its role"
        try:
            made = self._call(part)
        except Exception as error:  # the boundary to the user's code
            words = f"raised {type(error).__name__}: {error}{innermost_line(error)}"
            raise self._refuse(part, where, words, "the step cannot be built. Correct the hook") from error
        if made is None:
            return {}
        if not isinstance(made, Mapping):
            raise self._refuse(
                part, where, f"returned a {type(made).__name__}",
                "it cannot be told what to take. Return a mapping such as {'tokens': ..}, or None",
            )  # fmt: skip
        return {str(key): self._column(part, where, key, value) for key, value in made.items()}

    def _column(self, part: Samples, where: str, key: object, value: object) -> Array:
        loads = self._kind == "loader_do_plan"
        if key == "tokens":
            tokens = self._tokens(part, where, self._rows_as_planned(part, where, key, value))
            held = part.placeholders
            if not np.array_equal(tokens[held], part.tokens.values[held]):
                raise self._refuse(
                    part, where, "changed placeholders of images, clips or sounds",
                    "they would not meet their media. Leave tokens as they are where part.placeholders is set",
                )  # fmt: skip
            return tokens
        if key == "loss" and loads:
            return (self._rows_as_planned(part, where, key, value) != 0).astype(np.uint8)
        if loads or key == "loss":
            advice = (
                "Return tokens and loss; constructor_do_plan adds columns"
                if loads
                else "Labels are counted before: change what counts in loader_do_plan"
            )
            raise self._refuse(part, where, f"returned {key!r:.60}", f"it would have no effect. {advice}")
        return self._new_column(part, where, key, value)

    def _rows_as_planned(self, part: Samples, where: str, key: str, value: object) -> Array:
        """Return the values of rows that have their planned lengths."""
        planned = part.tokens.lengths
        if isinstance(value, Ragged):
            if len(value) != len(planned):
                raise self._wrong_lengths(part, where, f"returned {len(value)} rows of {key} for {len(planned)}")
            wrong = np.flatnonzero(value.lengths != planned)
            if len(wrong):
                at = int(wrong[0])
                told = f"returned {key} of {len(wrong)} samples with other lengths than planned: {value.lengths[at]} "
                raise self._wrong_lengths(part, where, f"{told}instead of {planned[at]} for {part.sample_ids[at]}")
            values = value.values[value.offsets[0] : value.offsets[-1]]
        else:
            values = self._array(part, where, key, value)
            if values.shape != (int(planned.sum()),):
                told = f"returned {key} of shape {values.shape} where {int(planned.sum())} are planned"
                raise self._wrong_lengths(part, where, told)
        return values

    def _tokens(self, part: Samples, where: str, values: Array) -> Array:
        whole = values.dtype.kind in "iu"
        if not whole or (values.size and not 0 <= int(values.min()) <= int(values.max()) < 1 << 31):
            shown = f", from {values.min()} to {values.max()}" if whole else ""
            effect = "a model could not look them up. Return whole numbers from 0 to 2**31 - 1"
            raise self._refuse(part, where, f"returned tokens of type {values.dtype}{shown}", effect)
        return values.astype(np.int32)

    def _new_column(self, part: Samples, where: str, key: object, value: object) -> Array:
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z_]\w*", key):
            raise self._refuse(
                part, where, f"returned a column named {key!r:.60}",
                "a batch could not hold it. Name columns as arguments of a function, such as 'pair_ids'",
            )  # fmt: skip
        column = self._array(part, where, key, value)
        if column.dtype.name not in COLUMN_TYPES or not column.ndim:
            raise self._refuse(
                part, where, f"returned {key!r} of type {column.dtype} and shape {column.shape}",
                f"a batch could not hold it. Return an array of {', '.join(COLUMN_TYPES)}",
            )  # fmt: skip
        return column.astype(np.uint8 if column.dtype == np.bool_ else column.dtype.name)

    def _array(self, part: Samples, where: str, key: str, value: object) -> Array:
        try:
            return np.asarray(value)
        except ValueError as error:
            raise self._refuse(
                part, where, f"returned {key!r} that is no array ({error})",
                "its lengths are unclear. Return an array, or ol.hooks.Ragged for rows of several lengths",
            ) from error  # fmt: skip

    def _wrong_lengths(self, part: Samples, where: str, what: str) -> HookError:
        return self._refuse(
            part, where, what,
            "microbatches were planned with the lengths that were measured. Keep lengths; a transform that changes "
            "them is an ol.Custom sample",
        )  # fmt: skip

    def _refuse(self, part: Samples, where: str, what: str, effect: str) -> HookError:
        ids = [str(one) for one in part.sample_ids]
        told = f"samples {list_some(ids, _SHOWN_IDS)}" if ids else "no samples"
        return HookError(f"{self._words} {what}, at {where} ({told}); {effect}.")

    @property
    def _words(self) -> str:
        return f"the {self._kind} hook {self._hook.name!r} version {self._hook.version!r}"

    def column_taken(self, part: Samples, where: str, key: str) -> HookError:
        """Return the error for a column with the name of a key that batches have."""
        effect = "one of them would be lost. Give the column another name"
        return self._refuse(part, where, f"returned {key!r}, which is a key of batches already", effect)


# -- a SourceLoader's part of a plan ---------------------------------------------------------------------------------


def run_loader_hook(hook: RunningHook, name: str, order: LoaderOrder, done: Finished) -> Finished:
    """Pass finished samples of an order through a hook, group by group."""
    meta, tokens, loss = order.meta, done.tokens.compact(), done.loss.compact()
    if not len(meta):
        return done
    bad = (meta["flags"] & BAD) > 0
    held = np.zeros(len(tokens.values), np.bool_)
    if done.media is not None:
        sample = np.repeat(np.arange(len(meta)), np.diff(done.media.rows))
        held[expand_ranges(tokens.offsets[sample] + done.media.start, done.media.length)] = True
    epochs, rows, starts = (meta[name].astype(np.int64) for name in ("epoch", "row", "start"))
    new_group = (np.diff(meta["group"]) != 0) | (np.diff(epochs) != 0)
    bounds = [0, *(np.flatnonzero(new_group) + 1).tolist(), len(meta)]
    new_tokens: list[Array] = []
    new_loss: list[Array] = []
    for first, last in itertools.pairwise(bounds):
        low, high = int(tokens.offsets[first]), int(tokens.offsets[last])
        offsets = tokens.offsets[first : last + 1] - low
        key = derive(hook.seed, "loader_do_plan", name, int(epochs[first]))
        part = LoaderPart(
            step=order.step,
            source_names=(name,),
            source_ids=_sealed(np.zeros(last - first, np.int64)),
            epochs=_sealed(epochs[first:last]),
            rows=_sealed(rows[first:last]),
            starts=_sealed(starts[first:last]),
            tokens=_sealed_rows(tokens.values[low:high], offsets),
            loss=_sealed_rows(loss.values[low:high], offsets),
            placeholders=_sealed(held[low:high]),
            bad=_sealed(bad[first:last]),
            seeds=hash64(key, hash64(key, rows[first:last]) ^ starts[first:last].astype(np.uint64)),
        )
        result = hook.run(part, f"step {order.step}, source {name!r}")
        counts = np.repeat(~bad[first:last], np.diff(offsets))
        new_tokens.append(result.get("tokens", tokens.values[low:high]))
        new_loss.append(result["loss"] * counts if "loss" in result else loss.values[low:high])
    return dataclasses.replace(
        done,
        tokens=Ragged(np.concatenate(new_tokens), tokens.offsets),
        loss=Ragged(np.concatenate(new_loss), tokens.offsets),
    )


# -- a DataConstructor's samples -------------------------------------------------------------------------------------


def microbatch_part(
    plan: LoadingPlan, samples: StepSamples, chosen: slice, cu: Int64s, media: tuple[Items, Int64s], seed: int
) -> MicrobatchPart:
    """Return what a hook is given of one microbatch; `media` are its items and the segment of each."""
    table, (items, segment) = samples.pieces, media
    places = expand_ranges(table.places(chosen), table.length[chosen])
    source, epochs, rows, starts = table.origin[:4, chosen]
    inside = plan.pieces.start[
        chosen
    ]  # not `starts`: of a sample that is split over steps, items count from its part on
    offsets = offsets_of(table.length[chosen])
    held = np.zeros(len(places), np.bool_)
    if len(items):
        inside = items.start - plan.pieces.start[chosen][segment]  # counted in what the step has of the sample
        held[expand_ranges(offsets[segment] + inside, items.length)] = True
    seeds = _source_keys(seed, plan.draw.names)[source]
    for column in (epochs, rows, starts):
        seeds = hash64(derive(seed, "constructor_do_plan"), seeds ^ column.astype(np.uint64))
    return MicrobatchPart(
        step=plan.step,
        source_names=plan.draw.names,
        source_ids=_sealed(source),
        epochs=_sealed(epochs),
        rows=_sealed(rows),
        tokens=_sealed_rows(samples.tokens.values[places], offsets),
        loss=_sealed_rows(samples.loss.values[places], offsets),
        placeholders=_sealed(held),
        bad=(plan.draw.meta["flags"][plan.pieces.sample[chosen]] & BAD) > 0,
        seeds=seeds,
        starts=_sealed(starts),
        cu_seqlens=_sealed(cu),
    )


@functools.lru_cache(4)
def _source_keys(seed: int, names: tuple[str, ...]) -> npt.NDArray[np.uint64]:
    """Return a key for each source by its name: its number depends on which other sources there are."""
    return np.array([derive(seed, "constructor_do_plan", name) for name in names], np.uint64)


def _sealed(array: Array) -> Array:
    """Return a view that cannot be written to."""
    view = array.view()
    view.flags.writeable = False
    return view


def _sealed_rows(values: Array, offsets: Int64s) -> Ragged:
    return Ragged(_sealed(values), _sealed(offsets))
