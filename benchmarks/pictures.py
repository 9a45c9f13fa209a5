"""Pictures as people have them: a `local` service on two cores against two threads of Pillow, SPDL and Grain.

Five sources, mostly PNG, from 256 to 1,600 pixels a side: photographs as JPEG and as PNG, screenshots, drawings with
transparency, diagrams with a palette. All sides decode and resize the same files to the same sizes, at most 448 x 448,
in uint8. The service also reads, tokenizes, puts what is transparent on white, packs and hands over; the others have
the bytes in memory and drop transparency. Pictures differ in cost by a factor of a hundred, so a rate is work, not
pictures: each counts for the processor time that Pillow takes for it.

SPDL and Grain are measured where the interpreter given as `--peers` has them. SPDL needs the libraries of FFmpeg 4 to
9 (`apt-get install ffmpeg`, or `LD_LIBRARY_PATH`):

    python -m venv /tmp/peers && /tmp/peers/bin/pip install spdl==0.8.0 grain==0.2.18 pillow
    python -m benchmarks.pictures --peers /tmp/peers/bin/python
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models

import overlord as ol
from benchmarks import picture_peers
from benchmarks.fastest import noise_of_photographs
from benchmarks.feed import cpu_s
from benchmarks.measuring import arguments, publish
from overlord.transforms.samples.images import plan_grids

CORES = picture_peers.THREADS
TIMES = 4
"""Rows with the same picture in an epoch."""
LEAST_SIDE, MOST_SIDE = 256, 1600
PATCH, MOST_PIXELS = 14, 448 * 448
SAMPLE = ol.ImageText("picture", "caption", patch=PATCH, merge=2, max_pixels=MOST_PIXELS)
PEERS = ("spdl", "grain")


# -- the pictures ------------------------------------------------------------------------------------------------


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    """Return the file of a picture."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def photograph(field: npt.NDArray[np.uint8], size: tuple[int, int], rng: np.random.Generator) -> Image.Image:
    """Return a part of a field of noise."""
    left, top = (int(rng.integers(0, most - side + 1)) for most, side in zip(field.shape[1::-1], size, strict=True))
    return Image.fromarray(field[top : top + size[1], left : left + size[0]])


def drawing(size: tuple[int, int], rng: np.random.Generator, background: tuple[int, ...]) -> Image.Image:
    """Return shapes and lines of text with smooth edges, on a background of one colour."""
    double = (2 * size[0], 2 * size[1])
    image = Image.new("RGBA", double, background)
    pen = ImageDraw.Draw(image)
    for number in range(40):
        left, top = (int(rng.integers(0, side)) for side in double)
        wide, high = (int(rng.integers(8, 600)) for _ in range(2))
        colour = (*(int(part) for part in rng.integers(0, 256, 3)), 255)
        if number % 4 == 3:
            pen.multiline_text((left, top), "some words of a label\n" * 5, fill=colour, font_size=28)
        elif number % 2:
            pen.ellipse([left, top, left + wide, top + high], fill=colour)
        else:
            pen.rounded_rectangle([left, top, left + wide, top + high], 12, fill=colour, outline=(60, 60, 60, 255))
    return image.resize(size, Image.Resampling.LANCZOS)


def make_pictures(distinct: int) -> dict[str, list[bytes]]:
    """Return so many files for each source."""
    rng = np.random.default_rng(0)
    field = noise_of_photographs(rng, 2048)
    white, nothing = (255, 255, 255, 255), (0, 0, 0, 0)
    levels = (1, 6, 9)  # as programs save PNGs: quickly, by default, small

    def size() -> tuple[int, int]:
        wide, high = np.exp(rng.uniform(np.log(LEAST_SIDE), np.log(MOST_SIDE), 2)).astype(int)
        return int(wide), int(high)

    def photographs(number: int) -> bytes:
        return saved(photograph(field, size(), rng), "JPEG", quality=75 + number % 21)

    def lossless(number: int) -> bytes:
        return saved(photograph(field, size(), rng), "PNG", compress_level=levels[number % 3])

    def screenshots(number: int) -> bytes:
        return saved(drawing(size(), rng, white).convert("RGB"), "PNG", compress_level=levels[number % 3])

    def transparent(number: int) -> bytes:
        shape = drawing(size(), rng, nothing)
        if number % 4 == 3:  # a photograph that was cut out
            cut = photograph(field, shape.size, rng)
            cut.putalpha(shape.getchannel("A"))
            shape = cut
        return saved(shape, "PNG", compress_level=levels[number % 3])

    def diagrams(number: int) -> bytes:
        image = drawing(size(), rng, white).convert("RGB").quantize((16, 64, 256)[number % 3])
        return saved(image, "PNG", **({"transparency": 0} if number % 2 else {}))

    kinds: list[Callable[[int], bytes]] = [photographs, lossless, screenshots, transparent, diagrams]
    return {kind.__name__: [kind(number) for number in range(distinct)] for kind in kinds}


