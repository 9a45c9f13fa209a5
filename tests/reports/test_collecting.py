"""Counting steps by their plans: split samples, dummies, shares, the round-robin baseline, and long runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import overlord as ol
from overlord.core.draw import Buffer, Draw, Limits
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, chain_digest
from overlord.core.samples import META
from overlord.job.specs import Batch, Job, Mixture, Source, Text
from overlord.planning.balancing.evenness import (
    encoder_loads,
    in_lockstep,
    over_ranks,
    positions,
    rank_loads,
    runs_free,
    step_time,
)
from overlord.planning.checking import Strategy, run_strategy
from overlord.reports import collecting
from overlord.reports.collecting import Collector

NAMES = ("a", "b")
LIMITS = Limits(context_length=8, microbatch_tokens=16)
TREE = ClientPlaceTree(dp=2, cp=2)


def plan_of(
    lengths: list[tuple[int, int]],
    step: int = 0,
    strategy: Strategy | None = None,
    weights: tuple[float, float] = (0.5, 0.5),
    tree: ClientPlaceTree = TREE,
) -> LoadingPlan:
    """Return a plan of (source, tokens) samples."""
    source = np.array([s for s, _ in lengths], np.int32)
    meta = np.zeros(len(lengths), META)
    meta["tokens"] = [n for _, n in lengths]
    meta["loss_tokens"] = meta["tokens"] - 1
    meta["row"] = np.arange(len(lengths))
    return run_strategy(
        strategy or ol.strategies.vanilla(), Buffer(Draw(step, NAMES, source, meta, weights), LIMITS), tree
    )


def collector(**mixture: Any) -> Collector:
    sources = [Source(name, "x.jsonl", sample=Text("ids", tokenized=True)) for name in NAMES]
    job = Job(sources, mixture=Mixture(**mixture), batch=Batch(8, global_samples=3))
    return Collector(job, NAMES, LIMITS, TREE)


SPLIT = [(0, 10), (1, 3)]
"""The first sample becomes two pieces."""
LONELY = [(0, 4)]


def test_pieces_of_one_sample_are_one_sample() -> None:
    one = collector()
    one.add(plan_of(SPLIT), 0.1)
    assert one.samples.tolist() == [1, 1]
    assert one.tokens.tolist() == [10, 3]
    assert one.positions == 8 + 4 + 4  # pieces of 8, 2 and 3 tokens, padded to multiples of 2 * cp


def test_dummies_are_padding_and_no_samples() -> None:
    one = collector()
    one.add(plan_of(LONELY), 0.1)
    assert one.samples.tolist() == [1, 0]
    assert (int(one.tokens.sum()), one.positions) == (4, 8)
    assert one.imbalance[0] == 2.0  # one of two ranks does all the work


@pytest.mark.parametrize(("level", "realised"), [("sample", [2 / 3, 1 / 3]), ("token", [14 / 17, 3 / 17])])
def test_shares_are_counted_as_the_mixture_counts(level: str, realised: list[float]) -> None:
    one, plans = collector(level=level), [plan_of(SPLIT), plan_of(LONELY, 1)]
    for plan, wait_s in zip(plans, (0.1, 0.2), strict=True):
        one.add(plan, wait_s)
    assert one.realised == pytest.approx(realised)
    assert one.planned == [0.5, 0.5]
    assert one.digests["plan"] == chain_digest([plan.digest for plan in plans])
    every, steps, planned, shares = one.per_step()
    assert (every, [s.tokens for s in steps], [s.wait_s for s in steps]) == (1, [13, 4], [0.1, 0.2])
    assert planned[1] == {"a": 0.5, "b": 0.5}
    assert shares[1] == {"a": 1.0, "b": 0.0}


def test_the_planned_share_follows_the_weights_of_the_steps() -> None:
    one = collector()
    for index, weights in enumerate([(3.0, 1.0), (0.0, 2.0)]):
        one.add(plan_of(LONELY, index, weights=weights), 0.1)
    assert one.planned == pytest.approx([3 / 8, 5 / 8])


def test_the_baseline_deals_samples_as_they_were_drawn() -> None:
    one = collector()
    step = one.add(plan_of([(0, 8), (0, 1), (0, 8), (0, 1)], strategy=ol.strategies.backbone_balance()))
    assert step.dealt.pieces.sample.tolist() == [0, 2, 1, 3]
    ours, theirs = one.imbalance
    assert ours == 1.0 < theirs


def test_ranks_of_their_own_are_counted_by_rank() -> None:
    plan = plan_of([(0, 8), (0, 2), (1, 2), (1, 2)], strategy=ol.strategies.hdp(ol.costs.tokens))
    assert (plan.axis, plan.num_buckets) == ("CP", 4)
    one = collector()
    one.add(plan)
    assert one.tokens.tolist() == [10, 4]
    load = one.typical_load()
    assert load is not None
    assert (len(load.overlord), len(load.round_robin), load.axis) == (4, 4, "CP")
    assert rank_loads(plan, TREE, ol.costs.tokens).sum() == positions(plan) == 14


def test_a_long_sequence_counts_on_every_rank_that_shares_it() -> None:
    tight = dataclasses.replace(LIMITS, microbatch_tokens=8)
    whole = plan_of([(0, 8)])
    plan = run_strategy(ol.strategies.hdp(ol.costs.tokens), Buffer(whole.draw, tight), TREE)
    assert sorted(rank_loads(plan, TREE, ol.costs.tokens).sum(axis=1).tolist()) == [0, 0, 4, 4]
    assert rank_loads(whole, TREE, ol.costs.tokens).sum(axis=1).tolist() == [4, 0]  # two ranks bear 4 each
    assert runs_free(plan) == (len(set(plan.microbatch_counts.tolist())) > 1)


def test_what_loads_mean_for_a_step() -> None:
    loads = np.array([[3.0, 1.0], [2.0, 2.0]])
    assert over_ranks(loads) == 1.0
    assert in_lockstep(loads) == 5 / 4
    assert step_time(loads, per_microbatch=1.0) == 7.0
    assert step_time(loads, free=True) == 4.0
    assert step_time(loads, stages=3) == 10.0
    assert step_time(np.zeros((0, 0))) == 0.0


def test_images_are_encoded_where_their_tokens_are_unless_planned() -> None:
    plan = plan_of([(0, 8), (1, 8), (0, 8), (1, 8)])
    plan.draw.meta.flags.writeable = True
    plan.draw.meta["images"], plan.draw.meta["image_tokens"] = 1, [4, 0, 4, 0]
    cost = ol.costs.tokens
    assert encoder_loads(plan, TREE, cost, 4).tolist() == [32, 0, 0, 0]
    hybrid = run_strategy(ol.strategies.vlm_hybrid(cost, cost), Buffer(plan.draw, LIMITS), TREE)
    assert sorted(encoder_loads(hybrid, TREE, cost, 4).tolist()) == [0, 0, 16, 16]


def test_long_runs_are_thinned_and_keep_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "MOST_POINTS", 4)
    one = collector()
    for index in range(21):
        one.add(plan_of(SPLIT if index % 2 else LONELY, index), index / 10)
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
