"""What a client is told of a step, as JSON between its process and the service's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from overlord.core.place_tree import ClientPlaceTree
from overlord.roles.views import StepHeader


def header_to_json(header: StepHeader) -> dict[str, Any]:
    """Return a step header as JSON, without the names of the sources: they are told once."""
    found = {name: getattr(header, name) for name in StepHeader.__dataclass_fields__ if name != "names"}
    for name in ("mesh", "next_mesh"):
        found[name] = None if found[name] is None else mesh_to_text(found[name])
    return found


def header_from_json(given: Mapping[str, Any], names: tuple[str, ...]) -> StepHeader:
    """Read a step header; the names of the sources were told before, or with it."""
    meshes = {name: mesh_from_text(given[name]) for name in ("mesh", "next_mesh") if given[name] is not None}
    return StepHeader(**{**given, **meshes}, names=names)


@functools.lru_cache(maxsize=16)
def mesh_to_text(tree: ClientPlaceTree) -> str:
    """Write a mesh; that of many steps is the same one."""
    return str(tree)


@functools.lru_cache(maxsize=16)
def mesh_from_text(text: str) -> ClientPlaceTree:
    """Read a mesh that `mesh_to_text` wrote."""
    return ClientPlaceTree.parse(text)
