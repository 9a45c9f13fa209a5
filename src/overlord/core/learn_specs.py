"""`Learn`: how a mixture follows the trainer's reports. The update rules themselves are in planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, field_serializer, model_validator
from pydantic.json_schema import SkipJsonSchema

from overlord.core.spec_errors import Fault, conflict
from overlord.core.spec_model import Spec, as_finite, code_of, real, whole

Rule = Literal["doremi", "odm", "ado", "skill_it", "function"]
MixtureFunction = Callable[[int, Mapping[str, float]], Mapping[str, float]]
"""(step, the report in force) -> weights of the sources; the report is empty before the first one counts."""

_OPTIONS: dict[str, tuple[str, ...]] = {
    "doremi": ("eta", "eps"),
    "odm": ("warmup", "smoothing", "floor"),
    "ado": ("refit_every", "first_fit"),
    "skill_it": ("eta", "graph", "window"),
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
    """How weights follow the losses that `client.report` brings; the mixture's own weights are where it begins.

    Example:
        >>> Learn("odm", warmup=100).options()
        {'warmup': 100}
    """

    positional: ClassVar[tuple[str, ...]] = ("method",)

    method: Rule
    """The update rule: "odm", "ado", "doremi", "skill_it", or "function" with your own."""
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
    graph: (
        Annotated[
            dict[str, dict[str, float]],
            BeforeValidator(_as_graph, json_schema_input_type=dict[str, dict[str, float]]),
        ]
        | None
    ) = None
    """How much a source helps others: {from: {to: strength}} (skill_it)."""
    window: Annotated[int, whole(1, "no loss would be looked at")] | None = None
    """Reports that are summed (skill_it)."""
    fn: SkipJsonSchema[MixtureFunction | None] = None
    """Your own rule: (step, metrics) -> {source: weight}; only in Python."""
    name: SkipJsonSchema[Annotated[str, Field(repr=False)]] = ""
    code_digest: SkipJsonSchema[Annotated[str, Field(repr=False)]] = ""

    if TYPE_CHECKING:

        def __init__(
            self,
            method: Rule,
            *,
            every: int = 1,
            eta: float | None = None,
            eps: float | None = None,
            warmup: int | None = None,
            smoothing: float | None = None,
            floor: float | None = None,
            refit_every: int | None = None,
            first_fit: int | None = None,
            graph: Mapping[str, Mapping[str, float]] | None = None,
            window: int | None = None,
            fn: MixtureFunction | None = None,
        ) -> None: ...

    def options(self) -> dict[str, Any]:
        """Return what was given for the update rule."""
        names = _OPTIONS[self.method][:1] if self.method == "function" else _OPTIONS[self.method]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def places(self) -> Sequence[tuple[tuple[Any, ...], str]]:
        """Return every source name the rule uses, with where it stands."""
        found = [(("graph", name), name) for name in self.graph or {}]
        return found + [(("graph", a, b), b) for a, row in (self.graph or {}).items() for b in row]

    @model_validator(mode="before")
    @classmethod
    def _describe_function(cls, data: Any) -> Any:
        # Here and not on use: in the process that runs the function its source is often not to be had.
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
        return self

    @field_serializer("fn")
    def _no_code_in_files(self, fn: Any) -> str | None:
        return self.name if fn is not None else None
