"""The Hugging Face Trainer, and those made from it such as TRL's SFTTrainer, on a stream that resumes exactly."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from overlord.errors import SpecError, StateError
from overlord.integrations.torch_batches import TorchBatch
from overlord.integrations.torch_loader import DataLoader, FlatLoader
from overlord.integrations.torch_losses import SourceLosses

STATE_FILE = "overlord.json"
"""Beside the other files of a checkpoint: the state of the stream."""


class OverlordTrainerMixin:
    """Lets a Hugging Face trainer take its batches from a `DataLoader`, which resumes with the trainer's checkpoints.

    Example:
        A trainer with the batches of a job::

            class OverlordTrainer(OverlordTrainerMixin, Trainer):
                pass

            trainer = OverlordTrainer(model=model, args=args, loader=DataLoader("job.yaml"))
            trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, *args: Any, loader: DataLoader, report_losses: bool = False, **kwargs: Any) -> None:
        """Set up the trainer.

        Args:
            *args: Of the trainer.
            loader: What to train on. `batch.microbatches` of its job is `gradient_accumulation_steps`.
            report_losses: Report the mean loss of each source after every step: for mixtures that learn. It computes
                the loss of each token once more, from the logits.
            **kwargs: Of the trainer.
        """
        super().__init__(*args, **kwargs)
        arguments: TrainingArguments = self.args  # type: ignore[attr-defined]
        self.loader = loader
        self.batches = loader.flat(arguments.gradient_accumulation_steps)
        """The microbatches of the loader."""
        self._losses = SourceLosses(loader) if report_losses else None
        self._expected: deque[TorchBatch] = deque()
        """Microbatches that will be trained on, in their order, where their losses are reported."""
        arguments.ignore_data_skip = True  # the loader is where it was; the trainer must not skip batches itself
        # The Trainer would drop keys that its model's forward does not name; the loader gives those that are needed.
        arguments.remove_unused_columns = False
        self.add_callback(_SavesState(loader))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """Return the microbatches, as plain dictionaries of tensors."""
        return _Dictionaries(self.batches, None if self._losses is None else self._expected)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; a checkpoint also brings the stream to where it was saved.

        Raises:
            StateError: The checkpoint has no state of the stream.
        """
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)  # type: ignore[attr-defined,no-untyped-call]
        if folder:
            self.loader.load_state_dict(_read_state(Path(folder)))
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Compute the loss as the trainer does; with `report_losses` also that of each source."""
        if self._losses is None:
            return super().compute_loss(model, inputs, return_outputs, **kwargs)  # type: ignore[misc,no-any-return]
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)  # type: ignore[misc]
        if model.training:
            logits = getattr(outputs, "logits", None)
            if logits is None:
                raise SpecError(
                    "report_losses: this trainer's model returns no logits (its loss is fused with the last layer), so "
                    "the loss of each source is not known. Leave report_losses out, or turn the fused loss off."
                )
            self._losses.add(self._expected.popleft(), logits)
        return (loss, outputs) if return_outputs else loss


class OverlordTrainer(OverlordTrainerMixin, Trainer):  # type: ignore[misc]
    """The Hugging Face Trainer on a `DataLoader`."""


class _Dictionaries:
    """The microbatches of a loader as dictionaries: the Trainer makes new mappings of the type that it finds."""

    def __init__(self, batches: FlatLoader, expected: deque[TorchBatch] | None) -> None:
        self._batches = batches
        self._expected = expected

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            if self._expected is not None:
                self._expected.append(batch)
            yield dict(batch)

    def __len__(self) -> int:
        return len(self._batches)

    def __bool__(self) -> bool:
        return True


class _SavesState(TrainerCallback):  # type: ignore[misc]
    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        found = self._loader.state_dict()  # on every rank: a loader may ask the service for it
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            made = folder / f".{STATE_FILE}"
            made.write_text(json.dumps(found))
            os.replace(made, folder / STATE_FILE)  # whole, or not there


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        return json.loads(path.read_text())  # type: ignore[no-any-return]
    except FileNotFoundError:
        raise StateError(
            f"{path} does not exist: the checkpoint was saved by a trainer without an overlord DataLoader; its stream "
            "would begin anew and repeat samples. Resume from a checkpoint of this trainer."
        ) from None
    except ValueError as error:
        raise StateError(f"{path} is damaged ({error!s:.80}). Resume from another checkpoint.") from None
