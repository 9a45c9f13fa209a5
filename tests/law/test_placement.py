"""Where media are decoded changes what travels, never the stream."""

from __future__ import annotations

import io
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import overlord as ol
from overlord.testing import digest_service

PLACEMENTS = ("auto", "loader", "constructor")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, demo_files):
    """Photos of many sizes, one in nine of them cut short behind its header; long captions are split."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(5)
    images, texts = [], []
    for row in range(60):
        out = io.BytesIO()
        pixels = rng.integers(0, 255, (int(rng.integers(30, 90)), int(rng.integers(30, 90)), 3), np.uint8)
        Image.fromarray(pixels).save(out, "JPEG")
        data = out.getvalue()
        images.append(data[: len(data) // 2] if row % 9 == 4 else data)
        texts.append("a word " * int(rng.integers(1, 60)))
    table = pa.table({"jpg": pa.array(images, pa.binary()), "txt": texts})
    pq.write_table(table, folder / "pictures.parquet", row_group_size=20)
    source = ol.Source(
        "pictures", str(folder / "pictures.parquet"), tolerance=1.0,
        sample=ol.ImageText("jpg", "txt", patch=8, merge=2, min_pixels=256, max_pixels=48 * 48,
                            augment=ol.Augment(flip=0.5, crop=0.6)),
    )  # fmt: skip
    return ol.Job([source], tokenizer=str(demo_files.tokenizer), batch=ol.Batch(96, global_samples=8),
                  overlength="split", seed=3, max_steps=9)  # fmt: skip


def digests(job, cache, **options):
    with ol.launch(job, cache=cache, **options) as service:
        return digest_service(service, steps=6), service.status()["sources"]


@pytest.mark.slow_but_inline
@pytest.mark.parametrize("strategy", [None, ol.strategies.vlm_hybrid(split=True)], ids=["beside tokens", "routed"])
def test_placement_never_changes_the_stream(pictures, cache, where, strategy):
    mesh = ol.ClientPlaceTree(dp=2, cp=2)
    found = {
        name: digests(pictures, cache, mesh=mesh, **where, placement=name, strategy=strategy,
                      loaders_per_source=1 + (name == "loader"))
        for name in PLACEMENTS
    }  # fmt: skip
    assert len({digest for digest, _ in found.values()}) == 1
    places = {name: sources["pictures"]["decoded_in"] for name, (_, sources) in found.items()}
    assert places == {"auto": "constructor", "loader": "loader", "constructor": "constructor"}
    assert found["auto"][1]["pictures"]["decoded_ratio"] > 1
    if where["runtime"] == "inline":  # nothing is gathered ahead: the same was handed over, and the same is bad
        handed = {name: sources["pictures"]["handed_over_bytes"] for name, (_, sources) in found.items()}
        assert handed["auto"] == handed["constructor"] < handed["loader"]
        assert len({sources["pictures"]["bad"] for _, sources in found.values()}) == 1
        assert found["auto"][1]["pictures"]["bad"] > 0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_image_that_does_not_decode_is_masked_counted_and_logged_once(pictures, cache, caplog, placement):
    caplog.set_level(logging.INFO, "overlord")
    with ol.launch(pictures, runtime="inline", cache=cache, placement=placement) as service:
        masked, good = 0, 0
        for step in service.client():
            for batch in step.microbatches:
                if "pixel_values" not in batch:
                    continue  # nothing but the later pieces of long captions
                pixels = np.split(batch["pixel_values"], np.cumsum(np.prod(batch["image_grid_thw"], axis=1))[:-1])
                # An image stands in the first piece of its sample; a bad one is zeros, and its piece counts nothing.
                firsts = np.flatnonzero(batch.meta.segment_offsets == 0)
                for patches, segment in zip(pixels, firsts, strict=True):
                    begin, end = batch.meta.cu_seqlens[segment : segment + 2]
                    labels = batch["labels"][0, begin:end]
                    if patches.any():
                        good += int((labels != -100).any())
                    else:
                        masked += 1
                        assert (labels == -100).all()
        bad = service.status()["sources"]["pictures"]["bad"]
    assert masked and good and masked == bad
    lines = [record.getMessage() for record in caplog.records if "bad sample pictures:" in record.getMessage()]
    assert len(lines) == len(set(lines)) == bad


def test_tolerance_holds_in_the_constructor_too(pictures, cache):
    strict = pictures.replace(sources=[pictures.sources[0].replace(tolerance=0.001)])
    with (
        ol.launch(strict, runtime="inline", cache=cache, placement="constructor") as service,
        pytest.raises(ol.ToleranceError, match="source 'pictures' has 2 bad samples"),
    ):
        for step in service.client():
            list(step.microbatches)


def test_an_unknown_placement_is_refused(pictures):
    with pytest.raises(ol.SpecError, match=r"placement is 'gpu': expected .*; it would be unclear where images"):
        ol.launch(pictures, placement="gpu")
