"""Every option of a launch, declared and checked once: the arguments of `ol.launch` and of the torch `DataLoader`, the
`launch` section of a job file, and the flags of the command line. Nothing here changes which samples are drawn.

It stands above `planning` and `scaling` and not in `job`, since it names strategies and `ol.Scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

import yaml
from pydantic import BeforeValidator, Field, PlainValidator, field_serializer, model_validator

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import Fault, Locate, conflict, did_you_mean, name_choices
from overlord.errors import SpecError
from overlord.job.hook_specs import HOOK_KINDS, AnyHook, Hook, search_beside
from overlord.job.layout_specs import (
    DEFAULT_CACHE,
    DEFAULT_CACHE_BYTES,
    DEFAULT_HEARTBEAT_S,
    Keys,
    Layout,
    OnSourceFailure,
    Placement,
    Runtime,
)
from overlord.job.plain_yaml import load_yaml
from overlord.job.reconcile import Reconcile
from overlord.job.spec_model import Spec, Word, as_bytes, as_number, below, one_of, real, whole
from overlord.planning.checking import Strategy
from overlord.planning.strategies import AnyStrategy, written_strategy
from overlord.scaling.autoscaler import Scaling

LoaderHosts = int | Literal["per_source"]
"""How many loader hosts a service has."""
Loaders = int | Literal["auto"] | dict[str, int]
"""Workers of each source: one number, numbers by name, or what its profile asks for."""
CLUSTER_KEYS = ("address", "ranks_per_host", "loader_hosts")
"""What only a cluster has; loader hosts also a service of several processes."""

_WORKERS = Annotated[int, Field(ge=1)]
_Mesh = dict[
    Literal["pp", "dp", "cp", "tp", "dp_replicate", "ep", "vpp", "microbatch_group", "order", "modules"],
    int | str | dict[str, dict[str, int | str] | str],
]


def mapping_or_name(value: object) -> object:
    """Return the mapping that a text such as "{hdp: {equal_counts: true}}" writes, or what was given."""
    if not isinstance(value, str):
        return value
    try:
        data = load_yaml(value)
    except yaml.YAMLError:
        data = value
    return cast("object", data) if isinstance(data, Mapping) else value


def _as_layout(value: object) -> object:
    value, known = mapping_or_name(value), get_args(Keys)
    if isinstance(value, (Layout, Mapping)):
        return value
    if not isinstance(value, str) or value not in known:
        raise Fault(
            f"expected {name_choices(known)}, or a mapping such as {{keys: hf, rows: padded}}; batches would have "
            f"unknown keys.{did_you_mean(value, known)}"
        )
    return {"keys": value}


def _as_tree(value: object) -> ClientPlaceTree:
    if not isinstance(value, (ClientPlaceTree, Mapping, str)):
        raise Fault("this must give the size of each axis, such as {dp: 2, tp: 2}; ranks would get no data")
    try:
        return ClientPlaceTree.of(cast("Mapping[str, Any] | str", value))
    except SpecError as error:
        raise Fault(str(error).removeprefix("mesh: "), show_value=False) from None


def _as_loaders(value: object) -> Loaders:
    if value == "auto":
        return "auto"
    if isinstance(value, Mapping):
        found: dict[str, int] = {}
        for name, count in cast("Mapping[str, object]", value).items():
            with below(name):
                found[name] = cast("int", _as_loaders("" if isinstance(count, (str, Mapping)) else count))
        return found
    number = as_number(value)
    if not isinstance(number, int) or number < 1:
        raise Fault("this must be a whole number of at least 1, auto, or numbers by source; it would not be read")
    return number


def _as_loader_hosts(value: object) -> LoaderHosts:
    number = as_number(value)
    if value == "per_source":
        return "per_source"
    if not isinstance(number, int) or number < 1:
        raise Fault("this must be a whole number of at least 1, or per_source; no process would read the sources")
    return number


_LoaderHosts = Annotated[
    LoaderHosts, PlainValidator(_as_loader_hosts, json_schema_input_type=_WORKERS | Literal["per_source"])
]


def _as_scaling(value: object) -> bool | Scaling:
    if not isinstance(value, (bool, Scaling)):
        raise Fault("this must be true, false or ol.Scaling(..); it would be unclear when workers come and go")
    return value


def _as_shadows(value: object) -> bool | Literal["auto"] | list[str]:
    if isinstance(value, bool):
        return value
    if value == "auto":
        return "auto"
    names = list(cast("list[object]", value)) if isinstance(value, (list, tuple, set, frozenset)) else [None]
    if not all(isinstance(name, str) and name for name in names):
        raise Fault("this must be true, false, auto or a list of source names; which sources have one is unclear")
    return cast("list[str]", names)


def _as_port(value: object) -> int | str:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise Fault("this is no address, where Prometheus could ask. Give a port such as 9400, or HOST:PORT")
    return value


def _as_budget(value: object) -> object:
    return value if isinstance(value, (Budget, Mapping)) else {"ahead": as_bytes(value)}


_NOTHING = "nothing could be loaded. Give 1 or more"
_Bytes = Annotated[int, whole(1, _NOTHING), BeforeValidator(as_bytes, json_schema_input_type=int | str)]


_CacheBytes = Annotated[
    int,
    whole(0, "no disk holds that. Give 0 to keep nothing"),
    BeforeValidator(as_bytes, json_schema_input_type=int | str),
]


_AHEAD_BYTES = 512 << 20
_AHEAD_OF_THREAD = 64 << 20


class Budget(Spec):
    """What a service may take of its hosts.

    Example:
        >>> [Budget(cpus=16, memory="8GiB").ahead_bytes(threads) >> 20 for threads in (2, 16)]
        [512, 1024]
        >>> Budget(cpus=0)
        Traceback (most recent call last):
        ...
        overlord.errors.SpecError: Budget: cpus is 0: this must be at least 1; nothing could be loaded. Give 1 or more.
    """

    ahead: _Bytes | None = None
    """Bytes of samples and views held ahead of the trainers; by default 512 MiB, or 64 MiB for each of the threads."""
    cpus: Annotated[int, whole(1, _NOTHING)] | None = None
    """Workers that all sources may have together; by default one for each core of this host."""
    memory: _Bytes | None = None
    """Bytes that the loaders may take: files and read buffers of all sources, and of the auto-partition its actors; by
    default there is no limit."""
    workers_per_source: Annotated[int, whole(1, _NOTHING)] | None = None
    """Workers that one source may have (the paper's w_src); by default as many as `cpus`."""
    workers_per_actor: Annotated[int, whole(1, _NOTHING)] | None = None
    """Workers that run at the same time in one loader host (the paper's w_actor); 8 by default."""
    memory_per_actor: _Bytes | None = None
    """Bytes that one actor of the auto-partition may take; by default only `memory` is a limit."""
    cluster_size: Annotated[int, whole(1, _NOTHING)] | None = None
    """Sources of a cluster in the auto-partition; 4 by default, as in the paper."""

    def ahead_bytes(self, threads: int) -> int:
        """Return how many bytes are held ahead with so many threads.

        By default more of them hold more, since they are given larger steps: 16 workers that decode images wait for
        plans where 512 MiB are three steps.
        """
        return self.ahead or max(_AHEAD_BYTES, _AHEAD_OF_THREAD * threads)


def profile_path(job: Path) -> Path:
    """Return where the profile of a job file is kept.

    Example:
        >>> profile_path(Path("jobs/vlm.yaml")).as_posix()
        'jobs/vlm.profile.json'
    """
    return job.with_name(f"{job.stem}.profile.json")


class LaunchOptions(Spec):
    """How a job is run: everything a job file may say that does not change which samples are drawn."""

    mesh: Annotated[ClientPlaceTree, PlainValidator(_as_tree, json_schema_input_type=_Mesh | str)] = ClientPlaceTree()
    """Sizes of the trainer's axes: pp, dp, cp, tp; also as text, such as dp=2,cp=2,tp=2."""
    strategy: Annotated[AnyStrategy, BeforeValidator(mapping_or_name)] | None = None
    """Where samples go: a name such as hdp, or {hdp: {equal_counts: true}}; backbone_balance by default."""
    layout: Annotated[Layout, BeforeValidator(_as_layout, json_schema_input_type=Layout | Keys)] = Layout()
    """Keys and shapes of a batch: hf, megatron or torchtitan, or {keys: hf, rows: padded}."""
    loader_do_plan: AnyHook | None = None
    """A function or class, as module:name, that every loader passes its planned samples through."""
    constructor_do_plan: AnyHook | None = None
    """A function or class, as module:name, that every constructor passes the segments of a microbatch through."""
    placement: Annotated[
        Placement, one_of(Placement, "it would be unclear where images, clips and sounds are decoded")
    ] = "auto"
    """Where images, clips and sounds are decoded: loader, constructor, or auto, where fewer bytes travel."""
    runtime: Annotated[Runtime, one_of(Runtime, "nothing could run")] = "local"
    """Where the roles run: local (a service process), ray (over the hosts of a cluster), inline (for tests)."""
    address: Word | None = None
    """Of ray: the cluster, auto or host:port; none starts one on this host."""
    ranks_per_host: Annotated[int, whole(1, "no host would have a trainer. Leave it out")] | None = None
    """Of ray: trainer processes of one host; by default what the hosts' accelerators say."""
    loader_hosts: _LoaderHosts | None = None
    """Processes that the sources are dealt to, or per_source; of ray by default one for each trainer host."""
    prefetch: Annotated[int, whole(1, "every step would wait for its data. Write 2 or more")] = 2
    """Steps built ahead of each trainer."""
    loaders_per_source: Annotated[
        Loaders, PlainValidator(_as_loaders, json_schema_input_type=_WORKERS | Literal["auto"] | dict[Word, _WORKERS])
    ] = 1
    """Workers of each source that work ahead: a number, numbers by source, or auto (by the profile)."""
    scaling: Annotated[bool | Scaling, PlainValidator(_as_scaling, json_schema_input_type=bool)] = False
    """Whether workers come and go with the mixture while the job runs."""
    profile: Word | None = None
    """File of what sources cost, as `overlord profile` writes it; by default the one beside the job."""
    budget: Annotated[Budget, BeforeValidator(_as_budget, json_schema_input_type=Budget | int | str)] | None = None
    """What a service may take: bytes held ahead, workers, memory of loaders."""
    threads: Annotated[int, whole(1, "nothing would be decoded. Leave it out")] | None = None
    """Cores for decoding and the like; by default the host's less the trainers', and 2 on ray."""
    cache_bytes: _CacheBytes = DEFAULT_CACHE_BYTES
    """Bytes of remote files kept in the cache folder of a host, for all of its services; 0 keeps none."""
    store: Word | None = None
    """Folder or URL for the journal and snapshots; without one, a temporary folder that goes at the end."""
    store_options: dict[str, str | int | float | bool] = Field(default={}, repr=False)
    """Of a store that is a URL: what its filesystem must know, as a source's storage_options."""
    source_options: dict[str, dict[str, Any]] = Field(default={}, repr=False)
    """Storage options by the name of a source, as its own; those of its join under join."""
    keep: Annotated[int, whole(1, "nothing could be resumed. Write 256 or more")] = 256
    """Steps that stay resumable in the store."""
    shadows: Annotated[
        bool | Literal["auto"] | list[str],
        PlainValidator(_as_shadows, json_schema_input_type=bool | Literal["auto"] | list[Word]),
    ] = False
    """Sources that have a shadow loader in another process: true, false, names, or auto."""
    heartbeat: Annotated[float, real(0.2, math.inf, "no role could answer that often. Give seconds")] = (
        DEFAULT_HEARTBEAT_S
    )
    """Seconds that nothing may be heard of a role before it is replaced."""
    on_source_failure: Annotated[
        OnSourceFailure, one_of(OnSourceFailure, "it would be unclear what to do when a source cannot be read")
    ] = "stop"
    """What becomes of a source that cannot be read any more: stop, park until it is back, or reweight for good."""
    metrics: Annotated[int | str, PlainValidator(_as_port, json_schema_input_type=int | Word)] | None = None
    """Where Prometheus may ask for metrics: a port of this host, or host:port."""
    dashboard: Annotated[int, whole(0, "no browser could find it. Write 9500, or 0 for any free port")] | None = None
    """Port of this host where the live page of the service is served; 0 takes any that is free."""
    dashboard_changes: bool = False
    """Let the live page change mixture, sources and mesh; the address of the page then ends in a token."""
    steps: Annotated[int, whole(1, "nothing would run. Leave it out for no limit")] | None = None
    """Steps that `overlord run` takes; the stream itself ends at the job's max_steps."""

    @model_validator(mode="after")
    def _page_of_changes(self) -> Self:
        if self.dashboard_changes and self.dashboard is None:
            raise conflict(
                "given without dashboard, so there is no page that could change anything. Give the port of one too: "
                "dashboard=9500",
                "dashboard_changes",
            )
        return self

    @model_validator(mode="after")
    def _cluster_of_ray(self) -> Self:
        for name in CLUSTER_KEYS:
            here = name == "loader_hosts" and self.runtime == "local"  # processes of this host
            if self.runtime != "ray" and getattr(self, name) is not None and not here:
                raise conflict(
                    f"{getattr(self, name)!r} is given and runtime is {self.runtime!r}, which has no cluster; it would "
                    "have no effect. Choose the runtime ray, or leave it out",
                    name,
                )
        return self

    def call(self, given: Mapping[str, Any], job: Path | None = None, locate: Locate | None = None) -> Launch:
        """Return all options of a launch: what the caller gave, else what this section says.

        An option that is None was not given. Where the caller chooses a runtime without a cluster instead of the one
        that stands here, what stands here of a cluster is for another run. A profile beside the job file is taken
        where workers are counted by one.

        Args:
            given: Arguments of `ol.launch`, in any form that a file may have too.
            job: The job file, beside which a profile may lie.
            locate: What to say before a message, by the option; "launch" by default.

        Raises:
            SpecError: An option is unknown or cannot be.
        """
        said = {name: getattr(self, name) for name in LaunchOptions.model_fields if name != "steps"}
        if given.get("runtime") not in (None, "ray", self.runtime):
            said |= dict.fromkeys(CLUSTER_KEYS)
        said |= {name: value for name, value in given.items() if value is not None}
        if job is not None:
            search_beside(job.parent, given)
        found = Launch.from_mapping(said, locate or (lambda _: "launch"))
        if job is not None and found.profile is None and (found.loaders_per_source == "auto" or found.scaling):
            beside = profile_path(job)
            if found.loaders_per_source == "auto" or beside.exists():
                found = found.model_copy(update={"profile": str(beside)})
        return found

    @field_serializer("mesh")
    def _mesh_sizes(self, tree: ClientPlaceTree) -> dict[str, Any]:
        return tree.sizes()

    @field_serializer("layout")
    def _short_layout(self, layout: Layout) -> object:
        changed = layout.model_dump(mode="json", exclude_defaults=True)
        return {"keys": layout.keys} | changed if set(changed) - {"keys"} else layout.keys

    @field_serializer(*HOOK_KINDS)
    def _hook_path(self, hook: Hook | None) -> str | None:
        return None if hook is None else hook.path

    @field_serializer("strategy")
    def _short_strategy(self, strategy: Strategy | None) -> object:
        return None if strategy is None else written_strategy(strategy)


class Launch(LaunchOptions):
    """All options of one launch: those of a job file, and those that only a call has."""

    cache: Word = DEFAULT_CACHE
    """Folder of indices and length sidecars."""
    state: Any = None
    """Where to go on: what state_dict() returned, "latest", or a step that the store keeps."""
    reconcile: Annotated[
        Reconcile, one_of(Reconcile, "it would be unclear which sources may differ from the state")
    ] = "strict"
    """Which sources of the job may differ from the state's."""
    skip_steps: Annotated[int, whole(0, "no step could be passed over. Give 0 or more")] = 0
    """Global batches to pass over before the first step."""
    progress: Callable[[str, int, int], None] | None = None
    """Called with (what, done, of) while sources are opened."""

    @classmethod
    def known_keys(cls) -> list[str]:
        """Return the names of the options; how long `overlord run` takes is none of them."""
        return [name for name in super().known_keys() if name != "steps"]
