"""The front door: `launch` a service for a job, or `connect` to one that runs."""

from __future__ import annotations

import functools
import math
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from overlord.core.draw import Buffer, Limits
from overlord.core.launch_words import DEFAULT_CACHE, OnSourceFailure, Runtime
from overlord.core.layout_specs import Keys, Layout
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan
from overlord.core.reconcile import Reconcile
from overlord.core.spec_model import as_number, is_whole
from overlord.core.specs import Job, Mixture, Source
from overlord.errors import SpecError, StateError
from overlord.planning import strategies
from overlord.planning.checking import Strategy
from overlord.roles.client import Client
from overlord.roles.inputs import FIXED_WHILE_RUNNING
from overlord.roles.placement import PLACEMENTS, Placement
from overlord.runtimes.inline import InlineService
from overlord.runtimes.inline_cluster import InlineCluster
from overlord.runtimes.launch_checks import check_numbers, cluster_of, shadows_of
from overlord.runtimes.launch_options import LaunchOptions
from overlord.runtimes.local import connect_local
from overlord.runtimes.numbering import canonical
from overlord.runtimes.opening import Progress
from overlord.runtimes.planner_answers import SourceChange
from overlord.runtimes.service_process import ServiceProcess, ray_service
from overlord.runtimes.shapes import limits_of
from overlord.runtimes.sizing import Loaders, sizing_of
from overlord.scaling.autoscaler import Scaling
from overlord.scaling.budgets import AHEAD_BYTES, Budget
from overlord.storage import StorageOptions
from overlord.stores.store import KEEP

if TYPE_CHECKING:
    from overlord.runtimes.metrics import MetricsDoor

LOADER_CPUS = 2
"""Threads of a loader host of a cluster, and the CPUs it reserves."""


