"""A model trains the same on every layout, strategy and mesh as on the samples one by one, to rounding."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tiny_models import (
    IGNORE,
    STEPS,
    Part,
    Patches,
    Seen,
    TinyVLM,
    alone,
    apart,
    deliver,
    image_token,
    job_with_pictures,
    one_sequence,
    put_images,
    sum_of,
    targets_of,
    train,
    train_pictures,
)

import overlord as ol

CONTEXT = 32
VOCABULARY = 97


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def masked(row):
    return {"tokens": row["ids"], "loss_mask": row["mask"]}


@dataclass(frozen=True)
class Corpus:
    """Files of token ids, and what is in them."""

    job: ol.Job
    rows: dict[tuple[str, int, int], dict[str, list[int]]]
    """By source, file and row in the file."""

    def row(self, sample: ol.SampleId) -> dict[str, list[int]]:
        return self.rows[sample.source, sample.file, sample.row_in_file]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """A source of plain token ids, and one with rows that say which tokens count; many longer than the context."""
    folder = tmp_path_factory.mktemp("trains")
    rng = np.random.default_rng(5)
    rows = {}
    for source, share in (("plain", 1.0), ("masked", 0.6)):
        (folder / source).mkdir()
        for number in range(2):
            lines = []
            for row, length in enumerate((1 + rng.integers(0, 75, 24)).tolist()):
                mask = (rng.random(length) < share).astype(int)
                found = {"ids": rng.integers(1, VOCABULARY, length).tolist(), "mask": mask.tolist()}
                rows[source, number, row] = found
                lines.append(json.dumps(found))
            (folder / source / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    job = ol.Job(
        sources=[
            ol.Source("plain", str(folder / "plain"), sample=ol.Text("ids", tokenized=True)),
            ol.Source(
                "masked", str(folder / "masked"), sample=ol.Custom(masked, columns=["ids", "mask"], process=False)
            ),
        ],
        batch=ol.Batch(CONTEXT, global_samples=9, microbatch_tokens=2 * CONTEXT),
        overlength="split",
        seed=3,
    )
    return Corpus(job, rows)


@pytest.fixture(scope="module")
def picture_job(demo_files) -> ol.Job:
    return job_with_pictures(demo_files)


# ---- what the files say


def pieces_of_files(corpus: Corpus, seen: Seen) -> list[Part]:
    """The pieces that a step says it holds, cut from the files themselves."""
    parts = []
    for (sample, offset, length), count in seen.pieces().items():
        assert count == 1
        chosen = slice(offset, offset + length)
        ids, mask = (corpus.row(sample)[name][chosen] for name in ("ids", "mask"))
        follow = [token if kept else IGNORE for token, kept in zip(ids[1:], mask[1:], strict=True)]
        parts.append(one_sequence(ids, [*follow, IGNORE]))
    return parts


def assert_whole(corpus: Corpus, seen: Seen) -> None:
    """No token of a sample is lost or doubled."""
    found = defaultdict(list)
    for sample, offset, length in seen.pieces().elements():
        found[sample].append((offset, offset + length))
    for sample, spans in found.items():
        spans.sort()
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == len(corpus.row(sample)["ids"])


# ---- training


def train_language(steps, parts_of, *, alone=False):
    """Train on text: the sum over all microbatches of all ranks, over the step's count of labels."""
    model = TinyVLM(VOCABULARY)

    def loss(seen):
        groups = parts_of(seen)
        return sum_of(model.language(parts, alone=alone) for parts in groups) / seen.global_loss_tokens

    return train(model, [lambda seen=seen: loss(seen) for seen in steps])


def assert_same(found, expected) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-8, atol=1e-10)


@pytest.fixture(scope="module")
def one_by_one(corpus, cache):
    """What training on the samples of the files, one at a time, comes to; and which pieces it saw."""
    steps = list(deliver(corpus.job, cache))
    for seen in steps:
        assert_whole(corpus, seen)
    found = train_language(steps, lambda seen: [[part] for part in pieces_of_files(corpus, seen)], alone=True)
    assert found[0][-1] != pytest.approx(found[0][0], rel=1e-3)  # it did learn something
    return found, [seen.pieces() for seen in steps]


