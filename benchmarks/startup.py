"""Time to the first batch and memory of a `ray` service with 16, 64 and 306 sources, against one actor a source.

Every service starts a cluster of its own. Time is from `launch` to the first microbatch in the hands of the client;
memory is the sum of the proportional set sizes of all processes of the service, those of Ray included. Ours has one
loader host for all sources. One actor a source is measured with 16 and 64 of them: 306 such actors need more memory
than this machine has, and what they would need is given as the line through the two.

`seconds_demo` is the demo's job on a `local` service, eight ranks, from `launch` to the first batch of rank 0, with
the indices of its files and the kernels in their caches: the least of three starts.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import overlord as ol
from benchmarks.measuring import arguments, publish
from overlord.cli.demo import load_generator

COUNTS = (16, 64, 306)
BAR = 3.0
"""Times the memory that one actor a source needs at 64 sources, over ours."""
DEMO_BAR = 3.0
"""Seconds of the demo's start, on two cores that have nothing else to do."""


def job_of(folder: Path, count: int) -> ol.Job:
    """Return a job of so many small sources."""
    rows = "\n".join(json.dumps({"ids": [n] * 200}) for n in range(200))
    sources = []
    for number in range(count):
        path = folder / f"{number:03d}.jsonl"
        path.write_text(rows)
        sources.append(ol.Source(f"s{number:03d}", str(path), sample=ol.Text("ids", tokenized=True), weight=1.0))
    return ol.Job(sources=sources, batch=ol.Batch(1024, global_samples=2 * count))


def start(job: ol.Job, cache: str, **options: Any) -> tuple[float, float, float, int]:
    """Start a service; return seconds to the first batch, MB of all of it, MB of Ray alone, and its processes."""
    began = time.perf_counter()
    with ol.launch(job, runtime="ray", threads=1, cache=cache, **options) as service, service.client() as client:
        next(client).microbatches[0]
        seconds = time.perf_counter() - began
        head = psutil.Process(service._runtime.pid)  # type: ignore[union-attr]
        roles = {one["pid"] for one in service.status()["ray"]["placement"]} | {head.pid}
        share = {p.pid: p.memory_full_info().pss / 2**20 for p in [head, *head.children(recursive=True)]}
        alone = sum(mb for pid, mb in share.items() if pid not in roles)
        return seconds, sum(share.values()), alone, len(share)


def start_demo(folder: Path, scale: float) -> float:
    """Write the demo's data, and return the seconds from `launch` to its first batch."""
    generator = load_generator()
    job = generator.demo_job(generator.write_demo(folder, scale=scale))
    seconds = []
    for _ in range(4):  # the first one indexes the files
        began = time.perf_counter()
        mesh = ol.ClientPlaceTree(dp=2, cp=2, tp=2)
        with ol.launch(job, mesh=mesh, cache=f"{folder}/cache") as service, service.client(0) as client:
            next(client).microbatches[0]
            seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--quick", action="store_true", help="only see that it works; with fewer sources than the figures say"
    )
    options = parser.parse_args()
    counts = (2, 4, 6) if options.quick else COUNTS
    shown = dict(zip(counts, COUNTS, strict=True))
    ours: dict[int, tuple[float, float, float, int]] = {}
    apart: dict[int, tuple[float, float, float, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {count: job_of(Path(folder), count) for count in counts}
        start(jobs[counts[0]], f"{folder}/cache")  # files of Ray and of the kernels are in the page cache from here on
        for count in counts:
            ours[count] = start(jobs[count], f"{folder}/cache")
            if count != counts[-1]:
                apart[count] = start(jobs[count], f"{folder}/cache", loader_hosts="per_source")
        seconds_demo = start_demo(Path(folder) / "demo", 0.1 if options.quick else 1.0)
    few, some, many = counts
    each = (apart[some][1] - apart[few][1]) / (some - few)
    figures: dict[str, object] = {
        "memory_ratio": apart[some][1] / ours[some][1],
        "bar": BAR,
        "time_ratio": apart[some][0] / ours[some][0],
        "seconds_demo": seconds_demo,
        "seconds_demo_bar": DEMO_BAR,
        **{f"seconds_{shown[count]}": ours[count][0] for count in counts},
        **{f"mb_{shown[count]}": ours[count][1] for count in counts},
        "mb_of_ray_itself": ours[few][2],
        "mb_each_further_source": (ours[many][1] - ours[few][1]) / (many - few),
        **{f"seconds_{shown[count]}_actor_a_source": apart[count][0] for count in apart},
        **{f"mb_{shown[count]}_actor_a_source": apart[count][1] for count in apart},
        "mb_each_further_actor": each,
        f"mb_{shown[many]}_actor_a_source_extrapolated": apart[some][1] + each * (many - some),
    }
    publish("startup", figures, options.json)


if __name__ == "__main__":
    main()