class Service:
    """A running data service. Close it, or use it as a context manager."""

    def __init__(
        self,
        runtime: InlineService | ServiceProcess | InlineCluster,
        mesh: ClientPlaceTree,
        limits: Callable[[ClientPlaceTree], Limits],
        door: MetricsDoor | None = None,
    ) -> None:
        self._runtime = runtime
        self._limits = limits
        self._door = door
        if door is not None:
            door.tell(runtime.status)
        self.mesh = mesh
        """The newest mesh: that of the launch, or of the last `reshard`; steps before that keep theirs."""

    @property
    def address(self) -> str | None:
        """Where other processes of this host attach (`ol.connect`); None for the inline runtime."""
        return self._runtime.address

    @property
    def pid(self) -> int:
        """The service's process id; on the inline runtime that of this process."""
        return self._runtime.pid

    @property
    def metrics(self) -> str | None:
        """Where Prometheus asks for metrics; None where `launch` was not told to answer it."""
        return None if self._door is None else self._door.url

    def __repr__(self) -> str:
        return f"Service(mesh={self.mesh}, address={self.address!r})"

    def client(self, rank: int = 0) -> Client:
        """Return the stream of one rank."""
        return self._runtime.client(rank)

    def status(self) -> dict[str, Any]:
        """Return roles, positions, buffers, and the planned and realised mixture."""
        return self._runtime.status()

    def set_mixture(self, mixture: Mixture | Mapping[str, Any], at_step: int | None = None) -> int:
        """Change weights or schedule while the stream runs; return the first step it holds for.

        The change is written down first, so a resumed run repeats it. Steps that are planned already (the trainers'
        prefetch) stay as they are.

        Args:
            mixture: The new mixture, or bare weights {source: weight}; its level, stopping and order must stay.
            at_step: A step that is not planned yet; by default the next such step.
        """
        given = mixture if isinstance(mixture, Mixture) else _mixture_of(mixture, self._runtime.mixture())
        return self._runtime.set_mixture(given, _step_or_none("set_mixture", at_step), uuid.uuid4().hex)

    def skip_steps(self, count: int, at_step: int | None = None) -> int:
        """Pass over so many global batches, as after a loss spike; return the step before which they are left out."""
        if not is_whole(count) or count < 1:
            raise SpecError(f"skip_steps: count is {count!r}; nothing would be skipped. Give a number of steps.")
        return self._runtime.skip_steps(int(count), _step_or_none("skip_steps", at_step), uuid.uuid4().hex)

    def reshard(self, tree: ClientPlaceTree, at_step: int | None = None) -> int:
        """Go on with another mesh from a step on; return that step. No sample is lost or repeated.

        Ranks that both meshes have go on by themselves, at their new place (`step.mesh`); the clients of the others end
        before that step; new ranks attach at any time, and begin there. Which samples are in which step stays as it is.
        The change is written down first.

        Args:
            tree: The new mesh.
            at_step: A step that is not planned yet; by default the next such step.

        Raises:
            SpecError: for a mesh that the job or the strategy does not fit, or a step that is planned already; nothing
                has changed.
        """
        if not isinstance(tree, ClientPlaceTree):
            raise SpecError(
                f"reshard: tree is {tree!r:.80}, not a mesh; no rank would know its place. Write "
                "ol.ClientPlaceTree(dp=8, tp=2)."
            )
        at, self.mesh = self._runtime.reshard(tree, _step_or_none("reshard", at_step), uuid.uuid4().hex)
        return at

    def add_source(self, source: Source, weight: float | None = None, at_step: int | None = None) -> int:
        """Let a source come while the stream runs; return the first step it is drawn from.

        It is opened and checked first, and written down before it counts. A resumed run opens it again, whether the
        job names it by then or not.

        Args:
            source: The source; what cannot be written down, such as `ol.Custom`, must be in the job.
            weight: Against the weights of the others, which stay in their ratio; by default the source's own weight, or
                the mean of the others.
            at_step: A step that is not planned yet; by default the next such step.
        """
        if not isinstance(source, Source):
            raise SpecError(f"add_source: {source!r:.80} is not an ol.Source; there is nothing to read. Build one.")
        given = as_number(weight)
        if weight is not None and (given is None or not math.isfinite(given) or given < 0):
            raise SpecError(
                f"add_source: weight is {weight!r:.80}; it gives no share of the mixture. Give a number of 0 or more."
            )
        at = _step_or_none("add_source", at_step)
        return self._runtime.add_source(source, None if given is None else float(given), at, uuid.uuid4().hex)

    def remove_source(self, name: str, at_step: int | None = None) -> int:
        """Take a source out of the mixture for good; return the first step without it. The others take its share."""
        return self._change_source("remove_source", name, at_step)

    def park_source(self, name: str, at_step: int | None = None) -> int:
        """Draw nothing from a source until it returns; return the first step without it.

        It keeps its place, and is owed nothing for the time it is away.
        """
        return self._change_source("park_source", name, at_step)

    def return_source(self, name: str, at_step: int | None = None) -> int:
        """Draw from a parked source again, where it stood; return the first step with it."""
        return self._change_source("return_source", name, at_step)

    def _change_source(self, change: SourceChange, name: str, at_step: int | None) -> int:
        return self._runtime.change_source(change, _name(name), _step_or_none(change, at_step), uuid.uuid4().hex)

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step, or None past the end; planning it now if need be."""
        return self._runtime.plan_raw(_step("plan_raw", step))

    def summary_buffer(self, step: int) -> Buffer | None:
        """Return what a strategy sees of a step: its draw with the metadata and the job's limits."""
        plan = self.plan_raw(step)
        return None if plan is None else Buffer(plan.draw, self._limits(plan.mesh))

    def close(self) -> None:
        """End the service; nothing of it is left behind."""
        try:
            self._runtime.close()
        finally:
            if self._door is not None:
                self._door.close()
                self._door = None

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def launch(  # noqa: PLR0913 - the front door: everything has a default and a name
    job: Job,
    *,
    mesh: ClientPlaceTree | None = None,
    strategy: Strategy | None = None,
    runtime: Runtime = "local",
    layout: Keys | Layout = "hf",
    placement: Placement = "auto",
    prefetch: int = 2,
    shadows: bool | Literal["auto"] | Collection[str] = False,
    heartbeat: float = 5.0,
    loaders_per_source: Loaders = 1,
    scaling: bool | Scaling = False,
    profile: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    address: str | None = None,
    ranks_per_host: int | None = None,
    loader_hosts: int | Literal["per_source"] | None = None,
    budget: int | Budget = AHEAD_BYTES,
    store: str | os.PathLike[str] | None = None,
    store_options: StorageOptions | None = None,
    keep: int = KEEP,
    cache: str | os.PathLike[str] = DEFAULT_CACHE,
    state: Mapping[str, Any] | Literal["latest"] | int | None = None,
    reconcile: Reconcile = "strict",
    skip_steps: int = 0,
    on_source_failure: OnSourceFailure = "stop",
    metrics: int | str | None = None,
    progress: Progress | None = None,
) -> Service:
    r"""Start a service for a job and return it; everything that can be checked is checked first.

    Args:
        job: What to read and how to mix it.
        mesh: The trainer's mesh (default: one rank).
        strategy: Where samples go: one of `ol.strategies`, or a function (buffer, tree) -> plan. By default
            `ol.strategies.backbone_balance()`.
        runtime: "local": one service process, trainers attach from any process of this host.
            "ray": the roles spread over the hosts of a Ray cluster, trainers attach on their own host and need no ray.
            "inline": everything in this process, single-threaded, for tests and debugging.
        layout: The keys and shapes of a batch: "hf" (what Hugging Face models take), "megatron", "torchtitan", or an
            `ol.Layout` with padding, slicing, alignment and positions.
        placement: Where images, clips and sounds are decoded: in the "loader", in the "constructor" (behind the
            hand-over), or "auto", where fewer bytes travel. It never changes the stream.
        prefetch: Steps built ahead of each trainer.
        shadows: Which sources have a shadow loader in another process, ready to take over: True, names of sources, or
            "auto" for those whose loader takes long to come back.
        heartbeat: Seconds that nothing may be heard of a role before it is taken for dead and replaced; of the service
            process, twice as long.
        loaders_per_source: Workers of each source that read and transform ahead: a number, numbers by name, or "auto"
            for what `profile` asks for. They share the groups of its order.
        scaling: Whether workers come and go with the mixture while the service runs; `ol.Scaling` says when.
        profile: What sources cost, as `overlord profile` measured it; kept up to date by the service.
        threads: Threads for decoding (default: one per core of this host; of each loader host of a cluster: 2).
        address: The Ray cluster to attach to, such as "auto" or "10.0.0.1:6379" (default: one is started here).
        ranks_per_host: Trainer processes of one host of the cluster, as torchrun's --nproc-per-node (default: what the
            hosts' accelerators say, else all on this host).
        loader_hosts: Processes that the sources are dealt to, or "per_source" (default: of a cluster, one for each
            trainer host; of "local", none: loaders are threads of the service, unless there are shadows).
        budget: Bytes of samples and views held ahead of the trainers; `ol.Budget` also bounds workers and memory.
        store: Folder for the journal and snapshots, or a URL such as "s3://bucket/run" (default: a temporary folder).
        store_options: Credentials and the like of a store that is a URL, as a Source's storage_options.
        keep: Steps behind the newest snapshot that stay resumable with `state=STEP`.
        cache: Folder for the indices of files.
        state: What `client.state_dict()` returned; "latest" takes the newest snapshot of the store, a number the state
            before that step of the store's newest run.
        reconcile: What of the job's sources may differ from the state's: nothing ("strict"); there may be more, which
            begin at their start ("allow_add"); there may also be fewer ("allow_add_remove"). Their weights may then
            differ too.
        skip_steps: Global batches to pass over before the first step, as after a loss spike.
        on_source_failure: What becomes of a source that cannot be read any more: "stop" ends the run; "park" goes on
            without it until it can be read again; "reweight" goes on without it until `service.return_source`.
        metrics: A port of this host, or "HOST:PORT", where this process answers Prometheus (0: a free port).
        progress: Called with (what, done, of) while sources are opened.

    Raises:
        SpecError: for what the user got wrong; nothing has run.

    Example:
        >>> import tempfile, pathlib, json
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> rows = [json.dumps({"ids": list(range(1, n))}) for n in range(3, 30)]
        >>> _ = (folder / "a.jsonl").write_text("\n".join(rows))
        >>> from overlord import Batch, Job, Source, Text
        >>> job = Job(sources=[Source("a", str(folder / "a.jsonl"), sample=Text("ids", tokenized=True))],
        ...           batch=Batch(64, global_samples=8))
        >>> with launch(job, runtime="inline", cache=str(folder / "cache")) as service:
        ...     step = next(service.client(rank=0))
        >>> step.index, step.global_samples
        (0, 8)
    """
    _check_job(job, mesh, strategy)
    check_numbers(prefetch=prefetch, threads=threads, keep=keep)
    _check_folders(store=store, cache=cache)
    sizing = sizing_of(job, loaders_per_source, scaling, budget, None if profile is None else os.fspath(profile))
    _step("launch: skip_steps", skip_steps)
    _check_word("placement", placement, PLACEMENTS, "it would be unclear where images, clips and sounds are decoded")
    _check_word(
        "reconcile", reconcile, get_args(Reconcile), "it would be unclear which sources may differ from the state"
    )
    _check_word(
        "on_source_failure",
        on_source_failure,
        get_args(OnSourceFailure),
        "it would be unclear what to do when a source cannot be read",
    )
    _check_word("runtime", runtime, get_args(Runtime), "nothing could run")
    chosen_shadows = shadows_of(canonical(job), shadows, runtime)
    cluster = cluster_of(runtime, address, ranks_per_host, loader_hosts, chosen_shadows)
    if not isinstance(heartbeat, (int, float)) or isinstance(heartbeat, bool) or not 0.2 <= heartbeat < math.inf:
        raise SpecError(
            f"launch: heartbeat is {heartbeat!r:.80}; no role could answer that often. Give seconds, 0.2 or more."
        )
    chosen = _layout_of(layout)
    tree, given = mesh or ClientPlaceTree(), _check_state(state, store)
    options = LaunchOptions(
        mesh=tree, prefetch=int(prefetch), loaders_per_source=sizing.loaders_per_source, workers=sizing.workers,
        lanes=sizing.lanes, scaling=sizing.scaling, memory=sizing.memory, budget_bytes=sizing.budget_bytes,
        profile=sizing.profile,
        threads=int(threads or (LOADER_CPUS if runtime == "ray" else os.cpu_count()) or 1),
        heartbeat_s=float(heartbeat),
        store=None if store is None else _store_of(store), store_options=dict(store_options or {}), keep=int(keep),
        cache=str(Path(cache).expanduser().absolute()), state=given, latest=isinstance(state, str),
        before_step=state if isinstance(state, int) else None,
        strategy=strategy, skip_steps=int(skip_steps), layout=chosen, placement=placement, cluster=cluster,
        reconcile=reconcile, on_source_failure=on_source_failure, service=uuid.uuid4().hex,
    )  # fmt: skip
    limits = functools.partial(limits_of, canonical(job), chosen)
    door = None if metrics is None else _open_door(metrics, runtime)
    try:
        return Service(_start(runtime, job, options, progress), tree, limits, door)
    except BaseException:
        if door is not None:
            door.close()
        raise


