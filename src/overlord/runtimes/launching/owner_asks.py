"""What the owner of a service asks of it, as messages: the same for every service whose planner is somewhere else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from overlord.core import client_messages as msg
from overlord.core.client_messages import Request, SourceChange
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import LoadingPlan, plan_from_bytes
from overlord.job.specs import Mixture, Source
from overlord.roles.changes import mixture_to_json, source_to_json

R = TypeVar("R")


class OwnerAsks(ABC):
    """A service that is asked by messages."""

    @abstractmethod
    def _ask(self, request: Request[R]) -> R:
        """Ask the planner, whoever plays it; asks again whatever was lost, so every message may come twice."""

    def set_mixture(self, mixture: Mixture, at_step: int | None, change_id: str) -> int:
        """Change the mixture from a step on."""
        return self._ask(msg.SetMixture(mixture_to_json(mixture), at_step, change_id)).step

    def skip_steps(self, count: int, at_step: int | None, change_id: str) -> int:
        """Pass over global batches before a step."""
        return self._ask(msg.SkipSteps(count, at_step, change_id)).step

    def reshard(self, tree: ClientPlaceTree, at_step: int | None, change_id: str) -> tuple[int, ClientPlaceTree]:
        """Change the mesh from a step on; return that step, and the mesh behind all changes."""
        reply = self._ask(msg.Reshard(tree.sizes(), at_step, change_id))
        return reply.step, ClientPlaceTree.from_sizes(reply.newest)

    def add_source(self, source: Source, weight: float | None, at_step: int | None, change_id: str) -> int:
        """Let a source come at a step."""
        return self._ask(msg.AddSource(source_to_json(source), weight, at_step, change_id)).step

    def change_source(self, change: SourceChange, name: str, at_step: int | None, change_id: str) -> int:
        """Remove a source, park it, or let it return."""
        return self._ask(msg.ChangeSource(change, name, at_step, change_id)).step

    def mixture(self) -> Mixture:
        """Return the mixture in force, without its weights."""
        return Mixture.from_mapping(self._ask(msg.GetMixture()).content)

    def plan_raw(self, step: int) -> LoadingPlan | None:
        """Return the plan of a step."""
        blob = self._ask(msg.GetPlan(step)).plan
        return None if blob is None else plan_from_bytes(blob)
