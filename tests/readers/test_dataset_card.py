"""Folders that are laid out as on the Hugging Face Hub: configurations and splits by the card, splits by names."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import overlord as ol
from overlord.errors import SourceError
from overlord.job.plain_yaml import load_yaml
from overlord.readers.dataset_card import split_files
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles

from .conftest import read_all

NAMES = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"]
CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - {split: train, path: en/train-*}
  - {split: test, path: [en/test-*.parquet, en/more/*]}
- config_name: de
  default: true
  data_files: {train: "./de/**/*.parquet"}
- config_name: fr
  data_dir: fr
---
# A dataset
configs: not these
"""
FILES = ["en/train-0.parquet", "en/train-1.parquet", "en/test-0.parquet", "en/more/x.parquet"]
FILES += ["de/a/0.parquet", "de/1.parquet", "fr/dev/0.parquet", "fr/0.parquet"]


def chosen(names: list[str], card: str | None = None, config: str | None = None, split: str | None = None) -> list[str]:
    return split_files(names, {} if card is None else {"README.md": card}, config=config, split=split)


@pytest.mark.parametrize(
    ("config", "split", "found"),
    [
        ("en", "train", FILES[0:2]),
        ("en", "test", FILES[2:4]),
        ("de", "train", FILES[4:6]),
        ("de", None, FILES[4:6]),
        (None, None, FILES[4:6]),
        ("fr", None, FILES[6:8]),
        ("fr", "validation", FILES[6:7]),
    ],
)
def test_the_card_tells_the_files(config: str | None, split: str | None, found: list[str]):
    assert chosen(FILES, CARD, config, split) == found


@pytest.mark.parametrize(
    ("card", "config", "split", "why"),
    [
        (CARD, "en", None, "'en' has several splits; they would be mixed. Set split= to one of 'train', 'test'"),
        (CARD, "en", "trian", "no split 'trian'; nothing would be read. .* Did you mean 'train'"),
        (CARD, "es", None, "no configuration 'es'; .* Set config= to one of 'en', 'de', 'fr'"),
        (CARD.replace("default: true", ""), None, None, "several configurations; they would be mixed"),
        (
            CARD.replace("en/train-*", "en/tr-*"),
            "en",
            "train",
            "no file matches 'en/tr-\\*', which its README.md gives",
        ),
        (CARD.replace("- config_name: en", "- en"), "de", None, "cannot be read"),
        ("---\nconfigs: 3\n---\n", None, None, "cannot be read"),
        ("# no head", "en", None, "there is no README.md with a list of configurations"),
        (None, "en", None, "there is no README.md with a list of configurations"),
    ],
)
def test_what_is_not_clear_is_refused(card: str | None, config: str | None, split: str | None, why: str):
    with pytest.raises(SourceError, match=why):
        chosen(FILES, card, config, split)


@pytest.mark.parametrize(
    ("names", "split", "found"),
    [
        (NAMES, None, NAMES),
        (NAMES, "train", NAMES[:2]),
        (NAMES, "test", NAMES[2:]),
        (["train/test-set.jsonl", "eval.jsonl"], "train", ["train/test-set.jsonl"]),
        (["my_dev_1.jsonl", "trainer.jsonl", "VALID/a.jsonl"], "validation", ["my_dev_1.jsonl", "VALID/a.jsonl"]),
        (["train_sft-0.parquet", "train_gen-0.parquet"], "train_sft", ["train_sft-0.parquet"]),
        (["a/part2.parquet", "a/part1.parquet"], "part1", ["a/part1.parquet"]),
    ],
)
def test_names_tell_the_split(names: list[str], split: str | None, found: list[str]):
    assert chosen(names, split=split) == found


def test_a_split_that_no_name_tells_is_refused():
    with pytest.raises(SourceError, match=r"belongs to split 'validation' \(there are 'test', 'train'\)"):
        chosen(NAMES, split="validation")


ENERGON = """
split_parts:
  train: ["shards/s_{00..02}.tar", "shards/s_04.tar"]
  val: [shards/s_03.tar]
  test: []
exclude: [shards/s_01.tar]
"""
SHARDS = [f"shards/s_{n:02d}.tar" for n in range(6)]


