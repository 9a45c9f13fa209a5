"""The front door: `launch` a service for a job, or `connect` to one that runs."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from overlord.core import client_messages as msg
from overlord.core.client_messages import SourceChange
from overlord.core.draw import Buffer
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, plan_from_bytes
from overlord.core.spec_errors import is_finite, is_whole, named_arguments
from overlord.core.states import check_seal, reads_records
from overlord.errors import OverlordError, SpecError, StateError
from overlord.job.hook_specs import HOOK_KINDS, Hook
from overlord.job.layout_specs import DEFAULT_CACHE, Keys, Layout, OnSourceFailure, Placement, Runtime
from overlord.job.mixture_specs import MOST_WEIGHT
from overlord.job.reconcile import Reconcile
from overlord.job.spec_model import as_number
from overlord.job.specs import Job, Mixture, Source, tokenizer_file, without_secrets
from overlord.job_files import JobFile, dump_job_yaml, load_job_file, read_kept_job, refuse_kept_code, resolved_job
from overlord.launch_spec import Budget, Launch, LaunchOptions
from overlord.planning.checking import Strategy
from overlord.roles.changes import FIXED_WHILE_RUNNING, mixture_to_json, source_to_json
from overlord.roles.client import Client
from overlord.runtimes.autoscaling.sizing import sizing_of
from overlord.runtimes.client_feed import refuse_torch_workers
from overlord.runtimes.launching.resume import canonical, changes_of, with_changes
from overlord.runtimes.launching.service_options import Progress, ServiceOptions, few_samples
from overlord.runtimes.supervision.cleanup import remove_scratch, scratch_folder
from overlord.runtimes.supervision.early_start import LOCAL_SERVICE, ONE_THREAD
from overlord.runtimes.supervision.page_process import PageProcess
from overlord.runtimes.supervision.service_process import ServiceProcess, ray_service
from overlord.scaling.autoscaler import Scaling
from overlord.storage import StorageOptions
from overlord.stores.places import open_place, store_path
from overlord.stores.store import FoundLineage, copy_lineages, kept_job, lineage_before, newest_lineage

if TYPE_CHECKING:
    from overlord.runtimes.autoscaling.metrics import MetricsServer
    from overlord.runtimes.launching.inline_service import InlineService

R = TypeVar("R")

logger = logging.getLogger("overlord")


class Ask(Protocol):
    """Asks a service one thing."""

    def __call__(self, request: msg.Request[R], /) -> R:
        """Return its answer, or raise the error that it answers with."""


class RunningService:
    """What may be asked of a running service, and changed, by its owner and by any process of its host."""

    mesh: ClientPlaceTree
    """The newest mesh: that of the launch, or of the last `reshard`; steps before that keep theirs."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def status(self) -> dict[str, Any]:
        """Return roles, positions, buffers, and the planned and realised mixture."""
        return self._ask(msg.GetStatus()).content

    def history(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return what trainers reported, and what the service measured of itself, over the steps of the run.

        Both, "reports" and "measured", hold series by name, each with the columns "step", "count", "mean", "low" and
        "high": recent steps one by one, older ones joined. All of it takes 2 MB at most, and is kept in the store.
        "measured" has steps_per_s, wait_s (that trainers waited, a step), balance (tokens of the busiest rank over the
        mean) and share/NAME of the mixture. "changes" names the newest 500 live changes: step, kind, and of what.

        Args:
            names: Only these series.
        """
        return self._ask(msg.GetHistory(None if names is None else list(names))).content

    def set_mixture(self, mixture: Mixture | Mapping[str, Any], at_step: int | None = None) -> int:
        """Change weights or schedule while the stream runs; return the first step it holds for.

        The change is written down first, so a resumed run repeats it. Steps that are planned already (the trainers'
        prefetch) stay as they are.

        Args:
            mixture: The new mixture, or bare weights {source: weight}; its level, stopping and order must stay.
            at_step: A step that is not planned yet; by default the next such step.
        """
        if not isinstance(mixture, Mixture):
            in_force = Mixture.from_mapping(self._ask(msg.GetMixture()).content)  # without its weights
            mixture = _mixture_of(mixture, in_force)
        at = _step_or_none("set_mixture", at_step)
        return self._ask(msg.SetMixture(mixture_to_json(mixture), at, _new_id())).step

    def skip_steps(self, count: int, at_step: int | None = None) -> int:
        """Pass over so many global batches, as after a loss spike; return the step before which they are left out."""
        if not is_whole(count, 1):
            raise SpecError(f"skip_steps: count is {count!r}; nothing would be skipped. Give a number of steps.")
        at = _step_or_none("skip_steps", at_step)
        return self._ask(msg.SkipSteps(int(count), at, _new_id())).step

    def reshard(self, tree: ClientPlaceTree, at_step: int | None = None, hosts: int | None = None) -> int:
        """Go on with another mesh from a step on; return that step. No sample is lost or repeated.

        Ranks that both meshes have go on by themselves, at their new place (`step.mesh`); the clients of the others end
        before that step; new ranks attach at any time, and begin there. Which samples are in which step stays as it is.
        The change is written down first.

        Args:
            tree: The new mesh.
            at_step: A step that is not planned yet; by default the next such step.
            hosts: On a cluster: how many hosts of trainers the new mesh has. Further ones are served from then on, and
                those it does not have are given back; by default the hosts stay.

        Raises:
            SpecError: for a mesh that the job or the strategy does not fit, hosts that are not there, or a step that is
                planned already; nothing has changed.
        """
        if not isinstance(tree, ClientPlaceTree):
            raise SpecError(
                f"reshard: tree is {tree!r:.80}, not a mesh; no rank would know its place. Write "
                "ol.ClientPlaceTree(dp=8, tp=2)."
            )
        at = _step_or_none("reshard", at_step)
        if hosts is not None and not is_whole(hosts, 1):
            raise SpecError(
                f"reshard: hosts is {hosts!r:.80}; ranks would have no host. Give 1 or more, or leave it out."
            )
        done = self._ask(msg.Reshard(tree.sizes(), at, _new_id(), None if hosts is None else int(hosts)))
        self.mesh = ClientPlaceTree.from_sizes(done.newest)
        return done.step

    def add_source(self, source: Source, weight: float | None = None, at_step: int | None = None) -> int:
        """Let a source come while the stream runs; return the first step it is drawn from.

        It is opened and checked first, and written down before it counts. A resumed run opens it again, whether the
        job names it by then or not. Its credentials are not written down: a run that is resumed from the store or from
        a state must be given them again (`launch(source_options=..)`); a service that dies is restarted with them.

        Args:
            source: The source; what cannot be written down, such as `ol.Custom`, must be in the job.
            weight: Against the weights of the others, which stay in their ratio; by default the source's own weight, or
                the mean of the others.
            at_step: A step that is not planned yet; by default the next such step.
        """
        if not isinstance(source, Source):
            raise SpecError(f"add_source: {source!r:.80} is not an ol.Source; there is nothing to read. Build one.")
        given = as_number(weight)
        if weight is not None and (given is None or not is_finite(given) or not 0 <= given <= MOST_WEIGHT):
            raise SpecError(
                f"add_source: weight is {weight!r:.80}; it gives no share of the mixture. Give a number from 0 to "
                f"{MOST_WEIGHT:g}."
            )
        at, own = _step_or_none("add_source", at_step), None if given is None else float(given)
        return self._ask(msg.AddSource(source_to_json(source), own, at, _new_id())).step

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
        at = _step_or_none(change, at_step)
        return self._ask(msg.ChangeSource(change, _name(name), at, _new_id())).step

    def kept_plan(self, step: int) -> LoadingPlan:
        """Return the plan of a recent step, as long as the planner has it in memory; nothing is planned for it.

        Raises:
            SpecError: The step is not planned yet, or its plan is not in memory any more.
        """
        blob = self._ask(msg.GetPlan(_step("kept_plan", step), kept=True)).plan
        assert blob is not None, "a plan that is kept, or an error"
        return plan_from_bytes(blob)

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step, or None past the end; planning it now if need be."""
        blob = self._ask(msg.GetPlan(_step("plan_raw", step))).plan
        return None if blob is None else plan_from_bytes(blob)


class Service(RunningService):
    """A running data service. Close it, or use it as a context manager."""

    def __init__(
        self,
        runtime: InlineService | ServiceProcess,
        job: Job,
        options: Launch,
        door: MetricsServer | None = None,
        page: PageProcess | None = None,
    ) -> None:
        super().__init__(runtime.ask)
        self._runtime = runtime
        self._door, self._page = door, page
        self.job = job
        """What was launched."""
        self.options = options
        """How it was launched."""
        if door is not None:
            door.tell(runtime.status)
        if page is not None:
            page.start(runtime.address or "")
        self.scratch: str | None = None
        """A folder that goes when the service is closed."""
        self.mesh = options.mesh

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

    @property
    def dashboard(self) -> str | None:
        """Where a browser finds the live page, with the token of `dashboard_changes`; None where there is no page."""
        return None if self._page is None else self._page.url

    def __repr__(self) -> str:
        return f"Service(mesh={self.mesh}, address={self.address!r})"

    def client(self, rank: int = 0, step: int | None = None) -> Client:
        """Return the stream of one rank.

        Args:
            rank: The trainer's global rank in the mesh.
            step: Where to go on, as for `ol.connect`; by default where the service was launched.
        """
        return self._runtime.client(rank, step)

    def status(self) -> dict[str, Any]:
        """Return roles, positions, buffers, and the planned and realised mixture."""
        return self._runtime.status()

    def look_at(self, ranks: Collection[int]) -> None:
        """Read only what some ranks get of a step, to look at it: of a replay, or with `runtime="inline"`.

        `global_loss_tokens` of the steps that they get then counts only what was read.
        """
        from overlord.runtimes.launching.inline_service import InlineService  # with the readers

        if not isinstance(self._runtime, InlineService):
            raise SpecError(
                f"look_at: the runtime is {self.options.runtime!r}, and its ranks train with what they get; their "
                "label counts would be wrong. Use it with replay(), or with runtime='inline'."
            )
        self._runtime.look_at(ranks)

    def summary_buffer(self, step: int) -> Buffer | None:
        """Return what a strategy sees of a step: its draw with the metadata, the job's limits, the report."""
        from overlord.runtimes.launching.deployment import limits_of  # with the readers, which few launchers need

        plan = self.plan_raw(step)
        if plan is None:
            return None
        limits = limits_of(canonical(self.job), self.options.layout, plan.mesh)
        return Buffer(plan.draw, limits, lambda: plan.metrics or {})

    def close(self) -> None:
        """End the service; nothing of it is left behind."""
        try:
            self._runtime.close()
        finally:
            if self._door is not None:
                self._door.close()
            if self._page is not None:
                self._page.close()
            self._door = self._page = None
            if self.scratch is not None:
                remove_scratch(self.scratch)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@named_arguments
def launch(  # noqa: PLR0913 - the front door: everything has a default and a name
    job: Job | JobFile | str | os.PathLike[str],
    *,
    mesh: ClientPlaceTree | Mapping[str, Any] | str | None = None,
    strategy: Strategy | Mapping[str, Any] | str | None = None,
    runtime: Runtime | None = None,
    layout: Keys | Layout | Mapping[str, Any] | None = None,
    loader_do_plan: Callable[..., Any] | Hook | str | None = None,
    constructor_do_plan: Callable[..., Any] | Hook | str | None = None,
    placement: Placement | None = None,
    prefetch: int | None = None,
    shadows: bool | Literal["auto"] | Collection[str] | None = None,
    heartbeat: float | None = None,
    loaders_per_source: int | Literal["auto"] | Mapping[str, int] | None = None,
    scaling: bool | Scaling | None = None,
    profile: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    address: str | None = None,
    ranks_per_host: int | None = None,
    loader_hosts: int | Literal["per_source"] | None = None,
    budget: int | str | Budget | Mapping[str, Any] | None = None,
    store: str | os.PathLike[str] | None = None,
    store_options: StorageOptions | None = None,
    source_options: Mapping[str, Mapping[str, Any]] | None = None,
    keep: int | None = None,
    cache: str | os.PathLike[str] = DEFAULT_CACHE,
    cache_bytes: int | str | None = None,
    state: Mapping[str, Any] | Literal["latest"] | int | None = None,
    reconcile: Reconcile = "strict",
    skip_steps: int = 0,
    on_source_failure: OnSourceFailure | None = None,
    metrics: int | str | None = None,
    dashboard: int | None = None,
    dashboard_changes: bool | None = None,
    progress: Progress | None = None,
) -> Service:
    r"""Start a service for a job and return it; everything that can be checked is checked first.

    The `launch` section of a job file gives the defaults of all arguments that it has keys for; arguments that are
    given here override it. For a job built in Python, or a file without the key, the default is the one named below.

    Args:
        job: What to read and how to mix it: an `ol.Job`, or the path of a job file (YAML, JSON or Python).
        mesh: The trainer's mesh, also as "dp=2,tp=4" or {"dp": 2, "tp": 4} (default: one rank).
        strategy: Where samples go: one of `ol.strategies`, a function (buffer, tree) -> plan, or a name such as
            "packed" or {"packed": {"method": "best_fit"}}, as in a job file (default: "backbone_balance").
        runtime: "local" (default): one service process, trainers attach from any process of this host.
            "ray": the roles spread over the hosts of a Ray cluster, trainers attach on their own host and need no ray.
            "inline": everything in this process, single-threaded, for tests and debugging.
        layout: The keys and shapes of a batch: "hf" (default; what Hugging Face models take), "megatron", "torchtitan",
            or an `ol.Layout` (or a mapping of its fields) with padding, slicing, alignment and positions.
        loader_do_plan: A function (or a class, or "module:name") of `ol.hooks.LoaderPart`, which every SourceLoader
            passes its planned samples through: it returns other tokens and loss masks of the same lengths. It has a
            `version`, which states keep (default: samples stay as they are).
        constructor_do_plan: The same of `ol.hooks.MicrobatchPart`, which every DataConstructor passes the segments of a
            microbatch through: it returns other tokens of the same lengths, and new columns of the batch.
        placement: Where images, clips and sounds are decoded: in the "loader", in the "constructor" (behind the
            hand-over), or "auto" (default), where fewer bytes travel. It never changes the stream.
        prefetch: Steps built ahead of each trainer (default: 2).
        shadows: Which sources have a shadow loader in another process, ready to take over: True, names of sources, or
            "auto" for those whose loader takes long to come back (default: none).
        heartbeat: Seconds that nothing may be heard of a role before it is taken for dead and replaced; of the service
            process, twice as long (default: 5).
        loaders_per_source: Workers of each source that read and transform ahead: a number, numbers by name, or "auto"
            for what `profile` asks for (default: 1). They share the groups of its order.
        scaling: Whether workers come and go with the mixture while the service runs; `ol.Scaling` says when (default:
            they do not).
        profile: What sources cost, as `overlord profile` measured it; kept up to date by the service (default: the one
            beside the job file, where `loaders_per_source` or `scaling` needs one).
        threads: Cores for reading, tokenizing and decoding: processes; with 1, and for images with 2 on a host of two
            cores, threads of the service (default: the cores that this process may use, less one for each rank, but
            at least half of them; of each loader host of a cluster: 2).
        address: The Ray cluster to attach to, such as "auto" or "10.0.0.1:6379" (default: one is started here).
        ranks_per_host: Trainer processes of one host of the cluster, as torchrun's --nproc-per-node (default: what the
            hosts' accelerators say, else all on this host).
        loader_hosts: Processes that the sources are dealt to, or "per_source" (default: of a cluster, one for each
            trainer host; of "local", none: loaders are threads of the service, unless there are shadows).
        budget: Bytes of samples and views held ahead of the trainers (default: 512 MiB); `ol.Budget` also bounds
            workers and memory.
        store: Folder for the journal and snapshots, or a URL such as "s3://bucket/run" (default: a temporary folder).
        store_options: Credentials and the like of a store that is a URL, as a Source's storage_options.
        source_options: Storage options by the name of a source, beside those that it has: for credentials that no job
            file should hold, and for those of sources that were added while a run went on, which no store and no
            state holds. Those of its join stand under "join".
        keep: Steps behind the newest snapshot that stay resumable with `state=STEP` (default: 256).
        cache: Folder for the indices of files, and for what is kept of remote files.
        cache_bytes: Bytes of remote files that are kept there, such as "200GiB", for all services of a host together;
            an epoch that fits is read from the store once. 0 keeps none (default: 4 GiB).
        state: What `client.state_dict()` returned; "latest" takes the newest snapshot of the store, a number the state
            before that step of the store's newest run.
        reconcile: What of the job's sources may differ from the state's: nothing ("strict"); there may be more, which
            begin at their start ("allow_add"); there may also be fewer ("allow_add_remove"). Their weights may then
            differ too.
        skip_steps: Global batches to pass over before the first step, as after a loss spike.
        on_source_failure: What becomes of a source that cannot be read any more: "stop" (default) ends the run; "park"
            goes on without it until it can be read again; "reweight" goes on without it until
            `service.return_source`.
        metrics: A port of this host, or "HOST:PORT", where this process answers Prometheus (0: a free port).
        dashboard: A port of this host, where a process beside the service shows it as a live page until the service is
            closed (0: a free port; `service.dashboard` says which).
        dashboard_changes: Whether that page may change mixture, sources and mesh; `service.dashboard` then ends in the
            token that a browser needs for it (default: the page only shows).
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
    given = {name: value for name, value in locals().items() if name != "job"}
    refuse_torch_workers("launch")
    loaded = _loaded(job)
    options, job = loaded.call(given), loaded.job
    told = service_options(job, options)
    few = few_samples(job, options.mesh)
    if few is not None:
        logger.warning("%s", few)
    door, page = None, None
    try:  # both take their ports before anything runs
        door = None if options.metrics is None else _open_door(options.metrics, options.runtime)
        page = _open_page(options)
        with loaded.located():
            started = _start(options.runtime, job, told, options.progress)
        return Service(started, job, options, door, page)
    except BaseException:
        for one in (door, page):
            if one is not None:
                one.close()
        raise


def replay(
    store: str | os.PathLike[str],
    step: int,
    job: Job | JobFile | str | os.PathLike[str] | None = None,
    *,
    mesh: ClientPlaceTree | Mapping[str, Any] | str | None = None,
    strategy: Strategy | Mapping[str, Any] | str | None = None,
    layout: Layout | Mapping[str, Any] | str | None = None,
    loader_do_plan: Callable[..., Any] | Hook | str | None = None,
    constructor_do_plan: Callable[..., Any] | Hook | str | None = None,
    store_options: StorageOptions | None = None,
    source_options: Mapping[str, Mapping[str, Any]] | None = None,
    cache: str | os.PathLike[str] = DEFAULT_CACHE,
) -> Service:
    """Return a service that hands out a step of a stored run again, and the steps behind it; the store is only read.

    Steps behind it have the reports and the live changes (mixtures, sources, meshes) that the run had for them.

    The run may still go on: what it has planned so far can be looked at. Everything runs in this process.

    Args:
        store: The store of the run, as `launch` was given it.
        step: The first step to hand out: one that the run has planned, and that the store still keeps.
        job: The job of the run. The store has it (default), unless it holds Python functions; credentials of sources
            are never in a store.
        mesh: The mesh that the run had at this step (default: that of its launch, or of its last reshard). A plan that
            differs from the run's is refused.
        strategy: The strategy of the run (default: that of its launch; of one with Python functions, the job file's).
        layout: The layout of the run (default: the same).
        loader_do_plan: The hook of the run (default: that of the job file; no code is taken from a store).
        constructor_do_plan: The same.
        store_options: Credentials and the like of a store that is a URL.
        source_options: Credentials and the like of sources by name, as for `launch`.
        cache: Folder for the indices of files.

    Raises:
        SpecError: for what the user got wrong.
        StateError: The store does not hold the step, or the job, mesh or strategy is not that of the run.
    """
    refuse_torch_workers("replay")
    path = store_path(store)
    if "://" not in path and not Path(path).is_dir():
        raise StateError(f"the store {path!r} is no folder; there is nothing to replay. Give the store of a run.")
    place = open_place(path, store_options)
    found = newest_lineage(place)
    if found is None:
        raise StateError(f"the store {path!r} holds no snapshot; there is nothing to replay. Give the store of a run.")
    number = _step("replay", step)
    kept = lineage_before(place, found, number)
    if number >= kept.reached:
        raise StateError(
            f"step {number} was asked for, and the store {path!r} holds the steps up to {kept.reached - 1} of its run "
            "(plans are written in groups while it goes on); there is nothing to replay. Give an earlier step."
        )
    # A copy of what is needed of the store goes on: a launch on the store itself would begin a lineage there.
    copied = scratch_folder()
    try:
        copy_lineages(place, open_place(copied))
        text = place.read(kept_job(kept))
        if job is None and text is None:
            raise SpecError(
                f"replay: the store {path!r} does not hold the job of its run, which has Python functions or is of an "
                "older version; nothing could be read. Give job=, and the mesh, strategy and layout of the run."
            )
        of_store = None if text is None else read_kept_job(text)
        loaded = _loaded(of_store if job is None else job)
        given = {
            "mesh": _resharded(kept, number) if mesh is None else mesh, "strategy": strategy, "layout": layout,
            "loader_do_plan": loader_do_plan, "constructor_do_plan": constructor_do_plan,
        }  # fmt: skip
        if of_store is not None:
            hooks = {kind for kind in HOOK_KINDS if given[kind] or getattr(loaded.launch, kind)}
            refuse_kept_code(of_store, hooks if job is None else {*hooks, *(set(of_store.code) - set(HOOK_KINDS))})
            for name in ("mesh", "strategy", "layout"):  # as the run was launched, not as a job file says
                given[name] = getattr(of_store.launch, name) if given[name] is None else given[name]
        options = loaded.call(given)
        of_run = {name: getattr(options, name) for name in given}
        of_run |= {"store": copied, "state": number, "cache": cache, "source_options": source_options}
        options = loaded.call(of_run | {"runtime": "inline"})
        told = dataclasses.replace(service_options(loaded.job, options), replays=True)
        from overlord.runtimes.launching.tokenizer_trial import try_tokenizer  # with libraries that no launcher needs

        try_tokenizer(loaded.job, told.cache)  # the store names it, and all roles run in this process
        service = Service(_start("inline", loaded.job, told, None), loaded.job, options)
        service.scratch = copied
    except BaseException as error:
        remove_scratch(copied)
        if isinstance(error, OverlordError):
            error.args = (str(error).replace(str(copied), path),)  # the caller knows the store, not its copy
        raise
    planned = {record["step"]: record.get("plan") for record in kept.records if record["kind"] == "plan"}
    made = service.plan_raw(number)
    if made is None or planned.get(number, made.digest) != made.digest:
        service.close()
        raise StateError(
            f"step {number} came out with another plan than the run in the store {path!r} had; it would not be what "
            "was trained on. Give the job, mesh, strategy and layout that the run had at this step."
        )
    return service


@reads_records
def _resharded(kept: FoundLineage, step: int) -> ClientPlaceTree | None:
    """Return the mesh that a run was given while it ran and had at a step; None where that is the one of its launch."""
    told = with_changes(kept.snapshots[0].state["changes"], changes_of(kept.records))
    meshes = [(change["at"], change["mesh"]) for change in told if change["kind"] == "mesh" and change["at"] <= step]
    return ClientPlaceTree.from_sizes(sorted(meshes, key=operator.itemgetter(0))[-1][1]) if meshes else None


def service_options(job: Job, options: Launch) -> ServiceOptions:
    """Return what the runtimes are told of a launch: sizes, places and paths follow from its options.

    Raises:
        SpecError: An option does not fit the job or its runtime.
        StateError: The state is damaged, or is to be found in a store that is not given.
    """
    if options.scaling and options.runtime == "inline":
        raise SpecError(
            "launch: scaling is given and runtime is 'inline', where the caller does all the work and no worker comes "
            "or goes; it would have no effect. Use runtime='local' or 'ray', or leave scaling out."
        )
    if job.tokenizer is not None and options.runtime != "ray":  # whose hosts may have other files
        tokenizer_file(job.tokenizer)
    return ServiceOptions(
        mesh=options.mesh,
        prefetch=options.prefetch,
        **sizing_of(job, options),
        heartbeat_s=options.heartbeat,
        store=None if options.store is None else store_path(options.store),
        store_options=options.store_options,
        source_options=options.source_options,
        job_text=None if options.store is None else _job_text(job, options),
        keep=options.keep,
        cache=str(Path(options.cache).expanduser().absolute()),
        cache_bytes=options.cache_bytes,
        state=_check_state(options.state, options.store),
        latest=isinstance(options.state, str),
        before_step=options.state if isinstance(options.state, int) else None,
        strategy=options.strategy,
        skip_steps=options.skip_steps,
        layout=options.layout,
        loader_do_plan=options.loader_do_plan,
        constructor_do_plan=options.constructor_do_plan,
        placement=options.placement,
        reconcile=options.reconcile,
        on_source_failure=options.on_source_failure,
        service=uuid.uuid4().hex,
    )


def _job_text(job: Job, options: Launch) -> str | None:
    """Return a job as a file that `replay` can read, without credentials; None where it holds Python functions."""
    here, public = Path.cwd(), [without_secrets(source) for source in job.sources]
    launched = LaunchOptions(
        mesh=options.mesh, strategy=options.strategy, layout=options.layout,
        loader_do_plan=options.loader_do_plan, constructor_do_plan=options.constructor_do_plan,
    )  # fmt: skip
    try:
        return dump_job_yaml(resolved_job(job.replace(sources=public), here), launched)
    except SpecError:
        return None


def _new_id() -> str:
    """Return the id of a change: it is made once, however often the request is sent."""
    return uuid.uuid4().hex


def _open_door(metrics: int | str, runtime: str) -> MetricsServer:
    if runtime == "inline":
        raise SpecError(
            f"launch: metrics is {metrics!r:.80} and runtime is 'inline', where nothing runs beside the caller, so "
            "requests would get no answer. Use runtime='local' or 'ray', or leave metrics out."
        )
    from overlord.runtimes.autoscaling.metrics import MetricsServer  # Prometheus' client is loaded only here

    return MetricsServer(metrics)


def _open_page(options: Launch) -> PageProcess | None:
    if options.dashboard is None:
        return None
    if options.runtime == "inline":
        raise SpecError(
            f"launch: dashboard is {options.dashboard} and runtime is 'inline', where nothing runs beside the caller, "
            "so the page would get no answer. Use runtime='local' or 'ray', or leave dashboard out."
        )
    return PageProcess(options.dashboard, changes=options.dashboard_changes)


def _start(
    runtime: str, job: Job, options: ServiceOptions, progress: Progress | None
) -> InlineService | ServiceProcess:
    if runtime == "inline":
        from overlord.runtimes.launching.inline_service import InlineService  # other launchers have no use for readers

        return InlineService(job, options, progress)
    if runtime == "ray":
        return ray_service(job, options, progress)
    return ServiceProcess(LOCAL_SERVICE, job, options, progress, environment=ONE_THREAD)


def _loaded(job: object) -> JobFile:
    if isinstance(job, JobFile):
        return job
    if isinstance(job, Job):
        return JobFile(job)
    if isinstance(job, (str, os.PathLike)):
        return load_job_file(cast("str | os.PathLike[str]", job))
    raise SpecError(
        f"launch: job is a {type(job).__name__}, not an ol.Job and not the path of a job file; there is nothing to "
        "read. Build one."
    )


def _step(what: str, step: int) -> int:
    if not is_whole(step, 0):
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


def _check_state(state: object, store: object) -> Mapping[str, Any] | None:
    """Return a state that was given; None where it is to be found in the store."""
    if isinstance(state, Mapping):
        check_seal(state)
        return state
    if state is None:
        return None
    if state != "latest" and not is_whole(state, 0):
        remedy = "Give what client.state_dict() returned, 'latest' or a step."
        raise StateError(f"state is {state!r:.80}; nothing could be resumed from it. {remedy}")
    if store is None:
        raise StateError(f"state={state!r} needs store=, where the snapshots are; none was given.")
    return None
