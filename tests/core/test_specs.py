"""The job: what is taken, what is refused and with which words, and what decides the stream."""

from __future__ import annotations

import functools
import inspect
import json
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

from overlord.errors import SpecError
from overlord.job.mixture_specs import Mixture
from overlord.job.spec_model import describe_schema
from overlord.job.specs import (
    Batch,
    Custom,
    ImageText,
    Job,
    Source,
    Text,
    stream_parts,
)


def make_job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "sources": [Source("web", "web/*.parquet"), Source("code", "code/*.jsonl")],
        "tokenizer": "tokenizer.json",
        "batch": Batch(512, global_tokens=4096),
    }
    return Job(**(fields | changes))


def message(build: Any, *args: Any, **fields: Any) -> str:
    with pytest.raises(SpecError) as caught:
        build(*args, **fields)
    text = str(caught.value)
    assert "\n" not in text and "pydantic" not in text and "Value error" not in text
    assert caught.value.__cause__ is None  # no second traceback under the paragraph
    return text


# ---- what is taken


def test_positional_construction_and_repr() -> None:
    source = Source("web", ["a", "b"], sample=ImageText("png", "caption", merge=2), weight=1)
    assert source.path == ("a", "b")
    assert repr(source) == ("Source('web', ('a', 'b'), sample=ImageText('png', 'caption', merge=2), weight=1.0)")
    assert str(Batch(8, global_samples=2)) == "Batch(8, global_samples=2)"
    assert repr(Mixture({"a": 1}, level="token")) == "Mixture({'a': 1.0}, level='token')"
    assert repr(Mixture.stages([(0, {"a": 1})])) == "Mixture.stages([(0, {'a': 1.0})])"


def test_help_shows_the_fields() -> None:
    fields = "(column='text', *, kind='text', tokenized=False, special_tokens=True, bos=False, eos=False)"
    assert str(inspect.signature(Text)) == fields


def test_secrets_are_not_shown() -> None:
    source = Source("web", "s3://b", storage_options={"secret_key": "hunter2"})
    assert "hunter2" not in repr(source)
    assert "hunter2" not in message(Source, "web", "s3://b", storage_options="hunter2")


def test_frozen() -> None:
    job = make_job()
    with pytest.raises(SpecError, match=r"Job\.seed cannot be set to 3: .* frozen.*\.replace\(seed=\.\.\)"):
        job.seed = 3  # type: ignore[misc]
    assert job.replace(seed=3).seed == 3 and job.seed == 0
    assert "lag is 0" in message(job.replace, lag=0)
    assert Mixture.step({"a": {0: 1}}).replace(level="token") == Mixture.step({"a": {0: 1}}, level="token")


def test_jobs_travel_by_pickle() -> None:
    job = make_job(mixture=Mixture.linear({"web": {0: 1, 10: 0.5}}))
    assert pickle.loads(pickle.dumps(job)) == job
    custom = Custom(lambda row: {"tokens": row["ids"]}, columns=["ids"])
    again = cloudpickle.loads(cloudpickle.dumps(custom))
    assert again.code_digest == custom.code_digest and again.fn({"ids": [1]}) == {"tokens": [1]}


def test_mappings_build_the_same_job() -> None:
    plain = Job.model_validate(
        {
            "sources": [{"name": "web", "path": "web/*.parquet"}, {"name": "code", "path": "code/*.jsonl"}],
            "tokenizer": "tokenizer.json",
            "batch": {"context_length": 512, "global_tokens": 4096},
        }
    )
    assert plain == make_job() and plain.names == ["web", "code"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"kind": "text", "column": "body"}, Text("body")),
        ({"text": "body"}, Text("body")),
        ({"column": "body", "tokenized": True}, Text("body", tokenized=True)),
        ({"image_text": {"image": "png", "text": "alt"}}, ImageText("png", "alt")),
        ({"image": "png", "text": "alt"}, ImageText("png", "alt")),
    ],
)
def test_samples_from_mappings(written: dict[str, Any], expected: object) -> None:
    assert Source("web", "w", sample=written).sample == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [(0, 0), ("16MB", 16_000_000), ("4MiB", 4 << 20), ("1.5 kb", 1500), ("2_000", 2000), (np.int64(7), 7)],
)
def test_bytes(written: Any, expected: int) -> None:
    assert Source("web", "w", shuffle_bytes=written).shuffle_bytes == expected


def test_numbers_as_people_and_yaml_write_them() -> None:
    batch = Batch.model_validate({"context_length": "8_192", "global_tokens": "1e6"})
    assert (batch.context_length, batch.global_tokens) == (8192, 1_000_000)
    assert Batch(np.int32(8), global_samples=4.0).global_samples == 4  # type: ignore[arg-type]


def test_microbatch_cap() -> None:
    assert Batch(8, global_samples=1).microbatch_cap == 8
    assert Batch(8, global_samples=1, microbatch_tokens=32).microbatch_cap == 32


