"""`overlord explain`: what a job would do on a mesh, from metadata alone. Steps are planned and nothing is decoded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from overlord.cli.collecting import Collector
from overlord.cli.context_fit import context_notes
from overlord.cli.explain_balance import Balance, BalanceFacts, StepFacts, words_on_limits
from overlord.cli.explain_graph import TracedSample, draw_first_step
from overlord.cli.explain_loaders import BufferWatch, LoaderFacts, loader_facts, time_samples
from overlord.cli.explain_sources import SourceFacts, source_facts
from overlord.cli.layout_options import layout_advice, layout_words
from overlord.cli.output import Tell
from overlord.cli.sources import isolated
from overlord.cli.summary import LoadHeatmap
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.errors import SpecError
from overlord.job.launch_words import Placement
from overlord.job.layout_specs import Layout
from overlord.job.specs import Job, Video
from overlord.planning.checking import Strategy
from overlord.planning.costs import CostModel
from overlord.runtimes.hosts.prefetch import Executors, InlineExecutor, SerialWorkers, ThreadWorkers
from overlord.runtimes.launching.deployment import Roles, deploy, few_samples, limits_of
from overlord.runtimes.launching.launch_options import LaunchOptions

PROJECTED_STEPS = 10_000
"""Steps that repetitions are projected to, for a job without `max_steps`."""
_CALLERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainOptions:
    """What is explained, and by which yardstick."""

    mesh: ClientPlaceTree
    steps: int
    cache: str
    strategy: Strategy | None
    strategy_name: str
    cost: CostModel
    """What a sequence costs the backbone."""
    encoder: CostModel
    """What an image costs the encoder."""
    layout: Layout = field(default_factory=Layout)
    placement: Placement = "auto"
    prefetch: int = 2
    loaders_per_source: int = 1
    step_time_s: float = 1.0
    """Seconds of a training step, for which the loaders' cores are counted."""
    measure: bool = True
    meets_once: bool = False
    """Whether data-parallel groups wait for each other once a step, and not after every microbatch."""
    cost_assumed: bool = False
    """Whether `cost` is a stand-in for that of a function, which nobody can ask."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that `explain` found; `dataclasses.asdict` of it is the JSON."""

    job: str
    mesh: str
    ranks: int
    strategy: str
    layout: str
    """Whose keys the batches have, and the fields of the layout that differ from the defaults."""
    cost_model: str
    """The model that all costs are by, and where it is from."""
    steps: int
    expected_speedup: float
    """Time of a step dealt round-robin over that of the plan, by the cost model: an estimate, not a measurement."""
    waiting: str
    """When ranks are taken to wait for each other."""
    balance: list[BalanceFacts]
    step: StepFacts
    sources: list[SourceFacts]
    projected_steps: int
    mixture_level: str
    loaders: LoaderFacts | None
    """Measured on this machine; None where nothing was measured."""
    crossing_tokens: float | None
    """Image tokens a step that are encoded on another rank than the one that needs them; None without images."""
    image_tokens: float
    """Image tokens a step."""
    has_clips: bool
    """Whether clips count among the images."""
    length_histogram: list[tuple[int, int, int]]
    load_heatmap: LoadHeatmap | None
    largest_sample: TracedSample
    limits: list[str]
    """What this strategy cannot better, in words."""
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Explained:
    """An explanation, and the page of the first step's graph."""

    facts: Explanation
    graph_page: str


def explain_job(job: Job, name: str, options: ExplainOptions, tell: Tell) -> Explained:
    """Plan some steps of a job without running it, and return what they look like.

    Raises:
        SpecError: The job, the mesh or the strategy is wrong.
        PlanError: A step cannot be planned.
    """
    steps, notes = _steps_to_plan(job, options.steps)
    if options.cost_assumed:
        notes.append(
            f"{options.strategy_name} is judged by {options.cost.name}, since a function's own cost is not known here; "
            "set --cost."
        )
    callers = ThreadWorkers(_CALLERS, "overlord-explain")
    try:
        with tempfile.TemporaryDirectory(prefix="overlord-") as store:
            launch = LaunchOptions(
                mesh=options.mesh,
                prefetch=options.prefetch,
                loaders_per_source=options.loaders_per_source,
                cache=options.cache,
                strategy=options.strategy,
                layout=options.layout,
                placement=options.placement,
            )
            hands = Executors(callers, SerialWorkers(), InlineExecutor())
            roles = deploy(job, launch, store, hands, tell, isolate_reader=isolated())
            try:
                return _explain(roles, job, name, options, steps, notes, tell)
            finally:
                roles.close()
    finally:
        callers.close()


