"""Interleaved: rows of texts and images, from real files, against a plain row-by-row reading of the rules."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import ipc
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import overlord as ol
from overlord.core.ragged import (
    BAD_COLUMN,
    Ragged,
    RowBatch,
    concat_rows,
    num_rows,
    offsets_of,
    sizes_column,
    take_rows,
)
from overlord.core.samples import BAD, SKIP
from overlord.errors import SpecError
from overlord.job.sample_specs import Augment, Interleaved, Text, image_tokens
from overlord.job.specs import Source
from overlord.readers.index import IndexCache
from overlord.readers.source_files import SourceFiles
from overlord.transforms.samples.images import InterleavedTransform, RowFault, split_parts
from overlord.transforms.samples.per_sample import Finished, Measured, count_loss_tokens
from overlord.transforms.samples.tokenize import TextTokenizer

WORDS = ["<unk>", "<image>", "<start>", "<end>", "<s>", "</s>", *"abcdefgh"]
IDS = {word: number for number, word in enumerate(WORDS)}
SIZES = [(32, 32), (64, 48), (100, 30), (16, 90), (200, 130)]
HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(size: tuple[int, int], seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


IMAGES = [png(size, number) for number, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Tokenizer(WordLevel(IDS, "<unk>"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(WORDS[:6])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(word, IDS[word]) for word in ("<s>", "</s>")]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_file: Path) -> TextTokenizer:
    return TextTokenizer(str(tokenizer_file))


class Here:
    """Runs everything in this thread."""

    def map(self, function: Any, items: Any) -> list[Any]:
        return [function(item) for item in items]


def rows_of(texts: list[str], images: list[list[bytes]], column: str = "text") -> RowBatch:
    """Rows as a reader gives them."""
    return {
        column: Ragged.from_rows([text.encode() for text in texts]),
        "images": Ragged.from_rows([b"".join(row) for row in images]),
        sizes_column("images"): Ragged.from_rows([np.array([len(i) for i in row]) for row in images], np.int64),
        BAD_COLUMN: np.zeros(len(texts), np.bool_),
    }


def read(path: Path, spec: Interleaved, tokenizer: TextTokenizer) -> RowBatch:
    """Read all rows of a file in small batches, as a SourceLoader does."""
    files = SourceFiles(
        "s", [str(path)], cache=IndexCache(path.parent / "cache"), columns=InterleavedTransform(spec, tokenizer).columns
    )
    blocks = range(len(files.blocks(0).rows))
    return concat_rows([batch for block in blocks for batch in files.stream(0, block, batch_rows=2)])


def run(spec: Interleaved, tokenizer: TextTokenizer, rows: RowBatch) -> tuple[Measured, Finished]:
    made = InterleavedTransform(spec, tokenizer)
    measured = made.measure(rows, None, np.arange(num_rows(rows), dtype=np.uint64))
    return measured, made.finish(measured.kept, measured.tokens, measured.flags & BAD > 0, Here())


def shown(finished: Finished, row: int) -> list[bytes]:
    """Return the encoded images that a row shows."""
    assert finished.media is not None
    first, last = finished.media.rows[row : row + 2]
    return [bytes(finished.media.data(item)) for item in range(first, last)]


Piece = str | int
"""A run of text, or the number of an image in its row."""


def by_hand(pieces: list[Piece], images: list[bytes], spec: Interleaved) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, loss and the first placeholder of each image of one row, piece by piece."""
    tokens = [IDS["<s>"]] * spec.special_tokens
    loss, starts = [1] * len(tokens), []
    for piece in pieces:
        if isinstance(piece, str):
            words = [IDS[word] for word in piece.split()]
            tokens, loss = tokens + words, loss + [1] * len(words)
            continue
        with Image.open(io.BytesIO(images[piece])) as image:
            count = int(image_tokens(spec, [image.width], [image.height])[0])
        block = [IDS[str(token)] for token in (spec.before,) if token is not None]
        starts.append(len(tokens) + len(block))
        block += [IDS["<image>"]] * count + [IDS[str(token)] for token in (spec.after,) if token is not None]
        tokens, loss = tokens + block, loss + [0] * len(block)
    if spec.special_tokens:
        tokens, loss = [*tokens, IDS["</s>"]], [*loss, 1]
    return tokens, loss, starts


