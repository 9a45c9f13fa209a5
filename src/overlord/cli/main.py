"""The commands: `demo`, `explain`, `profile`, `simulate`, `run`, `serve`, `status`, `top`, `dashboard`, `trace`,
`sources`, `steps`, `import`, `schema`, `version`.

Exit codes: 0 done; 1 the run failed, had more bad samples than a tolerance allows, or lint found errors; 2 what was
asked for cannot be done; 130 Ctrl-C.

What runs a job is imported when it is needed: a mistake in the job file is told before that.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import secrets
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.text import Text
from typer.core import TyperGroup

from overlord import __version__
from overlord.cli import GROUPS, make_app
from overlord.cli.options import (
    AS_JSON,
    CACHE,
    DEFAULT_STEPS,
    LAUNCH_FLAGS,
    AsJson,
    Cache,
    Cpus,
    Flags,
    JobPath,
    Resume,
    SimulateOptions,
    State,
    choose,
    folder_of,
    launch_flags,
    load,
    simulate_options,
    store_path,
    within,
)
from overlord.cli.output import Screen, check_writable, command, default_report, labelled, show_error, write_text
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import in_yaml
from overlord.errors import OverlordError, SourceError, SpecError, ToleranceError
from overlord.job_files import job_file_schema
from overlord.launch_spec import profile_path
from overlord.reports.summary import RunSummary, count, number, waited_for

EXPLAIN_STEPS = 20
PROFILED_SAMPLES = 200
PROFILED_SECONDS = 2.0


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


def _group(name: str) -> typer.Typer:
    return typer.Typer(help=GROUPS[name], short_help=GROUPS[name], no_args_is_help=True, rich_markup_mode=None)


app = make_app(cls=_Commands)
sources_app = typer.Typer(
    help=GROUPS["sources"], short_help=GROUPS["sources"], no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(sources_app, name="sources")
import_app = typer.Typer(
    help=GROUPS["import"], short_help=GROUPS["import"], no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(import_app, name="import")
steps_app = _group("steps")
app.add_typer(steps_app, name="steps")


@app.command()
@launch_flags("runtime")
def demo(
    flags: Flags,
    folder: Annotated[Path, typer.Option(help="Where the data, the job file and the report go.")] = Path(
        "overlord-demo"
    ),
    steps: Annotated[int, typer.Option(callback=within(1), help="Steps to run.")] = 30,
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
    result = run_demo(folder, tree, flags["runtime"] or "local", steps, folder_of(cache), screen, scale, media=media)
    paths = {"job": str(result.job), "report": str(result.report), "summary_file": str(result.summary_file)}
    _show_run(screen, result.summary)
    screen.show(
        labelled("report   ", result.report),
        labelled("numbers  ", result.summary_file),
        labelled("job      ", result.job),
        f"\nNext: open {result.report} in a browser; edit {result.job} and run it with\n\n"
        f"    {_command_name()} run {result.job}\n",
    )
    screen.give(dataclasses.asdict(result.summary) | paths)
    _end_run(result.summary)


@app.command()
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
    if steps < 1:
        raise SpecError(f"--steps is {steps}; there would be nothing to explain. Give 1 or more.")
    if not step_time > 0:
        raise SpecError(f"--step-time is {step_time:g}; no number of cores is fast enough. Give seconds above 0.")
    check_writable("--html", html)
    loaded = load(job, screen)
    launch = choose(loaded, flags, cache)
    from overlord.cli.explain import cost_models, explain_job
    from overlord.cli.running import check_job
    from overlord.reports.explanation import explain_tables, headlines, render_explanation

    costs = cost_models(launch.strategy, cost)
    with screen.progress() as tell, screen.user_code():
        check_job(loaded.job, launch.mesh, launch.layout, launch.cache, here=False)
        facts, graph_page = explain_job(
            loaded.job, str(job), launch, costs, steps=steps, step_time_s=step_time, measure=measure, tell=tell
        )
    screen.show(*explain_tables(facts))
    page = screen.write_page("page  ", html, lambda: render_explanation(facts, graph_page))
    screen.give(dataclasses.asdict(facts) | {"headlines": headlines(facts), "html": page})


@app.command()
@launch_flags("placement")
def profile(
    job: JobPath,
    flags: Flags,
    samples: Annotated[
        int, typer.Option("--samples", callback=within(1), help="Samples of each source, at most about.")
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
    cpus: Annotated[int | None, typer.Option("--cpus", help="With --plan: workers of all sources together.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="With --plan: memory of the loaders, as 64GiB.")
    ] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Measure what each source costs on real samples: latency, hand-over, memory, bytes; and keep it beside the job."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen)
    placement = choose(loaded, flags, cache).placement
    loaded = dataclasses.replace(loaded, launch=loaded.launch.model_copy(update={"placement": placement}))
    if not seconds > 0:
        raise SpecError(f"--seconds is {seconds:g}; nothing could be measured. Give seconds above 0.")
    from overlord.cli.profile import budget_of, find_profile, show_plan
    from overlord.cli.sources import choose_sources
    from overlord.reports.profile_page import headlines, profile_tables, ranked, render_profile

    launch = budget_of(plan, loaded.launch, cpus, memory)
    path = profile_path(job) if output is None else output
    check_writable("--output", path)
    check_writable("--html", html)
    named = None if source is None else [one.name for one in choose_sources(loaded.job, source)]
    found, failed = find_profile(
        screen, loaded, path, folder_of(cache), named=named, samples=samples, seconds=seconds, as_it_is=plan
    )
    screen.show(*profile_tables(str(job), found), labelled("profile  ", path))
    told: dict[str, Any] = {
        "job": str(job),
        "profile": str(path),
        "html": screen.write_page("page     ", html, lambda: render_profile(str(job), found, failed)),
        "headlines": headlines(found),
        "sources": [dataclasses.asdict(one) for one in ranked(found)],
        "failed": dict(failed),
    }
    if plan:
        shown = show_plan(found, loaded.job, launch, as_json)
        if isinstance(shown, dict):
            told["plan"] = shown
        else:
            screen.show(shown)
    screen.give(told)
    for words in failed.values():
        show_error(SourceError(loaded.locate(words)), as_json=False)
    if failed:
        raise typer.Exit(2)


@app.command()
@launch_flags("mesh", "layout", "placement", "prefetch", "profile", also=SimulateOptions)
def simulate(
    job: JobPath,
    flags: Flags,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            help="A strategy to compare with dealing round-robin; may be repeated. Else the common ones and the job's.",
            show_default=False,
        ),
    ] = None,
    cpus: Cpus = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Simulate a job on any number of GPUs: step time by strategy, waits, workers, memory, plan latency, traffic."""
    screen = Screen(as_json=as_json)
    asked = simulate_options(flags)
    loaded = load(job, screen)
    launch = choose(loaded, flags, cache, cpus)
    compared = [choose(loaded, {"strategy": one}, cache) for one in strategy or []]
    from overlord.cli.running import check_job
    from overlord.cli.simulate import simulate_job, simulated_tables

    with screen.progress() as tell, screen.user_code():
        check_job(loaded.job, launch.mesh, launch.layout, launch.cache, here=False)
        found, assumed = simulate_job(loaded, job, launch, [one.strategy for one in compared], asked, tell)
    screen.show(*simulated_tables(str(job), found, assumed))
    screen.give({"job": str(job), "meshes": [dataclasses.asdict(one) for one in found], "assumed": assumed})


