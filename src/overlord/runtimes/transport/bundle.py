"""The hand-over from a launcher to its service and its roles: a checked head, then the job and the launch options.

The body is a pickle (the user's own functions travel in it), and a pickle of a slotted dataclass holds its values by
position. Two processes that imported different code would shift every option silently. So the head names the version
and a digest of all field names, and it is compared before the body is read; options travel by name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any

import cloudpickle

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.job.layout_specs import Layout
from overlord.job.specs import Job, Source
from overlord.runtimes.launching.cluster_placement import ClusterOptions
from overlord.runtimes.launching.launch_options import ServiceOptions
from overlord.scaling.autoscaler import Scaling
from overlord.version import VERSION

FORMAT = 1
"""The layout of the bytes: one line of JSON, then the body."""
MAX_HEAD = 1024


def pack(job: Job, options: ServiceOptions) -> bytes:
    """Return the bytes that a process of the same code reads with `unpack`.

    Raises:
        SpecError: when a function or object of the user's cannot be pickled.
    """
    named = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    try:
        body = cloudpickle.dumps((job, named))
    except Exception as error:  # whatever a user's object raises when it is pickled
        raise SpecError(
            f"the job cannot be sent to the service process ({type(error).__name__}: {error}); nothing could run. "
            "Let functions (Custom, strategy, learn) hold only what pickles (open files and locks do not), or use "
            "runtime='inline'."
        ) from error
    return json.dumps(_head()).encode() + b"\n" + body


def unpack(bundle: bytes) -> tuple[Job, ServiceOptions]:
    """Read what the launching process packed.

    Raises:
        SpecError: when the launching process runs other code than this one.
    """
    head, line_end, body = bytes(bundle).partition(b"\n")
    try:
        theirs = json.loads(head) if line_end and len(head) <= MAX_HEAD else {}
    except ValueError:
        theirs = {}
    ours = _head()
    if theirs != ours:
        raise SpecError(
            f"the launcher runs overlord {_spelled(theirs)}, this process overlord {_spelled(ours)}; options could be "
            "misread. Install the same version on all hosts, and restart what imported an older one."
        )
    job, named = cloudpickle.loads(body)  # from the launching process to its own roles
    return job, ServiceOptions(**named)


def _head() -> dict[str, Any]:
    return {"bundle": FORMAT, "version": VERSION, "fields": _fields_digest()}


def _spelled(head: Any) -> str:
    if not isinstance(head, dict) or "version" not in head:
        return "of an unknown version"
    return f"{head['version']} (hand-over {head.get('bundle')}, fields {str(head.get('fields'))[:8]})"


@functools.cache
def _fields_digest() -> str:
    """Digest the names and the order of all fields that travel."""
    plain = [ServiceOptions, ClusterOptions, Scaling, ClientPlaceTree]
    names = [f"{kind.__name__}.{field.name}" for kind in plain for field in dataclasses.fields(kind)]
    names += [f"{kind.__name__}.{name}" for kind in (Job, Source, Layout) for name in kind.model_fields]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
