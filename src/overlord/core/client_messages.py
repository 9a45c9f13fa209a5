"""What clients and the owner of a service exchange with it, as typed messages (encoded by runtimes/transport/codec).

A request names the kind of its reply: `ask(request: Request[R]) -> R`. An error is a reply too (`Failure`). This file
is imported by every trainer, and so imports nothing that is slow to load.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from overlord.core.place_tree import ClientPlaceTree

R = TypeVar("R")

SourceChange = Literal["remove_source", "park_source", "return_source"]
Json = dict[str, Any]
SLICINGS = ("zigzag", "whole_zigzag", "contiguous", "whole")
"""How ranks that share a sequence cut it; a microbatch names its own by its number here."""
MILLION = 1_000_000
"""Shares of activations are whole numbers of this many parts, so that every machine plans alike."""


class Message(Struct, frozen=True, tag=True):
    """A message; its kind travels with it by name."""


class Reply(Message, frozen=True):
    """What a service answers."""


class Done(Reply, frozen=True):
    """What was asked for is done."""


class Failure(Reply, frozen=True):
    """An error instead of an answer; it is raised by the process that asked."""

    error: str
    """The name of its class."""
    message: str
    source: str | None = None
    """The name of the source it is about."""


class Request(Message, Generic[R], frozen=True, kw_only=True):
    """What is asked of a service; R is the kind of the reply."""

    release: tuple[int, ...] = ()
    """Leases that the client gives back, with whatever it asks for."""


class Beat(Request[Done], frozen=True):
    """Is answered at once: a process that does not answer is taken to hang."""


# --------------------------------------------------------------------------------------------------------------
# A client and the constructor host of its machine.


class Attach(Request["Attached | RanksMissing"], frozen=True):
    """Attach a rank: where it begins, where it was before its connection broke (`at`), or at a `step`."""

    rank: int
    pid: int
    at: int | None = None
    lineage: int | None = None
    """The lineage in which it was `at` a step."""
    step: int | None = None
    state: Json | None = None
    """The state before `step`; one that is not the service's own is refused."""


class Attached(Reply, frozen=True):
    """The rank is attached, unless no mesh has it."""

    begin: Beginning
    lease_bytes: int
    """Bytes of shared memory that the client may hold."""
    reached: int | None = None
    """How far the rank came before."""
    twice: bool = False
    """Whether the process of the client has the rank already."""


class RanksMissing(Reply, frozen=True):
    """Ask again: other ranks must ask for the same step before a stream goes back to it."""

    waits: list[tuple[int, int | None]]
    """Those that have not, each with the step it is at; None for one that is not attached. Empty while a planner that
    was replaced plans up to the step."""


class StepHeader(Struct, frozen=True):
    """What is known of a step before any of its microbatches is built."""

    index: int
    num_microbatches: int
    global_loss_tokens: int
    global_tokens: int
    global_samples: int
    order_digest: str
    plan_digest: str
    mesh_text: str
    next_mesh_text: str | None = None
    global_squared_tokens: int = 0
    mixture_version: int = 0
    weights: tuple[float, ...] = ()
    """The mixture's weights at the beginning of the step, one for each source."""
    encodes: tuple[str, ...] = ()
    """Encoders that run apart from the backbone ("encoder", "audio_encoder"): every rank then has inputs for them."""
    fetches: bool = True
    """False for a rank that gets its batches by the trainer's own broadcast (`broadcast_at`)."""
    axis: str = "DP"
    """What the plan distributes samples over."""
    bucket: int = 0
    """The bucket of that axis that the rank consumes."""
    group: tuple[tuple[int, int], ...] = ()
    """(bucket, microbatches) of all buckets that the rank's broadcast group consumes, where these are several. The
    rank that fetches has all of their microbatches, numbered bucket after bucket; its own come first."""
    names: tuple[str, ...] = ()
    """The sources of the step, by number."""

    @property
    def mesh(self) -> ClientPlaceTree:
        """The mesh of the step."""
        return mesh_from_text(self.mesh_text)

    @property
    def next_mesh(self) -> ClientPlaceTree | None:
        """The mesh of the next step, where it is known to be another one."""
        return None if self.next_mesh_text is None else mesh_from_text(self.next_mesh_text)


class ViewFacts(Struct, frozen=True):
    """A rank's view of a microbatch in shared memory."""

    scalars: dict[str, bool | int]
    arrays: list[tuple[str, str, tuple[int, ...], int]]
    """Key, dtype, shape and offset of every array."""


class View(Struct, frozen=True):
    """A view, and the segment of shared memory that it lies in."""

    lease: int
    segment: int
    capacity: int
    new: bool
    """Whether the descriptor of the segment comes with this reply."""
    facts: ViewFacts


class Views(Reply, frozen=True):
    """The microbatches that are built, and the header where a step was asked for."""

    header: StepHeader | None = None
    """Without the names of the sources. None past the end of the stream, and for a step that is not built yet."""
    names: tuple[str, ...] | None = None
    """The sources, where they are others than in the last header."""
    views: dict[int, View] = {}
    gone: list[int] = []
    """Segments that are not used any more."""


