"""PNGs are decoded to the bytes that Pillow gives, and refused where Pillow refuses them."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from overlord.transforms.samples import rgb
from overlord.transforms.samples.images import decode_image
from overlord.transforms.samples.per_sample import MediaFault

UInt8s = npt.NDArray[np.uint8]
KINDS = {"L": (0, 1), "RGB": (2, 3), "P": (3, 1), "LA": (4, 2), "RGBA": (6, 4)}
"""Colour type and channels in a file, by Pillow's mode."""
FEW, MANY = 400, 20_000
COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.nightly)]


# -- files as a test wants them -------------------------------------------------------------------


def chunk(name: bytes, data: bytes = b"", checksum: int = 0) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data) ^ checksum)


def header(mode: str, width: int, height: int, *, depth: int = 8, interlace: int = 0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, KINDS[mode][0], 0, 0, interlace))


def palette(seed: int = 0, colours: int = 256) -> bytes:
    return chunk(b"PLTE", random.Random(seed).randbytes(3 * colours))


def rows_of(mode: str, width: int, height: int, seed: int = 0, filters: str = "01234") -> bytes:
    """Rows of any bytes, each with a filter: whatever they say is a picture."""
    rng = random.Random(seed)
    return b"".join(bytes([int(rng.choice(filters))]) + rng.randbytes(width * KINDS[mode][1]) for _ in range(height))


def png(mode: str = "RGB", width: int = 9, height: int = 7, *, before: bytes = b"", packed: bytes | None = None,
        parts: int = 1, after: bytes = b"", end: bytes = chunk(b"IEND"), **rows: int | str) -> bytes:  # fmt: skip
    """A file with its pixels in several chunks."""
    packed = zlib.compress(rows_of(mode, width, height, **rows)) if packed is None else packed  # type: ignore[arg-type]
    size = max(-(-len(packed) // parts), 1)
    pixels = b"".join(chunk(b"IDAT", packed[at : at + size]) for at in range(0, max(len(packed), 1), size))
    table = palette() if mode == "P" and b"PLTE" not in before else b""
    return b"\x89PNG\r\n\x1a\n" + header(mode, width, height) + table + before + pixels + after + end


def ours(data: bytes) -> UInt8s | None:
    """The pixels, None where the file is refused."""
    try:
        return decode_image(memoryview(data))
    except MediaFault:
        return None


def by_pillow(data: bytes) -> UInt8s | None:
    """The same with Pillow's decoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rgb, "igzip_lib", None)
        return ours(data)


def in_kernels(data: bytes) -> bool:
    """Whether a file is decoded without Pillow's decoder."""
    with Image.open(io.BytesIO(data)) as image:
        return rgb._png_pixels(image, data) is not None  # type: ignore[arg-type]


def same(data: bytes) -> bool:
    """Whether both decoders agree about a file."""
    expected, found = by_pillow(data), ours(data)
    return (expected is None) == (found is None) and (expected is None or np.array_equal(expected, found))  # type: ignore[arg-type]


# -- the same pixels ------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(KINDS)), st.integers(1, 70), st.integers(1, 40), st.integers(0, 2**32),
    st.sampled_from(["0", "1", "2", "3", "4", "01234"]), st.integers(1, 5), st.integers(1, 500),
)  # fmt: skip
def test_every_filter_of_every_kind(mode, width, height, seed, filters, parts, together):
    data = png(mode, width, height, seed=seed, filters=filters, parts=parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rgb, "_TOGETHER", together)
        assert in_kernels(data) and same(data)


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (1000, 700)])
def test_pictures_as_pillow_writes_them(mode, size):
    x, y = np.meshgrid(np.linspace(0, 9, size[0]), np.linspace(0, 7, size[1]))
    waves = np.stack([np.sin(x + y), np.cos(x * 0.7), np.sin(y * 1.3 - x), np.sin(x * y)], axis=2)
    image = Image.fromarray((waves * 140 + 127).clip(0, 255).astype(np.uint8))  # clipped: wholly opaque and transparent
    out = io.BytesIO()
    (image.convert("RGB").quantize(77) if mode == "P" else image.convert(mode)).save(out, "PNG")
    assert same(out.getvalue())
    few_colours = mode == "P" and min(size) == 1  # several pixels in a byte
    assert few_colours or in_kernels(out.getvalue())


COMPILED = """
import sys
import numba.core.event as events
from overlord.transforms.samples import rgb
from overlord.transforms.samples.images import decode_image

rgb.warm_rgb()
with events.install_listener("numba:compile", events.RecordingListener()) as compiled:
    for file in sys.argv[1:]:
        decode_image(memoryview(open(file, "rb").read()))
print(len(compiled.buffer))
"""


