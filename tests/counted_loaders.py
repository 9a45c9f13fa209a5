"""Loaders without files: sources of so many rows, whose metadata is made up, drawn by the real Drawer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import overlord as ol
from overlord.core.messages import MetaDelta, MetaRequest
from overlord.core.order import BEGIN
from overlord.core.samples import ENDS_EPOCH, META, SKIP, Cursor
from overlord.core.states import StreamState
from overlord.roles.changes import InputLog
from overlord.roles.drawer import Drawer, DrawnStep
from overlord.stores.places import open_place
from overlord.stores.store import Store


class CountedLoaders:
    """Loaders of sources of so many rows each; every answer is at most `chunk` rows, and never crosses an epoch.

    `lengths` are the tokens of each row (1 by default); of a source in `skips` every so many-th row is filtered out.
    """

    def __init__(
        self,
        rows: Sequence[int],
        *,
        chunk: int = 1 << 20,
        lengths: Sequence[np.ndarray] | None = None,
        skips: Mapping[int, int] | None = None,
    ) -> None:
        self._rows, self._chunk, self._lengths, self._skips = rows, chunk, lengths, skips or {}

    def summary_buffer(self, requests: Sequence[MetaRequest]) -> list[MetaDelta]:
        return [self._delta(request) for request in requests]

    def rest(self, cursors: Mapping[int, Cursor]) -> None:
        pass

    def _delta(self, request: MetaRequest) -> MetaDelta:
        number, (epoch, _, offset), rows = request.source, request.cursor, self._rows[request.source]
        stop = min(offset + min(request.count, self._chunk), rows)
        at = np.arange(offset, stop)
        meta = np.zeros(len(at), META)
        meta["epoch"], meta["offset"], meta["row"] = epoch, at, at
        meta["tokens"] = 1 if self._lengths is None else self._lengths[number][(at + 7 * epoch) % rows]
        meta["loss_tokens"] = meta["tokens"]
        if number in self._skips:
            meta["flags"][at % self._skips[number] == 0] |= SKIP
        if stop == rows:
            meta["flags"][-1] |= ENDS_EPOCH
            return MetaDelta(number, meta, Cursor(epoch + 1, BEGIN, 0), None)
        return MetaDelta(number, meta, Cursor(epoch, 0, stop), None)


def job_of(names: Sequence[str], mixture: ol.Mixture, batch: ol.Batch, **options: Any) -> ol.Job:
    """Return a job whose files do not exist."""
    sources = [ol.Source(name, f"{name}.jsonl", sample=ol.Text("ids", tokenized=True)) for name in names]
    return ol.Job(sources=sources, mixture=mixture, batch=batch, **options)


def drawer_of(job: ol.Job, loaders: Any, folder: Path, state: StreamState | None = None) -> Drawer:
    """Return a drawer over loaders; the sources are in the order of their names."""
    assert job.names == sorted(job.names)
    inputs = InputLog(job, Store(open_place(str(folder))).journal, {}, [])
    inputs.base.update(dict.fromkeys(job.names, 1.0))
    return Drawer(job, loaders, state or StreamState.begin(len(job.names)), inputs)


def steps_of(drawer: Drawer, steps: int) -> Iterator[DrawnStep]:
    """Yield at most so many steps."""
    for _ in range(steps):
        drawn = drawer.draw()
        if drawn is None:
            return
        yield drawn
