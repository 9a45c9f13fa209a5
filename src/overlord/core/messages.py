"""Messages between roles: frozen records around columns; some of them can be cut and joined.

Those derived from `Message` travel between processes (runtimes/transport/role_codec.py); the others are parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlord.core.client_messages import AddSource, Join, Message
from overlord.core.ragged import Kind, Ragged, expand_ranges, gather_runs, offsets_of
from overlord.core.samples import Cursor, MetaArray, Part

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MetaRequest:
    """Planner to SourceLoader: return the metadata of the samples from a cursor on."""

    source: int
    cursor: Cursor
    count: int
    """At least one sample and at most this many come back; never past the end of the group."""


@dataclass(frozen=True, slots=True)
class MetaDelta:
    """SourceLoader to Planner: the metadata of the requested samples."""

    source: int
    meta: MetaArray
    next_cursor: Cursor
    """Where the next request begins: the same group, the next one, or the next epoch."""
    items: Int32s | None = None
    """[images, 4], as in `Draw.items`: a row for each image of the samples with a nonzero `items`, in their order."""


@dataclass(frozen=True, slots=True)
class LoaderOrder:
    """What a plan takes from one source: its SourceLoader prepares and hands over these samples of one step."""

    step: int
    source: int
    meta: MetaArray
    """The planned metadata of the samples, in the source's order; the payload has exactly these lengths."""
    end: Cursor
    """The source's cursor after the step: no later step needs a row before it."""
    open_media: bool = False
    """Whether media are decoded by the loader in any case, because several hosts must know which ones are bad."""