MESHES = {
    "1": ol.ClientPlaceTree(),
    "dp2": ol.ClientPlaceTree(dp=2),
    "cp2": ol.ClientPlaceTree(cp=2),
    "cp4": ol.ClientPlaceTree(cp=4),
    "dp2 cp2": ol.ClientPlaceTree(dp=2, cp=2),
    "dp2 cp4": ol.ClientPlaceTree(dp=2, cp=4),
    "pp2 dp2 cp2 tp2": ol.ClientPlaceTree(pp=2, dp=2, cp=2, tp=2),
}
STRATEGIES = {
    "balance": ol.strategies.backbone_balance(),
    "vanilla": ol.strategies.vanilla(),
    "best fit": ol.strategies.packed(method="best_fit"),
    "first fit": ol.strategies.packed(method="first_fit"),
    "long short": ol.strategies.long_short(),
    "hdp": ol.strategies.hdp(),
    "hdp equal": ol.strategies.hdp(equal_counts=True),
    "broadcast": ol.strategies.backbone_balance(broadcast=("TP", "CP")),
}
CASES = [
    *(("1", name, ol.Layout("hf")) for name in ("balance", "vanilla", "best fit", "long short")),
    *(("dp2", "balance", ol.Layout(keys, rows=rows)) for keys, rows in (
        ("hf", "packed"), ("hf", "padded"), ("hf", "full"), ("megatron", "packed"), ("megatron", "padded"),
        ("torchtitan", "packed"), ("torchtitan", "full"))),
    *((mesh, "balance", ol.Layout(keys, slicing=slicing)) for mesh, keys, slicing in (
        ("cp2", "hf", "zigzag"), ("cp2", "megatron", "whole_zigzag"), ("cp2", "torchtitan", "contiguous"),
        ("cp4", "torchtitan", "zigzag"), ("cp4", "hf", "whole_zigzag"), ("cp4", "hf", "contiguous"),
        ("dp2 cp2", "megatron", "zigzag"), ("dp2 cp4", "hf", "zigzag"), ("dp2 cp2", "megatron", "whole"))),
    ("dp2 cp2", "balance", ol.Layout("hf", rows="padded", slicing="whole")),
    ("dp2 cp4", "hdp", ol.Layout("megatron", slicing="whole")),
    ("dp2 cp2", "balance", ol.Layout("hf", rows="padded")),
    ("dp2 cp2", "balance", ol.Layout("megatron", rows="padded", slicing="contiguous")),
    ("dp2 cp2", "best fit", ol.Layout("hf", block=4)),
    ("dp2 cp2", "broadcast", ol.Layout("megatron")),
    ("dp2 cp4", "hdp", ol.Layout("hf")),
    ("dp2 cp2", "hdp", ol.Layout("torchtitan")),
    ("cp4", "hdp equal", ol.Layout("megatron")),
    ("pp2 dp2 cp2 tp2", "balance", ol.Layout("hf", sequence_parallel=True)),
    ("pp2 dp2 cp2 tp2", "first fit", ol.Layout("megatron", slicing="whole_zigzag")),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "strategy", "layout"), CASES, ids=lambda case: str(case).replace("Layout", ""))
def test_every_layout_trains_as_one_by_one(mesh, strategy, layout, corpus, cache, one_by_one):
    expected, pieces = one_by_one
    job = corpus.job
    if (
        "hdp" in strategy
    ):  # it spreads what is longer than one rank's room, which the cap decides and the stream does not
        job = job.replace(batch=job.batch.replace(microbatch_tokens=CONTEXT))
    steps = list(deliver(job, cache, MESHES[mesh], STRATEGIES[strategy], layout))
    assert [seen.pieces() for seen in steps] == pieces
    if "hdp" in strategy:
        assert len({group.metas[0].local_cp_size for seen in steps for group in seen.groups}) > 1
    for seen in steps:
        for group in seen.groups:
            for part in group.parts(layout):
                begins = torch.as_tensor(group.metas[0].cu_seqlens).long()
                assert torch.equal(part.positions, part.index - begins[part.segment])
    assert_same(train_language(steps, lambda seen: [group.parts(layout) for group in seen.groups]), expected)


@pytest.mark.parametrize("mesh", ["1", "dp2", "dp2 cp2"])
def test_pieces_cut_where_a_microbatch_is_full(mesh, corpus, cache):
    layout, strategy = ol.Layout("hf"), ol.strategies.packed(method="concat")
    steps = list(deliver(corpus.job, cache, MESHES[mesh], strategy, layout))
    cuts = {offset % CONTEXT for seen in steps for _, offset, _ in seen.pieces()}
    assert len(cuts) > 1, "nothing was cut elsewhere than at the context"
    for seen in steps:
        assert_whole(corpus, seen)
    expected = train_language(steps, lambda seen: [[part] for part in pieces_of_files(corpus, seen)], alone=True)
    assert_same(train_language(steps, lambda seen: [group.parts(layout) for group in seen.groups]), expected)


