"""Error messages for a wrong job: one line per mistake, the field first, never a pydantic dump.

pydantic is not imported: `explain` takes the list of problems that pydantic's errors() returns.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, ParamSpec, TypeGuard, TypeVar, cast

from overlord.errors import SpecError

Loc = tuple[Any, ...]
"""The path of a value: keys and list positions from the outermost mapping inwards."""

Locate = Callable[[Loc], str]
"""Returns the file and line of a value, such as 'job.yaml:12'."""

_SECRET_FIELDS = {
    "storage_options",
    "store_options",
    "source_options",
}  # their values may be passwords: never shown in a message

MOST_PROBLEMS = 20
"""Problems of one spec that are shown, at most."""

_PLAIN_TEXT = {
    "string_type": "this must be text; put it in quotes",
    "bool_type": "this is a switch; write true or false",
    "bool_parsing": "this is a switch; write true or false",
    "dict_type": "this must be a mapping of keys to values",
    "tuple_type": "this must be a list",
    "list_type": "this must be a list",
    "callable_type": "this must be a Python function",
    "model_type": "this must be a mapping of fields, or the object itself",
}


class Fault(ValueError):
    """One problem of a spec, raised inside a validator and shown by `explain`.

    Args:
        text: What is expected, what the value would cause, what to do.
        at: Where the problem is, seen from the value that is being checked.
        show_value: Whether the message begins with "FIELD is VALUE"; else with "FIELD" alone.
    """

    def __init__(self, text: str, *, at: Loc = (), show_value: bool = True) -> None:
        super().__init__(text)
        self.text = text
        self.at = at
        self.show_value = show_value


def conflict(text: str, *at: Any) -> Fault:
    """Return a fault for fields that contradict each other; the text itself names the values."""
    return Fault(text, at=at, show_value=False)


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the known word nearest to a wrong one, or None where none is like it."""
    words = list(known)
    # The beginning of a long word is less alike to it, letter by letter, than a misspelt one.
    longer = [one for one in words if word and one.startswith(str(word))]
    near = longer if len(longer) == 1 else difflib.get_close_matches(str(word), words, n=3, cutoff=0.6)

    def likeness(one: str) -> tuple[float, bool]:  # equally like: the one that begins as the wrong one does
        return difflib.SequenceMatcher(None, one, str(word)).ratio(), one[:1] == str(word)[:1]

    return max(near, key=likeness, default=None)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known word nearest to a wrong one, or "".

    Example:
        >>> did_you_mean("shufle_bytes", ["shuffle_bytes", "tolerance"])
        " Did you mean 'shuffle_bytes'?"
        >>> did_you_mean("dpp", ["pp", "dp", "cp"])
        " Did you mean 'dp'?"
    """
    near = nearest(word, known)
    return "" if near is None else f" Did you mean {near!r}?"


_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")


def unexpanded(path: str) -> str:
    """Return what to say of an environment variable that stands in a path that leads nowhere, or "".

    Example:
        >>> unexpanded("$DATA/web")
        " '$DATA' stands in it as it is: variables of the environment are not replaced. Write the path itself."
    """
    found = _VARIABLE.search(path)
    if found is None:
        return ""
    return f" {found[0]!r} stands in it as it is: variables of the environment are not replaced. Write the path itself."


P = ParamSpec("P")
T = TypeVar("T")


def named_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function refuse an argument that it does not have with the name that was probably meant.

    Raises:
        SpecError: from the function, before it does anything.
    """
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        wrong = next((name for name in kwargs if name not in known), None)
        if wrong is not None:
            raise SpecError(
                f"{function.__name__}: unknown argument {wrong!r}; it would have no effect."
                f"{did_you_mean(wrong, known)} Known arguments: {', '.join(known)}."
            )
        return function(*args, **kwargs)

    return checked


def in_yaml(text: str) -> str:
    """Return a message with its `field=value` as a YAML file has them.

    Example:
        >>> in_yaml('Give tokenizer="tokenizer.json" or set tokenized=True (size=224); dt=1/a=2 too')
        'Give tokenizer: "tokenizer.json" or set tokenized: true (size: 224); dt: 1/a=2 too'
    """
    spelled = r"(?<![^\s(])([a-z_]+)=(True|False|(?=[\w\"'\[{]))"
    return re.sub(spelled, lambda found: f"{found[1]}: {found[2].lower()}", text)