@dataclass(frozen=True, slots=True)
class Media:
    """Images, clips or sounds of some samples: one entry per item, sample after sample."""

    kind: str
    """ "image", "video" or "audio"."""
    rows: Int64s
    """The items of sample i are rows[i] .. rows[i + 1]."""
    start: Int32s
    """The first placeholder token of each item inside its sample."""
    length: Int32s
    """Its placeholder tokens."""
    grids: Int32s
    """[items, 3]: t, patch rows, patch columns; of a sound: frames with sound, mel bands, frames in all."""
    seconds: npt.NDArray[np.float32]
    """Seconds between two temporal patches of a clip; 0 for images."""
    seeds: npt.NDArray[np.uint64]
    """The seed of each item's augmentations."""
    bad: npt.NDArray[np.bool_]
    """Items that are stand-ins: zeros once decoded."""
    values: npt.NDArray[np.uint8]
    """Bytes of all items: as read from the file while `encoded`, else decoded as a batch takes them."""
    begin: Int64s
    """Where each item begins in `values`; -1 for one whose bytes are on other hosts."""
    nbytes_of: Int64s
    """Bytes of each item."""
    encoded: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the items."""
        return int(self.nbytes_of.sum())

    @property
    def here(self) -> npt.NDArray[np.bool_]:
        """Items whose bytes are here."""
        return self.begin >= 0

    def data(self, item: int) -> memoryview:
        """Return the bytes of one item."""
        begin = int(self.begin[item])
        return memoryview(self.values[begin : begin + int(self.nbytes_of[item])])  # type: ignore[arg-type]

    def keep(self, chosen: npt.NDArray[np.bool_]) -> Media:
        """Return some of the items; the samples stay the same."""
        columns = ("start", "length", "grids", "seconds", "seeds", "bad", "begin", "nbytes_of")
        rows = np.concatenate([[0], np.cumsum(chosen)])[self.rows]
        return replace(self, rows=rows, **{name: getattr(self, name)[chosen] for name in columns})

    def take(self, samples: Int64s, with_bytes: Bools | None = None) -> Media:
        """Return the media of some samples; only shapes and bad marks of items where `with_bytes` is False."""
        counts = np.diff(self.rows)[samples]
        items = expand_ranges(self.rows[samples], counts)
        here = self.here[items] if with_bytes is None else with_bytes & self.here[items]
        sizes = np.where(here, self.nbytes_of[items], 0)
        offsets = offsets_of(sizes)
        values = gather_runs(self.values, self.begin[items], sizes)
        columns = {name: getattr(self, name)[items] for name in ("start", "length", "grids", "seconds", "seeds", "bad")}
        begin = np.where(here, offsets[:-1], -1)
        return replace(self, rows=offsets_of(counts), values=values, begin=begin, nbytes_of=sizes, **columns)

    def compact(self) -> Media:
        """Return the same media without the bytes between them, as they travel: they may lie anywhere in a memory."""
        return self if len(self.values) == self.nbytes else self.take(np.arange(len(self.rows) - 1))

    @staticmethod
    def concat(parts: Sequence[Media]) -> Media:
        """Join the media of several runs of samples of one source."""
        parts = [part.compact() for part in parts]
        lead = np.cumsum([0, *(len(part.values) for part in parts)])
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("start", "length", "grids", "seconds", "seeds", "bad", "values", "nbytes_of")
        }
        counts = np.concatenate([np.diff(part.rows) for part in parts])
        return Media(
            kind=parts[0].kind,
            rows=offsets_of(counts),
            begin=np.concatenate(
                [np.where(part.here, part.begin + at, -1) for part, at in zip(parts, lead, strict=False)]
            ),
            encoded=any(part.encoded for part in parts if len(part.start)),  # a part without items does not count
            **columns,
        )


@dataclass(frozen=True, slots=True)
class Payload:
    """SourceLoader to DataConstructor: the samples of one order as columns."""

    step: int
    source: int
    tokens: Ragged
    """Token ids (int32), placeholders included; row i has the planned length. In a part for one host it has the runs
    of `Share.tokens` of its sample, one behind the other."""
    loss: Ragged
    """1 where the token counts in the loss (uint8), aligned with tokens; in a part for one host `Share.loss`."""
    media: Media | None = None
    """Images, clips or sounds of the samples; None for a source of text."""
    chosen: Int64s | None = None
    """Which of the step's samples of the source these are, counted in drawing order; None: all."""
    labels: int = 0
    """Labels of all samples that its loader has of the step, also of those that go to other hosts. Bad samples, and the
    padding of samples that turned out short, have none; samples with media that are still encoded count as good."""
    late: bool = False
    """Whether some media are still encoded: a constructor host decodes them, and only then are the labels final."""

    row_labels: Int64s | None = None
    """Labels of each sample, on all hosts."""
    pieces: Int64s | None = None
    """Of a part for one host: the pieces of the plan that are of these samples, and in views of the host."""
    piece_labels: Int64s | None = None
    """Labels of each of those pieces. A host that has no loss mask gets no more of it than this."""

    def take(
        self, samples: Int64s, tokens: Ragged | None = None, loss: Ragged | None = None, media: Bools | None = None
    ) -> Payload:
        """Return some of the samples, with the given token ids and loss masks of them, and the bytes of some media."""
        return replace(
            self,
            tokens=self.tokens.take(samples) if tokens is None else tokens,
            loss=self.loss.take(samples) if loss is None else loss,
            media=None if self.media is None else self.media.take(samples, media),
            chosen=samples,
            row_labels=None if self.row_labels is None else self.row_labels[samples],
        )

    def compact(self) -> Payload:
        """Return the same samples without what its arrays hold besides, as it travels."""
        media = self.media and self.media.compact()
        return replace(self, tokens=self.tokens.compact(), loss=self.loss.compact(), media=media)

    @staticmethod
    def joined(parts: Sequence[Payload]) -> Payload:
        """Join the payloads of several loaders of one source and step; `chosen` says which samples each has."""
        if len(parts) == 1:
            return parts[0]
        media = [part.media for part in parts if part.media is not None]
        chosen = np.concatenate([part.chosen for part in parts if part.chosen is not None])
        order = np.argsort(chosen, kind="stable")
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("row_labels", "pieces", "piece_labels")
            if getattr(parts[0], name) is not None
        }
        whole = Payload(
            parts[0].step,
            parts[0].source,
            Ragged.concat([part.tokens for part in parts]),
            Ragged.concat([part.loss for part in parts]),
            Media.concat(media) if media else None,
            **columns,
        ).take(order)
        labels, late = sum(part.labels for part in parts), any(part.late for part in parts)
        return replace(whole, chosen=chosen[order], labels=labels, late=late)

    @property
    def nbytes(self) -> int:
        """Bytes handed over."""
        return self.tokens.nbytes + self.loss.nbytes + (self.media.nbytes if self.media else 0)


