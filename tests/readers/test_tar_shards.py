"""Tar shards: samples, their members, and archives that are damaged."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from overlord.errors import SourceError

from .conftest import read_all

Members = list[tuple[str, bytes]]


def write_tar(path: Path, members: Members, format: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=format) as tar:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))


def test_members_of_one_key_are_one_sample(tmp_path: Path, open_source):
    members = [
        ("d/0.jpg", b"j0"),
        ("d/0.json", b'{"caption": "c0", "size": {"w": 7}}'),
        ("d/0.seg.PNG", b"s0"),
        ("d/1.JPG", b"j1"),
        ("d/1.json", b'{"caption": "c1", "size": {"w": 8}}'),
        ("d/1.seg.png", b"s1"),
    ]
    write_tar(tmp_path / "x.tar", members)
    source = open_source(tmp_path / "x.tar", columns=["jpg", "seg.png", "json.caption", "json.size.w", "__key__"])
    assert source.columns() == ["jpg", "json", "seg.png", "__key__"]
    assert read_all(source) == [
        {
            "jpg": b"j%d" % n,
            "seg.png": b"s%d" % n,
            "json.caption": b"c%d" % n,
            "json.size.w": 7 + n,
            "__key__": b"d/%d" % n,
            "__bad__": False,
        }
        for n in range(2)
    ]


def test_a_missing_member_or_broken_json_makes_a_bad_row(tmp_path: Path, open_source):
    members = [
        ("0.jpg", b"j"),
        ("0.json", b'{"n": 1}'),
        ("1.json", b'{"n": 2}'),
        ("2.jpg", b"j"),
        ("2.json", b"{oops"),
    ]
    write_tar(tmp_path / "x.tar", members)
    rows = read_all(open_source(tmp_path / "x.tar", columns=["jpg", "json.n"]))
    assert [(row["jpg"], row["json.n"], row["__bad__"]) for row in rows] == [
        (b"j", 1, False),
        (b"", 2, True),
        (b"j", 0, True),
    ]


def test_a_key_that_comes_again_is_another_sample(tmp_path: Path, open_source):
    write_tar(tmp_path / "x.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3"), ("a.txt", b"4")])
    rows = read_all(open_source(tmp_path / "x.tar", columns=["txt", "__key__"]))
    assert [(row["__key__"], row["txt"]) for row in rows] == [
        (b"a", b"1"),
        (b"b", b"2"),
        (b"a", b"3"),
        (b"a", b"4"),
    ]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_read_in_every_dialect(format: int, tmp_path: Path, open_source):
    folder = "/".join(["folder" * 8] * (2 if format == tarfile.USTAR_FORMAT else 8))
    write_tar(tmp_path / "x.tar", [(f"{folder}/ä{n}.txt", b"%d" % n) for n in range(20)], format)
    rows = read_all(open_source(tmp_path / "x.tar", columns=["txt", "__key__"]))
    assert [row["__key__"].decode() for row in rows] == [f"{folder}/ä{n}" for n in range(20)]
    assert [row["txt"] for row in rows] == [b"%d" % n for n in range(20)]


def test_links_folders_and_hidden_names_are_passed_over(tmp_path: Path, open_source):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("0.txt", tarfile.SYMTYPE), ("1.txt", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(secret)
            tar.addfile(info)
        for name in ("d/.hidden.txt", "README", "../2.txt"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"text"))
    rows = read_all(open_source(tmp_path / "x.tar", columns=["txt", "__key__"]))
    assert [(row["__key__"], row["txt"]) for row in rows] == [(b"../2", b"text")]


@pytest.mark.parametrize("cut", [512 * 3 + 100, 512 * 2 + 40, 512 * 3])
def test_a_shard_that_is_cut_short_is_named_with_the_byte(cut: int, tmp_path: Path, open_source):
    write_tar(tmp_path / "x.tar", [("0.txt", b"a" * 512), ("1.txt", b"b" * 512)], tarfile.USTAR_FORMAT)
    (tmp_path / "x.tar").write_bytes((tmp_path / "x.tar").read_bytes()[:cut])
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path / "x.tar", columns=["txt"]).blocks(0)
    assert "x.tar" in str(caught.value) and f"cut short at byte {cut}" in str(caught.value)
    assert "Copy the file again" in str(caught.value)


def test_a_compressed_shard_that_is_cut_short_is_named(tmp_path: Path, open_source):
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as tar:
        for n in range(50):
            info = tarfile.TarInfo(f"{n}.txt")
            info.size = 1000
            tar.addfile(info, io.BytesIO(bytes(range(250)) * 4))
    data = (tmp_path / "x.tgz").read_bytes()
    (tmp_path / "x.tgz").write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"cannot read .*x.tgz"):
        open_source(tmp_path / "x.tgz", columns=["txt"]).blocks(0)


def test_what_is_no_tar_is_named(tmp_path: Path, open_source):
    (tmp_path / "x.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(SourceError, match=r"x.tar: there is no tar header at byte 0"):
        open_source(tmp_path / "x.tar", columns=["txt"]).blocks(0)


def test_a_column_that_no_sample_has_is_missing(tmp_path: Path, open_source):
    write_tar(tmp_path / "x.tar", [("0.jpeg", b"a"), ("0.txt", b"b")])
    with pytest.raises(SourceError, match=r"no column 'jpg' \(it has: jpeg, txt, __key__\).*Did you mean 'jpeg'"):
        open_source(tmp_path / "x.tar", columns=["jpg"]).blocks(0)


def test_a_pattern_is_the_list_of_all_members_that_look_so(tmp_path: Path, open_source):
    members = [
        ("d/0.1.jpg", b"b"),
        ("d/0.0.JPG", b"aa"),
        ("d/0.txt", b"x"),
        ("d/1.txt", b"y"),
        ("d/2.txt", b"z"),
        ("d/2.jpg", b"no dot before it"),
        ("d/2.10.jpg", b"ccc"),
    ]
    write_tar(tmp_path / "x.tar", members)
    source = open_source(tmp_path / "x.tar", columns=["txt", "*.jpg"])
    assert source.kinds() == {"txt": "bytes", "*.jpg": "bytes_list"}
    rows = read_all(source)
    assert [(row["txt"], row["*.jpg"], row["__sizes__.*.jpg"]) for row in rows] == [
        (b"x", b"baa", [1, 2]),  # in the order of the archive
        (b"y", b"", []),  # a sample without any is not bad
        (b"z", b"ccc", [3]),
    ]
    assert not any(row["__bad__"] for row in rows)
    assert source.blocks(0).bytes.tolist() == [3 + 1 + 2 + 3]
    with pytest.raises(SourceError, match=r"has no column '\*\.png'"):
        open_source(tmp_path / "x.tar", columns=["*.png"]).kinds()
