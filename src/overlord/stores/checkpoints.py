"""Snapshots of the stream state: atomic, checksummed, versioned JSON files in a folder."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from overlord.errors import StoreError

KEEP = 3
"""Snapshots kept: should the newest be damaged, an older one still resumes."""


class CheckpointFolder:
    """Snapshots named by their step.

    Example:
        >>> import tempfile
        >>> folder = CheckpointFolder(Path(tempfile.mkdtemp()))
        >>> folder.save({"version": 1, "step": 16})
        >>> folder.newest()
        {'version': 1, 'step': 16}
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error

    def save(self, state: dict[str, Any]) -> None:
        """Write a snapshot; it appears whole or not at all."""
        body = json.dumps(state, separators=(",", ":")).encode()
        target = self._folder / f"snapshot-{state['step']:012d}.json"
        scratch = target.with_suffix(".tmp")
        try:
            with scratch.open("wb") as file:
                file.write(b"%08x\n%s" % (zlib.crc32(body), body))
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(target)
            for old in self._paths()[:-KEEP]:
                old.unlink()
        except OSError as error:
            raise self._failed(error) from error

    def newest(self) -> dict[str, Any] | None:
        """Return the newest snapshot whose checksum is right, or None."""
        for path in reversed(self._paths()):
            head, _, body = path.read_bytes().partition(b"\n")
            if head == b"%08x" % zlib.crc32(body):
                return json.loads(body)
        return None

    def set_aside(self, from_step: int) -> None:
        """Take snapshots behind a step out of the way: a stream that begins there must not resume in them."""
        for path in self._paths():
            if int(path.stem.removeprefix("snapshot-")) > from_step:
                path.replace(path.with_suffix(".aside"))

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("snapshot-*.json"))

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(
            f"the store {str(self._folder)!r} cannot be written ({error.strerror or error}); planning stops, since a "
            "run that cannot be saved cannot be resumed. Free space or mend the folder, or launch with another store."
        )
