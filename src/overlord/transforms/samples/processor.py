"""The settings of a Hugging Face processor folder for images, clips and sounds, and how a job uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from overlord.errors import SpecError
from overlord.job.specs import Audio, ImageSpec, Job, Source, Spec, Video
from overlord.transforms.samples.tokenize import read_json, special_token_names

_KNOWN_TOKENS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "image_token": (("image_token",), ("<|image_pad|>", "<image>", "<|image|>", "<image_soft_token>")),
    "video_token": (("video_token",), ("<|video_pad|>", "<video>", "<|video|>")),
    "audio_token": (("audio_token",), ("<|AUDIO|>", "<|audio_pad|>", "<|audio|>")),
    "vision_start": (("vision_start_token", "vision_bos_token"), ("<|vision_start|>", "<|vision_bos|>")),
    "vision_end": (("vision_end_token", "vision_eos_token"), ("<|vision_end|>", "<|vision_eos|>")),
    "audio_start": (("audio_bos_token",), ("<|audio_bos|>", "<|audio_start|>")),
    "audio_end": (("audio_eos_token",), ("<|audio_eos|>", "<|audio_end|>")),
}
"""For each token: the keys that may name it, and how it is usually written."""

_PATCHES = ("patch", "merge", "temporal")
"""What all images and clips of a batch have in common."""

_FRAME_LIMITS = "Qwen2"
"""Prefix of the video processors with a size limit per frame, as in Video; others limit the whole clip."""


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """What a processor folder says; None where it says nothing."""

    patch: int | None = None
    """Side of a patch in pixels."""
    merge: int | None = None
    """merge x merge patches become one token."""
    temporal_patch: int | None = None
    """Frames in a patch."""
    min_pixels: int | None = None
    """Smaller images are enlarged."""
    max_pixels: int | None = None
    """Larger images are shrunk."""
    video_min_pixels: int | None = None
    """Smaller frames of a clip are enlarged."""
    video_max_pixels: int | None = None
    """Larger frames of a clip are shrunk."""
    fps: float | None = None
    """Frames sampled from a second of a clip."""
    min_frames: int | None = None
    """Fewest frames that are sampled."""
    max_frames: int | None = None
    """Most frames that are sampled."""
    mels: int | None = None
    """Mel bands of a sound."""
    sampling_rate: int | None = None
    """Samples of a second of sound."""
    chunk_seconds: int | None = None
    """Seconds that a sound is cut or padded to."""
    image_token: str | None = None
    """Placeholder token of images."""
    video_token: str | None = None
    """Placeholder token of clips."""
    audio_token: str | None = None
    """Placeholder token of sounds."""
    vision_start: str | None = None
    """Token in front of an image or clip."""
    vision_end: str | None = None
    """Token after an image or clip."""
    audio_start: str | None = None
    """Token in front of a sound."""
    audio_end: str | None = None
    """Token after a sound."""


def read_processor(folder: str | PathLike[str]) -> ProcessorFacts:
    """Return what a Hugging Face folder says about images, clips and sounds; nothing where it is no folder.

    Raises:
        SpecError: when one of its files is not JSON.
    """
    path = Path(folder)
    if not path.is_dir():
        return ProcessorFacts()
    plain, whole = read_json(path / "preprocessor_config.json"), read_json(path / "processor_config.json")
    image = _part(whole, "image_processor") or plain
    video = _part(whole, "video_processor") or read_json(path / "video_preprocessor_config.json") or image
    sound = _part(whole, "feature_extractor") or plain
    min_pixels, max_pixels = _pixel_limits(image)
    per_frame = str(video.get("video_processor_type", _FRAME_LIMITS)).startswith(_FRAME_LIMITS)
    frame_min, frame_max = _pixel_limits(video) if per_frame else (None, None)
    fps = video.get("fps")
    if "sampling_rate" not in sound or "hop_length" not in sound:  # no sound, or taken as it is, without a spectrum
        sound = {}
    places = (image, video, whole)
    return ProcessorFacts(
        patch=_first_whole(places, "patch_size"),
        merge=_first_whole(places, "merge_size", "spatial_merge_size"),
        temporal_patch=_first_whole(places, "temporal_patch_size"),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        video_min_pixels=frame_min,
        video_max_pixels=frame_max,
        fps=float(fps) if isinstance(fps, int | float) and not isinstance(fps, bool) else None,
        min_frames=_first_whole((video,), "min_frames"),
        max_frames=_first_whole((video,), "max_frames"),
        mels=_first_whole((sound,), "num_mel_bins", "feature_size"),
        sampling_rate=_first_whole((sound,), "sampling_rate"),
        chunk_seconds=_first_whole((sound,), "chunk_length"),
        **_tokens(path, whole),
    )


def fill_from_processor(job: Job, facts: ProcessorFacts) -> Job:
    """Return the job with what its image, video and audio samples leave open taken from a processor.

    A field that was given explicitly stays as it is.

    Example:
        >>> from overlord.job.specs import Batch, ImageText
        >>> photos = Source("photos", "photos/*.tar", sample=ImageText(merge=1))
        >>> job = Job([photos], tokenizer="folder", batch=Batch(4096, global_samples=8))
        >>> fill_from_processor(job, ProcessorFacts(patch=14, merge=2)).sources[0].sample
        ImageText('jpg', 'txt', patch=14)

    Raises:
        SpecError: when what was given does not go with what the processor says.
    """
    said = "what the processor folder says"
    return _with_sources(job, [_filled(one, _fields_for(one.sample, facts), said) for one in job.sources])


def share_patches(job: Job) -> Job:
    """Return the job with one patch, merge and temporal for all its images and clips, where they leave them open.

    A batch holds patches of one kind, for one vision encoder. What one source gives holds for all that leave it open.
    What none gives is the default of clips in a job that has clips, else that of images. Sources that were given
    different values keep them; launching refuses the job.

    Example:
        >>> from overlord.job.specs import Batch, ImageText
        >>> samples = {"photos": ImageText(patch=16), "clips": Video()}
        >>> sources = [Source(name, f"{name}/*.tar", sample=sample) for name, sample in samples.items()]
        >>> shared = share_patches(Job(sources, tokenizer="folder", batch=Batch(4096, global_samples=8)))
        >>> [(one.sample.patch, one.sample.merge, one.sample.temporal) for one in shared.sources]
        [(16, 2, 2), (16, 2, 2)]

    Raises:
        SpecError: when what was given of a source does not go with what the others say.
    """
    vision = [one.sample for one in job.sources if isinstance(one.sample, (ImageSpec, Video))]
    kind = Video if any(isinstance(spec, Video) for spec in vision) else ImageSpec
    shared: dict[str, Any] = {}
    for name in _PATCHES:
        given = {getattr(spec, name) for spec in vision if name in spec.model_fields_set}
        if len(given) < 2:
            shared[name] = given.pop() if given else kind.model_fields[name].default
    said = "what the images and clips of one job have in common"
    return _with_sources(
        job,
        [_filled(one, shared, said) if isinstance(one.sample, (ImageSpec, Video)) else one for one in job.sources],
    )


def _with_sources(job: Job, sources: list[Source]) -> Job:
    if all(new is old for new, old in zip(sources, job.sources, strict=True)):
        return job
    return job.replace(sources=tuple(sources))


def _filled(source: Source, values: Mapping[str, Any], origin: str) -> Source:
    """Return a source with the fields that its sample leaves open; errors name the `origin` of the values."""
    spec = source.sample
    given = spec.model_fields_set
    open_fields = type(spec).model_fields.keys() - given
    changes = {n: v for n, v in values.items() if v is not None and n in open_fields}
    if not changes:
        return source
    try:
        # Built from the given fields, so that these can still be told from the filled ones.
        filled = type(spec)(**{name: getattr(spec, name) for name in given}, **changes)
    except SpecError as error:
        said = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        raise SpecError(f"source {source.name!r}, with {origin} ({said}): {error}") from error
    return source.model_copy(update={"sample": filled})


def _fields_for(spec: Spec, facts: ProcessorFacts) -> dict[str, Any]:
    if isinstance(spec, Audio):
        around = {"before": facts.audio_start, "after": facts.audio_end} if facts.mels else {}
        return around | {
            "sample_rate": facts.sampling_rate,
            "mels": facts.mels,
            "seconds": facts.chunk_seconds,
            "audio_token": facts.audio_token,
        }
    # Many text tokenizers have these tokens too; they matter only in a folder with an image processor.
    borders = {"before": facts.vision_start, "after": facts.vision_end} if facts.patch else {}
    vision: dict[str, Any] = borders | {"patch": facts.patch, "merge": facts.merge, "temporal": facts.temporal_patch}
    if isinstance(spec, Video):
        return vision | {
            "min_pixels": facts.video_min_pixels,
            "max_pixels": facts.video_max_pixels,
            "fps": facts.fps,
            "min_frames": facts.min_frames,
            "max_frames": facts.max_frames,
            "video_token": facts.video_token,
        }
    if isinstance(spec, ImageSpec):
        return vision | {
            "min_pixels": facts.min_pixels,
            "max_pixels": facts.max_pixels,
            "image_token": facts.image_token,
        }
    return {}


# -- the files of a folder -----------------------------------------------------------------------


def _part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _pixel_limits(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    size = _part(config, "size")
    limits = [_first_whole((config, size), name) for name in ("min_pixels", "max_pixels")]
    if "merge_size" in config:  # of other processors, the same keys are sides in pixels and not areas
        edges = [_first_whole((size,), name) for name in ("shortest_edge", "longest_edge")]
        limits = [edge if limit is None else limit for limit, edge in zip(limits, edges, strict=True)]
    return limits[0], limits[1]


def _tokens(folder: Path, whole: Mapping[str, Any]) -> dict[str, Any]:
    named = special_token_names(folder) | {
        key: token
        for key, value in whole.items()
        if isinstance(token := value.get("content") if isinstance(value, dict) else value, str)
    }
    added = {str(one.get("content")) for one in read_json(folder / "tokenizer.json").get("added_tokens") or ()}
    found: dict[str, Any] = {}
    for field, (keys, usual) in _KNOWN_TOKENS.items():
        candidates = [named[key] for key in keys if key in named] + list(usual)
        # A processor saves its default names, whether or not its tokenizer has these tokens.
        found[field] = next((token for token in candidates if token in added), None)
    return found


def _first_whole(configs: tuple[Mapping[str, Any], ...], *names: str) -> int | None:
    for config in configs:
        for name in names:
            value = config.get(name)
            if isinstance(value, Mapping):  # {"height": 14, "width": 14}
                sides = set(value.values())
                value = sides.pop() if len(sides) == 1 else None
            if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value):
                return int(value)
    return None
