"""Cost models: exact integers, known constants, fits, and what users' functions may return."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.planning import costs
from overlord.planning.balancing.balance import balance
from overlord.planning.costs import CostModel, Offload, as_costs

MODELS = [
    costs.tokens,
    costs.quadratic,
    costs.llama_12b,
    costs.vit_2b,
    costs.causal_lm(32, 4096),
    costs.causal_lm(32, 4096, window=4096),
    costs.causal_lm(32, 4096, window=1024, full_layers=6),
    costs.moe(32, 4096, experts=8, top_k=2, expert_ffn=14336),
    costs.vit(48, 1664, patches_per_token=4),
]
segments = st.lists(st.integers(0, costs.MAX_SEGMENT), max_size=30)


def test_the_papers_example():
    assert costs.quadratic([30, 70]).sum() == 5800
    assert costs.quadratic([50, 50]).sum() == 5000
    assert costs.tokens([30, 70]).tolist() == [30, 70]


def test_kappa_of_known_shapes():
    assert costs.causal_lm(layers=32, hidden=4096).kappa == 49152
    assert costs.causal_lm(45, 4608, heads=36, ffn=12288).kappa == 55296
    assert costs.vit(48, 1664, heads=16, mlp=8192).kappa == 11520
    assert costs.causal_lm(32, 4096, gated=False, ffn=4 * 4096).kappa == 49152
    assert costs.causal_lm(32, 4096, attn_scale=2.0).kappa == 24576
    assert costs.llama_12b.kappa == pytest.approx(25_400, rel=1e-3)
    assert costs.vit_2b.kappa == pytest.approx(4_700, rel=1e-2)
    assert CostModel(5.128e-6, 0.18396, 629.36).kappa == pytest.approx(35_900, rel=1e-3)


def test_parts_of_a_shape_count():
    plain = costs.causal_lm(32, 4096, heads=32)
    grouped = costs.causal_lm(32, 4096, heads=32, kv_heads=8)
    assert plain.beta - grouped.beta == 6 * 32 * 2 * 4096 * (4096 - 1024)
    assert costs.causal_lm(32, 4096, vocab=32000).beta - costs.causal_lm(32, 4096).beta == 6 * 32000 * 4096
    assert costs.causal_lm(32, 4096, heads=32, head_dim=64).alpha == plain.alpha / 2
    again = costs.causal_lm(32, 4096, recompute=True)
    assert again.alpha == pytest.approx(plain.alpha * 4 / 3) and again.kappa == pytest.approx(plain.kappa)
    frozen = costs.vit(24, 1024, frozen=True)
    assert frozen.beta == pytest.approx(costs.vit(24, 1024).beta / 3)
    assert frozen([100]).tolist() == costs.vit(24, 1024)([100]).tolist()
    assert costs.vit(24, 1024, patches_per_token=4).microbatch_time([100]) == costs.vit(24, 1024).microbatch_time([400])


def test_linear_attention_costs_tokens_only():
    linear = costs.causal_lm(32, 4096, full_layers=0)
    assert linear.alpha == 0 and linear.kappa == math.inf
    assert linear([7, 100]).tolist() == [7, 100]
    hybrid = costs.causal_lm(32, 4096, full_layers=8)
    assert hybrid.kappa == 4 * 49152


@given(st.integers(0, 300), st.integers(1, 300))
def test_windowed_pairs_are_counted(length, window):
    pairs = sum(min(i + 1, window) for i in range(length))
    assert costs.attention_pairs([length], window).tolist() == [pairs]
    assert CostModel(1.0, 0.0, window=window)([length]).tolist() == [2 * pairs - length]


def test_a_window_longer_than_every_segment_changes_nothing():
    assert (costs.causal_lm(32, 4096, window=8192)([8192, 5]) == costs.causal_lm(32, 4096)([8192, 5])).all()


@given(st.sampled_from(MODELS), segments)
def test_costs_follow_time_and_never_overflow(model, lengths):
    found = model(np.array(lengths, np.int32))
    assert found.dtype == np.int64 and (found >= 0).all()
    exact = sum(int(c) for c in found)
    assert exact == int(found.sum()) < 2**62
    time = model.microbatch_time(lengths) - model.gamma
    assert exact * model.quantum == pytest.approx(time, rel=2e-3)


@given(st.sampled_from(MODELS))
def test_the_largest_step_does_not_overflow(model):
    lengths = np.full(costs.MAX_TOKENS // costs.MAX_SEGMENT, costs.MAX_SEGMENT)
    found = model(lengths)
    assert sum(found.tolist()) == int(found.sum()) < 2**62


def test_costs_turn_back_into_time():
    model = costs.llama_12b
    lengths = [8192, 100]
    whole = int(model(lengths).sum()) + model.per_microbatch
    assert model.milliseconds(whole) == pytest.approx(model.microbatch_time(lengths), rel=1e-4)
    assert model.seconds(whole) == model.milliseconds(whole) / 1000
    assert model.microbatch_time([]) == model.gamma
    with pytest.raises(SpecError, match="is in flops, not in milliseconds"):
        costs.causal_lm(32, 4096).seconds(1)


def test_almost_no_attention_is_linear():
    model = CostModel(1e-18, 1e-3, 1.0)
    assert model([10, 20]).tolist() == [10, 20] and model.per_microbatch == 1000


@pytest.mark.parametrize("scale", [1, 1000])
def test_scale_keeps_fractions(scale):
    model = CostModel(1.0, 0.5, scale=scale)
    assert model([3]).tolist() == [9 * scale + round(0.5 * scale) * 3]


@given(st.floats(1e-9, 1e-5), st.sampled_from([0.0, 1e-4, 3e-3]), st.sampled_from([0.0, 0.2]), st.floats(-0.005, 0.005))
def test_fit_finds_planted_constants(alpha, beta, gamma, noise):
    packings = [[t // n] * n for t in (4096, 8192, 32768) for n in (1, 2, 16)]
    times = [alpha * sum(s * s for s in p) + beta * sum(p) + gamma for p in packings]
    exact = costs.fit(zip(packings, times, strict=True))
    assert exact.residual < 1e-5
    assert exact.alpha == pytest.approx(alpha, rel=1e-4)
    # beta and gamma are compared where they matter: in the time of a microbatch.
    assert exact.microbatch_time([2048] * 4) == pytest.approx(alpha * 4 * 2048**2 + beta * 8192 + gamma, rel=1e-4)
    noisy = costs.fit([(p, t * (1 + noise * (-1) ** i)) for i, (p, t) in enumerate(zip(packings, times, strict=True))])
    assert noisy.residual <= 0.02
    assert min(noisy.alpha, noisy.beta, noisy.gamma) >= 0


def test_fit_says_what_to_measure():
    with pytest.raises(SpecError, match=r"2 measurements cannot tell .* Measure at least three"):
        costs.fit([([100], 1.0), ([200], 2.0)])
    with pytest.raises(SpecError, match="too much alike"):
        costs.fit([([4096], 3.0), ([2048, 2048], 2.0), ([1024] * 4, 1.5), ([512] * 8, 1.2)])
    with pytest.raises(SpecError, match="measurement 1 took nan ms"):
        costs.fit([([100], 1.0), ([200], math.nan)])
    with pytest.raises(SpecError, match="do not grow with the tokens"):
        costs.fit([([100], 5.0), ([200], 4.0), ([50, 50], 5.0), ([300, 100], 3.0), ([1000], 1.0)])


def test_numbers_of_numpy_are_numbers_too():
    assert CostModel(np.float32(1.0), np.int64(2))([3]).tolist() == [15]
    assert costs.moe(np.int32(32), np.int32(4096), experts=np.int32(8), top_k=np.int32(2), expert_ffn=14336) == (
        costs.moe(32, 4096, experts=8, top_k=2, expert_ffn=14336)
    )


def test_presets_are_listed_with_their_origin():
    assert [model.name for model in costs.presets()] == ["tokens", "quadratic", "llama_12b", "vit_2b"]
    assert costs.preset("llama_12b") is costs.llama_12b
    assert all(model.origin for model in costs.presets())
    with pytest.raises(SpecError, match="no cost preset 'gpt'"):
        costs.preset("gpt")


def test_users_functions_become_integers():
    lengths = np.array([10, 20, 40])
    assert as_costs(lambda s: s, lengths).tolist() == [10, 20, 40]
    assert as_costs(lambda s: [5000.4, 6000.6, 0.0], lengths).tolist() == [5000, 6001, 0]
    assert as_costs(costs.quadratic, lengths).tolist() == [100, 400, 1600]
    assert as_costs(lambda s: s * 0.0, lengths).tolist() == [0, 0, 0]
    assert as_costs(lambda s: s, []).tolist() == []


@given(st.lists(st.integers(1, 4096), min_size=64, max_size=200), st.sampled_from([1e-9, 1e-3, 0.01]))
def test_small_floats_are_balanced_as_well_as_integers(lengths, unit):
    found = as_costs(lambda s: s * s * unit, lengths)
    squares = np.array(lengths) ** 2
    ours = np.bincount(balance(found, 8), weights=squares, minlength=8).max()
    exact = np.bincount(balance(squares, 8), weights=squares, minlength=8).max()
    assert ours <= exact * 1.01


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s: s[:-1], r"returned int64 of shape \(2,\) for 3 lengths"),
        (lambda s: 5, r"of shape \(\)"),
        (lambda s: ["a", "b", "c"], "returned <U1"),
        (lambda s: s > 1, "returned bool"),
        (lambda s: -s, "returned -10 for a length of 10"),
        (lambda s: [1.0, math.nan, 1.0], "returned nan for a length of 20"),
        (lambda s: [1.0, math.inf, 1.0], "returned inf"),
        (lambda s: s * 10**17, "overflow 64 bits"),
        (lambda s: 1 / 0, "my cost failed on 3 lengths with ZeroDivisionError"),
        (lambda s: sys.exit("enough"), "my cost failed on 3 lengths with SystemExit: enough"),
        (lambda s: [[1], [1, 2], 3], "my cost failed on 3 lengths with ValueError"),
        (5, "my cost failed on 3 lengths with TypeError"),
    ],
)
def test_bad_answers_are_named(function, message):
    with pytest.raises(SpecError, match=message):
        as_costs(function, [10, 20, 40], "my cost")


def test_a_function_cannot_change_the_lengths():
    lengths = np.array([1, 2])

    def changing(s):
        s *= 2
        return s

    assert as_costs(changing, lengths).tolist() == [2, 4] and lengths.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CostModel(-1.0, 1.0), "alpha is -1.0"),
        (lambda: CostModel(0.0, 0.0), "both 0"),
        (lambda: CostModel(1.0, math.nan), "beta is nan"),
        (lambda: CostModel(1.0, 1.0, scale=2**40), "overflow"),
        (lambda: CostModel(1e-15, 0.0, gamma=1e3), "gamma is 1000.0"),
        (lambda: CostModel(1.0, 1.0, window=0), "window is 0"),
        (lambda: costs.quadratic([costs.MAX_SEGMENT + 1]), "a segment has 1048577 tokens"),
        (lambda: costs.quadratic([-1]), "a segment has -1 tokens"),
        (lambda: costs.quadratic([0.5]), "lengths are float64"),
        (lambda: costs.quadratic([[1]]), r"of shape \(1, 1\)"),
        (lambda: costs.quadratic(np.full(2049, costs.MAX_SEGMENT)), "2148532224 tokens together"),
        (lambda: costs.causal_lm(0, 4096), "layers is 0"),
        (lambda: costs.causal_lm(32, 4096, heads=33), "which 33 heads do not divide"),
        (lambda: costs.causal_lm(32, 4096, kv_heads=8), "heads is missing"),
        (lambda: costs.causal_lm(32, 4096, heads=32, kv_heads=5), "kv_heads is 5"),
        (lambda: costs.causal_lm(32, 4096, full_layers=33), "full_layers is 33"),
        (lambda: costs.causal_lm(32, 4096, attn_scale=0), "attn_scale is 0"),
        (lambda: costs.moe(32, 4096, experts=8, top_k=9, expert_ffn=100), "top_k is 9"),
        (lambda: costs.scaled(costs.llama_12b, layers=0), "layers is 0"),
        (lambda: CostModel("x", 1.0), "alpha is 'x'"),
        (lambda: CostModel(None, 1.0), "alpha is None"),
        (lambda: CostModel(1.0, 1.0, gamma=math.nan), "gamma is nan"),
        (lambda: CostModel(1.0, 10**400), "beta is 1000"),
        (lambda: CostModel(1.0, 1.0, windowed=-0.5), "windowed is -0.5"),
        (lambda: CostModel(1.0, 1.0, residual="x"), "residual is 'x'"),
        (lambda: CostModel(1.0, 1.0, unit="hours"), "unit is 'hours'"),
        (lambda: CostModel(1.0, 1.0, name=5), "name is 5"),
        (lambda: CostModel(1.0, 1.0, scale=1.5), "scale is 1.5"),
        (lambda: CostModel(1.0, 1.0, scale=10**400), "scale is 1000"),
        (lambda: CostModel(5e-324, 0.0, gamma=1.0), "gamma is 1.0"),
        (lambda: CostModel(5e-324, 0.0, scale=3), "too small"),
        (lambda: costs.tokens.milliseconds(None), "is in relative"),
        (lambda: costs.llama_12b.milliseconds("x"), "cost is 'x'"),
        (lambda: costs.quadratic([[1], [1, 2]]), "lengths are .*; give a list of whole numbers"),
        (lambda: costs.quadratic(None), "lengths are object"),
        (lambda: costs.causal_lm(32, 4096, full_layers="x"), "full_layers is 'x'"),
        (lambda: costs.causal_lm(32, 4096, full_layers=1.5), "full_layers is 1.5"),
        (lambda: costs.causal_lm(32, 4096, full_layers=-1), "full_layers is -1"),
        (lambda: costs.causal_lm(32, 4096, attn_scale="x"), "attn_scale is 'x'"),
        (lambda: costs.causal_lm(32, 4096, attn_scale=None), "attn_scale is None"),
        (lambda: costs.causal_lm(32, 4096, heads="x", head_dim=64), "heads is 'x'"),
        (lambda: costs.causal_lm(32, 10**400), "hidden is 1000"),
        (lambda: costs.moe(32, 4096, experts=8, top_k="x", expert_ffn=100), "top_k is 'x'"),
        (lambda: costs.moe(32, 4096, experts=8, top_k=1.5, expert_ffn=100), "top_k is 1.5"),
        (lambda: costs.moe(32, 4096, experts=8, top_k=2, expert_ffn=100, shared_ffn="x"), "shared_ffn is 'x'"),
        (lambda: costs.moe(32, 4096, experts=8, top_k=2, expert_ffn=100, shared_ffn=None), "shared_ffn is None"),
        (lambda: costs.moe(32, 4096, experts=8, top_k=2, expert_ffn=100, shared_ffn=1.5), "shared_ffn is 1.5"),
        (lambda: costs.moe(32, 4096, experts=8, top_k=2, expert_ffn=100, shared_ffn=-1), "shared_ffn is -1"),
        (lambda: costs.scaled(None, 2), "model is None"),
        (lambda: costs.scaled(costs.llama_12b, "x"), "layers is 'x'"),
        (lambda: costs.preset([]), r"no cost preset \[\]"),
        (lambda: costs.preset("llama12b"), "Did you mean 'llama_12b'"),
        (lambda: costs.fit(None), "measurements are None"),
        (lambda: costs.fit([5]), "measurement 0 is 5"),
        (lambda: costs.fit([([100], None)]), "measurement 0 took None ms"),
        (lambda: costs.fit([([100], 1e-320)]), "measurement 0 took 1e-320 ms"),
        (lambda: costs.fit([("ab", 1.0)]), "lengths are <U2"),
    ],
)
def test_bad_models_are_explained(call, message):
    with pytest.raises(SpecError, match=message):
        call()


@given(
    st.lists(st.integers(1, 1 << 20), min_size=1, max_size=20),
    st.integers(256, 65_536),
    st.integers(1, 80),
    st.floats(1e8, 1e13),
    st.floats(0, 1e9),
)
def test_offloading_is_hidden_and_never_needs_more_ranks(lengths, capacity, layers, bandwidth, fixed):
    layer = CostModel(alpha=1.55e-8, beta=4.8e-4, gamma=0.1)
    offload = Offload(layers, 153_000, bandwidth, layer, act_bytes=fixed)
    ratios, ranks = offload.ratios(lengths, capacity), offload.ranks(lengths, capacity)

    def saved(tokens):
        return 153_000 * tokens + fixed

    for tokens, ratio, count in zip(lengths, ratios.tolist(), ranks.tolist(), strict=True):
        plain = max(1, math.ceil(saved(tokens) / saved(capacity) - 1e-9))
        assert 0 <= ratio <= 1 and count <= plain and (ratio > 0) == (count < plain)
        assert ratio * saved(tokens) / bandwidth <= layer.microbatch_time([tokens]) / 1e3 * (1 + 1e-9)
        assert tokens > capacity or (ratio, count) == (0, 1)
        kept = min(2, layers)
        assert (kept + (1 - ratio) * (layers - kept)) * saved(tokens) <= count * layers * saved(capacity) * (1 + 1e-6)


def test_offloading_of_nothing_is_refused():
    layer = CostModel(alpha=1e-8, beta=1e-4)
    for options, match in (
        ({"layers": 0}, "layers"),
        ({"bandwidth": 0}, "bandwidth is 0.0"),
        ({"time": CostModel(alpha=1, beta=1, unit="flops")}, "milliseconds of one layer"),
        ({"time": CostModel(alpha=1, beta=1, window=8)}, "no window"),
    ):
        with pytest.raises(SpecError, match=match):
            Offload(**{"layers": 4, "act_bytes_per_token": 10, "bandwidth": 1e9, "time": layer} | options)