def energon(text: str, split: str | None) -> list[str]:
    return split_files(SHARDS, {".nv-meta/split.yaml": text}, config=None, split=split)


def test_the_splits_of_energon():
    assert energon(ENERGON, "train") == [SHARDS[0], SHARDS[2], SHARDS[4]]
    assert energon(ENERGON, "val") == [SHARDS[3]]
    assert energon("split_parts: {train: [shards/s_05.tar], val: []}", None) == [SHARDS[5]]
    assert split_files(SHARDS, {".nv-meta/split.json": '{"split_parts": {"a": ["shards/s_00.tar"]}}'}, config=None, split="a") == SHARDS[:1]  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("text", "split", "why"),
    [
        (ENERGON, None, "several splits; they would be mixed. Set split= to one of 'train', 'val'"),
        (ENERGON, "test", "no split 'test'; nothing would be read"),
        (ENERGON, "trian", "Did you mean 'train'"),
        (ENERGON.replace("s_04", "s_09"), "train", r"1 shards of split 'train' are not there \('shards/s_09.tar'\)"),
        (ENERGON.replace("s_01.tar]", "s_02.tar/7]"), "train", r"excludes single samples \('shards/s_02.tar/7'\)"),
        ("- 3", "train", "cannot be read"),
        ("split_parts: {train: ['{000000000..999999999}']}", "train", "cannot be read"),
    ],
)
def test_what_is_wrong_with_the_splits_of_energon_is_told(text: str, split: str | None, why: str):
    with pytest.raises(SourceError, match=why):
        energon(text, split)


