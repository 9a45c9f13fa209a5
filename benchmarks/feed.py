"""How fast a `local` service feeds with N workers, against N bare processes that do nothing but the same heavy work.

    image-text    512 x 512 JPEGs, decoded and resized to 224. The bare processes have the bytes in memory, and use the
                  same decoder and resize: no reading, no tokens, no packing, no hand-over to another process.
    raw text      texts of 3,000 characters, tokenized by a byte-level BPE of 32,000 tokens. The bare processes call the
                  same tokenizer over texts in memory, many at a time.

Rounds alternate, so that noise of the machine falls on both sides; a figure is the ratio of the means. Virtual cores
may share a real one, two by two, without saying so: two processes then make 1.5 or 1.0 million tokens a second, by
where they happen to run, and a median of such rounds is either the one or the other. The ratio of the medians is told
beside it. N goes up to the cores that there are. PSS is that of the service with all its processes.

Workers are processes, but for two threads that decode images on two cores. Where they are, what the service process
itself spends is measured too: seconds of a processor for each sample or token, over all its threads. Its interpreter
runs one thread at a time, so one service can hand over no more than one second's worth of that in a second, however
many workers it has. On fewer cores the figure is measured with four workers: it counts processor time, and hardly
depends on how many of them run at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import overlord as ol
from benchmarks.measuring import arguments, publish
from benchmarks.plots import draw_by_workers
from overlord.runtimes.supervision.child import usable_cpus
from overlord.transforms.samples.images import decode_image, resize_image

SIDE = 512
TARGET = 224
WORKERS = (2, 4, 8, 16)
TEXT_CHARACTERS = 3000
POOLED = 4
"""Workers with which the service does not compute itself, also on a small machine."""
WARM_UP_S = 3.0
"""Before a round of a service is measured: workers are forked, and what was read ahead is used up."""
AT_ONCE = 32
"""Texts that a bare process tokenizes at a time."""


def write_images(folder: Path, count: int) -> list[bytes]:
    """Write image-text Parquet files; return the JPEGs."""
    rng = np.random.default_rng(0)
    grid = np.linspace(0, 8, SIDE)
    images = []
    for _ in range(64):
        waves = np.sin(grid[:, None] * rng.uniform(0.5, 3) + rng.uniform(0, 6)) * np.cos(grid * rng.uniform(0.5, 3))
        base = waves[..., None] * rng.uniform(30, 90, 3) + 128 + rng.normal(0, 12, (SIDE, SIDE, 3))
        pixels = np.clip(base, 0, 255).astype(np.uint8)
        images.append(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=85, colorspace="RGB"))
    data = [images[i % len(images)] for i in range(count)]
    captions = [f"a picture of number {i} with some words below it" for i in range(count)]
    table = pa.table({"jpg": pa.array(data, pa.binary()), "caption": captions})
    for number in range(4):
        part = table.slice(number * count // 4, count // 4)
        pq.write_table(
            part, folder / f"{number}.parquet", row_group_size=128, use_dictionary=False, write_batch_size=16
        )
    return data


def write_tokenizer(folder: Path) -> str:
    """Write a small word tokenizer."""
    words = ["<unk>", "<image>", *["a", "picture", "of", "number", "with", "some", "words", "below", "it"]]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def image_job(folder: Path, step_samples: int = 64) -> ol.Job:
    """Return the job that reads them."""
    sample = ol.ImageText("jpg", "caption", patch=16, merge=2, size=TARGET)
    return ol.Job(
        sources=[ol.Source("images", str(folder / "*.parquet"), sample=sample)],
        tokenizer=write_tokenizer(folder),
        batch=ol.Batch(2048, global_samples=step_samples, microbatch_tokens=8192),
    )


def write_texts(folder: Path) -> list[str]:
    """Write the sources of Python's library as texts, and a tokenizer that was trained on them; return the texts."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="replace")
        texts += [text[at : at + TEXT_CHARACTERS] for at in range(0, len(text), TEXT_CHARACTERS)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32000, special_tokens=["<eos>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts[:1500], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def text_job(folder: Path, step_samples: int) -> ol.Job:
    """Return the job that reads them."""
    return ol.Job(
        sources=[ol.Source("texts", str(folder / "texts.jsonl"), sample=ol.Text("text"))],
        tokenizer=str(folder / "tokenizer.json"),
        batch=ol.Batch(4096, global_samples=step_samples, microbatch_tokens=16384),
    )


# -- the bare processes ------------------------------------------------------------------------------------------


def decode_some(images: list[bytes]) -> Callable[[int], int]:
    """Return what decodes an image, and says how many samples that are."""

    def work(at: int) -> int:
        resize_image(decode_image(images[at % len(images)]), TARGET, TARGET)
        return 1

    return work


def tokenize_some(texts: list[str], path: str) -> Callable[[int], int]:
    """Return what tokenizes some texts, and says how many tokens that are."""
    tokenizer = Tokenizer.from_file(path)

    def work(at: int) -> int:
        begin = at * AT_ONCE % (len(texts) - AT_ONCE)
        found = tokenizer.encode_batch_fast(texts[begin : begin + AT_ONCE], add_special_tokens=False)
        return sum(len(np.array(one.ids, np.int32)) for one in found)

    return work


def bare_process(kind: str, folder: Path, seconds: float, number: int, start: Barrier, told: Any) -> None:
    """Work for a while, beside the others; tell the rate."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if kind == "image":
        work = decode_some(pq.read_table(folder / "0.parquet")["jpg"].to_pylist())
    else:
        texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
        work = tokenize_some(texts, str(folder / "tokenizer.json"))
    work(0)
    start.wait()
    done, at, began = 0, 97 * number, time.perf_counter()
    while time.perf_counter() - began < seconds:
        done, at = done + work(at), at + 1
    told.put(done / (time.perf_counter() - began))


def bare_processes(kind: str, folder: Path, count: int, seconds: float) -> float:
    """Return the rate of so many processes together."""
    spawn = multiprocessing.get_context("spawn")
    start, told = spawn.Barrier(count), spawn.SimpleQueue()
    given = [(kind, folder, seconds, number, start, told) for number in range(count)]
    processes = [spawn.Process(target=bare_process, args=one) for one in given]
    for process in processes:
        process.start()
    found = sum(told.get() for _ in processes)
    for process in processes:
        process.join()
    return found


# -- overlord ----------------------------------------------------------------------------------------------------


def consume(client: ol.Client, seconds: float, kind: str) -> tuple[int, float]:
    """Consume steps for a while; return how many samples of images or tokens of texts, and the seconds."""
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        step = next(client)
        for batch in step.microbatches:  # the view is there; its bytes are in shared memory
            done += 0 if kind == "image" else batch["input_ids"].size
        done += step.global_samples if kind == "image" else 0
    return done, time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Served:
    """What a service did in one round."""

    per_s: float
    """Samples or tokens a second."""
    pss_mb: float
    """Of all its processes."""
    service_s: float
    """Processor time of the service process for a sample or token."""
    workers_s: float
    """The same of its other processes."""


def served(kind: str, folder: Path, workers: int, seconds: float, steps_for: int = 0) -> Served:
    """Run a service for a while, with steps as large as for so many workers."""
    job = (image_job if kind == "image" else text_job)(folder, 32 * (steps_for or workers))
    # A service of its own for every round: an idle one would go on prefetching into the round of the bare processes.
    with (
        ol.launch(job, threads=workers, prefetch=4, cache=str(folder / "cache")) as service,
        service.client() as client,
    ):
        consume(client, min(WARM_UP_S, seconds), kind)
        root = psutil.Process(service.pid)
        before = [cpu_s([root]), cpu_s(root.children(recursive=True))]
        done, took = consume(client, seconds, kind)
        others = root.children(recursive=True)
        spent = [cpu_s([root]) - before[0], cpu_s(others) - before[1]]
        pss = sum(one.memory_full_info().pss for one in (root, *others)) / 2**20
        return Served(done / took, pss, spent[0] / done, spent[1] / done)


def cpu_s(processes: list[psutil.Process]) -> float:
    """Return the processor time that some processes have had."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def service_cost(kind: str, rounds: list[Served]) -> dict[str, float]:
    """Return what the service process and its workers spend for a unit, and how many units a second that allows."""
    spent = float(np.median([one.service_s for one in rounds]))
    workers = float(np.median([one.workers_s for one in rounds]))
    if workers < spent:  # the service's own threads do the work
        return {}
    scale, unit = (1e3, "ms_per_sample") if kind == "image" else (1e9, "ns_per_token")
    told = {f"service_{unit}": scale * spent, f"workers_{unit}": scale * workers}
    return {**told, "service_limit_per_s": 1 / spent, "service_over_workers": spent / workers}


def compare(kind: str, folder: Path, workers: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Measure bare processes and a service by turns; return the figures of one number of workers."""
    bare, ours = [], []
    for _ in range(rounds):
        bare.append(bare_processes(kind, folder, workers, seconds))
        ours.append(served(kind, folder, workers, seconds))
    rates = [one.per_s for one in ours]
    return {
        "kind": kind, "workers": workers, "bare_per_s": float(np.mean(bare)), "overlord_per_s": float(np.mean(rates)),
        "ratio": float(np.mean(rates) / np.mean(bare)),
        "ratio_of_medians": float(np.median(rates) / np.median(bare)),
        "pss_mb": float(np.median([one.pss_mb for one in ours])), "bare_rounds": bare, "overlord_rounds": rates,
        **service_cost(kind, ours),
    }  # fmt: skip


def plot(rows: list[dict[str, Any]]) -> str:
    """Return the rates by the number of workers as an SVG file."""
    panels = {"image": "image-text, samples/s", "text": "raw text, million tokens/s"}

    def line(kind: str, side: str) -> list[tuple[int, float]]:
        return [(row["workers"], row[side] / (1 if kind == "image" else 1e6)) for row in rows if row["kind"] == kind]

    lines = {
        name: {"overlord": line(kind, "overlord_per_s"), "bare processes": line(kind, "bare_per_s")}
        for kind, name in panels.items()
    }
    return draw_by_workers("What one host feeds, by the number of workers", lines)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--workers", type=int, nargs="+", help="numbers of workers (default: 2, 4, 8, 16, as cores allow)"
    )
    parser.add_argument("--plot", type=Path, help="write the rates by the number of workers to this SVG file")
    options = parser.parse_args()
    counts = options.workers or [count for count in WORKERS if count <= max(usable_cpus(), 2)]
    rows: list[dict[str, Any]] = []
    costs: dict[str, dict[str, float]] = {}
    for kind in ("image", "text"):
        folder = Path(tempfile.mkdtemp(prefix="overlord-feed-"))
        try:
            write_images(folder, 2048) if kind == "image" else write_texts(folder)
            for count in counts:
                row = compare(kind, folder, count, options.seconds, options.rounds)
                rows.append(row)
                if not options.json:
                    print(row, flush=True)
            costs[kind] = {name: value for name, value in rows[-1].items() if name.startswith(("service", "workers_"))}
            if counts[-1] < POOLED:
                more = [served(kind, folder, POOLED, options.seconds) for _ in range(options.rounds)]
                costs[kind] = service_cost(kind, more)
            if not options.json:
                print({"kind": kind, **costs[kind]}, flush=True)
        finally:
            shutil.rmtree(folder)
    if options.plot is not None:
        options.plot.write_text(plot(rows), encoding="utf-8")
    image = [row for row in rows if row["kind"] == "image"]
    text = [row for row in rows if row["kind"] == "text"]
    publish(
        "feed",
        {
            "baseline": "as many bare processes, same decoder, resize and tokenizer, bytes in memory, nothing else",
            "workers": counts,
            "overlord_samples_per_s": image[0]["overlord_per_s"],
            "bare_samples_per_s": image[0]["bare_per_s"],
            "ratio": image[0]["ratio"],
            "bar": 0.85,
            "image_ratios": [row["ratio"] for row in image],
            "text_ratios": [row["ratio"] for row in text],
            "image_from_fewest_to_most_workers": image[-1]["overlord_per_s"] / image[0]["overlord_per_s"],
            "text_from_fewest_to_most_workers": text[-1]["overlord_per_s"] / text[0]["overlord_per_s"],
            "overlord_rounds": image[0]["overlord_rounds"],
            "bare_rounds": image[0]["bare_rounds"],
            "pss_mb": [row["pss_mb"] for row in image],
            **{f"{kind}_{name}": value for kind, cost in costs.items() for name, value in cost.items()},
            "rows": rows,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
