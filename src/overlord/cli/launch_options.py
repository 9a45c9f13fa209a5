"""The `launch` section of a job file: how a job is run. Nothing in it changes the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, InstanceOf, field_serializer, model_validator

from overlord.cli.layout_options import AnyLayout, written_layout
from overlord.cli.sizing_options import BudgetOptions, LoadersField
from overlord.cli.strategy_specs import AnyStrategy, StrategyChoice
from overlord.core.launch_words import OnSourceFailure, Runtime
from overlord.core.layout_specs import Layout
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import Fault, conflict
from overlord.core.spec_model import Spec, Word, as_number, whole
from overlord.errors import SpecError
from overlord.roles.placement import Placement

LoaderHosts = int | Literal["per_source"]
"""How many loader hosts a cluster service has."""
CLUSTER_KEYS = ("address", "ranks_per_host", "loader_hosts")
"""What only a cluster has."""


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
    """Steps to run this time."""

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

    @field_serializer("mesh")
    def _mesh_sizes(self, tree: ClientPlaceTree) -> dict[str, Any]:
        return tree.sizes()

    @field_serializer("layout")
    def _short_layout(self, layout: Layout) -> object:
        return written_layout(layout)

    @field_serializer("strategy")
    def _short_strategy(self, strategy: StrategyChoice | None) -> object:
        return None if strategy is None else strategy.written()
