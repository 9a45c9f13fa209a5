"""A store: the lineages of a job, of which one is being written.

    owner-000001, held-000001.id          the record of the owner, and its mark
    alive                                 the heartbeat of the owner
    lineage-0001/snapshot-000000000016.json
    lineage-0001/journal-000001-00000001
    lineage-0001/loaders-000000000064.json
    lineage-0001/history-000000000064.json
    lineage-0001/job.yaml                 the job and its launch as a job file, where it can be one

Rules of this file:
1. A launch begins a lineage; its first file is a complete snapshot. After that nothing of other lineages is read or
   mixed in. A lineage without a good snapshot is ignored.
2. A snapshot is good if its checksum fits. Instead of a damaged one the one before is used, and more of the journal.
3. Files that are not needed to resume at any of the last `keep` steps are removed.
"""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlord.errors import StateError
from overlord.stores.journal import FoundJournal, Journal, Record, read_journal
from overlord.stores.owners import claim
from overlord.stores.places import Place

VERSION = 1
KEPT_LINEAGES = 4
CLOSED = "closed"
"""The kind of the record that ends the journal of a store that was closed: no plan record of the process that closed it
is missing. Its step is the last that trainers of an earlier incarnation may have come to, -1 where there was none."""
_JOB = "job.yaml"
_COPIED = ("snapshot-", "journal-", "loaders-", "history-")
_BESIDE = {"loaders": 2, "history": 1}
"""How many files of the loaders' counters, and of the history of metrics, are kept."""
KEEP = 256
"""Steps behind the newest snapshot that stay resumable."""

logger = logging.getLogger("overlord")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state, and where in the journal to continue from it."""

    state: dict[str, Any]
    """As `client.state_dict()` returns it."""
    first_step: int
    """The step its lineage began at."""
    service: str
    """The service that wrote it."""
    segment: str
    """The first segment of the journal that may hold later records."""
    horizon: int
    """Steps before this one may have been handed out."""

    @property
    def step(self) -> int:
        """The step it resumes at."""
        return int(self.state["step"])

    @property
    def name(self) -> str:
        """The name of its file: names sort as steps do."""
        return f"snapshot-{self.step:012d}.json"

    def to_bytes(self) -> bytes:
        """Return the file's bytes.

        Example:
            >>> snapshot = Snapshot({"step": 16}, 0, "a", "journal-000001-00000001", 80)
            >>> Snapshot.from_bytes(snapshot.to_bytes(), "here") == snapshot
            True
            >>> Snapshot.from_bytes(snapshot.to_bytes()[:-1], "here") is None
            True
        """
        given = {name: getattr(self, name) for name in ("first_step", "service", "segment", "horizon", "state")}
        return checked_json({"version": VERSION, **given})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Snapshot | None:
        """Read a snapshot; None when it is damaged.

        Raises:
            StateError: Another version of overlord wrote it.
        """
        given = read_checked(data)
        if not isinstance(given, dict):
            return None
        if given.get("version") != VERSION:
            raise StateError(
                f"{where} is a snapshot of version {given.get('version')!r:.20}, and this overlord reads version "
                f"{VERSION}; it would be misread. Resume with the overlord that wrote it, or launch with another store."
            )
        kinds = {"state": dict, "first_step": int, "service": str, "segment": str, "horizon": int}
        if not all(isinstance(given.get(name), kind) for name, kind in kinds.items()):
            return None
        return cls(**{name: given[name] for name in kinds}) if isinstance(given["state"].get("step"), int) else None


def checked_json(given: Any) -> bytes:
    """Return a value as JSON with its checksum."""
    body = json.dumps(given, separators=(",", ":")).encode()
    return b"%08x\n%s" % (zlib.crc32(body), body)


def read_checked(data: bytes) -> Any:
    """Read what `checked_json` wrote; None when it is damaged."""
    head, _, body = data.partition(b"\n")
    try:
        return json.loads(body) if head == b"%08x" % zlib.crc32(body) else None
    except (ValueError, RecursionError):  # the checksum of a file that no store wrote may fit
        return None


@dataclass(frozen=True, slots=True)
class FoundLineage:
    """The content of one lineage in a store."""

    number: int
    snapshots: Sequence[Snapshot]
    """The good ones, oldest first."""
    journal: FoundJournal
    loaders: Mapping[str, Any] = field(default_factory=dict)
    """The saved counters of the SourceLoaders, by source."""
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def records(self) -> Sequence[Record]:
        """The journal's records, in the order in which they were written."""
        return self.journal.records

    @property
    def newest(self) -> Snapshot:
        """The newest snapshot."""
        return self.snapshots[-1]

    @property
    def horizon(self) -> int:
        """The first step that was certainly not handed out."""
        horizons = [record["step"] for record in self.records if record["kind"] == "horizon"]
        return max([*horizons, *(snapshot.horizon for snapshot in self.snapshots)])

    @property
    def reached(self) -> int:
        """The first step that has no plan in the lineage."""
        planned = [record["step"] + 1 for record in self.records if record["kind"] == "plan"]
        return max([self.newest.step, *planned])

    @property
    def last_resumable(self) -> int:
        """The last step that a trainer may have come to: after a crash, newer ones than have a plan, up to the horizon.

        Plan records are written in groups, so the last of them are lost with the process that planned. A process that
        went on after such a crash and closed the lineage before it came as far again does not know of them either: its
        last record says how far its predecessor may have come.
        """
        last = self.records[-1] if self.records else {}
        return max(self.reached, last["step"] if last.get("kind") == CLOSED else self.horizon)


