"""What `launch` is told of processes and hosts: checked, and as the runtimes take it."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from overlord.core.spec_errors import is_whole
from overlord.errors import SpecError
from overlord.job.specs import Job
from overlord.roles.assignment import shadowed
from overlord.runtimes.cluster_placement import ClusterOptions


def shadows_of(job: Job, shadows: bool | str | Collection[str], runtime: str) -> tuple[bool, ...]:
    """Return which sources have a shadow.

    Raises:
        SpecError: for what cannot be.
    """
    named = isinstance(shadows, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in shadows)
    if not isinstance(shadows, bool) and shadows != "auto" and not named:
        raise SpecError(
            f"launch: shadows is {shadows!r:.80}; which sources have one is unclear. Use True, False, 'auto' or "
            "a list of source names."
        )
    wanted = shadowed(job.sources, cast("bool | str | Collection[str]", shadows))
    if any(wanted) and runtime == "inline":
        raise SpecError(
            "launch: shadows are given and runtime is 'inline', which has one process and no place for them; they "
            "would have no effect. Use runtime='local' or 'ray', or leave shadows out."
        )
    return wanted


def cluster_of(
    runtime: str, address: object, ranks_per_host: object, loader_hosts: object, shadows: tuple[bool, ...]
) -> ClusterOptions | None:
    """Return the cluster of a launch; None where all roles are in one process.

    Raises:
        SpecError: for what its runtime does not have.
    """
    given = {"address": address, "ranks_per_host": ranks_per_host, "loader_hosts": loader_hosts}
    apart = runtime == "local" and (any(shadows) or loader_hosts is not None)
    if runtime != "ray":
        for name, value in given.items():
            if value is not None and not (apart and name == "loader_hosts"):
                raise SpecError(
                    f"launch: {name} is {value!r:.80} and runtime is {runtime!r}, which has no cluster; it would have "
                    "no effect. Use runtime='ray', or leave it out."
                )
        if not apart:
            return None
    if address is not None and (not isinstance(address, str) or not address):
        raise SpecError(f"launch: address is {address!r:.80}, not a Ray cluster's. Give 'auto' or 'host:port'.")
    for name in ("ranks_per_host", "loader_hosts"):
        value = given[name]
        if value is not None and not (name == "loader_hosts" and value == "per_source"):
            check_numbers(**{name: cast("int", value)})
    return ClusterOptions(
        address=address,
        ranks_per_host=cast("int | None", ranks_per_host),
        shadows=shadows,
        engine="ray" if runtime == "ray" else "local",
        loader_hosts=cast("int | None", loader_hosts),
    )


def check_numbers(**given: int | None) -> None:
    """Refuse numbers that nothing could run with; only threads may be left out."""
    for name, value in given.items():
        if name == "threads" and value is None:
            continue
        if not is_whole(value) or int(value or 0) < 1:
            raise SpecError(
                f"launch: {name} is {value!r:.80}; nothing could run with it. Give a whole number of at least 1, or "
                "leave it out."
            )