@app.command()
@launch_flags(*LAUNCH_FLAGS)
def run(
    job: JobPath,
    flags: Flags,
    steps: Annotated[
        int | None,
        typer.Option(
            callback=within(1), help=f"Steps to run; else launch.steps of the job file, else {DEFAULT_STEPS}."
        ),
    ] = None,
    cpus: Cpus = None,
    resume: Resume = False,
    state: State = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", help="Where the report goes, an HTML page; else beside the job file, as its name.report.html."
        ),
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.")] = False,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Run a job with every rank of its mesh in this process, and show what came out."""
    screen = Screen(as_json=as_json)
    if report is not None and no_report:
        raise SpecError("--report and --no-report were both given. Leave one of them out.")
    check_writable("--report", report)
    loaded = load(job, screen)
    report = None if no_report else report or default_report(job, screen)
    # What the file says of trainer hosts is for trainers; here all ranks are in one process.
    loaded = dataclasses.replace(loaded, launch=loaded.launch.model_copy(update={"ranks_per_host": None}))
    options = choose(loaded, flags, cache, cpus)
    # First of all, since the imports and the start of the service take seconds: a log must not be silent meanwhile.
    of = f"{number(len(loaded.job.sources), 'source')}, mesh {options.mesh}, runtime {options.runtime}"
    screen.note(f"starting {job}: {of}")
    from overlord.cli.running import check_job, run_job, with_state
    from overlord.reports.run_report import render_report

    chosen = steps or loaded.launch.steps
    if chosen is None:
        screen.note(f"neither --steps nor launch.steps is given; running {DEFAULT_STEPS} steps")
    options = with_state(options, resume, state)
    with screen.progress() as tell, screen.user_code():
        check_job(loaded.job, options.mesh, options.layout, options.cache, look=options.address is None)
        summary = run_job(loaded.job, str(job), options, chosen or DEFAULT_STEPS, tell, screen.note)
    _show_run(screen, summary)
    page = screen.write_page("report  ", report, lambda: render_report(summary))
    screen.give(dataclasses.asdict(summary) | {"report": page})
    _end_run(summary)


