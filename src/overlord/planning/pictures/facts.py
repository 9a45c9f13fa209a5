"""The numbers behind the pictures of a DGraph: who gives, who gets, how even it is. Nothing is drawn here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from overlord.core.plan import pad_lengths
from overlord.planning.balancing.zigzag import deal

if TYPE_CHECKING:
    from overlord.planning.dgraph import DGraph

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SPACE = "\u202f"  # narrow, and never breaks a line


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """One source in the step, and in the graph where that was narrowed."""

    index: int
    name: str
    drawn: int
    """Samples in the step."""
    samples: int
    """Samples in the graph."""
    tokens: int
    """Tokens (or image tokens) of the graph's items."""
    share: float
    """Of the graph's tokens."""
    planned: float
    by_samples: float
    """Realised share of the step's samples."""
    by_tokens: float
    """Realised share of the step's tokens, whatever the modality."""


@dataclass(frozen=True, slots=True)
class Evenness:
    """How even a load [bucket, microbatch] is; 1 is perfect."""

    imbalance: float
    """Largest bucket over the mean bucket."""
    lockstep: float
    """Sum of the largest loads of each microbatch over the mean bucket."""


@dataclass(frozen=True, slots=True)
class Group:
    """Some sources or buckets that are drawn as one."""

    label: str
    members: Int64s
    is_rest: bool = False


def source_facts(graph: DGraph) -> list[SourceFacts]:
    """Return the sources that gave samples or were meant to, largest in the graph first."""
    buffer, items = graph.buffer, graph.items
    count = len(buffer.names)
    of_item = buffer.source[items.sample]
    tokens = _sums(of_item, items.length, count)
    samples = np.bincount(buffer.source[np.unique(items.sample)], minlength=count)
    drawn = np.bincount(buffer.source, minlength=count)
    drawn_tokens = _sums(buffer.source, buffer.meta["tokens"], count)
    weights = np.zeros(count)
    weights[: len(buffer.draw.weights)] = buffer.draw.weights
    shares = [_shares(column) for column in (tokens, weights, drawn, drawn_tokens)]
    seen = [n for n in np.lexsort((np.arange(count), -tokens)).tolist() if drawn[n] or weights[n] > 0]
    return [
        SourceFacts(n, plain(buffer.names[n]), int(drawn[n]), int(samples[n]), int(tokens[n]),
                    *(float(share[n]) for share in shares))
        for n in seen
    ]  # fmt: skip


def source_groups(sources: Sequence[SourceFacts], most: int) -> list[Group]:
    """Return at most `most` groups of sources: the largest alone, the others as "282 more sources"."""
    alone = sources if len(sources) <= most else sources[: most - 1]
    groups = [Group(source.name, np.array([source.index])) for source in alone]
    rest = [source.index for source in sources[len(alone) :]]
    return [*groups, Group(f"{len(rest):,} more sources", np.array(rest), True)] if rest else groups


def first_buckets(count: int, most: int) -> list[Group]:
    """Return at most `most` groups of buckets: the first alone, the others as "4,073 more buckets"."""
    alone = count if count <= most else most - 1
    groups = [Group(f"bucket {n}", np.array([n])) for n in range(alone)]
    rest = np.arange(alone, count)
    return [*groups, Group(f"{len(rest):,} more buckets", rest, True)] if len(rest) else groups


