"""Every mesh, every layout: the views of all ranks make the global batch, and no rank gets more than it needs.

The oracle below builds each sequence token by token from the plan, knows nothing of kernels or runs, and cuts it by the
reference's index formulas.
"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlord.core.draw import Buffer, Draw
from overlord.core.messages import Media, Payload
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.ragged import Ragged, offsets_of
from overlord.core.samples import META
from overlord.errors import OverlordError
from overlord.job.layout_specs import Layout
from overlord.job.specs import Batch, Job, Source, Text
from overlord.planning import strategies
from overlord.planning.checking import run_strategy
from overlord.roles.client import Batch as RankBatch
from overlord.roles.client import Place, RankView
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.runtimes.launching.deployment import check_multiples, limits_of
from overlord.transforms.microbatches.per_microbatch import MediaShape, PackingJob
from overlord.transforms.microbatches.step_samples import Opening, join_payloads

CONTEXT, CAP = 192, 384
MERGE, PATCH_BYTES = 2, 12


class Loaders:
    """Hands out one payload."""

    def __init__(self, payload):
        self.payload = payload

    def loader_do_plan(self, plan, ranks):
        return lambda: [self.payload]

    def note_faults(self, faults):
        raise AssertionError(faults)


@st.composite
def batches(draw):
    """Lengths, image placements, loss masks of one step."""
    count = draw(st.integers(1, 14))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    lengths = rng.integers(1, CONTEXT + 1, count)
    items = []
    for sample, length in enumerate(lengths):
        at = 0
        while rng.random() < 0.5:
            rows, cols = rng.integers(1, 4, 2)
            at += int(rng.integers(0, 6))
            if at + rows * cols > length:
                break
            items.append((sample, at, rows * cols, MERGE * rows, MERGE * cols))
            at += rows * cols
    loss = [(rng.random(n) < 0.8).astype(np.uint8) for n in lengths]
    return lengths, items, loss


def payload_of(lengths, items, loss):
    tokens = Ragged.from_rows([1000 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)], np.int32)
    grids = np.array([[1, h, w] for *_, h, w in items], np.int32).reshape(-1, 3)
    sizes = grids.prod(axis=1).astype(np.int64) * PATCH_BYTES
    values = (np.arange(int(sizes.sum())) % 251).astype(np.uint8)
    count = np.bincount([i[0] for i in items], minlength=len(lengths)) if items else np.zeros(len(lengths), int)
    media = Media(
        kind="image", rows=offsets_of(count), start=np.array([i[1] for i in items], np.int32),
        length=np.array([i[2] for i in items], np.int32), grids=grids, seconds=np.zeros(len(items), np.float32),
        seeds=np.zeros(len(items), np.uint64), bad=np.zeros(len(items), bool), values=values,
        begin=offsets_of(sizes)[:-1], nbytes_of=sizes, encoded=False,
    )  # fmt: skip
    return Payload(0, 0, tokens, Ragged.from_rows(loss, np.uint8), media)


def draw_of(lengths, items):
    meta = np.zeros(len(lengths), META)
    meta["tokens"], meta["row"] = lengths, np.arange(len(lengths))
    table = []
    for sample in range(len(lengths)):
        mine = [(i[1], i[2], 0, 0) for i in items if i[0] == sample]
        meta["images"][sample], meta["image_tokens"][sample] = len(mine), sum(one[1] for one in mine)
        if mine:
            meta["items"][sample] = len(table) + 1
            table += mine
    listed = np.array(table, np.int32) if table else None
    return Draw(0, ("a",), np.zeros(len(lengths), np.int32), meta, (1.0,), 0, listed)


def oracle(plan, bucket, microbatch, payload, layout, of):
    """The whole microbatch, before ranks share it."""
    pieces = plan.bin(bucket, microbatch)
    cu = [0]
    for n in plan.in_batch[plan.bin_range(bucket, microbatch)]:
        cu.append(cu[-1] + int(n))
    if len(cu) == 1:
        cu.append(max(plan.pad_multiple, plan.bin_multiple * (of if plan.axis == "CP" else 1)))
    total = cu[-1]
    out = {k: np.full(total, fill) for k, fill in (("ids", 0), ("labels", -100), ("shifted", -100), ("attention", 0))}
    out["positions"] = np.concatenate([np.arange(b - a) for a, b in itertools.pairwise(cu)])
    for at, (sample, start, length) in zip(
        cu, zip(pieces.sample, pieces.start, pieces.length, strict=True), strict=False
    ):
        tokens, mask = payload.tokens[sample][start : start + length], payload.loss[sample][start : start + length]
        for i in range(length):
            out["ids"][at + i] = tokens[i]
            out["attention"][at + i] = 1
            if i and mask[i]:
                out["labels"][at + i] = out["shifted"][at + i - 1] = tokens[i]
    out["mask"] = (out["shifted"] != -100).astype(np.float32)
    return out, np.array(cu), pieces


def sliced(values, cu, of, rank, slicing, rows):
    """The reference's formulas: 5.3 of the notes."""
    if of == 1 or slicing == "whole":
        return values
    units = list(itertools.pairwise(cu)) if rows or slicing == "zigzag" else [(0, cu[-1])]
    parts = []
    for a, b in units:
        if slicing == "contiguous":
            c = (b - a) // of
            assert (b - a) % of == 0
            parts.append(values[a + rank * c : a + (rank + 1) * c])
        else:
            c = (b - a) // (2 * of)
            assert (b - a) % (2 * of) == 0
            parts += [values[a + rank * c : a + (rank + 1) * c],
                      values[a + (2 * of - 1 - rank) * c : a + (2 * of - rank) * c]]  # fmt: skip
    return np.concatenate(parts)


