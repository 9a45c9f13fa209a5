"""ShadowLoader: follows the position of an active SourceLoader with a warm read buffer (paper section 6.1).

Rules of this file:
1. A shadow reads and measures what its primary was asked for, and hands nothing over. What it holds is what a step
   that is planned and not delivered yet may need, so that it can take over between two calls.
2. It is told of positions after the fact and may lag behind: what it lacks when it is promoted, it reads then.
3. It never lives in its primary's process, and never promotes itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlord.core.messages import MetaRequest
from overlord.core.order import BEGIN
from overlord.core.samples import Cursor
from overlord.roles.source_loader import SourceLoader


class ShadowLoader:
    """A SourceLoader in waiting."""

    def __init__(self, loader: SourceLoader) -> None:
        self._loader = loader
        self._passed = Cursor(-1, BEGIN, -1)
        self.followed = 0
        """Requests of its primary that it has repeated."""

    def follow(self, requests: Sequence[MetaRequest], passed: Cursor | None) -> None:
        """Repeat what the primary was asked, and let go of what every trainer has passed."""
        if passed is not None and passed > self._passed:
            self._passed = passed
        for request in requests:
            if request.cursor.group == BEGIN or request.cursor >= self._passed or self._holds_end(request):
                self._loader.summary_buffer(request)
                self.followed += 1
        if passed is not None:
            self._loader.release(self._passed)

    def promote(self) -> SourceLoader:
        """Return the loader, which is asked itself from now on."""
        return self._loader

    def _holds_end(self, request: MetaRequest) -> bool:
        """Whether a request reaches beyond what was passed: then its later rows are still needed."""
        epoch, group, offset = request.cursor
        return (epoch, group) == self._passed[:2] and offset + request.count > self._passed.offset
