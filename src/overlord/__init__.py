"""overlord: a disaggregated data loader for large-model training from many sources.

Names are imported when they are first used: `import overlord` alone loads nothing, so that the command line can check
a job file, and answer Ctrl-C, before numba and pyarrow are loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlord.core.layout_specs import Layout
    from overlord.core.place_tree import ClientPlaceTree
    from overlord.core.plan import LoadingPlan
    from overlord.core.samples import SampleId
    from overlord.core.specs import (
        Audio,
        Augment,
        Batch,
        Chat,
        Custom,
        ImageText,
        Interleaved,
        Job,
        Learn,
        Mixture,
        Source,
        Text,
        Video,
    )
    from overlord.errors import (
        ClosedError,
        OverlordError,
        PlanError,
        ReaderError,
        ReportMissing,
        ServiceLost,
        SourceError,
        SpecError,
        StateError,
        StoreError,
        ToleranceError,
    )
    from overlord.planning import costs, strategies
    from overlord.planning.balancing.balance import balance
    from overlord.planning.dgraph import DGraph
    from overlord.planning.low_level import constructor_do_plan, loader_do_plan, plan_raw, summary_buffer
    from overlord.roles.client import Client
    from overlord.scaling.autoscaler import Scaling
    from overlord.scaling.budgets import Budget
    from overlord.session import Service, connect, launch

__version__ = "0.1.0"

__all__ = [
    "Audio",
    "Augment",
    "Batch",
    "Budget",
    "Chat",
    "Client",
    "ClientPlaceTree",
    "ClosedError",
    "Custom",
    "DGraph",
    "ImageText",
    "Interleaved",
    "Job",
    "Layout",
    "Learn",
    "LoadingPlan",
    "Mixture",
    "OverlordError",
    "PlanError",
    "ReaderError",
    "ReportMissing",
    "SampleId",
    "Scaling",
    "Service",
    "ServiceLost",
    "Source",
    "SourceError",
    "SpecError",
    "StateError",
    "StoreError",
    "Text",
    "ToleranceError",
    "Video",
    "balance",
    "connect",
    "constructor_do_plan",
    "costs",
    "launch",
    "loader_do_plan",
    "plan_raw",
    "strategies",
    "summary_buffer",
]

_MODULES = {
    "overlord.core.layout_specs": ("Layout",),
    "overlord.core.place_tree": ("ClientPlaceTree",),
    "overlord.core.plan": ("LoadingPlan",),
    "overlord.core.samples": ("SampleId",),
    "overlord.core.specs": (
        "Audio",
        "Augment",
        "Batch",
        "Chat",
        "Custom",
        "ImageText",
        "Interleaved",
        "Job",
        "Learn",
        "Mixture",
        "Source",
        "Text",
        "Video",
    ),
    "overlord.errors": (
        "ClosedError",
        "OverlordError",
        "PlanError",
        "ReaderError",
        "ReportMissing",
        "ServiceLost",
        "SourceError",
        "SpecError",
        "StateError",
        "StoreError",
        "ToleranceError",
    ),
    "overlord.planning": ("costs", "strategies"),
    "overlord.planning.balancing.balance": ("balance",),
    "overlord.planning.dgraph": ("DGraph",),
    "overlord.planning.low_level": ("constructor_do_plan", "loader_do_plan", "plan_raw", "summary_buffer"),
    "overlord.roles.client": ("Client",),
    "overlord.scaling.autoscaler": ("Scaling",),
    "overlord.scaling.budgets": ("Budget",),
    "overlord.session": ("Service", "connect", "launch"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what a name stands for; the next use finds it here."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'overlord' has no attribute {name!r}")
    module = _MODULE_OF[name]
    if module == "overlord.planning":  # the name is a module itself
        found: Any = import_module(f"{module}.{name}")
    else:
        found = getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
