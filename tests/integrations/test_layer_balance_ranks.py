"""LayerBalance of real processes: whatever cut the weights, the exponents and factors are those of one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from overlord.companions import LayerBalance, balance_groups, spectra
from overlord.companions.sharded import Ranks, pieces_of
from overlord.errors import SpecError

pytestmark = pytest.mark.timeout(300)
LEAST, STEPS, EVERY = 8, 7, 2
CUTS = ("ddp", "fsdp", "columns", "rows", "fsdp x tp", "hsdp", "stages")


class Block(nn.Module):
    """Matrices that four ranks divide evenly, unevenly, and so that one of them has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)
        self.uneven = nn.Linear(21, 30, bias=False)
        self.few = nn.Linear(40, 9, bias=False)  # 3 + 3 + 3 + 0 rows
        self.experts = nn.Parameter(torch.randn(3, 16, 24))


def model_of(weights: dict[str, torch.Tensor] | None = None) -> nn.Module:
    torch.manual_seed(4)
    model = nn.Module()
    model.embed = nn.Embedding(50, 32)
    model.blocks = nn.ModuleList(Block() for _ in range(4))
    model = model.double()
    if weights is not None:
        model.load_state_dict(weights)
    return model


def cut(model: nn.Module, how: str) -> nn.Module:
    world = dist.get_world_size()
    if how == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    elif how in ("columns", "rows", "fsdp x tp"):
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("fsdp", "tp"))
        tp = mesh["tp"] if how == "fsdp x tp" else init_device_mesh("cpu", (world,))
        style = {"columns": ColwiseParallel, "rows": RowwiseParallel}
        for block in model.blocks:
            first = style.get(how, ColwiseParallel)
            parallelize_module(block, tp, {"up": first(), "uneven": first(), "down": style.get(how, RowwiseParallel)()})
            if how == "fsdp x tp":
                fully_shard(block, mesh=mesh["fsdp"])
    elif how == "stages":
        stage = nn.ModuleDict({str(dist.get_rank()): model.blocks[dist.get_rank()]})
        model.blocks = stage
        if dist.get_rank():
            del model.embed
    return model


