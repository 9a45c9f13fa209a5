"""Every exception overlord raises.

    OverlordError
    |-- SpecError         the user asked for something that cannot be done (exit code 2)
    |   |-- SourceError   a source is missing, empty or unreadable before the run starts
    |   `-- StateError    a saved state belongs to another job or another version
    |-- PlanError         a step cannot be planned as the job asks
    |   |-- NothingToDraw all sources that are left are parked
    |   `-- ReportMissing a step follows a report of the trainer that has not come
    |-- ReaderError       a file that worked before cannot be read any more
    |-- ToleranceError    a source has more bad samples than its tolerance allows
    |-- StoreError        the journal or a snapshot cannot be written or read
    |   `-- Fenced        another service has taken the store over; this one can promise nothing any more
    |       `-- Succeeded   it was a later incarnation of this one
    |-- ServiceLost       the service process is gone or does not answer
    |   |-- AnswerLost    an answer will not come from who was asked; it can be asked for again
    |   |-- Rewound       the service goes back to an earlier step and is started again there; ask it again
    |   `-- Superseded    a message came from an incarnation of a role that has a successor
    `-- ClosedError       a service or client was used after it was closed

A message says what is wrong (with the value found), what it would cause, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AnswerLost",
    "ClosedError",
    "Fenced",
    "NothingToDraw",
    "OverlordError",
    "PlanError",
    "ReaderError",
    "ReportMissing",
    "Rewound",
    "ServiceLost",
    "SourceError",
    "SpecError",
    "StateError",
    "StoreError",
    "Succeeded",
    "Superseded",
    "ToleranceError",
    "error_named",
    "joined",
]


class OverlordError(Exception):
    """The root of all errors raised by overlord."""

    source: str | None = None
    """The source that cannot be read, where that is what failed: a launch may park it and go on."""


class SpecError(OverlordError):
    """The job, the mesh or an argument is wrong; nothing has run."""


class SourceError(SpecError):
    """A source is missing, empty or unreadable; nothing has run."""


class StateError(SpecError):
    """A state cannot be used with this job."""


class PlanError(OverlordError):
    """A step cannot be planned under the job's limits."""


class NothingToDraw(PlanError):
    """All sources that are left in the mixture are parked: a step waits until one returns."""


class ReportMissing(PlanError):
    """A step's mixture follows the report of an earlier step, and nobody has reported it."""


class ReaderError(OverlordError):
    """A file failed while the run was reading it."""


class ToleranceError(OverlordError):
    """A source has more bad samples than it may have."""


class StoreError(OverlordError):
    """The store failed; what it promised is still there."""


class Fenced(StoreError):
    """Another service, or a later incarnation of this one, has taken the store over."""


class Succeeded(Fenced):
    """A later incarnation of this very service owns the store, and goes on there."""


class ServiceLost(OverlordError):
    """The service process died, hung or was closed by somebody else."""


class AnswerLost(ServiceLost):
    """An answer will not come, though who was asked may live: it can be asked again."""


class Rewound(ServiceLost):
    """All ranks have asked for an earlier step: the service is being started again there, and can be asked again."""


class Superseded(ServiceLost):
    """A message came from an incarnation of a role that has a successor."""


class ClosedError(OverlordError):
    """A closed service or client was used."""


def joined(errors: Sequence[OverlordError]) -> OverlordError:
    r"""Return one error for several, a line of the message for each; one alone stays as it is.

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
    kind = globals().get(name) if name in __all__ and name[0].isupper() else None
    error: OverlordError = (kind or OverlordError)(message)
    error.source = source
    return error
