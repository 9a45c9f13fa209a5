"""LayerBalance: the rates that are used are the schedule's times the factor, through everything trainers do."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from overlord.companions import LayerBalance, balance_groups, spectra
from overlord.companions import balance_rules as rules
from overlord.companions.measured import clean, weights_of
from overlord.errors import SpecError, StateError

WIDTH, LEAST = 32, 8


class Block(nn.Module):
    """A block with grouped-query attention, whose keys are narrow, and a wide feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH // 4, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)


class Model(nn.Module):
    """A language model as `LayerBalance` sees it: its steps are made by gradients that tests set."""

    def __init__(self, blocks: int = 3, seed: int = 0, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 100, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, schedule: Any = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    if schedule is not None:
        schedule.step()


def used_rates(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Record the learning rates of every group as the optimizer's step sees them."""
    rates: list[list[float]] = []
    inner = optimizer.step.__wrapped__ if hasattr(optimizer.step, "__wrapped__") else None
    assert inner is not None, "hooks run around the step that is replaced here"
    original = type(optimizer)._init_group

    def recording(group_self: Any, group: dict[str, Any], *args: Any) -> Any:
        rates[-1].append(float(group["lr"]))
        return original(group_self, group, *args)

    optimizer._init_group = recording.__get__(optimizer)  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(lambda *_: rates.append([]))
    return rates


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 200),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 30),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.99),
    "linear": lambda o: schedules.LinearLR(o, 0.1, total_iters=100),
    "constant": lambda o: schedules.ConstantLR(o, 0.5, total_iters=20),
    "step": lambda o: schedules.StepLR(o, 15),
    "multi": lambda o: schedules.MultiStepLR(o, [20, 60]),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.98),
    "polynomial": lambda o: schedules.PolynomialLR(o, 180, 2.0),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=201, cycle_momentum=False),
    "cyclic": lambda o: schedules.CyclicLR(o, 1e-3, 1e-2, step_size_up=11, cycle_momentum=False),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, total_iters=20), schedules.ExponentialLR(o, 0.98)]
    ),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=20), schedules.CosineAnnealingLR(o, 180)], milestones=[20]
    ),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_the_schedule_times_the_factor(name, tensor):
    rate = torch.tensor(0.01, dtype=torch.float64) if tensor else 0.01
    model, plain = Model(1), nn.Linear(1, 1)
    with_factors = torch.optim.SGD(balance_groups(model, least=LEAST), lr=rate)
    without = torch.optim.SGD(plain.parameters(), lr=rate.clone() if tensor else rate)
    schedule, expected = SCHEDULES[name](with_factors), SCHEDULES[name](without)
    balance = LayerBalance(model, with_factors, "llr", every=20, ramp=10, least=LEAST)
    rates = used_rates(with_factors)
    factors_seen = set()
    for step in range(200):
        factors = balance.factors()
        factors_seen.update(factors.values())
        scheduled = float(without.param_groups[0]["lr"])
        train(model, with_factors, step, schedule)
        train(plain, without, step, expected)
        for group, used in zip(with_factors.param_groups, rates[-1], strict=True):
            assert used == pytest.approx(scheduled * factors.get(group["balance"], 1.0), rel=1e-14, abs=1e-18)
            assert float(group["lr"]) == pytest.approx(float(without.param_groups[0]["lr"]), rel=1e-14, abs=1e-18)
    assert max(factors_seen) == 5.0 and min(factors_seen) == 1.0 and len(factors_seen) > 10