def test_bare_weights_make_a_mixture() -> None:
    assert make_job(mixture={"web": 0.7, "code": 1}).mixture == Mixture({"web": 0.7, "code": 1})
    assert make_job(mixture={"web": "1e-3"}).mixture == Mixture({"web": 0.001})  # YAML gives it as text
    assert make_job(mixture={"level": "token"}).mixture == Mixture(level="token")
    assert make_job(mixture=None).mixture == Mixture()


def test_evaluation_reads_all_once_in_order() -> None:
    sources = [Source("web", "w", weight=0), Source("code", "c", weight=2)]
    job = make_job(sources=sources, max_steps=9, drop_last=True, seed=4).evaluation()
    assert [s.shuffle_bytes for s in job.sources] == [0, 0]
    assert job.mixture.order == "sequential"
    assert job.mixture.stopping == "all_exhausted_without_replacement"
    assert (job.max_steps, job.drop_last, job.seed) == (None, False, 4)
    assert job.mixture.weights_at(0, job.names, {}) == [1.0, 1.0]
    assert Job.model_validate(job.model_dump(by_alias=True)) == job  # also passes the checks


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sources": []}, ["sources: there are no sources", "Add at least one"]),
        ({"sources": "all.jsonl"}, ["sources is 'all.jsonl'", "must be a list", "read_manifest"]),
        (
            {"sources": [Source("web", "a"), Source("web", "b")]},
            ["sources[1].name (source 'web'): 'web' is also the name of sources[0]", "its own name"],
        ),
        (
            {"sources": [{"name": "web", "path": "x", "tolerance": 2}]},
            ["sources[0].tolerance (source 'web') is 2", "between 0 and 1"],
        ),
        (
            {"sources": [{"name": "web", "path": "x", "toleranse": 0.1}]},
            [
                "sources[0].toleranse (source 'web'): unknown key",
                "Did you mean 'tolerance'?",
                "Known keys: name",
            ],
        ),
        ({"sources": [3]}, ["sources[0] is 3", "mapping of fields"]),
        (
            {"mixture": {"wbe": 1.0}},
            ["mixture.weights.wbe: no source has the name 'wbe'", "Did you mean 'web'?"],
        ),
        ({"mixture": {"temperatur": 2.0}}, ["no source has the name", "Did you mean 'temperature'?"]),
        ({"mixture": {"wieghts": {"web": 1}}}, ["mixture.wieghts: unknown key", "Did you mean 'weights'?"]),
        (
            {"mixture": Mixture.stages([(0, {"web": 1}), (5, {"cod": 1})])},
            ["mixture.stages[1][1].cod: no source has the name 'cod'", "Sources: 'web', 'code'"],
        ),
        ({"mixture": 3}, ["mixture is 3", "ol.Mixture(..)"]),
        (
            {"sources": [Source("web", "x", weight=1)], "mixture": {"web": 1}},
            ["sources[0].weight (source 'web')", "neither wins", "Choose one place"],
        ),
        (
            {"sources": [Source("web", "x", weight=1), Source("code", "y")]},
            ["sources[1].weight (source 'code'): missing, although 'web' has one"],
        ),
        ({"sources": [Source("web", "x", weight=0)]}, ["the weights beside the sources sum to zero"]),
        (
            {"tokenizer": None},
            [
                "tokenizer: missing, but source 'web' holds text",
                'tokenizer="tokenizer.json"',
                "tokenized=True",
            ],
        ),
        (
            {"tokenizer": None, "sources": [Source("img", "x", sample=ImageText())]},
            ["source 'img' holds text"],
        ),
        (
            {"sources": [Source("img", "x", sample=ImageText(size=448))]},
            [
                "batch.context_length: 512 tokens are fewer than the 784",
                "source 'img' (size=448",
                "never cut",
            ],
        ),
        (
            {"sources": [Source("img", "x", sample=ImageText(min_pixels=600 * 256))]},
            ["fewer than the 600 of the smallest image", "smaller min_pixels"],
        ),
        ({"batch": {"context_length": -1, "global_samples": 2}}, ["batch.context_length is -1"]),
        (
            {"batch": {"context_length": 1, "global_samples": 2}},
            ["batch.context_length is 1", "no next token to predict"],
        ),
        ({"lag": 0}, ["lag is 0", "at least 1", "Write 16"]),
        ({"max_steps": 0}, ["max_steps is 0", "nothing would run"]),
        ({"seed": "abc"}, ["seed is 'abc'", "whole number"]),
        ({"overlength": "cut"}, ["overlength is 'cut'", "'truncate', 'split', 'drop' or 'error'"]),
        ({"see": 3}, ["Job: see: unknown key", "Did you mean 'seed'?"]),
    ],
)
def test_jobs_refused(changes: dict[str, Any], words: list[str]) -> None:
    text = message(make_job, **changes)
    assert text.startswith("Job: ")
    for word in words:
        assert word in text


def test_several_problems_are_told_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        make_job(seed="x", lag=0)
    first, second = str(caught.value).splitlines()
    assert "seed is 'x'" in first and "lag is 0" in second


