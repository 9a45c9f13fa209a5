"""Event simulation of a step: ranks, or pipelines of them, run microbatches in order, and blocks of them together."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from overlord.planning.balancing.hybrid import HybridPlacement

_BACKWARD = 2
"""A backward pass costs twice the forward pass."""


def one_f_one_b(stage: int, stages: int, count: int) -> list[tuple[bool, int]]:
    """Return what a stage runs, in order: (whether it is a forward pass, microbatch).

    Example:
        >>> one_f_one_b(0, 2, 2)
        [(True, 0), (True, 1), (False, 0), (False, 1)]
    """
    ahead = min(stages - stage - 1, count)
    order = [(True, microbatch) for microbatch in range(ahead)]
    for microbatch in range(count - ahead):
        order += [(True, ahead + microbatch), (False, microbatch)]
    return order + [(False, microbatch) for microbatch in range(count - ahead, count)]


def first_ranks(placed: HybridPlacement) -> npt.NDArray[np.int64]:
    """Return the first rank of the block that runs each microbatch: [rank, microbatch]; an empty one is its rank's."""
    ranks, count = len(placed.num_microbatches), int(placed.num_microbatches.max(initial=0))
    first = np.tile(np.arange(ranks)[:, None], (1, count))
    for begin, size, microbatch in zip(placed.first_rank, placed.cp_size, placed.microbatch, strict=True):
        first[begin : begin + size, microbatch] = begin
    return first


def simulate(
    loads: npt.NDArray[np.int64], first: npt.NDArray[np.int64], counts: npt.NDArray[np.integer], stages: int = 1
) -> float:
    """Return when the last rank ends; a rank waits for its stages' neighbours and for the other ranks of its blocks.

    Args:
        loads: The cost of every microbatch on one stage, forward and backward together: [pipeline, microbatch].
        first: The first pipeline of the block that runs it, of the same shape; ranks of a block are neighbours.
        counts: Microbatches of each pipeline.
        stages: Stages of each pipeline; the schedule is one forward, one backward.

    Raises:
        RuntimeError: The pipelines wait for each other in a circle.
    """
    num, queues = len(loads), {}
    members: dict[tuple[int, int], list[int]] = {}
    for pipeline in range(num):
        for microbatch in range(int(counts[pipeline])):
            members.setdefault((int(first[pipeline, microbatch]), microbatch), []).append(pipeline)
        for stage in range(stages):
            queues[pipeline, stage] = deque(one_f_one_b(stage, stages, int(counts[pipeline])))
    clock = dict.fromkeys(queues, 0.0)
    ended: dict[tuple[bool, int, int, int], float] = {}
    waiting = deque(queues)
    idle = 0
    while waiting:
        pipeline, stage = waiting.popleft()
        queue = queues[pipeline, stage]
        if not queue:
            continue
        forward, microbatch = queue[0]
        leader = int(first[pipeline, microbatch])
        ranks = members[leader, microbatch]
        before = (forward, stage - 1 if forward else stage + 1, leader, microbatch)
        ready = before in ended or not 0 <= before[1] < stages
        if not ready or any(not queues[one, stage] or queues[one, stage][0] != queue[0] for one in ranks):
            waiting.append((pipeline, stage))
            idle += 1
            if idle > len(waiting):
                raise RuntimeError(f"pipelines wait for each other at microbatch {microbatch} of pipeline {pipeline}")
            continue
        idle = 0
        begin = max([ended.get(before, 0.0)] + [clock[one, stage] for one in ranks])
        part = (1 if forward else _BACKWARD) / (1 + _BACKWARD)
        for one in ranks:
            clock[one, stage] = begin + part * float(loads[one, microbatch])
            queues[one, stage].popleft()
        ended[forward, stage, leader, microbatch] = max(clock[one, stage] for one in ranks)
        waiting.append((pipeline, stage))
    return max(clock.values(), default=0.0)
