"""Processor folders: what is read from them, and that a job takes over only what its user left open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2AudioProcessor, WhisperFeatureExtractor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from overlord.errors import SpecError
from overlord.job.specs import Audio, Batch, ImageText, Interleaved, Job, Source, Text, Video, image_grid
from overlord.runtimes.launching.deployment import media_shape
from overlord.runtimes.launching.resume import canonical
from overlord.transforms.samples.processor import ProcessorFacts, fill_from_processor, read_processor

QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
SOUND = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]


def write_tokenizer(folder: Path, special: list[str], **named: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.save_pretrained(folder)
    return fast


def job_of(*samples: Any) -> Job:
    sources = [Source(f"s{n}", "x", sample=sample) for n, sample in enumerate(samples)]
    return Job(sources, tokenizer="folder", batch=Batch(8192, global_samples=4))


# ---- reading


def test_an_image_processor_as_transformers_saves_it(tmp_path: Path) -> None:
    theirs = Qwen2VLImageProcessorPil(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 256)
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, QWEN)
    facts = read_processor(tmp_path)
    assert (facts.patch, facts.merge, facts.temporal_patch) == (14, 2, 2)
    assert (facts.min_pixels, facts.max_pixels) == (28 * 28 * 4, 28 * 28 * 256)
    assert (facts.image_token, facts.video_token) == ("<|image_pad|>", "<|video_pad|>")
    assert (facts.vision_start, facts.vision_end) == ("<|vision_start|>", "<|vision_end|>")
    assert facts.mels is facts.sampling_rate is facts.audio_token is None


def test_the_old_keys_of_an_image_processor(tmp_path: Path) -> None:
    config = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    edges = {"shortest_edge": 1, "longest_edge": 2}  # the plain keys win, as in transformers
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config | {"size": edges}))
    facts = read_processor(str(tmp_path))
    assert (facts.patch, facts.min_pixels, facts.max_pixels) == (14, 3136, 12845056)
    # Such a folder has no file for clips: its images' limits hold for frames too.
    assert (facts.video_min_pixels, facts.video_max_pixels) == (3136, 12845056)
    assert facts.image_token is None


@pytest.mark.parametrize("mels", [80, 128])
def test_a_feature_extractor_as_transformers_saves_it(tmp_path: Path, mels: int) -> None:
    WhisperFeatureExtractor(feature_size=mels, chunk_length=20).save_pretrained(tmp_path)
    facts = read_processor(tmp_path)
    assert (facts.mels, facts.sampling_rate, facts.chunk_seconds) == (mels, 16000, 20)
    assert facts.patch is facts.min_pixels is None


def test_a_whole_processor_as_transformers_saves_it(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, SOUND)
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer).save_pretrained(tmp_path)
    facts = read_processor(tmp_path)
    assert (facts.mels, facts.chunk_seconds, facts.audio_token) == (128, 30, "<|AUDIO|>")
    assert (facts.audio_start, facts.audio_end) == ("<|audio_bos|>", "<|audio_eos|>")


def test_parts_inside_one_file_and_limits_of_whole_clips(tmp_path: Path) -> None:
    image = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    clip = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    whole = {"image_processor": image, "video_processor": image | clip | {"fps": 2, "min_frames": 4, "max_frames": 768}}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    facts = read_processor(tmp_path)
    assert (facts.patch, facts.min_pixels, facts.max_pixels) == (16, 65536, 16777216)
    assert (facts.fps, facts.min_frames, facts.max_frames) == (2.0, 4, 768)
    assert facts.video_min_pixels is facts.video_max_pixels is None  # they bound a clip, not a frame


def test_a_file_of_its_own_for_clips(tmp_path: Path) -> None:
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "preprocessor_config.json").read_text())
    size = {"shortest_edge": 100352, "longest_edge": 602112}
    clip = config | {"video_processor_type": "Qwen2VLVideoProcessor", "size": size, "fps": 1.5}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(clip))
    facts = read_processor(tmp_path)
    assert (facts.video_min_pixels, facts.video_max_pixels, facts.fps) == (100352, 602112, 1.5)
    assert (facts.min_pixels, facts.max_pixels) == (56 * 56, 28 * 28 * 1280)


def test_sides_are_not_taken_for_areas(tmp_path: Path) -> None:
    config = {"size": {"shortest_edge": 800, "longest_edge": 1333}, "patch_size": {"height": 16, "width": 16}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    facts = read_processor(tmp_path)
    assert facts.patch == 16 and facts.min_pixels is facts.max_pixels is None


def test_raw_waveforms_have_no_mel_bands(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"feature_size": 1, "sampling_rate": 16000}')
    assert read_processor(tmp_path) == ProcessorFacts()


def test_tokens_named_but_unknown_to_the_tokenizer_are_left_out(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<img>", "<image>"], image_token="<img>")
    (tmp_path / "processor_config.json").write_text('{"audio_token": "<|AUDIO|>"}')
    facts = read_processor(tmp_path)
    assert (facts.image_token, facts.video_token, facts.audio_token) == ("<img>", None, None)


def test_no_folder_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_processor(tmp_path / "tokenizer.json") == read_processor(tmp_path / "gone") == ProcessorFacts()
    assert read_processor(tmp_path) == ProcessorFacts()


def test_a_broken_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{,")
    with pytest.raises(SpecError, match=r"preprocessor_config.json.* is not JSON"):
        read_processor(tmp_path)


# ---- filling

FACTS = ProcessorFacts(
    patch=14, merge=2, temporal_patch=2, min_pixels=3136, max_pixels=200704, video_min_pixels=100352,
    video_max_pixels=602112, fps=1.0, max_frames=64, mels=128, sampling_rate=8000, chunk_seconds=20,
    image_token="<|image_pad|>", video_token="<|video_pad|>", audio_token="<|AUDIO|>", vision_start="<|vision_start|>",
    vision_end="<|vision_end|>", audio_start="<|audio_bos|>",
)  # fmt: skip


def test_open_fields_are_filled_for_every_kind() -> None:
    text, image, parts, clip, sound = (
        s.sample
        for s in fill_from_processor(job_of(Text(), ImageText(), Interleaved(), Video(), Audio()), FACTS).sources
    )
    assert text == Text()
    for spec in (image, parts, clip):
        assert (spec.patch, spec.merge, spec.temporal) == (14, 2, 2)
        assert (spec.before, spec.after) == ("<|vision_start|>", "<|vision_end|>")
    assert (image.min_pixels, image.max_pixels, image.image_token) == (3136, 200704, "<|image_pad|>")
    assert (clip.min_pixels, clip.max_pixels, clip.video_token) == (100352, 602112, "<|video_pad|>")
    assert (clip.fps, clip.min_frames, clip.max_frames) == (1.0, 4, 64)
    assert (sound.sample_rate, sound.mels, sound.seconds, sound.audio_token) == (8000, 128, 20, "<|AUDIO|>")
    assert (sound.before, sound.after) == ("<|audio_bos|>", None)


def test_what_was_given_stays_even_where_it_is_the_default() -> None:
    given = ImageText("png", patch=16, merge=1, image_token="<image>", before=None)
    (source,) = fill_from_processor(job_of(given), FACTS).sources
    spec = source.sample
    assert (spec.image, spec.patch, spec.merge, spec.image_token, spec.before) == ("png", 16, 1, "<image>", None)
    assert (spec.temporal, spec.max_pixels, spec.after) == (2, 200704, "<|vision_end|>")


def test_specs_from_job_files_are_filled_too() -> None:
    (source,) = fill_from_processor(job_of({"image_text": {"image": "png", "merge": 1}}), FACTS).sources
    assert (source.sample.patch, source.sample.merge) == (14, 1)


def test_filling_changes_nothing_else_and_not_twice() -> None:
    job = job_of(Text(), ImageText(patch=16)).replace(seed=9)
    filled = fill_from_processor(job, FACTS)
    assert job.sources[1].sample == ImageText(patch=16)  # the job itself is as it was
    assert filled.sources[0] is job.sources[0] and filled.replace(sources=job.sources) == job
    assert fill_from_processor(filled, FACTS) is filled
    assert fill_from_processor(job, ProcessorFacts()) is job


def test_borders_of_images_need_a_processor_that_opens_images() -> None:
    tokens = ProcessorFacts(image_token="<|image_pad|>", vision_start="<|vision_start|>")
    (source,) = fill_from_processor(job_of(ImageText()), tokens).sources
    assert (source.sample.image_token, source.sample.before) == ("<|image_pad|>", None)


def test_what_does_not_go_together_names_the_source_and_the_folder() -> None:
    with pytest.raises(SpecError, match=r"source 's0', with what the processor folder says \(.*max_pixels=200704"):
        fill_from_processor(job_of(ImageText(min_pixels=10**6)), FACTS)


def test_a_filled_job_counts_the_patches_of_the_processor_itself(tmp_path: Path) -> None:
    theirs = Qwen2VLImageProcessorPil(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 64)
    theirs.save_pretrained(tmp_path)
    (source,) = fill_from_processor(job_of(ImageText()), read_processor(tmp_path)).sources
    for width, height in ((640, 480), (20, 30), (333, 77)):
        image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
        grid = theirs(image, return_tensors="np")["image_grid_thw"][0]
        rows, cols = image_grid(source.sample, [width], [height])
        assert (rows[0], cols[0]) == (grid[1], grid[2])


# ---- what images and clips of a job share


def patches_of(*samples: Any) -> list[tuple[int, int, int]]:
    return [(s.sample.patch, s.sample.merge, s.sample.temporal) for s in canonical(job_of(*samples)).sources]


def test_images_and_clips_of_a_job_have_the_same_patches_unless_they_are_told_otherwise() -> None:
    assert patches_of(ImageText(), Interleaved()) == [(16, 1, 1)] * 2  # as without clips
    assert patches_of(Video()) == [(14, 2, 2)]
    assert patches_of(ImageText(), Video(), Interleaved()) == [(14, 2, 2)] * 3
    assert patches_of(ImageText(patch=16), Video()) == [(16, 2, 2)] * 2
    assert patches_of(Interleaved(), ImageText(patch=14, merge=2)) == [(14, 2, 1)] * 2
    assert patches_of(ImageText(temporal=1), Video(temporal=2)) == [(14, 2, 1), (14, 2, 2)]
    assert media_shape(canonical(job_of(ImageText(), Video(), Text()))).patch_bytes == 3 * 2 * 14 * 14
    with pytest.raises(SpecError, match=r"image patches of different kinds .*temporal=1 in .*temporal=2 in"):
        media_shape(canonical(job_of(ImageText(temporal=1), Video(temporal=2))))


def test_shared_patches_do_not_change_again_when_a_source_comes() -> None:
    running = canonical(job_of(ImageText()))
    more = canonical(running.replace(sources=[*running.sources, Source("clips", "clips/*.tar", sample=Video())]))
    assert {(s.sample.patch, s.sample.merge, s.sample.temporal) for s in more.sources} == {(16, 1, 1)}


def test_a_size_that_does_not_fit_the_patches_of_the_clips_is_told() -> None:
    with pytest.raises(SpecError, match=r"with what the images and clips of one job have in common \(.*merge=2.*size"):
        canonical(job_of(ImageText(size=240), Video()))
