"""The step time of each strategy, from every rank's microbatches replayed one after another on one device.

One step of a long-tailed mix is planned for 16 ranks (dp=4, cp=4) by `vanilla`, `backbone_balance` and `hdp`. What each
rank would compute of each of its microbatches, forward and backward, then runs on this device and is timed: the layers
on its own tokens, and its blocks of ring attention with all ranks that share a sequence. The strategies get the cost of
a sequence from four microbatches that are measured before (`ol.costs.fit`).

    measured    the time of every microbatch of every rank, by itself
    computed    the step from these times: ranks that share a microbatch begin it together and end it with the slowest;
                otherwise ranks run free and meet once a step (`step_ms`), or meet in every microbatch (`lockstep_ms`)
    assumed     keys and values arrive while a block computes: nothing is exchanged here, so links are free
                (`not_sent_gb` is what a mean rank would send); embedding, loss, the sum of gradients and the optimizer
                are left out

On a GPU it runs four layers of LLaMA-7B with 8 groups of keys in bfloat16, at most 8k tokens a rank. With `--ring` it
also measures what `benchmarks.ring` does, so that one command has all figures that need a GPU. On a CPU `--quick` shows
that it runs; its times mean nothing there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import overlord as ol
from benchmarks import ring as ring_benchmark
from benchmarks.measuring import arguments, publish
from benchmarks.ring import Layer, device_name, seconds_of
from overlord.core.plan import LoadingPlan
from overlord.integrations.torch_ring import Exchange, Ring, attention_in
from overlord.planning.checking import run_strategy

Pair = tuple[ol.strategies.Strategy, ol.strategies.Strategy]
"""A strategy for ranks that meet once a step, and for ranks that meet in every microbatch."""


def strategies(cost: ol.costs.CostModel) -> dict[str, Pair]:
    """Return what is replayed."""
    balance, hdp, dealt = ol.strategies.backbone_balance, ol.strategies.hdp, ol.strategies.vanilla()
    return {
        "vanilla": (dealt, dealt),
        "backbone_balance": (balance(cost, objective="sum"), balance(cost)),
        "hdp": (hdp(cost), hdp(cost, equal_counts=True)),
    }


@dataclass(frozen=True)
class Size:
    """What is trained on what mesh."""

    tree: ol.ClientPlaceTree
    context: int
    """Tokens of the longest sequence, and of a microbatch of all cp ranks."""
    samples: int
    layers: int


FULL = Size(ol.ClientPlaceTree(dp=4, cp=4), context=32_768, samples=120, layers=4)
QUICK = Size(ol.ClientPlaceTree(dp=2, cp=2), context=128, samples=24, layers=1)


@dataclass(frozen=True)
class Work:
    """What one rank computes of one microbatch."""

    lengths: tuple[int, ...]
    """Of each segment, over all ranks that share it."""
    first: int
    """The first of the ranks that share it, which are neighbours."""
    width: int
    """How many share it."""


class LocalRing(Ring):
    """A ring whose exchanges return what was sent: the kernels of one rank run as they would, on this device alone."""

    def send_on(self, tensor: torch.Tensor) -> Exchange:
        return Exchange([], tensor, tensor)


def long_tail(size: Size) -> list[int]:
    """Return lognormal lengths: most are short, few are as long as the context."""
    rng = np.random.default_rng(0)
    return np.clip(size.context * np.exp(rng.normal(-2.9, 1.4, size.samples)), 8, size.context).astype(int).tolist()


def work_of(plan: LoadingPlan, tree: ol.ClientPlaceTree) -> list[list[Work]]:
    """Return the microbatches of every rank, in order."""
    shared = tree.cp if plan.axis == "DP" else 1
    found: list[list[Work]] = []
    for rank in range(tree.dp * tree.cp):
        bucket, mine = rank // shared, list[Work]()
        for microbatch in range(int(plan.microbatch_counts[bucket])):
            pieces = plan.bin_range(bucket, microbatch)
            lengths = tuple(plan.padded[pieces].tolist()) or (max(plan.pad_multiple, plan.bin_multiple),)
            first, width = bucket * shared, shared
            if plan.cp_sizes is not None and plan.first_ranks is not None and pieces.stop > pieces.start:
                first, width = int(plan.first_ranks[pieces.start]), int(plan.cp_sizes[pieces.start])
            mine.append(Work(lengths, first, width))
        found.append(mine)
    return found


def timed(work: list[list[Work]], size: Size, device: torch.device, rounds: int) -> npt.NDArray[np.float64]:
    """Return the milliseconds of every microbatch: [rank, microbatch], 0 where a rank has none."""
    torch.manual_seed(0)
    kind, width = torch.bfloat16 if device.type == "cuda" else torch.float32, ring_benchmark.HEADS * ring_benchmark.SIZE
    model = nn.Sequential(*(Layer(width) for _ in range(size.layers))).to(device, kind)
    most = max(len(mine) for mine in work)
    found = np.zeros((len(work), most))
    for rank, mine in enumerate(work):
        for number, one in enumerate(mine):
            cu = np.concatenate([[0], np.cumsum(one.lengths)])
            ring = LocalRing(cu, range(one.first, one.first + one.width), rank)
            x = torch.randn(ring.tokens, width, device=device, dtype=kind, requires_grad=True)

            def step(ring: Ring = ring, x: torch.Tensor = x) -> None:
                model.zero_grad()
                with attention_in(ring):
                    model(x).square().mean().backward()

            found[rank, number] = 1e3 * seconds_of(step, device, rounds)
    return found


def step_time(work: list[list[Work]], times: npt.NDArray[np.float64]) -> float:
    """Return when the last rank ends, if ranks wait only for those that they share a microbatch with.

    Shared microbatches have the same number on all their ranks, so by number all of them are met in order.
    """
    clock = np.zeros(len(work))
    for number in range(times.shape[1]):
        blocks = {(mine[number].first, mine[number].width) for mine in work if number < len(mine)}
        for first, width in sorted(blocks):
            ranks = [rank for rank in range(first, first + width) if number < len(work[rank])]
            clock[ranks] = clock[ranks].max() + times[ranks, number].max()
    return float(clock.max())


def exchanged(work: list[list[Work]], layers: int) -> float:
    """Return the bytes that a mean rank would send to its neighbours in rings, in low precision; here nothing is.

    Forward sends keys and values to all others, one rank further each turn; backward does so again, and sends their
    gradients in float32 round the whole ring.
    """
    row = 2 * ring_benchmark.GROUPS * ring_benchmark.SIZE
    shared = [(sum(one.lengths) / one.width, one.width) for mine in work for one in mine if one.width > 1]
    return layers * row * sum(tokens * (2 * 2 * (width - 1) + 4 * width) for tokens, width in shared) / len(work)


def fitted(size: Size, device: torch.device, rounds: int) -> ol.costs.CostModel:
    """Return what a sequence costs on this device, as a user would measure it."""
    most = size.context // size.tree.cp
    packings = [(most,), (most // 8,) * 8, (most // 2,), (most // 16,) * 8]
    times = timed([[Work(lengths, rank, 1)] for rank, lengths in enumerate(packings)], size, device, rounds)
    cost = ol.costs.fit([(lengths, float(ms)) for lengths, ms in zip(packings, times[:, 0], strict=True)])
    print(f"cost of a sequence of s tokens: {cost.alpha:.3g} s^2 + {cost.beta:.3g} s ms", file=sys.stderr, flush=True)
    return cost


def replay(size: Size, device: torch.device, rounds: int, cost: ol.costs.CostModel) -> dict[str, Any]:
    """Replay all strategies; the figures of each are shown when they are there."""
    lengths, figures = long_tail(size), dict[str, Any]()
    buffer = ol.summary_buffer({"web": lengths}, context_length=size.context, microbatch_tokens=size.context)
    ranks = size.tree.dp * size.tree.cp
    told = f"{len(lengths)} sequences, {sum(lengths):,} tokens, {ranks} ranks ({size.tree}), {size.layers} layers"
    print(f"{told}, on {device_name(device)}. Measured: every microbatch of every rank, by itself. Assumed: links are "
          "free, and gradients, optimizer, embedding and loss are left out.", file=sys.stderr, flush=True)  # fmt: skip
    for name, (free, lockstep) in strategies(cost).items():
        work = work_of(run_strategy(free, buffer, size.tree), size.tree)
        times = timed(work, size, device, rounds)
        figures |= {f"{name}_step_ms": step_time(work, times), f"{name}_mean_ms": float(times.sum() / ranks)}
        figures[f"{name}_not_sent_gb"] = exchanged(work, size.layers) / 1e9
        met = times
        if lockstep != free:
            met = timed(work_of(run_strategy(lockstep, buffer, size.tree), size.tree), size, device, rounds)
        figures[f"{name}_lockstep_ms"] = float(met.max(axis=0).sum())
        print("  ".join(f"{key} {value:.4g}" for key, value in figures.items() if key.startswith(name)),
              file=sys.stderr, flush=True)  # fmt: skip
    for name in ("backbone_balance", "hdp"):
        figures[f"{name}_speedup"] = figures["vanilla_step_ms"] / figures[f"{name}_step_ms"]
        figures[f"{name}_lockstep_speedup"] = figures["vanilla_lockstep_ms"] / figures[f"{name}_lockstep_ms"]
    return figures | {"hdp_step_over_mean": figures["hdp_step_ms"] / figures["hdp_mean_ms"], "bar": 1.05}


def main() -> None:
    parser = arguments("The step time of each strategy, every rank's microbatches replayed on one device.")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="only see that it works; its figures mean nothing")
    parser.add_argument("--ring", action="store_true", help="measure what benchmarks.ring does, too")
    options = parser.parse_args()
    device, figures = torch.device(options.device), dict[str, Any]()
    if options.ring:
        tokens = 128 if options.quick else 65_536
        figures |= {f"ring_{k}": v for k, v in ring_benchmark.measure(tokens, device, options.rounds).items()}
    size = QUICK if options.quick else FULL
    cost = ol.costs.llama_12b if options.quick else fitted(size, device, options.rounds)
    figures |= replay(size, device, options.rounds, cost)
    publish("replay", {"device": device_name(device), **figures}, options.json)


if __name__ == "__main__":
    main()
