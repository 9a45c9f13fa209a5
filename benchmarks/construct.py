"""Construction: packing and view cutting against the memory-copy limit, fill at 8k, a step's views against the budget.

1. Tokens/s from payloads to the views of all ranks (joined, packed, labelled, cut for dp x cp ranks, into buffers that
   are reused as shared memory is), against one numpy copy of the same bytes between two warm arrays. One thread on both
   sides, microbatches of 32k tokens a rank; those of 8k beside them.
2. Fill: tokens over room of the microbatches that `strategies.packed()` makes of the demo's lengths at 8k context.
3. The most bytes of views a `local` service holds while a slow trainer consumes, against its budget.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from examples.demo.demo_data import demo_job, write_demo

import overlord as ol
from benchmarks.measuring import arguments, publish
from overlord.core.draw import Buffer, Draw
from overlord.core.messages import Payload
from overlord.core.ragged import Ragged, offsets_of
from overlord.core.samples import META
from overlord.planning.checking import run_strategy
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.runtimes.launching.deployment import limits_of, media_shape
from overlord.transforms.microbatches.per_microbatch import PackingJob
from overlord.transforms.microbatches.step_samples import Opening, join_payloads

CONTEXT = 8192
SOURCES = 8
BAR, BAR_FILL = 0.3, 0.98


def lengths_of_the_demo(files, steps: int, tokens: int) -> list[ol.LoadingPlan]:
    """Return the plans that fill 8k microbatches with what the demo's mixture draws."""
    job = demo_job(files).replace(batch=ol.Batch(CONTEXT, global_tokens=tokens))
    mesh, strategy = ol.ClientPlaceTree(dp=4), ol.strategies.packed()
    with (
        tempfile.TemporaryDirectory() as cache,
        ol.launch(job, mesh=mesh, strategy=strategy, runtime="inline", cache=cache) as service,
    ):
        return [plan for step in range(steps) if (plan := service.plan_raw(step)) is not None]


def fill_of(plan: ol.LoadingPlan, *, dummies: bool = False) -> float:
    """Return tokens over the room of all microbatches that hold any; or of all, with those that keep ranks in step."""
    used = len(plan.bin_offsets) - 1 if dummies else int((np.diff(plan.bin_offsets) > 0).sum())
    return plan.total_tokens / (used * CONTEXT)


