"""One instance of a role in a process or actor of its own: frames in, frames out, heartbeats, and its lease.

The supervisor calls in this order: the others `prepare` while loaders `open`, the planner `open_store`, loaders
`begin`, the planner `begin`, constructors `begin`. A replacement goes through the same steps while the others go on.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from overlord.core.messages import Heartbeat, MembershipHead, Nothing
from overlord.errors import AnswerLost, OverlordError, Superseded
from overlord.runtimes.hosts.constructor_host import ConstructorHost
from overlord.runtimes.hosts.loader_host import LoaderHost
from overlord.runtimes.hosts.peers import Blobs
from overlord.runtimes.hosts.planner_host import PlannerHost
from overlord.runtimes.hosts.role_host import RoleHost
from overlord.runtimes.launching.service_options import unpack
from overlord.runtimes.supervision.blame import late_calls
from overlord.runtimes.supervision.child import LIMITS, Limits
from overlord.runtimes.supervision.cleanup import set_up_process
from overlord.runtimes.transport.codec import Frame
from overlord.runtimes.transport.engine import SERVICE, Membership, Peer, Sender
from overlord.runtimes.transport.peer_client import PeerClient
from overlord.runtimes.transport.role_codec import Unfinished, answer_to_frame, question_from_frame
from overlord.runtimes.transport.shared_memory import few_arenas

logger = logging.getLogger("overlord")

ROLES: dict[str, type[RoleHost]] = {"loader": LoaderHost, "planner": PlannerHost, "constructor": ConstructorHost}

BEAT_S = 0.5
"""How long a heartbeat is held before it is answered: one is always under way, so a death is noticed at once."""
PROGRESS_S = 0.1
"""How long it is held at least, also where the role has made progress that the supervisor should learn of."""


class RoleEndpoint:
    """One instance of a role, whichever transport carries its calls; an error is an answer."""

    def __init__(self, bundle: bytes, paths: Sequence[str], folder: str, site: Mapping[str, Any], blobs: Blobs) -> None:
        self.peer_client = PeerClient((site["name"], site["generation"]), ended=self._end)
        self._failed: Frame | None = None
        self._role: RoleHost | None = None
        self._numbers = itertools.count()
        self._running: dict[int, float] = {}
        self._beaten = 0.0
        few_arenas()
        set_up_process()
        sys.path += [path for path in paths if path not in sys.path]  # where the launcher's functions come from
        try:
            self._role = ROLES[site["role"]](*unpack(bundle), folder, site, self.peer_client, blobs)
        except BaseException as error:  # every call is answered with it: a process that fails to start tells less
            logger.exception("the %s did not start", site["name"])
            self._failed = answer_to_frame(error)

    def learn(self, head: MembershipHead, peers: Mapping[str, Peer]) -> Frame:
        """Take a membership."""
        self.peer_client.learn(Membership.from_head(head, peers))
        return answer_to_frame(Nothing())

    def ask(self, method: str, frame: Frame, plan: Any = None, sender: Sender = SERVICE) -> Frame:
        """Call a method of the role."""
        if method == "beat":
            return self._beat()
        if self._failed is not None:
            return self._failed
        number = next(self._numbers)
        self._running[number] = time.monotonic()
        try:
            self.peer_client.check(sender)
            return answer_to_frame(finished(answer_of(self._role, method, question_from_frame(frame, plan))))
        except BaseException as error:  # the caller must learn what became of its call
            if not isinstance(error, OverlordError):
                logger.exception("%r failed", method)
            return answer_to_frame(error)
        finally:
            del self._running[number]

    def _watch_lease(self) -> None:
        lease_s = Limits(self._role.heartbeat_s).lease if self._role is not None else LIMITS.lease
        while time.monotonic() - self._beaten < lease_s:
            time.sleep(1.0)
        self._end()

    def _end(self) -> None:
        """End this process: it was replaced, and its clients connect to the replacement when it is gone."""
        logger.warning("the %s (generation %d) was silent and has been replaced; it ends", *self.peer_client.me)
        os._exit(1)

    def _beat(self) -> Frame:
        """Answer a heartbeat: the version of the membership, how long the oldest call has been running, progress."""
        first, self._beaten = self._beaten == 0.0, time.monotonic()
        if first:
            threading.Thread(target=self._watch_lease, name="overlord-lease", daemon=True).start()
        time.sleep(PROGRESS_S)
        served = -1
        if self._role is None:
            time.sleep(BEAT_S - PROGRESS_S)
        else:
            served = self._role.await_progress(BEAT_S - PROGRESS_S)
        oldest = min(self._running.copy().values(), default=None)
        busy_s = 0.0 if oldest is None else time.monotonic() - oldest
        rewound = self._failed is None and self._role is not None and self._role.rewound
        clients = 0 if self._role is None else self._role.clients
        waits = tuple(late_calls())
        return answer_to_frame(Heartbeat(self.peer_client.version, busy_s, rewound, served, clients, waits))


def finished(answer: Any) -> Any:
    """Return an answer, worked out to its end."""
    return answer.finish() if isinstance(answer, Unfinished) else answer


def answer_of(role: Any, method: str, message: Any) -> Any:
    """Call a method of a role.

    Raises:
        AnswerLost: when peers refused the role's own calls because it was replaced: the replacement has the answer.
    """
    try:
        return getattr(role, method)(message)
    except Superseded as error:
        raise AnswerLost(f"{error} Ask its replacement.") from error
