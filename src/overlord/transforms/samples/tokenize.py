"""Text to token ids, in batches, with a Hugging Face `tokenizers` file and the settings of its folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from overlord.core.ragged import Ragged, offsets_of
from overlord.core.spec_errors import did_you_mean, list_some
from overlord.errors import SpecError, shortened
from overlord.job.specs import tokenizer_file

Int32s = npt.NDArray[np.int32]


class TokenizerFile(NamedTuple):
    """Where a tokenizer is, and the ids that are kept for the placeholders of media."""

    path: str
    reserved: tuple[int, ...] = ()
    digest: str = ""
    """Of what the job was prepared with: it must not change while the job runs."""


@functools.lru_cache(maxsize=8)
def load_tokenizer(file: TokenizerFile) -> TextTokenizer:
    """Return a tokenizer, which is loaded once in a process: a fork server loads it before it forks."""
    tokenizer = TextTokenizer(file.path)
    if file.digest and tokenizer.digest != file.digest:
        raise SpecError(
            f"the tokenizer {file.path!r} has changed since the job was launched; texts would be tokenized otherwise "
            "than before. Restore the file, or start a new run."
        )
    tokenizer.reserve(file.reserved)
    return tokenizer


DEFAULT_TEMPLATE = "default"
"""Name of the chat template that is used by default."""

_CONFIG = "tokenizer_config.json"
_SPECIAL_MAP = "special_tokens_map.json"
_SPACE_SIGN = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space
_OWN_DECODER = "added_tokens_decoder"  # where a config has it, special_tokens_map.json is a leftover


_PROBES = (
    "The quick brown fox, 1234567890 times; \u00e9\u00e8 \u4f60\u597d \U0001f600 (e.g. x = y + 1)\n\t<|end|></s> " * 8,
    "a" * 512,
    " " * 512,
    "",
)
"""Texts that every tokenizer must take in no time."""


class TokenizerPanic(Exception):
    """The tokenizers library panicked, which is an error of the file; the text says why."""


@contextlib.contextmanager
def words_of_panics() -> Iterator[None]:
    """Turn a panic of native code, which is a BaseException and would end the process, into a TokenizerPanic."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of pyo3: no module exports it
            raise
        raise TokenizerPanic(f"the tokenizer panics: {shortened(error, 200)}") from None


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """Token ids of some texts, and the characters that each token stands for."""

    tokens: Ragged
    """Token ids (int32)."""
    begin: Int32s
    """First character of each token, one entry a token, text after text."""
    end: Int32s
    """One past its last character; equal to `begin` for a token without characters."""