def test_nothing_is_compiled_for_a_picture(tmp_path):
    """Also not for types that are nearly those of the warm-up, such as read-only arrays."""
    for mode in KINDS:
        (tmp_path / mode).write_bytes(png(mode, 50, 20))
    command = [sys.executable, "-c", COMPILED, *(str(tmp_path / mode) for mode in KINDS)]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == "0\n"


@pytest.mark.parametrize("colours", [1, 2, 200, 256])
@pytest.mark.parametrize("opaque", [b"\xff\x00\xff", bytes(range(256)), b"\x00" * 100, b"", b"\x80"])
def test_palettes_with_transparency(colours, opaque):
    data = png("P", 50, 20, before=palette(3, colours) + chunk(b"tRNS", opaque))
    assert in_kernels(data) and same(data)


def test_the_paeth_filter_is_that_of_the_specification():
    left, above, corner = (values.ravel() for values in np.meshgrid(*[np.arange(0, 256, 3)] * 3))
    estimate = left + above - corner
    away = [abs(estimate - near) for near in (left, above, corner)]
    nearest = np.choose(np.argmin(away, axis=0), [left, above, corner])  # the first where they are alike
    # Rows of two pixels: (corner, above) as they are, then (left, 0) with the filter.
    rows = np.zeros((len(left), 2, 3), np.uint8)
    rows[:, 0, 1], rows[:, 0, 2] = corner, above
    rows[:, 1, 0], rows[:, 1, 1] = 4, (left - corner) % 256
    lines = np.zeros((2 * len(left) + 1, 2), np.uint8)
    assert rgb._undo_filters(np.frombuffer(rows.tobytes(), np.uint8).reshape(-1, 3), lines, 1)
    assert np.array_equal(lines[2::2], np.stack([left, nearest], axis=1))


def test_other_pngs_are_left_to_pillow():
    out = io.BytesIO()
    still = Image.fromarray(np.zeros((8, 8, 3), np.uint8))
    still.save(out, "PNG", save_all=True, append_images=[still.transpose(Image.Transpose.ROTATE_90)])
    rows = zlib.compress(bytes(1000))
    interlaced = b"\x89PNG\r\n\x1a\n" + header("RGB", 5, 5, interlace=1) + chunk(b"IDAT", rows) + chunk(b"IEND")
    deep = b"\x89PNG\r\n\x1a\n" + header("RGB", 5, 5, depth=16) + chunk(b"IDAT", rows) + chunk(b"IEND")
    for data in (interlaced, deep, png(before=chunk(b"tRNS", bytes(6))), png("L", before=chunk(b"tRNS", bytes(2)))):
        assert not in_kernels(data) and same(data) and by_pillow(data) is not None
    assert not in_kernels(out.getvalue()) and same(out.getvalue())


# -- the same verdicts ----------------------------------------------------------------------------

