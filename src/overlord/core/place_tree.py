"""ClientPlaceTree: the trainer's mesh as a tree, and where each rank stands in it.

One axis here is `pp`, `dp`, `cp` or `tp`; a *bucket* is all ranks of one dp coordinate, which
consume the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from overlord.core.spec_errors import did_you_mean
from overlord.errors import SpecError

AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in tp."""


@dataclass(frozen=True, slots=True)
class Coords:
    """Where one rank stands along every axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ClientPlaceTree:
    """The ranks of the trainer, by pipeline stage, data-parallel bucket, context part and tensor part.

    With the default order, rank = tp + TP * (cp + CP * (dp + DP * pp)).

    Example:
        >>> tree = ClientPlaceTree(dp=2, cp=2, tp=2)
        >>> tree.world_size, tree.coords(5)
        (8, Coords(pp=0, dp=1, cp=0, tp=1))
        >>> tree.ranks_of_bucket(1)
        [4, 5, 6, 7]
        >>> print(tree)
        pp=1 dp=2 cp=2 tp=2
    """

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel buckets: each gets its own samples."""
    cp: int = 1
    """Parts a sequence is cut into."""
    tp: int = 1
    """Ranks that see identical data."""
    order: str = field(default="-".join(AXES), kw_only=True)
    """Axes from outermost to innermost."""

    def __post_init__(self) -> None:
        for axis in AXES:
            size: object = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise SpecError(
                    f"mesh: {axis} is {size!r}: an axis must be a whole number of at least 1, or there "
                    f"are no ranks to feed. Write {axis}=1 for an axis you do not use."
                )
        if not isinstance(cast("object", self.order), str) or sorted(self.order.split("-")) != sorted(AXES):
            raise SpecError(
                f"mesh: order is {self.order!r}: it must name each of {', '.join(AXES)} once, outermost "
                f"first, or ranks would get the data of others. Write order={'-'.join(AXES)!r} or leave it "
                "out."
            )

    @classmethod
    def parse(cls, text: str) -> ClientPlaceTree:
        """Build from the short form of the command line.

        Example:
            >>> ClientPlaceTree.parse("dp=2,tp=4").world_size
            8
        """
        sizes: dict[str, Any] = {}
        for part in text.replace(",", " ").split():
            axis, equals, size = part.partition("=")
            if not equals:
                raise SpecError(f"mesh {text!r}: {part!r} is not axis=size. Write it as in 'dp=2,cp=2,tp=2'.")
            if axis in sizes:
                raise SpecError(f"mesh {text!r}: {axis} is given twice; one would be lost. Give it once.")
            sizes[axis] = size
        return cls.from_sizes(sizes, what=f"mesh {text!r}")

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, Any], *, what: str = "mesh") -> ClientPlaceTree:
        """Build from a mapping of axes (and perhaps `order`); `what` begins the message if it is wrong."""
        values: dict[str, Any] = {}
        known = [f.name for f in fields(cls)]
        for axis, size in sizes.items():
            if axis not in known:
                raise SpecError(
                    f"{what}: unknown axis {axis!r}; its ranks would get no data."
                    f"{did_you_mean(axis, known)} Known axes: {', '.join(AXES)}."
                )
            values[axis] = size if axis == "order" else _whole(axis, size, what)
        return cls(**values)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp * self.cp * self.tp

    def coords(self, rank: int) -> Coords:
        """Return where a rank stands."""
        if not 0 <= rank < self.world_size:
            raise SpecError(
                f"rank {rank} is not in the mesh {self}, which has ranks 0 to {self.world_size - 1}; it "
                "would get no data. Give the rank of this process, or a larger mesh."
            )
        at: dict[str, int] = {}
        for axis in reversed(self.order.split("-")):
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return Coords(**at)

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank that stands at these coordinates."""
        at = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        rank = 0
        for axis in self.order.split("-"):
            size = getattr(self, axis)
            if not 0 <= at[axis] < size:
                raise SpecError(
                    f"{axis}={at[axis]} is not in the mesh {self}: {axis} goes from 0 to {size - 1}. "
                    "Give a coordinate of the mesh."
                )
            rank = rank * size + at[axis]
        return rank

    def ranks_of_bucket(self, dp: int) -> list[int]:
        """Return the ranks that consume the samples of one dp coordinate, in rank order."""
        return sorted(
            self.rank(pp=pp, dp=dp, cp=cp, tp=tp)
            for pp in range(self.pp)
            for cp in range(self.cp)
            for tp in range(self.tp)
        )

    def check_world_size(self, world_size: int) -> None:
        """Raise SpecError if the trainer has another number of ranks than the mesh."""
        if world_size == self.world_size:
            return
        rest = self.pp * self.cp * self.tp
        fits = f"; dp={world_size // rest} would fit" if world_size > 0 and world_size % rest == 0 else ""
        effect = (
            "ranks beyond the mesh would get no data"
            if world_size > self.world_size
            else ("some buckets would have nobody to consume them and the others would wait")
        )
        raise SpecError(
            f"mesh {self} has {self.world_size} ranks but the world has {world_size}; {effect}. "
            f"Make pp*dp*cp*tp equal to the number of ranks{fits}."
        )

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)
        return sizes if self.order == "-".join(AXES) else f"{sizes} order={self.order}"

    def draw(self) -> str:
        """Return the mesh as a small text tree, one line a bucket.

        Example:
            >>> print(ClientPlaceTree(dp=2, tp=2).draw())
            pp=1 dp=2 cp=1 tp=2 (4 ranks)
            |-- dp 0: ranks 0-1
            `-- dp 1: ranks 2-3
        """
        lines = [f"{self} ({self.world_size} rank{'s' if self.world_size > 1 else ''})"]
        shown = range(self.dp) if self.dp <= 16 else [*range(8), None, *range(self.dp - 4, self.dp)]
        for dp in shown:
            if dp is None:
                lines.append(f"|   .. {self.dp - 12} more")
                continue
            branch = "`--" if dp == self.dp - 1 else "|--"
            lines.append(f"{branch} dp {dp}: ranks {_ranges(self.ranks_of_bucket(dp))}")
        return "\n".join(lines)


def _whole(axis: str, size: Any, what: str) -> int:
    try:
        if isinstance(size, (bool, float)):
            raise ValueError
        return int(size)
    except (TypeError, ValueError):
        raise SpecError(
            f"{what}: {axis} is {size!r}, not a whole number; the ranks cannot be counted. Write it as in {axis}=2."
        ) from None


def _ranges(ranks: list[int]) -> str:
    """Return sorted numbers with runs joined, such as 0-3, 8-11."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