def run(steps: Sequence[int], model: Model, saved: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Train some steps and return everything a checkpoint has, with the factors of every step."""
    optimizer = torch.optim.AdamW(balance_groups(model, least=LEAST), lr=0.01)
    schedule = schedules.CosineAnnealingLR(optimizer, 100)
    balance = LayerBalance(model, optimizer, **{"rule": "llr", "every": 7, "ramp": 5, "least": LEAST} | options)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        balance.load_state_dict(saved["balance"])
    factors = []
    for step in steps:
        factors.append(balance.factors())
        train(model, optimizer, step, schedule)
    return {
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "schedule": schedule.state_dict(),
        "balance": balance.state_dict(),
        "metrics": balance.metrics(),
        "factors": factors,
    }


@pytest.mark.parametrize("cut", [1, 7, 13, 14, 16, 20, 27])
def test_a_resumed_run_repeats_the_factors_and_weights_bit_for_bit(cut):
    whole = run(range(40), Model())
    first = run(range(cut), Model())
    rest = run(range(cut, 40), Model(seed=9), first)
    assert first["factors"] + rest["factors"] == whole["factors"]
    assert rest["metrics"] == whole["metrics"] and rest["balance"] == whole["balance"]
    assert all(torch.equal(rest["model"][name], value) for name, value in whole["model"].items())


def test_a_result_counts_from_the_next_multiple_on():
    model = Model()
    optimizer = torch.optim.SGD(balance_groups(model, least=LEAST), lr=0.1)
    balance = LayerBalance(model, optimizer, "llr", every=4, ramp=0, least=LEAST)
    at_start = balance.measure()
    for step in range(4):
        assert balance.alphas() == {} and set(balance.factors().values()) == {1.0}
        train(model, optimizer, step)
    assert balance.alphas() == at_start
    assert balance.factors()["embed.weight"] == balance.factors()["head.weight"] == 5.0
    after_four = balance.measure()
    for step in range(4, 8):
        assert balance.alphas() == at_start
        train(model, optimizer, step)
    assert balance.alphas() == after_four


def test_the_exponents_are_those_of_the_matrices():
    model = Model(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = LayerBalance(model, optimizer, windows=None, least=LEAST)
    expected = {
        f"blocks.{number}.{name}.weight": spectra.alpha(spectra.eigenvalues(getattr(block, name).weight), 2)
        for number, block in enumerate(model.blocks)
        for name in ("q", "k", "up", "down")
    }
    assert balance.measure() == pytest.approx(expected, rel=1e-12)


def test_reports_change_nothing_and_have_at_most_64_names():
    model, plain = Model(80), Model(80)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    balance = LayerBalance(model, optimizer, every=2, least=LEAST)
    for step in range(5):
        train(model, optimizer, step)
        train(plain, other, step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    metrics = balance.metrics()
    assert len(metrics) <= 64 and {"alpha/mean", "alpha/std", "alpha/blocks.0..blocks.1"} <= set(metrics)
    assert all(math.isfinite(value) for value in metrics.values())


GOLDEN = json.loads((Path(__file__).parents[1] / "companions" / "golden_alpha.json").read_text())["vectors"]


@pytest.mark.parametrize("rule", ["tempbalance", "llr", "alphadecay"])
def test_linear_rules_are_those_of_the_published_code(rule):
    for vector in GOLDEN:
        alphas, published = vector["alphas"], vector[rule]
        even = len(set(alphas)) == 1  # then the published code gives the upper end, and we do not
        expected = [1.0] * len(alphas) if even else published["factors"]
        assert rules.linear(alphas, *published["range"]) == pytest.approx(expected, rel=1e-10)


def test_the_sigmoid_is_that_of_the_published_code():
    for vector in GOLDEN:
        published = vector["sigmoid"]
        factors = rules.sigmoid(
            vector["alphas"],
            tau=published["tau"],
            above=published["sigmoid_max"],
            below=published["sigmoid_min"],
        )
        assert factors == pytest.approx(published["factors"], rel=1e-10)


@pytest.mark.parametrize("scope", ["matrix", "block"])
@pytest.mark.parametrize("rule", ["llr", "tempbalance", "sigmoid", "alphadecay"])
def test_factors_are_those_of_the_rule(rule, scope):
    model = Model()
    optimizer = torch.optim.AdamW(balance_groups(model, scope, least=LEAST), lr=0.01, weight_decay=0.1)
    balance = LayerBalance(model, optimizer, rule, every=1, ramp=0, least=LEAST)
    train(model, optimizer, 0)
    alphas: dict[str, list[float]] = {}
    for name, alpha in balance.alphas().items():
        alphas.setdefault(name if scope == "matrix" else name[: name.index(".", 7)], []).append(alpha)
    means = [float(np.mean(some)) for some in alphas.values()]
    expected = {
        "llr": lambda: rules.linear(means, 1.0, 5.0),
        "tempbalance": lambda: rules.linear(means, 0.5, 1.5),
        "sigmoid": lambda: rules.sigmoid(means),
        "alphadecay": lambda: rules.linear(means, 2 / 3, 3.0),
    }[rule]()
    edge = 5.0 if rule == "llr" else 1.0
    found = balance.factors()
    assert found == pytest.approx(
        dict(zip(alphas, expected.tolist(), strict=True)) | {"embed.weight": edge, "head.weight": edge}
    )
    assert len(set(found.values())) > 2


def test_decay_follows_the_rate_or_stays_fixed():
    for rule, decay, expected in (
        ("llr", "follows", lambda factor: (0.01 * factor, 0.1)),
        ("llr", "fixed", lambda factor: (0.01 * factor, 0.1 / factor)),
        ("alphadecay", "follows", lambda factor: (0.01, 0.1 * factor)),
    ):
        model = Model()
        optimizer = torch.optim.AdamW(balance_groups(model, least=LEAST), lr=0.01, weight_decay=0.1)
        balance = LayerBalance(model, optimizer, rule, every=1, ramp=0, decay=decay, least=LEAST)
        train(model, optimizer, 0)
        used: list[dict[str, Any]] = []
        optimizer.register_step_pre_hook(lambda o, *_, used=used: used.extend(dict(g) for g in o.param_groups))
        factors = balance.factors()
        train(model, optimizer, 1)
        for group in used:
            wanted = expected(factors.get(group["balance"], 1.0))
            assert (group["lr"], group["weight_decay"]) == pytest.approx(wanted)
        assert {(g["lr"], g["weight_decay"]) for g in optimizer.param_groups} == {(0.01, 0.1)}


def test_a_compiled_step_with_a_tensor_rate_keeps_its_tensors():
    model = Model(1)
    rate = torch.tensor(0.01)
    optimizer = torch.optim.AdamW(balance_groups(model, least=LEAST), lr=rate)
    balance = LayerBalance(model, optimizer, "llr", every=1, ramp=0, least=LEAST)
    train(model, optimizer, 0)
    tensors = [group["lr"] for group in optimizer.param_groups]
    assert len({id(tensor) for tensor in tensors}) == len(tensors), "groups that share one could not differ"
    for step in range(1, 4):
        train(model, optimizer, step)
    assert all(group["lr"] is tensor for group, tensor in zip(optimizer.param_groups, tensors, strict=True))
    assert {float(tensor) for tensor in tensors} == {float(rate)} and max(balance.factors().values()) == 5.0


def test_a_compiled_step_is_not_compiled_again_as_factors_change():
    from torch._dynamo.testing import CompileCounter

    model, counter = Model(1), CompileCounter()
    optimizer = torch.optim.SGD(balance_groups(model, least=LEAST), lr=torch.tensor(0.01))
    balance = LayerBalance(model, optimizer, "llr", every=2, ramp=2, least=LEAST)
    rates = used_rates(optimizer)

    @torch.compile(backend=counter)
    def update(weight: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return weight - rate * weight.sign()

    def step() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"][:1]:
                with torch.no_grad():
                    parameter.copy_(update(parameter.flatten()[:8].clone(), group["lr"])[0].expand_as(parameter))

    optimizer.register_step_pre_hook(lambda *_: step())
    seen = set()
    for number in range(9):
        seen.add(tuple(balance.factors().values()))
        train(model, optimizer, number)
    assert len(seen) > 3 and len(rates) == 9
    assert counter.frame_count == 1


def test_a_step_that_raises_leaves_no_factor_in_the_rates():
    model = Model(1)
    optimizer = torch.optim.AdamW(balance_groups(model, least=LEAST), lr=0.01)
    LayerBalance(model, optimizer, "llr", every=1, ramp=0, least=LEAST)
    train(model, optimizer, 0)

    def broken() -> float:
        raise RuntimeError("the loss is broken")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            optimizer.step(broken)
    train(model, optimizer, 1)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}


def test_skipped_steps_of_a_scaler_do_not_count():
    model = Model(1)
    # A fused optimizer takes part in what is skipped, any other one is not called at all.
    for fused in (True, False):
        optimizer = torch.optim.AdamW(balance_groups(model, least=LEAST), lr=0.01, fused=fused)
        balance = LayerBalance(model, optimizer, "llr", every=2, least=LEAST)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for value in (1.0, math.inf, math.nan, 1.0):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, value)
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
        assert balance.steps == 2


def test_weights_that_are_frozen_tied_adapted_small_or_at_the_edges_are_not_measured():
    model = Model(2, tied=True)
    model.blocks[0].q.requires_grad_(False)
    model.blocks[1].lora_A = nn.Linear(WIDTH, LEAST, bias=False)
    model.blocks[1].tiny = nn.Linear(WIDTH, 4)
    weights = weights_of(model, least=LEAST)
    names = [weight.name for weight in weights.measured]
    assert names == [f"blocks.{b}.{n}.weight" for b in (0, 1) for n in ("q", "k", "up", "down") if (b, n) != (0, "q")]
    assert weights.edges == ("embed.weight",), "tied: once"
    groups = balance_groups(model, least=LEAST)
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(
        id(p) for p in model.parameters() if p.requires_grad
    )
    assert len(next(g for g in groups if g["balance"] == "")["params"]) > 5


def test_groups_that_exist_are_divided_and_keep_their_options():
    model = Model(1)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim == 1]
    groups = balance_groups(
        model, "block", groups=[{"params": decayed, "weight_decay": 0.1}, {"params": other, "lr": 1e-4}], least=LEAST
    )
    assert [(g["balance"], len(g["params"]), g.get("weight_decay"), g.get("lr")) for g in groups] == [
        ("embed.weight", 1, 0.1, None),
        ("blocks.0", 4, 0.1, None),
        ("head.weight", 1, 0.1, None),
        ("", 6, None, 1e-4),
    ]


class Fused(nn.Module):
    """Fused projections as Phi, GPT-NeoX and mixtures of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(
            num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=8, moe_intermediate_size=24
        )
        block = nn.Module()
        block.qkv_proj = nn.Linear(64, 64 + 2 * 16, bias=False)
        block.gate_up_proj = nn.Linear(64, 2 * 96, bias=False)
        block.experts = nn.Module()
        block.experts.gate_up_proj = nn.Parameter(torch.randn(4, 48, 64))
        block.experts.down_proj = nn.Parameter(torch.randn(4, 64, 24))
        block.mystery = nn.Linear(64, 60, bias=False)
        self.layers = nn.ModuleList([block])


def test_fused_matrices_are_cut_at_their_borders():
    model = Fused()
    weights = {w.name: w for w in weights_of(model, {"mystery": (20, 40)}, least=LEAST).measured}
    block = model.layers[0]

    def shapes(name: str) -> list[tuple[int, ...]]:
        weight = weights[f"layers.0.{name}"]
        parts = [tuple(part.shape) for part in weight.parts(torch.zeros(weight.shape))]
        assert [(math.prod(p[:-2]), *p[-2:]) for p in parts] == list(weight.sides())
        return parts

    assert shapes("qkv_proj.weight") == [(64, 64), (16, 64), (16, 64)]
    assert shapes("gate_up_proj.weight") == [(96, 64), (96, 64)]
    assert shapes("experts.gate_up_proj") == [(4, 24, 64), (4, 24, 64)]
    assert shapes("experts.down_proj") == [(4, 64, 24)]
    assert shapes("mystery.weight") == [(20, 64), (40, 64)]
    balance = LayerBalance(model, torch.optim.SGD(model.parameters()), windows=None, least=LEAST)
    parts = block.qkv_proj.weight.detach().split((64, 16, 16))
    expected = np.mean([spectra.alpha(spectra.eigenvalues(part), 2) for part in parts])
    assert balance.measure()["layers.0.qkv_proj.weight"] == pytest.approx(expected, rel=1e-12)
    experts = [spectra.alpha(spectra.eigenvalues(e), 2) for e in block.experts.down_proj.detach()]
    assert balance.measure()["layers.0.experts.down_proj"] == pytest.approx(np.mean(experts), rel=1e-12)


def test_rows_that_are_ordered_by_head_are_put_together_before_they_are_measured():
    config = SimpleNamespace(num_attention_heads=4, hidden_size=64)
    model = nn.Module()
    model.config, model.layers = config, nn.ModuleList([nn.Module()])
    model.layers[0].query_key_value = nn.Linear(64, 192, bias=False)
    (weight,) = weights_of(model, least=LEAST).measured
    whole = model.layers[0].query_key_value.weight.detach()
    expected = whole.view(4, 3, 16, 64).permute(1, 0, 2, 3).reshape(3, 64, 64)
    assert torch.equal(torch.stack(list(weight.parts(whole))), expected)


def test_convolutions_pool_the_eigenvalues_of_their_matrices():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Conv2d(24, 16, 3))
    balance = LayerBalance(model, torch.optim.SGD(model.parameters()), windows=None, least=LEAST)
    weight = model[0].weight.detach().double()
    singular = [np.linalg.svd(weight[:, :, i, j].numpy() * math.sqrt(0.5))[1] for i in range(3) for j in range(3)]
    pooled = torch.from_numpy(np.sort(np.concatenate(singular) ** 2))
    assert balance.measure()["0.weight"] == pytest.approx(spectra.alpha(pooled, 2), rel=1e-6)


