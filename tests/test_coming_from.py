"""docs/coming-from.md: what is left of each script after its change runs, on files that the other tools write."""

from __future__ import annotations

import io
import json
import re
import runpy
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from overlord.integrations import torch_loader

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
READERS = ROOT / "tests" / "readers" / "data"
SCRIPTS = dict(re.findall(r"^## ([\w ]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
WORDS = [f"word{n}" for n in range(50)]
KEYS = {"Megatron": {"tokens", "labels", "loss_mask", "position_ids"}}


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_shards(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    picture = io.BytesIO()
    Image.fromarray(np.zeros((56, 84, 3), np.uint8)).save(picture, "JPEG")
    for shard in range(2):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for row in range(40):
                caption = " ".join(WORDS[: 3 + row % 9])
                add_member(tar, f"{row:04}.jpg", picture.getvalue())
                add_member(
                    tar, f"{row:04}.{text}", (json.dumps({"caption": caption}) if text == "json" else caption).encode()
                )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The data that the page names, where it says."""
    path = tmp_path_factory.mktemp("coming-from")
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<unk>", "<image>", *WORDS])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<image>"])
    words.save(str(path / "tokenizer.json"))
    (path / "data").mkdir()
    lines = [json.dumps({"text": " ".join(WORDS[: 5 + n % 40])}) + "\n" for n in range(200)]
    (path / "data" / "train.jsonl").write_text("".join(lines))
    Dataset.from_dict({"input_ids": [[n] * (500 + n) for n in range(200)]}).save_to_disk(path / "data" / "tokenized")
    write_shards(path / "shards", "txt")
    write_shards(path / "energon" / "coyo", "json")
    (path / "energon" / "coyo" / ".nv-meta").mkdir()
    split = "exclude: []\nsplit_parts:\n  train: [000.tar]\n  val: [001.tar]\n  test: []\n"
    (path / "energon" / "coyo" / ".nv-meta" / "split.yaml").write_text(split)
    shutil.copytree(READERS / "mds" / "raw", path / "mds" / "train")
    (path / "corpus").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(
            READERS / "megatron" / f"gpt_int32_text_document{suffix}", path / "corpus" / f"web_text_document{suffix}"
        )
    return path


def test_there_is_a_script_for_each():
    assert list(SCRIPTS) == ["torch DataLoader", "Hugging Face datasets", "WebDataset", "Mosaic streaming", "Energon",
                             "Megatron"]  # fmt: skip
    assert all(text.count("\n+") + text.count("\n-") < 20 for text in SCRIPTS.values())


@pytest.mark.parametrize(
    ("name", "runtime"),
    [*((name, "inline") for name in SCRIPTS), pytest.param("torch DataLoader", "local", marks=pytest.mark.slow)],
)
def test_the_changed_script_runs(name, runtime, folder, cache, monkeypatch, tmp_path):
    """Only the runtime and the cache are given from outside: a service in this process starts at once."""
    kept = [line[1:] for line in SCRIPTS[name].splitlines() if not line.startswith("-")]
    script = tmp_path / "script.py"
    script.write_text("\n".join(kept).replace("max_steps=1000", "max_steps=2"))
    assert "max_steps=2" in script.read_text()

    class Loader(torch_loader.DataLoader):
        def __init__(self, job, **options):
            super().__init__(job, runtime=runtime, cache=cache, **options)

    monkeypatch.setattr(torch_loader, "DataLoader", Loader)
    monkeypatch.chdir(folder)
    batches: list[dict[str, object]] = []
    names = runpy.run_path(str(script), {"train": batches.append})
    with names["loader"] as loader:
        assert json.loads(loader.state_dict()["stream"])["step"] == 2
    assert len(batches) >= 2
    for batch in batches:
        assert KEYS.get(name, {"input_ids", "labels"}) <= batch.keys()
        assert ("pixel_values" in batch) == (name in ("WebDataset", "Energon"))
