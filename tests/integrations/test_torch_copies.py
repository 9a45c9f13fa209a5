"""Flat batches hold all of a batch and nothing of its memory; the next one is made while one is in use."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from examples.demo.demo_data import media_job, write_media
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from tokenizers import Tokenizer

import overlord as ol
from overlord.integrations.torch_batches import ALIGNMENT, Ahead, FlatHeader, HostCopies, pack
from overlord.integrations.torch_loader import DataLoader, TorchBatch, exchange_images
from overlord.roles.client import Batch, RankView

DTYPES = st.sampled_from(["<i8", "<i4", "|u1", "<f4", "|b1"])
SHAPES = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0)
ARRAYS = DTYPES.flatmap(lambda dtype: arrays_of.arrays(dtype, SHAPES))
NUMBERS = st.integers(-(2**40), 2**40)


@given(
    st.dictionaries(st.sampled_from(["input_ids", "labels", "pixel_values", "send_splits", "ü"]), ARRAYS),
    st.dictionaries(st.sampled_from(["max_length_q", "meta.local_cp_size", "meta.pp"]), NUMBERS),
    st.integers(0, 5),
)
def test_a_parcel_holds_all_of_a_batch(arrays, scalars, segments):
    columns = {
        "meta.origin": np.arange(5 * segments, dtype=np.int64).reshape(5, segments) - (segments == 1),
        "meta.cu_seqlens": np.arange(segments + 1, dtype=np.int32),
        "meta.image_positions": np.arange(segments, dtype=np.int64),
        "meta.image_rows": np.arange(segments, dtype=np.int64)[::-1].copy(),
    }
    batch = Batch(RankView(arrays | columns, scalars), tuple("abcde"[: max(segments, 1)]))
    packed = pack(batch)
    header = FlatHeader.from_bytes(packed.header.to_bytes(at=[1, 2]))
    assert all(slot.offset % ALIGNMENT == 0 for slot in header.slots) and packed.flat.numel() == header.nbytes
    found, plain = HostCopies().copy(header, packed.flat.clone()).batch(batch.meta.source_names), TorchBatch(batch)
    assert set(found) == set(plain) and found.meta.local_cp_size == plain.meta.local_cp_size
    for key, value in plain.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype and found[key].shape == value.shape
            torch.testing.assert_close(found[key], value, rtol=0, atol=0, equal_nan=True)
        else:
            assert found[key] == value
    for name in ("image_positions", "image_rows", "segment_lengths", "segment_offsets", "source_ids", "cu_seqlens"):
        assert np.asarray(getattr(found.meta, name)).tolist() == np.asarray(getattr(plain.meta, name)).tolist()
    assert found._facts == plain._facts


def test_nothing_of_the_batch_is_held():
    root = np.arange(100)
    gone = threading.Event()
    weakref.finalize(root, gone.set)
    columns = {"meta.origin": root[:5].reshape(5, 1), "meta.cu_seqlens": root[5:7], "meta.image_rows": root[3:4]}
    batch = Batch(RankView({"input_ids": root[10:20], "recv_splits": root[2:4], **columns}, {}), ("a",))
    parcel = pack(batch)
    found = parcel.batch(("a",))
    del root, columns, batch
    gc.collect()
    assert gone.is_set()  # the shared segment would be free again
    assert found["input_ids"].tolist() == list(range(10, 20)) and found["recv_splits"].tolist() == [2, 3]


def test_the_next_one_is_made_while_one_is_in_use():
    made: list[tuple[int, bool]] = []
    done = [threading.Event() for _ in range(5)]
    here = threading.get_ident()

    def make(number: int) -> int:
        made.append((number, threading.get_ident() == here))
        done[number].set()
        if number == 3:
            raise ol.PlanError("the fourth cannot be made")
        return number * number

    with ThreadPoolExecutor(1) as pool:
        squares = Ahead(make, 5, pool)
        assert done[0].wait(10)
        assert squares.take(0) == 0 and done[1].wait(10)
        assert not done[2].is_set()  # one ahead, and no more
        assert squares.take(4) == 16  # out of turn: here and now
        assert squares.take(0) == 0  # once more: made again
        assert squares.take(1) == 1 and done[2].wait(10)
        assert squares.take(2) == 4 and done[3].wait(10)
        with pytest.raises(ol.PlanError, match="the fourth"):
            squares.take(3)
    assert made == [(0, False), (1, False), (4, True), (0, True), (2, False), (3, False)]
    assert squares.take(1) == 1  # the thread has ended: what is asked for is made all the same


def test_what_was_coming_when_the_thread_ended_is_made_when_it_is_asked_for():
    hold, pool = threading.Event(), ThreadPoolExecutor(1)
    pool.submit(hold.wait)
    squares = Ahead(lambda number: number * number, 3, pool)
    pool.shutdown(wait=False, cancel_futures=True)
    hold.set()
    assert [squares.take(number) for number in range(3)] == [0, 1, 4]


class ThreadedCopies(HostCopies):
    """What a device has, on the host: a thread that fetches ahead."""

    stream = "side"

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.by: set[bool] = set()

    def send(self, batch):
        self.by.add(threading.current_thread() is threading.main_thread())
        return super().send(batch)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("strategy", ["backbone_balance", "vlm_hybrid"])
@pytest.mark.slow
def test_steps_fetched_ahead_are_the_steps(strategy, mixed_job, cache, monkeypatch):
    def steps_of(loader):
        for _, step in zip(range(3), loader, strict=False):
            batches = [step.encoder, *step.microbatches] if step.encoder is not None else list(step.microbatches)
            yield [{key: torch.as_tensor(value).tolist() for key, value in batch.items()} for batch in batches]

    options = {"strategy": getattr(ol.strategies, strategy)(), "cache": cache}
    with DataLoader(mixed_job, **options) as loader:
        expected = list(steps_of(loader))
        state = loader.state_dict()
    copies = ThreadedCopies()
    monkeypatch.setattr("overlord.integrations.torch_loader.copies_to", lambda device, ahead: copies)
    with DataLoader(mixed_job, **options) as loader:
        assert list(steps_of(loader)) == expected
        assert loader.state_dict() == state  # nothing is taken of a step that was not asked for
        step = next(iter(loader))
        last = [step.microbatches[at]["input_ids"].tolist() for at in (-1, 0, -1)]
        assert last[0] == last[2]
    assert copies.by == {True, False}
    with pytest.raises(RuntimeError):
        copies.pool.submit(print)


def test_sounds_that_are_encoded_apart_arrive_at_their_tokens(tmp_path, cache, monkeypatch):
    write_media(tmp_path, clips=4, sounds=8)
    job = media_job(tmp_path)
    heard = Tokenizer.from_file(job.tokenizer).token_to_id("<|AUDIO|>")
    options = {"strategy": ol.strategies.vlm_hybrid(audio=ol.costs.tokens), "cache": cache, "runtime": "inline"}
    seen = []
    for copies in (None, ThreadedCopies()):
        if copies is not None:
            monkeypatch.setattr("overlord.integrations.torch_loader.copies_to", lambda device, ahead, use=copies: use)
        with DataLoader(job, **options) as loader:
            for _, step in zip(range(3), loader, strict=False):
                assert not step.progress.used
                sounds = step.audio_encoder
                assert step.progress.used, "a step whose sounds are encoded is trained on"
                # An encoder that writes the number of its row into every output.
                output = torch.arange(int(sounds["audio_lengths"].sum()), dtype=torch.float32)[:, None]
                rows = exchange_images(output, sounds)
                for batch in step.microbatches:
                    assert "input_features" not in batch
                    places = torch.nonzero(batch["input_ids"][0] == heard).flatten()
                    assert batch.meta.audio_positions.tolist() == places.tolist()
                    seen.append((copies is None, rows[batch.meta.audio_rows].flatten().tolist()))
                assert sounds["input_features"].shape == (len(sounds["audio_ids"]), 80, 600)
                assert step.encoder["pixel_values"].ndim == 2
    assert [rows for plain, rows in seen if plain] == [rows for plain, rows in seen if not plain]
    assert any(rows for _, rows in seen)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("mps", "device is 'mps'; batches cannot be copied there"),
        ("gpu", "device is 'gpu'; batches cannot be copied there"),
        (["cpu"], r"device is \['cpu'\]; batches"),
        ("cuda:99", r"device is 'cuda:99', but torch sees \d+ CUDA devices"),
    ],
)
def test_devices_that_are_not_there(device, words, ids_job):
    with pytest.raises(ol.SpecError, match=words):
        DataLoader(ids_job, device=device)
