"""DGraph: the paper's dataflow graph (section 4). Samples of one step, from their sources to the ranks.

Rules of this file:
1. A graph is immutable: every primitive returns a new one, and `edges` lists the primitives that made it.
2. It is columnar: a state of all samples is one array; there is no object per sample.
3. It sees the metadata of one step's draw and nothing else. `mix` does not see the tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from overlord.core.draw import Buffer, Pieces, context_pieces
from overlord.core.place_tree import ClientPlaceTree, drawing
from overlord.core.plan import LoadingPlan, lay_out, order_in_bins, pad_lengths
from overlord.core.samples import FILE_SHIFT, SampleId
from overlord.core.spec_errors import did_you_mean, is_whole
from overlord.errors import SpecError
from overlord.job.layout_specs import piece_multiple, shape_of
from overlord.planning.balancing.balance import Level, Method, Objective, check_names, in_words, place
from overlord.planning.balancing.hybrid import Blocks, place_hybrid, spread_over_blocks
from overlord.planning.balancing.methods import loads as loads_of
from overlord.planning.balancing.microbatches import Placement, place_tokens
from overlord.planning.balancing.packing import PackMethod, fill_bins, place_bins
from overlord.planning.checking import check_inputs
from overlord.planning.costs import CostFunction, Offload, as_costs, takes_metrics
from overlord.planning.encoder import Scope, place_images, split_images

Int64s = npt.NDArray[np.int64]
Modality = Literal["tokens", "images", "videos", "audio"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One primitive that was applied."""

    primitive: str
    detail: str


