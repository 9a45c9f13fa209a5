"""Folders as datasets on the Hugging Face Hub, and those of Energon, are laid out: which files a split has.

The card of a dataset (`README.md`) may list configurations with the files of their splits; Energon writes the shards of
each split into `.nv-meta/split.yaml`. Without such a list, a split is known by its name in the names of folders and
files, as the Hub does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from overlord.core.spec_errors import did_you_mean, list_some
from overlord.errors import SourceError
from overlord.job.plain_yaml import TooMuchYaml, load_yaml
from overlord.readers.files import DESCRIPTION_BYTES, DESCRIPTIONS, WILDCARD, glob_regex

CARD, *_ENERGON = DESCRIPTIONS
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files that mean a split, where they are not the name of the split itself."""

_NOT_LISTED = ""
"""Stands for a split where a configuration tells a folder only: names of files tell the splits in it."""
Splits = dict[str, list[str]]
"""The patterns of the files of each split."""


def split_files(names: Sequence[str], texts: Mapping[str, str], *, config: str | None, split: str | None) -> list[str]:
    r"""Return the files of a split, in the order given; all of them where nothing is to be chosen.

    Args:
        names: The data files, relative to the folder.
        texts: Of the files that describe the dataset, those that it has, by their names.
        config: The configuration; None for the default one.
        split: The split; None for the only one.

    Raises:
        SourceError: There is no such configuration or split, or it is not clear which one is meant.

    Example:
        >>> names = ["data/train-0.parquet", "data/train-1.parquet", "data/test-0.parquet"]
        >>> split_files(names, {}, config=None, split="test")
        ['data/test-0.parquet']
        >>> card = "---\nconfigs: [{config_name: en, data_files: {train: data/train-*}}]\n---\n# A dataset"
        >>> split_files(names, {"README.md": card}, config="en", split=None)
        ['data/train-0.parquet', 'data/train-1.parquet']
    """
    shards = next((texts[name] for name in _ENERGON if name in texts), None)
    if shards is not None and config is None:
        return _energon_files(names, shards, split)
    configs, default = _configs_of(texts.get(CARD))
    if not configs:
        if config is not None:
            raise SourceError(
                f"config={config!r}, but there is no {CARD} with a list of configurations; it cannot be known which "
                "files are meant. Leave config out, and name the files or a folder in the path."
            )
        return list(names) if split is None else _by_name(names, split)
    chosen = config if config is not None else default
    if chosen is None:
        raise SourceError(f"its {CARD} has several configurations; they would be mixed. {_choose('config', configs)}")
    if chosen not in configs:
        told = _choose("config", configs, chosen)
        raise SourceError(f"its {CARD} has no configuration {chosen!r}; nothing would be read. {told}")
    splits = configs[chosen]
    if _NOT_LISTED in splits:
        inside = _matching(names, splits[_NOT_LISTED])
        return inside if split is None else _by_name(inside, split)
    wanted = _wanted_split(splits, split, f"configuration {chosen!r}")
    found = _matching(names, splits[wanted])
    if not found:
        raise SourceError(
            f"no file matches {list_some(splits[wanted])}, which its {CARD} gives for split {wanted!r}; the source "
            "would have no samples. Download the dataset again, or name the files in the path."
        )
    return found


_MOST_PATTERNS = 1000
"""Patterns with wildcards that a split may have: each is compared with the name of every file."""
_LONGEST_PATTERN = 4096
"""As long as a path may be."""


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    exact = set(patterns)
    found = [glob_regex(pattern) for pattern in patterns if WILDCARD.search(pattern)]
    return [name for name in names if name in exact or any(pattern.fullmatch(name) for pattern in found)]


def _choose(field: str, choices: Mapping[str, object], given: str | None = None) -> str:
    close = did_you_mean(given, list(choices)) if given is not None else ""
    return f"Set {field}= to one of {list_some(list(choices))}.{close}"


