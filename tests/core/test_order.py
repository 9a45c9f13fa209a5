"""The order of a source: a permutation, computable anywhere, well shuffled, indexed only where reached."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.core.order import (
    NO_GROUP,
    SPAN_BYTES,
    WHOLE_BLOCKS,
    WINDOW_BYTES,
    DataFile,
    FileBlocks,
    SourceOrder,
    stream_bytes,
)


def make(blocks_per_file, rows, row_bytes, shuffle_bytes, seed=0, divisible=False):
    """An order over files with blocks of the given rows; also returns the set of indexed files."""
    reached: set[int] = set()

    def index(file: int) -> FileBlocks:
        reached.add(file)
        counts = np.array(rows[: blocks_per_file[file]] if rows else [], np.int64)
        return FileBlocks(counts, counts * row_bytes, divisible)

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


@given(shapes, st.integers(0, 3), st.booleans())
def test_every_row_once_per_epoch(shape, epoch, divisible):
    blocks, rows, row_bytes, shuffle_bytes = shape
    order, _ = make(blocks, rows, row_bytes, shuffle_bytes, divisible=divisible)
    seen = list(walk(order, epoch))
    expected = [(f, b, r) for f, n in enumerate(blocks) for b in range(n) for r in range(rows[b])]
    assert sorted(seen) == expected
    if not shuffle_bytes:
        assert seen == expected


@given(shapes, st.integers(1, 7), st.booleans())
def test_any_offset_is_computable_without_replay(shape, chunk, divisible):
    whole, _ = make(*shape, divisible=divisible)
    assert list(walk(whole, 0)) == list(walk(make(*shape, divisible=divisible)[0], 0, chunk))


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
    fits = max(rows) * row_bytes
    assert list(walk(make(blocks, rows, row_bytes, fits, divisible=True)[0], 1)) == list(
        walk(make(blocks, rows, row_bytes, fits)[0], 1)
    )


def large(files, rows, row_bytes, shuffle_bytes=4 << 20):
    """Files of one block each, as large as a writer makes them."""
    return make([1] * files, [rows], row_bytes, shuffle_bytes, divisible=True)[0]


@pytest.mark.parametrize(("files", "rows", "row_bytes"), [(1, 50_000, 200), (1, 2_000, 6_000), (3, 2_000, 30_000)])
def test_rows_of_large_blocks_do_not_stay_neighbours(files, rows, row_bytes):
    order = large(files, rows, row_bytes)
    first, second = (list(walk(order, epoch)) for epoch in (0, 1))
    assert neighbours_kept(first) < 0.01 and neighbours_kept(second) < 0.01 and first != second
    # A batch has rows from all over the files, not from one place.
    places = np.array([file * rows + row for file, _, row in first[:64]]) / (files * rows)
    assert 0.3 < places.mean() < 0.7 and places.std() > 0.2


def test_a_group_of_parts_fits_the_budget_and_reads_from_few_blocks():
    shuffle_bytes, row_bytes, rows = 1 << 20, 1_000, 40_000
    order = large(20, rows, row_bytes, shuffle_bytes)
    seen: dict[int, list[int]] = {file: [] for file in range(20)}
    for number, group in enumerate(_groups(order)):
        found = order.group(0, group)
        assert found.whole and len(found.rows) <= WHOLE_BLOCKS and found.is_part.all()
        assert found.num_rows * row_bytes <= 0.55 * shuffle_bytes
        for file in set(found.files.tolist()):
            seen[file].append(number)
    # A block that was left is not needed again in this epoch: it is unpacked once.
    for group in range(number + 1):
        used = sum(groups[0] <= group <= groups[-1] for groups in seen.values())
        assert 2 <= used * rows * row_bytes <= SPAN_BYTES


def test_blocks_of_any_size_are_read_at_least_two_at_a_time():
    order = large(6, 1_000, 1 << 20)  # 1 GiB each
    group = order.first_group(0)
    near = [set(order.group(0, group + n).files.tolist()) for n in range(100)]
    assert len(set.union(*near)) == 2


def test_a_cursor_made_before_a_block_was_cut_names_no_group():
    cut, old = large(1, 5_000, 1_000), make([1], [5_000], 1_000, 4 << 20)[0]
    assert old.has_group(0, 0) and not cut.has_group(0, 0)
    assert cut.has_group(0, cut.first_group(0)) and not old.has_group(0, cut.first_group(0))
    groups = sorted(set(_groups(cut)))
    assert not cut.has_group(0, groups[-1] + 1) and len(groups) == len(list(_groups(cut)))


def _groups(order):
    group = order.first_group(0)
    while group != NO_GROUP:
        yield group
        group = order.next_group(0, group)
