"""What a launch was told, beside the job: nothing of it changes which samples are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.job.layout_specs import DEFAULT_HEARTBEAT_S, Layout, OnSourceFailure, Placement
from overlord.job.reconcile import Reconcile
from overlord.job.specs import Job
from overlord.launch_spec import Launch
from overlord.planning.checking import Strategy
from overlord.roles.assignment import shadowed
from overlord.runtimes.launching.cluster_placement import ClusterOptions
from overlord.scaling.autoscaler import Scaling


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
    lanes: int = 64
    """Workers of all sources of a host that may run at the same time."""
    scaling: Scaling | None = None
    """When workers come and go while the service runs; None leaves them as they are."""
    memory: int = 1 << 62
    """Bytes that files and read buffers of all sources may take."""
    profile: str | None = None
    """The file of what sources cost; it is refreshed when the service ends."""
    budget_bytes: int = 512 << 20
    """Most bytes of payloads and views held ahead of the trainers."""
    threads: int = 2
    """Threads for decoding and other heavy work."""
    store: str | None = None
    """Where the journal and the snapshots go: a folder, or a URL of a filesystem that pyarrow knows."""
    store_options: Mapping[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])
    """Credentials and the like of a store that is a URL."""
    keep: int = 256
    """Steps behind the newest snapshot that stay resumable."""
    service: str = ""
    """The id of the service, the same over restarts; nobody else with another id may take its store while it lives."""
    recover: bool = False
    """Go on in the store's newest lineage after a crash, instead of beginning a lineage."""
    cache: str
    """Folder of indices and length sidecars."""
    state: Mapping[str, Any] | None = None
    latest: bool = False
    """Go on from the newest snapshot of the store."""
    before_step: int | None = None
    """Go on before this step of the store's newest lineage."""
    numbering: Mapping[str, Any] | None = None
    """A state that knows all sources by number, where the store does and roles are on several hosts."""
    strategy: Strategy | None = None
    """Where samples go; `backbone_balance()` by default."""
    skip_steps: int = 0
    """Global batches to pass over before the first step."""
    layout: Layout = field(default_factory=Layout)
    """Keys and shapes of the batches."""
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


# --------------------------------------------------------------------------------------------------------------
# What a launch says of processes and hosts, as the runtimes take it.


def shadows_of(job: Job, launch: Launch) -> tuple[bool, ...]:
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


def cluster_of(launch: Launch, shadows: tuple[bool, ...]) -> ClusterOptions | None:
    """Return the cluster of a launch; None where all roles are in one process."""
    apart = launch.runtime == "local" and (any(shadows) or launch.loader_hosts is not None)
    if launch.runtime != "ray" and not apart:
        return None
    return ClusterOptions(
        address=launch.address,
        ranks_per_host=launch.ranks_per_host,
        shadows=shadows,
        engine="ray" if launch.runtime == "ray" else "local",
        loader_hosts=launch.loader_hosts,
    )