@app.command()
@launch_flags(*LAUNCH_FLAGS, runtimes=Literal["local", "ray"])
def serve(
    ctx: typer.Context,
    job: JobPath,
    flags: Flags,
    cpus: Cpus = None,
    resume: Resume = False,
    state: State = None,
    address_file: Annotated[
        Path | None, typer.Option("--address-file", help="Write the address to this file while the service is up.")
    ] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Serve a job to trainers in other processes, of this host or of a cluster's, until Ctrl-C or SIGTERM."""
    screen = Screen(as_json=as_json)
    check_writable("--address-file", address_file)
    loaded = load(job, screen)
    options = choose(loaded, flags, cache, cpus)
    from overlord.cli.running import aside_notes, check_job, launch_for, with_state
    from overlord.cli.serving import announcement, serve_until_stopped, trainer_hosts

    if options.runtime == "inline":
        raise SpecError(
            f"{job}: launch.runtime is 'inline', and no other process can attach to that; trainers would have no data. "
            "Add --runtime local or --runtime ray."
        )
    options = with_state(options, resume, state)
    for note in aside_notes(options):
        screen.note(note)
    with screen.progress() as tell:
        check_job(loaded.job, options.mesh, options.layout, options.cache, here=False, look=options.address is None)
        service = launch_for(loaded.job, options, tell, any_mesh=True)

    def announce() -> None:
        told = service.status()
        screen.show(*announcement(str(job), options, service.address or "", told, service.metrics, service.dashboard))
        more: dict[str, Any] = {"hosts": trainer_hosts(told)} if "ray" in told else {}
        more |= {} if service.metrics is None else {"metrics": service.metrics}
        more |= {} if service.dashboard is None else {"dashboard": service.dashboard}
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
    with screen.progress():
        found = find_status(address)
    screen.show(*status_tables(found))
    screen.give(found)


@app.command()
def dashboard(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="What `overlord serve` shows, or its address file.")
    ],
    port: Annotated[
        int, typer.Option(callback=within(0, 65535), help="Where the page is served; 0 takes any that is free.")
    ] = 9500,
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than this host can then read it.")
    ] = "127.0.0.1",
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes", help="Let the page change mixture, sources and mesh, with a token that is shown once."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a live page of a running service: waits, sources, balance, hosts, samples."""
    from overlord.cli.serving import find_status
    from overlord.runtimes.supervision.page_process import LOOPBACKS, listening_socket, needs_library
    from overlord.runtimes.transport.listener import read_address

    screen = Screen(as_json=as_json)
    with screen.progress():
        find_status(address)
    try:
        from overlord.dashboard.serving_page import PageServer
    except ModuleNotFoundError as error:
        raise needs_library(error.name) from error
    token = secrets.token_urlsafe(24) if allow_changes else None
    listening = listening_socket(host, port)
    if allow_changes and listening.getsockname()[0] not in LOOPBACKS:
        raise SpecError(
            f"--allow-changes is given and --host is {host!r}: whatever reads the network on the way would have the "
            "token, and could change the run. Leave --host out, and use a tunnel: ssh -L 9500:127.0.0.1:9500 HOST."
        )
    page = PageServer(read_address(address), listening, token, host=host)
    screen.show(labelled("page     ", page.url))
    if token is not None:
        screen.show(labelled("changes  ", f"{page.url}#token={token}"))
    screen.show("Ctrl-C ends the page; the service goes on.")
    screen.give({"url": page.url} | ({} if token is None else {"token": token}))
    page.run()


