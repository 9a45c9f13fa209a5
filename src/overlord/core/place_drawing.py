"""The mesh of a trainer as text and as an SVG drawing: stage > replica > bucket > context part > ranks.

Both leave out the middle of large meshes. The SVG is one self-contained file: no fonts, scripts or
links, and colours for light and dark pages.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from overlord.core.place_tree import ClientPlaceTree

LINES = 64
"""In a text tree of more lines than this, only the first node of each level shows what is in it."""

DRAWN_RANKS = 64
"""A drawing shows at most this many ranks."""

_CELL_HEIGHT, _STRIP, _GAP, _PAD, _LABEL, _MARGIN = 28, 22, 6, 10, 20, 24
_MIN_WIDTH = 420
_STYLE = """
.ol-mesh{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
.ol-mesh text{fill:#1f2937;font-size:12px}
.ol-mesh .ol-name{font-size:16px;font-weight:600}
.ol-mesh .ol-note{fill:#5b6675;font-size:12px}
.ol-mesh .ol-rank{font-size:12px;text-anchor:middle;font-variant-numeric:tabular-nums}
.ol-mesh .ol-label{font-size:11px;font-weight:600}
.ol-mesh .ol-page{fill:#ffffff}
.ol-mesh .ol-pp{fill:#f4f5f7;stroke:#b8c0cc}
.ol-mesh .ol-replicate{fill:#f3effb;stroke:#b7a3dd}
.ol-mesh .ol-dp{fill:#e6effb;stroke:#8fb3e0}
.ol-mesh .ol-cp{fill:#e3f3ec;stroke:#86c0a5}
.ol-mesh .ol-cell{fill:#ffffff;stroke:#c3cad4}
.ol-mesh .ol-more{fill:none;stroke:#8a94a3;stroke-dasharray:4 4}
@media (prefers-color-scheme:dark){
.ol-mesh text{fill:#e5e9f0}
.ol-mesh .ol-note{fill:#a3adbb}
.ol-mesh .ol-page{fill:#14181f}
.ol-mesh .ol-pp{fill:#1c222b;stroke:#465060}
.ol-mesh .ol-replicate{fill:#272136;stroke:#6a5795}
.ol-mesh .ol-dp{fill:#1a2a40;stroke:#42669a}
.ol-mesh .ol-cp{fill:#17302a;stroke:#3f7c66}
.ol-mesh .ol-cell{fill:#10141a;stroke:#4a5464}
.ol-mesh .ol-more{stroke:#7d8796}
}
"""

Ranks = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Level:
    """One level of the tree: what its nodes are called, and how many a parent has."""

    name: str
    size: int


def draw_text(tree: ClientPlaceTree) -> str:
    """Return a mesh as a text tree; a level of one node is left out, ranks of one line are one tp group.

    Example:
        >>> from overlord.core.place_tree import ClientPlaceTree
        >>> print(draw_text(ClientPlaceTree(pp=2, dp=2, tp=2)))
        pp=2 dp=2 cp=1 tp=2 (8 ranks)
        |-- pp 0: ranks 0-3
        |   |-- dp 0: ranks 0-1
        |   `-- dp 1: ranks 2-3
        `-- pp 1: ranks 4-7
            |-- dp 0: ranks 4-5
            `-- dp 1: ranks 6-7
    """
    levels, ranks = _levels_of(tree)
    nodes = [prod(level.size for level in levels[: depth + 1]) for depth in range(len(levels))]
    long = len(levels) > 1 and sum(nodes) > LINES
    lines = [f"{tree} ({_count(tree.world_size, 'rank')})"]
    lines += _branches(levels, ranks, "", 0, long=long)
    lines += [f"module {name}: {tree.module(name)}" for name in tree.module_names]
    return "\n".join(lines)


def _branches(levels: Sequence[_Level], ranks: Ranks, indent: str, number: int, *, long: bool) -> Iterator[str]:
    level, *inner = levels
    first, last, whole = (2, 1, 4) if long else (8, 4, 16)
    cut = level.size > whole
    for i in range(level.size):
        if cut and i == first:
            yield f"{indent}|   .. {level.size - first - last} more"
        if cut and first <= i < level.size - last:
            continue
        end = i == level.size - 1
        named = number * level.size + i if level.name == "dp" else i
        yield f"{indent}{'`--' if end else '|--'} {level.name} {named}: ranks {_ranges(ranks[i])}"
        if inner and (i == 0 or not long):
            below = i if level.name == "replicate" else 0
            yield from _branches(inner, ranks[i], indent + ("    " if end else "|   "), below, long=long)


def _levels_of(tree: ClientPlaceTree) -> tuple[list[_Level], Ranks]:
    """Return the levels above the tp groups, and the ranks as an array with one dimension a level, and tp."""
    levels = [
        _Level("pp", tree.pp),
        _Level("replicate", tree.dp_replicate),
        _Level("dp", tree.dp_shard),
        _Level("cp", tree.cp),
    ]
    wide = [level for level in levels if level.size > 1] or [_Level("dp", 1)]
    if tree.dp_replicate > 1 and tree.dp_shard == 1:
        wide = [_Level("dp", level.size) if level.name == "replicate" else level for level in wide]
    return wide, tree.grid().reshape([*(level.size for level in wide), tree.tp])


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _ranges(ranks: Ranks) -> str:
    """Return numbers in order with runs joined, such as 0-3, 8-11."""
    found = np.sort(ranks, axis=None)
    starts = np.flatnonzero(np.diff(found, prepend=found[0] - 2) != 1)
    ends = np.append(starts[1:], len(found)) - 1
    runs = [(int(found[a]), int(found[b])) for a, b in zip(starts[:9], ends[:9], strict=True)]
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8])
    return f"{text}, .. {found[-1]}" if len(runs) > 8 else text


@dataclass(frozen=True, slots=True)
class _Box:
    """How the nodes of one level are laid out inside their parent: all have the same size."""

    level: _Level
    shown: int
    """How many nodes are drawn; a strip below them stands for the others."""
    columns: int
    width: int
    height: int
    inner_width: int
    """Of all nodes together."""
    inner_height: int


def draw_svg(tree: ClientPlaceTree) -> str:
    """Return a mesh as an SVG drawing of nested boxes, with the meshes of its modules below."""
    levels, ranks = _levels_of(tree)
    boxes = _boxes([*levels, _Level("tp", tree.tp)], _cell_width(tree))
    notes = _notes(tree)
    title = str(tree)
    top = _MARGIN + 46
    below = top + boxes[0].inner_height + 26
    width = (
        max(boxes[0].inner_width, _MIN_WIDTH, 9 * len(title), *(int(6.6 * len(note)) for note in notes)) + 2 * _MARGIN
    )
    height = below + 18 * (len(notes) - 1) + _MARGIN
    key = f"ol-{zlib.crc32(title.encode()):08x}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ol-mesh" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="{key}-title {key}-desc">',
        f'<title id="{key}-title">Mesh {escape(title)}</title>',
        f'<desc id="{key}-desc">{escape(_spoken(tree, levels))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="ol-page" width="{width}" height="{height}" rx="12"/>',
        f'<text class="ol-name" x="{_MARGIN}" y="{_MARGIN + 14}">{escape(title)}</text>',
        f'<text class="ol-note" x="{_MARGIN}" y="{_MARGIN + 34}">{escape(_subtitle(tree, levels))}</text>',
        *_nested(boxes, ranks, _MARGIN, top, 0),
        *(
            f'<text class="ol-note" x="{_MARGIN}" y="{below + 18 * i}">{escape(note)}</text>'
            for i, note in enumerate(notes)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _cell_width(tree: ClientPlaceTree) -> int:
    return max(34, 8 * len(str(tree.world_size - 1)) + 14)


def _boxes(levels: Sequence[_Level], cell_width: int) -> list[_Box]:
    """Return the layout of each level, outermost first; sizes follow from the innermost outwards."""
    boxes: list[_Box] = []
    width, height = cell_width, _CELL_HEIGHT
    for level, shown in zip(reversed(levels), reversed(_shown(levels)), strict=True):
        columns = _columns(shown, width, height, level.name)
        strip = shown < level.size
        inner_width = max(
            columns * (width + _GAP) - _GAP, 7 * len(_left_out(level, shown, level.size)) if strip else 44
        )
        inner_height = ceil(shown / columns) * (height + _GAP) - _GAP + (_GAP + _STRIP if strip else 0)
        boxes.append(_Box(level, shown, columns, width, height, inner_width, inner_height))
        width, height = inner_width + 2 * _PAD, inner_height + _LABEL + _PAD
    return boxes[::-1]


def _shown(levels: Sequence[_Level]) -> list[int]:
    """Return how many nodes of each level are drawn: tp groups stay whole as long as they can."""
    shown = [level.size for level in levels]
    while prod(shown) > DRAWN_RANKS:
        above = range(len(shown) - 1) if max(shown[:-1]) > 1 else [len(shown) - 1]
        widest = max(above, key=lambda i: shown[i])
        shown[widest] = max(1, DRAWN_RANKS * shown[widest] // prod(shown))
    return shown


def _left_out(level: _Level, shown: int, number: int) -> str:
    first = number * level.size if level.name == "dp" else 0
    return f"+{level.size - shown} more, to {level.name} {first + level.size - 1}"


def _columns(count: int, width: int, height: int, name: str) -> int:
    """Return how many stand in a row: tp groups in one row, others so that the whole is a bit wider than high."""
    if name == "tp":
        return min(count, 8)
    best = min(range(1, count + 1), key=lambda n: (abs(n * width - 1.8 * ceil(count / n) * height), -n))
    return ceil(count / ceil(count / best))


def _nested(boxes: Sequence[_Box], ranks: Ranks, left: int, top: int, number: int) -> Iterator[str]:
    box, *inner = boxes
    name = box.level.name
    for i in range(box.shown):
        x = left + i % box.columns * (box.width + _GAP)
        y = top + i // box.columns * (box.height + _GAP)
        rect = f'x="{x}" y="{y}" width="{box.width}" height="{box.height}"'
        if not inner:
            middle = f'x="{x + box.width // 2}" y="{y + box.height // 2 + 4}"'
            yield f'<rect class="ol-cell" {rect} rx="5"/><text class="ol-rank" {middle}>{int(ranks[i])}</text>'
            continue
        label = f"{name} {number * box.level.size + i if name == 'dp' else i}"
        yield f"<g><title>{label}: ranks {_ranges(ranks[i])}</title>"
        yield f'<rect class="ol-{name}" {rect} rx="8"/>'
        yield f'<text class="ol-label" x="{x + _PAD}" y="{y + 15}">{label}</text>'
        yield from _nested(inner, ranks[i], x + _PAD, y + _LABEL, i if name == "replicate" else 0)
        yield "</g>"
    if box.shown < box.level.size:
        y = top + box.inner_height - _STRIP
        yield f'<rect class="ol-more" x="{left}" y="{y}" width="{box.inner_width}" height="{_STRIP}" rx="6"/>'
        text = _left_out(box.level, box.shown, number)
        yield f'<text class="ol-rank" x="{left + box.inner_width // 2}" y="{y + 15}">{text}</text>'


def _subtitle(tree: ClientPlaceTree, levels: Sequence[_Level]) -> str:
    path = " > ".join([*(level.name for level in levels), *(["tp"] if tree.tp > 1 else [])])
    alike = "; ranks of one innermost box see identical data" if tree.tp > 1 else ""
    return f"{_count(tree.world_size, 'rank')}: {path}{alike}"


def _notes(tree: ClientPlaceTree) -> list[str]:
    """Return the lines below the drawing: what boxes cannot show, and the meshes of modules."""
    notes = [f"ep={tree.ep}: experts span buckets, which run in lockstep"] if tree.ep > 1 else []
    if tree.vpp > 1:
        notes.append(f"vpp={tree.vpp}: microbatches in multiples of {tree.microbatch_multiple}")
    names = sorted({"encoder", *tree.module_names})
    return notes + [
        f"module {name}: {tree.module(name)}{'' if name in tree.module_names else ' (not given: dp over all ranks)'}"
        for name in names
    ]


def _spoken(tree: ClientPlaceTree, levels: Sequence[_Level]) -> str:
    words = {"pp": "pipeline stage", "replicate": "replica", "dp": "data-parallel bucket", "cp": "context part"}
    inside = ", each of ".join(_count(level.size, words[level.name]) for level in levels)
    group = f", each of {_count(tree.tp, 'tensor rank')}" if tree.tp > 1 else ""
    return f"{_count(tree.world_size, 'rank')} in {inside}{group}. {'. '.join(_notes(tree))}."
