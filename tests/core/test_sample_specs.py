"""Images: how many patches and tokens they make after resizing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.job.sample_specs import ImageText, image_grid, image_tokens


def qwen(width: int, height: int, spec: ImageText) -> tuple[int, int]:
    """The rule as usually written, for one image of ordinary shape."""
    f = spec.factor
    h, w = max(f, round(height / f) * f), max(f, round(width / f) * f)
    if h * w > spec.max_pixels:
        beta = (height * width / spec.max_pixels) ** 0.5
        h, w = max(f, int(height / beta // f) * f), max(f, int(width / beta // f) * f)
    elif h * w < spec.min_pixels:
        beta = (spec.min_pixels / (height * width)) ** 0.5
        h, w = -int(-height * beta // f) * f, -int(-width * beta // f) * f
    return h // spec.patch, w // spec.patch


@pytest.mark.parametrize("spec", [ImageText(), ImageText(patch=14, merge=2, max_pixels=512 * 512)])
def test_grid_follows_the_usual_rule(spec: ImageText) -> None:
    sizes = [(640, 480), (33, 47), (5000, 3000), (224, 224), (1, 1), (1920, 1080), (63, 64), (700, 1400)]
    rows, cols = image_grid(spec, [w for w, _ in sizes], [h for _, h in sizes])
    assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == [qwen(w, h, spec) for w, h in sizes]


@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 200_000)), min_size=1),
    st.sampled_from([ImageText(), ImageText(patch=14, merge=2), ImageText(patch=16, max_pixels=64 * 64)]),
)
def test_every_image_has_a_legal_size(sizes: list[tuple[int, int]], spec: ImageText) -> None:
    rows, cols = image_grid(spec, [w for w, _ in sizes], [h for _, h in sizes])
    assert rows.dtype == cols.dtype == np.int64
    assert (rows % spec.merge == 0).all() and (cols % spec.merge == 0).all()
    assert (rows >= 1).all() and (cols >= 1).all()
    assert (rows * cols * spec.patch**2 <= spec.max_pixels).all()
    if spec.max_pixels > 4 * spec.min_pixels:
        assert (image_tokens(spec, *zip(*sizes, strict=True)) >= spec.min_tokens).all()


def test_fixed_size() -> None:
    spec = ImageText(size=224, patch=14, merge=2)
    rows, cols = image_grid(spec, [10, 4000], [20, 30])
    assert rows.tolist() == cols.tolist() == [16, 16]
    assert image_tokens(spec, [10], [20]).tolist() == [64] and spec.min_tokens == 64
