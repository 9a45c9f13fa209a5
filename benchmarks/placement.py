"""Where decoding runs: bytes handed over and samples/s with `placement` auto, loader and constructor, in one run.

The image sources of the demo (JPEG in Parquet and tar shards) are fed by a `local` service to two data-parallel ranks
in this process, the same steps each time, in turns. Bytes are what the SourceLoaders hand to the DataConstructor; with
"loader" these are decoded patches, with "constructor" the files' own bytes. All three must give the same batches.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from examples.demo.demo_data import demo_job, write_demo

import overlord as ol
from benchmarks.measuring import arguments, publish

PLACEMENTS = ("loader", "auto", "constructor")
BAR = 0.5


def image_job(files, steps: int, samples: int) -> ol.Job:
    """Return the demo's job with its image sources alone."""
    job = demo_job(files)
    sources = [source.replace(weight=1.0) for source in job.sources if isinstance(source.sample, ol.ImageText)]
    return job.replace(
        sources=sources, mixture=ol.Mixture(), batch=ol.Batch(4096, global_samples=samples), max_steps=steps
    )


def run(job: ol.Job, placement: str, cache: str) -> tuple[float, int, str]:
    """Consume all steps; return samples/s, bytes handed over, and the chained digest of what came."""
    with ol.launch(job, mesh=ol.ClientPlaceTree(dp=2), placement=placement, cache=cache) as service:
        clients = [service.client(rank=rank) for rank in range(2)]
        digests: list[str] = []
        samples = 0
        began = 0.0
        for steps in zip(*clients, strict=True):
            if not began:
                began = time.perf_counter()  # the launch and the first step are not counted
            else:
                samples += steps[0].global_samples
            for step in steps:
                digests += [batch.digest() for batch in step.microbatches]
        seconds = time.perf_counter() - began
        handed = sum(source["handed_over_bytes"] for source in service.status()["sources"].values())
    return samples / seconds, handed, "".join(digests)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each placement")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    steps, samples = (4, 16) if options.quick else (25, 64)
    rates: dict[str, list[float]] = {name: [] for name in PLACEMENTS}
    handed: dict[str, int] = {}
    contents: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        job = image_job(write_demo(Path(folder), scale=0.02 if options.quick else 0.1), steps, samples)
        for name in PLACEMENTS:
            run(job.replace(max_steps=2), name, f"{folder}/cache")
        for _ in range(1 if options.quick else options.rounds):
            for name in PLACEMENTS:
                rate, handed[name], content = run(job, name, f"{folder}/cache")
                rates[name].append(rate)
                contents.add(content)
    if len(contents) != 1:
        raise SystemExit("the placements gave different batches")
    median = {name: statistics.median(rates[name]) for name in PLACEMENTS}
    count = steps * samples
    figures: dict[str, object] = {
        "bytes_ratio": handed["auto"] / handed["loader"],
        "bar": BAR,
        "auto_mb_handed_over": handed["auto"] / 2**20,
        "loader_mb_handed_over": handed["loader"] / 2**20,
        "constructor_mb_handed_over": handed["constructor"] / 2**20,
        "auto_kb_per_sample": handed["auto"] / count / 1024,
        "loader_kb_per_sample": handed["loader"] / count / 1024,
        "samples_per_s_ratio": statistics.median(a / b for a, b in zip(rates["auto"], rates["loader"], strict=True)),
        **{f"{name}_samples_per_s": median[name] for name in PLACEMENTS},
        **{f"{name}_rounds": rates[name] for name in PLACEMENTS},
        "same_batches": True,
    }
    publish("placement", figures, options.json)


if __name__ == "__main__":
    main()