class TextTokenizer:
    """A loaded tokenizer, the settings of its folder, and the digest of both.

    Args:
        path: A tokenizer.json, or a Hugging Face tokenizer or processor folder; of a bare file nothing else is read.
    """

    def __init__(self, path: str) -> None:
        file = tokenizer_file(path)
        folder = file.parent if Path(path).is_dir() else None
        content = _read_bounded(file)
        try:
            with words_of_panics():
                self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise SpecError(
                f"tokenizer: {str(file)!r} is not a tokenizer file ({error}); no text could be turned into tokens. "
                "Save it with `tokenizer.save(...)` or `save_pretrained(...)`."
            ) from error
        # Lengths are promises: a stored truncation or padding setting must not change them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.path = path
        """Where it is."""
        self.reserved: tuple[int, ...] = ()
        """Ids that are kept for the placeholders of media."""
        self._reserved = np.empty(0, np.int32)
        self._spelling = self._tokenizer
        self.special_tokens: Mapping[str, str] = special_token_names(folder) if folder else {}
        """The special tokens by their names: {"bos_token": "<s>", ..}; a chat template knows them by these."""
        self.chat_templates: Mapping[str, str] = chat_templates(folder) if folder else {}
        """The chat templates of the folder by name; the usual one is "default"."""
        self.digest = _digest(content, self.special_tokens, self.chat_templates)
        """Digest of everything that decides which tokens a text or a conversation becomes."""

    def reserve(self, ids: Collection[int]) -> None:
        """Keep some ids for the placeholders of media: a text that happens to hold one is spelled out instead."""
        self.reserved = tuple(sorted(ids))
        self._reserved = np.array(sorted(one for one in ids if one <= np.iinfo(np.int32).max), np.int32)
        self._spelling = Tokenizer.from_str(self._tokenizer.to_str())
        self._spelling.encode_special_tokens = True

    def check(self) -> None:
        """Refuse a tokenizer that cannot serve any text: it fails on a short one, or has ids that do not fit.

        Raises:
            SpecError: It does.
        """
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        size = self._tokenizer.get_vocab_size()
        if largest > np.iinfo(np.int32).max or largest > 16 * size + (1 << 20):
            raise SpecError(
                f"tokenizer: {self.path!r} has {size} tokens and ids up to {largest}; no model has an embedding for "
                "them, and ids are stored in 32 bits. Save it again with `tokenizer.save(...)`, ids counted from 0."
            )
        for special_tokens in (True, False):
            try:
                tokens = self.encode(_PROBES, special_tokens=special_tokens)
            except TokenizerPanic as panic:
                raise SpecError(
                    f"tokenizer: {self.path!r} fails on an ordinary text ({panic}); no text could be turned into "
                    "tokens. Save it again with `tokenizer.save(...)` or `save_pretrained(...)`."
                ) from panic
            longest = int(tokens.lengths.max())
            most = 16 * max(map(len, _PROBES)) + 1024
            if longest > most:
                raise SpecError(
                    f"tokenizer: {self.path!r} makes {longest} tokens of a text of {max(map(len, _PROBES))} "
                    "characters; every sample would be as long. Look at its normalizer and its post-processor."
                )

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> Ragged:
        """Return the token ids (int32) of each text.

        Raises:
            TokenizerPanic: The library panics on one of them; `encode_each` finds it.
        """
        with words_of_panics():
            made = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        tokens = _joined_ids(made)
        wrong = np.flatnonzero(self.holds_reserved(tokens))
        if not len(wrong):
            return tokens
        parts = [tokens[row] for row in range(len(tokens))]
        chosen = [texts[row] for row in wrong.tolist()]
        spelled = self._spelling.encode_batch_fast(chosen, add_special_tokens=special_tokens)
        for row, encoding in zip(wrong.tolist(), spelled, strict=True):
            ids = np.array(encoding.ids, np.int32)
            # A placeholder that is an ordinary word of the vocabulary cannot be spelled: it becomes token 0.
            parts[row] = np.where(np.isin(ids, self._reserved), 0, ids).astype(np.int32)
        return Ragged.from_rows(parts, np.int32)

    def encode_each(self, texts: Sequence[str], *, special_tokens: bool) -> tuple[Ragged, list[tuple[int, str]]]:
        """Encode texts one by one; one on which the library panics has no tokens, and is returned with the reason."""
        parts, panics = [np.empty(0, np.int32)] * len(texts), list[tuple[int, str]]()
        for row, text in enumerate(texts):
            try:
                parts[row] = self.encode([text], special_tokens=special_tokens)[0]
            except TokenizerPanic as panic:
                panics.append((row, str(panic)))
        return Ragged.from_rows(parts, np.int32), panics

    def holds_reserved(self, tokens: Ragged) -> npt.NDArray[np.bool_]:
        """Return which rows hold an id that is kept for placeholders."""
        held = np.zeros(len(tokens), np.bool_)
        if len(self._reserved):
            places = np.flatnonzero(np.isin(tokens.values[tokens.offsets[0] : tokens.offsets[-1]], self._reserved))
            held[np.searchsorted(tokens.offsets - tokens.offsets[0], places, side="right") - 1] = True
        return held

    def encode_spans(self, texts: Sequence[str], *, special_tokens: bool) -> TokenSpans:
        """Return the token ids of each text and which of its characters each token stands for."""
        with words_of_panics():
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=special_tokens)
        tokens = _joined_ids(encodings)
        pairs = itertools.chain.from_iterable(encoding.offsets for encoding in encodings)
        count = len(tokens.values)
        borders = np.fromiter(itertools.chain.from_iterable(pairs), np.int32, 2 * count).reshape(count, 2)
        return TokenSpans(tokens, np.ascontiguousarray(borders[:, 0]), np.ascontiguousarray(borders[:, 1]))

    def find(self, token: str) -> int | None:
        """Return the id of a token, if it is in the vocabulary."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that token ids stand for, special tokens as they are written."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    @functools.cached_property
    def _unknown(self) -> int | None:
        """The id of what stands for anything that the vocabulary does not have, if the tokenizer has one."""
        model = json.loads(self._tokenizer.to_str())["model"]
        named = model.get("unk_token")
        return model.get("unk_id") if named is None else self.find(named)

    def lost_characters(self, texts: Sequence[str]) -> list[str]:
        """Return the characters of each text that its tokens do not hold: they vanish, or become the unknown token.

        What the tokenizer changes on purpose is not lost: its normalizer's form of a text is what is looked for. White
        space is not looked for, nor the sign that some normalizers write for it.
        """
        normalizer, has_decoder = self._tokenizer.normalizer, self._tokenizer.decoder is not None
        found: list[str] = []
        for text, made in zip(texts, self._tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
            spans = [(token == self._unknown, *span) for token, span in zip(made.ids, made.offsets, strict=True)]
            lost = "".join(text[begin:end] for unknown, begin, end in spans if unknown)
            normal = text if normalizer is None else normalizer.normalize_str(text)
            if has_decoder:
                decoded = self.decode(made.ids)
                # Special tokens keep their case where the normalizer has changed that of the text.
                lost += "".join(set(normal).difference(decoded, decoded.lower()))
            else:  # the tokens of bytes would not become characters again
                held = {at for _, begin, end in spans for at in range(begin, end)}
                lost += "".join(one for at, one in enumerate(text) if at not in held and one in normal)
            found.append(
                "".join(
                    dict.fromkeys(
                        one for one in normal + lost if one in lost and not (one.isspace() or one == _SPACE_SIGN)
                    )
                )
            )
        return found

    def id_of(self, token: str | int, field: str) -> int:
        """Return the id of a token of the vocabulary; `field` is the field of the sample that names it.

        Raises:
            SpecError: when there is no such token.
        """
        found = self.find(token) if isinstance(token, str) else token
        if isinstance(token, int) and not 0 <= token < self._tokenizer.get_vocab_size():
            found = None
        if found is None:
            raise SpecError(
                f"sample.{field}: the token {token!r} is not in the vocabulary of the tokenizer {self.path!r}; "
                f"images, clips or sounds would have no place in the text. Set {field} to one of the tokenizer's "
                "special tokens, or to an id."
            )
        return found

    def border_id(self, field: Literal["bos", "eos"], wanted: bool | str | int) -> int:
        """Return the id of the token for `bos` or `eos` of a Text: the named one, or with True the tokenizer's own.

        Raises:
            SpecError: when there is no such token.
        """
        if wanted is True:
            return self._own_border(field)
        found = wanted if isinstance(wanted, int) else self.find(wanted)
        if found is None or found > np.iinfo(np.int32).max or self._tokenizer.id_to_token(found) is None:
            added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            known = list(dict.fromkeys([*self.special_tokens.values(), *added]))
            raise SpecError(
                f"{field}={wanted!r}: the tokenizer {self.path!r} has no such token; the model would get an unknown "
                f"id, or none.{did_you_mean(wanted, known)} Give a token of the vocabulary"
                f"{f' (its special tokens: {list_some(known, 8)})' if known else ''}, its id, or {field}=True for the "
                "tokenizer's own."
            )
        return int(found)

    def _own_border(self, field: Literal["bos", "eos"]) -> int:
        named = self.special_tokens.get(f"{field}_token")
        if named is None:
            raise SpecError(
                f"{field}=True: the tokenizer {self.path!r} does not say which token that is ({_CONFIG} or "
                f"{_SPECIAL_MAP} beside tokenizer.json would name its {field}_token); texts would run into each other. "
                f'Give the whole tokenizer folder, or name the token: {field}="<token>".'
            )
        found = self.find(named)
        if found is None:
            raise SpecError(
                f"{field}=True: the folder {self.path!r} names {named!r} as its {field}_token, which is not in its "
                f"vocabulary; texts would run into each other. Save the folder again with `save_pretrained(...)`, or "
                f'name another token: {field}="<token>".'
            )
        return found


def decode_texts(column: Ragged) -> tuple[list[str], npt.NDArray[np.bool_]]:
    """Return the rows as strings, and which are not valid UTF-8 (those come back empty)."""
    data = memoryview(np.ascontiguousarray(column.values))  # type: ignore[arg-type]
    texts: list[str] = []
    bad = np.zeros(len(column), np.bool_)
    offsets = column.offsets.tolist()
    for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
        try:
            texts.append(str(data[start:stop], "utf-8"))
        except UnicodeDecodeError:
            texts.append("")
            bad[row] = True
    return texts, bad


# -- what a Hugging Face folder says beside its tokenizer.json -----------------------------------


def special_token_names(folder: Path) -> dict[str, str]:
    """Return the special tokens a tokenizer folder names: {"bos_token": "<s>", "eos_token": "</s>", ..}."""
    config, table = read_json(folder / _CONFIG), read_json(folder / _SPECIAL_MAP)
    layers = (table, config) if _OWN_DECODER in config else (config, table)
    names: dict[str, str] = {}
    for layer in layers:
        extra = layer.get("extra_special_tokens")
        for key, value in (*layer.items(), *(extra.items() if isinstance(extra, dict) else ())):
            token = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(token, str) and token:
                names[key] = token
    return dict(sorted(names.items()))


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a tokenizer or processor folder by name; the usual one is "default"."""
    found: dict[str, str] = {}
    # The later ones win: a file of its own is the newer way to keep a template.
    for content in (read_json(folder / "chat_template.json"), read_json(folder / _CONFIG)):
        found |= _named_templates(content.get("chat_template"))
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _template_text(file)
    if (file := folder / "chat_template.jinja").is_file():
        found[DEFAULT_TEMPLATE] = _template_text(file)
    return dict(sorted(found.items()))


