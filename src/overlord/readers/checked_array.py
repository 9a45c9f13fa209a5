"""Arrays on disk that are read back as written or not at all: a checksum covers every byte.

Rules of this file:
1. Files are written beside and renamed: other processes see a whole one or none.
2. What does not look as written is None, never an exception and never another array.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.storage import replacing

_MAGIC = b"ovlarr\x001"
_SHAPE = struct.Struct("<8s8sqq")  # magic, dtype, rows, columns
_CHECKSUM = struct.Struct("<Q")
_HEAD_BYTES = _SHAPE.size + _CHECKSUM.size
_CHUNK_BYTES = 1 << 20


def write_array(path: Path, table: npt.NDArray[Any]) -> None:
    """Write a table of two dimensions.

    Raises:
        OSError: It cannot be written; nothing is left behind.
    """
    shape = _SHAPE.pack(_MAGIC, table.dtype.str.encode(), *table.shape)
    data = np.ascontiguousarray(table).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch, scratch.open("wb") as handle:
        handle.write(shape + _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(shape))) + data)


def read_array(path: Path, dtype: npt.DTypeLike, *, map_from: int = 0) -> npt.NDArray[Any] | None:
    """Return a table that cannot be written to, or None if there is none that can be trusted.

    Args:
        path: The file.
        dtype: What its numbers must be.
        map_from: A file of so many bytes is mapped; a smaller one is read, and holds no descriptor.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "array"
        >>> write_array(path, np.array([[1, 2], [3, 4]]))
        >>> read_array(path, np.int64).tolist()
        [[1, 2], [3, 4]]
        >>> damaged = bytearray(path.read_bytes())
        >>> damaged[-3] ^= 1
        >>> _ = path.write_bytes(damaged)
        >>> read_array(path, np.int64) is None
        True
    """
    kind = np.dtype(dtype)
    try:
        with path.open("rb") as handle:
            head, size = handle.read(_HEAD_BYTES), os.fstat(handle.fileno()).st_size
            if len(head) < _HEAD_BYTES:
                return None
            magic, name, rows, columns = _SHAPE.unpack_from(head)
            if magic != _MAGIC or name.rstrip(b"\0") != kind.str.encode() or rows < 0 or columns < 0:
                return None
            if size != _HEAD_BYTES + rows * columns * kind.itemsize:
                return None
            checksum = zlib.crc32(head[: _SHAPE.size])
            # Read, not mapped: the pages of a mapping that were looked at would count as this process's memory.
            parts: list[bytes] = []
            while chunk := handle.read(_CHUNK_BYTES):
                checksum = zlib.crc32(chunk, checksum)
                if size < map_from:
                    parts.append(chunk)
            if _CHECKSUM.pack(checksum) != head[_SHAPE.size :]:
                return None
            if size < map_from:
                return np.frombuffer(b"".join(parts), kind).reshape(rows, columns)
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
            return np.frombuffer(mapped, kind, offset=_HEAD_BYTES).reshape(rows, columns)
    except (OSError, ValueError):
        return None
