"""Who is attached to a constructor host, how far they are, and which steps they want."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Seat:
    """One attached client."""

    rank: int
    step: int
    """The step it is at."""


class Seats:
    """The clients of one host. Not safe by itself: whoever uses it holds its own lock.

    Example:
        >>> seats = Seats({0, 1}, prefetch=1, first_step=0)
        >>> number = seats.take(0)
        >>> seats.move(number, 5)
        >>> seats.wanted()
        {5: {0}, 6: {0}}
    """

    def __init__(self, ranks: Collection[int], *, prefetch: int, first_step: int) -> None:
        self.ranks = frozenset(ranks)
        """The ranks this host was made for."""
        self._prefetch = prefetch
        self._first_step = first_step
        self._seats: dict[int, Seat] = {}
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._reached: dict[int, int] = {}

    def before(self, rank: int) -> tuple[int | None, bool]:
        """Return how far a rank came that attaches again, and whether it sits here still."""
        return self._reached.get(rank), any(seat.rank == rank for seat in self._seats.values())

    def take(self, rank: int) -> int:
        """Seat a client at the first step; return its seat."""
        self._reached.setdefault(rank, self._first_step)
        number = max(self._seats, default=-1) + 1
        self._seats[number] = Seat(rank, self._first_step)
        return number

    def free(self, seat: int) -> None:
        """Free a seat."""
        self._seats.pop(seat)

    def rank_of(self, seat: int) -> int:
        """Return the rank of a seat."""
        return self._seats[seat].rank

    def move(self, seat: int, step: int) -> None:
        """Note that a client is at a step, and has finished with those before it."""
        self._seats[seat].step = step
        self._reached[self._seats[seat].rank] = step

    def leave(self, seat: int, next_step: int) -> None:
        """Note that a client goes in peace, having trained on the steps before `next_step`."""
        self._reached[self._seats[seat].rank] = next_step

    @property
    def positions(self) -> dict[int, int]:
        """The step each attached rank is at."""
        return {seat.rank: seat.step for seat in self._seats.values()}

    @property
    def reached(self) -> dict[int, int]:
        """For every rank that ever attached, the step before which it is done."""
        return dict(self._reached)

    @property
    def gathers_for(self) -> frozenset[int]:
        """The ranks that samples are gathered for: those that were expected, unless others are here."""
        seated = frozenset(seat.rank for seat in self._seats.values())
        return self.ranks if seated <= self.ranks else seated

    @property
    def ever_attached(self) -> bool:
        """Whether anybody ever attached."""
        return bool(self._reached)

    @contextmanager
    def waiting(self, seat: int, step: int) -> Iterator[None]:
        """While this is open, a client waits for a step."""
        key = (step, self._seats[seat].rank)
        self._waiting[key] += 1
        try:
            yield
        finally:
            self._waiting[key] -= 1
            self._waiting += Counter()

    def stands_at(self, step: int) -> bool:
        """Whether a client is at a step, or waits for something of it."""
        return any(step == s for s, _ in self._waiting) or any(step == seat.step for seat in self._seats.values())

    def came_to(self, step: int) -> bool:
        """Whether a client is at a step, or beyond it."""
        return any(seat.step >= step for seat in self._seats.values())

    def wanted(self) -> dict[int, set[int]]:
        """Return wanted steps in ascending order with the ranks that want them."""
        if not self.ever_attached:
            return {step: set() for step in range(self._first_step, self._first_step + self._prefetch)}
        wanted: dict[int, set[int]] = {}
        for step, rank in self._waiting:
            wanted.setdefault(step, set()).add(rank)
        for seat in self._seats.values():
            for step in range(seat.step, seat.step + self._prefetch + 1):
                wanted.setdefault(step, set()).add(seat.rank)
        return {step: wanted[step] for step in sorted(wanted)}
