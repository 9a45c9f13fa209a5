"""Activations that wait on the host give the same gradients, bit for bit, and their memory is used again."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from test_torch_hdp import TinyLM, made_step, summed_loss
from torch import nn

import overlord as ol
from overlord.errors import SpecError
from overlord.integrations import torch_offload
from overlord.integrations.torch_hdp import HybridParallel
from overlord.integrations.torch_offload import Offloading


class Layers(nn.Module):
    """Projections that save the same input, an operation in place, and views of one storage."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.q, self.k, self.v, self.out = (nn.ModuleList(nn.Linear(32, 32) for _ in range(count)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for q, k, v, out in zip(self.q, self.k, self.v, self.out, strict=True):
            a, b = (q(x) * torch.sigmoid(k(x))).chunk(2, dim=-1)
            hidden = torch.cat([a * b, torch.tanh(b)], dim=-1).relu_()
            x = x + out(hidden * v(x))
        return x


def gradients(model: nn.Module, x: torch.Tensor, offloading: Offloading | None = None, ratio: float = 0) -> list:
    model.zero_grad()
    if offloading is None:
        loss = model(x).square().sum()
    else:
        with offloading(ratio):
            loss = model(x).square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("ratio", [0, 0.3, 0.5, 1])
def test_gradients_are_bit_equal_and_the_share_is_kept(ratio):
    model, x = Layers(), torch.randn(64, 32, requires_grad=True)
    expected = gradients(model, x)
    offloading = Offloading(smallest_bytes=1024)
    found = gradients(model, x, offloading, ratio)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    everything = Offloading(smallest_bytes=1024)
    gradients(model, x, everything, 1.0)
    share = offloading.offloaded_bytes / everything.offloaded_bytes
    assert share <= ratio and share >= ratio - 0.15


def test_an_input_that_three_projections_save_is_copied_once():
    x = torch.randn(64, 32)
    model = Layers(1)
    with Offloading(smallest_bytes=1024)(1.0) as offloading:
        y = (x * 1.0).requires_grad_()
        for layer in (model.q[0], model.k[0], model.v[0]):
            layer(y * 1)  # another storage each
    apart = offloading.offloaded_bytes
    with offloading:
        z = y * 1
        for layer in (model.q[0], model.k[0], model.v[0]):
            layer(z)
    assert offloading.offloaded_bytes < apart


def test_the_device_memory_is_free_between_forward_and_backward():
    offloading = Offloading(smallest_bytes=1024, ahead_bytes=1024)
    x = torch.randn(64, 32, requires_grad=True)
    with offloading(1.0):
        hidden = x * 2
        gone = weakref.ref(hidden.untyped_storage())
        last = hidden.square()
        stays = weakref.ref(last.untyped_storage())
        loss = last.square().sum()
        del hidden, last
    gc.collect()
    assert gone() is None and offloading.offloaded_bytes == 2 * 64 * 32 * 4
    assert stays() is not None  # backward begins with it
    loss.backward()
    assert torch.allclose(x.grad, 64 * x.detach() ** 3)
    assert stays() is None


@pytest.mark.parametrize("ratio, kept", [(1.0, 4), (0.5, 2)])
def test_four_of_the_largest_tensors_are_held_ahead(monkeypatch, ratio, kept):
    """A gated feed-forward saves four in a row; backward would wait for copies of all but the first."""
    monkeypatch.setattr(torch_offload, "AHEAD_BYTES", 1024)
    x = torch.randn(64, 32, requires_grad=True)
    with Offloading(smallest_bytes=1024)(ratio):
        hidden, storages = x, []
        for _ in range(20):
            hidden = hidden.sin()
            storages.append(weakref.ref(hidden.untyped_storage()))
        loss = hidden.square().sum()
        del hidden
    gc.collect()
    offloaded_late = [there() is not None for there in storages[-int(kept / ratio) :]]
    assert all(offloaded_late)
    # What is not offloaded stays, of course: only the offloaded share of the earlier ones is gone.
    earlier = [there() is None for there in storages[: -int(kept / ratio)]]
    assert sum(earlier) == pytest.approx(ratio * len(earlier), abs=1)
    loss.backward()
    assert x.grad is not None


