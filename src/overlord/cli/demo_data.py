"""The demo's own data: five text and three image sources, a tokenizer, and the job that reads them.

The skew follows section 2.3 of the paper: long-tailed text lengths, 98 % of the captions of `coyo` with
at most 64 tokens, image sides spread over a factor of eight. The text itself comes from `demo_text`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from overlord.cli.demo_text import Writer
from overlord.errors import SpecError
from overlord.job.specs import Batch, ImageText, Job, Mixture, Source, Text

VERSION = 1
"""Raised when the data changes, so that a folder written by an older version is written again."""
SEED = 20_240_601
VOCABULARY = 4096
SPECIAL_TOKENS = ("<unk>", "<bos>", "<eos>", "<pad>", "<image>")
CAPTION_LIMIT = 64
_MARKER = "demo.json"
_JPEG_QUALITY = 85
_TRAINING_CHARACTERS = 2_000_000

Progress = Callable[[str, int, int], None]
Pixels = npt.NDArray[np.uint8]
Lengths = npt.NDArray[np.int64]
Write = Callable[[Path, int, np.random.Generator, Progress | None], list[str]]


@dataclass(frozen=True, slots=True)
class DemoFiles:
    """Where the demo's data lies and how much of it there is."""

    folder: Path
    sources: dict[str, str]
    """Path or glob of each source."""
    tokenizer: Path
    total_bytes: int
    samples: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one source is written."""

    pattern: str
    samples: int
    write: Write
    """Writes the files and returns their text, for the tokenizer."""


def write_demo(folder: Path, *, scale: float = 1.0, progress: Progress | None = None) -> DemoFiles:
    """Write the demo's sources and tokenizer into a folder, unless they are already there.

    Args:
        folder: Created if missing. Only the demo's own files in it are written.
        scale: Samples per source relative to the full demo (about 50 MB).
        progress: Called with (source, samples done, samples in all).

    Raises:
        SpecError: `scale` is not positive, or `folder` is a file.
    """
    if not scale > 0:
        raise SpecError(f"scale={scale} would write no samples; give a number above 0, such as 1.0")
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"demo folder {str(folder)!r} is a file; nothing was written: name a folder instead")
    found = _complete_demo(folder, scale)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).unlink(missing_ok=True)
    samples: dict[str, int] = {}
    corpus: list[str] = []
    for number, (name, plan) in enumerate(_PLANS.items()):
        # A file left by another version would be matched by the job's glob.
        for stale in folder.glob(plan.pattern):
            stale.unlink()
        (folder / name).mkdir(exist_ok=True)
        samples[name] = max(8, round(plan.samples * scale))
        rng = np.random.default_rng([SEED, number])
        corpus += _excerpts(plan.write(folder, samples[name], rng, progress))
    train_tokenizer(corpus, VOCABULARY, SPECIAL_TOKENS).save(str(folder / "tokenizer.json"))
    if progress is not None:
        progress("tokenizer", 1, 1)
    _write_marker(folder, scale, samples)
    return _demo_files(folder, samples)


def demo_job(files: DemoFiles) -> Job:
    """Return the VLM-shaped job of the demo: the mixture moves from text to images at step 15."""

    def pictures(image: str, text: str) -> ImageText:
        return ImageText(image=image, text=text, patch=16, merge=2, max_pixels=512 * 512)

    samples = dict.fromkeys(("web", "books", "code", "wiki", "forum"), Text("text")) | {
        "coyo": pictures("jpg", "caption"),
        "photos": pictures("jpg", "txt"),
        "charts": pictures("image", "caption"),
    }
    names = list(samples)
    first = (0.32, 0.12, 0.12, 0.10, 0.06, 0.14, 0.08, 0.06)
    later = (0.20, 0.07, 0.08, 0.07, 0.04, 0.28, 0.15, 0.11)
    return Job(
        sources=[Source(name, files.sources[name], sample=samples[name]) for name in names],
        mixture=Mixture.stages(
            [(0, dict(zip(names, first, strict=True))), (15, dict(zip(names, later, strict=True)))],
            level="token",
        ),
        tokenizer=str(files.tokenizer),
        batch=Batch(context_length=4096, global_tokens=65536),
        overlength="split",
        seed=0,
    )


def _demo_files(folder: Path, samples: dict[str, int]) -> DemoFiles:
    return DemoFiles(
        folder=folder,
        sources={name: str(folder / plan.pattern) for name, plan in _PLANS.items()},
        tokenizer=folder / "tokenizer.json",
        total_bytes=sum(_file_sizes(folder).values()),
        samples=samples,
    )


def _file_sizes(folder: Path) -> dict[str, int]:
    paths = [path for plan in _PLANS.values() for path in sorted(folder.glob(plan.pattern))]
    paths.append(folder / "tokenizer.json")
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.exists()}


def _write_marker(folder: Path, scale: float, samples: dict[str, int]) -> None:
    marker = {"version": VERSION, "scale": scale, "samples": samples, "files": _file_sizes(folder)}
    part = folder / f"{_MARKER}.part"
    part.write_text(json.dumps(marker, indent=1))
    part.replace(folder / _MARKER)


def _complete_demo(folder: Path, scale: float) -> DemoFiles | None:
    """Return the demo in the folder if it is whole and of this version and scale."""
    try:
        marker: dict[str, Any] = json.loads((folder / _MARKER).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if marker.get("version") != VERSION or marker.get("scale") != scale:
        return None
    return _demo_files(folder, marker["samples"]) if marker.get("files") == _file_sizes(folder) else None


def train_tokenizer(corpus: Iterable[str], vocabulary: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of a corpus; the first special token stands for what is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token=special_tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _excerpts(texts: Sequence[str]) -> list[str]:
    """Return enough of a source's text to train on, taken evenly from all its samples."""
    budget = _TRAINING_CHARACTERS // len(_PLANS)
    limit = max(200, budget // max(len(texts), 1))
    return [text[:limit] for text in texts[:: max(1, len(texts) * limit // budget)]]


def _skewed_lengths(
    rng: np.random.Generator, count: int, *, median: float, spread: float, low: int, high: int
) -> Lengths:
    """Return lognormal lengths in random order; their quantiles are exact, so a small demo is as skewed."""
    normal = np.sort(rng.standard_normal(max(4096, count)))
    quantiles = np.quantile(normal, (np.arange(count) + 0.5) / count)
    return rng.permutation(np.clip(np.rint(median * np.exp(spread * quantiles)), low, high).astype(np.int64))


def _caption_lengths(rng: np.random.Generator, count: int) -> Lengths:
    """Return caption lengths in tokens: 1.7 % above the limit, holding about 9 % of all tokens."""
    long = max(1, round(0.017 * count))
    short = _skewed_lengths(rng, count - long, median=14, spread=0.55, low=4, high=CAPTION_LIMIT - 18)
    tail = np.linspace(CAPTION_LIMIT + 20, 2 * CAPTION_LIMIT, long).astype(np.int64)
    return rng.permutation(np.concatenate([short, tail]))


def _shards(count: int, shards: int) -> list[slice]:
    edges = [count * number // shards for number in range(shards + 1)]
    return [slice(low, high) for low, high in pairwise(edges)]


def _parquet_writer(name: str, median: float, spread: float, low: int, high: int, shards: int) -> Write:
    def write(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
        lengths = _skewed_lengths(rng, count, median=median, spread=spread, low=low, high=high)
        texts = Writer(rng).articles(lengths)
        for number, part in enumerate(_shards(count, shards)):
            url = [f"https://example.org/{name}/{row}" for row in range(part.start, part.stop)]
            table = cast("Any", pa.table({"text": texts[part], "url": url}))
            pq.write_table(table, folder / name / f"{name}-{number:03d}.parquet", row_group_size=96)
            if progress is not None:
                progress(name, part.stop, count)
        return texts

    return write


def _jsonl_writer(
    name: str,
    suffix: str,
    style: Callable[[Writer, Lengths], list[str]],
    median: float,
    spread: float,
    low: int,
    high: int,
) -> Write:
    def write(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
        lengths = _skewed_lengths(rng, count, median=median, spread=spread, low=low, high=high)
        texts = style(Writer(rng), lengths)
        for number, part in enumerate(_shards(count, 2)):
            lines = [json.dumps({"text": text, "source": name}) + "\n" for text in texts[part]]
            data = "".join(lines).encode()
            if suffix == "jsonl.gz":
                data = gzip.compress(data, mtime=0)
            elif suffix == "jsonl.zst":
                data = cast("bytes", pa.Codec("zstd").compress(data, asbytes=True))
            (folder / name / f"{name}-{number:03d}.{suffix}").write_bytes(data)
            if progress is not None:
                progress(name, part.stop, count)
        return texts

    return write


def _write_coyo(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
    captions = Writer(rng).captions(_caption_lengths(rng, count))
    sides = _skewed_lengths(rng, count, median=216, spread=0.48, low=96, high=768)
    images = _encode_all("coyo", _draw_scene, _sizes(rng, sides, spread=0.22, low=96, high=768), progress)
    for number, part in enumerate(_shards(count, 3)):
        table = cast("Any", pa.table({"jpg": pa.array(images[part], pa.binary()), "caption": captions[part]}))
        path = folder / "coyo" / f"coyo-{number:03d}.parquet"
        # JPEG bytes do not compress and have no repeats; a dictionary would only cost memory.
        pq.write_table(table, path, row_group_size=64, compression="none", use_dictionary=False)
    return captions


def _write_photos(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
    captions = Writer(rng).captions(_skewed_lengths(rng, count, median=28, spread=0.5, low=8, high=120))
    sides = _skewed_lengths(rng, count, median=580, spread=0.22, low=416, high=1080)
    images = _encode_all("photos", _draw_scene, _sizes(rng, sides, spread=0.14, low=384, high=1280), progress)
    for number, part in enumerate(_shards(count, 2)):
        path = folder / "photos" / f"photos-{number:03d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for row in range(part.start, part.stop):
                for suffix, data in (("jpg", images[row]), ("txt", captions[row].encode())):
                    member = tarfile.TarInfo(f"{row:06d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return captions


def _write_charts(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
    captions = Writer(rng).captions(_skewed_lengths(rng, count, median=22, spread=0.6, low=6, high=200))
    sides = _skewed_lengths(rng, count, median=380, spread=0.25, low=220, high=720)
    images = _encode_all("charts", _draw_chart, _sizes(rng, sides, spread=0.55, low=128, high=1400), progress)
    table = cast("Any", pa.table({"image": pa.array(images, pa.binary()), "caption": captions}))
    out: Any = pa.ipc.new_file(str(folder / "charts" / "charts-000.arrow"), table.schema)
    with out:
        out.write_table(table, max_chunksize=64)
    return captions


def _sizes(rng: np.random.Generator, sides: Lengths, *, spread: float, low: int, high: int) -> Lengths:
    """Return (height, width) per image: the given side at a lognormal aspect ratio."""
    stretch = np.exp(spread * rng.standard_normal(len(sides)))
    both = np.stack([sides / stretch, sides * stretch], axis=1)
    return np.clip(np.rint(both), low, high).astype(np.int64)


def _encode_all(
    name: str,
    draw: Callable[[np.random.Generator, int, int], Pixels],
    sizes: Lengths,
    progress: Progress | None,
) -> list[bytes]:
    """Draw and encode one JPEG per size; drawing mostly happens outside the GIL, so threads are enough."""
    source = list(_PLANS).index(name)

    def encode(row: int) -> bytes:
        height, width = (int(side) for side in sizes[row])
        pixels = draw(np.random.default_rng([SEED, source, row]), height, width)
        return simplejpeg.encode_jpeg(pixels, quality=_JPEG_QUALITY, colorspace="RGB")

    images: list[bytes] = []
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for image in pool.map(encode, range(len(sizes))):
            images.append(image)
            if progress is not None and (len(images) % 16 == 0 or len(images) == len(sizes)):
                progress(name, len(images), len(sizes))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for images that nobody will write
    return images


def _draw_scene(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """Return soft light, a few shaded shapes and sensor noise: a JPEG as heavy as a photograph's."""
    palette = rng.integers(40, 216, 3) + rng.integers(-55, 56, (4, 5, 3))
    coarse = Image.fromarray(np.clip(palette, 0, 255).astype(np.uint8))
    scene = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    for _ in range(int(rng.integers(4, 11))):
        shares = rng.uniform(0.06, 0.4, 2)
        tall, wide = max(6, int(height * shares[0])), max(6, int(width * shares[1]))
        top, left = int(rng.integers(0, max(1, height - tall))), int(rng.integers(0, max(1, width - wide)))
        area = scene[top : top + tall, left : left + wide]
        y = np.linspace(-1, 1, area.shape[0], dtype=np.float32)[:, None]
        x = np.linspace(-1, 1, area.shape[1], dtype=np.float32)[None, :]
        colour = rng.integers(20, 236, 3).astype(np.int16) + (30 * (x + y)).astype(np.int16)[..., None]
        round_one = rng.random() < 0.6
        inside = x * x + y * y < 1 if round_one else np.ones_like(x + y, bool)
        np.copyto(area, colour, where=inside[..., None])
    # Grain at half resolution: what is left after a camera's own smoothing.
    grain = rng.integers(-6, 7, (-(-height // 2), -(-width // 2)), dtype=np.int8)
    scene += np.repeat(np.repeat(grain, 2, axis=0), 2, axis=1)[:height, :width, None]
    return np.clip(scene, 0, 255, out=scene).astype(np.uint8)


def _draw_chart(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """Return a bar or area chart with a grid and axes on white."""
    chart = np.full((height, width, 3), 252, np.uint8)
    chart[:: max(8, height // 9)] = 225
    left, bottom = width // 12 + 2, height - height // 10 - 2
    steps = int(rng.integers(5, 40))
    values = np.abs(np.cumsum(rng.standard_normal(steps))) + 0.4
    column = np.minimum(np.arange(width - left) * steps // (width - left), steps - 1)
    level = (values / values.max() * (bottom - 4))[column]
    if rng.random() < 0.5:
        level = np.interp(np.arange(width - left), np.arange(steps) * (width - left) / steps, values)
        level = level / level.max() * (bottom - 4)
    filled = np.arange(height)[:, None] >= bottom - level[None, :]
    filled[bottom:] = False
    chart[:, left:][filled] = rng.integers(30, 200, 3)
    chart[bottom : bottom + 2, left:] = 40
    chart[:bottom, left - 2 : left] = 40
    speckle = rng.integers(0, 5, (height, width, 1), dtype=np.uint8)
    return np.ascontiguousarray(chart - speckle)


_PLANS: dict[str, _Plan] = {
    "web": _Plan("web/web-*.parquet", 1500, _parquet_writer("web", 330, 1.15, 30, 5600, 4)),
    "books": _Plan("books/books-*.parquet", 64, _parquet_writer("books", 8000, 0.5, 3000, 24000, 2)),
    "code": _Plan("code/code-*.jsonl.gz", 600, _jsonl_writer("code", "jsonl.gz", Writer.modules, 420, 0.9, 60, 5000)),
    "wiki": _Plan("wiki/wiki-*.jsonl.zst", 500, _jsonl_writer("wiki", "jsonl.zst", Writer.entries, 450, 0.9, 60, 5000)),
    "forum": _Plan("forum/forum-*.jsonl", 1200, _jsonl_writer("forum", "jsonl", Writer.threads, 110, 0.9, 20, 2000)),
    "coyo": _Plan("coyo/coyo-*.parquet", 1600, _write_coyo),
    "photos": _Plan("photos/photos-*.tar", 240, _write_photos),
    "charts": _Plan("charts/charts-*.arrow", 400, _write_charts),
}
