"""Previews of samples: text and small pictures in the terminal, or one HTML page."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as Words

from overlord.cli.context_fit import fit_context
from overlord.cli.media_tokens import token_words
from overlord.cli.preview_media import MediaItem, Pixels, decode_items, look_at
from overlord.cli.preview_text import GAP, Spans, shown_texts
from overlord.cli.sources import Opened, OpenSource
from overlord.core.ragged import RowBatch, slice_rows
from overlord.core.samples import BAD, FILE_SHIFT, SKIP, SampleId
from overlord.reports.summary import size
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.transforms.samples.per_sample import no_seeds

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
        parts = [f"{self.tokens:,} token{'' if self.tokens == 1 else 's'}"]
        if self.media and self.media_tokens:
            one, many = _MEDIA[self.media[0].kind]
            parts[0] += f" ({self.media_tokens:,} of {one if len(self.media) == 1 else f'{len(self.media)} {many}'})"
        if self.turns is not None:
            parts.append(f"{self.turns} message{'' if self.turns == 1 else 's'}")
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
    for number in range(len(one.files.files)):
        for block in range(len(one.files.blocks(number).rows)):
            if len(found) >= count:
                return found
            found += _preview_block(one, number, block, count - len(found))
    return found


def _preview_block(one: Opened, number: int, block: int, count: int) -> list[Preview]:
    found: list[Preview] = []
    base = (number << FILE_SHIFT) + one.files.row_base(number, block)
    for batch in one.files.stream(number, block, batch_rows=count):
        rows = slice_rows(batch, 0, min(count - len(found), len(next(iter(batch.values())))))
        found += _preview_rows(one, rows, base + len(found))
        if len(found) >= count:
            break
    return found


def _preview_rows(one: Opened, rows: RowBatch, first: int) -> list[Preview]:
    measured = one.transform.measure(rows, None, no_seeds(rows))
    delivered, flags = fit_context(one, measured)
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
            image_tokens=int(measured.image_tokens[row]),
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
    for preview in previews:
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
        parts.append(Padding(_beside(drawn, body), (1, 0, 0, 2), expand=False))
    return Group(*parts, "")


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
    sections = "".join(
        f"<section><h2>{escape(_headline(one))}</h2>{_html_tokens(one)}{''.join(map(_card, previews))}</section>"
        for one, previews in sources
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} · samples</title><style>{_CSS}</style></head>"
        f"<body><main><h1>{escape(name)}</h1>{sections}</main></body></html>\n"
    )


def _html_tokens(one: OpenSource) -> str:
    words = None if one.opened is None else token_words(one.opened)
    return "" if words is None else f'<p class="tokens">{escape(words)}</p>'


def _card(preview: Preview) -> str:
    drawn = [item for item in preview.media if item.picture is not None]
    pictures = "".join(f'<img alt="{escape(item.words)}" src="{_data_url(item.picture)}">' for item in drawn
                       if item.picture is not None)  # fmt: skip
    media = f'<div class="media{" many" if len(drawn) > 1 else ""}">{pictures}</div>' if drawn else ""
    faults = "".join(f'<p class="fault">bad: {escape(reason)}</p>' for reason in preview.faults)
    return (
        f'<article>{media}<div class="words"><p><b>{escape(preview.sample)}</b> <span>{escape(preview.facts())}</span>'
        f"</p>{faults}<pre>{_marked(preview)}</pre></div></article>"
    )


def _marked(preview: Preview) -> str:
    """Return the text for a page, with marks around what counts in the loss."""
    shown, spans = _clip(preview.text, preview.spans, _PAGE_CHARACTERS)
    parts: list[str] = []
    at = 0
    for begin, end in spans:
        parts += [escape(shown[at:begin]), f"<mark>{escape(shown[begin:end])}</mark>"]
        at = end
    return "".join(parts) + escape(shown[at:])


def _data_url(picture: Pixels) -> str:
    image = Image.fromarray(picture)
    image.thumbnail((_PAGE_THUMBNAIL, _PAGE_THUMBNAIL))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode()


def _headline(one: OpenSource) -> str:
    if one.files is None:
        return one.source.name
    count = len(one.files.files)
    files = f"{count:,} file{'' if count == 1 else 's'}"
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


_CSS = """
:root{color-scheme:light dark;--page:#f5f5f2;--card:#fff;--ink:#1b1e23;--soft:#5d636e;--line:#e3e3de;
  --red:#c14a00;--mark:#cdeacb}
@media(prefers-color-scheme:dark){:root{--page:#121417;--card:#1b1e23;--ink:#eceef1;--soft:#a0a7b3;--line:#30353d;
  --red:#f0884a;--mark:#1f4a2b}}
*{box-sizing:border-box;margin:0}
body{background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:960px;margin:0 auto;padding:40px 24px 56px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:17px;margin:32px 0 12px}
article{display:flex;gap:20px;background:var(--card);border:1px solid var(--line);border-radius:12px;
  padding:16px 18px;margin-bottom:12px}
article:has(.many){flex-direction:column}
.words{min-width:0;flex:1}
.media{display:flex;flex-wrap:wrap;gap:10px;align-content:flex-start}
img{width:200px;height:auto;align-self:flex-start;border-radius:6px}
.many img{width:auto;height:120px}
mark{background:var(--mark);color:inherit}
span{color:var(--soft);margin-left:8px}
pre{margin-top:6px;font:14px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
  overflow-wrap:anywhere}
.tokens{color:var(--soft);margin:-8px 0 12px}
.fault{color:var(--red);font-weight:600}
@media(max-width:640px){article{flex-direction:column}img{width:100%}.many img{width:100%;height:auto}}
"""