@app.command()
def top(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="What `overlord serve` shows, or its address file.")
    ],
    interval: Annotated[
        float, typer.Option("--interval", callback=within(0.2), help="Seconds between two looks.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once and end; so it is where output is no terminal.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a running service: what it waits for, steps/s, sources, hosts, reports and faults, until Ctrl-C."""
    from overlord.cli.top import watch

    watch(address, Screen(as_json=as_json), interval_s=interval, once=once or as_json)


@app.command()
def trace(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="What `overlord serve` shows, or its address file.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The trace; open it at ui.perfetto.dev.")] = Path(
        "overlord-trace.json"
    ),
    seconds: Annotated[float, typer.Option("--seconds", callback=within(0.1), help="How long to record.")] = 10.0,
    interval: Annotated[
        float, typer.Option("--interval", callback=within(0.01), help="Seconds between two looks.")
    ] = 0.1,
    as_json: AsJson = False,
) -> None:
    """Record which roles of a running service waited for which, by step, as a trace for Perfetto."""
    from overlord.cli.top import record
    from overlord.reports.chrome_trace import trace_of

    screen = Screen(as_json=as_json)
    check_writable("--out", out)
    with screen.progress() as tell:
        found, told = trace_of(record(address, seconds, interval, tell))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(found.to_json())
    waits = sorted(told["waited_s"].items(), key=lambda pair: -pair[1])
    listed = ", ".join(f"{name} {waited:.2f} s" for name, waited in waits[:4])
    screen.show(
        f"{number(told['steps'], 'step')} in {told['seconds']:.1f} s; waited for: {listed}", labelled("trace  ", out)
    )
    screen.give(told | {"trace": str(out)})


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
        error.args = (loaded.locate(str(error)),)
        show_error(error, as_json=False)
    if errors:
        raise typer.Exit(2)


@sources_app.command()
def preview(
    job: JobPath,
    source: Annotated[str | None, typer.Argument(metavar="SOURCE", help="Only this one.", show_default=False)] = None,
    rows: Annotated[int, typer.Option("--rows", callback=within(1, 1000), help="Samples of each source.")] = 3,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with pictures.")] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Show the first samples of each source: text, token counts and thumbnails."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen)
    from overlord.cli.preview import preview_page, preview_source, show_previews
    from overlord.cli.sources import choose_sources, open_each

    chosen = choose_sources(loaded.job, [] if source is None else [source])
    check_writable("--html", html)
    with screen.progress() as tell, screen.user_code():
        opened = open_each(loaded.job, chosen, Path(folder_of(cache)), tell)
        found = [(one, preview_source(one, rows)) for one in opened]
    for one, previews in found:
        screen.show(show_previews(one, previews, pictures=screen.out.color_system is not None))
    screen.write_page("page  ", html, lambda: preview_page(str(job), found))
    screen.give({"job": str(job), "sources": {one.source.name: [p.to_json() for p in ps] for one, ps in found}})


