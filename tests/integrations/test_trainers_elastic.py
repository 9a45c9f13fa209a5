"""Trainers that save on one rank and go on with two: sample ids go on exactly, and so do the losses."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import overlord as ol

MICROBATCHES, STEPS, SAVED = 4, 20, 10


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> ol.Job:
    folder = tmp_path_factory.mktemp("elastic")
    rng = np.random.default_rng(0)
    rows = [json.dumps({"ids": rng.integers(1, 60, rng.integers(4, 40)).tolist()}) for _ in range(400)]
    (folder / "web.jsonl").write_text("\n".join(rows))
    source = ol.Source("web", str(folder / "web.jsonl"), sample=ol.Text("ids", tokenized=True))
    batch = ol.Batch(64, global_tokens=200, microbatch_tokens=128, microbatches=MICROBATCHES)
    return ol.Job([source], batch=batch, overlength="split", seed=2)


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, attn_implementation="eager", **shape)
    )


def summed(model, batch):
    """The loss summed over the labels of a microbatch."""
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum")


def with_accelerate(loader, folder, steps, resume, seen):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    accelerator.register_for_checkpointing(loader)
    if resume:
        accelerator.load_state(folder)
    losses = []
    for step in loader:
        total = torch.zeros(())
        optimizer.zero_grad()
        for batch in step.microbatches:
            seen.append(batch.meta)
            loss = summed(model, batch) / step.global_loss_tokens
            accelerator.backward(loss * dist.get_world_size())  # gradients are averaged over ranks
            total += loss.detach()
        optimizer.step()
        dist.all_reduce(total)
        losses.append(float(total))
        if step.index + 1 == SAVED and not resume:
            accelerator.save_state(folder)
        if step.index + 1 == steps:
            return losses
    raise AssertionError("the stream ended")


def with_hugging_face(loader, folder, steps, resume, seen):
    from transformers import Trainer, TrainingArguments

    return with_trainer(Trainer, TrainingArguments, {}, {}, loader, folder, steps, resume, seen)


def with_trl(loader, folder, steps, resume, seen):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, "w0"))
    options = {"bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False}
    given = {
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1"),
        "train_dataset": Dataset.from_list([{"input_ids": [0], "labels": [0]}]),
    }
    return with_trainer(SFTTrainer, SFTConfig, options, given, loader, folder, steps, resume, seen)


def with_trainer(trainer_class, config, options, given, loader, folder, steps, resume, seen):
    from overlord.integrations.hf import OverlordTrainerMixin

    class Watched(OverlordTrainerMixin, trainer_class):
        def get_train_dataloader(self):
            for batch in self.batches:
                seen.append(batch.meta)
                yield dict(batch)

    args = config(
        folder, max_steps=steps, gradient_accumulation_steps=MICROBATCHES // dist.get_world_size(), save_steps=SAVED,
        use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True, learning_rate=1e-2,
        lr_scheduler_type="constant", save_total_limit=None, **options,
    )  # fmt: skip
    trainer = Watched(model=tiny_llama(), args=args, loader=loader, **given)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return losses[SAVED:] if resume else losses


def with_lightning(loader, folder, steps, resume, seen):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    world, losses = dist.get_world_size(), []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = tiny_llama(), False

        def training_step(self, step, batch_idx):
            optimizer, total = self.optimizers(), torch.zeros(())
            optimizer.zero_grad()
            for batch in step.microbatches:
                seen.append(batch.meta)
                loss = summed(self.model, batch) / step.global_loss_tokens
                self.manual_backward(loss * world)
                total += loss.detach()
            optimizer.step()
            dist.all_reduce(total)
            losses.append(float(total))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=SAVED, save_top_k=-1, filename="{step}")
    trainer = Trainer(
        max_steps=steps, accelerator="cpu", devices=world, strategy="ddp", logger=False, callbacks=[saving],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), loader, ckpt_path=f"{folder}/step={SAVED}.ckpt" if resume else None)
    return losses


TRAINERS = {
    "accelerate": with_accelerate,
    "hugging face": with_hugging_face,
    "trl": with_trl,
    "lightning": with_lightning,
}


def train(rank, world, job, cache, folder, resume):
    """Run each trainer; return for each (sample ids of its steps, losses of its steps)."""
    warnings.simplefilter("ignore")
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {name: str(value) for name, value in told.items()}
    from overlord.integrations.torch_loader import DataLoader

    found = {}
    for name, trainer in TRAINERS.items():
        spread = job.replace(batch=job.batch.replace(microbatches=MICROBATCHES // world))
        seen = []
        with DataLoader(spread, mesh=f"dp={world}", cache=cache) as loader:
            losses = trainer(loader, f"{folder}/{name}", STEPS, resume, seen)
        each = MICROBATCHES // world
        ids = [sorted(str(i) for meta in seen[at : at + each] for i in meta.sample_ids if i.source)
               for at in range(0, len(losses) * each, each)]  # fmt: skip
        found[name] = ids, losses
        dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainers_resume_on_another_number_of_ranks(job, cache, tmp_path):
    (whole,) = run_ranks(train, 1, tmp_path / "one", 1, job, cache, str(tmp_path), False)
    again = run_ranks(train, 2, tmp_path / "two", 2, job, cache, str(tmp_path), True)
    for name in TRAINERS:
        ids, losses = whole[name]
        assert len(losses) == STEPS, name
        parts = [rank[name] for rank in again]
        assert [sorted(a + b) for a, b in zip(*(one for one, _ in parts), strict=True)] == ids[SAVED:], name
        assert parts[0][1] == pytest.approx(losses[SAVED:], rel=5e-5), name
