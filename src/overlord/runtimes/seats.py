"""Who is attached to a constructor host, how far they are, and which steps they want.

Rules of this file:
1. A rank that comes with a later mesh wants nothing before the others are near its first step: nobody runs ahead of a
   stream because of it.
2. A rank that the mesh of a step does not have wants nothing from there on.
"""

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
    new: bool = False
    """Whether it came for a later step than the stream's first, and has not been served yet."""
    ended: bool = False
    """Whether it has come to a step whose mesh does not have it."""


class Seats:
    """The clients of one host. Not safe by itself: whoever uses it holds its own lock.

    Example:
        >>> seats = Seats(prefetch=1, first_step=0)
        >>> number = seats.take(0, 0)
        >>> seats.move(number, 5)
        >>> seats.wanted()
        {5: {0}, 6: {0}}
        >>> newcomer = seats.take(1, 9)
        >>> seats.wanted()
        {5: {0}, 6: {0}}
        >>> seats.move(number, 8)
        >>> seats.wanted()
        {8: {0}, 9: {0, 1}}
    """

    def __init__(self, *, prefetch: int, first_step: int, early: bool = True) -> None:
        self._early = early
        self._prefetch = prefetch
        self._first_step = first_step
        self._seats: dict[int, Seat] = {}
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._reached: dict[int, int] = {}

    def reached_by(self, rank: int) -> int | None:
        """Return how far a rank came that attaches again; None for one that never was here."""
        return self._reached.get(rank)

    def take(self, rank: int, begin: int, at: int | None = None) -> int:
        """Seat a client; return its seat.

        Args:
            rank: Its rank.
            begin: The step where its rank begins.
            at: Where it stands, if it comes back from a connection that broke.
        """
        step = begin if at is None else at
        self._reached[rank] = max(step, self._reached.get(rank, step))
        number = max(self._seats, default=-1) + 1
        self._seats[number] = Seat(rank, step, new=step == begin > self._first_step)
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
        self._seats[seat].ended = False
        self._reached[self._seats[seat].rank] = step

    def serve(self, seat: int) -> None:
        """Note that a client has what it asked for: a newcomer is one of the others now."""
        self._seats[seat].new = False

    def end(self, seat: int) -> None:
        """Note that a client is done: the mesh of the step it is at does not have its rank."""
        self._seats[seat].new, self._seats[seat].ended = False, True

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

    def gathers_for(self, expected: Collection[int], world_size: int) -> frozenset[int]:
        """Return the ranks that samples are gathered for: those that were expected, unless others are here.

        Args:
            expected: The ranks this host has in the mesh of the step.
            world_size: Ranks of that mesh.
        """
        seated = frozenset(seat.rank for seat in self._seats.values() if seat.rank < world_size)
        return frozenset(expected) if seated <= frozenset(expected) else seated

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
        return any(step == s for s, _ in self._waiting) or any(step == seat.step for seat in self._wanting())

    def came_to(self, step: int) -> bool:
        """Whether a client is at a step, or beyond it."""
        return any(seat.step >= step for seat in self._seats.values() if not seat.new)

    def only_new(self, step: int) -> bool:
        """Whether nobody wants a step but ranks that come with it or after it."""
        others = [seat for seat in self._seats.values() if not seat.new and not seat.ended]
        waited = any(step == s for s, _ in self._waiting)
        return self.ever_attached and not waited and not any(self._in_window(seat, step) for seat in others)

    def _in_window(self, seat: Seat, step: int) -> bool:
        return seat.step <= step <= seat.step + self._prefetch

    def _foremost(self) -> int | None:
        """Return the furthest step that anybody wants who is not new; None where all are."""
        there = [seat.step for seat in self._seats.values() if not seat.new and not seat.ended]
        return max(there) + self._prefetch if there else None

    def _wanting(self) -> list[Seat]:
        """Return who wants anything now."""
        foremost, seats = self._foremost(), self._seats.values()
        # The others may be past a newcomer's first step already: then it is late, and gets it at once.
        return [s for s in seats if (foremost is None or foremost >= s.step if s.new else not s.ended)]

    def _last_of(self, seat: Seat, foremost: int | None) -> int:
        """Return the last step that a client wants: a newcomer wants with the others, and its first alone."""
        last = seat.step + self._prefetch
        if not seat.new:
            return last
        return seat.step if foremost is None else max(seat.step, min(last, foremost))

    def wanted(self) -> dict[int, set[int]]:
        """Return wanted steps in ascending order with the ranks that want them."""
        if not self.ever_attached and not self._early:
            return {}  # who comes back says where it is
        if not self.ever_attached:
            return {step: set() for step in range(self._first_step, self._first_step + self._prefetch)}
        wanted: dict[int, set[int]] = {}
        for step, rank in self._waiting:
            wanted.setdefault(step, set()).add(rank)
        foremost = self._foremost()
        for seat in self._wanting():
            for step in range(seat.step, self._last_of(seat, foremost) + 1):
                wanted.setdefault(step, set()).add(seat.rank)
        return {step: wanted[step] for step in sorted(wanted)}
