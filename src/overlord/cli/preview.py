"""Previews of samples: text and small pictures in the terminal, or one HTML page."""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as Words

from overlord.cli.sources import Opened, OpenSource, first_rows, token_words
from overlord.core.ragged import Ragged, RowBatch
from overlord.core.samples import BAD, SKIP, SOUNDS, SampleId
from overlord.job.specs import Audio, Chat, Custom, ImageChat, ImageSpec, Interleaved, Text, Video
from overlord.reports.pages import render_file
from overlord.reports.summary import number, size
from overlord.roles.source_loader import fit_context
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.transforms.samples.audio import sound_size
from overlord.transforms.samples.images import decode_image, is_turned
from overlord.transforms.samples.per_sample import Bools, Finished, Int64s, Measured, MediaFault, no_seeds
from overlord.transforms.samples.tokenize import TextTokenizer
from overlord.transforms.samples.video import read_clip

# --------------------------------------------------------------------------------------------------------------
# Images, clips and sounds as a person looks at them: a picture of each, and what its header says.


Pixels = npt.NDArray[np.uint8]

_SOUND_PICTURE = (320, 160)
"""Width and height of a sound's picture, however long it is."""
_DARK, _MIDDLE, _BRIGHT = (24, 16, 64), (204, 71, 120), (255, 244, 170)
"""Colours of silence, of speech and of the loudest parts of a sound."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, clip or sound of a sample."""

    kind: str
    """"image", "video" or "audio"."""
    words: str
    """What it is, in a few words."""
    picture: Pixels | None = None
    """The image, the clip's first frame, or the sound's mel bands over time; None where it does not decode."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """The same for a program."""


@dataclass(frozen=True, slots=True)
class OpenItem:
    """An item of a row, decoded as a run would decode it."""

    row: int
    kind: str
    data: memoryview
    """As it was read."""
    grid: npt.NDArray[np.int32]
    decoded: Pixels
    """As a batch takes it."""
    fault: str | None
    """Why it does not decode."""


def decode_items(one: Opened, measured: Measured, planned: Int64s, left_out: Bools) -> Iterator[OpenItem]:
    """Decode the media of measured rows one after the other, each into the same memory.

    Args:
        one: The source.
        measured: Its rows.
        planned: Tokens of each row that are delivered; items behind them are passed over.
        left_out: Rows that are passed over, beside the bad ones.
    """
    decoder = one.transform.decoder
    bad = ((measured.flags & BAD) > 0) | left_out
    media = None if decoder is None else one.transform.finish(measured.kept, planned, bad, SerialWorkers()).media
    if decoder is None or media is None:
        return
    sizes = decoder.item_bytes(media.grids)
    scratch = np.empty(int(sizes.max(initial=0)), np.uint8)
    many = isinstance(one.source.sample, (Interleaved, ImageChat))
    rows = np.repeat(np.arange(len(media.rows) - 1), np.diff(media.rows)).tolist()
    for item, row in enumerate(rows):
        if media.bad[item]:
            continue
        place, fault = scratch[: int(sizes[item])], None
        try:
            decoder.decode(media.data(item), media.grids[item], int(media.seeds[item]), place)
        except MediaFault as error:
            which = f"{media.kind} {item - int(media.rows[row])}: " if many else ""
            fault = f"{which}{error}"
        yield OpenItem(row, media.kind, media.data(item), media.grids[item], place, fault)


def stays_turned(one: Opened, item: OpenItem) -> bool:
    """Whether an image is delivered as it is stored, although its EXIF data say how to turn it."""
    spec = one.source.sample
    return (
        item.kind == "image"
        and isinstance(spec, ImageSpec)
        and not spec.exif_transpose
        and is_turned(item.data, spec.formats)
    )


def look_at(one: Opened, item: OpenItem) -> MediaItem:
    """Return an item for a person to look at; one that does not decode has no picture."""
    look = {"image": _look_at_image, "video": _look_at_clip, "audio": _look_at_sound}[item.kind]
    return look(one, item)


def _look_at_image(one: Opened, item: OpenItem) -> MediaItem:
    if item.fault is not None:
        return MediaItem("image", "image")
    spec = one.source.sample
    assert isinstance(spec, ImageSpec)  # no other kind of sample gives images
    pixels = decode_image(item.data, spec.formats, upright=spec.exif_transpose)
    height, width = pixels.shape[:2]
    turned = ", as stored: its EXIF data would turn it" if stays_turned(one, item) else ""
    return MediaItem("image", f"image {width}×{height}{turned}", pixels, {"size": [width, height]})


def _look_at_clip(one: Opened, item: OpenItem) -> MediaItem:
    spec = one.source.sample
    assert isinstance(spec, Video)  # no other kind of sample gives clips
    clip = read_clip(item.data, key_frames=spec.frames == "key")
    groups, rows, cols = (int(side) for side in item.grid)
    seconds, taken = clip.frames / clip.rate, groups * spec.temporal
    facts = {
        "size": [clip.width, clip.height],
        "seconds": round(seconds, 3),
        "frames": clip.frames,
        "fps": round(clip.rate, 3),
        "sampled_frames": taken,
        "sampled_size": [cols * spec.patch, rows * spec.patch],
    }
    words = (
        f"clip {clip.width}×{clip.height}, {seconds:.1f} s at {clip.rate:g} fps, {taken} of {clip.frames} frames at "
        f"{cols * spec.patch}×{rows * spec.patch}"
    )
    picture = None if item.fault is not None else first_frame(item.decoded, item.grid, spec)
    return MediaItem("video", words, picture, facts)


def _look_at_sound(one: Opened, item: OpenItem) -> MediaItem:
    spec = one.source.sample
    assert isinstance(spec, Audio)  # no other kind of sample gives sounds
    samples, rate = sound_size(item.data)
    seconds = samples / rate
    cut = f", cut to {spec.seconds} s" if seconds > spec.seconds else ""
    facts = {"seconds": round(seconds, 3), "sample_rate": rate, "frames": int(item.grid[0]), "mels": spec.mels}
    words = f"sound {seconds:.1f} s at {rate:,} Hz{cut}, {int(item.grid[0])} frames of {spec.mels} mel bands"
    picture = None
    if item.fault is None:
        mel = item.decoded.view(np.float32).reshape(spec.mels, -1)
        drawn = Image.fromarray(mel_picture(mel[:, : int(item.grid[0])]))
        picture = np.asarray(drawn.resize(_SOUND_PICTURE, Image.Resampling.BILINEAR))
    return MediaItem("audio", words, picture, facts)


def first_frame(patches: Pixels, grid: npt.NDArray[np.integer], spec: Video | ImageSpec) -> Pixels:
    """Return an image, or the first sampled frame of a clip, put together from its patches: [height, width, 3]."""
    groups, rows, cols = (int(side) for side in grid)
    merge, patch = spec.merge, spec.patch
    cut = patches.reshape(groups, rows // merge, cols // merge, merge, merge, 3, spec.temporal, patch, patch)
    whole = cut[0, ..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4)
    return np.ascontiguousarray(whole).reshape(rows * patch, cols * patch, 3)


def mel_picture(mel: npt.NDArray[np.float32]) -> Pixels:
    """Return mel bands over time as a picture: time to the right, high tones on top, loud is bright.

    Example:
        >>> mel_picture(np.array([[0.0, 1.0], [0.5, 0.0]], np.float32))[..., 0].tolist()
        [[204, 24], [24, 255]]
    """
    low, high = float(mel.min()), float(mel.max())
    share = (mel[::-1] - low) / ((high - low) or 1.0)
    stops = np.array([_DARK, _MIDDLE, _BRIGHT], np.float64)
    colours = [np.interp(share, (0.0, 0.5, 1.0), stops[:, channel]) for channel in range(3)]
    return np.rint(np.stack(colours, axis=-1)).astype(np.uint8)


# --------------------------------------------------------------------------------------------------------------
# The text of a sample as a model is trained on it: decoded tokens, with placeholders counted and the loss marked.


_SHOWN_IDS = 24
_FIRST_TOKENS, _LAST_TOKENS = 2000, 48
"""Tokens of a sample that are decoded, an image's placeholders counted as one: as many as a page shows."""
GAP = " … "
"""Stands for the middle of a text that is too long to be shown."""

