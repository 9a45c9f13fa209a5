"""samples/s of the local runtime on image-text decode, against a bare two-thread loop over bytes in memory.

The loop uses the identical decoder, sizes and resize, has its images in memory already, and does nothing
else: no reading, no tokens, no packing, no hand-over to another process. Rounds alternate, so that noise of
the machine falls on both sides; the figure is the ratio of the medians.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from tokenizers import Tokenizer, models, pre_tokenizers

import overlord as ol
from benchmarks.measuring import arguments, publish
from overlord.transforms.samples.images import decode_image, resize_image

SIDE = 512
TARGET = 224
THREADS = 2
STEP_SAMPLES = 64


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


def image_job(folder: Path) -> ol.Job:
    """Return the job that reads them."""
    sample = ol.ImageText("jpg", "caption", patch=16, merge=2, size=TARGET)
    return ol.Job(
        sources=[ol.Source("images", str(folder / "*.parquet"), sample=sample)],
        tokenizer=write_tokenizer(folder),
        batch=ol.Batch(2048, global_samples=STEP_SAMPLES, microbatch_tokens=8192),
    )


def bare_loop(images: list[bytes], seconds: float) -> float:
    """Decode and resize with two threads for a while; return samples/s."""

    def work(data: bytes) -> None:
        resize_image(decode_image(data), TARGET, TARGET)

    done, start = 0, time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        while time.perf_counter() - start < seconds:
            chunk = [images[(done + i) % len(images)] for i in range(256)]
            list(pool.map(work, chunk, chunksize=1))
            done += len(chunk)
        return done / (time.perf_counter() - start)


def feed(client: ol.Client, seconds: float) -> float:
    """Consume steps for a while; return samples/s."""
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        step = next(client)
        for batch in step.microbatches:
            batch["pixel_values"].shape  # noqa: B018 - the view is there; its bytes are in shared memory
        done += step.global_samples
    return done / (time.perf_counter() - start)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="overlord-feed-"))
    try:
        images = write_images(folder, 2048)
        loop, ours = [], []
        for _ in range(options.rounds):
            loop.append(bare_loop(images, options.seconds))
            # A service of its own for every round: an idle one would go on prefetching into the loop's round.
            with ol.launch(image_job(folder), threads=THREADS, prefetch=4, cache=str(folder / "cache")) as service:
                client = service.client()
                feed(client, 1.0)
                ours.append(feed(client, options.seconds))
    finally:
        shutil.rmtree(folder)
    ratio = float(np.median(ours) / np.median(loop))
    publish(
        "feed",
        {
            "baseline": "two threads, same decoder and resize, bytes in memory, nothing else",
            "overlord_samples_per_s": float(np.median(ours)),
            "bare_loop_samples_per_s": float(np.median(loop)),
            "ratio": ratio,
            "bar": 0.85,
            "overlord_rounds": ours,
            "bare_loop_rounds": loop,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
