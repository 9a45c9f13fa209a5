"""How a mesh is written down: short text, mappings, Megatron's settings, torch's DeviceMesh.

Everything here returns the fields of a ClientPlaceTree, which does the last checks itself. Nothing of
torch is imported: a DeviceMesh is known by its names and its grid of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from overlord.core.spec_errors import did_you_mean, show
from overlord.errors import SpecError

AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in tp."""

COUNTS = (*AXES, "dp_replicate", "ep", "vpp")
"""Every size a tree has."""

_MEGATRON = ("tp", "cp", "ep", "dp", "pp")
_AXIS_OF_NAME = {
    "pp": "pp",
    "dp": "dp",
    "batch": "dp",
    "dp_replicate": "dp",
    "dp_shard": "dp",
    "fsdp": "dp",
    "ep": "dp",  # experts are spread over ranks that each have samples of their own
    "cp": "cp",
    "ulysses": "cp",
    "sp": "cp",
    "tp": "tp",
}


def sizes_from_text(text: str) -> dict[str, Any]:
    """Return the fields of a short form; those of a module stand under "modules".

    Example:
        >>> sizes_from_text("dp=4,encoder.dp=8")
        {'dp': '4', 'modules': {'encoder': {'dp': '8'}}}
    """
    if not isinstance(cast("object", text), str):
        raise SpecError(f"mesh is {show(text)}, not text; the ranks cannot be counted. Write it as 'dp=2,cp=2,tp=2'.")
    sizes: dict[str, Any] = {}
    modules: dict[str, dict[str, Any]] = {}
    for part in text.replace(",", " ").split():
        name, equals, size = part.partition("=")
        module, dot, axis = name.rpartition(".")
        if not equals or axis == "modules":
            raise SpecError(f"mesh {text!r}: {part!r} is not axis=size. Write it as in 'dp=2,cp=2,tp=2'.")
        into = modules.setdefault(module, {}) if dot else sizes
        if axis in into:
            raise SpecError(f"mesh {text!r}: {name} is given twice; one would be lost. Give it once.")
        into[axis] = size
    return sizes | {"modules": modules} if modules else sizes


def values_from_sizes(sizes: Mapping[str, Any], known: Sequence[str], what: str) -> dict[str, Any]:
    """Return fields with their sizes as whole numbers; meshes of modules stay as they were written."""
    if not isinstance(cast("object", sizes), Mapping):
        raise SpecError(
            f"{what} is {show(sizes)}, not a mapping of axes to sizes; the ranks cannot be counted. Write it as in "
            "{dp: 2, tp: 2}."
        )
    values: dict[str, Any] = {}
    for axis, size in sizes.items():
        if axis not in known:
            raise SpecError(
                f"{what}: unknown axis {axis!r}; its ranks would get no data."
                f"{did_you_mean(axis, known)} Known axes: {', '.join(COUNTS)}."
            )
        if axis == "modules" and not isinstance(size, Mapping):
            raise SpecError(
                f"{what}: modules is {show(size)}, not a mapping of names to meshes; no module would be found. "
                "Write it as in {encoder: {dp: 8}}."
            )
        values[axis] = size if axis in ("modules", "order") else _whole(axis, size, what)
    return values


