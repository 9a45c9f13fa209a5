"""overlord: a disaggregated data loader for large-model training from many sources."""

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
from overlord.job.job_files import load_job
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
    "load_job",
    "loader_do_plan",
    "plan_raw",
    "strategies",
    "summary_buffer",
]
