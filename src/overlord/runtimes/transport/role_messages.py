"""Messages between roles as frames: what a transport carries that leaves the process. A direct call needs none of it.

Rules of this file:
1. A role is asked with a message and gives an answer, both Python objects; what they are follows from the method. The
   methods in the tables below have messages of their own, all others plain JSON values.
2. An error is an answer too: whoever takes the answer with `unwrap` raises it.
3. A plan travels beside its frame, as the block of bytes that the planner has put once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overlord.core.messages import (
    Follow,
    HandedOver,
    HandOver,
    HostNews,
    HostProgress,
    PlanAnswer,
    PlanRequest,
    Waiting,
)
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.plan import plan_from_bytes
from overlord.core.samples import Cursor, Part
from overlord.runtimes.transport.frames import (
    Frame,
    deltas_from_frame,
    deltas_to_frame,
    error_frame,
    error_in,
    frame_of,
    open_frame,
    payloads_from_frame,
    payloads_to_frame,
    requests_from_frame,
    requests_to_frame,
)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An answer whose last part is worked out when it is taken: what comes before is in the order of the calls."""

    finish: Callable[[], Any]


def unwrap(answer: Any) -> Any:
    """Return an answer.

    Raises:
        Exception: the error that came instead of one.
    """
    if isinstance(answer, Exception):
        raise answer
    return answer


def message_to_frame(method: str, message: Any) -> tuple[Frame, Any]:
    """Write a message; return its frame, and the plan that goes beside it, if any."""
    if method == "hand_over":
        return frame_of(
            {"ranks": list(message.ranks), "parts": [[s, *part] for s, part in message.parts]}
        ), message.plan
    return _WRITE.get(method, frame_of)(message), None


def message_from_frame(method: str, frame: Frame, blob: Any = None) -> Any:
    """Read a message."""
    if method == "hand_over":
        head = open_frame(frame)[0]
        parts = [(source, Part(number, of)) for source, number, of in head["parts"]]
        return HandOver(plan_from_bytes(memoryview(blob)), head["ranks"], parts)
    return _READ.get(method, _head)(frame)


def answer_to_frame(method: str, answer: Any) -> Frame:
    """Write an answer, or the error that comes instead of one."""
    return error_frame(answer) if isinstance(answer, BaseException) else _WRITE_ANSWER.get(method, frame_of)(answer)


def answer_from_frame(method: str, frame: Frame) -> Any:
    """Read an answer, or the error that comes instead of one."""
    error = error_in(frame)
    return _READ_ANSWER.get(method, _head)(frame) if error is None else error


def _head(frame: Frame) -> Any:
    return open_frame(frame)[0]


def _news_to_json(news: HostNews) -> dict[str, Any]:
    by_rank = {"reached": news.reached, "positions": news.positions}
    named = {name: {str(rank): step for rank, step in given.items()} for name, given in by_rank.items()}
    return {
        **named,
        "view_bytes": news.view_bytes,
        "told": news.told_missing,
        "newcomers": news.newcomers,
        "waited": news.waited_s,
    }


def _news_from_json(given: Mapping[str, Any]) -> HostNews:
    reached, positions = ({int(rank): step for rank, step in given[n].items()} for n in ("reached", "positions"))
    return HostNews(reached, positions, given["view_bytes"], given["told"], given["newcomers"], given["waited"])


def _request_to_frame(request: PlanRequest) -> Frame:
    return frame_of({"step": request.step, "host": request.host, "news": _news_to_json(request.news)})


def _request_from_frame(frame: Frame) -> PlanRequest:
    head = _head(frame)
    return PlanRequest(int(head["step"]), int(head["host"]), _news_from_json(head["news"]))


def _progress_to_frame(progress: HostProgress) -> Frame:
    return frame_of({"host": progress.host, "news": _news_to_json(progress.news)})


def _progress_from_frame(frame: Frame) -> HostProgress:
    head = _head(frame)
    return HostProgress(int(head["host"]), _news_from_json(head["news"]))


def _follow_to_frame(follow: Follow) -> Frame:
    return requests_to_frame(follow.requests, passed={source: list(at) for source, at in follow.passed.items()})


def _follow_from_frame(frame: Frame) -> Follow:
    passed = {int(source): Cursor(*cursor) for source, cursor in _head(frame)["passed"].items()}
    return Follow(requests_from_frame(frame), passed)


def _plan_to_frame(answer: PlanAnswer) -> Frame:
    head: dict[str, Any] = {"waits": answer.waits is not None}
    head["missing"] = None if answer.waits is None else answer.waits.missing
    head["next_mesh"] = None if answer.next_mesh is None else answer.next_mesh.sizes()
    return frame_of(head, [] if answer.plan is None else [answer.plan])


def _plan_from_frame(frame: Frame) -> PlanAnswer:
    head, rest = open_frame(frame)
    mesh = None if head["next_mesh"] is None else ClientPlaceTree.from_sizes(head["next_mesh"])
    return PlanAnswer(Waiting(head["missing"]) if head["waits"] else None, next(rest, None), mesh)


def _handed_to_frame(answer: HandedOver) -> Frame:
    return payloads_to_frame(answer.payloads, buffer_bytes=answer.buffer_bytes)


def _handed_from_frame(frame: Frame) -> HandedOver:
    payloads, facts = payloads_from_frame(frame)
    return HandedOver(payloads, facts["buffer_bytes"])


_WRITE: Mapping[str, Callable[[Any], Frame]] = {
    "plan": _request_to_frame,
    "tell": _progress_to_frame,
    "summary_buffer": requests_to_frame,
    "follow": _follow_to_frame,
}
_READ: Mapping[str, Callable[[Frame], Any]] = {
    "plan": _request_from_frame,
    "tell": _progress_from_frame,
    "summary_buffer": requests_from_frame,
    "follow": _follow_from_frame,
}
_WRITE_ANSWER: Mapping[str, Callable[[Any], Frame]] = {
    "plan": _plan_to_frame,
    "summary_buffer": deltas_to_frame,
    "hand_over": _handed_to_frame,
}
_READ_ANSWER: Mapping[str, Callable[[Frame], Any]] = {
    "plan": _plan_from_frame,
    "summary_buffer": deltas_from_frame,
    "hand_over": _handed_from_frame,
}