STORE_DOWN = -1
"""What a constructor host is told to wait for when no report is missing, but the store is down."""


# --------------------------------------------------------------------------------------------------------------
# Messages between the hosts of roles. Direct calls pass these objects, processes and Ray their bytes.


class Nothing(Message, frozen=True):
    """An empty message: the name of the method is enough."""


class WithPlan(Message, frozen=True, kw_only=True):
    """A message with a plan, which travels beside it: the planner puts its bytes, or those of a slice of it."""

    plan: Any = None
    """The plan; between processes what its bytes are known by, or the bytes."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that cannot be planned yet."""

    missing: int | None
    """The step whose report must come first, or STORE_DOWN; None where an earlier step must be planned first."""


@dataclass(frozen=True, slots=True)
class HostNews:
    """What a constructor host tells of itself whenever it asks for a plan."""

    reached: dict[int, int] = field(default_factory=dict[int, int])
    """For every rank that ever attached to it, the step before which it is done."""
    positions: dict[int, int] = field(default_factory=dict[int, int])
    """The step each attached rank is at."""
    told_missing: int | None = None
    """The report it knows to be missing: it waits for that one, and is told of any other at once."""
    newcomers: bool = False
    """Whether only ranks that join at this step need the plan."""
    waited_s: float = 0.0
    """How long its trainers have waited for batches, all in all."""
    fetched_bytes: int = 0
    """Token ids, loss masks and media that loaders have sent to it, all in all."""
    held_bytes: int = 0
    """The most that the samples of one step have taken there."""
    packed_bytes: int = 0
    """Arrays of microbatches that it has made, all in all."""
    memory: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes that it holds, by what holds them (`MemoryAccount`)."""


class PlanRequest(Message, frozen=True):
    """Constructor host to planner host: the plan of a step, with what the host tells of itself."""

    step: int
    host: int
    news: HostNews
    whole: bool = False
    """Whether a slice for the ranks of the host is not enough."""


class PlanAnswer(WithPlan, frozen=True):
    """Planner host to constructor host: the plan, or `waits` if it cannot be made yet; neither after the last step.

    Between processes the plan is a list: what the host needs of it, and then what loader hosts need.
    """

    waits: Waiting | None = None
    loaders: tuple[tuple[int, ...], ...] = ()
    """The sources of each slice for a loader host; none where they get the whole plan too."""
    next_mesh: str | None = None
    """The mesh of the step behind it, where it is known to have another one."""


class HostProgress(Message, frozen=True):
    """Constructor host to planner host: how far its clients are."""

    host: int
    news: HostNews


class JoinRequest(Message, frozen=True):
    """Constructor host to planner host: a rank asks to go on at a step, with what the host tells of itself.

    They are one message, so that a planner that has just replaced another does not answer before it has the news.
    """

    join: Join
    host: int
    news: HostNews


class MetaRequests(Message, frozen=True):
    """Planner host to loader host: requests for metadata of some of its sources."""

    requests: list[MetaRequest]


class MetaDeltas(Message, frozen=True):
    """Loader host to planner host: the metadata."""

    deltas: list[MetaDelta]


class Follow(Message, frozen=True):
    """Planner host to the loader host of shadows: what their primaries were asked for, and what is passed."""

    requests: list[MetaRequest]
    passed: dict[int, Cursor]


class SomeSources(Message, frozen=True):
    """To a loader host: the sources that it is asked about, or is to open."""

    sources: list[int]


class SourceReports(Message, frozen=True):
    """Loader host: the work, buffers and counters of each source's loaders, as `status` shows them."""

    sources: dict[int, dict[str, Any]]
    machine: dict[str, Any] | None = None
    """What the kernel of its machine has counted (`HostCounters`); where the workload was asked for."""
    fetched: dict[str, int] = msgspec.field(default_factory=dict)
    """What it and its processes have counted of requests for remote files; where the status was asked for."""
    memory: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes that it holds, by what holds them (`MemoryAccount`); where the status was asked for."""


class LoaderSnapshots(Message, frozen=True):
    """The counters of loaders, by the names of their sources; a loader that replaces one continues them."""

    loaders: dict[str, Any]


class Rest(Message, frozen=True):
    """Planner host to loader host: nothing is drawn from these sources for now; where they stand."""

    cursors: dict[int, Cursor]


class NoteFaults(Message, frozen=True):
    """Constructor host to loader host: samples whose media do not decode (source, row, epoch, why)."""

    faults: list[tuple[int, int, int, str]]


class GiveUpRow(Message, frozen=True):
    """Loader host to planner host: a row that kills its workers is not read again, from an epoch on."""

    source: str
    row: int
    reason: str
    epoch: int


class HandOver(WithPlan, frozen=True):
    """Constructor host to loader host: what some ranks need of parts of sources of a step."""

    ranks: list[int]
    parts: list[tuple[int, Part]]


class HandedOver(Message, frozen=True):
    """Loader host to constructor host: the samples, one payload for each part of a source."""

    payloads: list[Payload]
    buffer_bytes: int
    """What the loader host holds in its buffers."""


# --------------------------------------------------------------------------------------------------------------
# Messages of the supervisor to roles, and their answers.


class SourceFacts(NamedTuple):
    """What a planner must know of a source's files, which only its loaders open."""

    format: str
    listing: str
    """Digest of its list of files."""
    total_bytes: int


