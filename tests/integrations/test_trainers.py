"""Trainers with the real libraries: their own loops and checkpoints; samples go on exactly, and so do the losses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig, SFTTrainer

import overlord as ol
from overlord.integrations.hf import OverlordTrainer, OverlordTrainerMixin
from overlord.integrations.lightning import OverlordDataModule
from overlord.integrations.torch_loader import DataLoader
from overlord.integrations.torch_losses import SourceLosses

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
MICROBATCHES = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> ol.Job:
    folder = tmp_path_factory.mktemp("trainers")
    rng = np.random.default_rng(0)
    for name in ("web", "code"):
        rows = [json.dumps({"ids": rng.integers(1, 60, rng.integers(4, 40)).tolist()}) for _ in range(300)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    sources = [ol.Source(n, str(folder / f"{n}.jsonl"), sample=ol.Text("ids", tokenized=True)) for n in ("web", "code")]
    batch = ol.Batch(64, global_tokens=200, microbatch_tokens=128, microbatches=MICROBATCHES)
    return ol.Job(sources, batch=batch, overlength="split", seed=2)


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    )


class Watched(OverlordTrainerMixin):
    """Notes what it trains on, whichever trainer it is mixed into."""

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.seen.append((inputs["input_ids"].flatten().tolist(), float(loss)))
        return loss


class WatchedTrainer(Watched, OverlordTrainer):
    pass


def run_hf(job, cache, folder, steps, *, resume=False, **options):
    """Train to a step; return what each microbatch held, with its loss."""
    args = TrainingArguments(
        str(folder), max_steps=steps, gradient_accumulation_steps=MICROBATCHES, save_steps=3, use_cpu=True,
        report_to=[], logging_steps=1, disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="constant",
    )  # fmt: skip
    with DataLoader(job, cache=cache, runtime="inline") as loader:
        trainer = WatchedTrainer(model=tiny_llama(), args=args, loader=loader, **options)
        trainer.seen = []
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_hugging_face_trainer_resumes_exactly(job, cache, tmp_path):
    whole = run_hf(job, cache, tmp_path / "whole", 6).seen
    assert len(whole) == 6 * MICROBATCHES
    first = run_hf(job, cache, tmp_path / "parts", 3).seen
    second = run_hf(job, cache, tmp_path / "parts", 6, resume=True).seen
    assert [ids for ids, _ in first + second] == [ids for ids, _ in whole]
    assert [loss for _, loss in first + second] == pytest.approx([loss for _, loss in whole], rel=1e-5)


def test_sft_trainer_takes_the_same_batches(job, cache, tmp_path):
    class WatchedSFT(Watched, SFTTrainer):
        pass

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, "w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    args = SFTConfig(
        str(tmp_path), max_steps=3, gradient_accumulation_steps=MICROBATCHES, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", learning_rate=1e-2, lr_scheduler_type="constant", bf16=False,
        dataset_kwargs={"skip_prepare_dataset": True}, gradient_checkpointing=False,
    )  # fmt: skip
    placeholder = Dataset.from_list([{"input_ids": [0], "labels": [0]}])
    with DataLoader(job, cache=cache, runtime="inline") as loader:
        trainer = WatchedSFT(
            model=tiny_llama(), args=args, processing_class=tokenizer, train_dataset=placeholder, loader=loader
        )
        trainer.seen = []
        trainer.train()
    expected = run_hf(job, cache, tmp_path / "plain", 3).seen
    assert [ids for ids, _ in trainer.seen] == [ids for ids, _ in expected]
    assert [loss for _, loss in trainer.seen] == pytest.approx([loss for _, loss in expected], rel=1e-4)


def test_accelerate_saves_and_loads_the_stream(job, cache, tmp_path):
    """Nothing of ours is needed: a loader that is no torch DataLoader passes `prepare` as it is."""

    def ids(loader, steps):
        return [
            [batch["input_ids"].tolist() for batch in step.microbatches]
            for _, step in zip(range(steps), loader, strict=False)
        ]

    with DataLoader(job, cache=cache, runtime="inline") as loader:
        accelerator = Accelerator(cpu=True)
        same = accelerator.prepare(loader)
        accelerator.register_for_checkpointing(same)
        ids(same, 3)
        accelerator.save_state(str(tmp_path))
        expected = ids(same, 3)
    with DataLoader(job, cache=cache, runtime="inline") as loader:
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(accelerator.prepare(loader))
        accelerator.load_state(str(tmp_path))
        assert ids(loader, 3) == expected


def test_a_checkpoint_without_a_stream_is_refused(job, cache, tmp_path):
    run_hf(job, cache, tmp_path, 3)
    (tmp_path / "checkpoint-3" / "overlord.json").unlink()
    with pytest.raises(ol.StateError, match="would begin anew and repeat samples"):
        run_hf(job, cache, tmp_path, 6, resume=True)


def test_losses_of_sources_are_reported(job, cache, tmp_path):
    learning = job.replace(mixture=ol.Mixture({"web": 1, "code": 1}, learn=ol.Learn("odm")), lag=4)
    reported = {}

    class Reporting(WatchedTrainer):
        def __init__(self, *args, loader, **kwargs):
            super().__init__(*args, loader=loader, **kwargs)
            tell = loader.report
            loader.report = lambda step, metrics: (reported.update({step: metrics}), tell(step, metrics))

    args = TrainingArguments(
        str(tmp_path), max_steps=7, gradient_accumulation_steps=MICROBATCHES, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    with DataLoader(learning, cache=cache, runtime="inline", prefetch=2) as loader:
        trainer = Reporting(model=tiny_llama(), args=args, loader=loader, report_losses=True)
        trainer.seen = []
        trainer.train()  # step 4 would wait for the report of step 0
    assert sorted(reported) == list(range(7))
    assert all(set(one) <= {"loss/web", "loss/code"} and one for one in reported.values())
    assert all(2 < loss < 8 for one in reported.values() for loss in one.values())


def logits_of(batch):
    """Return logits that follow from the tokens and positions of a microbatch, whatever its layout is."""
    tokens = next(batch[key] for key in ("input_ids", "tokens", "input") if key in batch)
    places = next(batch[key] for key in ("position_ids", "positions") if key in batch)
    return torch.sin(tokens[..., None] * 0.7 + places[..., None] * 0.3 + torch.arange(64) * 0.1)


def losses_reported(job, cache, layout, add):
    """Return what is reported of each of three steps."""
    reported = {}
    with DataLoader(job, cache=cache, runtime="inline", layout=layout, device="cpu") as loader:
        loader.report = reported.__setitem__
        losses = SourceLosses(loader)
        for _, step in zip(range(3), loader, strict=False):
            for batch in step.microbatches:
                add(losses, batch, step)
    assert sorted(reported) == [0, 1, 2] and all(set(one) == {"loss/web", "loss/code"} for one in reported.values())
    return [loss for step in range(3) for loss in reported[step].values()]


@pytest.mark.parametrize("layout", ["megatron", "torchtitan"])
def test_losses_of_sources_are_the_same_from_every_layout(layout, job, cache):
    def add_losses(losses, batch, step):
        """As Megatron's models do: the loss of every token."""
        logits = logits_of(batch).float().flatten(0, -2)
        each = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="none")
        losses.add(batch, each.view_as(batch["labels"]), step)

    def add_logits(losses, batch, step):
        losses.add(batch, logits_of(batch), step)

    expected = losses_reported(job, cache, "hf", add_logits)
    for add in (add_logits, add_losses):
        assert losses_reported(job, cache, layout, add) == pytest.approx(expected, rel=1e-5)


