"""The constructor host of one trainer host, asked by frames."""

from __future__ import annotations

import threading
from typing import Any

from overlord.core.place_tree import ranks_of_host
from overlord.errors import error_named
from overlord.runtimes.hosts.cluster_role import ClusterRole
from overlord.runtimes.hosts.constructor_host import ConstructorHost
from overlord.runtimes.hosts.peers import RemoteLoaders, RemotePlanner
from overlord.runtimes.launching.deployment import (
    make_constructor,
)
from overlord.runtimes.launching.newcomers import without_newcomer
from overlord.runtimes.transport.doors import door_name
from overlord.runtimes.transport.frames import (
    Frame,
    frame_of,
    open_frame,
)


class ConstructorRole(ClusterRole):
    """The constructor host of one trainer host."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._served = -1
        self._progress = threading.Event()

    def await_progress(self, timeout_s: float) -> dict[str, Any]:
        """Tell the newest step that a client has come to; at once where that is news."""
        self._progress.wait(timeout_s)
        self._progress.clear()
        return {"served": self._served}

    def _note_served(self, step: int) -> None:
        if step > self._served:
            self._served = step
            self._progress.set()

    def begin(self, frame: Frame) -> Frame:
        """Build ahead, and open the door for the trainers of this host."""
        given = open_frame(frame)[0]
        workers = self._workers_for("workers")
        planner = RemotePlanner(self._board, self._blobs, self._site["number"], given["first_step"])
        loaders = RemoteLoaders(self._board, planner)
        prepared, number, hosts = self._prepared, self._site["number"], self._site["hosts"]
        self._constructor = make_constructor(prepared, loaders, workers)
        host = ConstructorHost(
            self._options,
            self._constructor,
            planner,
            ranks_of=lambda tree: ranks_of_host(number, hosts, tree.world_size),
            read_bytes=lambda: loaders.buffer_bytes,
            successor=self._board.me[1] > 1,
            served=self._note_served,
        )
        self._host = host
        self._ends.callback(host.close)
        door = self._claim_folder() / door_name(number, hosts)
        door.unlink(missing_ok=True)  # a predecessor that was killed has left it
        self._ends.enter_context(host.open_door(door))
        return frame_of({})

    def close(self, frame: Frame) -> Frame:
        """End everything that runs here; clients that wait are told why."""
        why = open_frame(frame)[0].get("why")
        if why is not None and hasattr(self, "_host"):
            self._host.ends_for = error_named(*why)
        return super().close(frame)

    def add_source(self, frame: Frame) -> Frame:
        """Learn of a source that comes: how its media are decoded."""
        if self._learn_source(frame):
            self._constructor.add_source(self._prepared.transforms[-1].decoder)
        return frame_of({})

    def drop_source(self, frame: Frame) -> Frame:
        """Forget a source that the planner did not take on."""
        if self._prepared.job.names[-1] == open_frame(frame)[0]["name"]:
            self._prepared = without_newcomer(self._prepared)
            self._constructor.drop_last_source()
        return frame_of({})
