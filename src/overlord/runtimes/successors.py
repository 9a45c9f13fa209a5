"""What the successor of a lost role is told, and what must be the same with it.

Rules of this file:
1. Nobody who comes up waits for another role: of two that were lost together each would wait for the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlord.errors import ServiceLost
from overlord.roles.assignment import Assignment
from overlord.runtimes.cluster_placement import Site
from overlord.runtimes.engine import OPEN_S, Incarnation
from overlord.runtimes.frames import frame_of, open_frame
from overlord.runtimes.opening import Progress
from overlord.runtimes.peers import PLANNER
from overlord.runtimes.switchboard import Pending, Switchboard


def where_to_go_on(board: Switchboard, otherwise: dict[str, Any]) -> dict[str, Any]:
    """Return where the successor of a loader host goes on.

    Args:
        board: Who is who.
        otherwise: What the store said to the last planner, for when there is none.
    """
    if PLANNER in board.book.peers:
        found = board.ask(PLANNER, "where", frame_of({})).get()
        if found is not None:
            return open_frame(found)[0]
    return otherwise


def check_same_files(known: Mapping[str, Any], opened: Mapping[str, Any]) -> None:
    """Refuse files that are not those that the stream began with.

    Raises:
        ServiceLost: it names the source.
    """
    changed = [name for name, facts in opened.items() if known[name] != facts]
    if changed:
        raise ServiceLost(
            f"the files of source {changed[0]!r} have changed while the job ran; samples would be lost or repeated. "
            "Restore them, or start a new run."
        )


def did_not_start(site: Site, error: Exception) -> ServiceLost:
    """Say that a role did not come up when the service was launched."""
    return ServiceLost(
        f"the {site.name} did not start on {site.node.name} ({error}); nothing could run. Its last words stand above. "
        "On a cluster: is that the one you meant, and is the same version of overlord-data[ray] installed on all of "
        "its hosts?"
    )


def why_failed(site: Site, why: str) -> str:
    """Say that a role cannot be replaced."""
    return (
        f"the {site.name} {why}; the service cannot go on. Its last words stand in the service's log; mend the cause, "
        "and launch again from the last state."
    )


def show_opening(
    opening: Sequence[Pending], done: Callable[[], int], count: int, progress: Progress, clock: Callable[[], float]
) -> None:
    """Show how many sources are open, until all are.

    Raises:
        ServiceLost: when that takes too long.
    """
    until = clock() + OPEN_S
    while any(pending.poll(0.1) is None for pending in opening):
        progress("opening sources", min(done(), count), count)
        if clock() > until:
            raise ServiceLost(f"the sources were not open after {OPEN_S:g} s; look at the storage they are on.")
    progress("opening sources", count, count)


def as_dealt(site: Site, assignment: Assignment) -> Site:
    """Return the site of a loader host with the sources that it has by now."""
    if site.role != "loader":
        return site
    sources, shadows = assignment.sources_of(site.number), assignment.shadows_of(site.number)
    return dataclasses.replace(site, sources=tuple(sources), shadows=tuple(shadows))


def can_do_without(one: Incarnation, assignment: Assignment, loaders: Sequence[Incarnation]) -> bool:
    """Whether a loader host that is slow can be replaced at once: all of its sources have a shadow that is up."""
    up = {other.site.number for other in loaders if other.peer is not None}
    mine = assignment.sources_of(one.site.number) if one.site.role == "loader" else []
    return bool(mine) and all(assignment.shadow[source] in up for source in mine)
