"""Chats: the same tokens and the same mask as transformers, faults of a row, templates of any kind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch, concat_rows, slice_rows, take_rows
from overlord.core.samples import BAD, SKIP
from overlord.errors import SpecError
from overlord.job.specs import Batch, Chat, Job, Source, Text, stream_parts
from overlord.readers.arrow import kinds_of_schema, to_rows
from overlord.transforms.samples.chat import BUILTIN_TEMPLATES, ChatTransform, inline_templates, rendering
from overlord.transforms.samples.per_sample import Measured
from overlord.transforms.samples.sample_kinds import make_transform
from overlord.transforms.samples.tokenize import TextTokenizer

SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip
TEXTS = ["user: Hello, how are you?\n\n", "assistant: I am fine. ", "größer als 10 €", "日本語の文章です。", "🙂🙃"]

CHATML = BUILTIN_TEMPLATES["chatml"]
CHATML_UNTAGGED = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
CHATML_TO_THE_NEWLINE = CHATML.replace(
    "'<|im_end|>' }}{% endgeneration %}", "'<|im_end|>\\n' }}{% endgeneration %}"
).replace("{{ '\\n' }}{% endfor %}", "{% if message['role'] != 'assistant' %}{{ '\\n' }}{% endif %}{% endfor %}")
LLAMA = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation -%}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration -%}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
INST = """{{ bos_token }}{% set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% set ns.system = message.content + '\n\n' %}{% continue %}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + ns.system + message.content + ' [/INST]' }}{% set ns.system = '' %}
{%- elif message.role == 'assistant' %}{{ ' ' }}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ raise_exception('only user and assistant, not ' + message.role) }}{% endif %}
{%- endfor %}"""
TEMPLATES = {"chatml": CHATML, "to the newline": CHATML_TO_THE_NEWLINE, "llama": LLAMA, "inst": INST}


class Here:
    """Workers that work in the caller."""

    def map(self, function, items):
        return [function(item) for item in items]


def train(kind: str) -> Tokenizer:
    if kind == "words":  # drops white space and accents: some characters have no token
        tokenizer = Tokenizer(models.WordPiece(unk_token="<s>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.train_from_iterator(
            TEXTS * 9, WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
        )
        return tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "trimmed":  # as Llama 3 has it: white space before a word belongs to no character
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 9, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) for kind in ("bytes", "trimmed", "words")}
    for kind, folder in found.items():
        theirs = PreTrainedTokenizerFast(tokenizer_object=train(kind), bos_token="<s>", eos_token="</s>")
        theirs.save_pretrained(folder)
    return found


@pytest.fixture(scope="module")
def ours(folders: dict[str, Path]) -> dict[str, TextTokenizer]:
    return {kind: TextTokenizer(str(folder)) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> dict[str, PreTrainedTokenizerFast]:
    return {kind: PreTrainedTokenizerFast.from_pretrained(str(folder)) for kind, folder in folders.items()}


def rows_of(*chats: Any, **columns: list[Any]) -> RowBatch:
    def ragged(values: Any) -> Ragged:
        return Ragged.from_rows([v if isinstance(v, bytes) else json.dumps(v).encode() for v in values])

    rows: RowBatch = {"messages": ragged(chats)} | {name: ragged(values) for name, values in columns.items()}
    return rows | {BAD_COLUMN: np.zeros(len(chats), np.bool_)}


def measure(tokenizer: TextTokenizer, *chats: Any, **fields: Any) -> Measured:
    seeds = np.arange(len(chats), dtype=np.uint64)
    return ChatTransform(Chat(**fields), tokenizer).measure(rows_of(*chats), None, seeds)


def tokens_and_loss(measured: Measured, row: int = 0) -> tuple[list[int], list[int]]:
    return measured.kept["tokens"][row].tolist(), measured.kept["loss"][row].tolist()


def fault(tokenizer: TextTokenizer, chat: Any, **fields: Any) -> str:
    measured = measure(tokenizer, chat, **({"template": "chatml"} | fields))
    assert measured.flags.tolist() == [BAD] and tokens_and_loss(measured) == ([0], [0])
    ((row, reason),) = measured.faults
    assert row == 0
    return reason


def expected(theirs: PreTrainedTokenizerFast, chat: list[dict[str, Any]], template: str) -> tuple[list[int], list[int]]:
    out = theirs.apply_chat_template(
        chat, chat_template=template, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    return out["input_ids"], out["assistant_masks"]


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    chat = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + chat


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
chats = st.builds(lambda texts, system: turns(*texts, system=system), st.lists(words, min_size=1, max_size=6),
                  st.none() | words)  # fmt: skip

CHATS = {
    "one turn": turns("Hi", "Hello there."),
    "system": turns("Hi", "Hello", system="You are größer als 10 €."),
    "several turns": turns("a", "b", "c", "d", "e", "f"),
    "no answer yet": turns("a", "b", "c"),
    "only a question": turns("a"),
    "unicode": turns("日本語?", "文章です。🙂", "größer?", "10 € 🙃"),
    "an empty answer": turns("a", "", "b", "c"),
    "spaces": turns("  a ", "  b\n\n ", "\t", " "),
    "two answers": [*turns("a", "b"), {"role": "assistant", "content": "c"}],
}


# ---- tokens and mask of transformers


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CHATS)
def test_tokens_and_mask_are_those_of_transformers(ours, theirs, name: str, template: str) -> None:
    found = tokens_and_loss(measure(ours["bytes"], CHATS[name], template=TEMPLATES[template]))
    assert found == expected(theirs["bytes"], CHATS[name], TEMPLATES[template])
    answered = any(m["role"] == "assistant" for m in CHATS[name])
    assert (sum(found[1]) > 0) == answered


@given(chat=chats, template=st.sampled_from(list(TEMPLATES.values())))
def test_any_conversation_is_as_in_transformers(ours, theirs, chat: list[dict[str, Any]], template: str) -> None:
    found = tokens_and_loss(measure(ours["bytes"], chat, template=template))
    assert found == expected(theirs["bytes"], chat, template)


@given(chat=chats, kind=st.sampled_from(["trimmed", "words"]))
def test_tokenizers_that_pass_over_characters(ours, theirs, kind: str, chat: list[dict[str, Any]]) -> None:
    """Where transformers finds both ends of every span in a token, the masks are the same."""
    ids, loss = tokens_and_loss(measure(ours[kind], chat, template=CHATML))
    their_ids, mask = expected(theirs[kind], chat, CHATML)
    assert ids == their_ids
    text, begins = "", []
    for message in chat:
        text += f"<|im_start|>{message['role']}\n"
        begins += [len(text)] if message["role"] == "assistant" else []
        text += f"{message['content']}<|im_end|>\n"
    coded = theirs[kind](text, add_special_tokens=False)
    if all(coded.char_to_token(0, begin) is not None for begin in begins):
        assert loss == mask
    ends = [counts for token, counts in zip(ids, loss, strict=True) if token == SPECIAL.index("<|im_end|>")]
    assert ends == [m["role"] == "assistant" for m in chat]


def test_several_rows_are_each_as_alone(ours) -> None:
    every = list(CHATS.values())
    together = measure(ours["bytes"], *every, template=LLAMA)
    for row, chat in enumerate(every):
        assert tokens_and_loss(together, row) == tokens_and_loss(measure(ours["bytes"], chat, template=LLAMA))
    assert together.tokens.tolist() == together.kept["tokens"].lengths.tolist()


def test_templates_without_tags_count_what_an_answer_adds(ours, theirs) -> None:
    for chat in CHATS.values():
        found = tokens_and_loss(measure(ours["bytes"], chat, template=CHATML_UNTAGGED))
        assert found == expected(theirs["bytes"], chat, CHATML_TO_THE_NEWLINE)


@given(chat=chats)
def test_tags_or_no_tags_make_no_difference(ours, chat: list[dict[str, Any]]) -> None:
    tagged = measure(ours["bytes"], chat, template=CHATML_TO_THE_NEWLINE)
    assert tokens_and_loss(measure(ours["bytes"], chat, template=CHATML_UNTAGGED)) == tokens_and_loss(tagged)


# ---- where the mask of transformers runs out of the span

BARE = (
    "{% for m in messages %}{{ m.role + ':' }}{% generation %}{{ m.content }}{% endgeneration %}"
    "{{ '<|im_end|>' }}{% endfor %}"
)


@given(contents=st.lists(words.filter(bool), min_size=1, max_size=4))
def test_a_last_character_of_several_tokens_counts_as_in_transformers(ours, theirs, contents: list[str]) -> None:
    chat = turns(*contents, "🙂")
    found = tokens_and_loss(measure(ours["bytes"], chat, template=BARE))
    assert found == expected(theirs["bytes"], chat, BARE)


@pytest.mark.parametrize("content", ["fine ", " fine", " fine ", "fine\n\n"])
def test_white_space_without_a_token_does_not_move_the_ends_of_a_span(ours, content: str) -> None:
    chat = [{"role": "assistant", "content": content}, {"role": "assistant", "content": "fine"}]
    ids, loss = tokens_and_loss(measure(ours["words"], chat, template=BARE))
    texts = [text for text, counts in zip(ids, loss, strict=True) if counts]
    inner = ours["words"].encode(["fine"], special_tokens=False).values.tolist()
    assert texts == inner * 2
    assert loss[-1] == 0 and ids[-1] == 3


def test_an_empty_span_counts_nothing(ours) -> None:
    empty = {"role": "assistant", "content": ""}
    _, loss = tokens_and_loss(measure(ours["bytes"], [empty, empty], template=BARE))
    assert sum(loss) == 0
    front = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ 'and more' }}"
    assert sum(tokens_and_loss(measure(ours["bytes"], [empty], template=front))[1]) == 0


def test_a_span_inside_the_first_token_counts_no_further(ours) -> None:
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ '<|im_end|> and more' }}"
    _, loss = tokens_and_loss(measure(ours["bytes"], [{"role": "assistant", "content": "H"}], template=template))
    assert loss[0] == 1 and sum(loss) == 1


# ---- which tokens count


def text_of(tokenizer: TextTokenizer, measured: Measured, row: int = 0) -> str:
    """Return the text of the tokens that count."""
    tokens, loss = tokens_and_loss(measured, row)
    plain = Tokenizer.from_file(str(Path(tokenizer.path) / "tokenizer.json"))
    return plain.decode([t for t, counts in zip(tokens, loss, strict=True) if counts], skip_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, CHATML_UNTAGGED, LLAMA, INST])
def test_last_counts_the_last_answer_only(ours, template: str) -> None:
    chat = turns("a", "first", "b", "second", "c", "third")
    assert text_of(ours["bytes"], measure(ours["bytes"], chat, template=template, loss="last")).startswith("third<")
    open_end = measure(ours["bytes"], chat[:5], template=template, loss="last")
    assert text_of(ours["bytes"], open_end).startswith("second<")
    assert sum(tokens_and_loss(measure(ours["bytes"], chat[:1], template=template, loss="last"))[1]) == 0


def test_last_takes_every_tagged_part_of_the_last_answer(ours) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{{ '|' }}{% generation %}{{ '</s>' }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = turns("a", "first", "b", "second")
    assert text_of(ours["bytes"], measure(ours["bytes"], chat, template=template, loss="last")) == "second</s>"
    assert text_of(ours["bytes"], measure(ours["bytes"], chat, template=template)) == "first</s>second</s>"


@pytest.mark.parametrize("template", [CHATML, CHATML_UNTAGGED])
def test_all_counts_every_token(ours, template: str) -> None:
    chat = turns("a", "b")
    tokens, loss = tokens_and_loss(measure(ours["bytes"], chat, template=template, loss="all"))
    assert tokens == tokens_and_loss(measure(ours["bytes"], chat, template=template))[0] and loss == [1] * len(tokens)


def test_a_chat_without_an_answer_is_kept_and_counts_nothing(ours) -> None:
    measured = measure(ours["bytes"], turns("a"), [], template="chatml")
    assert measured.flags.tolist() == [0, SKIP] and not measured.faults
    assert measured.kept["empty"].tolist() == [False, True]
    assert measured.kept["loss"].lengths.tolist() == measured.tokens.tolist()
    assert not measured.kept["loss"].values.any()


@pytest.mark.parametrize("context", [4, 7, 100])
def test_finished_samples_have_the_planned_length_and_the_measured_loss(ours, context: int) -> None:
    transform = ChatTransform(Chat(template="chatml"), ours["bytes"])
    measured = transform.measure(rows_of(*CHATS.values(), b"{"), None, np.arange(10, dtype=np.uint64))
    planned = np.minimum(measured.tokens, context)
    bad = (measured.flags & BAD) > 0
    finished = transform.finish(measured.kept, planned, bad, Here())
    assert finished.tokens.lengths.tolist() == finished.loss.lengths.tolist() == planned.tolist()
    for row in range(10):
        kept, mask = tokens_and_loss(measured, row)
        assert finished.tokens[row].tolist() == kept[: planned[row]]
        assert finished.loss[row].tolist() == mask[: planned[row]]
    verdict = transform.finish(measured.kept, planned, np.ones(10, np.bool_), Here())
    assert not verdict.loss.values.any() and not verdict.faults and not verdict.wrong_lengths


# ---- shapes of messages


def test_share_gpt_names_are_understood(ours) -> None:
    chat = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "tool", "value": "3"},
    ]
    plain = [
        {"role": role, "content": m["value"]}
        for role, m in zip(("system", "user", "assistant", "tool"), chat, strict=True)
    ]
    both = measure(ours["bytes"], chat, plain, template="chatml")
    assert tokens_and_loss(both, 0) == tokens_and_loss(both, 1) and not both.faults


PARTS = """{% for m in messages %}{{ m.role + ':' }}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""
PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [CHATML, CHATML_UNTAGGED, LLAMA, INST, PARTS])
def test_text_parts_are_text(ours, template: str) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo", "image": None}]
    chat, plain = turns("Hi", "?"), turns("Hello", "?")
    chat[0]["content"] = parts
    both = measure(ours["bytes"], chat, plain, template=template, loss="all")
    assert tokens_and_loss(both, 0) == tokens_and_loss(both, 1) and not both.faults


