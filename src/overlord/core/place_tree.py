"""ClientPlaceTree: the trainer's mesh as a tree, and where each rank stands in it (paper, Sec. 4.1).

A *bucket* is what one node of the tree consumes, as `distribute` makes them: all ranks of one dp
coordinate consume the same samples. Other frameworks' meshes are read in place_layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from overlord.core.place_checks import (
    COORDINATES,
    as_index,
    axis_named,
    broadcast_axes,
    check_counts,
    check_fit,
    check_world_size,
    parts_of,
    resized,
)
from overlord.core.place_drawing import draw_svg, draw_text
from overlord.core.place_layouts import AXES as AXES
from overlord.core.place_layouts import (
    COUNTS,
    fields_from_device_mesh,
    fields_from_megatron,
    flat_sizes,
    sizes_from_text,
    values_from_sizes,
)
from overlord.core.spec_errors import did_you_mean, show
from overlord.errors import SpecError

Int32s = npt.NDArray[np.int32]

_ORDER = "-".join(AXES)
_LEVELS = (*COORDINATES, "world")


@dataclass(frozen=True, slots=True)
class Coords:
    """Where one rank stands along every axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ClientPlaceTree:
    """The ranks of the trainer, by pipeline stage, data-parallel bucket, context part and tensor part.

    With the default order, rank = tp + TP * (cp + CP * (dp + DP * pp)).

    Example:
        >>> tree = ClientPlaceTree(dp=2, cp=2, tp=2)
        >>> tree.world_size, tree.coords(5)
        (8, Coords(pp=0, dp=1, cp=0, tp=1))
        >>> tree.consumers("DP", 1), tree.consumers("CP", 1), tree.num_buckets("WORLD")
        ([4, 5, 6, 7], [2, 3], 8)
        >>> tree.module("encoder").dp
        8
        >>> print(tree)
        pp=1 dp=2 cp=2 tp=2
    """

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel buckets: each gets its own samples."""
    cp: int = 1
    """Parts a sequence is cut into."""
    tp: int = 1
    """Ranks that see identical data."""
    order: str = field(default=_ORDER, kw_only=True)
    """Axes from outermost to innermost."""
    dp_replicate: int = field(default=1, kw_only=True)
    """Of dp, how many replicas; each replica shards the model over dp / dp_replicate ranks."""
    ep: int = field(default=1, kw_only=True)
    """Ranks over which experts are spread: dp and cp ranks, with no data of their own."""
    vpp: int = field(default=1, kw_only=True)
    """Chunks of the model on each pipeline stage; each chunk has its own view of a batch."""
    microbatch_group: int | None = field(default=None, kw_only=True)
    """Microbatches a chunk runs before the next chunk does; none means pp. Only with vpp."""
    modules: Mapping[str, ClientPlaceTree] | tuple[tuple[str, ClientPlaceTree], ...] = field(default=(), kw_only=True)
    """Meshes of modules on the same ranks. Give a mapping; it is kept as sorted pairs, to be hashable."""

    def __post_init__(self) -> None:
        check_counts(self)
        check_fit(self)
        object.__setattr__(self, "modules", _checked_modules(self))

    @classmethod
    def parse(cls, text: str) -> ClientPlaceTree:
        """Build from the short form of the command line.

        Example:
            >>> ClientPlaceTree.parse("dp=2,tp=4").world_size
            8
            >>> print(ClientPlaceTree.parse("dp=4,cp=2,ep=2,encoder.dp=8").module("encoder"))
            pp=1 dp=8 cp=1 tp=1
        """
        return cls.from_sizes(sizes_from_text(text), what=f"mesh {text!r}")

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, Any], *, what: str = "mesh") -> ClientPlaceTree:
        """Build from a mapping of fields, as `sizes` returns it; `what` begins the message if it is wrong."""
        values = values_from_sizes(sizes, [f.name for f in fields(cls)], what)
        if "modules" in values:
            values["modules"] = {name: _as_module(name, mesh, what) for name, mesh in values["modules"].items()}
        return cls(**values)

    @classmethod
    def from_megatron(
        cls, order: str = "tp-cp-ep-dp-pp", *, world_size: int | None = None,
        tp: int = 1, cp: int = 1, ep: int = 1, dp: int | None = None, pp: int = 1, vpp: int | None = None,
    ) -> ClientPlaceTree:  # fmt: skip
        """Build from Megatron's settings, whose order names the axis that varies fastest first.

        dp follows from world_size where that is given. "tp-cp-ep-pp-dp" is --use-tp-pp-dp-mapping.

        Example:
            >>> print(ClientPlaceTree.from_megatron("tp-cp-ep-pp-dp", world_size=16, tp=2, pp=4))
            pp=4 dp=2 cp=1 tp=2 order=dp-pp-cp-tp
        """
        sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp, "vpp": 1 if vpp is None else vpp}
        return cls(**fields_from_megatron(order, sizes, world_size))

    @classmethod
    def from_device_mesh(cls, mesh: Any) -> ClientPlaceTree:
        """Build from torch's DeviceMesh of all ranks, with the dimension names of torchtitan.

        Give the mesh that loads data, such as ("pp", "batch", "cp", "tp"): in one where cp is folded
        into "fsdp", cp cannot be seen and counts as dp.
        """
        return cls(**fields_from_device_mesh(mesh))

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp_shard(self) -> int:
        """How many ranks of dp one replica is sharded over."""
        return self.dp // self.dp_replicate

    @property
    def is_lockstep(self) -> bool:
        """Whether all buckets must have the same number of microbatches, because experts span them."""
        return self.ep > 1

    @property
    def microbatch_multiple(self) -> int:
        """What the number of microbatches of a step must be a multiple of."""
        return 1 if self.vpp == 1 else self.microbatch_group or self.pp

    @property
    def module_names(self) -> tuple[str, ...]:
        """Modules that were given a mesh, by name."""
        return tuple(name for name, _ in _pairs(self))

    def module(self, name: str | None = None) -> ClientPlaceTree:
        """Return the mesh of a module: this tree for the backbone, world-wide dp for an encoder not given."""
        if name is None or name == "backbone":
            return self
        given = dict(self.modules)
        if not isinstance(cast("object", name), str) or (name not in given and name != "encoder"):
            known = ["backbone", *sorted({"encoder", *given})]
            raise SpecError(
                f"module {name!r} is not in the mesh {self}; nobody would consume its data.{did_you_mean(name, known)} "
                f"Known modules: {', '.join(known)}. Add it with modules={{{name!r}: ClientPlaceTree(...)}}."
            )
        return given[name] if name in given else ClientPlaceTree(dp=self.world_size)

    def coords(self, rank: int) -> Coords:
        """Return where a rank stands."""
        if not 0 <= as_index("rank", rank) < self.world_size:
            raise SpecError(
                f"rank {rank} is not in the mesh {self}, which has ranks 0 to {self.world_size - 1}; it "
                "would get no data. Give the rank of this process, or a larger mesh."
            )
        at: dict[str, int] = {}
        for axis in reversed(self.order.split("-")):
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return Coords(**at)

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank that stands at these coordinates."""
        at = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        rank = 0
        for axis in self.order.split("-"):
            size = getattr(self, axis)
            if not 0 <= as_index(axis, at[axis]) < size:
                raise SpecError(
                    f"{axis}={at[axis]} is not in the mesh {self}: {axis} goes from 0 to {size - 1}. "
                    "Give a coordinate of the mesh."
                )
            rank = rank * size + at[axis]
        return rank

    def head(self, bucket: int) -> int:
        """Return the rank of a dp bucket that stands at pp 0, cp 0, tp 0."""
        return self.rank(dp=bucket)

    def grid(self) -> Int32s:
        """Return all ranks as an array [pp, dp, cp, tp]."""
        outer = self.order.split("-")
        ranks = np.arange(self.world_size, dtype=np.int32).reshape([getattr(self, axis) for axis in outer])
        return ranks.transpose([outer.index(axis) for axis in AXES])

    def coordinates(self) -> dict[str, Int32s]:
        """Return, for each axis, the coordinate of every rank; dp also as dp_replicate and dp_shard."""
        outer = self.order.split("-")
        ranks = np.arange(self.world_size, dtype=np.int32)
        found = np.unravel_index(ranks, tuple(getattr(self, axis) for axis in outer))
        at = {axis: found[outer.index(axis)].astype(np.int32) for axis in AXES}
        replicate, shard = np.divmod(at["dp"], np.int32(self.dp_shard))
        return at | {"dp_replicate": replicate, "dp_shard": shard}

    def num_buckets(self, axis: str) -> int:
        """Return how many buckets `distribute` makes at an axis.

        DP, CP and TP count the nodes of one pipeline stage down to that axis: CP has DP * CP of them,
        numbered cp + CP * dp. PP has one for each stage, WORLD one for each rank.
        """
        batch = self.dp * self.cp
        level = axis_named(axis, _LEVELS)
        nodes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "cp": batch, "tp": batch * self.tp}
        return nodes.get(level, self.world_size if level == "world" else self.dp)

    def nodes(self, axis: str) -> list[list[int]]:
        """Return the ranks that consume each bucket of an axis, in rank order."""
        return cast("list[list[int]]", self._node_ranks(axis).tolist())

    def consumers(self, axis: str, bucket: int) -> list[int]:
        """Return the ranks that consume one bucket of an axis, in rank order."""
        count = self.num_buckets(axis)
        if not 0 <= as_index(f"{axis} bucket", bucket) < count:
            raise SpecError(
                f"bucket {bucket} is not among the {axis} buckets 0 to {count - 1} of the mesh {self}; nobody "
                "would consume it. Give a bucket of the mesh, or a larger mesh."
            )
        return cast("list[int]", self._node_ranks(axis)[bucket].tolist())

    def ranks_of_bucket(self, dp: int) -> list[int]:
        """Return the ranks that consume the samples of one dp coordinate, in rank order."""
        return self.consumers("dp", dp)

    def buckets_of(self, axis: str) -> Int32s:
        """Return, for every rank, the bucket of an axis that it consumes."""
        ranks = self._node_ranks(axis)
        buckets = np.empty(self.world_size, dtype=np.int32)
        buckets[ranks] = np.arange(len(ranks), dtype=np.int32)[:, None]
        return buckets

    def bucket_of(self, axis: str, rank: int) -> int:
        """Return the bucket of an axis that a rank consumes."""
        at, level = self.coords(rank), axis_named(axis, _LEVELS)
        cp = at.cp + self.cp * at.dp
        nodes = {"pp": at.pp, "dp_replicate": at.dp // self.dp_shard, "cp": cp, "tp": at.tp + self.tp * cp}
        return nodes.get(level, rank if level == "world" else at.dp)

    def _node_ranks(self, axis: str) -> Int32s:
        level = axis_named(axis, _LEVELS)
        if level == "world":
            return np.arange(self.world_size, dtype=np.int32)[:, None]
        if level == "pp":
            ranks = self.grid().reshape(self.pp, -1)
        else:
            count = self.num_buckets(level)
            ranks = self.grid().reshape(self.pp, count, -1).transpose(1, 0, 2).reshape(count, -1)
        return np.sort(ranks, axis=1)

    def fetchers(self, axis: str = "DP", broadcast: Collection[str] = ("TP",)) -> list[int]:
        """Return the ranks that still fetch when the trainer broadcasts along some axes, in rank order.

        Along each of these axes the rank at coordinate 0 fetches, for all ranks of its group. Where the
        group consumes several buckets of `axis`, it fetches all of these: see `fetched_buckets`.

        Example:
            >>> ClientPlaceTree(dp=2, cp=2, tp=2).fetchers(broadcast=("TP", "CP"))
            [0, 4]
        """
        axis_named(axis, _LEVELS)
        at = self.coordinates()
        fetch = np.ones(self.world_size, dtype=np.bool_)
        for name in broadcast_axes(broadcast):
            fetch &= at[name] == 0
        return cast("list[int]", np.flatnonzero(fetch).tolist())

    def fetches(self, rank: int, broadcast: Collection[str] = ("TP",)) -> bool:
        """Return whether a rank still fetches when the trainer broadcasts along some axes."""
        at = self._coordinates_of(rank)
        return all(at[name] == 0 for name in broadcast_axes(broadcast))

    def fetched_buckets(self, axis: str, rank: int, broadcast: Collection[str] = ("TP",)) -> list[int]:
        """Return the buckets of an axis that a rank fetches for its broadcast group: none if it does not fetch."""
        shared = broadcast_axes(broadcast)
        if not self.fetches(rank, broadcast):
            return []
        at, here = self.coordinates(), self._coordinates_of(rank)
        alike = np.ones(self.world_size, dtype=np.bool_)
        for name in {"pp", "dp_replicate", "dp_shard", "cp", "tp"} - parts_of(shared):
            alike &= at[name] == here[name]
        return cast("list[int]", np.unique(self.buckets_of(axis)[alike]).tolist())

    def _coordinates_of(self, rank: int) -> dict[str, int]:
        at = self.coords(rank)
        replicate, shard = divmod(at.dp, self.dp_shard)
        return {"pp": at.pp, "dp": at.dp, "dp_replicate": replicate, "dp_shard": shard, "cp": at.cp, "tp": at.tp}

    def with_axis(
        self, *, modules: Mapping[str, ClientPlaceTree] | None = None, **sizes: int | None
    ) -> ClientPlaceTree:
        """Return a tree with other sizes; meshes of modules that only have dp follow the number of ranks.

        Example:
            >>> print(ClientPlaceTree(dp=2, tp=2).with_axis(dp=4))
            pp=1 dp=4 cp=1 tp=2
        """
        named: dict[str, Any] = {axis_named(axis, (*COUNTS, "microbatch_group")): size for axis, size in sizes.items()}
        edited = replace(self, modules=(), **named)
        return replace(edited, modules=_follow(self, edited.world_size) if modules is None else modules)

    def grow(self, axis: str, by: int = 1) -> ClientPlaceTree:
        """Return a tree with an axis made larger."""
        return self.with_axis(**resized(self, axis, by, 1))

    def shrink(self, axis: str, by: int = 1) -> ClientPlaceTree:
        """Return a tree with an axis made smaller."""
        return self.with_axis(**resized(self, axis, by, -1))

    def check_world_size(self, world_size: int) -> None:
        """Raise SpecError if the trainer has another number of ranks than the mesh."""
        check_world_size(self, world_size)

    def sizes(self) -> dict[str, Any]:
        """Return what `from_sizes` builds this tree from: the four axes, and all else that is not as by default."""
        plain = {f.name: f.default for f in fields(self)} | dict.fromkeys(AXES)
        extras = ("dp_replicate", "ep", "vpp", "microbatch_group", "order")
        sizes = {name: getattr(self, name) for name in (*AXES, *extras) if getattr(self, name) != plain[name]}
        return sizes | ({"modules": {name: mesh.sizes() for name, mesh in _pairs(self)}} if self.modules else {})

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in flat_sizes(self.sizes()))

    def draw(self) -> str:
        """Return the mesh as a small text tree; ranks of one line see identical data.

        Example:
            >>> print(ClientPlaceTree(dp=2, tp=2).draw())
            pp=1 dp=2 cp=1 tp=2 (4 ranks)
            |-- dp 0: ranks 0-1
            `-- dp 1: ranks 2-3
        """
        return draw_text(self)

    def to_svg(self) -> str:
        """Return the mesh as a drawing of nested boxes, an SVG file that needs nothing else."""
        return draw_svg(self)

    _repr_svg_ = to_svg


