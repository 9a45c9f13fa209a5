"""Checks a plan against its draw: nothing lost, duplicated or too large. Every plan is checked, of any strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from overlord.core.client_messages import MILLION
from overlord.core.draw import Buffer, Limits, Pieces, context_pieces
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import ENCODED_BY, LoadingPlan, tokens_on_device
from overlord.core.samples import PLAIN
from overlord.errors import OverlordError, PlanError, SpecError
from overlord.job.layout_specs import piece_multiple, shape_of
from overlord.planning.encoder import join_encoder

Strategy = Callable[[Buffer, ClientPlaceTree], LoadingPlan | Mapping[str, LoadingPlan]]
"""Decides where every sample of a step goes: one plan, or one for each module ("backbone", "encoder")."""


class _Wrong(Exception):
    """Two texts: what is wrong with a plan, and what to do."""


def check_inputs(where: str, buffer: object, tree: object) -> None:
    """Raise SpecError where a planning function did not get the buffer and the tree of a strategy."""
    if not isinstance(buffer, Buffer) or not isinstance(tree, ClientPlaceTree):
        raise SpecError(
            f"{where}: got {type(buffer).__name__} and {type(tree).__name__}; nothing could be placed. Pass the buffer "
            "and the tree that the strategy was called with."
        )


def run_strategy(strategy: Strategy, buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
    """Call a strategy, check the plan that it returns, and set the plan's mesh.

    Raises:
        PlanError: when the strategy fails, or its plan loses, duplicates or overfills something.
    """
    name = getattr(strategy, "__name__", type(strategy).__name__)
    try:
        made: Any = strategy(buffer, tree)
        plan = _counted(_joined(made, name, tree, buffer.limits), buffer)
    except OverlordError:
        raise
    except (Exception, SystemExit) as error:  # code of the user may raise anything
        raise PlanError(
            f"the strategy {name} failed at step {buffer.step}: {type(error).__name__}: {error}{_where(error)}. Fix "
            "it (runtime='inline' shows the whole traceback), or launch with one of ol.strategies."
        ) from error
    check_plan(plan, buffer, tree, name)
    return plan.on(tree)


def _counted(plan: LoadingPlan, buffer: Buffer) -> LoadingPlan:
    """Set `context_cuts` in a plan that cuts samples: the metadata accounts for these, a further cut costs a label."""
    if not isinstance(plan.pieces, Pieces) or not len(plan.pieces) or not plan.pieces.start.any():
        return plan
    return dataclasses.replace(plan, context_cuts=len(context_pieces(buffer)) - len(buffer))


def _where(error: BaseException) -> str:
    """Return the innermost line of an error, as (file:line)."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else f" ({frame.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno})"


def check_plan(plan: LoadingPlan, buffer: Buffer, tree: ClientPlaceTree, name: str = "plan") -> None:
    """Raise PlanError where a plan does not carry every sample of the buffer to a rank, once."""
    try:
        encoders = {field: encoder for field, (encoder, _) in plan.encoders.items()}
        for one in (plan, *encoders.values()):
            if one.draw is not buffer.draw:
                raise _Wrong("it is a plan of another draw", "Plan the buffer the strategy is called with")
        if plan.modality != "tokens":
            raise _Wrong(
                f"it is a plan of {plan.modality}", "Return a plan of tokens, or {'backbone': .., 'encoder': ..}"
            )
        _check_form(plan)
        _check_mesh(plan, tree, buffer.limits)
        _check_pieces(plan, buffer.draw.tokens, buffer)
        if plan.cp_sizes is not None or plan.first_ranks is not None:
            _check_blocks(plan)
        if plan.offload is not None:
            _check_offload(plan)
        _check_room(plan, buffer, tree)
        for field, encoder in encoders.items():
            _check_form(encoder)
            taken = buffer.draw.samples_with(ENCODED_BY[field])
            _check_pieces(encoder, np.where(taken, buffer.meta["image_tokens"], 0), buffer)
    except _Wrong as wrong:
        what, remedy = wrong.args
        raise PlanError(f"the strategy {name} made a wrong plan of step {buffer.step}: {what}. {remedy}.") from None