def connect(address: str, rank: int) -> Client:
    """Attach to a service of this host as one rank, from any process.

    Args:
        address: What `service.address` or `overlord serve` shows.
        rank: The trainer's global rank in the service's mesh.
    """
    return connect_local(address, rank)


def _open_door(metrics: int | str, runtime: str) -> MetricsDoor:
    if runtime == "inline":
        raise SpecError(
            f"launch: metrics is {metrics!r:.80} and runtime is 'inline', where nothing runs beside the caller, so "
            "requests would get no answer. Use runtime='local' or 'ray', or leave metrics out."
        )
    from overlord.runtimes.metrics import MetricsDoor  # only who wants metrics needs Prometheus' client

    return MetricsDoor(metrics)


def _start(runtime: str, job: Job, options: LaunchOptions, progress: Progress | None) -> InlineService | ServiceProcess:
    if runtime == "inline":
        return InlineService(job, options, progress)
    if runtime == "ray":
        return ray_service(job, options, progress)
    module = "local_service" if options.cluster is None else "process_cluster"
    return ServiceProcess(f"overlord.runtimes.{module}", job, options, progress)


def _check_job(job: object, mesh: object, strategy: object) -> None:
    if not isinstance(job, Job):
        raise SpecError(f"launch: job is a {type(job).__name__}, not an ol.Job; there is nothing to read. Build one.")
    if mesh is not None and not isinstance(mesh, ClientPlaceTree):
        raise SpecError(f"launch: mesh is {mesh!r:.80}, not a mesh. Write ol.ClientPlaceTree(dp=2, tp=4).")
    names = strategies.__all__
    if any(strategy is getattr(strategies, name) for name in names if name != "Strategy"):
        name = getattr(strategy, "__name__", "")
        raise SpecError(
            f"launch: strategy is ol.strategies.{name} itself, which makes strategies. Call it: ol.strategies.{name}()."
        )
    if strategy is not None and not callable(strategy):
        raise SpecError(
            f"launch: strategy is {strategy!r:.80}, not a function of (buffer, tree); samples would have no place "
            "in the mesh. Use one of ol.strategies, such as ol.strategies.backbone_balance()."
        )