def _pairs(tree: ClientPlaceTree) -> tuple[tuple[str, ClientPlaceTree], ...]:
    return cast("tuple[tuple[str, ClientPlaceTree], ...]", tree.modules)


def _checked_modules(tree: ClientPlaceTree) -> tuple[tuple[str, ClientPlaceTree], ...]:
    try:
        given: dict[object, object] = dict(cast("Any", tree.modules))
    except (TypeError, ValueError):
        raise SpecError(
            f"mesh: modules is {show(tree.modules)}, not a mapping of names to meshes; no module would be found. Write "
            "it as in modules={'encoder': ClientPlaceTree(dp=8)}."
        ) from None
    for name, mesh in given.items():
        if not isinstance(name, str) or not name.isidentifier() or name == "backbone":
            raise SpecError(
                f"mesh: modules has the name {name!r}: a name is one word, and 'backbone' is the tree itself, so it "
                "could not be asked for. Name it as in modules={'encoder': ClientPlaceTree(dp=8)}."
            )
        if not isinstance(mesh, ClientPlaceTree) or mesh.modules:
            raise SpecError(
                f"mesh: modules[{name!r}] is {show(mesh)}: it must be a mesh without modules of its own; nobody would "
                "consume its data. Write it as in modules={'encoder': ClientPlaceTree(dp=8)}."
            )
        if mesh.world_size != tree.world_size:
            raise SpecError(
                f"mesh: modules[{name!r}] is {mesh} with {mesh.world_size} ranks, but the mesh has {tree.world_size}; "
                f"both stand on the same ranks, so some would get no data. Give it {tree.world_size} ranks, such as "
                f"ClientPlaceTree(dp={tree.world_size})."
            )
    return tuple(sorted(cast("dict[str, ClientPlaceTree]", given).items()))


