"""A loader host: the SourceLoaders of many sources in one process, feeding several constructor hosts.

Rules of this file:
1. The first host that asks for a step has all of it popped and finished; the others find their part here. A step that
   nobody asked for in time is let go of, and made again for who comes late: everything here is a cache.
2. What is staged stays within a byte budget; the step that is asked for is always made.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from overlord.core.messages import LoaderOrder, MetaDelta, MetaRequest, Payload
from overlord.core.plan import LoadingPlan, Share, known_early, with_labels
from overlord.core.samples import WHOLE, Cursor, Part, take_meta
from overlord.roles.ports import Collect
from overlord.runtimes.loader_fleet import LoaderFleet

KEPT = 64
"""Steps behind the newest that are kept at most for a host that has not asked: nobody may be attached there."""


_Asked = tuple[int, tuple[tuple[int, Part], ...]]
"""A step, and the parts of sources of it that were asked for together."""


class _StagedStep:
    """What was popped of one step, until every rank's host has taken its part."""

    def __init__(self, collect: Collect) -> None:
        self._collect: Collect | None = collect
        self._lock = threading.Lock()
        self._payloads: list[Payload] | None = None

    def payloads(self) -> list[Payload]:
        """Return the finished samples; the first who asks finishes them, the others wait for that."""
        with self._lock:
            if self._payloads is None:
                assert self._collect is not None
                self._payloads = self._collect()
                self._collect = None  # it holds the rows as they were read
            return self._payloads

    @property
    def nbytes(self) -> int:
        """Bytes of what is finished."""
        return sum(payload.nbytes for payload in self._payloads or ())


class LoaderHost:
    """Hands every constructor host its part of each step."""

    def __init__(self, fleet: LoaderFleet, *, hosts: int, budget_bytes: int) -> None:
        self._fleet = fleet
        self._hosts = hosts
        self._budget = budget_bytes
        self._staged: OrderedDict[_Asked, _StagedStep] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._taken: dict[_Asked, set[int]] = {}

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        """Tell what is known of the samples from some cursors on."""
        return self._fleet.summary_buffer(requests)

    def follow(self, requests: Sequence[MetaRequest], passed: Mapping[int, Cursor]) -> None:
        """Keep the buffers of sources warm that have their primary elsewhere."""
        self._fleet.follow(requests, passed)

    def hand_over(
        self, plan: LoadingPlan, ranks: Collection[int], parts: Sequence[tuple[int, Part]] | None = None
    ) -> list[Payload]:
        """Return what some ranks need of some sources of a step, one payload a source.

        Also where that is nothing but how many labels the source's samples have, which every host must know.

        Sources that were taken over in the middle of a step are asked for by themselves. Any part of a source can be
        asked for, whichever one is prepared here.
        """
        drawn = self._fleet.drawn(plan)
        given = [(source, WHOLE) for source in drawn] if parts is None else parts
        asked = (plan.step, tuple((source, part) for source, part in given if source in drawn))
        try:
            return self._cut_for(plan, ranks, asked)
        finally:
            self._let_go(plan, ranks, asked)

    def _cut_for(self, plan: LoadingPlan, ranks: Collection[int], asked: _Asked) -> list[Payload]:
        share = Share.of(plan, ranks)
        return [share.cut(plan, payload) for payload in self._stage(plan, asked).payloads()]

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        """Let the loaders of some sources drop what they hold."""
        self._fleet.rest(cursors)

    def note_faults(self, faults: Sequence[tuple[int, int, int, str]]) -> None:
        """Let the loaders count samples whose media do not decode."""
        self._fleet.note_faults(faults)

    @property
    def buffer_bytes(self) -> int:
        """Bytes in the read buffers and of what is staged."""
        with self._lock:
            return self._fleet.buffer_bytes + sum(staged.nbytes for staged in self._staged.values())

    def status(self) -> dict[int, dict[str, Any]]:
        """Return what each source's loaders hold and have met."""
        return self._fleet.status()

    def snapshot(self) -> dict[str, Any]:
        """Return what a loader that takes the place of one here must know, by source."""
        return self._fleet.snapshot()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what other loaders had met."""
        self._fleet.restore(snapshot)

    def _stage(self, plan: LoadingPlan, asked: _Asked) -> _StagedStep:
        with self._turn:  # steps leave the read buffers in the order in which they are asked for
            with self._lock:
                found = self._staged.get(asked)
            if found is not None:
                return found
            orders = [_order_of(plan, source, part) for source, part in asked[1]]
            if self._hosts > 1:  # several hosts must know alike which media decode: they are told
                early = set(plan.draw.source[known_early(plan)].tolist())
                orders = [dataclasses.replace(order, open_media=order.source in early) for order in orders]
            staged = _StagedStep(_told(plan, asked[1], self._fleet.hand_over(orders)))
            with self._lock:
                self._staged[asked] = staged
            return staged

    def _let_go(self, plan: LoadingPlan, ranks: Collection[int], asked: _Asked) -> None:
        with self._lock:
            self._taken.setdefault(asked, set()).update(ranks)
            if len(self._taken[asked]) >= plan.mesh.world_size:  # also hosts that need no more than to know the labels
                self._staged.pop(asked, None)
                del self._taken[asked]
            for old in [one for one in (*self._taken, *self._staged) if one[0] < plan.step - KEPT]:
                self._taken.pop(old, None)
                self._staged.pop(old, None)
            while len(self._staged) > 1 and sum(one.nbytes for one in self._staged.values()) > self._budget:
                self._staged.popitem(last=False)


def _order_of(plan: LoadingPlan, source: int, part: Part) -> LoaderOrder:
    order = plan.order_of(source)
    return order if part == WHOLE else dataclasses.replace(order, meta=take_meta(order.meta, part.rows(order.meta)))


def _told(plan: LoadingPlan, parts: Sequence[tuple[int, Part]], collect: Collect) -> Collect:
    """Let payloads of a part say which samples of their source they hold, and how many labels those have."""

    def told(payload: Payload, part: Part) -> Payload:
        if part != WHOLE:
            payload = dataclasses.replace(payload, chosen=part.rows(plan.order_of(payload.source).meta))
        return with_labels(plan, payload)

    return lambda: [told(payload, part) for payload, (_, part) in zip(collect(), parts, strict=True)]
