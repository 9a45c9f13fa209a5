"""Writes the files of array_record/ with array-record, of the rows that make_tfrecord.py wrote.

pip install array-record; python tests/readers/data/make_array_record.py
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from array_record.python.array_record_module import ArrayRecordWriter

HERE = Path(__file__).parent / "array_record"


def records_of(path: Path) -> list[bytes]:
    """Return the records of a TFRecord file: a length (u64), its checksum (u32), the record, its checksum (u32)."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        found.append(data[at + 12 : at + 12 + length])
        at += 16 + length
    return found


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    for source, name, options in (
        ("rows.tfrecord", "rows.array_record", "group_size:1"),
        ("plain.tfrecord-00000-of-00001", "plain.array_record-00000-of-00001", "group_size:4,uncompressed"),
    ):
        writer = ArrayRecordWriter(str(HERE / name), options)
        for record in records_of(HERE.parent / "tfrecord" / source):
            writer.write(record)
        writer.close()


if __name__ == "__main__":
    main()
