"""What clients and the owner of a service ask of its planner, as messages."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan_codec import plan_to_bytes
from overlord.errors import SpecError, StateError
from overlord.job.specs import Mixture
from overlord.roles.changes import FIXED_WHILE_RUNNING
from overlord.roles.planner import Planner

SourceChange = Literal["remove_source", "park_source", "return_source"]


def change_source(planner: Planner, change: SourceChange, name: str, at_step: int | None, change_id: str = "") -> int:
    """Remove a source, park it, or let it return; return the first step it holds for."""
    changes = planner.sources
    asked = {"remove_source": changes.remove, "park_source": changes.park, "return_source": changes.give_back}
    return asked[change](name, at_step, change_id=change_id)


def left_behind(what: str, first_step: int) -> StateError:
    """Say that a trainer stands in a lineage that all ranks have left."""
    return StateError(
        f"{what} is of a run that was left: the trainers of all ranks went back to step {first_step} of this service "
        "meanwhile, and what this one has is not what they get. If it is still needed, attach it again with the step "
        "of its checkpoint, as they did: ol.connect(address, rank, step=..)."
    )


def workload(planner: Planner, ahead: Sequence[int]) -> dict[str, Any]:
    """Tell what is drawn of every source, and what will be so many steps ahead; safe while others plan."""
    state, weights, names = planner.latest_state, planner.latest_weights, planner.names
    missing = [0.0] * (len(names) - len(weights))
    samples = [int(count) for count in state.samples] + [0] * (len(names) - len(state.samples))
    tokens = [int(count) for count in state.tokens] + [0] * (len(names) - len(state.tokens))
    return {
        "step": state.step,
        "names": list(names),
        "level": planner.mixture.level,
        "weights": [*weights, *missing],
        "coming": [planner.weights_ahead(state.step + steps) for steps in ahead],
        "samples": samples,
        "tokens": tokens,
    }


def answer(planner: Planner, message: dict[str, Any]) -> dict[str, Any]:
    """Answer a client, or the owner of a service; nobody else asks the planner meanwhile.

    Raises:
        SpecError: for a message nobody knows, or what cannot be done.
    """
    op, step = message.get("op"), message.get("step")
    if op == "state":
        return {"state": planner.state(int(message["step"]))}
    if op == "report":
        at, newest, lineage = int(message["step"]), message.get("at"), message.get("lineage")
        if lineage not in (None, planner.checkpoints.store.lineage) and at > planner.first_step:
            raise left_behind(f"the report of step {at}", planner.first_step)
        if newest is not None and planner.next_step <= at <= newest:
            planner.plan_raw(at)  # handed out before this planner came in the place of another
        planner.report(at, message["metrics"])
        return {}
    if op == "set_mixture":
        mixture = Mixture.from_mapping(message["mixture"])
        return {"step": planner.set_mixture(mixture, step, change_id=message["id"])}
    if op == "skip_steps":
        return {"step": planner.skip_steps(int(message["count"]), step, change_id=message["id"])}
    if op in get_args(SourceChange):
        return {
            "step": change_source(planner, cast("SourceChange", op), str(message["source"]), step, str(message["id"]))
        }
    if op == "reshard":
        tree = ClientPlaceTree.from_sizes(message["mesh"])
        at = planner.reshard(tree, step, change_id=message["id"])
        return {"step": at, "newest": planner.meshes.newest.sizes()}
    if op == "begins":
        begin, meshes = planner.meshes.begin_of(int(message["rank"])), planner.meshes
        mesh = str(meshes.newest if begin is None else meshes.at(begin))
        store = planner.checkpoints.store
        steps = [min(store.oldest_step, planner.next_step), planner.next_step]
        return {"first_step": begin, "mesh": mesh, "lineage": store.lineage, "steps": steps}
    if op == "check_state":
        planner.check_state(message["state"])
        return {}
    if op == "mixture":
        fixed = (*FIXED_WHILE_RUNNING, "temperature")
        return {"mixture": {name: getattr(planner.mixture, name) for name in fixed}}
    if op == "plan":
        plan = planner.plan_raw(int(message["step"]))
        return {"plan": None if plan is None else base64.b64encode(plan_to_bytes(plan)).decode()}
    raise SpecError(f"the service does not know the message {op!r}; client and service differ in version.")
