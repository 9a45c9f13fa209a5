"""Edges where samples, layouts and columns meet: found by a reviewer, each once wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.demo.demo_data import media_job, write_media
from PIL import Image

import overlord as ol
from overlord.testing import digest_service


def jpeg(side: int = 16, *, cut: bool = False) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(side).integers(0, 255, (side, side, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()[: len(out.getvalue()) // 2] if cut else out.getvalue()


def write(path, **columns) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def job_of(path, sample, tokenizer=None, context=64, **options) -> ol.Job:
    source = ol.Source("a", path, sample=sample, shuffle_bytes=0, tolerance=1.0)
    defaults = {"batch": ol.Batch(context, global_samples=2), "max_steps": 4}
    return ol.Job([source], tokenizer=tokenizer, **(defaults | options))


def first_batch(job, cache, **options):
    with ol.launch(job, runtime="inline", cache=cache, **options) as service:
        return next(service.client()).microbatches[0], service.status()["sources"]["a"]


PICTURE = ol.ImageText("jpg", "txt", patch=4, min_pixels=16, max_pixels=256)


def test_a_placeholder_in_a_text_is_spelled_out(tmp_path, tokenizer, cache):
    path = write(tmp_path / "a.parquet", jpg=[jpeg(), jpeg()], txt=["w1 <image> w2", "w3"])
    batch, _ = first_batch(job_of(path, PICTURE, tokenizer), cache)
    assert (batch["input_ids"] == 1).sum() == 2 * 16  # the placeholders of the two images, and no other
    assert 1 not in batch["labels"]
    text = ol.Source("t", write(tmp_path / "t.parquet", text=["w1 <image> w2"] * 4), sample=ol.Text())
    job = job_of(path, PICTURE, tokenizer)
    both = job.replace(sources=[*job.sources, text], batch=ol.Batch(64, global_samples=8))
    batch, _ = first_batch(both, cache)
    assert (batch["input_ids"] == 1).sum() == sum(int(np.prod(g)) for g in batch["image_grid_thw"])


@pytest.mark.parametrize("wrong", [99_999, 2**40])
def test_an_image_token_outside_the_vocabulary_is_refused(tmp_path, tokenizer, cache, wrong):
    path = write(tmp_path / "a.parquet", jpg=[jpeg()], txt=["w1"])
    with pytest.raises(ol.SpecError, match=r"source 'a'.*image_token.*not in the vocabulary"):
        ol.launch(job_of(path, PICTURE.replace(image_token=wrong), tokenizer), runtime="inline", cache=cache)


def test_wild_token_ids_are_bad_samples(tmp_path, cache):
    lines = [{"ids": [5, 6]}, {"ids": [7, 5_000_000_000]}, {"ids": [8, -5]}, {"ids": [9, 10]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    job = job_of(str(tmp_path / "a.jsonl"), ol.Text("ids", tokenized=True), batch=ol.Batch(64, global_samples=4))
    batch, status = first_batch(job, cache)
    assert status["bad"] == 2
    assert sorted(set(batch["input_ids"].flatten().tolist()) - {0}) == [5, 6, 9, 10]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (ol.Text("txt", tokenized=True), r"sample.column='txt' holds text or bytes, and there must be token ids"),
        (ol.Text("fractions", tokenized=True), r"holds lists of fractions, and there must be token ids"),
        (ol.ImageText("many", "txt"), r"sample.image='many' holds lists of bytes.*ol.Interleaved"),
        (ol.ImageText("jpg", "txt", width="txt", height="txt"), r"sample.height='txt' holds text or bytes"),
        (ol.Audio("n", "txt", audio_token="<image>"), r"sample.audio='n' holds whole numbers.*one encoded sound"),
    ],
)
def test_columns_of_another_kind_are_refused(tmp_path, tokenizer, cache, sample, message):
    path = write(tmp_path / "a.parquet", jpg=[jpeg()], txt=["w1"], many=[[jpeg()]], n=[3], fractions=[[0.5]])
    with pytest.raises(ol.SpecError, match=message):
        ol.launch(job_of(path, sample, tokenizer), runtime="inline", cache=cache)


@pytest.mark.parametrize("placement", ["loader", "constructor"])
@pytest.mark.parametrize("strategy", [None, ol.strategies.vlm_hybrid()], ids=["beside", "routed"])
def test_nothing_of_a_split_sample_with_a_broken_image_counts(tmp_path, tokenizer, cache, placement, strategy):
    words = " ".join(f"w{i % 40}" for i in range(60))
    path = write(tmp_path / "a.parquet", jpg=[jpeg(cut=True), jpeg()], txt=[words, words])
    job = job_of(path, PICTURE, tokenizer, context=24, overlength="split")
    labels = {0: 0, 1: 0}
    options = {"placement": placement, "strategy": strategy, "mesh": ol.ClientPlaceTree(dp=2)}
    with ol.launch(job, runtime="inline", cache=cache, **options) as service:
        for rank in range(2):
            for batch in next(service.client(rank)).microbatches:
                for sample, (begin, end) in zip(
                    batch.meta.sample_ids,
                    zip(batch.meta.cu_seqlens, batch.meta.cu_seqlens[1:], strict=False),
                    strict=True,
                ):
                    if sample.source:
                        labels[sample.row_in_file] += int((batch["labels"][0, begin:end] != -100).sum())
    assert labels[0] == 0 and labels[1] > 50


def test_an_image_keeps_the_tokens_around_it(tmp_path, tokenizer, cache):
    around = PICTURE.replace(before="<vs>", after="<ve>")
    path = write(tmp_path / "a.parquet", jpg=[jpeg()] * 4, txt=["w1 w2 w3"] * 4)
    tight = job_of(path, around, tokenizer, context=17)  # 16 tokens of the image and one: not all that belongs to it
    with pytest.raises(ol.PlanError, match="nothing to draw"):
        ol.launch(tight, runtime="inline", cache=cache)
    text = "w1 w2 w3 w4 <image> w5 w6 <image> w7"
    docs = write(
        tmp_path / "d.parquet", images=pa.array([[jpeg(), jpeg(16)]] * 4, pa.list_(pa.binary())), text=[text] * 4
    )
    sample = ol.Interleaved("images", "text", patch=4, min_pixels=16, max_pixels=256, before="<vs>", after="<ve>")
    job = job_of(docs, sample, tokenizer, context=20, overlength="split")
    with ol.launch(job, runtime="inline", cache=cache) as service:
        step = next(service.client())
        counted = 0
        for batch in step.microbatches:
            counted += int((batch["labels"] != -100).sum())
            for begin, end in zip(batch.meta.cu_seqlens[:-1], batch.meta.cu_seqlens[1:], strict=True):
                ids = batch["input_ids"][0, begin:end].tolist()
                assert ids.count(1) in (0, 16)
                if 1 in ids:
                    assert ids[ids.index(1) - 1] == 2 and ids[ids.index(1) + 16] == 3
                else:
                    assert 2 not in ids and 3 not in ids
        assert counted == step.global_loss_tokens > 0


def test_rows_of_one_length_and_hybrid_data_parallelism_do_not_go_together(tmp_path, cache):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"ids": [1] * n}) for n in range(2, 40)))
    job = job_of(str(tmp_path / "a.jsonl"), ol.Text("ids", tokenized=True))
    with pytest.raises(ol.SpecError, match=r"rows of one length cannot follow. Use axis='DP' \(not hdp\)"):
        ol.launch(job, runtime="inline", cache=cache, strategy=ol.strategies.hdp(), layout=ol.Layout(rows="padded"))


def test_frames_of_a_clip_attend_to_themselves_alone(tmp_path, cache):
    write_media(tmp_path, clips=12, sounds=2)
    job = media_job(tmp_path).replace(mixture=ol.Mixture({"clips": 1.0}), batch=ol.Batch(512, global_samples=6))
    strategy = ol.strategies.vlm_hybrid(split=True)
    with ol.launch(job, runtime="inline", cache=cache, mesh=ol.ClientPlaceTree(dp=2), strategy=strategy) as service:
        for rank in range(2):
            inputs = next(service.client(rank)).encoder
            bounds = [0]
            counts = service.plan_raw(0).encoder.bin(rank, 0).length * 4  # patches of a token
            columns = (inputs["image_grid_thw"].tolist(), inputs["image_offsets"].tolist(), counts.tolist())
            for (_, h, w), begin, count in zip(*columns, strict=True):
                done = 0
                while done < count:
                    step = min(h * w - (begin + done) % (h * w), count - done)
                    bounds.append(bounds[-1] + step)
                    done += step
            assert inputs["cu_seqlens"].tolist() == bounds
            assert bounds[-1] == len(inputs["pixel_values"])


def test_normalisation_needs_finite_numbers():
    with pytest.raises(ol.SpecError, match="mean"):
        ol.Layout(mean=(math.nan, 0.0, 0.0))


@pytest.mark.parametrize("placement", ["loader", "constructor"])
def test_loaders_without_an_image_in_their_run_change_nothing(tmp_path, tokenizer, cache, placement):
    """A step's rows come from several loaders; those of one may hold no image at all."""
    images = [[jpeg()] if row % 5 == 4 else [] for row in range(40)]
    texts = ["w1 <image> w2" if row % 5 == 4 else "w3 w4" for row in range(40)]
    path = tmp_path / "d.parquet"
    table = pa.table({"images": pa.array(images, pa.list_(pa.binary())), "text": texts})
    pq.write_table(table, path, row_group_size=2)
    sample = ol.Interleaved("images", "text", patch=4, min_pixels=16, max_pixels=256)
    source = ol.Source("a", str(path), sample=sample, shuffle_bytes=1)
    job = ol.Job([source], tokenizer=tokenizer, batch=ol.Batch(64, global_samples=8), max_steps=4)
    found = set()
    for loaders in (1, 3):
        options = {"placement": placement, "loaders_per_source": loaders, "runtime": "inline", "cache": cache}
        with ol.launch(job, **options) as service:
            found.add(digest_service(service, steps=4))
            assert service.status()["sources"]["a"]["bad"] == 0
    assert len(found) == 1


