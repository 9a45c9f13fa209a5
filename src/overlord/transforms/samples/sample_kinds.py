"""The transform of each kind of sample."""

from __future__ import annotations

from overlord.errors import SpecError
from overlord.job.specs import Audio, Chat, Custom, ImageText, Interleaved, Job, Source, Text, Video
from overlord.transforms.samples.audio import AudioTransform
from overlord.transforms.samples.chat import ChatTransform
from overlord.transforms.samples.custom import CustomTransform
from overlord.transforms.samples.image_text import ImageTextTransform, InterleavedTransform
from overlord.transforms.samples.per_sample import Isolate, SampleTransform
from overlord.transforms.samples.text import TextTransform
from overlord.transforms.samples.tokenize import TextTokenizer
from overlord.transforms.samples.video import VideoTransform


def reserve_placeholders(job: Job, tokenizer: TextTokenizer) -> None:
    """Keep the placeholder tokens of a job's media out of its texts, where no media would belong to them."""
    fields = ("image_token", "audio_token", "video_token")
    named: set[str | int | None] = {getattr(source.sample, f, None) for source in job.sources for f in fields}
    ids = {tokenizer.find(token) if isinstance(token, str) else token for token in named}
    tokenizer.reserve({found for found in ids if found is not None})


def make_transform(source: Source, tokenizer: TextTokenizer | None, isolate: Isolate | None = None) -> SampleTransform:
    """Return the transform for a source's sample spec.

    Args:
        source: The source.
        tokenizer: The job's tokenizer.
        isolate: Moves Python code that holds the interpreter lock into process workers; None runs it in the caller.
    """
    spec = source.sample
    if isinstance(spec, Custom):
        return CustomTransform(spec, isolate)
    if isinstance(spec, Text) and spec.tokenized:
        return TextTransform(spec, tokenizer)
    if tokenizer is None:
        raise SpecError(
            f"source {source.name!r}: its text must be tokenized, but the job has no tokenizer; set tokenizer= to a "
            "tokenizer.json, or give a column that holds token ids and Text(..., tokenized=True)."
        )
    if isinstance(spec, Chat):
        return ChatTransform(spec, tokenizer, isolate)
    if isinstance(spec, ImageText):
        return ImageTextTransform(spec, tokenizer)
    if isinstance(spec, Interleaved):
        return InterleavedTransform(spec, tokenizer)
    if isinstance(spec, Audio):
        return AudioTransform(spec, tokenizer)
    if isinstance(spec, Video):
        return VideoTransform(spec, tokenizer)
    return TextTransform(spec, tokenizer)
