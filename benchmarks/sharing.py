"""Sharing: what hosts hold of a step, against loaders that each rank has for itself (figure 14 of the paper).

A dry run of one step of image-text samples on 64 ranks, eight to a host: the share of every host is cut from the
payloads, joined and packed by the code that a service runs, and its bytes are counted. A loader of one rank alone holds
the samples of its data-parallel group with all columns, and the microbatches with all keys, uncut. Bytes are exact, so
there is one round.
"""

from __future__ import annotations

import numpy as np

import overlord as ol
from benchmarks.measuring import arguments, publish
from overlord.core.draw import Buffer, Draw, Limits
from overlord.core.messages import Media, Payload
from overlord.core.place_tree import ranks_of_host
from overlord.core.plan import LoadingPlan, Share, with_labels
from overlord.core.ragged import Ragged, offsets_of
from overlord.core.samples import META
from overlord.planning.checking import run_strategy
from overlord.roles.data_constructor import DataConstructor
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.transforms.microbatches.per_microbatch import MediaShape, PackingJob
from overlord.transforms.microbatches.step_samples import Opening, join_payloads

RANKS, HOSTS, SAMPLES = 64, 8, 256
CONTEXT = 4096
GRID, PATCH_BYTES, MERGE = (1, 16, 16), 588, 2
PP, CP = (1, 2, 4), (1, 2, 4, 8)
BAR = 0.1
"""The most that hosts may hold at pp=4, cp=4, of what loaders of each rank would."""


def step_of() -> tuple[Draw, Payload]:
    """Return a draw of samples of one image and some text, and what their loader hands over."""
    rng = np.random.default_rng(0)
    image = GRID[1] * GRID[2] // MERGE**2
    meta = np.zeros(SAMPLES, META)
    meta["tokens"] = image + rng.lognormal(6.0, 1.0, SAMPLES).clip(16, CONTEXT - image).astype(np.int32)
    meta["loss_tokens"], meta["row"] = meta["tokens"] - image, np.arange(SAMPLES)
    meta["image_tokens"], meta["images"] = image, 1
    offsets = offsets_of(meta["tokens"])
    each, count = GRID[1] * GRID[2] * PATCH_BYTES, np.arange(SAMPLES)
    media = Media(
        kind="image", rows=np.arange(SAMPLES + 1), start=np.zeros(SAMPLES, np.int32),
        length=np.full(SAMPLES, image, np.int32), grids=np.tile(np.array(GRID, np.int32), (SAMPLES, 1)),
        seconds=np.zeros(SAMPLES, np.float32), seeds=count.astype(np.uint64), bad=np.zeros(SAMPLES, np.bool_),
        values=np.ones(SAMPLES * each, np.uint8), begin=count * each, nbytes_of=np.full(SAMPLES, each), encoded=False,
    )  # fmt: skip
    tokens = Ragged(np.ones(int(offsets[-1]), np.int32), offsets)
    loss = Ragged(np.ones(int(offsets[-1]), np.uint8), offsets)
    draw = Draw(0, ("s",), np.zeros(SAMPLES, np.int32), meta, (1.0,))
    return draw, Payload(0, 0, tokens, loss, media)


def held_by(plan: LoadingPlan, payload: Payload, constructor: DataConstructor, ranks: range) -> int:
    """Return the bytes that one host has of a step: samples, and packed microbatches."""
    share = Share.of(plan, ranks)
    samples = join_payloads(plan, [share.cut(payload)], share)
    held = samples.nbytes
    for bucket, microbatch in constructor.bins_of(ranks, plan):
        mine = tuple(rank for rank in ranks if constructor.bucket_of(rank, plan) == bucket)
        held += constructor.constructor_do_plan(plan, samples, bucket, microbatch, _buffer, mine).nbytes
    return held


def held_apart(plan: LoadingPlan, payload: Payload, constructor: DataConstructor) -> int:
    """Return the bytes that loaders of each rank alone have of a step, all ranks together."""
    tree, whole = plan.mesh, join_payloads(plan, [payload])
    assert payload.media is not None
    per_sample = np.diff(payload.tokens.offsets) * 5 + payload.media.nbytes_of
    total = 0
    for bucket in range(plan.num_buckets):
        made = [
            constructor.constructor_do_plan(plan, whole, bucket, m, _buffer).nbytes
            for m in range(plan.num_microbatches)
        ]
        samples = np.unique(np.concatenate([plan.bin(bucket, m).sample for m in range(plan.num_microbatches)]))
        total += (int(per_sample[samples].sum()) + sum(made)) * tree.pp * tree.cp * tree.tp
    return total


def _buffer(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def measure() -> dict[tuple[int, int], tuple[float, float]]:
    """Return, by pp and cp, the bytes of a mean host without and with the sharing."""
    draw, payload = step_of()
    layout = ol.Layout(keys="megatron")
    packing = PackingJob(layout, MediaShape(PATCH_BYTES, MERGE), Opening([None], SerialWorkers()))
    found = {}
    for pp in PP:
        for cp in CP:
            tree = ol.ClientPlaceTree(pp=pp, dp=RANKS // (pp * cp), cp=cp)
            limits = Limits(CONTEXT, 4 * CONTEXT)
            plan = run_strategy(ol.strategies.backbone_balance(), Buffer(draw, limits), tree)
            constructor = DataConstructor(None, packing)  # type: ignore[arg-type]  # nothing is fetched here
            hosts = [ranks_of_host(number, HOSTS, RANKS) for number in range(HOSTS)]
            handed = with_labels(plan, payload)
            shared = sum(held_by(plan, handed, constructor, ranks) for ranks in hosts)
            found[pp, cp] = (held_apart(plan, handed, constructor) / HOSTS, shared / HOSTS)
    return found


def table(found: dict[tuple[int, int], tuple[float, float]]) -> list[str]:
    """Return the lines of the table in the documentation."""
    lines = [
        "| MB a host, apart / shared | " + " | ".join(f"cp={cp}" for cp in CP) + " |",
        "|---" * (len(CP) + 1) + "|",
    ]
    for pp in PP:
        cells = (f"{apart / 1e6:.1f} / {shared / 1e6:.1f}" for cp in CP for apart, shared in [found[pp, cp]])
        lines.append(f"| pp={pp} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    found = measure()
    if not options.json:
        print("\n".join(table(found)))
    figures: dict[str, object] = {f"pp{pp}_cp{cp}": shared / apart for (pp, cp), (apart, shared) in found.items()}
    publish("sharing", {"ratio": figures["pp4_cp4"], "bar": BAR, **figures}, options.json)


if __name__ == "__main__":
    main()