@pytest.mark.parametrize("layout", [ol.Layout(slicing="contiguous"), ol.Layout(rows="padded"), ol.Layout(block=8)])
def test_a_plan_made_by_hand_has_the_shape_of_the_layout(tmp_path, cache, layout):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"ids": [1] * n}) for n in range(2, 40)))
    job = job_of(str(tmp_path / "a.jsonl"), ol.Text("ids", tokenized=True), batch=ol.Batch(64, global_samples=4,
                 microbatch_tokens=256))  # fmt: skip
    mesh = ol.ClientPlaceTree(dp=2, cp=2)

    def by_hand(buffer, tree):
        return ol.plan_raw(buffer, tree, bucket=np.arange(len(buffer)) % tree.dp)

    def by_hand_and_wrong(buffer, tree):
        return dataclasses.replace(by_hand(buffer, tree), slicing="whole_zigzag")

    with ol.launch(job, runtime="inline", cache=cache, mesh=mesh, layout=layout, strategy=by_hand) as service:
        plan = service.plan_raw(0)
        batch = next(service.client(1)).microbatches[0]
    assert plan.slicing == layout.slicing and bool(plan.row_tokens) == (layout.rows != "packed")
    assert batch["input_ids"].shape[-1] % layout.block == 0
    with pytest.raises(ol.PlanError, match="another shape than the layout asks for"):
        ol.launch(job, runtime="inline", cache=cache, mesh=mesh, layout=layout, strategy=by_hand_and_wrong)


def test_the_first_step_reads_few_long_documents(tmp_path, cache):
    lines = [json.dumps({"ids": [1 + n % 50] * 6000}) for n in range(64)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = ol.Source("a", str(tmp_path / "a.jsonl"), sample=ol.Text("ids", tokenized=True), shuffle_bytes=0)
    job = ol.Job(sources=[source], batch=ol.Batch(8192, global_tokens=16384), overlength="truncate")
    _, status = first_batch(job, cache)
    assert status["rows_read"] <= 16, "lengths are learned from a few rows; all that seem to be needed are 64"
