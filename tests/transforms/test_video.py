"""Clips: frames, sizes and patches as Qwen2-VL takes them, lengths by the header alone, faults that stay small."""

from __future__ import annotations

import ast
import importlib.util
import io
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from overlord.core.ragged import BAD_COLUMN, Ragged
from overlord.core.samples import BAD
from overlord.errors import SpecError
from overlord.job.specs import Batch, Job, Source, Video, pick_frames, video_frames, video_grid
from overlord.transforms.samples import video
from overlord.transforms.samples.per_sample import MediaFault
from overlord.transforms.samples.sample_kinds import make_transform
from overlord.transforms.samples.tokenize import TextTokenizer
from overlord.transforms.samples.video import VideoDecoder, VideoTransform, read_clip

SMALL = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
WORDS = ["<unk>", "<|video_pad|>", "<start>", "<end>", "one", "two"]


class Here:
    """Workers that work in the caller."""

    def map(self, function, items):
        return [function(item) for item in items]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    words.save(str(path))
    return TextTokenizer(str(path))


def film(frames, height=96, width=128, *, moving=True):
    y, x = np.mgrid[:height, :width]
    step = 5 if moving else 0
    return [
        np.stack([(x + step * i) % 256, (2 * y + step * i) % 256, (x + y) % 256], -1).astype(np.uint8)
        for i in range(frames)
    ]


def encode(pictures, rate=24, codec="libx264", container="mp4", **options) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode(None))
    return out.getvalue()


def shown(data) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def spoil(data: bytes) -> bytes:
    """Overwrite the body of an MP4; the header, which stands behind it, stays whole."""
    begin, end = data.index(b"mdat") + 4, data.rindex(b"moov") - 4
    return data[:begin] + b"\xff" * (end - begin) + data[end:]


def decoded(spec, data) -> tuple[np.ndarray, list[int]]:
    clip = read_clip(data, key_frames=spec.frames == "key")
    count = video_frames(spec, clip.keys if spec.frames == "key" else clip.frames, clip.rate)
    grid = video_grid(spec, count, clip.width, clip.height)
    place = np.full(int(VideoDecoder(spec).item_bytes(grid)[0]), 0xAB, np.uint8)
    VideoDecoder(spec).decode(memoryview(data), grid[0].astype(np.int32), 0, place)
    return place.reshape(int(np.prod(grid)), -1), grid[0].tolist()


def rows_of(encoded, texts):
    return {
        "mp4": Ragged.from_rows(encoded),
        "txt": Ragged.from_rows([text.encode() for text in texts]),
        BAD_COLUMN: np.zeros(len(encoded), np.bool_),
    }


def qwen(name):
    """Return a method of Qwen2VLVideoProcessor; its module cannot be imported without torchvision."""
    spec = importlib.util.find_spec("transformers")
    path = Path(spec.origin).parent / "models" / "qwen2_vl" / "video_processing_qwen2_vl.py"
    found = next(n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and n.name == name)
    names = {"torch": torch, "math": math}
    exec(compile(ast.Module([found], []), str(path), "exec", flags=annotations.compiler_flag), names)  # noqa: S102
    return names[name]


# -- which frames --------------------------------------------------------------------------------


@given(
    st.integers(2, 3000),
    st.sampled_from([8.0, 12.5, 24.0, 24000 / 1001, 29.97, 30.0, 60.0]),
    st.sampled_from([0.5, 1.0, 2.0, 3.7]),
    st.integers(1, 8),
    st.integers(8, 100),
)
def test_sampled_frames_are_qwens(total, rate, fps, low, high):
    spec = Video(fps=fps, min_frames=low, max_frames=high)
    own = SimpleNamespace(num_frames=None, fps=fps, temporal_patch_size=2, min_frames=low, max_frames=high)
    count = int(video_frames(spec, total, rate))
    metadata = SimpleNamespace(total_num_frames=total, fps=rate)
    try:
        expected = qwen("sample_frames")(own, metadata).numpy()
    except ZeroDivisionError:  # fewer than two frames wanted: there the rule has no answer
        assert count == 2
        return
    # There an arange of floats gives the indices: now and then one too many, or one that is rounded down.
    assert len(expected) - count in (0, 1)
    found = pick_frames(total, count)
    assert np.abs(found - expected[:count]).max() <= 1
    if total % count == 0:
        assert found.tolist() == expected[:count].tolist()
    assert (np.diff(found) > 0).all() and found[0] == 0 and found[-1] < total


