"""`Layout`: keys and shapes of the batches a trainer takes; and the words of a launch. None changes the stream."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.samples import CLIP_MEAN, CLIP_STD
from overlord.core.spec_errors import conflict
from overlord.job.spec_model import Spec, real, whole

if TYPE_CHECKING:
    from overlord.core.draw import Limits


Runtime = Literal["local", "ray", "inline"]
"""Where the roles run."""
Placement = Literal["auto", "loader", "constructor"]
"""Where the media of a source are decoded."""
OnSourceFailure = Literal["stop", "park", "reweight"]
"""What happens to a source that cannot be read: the run stops; it is parked until it is back; it is parked for good."""
_XDG = os.environ.get("XDG_CACHE_HOME", "")
DEFAULT_CACHE = os.path.join(_XDG if os.path.isabs(_XDG) else "~/.cache", "overlord")
"""Folder for the indices of files. Where XDG_CACHE_HOME is a relative path, its specification says to ignore it."""
DEFAULT_CACHE_BYTES = 4 << 30
"""What is kept of remote files in that folder, at most."""
DEFAULT_HEARTBEAT_S = 5.0
"""Silence of a role after which it is replaced. All time limits of the runtimes are derived from it."""

Keys = Literal["hf", "megatron", "torchtitan"]
Rows = Literal["packed", "padded", "full"]
Slicing = Literal["zigzag", "whole_zigzag", "contiguous", "whole"]
Positions = Literal["plain", "mrope", "mrope_text"]


class Layout(Spec):
    """The keys of a batch, how pieces share a sequence, and how ranks share that.

    Example:
        >>> Layout("megatron", sequence_parallel=True, block=32).rank_multiple(tp=4)
        128
    """

    keys: Keys = Field(default="hf", kw_only=False)
    """Whose names and label convention: "hf" (labels not shifted), "megatron" and "torchtitan" (shifted)."""
    rows: Rows = "packed"
    """"packed": pieces one behind the other in one sequence. "padded": a row each, as long as the longest of its
    microbatch; "full": a row each of the whole context length."""
    slicing: Slicing = "zigzag"
    """How context-parallel ranks share a sequence: two mirrored chunks of every segment ("zigzag") or of the whole
    sequence ("whole_zigzag"), or one chunk each ("contiguous": Ulysses). With "whole" each gets all of it, padded as
    for "zigzag", so that the trainer can cut it in any of these ways."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks share the tokens of a slice: it becomes a multiple of tp."""
    block: Annotated[int, whole(1, "tokens are rounded up to blocks of it. Write 32 for MXFP8", example="32")] = 1
    """What the tokens a rank computes on are a multiple of: 16 for FP8, 32 for MXFP8, 128 for expert chunks."""
    positions: Positions = "plain"
    """"plain" (0, 1, .. in every segment), "mrope" (three rows: time, height, width, as Qwen-VL takes them) or
    "mrope_text" (four rows, the first being plain)."""
    tokens_per_second: Annotated[float, real(0, 1e6, "clips would have no time. Write 2, or 0 for one a patch")] = 0.0
    """M-RoPE positions of one second of a clip (Qwen2.5-VL: 2); 0 gives every temporal patch one (Qwen2-VL)."""
    count_time: bool = False
    """Whether the text behind a clip goes on behind its last moment too (transformers 4), or only behind its rows and
    columns (transformers 5); they differ for clips longer than they are high and wide."""
    pixels: Literal["uint8", "float32"] = "uint8"
    """Whether pixels stay bytes until the device, or are normalised on the host."""
    mean: tuple[float, float, float] = CLIP_MEAN
    """Mean of each colour, for normalised pixels."""
    std: tuple[float, float, float] = CLIP_STD
    """Standard deviation of each colour, for normalised pixels."""
    dummy_image: bool = False
    """Whether a microbatch without images gets one of zeros, so that every rank runs its encoder (FSDP). It has no
    tokens: add its features times zero to the loss."""
    mtp: bool = False
    """Whether the last pipeline stage predicts several tokens and so needs the tokens too."""

    def rank_multiple(self, tp: int) -> int:
        """Return what the tokens of a microbatch on one context-parallel rank are a multiple of."""
        return self.block * (tp if self.sequence_parallel else 1)

    @model_validator(mode="after")
    def _check_together(self) -> Layout:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if not all(math.isfinite(value) for value in values):
                raise conflict(f"{values} is no three finite numbers; every pixel would be lost", name)
        if min(self.std) <= 0:
            raise conflict("a deviation must be above 0: pixels are divided by it. Write that of the encoder", "std")
        if self.keys == "torchtitan" and self.positions != "plain":
            raise conflict(
                f"{self.positions!r} has several rows, and torchtitan's models take one. Use keys='hf' or 'megatron' "
                "for models with M-RoPE",
                "positions",
            )
        return self


def bin_multiple(slicing: str, rank_multiple: int, cp: int) -> int:
    """Return what the tokens that cp ranks share, a microbatch or a row, are a multiple of.

    Example:
        >>> bin_multiple("zigzag", 1, 4), bin_multiple("whole_zigzag", 1, 1), bin_multiple("contiguous", 3, 4)
        (8, 1, 12)
    """
    chunks = 1 if cp == 1 else cp if slicing == "contiguous" else 2 * cp
    return math.lcm(chunks, cp * rank_multiple)


def shape_of(limits: Limits, tree: ClientPlaceTree, axis: str) -> dict[str, Any]:
    """Return what a plan says of the shape of its microbatches, where it is not the usual one."""
    if (limits.slicing, limits.rank_multiple, limits.row_tokens) == ("zigzag", 1, 0):
        return {}
    cp = 1 if axis == "CP" else tree.cp
    multiple = bin_multiple(limits.slicing, limits.rank_multiple, cp)
    if axis == "CP" and limits.rank_multiple > 1:
        multiple = math.lcm(2, limits.rank_multiple)  # on each rank of a block, whose zigzag needs two chunks
    if limits.full_rows:
        multiple = limits.row_tokens
    return {"slicing": limits.slicing, "bin_multiple": multiple, "row_tokens": limits.row_tokens}


def piece_multiple(slicing: str, cp: int) -> int:
    """Return what the length of every piece is rounded up to: a zigzag of segments needs one, also a trainer's own.

    Example:
        >>> piece_multiple("zigzag", 4), piece_multiple("contiguous", 4)
        (8, 1)
    """
    return 2 * cp if cp > 1 and slicing in ("zigzag", "whole") else 1
