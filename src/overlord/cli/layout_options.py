"""Layouts in a few words, for a report."""

from __future__ import annotations

from overlord.job.layout_specs import Layout
from overlord.job.specs import Job


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