def test_a_template_that_only_knows_parts_gets_parts(ours, theirs) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    tokens, _ = tokens_and_loss(measure(ours["bytes"], chat, template=PARTS_ONLY, loss="all"))
    assert tokens == theirs["bytes"].apply_chat_template(chat, chat_template=PARTS_ONLY)["input_ids"] != []


def test_nested_columns_of_arrow_read_as_json_lines_do(ours) -> None:
    """In a list of structs every message has every key; those it has not must not reach the template."""
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.name is defined %}{{ '(' + m.name + ')' }}{% endif %}{% endfor %}"
    )
    chats = [[{"role": "user", "content": "Hi", "name": "Ann"}, {"role": "assistant", "content": "Hello"}]]
    batch = pa.RecordBatch.from_pylist([{"messages": chat} for chat in chats])
    rows = to_rows(batch, kinds_of_schema(batch.schema, ["messages"]), "x.parquet")
    transform = ChatTransform(Chat(template=template, loss="all"), ours["bytes"])
    found = transform.measure(rows, None, np.zeros(1, np.uint64))
    assert (
        tokens_and_loss(found)[0] == ours["bytes"].encode(["user(Ann)assistant"], special_tokens=False).values.tolist()
    )
    assert tokens_and_loss(found) == tokens_and_loss(transform.measure(rows_of(*chats), None, np.zeros(1, np.uint64)))


