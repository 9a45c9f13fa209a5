"""What a ring and offloading cost on one device: attention alone, a virtual ring of four, and a step of four layers.

    cp1         `ring_attention` of one rank, forward and backward, over torch's own fused attention, by the kernel that
                torch takes for it: cuDNN's on Hopper, which needs 0.6 of the time of the flash kernel
    ring4       all blocks of all four ranks of a ring, one after another, over one call for the whole sequence: what
                cutting and merging cost, without any exchange between devices
    precision   the largest error of the ring in low precision, over that of one call; both against float64
    offload     forward and backward of four layers with half of the activations on the host, over none; and with all
                of them there, of a sequence twice as long

On a GPU it runs in bfloat16 at 64k tokens, as a LLaMA-7B layer with 8 groups of keys. On a CPU `--tokens 512` shows
that it runs; its times mean nothing there.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import arguments, publish
from overlord.integrations.torch_offload import Offloading
from overlord.integrations.torch_ring import (
    Ring,
    add_gradients,
    attention_in,
    backward_block,
    forward_block,
    merge_block,
    ring_attention,
)

HEADS, GROUPS, SIZE, FFN, LAYERS, RANKS = 32, 8, 128, 11_008, 4, 4
BARS = {
    "cp1_over_flash": 1.02,
    "ring4_over_flash": 1.15,
    "error_over_flash": 2.0,
    "offload_0.5_time": 1.03,
    "offload_0.5_peak": 0.73,
    "offload_1_time": 1.05,
}
"""The most that each figure may be at 64k tokens; with all activations on the host, at 128k."""


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median time of some rounds, the first one left out."""
    times: list[float] = []
    for _ in range(rounds + 1):
        _finish(device)
        began = time.perf_counter()
        work()
        _finish(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made(tokens: int, heads: int, device: torch.device, seed: int) -> torch.Tensor:
    """Return random queries, keys or values, the same in every type."""
    random = torch.Generator().manual_seed(seed)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(tokens, heads, SIZE, generator=random).to(device, kind)


def zigzag(tokens: int, place: int, device: torch.device) -> torch.Tensor:
    """Return the tokens of one place of a ring of four."""
    chunks = torch.arange(tokens, device=device).chunk(2 * RANKS)
    return torch.cat([chunks[place], chunks[2 * RANKS - 1 - place]])


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return torch's own attention of one sequence."""
    first = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(*first, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def both_ways(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor) -> None:
    """Run attention forward and backward."""
    for one in inputs:
        one.grad = None
    attend(*inputs).backward(grad)


def virtual_ring(inputs: list[torch.Tensor], grad: torch.Tensor | None) -> list[torch.Tensor]:
    """Compute all blocks of all ranks; return the output of each, with gradients computed where one is given."""
    tokens, device, scale = len(inputs[0]), inputs[0].device, SIZE**-0.5
    index = [zigzag(tokens, place, device) for place in range(RANKS)]
    q, k, v = ([one.detach()[at] for at in index] for one in inputs)
    rings = [Ring([0, tokens], range(RANKS), place) for place in range(RANKS)]
    outs, known = [], []
    for place, ring in enumerate(rings):
        out, lse = forward_block(ring, place, q[place], k[place], v[place], scale)
        out = out.float()
        for of in (other for other in range(RANKS) if other != place):
            merge_block(ring, of, (out, lse), forward_block(ring, of, q[place], k[of], v[of], scale))
        outs.append(out.to(q[0].dtype))
        known.append((grad[index[place]] if grad is not None else out, outs[-1], lse))
    if grad is None:
        return outs
    totals = [[torch.zeros_like(one[at], dtype=torch.float32) for at in range(RANKS)] for one in (q, k, v)]
    for place, ring in enumerate(rings):
        for of in range(RANKS):
            block = backward_block(ring, of, known[place], q[place], k[of], v[of], scale)
            add_gradients(ring, of, (totals[0][place], totals[1][of], totals[2][of]), block)
    return outs


def precision(tokens: int, device: torch.device) -> float:
    """Return the largest error of a ring over that of one call."""
    low = [made(tokens, heads, device, seed) for seed, heads in enumerate((HEADS, GROUPS, GROUPS))]
    exact = fused(*(one.cpu().double() for one in low))
    alone, _ = forward_block(Ring([0, tokens]), 0, *low, SIZE**-0.5)
    parts = virtual_ring(low, None)
    worst = max(
        float((part.cpu().double() - exact[zigzag(tokens, place, torch.device("cpu"))]).abs().max())
        for place, part in enumerate(parts)
    )
    return worst / float((alone.cpu().double() - exact).abs().max())


class Layer(nn.Module):
    """One layer of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, GROUPS * SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (project(y).unflatten(-1, (-1, SIZE)) for project in (self.q, self.k, self.v))
        x = x + self.out(ring_attention(q, k, v).flatten(1))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def offloaded(tokens: int, ratio: float, device: torch.device, rounds: int) -> tuple[float, int, int]:
    """Return the time of forward and backward, the peak of device memory above the weights, and the host memory."""
    torch.manual_seed(0)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = nn.Sequential(*(Layer(HEADS * SIZE) for _ in range(LAYERS))).to(device, kind)
    x = torch.randn(tokens, HEADS * SIZE, device=device, dtype=kind, requires_grad=True)
    offloading, ring = Offloading(), Ring([0, tokens])

    def step() -> None:
        model.zero_grad()
        with attention_in(ring):
            with offloading(ratio):
                loss = model(x).square().mean()
            loss.backward()

    step()  # gradients and host memory are there
    before = 0
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_of(step, device, rounds)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    return seconds, peak, offloading.pool_bytes


def measure(tokens: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Measure attention and offloading; each figure is shown when it is there."""
    figures: dict[str, Any] = {}

    def found(**more: float) -> None:
        figures.update(more)
        print("  ".join(f"{name} {value:.4g}" for name, value in more.items()), file=sys.stderr, flush=True)

    attention(tokens, device, rounds, found)
    for ratio, length in ((0.5, tokens), (1.0, 2 * tokens)):  # computation hides more of longer sequences
        name = f"offload_{ratio:g}"
        plain, plain_peak, _ = offloaded(length, 0.0, device, rounds)
        found(**{f"{name}_without_ms": 1e3 * plain, f"{name}_without_peak_gb": plain_peak / 1e9})
        seconds, peak, host = offloaded(length, ratio, device, rounds)
        found(**{f"{name}_time": seconds / plain, f"{name}_host_gb": host / 1e9})
        if plain_peak:
            found(**{f"{name}_peak": peak / plain_peak})
    allowed = {name: bar for name, bar in BARS.items() if name in figures}
    return figures | {"worst_share_of_what_the_bars_allow": max(figures[n] / bar for n, bar in allowed.items())}


def attention(tokens: int, device: torch.device, rounds: int, found: Callable[..., None]) -> None:
    """Measure attention alone."""
    inputs = [made(tokens, heads, device, seed).requires_grad_() for seed, heads in enumerate((HEADS, GROUPS, GROUPS))]
    grad, ring = made(tokens, HEADS, device, 3), Ring([0, tokens])
    flash = seconds_of(lambda: both_ways(fused, inputs, grad), device, rounds)
    found(flash_ms=1e3 * flash)
    alone = seconds_of(lambda: both_ways(lambda q, k, v: ring_attention(q, k, v, ring), inputs, grad), device, rounds)
    found(cp1_over_flash=alone / flash)
    found(ring4_over_flash=seconds_of(lambda: virtual_ring(inputs, grad), device, rounds) / flash)
    found(error_over_flash=precision(min(tokens, 4096), device))


def main() -> None:
    parser = arguments("What a ring and offloading cost on one device.")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens of the sequence, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    figures = {"tokens": options.tokens, "device": device_name(device)}
    publish("ring", figures | measure(options.tokens, device, options.rounds) | {"bar": 1.0}, options.json)


def device_name(device: torch.device) -> str:
    """Return what a device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    main()