def write_pictures(folder: Path, sources: dict[str, list[bytes]]) -> list[picture_peers.Picture]:
    """Write files for the peers and Parquet files for the job; a caption is the number of its picture."""
    files = [data for pictures in sources.values() for data in pictures]
    sizes = [Image.open(io.BytesIO(data)).size for data in files]
    wide, high = np.array(sizes, np.int64).T
    none = np.zeros(len(files), np.uint64)
    grids = (plan_grids(SAMPLE, wide, high, none, none.astype(np.bool_))[:, :0:-1] * PATCH).tolist()
    for number, data in enumerate(files):
        (folder / f"{number}.picture").write_bytes(data)
    # The peers take a picture of each source in turn.
    order = np.arange(len(files)).reshape(len(sources), -1).T.ravel().tolist()
    listed = [[f"{number}.picture", *grids[number]] for number in order]
    (folder / "pictures.json").write_text(json.dumps(listed), encoding="utf-8")
    at = 0
    for name, pictures in sources.items():
        captions = [f"p{order.index(at + number)}" for number in range(len(pictures))]
        table = pa.table({"picture": pa.array(pictures * TIMES, pa.binary()), "caption": captions * TIMES})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=16, use_dictionary=False, write_batch_size=4)
        at += len(pictures)
    return picture_peers.read_pictures(folder)


def cost_of(picture: picture_peers.Picture) -> float:
    """Return the processor time of Pillow for a picture."""
    times = []
    for _ in range(3):
        began = time.process_time()
        picture_peers.with_pillow(picture)
        times.append(time.process_time() - began)
    return min(times)


# -- the sides ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """What one side did: work is in seconds of Pillow."""

    work_per_s: float
    work_per_cpu_s: float
    pictures_per_s: float


def round_of(done: list[int], seconds: float, spent: float, costs: list[float]) -> Round:
    """Return what was done in some seconds of the clock and of processors."""
    work = float(np.dot(done, costs))
    return Round(work / seconds, work / spent, sum(done) / seconds)


def job_of(folder: Path, sources: list[str], pictures: int) -> ol.Job:
    """Return the job that reads the sources by turns."""
    words = {"<unk>": 0, "<image>": 1, **{f"p{number}": number + 2 for number in range(pictures)}}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    return ol.Job(
        sources=[ol.Source(name, str(folder / f"{name}.parquet"), sample=SAMPLE, weight=1.0) for name in sources],
        tokenizer=str(folder / "tokenizer.json"),
        batch=ol.Batch(2048, global_samples=40, microbatch_tokens=8192),
    )


def served(job: ol.Job, folder: Path, seconds: float, costs: list[float]) -> Round:
    """Return what a service does, which is there for this round only."""
    done = np.zeros(len(costs), np.int64)
    with (
        ol.launch(job, threads=CORES, prefetch=4, cache=str(folder / "cache")) as service,
        service.client() as client,
    ):
        root = psutil.Process(service.pid)

        def consume(seconds: float) -> tuple[float, float]:
            done[:] = 0
            start, spent = time.perf_counter(), time.process_time() + cpu_s([root, *root.children(recursive=True)])
            while time.perf_counter() - start < seconds:
                for batch in next(client).microbatches:
                    tokens = np.asarray(batch["input_ids"]).reshape(-1)
                    done[:] += np.bincount(tokens[tokens > 1] - 2, minlength=len(done))
            spent = time.process_time() + cpu_s([root, *root.children(recursive=True)]) - spent
            return time.perf_counter() - start, spent

        consume(3 * picture_peers.WARM_UP_S)
        took = consume(seconds)
    return round_of(done.tolist(), *took, costs)


def other(side: str, python: str, folder: Path, seconds: float, costs: list[float]) -> Round | str:
    """Return what a peer does in a process of its own, or why it cannot."""
    command = [python, picture_peers.__file__, side, str(folder), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"not measured: {done.stderr.strip().splitlines()[-1]}"
    return round_of(*json.loads(done.stdout.splitlines()[-1]), costs)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--distinct", type=int, default=16, help="pictures of a source")
    parser.add_argument("--peers", default=sys.executable, help="the interpreter that has SPDL and Grain")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # of the service and the peers too
    folder = Path(tempfile.mkdtemp(prefix="overlord-pictures-"))
    rounds: dict[str, list[Round]] = {}
    missing: dict[str, str] = {}
    try:
        sources = make_pictures(options.distinct)
        pictures = write_pictures(folder, sources)
        costs = [cost_of(picture) for picture in pictures]
        job = job_of(folder, list(sources), len(pictures))
        for _ in range(options.rounds):
            for side in ("pillow", "overlord", *PEERS):
                if side in missing:
                    continue
                if side == "overlord":
                    result: Round | str = served(job, folder, options.seconds, costs)
                else:
                    python = sys.executable if side == "pillow" else options.peers
                    result = other(side, python, folder, options.seconds, costs)
                if isinstance(result, str):
                    missing[side] = result
                else:
                    rounds.setdefault(side, []).append(result)
    finally:
        shutil.rmtree(folder)
    rates = {side: [one.work_per_s for one in several] for side, several in rounds.items()}
    work = {side: float(np.median(several)) for side, several in rates.items()}
    paid = {side: float(np.median([one.work_per_cpu_s for one in several])) for side, several in rounds.items()}
    counts = {side: float(np.median([one.pictures_per_s for one in several])) for side, several in rounds.items()}
    against = [side for side in ("pillow", *PEERS) if side in work]
    publish(
        "pictures",
        {
            **{f"ratio_to_{side}": work["overlord"] / work[side] for side in against},
            "bar": 1.0,
            **{f"cpu_ratio_to_{side}": paid["overlord"] / paid[side] for side in against},
            **{f"{side}_pictures_per_s": counts[side] for side in work},
            **{f"{side}_work_per_s": work[side] for side in work},
            **{f"{side}_rounds": rates[side] for side in work},
            **missing,
            "kb_of_a_picture": float(np.mean([len(data) for _, data, _ in pictures])) / 1e3,
            "pillow_ms_of_a_picture": 1e3 * float(np.mean(costs)),
        },
        options.json,
    )


if __name__ == "__main__":
    main()
