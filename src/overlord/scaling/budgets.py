"""What a launch may take of a host: bytes held ahead, workers, and the memory of loaders."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.errors import SpecError

AHEAD_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a service may take.

    Example:
        >>> Budget(cpus=16, memory=8 << 30).ahead == 512 << 20
        True
        >>> Budget(cpus=0)
        Traceback (most recent call last):
        ...
        overlord.errors.SpecError: budget.cpus is 0; nothing could be loaded. Give a whole number of 1 or more.
    """

    ahead: int = AHEAD_BYTES
    """Bytes of samples and views held ahead of the trainers."""
    cpus: int | None = None
    """Workers that all sources may have together; none takes one for each core of this host."""
    memory: int | None = None
    """Bytes that the files and read buffers of all sources may take; none sets no limit."""

    def __post_init__(self) -> None:
        """Refuse what nothing could run with."""
        for name in ("ahead", "cpus", "memory"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise SpecError(
                    f"budget.{name} is {value!r:.80}; nothing could be loaded. Give a whole number of 1 or more."
                )
