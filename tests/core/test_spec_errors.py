"""What is said about each field that is wrong on its own or beside its neighbours."""

from __future__ import annotations

from typing import Any

import pytest

from overlord.errors import SpecError
from overlord.job.specs import Batch, Custom, ImageText, Mixture, Source, Text


@pytest.mark.parametrize(
    ("build", "fields", "words"),
    [
        (Source, {"name": "", "path": "x"}, ["name is ''", "a source needs a name"]),
        (Source, {"name": "a/b c", "path": "x"}, ["name is 'a/b c'", "must not contain ' ', '/'"]),
        (Source, {"name": "a\x07", "path": "x"}, ["must not contain '\\x07'"]),
        (Source, {"name": 3, "path": "x"}, ["name is 3", "put it in quotes"]),
        (Source, {"name": "web"}, ["Source 'web': path: missing", "Add it"]),
        (Source, {"name": "web", "path": []}, ["path is []", "a glob, a folder or a URL"]),
        (Source, {"name": "web", "path": ["x", 3]}, ["path[1] is 3", "must be text"]),
        (Source, {"name": "web", "path": "x", "weight": -1}, ["weight is -1", "at least 0", "Write 0"]),
        (Source, {"name": "web", "path": "x", "weight": float("nan")}, ["weight is nan", "finite"]),
        (Source, {"name": "web", "path": "x", "weight": True}, ["weight is True", "finite number"]),
        (Source, {"name": "web", "path": "x", "tolerance": 3}, ["tolerance is 3", "between 0 and 1"]),
        (Source, {"name": "web", "path": "x", "shuffle_bytes": "4 miles"}, ["'4 miles'", '"4MiB"']),
        (Source, {"name": "web", "path": "x", "shuffle_bytes": -1}, ["is -1", "write 0 to keep"]),
        (Source, {"name": "web", "path": "x", "lengths": ""}, ["lengths is ''", "must not be empty"]),
        (Source, {"name": "web", "path": "x", "sample": "text"}, ["sample is 'text'", "ol.Text(..)"]),
        (
            Source,
            {"name": "web", "path": "x", "sample": {"kind": "imgtext"}},
            ["sample.kind", "'image_text'?"],
        ),
        (Source, {"name": "web", "path": "x", "sample": {"kind": "custom"}}, ["Use a Python job file"]),
        (
            Source,
            {"name": "web", "path": "x", "sample": {"kind": "text", "colum": "a"}},
            ["sample.colum", "'column'?"],
        ),
        (Source, {"name": "web", "path": "x", "sample": {"text": 5}}, ["sample.column is 5", "must be text"]),
        (Text, {"tokenized": "perhaps"}, ["tokenized is 'perhaps'", "true or false"]),
        (ImageText, {"size": 100}, ["size: 100 is not a multiple of patch*merge = 16", "Write size=96"]),
        (ImageText, {"patch": 0}, ["patch is 0", "at least 1", "no patches"]),
        (
            ImageText,
            {"min_pixels": 900, "max_pixels": 800},
            ["min_pixels: 900 is more than max_pixels = 800"],
        ),
        (ImageText, {"patch": 64, "merge": 32}, ["max_pixels", "less than one token", "max_pixels=4194304"]),
        (ImageText, {"width": "w"}, ["height: missing, although width is given"]),
        (ImageText, {"image_token": -1}, ["image_token is -1", "<image>"]),
        (Custom, {"fn": 3}, ["fn is 3", "Python function"]),
        (Batch, {"context_length": 0, "global_tokens": 8}, ["context_length is 0", "nothing would count in the loss"]),
        (Batch, {"context_length": 8, "global_tokens": -5}, ["global_tokens is -5", "a step would be empty"]),
        (Batch, {"context_length": 8, "global_samples": 0}, ["global_samples is 0", "at least 1"]),
        (
            Batch,
            {"context_length": 2.5, "global_samples": 1},
            ["context_length is 2.5", "whole number, such as 8192"],
        ),
        (Batch, {"context_length": 8}, ["global_tokens or by global_samples, but neither", "exactly one"]),
        (Batch, {"context_length": 8, "global_tokens": 8, "global_samples": 1}, ["both are given"]),
        (
            Batch,
            {"context_length": 8, "global_tokens": 7},
            ["7 is less than context_length = 8", "global_tokens=8"],
        ),
        (
            Batch,
            {"context_length": 8, "global_samples": 1, "microbatch_tokens": 4},
            ["microbatch_tokens: 4 is less than context_length = 8"],
        ),
        (Batch, {"context_length": 8, "global_samples": 1, "microbatches": 0}, ["microbatches is 0"]),
        (Mixture, {"weights": {"a": -1}}, ["weights.a is -1", "0 or more"]),
        (Mixture, {"weights": {"a": float("inf")}}, ["weights.a is inf", "finite"]),
        (Mixture, {"weights": {"a": "lots"}}, ["weights.a is 'lots'", "finite number"]),
        (Mixture, {"weights": {"a": 0.0, "b": 0}}, ["the weights sum to zero", "nothing could be drawn"]),
        (Mixture, {"weights": {"a": 1}, "temperature": 0}, ["temperature is 0", "more than 0"]),
        (Mixture, {"max_repetition": 0}, ["max_repetition is 0", "at least 1"]),
        (
            Mixture,
            {"max_repetition": 2, "stopping": "first_exhausted"},
            ["max_repetition: stopping='first_exhausted' never repeats", "Leave max_repetition out"],
        ),
        (Mixture, {"max_repetition": 2, "stopping": "all_exhausted_without_replacement"}, ["never repeats"]),
        (
            Mixture,
            {"stopping": "all_exausted"},
            ["stopping is 'all_exausted'", "Did you mean 'all_exhausted'?"],
        ),
        (
            Mixture,
            {"order": "sequential"},
            ["never leave its first source", "all_exhausted_without_replacement"],
        ),
        (Mixture, {"weights": {"a": 1}, "step": {"a": {0: 1}}}, ["step: given beside weights", "Keep one"]),
    ],
)
def test_refused(build: Any, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        build(**fields)
    text = str(caught.value)
    assert "\n" not in text and "pydantic" not in text and "Value error" not in text
    assert text.startswith(build.__name__)
    for word in words:
        assert word in text
