"""Which loader hosts serve each source, which shadow is promoted after a loss, and which sources get a shadow. Pure.

The planner's rule of the paper's section 6.1. Detecting that a host is lost and starting its replacement is done by the
runtime's supervisor; a host never promotes itself.

    primary and shadow live     a step's samples come from the primary; the shadow follows its position
    primary lost                the shadow becomes primary; the replacement of the lost host becomes shadow
    shadow lost                 its replacement becomes shadow
    both lost, or no shadow     the replacement of the primary starts at the trainers' position, and reads again
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from overlord.core.samples import Part
from overlord.errors import SpecError
from overlord.job.specs import Audio, Custom, Source, Video

NO_HOST = -1
"""The shadow host of a source without a shadow."""

WORTH_S = 0.25
"""With shadows="auto", a source gets a shadow if its loader takes longer than this to recover, after its process."""
_REMOTE_S = 1.0
"""The least time to list and open remote files."""
_MB_S = {"stream": 60.0, "block": 400.0}
"""How fast rows are read again: as a compressed stream, and from files with random access."""
_STREAMED = (".gz", ".zst", ".tar", ".tgz", ".bz2", ".xz")


@dataclass(frozen=True, slots=True)
class Assignment:
    """The loader hosts of each source, and the host of its shadow."""

    primary: tuple[tuple[int, ...], ...]
    """The hosts of each source: the groups of its order are assigned to them in turn."""
    shadow: tuple[int, ...]
    """The host of each source's shadow; NO_HOST for a source without one."""

    def host_of(self, source: int, part: Part) -> int:
        """Return the host that serves a part of a source; also for a part of an older assignment."""
        hosts = self.primary[source]
        return hosts[part.number % len(hosts)]

    def parts_of(self, source: int) -> list[Part]:
        """Return the parts of a source, one for each of its hosts.

        Example:
            >>> Assignment(((0, 2),), (-1,)).parts_of(0)
            [Part(number=0, of=2), Part(number=1, of=2)]
        """
        of = len(self.primary[source])
        return [Part(number, of) for number in range(of)]

    def sources_of(self, host: int) -> list[int]:
        """Return the sources that a host serves."""
        return [source for source, hosts in enumerate(self.primary) if host in hosts]

    def shadows_of(self, host: int) -> list[int]:
        """Return the sources that a host shadows."""
        return [source for source, at in enumerate(self.shadow) if at == host]


def promote(now: Assignment, lost: Collection[int]) -> Assignment:
    """Return the assignment after some loader hosts were lost.

    Example:
        >>> promote(Assignment(((0,), (1,)), (1, -1)), {0})
        Assignment(primary=((1,), (1,)), shadow=(0, -1))
        >>> promote(Assignment(((0,),), (1,)), {0, 1})
        Assignment(primary=((0,),), shadow=(1,))
    """
    swapped = [_swap(hosts, shadow, lost) for hosts, shadow in zip(now.primary, now.shadow, strict=True)]
    return Assignment(tuple(hosts for hosts, _ in swapped), tuple(shadow for _, shadow in swapped))


def _swap(hosts: tuple[int, ...], shadow: int, lost: Collection[int]) -> tuple[tuple[int, ...], int]:
    """Replace the first lost host of a source by its shadow, if that is alive."""
    gone = next((host for host in hosts if host in lost), None)
    if gone is None or shadow in lost or shadow == NO_HOST:
        return hosts, shadow
    return tuple(shadow if host == gone else host for host in hosts), gone


def restart_cost_s(source: Source) -> float:
    """Estimate how long a new loader of this source takes to reach the position of the lost one.

    It lists the files, and reads the current group from its beginning.

    Example:
        >>> from overlord.job.specs import Text
        >>> restart_cost_s(Source("a", "a.parquet", sample=Text("t"), shuffle_bytes=40_000_000))
        0.1
        >>> restart_cost_s(Source("a", "s3://b/a.jsonl.gz", sample=Text("t"), shuffle_bytes=60_000_000))
        2.0
    """
    remote = any("://" in path and not path.startswith("file://") for path in source.path)
    streamed = any(part in path for path in source.path for part in _STREAMED)
    slow = isinstance(source.sample, (Custom, Audio, Video))  # measuring may take long for each row
    megabytes = max(source.shuffle_bytes, 1 << 20) / 1e6
    return (_REMOTE_S if remote else 0.0) + megabytes / _MB_S["stream" if streamed or slow else "block"]


def shadowed(sources: Sequence[Source], wanted: bool | str | Collection[str]) -> tuple[bool, ...]:
    """Return which sources get a shadow: all, none, the named ones, or with "auto" those that recover slowly.

    Raises:
        SpecError: for a name that no source has.
    """
    if wanted == "auto":
        return tuple(restart_cost_s(source) > WORTH_S for source in sources)
    if isinstance(wanted, bool):
        return (wanted,) * len(sources)
    names = {source.name for source in sources}
    for name in wanted:
        if name not in names:
            raise SpecError(
                f"shadows: no source has the name {name!r}, so the shadow would be missing. Use names of the job's "
                "sources, or True, False or 'auto'."
            )
    return tuple(source.name in wanted for source in sources)
