"""Ready strategies: functions of (buffer, tree) that decide where every sample of a step goes (the paper's figure 9).

Each name here is a frozen spec that can be called: `strategy=hdp(equal_counts=True)` of a launch in Python is
`strategy: {hdp: {equal_counts: true}}` in a job file, with the same options, defaults and checks. Nothing moves to
another step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import ConfigDict, Field, PlainValidator, create_model, model_validator

from overlord.core.draw import Buffer
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.spec_errors import Fault, conflict, did_you_mean, name_choices, show
from overlord.errors import SpecError
from overlord.job.spec_model import Spec, as_number, below, whole
from overlord.planning import costs
from overlord.planning.balancing.balance import Level, Method, MethodName, Objective
from overlord.planning.balancing.hybrid import Blocks
from overlord.planning.balancing.methods import deal
from overlord.planning.balancing.microbatches import least_labels, no_room, spread_labels
from overlord.planning.balancing.packing import PackMethod
from overlord.planning.checking import Strategy
from overlord.planning.costs import AnyCost, AnyOffload, CostFunction, written_cost, written_offload
from overlord.planning.dgraph import DGraph
from overlord.planning.encoder import Scope

__all__ = ["Strategy", "backbone_balance", "curriculum", "hdp", "long_short", "packed", "vanilla", "vlm_hybrid"]

_Axis = Literal["TP", "CP", "DP"]
_COSTS = ("cost", "encoder", "backbone", "audio")
"""Options that say what something costs."""
_LLAMA: dict[str, Any] = {"default": "llama_12b"}  # how an editor shows a default
_VIT: dict[str, Any] = {"default": "vit_2b"}


def _as_method(value: object) -> Method:
    known = get_args(MethodName)
    if not callable(value) and value not in known:
        raise Fault(f"expected {name_choices(known)}; nothing else is understood.{did_you_mean(value, known)}")
    return cast("Method", value)


def _as_axes(value: object) -> tuple[str, ...]:
    axes = [value] if isinstance(value, str) else value
    if isinstance(axes, str | Mapping) or not isinstance(axes, Collection):
        raise Fault("this must be a list of axes, such as [TP]; it would be unclear which ranks broadcast")
    found = [axis.upper() if isinstance(axis, str) else axis for axis in cast("Collection[object]", axes)]
    for number, axis in enumerate(found):
        if axis not in get_args(_Axis):
            raise Fault(
                f"expected {name_choices(get_args(_Axis))}; the trainer cannot broadcast along others", at=(number,)
            )
    return tuple(cast("list[str]", found))


_Balancing = Annotated[Method, PlainValidator(_as_method, json_schema_input_type=MethodName)]
_Axes = Annotated[Collection[str], PlainValidator(_as_axes, json_schema_input_type=list[_Axis])]


class StrategySpec(Spec, ABC):
    """A strategy by its options."""

    @abstractmethod
    def __call__(self, buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan | Mapping[str, LoadingPlan]:
        """Return the plan of a step."""

    def written(self) -> object:
        """Return the short form that a file holds: the name, with the options that differ from the defaults.

        Raises:
            SpecError: An option is a Python function, which YAML cannot hold.
        """
        name, options = type(self).__name__, dict[str, Any]()
        for option, value in self.__repr_args__():
            if option in _COSTS:
                options[option] = written_cost(value)
            elif isinstance(value, costs.Offload):
                options[option] = written_offload(value)
            elif callable(value):
                raise SpecError(
                    f"strategy.{name}.{option} is a Python function, which YAML cannot hold; the file would not give "
                    "the same plans. Keep the job in a Python file."
                )
            else:
                options[option] = list(value) if isinstance(value, tuple) else value
        return {name: options} if options else name

    def __repr_args__(self) -> Any:
        """Show the options that differ from the defaults."""
        for name, field in type(self).model_fields.items():
            if getattr(self, name) != field.get_default():
                yield name, getattr(self, name)


class vanilla(StrategySpec):
    """What loaders do without a plan: samples are dealt to buckets in drawing order, microbatches filled in turn."""

    def __call__(self, buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        """Return the plan of a step."""
        graph = DGraph.from_buffer(buffer, tree).mix().distribute("DP").cost(costs.tokens)
        bucket, microbatch = deal(graph.padded, tree.dp, buffer.limits.microbatch_tokens)
        count, fixed = int(microbatch.max(initial=0)) + 1, buffer.limits.microbatches
        if fixed is not None and count > fixed:
            raise no_room(buffer, graph.padded, tree.dp)
        count = fixed or -(-count // tree.microbatch_multiple) * tree.microbatch_multiple
        places = bucket * count + microbatch
        if tree.dp == 1:  # no microbatch is there only to keep ranks in step
            labels, most = least_labels(buffer, graph.items), buffer.limits.microbatch_tokens
            places = spread_labels(places, labels, graph.padded, count, most)
        return graph.placed(places, count, "round-robin, next fit").plan()


class backbone_balance(StrategySpec):
    """Gives every data-parallel group the same cost in every microbatch."""

    cost: AnyCost = Field(default=costs.llama_12b, kw_only=False, json_schema_extra=_LLAMA)
    """What a sequence costs: a model of `ol.costs`, or a function of lengths."""
    method: _Balancing = "greedy"
    """How sequences are placed: see `DGraph.balance`."""
    objective: Objective | None = None
    """What is made small: see `DGraph.balance`. By default pipeline on a mesh with pipeline stages, else lockstep."""
    level: Level = "interleaved"
    """How far a sequence may move: see `DGraph.balance`."""
    group_size: Annotated[int, whole(1, "no group could be made")] | None = None
    """Balance inside groups of so many data-parallel groups."""
    reorder: bool = False
    """Whether the longest sequence of a microbatch comes first."""
    broadcast: _Axes = ()
    """Axes along which the trainer broadcasts."""

    def __call__(self, buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        """Return the plan of a step."""
        graph = DGraph.from_buffer(buffer, tree, modality="tokens").mix()
        graph = graph.distribute(axis="DP", group_size=self.group_size).cost(self.cost)
        aim = None if self.level == "intra" else _objective(self.objective, tree)
        graph = graph.balance(self.method, objective=aim, level=self.level, reorder=self.reorder)
        return _broadcast(graph, self.broadcast).plan()

    @model_validator(mode="after")
    def _check_together(self) -> backbone_balance:
        if self.level == "intra" and self.objective not in (None, "lockstep"):
            raise conflict(
                "given, but with level: intra every microbatch is balanced by itself, in drawing order, so it would do "
                "nothing. Leave it out, or use level: interleaved",
                "objective",
            )
        return self


class vlm_hybrid(StrategySpec):
    """Balances images (and sounds, where `audio` says what they cost) over all ranks, tokens over the DP groups."""

    encoder: AnyCost = Field(default=costs.vit_2b, kw_only=False, json_schema_extra=_VIT)
    """What an image of so many patches costs."""
    backbone: AnyCost = Field(default=costs.llama_12b, kw_only=False, json_schema_extra=_LLAMA)
    """What a sequence of so many tokens costs."""
    audio: AnyCost | None = None
    """What a sound of so many mel frames costs; without it sounds are encoded where their tokens are."""
    scope: Scope = "world"
    """world: images and sounds may go to any rank; group: only to ranks of the group that holds their tokens."""
    split: bool = False
    """Whether images that cost more than an even share are cut into runs of patches for several ranks."""
    method: _Balancing = "greedy"
    """How tokens are balanced."""
    objective: Objective | None = None
    """What is made small for the tokens, as in `backbone_balance`."""
    broadcast: _Axes = ()
    """Axes along which the trainer broadcasts the tokens."""

    def __call__(self, buffer: Buffer, tree: ClientPlaceTree) -> dict[str, LoadingPlan]:
        """Return the plans of a step."""
        tokens = backbone_balance(self.backbone, method=self.method, objective=self.objective, broadcast=self.broadcast)
        plan = tokens(buffer, tree)
        images = DGraph.from_buffer(buffer, tree, modality="images").mix()
        images = images.distribute(axis="WORLD").cost(self.encoder).toward(plan, self.scope)
        plans = {"backbone": plan, "encoder": (images.split() if self.split else images).balance("greedy").plan()}
        if self.audio is not None:
            sounds = DGraph.from_buffer(buffer, tree, modality="audio").mix()
            sounds = sounds.distribute(axis="WORLD").cost(self.audio).toward(plan, self.scope)
            plans["audio_encoder"] = sounds.balance("greedy").plan()
        return plans


class long_short(StrategySpec):
    """Keeps long and short sequences in microbatches of their own, each kind balanced.

    All ranks meet the long sequences in the same microbatches, so no rank with short ones waits for them.
    """

    cost: AnyCost = Field(default=costs.llama_12b, kw_only=False, json_schema_extra=_LLAMA)
    """What a sequence costs."""
    threshold: Annotated[int, whole(1, "every sequence would be long")] | None = None
    """Tokens from which a sequence is long; half the context by default."""
    objective: Objective | None = None
    """What is made small: see `DGraph.balance`."""
    broadcast: _Axes = ()
    """Axes along which the trainer broadcasts."""

    def __call__(self, buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        """Return the plan of a step."""
        graph = DGraph.from_buffer(buffer, tree, modality="tokens").mix().distribute("DP").cost(self.cost)
        aim = _objective(self.objective, tree)
        long = graph.items.length >= (self.threshold or buffer.limits.context_length // 2)
        if long.all() or not long.any() or buffer.limits.microbatches is not None:
            return _broadcast(graph.balance("greedy", objective=aim), self.broadcast).plan()
        kinds = [graph.where(long, "long sequences"), graph.where(~long, "short sequences")]
        first, second = (_broadcast(g.balance("greedy", objective=aim), self.broadcast).plan() for g in kinds)
        return first.then(second)


class packed(StrategySpec):
    """Fills microbatches as full as they go, for trainers that pay for a full one anyway.

    Filled microbatches are then dealt to the data-parallel groups, those of like cost together. Where the trainer pays
    only for the tokens there are, use `backbone_balance`: it makes costs even and does not mind room.

    Example:
        >>> from overlord import ClientPlaceTree, summary_buffer
        >>> buffer = summary_buffer({"web": [700, 600, 400, 300]}, context_length=1000)
        >>> packed()(buffer, ClientPlaceTree(dp=2)).bin(0, 0).length.tolist()
        [700, 300]
    """

    cost: AnyCost = Field(default=costs.llama_12b, kw_only=False, json_schema_extra=_LLAMA)
    """What a sequence costs."""
    method: PackMethod = "best_fit"
    """best_fit, first_fit, or concat, which cuts plain text where a microbatch is full: see `DGraph.pack`."""
    broadcast: _Axes = ()
    """Axes along which the trainer broadcasts."""

    def __call__(self, buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        """Return the plan of a step."""
        graph = DGraph.from_buffer(buffer, tree, modality="tokens").mix().distribute(axis="DP").cost(self.cost)
        return _broadcast(graph.pack(self.method), self.broadcast).plan()


class hdp(StrategySpec):
    """ByteScale's hybrid data parallelism: every DP x CP rank (every pipeline, with stages) is a consumer of its own.

    A sequence that fits one rank (microbatch_tokens / cp) stays there; a longer one is shared by a block of neighbours.
    All ranks of a block run what they share as the same number of their microbatches. In lockstep and in pipelines a
    sequence is shared by as many ranks as its cost asks for, and its block is filled up with others.
    """

    cost: AnyCost = Field(default=costs.llama_12b, kw_only=False, json_schema_extra=_LLAMA)
    """What a sequence costs."""
    equal_counts: bool = False
    """Whether all ranks get the same number of microbatches, with dummies: for trainers that meet in each (EP)."""
    objective: Objective | None = None
    """sum: ranks run free; lockstep: they meet in every microbatch; pipeline: they are pipelines. By default lockstep
    with equal counts, else pipeline on a mesh with pipeline stages, else sum."""
    blocks: Blocks = "aligned"
    """aligned: blocks of 2, 4, .. ranks from a multiple of their number on, for process groups made ahead; any: of any
    number of neighbours."""
    offload: AnyOffload | None = None
    """Share long sequences among fewer ranks, where computation hides that a share of their activations waits on the
    host (`ol.costs.Offload`). The share of each microbatch is its `batch.meta.offload_ratio`: the trainer must keep so
    much there, as `HybridParallel` does."""
    broadcast: _Axes = ()
    """Axes along which the trainer broadcasts."""

    def __call__(self, buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        """Return the plan of a step."""
        graph = DGraph.from_buffer(buffer, tree, modality="tokens").mix().distribute(axis="CP").cost(self.cost)
        graph = graph.balance(
            "greedy",
            objective=self.objective,
            reorder=False,
            equal_counts=self.equal_counts,
            blocks=self.blocks,
            offload=self.offload,
        )
        return _broadcast(graph, self.broadcast).plan()


def _as_stages(value: object) -> tuple[tuple[int, Strategy], ...]:
    example = "Write pairs of first step and strategy, such as [[0, backbone_balance], [1000, long_short]]"
    if not isinstance(value, (list, tuple)) or not value:
        raise Fault(f"this must be a list with at least one stage. {example}")
    stages: list[tuple[int, Strategy]] = []
    for number, stage in enumerate(cast("Sequence[object]", value)):
        pair = cast("Sequence[object]", stage) if isinstance(stage, (list, tuple)) else ()
        if len(pair) != 2:
            raise Fault(f"this is not a stage. {example}", at=(number,))
        start = as_number(pair[0])
        least = stages[-1][0] + 1 if stages else 0
        if not isinstance(start, int) or start < least or (not stages and start != 0):
            begin = "0" if not stages else f"{least} or later"
            raise Fault(
                f"a stage begins here, and must at {begin}; some steps would have no strategy, or two. Begin with step "
                "0, and let stages follow each other",
                at=(number, 0),
            )
        with below(number, 1):
            stages.append((start, as_strategy(pair[1])))
    return tuple(stages)


class curriculum(StrategySpec):
    """Changes the strategy at given steps, as a run goes from short to long sequences.

    What is drawn changes with `Mixture.stages` or `Mixture.linear`; this changes where it goes.

    Example:
        >>> curriculum([(0, backbone_balance()), (10_000, long_short(threshold=4096))]).written()
        {'curriculum': [[0, 'backbone_balance'], [10000, {'long_short': {'threshold': 4096}}]]}
    """

    stages: Annotated[Sequence[tuple[int, Strategy]], PlainValidator(_as_stages)] = Field(kw_only=False)
    """Pairs of first step and strategy: the first begins with step 0, each later than the one before."""

    def __call__(self, buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan | Mapping[str, LoadingPlan]:
        """Return the plan of a step."""
        chosen = [strategy for step, strategy in self.stages if step <= buffer.step][-1]
        return chosen(buffer, tree)

    def written(self) -> object:
        """Return the form that a file holds."""
        return {"curriculum": [[step, written_strategy(stage)] for step, stage in self.stages]}


_KINDS: dict[str, type[StrategySpec]] = {
    kind.__name__: kind for kind in (vanilla, backbone_balance, vlm_hybrid, long_short, packed, hdp, curriculum)
}


def as_strategy(value: object) -> Strategy:
    """Return a strategy in any form that a launch takes: itself, its name, or a mapping of its name to its options.

    Raises:
        Fault: There is no such strategy.
        ValidationError: There is no such option.
    """
    if isinstance(value, type) and issubclass(value, StrategySpec):
        name = value.__name__
        raise conflict(f"ol.strategies.{name} itself makes strategies and is none. Call it: ol.strategies.{name}()")
    if callable(value):
        return cast("Strategy", value)
    given: object = {value: None} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise Fault(
            "this must be a strategy, its name, or a function of (buffer, tree); samples would have no place in the "
            "mesh. Use one of ol.strategies, such as ol.strategies.backbone_balance()"
        )
    for name in cast("Mapping[Any, Any]", given):
        if name not in _KINDS:
            raise conflict(
                f"there is no strategy {show(name)}; samples would have no place in the mesh."
                f"{did_you_mean(name, _KINDS)} Strategies: {', '.join(_KINDS)}"
            )
    if len(given) != 1:
        raise conflict(
            f"a strategy is one name with its options, but this holds {show(list(given)) if given else 'nothing'}; "
            "only one can decide. Write a name, or {backbone_balance: {objective: sum}}"
        )
    ((name, options),) = given.items()
    with below(name):
        if name == "curriculum":
            return curriculum(_as_stages(options))
        return _KINDS[name].nested({} if options is None else options)  # `{hdp: }` is a name without options


def written_strategy(strategy: Strategy) -> object:
    """Return a strategy as a job file holds it.

    Raises:
        SpecError: It is, or holds, a Python function, which YAML cannot hold.
    """
    if isinstance(strategy, StrategySpec):
        return strategy.written()
    raise SpecError(
        f"strategy is the Python function {name_of(strategy)!r}, which YAML cannot hold; the file would not give the "
        "same plans. Keep the job in a Python file, or use one of ol.strategies."
    )


def name_of(strategy: Strategy) -> str:
    """Return what a strategy is called in reports."""
    return getattr(strategy, "__name__", type(strategy).__name__)


def costs_of(strategy: Strategy | None) -> tuple[CostFunction | None, CostFunction | None]:
    """Return what a sequence and an image cost by a strategy; None where it does not say. A curriculum as its first."""
    if isinstance(strategy, curriculum):
        return costs_of(strategy.stages[0][1])
    if isinstance(strategy, vlm_hybrid):
        return strategy.backbone, strategy.encoder
    return (getattr(strategy, "cost", None) if isinstance(strategy, StrategySpec) else None), None


def follows_reports(strategy: Strategy | None) -> bool:
    """Whether a cost function of a strategy takes what the trainer reports. Of a function of your own it is unknown."""
    if isinstance(strategy, curriculum):
        return any(follows_reports(stage) for _, stage in strategy.stages)
    known = [getattr(strategy, name, None) for name in _COSTS] if isinstance(strategy, StrategySpec) else []
    return any(costs.takes_metrics(cost) for cost in known)


def built_in(strategy: Strategy | None) -> bool:
    """Whether a strategy is one of this file, with all its stages, and not a function of the user."""
    if isinstance(strategy, curriculum):
        return all(built_in(stage) for _, stage in strategy.stages)
    return strategy is None or isinstance(strategy, StrategySpec)


def encodes_apart(strategy: Strategy | None) -> frozenset[str]:
    """Return which media a strategy spreads over ranks apart from their tokens in every step: "images", "audio".

    Of a function of your own it is unknown. Clips are images here.
    """
    if isinstance(strategy, curriculum):
        return frozenset.intersection(*(encodes_apart(stage) for _, stage in strategy.stages))
    if not isinstance(strategy, vlm_hybrid):
        return frozenset()
    return frozenset({"images"} if strategy.audio is None else {"images", "audio"})


def meets_once(strategy: Strategy | None) -> bool:
    """Whether a strategy balances for groups that meet once a step (`objective: sum`). A curriculum as its first."""
    if isinstance(strategy, curriculum):
        return meets_once(strategy.stages[0][1])
    return isinstance(strategy, StrategySpec) and getattr(strategy, "objective", None) == "sum"


_Stages = list[tuple[int, str | dict[str, Any]]]
_Choices: Any = {name: (kind | None, None) for name, kind in _KINDS.items()} | {"curriculum": (_Stages | None, None)}
_ByName: Any = create_model("StrategyChoice", __config__=ConfigDict(extra="forbid", defer_build=True), **_Choices)
_Name: Any = Literal[tuple(_KINDS)]  # type: ignore[valid-type]
AnyStrategy = Annotated[Strategy, PlainValidator(as_strategy, json_schema_input_type=_ByName | _Name)]
"""A strategy in any form that a launch takes."""


def _objective(given: Objective | None, tree: ClientPlaceTree) -> Objective:
    """Return what to make small: microbatches of expert parallelism meet, those of a pipeline follow one another."""
    return given or ("pipeline" if tree.pp > 1 and not tree.is_lockstep else "lockstep")


def _broadcast(graph: DGraph, axes: Collection[str]) -> DGraph:
    for axis in axes:
        graph = graph.broadcast_at(axis)
    return graph
