"""The memory of one process: what holds how much of the budget of bytes ahead of the trainers.

What is prepared ahead lies in several places at once: shuffle groups and read buffers in loaders, samples and finished
arrays in a constructor. They share one budget, because bounds that each place had for itself would add up.

Only caches ask this account: what they drop is made again. So nothing of it changes the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

Holder = Literal["views", "samples", "read ahead", "staged", "shuffle groups", "microbatches", "remote ranges"]
"""What holds memory: arrays of microbatches in shared memory that trainers map; samples that were gathered for them;
rows that were read and measured; samples that were finished for constructor hosts; rows of shuffle groups that are held
whole; microbatches of an inline service; bytes of remote files on their way."""

HOLDERS: tuple[Holder, ...] = get_args(Holder)

SHARES: dict[Holder, float] = {"shuffle groups": 1 / 8, "staged": 1 / 2, "microbatches": 1 / 4}
"""The most that a holder may have of the budget, where it is not all of it."""
LEAST_SHARE = 1 / 32
"""What a holder may always have, whatever the others hold: without any of it, it would make everything twice."""


class MemoryAccount:
    """What the roles of one process hold, of one budget.

    Example:
        >>> account = MemoryAccount(800)
        >>> account.add("views", lambda: 760)
        >>> account.add("shuffle groups", lambda: 90)
        >>> account.held(), account.total, account.room("shuffle groups"), account.room("staged")
        ({'views': 760, 'shuffle groups': 90}, 850, 40, 25)
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._holders: dict[tuple[Holder, str], Callable[[], int]] = {}

    def add(self, holder: Holder, held: Callable[[], int], role: str = "") -> None:
        """Count what a holder has from now on; that of a role which is replaced is counted no more.

        Args:
            holder: What it is.
            held: Returns the bytes it holds now. It is called often, by any thread, and must not wait.
            role: The name of its role.
        """
        self._holders = {**self._holders, (holder, role): held}  # other threads may be adding up the old ones

    def held(self, *holders: Holder) -> dict[str, int]:
        """Return the bytes that some holders have now; of all that there are by default."""
        found: dict[str, int] = {}
        for (name, _), held in self._holders.items():
            if not holders or name in holders:
                found[name] = found.get(name, 0) + held()
        return found

    def __contains__(self, holder: Holder) -> bool:
        return any(name == holder for name, _ in self._holders)

    @property
    def total(self) -> int:
        """Bytes that are held now, in all."""
        return sum(self.held().values())

    def room(self, holder: Holder) -> int:
        """Return the bytes that a holder may have now: its share of the budget, as far as others have left it."""
        others = sum(held() for (name, _), held in self._holders.items() if name != holder)
        left = min(int(SHARES.get(holder, 1) * self.budget_bytes), self.budget_bytes - others)
        return max(left, int(LEAST_SHARE * self.budget_bytes))

    def lease_bytes(self, ranks: int) -> int:
        """Return what one of some ranks of this host may hold of microbatches that it was given ahead."""
        return self.budget_bytes // (2 * max(ranks, 1))
