"""An explanation of a job: what it holds, sentences and tables for the terminal, and one self-contained HTML page."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as TerminalTable
from rich.text import Text

from overlord.core.draw import Buffer
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.planning.costs import CostFunction
from overlord.planning.dgraph import DGraph, Edge
from overlord.planning.exhaustion import EPOCHS, SourceForecast
from overlord.reports import svg
from overlord.reports.pages import Figure, Row, Table, Tile, render, terminal_table, tile_table
from overlord.reports.passes import NAMED, coming, forecast_words, worth_of
from overlord.reports.run_report import binned_length_figure, heat_map_figure
from overlord.reports.summary import (
    LoadHeatmap,
    busiest,
    count,
    number,
    percent,
    ratio,
    seconds,
    share,
    size,
    without_zeros,
)

_MOST_ROWS = 40
"""Sources that a table of the terminal holds."""
_MOST_BARS = 16
_LOADER_COLUMNS = ("source", "read CPU", "finish CPU", "handed over", "read buffer", "index", "decoded in", "measured")
_FORECAST_TITLE = "steps at which epochs begin, and at which sources are read up"
_FORECAST_COLUMNS = ("source", "second epoch", "fourth", "sixteenth", "read up")
_AXES = {
    "ranks": ("over the ranks", "largest ÷ mean cost of a rank"),
    "lockstep": ("microbatches in lockstep", "time of a step ÷ that of even ranks"),
    "pipeline": ("pipelines", "slowest ÷ even pipeline"),
    "encoder": ("encoder, over all ranks", "largest ÷ mean encoding cost"),
}
"""What an axis is called in a table, and along a chart."""


@dataclass(frozen=True, slots=True)
class BalanceFacts:
    """Imbalance along one axis: 1 is even. Means over the steps."""

    axis: str
    """"ranks", "lockstep", "pipeline" or "encoder"."""
    meaning: str
    before: float
    """Dealt round-robin."""
    after: float | None
    """As planned; None where the strategy has no such axis."""
    bound: float | None
    """What no placement of whole items can better; None where it is not known."""
    before_per_step: list[float]
    after_per_step: list[float]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step, as a mean over the steps."""

    tokens: float
    """T: tokens without padding."""
    squared_tokens: float
    """Q: the sum of squared sequence lengths, which attention pays for."""
    samples: float
    loss_tokens: float
    microbatches: float
    microbatches_before: float
    padding: float
    """Share of the delivered positions that hold no token."""
    padding_before: float
    first_step: int
    tokens_per_step: list[int]


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """One source over the planned steps, and over a whole run."""

    name: str
    format: str
    planned_share: float
    """Share that the mixture asks for, by sample or by token as it counts."""
    realised_share: float
    samples: int
    tokens: int
    skipped: int
    """Rows that were passed over: filtered out, or dropped as too long."""
    rows: float | None
    """Rows of the source; None while none of its files is indexed."""
    rows_exact: bool
    """False where rows are scaled up by bytes from the files that are indexed."""
    epochs: float | None
    """Passes over the source in the planned steps."""
    projected_epochs: float | None
    """Passes over the source in the whole run, by its schedule."""
    projected_effective_epochs: float | None
    """What they are worth, in passes over new data."""
    forecast: SourceForecast
    """When its epochs begin, and when it is read up."""


@dataclass(frozen=True, slots=True)
class SourceCosts:
    """What one source costs its loaders in a mean step."""

    name: str
    samples_per_step: float
    measured_samples: int
    """Samples that were finished; 0 for a source that no planned step draws."""
    read_cpu_s: float
    """CPU seconds a step for reading and measuring."""
    finish_cpu_s: float
    """CPU seconds a step for finishing: token ids, and media decoded, wherever that is done."""
    payload_bytes: float
    """Bytes a step that the loaders hand over, media encoded or decoded as they travel."""
    decoded_in: str | None
    """Where its media are decoded: "loader" or "constructor"; None where it has none."""
    buffer_bytes: int
    """Largest read buffer that was seen, with one step planned ahead."""
    index_bytes: int

    @property
    def cpu_s(self) -> float:
        """CPU seconds a step."""
        return self.read_cpu_s + self.finish_cpu_s


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """What all loaders need together."""

    cpu_s_per_step: float
    step_time_s: float
    cores: int
    """Cores that keep up with a training step of `step_time_s` seconds."""
    payload_bytes_per_step: float
    buffer_bytes: int
    index_bytes: int
    measured_samples: int
    sources: list[SourceCosts]


