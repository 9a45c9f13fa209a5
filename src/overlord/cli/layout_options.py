"""Layouts as a job file or a command line writes them: a name, or a mapping of the fields of `ol.Layout`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, get_args

from pydantic import BeforeValidator

from overlord.cli.cost_specs import mapping_or_name
from overlord.core.layout_specs import Keys, Layout
from overlord.core.spec_errors import Fault, did_you_mean, name_choices, show
from overlord.core.specs import Job
from overlord.errors import SpecError


def _any_form(value: object) -> object:
    if isinstance(value, (Layout, Mapping)):
        return value
    known = get_args(Keys)
    if not isinstance(value, str) or value not in known:
        raise Fault(
            f"expected {name_choices(known)}, or a mapping such as {{keys: hf, rows: padded}}; batches would have "
            f"unknown keys.{did_you_mean(value, known)}"
        )
    return {"keys": value}


AnyLayout = Annotated[Layout, BeforeValidator(_any_form, json_schema_input_type=Layout | Keys)]
"""A layout in any form that a file may hold."""


def read_layout(text: str) -> Layout:
    """Return the layout of a command line: a name, or a mapping as a job file has it.

    Raises:
        SpecError: There is no such layout or field.

    Example:
        >>> read_layout("{keys: megatron, block: 32}")
        Layout('megatron', block=32)
    """
    given = mapping_or_name(text)
    try:
        return Layout.from_mapping(_any_form(given), lambda _: "--layout")
    except Fault as fault:
        raise SpecError(f"--layout is {show(given)}: {fault}{'' if str(fault).endswith(('.', '?')) else '.'}") from None


def written_layout(layout: Layout) -> object:
    """Return the short form that a file holds: the name, with the fields that differ from the defaults.

    Example:
        >>> written_layout(Layout("megatron")), written_layout(Layout(rows="padded"))
        ('megatron', {'keys': 'hf', 'rows': 'padded'})
    """
    changed = layout.model_dump(mode="json", exclude_defaults=True)
    return {"keys": layout.keys} | changed if set(changed) - {"keys"} else layout.keys


def layout_words(layout: Layout) -> str:
    """Return a layout in a few words: its keys, and the fields that differ from the defaults.

    Example:
        >>> layout_words(Layout("megatron")), layout_words(Layout(rows="padded", block=32))
        ('megatron', 'hf, rows=padded, block=32')
    """
    changed = layout.model_dump(mode="json", exclude_defaults=True, exclude={"keys"})
    return ", ".join([layout.keys, *(f"{name}={value}" for name, value in changed.items())])


def layout_advice(job: Job, layout: Layout) -> list[str]:
    """Return what to change where a layout of rows leaves room for only one row in a microbatch."""
    context, most = job.batch.context_length, job.batch.microbatch_cap
    if layout.rows == "packed" or most >= 2 * context:
        return []
    return [
        f"A microbatch has one row, since rows={layout.rows} counts every row as context_length={context:,} tokens and "
        f"batch.microbatch_tokens is {most:,}: raise batch.microbatch_tokens, to {8 * context:,} for eight rows."
    ]
