"""The options of a launch as the runtimes take them, and how they travel to the service with the job.

Nothing of them changes which samples are drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import cloudpickle

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.job.hook_specs import Hook
from overlord.job.layout_specs import DEFAULT_CACHE_BYTES, DEFAULT_HEARTBEAT_S, Layout, OnSourceFailure, Placement
from overlord.job.reconcile import Reconcile
from overlord.job.specs import Job, Source, Text
from overlord.launch_spec import LaunchOptions
from overlord.planning.checking import Strategy
from overlord.roles.assignment import shadowed
from overlord.runtimes.launching.cluster_placement import ClusterOptions
from overlord.runtimes.supervision.child import usable_cpus
from overlord.runtimes.transport.user_code import by_value
from overlord.scaling.autoscaler import Scaling
from overlord.scaling.partition import Actor
from overlord.version import VERSION

WORKERS_PER_ACTOR = 8
"""w_actor: workers that a loader host has room for, where a launch does not say."""

Progress = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, of how much)."""


KeepOptions = Callable[[str, Mapping[str, Any]], None]
"""Told the storage options of an added source that no store may hold, by its name: whatever starts the service again
must give them back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceOptions:
    """Everything of a launch that does not change which samples are drawn."""

    mesh: ClientPlaceTree
    """The mesh of the first step; while the service runs, `reshard` may give others."""
    prefetch: int = 2
    loaders_per_source: int = 1
    """Workers of each source that prepare its samples ahead; one works only when it is asked."""
    workers: Mapping[str, int] = field(default_factory=dict[str, int])
    """Workers of sources for which that number does not hold; they all work ahead."""
    worker_threads: int = 64
    """Workers of all sources of a host that may run at the same time."""
    workers_per_source: int | None = None
    """Workers that one source may have while workers come and go (w_src); None: as many as all together."""
    workers_per_actor: int = WORKERS_PER_ACTOR
    """Workers that one loader host has room for (w_actor)."""
    scaling: Scaling | None = None
    """When workers come and go while the service runs; None leaves them as they are."""
    memory: int = 1 << 62
    """Bytes that files and read buffers of all sources may take."""
    profile: str | None = None
    """The file of what sources cost; it is refreshed when the service ends."""
    budget_bytes: int = 512 << 20
    """Most bytes of payloads and views held ahead of the trainers."""
    threads: int = 2
    """Threads or process workers of a host for decoding and other heavy work."""
    store: str | None = None
    """Where the journal and the snapshots go: a folder, or a URL of a filesystem that pyarrow knows."""
    store_options: Mapping[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])
    """Credentials and the like of a store that is a URL."""
    source_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Storage options by source, beside those that the job has; of added sources, those that are not written down."""
    job_text: str | None = None
    """The job and its launch as a job file, for the store; None without a store, or if they hold Python functions."""
    keep: int = 256
    """Steps behind the newest snapshot that stay resumable."""
    service: str = ""
    """The id of the service, the same over restarts; no service with another id may take its store while it lives."""
    recover: bool = False
    """Go on in the store's newest lineage after a crash, instead of beginning a lineage."""
    cache: str
    """Folder of indices and length sidecars."""
    cache_bytes: int = DEFAULT_CACHE_BYTES
    """Bytes of remote files that are kept there."""
    state: Mapping[str, Any] | None = None
    latest: bool = False
    """Go on from the newest snapshot of the store."""
    before_step: int | None = None
    """Go on before this step of the store's newest lineage."""
    replays: bool = False
    """Go on with what the run was told behind `before_step`: its reports and changes, as it had them."""
    numbering: Mapping[str, Any] | None = None
    """A state that knows all sources by number, where the store does and roles are on several hosts."""
    strategy: Strategy | None = None
    """Where samples go; `backbone_balance()` by default."""
    skip_steps: int = 0
    """Global batches to pass over before the first step."""
    layout: Layout = field(default_factory=Layout)
    """Keys and shapes of the batches."""
    loader_do_plan: Hook | None = None
    """What loaders pass their planned samples through."""
    constructor_do_plan: Hook | None = None
    """What constructors pass the segments of a microbatch through."""
    placement: Placement = "auto"
    """Where media are decoded."""
    cluster: ClusterOptions | None = None
    """The cluster, of a service that runs on one, or in several processes."""
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    """How long nothing may be heard of a role before it is taken for dead; of the service process, twice as long."""
    reconcile: Reconcile = "strict"
    """What of the job's sources may differ from the state's."""
    on_source_failure: OnSourceFailure = "stop"
    """What happens to a source that cannot be read any more."""

    @property
    def writes_to(self) -> list[str]:
        """The folders of this host in which the service writes."""
        stores = [self.store] if self.store is not None and "://" not in self.store else []
        return [*stores, self.cache, tempfile.gettempdir()]

    @property
    def pooled(self) -> bool:
        """Whether decoding and all else that computes run in process workers, and not in threads of the service.

        On two cores, two threads that decode seldom wait for each other's interpreter lock, and need not hand rows to
        another process; with more cores the service itself has one beside them.
        """
        return self.threads > (1 if usable_cpus() > 2 else 2)

    def pools(self, source: Source) -> bool:
        """Whether the rows of a source are measured in process workers.

        Texts are, also on two cores: a tokenizer spends a third of its time in malloc, where its threads wait for each
        other.
        """
        tokenizes = isinstance(source.sample, Text) and not source.sample.tokenized
        return (self.threads > 1 and tokenizes) or self.pooled  # in this order: the second reads files of the kernel


# --------------------------------------------------------------------------------------------------------------
# What a launch says of processes and hosts, as the runtimes take it.


