"""What several commands take and do alike: the flags of a launch, reading the job file, the JSON switch.

What runs a job is imported when it is needed: a mistake in the job file is told before that.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from pydantic import model_validator

from overlord.cli.output import Screen, current_command
from overlord.core.spec_errors import conflict
from overlord.errors import SpecError
from overlord.job.layout_specs import DEFAULT_CACHE, Layout
from overlord.job.spec_model import Spec, field_docs, real, whole
from overlord.job.specs import Job
from overlord.job_files import JobFile, load_job_file
from overlord.launch_spec import Budget, Launch
from overlord.planning.strategies import name_of

DEFAULT_STEPS = 100
DEFAULT_STRATEGY = "backbone_balance"
AS_JSON = "overlord.as_json"
"""Where a command's context remembers that JSON was asked for."""
CACHE = Path(DEFAULT_CACHE)


def _remember_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[AS_JSON] = value
    return value


def within(low: float, high: float = math.inf) -> Callable[[typer.CallbackParam, Any], Any]:
    """Return a callback that refuses a flag's number outside of some limits."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and not low <= value <= high:
            limits = f"{low:g} or more" if math.isinf(high) else f"{low:g} to {high:g}"
            raise SpecError(f"{param.opts[0]} is {value}, which is out of range. Give {limits}.")
        return value

    return check


AsJson = Annotated[
    bool,
    typer.Option("--json", callback=_remember_json, is_eager=True, help="One JSON object on standard output."),
]
JobPath = Annotated[Path, typer.Argument(metavar="JOB", help="A job file: YAML, JSON or Python.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest snapshot in the store.")]
Cache = Annotated[
    Path,
    typer.Option(
        "--cache",
        envvar="OVERLORD_CACHE",
        help="Folder of indices and length sidecars; by default overlord in XDG_CACHE_HOME, or else in ~/.cache.",
    ),
]
Cpus = Annotated[
    int | None, typer.Option("--cpus", help="Workers that all sources may have together.", show_default=False)
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="Go on from this state: a JSON file with what state_dict() returned, or a step that the store keeps.",
        show_default=False,
    ),
]

Flags = dict[str, Any]
"""The options of a launch that a command line gave; None for those it did not."""
LAUNCH_FLAGS = tuple(
    name
    for name in Launch.known_keys()
    if name not in ("budget", "store_options", "source_options", "cache", "state", "skip_steps", "progress")
)
"""Options that are flags of their own; the others need more than a word, or have another form here."""
_NAMES = {"loaders_per_source": "--loaders"}
_METAVARS = {
    "loaders_per_source": "N|auto", "loader_hosts": "N|per_source", "metrics": "[HOST:]PORT", "dashboard": "PORT",
}  # fmt: skip
_HELP = {"shadows": "Sources with a shadow loader: all, none, auto, or names with commas between."}


class SimulateOptions(Spec):
    """The options of `overlord simulate` that are not those of a launch."""

    gpus: str | None = None
    """Numbers of GPUs with commas between, as 288,4096: dp of the mesh follows; by default the mesh as it is."""
    gpus_per_host: Annotated[int, whole(1, "no host would have a trainer. Give 8")] | None = None
    """GPUs of a trainer host; by default ranks_per_host of the job file, or 8."""
    threads: Annotated[int, whole(1, "nothing would be decoded. Leave it out")] | None = None
    """Threads of each host that decode behind the hand-over; by default those of the job file, or as many as needed."""
    cost: str | None = None
    """Cost model of the backbone: a preset, or '{causal_lm: {layers: 32, hidden: 4096}}' with --tflops; by default the
    strategy's own."""
    encoder_cost: str | None = None
    """Cost model of the image encoder; by default the strategy's own."""
    layers: Annotated[int, whole(1, "the backbone would take no time")] | None = None
    """Layers of a backbone preset; 45 by default for llama_12b."""
    encoder_layers: Annotated[int, whole(1, "the encoder would take no time")] | None = None
    """Layers of an encoder preset; 48 by default for vit_2b."""
    tflops: Annotated[float, real(1e-3, math.inf, "no step would end")] | None = None
    """TFLOP/s that a GPU reaches, for cost models in FLOPs."""
    gpu_speed: Annotated[float, real(1e-3, math.inf, "no step would end")] = 1.0
    """Speed of a GPU over that of the one a preset was measured on; 1 by default."""
    global_samples: Annotated[int, whole(1, "a step would be empty")] | None = None
    """Samples of a step; by default the batch of the job file, on every mesh."""
    global_tokens: Annotated[int, whole(1, "a step would be empty")] | None = None
    """Tokens of a step instead."""
    scale_batch: bool = False
    """With --gpus: let the batch grow with dp; the batch given is then that of the mesh given."""
    steps: Annotated[int, whole(1, "there would be nothing to simulate")] = 8
    """Steps that are drawn and planned for real; 8 by default."""
    hours: Annotated[float, real(1e-4, math.inf, "there would be nothing to simulate")] = 1.0
    """How long the feed is simulated; 1 by default."""
    rows: Annotated[int, whole(1, "no length would be known")] = 500
    """Rows of each source whose lengths are read; 500 by default."""

    @model_validator(mode="after")
    def _one_size(self) -> SimulateOptions:
        if self.global_samples is not None and self.global_tokens is not None:
            raise conflict("global_samples and global_tokens are both given, and a step has one size. Give one")
        if self.scale_batch and self.gpus is None:
            raise conflict("--scale-batch is given without --gpus; no batch would grow. Give --gpus, or leave it out")
        return self