def expected_keys(layout, rows, first, last, cp, images, hybrid):
    if layout.keys == "hf":
        keys = {"position_ids"} | ({"attention_mask"} if rows else {"cu_seq_lens_q", "cu_seq_lens_k"})
        keys |= {"input_ids"} if first or (layout.mtp and last) else set()
        keys |= ({"labels"} | ({"shift_labels"} if cp > 1 else set())) if last else set()
    elif layout.keys == "megatron":
        keys = set() if rows else {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"}
        keys |= {"local_cp_size"} if hybrid else set()
        keys |= {"tokens", "position_ids"} if first or (layout.mtp and last) else set()
        keys |= {"position_ids"} if layout.positions != "plain" else set()
        keys |= {"labels", "loss_mask"} if last else set()
    else:
        keys = {"positions"} | ({"input"} if first or (layout.mtp and last) else set())
        keys |= {"labels"} if last else set()
    if first and (images or layout.dummy_image):
        keys |= {"pixel_values", "image_grid_thw"}
    return keys


layouts = st.builds(
    Layout,
    st.sampled_from(["hf", "megatron", "torchtitan"]),
    rows=st.sampled_from(["packed", "packed", "padded", "full"]),
    slicing=st.sampled_from(["zigzag", "zigzag", "whole_zigzag", "contiguous", "whole"]),
    sequence_parallel=st.booleans(),
    block=st.sampled_from([1, 1, 2, 3]),
    dummy_image=st.booleans(),
    mtp=st.booleans(),
)
sizes = st.sampled_from([1, 2, 3, 4])
plans = st.sampled_from(["balance", "packed", "first_fit", "hdp", "hdp any", "hdp equal", "broadcast"])


def strategy_of(kind, tree):
    if kind == "hdp" and tree.cp in (1, 2, 4) and tree.dp in (1, 2, 4):
        return strategies.hdp()
    if kind == "hdp any":  # blocks of 3, 6, .. ranks, and pipelines
        return strategies.hdp(blocks="any")
    if kind == "hdp equal":
        return strategies.hdp(equal_counts=True, blocks="any")
    if kind == "broadcast":
        return strategies.backbone_balance(broadcast=("TP", "CP"))
    if kind in ("packed", "first_fit"):
        return strategies.packed(method="best_fit" if kind == "packed" else "first_fit")
    return strategies.backbone_balance()


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(batches(), sizes, sizes, sizes, sizes, layouts, plans)
def test_views_make_the_global_batch(batch, pp, dp, cp, tp, layout, kind):
    lengths, items, _ = batch
    tree = ClientPlaceTree(pp=pp, dp=dp, cp=cp, tp=tp)
    job = Job([Source("a", "x", sample=Text("a", tokenized=True))],
              batch=Batch(CONTEXT, global_samples=1, microbatch_tokens=CAP))  # fmt: skip
    try:
        check_multiples(job, layout, tree)
    except OverlordError:
        return  # the launch would have refused
    payload = payload_of(*batch)
    limits = limits_of(job, layout, tree)
    strategy = strategy_of(kind, tree)
    if layout.rows != "packed" and isinstance(strategy, strategies.hdp):
        strategy = strategies.backbone_balance()
    plan = run_strategy(strategy, Buffer(draw_of(lengths, items), limits), tree)
    samples = join_payloads(plan, [payload])
    shape = MediaShape(PATCH_BYTES, MERGE)
    constructor = DataConstructor(Loaders(payload), PackingJob(layout, shape, Opening([None], SerialWorkers())))
    rows = layout.rows != "packed"
    seen = np.zeros((len(lengths), CONTEXT), int)
    images_seen = 0
    met, orders = {}, {}
    for bucket, microbatch in constructor.bins_of(range(tree.world_size), plan):
        packed = constructor.constructor_do_plan(plan, samples, bucket, microbatch, lambda n: np.empty(n, np.uint8))
        named = packed.named()
        ranks = [r for r in range(tree.world_size) if constructor.bin_of(r, plan, microbatch) == (bucket, microbatch)]
        assert ranks
        for rank in ranks:
            at = tree.coords(rank)
            names, scalars = constructor.view_of(rank, plan, packed)
            view = {k: named[n] for k, n in names.items()}
            of = scalars["meta.local_cp_size"]
            whole, cu, pieces = oracle(plan, bucket, microbatch, payload, layout, of)
            mine = at.cp if plan.axis != "CP" or of == 1 else bucket - int(
                plan.first_ranks[plan.bin_range(bucket, microbatch).start]
            )  # fmt: skip
            mine = 0 if of == 1 else mine
            meta = RankBatch(RankView(view, scalars), ("a",), Place(tree, rank)).meta
            assert meta.ranks[mine] == rank and len(meta.ranks) == of
            assert [(c.pp, c.tp) for c in map(tree.coords, meta.ranks)] == [(at.pp, at.tp)] * of
            met.setdefault((meta.order, at.pp, at.tp), []).append((meta.ranks, pieces.sample.tolist()))
            orders.setdefault(rank, []).append(meta.order)
            alike = rows and layout.slicing == "whole_zigzag"
            assert of == 1 or meta.slicing == ("zigzag" if alike else layout.slicing)
            if "local_cp_size" in view:
                assert view["local_cp_size"].tolist() == [of]
            here = [i for i, s, n in zip(pieces.sample, pieces.start, pieces.length, strict=True)
                    for i in [j for j, im in enumerate(items) if im[0] == i and s <= im[1] < s + n]]  # fmt: skip
            first, last = at.pp == 0, at.pp == pp - 1
            wanted = expected_keys(layout, rows, first, last, cp, here, plan.cp_sizes is not None)
            got = {k for k in view if not k.startswith("meta.")}
            assert got == wanted
            cut = {k: sliced(v, cu, of, mine, layout.slicing, rows) for k, v in whole.items()}
            names_of = {"hf": {"input_ids": "ids", "labels": "labels", "shift_labels": "shifted",
                               "position_ids": "positions", "attention_mask": "attention"},
                        "megatron": {"tokens": "ids", "labels": "shifted", "loss_mask": "mask",
                                     "position_ids": "positions"},
                        "torchtitan": {"input": "ids", "labels": "shifted", "positions": "positions"}}  # fmt: skip
            for key, field in names_of[layout.keys].items():
                if key in view:
                    assert np.array_equal(view[key].reshape(-1), cut[field]), key
                    assert view[key].dtype == (np.float32 if key == "loss_mask" else np.int64)
            length = len(cut["ids"])
            if layout.slicing == "whole" and of > 1:  # the trainer can cut it in each of the ways
                for other in ("zigzag", "whole_zigzag", "contiguous"):
                    assert len(sliced(whole["ids"], cu, of, mine, other, rows)) * of == length
                assert set(names) == {name.removeprefix("@") for name in names.values()}  # one array for all ranks
            if not rows:
                assert length % layout.rank_multiple(tp) == 0
                assert int(cu[-1]) <= (CAP if plan.axis != "CP" else CAP // cp * of)
            else:
                assert (length // (len(cu) - 1)) % layout.rank_multiple(tp) == 0
                assert len(cu) - 1 <= max(1, CAP // CONTEXT)
            # Bytes are what these keys take and nothing else.
            token_keys = [k for k in names_of[layout.keys] if k in view]
            patches = sum(im[3] * im[4] for im in (items[i] for i in here)) or (MERGE**2 if layout.dummy_image else 0)
            least = sum(length * (4 if k == "loss_mask" else 8) for k in token_keys)
            least += sum({"cu_seq_lens_q": len(cu), "cu_seq_lens_k": len(cu), "cu_seqlens": len(cu),
                          "cu_seqlens_padded": len(cu), "max_seqlen": 1, "local_cp_size": 1}.get(k, 0) * 4
                         for k in view)  # fmt: skip
            if "pixel_values" in view:
                least += patches * PATCH_BYTES + max(1, len(here)) * 24
                assert len(view["pixel_values"]) == patches
            assert sum(view[k].nbytes for k in got) == least
            if at.tp == 0 and at.pp == 0 and (layout.slicing != "whole" or mine == 0):
                real = cut["attention"] == 1
                for token in cut["ids"][real]:
                    seen[token // 1000 - 1, token % 1000] += 1
            if at.pp == at.tp == at.cp == 0 and (plan.axis != "CP" or mine == 0):
                images_seen += len(here)
                if here:
                    data = view["pixel_values"].tobytes()
                    ends = np.cumsum([payload.media.nbytes_of[i] for i in here])
                    for i, end in zip(here, ends, strict=True):
                        n = int(payload.media.nbytes_of[i])
                        assert data[end - n : end] == bytes(payload.media.data(i))
    for found in met.values():  # all ranks of a microbatch agree, and each is listed once
        assert found == [found[0]] * (len(found[0][0]) if "CP" not in plan.broadcast else 1)
    assert all(mine == sorted(set(mine)) for mine in orders.values())
    for sample, length in enumerate(lengths):
        assert (seen[sample, :length] == 1).all() and (seen[sample, length:] == 0).all()
    if plan.axis == "DP":
        assert images_seen == len(items)


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from(["zigzag", "contiguous"]))
def test_m_rope_is_computed_before_slicing(batch, cp, dp, slicing):
    """Slices of three-row positions are cut from those of the whole sequence."""
    from overlord.transforms.microbatches.positions import mrope_positions

    lengths, items, _ = batch
    tree = ClientPlaceTree(dp=dp, cp=cp)
    layout = Layout("hf", positions="mrope_text", slicing=slicing)
    job = Job([Source("a", "x", sample=Text("a", tokenized=True))],
              batch=Batch(CONTEXT, global_samples=1, microbatch_tokens=CAP))  # fmt: skip
    payload = payload_of(*batch)
    plan = run_strategy(
        strategies.backbone_balance(), Buffer(draw_of(lengths, items), limits_of(job, layout, tree)), tree
    )
    samples = join_payloads(plan, [payload])
    packing = PackingJob(layout, MediaShape(PATCH_BYTES, MERGE), Opening([None], SerialWorkers()))
    constructor = DataConstructor(Loaders(payload), packing)
    for bucket, microbatch in constructor.bins_of(range(tree.world_size), plan):
        packed = constructor.constructor_do_plan(plan, samples, bucket, microbatch, lambda n: np.empty(n, np.uint8))
        named = packed.named()
        whole, cu, pieces = oracle(plan, bucket, microbatch, payload, layout, cp)
        here = [(k, im) for k, (i, s, n) in enumerate(zip(pieces.sample, pieces.start, pieces.length, strict=True))
                for im in items if im[0] == i and s <= im[1] < s + n]  # fmt: skip
        full = mrope_positions(
            cu.astype(np.int32), np.array([k for k, _ in here], np.int64),
            np.array([im[1] - int(pieces.start[k]) for k, im in here], np.int64),
            np.array([im[2] for _, im in here], np.int64),
            np.array([[1, im[3], im[4]] for _, im in here], np.int32).reshape(-1, 3), MERGE, np.ones(len(here)),
        )  # fmt: skip
        for rank in range(cp):
            got = named["position_ids" if cp == 1 else f"position_ids@{rank}"]
            assert got.shape == (4, 1, len(whole["ids"]) // cp)
            assert np.array_equal(got[0, 0], sliced(whole["positions"], cu, cp, rank, slicing, False))
            for axis in range(3):
                assert np.array_equal(got[1 + axis, 0], sliced(full[axis], cu, cp, rank, slicing, False))