def _layout_of(layout: object) -> Layout:
    if isinstance(layout, Layout):
        return layout
    _check_word("layout", layout, (*get_args(Keys), "ol.Layout(..)"), "batches would have unknown keys")
    return Layout(cast("Keys", layout))


def _check_word(name: str, value: object, choices: tuple[str, ...], effect: str) -> None:
    if not isinstance(value, str) or value not in choices or "(" in value:
        shown = " or ".join(choice if "(" in choice else repr(choice) for choice in choices)
        raise SpecError(f"launch: {name} is {value!r:.80}; {effect}. Use {shown}.")


def _check_folders(**given: str | os.PathLike[str] | None) -> None:
    for name, value in given.items():
        if name == "store" and value is None:
            continue
        if not isinstance(value, (str, os.PathLike)) or not str(value):
            raise SpecError(f"launch: {name} is {value!r:.80}, not a folder; nothing could be kept. Give a path.")


def _step(what: str, step: int) -> int:
    if not is_whole(step) or step < 0:
        raise SpecError(f"{what}: {step!r:.80} is not a number of steps. Give a whole number of 0 or more.")
    return int(step)


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise SpecError(
            f"the name of a source is {name!r:.80}, not text, so it names no source. Give the name as in the job."
        )
    return name


def _step_or_none(what: str, step: int | None) -> int | None:
    return None if step is None else _step(what, step)


