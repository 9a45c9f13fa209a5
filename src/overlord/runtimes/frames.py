"""What roles say to one another across hosts: a JSON head and plain arrays. No Python object of ours is ever pickled.

Rules of this file:
1. A frame is a list: the head as bytes, then the arrays it speaks of, in its order. An engine carries arrays without
   looking into them, and hands them out without a copy where it can.
2. An error travels as its name, its message and the source it is about, like everything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overlord.core.messages import Media, MetaDelta, MetaRequest, Payload
from overlord.core.ragged import Ragged
from overlord.core.samples import META, Cursor
from overlord.errors import OverlordError, error_named

Frame = list[Any]
"""The head, then arrays."""

_ERROR = "!"
"""The key of an error; heads hold no names of users beside it."""
_ERROR_BEGINS = b'{"!":'
_MEDIA = ("rows", "start", "length", "grids", "seconds", "seeds", "bad", "values", "begin", "nbytes_of")


def frame_of(head: Any, arrays: Sequence[npt.NDArray[Any]] = ()) -> Frame:
    """Make a frame.

    Example:
        >>> head, arrays = open_frame(frame_of({"step": 3}, [np.arange(2)]))
        >>> head["step"], next(arrays).tolist()
        (3, [0, 1])
    """
    return [json.dumps(head, separators=(",", ":")).encode(), *arrays]


def open_frame(frame: Frame) -> tuple[Any, Iterator[npt.NDArray[Any]]]:
    """Return the head of a frame, and its arrays one after the other.

    Raises:
        OverlordError: the error that was sent instead of an answer.
    """
    head = json.loads(frame[0])
    if isinstance(head, dict) and _ERROR in head:
        raise error_named(*head[_ERROR])
    return head, iter(frame[1:])


def error_in(frame: Frame) -> OverlordError | None:
    """Return the error that was sent instead of an answer, if it is one.

    Example:
        >>> error_in(error_frame(OverlordError("no"))), error_in(frame_of({"step": 3}))
        (OverlordError('no'), None)
    """
    if not frame[0].startswith(_ERROR_BEGINS):
        return None
    return error_named(*json.loads(frame[0])[_ERROR])


def error_frame(error: BaseException) -> Frame:
    """Make the frame that raises an error where it is opened."""
    if isinstance(error, OverlordError):
        return frame_of({_ERROR: [type(error).__name__, str(error), error.source]})
    return frame_of({_ERROR: ["OverlordError", f"{type(error).__name__}: {error}"]})


def frame_bytes(frame: Frame) -> int:
    """Return how many bytes a frame holds."""
    return len(frame[0]) + sum(array.nbytes for array in frame[1:])


def requests_to_frame(requests: Sequence[MetaRequest], **facts: Any) -> Frame:
    """Write what a planner asks of loaders, and what it tells them beside."""
    return frame_of({"requests": [[r.source, list(r.cursor), r.count] for r in requests], **facts})


def requests_from_frame(frame: Frame) -> list[MetaRequest]:
    """Read what a planner asks of loaders."""
    head, _ = open_frame(frame)
    return [MetaRequest(source, Cursor(*cursor), count) for source, cursor, count in head["requests"]]


def deltas_to_frame(deltas: Sequence[MetaDelta]) -> Frame:
    """Write what loaders know of samples."""
    head = [[d.source, len(d.meta), list(d.next_cursor), -1 if d.items is None else len(d.items)] for d in deltas]
    listed = [d.items for d in deltas if d.items is not None]
    meta = np.concatenate([d.meta for d in deltas]).view(np.uint8) if deltas else np.empty(0, np.uint8)
    return frame_of({"deltas": head}, [meta, *([np.concatenate(listed)] if listed else [])])


def deltas_from_frame(frame: Frame) -> list[MetaDelta]:
    """Read what loaders know of samples."""
    head, arrays = open_frame(frame)
    meta, items = next(arrays).view(META), next(arrays, np.empty((0, 4), np.int32))
    deltas: list[MetaDelta] = []
    row = item = 0
    for source, rows, cursor, listed in head["deltas"]:
        mine = items[item : item + listed] if listed >= 0 else None
        deltas.append(MetaDelta(source, meta[row : row + rows], Cursor(*cursor), mine))
        row, item = row + rows, item + max(listed, 0)
    return deltas


def payloads_to_frame(payloads: Sequence[Payload], **facts: Any) -> Frame:
    """Write the samples that loaders hand over, and some numbers beside them."""
    heads: list[dict[str, Any]] = []
    arrays: list[npt.NDArray[Any]] = []
    for payload in payloads:
        media = payload.media
        heads.append({"step": payload.step, "source": payload.source, "labels": payload.labels, "late": payload.late,
                      "part": payload.chosen is not None,
                      "media": None if media is None else [media.kind, media.encoded]})  # fmt: skip
        for column in (payload.tokens, payload.loss):
            first, last = int(column.offsets[0]), int(column.offsets[-1])
            arrays += [column.values[first:last], column.offsets - first]
        arrays += [] if payload.chosen is None else [payload.chosen]
        arrays += [] if media is None else [np.ascontiguousarray(getattr(media, name)) for name in _MEDIA]
    return frame_of({"payloads": heads, **facts}, arrays)


def payloads_from_frame(frame: Frame) -> tuple[list[Payload], dict[str, Any]]:
    """Read the samples that loaders handed over, and the numbers beside them; columns are views into the frame."""
    head, arrays = open_frame(frame)
    payloads: list[Payload] = []
    for one in head.pop("payloads"):
        tokens, loss = (Ragged(next(arrays), next(arrays)) for _ in range(2))
        chosen = next(arrays) if one["part"] else None
        media = None
        if one["media"] is not None:
            columns = {name: next(arrays) for name in _MEDIA}
            media = Media(kind=one["media"][0], encoded=one["media"][1], **columns)
        payloads.append(Payload(one["step"], one["source"], tokens, loss, media, chosen, one["labels"], one["late"]))
    return payloads, head
