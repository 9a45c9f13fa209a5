"""Microbatches and rank views: nothing lost, nothing doubled, in the keys a model takes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import slice_indices

from overlord.core.draw import Buffer, Draw, Limits
from overlord.core.messages import Payload
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.ragged import Ragged
from overlord.core.samples import META
from overlord.job.layout_specs import Layout
from overlord.planning.strategies import backbone_balance
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.transforms.microbatches.per_microbatch import MediaShape, PackingJob, pack_microbatch
from overlord.transforms.microbatches.step_samples import Opening, join_payloads
from overlord.transforms.samples.images import decode_image, image_size, patchify_into


def packed_of(lengths, dp=1, cp=1, context=16, cap=64, layout=None):
    """Pack samples with the tokens 100 * sample + position."""
    meta = np.zeros(len(lengths), META)
    meta["tokens"], meta["row"] = lengths, np.arange(len(lengths))
    draw = Draw(0, ("a",), np.zeros(len(lengths), np.int32), meta, (1.0,))
    tree = ClientPlaceTree(dp=dp, cp=cp)
    plan = backbone_balance()(Buffer(draw, Limits(context, cap)), tree).on(tree)
    tokens = Ragged.from_rows([100 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)], np.int32)
    loss = Ragged(np.ones(len(tokens.values), np.uint8), tokens.offsets)
    samples = join_payloads(plan, [Payload(0, 0, tokens, loss)])
    packing, everything = packing_of(layout), lambda key: tuple(range(cp))
    return plan, [
        [
            pack_microbatch(plan, samples, d, m, packing, lambda n: np.empty(n, np.uint8), everything)[0]
            for m in range(plan.num_microbatches)
        ]
        for d in range(dp)
    ]


def packing_of(layout=None):
    return PackingJob(layout or Layout(), MediaShape(), Opening([None], SerialWorkers()))


def arrays_of(packed):
    named = packed.named()
    columns = ("source", "epoch", "row", "segment_offsets", "segment_lengths")
    return named | {f"meta.{name}": row for name, row in zip(columns, named["meta.origin"], strict=True)}


def test_packed_sequence_as_a_hugging_face_model_takes_it():
    _, [[packed]] = packed_of([3, 2])
    arrays = arrays_of(packed)
    assert arrays["input_ids"].tolist() == [[100, 101, 102, 200, 201]]
    assert arrays["labels"].tolist() == [[-100, 101, 102, -100, 201]]
    assert arrays["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert arrays["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert packed.scalars == {
        "max_length_q": 3,
        "max_length_k": 3,
        "use_cache": False,
        "meta.local_cp_size": 1,
        "meta.loss_tokens": 3,
        "meta.order": 0,
    }
    assert "shift_labels" not in arrays
    assert {arrays[k].dtype.str for k in ("input_ids", "labels", "position_ids")} == {"<i8"}
    assert arrays["cu_seq_lens_q"].dtype == np.int32


@pytest.mark.parametrize("short", ["tokens", "loss"])
def test_a_payload_that_is_shorter_than_planned_is_refused_and_no_other_memory_is_read(short):
    plan, _ = packed_of([3, 2])
    rows = {"tokens": Ragged.from_rows([np.arange(3), np.arange(2)], np.int32),
            "loss": Ragged.from_rows([np.ones(3), np.ones(2)], np.uint8)}  # fmt: skip
    rows[short] = Ragged(rows[short].values[:4], rows[short].offsets)
    with pytest.raises(IndexError, match="pieces outside of the 4"):
        join_payloads(plan, [Payload(0, 0, labels=3, row_labels=np.array([2, 1]), **rows)])


def test_zigzag_is_per_segment():
    cu = np.array([0, 8, 16])
    assert slice_indices(cu, 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert slice_indices(cu, 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_rank_views_make_the_whole(lengths, dp, cp):
    _plan, buckets = packed_of(lengths, dp, cp)
    seen: list[int] = []
    for bucket in buckets:
        for packed in bucket:
            arrays = arrays_of(packed)
            cu = arrays["cu_seq_lens_q"]
            ids = np.zeros(cu[-1], np.int64)
            labels, shifted = ids.copy(), ids.copy()
            for rank in range(cp):
                suffix = f"@{rank}" if cp > 1 else ""
                at = slice_indices(cu, cp, rank) if cp > 1 else np.arange(cu[-1])
                ids[at] = arrays["input_ids" + suffix].reshape(-1)
                labels[at] = arrays["labels" + suffix].reshape(-1)
                if cp > 1:
                    shifted[at] = arrays["shift_labels" + suffix].reshape(-1)
            if cp > 1:
                assert shifted.tolist() == [*labels[1:].tolist(), -100]
                assert (np.diff(cu) % (2 * cp) == 0).all()
            for begin, length in zip(cu[:-1], arrays["meta.segment_lengths"], strict=True):
                seen += ids[begin : begin + length].tolist()
            assert (labels[cu[:-1]] == -100).all()
    assert sorted(seen) == sorted(100 * (i + 1) + t for i, n in enumerate(lengths) for t in range(n))


def test_more_ranks_than_samples_get_dummies():
    _, buckets = packed_of([5], dp=3)
    metas = sorted(int(arrays_of(bucket[0])["meta.source"][0]) for bucket in buckets)
    assert metas == [-1, -1, 0]
    dummy = next(arrays_of(b[0]) for b in buckets if arrays_of(b[0])["meta.source"][0] == -1)
    assert (dummy["labels"] == -100).all()


@pytest.mark.parametrize(
    ("pp_rank", "present", "absent"),
    [
        (0, {"input_ids", "position_ids"}, {"labels"}),
        (1, {"cu_seq_lens_q", "position_ids"}, {"input_ids", "labels"}),  # every layer turns queries by positions
        (2, {"labels", "position_ids"}, {"input_ids"}),
    ],
)
def test_pipeline_stages_get_only_what_they_need(pp_rank, present, absent):
    tree = ClientPlaceTree(pp=3, cp=2)
    plan, [[packed]] = packed_of([3, 2], cp=2)
    rank = tree.rank(pp=pp_rank, cp=1)
    keys = set(DataConstructor(None, packing_of()).view_of(rank, plan.on(tree), packed)[0])
    assert present <= keys
    assert not absent & keys


def test_patches_that_merge_are_neighbours():
    image = np.arange(4 * 8 * 3, dtype=np.uint8).reshape(4, 8, 3)
    out = np.empty(4 * 8 * 3, np.uint8)
    patchify_into(image, 2, 2, out)
    rows = out.reshape(8, 3, 2, 2)
    # The first four patches are the left 4 x 4 block: top-left, top-right, bottom-left, bottom-right.
    for number, (y, x) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
        assert (rows[number] == image[y : y + 2, x : x + 2].transpose(2, 0, 1)).all()


def test_formats_other_than_jpeg_and_gray_images_decode():
    import io

    from PIL import Image

    for mode, form in (("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("RGB", "WEBP")):
        out = io.BytesIO()
        Image.new(mode, (10, 6)).save(out, form)
        assert image_size(out.getvalue()) == (10, 6)
        assert decode_image(out.getvalue()).shape == (6, 10, 3)
