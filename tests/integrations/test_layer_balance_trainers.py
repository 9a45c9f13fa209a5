"""LayerBalance under the trainers that docs/layer-balance.md has lines for: its hooks see every step of theirs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlord.companions import LayerBalance, balance_groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def tiny_llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
        )
    )


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 200, (count, 32), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def check(balance: LayerBalance, steps: int) -> None:
    assert balance.steps == steps
    assert set(balance.metrics()) == {"alpha/mean", "alpha/std"} | {f"alpha/{b}" for b in blocks(balance)}
    assert {1.0, 5.0} <= set(balance.factors().values())


def blocks(balance: LayerBalance) -> set[str]:
    return {name.partition(".self_attn")[0].partition(".mlp")[0] for name in balance.alphas()}


def test_hugging_face_trainer(tmp_path: Path) -> None:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(balance_groups(model), lr=1e-3)
    balance = LayerBalance(model, optimizer, "llr", every=3)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=10, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=rows(64), optimizers=(optimizer, None)).train()
    check(balance, 10)


def test_accelerate() -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = tiny_llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(balance_groups(model), lr=1e-3))
    balance = LayerBalance(model, optimizer, "llr", every=2)
    for row in rows(6):
        accelerator.backward(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss)
        optimizer.step()
        optimizer.zero_grad()
    check(balance, 6)


def test_lightning() -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_llama()

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> Any:
            return self.inner(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(balance_groups(self), lr=1e-3)
            self.balance = LayerBalance(self, optimizer, "llr", every=2)
            return optimizer

    module = Module()
    trainer = lightning.Trainer(
        max_steps=6, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows(32), batch_size=4))
    check(module.balance, 6)