Spans = tuple[tuple[int, int], ...]
"""(first character, one behind the last) of parts of a text."""


@dataclass(frozen=True, slots=True)
class ShownText:
    """What is shown of a sample's text."""

    text: str
    spans: Spans = ()
    """The parts that count in the loss, where only parts do."""
    turns: int | None = None
    """Messages of a conversation."""


def shown_texts(one: Opened, rows: RowBatch, measured: Measured, done: Finished) -> list[ShownText]:
    """Return the text of finished rows; of bad and empty ones, which nothing is trained on, as it was read."""
    spec, found = one.source.sample, list[ShownText]()
    ids_only = one.tokenizer is None or has_ids_only(spec)
    nothing = (measured.flags & (BAD | SKIP)) > 0
    for row in range(len(measured.tokens)):
        tokens = done.tokens[row]
        if ids_only:
            found.append(ShownText(shown_ids(tokens.tolist())))
            continue
        raw = _raw_text(one, rows, row)
        turns = _turns(raw) if isinstance(spec, Chat) else None
        if nothing[row]:
            found.append(ShownText(raw, turns=turns))
            continue
        assert one.tokenizer is not None  # or only ids are shown
        text, spans = written_tokens(one.tokenizer, tokens, done.loss[row], _items(done, row))
        # Of other samples all text counts, or all but what the tokens of media are.
        found.append(ShownText(text, spans if isinstance(spec, Chat) else (), turns))
    return found


