"""What several commands take and do alike: options, reading the job file, the JSON switch.

What runs a job is imported when it is needed: a mistake in the job file is told before that.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from overlord.cli.layout_options import read_layout
from overlord.cli.output import Screen
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import Fault
from overlord.errors import SpecError
from overlord.job.launch_words import DEFAULT_CACHE
from overlord.job.launch_words import Runtime as RuntimeWord
from overlord.job.spec_model import as_number
from overlord.job.specs import Job
from overlord.job_files import JobFile, load_job_file
from overlord.launch_section import CLUSTER_KEYS, BudgetOptions, LoaderHosts, as_loader_hosts
from overlord.planning.strategy_specs import StrategyChoice

if TYPE_CHECKING:
    from overlord.cli.running import RunOptions

DEFAULT_STEPS = 100
AS_JSON = "overlord.as_json"
"""Where a command's context remembers that JSON was asked for."""


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[AS_JSON] = value
    return value


class RuntimeName(StrEnum):
    """Where the roles run."""

    local = "local"
    ray = "ray"
    inline = "inline"


class ServedRuntime(StrEnum):
    """Where the roles run when trainers are other processes."""

    local = "local"
    ray = "ray"


AsJson = Annotated[
    bool,
    typer.Option("--json", callback=_remember_json, is_eager=True, help="One JSON object on standard output."),
]
JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="A job file: YAML, JSON or Python.", show_default=False)]
Mesh = Annotated[str | None, typer.Option("--mesh", help="Sizes of the axes, such as dp=2,cp=2,tp=2.")]
StrategyName = Annotated[
    str | None,
    typer.Option("--strategy", help="Where samples go: a name such as hdp, or '{hdp: {equal_counts: true}}'."),
]
LayoutName = Annotated[
    str | None,
    typer.Option(
        "--layout",
        help="Keys of a batch: hf, megatron or torchtitan, or '{keys: hf, rows: padded}'.",
        show_default=False,
    ),
]


class PlacementName(StrEnum):
    """Where media are decoded."""

    auto = "auto"
    loader = "loader"
    constructor = "constructor"


class ReconcileName(StrEnum):
    """Which sources of a job may differ from its state's."""

    strict = "strict"
    allow_add = "allow_add"
    allow_add_remove = "allow_add_remove"


class FailureName(StrEnum):
    """What becomes of a source that cannot be read any more."""

    stop = "stop"
    park = "park"
    reweight = "reweight"


