"""The command line: `overlord demo`, `explain`, `profile`, `run`, `serve`, `status`, `sources`, `schema`, `version`.

Exit codes: 0 done; 1 the run failed, had more bad samples than a tolerance allows, or lint found errors; 2 what was
asked for cannot be done; 130 Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from overlord import __version__
from overlord.cli.options import (
    AS_JSON,
    CACHE,
    DEFAULT_STEPS,
    Address,
    AsJson,
    Cache,
    Cpus,
    JobPath,
    LayoutName,
    LoaderHostsOption,
    Loaders,
    Mesh,
    Metrics,
    OnSourceFailureOption,
    PlacementOption,
    Prefetch,
    RanksPerHost,
    ReconcileName,
    ReconcileOption,
    Resume,
    Runtime,
    ScalingOption,
    ServeRuntime,
    Shadows,
    State,
    Store,
    StrategyName,
    Threads,
    folder_of,
    load,
    options_of,
    runtime_of,
)
from overlord.cli.output import Screen, check_writable, command, show_error
from overlord.cli.planning_commands import explain, profile
from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import OverlordError, SpecError, ToleranceError
from overlord.job_files import job_file_schema
from overlord.reports.summary import RunSummary, count, number


class _Commands(TyperGroup):
    """All commands; what they raise becomes one paragraph and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            with command():
                return super().invoke(ctx)
        except OverlordError as error:
            raise typer.Exit(show_error(error, as_json=ctx.meta.get(AS_JSON, False))) from error
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="overlord",
    cls=_Commands,
    help="A data loader for large-model training from many sources.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
