"""The figures of an explanation: balance step by step, one typical step, lengths, and CPU time of the sources."""

from __future__ import annotations

import dataclasses

from overlord.cli import charts
from overlord.cli.explain import BalanceFacts, Explanation, LoaderFacts
from overlord.cli.figures import OURS, THEIRS, Figure, heat_map_figure, length_figure, short_name, two_lines
from overlord.cli.summary import count, excess, percent, ratio, seconds, without_zeros

_MOST_BARS = 16
_ROW = 22.0
_LABELS = {
    "ranks": "largest ÷ mean cost of a rank",
    "lockstep": "time of a step ÷ that of even ranks",
    "pipeline": "slowest ÷ even pipeline",
    "encoder": "largest ÷ mean encoding cost",
}


def explain_figures(facts: Explanation) -> list[Figure]:
    """Return the figures in reading order."""
    drawn = [
        balance_figure(one, facts.step.first_step)
        for one in facts.balance
        if len(one.after_per_step) == len(one.before_per_step) and facts.ranks > 1
    ]
    drawn.append(length_figure(facts.length_histogram))
    if facts.loaders is not None:
        drawn.append(cpu_figure(facts.loaders))
    if len(drawn) % 2:
        drawn[-1] = dataclasses.replace(drawn[-1], wide=True)  # half a row would stay empty
    drawn.insert(2 if len(drawn) > 2 else len(drawn), heat_map_figure(facts.load_heatmap, "planned"))
    return drawn


def balance_figure(fact: BalanceFacts, first_step: int) -> Figure:
    """Return the imbalance along one axis, step by step."""
    after = fact.after if fact.after is not None else fact.before
    title = _title(fact.axis, after, fact.before)
    starts = [float(first_step + number) for number in range(len(fact.before_per_step))]
    ends = (f"planned {ratio(after)}", f"round-robin {ratio(fact.before)}")
    draw = two_lines(title, _LABELS[fact.axis], starts, fact.after_per_step, fact.before_per_step, ends)
    least = f" No placement of whole items comes below {ratio(fact.bound)}." if fact.bound is not None else ""
    return Figure(f"balance-{fact.axis}", title, f"{fact.meaning[:1].upper()}{fact.meaning[1:]}.{least}", draw)


def _title(axis: str, after: float, before: float) -> str:
    if axis == "ranks":
        dealt = excess(before).removesuffix(" than the mean")
        return f"The busiest rank carries {excess(after)}; dealt round-robin, {dealt}"
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
    title = f"Loading a step takes {seconds(loaders.cpu_s_per_step)} of CPU time"
    if shown:
        title += f"; {shown[0].name} takes {percent(shown[0].cpu_s / max(loaders.cpu_s_per_step, 1e-12))} of it"

    def draw(width: float) -> str:
        left, right, top = 110.0, 70.0, 30.0
        most = max((read + finish for _, read, finish in bars), default=0.0) or 1.0
        room = width - left - right
        parts = [charts.text(left, 14, "CPU time in a mean step", kind="y-title")]
        for row, (name, read, finish) in enumerate(bars):
            y, split, end = top + row * _ROW, room * read / most, room * (read + finish) / most
            words = f"{name}: {seconds(read)} reading and measuring, {seconds(finish)} finishing"
            parts += [
                charts.text(left - 8, y + 13, short_name(name, 14), anchor="end"),
                f"<g>{charts.tip(words)}",
                charts.rectangle(left, y + 3, split, _ROW - 8, f'fill="{OURS}"'),
                charts.rectangle(left + split, y + 3, end - split, _ROW - 8, f'fill="{THEIRS}"'),
                "</g>",
                charts.text(left + end + 6, y + 13, without_zeros(seconds)(read + finish), kind="value"),
            ]
        return charts.svg(width, top + len(bars) * _ROW + 8, title, parts)

    caption = (
        f"Blue: reading, and measuring lengths (tokenizing). Orange: finishing (decoding images). Measured here on "
        f"{count(loaders.measured_samples)} samples, scaled by the tokens that a step draws."
    )
    return Figure("cpu", title, caption, draw)
