"""The figures of a finished run, and how the numbers of every report are written."""

from __future__ import annotations

import math
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from overlord.version import VERSION

LENGTH_EDGES = np.unique(np.rint(2 ** (np.arange(0, 61) / 2)).astype(np.int64))
"""Borders of a length histogram: two bins for every doubling."""
NARROW_SPACE = "\u202f"
"""Stands between a number and its unit, and never breaks a line."""


def made_by() -> dict[str, str]:
    """Return the date, host, version and command of what this process writes: every report carries them."""
    program = Path(sys.argv[0])
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "host": socket.gethostname(),
        "version": f"overlord {VERSION}",
        "command": shlex.join([program.parent.name if program.name == "__main__.py" else program.name, *sys.argv[1:]]),
    }


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """One source over the whole run."""

    name: str
    format: str
    planned_share: float
    """Share the schedule asked for over the steps that ran, by sample or by token as the mixture counts."""
    realised_share: float
    samples: int
    tokens: int
    epochs: float | None
    """Passes over the source; 0.25 is a quarter of it. Estimated by bytes while not all files are indexed;
    None when none is."""
    bad: int = 0
    """Samples that could not be decoded and were replaced by a masked stand-in."""
    dropped: int = 0
    """Rows that were passed over: empty, filtered out, or dropped as too long."""
    waited_s: float = 0.0
    """Seconds that planner and constructors waited for it; they wait for several sources at once."""


@dataclass(frozen=True, slots=True)
class MediaSummary:
    """The images, clips or sounds of one source over the whole run."""

    name: str
    decoded_in: str
    """Where they were decoded: "loader" or "constructor"."""
    handed_over_bytes: int
    """Bytes that its loaders handed over, also for steps that were only built ahead; media encoded or decoded, as
    they travel."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step over all ranks."""

    index: int
    tokens: int
    """Tokens delivered, padding not counted."""
    samples: int
    loss_tokens: int
    microbatches: int
    imbalance: float
    """Largest cost of a rank over the mean of all ranks."""
    imbalance_round_robin: float
    padding: float
    """Share of the delivered positions that are padding."""
    wait_s: float
    """Longest wait of a client for this step."""


@dataclass(frozen=True, slots=True)
class LoadHeatmap:
    """The planned cost of every microbatch of one step, [bucket][microbatch]."""

    step: int
    overlord: list[list[float]]
    round_robin: list[list[float]]
    axis: str = "DP"
    """What a bucket is: a data-parallel group, or with "CP" a single rank of one."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Everything the report and the terminal show of a run; `dataclasses.asdict` of it is JSON."""

    job_name: str
    mesh: str
    runtime: str
    strategy: str
    steps: int
    wall_s: float
    startup_s: float
    """From launch to the first batch."""
    samples: int
    tokens: int
    samples_per_s: float
    tokens_per_s: float
    padding: float
    imbalance_planned: float
    """Mean over the steps of the largest cost of a rank over the mean of all ranks."""
    imbalance_round_robin: float
    """The same, had the step's samples been dealt to the ranks in turn."""
    peak_memory_bytes: int
    """Proportional set size of the service and its clients together."""
    sources: list[SourceSummary]
    per_step: list[StepSummary]
    mixture_level: Literal["sample", "token"]
    weights_per_step: list[dict[str, float]]
    realised_per_step: list[dict[str, float]]
    length_histogram: list[tuple[int, int, int]]
    """(low, high, count): samples with low <= tokens < high."""
    load_heatmap: LoadHeatmap | None
    digests: dict[str, str]
    """Name ("order", "plan") to hexadecimal digest."""
    notes: list[str] = field(default_factory=list[str])
    interrupted: bool = False
    """Whether Ctrl-C ended it before all steps were run."""
    over_tolerance: list[str] = field(default_factory=list[str])
    """What is wrong with sources that had more bad samples than their tolerance allows."""
    steps_per_point: int = 1
    """Steps behind each entry of the lists above: more than one for a very long run."""
    layout: str = "hf"
    """The layout of the batches: its keys, and the fields that differ from the defaults."""
    media: list[MediaSummary] = field(default_factory=list[MediaSummary])
    """Sources with media."""
    bottleneck: str | None = None
    """What held up the steps at last: a host that was short of something, or a source; None where nothing did."""
    made: dict[str, str] = field(default_factory=made_by)
    """When, where and by what the run was made."""


def waited_for(summary: RunSummary) -> str:
    """Say what the steps of a run waited for: the sources that were waited for most, or none of them."""
    slowest = sorted(summary.sources, key=lambda source: -source.waited_s)[:3]
    listed = [f"{source.name} {seconds(source.waited_s)}" for source in slowest if source.waited_s > 0]
    if not listed or slowest[0].waited_s < 0.05 * summary.wall_s:
        words = "No source was waited for long: the time went into planning, packing and handing over."
    else:
        words = f"Steps waited for sources: {', '.join(listed)} of {seconds(summary.wall_s)}, several at once."
    return words + (f" By the end, {summary.bottleneck}." if summary.bottleneck else "")