ROWS = rows_of("RGB", 9, 7)
PACKED = zlib.compress(ROWS)
DATE = chunk(b"tEXt", b"date:create\0002026") + chunk(b"tIME", bytes(7))
DAMAGED: dict[str, bytes] = {
    "checksum of the header": b"\x89PNG\r\n\x1a\n" + header("RGB", 9, 7)[:-1] + b"\0" + png()[33:],
    "checksum of the palette": png("P", before=chunk(b"PLTE", bytes(768), checksum=1)),
    "checksum of the pixels": png(packed=PACKED[:-1] + bytes([PACKED[-1] ^ 1])),
    "no checksum of the pixels": png(packed=PACKED[:-4]),
    "cut pixels": png(packed=PACKED[: len(PACKED) // 2]),
    "no pixels": png(packed=b""),
    "cut file": png()[:-20],
    "no end": png(end=b""),
    "end without a checksum": png(end=chunk(b"IEND")[:-4]),
    "a row too few": png(packed=zlib.compress(ROWS[:-28])),
    "a row too many": png(packed=zlib.compress(ROWS + ROWS[:28])),
    "a byte too many": png(packed=zlib.compress(ROWS + b"\0")),
    "bytes after the pixels": png(packed=PACKED + b"12345"),
    "an unknown filter": png(packed=zlib.compress(b"\5" + ROWS[1:])),
    "an unknown filter in the last row": png(packed=zlib.compress(ROWS[:-28] + b"\xff" + ROWS[-27:])),
    "no zlib header": png(packed=PACKED[2:]),
    "no palette": png("P", before=b"").replace(palette(), b""),
    "a palette after the pixels": png("P", before=b"").replace(palette(), b"")[:-12] + palette() + chunk(b"IEND"),
    "a palette that is too large": png("P", before=chunk(b"PLTE", bytes(900))),
    "a palette of part of a colour": png("P", before=chunk(b"PLTE", bytes(100))),
    "a second header": png(before=header("RGBA", 4, 4)),
    "a chunk between the pixels": png(parts=2).replace(chunk(b"IEND"), b"") + chunk(b"tIME", bytes(7)) + chunk(b"IEND"),
    "a date": png(after=DATE),
    "a date that is cut": png(after=DATE[:20], end=b""),
    "text that Pillow takes for transparency": png("L", after=chunk(b"tEXt", b"transparency\0x")),
    "text that Pillow takes for a frame": png(before=chunk(b"tEXt", b"bbox\0x")),
    "text that Pillow takes for interlace": png(before=chunk(b"tEXt", b"interlace\0x")),
    "a chunk that is no name": png(after=chunk(b"\1\2\3\4", b"x")),
    "a profile that is cut": png(after=chunk(b"gAMA", b"x")),
    "text that is too large": png(after=chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(3 << 20)))),
    "a frame of an animation": png(before=chunk(b"acTL", bytes([0, 0, 0, 2, 0, 0, 0, 0]))),
    "pixels twice": png(after=chunk(b"tIME", bytes(7)) + chunk(b"IDAT", PACKED)),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_odd_files(name):
    assert same(DAMAGED[name])


def test_dates_after_the_pixels_are_no_reason_to_take_longer():
    assert in_kernels(png(after=DATE))


def test_a_wrong_checksum_of_a_chunk_of_pixels():
    data = png()
    at = data.index(b"IEND") - 8
    assert same(data[:at] + bytes(4) + data[at + 4 :])


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_damage(count):
    """Both decoders agree about what a changed, cut, doubled or moved stretch of bytes makes of a file."""
    whole = [png(mode, 12, 9, seed=n, parts=3, after=after) for n, mode in enumerate(KINDS) for after in (b"", DATE)]
    refused = 0
    for number in range(count):
        rng = random.Random(number)
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randrange(1, 3)):
            at = rng.randrange(len(data))
            end = min(at + rng.randrange(1, 40), len(data))
            damaged = [bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 : end], b"", 2 * data[at:end],
                       bytes(end - at)]  # fmt: skip
            data[at:end] = rng.choice(damaged)
        data = mended(data) if rng.random() < 0.5 else data  # else most are refused for their checksums alone
        assert same(bytes(data)), number
        refused += ours(bytes(data)) is None
    assert 0.5 * count < refused < count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_chunks_in_any_order(count):
    refused = 0
    for number in range(count):
        rng = random.Random(number)
        mode = rng.choice(sorted(KINDS))
        pixels = zlib.compress(rows_of(mode, 5, 6, number))
        pixels = pixels[: rng.choice([len(pixels), len(pixels), rng.randrange(len(pixels))])]
        cut = rng.randrange(len(pixels) + 1)
        chunks = [header(mode, 5, 6), palette(), chunk(b"tRNS", rng.randbytes(6)), chunk(b"IDAT", pixels[:cut]),
                  chunk(b"IDAT", pixels[cut:]), chunk(b"IDAT"), DATE, chunk(b"gAMA", bytes(rng.randrange(3, 5))),
                  chunk(b"prIv", b"x"), chunk(b"IEND")]  # fmt: skip
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(chunks))
            piece = chunks.pop(at) if rng.random() < 0.7 else chunks[at]
            if rng.random() < 0.7:
                chunks.insert(rng.randrange(len(chunks) + 1), piece)
        data = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
        assert same(data), number
        refused += ours(data) is None
    assert 0.2 * count < refused < 0.8 * count


def mended(data: bytearray) -> bytearray:
    """The file with the checksums of its chunks as far as it has chunks."""
    at, out = 8, data[:8]
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4])
        if at + 12 + size > len(data):
            break
        out += chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + size])
        at += 12 + size
    return out + data[at:]


def test_a_bomb_is_inflated_no_further_than_its_picture():
    data = png(packed=zlib.compress(bytes(64 << 20)))
    tracemalloc.start()
    try:
        assert not in_kernels(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert same(data)


def test_without_isal_pillow_decodes(monkeypatch):
    data = png()
    expected = ours(data)
    monkeypatch.setattr(rgb, "igzip_lib", None)
    assert not in_kernels(data) and np.array_equal(ours(data), expected)
