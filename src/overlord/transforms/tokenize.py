"""Text to token ids, in batches, with a Hugging Face `tokenizers` file."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from overlord.core.ragged import Ragged, offsets_of
from overlord.errors import SpecError


class TextTokenizer:
    """A loaded tokenizer and the digest of its file."""

    def __init__(self, path: str) -> None:
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise SpecError(
                f"tokenizer: {path!r} is neither a tokenizer.json nor a folder with one; no text could be turned into "
                "tokens. Give the path of a tokenizer.json or of a Hugging Face tokenizer folder."
            )
        content = file.read_bytes()
        self.digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        try:
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise SpecError(
                f"tokenizer: {str(file)!r} is not a tokenizer file ({error}); no text could be turned into tokens. "
                "Save it with `tokenizer.save(...)` or `save_pretrained(...)`."
            ) from error
        # Lengths are promises: a stored truncation or padding setting must not change them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> Ragged:
        """Return the token ids (int32) of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
        ids = [encoding.ids for encoding in encodings]
        offsets = offsets_of([len(one) for one in ids])
        values = np.empty(int(offsets[-1]), np.int32)
        for start, one in zip(offsets.tolist(), ids, strict=False):
            values[start : start + len(one)] = one
        return Ragged(values, offsets)

    def id_of(self, token: str | int) -> int:
        """Return the id of a token of the vocabulary."""
        if isinstance(token, int):
            return token
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise SpecError(
                f"tokenizer: the token {token!r} is not in the vocabulary; images would have no place in the text. "
                "Set image_token to one of the tokenizer's special tokens, or to an id."
            )
        return int(found)


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
