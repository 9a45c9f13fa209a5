"""Ring attention of real processes gives what attention over the whole sequence gives, for any ranks and packing."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from overlord.core.ragged import offsets_of
from overlord.errors import SpecError
from overlord.integrations.torch_ring import (
    Ring,
    add_gradients,
    attention_in,
    backward_block,
    forward_block,
    merge_block,
    ring_attention,
)

WORLD, SEEDS = 4, 110

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Case:
    """A packed sequence, and the ranks that share it."""

    ranks: tuple[int, ...]
    cu: np.ndarray
    heads: int
    groups: int
    size: int
    seed: int

    def tensors(self) -> list[torch.Tensor]:
        """Queries, keys, values and the gradient of the output, of the whole sequence."""
        random = torch.Generator().manual_seed(self.seed)
        tokens = int(self.cu[-1])
        heads = (self.heads, self.groups, self.groups, self.heads)
        return [torch.randn(tokens, h, self.size, dtype=torch.float64, generator=random) for h in heads]


def cases(seed: int) -> list[Case]:
    """All four ranks in rings of one to four, in any order: each ring has a sequence of its own."""
    rng = np.random.default_rng(seed)
    ranks, found = rng.permutation(WORLD).tolist(), []
    while ranks:
        count = int(rng.integers(1, len(ranks) + 1))
        mine, ranks = ranks[:count], ranks[count:]
        lengths = rng.integers(1, 7, int(rng.integers(1, 5))) * (2 * count if count > 1 else 1)
        groups = int(rng.choice([1, 2, 3]))
        heads, size = groups * int(rng.choice([1, 2, 4])), int(rng.choice([4, 8, 16]))
        found.append(Case(tuple(mine), offsets_of(lengths), heads, groups, size, int(rng.integers(1 << 30))))
    return found


def slice_indices(cu: np.ndarray, count: int, place: int) -> np.ndarray:
    """The tokens that a place of a ring has: of every segment its chunk, and the mirrored one."""
    if count == 1:
        return np.arange(int(cu[-1]))
    found = []
    for begin, end in itertools.pairwise(cu.tolist()):
        chunks = np.split(np.arange(begin, end), 2 * count)
        found += [chunks[place], chunks[2 * count - 1 - place]]
    return np.concatenate(found)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: np.ndarray) -> torch.Tensor:
    """Attention written down: scores of all pairs, of which those in one segment and not later count."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    segment = torch.as_tensor(np.repeat(np.arange(len(cu) - 1), np.diff(cu)))
    place = torch.arange(len(segment))
    seen = (segment[:, None] == segment) & (place[:, None] >= place)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def worst_of(case: Case, rank: int) -> float:
    """The largest difference of this rank's outputs and gradients from those of the whole sequence."""
    *whole, grad = case.tensors()
    wanted = [one.clone().requires_grad_() for one in whole]
    expected = dense(*wanted, case.cu)
    expected.backward(grad)
    place = case.ranks.index(rank)
    mine = torch.as_tensor(slice_indices(case.cu, len(case.ranks), place))
    own = [one[mine].clone().requires_grad_() for one in whole]
    out = ring_attention(*own, Ring(case.cu, case.ranks, rank))
    out.backward(grad[mine])
    pairs = [(out, expected[mine]), *((a.grad, b.grad[mine]) for a, b in zip(own, wanted, strict=True))]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def many_cases(rank: int) -> tuple[float, int, set[int]]:
    worst, run, sizes = 0.0, 0, set()
    for seed in range(SEEDS):
        for case in cases(seed):
            if rank in case.ranks:
                worst, run = max(worst, worst_of(case, rank)), run + 1
                sizes.add(len(case.ranks))
    return worst, run, sizes


@pytest.mark.slow
def test_random_packings_on_any_ranks(tmp_path):
    found = run_ranks(many_cases, WORLD, tmp_path)
    assert sum(len(cases(seed)) for seed in range(SEEDS)) >= 200
    assert max(worst for worst, _, _ in found) < 1e-12
    assert all(sizes == {1, 2, 3, 4} for _, _, sizes in found)


def test_a_wrong_order_of_ranks_is_seen(tmp_path):
    """The comparison fails where slices are taken in another order than the ring has."""
    found = run_ranks(_swapped, 2, tmp_path)
    assert min(found) > 1e-3


def _swapped(rank: int) -> float:
    case = Case((0, 1), np.array([0, 8, 20]), 2, 1, 4, seed=1)
    *whole, _ = case.tensors()
    mine = torch.as_tensor(slice_indices(case.cu, 2, rank))
    out = ring_attention(*(one[mine] for one in whole), Ring(case.cu, (1, 0), rank))
    return float((out - dense(*whole, case.cu)[mine]).abs().max())


