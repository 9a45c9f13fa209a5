"""Previews of samples: text and small pictures in the terminal, or one HTML page."""

from __future__ import annotations

import base64
import io
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

from overlord.cli.sources import OpenSource
from overlord.cli.summary import size
from overlord.core.ragged import Ragged, RowBatch, slice_rows
from overlord.core.samples import FILE_SHIFT, SKIP, SampleId
from overlord.core.specs import ImageText, Text
from overlord.readers.source_files import SourceFiles
from overlord.transforms.images import ImageFault, decode_image

_SHOWN_CHARACTERS = 280
_PAGE_CHARACTERS = 1200
_SHOWN_IDS = 24
_THUMBNAIL = (28, 20)
"""Width and height in pixels; a character is one pixel wide and two high."""
_PAGE_THUMBNAIL = 320

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Preview:
    """One sample as a person looks at it."""

    sample: str
    """Its id, without the epoch."""
    tokens: int
    image_tokens: int
    text: str
    picture: Pixels | None
    faults: tuple[str, ...]
    skipped: bool

    def facts(self) -> str:
        """Return length, image size and state in a few words."""
        parts = [f"{self.tokens:,} token{'' if self.tokens == 1 else 's'}"]
        if self.image_tokens:
            parts[0] += f" ({self.image_tokens:,} of the image)"
        if self.picture is not None:
            parts.append(f"image {self.picture.shape[1]}×{self.picture.shape[0]}")
        if self.skipped:
            parts.append("empty or filtered: never drawn")
        return " · ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the preview for a program; the picture is told by its size."""
        shape = None if self.picture is None else [self.picture.shape[1], self.picture.shape[0]]
        return {
            "sample": self.sample,
            "tokens": self.tokens,
            "image_tokens": self.image_tokens,
            "image_size": shape,
            "text": self.text[:_PAGE_CHARACTERS],
            "faults": list(self.faults),
            "skipped": self.skipped,
        }


def preview_source(one: OpenSource, count: int) -> list[Preview]:
    """Return the first samples of a source, in the order of its files.

    Raises:
        SpecError: The source could not be opened.
    """
    if one.files is None:
        assert one.error is not None
        raise one.error
    found: list[Preview] = []
    for number in range(len(one.files.files)):
        for block in range(len(one.files.blocks(number).rows)):
            if len(found) >= count:
                return found
            found += _preview_block(one, one.files, number, block, count - len(found))
    return found


def _preview_block(one: OpenSource, files: SourceFiles, number: int, block: int, count: int) -> list[Preview]:
    found: list[Preview] = []
    base = (number << FILE_SHIFT) + files.row_base(number, block)
    for batch in files.stream(number, block, batch_rows=count):
        rows = slice_rows(batch, 0, min(count - len(found), len(next(iter(batch.values())))))
        found += _preview_rows(one, rows, base + len(found))
        if len(found) >= count:
            break
    return found


def _preview_rows(one: OpenSource, rows: RowBatch, first: int) -> list[Preview]:
    measured = one.transform.measure(rows, None)
    found: list[Preview] = []
    for row in range(len(measured.tokens)):
        faults = [reason for at, reason in measured.faults if at == row]
        picture = None
        if isinstance(one.source.sample, ImageText) and not faults:
            try:
                picture = decode_image(_bytes_of(rows, one.source.sample.image, row))
            except ImageFault as fault:
                faults.append(str(fault))
        sample = str(SampleId(one.source.name, first + row, 0)).rpartition("@")[0]
        found.append(
            Preview(
                sample=sample,
                tokens=int(measured.tokens[row]),
                image_tokens=int(measured.image_tokens[row]),
                text=_text_of(one, rows, measured.kept, row),
                picture=picture,
                faults=tuple(faults),
                skipped=bool(measured.flags[row] & SKIP),
            )
        )
    return found


