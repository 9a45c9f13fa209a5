"""Placement of images, clips and sounds on the ranks that encode them, and the routes of their tokens to the backbone.

The backbone is planned first (its cost includes their tokens), which gives every item a destination. An image then
goes to the least loaded rank, or to a rank of its destination if that is hardly more loaded; so do clips and sounds.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Limits, Pieces
from overlord.core.kernels import kernel
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import ENCODED_BY, LoadingPlan, Routing, order_in_bins
from overlord.errors import PlanError, SpecError
from overlord.planning.balancing.balance import Method, balance, place

NEAR = 50
"""A rank of the destination is taken if its load exceeds the least loaded rank by at most 1/50 of an even share."""

Int64s = npt.NDArray[np.int64]
Scope = Literal["world", "group"]


def place_images(
    items: Pieces,
    costs: Int64s,
    num_ranks: int,
    method: Method,
    tree: ClientPlaceTree,
    owner: LoadingPlan | None,
    scope: Scope,
    group_size: int | None = None,
) -> Int64s:
    """Return the encoder rank of every image, clip or sound (or run of one)."""
    if owner is None and group_size is None:
        return balance(costs, num_ranks, method=method)
    if owner is None:
        room = np.zeros(len(costs), np.int64)
        places = place(costs, room, num_ranks, 1, 0, method=method, objective="sum", group_size=group_size)
        assert places is not None  # what takes no room fits
        return places
    if group_size is not None:
        raise SpecError(
            f"balance: group_size is {group_size}, and media that are kept near their tokens go to any rank; it would "
            "be ignored. Leave group_size or toward() out."
        )
    if method != "greedy" or num_ranks != tree.world_size:
        raise SpecError(
            f"balance: method is {method!r:.80} over {num_ranks} buckets, and images, clips and sounds are kept near "
            "their tokens by the greedy method over WORLD only; others ignore the destination. Use balance('greedy') "
            "after distribute(axis='WORLD'), or leave toward() out."
        )
    bucket = _destinations(owner, items)["bucket"]
    group = tree.buckets_of("DP")
    ranks = np.argsort(group, kind="stable").astype(np.int64)
    offsets = np.searchsorted(group[ranks], np.arange(tree.dp + 1)).astype(np.int64)
    order = np.argsort(-costs, kind="stable")
    near = int(costs.sum()) // (NEAR * num_ranks) if scope == "world" else -1
    return _near_owner(costs, order, bucket.astype(np.int64), ranks, offsets, num_ranks, near)


def split_images(items: Pieces, costs: Int64s, num_ranks: int, parts: npt.ArrayLike | None) -> tuple[Pieces, Int64s]:
    """Cut images into runs: so many each, or as many as bring each below an even share of the ranks."""
    if parts is None:
        even = max(1, -(-int(costs.sum()) // num_ranks))
        wanted = np.minimum(-(-costs // even), num_ranks)
    else:
        given = np.asarray(parts)
        if given.dtype.kind not in "iu" or given.shape not in ((), costs.shape) or int(given.min(initial=1)) < 1:
            raise SpecError(
                f"split: parts is {parts!r:.80}; an image in no part is lost. Give a whole number of at least 1, or "
                f"one for each of the {len(costs)} images."
            )
        wanted = np.broadcast_to(given.astype(np.int64), costs.shape)
    count = np.clip(wanted, 1, np.maximum(items.length.astype(np.int64), 1))
    index = np.repeat(np.arange(len(items)), count)
    number = np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    length, of = items.length[index].astype(np.int64), count[index]
    begin, end = number * length // of, (number + 1) * length // of
    pieces = Pieces(
        items.sample[index],
        (items.start[index] + begin).astype(np.int32),
        (end - begin).astype(np.int32),
    )
    return pieces, -(-costs[index] // of)


def join_encoder(
    backbone: LoadingPlan, name: str, encoder: LoadingPlan, tree: ClientPlaceTree, limits: Limits
) -> LoadingPlan:
    """Return the backbone's plan with the plan of an encoder ("encoder", "audio_encoder") and the routes between them.

    Every rank encodes its items in the order in which it sends their tokens: by destination, then by place there.
    """
    audio = name == "audio_encoder"
    if backbone.modality != "tokens" or encoder.modality not in (("audio",) if audio else ("images", "videos")):
        raise PlanError(
            f"the plans of 'backbone' and {name!r} are of {backbone.modality!r} and {encoder.modality!r}; the backbone "
            "takes tokens, the encoder images and the audio_encoder sounds. Return {'backbone': plan of tokens, "
            "'encoder': plan of images, 'audio_encoder': plan of audio}."
        )
    if backbone.axis != "DP" or encoder.num_buckets != tree.world_size or encoder.num_microbatches != 1:
        raise PlanError(
            f"the tokens are distributed over {backbone.axis} and the {ENCODED_BY[name]} over {encoder.axis} in "
            f"{encoder.num_microbatches} microbatches; routes exist from one microbatch over WORLD to tokens over DP. "
            f"Use distribute(axis='WORLD') for the {ENCODED_BY[name]} and 'DP' for the tokens."
        )
    found, heads = _destinations(backbone, encoder.pieces), _first_stage(tree)[:, 0, 0]
    order = np.lexsort((found["position"], found["microbatch"], heads[found["bucket"]], encoder.buckets))
    encoder = dataclasses.replace(encoder, pieces=encoder.pieces.take(order))
    found = {name: values[order] for name, values in found.items()}
    routing = _route(backbone, encoder, found, tree, limits.frames_per_token if audio else limits.patches_per_token)
    if audio:
        return dataclasses.replace(backbone, audio_encoder=encoder, audio_routing=routing)
    return dataclasses.replace(backbone, encoder=encoder, routing=routing)


def _route(
    backbone: LoadingPlan, encoder: LoadingPlan, found: dict[str, Int64s], tree: ClientPlaceTree, per_token: int
) -> Routing:
    """Return the routes of all media tokens from the ranks that encode them to those that need them.

    `found` are the destinations of the encoder's pieces, which are sorted by sender, destination and place there.

    The first pipeline stage receives. Along TP and CP it follows the backbone's `broadcast_at`: with it the
    first rank gets everything; without it every TP rank gets a copy, and every CP rank the tokens of its slice. Ranks
    along DP have different tokens, so each gets its own rows, also where the trainer broadcasts the tokens along DP.
    """
    images = encoder.pieces
    length = images.length.astype(np.int64)
    sent = np.cumsum(length) - length
    begins = encoder.bin_offsets[:: encoder.num_microbatches]
    unit, size = found.pop("unit"), found.pop("size")
    columns = {
        **found,
        "sender": encoder.buckets.astype(np.int64),
        "length": length,
        "sample": images.sample.astype(np.int64),
        "start": images.start.astype(np.int64),
        "row": sent - np.append(sent, 0)[begins[:-1]][encoder.buckets],
        "cp": np.zeros(len(length), np.int64),
    }
    if tree.cp > 1 and backbone.slicing == "whole" and "CP" not in backbone.broadcast:
        count = len(columns["cp"])
        columns = {name: np.repeat(values, tree.cp) for name, values in columns.items()}  # each rank gets all of them
        columns["cp"] = np.tile(np.arange(tree.cp), count)
    elif tree.cp > 1 and "CP" not in backbone.broadcast:
        columns = _cut_for_slices(columns, unit, size, tree.cp, mirrored=backbone.slicing != "contiguous")
    copies = 1 if "TP" in backbone.broadcast else tree.tp
    ranks = _first_stage(tree)
    receiver = ranks[columns["bucket"], columns["cp"]][:, :copies].reshape(-1)
    # Profiled: sorting millions of routes by four keys was half of a plan. Those of one sender to one receiver go to
    # one bucket, so they are in the order of its microbatches and positions already, also where slices cut them.
    order = order_in_bins(receiver)
    order = order[order_in_bins(np.repeat(columns["sender"], copies)[order])]
    names, which = ("sender", "microbatch", "position", "length", "sample", "start", "row"), order // copies
    routes = {name: columns[name].astype(np.int32)[which] for name in names}
    routes["receiver"] = receiver.astype(np.int32)[order]
    return Routing(tree.world_size, **routes, heads=ranks[:, :, 0].copy(), images=(length * per_token, begins))


def _destinations(backbone: LoadingPlan, images: Pieces) -> dict[str, Int64s]:
    """Return where the tokens of images (or runs of them) go: bucket, microbatch and position in its sequence.

    Also the unit that context-parallel ranks cut there (a segment, a row or the whole sequence): its begin and size.
    """
    # Pieces are found by the sorted key (sample, first token): the last piece that begins at or before the first token
    # of an image holds it, if it is of the same sample and reaches beyond that token.
    draw, pieces = backbone.draw, backbone.pieces
    image, first = draw.media_at(images.sample, images.start)
    token = draw.media.start[image] + images.start.astype(np.int64) - first if len(image) else image
    keys = (pieces.sample.astype(np.int64) << 32) + pieces.start
    order = np.argsort(keys, kind="stable")
    wanted = (images.sample.astype(np.int64) << 32) + token
    at = order[np.maximum(np.searchsorted(keys[order], wanted, side="right") - 1, 0)] if len(keys) else wanted
    ends = pieces.start[at] + pieces.length[at] if len(keys) else wanted
    held = (pieces.sample[at] == images.sample) & (ends > token) if len(keys) else wanted < 0
    if not held.all():
        lost = int(images.sample[np.argmin(held)])
        raise PlanError(
            f"step {backbone.step}: sample {draw.sample_id(lost)} has media and no place in the backbone's plan; "
            "its tokens would be lost. Let the plan of tokens hold every sample of the buffer."
        )
    bins = np.repeat(np.arange(len(backbone.bin_offsets) - 1), np.diff(backbone.bin_offsets))
    room = backbone.in_batch
    behind = np.cumsum(room) - room
    inside = (behind - behind[backbone.bin_offsets[bins]])[at] if len(bins) else at
    totals = np.bincount(bins, room, len(backbone.bin_offsets)).astype(np.int64)
    whole = backbone.slicing != "zigzag" and not backbone.row_tokens
    return {
        "bucket": bins[at] // backbone.num_microbatches,
        "microbatch": bins[at] % backbone.num_microbatches,
        "position": inside + token - pieces.start[at],
        "unit": np.zeros(len(at), np.int64) if whole else inside,
        "size": totals[bins[at]] if whole else room[at],
    }


def _cut_for_slices(
    columns: dict[str, Int64s], unit: Int64s, size_of: Int64s, cp: int, *, mirrored: bool
) -> dict[str, Int64s]:
    """Cut runs at the borders of the slices of context-parallel ranks; positions become positions in the slice.

    Mirrored: a unit is 2 * cp chunks, and rank r holds chunks r and 2 * cp - 1 - r, the second behind the first.
    """
    chunks = 2 * cp if mirrored else cp
    chunk = np.maximum(size_of // chunks, 1)
    begin = columns["position"] - unit
    first, last = begin // chunk, (begin + np.maximum(columns["length"], 1) - 1) // chunk
    count = last - first + 1
    index = np.repeat(np.arange(len(count)), count)
    number = first[index] + np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)
    size = chunk[index]
    low = np.maximum(begin[index], number * size)
    high = np.minimum(begin[index] + columns["length"][index], (number + 1) * size)
    back = number >= cp
    cut = {name: values[index] for name, values in columns.items()}
    cut["cp"] = np.where(back, 2 * cp - 1 - number, number)
    cut["position"] = unit[index] // cp + np.where(back, size, 0) + low - number * size
    cut["length"] = high - low
    for name in ("start", "row"):
        cut[name] = cut[name] + low - begin[index]
    return cut


def _first_stage(tree: ClientPlaceTree) -> Int64s:
    """Return the ranks of the first pipeline stage as [dp, cp, tp]."""
    at = tree.coordinates()
    ranks = np.empty((tree.dp, tree.cp, tree.tp), np.int64)
    mine = np.flatnonzero(at["pp"] == 0)
    ranks[at["dp"][mine], at["cp"][mine], at["tp"][mine]] = mine
    return ranks


@kernel
def _near_owner(
    costs: Int64s, order: Int64s, bucket: Int64s, ranks: Int64s, offsets: Int64s, num_ranks: int, near: int
) -> Int64s:
    """Place largest first: on the least loaded rank of the owner, or of all ranks if that has more than `near` less.

    A negative `near` always takes a rank of the owner.
    """
    width = 1
    while width < num_ranks:
        width *= 2
    # A tournament tree over the ranks: the root is the least loaded one, the lower rank at a tie.
    winner = np.empty(2 * width, np.int64)
    load = np.zeros(num_ranks, np.int64)
    for i in range(width):
        winner[width + i] = i if i < num_ranks else -1
    for i in range(width - 1, 0, -1):
        left, right = winner[2 * i], winner[2 * i + 1]
        winner[i] = left if left >= 0 else right
    out = np.empty(len(costs), np.int64)
    for item in order:
        best = ranks[offsets[bucket[item]]]
        for at in range(offsets[bucket[item]], offsets[bucket[item] + 1]):
            if load[ranks[at]] < load[best]:
                best = ranks[at]
        if near >= 0 and load[best] > load[winner[1]] + near:
            best = winner[1]
        out[item] = best
        load[best] += costs[item]
        i = (width + best) // 2
        while i >= 1:
            left, right = winner[2 * i], winner[2 * i + 1]
            winner[i] = right if left < 0 or (right >= 0 and load[right] < load[left]) else left
            i //= 2
    return out
