"""Ragged arrays: what is joined without a copy, and what is copied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.core.ragged import Ragged, Scattered, copied_run, gather_columns, gather_runs, take_rows


def test_neighbours_are_joined_without_a_copy_and_others_are_copied():
    whole = Ragged.from_rows([b"ab", b"c", b"def", b"gh"])
    parts = [whole.slice(0, 1), whole.slice(1, 3), whole.slice(3, 4)]
    joined = Ragged.concat(parts)
    assert joined.values.base is whole.values or np.shares_memory(joined.values, whole.values)
    assert [bytes(joined[row]) for row in range(4)] == [b"ab", b"c", b"def", b"gh"]
    turned = Ragged.concat([parts[2], parts[0]])
    assert bytes(turned[0]) + bytes(turned[1]) == b"ghab" and not np.shares_memory(turned.values, whole.values)
    strided = Ragged(np.arange(10)[::2], np.array([0, 2, 5]))
    assert Ragged.concat([strided.slice(1, 2)]).values.tolist() == [4, 6, 8]
    sealed = whole.values[:]
    sealed.flags.writeable = False
    copied = Ragged.concat([Ragged(sealed, whole.offsets)])
    assert not np.shares_memory(copied.values, whole.values), "what others may not change is not handed on writeable"


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=9), st.data())
def test_a_copied_run_is_what_single_rows_are(rows: list[bytes], data: st.DataObject):
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    batch = {"w": Ragged.from_rows(rows), "n": np.arange(len(rows))}
    found, expected = copied_run(batch, start, stop), take_rows(batch, np.arange(start, stop))
    assert found["w"].values.tobytes() == expected["w"].values.tobytes()
    assert found["w"].offsets.tolist() == expected["w"].offsets.tolist()
    assert found["n"].tolist() == expected["n"].tolist()
    assert not np.shares_memory(found["n"], batch["n"]) and not np.shares_memory(found["w"].values, batch["w"].values)


@pytest.mark.parametrize(
    "copy",
    [
        lambda rows: rows.take(np.array([-1])),
        lambda rows: rows.take_into(np.array([2**40]), np.empty(9, np.uint8)),
        lambda rows: rows.take_into(np.array([0, 1]), np.empty(2, np.uint8)),
        lambda rows: Ragged(rows.values, np.array([0, 2**40])).take_into(np.array([0]), np.empty(9, np.uint8)),
        lambda rows: Ragged(rows.values, np.array([3, 1])).take_into(np.array([0]), np.empty(9, np.uint8)),
        lambda rows: gather_runs(rows.values, np.array([2**40]), np.array([1])),
        lambda rows: gather_runs(rows.values, np.array([0]), np.array([len(rows.values) + 1])),
        lambda rows: gather_runs(rows.values, np.array([-(2**40)]), np.array([1])),
        lambda rows: Scattered(rows.values, np.array([9]), np.array([2]), np.dtype(np.uint8)).gathered(),
        lambda rows: gather_columns(
            [("w", np.dtype(np.uint8), True)], [(rows.values, np.array([0]))], np.array([[2**40]]), np.array([[1]])
        ),
    ],
)
def test_rows_outside_their_memory_are_refused_and_not_read(copy):
    with pytest.raises(IndexError, match="outside the memory"):
        copy(Ragged.from_rows([b"abc", b"defg"]))
