"""The first step that `explain` plans, as a graph: its page, and the way of its largest sample."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from overlord.core.draw import Buffer
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.planning.costs import CostFunction
from overlord.planning.dgraph import DGraph, Edge


@dataclass(frozen=True, slots=True)
class TracedSample:
    """The states of one sample, from its source to the ranks."""

    sample: str
    tokens: int
    states: list[tuple[str, str]]
    """(primitive, what it did to the sample)."""


def draw_first_step(
    plan: LoadingPlan, buffer: Buffer, tree: ClientPlaceTree, cost: CostFunction, strategy: str
) -> tuple[str, TracedSample]:
    """Return the page of a step's graph, and the trace of its largest sample."""
    graph = graph_of(plan, buffer, tree, cost, strategy)
    at = int(np.argmax(buffer.meta["tokens"]))
    trace = graph.trace(buffer.draw.sample_id(at))
    states = [(state.name, state.detail) for state in trace.states]
    return graph.visualize("html"), TracedSample(str(trace.sample), int(buffer.meta["tokens"][at]), states)


def graph_of(plan: LoadingPlan, buffer: Buffer, tree: ClientPlaceTree, cost: CostFunction, strategy: str) -> DGraph:
    """Return the graph that a plan stands at the end of; what the strategy did in between is not known."""
    graph = DGraph.from_buffer(buffer, tree).mix().distribute(plan.axis).cost(cost)
    bins = np.repeat(np.arange(len(plan.bin_offsets) - 1), np.diff(plan.bin_offsets))
    # A sequence that several ranks share is one item of the graph: it stands at the first of them.
    once = np.flatnonzero(plan.first_ranks == plan.buckets) if plan.first_ranks is not None else np.arange(len(bins))
    order = once[np.lexsort((plan.pieces.start[once], plan.pieces.sample[once]))]
    count = f"{'at most ' if plan.counts is not None else ''}{plan.num_microbatches} microbatches"
    edge = Edge("balance", f"{strategy}: {count} for each of {plan.num_buckets} buckets")
    return dataclasses.replace(
        graph,
        edges=(*graph.edges, edge),
        places=bins[order].astype(np.int64),
        num_microbatches=plan.num_microbatches,
        broadcast=plan.broadcast,
        cp_sizes=None if plan.cp_sizes is None else plan.cp_sizes[order].astype(np.int64),
        counts=plan.counts,
    )
