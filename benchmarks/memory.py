"""Memory of one host: a service with 306 sources that are all drawn, and four trainer processes, at the default budget.

Figures are PSS: pages that processes share are divided among them, so that the sum is what the host gives. Each part is
split by kind: libraries, shared memory (views of steps ahead, rows on their way to workers) and heaps, of which rows
read ahead are told apart. Workers and reader processes are counted. The same
with one source of text shows what is there without them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from benchmarks.feed import write_images, write_tokenizer
from benchmarks.measuring import arguments, publish

SOURCES, RANKS, STEPS = 306, 4, 12


def write_sources(folder: Path, count: int) -> ol.Job:
    """Write sources of three kinds, a sixth of them pictures; return the job that mixes them."""
    rng = np.random.default_rng(0)
    words = np.array(["a", "picture", "of", "number", "with", "some", "words", "below", "it"])
    pictures = folder / "pictures"
    pictures.mkdir()
    write_images(pictures, 64)
    image = ol.ImageText("jpg", "caption", patch=16, merge=2, size=224)
    sources: list[ol.Source] = []
    for number in range(count):
        name = f"s{number:03d}"
        if number % 6 == 0:
            path = folder / f"{name}.parquet"
            shutil.copy(pictures / f"{number // 6 % 4}.parquet", path)
            sources.append(ol.Source(name, str(path), sample=image))
        elif number % 2:
            path = folder / f"{name}.jsonl"
            texts = [" ".join(rng.choice(words, int(n))) for n in rng.integers(20, 600, 200)]
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            sources.append(ol.Source(name, str(path), sample=ol.Text("text")))
        else:
            path = folder / f"{name}.parquet"
            ids = [rng.integers(0, 9, int(n)).astype(np.int32) for n in rng.integers(20, 2000, 200)]
            pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), path, row_group_size=50)
            sources.append(ol.Source(name, str(path), sample=ol.Text("ids", tokenized=True)))
    batch = ol.Batch(8192, global_tokens=RANKS * 4 * 8192)
    return ol.Job(sources=sources, tokenizer=write_tokenizer(folder), batch=batch)


def pss_mb(process: psutil.Process) -> float:
    """Return what a process takes, in MB."""
    return process.memory_full_info().pss / 2**20


def by_kind(processes: list[psutil.Process]) -> dict[str, float]:
    """Return what processes take together, in MB: of libraries, of shared memory (views, rows of workers), of heaps."""
    found = {"libraries": 0.0, "shared_memory": 0.0, "heap": 0.0}
    for process in processes:
        for mapped in process.memory_maps(grouped=True):
            shared, named = mapped.path.startswith("/memfd:"), mapped.path.startswith("/")
            found["shared_memory" if shared else "libraries" if named else "heap"] += mapped.pss / 2**20
    return found


TRAINER = """
import sys
import overlord as ol
with ol.connect(sys.argv[1], rank=int(sys.argv[2])) as client:
    for _ in range(int(sys.argv[3])):
        for batch in next(client).microbatches:
            float(batch["input_ids"].sum())
    print("done", flush=True)
    sys.stdin.readline()
"""


def measure(job: ol.Job, cache: str, **options: int) -> dict[str, float]:
    """Launch a service with trainers, and return where the memory is."""
    with ol.launch(job, mesh=ol.ClientPlaceTree(dp=RANKS), cache=cache, **options) as service:
        trainers = [
            subprocess.Popen(
                [sys.executable, "-c", TRAINER, service.address, str(rank), str(STEPS)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        for trainer in trainers:
            assert trainer.stdout is not None and trainer.stdout.readline() == "done\n"
        status = service.status()
        root = psutil.Process(status["pid"])
        below = root.children(recursive=True)
        figures = {
            "service_mb": pss_mb(root),
            "workers_mb": sum(map(pss_mb, below)),
            "worker_processes": float(len(below)),
            "trainers_mb": sum(pss_mb(psutil.Process(trainer.pid)) for trainer in trainers),
            "read_buffers_mb": sum(one["buffer_bytes"] for one in status["sources"].values()) / 2**20,
        }
        people = [psutil.Process(trainer.pid) for trainer in trainers]
        figures |= {f"service_{kind}_mb": mb for kind, mb in by_kind([root]).items()}
        figures |= {f"workers_{kind}_mb": mb for kind, mb in by_kind(below).items()}
        figures |= {f"trainers_{kind}_mb": mb for kind, mb in by_kind(people).items()}
        for trainer in trainers:
            trainer.communicate("end\n")
    return figures | {"all_mb": figures["service_mb"] + figures["workers_mb"] + figures["trainers_mb"]}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sources", type=int, default=SOURCES)
    parser.add_argument("--threads", type=int, default=None, help="as of launch")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="overlord-memory-"))
    more = {} if options.threads is None else {"threads": options.threads}
    try:
        job = write_sources(folder, options.sources)
        few = measure(job.replace(sources=job.sources[1:2]), str(folder / "cache"), **more)
        many = measure(job, str(folder / "cache"), **more)
    finally:
        shutil.rmtree(folder)
    publish("memory", {"bar_mb": 700.0, **many, "all_mb_of_one_source": few["all_mb"]}, options.json)


if __name__ == "__main__":
    main()
