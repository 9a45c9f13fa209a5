"""How many files a process may have open: raised as far as the host allows, and named where it is too few.

A service holds a descriptor for each microbatch that is built ahead (it is shared memory), for each connection, and for
each file that is being read. A trainer holds one for its connection, and one for each piece of shared memory that it
reads batches from.
"""

from __future__ import annotations

import errno
import os

from overlord.errors import OverlordError, SpecError

try:
    import resource
except ImportError:  # pragma: no cover - hosts without POSIX limits
    resource = None  # type: ignore[assignment]

LEAST_FILES = 128
"""What a service needs beside its ranks."""
FILES_PER_RANK = 4
"""A connection, and a few microbatches ahead."""
_REMEDY = (
    "Raise the limit where the job is started: `ulimit -n 65536`, nofile in /etc/security/limits.conf, "
    "LimitNOFILE= of a systemd unit, or --ulimit nofile=65536 of a container."
)


def raise_file_limit() -> int:
    """Raise the soft limit of this process to its hard limit; return what it is then."""
    if resource is None:
        return 1 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard):
        wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass  # some hosts allow less than they say; what is there is judged below
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def check_file_limit(ranks: int) -> None:
    """Raise the limit of this process, and refuse to serve where it is too low.

    Raises:
        SpecError: This process may have too few files open.
    """
    limit, needed = raise_file_limit(), LEAST_FILES + FILES_PER_RANK * ranks
    if limit < needed:
        raise SpecError(
            f"a process may have {limit} files open on this host (ulimit -n, hard limit), and a service for "
            f"{ranks} rank{'' if ranks == 1 else 's'} needs at least {needed}; it would fail in the middle of a step. "
            f"{_REMEDY}"
        )


def out_of_files(error: BaseException, cannot: str) -> OverlordError | None:
    """Return what to raise for an error that comes from too few descriptors; None for any other.

    Args:
        error: What was raised.
        cannot: What this process cannot do without a descriptor.
    """
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    if error.errno == errno.ENFILE:
        return OverlordError(
            f"this host has no file descriptor left ({error.strerror}); {cannot}. End processes that hold many, or "
            "raise fs.file-max with sysctl."
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = "" if soft == hard else f" The process itself may raise its limit to {_spelled(hard)} (resource.setrlimit)."
    return OverlordError(
        f"process {os.getpid()} has {_spelled(soft)} files open, which is all that it may have (ulimit -n: "
        f"{error.strerror}); {cannot}. Close what is not needed any more. {_REMEDY}{more}"
    )


def _spelled(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)
