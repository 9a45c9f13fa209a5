"""The `launch` section of a job file: how a job is run. Nothing in it changes the stream.

`ol.launch` takes its defaults from here too, and the command line's flags override it by the same rule
(`LaunchOptions.arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BeforeValidator, Field, InstanceOf, field_serializer, model_validator

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import Fault, conflict, did_you_mean, name_choices
from overlord.errors import SpecError
from overlord.job.launch_words import OnSourceFailure, Placement, Runtime
from overlord.job.layout_specs import Keys, Layout
from overlord.job.spec_model import Spec, Word, as_bytes, as_number, whole
from overlord.planning.cost_specs import mapping_or_name
from overlord.planning.strategy_specs import AnyStrategy, StrategyChoice
from overlord.scaling.source_costs import AHEAD_BYTES, Budget

LoaderHosts = int | Literal["per_source"]
"""How many loader hosts a cluster service has."""
FileLoaders = int | Literal["auto"] | dict[Word, Annotated[int, Field(ge=1)]]
"""Workers of each source, as a file says it."""
Bytes = Annotated[int, BeforeValidator(as_bytes, json_schema_input_type=int | str)]
CLUSTER_KEYS = ("address", "ranks_per_host", "loader_hosts")
"""What only a cluster has."""


def as_layout(value: object) -> object:
    """Return a layout, or the mapping of its fields, of what a file or a command line writes.

    Raises:
        Fault: There is no such layout.
    """
    if isinstance(value, (Layout, Mapping)):
        return value
    known = get_args(Keys)
    if not isinstance(value, str) or value not in known:
        raise Fault(
            f"expected {name_choices(known)}, or a mapping such as {{keys: hf, rows: padded}}; batches would have "
            f"unknown keys.{did_you_mean(value, known)}"
        )
    return {"keys": value}


AnyLayout = Annotated[Layout, BeforeValidator(as_layout, json_schema_input_type=Layout | Keys)]
"""A layout in any form that a file may hold."""


def as_loaders(value: object) -> object:
    """Return workers of each source, as a file or a command line writes them.

    Raises:
        Fault: It is neither a number, nor auto, nor numbers by name.

    Example:
        >>> as_loaders("3"), as_loaders("auto"), as_loaders({"web": 2})
        (3, 'auto', {'web': 2})
    """
    if value == "auto" or isinstance(value, dict):
        return value
    number = as_number(value)
    if not isinstance(number, int) or isinstance(value, bool) or number < 1:
        raise Fault("this must be a whole number of at least 1, auto, or numbers by source; nobody would read it")
    return number


LoadersField = Annotated[
    FileLoaders,
    BeforeValidator(
        as_loaders,
        json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["auto"] | dict[Word, Annotated[int, Field(ge=1)]],
    ),
]


class BudgetOptions(Spec):
    """What a service may take of its hosts."""

    ahead: Bytes = AHEAD_BYTES
    """Bytes of samples and views held ahead of the trainers."""
    cpus: Annotated[int, whole(1, "nobody would work. Leave it out")] | None = None
    """Workers that all sources may have together; by default one for each core."""
    memory: Bytes | None = None
    """Bytes that the files and read buffers of all sources may take."""

    def budget(self) -> Budget:
        """Return it as `launch` takes it."""
        return Budget(ahead=self.ahead, cpus=self.cpus, memory=self.memory)


def profile_path(job: Path) -> Path:
    """Return where the profile of a job file is kept.

    Example:
        >>> profile_path(Path("jobs/vlm.yaml")).as_posix()
        'jobs/vlm.profile.json'
    """
    return job.with_name(f"{job.stem}.profile.json")


def _as_tree(value: object) -> object:
    if isinstance(value, ClientPlaceTree):
        return value
    try:
        if isinstance(value, str):
            return ClientPlaceTree.parse(value)
        if isinstance(value, Mapping):
            return ClientPlaceTree.from_sizes(cast("Mapping[str, Any]", value))
    except SpecError as error:
        raise Fault(str(error).removeprefix("mesh: "), show_value=False) from None
    raise Fault("this must give the size of each axis, such as {dp: 2, tp: 2}; ranks would get no data")


def as_loader_hosts(value: object) -> LoaderHosts:
    """Return a number of loader hosts, as a file or a command line writes it.

    Raises:
        Fault: It is neither a number nor per_source.

    Example:
        >>> as_loader_hosts("3"), as_loader_hosts("per_source")
        (3, 'per_source')
    """
    number = as_number(value)
    if value == "per_source":
        return "per_source"
    if not isinstance(number, int) or number < 1:
        raise Fault("this must be a whole number of at least 1, or per_source; no process would read the sources")
    return number


_Mesh = dict[
    Literal["pp", "dp", "cp", "tp", "dp_replicate", "ep", "vpp", "microbatch_group", "order", "modules"],
    int | str | dict[str, dict[str, int | str] | str],
]


class LaunchOptions(Spec):
    """How a job is run: everything a job file may say that does not change the stream."""

    mesh: Annotated[
        InstanceOf[ClientPlaceTree],
        BeforeValidator(_as_tree, json_schema_input_type=_Mesh | str),
    ] = ClientPlaceTree()
    """Sizes of the trainer's axes: pp, dp, cp, tp."""
    strategy: AnyStrategy | None = None
    """Where samples go: a strategy's name, or {name: {options}}; backbone_balance by default."""
    layout: AnyLayout = Layout()
    """Keys and shapes of a batch: the name of whoever takes it (hf, megatron, torchtitan), or {keys: hf, ..}."""
    placement: Placement = "auto"
    """Where images, clips and sounds are decoded: loader, constructor, or auto, where fewer bytes travel."""
    runtime: Runtime = "local"
    """Where the roles run: local (a service process), ray (over the hosts of a cluster), inline (for tests)."""
    address: Word | None = None
    """Of ray: the cluster, auto or host:port; none starts one on this host."""
    ranks_per_host: Annotated[int, whole(1, "no host would have a trainer. Leave it out")] | None = None
    """Of ray: trainer processes of one host; by default what the hosts' accelerators say."""
    loader_hosts: (
        Annotated[
            LoaderHosts,
            BeforeValidator(
                as_loader_hosts, json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["per_source"]
            ),
        ]
        | None
    ) = None
    """Processes that the sources are dealt to, or per_source; of ray by default one for each trainer host."""
    prefetch: Annotated[int, whole(1, "every step would wait for its data. Write 2 or more")] = 2
    """Steps a client asks ahead."""
    loaders_per_source: LoadersField = 1
    """Workers of each source that work ahead: a number, numbers by source, or auto (by the profile)."""
    scaling: bool = False
    """Whether workers come and go with the mixture while the job runs."""
    profile: Word | None = None
    """File of what sources cost, as `overlord profile` writes it; by default the one beside the job."""
    budget: BudgetOptions | None = None
    """What a service may take: bytes held ahead, workers, memory of loaders."""
    threads: Annotated[int, whole(1, "nothing would be decoded. Leave it out")] | None = None
    """Threads for decoding; by default one per core, and 2 for each loader host of ray."""
    store: Word | None = None
    """Folder or URL for the journal and snapshots; none keeps none."""
    store_options: dict[str, str | int | float | bool] = {}  # noqa: RUF012 - pydantic copies a field's default
    """Of a store that is a URL: what its filesystem must know, as a source's storage_options."""
    keep: Annotated[int, whole(1, "nothing could be resumed. Write 256 or more")] = 256
    """Steps that stay resumable in the store."""
    shadows: bool | Literal["auto"] | list[Word] = False
    """Sources that have a shadow loader in another process: true, false, names, or auto."""
    heartbeat: Annotated[float, Field(ge=0.2)] = 5.0
    """Seconds that nothing may be heard of a role before it is replaced."""
    on_source_failure: OnSourceFailure = "stop"
    """What becomes of a source that cannot be read any more: stop, park until it is back, or reweight for good."""
    metrics: int | Word | None = None
    """Where Prometheus may ask for metrics: a port of this host, or host:port."""
    steps: Annotated[int, whole(1, "nothing would run. Leave it out for no limit")] | None = None
    """Steps that `overlord run` takes; the stream itself ends at the job's max_steps."""

    @model_validator(mode="after")
    def _cluster_of_ray(self) -> Self:
        for name in CLUSTER_KEYS:
            here = name == "loader_hosts" and self.runtime == "local"  # processes of this host
            if self.runtime != "ray" and getattr(self, name) is not None and not here:
                raise conflict(
                    f"{getattr(self, name)!r} is given and runtime is {self.runtime!r}, which has no cluster; it would "
                    "have no effect. Write runtime: ray (--runtime local still tries the job here)",
                    name,
                )
        return self

    def arguments(self, given: Mapping[str, Any], job: Path | None = None) -> dict[str, Any]:
        """Return the arguments of `launch`: what was given by the caller, else what this section says.

        An argument that is None was not given. Where the caller chooses a runtime without a cluster instead of the
        one that stands here, what stands here of a cluster is for another run. A profile beside the job file is taken
        where workers are counted by one.

        Args:
            given: Arguments of `ol.launch`; mesh, strategy and layout may be text or mappings, as in a file.
            job: The job file, beside which a profile may lie.

        Raises:
            SpecError: for a mesh, strategy or layout that cannot be.
        """
        found = {name: getattr(self, name) for name in type(self).model_fields if name != "steps"}
        found["budget"] = (self.budget or BudgetOptions()).budget()
        if given.get("runtime") not in (None, "ray", self.runtime):
            found |= dict.fromkeys(CLUSTER_KEYS)
        found |= {name: _as_written(name, value) for name, value in given.items() if value is not None}
        if isinstance(found["strategy"], StrategyChoice):
            found["strategy"] = found["strategy"].build()
        if job is not None and found["profile"] is None and (found["loaders_per_source"] == "auto" or found["scaling"]):
            beside = profile_path(job)
            if found["loaders_per_source"] == "auto" or beside.exists():
                found["profile"] = str(beside)
        return found

    @field_serializer("mesh")
    def _mesh_sizes(self, tree: ClientPlaceTree) -> dict[str, Any]:
        return tree.sizes()

    @field_serializer("layout")
    def _short_layout(self, layout: Layout) -> object:
        changed = layout.model_dump(mode="json", exclude_defaults=True)
        return {"keys": layout.keys} | changed if set(changed) - {"keys"} else layout.keys

    @field_serializer("strategy")
    def _short_strategy(self, strategy: StrategyChoice | None) -> object:
        return None if strategy is None else strategy.written()


def _as_written(name: str, value: object) -> object:
    """Return an argument of `launch` as its own type, where it is text or a mapping as a file has it."""
    if name not in ("mesh", "strategy", "layout") or not isinstance(value, (str, Mapping)):
        return value
    given = mapping_or_name(value) if isinstance(value, str) and name != "mesh" else value
    return getattr(LaunchOptions.from_mapping({name: given}, lambda _: "launch"), name)