def _mixture_of(given: Mapping[str, Any], now: Mixture) -> Mixture:
    """Return the running mixture with other weights; or a mixture from its fields."""
    if not isinstance(given, Mapping) or not given:
        raise SpecError(f"set_mixture: {given!r:.80} is not a mixture. Give ol.Mixture(..), or {{source: weight}}.")
    if set(given) & set(Mixture.known_keys()):
        return Mixture.from_mapping(given)
    fixed = {name: getattr(now, name) for name in FIXED_WHILE_RUNNING}
    return Mixture.from_mapping({"weights": given, **fixed, "temperature": now.temperature})


def _store_of(store: str | os.PathLike[str]) -> str:
    return str(store) if "://" in str(store) else str(Path(store).expanduser().absolute())


def _check_state(state: object, store: object) -> Mapping[str, Any] | None:
    """Return a state that was given; one that is asked of the store is found by who opens it."""
    if state is None or isinstance(state, Mapping):
        return state
    if state != "latest" and (not isinstance(state, int) or isinstance(state, bool) or state < 0):
        remedy = "Give what client.state_dict() returned, 'latest' or a step."
        raise StateError(f"state is {state!r:.80}; nothing could be resumed from it. {remedy}")
    if store is None:
        raise StateError(f"state={state!r} needs store=, where the snapshots are; none was given.")
    return None
