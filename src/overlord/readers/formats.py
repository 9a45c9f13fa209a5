"""The table of formats, and which of them a source's files are."""

from __future__ import annotations

from collections.abc import Sequence

from overlord.errors import SourceError, SpecError
from overlord.readers.arrow_ipc import ArrowReader
from overlord.readers.filesystems import StoredFile
from overlord.readers.jsonl import JsonlReader
from overlord.readers.parquet import ParquetReader
from overlord.readers.reader import Reader
from overlord.readers.suffixes import format_of_name
from overlord.readers.tar_shards import TarReader

FORMATS: dict[str, Reader] = {
    "parquet": ParquetReader(),
    "jsonl": JsonlReader(),
    "tar": TarReader(),
    "arrow": ArrowReader(),
}
"""Every format that a source may have."""


def format_of(files: Sequence[StoredFile], declared: str | None) -> str:
    """Return the format of a source: what it declares, or what the names of its files say.

    Raises:
        SpecError: The declared format does not exist.
        SourceError: The names say nothing, or not all the same.
    """
    choice = f"Set format= to one of {', '.join(map(repr, FORMATS))}"
    if declared is not None:
        if declared not in FORMATS:
            raise SpecError(f"format={declared!r} is not a format; the files could not be read. {choice}.")
        return declared
    found = format_of_name(files[0].path)
    if found is None:
        tables = files[0].path.lower().endswith((".csv", ".tsv"))
        raise SourceError(
            f"the name of {files[0].path} does not say which format it has; it could not be read. "
            + ("CSV and TSV are not read: write it as Parquet or JSON lines." if tables else f"{choice}.")
        )
    for file in files:
        other = format_of_name(file.path)
        if other != found:
            raise SourceError(
                f"{files[0].path} is {found} but {file.path} is {other or 'of no known format'}; a source "
                f"has one format. {choice}, or narrow the source's paths with a glob."
            )
    return found
