"""Mixtures end to end: schedules, levels, temperature; realised shares from what ranks really got."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.conftest import status_at, write_ids

import overlord as ol
from overlord.testing import assert_resumes_anywhere


def make(tmp_path, mixture, lengths, batch, weights=None):
    rng = np.random.default_rng(0)
    sources = []
    for name, mean in lengths.items():
        path = write_ids(tmp_path / f"{name}.jsonl", rng.integers(mean // 2 + 1, mean * 3 // 2 + 2, 400))
        weight = None if weights is None else weights[name]
        sources.append(ol.Source(name, str(path), sample=ol.Text("ids", tokenized=True), weight=weight))
    return ol.Job(sources=sources, mixture=mixture, batch=batch)


def shares(job, cache, steps, first=0):
    """Return the (samples, tokens) of each source in some steps."""
    samples, tokens = Counter(), Counter()
    with ol.launch(job, runtime="inline", cache=cache) as service:
        for step in service.client():
            if step.index >= first:
                for batch in step.microbatches:
                    meta = batch.meta
                    for source, length in zip(meta.source_ids, meta.segment_lengths, strict=True):
                        samples[meta.source_names[source]] += 1
                        tokens[meta.source_names[source]] += int(length)
            if step.index == first + steps - 1:
                return samples, tokens
    return None


def test_by_sample_and_by_token(tmp_path, cache):
    lengths, batch = {"long": 100, "short": 10}, ol.Batch(256, global_samples=40)
    for level, counted in (("sample", 0), ("token", 1)):
        job = make(tmp_path, ol.Mixture({"long": 1, "short": 3}, level=level), lengths, batch)
        found = shares(job, cache, 30)[counted]
        unit = 1 if level == "sample" else 152
        assert abs(found["long"] - sum(found.values()) / 4) <= unit


def test_stages_change_at_their_step(tmp_path, cache):
    mixture = ol.Mixture.stages([(0, {"a": 1}), (4, {"a": 1, "b": 3})])
    job = make(tmp_path, mixture, {"a": 5, "b": 5}, ol.Batch(64, global_samples=20))
    assert shares(job, cache, 4)[0] == {"a": 80}
    assert shares(job, cache, 4, first=4)[0] == {"a": 20, "b": 60}


SCHEDULES = {
    "stages": lambda **how: ol.Mixture.stages([(0, {"a": 1}), (10, {"b": 1}), (20, {"a": 1, "c": 2})], **how),
    "linear": lambda **how: ol.Mixture.linear(
        {"a": {0: 1, 9: 0}, "b": {0: 0, 9: 0, 10: 1}, "c": {0: 0, 10: 0.1}}, **how
    ),
    "step": lambda **how: ol.Mixture.step({"a": {0: 1, 10: 0}, "b": {10: 1, 20: 0}, "c": {20: 1}}, **how),
}


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ({"stopping": "all_exhausted_without_replacement"}, 1),
        ({"max_repetition": 2}, 2),
        ({"stopping": "all_exhausted"}, None),
    ],
    ids=["without_replacement", "max_repetition", "all_exhausted"],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_that_is_read_up_early_makes_room_for_the_next(tmp_path, cache, schedule, how, times):
    """Stages of 10 steps of 8 samples, and sources of 20 to 30 rows: the stream must not end with the first stage."""
    rows = {"a": 30, "b": 21, "c": 10}
    sources = [
        ol.Source(
            name, str(write_ids(tmp_path / f"{name}.jsonl", range(1, count + 1))), sample=ol.Text("ids", tokenized=True)
        )
        for name, count in rows.items()
    ]
    if schedule == "linear":
        how = how | {"granularity": "substep"}
    job = ol.Job(sources, SCHEDULES[schedule](**how), batch=ol.Batch(64, global_samples=8))
    seen: list[list[str]] = []
    with ol.launch(job, runtime="inline", cache=cache) as service:
        for step in service.client():
            seen.append([s.source for batch in step.microbatches for s in batch.meta.sample_ids])
    found = Counter(name for step in seen for name in step)
    if times is None:
        assert all(found[name] >= count for name, count in rows.items())
        assert len(seen) > 10
    else:
        assert found == {name: times * count for name, count in rows.items()}
        assert all(len(step) == 8 for step in seen[:-1])
        first = {name: next(i for i, step in enumerate(seen) if name in step) for name in rows}
        assert first["a"] == 0 < first["b"]
        assert schedule == "linear" or first["b"] <= first["c"]
    if schedule == "stages":
        assert_resumes_anywhere(job, steps=len(seen), cache=cache)


def test_linear_and_step_schedules(tmp_path, cache):
    linear = ol.Mixture.linear({"a": {0: 1.0, 10: 0.0}, "b": {0: 0.0, 10: 1.0}})
    job = make(tmp_path, linear, {"a": 5, "b": 5}, ol.Batch(64, global_samples=20))
    assert abs(shares(job, cache, 11)[0]["a"] - 110) <= 2
    stepped = ol.Mixture.step({"a": {0: 1.0}, "b": {0: 0.0, 2: 1.0}})
    job = make(tmp_path, stepped, {"a": 5, "b": 5}, ol.Batch(64, global_samples=20))
    assert shares(job, cache, 2)[0] == {"a": 40}
    assert shares(job, cache, 2, first=2)[0] == {"a": 20, "b": 20}


@pytest.mark.parametrize("unit", ["epoch", "epoch:a"])
def test_stages_by_epoch_change_when_an_epoch_has_ended(tmp_path, cache, unit):
    text = ol.Text("ids", tokenized=True)
    rows = {"a": 60, "b": 90}
    files = {name: write_ids(tmp_path / f"{name}.jsonl", np.full(count, 5)) for name, count in rows.items()}
    job = ol.Job(
        sources=[ol.Source(name, str(path), sample=text) for name, path in files.items()],
        mixture=ol.Mixture.stages([(0, {"a": 1}), (1, {"a": 1, "b": 1}), (2, {"b": 1})], unit=unit),
        batch=ol.Batch(64, global_samples=10),
    )
    with ol.launch(job, runtime="inline", cache=cache) as service:
        draws = [service.plan_raw(step).draw for step in range(40)]
    drawn = [tuple(np.bincount(draw.source, minlength=2).tolist()) for draw in draws]
    both = drawn.index((5, 5))
    last = drawn.index((0, 10))
    assert both in (6, 7) and drawn[:both] == [(10, 0)] * both, "a has 60 rows, and its epoch ends with the sixth step"
    assert set(drawn[both:last]) == {(5, 5)} and set(drawn[last:]) == {(0, 10)}
    read = np.sum(drawn[:last], axis=0)
    # The second epoch of the whole also waits until b was read once: 90 rows, five a step.
    assert 120 <= read[0] < 130 if unit == "epoch:a" else 90 <= read[1] < 100
    assert_resumes_anywhere(job, cache=cache, steps=last + 3)


def test_a_source_that_comes_later_does_not_take_a_schedule_in_epochs_back(tmp_path, cache):
    text = ol.Text("ids", tokenized=True)
    files = {name: str(write_ids(tmp_path / f"{name}.jsonl", np.full(20, 5))) for name in "abc"}
    job = ol.Job(
        sources=[ol.Source(name, files[name], sample=text) for name in "ab"],
        mixture=ol.Mixture.stages([(0, {"a": 1}), (2, {"a": 1, "b": 1})], unit="epoch"),
        batch=ol.Batch(64, global_samples=10),
    )
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        for _ in range(8):
            next(client)
        at = service.add_source(ol.Source("c", files["c"], sample=text), weight=1)
        drawn = [np.bincount(service.plan_raw(step).draw.source, minlength=3) for step in range(8, at + 4)]
    assert all(counts[1] >= 3 for counts in drawn), "b has its weight from the second epoch of a on"
    assert drawn[-1][2] >= 3


def test_substeps_follow_the_schedule_inside_a_step(tmp_path, cache):
    schedule = [(0, {"a": 1}), (0.5, {"b": 1})]
    for granularity, expected in (("step", {"a": 64}), ("substep", {"a": 32, "b": 32})):
        mixture = ol.Mixture.stages(schedule, granularity=granularity)
        job = make(tmp_path, mixture, {"a": 5, "b": 5}, ol.Batch(64, global_samples=64))
        assert shares(job, cache, 1)[0] == expected


def test_weights_beside_their_sources_and_temperature(tmp_path, cache):
    lengths, batch = {"a": 5, "b": 5}, ol.Batch(64, global_samples=50)
    job = make(tmp_path, None, lengths, batch, weights={"a": 9, "b": 1})
    assert shares(job, cache, 2)[0] == {"a": 90, "b": 10}
    warm = make(tmp_path, ol.Mixture(temperature=2.0), lengths, batch, weights={"a": 9, "b": 1})
    assert shares(warm, cache, 2)[0] == {"a": 75, "b": 25}


def test_temperature_without_weights_goes_by_size(tmp_path, cache):
    job = make(tmp_path, ol.Mixture(temperature=1.0), {"big": 60, "small": 6}, ol.Batch(128, global_samples=100))
    found = shares(job, cache, 2)[0]
    assert found["big"] > 4 * found["small"]


def test_a_source_of_weight_zero_is_never_opened(tmp_path, cache):
    job = make(tmp_path, ol.Mixture({"a": 1, "b": 0}), {"a": 5, "b": 5}, ol.Batch(64, global_samples=10))
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        for _ in range(5):
            next(client)
        assert service.status()["sources"]["b"]["buffer_bytes"] == 0


@pytest.mark.slow_on_ray
@pytest.mark.slow_but_inline
def test_status_shows_planned_and_realised_shares(ids_job, cache, where):
    with ol.launch(ids_job, **where, cache=cache) as service:
        client = service.client()
        for _ in range(6):
            next(client)
        status = status_at(service, 5)
    assert status["clients"] == {"0": 5}
    for name, planned in (("a", 3 / 6), ("b", 1 / 6), ("c", 2 / 6)):
        source = status["sources"][name]
        assert source["planned_share"] == pytest.approx(planned)
        assert source["realised_share"] == pytest.approx(planned, abs=0.03)
