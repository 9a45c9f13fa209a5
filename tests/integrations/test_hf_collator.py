"""Packed batches are what transformers' own collator makes of the same samples, and its models train on them alike."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny_models import alone
from tokenizers import Tokenizer
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import overlord as ol
from overlord.integrations.torch_loader import DataLoader, TorchStep

CONTEXT, VOCABULARY = 32, 61


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(row):
    return {"tokens": row["ids"], "loss_mask": row["mask"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Rows of token ids by sample, and the folder that holds them; some rows are longer than the context."""
    folder, rows = tmp_path_factory.mktemp("collated"), {}
    rng = np.random.default_rng(1)
    for file in range(2):
        lines = []
        for row, length in enumerate((1 + rng.integers(0, 80, 30)).tolist()):
            found = {"ids": rng.integers(0, VOCABULARY, length).tolist(), "mask": rng.integers(0, 2, length).tolist()}
            rows[file, row] = found
            lines.append(json.dumps(found))
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return folder, rows


def job_of(written, masked: bool) -> ol.Job:
    sample = ol.Text("ids", tokenized=True)
    if masked:
        sample = ol.Custom(answers, columns=["ids", "mask"], process=False)
    return ol.Job(
        sources=[ol.Source("rows", str(written[0]), sample=sample)],
        batch=ol.Batch(CONTEXT, global_samples=10, microbatch_tokens=3 * CONTEXT),
        overlength="split",
        seed=2,
    )


def features_of(written, meta, masked: bool) -> list[dict[str, list[int]]]:
    """The pieces that a batch says it holds, as a dataset of transformers would give them."""
    features = []
    for sample, offset, length in zip(meta.sample_ids, meta.segment_offsets, meta.segment_lengths, strict=True):
        row = written[1][sample.file, sample.row_in_file]
        ids, mask = row["ids"][offset : offset + length], row["mask"][offset : offset + length]
        feature = {"input_ids": ids}
        if masked:
            feature["labels"] = [token if kept else -100 for token, kept in zip(ids, mask, strict=True)]
        features.append(feature)
    return features


def steps_of(job, cache, steps, **options) -> list[TorchStep]:
    with DataLoader(job, runtime="inline", cache=cache, **options) as loader:
        found = []
        for step, _ in zip(loader, range(steps), strict=False):
            step.microbatches = list(step.microbatches)
            found.append(step)
        return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "strategy",
    [None, ol.strategies.vanilla(), ol.strategies.packed(), ol.strategies.packed(method="concat")],
    ids=["balance", "vanilla", "best fit", "concat"],
)
def test_batches_are_those_of_the_collator(strategy, masked, written, cache):
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    split, packed = 0, 0
    for rank in range(2):
        options = {"mesh": ol.ClientPlaceTree(dp=2), "rank": rank, "strategy": strategy}
        for step in steps_of(job_of(written, masked), cache, 4, **options):
            for batch in step.microbatches:
                assert batch.meta.loss_tokens == int((batch["labels"] != -100).sum())
                if not batch.meta.sample_ids[0].source:  # a dummy that keeps ranks in step
                    assert batch.meta.dummy and set(batch["labels"].flatten().tolist()) == {-100}
                    continue
                expected = collate(features_of(written, batch.meta, masked))
                # What the collator leaves to the trainer: with a cache, sdpa would not look for packed samples.
                assert set(batch) == set(expected) | {"use_cache"} and batch["use_cache"] is False
                for key, value in expected.items():
                    assert type(batch[key]) is type(value), key
                    if isinstance(value, torch.Tensor):
                        torch.testing.assert_close(batch[key], value, rtol=0, atol=0)  # types and shapes as well
                    else:
                        assert batch[key] == value, key
                split += int((batch.meta.segment_offsets > 0).sum())
                packed += len(batch.meta.sample_ids) > 1
    assert split > 0 and packed > 0


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        initializer_range=0.3,
        use_cache=False,  # with a cache their masks do not look for packed sequences
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double()


def train(model, steps, batches_of) -> tuple[list[float], torch.Tensor]:
    """Run SGD on a copy of the model; a step's loss is the sum over its batches."""
    model = copy.deepcopy(model)
    weights, losses = list(model.parameters()), []
    for step in steps:
        # `num_items_in_batch` is what transformers' Trainer divides by under gradient accumulation.
        loss = sum(model(**b, num_items_in_batch=step.global_loss_tokens).loss for b in batches_of(step))
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            torch._foreach_add_(weights, gradients, alpha=-0.2)
        losses.append(float(loss.detach()))
    return losses, torch.cat([weight.detach().flatten() for weight in weights])


