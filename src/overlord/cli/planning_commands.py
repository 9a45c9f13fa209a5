"""Commands that plan or measure and run nothing: `overlord explain`, `overlord profile`.

What they need is imported when the job file has been read: a mistake in it is told before that.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from overlord.cli.options import CACHE, AsJson, Cache, Flags, JobPath, choose, launch_flags, load
from overlord.cli.output import Screen, check_writable, write_text
from overlord.errors import SpecError
from overlord.launch_spec import mapping_or_name
from overlord.planning.costs import Cost, CostModel, llama_12b, vit_2b
from overlord.planning.strategies import Strategy, StrategySpec, costs_of, meets_once, name_of

EXPLAIN_STEPS = 20
PROFILED_SAMPLES = 200
PROFILED_SECONDS = 2.0


@launch_flags("mesh", "strategy", "layout", "placement", "loaders_per_source")
def explain(
    job: JobPath,
    flags: Flags,
    steps: Annotated[int, typer.Option(help="Steps to plan.")] = EXPLAIN_STEPS,
    cost: Annotated[
        str | None,
        typer.Option(
            "--cost",
            help="Cost model of the backbone: a preset, or '{causal_lm: {layers: 32, hidden: 4096}}'; else the "
            "strategy's own, or llama_12b for a Python function.",
        ),
    ] = None,
    step_time: Annotated[
        float, typer.Option("--step-time", help="Seconds of a training step, for which cores are counted.")
    ] = 1.0,
    measure: Annotated[bool, typer.Option(help="Whether a few samples are decoded, to know the CPU time.")] = True,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with plots to this file.")] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Show what a job would do on a mesh, without running it: balance, padding, epochs, CPU and memory."""
    screen = Screen(as_json=as_json)
    _check_numbers(steps, step_time)
    if html is not None:
        check_writable("--html", html)
    loaded = load(job, screen)
    launch = choose(loaded, flags, cache)
    backbone, encoder, assumed = _costs(launch.strategy, cost)
    from overlord.cli.explain import ExplainOptions, explain_job
    from overlord.cli.running import DEFAULT_STRATEGY, check_job
    from overlord.reports.explanation import explain_tables, headlines, render_explanation

    options = ExplainOptions(
        mesh=launch.mesh,
        steps=steps,
        cache=launch.cache,
        strategy=launch.strategy,
        strategy_name=DEFAULT_STRATEGY if launch.strategy is None else name_of(launch.strategy),
        cost=backbone,
        encoder=encoder,
        layout=launch.layout,
        placement=launch.placement,
        prefetch=launch.prefetch,
        # A dry run plans with one worker where their number is not the same for all sources.
        loaders_per_source=launch.loaders_per_source if isinstance(launch.loaders_per_source, int) else 1,
        step_time_s=step_time,
        measure=measure,
        meets_once=meets_once(launch.strategy),
        cost_assumed=assumed,
    )
    check_job(loaded.job, options.mesh, options.layout, options.cache, here=False)
    with screen.progress() as tell, screen.user_code():
        explained = explain_job(loaded.job, str(job), options, tell)
    screen.show(*explain_tables(explained.facts))
    if html is not None:
        write_text(html, render_explanation(explained))
        screen.show(Text.assemble(("page  ", "dim"), str(html)))
    found = dataclasses.asdict(explained.facts)
    screen.give(found | {"headlines": headlines(explained.facts), "html": None if html is None else str(html)})


@launch_flags("placement")
def profile(
    job: JobPath,
    flags: Flags,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Samples of each source, at most about.")
    ] = PROFILED_SAMPLES,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Seconds for each source, at most about.")
    ] = PROFILED_SECONDS,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="NAME", help="Only this one; may be repeated.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Where the profile goes; else beside the job file, as its name.profile.json."),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with plots to this file.")] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Show how workers are given to the sources, by the profile that is there."),
    ] = False,
    cpus: Annotated[float | None, typer.Option("--cpus", help="With --plan: cores for loading.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="With --plan: memory for loading, as 64GiB.")] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Measure what each source costs on real samples: latency, hand-over, memory, bytes; and keep it beside the job."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen)
    placement = choose(loaded, flags, cache).placement
    loaded = dataclasses.replace(loaded, launch=loaded.launch.model_copy(update={"placement": placement}))
    from overlord.cli.profile import profile_sources

    profile_sources(
        screen,
        loaded,
        job,
        samples=samples,
        seconds=seconds,
        source=source,
        output=output,
        html=html,
        plan=plan,
        cpus=cpus,
        memory=memory,
        cache=cache,
    )


def _costs(strategy: Strategy | None, given: str | None) -> tuple[CostModel, CostModel, bool]:
    """Return what a sequence and an image cost, and whether that is only assumed.

    The command line says it, or the strategy, unless it is a Python function or balances by one.
    """
    backbone, encoder = costs_of(strategy)
    image = encoder if isinstance(encoder, CostModel) else vit_2b
    if given is not None:
        return Cost.from_mapping(mapping_or_name(given), lambda _: "--cost").model(), image, False
    if isinstance(backbone, CostModel):
        return backbone, image, False
    return llama_12b, image, backbone is not None or not isinstance(strategy, StrategySpec | None)


def _check_numbers(steps: int, step_time: float) -> None:
    if steps < 1:
        raise SpecError(f"--steps is {steps}; there would be nothing to explain. Give 1 or more.")
    if not step_time > 0:
        raise SpecError(f"--step-time is {step_time:g}; no number of cores is fast enough. Give seconds above 0.")