_MOST_BYTES = 256 << 20
"""Size of a file of a tokenizer; the largest vocabularies take 60 MB."""


def _read_bounded(file: Path) -> bytes:
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise SpecError(
            f"tokenizer: {str(file)!r} has {size} bytes, and at most {_MOST_BYTES} are read; loading it could take "
            "more memory than the host has. Give the file of a tokenizer."
        )
    return file.read_bytes()


def tokenizer_texts(path: str) -> list[bytes]:
    """Return the content of all files that a tokenizer is made from.

    Raises:
        SpecError: There is no tokenizer, or one of its files is too large.
    """
    file = tokenizer_file(path)
    names = (_CONFIG, _SPECIAL_MAP, "chat_template.json", "chat_template.jinja")
    beside = [file.parent / name for name in names] if Path(path).is_dir() else []
    more = sorted((file.parent / "additional_chat_templates").glob("*.jinja")) if beside else []
    return [_read_bounded(one) for one in (file, *beside, *more) if one.is_file()]


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is no such file.

    Raises:
        SpecError: when the file holds no JSON object.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read_bounded(file))
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"tokenizer: {str(file)!r} is not JSON ({error}); the special tokens and sizes it names would be unknown. "
            "Save the folder again with `save_pretrained(...)`."
        ) from error
    if not isinstance(content, dict):
        raise SpecError(
            f"tokenizer: {str(file)!r} holds a {type(content).__name__}, not keys and values; the special tokens and "
            "sizes it names would be unknown. Save the folder again with `save_pretrained(...)`."
        )
    return content