def assert_alike(found, expected) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)  # rotary angles and losses are float32 in their models
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-7)
    assert expected[0][-1] != pytest.approx(expected[0][0], rel=1e-3)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("rows", ["packed", "padded"])
def test_a_model_of_transformers_trains_as_on_one_sample_at_a_time(rows, attention, llama, written, cache):
    steps = steps_of(job_of(written, masked=True), cache, 3, layout=ol.Layout("hf", rows=rows))

    def features(step):
        for batch in step.microbatches:
            for feature in features_of(written, batch.meta, masked=True):
                yield {name: torch.tensor([values]) for name, values in feature.items()}

    llama.set_attn_implementation(attention)
    assert_alike(train(llama, steps, lambda step: step.microbatches), train(llama, steps, features))


@pytest.fixture(scope="module")
def picture_job(demo_files) -> ol.Job:
    sizes = {"patch": 8, "merge": 2, "temporal": 2, "min_pixels": 32 * 32, "max_pixels": 64 * 64}
    return ol.Job(
        sources=[
            ol.Source("forum", demo_files.sources["forum"], sample=ol.Text("text")),
            ol.Source("coyo", demo_files.sources["coyo"], sample=ol.ImageText("jpg", "caption", **sizes)),
        ],
        tokenizer=str(demo_files.tokenizer),
        batch=ol.Batch(64, global_samples=8, microbatch_tokens=192),
        overlength="split",
        seed=4,
    )


@pytest.fixture(scope="module")
def qwen(demo_files):
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    rotary = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    vision = {"depth": 1, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tokens = Tokenizer.from_file(str(demo_files.tokenizer))
    text = {
        "intermediate_size": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": tokens.get_vocab_size(),
        "rope_parameters": rotary,
    }
    config = Qwen2VLConfig(
        text_config=small | text | {"initializer_range": 0.3, "use_cache": False},
        vision_config=vision | {"embed_dim": 16, "hidden_size": 16, "initializer_range": 0.3},
        image_token_id=tokens.token_to_id("<image>"),
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(config).double()


@pytest.mark.parametrize("strategy", [ol.strategies.packed(), ol.strategies.vanilla()], ids=["best fit", "vanilla"])
def test_a_vision_language_model_of_transformers_trains_alike(strategy, qwen, picture_job, cache):
    """Packed, with our M-RoPE positions; against one sample at a time, with the positions the model makes itself."""
    layout = ol.Layout("hf", positions="mrope_text", pixels="float32")
    steps = steps_of(picture_job, cache, 2, strategy=strategy, layout=layout)
    lone = steps_of(picture_job, cache, 2, strategy=alone, layout=layout)
    assert any(len(batch.get("image_grid_thw", ())) > 1 for step in steps for batch in step.microbatches)

    def packed(step):
        for batch in step.microbatches:
            yield {**batch, "mm_token_type_ids": (batch["input_ids"] == qwen.config.image_token_id).int()}

    def one_by_one(step):
        for batch in packed(step):
            assert len(batch["cu_seq_lens_q"]) == 2
            names = ("input_ids", "labels", "pixel_values", "image_grid_thw", "mm_token_type_ids")
            yield {name: batch[name] for name in names if name in batch}

    assert_alike(train(qwen, steps, packed), train(qwen, lone, one_by_one))


def test_the_loop_that_the_readme_shows_stays_finite_where_a_microbatch_has_no_label(llama, written, cache):
    job = job_of(written, masked=False)
    job = job.replace(batch=ol.Batch(CONTEXT, global_samples=1, microbatch_tokens=8 * CONTEXT))
    ranks = [steps_of(job, cache, 6, mesh=ol.ClientPlaceTree(dp=2), rank=rank) for rank in range(2)]
    alone = steps_of(job, cache, 6)
    dummies = 0
    for pair, whole in zip(zip(*ranks, strict=True), alone, strict=True):
        losses = []
        for batch in [batch for step in (*pair, whole) for batch in step.microbatches]:
            mean = llama(**batch).loss
            model_loss = llama(**batch, num_items_in_batch=max(1, whole.global_loss_tokens)).loss
            assert bool(mean.isnan()) == batch.meta.dummy
            assert model_loss.isfinite() and (model_loss == 0 if batch.meta.dummy else model_loss > 0)
            losses.append(model_loss.item())
            dummies += batch.meta.dummy
        assert not any(batch.meta.dummy for batch in whole.microbatches)
        shared = sum(len(step.microbatches) for step in pair)
        assert sum(losses[:shared]) == pytest.approx(sum(losses[shared:]), rel=1e-5)
    assert dummies > 0
