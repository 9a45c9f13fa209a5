"""Compiles or loads every planning kernel, so that no step of a run waits for the compiler.

Numba caches compiled kernels beside the package; with the cache this takes a fraction of a second.
"""

from __future__ import annotations

import functools
from typing import get_args

import numpy as np

from overlord.core.draw import Pieces, cut_pieces
from overlord.core.place_tree import ClientPlaceTree
from overlord.planning import strategies
from overlord.planning.balancing.balance import METHODS, MethodName, Objective, balance, place
from overlord.planning.balancing.packing import PackMethod
from overlord.planning.checking import run_strategy
from overlord.planning.drawing import SCALE, Budget, Supply, Tally, draw_more
from overlord.planning.low_level import summary_buffer

_ITEMS = np.array([9, 7, 5, 3, 3, 2, 1]), np.array([1, 7, 2, 3, 6, 2, 5])
"""Costs and sizes."""


@functools.cache
def warm_launch() -> None:
    """Load the kernels that any step may need: the draw, and the default balance with its fallbacks.

    The other kernels of a strategy are loaded by the first plan, before a launch returns.
    """
    _draw()
    _balance("greedy", "lockstep")
    image = Pieces(np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1, np.int32))
    cut_pieces(np.array([3], np.int32), 2, image)


@functools.cache
def warm_kernels() -> None:
    """Call every kernel on a handful of samples; a second call does nothing."""
    warm_launch()
    buffer = summary_buffer(
        {"a": [40, 30, 9, 8, 5], "b": {"tokens": [20, 50], "images": [1, 1], "image_tokens": [9, 20]}},
        context_length=32,
        microbatch_tokens=64,
    )
    packed = [strategies.packed(method=method) for method in get_args(PackMethod)]
    hybrid = [strategies.hdp(), strategies.hdp(equal_counts=True)]
    for strategy in (strategies.vanilla(), strategies.vlm_hybrid(split=True), *hybrid, *packed):
        run_strategy(strategy, buffer, ClientPlaceTree(dp=2, cp=2))
    for method in METHODS:
        balance([3, 2, 1], 2, method=method)
        for objective in get_args(Objective):
            _balance(method, objective)
    place(*_ITEMS, 4, 2, 16, group_size=2)
    place(*_ITEMS, 2, 2, 16, level="intra")


def _balance(method: MethodName, objective: Objective) -> None:
    for capacity in (7, 8, 32):  # tight capacities run the fallbacks, too
        place(*_ITEMS, 2, 2, capacity, method=method, objective=objective)


def _draw() -> None:
    for by_tokens in (False, True):
        supply = Supply(
            tokens=np.array([3, 4, 5, 6], np.int32),
            flags=np.zeros(4, np.int32),
            base=np.array([0, 2]),
            held=np.array([2, 2]),
            taken=np.zeros(2, np.int64),
        )
        tally = Tally(*np.zeros((4, 2), np.int64))
        draw_more(supply, np.full(2, SCALE // 2), tally, Budget(3, 1 << 40), by_tokens=by_tokens, sequential=False)
