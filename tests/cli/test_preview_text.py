"""Previews show what a model is trained on: special tokens, placeholders, what is cut off, and what is in the loss."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.cli.preview import GAP, preview_source, show_previews, written_tokens
from overlord.cli.sources import open_each
from overlord.job_files import dump_job_yaml
from overlord.transforms.samples.tokenize import TextTokenizer

SPECIAL = ["<s>", "</s>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]
ROWS = 40


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder whose tokens are single bytes."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A tokenizer whose tokens are words, which it joins by blanks."""
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    vocab = {"<image>": 0, "a": 1, "small": 2, "cat": 3}
    Tokenizer(models.WordLevel(vocab, unk_token="a")).save(str(path))
    return TextTokenizer(str(path))


def texts(folder: Path, rows: list[dict[str, Any]], name: str = "a") -> str:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / f"{name}.jsonl")


def images(folder: Path) -> str:
    out = io.BytesIO()
    Image.fromarray(np.zeros((56, 56, 3), np.uint8)).save(out, "JPEG")
    columns = {"jpg": [out.getvalue()] * ROWS, "text": ["a cat"] * ROWS}
    pq.write_table(pa.table(columns), folder / "i.parquet")
    return str(folder / "i.parquet")


def shown(job: ol.Job, folder: Path, rows: int = 1) -> list[Any]:
    return preview_source(open_each(job, job.sources, folder / "cache", None)[0], rows)


def job_of(source: ol.Source, model: Path, context: int = 512, **changes: Any) -> ol.Job:
    return ol.Job([source], tokenizer=str(model), batch=ol.Batch(context, global_samples=4), **changes)


def test_special_tokens_and_new_lines_are_seen(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path, [{"text": "Ünder\n  the tree"}])
    job = job_of(ol.Source("a", path, sample=ol.Text(bos=True, eos=True)), model)
    (one,) = shown(job, tmp_path)
    assert (one.text, one.spans) == ("<s>Ünder\n  the tree</s>", ())
    console = Console(file=io.StringIO(), width=100)
    console.print(show_previews(open_each(job, job.sources, tmp_path / "cache", None)[0], [one], pictures=False))
    assert [line.rstrip() for line in console.file.getvalue().splitlines()][-3:-1] == [  # type: ignore[attr-defined]
        "  <s>Ünder",
        "    the tree</s>",
    ]


def test_what_is_cut_off_is_not_shown(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path, [{"text": "0123456789"}, {"text": "01"}])
    source = ol.Source("a", path, sample=ol.Text(eos=True))
    cut, whole = shown(job_of(source, model, context=8), tmp_path, 2)
    assert (cut.text, cut.tokens, cut.delivered) == ("01234567", 11, 8)
    assert "11 tokens · cut to 8" in cut.facts()
    assert (whole.text, "cut" in whole.facts()) == ("01</s>", False)
    (dropped,) = shown(job_of(source, model, context=8, overlength="drop"), tmp_path)
    assert (dropped.text, dropped.dropped) == ("0123456789</s>", True)


def test_the_end_of_a_long_text_is_shown(model: Path, tmp_path: Path) -> None:
    path = texts(tmp_path, [{"text": "x" * 5000 + "the end"}])
    (one,) = shown(job_of(ol.Source("a", path, sample=ol.Text(eos=True)), model, context=8192), tmp_path)
    assert one.text.endswith("xthe end</s>")
    text = one.to_json()["text"]
    assert (len(text), GAP in text, text.endswith("the end</s>")) == (1200, True, True)


def test_placeholders_are_counted_between_their_borders(model: Path, tmp_path: Path) -> None:
    sample = ol.ImageText("jpg", "text", patch=14, merge=2, min_pixels=784, image_token="<|image_pad|>",
                          before="<|vision_start|>", after="<|vision_end|>")  # fmt: skip
    (one,) = shown(job_of(ol.Source("i", images(tmp_path), sample=sample), model), tmp_path)
    assert one.text == "<|vision_start|>[<|image_pad|> x 4]<|vision_end|>a cat"


@pytest.mark.parametrize(("loss", "marked"), [("assistant", ["Hi!<|im_end|>", "Bye.<|im_end|>"]),
                                             ("last", ["Bye.<|im_end|>"]), ("all", [])])  # fmt: skip
def test_the_loss_of_a_chat_is_marked(loss: Any, marked: list[str], model: Path, tmp_path: Path) -> None:
    said = [("user", "Hello"), ("assistant", "Hi!"), ("user", "And\nnow?"), ("assistant", "Bye.")]
    path = texts(tmp_path, [{"messages": [{"role": role, "content": text} for role, text in said]}])
    (one,) = shown(job_of(ol.Source("c", path, sample=ol.Chat(template="chatml", loss=loss)), model), tmp_path)
    assert "<|im_start|>user\nAnd\nnow?<|im_end|>\n" in one.text
    assert [one.text[a:b] for a, b in one.spans] == marked
    assert one.turns == 4


