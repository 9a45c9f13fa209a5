"""Which tokens stand for images, clips and sounds in the text, and which ones a tokenizer has to put around them."""

from __future__ import annotations

from collections.abc import Sequence

from overlord.cli.sources import Opened
from overlord.job.specs import Audio, ImageSpec, Interleaved, Video
from overlord.transforms.samples.per_sample import Measured, ragged_column

_VISION = (("<|vision_start|>", "<|vision_end|>"), ("<|vision_bos|>", "<|vision_eos|>"))
_SOUND = (("<|audio_bos|>", "<|audio_eos|>"), ("<|audio_start|>", "<|audio_end|>"))
_NAMED = 4
"""Sources that are named where several are alike."""


def token_words(one: Opened) -> str | None:
    """Return which token stands for an image, clip or sound of a source, in words; None where it has none.

    Tokens may come from a processor folder, so that the job file alone does not tell them.
    """
    spec = one.source.sample
    if isinstance(spec, ImageSpec):
        token, what = spec.image_token, "an image"
    elif isinstance(spec, Video):
        token, what = spec.video_token, "a clip"
    elif isinstance(spec, Audio):
        token, what = spec.audio_token, "a sound"
    else:
        return None
    found = f"{_shown(one, token)} stands for {what}"
    if spec.before is not None and spec.after is not None:
        return f"{found}, between {_shown(one, spec.before)} and {_shown(one, spec.after)}"
    if spec.before is not None:
        return f"{found}, behind {_shown(one, spec.before)}"
    return found if spec.after is None else f"{found}, in front of {_shown(one, spec.after)}"


def tokens_told(opened: Sequence[Opened]) -> list[str]:
    """Return one line for all sources whose images, clips or sounds have the same tokens."""
    alike: dict[str, list[str]] = {}
    for one in opened:
        if (words := token_words(one)) is not None:
            alike.setdefault(words, []).append(one.source.name)
    return [
        f"{', '.join(names[:_NAMED])}{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''}: {words}"
        for words, names in alike.items()
    ]


def borders_left_out(one: Opened) -> tuple[str, str] | None:
    """Return the pair of tokens that the tokenizer has to stand around media, where a source uses no such tokens."""
    spec, tokenizer = one.source.sample, one.tokenizer
    if not isinstance(spec, (ImageSpec, Video, Audio)) or tokenizer is None:
        return None
    if spec.before is not None or spec.after is not None:
        return None
    pairs = _SOUND if isinstance(spec, Audio) else _VISION
    return next((pair for pair in pairs if all(tokenizer.find(token) is not None for token in pair)), None)


def has_borders(one: Opened, measured: Measured) -> bool:
    """Whether the text of measured rows itself has the tokens that `borders_left_out` names."""
    pair = borders_left_out(one)
    if pair is None or one.tokenizer is None or not isinstance(one.source.sample, Interleaved):
        return False
    return bool((ragged_column(measured.kept, "tokens").values == one.tokenizer.find(pair[0])).any())


def _shown(one: Opened, token: str | int) -> str:
    """Return a token by its text and its id, whichever of them the spec gives."""
    tokenizer = one.tokenizer
    if isinstance(token, int):
        written = "" if tokenizer is None else tokenizer.decode([token])
        return f"{written} (id {token})" if written else f"id {token}"
    found = None if tokenizer is None else tokenizer.find(token)
    return token if found is None else f"{token} (id {found})"