def _as_module(name: object, mesh: object, what: str) -> object:
    if isinstance(mesh, str):
        return ClientPlaceTree.parse(mesh)
    if isinstance(mesh, Mapping):
        return ClientPlaceTree.from_sizes(cast("Mapping[str, Any]", mesh), what=f"{what}: module {name!r}")
    return mesh


def _follow(tree: ClientPlaceTree, world_size: int) -> dict[str, ClientPlaceTree]:
    """Return the meshes of the modules after the number of ranks has changed."""
    meshes: dict[str, ClientPlaceTree] = {}
    for name, mesh in _pairs(tree):
        if mesh.world_size != world_size and mesh.world_size != mesh.dp:
            raise SpecError(
                f"mesh {tree}: with {world_size} ranks instead of {tree.world_size}, modules[{name!r}] ({mesh}) no "
                "longer fits, and which of its axes should change is not known. Give its new mesh too: "
                f"with_axis(..., modules={{{name!r}: ClientPlaceTree(...)}})."
            )
        try:
            meshes[name] = replace(mesh, dp=world_size * mesh.dp // mesh.world_size)
        except SpecError as error:
            raise SpecError(f"modules[{name!r}] would follow to {world_size} ranks: {error}") from None
    return meshes


def ranks_of_host(number: int, hosts: int, world_size: int) -> range:
    """Return the ranks of one of several trainer hosts: neighbours, and as many on each as it takes.

    Example:
        >>> [ranks_of_host(number, 3, 8) for number in range(3)]
        [range(0, 3), range(3, 6), range(6, 8)]
    """
    per_host = -(-world_size // hosts)
    return range(min(number * per_host, world_size), min((number + 1) * per_host, world_size))