def name_choices(words: Sequence[str]) -> str:
    """Return words as they read in a sentence.

    Example:
        >>> name_choices(["a", "b", "c"])
        "'a', 'b' or 'c'"
    """
    quoted = [repr(w) for w in words]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def list_some(words: Sequence[str], limit: int = 12) -> str:
    """Return at most `limit` words, and how many more there are."""
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(repr(w) for w in words[:limit]) + more


def path_of(loc: Loc) -> str:
    """Return a location as a Python expression.

    Example:
        >>> path_of(("sources", 3, "weight"))
        'sources[3].weight'
    """
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def show(value: object, limit: int = 80) -> str:
    """Return a value for a message, cut when it is long."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def explain(problems: Sequence[Mapping[str, Any]], data: object, *, title: str, locate: Locate | None = None) -> str:
    """Return the message for the problems of one spec (pydantic's errors()), a line for each.

    A source is named from the data that the user gave. A line begins with the title, such as "Job", where no file and
    line can be told by `locate`.
    """
    lines: dict[str, None] = {}
    for problem in problems:
        loc, text = _sentence(problem, data)
        lines[f"{locate(loc) if locate else title}: {text}"] = None
    more = [f"There are {len(lines) - MOST_PROBLEMS} more mistakes."] if len(lines) > MOST_PROBLEMS else []
    return "\n".join([*list(lines)[:MOST_PROBLEMS], *more])


def _fault_of(problem: Mapping[str, Any]) -> Fault | None:
    error = problem.get("ctx", {}).get("error")
    return error if isinstance(error, Fault) else None


def _loc_of(problem: Mapping[str, Any]) -> Loc:
    fault = _fault_of(problem)
    return (*problem["loc"], *(fault.at if fault else ()))


def _sentence(problem: Mapping[str, Any], data: object) -> tuple[Loc, str]:
    loc = _loc_of(problem)
    fault = _fault_of(problem)
    if fault is None:
        text, value, show_value = _plain_text(problem), problem.get("input"), True
    else:
        text, show_value = fault.text, fault.show_value
        value = follow(problem.get("input"), fault.at)
    subject = path_of(loc) + _source_of(loc, data)
    if show_value and subject and not _SECRET_FIELDS.intersection(map(str, loc)):
        subject += f" is {show(value)}"
    text = text.rstrip()
    end = "" if text.endswith((".", "?")) else "."
    return loc, f"{subject}: {text}{end}" if subject else f"{text}{end}"


def _plain_text(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "literal_error":
        expected = str(problem["ctx"]["expected"])
        known = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
        return f"expected {expected}; nothing else is understood.{did_you_mean(problem.get('input'), known)}"
    return _PLAIN_TEXT.get(problem["type"], str(problem["msg"]))


def _source_of(loc: Loc, data: object) -> str:
    """Return the name of the source with the problem: an index such as sources[217] is hard to find in a file."""
    if len(loc) < 2 or loc[0] != "sources":
        return ""
    source = follow(data, loc[:2])
    name = follow(source, ("name",)) if isinstance(source, Mapping) else getattr(source, "name", None)
    return f" (source {name!r})" if isinstance(name, str) else ""


def follow(data: Any, loc: Loc) -> Any:
    """Return the value at a location, or None where the location leads out of the data."""
    for part in loc:
        if isinstance(data, Mapping):
            data = cast("Mapping[Any, Any]", data).get(part)
        elif isinstance(data, (list, tuple)) and isinstance(part, int):
            items = cast("Sequence[Any]", data)
            data = items[part] if part < len(items) else None
        else:
            return None
    return data


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a float can hold: no bool, no nan, no infinity, no int beyond a float's range.

    Example:
        >>> is_finite(3), is_finite(float("nan")), is_finite(10**400), is_finite(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_whole(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    """Whether a value is a whole number, of Python or of numpy, and within the limits given.

    Example:
        >>> is_whole(3), is_whole(True), is_whole("3"), is_whole(0, 1), is_whole(5, 0, 4)
        (True, False, False, False, False)
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    number = int(value)
    return (least is None or number >= least) and (most is None or number <= most)
