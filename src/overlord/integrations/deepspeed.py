"""DeepSpeed: steps with any number of microbatches on one engine. It needs only the engine, not the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlord.errors import SpecError
from overlord.integrations.torch_batches import TorchBatch, TorchStep

__all__ = ["train_step"]


def train_step(engine: Any, step: TorchStep, summed_loss: Callable[[TorchBatch], torch.Tensor]) -> torch.Tensor:
    """Train on all microbatches of a step, and update the model once; return this rank's part of the mean loss.

    The engine is told which microbatch is the last one, so the number may change from step to step, and the losses are
    divided by the labels of the whole step, not by `gradient_accumulation_steps`. With ZeRO stages 2 and 3 ranks meet
    in every microbatch: let the plan give all of them as many.

    Args:
        engine: What `deepspeed.initialize` returned.
        step: A step of a `DataLoader`.
        summed_loss: Returns the loss of a microbatch, summed over its labels.

    Raises:
        SpecError: The engine does not let the caller decide when the model is updated.

    Example:
        A training loop, whose checkpoints hold the state of the stream::

            _, saved = engine.load_checkpoint("checkpoints")
            if saved is not None:
                loader.load_state_dict(saved["data"])
            for step in loader:
                train_step(engine, step, lambda batch: summed_loss(engine(**batch), batch))
                engine.save_checkpoint("checkpoints", client_state={"data": loader.state_dict()})
    """
    managed = getattr(engine, "managed_gradient_accumulation", lambda: True)()
    if not managed:
        raise SpecError(
            "train_step: managed_gradient_accumulation of the engine is false, which has no boundaries; gradients "
            "would be summed at other places. Leave it out of DeepSpeed's configuration."
        )
    # The engine averages gradients over data-parallel ranks; the sum over all of them is wanted.
    share = engine.dp_world_size / max(1, step.global_loss_tokens)
    total, last = torch.zeros(()), len(step.microbatches) - 1
    for number, batch in enumerate(step.microbatches):
        engine.set_gradient_accumulation_boundary(number == last)
        loss = summed_loss(batch) * share
        engine.backward(loss, scale_wrt_gas=False)
        total = total.to(loss) + loss.detach() / engine.dp_world_size
    engine.step()
    return total