@dataclass(frozen=True, slots=True)
class TracedSample:
    """The states of one sample, from its source to the ranks."""

    sample: str
    tokens: int
    states: list[tuple[str, str]]
    """(primitive, what it did to the sample)."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that `explain` found; `dataclasses.asdict` of it is the JSON."""

    job: str
    mesh: str
    ranks: int
    strategy: str
    layout: str
    """The layout of the batches: its keys, and the fields that differ from the defaults."""
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


# --------------------------------------------------------------------------------------------------------------
# The terminal and the page.


def headlines(facts: Explanation) -> list[str]:
    """Return what matters most, in sentences."""
    ranks = facts.balance[0]
    words = [_speed_words(facts)]
    if facts.ranks > 1 and ranks.after is not None and facts.strategy != "vanilla":
        words.append(f"{busiest('rank', ranks.after, ranks.before)}.")
    words += facts.limits
    words.append(_repetition_words(facts))
    ahead = forecast_words([source.forecast for source in facts.sources])
    words += [] if ahead is None else [ahead]
    if facts.loaders is not None:
        cores, measured = facts.loaders.cores, number(facts.loaders.measured_samples, "sample")
        words.append(
            f"{_loading_words(facts.loaders)}: {number(cores, 'core')} keep{'s' if cores == 1 else ''} up with a step "
            f"of {seconds(facts.loaders.step_time_s)} (measured here on {measured})."
        )
    return words


def explain_tables(facts: Explanation) -> list[RenderableType]:
    """Return the explanation for the terminal, the headline first."""
    steps = number(facts.steps, "step")
    title = f"{facts.job}: {steps} on {facts.mesh} ({_ranks(facts)}), {facts.strategy}, layout {facts.layout}"
    sentences = (Padding(Text(words), (0, 0, 0, 2)) for words in (*headlines(facts), *facts.notes))
    head = Group(Text(title, style="bold"), *sentences, "")
    parts: list[RenderableType] = [head, _balance_table(facts), _step_table(facts)]
    sources, shown = facts.sources, facts.sources
    if len(sources) > _MOST_ROWS:
        shown = sorted(sources, key=lambda source: -source.planned_share)[:_MOST_ROWS]
    title = f"sources, shares by {facts.mixture_level}"
    parts.append(
        _with_rest(terminal_table(title, _source_heads(facts), _source_rows(shown)), len(sources) - len(shown))
    )
    ahead = _forecast_rows(facts)
    if len(ahead) > NAMED:  # the headlines name fewer
        table = terminal_table(_FORECAST_TITLE, _FORECAST_COLUMNS, ahead[:_MOST_ROWS])
        parts.append(_with_rest(table, len(ahead) - _MOST_ROWS))
    if facts.loaders is not None:
        parts.append(_loader_table(facts.loaders))
    return parts


def render_explanation(facts: Explanation, graph_page: str) -> str:
    """Return the explanation as one HTML page, with the page of the first step's graph inside."""
    title = f"{number(len(facts.sources), 'source')}. {_repetition_words(facts)}"
    note = f"Shares are of {facts.mixture_level}s."
    tables = [Table("sources", title, _source_heads(facts), _source_rows(facts.sources), note)]
    ahead = _forecast_rows(facts)
    if ahead:
        note = "Of a run from its first step; ~ where mean lengths, filters or estimated rows are in it."
        title = f"{_FORECAST_TITLE.capitalize()}."
        tables.append(Table("forecast", title, _FORECAST_COLUMNS, ahead, note))
    if facts.loaders is not None:
        note = "CPU time and bytes are of a mean step, measured here on so many samples."
        rows = _loader_rows(facts.loaders)
        tables.append(Table("loaders", _loading_words(facts.loaders), _LOADER_COLUMNS, rows, note))
    steps, ranks = number(facts.steps, "step"), _ranks(facts)
    return render(
        "explain",
        facts.job,
        "overlord explain",
        (steps, f"mesh {facts.mesh}", ranks, f"strategy {facts.strategy}", f"layout {facts.layout}"),
        explain_figures(facts),
        tables,
        tiles=_key_figures(facts),
        notes=[*headlines(facts), *facts.notes],
        explained=facts,
        traced=facts.largest_sample,
        graph_page=graph_page,
    )


