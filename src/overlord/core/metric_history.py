"""A bounded history of metrics by step: what trainers report, and what a service measures of itself.

    MetricHistory   named series that together hold at most `MOST_POINTS` points, however many steps they cover
    Series          one of them: recent steps one by one, older ones joined, the older the more

A point is a run of steps: its first step, how many values it joins, their mean, lowest and highest. A spike is
therefore never lost, only its exact step. How wide a point may be grows with its age, so a series of N steps needs
about R + R ln(N / R) points, where R is a sixteenth of its capacity.
"""

from __future__ import annotations

import base64
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_NAMES = 200
"""Series that are kept; what comes under further names is counted and left out."""
MOST_POINTS = 55_000
"""Points of all series together: 36 bytes each, less than 2 MB."""
MOST_OF_A_SERIES = 2_000
_COLUMNS = (("step", "q"), ("count", "I"), ("mean", "d"), ("low", "d"), ("high", "d"))
"""The columns of a series, and their types in memory and in a store."""


class Series:
    """The values of one metric by step.

    Example:
        >>> series = Series()
        >>> for step in range(10_000):
        ...     series.add(step, float(step == 77), capacity=64)
        >>> len(series) <= 64, series.newest, sum(series.columns["count"]), max(series.columns["high"])
        (True, (9999, 0.0), 10000, 1.0)
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Mapping[str, array[Any]] | None = None) -> None:
        self.columns: dict[str, array[Any]] = dict(columns or {name: array(kind) for name, kind in _COLUMNS})
        """First step, number of values, mean, lowest and highest of every point, oldest first."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    @property
    def nbytes(self) -> int:
        """Bytes that its points take."""
        return sum(len(column) * column.itemsize for column in self.columns.values())

    @property
    def newest(self) -> tuple[int, float]:
        """The newest step and its value."""
        return self.columns["step"][-1], self.columns["mean"][-1]

    def add(self, step: int, value: float, *, capacity: int = MOST_OF_A_SERIES) -> None:
        """Add the value of a step; steps may come out of order."""
        steps, counts, means, lows, highs = self.columns.values()
        if not steps or step > steps[-1]:
            steps.append(step)
            counts.append(1)
            means.append(value)
            lows.append(value)
            highs.append(value)
        else:
            at = bisect_left(steps, step)
            for column, one in ((steps, step), (counts, 1), (means, value), (lows, value), (highs, value)):
                column.insert(at, one)
        if len(steps) > capacity:
            self._thin(capacity)

    def forget_from(self, step: int) -> None:
        """Drop what is known of a step and of those behind it: a run has gone back to it."""
        keep = bisect_left(self.columns["step"], step)
        for column in self.columns.values():
            del column[keep:]

    def _thin(self, capacity: int) -> None:
        """Join neighbours, older ones more, until the series is at most three quarters full."""
        detail = max(1, capacity // 16)
        while len(self) > max(1, 3 * capacity // 4):
            self._join_by_age(detail)
            if detail == 1:
                break
            detail //= 2
        while len(self) > capacity:  # so small a capacity that one point for every doubling of the age is too much
            self._join_by_age(0)

    def _join_by_age(self, detail: int) -> None:
        """Join runs of points that together are no wider than a `detail`-th of their age; 0 joins every two."""
        step, count, mean, low, high = (self.columns[name] for name, _ in _COLUMNS)
        kept: list[tuple[int, int, float, float, float]] = []
        newest, stop = step[-1], step[-1] + 1
        for at in range(len(step) - 1, -1, -1):
            one = (step[at], count[at], mean[at], low[at], high[at])
            if not kept:
                kept.append(one)
                continue
            then = kept[-1]
            near = stop - one[0] <= (newest - then[0]) // detail if detail else at % 2 == 0
            if near:
                total = one[1] + then[1]
                average = (one[1] * one[2] + then[1] * then[2]) / total
                kept[-1] = (one[0], total, average, min(one[3], then[3]), max(one[4], then[4]))
            else:
                stop = then[0]
                kept.append(one)
        kept.reverse()
        self.columns = {
            name: array(kind, [point[number] for point in kept]) for number, (name, kind) in enumerate(_COLUMNS)
        }


class MetricHistory:
    """Named series within one bound.

    Example:
        >>> history = MetricHistory()
        >>> history.add(0, {"loss": 2.5, "loss/web": 2.25})
        >>> history.newest()
        {'loss': (0, 2.5), 'loss/web': (0, 2.25)}
        >>> MetricHistory.from_json(history.to_json()).newest() == history.newest()
        True
    """

    def __init__(self, *, most_names: int = MOST_NAMES, most_points: int = MOST_POINTS) -> None:
        self._most_names = most_names
        self._most_points = most_points
        self._series: dict[str, Series] = {}
        self.left_out = 0
        """Values that came under more names than are kept."""

    def __len__(self) -> int:
        return len(self._series)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._series))

    def __getitem__(self, name: str) -> Series:
        return self._series[name]

    @property
    def nbytes(self) -> int:
        """Bytes that all points take."""
        return sum(series.nbytes for series in self._series.values())

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what is known of a step."""
        series, fresh = self._series, [name for name in metrics if name not in self._series]
        for name in fresh[: max(0, self._most_names - len(series))]:
            series[name] = Series()
        capacity = min(MOST_OF_A_SERIES, self._most_points // max(len(series), 1))
        if fresh:  # the others have less room from now on
            for one in series.values():
                if len(one) > capacity:
                    one._thin(capacity)
        for name, value in metrics.items():
            if name in series:
                series[name].add(step, value, capacity=capacity)
            else:
                self.left_out += 1

    def forget_from(self, step: int) -> None:
        """Drop what is known of a step and of those behind it: a run has gone back to it."""
        for series in self._series.values():
            series.forget_from(step)
        self._series = {name: series for name, series in self._series.items() if len(series)}

    def newest(self) -> dict[str, tuple[int, float]]:
        """Return the newest step and value of every series."""
        return {name: self._series[name].newest for name in self}

    def last_step(self) -> int:
        """Return the newest step of all; -1 where there is none."""
        return max((series.newest[0] for series in self._series.values()), default=-1)

    def points(self, names: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
        """Return the points of some series (by default of all) as plain lists, by column."""
        chosen = [name for name in self if names is None or name in names]
        return {name: {key: column.tolist() for key, column in self[name].columns.items()} for name in chosen}

    def to_json(self) -> dict[str, Any]:
        """Return the history in a form that `from_json` reads; points are packed, which takes a third of the room."""
        packed = {
            name: [base64.b64encode(column.tobytes()).decode() for column in self[name].columns.values()]
            for name in self
        }
        return {"columns": [f"{name}:{kind}" for name, kind in _COLUMNS], "series": packed, "left_out": self.left_out}

    @classmethod
    def from_json(cls, given: Any) -> MetricHistory:
        """Read a history; one that is damaged or of another version is empty: nothing depends on it."""
        history = cls()
        try:
            if given["columns"] != [f"{name}:{kind}" for name, kind in _COLUMNS]:
                return history
            for name, packed in given["series"].items():
                columns = {key: array(kind) for key, kind in _COLUMNS}
                for column, text in zip(columns.values(), packed, strict=True):
                    column.frombytes(base64.b64decode(text, validate=True))
                if len({len(column) for column in columns.values()}) != 1 or not len(columns["step"]):
                    return cls()
                history._series[str(name)] = Series(columns)
            history.left_out = int(given["left_out"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()
        return history
