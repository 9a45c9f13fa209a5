"""`Mixture`: how much of each source, as a schedule over steps. What is drawn is decided in planning."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, Unpack, cast

from pydantic import BeforeValidator, Field, field_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from overlord.core.spec_errors import Fault, Loc, conflict
from overlord.job.spec_model import Spec, Takes, as_finite, as_position, below, code_of, real, spec_field, whole

# --------------------------------------------------------------------------------------------------------------
# `Learn`: how a mixture follows the trainer's reports, or its own counts. The rules themselves are in planning.


Rule = Literal["doremi", "odm", "ado", "skill_it", "repetition", "function"]
MixtureFunction = Callable[[int, Mapping[str, float]], Mapping[str, float]]
"""(step, the report in force) -> weights of the sources; the report is empty before the first one counts."""

_OPTIONS: dict[str, tuple[str, ...]] = {
    "doremi": ("eta", "eps"),
    "odm": ("warmup", "smoothing", "floor"),
    "ado": ("refit_every", "first_fit"),
    "skill_it": ("eta", "graph", "window"),
    "repetition": ("decay_epochs",),
    "function": ("fn", "name", "code_digest"),
}


def _as_graph(value: object) -> dict[str, dict[str, float]]:
    example = "Write {from: {to: strength}}, such as {math: {code: 0.4}}"
    if not isinstance(value, Mapping) or not value:
        raise Fault(f"this must map each source to the sources it helps. {example}")
    graph: dict[str, dict[str, float]] = {}
    for source, helped in cast("Mapping[object, object]", value).items():
        if not isinstance(source, str) or not isinstance(helped, Mapping):
            raise Fault(f"this is not a row of a skill graph. {example}", at=(source,))
        graph[source] = {str(k): as_finite(v) for k, v in cast("Mapping[object, object]", helped).items()}
    return graph


class Learn(Spec):
    """How weights follow the losses that `client.report` brings, or how often sources were repeated.

    The mixture's own weights are where it begins.

    Example:
        >>> Learn("odm", warmup=100).options()
        {'warmup': 100}
    """

    method: Rule = Field(kw_only=False)
    """The rule: "odm", "ado", "doremi", "skill_it", "function" with your own; or "repetition", without reports."""
    every: Annotated[int, whole(1, "no report would ever be looked at. Write 1 or more")] = 1
    """Only the reports of every so many steps count; the others need not come."""
    eta: Annotated[float, real(0, 1e6, "the weights would never move")] | None = None
    """Step size (doremi, skill_it)."""
    eps: Annotated[float, real(0, 1, "it is a share of the weights")] | None = None
    """Share of the weights that stays uniform (doremi)."""
    warmup: Annotated[int, whole(0, "it is a number of reports")] | None = None
    """Reports before the weights begin to move (odm)."""
    smoothing: Annotated[float, real(0, 1, "it is a share of the past")] | None = None
    """Smooth rewards instead of summing them (odm); how much of the past stays."""
    floor: Annotated[float, real(0, 1, "it is a share of the prior")] | None = None
    """A source keeps at least this part of its first weight (odm)."""
    refit_every: Annotated[int, whole(1, "the scaling laws would never be fitted")] | None = None
    """Reports between two fits of the scaling laws (ado)."""
    first_fit: Annotated[int, whole(1, "there is nothing to fit before the first report")] | None = None
    """Reports before the first fit (ado)."""
    graph: Takes[
        Annotated[
            dict[str, dict[str, float]],
            BeforeValidator(_as_graph, json_schema_input_type=dict[str, dict[str, float]]),
        ]
        | None,
        Mapping[str, Mapping[str, float]] | None,
    ] = spec_field(default=None)
    """How much a source helps others: {from: {to: strength}} (skill_it)."""
    window: Annotated[int, whole(1, "no loss would be looked at")] | None = None
    """Reports that are summed (skill_it)."""
    decay_epochs: (
        Annotated[float, real(0.01, 1e6, "a source would count for nothing, or as new for ever, once it is repeated")]
        | None
    ) = None
    """Repetitions after which a source has 1/e of its weight (repetition); 15.39 by default."""
    fn: SkipJsonSchema[MixtureFunction | None] = None
    """Your own rule: (step, metrics) -> {source: weight}; only in Python."""
    name: SkipJsonSchema[Annotated[str, Field(repr=False)]] = ""
    code_digest: SkipJsonSchema[Annotated[str, Field(repr=False)]] = ""

    def options(self) -> dict[str, Any]:
        """Return what was given for the update rule."""
        names = _OPTIONS[self.method][:1] if self.method == "function" else _OPTIONS[self.method]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def follows_reports(self) -> bool:
        """Whether the rule learns from what a trainer reports; otherwise from the counts of the stream itself."""
        return self.method != "repetition"

    def places(self) -> Sequence[tuple[tuple[Any, ...], str]]:
        """Return every source name the rule uses, with where it stands."""
        found = [(("graph", name), name) for name in self.graph or {}]
        return found + [(("graph", a, b), b) for a, row in (self.graph or {}).items() for b in row]

    @model_validator(mode="before")
    @classmethod
    def _describe_function(cls, data: Any) -> Any:
        # Here and not on use: the process that runs the function often has no access to its source.
        fn = cast("Mapping[str, Any]", data).get("fn") if isinstance(data, Mapping) else None
        if not callable(fn):
            return data
        return code_of(fn) | {k: v for k, v in data.items() if v not in ("", None)}

    @model_validator(mode="after")
    def _check_together(self) -> Learn:
        for method, names in _OPTIONS.items():
            for name in names:
                if name not in _OPTIONS[self.method] and getattr(self, name) not in (None, ""):
                    raise conflict(
                        f"given, but {self.method!r} does not use it ({method!r} does), so it would do nothing. Leave "
                        f"it out; {self.method!r} takes {', '.join(_OPTIONS[self.method][:3])}",
                        name,
                    )
        if (self.method == "function") != (self.fn is not None):
            raise conflict(
                'method "function" and fn belong together; there would be no rule. Write ol.Learn("function", fn=rule)',
                "fn",
            )
        if self.method == "skill_it" and self.graph is None:
            raise conflict("missing; skill_it needs to know which source helps which", "graph")
        if not self.follows_reports and self.every != 1:
            raise conflict(
                f"given, but {self.method!r} looks at no report: its weights are new at every step. Leave it out",
                "every",
            )
        return self

    @field_serializer("fn")
    def _no_code_in_files(self, fn: Any) -> str | None:
        return self.name if fn is not None else None


# --------------------------------------------------------------------------------------------------------------


Level = Literal["sample", "token"]
Stopping = Literal["never_exhausted", "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]
Schedule = Literal["static", "stages", "linear", "step"]
Points = dict[int | float, float]

_LARGEST_EXPONENT = math.log(1e300)


class MixtureOptions(TypedDict, total=False):
    """The options every kind of mixture takes."""

    level: Level
    stopping: Stopping
    max_repetition: int | None
    temperature: float | None
    granularity: Literal["step", "substep"]
    unit: str
    order: Literal["interleaved", "sequential"]
    learn: Learn | None


MOST_WEIGHT = 1e18
"""Weights may be counts of bytes or tokens; beside a larger one no other source would ever be drawn."""


def _as_weight(value: object) -> float:
    weight = as_finite(value)
    if weight < 0:
        raise Fault("a weight must be 0 or more; write 0 to leave the source out")
    if weight > MOST_WEIGHT:
        raise Fault(f"a weight must be {MOST_WEIGHT:g} or less; no other source would be drawn beside it")
    return weight


def _as_weights(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise Fault("this must be a mapping of source names to weights, such as {web: 0.7, code: 0.3}")
    weights: dict[str, float] = {}
    for name, weight in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str):
            raise Fault("the name of a source must be text; in a file, put it in quotes", at=(name,))
        with below(name):
            weights[name] = _as_weight(weight)
    return weights


def _as_stages(value: object) -> tuple[tuple[int | float, dict[str, float]], ...]:
    example = "Write pairs of first step and weights, such as [[0, {web: 1}], [1000, {web: 0.5, code: 0.5}]]"
    if not isinstance(value, (list, tuple)) or not value:
        raise Fault(f"this must be a list with at least one stage. {example}")
    stages: list[tuple[int | float, dict[str, float]]] = []
    for number, stage in enumerate(cast("Sequence[object]", value)):
        pair = cast("Sequence[object]", stage) if isinstance(stage, (list, tuple)) else ()
        if len(pair) != 2:
            raise Fault(f"this is not a stage. {example}", at=(number,))
        with below(number, 0):
            start = as_position(pair[0])
            if number == 0 and start != 0:
                raise Fault(
                    f"the first stage must start at step 0; steps 0 to {start} would have no weights. Start it at 0"
                )
            if number and start <= stages[-1][0]:
                raise Fault(
                    f"stages must start one after another, but the one before starts at {stages[-1][0]}; one of "
                    "them would never be used. Sort them and give each its own first step"
                )
        with below(number, 1):
            stages.append((start, _as_weights(pair[1])))
    return tuple(stages)


def _as_curves(value: object) -> dict[str, Points]:
    if not isinstance(value, Mapping) or not value:
        raise Fault("this must map each source to its points, such as {web: {0: 1.0, 1000: 0.1}}")
    curves: dict[str, Points] = {}
    for name, points in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str):
            raise Fault("the name of a source must be text; in a file, put it in quotes", at=(name,))
        if not isinstance(points, Mapping) or not points:
            raise Fault("this must map steps to weights, such as {0: 1.0, 1000: 0.1}", at=(name,))
        curve: Points = {}
        for position, weight in cast("Mapping[object, object]", points).items():
            with below(name, cast("Any", position)):
                curve[as_position(position)] = _as_weight(weight)
        curves[name] = dict(sorted(curve.items()))
    return curves


_Curves = Annotated[dict[str, Points], BeforeValidator(_as_curves, json_schema_input_type=dict[str, dict[str, float]])]


def _as_temperature(value: object) -> float:
    number = as_finite(value)
    if number <= 0:
        raise Fault(
            "a temperature must be more than 0: weights become w ** (1 / temperature). Write 1 to leave them "
            "as they are, more to even them out"
        )
    return number


def _as_unit(value: object) -> str:
    if value in ("step", "epoch") or (isinstance(value, str) and value.startswith(_EPOCH_OF) and value != _EPOCH_OF):
        return str(value)
    raise Fault('this must be "step", "epoch", or "epoch:" and the name of a source, such as "epoch:web"')


_EPOCH_OF = "epoch:"


def _as_learn(value: object) -> object:
    return Learn.nested({"method": value}) if isinstance(value, str) else value


class Mixture(Spec):
    """How much of each source goes into a step.

    `Mixture({..})` is constant; `Mixture.stages`, `Mixture.linear` and `Mixture.step` change over steps.
    Without weights, those beside the sources count; with none there either, all sources are equal, or
    (with a temperature) count by their size. A source that is not named has weight 0.

    Example:
        >>> mix = Mixture.stages([(0, {"web": 3, "code": 1}), (100, {"web": 1})])
        >>> mix.weights_at(99.5, ["code", "web"], {}), mix.weights_at(100, ["code", "web"], {})
        ([1.0, 3.0], [0.0, 1.0])
    """

    weights: Takes[
        Annotated[dict[str, float], BeforeValidator(_as_weights, json_schema_input_type=dict[str, float])] | None,
        Mapping[str, float] | None,
    ] = spec_field(default=None, kw_only=False)
    """Weight of each source; they need not sum to 1."""
    stage_weights: (
        Annotated[
            tuple[tuple[int | float, dict[str, float]], ...],
            BeforeValidator(_as_stages, json_schema_input_type=list[tuple[float, dict[str, float]]]),
        ]
        | None
    ) = Field(default=None, alias="stages")
    """Pairs of first step and weights."""
    linear_points: _Curves | None = Field(default=None, alias="linear")
    """For each source step -> weight, with straight lines between the points and level ends."""
    step_points: _Curves | None = Field(default=None, alias="step")
    """For each source step -> weight from that step on; 0 before the first point."""
    level: Level = "sample"
    """Whether weights are shares of samples or of tokens."""
    stopping: Stopping = "never_exhausted"
    """When the stream ends: never (sources repeat), or when the first or when all sources are through."""
    max_repetition: (
        Annotated[int, whole(1, "a source that may not be read even once gives nothing. Write 1 or more")] | None
    ) = None
    """How often a source may be read at most; after that its weight is 0."""
    temperature: Annotated[float, BeforeValidator(_as_temperature, json_schema_input_type=float)] | None = None
    """Weights become w ** (1 / temperature)."""
    granularity: Literal["step", "substep"] = "step"
    """Whether a schedule is looked at once a step or at every draw inside it."""
    unit: Annotated[str, BeforeValidator(_as_unit, json_schema_input_type=str)] = "step"
    """What the points of a schedule count: steps; "epoch": how often all sources that have a weight were read whole; or
    "epoch:NAME": how often one source was. Epochs count when they end, from the beginning of the run."""
    order: Literal["interleaved", "sequential"] = "interleaved"
    """Whether sources are mixed or read one after another."""
    learn: Takes[
        Annotated[Learn, BeforeValidator(_as_learn, json_schema_input_type=Learn | str)] | None,
        Learn | Mapping[str, Any] | str | None,
    ] = spec_field(default=None)
    """How the weights follow the trainer's reports, or how often sources were repeated; without it they do not."""

    @classmethod
    def stages(cls, stages: Sequence[tuple[float, Mapping[str, float]]], **options: Unpack[MixtureOptions]) -> Mixture:
        """Return a mixture whose weights change at the given steps; the first stage starts at 0."""
        return cls.model_validate({"stages": stages, **options})

    @classmethod
    def linear(cls, curves: Mapping[str, Mapping[float, float]], **options: Unpack[MixtureOptions]) -> Mixture:
        """Return a mixture whose weights run in straight lines between points.

        Example:
            >>> fading = Mixture.linear({"web": {0: 1.0, 100: 0.0}, "code": {0: 1}})
            >>> fading.weights_at(25, ["web", "code"], {})
            [0.75, 1.0]
        """
        return cls.model_validate({"linear": curves, **options})

    @classmethod
    def step(cls, curves: Mapping[str, Mapping[float, float]], **options: Unpack[MixtureOptions]) -> Mixture:
        """Return a mixture in which each source's weight jumps at its own points (0 before the first)."""
        return cls.model_validate({"step": curves, **options})

    @property
    def schedule(self) -> Schedule:
        """How the weights change."""
        if self.stage_weights is not None:
            return "stages"
        if self.linear_points is not None:
            return "linear"
        return "static" if self.step_points is None else "step"

    @property
    def reads_once(self) -> bool:
        """Whether no source is read a second time."""
        return self.stopping in ("first_exhausted", "all_exhausted_without_replacement")

    @property
    def has_weights(self) -> bool:
        """Whether weights are given here (and not beside the sources)."""
        return self.weights is not None or self.schedule != "static"

    def weights_at(self, position: float, names: Sequence[str], base: Mapping[str, float]) -> list[float]:
        """Return the weight of each source at a step; they are >= 0 and do not sum to anything in particular.

        The position has a fraction for draws inside the step. `base` are the weights that count when the mixture has
        none: those beside the sources, or their sizes; empty makes all sources equal.
        """
        if self.stage_weights is not None:
            number = bisect.bisect_right([start for start, _ in self.stage_weights], position) - 1
            stage = self.stage_weights[max(number, 0)][1]
            found = [stage.get(name, 0.0) for name in names]
        elif self.linear_points is not None:
            found = [_on_lines(self.linear_points.get(name), position) for name in names]
        elif self.step_points is not None:
            found = [_on_steps(self.step_points.get(name), position) for name in names]
        else:
            weights = self.weights if self.weights is not None else (base or dict.fromkeys(names, 1.0))
            found = [float(weights.get(name, 0.0)) for name in names]
        return found if self.temperature is None else _tempered(found, self.temperature)

    def position(
        self, step: float, names: Sequence[str], epochs: Sequence[int], done: Sequence[bool], base: Mapping[str, float]
    ) -> float:
        """Return where a schedule is, in its own unit.

        Args:
            step: The step, with a fraction for draws inside it.
            names: The sources.
            epochs: How often each was read whole.
            done: Which of them are not read any more, and hold nothing up.
            base: As for `weights_at`.

        Example:
            >>> mix = Mixture.stages([(0, {"web": 1}), (2, {"web": 1, "code": 1})], unit="epoch")
            >>> [mix.position(9, ["web", "code"], epochs, [False, False], {}) for epochs in ((1, 0), (3, 0), (4, 1))]
            [1.0, 2.0, 3.0]
        """
        if self.unit == "step":
            return step
        if self.unit != "epoch":
            name = self.unit.removeprefix(_EPOCH_OF)
            return float(epochs[names.index(name)]) if name in names else 0.0
        # Behind the last point weights stay as they are, so at most that many epochs are looked at one by one.
        left, passed, last = list(epochs), 0, math.ceil(self.positions()[-1])
        while True:
            weighted = [i for i, w in enumerate(self.weights_at(passed, names, base)) if w > 0 and not done[i]]
            if passed >= last:
                return float(passed + min((left[i] for i in weighted), default=0))
            if any(left[i] < 1 for i in weighted):
                return float(passed)
            for i in weighted:
                left[i] -= 1
            passed += 1

    def positions(self) -> list[float]:
        """Return the points of the schedule, in order. Weights that are all 0 somewhere are so at one of them."""
        curves = self.linear_points or self.step_points or {}
        starts = [start for start, _ in self.stage_weights or ()]
        return sorted({0, *starts, *(point for curve in curves.values() for point in curve)})

    def with_source(
        self, name: str, weight: float | None, position: float, names: Sequence[str], base: Mapping[str, float]
    ) -> Mixture:
        """Return the mixture with one more source at every point of its schedule; the others stay in their ratio.

        A mixture that names the source already decides its share. The weight is relative to those of the other sources
        (`names`), None for the mean of those that have one; `position` is the step from which it is drawn.

        Example:
            >>> Mixture({"web": 3, "code": 1}).with_source("math", None, 0, ["web", "code"], {}).weights
            {'web': 3.0, 'code': 1.0, 'math': 2.0}
        """
        if any(name == one for _, one in self.places()):
            return self
        if self.stage_weights is not None:
            return self.replace(stages=[(start, _extended(stage, name, weight)) for start, stage in self.stage_weights])
        if self.schedule in ("linear", "step"):
            now = dict(zip(names, self.replace(temperature=None).weights_at(position, names, {}), strict=True))
            curves = (self.linear_points or {}) | (self.step_points or {})
            return self.replace(**{self.schedule: {**curves, name: {0: _extended(now, name, weight)[name]}}})
        table = self.weights if self.weights is not None else {n: base.get(n, 0.0) for n in names}
        return self.replace(weights=_extended(table, name, weight))

    def places(self) -> Iterator[tuple[Loc, str]]:
        """Yield every source name the weights use, with where it stands."""
        for name in self.weights or {}:
            yield ("weights", name), name
        for number, (_, stage) in enumerate(self.stage_weights or ()):
            for name in stage:
                yield (("stages", number, 1, name), name)
        for key, curves in (("linear", self.linear_points), ("step", self.step_points)):
            for name in curves or {}:
                yield (key, name), name
        for loc, name in self.learn.places() if self.learn else ():
            yield ("learn", *loc), name
        if self.unit.startswith(_EPOCH_OF):
            yield ("unit",), self.unit.removeprefix(_EPOCH_OF)

    @model_validator(mode="after")
    def _check_together(self) -> Mixture:
        given = [k for k, v in self._forms().items() if v is not None]
        if len(given) > 1:
            raise conflict(
                f"given beside {given[0]}; only one of them can decide. Keep one of weights, stages, linear, step",
                given[1],
            )
        if self.max_repetition is not None and self.reads_once:
            raise conflict(
                f"stopping={self.stopping!r} never repeats a source, so this limit would do nothing. Leave "
                'max_repetition out, or use stopping="never_exhausted" or "all_exhausted"',
                "max_repetition",
            )
        if self.order == "sequential" and self.stopping != "all_exhausted_without_replacement":
            raise conflict(
                f"with stopping={self.stopping!r} a sequential order would repeat or never leave its first "
                'source. Add stopping="all_exhausted_without_replacement"',
                "order",
            )
        if self.learn is not None and not self.learn.follows_reports:
            self._check_repeats(self.learn)
        elif self.learn is not None and (self.schedule != "static" or self.order == "sequential"):
            other = "order='sequential'" if self.order == "sequential" else f"a schedule ({self.schedule})"
            raise conflict(
                f"the reports decide the weights, and so does {other}; only one can. Keep constant weights as the "
                "beginning, or leave learn out",
                "learn",
            )
        self._check_unit()
        self._check_not_zero()
        return self

    def _check_repeats(self, learn: Learn) -> None:
        """Refuse a rule that follows repetitions where nothing is repeated."""
        if not self.reads_once and self.max_repetition != 1:
            return
        limit = f"stopping={self.stopping!r}" if self.reads_once else "max_repetition=1"
        raise conflict(
            f"{limit} never repeats a source, so the rule {learn.method!r} would never change a weight. Leave learn "
            'out, or use stopping="never_exhausted" or "all_exhausted" with max_repetition of 2 or more, or without it',
            "learn",
        )

    def _check_unit(self) -> None:
        if self.unit == "step":
            return
        if self.schedule == "static":
            raise conflict(
                f"unit is {self.unit!r}, and the weights do not change, so it would have no effect. Leave it out, or "
                "give stages, linear or step",
                "unit",
            )
        broken = next((at for at in self.positions() if at != int(at)), None)
        if broken is not None:
            raise conflict(
                f"a point of the schedule is at {broken} and unit is {self.unit!r}; epochs count when they end, so it "
                "would not be met. Use whole numbers",
                self.schedule,
            )

    def _forms(self) -> dict[str, object]:
        return {
            "weights": self.weights,
            "stages": self.stage_weights,
            "linear": self.linear_points,
            "step": self.step_points,
        }

    def _check_not_zero(self) -> None:
        end = "nothing could be drawn. Give at least one source a weight above 0"
        if self.weights is not None and not any(self.weights.values()):
            raise conflict(f"the weights sum to zero; {end}", "weights")
        for number, (start, stage) in enumerate(self.stage_weights or ()):
            if not any(stage.values()):
                raise conflict(
                    f"the weights of stage {number} (from step {start}) sum to zero; {end}",
                    "stages",
                    number,
                )
        curves = self.linear_points or self.step_points or {}
        # Both kinds of curve are extreme at their points, so looking there (and at 0) is enough.
        for position in self.positions() if curves else ():
            if not any(self.weights_at(position, list(curves), {})):
                raise conflict(
                    f"the weights at step {position} sum to zero; {end}",
                    self.schedule,
                )

    def __repr_name__(self) -> str:
        return "Mixture" if self.schedule == "static" else f"Mixture.{self.schedule}"

    def __repr_args__(self) -> Any:
        """Show what `Mixture` or its classmethod was given."""
        if self.has_weights:
            points = self._forms()["weights" if self.schedule == "static" else self.schedule]
            yield None, list(self.stage_weights) if self.stage_weights else points
        for name, value in super().__repr_args__():
            if name is not None and name not in self._forms():
                yield name, value


def _extended(table: Mapping[str, float], name: str, weight: float | None) -> dict[str, float]:
    others = [w for w in table.values() if w > 0]
    mean = sum(others) / len(others) if others else 1.0
    return {**table, name: mean if weight is None else weight}


def _on_lines(points: Points | None, position: float) -> float:
    if not points:
        return 0.0
    steps = list(points)
    right = bisect.bisect_right(steps, position)
    if right == 0:
        return points[steps[0]]
    if right == len(steps):
        return points[steps[-1]]
    a, b = steps[right - 1], steps[right]
    part = (position - a) / (b - a)
    return points[a] * (1 - part) + points[b] * part


def _on_steps(points: Points | None, position: float) -> float:
    if not points:
        return 0.0
    steps = list(points)
    right = bisect.bisect_right(steps, position)
    return points[steps[right - 1]] if right else 0.0


def _tempered(weights: list[float], temperature: float) -> list[float]:
    largest = max(weights, default=0.0)
    if largest <= 0:
        return weights
    # Only ratios count. A huge power is taken relative to the largest weight, so it cannot overflow.
    scale = largest if abs(math.log(largest)) / temperature > _LARGEST_EXPONENT else 1.0
    return [(weight / scale) ** (1 / temperature) for weight in weights]
