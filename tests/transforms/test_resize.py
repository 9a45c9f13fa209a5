"""The resize kernels give what Pillow 13 gives, byte for byte."""

from __future__ import annotations

import ctypes
import mmap
import threading

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from overlord.transforms.samples import resize as resizing
from overlord.transforms.samples.resize import resize
from overlord.transforms.samples.resize_dots import has_dots

pytestmark = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="Pillow 13 changed the order of passes")

SIZES = st.integers(1, 90) | st.integers(200, 500)
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@settings(max_examples=150, deadline=None)
@given(
    SIZES, SIZES, SIZES, SIZES, st.sampled_from(sorted(FILTERS)), st.integers(0, 2**32), st.booleans(), st.booleans()
)
def test_every_byte_is_that_of_pillow(
    height: int, width: int, rows: int, columns: int, kind: str, seed: int, harsh: bool, dots: bool
) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if harsh:  # sums overshoot on both sides, and are cut to 0 and 255
        image = np.where(image > 127, 255, 0).astype(np.uint8)
    wanted = np.asarray(Image.fromarray(image).resize((columns, rows), FILTERS[kind]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "has_dots", lambda: dots and has_dots())  # both ways, on processors that have both
        resizing._table.cache_clear()
        np.testing.assert_array_equal(resize(image, rows, columns, kind), wanted)  # type: ignore[arg-type]
    resizing._table.cache_clear()


@pytest.mark.parametrize(
    "size", [(90, 68, 64, 53), (85, 41, 24, 1), (88, 19, 42, 9), (30, 10, 30, 20), (30, 40, 30, 20)]
)
def test_the_order_of_the_passes_is_that_of_pillow(size: tuple[int, int, int, int]) -> None:
    height, rows, width, columns = size
    image = np.random.default_rng(7).integers(0, 256, (height, width, 3), dtype=np.uint8)
    wanted = np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(resize(image, rows, columns), wanted)


def test_a_crop_is_resized_as_a_copy_of_it() -> None:
    image = np.random.default_rng(1).integers(0, 256, (80, 120, 3), dtype=np.uint8)
    np.testing.assert_array_equal(resize(image[10:60, 20:90], 32, 32), resize(image[10:60, 20:90].copy(), 32, 32))


def test_it_runs_while_another_thread_holds_the_interpreter() -> None:
    image = np.random.default_rng(1).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    wanted = resize(image, 224, 224)
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: found.append(resize(image, 224, 224))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for one in found:
        np.testing.assert_array_equal(one, wanted)


@pytest.mark.skipif(not has_dots(), reason="only some processors have dot products of bytes")
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_nothing_is_read_behind_the_end_of_an_image(offset: int) -> None:
    rows, columns = 16, 4 * 40 + offset
    size = 3 * rows * columns
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + room), mmap.PAGESIZE, 0) == 0
    image = np.frombuffer(memory, np.uint8, size, room - size).reshape(rows, columns, 3)
    image[:] = np.random.default_rng(3).integers(0, 256, image.shape, dtype=np.uint8)
    np.testing.assert_array_equal(resize(image, 8, 70), resize(image.copy(), 8, 70))