def test_a_folder_of_energon_is_read_by_its_splits(tmp_path: Path, open_source):
    (tmp_path / "shards").mkdir()
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / "split.yaml").write_text(ENERGON)
    (tmp_path / ".nv-meta" / "dataset.yaml").write_text("sample_type: {}")
    for name in SHARDS:
        with tarfile.open(tmp_path / name, "w") as archive:
            info = tarfile.TarInfo("0.txt")
            info.size = len(name)
            archive.addfile(info, io.BytesIO(name.encode()))
        (tmp_path / f"{name}.idx").write_bytes(b"\0" * 16)  # which Energon writes beside them
    rows = read_all(open_source(tmp_path, split="train", columns=["txt"]))
    assert [row["txt"].decode() for row in rows] == [SHARDS[0], SHARDS[2], SHARDS[4]]
    with pytest.raises(SourceError, match="several splits; they would be mixed"):
        open_source(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(FILES):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": [f"{number}"]}), tmp_path / "data" / name)
    (tmp_path / "data" / "README.md").write_text(CARD)
    return tmp_path / "data"


def test_a_folder_is_read_by_its_card(folder: Path, open_source):
    def texts(path: Path, **options: str) -> list[bytes]:
        return [row["text"] for row in read_all(open_source(path, **options))]

    assert texts(folder) == [b"5", b"4"]  # the default one, sorted by name
    assert texts(folder, config="en", split="test") == [b"3", b"2"]
    assert texts(folder / "en" / "*.parquet", split="train") == [b"0", b"1"]
    with pytest.raises(SourceError, match=r"x.parquet': no name of a file or folder tells"):
        open_source(folder / "en" / "more" / "x.parquet", split="train")
    with pytest.raises(SourceError, match=r"/data': configuration 'en' has several splits"):
        open_source(folder, config="en")


def test_a_job_names_configuration_and_split(folder: Path, tmp_path: Path):
    source = ol.Source("en", str(folder), config="en", split="nothing")
    assert ol.Source("en", str(folder), config="en", split="test").replace(split="nothing") == source
    ids = tmp_path / "ids"
    for name in ("train", "test"):
        (ids / name).mkdir(parents=True)
        pq.write_table(pa.table({"ids": [[1, 2, 3]] * 4}), ids / name / "0.parquet")
    sample = ol.Text("ids", tokenized=True)
    job = ol.Job([ol.Source("s", str(ids), sample=sample, split="test")], batch=ol.Batch(8, global_samples=4))
    with ol.launch(job.evaluation(), runtime="inline", cache=str(tmp_path / "cache")) as service:
        (step,) = list(service.client())
        assert sum(len(batch.meta.sample_ids) for batch in step.microbatches) == 4
    wrong = job.replace(sources=[job.sources[0].replace(split="dev2")])
    with pytest.raises(SourceError, match=r"source 's': .*ids': no name .* belongs to split 'dev2'"):
        ol.launch(wrong, runtime="inline", cache=str(tmp_path / "cache"))


# What a stranger may write into the files that come with a dataset: refused at once, whatever it stands for.


def bomb(levels: int = 12, width: int = 10) -> str:
    """Return YAML of a kilobyte whose last anchor stands for `width ** levels` texts."""
    lines = [f"a0: &a0 [{', '.join(['lol'] * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


def card_of(head: str) -> dict[str, str]:
    return {"README.md": f"---\n{head}\n---\n"}


HOSTILE = {
    "aliases as the name of a configuration": card_of(f"{bomb()}\nconfigs: [{{config_name: *a11, data_files: x}}]"),
    "aliases as a path": card_of(f"{bomb()}\nconfigs:\n- config_name: a\n  data_files: [{{split: train, path: *a11}}]"),
    "an alias inside of what it names": card_of("configs: &a [{config_name: *a, data_files: x}]"),
    "deep nesting": card_of("x: " + "[" * 100_000),
    "many values": card_of("x: [" + "1," * 300_000 + "1]"),
    "a long number": card_of("x: 1" + ":1" * 400_000),
    "a long number in quotes": card_of("x: !!int '1" + ":1" * 400_000 + "'"),
    "a long number in a block": card_of("x: !!int |-\n  1" + ":1" * 400_000),
    "a long number with blanks": card_of("x: !!int '1" + ": 1" * 400_000 + "'"),
    "a head without an end": {"README.md": "---\n" + "\n" * (8 << 20)},
    "aliases in split.yaml": {".nv-meta/split.yaml": f"{bomb()}\nsplit_parts: {{train: *a11}}"},
    "braces of a billion shards": {".nv-meta/split.yaml": "split_parts: {train: ['{0..999}{0..999}{0..999}.tar']}"},
    "many braces of many shards": {".nv-meta/split.yaml": "split_parts: {train: [" + "'{0..99999}.tar'," * 1000 + "]}"},
}


@pytest.mark.parametrize("texts", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_description_is_refused_before_it_takes_memory(texts: dict[str, str]):
    with pytest.raises(SourceError, match=r"cannot be read \((it |its head)"):
        split_files(FILES, texts, config=None, split="train")


@pytest.mark.parametrize(
    "value", ["1:" * 400 + "1.5", "!!int ''", "!!float ''", "!!timestamp x", "!!bool x", "2001-99-99"]
)
def test_a_value_that_does_not_fit_its_tag_is_an_error_in_words(value: str):
    card = card_of(f"x: {value}\nconfigs: [{{config_name: a, data_files: x}}]")
    with pytest.raises(SourceError, match=r"cannot be read \("):
        split_files(FILES, card, config=None, split=None)
    with pytest.raises(yaml.YAMLError):
        load_yaml(f"x: {value}")


@pytest.mark.parametrize("pattern", ["*a" * 60 + "*b", "**/*a*/" * 30 + "b", "**a" * 60 + "**b"])
def test_patterns_of_a_card_do_not_take_exponential_time(pattern: str):
    names = ["a" * 250, "aa/" * 80 + "c", "a.parquet"]
    card = f"---\nconfigs: [{{config_name: a, data_files: ['{pattern}', a.parquet]}}]\n---\n"
    assert chosen(names, card) == ["a.parquet"]


def test_a_description_of_many_megabytes_is_refused_and_a_long_card_is_not(tmp_path: Path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "train.parquet")
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: a, data_files: t*}]\n---\n" + "x" * (9 << 20))
    assert len(SourceFiles("a", [str(tmp_path)], cache=IndexCache(tmp_path / "cache")).files) == 1
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / "split.yaml").write_text("split_parts: {train: []}" + " " * (9 << 20))
    with pytest.raises(SourceError, match=r"split.yaml has 94\d+ bytes"):
        SourceFiles("a", [str(tmp_path)], cache=IndexCache(tmp_path / "cache"))
