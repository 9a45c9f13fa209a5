"""The resize kernels give what Pillow 13 gives, byte for byte."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import threading
from collections.abc import Iterator

import llvmlite.binding as llvm
import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from PIL import Image

from overlord.transforms.samples import resize as resizing
from overlord.transforms.samples import resize_dots
from overlord.transforms.samples.resize import resize

pytestmark = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="Pillow 13 changed the order of passes")

SIZES = st.integers(1, 90) | st.integers(200, 500)
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@contextlib.contextmanager
def sums_of_dots(dots: bool) -> Iterator[None]:
    """Make sums by dot products of bytes, or by plain products, whatever this processor is good at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "has_dots", lambda: dots)
        resizing._table.cache_clear()
        yield
    resizing._table.cache_clear()


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from(sorted(FILTERS)), st.integers(0, 2**32), st.booleans())
def test_every_byte_is_that_of_pillow(
    height: int, width: int, rows: int, columns: int, kind: str, seed: int, harsh: bool
) -> None:
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if harsh:  # sums overshoot on both sides, and are cut to 0 and 255
        image = np.where(image > 127, 255, 0).astype(np.uint8)
    wanted = np.asarray(Image.fromarray(image).resize((columns, rows), FILTERS[kind]))
    for dots in (False, True):
        with sums_of_dots(dots):
            np.testing.assert_array_equal(resize(image, rows, columns, kind), wanted)  # type: ignore[arg-type]


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
    with sums_of_dots(True):
        np.testing.assert_array_equal(resize(image, 8, 70), resize(image.copy(), 8, 70))


def test_arm_processors_get_their_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for Arm on any host: all products of a loop are made by dot products of bytes."""
    with sums_of_dots(True):
        resize(np.zeros((16, 16, 3), np.uint8), 8, 8)  # which gives the names of this module to numba
    monkeypatch.setattr(resize_dots, "has_dots", lambda: True)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=3)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    for written in (resize_dots._dot_pixels, resize_dots._dot_lines):
        module = ir.Module()
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6), "kernel")
        builder = ir.IRBuilder(function.append_basic_block())
        written.py_func(builder, *function.args)
        builder.ret_void()
        compiled = llvm.parse_assembly(str(module))
        passes.getModulePassManager().run(compiled, passes)
        assembly = machine.emit_assembly(compiled)
        dots = assembly.count("\tsdot\t")
        assert dots and dots % (3 * resize_dots.VECTORS) == 0, "three digits of every weight"
        assert not re.search(r"\t[su]?m(la|ul)l?2?\tv", assembly), "no product is made in another way"
