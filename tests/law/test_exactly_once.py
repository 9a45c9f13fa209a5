"""Exactly once: over an epoch every sample of every source appears once across ranks, split or not."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from tests.conftest import write_ids

import overlord as ol
from overlord.testing import delivered_pieces


def _check_pieces(pieces, lengths):
    """Every sample once, and the pieces of a split one cover it without gap or overlap."""
    assert set(pieces) == set(lengths)
    for sample, parts in pieces.items():
        at = 0
        for offset, length in sorted(parts):
            assert offset == at, f"{sample} has a gap or overlap at token {at}"
            at += length
        assert at == lengths[sample]


def _corpus(tmp_path, spread):
    lengths, sources = {}, []
    for name, files in spread.items():
        for number, rows in enumerate(files):
            write_ids(tmp_path / name / f"{number}.jsonl", rows)
            for row, length in enumerate(rows):
                lengths[ol.SampleId(name, (number << 32) + row, 0)] = length
        sources.append(ol.Source(name, str(tmp_path / name), sample=ol.Text("ids", tokenized=True), shuffle_bytes=2000))
    return sources, lengths


SLOW = pytest.mark.slow_but_inline


@pytest.mark.parametrize("mesh", [pytest.param("dp=1", marks=SLOW), pytest.param("dp=4", marks=SLOW), "dp=3,cp=2"])
@pytest.mark.slow_on_ray
def test_one_epoch_delivers_every_sample_once(tmp_path, cache, where, mesh):
    spread = {"a": [[5, 70, 33], [1, 2, 3, 64]], "b": [list(range(1, 40))], "c": [[9] * 25]}
    sources, lengths = _corpus(tmp_path, spread)
    job = ol.Job(
        sources=sources,
        mixture=ol.Mixture(stopping="all_exhausted_without_replacement"),
        batch=ol.Batch(32, global_samples=7),
        overlength="split",
    )
    with ol.launch(job, mesh=ol.ClientPlaceTree.parse(mesh), **where, cache=cache) as service:
        _check_pieces(delivered_pieces(service), lengths)
        evaluation = job.evaluation()
    with ol.launch(evaluation, mesh=ol.ClientPlaceTree.parse(mesh), **where, cache=cache) as service:
        _check_pieces(delivered_pieces(service), lengths)


def test_evaluation_is_in_order_and_keeps_ranks_even(tmp_path, cache):
    sources, lengths = _corpus(tmp_path, {"a": [[4, 5, 6]], "b": [[7, 8]]})
    job = ol.Job(sources=sources, batch=ol.Batch(32, global_samples=2)).evaluation()
    with ol.launch(job, mesh=ol.ClientPlaceTree(dp=4), runtime="inline", cache=cache) as service:
        clients = [service.client(rank=rank) for rank in range(4)]
        steps = [list(client) for client in clients]
        assert [len(one) for one in steps] == [3, 3, 3, 3]
        drawn = [
            sorted(s for rank in range(4) for b in steps[rank][t].microbatches for s in b.meta.sample_ids if s.source)
            for t in range(3)
        ]
        counts = {tuple(len(step.microbatches) for step in one) for one in steps}
    assert [s for step in drawn for s in step] == sorted(lengths)
    assert len(counts) == 1


def test_whole_demo_epoch_with_images(mixed_job, cache):
    job = mixed_job.replace(
        mixture=ol.Mixture(stopping="all_exhausted_without_replacement"), batch=ol.Batch(4096, global_samples=64)
    )
    with ol.launch(job, mesh=ol.ClientPlaceTree(dp=2), runtime="local", cache=cache) as service:
        pieces = delivered_pieces(service)
        drawn = service.status()["sources"]
    found = Counter(sample.source for sample in pieces)
    assert {name: s["samples"] for name, s in drawn.items()} == dict(found)
    assert all(sample.epoch == 0 for sample in pieces)


@pytest.mark.parametrize(
    ("stopping", "repeat", "expected"),
    [
        ("first_exhausted", None, {"a": 4, "b": 4}),
        ("all_exhausted", None, {"a": 12, "b": 12}),
        ("all_exhausted_without_replacement", None, {"a": 4, "b": 12}),
        ("never_exhausted", 2, {"a": 8, "b": 24}),
    ],
)
def test_stopping_strategies(tmp_path, cache, stopping, repeat, expected):
    sources, _ = _corpus(tmp_path, {"a": [[3] * 4], "b": [[3] * 12]})
    job = ol.Job(
        sources=sources,
        mixture=ol.Mixture(stopping=stopping, max_repetition=repeat),
        batch=ol.Batch(32, global_samples=3),
    )
    with ol.launch(job, runtime="inline", cache=cache) as service:
        seen = Counter(s.source for step in service.client() for b in step.microbatches for s in b.meta.sample_ids)
    for name, count in expected.items():
        assert abs(seen[name] - count) <= 1, seen


def test_drop_last_leaves_the_short_step_out(tmp_path, cache):
    sources, _ = _corpus(tmp_path, {"a": [[3] * 10]})
    mixture = ol.Mixture(stopping="all_exhausted_without_replacement")
    for drop_last, steps in ((False, 4), (True, 3)):
        job = ol.Job(sources=sources, mixture=mixture, batch=ol.Batch(32, global_samples=3), drop_last=drop_last)
        with ol.launch(job, runtime="inline", cache=cache) as service:
            assert len(list(service.client())) == steps


def test_drop_last_keeps_a_last_step_that_is_full(tmp_path, cache):
    sources, lengths = _corpus(tmp_path, {"a": [[3] * 9]})
    for batch in (ol.Batch(9, global_samples=3), ol.Batch(9, global_tokens=9)):
        mixture = ol.Mixture(stopping="all_exhausted_without_replacement")
        job = ol.Job(sources=sources, mixture=mixture, batch=batch, drop_last=True)
        with ol.launch(job, runtime="inline", cache=cache) as service:
            _check_pieces(delivered_pieces(service), lengths)


def test_max_steps_ends_the_stream(ids_job, cache):
    with ol.launch(ids_job.replace(max_steps=3), runtime="inline", cache=cache) as service:
        client = service.client()
        assert [step.index for step in client] == [0, 1, 2]
        assert client.state_dict()["step"] == 3


def test_overlength_policies(tmp_path, cache):
    sources, _ = _corpus(tmp_path, {"a": [[10, 50, 20]]})
    mixture = ol.Mixture(stopping="all_exhausted_without_replacement")
    batch = ol.Batch(32, global_samples=3)

    def lengths(policy):
        job = ol.Job(sources=sources, mixture=mixture, batch=batch, overlength=policy)
        with ol.launch(job, runtime="inline", cache=cache) as service:
            pieces = delivered_pieces(service)
            return sorted(n for parts in pieces.values() for _, n in parts), service.status()["sources"]["a"]["skipped"]

    assert lengths("truncate") == ([10, 20, 32], 0)
    assert lengths("split") == ([10, 18, 20, 32], 0)
    assert lengths("drop") == ([10, 20], 1)
    with pytest.raises(ol.PlanError, match=r"sample a:0:1@0 has 50 tokens, more than context_length=32"):
        lengths("error")


def test_an_evaluation_takes_source_after_source_and_row_after_row(tmp_path, cache):
    sources = []
    for name in ("late", "early"):  # in the order of the job, not of their names
        for file in range(3):
            lengths = [1 + (7 * row + 3 * file) % 30 for row in range(20)]
            rows = "\n".join(json.dumps({"ids": [5] * length}) for length in lengths)
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{file}.jsonl").write_text(rows)
        sources.append(ol.Source(name, str(tmp_path / name), sample=ol.Text("ids", tokenized=True)))
    job = ol.Job(sources, batch=ol.Batch(64, global_samples=10)).evaluation()
    expected = [(name, file, row) for name in ("late", "early") for file in range(3) for row in range(20)]

    def steps_of(**options) -> list[list[tuple[str, int, int]]]:
        with ol.launch(job, runtime="inline", cache=cache, **options) as service:
            ids = [[id for batch in step.microbatches for id in batch.meta.sample_ids] for step in service.client()]
        return [[(one.source, one.file, one.row_in_file) for one in step] for step in ids]

    plain = [sample for step in steps_of(strategy="vanilla") for sample in step]
    assert plain == expected, "on one rank without balancing samples are in order inside steps too"
    balanced = steps_of()
    assert [set(step) for step in balanced] == [set(expected[at : at + 10]) for at in range(0, 120, 10)]
