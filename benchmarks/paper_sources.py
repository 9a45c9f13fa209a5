"""Image-text sources like the paper's navit_data, and the job file that docs/simulate.md simulates.

The paper's data is not public: here every source has a median text length of its own (lognormal over the sources, 200
tokens in the middle) and a median image side (448 pixels in the middle), around which its rows spread lognormally, with
one image each. A word is a token. Pictures are smooth noise, so that decoding them costs about what photos cost.

    python -m benchmarks.paper_sources FOLDER --sources 306
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import overlord as ol
from overlord.job_files import dump_job_yaml
from overlord.launch_spec import LaunchOptions

PICTURES = 160
CONTEXT = 32_768
PATCH, MERGE = 14, 2
MOST_SIDE = 1792


def _picture(luck: np.random.Generator, side: float) -> bytes:
    """Return a JPEG of smooth noise of about this side, upright or wide."""
    tall, wide = (int(max(side * factor, 32)) for factor in luck.uniform(0.75, 1.33, 2))
    coarse = luck.integers(0, 256, (tall // 16 + 2, wide // 16 + 2, 3), dtype=np.uint8)
    rough = coarse.repeat(16, axis=0).repeat(16, axis=1)[:tall, :wide].astype(np.int16)
    pixels = np.clip(rough + luck.integers(-12, 13, rough.shape), 0, 255).astype(np.uint8)
    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=85)


def write_sources(folder: Path, sources: int, rows: int) -> Path:
    """Write the sources, their tokenizer and the job file; return the path of the job file."""
    folder.mkdir(parents=True, exist_ok=True)
    luck = np.random.default_rng(7)
    sides = np.sort(np.exp(luck.normal(np.log(448), 0.7, PICTURES)).clip(64, MOST_SIDE))
    pictures = [_picture(luck, side) for side in sides]
    tokenizer = Tokenizer(WordLevel({"word": 0, "<image>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    declared: list[ol.Source] = []
    for number in range(sources):
        words = np.exp(luck.normal(np.log(200), 0.8) + luck.normal(0, 1.0, rows)).clip(4, CONTEXT // 2).astype(int)
        middle = np.exp(luck.normal(np.log(448), 0.4))
        chosen = np.searchsorted(sides, middle * np.exp(luck.normal(0, 0.5, rows))).clip(0, PICTURES - 1)
        table = pa.table({"jpg": [pictures[n] for n in chosen], "text": [" ".join(["word"] * n) for n in words]})
        pq.write_table(table, folder / f"s{number:03d}.parquet", row_group_size=32)
        sample = ol.ImageText("jpg", "text", patch=PATCH, merge=MERGE, resize="any", max_pixels=MOST_SIDE**2)
        declared.append(ol.Source(f"s{number:03d}", str(folder / f"s{number:03d}.parquet"), sample=sample))
    weights = np.exp(luck.normal(0, 1, sources))
    job = ol.Job(
        sources=declared,
        mixture=ol.Mixture(dict(zip((one.name for one in declared), weights.tolist(), strict=True))),
        tokenizer=str(folder / "tokenizer.json"),
        batch=ol.Batch(CONTEXT, global_samples=72),
    )
    path = folder / "job.yaml"
    path.write_text(dump_job_yaml(job, LaunchOptions()), encoding="utf-8")
    return path


def main() -> None:
    """Write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sources", type=int, default=306)
    parser.add_argument("--rows", type=int, default=96, help="of each source")
    options = parser.parse_args()
    print(write_sources(options.folder, options.sources, options.rows))


if __name__ == "__main__":
    main()
