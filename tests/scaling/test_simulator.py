"""The simulated feed of `benchmarks.scaling`: no work is lost, and its figures are those that can be computed."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.scaling import curriculum

from overlord.scaling.feed_simulator import World, simulate
from overlord.scaling.profiles import SourceCost


def world(**more) -> World:
    costs = (
        SourceCost(name="a", transform_s=0.001, buffer_bytes=10, file_bytes=1),
        SourceCost(name="b", transform_s=0.04, buffer_bytes=10, file_bytes=1),
    )
    options = {"samples": 100, "step_s": 1.0, "cpus": 8, "actor_bytes": 100} | more
    return World(costs=costs, shares=np.tile([0.5, 0.5], (20, 1)), **options)


def test_enough_workers_never_let_the_trainer_wait():
    out = simulate(world(), [1, 3])
    assert out.stall_s == 0
    assert out.used_cpu_s == pytest.approx(world().work().sum())
    assert len(out.waits) == 20


def test_too_few_workers_take_as_long_as_the_work_takes():
    one = world()
    out = simulate(one, [1, 1])
    # The trainer takes its first step when it is there, and the last when all the work is done.
    expected = one.work()[1:, 1].sum() - 19 * one.step_s
    assert out.stall_s == pytest.approx(expected, rel=0.02)


def test_more_workers_than_cpus_do_not_make_more_of_them():
    few = simulate(world(cpus=1), [1, 1])
    many = simulate(world(cpus=1), [8, 8])
    assert many.stall_s == pytest.approx(few.stall_s, rel=0.1)


def test_memory_is_hosts_files_and_buffers():
    out = simulate(world(per_actor=8), [1, 3])
    assert out.peak_bytes == 100 + 2 * 1 + 4 * 10


def test_new_workers_take_their_time():
    late = simulate(world(start_s=3.0), [1, 1], lambda step, workers: [1, 3])
    later = simulate(world(start_s=6.0), [1, 1], lambda step, workers: [1, 3])
    assert 0 < late.stall_s < later.stall_s
    assert late.events == 1


def test_the_curriculum_goes_from_text_to_images_and_back():
    shares = curriculum(200).shares
    assert shares.sum(axis=1) == pytest.approx(np.ones(200))
    text = shares[:, :19].sum(axis=1)
    assert text[0] > 0.9 and text[100] < 0.4 and text[-1] > 0.9
