"""Which keys of a batch a pipeline stage needs: the first embeds, the last computes the loss.

Separate from `transforms.microbatches` because trainer processes import it, and must not load numba.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_STAGE_KEYS = (
    "input_ids",
    "tokens",
    "input",
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
    "input_features",
    "feature_attention_mask",
)
"""What embedding needs: token ids, and what the encoders read."""
LAST_STAGE_KEYS = ("labels", "shift_labels", "loss_mask")
"""What the loss needs."""
EVERY_STAGE_KEYS = (
    "attention_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_length_q",
    "max_length_k",
    "max_seqlen",
    "local_cp_size",
    "positions",
    "use_cache",
)
"""What attention needs in every layer."""
TOKEN_KEYS = ("input_ids", "tokens", "input")


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers that a pipeline rank (or one of its chunks) holds."""

    pp_rank: int = 0
    pp: int = 1
    chunk: int | None = None
    """Which of the rank's model chunks; None for all of them."""
    vpp: int = 1

    @property
    def embeds(self) -> bool:
        """Whether the embedding is among them."""
        return self.pp_rank == 0 and self.chunk in (None, 0)

    @property
    def has_loss(self) -> bool:
        """Whether the loss is computed here."""
        return self.pp_rank == self.pp - 1 and self.chunk in (None, self.vpp - 1)


def needs(stage: Stage, key: str, *, mtp: bool = False, rotary: bool = True) -> bool:
    """Return whether a pipeline stage needs a key: the first embeds, the last computes the loss.

    Args:
        stage: The stage.
        key: A key of the batch.
        mtp: Whether the last stage predicts several tokens.
        rotary: Whether every layer turns its queries by `position_ids` (all but Megatron's, which counts itself).

    Example:
        >>> [key for key in ("tokens", "labels", "cu_seqlens") if needs(Stage(1, 4), key)]
        ['cu_seqlens']
    """
    if key == "position_ids":
        return rotary or stage.embeds or (mtp and stage.has_loss)
    if key in FIRST_STAGE_KEYS:
        return stage.embeds or (mtp and stage.has_loss and key in TOKEN_KEYS)
    if key in LAST_STAGE_KEYS:
        return stage.has_loss
    return key in EVERY_STAGE_KEYS
