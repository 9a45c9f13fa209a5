"""Memory of each further idle source: a service with 10 and with 306 open Parquet sources, one of them drawn.

Every file has 1,000 row groups x 20 columns. All sources are opened and indexed; the figure is the difference
of the service's PSS divided by the number of further sources, against what pyarrow's own footer of the same file holds.
"""

from __future__ import annotations

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
from benchmarks.measuring import arguments, publish

ROW_GROUPS = 1_000
COLUMNS = 20
FEW, MANY = 10, 306

_FOOTER = """
import psutil, sys
import pyarrow.parquet as pq
pss = lambda: psutil.Process().memory_full_info().pss
before = pss()
held = [pq.read_metadata(sys.argv[1]) for _ in range(8)]
print((pss() - before) / 8 / 2**20)
"""


def write_sources(folder: Path, count: int) -> None:
    """Write one file and copy it."""
    first = folder / "000.parquet"
    columns = {f"c{i}": np.arange(ROW_GROUPS * 2) for i in range(COLUMNS - 1)}
    ids = pa.array([[i, i + 1, i + 2] for i in range(ROW_GROUPS * 2)], pa.list_(pa.int32()))
    pq.write_table(pa.table({"ids": ids, **columns}), first, row_group_size=2)
    for number in range(1, count):
        shutil.copy(first, folder / f"{number:03d}.parquet")


def service_pss(folder: Path, count: int, step_samples: int) -> float:
    """Return the PSS of a service with so many sources after some steps, in MB."""
    sources = [
        ol.Source(f"s{n:03d}", str(folder / f"{n:03d}.parquet"), sample=ol.Text("ids", tokenized=True), weight=1.0)
        for n in range(count)
    ]
    # Everything is drawn once, so that every source is open and indexed; then only the first goes on.
    once = {s.name: 1.0 for s in sources}
    job = ol.Job(
        sources=[s.replace(weight=None) for s in sources],
        mixture=ol.Mixture.stages([(0, once), (1, {"s000": 1.0})]),
        batch=ol.Batch(16, global_samples=step_samples),
    )
    with ol.launch(job, cache=str(folder / "cache"), budget=32 << 20) as service:
        client = service.client()
        for _ in range(6):
            for batch in next(client).microbatches:
                batch["input_ids"].shape  # noqa: B018
        return psutil.Process(service.status()["pid"]).memory_full_info().pss / 2**20


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sources", type=int, default=MANY, help="sources of the larger service")
    options = parser.parse_args()
    most = options.sources
    folder = Path(tempfile.mkdtemp(prefix="overlord-idle-"))
    try:
        write_sources(folder, most)
        footer = float(
            subprocess.run(
                [sys.executable, "-c", _FOOTER, str(folder / "000.parquet")], capture_output=True, text=True, check=True
            ).stdout
        )
        service_pss(folder, most, most)  # builds the indices, so that both runs find them
        few, many = service_pss(folder, FEW, most), service_pss(folder, most, most)
    finally:
        shutil.rmtree(folder)
    each = (many - few) / (most - FEW)
    publish(
        "idle",
        {
            "baseline": "pyarrow FileMetaData of the same file, held open",
            "mb_each_further_source": each,
            "mb_each_footer_held": footer,
            "ratio": each / footer,
            "bar_mb": 0.1,
            "sources": [FEW, most],
            "service_mb": [few, many],
        },
        options.json,
    )


if __name__ == "__main__":
    main()
