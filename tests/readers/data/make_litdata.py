"""Writes the datasets of litdata/ with the library's own writer, and what its own reader reads from them as Parquet.

Run `python make_litdata.py` where litdata is installed (0.2.76 was used). The files are kept in the repository, so that
tests do not need it.
"""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from litdata import StreamingDataset
from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter

FOLDER = Path(__file__).parent / "litdata"
ROWS = 30


def item(n: int) -> dict:
    """Return one item whose leaves are written each in its own way."""
    rng = np.random.default_rng(n)
    return {
        "text": f"row {n} ünï " * (n % 4),
        "ids": torch.from_numpy(rng.integers(0, 50_000, n * 17 % 90)),
        "array": rng.integers(0, 200, n % 5).astype(np.uint16),
        "meta": {"n": n - 5, "score": n / 8},
        "flag": n % 3 == 0,
        "raw": bytes(rng.integers(0, 256, n % 7, np.uint8)),
    }


def write(name: str, items: list, **options: object) -> Path:
    folder = FOLDER / name
    writer = BinaryWriter(str(folder), **options)
    for n, one in enumerate(items):
        writer[n] = one
    writer.done()
    writer.merge()
    return folder


def plain(value: object) -> object:
    """Return a value as Parquet takes it."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    items = [item(n) for n in range(ROWS)]
    for name, options in (("raw", {}), ("zstd", {"compression": "zstd", "compression_level": "chunk"})):
        write(name, items, chunk_size=ROWS, **options)
    found = [plain(one) for one in StreamingDataset(str(FOLDER / "raw"))]
    pq.write_table(pa.Table.from_pylist(found), FOLDER / "raw.parquet")
    # Rows of plain values: the library keeps them as Arrow.
    values = [{"text": one["text"], "n": n, "ids": one["ids"].tolist()} for n, one in enumerate(items)]
    read = StreamingDataset(str(write("arrow", values, chunk_size=ROWS)))
    pq.write_table(pa.Table.from_pylist([plain(one) for one in read]), FOLDER / "arrow.parquet")
    # Token rows: the library's reader cuts them into blocks, here of one token.
    tokens = [one["ids"].to(torch.int32) for one in items if len(one["ids"])]
    folder = write("tokens", tokens, chunk_bytes=2000, item_loader=TokensLoader())
    flat = [int(one[0]) for one in StreamingDataset(str(folder), item_loader=TokensLoader(1))]
    assert flat == torch.cat(tokens).tolist()
    pq.write_table(pa.table({"tokens": [one.tolist() for one in tokens]}), FOLDER / "tokens.parquet")
    write("batch", items[:3], chunk_size=ROWS, compression="zstd")  # frames inside of a chunk, which are not read


if __name__ == "__main__":
    main()