def _wanted_split(splits: Mapping[str, object], split: str | None, where: str) -> str:
    """Return the split that is read: the given one, or the only one there is."""
    if split is None and len(splits) != 1:
        raise SourceError(f"{where} has several splits; they would be mixed. {_choose('split', splits)}")
    wanted = split if split is not None else next(iter(splits))
    if wanted not in splits:
        told = _choose("split", splits, wanted)
        raise SourceError(f"{where} has no split {wanted!r}; nothing would be read. {told}")
    return wanted


def _by_name(names: Sequence[str], split: str) -> list[str]:
    of = {name: _split_in(name, split) for name in names}
    if split not in of.values():
        known = sorted({one for one in of.values() if one is not None})
        raise SourceError(
            f"no name of a file or folder tells that it belongs to split {split!r}"
            f"{f' (there are {list_some(known)})' if known else ''}; the source would have no samples. Set split= to "
            "another one, or leave it out and name the files in the path."
        )
    return [name for name in names if of[name] == split]


def _split_in(name: str, asked: str) -> str | None:
    """Return the split that a path names: the first folder, or the file, with a word that means one."""
    words = {word: split for split, some in _WORDS.items() for word in some}
    exact = re.compile(rf"(?<![a-z]){re.escape(asked.lower())}(?![a-z])")
    for part in name.lower().split("/"):
        if exact.search(part):
            return asked
        for word in re.split(r"[-._ 0-9]+", part):
            if word in words:
                return words[word]
    return None


