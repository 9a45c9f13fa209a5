"""The paper's low-level hooks as plain functions, for plans without a DGraph.

`summary_buffer` makes the input of a strategy, `plan_raw` a plan from your own placement; `loader_do_plan` and
`constructor_do_plan` return the part of a plan that a SourceLoader or a DataConstructor uses. The roles have methods of
the same names; to replace what they do with their part, give `ol.launch` hooks (`loader_do_plan=`,
`constructor_do_plan=`; see `ol.hooks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Draw, Limits, Pieces, context_pieces
from overlord.core.messages import LoaderOrder
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, lay_out
from overlord.core.samples import CLIPS, META, SOUNDS, Cursor
from overlord.core.spec_errors import did_you_mean, is_finite, is_whole
from overlord.errors import SpecError
from overlord.job.layout_specs import piece_multiple, shape_of
from overlord.planning.checking import check_inputs, check_plan

Columns = Mapping[str, npt.ArrayLike]
_MEDIA = {"clip_tokens": ("image_tokens", CLIPS), "clips": ("images", CLIPS),
          "audio_tokens": ("image_tokens", SOUNDS), "sounds": ("images", SOUNDS)}  # fmt: skip
_GIVEN = ("tokens", "loss_tokens", "image_tokens", "images", *_MEDIA, "bytes", "epoch", "row")


def summary_buffer(
    sources: Mapping[str, npt.ArrayLike | Columns],
    *,
    context_length: int,
    microbatch_tokens: int | None = None,
    microbatches: int | None = None,
    step: int = 0,
    metrics: Mapping[str, float] | None = None,
) -> Buffer:
    """Make the buffer of one step from metadata: of each source its lengths, or a mapping of columns.

    `metrics` are what a strategy finds as reported by the trainer.

    Example:
        >>> buffer = summary_buffer({"web": [5, 3], "coyo": {"tokens": [9], "images": [1], "image_tokens": [4]}},
        ...                         context_length=16)
        >>> len(buffer), buffer.meta["tokens"].tolist()
        (3, [5, 3, 9])
    """
    if not isinstance(sources, Mapping) or not all(isinstance(name, str) for name in sources):
        raise SpecError(
            f"summary_buffer: sources are {sources!r:.80}, not a mapping of names to lengths; nothing could be planned."
        )
    if metrics is not None and not (isinstance(metrics, Mapping) and all(map(is_finite, metrics.values()))):
        raise SpecError(
            f"summary_buffer: metrics are {metrics!r:.80}, not a mapping of names to finite numbers; no trainer could "
            "report that. Write them as in {'loss/web': 2.1}."
        )
    counts = {"context_length": context_length, "step": step}
    optional = {"microbatch_tokens": microbatch_tokens, "microbatches": microbatches}
    for name, value in (counts | {name: value for name, value in optional.items() if value is not None}).items():
        least = 0 if name == "step" else 1
        if not is_whole(value, least):
            raise SpecError(f"summary_buffer: {name} is {value!r:.80}; give a whole number of at least {least}.")
    parts = [_meta_of(name, given) for name, given in sources.items()]
    if not parts or not sum(map(len, parts)):
        raise SpecError("summary_buffer: there is no sample; nothing could be planned. Give lengths of some samples.")
    meta = np.concatenate(parts)
    source = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    shares = tuple(float(len(part)) for part in parts)
    limits = Limits(context_length, microbatch_tokens or context_length, microbatches)
    return Buffer(Draw(step, tuple(sources), source, meta, shares), limits, lambda: metrics or {})


def plan_raw(
    buffer: Buffer,
    tree: ClientPlaceTree,
    bucket: npt.ArrayLike,
    microbatch: npt.ArrayLike | None = None,
    *,
    axis: str = "DP",
    broadcast: Sequence[str] = (),
) -> LoadingPlan:
    """Make a plan from your own placement; it is checked like every other.

    Args:
        buffer: One step's draw.
        tree: The trainer's mesh.
        bucket: The bucket of each sample; of each piece, where samples are longer than the context.
        microbatch: The microbatch of each (default: all in one).
        axis: What the buckets are: "DP", or "WORLD" where that is the same.
        broadcast: Axes along which the trainer broadcasts.

    Example:
        >>> buffer = summary_buffer({"web": [5, 3, 4]}, context_length=16)
        >>> plan = plan_raw(buffer, ClientPlaceTree(dp=2), bucket=[1, 0, 1])
        >>> plan.bin(1, 0).length.tolist()
        [5, 4]
    """
    check_inputs("plan_raw", buffer, tree)
    broadcast = (broadcast,) if isinstance(broadcast, str) else broadcast
    if not isinstance(broadcast, Sequence) or not all(isinstance(name, str) for name in broadcast):
        raise SpecError(f"plan_raw: broadcast is {broadcast!r:.80}, not a list of axes. Write broadcast=('TP',).")
    pieces = context_pieces(buffer)
    buckets = _for_pieces("bucket", bucket, buffer, pieces, tree.num_buckets(axis))
    given = np.zeros(len(buffer), np.int64) if microbatch is None else microbatch
    # More microbatches than pieces would be empty, and a mistyped number would not fit into memory.
    microbatches = _for_pieces("microbatch", given, buffer, pieces, max(len(pieces), buffer.limits.microbatches or 1))
    count = buffer.limits.microbatches or int(microbatches.max(initial=0)) + 1
    if int(microbatches.max(initial=0)) >= count:
        raise SpecError(
            f"plan_raw: microbatch {int(microbatches.max())} is asked for, and batch.microbatches is {count}; its "
            "samples would be lost. Use 0 to one less."
        )
    multiple = 1 if buffer.limits.row_tokens else piece_multiple(buffer.limits.slicing, tree.cp)
    places = buckets * count + microbatches
    plan = lay_out(buffer.draw, pieces, places, tree.num_buckets(axis), count, pad_multiple=multiple)
    chosen = tuple(sorted({name.upper() for name in broadcast}))
    shape = shape_of(buffer.limits, tree, axis.upper())
    plan = dataclasses.replace(plan, axis=axis.upper(), broadcast=chosen, **shape)
    check_plan(plan, buffer, tree, "plan_raw")
    return plan


def loader_do_plan(plan: LoadingPlan, source: str | int) -> LoaderOrder:
    """Return the part of a plan for the loaders of one source: its samples in order, with planned lengths."""
    names = plan.draw.names
    if isinstance(source, str) and source not in names:
        raise SpecError(
            f"loader_do_plan: no source is called {source!r}; nothing would be read.{did_you_mean(source, list(names))}"
        )
    if not isinstance(source, (str, int)) or (isinstance(source, int) and not 0 <= source < len(names)):
        raise SpecError(f"loader_do_plan: source is {source!r:.80}; name one, or give its number below {len(names)}.")
    number = names.index(source) if isinstance(source, str) else source
    if plan.ends is not None:
        return plan.order_of(number)
    last = plan.draw.meta[plan.draw.samples_of(number)]
    end = Cursor(*(int(last[name][-1]) for name in Cursor._fields)) if len(last) else Cursor(0, 0, 0)
    return LoaderOrder(plan.step, number, last, end._replace(offset=end.offset + len(last[-1:])))


def constructor_do_plan(plan: LoadingPlan, bucket: int) -> list[Pieces]:
    """Return the part of a plan for the constructor of one bucket: the pieces of each microbatch, in order."""
    if not isinstance(bucket, (int, np.integer)) or not 0 <= bucket < plan.num_buckets:
        raise SpecError(
            f"constructor_do_plan: bucket {bucket} is not in the plan of {plan.num_buckets} buckets over {plan.axis}; "
            "no rank would consume it."
        )
    return [plan.bin(bucket, microbatch) for microbatch in range(int(plan.microbatch_counts[bucket]))]


def _meta_of(name: str, given: npt.ArrayLike | Columns) -> npt.NDArray[Any]:
    columns: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"tokens": given}
    unknown = [key for key in columns if key not in _GIVEN]
    if unknown or "tokens" not in columns:
        what = f"column {unknown[0]!r} is unknown" if unknown else "there is no column 'tokens'"
        raise SpecError(f"summary_buffer: source {name!r}: {what}. Columns: {', '.join(_GIVEN)}.")
    tokens = np.asarray(columns["tokens"])
    whole = tokens.ndim == 1 and (not len(tokens) or tokens.dtype.kind in "iu")
    if not whole or (len(tokens) and not (int(tokens.min()) >= 1 and int(tokens.max()) < 1 << 31)):
        raise SpecError(
            f"summary_buffer: source {name!r}: tokens must be a list of whole numbers from 1 to 2**31, or a sample "
            "would have no length."
        )
    meta = np.zeros(len(tokens), META)
    meta["row"] = meta["offset"] = np.arange(len(tokens))
    meta["loss_tokens"] = np.maximum(tokens - 1, 0)
    kinds: set[int] = set()
    for key, values in columns.items():
        column = np.asarray(values)
        if column.shape != tokens.shape or column.dtype.kind not in "iu" or int(column.min(initial=0)) < 0:
            raise SpecError(
                f"summary_buffer: source {name!r}: {key} must be a whole number of at least 0 for each of the "
                f"{len(tokens)} samples."
            )
        field, flag = _MEDIA.get(key, (key, 0))
        if field in ("images", "image_tokens"):
            kinds.add(flag)
        meta[field] = column
        meta["flags"] |= flag
    if len(kinds) > 1:
        raise SpecError(
            f"summary_buffer: source {name!r}: a sample holds images, clips or sounds, and columns of several are "
            "given; one would hide the other. Give them to sources of their own."
        )
    if bool((meta["image_tokens"] > meta["tokens"]).any()):
        raise SpecError(f"summary_buffer: source {name!r}: an image, clip or sound has more tokens than its sample.")
    return meta


def _for_pieces(what: str, given: npt.ArrayLike, buffer: Buffer, pieces: Pieces, below: int) -> npt.NDArray[np.int64]:
    values = np.asarray(given)
    if values.shape not in ((len(buffer),), (len(pieces),)) or values.dtype.kind not in "iu":
        raise SpecError(
            f"plan_raw: {what} has shape {values.shape} and type {values.dtype}; it must be a whole number for each of "
            f"the {len(buffer)} samples (or {len(pieces)} pieces), or some would have no place."
        )
    whole = values.astype(np.int64)
    placed = whole if len(whole) == len(pieces) else whole[pieces.sample]
    if len(placed) and not 0 <= int(placed.min()) <= int(placed.max()) < below:
        wrong = int(placed.min()) if int(placed.min()) < 0 else int(placed.max())
        raise SpecError(f"plan_raw: {what} {wrong} does not exist; its samples would be lost. Use 0 to {below - 1}.")
    return placed