def lineage_before(place: Place, found: FoundLineage, step: int) -> FoundLineage:
    """Return the lineage that contains a step: `found`, or an earlier one if the step is before its first snapshot."""
    for number in reversed(_lineages(place)):
        if number < found.number and step < found.snapshots[0].step:
            found = _read_lineage(place, number) or found
    return found


def newest_lineage(place: Place) -> FoundLineage | None:
    """Read the newest lineage that has a good snapshot; None where there is none."""
    for number in reversed(_lineages(place)):
        found = _read_lineage(place, number)
        if found is not None:
            return found
    return None


def kept_job(found: FoundLineage) -> str:
    """Return the name of the file that holds the job of a lineage, where there is one."""
    return f"{_folder(found.number)}/{_JOB}"


def copy_lineages(place: Place, target: Place) -> None:
    """Copy what a stream can go on from to another place, which then has no owner; nothing else that lies there."""
    for number in _lineages(place):
        folder = _folder(number)
        for name in place.names(folder):
            if not name.startswith(_COPIED) or name.endswith("/"):
                continue
            data = place.read(f"{folder}/{name}")
            if data is not None:  # it was removed meanwhile: a run goes on there
                target.write(f"{folder}/{name}", data)


def kept_history(place: Place) -> Mapping[str, Any]:
    """Return the newest history of metrics in a store, whichever lineage wrote it; empty where there is none."""
    for number in reversed(_lineages(place)):
        folder = _folder(number)
        for _, data in _newest_first(place, folder, place.names(folder), "history-"):
            found = read_checked(data)
            if isinstance(found, dict):
                return found
    return {}


def lineage_of(place: Place, service: str) -> int | None:
    """Return the number of the newest lineage of a service; None where it has none."""
    return next(
        (n for n in reversed(_lineages(place)) if (good := _newest_good(place, n)) and good.service == service), None
    )