def test_the_comparison_sees_a_wrong_boundary(corpus, cache, one_by_one):
    """Sequences that look into their neighbours are found out, and so are labels of the wrong token."""
    layout = ol.Layout("hf")
    steps = list(deliver(corpus.job, cache, MESHES["dp2 cp2"]))

    def leaky(seen):
        return [[replace(part, segment=part.segment * 0) for part in group.parts(layout)] for group in seen.groups]

    def late(seen):
        return [[replace(p, targets=p.targets.roll(1)) for p in group.parts(layout)] for group in seen.groups]

    for wrong in (leaky, late):
        losses, weights = train_language(steps, wrong)
        assert losses[0] != pytest.approx(one_by_one[0][0][0], rel=1e-5)
        assert float((weights - one_by_one[0][1]).abs().max()) > 1e-5


# ---- images


def beside(job, layout):
    """The loss where a microbatch holds the pixels of its images."""
    token = image_token(job)

    def loss(model, seen):
        losses = []
        for group in seen.groups:
            parts, batch = group.parts(layout), group.batches[0]
            for other in group.batches[1:]:
                assert np.array_equal(batch.get("pixel_values", 0), other.get("pixel_values", 0))
            if "pixel_values" in batch:
                lengths = batch["image_grid_thw"].prod(axis=1)
                (made,) = model.encoder([Patches.of(batch["pixel_values"], lengths, layout)])
                parts = put_images(parts, made, token)
            losses.append(model.language(parts))
        return sum_of(losses)

    return loss


def routed(layout):
    """The loss where images are encoded anywhere, once a step, and their tokens travel."""

    def loss(model, seen):
        runs = [
            Patches.of(e["pixel_values"], np.diff(e["cu_seqlens"]), layout, e["image_ids"], e["image_offsets"])
            for e in seen.encoders
        ]
        made = model.encoder(runs)
        sent = [
            rows[torch.tensor(e["send_rows"])].split(e["send_splits"].tolist())
            for rows, e in zip(made, seen.encoders, strict=True)
        ]
        for rank, encoder in enumerate(seen.encoders):
            assert [len(rows[rank]) for rows in sent] == encoder["recv_splits"].tolist()
        losses = []
        for group in seen.groups:
            parts = []
            for part, meta, rank in zip(group.parts(layout), group.metas, group.ranks, strict=True):
                received = torch.cat([rows[rank] for rows in sent])
                places, rows = torch.tensor(meta.image_positions), received[torch.tensor(meta.image_rows)]
                if layout.slicing == "whole" and meta.local_cp_size > 1:  # each rank got all of them; it keeps its own
                    mine, at = torch.nonzero(places[:, None] == part.index, as_tuple=True)
                    places, rows = at, rows[mine]
                parts.append(replace(part, places=places, rows=rows))
            losses.append(model.language(parts))
        return sum_of(losses)

    return loss


@pytest.fixture(scope="module")
def pictures_one_by_one(picture_job, cache):
    layout = ol.Layout("hf")
    steps = list(deliver(picture_job, cache, strategy=alone))
    assert all(len(group.metas[0].sample_ids) == 1 for seen in steps for group in seen.groups)
    assert sum("pixel_values" in group.batches[0] for seen in steps for group in seen.groups) > 2 * STEPS
    assert any(offset for seen in steps for _, offset, _ in seen.pieces())
    return train_pictures(steps, apart(picture_job, layout)), [seen.pieces() for seen in steps]


@pytest.mark.parametrize(
    ("mesh", "strategy", "layout"),
    [
        ("1", "balance", ol.Layout("hf")),
        ("dp2", "best fit", ol.Layout("hf", rows="padded")),
        ("dp2", "vanilla", ol.Layout("megatron", pixels="float32")),
        ("dp2 cp2", "balance", ol.Layout("torchtitan")),
        ("dp2 cp2", "balance", ol.Layout("hf", slicing="whole_zigzag")),
        ("cp4", "balance", ol.Layout("hf", slicing="contiguous")),
        ("dp2 cp4", "hdp", ol.Layout("megatron")),
        ("pp2 dp2 cp2 tp2", "balance", ol.Layout("hf", dummy_image=False)),
    ],
    ids=lambda case: str(case),
)
def test_images_next_to_their_tokens(mesh, strategy, layout, picture_job, cache, pictures_one_by_one):
    expected, pieces = pictures_one_by_one
    job = picture_job
    if strategy == "hdp":
        job = job.replace(batch=job.batch.replace(microbatch_tokens=64))
    steps = list(deliver(job, cache, MESHES[mesh], STRATEGIES[strategy], layout))
    assert [seen.pieces() for seen in steps] == pieces
    shared = [len(g.batches) for seen in steps for g in seen.groups if "pixel_values" in g.batches[0]]
    assert max(shared) > 1 or MESHES[mesh].cp == 1
    assert_same(train_pictures(steps, beside(picture_job, layout)), expected)


