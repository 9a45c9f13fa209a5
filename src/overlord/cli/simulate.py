"""`overlord simulate`: a dry run of hours on a mesh of any size: step times, waits, workers, memory, plans, traffic."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from overlord.cli.explain import dry_run, steps_to_plan
from overlord.cli.options import SimulateOptions
from overlord.cli.output import Tell
from overlord.cli.sources import count_indexed
from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.job.specs import ImageSpec, Job, Video
from overlord.job_files import JobFile
from overlord.launch_spec import Budget, Launch, mapping_or_name, profile_path
from overlord.planning.costs import Cost, CostModel, llama_12b, presets, vit_2b
from overlord.planning.strategies import (
    Strategy,
    StrategySpec,
    backbone_balance,
    costs_of,
    name_of,
    vanilla,
    vlm_hybrid,
)
from overlord.reports.pages import Row, terminal_table
from overlord.reports.passes import forecast_words
from overlord.reports.summary import count, number, percent, ratio, seconds, size
from overlord.runtimes.autoscaling.profiling import check_profile, profile_job, read_profile
from overlord.runtimes.autoscaling.simulation import (
    Rehearsal,
    Rows,
    SimulatedMesh,
    SimulatedStrategy,
    StepClock,
    measured_rows,
    simulate_mesh,
    unit_seconds,
)
from overlord.runtimes.launching.deployment import base_weights, limits_of
from overlord.runtimes.launching.service_options import ServiceOptions, few_samples
from overlord.scaling.profiles import Profile

LAYERS = {"llama_12b": 45, "vit_2b": 48}
"""Layers of the models that presets were measured on one layer of: the paper's table 1."""
_GPUS_PER_HOST = 8
_PROFILED_S = 0.5
"""Seconds of each source, where there is no profile."""
_WORTH_TELLING = 0.01
"""Share of the time that trainers wait, from which on it is told what they wait for."""
_UNPLACED = "images that no strategy places are encoded by the tp x cp ranks that have their tokens, in equal parts"
_COLUMNS = (
    "GPUs", "strategy", "step", "speedup", "waits", "tokens/s", "workers", "cores", "memory", "plan", "sent",
    "host data/s",
)  # fmt: skip


