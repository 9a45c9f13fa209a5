"""Commands that plan or measure and run nothing: `overlord explain`, `overlord profile`.

What they need is imported when the job file has been read: a mistake in it is told before that.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from overlord.cli.options import (
    CACHE,
    AsJson,
    Cache,
    JobPath,
    LayoutName,
    Loaders,
    Mesh,
    PlacementOption,
    StrategyName,
    folder_of,
    load,
    loaders_of,
    mesh_of,
)
from overlord.cli.output import Screen, check_writable
from overlord.errors import SpecError
from overlord.job_files import JobFile
from overlord.launch_section import FileLoaders
from overlord.planning.costs import CostModel, llama_12b, vit_2b
from overlord.planning.strategy_specs import Cost

EXPLAIN_STEPS = 20
PROFILED_SAMPLES = 200
PROFILED_SECONDS = 2.0


def explain(  # noqa: PLR0913 - one for each option
    job: JobPath,
    mesh: Mesh = None,
    strategy: StrategyName = None,
    layout: LayoutName = None,
    placement: PlacementOption = None,
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
    loaders: Loaders = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Show what a job would do on a mesh, without running it: balance, padding, epochs, CPU and memory."""
    screen = Screen(as_json=as_json)
    _check_numbers(steps, step_time)
    if html is not None:
        check_writable("--html", html)
    loaded = load(job, screen, strategy, layout, placement)
    from overlord.cli.demo import write_text
    from overlord.cli.explain import ExplainOptions, explain_job
    from overlord.cli.running import DEFAULT_STRATEGY, check_job
    from overlord.reports.explanation import explain_tables, headlines, render_explanation

    launch = loaded.launch
    backbone, encoder = _costs(loaded, cost)
    options = ExplainOptions(
        mesh=mesh_of(loaded, mesh),
        steps=steps,
        cache=folder_of(cache),
        strategy=loaded.strategy,
        strategy_name=loaded.strategy_name or DEFAULT_STRATEGY,
        cost=backbone,
        encoder=encoder,
        layout=launch.layout,
        placement=launch.placement,
        prefetch=launch.prefetch,
        loaders_per_source=_one_number(launch.loaders_per_source if loaders is None else loaders_of(loaders)),
        step_time_s=step_time,
        measure=measure,
        meets_once=loaded.function is None and launch.strategy is not None and launch.strategy.meets_once,
        cost_assumed=loaded.function is not None and cost is None,
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


def profile(
    job: JobPath,
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
    placement: PlacementOption = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Measure what each source costs on real samples: latency, hand-over, memory, bytes; and keep it beside the job."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen, placement=placement)
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


def _one_number(loaders: FileLoaders) -> int:
    """Return how many workers each source has here: a dry run plans with one where their number is not the same."""
    return loaders if isinstance(loaders, int) else 1


def _costs(loaded: JobFile, given: str | None) -> tuple[CostModel, CostModel]:
    """Return what a sequence and an image cost: as the command line says, or as the strategy balances them."""
    chosen = loaded.launch.strategy if loaded.function is None else None
    backbone = llama_12b if chosen is None else chosen.backbone_cost().model()
    encoder = vit_2b if chosen is None else chosen.encoder_cost().model()
    return (backbone if given is None else Cost.read(given).model()), encoder


def _check_numbers(steps: int, step_time: float) -> None:
    if steps < 1:
        raise SpecError(f"--steps is {steps}; there would be nothing to explain. Give 1 or more.")
    if not step_time > 0:
        raise SpecError(f"--step-time is {step_time:g}; no number of cores is fast enough. Give seconds above 0.")
