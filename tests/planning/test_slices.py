"""Slices of a plan: each host reads its own, and finds there what the whole plan says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import slice_indices
from tests.planning.test_dgraph import ALL, meshes

import overlord as ol
from overlord.core.draw import Draw, Pieces
from overlord.core.place_tree import ranks_of_host
from overlord.core.plan import PlanSlice, Share, known_early, plan_from_bytes, plan_to_bytes
from overlord.core.ragged import Ragged, expand_ranges, offsets_of
from overlord.core.samples import META
from overlord.planning.checking import run_strategy

HOSTS = 3
_HIDDEN = ol.costs.Offload(4, act_bytes_per_token=1, bandwidth=1e9, time=ol.costs.CostModel(0, 1e-6))
STRATEGIES = ALL | {
    "vlm audio": ol.strategies.vlm_hybrid(audio=ol.costs.tokens),
    "hdp offload": ol.strategies.hdp(offload=_HIDDEN),
    "whole": ol.strategies.backbone_balance(broadcast=["CP"]),
}


@pytest.mark.parametrize(
    "name", ["backbone", "long_short", "vlm", "vlm group", "vlm audio", "hdp offload", "hdp equal", "whole"]
)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    st.lists(st.integers(1, 900), min_size=1, max_size=12),
    st.lists(st.integers(1, 900), min_size=1, max_size=12),
    meshes,
    st.sampled_from(["zigzag", "whole_zigzag", "contiguous"]),
    st.sampled_from([1, 8]),
)
def test_a_slice_says_what_the_plan_says(name, lengths, images, sounds, tree, slicing, multiple):
    sources = {"said": {"tokens": np.add(sounds, 5), "audio_tokens": sounds, "sounds": np.ones(len(sounds), int)}}
    sources |= {"web": lengths}
    sources |= {"coyo": {"tokens": np.add(images, 5), "image_tokens": images, "images": np.ones(len(images), int)}}
    buffer = ol.summary_buffer(sources, context_length=1024, microbatch_tokens=2048)
    limits = dataclasses.replace(buffer.limits, slicing=slicing, rank_multiple=multiple)
    buffer = dataclasses.replace(buffer, limits=limits)
    plan = run_strategy(STRATEGIES[name], buffer, tree).with_ends(np.arange(9).reshape(3, 3))
    for _, routing in plan.encoders.values():
        keys = (routing.position, routing.microbatch, routing.receiver, routing.sender)
        assert np.array_equal(np.lexsort(keys), np.arange(len(routing.sender))), "routes are sorted by all four"
    sources = [plan_from_bytes(plan_to_bytes(plan, PlanSlice.for_sources(plan, [source]))) for source in range(3)]
    for host in range(HOSTS):
        ranks = ranks_of_host(host, HOSTS, tree.world_size)
        check_routes(plan, ranks)
        part = plan_from_bytes(plan_to_bytes(plan, PlanSlice.for_ranks(plan, ranks)))
        assert (part.digest, part.draw.digest, part.mesh) == (plan.digest, plan.draw.digest, plan.mesh)
        assert part.covers(ranks) and (part.covers(range(tree.world_size)) == (len(ranks) == tree.world_size))
        for mine, whole in zip(part.drawn, plan.drawn, strict=True):
            assert np.array_equal(mine, whole)
        share = Share.of(plan, ranks)
        check_share(Share.of(part, ranks), share)
        check_runs(share, ranks)
        for rank in ranks:
            check_rank(part, plan, rank)
        for source, loader in enumerate(sources):
            check_loader(loader, plan, source, share, Share.of(loader, ranks))


@given(st.lists(st.integers(0, 4), max_size=40))
def test_the_metadata_of_a_source_is_that_of_its_samples_in_drawing_order(source):
    meta = np.zeros(len(source), META)
    meta["row"], meta["items"] = np.arange(len(source)), np.arange(len(source)) * 7
    draw = Draw(0, tuple("abcde"), np.array(source, np.int32), meta, (1.0,) * 5)
    for number in range(5):
        assert draw.meta_of(number).tolist() == meta[np.array(source, np.int32) == number].tolist()


def check_routes(plan, ranks):
    """A slice has the routes that begin or end at a rank of the host, or at a head of one of its buckets."""
    found = PlanSlice.for_ranks(plan, ranks).routes
    mine = [plan.mesh.bucket_of(plan.axis, rank) for rank in ranks]
    mine += [bucket for rank in ranks for bucket in plan.mesh.fetched_buckets(plan.axis, rank, plan.broadcast)]
    for name, (_, routing) in plan.encoders.items():
        ends = [*ranks, *routing.heads[mine].ravel()]
        wanted = np.flatnonzero(np.isin(routing.sender, ends) | np.isin(routing.receiver, ends))
        assert np.array_equal(found[name], wanted)


def check_share(found, expected):
    for field in dataclasses.fields(Share):
        mine, whole = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(whole, Pieces):
            mine, whole = dataclasses.astuple(mine), dataclasses.astuple(whole)
        assert field.name == "plan" or np.array_equal(mine, whole), field.name


def check_runs(share, ranks):
    """A share has the tokens that are in the slices of its ranks, the loss also the one behind each; no other."""
    plan, tree = share.plan, share.plan.mesh
    if share.whole:
        return
    offsets = offsets_of(plan.draw.meta["tokens"].astype(np.int64))
    tokens, loss = np.zeros((2, int(offsets[-1])), np.bool_)
    for rank in ranks:
        at, bucket = tree.coords(rank), tree.bucket_of(plan.axis, rank)
        for microbatch in range(plan.num_microbatches if tree.fetches(rank, plan.broadcast) else 0):
            chosen = plan.bin_range(bucket, microbatch)
            pieces = plan.pieces.take(chosen)
            if not len(pieces):
                continue
            of, part = (1, 0) if plan.axis == "CP" or "CP" in plan.broadcast else (tree.cp, at.cp)
            if plan.cp_sizes is not None:
                of, part = int(plan.cp_sizes[chosen.start]), bucket - int(plan.first_ranks[chosen.start])
            cu = offsets_of(plan.in_batch[chosen])
            where = np.arange(cu[-1]) if of == 1 else slice_indices(cu, of, part, plan.slicing)
            segment = np.searchsorted(cu, where, side="right") - 1
            for mask, behind in ((tokens, 0), (tokens, 1), (loss, 0), (loss, 1)):
                inside = where - cu[segment] + behind
                here = segment[inside < pieces.length[segment]]
                place = offsets[pieces.sample[here]] + pieces.start[here] + inside[inside < pieces.length[segment]]
                mask[place] |= at.pp == tree.pp - 1 or (at.pp == 0 and mask is tokens and not behind)
    for mask, runs in ((tokens, share.tokens), (loss, share.loss)):
        found = np.zeros(len(mask), np.int64)
        np.add.at(found, expand_ranges(offsets[runs.sample] + runs.start, runs.length.astype(np.int64)), 1)
        assert np.array_equal(found, mask.astype(np.int64))
        assert not ((runs.start[1:] <= runs.start[:-1] + runs.length[:-1]) & (np.diff(runs.sample) == 0)).any()


def check_rank(part, plan, rank):
    bucket = plan.mesh.bucket_of(plan.axis, rank)
    assert part.microbatch_counts[bucket] == plan.microbatch_counts[bucket]
    early = known_early(plan), known_early(part)
    for microbatch in range(plan.num_microbatches):
        at = plan.bin_range(bucket, microbatch)
        assert part.bin_range(bucket, microbatch) == at
        assert part.order(bucket, microbatch) == plan.order(bucket, microbatch)
        assert part.offload_of(bucket, microbatch) == plan.offload_of(bucket, microbatch)
        samples = plan.pieces.sample[at]
        for column in ("sample", "start", "length"):
            assert np.array_equal(getattr(part.pieces, column)[at], getattr(plan.pieces, column)[at])
        for column in ("cp_sizes", "first_ranks"):
            if getattr(plan, column) is not None:
                assert np.array_equal(getattr(part, column)[at], getattr(plan, column)[at])
        assert np.array_equal(part.in_batch[at], plan.in_batch[at])
        assert np.array_equal(part.draw.meta[samples], plan.draw.meta[samples])
        assert np.array_equal(part.draw.source[samples], plan.draw.source[samples])
        assert np.array_equal(part.encoded_apart[samples], plan.encoded_apart[samples])
        for name, (_, routing) in plan.encoders.items():
            for head in routing.heads[bucket]:
                found = part.encoders[name][1].arrivals(head, microbatch)
                for mine, whole in zip(found, routing.arrivals(head, microbatch), strict=True):
                    assert np.array_equal(mine, whole)
    assert part.encoders.keys() == plan.encoders.keys()
    for name, (encoder, routing) in plan.encoders.items():
        sliced, routes = part.encoders[name]
        runs, expected = sliced.bin(rank, 0), encoder.bin(rank, 0)
        for mine, whole in zip(part.draw.media_at(runs.sample, runs.start),
                               plan.draw.media_at(expected.sample, expected.start), strict=True):  # fmt: skip
            assert np.array_equal(mine, whole), "media are numbered over the whole step"
        assert early[0][expected.sample].all() and early[1][expected.sample].all()
        for column in ("send_splits", "recv_splits", "send_rows", "vit_cu_seqlens"):
            assert np.array_equal(getattr(routes, column)(rank), getattr(routing, column)(rank))


def check_loader(loader, plan, source, share, found):
    """A loader host has its source, and sends each host the same as with the whole plan."""
    mine = plan.draw.samples_of(source)
    assert np.array_equal(loader.draw.samples_of(source), mine)
    order, expected = loader.order_of(source), plan.order_of(source)
    assert np.array_equal(order.meta, expected.meta) and order.end == expected.end
    assert np.array_equal(order.meta, plan.draw.meta[mine])
    assert np.array_equal(known_early(loader)[mine], known_early(plan)[mine])
    for column in ("samples", "media"):
        assert np.array_equal(getattr(found, column)[mine], getattr(share, column)[mine])
    for column in ("tokens", "loss") if not share.whole else ():
        runs = getattr(share, column)
        of_source = dataclasses.astuple(runs.take(np.isin(runs.sample, mine)))
        assert np.array_equal(dataclasses.astuple(getattr(found, column)), of_source)
    if not share.whole:
        of = plan.draw.source[plan.pieces.sample[share.pieces]] == source
        assert np.array_equal(found.pieces, share.pieces[of])
        if share.encoded is not None:
            of = plan.draw.source[plan.draw.media.sample] == source
            assert np.array_equal(found.encoded[of], share.encoded[of])
    lengths = plan.draw.meta["tokens"][mine].astype(np.int64)
    loss = Ragged(np.ones(int(lengths.sum()), np.uint8), offsets_of(lengths))
    assert np.array_equal(loader.labels_of(mine.astype(np.int64), loss), plan.labels_of(mine.astype(np.int64), loss))


def test_a_slice_is_as_small_as_its_host():
    rng = np.random.default_rng(0)
    lengths = {f"s{n:02d}": rng.integers(16, 2048, 1000) for n in range(32)}
    buffer = ol.summary_buffer(lengths, context_length=2048, microbatch_tokens=16384)
    tree = ol.ClientPlaceTree(dp=512)
    plan = run_strategy(ol.strategies.backbone_balance(), buffer, tree).with_ends(np.zeros((32, 3), np.int64))
    whole = len(plan_to_bytes(plan))
    constructors = [len(plan_to_bytes(plan, PlanSlice.for_ranks(plan, range(n, n + 8)))) for n in range(0, 512, 8)]
    loaders = [len(plan_to_bytes(plan, PlanSlice.for_sources(plan, [n]))) for n in range(32)]
    assert max(constructors) < whole / 30 and max(loaders) < whole / 20
