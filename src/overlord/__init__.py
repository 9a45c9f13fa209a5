"""overlord: a disaggregated data loader for large-model training from many sources.

Names are imported when they are first used (PEP 562). So the command line checks a job file, and answers Ctrl-C, before
numba and pyarrow are loaded; and a trainer that attaches loads numpy and a socket client, not the readers and kernels.
"""

import importlib
from typing import TYPE_CHECKING, Any

from overlord.version import VERSION

if TYPE_CHECKING:
    from overlord.core.place_tree import ClientPlaceTree
    from overlord.core.plan import LoadingPlan
    from overlord.core.samples import SampleId
    from overlord.errors import (
        ClosedError,
        HookError,
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
    from overlord.job.layout_specs import Layout
    from overlord.job.specs import (
        Audio,
        Augment,
        Batch,
        Chat,
        Custom,
        ImageChat,
        ImageText,
        Interleaved,
        Job,
        Join,
        Learn,
        Mixture,
        Source,
        Text,
        Video,
    )
    from overlord.job_files import load_job
    from overlord.launch_spec import Budget
    from overlord.planning import costs, strategies
    from overlord.planning.balancing.balance import balance
    from overlord.planning.dgraph import DGraph
    from overlord.planning.low_level import constructor_do_plan, loader_do_plan, plan_raw, summary_buffer
    from overlord.roles.client import Client
    from overlord.runtimes.client_feed import connect
    from overlord.scaling.autoscaler import Scaling
    from overlord.session import Service, launch, replay
    from overlord.transforms import hooks

__version__ = VERSION

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
    "HookError",
    "ImageChat",
    "ImageText",
    "Interleaved",
    "Job",
    "Join",
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
    "hooks",
    "launch",
    "load_job",
    "loader_do_plan",
    "plan_raw",
    "replay",
    "strategies",
    "summary_buffer",
]

_HOMES = {
    "job.layout_specs": ("Layout",),
    "core.place_tree": ("ClientPlaceTree",),
    "core.plan": ("LoadingPlan",),
    "core.samples": ("SampleId",),
    "job.specs": (
        "Audio",
        "Augment",
        "Batch",
        "Chat",
        "Custom",
        "ImageChat",
        "ImageText",
        "Interleaved",
        "Job",
        "Join",
        "Learn",
        "Mixture",
        "Source",
        "Text",
        "Video",
    ),
    "errors": (
        "ClosedError",
        "HookError",
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
    "job_files": ("load_job",),
    "launch_spec": ("Budget",),
    "planning.costs": ("costs",),
    "planning.strategies": ("strategies",),
    "planning.balancing.balance": ("balance",),
    "planning.dgraph": ("DGraph",),
    "planning.low_level": (
        "constructor_do_plan",
        "loader_do_plan",
        "plan_raw",
        "summary_buffer",
    ),
    "roles.client": ("Client",),
    "runtimes.client_feed": ("connect",),
    "scaling.autoscaler": ("Scaling",),
    "session": (
        "Service",
        "launch",
        "replay",
    ),
    "transforms.hooks": ("hooks",),
}
"""Where each name lives."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"overlord.{_HOME_OF[name]}")
    found = getattr(home, name, home)  # `costs`, `strategies` and `hooks` are modules themselves
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