def test_weights_without_a_spectrum_have_factor_one_and_are_counted():
    model = Model(2)
    nn.init.zeros_(model.blocks[0].down.weight)
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = math.nan
    optimizer = torch.optim.SGD(balance_groups(model, least=LEAST), lr=0.0)
    balance = LayerBalance(model, optimizer, "llr", every=1, ramp=0, least=LEAST)
    train(model, optimizer, 0)
    assert balance.factors()["blocks.0.down.weight"] == balance.factors()["blocks.1.up.weight"] == 1.0
    assert balance.metrics()["alpha/unmeasured"] == 2.0
    assert all(math.isfinite(value) for value in balance.metrics().values())


def test_an_even_model_has_factor_one_and_an_outlier_can_be_clipped():
    assert rules.linear([2.5, 2.5], 1.0, 5.0).tolist() == [1.0, 1.0]
    alphas = [2.0, 2.1, 2.2, 2.3, *[2.15] * 40, 30.0]
    squeezed, clipped = rules.linear(alphas, 1.0, 5.0), rules.linear(alphas, 1.0, 5.0, trim=0.05)
    assert squeezed[3] < 1.1 and clipped[3] > 3.0 and clipped.max() == 5.0


def test_measurements_before_the_warm_up_ends_change_nothing():
    model = Model()
    optimizer = torch.optim.SGD(balance_groups(model, least=LEAST), lr=0.1)
    balance = LayerBalance(model, optimizer, "llr", every=2, ramp=0, warmup=4, least=LEAST)
    for step in range(5):
        train(model, optimizer, step)
        assert set(balance.factors().values()) == {1.0}
    train(model, optimizer, 5)
    assert balance.metrics() and max(balance.factors().values()) == 5.0


