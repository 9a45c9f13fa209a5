"""M-RoPE positions: as the models number them, segment by segment, and as a plain loop does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen2VLConfig, Qwen2VLModel

from overlord.errors import SpecError
from overlord.transforms.microbatches.positions import mrope_positions

TEXT, IMAGE, VIDEO = 0, 1, 2
TOKENS_PER_SECOND = 4
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
}


def model_of(version, merge):
    """A model small enough to build in no time: only its numbering is asked."""
    vision = {"depth": 1, "num_heads": 2, "spatial_merge_size": merge}
    if version == "2":
        return Qwen2VLModel(
            Qwen2VLConfig(text_config=SMALL, vision_config=vision | {"embed_dim": 16, "hidden_size": 16})
        )
    vision |= {
        "hidden_size": 16,
        "intermediate_size": 16,
        "out_hidden_size": 16,
        "tokens_per_second": TOKENS_PER_SECOND,
    }
    return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=SMALL, vision_config=vision))


@pytest.fixture(scope="module")
def models():
    return {(version, merge): model_of(version, merge) for version in ("2", "2.5") for merge in (1, 2)}


def tokens_of(run, merge):
    kind, size = run[0], run[1]
    return size if kind == TEXT else size[0] * (size[1] // merge) * (size[2] // merge)


def by_model(model, runs, merge, as_tensor=False):
    """Ask the model for one segment: runs are (TEXT, length), (IMAGE, grid) and (VIDEO, grid, seconds)."""
    kinds = np.repeat([run[0] for run in runs], [tokens_of(run, merge) for run in runs])
    grids = {kind: [run[1] for run in runs if run[0] == kind] for kind in (IMAGE, VIDEO)}
    seconds = [run[2] for run in runs if run[0] == VIDEO]
    extra = {}
    if seconds and isinstance(model, Qwen2_5_VLModel):
        extra = {"second_per_grid_ts": torch.tensor(seconds) if as_tensor else seconds}
    found, _ = model.get_rope_index(
        torch.zeros((1, len(kinds)), dtype=torch.long),
        torch.tensor(kinds)[None],
        image_grid_thw=torch.tensor(grids[IMAGE]) if grids[IMAGE] else None,
        video_grid_thw=torch.tensor(grids[VIDEO]) if grids[VIDEO] else None,
        **extra,
    )
    return found[:, 0].numpy()


def arguments_of(segments, merge, per_second=None, as_tensor=False, pads=None):
    """The arguments of mrope_positions for segments of runs."""
    lengths, items = [], []
    for number, runs in enumerate(segments):
        at = 0
        for run in runs:
            if run[0] != TEXT:
                step = 1.0 if run[0] == IMAGE or per_second is None else run[2] * per_second
                if as_tensor and run[0] == VIDEO and per_second is not None:
                    step = np.float32(run[2]) * np.float32(per_second)
                items.append((number, at, tokens_of(run, merge), run[1], step))
            at += tokens_of(run, merge)
        lengths.append(at + (pads[number] if pads else 0))
    columns = [list(column) for column in zip(*items, strict=True)] or [[], [], [], [], []]
    return {
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "item_segment": columns[0],
        "item_start": columns[1],
        "item_length": columns[2],
        "grid_thw": columns[3],
        "merge": merge,
        "seconds_step": np.array(columns[4], np.float32),
    }


def by_hand(runs, merge, step_of):
    """The rule itself: what follows goes on at the largest number so far, and one."""
    rows, largest = [], -1
    for run in runs:
        begin = largest + 1
        if run[0] == TEXT:
            rows += [(begin + i,) * 3 for i in range(run[1])]
        else:
            t, h, w = run[1][0], run[1][1] // merge, run[1][2] // merge
            moments = [int(np.float32(i) * np.float32(step_of(run))) for i in range(t)]
            rows += [(begin + m, begin + y, begin + x) for m in moments for y in range(h) for x in range(w)]
        largest = max([largest, *(n for row in rows for n in row)])
    return np.array(rows, np.int64).reshape(-1, 3).T


LAYOUTS = {
    "text only": [(TEXT, 9)],
    "one image": [(TEXT, 3), (IMAGE, (1, 4, 6)), (TEXT, 5)],
    "an image first": [(IMAGE, (1, 8, 4)), (TEXT, 2)],
    "an image last": [(TEXT, 2), (IMAGE, (1, 2, 2))],
    "several images": [(TEXT, 1), (IMAGE, (1, 4, 4)), (TEXT, 2), (IMAGE, (1, 2, 10)), (TEXT, 1), (IMAGE, (1, 6, 2))],
    "a short clip": [(TEXT, 4), (VIDEO, (2, 8, 8), 0.25), (TEXT, 3)],
    "a long clip": [(TEXT, 4), (VIDEO, (12, 4, 4), 1.0), (TEXT, 3)],
    "a slow clip": [(TEXT, 4), (VIDEO, (5, 4, 6), 0.3), (TEXT, 3), (VIDEO, (3, 4, 4), 2.0), (TEXT, 1)],
    "mixed": [(TEXT, 2), (IMAGE, (1, 4, 4)), (TEXT, 1), (VIDEO, (7, 4, 2), 0.5), (TEXT, 1), (IMAGE, (1, 2, 4))],
}  # fmt: skip
AGREED = [name for name in LAYOUTS if name not in ("a long clip", "a slow clip", "mixed")]
"""Layouts with clips not longer than they are wide, for which every version of the rule is the same."""


def steps_of(version):
    return TOKENS_PER_SECOND if version == "2.5" else None


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("version", ["2", "2.5"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_numbers_as_the_model_does(models, name, version, merge):
    runs = LAYOUTS[name]
    found = mrope_positions(**arguments_of([runs], merge, steps_of(version)), count_time=False)
    assert found.dtype == np.int64
    assert np.array_equal(found, by_model(models[version, merge], runs, merge))


@pytest.mark.parametrize("version", ["2", "2.5"])
@pytest.mark.parametrize("name", AGREED)
def test_the_default_numbers_as_the_model_does_where_no_clip_is_longer_than_wide(models, name, version):
    found = mrope_positions(**arguments_of([LAYOUTS[name]], 2, steps_of(version)))
    assert np.array_equal(found, by_model(models[version, 2], LAYOUTS[name], 2))


@pytest.mark.parametrize("name", LAYOUTS)
def test_by_default_text_goes_on_behind_the_largest_number(name):
    runs = LAYOUTS[name]
    expected = by_hand(runs, 2, lambda run: 1.0 if run[0] == IMAGE else run[2] * TOKENS_PER_SECOND)
    assert np.array_equal(mrope_positions(**arguments_of([runs], 2, TOKENS_PER_SECOND)), expected)


def test_the_two_rules_differ_behind_a_long_clip():
    arguments = arguments_of([LAYOUTS["a long clip"]], 2)
    assert mrope_positions(**arguments)[:, -1].tolist() == [4 + 12 + 2] * 3
    assert mrope_positions(**arguments, count_time=False)[:, -1].tolist() == [4 + 2 + 2] * 3


sides = st.integers(1, 5).map(lambda n: 2 * n)
images = st.tuples(st.just(IMAGE), st.tuples(st.just(1), sides, sides))
seconds = st.floats(0.0, 9.0, width=32)
videos = st.tuples(st.just(VIDEO), st.tuples(st.integers(1, 30), sides, sides), seconds)


@st.composite
def segments(draw):
    """Text between the items, as the model wants it: it takes neighbours of one kind for one item."""
    runs = [(TEXT, draw(st.integers(1, 9)))]
    for item in draw(st.lists(st.one_of(images, videos), max_size=4)):
        runs += [item, (TEXT, draw(st.integers(1, 9)))]
    return runs


@given(
    st.lists(segments(), min_size=1, max_size=4), st.sampled_from(["2", "2.5"]), st.sampled_from([1, 2]), st.booleans()
)
def test_packed_segments_are_numbered_one_by_one(models, packed, version, merge, as_tensor):
    model = models[version, merge]
    expected = np.concatenate([by_model(model, runs, merge, as_tensor) for runs in packed], axis=1)
    found = mrope_positions(**arguments_of(packed, merge, steps_of(version), as_tensor), count_time=False)
    assert np.array_equal(found, expected)


@given(st.lists(segments(), min_size=1, max_size=4), st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_padding_goes_on_like_text(packed, pads):
    def step(run):
        return 1.0 if run[0] == IMAGE else np.float32(run[2]) * np.float32(TOKENS_PER_SECOND)

    arguments = arguments_of(packed, 2, TOKENS_PER_SECOND, True, pads)
    padded = [[*runs, (TEXT, pad)] for runs, pad in zip(packed, pads, strict=False)]
    expected = np.concatenate([by_hand(runs, 2, step) for runs in padded], axis=1)
    assert np.array_equal(mrope_positions(**arguments), expected)


def test_neighbours_and_empty_segments():
    runs = [(IMAGE, (1, 4, 4)), (IMAGE, (1, 2, 8)), (VIDEO, (3, 2, 2), 1.0)]
    found = mrope_positions(**arguments_of([[], runs, []], 2))
    assert np.array_equal(found, by_hand(runs, 2, lambda _: 1.0))
    assert mrope_positions([0], [], [], [], []).shape == (3, 0)


GOOD = {
    "cu_seqlens": [0, 6, 14],
    "item_segment": [0, 1],
    "item_start": [1, 3],
    "item_length": [4, 4],
    "grid_thw": [[1, 4, 4], [1, 4, 4]],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": [1, 6, 14]}, "begin at 0"),
        ({"cu_seqlens": [0, 6, 5]}, "begin at 0"),
        ({"item_segment": [0]}, "1 segments, 2 starts"),
        ({"item_segment": [0, 2]}, "segments 0 to 2, and there are 2"),
        ({"item_segment": [1, 0]}, "item 1 "),
        ({"item_start": [3, 3]}, "item 0 .*leaves its segment"),
        ({"item_start": [-1, 3]}, "item 0 "),
        ({"item_length": [4, 3]}, "item 1 .*not as long as its grid"),
        ({"grid_thw": [[1, 4, 4], [0, 4, 4]]}, "item 1 "),
        ({"grid_thw": [1, 4, 4]}, "grid_thw has type"),
        ({"item_segment": [1, 1], "item_start": [2, 3]}, "item 1 .*begins before the one before it ends"),
        ({"merge": 0}, "merge is 0"),
        ({"seconds_step": [1.0, -1.0]}, "seconds_step"),
        ({"seconds_step": float("nan")}, "seconds_step"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    assert mrope_positions(**GOOD).shape == (3, 14)
    with pytest.raises(SpecError, match=message):
        mrope_positions(**GOOD | change)