def test_a_microbatch_whose_step_is_not_known_is_refused(job, cache):
    with DataLoader(job, cache=cache, runtime="inline") as loader:
        batch = next(iter(loader)).microbatches[0]
        with pytest.raises(ol.SpecError, match=r"the step of the microbatch is not known"):
            SourceLosses(loader).add(batch, logits_of(batch))


def test_another_number_of_microbatches_is_refused(job, cache, tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, gradient_accumulation_steps=3, use_cpu=True, report_to=[])
    with (
        DataLoader(job, cache=cache, runtime="inline") as loader,
        pytest.raises(ol.SpecError, match=r"microbatches is 3, and batch.microbatches of the job is 2"),
    ):
        OverlordTrainer(model=tiny_llama(), args=args, loader=loader)
    with (
        DataLoader(job.replace(batch=ol.Batch(64, global_tokens=200)), cache=cache, runtime="inline") as loader,
        pytest.raises(ol.SpecError, match=r"is not set, so the number may change from step to step"),
    ):
        loader.flat(2)


class Module(LightningModule):
    """Trains on microbatches, or with manual optimization on whole steps."""

    def __init__(self, whole_steps: bool) -> None:
        super().__init__()
        self.model, self.seen = tiny_llama(), []
        self.automatic_optimization = not whole_steps

    def loss(self, batch):
        loss = self.model(**dict(batch)).loss
        self.seen.append((batch["input_ids"].flatten().tolist(), float(loss)))
        return loss

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for one in batch.microbatches:
            self.manual_backward(self.loss(one))
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_lightning(job, cache, folder, steps, *, whole_steps, resume=None):
    seed_everything(0)
    module = Module(whole_steps)
    data = OverlordDataModule(job, microbatches=None if whole_steps else MICROBATCHES, cache=cache, runtime="inline")
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = Trainer(
        max_steps=steps, accumulate_grad_batches=1 if whole_steps else MICROBATCHES, accelerator="cpu", logger=False,
        callbacks=[saving], enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    data.loader.close()
    return module.seen


@pytest.mark.parametrize("known", [False, True], ids=["fetches ahead", "length known"])
@pytest.mark.parametrize("whole_steps", [True, False], ids=["steps", "microbatches"])
def test_lightning_resumes_exactly(job, cache, tmp_path, whole_steps, known):
    given = job.replace(max_steps=50) if known else job
    whole = run_lightning(given, cache, tmp_path / "whole", 6, whole_steps=whole_steps)
    assert len(whole) == 6 * MICROBATCHES
    first = run_lightning(given, cache, tmp_path / "parts", 3, whole_steps=whole_steps)
    saved = str(tmp_path / "parts" / "step=3.ckpt")
    second = run_lightning(given, cache, tmp_path / "parts", 6, whole_steps=whole_steps, resume=saved)
    assert [ids for ids, _ in first + second] == [ids for ids, _ in whole]
    assert [loss for _, loss in first + second] == pytest.approx([loss for _, loss in whole], rel=1e-5)


def test_lightning_finds_its_last_checkpoint_as_the_docs_have_it(job, cache, tmp_path):
    """`ckpt_path="last"` begins anew, with a warning only, where no callback writes that file into a fixed folder."""
    docs = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    saving = re.search(r"^\+saving = (ModelCheckpoint\(.*\))$", docs, re.MULTILINE)[1]

    def fit(steps):
        callback = eval(saving.replace('"checkpoints"', repr(str(tmp_path))).replace("=100", "=2"))
        trainer = Trainer(
            max_steps=steps, accumulate_grad_batches=MICROBATCHES, accelerator="cpu", logger=False,
            callbacks=[callback], enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        module = Module(whole_steps=False)
        data = OverlordDataModule(job, microbatches=MICROBATCHES, cache=cache, runtime="inline")
        trainer.fit(module, datamodule=data, ckpt_path="last")
        data.loader.close()
        return [ids for ids, _ in module.seen]

    first, second = fit(3), fit(5)  # the checkpoint is of step 2: what came after it is trained on again
    assert len(first) == 3 * MICROBATCHES and len(second) == 3 * MICROBATCHES
    assert second[:MICROBATCHES] == first[2 * MICROBATCHES :]
