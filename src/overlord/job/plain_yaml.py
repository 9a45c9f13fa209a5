"""YAML as plain data, within limits: texts that come with a dataset are written by strangers.

A few lines of YAML can stand for billions of values (an alias may name a list of aliases), and a deeply nested one ends
the parser. So the events of a text are counted before anything is built from them: `check_yaml`, which `load_yaml`
calls. libyaml parses where it is installed; it is ten times as fast as the parser in Python.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""What builds plain values: no tags of Python, no code."""
MOST_BYTES = 8 << 20
"""How long a text may be; cards of the largest datasets of the Hub have half a megabyte."""
MOST_VALUES = 200_000
"""How many values a text may stand for, every alias counted as what it names."""
MOST_NESTED = 100
_LONG = 1000
_LONG_NUMBER = re.compile(r"[-+0-9_:.]+")
"""A plain scalar (one without quotes) that YAML may read as a number in base 60, which takes quadratic time."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
"""Tags that make any scalar a number, also one in quotes and one with blanks."""


class TooMuchYaml(yaml.YAMLError):
    """A text stands for more than it may; the message completes "it ..."."""


def load_yaml(text: str) -> Any:
    r"""Return the value of a YAML text.

    Raises:
        yaml.YAMLError: It is no plain YAML, or more than the limits of this module allow.

    Example:
        >>> load_yaml("a: &x [1, 2]\nb: *x")
        {'a': [1, 2], 'b': [1, 2]}
    """
    check_yaml(text)
    return build_yaml(text)


def build_yaml(text: str) -> Any:
    """Return the value of a YAML text that `check_yaml` has passed.

    Raises:
        yaml.YAMLError: It is no plain YAML, or a value does not fit its tag.
    """
    loader = SafeLoader(text)
    try:
        return loader.get_single_data()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # What PyYAML's constructors raise for `!!int ""`, `!!timestamp x`, 2001-99-99 and the like.
        raise yaml.YAMLError(f"a value cannot be read as what it is marked or looks like ({error})") from error
    finally:
        loader.dispose()


def check_yaml(text: str) -> None:
    """Refuse a text that would take too much time or memory to build.

    Raises:
        TooMuchYaml: It stands for more than `MOST_VALUES` values, is nested too deeply, or refers to itself.
        yaml.YAMLError: It is no YAML.

    Example:
        >>> check_yaml("a: " + "[" * 1000)
        Traceback (most recent call last):
        overlord.job.plain_yaml.TooMuchYaml: is nested more than 100 deep
    """
    if len(text) > MOST_BYTES:
        raise TooMuchYaml(f"has {len(text)} characters, and {MOST_BYTES} are read")
    sizes: dict[str, int | None] = {}  # the values that each anchor stands for; None while it is being read
    inside: list[tuple[str | None, int]] = []  # of each open list or mapping its anchor, and the values before it
    count = 0
    for event in yaml.parse(text, SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(inside) == MOST_NESTED:
                raise TooMuchYaml(f"is nested more than {MOST_NESTED} deep")
            inside.append((event.anchor, count))
            if event.anchor is not None:
                sizes[event.anchor] = None
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            named = sizes.get(event.anchor or "", 1)  # the loader says that there is no such anchor
            if named is None:
                raise TooMuchYaml(f"has an alias inside of what it names (*{event.anchor})")
            count += named
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor is not None:
                sizes[event.anchor] = 1
            if len(event.value) >= _LONG and (
                event.tag in _NUMBERS or (not event.style and _LONG_NUMBER.fullmatch(event.value))
            ):
                raise TooMuchYaml(f"has a number of {len(event.value)} digits")
            count += 1
        if count > MOST_VALUES:
            raise TooMuchYaml(f"stands for more than {MOST_VALUES} values")