UNKNOWN_FILES = SourceFacts("unknown", "", 0)
"""What is known of a parked source whose files could not be opened."""


class Alive(Message, frozen=True):
    """The answer to `alive`: the process of the role, and how many sources it has opened."""

    pid: int
    opened: int = 0


class Heartbeat(Message, frozen=True):
    """A role that runs."""

    version: int
    """Of the newest membership that it has received."""
    busy_s: float = 0.0
    """How long its oldest call has been running."""
    rewound: bool = False
    """Whether all ranks go back to an earlier step: the service is started again."""
    served: int = -1
    """The newest step that a client of it has come to."""
    clients: int = 0
    """Clients that are attached to it."""
    waits: tuple[str, ...] = ()
    """What its worker and reader processes have not answered for some seconds."""


class AddedSource(Message, frozen=True):
    """A source that was added while the stream runs."""

    source: dict[str, Any]
    mine: bool = False
    """Whether the loader host that is told opens it."""


class Prepare(Message, frozen=True):
    """Make the job ready, with the sources that were added since the launch; loader hosts open theirs."""

    added: tuple[AddedSource, ...] = ()


class OpenedSources(Message, frozen=True):
    """What the loader hosts found when they opened sources, by the names of those."""

    facts: dict[str, SourceFacts]
    missing: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict[str, tuple[str, str]])
    """Sources that could not be opened, with the class and the message of the error."""