class Store:
    """A store that this process owns.

    Args:
        place: The place of the store.
        service: The id of the service; the same one may claim the store again.
        keep: Steps that stay resumable.

    Example:
        >>> import tempfile
        >>> from overlord.stores.places import open_place
        >>> store = Store(open_place(tempfile.mkdtemp()), "a")
        >>> store.begin({"step": 0}, horizon=64)
        >>> store.journal.append({"kind": "report", "step": 0}, durable=True)
        >>> store.save({"step": 16}, store.journal.mark(), horizon=80)
        >>> store.close()
        >>> newest_lineage(store.place).newest.step
        16
    """

    def __init__(self, place: Place, service: str = "", *, keep: int = KEEP) -> None:
        self.place = place
        self._service = service
        self._keep = keep
        self._claim = claim(place, service)
        self._saving = threading.Lock()
        self._folder = ""
        self._over = False
        self._snapshots: list[tuple[int, str, str, int]] = []
        self._beside: dict[str, list[tuple[str, int]]] = {kind: [] for kind in _BESIDE}
        self.lineage = 0
        """The number of the lineage being written; 0 before it has begun."""
        self.goes_on = False
        """Whether it continues a lineage of an earlier incarnation."""
        self.first_step = 0
        """The step that the lineage began at."""
        self.horizon = 0
        """Steps before this one may have been handed out: a recovered stream must repeat them unchanged."""
        self._inherited = -1
        """The last step that trainers of an earlier incarnation may have come to; -1 where there was none."""
        self.journal = Journal(place, self._claim.check)
        """Where inputs and plan records go."""

    def newest(self) -> FoundLineage | None:
        """Read the newest lineage that counts."""
        found = newest_lineage(self.place)
        if found is not None and found.journal.damaged:
            logger.warning(
                "the journal of lineage %d in %s has %d damaged records, which were skipped; if one of them was a "
                "report or a change, recomputed plans will differ and be refused",
                found.number,
                self.place.name,
                found.journal.damaged,
            )
        return found

    def begin(self, state: Mapping[str, Any], *, horizon: int) -> None:
        """Begin a lineage at a state; remove the oldest ones."""
        with self._saving:
            if not self.lineage:
                numbers = _lineages(self.place)
                self.lineage = max(numbers, default=0) + 1
                self._folder = _folder(self.lineage)
                self.first_step = int(state["step"])
            if self.journal.nbytes == 0:
                self.journal.begin(self._folder, self._claim.number)
            self._write_snapshot(state, self.journal.mark(), horizon)
            self._forget_lineages()

    def _forget_lineages(self) -> None:
        """Remove what failed launches left, and all lineages before the last few that can be resumed."""
        numbers = _lineages(self.place)
        good = [number for number in numbers if _newest_good(self.place, number) is not None]
        oldest = good[-KEPT_LINEAGES:][0]
        for number in numbers:
            empty = not any(name.startswith("snapshot-") for name in self.place.names(_folder(number)))
            if number < oldest or empty:  # one with damaged snapshots stays until it is old
                self.place.delete(f"{_folder(number)}/")

    def keep_job(self, text: str) -> None:
        """Write the job of the lineage beside it, so that its steps can be looked at later."""
        self.place.write(f"{self._folder}/{_JOB}", text.encode())

    def go_on(self, found: FoundLineage) -> None:
        """Continue a lineage that an earlier incarnation of this service wrote."""
        with self._saving:
            self.lineage, self._folder, self.goes_on = found.number, _folder(found.number), True
            self.first_step, self.horizon = found.newest.first_step, found.horizon
            self._inherited = found.last_resumable
            sizes = found.sizes
            self._snapshots = [(s.step, s.name, s.segment, sizes.get(s.name, 0)) for s in found.snapshots]
            self._beside = {
                kind: [(name, sizes[name]) for name in sorted(sizes) if name.startswith(f"{kind}-")] for kind in _BESIDE
            }
            self.journal.begin(self._folder, self._claim.number, found.journal)

    def reserve(self, horizon: int) -> None:
        """Record that steps up to a horizon may be handed out; on disk when this returns."""
        if horizon > self.horizon:
            self.journal.append({"kind": "horizon", "step": horizon}, durable=True)
            self.horizon = max(self.horizon, horizon)

    def save(self, state: Mapping[str, Any], mark: str, *, horizon: int) -> None:
        """Write a snapshot, and remove files that no resume needs any more.

        `mark` is what `journal.mark()` returned when the state was taken; steps up to `horizon` may be handed out from
        now on.
        """
        with self._saving:
            if self._over:
                return
            self.journal.rotate()
            self._write_snapshot(state, mark, horizon)
            self._compact()

    def end_lineage(self, record: Record, check: Callable[[], None]) -> None:
        """Write the last record of the lineage, on disk when this returns. No snapshot follows it.

        `check` is called first, under the lock, and raises if the store does not allow it: no snapshot can remove older
        steps after it.
        """
        with self._saving:
            check()
            self.journal.append(record, durable=True)
            self._over = True

    def save_loaders(self, step: int, loaders: Mapping[str, Any]) -> None:
        """Write the counters of the SourceLoaders."""
        self._save_beside("loaders", step, loaders)

    def save_history(self, step: int, history: Mapping[str, Any]) -> None:
        """Write the history of metrics; nothing of the stream depends on it."""
        self._save_beside("history", step, history)

    def _save_beside(self, kind: str, step: int, content: Mapping[str, Any]) -> None:
        with self._saving:
            name, data = f"{kind}-{step:012d}.json", checked_json(dict(content))
            self.place.write(f"{self._folder}/{name}", data)
            kept = [one for one in self._beside[kind] if one[0] != name] + [(name, len(data))]
            for old, _ in kept[: -_BESIDE[kind]]:
                self.place.delete(f"{self._folder}/{old}")
            self._beside[kind] = kept[-_BESIDE[kind] :]

    def beat(self) -> None:
        """Write a heartbeat if it is due."""
        self._claim.beat()

    @property
    def oldest_step(self) -> int:
        """The oldest step that can be resumed at."""
        return self._snapshots[0][0] if self._snapshots else self.first_step

    @property
    def nbytes(self) -> int:
        """Bytes of the lineage."""
        files = sum(size for *_, size in self._snapshots) + sum(size for of in self._beside.values() for _, size in of)
        return files + self.journal.nbytes

    def status(self) -> dict[str, Any]:
        """Return where the store is and how large."""
        return {"place": self.place.name, "lineage": self.lineage, "bytes": self.nbytes, "error": None}

    def close(self) -> None:
        """Write buffered records and give the store up, even if a write fails.

        Raises:
            StoreError: Something could not be written; what was durable before is still there.
        """
        try:
            if self.lineage:
                self.journal.append({"kind": CLOSED, "step": self._inherited}, durable=True)
        finally:
            self.journal.close()
            self._claim.close()

    def _write_snapshot(self, state: Mapping[str, Any], mark: str, horizon: int) -> None:
        segment = self.journal.first_needed(int(state["step"]), mark)
        snapshot = Snapshot(dict(state), self.first_step, self._service, segment, max(horizon, self.horizon))
        data = snapshot.to_bytes()
        self.place.write(f"{self._folder}/{snapshot.name}", data)
        self._claim.check()
        others = [one for one in self._snapshots if one[0] != snapshot.step]
        self._snapshots = sorted([*others, (snapshot.step, snapshot.name, segment, len(data))])
        self.horizon = snapshot.horizon

    def _compact(self) -> None:
        newest = self._snapshots[-1][0]
        behind = [number for number, one in enumerate(self._snapshots) if one[0] <= newest - self._keep]
        if not behind:
            return
        base = behind[-1]
        # Snapshots first: a snapshot that exists needs its journal.
        for _, name, *_ in self._snapshots[:base]:
            self.place.delete(f"{self._folder}/{name}")
        del self._snapshots[:base]
        self.journal.forget(min(segment for _, _, segment, _ in self._snapshots))


