"""Writes the MDS datasets of this folder, with the library's own writer, and what its own reader makes of them.

Run `python make_mds.py` where mosaicml-streaming is installed (0.13.0 was used). The files are kept in the repository,
so that tests do not need it.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

FOLDER = Path(__file__).parent / "mds"
ROWS = 30
COLUMNS = {
    "text": "str",
    "ids": "ndarray:int32",
    "any": "ndarray",
    "four": "ndarray:uint16:4",
    "n": "int",
    "score": "float32",
    "digits": "str_int",
    "meta": "json",
    "raw": "bytes",
    "image": "png",
    "images": "list[jpeg]",
}


def sample(n: int) -> dict:
    """Return one sample."""
    rng = np.random.default_rng(n)

    def image() -> Image.Image:
        return Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8))

    return {
        "text": f"row {n} ünï " * (n % 4),
        "ids": rng.integers(0, 50_000, 1 + n * 17 % 300, np.int32),
        "any": rng.integers(0, 200, 1 + n % 5).astype([np.uint8, np.int16, np.int64][n % 3]),
        "four": rng.integers(0, 9, 4).astype(np.uint16),
        "n": n - 5,
        "score": n / 8,
        "digits": 10**n if n < 18 else n,
        "meta": {"lang": ["en", "de"][n % 2], "tags": list(range(n % 3))},
        "raw": bytes(rng.integers(0, 256, n % 7, np.uint8)),
        "image": image(),
        "images": [image() for _ in range(1 + n % 3)],
    }


def read(folder: Path) -> dict[str, list]:
    """Return the columns as the library's reader gives them: of images, the pixels."""
    from streaming.base.format import reader_from_json

    shards = [
        reader_from_json(str(folder), "", obj) for obj in json.loads((folder / "index.json").read_text())["shards"]
    ]
    rows = [shard[n] for shard in shards for n in range(shard.samples)]
    pixels = lambda image: np.asarray(image).tobytes()  # noqa: E731
    plain = {
        "image": pixels,
        "images": lambda images: [pixels(one) for one in images],
        "meta": json.dumps,
        "score": float,
        **dict.fromkeys(("ids", "any", "four"), lambda array: array.tolist()),
    }
    return {name: [plain.get(name, lambda value: value)(row[name]) for row in rows] for name in COLUMNS}


def main() -> None:
    """Write the same samples raw and compressed."""
    from streaming import MDSWriter

    shutil.rmtree(FOLDER, ignore_errors=True)
    for compression in (None, "zstd", "gz", "bz2", "br"):
        folder = FOLDER / (compression or "raw")
        with MDSWriter(
            out=str(folder), columns=COLUMNS, compression=compression, size_limit=12_000, keep_local=True, exist_ok=True
        ) as writer:
            for n in range(ROWS if compression is None else 8):
                writer.write(sample(n))
    for compression in (None, "zstd"):
        with MDSWriter(
            out=str(FOLDER / "hashed" / (compression or "raw")), columns={"text": "str", "n": "int"},
            hashes=["sha1", "xxh64"], compression=compression, size_limit=600, keep_local=True,
        ) as writer:  # fmt: skip
            for n in range(12):
                writer.write({"text": sample(n)["text"], "n": n - 5})
    pq.write_table(pa.table(read(FOLDER / "raw")), FOLDER / "raw.parquet")


if __name__ == "__main__":
    main()