def flat_sizes(sizes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return sizes as the short form has them: of a module only the axes it uses."""
    flat = [(name, size) for name, size in sizes.items() if name != "modules"]
    for module, inner in sizes.get("modules", {}).items():
        flat += [(f"{module}.{name}", size) for name, size in inner.items() if size != 1 or name == "dp"]
    return flat


def _whole(axis: str, size: Any, what: str) -> int:
    try:
        if isinstance(size, (bool, float)):
            raise ValueError
        return int(size)
    except (TypeError, ValueError):
        raise SpecError(
            f"{what}: {axis} is {size!r}, not a whole number; the ranks cannot be counted. Write it as in {axis}=2."
        ) from None


def fields_from_megatron(order: str, sizes: Mapping[str, int | None], world_size: int | None) -> dict[str, Any]:
    """Return the fields for Megatron's order and sizes; a dp of None follows from the world size."""
    names = order.lower().split("-") if isinstance(cast("object", order), str) else []
    missing = [name for name in _MEGATRON if name not in names]
    if not names or not set(names) <= set(_MEGATRON) or len(set(names)) != len(names):
        raise SpecError(
            f"from_megatron: order is {show(order)}: it must name {', '.join(_MEGATRON)}, each once, the one that "
            "varies fastest first, or ranks would get the data of others. Write 'tp-cp-ep-dp-pp'."
        )
    for name in missing:
        if sizes[name] not in (1, None) or (name == "dp" and world_size is not None):
            raise SpecError(
                f"from_megatron: order is {order!r}, without {name}, but {name} is {sizes[name] or 'to be found'}; "
                f"where its ranks stand is not known. Name {name} in order."
            )
    fields: dict[str, Any] = dict(sizes)
    if fields["dp"] is None:
        fields["dp"] = 1 if world_size is None else _dp_of(world_size, sizes)
    ranks = prod(_counted(fields[axis], axis) for axis in AXES)
    if world_size is not None and ranks != world_size:
        raise SpecError(
            f"from_megatron: dp is {fields['dp']}, so pp*dp*cp*tp is {ranks}, but world_size is {world_size}; some "
            "ranks would get no data, or some data no rank. Leave dp out, and it follows from world_size."
        )
    return fields | {"order": _whole_order([name for name in reversed(names) if name != "ep"])}


def _dp_of(world_size: int, sizes: Mapping[str, int | None]) -> int:
    rest = prod(_counted(sizes[axis], axis) for axis in ("tp", "cp", "pp"))
    if _counted(world_size, "world_size") % rest:
        raise SpecError(
            f"from_megatron: world_size is {world_size}, not a multiple of tp*cp*pp = {sizes['tp']}*{sizes['cp']}*"
            f"{sizes['pp']} = {rest}; some ranks would get no data. Use a multiple of {rest} ranks, or smaller axes."
        )
    return world_size // rest


def _counted(size: object, name: str) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise SpecError(
            f"from_megatron: {name} is {size!r}: it must be a whole number of at least 1, or there are no ranks to "
            f"feed. Write {name}=1 for an axis you do not use."
        )
    return size


def _whole_order(axes: Sequence[str]) -> str:
    """Return an order of all axes; those not named have one rank, so any place is right for them."""
    if [axis for axis in AXES if axis in axes] == list(axes):
        return "-".join(AXES)
    return "-".join([*(axis for axis in AXES if axis not in axes), *axes])


def fields_from_device_mesh(mesh: Any) -> dict[str, Any]:
    """Return the fields for a DeviceMesh, with the order that its grid of ranks shows."""
    names, grid = _names_and_grid(mesh)
    wide = [dim for dim in range(grid.ndim) if grid.shape[dim] > 1]
    corner = (0,) * grid.ndim
    step = {dim: int(grid[(*corner[:dim], 1, *corner[dim + 1 :])]) - int(grid[corner]) for dim in wide}
    outer = sorted(wide, key=lambda dim: -step[dim])
    flat = grid.squeeze().transpose([wide.index(dim) for dim in outer]).ravel()
    if not np.array_equal(flat, np.arange(grid.size)):
        first = int(np.flatnonzero(flat != np.arange(grid.size))[0])
        raise SpecError(
            f"device mesh ({_described(names, grid)}): its place {first} holds rank {int(flat[first])}; a tree of the "
            f"same sizes has rank {first} there, so ranks would get the data of others. Give the mesh of all ranks, "
            f"0 to {grid.size - 1}, laid out axis by axis, not a part of it."
        )
    axes = [_AXIS_OF_NAME[names[dim]] for dim in outer]
    runs = [axis for i, axis in enumerate(axes) if i == 0 or axes[i - 1] != axis]
    batch = [names[dim] for dim in outer if _AXIS_OF_NAME[names[dim]] == "dp"]
    if len(set(runs)) != len(runs) or "dp_replicate" in batch[1:]:
        raise SpecError(
            f"device mesh ({_described(names, grid)}): dimensions of one axis must stand together, dp_replicate "
            f"outside dp_shard, or ranks would get the data of others. Outermost first they are now "
            f"{', '.join(names[dim] for dim in outer)}; order them as pp, dp_replicate, dp_shard, cp, tp."
        )
    sizes = dict.fromkeys(AXES, 1)
    for dim in wide:
        sizes[_AXIS_OF_NAME[names[dim]]] *= grid.shape[dim]
    of_name = dict(zip(names, grid.shape, strict=True))
    extras = {name: int(of_name.get(name, 1)) for name in ("dp_replicate", "ep")}
    return {**sizes, **extras, "order": _whole_order(runs)}


def _names_and_grid(mesh: Any) -> tuple[list[str], npt.NDArray[np.int64]]:
    inner: Any = getattr(mesh, "mesh", None)
    named = getattr(mesh, "mesh_dim_names", None)
    if not hasattr(inner, "tolist"):
        raise SpecError(
            f"from_device_mesh: {show(mesh)} is not a DeviceMesh: it has no grid of ranks, so nobody could be fed. "
            "Give torch.distributed.device_mesh.init_device_mesh(...), or write ClientPlaceTree(dp=..., tp=...)."
        )
    grid = np.asarray(inner.tolist(), dtype=np.int64)
    if not named or len(named) != grid.ndim or len(set(named)) != len(named):
        raise SpecError(
            f"device mesh of shape {grid.shape}: mesh_dim_names is {named!r}: each of the {grid.ndim} dimensions needs "
            "a name of its own, or it is not known which ranks share samples. Give mesh_dim_names=('dp', 'tp')."
        )
    for name in named:
        if name not in _AXIS_OF_NAME:
            raise SpecError(
                f"device mesh: unknown dimension {name!r}; it is not known whether its ranks share samples."
                f"{did_you_mean(name, _AXIS_OF_NAME)} Known dimensions: {', '.join(_AXIS_OF_NAME)}."
            )
    return list(named), grid


def _described(names: Sequence[str], grid: npt.NDArray[np.int64]) -> str:
    return ", ".join(f"{name}={size}" for name, size in zip(names, grid.shape, strict=True))
