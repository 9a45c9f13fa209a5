"""Length sidecars: token counts of a source's rows, written by a one-off pass and memory-mapped ever after.

A sidecar belongs to one file as it was, one sample spec and one tokenizer: its name is the hash of all three.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overlord.core.specs import Source
from overlord.errors import SourceError
from overlord.readers.checked_array import read_array, write_array
from overlord.readers.source_files import SourceFiles

logger = logging.getLogger("overlord")


class LengthSidecars:
    """A folder of sidecars."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open_all(self, source: Source, files: SourceFiles, tokenizer_digest: str) -> list[npt.NDArray[np.int32]]:
        """Return the lengths of every file of a source, memory-mapped."""
        paths = [self._path(source, files, number, tokenizer_digest) for number in range(len(files.files))]
        were_there = [path.exists() for path in paths]  # before they are read: another process may write one in between
        tables = [read_array(path, np.int32) for path in paths]
        missing = [number for number, table in enumerate(tables) if table is None]
        damaged = [str(paths[number]) for number in missing if were_there[number]]
        if damaged:
            logger.warning(
                "%d length sidecars are damaged (the first is %s); they count as missing", len(damaged), damaged[0]
            )
        if missing:
            raise SourceError(
                f"source {source.name!r}: lengths='sidecar', but {len(missing)} of {len(paths)} files have none for "
                f"this tokenizer (the first is {files.files[missing[0]].path!r}); no sample could be planned. Write "
                "them once with `overlord sources measure JOB`, or leave lengths out to tokenize on read."
            )
        return [table[0] for table in tables if table is not None]

    def write(
        self,
        source: Source,
        files: SourceFiles,
        number: int,
        tokenizer_digest: str,
        lengths: npt.NDArray[np.int32],
    ) -> None:
        """Write the lengths of one file; they appear whole or not at all."""
        write_array(self._path(source, files, number, tokenizer_digest), lengths.astype(np.int32)[None])

    def _path(self, source: Source, files: SourceFiles, number: int, tokenizer_digest: str) -> Path:
        file = files.files[number]
        identity = (file.location, file.size, file.mtime_ns, source.sample.model_dump_json(), tokenizer_digest)
        return self._folder / f"{hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()}.lengths"
