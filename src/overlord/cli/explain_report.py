"""An explanation for people: sentences and tables for the terminal, and one self-contained HTML page."""

from __future__ import annotations

from html import escape

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from overlord.cli import page
from overlord.cli.explain import Explained, Explanation, SourceCosts, SourceFacts
from overlord.cli.explain_figures import explain_figures
from overlord.cli.summary import count, excess, number, percent, ratio, seconds, size

_MOST_ROWS = 40
"""Sources that a table of the terminal holds."""
_LOADER_COLUMNS = ("read CPU", "finish CPU", "handed over", "read buffer", "index", "decoded in", "measured")
_AXES = {
    "ranks": "over the ranks",
    "lockstep": "microbatches in lockstep",
    "pipeline": "pipelines",
    "encoder": "encoder, over all ranks",
}


def headlines(facts: Explanation) -> list[str]:
    """Return what matters most, in sentences."""
    ranks = facts.balance[0]
    words = [_speed_words(facts)]
    if facts.ranks > 1 and ranks.after is not None and facts.strategy != "vanilla":
        dealt = excess(ranks.before).removesuffix(" than the mean")
        words.append(f"The busiest rank carries {excess(ranks.after)}; dealt round-robin, {dealt}.")
    words += facts.limits
    words.append(_repetition_words(facts))
    if facts.loaders is not None:
        cores, measured = facts.loaders.cores, number(facts.loaders.measured_samples, "sample")
        words.append(
            f"Loading a step takes {seconds(facts.loaders.cpu_s_per_step)} of CPU time: {cores} "
            f"core{'' if cores == 1 else 's'} keep{'s' if cores == 1 else ''} up with a step of "
            f"{seconds(facts.loaders.step_time_s)} (measured here on {measured})."
        )
    return words


def explain_tables(facts: Explanation) -> list[RenderableType]:
    """Return the explanation for the terminal, the headline first."""
    steps = number(facts.steps, "step")
    title = f"{facts.job}: {steps} on {facts.mesh} ({_ranks(facts)}), {facts.strategy}, layout {facts.layout}"
    sentences = (Padding(Text(words), (0, 0, 0, 2)) for words in (*headlines(facts), *facts.notes))
    head = Group(Text(title, style="bold"), *sentences, "")
    parts: list[RenderableType] = [head, _balance_table(facts), _step_table(facts), _source_table(facts)]
    if facts.loaders is not None:
        parts.append(_loader_table(facts))
    return parts


def render_explanation(explained: Explained) -> str:
    """Return the explanation as one HTML page."""
    facts = explained.facts
    steps = number(facts.steps, "step")
    shown = (steps, f"mesh {facts.mesh}", _ranks(facts), f"strategy {facts.strategy}", f"layout {facts.layout}")
    body = (
        f"{page.tiles(_key_figures(facts))}{page.notes([*headlines(facts), *facts.notes])}"
        f"{page.figures(explain_figures(facts))}{_html_sources(facts)}{_html_loaders(facts)}{_html_sample(explained)}"
        f"{page.footer(_methods(facts))}"
    )
    return page.page(facts.job, "overlord explain", shown, body)


def _ranks(facts: Explanation) -> str:
    return number(facts.ranks, "rank")


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
    named = "".join(f", {name} {_times(epochs)}" for epochs, name in others[:2])
    more = f"; {len(often) - 3} more are repeated too" if len(often) > 3 else ""
    return f"In {facts.projected_steps:,} steps {first} is read {_times(most)}{named}{more}."


def _times(epochs: float) -> str:
    return f"{epochs:,.1f} times" if epochs < 100 else f"{epochs:,.0f} times"


def _key_figures(facts: Explanation) -> list[tuple[str, str, str]]:
    first, last = facts.balance[0], facts.balance[min(1, len(facts.balance) - 1)]
    found = [
        ("expected speed-up", ratio(facts.expected_speedup), "of a step, by the cost model"),
        (_AXES[first.axis], _or_dash(first.after), f"round-robin {ratio(first.before)}"),
        (_AXES[last.axis], _or_dash(last.after), f"round-robin {ratio(last.before)}"),
        ("padding", percent(facts.step.padding), "of the positions"),
        ("tokens a step", count(facts.step.tokens), f"{count(facts.step.samples)} samples"),
    ]
    if facts.loaders is not None:
        cores = facts.loaders.cores
        need = f"{cores} core{'' if cores == 1 else 's'} for a step of {seconds(facts.loaders.step_time_s)}"
        found.append(("CPU a step", seconds(facts.loaders.cpu_s_per_step), need))
    return found


