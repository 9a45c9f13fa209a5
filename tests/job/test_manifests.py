"""Manifests: one source a line, and the line an error is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlord.errors import SpecError
from overlord.job.specs import Audio, Chat, ImageText, Interleaved, Source, Text, Video
from overlord.job_files import read_manifest


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_table_manifests(tmp_path: Path) -> None:
    table = (
        "name,path,weight,kind,column,image,text,shuffle_bytes,tokenized\n"
        "web,web/*.parquet,0.5,text,body,,,16MB,\n"
        '"coyo","s3://b/a,b",2,image_text,,png,alt,,\n'
        "ids,/ids,1,,ids,,,,true\n"
        "\n"
        "plain,/plain,1,,,,,,\n"
    )
    expected = [
        Source("web", f"{tmp_path}/web/*.parquet", weight=0.5, sample=Text("body"), shuffle_bytes="16MB"),
        Source("coyo", "s3://b/a,b", weight=2, sample=ImageText("png", "alt")),
        Source("ids", "/ids", weight=1, sample=Text("ids", tokenized=True)),
        Source("plain", "/plain", weight=1),
    ]
    assert read_manifest(write(tmp_path / "all.csv", "\ufeff" + table)) == expected
    tabs = table.replace('"s3://b/a,b"', "s3://b/a;b").replace(",", "\t").replace("a;b", "a,b")
    assert read_manifest(write(tmp_path / "all.tsv", tabs)) == expected


def test_tables_of_every_kind(tmp_path: Path) -> None:
    table = (
        "name,path,kind,column,messages,template,images,parts,audio,video,text,fps,bos,eos,audio_token,special_tokens\n"
        "web,/web,text,body,,,,,,,,,true,2,,false\n"
        "talk,/talk,chat,,turns,mine.jinja,,,,,,,,,,\n"
        "docs,/docs,,,,,pictures,parts,,,,,,,,false\n"
        "said,/said,,,,,,,wav,,words,,,,<|AUDIO|>,\n"
        "heard,/heard,audio,,,,,,,,,,,,17,\n"
        "seen,/seen,video,,,,,,,mp4,alt,0.5,,,,\n"
    )
    assert read_manifest(write(tmp_path / "all.csv", table)) == [
        Source("web", "/web", sample=Text("body", bos=True, eos=2, special_tokens=False)),
        Source("talk", "/talk", sample=Chat("turns", template=f"{tmp_path}/mine.jinja")),
        Source("docs", "/docs", sample=Interleaved("pictures", parts="parts", special_tokens=False)),
        Source("said", "/said", sample=Audio("wav", "words")),
        Source("heard", "/heard", sample=Audio(audio_token=17)),
        Source("seen", "/seen", sample=Video("mp4", "alt", fps=0.5)),
    ]


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        (
            "m.jsonl",
            '{"name": "a", "path": "x"}\n{"name": "b"\n',
            ["m.jsonl:2: this line is not JSON", "column"],
        ),
        ("m.jsonl", '{"name": "a", "path": "x"}\n\n{"name": "b"}\n', ["m.jsonl:3: path: missing"]),
        ("m.jsonl", '{"name": "a", "path": "x", "wieght": 1}\n', ["m.jsonl:1: wieght: unknown", "'weight'?"]),
        ("m.jsonl", '{"name": "a", "name": "b"}\n', ["m.jsonl:1: the key 'name' is given twice"]),
        ("m.jsonl", "[1]\n", ["m.jsonl:1: this line holds '[1]', not a source"]),
        ("m.jsonl", "\n", ["the manifest names no source"]),
        ("m.csv", "name,path\n", ["the manifest names no source"]),
        ("m.csv", "name,path,tolerence\n", ["m.csv:1: unknown column 'tolerence'", "'tolerance'?"]),
        ("m.csv", "name,path,storage_options\n", ["unknown column 'storage_options'", "JSONL manifest"]),
        ("m.csv", "name,path,augment\n", ["unknown column 'augment'", "JSONL manifest"]),
        ("m.csv", "name,path,kind,fps\na,x,audio,2\n", ["m.csv:2: sample.fps", "unknown key", "Audio would not do"]),
        ("m.csv", "name,path,name\n", ["m.csv:1: the column 'name' is given twice"]),
        ("m.csv", "name,path\na,x\nb,y,z\n", ["m.csv:3: this line has 3 cells but the header has 2"]),
        ("m.csv", "name,path,weight\na,x,1\nb,y,big\n", ["m.csv:3: weight is 'big'", "finite number"]),
        ("m.csv", 'name,path\na,"x\n', ["m.csv:2: this line cannot be split into cells"]),
        ("m.txt", "a x\n", ["a manifest ends in .jsonl, .csv or .tsv, not '.txt'"]),
    ],
)
def test_manifests_refused(tmp_path: Path, name: str, contents: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        read_manifest(write(tmp_path / name, contents))
    text = str(caught.value)
    for word in words:
        assert word in text
