"""Parallelism transformations: which tokens and which keys of a microbatch each rank needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import expand_ranges

FIRST_STAGE_KEYS = ("input_ids", "position_ids", "pixel_values", "image_grid_thw")
LAST_STAGE_KEYS = ("labels", "shift_labels")
EVERY_STAGE_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def zigzag_indices(cu_seqlens: npt.NDArray[np.integer], cp: int, cp_rank: int) -> npt.NDArray[np.int64]:
    """Return the tokens of one context-parallel rank: two mirrored chunks of every segment.

    Segments must be multiples of 2 * cp long. Slicing the packed stream as a whole instead would give
    one rank all of the early segments.

    Example:
        >>> zigzag_indices(np.array([0, 8, 16]), 2, 0).tolist()
        [0, 1, 6, 7, 8, 9, 14, 15]
    """
    starts = cu_seqlens[:-1].astype(np.int64)
    chunk = np.diff(cu_seqlens).astype(np.int64) // (2 * cp)
    begins = np.stack([starts + cp_rank * chunk, starts + (2 * cp - 1 - cp_rank) * chunk], axis=1).reshape(-1)
    return expand_ranges(begins, np.repeat(chunk, 2))


def keys_of_stage(pp_rank: int, pp: int) -> tuple[str, ...]:
    """Return the keys a pipeline stage needs: the first embeds, the last computes the loss.

    Example:
        >>> keys_of_stage(1, 4) == EVERY_STAGE_KEYS
        True
    """
    keys: tuple[str, ...] = EVERY_STAGE_KEYS
    if pp_rank == 0:
        keys = FIRST_STAGE_KEYS + keys
    if pp_rank == pp - 1:
        keys = LAST_STAGE_KEYS + keys
    return keys