def _steps_to_plan(job: Job, wanted: int) -> tuple[int, list[str]]:
    learn = job.mixture.learn
    if learn is None:
        return wanted, []
    # The report of step s counts from step s + lag on: before that the mixture is what it begins with.
    steps = min(wanted, job.lag)
    return steps, [
        f"The mixture learns ({learn.method}) from reports, which only a trainer has: {steps} steps are shown, drawn "
        f"before the first report counts (lag {job.lag}), and everything here holds for the weights it begins with."
    ]


def _explain(
    roles: Roles, job: Job, name: str, options: ExplainOptions, steps: int, notes: list[str], tell: Tell
) -> Explained:
    names = tuple(source.name for source in roles.job.sources)
    limits, tree = limits_of(roles.job, options.layout, options.mesh), options.mesh
    collector = Collector(job, names, limits, tree, options.cost)
    balance = Balance(tree, limits, options.cost, options.encoder, meets_once=options.meets_once)
    watch = BufferWatch(roles)

    def take(plan: LoadingPlan) -> None:
        dealt = collector.add(plan)
        balance.add(plan, dealt)
        watch.step_over(plan)

    timed = time_samples(roles, steps, tell) if options.measure else None
    first = _plan_steps(roles, steps, take, tell)
    if collector.steps < steps:
        notes.append(f"The stream ends by itself after {collector.steps} of {steps} steps.")
    state = roles.planner.latest_state
    horizon = job.max_steps or PROJECTED_STEPS
    share = (collector.full / np.maximum(collector.samples, 1)).tolist()
    passed = (state.samples + state.skipped).tolist()
    full, skipped, met = (dict(zip(names, values, strict=True)) for values in (share, state.skipped.tolist(), passed))
    few = few_samples(job, tree)
    notes += [few] if few is not None else []
    notes += context_notes(job, Path(options.cache), full, skipped, met) + layout_advice(job, options.layout)
    clips = any(isinstance(source.sample, Video) for source in job.sources)
    sources = source_facts(roles, collector, state, horizon)
    loaders = None if timed is None else loader_facts(roles, collector, watch, timed, options.step_time_s)
    buffer = roles.planner.summary_buffer(first.step)
    assert buffer is not None  # it was planned before
    page, traced = draw_first_step(first, buffer, tree, options.cost, options.strategy_name)
    order = {source.name: number for number, source in enumerate(job.sources)}
    facts = Explanation(
        job=name,
        mesh=str(tree),
        ranks=tree.world_size,
        strategy=options.strategy_name,
        layout=layout_words(options.layout),
        cost_model=f"{options.cost.name} ({options.cost.origin})",
        steps=collector.steps,
        expected_speedup=balance.speedup,
        waiting=balance.waiting,
        balance=balance.facts(),
        step=balance.step_facts(collector),
        sources=sorted(sources, key=lambda source: order[source.name]),
        projected_steps=horizon,
        mixture_level=job.mixture.level,
        loaders=loaders,
        crossing_tokens=balance.crossing_tokens,
        image_tokens=balance.image_tokens,
        has_clips=clips,
        length_histogram=collector.histogram,
        load_heatmap=collector.typical_load(),
        largest_sample=traced,
        limits=words_on_limits(balance, clips=clips),
        notes=notes + _fault_notes(roles, names),
    )
    return Explained(facts, page)


def _plan_steps(roles: Roles, steps: int, take: Callable[[LoadingPlan], None], tell: Tell) -> LoadingPlan:
    """Plan so many steps, or as many as there are; return the first plan."""
    first: LoadingPlan | None = None
    begin = roles.planner.first_step
    for number in range(steps):
        plan = roles.planner.plan_raw(begin + number)
        if plan is None:
            break
        take(plan)
        first = first or plan
        tell("planning steps", number + 1, steps)
    if first is None:
        raise SpecError(
            "the stream of this job has no step: its sources hold less than one step, and drop_last leaves that out. "
            "Make the batch smaller, or set drop_last to false."
        )
    return first


def _fault_notes(roles: Roles, names: Sequence[str]) -> list[str]:
    notes: list[str] = []
    for name, one in zip(names, roles.fleet.status().values(), strict=True):
        if one["bad"]:
            samples = "sample was" if one["bad"] == 1 else "samples were"
            notes.append(f"{name}: {one['bad']} bad {samples} met; the log names them.")
        if one["wrong_length"]:
            notes.append(f"{name}: {one['wrong_length']} samples have another length than their length column says.")
    return notes