sources_app = typer.Typer(help="Look at the sources of a job.", no_args_is_help=True)
app.add_typer(sources_app, name="sources")
app.command()(explain)
app.command()(profile)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the data, the job file and the report go.")] = Path(
        "overlord-demo"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Steps to run.")] = 30,
    runtime: Runtime = None,
    mesh: Annotated[str, typer.Option(help="Sizes of the axes.")] = "dp=2,cp=2,tp=2",
    cache: Cache = CACHE,
    scale: Annotated[float, typer.Option(hidden=True, help="Samples relative to the full demo.")] = 1.0,
    media: Annotated[bool, typer.Option("--media", help="Sounds and clips instead, some of them corrupt.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write eight small sources, run a VLM-shaped job on them, and show what came out."""
    from overlord.cli.demo import run_demo

    screen = Screen(as_json=as_json)
    tree = ClientPlaceTree.parse(mesh)
    result = run_demo(folder, tree, runtime_of(runtime), steps, folder_of(cache), screen, scale, media=media)
    paths = {"job": str(result.job), "report": str(result.report), "summary_file": str(result.summary_file)}
    _show_run(screen, result.summary)
    screen.show(
        Text.assemble(("report   ", "dim"), str(result.report)),
        Text.assemble(("numbers  ", "dim"), str(result.summary_file)),
        Text.assemble(("job      ", "dim"), str(result.job)),
        f"\nNext: open {result.report} in a browser; edit {result.job} and run it with\n\n"
        f"    {_command_name()} run {result.job}\n",
    )
    screen.give(dataclasses.asdict(result.summary) | paths)
    _end_run(result.summary)


@app.command()
def run(  # noqa: PLR0913 - one for each option
    job: JobPath,
    mesh: Mesh = None,
    strategy: StrategyName = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help=f"Steps to run; else launch.steps of the job file, else {DEFAULT_STEPS}."),
    ] = None,
    runtime: Runtime = None,
    address: Address = None,
    ranks_per_host: RanksPerHost = None,
    loader_hosts: LoaderHostsOption = None,
    layout: LayoutName = None,
    placement: PlacementOption = None,
    prefetch: Prefetch = None,
    loaders: Loaders = None,
    scaling: ScalingOption = None,
    cpus: Cpus = None,
    threads: Threads = None,
    store: Store = None,
    resume: Resume = False,
    state: State = None,
    reconcile: ReconcileOption = ReconcileName.strict,
    on_source_failure: OnSourceFailureOption = None,
    shadows: Shadows = None,
    metrics: Metrics = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Run a job with every rank of its mesh in this process, and show what came out."""
    screen = Screen(as_json=as_json)
    if report is not None:
        check_writable("--report", report)
    loaded = load(job, screen, strategy, layout, placement)
    from overlord.cli.demo import write_report
    from overlord.cli.running import check_job, run_job

    chosen = steps or loaded.launch.steps
    if chosen is None:
        screen.note(f"neither --steps nor launch.steps is given; running {DEFAULT_STEPS} steps")
    # What the file says of trainer hosts is for trainers; here all ranks are in one process.
    loaded = dataclasses.replace(loaded, launch=loaded.launch.model_copy(update={"ranks_per_host": None}))
    options = options_of(
        loaded, mesh=mesh, runtime=runtime, address=address, ranks_per_host=ranks_per_host, loader_hosts=loader_hosts,
        prefetch=prefetch, loaders=loaders, scaling=scaling, cpus=cpus, threads=threads, store=store,
        on_source_failure=on_source_failure, shadows=shadows, metrics=metrics, cache=cache, resume=resume, state=state,
        reconcile=reconcile,
    )  # fmt: skip
    options = dataclasses.replace(options, steps=chosen or DEFAULT_STEPS)
    check_job(loaded.job, options.mesh, options.layout, options.cache, look=options.where.address is None)
    with screen.progress() as tell, screen.user_code():
        summary = run_job(loaded.job, str(job), options, tell)
    _show_run(screen, summary)
    if report is not None:
        write_report(summary, report)
        screen.show(Text.assemble(("report  ", "dim"), str(report)))
    screen.give(dataclasses.asdict(summary) | {"report": None if report is None else str(report)})
    _end_run(summary)


@app.command()
def serve(  # noqa: PLR0913 - one for each option
    ctx: typer.Context,
    job: JobPath,
    mesh: Mesh = None,
    strategy: StrategyName = None,
    runtime: ServeRuntime = None,
    address: Address = None,
    ranks_per_host: RanksPerHost = None,
    loader_hosts: LoaderHostsOption = None,
    layout: LayoutName = None,
    placement: PlacementOption = None,
    prefetch: Prefetch = None,
    loaders: Loaders = None,
    scaling: ScalingOption = None,
    cpus: Cpus = None,
    threads: Threads = None,
    store: Store = None,
    resume: Resume = False,
    state: State = None,
    reconcile: ReconcileOption = ReconcileName.strict,
    on_source_failure: OnSourceFailureOption = None,
    shadows: Shadows = None,
    metrics: Metrics = None,
    address_file: Annotated[
        Path | None, typer.Option("--address-file", help="Write the address to this file while the service is up.")
    ] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Serve a job to trainers in other processes, of this host or of a cluster's, until Ctrl-C or SIGTERM."""
    screen = Screen(as_json=as_json)
    if address_file is not None:
        check_writable("--address-file", address_file)
    loaded = load(job, screen, strategy, layout, placement)
    from overlord.cli.running import aside_notes, check_job, launch_for
    from overlord.cli.serving import announcement, serve_until_stopped, trainer_hosts

    options = options_of(
        loaded, mesh=mesh, runtime=runtime, address=address, ranks_per_host=ranks_per_host, loader_hosts=loader_hosts,
        prefetch=prefetch, loaders=loaders, scaling=scaling, cpus=cpus, threads=threads, store=store,
        on_source_failure=on_source_failure, shadows=shadows, metrics=metrics, cache=cache, resume=resume, state=state,
        reconcile=reconcile,
    )  # fmt: skip
    if options.where.runtime == "inline":
        raise SpecError(
            f"{job}: launch.runtime is 'inline', and no other process can attach to that; trainers would have no data. "
            "Add --runtime local or --runtime ray."
        )
    check_job(loaded.job, options.mesh, options.layout, options.cache, here=False, look=options.where.address is None)
    for note in aside_notes(options):
        screen.note(note)
    with screen.progress() as tell:
        service = launch_for(loaded.job, options, tell, any_mesh=True)

    def announce() -> None:
        told = service.status()
        screen.show(*announcement(str(job), options, service.address or "", told, service.metrics))
        more: dict[str, Any] = {"hosts": trainer_hosts(told)} if "ray" in told else {}
        more |= {} if service.metrics is None else {"metrics": service.metrics}
        screen.give({"address": service.address, "pid": told["pid"], "mesh": str(options.mesh)} | more)
        ctx.meta[AS_JSON] = False  # the one object is out

    with service:
        serve_until_stopped(service, screen, address_file, announce)


@app.command()
def status(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="What `overlord serve` shows, or its address file.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show what a running service is doing: mixture, buffers, bad samples, clients, and the hosts of a cluster."""
    from overlord.cli.serving import find_status, status_tables

    screen = Screen(as_json=as_json)
    found = find_status(address)
    screen.show(*status_tables(found))
    screen.give(found)


@sources_app.command("list")
def list_sources(
    job: JobPath,
    rows: Annotated[bool, typer.Option("--rows", help="Index all files now, to know their rows.")] = False,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """List the sources of a job: format, files, bytes, and rows where they are known."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen)
    from overlord.cli.sources import count_rows, describe_source, open_each, source_listing

    with screen.progress() as tell:
        opened = open_each(loaded.job, loaded.job.sources, Path(folder_of(cache)), tell)
        if rows:
            count_rows(opened, tell)
    found = [describe_source(one) for one in opened]
    screen.show(source_listing(str(job), found))
    if not rows and any(one["error"] is None and one["rows"] is None for one in found):
        screen.show("?: not all files are indexed yet; --rows does it now.")
    screen.give({"job": str(job), "sources": found})
    errors = [one.error for one in opened if one.error is not None]
    for error in errors:
        show_error(error, as_json=False)
    if errors:
        raise typer.Exit(2)


@sources_app.command()
def preview(
    job: JobPath,
    source: Annotated[str | None, typer.Argument(metavar="SOURCE", help="Only this one.", show_default=False)] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, max=1000, help="Samples of each source.")] = 3,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with pictures.")] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Show the first samples of each source: text, token counts and thumbnails."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen)
    from overlord.cli.demo import write_text
    from overlord.cli.preview import preview_page, preview_source, show_previews
    from overlord.cli.sources import choose_sources, open_each

    chosen = choose_sources(loaded.job, [] if source is None else [source])
    if html is not None:
        check_writable("--html", html)
    with screen.progress() as tell, screen.user_code():
        opened = open_each(loaded.job, chosen, Path(folder_of(cache)), tell)
        found = [(one, preview_source(one, rows)) for one in opened]
    for one, previews in found:
        screen.show(show_previews(one, previews, pictures=screen.out.color_system is not None))
    if html is not None:
        write_text(html, preview_page(str(job), found))
        screen.show(Text.assemble(("page  ", "dim"), str(html)))
    screen.give({"job": str(job), "sources": {one.source.name: [p.to_json() for p in ps] for one, ps in found}})


@sources_app.command()
def lint(
    job: JobPath,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of every file that are measured and decoded.")] = 200,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Look into every file of every source and say what is wrong; exit code 1 if there are errors."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen)
    from overlord.cli.lint import count_errors, lint_job

    with screen.progress() as tell, screen.user_code():
        result = lint_job(loaded.job, Path(folder_of(cache)), rows, tell)
    findings = result.findings
    errors = count_errors(findings)
    for finding in findings:
        colour = "bold red" if finding.severity == "error" else "yellow"
        line = Text.assemble((finding.severity, colour), f" {finding.source}: {finding.message}")
        if not as_json:
            screen.out.print(line, soft_wrap=True)
    for words in result.media_tokens:
        if not as_json:
            screen.out.print(Text.assemble(("note", "dim"), f" {words}"), soft_wrap=True)
    total = f"{number(len(loaded.job.sources), 'source')}: {number(errors, 'error')}, "
    looked = f"{number(len(findings) - errors, 'warning')}; {result.looked_at:,} of {number(result.rows, 'row')} "
    screen.show(Text(f"{total}{looked}looked at (--rows {rows} of every file)", style="bold"))
    screen.give(
        {
            "job": str(job),
            "errors": errors,
            "warnings": len(findings) - errors,
            "looked_at": result.looked_at,
            "rows": result.rows,
            "media_tokens": result.media_tokens,
            "findings": [finding.to_json() for finding in findings],
        }
    )
    if errors:
        raise typer.Exit(1)


@sources_app.command()
def measure(
    job: JobPath,
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="SOURCE", help="Only these sources.", show_default=False)
    ] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Count the tokens of every row once and keep them, for sources with lengths: sidecar or the named ones."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen)
    from overlord.cli.sources import measure_sources, sources_to_measure

    chosen = sources_to_measure(loaded.job, sources or [])
    folder = Path(folder_of(cache))
    with screen.progress() as tell, screen.user_code():
        totals = measure_sources(loaded.job, chosen, folder, tell)
    table = Table("source", title="measured", title_justify="left")
    for name in ("files", "rows", "text tokens", "bad rows"):
        table.add_column(name, justify="right")
    for name, one in totals.items():
        table.add_row(Text(name), f"{one['files']:,}", f"{one['rows']:,}", count(one["tokens"]), f"{one['bad']:,}")
    screen.show(table)
    unused = [source.name for source in chosen if source.lengths != "sidecar"]
    if unused:
        screen.note(f"to use them, write lengths: sidecar beside {', '.join(unused)} in {job}")
    screen.give({"job": str(job), "folder": str(folder / "lengths"), "sources": totals})


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option("--out", help="Write it to this file.")] = None, as_json: AsJson = False
) -> None:
    """Print the JSON Schema of job files, for editors."""
    from overlord.cli.demo import write_text

    text = json.dumps(job_file_schema(), indent=2)
    if out is None:
        print(text)
        return
    write_text(out, text + "\n")
    screen = Screen(as_json=as_json)
    screen.show(Text.assemble(("schema  ", "dim"), str(out)))
    screen.give({"schema": str(out)})


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    screen = Screen(as_json=as_json)
    screen.show(f"overlord {__version__}")
    screen.give({"version": __version__})


def main() -> None:
    """Run the command line."""
    app()


def _command_name() -> str:
    """Return what the user has to type for this command: a name, or its path where it is not on the PATH."""
    return "overlord" if shutil.which("overlord") or Path(sys.argv[0]).name != "overlord" else sys.argv[0]


def _show_run(screen: Screen, summary: RunSummary) -> None:
    from overlord.reports.run_report import media_tables, source_table, summary_table

    screen.show(source_table(summary), *media_tables(summary.media), summary_table(summary))
    for note in summary.notes:
        screen.note(note)


def _end_run(summary: RunSummary) -> None:
    """Choose the exit code of a run whose figures have been shown."""
    for words in summary.over_tolerance:
        show_error(ToleranceError(words), as_json=False)
    if summary.interrupted:
        raise typer.Exit(130)
    if summary.over_tolerance:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
