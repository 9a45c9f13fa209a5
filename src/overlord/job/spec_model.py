"""The ground of every spec: a frozen pydantic model that raises SpecError, and its field checks.

All spec classes derive from `Spec`; the field types turn what a person writes ("4MiB", 1e6,
"2_000") into numbers and refuse what is only nearly right (True for 1, NaN).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import itertools
import math
import operator
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Self, TypeVar, cast, dataclass_transform, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from overlord.core.spec_errors import (
    Fault,
    Loc,
    Locate,
    conflict,
    did_you_mean,
    explain,
    follow,
    is_finite,
    is_whole,
    list_some,
    name_choices,
    nearest,
)
from overlord.errors import SpecError

_BYTE_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base ** (power + 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt")
}


Kept = TypeVar("Kept", covariant=True)
Given = TypeVar("Given", contravariant=True)

if TYPE_CHECKING:

    class Takes(Generic[Kept, Given]):
        """A field that is kept as one type and takes others too, such as `Takes[tuple[str, ...], str | Sequence[str]]`.

        For a type checker it is a descriptor, whose `__set__` says what the constructor takes; at run time it is the
        first type. Its default is given with `spec_field`.
        """

        def __get__(self, spec: object, kind: object = None) -> Kept: ...
        def __set__(self, spec: object, value: Given) -> None: ...

else:

    class Takes:
        """A field that is kept as one type and takes others too."""

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[0]


def spec_field(*, default: Any = ..., kw_only: bool = True, **more: Any) -> Any:
    """Return pydantic's Field for a field of type `Takes`, whose default is of the type that is kept."""
    return Field(default, kw_only=kw_only, **more)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field, spec_field))
class Spec(BaseModel):
    """A part of a job: frozen, unknown keys refused, every problem a SpecError."""

    # What a process does not use is not built: a service is given its job ready, and validates nothing. Docstrings of
    # fields are read when they are shown (`field_docs`): pydantic would parse the source of every spec on import.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    positional: ClassVar[tuple[str, ...]] = ()
    """Fields that may be given without their name, in this order: those with `Field(kw_only=False)`."""

    def __init__(self, *args: Any, **data: Any) -> None:
        kind = type(self)
        if len(args) > len(kind.positional):
            raise SpecError(
                f"{kind.__name__}: {len(args)} values are given without a name, but only "
                f"{list_some(kind.positional) or 'none'} may be; the others could land in the wrong field. "
                "Write them as field=value."
            )
        for name, value in zip(kind.positional, args, strict=False):
            if name in data:
                raise SpecError(
                    f"{kind.__name__}: {name} is given twice, by place ({value!r}) and by name "
                    f"({data[name]!r}); one would be lost. Give it once."
                )
            data[name] = value
        with _as_spec_error(kind, data):
            super().__init__(**data)

    # Without this mark pydantic would call __init__ for nested specs too, and a problem in one of
    # them would become a SpecError before its place in the whole job is known.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.positional = tuple(name for name, field in cls.model_fields.items() if field.kw_only is False)
        cls._show_fields()

    @classmethod
    def __pydantic_on_complete__(cls) -> None:
        super().__pydantic_on_complete__()
        cls._show_fields()  # a spec that is built when it is first used gets pydantic's own signature then

    @classmethod
    def _show_fields(cls) -> None:
        """Let help and editors show the fields as they are written."""
        parameters: list[inspect.Parameter] = []
        for name, field in cls.model_fields.items():
            default = inspect.Parameter.empty if field.is_required() else field.get_default()
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if field.kw_only is False else inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.alias or name, kind, default=default))
        cls.__signature__ = inspect.Signature(sorted(parameters, key=lambda one: one.kind))

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Build from a mapping; a problem is a SpecError."""
        with _as_spec_error(cls, obj):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Build from JSON text; a problem is a SpecError."""
        with _as_spec_error(cls, None):
            return super().model_validate_json(json_data, **options)

    @classmethod
    def from_mapping(cls, data: object, locate: Locate | None = None) -> Self:
        """Build from a mapping that was read from a file; `locate` tells where a field stands in it."""
        with _as_spec_error(cls, data, locate):
            return cls.nested(data)

    @classmethod
    def nested(cls, data: object) -> Self:
        """Build inside the validator of an outer spec, which adds where it stands."""
        return cls.__pydantic_validator__.validate_python(data)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, checked like a new one."""
        fields = {field.alias or name: getattr(self, name) for name, field in type(self).model_fields.items()}
        return type(self)(**(fields | changes))

    @classmethod
    def known_keys(cls) -> list[str]:
        """Return the keys a mapping for this spec may have."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known, given = cls.known_keys(), cast("Mapping[Any, Any]", data)
        # A required key that is misspelt is checked as what it was meant to be: it must not be told as missing too.
        needed = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        near = {nearest(key, known): value for key, value in given.items() if key not in known}
        meant = {
            key: (given if key in given else near)[key] for key in known if key in given or key in needed & near.keys()
        }
        faults = [
            conflict(
                f"unknown key; it would be ignored and {cls.__name__} would not do what you asked."
                f"{did_you_mean(key, known)} Known keys: {', '.join(known)}",
                key,
            )
            for key in given
            if key not in known
        ]
        for name, field in cls.model_fields.items():
            key = field.alias or name
            if key in needed and key not in meant:
                words = field_docs(cls).get(name, "")
                about = f" ({words.splitlines()[0].rstrip('.')})" if words else ""
                faults.append(conflict(f"missing{about}; without it {cls.__name__} has no meaning. Add it", key))
        if faults:
            details = [_detail((), fault, data) for fault in faults]
            missing = any(fault.at[0] not in given for fault in faults)
            try:  # what is wrong with the other keys is told at the same time
                if not missing:
                    cls.__pydantic_validator__.validate_python(meant)
            except ValidationError as error:
                details += _details(error)
            raise ValidationError.from_exception_data(cls.__name__, details)
        return cast("Any", data)

    def __setattr__(self, name: str, value: Any) -> None:
        raise SpecError(
            f"{type(self).__name__}.{name} cannot be set to {value!r}: a spec is frozen, since a service may "
            f"already use it. Make another one with .replace({name}=..)."
        )

    def __str__(self) -> str:
        return repr(self)

    def __repr_args__(self) -> Any:
        """Show the positional fields, then what differs from its default."""
        for name in self.positional:
            yield None, getattr(self, name)
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in self.positional and field.repr and value != field.get_default():
                yield field.alias or name, value


