"""A `local` service on two cores against a loop of two threads with the fastest decoder: simplejpeg, OpenCV's resize.

Pictures of many sizes, from 0.1 to 2 megapixels, are read, tokenized, decoded, resized to at most 448 x 448 pixels at
their own aspect ratio, cut into patches, packed and handed to a client. The loop has the bytes in memory, decodes and
resizes them to the same sizes, and does nothing else. Its resize is `INTER_CUBIC`, which looks at 16 pixels however
much a picture shrinks; ours is Pillow's bicubic, which looks at all of them. `jpeg_scaling` is ours with JPEGs decoded
at 1/2, 1/4 or 1/8, an option of the sample.

Without `--pictures` they are crops of noise with the spectrum of photographs (amplitude falls with frequency), so that
a pixel takes about as many bytes as in a photograph. OpenCV comes with the extra `dev`, or by itself:

    python -m pip install opencv-python-headless
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg

import overlord as ol
from benchmarks.feed import consume, write_tokenizer
from benchmarks.measuring import arguments, publish
from overlord.transforms.samples.images import plan_grids

CORES = 2
DISTINCT, ROWS = 96, 1024
PATCH, MOST_PIXELS = 14, 448 * 448


def noise_of_photographs(rng: np.random.Generator, side: int) -> np.ndarray:
    """Return a square of noise with the spectrum of photographs: uint8 [side, side, 3]."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = 1.0
    planes = []
    for _ in range(3):
        phases = np.exp(2j * np.pi * rng.random(frequency.shape))
        plane = np.fft.irfft2(phases / frequency**1.2, (side, side))
        planes.append(plane / plane.std())
    # Colours of a photograph go together: mostly one brightness, and a little of each colour.
    field = np.stack([planes[0] + 0.25 * one for one in planes], axis=-1)
    return np.clip(field * 45 + 120, 0, 255).astype(np.uint8)


def make_pictures() -> list[bytes]:
    """Return JPEGs of many sizes."""
    rng, side = np.random.default_rng(0), 2048
    pixels = noise_of_photographs(rng, side)
    found = []
    for _ in range(DISTINCT):
        size, aspect = np.exp(rng.uniform(np.log(0.1e6), np.log(2e6))), np.exp(rng.uniform(-0.5, 0.5))
        high, wide = (min(int(np.sqrt(size * ratio)), side) for ratio in (aspect, 1 / aspect))
        top, left = (int(rng.integers(0, side - one + 1)) for one in (high, wide))
        crop = np.ascontiguousarray(pixels[top : top + high, left : left + wide])
        quality = int(rng.integers(75, 96))
        found.append(simplejpeg.encode_jpeg(crop, quality=quality, colorspace="RGB", colorsubsampling="420"))
    return found


def sample_of(**more: Any) -> ol.ImageText:
    """Return how a row becomes a sample."""
    return ol.ImageText("jpg", "caption", patch=PATCH, merge=2, max_pixels=MOST_PIXELS, **more)


def job_of(folder: Path, sample: ol.ImageText) -> ol.Job:
    """Return the job that reads the pictures."""
    return ol.Job(
        sources=[ol.Source("pictures", str(folder / "*.parquet"), sample=sample)],
        tokenizer=write_tokenizer(folder),
        batch=ol.Batch(2048, global_samples=64, microbatch_tokens=8192),
    )


def write_pictures(folder: Path, pictures: list[bytes]) -> None:
    """Write the rows of the job."""
    rows = [pictures[n % len(pictures)] for n in range(ROWS)]
    captions = [f"a picture of number {n} with some words below it" for n in range(ROWS)]
    table = pa.table({"jpg": pa.array(rows, pa.binary()), "caption": captions})
    pq.write_table(table, folder / "0.parquet", row_group_size=64, use_dictionary=False, write_batch_size=8)


def loop(pictures: list[bytes], seconds: float) -> float:
    """Return the pictures a second of two threads that decode and resize."""
    import cv2

    cv2.setNumThreads(1)
    sizes = [simplejpeg.decode_jpeg_header(data)[:2] for data in pictures]
    high, wide = (np.array(one, np.int64) for one in zip(*sizes, strict=True))
    none = np.zeros(len(sizes), np.uint64)
    grids = plan_grids(sample_of(), wide, high, none, none.astype(np.bool_))
    targets = [(int(grid[-1]) * PATCH, int(grid[-2]) * PATCH) for grid in grids]
    done = [0] * CORES
    start = threading.Barrier(CORES + 1)
    end = time.perf_counter() + 3600.0

    def work(number: int) -> None:
        at = number * len(pictures) // CORES
        start.wait()
        while time.perf_counter() < end:
            image = simplejpeg.decode_jpeg(pictures[at], "RGB")
            cv2.resize(image, targets[at], interpolation=cv2.INTER_CUBIC)
            at = (at + 1) % len(pictures)
            done[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CORES)]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    end = began + seconds
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def served(job: ol.Job, folder: Path, seconds: float) -> float:
    """Return the samples a second of a service, which is there for this round only."""
    with (
        ol.launch(job, threads=CORES, prefetch=4, cache=str(folder / "cache")) as service,
        service.client() as client,
    ):
        consume(client, 1.0, "image")
        done, took = consume(client, seconds, "image")
        return done / took


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", type=Path, help="a folder of JPEG files to take instead, at least one")
    options = parser.parse_args()
    try:
        import cv2  # noqa: F401
    except ImportError as error:
        sys.exit(f"benchmarks.fastest needs OpenCV ({error}): python -m pip install opencv-python-headless")
    if options.pictures is None:
        pictures = make_pictures()
    else:
        pictures = [
            path.read_bytes() for path in sorted(options.pictures.iterdir()) if path.suffix in (".jpg", ".jpeg")
        ]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # of the service too
    folder = Path(tempfile.mkdtemp(prefix="overlord-fastest-"))
    bare: list[float] = []
    ours: dict[str, list[float]] = {"overlord": [], "jpeg_scaling": []}
    try:
        write_pictures(folder, pictures)
        jobs = {"overlord": job_of(folder, sample_of()), "jpeg_scaling": job_of(folder, sample_of(jpeg_scaling=True))}
        for _ in range(options.rounds):
            bare.append(loop(pictures, options.seconds))
            for name, job in jobs.items():
                ours[name].append(served(job, folder, options.seconds))
    finally:
        shutil.rmtree(folder)
    medians = {name: float(np.median(rounds)) for name, rounds in ours.items()}
    publish(
        "fastest",
        {
            "ratio": medians["overlord"] / float(np.median(bare)),
            "bar": 0.9,
            "ratio_with_jpeg_scaling": medians["jpeg_scaling"] / float(np.median(bare)),
            "overlord_samples_per_s": medians["overlord"],
            "jpeg_scaling_samples_per_s": medians["jpeg_scaling"],
            "loop_samples_per_s": float(np.median(bare)),
            "overlord_rounds": ours["overlord"],
            "jpeg_scaling_rounds": ours["jpeg_scaling"],
            "loop_rounds": bare,
            "kb_of_a_picture": float(np.mean([len(data) for data in pictures])) / 1e3,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
