"""How many files a process may have open: raised as far as the host allows, and named where it is too few.

A service holds a descriptor for each microbatch that is built ahead (it is shared memory), for each connection, and for
each file that is being read.
"""

from __future__ import annotations

import errno

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
    "Raise the hard limit where the job is started: `ulimit -n 65536`, nofile in /etc/security/limits.conf, "
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


def out_of_files(error: BaseException) -> OverlordError | None:
    """Return what to tell of an error that comes from too few descriptors; None for any other."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return OverlordError(
        f"the service may have no more files open (limit {raise_file_limit()}, ulimit -n: {error.strerror}); no "
        f"further step can be built. {_REMEDY} A smaller prefetch or fewer ranks on this host also help."
    )