def shadows_of(job: Job, launch: LaunchOptions) -> tuple[bool, ...]:
    """Return which sources have a shadow.

    Raises:
        SpecError: for a name that is no source, or a runtime that has no place for them.
    """
    wanted = shadowed(job.sources, launch.shadows)
    if any(wanted) and launch.runtime == "inline":
        raise SpecError(
            "launch: shadows are given and runtime is 'inline', which has one process and no place for them; they "
            "would have no effect. Use runtime='local' or 'ray', or leave shadows out."
        )
    return wanted


def cluster_of(
    launch: LaunchOptions, shadows: tuple[bool, ...], actors: tuple[Actor, ...] = ()
) -> ClusterOptions | None:
    """Return the cluster of a launch; None where all roles are in one process.

    Args:
        launch: The launch.
        shadows: Which sources have a shadow.
        actors: The loader hosts of the auto-partition; a single one of a local launch is the service process itself.
    """
    apart = any(shadows) or launch.loader_hosts is not None or len(actors) > 1
    if launch.runtime == "inline" or (launch.runtime == "local" and not apart):
        return None
    return ClusterOptions(
        address=launch.address,
        ranks_per_host=launch.ranks_per_host,
        shadows=shadows,
        engine="ray" if launch.runtime == "ray" else "local",
        loader_hosts=launch.loader_hosts,
        actors=actors,
        threads=launch.threads if actors else None,
    )


# --------------------------------------------------------------------------------------------------------------
# The hand-over from a launcher to its service and its roles: a checked head, then the job and the options.
#
# The body is a pickle, because the user's own functions travel in it. Records of overlord are pickled by the names of
# their fields: the default of a slotted dataclass is by position, and two processes that imported different code would
# shift every option silently. The head names the version and a digest of all field names, and is compared before the
# body is read.


FORMAT = 1
"""The layout of the bytes: one line of JSON, then the body."""
MAX_HEAD = 1024


def few_samples(job: Job, mesh: ClientPlaceTree) -> str | None:
    """Say that a step has fewer samples than there are data-parallel ranks; None where it has enough."""
    samples, dp = job.batch.global_samples, mesh.dp
    if samples is None or samples >= dp:
        return None
    return (
        f"A step has global_samples={samples} for dp={dp} ranks: at least {dp - samples} of them get dummies and wait "
        f"for the others (an imbalance of up to {dp / samples:.2f}x), whatever the strategy. Give global_samples={dp} "
        "or more, or a mesh with a smaller dp."
    )


def pack(job: Job, options: ServiceOptions) -> bytes:
    """Return the bytes that a process of the same code reads with `unpack`.

    Raises:
        SpecError: when a function or object of the user's cannot be pickled.
    """
    try:
        body = by_value((job, options), _Pickler)
    except Exception as error:  # whatever a user's object raises when it is pickled
        raise SpecError(
            f"the job cannot be sent to the service process ({type(error).__name__}: {error}); nothing could run. "
            "Let functions (Custom, strategy, learn, hooks) hold only what pickles (open files and locks do not), or "
            "use runtime='inline'."
        ) from error
    return json.dumps(_head()).encode() + b"\n" + body


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the user's functions by value, and records of overlord by the names of their fields."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith("overlord."):
            return _record, (kind, {field.name: getattr(obj, field.name) for field in dataclasses.fields(kind)})
        return super().reducer_override(obj)


def _record(kind: type, named: dict[str, Any]) -> Any:
    made: Any = object.__new__(kind)
    for name, value in named.items():
        object.__setattr__(made, name, value)
    return made


def unpack(bundle: bytes) -> tuple[Job, ServiceOptions]:
    """Read what the launching process packed.

    Raises:
        SpecError: when the launching process runs other code than this one, or a module of the user's is missing here.
    """
    head, line_end, body = bytes(bundle).partition(b"\n")
    try:
        theirs = json.loads(head) if line_end and len(head) <= MAX_HEAD else {}
    except ValueError:
        theirs = {}
    ours = _head()
    if theirs != ours:
        raise SpecError(
            f"the launcher runs overlord {_spelled(theirs)}, this process overlord {_spelled(ours)}; options could be "
            "misread. Install the same version on all hosts, and restart what imported an older one."
        )
    try:
        return cast(
            "tuple[Job, ServiceOptions]", cloudpickle.loads(body)
        )  # from the launching process to its own roles
    except (ImportError, AttributeError) as error:  # a function is pickled by the name of its module
        raise SpecError(
            f"the functions of the job (Custom, strategy, learn, hooks) cannot be loaded in the service process "
            f"({type(error).__name__}: {error}); nothing could run. Define them in the script that launches, or in a "
            "module that can be imported from its sys.path and is not changed while the job runs."
        ) from error


def _head() -> dict[str, Any]:
    return {"bundle": FORMAT, "version": VERSION, "fields": _fields_digest()}


def _spelled(head: Any) -> str:
    if not isinstance(head, dict) or "version" not in head:
        return "of an unknown version"
    return f"{head['version']} (hand-over {head.get('bundle')}, fields {str(head.get('fields'))[:8]})"


@functools.cache
def _fields_digest() -> str:
    """Digest the names and the order of all fields that travel."""
    plain = [ServiceOptions, ClusterOptions, Actor, Scaling, ClientPlaceTree, Hook]
    names = [f"{kind.__name__}.{field.name}" for kind in plain for field in dataclasses.fields(kind)]
    names += [f"{kind.__name__}.{name}" for kind in (Job, Source, Layout) for name in kind.model_fields]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
