"""Lightning: a DataModule whose stream resumes with Lightning's checkpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule

from overlord.integrations.torch_loader import DataLoader, FlatLoader

if TYPE_CHECKING:
    from overlord.job.specs import Job


class OverlordDataModule(LightningDataModule):  # type: ignore[misc]
    """The stream of a job as Lightning's training data.

    Lightning saves and loads the state of the loader with its own checkpoints. It fetches one batch ahead where the
    length of the stream is not known; such a batch counts as not trained on.

    Example:
        Microbatches, with automatic optimization::

            data = OverlordDataModule("job.yaml", microbatches=4)
            saving = ModelCheckpoint("checkpoints", every_n_train_steps=100, save_last=True)
            trainer = Trainer(accumulate_grad_batches=4, max_steps=1000, callbacks=[saving])
            trainer.fit(module, datamodule=data, ckpt_path="last")
    """

    def __init__(self, job: Job | str | os.PathLike[str], *, microbatches: int | None = None, **options: Any) -> None:
        """Say what to read; nothing is started yet.

        Args:
            job: A job, a job file, or the address of a running service, as for `DataLoader`.
            microbatches: Hand out single microbatches: as many make a step, `accumulate_grad_batches` of the trainer.
                By default whole steps are handed out, for manual optimization.
            **options: The arguments of `DataLoader`: mesh, rank, device, and those of `overlord.launch`.
        """
        super().__init__()
        self.loader = DataLoader(job, **options)
        self._batches: DataLoader | FlatLoader = self.loader
        if microbatches is not None:
            self._batches = self.loader.flat(microbatches)

    def train_dataloader(self) -> DataLoader | FlatLoader:
        """Return the steps, or the microbatches."""
        return self._batches

    def teardown(self, stage: str) -> None:
        """End the service after a fit, if this loader started it; a further fit goes on where this one ended."""
        if stage == "fit" and not self.loader.is_closed:
            state = self.loader.state_dict()
            self.loader.load_state_dict(state)
