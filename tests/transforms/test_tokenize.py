"""Tokenizers: files and folders, what decides their digest, character spans, tokens at the ends of texts."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch
from overlord.core.samples import BAD, SKIP
from overlord.errors import SpecError
from overlord.job.specs import Source, Text
from overlord.transforms.samples.sample_kinds import make_transform
from overlord.transforms.samples.text import TextTransform, with_borders
from overlord.transforms.samples.tokenize import TextTokenizer

SPECIAL = ["<s>", "</s>", "<pad>"]
TEXTS = ["the quick brown fox", "jumps over the lazy dog", "größer als 10 €", "日本語の文章", "🙂🙃 emoji"]


class Here:
    """Workers that work in the caller."""

    def map(self, function, items):
        return [function(item) for item in items]


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return tokenizer


PLAIN = train()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As transformers saves it."""
    PreTrainedTokenizerFast(tokenizer_object=train(), bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


def bare(folder: Path) -> Path:
    PLAIN.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write(file: Path, content: Any) -> None:
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def rows_of(*texts: str | bytes) -> RowBatch:
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    return {"text": Ragged.from_rows(data), BAD_COLUMN: np.zeros(len(texts), np.bool_)}


def seeds(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64)


def lists(rows: Ragged) -> list[list[int]]:
    return [rows[row].tolist() for row in range(len(rows))]


# ---- folders


def test_a_bare_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    file = bare(tmp_path)
    digest = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    assert TextTokenizer(str(file)).digest == digest
    assert TextTokenizer(str(tmp_path)).digest == digest  # a folder that says nothing beside it
    write(tmp_path / "tokenizer_config.json", {"model_max_length": 512, "bos_token": None})
    assert TextTokenizer(str(tmp_path)).digest == digest


def test_a_bare_file_knows_nothing_of_its_folder(folder: Path) -> None:
    tokenizer = TextTokenizer(str(folder / "tokenizer.json"))
    assert tokenizer.special_tokens == tokenizer.chat_templates == {}
    tokenizer = TextTokenizer(str(folder))
    assert tokenizer.border_id("bos", True) == 0 and tokenizer.border_id("eos", True) == 1


def test_names_and_templates_are_in_the_digest(folder: Path) -> None:
    digests = [TextTokenizer(str(folder)).digest]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder / "tokenizer_config.json", config | {"eos_token": "<pad>"})
    digests.append(TextTokenizer(str(folder)).digest)
    write(folder / "chat_template.jinja", "{{ messages }}")
    digests.append(TextTokenizer(str(folder)).digest)
    write(folder / "chat_template.jinja", "{{ messages }} ")
    digests.append(TextTokenizer(str(folder)).digest)
    assert len(set(digests)) == 4
    write(folder / "tokenizer_config.json", config | {"eos_token": "<pad>", "model_max_length": 3})
    assert TextTokenizer(str(folder)).digest == digests[-1]


@pytest.mark.parametrize("value", ["</s>", {"content": "</s>", "lstrip": False, "special": True}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_come_from_either_file_in_either_form(tmp_path: Path, file: str, value: Any) -> None:
    bare(tmp_path)
    write(tmp_path / file, {"eos_token": value})
    tokenizer = TextTokenizer(str(tmp_path))
    assert tokenizer.border_id("eos", True) == 1 and tokenizer.special_tokens == {"eos_token": "</s>"}


@pytest.mark.parametrize("decoder", [False, True])
def test_two_files_that_differ_are_read_as_transformers_reads_them(tmp_path: Path, decoder: bool) -> None:
    bare(tmp_path)
    config: dict[str, Any] = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if decoder:
        config["added_tokens_decoder"] = {str(i): {"content": t, "special": True} for i, t in enumerate(SPECIAL)}
    write(tmp_path / "tokenizer_config.json", config)
    write(tmp_path / "special_tokens_map.json", {"eos_token": "<pad>", "bos_token": "<s>"})
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert TextTokenizer(str(tmp_path)).border_id("eos", True) == theirs.eos_token_id


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"chat_template": "A"}},
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "A"}, {"name": "rag"}]}},
        {"chat_template.jinja": "A"},
        {"chat_template.json": {"chat_template": "A"}},
        {"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": "B"}, "chat_template.json": {}},
        {"tokenizer_config.json": {"chat_template": "A"}, "chat_template.json": {"chat_template": "B"}},
    ],
)
def test_templates_are_found_wherever_folders_keep_them(tmp_path: Path, files: dict[str, Any]) -> None:
    bare(tmp_path)
    for name, content in files.items():
        write(tmp_path / name, content)
    assert TextTokenizer(str(tmp_path)).chat_templates["default"] == "A"


