"""Images: sizes and patches as Qwen-VL's processor makes them, resizing, augmentation, and the row of an ImageText."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from overlord.core.ragged import BAD_COLUMN, Ragged, RowBatch, offsets_of
from overlord.core.samples import BAD
from overlord.errors import SpecError
from overlord.job.sample_specs import Augment, ImageText, Interleaved, any_resize, image_grid, smart_resize
from overlord.transforms.samples import images, rgb
from overlord.transforms.samples.images import (
    ImageDecoder,
    ImageTextTransform,
    crop_boxes,
    decode_image,
    image_size,
    item_seeds,
    jpeg_divisor,
    normalize_patches,
    patchify_into,
)
from overlord.transforms.samples.per_sample import MediaFault
from overlord.transforms.samples.tokenize import TextTokenizer

transformers = pytest.importorskip("transformers")
qwen = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
load_image = pytest.importorskip("transformers.image_utils").load_image

FACTORS = st.sampled_from([(14, 2), (16, 1), (16, 2), (32, 1)])
SEEDS = st.integers(0, 2**64 - 1)


# -- pictures ----------------------------------------------------------------------------------


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Gradients, noise and shapes: what a photograph and a chart have."""
    rng = np.random.default_rng(seed)
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    planes = [np.sin(5 * x + 3 * y + c) * 90 + 120 + 0 * x for c in range(3)]
    pixels = np.stack(planes, axis=-1) + rng.normal(0, 12, (height, width, 3))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    draw.ellipse([width // 4, height // 4, 3 * width // 4, 3 * height // 4], fill=(200, 30, 90))
    draw.line([0, 0, width, height], fill=(255, 255, 255), width=2)
    return image


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def transparent(width: int, height: int) -> Image.Image:
    image = picture(width, height).convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, width).astype(np.uint8), (height, 1))))
    return image


