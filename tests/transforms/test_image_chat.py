"""Images as text (base64, data: URLs, paths) and chats with images: the tokens and the mask of transformers, one stream
however the images are written, faults with the ids of their rows.
"""

from __future__ import annotations

import base64
import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import overlord as ol
from overlord.core.samples import BAD
from overlord.errors import ReaderError, SpecError
from overlord.job.sample_specs import image_tokens
from overlord.job_files import load_job_file
from overlord.testing import assert_resumes_anywhere, stream_digests
from overlord.transforms.samples.image_values import ImageValues
from overlord.transforms.samples.per_sample import MediaFault

SPECIAL = ["<|im_start|>", "<|im_end|>", "<image>", "<vs>", "<ve>"]
QWEN = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{% set parts = [{'type': 'text', 'text': message['content']}] %}
{%- else %}{% set parts = message['content'] %}{% endif %}
{%- if message['role'] == 'assistant' %}{% generation %}
{%- for part in parts %}{% if part['type'] == 'image' %}<vs><image><ve>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}<|im_end|>{% endgeneration %}
{%- else %}{% for part in parts %}{% if part['type'] == 'image' %}<vs><image><ve>{% else %}{{ part['text'] }}{% endif %}
{%- endfor %}<|im_end|>{% endif %}
{% endfor %}"""
IMAGES = {"patch": 14, "merge": 2, "before": "<vs>", "after": "<ve>", "min_pixels": 784}
SIZES = [(40, 30), (90, 60), (64, 64), (30, 120), (200, 100), (50, 50)]


def png(size: tuple[int, int], seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, ("PNG", "JPEG", "WEBP")[seed % 3], quality=90)
    return out.getvalue()


PNGS = [png(size, number) for number, size in enumerate(SIZES)]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{b64(data)}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({word: number for number, word in enumerate([*SPECIAL, *alphabet])}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    folder = tmp_path_factory.mktemp("tokenizer")
    theirs = PreTrainedTokenizerFast(tokenizer_object=made)
    theirs.chat_template = QWEN
    theirs.save_pretrained(folder)
    return str(folder)


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def job_of(tokenizer: str, path: str, sample: Any, **source: Any) -> ol.Job:
    source = {"shuffle_bytes": 0} | source
    return ol.Job(
        [ol.Source("s", path, sample=sample, **source)], tokenizer=tokenizer, batch=ol.Batch(512, global_samples=2)
    )


def content(job: ol.Job, cache: str, steps: int = 3) -> list[dict[str, np.ndarray]]:
    """Return the arrays of some steps."""
    with ol.launch(job, runtime="inline", cache=cache) as service:
        client = service.client()
        return [
            {key: np.array(values) for key, values in batch.items()}
            for _ in range(steps)
            for batch in next(client).microbatches
        ]


def same(ours: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]]) -> None:
    assert len(ours) == len(theirs) and "pixel_values" in ours[0]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], key)


# -- images as text ---------------------------------------------------------------------------------------------------


def test_images_as_text_are_the_images_themselves(tokenizer, tmp_path, cache):
    """The reference are bytes in Parquet: the same tokens, and the same pixels, from each way to write them."""
    table = {"image": PNGS, "text": [f"text {n}" for n in range(6)]}
    pq.write_table(pa.table(table), tmp_path / "bytes.parquet")
    spec = {"image": "image", "text": "text", **IMAGES}
    reference = content(job_of(tokenizer, str(tmp_path / "bytes.parquet"), ol.ImageText(**spec)), cache)
    (tmp_path / "files").mkdir()
    for number, data in enumerate(PNGS):
        (tmp_path / "files" / f"{number}.png").write_bytes(data)
    lined = base64.encodebytes(PNGS[4]).decode()
    texts = [b64(PNGS[0]), url(PNGS[1]), base64.urlsafe_b64encode(PNGS[2]).decode().rstrip("="), b64(PNGS[3]), lined,
             "5.png"]  # fmt: skip
    rows = [{"image": text, "text": f"text {number}"} for number, text in enumerate(texts)]
    path = written(tmp_path, "text", rows)
    same(content(job_of(tokenizer, path, ol.ImageText(**spec, folder=tmp_path / "files")), cache), reference)
    # Several images of a row, in a list of text in JSON and in Parquet.
    rows = [{"images": [b64(PNGS[n]), f"{n}.png"], "text": f"<image> and <image> {n}"} for n in range(6)]
    both = [{"images": [PNGS[n], PNGS[n]], "text": f"<image> and <image> {n}"} for n in range(6)]
    pq.write_table(pa.Table.from_pylist(both), tmp_path / "lists.parquet")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "texts.parquet")
    sample = ol.Interleaved("images", "text", special_tokens=False, **IMAGES, folder=tmp_path / "files")
    reference = content(job_of(tokenizer, str(tmp_path / "lists.parquet"), sample), cache)
    for path in (written(tmp_path, "lists", rows), str(tmp_path / "texts.parquet")):
        same(content(job_of(tokenizer, path, sample), cache), reference)


def test_values_that_are_no_images_are_bad_samples_with_their_ids(tokenizer, tmp_path, cache, caplog):
    good = [b64(data) for data in PNGS]
    wrong = ["data:image/png;base64", "https://x.org/a.png", "../secret.png", "gone.png", url(b"not at all"), "%%"]
    rows = [{"image": value, "text": "a text"} for value in good + wrong]
    sample = ol.ImageText("image", "text", **IMAGES, folder=tmp_path)
    job = job_of(tokenizer, written(tmp_path, "wrong", rows), sample).replace(batch=ol.Batch(512, global_samples=12))
    with caplog.at_level(logging.WARNING, "overlord"), ol.launch(job, runtime="inline", cache=cache) as service:
        next(service.client())
        assert service.status()["sources"]["s"]["bad"] == len(wrong)
    told = caplog.text
    for row, reason in enumerate(
        ["no comma", "not downloaded", "leads out of the folder", "there is no file", "no image", "there is no file"]
    ):
        assert f"s:0:{6 + row}@0" in told and reason in told
    # Of a path without a folder it says what to set; a file that exists and cannot be read stops the run.
    with pytest.raises(MediaFault, match="set folder="):
        ImageValues().find(b"coco/1.jpg")
    (tmp_path / "folder.png").mkdir()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ReaderError, match="would change the stream"):
        patch.setattr("time.sleep", lambda _: None)
        ImageValues(str(tmp_path)).find(b"folder.png")
    with pytest.raises(SpecError, match=r"sample.folder: '.*nowhere' is no folder"):
        content(job.replace(sources=[job.sources[0].replace(sample=sample.replace(folder="nowhere"))]), cache)


# -- chats with images ------------------------------------------------------------------------------------------------


def chats() -> list[list[dict[str, Any]]]:
    """Conversations of text and images, in the parts that transformers takes; an image is its number."""

    def image(number: int) -> dict[str, Any]:
        return {"type": "image", "image": number}

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    return [
        [{"role": "user", "content": [image(0), text("what is it?")]}, {"role": "assistant", "content": "a cat"}],
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [text("compare "), image(1), text(" with "), image(2)]},
            {"role": "assistant", "content": [text("like this: "), image(3), text(".")]},
            {"role": "user", "content": "thanks"},
            {"role": "assistant", "content": "welcome"},
        ],
        [{"role": "user", "content": "no image"}, {"role": "assistant", "content": "none"}],
        [{"role": "user", "content": [image(4), image(5)]}, {"role": "assistant", "content": "two"}],
    ]  # fmt: skip


def with_images(chat: list[dict[str, Any]], write: Any) -> list[dict[str, Any]]:
    def part(one: dict[str, Any]) -> dict[str, Any]:
        return one if one["type"] == "text" else write(one["image"])

    return [
        message | {"content": [part(one) for one in message["content"]]} if isinstance(message["content"], list)
        else message
        for message in chat
    ]  # fmt: skip


def numbers(chat: list[dict[str, Any]]) -> list[int]:
    parts = [part for message in chat for part in message["content"] if isinstance(part, dict)]
    return [part["image"] for part in parts if part["type"] == "image"]


def marked(chat: list[dict[str, Any]], marker: str) -> list[dict[str, Any]]:
    """Return a conversation as LLaVA writes it: text with markers."""
    roles = {"user": "human", "assistant": "gpt", "system": "system"}
    texts = ["".join(part.get("text", marker) for part in message["content"])
             if isinstance(message["content"], list) else message["content"] for message in chat]  # fmt: skip
    return [{"from": roles[message["role"]], "value": text} for message, text in zip(chat, texts, strict=True)]


@pytest.mark.parametrize("loss", ["assistant", "last", "all"])
def test_tokens_and_mask_are_those_of_transformers(tokenizer, loss):
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    spec = ol.ImageChat(loss=loss, **IMAGES)
    measured = measure(tokenizer, spec, [with_images(chat, lambda n: {"type": "image_url", "image_url": {"url": url(
        PNGS[n])}}) for chat in chats()])  # fmt: skip
    assert not measured.faults and measured.margin == (1, 1)
    for row, chat in enumerate(chats()):
        made = theirs.apply_chat_template(
            with_images(chat, lambda n: {"type": "image"}), return_assistant_tokens_mask=True, return_dict=True
        )
        sizes = iter([SIZES[n] for n in numbers(chat)])
        answers = [made["assistant_masks"], [1] * len(made["input_ids"])][loss == "all"]
        if loss == "last":  # the last answer alone
            answers = list(answers)
            begin = max(n for n in range(len(answers)) if answers[n] and not answers[n - 1])
            answers[:begin] = [0] * begin
        tokens, mask = list[int](), list[int]()
        starts, lengths = list[int](), list[int]()
        for token, counts in zip(made["input_ids"], answers, strict=True):
            many = 1
            if token == 2:
                many = int(image_tokens(spec, *([side] for side in next(sizes)))[0])
                starts.append(len(tokens))
                lengths.append(many)
            tokens += [token] * many
            mask += [0 if token in (2, 3, 4) else counts] * many
        assert measured.kept["tokens"][row].tolist() == tokens
        assert measured.kept["loss"][row].tolist() == mask
        assert measured.kept["media_start"][row].tolist() == starts
        assert (measured.image_tokens[row], measured.images[row]) == (sum(lengths), len(lengths))


def measure(tokenizer: str, spec: ol.ImageChat, found: list[Any]) -> Any:
    from overlord.core.ragged import BAD_COLUMN, Ragged
    from overlord.transforms.samples.sample_kinds import make_transform
    from overlord.transforms.samples.tokenize import TextTokenizer

    source = ol.Source("s", "nowhere", sample=spec)
    words = TextTokenizer(tokenizer)
    words.reserve({2})
    rows: Any = {"messages": Ragged.from_rows([json.dumps(chat).encode() for chat in found])}
    rows |= {name: Ragged.from_rows([b"[]"] * len(found)) for name in spec.images}
    rows[BAD_COLUMN] = np.zeros(len(found), np.int16)
    return make_transform(source, words).measure(rows, None, np.arange(len(found), dtype=np.uint64))


def test_one_stream_however_images_are_written(tokenizer, tmp_path, cache):
    """Parts with base64, markers with paths, columns of bytes: the same batches; and the law for one of them."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, data in enumerate(PNGS):
        (folder / f"{number}.png").write_bytes(data)
    parts = [{"messages": with_images(c, lambda n: {"type": "image", "image": b64(PNGS[n])})} for c in chats()]
    inside = job_of(tokenizer, written(tmp_path, "parts", parts), ol.ImageChat(**IMAGES))
    reference = content(inside, cache)
    llava = [{"chat": marked(c, "<photo>"), "image": [f"{n}.png" for n in numbers(c)]} for c in chats()]
    del llava[2]["image"]  # a row without images has no such key
    sample = ol.ImageChat("chat", images="image", marker="<photo>", folder=folder, **IMAGES)
    same(content(job_of(tokenizer, written(tmp_path, "llava", llava), sample), cache), reference)
    rows = [
        {"messages": json.dumps(with_images(c, lambda n: {"type": "image"})), "images": [PNGS[n] for n in numbers(c)]}
        for c in chats()
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "columns.parquet")
    columns = job_of(tokenizer, str(tmp_path / "columns.parquet"), ol.ImageChat(images="images", **IMAGES))
    same(content(columns, cache), reference)
    # A template that takes text only gets the placeholders in its text.
    plain = inside.sources[0].sample.replace(template="chatml")
    made = content(inside.replace(sources=[inside.sources[0].replace(sample=plain)]), cache, steps=1)
    assert (made[0]["input_ids"] == 2).sum() == sum(int(image_tokens(plain, [w], [h])[0]) for w, h in SIZES[:4])
    mesh = ol.ClientPlaceTree(dp=2)
    law = inside.replace(sources=[inside.sources[0].replace(shuffle_bytes=4096)])
    expected = stream_digests(law, mesh=mesh, steps=4, cache=cache)
    assert stream_digests(law, mesh=mesh, steps=4, cache=cache, runtime="local", threads=4) == expected
    assert_resumes_anywhere(law, steps=3, mesh=mesh, cache=cache)