def test_what_is_written_after_it_was_saved_is_not_mixed_up():
    """One storage, saved, written and saved again: each use gets what it had."""
    offloading = Offloading(smallest_bytes=16)
    buffer = torch.zeros(2, 64)
    w = torch.ones(64, requires_grad=True)
    with offloading(1.0):
        first = (w * buffer[0].fill_(3.0)).sum()
        with torch.no_grad():
            buffer[0].fill_(5.0)
        second = (w * buffer[0]).sum()
    (first + second).backward()
    assert torch.equal(w.grad, torch.full((64,), 8.0))


def test_host_memory_does_not_grow_with_steps():
    model, offloading = Layers(), Offloading(smallest_bytes=1024)
    taken = []
    for step in range(50):
        gradients(model, torch.randn(56 + step % 8, 32, requires_grad=True), offloading, 1.0)
        taken.append(offloading.pool_bytes)
    assert taken[-1] == taken[7] > 0


def test_a_training_step_with_offloading_is_the_same():
    mesh = ol.ClientPlaceTree()
    step, found = made_step([40, 9, 30], mesh, 0), []
    for offload in (0.0, 1.0, lambda batch: 0.5 if batch.meta.segment_lengths.max() > 30 else 0.0):
        model = TinyLM()
        loader = SimpleNamespace(mesh=mesh, rank=0, device=torch.device("cpu"))
        hdp = HybridParallel(loader, offload=offload)
        hdp._offloading._smallest = 256
        for batch in hdp.microbatches(step, model):
            hdp.backward(summed_loss(model, batch))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert (hdp._offloading.pool_bytes > 0) == (offload != 0.0)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def planned_ratios(rank: int) -> tuple[list[torch.Tensor], list[float]]:
    """Gradients of one plan with activations on the host as it says, without any there, and the shares it says."""
    mesh, found, ratios = ol.ClientPlaceTree(cp=2), [], []
    loader = SimpleNamespace(mesh=mesh, rank=rank, device=torch.device("cpu"))
    hidden = ol.costs.Offload(8, act_bytes_per_token=1, bandwidth=1e9, time=ol.costs.CostModel(0, 1e-6))
    step = made_step([40, 9, 64, 30, 36], mesh, rank, offload=hidden)
    for run in ("as planned", "without"):
        model, hdp = TinyLM(), HybridParallel(loader)
        hdp._offloading._smallest = 256
        if run == "without":
            hdp._ratio_of = lambda batch: 0.0
        for batch in hdp.microbatches(step, model):
            ratios.append(batch.meta.offload_ratio)
            hdp.backward(summed_loss(model, batch))
            if run == "as planned" and ratios[-1] > 0:
                assert 0 < hdp._offloading.offloaded_bytes <= ratios[-1] * hdp._offloading._seen
        assert (hdp._offloading.pool_bytes > 0) == (run == "as planned")
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    with pytest.raises(SpecError, match=r"offload is 0, and the plan counts on 0.* on the host"):
        list(map(HybridParallel(loader, offload=0.0)._ratio_of, step.microbatches))
    return found, ratios


@pytest.mark.slow
def test_the_share_of_each_microbatch_is_that_of_the_plan(tmp_path):
    found = run_ranks(planned_ratios, 2, tmp_path)
    for (planned, without), ratios in found:
        assert torch.equal(planned, without) and any(0 < ratio < 1 for ratio in ratios)
    assert any(0.0 in ratios for _, ratios in found)
    mesh = ol.ClientPlaceTree(cp=2)
    assert all(batch.meta.offload_ratio == 0 for batch in made_step([40, 9, 64], mesh, 0).microbatches)


def test_what_is_no_share_is_refused():
    for wrong in (-0.1, 1.5, "half"):
        with pytest.raises(SpecError, match="it is a share of the activations"):
            Offloading()(wrong)
    with Offloading()(0.5) as offloading, pytest.raises(SpecError, match="entered already"):
        offloading.__enter__()
