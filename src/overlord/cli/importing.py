"""`overlord import energon`: the blend of a Megatron-Energon metadataset as a manifest of sources with weights."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from overlord.core.spec_errors import did_you_mean, list_some
from overlord.errors import SourceError, SpecError
from overlord.job.plain_yaml import MOST_BYTES, TooMuchYaml, load_yaml
from overlord.job.specs import Source
from overlord.readers.dataset_card import split_files
from overlord.readers.files import DESCRIPTIONS

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_SAMPLES = {"Captioning": ("image_text", {"image": "image", "text": "caption"}), "Text": ("text", {"column": "text"})}
"""Types of samples that say what a row is: our kind, and our fields by those of Energon."""
_NOT_READ = {
    "join": "samples of several datasets are joined",
    "subset": "a part of a dataset is taken",
    "aux": "samples read from auxiliary datasets",
    "split_config": "another list of splits is taken",
}
_MOST_NESTED = 32


@dataclass(frozen=True, slots=True)
class Leaf:
    """A dataset of a blend."""

    path: str
    split: str
    weight: float | None = None
    """Its share of the blend; None where the dataset stands alone, or repetitions are told instead."""
    repetitions: float | None = None


def import_energon(path: Path, split: str, sample: Mapping[str, Any] | None) -> list[Source]:
    """Return the sources of a split of a metadataset, with the weights of its blend.

    Weights are multiplied down to the datasets, each level having a sum of 1. In a blend of repetitions
    (`blend_epochized`) the weight of a dataset is its share of the samples: repetitions times the samples of its split.

    Args:
        path: The YAML file.
        split: Which of its splits.
        sample: What a row is, for datasets whose `dataset.yaml` does not tell it; None refuses them.

    Raises:
        SpecError: The file cannot be read, or asks for something that is not imported.
    """
    leaves = _split_of(path, split, 0)
    if any(leaf.repetitions is not None for leaf in leaves):
        shares = [(leaf.repetitions or 0.0) * _samples(path, leaf) for leaf in leaves]
        total = math.fsum(shares) or 1.0
        leaves = [replace(leaf, weight=share / total) for leaf, share in zip(leaves, shares, strict=True)]
    sources: list[Source] = []
    for leaf, name in zip(leaves, _names([leaf.path for leaf in leaves]), strict=True):
        found = {} if leaf.path.endswith(".jsonl") else {"split": leaf.split}
        kind = _sample_of(leaf.path) or sample
        if kind is None:
            raise SpecError(
                f"{path}: the dataset.yaml of {leaf.path} does not tell what a row is; its samples could not be made. "
                "Give --sample, for instance '{kind: image_text, image: jpg, text: json.caption}'."
            )
        row = {"name": name, "path": leaf.path, "weight": 1.0 if leaf.weight is None else leaf.weight, **found}
        place = functools.partial(_place, path, leaf)
        sources.append(Source.from_mapping({**row, "sample": dict(kind)}, place))
    return sources


def _place(path: Path, leaf: Leaf, _: object) -> str:
    """Return where a source comes from, for messages."""
    return f"{path} ({leaf.path})"


def as_manifest(sources: Sequence[Source]) -> str:
    """Return sources as a manifest, one line each."""
    rows = [
        {
            "name": source.name,
            "path": source.path[0],
            "weight": source.weight,
            **({"split": source.split} if source.split is not None else {}),
            "sample": source.sample.model_dump(mode="json", exclude_defaults=True) | {"kind": source.sample.kind},
        }
        for source in sources
    ]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _text(path: Path) -> str:
    """Return the text of a file of a dataset.

    Raises:
        ValueError: It is longer than such a file may be, or not UTF-8.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path.name} has more than {MOST_BYTES} bytes")
    return data.decode()


def _split_of(path: Path, split: str, nested: int) -> list[Leaf]:
    try:
        found = load_yaml(_text(path))
        splits = found["splits"]
        names = [str(name) for name in splits]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError) as error:
        reason = f"it {error}" if isinstance(error, TooMuchYaml) else type(error).__name__
        raise SpecError(
            f"{path}: it is no metadataset of Energon ({reason}); there is nothing to import. Give the "
            "YAML file that has `splits` with a blend of datasets."
        ) from error
    if split not in names:
        raise SpecError(
            f"{path}: it has no split {split!r} (it has {list_some(names)}); there is nothing to import."
            f"{did_you_mean(split, names)} Choose one with --split."
        )
    if nested >= _MOST_NESTED:
        raise SpecError(f"{path}: metadatasets are nested more than {_MOST_NESTED} deep, or in a circle. Flatten them.")
    return _leaves(path, splits[split], split, nested)


