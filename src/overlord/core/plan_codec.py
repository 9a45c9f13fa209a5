"""Plans as bytes: encoded once per step; every role reads its part without copying.

A block is a JSON header (names, numbers, the offset of each column) followed by the aligned columns. Decoding makes
views into the block, so a loader or a constructor touches only the part it uses.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Draw, Pieces
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, Routing
from overlord.core.samples import dtype_from_text, dtype_to_text, padded
from overlord.errors import StateError

MAGIC = b"OVERPLAN"
BLOB_VERSION = 3

Arrays = dict[str, npt.NDArray[Any]]

_PLAN_SCALARS = (
    "num_buckets",
    "num_microbatches",
    "pad_multiple",
    "axis",
    "modality",
    "broadcast",
    "slicing",
    "bin_multiple",
    "row_tokens",
    "context_cuts",
)
_OPTIONAL = ("cp_sizes", "first_ranks", "counts", "ends")
_TOTALS = ("global_loss_tokens", "total_tokens", "squared_tokens")
_ROUTES = ("sender", "receiver", "microbatch", "position", "length", "sample", "start", "row", "heads")


def plan_to_bytes(plan: LoadingPlan) -> memoryview:
    """Return a plan as one block of bytes."""
    draw = plan.draw
    order, offsets = draw.by_source
    arrays: Arrays = {"source": draw.source, "meta": draw.meta, "by_source": order, "source_offsets": offsets}
    if draw.items is not None:
        arrays["items"] = draw.items
    scalars: dict[str, Any] = {
        "step": draw.step,
        "names": draw.names,
        "weights": draw.weights,
        "mixture_version": draw.mixture_version,
        "order_digest": draw.digest,
        "plan_digest": plan.digest,
        "totals": {name: getattr(plan, name) for name in _TOTALS},
        "plan": _plan_columns(plan, "", arrays),
    }
    if plan.tree is not None:
        scalars["tree"] = plan.tree.sizes()
    if plan.encoder is not None:
        scalars["encoder"] = _plan_columns(plan.encoder, "encoder.", arrays)
    if plan.routing is not None:
        scalars["world_size"] = plan.routing.world_size
        arrays.update({f"routing.{name}": getattr(plan.routing, name) for name in _ROUTES})
        arrays.update(zip(("routing.patches", "routing.begins"), plan.routing.images, strict=True))
    return _write(scalars, arrays)


def plan_from_bytes(blob: bytes | memoryview) -> LoadingPlan:
    """Read a plan back; its columns are views into the block.

    Raises:
        StateError: for bytes that are no plan of this version.
    """
    scalars, arrays = _read(memoryview(blob))
    draw = Draw(
        scalars["step"],
        tuple(scalars["names"]),
        arrays["source"],
        arrays["meta"],
        tuple(scalars["weights"]),
        scalars["mixture_version"],
        arrays.get("items"),
    )
    # Digests and indices travel with the plan: a role that needs only a part must not compute them again.
    draw.__dict__.update(digest=scalars["order_digest"], by_source=(arrays["by_source"], arrays["source_offsets"]))
    plan = _plan_of(draw, scalars["plan"], "", arrays)
    if "encoder" in scalars:
        plan = dataclasses.replace(plan, encoder=_plan_of(draw, scalars["encoder"], "encoder.", arrays))
    if "world_size" in scalars:
        routes = {name: arrays[f"routing.{name}"] for name in _ROUTES}
        images = (arrays["routing.patches"], arrays["routing.begins"])
        plan = dataclasses.replace(plan, routing=Routing(scalars["world_size"], **routes, images=images))
    if "tree" in scalars:
        plan = dataclasses.replace(plan, tree=ClientPlaceTree.from_sizes(scalars["tree"], what="the mesh of a plan"))
    plan.__dict__.update(scalars["totals"], digest=scalars["plan_digest"])
    return plan


def _plan_columns(plan: LoadingPlan, prefix: str, arrays: Arrays) -> dict[str, Any]:
    arrays[f"{prefix}bin_offsets"] = plan.bin_offsets
    for name in ("sample", "start", "length"):
        arrays[f"{prefix}{name}"] = getattr(plan.pieces, name)
    arrays.update({f"{prefix}{n}": getattr(plan, n) for n in _OPTIONAL if getattr(plan, n) is not None})
    return {name: getattr(plan, name) for name in _PLAN_SCALARS}


def _plan_of(draw: Draw, scalars: dict[str, Any], prefix: str, arrays: Arrays) -> LoadingPlan:
    pieces = Pieces(*(arrays[f"{prefix}{name}"] for name in ("sample", "start", "length")))
    found: dict[str, Any] = {name: arrays.get(f"{prefix}{name}") for name in _OPTIONAL}
    found |= {**scalars, "broadcast": tuple(scalars["broadcast"])}
    return LoadingPlan(draw=draw, pieces=pieces, bin_offsets=arrays[f"{prefix}bin_offsets"], **found)


def _write(scalars: dict[str, Any], arrays: Arrays) -> memoryview:
    table: dict[str, tuple[str, list[int], int]] = {}
    at = 0
    for name, array in arrays.items():
        table[name] = (dtype_to_text(array.dtype), list(array.shape), at)
        at += padded(array.nbytes)
    head = json.dumps({"version": BLOB_VERSION, "arrays": table, **scalars}).encode()
    lead = MAGIC + struct.pack("<Q", len(head)) + head
    begin = padded(len(lead))
    # numpy allocates in huge pages; joining into a new `bytes` spends four times the copy on page faults.
    blob = np.empty(begin + at, np.uint8)
    blob[: len(lead)] = np.frombuffer(lead, np.uint8)
    for name, array in arrays.items():
        place = begin + table[name][2]
        blob[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return blob.data


def _read(blob: memoryview) -> tuple[dict[str, Any], Arrays]:
    if len(blob) < len(MAGIC) + 8 or bytes(blob[: len(MAGIC)]) != MAGIC:
        raise StateError("these bytes are not a plan of overlord; a rank would load nothing. Pass what a planner gave.")
    (length,) = struct.unpack("<Q", blob[len(MAGIC) : len(MAGIC) + 8])
    head: dict[str, Any] = json.loads(bytes(blob[len(MAGIC) + 8 : len(MAGIC) + 8 + length]))
    if head.pop("version") != BLOB_VERSION:
        raise StateError("the plan was written by another version of overlord. Use one version for all hosts of a job.")
    begin = padded(len(MAGIC) + 8 + length)
    arrays: Arrays = {}
    for name, (dtype, shape, at) in head.pop("arrays").items():
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(blob, dtype_from_text(dtype), count, begin + at).reshape(shape)
    return head, arrays