def run(model: nn.Module, steps: range, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train by gradients that are a function of each weight alone, and return what LayerBalance had in each step."""
    solved: Counter[tuple[int, ...]] = Counter()
    inner = spectra.eigenvalues

    def counted(matrix: torch.Tensor, **options: Any) -> torch.Tensor:
        solved[tuple(matrix.shape)] += 1
        return inner(matrix, **options)

    spectra.eigenvalues = counted
    try:
        optimizer = torch.optim.SGD(balance_groups(model, least=LEAST), lr=0.05)
        balance = LayerBalance(model, optimizer, "llr", every=EVERY, ramp=2, windows=None, least=LEAST)
        if state is not None:
            balance.load_state_dict(state)
        factors, rates = [], []
        for _ in steps:
            factors.append(balance.factors())
            for parameter in model.parameters():
                parameter.grad = parameter.detach().pow(3)
            hook = optimizer.register_step_pre_hook(lambda o, *_: rates.append([g["lr"] for g in o.param_groups]))
            optimizer.step()
            hook.remove()
        names = [name for name, _ in model.named_parameters()]
        return {
            "alphas": balance.alphas(),
            "factors": factors,
            "rates": rates,
            "metrics": balance.metrics(),
            "state": balance.state_dict(),
            "solved": sum(solved.values()),
            "names": names,
            "weights": {
                n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
                for n, p in model.named_parameters()
            },
        }
    finally:
        spectra.eigenvalues = inner


def everything(rank: int) -> dict[str, Any]:
    return {how: run(cut(model_of(), how), range(STEPS)) for how in CUTS} | {"unsharded": unsharded()}


def unsharded() -> str:
    """Make LayerBalance while the weights are gathered, and return why it is refused."""
    model = nn.Linear(32, 64, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(2, 32))
    try:
        LayerBalance(model, optimizer, least=LEAST)
    except SpecError as error:
        return str(error)
    return "accepted"


def test_a_model_whose_weights_are_gathered_is_refused(found):
    for rank in found:
        assert "before its first forward pass" in rank["unsharded"]


def resumed(rank: int, state: dict[str, Any], weights: dict[str, torch.Tensor], first: int) -> dict[str, Any]:
    return run(cut(model_of(weights), "fsdp"), range(first, STEPS), state)


def half(rank: int, steps: int) -> dict[str, Any]:
    return run(cut(model_of(), "fsdp"), range(steps))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(everything, 4, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run(model_of(), range(STEPS))


@pytest.mark.parametrize("how", CUTS)
def test_any_cut_measures_what_one_process_measures(how, found, alone):
    for rank in found:
        result = rank[how]
        assert result["alphas"] == pytest.approx(alone["alphas"], rel=1e-9, abs=1e-9)
        for step, factors in enumerate(result["factors"]):
            assert factors == pytest.approx(alone["factors"][step], rel=1e-8)
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=1e-9)
    assert set(alone["factors"][-1].values()) - {1.0, 5.0}, "the factors differ, or nothing was compared"


@pytest.mark.parametrize("how", CUTS)
def test_all_ranks_have_the_same_bits(how, found):
    first, *others = [rank[how] for rank in found]
    for other in others:
        assert other["factors"] == first["factors"] and other["state"] == first["state"]
        assert how == "stages" or other["rates"] == first["rates"]


@pytest.mark.parametrize("how", CUTS)
def test_each_matrix_is_solved_once(how, found, alone):
    assert sum(rank[how]["solved"] for rank in found) == alone["solved"] > 0
    assert how == "stages" or all(rank[how]["solved"] for rank in found), "every rank takes part"


@pytest.mark.slow
def test_a_state_of_four_ranks_continues_on_two(tmp_path, found):
    for first in (3, 4):
        saved = run_ranks(half, 4, tmp_path / f"four{first}", first)[0]
        two = run_ranks(resumed, 2, tmp_path / f"two{first}", saved["state"], saved["weights"], first)
        whole = found[0]["fsdp"]
        for rank in two:
            assert rank["factors"] == [pytest.approx(f, rel=1e-9) for f in whole["factors"][first:]]
            assert rank["factors"][0] == whole["factors"][first], "bit for bit, as they come from the state"
            assert rank["alphas"] == pytest.approx(whole["alphas"], rel=1e-9)


def test_a_large_model_is_dealt_evenly():
    """The 224 matrices of a 7B model over 8 to 64 ranks: no rank has 1.15 of the even share."""
    with torch.device("meta"):
        layers = nn.ModuleList()
        for _ in range(32):
            layer = nn.Module()
            for name in "qkvo":
                setattr(layer, name, nn.Linear(4096, 4096, bias=False))
            layer.gate, layer.up = (nn.Linear(4096, 11008, bias=False) for _ in range(2))
            layer.down = nn.Linear(11008, 4096, bias=False)
            layers.append(layer)
    from overlord.companions.measured import weights_of

    weights = weights_of(layers)
    assert len(weights.measured) == 224
    for count in (1, 8, 16, 32, 64):
        ranks = SomeRanks(count)
        pieces = pieces_of(weights.measured, weights.parameters, ranks)
        loads = Counter()
        for piece in pieces:
            loads[piece.owner] += piece.weight.cost
        even = sum(loads.values()) / count
        assert max(loads.values()) <= 1.15 * even


class SomeRanks(Ranks):
    """Ranks that all have the whole model, of which this process is the first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def everyones(self, mine: Any) -> list[Any]:
        return [mine] * self.count


def test_parts_that_do_not_make_up_a_weight_are_refused():
    class Torn(SomeRanks):
        def everyones(self, mine: Any) -> list[Any]:
            weight, dtype, _ = mine[0]
            return [[(weight, dtype, ((0, 0), (3, 32)))], [(weight, dtype, ((4, 0), (60, 32)))]]

    from overlord.companions.measured import weights_of

    weights = weights_of(model_of(), least=LEAST)
    with pytest.raises(SpecError, match="do not make up"):
        pieces_of(weights.measured[:1], weights.parameters, Torn(2))


def test_a_megatron_parameter_that_is_cut_is_refused():
    model = model_of()
    weight = model.blocks[0].up.weight
    weight.tensor_model_parallel, weight.partition_dim = True, 0
    with pytest.raises(SpecError, match="cut over tensor parallel ranks by Megatron"):
        LayerBalance(model, torch.optim.SGD(model.parameters()), least=LEAST)
