"""Layouts on the command line: as `--layout` writes them, and in a few words for a report."""

from __future__ import annotations

from overlord.core.spec_errors import Fault, show
from overlord.errors import SpecError
from overlord.job.layout_specs import Layout
from overlord.job.specs import Job
from overlord.launch_section import as_layout
from overlord.planning.cost_specs import mapping_or_name


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
        return Layout.from_mapping(as_layout(given), lambda _: "--layout")
    except Fault as fault:
        raise SpecError(f"--layout is {show(given)}: {fault}{'' if str(fault).endswith(('.', '?')) else '.'}") from None


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