def _joined(made: Any, name: str, tree: ClientPlaceTree, limits: Limits) -> LoadingPlan:
    if isinstance(made, LoadingPlan):
        return made
    named = isinstance(made, Mapping) and "backbone" in made and set(made) <= {"backbone", *ENCODED_BY}
    if named and all(isinstance(plan, LoadingPlan) for plan in made.values()):
        joined: LoadingPlan = made["backbone"]
        for field in ENCODED_BY:
            joined = join_encoder(joined, field, made[field], tree, limits) if field in made else joined
        return joined
    shown = f"a mapping of {', '.join(map(str, made))}" if isinstance(made, Mapping) else type(made).__name__
    raise PlanError(
        f"the strategy {name} returned {shown}, not a plan; no rank would know what to load. Return graph.plan(), or "
        "{'backbone': .., 'encoder': .., 'audio_encoder': ..} with several of them."
    )


def _check_form(plan: LoadingPlan) -> None:
    """Check types, shapes and offsets, so that no kernel reads outside its arrays."""
    remedy = "Make plans by graph.plan() or ol.plan_raw()"
    for number in (plan.num_buckets, plan.num_microbatches, plan.pad_multiple):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise _Wrong(f"{number!r} is not a number of buckets, microbatches or a multiple", remedy)
    pieces, count = plan.pieces, plan.num_buckets * plan.num_microbatches
    columns: dict[str, Any] = {"sample": pieces.sample, "start": pieces.start, "length": pieces.length}
    columns |= {n: getattr(plan, n) for n in ("cp_sizes", "first_ranks") if getattr(plan, n) is not None}
    for column, values in columns.items():
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.shape != (len(pieces.sample),):
            raise _Wrong(f"its column {column} is not one whole number for each piece", remedy)
    offsets = plan.bin_offsets
    if not isinstance(offsets, np.ndarray) or offsets.dtype.kind not in "iu" or offsets.shape != (count + 1,):
        raise _Wrong(f"its bin_offsets are not {count + 1} whole numbers", remedy)
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(pieces) or bool((np.diff(offsets) < 0).any()):
        raise _Wrong("its bin_offsets do not cut the pieces from the first to the last; some are lost", remedy)
    if plan.counts is not None:
        counts = plan.counts
        if not isinstance(counts, np.ndarray) or counts.shape != (plan.num_buckets,) or counts.dtype.kind not in "iu":
            raise _Wrong("its counts are not one whole number for each bucket", remedy)
        filled = np.diff(offsets).reshape(plan.num_buckets, -1) > 0
        last = np.where(filled.any(axis=1), plan.num_microbatches - np.argmax(filled[:, ::-1], axis=1), 0)
        if bool((counts < last).any()) or int(counts.max(initial=0)) > plan.num_microbatches:
            raise _Wrong("its counts leave out microbatches that hold pieces", remedy)


def _check_mesh(plan: LoadingPlan, tree: ClientPlaceTree, limits: Limits) -> None:
    if plan.axis not in ("DP", "CP", "WORLD") or plan.num_buckets != tree.num_buckets(plan.axis):
        raise _Wrong(
            f"it has {plan.num_buckets} buckets over {plan.axis}, which the mesh {tree} does not have",
            "Distribute tokens over 'DP' or 'CP' of the tree the strategy is called with",
        )
    if plan.axis == "WORLD" and plan.num_buckets != tree.dp:
        raise _Wrong(f"over {plan.axis} ranks that need the same tokens would get different ones", "Distribute over DP")
    for axis in plan.broadcast:
        if axis not in ("TP", "CP", "DP"):
            raise _Wrong(f"broadcast along {axis!r} would leave ranks without samples", "Broadcast along TP, CP or DP")
    shape = {"slicing": "zigzag", "bin_multiple": 1, "row_tokens": 0} | shape_of(limits, tree, plan.axis)
    if {name: getattr(plan, name) for name in shape} != shape:
        raise _Wrong(
            "its microbatches have another shape than the layout asks for",
            "Make plans by graph.plan() or ol.plan_raw()",
        )
    needed = 1 if plan.row_tokens or plan.axis == "CP" else piece_multiple(plan.slicing, tree.cp)
    if plan.pad_multiple % needed:
        raise _Wrong(
            f"its pad_multiple is {plan.pad_multiple}, and {tree.cp} context-parallel ranks cut a sequence into "
            f"{needed}",
            f"Use a multiple of {needed}",
        )
    multiple = tree.microbatch_multiple
    odd = [count for count in (plan.num_microbatches, *plan.microbatch_counts.tolist()) if count % multiple]
    if odd:
        raise _Wrong(
            f"it has {odd[0]} microbatches, and the virtual pipeline takes them in groups of {multiple}",
            f"Use a multiple of {multiple}",
        )
    if tree.is_lockstep and plan.counts is not None and len(set(plan.counts.tolist())) > 1:
        raise _Wrong(
            "its ranks have different numbers of microbatches, and expert parallelism waits for all",
            "Use equal_counts=True",
        )


