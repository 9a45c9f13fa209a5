"""Writes the files of this folder: the same rows by other writers, in small pages. Needs polars, duckdb, fastparquet
and arro3-io; they are no dependencies of the tests.

    python make.py FOLDER
"""

from __future__ import annotations

import sys

import arro3.core
import arro3.io
import duckdb
import fastparquet
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa

ROWS = 1500
FOLDER = sys.argv[1]

luck = np.random.default_rng(1)
texts = [f"row {n} {('é' if n % 5 else 'ab') * int(luck.integers(0, 9))}" if n % 11 else None for n in range(ROWS)]
ids = [luck.integers(0, 9, n % 7).tolist() if n % 13 else None for n in range(ROWS)]
turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
table = pa.table(
    {
        "n": pa.array(range(ROWS), pa.int64()),
        "text": pa.array(texts),
        "ids": pa.array(ids, pa.list_(pa.int32())),
        "word": pa.array([f"w{n % 4}" for n in range(ROWS)]),
        "chat": pa.array(
            [[{**turn, "content": turn["content"] + f"{n}"} for turn in turns[: n % 3]] for n in range(ROWS)]
        ),
    }
)
pl.from_arrow(table).write_parquet(f"{FOLDER}/polars.parquet", row_group_size=1000, data_page_size=2000)
connection = duckdb.connect()
connection.register("rows", table)
for name, options in (("duckdb", "compression 'snappy'"), ("duckdb_v2", "parquet_version 'V2', compression 'zstd'")):
    connection.execute(f"copy rows to '{FOLDER}/{name}.parquet' (format parquet, {options}, row_group_size 2048)")
frame = pd.DataFrame({"n": range(ROWS), "text": pd.Series(texts, dtype=object), "word": table["word"].to_pylist()})
fastparquet.write(f"{FOLDER}/fastparquet.parquet", frame, row_group_offsets=600, compression="GZIP")
small = {"data_page_size_limit": 1000, "write_batch_size": 50, "max_row_group_size": 1000}
rust = arro3.core.Table.from_arrow(table)
arro3.io.write_parquet(rust, f"{FOLDER}/arrow_rs.parquet", compression="zstd(3)", **small)
arro3.io.write_parquet(
    rust, f"{FOLDER}/arrow_rs_v2.parquet", writer_version="parquet_2_0", compression="snappy",
    dictionary_enabled=False, **small,
)  # fmt: skip