def test_against_random_an_untrained_model_is_even_whatever_its_shapes():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*sides, bias=False) for sides in ((256, 256), (128, 512), (512, 256))))
    optimizer = torch.optim.SGD(model.parameters())
    whole = LayerBalance(model, optimizer, windows=None).measure()
    assert max(whole.values()) - min(whole.values()) > 1.0
    for options in ({"against": "random"}, {"windows": "farms"}):
        values = LayerBalance(model, optimizer, **options).measure().values()
        assert max(values) - min(values) < 0.15


def test_parameters_that_are_reordered_on_resume_keep_their_factors():
    model = Model(2)
    groups = sorted(balance_groups(model, least=LEAST), key=lambda group: len(group["params"]))
    first = torch.optim.AdamW(groups, lr=0.01)
    turned = torch.optim.AdamW([dict(group) for group in (*groups[-2::-1], groups[-1])], lr=0.01)
    turned.load_state_dict(first.state_dict())  # the keys of groups are those of other positions now
    balance = LayerBalance(model, turned, "llr", every=1, ramp=0, least=LEAST)
    train(model, turned, 0)
    names = {id(p): clean(name) for name, p in model.named_parameters()}
    used: list[tuple[str, float]] = []
    turned.register_step_pre_hook(
        lambda o, *_: used.extend((names[id(g["params"][0])], g["lr"]) for g in o.param_groups if len(g["params"]) == 1)
    )
    factors = balance.factors()
    train(model, turned, 1)
    assert {name: rate / 0.01 for name, rate in used} == pytest.approx(factors)


