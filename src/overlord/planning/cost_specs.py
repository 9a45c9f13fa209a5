"""Cost models as a job file writes them: a preset, the shape of a model, or measured milliseconds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import yaml
from pydantic import BeforeValidator, model_validator

from overlord.core.spec_errors import Fault, conflict, did_you_mean, show
from overlord.errors import SpecError
from overlord.job.spec_model import Spec, as_number, real
from overlord.planning import costs

Preset = Literal["tokens", "quadratic", "llama_12b", "vit_2b"]
Given = dict[str, int | float | bool]

_SHAPES: dict[str, Callable[..., costs.CostModel]] = {
    "causal_lm": costs.causal_lm,
    "moe": costs.moe,
    "vit": costs.vit,
}


def _shape(name: str) -> BeforeValidator:
    """Check the arguments of a cost model's function by its signature, and that it takes them."""
    function = _SHAPES[name]
    parameters = inspect.signature(function).parameters
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]

    def check(value: object) -> Given:
        if not isinstance(value, Mapping):
            raise Fault(f"this must be a mapping of the model's shape, such as {{{', '.join(required)}}}")
        given: Given = {}
        for key, found in cast("Mapping[Any, object]", value).items():
            if key not in parameters:
                raise conflict(
                    f"unknown key; the model would have another shape than you asked for."
                    f"{did_you_mean(key, parameters)} {name} takes {', '.join(parameters)}",
                    key,
                )
            number = found if isinstance(found, bool) else as_number(found)
            if number is None or isinstance(number, bool) != isinstance(parameters[key].default, bool):
                what = "true or false" if isinstance(parameters[key].default, bool) else "a number"
                raise Fault(f"this must be {what}; the model would have no cost", at=(key,))
            given[key] = number
        for key in required:
            if key not in given:
                raise conflict(f"missing; without it the model has no cost. {name} needs {', '.join(required)}", key)
        try:
            function(**given)
        except SpecError as error:
            raise conflict(str(error)) from None
        return given

    keys: Any = Literal[tuple(parameters)]  # type: ignore[valid-type]
    return BeforeValidator(check, json_schema_input_type=dict[keys, float | bool])


def mapping_or_name(text: str) -> object:
    """Return the mapping that a text of the command line writes, or the text itself."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        data = text
    return cast("object", data) if isinstance(data, Mapping) else text


_NUMBER = real(0, math.inf, "a cost cannot be negative")


class Cost(Spec):
    """What a sequence or an image costs: a preset, the shape of a model, or its time as alpha s² + beta s + gamma.

    Example:
        >>> Cost(preset="llama_12b").model().name, Cost(causal_lm={"layers": 32, "hidden": 4096}).model().kappa
        ('llama_12b', 49152.0)
    """

    positional: ClassVar[tuple[str, ...]] = ("preset",)

    preset: Preset | None = None
    """A model of `ol.costs`."""
    causal_lm: Annotated[Given, _shape("causal_lm")] | None = None
    """The arguments of `ol.costs.causal_lm`."""
    moe: Annotated[Given, _shape("moe")] | None = None
    """The arguments of `ol.costs.moe`."""
    vit: Annotated[Given, _shape("vit")] | None = None
    """The arguments of `ol.costs.vit`."""
    alpha: Annotated[float, _NUMBER] | None = None
    """Milliseconds of one squared token."""
    beta: Annotated[float, _NUMBER] | None = None
    """Milliseconds of one token."""
    gamma: Annotated[float, _NUMBER] | None = None
    """Milliseconds of a microbatch, whatever is in it."""

    @classmethod
    def read(cls, text: str, where: str = "--cost") -> Cost:
        """Return the cost model of a command line: a preset, or a mapping as a job file has it.

        Raises:
            SpecError: There is no such preset, or the mapping is no cost model.
        """
        return cls.from_mapping(mapping_or_name(text), lambda _: where)

    def model(self) -> costs.CostModel:
        """Return the cost model."""
        if self.preset is not None:
            return costs.preset(self.preset)
        for name, function in _SHAPES.items():
            if getattr(self, name) is not None:
                return function(**getattr(self, name))
        return costs.CostModel(self.alpha or 0.0, self.beta or 0.0, self.gamma or 0.0)

    def written(self) -> object:
        """Return the short form that a file holds."""
        return self.preset or self.model_dump(mode="json", exclude_none=True)

    @model_validator(mode="before")
    @classmethod
    def _take_short_form(cls, data: Any) -> Any:
        presets = [model.name for model in costs.presets()]
        if isinstance(data, str) and data not in presets:
            raise conflict(
                f"there is no cost model {show(data)}; it is not known what a sequence costs."
                f"{did_you_mean(data, presets)} Presets: {', '.join(presets)}; or write {{causal_lm: {{layers: 32, "
                "hidden: 4096}}"
            )
        return {"preset": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _check_together(self) -> Cost:
        timed = [name for name in ("alpha", "beta", "gamma") if getattr(self, name) is not None]
        given = [name for name in ("preset", *_SHAPES) if getattr(self, name) is not None] + timed[:1]
        if len(given) != 1:
            found = f"{given[0]} and {given[1]} are both given" if given else "nothing is given"
            raise conflict(
                f"one thing decides what a sequence costs, but {found}. Write a preset such as llama_12b, "
                "{causal_lm: {layers: 32, hidden: 4096}}, or {alpha: 1.0e-7, beta: 2.6e-3}"
            )
        try:
            self.model()
        except SpecError as error:
            raise conflict(str(error)) from None
        return self