def meshes_of(tree: ClientPlaceTree, gpus: str | None) -> list[ClientPlaceTree]:
    """Return the meshes: that of the launch, or one for each number of GPUs, with as many data-parallel groups.

    Raises:
        SpecError: A number is none, or no mesh has it.

    Example:
        >>> [str(one) for one in meshes_of(ClientPlaceTree(tp=4, pp=4), "288, 4096")]
        ['pp=4 dp=18 cp=1 tp=4', 'pp=4 dp=256 cp=1 tp=4']
    """
    if gpus is None:
        return [tree]
    found: list[ClientPlaceTree] = []
    group = tree.world_size // tree.dp
    for word in gpus.split(","):
        if not word.strip().isdecimal() or not int(word):
            raise SpecError(f"--gpus is {gpus!r:.80}; {word.strip()!r:.40} is no number of GPUs. Write --gpus 288,576.")
        if int(word) % group:
            raise SpecError(
                f"--gpus has {int(word):,} and a data-parallel group of the mesh {tree} has {group} GPUs (pp x cp x "
                f"tp); some would be left over. Give a multiple of {group}, or another --mesh."
            )
        found.append(tree.with_axis(dp=int(word) // group))
    return found


def batched(job: Job, tree: ClientPlaceTree, given_dp: int, asked: SimulateOptions) -> Job:
    """Return the job with the batch of a mesh: the job's, or as asked for; it grows with dp only with --scale-batch.

    Raises:
        SpecError: The batch is too small for a sequence.
    """
    sizes = {"global_samples": asked.global_samples, "global_tokens": asked.global_tokens}
    if not any(sizes.values()):
        sizes = {name: getattr(job.batch, name) for name in sizes}
    if asked.scale_batch:
        sizes = {name: value and max(1, round(value * tree.dp / given_dp)) for name, value in sizes.items()}
        if sizes["global_tokens"]:  # a smaller mesh than the given one still has room for one sequence
            sizes["global_tokens"] = max(sizes["global_tokens"], job.batch.context_length)
    return job.replace(batch=job.batch.replace(**sizes))


def clock_of(strategy: Strategy | None, asked: SimulateOptions, *, images: bool) -> tuple[StepClock, list[str]]:
    """Return how long steps take, and what is assumed for that; a job without images has no encoder.

    Raises:
        SpecError: A cost has no time, or an option has no effect.
    """
    own_backbone, own_encoder = costs_of(strategy)
    models = {
        "backbone": _model(asked.cost, "--cost", own_backbone, llama_12b),
        "encoder": _model(asked.encoder_cost, "--encoder-cost", own_encoder, vit_2b),
    }
    given = {"backbone": ("--layers", asked.layers), "encoder": ("--encoder-layers", asked.encoder_layers)}
    if not images:
        for flag, value in (("--encoder-cost", asked.encoder_cost), ("--encoder-layers", asked.encoder_layers)):
            if value is not None:
                raise SpecError(f"{flag} is {value} and no source has images; it would have no effect. Leave it out.")
        given.pop("encoder")
    in_flops = [models[name] for name in given if models[name].unit == "flops"]
    if asked.tflops is not None and not in_flops:
        raise SpecError(
            f"--tflops is {asked.tflops:g} and the cost models are in milliseconds; it would have no effect. Leave it "
            "out, or give --cost '{causal_lm: {layers: 32, hidden: 4096}}'; --gpu-speed makes measured times shorter."
        )
    words, units = list[str](), {"encoder": 0.0}
    for name, (flag, layers) in given.items():
        model = models[name]
        preset = model in presets()
        if layers is not None and not preset:
            raise SpecError(
                f"{flag} is {layers} and the cost of the {name} is {model.name}, which has its layers; it would have "
                "no effect. Leave it out, or choose a preset, which is measured on one layer."
            )
        if model.unit == "flops" and asked.tflops is None:
            raise SpecError(
                f"the cost of the {name} ({model.name}) is in FLOPs, which have no time by themselves. Give --tflops, "
                "what a GPU reaches, such as 400; or a preset, which has measured milliseconds."
            )
        if model.unit == "relative":
            raise SpecError(
                f"the cost of the {name} ({model.name}) has no time; no step would have one. Choose a measured preset "
                "(--cost llama_12b), or {causal_lm: ..} with --tflops."
            )
        layers = layers or (LAYERS.get(model.name, 1) if preset else 1)
        speed = asked.gpu_speed if model.unit == "ms" else 1.0
        units[name] = unit_seconds(model, layers / speed, asked.tflops)
        times = f", {number(layers, 'layer')}" if preset else ""
        words.append(
            f"{name}: {model.name} ({model.origin}){times}"
            + (f", at {speed:g} of that GPU's speed" if speed != 1 else "")
            + (f", at {asked.tflops:g} TFLOP/s" if model.unit == "flops" else "")
        )
    clock = StepClock(
        backbone=models["backbone"],
        backbone_unit_s=units["backbone"],
        encoder=models["encoder"],
        encoder_unit_s=units["encoder"],
    )
    return clock, words


def _model(given: str | None, flag: str, own: object, default: CostModel) -> CostModel:
    if given is not None:
        return Cost.from_mapping(mapping_or_name(given), lambda _: flag).model()
    return own if isinstance(own, CostModel) else default


def strategies_of(asked: Sequence[Strategy], own: Strategy | None, rows: Sequence[Rows]) -> list[Strategy]:
    """Return what is compared: dealing round-robin first, then what was asked for, or the common ones and the job's."""
    wanted = list(asked)
    if not wanted:
        wanted = [backbone_balance(), *([vlm_hybrid()] if any(meta["images"].any() for meta, _ in rows) else [])]
        if own is not None:
            wanted = [one for one in wanted if name_of(one) != name_of(own)] + [own]
    return [vanilla(), *(one for one in wanted if not isinstance(one, vanilla))]


def profile_of(job: Job, path: Path, launch: Launch, tell: Tell) -> tuple[Profile, str]:
    """Return what sources cost, and where that is from: the profile of the launch or beside the job, or measured now.

    Raises:
        SpecError: The profile is of other sources, or a source cannot be measured.
    """
    options = ServiceOptions(mesh=launch.mesh, cache=launch.cache, placement=launch.placement)
    beside = profile_path(path)
    place = Path(launch.profile or beside)
    known = read_profile(place)
    if known is not None:
        check_profile(known, job, options, tell)
        return known, f"costs of the sources are those of {place}"
    if place.absolute() != beside.absolute():
        raise SpecError(f"--profile {place}: there is no such file; costs are not known. `overlord profile` writes it.")
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    measured = profile_job(job, options, when=when, seconds=_PROFILED_S, progress=tell)
    if measured.failed:
        raise SpecError(next(iter(measured.failed.values())))
    words = f"costs of the sources were measured now, {_PROFILED_S:g} s each (`overlord profile` keeps them)"
    return measured.profile, words


def simulate_job(
    loaded: JobFile,
    path: Path,
    launch: Launch,
    strategies: Sequence[Strategy | None],
    asked: SimulateOptions,
    tell: Tell,
) -> tuple[list[SimulatedMesh], list[str]]:
    """Simulate a job on each mesh that was asked for.

    Args:
        loaded: The job.
        path: Its file.
        launch: Its mesh, strategy, layout, prefetch, threads, workers and profile.
        strategies: What to compare; the common ones if there is none.
        asked: The other options.
        tell: Told how far it is.

    Returns:
        What each mesh gives, and what is assumed.

    Raises:
        SpecError: An option or the job is wrong.
        PlanError: A step cannot be planned.
    """
    job, dp = loaded.job, launch.mesh.dp
    trees = meshes_of(launch.mesh, asked.gpus)
    sized = [batched(job, tree, dp, asked) for tree in trees]  # refused before anything is read
    judged = strategies[-1] if strategies else launch.strategy
    images = any(isinstance(source.sample, (ImageSpec, Video)) for source in job.sources)
    clock, models = clock_of(judged if isinstance(judged, StrategySpec) else None, asked, images=images)
    profile, costs = profile_of(job, path, launch, tell)
    with dry_run(job, launch, tell) as roles:
        rows = measured_rows(roles.fleet, roles.job.names, asked.rows, tell)
        ordered, weights = roles.job, base_weights(roles.job, roles.facts)
        counted = [count_indexed(roles.listings[name])[:2] for name in ordered.names]
    compared, notes = strategies_of([one for one in strategies if one is not None], launch.strategy, rows), list[str]()
    steps = asked.steps
    for strategy in compared:
        fewer, why = steps_to_plan(job, strategy, asked.steps + 1)  # one more is planned, and does not count
        if fewer - 1 < steps:
            steps, notes = max(fewer - 1, 1), why
    budget = launch.budget or Budget()
    rehearsal = Rehearsal(
        rows=rows,
        profile=profile,
        weights=weights,
        counted=counted,
        strategies=compared,
        clock=clock,
        patches_per_token=limits_of(ordered).patches_per_token,
        steps=steps,
        hours=asked.hours,
        per_host=asked.gpus_per_host or launch.ranks_per_host or _GPUS_PER_HOST,
        cpus=None if launch.budget is None else launch.budget.cpus,
        threads=asked.threads or launch.threads,
        prefetch=launch.prefetch,
        ahead=budget.ahead_bytes(asked.threads or launch.threads or 1),
    )
    found: list[SimulatedMesh] = []
    for tree in trees:
        limits = limits_of(ordered, launch.layout, tree)
        found.append(simulate_mesh(batched(ordered, tree, dp, asked), tree, limits, rehearsal, tell))
    few = [words for one, tree in zip(sized, trees, strict=True) if (words := few_samples(one, tree)) is not None]
    batch = _batch_words(batched(job, launch.mesh, dp, asked), launch.mesh, asked)
    return found, [*models, costs, batch, *_assumptions(rehearsal, rows, images=images), *notes, *few]


def _batch_words(job: Job, tree: ClientPlaceTree, asked: SimulateOptions) -> str:
    batch = job.batch
    of = f"{batch.global_samples:,} samples" if batch.global_samples is not None else f"{batch.global_tokens:,} tokens"
    whose = "as asked for" if asked.global_samples or asked.global_tokens else "as in the job file"
    if asked.scale_batch:
        return f"batch: {of} {whose} on a mesh of dp={tree.dp}; --scale-batch lets it grow with dp"
    return f"batch: {of} {whose}, on every mesh; --scale-batch would let it grow with dp"


def _assumptions(given: Rehearsal, rows: Sequence[Rows], *, images: bool) -> list[str]:
    read = sum(len(meta) for meta, _ in rows)
    fleet = (
        f"{number(given.cpus, 'worker')} of all sources together"
        if given.cpus is not None
        else "as many workers as the trainers need, and a fifth more"
    )
    threads = (
        "as many threads as needed" if given.threads is None else f"{number(given.threads, 'thread')} on each host"
    )
    return [
        f"lengths: {number(read, 'row')} of {number(len(rows), 'source')} were read, and are drawn again at random for "
        f"larger batches; {number(given.steps, 'step')} drawn, planned and checked for real on this host, with the "
        "mixture of the first steps",
        f"step: {'the encoder takes its images first, then the backbone runs; ' if images else ''}ranks of tp and cp "
        "share a sequence evenly, pipeline stages have equal layers; communication, the optimizer and recomputation "
        "take no time beyond what the cost model has",
        *([_UNPLACED] if images else []),
        f"feed: {fleet}; each has a core where it needs one; media behind the hand-over: {threads}; "
        f"{number(given.prefetch, 'step')} ahead; {given.hours:g} h of steps, or 2,000 of them",
        f"hosts: {number(given.per_host, 'GPU')} each; every host hands over its own part; the network and storage are "
        "never the limit; sources have enough files to be divided over any number of actors",
        f"memory: files and buffers of the profile, 64 MB for each actor, {size(given.ahead)} held ahead on each host",
    ]


def simulated_tables(job: str, found: Sequence[SimulatedMesh], assumed: Sequence[str]) -> list[RenderableType]:
    """Return what was simulated for the terminal: one table, and what is assumed."""
    rows: list[Row] = []
    for mesh in found:
        for place, one in enumerate(mesh.strategies):
            rows.append(
                Row(
                    f"{mesh.gpus:,}" if place == 0 else "",
                    (
                        one.strategy,
                        seconds(one.step_s),
                        ratio(one.speedup),
                        percent(one.waits),
                        count(one.tokens_per_s),
                        f"{one.workers:,}",
                        f"{one.cpus:.2g}" if one.cpus < 10 else count(one.cpus),
                        size(one.bytes),
                        seconds(one.plan_s),
                        size(one.plan_bytes),
                        size(one.host_bytes / one.step_s),
                    ),
                )
            )
    look: Mapping[str, Any] = {"box": box.SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False, "show_edge": False}
    table = terminal_table(None, _COLUMNS, rows, left=("strategy",), **look)
    table.columns[1].no_wrap = True  # the name of a strategy is read as a whole, and given to --strategy
    parts: list[RenderableType] = [Text(f"{job}, simulated", style="bold")]
    for mesh in found:
        words = f"{number(mesh.gpus, 'GPU')} on {number(mesh.hosts, 'host')}: {mesh.mesh}; "
        words += f"{count(mesh.samples)} samples and {count(mesh.tokens)} tokens a step"
        parts.append(Padding(Text(words), (0, 0, 0, 2)))
    notes: list[RenderableType] = [
        Text(f"{number(mesh.gpus, 'GPU')}, {one.strategy}: trainers wait; {_held_up_by(one)}.")
        for mesh in found
        for one in mesh.strategies
        if one.waits > _WORTH_TELLING
    ]
    for mesh in found:
        ahead = forecast_words(mesh.sources)
        notes += [] if ahead is None else [Text(f"{number(mesh.gpus, 'GPU')}: {ahead}")]
    notes += [Text("Assumed:", style="bold"), *(Padding(Text(f"- {line}"), (0, 0, 0, 2)) for line in assumed)]
    return [Group(*parts, ""), table, Group(*notes)]


def _held_up_by(one: SimulatedStrategy) -> str:
    return "planning takes longer than a step" if one.plan_s > one.step_s else one.limit