def _lineages(place: Place) -> list[int]:
    heads = [name.removeprefix("lineage-").rstrip("/") for name in place.names() if name.startswith("lineage-")]
    return sorted(int(head) for head in heads if head.isdecimal())


def _folder(lineage: int) -> str:
    return f"lineage-{lineage:04d}"


def _read_lineage(place: Place, number: int) -> FoundLineage | None:
    folder = _folder(number)
    sizes = place.names(folder)
    snapshots: list[Snapshot] = []
    for where, data in _newest_first(place, folder, sizes, "snapshot-"):
        found = Snapshot.from_bytes(data, where)
        if found is None:
            logger.warning("%s is damaged and was skipped", where)
        else:
            snapshots.insert(0, found)
    if not snapshots:
        return None
    first = min(snapshot.segment for snapshot in snapshots)
    saved = (read_checked(data) for _, data in _newest_first(place, folder, sizes, "loaders-"))
    loaders: Mapping[str, Any] = next((found for found in saved if isinstance(found, dict)), {})
    return FoundLineage(number, snapshots, read_journal(place, folder, first), loaders, sizes)


def _newest_good(place: Place, number: int) -> Snapshot | None:
    folder = _folder(number)
    files = _newest_first(place, folder, place.names(folder), "snapshot-")
    return next((found for where, data in files if (found := Snapshot.from_bytes(data, where)) is not None), None)


def _newest_first(place: Place, folder: str, names: Iterable[str], prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield the full name and the content of the files of a lineage with a prefix; their names sort as steps do."""
    for name in sorted((name for name in names if name.startswith(prefix) and name[-1] != "/"), reverse=True):
        yield f"{place.name}/{folder}/{name}", place.read(f"{folder}/{name}") or b""
