"""A format of our own, as a user would add one: records of a length (u32), a checksum (u32) and text in UTF-8."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from overlord.core.ragged import Kind, RowBatch
from overlord.readers.files import StoredFile
from overlord.readers.jsonl import batches_of
from overlord.readers.reader import BlockIndex, cut_short, missing_column, open_bytes

HEAD = struct.Struct("<II")
BLOCK_ROWS = 4


def write(path: Path, texts: Sequence[str]) -> None:
    data = [text.encode() for text in texts]
    path.write_bytes(b"".join(HEAD.pack(len(one), zlib.crc32(one)) + one for one in data))


class RecordReader:
    """In its index, start and stop are byte offsets."""

    suffixes = (".rec",)

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        for column in columns:
            if column != "text":
                raise missing_column(file.path, column, ["text"])
        bounds = [0]
        with open_bytes(file) as data:
            while bounds[-1] < file.size:
                head = data.read(bounds[-1], HEAD.size)
                if len(head) < HEAD.size or bounds[-1] + HEAD.size + HEAD.unpack(head)[0] > file.size:
                    raise cut_short(file.size)
                bounds.append(bounds[-1] + HEAD.size + HEAD.unpack(head)[0])
        cuts = [*range(0, len(bounds) - 1, BLOCK_ROWS), len(bounds) - 1]
        return BlockIndex.of(
            [(b - a, bounds[b] - bounds[a], bounds[a], bounds[b]) for a, b in itertools.pairwise(cuts)]
        )

    def stream(
        self,
        file: StoredFile,
        index: BlockIndex,
        block: int,
        *,
        columns: Mapping[str, Kind],
        skip: int,
        batch_rows: int,
        scratch: Path | None,
    ) -> Iterator[RowBatch]:
        def rows() -> Iterator[list[bytes] | None]:
            at, left = int(index.start[block]), skip
            with open_bytes(file) as data:
                while at < index.stop[block]:
                    size, checksum = HEAD.unpack(data.read(at, HEAD.size))
                    if left:
                        left -= 1
                    else:
                        text = data.read(at + HEAD.size, size)
                        yield [text] if zlib.crc32(text) == checksum else None
                    at += HEAD.size + size

        return batches_of(rows(), columns, batch_rows)

    def divides(self, file: StoredFile) -> bool:
        return False

    def seeks(self, file: StoredFile) -> bool:
        return False

    def columns(self, file: StoredFile) -> list[str]:
        return ["text"]

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        return {column: "bytes" for column in columns if column == "text"}


class NativeRecordReader(RecordReader):
    """Read in reader processes."""

    native = True


class NoReader:
    """Has none of the methods."""


# Readers that violate the law, each in one way.


class SkipsNothing(RecordReader):
    def stream(self, file, index, block, *, columns, skip, batch_rows, scratch):
        return super().stream(file, index, block, columns=columns, skip=0, batch_rows=batch_rows, scratch=scratch)


class LosesRows(RecordReader):
    def stream(self, file, index, block, *, columns, skip, batch_rows, scratch):
        rows = super().stream(file, index, block, columns=columns, skip=skip, batch_rows=1, scratch=scratch)
        return iter(list(rows)[:-1])


class LargeBatches(RecordReader):
    def stream(self, file, index, block, *, columns, skip, batch_rows, scratch):
        return super().stream(file, index, block, columns=columns, skip=skip, batch_rows=99, scratch=scratch)


class OtherKinds(RecordReader):
    def kinds(self, file, columns):
        return {column: "int" for column in columns if column == "text"}

    def stream(self, file, index, block, *, columns, skip, batch_rows, scratch):
        kinds = dict.fromkeys(columns, "bytes")
        return super().stream(file, index, block, columns=kinds, skip=skip, batch_rows=batch_rows, scratch=scratch)


class TakesAnyColumn(RecordReader):
    def kinds(self, file, columns):
        return dict.fromkeys(columns, "bytes")


class OneStream(RecordReader):
    """Its streams share where they are."""

    def __init__(self):
        self.at = 0

    def stream(self, file, index, block, *, columns, skip, batch_rows, scratch):
        rows = list(super().stream(file, index, block, columns=columns, skip=skip, batch_rows=1, scratch=scratch))
        self.at = 0
        while self.at < len(rows):
            self.at += 1
            yield rows[self.at - 1]


class OtherOrder(RecordReader):
    calls = 0

    def index(self, file, columns):
        found = super().index(file, columns)
        type(self).calls += 1
        return BlockIndex(found.rows, found.bytes + type(self).calls, found.start, found.stop, found.first_row)