def _detail(loc: Loc, fault: Fault, value: object) -> InitErrorDetails:
    """Return one line of a ValidationError that is made by hand."""
    return InitErrorDetails(type=PydanticCustomError("fault", "", {"error": fault}), loc=loc, input=value)


def _details(error: ValidationError, at: Loc = ()) -> list[InitErrorDetails]:
    """Return the lines of a ValidationError, to raise them again; `at` goes before where each of them stands."""
    found: list[InitErrorDetails] = []
    for one in error.errors(include_url=False):
        words = one["msg"].replace("{", "(").replace("}", ")")
        kind = PydanticCustomError(cast("Any", one["type"]), cast("Any", words), one.get("ctx", {}))
        found.append(InitErrorDetails(type=kind, loc=(*at, *one["loc"]), input=one["input"]))
    return found


@contextmanager
def below(*at: str | int) -> Iterator[None]:
    """Let the problems of what is validated inside stand at a place below the value that is being validated."""
    try:
        yield
    except ValidationError as error:
        raise ValidationError.from_exception_data(error.title, _details(error, at)) from None
    except Fault as fault:
        raise Fault(fault.text, at=(*at, *fault.at), show_value=fault.show_value) from None


@contextmanager
def _as_spec_error(kind: type[Spec], data: object, locate: Locate | None = None) -> Iterator[None]:
    """Raise what pydantic finds wrong with the data as a SpecError."""
    try:
        yield
    except ValidationError as error:
        name = follow(data, ("name",))
        title = f"{kind.__name__} {name!r}" if isinstance(name, str) and name else kind.__name__
        raise SpecError(explain(error.errors(include_url=False), data, title=title, locate=locate)) from None