def payloads_of(lengths: np.ndarray) -> tuple[Draw, list[Payload]]:
    """Return a draw of text samples over some sources, and what their loaders would hand over."""
    rng = np.random.default_rng(0)
    source = np.sort(rng.integers(0, SOURCES, len(lengths))).astype(np.int32)
    meta = np.zeros(len(lengths), META)
    meta["tokens"], meta["row"] = lengths, np.arange(len(lengths))
    payloads = []
    for number in range(SOURCES):
        mine = lengths[source == number].astype(np.int64)
        values = rng.integers(1, 32_000, int(mine.sum())).astype(np.int32)
        # One source in four holds conversations, of which half the tokens count; of plain text all do.
        loss = (rng.random(len(values) // 64 + 1) < (0.5 if number % 4 == 3 else 1.0)).repeat(64)[: len(values)]
        loss = loss.astype(np.uint8)
        payloads.append(Payload(0, number, Ragged(values, offsets_of(mine)), Ragged(loss, offsets_of(mine))))
    return Draw(0, tuple(f"s{n}" for n in range(SOURCES)), source, meta, (1.0,) * SOURCES), payloads


class Buffers:
    """Buffers that are reused, as the segments of shared memory are."""

    def __init__(self) -> None:
        self._held: list[np.ndarray] = []
        self._next = 0
        self.nbytes = 0

    def begin(self) -> None:
        """Begin another step in the same memory."""
        self._next = self.nbytes = 0

    def __call__(self, nbytes: int) -> np.ndarray:
        if self._next == len(self._held):
            self._held.append(np.zeros(2 * nbytes, np.uint8))
        if len(self._held[self._next]) < nbytes:
            self._held[self._next] = np.zeros(2 * nbytes, np.uint8)
        self._next += 1
        self.nbytes += nbytes
        return self._held[self._next - 1][:nbytes]


def construct(
    lengths: np.ndarray, mesh: ol.ClientPlaceTree, layout: ol.Layout, rounds: int, a_rank: int = 4 * CONTEXT
) -> dict[str, float]:
    """Measure one mesh and layout: seconds a step, and of one copy of the same bytes."""
    batch = ol.Batch(CONTEXT, global_tokens=int(lengths.sum()), microbatch_tokens=a_rank * mesh.cp)
    job = ol.Job([ol.Source("s", "x", sample=ol.Text("ids", tokenized=True))], batch=batch)
    draw, payloads = payloads_of(lengths)
    plan = run_strategy(ol.strategies.packed(), Buffer(draw, limits_of(job, layout, mesh)), mesh)
    packing = PackingJob(layout, media_shape(job), Opening([None] * SOURCES, SerialWorkers()))
    constructor = DataConstructor(None, packing)  # type: ignore[arg-type]  # nothing is fetched here
    bins = constructor.bins_of(range(mesh.world_size), plan)
    buffers = Buffers()

    def build() -> float:
        buffers.begin()
        began = time.perf_counter()
        samples = join_payloads(plan, payloads)
        for bucket, microbatch in bins:
            packed = constructor.constructor_do_plan(plan, samples, bucket, microbatch, buffers)
            for rank in range(mesh.cp * mesh.tp):
                constructor.view_of(rank, plan, packed)
        return time.perf_counter() - began

    build()
    written = buffers.nbytes
    here, there = np.ones(written, np.uint8), np.zeros(written, np.uint8)

    def copy() -> float:
        began = time.perf_counter()
        np.copyto(there, here)
        return time.perf_counter() - began

    copy()
    pairs = [(build(), copy()) for _ in range(rounds)]
    return {
        "ratio": statistics.median(limit / built for built, limit in pairs),
        "tokens_per_s": plan.total_tokens / statistics.median(built for built, _ in pairs),
        "copy_tokens_per_s": plan.total_tokens / statistics.median(limit for _, limit in pairs),
        "written": written,
    }


def peak_of_views(files, budget: int, steps: int, pause_s: float) -> tuple[int, int]:
    """Return the most bytes of views a service held, and the bytes of one step's views, with a slow trainer."""
    job = demo_job(files).replace(batch=ol.Batch(CONTEXT, global_tokens=2**18))
    with (
        tempfile.TemporaryDirectory() as cache,
        ol.launch(job, mesh=ol.ClientPlaceTree(dp=4), cache=cache, budget=budget, prefetch=8) as service,
    ):
        clients = [service.client(rank=rank) for rank in range(4)]
        peak = largest = 0
        for _ in range(steps):
            opened = [next(client) for client in clients]
            step_bytes = 0
            for step in opened:
                for batch in step.microbatches:
                    step_bytes += batch.nbytes
            largest = max(largest, step_bytes)
            began = time.perf_counter()
            while time.perf_counter() - began < pause_s:
                peak = max(peak, service.status()["memory"]["held"]["views"])
                time.sleep(0.02)
            del opened, step, batch
        return peak, largest


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each side")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    scale, tokens = (0.02, 2**18) if options.quick else (0.2, 2**20)
    with tempfile.TemporaryDirectory() as folder:
        files = write_demo(Path(folder), scale=scale)
        plans = lengths_of_the_demo(files, 2 if options.quick else 8, tokens)
        lengths = np.concatenate([plan.draw.meta["tokens"] for plan in plans])[: 2000 if options.quick else 20_000]
        cases = {
            "hf": construct(lengths, ol.ClientPlaceTree(dp=4), ol.Layout("hf"), options.rounds),
            "hf_cp4": construct(lengths, ol.ClientPlaceTree(dp=2, cp=4), ol.Layout("hf"), options.rounds),
            "megatron_cp2": construct(lengths, ol.ClientPlaceTree(dp=2, cp=2), ol.Layout("megatron"), options.rounds),
            "hf_8k": construct(lengths, ol.ClientPlaceTree(dp=4), ol.Layout("hf"), options.rounds, CONTEXT),
            "torchtitan": construct(lengths, ol.ClientPlaceTree(dp=4), ol.Layout("torchtitan"), options.rounds),
        }
        budget = 256 << 20
        peak, one_step = peak_of_views(files, budget, 3 if options.quick else 8, 0.1 if options.quick else 0.5)
    small = cases.pop("hf_8k")
    worst = min(cases, key=lambda name: cases[name]["ratio"])
    figures: dict[str, object] = {
        "ratio": cases[worst]["ratio"],
        "bar": BAR,
        "worst_case": worst,
        "tokens_per_s": cases["hf"]["tokens_per_s"],
        "copy_tokens_per_s": cases["hf"]["copy_tokens_per_s"],
        **{f"ratio_{name}": case["ratio"] for name, case in cases.items()},
        "ratio_hf_microbatches_of_8k": small["ratio"],
        "tokens": int(lengths.sum()),
        "samples": len(lengths),
        "fill": statistics.mean(fill_of(plan) for plan in plans),
        "fill_worst_step": min(fill_of(plan) for plan in plans),
        "fill_with_dummies_at_dp4": statistics.mean(fill_of(plan, dummies=True) for plan in plans),
        "fill_bar": BAR_FILL,
        "views_peak_mb": peak / 2**20,
        "views_of_one_step_mb": one_step / 2**20,
        "budget_mb": budget / 2**20,
        "views_peak_over_budget": peak / budget,
    }
    publish("construct", figures, options.json)


if __name__ == "__main__":
    main()