def test_named_templates_as_transformers_saves_them(tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=train())
    theirs.chat_template = {"default": "A", "tool_use": "B"}
    theirs.save_pretrained(tmp_path)
    assert TextTokenizer(str(tmp_path)).chat_templates == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(("content", "said"), [("{", "is not JSON"), ("[]", "holds a list")])
def test_a_broken_config_is_told(tmp_path: Path, content: str, said: str) -> None:
    bare(tmp_path)
    write(tmp_path / "tokenizer_config.json", content)
    with pytest.raises(SpecError, match=f"tokenizer_config.json.*{said}"):
        TextTokenizer(str(tmp_path))


# ---- characters of tokens


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(str(bare(tmp_path_factory.mktemp("shared"))))


@given(texts=st.lists(st.text(), max_size=5))
def test_spans_are_those_of_the_library(shared: TextTokenizer, texts: list[str]) -> None:
    found = shared.encode_spans(texts, special_tokens=False)
    assert lists(found.tokens) == lists(shared.encode(texts, special_tokens=False))
    assert found.begin.dtype == found.end.dtype == np.int32
    encodings = PLAIN.encode_batch(texts, add_special_tokens=False)
    expected = [pair for encoding in encodings for pair in encoding.offsets]
    assert list(zip(found.begin.tolist(), found.end.tolist(), strict=True)) == expected
    # Every character has a token, and in its own text.
    for row, text in enumerate(texts):
        first, last = found.tokens.offsets[row : row + 2]
        covered = {c for b, e in zip(found.begin[first:last], found.end[first:last], strict=True) for c in range(b, e)}
        assert covered == set(range(len(text)))


# ---- bos and eos

IDS = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=6)
BORDER = st.none() | st.integers(0, 3)


@given(IDS, BORDER, BORDER, st.integers(0, 2))
def test_borders_as_one_would_write_them(rows: list[list[int]], bos: int | None, eos: int | None, skip: int) -> None:
    given_rows = Ragged.from_rows([np.array(row, np.int32) for row in rows], np.int32)
    skip = min(skip, len(rows))
    expected = []
    for row in rows[skip:]:
        front = [bos] if row and bos is not None and row[0] != bos else []
        back = [eos] if row and eos is not None and row[-1] != eos else []
        expected.append(front + row + back)
    assert lists(with_borders(given_rows.slice(skip, len(rows)), bos, eos)) == expected


@pytest.mark.parametrize(("bos", "eos"), [(True, True), ("<s>", "</s>"), (0, 1)])
def test_text_gets_its_borders_by_any_name(folder: Path, bos: Any, eos: Any) -> None:
    tokenizer = TextTokenizer(str(folder))
    transform = TextTransform(Text("text", bos=bos, eos=eos), tokenizer)
    measured = transform.measure(rows_of("the fox", "", b"\xff", "dog</s>"), None, seeds(4))
    fox, dog = (tokenizer.encode([t], special_tokens=False).values.tolist() for t in ("the fox", "dog"))
    assert lists(measured.kept["tokens"]) == [[0, *fox, 1], [0], [0], [0, *dog, 1]]
    assert measured.tokens.tolist() == [len(fox) + 2, 1, 1, len(dog) + 2]
    assert measured.flags.tolist() == [0, SKIP, BAD, 0]


@pytest.mark.parametrize("special_tokens", [True, False])
def test_a_template_that_adds_them_does_not_double_them(tmp_path: Path, special_tokens: bool) -> None:
    tokenizer = train()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    loaded = TextTokenizer(str(tmp_path))
    transform = TextTransform(Text(bos=True, eos=True, special_tokens=special_tokens), loaded)
    measured = transform.measure(rows_of("the fox"), None, seeds(1))
    inner = loaded.encode(["the fox"], special_tokens=False).values.tolist()
    assert lists(measured.kept["tokens"]) == [[0, *inner, 1]]