def test_json_text_is_refused_in_the_same_words() -> None:
    assert "context_length is 0" in message(Batch.model_validate_json, '{"context_length": 0}')
    assert "Invalid JSON" in message(Batch.model_validate_json, "{")


def test_too_many_or_double_positional_values() -> None:
    assert "3 values are given without a name, but only 'name', 'path'" in message(Source, "a", "b", "c")
    assert "name is given twice" in message(Source, "a", name="b")


def test_no_tokenizer_needed_for_tokens_and_functions() -> None:
    ready = Source("web", "x", sample=Text("ids", tokenized=True))
    own = Source("own", "y", sample=Custom(lambda row: row, columns=["ids"]))
    assert make_job(sources=[ready, own], tokenizer=None).tokenizer is None


# ---- the fingerprint and the schema


def parts(job: Job, **listings: str) -> dict[str, Any]:
    return stream_parts(job, tokenizer_digest="t", listings=dict.fromkeys(job.names, "l") | listings)


def test_parts_are_plain_json() -> None:
    mixture = Mixture.linear({"web": {0: 1.0, 10: 0.5}, "code": {0: 1}})
    found = parts(make_job(mixture=mixture))
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {
        "version", "seed", "lag", "overlength", "batch", "drop_last", "tokenizer", "mixture", "weights", "sources",
    }  # fmt: skip
    assert found["batch"] == {"context_length": 512, "global_tokens": 4096, "global_samples": None}
    assert all(len(half) == 16 for digest in found["sources"].values() for half in digest.split(":"))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 5},
        {"sources": [Source("web", "/elsewhere"), Source("code", "code/*.jsonl")]},
        {"sources": [Source("web", "w", tolerance=0.5, storage_options={"a": "b"}), Source("code", "c")]},
        {"batch": Batch(512, global_tokens=4096, microbatch_tokens=1024, microbatches=2)},
        {"tokenizer": "/moved/tokenizer.json"},
    ],
)
def test_what_does_not_decide_the_stream(changes: dict[str, Any]) -> None:
    assert parts(make_job(**changes)) == parts(make_job())


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"seed": 1}, "seed"),
        ({"lag": 8}, "lag"),
        ({"overlength": "split"}, "overlength"),
        ({"drop_last": True}, "drop_last"),
        ({"batch": Batch(256, global_tokens=4096)}, "batch"),
        ({"mixture": {"web": 1, "code": 2}}, "mixture"),
        ({"sources": [Source("web", "w", shuffle_bytes=0), Source("code", "c")]}, "sources"),
        ({"sources": [Source("web", "w", sample=Text("body")), Source("code", "c")]}, "sources"),
        ({"sources": [Source("web", "w", lengths="n"), Source("code", "c")]}, "sources"),
        ({"sources": [Source("web", "w", weight=1), Source("code", "c", weight=1)]}, "weights"),
    ],
)
def test_what_decides_the_stream(changes: dict[str, Any], differs: str) -> None:
    before, after = parts(make_job()), parts(make_job(**changes))
    assert [key for key in before if before[key] != after[key]] == [differs]


def test_listing_and_tokenizer_decide_the_stream() -> None:
    job = make_job()
    assert parts(job, web="other")["sources"]["code"] == parts(job)["sources"]["code"]
    assert parts(job, web="other")["sources"]["web"] != parts(job)["sources"]["web"]
    other = stream_parts(job, tokenizer_digest="u", listings={"web": "l", "code": "l"})
    assert other["tokenizer"] == "u"


def test_order_of_sources_counts_only_when_sequential() -> None:
    job = make_job()
    turned = make_job(sources=job.sources[::-1])
    assert parts(job) == parts(turned)
    assert parts(job.evaluation())["mixture"]["sequence"] == ["web", "code"]
    assert parts(job.evaluation()) != parts(turned.evaluation())


def first(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": row["ids"]}


def second(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": row["ids"][::-1]}


def test_the_code_of_a_custom_function_decides_the_stream() -> None:
    def digest(sample: Custom) -> str:
        return parts(make_job(sources=[Source("web", "w", sample=sample)]))["sources"]["web"]

    assert digest(Custom(first)) == digest(Custom(first))
    assert digest(Custom(first, name="f")) != digest(Custom(second, name="f"))
    assert digest(Custom(first, name="f", code_digest="1")) == digest(Custom(second, name="f", code_digest="1"))
    assert Custom(functools.partial(first)).name == "partial"  # no source code to be had: falls back


def test_schema() -> None:
    schema = describe_schema(Job)
    assert schema["additionalProperties"] is False and schema["required"] == ["sources", "batch"]
    assert "Custom" not in schema["$defs"]
    assert set(schema["$defs"]["Mixture"]["properties"]) >= {"weights", "stages", "linear", "step"}
    for name, definition in schema["$defs"].items():
        assert ">>>" not in definition["description"]
        for field, about in definition["properties"].items():
            assert about.get("description"), f"{name}.{field}"
