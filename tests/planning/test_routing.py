"""Media over the world: routes send what is received, every image once, at the places of its placeholders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import slice_indices
from tests.planning.test_dgraph import buffer_of

import overlord as ol
from overlord.core.plan import plan_from_bytes, plan_to_bytes
from overlord.planning.checking import run_strategy

meshes = st.builds(
    ol.ClientPlaceTree, pp=st.integers(1, 2), dp=st.integers(1, 3), cp=st.sampled_from([1, 2, 3]), tp=st.integers(1, 2)
)


def placeholders(plan, tree, rank, microbatch):
    """Return where the image tokens of a microbatch stand in a rank's sequence, by packing it the slow way."""
    at = tree.coords(rank)
    pieces, chosen = plan.bin(at.dp, microbatch), plan.bin_range(at.dp, microbatch)
    cu = np.concatenate([[0], np.cumsum(plan.padded[chosen])])
    mask = np.zeros(int(cu[-1]), bool)
    for sample, start, begin in zip(pieces.sample, pieces.start, cu, strict=False):
        if start == 0:
            mask[begin : begin + int(plan.draw.meta["image_tokens"][sample])] = True
    if tree.cp > 1 and "CP" not in plan.broadcast:
        mask = mask[slice_indices(cu, tree.cp, at.cp)]
    return np.flatnonzero(mask)


@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=30),
    st.lists(st.integers(1, 2000), min_size=1, max_size=20),
    meshes,
    st.sampled_from(["world", "group"]),
    st.booleans(),
    st.sampled_from([(), ("TP",), ("CP",), ("CP", "TP")]),
    st.sampled_from([("image_tokens", "images"), ("clip_tokens", "clips"), ("audio_tokens", "sounds")]),
)
def test_routes(images, lengths, tree, scope, split, broadcast, media):
    buffer = buffer_of(lengths, images, context=1152, media=media)
    strategy = ol.strategies.vlm_hybrid(scope=scope, split=split, broadcast=broadcast, audio=ol.costs.vit_2b)
    plan = run_strategy(strategy, buffer, tree)
    plan = plan_from_bytes(plan_to_bytes(plan))
    name, other = ("encoder", "audio_encoder")[:: -1 if media[1] == "sounds" else 1]
    encoder, routing = plan.encoders[name]
    assert not len(plan.encoders[other][0].pieces) and not len(plan.encoders[other][1].sender)
    world = tree.world_size
    sent = np.stack([routing.send_splits(rank) for rank in range(world)])
    received = np.stack([routing.recv_splits(rank) for rank in range(world)])
    assert np.array_equal(sent, received.T)
    copies = 1 if "TP" in broadcast else tree.tp
    image_tokens = np.bincount(routing.sample, routing.length, len(buffer))
    assert np.array_equal(image_tokens, buffer.meta["image_tokens"] * copies), "every image once to each that needs it"
    for rank in range(world):
        at = tree.coords(rank)
        images = encoder.bin(rank, 0)
        patches = routing.vit_cu_seqlens(rank)
        assert np.array_equal(np.diff(patches), images.length.astype(int) * 4)
        sent = routing.sent_by(rank)
        if (not copies > 1 and tree.cp == 1) or {"TP", "CP"} <= set(broadcast):
            assert routing.sample[sent].tolist() == images.sample.tolist(), "encoded in the order of sending"
            assert routing.start[sent].tolist() == images.start.tolist()
        receives = at.pp == 0 and (at.tp == 0 or copies > 1) and (at.cp == 0 or "CP" not in broadcast)
        for microbatch in range(plan.num_microbatches):
            wanted = placeholders(plan, tree, rank, microbatch) if receives else np.zeros(0, int)
            assert routing.scatter_index(rank, microbatch).tolist() == wanted.tolist()
        assert sorted(routing.recv_perm(rank).tolist()) == list(range(len(routing.received_by(rank))))
    if scope == "group":
        owner = np.array([tree.coords(rank).dp for rank in range(world)])
        assert (owner[routing.sender] == owner[routing.receiver]).all()


@pytest.mark.parametrize(
    ("modality", "name", "media"),
    [
        ("images", "encoder", ("image_tokens", "images")),
        ("videos", "encoder", ("clip_tokens", "clips")),
        ("audio", "audio_encoder", ("audio_tokens", "sounds")),
    ],
)
def test_media_stay_near_their_tokens_where_that_costs_nothing(modality, name, media):
    rng = np.random.default_rng(0)
    buffer = buffer_of(rng.integers(1, 900, 256), rng.integers(64, 512, 512), media=media)
    tree = ol.ClientPlaceTree(dp=4, tp=2)
    near = run_strategy(ol.strategies.vlm_hybrid(audio=ol.costs.vit_2b), buffer, tree)

    def anywhere(buffer, tree):
        items = ol.DGraph.from_buffer(buffer, tree, modality=modality).distribute("WORLD").cost(ol.costs.vit_2b)
        return {"backbone": ol.strategies.backbone_balance()(buffer, tree), name: items.balance().plan()}

    far = run_strategy(anywhere, buffer, tree)
    (encoder, routing), (_, others) = near.encoders[name], far.encoders[name]
    assert routing.crossing_tokens() < 0.8 * others.crossing_tokens()
    loads = encoder.loads(ol.costs.vit_2b(encoder.pieces.length.astype(np.int64) * 4)).sum(axis=1)
    assert loads.max() / loads.mean() < 1.03


def test_the_largest_image_is_split_where_it_is_the_bound():
    buffer = buffer_of([10] * 8, [1000, 20, 20, 20])
    tree = ol.ClientPlaceTree(dp=8)
    whole, split = (run_strategy(ol.strategies.vlm_hybrid(split=s), buffer, tree).encoder for s in (False, True))
    assert whole.num_buckets == split.num_buckets == 8
    parts = split.pieces.length[split.pieces.sample == 8]
    assert len(parts) > 4 and parts.sum() == 1000
    per_rank = [int(np.sum(split.bin(rank, 0).length)) for rank in range(8)]
    assert max(per_rank) < 260


def test_images_and_tokens_that_do_not_meet_are_refused():
    buffer, tree = buffer_of([10] * 8, [100, 20]), ol.ClientPlaceTree(dp=2, cp=2)
    images = ol.DGraph.from_buffer(buffer, tree, modality="images").distribute("WORLD").cost(ol.costs.vit_2b).balance()
    with pytest.raises(ol.PlanError, match="routes exist"):
        run_strategy(lambda b, t: {"backbone": ol.strategies.hdp()(b, t), "encoder": images.plan()}, buffer, tree)
    with pytest.raises(ol.PlanError, match="the backbone takes tokens"):
        run_strategy(lambda b, t: {"backbone": images.plan(), "encoder": images.plan()}, buffer, tree)