@given(st.integers(1, 2000), st.integers(1, 4), st.integers(4, 64))
def test_key_frames_are_thinned_evenly_and_padded(keys, temporal, most):
    spec = Video(frames="key", temporal=temporal, max_frames=most)
    count = int(video_frames(spec, keys, 24.0))
    found = pick_frames(keys, count)
    assert count % temporal == 0 and 0 < count <= most
    if keys <= most // temporal * temporal:
        assert found.tolist() == [*range(keys), *[keys - 1] * (count - keys)] and count - keys < temporal
    else:
        steps = np.diff(found)
        assert count == most // temporal * temporal and steps.max() - steps.min() <= 1


# -- which size ----------------------------------------------------------------------------------


@given(st.integers(16, 4000), st.integers(16, 4000), st.integers(1, 384), st.sampled_from([None, 900, 115_200]))
def test_frames_are_resized_as_qwen_does(width, height, groups, tokens):
    spec, frames = Video(max_tokens=tokens), 2 * groups
    limit = 768 * 28 * 28
    if tokens is not None:
        limit = max(min(limit, tokens * 28 * 28 * 2 // frames), int(128 * 28 * 28 * 1.05))
    if max(width, height) / min(width, height) > 200:
        return
    tall, wide = smart_resize(height, width, factor=28, min_pixels=128 * 28 * 28, max_pixels=limit)
    found = video_grid(spec, [frames, frames], [width, width], [height, height])
    if tall * wide <= limit:
        assert found.tolist() == [[groups, tall // 14, wide // 14]] * 2
    else:  # a narrow frame, which there breaks the limit
        assert (found[0, 1] * found[0, 2] * 14 * 14) <= limit


# -- which bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("mpeg4", "mp4"), ("libvpx-vp9", "webm")])
def test_patches_are_qwens(codec, container):
    spec = Video(fps=6, **SMALL)
    data = encode(film(31), 24, codec, container)
    rows, (t, h, w) = decoded(spec, data)
    pictures = shown(data)
    assert len(pictures) == 31 and t == 3
    size = (14 * w, 14 * h)
    chosen = [Image.fromarray(pictures[i]).resize(size, Image.Resampling.BICUBIC) for i in range(0, 30, 5)]
    stacked = torch.from_numpy(np.stack([np.asarray(p).transpose(2, 0, 1) for p in chosen]))[None]
    expected, *grid = qwen("patchify")(None, stacked, 14, 2, 2)
    assert grid == [t, h, w]
    np.testing.assert_array_equal(rows, expected[0].numpy())


def test_a_clip_of_one_picture_is_that_picture_again_and_again():
    data = encode(film(16, moving=False), 8, g="1", qp="0")
    picture = shown(data)[0]
    assert all((one == picture).all() for one in shown(data))
    spec = Video(**SMALL)
    rows, (t, h, w) = decoded(spec, data)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 112 * 112})
    expected = processor(Image.fromarray(picture), return_tensors="np")
    assert expected["image_grid_thw"].tolist() == [[1, h, w]] and t == 2
    mean, std = np.array(processor.image_mean), np.array(processor.image_std)
    shape = (h * w, 3, 2, 14, 14)
    for group in np.split(rows, t):
        scaled = (group.reshape(shape) / 255 - mean[:, None, None, None]) / std[:, None, None, None]
        np.testing.assert_allclose(scaled, expected["pixel_values"].reshape(shape), atol=1e-5)


def test_key_frames_are_decoded_alone():
    data = encode(film(40), 24, g="10", bf="2", sc_threshold="0")
    assert read_clip(data, key_frames=True).keys == 4
    spec = Video(frames="key", **SMALL)
    rows, (t, h, w) = decoded(spec, data)
    assert t == 2
    pictures = shown(data)
    places = rows.reshape(t, h // 2, w // 2, 2, 2, 3, 2, 14, 14)
    for at, number in enumerate((0, 10, 20, 30)):
        small = np.asarray(Image.fromarray(pictures[number]).resize((14 * w, 14 * h), Image.Resampling.BICUBIC))
        back = places[at // 2, ..., at % 2, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(14 * h, 14 * w, 3)
        np.testing.assert_array_equal(back, small)


@pytest.mark.parametrize(
    ("codec", "container", "options"),
    [
        ("libx264", "mp4", {"g": "12", "bf": "3"}),
        ("libx264", "matroska", {"g": "12", "bf": "3", "x264-params": "open-gop=1"}),
        ("libx264", "mpegts", {"x264-params": "intra-refresh=1:keyint=12"}),
        ("mpeg4", "avi", {"g": "10"}),
        ("libvpx-vp9", "webm", {"g": "15", "deadline": "realtime", "cpu-used": "8"}),
    ],
)
def test_a_frame_that_is_reached_by_its_key_frame_has_the_pixels_of_a_decode_from_the_start(codec, container, options):
    data, total = memoryview(encode(film(50), 24, codec, container, **options)), 50
    everything = dict(video._decode_from_start(data, np.arange(total), key_frames=False))
    assert len(everything) == total
    for wanted in (np.arange(total), np.array([0, 13, 13, 26, 49]), np.array([31])):
        frames = list(video._decode_frames(data, wanted, key_frames=False))
        assert [number for number, _ in frames] == np.unique(wanted).tolist()
        assert all(np.array_equal(pixels, everything[number]) for number, pixels in frames)


def test_nothing_before_the_key_frame_of_a_wanted_frame_is_decoded():
    data = encode(film(60), g="12", bf="0")
    with av.open(io.BytesIO(data)) as file:
        first_packets = [(packet.pos, packet.size) for packet in file.demux(video=0) if packet.size][:24]
    damaged = bytearray(data)
    for start, size in first_packets:
        damaged[start : start + size] = bytes(size)
    [(_, sound)] = video._decode_frames(memoryview(data), np.array([50]), key_frames=False)
    [(_, found)] = video._decode_frames(memoryview(damaged), np.array([50]), key_frames=False)
    assert np.array_equal(found, sound)


def test_the_same_bytes_on_any_number_of_threads():
    data = [encode(film(12 + i, 80 + 16 * i, 112), 12) for i in range(3)]
    spec = Video(**SMALL)
    expected = [decoded(spec, one)[0] for one in data]
    with ThreadPoolExecutor(4) as pool:
        for at, found in enumerate(pool.map(lambda i: decoded(spec, data[i % 3])[0], range(12))):
            np.testing.assert_array_equal(found, expected[at % 3])


def test_a_clip_of_one_frame_fills_a_temporal_patch():
    rows, (t, h, w) = decoded(Video(**SMALL), encode(film(1)))
    assert t == 1
    both = rows.reshape(h * w, 3, 2, 14 * 14)
    np.testing.assert_array_equal(both[:, :, 0], both[:, :, 1])


def test_frames_that_the_header_only_claims_repeat_the_last(monkeypatch):
    data = encode(film(8), 8)
    honest = read_clip(data)
    monkeypatch.setattr(video, "read_clip", lambda *_, **__: video.Clip(16, 0, honest.rate, 128, 96))
    spec = Video(fps=8, **SMALL)
    grid = video_grid(spec, 16, 128, 96)
    place = np.full(int(VideoDecoder(spec).item_bytes(grid)[0]), 0xAB, np.uint8)
    VideoDecoder(spec).decode(memoryview(data), grid[0].astype(np.int32), 0, place)
    frames = place.reshape(8, -1, 3, 2, 14 * 14).transpose(0, 3, 1, 2, 4).reshape(16, -1)
    assert (frames[7:] == frames[7]).all()
    assert all((frames[i] != frames[i + 1]).any() for i in range(7))


# -- lengths -------------------------------------------------------------------------------------


def test_measuring_does_not_decode(tokenizer):
    spec = Video(before="<start>", after="<end>", **SMALL)
    transform = VideoTransform(spec, tokenizer)
    # A spoilt body cannot be decoded; that it is measured like the whole clip shows that it was not decoded.
    whole = encode(film(48, 240, 320), 24)
    encoded = [whole, spoil(whole), encode(film(36, 64, 64), 12, "libvpx-vp9", "webm")]
    measured = transform.measure(rows_of(encoded, ["one", "one two", ""]), None, np.arange(3, dtype=np.uint64))
    assert measured.faults == [] and not (measured.flags & BAD).any()
    grids = measured.kept["media_grid"].values.reshape(-1, 3)
    assert grids[:2].tolist() == [[2, 6, 8]] * 2 and grids[2].tolist() == [3, 4, 4]
    assert measured.image_tokens.tolist() == [24, 24, 12] and measured.images.tolist() == [1, 1, 1]
    assert measured.tokens.tolist() == [24 + 2 + 1, 24 + 2 + 2, 12 + 2 + 1]
    # Four frames of two seconds: a temporal patch is one second; six of three.
    assert measured.kept["media_seconds"].values.tolist() == [1.0, 1.0, 1.0]
    done = transform.finish(measured.kept, measured.tokens, np.zeros(3, np.bool_), Here())
    assert done.media is not None and done.media.kind == "video"
    assert done.tokens[0].tolist() == [2, *[1] * 24, 3, 4] and done.loss[0].tolist() == [0] * 26 + [1]
    assert done.media.kind == "video" and done.media.start.tolist() == [1, 1, 1]


# -- faults --------------------------------------------------------------------------------------


def playlist(path) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{path}\n#EXT-X-ENDLIST\n".encode()


def only_sound() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def test_headers_that_make_no_sense_are_bad_rows(tokenizer, tmp_path):
    good = encode(film(12), 12)
    (tmp_path / "other.mp4").write_bytes(good)
    encoded = [good, b"", b"no clip at all", good[: len(good) // 2], only_sound(), playlist(tmp_path / "other.mp4")]
    transform = VideoTransform(Video(**SMALL), tokenizer)
    measured = transform.measure(rows_of(encoded, ["one two"] * 6), None, np.zeros(6, np.uint64))
    assert (measured.flags & BAD).astype(bool).tolist() == [False] + [True] * 5
    reasons = dict(measured.faults)
    assert sorted(reasons) == [1, 2, 3, 4, 5]
    assert all("no readable clip header" in reasons[row] for row in (1, 2, 3, 5)) and "no video" in reasons[4]
    assert not any(" at 0x" in reason for reason in reasons.values())
    assert measured.image_tokens.tolist() == [measured.image_tokens[0], 1, 1, 1, 1, 1]
    done = transform.finish(measured.kept, measured.tokens, (measured.flags & BAD) > 0, Here())
    assert done.tokens.lengths.tolist() == measured.tokens.tolist()
    assert [int(done.loss[i].sum()) for i in range(6)] == [2, 0, 0, 0, 0, 0]
    assert done.media.bad.tolist() == [False] + [True] * 5


@pytest.mark.parametrize("frames", ["uniform", "key"])
def test_a_spoilt_body_is_found_when_it_is_decoded(frames):
    with pytest.raises(MediaFault, match=r"does not decode|not one frame|0 of them key frames"):
        decoded(Video(frames=frames, **SMALL), spoil(encode(film(12), 12)))


def test_no_damage_escapes_as_another_error():
    data = encode(film(6, 64, 64), 6, "mpeg4")
    spec = Video(**SMALL)
    rng = np.random.default_rng(0)
    outcomes = set()
    for at in rng.integers(0, len(data), 150).tolist():
        broken = data[:at] + rng.bytes(6) + data[at + 6 :]
        try:
            decoded(spec, broken)
            outcomes.add("fine")
        except MediaFault:
            outcomes.add("fault")
    assert outcomes == {"fine", "fault"}


# -- specs ---------------------------------------------------------------------------------------


def test_a_missing_library_is_said_at_launch(tokenizer, monkeypatch):
    source = Source("clips", "clips/*.tar", sample=Video())
    assert isinstance(make_transform(source, tokenizer), VideoTransform)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(SpecError, match=r"'av'.*pip install .*\[media\]"):
        make_transform(source, tokenizer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_frames": 9, "max_frames": 8}, "min_frames: 9 is more than max_frames = 8"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "min_pixels: 9000 is more than max_pixels = 8000"),
        ({"min_pixels": 1, "max_pixels": 700}, "max_pixels: 700 is less than one token.*max_pixels=784"),
        ({"fps": 0}, "fps is 0: this must be at least 0.001"),
        ({"frames": "all"}, "frames is 'all': expected 'uniform' or 'key'"),
        ({"video_token": ""}, "video_token is ''.*tokenizer"),
    ],
)
def test_specs_say_what_is_wrong(fields, message):
    with pytest.raises(SpecError, match=message):
        Video(**fields)


def test_a_sample_may_be_written_as_a_mapping():
    for sample in ({"video": "clip"}, {"kind": "video", "video": "clip"}):
        assert Source("clips", "x", sample=sample).sample == Video("clip")


def test_a_context_without_room_for_a_clip_is_refused():
    source = Source("clips", "clips/*.tar", sample=Video())
    Job([source], tokenizer="t.json", batch=Batch(128, global_samples=1))
    with pytest.raises(SpecError, match="127 tokens are fewer than the 128 of the smallest clip of source 'clips'"):
        Job([source], tokenizer="t.json", batch=Batch(127, global_samples=1))
