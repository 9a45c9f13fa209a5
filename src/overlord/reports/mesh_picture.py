"""The mesh of a trainer as an SVG drawing of nested boxes: stage > replica > bucket > context part > ranks.

It leaves out the middle of large meshes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from overlord.core.place_tree import ClientPlaceTree, Int32s, MeshLevel, counted, levels_of, rank_ranges
from overlord.reports.pages import render_file

DRAWN_RANKS = 64
"""A drawing shows at most this many ranks."""

_CELL_HEIGHT, _STRIP, _GAP, _PAD, _LABEL, _MARGIN = 28, 22, 6, 10, 20, 24
_MIN_WIDTH = 420


@dataclass(frozen=True, slots=True)
class _Box:
    """How the nodes of one level are laid out inside their parent: all have the same size."""

    level: MeshLevel
    shown: int
    """How many nodes are drawn; a strip below them stands for the others."""
    columns: int
    width: int
    height: int
    inner_width: int
    """Of all nodes together."""
    inner_height: int


def draw_svg(tree: ClientPlaceTree) -> str:
    """Return a mesh as an SVG file, with the meshes of its modules below."""
    levels, ranks = levels_of(tree)
    cell_width = max(34, 8 * len(str(tree.world_size - 1)) + 14)
    boxes = _boxes([*levels, MeshLevel("tp", tree.tp)], cell_width)
    notes, title = _notes(tree), str(tree)
    top = _MARGIN + 46
    below = top + boxes[0].inner_height + 26
    widths = (boxes[0].inner_width, _MIN_WIDTH, 9 * len(title), *(int(6.6 * len(note)) for note in notes))
    return render_file(
        "mesh.svg",
        title=title,
        subtitle=_subtitle(tree, levels),
        spoken=_spoken(tree, levels, notes),
        key=f"ol-{zlib.crc32(title.encode()):08x}",
        width=max(widths) + 2 * _MARGIN,
        height=below + 18 * (len(notes) - 1) + _MARGIN,
        margin=_MARGIN,
        below=below,
        boxes="\n".join(_nested(boxes, ranks, _MARGIN, top, 0)),
        notes=notes,
    )


def _boxes(levels: Sequence[MeshLevel], cell_width: int) -> list[_Box]:
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


def _shown(levels: Sequence[MeshLevel]) -> list[int]:
    """Return how many nodes of each level are drawn: tp groups stay whole as long as they can."""
    shown = [level.size for level in levels]
    while prod(shown) > DRAWN_RANKS:
        above = range(len(shown) - 1) if max(shown[:-1]) > 1 else [len(shown) - 1]
        widest = max(above, key=lambda i: shown[i])
        shown[widest] = max(1, DRAWN_RANKS * shown[widest] // prod(shown))
    return shown


def _left_out(level: MeshLevel, shown: int, number: int) -> str:
    first = number * level.size if level.name == "dp" else 0
    return f"+{level.size - shown} more, to {level.name} {first + level.size - 1}"


def _columns(count: int, width: int, height: int, name: str) -> int:
    """Return how many stand in a row: tp groups in one row, others so that the whole is a bit wider than high."""
    if name == "tp":
        return min(count, 8)
    best = min(range(1, count + 1), key=lambda n: (abs(n * width - 1.8 * ceil(count / n) * height), -n))
    return ceil(count / ceil(count / best))


def _nested(boxes: Sequence[_Box], ranks: Int32s, left: int, top: int, number: int) -> Iterator[str]:
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
        yield f"<g><title>{label}: ranks {rank_ranges(ranks[i])}</title>"
        yield f'<rect class="ol-{name}" {rect} rx="8"/>'
        yield f'<text class="ol-label" x="{x + _PAD}" y="{y + 15}">{label}</text>'
        yield from _nested(inner, ranks[i], x + _PAD, y + _LABEL, i if name == "replicate" else 0)
        yield "</g>"
    if box.shown < box.level.size:
        y = top + box.inner_height - _STRIP
        yield f'<rect class="ol-more" x="{left}" y="{y}" width="{box.inner_width}" height="{_STRIP}" rx="6"/>'
        text = _left_out(box.level, box.shown, number)
        yield f'<text class="ol-rank" x="{left + box.inner_width // 2}" y="{y + 15}">{text}</text>'


def _subtitle(tree: ClientPlaceTree, levels: Sequence[MeshLevel]) -> str:
    path = " > ".join([*(level.name for level in levels), *(["tp"] if tree.tp > 1 else [])])
    alike = "; ranks of one innermost box see identical data" if tree.tp > 1 else ""
    return f"{counted(tree.world_size, 'rank')}: {path}{alike}"


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


def _spoken(tree: ClientPlaceTree, levels: Sequence[MeshLevel], notes: Sequence[str]) -> str:
    words = {"pp": "pipeline stage", "replicate": "replica", "dp": "data-parallel bucket", "cp": "context part"}
    inside = ", each of ".join(counted(level.size, words[level.name]) for level in levels)
    group = f", each of {counted(tree.tp, 'tensor rank')}" if tree.tp > 1 else ""
    return f"{counted(tree.world_size, 'rank')} in {inside}{group}. {'. '.join(notes)}."
