"""The forecast of epochs meets the real draw, for every kind of mixture."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from tests.counted_loaders import CountedLoaders, drawer_of, job_of, steps_of

import overlord as ol
from overlord.planning.exhaustion import EPOCHS, MOST_STEPS, Course, SourceSize, forecast

ROWS = {"a": 9000, "b": 700, "c": 333}
BATCH = ol.Batch(64, global_samples=40)
WEIGHTS = {"a": 6, "b": 3, "c": 1}

MIXTURES: dict[str, ol.Mixture] = {
    "static": ol.Mixture(WEIGHTS),
    "equal": ol.Mixture(),
    "tempered": ol.Mixture(WEIGHTS, temperature=3),
    "stages": ol.Mixture.stages([(0, {"a": 1}), (100, {"a": 1, "b": 1}), (400, {"b": 1, "c": 2})]),
    "linear": ol.Mixture.linear({"a": {0: 1, 600: 0.1}, "b": {0: 0.2, 200: 0, 900: 1}, "c": {0: 0.1}}),
    "linear_substep": ol.Mixture.linear({"a": {0: 1, 40: 0}, "b": {0: 0, 40: 1}, "c": {0: 0.1}}, granularity="substep"),
    "step": ol.Mixture.step({"a": {0: 1, 300: 0.2}, "b": {150.5: 1, 800: 0.1}, "c": {0: 0.3}}),
    "max_repetition": ol.Mixture(WEIGHTS, max_repetition=4),
    "once": ol.Mixture(WEIGHTS, stopping="all_exhausted_without_replacement"),
    "first": ol.Mixture(WEIGHTS, stopping="first_exhausted"),
    "all": ol.Mixture(WEIGHTS, stopping="all_exhausted"),
    "sequential": ol.Mixture(order="sequential", stopping="all_exhausted_without_replacement"),
    "stages_once": ol.Mixture.stages(
        [(0, {"b": 1}), (500, {"a": 1, "c": 1})], stopping="all_exhausted_without_replacement"
    ),
    "epoch": ol.Mixture.stages([(0, {"b": 1, "c": 1}), (2, {"a": 1, "c": 1})], unit="epoch"),
    "epoch_of": ol.Mixture.stages([(0, {"b": 1, "c": 1}), (3, {"a": 1, "b": 1})], unit="epoch:c"),
    "repetition": ol.Mixture(WEIGHTS, learn="repetition"),
    "steep_repetition": ol.Mixture(WEIGHTS, learn=ol.Learn("repetition", decay_epochs=1)),
    "repetition_and_stages": ol.Mixture.stages([(0, {"a": 1, "b": 1}), (200, WEIGHTS)], learn="repetition"),
    "repetition_limited": ol.Mixture(WEIGHTS, learn="repetition", max_repetition=5),
}


def course_of(job: ol.Job, **options: Any) -> Course:
    base = dict.fromkeys(job.names, 1.0)
    return Course(mixture=job.mixture, batch=job.batch, names=job.names, base=base, **options)


def drawn(job: ol.Job, rows: dict[str, int], steps: int, folder, **loaders: Any) -> dict[str, dict[str, Any]]:
    """Draw, and return of each source at which step its epochs begin, when its last row came, and the passes."""
    sources: dict[str, dict[str, Any]] = {name: {"begins": {}, "last": None} for name in rows}
    drawer = drawer_of(job, CountedLoaders(list(rows.values()), **loaders), folder)
    for step in steps_of(drawer, steps):
        draw = step.draw
        for number, name in enumerate(rows):
            epochs = draw.meta["epoch"][draw.source == number]
            for epoch in EPOCHS:
                if (epochs >= epoch - 1).any():
                    sources[name]["begins"].setdefault(epoch, draw.step)
            if len(epochs):
                sources[name]["last"] = draw.step
    for number, name in enumerate(rows):
        state = drawer.state
        sources[name]["epochs"] = (int(state.samples[number]) + int(state.skipped[number])) / rows[name]
        sources[name]["finished"] = bool(state.finished[number])
    return sources


def is_near(forecast_step: int, real: int, share: float = 0.005) -> bool:
    return abs(forecast_step - real) <= max(1, share * real)


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_forecast_meets_the_draw(kind, tmp_path):
    job, steps = job_of(list(ROWS), MIXTURES[kind], BATCH), 1000
    real = drawn(job, ROWS, steps, tmp_path)
    sources = forecast(course_of(job), [SourceSize(rows) for rows in ROWS.values()], steps=steps, most_steps=steps)
    assert [source.name for source in sources] == list(ROWS) and all(source.exact for source in sources)
    assert any(seen["begins"] or seen["finished"] for seen in real.values())
    leaving = {name for name, seen in real.items() if seen["finished"]}
    read_up = {source.name for source in sources if source.read_up is not None}
    assert read_up == ({"b"} if kind == "first" else set() if kind == "all" else leaving)
    for source in sources:
        begins = real[source.name]["begins"]
        late = {epoch for epoch in source.begins.keys() ^ begins.keys() if (source.begins | begins)[epoch] < steps - 20}
        assert not late, (kind, source, begins)
        for epoch, step in begins.items():
            assert epoch not in source.begins or is_near(source.begins[epoch], step), (kind, source, begins)
        assert source.epochs == pytest.approx(real[source.name]["epochs"], rel=0.01, abs=3 / ROWS[source.name])
        if source.read_up is not None:
            assert is_near(source.read_up, real[source.name]["last"]), (kind, source, real[source.name])


def test_filters_and_lengths_are_in_it(tmp_path):
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 60, rows) for rows in ROWS.values()]
    lengths[1] = rng.integers(200, 900, ROWS["b"])
    real_share = 1 - math.ceil(ROWS["c"] / 3) / ROWS["c"]
    whole = [True, True, np.arange(ROWS["c"]) % 3 != 0]
    means = [float(column[keep].mean()) for column, keep in zip(lengths, whole, strict=True)]
    for level in ("sample", "token"):
        job = job_of(list(ROWS), ol.Mixture(WEIGHTS, level=level), ol.Batch(1024, global_tokens=16384), max_steps=2000)
        drawer = drawer_of(job, CountedLoaders(list(ROWS.values()), lengths=lengths, skips={2: 3}), tmp_path)
        real: dict[tuple[str, int], int] = {}
        tokens = 0
        for step in steps_of(drawer, 2000):
            tokens += int(step.draw.meta["tokens"].sum())
            for number, name in enumerate(ROWS):
                epochs = step.draw.meta["epoch"][step.draw.source == number]
                for epoch in EPOCHS:
                    if (epochs >= epoch - 1).any():
                        real.setdefault((name, epoch), step.draw.step)
        sizes = [SourceSize(ROWS["a"], means[0]), SourceSize(ROWS["b"], means[1])]
        sizes.append(SourceSize(ROWS["c"], means[2], real_share))
        course = course_of(job, filled=tokens / 2000 / 16384)
        ahead = forecast(course, sizes, steps=2000)
        begins = {(source.name, epoch): at for source in ahead for epoch, at in source.begins.items()}
        assert len(real) >= 4 and not any(source.exact for source in ahead)
        assert all(is_near(begins[key], at) for key, at in real.items()), (level, begins, real)


def test_what_is_not_known_or_never_comes_is_left_out():
    job = job_of(["a", "b", "c"], ol.Mixture({"a": 1, "b": 1}), BATCH)
    a, b, c = forecast(course_of(job), [SourceSize(None), SourceSize(1e12), SourceSize(5)], steps=100)
    assert (a.begins, a.epochs, b.begins, c.begins, c.epochs) == ({}, None, {}, {}, 0.0)
    assert b.epochs == pytest.approx(2000 / 1e12)
    assert not a.exact and b.exact
    constant = forecast(course_of(job, constant=[0, 0, 1]), [SourceSize(5)] * 3, steps=100)
    assert constant[2].begins and not constant[0].begins and not constant[2].exact
    assert not forecast(course_of(job), [SourceSize(800, exact=False)] * 3, steps=100)[0].exact


def test_a_run_that_ends_before_an_epoch_begins_does_not_name_it():
    job = job_of(["a"], ol.Mixture(), ol.Batch(64, global_samples=10))
    (source,) = forecast(course_of(job), [SourceSize(100)], steps=1000, most_steps=31)
    assert source.begins == {2: 10, 4: 30} and source.epochs == 3.1
    (source,) = forecast(course_of(job), [SourceSize(100)], steps=30, most_steps=30)
    assert source.begins == {2: 10}


def test_hundreds_of_sources_and_a_million_steps_take_a_moment():
    rng = np.random.default_rng(0)
    names = [f"s{number:03}" for number in range(306)]
    weights = dict(zip(names, rng.lognormal(0, 1.5, 306).tolist(), strict=True))
    sizes = [SourceSize(float(rows)) for rows in rng.integers(1000, 10**8, 306)]
    for mixture in (ol.Mixture(weights), ol.Mixture(weights, learn="repetition")):
        job = job_of(names, mixture, ol.Batch(8192, global_samples=4096))
        began = time.process_time()
        sources = forecast(course_of(job), sizes, steps=10_000)
        assert time.process_time() - began < 20
        assert any(source.begins.get(16, 0) > 0.5 * MOST_STEPS for source in sources)
