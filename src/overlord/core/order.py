"""The order of one source: (seed, source, epoch, group, offset) -> (file, block, row), without replay.

Rules of this file (the law, "Order"):
1. A source is a list of files, a file a list of blocks, a block is read front to back.
2. Per epoch the files are permuted and cut into windows by their sizes alone, so that only the
   files of the window being reached need an index. Blocks are permuted inside their window, spread
   so that neighbours come from different files where possible, and taken in groups.
3. A group that fits `shuffle_bytes` is permuted row by row. A larger one is k streams, read front
   to back, merged by a keyed permutation; k follows from `shuffle_bytes` and the mean row size.
4. A block that is larger than `shuffle_bytes` (a Parquet row group of the default size, a compressed file) would be a
   single stream, not shuffled. In a window with such a block all blocks are cut into parts (ranges of rows), and a
   group takes parts of several blocks that together fit `shuffle_bytes`, permuted row by row.
5. Nothing crosses an epoch. Groups are numbered window << 24 | number in the window, with bit 23 set in a window
   that is cut: a cursor made before such windows were cut (or with another `shuffle_bytes`) names no group of it.

6. A source that is ordered by a column (`SortedOrder`) has the same order in every epoch; a group is a run of it.

How a cursor is resolved: `windows` needs only the sizes of the files. The group number names a window; the files of
that window are indexed, their blocks permuted and grouped (`_make_groups`), and the group number selects a group.
`Group.locate` then maps offsets in the group to rows. Only one epoch's windows and one window's groups are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
"""Bytes of the blocks that are read concurrently, at most, if they are more than two: some formats decompress a whole
block to reach a row."""
WHOLE_BLOCKS = 64
"""Blocks, or parts of blocks, of a group in memory, at most: each costs an open."""
ROW_COST = 16
"""Bytes of a row beside its own when its group is permuted in memory: an entry in two arrays."""
NO_GROUP = -1
SORTED_ROWS = 4096
"""Rows of a group of a source that is ordered by a column."""
BEGIN = -2
"""In a cursor: the first group of an epoch. A source that is not drawn keeps it, so that nothing is indexed."""
_GROUP_BITS = 24
_CUT = 1 << (_GROUP_BITS - 1)

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

    def has_large(self, shuffle_bytes: int) -> bool:
        """Whether a block cannot be shuffled within so many bytes unless it is cut."""
        return self.divisible and shuffle_bytes > 0 and bool(((self.bytes > shuffle_bytes) & (self.rows > 1)).any())


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
        self._groups: tuple[int, int, Sequence[Group]] | None = None
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
        groups = self._window_groups(epoch, group >> _GROUP_BITS)
        return bool(group & _CUT) == isinstance(groups, _CutGroups) and _number(group) < len(groups)

    def group(self, epoch: int, group: int) -> Group:
        """Return one group; the last one is kept, as it is asked for many times."""
        found = self._group
        if found is None or found[:2] != (epoch, group):
            found = (epoch, group, self._window_groups(epoch, group >> _GROUP_BITS)[_number(group)])
            self._group = found
        return found[2]

    def next_group(self, epoch: int, group: int) -> int:
        """Return the group that follows in this epoch, or NO_GROUP; may index the next window."""
        window = group >> _GROUP_BITS
        if _number(group) + 1 < len(self._window_groups(epoch, window)):
            return group + 1
        return self._first_group_from(epoch, window + 1)

    def files_of(self, epoch: int, group: int) -> Int64s:
        """Return the files that must be indexed for this group."""
        windows = self.windows(epoch)
        number = group >> _GROUP_BITS
        return windows[number] if number < len(windows) else np.empty(0, np.int64)

    def _first_group_from(self, epoch: int, window: int) -> int:
        for number in range(window, len(self.windows(epoch))):
            if self._prepare is not None:
                self._prepare(self.windows(epoch)[number].tolist())
            blocks = [self._index(int(f)) for f in self.windows(epoch)[number]]
            if any(one.rows.sum() > 0 for one in blocks):
                cut = any(one.has_large(self._shuffle_bytes) for one in blocks)
                return number << _GROUP_BITS | (_CUT if cut else 0)
        return NO_GROUP

    def _window_groups(self, epoch: int, window: int) -> Sequence[Group]:
        if self._groups is None or self._groups[:2] != (epoch, window):
            self._groups = (epoch, window, self._make_groups(epoch, window))
        return self._groups[2]

    def _make_groups(self, epoch: int, window: int) -> Sequence[Group]:
        files = self.windows(epoch)[window]
        found = [self._index(int(f)) for f in files]
        counts = np.array([len(p.rows) for p in found], np.int64)
        key = derive(self._key, "blocks", epoch, window)
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
        if any(one.has_large(self._shuffle_bytes) for one in found):
            return _CutGroups(key, blocks, self._shuffle_bytes)
        bounds, whole = _cut_groups(blocks.bytes, self._shuffle_bytes, blocks.row_bytes)
        groups: list[Group] = []
        for number in range(len(bounds) - 1):
            chosen = slice(bounds[number], bounds[number + 1])
            groups.append(
                Group(
                    key=derive(key, "rows", number),
                    files=blocks.files[chosen],
                    blocks=blocks.blocks[chosen],
                    first=np.zeros_like(blocks.rows[chosen]),
                    rows=blocks.rows[chosen],
                    is_part=np.zeros(len(blocks.rows[chosen]), np.bool_),
                    whole=whole,
                    shuffled=self._shuffle_bytes > 0,
                    row_bytes=blocks.row_bytes,
                    num_rows=int(blocks.rows[chosen].sum()),
                )
            )
        return groups


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


class _CutGroups(Sequence[Group]):
    """The groups of a window with blocks that are cut into parts; a group is computed when it is accessed.

    1. The blocks, already permuted, are taken in spans: consecutive blocks that a reader can keep decoded at the same
       time, at least two, up to `SPAN_BYTES`.
    2. Every block is cut into equal ranges of rows, so that `WHOLE_BLOCKS` parts cost half of `shuffle_bytes`: the
       parts of a group are in memory twice while they are joined. A part has at least one row.
    3. All parts of a span are permuted and divided evenly among its groups. So a block is needed only during its span.

    The number of groups of a span follows from its blocks alone, so that `len` and a lookup of the span need no parts;
    only the permuted parts of the span in use are kept.
    """

    def __init__(self, key: int, blocks: _Blocks, shuffle_bytes: int) -> None:
        self._key = key
        self._blocks = blocks
        self._row_bytes = blocks.row_bytes
        cost = blocks.bytes + ROW_COST * blocks.rows
        budget = max(1, shuffle_bytes // 2)
        parts = -(-cost // max(1, budget // WHOLE_BLOCKS))
        self._parts = np.where(blocks.divisible, np.clip(parts, 1, blocks.rows), 1)
        """How many parts each block has."""
        self._spans = np.array(_cut_spans(blocks.bytes), np.int64)
        parts_of = np.add.reduceat(self._parts, self._spans[:-1])
        wanted = -(-np.add.reduceat(cost, self._spans[:-1]) // budget)
        groups = np.minimum(np.maximum(wanted, -(-parts_of // WHOLE_BLOCKS)), parts_of)
        self._groups = np.concatenate([[0], np.cumsum(groups)])
        """The first group of each span, and the number of all groups."""
        self._span: tuple[int, Int64s, Int64s] | None = None

    def __len__(self) -> int:
        return int(self._groups[-1])

    def __getitem__(self, number: int) -> Group:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        span = int(np.searchsorted(self._groups, number, side="right")) - 1
        if self._span is None or self._span[0] != span:
            self._span = (span, *self._permuted_parts(span))
        _, block, part = self._span
        begin, end = int(self._groups[span]), int(self._groups[span + 1])
        low, high = ((number - begin + i) * len(block) // (end - begin) for i in (0, 1))
        block, part = block[low:high], part[low:high]
        order = np.lexsort((part, block))  # parts are read front to back; the rows of the group are permuted anyway
        block, part = block[order], part[order]
        of, rows = self._parts[block], self._blocks.rows[block]
        first, stop = rows * part // of, rows * (part + 1) // of
        return Group(
            key=derive(self._key, "rows", number),
            files=self._blocks.files[block],
            blocks=self._blocks.blocks[block],
            first=first,
            rows=stop - first,
            is_part=of > 1,
            whole=True,
            shuffled=True,
            row_bytes=self._row_bytes,
            num_rows=int((stop - first).sum()),
        )

    def _permuted_parts(self, span: int) -> tuple[Int64s, Int64s]:
        """Return the block and the number in its block of every part of a span, in the order of its groups."""
        low, high = int(self._spans[span]), int(self._spans[span + 1])
        counts = self._parts[low:high]
        block = np.repeat(np.arange(low, high), counts)
        part = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        order = permutation(derive(self._key, "parts", span), len(block))
        return block[order], part[order]


def _cut_spans(size: Int64s) -> list[int]:
    """Return where each span begins, and the number of blocks: see `_CutGroups`."""
    bounds, total = [0], 0
    for at, one in enumerate(size.tolist()):
        count = at - bounds[-1]
        if count >= MAX_STREAMS or (count >= MIN_STREAMS and total + one > SPAN_BYTES):
            bounds.append(at)
            total = 0
        total += one
    return [*bounds, len(size)]


def _number(group: int) -> int:
    """Return the number of a group inside its window."""
    return group & (_CUT - 1)


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
    # Blocks that all fit, or are small, are read whole: as many per group as fit.
    if size.sum() <= shuffle_bytes or size.max() <= shuffle_bytes // 8:
        bounds, total = [0], 0
        for at, one in enumerate(size.tolist()):
            if at > bounds[-1] and (total + one > shuffle_bytes or at - bounds[-1] >= WHOLE_BLOCKS):
                bounds.append(at)
                total = 0
            total += one
        return [*bounds, len(size)], True
    # Otherwise a group is as many streams as fit.
    span = SPAN_BYTES // max(int(size.mean()), 1)
    streams = max(MIN_STREAMS, min(MAX_STREAMS, span, shuffle_bytes // stream_bytes(row_bytes)))
    return [*range(0, len(size), streams), len(size)], False