def test_words_that_are_joined_by_blanks_keep_their_places(words: TextTokenizer) -> None:
    ids, loss = np.array([1, 2, 0, 0, 0, 3, 0, 1]), np.array([0, 1, 0, 0, 0, 1, 0, 1])
    text, spans = written_tokens(words, ids, loss, [(2, 3), (6, 1)])
    assert text == "a small [<image> x 3] cat [<image> x 1] a"
    assert [text[a:b] for a, b in spans] == [" small", " cat", " a"]


@given(st.lists(st.tuples(st.text(st.sampled_from("abc\n é"), max_size=8), st.booleans()), max_size=8), st.data())
def test_marks_hold_whatever_the_loss_is(model: Path, runs: list[tuple[str, bool]], data: st.DataObject) -> None:
    """Parts of text, counted or not, with images between some of them, come back as they were."""
    tokenizer = TextTokenizer(str(model))
    ids: list[int] = []
    loss: list[int] = []
    items: list[tuple[int, int]] = []
    expected, counted = "", ""
    for text, counts in runs:
        part = tokenizer.encode([text], special_tokens=False).values.tolist()
        ids, loss = ids + part, loss + [int(counts)] * len(part)
        expected, counted = expected + text, counted + (text if counts else "")
        if many := data.draw(st.integers(0, 3)):
            items.append((len(ids), many))
            ids, loss = ids + [tokenizer.id_of("<|image_pad|>", "image_token")] * many, loss + [0] * many
            expected += f"[<|image_pad|> x {many}]"
    found, spans = written_tokens(tokenizer, np.array(ids, np.int32), np.array(loss, np.uint8), items)
    assert found == expected
    assert "".join(found[a:b] for a, b in spans) == ("" if all(loss) else counted)


# ---- which tokens stand for media


def folder_with(model: Path, folder: Path, **config: Any) -> Path:
    """Copy the tokenizer, with a processor's configuration beside it."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if config:
        (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return folder


def write_job(folder: Path, tokenizer: Path, sample: str) -> Path:
    images(folder)
    path = folder / "job.yaml"
    path.write_text(
        f"sources: [{{name: i, path: i.parquet, sample: {sample}}}]\n"
        f"tokenizer: {tokenizer}\nbatch: {{context_length: 512, global_samples: 4}}\n"
    )
    return path


def warnings(path: Path) -> list[str]:
    found = json.loads(call("sources", "lint", path, "--json").stdout)
    return [one["message"] for one in found["findings"] if "vision_start" in one["message"]]


def test_a_token_that_a_folder_names_is_told(model: Path, tmp_path: Path) -> None:
    processor = folder_with(model, tmp_path / "vl", patch_size=14, merge_size=2, temporal_patch_size=2)
    path = write_job(tmp_path, processor, "{image: jpg, text: text}")
    first, before, after = (TextTokenizer(str(model)).find(token) for token in SPECIAL[2:5])
    told = (
        f"<|image_pad|> (id {first}) stands for an image, between <|vision_start|> (id {before}) and <|vision_end|> "
        f"(id {after})"
    )
    assert told in " ".join(call("sources", "preview", path).stdout.split())
    assert f"note i: {told}\n" in call("sources", "lint", path).stdout
    assert warnings(path) == []


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ("", True),
        (', before: "<|vision_start|>", after: "<|vision_end|>"', False),
        pytest.param(', after: "</s>"', False, marks=pytest.mark.slow),
    ],
)
def test_lint_misses_the_borders_that_a_tokenizer_has(more: str, warned: bool, model: Path, tmp_path: Path) -> None:
    bare = folder_with(model, tmp_path / "bare")
    path = write_job(tmp_path, bare, f'{{image: jpg, text: text, image_token: "<|image_pad|>"{more}}}')
    found = warnings(path)
    assert len(found) == warned
    assert all('Write before: "<|vision_start|>" and after: "<|vision_end|>"' in message for message in found)


@pytest.mark.parametrize(
    ("text", "warned"), [("see <image> here", True), ("<|vision_start|><image><|vision_end|> here", False)]
)
def test_borders_may_stand_in_the_text_itself(text: str, warned: bool, model: Path, tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.fromarray(np.zeros((56, 56, 3), np.uint8)).save(out, "JPEG")
    pq.write_table(pa.table({"images": [[out.getvalue()]] * ROWS, "text": [text] * ROWS}), tmp_path / "d.parquet")
    sample = ol.Interleaved("images", "text", image_token="<|image_pad|>")
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job_of(ol.Source("d", str(tmp_path / "d.parquet"), sample=sample), model)))
    assert len(warnings(path)) == warned