@dataclass(frozen=True, eq=False)
class DGraph:
    """The samples of one step on their way to the ranks.

    Example:
        >>> from overlord import ClientPlaceTree, costs, summary_buffer
        >>> buffer = summary_buffer({"web": [900, 100, 300, 700]}, context_length=1024)
        >>> graph = DGraph.from_buffer(buffer, ClientPlaceTree(dp=2), modality="tokens").mix()
        >>> plan = graph.distribute(axis="DP").cost(costs.tokens).balance("greedy", objective="sum").plan()
        >>> plan.loads(plan.padded).sum(axis=1).tolist()
        [1000, 1000]
    """

    buffer: Buffer
    tree: ClientPlaceTree
    modality: Modality
    items: Pieces
    """What is moved: pieces of samples, or the images, clips or sounds of samples."""
    edges: tuple[Edge, ...] = ()
    axis: str | None = None
    group_size: int | None = None
    cost_fn: CostFunction | None = field(default=None, repr=False)
    costs: Int64s | None = field(default=None, repr=False)
    places: Int64s | None = field(default=None, repr=False)
    """bucket * M + microbatch of every item."""
    num_microbatches: int = 0
    reorder: bool = True
    broadcast: tuple[str, ...] = ()
    cp_sizes: Int64s | None = field(default=None, repr=False)
    """Hybrid data parallelism: how many ranks share each item."""
    counts: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    offload: Int64s | None = field(default=None, repr=False)
    """Which share of the activations of each item's microbatch waits on the host, in millionths."""
    offload_layers: int = 0
    owner: LoadingPlan | None = field(default=None, repr=False)
    scope: Scope = "world"
    notes: tuple[str, ...] = ()
    """Where items are not placed as was asked for, as there is no room; in sentences."""

    @classmethod
    def from_buffer(cls, buffer: Buffer, tree: ClientPlaceTree, modality: Modality = "tokens") -> DGraph:
        """Bind the samples of a step to a mesh, seen by one kind of metadata.

        Args:
            buffer: One step's draw with its metadata.
            tree: The trainer's mesh.
            modality: "tokens" (samples cut to the context, for the backbone); for an encoder "images" (images and
                clips), "videos" (clips alone) or "audio" (sounds).
        """
        check_inputs("DGraph.from_buffer", buffer, tree)
        known = get_args(Modality)
        if modality not in known:
            raise SpecError(
                f"DGraph.from_buffer: modality is {modality!r:.80}; no metadata has that name."
                f"{did_you_mean(str(modality), known)} Use one of {', '.join(known)}."
            )
        items = context_pieces(buffer) if modality == "tokens" else buffer.draw.media_runs(modality)
        what = {"tokens": "pieces", "images": "images", "videos": "clips", "audio": "sounds"}[modality]
        return cls(buffer, tree, modality, items, (Edge("from_buffer", f"{len(items)} {what} of step {buffer.step}"),))

    def mix(self, sources: Collection[str] | None = None) -> DGraph:
        """Show the mixture the step was drawn by, or narrow the graph to some of its sources.

        The draw itself is the job's mixture: it is made before any mesh is known, so that the stream does
        not depend on the mesh.
        """
        names, weights = self.buffer.names, self.buffer.draw.weights
        if sources is None:
            total = sum(weights) or 1.0
            ranked = sorted(zip(names, weights, strict=False), key=lambda pair: -pair[1])
            shares = [f"{name} {weight / total:.1%}" for name, weight in ranked if weight]
            shown = ", ".join(shares[:6]) + (f" and {len(shares) - 6} more" if len(shares) > 6 else "")
            return self._with("mix", f"mixture {self.buffer.draw.mixture_version}: {shown or 'as drawn'}")
        wanted = [sources] if isinstance(sources, str) else sources
        named = isinstance(wanted, Collection) and all(isinstance(name, str) for name in wanted)
        if not named or not wanted or isinstance(wanted, Mapping):
            raise SpecError(
                f"mix: sources is {sources!r:.80}, not a list of names; nothing could be chosen. Give at least one "
                "name; weights are those of the job's mixture."
            )
        for name in wanted:
            if name not in names:
                raise SpecError(
                    f"mix: no source is called {name!r}; the graph would be empty.{did_you_mean(name, list(names))} "
                    f"Sources: {', '.join(names[:12])}."
                )
        chosen = np.isin(self.buffer.source[self.items.sample], [names.index(name) for name in wanted])
        return self.where(chosen, f"only {', '.join(wanted)}")

    def where(self, chosen: npt.ArrayLike, detail: str = "some samples") -> DGraph:
        """Return the graph of some of the items (a mask over `items`)."""
        mask = np.asarray(chosen)
        if mask.dtype != np.bool_ or mask.shape != self.items.sample.shape:
            raise SpecError(
                f"where: the mask has type {mask.dtype} and shape {mask.shape}; it must say yes or no for each of the "
                f"{len(self.items)} items, or samples would be lost."
            )
        costs = self.costs[mask] if self.costs is not None else None
        return self._with("where", detail, items=self.items.take(mask), costs=costs, places=None, cp_sizes=None)

    def distribute(self, axis: str = "DP", group_size: int | None = None) -> DGraph:
        """Choose the consumers: "DP" groups, "CP" (all DP x CP ranks alike) or "WORLD" (every rank).

        Args:
            axis: Where in the tree the buckets are.
            group_size: Balance inside groups of so many buckets only, which is cheaper in very large clusters.
        """
        buckets = self.tree.num_buckets(axis)
        name = _checked_axis(axis, self.tree, self.modality, rows=self.buffer.limits.row_tokens > 0)
        if group_size is not None and not is_whole(group_size, 1):
            raise SpecError(f"distribute: group_size is {group_size!r}; no group could be made. Use 1 or more.")
        groups = "" if group_size is None else f" in groups of {group_size}"
        detail = f"{buckets} buckets over {name}{groups}"
        fresh = self._with("distribute", detail, axis=name, group_size=group_size, places=None, cp_sizes=None)
        return fresh if self.cost_fn is None else fresh._costed(self.cost_fn)

    def cost(self, fn: CostFunction) -> DGraph:
        """Say what an item costs: a model of `overlord.costs`, or any function of an array of lengths.

        A function with a parameter `metrics` also gets what the trainer reported for the step `lag` before.
        Lengths are tokens with their padding, the patches of images and clips, or the mel frames of sounds. Costs
        become integers, so that every machine compares alike.
        """
        if not callable(fn):
            raise SpecError(f"cost: {fn!r:.80} is not a function of lengths. Use a model of ol.costs, or a function.")
        return self._with("cost", _name(fn), cost_fn=fn, places=None)._costed(fn)

    def split(self, parts: npt.ArrayLike | None = None) -> DGraph:
        """Cut images that cost more than an even share into runs of patches for several ranks.

        Args:
            parts: Into how many runs each image is cut; by default as many as make it fit an even share.
        """
        self._need("split", axis=True, costs=True)
        if self.modality == "tokens":
            raise SpecError("split: tokens are split by context parallelism; use distribute(axis='CP') for that.")
        if self.modality == "audio":
            raise SpecError("split: a sound is one window of its encoder, which takes it whole. Leave split() out.")
        assert self.costs is not None
        items, costs = split_images(self.items, self.costs, self.num_buckets, parts)
        detail = f"{len(self.items)} images in {len(items)} runs"
        return self._with("split", detail, items=items, costs=costs, places=None)

    def toward(self, backbone: LoadingPlan, scope: Scope = "world") -> DGraph:
        """Keep images (clips, sounds) near the ranks of their tokens.

        Args:
            backbone: The plan of the tokens.
            scope: "world": any rank, the owner's ranks where their load is within 2 % of the least loaded.
                "group": only ranks of the owning data-parallel group, so that nothing crosses groups.
        """
        _check_owner(self, backbone, scope)
        return self._with("toward", f"within the {scope}", owner=backbone, scope=scope, places=None)

    def balance(
        self,
        method: Method = "greedy",
        *,
        objective: Objective | None = None,
        level: Level | None = None,
        reorder: bool | None = None,
        equal_counts: bool | None = None,
        blocks: Blocks | None = None,
        offload: Offload | None = None,
    ) -> DGraph:
        """Divide every bucket into microbatches and give each about the same cost.

        An argument that has no meaning for the items and the axis is refused.

        Args:
            method: "greedy", "karmarkar_karp", "zigzag", or a function (costs, num_bins, sizes, capacity) -> bins.
            objective: What is made small: the largest "sum" of a bucket; "lockstep", the sum over microbatches of
                the largest bucket (EP, or FSDP that gathers weights for each), by default; "pipeline", the time of the
                slowest pipeline. Over "CP" without equal counts it is by default "sum", or "pipeline" on a mesh with
                pipeline stages. With "intra" it is "lockstep".
            level: "interleaved" (any item to any microbatch of any bucket; by default), "inter" (buckets first, then
                the microbatches of each), "intra" (items stay in the microbatch they were drawn for).
            reorder: Whether the costliest item of a microbatch comes first (by default); False keeps the drawing
                order. Of tokens only: what a rank encodes is in the order in which it is sent.
            equal_counts: Over "CP": whether all ranks get the same number of microbatches, with dummies (by default,
                unless the objective is "sum" or "pipeline").
            blocks: Over "CP": which ranks may share a sequence: "aligned", 2, 4, .. ranks from a multiple of their
                number on (by default), or "any" number of neighbours.
            offload: Over "CP": share long sequences among fewer ranks, where computation hides that a share of their
                activations waits on the host; the plan says how much of each microbatch must.
        """
        self._need("balance", axis=True, costs=True)
        _check_balance(self, objective, level, reorder, equal_counts, blocks)
        _check_offload(self, offload)
        assert self.costs is not None
        if self.modality != "tokens":
            places = place_images(
                self.items, self.costs, self.num_buckets, method, self.tree, self.owner, self.scope, self.group_size
            )
            detail = f"{_name(method)}: {len(self.items)} {self.modality} over {self.num_buckets} ranks"
            return self._with("balance", detail, places=places, num_microbatches=1, notes=())
        if self.axis == "CP":
            equal = objective in (None, "lockstep") if equal_counts is None else equal_counts
            equal = equal or self.tree.is_lockstep  # experts meet in every microbatch: a rank with fewer would hang
            aim = objective or ("lockstep" if equal else "pipeline" if self.tree.pp > 1 else "sum")
            shape = shape_of(self.buffer.limits, self.tree, "CP")
            placed = place_hybrid(
                self.buffer, self.items, self.costs, self.tree, objective=aim, equal_counts=equal,
                blocks=blocks or "aligned", method=method, rank_multiple=shape.get("bin_multiple", 1), offload=offload,
            )  # fmt: skip
            detail = f"{_name(method)}, {aim}: {placed.detail}"
        else:
            aim, where = objective or "lockstep", level or "interleaved"
            how = partial(place, method=method, objective=aim, level=where, group_size=self.group_size)
            placed = place_tokens(self.buffer, self.items, self.costs, self.padded, self.tree, how)
            detail = f"{_name(method)}, {aim}, {where}: {placed.detail}"
        layers = 0 if offload is None else offload.layers
        notes = in_words(placed.notes, _name(method), self.group_size)
        return self._with_placement(
            "balance", detail, placed, reorder=reorder is not False, offload_layers=layers, notes=notes
        )

    def pack(self, method: PackMethod = "best_fit") -> DGraph:
        """Fill microbatches as full as they go, then give every bucket as many of them, those of like cost together.

        `balance` makes costs even and leaves room for that; this leaves as little room as it can. Microbatches that
        are missing in the last round are dummies.

        Args:
            method: "best_fit" (longest item first, into the fullest microbatch that takes it), "first_fit" (items as
                they were drawn, into the first that takes them), or "concat": items end to end, plain text cut where a
                microbatch is full; what has images or a loss mask of its own is never cut.
        """
        self._need("pack", axis=True, costs=True)
        _check_packing(self, method)
        assert self.cost_fn is not None
        items, bins = fill_bins(self.buffer, self.items, self.padded, self.tree, self.pad_multiple, method)
        graph = self if items is self.items else dataclasses.replace(self, items=items)._costed(self.cost_fn)
        assert graph.costs is not None
        placed = place_bins(self.buffer, items, bins, graph.costs, graph.padded, self.tree)
        return graph._with_placement("pack", f"{method}: {placed.detail}", placed, reorder=False)

    def placed(self, places: npt.ArrayLike, num_microbatches: int, detail: str = "by hand") -> DGraph:
        """Place every item yourself: `places` is bucket * num_microbatches + microbatch of each."""
        self._need("placed", axis=True)
        _check_placed(self, num_microbatches)
        wide = _checked_places(places, len(self.items), self.num_buckets, num_microbatches)
        return self._with("placed", detail, places=wide, num_microbatches=num_microbatches, reorder=False, notes=())

    def broadcast_at(self, axis: str) -> DGraph:
        """Say that the trainer broadcasts along an axis ("TP", "CP" or "DP"): only its first rank fetches.

        Along an axis whose ranks consume different samples ("DP") that rank fetches the microbatches of all of them:
        fewer clients are waited for, more bytes are sent.
        """
        name = str(axis).upper()
        if name not in ("TP", "CP", "DP"):
            raise SpecError(
                f"broadcast_at: axis is {axis!r}; the trainer cannot broadcast along it. Use 'TP', 'CP' or 'DP'."
            )
        if self.modality != "tokens":
            raise SpecError(
                f"broadcast_at: the graph is of {self.modality}, and each rank encodes others; it would be ignored. "
                "Call it on the graph of tokens."
            )
        return self._with("broadcast_at", name, broadcast=tuple(sorted({*self.broadcast, name})))

    def plan(self) -> LoadingPlan:
        """Return the loading plan."""
        self._need("plan", axis=True, places=True)
        assert self.places is not None and self.axis is not None
        items, places, priority = self.items, self.places, self.costs if self.reorder else None
        extra: dict[str, Any] = shape_of(self.buffer.limits, self.tree, self.axis) if self.modality == "tokens" else {}
        if self.cp_sizes is not None:
            index, places = spread_over_blocks(places, self.cp_sizes, self.num_microbatches)
            items, priority = items.take(index), priority[index] if priority is not None else None
        order = order_in_bins(places, priority)
        if self.cp_sizes is not None:
            shared = index[order]
            firsts = self.places[shared] // self.num_microbatches
            extra |= {
                "cp_sizes": self.cp_sizes[shared].astype(np.int32),
                "first_ranks": firsts.astype(np.int32),
            }
            if self.offload is not None:
                shares = np.zeros(self.num_buckets * self.num_microbatches, np.int32)
                shares[places] = self.offload[index]
                extra |= {"offload": shares, "offload_layers": self.offload_layers}
        shape = (self.num_buckets, self.num_microbatches)
        plan = lay_out(self.buffer.draw, items, places, *shape, order=order, pad_multiple=self.pad_multiple)
        plan = plan.with_kind(self.axis, self.modality, self.broadcast)
        extra |= {"notes": self.notes} if self.notes else {}
        plan = dataclasses.replace(plan, **extra) if extra else plan
        if self.counts is None:
            return plan
        return dataclasses.replace(plan, counts=_meeting_counts(plan, self.counts, self.tree.microbatch_multiple))

    def __repr__(self) -> str:
        done = " > ".join(edge.primitive for edge in self.edges)
        return f"DGraph(step={self.buffer.step}, {len(self.items)} items of {self.modality}: {done})"

    # -- inspection ----------------------------------------------------------------------------

    def trace(self, sample: SampleId | str) -> Trace:
        """Return the states of one sample, from its source to the ranks that consume it."""
        return _trace_sample(self, sample)

    def visualize(self, format: Literal["html", "mermaid", "dot"] = "html") -> str:
        """Return a picture of the graph: a self-contained HTML page, Mermaid or DOT."""
        return drawing("dgraph_picture", "picture_of")(self, format)

    @property
    def num_buckets(self) -> int:
        """Consumers along the chosen axis."""
        return self.tree.num_buckets(self.axis or "DP")

    @property
    def pad_multiple(self) -> int:
        """Every length is rounded up to a multiple of this: zigzag slices need two chunks per rank."""
        limits = self.buffer.limits
        if self.modality != "tokens" or self.axis == "CP" or limits.row_tokens:
            return 1
        return piece_multiple(limits.slicing, self.tree.cp)

    @cached_property
    def padded(self) -> Int64s:
        """The room that every item takes: its length with its padding."""
        if self.modality == "tokens" and self.buffer.limits.row_tokens:
            return np.full(len(self.items), self.buffer.limits.row_tokens, np.int64)
        return pad_lengths(self.items.length, self.pad_multiple)

    @cached_property
    def loads(self) -> Int64s:
        """The cost of every bin [bucket, microbatch]; a shared item counts with its part on each rank of its block."""
        self._need("loads", axis=True, costs=True, places=True)
        assert self.places is not None and self.costs is not None
        width = self.cp_sizes if self.cp_sizes is not None else np.ones(len(self.items), np.int64)
        index, places = spread_over_blocks(self.places, width, self.num_microbatches)
        sums = loads_of((self.costs // width)[index], places, self.num_buckets * self.num_microbatches)
        return sums.reshape(self.num_buckets, self.num_microbatches)

    # -- private -------------------------------------------------------------------------------

    def _with(self, primitive: str, detail: str, **changes: Any) -> DGraph:
        return dataclasses.replace(self, edges=(*self.edges, Edge(primitive, detail)), **changes)

    def _with_placement(
        self,
        primitive: str,
        detail: str,
        placed: Placement,
        *,
        reorder: bool,
        offload_layers: int = 0,
        notes: tuple[str, ...] = (),
    ) -> DGraph:
        detail = "; ".join((detail, *(note.rstrip(".") for note in notes)))
        at = {"places": placed.places, "num_microbatches": placed.count, "cp_sizes": placed.cp_sizes}
        kept = {"offload": placed.offload, "offload_layers": offload_layers, "notes": notes}
        return self._with(primitive, detail, reorder=reorder, counts=placed.counts, **at, **kept)

    def _costed(self, fn: CostFunction) -> DGraph:
        limits = self.buffer.limits
        metrics = self.buffer.metrics if takes_metrics(fn) else None  # reading them may wait for a report
        per_item = {"tokens": 1, "audio": limits.frames_per_token}.get(self.modality, limits.patches_per_token)
        lengths = pad_lengths(self.items.length, self.pad_multiple)  # padding to a full row costs no attention
        return dataclasses.replace(self, costs=as_costs(fn, lengths * per_item, "cost", metrics))

    def _need(self, primitive: str, *, axis: bool = False, costs: bool = False, places: bool = False) -> None:
        missing = [
            (axis and self.axis is None, "distribute(axis=..)", "it is not known which ranks consume the samples"),
            (costs and self.costs is None, "cost(..)", "it is not known what a sample costs"),
            (places and self.places is None, "balance(..)", "the samples have no place yet"),
        ]
        for wrong, remedy, why in missing:
            if wrong:
                raise SpecError(f"{primitive}: {why}. Call {remedy} before {primitive}.")


def _meeting_counts(plan: LoadingPlan, counts: npt.NDArray[np.int32], multiple: int) -> npt.NDArray[np.int32]:
    """Return the counts of a hybrid plan with the dummies without which ranks could not meet at the end of a step.

    Trainers with sharded parameters reduce gradients layer by layer in the last backward of every rank. A rank whose
    last microbatch is shared with a rank that has more to do would wait there for that one, which waits in the ring of
    the shared microbatch for the first. So it ends with an empty microbatch of its own, and so does a rank without any;
    or with as many as a virtual pipeline takes, since counts are multiples of that and stay so. Bins behind the last
    one of a rank are there, as another rank has them.

    Example:
        >>> from overlord.core.place_tree import ClientPlaceTree
        >>> from overlord.planning.low_level import summary_buffer
        >>> buffer = summary_buffer({"web": [8, 3]}, context_length=8, microbatch_tokens=8)
        >>> graph = DGraph.from_buffer(buffer, ClientPlaceTree(cp=2)).distribute("CP").cost(lambda n: n)
        >>> graph.balance("greedy", objective="sum").plan().counts.tolist()
        [2, 2]
    """
    assert plan.cp_sizes is not None and plan.first_ranks is not None
    made = np.maximum(counts, min(multiple, plan.num_microbatches)).astype(np.int32)
    ends = np.arange(plan.num_buckets) * plan.num_microbatches + made - 1
    busy = np.flatnonzero(plan.bin_offsets[ends + 1] > plan.bin_offsets[ends])
    last = plan.bin_offsets[ends[busy]]  # the first piece of the last microbatch
    first, size = plan.first_ranks[last].astype(np.int64), plan.cp_sizes[last].astype(np.int64)
    blocks = np.stack([first, first + size], axis=1).reshape(-1)
    longest = np.maximum.reduceat(np.append(counts, 0), blocks)[::2] if len(blocks) else first
    made[busy] += np.where(longest > counts[busy], multiple, 0).astype(np.int32)
    return made


# The states of one sample, from its source to the ranks that consume it.


@dataclass(frozen=True, slots=True)
class State:
    """One state of a sample."""

    name: str
    """The primitive that led to it, or "source"."""
    detail: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The states of one sample, in order."""

    sample: SampleId
    states: tuple[State, ...]

    def __str__(self) -> str:
        width = max(len(state.name) for state in self.states)
        return "\n".join([str(self.sample), *(f"  {s.name:<{width}}  {s.detail}" for s in self.states)])


def _trace_sample(graph: DGraph, sample: SampleId | str) -> Trace:
    """Return the states of a sample, as far as the graph goes."""
    if not isinstance(sample, (str, SampleId)):
        raise SpecError(f"trace: {sample!r:.80} is not a sample id. Give one of `batch.meta.sample_ids`, or its text.")
    wanted = _parse_sample_id(sample) if isinstance(sample, str) else sample
    draw = graph.buffer.draw
    source = draw.names.index(wanted.source) if wanted.source in draw.names else -1
    found = np.flatnonzero(
        (draw.source == source) & (draw.meta["row"] == wanted.row) & (draw.meta["epoch"] == wanted.epoch)
    )
    if not len(found):
        raise SpecError(
            f"trace: sample {wanted} is not in step {draw.step}; it was drawn in another step, or not at all. Take an "
            "id from `batch.meta.sample_ids` of this step."
        )
    at = int(found[0])
    meta = draw.meta[at]
    states = [
        State("source", f"{wanted.source}, row {wanted.row_in_file} of file {wanted.file}, epoch {wanted.epoch}"),
        State("from_buffer", f"number {at} of {len(draw)} in step {draw.step}: {int(meta['tokens'])} tokens"),
    ]
    items = np.flatnonzero(graph.items.sample == at)
    for edge in graph.edges[1:]:
        detail = edge.detail
        if edge.primitive == "cost" and graph.costs is not None:
            detail = f"{', '.join(f'{int(c):,}' for c in graph.costs[items])} ({edge.detail})"
        if edge.primitive in ("balance", "pack") and graph.places is not None:
            detail = "; ".join([_place(graph, int(item)) for item in items] + [n.rstrip(".") for n in graph.notes])
        states.append(State(edge.primitive, detail if len(items) else f"not in this graph ({edge.detail})"))
    if graph.places is not None and len(items):
        states.append(State("consumers", "; ".join(_consumers(graph, int(item)) for item in items)))
    return Trace(wanted, tuple(states))


def _parse_sample_id(text: str) -> SampleId:
    """Read the form that `str(sample_id)` writes.

    Example:
        >>> _parse_sample_id("web:2:7@0") == SampleId("web", (2 << 32) + 7, 0)
        True
    """
    try:
        place, epoch = text.rsplit("@", 1)
        source, file, row = place.rsplit(":", 2)
        return SampleId(source, (int(file) << FILE_SHIFT) + int(row), int(epoch))
    except ValueError:
        raise SpecError(
            f"sample {text!r} is not a sample id; nothing could be found. Write source:file:row@epoch, as batches and "
            "logs show it."
        ) from None


def _place(graph: DGraph, item: int) -> str:
    assert graph.places is not None
    bucket, microbatch = divmod(int(graph.places[item]), graph.num_microbatches)
    start, length = int(graph.items.start[item]), int(graph.items.length[item])
    return f"{graph.modality} {start} to {start + length - 1}: bucket {bucket}, microbatch {microbatch}"


def _consumers(graph: DGraph, item: int) -> str:
    assert graph.places is not None
    axis, first = graph.axis or "DP", int(graph.places[item]) // graph.num_microbatches
    width = int(graph.cp_sizes[item]) if graph.cp_sizes is not None else 1
    ranks = [rank for bucket in range(first, first + width) for rank in graph.tree.consumers(axis, bucket)]
    fetching = sorted({graph.tree.fetcher_of(rank, graph.broadcast) for rank in ranks})
    named = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"ranks {named}" + ("" if fetching == sorted(ranks) else f", fetched by {', '.join(map(str, fetching))}")


# Checks of the primitives: each names the primitive, what is wrong, and what to do.


def _checked_axis(axis: str, tree: ClientPlaceTree, modality: str, *, rows: bool = False) -> str:
    """Return the name of an axis that samples can be distributed over, or raise SpecError."""
    name = axis.upper()
    if name not in ("DP", "CP", "WORLD"):
        raise SpecError(f"distribute: axis is {axis!r}; its ranks share samples. Use 'DP', 'CP' or 'WORLD'.")
    if modality == "tokens" and name == "WORLD" and tree.num_buckets(axis) != tree.dp:
        raise SpecError(
            f"distribute: the mesh {tree} has pp, cp or tp above 1, and their ranks need the same tokens; "
            "over WORLD they would train on different ones. Use axis='DP' (or 'CP') for tokens, 'WORLD' for media."
        )
    if modality == "tokens" and name == "CP" and rows:
        raise SpecError(
            "distribute: over CP short sequences are packed on one rank and long ones spread over several, which "
            "rows of one length cannot follow. Use axis='DP' (not hdp), or the layout rows='packed'."
        )
    return name


def _checked_places(places: npt.ArrayLike, count: int, num_buckets: int, num_microbatches: int) -> Int64s:
    """Return the given places as int64, or raise SpecError where one does not exist."""
    given = np.asarray(places)
    if not is_whole(num_microbatches, 1):
        raise SpecError(f"placed: num_microbatches is {num_microbatches!r:.80}; use a whole number of at least 1.")
    most = num_buckets * num_microbatches
    if given.shape != (count,) or given.dtype.kind not in "iu":
        raise SpecError(
            f"placed: {given.shape} places of type {given.dtype} for {count} items; some would be lost. "
            "Give a whole number for each item."
        )
    if len(given) and not (int(given.min()) >= 0 and int(given.max()) < most):
        raise SpecError(
            f"placed: places go from {int(given.min())} to {int(given.max())}; there are bins 0 to "
            f"{most - 1}. Use bucket * num_microbatches + microbatch."
        )
    return given.astype(np.int64)


def _check_placed(graph: DGraph, num_microbatches: int) -> None:
    """Raise SpecError where a placement by hand would ignore what the graph was told before, or lose items."""
    told = {"group_size": graph.group_size, "toward()": graph.owner}
    for name, value in told.items():
        if value is not None:
            raise SpecError(
                f"placed: {name} is given, and you place every item yourself; it would be ignored. Leave it out, or "
                "use balance()."
            )
    if graph.modality != "tokens" and num_microbatches != 1:
        raise SpecError(
            f"placed: num_microbatches is {num_microbatches!r:.80}, and {graph.modality} are encoded in one; those of "
            "others would be lost. Use 1."
        )


def _check_balance(
    graph: DGraph,
    objective: Objective | None,
    level: Level | None,
    reorder: bool | None,
    equal_counts: bool | None,
    blocks: Blocks | None,
) -> None:
    """Raise SpecError for an argument of `balance` that would have no effect on these items and this axis."""
    check_names(objective, level)
    for name, flag in (("reorder", reorder), ("equal_counts", equal_counts)):
        if flag is not None and not isinstance(flag, bool):
            raise SpecError(f"balance: {name} is {flag!r:.80}, neither True nor False; it would not be known what is "
                            "wanted. Use one of them, or leave it out.")  # fmt: skip
    hybrid = graph.modality == "tokens" and graph.axis == "CP"

    def refuse(name: str, value: object, why: str, remedy: str) -> SpecError:
        return SpecError(f"balance: {name} is {value!r}, and {why}; it would be ignored. {remedy}")

    if equal_counts is not None and not hybrid:
        raise refuse(
            "equal_counts", equal_counts, f"all ranks have as many microbatches of {graph.modality} over {graph.axis}",
            "Leave it out, or use distribute(axis='CP') with tokens.",
        )  # fmt: skip
    if blocks is not None and not hybrid:
        raise refuse(
            "blocks", blocks, f"no blocks of ranks are made for {graph.modality} over {graph.axis}",
            "Leave it out, or use distribute(axis='CP') with tokens.",
        )  # fmt: skip
    if blocks is not None and blocks not in get_args(Blocks):
        known = get_args(Blocks)
        raise SpecError(
            f"balance: blocks is {blocks!r:.80}, which is unknown; no rank would know its block."
            f"{did_you_mean(blocks, known)} Use one of {', '.join(known)}."
        )
    if graph.modality != "tokens":
        for name, value in (("objective", objective), ("level", level), ("reorder", reorder)):
            if value is not None:
                why = f"{graph.modality} are encoded in one microbatch, whose largest rank is made small"
                raise refuse(name, value, why, "Leave it out.")
    if level == "intra" and objective not in (None, "lockstep"):
        raise refuse(
            "objective", objective, "with level='intra' every microbatch is balanced by itself, in drawing order",
            "Leave objective out, or use level='interleaved'.",
        )  # fmt: skip
    if not hybrid:
        return
    if level not in (None, "interleaved"):
        raise refuse("level", level, "over CP every rank fills its own microbatches", "Leave it out, or use axis='DP'.")
    if graph.group_size is not None:
        raise refuse(
            "group_size", graph.group_size, "over CP long sequences take blocks of any ranks",
            "Leave it out of distribute(), or use axis='DP'.",
        )  # fmt: skip
    if objective in ("sum", "pipeline") and (equal_counts or graph.tree.is_lockstep):
        raise refuse(
            "objective", objective, "ranks with equal counts of microbatches (equal_counts, experts) meet in each",
            "Use objective='lockstep', or equal_counts=False on a mesh without ep.",
        )  # fmt: skip
    if objective == "pipeline" and graph.tree.pp == 1:
        raise refuse(
            "objective", objective, f"the mesh {graph.tree} has one stage", "Use 'sum', or a mesh with pp > 1."
        )


def _check_offload(graph: DGraph, offload: Offload | None) -> None:
    """Raise SpecError where offloading is given and cannot change a plan."""
    if offload is None:
        return
    if graph.modality != "tokens" or graph.axis != "CP":
        raise SpecError(
            f"balance: offload is given, and no blocks of ranks are made for {graph.modality} over {graph.axis}, which "
            "it could make smaller; it would be ignored. Leave it out, or use distribute(axis='CP') with tokens."
        )
    if not isinstance(offload, Offload):
        raise SpecError(
            f"balance: offload is {offload!r:.80}; it is not known what computation hides. Use ol.costs.Offload(..)."
        )


def _check_packing(graph: DGraph, method: PackMethod) -> None:
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


def _check_owner(graph: DGraph, backbone: LoadingPlan, scope: str) -> None:
    """Raise SpecError where the items of a graph cannot follow a plan of tokens."""
    known = isinstance(backbone, LoadingPlan) and backbone.modality == "tokens"
    if not known or backbone.draw is not graph.buffer.draw:
        raise SpecError(
            f"toward: the backbone is no plan of this step's tokens; {graph.modality} would have no destination."
        )
    if graph.modality == "tokens" or scope not in ("world", "group"):
        raise SpecError(
            f"toward: modality is {graph.modality!r} and scope {scope!r}; only images, clips and sounds have an owner. "
            "Use it on a graph of them, with scope 'world' or 'group'."
        )
    if backbone.axis != "DP" or backbone.num_buckets != graph.tree.dp:
        raise SpecError(
            f"toward: the backbone is distributed over {backbone.num_buckets} buckets of {backbone.axis}, and "
            f"{graph.modality} are kept near the {graph.tree.dp} data-parallel groups of the mesh {graph.tree}; other "
            "buckets have no ranks there. Plan the tokens with distribute(axis='DP') on this mesh, or leave "
            "toward() out."
        )


def _name(fn: object) -> str:
    """Return the name of a method or cost for pictures and traces."""
    return fn if isinstance(fn, str) else str(getattr(fn, "name", "") or getattr(fn, "__name__", type(fn).__name__))
