"""The states of one sample in a DGraph, from its source to the ranks that consume it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.core.samples import FILE_SHIFT, SampleId
from overlord.errors import SpecError

if TYPE_CHECKING:
    from overlord.planning.dgraph import DGraph


@dataclass(frozen=True, slots=True)
class State:
    """One state of a sample."""

    name: str
    """The primitive that led to it, or "source"."""
    detail: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The states of one sample, in order."""

    sample: SampleId
    states: tuple[State, ...]

    def __str__(self) -> str:
        width = max(len(state.name) for state in self.states)
        return "\n".join([str(self.sample), *(f"  {s.name:<{width}}  {s.detail}" for s in self.states)])


def parse_sample_id(text: str) -> SampleId:
    """Read the form that `str(sample_id)` writes.

    Example:
        >>> parse_sample_id("web:2:7@0") == SampleId("web", (2 << 32) + 7, 0)
        True
    """
    try:
        place, epoch = text.rsplit("@", 1)
        source, file, row = place.rsplit(":", 2)
        return SampleId(source, (int(file) << FILE_SHIFT) + int(row), int(epoch))
    except ValueError:
        raise SpecError(
            f"sample {text!r} is not a sample id; nothing could be found. Write source:file:row@epoch, as batches and "
            "logs show it."
        ) from None


def trace_sample(graph: DGraph, sample: SampleId | str) -> Trace:
    """Tell the states of a sample, as far as the graph has come."""
    if not isinstance(sample, (str, SampleId)):
        raise SpecError(f"trace: {sample!r:.80} is not a sample id. Give one of `batch.meta.sample_ids`, or its text.")
    wanted = parse_sample_id(sample) if isinstance(sample, str) else sample
    draw = graph.buffer.draw
    source = draw.names.index(wanted.source) if wanted.source in draw.names else -1
    found = np.flatnonzero(
        (draw.source == source) & (draw.meta["row"] == wanted.row) & (draw.meta["epoch"] == wanted.epoch)
    )
    if not len(found):
        raise SpecError(
            f"trace: sample {wanted} is not in step {draw.step}; it was drawn in another step, or not at all. Take an "
            "id from `batch.meta.sample_ids` of this step."
        )
    at = int(found[0])
    meta = draw.meta[at]
    states = [
        State("source", f"{wanted.source}, row {wanted.row_in_file} of file {wanted.file}, epoch {wanted.epoch}"),
        State("from_buffer", f"number {at} of {len(draw)} in step {draw.step}: {int(meta['tokens'])} tokens"),
    ]
    items = np.flatnonzero(graph.items.sample == at)
    for edge in graph.edges[1:]:
        detail = edge.detail
        if edge.primitive == "cost" and graph.costs is not None:
            detail = f"{', '.join(f'{int(c):,}' for c in graph.costs[items])} ({edge.detail})"
        if edge.primitive in ("balance", "pack") and graph.places is not None:
            detail = "; ".join(_place(graph, int(item)) for item in items)
        states.append(State(edge.primitive, detail if len(items) else f"not in this graph ({edge.detail})"))
    if graph.places is not None and len(items):
        states.append(State("consumers", "; ".join(_consumers(graph, int(item)) for item in items)))
    return Trace(wanted, tuple(states))


def _place(graph: DGraph, item: int) -> str:
    assert graph.places is not None
    bucket, microbatch = divmod(int(graph.places[item]), graph.num_microbatches)
    start, length = int(graph.items.start[item]), int(graph.items.length[item])
    return f"{graph.modality} {start} to {start + length - 1}: bucket {bucket}, microbatch {microbatch}"


def _consumers(graph: DGraph, item: int) -> str:
    assert graph.places is not None
    axis, first = graph.axis or "DP", int(graph.places[item]) // graph.num_microbatches
    width = int(graph.cp_sizes[item]) if graph.cp_sizes is not None else 1
    ranks = [rank for bucket in range(first, first + width) for rank in graph.tree.consumers(axis, bucket)]
    fetching = [rank for rank in ranks if graph.tree.fetches(rank, graph.broadcast)]
    named = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"ranks {named}" + ("" if len(fetching) == len(ranks) else f", fetched by {', '.join(map(str, fetching))}")