class OpenStep(Request[Views], frozen=True):
    """Ask for a step, and wait for it; the client has finished with the steps before it."""

    step: int


class LookAhead(Request[Views], frozen=True):
    """Ask for the step behind the one the client is at, if all of it is built; never waits."""

    step: int
    at: int | None = None
    """The step the client is at, if it has that one from looking ahead."""


class TakeMicrobatch(Request[Views], frozen=True):
    """Ask for one microbatch, and wait for it."""

    step: int
    microbatch: int


class Leave(Request[Done], frozen=True):
    """Detach in an orderly way, having trained on the steps before `next_step`."""

    next_step: int


# --------------------------------------------------------------------------------------------------------------
# Clients, constructor hosts and the owner of a service ask its planner.


class Beginning(Reply, frozen=True):
    """Where a rank begins; `first_step` is None for a rank that no mesh has."""

    first_step: int | None
    mesh: str
    lineage: int
    steps: tuple[int, int]
    """The first and the last step that a rank could attach at."""


class FindBeginning(Request[Beginning], frozen=True):
    """Ask where a rank begins."""

    rank: int


class Join(Request["Beginning | RanksMissing"], frozen=True):
    """Let a rank go on at a step, or go back with all other ranks."""

    rank: int
    step: int
    state: Json | None = None
    alone: bool = False
    """Go back without waiting for other ranks."""


class Labels(Reply, frozen=True):
    """Which samples of a step do not decode, as far as hosts have told."""

    missing: list[int]
    """Ranks of which nothing is known yet."""
    lost: list[tuple[int, int]]
    """(sample, labels) of each."""
    near: bool
    """Whether one of the missing ranks is attached and near the step."""


class CountLabels(Request[Labels], frozen=True):
    """Tell which samples of a step do not decode on a host, and ask for those of all hosts."""

    step: int
    plan: str
    """The plan's digest."""
    world_size: int
    ranks: list[int]
    lost: list[tuple[int, int]]
    near_from: int
    """A rank is near the step when it is at this one or later."""


class Report(Request[Done], frozen=True):
    """Hand over metrics of a step."""

    step: int
    metrics: dict[str, float]
    at: int | None = None
    """The step the client is at."""
    lineage: int | None = None


class Document(Reply, frozen=True):
    """A state, a status, or other facts that are plain JSON."""

    content: Json


class GetState(Request[Document], frozen=True):
    """Ask for the state before a step."""

    step: int


class CheckState(Request[Done], frozen=True):
    """Refuse a state that is not one of the service's stream."""

    state: Json


class GetStatus(Request[Document], frozen=True):
    """Ask for what `service.status()` returns."""


class GetHistory(Request[Document], frozen=True):
    """Ask for what was reported and measured over the steps of a run."""

    names: list[str] | None = None
    """Only these series."""


class GetWorkload(Request[Document], frozen=True):
    """Ask what is drawn of every source now, and so many steps ahead."""

    ahead: list[int]


class GetMixture(Request[Document], frozen=True):
    """Ask for the mixture in force, without its weights."""


class PlanBytes(Reply, frozen=True):
    """A plan as one block of bytes; None past the end of the stream."""

    plan: bytes | None


class GetPlan(Request[PlanBytes], frozen=True):
    """Ask for the plan of a step."""

    step: int


# --------------------------------------------------------------------------------------------------------------
# Changes: each may be asked for twice, and is made once by its id.


class ChangedAt(Reply, frozen=True):
    """The first step that a change holds for."""

    step: int


class Resharded(Reply, frozen=True):
    """The first step of a mesh."""

    step: int
    newest: Json
    """The mesh behind all changes, by its sizes."""


class SetMixture(Request[ChangedAt], frozen=True):
    """Change the mixture from a step on."""

    mixture: Json
    step: int | None
    id: str


class SkipSteps(Request[ChangedAt], frozen=True):
    """Pass over global batches before a step."""

    count: int
    step: int | None
    id: str


class Reshard(Request[Resharded], frozen=True):
    """Change the mesh from a step on."""

    mesh: Json
    step: int | None
    id: str
    hosts: int | None = None
    """Constructor hosts for it, on a cluster; None leaves them as they are. The supervisor sees to them."""


class AddSource(Request[ChangedAt], frozen=True):
    """Let a source come at a step."""

    source: Json
    weight: float | None
    step: int | None
    id: str


class ChangeSource(Request[ChangedAt], frozen=True):
    """Remove a source, park it, or let it return."""

    change: SourceChange
    source: str
    step: int | None
    id: str


# --------------------------------------------------------------------------------------------------------------
# Meshes as text: those of many steps are the same.


@functools.lru_cache(maxsize=16)
def mesh_to_text(tree: ClientPlaceTree) -> str:
    """Write a mesh."""
    return str(tree)


@functools.lru_cache(maxsize=16)
def mesh_from_text(text: str) -> ClientPlaceTree:
    """Read a mesh that `mesh_to_text` wrote."""
    return ClientPlaceTree.parse(text)