def _ranks(facts: Explanation) -> str:
    return number(facts.ranks, "rank")


def _loading_words(loaders: LoaderFacts) -> str:
    return f"Loading a step takes {seconds(loaders.cpu_s_per_step)} of CPU time"


def _speed_words(facts: Explanation) -> str:
    if facts.ranks == 1:
        return "One rank: nothing to balance."
    if facts.strategy == "vanilla":
        return "Samples are dealt round-robin: nothing is balanced. Try --strategy backbone_balance."
    encoder = "" if facts.crossing_tokens is None else " The encoder's time is not in it."
    assumed = (
        f"(an estimate by the cost model {facts.cost_model.split(' ')[0]}, not a measurement, where {facts.waiting})."
    )
    if facts.expected_speedup < 1.005:
        return f"No step gets faster by {facts.strategy}: {ratio(facts.expected_speedup)} {assumed}{encoder}"
    return f"A step is expected to be {ratio(facts.expected_speedup)} as fast as dealt round-robin {assumed}{encoder}"


def _repetition_words(facts: Explanation) -> str:
    known = [(s.projected_epochs, s.name) for s in facts.sources if s.projected_epochs is not None]
    in_all = f"in {facts.projected_steps:,} steps"
    if not known:
        return "How often sources are read is not known: none of their files is indexed."
    often = sorted((one for one in known if one[0] > 1.05), reverse=True)
    if not often:
        most, name = max(known)
        return f"No source is read more than once {in_all}; {name} comes furthest ({_times(most)})."
    (most, first), *others = often
    named = "".join(f", {name} {_times(epochs)} ({worth_of(epochs)})" for epochs, name in others[:2])
    more = f"; {len(often) - 3} more are repeated too" if len(often) > 3 else ""
    first = f"{first} is read {_times(most)} ({worth_of(most)} of new data)"
    return f"In {facts.projected_steps:,} steps {first}{named}{more}."


def _times(epochs: float) -> str:
    return f"{epochs:,.1f} times" if epochs < 100 else f"{epochs:,.0f} times"


def _key_figures(facts: Explanation) -> list[Tile]:
    first, last = facts.balance[0], facts.balance[min(1, len(facts.balance) - 1)]
    found = [
        ("expected speed-up", ratio(facts.expected_speedup), "of a step, by the cost model"),
        (_AXES[first.axis][0], _or_dash(first.after), f"round-robin {ratio(first.before)}"),
        (_AXES[last.axis][0], _or_dash(last.after), f"round-robin {ratio(last.before)}"),
        ("padding", percent(facts.step.padding), "of the positions"),
        ("tokens a step", count(facts.step.tokens), f"{count(facts.step.samples)} samples"),
    ]
    if facts.loaders is not None:
        need = f"{number(facts.loaders.cores, 'core')} for a step of {seconds(facts.loaders.step_time_s)}"
        found.append(("CPU a step", seconds(facts.loaders.cpu_s_per_step), need))
    return found


def _or_dash(value: float | None) -> str:
    return "–" if value is None else ratio(value)


def _balance_table(facts: Explanation) -> TerminalTable:
    heads = ("", "round-robin", facts.strategy, "least possible")
    rows = [
        Row(_AXES[one.axis][0], (ratio(one.before), _or_dash(one.after), _or_dash(one.bound))) for one in facts.balance
    ]
    return terminal_table("balance (1 is even)", heads, rows)


