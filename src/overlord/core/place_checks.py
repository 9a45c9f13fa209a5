"""What is said about a mesh that cannot be, and about axes and numbers that are not in it."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from overlord.core.place_layouts import AXES, COUNTS
from overlord.core.spec_errors import did_you_mean, show
from overlord.errors import SpecError

if TYPE_CHECKING:
    from overlord.core.place_tree import ClientPlaceTree

COORDINATES = ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp")
"""Directions a rank has a coordinate in."""


def check_counts(tree: ClientPlaceTree) -> None:
    """Raise SpecError for a size that is no count of ranks, or an order that is not of the axes."""
    for axis in (*COUNTS, "microbatch_group"):
        size: object = getattr(tree, axis)
        if axis == "microbatch_group" and size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SpecError(
                f"mesh: {axis} is {size!r}: an axis must be a whole number of at least 1, or there "
                f"are no ranks to feed. Write {axis}=1 for an axis you do not use."
            )
    if not isinstance(cast("object", tree.order), str) or sorted(tree.order.split("-")) != sorted(AXES):
        raise SpecError(
            f"mesh: order is {tree.order!r}: it must name each of {', '.join(AXES)} once, outermost "
            f"first, or ranks would get the data of others. Write order={'-'.join(AXES)!r} or leave it out."
        )


def check_fit(tree: ClientPlaceTree) -> None:
    """Raise SpecError for sizes that do not go together."""
    if tree.dp % tree.dp_replicate:
        raise SpecError(
            f"mesh: dp_replicate is {tree.dp_replicate}, but dp is {tree.dp}, not a multiple of it; dp counts all "
            f"replicas, so some would lack ranks. Write dp={tree.dp_replicate} times the ranks of one replica."
        )
    if tree.dp * tree.cp % tree.ep:
        raise SpecError(
            f"mesh: ep is {tree.ep}, but dp*cp is {tree.dp * tree.cp}, not a multiple of it; experts are spread over "
            "dp and cp ranks, so some would have no place. Give an ep that divides dp*cp."
        )
    if tree.vpp > 1 and tree.pp == 1:
        raise SpecError(
            f"mesh: vpp is {tree.vpp}, but pp is 1; there is no pipeline whose stages could hold several chunks. "
            "Leave vpp out, or give pp=2 or more."
        )
    if tree.microbatch_group is not None and tree.vpp == 1:
        raise SpecError(
            f"mesh: microbatch_group is {tree.microbatch_group}, but vpp is 1; it would change nothing, as there are "
            "no chunks to take turns. Leave it out, or give vpp=2 or more."
        )


def check_world_size(tree: ClientPlaceTree, world_size: int) -> None:
    """Raise SpecError if the trainer has another number of ranks than the mesh."""
    if isinstance(world_size, bool) or not isinstance(cast("object", world_size), int | np.integer):
        raise SpecError(
            f"world_size is {show(world_size)}, which counts no ranks; it cannot be told whether all {tree.world_size} "
            f"ranks of the mesh {tree} are there. Give the number of ranks of the trainer."
        )
    if world_size == tree.world_size:
        return
    rest = tree.pp * tree.cp * tree.tp
    fits = f"; dp={world_size // rest} would fit" if world_size > 0 and world_size % rest == 0 else ""
    effect = (
        "ranks beyond the mesh would get no data"
        if world_size > tree.world_size
        else ("some buckets would have nobody to consume them and the others would wait")
    )
    raise SpecError(
        f"mesh {tree} has {tree.world_size} ranks but the world has {world_size}; {effect}. "
        f"Make pp*dp*cp*tp equal to the number of ranks{fits}."
    )


def resized(tree: ClientPlaceTree, axis: str, by: int, sign: int) -> dict[str, Any]:
    """Return an axis with its new size; `sign` is 1 to grow and -1 to shrink."""
    name, verb = axis_named(axis, COUNTS), "grow" if sign > 0 else "shrink"
    size: int = getattr(tree, name)
    if isinstance(by, bool) or as_index("by", by) < 1:
        raise SpecError(f"mesh {tree}: {verb} {name} by {by!r}: nothing would change. Give a by of 1 or more.")
    if size + sign * by < 1:
        raise SpecError(
            f"mesh {tree}: shrink {name} by {by} would leave {name}={size - by}; an axis below 1 has no ranks to feed. "
            + (f"Shrink it by {size - 1} at most." if size > 1 else f"{name} cannot shrink any more.")
        )
    return {name: size + sign * by}


def as_index(what: str, value: object) -> int:
    """Return a number that counts ranks or buckets, or raise SpecError."""
    try:
        return operator.index(cast("int", value))
    except TypeError:
        raise SpecError(
            f"{what} is {show(value)}, not a whole number; it stands nowhere in the mesh. Give a number such as 0."
        ) from None


def axis_named(axis: str, known: Collection[str]) -> str:
    """Return an axis in lower case if it is known here, or raise SpecError."""
    name = axis.lower() if isinstance(cast("object", axis), str) else ""
    if name in known:
        return name
    names = [word.upper() for word in known]
    why = "it has no data of its own" if name in ("ep", "vpp") else "no rank stands along it"
    raise SpecError(
        f"axis {axis!r} cannot be used here: {why}.{did_you_mean(str(axis).upper(), names)} "
        f"Known axes: {', '.join(names)}."
    )


def broadcast_axes(broadcast: Collection[str]) -> list[str]:
    """Return the directions in which the trainer broadcasts; one axis may be given as plain text."""
    given = (broadcast,) if isinstance(broadcast, str) else broadcast
    if not isinstance(cast("object", given), Collection):
        raise SpecError(
            f"broadcast is {show(given)}, not a collection of axes; nobody knows who fetches. Write ('TP',) or ()."
        )
    return [axis_named(axis, COORDINATES) for axis in given]


def parts_of(axes: Collection[str]) -> set[str]:
    """Return axes with dp as its two parts."""
    return {part for axis in axes for part in (("dp_replicate", "dp_shard") if axis == "dp" else (axis,))}
