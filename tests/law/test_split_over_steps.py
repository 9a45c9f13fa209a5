"""Steps as full as asked: with overlength="split" a sample may go on in the next steps; no step is over its budget."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import write_ids

import overlord as ol
from overlord.core.draw import last_cut, part_of_sample
from overlord.core.samples import META
from overlord.testing import assert_resumes_anywhere, stream_digests

BUDGET = 256


def jpeg(size: int = 16) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), (200, 10, 10)).save(out, "JPEG")
    return out.getvalue()


def token_job(folder, spread, **options) -> ol.Job:
    sources = []
    for name, rows in spread.items():
        write_ids(folder / name / "0.jsonl", rows)
        sample = ol.Text("ids", tokenized=True)
        sources.append(ol.Source(name, str(folder / name), sample=sample, shuffle_bytes=2000))
    once = ol.Mixture(stopping="all_exhausted_without_replacement", level=options.pop("level", "token"))
    return ol.Job(sources, mixture=once, batch=ol.Batch(32, global_tokens=BUDGET), overlength="split", **options)


def steps_of(job, cache, mesh="dp=2", **where):
    """Return the tokens of every step, and (step, offset, length) of every piece of every sample in delivered order."""
    tree, totals, pieces = ol.ClientPlaceTree.parse(mesh), defaultdict(int), defaultdict(list)
    with ol.launch(job, mesh=tree, cache=cache, **({"runtime": "inline"} | where)) as service:
        for dp in range(tree.dp):
            with service.client(rank=tree.rank(dp=dp)) as client:
                for step in client:
                    labels = 0
                    for batch in step.microbatches:
                        labels += int((batch["labels"] != -100).sum())
                        columns = batch.meta.segment_offsets.tolist(), batch.meta.segment_lengths.tolist()
                        for sample, offset, length in zip(batch.meta.sample_ids, *columns, strict=True):
                            if sample.source:
                                pieces[sample].append((step.index, offset, length))
                    totals[step.index] = step.global_tokens
    return [totals[step] for step in sorted(totals)], pieces


def joined(parts):
    """Join (offset, tokens) of the parts of one sample."""
    return list(itertools.chain.from_iterable(tokens for _, tokens in sorted(parts)))


def check(totals, pieces, lengths):
    assert max(totals) <= BUDGET
    assert all(total >= 0.98 * BUDGET for total in totals[:-1])
    assert {(sample.source, sample.row): sum(n for *_, n in parts) for sample, parts in pieces.items()} == lengths
    for parts in pieces.values():
        ordered = sorted(parts, key=lambda part: part[1])
        assert [step for step, *_ in ordered] == sorted(step for step, *_ in ordered), "a later part comes earlier"
        ends = [offset + length for _, offset, length in ordered]
        assert [offset for _, offset, _ in ordered] == [0, *ends[:-1]], "a gap or an overlap"


@pytest.mark.slow_on_ray
@pytest.mark.slow_but_inline
def test_a_novel_fills_many_steps_and_no_step_is_too_full(tmp_path, cache, where):
    spread = {"books": [1500, 9, 40, 700], "web": [int(n) for n in 1 + np.arange(60) * 7 % 90]}
    lengths = {(name, row): n for name, rows in spread.items() for row, n in enumerate(rows)}
    totals, pieces = steps_of(token_job(tmp_path, spread), cache, **where)
    check(totals, pieces, lengths)
    novel = pieces[ol.SampleId("books", 0, 0)]
    assert len({step for step, *_ in novel}) > 3


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spread=st.dictionaries(
        st.sampled_from("abc"), st.lists(st.integers(1, 900), min_size=1, max_size=12), min_size=1, max_size=3
    ),
    level=st.sampled_from(["token", "sample"]),
    granularity=st.sampled_from(["step", "substep"]),
)
def test_every_piece_once_and_in_order(spread, level, granularity, tmp_path_factory, cache):
    job = token_job(tmp_path_factory.mktemp("split"), spread, level=level)
    job = job.replace(mixture=job.mixture.replace(granularity=granularity))
    lengths = {(name, row): n for name, rows in spread.items() for row, n in enumerate(rows)}
    check(*steps_of(job, cache), lengths)


@pytest.mark.parametrize("level", [pytest.param("token", marks=pytest.mark.slow), "sample"])
def test_resumes_in_the_middle_of_a_sample(tmp_path, cache, level):
    job = token_job(tmp_path, {"books": [1500, 300, 700], "web": [30] * 50}, level=level)
    assert_resumes_anywhere(job, steps=20, mesh=ol.ClientPlaceTree(dp=2), store=tmp_path / "store", cache=cache)


def test_the_state_says_where_a_sample_goes_on_and_older_states_still_resume(tmp_path, cache):
    job = token_job(tmp_path, {"books": [1500, 300]})
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        before = client.state_dict()
        next(client)
        state = client.state_dict()
    assert "start" not in before["columns"] and len(before["sources"]["books"]) == 10
    assert state["columns"][-1] == "start" and state["sources"]["books"][-1] == BUDGET
    with ol.launch(job, runtime="inline", cache=cache, state=before) as service:
        assert next(service.client()).microbatches[0].meta.segment_offsets[0] == 0
    with ol.launch(job, runtime="inline", cache=cache, state=state) as service:
        offsets = [int(n) for batch in next(service.client()).microbatches for n in batch.meta.segment_offsets]
    assert min(offsets) == BUDGET


def test_the_mixture_stays_within_one_sample(tmp_path, cache):
    """The share of a source strays by at most the tokens of one sample, split or not."""
    spread = {"books": [900] * 40, "web": [30] * 400, "code": [100] * 200}
    job = token_job(tmp_path, spread)
    job = job.replace(mixture=ol.Mixture({"books": 1, "web": 2, "code": 1}, level="token"), max_steps=60)
    seen = dict.fromkeys(spread, 0)
    with ol.launch(job, runtime="inline", cache=cache) as service:
        for step in service.client():
            for batch in step.microbatches:
                for sample, length in zip(batch.meta.sample_ids, batch.meta.segment_lengths.tolist(), strict=True):
                    seen[sample.source] += length
            total = sum(seen.values())
            for name, share in (("books", 0.25), ("web", 0.5), ("code", 0.25)):
                assert abs(seen[name] - share * total) <= 900, f"{name} at step {step.index}"


def test_loss_masks_and_images_are_those_of_the_part(tmp_path, tokenizer, cache):
    """No image is cut; the labels of all steps are those of the same samples in one step, less one for each cut."""
    text = " ".join(["w1"] * 30) + " <image> " + " ".join(["w2"] * 50) + " <image> " + " ".join(["w3"] * 40)
    images = pa.array([[jpeg(), jpeg(16)]] * 6, pa.list_(pa.binary()))
    pq.write_table(pa.table({"images": images, "text": [text] * 6}), tmp_path / "d.parquet")
    sample = ol.Interleaved("images", "text", patch=4, min_pixels=16, max_pixels=256, before="<vs>", after="<ve>")
    once = ol.Mixture(stopping="all_exhausted_without_replacement")
    source = ol.Source("a", str(tmp_path / "d.parquet"), sample=sample, shuffle_bytes=0)
    found = {}
    for budget in (100, 100_000):
        job = ol.Job(
            [source], mixture=once, tokenizer=tokenizer, batch=ol.Batch(50, global_tokens=budget), overlength="split"
        )
        tokens, counted, images_seen, cuts = [], 0, 0, 0
        with ol.launch(job, runtime="inline", cache=cache) as service:
            for step in service.client():
                assert step.global_tokens <= budget
                labels = sum(int((batch["labels"] != -100).sum()) for batch in step.microbatches)
                assert labels == step.global_loss_tokens
                counted += labels
                for batch in step.microbatches:
                    segments = zip(batch.meta.cu_seqlens[:-1], batch.meta.cu_seqlens[1:], strict=True)
                    places = zip(batch.meta.sample_ids, batch.meta.segment_offsets.tolist(), segments, strict=False)
                    for one, offset, (begin, end) in places:
                        ids = batch["input_ids"][0, begin:end].tolist()
                        assert ids.count(1) in (0, 16, 32), "an image was cut"
                        tokens.append((one.row, offset, ids))
                        cuts += offset > 0
                    if "pixel_values" in batch:
                        images_seen += len(batch["image_grid_thw"])
        whole = {row: joined(t[1:] for t in tokens if t[0] == row) for row in range(6)}
        found[budget] = whole, images_seen, counted + cuts
    assert found[100][:2] == found[100_000][:2] and found[100][1] == 12
    assert abs(found[100][2] - found[100_000][2]) <= 12  # a cut before an image token costs no label


def test_text_that_is_tokenized_after_planning_is_split_too(tmp_path, tokenizer, cache):
    rows = [{"text": " ".join(f"w{(i + j) % 40}" for j in range(n)), "n": n} for i, n in enumerate([900, 40, 300, 7])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    once = ol.Mixture(stopping="all_exhausted_without_replacement")
    ids = {}
    for budget, lengths in ((BUDGET, "n"), (BUDGET, None), (10_000, "n")):
        source = ol.Source("a", str(tmp_path / "a.jsonl"), sample=ol.Text(), lengths=lengths, shuffle_bytes=0)
        batch = ol.Batch(64, global_tokens=budget)
        job = ol.Job([source], mixture=once, tokenizer=tokenizer, batch=batch, overlength="split")
        found = defaultdict(list)
        with ol.launch(job, runtime="inline", cache=cache) as service:
            for step in service.client():
                assert step.global_tokens <= budget
                for one in step.microbatches:
                    cu, offsets = one.meta.cu_seqlens, one.meta.segment_offsets.tolist()
                    for number, (sample, offset) in enumerate(zip(one.meta.sample_ids, offsets, strict=True)):
                        found[sample.row].append((offset, one["input_ids"][0, cu[number] : cu[number + 1]].tolist()))
        ids[budget, lengths] = {row: joined(parts) for row, parts in found.items()}
    assert ids[BUDGET, "n"] == ids[BUDGET, None] == ids[10_000, "n"]


@pytest.mark.parametrize("runtime", ["local"])
def test_the_stream_does_not_depend_on_workers_or_loaders(tmp_path, cache, runtime):
    job = token_job(tmp_path, {"books": [1500, 300, 700], "web": [30] * 50})
    expected = stream_digests(job, steps=12, runtime="inline", cache=cache)
    found = stream_digests(job, steps=12, runtime=runtime, threads=2, loaders_per_source=2, cache=cache)
    assert found == expected


@given(
    length=st.integers(2, 300),
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=4),
    cut=st.floats(0, 1),
)
def test_parts_have_all_images_of_the_sample(length, spans, cut):
    items, at = [], 0
    for gap, size in spans:
        if at + gap + size + 2 > length:
            break
        items.append((at + gap + 1, size, 1, 1))
        at += gap + size + 2
    listed = np.array(items, np.int32).reshape(-1, 4)
    meta = np.zeros(1, META)[0]
    meta["tokens"], meta["images"], meta["image_tokens"], meta["items"] = length, len(items), listed[:, 1].sum(), 1
    end = last_cut(meta, listed, int(cut * length))
    assert 0 <= end <= length
    assert not any(first - 1 < end < first + size + 1 for first, size, *_ in items)
    found = []
    for begin, stop in ((0, end), (end, length)):
        part, own = part_of_sample(meta, listed, begin, stop, 64)
        assert int(part["tokens"]) == stop - begin
        found += [] if own is None else [(first + begin, size, 1, 1) for first, size, *_ in own.tolist()]
        if own is None:  # at most one image, at the beginning of the part
            assert part["images"] <= 1
            found += [(begin, int(part["image_tokens"]), 1, 1)] if part["images"] else []
    assert found == items