def _template_text(file: Path) -> str:
    try:
        return _read_bounded(file).decode()
    except UnicodeDecodeError as error:
        raise SpecError(
            f"tokenizer: byte {error.start} of {str(file)!r} is not UTF-8; messages could not become text. Save the "
            "template as UTF-8."
        ) from error


def _named_templates(value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):  # [{"name": .., "template": ..}, ..]
        value = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
    if not isinstance(value, dict):
        return {}
    return {name: text for name, text in value.items() if isinstance(name, str) and isinstance(text, str)}


def _digest(content: bytes, special_tokens: Mapping[str, str], templates: Mapping[str, str]) -> str:
    digest = hashlib.blake2b(content, digest_size=8)
    if special_tokens or templates:  # a bare tokenizer.json keeps the digest of the file itself
        beside = {"special_tokens": dict(special_tokens), "chat_templates": dict(templates)}
        digest.update(b"\0" + json.dumps(beside, sort_keys=True).encode())
    return digest.hexdigest()


def _joined_ids(encodings: Sequence[Any]) -> Ragged:
    ids = [encoding.ids for encoding in encodings]
    offsets = offsets_of([len(one) for one in ids])
    values = np.empty(int(offsets[-1]), np.int32)
    for start, one in zip(offsets.tolist(), ids, strict=False):
        values[start : start + len(one)] = one
    return Ragged(values, offsets)