def test_copies_of_the_model_are_left_alone():
    model = Model(1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(balance_groups(model, least=LEAST), lr=0.1)
    balance = LayerBalance(model, optimizer, "llr", every=1, least=LEAST)
    before = copy.deepcopy(average.state_dict())
    train(model, optimizer, 0)
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())
    with pytest.raises(SpecError, match="none of the model's weights is in the optimizer"):
        LayerBalance(average, optimizer, least=LEAST)
    balance.close()
    train(model, optimizer, 1)
    assert balance.steps == 1


def test_several_optimizers_are_one_step():
    model = Model(2)
    parts = [nn.ModuleList([model.embed, model.blocks[0]]), nn.ModuleList([model.blocks[1], model.head])]
    optimizers = [torch.optim.SGD(balance_groups(part, least=LEAST), lr=0.1) for part in parts]
    balance = LayerBalance(parts, optimizers, "tempbalance", every=2, ramp=0, least=LEAST)
    for step in range(4):
        for part, optimizer in zip(parts, optimizers, strict=True):
            train(part, optimizer, step)
    assert balance.steps == 4 and balance.metrics()


def test_megatrons_scheduler_and_wrapped_optimizers():
    megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    model = Model(1)
    optimizer = torch.optim.AdamW(balance_groups(model, least=LEAST), lr=0.01, weight_decay=0.1)
    scheduler = megatron.OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=0.01, min_lr=0.001, lr_warmup_steps=0, lr_decay_steps=100,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=100, wd_incr_style="constant",
    )  # fmt: skip
    wrapped = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer)])  # as Megatron wraps them
    balance = LayerBalance(model, wrapped, "llr", every=2, ramp=2, decay="fixed", least=LEAST)
    rates = used_rates(optimizer)
    for step in range(7):
        scheduler.step(1)
        factors, plain = balance.factors(), scheduler.get_lr({"max_lr": 0.01, "min_lr": 0.001})
        train(model, optimizer, step)
        assert rates[-1] == [
            pytest.approx(plain * factors.get(group["balance"], 1.0)) for group in optimizer.param_groups
        ]
        assert {group["lr"] for group in optimizer.param_groups} == {plain}
    assert max(factors.values()) == 5.0