def _step_table(facts: Explanation) -> TerminalTable:
    step = facts.step
    spread = f"{count(min(step.tokens_per_step))} to {count(max(step.tokens_per_step))}"
    tiles = [
        ("tokens (T)", count(step.tokens), f"{spread}; {count(step.loss_tokens)} in the loss"),
        ("squared (Q)", count(step.squared_tokens), "sum of squared lengths, which attention pays for"),
        ("samples", count(step.samples), ""),
        ("microbatches", f"{step.microbatches:.1f}", f"round-robin {step.microbatches_before:.1f}"),
        ("padding", percent(step.padding), "of the positions"),
    ]
    if facts.crossing_tokens is not None:
        what = "tokens of images and clips" if facts.has_clips else "image tokens"
        crossing = f"{count(facts.crossing_tokens)} are encoded on another rank than the one that needs them"
        tiles.append((what, count(facts.image_tokens), crossing))
    return tile_table("a step (mean)", tiles)


def _source_heads(facts: Explanation) -> list[str]:
    projected = f"in {facts.projected_steps:,} steps"
    return ["source", "format", "planned", "realised", "samples", "tokens", "rows", "epochs", projected]


def _source_rows(sources: list[SourceFacts]) -> list[Row]:
    largest = max((source.realised_share for source in sources), default=0.0) or 1.0
    found: list[Row] = []
    for source in sources:
        cells = [
            source.format,
            share(source.planned_share),
            share(source.realised_share),
            count(source.samples),
            count(source.tokens),
            "?" if source.rows is None else f"{'' if source.rows_exact else '~'}{count(source.rows)}",
            "?" if source.epochs is None else f"{source.epochs:.2f}",
            _projected(source),
        ]
        found.append(Row(source.name, cells, source.realised_share / largest))
    return found


def _projected(source: SourceFacts) -> str:
    epochs, worth = source.projected_epochs, source.projected_effective_epochs
    if epochs is None or worth is None:
        return "?"
    return f"{epochs:,.2f}" if epochs <= 1 else f"{epochs:,.2f}, worth {worth:,.2f}"


def _forecast_rows(facts: Explanation) -> list[Row]:
    """Return when epochs begin, for the sources that are read again or read up: the earliest first."""
    ahead = coming([source.forecast for source in facts.sources])
    return [
        Row(source.name, [_step_cell(at, source) for at in (*map(source.begins.get, EPOCHS), source.read_up)])
        for source in ahead
    ]


def _step_cell(step: int | None, source: SourceForecast) -> str:
    return "–" if step is None else f"{'' if source.exact else '~'}{step:,}"


def _loader_table(loaders: LoaderFacts) -> RenderableType:
    title = "loaders, in a mean step (measured here, the rest of a run may differ)"
    table = terminal_table(title, _LOADER_COLUMNS, _loader_rows(loaders)[:_MOST_ROWS])
    table.add_section()
    table.add_row(
        "all",
        seconds(sum(one.read_cpu_s for one in loaders.sources)),
        seconds(sum(one.finish_cpu_s for one in loaders.sources)),
        size(loaders.payload_bytes_per_step),
        size(loaders.buffer_bytes),
        size(loaders.index_bytes),
        "",
        number(loaders.measured_samples, "sample"),
    )
    return _with_rest(table, len(loaders.sources) - _MOST_ROWS)


def _loader_rows(loaders: LoaderFacts) -> list[Row]:
    """Return the sources, the most expensive first."""
    found: list[Row] = []
    for one in sorted(loaders.sources, key=lambda one: -one.cpu_s):
        held = [size(one.buffer_bytes), size(one.index_bytes)]
        cells = ["–", "–", "–", *held, "–"]
        if one.measured_samples:
            spent = [seconds(one.read_cpu_s), seconds(one.finish_cpu_s), size(one.payload_bytes)]
            cells = [*spent, *held, one.decoded_in or "–"]
        found.append(Row(one.name, [*cells, number(one.measured_samples, "sample")]))
    return found


def _with_rest(table: TerminalTable, left_out: int) -> RenderableType:
    if left_out <= 0:
        return table
    return Group(table, Text(f"{left_out} more sources are in --json and --html.", style="dim"))


# --------------------------------------------------------------------------------------------------------------
# The figures of the page.


