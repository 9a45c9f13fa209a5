"""What it costs to be able to resume: durable reports, the planning thread, the size of a store over 2,000 steps.

An input, a trainer's report, is made durable by the journal of a store on a local folder; in turns with that a whole
report goes through the planner's host, which also checks it, and the same bytes are written to a file and synced by a
bare loop. Who waits for the disk while steps are planned without feedback is counted by thread. Sizes are those of 306
sources and 256 data-parallel ranks, and of a store of small steps that runs on.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import overlord as ol
from benchmarks.measuring import arguments, publish
from overlord.core.client_messages import Report
from overlord.core.messages import HostNews
from overlord.runtimes.hosts.peers import PLANNER
from overlord.runtimes.hosts.shared_planner import Pace
from overlord.runtimes.launching.inline_service import InlineService
from overlord.runtimes.launching.service_options import ServiceOptions
from overlord.runtimes.transport.direct import CallerEnvironment
from overlord.stores.journal import encode

SOURCES, RANKS = 306, 256
BAR = 1.5


def write_source(path: Path, rows: int = 64) -> Path:
    """Write a small source of token ids."""
    path.write_text("\n".join(json.dumps({"ids": list(range(1, 2 + row % 30))}) for row in range(rows)) + "\n")
    return path


def job_of(path: Path, sources: int, samples: int) -> ol.Job:
    """Return a job over the same small file many times."""
    text = ol.Text("ids", tokenized=True)
    named = [ol.Source(f"a-source-with-a-name-{number:03d}", str(path), sample=text) for number in range(sources)]
    return ol.Job(named, batch=ol.Batch(32, global_samples=samples))


class Hosted:
    """A planner's host in this process, with its writer."""

    def __init__(self, job: ol.Job, folder: Path, name: str, mesh: ol.ClientPlaceTree | None = None) -> None:
        tree = mesh or ol.ClientPlaceTree()
        options = ServiceOptions(mesh=tree, cache=str(folder / "cache"), store=str(folder / name), service=name)
        self.folder = folder / name
        self.service = InlineService(
            job, options, environment=CallerEnvironment(Pace())
        )  # the planner's host has its threads
        self.host = self.service.role(PLANNER).host

    def plan(self, step: int) -> None:
        """Plan a step; the only client is there by now."""
        self.host.plan(step, HostNews({0: step}, {0: step}))

    def nbytes(self) -> int:
        """Bytes of the store."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def measure_reports(folder: Path, rounds: int) -> dict[str, object]:
    """Return the seconds of reports, of what the journal takes of them, and of bare writes of the same bytes."""
    hosted = Hosted(job_of(write_source(folder / "a.jsonl"), 8, 8), folder, "reports")
    journal = hosted.host.planner.checkpoints.store.journal
    metrics = {f"loss/a-source-with-a-name-{number:03d}": 2.0 + number / 7 for number in range(8)}
    found: dict[str, list[float]] = {"report": [], "input": [], "bare": []}
    with (folder / "bare").open("wb", buffering=0) as file:
        for step in range(3 * rounds):
            record = {"kind": "report", "step": step, "metrics": metrics}
            line = encode(record)
            hosted.plan(step)
            time.sleep(0.002)  # the trainer
            # One of them a step, in turns: a second one would find the core and the disk awake, which saves it 50 us.
            began = time.perf_counter()
            if step % 3 == 0:
                hosted.host.ask(Report(step, metrics))
            elif step % 3 == 1:
                journal.append(record, durable=True)
            else:
                file.write(line)
                os.fsync(file.fileno())
            found[("report", "input", "bare")[step % 3]].append(time.perf_counter() - began)
    hosted.service.close()
    median = {name: statistics.median(values) for name, values in found.items()}
    return {
        "ratio": median["input"] / median["bare"],
        "bar": BAR,
        "whole_report_ratio": median["report"] / median["bare"],
        "durable_input_us": 1e6 * median["input"],
        "whole_report_us": 1e6 * median["report"],
        "bare_write_and_sync_us": 1e6 * median["bare"],
        "durable_input_rounds": [1e6 * value for value in found["input"][:: max(1, rounds // 20)]],
        "bare_write_and_sync_rounds": [1e6 * value for value in found["bare"][:: max(1, rounds // 20)]],
    }


def measure_run(folder: Path, steps: int) -> dict[str, object]:
    """Return who waits for the disk while steps are planned without feedback, and the store's size on the way."""
    hosted = Hosted(job_of(write_source(folder / "b.jsonl"), 4, 8), folder, "run")
    waited: list[bool] = []
    here, real = threading.get_ident(), {name: getattr(os, name) for name in ("fsync", "fdatasync")}

    def counted(name: str):
        def sync(descriptor: int) -> None:
            waited.append(threading.get_ident() == here)
            real[name](descriptor)

        return sync

    sizes: dict[int, int] = {}
    for name in real:
        setattr(os, name, counted(name))
    try:
        for step in range(1, steps + 1):
            hosted.plan(step - 1)
            time.sleep(0.002)  # the trainer
            if step in (steps // 4, steps // 2, steps):
                time.sleep(0.5)
                sizes[step] = hosted.nbytes()
    finally:
        for name, function in real.items():
            setattr(os, name, function)
    hosted.service.close()
    return {
        "syncs_while_planning": sum(waited),
        "syncs_beside_it": len(waited) - sum(waited),
        "steps": steps,
        **{
            f"store_bytes_at_{name}": size
            for name, size in zip(("quarter", "half", "end"), sizes.values(), strict=True)
        },
        "store_growth": sizes[steps] / sizes[steps // 2],
    }


def measure_sizes(folder: Path) -> dict[str, object]:
    """Return the bytes of a state and of a snapshot of many sources and ranks, and the time to write one."""
    path = write_source(folder / "c.jsonl", 8)
    hosted = Hosted(job_of(path, SOURCES, 1024), folder, "sizes", ol.ClientPlaceTree(dp=RANKS))
    for step in range(3):
        hosted.plan(step)
    planner = hosted.host.planner
    store = planner.checkpoints.store
    planner.passed(2)
    state = planner.state(2)
    began = time.perf_counter()
    store.save(state, store.journal.mark(), horizon=66)
    seconds = time.perf_counter() - began
    snapshots = sorted((hosted.folder / "lineage-0001").glob("snapshot-*"))
    hosted.service.close()
    return {
        "state_bytes": len(json.dumps(state)),
        "snapshot_bytes": snapshots[-1].stat().st_size,
        "snapshot_ms": 1e3 * seconds,
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="only see that it works")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = {
            **measure_reports(folder, 20 if options.quick else 400),
            **measure_run(folder, 80 if options.quick else 2000),
            **measure_sizes(folder),
        }
    publish("checkpoints", figures, options.json)


if __name__ == "__main__":
    main()
