"""The demo's data: its distributions, its formats, and that it is written once."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.demo import demo_data
from examples.demo.demo_data import SPECIAL_TOKENS, DemoFiles, demo_job, write_demo
from PIL import Image
from tokenizers import Tokenizer

from overlord.cli.demo import load_generator
from overlord.errors import SpecError

NAMES = ["web", "books", "code", "wiki", "forum", "coyo", "photos", "charts"]
SCALE = 0.15


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    return write_demo(tmp_path_factory.mktemp("demo"), scale=SCALE)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> DemoFiles:
    return write_demo(tmp_path_factory.mktemp("small"), scale=0.01)


@pytest.fixture(scope="module")
def tokenizer(demo: DemoFiles) -> Tokenizer:
    return Tokenizer.from_file(str(demo.tokenizer))


def files_of(demo: DemoFiles, name: str) -> list[Path]:
    return sorted(demo.folder.glob(str(Path(demo.sources[name]).relative_to(demo.folder))))


def json_texts(demo: DemoFiles, name: str) -> list[str]:
    texts: list[str] = []
    for path in files_of(demo, name):
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".zst":
            data = pa.input_stream(str(path), compression="zstd").read()
        texts += [json.loads(line)["text"] for line in data.splitlines()]
    return texts


def members(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def lengths(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    return np.array([len(encoding.ids) for encoding in tokenizer.encode_batch(texts)])


def test_eight_sources_with_the_samples_they_say(demo: DemoFiles) -> None:
    found = {name: sum(pq.read_metadata(p).num_rows for p in files_of(demo, name)) for name in ("web", "books", "coyo")}
    found |= {name: len(json_texts(demo, name)) for name in ("code", "wiki", "forum")}
    found["photos"] = sum(len(members(p)) // 2 for p in files_of(demo, "photos"))
    found["charts"] = pa.ipc.open_file(str(files_of(demo, "charts")[0])).read_all().num_rows
    assert list(demo.sources) == NAMES
    assert found == demo.samples


def test_total_bytes_is_what_lies_on_disk(demo: DemoFiles) -> None:
    on_disk = sum(p.stat().st_size for p in demo.folder.rglob("*") if p.is_file() and p.name != "demo.json")
    assert demo.total_bytes == on_disk
    # The full demo stays under 60 MB.
    assert demo.total_bytes / SCALE < 60e6


def test_captions_are_skewed_as_in_the_paper(demo: DemoFiles, tokenizer: Tokenizer) -> None:
    captions = [c for p in files_of(demo, "coyo") for c in pq.read_table(p)["caption"].to_pylist()]
    found = np.sort(lengths(tokenizer, captions))
    longest = found[len(found) - round(0.0162 * len(found)) :]
    assert 0.975 <= (found <= 64).mean() <= 0.99
    assert longest.min() > 64
    assert 0.06 <= longest.sum() / found.sum() <= 0.12


def test_web_lengths_have_a_long_tail(demo: DemoFiles, tokenizer: Tokenizer) -> None:
    texts = [t for p in files_of(demo, "web") for t in pq.read_table(p)["text"].to_pylist()]
    found = lengths(tokenizer, texts)
    assert found.min() >= 20
    assert 4000 <= found.max() <= 6000
    assert found.max() > 10 * np.median(found)


def test_books_are_longer_than_a_context(demo: DemoFiles, tokenizer: Tokenizer) -> None:
    texts = [t for p in files_of(demo, "books") for t in pq.read_table(p)["text"].to_pylist()]
    assert np.median(lengths(tokenizer, texts)) > 4096


def test_code_looks_like_python(demo: DemoFiles) -> None:
    texts = json_texts(demo, "code")
    assert all(text.startswith("import json\n") for text in texts)
    assert sum("def " in text or "class " in text for text in texts) > 0.8 * len(texts)


def test_images_differ_in_size_and_are_no_solid_colour(demo: DemoFiles) -> None:
    blobs = [b for p in files_of(demo, "coyo") for b in pq.read_table(p)["jpg"].to_pylist()]
    images = [Image.open(io.BytesIO(blob)) for blob in blobs]
    pixels = np.array([image.width * image.height for image in images])
    assert {image.format for image in images} == {"JPEG"}
    assert min(min(i.size) for i in images) >= 96
    assert max(max(i.size) for i in images) <= 768
    assert np.quantile(pixels, 0.95) > 4 * np.median(pixels)
    assert np.median([len(blob) for blob in blobs] / pixels) > 0.1
    assert np.asarray(images[0]).std() > 10


def test_photos_pair_a_picture_with_its_text(demo: DemoFiles) -> None:
    assert members(files_of(demo, "photos")[0])[:4] == [
        "000000.jpg",
        "000000.txt",
        "000001.jpg",
        "000001.txt",
    ]


def test_charts_are_wide_and_tall(demo: DemoFiles) -> None:
    table = pa.ipc.open_file(str(files_of(demo, "charts")[0])).read_all()
    sizes = [Image.open(io.BytesIO(blob)).size for blob in table["image"].to_pylist()]
    aspects = [width / height for width, height in sizes]
    assert max(aspects) > 2
    assert min(aspects) < 0.5


def test_tokenizer_knows_the_special_tokens_and_round_trips(demo: DemoFiles, tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.get_vocab_size() == 4096
    text = json_texts(demo, "wiki")[0]
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_complete_demo_is_not_written_again(demo: DemoFiles) -> None:
    before = {p: p.stat().st_mtime_ns for p in demo.folder.rglob("*")}
    seen: list[str] = []
    assert write_demo(demo.folder, scale=SCALE, progress=lambda name, done, total: seen.append(name)) == demo
    assert seen == []
    assert {p: p.stat().st_mtime_ns for p in demo.folder.rglob("*")} == before


def digests(folder: Path) -> dict[str, str]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_two_folders_hold_the_same_bytes(small: DemoFiles, tmp_path: Path) -> None:
    write_demo(tmp_path, scale=0.01)
    assert digests(tmp_path) == digests(small.folder)


@pytest.mark.parametrize("damage", ["truncate", "remove", "marker", "stale"])
def test_a_damaged_demo_is_written_again(small: DemoFiles, tmp_path: Path, damage: str) -> None:
    shutil.copytree(small.folder, tmp_path, dirs_exist_ok=True)
    victim = tmp_path / "forum" / "forum-000.jsonl"
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:100])
    elif damage == "remove":
        victim.unlink()
    elif damage == "marker":
        (tmp_path / "demo.json").write_text("{")
    else:
        victim.with_name("forum-999.jsonl").write_text("{}\n")
    assert write_demo(tmp_path, scale=0.01).samples == small.samples
    assert digests(tmp_path) == digests(small.folder)


def test_progress_reaches_every_source(tmp_path: Path) -> None:
    last: dict[str, tuple[int, int]] = {}
    files = write_demo(tmp_path, scale=0.01, progress=lambda name, done, total: last.update({name: (done, total)}))
    assert last == {name: (n, n) for name, n in files.samples.items()} | {"tokenizer": (1, 1)}


def test_a_scale_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"scale=0 would write no samples; give a number above 0"):
        write_demo(tmp_path, scale=0)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("")
    with pytest.raises(SpecError, match=r"taken' is a file; nothing was written: name a folder instead"):
        write_demo(path)


def test_the_job_reads_the_eight_sources(demo: DemoFiles) -> None:
    job = demo_job(demo)
    assert [source.name for source in job.sources] == NAMES
    assert job.batch.context_length == 4096
    assert job.batch.global_tokens == 65536
    assert job.seed == 0
    assert job.mixture.level == "token"


def test_the_demo_command_finds_the_generator_of_a_checkout_and_of_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path(demo_data.__file__).resolve()
    assert Path(load_generator().__file__).resolve() == here
    wheel = tmp_path / "site-packages" / "overlord"
    monkeypatch.setattr("overlord.cli.demo.__file__", str(wheel / "cli" / "demo.py"))
    with pytest.raises(SpecError, match=r"data generator is neither .*_demo.* nor .*Install overlord again"):
        load_generator()
    (wheel / "_demo").mkdir(parents=True)
    shutil.copy(here, wheel / "_demo" / here.name)
    loaded = load_generator()
    assert Path(loaded.__file__) == wheel / "_demo" / here.name
    assert loaded.demo_job(loaded.DemoFiles(tmp_path, dict.fromkeys(loaded._PLANS, "x"), tmp_path, 0, {})).seed == 0


def test_a_wheel_carries_the_generator_as_data() -> None:
    """The folder that `load_generator` looks into is where the build puts `examples/demo`."""
    settings = tomllib.loads((Path(demo_data.__file__).parents[2] / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "examples/demo" in wheel["only-include"] and wheel["sources"]["examples/demo"] == "overlord/_demo"