def explain_figures(facts: Explanation) -> list[Figure]:
    """Return the figures in reading order: balance along each axis, a typical step, lengths, CPU time."""
    drawn = [
        balance_figure(one, facts.step.first_step)
        for one in facts.balance
        if len(one.after_per_step) == len(one.before_per_step) and facts.ranks > 1
    ]
    drawn.append(binned_length_figure(facts.length_histogram))
    if facts.loaders is not None:
        drawn.append(cpu_figure(facts.loaders))
    if len(drawn) % 2:
        drawn[-1] = dataclasses.replace(drawn[-1], wide=True)  # half a row would stay empty
    drawn.insert(2 if len(drawn) > 2 else len(drawn), heat_map_figure(facts.load_heatmap, "planned"))
    return drawn


def balance_figure(fact: BalanceFacts, first_step: int) -> Figure:
    """Return the imbalance along one axis, step by step."""
    after = fact.after if fact.after is not None else fact.before
    title = _balance_title(fact.axis, after, fact.before)
    starts = [float(first_step + number) for number in range(len(fact.before_per_step))]
    lines = ("planned", after, fact.after_per_step), ("round-robin", fact.before, fact.before_per_step)
    least = f" No placement of whole items comes below {ratio(fact.bound)}." if fact.bound is not None else ""
    return Figure(
        f"balance-{fact.axis}",
        title,
        f"{fact.meaning[:1].upper()}{fact.meaning[1:]}.{least}",
        lambda width: svg.two_lines(width, _AXES[fact.axis][1], starts, *lines),
    )


def _balance_title(axis: str, after: float, before: float) -> str:
    if axis == "ranks":
        return busiest("rank", after, before)
    if axis == "encoder":
        return (
            f"The busiest encoder rank has {ratio(after)} the mean; images encoded with their tokens, {ratio(before)}"
        )
    what = "Waiting after every microbatch" if axis == "lockstep" else "The slowest pipeline"
    return f"{what}, a step takes {_longer(after)} than with even ranks; dealt round-robin, {_longer(before)}"


def _longer(value: float) -> str:
    return f"{ratio(value)} as long" if value >= 2 else f"{percent(max(value - 1, 0.0))} longer"


def cpu_figure(loaders: LoaderFacts) -> Figure:
    """Return the CPU time of a step by source, reading apart from finishing."""
    ranked = sorted((one for one in loaders.sources if one.cpu_s > 0), key=lambda one: -one.cpu_s)
    shown, rest = ranked[:_MOST_BARS], ranked[_MOST_BARS:]
    bars = [(one.name, one.read_cpu_s, one.finish_cpu_s) for one in shown]
    if rest:
        bars.append((f"{len(rest)} others", sum(o.read_cpu_s for o in rest), sum(o.finish_cpu_s for o in rest)))
    title = _loading_words(loaders)
    if shown:
        title += f"; {shown[0].name} takes {percent(shown[0].cpu_s / max(loaders.cpu_s_per_step, 1e-12))} of it"
    rows = [
        (
            name,
            f"{name}: {seconds(read)} reading and measuring, {seconds(finish)} finishing",
            (read, finish),
            without_zeros(seconds)(read + finish),
        )
        for name, read, finish in bars
    ]
    caption = (
        f"Blue: reading, and measuring lengths (tokenizing). Orange: finishing (decoding images). Measured here on "
        f"{count(loaders.measured_samples)} samples, scaled by the tokens that a step draws."
    )
    colours = (svg.OURS, svg.THEIRS)
    return Figure("cpu", title, caption, lambda width: svg.row_bars(width, "CPU time in a mean step", rows, colours))


# --------------------------------------------------------------------------------------------------------------
# The first step as a graph.


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
        notes=plan.notes,
        places=bins[order].astype(np.int64),
        num_microbatches=plan.num_microbatches,
        broadcast=plan.broadcast,
        cp_sizes=None if plan.cp_sizes is None else plan.cp_sizes[order].astype(np.int64),
        counts=plan.counts,
        offload=None if plan.offload is None else plan.offload[bins[order]].astype(np.int64),
        offload_layers=plan.offload_layers,
    )
