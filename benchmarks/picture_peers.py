"""One side of `benchmarks.pictures`: pictures decoded and resized by two threads of Pillow, of SPDL or of Grain.

It is run as a file, by any interpreter that has the library: `python benchmarks/picture_peers.py spdl FOLDER SECONDS`.
FOLDER holds the pictures and `pictures.json`, which has the file and the width and height to become of each. Bytes are
in memory before a round begins. The last line printed is a list: how often each picture was made, the seconds, and
the seconds of processor time.
"""

from __future__ import annotations

import io
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
WARM_UP_S = 1.0

Picture = tuple[int, bytes, tuple[int, int]]
"""Its number, its bytes, and the width and height that it becomes."""


def read_pictures(folder: Path) -> list[Picture]:
    """Return the pictures of a folder."""
    listed = json.loads((folder / "pictures.json").read_text(encoding="utf-8"))
    return [(number, (folder / name).read_bytes(), (wide, high)) for number, (name, wide, high) in enumerate(listed)]


def with_pillow(picture: Picture) -> int:
    """Decode and resize one picture; transparency is dropped, which costs less than white behind it."""
    from PIL import Image

    number, data, size = picture
    with Image.open(io.BytesIO(data)) as image:
        np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC))
    return number


def pillow(pictures: list[Picture]) -> Generator[int]:
    """Two threads and nothing else."""
    turn, lock, ends = itertools.cycle(pictures), threading.Lock(), threading.Event()
    results: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work() -> None:
        while not ends.is_set():
            with lock:
                picture = next(turn)
            results.put(with_pillow(picture))

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        while True:
            yield results.get()
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def spdl(pictures: list[Picture]) -> Generator[int]:
    """FFmpeg's decoders and scaler in the threads of SPDL's pipeline."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    def work(picture: Picture) -> int:
        number, data, (wide, high) = picture
        filters = spdl.io.get_video_filter_desc(scale_width=wide, scale_height=high, pix_fmt="rgb24")
        spdl.io.to_numpy(spdl.io.load_image(data, filter_desc=filters))
        return number

    builder: Any = PipelineBuilder().add_source(itertools.cycle(pictures)).pipe(work, concurrency=THREADS).add_sink(8)
    pipeline = builder.build(num_threads=THREADS)
    with pipeline.auto_stop():
        yield from pipeline


def grain(pictures: list[Picture]) -> Generator[int]:
    """Pillow in the threads of a Grain dataset."""
    import grain as library

    dataset = library.MapDataset.source(pictures).repeat().map(with_pillow)
    yield from dataset.to_iter_dataset(library.ReadOptions(num_threads=THREADS, prefetch_buffer_size=8))


def count(made: Generator[int], pictures: int, seconds: float) -> tuple[list[int], float, float]:
    """Return how often each picture was made in some seconds, and how long that took by the clock and processors."""
    begin = time.perf_counter() + WARM_UP_S
    done, started, spent = [0] * pictures, 0.0, 0.0
    for number in made:
        now = time.perf_counter()
        if now < begin:
            continue
        if not started:
            started, spent = now, time.process_time()
            continue
        done[number] += 1
        if now - started >= seconds:
            break
    return done, time.perf_counter() - started, time.process_time() - spent


def main() -> None:
    """Measure and print."""
    side, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    pictures = read_pictures(folder)
    sides = {"pillow": pillow, "spdl": spdl, "grain": grain}
    made = sides[side](pictures)
    print(json.dumps(count(made, len(pictures), seconds)), flush=True)
    made.close()


if __name__ == "__main__":
    main()
