"""Which file names belong to which format, and how they are compressed."""

from __future__ import annotations

from typing import Literal

Compression = Literal["gzip", "zstd"]

SUFFIXES: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "jsonl": tuple(name + end for name in (".jsonl", ".ndjson", ".json") for end in ("", ".gz", ".zst")),
    "tar": (".tar", ".tar.gz", ".tgz"),
    "arrow": (".arrow", ".feather", ".ipc"),
}
"""Format to the ends of its file names."""

_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""What Hugging Face datasets write beside the data."""


def format_of_name(path: str) -> str | None:
    """Return the format that a file's name tells, or None.

    Example:
        >>> format_of_name("web/00.jsonl.gz"), format_of_name("README.md")
        ('jsonl', None)
    """
    name = path.lower()
    return next((f for f, ends in SUFFIXES.items() if name.endswith(ends)), None)


def compression_of_name(path: str) -> Compression | None:
    """Return how a file is compressed as a whole, by its name, or None.

    Example:
        >>> compression_of_name("a.tgz"), compression_of_name("a.jsonl.zst"), compression_of_name("a.tar")
        ('gzip', 'zstd', None)
    """
    name = path.lower()
    if name.endswith((".gz", ".tgz")):
        return "gzip"
    return "zstd" if name.endswith(".zst") else None


def is_data_file(path: str) -> bool:
    """Return whether a file found in a folder is data rather than a note beside it."""
    return format_of_name(path) is not None and path.rsplit("/", 1)[-1] not in _NOT_DATA