def _leaves(path: Path, node: Any, split: str, nested: int) -> list[Leaf]:
    """Return the datasets under a node: a reference, or a blend of them."""
    if not isinstance(node, Mapping):
        raise SpecError(f"{path}: split {split!r} holds {node!r}, not a dataset or a blend. Correct the metadataset.")
    for field, what in _NOT_READ.items():
        if node.get(field) is not None:
            raise SpecError(
                f"{path}: with `{field}`, {what}, which is not imported; the sources would have other samples. Take it "
                "out of the metadataset, or write the sources by hand."
            )
    blends = [field for field in ("blend", "blend_epochized", "datasets") if field in node]
    if not blends:
        return _reference(path, node, split, nested)
    children = node[blends[0]] or []
    epochized = blends[0] == "blend_epochized"
    inner = [_leaves(path, child, split, nested) for child in children]
    numbers = [_number(path, child, "repetitions" if epochized else "weight") for child in children]
    mixed = [
        leaf for leaves in inner for leaf in leaves if (leaf.weight if epochized else leaf.repetitions) is not None
    ]
    total = math.fsum(numbers)
    if mixed or total <= 0:
        why = "weights and repetitions are mixed in one blend" if mixed else "all weights of a blend are 0"
        raise SpecError(f"{path}: {why}; the shares of its datasets are not known. Correct the metadataset.")
    found: list[Leaf] = []
    for leaves, number in zip(inner, numbers, strict=True):
        for leaf in leaves:
            if epochized:
                found.append(replace(leaf, repetitions=number * (leaf.repetitions or 1.0)))
            else:
                share = 1.0 if leaf.weight is None else leaf.weight
                found.append(replace(leaf, weight=share * number / total))
    return found


def _reference(path: Path, node: Mapping[str, Any], split: str, nested: int) -> list[Leaf]:
    given, part = node.get("path"), node.get("split_part") or split
    if not isinstance(given, str) or not given:
        raise SpecError(f"{path}: a dataset has no path; it cannot be found. Correct the metadataset.")
    if _URL.match(given):
        return [Leaf(given, part)]
    where = (path.parent / given).absolute()
    if where.is_file() and where.suffix in (".yaml", ".yml"):
        return _split_of(where, part, nested + 1)
    if not where.exists():
        raise SpecError(
            f"{path}: the dataset {where} is not there; its source would have no samples. Correct the path."
        )
    return [Leaf(str(where), part)]


def _number(path: Path, child: Any, field: str) -> float:
    value = child.get(field, 1) if isinstance(child, Mapping) else 1
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise SpecError(f"{path}: {field} is {value!r}; a share of a blend is 0 or more. Correct the metadataset.")
    return float(value)


def _samples(path: Path, leaf: Leaf) -> int:
    """Return how many samples a split of a prepared dataset has, as Energon counted them."""
    folder = Path(leaf.path)
    try:
        counts = json.loads(_text(folder / ".nv-meta" / ".info.json"))["shard_counts"]
        texts = {name: _text(folder / name) for name in DESCRIPTIONS if (folder / name).is_file()}
        return sum(int(counts[name]) for name in split_files(list(counts), texts, config=None, split=leaf.split))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SourceError) as error:
        raise SpecError(
            f"{path}: repetitions of {leaf.path} are told, and how many samples its split {leaf.split!r} has is not "
            f"known ({error}); its share cannot be computed. Prepare the dataset (`energon prepare`), or write weights."
        ) from error


def _sample_of(folder: str) -> dict[str, str] | None:
    """Return what a row of a dataset is, by its `dataset.yaml`; None where that does not tell, or by code only."""
    try:
        found = load_yaml(_text(Path(folder) / ".nv-meta" / "dataset.yaml"))
        name = str(found["sample_type"]["__class__"] if "sample_type" in found else found["__class__"])
        kind, fields = _SAMPLES[re.sub("(Sample|Webdataset)$", "", name)]
        columns = {ours: _column(str(found["field_map"][theirs])) for ours, theirs in fields.items()}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if any(column is None for column in columns.values()):
        return None
    return {"kind": kind, **{ours: column for ours, column in columns.items() if column}}


def _column(field: str) -> str | None:
    """Return a field of Energon as a column; None for a choice of several.

    Example:
        >>> _column("jpg"), _column("json[caption][en]"), _column("jpg,png")
        ('jpg', 'json.caption.en', None)
    """
    found = re.fullmatch(r"([^\[\],]+)((?:\[[^\[\],]+\])*)", field.strip())
    return found[1] + found[2].replace("[", ".").replace("]", "") if found else None


def _names(paths: Sequence[str]) -> list[str]:
    """Return names of sources: the last folders of their paths, as many as it takes, and numbers for the same path."""
    parts = [[re.sub(r"[/:@\s]", "-", part) for part in path.rstrip("/").split("/") if part] for path in paths]
    names: list[str] = []
    for number, own in enumerate(parts):
        others = [other for other in parts if other != own]
        depth = next((d for d in range(1, len(own) + 1) if all(o[-d:] != own[-d:] for o in others)), len(own))
        again = parts[:number].count(own)
        names.append("-".join(own[-depth:]) + (f"-{again + 1}" if again else ""))
    return names
