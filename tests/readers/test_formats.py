"""Which format a source has."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlord.errors import SourceError, SpecError
from overlord.readers.files import list_files
from overlord.readers.source_files import FORMATS, format_of


def listed(folder: Path, *names: str):
    for name in names:
        (folder / name).write_text("x")
    return list_files([str(folder / name) for name in names])


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *[(f"x{end}", "parquet") for end in (".parquet", ".pq", ".PARQUET")],
        *[(f"x{end}", "jsonl") for end in (".jsonl", ".ndjson.gz", ".json", ".jsonl.zst")],
        *[(f"x{end}", "tar") for end in (".tar", ".tar.gz", ".tgz")],
        *[(f"x{end}", "arrow") for end in (".arrow", ".feather", ".ipc")],
        ("x.bin", "megatron"),
        *[(f"x{end}", "mds") for end in (".mds", ".mds.zstd", ".mds.gz", ".mds.bz2", ".mds.br")],
    ],
)
def test_the_name_tells_the_format(name: str, format: str, tmp_path: Path):
    assert format_of(listed(tmp_path, name), None) == format
    assert FORMATS[format].name == format


def test_a_declared_format_wins(tmp_path: Path):
    assert format_of(listed(tmp_path, "x.bin"), "tar") == "tar"


def test_what_the_names_do_not_tell_is_asked_for(tmp_path: Path):
    with pytest.raises(SourceError, match=r"x.dat does not say which format .* Set format= to one of 'parquet'"):
        format_of(listed(tmp_path, "x.dat"), None)
    with pytest.raises(SourceError, match=r"a.tar is tar but .*b.parquet is parquet; a source has one format"):
        format_of(listed(tmp_path, "a.tar", "b.parquet"), None)
    with pytest.raises(SpecError, match=r"format='csv' is not a format"):
        format_of(listed(tmp_path, "a.tar"), "csv")
