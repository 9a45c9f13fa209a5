"""Manifests: hundreds of sources, one line each, as JSONL or as a CSV or TSV table.

Relative paths are taken from the manifest's folder; URLs stay as they are.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from overlord.core.spec_errors import did_you_mean
from overlord.errors import SpecError
from overlord.job.specs import Audio, Chat, ImageText, Interleaved, Source, Text, Video

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")

_KINDS = (Text, Chat, ImageText, Interleaved, Audio, Video)
_NO_CELLS = ("sample", "storage_options", "augment")
"""Fields that are mappings, which a cell cannot hold."""
_TOKENS = ("bos", "eos", "image_token", "video_token", "audio_token", "before", "after")
"""Fields that take a token by its text or by its id."""
_SAMPLE_COLUMNS = {key for kind in _KINDS for key in kind.known_keys() if key not in _NO_CELLS}
_SOURCE_COLUMNS = [key for key in Source.known_keys() if key not in _NO_CELLS]


def read_manifest(path: str | os.PathLike[str]) -> list[Source]:
    """Return the sources of a manifest.

    A .jsonl line is a mapping with the fields of a Source. A .csv or .tsv file has a header of Source
    fields; the sample's fields are columns too (kind, column, image, text, ..). An empty cell is not given.

    Raises:
        SpecError: The file is missing or a line is wrong; the message names the line.
    """
    return [source for source, _ in read_manifest_lines(path)]


def read_manifest_lines(path: str | os.PathLike[str]) -> list[tuple[Source, int]]:
    """Return the sources of a manifest, each with the line it stands on."""
    file = Path(path)
    if file.suffix in (".jsonl", ".ndjson"):
        rows = _json_rows(file)
    elif file.suffix in (".csv", ".tsv"):
        rows = _table_rows(file)
    else:
        raise SpecError(
            f"{file}: a manifest ends in .jsonl, .csv or .tsv, not {file.suffix!r}; how to read it cannot "
            "be told. Rename it, or write one source a line as JSON."
        )
    found: list[tuple[Source, int]] = []
    for line, row in rows:
        source = Source.from_mapping(row, partial(_place, file, line))
        found.append((resolve_source(source, file.parent), line))
    if not found:
        raise SpecError(f"{file}: the manifest names no source; there is nothing to read. Add one line a source.")
    return found


def read_text(file: Path) -> str:
    """Return the text of a file, or raise a SpecError that says why not."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"{file}: there is no such file. Check the path; it is taken from {os.getcwd()}.") from None
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{file}: byte {error.start} is not UTF-8, so the text cannot be read. Save the file as UTF-8."
        ) from None
    except OSError as error:
        raise SpecError(f"{file}: it cannot be read ({error.strerror}). Check the path and its rights.") from None


def resolve_path(path: str, folder: Path) -> str:
    """Return a path seen from the folder of the file it stands in; URLs stay as they are."""
    if _URL.match(path):
        return path
    return os.path.normpath(folder.absolute() / Path(path).expanduser()) + ("/" if path.endswith("/") else "")


def resolve_source(source: Source, folder: Path) -> Source:
    """Return a source whose paths are seen from a folder."""
    changes: dict[str, Any] = {"path": tuple(resolve_path(p, folder) for p in source.path)}
    sample = source.sample
    if isinstance(sample, Chat) and sample.template is not None and sample.template.endswith(".jinja"):
        changes["sample"] = sample.model_copy(update={"template": resolve_path(sample.template, folder)})
    return source.model_copy(update=changes)


def _json_rows(file: Path) -> Iterator[tuple[int, object]]:
    # Not splitlines: JSON may hold U+2028, which is no end of line here.
    for line, text in enumerate(read_text(file).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row: object = json.loads(text, object_pairs_hook=_refuse_double_keys)
        except json.JSONDecodeError as error:
            raise SpecError(
                f"{file}:{line}: this line is not JSON ({error.msg} at column {error.colno}). Write one "
                "source a "
                'line, such as {"name": "web", "path": "web/*.parquet"}.'
            ) from None
        except _DoubleKey as error:
            raise SpecError(
                f"{file}:{line}: the key {str(error)!r} is given twice; one would be lost. Give it once."
            ) from None
        if not isinstance(row, dict):
            raise SpecError(
                f"{file}:{line}: this line holds {text.strip()[:40]!r}, not a source. Write a mapping, "
                "such as "
                '{"name": "web", "path": "web/*.parquet"}.'
            )
        yield line, row  # type: ignore[reportUnknownVariableType]


class _DoubleKey(ValueError):
    pass


def _refuse_double_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DoubleKey(key)
        found[key] = value
    return found


def _table_rows(file: Path) -> Iterator[tuple[int, object]]:
    delimiter = "\t" if file.suffix == ".tsv" else ","
    reader = csv.reader(io.StringIO(read_text(file), newline=""), delimiter=delimiter, strict=True)
    try:
        header = [cell.strip() for cell in next(reader, list[str]())]
        _check_header(file, header)
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) > len(header):
                raise SpecError(
                    f"{file}:{reader.line_num}: this line has {len(cells)} cells but the header has "
                    f"{len(header)}; values would land in the wrong fields. Put cells that hold the "
                    "separator in quotes."
                )
            yield reader.line_num, _row_of(header, cells)
    except csv.Error as error:
        raise SpecError(
            f"{file}:{reader.line_num}: this line cannot be split into cells ({error}). Check its quotes."
        ) from None


def _check_header(file: Path, header: list[str]) -> None:
    known = [*_SOURCE_COLUMNS, *sorted(_SAMPLE_COLUMNS)]
    for number, column in enumerate(header):
        if column not in known:
            hint = " Write a JSONL manifest for it." if column in _NO_CELLS else did_you_mean(column, known)
            raise SpecError(
                f"{file}:1: unknown column {column!r}; it would be ignored and the sources would not be "
                f"what you asked.{hint} Known columns: {', '.join(known)}."
            )
        if column in header[:number]:
            raise SpecError(f"{file}:1: the column {column!r} is given twice; one would be lost. Give it once.")


def _row_of(header: list[str], cells: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    sample: dict[str, Any] = {}
    for column, cell in zip(header, cells, strict=False):
        if cell.strip():
            (sample if column in _SAMPLE_COLUMNS else row)[column] = _value_of(column, cell.strip())
    if sample:
        row["sample"] = sample
    return row


def _value_of(column: str, cell: str) -> str | int | bool:
    """Return what a cell says; of a token, a number is its id, and true the tokenizer's own."""
    if column not in _TOKENS:
        return cell
    return int(cell) if cell.isdecimal() else {"true": True, "false": False}.get(cell.lower(), cell)


def _place(file: Path, line: int, _: object) -> str:
    return f"{file}:{line}"