def launch_flags(
    *names: str, runtimes: Any = None, also: type[Spec] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of a launch, made from their declaration; it gets them as one argument, `flags`.

    Args:
        *names: Options of `Launch`.
        runtimes: A Literal of the runtimes that the command can use; by default all.
        also: Options of the command itself, which become flags in the same way.
    """
    own = [] if also is None else list(also.model_fields)

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name == "flags":
                parameters += [_flag(Launch, name, runtimes) for name in names]
                parameters += [_flag(also, name, None) for name in own] if also is not None else []
            else:
                by_name = inspect.Parameter.KEYWORD_ONLY
                parameters.append(parameter.replace(kind=by_name, annotation=hints[parameter.name]))

        def command(**given: Any) -> None:
            flags = {name: given.pop(name) for name in (*names, *own)}
            if flags.get("store") is not None:
                flags["store"] = store_path(flags["store"])
            function(flags=flags, **given)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorated


def _flag(spec: type[Spec], name: str, runtimes: Any) -> inspect.Parameter:
    """Return the flag of an option: its type where that is plain, else text, which the declaration reads."""
    field = spec.model_fields[name]
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if name == "runtime" and runtimes is not None:
        kind = runtimes
    elif all(isinstance(word, str) for word in kinds):  # of a Literal
        kind = field.annotation
    else:
        plain = getattr(kinds[0], "__origin__", kinds[0]) if len(kinds) == 1 else str  # without its checks
        kind = plain if plain in (int, float, bool) else str
    flag = _name_of(name)
    if name == "scaling":
        kind, flag = bool, "--scaling/--no-scaling"
    option = typer.Option(
        flag, help=_HELP.get(name, field_docs(spec).get(name)), metavar=_METAVARS.get(name), show_default=False
    )
    kinded = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kinded)


def load(path: Path, screen: Screen) -> JobFile:
    """Read a job file, and complete its job as a launch does.

    Raises:
        SpecError: The file is wrong; the message says where.
    """
    with screen.progress(), screen.user_code():
        loaded = load_job_file(path)
    ends = current_command()
    if ends is not None:
        ends.enter_context(loaded.located())
    return dataclasses.replace(loaded, job=completed(loaded.job))


def completed(job: Job) -> Job:
    """Return the job with what its processor folder says, as a launch completes it; the sources stay in their order."""
    from overlord.runtimes.launching.resume import canonical

    by_name = {source.name: source for source in canonical(job).sources}
    return job.model_copy(update={"sources": tuple(by_name[name] for name in job.names)})


def folder_of(cache: Path) -> str:
    """Return the cache folder as a whole path."""
    return str(cache.expanduser().absolute())


def store_path(store: str) -> str:
    """Return a store as a whole path, as a command line means it; a URL stays as it is."""
    return store if "://" in store else folder_of(Path(store))


def choose(loaded: JobFile, flags: Flags, cache: Path, cpus: int | None = None) -> Launch:
    """Return how to run a job: what the command line says, else what stands in the job file.

    Raises:
        SpecError: An option is wrong, or was given for a runtime that does not have it.
    """
    given = flags | {"cache": folder_of(cache)}
    if cpus is not None:
        given["budget"] = (loaded.launch.budget or Budget()).model_dump() | {"cpus": cpus}
    if given.get("shadows") is not None:
        given["shadows"] = _shadows(given["shadows"])
    with _flags_named():
        return loaded.call(given, lambda loc: "--cpus" if loc[0] == "budget" else _name_of(loc[0]))


def simulate_options(flags: Flags) -> SimulateOptions:
    """Take the options of `overlord simulate` out of the flags of its command line.

    Raises:
        SpecError: An option is wrong.
    """
    own = {name: flags.pop(name) for name in SimulateOptions.model_fields}
    given = {name: value for name, value in own.items() if value is not None}
    with _flags_named():
        return SimulateOptions.from_mapping(given, lambda loc: _name_of(loc[0]) if loc else "simulate")


@contextmanager
def _flags_named() -> Iterator[None]:
    """Let a flag stand for its option in errors: "--loaders is '0'"."""
    try:
        yield
    except SpecError as error:
        text = re.sub(r"^(--[a-z-]+): (?:budget\.cpus|\w+)", r"\1", str(error), flags=re.MULTILINE)
        raise SpecError(text) from None


def strategy_name(launch: Launch) -> str:
    """Return the name of the strategy of a launch."""
    return DEFAULT_STRATEGY if launch.strategy is None else name_of(launch.strategy)


def layout_words(layout: Layout) -> str:
    """Return a layout in a few words: its keys, and the fields that differ from the defaults.

    Example:
        >>> layout_words(Layout("megatron")), layout_words(Layout(rows="padded", block=32))
        ('megatron', 'hf, rows=padded, block=32')
    """
    changed = layout.model_dump(mode="json", exclude_defaults=True, exclude={"keys"})
    return ", ".join([layout.keys, *(f"{name}={value}" for name, value in changed.items())])


def resumed_words(step: int) -> str:
    """Say where training continues after a resume."""
    return f"training continues with step {step}, which is delivered again if a trainer had begun it"


def layout_advice(job: Job, layout: Layout) -> list[str]:
    """Return what to change where a layout of rows leaves room for only one row in a microbatch."""
    context, most = job.batch.context_length, job.batch.microbatch_cap
    if layout.rows == "packed" or most >= 2 * context:
        return []
    return [
        f"A microbatch has one row, since rows={layout.rows} counts every row as context_length={context:,} tokens and "
        f"batch.microbatch_tokens is {most:,}: raise batch.microbatch_tokens, to {8 * context:,} for eight rows."
    ]


def _name_of(option: str) -> str:
    return _NAMES.get(option, f"--{option.replace('_', '-')}")


def _shadows(text: str) -> bool | str | list[str]:
    """Return which sources have a shadow, as a command line writes it.

    Example:
        >>> _shadows("all"), _shadows("web, coyo")
        (True, ['web', 'coyo'])
    """
    if text in ("all", "none"):
        return text == "all"
    return text if text == "auto" else [name.strip() for name in text.split(",") if name.strip()]
