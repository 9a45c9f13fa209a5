"""Sounds: features as Whisper has them, tokens as Qwen2-Audio counts them, lengths by the header, faults of a row."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import WhisperFeatureExtractor

from overlord.core.ragged import BAD_COLUMN, Ragged, take_rows
from overlord.core.samples import BAD, SOUNDS
from overlord.errors import SpecError
from overlord.job.specs import Audio, Source, audio_frames, audio_tokens
from overlord.transforms.samples.audio import AudioDecoder, AudioTransform, decode_sound, log_mel, resample, sound_size
from overlord.transforms.samples.per_sample import MediaFault
from overlord.transforms.samples.sample_kinds import make_transform
from overlord.transforms.samples.tokenize import TextTokenizer

RATE = 16000
WORDS = ["<unk>", "<|AUDIO|>", "<bos>", "<eos>", "one", "two", "three"]


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


def encode(sound, rate=RATE, kind="WAV") -> bytes:
    out = io.BytesIO()
    soundfile.write(out, sound, rate, format=kind)
    return out.getvalue()


def sine(seconds, rate=RATE, hertz=440.0):
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def sounds():
    rng = np.random.default_rng(0)
    return {
        "sweep": (0.5 * np.sin(np.cumsum(np.linspace(0.001, 3.0, 5 * RATE)))).astype(np.float32),
        "noise": rng.normal(0, 0.1, 2 * RATE + 77).astype(np.float32),
        "silence": np.zeros(RATE, np.float32),
        "short": rng.normal(0, 0.1, RATE // 10).astype(np.float32),
        "long": rng.normal(0, 0.1, 31 * RATE).astype(np.float32),
        "full": rng.normal(0, 0.1, 30 * RATE - 70).astype(np.float32),
    }


def rows_of(encoded, texts):
    return {
        "flac": Ragged.from_rows(encoded),
        "txt": Ragged.from_rows([text.encode() for text in texts]),
        BAD_COLUMN: np.zeros(len(encoded), np.bool_),
    }


def features(spec, data) -> np.ndarray:
    decoder = AudioDecoder(spec)
    samples, rate = sound_size(data)
    grid = np.array([int(audio_frames(spec, samples, rate)), spec.mels, spec.frames], np.int32)
    # One byte in: items lie wherever the ones before them end.
    place = np.full(int(decoder.item_bytes(grid[None])[0]) + 1, 0xAB, np.uint8)[1:]
    decoder.decode(memoryview(data), grid, 0, place)
    return place.copy().view(np.float32).reshape(spec.mels, spec.frames)


# -- features ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("name", list(sounds()))
def test_features_are_whispers(name, mels):
    extractor = WhisperFeatureExtractor(feature_size=mels)
    data = encode(sounds()[name], kind="FLAC")
    heard, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    expected = extractor(heard, sampling_rate=RATE, return_tensors="np", return_attention_mask=True)
    np.testing.assert_allclose(features(Audio(mels=mels), data), expected["input_features"][0], atol=1e-4)
    assert expected["attention_mask"].sum() == audio_frames(Audio(), len(heard), RATE)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_every_format_and_both_channels(kind):
    left, right = sine(0.8), sine(0.8, hertz=900.0)
    data = encode(np.stack([left, right], axis=1), kind=kind)
    both, _ = soundfile.read(io.BytesIO(data), dtype="float32")
    expected = WhisperFeatureExtractor()(both.mean(axis=1), sampling_rate=RATE, return_tensors="np")
    found = features(Audio(), data)
    np.testing.assert_allclose(found, expected["input_features"][0], atol=1e-4)
    assert np.abs(found - features(Audio(), encode(left, kind=kind))).max() > 0.1


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_other_rates_are_resampled(rate):
    count = rate + 137
    sound = sine(count / rate, rate)
    found = resample(sound, rate, RATE)
    assert len(found) == -(-count * RATE // rate)
    exact = 0.3 * np.sin(2 * np.pi * 440.0 * np.arange(len(found)) / RATE)
    np.testing.assert_allclose(found[200:-200], exact[200:-200], atol=1e-4)
    expected = WhisperFeatureExtractor()(found, sampling_rate=RATE, return_tensors="np", return_attention_mask=True)
    # 16 bits of a WAV are heard in the quiet bands; floats are not rounded.
    out = io.BytesIO()
    soundfile.write(out, sound, rate, format="WAV", subtype="FLOAT")
    np.testing.assert_allclose(features(Audio(), out.getvalue()), expected["input_features"][0], atol=1e-4)
    assert expected["attention_mask"].sum() == audio_frames(Audio(), count, rate)


def test_other_windows_and_rates_of_the_encoder():
    found = features(Audio(sample_rate=8000, seconds=2, mels=40), encode(sine(5.0, hertz=1000.0)))
    assert found.shape == (40, 200)
    band = found.mean(axis=1).argmax()
    # 1000 Hz is mel 15 of the slaney scale; 4000 Hz, the top, is mel 35.16.
    assert abs((band + 1) / 41 * 35.16 - 15.0) < 1.0
    assert (found.argmax(axis=0)[5:-5] == band).all()


def test_silence_after_the_sound_is_what_the_whole_window_would_give():
    sound = sounds()["noise"]
    padded = np.concatenate([sound, np.zeros(10 * RATE - len(sound), np.float32)])
    one, two = (log_mel(s, mels=80, sample_rate=RATE, frames=1000) for s in (sound, padded))
    np.testing.assert_array_equal(one, two)


def test_the_same_bytes_on_any_number_of_threads():
    data = [encode(sine(1.0 + i / 7, rate=44100, hertz=300.0 + 50 * i), rate=44100) for i in range(4)]
    spec = Audio(seconds=3)
    expected = [features(spec, one) for one in data]
    with ThreadPoolExecutor(4) as pool:
        for found, one in zip(pool.map(lambda i: features(spec, data[i % 4]), range(16)), expected * 4, strict=True):
            np.testing.assert_array_equal(found, one)


# -- lengths -------------------------------------------------------------------------------------


@given(st.integers(1, 40 * 48000), st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000]))
def test_frames_and_tokens_follow_the_published_rules(samples, rate):
    frames = int(audio_frames(Audio(), samples, rate))
    exact = min(-(-samples * RATE // rate), 30 * RATE)
    assert frames == len(range(0, exact, 160))  # one mask entry in 160 is kept
    length = (frames - 1) // 2 + 1
    assert audio_tokens(frames) == (length - 2) // 2 + 1
    assert audio_tokens(frames, 2) == length
    assert audio_tokens(frames) <= Audio().max_tokens == 750


def test_the_shortest_sound_with_a_token():
    for per in (2, 4, 8):
        spec = Audio(frames_per_token=per)
        assert audio_tokens([spec.min_frames - 1, spec.min_frames], per).tolist() == [0, 1]


def test_measuring_reads_headers_only(tokenizer, monkeypatch):
    spec = Audio(before="<bos>", after="<eos>")
    encoded = [encode(sine(1.0), kind="FLAC"), encode(sine(40.0, 44100), 44100), encode(sine(0.5), kind="OGG")]
    texts = ["one two", "three", ""]
    transform = AudioTransform(spec, tokenizer)

    def no_reading(*_args, **_options):
        raise AssertionError("a sound was decoded before planning")

    monkeypatch.setattr(soundfile.SoundFile, "read", no_reading)
    measured = transform.measure(rows_of(encoded, texts), None, np.arange(3, dtype=np.uint64))
    assert measured.faults == [] and not (measured.flags & BAD).any()
    assert measured.kept["media_length"].values.tolist() == [25, 750, 12]
    assert measured.kept["media_start"].values.tolist() == [1, 1, 1]
    assert measured.kept["media_grid"].values.reshape(-1, 3).tolist() == [[f, 80, 3000] for f in (100, 3000, 50)]
    assert measured.tokens.tolist() == [25 + 2 + 2, 750 + 2 + 1, 12 + 2 + 1]
    assert measured.image_tokens.tolist() == [25, 750, 12] and measured.images.tolist() == [1, 1, 1]
    assert (measured.flags & SOUNDS).all()
    done = transform.finish(measured.kept, measured.tokens, np.zeros(3, np.bool_), Here())
    assert done.media is not None and done.media.kind == "audio"


def test_finished_rows_have_their_planned_lengths(tokenizer):
    spec = Audio(before="<bos>", after="<eos>")
    transform = AudioTransform(spec, tokenizer)
    encoded = [encode(sine(s)) for s in (0.12, 0.2, 0.12, 0.12)]  # 3, 5, 3, 3 tokens
    seeds = np.arange(4, dtype=np.uint64)
    measured = transform.measure(rows_of(encoded, ["one two", "three", "", "one"]), None, seeds)
    kept = take_rows(measured.kept, np.array([3, 1, 0, 2]))
    planned = measured.tokens[[3, 1, 0, 2]] - [0, 7, 1, 0]  # the second loses its sound, the third a word
    done = transform.finish(kept, planned, np.zeros(4, np.bool_), Here())
    rows = [done.tokens[i].tolist() for i in range(4)]
    assert rows == [[2, 1, 1, 1, 3, 4], [2], [2, 1, 1, 1, 3, 4], [2, 1, 1, 1, 3, 0]]
    assert [done.loss[i].tolist() for i in range(4)] == [[0] * 5 + [1], [0], [0] * 5 + [1], [0] * 6]
    media = done.media
    assert media.kind == "audio" and media.encoded and np.diff(media.rows).tolist() == [1, 0, 1, 1]
    assert [bytes(media.data(i)) for i in range(3)] == [encoded[3], encoded[0], encoded[2]]
    assert media.seeds.tolist() == [3, 0, 2]


def test_known_text_lengths_are_believed_until_the_end(tokenizer):
    transform = AudioTransform(Audio(), tokenizer)
    measured = transform.measure(
        rows_of([encode(sine(0.12))] * 2, ["one two", "one two"]), np.array([2, 3]), np.zeros(2, np.uint64)
    )
    assert measured.tokens.tolist() == [5, 6]
    done = transform.finish(measured.kept, measured.tokens, np.zeros(2, np.bool_), Here())
    assert done.tokens.lengths.tolist() == [5, 6]
    assert [row for row, _ in done.wrong_lengths] == [1]


# -- faults --------------------------------------------------------------------------------------


def test_headers_that_make_no_sense_are_bad_rows(tokenizer):
    good = encode(sine(0.5), kind="FLAC")
    empty, tiny = encode(np.zeros(0, np.float32)), encode(sine(0.01))
    encoded = [good, b"no sound at all", good[:20], b"", empty, tiny]
    transform = AudioTransform(Audio(), tokenizer)
    measured = transform.measure(rows_of(encoded, ["one two"] * 6), None, np.zeros(6, np.uint64))
    assert (measured.flags & BAD).astype(bool).tolist() == [False] + [True] * 5
    assert [row for row, _ in measured.faults] == [1, 2, 3, 4, 5]
    reasons = dict(measured.faults)
    assert "no readable sound header" in reasons[1] and " at 0x" not in reasons[1]
    assert "empty" in reasons[4] and "too few for one token" in reasons[5]
    assert measured.kept["media_length"].values.tolist() == [12, 1, 1, 1, 1, 1]
    bad = (measured.flags & BAD) > 0
    done = transform.finish(measured.kept, measured.tokens, bad, Here())
    assert done.tokens.lengths.tolist() == measured.tokens.tolist()
    assert [int(done.loss[i].sum()) for i in range(6)] == [2, 0, 0, 0, 0, 0]
    assert done.media.bad.tolist() == bad.tolist()


@pytest.mark.parametrize("kind", ["FLAC", "MP3"])
def test_a_cut_body_is_found_when_it_is_decoded(kind):
    data = encode(sounds()["sweep"], kind=kind)
    cut = data[: len(data) // 2]
    assert sound_size(cut) == (5 * RATE, RATE)  # the header still promises all of it
    with pytest.raises(MediaFault, match=r"does not decode|only [0-9]+ decode"):
        features(Audio(), cut)


def test_values_that_are_no_numbers_are_a_fault():
    out = io.BytesIO()
    soundfile.write(out, np.full(RATE, np.nan, np.float32), RATE, format="WAV", subtype="FLOAT")
    with pytest.raises(MediaFault, match="no finite numbers"):
        decode_sound(out.getvalue(), sample_rate=RATE, seconds=30)


def test_only_the_window_of_a_long_sound_is_decoded(monkeypatch):
    data = encode(np.zeros(100 * RATE, np.float32), kind="FLAC")
    asked = []
    read = soundfile.SoundFile.read

    def counting(self, frames=-1, *args, **options):
        asked.append(frames)
        return read(self, frames, *args, **options)

    monkeypatch.setattr(soundfile.SoundFile, "read", counting)
    assert len(decode_sound(data, sample_rate=RATE, seconds=2)) == 2 * RATE == sum(asked)


# -- specs ---------------------------------------------------------------------------------------


def test_a_missing_library_is_said_at_launch(tokenizer, monkeypatch):
    source = Source("talks", "talks/*.tar", sample=Audio())
    assert isinstance(make_transform(source, tokenizer), AudioTransform)
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(SpecError, match=r"'soundfile'.*pip install .*\[media\]"):
        make_transform(source, tokenizer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sample_rate": 22050}, "sample_rate: 22050 is not a multiple of 200.*sample_rate=22000"),
        ({"frames_per_token": 3}, "frames_per_token: 3 is odd.*frames_per_token=4"),
        ({"mels": 0}, "mels is 0: this must be at least 1"),
        ({"audio_token": -1}, "audio_token is -1.*tokenizer"),
        ({"second": 3}, "second: unknown key.*Did you mean 'seconds'"),
    ],
)
def test_specs_say_what_is_wrong(fields, message):
    with pytest.raises(SpecError, match=message):
        Audio(**fields)


def test_a_sample_may_be_written_as_a_mapping():
    for sample in ({"audio": "wav", "text": "words"}, {"kind": "audio", "audio": "wav", "text": "words"}):
        assert Source("talks", "x", sample=sample).sample == Audio("wav", "words")