def _check_pieces(plan: LoadingPlan, wanted: Any, buffer: Buffer) -> None:
    pieces = plan.pieces
    keep = slice(None) if plan.first_ranks is None else plan.first_ranks == plan.buckets
    sample, start, length = pieces.sample[keep], pieces.start[keep].astype(np.int64), pieces.length[keep]
    if len(sample) and not (int(sample.min()) >= 0 and int(sample.max()) < len(wanted)):
        raise _Wrong("it names samples that were not drawn", "Use indices into the buffer")
    if len(length) and int(length.min()) < 1:
        raise _Wrong("a piece has no length", "Leave out what is empty")
    if plan.modality == "tokens" and int(length.max(initial=0)) > buffer.limits.context_length:
        raise _Wrong(
            f"a piece of {int(length.max())} tokens is longer than the context of {buffer.limits.context_length}",
            "Cut samples as DGraph.from_buffer does",
        )
    if len(plan.pieces) == len(wanted) and (plan.modality == "tokens" or bool(wanted.all())) and _each_once(plan):
        return  # no sample is cut, as in most steps: this check is much cheaper
    # Sums of lengths show lost and duplicated tokens. Pieces that overlap and still sum up are found by sorting.
    got = np.bincount(sample, length, len(wanted)).astype(np.int64)
    differing = np.flatnonzero(got != wanted)
    if len(differing):
        at = int(differing[0])
        what = "lost" if got[at] < wanted[at] else "doubled"
        raise _Wrong(
            f"{len(differing)} samples are {what} in part or whole, the first is {buffer.draw.sample_id(at)} with "
            f"{int(got[at])} of {int(wanted[at])} {plan.modality}",
            "Let every item of the graph go through balance() and plan()",
        )
    if plan.modality == "tokens":
        _check_cuts(sample, start, buffer)
    several = np.flatnonzero((start > 0) | (length != wanted[sample]))
    order = several[np.lexsort((start[several], sample[several]))]
    s, begin, end = sample[order], start[order], start[order] + length[order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = s[1:] != s[:-1]
    if not np.array_equal(begin, np.where(fresh, 0, np.concatenate([[0], end[:-1]])[: len(order)])):
        raise _Wrong("pieces of one sample overlap", "Cut samples into pieces that follow each other")


def _check_cuts(sample: Any, start: Any, buffer: Buffer) -> None:
    """Refuse cuts elsewhere than at the context length, except in PLAIN samples: there a cut costs one label."""
    cut = start > 0
    if not cut.any():
        return
    usual = context_pieces(buffer)
    keys = (usual.sample.astype(np.int64) << 32) + usual.start
    fresh = ~np.isin((sample[cut].astype(np.int64) << 32) + start[cut], keys)
    wrong = sample[cut][fresh & (buffer.meta["flags"][sample[cut]] & PLAIN == 0)]
    if len(wrong):
        raise _Wrong(
            f"it cuts {buffer.draw.sample_id(int(wrong[0]))} elsewhere than at the context length, and that sample has "
            "images or a loss mask, so that the number of labels left is unknown",
            "Cut only samples that have PLAIN in meta['flags']",
        )


def _each_once(plan: LoadingPlan) -> bool:
    seen = np.zeros(len(plan.draw), bool)
    seen[plan.pieces.sample] = True
    return bool(seen.all()) and not plan.pieces.start.any() and np.array_equal(plan.drawn_lengths, plan.pieces.length)


def _check_blocks(plan: LoadingPlan) -> None:
    """Check hybrid data parallelism: blocks of neighbouring ranks, all with the same pieces."""
    remedy = "Make such plans by distribute(axis='CP') and balance()"
    if plan.axis != "CP" or plan.cp_sizes is None or plan.first_ranks is None:
        raise _Wrong("cp_sizes and first_ranks belong together, and to a plan over CP", remedy)
    size, first, bucket = plan.cp_sizes.astype(np.int64), plan.first_ranks.astype(np.int64), plan.buckets
    if len(size) and (int(size.min()) < 1 or int(first.min()) < 0 or int((first + size).max()) > plan.num_buckets):
        raise _Wrong("a block has ranks that the mesh does not have", remedy)
    if bool(((bucket < first) | (bucket >= first + size)).any()):
        raise _Wrong("a rank lists a piece that belongs to another block", remedy)
    bins = np.repeat(np.arange(len(plan.bin_offsets) - 1), np.diff(plan.bin_offsets))
    begin = plan.bin_offsets[bins]
    if bool((size != size[begin]).any() or (first != first[begin]).any()):
        raise _Wrong("a microbatch mixes blocks", remedy)
    # Every rank of a block must have the same pieces in its k-th bin as the first rank of the block.
    microbatch, place = bins % plan.num_microbatches, np.arange(len(bins)) - begin
    leader = plan.bin_offsets[first * plan.num_microbatches + microbatch] + place
    sizes = np.diff(plan.bin_offsets)
    same = sizes[bins] == sizes[first * plan.num_microbatches + microbatch]
    if not bool(same.all()) or any(
        not np.array_equal(c[leader], c) for c in (plan.pieces.sample, plan.pieces.start, plan.pieces.length, size)
    ):
        raise _Wrong("the ranks of a block list different pieces", remedy)
    leaders = np.flatnonzero(bucket == first)
    if int(size[leaders].sum()) != len(size):
        raise _Wrong("a rank of a block does not list its piece", remedy)


def _check_offload(plan: LoadingPlan) -> None:
    """Check the shares of activations that wait on the host: one of each microbatch, alike on the ranks of a block."""
    remedy = "Make such plans by balance(offload=..)"
    shares, layers = plan.offload, plan.offload_layers
    bins = (len(plan.bin_offsets) - 1,)
    if not isinstance(shares, np.ndarray) or shares.dtype.kind not in "iu" or shares.shape != bins:
        raise _Wrong("its column offload is not one whole number for each microbatch", remedy)
    if int(shares.min(initial=0)) < 0 or int(shares.max(initial=0)) > MILLION or layers < 1 or plan.first_ranks is None:
        raise _Wrong("its column offload has no shares in millionths of the activations of some layers", remedy)
    filled = np.flatnonzero(np.diff(plan.bin_offsets))
    first = plan.first_ranks[plan.bin_offsets[filled]].astype(np.int64)
    if not np.array_equal(shares[first * plan.num_microbatches + filled % plan.num_microbatches], shares[filled]):
        raise _Wrong("the ranks of a block keep different shares of a microbatch on the host", remedy)


def _tokens_on_rank(plan: LoadingPlan) -> Any:
    """Return the tokens that a rank holds in each microbatch, less what waits on the host."""
    if plan.cp_sizes is None:
        return plan.loads(plan.padded)
    held = plan.loads(plan.padded // plan.cp_sizes).reshape(-1)
    if plan.offload is not None:
        some = np.flatnonzero((plan.offload > 0) & (np.diff(plan.bin_offsets) > 0))
        tokens = plan.loads(plan.pieces.length.astype(np.int64)).reshape(-1)[some]
        kept = tokens_on_device(tokens, plan.offload[some], plan.offload_layers)
        held[some] = -(-kept // plan.cp_sizes[plan.bin_offsets[some]])
    return held


def _check_room(plan: LoadingPlan, buffer: Buffer, tree: ClientPlaceTree) -> None:
    limits = buffer.limits
    cap = limits.microbatch_tokens // (tree.cp if plan.axis == "CP" else 1)
    fullest = int(_tokens_on_rank(plan).max(initial=0))
    if fullest > cap:
        raise _Wrong(
            f"a microbatch holds {fullest} tokens where batch.microbatch_tokens allows {cap}; a rank would run out of "
            "memory",
            "Balance under the capacity, or raise batch.microbatch_tokens",
        )
    if limits.microbatches is not None and plan.num_microbatches != limits.microbatches:
        raise _Wrong(
            f"it has {plan.num_microbatches} microbatches where batch.microbatches is {limits.microbatches}",
            "Use that number, or leave batch.microbatches out",
        )