@sources_app.command()
def lint(
    job: JobPath,
    rows: Annotated[
        int, typer.Option("--rows", callback=within(1), help="Rows of every file that are measured and decoded.")
    ] = 200,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Look into every file of every source and say what is wrong; exit code 1 if there are errors."""
    screen = Screen(as_json=as_json)
    loaded = load(job, screen)
    from overlord.cli.lint import lint_job

    with screen.progress() as tell, screen.user_code():
        result = lint_job(loaded.job, Path(folder_of(cache)), rows, tell)
    at = {name: loaded.places.get(f"source {name!r}") for name in loaded.job.names}
    findings = [dataclasses.replace(f, message=in_yaml(f.message)) if at.get(f.source) else f for f in result.findings]
    errors = sum(finding.severity == "error" for finding in findings)
    colours = {"error": "bold red", "warning": "yellow"}
    places = {f: at.get(f.source) for f in findings if f.severity == "error"}
    lines: list[tuple[tuple[str, str], str]] = [
        (
            (f.severity, colours[f.severity]),
            f" {f.source}{f' ({place})' if (place := places.get(f)) else ''}: {f.message}",
        )
        for f in findings
    ]
    lines += [(("note", "dim"), f" {words}") for words in result.media_tokens]
    for line in lines if not as_json else ():
        screen.out.print(Text.assemble(*line), soft_wrap=True)
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
            "findings": [dataclasses.asdict(finding) for finding in findings],
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
    from overlord.reports.pages import Row, terminal_table

    chosen = sources_to_measure(loaded.job, sources or [])
    folder = Path(folder_of(cache))
    with screen.progress() as tell, screen.user_code():
        totals = measure_sources(loaded.job, chosen, folder, tell)
    rows = [
        Row(name, (f"{one['files']:,}", f"{one['rows']:,}", count(one["tokens"]), f"{one['bad']:,}"))
        for name, one in totals.items()
    ]
    screen.show(terminal_table("measured", ("source", "files", "rows", "text tokens", "bad rows"), rows))
    unused = [source.name for source in chosen if source.lengths != "sidecar"]
    if unused:
        screen.note(f"to use them, write lengths: sidecar beside {', '.join(unused)} in {job}")
    screen.give({"job": str(job), "folder": str(folder / "lengths"), "sources": totals})


@sources_app.command("cache")
def show_cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it that no process is reading.")] = False,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Show what is kept of remote files on this host, or remove it."""
    screen = Screen(as_json=as_json)
    from overlord.readers.remote.range_cache import range_cache
    from overlord.reports.pages import Row, terminal_table
    from overlord.reports.summary import size

    ranges = range_cache(Path(folder_of(cache)))
    freed = ranges.clear() if clear else None
    if freed is not None:
        screen.show(f"{size(freed)} removed")
    objects = sorted(ranges.names().items(), key=lambda pair: -pair[1][1])
    total = sum(nbytes for _, (_, nbytes) in objects)
    rows = [Row(url, (f"{entries:,}", size(nbytes))) for url, (entries, nbytes) in objects[:20]]
    if rows:
        screen.show(terminal_table("largest remote files kept", ("file", "ranges", "bytes"), rows))
    screen.show(f"{number(len(objects), 'remote file')}, {size(total)} in {ranges.folder}")
    listed = [{"url": url, "ranges": entries, "bytes": nbytes} for url, (entries, nbytes) in objects]
    screen.give({"folder": str(ranges.folder), "bytes": total, "freed": freed, "files": listed})


@import_app.callback()
def _import() -> None:
    """Write the sources of a job from what another loader reads."""


@import_app.command()
def energon(
    metadataset: Annotated[Path, typer.Argument(metavar="METADATASET", help="Its YAML file.")],
    split: Annotated[str, typer.Option("--split", help="Which of its splits.")] = "train",
    sample: Annotated[
        str | None, typer.Option("--sample", help="What a row is, where its dataset.yaml does not tell it.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The manifest to write.")] = Path("sources.jsonl"),
    as_json: AsJson = False,
) -> None:
    """Write the blend of a Megatron-Energon metadataset as a manifest: a source for each dataset, with its weight."""
    from overlord.cli.importing import as_manifest, import_energon
    from overlord.job.plain_yaml import load_yaml

    screen = Screen(as_json=as_json)
    if out.suffix not in (".jsonl", ".ndjson"):
        raise SpecError(f"--out {out}: a manifest of JSON lines is written, and its name ends in .jsonl. Rename it.")
    check_writable("--out", out)
    try:
        kind = load_yaml(sample) if sample is not None else None
    except yaml.YAMLError:
        kind = None
    if sample is not None and not isinstance(kind, dict):
        raise SpecError(f"--sample {sample}: it is no mapping; samples could not be made. Write '{{kind: text, ..}}'.")
    with screen.progress():
        sources = import_energon(metadataset, split, kind)
    write_text(out, as_manifest(sources))
    screen.show(labelled("manifest", out))
    screen.show(f"{number(len(sources), 'source')}; in the job file, write\n")
    screen.show(f"    sources: {{manifest: {out}}}\n    mixture: {{level: sample}}\n")
    screen.give({"manifest": str(out), "sources": {source.name: source.weight for source in sources}})


@steps_app.command("show")
@launch_flags("mesh", "strategy", "layout", "store")
def show_steps(
    flags: Flags,
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB", help="The job file; a store has its own copy.", show_default=False),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", callback=within(0), help="The step; else the newest of the store.", show_default=False),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", callback=within(0), help="Only what this rank got.", show_default=False)
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample", metavar="ID", help="Only this sample, as web:0:17@0; without --step its step is looked for."
        ),
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", help="A state file instead of a store; needs JOB.", show_default=False)
    ] = None,
    texts: Annotated[
        int, typer.Option("--texts", callback=within(0), help="Samples whose text and pictures are shown.")
    ] = 4,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with texts and pictures.")] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Show what was in a step of a run: rows, ranks, costs, and the text as the model saw it (green: in the loss).

    Without a running service: the stream is computed again from the store, which is only read.
    """
    screen = Screen(as_json=as_json)
    check_writable("--html", html)
    loaded = None if job is None else load(job, screen)
    store = flags.pop("store") or (None if state is not None or loaded is None else loaded.launch.store)
    if (store is None) == (state is None) or (state is not None and loaded is None):
        raise SpecError(
            "steps show needs what a step is computed from: --store DIR (the store of a run), or JOB with --state FILE "
            "(what state_dict() returned). Give one of them."
        )
    from overlord.cli.steps import find_sample, open_step, show_step, step_page, step_tables

    found = None
    if state is not None:
        from overlord.cli.running import read_state

        found = read_state(state)
        if found is None:
            raise SpecError(
                f"--state {state} is of a stream that has not begun; it holds no step. Use overlord sources preview."
            )
    with screen.progress() as tell, screen.user_code():
        if sample is not None and step is None and store is not None:
            step = find_sample(store, sample, loaded, folder_of(cache))
        with open_step(loaded, store, found, step, flags, folder_of(cache), tell) as (service, at):
            shown = show_step(service, at, rank=rank, sample=sample, texts=texts, store=store)
    screen.show(*step_tables(shown, pictures=screen.out.color_system is not None))
    page = screen.write_page("page  ", html, lambda: step_page(str(job or store), shown))
    screen.give(shown.to_json() | {"html": page})


@steps_app.command("diff")
def diff_steps(
    first: Annotated[str, typer.Argument(metavar="STORE", help="The store of a run.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="STORE", help="The store of another.", show_default=False)],
    from_step: Annotated[
        int | None, typer.Option("--from", callback=within(0), help="Compare from this step on.", show_default=False)
    ] = None,
    cache: Cache = CACHE,
    as_json: AsJson = False,
) -> None:
    """Find the first step, rank and sample at which two runs differ, and what differs; exit code 1 where they do."""
    screen = Screen(as_json=as_json)
    from overlord.cli.steps import diff_lines, diff_runs

    with screen.progress() as tell, screen.user_code():
        told = diff_runs((store_path(first), store_path(second)), folder_of(cache), tell, from_step)
    screen.show(*diff_lines(told))
    screen.give(told)
    if not told["same"]:
        raise typer.Exit(1)


@app.command()
def schema(
    out: Annotated[Path | None, typer.Option("--out", help="Write it to this file.")] = None, as_json: AsJson = False
) -> None:
    """Print the JSON Schema of job files, for editors."""
    text = json.dumps(job_file_schema(), indent=2)
    if out is None:
        print(text)
        return
    write_text(out, text + "\n")
    screen = Screen(as_json=as_json)
    screen.show(labelled("schema  ", out))
    screen.give({"schema": str(out)})


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    screen = Screen(as_json=as_json)
    screen.show(f"overlord {__version__}")
    screen.give({"version": __version__})


EXAMPLES = {
    "demo": "--folder demo --steps 10",
    "explain": "job.yaml --mesh dp=8,cp=2 --strategy hdp --html plan.html",
    "profile": "job.yaml --seconds 5 --html profile.html",
    "simulate": "job.yaml --mesh tp=4,pp=4 --gpus 288,576",
    "run": "job.yaml --mesh dp=8 --steps 100 --store run1",
    "serve": "job.yaml --mesh dp=8 --store run1 --address-file address",
    "status": "address",
    "dashboard": "address --port 9500",
    "top": "address --interval 1",
    "trace": "address --seconds 30 --out trace.json",
    "sources list": "job.yaml --rows",
    "sources preview": "job.yaml web --rows 5 --html samples.html",
    "sources lint": "job.yaml --rows 1000",
    "sources measure": "job.yaml web",
    "sources cache": "--clear",
    "import energon": "metadataset.yaml --split train --out sources.jsonl",
    "steps show": "--store run1 --step 340 --rank 3",
    "steps diff": "run1 run2 --from 100",
    "schema": "--out job.schema.json",
    "version": "--json",
}
"""The last line of the help of every command."""
for _group, _prefix in ((app, ""), (sources_app, "sources "), (import_app, "import "), (steps_app, "steps ")):
    for _command in _group.registered_commands:
        _name = f"{_prefix}{_command.name or getattr(_command.callback, '__name__', '')}"
        _command.epilog = f"Example: overlord {_name} {EXAMPLES[_name]}" if _name in EXAMPLES else None
        # Where it is not given, the list of commands has the first words of the help, and dots.
        _command.short_help = " ".join((inspect.getdoc(_command.callback) or "").partition("\n\n")[0].split())


def main() -> None:
    """Run the command line."""
    app()


def _command_name() -> str:
    """Return what the user has to type for this command: a name, or its path where it is not on the PATH."""
    return "overlord" if shutil.which("overlord") or Path(sys.argv[0]).name != "overlord" else sys.argv[0]


def _show_run(screen: Screen, summary: RunSummary) -> None:
    from overlord.reports.run_report import media_tables, source_table, summary_table

    screen.show(source_table(summary), *media_tables(summary.media), summary_table(summary))
    for note in (waited_for(summary), *summary.notes):
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