def _or_dash(value: float | None) -> str:
    return "–" if value is None else ratio(value)


def _balance_table(facts: Explanation) -> Table:
    table = Table(title="balance (1 is even)", title_justify="left")
    table.add_column("")
    for name in ("round-robin", facts.strategy, "least possible"):
        table.add_column(name, justify="right", style="bold" if name == facts.strategy else "")
    for one in facts.balance:
        table.add_row(_AXES[one.axis], ratio(one.before), _or_dash(one.after), _or_dash(one.bound))
    return table


def _step_table(facts: Explanation) -> Table:
    step = facts.step
    table = Table(title="a step (mean)", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    table.add_row("tokens (T)", count(step.tokens), f"{count(min(step.tokens_per_step))} to "
                  f"{count(max(step.tokens_per_step))}; {count(step.loss_tokens)} in the loss")  # fmt: skip
    table.add_row("squared (Q)", count(step.squared_tokens), "sum of squared lengths, which attention pays for")
    table.add_row("samples", count(step.samples), "")
    table.add_row("microbatches", f"{step.microbatches:.1f}", f"round-robin {step.microbatches_before:.1f}")
    table.add_row("padding", percent(step.padding), "of the positions")
    if facts.crossing_tokens is not None:
        crossing = f"{count(facts.crossing_tokens)} are encoded on another rank than the one that needs them"
        table.add_row(_image_words(facts), count(facts.image_tokens), crossing)
    return table


def _image_words(facts: Explanation) -> str:
    return "tokens of images and clips" if facts.has_clips else "image tokens"


def _source_table(facts: Explanation) -> RenderableType:
    table = Table(title=f"sources, shares by {facts.mixture_level}", title_justify="left")
    table.add_column("source", style="bold")
    table.add_column("format", style="dim")
    for name in ("planned", "realised", "samples", "tokens", "rows", "epochs", f"in {facts.projected_steps:,} steps"):
        table.add_column(name, justify="right")
    shown = facts.sources
    if len(shown) > _MOST_ROWS:
        shown = sorted(shown, key=lambda source: -source.planned_share)[:_MOST_ROWS]
    for source in shown:
        table.add_row(Text(source.name), source.format, *_source_cells(source))
    return _with_rest(table, len(facts.sources) - len(shown))


def _source_cells(source: SourceFacts) -> list[str]:
    rows = "?" if source.rows is None else f"{'' if source.rows_exact else '~'}{count(source.rows)}"
    return [
        f"{100 * source.planned_share:.2f}%",
        f"{100 * source.realised_share:.2f}%",
        count(source.samples),
        count(source.tokens),
        rows,
        "?" if source.epochs is None else f"{source.epochs:.2f}",
        "?" if source.projected_epochs is None else f"{source.projected_epochs:,.2f}",
    ]


def _loader_table(facts: Explanation) -> RenderableType:
    loaders = facts.loaders
    assert loaders is not None
    title = "loaders, in a mean step (measured here, the rest of a run may differ)"
    table = Table(title=title, title_justify="left")
    table.add_column("source", style="bold")
    for name in _LOADER_COLUMNS:
        table.add_column(name, justify="right")
    ranked = sorted(loaders.sources, key=lambda one: -one.cpu_s)
    for one in ranked[:_MOST_ROWS]:
        table.add_row(Text(one.name), *_loader_cells(one), number(one.measured_samples, "sample"))
    table.add_section()
    table.add_row(
        "all",
        seconds(sum(one.read_cpu_s for one in ranked)),
        seconds(sum(one.finish_cpu_s for one in ranked)),
        size(loaders.payload_bytes_per_step),
        size(loaders.buffer_bytes),
        size(loaders.index_bytes),
        "",
        number(loaders.measured_samples, "sample"),
    )
    return _with_rest(table, len(ranked) - _MOST_ROWS)


def _loader_cells(one: SourceCosts) -> list[str]:
    if not one.measured_samples:
        return ["–", "–", "–", size(one.buffer_bytes), size(one.index_bytes), "–"]
    return [
        seconds(one.read_cpu_s),
        seconds(one.finish_cpu_s),
        size(one.payload_bytes),
        size(one.buffer_bytes),
        size(one.index_bytes),
        one.decoded_in or "–",
    ]


def _with_rest(table: Table, left_out: int) -> RenderableType:
    if left_out <= 0:
        return table
    return Group(table, Text(f"{left_out} more sources are in --json and --html.", style="dim"))


def _html_sources(facts: Explanation) -> str:
    names = ["planned", "realised", "samples", "tokens", "rows", "epochs", f"in {facts.projected_steps:,} steps"]
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    largest = max((source.realised_share for source in facts.sources), default=0.0) or 1.0
    rows = "".join(_html_row(source, source.realised_share / largest) for source in facts.sources)
    title = f"{number(len(facts.sources), 'source')}. {_repetition_words(facts)}"
    return (
        f'<section class="sources" id="sources"><h2>{escape(title)}</h2>'
        '<div class="scroll"><table><thead><tr><th scope="col">source</th><th scope="col">format</th>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p>Shares are of {facts.mixture_level}s.</p></section>"
    )


def _html_loaders(facts: Explanation) -> str:
    if facts.loaders is None:
        return ""
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("source", *_LOADER_COLUMNS))
    rows: list[str] = []
    for one in sorted(facts.loaders.sources, key=lambda one: -one.cpu_s):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (*_loader_cells(one), count(one.measured_samples)))
        rows.append(f'<tr><th scope="row">{escape(one.name)}</th>{cells}</tr>')
    title = f"Loading a step takes {seconds(facts.loaders.cpu_s_per_step)} of CPU time"
    return (
        f'<section class="sources loaders" id="loaders"><h2>{escape(title)}</h2><div class="scroll"><table><thead>'
        f"<tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        "<p>CPU time and bytes are of a mean step, measured here on so many samples.</p></section>"
    )


