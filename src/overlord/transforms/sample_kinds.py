"""Which transform each kind of sample asks for."""

from __future__ import annotations

from overlord.core.specs import Audio, Chat, Custom, ImageText, Interleaved, Source, Text, Video
from overlord.errors import SpecError
from overlord.transforms.audio import AudioTransform
from overlord.transforms.chat import ChatTransform
from overlord.transforms.custom import CustomTransform
from overlord.transforms.image_text import ImageTextTransform
from overlord.transforms.interleaved import InterleavedTransform
from overlord.transforms.isolation import Isolate
from overlord.transforms.per_sample import SampleTransform
from overlord.transforms.text import TextTransform
from overlord.transforms.tokenize import TextTokenizer
from overlord.transforms.video import VideoTransform


def make_transform(source: Source, tokenizer: TextTokenizer | None, isolate: Isolate | None = None) -> SampleTransform:
    """Return the transform that a source's sample spec asks for.

    Args:
        source: The source.
        tokenizer: The job's tokenizer.
        isolate: Brings Python code that holds the interpreter into process workers; None runs it in the caller.
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