def test_tools_and_other_keys_reach_the_template_as_in_transformers(ours, theirs) -> None:
    template = (
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{{ m.role }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "größe", "description": "<b>&'\"</b>"}}]
    chat = [
        *turns("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [{"name": "größe", "arguments": {"a": 1}}]},
    ]
    transform = ChatTransform(Chat(template=template, loss="all", tools="tools"), ours["bytes"])
    assert transform.columns == ("messages", "tools")
    found = transform.measure(rows_of(chat, chat, chat, tools=[tools, [], b"{}"]), None, np.zeros(3, np.uint64))
    for row, given_tools in ((0, tools), (1, None)):
        out = theirs["bytes"].apply_chat_template(chat, tools=given_tools, chat_template=template)
        assert tokens_and_loss(found, row)[0] == out["input_ids"]
    assert found.faults == [(2, "the tools are a dict, not a list")]


# ---- faults of a row

NO_PREFIX = "{% for m in messages %}{{ m.role + m.content }}{% if loop.last %}{{ '</s>' }}{% endif %}{% endfor %}"
FORGETS = (
    "{% for m in messages %}{{ m.role + ':' }}{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
IN_A_MACRO = (
    "{% macro show(m) %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{{ 'x' + show(m) }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("chat", "fields", "said"),
    [
        (b"{", {}, "the messages are not JSON"),
        (b"\xff", {}, "the messages are not JSON"),
        ({"role": "user"}, {}, "the messages are a dict, not a list"),
        (["Hi"], {}, "message 0 is a str, not a mapping"),
        ([{"content": "Hi"}], {}, r"message 0 has no role \(its keys: content\)"),
        ([{"from": "bing", "value": "Hi"}], {}, "message 0 is from 'bing'; known are human, gpt"),
        ([{"role": "user", "content": 3}], {}, "the content of message 0 is a int, not text"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], {}, "message 0 holds a part of type 'image'"),
        ([{"role": "user", "content": None}], {}, "the chat template fails on it: TypeError"),
        (turns("\ud800"), {}, "half of a surrogate pair"),
        (turns("a", "b", "c"), {"template": NO_PREFIX}, "the assistant wrote in message 1 cannot be told"),
        (turns("a", "b", "c"), {"template": FORGETS}, "the assistant wrote in message 1 cannot be told"),
        (turns("a", "b"), {"template": IN_A_MACRO}, "generation tags inside a macro"),
        ([{"role": "tool", "content": ""}], {"template": INST}, "refuses the conversation: only user and .* not tool"),
        (turns("a"), {"template": "{{ strftime_now('%Y') }}"}, "today's date .* Write a fixed date"),
        (turns("a"), {"template": "{{ 1 / 0 }}"}, "ZeroDivisionError"),
        (turns("a"), {"template": "{{ messages.append(1) }}"}, "SecurityError"),
        (turns("a"), {"template": "{{ messages.__class__.mro() }}"}, "SecurityError|UndefinedError"),
    ],
)
def test_what_is_wrong_is_a_fault_of_the_row(ours, chat: Any, fields: dict[str, Any], said: str) -> None:
    assert re.search(said, fault(ours["bytes"], chat, **fields))


def test_one_bad_row_leaves_the_others_alone(ours) -> None:
    rows = rows_of(turns("a", "b"), b"{", turns("c", "d"), turns("e"))
    rows[BAD_COLUMN] = np.array([False, False, False, True])
    found = ChatTransform(Chat(template="chatml"), ours["bytes"]).measure(rows, None, np.zeros(4, np.uint64))
    assert found.flags.tolist() == [0, BAD, 0, BAD] and sorted(row for row, _ in found.faults) == [1, 3]
    for row, chat in ((0, turns("a", "b")), (2, turns("c", "d"))):
        assert tokens_and_loss(found, row) == tokens_and_loss(measure(ours["bytes"], chat, template="chatml"))
    assert tokens_and_loss(found, 3) == ([0], [0])


def test_a_template_that_can_do_without_the_date_does(ours) -> None:
    template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}{{ '26 Jul 2024' }}{% endif %}"
        "{{ messages[0].content }}"
    )
    found = measure(ours["bytes"], turns("a"), template=template, loss="all")
    assert tokens_and_loss(found)[0] == ours["bytes"].encode(["26 Jul 2024a"], special_tokens=False).values.tolist()


