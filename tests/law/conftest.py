"""What several files of the law need."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = {"<unk>": 0, "<image>": 1, "<vs>": 2, "<ve>": 3, **{f"w{i}": 4 + i for i in range(40)}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """A tokenizer of words w0, w1, .., with tokens for images."""
    words = Tokenizer(models.WordLevel(WORDS, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<image>", "<vs>", "<ve>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(path))
    return str(path)
