"""ClientPlaceTree: the trainer's mesh as a tree, and the place of each rank in it (paper, Sec. 4.1).

A *bucket* holds the samples that one node of the tree consumes, as `distribute` makes them: all ranks of one dp
coordinate consume the same samples. torch is not imported: a DeviceMesh is read by its names and its grid of ranks.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from overlord.core.spec_errors import did_you_mean, is_whole, show
from overlord.errors import SpecError

Int32s = npt.NDArray[np.int32]
AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in tp."""
COUNTS = (*AXES, "dp_replicate", "ep", "vpp")
"""Every size a tree has."""
MOST_RANKS = 1 << 20
"""Ranks of a mesh, times the chunks of the model on each: with more, planning would take minutes a step."""
COORDINATES = ("pp", "dp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes along which a rank has a coordinate; dp also as its two parts."""
_ORDER = "-".join(AXES)
_LEVELS = (*COORDINATES, "world")
_BUCKETS_BY = {"dp_shard": ("dp",), "cp": ("dp", "cp"), "tp": ("dp", "cp", "tp"), "world": AXES}
"""Axes whose coordinates decide the bucket of a rank, where these are others than the one that is distributed over."""


@dataclass(frozen=True, slots=True)
class Coords:
    """The coordinates of one rank."""

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
        _check_counts(self)
        _check_fit(self)
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
        return cls.from_sizes(_sizes_from_text(text), what=f"mesh {text!r}")

    @classmethod
    def of(cls, given: ClientPlaceTree | Mapping[str, Any] | str) -> ClientPlaceTree:
        """Build from a mapping of sizes or the short form of the command line; a tree is returned as it is."""
        if isinstance(given, ClientPlaceTree):
            return given
        return cls.parse(given) if isinstance(given, str) else cls.from_sizes(given)

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, Any], *, what: str = "mesh") -> ClientPlaceTree:
        """Build from a mapping of fields, as `sizes` returns it; `what` begins the message if it is wrong."""
        values = _values_from_sizes(sizes, [f.name for f in fields(cls)], what)
        if "modules" in values:
            values["modules"] = {name: _as_module(name, mesh, what) for name, mesh in values["modules"].items()}
        return cls(**values)

    @classmethod
    def from_megatron(
        cls,
        order: str = "tp-cp-ep-dp-pp",
        *,
        world_size: int | None = None,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        dp: int | None = None,
        pp: int = 1,
        vpp: int | None = None,
    ) -> ClientPlaceTree:
        """Build from Megatron's settings; its order names the axis that varies fastest first.

        dp follows from world_size where that is given. "tp-cp-ep-pp-dp" is --use-tp-pp-dp-mapping.

        Example:
            >>> print(ClientPlaceTree.from_megatron("tp-cp-ep-pp-dp", world_size=16, tp=2, pp=4))
            pp=4 dp=2 cp=1 tp=2 order=dp-pp-cp-tp
        """
        sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp, "vpp": 1 if vpp is None else vpp}
        return cls(**_fields_from_megatron(order, sizes, world_size))

    @classmethod
    def from_device_mesh(cls, mesh: Any) -> ClientPlaceTree:
        """Build from torch's DeviceMesh of all ranks, with the dimension names of torchtitan.

        Give the mesh that loads data, such as ("pp", "batch", "cp", "tp"): in one where cp is folded
        into "fsdp", cp cannot be seen and counts as dp.
        """
        return cls(**_fields_from_device_mesh(mesh))

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
                f"module {name!r} is not in the mesh {self}; no rank would consume its data."
                f"{did_you_mean(name, known)} Known modules: {', '.join(known)}. "
                f"Add it with modules={{{name!r}: ClientPlaceTree(...)}}."
            )
        return given[name] if name in given else ClientPlaceTree(dp=self.world_size)

    def coords(self, rank: int) -> Coords:
        """Return the coordinates of a rank."""
        if not 0 <= _as_index("rank", rank) < self.world_size:
            raise SpecError(
                f"rank {rank} is not in the mesh {self}, which has ranks 0 to {self.world_size - 1}; it "
                "would get no data. Give the rank of this process, or a larger mesh."
            )
        at: dict[str, int] = {}
        for axis in reversed(self.order.split("-")):
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return Coords(**at)

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at these coordinates."""
        at = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        rank = 0
        for axis in self.order.split("-"):
            size = getattr(self, axis)
            if not 0 <= _as_index(axis, at[axis]) < size:
                raise SpecError(
                    f"{axis}={at[axis]} is not in the mesh {self}: {axis} goes from 0 to {size - 1}. "
                    "Give a coordinate of the mesh."
                )
            rank = rank * size + at[axis]
        return rank

    def head(self, bucket: int) -> int:
        """Return the rank of a dp bucket at pp 0, cp 0, tp 0."""
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
        level = _axis_named(axis, _LEVELS)
        nodes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "cp": batch, "tp": batch * self.tp}
        return nodes.get(level, self.world_size if level == "world" else self.dp)

    def nodes(self, axis: str) -> list[list[int]]:
        """Return the ranks that consume each bucket of an axis, in rank order."""
        return cast("list[list[int]]", self._node_ranks(axis).tolist())

    def consumers(self, axis: str, bucket: int) -> list[int]:
        """Return the ranks that consume one bucket of an axis, in rank order."""
        count = self.num_buckets(axis)
        if not 0 <= _as_index(f"{axis} bucket", bucket) < count:
            raise SpecError(
                f"bucket {bucket} is not among the {axis} buckets 0 to {count - 1} of the mesh {self}; no rank "
                "would consume it. Give a bucket of the mesh, or a larger mesh."
            )
        return cast("list[int]", self._node_ranks(axis)[bucket].tolist())

    def buckets_of(self, axis: str) -> Int32s:
        """Return, for every rank, the bucket of an axis that it consumes."""
        ranks = self._node_ranks(axis)
        buckets = np.empty(self.world_size, dtype=np.int32)
        buckets[ranks] = np.arange(len(ranks), dtype=np.int32)[:, None]
        return buckets

    def bucket_of(self, axis: str, rank: int) -> int:
        """Return the bucket of an axis that a rank consumes."""
        at, level = self.coords(rank), _axis_named(axis, _LEVELS)
        cp = at.cp + self.cp * at.dp
        nodes = {"pp": at.pp, "dp_replicate": at.dp // self.dp_shard, "cp": cp, "tp": at.tp + self.tp * cp}
        return nodes.get(level, rank if level == "world" else at.dp)

    def _node_ranks(self, axis: str) -> Int32s:
        level = _axis_named(axis, _LEVELS)
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
        _axis_named(axis, _LEVELS)
        at = self.coordinates()
        fetch = np.ones(self.world_size, dtype=np.bool_)
        for name in _broadcast_axes(broadcast):
            fetch &= at[name] == 0
        return cast("list[int]", np.flatnonzero(fetch).tolist())

    def fetches(self, rank: int, broadcast: Collection[str] = ("TP",)) -> bool:
        """Return whether a rank still fetches when the trainer broadcasts along some axes."""
        at = self._coordinates_of(rank)
        return all(at[name] == 0 for name in _broadcast_axes(broadcast))

    def fetcher_of(self, rank: int, broadcast: Collection[str] = ("TP",)) -> int:
        """Return the rank that fetches for a rank when the trainer broadcasts along some axes.

        Example:
            >>> ClientPlaceTree(dp=2, cp=2, tp=2).fetcher_of(7, broadcast=("TP", "DP"))
            2
        """
        at = self._coordinates_of(rank) | dict.fromkeys(_parts_of(_broadcast_axes(broadcast)), 0)
        dp = at["dp_replicate"] * self.dp_shard + at["dp_shard"]
        return self.rank(pp=at["pp"], dp=dp, cp=at["cp"], tp=at["tp"])

    def group_buckets(self, axis: str, rank: int, broadcast: Collection[str] = ("TP",)) -> list[int]:
        """Return the buckets of an axis that the broadcast group of a rank consumes: its own, or several.

        Example:
            >>> ClientPlaceTree(dp=2, cp=2).group_buckets("CP", 1, broadcast=("DP",))
            [1, 3]
        """
        shared = _parts_of(_broadcast_axes(broadcast))
        if not shared & _parts_of(_BUCKETS_BY.get(_axis_named(axis, _LEVELS), (axis.lower(),))):
            return [self.bucket_of(axis, rank)]
        at, here = self.coordinates(), self._coordinates_of(rank)
        alike = np.ones(self.world_size, dtype=np.bool_)
        for name in {"pp", "dp_replicate", "dp_shard", "cp", "tp"} - shared:
            alike &= at[name] == here[name]
        return cast("list[int]", np.unique(self.buckets_of(axis)[alike]).tolist())

    def fetched_buckets(self, axis: str, rank: int, broadcast: Collection[str] = ("TP",)) -> list[int]:
        """Return the buckets of an axis that a rank fetches for its broadcast group: none if it does not fetch."""
        return self.group_buckets(axis, rank, broadcast) if self.fetches(rank, broadcast) else []

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
        named: dict[str, Any] = {_axis_named(axis, (*COUNTS, "microbatch_group")): size for axis, size in sizes.items()}
        edited = replace(self, modules=(), **named)
        return replace(edited, modules=_modules_for(self, edited.world_size) if modules is None else modules)

    def grow(self, axis: str, by: int = 1) -> ClientPlaceTree:
        """Return a tree with an axis made larger."""
        return self.with_axis(**_resized(self, axis, by, 1))

    def shrink(self, axis: str, by: int = 1) -> ClientPlaceTree:
        """Return a tree with an axis made smaller."""
        return self.with_axis(**_resized(self, axis, by, -1))

    def check_world_size(self, world_size: int) -> None:
        """Raise SpecError if the trainer has another number of ranks than the mesh."""
        if not is_whole(world_size):
            raise SpecError(
                f"world_size is {show(world_size)}, not a number of ranks; it cannot be compared with the "
                f"{self.world_size} ranks of the mesh {self}. Give the number of ranks of the trainer."
            )
        if world_size == self.world_size:
            return
        rest = self.pp * self.cp * self.tp
        fits = f"; dp={world_size // rest} would fit" if world_size > 0 and world_size % rest == 0 else ""
        effect = (
            "ranks beyond the mesh would get no data"
            if world_size > self.world_size
            else "no rank would consume some of the buckets, and the other ranks would wait"
        )
        raise SpecError(
            f"mesh {self} has {self.world_size} ranks but the world has {world_size}; {effect}. "
            f"Make pp*dp*cp*tp equal to the number of ranks{fits}."
        )

    def sizes(self) -> dict[str, Any]:
        """Return the mapping that `from_sizes` reads: the four axes, and fields that differ from their default."""
        plain = {f.name: f.default for f in fields(self)} | dict.fromkeys(AXES)
        extras = ("dp_replicate", "ep", "vpp", "microbatch_group", "order")
        sizes = {name: getattr(self, name) for name in (*AXES, *extras) if getattr(self, name) != plain[name]}
        return sizes | ({"modules": {name: mesh.sizes() for name, mesh in _pairs(self)}} if self.modules else {})

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in _flat_sizes(self.sizes()))

    def draw(self) -> str:
        """Return the mesh as a small text tree; ranks of one line see identical data.

        A level of one node is left out, and so is the middle of large meshes.

        Example:
            >>> print(ClientPlaceTree(pp=2, dp=2, tp=2).draw())
            pp=2 dp=2 cp=1 tp=2 (8 ranks)
            |-- pp 0: ranks 0-3
            |   |-- dp 0: ranks 0-1
            |   `-- dp 1: ranks 2-3
            `-- pp 1: ranks 4-7
                |-- dp 0: ranks 4-5
                `-- dp 1: ranks 6-7
        """
        levels, ranks = levels_of(self)
        nodes = [prod(level.size for level in levels[: depth + 1]) for depth in range(len(levels))]
        long = len(levels) > 1 and sum(nodes) > DRAWN_LINES
        lines = [f"{self} ({counted(self.world_size, 'rank')})", *_branches(levels, ranks, "", 0, long=long)]
        return "\n".join([*lines, *(f"module {name}: {self.module(name)}" for name in self.module_names)])

    def to_svg(self) -> str:
        """Return the mesh as a drawing of nested boxes, an SVG file that needs nothing else."""
        return drawing("mesh_picture", "draw_svg")(self)

    _repr_svg_ = to_svg


def ranks_of_host(number: int, hosts: int, world_size: int) -> range:
    """Return the ranks of one of several trainer hosts: consecutive ranks, the same number on every host but the last.

    Example:
        >>> [ranks_of_host(number, 3, 8) for number in range(3)]
        [range(0, 3), range(3, 6), range(6, 8)]
    """
    per_host = -(-world_size // hosts)
    return range(min(number * per_host, world_size), min((number + 1) * per_host, world_size))


# Meshes of modules, such as an encoder's.


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
                f"mesh: modules[{name!r}] is {show(mesh)}: it must be a mesh without modules of its own; no rank would "
                "consume its data. Write it as in modules={'encoder': ClientPlaceTree(dp=8)}."
            )
        if mesh.world_size != tree.world_size:
            raise SpecError(
                f"mesh: modules[{name!r}] is {mesh} with {mesh.world_size} ranks, but the mesh has {tree.world_size}; "
                f"both use the same ranks, so some would get no data. Give it {tree.world_size} ranks, such as "
                f"ClientPlaceTree(dp={tree.world_size})."
            )
    return tuple(sorted(cast("dict[str, ClientPlaceTree]", given).items()))


def _as_module(name: object, mesh: object, what: str) -> object:
    if isinstance(mesh, str):
        return ClientPlaceTree.parse(mesh)
    if isinstance(mesh, Mapping):
        return ClientPlaceTree.from_sizes(cast("Mapping[str, Any]", mesh), what=f"{what}: module {name!r}")
    return mesh


def _modules_for(tree: ClientPlaceTree, world_size: int) -> dict[str, ClientPlaceTree]:
    """Return the meshes of the modules for another number of ranks: one that uses only dp is resized."""
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


# Checks of sizes, axes and ranks; each raises SpecError.


def _check_counts(tree: ClientPlaceTree) -> None:
    """Raise SpecError for a size that is not a positive whole number, or an order that does not name the axes."""
    for axis in (*COUNTS, *(("microbatch_group",) if tree.microbatch_group is not None else ())):
        _counted(getattr(tree, axis), axis, "mesh")
    if not isinstance(cast("object", tree.order), str) or sorted(tree.order.split("-")) != sorted(AXES):
        raise SpecError(
            f"mesh: order is {tree.order!r}: it must name each of {', '.join(AXES)} once, outermost "
            f"first, or ranks would get the data of others. Write order={'-'.join(AXES)!r} or leave it out."
        )


def _check_fit(tree: ClientPlaceTree) -> None:
    """Raise SpecError for sizes that contradict each other, or that no cluster has."""
    chunks = prod(getattr(tree, axis) for axis in (*AXES, "vpp"))
    if max(chunks, tree.microbatch_group or 1) > MOST_RANKS:
        raise SpecError(
            f"mesh: {tree} has {chunks} ranks and chunks, and the most is {MOST_RANKS}; no step could be planned for "
            "them. Give the sizes of the mesh that trains."
        )
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
            f"mesh: vpp is {tree.vpp}, but pp is 1; there are no pipeline stages to hold several chunks. "
            "Leave vpp out, or give pp=2 or more."
        )
    if tree.microbatch_group is not None and tree.vpp == 1:
        raise SpecError(
            f"mesh: microbatch_group is {tree.microbatch_group}, but vpp is 1; it would change nothing, as there are "
            "no chunks to take turns. Leave it out, or give vpp=2 or more."
        )


def _resized(tree: ClientPlaceTree, axis: str, by: int, sign: int) -> dict[str, Any]:
    """Return {axis: new size}; `sign` is 1 to grow and -1 to shrink."""
    name, verb = _axis_named(axis, COUNTS), "grow" if sign > 0 else "shrink"
    size: int = getattr(tree, name)
    if isinstance(by, bool) or _as_index("by", by) < 1:
        raise SpecError(f"mesh {tree}: {verb} {name} by {by!r}: nothing would change. Give a by of 1 or more.")
    if size + sign * by < 1:
        raise SpecError(
            f"mesh {tree}: shrink {name} by {by} would leave {name}={size - by}; an axis below 1 has no ranks to feed. "
            + (f"Shrink it by {size - 1} at most." if size > 1 else f"{name} cannot shrink any more.")
        )
    return {name: size + sign * by}


def _as_index(what: str, value: object) -> int:
    """Return the number of a rank or bucket as an int, or raise SpecError."""
    try:
        return operator.index(cast("int", value))
    except TypeError:
        raise SpecError(
            f"{what} is {show(value)}, not a whole number, so it is not in the mesh. Give a number such as 0."
        ) from None


def _axis_named(axis: str, known: Collection[str]) -> str:
    """Return an axis in lower case if it is known here, or raise SpecError."""
    name = axis.lower() if isinstance(cast("object", axis), str) else ""
    if name in known:
        return name
    names = [word.upper() for word in known]
    why = "it has no data of its own" if name in ("ep", "vpp") else "it is not an axis of the mesh"
    raise SpecError(
        f"axis {axis!r} cannot be used here: {why}.{did_you_mean(str(axis).upper(), names)} "
        f"Known axes: {', '.join(names)}."
    )


def _broadcast_axes(broadcast: Collection[str]) -> list[str]:
    """Return the axes along which the trainer broadcasts; a single axis may be given as text."""
    given = (broadcast,) if isinstance(broadcast, str) else broadcast
    if not isinstance(cast("object", given), Collection):
        raise SpecError(
            f"broadcast is {show(given)}, not a collection of axes; which ranks fetch is unknown. Write ('TP',) or ()."
        )
    return [_axis_named(axis, COORDINATES) for axis in given]


def _parts_of(axes: Collection[str]) -> set[str]:
    """Return the axes, with dp replaced by dp_replicate and dp_shard."""
    return {part for axis in axes for part in (("dp_replicate", "dp_shard") if axis == "dp" else (axis,))}


# Conversions from text, mappings, Megatron's settings and torch's DeviceMesh. They return the fields of a
# ClientPlaceTree; its constructor does the remaining checks.


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


def _sizes_from_text(text: str) -> dict[str, Any]:
    """Return the fields of a short form; those of a module are under "modules".

    Example:
        >>> _sizes_from_text("dp=4,encoder.dp=8")
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


def _values_from_sizes(sizes: Mapping[str, Any], known: Sequence[str], what: str) -> dict[str, Any]:
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
        values[axis] = size if axis in ("modules", "order") else _size_of(axis, size, what)
    return values


def _flat_sizes(sizes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, size) pairs as the short form writes them; for a module only the axes it uses."""
    flat = [(name, size) for name, size in sizes.items() if name != "modules"]
    for module, inner in sizes.get("modules", {}).items():
        flat += [(f"{module}.{name}", size) for name, size in inner.items() if size != 1 or name == "dp"]
    return flat


def _size_of(axis: str, size: Any, what: str) -> int:
    try:
        if isinstance(size, (bool, float)):
            raise ValueError
        return int(size)
    except (TypeError, ValueError):
        raise SpecError(
            f"{what}: {axis} is {size!r}, not a whole number; the ranks cannot be counted. Write it as in {axis}=2."
        ) from None


def _fields_from_megatron(order: str, sizes: Mapping[str, int | None], world_size: int | None) -> dict[str, Any]:
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
                f"the places of its ranks are unknown. Name {name} in order."
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


def _counted(size: object, name: str, what: str = "from_megatron") -> int:
    if type(size) is not int or size < 1:  # not of numpy: a mesh is written as JSON
        raise SpecError(
            f"{what}: {name} is {size!r}: it must be a whole number of at least 1, or there are no ranks to "
            f"feed. Write {name}=1 for an axis you do not use."
        )
    return size


def _whole_order(axes: Sequence[str]) -> str:
    """Return an order of all axes; an axis that is not named has size 1, so its position does not matter."""
    if [axis for axis in AXES if axis in axes] == list(axes):
        return "-".join(AXES)
    return "-".join([*(axis for axis in AXES if axis not in axes), *axes])


def _fields_from_device_mesh(mesh: Any) -> dict[str, Any]:
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
            f"device mesh ({_described(names, grid)}): dimensions of one axis must be adjacent, dp_replicate "
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
            f"from_device_mesh: {show(mesh)} is not a DeviceMesh: it has no grid of ranks, so no rank can be "
            "assigned data. Give torch.distributed.device_mesh.init_device_mesh(...), or write "
            "ClientPlaceTree(dp=..., tp=...)."
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


# --------------------------------------------------------------------------------------------------------------
# The tree as text, and where its other drawings come from.


DRAWN_LINES = 64
"""In a text tree of more lines than this, only the first node of each level shows what is in it."""


@dataclass(frozen=True, slots=True)
class MeshLevel:
    """One level of the tree: what its nodes are called, and how many a parent has."""

    name: str
    size: int


def drawing(module: str, name: str) -> Callable[..., str]:
    """Return a function of `overlord.reports` that draws an object of a lower layer.

    `ClientPlaceTree.to_svg` and `DGraph.visualize` are methods for users, while charts, templates and jinja2 belong to
    the reports, which import the classes they draw. This is the only lower layer that uses a higher one: by name, and
    when a drawing is requested, so that no module here imports the reports, and a trainer never loads them.
    """
    draw: Callable[..., str] = getattr(importlib.import_module(f"overlord.reports.{module}"), name)
    return draw


def _branches(levels: Sequence[MeshLevel], ranks: Int32s, indent: str, number: int, *, long: bool) -> Iterator[str]:
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
        yield f"{indent}{'`--' if end else '|--'} {level.name} {named}: ranks {rank_ranges(ranks[i])}"
        if inner and (i == 0 or not long):
            below = i if level.name == "replicate" else 0
            yield from _branches(inner, ranks[i], indent + ("    " if end else "|   "), below, long=long)