_HEAD_BEGINS = re.compile(r"\ufeff?---[ \t\r]*\n")
_HEAD = re.compile(_HEAD_BEGINS.pattern + r"(.*?)\n---[ \t\r]*(?:\n|$)", re.DOTALL)
_UNUSABLE = (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""What a text that is no such list raises where it is read."""


def _reason(error: Exception) -> str:
    return f"it {error}" if isinstance(error, TooMuchYaml) else type(error).__name__


def _unreadable(name: str, reason: str) -> SourceError:
    if name == CARD:
        return SourceError(
            f"the list of configurations in its {CARD} cannot be read ({reason}); it is not known which files belong "
            "to which split. Correct it, or name the files in the path."
        )
    return SourceError(
        f"the splits in its {name} cannot be read ({reason}); it is not known which shards belong to which split. "
        "Prepare the dataset again, or name the shards in the path."
    )


def _configs_of(card: str | None) -> tuple[dict[str, Splits], str | None]:
    """Return the configurations of a card, and the default one: the only one, or the one that is called so."""
    head = _HEAD.match(card or "")
    if head is None:
        if _HEAD_BEGINS.match(card or "") and len(card or "") >= DESCRIPTION_BYTES:
            raise _unreadable(CARD, f"its head, up to a second line of ---, has more than {DESCRIPTION_BYTES} bytes")
        return {}, None
    try:
        listed = (load_yaml(head[1]) or {}).get("configs") or []
        configs = {str(one["config_name"]): _splits_of(one) for one in listed}
        marked = [str(one["config_name"]) for one in listed if one.get("default")]
    except _UNUSABLE as error:
        raise _unreadable(CARD, _reason(error)) from error
    names = [*marked, *(["default"] if "default" in configs else []), *(configs if len(configs) == 1 else [])]
    return configs, names[0] if names else None


def _splits_of(config: Mapping[str, Any]) -> Splits:
    """Return the patterns of a configuration: one for all, one by split, or a list of splits and paths."""
    given = config.get("data_files", {_NOT_LISTED: "**"})
    if isinstance(given, str) or (isinstance(given, list) and all(isinstance(one, str) for one in given)):
        given = {"train": given}
    if isinstance(given, list):
        given = {one["split"]: one["path"] for one in given}
    folder = str(config.get("data_dir") or "").strip("/")
    found: Splits = {}
    for split, patterns in given.items():
        some = [patterns] if isinstance(patterns, str) else [str(one) for one in patterns]
        found[str(split)] = ["/".join(filter(None, (folder, one.removeprefix("./")))) for one in some]
        if sum(map(bool, map(WILDCARD.search, found[str(split)]))) > _MOST_PATTERNS:
            raise TooMuchYaml(f"has more than {_MOST_PATTERNS} patterns for a split")
        if any(len(one) > _LONGEST_PATTERN for one in found[str(split)]):
            raise TooMuchYaml(f"has a pattern of more than {_LONGEST_PATTERN} characters")
    return found


# Energon


_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_SHARDS = 1 << 17
_MOST_CHARACTERS = 1 << 28
"""Of all names that a pattern stands for."""


def _energon_files(names: Sequence[str], text: str, split: str | None) -> list[str]:
    try:
        found = load_yaml(text)
        listed = {str(name): shards or () for name, shards in found["split_parts"].items()}
        lists = [*listed.values(), found.get("exclude") or ()]
        names_of = _expanded([[str(shard) for shard in shards] for shards in lists])
        parts, excluded = dict(zip(listed, names_of, strict=False)), set(names_of[-1])
    except _UNUSABLE as error:
        raise _unreadable(_ENERGON[0], _reason(error)) from error
    used = {name: shards for name, shards in parts.items() if shards}
    wanted = _wanted_split(used, split, f"its {_ENERGON[0]}")
    shards = set(used[wanted])
    single = sorted(one for one in excluded - shards if one.rpartition("/")[0] in shards)
    if single:
        raise SourceError(
            f"its {_ENERGON[0]} excludes single samples ({list_some(single, 3)}), and only whole shards can be left "
            "out; they would be trained on. Write the shards without them, or take the entries out of the list."
        )
    missing = sorted(shards - excluded - set(names))
    if missing:
        raise SourceError(
            f"{len(missing)} shards of split {wanted!r} are not there ({list_some(missing, 3)}); the source would have "
            "other samples than its splits say. Copy them, or prepare the dataset again."
        )
    return [name for name in names if name in shards - excluded]


def _expanded(lists: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names that several lists of patterns stand for."""
    found: list[list[str]] = []
    left = _MOST_SHARDS
    for patterns in lists:
        found.append([])
        for pattern in patterns:
            try:
                names = expand(pattern, left)
            except ValueError as error:
                raise TooMuchYaml(f"names more than {_MOST_SHARDS} shards") from error
            found[-1] += names
            left -= len(names)
    return found


def expand(pattern: str, most: int = _MOST_SHARDS) -> list[str]:
    """Return the names that a pattern with braces stands for, as in a shell: lists, and ranges of numbers.

    Raises:
        ValueError: They are more than `most`, or too long together to be held in memory.

    Example:
        >>> expand("shard_{008..010}.tar"), expand("{a,b}.tar"), expand("c.tar")
        (['shard_008.tar', 'shard_009.tar', 'shard_010.tar'], ['a.tar', 'b.tar'], ['c.tar'])
    """
    most = min(most, _MOST_CHARACTERS // (len(pattern) + 1))
    found = _BRACES.search(pattern)
    if found is None:
        if most < 1:
            raise ValueError(pattern[:80])
        return [pattern]
    numbers = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", found[1])
    choices = found[1].split(",")
    if numbers is not None:
        first, last = int(numbers[1]), int(numbers[2])
        if abs(last - first) >= most:
            raise ValueError(pattern[:80])
        width = max(map(len, numbers.groups())) if any(one.startswith("0") for one in numbers.groups()) else 0
        step = 1 if last >= first else -1
        choices = [f"{number:0{width}d}" for number in range(first, last + step, step)]
    elif len(choices) == 1:
        return [pattern]
    names: list[str] = []
    for choice in choices:
        names += expand(pattern[: found.start()] + choice + pattern[found.end() :], most - len(names))
    return names