def bucket_ranges(count: int, most: int) -> list[Group]:
    """Return at most `most` groups of neighbouring buckets, all but the last of one size, a power of two.

    Example:
        >>> [group.label for group in bucket_ranges(5, 2)]
        ['buckets 0–3', 'bucket 4']
    """
    size = 1 << (-(-count // most) - 1).bit_length()
    cuts = [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
    return [
        Group(f"bucket {cut[0]}" if len(cut) == 1 else f"buckets {cut[0]}–{cut[-1]}", cut.astype(np.int64))
        for cut in cuts
    ]


def flows(graph: DGraph, sources: Sequence[Group], buckets: Sequence[Group]) -> tuple[Floats, Int64s]:
    """Return the tokens and the number of items that go from each group of sources to each group of buckets.

    Of an item that several ranks share, each gets an even part of the tokens; it counts on every one.
    """
    item, bins = placed_items(graph)
    at_source = _group_of(sources, len(graph.buffer.names))[graph.buffer.source[graph.items.sample[item]]]
    at_bucket = _group_of(buckets, graph.num_buckets)[bins // max(graph.num_microbatches, 1)]
    cell, shape = at_source * len(buckets) + at_bucket, (len(sources), len(buckets))
    lengths = graph.items.length[item] / _widths(graph)[item]
    tokens: Floats = np.bincount(cell, weights=lengths, minlength=shape[0] * shape[1]).astype(np.float64)
    counts = np.bincount(cell, minlength=shape[0] * shape[1]).astype(np.int64)
    return tokens.reshape(shape), counts.reshape(shape)


def placed_items(graph: DGraph) -> tuple[Int64s, Int64s]:
    """Return (item, bin) of every place: an item that a block of ranks shares stands on each of them."""
    if graph.places is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    widths = _widths(graph)
    item = np.repeat(np.arange(len(graph.items)), widths)
    within = np.arange(len(item)) - np.repeat(np.cumsum(widths) - widths, widths)
    return item, graph.places[item] + within * graph.num_microbatches


def planned_loads(graph: DGraph) -> Int64s | None:
    """Return what every [bucket, microbatch] carries: cost, or tokens where no cost was given; None if unplaced."""
    if graph.places is None or graph.axis is None:
        return None
    if graph.costs is not None:
        return graph.loads
    item, bins = placed_items(graph)
    sums = _sums(bins, graph.padded[item] // _widths(graph)[item], graph.num_buckets * graph.num_microbatches)
    return sums.reshape(graph.num_buckets, graph.num_microbatches)


def dealt_loads(graph: DGraph) -> Int64s | None:
    """Return the loads if the same items were dealt round-robin; None where the consumers are not known.

    Tokens go to data-parallel groups in turn and fill microbatches in turn. Over "CP", all ranks of a group
    share each item, as without hybrid data parallelism. Images go to ranks in turn and are not split.
    """
    if graph.axis is None or not len(graph.items):
        return None
    weights = graph.costs if graph.costs is not None else graph.padded
    if graph.modality == "images":
        _, whole = np.unique(graph.items.sample, return_inverse=True)
        weights = _sums(whole, weights, int(whole.max()) + 1)
        return _sums(np.arange(len(weights)) % graph.num_buckets, weights, graph.num_buckets)[:, None]
    share = graph.tree.cp if graph.axis == "CP" else 1
    groups = graph.num_buckets // share
    bucket, microbatch = deal(graph.padded, groups, graph.buffer.limits.microbatch_tokens)
    most = int(microbatch.max()) + 1
    sums = _sums(bucket * most + microbatch, weights, groups * most).reshape(groups, most)
    return np.repeat(sums // share, share, axis=0)


def evenness(loads: npt.NDArray[np.integer]) -> Evenness:
    """Return how even loads [bucket, microbatch] are.

    Example:
        >>> evenness(np.array([[3, 1], [1, 3]]))
        Evenness(imbalance=1.0, lockstep=1.5)
    """
    buckets = loads.sum(axis=1, dtype=np.float64)
    mean = float(buckets.mean()) if len(buckets) else 0.0
    if mean <= 0:
        return Evenness(1.0, 1.0)
    return Evenness(float(buckets.max()) / mean, float(loads.max(axis=0).sum(dtype=np.float64)) / mean)


def fullest_bin(graph: DGraph) -> tuple[float, int] | None:
    """Return which share of the memory cap the fullest microbatch uses, and the cap; None where none holds."""
    if graph.places is None or graph.modality != "tokens" or not len(graph.items):
        return None
    widths = _widths(graph)
    multiple = graph.pad_multiple if graph.cp_sizes is None else np.where(widths > 1, 2 * widths, 1)
    sizes = pad_lengths(graph.items.length, multiple) // widths
    item, bins = placed_items(graph)
    cap = max(1, graph.buffer.limits.microbatch_tokens // (graph.tree.cp if graph.cp_sizes is not None else 1))
    return float(np.bincount(bins, weights=sizes[item]).max()) / cap, cap


def length_bins(lengths: npt.NDArray[np.integer]) -> list[tuple[int, int, int, int]]:
    """Return (low, high, items, tokens) of bins that double every second time; high is not in the bin.

    Example:
        >>> length_bins(np.array([4, 5, 6]))
        [(4, 6, 2, 9), (6, 8, 1, 6)]
    """
    if not len(lengths):
        return []
    wide = np.maximum(lengths.astype(np.int64), 1)
    edges = np.unique([round(2 ** (n / 2)) for n in range(2 * (int(wide.max()).bit_length() + 1))])
    first = int(np.searchsorted(edges, wide.min(), "right")) - 1
    last = int(np.searchsorted(edges, wide.max(), "right"))
    at = np.searchsorted(edges, wide, "right") - 1
    items, tokens = np.bincount(at, minlength=last), _sums(at, lengths, last)
    return [(int(edges[n]), int(edges[n + 1]), int(items[n]), int(tokens[n])) for n in range(first, last)]


def rank_names(ranks: Sequence[int], most: int = 4) -> str:
    """Write ranks shortly.

    Example:
        >>> rank_names([0, 1, 2, 8]), rank_names([0, 4, 8, 12, 16, 20])
        ('0–2, 8', '0, 4, 8, 12 and 2 more')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:most]]
    hidden = sum(len(run) for run in runs[most:])
    return ", ".join(named) + (f" and {hidden:,} more" if hidden else "")


def item_word(graph: DGraph) -> str:
    """Return what the graph's items are: samples, pieces of them, or runs of patches."""
    if len(np.unique(graph.items.sample)) == len(graph.items):
        return "sample"
    return "piece" if graph.modality == "tokens" else "run"


def unit_word(graph: DGraph) -> str:
    """Return what a length counts."""
    return "tokens" if graph.modality == "tokens" else "image tokens"


def number(value: int, thing: str) -> str:
    """Write a number of things.

    Example:
        >>> number(1, "sample"), number(1200, "sample"), number(2, "microbatch")
        ('1 sample', '1,200 samples', '2 microbatches')
    """
    return f"{value:,} {thing}{'' if value == 1 else 'es' if thing.endswith('ch') else 's'}"


def count(value: float) -> str:
    """Write a count with at most four digits.

    Example:
        >>> count(950), count(65_536), count(2.1e13)
        ('950', '65.5k', '21.0T')
    """
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.{max(0, 2 - math.floor(math.log10(abs(scaled))))}f}{unit}"
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """Write a share as per cent, with more digits where it is small."""
    value = 100 * share
    digits = 0 if value == 0 or abs(value) >= 10 else 1 if abs(value) >= 0.1 else 2
    return f"{value:.{digits}f}{_SPACE}%"


def ratio(value: float) -> str:
    """Write a ratio to one; near one, the late digits matter."""
    return f"{value:.3f}×" if value < 1.1 else f"{value:.2f}×"


def excess(value: float) -> str:
    """Write how far a ratio lies above one: as per cent, or as a factor once it is large.

    Example:
        >>> excess(1.00001), excess(2.5)
        ('just the mean', '2.50× the mean')
    """
    if value < 1.00005:
        return "just the mean"
    return f"{ratio(value)} the mean" if value >= 2 else f"{percent(value - 1)} more than the mean"


def plain(name: str) -> str:
    """Return a name on one line, without characters that cannot be shown."""
    return "".join(c if c.isprintable() else " " for c in name)


def shorten(name: str, limit: int) -> str:
    """Return the name, cut in the middle if long: names of many sources often differ at the end."""
    return name if len(name) <= limit else f"{name[: limit // 2]}…{name[limit // 2 + 1 - limit :]}"


def _widths(graph: DGraph) -> Int64s:
    return graph.cp_sizes if graph.cp_sizes is not None else np.ones(len(graph.items), np.int64)


def _group_of(groups: Sequence[Group], count: int) -> Int64s:
    found = np.zeros(count, np.int64)
    for number, group in enumerate(groups):
        found[group.members] = number
    return found


def _sums(at: npt.NDArray[np.integer], values: npt.NDArray[np.integer], count: int) -> Int64s:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, at, values)
    return sums


def _shares(values: npt.NDArray[np.integer] | Floats) -> Floats:
    total = float(values.sum())
    return values / total if total > 0 else np.zeros(len(values))