@pytest.mark.parametrize(
    ("mesh", "strategy", "layout"),
    [
        ("1", {}, ol.Layout("hf")),
        ("dp2 cp2", {}, ol.Layout("hf")),
        ("dp2 cp4", {"scope": "group"}, ol.Layout("hf", slicing="whole_zigzag")),
        ("dp2 cp2", {"split": True}, ol.Layout("torchtitan", slicing="contiguous", pixels="float32")),
        ("dp2 cp2", {"split": True}, ol.Layout("megatron", rows="padded")),
        ("pp2 dp2 cp2 tp2", {"split": True, "broadcast": ("TP",)}, ol.Layout("hf")),
        ("dp2 cp2", {"broadcast": ("CP",)}, ol.Layout("megatron")),
        ("dp2 cp2", {}, ol.Layout("hf", slicing="whole")),
    ],
    ids=lambda case: str(case),
)
def test_images_encoded_elsewhere(mesh, strategy, layout, picture_job, cache, pictures_one_by_one):
    expected, pieces = pictures_one_by_one
    steps = list(deliver(picture_job, cache, MESHES[mesh], ol.strategies.vlm_hybrid(**strategy), layout))
    assert [seen.pieces() for seen in steps] == pieces
    assert not any("pixel_values" in batch for seen in steps for group in seen.groups for batch in group.batches)
    cut = any(encoder["image_offsets"].any() for seen in steps for encoder in seen.encoders)
    assert cut == bool(strategy.get("split"))
    assert_same(train_pictures(steps, routed(layout)), expected)


# ---- how many labels there are

COUNTED = [
    ("1", ol.strategies.backbone_balance(), ol.Layout("hf")),
    ("dp2", ol.strategies.packed(method="concat"), ol.Layout("hf")),
    ("dp2 cp2", ol.strategies.packed(method="concat"), ol.Layout("megatron")),
    ("dp2", ol.strategies.packed(method="first_fit"), ol.Layout("torchtitan", rows="full")),
    ("dp2 cp4", ol.strategies.hdp(), ol.Layout("megatron")),
    ("dp2 cp4", ol.strategies.hdp(equal_counts=True), ol.Layout("hf")),
    ("dp2 cp2", ol.strategies.vlm_hybrid(split=True), ol.Layout("hf", slicing="contiguous")),
    ("cp4", ol.strategies.vanilla(), ol.Layout("torchtitan", slicing="whole_zigzag")),
    ("pp2 dp2 cp2 tp2", ol.strategies.long_short(broadcast=("TP",)), ol.Layout("hf", sequence_parallel=True)),
]


def count_labels(seen: Seen, layout: ol.Layout) -> int:
    """Labels that all ranks together put into their losses."""
    batches = [batch for group in seen.groups for batch in group.batches]
    counted = sum(int((targets_of(batch, layout) != IGNORE).sum()) for batch in batches)
    if layout.keys == "megatron":
        assert sum(float(batch["loss_mask"].sum()) for batch in batches) == counted
    if layout.keys == "hf":  # the labels that are not shifted
        assert sum(int((batch["labels"] != IGNORE).sum()) for batch in batches) == counted
    return counted


@pytest.mark.parametrize(("mesh", "strategy", "layout"), COUNTED, ids=lambda case: getattr(case, "__name__", str(case)))
@pytest.mark.parametrize("name", ["mixed_job", "corpus", "picture_job"])
def test_all_labels_are_counted_once(name, mesh, strategy, layout, request, cache):
    found = request.getfixturevalue(name)
    job = found.job if isinstance(found, Corpus) else found
    for seen in deliver(job, cache, MESHES[mesh], strategy, layout, steps=3):
        assert count_labels(seen, layout) == seen.global_loss_tokens > 0


@pytest.mark.parametrize(("positions", "axes"), [("mrope", 3), ("mrope_text", 4)])
def test_positions_of_several_rows(positions, axes, picture_job, cache):
    layout = ol.Layout("hf", positions=positions)
    plain = deliver(picture_job, cache, MESHES["dp2 cp2"])
    for seen, flat in zip(deliver(picture_job, cache, MESHES["dp2 cp2"], layout=layout), plain, strict=True):
        for group, other in zip(seen.groups, flat.groups, strict=True):
            for batch, plain_batch in zip(group.batches, other.batches, strict=True):
                ids, rows = batch["input_ids"], batch["position_ids"]
                assert np.array_equal(ids, plain_batch["input_ids"])
                assert rows.shape == (axes, *ids.shape) and rows.dtype == np.int64
                if axes == 4:
                    assert np.array_equal(rows[0], plain_batch["position_ids"])
                if "pixel_values" not in batch:
                    assert (rows == plain_batch["position_ids"]).all()