def has_ids_only(spec: object) -> bool:
    """Whether the token ids of a sample need not be those of the job's tokenizer."""
    return isinstance(spec, Custom) or (isinstance(spec, Text) and spec.tokenized)


def written_tokens(
    tokenizer: TextTokenizer,
    ids: npt.NDArray[np.integer],
    loss: npt.NDArray[np.integer],
    items: Sequence[tuple[int, int]],
) -> tuple[str, Spans]:
    """Return tokens as text, the placeholders of an item as "[<image> x 64]", and which parts count in the loss.

    Args:
        tokenizer: Knows the tokens.
        ids: The tokens.
        loss: Whether each counts in the loss.
        items: First placeholder and number of placeholders of every image, clip and sound, in order.
    """
    kept = np.ones(len(ids), np.bool_)
    for start, length in items:
        kept[start + 1 : start + length] = False
    at = np.flatnonzero(kept)
    gap = _FIRST_TOKENS if len(at) > _FIRST_TOKENS + _LAST_TOKENS else None
    at = at if gap is None else np.concatenate([at[:_FIRST_TOKENS], at[-_LAST_TOKENS:]])
    short, counts = ids[at].tolist(), (loss[at] > 0).astype(np.int8)
    edges = np.flatnonzero(np.diff(counts, prepend=0, append=0)).tolist()
    pairs = list(zip(edges[::2], edges[1::2], strict=True))
    spots = [(int(np.searchsorted(at, start)), length) for start, length in items if start in at]
    # Where a token's text ends is only known from the tokens before it: some decoders join words by blanks.
    gaps = [] if gap is None else [gap]
    borders = sorted({0, len(short), *edges, *gaps, *(spot + more for spot, _ in spots for more in (0, 1))})
    place = {border: len(tokenizer.decode(short[:border])) for border in borders}
    whole, counted = tokenizer.decode(short), dict(spots)
    parts: list[str] = []
    moved: dict[int, int] = {}
    size = 0
    for begin, end in zip(borders, [*borders[1:], len(short)], strict=True):
        part = whole[place[begin] : place[end]]
        if begin in counted and begin < end:
            token = part.strip()
            part = part.replace(token, f"[{token or 'placeholder'} x {counted[begin]}]", 1)
        if begin == gap:
            part = GAP + part
        moved[begin] = size
        parts.append(part)
        size += len(part)
    moved[len(short)] = size
    spans = () if counts.all() else tuple((moved[a], moved[b]) for a, b in pairs)
    return "".join(parts), spans


