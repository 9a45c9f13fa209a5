"""`overlord import energon`: weights as Energon computes them, what a row is, and what is refused."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.importing import import_energon
from overlord.cli.main import app
from overlord.errors import SpecError
from overlord.job_files import read_manifest

CAPTIONS = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
    "field_map": {"image": "jpg", "caption": "json[caption][en]"},
}
TEXTS = {"__module__": "megatron.energon", "__class__": "TextWebdataset", "field_map": {"text": "txt"}}


def dataset(folder: Path, counts: dict[str, int], config: dict | None = None) -> None:
    """Write a dataset as `energon prepare` leaves it: all shards but the last are of the split train."""
    (folder / ".nv-meta").mkdir(parents=True)
    names = list(counts)
    for name in names:
        with tarfile.open(folder / name, "w") as tar:
            for number in range(counts[name]):
                info = tarfile.TarInfo(f"{number:04d}.txt")
                info.size = 5
                tar.addfile(info, io.BytesIO(b"words"))
    parts = {"train": names[:-1], "val": names[-1:], "test": []}
    (folder / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump({"split_parts": parts, "exclude": []}))
    (folder / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": counts}))
    if config is not None:
        (folder / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump(config))


def metadataset(path: Path, splits: dict, version: str = "MetadatasetV2") -> Path:
    path.write_text(yaml.safe_dump({"__module__": "megatron.energon", "__class__": version, "splits": splits}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dataset(tmp_path / "a" / "coyo", {"0.tar": 3, "1.tar": 5, "2.tar": 2}, CAPTIONS)
    dataset(tmp_path / "b" / "coyo", {"0.tar": 4, "1.tar": 2}, CAPTIONS)
    dataset(tmp_path / "web", {"0.tar": 6, "1.tar": 1}, TEXTS)
    return tmp_path


def weights(path: Path, split: str = "train") -> dict[str, float | None]:
    return {source.name: source.weight for source in import_energon(path, split, None)}


def test_weights_are_multiplied_down_to_the_datasets(folder: Path):
    metadataset(
        folder / "images.yaml",
        {"train": {"blend": [{"path": "a/coyo", "weight": 1}, {"path": "b/coyo", "weight": 3}]}},
    )
    path = metadataset(
        folder / "all.yaml",
        {
            "train": {
                "blend": [{"path": "images.yaml", "weight": 8}, {"path": "web", "split_part": "val", "weight": 2}]
            },
            "val": {"path": "web"},
        },
    )
    assert weights(path) == pytest.approx({"a-coyo": 0.2, "b-coyo": 0.6, "web": 0.2})
    assert [source.split for source in import_energon(path, "train", None)] == ["train", "train", "val"]
    assert weights(path, "val") == {"web": 1.0}
    old = metadataset(
        folder / "v1.yaml", {"train": {"datasets": [{"path": "web", "weight": 1}, {"path": "web"}]}}, "Metadataset"
    )
    assert weights(old) == {"web": 0.5, "web-2": 0.5}


def test_repetitions_become_shares_of_samples(folder: Path):
    inner = {"blend_epochized": [{"path": "a/coyo", "repetitions": 2}]}
    metadataset(folder / "inner.yaml", {"train": inner})
    outer = [{"path": "inner.yaml", "repetitions": 1.5}, {"path": "web"}]
    path = metadataset(folder / "all.yaml", {"train": {"blend_epochized": outer}})
    assert weights(path) == pytest.approx({"coyo": 24 / 30, "web": 6 / 30})  # 3 x 8 samples, 1 x 6


def test_what_a_row_is_comes_from_the_dataset(folder: Path):
    path = metadataset(folder / "all.yaml", {"train": {"blend": [{"path": "a/coyo"}, {"path": "web"}]}})
    images, texts = (source.sample for source in import_energon(path, "train", None))
    assert images == ol.ImageText(image="jpg", text="json.caption.en") and texts == ol.Text("txt")
    (folder / "web" / ".nv-meta" / "dataset.yaml").write_text(yaml.safe_dump({"__class__": "CrudeWebdataset"}))
    with pytest.raises(SpecError, match=r"web does not tell what a row is; .* Give --sample"):
        import_energon(path, "train", None)
    sources = import_energon(path, "train", {"kind": "text", "column": "json.body"})
    assert [source.sample for source in sources] == [images, ol.Text("json.body")]


def test_the_manifest_runs(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    metadataset(folder / "all.yaml", {"train": {"blend": [{"path": "web", "weight": 3}, {"path": "a/coyo"}]}})
    done = CliRunner().invoke(app, ["import", "energon", "all.yaml", "--out", "out/sources.jsonl", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["sources"] == {"web": 0.75, "coyo": 0.25}
    web, coyo = read_manifest(folder / "out" / "sources.jsonl")
    assert (web.name, web.split, web.sample) == ("web", "train", ol.Text("txt"))
    assert coyo.sample == ol.ImageText(image="jpg", text="json.caption.en")
    shown = CliRunner().invoke(app, ["import", "energon", "all.yaml"])
    assert "sources: {manifest: sources.jsonl}" in shown.stdout and "mixture: {level: sample}" in shown.stdout


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({"join": [{"path": "web"}, {"path": "a/coyo"}]}, "with `join`, samples of several datasets are joined"),
        ({"path": "web", "subset": {"range": ["0%", "50%"]}}, "with `subset`, a part of a dataset is taken"),
        ({"blend": [{"path": "web", "aux": {"x": "a/coyo"}}]}, "with `aux`, samples read from auxiliary"),
        ({"blend": [{"path": "nowhere"}]}, "nowhere is not there"),
        ({"blend": [{"path": "web", "weight": -1}]}, "weight is -1"),
        ({"blend": [{"path": "web", "weight": 0}]}, "all weights of a blend are 0"),
        ({"blend": [{"weight": 1}]}, "a dataset has no path"),
        ({"blend": ["web"]}, "holds 'web', not a dataset or a blend"),
        ({"blend": [{"path": "circle.yaml"}]}, "nested more than 32 deep, or in a circle"),
        ({"blend": [{"path": "repeated.yaml"}]}, "weights and repetitions are mixed"),
        ({"blend_epochized": [{"path": "bare"}]}, "how many samples its split 'train' has is not known"),
    ],
)
def test_what_is_not_imported_is_refused(node: dict, why: str, folder: Path):
    metadataset(folder / "circle.yaml", {"train": {"path": "circle.yaml"}})
    metadataset(folder / "repeated.yaml", {"train": {"blend_epochized": [{"path": "web"}]}})
    (folder / "bare").mkdir()
    with pytest.raises(SpecError, match=why):
        import_energon(metadataset(folder / "all.yaml", {"train": node}), "train", {"kind": "text"})


def test_files_that_are_none_are_refused(folder: Path):
    (folder / "x.yaml").write_text("a: [")
    for path in (folder / "x.yaml", folder / "missing.yaml", folder / "web" / ".nv-meta" / "dataset.yaml"):
        with pytest.raises(SpecError, match="it is no metadataset of Energon"):
            import_energon(path, "train", None)
    path = metadataset(folder / "all.yaml", {"train": {"path": "web"}})
    with pytest.raises(SpecError, match=r"has no split 'trian' \(it has 'train'\).* Did you mean 'train'"):
        import_energon(path, "trian", None)
    done = CliRunner().invoke(app, ["import", "energon", str(path), "--out", "sources.yaml"])
    assert done.exit_code == 2 and "ends in .jsonl" in done.output
    done = CliRunner().invoke(app, ["import", "energon", str(path), "--sample", "{oops"])
    assert done.exit_code == 2 and "is no mapping" in done.output
