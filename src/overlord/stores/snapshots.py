"""Snapshots: the complete state of a stream before a step, in one versioned file with a checksum."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

from overlord.errors import StateError

VERSION = 1


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
        head = {"first_step": self.first_step, "service": self.service, "segment": self.segment}
        given = {"version": VERSION, **head, "horizon": self.horizon, "state": self.state}
        return checked_json(given)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Snapshot | None:
        """Read a snapshot; None when it is damaged.

        Raises:
            StateError: Another version of overlord wrote it.
        """
        given = read_checked(data)
        if given is None:
            return None
        if given["version"] != VERSION:
            raise StateError(
                f"{where} is a snapshot of version {given['version']!r}, this overlord reads version {VERSION}; it "
                "would be misread. Resume with the overlord that wrote it, or launch with another store."
            )
        return cls(given["state"], given["first_step"], given["service"], given["segment"], given["horizon"])


def checked_json(given: Any) -> bytes:
    """Return a value as JSON with its checksum."""
    body = json.dumps(given, separators=(",", ":")).encode()
    return b"%08x\n%s" % (zlib.crc32(body), body)


def read_checked(data: bytes) -> Any:
    """Read what `checked_json` wrote; None when it is damaged."""
    head, _, body = data.partition(b"\n")
    return json.loads(body) if head == b"%08x" % zlib.crc32(body) else None
