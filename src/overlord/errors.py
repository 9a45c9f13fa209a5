"""Every exception overlord raises.

    OverlordError
    |-- SpecError         the user asked for something that cannot be done (exit code 2)
    |   |-- SourceError   a source is missing, empty or unreadable before the run starts
    |   `-- StateError    a saved state belongs to another job or another version
    |-- PlanError         a step cannot be planned as the job asks
    |   |-- NothingToDraw all remaining sources are parked
    |   `-- ReportMissing a step depends on a report of the trainer that has not arrived
    |-- ReaderError       a file that was readable before cannot be read
    |-- ToleranceError    a source has more bad samples than its tolerance allows
    |-- HookError         a hook of the user failed, or returned what was not planned
    |-- StoreError        the journal or a snapshot cannot be written or read
    |   `-- Fenced        another service owns the store now; this one must not write to it
    |       `-- Succeeded   the new owner is a later incarnation of the same service
    |-- ServiceLost       the service process is gone or does not answer
    |   |-- AnswerLost    the reply to a request is lost; the request can be repeated
    |   |-- Rewound       the service restarts at an earlier step; repeat the request
    |   `-- Superseded    a message came from an incarnation of a role that has been replaced
    `-- ClosedError       a service or client was used after it was closed

A message says what is wrong (with the value found), what it would cause, and what to do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence


class OverlordError(Exception):
    """The root of all errors raised by overlord."""

    source: str | None = None
    """The source that could not be read, if that is the cause: a launch may park it and continue."""


class SpecError(OverlordError):
    """The job, the mesh or an argument is wrong; nothing has run."""


class SourceError(SpecError):
    """A source is missing, empty or unreadable; nothing has run."""


class StateError(SpecError):
    """A state cannot be used with this job."""


class PlanError(OverlordError):
    """A step cannot be planned under the job's limits."""


class NothingToDraw(PlanError):
    """All remaining sources of the mixture are parked: a step waits until one returns."""


class ReportMissing(PlanError):
    """The mixture or the strategy of a step follows the report of an earlier step, which has not arrived."""


class ReaderError(OverlordError):
    """A file failed while the run was reading it."""


class ToleranceError(OverlordError):
    """A source has more bad samples than it may have."""


class HookError(OverlordError):
    """A hook of the user raised, or returned something else than what was planned."""


class StoreError(OverlordError):
    """The store failed; what was durable before is still there."""


class Fenced(StoreError):
    """Another service, or a later incarnation of this one, owns the store now."""


class Succeeded(Fenced):
    """A later incarnation of the same service owns the store and continues there."""


class ServiceLost(OverlordError):
    """The service process died, hung or was closed by another process."""


class AnswerLost(ServiceLost):
    """The reply to a request is lost, though the peer may be alive: the request can be repeated."""


class Rewound(ServiceLost):
    """All ranks asked for an earlier step: the service restarts there; repeat the request."""


class Superseded(ServiceLost):
    """A message came from an incarnation of a role that has been replaced."""


class ClosedError(OverlordError):
    """A closed service or client was used."""


@functools.cache
def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this install, for messages.

    An install by name is known to an index. Any other (a clone, a folder, an archive, a repository) is not, and is
    named by where it came from, which pip writes down (PEP 610).
    """
    import importlib.metadata  # here, where something has failed: every process imports this file
    import json
    import shutil
    import sys
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    name, source = "overlord-data", Path(__file__).resolve().parents[2]
    try:
        recorded = importlib.metadata.distribution(name).read_text("direct_url.json")
        origin = json.loads(recorded) if recorded else {}
    except (importlib.metadata.PackageNotFoundError, ValueError):
        origin = {}
        if (source / "pyproject.toml").is_file():  # a checkout that is on the path and not installed
            origin = {"url": source.as_uri(), "dir_info": {"editable": True}}
    url, folder = origin.get("url", ""), origin.get("dir_info")
    if folder is not None:
        what = f"{'-e ' if folder.get('editable') else ''}'{url2pathname(urlsplit(url).path)}[{extra}]'"
    elif version_control := origin.get("vcs_info"):
        what = f"'{name}[{extra}] @ {version_control['vcs']}+{url}@{version_control['commit_id']}'"
    else:
        what = f"'{name}[{extra}] @ {url}'" if url else f"'{name}[{extra}]'"
    here, pip = Path(sys.executable).parent, shutil.which("pip")
    by = "pip" if pip is not None and Path(pip).parent == here else f"{sys.executable} -m pip"
    return f"{by} install {what}"


def joined(errors: Sequence[OverlordError]) -> OverlordError:
    r"""Return one error for several, with one line of the message for each; a single error is returned as it is.

    Example:
        >>> joined([SpecError("a is wrong"), SourceError("b is gone")])
        SpecError('a is wrong\nb is gone')
    """
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else SpecError
    return kind("\n".join(dict.fromkeys(str(error) for error in errors)))


def error_named(name: str, message: str, source: str | None = None) -> OverlordError:
    """Rebuild an error that crossed a process border as (class name, message, and its source where it has one).

    Example:
        >>> error_named("PlanError", "does not fit")
        PlanError('does not fit')
    """
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, OverlordError)):
        kind = OverlordError
    error: OverlordError = kind(message)
    error.source = source
    return error


def shortened(text: object, most: int = 160) -> str:
    """Return a quote of a foreign message on one line: its first sentences, or words, within so many characters.

    Example:
        >>> shortened("Could not connect to server. Detail: [errno 111] refused", 40)
        'Could not connect to server'
        >>> shortened("one two three four", 12)
        'one two ...'
    """
    words = " ".join(str(text).split())
    if len(words) > most:
        ends = [found.start() for found in re.finditer(r"[.;!?] ", words[: most + 1])]
        if ends:
            return words[: ends[-1]]
        words = words[: most - 3].rpartition(" ")[0] or words[: most - 4]
        return f"{words.rstrip(',;:')} ..."
    return words.rstrip(".")
