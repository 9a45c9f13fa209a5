"""Writes the files of tfrecord/ with TensorFlow, and what its own reader reads from them as Parquet.

pip install tensorflow pyarrow; python tests/readers/data/make_tfrecord.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

HERE = Path(__file__).parent / "tfrecord"
ROWS = 40
KINDS = {"text": "bytes", "ids": "int", "label": "int", "score": "float", "vector": "float", "parts": "bytes"}
LISTS = ("ids", "vector", "parts")


def row_of(number: int, rng: np.random.Generator) -> dict:
    ids = [int(value) for value in rng.integers(0, 1 << int(rng.integers(1, 40)), int(rng.integers(0, 90)))]
    return {
        "text": f"row {number} ünï ".encode() * (number % 4),
        "ids": [-1, (1 << 63) - 1, -(1 << 63), 0] if number == 3 else ids,
        "label": number - 5,
        "score": number / 7,
        "vector": rng.random(number % 5).tolist(),
        "parts": [bytes([number]) * n for n in range(number % 4)],
    }


def example_of(row: dict) -> bytes:
    def feature(name: str, value: object) -> tf.train.Feature:
        values = value if name in LISTS else [value]
        if KINDS[name] == "bytes":
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if KINDS[name] == "float":
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    features = {name: feature(name, value) for name, value in row.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)


def read(path: Path, compression: str) -> list[dict]:
    types = {"bytes": tf.string, "float": tf.float32, "int": tf.int64}
    spec = {
        name: tf.io.VarLenFeature(types[kind]) if name in LISTS else tf.io.FixedLenFeature([], types[kind])
        for name, kind in KINDS.items()
    }
    rows = []
    for record in tf.data.TFRecordDataset(str(path), compression_type=compression):
        parsed = tf.io.parse_single_example(record, spec)
        found = {name: (parsed[name].values if name in LISTS else parsed[name]).numpy() for name in spec}
        rows.append({name: value if isinstance(value, bytes) else value.tolist() for name, value in found.items()})
    return rows


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    rng = np.random.default_rng(0)
    rows = [row_of(number, rng) for number in range(ROWS)]
    for name, compression in (("rows.tfrecord", ""), ("rows.tfrecord.gz", "GZIP")):
        with tf.io.TFRecordWriter(str(HERE / name), compression) as writer:
            for row in rows:
                writer.write(example_of(row))
        assert len(read(HERE / name, compression)) == ROWS
    pq.write_table(pa.Table.from_pylist(read(HERE / "rows.tfrecord", "")), HERE / "rows.parquet", row_group_size=ROWS)
    with tf.io.TFRecordWriter(str(HERE / "plain.tfrecord-00000-of-00001")) as writer:  # no Examples
        for row in rows[1:9]:
            writer.write(row["text"])


if __name__ == "__main__":
    main()