def test_a_conversation_that_does_not_fit_its_images_is_a_bad_sample(tokenizer):
    user = {"role": "user", "content": "hello"}
    cases = {
        "shows image 0 of the row, which has 0": [user | {"content": [{"type": "image"}]}],
        "a part of type 'video'": [user | {"content": [{"type": "video", "video": "x"}]}],
        "image 0: the text is no base64": [user | {"content": [{"type": "image", "image": "data:;base64,?"}]}],
        "image 0: the bytes are no image": [user | {"content": [{"type": "image", "image": b64(b"nothing")}]}],
        "a text in it holds a placeholder": [user | {"content": [{"type": "text", "text": "an <image> in text"}]}],
    }
    measured = measure(tokenizer, ol.ImageChat(marker="<photo>", **IMAGES), [*cases.values(), chats()[2]])
    assert (measured.flags & BAD > 0).tolist() == [True] * 5 + [False]
    assert [row for row, _ in measured.faults] == list(range(5))
    for expected, (_, reason) in zip(cases, measured.faults, strict=True):
        assert expected in reason
    left = measure(tokenizer, ol.ImageChat(images=["a"], **IMAGES), [chats()[2]])
    assert not left.faults  # no image in the row, none in its messages


def test_wrong_specs_are_refused_before_anything_runs(tokenizer, tmp_path):
    with pytest.raises(SpecError, match="the chat template writes an image as '<vs><image><ve>'"):
        measure(tokenizer, ol.ImageChat(image_token="<|im_end|>"), [chats()[2]])
    with pytest.raises(SpecError, match=r"reads 'Ġ' as the tokens .*, not as"):
        measure(tokenizer, ol.ImageChat(image_token="Ġ"), [chats()[2]])
    text = """
        sources:
          - {name: a, path: a.jsonl, sample: {messages: chat, images: image, folder: coco}}
          - {name: b, path: b.jsonl, sample: {image_chat: messages}}
        tokenizer: t.json
        batch: {context_length: 512, global_samples: 4}
    """
    (tmp_path / "job.yaml").write_text(text)
    first, second = (source.sample for source in load_job_file(tmp_path / "job.yaml").job.sources)
    assert isinstance(first, ol.ImageChat) and first.folder == str(tmp_path / "coco") and first.images == ("image",)
    assert isinstance(second, ol.ImageChat) and second.images == ()