texts = st.lists(st.sampled_from("abcdefgh"), max_size=4).map(" ".join)
documents = st.lists(st.lists(texts | st.integers(0, len(IMAGES) - 1), max_size=6), min_size=1, max_size=6)
specs = st.builds(
    Interleaved,
    patch=st.just(16),
    merge=st.sampled_from([1, 2]),
    min_pixels=st.just(32 * 32),
    special_tokens=st.booleans(),
    before=st.sampled_from([None, "<start>"]),
    after=st.sampled_from([None, "<end>"]),
)


@given(documents, specs)
def test_texts_with_markers_are_put_together_as_by_hand(
    tokenizer: TextTokenizer, rows: list[list[Piece]], spec: Interleaved
) -> None:
    marked = [" ".join("<image>" if isinstance(piece, int) else piece for piece in row) for row in rows]
    images = [[IMAGES[piece] for piece in row if isinstance(piece, int)] for row in rows]
    measured, finished = run(spec, tokenizer, rows_of(marked, images))
    assert measured.faults == []
    for row, pieces in enumerate(rows):
        numbered = iter(range(len(pieces)))
        tokens, loss, starts = by_hand(
            [next(numbered) if isinstance(piece, int) else piece for piece in pieces], images[row], spec
        )
        assert measured.tokens[row] == max(len(tokens), 1) and bool(measured.flags[row] & SKIP) == (not tokens)
        if not tokens:
            continue
        assert finished.tokens[row].tolist() == tokens and finished.loss[row].tolist() == loss
        assert measured.images[row] == len(starts) and measured.image_tokens[row] == tokens.count(IDS["<image>"])
        assert shown(finished, row) == images[row]
        media = finished.media
        assert media is not None
        assert media.start[media.rows[row] : media.rows[row + 1]].tolist() == starts
    counted, _ = count_loss_tokens(
        measured, measured.tokens, np.arange(len(rows)), np.zeros(len(rows), np.int64)
    )  # every row is one piece; its first token predicts nothing
    wanted = [int(finished.loss[row][1:].sum()) for row in range(len(rows))]
    assert counted.tolist() == wanted