def _text_of(one: OpenSource, rows: RowBatch, kept: RowBatch, row: int) -> str:
    spec = one.source.sample
    if isinstance(spec, ImageText) or (isinstance(spec, Text) and not spec.tokenized):
        column = spec.text if isinstance(spec, ImageText) else spec.column
        return _bytes_of(rows, column, row).decode("utf-8", "replace")
    ids = kept["tokens"][row]
    more = " ..." if len(ids) > _SHOWN_IDS else ""
    return "token ids " + " ".join(str(token) for token in ids[:_SHOWN_IDS].tolist()) + more


def _bytes_of(rows: RowBatch, column: str, row: int) -> bytes:
    values = rows[column]
    assert isinstance(values, Ragged)  # measuring has refused any other kind
    return values[row].tobytes()


def show_previews(one: OpenSource, previews: Sequence[Preview], *, pictures: bool) -> RenderableType:
    """Return the previews of one source for the terminal; pictures need one with colours."""
    parts: list[RenderableType] = [Words(_headline(one), style="bold")]
    for preview in previews:
        text = Words(_clip(preview.text, _SHOWN_CHARACTERS))
        body = Group(
            Words.assemble((preview.sample, "cyan"), ("  " + preview.facts(), "dim")),
            *(Words(f"bad: {reason}", style="red") for reason in preview.faults),
            text,
        )
        if pictures and preview.picture is not None:
            grid = Table.grid(padding=(0, 2))
            grid.add_row(half_blocks(preview.picture), body)
            parts.append(Padding(grid, (1, 0, 0, 2), expand=False))
        else:
            parts.append(Padding(body, (1, 0, 0, 2), expand=False))
    return Group(*parts, "")


def half_blocks(picture: Pixels) -> Words:
    """Return a picture as coloured characters: the upper half of each is one pixel, the lower another.

    Example:
        >>> str(half_blocks(np.zeros((2, 2, 3), np.uint8)))
        '▀▀'
    """
    height, width = picture.shape[:2]
    scale = min(1.0, _THUMBNAIL[0] / width, _THUMBNAIL[1] / height)
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
        f"<section><h2>{escape(_headline(one))}</h2>{''.join(_card(preview) for preview in previews)}</section>"
        for one, previews in sources
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} · samples</title><style>{_CSS}</style></head>"
        f"<body><main><h1>{escape(name)}</h1>{sections}</main></body></html>\n"
    )


def _card(preview: Preview) -> str:
    picture = "" if preview.picture is None else f'<img alt="" src="{_data_url(preview.picture)}">'
    faults = "".join(f'<p class="fault">bad: {escape(reason)}</p>' for reason in preview.faults)
    text = escape(_clip(preview.text, _PAGE_CHARACTERS, keep_lines=True))
    return (
        f"<article>{picture}<div><p><b>{escape(preview.sample)}</b> <span>{escape(preview.facts())}</span></p>"
        f"{faults}<pre>{text}</pre></div></article>"
    )


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


def _clip(text: str, limit: int, *, keep_lines: bool = False) -> str:
    shown = text if keep_lines else " ".join(text[: 4 * limit].split())
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


_CSS = """
:root{color-scheme:light dark;--page:#f5f5f2;--card:#fff;--ink:#1b1e23;--soft:#5d636e;--line:#e3e3de;--red:#c14a00}
@media(prefers-color-scheme:dark){:root{--page:#121417;--card:#1b1e23;--ink:#eceef1;--soft:#a0a7b3;--line:#30353d;
  --red:#f0884a}}
*{box-sizing:border-box;margin:0}
body{background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:960px;margin:0 auto;padding:40px 24px 56px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:17px;margin:32px 0 12px}
article{display:flex;gap:20px;background:var(--card);border:1px solid var(--line);border-radius:12px;
  padding:16px 18px;margin-bottom:12px}
article div{min-width:0;flex:1}
img{width:200px;height:auto;align-self:flex-start;border-radius:6px}
span{color:var(--soft);margin-left:8px}
pre{margin-top:6px;font:14px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
  overflow-wrap:anywhere}
.fault{color:var(--red);font-weight:600}
@media(max-width:640px){article{flex-direction:column}img{width:100%}}
"""