def test_a_template_cannot_draw_lots(ours) -> None:
    with pytest.raises(SpecError, match="No filter named 'random'"):
        measure(ours["bytes"], turns("a"), template="{{ [1, 2, 3] | random }}")
    assert "'lipsum' is undefined" in fault(ours["bytes"], turns("a"), template="{{ lipsum() }}")


# ---- process workers


def test_rendering_is_pure_row_by_row_and_travels(ours) -> None:
    every = rows_of(*CHATS.values(), b"{", [])
    render = rendering(Chat(template=LLAMA), ours["bytes"])
    whole = render(every)
    away = cloudpickle.loads(cloudpickle.dumps(render))
    parts = concat_rows([away(slice_rows(every, 0, 4)), away(slice_rows(every, 4, 5)), away(slice_rows(every, 5, 11))])
    for column in ("text", "spans", "fault"):
        assert whole[column].lengths.tolist() == parts[column].lengths.tolist()
        assert whole[column].values.tolist() == parts[column].values.tolist()


def test_a_row_that_kills_its_worker_is_a_stand_in(ours) -> None:
    calls: list[tuple[str, float]] = []

    def isolate(function, name, deadline):
        calls.append((name, deadline))
        return lambda rows: (take_rows(function(rows), np.array([0, 2])), [(1, "killed its worker twice")])

    rows = rows_of(turns("a", "b"), turns("x"), turns("c", "d"))
    transform = ChatTransform(Chat(template="chatml", deadline=5), ours["bytes"], isolate)
    found = transform.measure(rows, None, np.zeros(3, np.uint64))
    assert calls == [("chat", 5.0)]
    assert found.killed == found.faults == [(1, "killed its worker twice")] and found.flags.tolist() == [0, BAD, 0]
    alone = ChatTransform(Chat(template="chatml", process=False), ours["bytes"], isolate)
    direct = alone.measure(rows, None, np.zeros(3, np.uint64))
    assert len(calls) == 1 and not direct.killed
    assert [tokens_and_loss(found, row) for row in (0, 2)] == [tokens_and_loss(direct, row) for row in (0, 2)]
    assert transform.decoder is None


