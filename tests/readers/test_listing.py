"""Which files a path names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SourceError
from overlord.readers.files import glob_regex, list_files

TREE = [
    "0.parquet",
    "1.parquet",
    "10.parquet",
    "README.md",
    "dataset_info.json",
    "_SUCCESS.parquet",
    ".hidden.parquet",
    "a/2.parquet",
    "a/b/3.parquet",
    "_temporary/4.parquet",
    "empty/5.parquet",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREE:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"" if name.startswith("empty") else b"data")
    return tmp_path


def names(tree: Path, *patterns: str, **options: str) -> list[str]:
    return [str(Path(f.path).relative_to(tree)) for f in list_files([f"{tree}/{p}" for p in patterns], **options)]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("0.parquet", ["0.parquet"]),
        ("*.parquet", ["0.parquet", "1.parquet", "10.parquet", "_SUCCESS.parquet"]),
        ("?.parquet", ["0.parquet", "1.parquet"]),
        ("[!1].parquet", ["0.parquet"]),
        ("[0-1]*.parquet", ["0.parquet", "1.parquet", "10.parquet"]),
        ("*/*.parquet", ["_temporary/4.parquet", "a/2.parquet"]),
        ("a/**", ["a/2.parquet", "a/b/3.parquet"]),
        ("a/**/*.parquet", ["a/2.parquet", "a/b/3.parquet"]),
        ("**/3.parquet", ["a/b/3.parquet"]),
        ("", ["0.parquet", "1.parquet", "10.parquet", "a/2.parquet", "a/b/3.parquet"]),
        ("a", ["a/2.parquet", "a/b/3.parquet"]),
    ],
)
def test_files_globs_and_folders(pattern: str, found: list[str], tree: Path):
    assert names(tree, pattern) == found


def test_a_file_named_twice_is_listed_once(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tree)
    files = list_files(["a", f"{tree}/a/2.parquet", "a/*.parquet", f"file://{tree}/a/b/3.parquet"])
    assert sorted(file.location for file in files) == [f"{tree}/a/2.parquet", f"{tree}/a/b/3.parquet"]


def test_a_relative_path_is_shown_as_one(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tree)
    (file,) = list_files(["a/2.parquet"])
    assert (file.path, file.location) == ("a/2.parquet", f"{tree}/a/2.parquet")


def test_a_name_with_the_signs_of_a_glob_is_found_as_it_is(tmp_path: Path):
    (tmp_path / "x[1].jsonl").write_text("{}")
    assert len(list_files([f"{tmp_path}/x[1].jsonl"])) == 1


def test_a_declared_format_narrows_a_folder(tree: Path):
    (tree / "notes.jsonl").write_text("{}")
    assert "notes.jsonl" not in names(tree, "", format="parquet")
    assert names(tree, "", format="jsonl") == ["notes.jsonl"]
    (tree / "parts").mkdir()
    (tree / "parts" / "part-0").write_text("{}")
    assert names(tree, "parts", format="jsonl") == ["parts/part-0"]


@pytest.mark.parametrize("pattern", ["none.parquet", "*.tar", "none/**/*.parquet", "none/"])
def test_a_path_without_files_is_named(pattern: str, tree: Path):
    with pytest.raises(SourceError, match=r"matches no file[;,] .* Check the (spelling|pattern)") as caught:
        names(tree, "0.parquet", pattern)
    assert pattern.rstrip("/") in str(caught.value)


def test_only_empty_files_are_an_error(tree: Path):
    with pytest.raises(SourceError, match=r"the only file of .*empty.* is empty; the source would have no samples"):
        names(tree, "empty")
    with pytest.raises(SourceError, match=r"names no path"):
        list_files([])


@given(st.text("ab.", min_size=1, max_size=6))
def test_a_glob_without_wildcards_matches_itself_alone(name: str):
    assert glob_regex(name).fullmatch(name)
    assert not glob_regex(name).fullmatch(name + "x")