def rotated_by_exif(width: int, height: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(picture(width, height), "JPEG", exif=exif)


ENCODED = {
    "jpeg": lambda: saved(picture(640, 427), "JPEG", quality=90),
    "jpeg 4:4:4": lambda: saved(picture(333, 251), "JPEG", quality=95, subsampling=0),
    "progressive": lambda: saved(picture(200, 301), "JPEG", progressive=True),
    "png": lambda: saved(picture(120, 95), "PNG"),
    "webp": lambda: saved(picture(150, 80), "WEBP"),
    "rgba": lambda: saved(transparent(90, 140), "PNG"),
    "grey": lambda: saved(picture(180, 77).convert("L"), "PNG"),
    "grey jpeg": lambda: saved(picture(181, 78).convert("L"), "JPEG"),
    "grey and alpha": lambda: saved(transparent(64, 64).convert("LA"), "PNG"),
    "palette": lambda: saved(picture(99, 101).convert("P"), "PNG"),
    "palette with a hole": lambda: saved(picture(99, 101).convert("P"), "PNG", transparency=3),
    "rgb jpeg": lambda: saved(picture(99, 55), "JPEG", keep_rgb=True),
    "cmyk": lambda: saved(picture(160, 90).convert("CMYK"), "JPEG"),
    "one bit": lambda: saved(picture(70, 70).convert("1"), "PNG"),
    "exif": lambda: rotated_by_exif(200, 100),
    "1 x 199": lambda: saved(picture(1, 199), "PNG"),
    "3000 x 20": lambda: saved(picture(3000, 20), "PNG"),
    "28 x 28": lambda: saved(picture(28, 28), "PNG"),
    "1 x 1": lambda: saved(picture(1, 1), "PNG"),
    "14 x 29": lambda: saved(picture(14, 29), "JPEG"),
    "large": lambda: saved(picture(1600, 1203), "JPEG"),
}


def decoded(spec: ImageText, data: bytes, seed: int = 0) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Return the patches of an image, through the same calls as in a run, and its grid."""
    width, height = image_size(data)
    if spec.augment is not None:
        width, height = crop_boxes(spec.augment, [width], [height], [seed])[0, 2:]
    rows, cols = image_grid(spec, [width], [height])
    grid = np.array([1, rows[0], cols[0]], np.int32)
    decoder = ImageDecoder(spec)
    out = np.full(int(decoder.item_bytes(grid[None])[0]), 77, np.uint8)
    decoder.decode(memoryview(data), grid, seed, out)
    return out.reshape(int(np.prod(grid)), -1), grid


# -- as Qwen-VL --------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(56 * 56, 28 * 28 * 1280), (200 * 200, 300 * 300), (4, 28 * 28 * 4)], ids=str)
@pytest.mark.parametrize("name", ENCODED)
def test_patches_are_those_of_the_qwen_processor(name: str, limits: tuple[int, int]) -> None:
    data = ENCODED[name]()
    processor = qwen.Qwen2VLImageProcessorPil(min_pixels=limits[0], max_pixels=limits[1])
    spec = ImageText(patch=14, merge=2, temporal=2, min_pixels=limits[0], max_pixels=limits[1])
    size = image_size(data)
    height, width = qwen.smart_resize(size[1], size[0], 28, *limits)
    patches, grid = decoded(spec, data)
    if height * width > limits[1]:  # the processor breaks its own limit there
        assert np.prod(grid) * 14 * 14 <= limits[1]
        return
    with Image.open(io.BytesIO(data)) as image:
        raw = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")
        finished = processor(image, return_tensors="np")
    assert finished["image_grid_thw"].tolist() == [grid.tolist()]
    assert patches.dtype == np.uint8
    np.testing.assert_array_equal(patches, raw["pixel_values"])
    floats = np.empty(patches.shape, np.float32)
    normalize_patches(patches, processor.image_mean, processor.image_std, processor.rescale_factor, floats)
    np.testing.assert_allclose(floats, finished["pixel_values"], rtol=0, atol=1e-5)


@given(
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    FACTORS,
    st.sampled_from([1, 64 * 64, 200_000]),
    st.sampled_from([64 * 64, 200_000, 1 << 20, 16384 * 784]),
)
def test_smart_resize_is_the_published_rule(width: int, height: int, cut: Any, least: int, most: int) -> None:
    factor = cut[0] * cut[1]
    least = min(least, most)
    rows, cols = smart_resize([width], [height], factor=factor, min_pixels=least, max_pixels=most)
    assert rows[0] * cols[0] * factor**2 <= most
    if max(width, height) / min(width, height) <= 200:
        wanted = qwen.smart_resize(height, width, factor, least, most)
        if wanted[0] * wanted[1] <= most:
            assert (rows[0] * factor, cols[0] * factor) == wanted


def test_smart_resize_of_many_ordinary_sizes_at_once() -> None:
    rng = np.random.default_rng(1)
    widths, heights = rng.integers(1, 5000, (2, 3000))
    limits = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    rows, cols = smart_resize(widths, heights, factor=28, **limits)
    compared = 0
    for width, height, row, col in zip(widths.tolist(), heights.tolist(), rows, cols, strict=True):
        if max(width, height) / min(width, height) <= 200:
            found = qwen.smart_resize(height, width, 28, **limits)
            assert (row * 28, col * 28) == found or found[0] * found[1] > limits["max_pixels"]
            compared += 1
    assert compared > 2900


def test_images_narrower_than_the_rule_allows_keep_their_old_sizes() -> None:
    """Digests of streams hang on these."""
    spec = ImageText(patch=16, merge=2, max_pixels=512 * 512)
    rows, cols = image_grid(spec, [10_000, 3, 50_000, 1], [2, 9000, 100, 40_000])
    assert (rows * 16).tolist() == [32, 8192, 32, 8192]
    assert (cols * 16).tolist() == [8192, 32, 8192, 32]


# -- the other ways of resizing ----------------------------------------------------------------


@given(st.integers(1, 30_000), st.integers(1, 30_000), FACTORS, st.sampled_from([64 * 64, 1 << 18, 1 << 24]))
def test_any_keeps_the_shape_and_never_enlarges(width: int, height: int, cut: Any, most: int) -> None:
    factor = cut[0] * cut[1]
    rows, cols = any_resize([width], [height], factor=factor, max_pixels=most)
    high, wide = int(rows[0]) * factor, int(cols[0]) * factor
    assert high >= factor and wide >= factor and high * wide <= most
    assert high <= max(height, factor) and wide <= max(width, factor)
    scale = min(1.0, math.sqrt(most / (width * height)))
    if min(height, width) * scale >= factor:  # no side is below one token: each loses less than one
        assert height * scale - high < factor * 1.0001 and width * scale - wide < factor * 1.0001


def test_any_gives_the_decoder_a_legal_grid() -> None:
    spec = ImageText(patch=16, merge=2, resize="any", max_pixels=300 * 300)
    patches, grid = decoded(spec, ENCODED["jpeg"]())
    assert grid.tolist() == [1, 14, 22] and patches.shape == (14 * 22, 3 * 16 * 16)
    assert spec.min_tokens == 1


def test_a_fixed_size_is_a_square() -> None:
    patches, grid = decoded(ImageText(patch=14, merge=2, size=224, temporal=3), ENCODED["png"]())
    assert grid.tolist() == [1, 16, 16] and patches.shape == (256, 3 * 3 * 14 * 14)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"resize": "any", "size": 224}, ["resize", "square", "Choose one"]),
        ({"resize": "navit"}, ["resize is 'navit'", "'smart' or 'any'"]),
        ({"temporal": 0}, ["temporal is 0", "at least 1"]),
        ({"before": ""}, ["before is ''", "or its id"]),
        ({"augment": {"crop": 0}}, ["crop", "keep nothing"]),
        ({"augment": {"flip": 2}}, ["flip is 2", "between 0 and 1"]),
        ({"augment": {"ratio": 0.5}}, ["ratio is 0.5", "at least 1"]),
        ({"augment": {"hue": 1}}, ["hue", "unknown key"]),
    ],
)
def test_wrong_fields_are_explained(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        ImageText(**fields)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


# -- patches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temporal", [1, 2, 3])
@pytest.mark.parametrize("side", [2, 7, 8, 9, 14, 16, 28])  # from 8 pixels on, lines are copied as words
def test_a_patch_row_is_channel_frame_y_x(side: int, temporal: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (4 * side, 6 * side, 3), dtype=np.uint8)
    out = np.empty((24, 3 * temporal * side**2), np.uint8)
    patchify_into(image, side, 2, out, temporal=temporal)
    rows = out.reshape(24, 3, temporal, side, side)
    order = [(r + dr, c + dc) for r in (0, 2) for c in (0, 2, 4) for dr in (0, 1) for dc in (0, 1)]
    for row, (y, x) in zip(rows, order, strict=True):
        for frame in range(temporal):
            patch = image[side * y : side * (y + 1), side * x : side * (x + 1)]
            np.testing.assert_array_equal(row[:, frame], patch.transpose(2, 0, 1))


@pytest.mark.parametrize("shape", [(0, 12), (5, 3), (7, 3 * 2 * 14 * 14)])
def test_normalized_patches_are_rounded_as_by_the_processor(shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    mean, std, rescale = [0.481, 0.457, 0.408], [0.268, 0.261, 0.275], 1 / 255
    out = np.empty(shape, np.float32)
    normalize_patches(rows, mean, std, rescale, out)
    scaled = (rows.astype(np.float64) * rescale).astype(np.float32).reshape(len(rows), 3, shape[1] // 3)
    wanted = (scaled - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
    np.testing.assert_array_equal(out, wanted.reshape(shape))


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"no image at all", ENCODED["jpeg"]()[:30], ENCODED["png"]()[:20]])
def test_a_broken_header_is_a_fault(data: bytes) -> None:
    with pytest.raises(MediaFault):
        image_size(data)


def test_a_cut_png_is_a_fault_when_decoded() -> None:
    data = ENCODED["png"]()[:-2000]
    assert image_size(data) == (120, 95)
    with pytest.raises(MediaFault, match="does not decode"):
        decode_image(data)


# -- augmentation ------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 9000), SEEDS), min_size=1, max_size=20),
    st.floats(0.01, 1),
    st.floats(1, 4),
)
def test_a_crop_lies_in_its_image_and_keeps_its_share(sizes: list[Any], crop: float, ratio: float) -> None:
    widths, heights, seeds = (np.array(column, np.uint64) for column in zip(*sizes, strict=True))
    augment = Augment(crop=crop, ratio=ratio)
    boxes = crop_boxes(augment, widths, heights, seeds)
    for (width, height, seed), (left, top, wide, high) in zip(sizes, boxes.tolist(), strict=True):
        assert left >= 0 and top >= 0 and wide >= 1 and high >= 1
        assert left + wide <= width and top + high <= height
        assert wide * high >= crop * width * height * (1 - 1e-9)
        if min(wide, high) > 50:  # else rounding to whole pixels weighs more than the limit
            change = (wide / high) / (width / height)
            assert 1 / ratio / 1.05 <= change <= ratio * 1.05
        # Alone or among others: a box depends on nothing but its own image.
        assert crop_boxes(augment, [width], [height], [seed]).tolist() == [[left, top, wide, high]]


def test_crops_are_spread_over_the_image() -> None:
    seeds = np.arange(4000, dtype=np.uint64)
    boxes = crop_boxes(Augment(crop=0.25), np.full(4000, 640), np.full(4000, 480), seeds)
    share = boxes[:, 2] * boxes[:, 3] / (640 * 480)
    assert 0.25 <= share.min() < 0.27 and 0.97 < share.max() <= 1 and abs(share.mean() - 0.625) < 0.02
    middle = boxes[:, 0] + boxes[:, 2] / 2
    assert abs(middle.mean() - 320) < 5 and middle.std() > 20
    assert len(np.unique(boxes[:, 1])) > 100


def test_the_same_boxes_on_every_machine() -> None:
    augment = Augment(crop=0.3, ratio=2)
    boxes = crop_boxes(augment, [640, 1000, 33], [480, 100, 900], np.array([1, 2, 2**64 - 1], np.uint64))
    assert boxes.tolist() == [[21, 253, 541, 212], [245, 1, 638, 71], [11, 111, 17, 782]]


@given(SEEDS, SEEDS)
def test_the_same_seed_gives_the_same_bytes_another_one_others(seed: int, other: int) -> None:
    spec = ImageText(patch=16, max_pixels=80 * 80, augment=Augment(flip=0.5, crop=0.3, brightness=0.4, contrast=0.4))
    first, grid = decoded(spec, SMALL, seed)
    again, again_grid = decoded(spec, SMALL, seed)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(grid, again_grid)
    if seed != other:
        changed, changed_grid = decoded(spec, SMALL, other)
        assert changed.shape != first.shape or (changed_grid != grid).any() or (changed != first).any()


SMALL = saved(picture(150, 110), "JPEG")


def test_what_each_change_does() -> None:
    plain, grid = decoded(ImageText(patch=16), SMALL)

    def picture_of(**changes: float) -> npt.NDArray[np.int64]:
        found, other = decoded(ImageText(patch=16, augment=Augment(**changes)), SMALL, seed=5)
        np.testing.assert_array_equal(other, grid)
        return found.astype(np.int64)

    def whole(patches: npt.NDArray[Any]) -> npt.NDArray[Any]:
        rows, cols = int(grid[1]), int(grid[2])
        return patches.reshape(rows, cols, 3, 16, 16).transpose(2, 0, 3, 1, 4).reshape(3, rows * 16, cols * 16)

    np.testing.assert_array_equal(picture_of(), plain)
    np.testing.assert_array_equal(whole(picture_of(flip=1)), whole(plain)[:, :, ::-1])
    light = picture_of(brightness=0.5)
    assert abs(light.mean() - plain.mean()) > 1
    assert np.corrcoef(light.ravel(), plain.ravel())[0, 1] > 0.95
    sharper = picture_of(contrast=0.5)
    assert abs(sharper.mean() - plain.mean()) < 8 and abs(sharper.std() - plain.std()) > 1


def test_flips_are_as_likely_as_asked() -> None:
    spec = ImageText(patch=8, size=8, augment=Augment(flip=0.25))
    data = saved(picture(8, 8), "PNG")
    plain, _ = decoded(ImageText(patch=8, size=8), data)
    flipped = sum((decoded(spec, data, seed)[0] != plain).any() for seed in range(1000))
    assert 200 <= flipped <= 300


def test_images_of_one_row_have_their_own_seeds() -> None:
    seeds = item_seeds(np.array([3, 3, 3, 4], np.uint64), np.array([0, 1, 2, 0]))
    assert len(np.unique(seeds)) == 4


# -- the row -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    words = ["<unk>", "<image>", "<start>", "<end>", *"abcdefgh"]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(words[:4])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return TextTokenizer(str(path))


class Here:
    """Runs everything in this thread."""

    def map(self, function: Any, items: Any) -> list[Any]:
        return [function(item) for item in items]


def rows_of(images: list[bytes], texts: list[str]) -> RowBatch:
    return {
        "jpg": Ragged.from_rows(images),
        "txt": Ragged.from_rows([text.encode() for text in texts]),
        BAD_COLUMN: np.zeros(len(images), np.bool_),
    }


@pytest.mark.parametrize("around", [{}, {"before": "<start>", "after": 3}, {"before": 2}, {"after": "<end>"}], ids=str)
def test_an_image_and_its_text_become_one_sequence(around: dict[str, Any], tokenizer: TextTokenizer) -> None:
    spec = ImageText(patch=16, merge=2, min_pixels=32 * 32, augment=Augment(crop=0.5), **around)
    made = ImageTextTransform(spec, tokenizer)
    images = [saved(picture(100, 70), "PNG"), b"broken", saved(picture(40, 200), "JPEG")]
    seeds = np.array([1, 2, 3], np.uint64)
    measured = made.measure(rows_of(images, ["a b c", "d e", "f"]), None, seeds)
    assert (measured.flags & BAD > 0).tolist() == [False, True, False]
    assert [row for row, _ in measured.faults] == [1]
    finished = made.finish(measured.kept, measured.tokens, measured.flags & BAD > 0, Here())
    lead, tail = ([2] if "before" in around else []), ([3] if "after" in around else [])
    media = finished.media
    assert media is not None
    for row, words in enumerate([[4, 5, 6], [7, 8], [9]]):
        count = int(measured.image_tokens[row])
        if row == 1:
            assert count == 1 and media.grids[1].tolist() == [1, 2, 2]
        wanted = lead + [1] * count + tail
        assert finished.tokens[row].tolist() == wanted + (words if row != 1 else finished.tokens[1].tolist()[-2:])
        assert finished.loss[row].tolist() == [0] * len(wanted) + [int(row != 1)] * len(words)
        assert (media.start[row], media.length[row]) == (len(lead), count)
        assert measured.front is not None and measured.front[row] == len(wanted)
    for item in (0, 2):  # what was promised from the header and the seed is what is delivered
        grid = media.grids[item]
        assert np.prod(grid) // 4 == media.length[item]
        patches, same = decoded(spec, images[item], int(media.seeds[item]))
        assert same.tolist() == grid.tolist() and len(patches) == np.prod(grid)


def test_a_plan_that_ends_early_leaves_out_the_text(tokenizer: TextTokenizer) -> None:
    spec = ImageText(patch=16, min_pixels=1, before="<start>", after="<end>")
    made = ImageTextTransform(spec, tokenizer)
    measured = made.measure(
        rows_of([saved(picture(32, 32), "PNG")] * 3, ["a b"] * 3), None, np.arange(3, dtype=np.uint64)
    )
    assert measured.tokens.tolist() == [8, 8, 8]
    finished = made.finish(measured.kept, np.array([7, 5, 1]), np.zeros(3, np.bool_), Here())
    assert [finished.tokens[row].tolist() for row in range(3)] == [[2, 1, 1, 1, 1, 3, 4], [2, 1, 1, 1, 1], [2]]
    assert finished.media is not None and np.diff(finished.media.rows).tolist() == [1, 1, 0]
    assert finished.loss.values.sum() == 1
    assert finished.tokens.offsets.tolist() == offsets_of([7, 5, 1]).tolist()


# -- hostile bytes -----------------------------------------------------------------------------


def test_formats_that_are_not_on_the_list_are_never_opened(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pillow decodes EPS by running `gs` with the bytes of the image.
    ran = tmp_path / "ran"
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for form in ("EPS", "PPM", "DDS", "SGI"):
        data = saved(picture(20, 30), form)
        with pytest.raises(MediaFault, match="allowed format"):
            image_size(data)
        with pytest.raises(MediaFault, match="allowed format"):
            decode_image(data)
    assert not ran.exists()


def test_a_spec_may_add_formats_but_none_that_starts_a_program() -> None:
    spec = ImageText(extra_formats=["jpeg2000", "PNG"])
    assert spec.extra_formats == ("JPEG2000",)
    assert ImageText(**spec.model_dump()) == spec
    assert "extra_formats" not in ImageText().model_dump(), "states of jobs without it must still fit"
    ImageDecoder(spec)
    assert image_size(saved(picture(20, 30), "JPEG2000"), spec.formats) == (20, 30)
    with pytest.raises(SpecError, match="Ghostscript"):
        ImageText(extra_formats=["EPS"])
    with pytest.raises(SpecError, match="list of names"):
        ImageText(extra_formats="JPEG2000")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="Pillow has no format 'HEIC'"):
        ImageDecoder(ImageText(extra_formats=["HEIC"]))


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, IndexError, EOFError, SystemError])
def test_whatever_a_decoder_raises_is_a_fault(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(MediaFault, match="does not decode"):
        decode_image(ENCODED["webp"]())


def test_memory_is_a_fault_only_while_the_host_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(MediaFault, match="more memory"):
        decode_image(ENCODED["webp"]())
    monkeypatch.setattr(np, "empty", fail)
    with pytest.raises(MemoryError):
        decode_image(ENCODED["webp"]())


# -- turned as EXIF says -------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turn", range(10))
def test_images_are_turned_as_load_image_turns_them(form: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = saved(picture(200, 120), form, exif=exif)
    expected = np.asarray(load_image(Image.open(io.BytesIO(data))))
    assert image_size(data, upright=True) == expected.shape[1::-1]
    np.testing.assert_array_equal(decode_image(data, upright=True), expected)
    spec = ImageText(patch=14, merge=2, temporal=2, min_pixels=56 * 56, max_pixels=28 * 28 * 100, exif_transpose=True)
    width, height = image_size(data, upright=True)
    rows, cols = image_grid(spec, [width], [height])
    grid = np.array([1, rows[0], cols[0]], np.int32)
    out = np.empty(int(ImageDecoder(spec).item_bytes(grid[None])[0]), np.uint8)
    ImageDecoder(spec).decode(memoryview(data), grid, 0, out)
    processor = qwen.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 100)
    raw = processor(Image.fromarray(expected), do_rescale=False, do_normalize=False, return_tensors="np")
    assert raw["image_grid_thw"].tolist() == [grid.tolist()]
    np.testing.assert_array_equal(out.reshape(raw["pixel_values"].shape), raw["pixel_values"].astype(np.uint8))


def test_an_orientation_that_cannot_be_read_turns_nothing() -> None:
    good = rotated_by_exif(60, 40)
    at = good.index(b"Exif") + 6
    for noise in (b"\xff" * 8, b"MM\x00*\xff\xff\xff\xff", b"II*\x00\x08\x00\x00\x00\xff\xff"):
        data = good[:at] + noise + good[at + len(noise) :]
        assert decode_image(data, upright=True).shape == (*image_size(data, upright=True)[::-1], 3)


def test_turning_is_part_of_the_fingerprint_only_where_it_is_set() -> None:
    assert "exif_transpose" not in ImageText().model_dump_json() and "jpeg_scaling" not in ImageText().model_dump_json()
    assert ImageText(exif_transpose=True).model_dump()["exif_transpose"] is True
    assert Interleaved(exif_transpose=True).replace(patch=14).exif_transpose
    with pytest.raises(SpecError, match=r"exif_transpose.*'w' and 'h' do not tell which images are turned"):
        ImageText(width="w", height="h", exif_transpose=True)


# -- JPEG decoded at a smaller scale ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("size", [(512, 384), (1023, 517), (64, 900)])
@pytest.mark.parametrize("divisor", [2, 4, 8])
def test_both_decoders_scale_a_jpeg_alike(monkeypatch, size, divisor, mode):
    data = jpeg_of(size, mode)
    found = decode_image(data, divisor=divisor)
    assert found.shape == (-(-size[1] // divisor), -(-size[0] // divisor), 3)
    monkeypatch.setattr(images, "simplejpeg", None)
    assert np.array_equal(decode_image(data, divisor=divisor), found)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 600), st.integers(1, 600))
def test_a_scaled_jpeg_is_never_smaller_than_it_is_to_become(width, height, wide, high):
    by = jpeg_divisor(b"\xff\xd8", width, height, wide, high)
    assert by == 1 or (-(-width // by) >= wide and -(-height // by) >= high)


@pytest.mark.parametrize("augment", [None, Augment(crop=0.3, flip=0.5)], ids=["plain", "cropped"])
@pytest.mark.parametrize("size", [(1200, 1200), (2047, 1517), (200, 200)])
def test_scaling_gives_nearly_the_same_picture(size, augment):
    data, grid = memoryview(jpeg_of(size, "RGB")), np.array([1, 14, 14], np.int32)
    made = []
    for scaling in (False, True):
        decoder = ImageDecoder(ImageText(size=224, augment=augment, jpeg_scaling=scaling))
        made.append(np.empty(int(decoder.item_bytes(grid[None])[0]), np.uint8))
        decoder.decode(data, grid, 11, made[-1])
    apart = np.abs(made[0].astype(np.int64) - made[1])
    if size == (200, 200):
        assert not apart.any(), "one that becomes larger is decoded whole"
    else:
        assert 0 < apart.mean() < 4
        assert np.corrcoef(made[0], made[1])[0, 1] > 0.99


def test_other_formats_are_not_scaled():
    out = io.BytesIO()
    Image.new("RGB", (512, 512), (200, 30, 30)).save(out, "PNG")
    decoder, plain = ImageDecoder(ImageText(size=64, jpeg_scaling=True)), ImageDecoder(ImageText(size=64))
    grid, found = np.array([1, 4, 4], np.int32), [np.empty(64 * 64 * 3, np.uint8) for _ in range(2)]
    for one, place in zip((decoder, plain), found, strict=True):
        one.decode(memoryview(out.getvalue()), grid, 0, place)
    assert np.array_equal(*found)


def jpeg_of(size: tuple[int, int], mode: str) -> bytes:
    """A smooth picture, as photos are: noise would differ more between scales."""
    x, y = np.meshgrid(np.linspace(0, 9, size[0]), np.linspace(0, 7, size[1]))
    picture = np.stack([np.sin(x + y), np.cos(x * 0.7), np.sin(y * 1.3 - x)], axis=2)
    out = io.BytesIO()
    Image.fromarray(((picture + 1) * 127).astype(np.uint8)).convert(mode).save(out, "JPEG", quality=90)
    return out.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA", "L with a colour that is transparent", "RGB with one"])
def test_transparent_images_are_composited_on_white_as_pillow_does(mode):
    values = np.arange(256 * 256, dtype=np.uint32)
    grey, alpha = (values % 256).astype(np.uint8).reshape(256, 256), (values // 256).astype(np.uint8).reshape(256, 256)
    both = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)])
    image, options = both.convert("RGBA"), {}
    if mode == "LA":
        image = both
    elif mode == "P":
        image, options = picture(99, 101).convert("P"), {"transparency": bytes(range(0, 256, 2))}
    elif mode == "PA":
        image = both.convert("PA")
    elif mode.startswith("L "):
        image, options = Image.fromarray(grey), {"transparency": 7}
    elif mode.startswith("RGB "):
        image, options = picture(60, 40), {"transparency": picture(60, 40).getpixel((3, 3))}
    with Image.open(io.BytesIO(saved(image, "TIFF" if mode == "PA" else "PNG", **options))) as stored:
        white = Image.new("RGBA", stored.size, (255, 255, 255, 255))
        expected = np.asarray(Image.alpha_composite(white, stored.convert("RGBA")).convert("RGB"))
        found = rgb._on_white(stored)
    assert np.array_equal(found, expected)
