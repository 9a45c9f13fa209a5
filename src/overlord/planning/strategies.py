"""Ready strategies: functions of (buffer, tree) that decide where every sample of a step goes (the paper's figure 9).

Each name here returns a strategy for `launch(strategy=..)`. Nothing moves to another step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from overlord.core.draw import Buffer
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.errors import SpecError
from overlord.planning import costs
from overlord.planning.balancing.balance import Level, Method, Objective
from overlord.planning.balancing.microbatches import least_labels, no_room, spread_labels
from overlord.planning.balancing.packing import PackMethod
from overlord.planning.balancing.zigzag import deal
from overlord.planning.checking import Strategy
from overlord.planning.dgraph import CostFn, DGraph
from overlord.planning.encoder import Scope

__all__ = ["Strategy", "backbone_balance", "curriculum", "hdp", "long_short", "packed", "vanilla", "vlm_hybrid"]


def vanilla() -> Strategy:
    """Return what loaders do without a plan: samples dealt to buckets in drawing order, microbatches filled in turn."""

    def vanilla(buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        graph = DGraph.from_buffer(buffer, tree).mix().distribute("DP").cost(costs.tokens)
        bucket, microbatch = deal(graph.padded, tree.dp, buffer.limits.microbatch_tokens)
        count, fixed = int(microbatch.max(initial=0)) + 1, buffer.limits.microbatches
        if fixed is not None and count > fixed:
            raise no_room(buffer, graph.padded, tree.dp)
        count = fixed or -(-count // tree.microbatch_multiple) * tree.microbatch_multiple
        places = bucket * count + microbatch
        if tree.dp == 1:  # no microbatch is there only to keep ranks in step
            labels, most = least_labels(buffer, graph.items), buffer.limits.microbatch_tokens
            places = spread_labels(places, labels, graph.padded, count, most)
        return graph.placed(places, count, "round-robin, next fit").plan()

    return vanilla


def backbone_balance(
    cost: CostFn = costs.llama_12b,
    *,
    method: Method = "greedy",
    objective: Objective | None = None,
    level: Level = "interleaved",
    group_size: int | None = None,
    reorder: bool = False,
    broadcast: Collection[str] = (),
) -> Strategy:
    """Return the strategy that gives every data-parallel group the same cost in every microbatch.

    Args:
        cost: What a sequence costs: a model of `ol.costs`, or a function of lengths.
        method: See `DGraph.balance`.
        objective: See `DGraph.balance`. By default "pipeline" on a mesh with pipeline stages, else "lockstep".
        level: See `DGraph.balance`.
        group_size: Balance inside groups of so many data-parallel groups.
        reorder: Whether the longest sequence of a microbatch comes first.
        broadcast: Axes along which the trainer broadcasts.
    """

    def backbone_balance(buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        graph = DGraph.from_buffer(buffer, tree, modality="tokens").mix()
        graph = graph.distribute(axis="DP", group_size=group_size).cost(cost)
        graph = graph.balance(method, objective=_objective(objective, tree), level=level, reorder=reorder)
        return _broadcast(graph, broadcast).plan()

    return backbone_balance


def vlm_hybrid(
    encoder: CostFn = costs.vit_2b,
    backbone: CostFn = costs.llama_12b,
    *,
    scope: Scope = "world",
    split: bool = False,
    method: Method = "greedy",
    objective: Objective | None = None,
    broadcast: Collection[str] = (),
) -> Strategy:
    """Return the strategy that balances images over all ranks and tokens over the data-parallel groups.

    Args:
        encoder: What an image of so many patches costs.
        backbone: What a sequence of so many tokens costs.
        scope: "world": images may go to any rank; "group": only to ranks of the group that holds their tokens.
        split: Whether images that cost more than an even share are cut into runs of patches for several ranks.
        method: How tokens are balanced.
        objective: What is made small for the tokens, as in `backbone_balance`.
        broadcast: Axes along which the trainer broadcasts the tokens.
    """
    tokens = backbone_balance(backbone, method=method, objective=objective, broadcast=broadcast)

    def vlm_hybrid(buffer: Buffer, tree: ClientPlaceTree) -> dict[str, LoadingPlan]:
        plan = tokens(buffer, tree)
        assert isinstance(plan, LoadingPlan)
        images = DGraph.from_buffer(buffer, tree, modality="images").mix()
        images = images.distribute(axis="WORLD").cost(encoder).toward(plan, scope)
        return {"backbone": plan, "encoder": (images.split() if split else images).balance("greedy").plan()}

    return vlm_hybrid


def long_short(
    cost: CostFn = costs.llama_12b,
    *,
    threshold: int | None = None,
    objective: Objective | None = None,
    broadcast: Collection[str] = (),
) -> Strategy:
    """Return the strategy that keeps long and short sequences in microbatches of their own, each kind balanced.

    All ranks meet the long sequences in the same microbatches, so nobody with short ones waits for them.

    Args:
        cost: What a sequence costs.
        threshold: Tokens from which a sequence is long (default: half the context).
        objective: See `DGraph.balance`.
        broadcast: Axes along which the trainer broadcasts.
    """
    if threshold is not None and (not isinstance(threshold, int) or threshold < 1):
        raise SpecError(f"long_short: threshold is {threshold!r:.80}, not a number of tokens. Use 1 or more.")

    def long_short(buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        graph = DGraph.from_buffer(buffer, tree, modality="tokens").mix().distribute("DP").cost(cost)
        aim = _objective(objective, tree)
        long = graph.items.length >= (buffer.limits.context_length // 2 if threshold is None else threshold)
        if long.all() or not long.any() or buffer.limits.microbatches is not None:
            return _broadcast(graph.balance("greedy", objective=aim), broadcast).plan()
        kinds = [graph.where(long, "long sequences"), graph.where(~long, "short sequences")]
        first, second = (_broadcast(g.balance("greedy", objective=aim), broadcast).plan() for g in kinds)
        return first.then(second)

    return long_short


def packed(
    cost: CostFn = costs.llama_12b, *, method: PackMethod = "best_fit", broadcast: Collection[str] = ()
) -> Strategy:
    """Return the strategy that fills microbatches as full as they go, for trainers that pay for a full one anyway.

    Filled microbatches are then dealt to the data-parallel groups, those of like cost together. Where the trainer pays
    only for the tokens there are, use `backbone_balance`: it makes costs even and does not mind room.

    Args:
        cost: What a sequence costs.
        method: "best_fit", "first_fit", or "concat", which cuts plain text where a microbatch is full: see
            `DGraph.pack`.
        broadcast: Axes along which the trainer broadcasts.

    Example:
        >>> from overlord import ClientPlaceTree, summary_buffer
        >>> buffer = summary_buffer({"web": [700, 600, 400, 300]}, context_length=1000)
        >>> packed()(buffer, ClientPlaceTree(dp=2)).bin(0, 0).length.tolist()
        [700, 300]
    """

    def packed(buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        graph = DGraph.from_buffer(buffer, tree, modality="tokens").mix().distribute(axis="DP").cost(cost).pack(method)
        return _broadcast(graph, broadcast).plan()

    return packed


def hdp(cost: CostFn = costs.llama_12b, *, equal_counts: bool = False, broadcast: Collection[str] = ()) -> Strategy:
    """Return ByteScale's hybrid data parallelism: every DP x CP rank is a consumer of its own.

    A sequence that fits one rank (microbatch_tokens / cp) stays there; a longer one is spread over an aligned block
    of 2, 4, .. ranks. Every rank of a block runs the same shared sequences in the same order.

    Args:
        cost: What a sequence costs.
        equal_counts: Whether all ranks get the same number of microbatches (FSDP, EP), with dummies.
        broadcast: Axes along which the trainer broadcasts.
    """

    def hdp(buffer: Buffer, tree: ClientPlaceTree) -> LoadingPlan:
        graph = DGraph.from_buffer(buffer, tree, modality="tokens").mix()
        graph = graph.distribute(axis="CP").cost(cost).balance("greedy", reorder=False, equal_counts=equal_counts)
        return _broadcast(graph, broadcast).plan()

    return hdp


def curriculum(stages: Sequence[tuple[int, Strategy]]) -> Strategy:
    """Return a strategy that changes at given steps, as a run goes from short to long sequences.

    What is drawn changes with `Mixture.stages` or `Mixture.linear`; this changes where it goes.

    Example:
        >>> strategy = curriculum([(0, backbone_balance()), (10_000, long_short())])
    """
    stages = list(stages) if isinstance(stages, Sequence) and not isinstance(stages, str) else []
    pairs = [stage for stage in stages if isinstance(stage, (tuple, list)) and len(stage) == 2 and callable(stage[1])]
    starts = [pair[0] for pair in pairs if isinstance(pair[0], int)]
    rising = all(a < b for a, b in itertools.pairwise(starts))
    if len(starts) != len(stages) or not starts or starts[0] != 0 or not rising:
        raise SpecError(
            f"curriculum: stages are {stages!r:.80}; some steps would have no strategy, or two. Give pairs of (first "
            "step, strategy) that begin with step 0, each later than the one before."
        )

    def curriculum(buffer: Buffer, tree: ClientPlaceTree) -> object:
        chosen = [strategy for step, strategy in stages if step <= buffer.step][-1]
        return chosen(buffer, tree)

    return curriculum  # type: ignore[return-value]


def _objective(given: Objective | None, tree: ClientPlaceTree) -> Objective:
    """Return what to make small: microbatches of expert parallelism meet, those of a pipeline follow one another."""
    return given or ("pipeline" if tree.pp > 1 and not tree.is_lockstep else "lockstep")


def _broadcast(graph: DGraph, axes: Collection[str]) -> DGraph:
    for axis in (axes,) if isinstance(axes, str) else axes:
        graph = graph.broadcast_at(axis)
    return graph