def _items(done: Finished, row: int) -> list[tuple[int, int]]:
    media = done.media
    if media is None:
        return []
    chosen = slice(int(media.rows[row]), int(media.rows[row + 1]))
    return list(zip(media.start[chosen].tolist(), media.length[chosen].tolist(), strict=True))


def _raw_text(one: Opened, rows: RowBatch, row: int) -> str:
    spec = one.source.sample
    assert not isinstance(spec, Custom)  # its rows are whatever its function takes
    if isinstance(spec, Interleaved):
        text = _bytes_of(rows, spec.parts or spec.text, row)
        return text if spec.parts is None else _join_parts(text, spec.marker)
    if isinstance(spec, Chat):
        return _bytes_of(rows, spec.messages, row)
    return _bytes_of(rows, spec.column if isinstance(spec, Text) else spec.text, row)


def _turns(raw: str) -> int | None:
    """Return how many messages a conversation has; None where it is no list of them."""
    try:
        messages: Any = json.loads(raw) if raw else []
    except ValueError:
        return None
    return len(messages) if isinstance(messages, list) else None


def _join_parts(text: str, marker: str) -> str:
    """Return a list of parts as one text with markers; what is no such list is shown as it is."""
    try:
        parts: list[dict[str, Any]] = json.loads(text)
        return "".join(part["text"] if part["type"] == "text" else marker for part in parts)
    except (ValueError, KeyError, TypeError):
        return text


def shown_ids(ids: list[int]) -> str:
    """Return the first of some token ids, where no tokenizer knows their text."""
    return "token ids " + " ".join(map(str, ids[:_SHOWN_IDS])) + (" ..." if len(ids) > _SHOWN_IDS else "")


def _bytes_of(rows: RowBatch, column: str, row: int) -> str:
    values = rows[column]
    assert isinstance(values, Ragged)  # measuring has refused any other kind
    return values[row].tobytes().decode("utf-8", "replace")


# --------------------------------------------------------------------------------------------------------------


_SHOWN_CHARACTERS = 400
_SHOWN_END = 48
"""Of these, the last of a text: how it ends matters."""
_PAGE_CHARACTERS = 1200
_SHOWN_PICTURES = 4
_THUMBNAIL = (28, 20)
"""Width and height in pixels; a character is one pixel wide and two high."""
_SMALL = (17, 12)
"""The same where there are several."""
_PAGE_THUMBNAIL = 320
_MEDIA = {"image": ("the image", "images"), "video": ("the clip", "clips"), "audio": ("the sound", "sounds")}


@dataclass(frozen=True, slots=True)
class Preview:
    """One sample as a person looks at it."""

    sample: str
    """Its id, without the epoch."""
    tokens: int
    delivered: int
    """Tokens that the context leaves of it."""
    image_tokens: int
    """Of these, placeholders of images and clips."""
    media_tokens: int
    """Of these, placeholders of images, clips and sounds."""
    loss_tokens: int | None
    """Tokens that count in the loss, where the sample says so itself."""
    text: str
    spans: Spans
    """(first character, one behind the last) of the parts of the text that count in the loss, where only parts do."""
    turns: int | None
    """Messages of a conversation."""
    media: tuple[MediaItem, ...]
    faults: tuple[str, ...]
    skipped: bool
    """Whether it is never drawn, whatever the context: empty, or filtered out."""
    dropped: bool
    """Whether it is never drawn because of the context."""

    def facts(self) -> str:
        """Return length, media and state in a few words."""
        parts = [number(self.tokens, "token")]
        if self.media and self.media_tokens:
            one, many = _MEDIA[self.media[0].kind]
            parts[0] += f" ({self.media_tokens:,} of {one if len(self.media) == 1 else f'{len(self.media)} {many}'})"
        if self.turns is not None:
            parts.append(number(self.turns, "message"))
        if self.delivered < self.tokens:
            parts.append(f"cut to {self.delivered:,}")
        if self.loss_tokens not in (None, self.delivered - self.media_tokens) and not self.skipped:
            parts.append(f"{self.loss_tokens:,} in the loss")
        parts += [item.words for item in self.media[:_SHOWN_PICTURES]]
        if len(self.media) > _SHOWN_PICTURES:
            parts.append(f"{len(self.media) - _SHOWN_PICTURES} more")
        if self.skipped:
            parts.append("empty or filtered: never drawn")
        if self.dropped:
            parts.append("does not fit into the context: dropped")
        return " · ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the preview for a program; media are told by their kinds and sizes."""
        text, spans = _clip(self.text, self.spans, _PAGE_CHARACTERS)
        return {
            "sample": self.sample,
            "tokens": self.tokens,
            "delivered": self.delivered,
            "image_tokens": self.image_tokens,
            "media_tokens": self.media_tokens,
            "loss_tokens": self.loss_tokens,
            "media": [{"kind": item.kind} | item.facts for item in self.media],
            "text": text,
            "loss_spans": [list(span) for span in spans],
            "messages": self.turns,
            "faults": list(self.faults),
            "skipped": self.skipped,
            "dropped": self.dropped,
        }


