"""Length sidecars: token counts of a source's rows, written by a one-off pass and memory-mapped ever after.

A sidecar belongs to one file as it was, one sample spec and one tokenizer: its name is the hash of all three.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overlord.core.specs import Source
from overlord.errors import SourceError
from overlord.readers.source_files import SourceFiles
from overlord.storage import replacing


class LengthSidecars:
    """A folder of sidecars."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open_all(self, source: Source, files: SourceFiles, tokenizer_digest: str) -> list[npt.NDArray[np.int32]]:
        """Return the lengths of every file of a source, memory-mapped."""
        paths = [self._path(source, files, number, tokenizer_digest) for number in range(len(files.files))]
        missing = [number for number, path in enumerate(paths) if not path.exists()]
        if missing:
            raise SourceError(
                f"source {source.name!r}: lengths='sidecar', but {len(missing)} of {len(paths)} files have none for "
                f"this tokenizer (the first is {files.files[missing[0]].path!r}); no sample could be planned. Write "
                "them once with `overlord sources measure JOB`, or leave lengths out to tokenize on read."
            )
        return [np.load(path, mmap_mode="r") for path in paths]

    def write(
        self,
        source: Source,
        files: SourceFiles,
        number: int,
        tokenizer_digest: str,
        lengths: npt.NDArray[np.int32],
    ) -> None:
        """Write the lengths of one file; they appear whole or not at all."""
        path = self._path(source, files, number, tokenizer_digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as scratch, scratch.open("wb") as file:
            np.save(file, lengths.astype(np.int32))

    def _path(self, source: Source, files: SourceFiles, number: int, tokenizer_digest: str) -> Path:
        file = files.files[number]
        identity = (file.location, file.size, file.mtime_ns, source.sample.model_dump_json(), tokenizer_digest)
        return self._folder / f"{hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()}.npy"