@functools.cache
def field_docs(kind: type[Spec]) -> dict[str, str]:
    """Return the docstring of each field of a spec that has one; none where there is no source code.

    Example:
        >>> class Cut(Spec):
        ...     width: int
        >>> field_docs(Cut)
        {}
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            own = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0] if issubclass(base, Spec) else None
        except (OSError, TypeError):
            continue
        for field, doc in itertools.pairwise(own.body if isinstance(own, ast.ClassDef) else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
                words = doc.value.value if isinstance(doc.value, ast.Constant) else None
                if isinstance(words, str) and field.target.id in kind.model_fields:
                    found[field.target.id] = inspect.cleandoc(words)
    return found


def describe_schema(kind: type[Spec]) -> dict[str, Any]:
    """Return the JSON Schema of a spec; of the descriptions, what an editor can show (no doctests)."""
    schema = kind.model_json_schema(by_alias=True)
    specs = {spec.__name__: spec for spec in _subclasses(Spec)} | {kind.__name__: kind}
    for title, part in ((kind.__name__, schema), *schema.get("$defs", {}).items()):
        if "description" in part:
            part["description"] = part["description"].split("\n\nExample:")[0]
        for name, words in field_docs(specs[title]).items() if title in specs else ():
            key, properties = specs[title].model_fields[name].alias or name, part.get("properties", {})
            if key in properties:  # else it is left out of schemas
                properties[key] = dict(sorted((properties[key] | {"description": words}).items()))
    return schema


def _subclasses(kind: type[Spec]) -> Iterator[type[Spec]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def code_of(fn: Any) -> dict[str, str]:
    """Return the name of a function and the digest of its source code: what a fingerprint knows of it."""
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    try:
        code = inspect.getsource(fn)
    except (OSError, TypeError):
        code = f"{getattr(fn, '__module__', '')}.{name}"
    return {"name": name, "code_digest": hashlib.blake2b(code.encode(), digest_size=8).hexdigest()}


def whole(low: int | None, why: str, *, example: str = "") -> BeforeValidator:
    """Check a whole number >= low; `why` says what a smaller one would cause."""

    def check(value: object) -> object:
        number = as_number(value)
        if not isinstance(number, int):
            raise Fault(f"this must be a whole number{example and f', such as {example}'}")
        if low is not None and number < low:
            raise Fault(f"this must be at least {low}; {why}")
        return number

    return BeforeValidator(check, json_schema_input_type=Annotated[int, Field(ge=low)])


def one_of(words: Any, why: str) -> BeforeValidator:
    """Check that a value is one of the words of a Literal; `why` says what another one would cause."""
    known: tuple[str, ...] = get_args(words)

    def check(value: object) -> object:
        if value not in known:
            raise Fault(f"expected {name_choices(known)}; {why}.{did_you_mean(value, known)}")
        return value

    return BeforeValidator(check, json_schema_input_type=words)


def token(why: str) -> BeforeValidator:
    """Check a token of the tokenizer, as text or as its id; `why` says what another value would cause."""

    def check(value: object) -> object:
        if is_whole(value, 0) or (isinstance(value, str) and value):
            return value
        raise Fault(f"this must be a token of the tokenizer (text) or its id (0 or more); {why}")

    return BeforeValidator(check, json_schema_input_type=str | int)


def real(low: float, high: float, why: str) -> BeforeValidator:
    """Check a finite number low <= x <= high; `why` says what another one would cause."""

    def check(value: object) -> object:
        number = as_finite(value)
        if not low <= number <= high:
            limits = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
            raise Fault(f"this must be {limits}; {why}")
        return number

    limit = None if math.isinf(high) else high
    return BeforeValidator(check, json_schema_input_type=Annotated[float, Field(ge=low, le=limit)])


def as_number(value: object) -> int | float | None:
    """Return a number (an int where it is whole) or None; YAML gives 1e6 as text, numpy its own ints."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value) if re.search(r"[.eEnN]", value) else int(value)
        except ValueError:
            return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    try:
        return operator.index(cast("Any", value))
    except TypeError:
        return None


def as_finite(value: object) -> float:
    """Return a finite float, or raise a Fault."""
    number = as_number(value)
    if not is_finite(number):
        raise Fault("this must be a finite number. Write it in digits, such as 0.3")
    return float(number)


def as_position(value: object) -> int | float:
    """Return a step of a schedule: >= 0, an int where it is whole."""
    number = as_number(value)
    if number is None or not is_finite(number) or number < 0:
        raise Fault("a step must be a number that is 0 or more; the run never comes by this one")
    return number


def as_bytes(value: object) -> int:
    """Return a number of bytes from an int or a text such as "16MB" or "4MiB".

    Example:
        >>> as_bytes("4MiB"), as_bytes("16MB"), as_bytes(0)
        (4194304, 16000000, 0)
    """
    parts = re.fullmatch(r"\s*([\d_.]+)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    if parts and (unit := _BYTE_UNITS.get(parts[2].lower())):
        number = as_number(parts[1])
        if number is not None:
            return int(number * unit)
    number = as_number(value)
    if not isinstance(number, int):
        raise Fault('this must be a number of bytes; write a whole number, "16MB" or "4MiB"')
    if number < 0:
        raise Fault("bytes cannot be negative; write 0 to keep the order of the files")
    return number


def _as_text(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(cast("os.PathLike[str]", value))
    if not isinstance(value, str):
        raise Fault("this must be text; in a file, put it in quotes")
    if not value.strip():
        raise Fault("this must not be empty; leave the field out or name something")
    return value


Word = Annotated[str, BeforeValidator(_as_text)]
"""Text that is not empty; a path object will do."""
