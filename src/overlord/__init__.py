"""overlord: a disaggregated data loader for large-model training from many sources."""

from overlord.core.place_tree import ClientPlaceTree
from overlord.core.samples import SampleId
from overlord.core.specs import Batch, Custom, ImageText, Job, Mixture, Source, Text
from overlord.errors import (
    ClosedError,
    OverlordError,
    PlanError,
    ReaderError,
    ServiceLost,
    SourceError,
    SpecError,
    StateError,
    StoreError,
    ToleranceError,
)
from overlord.planning.balancing import balance
from overlord.roles.client import Client
from overlord.session import Service, connect, launch

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Client",
    "ClientPlaceTree",
    "ClosedError",
    "Custom",
    "ImageText",
    "Job",
    "Mixture",
    "OverlordError",
    "PlanError",
    "ReaderError",
    "SampleId",
    "Service",
    "ServiceLost",
    "Source",
    "SourceError",
    "SpecError",
    "StateError",
    "StoreError",
    "Text",
    "ToleranceError",
    "balance",
    "connect",
    "launch",
]