class Positions(Message, frozen=True):
    """Planner host: where loaders begin, at the launch or when one is replaced."""

    cursors: list[Cursor]
    weights: list[float]
    facts: dict[str, SourceFacts]
    """What loaders must find where they open a source that others had open."""
    verdicts: dict[str, Any]
    snapshots: dict[str, Any]
    """The counters of loaders, by the names of their sources."""
    away: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Parked sources whose files are away, with their digests, which the files must have when they return."""


class BeginPlanning(Message, frozen=True):
    """Supervisor to planner host: plan the first step; a successor plans when it is asked."""

    successor: bool = False


class FirstStep(Message, frozen=True):
    """Planner host, then to constructor hosts: the first step of the stream."""

    step: int
    hosts: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Constructor hosts that meshes were given while the stream ran, by their number of ranks."""
    newest: tuple[int, int] | None = None
    """The first step and the constructor hosts of the newest of these meshes."""


class Resize(Message, frozen=True):
    """Supervisor to loader host: how many workers its sources have, and which of their groups they prepare."""

    sizes: dict[int, tuple[int, Part]]
    left: tuple[int, ...] = ()
    """Sources that are on other hosts from now on."""


class LeftSources(Message, frozen=True):
    """Loader host: the counters of sources that moved to other hosts, which continue them."""

    met: dict[int, LoaderSnapshots]


class DropSource(Message, frozen=True):
    """Forget a source that the planner did not add."""

    name: str


class OpenedSource(Message, frozen=True):
    """Loader host: the source that it has opened."""

    name: str
    fact: SourceFacts


class AdmitSource(Message, frozen=True):
    """Supervisor to planner host: write down a source that loaders and constructors know."""

    request: AddSource
    fact: SourceFacts


class FindChange(Message, frozen=True):
    """Supervisor to planner host: the id of a change that may have been written down."""

    id: str


class ChangeStep(Message, frozen=True):
    """Planner host: the step that a change takes effect at; None where it was not written down."""

    step: int | None


class Close(Message, frozen=True):
    """Supervisor to all roles: end; waiting clients get this error (its type and text)."""

    why: tuple[str, str] | None = None


class MembershipHead(Message, frozen=True):
    """Supervisor to all roles: the membership, without the peers, which every transport names in its own way."""

    version: int
    generations: dict[str, int]
    primary: tuple[tuple[int, ...], ...]
    shadow: tuple[int, ...]
    failed: str | None
    hosts: dict[int, int] = msgspec.field(default_factory=dict[int, int])


# --------------------------------------------------------------------------------------------------------------
# Messages between a service and the processes it starts.


class StartRole(Message, frozen=True):
    """Service to a new process: the role it is."""

    folder: str
    socket: str
    site: dict[str, Any]
    paths: list[str]
    """`sys.path` of the launcher."""
    end_s: float
    """How long the process may take to end when its service is gone."""
    bundle: npt.NDArray[np.uint8]
    """The job and its options."""


class CallRole(Message, frozen=True):
    """Call a method of a role; its argument is another message, whose arrays stand behind this one."""

    method: str
    sender: tuple[str, int]
    head: bytes
    plan: bool = False
    """Whether the last array is the plan of the argument."""
    paths: dict[str, str] = msgspec.field(default_factory=dict)
    """The sockets of the peers, where membership is announced."""


class ForkServerFor(Message, frozen=True):
    """A process to its template: fork a server; its control socket and the pipe that ends it go along."""

    module: str
    preloads: tuple[str, ...] = ()
    """What the module's `preload` is given."""


class ForkChild(Message, frozen=True):
    """Service to a fork server: start a child, whose end of a socket goes along."""


class EndChildren(Message, frozen=True):
    """Service to a fork server: kill some of its children (None: all), and wait for their end."""

    pids: list[int] | None = None


class ForkAnswer(Message, frozen=True):
    """Fork server to the service."""

    pid: int = 0
    """The child that was forked."""
    error: str | None = None
    """Why the system refused it."""
    codes: tuple[int | None, ...] = ()
    """Exit codes of the children that were ended; negative ones are signals. None: it was killed, but has not ended."""
    peak_bytes: tuple[int, ...] = ()
    """The most memory that each of them used."""


class ServeCaller(Message, frozen=True):
    """Service to a reader process or worker: serve a further connection, whose descriptor goes along."""


