"""The order of a source: a permutation, computable anywhere, well shuffled, indexed only where reached."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.core.order import (
    FIRST_BYTES,
    NO_GROUP,
    PART_BYTES,
    SPAN_BYTES,
    UNPACKED_PART_BYTES,
    WHOLE_BLOCKS,
    WINDOW_BYTES,
    DataFile,
    FileBlocks,
    SourceOrder,
    stream_bytes,
)


def make(blocks_per_file, rows, row_bytes, shuffle_bytes, seed=0, divisible=False, unpacked=False):
    """An order over files with blocks of the given rows; also returns the set of indexed files.

    `unpacked` is True for files that are known, and "slowly" for those that are indexed block by block.
    """
    reached: set[int] = set()

    def index(file: int, most: int = 1) -> FileBlocks:
        reached.add(file)
        counts = np.array(rows[: blocks_per_file[file]] if rows else [], np.int64)
        if unpacked != "slowly" or most > len(counts):
            return FileBlocks(counts, counts * row_bytes, divisible, bool(unpacked))
        known = counts[:most]
        return FileBlocks(known, known * row_bytes, divisible, True, lambda count: index(file, max(count, most)))

    files = [DataFile(f"{i}", n * 1000 + 1) for i, n in enumerate(blocks_per_file)]
    return SourceOrder(seed, "s", files, shuffle_bytes=shuffle_bytes, index=index), reached


def walk(order: SourceOrder, epoch: int, chunk: int = 10**9):
    """Yield (file, block, row) of an epoch."""
    group = order.first_group(epoch)
    while group != NO_GROUP:
        found = order.group(epoch, group)
        for start in range(0, found.num_rows, chunk):
            slots, rows = found.locate(start, chunk)
            rows += found.first[slots]
            yield from zip(found.files[slots].tolist(), found.blocks[slots].tolist(), rows.tolist(), strict=True)
        group = order.next_group(epoch, group)


shapes = st.tuples(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.integers(0, 40), min_size=5, max_size=5),
    st.sampled_from([1, 100, 50_000]),
    st.sampled_from([0, 500, 1 << 20]),
)


cuts = st.sampled_from([(False, False), (True, False), (True, True), (True, "slowly"), (False, True)])
"""Whether blocks are divisible, and unpacked."""


@given(shapes, st.integers(0, 3), cuts)
def test_every_row_once_per_epoch(shape, epoch, cut):
    blocks, rows, row_bytes, shuffle_bytes = shape
    order, _ = make(blocks, rows, row_bytes, shuffle_bytes, divisible=cut[0], unpacked=cut[1])
    seen = list(walk(order, epoch))
    expected = [(f, b, r) for f, n in enumerate(blocks) for b in range(n) for r in range(rows[b])]
    assert sorted(seen) == expected
    if not shuffle_bytes:
        assert seen == expected


@given(shapes, st.integers(1, 7), cuts, st.randoms())
def test_any_offset_is_computable_without_replay(shape, chunk, cut, luck):
    def new() -> SourceOrder:
        return make(*shape, divisible=cut[0], unpacked=cut[1])[0]

    whole = new()
    assert list(walk(whole, 0)) == list(walk(new(), 0, chunk))
    groups = list(_groups(whole))
    luck.shuffle(groups)
    other = new()
    for group in groups:  # in any order, by one that has seen others and by one that has seen none
        expected = whole.group(0, group)
        for order in (other, new()):
            assert order.has_group(0, group) and not order.has_group(0, group + (1 << 23))
            found = order.group(0, group)
            assert found.key == expected.key
            for name in ("files", "blocks", "first", "rows", "is_part"):
                assert getattr(found, name).tolist() == getattr(expected, name).tolist()
            assert order.next_group(0, group) == whole.next_group(0, group)


@given(shapes)
def test_streamed_blocks_are_read_front_to_back(shape):
    blocks, rows, row_bytes, _ = shape
    order, _ = make(blocks, rows, row_bytes, 500)
    group = order.first_group(0)
    while group != NO_GROUP:
        found = order.group(0, group)
        if not found.whole:
            slots, at = found.locate(0, found.num_rows)
            for slot in range(len(found.rows)):
                assert (np.diff(at[slots == slot]) == 1).all()
        group = order.next_group(0, group)


def test_epochs_and_seeds_differ():
    blocks, rows = [4] * 8, [50, 50, 50, 50, 0]
    first = list(walk(make(blocks, rows, 1000, 1 << 20)[0], 0))
    assert first != list(walk(make(blocks, rows, 1000, 1 << 20)[0], 1))
    assert first != list(walk(make(blocks, rows, 1000, 1 << 20, seed=1)[0], 0))


def test_only_files_being_reached_are_indexed():
    count = 100
    reached: set[int] = set()

    def index(file: int) -> FileBlocks:
        reached.add(file)
        return FileBlocks(np.array([10]), np.array([10]))

    files = [DataFile(str(i), WINDOW_BYTES // 16) for i in range(count)]
    order = SourceOrder(0, "s", files, shuffle_bytes=1 << 20, index=index)
    order.group(0, order.first_group(0)).locate(0, 10)
    assert len(reached) == 16
    assert len(order.windows(0)) == 7


def neighbours_kept(sequence) -> float:
    """The statistic of shuffle quality: the share of rows directly followed by their own next row."""
    pairs = itertools.pairwise(sequence)
    return sum(a[:2] == b[:2] and b[2] == a[2] + 1 for a, b in pairs) / (len(sequence) - 1)


def test_neighbours_of_a_block_do_not_stay_neighbours():
    row_bytes, shuffle_bytes = 20_000, 4 << 20
    streams = min(32, shuffle_bytes // stream_bytes(row_bytes))
    order, _ = make([4] * 16, [300] * 5, row_bytes, shuffle_bytes)
    sequence = list(walk(order, 0))
    # k merged streams leave about one row in k next to its old neighbour; a whole group far fewer.
    assert streams >= 8
    assert neighbours_kept(sequence) < 1.3 / streams
    small, _ = make([4] * 16, [30] * 5, 100, shuffle_bytes)
    assert neighbours_kept(list(walk(small, 0))) < 0.005


def test_blocks_of_a_group_come_from_different_files_where_possible():
    order, _ = make([6] * 16, [100, 100, 100, 100, 100], 20_000, 4 << 20)
    group = order.group(0, order.first_group(0))
    assert len(set(group.files.tolist())) >= 0.6 * len(group.files)
    # Row positions are mixed too: the correlation of place and row over the epoch is that of k-wise merging.
    assert len(group.files) >= 8


@given(shapes)
def test_a_source_with_blocks_that_fit_is_never_cut(shape):
    blocks, rows, row_bytes, _ = shape
    fits = sum(sum(rows[:count]) for count in blocks) * row_bytes
    assert list(walk(make(blocks, rows, row_bytes, fits, divisible=True)[0], 1)) == list(
        walk(make(blocks, rows, row_bytes, fits)[0], 1)
    )


def large(files, rows, row_bytes, shuffle_bytes=4 << 20, unpacked=False):
    """Files of one block each, as large as a writer makes them."""
    return make([1] * files, [rows], row_bytes, shuffle_bytes, divisible=True, unpacked=unpacked)[0]


@pytest.mark.parametrize(
    ("files", "rows", "row_bytes"), [(1, 50_000, 200), (1, 20_000, 6_000), (3, 20_000, 15_000), (3, 2_000, 200_000)]
)
def test_rows_of_large_blocks_do_not_stay_neighbours(files, rows, row_bytes):
    order = large(files, rows, row_bytes)
    first, second = (list(walk(order, epoch)) for epoch in (0, 1))
    assert neighbours_kept(first) < 0.015 and neighbours_kept(second) < 0.015 and first != second
    # Behind the first, small groups, a batch has rows from all over the files, not from one place.
    places = np.array([file * rows + row for file, _, row in first]) / (files * rows)
    batches = np.array_split(places[len(places) // 8 :], 40)
    assert np.mean([batch.std() for batch in batches]) > 0.15
    assert abs(np.corrcoef(np.arange(len(places)), places)[0, 1]) < 0.2


def test_a_group_of_parts_fits_the_budget():
    shuffle_bytes, row_bytes, rows = 4 << 20, 1_000, 40_000
    order = large(20, rows, row_bytes, shuffle_bytes)
    parts = []
    for group in _groups(order):
        found = order.group(0, group)
        assert found.whole and len(found.rows) <= WHOLE_BLOCKS and found.is_part.all()
        assert found.num_rows * row_bytes <= 0.55 * shuffle_bytes
        assert (found.rows * row_bytes).max() <= PART_BYTES
        parts.append(len(found.rows))
    assert parts[:5] == [1, 1, 2, 4, 4] and set(parts[3:-1]) == {4}, "the first rows wait for a part of one part"
    sizes = [order.group(0, group).num_rows * row_bytes for group in itertools.islice(_groups(order), 3)]
    assert sizes[0] <= FIRST_BYTES and sum(sizes[:2]) <= PART_BYTES < sizes[2]
    last = order.group(0, group)
    assert len(set(last.files.tolist())) > 1 or len(last.rows) == 1


def test_a_large_shuffle_has_larger_parts_not_more():
    order = large(4, 100_000, 1_000, shuffle_bytes=256 << 20)
    groups = [order.group(0, group) for group in _groups(order)]
    assert max(len(group.rows) for group in groups) == WHOLE_BLOCKS
    assert max((group.rows * 1_000).max() for group in groups) > PART_BYTES


def test_small_blocks_are_read_whole_and_few_in_the_first_groups():
    order, _ = make([40] * 16, [100] * 40, 1_000, 4 << 20, divisible=True)
    groups = [order.group(0, group) for group in _groups(order)]
    assert not any(group.is_part.any() for group in groups)
    assert [len(group.rows) for group in groups[:6]] == [1, 2, 5, 10, 20, 41]


def test_what_is_unpacked_is_read_front_to_back_in_spans_that_double():
    row_bytes, rows = 1_000, 100_000
    order = large(6, rows, row_bytes, unpacked=True)
    behind: dict[int, int] = {}
    reached, seen, sizes = [], 0, []
    for group in _groups(order):
        found = order.group(0, group)
        assert len(set(found.files.tolist())) <= 4, "two files are read, and those before and behind them"
        for file, first, count in zip(found.files, found.first, found.rows, strict=True):
            behind[int(file)] = max(behind.get(int(file), 0), int(first + count))
        seen += found.num_rows
        sizes.append(found.num_rows * row_bytes)
        reached.append((sum(behind.values()) * row_bytes, seen * row_bytes))
    assert sizes[0] <= UNPACKED_PART_BYTES and sizes[1] <= 2 * UNPACKED_PART_BYTES
    for unpacked, drawn in reached:  # what was unpacked and not given is less than what was given, or than a span
        assert unpacked <= min(2 * drawn + 2 * PART_BYTES, drawn + SPAN_BYTES + PART_BYTES)
    assert any(unpacked > drawn + SPAN_BYTES // 2 for unpacked, drawn in reached)


def test_files_that_are_indexed_as_they_are_unpacked_give_the_same_order_and_are_not_scanned():
    shape = ([60] * 9, [1_000] * 60, 1_000, 4 << 20)
    known, slowly = (make(*shape, divisible=True, unpacked=how) for how in (True, "slowly"))
    assert list(walk(known[0], 1)) == list(walk(slowly[0], 1))
    most: list[int] = []
    rows = np.full(60, 1_000)

    def index(file: int, count: int = 1) -> FileBlocks:
        most.append(count)
        return FileBlocks(rows[:count], rows[:count] * 1_000, True, True, lambda count: index(file, count))

    order = SourceOrder(0, "s", [DataFile(f"{i}", 10**9) for i in range(16)], shuffle_bytes=4 << 20, index=index)
    group = order.first_group(0)
    order.group(0, group).locate(0, 100)
    assert max(most) == 1
    order.group(0, order.next_group(0, group))
    assert max(most) <= 2


def test_a_run_of_parts_from_one_file_follows_another_when_the_first_ends():
    order, _ = make([1, 1, 1], [10, 0, 0], 1_000, 4 << 20, divisible=True, unpacked=True)
    assert len(list(walk(order, 0))) == 30
    order, _ = make([3, 0, 5, 1, 0], [700] * 5, 1_000, 4 << 20, divisible=True, unpacked="slowly")
    assert len(set(walk(order, 0))) == 9 * 700


def _groups(order):
    group = order.first_group(0)
    while group != NO_GROUP:
        yield group
        group = order.next_group(0, group)