def decoded_in(source: Mapping[str, Any]) -> str | None:
    """Return where the media of a source are decoded, from its part of a service's status; None without media.

    Example:
        >>> decoded_in({"decoded_in": "constructor"}), decoded_in({"decoded_in": "undecided"})
        ('constructor', None)
    """
    return None if source["decoded_in"] == "undecided" else str(source["decoded_in"])


def media_of(sources: Mapping[str, Mapping[str, Any]]) -> list[MediaSummary]:
    """Return the sources of a service's status that have media."""
    found = ((name, decoded_in(one), int(one["handed_over_bytes"])) for name, one in sources.items())
    return [MediaSummary(name, where, size) for name, where, size in found if where is not None]


def used_bins(counts: npt.NDArray[np.integer]) -> list[tuple[int, tuple[int, int]]]:
    """Return number and borders of the bins of a length histogram, from the first to the last that holds something."""
    used = np.flatnonzero(counts).tolist()
    span = range(used[0], used[-1] + 1) if used else range(0)
    return [(n, (int(LENGTH_EDGES[n]), int(LENGTH_EDGES[n + 1]))) for n in span]


def known_loads(loads: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return loads [bucket, microbatch] with 0 for NaN: a microbatch that a bucket does not have."""
    return np.nan_to_num(loads.astype(np.float64))


def count(value: float) -> str:
    """Write a count in at most four digits.

    Example:
        >>> count(950), count(65_536), count(2.1e13)
        ('950', '65.5k', '21.0T')
    """
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            size = 1e3 if unit == "k" else limit
            return f"{_three_digits(value / size)}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else _three_digits(value)


def number(value: int, thing: str) -> str:
    """Write how many there are of a thing.

    Example:
        >>> number(1, "source"), number(1200, "error"), number(2, "microbatch")
        ('1 source', '1,200 errors', '2 microbatches')
    """
    return f"{value:,} {thing}{'' if value == 1 else 'es' if thing.endswith('ch') else 's'}"


def percent(share: float) -> str:
    """Write a share as per cent, with more digits where it is small.

    Example:
        >>> percent(0.0184).replace(NARROW_SPACE, " ")
        '1.8 %'
    """
    value = 100 * share
    digits = 0 if value == 0 or abs(value) >= 10 else 1 if abs(value) >= 0.1 else 2
    return f"{value:.{digits}f}{NARROW_SPACE}%"


def share(value: float) -> str:
    """Write a share in a table, where all have two digits after the point.

    Example:
        >>> share(0.5004)
        '50.04%'
    """
    return f"{100 * value:.2f}%"


def ratio(value: float) -> str:
    """Write a ratio to one; near one, the digits that matter are the late ones.

    Example:
        >>> ratio(1.0031), ratio(2.345)
        ('1.003×', '2.35×')
    """
    return f"{value:.3f}×" if value < 1.1 else f"{value:.2f}×"


def seconds(value: float) -> str:
    """Write a time with the unit that suits it.

    Example:
        >>> [seconds(v).replace(NARROW_SPACE, " ") for v in (0.00042, 0.0123, 3.2, 90)]
        ['420 µs', '12.3 ms', '3.20 s', '90.0 s']
    """
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{_three_digits(value * scale)}{NARROW_SPACE}{unit}" if value else f"0{NARROW_SPACE}s"
    return f"{_three_digits(value)}{NARROW_SPACE}s"


def size(value: float) -> str:
    """Write a number of bytes in decimal units.

    Example:
        >>> size(412_300_000).replace(NARROW_SPACE, " ")
        '412 MB'
    """
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{_three_digits(value / limit)}{NARROW_SPACE}{unit}"
    return f"{value:.0f}{NARROW_SPACE}B"


def excess(value: float) -> str:
    """Write how far a ratio lies above one: as per cent, or as a factor once it is large.

    Example:
        >>> excess(1.00001), excess(1.42).replace(NARROW_SPACE, " "), excess(2.5)
        ('just the mean', '42 % more than the mean', '2.50× the mean')
    """
    if value < 1.00005:
        return "just the mean"
    return f"{ratio(value)} the mean" if value >= 2 else f"{percent(value - 1)} more than the mean"


def busiest(thing: str, planned: float, dealt: float) -> str:
    """Write what the busiest rank or bucket carries, as planned and as dealt round-robin.

    Example:
        >>> busiest("rank", 1.00001, 2.5)
        'The busiest rank carries just the mean; dealt round-robin, 2.50× the mean'
    """
    other = excess(dealt).removesuffix(" than the mean")
    return f"The busiest {thing} carries {excess(planned)}; dealt round-robin, {other}"


def shorten(name: str, limit: int) -> str:
    """Return the name, cut in the middle if long: names of many sources often differ at the end."""
    return name if len(name) <= limit else f"{name[: limit // 2]}…{name[limit // 2 + 1 - limit :]}"


def without_zeros(write: Callable[[float], str]) -> Callable[[float], str]:
    """Return a writer for tick labels, where "20.0 ms" is better as "20 ms"."""

    def written(value: float) -> str:
        label = write(value)
        number = label.rstrip("µmskMGTPB%× " + NARROW_SPACE)
        shorter = number.rstrip("0").rstrip(".") if "." in number else number
        return shorter + label[len(number) :]

    return written


def _three_digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