# ---- templates and specs


def test_the_folder_brings_the_template(folders, theirs, tmp_path: Path) -> None:
    tokenizer = theirs["bytes"]
    tokenizer.chat_template = {"default": LLAMA, "tool_use": CHATML, "rag": INST}
    tokenizer.save_pretrained(tmp_path)
    tokenizer.chat_template = None
    loaded = TextTokenizer(str(tmp_path))
    for fields, template in (
        ({}, LLAMA),
        ({"template": "rag"}, INST),
        ({"template": "default"}, LLAMA),
        ({"template": "chatml"}, CHATML),
    ):
        found = tokens_and_loss(measure(loaded, CHATS["system"], **fields))
        assert found == expected(tokenizer, CHATS["system"], template)
    with_tools = ChatTransform(Chat(tools="tools"), loaded)
    found = with_tools.measure(rows_of(CHATS["system"], tools=[[]]), None, np.zeros(1, np.uint64))
    assert tokens_and_loss(found) == expected(tokenizer, CHATS["system"], CHATML)


def test_a_file_brings_the_template_and_its_text_decides_the_stream(ours, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(LLAMA, encoding="utf-8")
    found = measure(ours["bytes"], CHATS["unicode"], template=str(file))
    assert tokens_and_loss(found) == tokens_and_loss(measure(ours["bytes"], CHATS["unicode"], template=LLAMA))

    def parts() -> dict[str, Any]:
        sources = [Source("chat", "x", sample=Chat(template=file)), Source("text", "y")]
        job = Job(sources, tokenizer="t", batch=Batch(64, global_samples=2))
        inlined = inline_templates(job, ours["bytes"])
        assert inlined.sources[0].sample.template == file.read_text() and inlined.sources[1] is job.sources[1]
        return stream_parts(inlined, tokenizer_digest="t", listings={"chat": "l", "text": "l"})

    before = parts()
    assert parts() == before
    file.write_text(INST)
    assert parts() != before


def test_templates_by_name_stay_names(ours) -> None:
    sources = [Source("a", "x", sample=Chat(template="chatml")), Source("b", "x", sample=Chat())]
    job = Job(sources, tokenizer="t", batch=Batch(64, global_samples=2))
    assert inline_templates(job, ours["bytes"]) == job
    plain = Job([Source("b", "x")], tokenizer="t", batch=Batch(64, global_samples=2))
    assert inline_templates(plain, ours["bytes"]) is plain


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, r"comes without a chat template; .* template=\"chatml\""),
        (
            {"template": "chatlm"},
            r"template 'chatlm' is neither a known name \('chatml'\), nor a readable file, .* Did you mean 'chatml'",
        ),
        ({"template": "{% for %}"}, r"the chat template is no Jinja template \(.*line 1\)"),
        ({"template": "{% generation %}"}, "no Jinja template"),
    ],
)
def test_a_template_that_cannot_be_had_is_told_before_the_run(ours, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        ChatTransform(Chat(**fields), ours["bytes"])


def test_chat_is_a_kind_of_sample_everywhere(ours) -> None:
    for given_spec in ({"chat": "talk"}, {"kind": "chat", "messages": "talk"}, {"messages": "talk"}, Chat("talk")):
        source = Source("a", "x", sample=given_spec)
        assert source.sample == Chat("talk") and source.sample.kind == "chat"
    assert isinstance(make_transform(Source("a", "x", sample=Chat(template="chatml")), ours["bytes"]), ChatTransform)
    assert repr(Chat("talk", loss="last")) == "Chat('talk', loss='last')"
    with pytest.raises(SpecError, match="loss is 'user': expected 'assistant', 'all' or 'last'"):
        Chat(loss="user")
    with pytest.raises(SpecError, match=r"source 'a' holds text.*tokenizer") as caught:
        Job([Source("a", "x", sample=Chat())], batch=Batch(8, global_samples=1))
    assert "tokenized=True" not in str(caught.value)
    assert Source("a", "x").sample == Text()


def test_where_a_chat_is_rendered_is_no_part_of_the_stream() -> None:
    assert Chat(process=False, deadline=1).model_dump_json() == Chat().model_dump_json()
    assert Chat(loss="all").model_dump_json() != Chat().model_dump_json()
