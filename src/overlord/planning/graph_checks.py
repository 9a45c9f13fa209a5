"""What the primitives of a DGraph refuse: each check names the primitive, what is wrong, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.spec_errors import did_you_mean, is_whole
from overlord.errors import SpecError
from overlord.planning.balancing.packing import PackMethod

if TYPE_CHECKING:
    from overlord.planning.dgraph import DGraph

Int64s = npt.NDArray[np.int64]


def checked_axis(axis: str, tree: ClientPlaceTree, modality: str, *, rows: bool = False) -> str:
    """Return the name of an axis that samples can be distributed over, or raise SpecError."""
    name = axis.upper()
    if name not in ("DP", "CP", "WORLD"):
        raise SpecError(f"distribute: axis is {axis!r}; its ranks share samples. Use 'DP', 'CP' or 'WORLD'.")
    if modality == "tokens" and name == "WORLD" and tree.num_buckets(axis) != tree.dp:
        raise SpecError(
            f"distribute: the mesh {tree} has pp, cp or tp above 1, whose ranks need the same tokens; over "
            "WORLD they would train on different ones. Use axis='DP' (or 'CP') for tokens, 'WORLD' for images."
        )
    if modality == "tokens" and name == "CP" and rows:
        raise SpecError(
            "distribute: over CP short sequences are packed on one rank and long ones spread over several, which "
            "rows of one length cannot follow. Use axis='DP' (not hdp), or the layout rows='packed'."
        )
    if modality == "tokens" and name == "CP" and tree.pp > 1:
        raise SpecError(
            f"distribute: over CP every rank gets its own number of microbatches, which {tree.pp} pipeline "
            "stages cannot follow. Use axis='DP' with pp > 1."
        )
    return name


def checked_places(places: npt.ArrayLike, count: int, num_buckets: int, num_microbatches: int) -> Int64s:
    """Return a place for each of so many items as int64, or raise SpecError where one does not exist."""
    given = np.asarray(places)
    if not is_whole(num_microbatches) or num_microbatches < 1:
        raise SpecError(f"placed: num_microbatches is {num_microbatches!r:.80}; use a whole number of at least 1.")
    most = num_buckets * num_microbatches
    if given.shape != (count,) or given.dtype.kind not in "iu":
        raise SpecError(
            f"placed: {given.shape} places of type {given.dtype} for {count} items; some would be lost. "
            "Give a whole number for each item."
        )
    if len(given) and not (int(given.min()) >= 0 and int(given.max()) < most):
        raise SpecError(f"placed: places go from {int(given.min())} to {int(given.max())}; there are bins 0 to "
                        f"{most - 1}. Use bucket * num_microbatches + microbatch.")  # fmt: skip
    return given.astype(np.int64)


def check_packing(graph: DGraph, method: PackMethod) -> None:
    """Raise SpecError where a graph cannot be packed by a method."""
    if method not in get_args(PackMethod):
        known = get_args(PackMethod)
        raise SpecError(
            f"pack: method is {method!r:.80}, which is unknown; no microbatch would be filled."
            f"{did_you_mean(method, known)} Use one of {', '.join(known)}."
        )
    if graph.modality != "tokens" or graph.axis != "DP":
        raise SpecError(
            f"pack: the graph is of {graph.modality} over {graph.axis}; microbatches are filled with tokens of "
            "data-parallel groups. Use modality='tokens' and distribute('DP'), or balance()."
        )
    if method == "concat" and graph.buffer.limits.row_tokens:
        raise SpecError(
            "pack: method is 'concat' and the layout gives every piece a row of its own; cutting pieces would fill no "
            "row. Use rows='packed', or method='best_fit'."
        )
    if graph.group_size is not None:
        raise SpecError(
            f"pack: group_size is {graph.group_size}, and microbatches are dealt to all groups alike; it would be "
            "ignored. Leave it out, or use balance()."
        )


def check_owner(graph: DGraph, backbone: LoadingPlan, scope: str) -> None:
    """Raise SpecError where the items of a graph cannot follow a plan of tokens."""
    known = isinstance(backbone, LoadingPlan) and backbone.modality == "tokens"
    if not known or backbone.draw is not graph.buffer.draw:
        raise SpecError("toward: the backbone is no plan of this step's tokens; images would have no destination.")
    if graph.modality != "images" or scope not in ("world", "group"):
        raise SpecError(
            f"toward: modality is {graph.modality!r} and scope {scope!r}; only images have an owner. Use it on a "
            "graph of images, with scope 'world' or 'group'."
        )