def levels_of(tree: ClientPlaceTree) -> tuple[list[MeshLevel], Int32s]:
    """Return the levels above the tp groups, and the ranks as an array with one dimension a level, and tp."""
    levels = [
        MeshLevel("pp", tree.pp),
        MeshLevel("replicate", tree.dp_replicate),
        MeshLevel("dp", tree.dp_shard),
        MeshLevel("cp", tree.cp),
    ]
    wide = [level for level in levels if level.size > 1] or [MeshLevel("dp", 1)]
    if tree.dp_replicate > 1 and tree.dp_shard == 1:
        wide = [MeshLevel("dp", level.size) if level.name == "replicate" else level for level in wide]
    return wide, tree.grid().reshape([*(level.size for level in wide), tree.tp])


def counted(number: int, word: str) -> str:
    """Return how many there are of a thing."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def rank_ranges(ranks: Int32s) -> str:
    """Return numbers in order with runs joined, such as 0-3, 8-11."""
    found = np.sort(ranks, axis=None)
    starts = np.flatnonzero(np.diff(found, prepend=found[0] - 2) != 1)
    ends = np.append(starts[1:], len(found)) - 1
    runs = [(int(found[a]), int(found[b])) for a, b in zip(starts[:9], ends[:9], strict=True)]
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:8])
    return f"{text}, .. {found[-1]}" if len(runs) > 8 else text