def _html_row(source: SourceFacts, share: float) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in _source_cells(source))
    return (
        f'<tr><th scope="row">{escape(source.name)}<i style="width:{100 * min(share, 1.0):.1f}%"></i></th>'
        f"<td>{escape(source.format)}</td>{cells}</tr>"
    )


def _html_sample(explained: Explained) -> str:
    traced = explained.facts.largest_sample
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(detail)}</td></tr>' for name, detail in traced.states
    )
    return (
        '<section class="sources trace" id="sample"><h2>The largest sample of the first step, '
        f"{escape(traced.sample)}, has {traced.tokens:,} tokens and goes this way</h2>"
        f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'
        "<details><summary>The whole graph of the first step</summary>"
        f'<iframe title="DGraph" srcdoc="{escape(explained.graph_page)}"></iframe></details></section>'
    )


def _methods(facts: Explanation) -> dict[str, str]:
    found = {
        "steps": f"{facts.steps} steps were drawn and planned from metadata; no sample of them was decoded.",
        "round-robin": "The same steps without a plan: samples dealt to the data-parallel groups in turn, each group's "
        "microbatches filled one after the other.",
        "cost": f"By the model {facts.cost_model}.",
        "expected speed-up": "Time of the steps dealt round-robin over that of the plan, by the cost model, where "
        f"{facts.waiting}. Communication, loading and the encoder are not in it.",
        "encoder": f"Without a plan for images{' and clips' if facts.has_clips else ''} (vlm_hybrid), they are encoded "
        "on the first rank of the group that holds their tokens.",
        "repetitions": f"Rows drawn and passed over, over the rows of a source; for {facts.projected_steps:,} steps, "
        "scaled by the schedule of the mixture. ~ marks rows that are estimated by bytes, since not all files are "
        "indexed yet.",
    }
    if facts.loaders is not None:
        found["CPU, bytes"] = (
            "CPU seconds of this process while it reads and finishes a few samples of each source, scaled by the "
            "tokens of a step; waiting for storage is not in it. The read buffer is the largest seen, one step ahead."
        )
    return found
