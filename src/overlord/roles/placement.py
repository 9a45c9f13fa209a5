"""Where the media of a source are decoded: before the hand-over to the DataConstructor, or behind it.

Decoding that makes bytes grow moves behind the hand-over (the paper's transformation reordering, section 6.2). The
choice changes what travels and where the work is done, and never the stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from overlord.core.launch_words import Placement


class PlacementChoice:
    """The choice for one source; all of its loaders share it, under the lock that a runtime with threads gives.

    Example:
        >>> choice = PlacementChoice("auto")
        >>> choice.decodes_in_loader(encoded_bytes=10_000, decoded_bytes=150_000), choice.ratio
        (False, 15.0)
    """

    def __init__(self, wanted: Placement, lock: AbstractContextManager[Any] | None = None) -> None:
        self._wanted = wanted
        self._lock: AbstractContextManager[Any] = lock or nullcontext()
        self._in_loader: bool | None = None
        self.ratio: float | None = None
        """Decoded bytes over encoded ones, of the first samples seen."""

    def decodes_in_loader(self, encoded_bytes: int, decoded_bytes: int) -> bool:
        """Return whether media are decoded in the loader; the first samples decide, once and for all."""
        with self._lock:
            if self._in_loader is None:
                self.ratio = decoded_bytes / max(encoded_bytes, 1)
                self._in_loader = self._wanted == "loader" or (self._wanted == "auto" and self.ratio <= 1)
            return self._in_loader

    @property
    def where(self) -> str:
        """Where media are decoded: "loader" or "constructor"; "undecided" before the first."""
        return "undecided" if self._in_loader is None else "loader" if self._in_loader else "constructor"
