"""JSON lines: what is a row, what is a bad row, what a column holds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.core.ragged import BAD_COLUMN, NO_PARTNER, concat_rows, num_rows, unread_rows
from overlord.errors import ReaderError, SourceError
from overlord.readers.index import IndexCache
from overlord.readers.jsonl import parse_object
from overlord.readers.source_files import SourceFiles

from .conftest import read_all, rows_of

BAD_LINES = [
    b"{oops",
    b'{"text": "\xff"}',
    b"[1, 2]",
    b'"text"',
    b"null",
    b"{}",
    b'{"text": null}',
    b'{"text": 5}',
    b'{"text": ["a"]}',
    b'{"text": "\\ud800"}',
    b'{"txt": "a"}',
    b"[" * 100_000,
    b'{"text": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: repr(line[:20]))
def test_a_line_without_the_wanted_text_is_a_bad_row(line: bytes, tmp_path: Path, open_source):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "c"}')
    rows = read_all(open_source(tmp_path / "x.jsonl", columns=["text"]))
    assert [(row["text"], row["__bad__"]) for row in rows] == [(b"a", False), (b"", True), (b"c", False)]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path, open_source):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n\t\n{"text": "b"}\r\n')
    rows = read_all(open_source(tmp_path / "x.jsonl", columns=["text"]))
    assert [(row["text"], row["__bad__"]) for row in rows] == [(b"a", False), (b"b", False)]


def test_a_file_of_nothing_but_blank_lines_has_no_rows(tmp_path: Path, open_source):
    (tmp_path / "0.jsonl").write_bytes(b"\n \n\n")
    (tmp_path / "1.jsonl").write_bytes(b'{"text": "a"}')
    source = open_source(tmp_path, columns=["text"])
    assert source.blocks(0).rows.sum() == 0
    assert len(read_all(source)) == 1


def test_dots_reach_into_objects_and_keys_with_dots_win(tmp_path: Path, open_source):
    (tmp_path / "x.jsonl").write_text('{"meta": {"lang": "en", "ids": [1, 2]}, "a.b": "dotted", "a": {"b": "deep"}}')
    (row,) = read_all(open_source(tmp_path / "x.jsonl", columns=["meta.lang", "meta.ids", "a.b"]))
    assert row == {"meta.lang": b"en", "meta.ids": [1, 2], "a.b": b"dotted", "__bad__": False}


def test_objects_and_lists_of_objects_are_json_text(tmp_path: Path, open_source):
    (tmp_path / "x.jsonl").write_text('{"messages": [{"role": "user", "content": "é"}], "meta": {"a": 1}}')
    source = open_source(tmp_path / "x.jsonl")
    (row,) = read_all(source)
    assert row["messages"].decode() == '[{"role":"user","content":"é"}]' and row["meta"] == b'{"a":1}'
    assert source.kinds() == {"messages": "json", "meta": "json"}


def test_a_column_keeps_its_kind_over_blocks_and_files(tmp_path: Path, open_source):
    first = [{"score": None, "ids": []}, {"score": 1, "ids": [1]}, {"score": 0.5, "ids": ["x"]}]
    second = [{"score": 2, "ids": []}, {"score": "high", "ids": [3]}]
    for number, rows in enumerate((first, second)):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = open_source(tmp_path, columns=["score", "ids"])
    rows = read_all(source, batch_rows=1)
    assert source.kinds() == {"score": "float", "ids": "int_list"}
    assert [row["score"] for row in rows] == [0.0, 1.0, 0.5, 2.0, 0.0]
    assert [row["ids"] for row in rows] == [[], [1], [], [], [3]]
    assert [row["__bad__"] for row in rows] == [True, False, True, False, True]


def test_a_number_that_does_not_fit_is_bad(tmp_path: Path, open_source):
    (tmp_path / "x.jsonl").write_text('{"n": 1}\n{"n": 9223372036854775808}\n{"n": true}')
    rows = read_all(open_source(tmp_path / "x.jsonl", columns=["n"]))
    assert [(row["n"], row["__bad__"]) for row in rows] == [(1, False), (0, True), (1, False)]


def test_a_column_that_no_row_has_is_missing(tmp_path: Path, open_source):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"body": "b"}')
    with pytest.raises(SourceError, match=r"no column 'txet' \(it has: text, body\).*Did you mean 'text'"):
        open_source(tmp_path / "x.jsonl", columns=["txet"]).blocks(0)


def test_a_gzip_file_has_the_blocks_of_its_lines(tmp_path: Path, open_source):
    lines = b"".join(b'{"text": "%d"}\n' % n for n in range(200_000))
    half = lines.index(b"\n", len(lines) // 2) + 1
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines[:half], 1) + gzip.compress(lines[half:], 1))
    blocks = open_source(tmp_path / "x.jsonl.gz", columns=["text"]).blocks(0)
    (tmp_path / "y.jsonl").write_bytes(lines)
    plain = open_source(tmp_path / "y.jsonl", columns=["text"]).blocks(0)
    assert blocks.rows.tolist() == plain.rows.tolist() and blocks.bytes.tolist() == plain.bytes.tolist()
    assert blocks.rows.sum() == 200_000 and len(blocks.rows) == 4 and blocks.unpacked and not plain.unpacked


def test_a_gzip_file_is_unpacked_as_far_as_its_rows_are_read(tmp_path: Path, open_source):
    lines = b"".join(b'{"text": "%d"}\n' % n for n in range(400_000))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines, 1))
    source = open_source(tmp_path / "x.jsonl.gz", columns=["text"])
    blocks = source.first_blocks(0)
    assert len(blocks.rows) == 1 and blocks.more is not None
    rows = [row["text"] for b in source.stream(0, 1, skip=3, stop=6, batch_rows=2) for row in rows_of(b)]
    first = int(blocks.rows[0])
    assert rows == [b"%d" % n for n in range(first + 3, first + 6)]
    unpacked = source._unpacked_file(0)
    assert 2 << 20 <= unpacked._handle.tell() < 3 << 20
    assert [len(blocks.at_least(count).rows) for count in (1, 3, 100)] == [1, 3, len(source.blocks(0).rows)]
    assert blocks.at_least(100).more is None and source.blocks(0).rows.tolist() == blocks.at_least(100).rows.tolist()
    lines_of, parse = source.unparsed()
    assert [bytes(parse(b)["text"][0]) for b in lines_of.stream(0, 1, skip=3, stop=4, batch_rows=2)] == rows[:1]


def test_a_gzip_file_that_is_damaged_later_on_gives_the_rows_before(tmp_path: Path, open_source):
    lines = b"".join(b'{"text": "%d"}\n' % n for n in range(200_000))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines, 1)[:-9000])
    source = open_source(tmp_path / "x.jsonl.gz", columns=["text"])
    assert next(source.stream(0, 0, stop=2, batch_rows=2))["text"][1].tobytes() == b"1"
    with pytest.raises(SourceError, match=r"cannot read .*x.jsonl.gz"):
        source.first_blocks(0).at_least(100)
    with pytest.raises(ReaderError, match=r"x.jsonl.gz cannot be read at row 0 of block 99"):
        next(source.stream(0, 99, stop=2, batch_rows=2))
    assert next(source.stream(0, 0, stop=2, batch_rows=2))["text"][0].tobytes() == b"0"


def test_a_gzip_file_that_is_cut_short_is_named(tmp_path: Path, open_source):
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % n for n in range(20_000)))
    (tmp_path / "x.jsonl.gz").write_bytes(whole[:-1000])
    with pytest.raises(SourceError, match=r"cannot read .*x.jsonl.gz"):
        open_source(tmp_path / "x.jsonl.gz", columns=["text"]).blocks(0)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(min_size=1, max_size=200).map(lambda b: b.replace(b"\x00", b"\n").replace(b"\x01", b'{"a":1}')))
def test_no_bytes_make_an_exception(data: bytes, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "0.jsonl").write_bytes(b'{"a": 1}\n')
    (folder / "1.jsonl").write_bytes(data)
    source = SourceFiles("web", [str(folder)], cache=IndexCache(folder / "_cache"), columns=["a"])
    lines = [line for line in data.split(b"\n") if line.strip(bytes(range(33)))]
    assert len(read_all(source)) == len(lines) + 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def by_json(line: bytes):
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=5),
    st.booleans(),
    st.sampled_from([b"", b"\xef\xbb\xbf", b" "]),
)
def test_objects_are_parsed_as_json_does(value, ascii_only, before):
    line = before + json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert repr(parse_object(line)) == repr(by_json(line))


@given(st.text('{}[]":,0123456789.eE+-\\untrefalsNIiy \t\ud800\0', max_size=40), st.binary(max_size=3))
def test_what_is_no_object_for_json_is_none_here(text, end):
    line = b'{"a":' + text.encode(errors="surrogatepass") + end + b"}"
    assert repr(parse_object(line)) == repr(by_json(line))


LINES = [b'{"text": "a"}', b'{"text": "b"}\r', b'  {"text": "c"} ', b"", b" \t\r", b"\0", b"\xef\xbb\xbf{}", *BAD_LINES]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(LINES), max_size=12), st.sampled_from([b"", b"\n"]), st.integers(1, 4), st.data())
def test_lines_that_are_parsed_later_make_the_same_rows(tmp_path_factory, lines, end, batch_rows, data):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "x.jsonl").write_bytes(b'{"text": "%s"}\n' % (b"long" * 40_000) + b"\n".join(lines) + end)
    files = SourceFiles("x", [str(folder)], columns=["text"], cache=IndexCache(folder / "cache"))
    unparsed = files.unparsed()
    assert unparsed is not None
    raw, parse = unparsed
    skip = data.draw(st.integers(0, int(files.blocks(0).rows[0]) - 1))
    expected = concat_rows(list(files.stream(0, 0, skip=skip, batch_rows=batch_rows)))
    batches = list(raw.stream(0, 0, skip=skip, batch_rows=batch_rows))
    assert max(map(num_rows, batches)) <= batch_rows
    found = concat_rows(list(map(parse, batches)))
    assert list(found) == list(expected) and unread_rows(found) == unread_rows(expected)
    assert bytes(found["text"].values) == bytes(expected["text"].values)
    assert found["text"].offsets.tolist() == expected["text"].offsets.tolist()


def test_a_line_that_is_given_up_is_not_parsed(tmp_path: Path, open_source):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    raw, parse = open_source(tmp_path / "x.jsonl", columns=["text"]).unparsed()
    (rows,) = raw.stream(0, 0, batch_rows=9)
    rows[BAD_COLUMN][0] = NO_PARTNER
    found = parse(rows)
    assert bytes(found["text"].values) == b"b" and found[BAD_COLUMN].tolist() == [NO_PARTNER, 0]


def test_a_file_that_changes_between_two_chunks_is_refused(tmp_path: Path, open_source):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "%s"}\n' % (b"a" * 1000) * 200)
    raw, _ = open_source(tmp_path / "x.jsonl", columns=["text"]).unparsed()
    rows = raw.stream(0, 0, batch_rows=1)
    next(rows)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "%s"}\n' % (b"b" * 999) * 200)
    with pytest.raises(ReaderError, match="would change the stream"):
        list(rows)