def preview_source(source: OpenSource, count: int) -> list[Preview]:
    """Return the first samples of a source, in the order of its files.

    Raises:
        SpecError: The source could not be opened.
    """
    one = source.open_or_raise()
    found: list[Preview] = []
    for file in range(len(one.files.files)):
        for first, rows in first_rows(one.files, file, count - len(found), count):
            found += _preview_rows(one, rows, first)
        if len(found) >= count:
            break
    return found


def _preview_rows(one: Opened, rows: RowBatch, first: int) -> list[Preview]:
    measured = one.transform.measure(rows, None, no_seeds(rows))
    delivered, flags = fit_context(measured, one.context_length, one.overlength)
    count, dropped = len(measured.tokens), (flags & SKIP) > 0
    # What is dropped is shown as a whole: it is why it was dropped.
    planned = np.where(dropped, measured.tokens, delivered).astype(np.int64)
    done = one.transform.finish(measured.kept, planned, (measured.flags & BAD) > 0, SerialWorkers())
    faults: list[list[str]] = [[] for _ in range(count)]
    for row, reason in measured.faults:
        faults[row].append(reason)
    media: list[list[MediaItem]] = [[] for _ in range(count)]
    for item in decode_items(one, measured, planned, np.zeros(count, np.bool_)):
        media[item.row].append(look_at(one, item))
        if item.fault is not None:
            faults[item.row].append(item.fault)
    texts = shown_texts(one, rows, measured, done)
    placeholders = [0] * count if done.media is None else _sums(done.media.length, done.media.rows)
    loss = _sums(done.loss.values, done.loss.offsets) if "loss" in measured.kept else [None] * count
    return [
        Preview(
            sample=str(SampleId(one.source.name, first + row, 0)).rpartition("@")[0],
            tokens=int(measured.tokens[row]),
            delivered=int(planned[row]),
            image_tokens=0 if measured.flags[row] & SOUNDS else int(measured.image_tokens[row]),
            media_tokens=placeholders[row],
            loss_tokens=None if faults[row] else loss[row],
            text=texts[row].text,
            spans=texts[row].spans,
            turns=texts[row].turns,
            media=tuple(media[row]),
            faults=tuple(faults[row]),
            skipped=bool(measured.flags[row] & SKIP),
            dropped=bool(dropped[row]) and not measured.flags[row] & SKIP,
        )
        for row in range(count)
    ]


def _sums(values: npt.NDArray[Any], offsets: npt.NDArray[np.integer]) -> list[int]:
    return [int(values[begin:end].sum()) for begin, end in itertools.pairwise(offsets.tolist())]


def show_previews(one: OpenSource, previews: Sequence[Preview], *, pictures: bool) -> RenderableType:
    """Return the previews of one source for the terminal; pictures need one with colours."""
    parts: list[RenderableType] = [Words(_headline(one), style="bold")]
    if one.opened is not None and (tokens := token_words(one.opened)) is not None:
        parts.append(Words(tokens, style="dim"))
    return Group(*parts, *(show_sample(preview, pictures=pictures) for preview in previews), "")