def test_a_claimed_length_includes_the_borders(folder: Path) -> None:
    tokenizer = TextTokenizer(str(folder))
    transform = TextTransform(Text(eos=True), tokenizer)
    inner = tokenizer.encode(["the fox"], special_tokens=False).values.tolist()
    claims = np.array([len(inner) + 1, len(inner)])
    measured = transform.measure(rows_of("the fox", "the fox"), claims, seeds(2))
    finished = transform.finish(measured.kept, claims, np.zeros(2, np.bool_), Here())
    assert lists(finished.tokens) == [[*inner, 1], inner]
    assert [row for row, _ in finished.wrong_lengths] == [1]
    assert f"says {len(inner)} tokens, the text has {len(inner) + 1}" in finished.wrong_lengths[0][1]


def test_token_ids_take_borders_without_a_tokenizer() -> None:
    source = Source("a", "a", sample=Text("ids", tokenized=True, bos=0, eos=7))
    rows: RowBatch = {"ids": Ragged.from_rows([np.array([3, 4]), np.array([0, 7])], np.int64), BAD_COLUMN: np.zeros(2)}
    measured = make_transform(source, None).measure(rows, None, seeds(2))
    assert lists(measured.kept["tokens"]) == [[0, 3, 4, 7], [0, 7]]


def test_an_id_of_zero_survives_a_job_file_and_differs_in_the_fingerprint() -> None:
    spec = Text("ids", tokenized=True, eos=0)
    assert Text.model_validate(spec.model_dump(mode="json", exclude_defaults=True)).eos is not False
    assert spec.model_dump_json() != Text("ids", tokenized=True).model_dump_json()
    assert "eos" not in Text("ids").model_dump(exclude_defaults=True)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (Text(eos=True), r"eos=True: the tokenizer .* does not say which token.*eos=\"<token>\""),
        (Text(bos="<nope>"), r"bos='<nope>': the tokenizer .* has no such token"),
        (Text(bos=10**6), r"bos=1000000: .* has no such token"),
        (Text(bos=2**40), r"has no such token"),
    ],
)
def test_a_border_that_is_not_there_is_told(tmp_path: Path, spec: Text, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        TextTransform(spec, TextTokenizer(str(bare(tmp_path))))


def test_a_name_that_is_not_in_the_vocabulary_is_told(tmp_path: Path) -> None:
    bare(tmp_path)
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<gone>"})
    with pytest.raises(SpecError, match=r"names '<gone>' as its eos_token, which is not in its vocabulary"):
        TextTransform(Text(eos=True), TextTokenizer(str(tmp_path)))
    with pytest.raises(SpecError, match=r"eos=True: only a tokenizer knows the id .* eos=2"):
        TextTransform(Text("ids", tokenized=True, eos=True), None)


@pytest.mark.parametrize("value", ["", -1, 1.5, None, ["<s>"]])
def test_what_is_no_token_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"bos is .*: this must be true"):
        Text(bos=value)


# ---- characters that a tokenizer has no tokens for


def learned(*alphabet: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=list(alphabet), show_progress=False)
    tokenizer.train_from_iterator(["abc für"] * 20, trainer)
    return tokenizer


def of_words(*, lowercase: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "abc": 2, "für": 3}, "[UNK]"))
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if lowercase:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return tokenizer


def sentence_piece() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ("▁", "a", "b", "c", "▁abc"))]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def without_decoder(tokenizer: Tokenizer) -> Tokenizer:
    content = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps(content | {"decoder": None}))


@pytest.mark.parametrize(
    ("tokenizer", "text", "lost"),
    [
        (learned(), "für <abc> für\n漢", "<>漢"),
        (learned(), "Å", "Å"),  # its first byte is one of those of ü, its second is not known
        (without_decoder(learned()), "für <abc>", "<>"),
        (PLAIN, "abc é e\u0301 漢 \x00 🙂 </s>", ""),
        (without_decoder(PLAIN), "abc é 漢 🙂", ""),
        (of_words(), "abc xyz für", "xyz"),
        (of_words(), "abc ABC [SEP]", "ABC"),
        (of_words(lowercase=True), "ABC fu\u0308r FÜR [SEP]", ""),
        (sentence_piece(), "abc cab", ""),
        (sentence_piece(), "abc x", "x"),
    ],
)
def test_lost_characters(tokenizer: Tokenizer, text: str, lost: str, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer(str(tmp_path)).lost_characters([text, ""]) == [lost, ""]
