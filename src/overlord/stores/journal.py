"""The journal: an append-only file of checksummed JSON records.

Rules of this file:
1. A record is one line: crc32 of the rest in hex, a space, the record as JSON. A line whose checksum
   is wrong ends the journal: it was torn by a crash, and everything before it is good.
2. Inputs (reports, changes, verdicts) are on disk before `append` returns. Plan records can be
   derived again, so they are only handed to the operating system, many at a time.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from overlord.errors import StoreError


class Journal:
    """Appends records to one file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "journal"
        >>> with Journal(path) as journal:
        ...     journal.append({"kind": "report", "step": 3}, durable=True)
        >>> list(read_journal(path))
        [{'kind': 'report', 'step': 3}]
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        good = sum(len(line) for line, _ in _good_lines(path))
        try:
            self._file = path.open("ab")
            self._file.truncate(good)  # what a crash tore off must not be glued to the next record
        except OSError as error:
            raise _failed(path, error) from error

    def append(self, record: dict[str, Any], *, durable: bool) -> None:
        """Write one record; a durable one is on disk when this returns."""
        body = json.dumps(record, separators=(",", ":")).encode()
        try:
            self._file.write(b"%08x %s\n" % (zlib.crc32(body), body))
            if durable:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            raise _failed(self._path, error) from error

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        try:
            self._file.flush()
        except OSError as error:
            raise _failed(self._path, error) from error

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield every record written so far."""
        self.flush()
        return read_journal(self._path)

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def set_aside(path: Path, from_step: int) -> Path | None:
    """Move the records from a step on out of a journal: they belong to a future that is not taken.

    They are kept beside it, in `journal.aside-N`, and never mixed in again.
    """
    records = list(read_journal(path))
    later = [record for record in records if record["step"] >= from_step]
    if not later:
        return None
    aside = next(p for n in itertools.count(1) if not (p := path.with_name(f"{path.name}.aside-{n}")).exists())
    for target, chosen in ((aside, later), (path.with_suffix(".tmp"), [r for r in records if r["step"] < from_step])):
        with Journal(target) as journal:
            for record in chosen:
                journal.append(record, durable=False)
            journal.append({"kind": "lineage", "step": from_step, "records": len(chosen)}, durable=True)
    path.with_suffix(".tmp").replace(path)
    return aside


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the good records of a journal; a missing file has none."""
    for _, record in _good_lines(path):
        yield record


def _good_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            head, _, body = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or head != b"%08x" % zlib.crc32(body):
                return
            yield line, json.loads(body)


def _failed(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the journal {str(path)!r} cannot be written ({error.strerror or error}); planning stops, since what is not "
        "on disk could not be resumed. Free space or mend the folder, then launch again with the same store."
    )