def show_sample(preview: Preview, *, pictures: bool) -> RenderableType:
    """Return one sample for the terminal: what counts in the loss is green."""
    shown, spans = _clip(preview.text, preview.spans, _SHOWN_CHARACTERS)
    text = Words(shown)
    for begin, end in spans:
        text.stylize("green", begin, end)
    body = Group(
        Words.assemble((preview.sample, "cyan"), ("  " + preview.facts(), "dim")),
        *(Words(f"bad: {reason}", style="red") for reason in preview.faults),
        text,
    )
    drawn = [item.picture for item in preview.media if item.picture is not None] if pictures else []
    return Padding(_beside(drawn, body), (1, 0, 0, 2), expand=False)


def _beside(pictures: Sequence[Pixels], body: RenderableType) -> RenderableType:
    """Return one picture left of the words, or several above them."""
    if not pictures:
        return body
    grid = Table.grid(padding=(0, 2))
    if len(pictures) == 1:
        grid.add_row(half_blocks(pictures[0]), body)
        return grid
    grid.add_row(*(half_blocks(picture, _SMALL) for picture in pictures[:_SHOWN_PICTURES]))
    return Group(grid, body)


def half_blocks(picture: Pixels, limit: tuple[int, int] = _THUMBNAIL) -> Words:
    """Return a picture as coloured characters: the upper half of each is one pixel, the lower another.

    Example:
        >>> str(half_blocks(np.zeros((2, 2, 3), np.uint8)))
        '▀▀'
    """
    height, width = picture.shape[:2]
    scale = min(1.0, limit[0] / width, limit[1] / height)
    wide, tall = max(1, round(width * scale)), max(2, 2 * round(height * scale / 2))
    small = np.asarray(Image.fromarray(picture).resize((wide, tall), Image.Resampling.BOX))
    words = Words()
    for y in range(0, tall, 2):
        if y:
            words.append("\n")
        for x in range(wide):
            upper, lower = (f"#{r:02x}{g:02x}{b:02x}" for r, g, b in small[y : y + 2, x].tolist())
            words.append("▀", style=f"{upper} on {lower}")
    return words


def preview_page(name: str, sources: Sequence[tuple[OpenSource, Sequence[Preview]]]) -> str:
    """Return the previews as one HTML page that needs nothing else."""
    shown = [
        {
            "headline": _headline(one),
            "tokens": None if one.opened is None else token_words(one.opened),
            "samples": [sample_card(preview) for preview in previews],
        }
        for one, previews in sources
    ]
    return render_file("preview.html", name=name, sources=shown)


def sample_card(preview: Preview) -> dict[str, Any]:
    """Return what the page shows of a sample; its text in parts, each with whether it is marked."""
    text, spans = _clip(preview.text, preview.spans, _PAGE_CHARACTERS)
    borders = [0, *(at for span in spans for at in span), len(text)]
    return {
        "sample": preview.sample,
        "facts": preview.facts(),
        "faults": preview.faults,
        "pictures": [(item.words, _data_url(item.picture)) for item in preview.media if item.picture is not None],
        "parts": [(text[a:b], part % 2 == 1) for part, (a, b) in enumerate(itertools.pairwise(borders))],
    }


def _data_url(picture: Pixels) -> str:
    image = Image.fromarray(picture)
    image.thumbnail((_PAGE_THUMBNAIL, _PAGE_THUMBNAIL))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def _headline(one: OpenSource) -> str:
    if one.files is None:
        return one.source.name
    files = number(len(one.files.files), "file")
    return f"{one.source.name} · {one.files.format} · {files} · {size(one.files.total_bytes)}"


def _clip(text: str, spans: Spans, limit: int) -> tuple[str, Spans]:
    r"""Return the beginning and the end of a text, and where its spans are in them.

    Example:
        >>> _clip("Hi,\n my friend</s>", ((0, 2), (5, 18)), 16)
        ('Hi,\n my f … </s>', ((0, 2), (5, 16)))
    """
    if len(text) <= limit:
        return text, spans
    behind = min(_SHOWN_END, limit // 4)
    head, tail = limit - behind - len(GAP), len(text) - behind
    moved = ((min(at, head) if at < tail else at - tail + head + len(GAP) for at in span) for span in spans)
    return text[:head] + GAP + text[tail:], tuple((a, b) for a, b in moved if a < b)
