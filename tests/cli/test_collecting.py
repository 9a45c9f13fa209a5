"""Counting steps: pieces of split samples, dummies, shares, the round-robin baseline, and long runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from overlord.cli import collecting
from overlord.cli.collecting import Collector, Segments
from overlord.core.plan import chain_digest
from overlord.core.specs import Batch, Job, Mixture, Source, Text
from overlord.planning.strategies import Limits
from overlord.roles.views import BatchMeta, Microbatches, Step, StepHeader

NAMES = ("a", "b")
LIMITS = Limits(num_buckets=2, context_length=8, microbatch_tokens=16, microbatches=None, pad_multiple=4)


def meta(*segments: tuple[int, int, int, int]) -> BatchMeta:
    """Return the provenance of (source, row, offset, length) segments, padded to multiples of 4."""
    source, row, offset, length = (np.array(column, np.int32) for column in zip(*segments, strict=True))
    columns = {
        "source": source,
        "row": row.astype(np.int64),
        "epoch": np.zeros_like(source),
        "segment_offsets": offset,
        "segment_lengths": length,
    }
    padded = np.maximum(-(-length // 4) * 4, 4)
    return BatchMeta(NAMES, columns, np.concatenate([[0], np.cumsum(padded)]).astype(np.int32))


def step(index: int) -> Step:
    header = StepHeader(index, 1, 9, 12, 3, f"order{index}", f"plan{index}")
    return Step(header, Microbatches(None, 0))


def collector(**mixture: Any) -> Collector:
    sources = [Source(name, "x.jsonl", sample=Text("ids", tokenized=True)) for name in NAMES]
    job = Job(sources, mixture=Mixture(**mixture), batch=Batch(8, global_samples=3))
    return Collector(job, NAMES, LIMITS, [0.5, 0.5])


SPLIT = [[meta((0, 1, 0, 8), (1, 5, 0, 3))], [meta((0, 1, 8, 2))]]
DUMMY = [[meta((0, 2, 0, 4))], [meta((-1, -1, 0, 0))]]


def test_pieces_of_one_sample_are_one_sample() -> None:
    found = Segments.of(SPLIT)
    draw = found.samples(0, NAMES)
    assert sorted(zip(draw.source.tolist(), draw.meta["tokens"].tolist(), strict=True)) == [(0, 10), (1, 3)]
    assert found.positions == 16


def test_dummies_are_padding_and_no_samples() -> None:
    one = collector()
    one.add(step(0), DUMMY, 0.1)
    assert one.samples.tolist() == [1, 0]
    assert (int(one.tokens.sum()), one.positions) == (4, 8)
    assert one.imbalance[0] == 2.0  # one of two ranks does all the work


@pytest.mark.parametrize(("level", "realised"), [("sample", [2 / 3, 1 / 3]), ("token", [14 / 17, 3 / 17])])
def test_shares_are_counted_as_the_mixture_counts(level: str, realised: list[float]) -> None:
    one = collector(level=level)
    one.add(step(0), SPLIT, 0.1)
    one.add(step(1), DUMMY, 0.2)
    assert one.realised == pytest.approx(realised)
    assert one.planned == [0.5, 0.5]
    assert one.digests["plan"] == chain_digest(["plan0", "plan1"])
    every, steps, planned, shares = one.per_step()
    assert (every, [s.tokens for s in steps], [s.wait_s for s in steps]) == (1, [13, 4], [0.1, 0.2])
    assert planned[1] == {"a": 0.5, "b": 0.5}
    assert shares[1] == {"a": 1.0, "b": 0.0}


def test_the_order_of_the_baseline_does_not_depend_on_where_samples_went() -> None:
    swapped = [[SPLIT[1][0]], [SPLIT[0][0]]]
    ours, theirs = (Segments.of(metas).samples(3, NAMES) for metas in (SPLIT, swapped))
    assert ours.meta["row"].tolist() == theirs.meta["row"].tolist()


def test_the_planned_share_follows_the_schedule() -> None:
    one = collector(stages=[(0, {"a": 3, "b": 1}), (1, {"b": 2})])
    for index in range(2):
        one.add(step(index), DUMMY, 0.1)
    assert one.planned == pytest.approx([3 / 8, 5 / 8])


def test_long_runs_are_thinned_and_keep_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MOST_POINTS", 4)
    one = collector()
    for index in range(21):
        one.add(step(index), SPLIT if index % 2 else DUMMY, index / 10)
    every, steps, planned, _ = one.per_step()
    assert every == 4
    assert [s.index for s in steps] == [0, 4, 8, 12, 16, 20]
    assert [s.wait_s for s in steps] == pytest.approx([0.3, 0.7, 1.1, 1.5, 1.9, 2.0])
    assert len(planned) == len(steps)
    assert one.steps == 21
    assert int(one.samples.sum()) == 11 + 2 * 10
    assert one.typical_load() is not None


def test_nothing_delivered_is_no_error() -> None:
    one = collector()
    assert one.imbalance == (1.0, 1.0)
    assert one.realised == [0.0, 0.0]
    assert one.histogram == []
    assert one.typical_load() is None