# What is refused, and with which words.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": "best"}, "rule is 'best'"),
        ({"every": 0}, "every is 0"),
        ({"ramp": 101}, "ramp is 101"),
        ({"rule": "report", "limits": (1, 2)}, "limits is"),
        ({"rule": "llr", "limits": (2, 1)}, "limits is"),
        ({"rule": "llr", "tau": 2.0}, "tau is 2.0"),
        ({"rule": "llr", "strength": (1, 1)}, "strength is"),
        ({"xmin_pos": 1}, "xmin_pos is 1"),
        ({"windows": "square"}, "windows is"),
        ({"windows": "farms", "against": "random"}, "nothing would be left to subtract"),
        ({"trim": 0.1}, "trim is 0.1"),
        ({"decay": "fixed"}, "decay is 'fixed'"),
        ({"fused": {"nothing": (1, 2)}}, "no trained weight of the model ends so"),
        ({"fused": {"q": (1, 2)}}, "sums to 3"),
        ({"least": 1000}, "there is nothing to measure"),
    ],
)
def test_options_are_used_or_refused(options, words):
    model = Model(1)
    with pytest.raises(SpecError, match=words):
        LayerBalance(model, torch.optim.AdamW(model.parameters()), **{"least": LEAST} | options)


def test_optimizers_that_cannot_be_balanced_are_refused():
    model = Model(1)
    with pytest.raises(SpecError, match="balance_groups"):
        LayerBalance(model, torch.optim.AdamW(model.parameters()), "llr", least=LEAST)
    with pytest.raises(SpecError, match="wraps none"):
        LayerBalance(model, object(), least=LEAST)
    with pytest.raises(SpecError, match="which is 0 in every group"):
        groups = balance_groups(model, least=LEAST)
        LayerBalance(model, torch.optim.AdamW(groups, weight_decay=0), "alphadecay", least=LEAST)
    with pytest.raises(SpecError, match="part of the gradient"):
        LayerBalance(model, torch.optim.Adam(balance_groups(model, least=LEAST)), "llr", decay="fixed", least=LEAST)
    with pytest.raises(SpecError, match="are not in the optimizer"):
        LayerBalance(model, torch.optim.AdamW(model.blocks[0].q.parameters()), least=LEAST)