class LoadFunction(Message, frozen=True):
    """Service to a process worker: the code beside it is the function of this key."""

    key: str


class RunFunction(Message, frozen=True):
    """Service to a process worker: run a function over the rows beside it."""

    key: str
    begin: int = 0
    """Where the places of the rows begin in the shared memory whose descriptor goes along, if one does."""
    nbytes: int = 0
    """Bytes from the first of them to the end of the last."""


class MapMemory(Message, frozen=True):
    """Service to a process worker: the memory that rows are written into from now on; descriptors go along."""

    asked_bytes: int
    """For what the service sends."""
    answer_bytes: int
    """For the answers."""
    heap_bytes: int
    """With rows of the service, which are told by their places."""


class SharedArray(NamedTuple):
    """An array in shared memory."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    asked: bool
    """Whether it is (a part of) what the service sent, and not of the answer."""


class SharedRows(Message, frozen=True):
    """A service and its process workers: `Rows` whose arrays lie in shared memory."""

    head: bytes
    arrays: list[SharedArray]


class ReaderRequest(Message, frozen=True, kw_only=True):
    """Service to a reader process; the file stands beside it."""

    dropped: tuple[int, ...] = ()
    """Streams of which nothing more is asked for."""


class ReadHead(ReaderRequest, frozen=True, kw_only=True):
    """Read the index of a file, the names of its columns, or what they hold; or begin to fetch blocks of it."""

    what: Literal["index", "columns", "kinds", "ahead"]
    format: str
    columns: tuple[str, ...]
    blocks: tuple[int, ...] = ()


class ReadBlock(ReaderRequest, frozen=True, kw_only=True):
    """Begin to read a block of a file; answered with its first rows."""

    stream: int
    format: str
    block: int
    columns: dict[str, Kind]
    skip: int
    batch_rows: int
    scratch: str | None


class ReadRows(ReaderRequest, frozen=True, kw_only=True):
    """Read some rows of a block, which are the answer."""

    format: str
    block: int
    columns: dict[str, Kind]
    start: int
    stop: int


class NextRows(ReaderRequest, frozen=True, kw_only=True):
    """Read on."""

    stream: int


class RowsMade(Message, frozen=True, kw_only=True):
    """A worker or reader process: the rows beside it are the answer."""

    names: tuple[str, ...] = ()
    kinds: dict[str, Kind | None] = msgspec.field(default_factory=dict)
    end: bool = False
    """Whether the stream has ended, and these are no rows."""
    cpu_s: float = 0.0
    """Seconds of a processor that it took."""
    waited_s: float = 0.0
    """Seconds that the process waited for storage or servers."""
    fetched: dict[str, int] = msgspec.field(default_factory=dict)
    """What it has counted of requests for remote files since its last answer (`FetchCounters`)."""


class RowsFailed(Message, frozen=True):
    """A worker or reader process: what was asked for failed."""

    error: str
    """The name of its type, where a reader raised it."""
    reason: str


WorkerMessage = LoadFunction | RunFunction | ReadHead | ReadBlock | ReadRows | NextRows | RowsMade | RowsFailed


class Rows(Message, frozen=True):
    """A service and its workers: a message, and columns of rows."""

    head: WorkerMessage
    columns: dict[str, list[npt.NDArray[Any]]]
    """Numbers as one array, ragged columns as values and offsets."""


# --------------------------------------------------------------------------------------------------------------
# What a service process writes for its launcher, one line of JSON each; errors are `Failure`.


class ServiceStarts(Message, frozen=True):
    """It lives, while it starts."""


class ServiceProgress(Message, frozen=True):
    """How far something is."""

    what: str
    done: int
    of: int


class ServiceOptionsKept(Message, frozen=True):
    """Storage options of an added source, which its launcher gives to the process that replaces it."""

    name: str
    options: dict[str, Any]


class ServiceReady(Message, frozen=True):
    """It serves."""

    address: str
