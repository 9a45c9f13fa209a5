"""What the owner of a service asks of it, as messages: the same for every service whose planner is somewhere else."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from typing import Any

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, plan_from_bytes
from overlord.job.specs import Mixture, Source
from overlord.roles.changes import mixture_to_json, source_to_json
from overlord.runtimes.hosts.planner_host import SourceChange


class OwnerAsks(ABC):
    """A service that is asked by messages."""

    @abstractmethod
    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask the planner, whoever plays it; asks again whatever was lost, so every message may come twice."""

    def set_mixture(self, mixture: Mixture, at_step: int | None, change_id: str) -> int:
        """Change the mixture from a step on."""
        message = {"op": "set_mixture", "mixture": mixture_to_json(mixture), "step": at_step, "id": change_id}
        return int(self._ask(message)["step"])

    def skip_steps(self, count: int, at_step: int | None, change_id: str) -> int:
        """Pass over global batches before a step."""
        return int(self._ask({"op": "skip_steps", "count": count, "step": at_step, "id": change_id})["step"])

    def reshard(self, tree: ClientPlaceTree, at_step: int | None, change_id: str) -> tuple[int, ClientPlaceTree]:
        """Change the mesh from a step on; return that step, and the mesh behind all changes."""
        reply = self._ask({"op": "reshard", "mesh": tree.sizes(), "step": at_step, "id": change_id})
        return int(reply["step"]), ClientPlaceTree.from_sizes(reply["newest"])

    def add_source(self, source: Source, weight: float | None, at_step: int | None, change_id: str) -> int:
        """Let a source come at a step."""
        given = source_to_json(source)
        message = {"op": "add_source", "source": given, "weight": weight, "step": at_step, "id": change_id}
        return int(self._ask(message)["step"])

    def change_source(self, change: SourceChange, name: str, at_step: int | None, change_id: str) -> int:
        """Remove a source, park it, or let it return."""
        return int(self._ask({"op": change, "source": name, "step": at_step, "id": change_id})["step"])

    def mixture(self) -> Mixture:
        """Return the mixture in force, without its weights."""
        return Mixture.from_mapping(self._ask({"op": "mixture"})["mixture"])

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step."""
        blob = self._ask({"op": "plan", "step": step})["plan"]
        return None if blob is None else plan_from_bytes(base64.b64decode(blob))