@given(documents, specs)
def test_parts_name_their_images_in_any_order(
    tokenizer: TextTokenizer, rows: list[list[Piece]], spec: Interleaved
) -> None:
    spec = spec.replace(parts="content")
    content = [
        json.dumps([{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in row])
        for row in rows
    ]
    # Without an image among the parts, all images of the row would have to be shown.
    images = [IMAGES if any(isinstance(p, int) for p in row) else [] for row in rows]
    measured, finished = run(spec, tokenizer, rows_of(content, images, "content"))
    assert measured.faults == []
    for row, pieces in enumerate(rows):
        joined: list[Piece] = []
        for piece in pieces:  # texts that follow one another are one run: "a" and "b" are the word "ab"
            if isinstance(piece, str) and joined and isinstance(joined[-1], str):
                joined[-1] += piece
            else:
                joined.append(piece)
        known = [" ".join(w if w in IDS else "<unk>" for w in p.split()) if isinstance(p, str) else p for p in joined]
        tokens, loss, _ = by_hand(known, images[row], spec)
        if tokens:
            assert finished.tokens[row].tolist() == tokens and finished.loss[row].tolist() == loss
            assert shown(finished, row) == [IMAGES[p] for p in pieces if isinstance(p, int)]


def test_rows_may_be_taken_and_joined_between_measuring_and_finishing(tokenizer: TextTokenizer) -> None:
    spec = Interleaved(patch=16, before="<start>")
    made = InterleavedTransform(spec, tokenizer)
    rows = rows_of(["a <image> b <image>", "c", "<image> d"], [IMAGES[:2], [], [IMAGES[2]]])
    measured = made.measure(rows, None, np.arange(3, dtype=np.uint64))
    order = np.array([2, 0, 1, 0])
    taken = concat_rows([take_rows(measured.kept, order[:2]), take_rows(measured.kept, order[2:])])
    finished = made.finish(taken, measured.tokens[order], np.zeros(4, np.bool_), Here())
    assert [shown(finished, row) for row in range(4)] == [[IMAGES[2]], IMAGES[:2], [], IMAGES[:2]]
    assert finished.media is not None
    assert finished.media.seeds[1] == finished.media.seeds[3] != finished.media.seeds[2]
    assert finished.tokens[2].tolist() == [IDS["<s>"], IDS["c"], IDS["</s>"]]


def test_a_plan_that_ends_early_leaves_out_what_follows(tokenizer: TextTokenizer) -> None:
    spec = Interleaved(patch=16, min_pixels=1, special_tokens=False)
    rows = rows_of(["a <image> b <image> c"] * 3, [[IMAGES[0], IMAGES[0]]] * 3)  # 1 4 1 4 1 tokens
    made = InterleavedTransform(spec, tokenizer)
    measured = made.measure(rows, None, np.arange(3, dtype=np.uint64))
    assert measured.tokens.tolist() == [11] * 3
    bad = np.array([False, False, True])
    finished = made.finish(measured.kept, np.array([10, 6, 11]), bad, Here())
    assert finished.tokens.offsets.tolist() == offsets_of([10, 6, 11]).tolist()
    assert finished.media is not None and np.diff(finished.media.rows).tolist() == [2, 1, 2]
    assert [int(finished.loss[row].sum()) for row in range(3)] == [2, 2, 0]
    assert finished.media.bad.tolist() == [False, False, False, True, True]
    assert measured.kept["loss"].values.sum() == 9  # type: ignore[union-attr]


def test_bad_rows_become_stand_ins_with_one_reason_each(tokenizer: TextTokenizer) -> None:
    spec = Interleaved(patch=16, merge=2)
    rows = rows_of(
        ["a <image> b", "<image> <image>", "<image> c <image> <image>", "<image>", "", "d"],
        [[], [IMAGES[0]], [IMAGES[0], b"broken", b""], [b""], [], []],
    )
    rows[BAD_COLUMN] = np.array([False, False, False, False, False, True])
    measured, finished = run(spec, tokenizer, rows)
    assert (measured.flags & BAD > 0).tolist() == [True, True, True, True, False, True]
    reasons = dict(measured.faults)
    assert list(reasons) == [0, 1, 2, 3, 5]
    assert reasons[0] == "the text has 1 markers '<image>', the row 0 images"
    assert "2 markers" in reasons[1] and reasons[2].startswith("image 1: ") and reasons[3].startswith("image 0: ")
    assert measured.images.tolist() == [0, 0, 3, 1, 0, 0] and measured.tokens[[0, 1, 5]].tolist() == [1, 1, 1]
    assert finished.media is not None
    # The whole image keeps its grid, the broken ones have that of one token; all of them are zeros once decoded.
    assert finished.media.grids.tolist() == [[1, 4, 4], [1, 2, 2], [1, 2, 2], [1, 2, 2]]
    assert finished.media.bad.all() and int(finished.loss.values.sum()) == 2  # begin and end of the empty text
    assert finished.tokens[2].tolist() == [4, 1, 1, 1, 1, IDS["c"], 1, 1, 5]


def test_a_row_of_nothing_is_left_out(tokenizer: TextTokenizer) -> None:
    measured, _ = run(Interleaved(special_tokens=False), tokenizer, rows_of(["", "  ", "a"], [[], [], []]))
    assert measured.flags.tolist() == [SKIP, SKIP, 0] and measured.tokens.tolist() == [1, 1, 1]
    assert measured.faults == []
    nothing, _ = run(Interleaved(), tokenizer, rows_of([], []))
    assert len(nothing.tokens) == 0


def test_text_that_is_no_utf8_is_a_fault(tokenizer: TextTokenizer) -> None:
    rows = rows_of(["a", "b"], [[], []])
    rows["text"] = Ragged.from_rows([b"\xff\xfe", b"b"])
    measured, _ = run(Interleaved(), tokenizer, rows)
    assert measured.faults == [(0, "the text is not valid UTF-8")] and measured.flags.tolist() == [BAD, 0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{oops", "no JSON"),
        ('{"type": "text"}', "no list but dict"),
        ('["a"]', "part 0 is neither"),
        ('[{"type": "text", "text": 3}]', "part 0 is neither"),
        ('[{"type": "image", "image": 2}]', "wants image 2, the row has 2 images"),
        ('[{"type": "image", "image": -1}]', "wants image -1"),
        ('[{"type": "image", "image": true}]', "wants image True"),
        ('[{"type": "image", "image": "c.jpg"}]', "wants image 'c.jpg'"),
        ('[{"type": "image"}]', "1 parts that are images, the row has 2"),
        ('[{"type": "image"}, {"type": "image"}, {"type": "image"}]', "wants image 2"),
        ("[]", "0 parts that are images, the row has 2"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_parts_that_make_no_sense(text: str, reason: str) -> None:
    with pytest.raises(RowFault, match=reason):
        split_parts(text, ["a.jpg", "b.jpg"], [1, 1])


def test_parts_in_order_by_number_and_by_name() -> None:
    parts = [
        {"type": "image", "text": None},
        {"type": "text", "text": "x", "image": None},
        {"type": "text", "text": "y"},
        {"type": "image"},
    ]
    assert split_parts(json.dumps(parts), ["i"], [2]) == (["", "xy", ""], [0, 1])
    named = [{"type": "image", "image": "b"}, {"type": "image", "image": "a"}, {"type": "image", "image": 1}]
    assert split_parts(json.dumps(named), ["a", "b"], [2, 1]) == (["", "", "", ""], [2, 0, 1])


# -- from files --------------------------------------------------------------------------------


DOCUMENTS = ["a <image> b", "c", "<image><image> d <image>", "<image>", "e <image> <image>"]
SHOWN = [[0], [], [1, 2, 3], [4], [0, 2]]


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        *((kind, file) for kind in ("binary", "large", "hugging face", "fixed") for file in ("x.parquet", "x.arrow")),
        ("view", "x.arrow"),
    ],
)
def test_a_column_with_a_list_of_images(kind: str, file: str, tmp_path: Path, tokenizer: TextTokenizer) -> None:
    texts, numbers = (DOCUMENTS, SHOWN) if kind != "fixed" else (["<image> a <image>"] * 3, [[0, 1], [2, 3], [4, 4]])
    images: list[Any] = [[IMAGES[n] for n in row] for row in numbers]
    types = {
        "binary": pa.list_(pa.binary()),
        "large": pa.large_list(pa.large_binary()),
        "hugging face": pa.list_(HF_IMAGE),
        "fixed": pa.list_(pa.binary(), 2),
        "view": pa.list_(pa.binary_view()),
    }
    values = [[{"bytes": i, "path": f"{n}.png"} for n, i in enumerate(row)] for row in images]
    table = pa.table({"text": texts, "images": pa.array(values if kind == "hugging face" else images, types[kind])})
    if file == "x.parquet":
        pq.write_table(table, tmp_path / file, row_group_size=3)
    else:
        with ipc.new_file(tmp_path / file, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    spec = Interleaved("images", "text", patch=16, before="<start>", after="<end>")
    measured, finished = run(spec, tokenizer, read(tmp_path / file, spec, tokenizer))
    assert measured.faults == [] and measured.images.tolist() == [len(row) for row in numbers]
    assert [shown(finished, row) for row in range(len(texts))] == images


def test_a_null_in_a_list_of_images_is_a_bad_row(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    images = pa.array([[IMAGES[0]], None, [IMAGES[1], None], [], [IMAGES[2]]], pa.list_(pa.binary()))
    table = pa.table({"text": ["<image>", "", "<image><image>", "a", "b <image>"], "images": images})
    pq.write_table(table, tmp_path / "x.parquet")
    spec = Interleaved(patch=16)
    measured, finished = run(spec, tokenizer, read(tmp_path / "x.parquet", spec, tokenizer))
    assert (measured.flags & BAD > 0).tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]  # no list is no image, and no fault
    assert shown(finished, 0) + shown(finished, 4) == [IMAGES[0], IMAGES[2]]


def write_tar(path: Path, samples: list[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, members in enumerate(samples):
            for extension, payload in members.items():
                info = tarfile.TarInfo(f"{number:04}.{extension}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))


def test_members_of_a_tar_shard_by_name(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    write_tar(
        tmp_path / "x.tar",
        [
            {"0.png": IMAGES[0], "txt": b"a <image> <image>", "1.png": IMAGES[1]},
            {"0.png": IMAGES[2], "1.png": IMAGES[3], "txt": b"<image> b <image>"},
            {"0.png": IMAGES[2], "txt": b"<image>"},
        ],
    )
    spec = Interleaved(["1.png", "0.png"], "txt", patch=16)
    measured, finished = run(spec, tokenizer, read(tmp_path / "x.tar", spec, tokenizer))
    assert [shown(finished, row) for row in range(2)] == [[IMAGES[1], IMAGES[0]], [IMAGES[3], IMAGES[2]]]
    assert [row for row, _ in measured.faults] == [2]  # a member that was named is missing


def test_all_members_of_a_tar_shard_that_look_alike(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    content = [{"type": "image", "image": 1}, {"type": "text", "text": "a"}, {"type": "image", "image": 0}]
    write_tar(
        tmp_path / "x.tar",
        [
            {"0.png": IMAGES[0], "1.PNG": IMAGES[1], "json": json.dumps({"content": content}).encode()},
            {"json": b'{"content": [{"type": "text", "text": "b"}]}'},
            {"json": b'{"content": [{"type": "image"}]}', "b.png": IMAGES[4], "jpg": b"not asked for"},
        ],
    )
    spec = Interleaved("*.png", parts="json.content", patch=16)
    measured, finished = run(spec, tokenizer, read(tmp_path / "x.tar", spec, tokenizer))
    assert measured.faults == []
    assert [shown(finished, row) for row in range(3)] == [[IMAGES[1], IMAGES[0]], [], [IMAGES[4]]]


def test_parts_as_structs_of_a_parquet_file(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    kind = pa.list_(pa.struct([("type", pa.string()), ("text", pa.string()), ("image", pa.int64())]))
    content = [
        [{"type": "image", "image": 1}, {"type": "text", "text": "a"}],
        [{"type": "text", "text": "b"}, {"type": "image"}, {"type": "image"}],
    ]
    table = {"content": pa.array(content, kind), "images": pa.array([IMAGES[:2]] * 2, pa.list_(pa.binary()))}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    spec = Interleaved(parts="content", patch=16)
    measured, finished = run(spec, tokenizer, read(tmp_path / "x.parquet", spec, tokenizer))
    assert measured.faults == [] and [shown(finished, row) for row in range(2)] == [[IMAGES[1]], IMAGES[:2]]


# -- promises ----------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(0, 2**64 - 1), st.floats(0.1, 1))
def test_cropped_images_have_the_promised_patches(tokenizer: TextTokenizer, seed: int, crop: float) -> None:
    spec = Interleaved(patch=16, merge=2, temporal=2, augment=Augment(crop=crop, flip=0.5))
    made = InterleavedTransform(spec, tokenizer)
    rows = rows_of(["<image> a <image>", "<image>"], [[IMAGES[4], IMAGES[4]], [IMAGES[1]]])
    measured = made.measure(rows, None, np.array([seed, seed], np.uint64))
    finished = made.finish(measured.kept, measured.tokens, np.zeros(2, np.bool_), Here())
    media = finished.media
    assert media is not None and len(np.unique(media.seeds)) == 2  # the first images of both rows draw alike
    sizes = made.decoder.item_bytes(media.grids)
    assert (sizes == 4 * media.length * 3 * 2 * 16**2).all()
    for item, size in enumerate(sizes.tolist()):
        out = np.empty(size, np.uint8)
        made.decoder.decode(media.data(item), media.grids[item], int(media.seeds[item]), out)


def test_a_tokenizer_that_lacks_the_tokens_is_told(tokenizer: TextTokenizer) -> None:
    with pytest.raises(SpecError, match=r"'<\|vision_start\|>' is not in the vocabulary"):
        InterleavedTransform(Interleaved(before="<|vision_start|>"), tokenizer)


def test_a_stream_of_texts_and_images(tmp_path: Path, tokenizer_file: Path) -> None:
    count = 40
    images = [[IMAGES[n] for n in SHOWN[row % 5]] for row in range(count)]
    images[5] = [b"broken"]
    table = {"text": [DOCUMENTS[row % 5] for row in range(count)], "images": pa.array(images, pa.list_(pa.binary()))}
    pq.write_table(pa.table(table), tmp_path / "x.parquet", row_group_size=7)
    sample = ol.Interleaved(patch=16, merge=2, temporal=2, before="<start>", augment=ol.Augment(crop=0.5, flip=0.5))
    source = ol.Source("d", str(tmp_path / "x.parquet"), sample=sample, tolerance=1, shuffle_bytes=1 << 16)
    job = ol.Job([source], tokenizer=str(tokenizer_file), batch=ol.Batch(256, global_samples=10), max_steps=4)
    with ol.launch(job, runtime="inline", cache=str(tmp_path / "cache")) as service:
        seen = 0
        for step in service.client():
            for batch in step.microbatches:
                pixels, grids = batch["pixel_values"], batch["image_grid_thw"]
                placeholders = int((batch["input_ids"] == IDS["<image>"]).sum())
                assert placeholders * 4 == len(pixels) == int(grids.prod(axis=1).sum())
                assert pixels.shape[1] == 3 * 2 * 16 * 16
                assert (batch["input_ids"] == IDS["<start>"]).sum() == len(grids)
                assert not np.isin(batch["labels"], [IDS["<image>"], IDS["<start>"]]).any()
                seen += len(grids)
    assert seen == sum(map(len, images))


# -- the spec ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"kind": "interleaved", "images": "pics"}, Interleaved("pics")),
        ({"images": ["0.jpg", "1.jpg"], "text": "txt"}, Interleaved(["0.jpg", "1.jpg"], "txt")),
        ({"parts": "content", "patch": 14, "merge": 2}, Interleaved(parts="content", patch=14, merge=2)),
        ({"interleaved": "pics"}, Interleaved("pics")),
        ({"interleaved": {"augment": {"flip": 0.5}}}, Interleaved(augment=Augment(flip=0.5))),
        ({"text": "body"}, Text("body")),
    ],
)
def test_a_file_says_it_in_few_words(given: dict[str, Any], wanted: Any) -> None:
    source = Source("s", "x", sample=given)
    assert source.sample == wanted
    assert Source.model_validate(source.model_dump(mode="json")) == source


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"images": []}, ["images is []", "no images"]),
        ({"images": ["a", "a"]}, ["'a' is listed twice"]),
        ({"parts": "content", "text": "body"}, ["parts", "would be ignored"]),
        ({"marker": ""}, ["marker is ''", "must not be empty"]),
    ],
)
def test_wrong_fields_are_explained(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        Interleaved(**fields)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
