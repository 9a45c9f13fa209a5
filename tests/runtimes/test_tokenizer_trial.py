"""Tokenizers and chat templates that never end, take all memory or crash: refused at launch, in words."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import overlord as ol
from overlord.errors import OverlordError, SourceError, SpecError
from overlord.runtimes.launching.tokenizer_trial import try_tokenizer
from overlord.runtimes.supervision.process_workers import ProcessWorkers

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
Change = Callable[[dict[str, Any]], object]
LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


def job_of(
    folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None, template: str = TEMPLATE
) -> ol.Job:
    vocab = {"<unk>": 0, **{f"w{n}": n + 1 for n in range(50)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    content = json.loads(tokenizer.to_str())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    row = {"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]}
    (folder / "chat.jsonl").write_text((json.dumps(row) + "\n") * 20)
    source = ol.Source("chat", folder / "chat.jsonl", sample=ol.Chat("messages", template=template))
    batch = ol.Batch(context_length=64, global_samples=4)
    return ol.Job(sources=[source], tokenizer=folder / "tokenizer.json", batch=batch)


def special_token_without_id(content: dict[str, Any]) -> None:
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "Z", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }


def growing_text(content: dict[str, Any]) -> None:
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 5,
    }


TOKENIZERS: dict[str, tuple[Change, str]] = {
    "a panic": (special_token_without_id, r"fails on an ordinary text \(the tokenizer panics: no entry found"),
    "an abort": (
        lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA////"}),
        "tokenizer.json'.* (crashed|is not a tokenizer file)",
    ),
    "ids without end": (lambda content: content["model"]["vocab"].update(w1=3_000_000_000), "ids up to 3000000000"),
    "a text that grows": (growing_text, "crashed, or needed more than 2 GiB of memory"),
    "a prefix of megabytes": (
        lambda content: content.update(normalizer={"type": "Prepend", "prepend": "w1 " * 300_000}),
        r"makes 300\d+ tokens of a text of",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "why"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_in_words(change: Change, why: str, tmp_path: Path):
    with pytest.raises(SpecError, match=why):
        try_tokenizer(job_of(tmp_path, change), str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("template", ["{{ 'a' * 30000000000 }}", "{{ 'x'.center(20000000000) }}"])
def test_a_template_of_gigabytes_is_refused_in_words(template: str, tmp_path: Path):
    with pytest.raises(SpecError, match=r"a chat template of source 'chat', needed more than 2 GiB of memory"):
        try_tokenizer(job_of(tmp_path, template=template + TEMPLATE), str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_template_that_never_ends_ends_the_launch_in_words(tmp_path: Path):
    with (
        pytest.raises(SpecError, match="a chat template of source 'chat', did not end within 10 s of CPU time"),
        ol.launch(job_of(tmp_path, template=LOOP + TEMPLATE), cache=tmp_path / "cache"),
    ):
        pass


@pytest.mark.parametrize("template", ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ (10**200000)|string }}"])
def test_a_template_that_does_not_compile_is_refused_with_its_source(template: str, tmp_path: Path):
    job = job_of(tmp_path, template=template + TEMPLATE)
    with pytest.raises(SpecError, match="source 'chat': the chat template cannot be compiled"):
        ol.launch(job, runtime="inline", cache=tmp_path / "cache")


def test_a_tokenizer_is_tried_once(tmp_path: Path):
    job = job_of(tmp_path)
    try_tokenizer(job, str(tmp_path / "cache"))
    (passed,) = (tmp_path / "cache" / "tried").iterdir()
    assert not try_tokenizer(job, str(tmp_path / "cache"))
    changed = job_of(tmp_path, template="another " + TEMPLATE)
    try_tokenizer(changed, str(tmp_path / "cache"))
    assert len([*passed.parent.iterdir()]) == 2


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path):
    job = job_of(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(SpecError, match=r"tokenizer.json' has 3221225472 bytes, and at most"):
        ol.launch(job, runtime="inline", cache=tmp_path / "cache")


def test_texts_on_which_the_tokenizer_panics_are_bad_samples(tmp_path: Path):
    job = job_of(tmp_path, special_token_without_id)
    (tmp_path / "text.jsonl").write_text('{"text": "w1 w2"}\n' * 100)
    source = ol.Source("text", tmp_path / "text.jsonl", sample=ol.Text("text", special_tokens=True))
    with pytest.raises(SourceError, match=r"rows that were read are bad \(.*: the tokenizer panics: no entry found"):
        ol.launch(job.replace(sources=[source]), runtime="inline", cache=tmp_path / "cache")


def test_a_function_that_takes_all_memory_ends_in_words_and_not_the_host():
    def greedy(rows: dict[str, Any]) -> dict[str, Any]:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        assert limit < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        bytearray(limit + (1 << 30))
        return rows

    with ProcessWorkers(1) as pool:
        isolated = pool.isolate(greedy, "greedy")
        with pytest.raises(OverlordError, match=r"greedy: the function failed as a whole.*out of memory: a worker may"):
            isolated({"n": np.arange(1)})