def test_weights_that_cannot_be_read_are_refused():
    with torch.device("meta"):
        empty = Model(1)
    optimizer = torch.optim.SGD(empty.parameters())
    LayerBalance(empty, optimizer, least=LEAST)
    with pytest.raises(SpecError, match="meta device"):
        optimizer.step()
    model = Model(1)
    model.blocks[0].q.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.complex64))
    with pytest.raises(SpecError, match=r"trained as torch\.complex64"):
        LayerBalance(model, torch.optim.SGD(model.parameters()), least=LEAST)
    model = Model(1)
    model.blocks[0].q.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH).to(torch.float8_e4m3fn))
    with pytest.raises(SpecError, match=r"trained as torch\.float8_e4m3fn"):
        LayerBalance(model, torch.optim.SGD(model.parameters()), least=LEAST)
    model = nn.Module()
    model.register_parameter("_flat_param", FlatParameter(torch.zeros(64)))
    with pytest.raises(SpecError, match="flat parameter of FSDP1"):
        LayerBalance(model, torch.optim.SGD(model.parameters()), least=LEAST)


class FlatParameter(nn.Parameter):
    """A parameter as FSDP1 has them: the weights of several layers in one vector."""


def test_gradient_accumulation_counts_steps_of_the_optimizer():
    model = Model(1)
    optimizer = torch.optim.SGD(model.parameters())
    balance = LayerBalance(model, optimizer, every=2, least=LEAST)
    for number in range(6):
        model.head(model.embed(torch.arange(4))).square().sum().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert balance.steps == 2 and balance.metrics()


def test_states_of_another_model_rule_or_scope_are_refused_and_change_nothing():
    state = run(range(9), Model())["balance"]
    model = Model(2)
    optimizer = torch.optim.AdamW(balance_groups(model, least=LEAST), lr=0.01)
    balance = LayerBalance(model, optimizer, "llr", least=LEAST)
    with pytest.raises(StateError, match=r"Only in the state: blocks\.2\.q\.weight .*Only in this model: none"):
        balance.load_state_dict(state)
    with pytest.raises(StateError, match="no state of LayerBalance"):
        balance.load_state_dict({"step": 1})
    own = balance.state_dict()
    with pytest.raises(StateError, match="the rule 'sigmoid'"):
        balance.load_state_dict(own | {"rule": "sigmoid"})
    with pytest.raises(StateError, match="damaged"):
        balance.load_state_dict(own | {"begin": [1.0]})
    blocks = torch.optim.AdamW(balance_groups(model, "block", least=LEAST), lr=0.01)
    with pytest.raises(StateError, match="scope of the saved run"):
        LayerBalance(model, blocks, "llr", least=LEAST).load_state_dict(own)
    assert balance.state_dict() == own
