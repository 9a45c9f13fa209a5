"""The chunks of litdata, `chunk-0-0.bin`, which the `index.json` beside them describes.

A chunk is the number of its items (u32), where each of them begins and the last one ends (u32), and the items: the size
of every leaf (u32), then the bytes of all leaves. So it is read like a shard of MDS. Chunks of token rows (written for
the `TokensLoader`) have no sizes: an item is its tokens. Rows of plain values (text, numbers, lists of them) are at the
end of a chunk, as an Arrow file. A column is a leaf; its name is the path to it in the item that was written.

Arrow is decoded natively, so chunks are read in reader processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc

from overlord.core.ragged import Kind, RowBatch
from overlord.errors import SourceError
from overlord.readers.arrow import kinds_of_schema, require_columns, to_rows, validate_columns
from overlord.readers.files import StoredFile, compression_of_name
from overlord.readers.mds import MdsReader, Shard, open_table
from overlord.readers.reader import BLOCK_BYTES, BlockIndex, DamagedFile

TOKENS, ITEM = "tokens", "item"
"""The column of token rows, and of items that are no dictionary, list or tuple."""
_PLAIN = {"str": "str", "text": "str", "int": "int", "float": "float64", "bool": "uint8", "jpeg_array": "jpeg_array"}
_ENCODED = ("bytes", "jpeg", "image", "audio", "video", "file", "pdf", "tifffile")
"""Leaves that are kept as they were: the bytes of a file."""
_TENSORS = {
    0: "float32", 1: "float32", 2: "float64", 3: "float64", 8: "float16", 9: "float16", 11: "uint8", 12: "int8",
    13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64", 19: "uint8", 20: "uint16",
}  # fmt: skip
_ARRAYS = {
    0: "int8", 1: "int16", 2: "int32", 3: "int64", 4: "uint8", 5: "uint16", 6: "uint32", 7: "uint64", 8: "float16",
    9: "float32", 10: "float64", 13: "uint8",
}  # fmt: skip
"""The types of tensors and arrays by their numbers."""
_ARROW_END = struct.Struct("<I8s")  # bytes of the Arrow file, magic
_ARROW_MAGIC = b"LDARW01\0"
_INDEX_BYTES = 256 << 20


class LitdataReader(MdsReader):
    """Reads chunks of litdata. In its index, start and stop are numbers of items, or of Arrow record batches."""

    name = "litdata"
    native = True
    block_bytes = BLOCK_BYTES

    @contextlib.contextmanager
    def open(self, file: StoredFile) -> Iterator[Shard]:
        """Open a chunk, and read what describes it."""
        encodings, bare = _columns_of(file)
        with open_table(file) as (data, rows, begin, end, table):
            if begin != end:
                raise DamagedFile("its table of items is not that of a chunk of litdata")
            yield Shard(rows, encodings, dict.fromkeys(encodings, 0), data, table, bare)

    def index(self, file: StoredFile, columns: Sequence[str]) -> BlockIndex:
        """Find the blocks of a chunk: runs of items, or record batches."""
        with _arrow_file(file) as arrow:
            if arrow is None:
                return super().index(file, columns)
            require_columns(arrow.schema, columns, file.path)
            batches = [arrow.get_batch(number) for number in range(arrow.num_record_batches)]
            return BlockIndex.of([(one.num_rows, one.nbytes, number, number + 1) for number, one in enumerate(batches)])

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
        """Yield the items of one block."""
        with _arrow_file(file) as arrow:
            if arrow is None:
                yield from super().stream(
                    file, index, block, columns=columns, skip=skip, batch_rows=batch_rows, scratch=scratch
                )
                return
            batch = arrow.get_batch(int(index.start[block]))
            validate_columns(batch, list(columns), file.path)
            for at in range(skip, batch.num_rows, batch_rows):
                yield to_rows(batch.slice(at, batch_rows), columns, file.path)

    def divides(self, file: StoredFile) -> bool:
        """Return whether a chunk is compressed: then it is one block."""
        return compression_of_name(file.path) is not None

    def columns(self, file: StoredFile) -> list[str]:
        """Return the names of the leaves."""
        with _arrow_file(file) as arrow:
            return super().columns(file) if arrow is None else list(arrow.schema.names)

    def kinds(self, file: StoredFile, columns: Sequence[str]) -> dict[str, Kind | None]:
        """Return the kinds of the wanted columns."""
        with _arrow_file(file) as arrow:
            return super().kinds(file, columns) if arrow is None else kinds_of_schema(arrow.schema, columns)


def _columns_of(file: StoredFile) -> tuple[dict[str, str], bool]:
    """Return the encodings of the columns, as MDS calls them, and whether items have no sizes.

    Raises:
        SourceError: The chunk is written in a way that is not read.
    """
    index = file.beside
    if index is None or not 0 < index.size < _INDEX_BYTES:
        raise DamagedFile("it has no index.json beside it, which tells what its items are")
    with index.open() as native:
        text = native.read_at(index.size, 0)
    try:
        config = json.loads(text)["config"]
        refused = {
            "encryption": config.get("encryption"),
            "compression_level": config.get("compression_level") not in (None, "chunk") and config["compression_level"],
        }
        leaves = config["data_format"]
        names = [ITEM] if config.get("data_spec") is None else _names(json.loads(config["data_spec"])[1], "")
        bare = config.get("item_loader") == "TokensLoader"
        if len(names) != len(leaves) or len(set(names)) != len(names) or (bare and len(leaves) != 1):
            raise ValueError
        encodings = {name: _encoding(leaf) for name, leaf in zip([TOKENS] if bare else names, leaves, strict=True)}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedFile(f"{index.path} does not describe items of litdata ({type(error).__name__})") from error
    for field, value in refused.items():
        if value:
            raise SourceError(
                f"{file.path} is written with {field}={value!r}, which is not read; no sample of it can be used. Write "
                "it without compression, or with compression_level='chunk', and not encrypted."
            )
    return encodings, bare


def _names(spec: Mapping[str, Any], path: str) -> list[str]:
    """Return the paths to the leaves of a tree, as torch writes it."""
    children = spec["children_spec"]
    if spec["type"] is None:
        return [path or ITEM]
    kind = spec["type"].rpartition(".")[2]
    keys = json.loads(spec["context"]) if kind in ("dict", "OrderedDict") else list(range(len(children)))
    found: list[str] = []
    for key, child in zip(keys, children, strict=True):
        found += _names(child, f"{path}.{key}" if path else str(key))
    return found


def _encoding(leaf: str) -> str:
    """Return how MDS calls what a leaf holds; what is not read keeps its name, and is refused where it is wanted."""
    name, _, number = leaf.partition(":")
    types = {"no_header_tensor": _TENSORS, "no_header_numpy": _ARRAYS}.get(name)
    if types is not None:
        return f"ndarray:{types.get(int(number), 'object')}:"
    return "pkl" if name == "pickle" else "bytes" if name in _ENCODED else _PLAIN.get(name, f"{name} of litdata")


class _Part(io.RawIOBase):
    """Some bytes of an open file, as a file of their own."""

    def __init__(self, native: pa.NativeFile, start: int, size: int) -> None:
        super().__init__()
        self._native, self._start, self._size, self._at = native, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self._native.read_at(left if size < 0 else min(size, left), self._start + self._at)
        self._at += len(data)
        return data


@contextlib.contextmanager
def _arrow_file(file: StoredFile) -> Iterator[ipc.RecordBatchFileReader | None]:
    """Open the Arrow file at the end of a chunk, None if it has none."""
    if compression_of_name(file.path) is not None or file.size < _ARROW_END.size:
        yield None
        return
    with file.open() as native:
        size, magic = _ARROW_END.unpack(native.read_at(_ARROW_END.size, file.size - _ARROW_END.size))
        if magic != _ARROW_MAGIC:
            yield None
            return
        start = file.size - _ARROW_END.size - size
        if start < 0:
            raise DamagedFile("the Arrow file at its end is larger than it")
        yield ipc.open_file(pa.PythonFile(_Part(native, start, size), mode="r"))
