"""Data parallelism of loaders: the groups of a source's order, dealt to several loader hosts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlord.core.samples import MetaArray


class Part(NamedTuple):
    """The groups of a source's order that one of several hosts has: each `of`-th, from the `number`-th on."""

    number: int = 0
    of: int = 1

    def has(self, group: int) -> bool:
        """Whether a group is among them.

        Example:
            >>> [group for group in range(7) if Part(1, 3).has(group)]
            [1, 4]
        """
        return max(group, 0) % self.of == self.number

    def rows(self, meta: MetaArray) -> npt.NDArray[np.int64]:
        """Return which of some samples are in these groups."""
        return np.flatnonzero(np.maximum(meta["group"], 0) % self.of == self.number)


WHOLE = Part()
"""All of a source."""
