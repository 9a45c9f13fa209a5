"""The order of one source: (seed, source, epoch, group, offset) -> (file, block, row), without replay.

Rules of this file (the law, "Order"):
1. A source is a list of files, a file a list of blocks.
2. Per epoch the files are permuted and cut into windows by their sizes alone, so that only the files of the window
   being reached need an index. Groups are numbered window << 24 | number in the window.
3. A group that fits `shuffle_bytes` is permuted row by row: whole blocks where blocks are small, else parts of blocks.
   The first groups of a window are small, so that the first rows of a source do not wait for many others: one part,
   then two, four, and so on.
4. Parts are ranges of rows of about `PART_BYTES`, half a page of Parquet. Where a reader reaches a range of rows at
   once, the parts of all blocks of a window are permuted (`_CutGroups`).
5. What has to be unpacked from its beginning (compressed lines and archives, pages too large to be read for a few rows)
   is read front to back, of `LANES` files in turn. Parts are permuted inside spans, and these begin small: one part,
   then two, four, and so on, up to `SPAN_BYTES` (`_RampGroups`). So the first rows of a window need only what its first
   files begin with, and blocks behind those of a span need not be known.
6. Blocks that cannot be cut are k streams, read front to back, merged by a keyed permutation; k follows from
   `shuffle_bytes` and the mean row size.
7. Nothing but sizes and counts of rows decides: those of the blocks, and whether rows of a block are reached without
   the rows before them. Where a file is stored, or how it is read, does not.
8. Nothing crosses an epoch.
9. A source that is ordered by a column (`SortedOrder`) has the same order in every epoch; a group is a run of it.

How a cursor is resolved: `windows` needs only the sizes of the files. The group number names a window; the files of
that window are indexed, their blocks permuted and grouped (`_make_groups`), and the group number selects a group.
`Group.locate` then maps offsets in the group to rows. Only one epoch's windows and one window's groups are kept.

A change of this file that moves a row needs a new FINGERPRINT_VERSION: a state of another order is refused.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from overlord.core.samples import derive, hash64, permutation

WINDOW_FILES = 16
WINDOW_BYTES = 256 << 20
WINDOW_MAX_FILES = 1024
ROUND_ROWS = 4096
"""Rows merged at a time in a streamed group; bounds the memory of its permutation."""
MAX_STREAMS = 32
MIN_STREAMS = 2
SPAN_BYTES = 256 << 20
"""Bytes of blocks that are unpacked for the same groups, at most, if it is more than one part."""
LANES = 2
"""Files that are unpacked side by side, part by part."""
PART_BYTES = 512 << 10
"""Bytes of a part, in the columns that are read: about half a page of Parquet, which is decoded once for each part that
it has rows of."""
UNPACKED_PART_BYTES = 128 << 10
"""The same of what is unpacked, where a part costs less."""
FIRST_BYTES = 128 << 10
"""Bytes of the first group of a window: hundreds of sources hold one each."""
LARGE_ROWS = 4
"""If no more rows than that are a part, each row is: pictures are shuffled one by one."""
LEAST_PARTS = 4
"""Parts of a group, even where `shuffle_bytes` has no room for as many of `PART_BYTES`."""
WHOLE_BLOCKS = 64
"""Blocks, or parts of blocks, of a group in memory, at most: each costs an open. Where `shuffle_bytes` has room for
more, parts are larger."""
_SMALL_SHARE = 8
"""Blocks of this share of `shuffle_bytes` are small: groups of whole ones have several."""
ROW_COST = 16
"""Bytes of a row beside its own when its group is permuted in memory: an entry in two arrays."""
NO_GROUP = -1
SORTED_ROWS = 4096
"""Rows of a group of a source that is ordered by a column."""
BEGIN = -2
"""In a cursor: the first group of an epoch. A source that is not drawn keeps it, so that nothing is indexed."""
_GROUP_BITS = 24

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a source as it was listed; its content is not known yet."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """The index of a file, as far as the order needs it."""

    rows: Int64s
    """Rows of each block."""
    bytes: Int64s
    """Bytes of each block, decompressed, in the columns that are read."""
    divisible: bool = False
    """Whether blocks can be read in parts, and so may be cut where they are too large for a shuffle."""
    unpacked: bool = False
    """Whether rows of a block are reached only by unpacking those before them."""
    more: Callable[[int], FileBlocks] | None = None
    """Finds further blocks of a file that is indexed while it is unpacked, given how many are needed; None once all are
    known."""

    def at_least(self, count: int) -> FileBlocks:
        """Return the index with so many blocks, if the file has as many."""
        return self if self.more is None or len(self.rows) >= count else self.more(count)

    def has_large(self, shuffle_bytes: int) -> bool:
        """Whether a block cannot be shuffled within so many bytes unless it is cut."""
        large = self.bytes > shuffle_bytes // _SMALL_SHARE
        return self.divisible and shuffle_bytes > 0 and bool((large & (self.rows > 1)).any())


def rows_per_read(row_bytes: float, streams: int = 4) -> int:
    """Return how many rows a stream holds at a time: about 64 KiB, at least one row; more where few are open at once.

    Every read is a question to a reader process: with one stream of four times as much there are a quarter of them.

    Example:
        >>> rows_per_read(1024.0), rows_per_read(1024.0, streams=1)
        (64, 256)
    """
    return max(1, min(256, int(max(64 << 10, (256 << 10) / streams) / max(row_bytes, 1.0))))


def stream_bytes(row_bytes: float, streams: int = 4) -> int:
    """Estimate the bytes that each of some open streams holds: its rows, once as read and once as decoded."""
    return int(2 * rows_per_read(row_bytes, streams) * row_bytes) + (64 << 10)


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that are shuffled together."""

    key: int
    files: Int64s
    """File of each block (an index into the source's files)."""
    blocks: Int64s
    """Block inside its file."""
    first: Int64s
    """First row of each inside its block: 0, except for parts."""
    rows: Int64s
    """Rows of each block, or of its part."""
    is_part: npt.NDArray[np.bool_]
    """Whether this is a part of a block; the other parts are in other groups."""
    whole: bool
    """True: held in memory and permuted row by row. False: k streams merged by a permutation."""
    shuffled: bool
    row_bytes: float
    num_rows: int
    """Rows of the whole group."""
    numbers: Int64s | None = None
    """Row numbers (file << 32 | row) in the order of the group, where its rows are taken one by one, not by blocks."""
    _cache: dict[int, tuple[Int64s, Int64s]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def scattered(self) -> bool:
        """Whether all of it are parts of blocks: a few rows of each."""
        return self.whole and self.numbers is None and bool(self.is_part.all())

    def locate(self, start: int, count: int) -> tuple[Int64s, Int64s]:
        """Return (slot, row in the slot's block or part) of rows start .. start + count of the group's order."""
        stop = min(start + count, self.num_rows)
        if not self.shuffled or self.whole:
            base = np.concatenate([[0], np.cumsum(self.rows)])
            at = np.arange(start, stop)
            if self.shuffled:
                at = self._whole_permutation()[start:stop]
            slots = np.searchsorted(base, at, side="right") - 1
            return slots, at - base[slots]
        # Streams: the group is cut into rounds of about ROUND_ROWS rows. In every round each block advances in
        # proportion to its rows, and the round's rows are merged by a permutation of its own. So a round can be
        # computed alone, and no block is read ahead of the others by more than a round.
        parts: list[tuple[Int64s, Int64s]] = []
        number = self._round_of(start)
        while start < stop:
            begin = self._round_start(number)
            slots, rows = self._round(number)
            lo, hi = start - begin, min(stop - begin, len(slots))
            parts.append((slots[lo:hi], rows[lo:hi]))
            start = begin + hi
            number += 1
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _whole_permutation(self) -> Int64s:
        if -1 not in self._cache:
            order = permutation(self.key, self.num_rows)
            self._cache[-1] = (order, order)
        return self._cache[-1][0]

    @property
    def _num_rounds(self) -> int:
        return max(1, -(-self.num_rows // ROUND_ROWS))

    def _taken(self, number: int) -> Int64s:
        """Rows of each block that precede a round."""
        return self.rows * number // self._num_rounds

    def _round_start(self, number: int) -> int:
        return int(self._taken(number).sum())

    def _round_of(self, offset: int) -> int:
        low, high = 0, self._num_rounds
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._round_start(middle) <= offset else (low, middle)
        return low

    def _round(self, number: int) -> tuple[Int64s, Int64s]:
        if number not in self._cache:
            begin, end = self._taken(number), self._taken(number + 1)
            counts = end - begin
            # Permute the block numbers, then number the rows of each block front to back: blocks stay streams.
            labels = np.repeat(np.arange(len(counts)), counts)
            slots = labels[permutation(derive(self.key, number), len(labels))]
            rows = np.empty(len(slots), np.int64)
            rows[np.argsort(slots, kind="stable")] = np.concatenate(
                [np.arange(b, e) for b, e in zip(begin, end, strict=True)]
            )
            self._cache.clear()  # rounds are read front to back: one is enough
            self._cache[number] = (slots, rows)
        return self._cache[number]


class SourceOrder:
    """The whole order of a source, computed window by window as it is reached.

    Example:
        >>> files = [DataFile("a", 100), DataFile("b", 100)]
        >>> index = lambda file: FileBlocks(np.array([3, 2]), np.array([30, 20]))
        >>> order = SourceOrder(0, "web", files, shuffle_bytes=1 << 20, index=index)
        >>> first = order.first_group(0)
        >>> order.group(0, first).num_rows, order.next_group(0, first) == NO_GROUP
        (10, True)
    """

    def __init__(
        self,
        seed: int,
        source: str,
        files: Sequence[DataFile],
        *,
        shuffle_bytes: int,
        index: Callable[[int], FileBlocks],
        prepare: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Describe the order; nothing is read.

        Args:
            seed: The job's seed.
            source: The source's name.
            files: Its files, sorted.
            shuffle_bytes: The memory a shuffle may hold; 0 keeps the order of the files.
            index: Returns the blocks of a file; called when the file's window is reached.
            prepare: Called with the files of a window before `index` is called for each, to index them in parallel.
        """
        self._key = derive(seed, "order", source)
        self._files = files
        self._shuffle_bytes = shuffle_bytes
        self._index = index
        self._prepare = prepare
        self._windows: tuple[int, list[Int64s]] | None = None
        self._groups: tuple[int, int, _Groups] | None = None
        self._group: tuple[int, int, Group] | None = None

    def windows(self, epoch: int) -> list[Int64s]:
        """Return the files of each window of an epoch; needs no index."""
        if self._windows is None or self._windows[0] != epoch:
            order = np.arange(len(self._files))
            if self._shuffle_bytes:
                order = permutation(derive(self._key, "files", epoch), len(self._files))
            self._windows = (epoch, _cut_windows(order, np.array([f.size for f in self._files], np.int64)))
        return self._windows[1]

    def forget(self) -> None:
        """Drop the cached windows and groups; they are computed again when needed."""
        self._windows = self._groups = self._group = None

    def first_group(self, epoch: int) -> int:
        """Return the first group of an epoch, or NO_GROUP for a source without rows."""
        return self._first_group_from(epoch, 0)

    def has_group(self, epoch: int, group: int) -> bool:
        """Whether an epoch has a group of this number; may index its window."""
        if not 0 <= group >> _GROUP_BITS < len(self.windows(epoch)):
            return False
        return self._window_groups(epoch, group >> _GROUP_BITS).has(_number(group))

    def group(self, epoch: int, group: int) -> Group:
        """Return one group; the last one is kept, as it is asked for many times."""
        found = self._group
        if found is None or found[:2] != (epoch, group):
            found = (epoch, group, self._window_groups(epoch, group >> _GROUP_BITS).at(_number(group)))
            self._group = found
        return found[2]

    def next_group(self, epoch: int, group: int) -> int:
        """Return the group that follows in this epoch, or NO_GROUP; may index the next window."""
        window = group >> _GROUP_BITS
        if self._window_groups(epoch, window).has(_number(group) + 1):
            return group + 1
        return self._first_group_from(epoch, window + 1)

    def files_of(self, epoch: int, group: int) -> Int64s:
        """Return the files that must be indexed for this group."""
        windows = self.windows(epoch)
        number = group >> _GROUP_BITS
        return windows[number] if number < len(windows) else np.empty(0, np.int64)

    def _first_group_from(self, epoch: int, window: int) -> int:
        for number in range(window, len(self.windows(epoch))):
            if self._window_groups(epoch, number).has(0):
                return number << _GROUP_BITS
        return NO_GROUP

    def _window_groups(self, epoch: int, window: int) -> _Groups:
        if self._groups is None or self._groups[:2] != (epoch, window):
            self._groups = (epoch, window, self._make_groups(epoch, window))
        return self._groups[2]

    def _make_groups(self, epoch: int, window: int) -> _Groups:
        files = self.windows(epoch)[window]
        if self._prepare is not None:
            self._prepare(files.tolist())
        found = [self._index(int(f)) for f in files]
        key = derive(self._key, "blocks", epoch, window)
        if self._shuffle_bytes and any(one.unpacked for one in found):
            return _RampGroups(key, files.tolist(), found, self._shuffle_bytes)
        found = [one.at_least(1 << 62) for one in found]
        counts = np.array([len(p.rows) for p in found], np.int64)
        order = np.arange(int(counts.sum()))
        if self._shuffle_bytes:
            order = _spread(key, np.repeat(np.arange(len(files)), counts), counts)
        rows = np.concatenate([p.rows for p in found])
        order = order[rows[order] > 0]
        blocks = _Blocks(
            files=np.repeat(files, counts)[order],
            blocks=np.concatenate([np.arange(c) for c in counts])[order],
            rows=rows[order],
            bytes=np.concatenate([p.bytes for p in found])[order],
            divisible=np.repeat([p.divisible for p in found], counts)[order],
        )
        if blocks.bytes.sum() > self._shuffle_bytes and any(one.has_large(self._shuffle_bytes) for one in found):
            return _CutGroups(key, blocks, self._shuffle_bytes)
        return _WholeGroups(key, blocks, self._shuffle_bytes)


class SortedOrder(SourceOrder):
    """The order of a source by a column: a run of rows is a group, whatever files and blocks they are in.

    Example:
        >>> rows = np.array([4, 0, 2])
        >>> order = SortedOrder("web", [DataFile("a", 100)], rows=lambda: rows, index=lambda file: None)
        >>> order.group(0, order.first_group(0)).numbers.tolist(), order.next_group(0, 0) == NO_GROUP
        ([4, 0, 2], True)
    """

    def __init__(
        self, source: str, files: Sequence[DataFile], *, rows: Callable[[], Int64s], index: Callable[[int], FileBlocks]
    ) -> None:
        """Describe the order; `rows` returns all row numbers (file << 32 | row), sorted, when they are needed."""
        super().__init__(0, source, files, shuffle_bytes=0, index=index)
        self._sort = rows
        self._sorted: Int64s | None = None

    @property
    def _rows(self) -> Int64s:
        if self._sorted is None:
            self._sorted = self._sort()
        return self._sorted

    def forget(self) -> None:
        super().forget()
        self._sorted = None

    def first_group(self, epoch: int) -> int:
        return 0 if len(self._rows) else NO_GROUP

    def has_group(self, epoch: int, group: int) -> bool:
        return 0 <= group * SORTED_ROWS < len(self._rows)

    def group(self, epoch: int, group: int) -> Group:
        found = self._group
        if found is None or found[1] != group:
            found = self._group = (epoch, group, self._run(group))
        return found[2]

    def next_group(self, epoch: int, group: int) -> int:
        return group + 1 if self.has_group(epoch, group + 1) else NO_GROUP

    def files_of(self, epoch: int, group: int) -> Int64s:
        """Return no files: rows are sorted, and found in their files, without looking at blocks."""
        return np.empty(0, np.int64)

    def _run(self, group: int) -> Group:
        numbers = self._rows[group * SORTED_ROWS : (group + 1) * SORTED_ROWS]
        none = np.empty(0, np.int64)
        return Group(
            key=0,
            files=none,
            blocks=none,
            first=none,
            rows=none,
            is_part=np.empty(0, np.bool_),
            whole=True,
            shuffled=False,
            row_bytes=sum(file.size for file in self._files) / len(self._rows),
            num_rows=len(numbers),
            numbers=numbers,
        )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a window that have rows, in the order of an epoch."""

    files: Int64s
    blocks: Int64s
    rows: Int64s
    bytes: Int64s
    divisible: npt.NDArray[np.bool_]

    @property
    def row_bytes(self) -> float:
        return float(self.bytes.sum()) / max(1, int(self.rows.sum()))


class _Groups(Protocol):
    """The groups of a window, which are computed when they are needed."""

    def has(self, number: int) -> bool:
        """Whether there is a group of this number."""
        ...

    def at(self, number: int) -> Group:
        """Return a group that there is."""
        ...


class _WholeGroups:
    """The groups of a window whose blocks are not cut."""

    def __init__(self, key: int, blocks: _Blocks, shuffle_bytes: int) -> None:
        self._key = key
        self._blocks = blocks
        self._shuffled = shuffle_bytes > 0
        self._bounds, self._whole = _cut_groups(blocks.bytes, shuffle_bytes, blocks.row_bytes)

    def has(self, number: int) -> bool:
        return 0 <= number < len(self._bounds) - 1

    def at(self, number: int) -> Group:
        blocks, chosen = self._blocks, slice(self._bounds[number], self._bounds[number + 1])
        return Group(
            key=derive(self._key, "rows", number),
            files=blocks.files[chosen],
            blocks=blocks.blocks[chosen],
            first=np.zeros_like(blocks.rows[chosen]),
            rows=blocks.rows[chosen],
            is_part=np.zeros(len(blocks.rows[chosen]), np.bool_),
            whole=self._whole,
            shuffled=self._shuffled,
            row_bytes=blocks.row_bytes,
            num_rows=int(blocks.rows[chosen].sum()),
        )


@dataclass(frozen=True, slots=True)
class _PartSizes:
    """How large parts are, and how many of them make a group.

    `shuffle_bytes` holds the parts of a group twice while they are joined.
    """

    shuffle_bytes: int
    part_bytes: int

    @property
    def budget(self) -> int:
        """Bytes of a group."""
        return max(1, self.shuffle_bytes // 2)

    @property
    def part(self) -> int:
        """Bytes of a part, at most, unless a row has more."""
        return max(1, self.budget // WHOLE_BLOCKS, min(self.part_bytes, self.budget // LEAST_PARTS))

    def count(self, rows: int, size: int) -> int:
        """Return how many parts a block has."""
        count = -(-(size + ROW_COST * rows) // self.part)
        return max(1, rows if rows <= LARGE_ROWS * count else count)


class _CutGroups:
    """The groups of a window with blocks that are cut into parts, which are permuted over the whole window.

    Every block is cut into equal ranges of rows. A group is a run of the permuted parts: one, then two, four, and so
    on. The first part makes two groups if it is large: a quarter of it, and the rest.
    """

    def __init__(self, key: int, blocks: _Blocks, shuffle_bytes: int) -> None:
        self._key = key
        self._blocks = blocks
        sizes = _PartSizes(shuffle_bytes, PART_BYTES)
        cut = zip(blocks.rows.tolist(), blocks.bytes.tolist(), blocks.divisible.tolist(), strict=True)
        self._parts = np.array([sizes.count(rows, size) if divides else 1 for rows, size, divides in cut], np.int64)
        self._first = np.cumsum(self._parts) - self._parts
        """The number of the first part of each block, of all parts of the window."""
        total = int(blocks.bytes.sum()) + ROW_COST * int(blocks.rows.sum())
        self._most = min(WHOLE_BLOCKS, max(1, sizes.budget * int(self._parts.sum()) // total))
        """Parts of a group, behind the first ones."""
        self._order = permutation(derive(key, "parts"), int(self._parts.sum()))
        _, first, stop = self._rows_of(self._order[:1])
        is_large = (stop - first).sum() * blocks.row_bytes > 2 * FIRST_BYTES and (stop - first).sum() >= 4
        self._cuts = [0, 1, 4] if is_large else [0, 4]
        """Where the first part is cut, in quarters."""

    def has(self, number: int) -> bool:
        return number >= 0 and self._begin(number) < len(self._order)

    def _begin(self, number: int) -> int:
        """Return how many whole parts are in the groups before one."""
        number = max(number - len(self._cuts) + 2, 0)
        doublings = min(number, (self._most - 1).bit_length())
        return (1 << doublings) - 1 + (number - doublings) * self._most

    def _rows_of(self, parts: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the block of each part, its first row, and the row it ends before."""
        block = np.searchsorted(self._first, parts, side="right") - 1
        part, of, rows = parts - self._first[block], self._parts[block], self._blocks.rows[block]
        return block, rows * part // of, rows * (part + 1) // of

    def at(self, number: int) -> Group:
        if number < len(self._cuts) - 1:
            block, first, stop = self._rows_of(self._order[:1])
            begin, end = self._cuts[number : number + 2]
            first, stop = first + (stop - first) * begin // 4, first + (stop - first) * end // 4
        else:
            block, first, stop = self._rows_of(np.sort(self._order[self._begin(number) : self._begin(number + 1)]))
        return Group(
            key=derive(self._key, "rows", number),
            files=self._blocks.files[block],
            blocks=self._blocks.blocks[block],
            first=first,
            rows=stop - first,
            is_part=self._blocks.divisible[block],
            whole=True,
            shuffled=True,
            row_bytes=self._blocks.row_bytes,
            num_rows=int((stop - first).sum()),
        )


class _Part(NamedTuple):
    """Some rows of a block that is unpacked front to back."""

    file: int
    block: int
    first: int
    rows: int
    bytes: float
    divisible: bool


class _Front(NamedTuple):
    """What is read next."""

    lanes: tuple[tuple[int, int, int], ...]
    """Of each file that is read: its place in the window, a block, and a part of it. The first one is next."""
    following: int
    """The place of the first file that was not begun."""


class _RampGroups:
    """The groups of a window that is unpacked front to back.

    1. `LANES` files give parts in turn, each front to back; where one ends, the next of the window takes its place.
    2. The parts are taken in spans: of the bytes of one part, then of two, four, and so on, up to `SPAN_BYTES`.
    3. The parts of a span are permuted and cut into groups that fit half of `shuffle_bytes`.

    Where a span begins is kept as the lanes, so that any span is computed without those before it once they were
    reached; only the parts of the span in use are kept.
    """

    def __init__(self, key: int, files: list[int], blocks: list[FileBlocks], shuffle_bytes: int) -> None:
        self._key = key
        self._files = files
        self._blocks = blocks
        self._sizes = _PartSizes(shuffle_bytes, UNPACKED_PART_BYTES)
        lanes = min(LANES, len(files))
        self._fronts = [_Front(tuple((place, 0, 0) for place in range(lanes)), lanes)]
        """What is read next at the beginning of each span that was reached."""
        self._first = [0]
        """The first group of each of them."""
        self._span: tuple[int, list[_Part], list[int]] | None = None

    def has(self, number: int) -> bool:
        return number >= 0 and self._find(number) is not None

    def at(self, number: int) -> Group:
        found = self._find(number)
        if found is None:
            raise IndexError(number)
        parts = sorted(found)  # they are read front to back; the rows of the group are permuted anyway
        rows = np.array([part.rows for part in parts], np.int64)
        return Group(
            key=derive(self._key, "rows", number),
            files=np.array([self._files[part.file] for part in parts], np.int64),
            blocks=np.array([part.block for part in parts], np.int64),
            first=np.array([part.first for part in parts], np.int64),
            rows=rows,
            is_part=np.array([part.divisible for part in parts], np.bool_),
            whole=True,
            shuffled=True,
            row_bytes=sum(part.bytes for part in parts) / max(1, int(rows.sum())),
            num_rows=int(rows.sum()),
        )

    def _find(self, number: int) -> list[_Part] | None:
        """Return the parts of a group."""
        span = bisect.bisect_right(self._first, number) - 1
        while True:
            parts, bounds = self._span_at(span)
            if not parts:
                return None
            at = number - self._first[span]
            if at + 1 < len(bounds):
                return parts[bounds[at] : bounds[at + 1]]
            span += 1

    def _span_at(self, span: int) -> tuple[list[_Part], list[int]]:
        """Return the permuted parts of a span, and where each of its groups begins."""
        if self._span is None or self._span[0] != span:
            front, parts, total = self._fronts[span], list[_Part](), 0.0
            room = min(self._sizes.part << min(span, _GROUP_BITS), SPAN_BYTES)
            while total + self._sizes.part / 2 < room:  # parts have somewhat less bytes than that, rows perhaps more
                part, front = self._take(front)
                if part is None:
                    break
                parts.append(part)
                total += part.bytes
            parts = [parts[at] for at in permutation(derive(self._key, "parts", span), len(parts)).tolist()]
            bounds = self._bounds(parts)
            if len(self._fronts) == span + 1:
                self._fronts.append(front)
                self._first.append(self._first[span] + len(bounds) - 1)
            self._span = (span, parts, bounds)
        return self._span[1:]

    def _bounds(self, parts: list[_Part]) -> list[int]:
        bounds, total = [0], 0.0
        for at, part in enumerate(parts):
            cost = part.bytes + ROW_COST * part.rows
            if at > bounds[-1] and (total + cost > self._sizes.budget or at - bounds[-1] >= WHOLE_BLOCKS):
                bounds.append(at)
                total = 0
            total += cost
        return [*bounds, len(parts)] if parts else [0]

    def _take(self, front: _Front) -> tuple[_Part | None, _Front]:
        """Return the next part, None behind the last, and what comes next."""
        lanes, following = list(front.lanes), front.following
        while lanes:
            place, block, number = lanes.pop(0)
            blocks = self._blocks[place] = self._blocks[place].at_least(block + 1)
            if block == len(blocks.rows):
                if following < len(self._files):
                    lanes.insert(0, (following, 0, 0))
                    following += 1
                continue
            rows, size = int(blocks.rows[block]), int(blocks.bytes[block])
            of = self._sizes.count(rows, size) if blocks.divisible else 1
            after = (place, block, number + 1) if number + 1 < of else (place, block + 1, 0)
            if not rows:
                lanes.insert(0, after)
                continue
            first, stop = rows * number // of, rows * (number + 1) // of
            part = _Part(place, block, first, stop - first, size / of, blocks.divisible)
            return part, _Front((*lanes, after), following)
        return None, _Front((), following)


def _number(group: int) -> int:
    """Return the number of a group inside its window."""
    return group & ((1 << _GROUP_BITS) - 1)


def _cut_windows(order: Int64s, sizes: Int64s) -> list[Int64s]:
    """Cut the permuted files into windows: enough files and bytes to shuffle, and never too many to index."""
    windows: list[Int64s] = []
    start, total = 0, 0
    for at, file in enumerate(order):
        total += int(sizes[file])
        count = at + 1 - start
        if (count >= WINDOW_FILES and total >= WINDOW_BYTES) or count >= WINDOW_MAX_FILES:
            windows.append(order[start : at + 1])
            start, total = at + 1, 0
    if start < len(order):
        windows.append(order[start:])
    return windows


def _spread(key: int, file_of: Int64s, counts: Int64s) -> Int64s:
    """Permute blocks so that each file's blocks are spread evenly over the window."""
    noise = hash64(key, np.arange(len(file_of)))
    inside = np.lexsort((noise, file_of))  # a random order inside each file,
    place = np.empty(len(file_of), np.int64)
    place[inside] = np.concatenate([np.arange(c) for c in counts]) if len(counts) else 0
    jitter = (noise >> np.uint64(32)).astype(np.int64)
    # and block j of n of a file goes to about (j + jitter) / n of the window.
    position = ((place << 32) + jitter) // np.maximum(counts[file_of], 1)
    return np.lexsort((noise, position))


def _cut_groups(size: Int64s, shuffle_bytes: int, row_bytes: float) -> tuple[list[int], bool]:
    """Return the bounds of the groups, and whether their rows are permuted in memory."""
    if not shuffle_bytes:
        return list(range(len(size) + 1)), False
    if len(size) == 0:
        return [0], True
    # Blocks that all fit, or are small, are read whole: as many per group as fit, and few in the first groups.
    if size.sum() <= shuffle_bytes or size.max() <= shuffle_bytes // _SMALL_SHARE:
        bounds, total = [0], 0
        room = FIRST_BYTES
        for at, one in enumerate(size.tolist()):
            if at > bounds[-1] and (total + one > min(room, shuffle_bytes) or at - bounds[-1] >= WHOLE_BLOCKS):
                bounds.append(at)
                total, room = 0, 2 * room
            total += one
        return [*bounds, len(size)], True
    # Otherwise a group is as many streams as fit.
    span = SPAN_BYTES // max(int(size.mean()), 1)
    streams = max(MIN_STREAMS, min(MAX_STREAMS, span, shuffle_bytes // stream_bytes(row_bytes)))
    return [*range(0, len(size), streams), len(size)], False
