"""Strategies as a job file writes them: checked when they are read, built when the job is run.

The options of a strategy are those of its function in `ol.strategies`, by the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, model_validator

from overlord.core.spec_errors import Fault, conflict, did_you_mean, show
from overlord.errors import SpecError
from overlord.job.spec_model import Spec, as_number, whole
from overlord.planning import strategies
from overlord.planning.balancing.balance import Level, Objective
from overlord.planning.balancing.packing import PackMethod
from overlord.planning.checking import Strategy
from overlord.planning.cost_specs import Cost, Preset, mapping_or_name
from overlord.planning.encoder import Scope

__all__ = ["AnyStrategy", "Cost", "StrategyChoice"]

Method = Literal["greedy", "karmarkar_karp", "zigzag"]
Axis = Literal["TP", "CP", "DP"]


def _as_axes(value: object) -> object:
    axes = [value] if isinstance(value, str) else value
    if not isinstance(axes, (list, tuple)):
        raise Fault("this must be a list of axes, such as [TP]; it would be unclear which ranks broadcast")
    return [axis.upper() if isinstance(axis, str) else axis for axis in cast("Sequence[object]", axes)]


def _any_form(value: object) -> object:
    return value  # the spec itself takes a name too; here only the schema is told


AnyCost = Annotated[Cost, BeforeValidator(_any_form, json_schema_input_type=Preset | Cost)]
Broadcast = Annotated[tuple[Axis, ...], BeforeValidator(_as_axes, json_schema_input_type=list[Axis])]
_LLAMA, _VIT = Cost(preset="llama_12b"), Cost(preset="vit_2b")


class _Options(Spec):
    @model_validator(mode="before")
    @classmethod
    def _name_whole_option(cls, data: Any) -> Any:
        # The beginning of a long name is less alike to it, letter by letter, than a misspelt one.
        known = cls.known_keys()
        for key in cast("Mapping[Any, object]", data) if isinstance(data, Mapping) else ():
            longer = [name for name in known if isinstance(key, str) and key and name.startswith(key)]
            if key not in known and len(longer) == 1:
                raise conflict(
                    f"unknown key; it would be ignored and {cls.__name__} would not do what you asked. Did you mean "
                    f"{longer[0]!r}? Known keys: {', '.join(known)}",
                    cast("str", key),
                )
        return cast("object", data)


class Vanilla(_Options):
    """No plan: samples are dealt in turn."""

    def build(self) -> Strategy:
        """Return the strategy."""
        return strategies.vanilla()


class BackboneBalance(_Options):
    """Every data-parallel group gets the same cost, in every microbatch."""

    cost: AnyCost = _LLAMA
    """What a sequence costs."""
    method: Method = "greedy"
    """How sequences are placed."""
    objective: Objective | None = None
    """What is made small; by default what the mesh asks for."""
    level: Level = "interleaved"
    """How far a sequence may move."""
    group_size: Annotated[int, whole(1, "no group could be made")] | None = None
    """Balance inside groups of so many data-parallel groups."""
    reorder: bool = False
    """Whether the longest sequence of a microbatch comes first."""
    broadcast: Broadcast = ()
    """Axes along which the trainer broadcasts."""

    def build(self) -> Strategy:
        """Return the strategy."""
        return strategies.backbone_balance(
            self.cost.model(),
            method=self.method,
            objective=self.objective,
            level=self.level,
            group_size=self.group_size,
            reorder=self.reorder,
            broadcast=self.broadcast,
        )


class VlmHybrid(_Options):
    """Images over all ranks, tokens over the data-parallel groups."""

    encoder: AnyCost = _VIT
    """What an image costs."""
    backbone: AnyCost = _LLAMA
    """What a sequence costs."""
    scope: Scope = "world"
    """Whether images may go to any rank, or only to ranks of the group that holds their tokens."""
    split: bool = False
    """Whether images that cost more than an even share are cut for several ranks."""
    method: Method = "greedy"
    """How sequences are placed."""
    objective: Objective | None = None
    """What is made small for the tokens."""
    broadcast: Broadcast = ()
    """Axes along which the trainer broadcasts the tokens."""

    def build(self) -> Strategy:
        """Return the strategy."""
        return strategies.vlm_hybrid(
            self.encoder.model(),
            self.backbone.model(),
            scope=self.scope,
            split=self.split,
            method=self.method,
            objective=self.objective,
            broadcast=self.broadcast,
        )


class LongShort(_Options):
    """Long and short sequences in microbatches of their own."""

    cost: AnyCost = _LLAMA
    """What a sequence costs."""
    threshold: Annotated[int, whole(1, "every sequence would be long")] | None = None
    """Tokens from which a sequence is long; half the context by default."""
    objective: Objective | None = None
    """What is made small."""
    broadcast: Broadcast = ()
    """Axes along which the trainer broadcasts."""

    def build(self) -> Strategy:
        """Return the strategy."""
        return strategies.long_short(
            self.cost.model(), threshold=self.threshold, objective=self.objective, broadcast=self.broadcast
        )


class Packed(_Options):
    """Microbatches filled as full as they go, those of like cost together."""

    cost: AnyCost = _LLAMA
    """What a sequence costs."""
    method: PackMethod = "best_fit"
    """How microbatches are filled."""
    broadcast: Broadcast = ()
    """Axes along which the trainer broadcasts."""

    def build(self) -> Strategy:
        """Return the strategy."""
        return strategies.packed(self.cost.model(), method=self.method, broadcast=self.broadcast)


class Hdp(_Options):
    """Every DP x CP rank is a consumer of its own; long sequences are spread over several."""

    cost: AnyCost = _LLAMA
    """What a sequence costs."""
    equal_counts: bool = False
    """Whether all ranks get the same number of microbatches, with dummies."""
    broadcast: Broadcast = ()
    """Axes along which the trainer broadcasts."""

    def build(self) -> Strategy:
        """Return the strategy."""
        return strategies.hdp(self.cost.model(), equal_counts=self.equal_counts, broadcast=self.broadcast)


def _as_stages(value: object) -> tuple[tuple[int, StrategyChoice], ...]:
    example = "Write pairs of first step and strategy, such as [[0, backbone_balance], [1000, long_short]]"
    if not isinstance(value, (list, tuple)) or not value:
        raise Fault(f"this must be a list with at least one stage. {example}")
    stages: list[tuple[int, StrategyChoice]] = []
    for number, stage in enumerate(cast("Sequence[object]", value)):
        pair = cast("Sequence[object]", stage) if isinstance(stage, (list, tuple)) else ()
        if len(pair) != 2:
            raise Fault(f"this is not a stage. {example}", at=(number,))
        start = as_number(pair[0])
        least = stages[-1][0] + 1 if stages else 0
        if not isinstance(start, int) or start < least or (not stages and start != 0):
            raise Fault(f"a stage begins here, and must at {'0' if not stages else f'{least} or later'}; some steps "
                        "would have no strategy, or two. Begin with step 0, and let stages follow each other",
                        at=(number, 0))  # fmt: skip
        try:
            stages.append((start, StrategyChoice.from_mapping(pair[1], lambda _: "")))
        except SpecError as error:
            raise Fault(str(error).removeprefix(": "), at=(number, 1), show_value=False) from None
    return tuple(stages)


class StrategyChoice(Spec):
    """A strategy by name, with its options: exactly one of these keys.

    Example:
        >>> StrategyChoice.read("hdp").name, StrategyChoice.read("{hdp: {equal_counts: true}}").written()
        ('hdp', {'hdp': {'equal_counts': True}})
    """

    vanilla: Vanilla | None = None
    """Samples dealt in turn, as loaders do without a plan."""
    backbone_balance: BackboneBalance | None = None
    """Equal cost for every data-parallel group, in every microbatch."""
    vlm_hybrid: VlmHybrid | None = None
    """Images over all ranks, tokens over the data-parallel groups."""
    long_short: LongShort | None = None
    """Long and short sequences in microbatches of their own."""
    packed: Packed | None = None
    """Microbatches filled as full as they go."""
    hdp: Hdp | None = None
    """Long sequences spread over as many ranks as they need."""
    curriculum: (
        Annotated[
            tuple[tuple[int, StrategyChoice], ...],
            BeforeValidator(_as_stages, json_schema_input_type=list[tuple[int, StrategyChoice | str]]),
        ]
        | None
    ) = None
    """Pairs of first step and strategy."""

    @classmethod
    def read(cls, text: str, where: str = "--strategy") -> StrategyChoice:
        """Return the strategy of a command line: a name, or a mapping as a job file has it.

        Raises:
            SpecError: There is no such strategy or option.
        """
        return cls.from_mapping(mapping_or_name(text), lambda _: where)

    @property
    def name(self) -> str:
        """The strategy's name."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    def build(self) -> Strategy:
        """Return the strategy itself."""
        chosen = getattr(self, self.name)
        if self.curriculum is not None:
            return strategies.curriculum([(step, stage.build()) for step, stage in self.curriculum])
        return cast("Strategy", chosen.build())

    def backbone_cost(self) -> Cost:
        """Return what a sequence costs by this strategy; that of the first stage of a curriculum."""
        if self.curriculum is not None:
            return self.curriculum[0][1].backbone_cost()
        chosen = getattr(self, self.name)
        found: Cost = getattr(chosen, "backbone" if self.vlm_hybrid is not None else "cost", _LLAMA)
        return found

    @property
    def meets_once(self) -> bool:
        """Whether it balances for groups that meet once a step (`objective: sum`); as the first stage does."""
        if self.curriculum is not None:
            return self.curriculum[0][1].meets_once
        return getattr(getattr(self, self.name), "objective", None) == "sum"

    def encoder_cost(self) -> Cost:
        """Return what an image costs by this strategy."""
        return _VIT if self.vlm_hybrid is None else self.vlm_hybrid.encoder

    def written(self) -> object:
        """Return the short form that a file holds: the name, with the options that differ from the defaults."""
        if self.curriculum is not None:
            return {"curriculum": [[step, stage.written()] for step, stage in self.curriculum]}
        chosen: Spec = getattr(self, self.name)
        options: dict[str, Any] = {}
        for name, field in type(chosen).model_fields.items():
            value = getattr(chosen, name)
            if value != field.get_default():
                options[name] = value.written() if isinstance(value, Cost) else value
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
        return {self.name: options} if options else self.name

    @model_validator(mode="before")
    @classmethod
    def _take_short_form(cls, data: Any) -> Any:
        known = list(cls.model_fields)
        given = {data: {}} if isinstance(data, str) else data
        if not isinstance(given, Mapping):
            return data
        for name in cast("Mapping[Any, Any]", given):
            if name not in known:
                raise conflict(
                    f"there is no strategy {show(name)}; samples would have no place in the mesh."
                    f"{did_you_mean(name, known)} "
                    f"Strategies: {', '.join(known)}"
                )
        if len(given) != 1:
            raise conflict(
                f"a strategy is one name with its options, but this holds {show(list(given)) if given else 'nothing'}; "
                "only one can decide. Write a name, or {backbone_balance: {objective: sum}}"
            )
        # `strategy: {hdp: }` is a name without options.
        return {name: {} if options is None else options for name, options in given.items()}


StrategyChoice.model_rebuild()
AnyStrategy = Annotated[StrategyChoice, BeforeValidator(_any_form, json_schema_input_type=StrategyChoice | str)]
"""A strategy in any form that a file may hold."""
