"""The three kinds of hosts of a cluster service, without the engine that carries their calls.

Every public method takes a frame (and a blob) and returns a frame. The book of who is who comes first, then what the
supervisor asks in this order: the others `prepare` while loaders `open`, the planner `open_store`, loaders `begin`,
the planner `begin`, constructors `begin`. A successor goes through the same steps while the others go on.
"""

from __future__ import annotations

from overlord.runtimes.hosts.cluster_role import ClusterRole
from overlord.runtimes.hosts.constructor_host import ConstructorRole
from overlord.runtimes.hosts.loader_role import LoaderRole
from overlord.runtimes.hosts.planner_role import PlannerRole

__all__ = ["ROLES", "ClusterRole", "ConstructorRole", "LoaderRole", "PlannerRole"]

ROLES: dict[str, type[ClusterRole]] = {"loader": LoaderRole, "planner": PlannerRole, "constructor": ConstructorRole}
