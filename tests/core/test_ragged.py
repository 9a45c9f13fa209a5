"""Ragged arrays: what is joined without a copy, and what is copied."""

from __future__ import annotations

import numpy as np

from overlord.core.ragged import Ragged


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
