"""What roles say to one another: small frozen messages around columns. No behaviour lives here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlord.core.ragged import Ragged
from overlord.core.samples import Cursor, MetaArray


@dataclass(frozen=True, slots=True)
class MetaRequest:
    """Planner to SourceLoader: tell me about the samples from here on."""

    source: int
    cursor: Cursor
    count: int
    """At least one sample and at most this many come back; never past the end of the group."""


@dataclass(frozen=True, slots=True)
class MetaDelta:
    """SourceLoader to Planner: what is known of the asked samples."""

    source: int
    meta: MetaArray
    next_cursor: Cursor
    """Where the next request begins: the same group, the next one, or the next epoch."""


@dataclass(frozen=True, slots=True)
class LoaderOrder:
    """DataConstructor to SourceLoader: prepare and hand over these samples of one step."""

    step: int
    source: int
    meta: MetaArray
    """The planned metadata of the samples, in the source's order; their lengths are promises."""
    end: Cursor
    """The step leaves the source here: what lies before is not needed by a later step."""


@dataclass(frozen=True, slots=True)
class Payload:
    """SourceLoader to DataConstructor: the samples of one order as columns."""

    step: int
    source: int
    tokens: Ragged
    """Token ids (int32), image placeholders included; row i has the planned length."""
    loss: Ragged
    """1 where the token counts in the loss (uint8), aligned with tokens."""
    patches: Ragged | None
    """uint8 patch rows, image after image; None for a source without images."""
    grids: npt.NDArray[np.int32] | None
    """[samples, 3]: t, patch rows, patch columns of each image."""
    bad: npt.NDArray[np.bool_]
    """Samples that are stand-ins."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.tokens.nbytes + self.loss.nbytes + (self.patches.nbytes if self.patches else 0)