ReconcileOption = Annotated[
    ReconcileName, typer.Option("--reconcile", help="Which sources of the job may differ from the state's.")
]
OnSourceFailureOption = Annotated[
    FailureName | None,
    typer.Option(
        "--on-source-failure", help="What becomes of a source that cannot be read any more.", show_default=False
    ),
]
PlacementOption = Annotated[
    PlacementName | None,
    typer.Option("--placement", help="Where images, clips and sounds are decoded.", show_default=False),
]
Shadows = Annotated[
    str | None,
    typer.Option("--shadows", help="Sources with a shadow loader: all, none, auto, or names with commas between."),
]
Store = Annotated[str | None, typer.Option("--store", help="Folder or URL for the journal and snapshots.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest snapshot in the store.")]
Cache = Annotated[Path, typer.Option("--cache", envvar="OVERLORD_CACHE", help="Folder of indices and length sidecars.")]
Prefetch = Annotated[int | None, typer.Option("--prefetch", help="Steps built ahead.", show_default=False)]
Loaders = Annotated[
    str | None,
    typer.Option("--loaders", metavar="N|auto", help="Workers of each source, or auto.", show_default=False),
]
ScalingOption = Annotated[
    bool | None,
    typer.Option("--scaling/--no-scaling", help="Whether workers come and go with the mixture.", show_default=False),
]
Cpus = Annotated[
    int | None, typer.Option("--cpus", help="Workers that all sources may have together.", show_default=False)
]
Metrics = Annotated[
    str | None,
    typer.Option("--metrics", metavar="[HOST:]PORT", help="Where Prometheus may ask.", show_default=False),
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="Go on from this state: a JSON file with what state_dict() returned, or a step that the store keeps.",
        show_default=False,
    ),
]
Runtime = Annotated[
    RuntimeName | None,
    typer.Option(
        "--runtime", help="A service process, a Ray cluster, or everything in this process.", show_default=False
    ),
]
ServeRuntime = Annotated[
    ServedRuntime | None,
    typer.Option("--runtime", help="A service process, or a Ray cluster.", show_default=False),
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="The Ray cluster: auto or host:port; else one is started here.", show_default=False),
]
RanksPerHost = Annotated[
    int | None,
    typer.Option("--ranks-per-host", help="Trainer processes of one host of the cluster.", show_default=False),
]
LoaderHostsOption = Annotated[
    str | None,
    typer.Option(
        "--loader-hosts", metavar="N|per_source", help="Processes the sources are dealt to.", show_default=False
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Threads for decoding; of each loader host of a Ray cluster.", show_default=False),
]
CACHE = Path(DEFAULT_CACHE)


def load(
    path: Path,
    screen: Screen,
    strategy: str | None = None,
    layout: str | None = None,
    placement: PlacementName | None = None,
) -> JobFile:
    """Read a job file; what the command line says wins over the file.

    Raises:
        SpecError: The file, the strategy or the layout is wrong; the message says where.
    """
    changes: dict[str, Any] = {}
    if strategy is not None:
        changes["strategy"] = StrategyChoice.read(strategy)
    if layout is not None:
        changes["layout"] = read_layout(layout)
    if placement is not None:
        changes["placement"] = placement.value
    with screen.user_code():
        loaded = load_job_file(path)
    function = loaded.function if strategy is None else None
    launch = loaded.launch.model_copy(update=changes)
    return dataclasses.replace(loaded, job=completed(loaded.job), launch=launch, function=function)


def completed(job: Job) -> Job:
    """Return the job with what its processor folder says, as a launch completes it; the sources stay in their order."""
    from overlord.runtimes.launching.resume import canonical

    by_name = {source.name: source for source in canonical(job).sources}
    return job.model_copy(update={"sources": tuple(by_name[name] for name in job.names)})


def folder_of(cache: Path) -> str:
    """Return the cache folder as a whole path."""
    return str(cache.expanduser().absolute())


def runtime_of(name: RuntimeName | ServedRuntime | None) -> RuntimeWord:
    """Return the runtime as `launch` takes it."""
    return "local" if name is None else cast("RuntimeWord", name.value)


def _loader_hosts(text: str) -> LoaderHosts:
    try:
        return as_loader_hosts(text)
    except Fault as fault:
        raise SpecError(f"--loader-hosts is {text!r:.80}: {fault}. Give one of these, or leave it out.") from None


def shadows_of(text: str) -> bool | Literal["auto"] | list[str]:
    """Return which sources have a shadow, as a command line writes it.

    Example:
        >>> shadows_of("all"), shadows_of("web, coyo")
        (True, ['web', 'coyo'])
    """
    if text in ("all", "none"):
        return text == "all"
    return "auto" if text == "auto" else [name.strip() for name in text.split(",") if name.strip()]


def mesh_of(loaded: JobFile, mesh: str | None) -> ClientPlaceTree:
    """Return the mesh: what stands in the job file, unless the command line says otherwise."""
    return loaded.launch.mesh if mesh is None else ClientPlaceTree.parse(mesh)


def loaders_of(text: str) -> int | Literal["auto"]:
    """Read --loaders.

    Raises:
        SpecError: It is no number and not auto.

    Example:
        >>> loaders_of("4"), loaders_of("auto")
        (4, 'auto')
    """
    if text == "auto":
        return "auto"
    number = as_number(text)
    if not isinstance(number, int) or number < 1:
        raise SpecError(
            f"--loaders: loaders_per_source is {text!s:.80}; nothing could run with it. Give a whole number of at "
            "least 1, or auto for what the profile asks for."
        )
    return number


def options_of(  # noqa: PLR0913 - one for each option of two commands
    loaded: JobFile,
    *,
    mesh: str | None,
    runtime: RuntimeName | ServedRuntime | None,
    address: str | None,
    ranks_per_host: int | None,
    loader_hosts: str | None,
    prefetch: int | None,
    loaders: str | None,
    scaling: bool | None,
    cpus: int | None,
    threads: int | None,
    store: str | None,
    on_source_failure: FailureName | None,
    shadows: str | None,
    metrics: str | None,
    cache: Path,
    resume: bool,
    state: Path | None,
    reconcile: ReconcileName,
) -> RunOptions:
    """Return how to run: what stands in the job file, unless the command line says otherwise.

    Raises:
        SpecError: An option is wrong, or was given for a runtime that does not have it.
    """
    from overlord.cli.running import DEFAULT_STRATEGY, RunOptions, Where, read_state

    launch = loaded.launch
    budget = (launch.budget or BudgetOptions()).budget()
    said = loaded.arguments(
        {
            "mesh": None if mesh is None else ClientPlaceTree.parse(mesh),
            "runtime": None if runtime is None else runtime.value,
            "address": address,
            "ranks_per_host": ranks_per_host,
            "loader_hosts": None if loader_hosts is None else _loader_hosts(loader_hosts),
            "prefetch": prefetch,
            "loaders_per_source": None if loaders is None else loaders_of(loaders),
            "scaling": scaling,
            "budget": None if cpus is None else dataclasses.replace(budget, cpus=cpus),
            "threads": threads,
            "store": store,
            "on_source_failure": None if on_source_failure is None else on_source_failure.value,
            "shadows": None if shadows is None else shadows_of(shadows),
            "metrics": metrics,
        }
    )
    _check_cluster(said["runtime"], address, ranks_per_host, loader_hosts)
    return RunOptions(
        where=Where(**{name: said.pop(name) for name in ("runtime", *CLUSTER_KEYS)}),
        steps=launch.steps or DEFAULT_STEPS,
        cache=folder_of(cache),
        resume=resume,
        state=None if state is None else int(str(state)) if str(state).isdecimal() else read_state(state),
        reconcile=reconcile.value,
        strategy_name=loaded.strategy_name or DEFAULT_STRATEGY,
        **said,
    )


def _check_cluster(runtime: str, address: str | None, ranks_per_host: int | None, loader_hosts: str | None) -> None:
    given = {"--address": address, "--ranks-per-host": ranks_per_host, "--loader-hosts": loader_hosts}
    for name, value in given.items():
        here = name == "--loader-hosts" and runtime == "local"  # processes of this host
        if value is not None and runtime != "ray" and not here:
            raise SpecError(
                f"{name} is {value!r:.80} and the runtime is {runtime!r}, which has no cluster; it would "
                "have no effect. Add --runtime ray, or leave it out."
            )
    if ranks_per_host is not None and ranks_per_host < 1:
        raise SpecError(
            f"--ranks-per-host is {ranks_per_host}; no host would have a trainer. Give the number of trainer processes "
            "of one host (torchrun's --nproc-per-node), or leave it out."
        )
    if address == "":
        raise SpecError("--address is empty; no cluster could be reached. Give 'auto' or host:port, or leave it out.")