def virtual_ring(q: list[Any], k: list[Any], v: list[Any], cu: np.ndarray) -> list[torch.Tensor]:
    """The outputs of all places of a ring, computed one after another in this process."""
    ranks, made = tuple(range(len(q))), []
    for rank in ranks:
        ring = Ring(cu, ranks, rank)
        out, lse = forward_block(ring, rank, q[rank], k[rank], v[rank], 0.5)
        out = out.to(torch.promote_types(out.dtype, torch.float32))
        for of in (place for place in ranks if place != rank):
            merge_block(ring, of, (out, lse), forward_block(ring, of, q[rank], k[of], v[of], 0.5))
        made.append(out)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_results_keep_their_precision(dtype):
    """The merge of a ring adds no more than a rounding to the error of one call of the kernel."""
    case = Case((0, 1, 2, 3), np.array([0, 64, 192]), 4, 2, 16, seed=3)
    *exact, _ = case.tensors()
    low = [one.to(dtype) for one in exact]
    whole = [one.double() for one in low]
    whole[0] = whole[0] * 0.5 * whole[0].shape[-1] ** 0.5  # `dense` scales by the size
    expected = dense(*whole, case.cu)
    alone, _ = forward_block(Ring(case.cu), 0, *low, 0.5)
    index = [torch.as_tensor(slice_indices(case.cu, 4, place)) for place in range(4)]
    parts = virtual_ring(*([one[at] for at in index] for one in low), case.cu)
    error = float((alone.double() - expected).abs().max())
    for at, part in zip(index, parts, strict=True):
        assert float((part.double() - expected[at]).abs().max()) <= 2 * error


def test_what_does_not_fit_is_refused():
    q, k = torch.zeros(8, 4, 8), torch.zeros(8, 2, 8)
    with pytest.raises(SpecError, match=r"8 queries and 8 keys, where this rank has 6 tokens"):
        ring_attention(q, k, k, Ring([0, 6]))
    with pytest.raises(SpecError, match="heads a multiple of groups"):
        ring_attention(q, torch.zeros(8, 3, 8), torch.zeros(8, 3, 8), Ring([0, 8]))
    with pytest.raises(SpecError, match="heads a multiple of groups"):
        ring_attention(q.double(), k, k, Ring([0, 8]))
    with pytest.raises(SpecError, match="6 tokens, which 2 ranks cannot cut into 4 chunks"):
        Ring([0, 6], (0, 1), 0)
    with pytest.raises(SpecError, match=r"rank 2 is not one of \[0, 1\]"):
        Ring([0, 8], (0, 1), 2)
    with pytest.raises(SpecError, match="no microbatch is being computed"):
        ring_attention(q, k, k)
    with attention_in(Ring([0, 8])) as ring:
        assert ring_attention(q, k, k).shape == q.shape
    assert ring.calls == 1 and not dist.is_initialized()


@pytest.mark.slow
def test_the_benchmark_of_a_device_runs_small(monkeypatch, capsys):
    from benchmarks import ring as benchmark

    monkeypatch.setattr(benchmark, "FFN", 256)
    monkeypatch.setattr(benchmark, "HEADS", 4)
    monkeypatch.setattr(benchmark, "GROUPS", 2)
    monkeypatch.setattr("sys.argv", ["ring", "--tokens", "64", "--rounds", "1", "--device", "cpu", "--json"])
    benchmark.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["error_over_flash"] <= 2 and figures["offload_1_host_gb"] > figures["offload_0.5_host_gb"] > 0
    assert all(figures[name] > 0 for name in ("cp1_over_flash", "ring4_over_flash", "offload_0.5_time"))


@pytest.mark.slow
def test_the_replay_of_all_ranks_runs_small(monkeypatch, capsys):
    from benchmarks import replay
    from benchmarks import ring as benchmark

    for name, value in {"FFN": 64, "HEADS": 2, "GROUPS": 1, "SIZE": 16}.items():
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr("sys.argv", ["replay", "--quick", "--rounds", "1", "--device", "cpu", "--json"])
    replay.main()
    told = capsys.readouterr()
    figures = json.loads(told.out.splitlines()[-1])
    for name in ("vanilla", "backbone_balance", "hdp"):
        assert figures[f"{name}_step_ms"] >= figures[f"{name}_mean_ms"] > 0 and f"{name}_step_ms" in told.err
    assert figures["hdp_not_sent_gb"] < figures["vanilla_not_sent_gb"]  # short sequences stay on one rank
    assert "Measured: every microbatch of every rank" in told.err and "Assumed: links are free" in told.err
    # Ranks 0 and 1 share the first microbatch; rank 1 has a second one, which waits for that.
    shared, alone = replay.Work((8,), 0, 2), replay.Work((8,), 1, 1)
    assert replay.step_time([[shared], [shared, alone]], np.array([[3.0, 0.0], [2.0, 4.0]])) == 7.0


@pytest.mark.parametrize("place", [0, 1])
def test_the_kernels_of_cuda_take_and_return_what_a_ring_gives_them(place):
    """There may be no GPU here: torch's fake tensors check arguments, shapes and types of every call."""
    ring, kind = Ring([0, 16, 32], (0, 1), place), {"device": "cuda", "dtype": torch.bfloat16}
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = torch.empty(16, 4, 16, **kind), torch.empty(16, 2, 16, **kind)
        out, lse = forward_block(ring, place, q, k, k, 0.25)
        out = out.float()
        merge_block(ring, 1 - place, (out, lse), forward_block(ring, 1 - place, q, k, k, 0.25))
        assert (out.shape, lse.shape, lse.dtype) == ((16, 4, 16), (4, 16), torch.float32)
        totals = tuple(torch.zeros(16, heads, 16, device="cuda") for heads in (4, 2, 2))
        for of in (0, 1):
            block = backward_block(ring, of, (q, out.bfloat16(), lse), q, k, k, 0.25)
            assert [one.device.type for one in block] == ["cuda"] * 3
            add_gradients(ring, of, totals, block)
        with pytest.raises(SpecError, match="float16 and bfloat16 only"):
            ring_attention(q.float(), k.float(), k.float(), Ring([0, 16]))
