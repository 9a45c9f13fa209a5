"""What the loaders of a job need: CPU time and bytes, measured here on a few samples of each source.

Reading and measuring (which tokenizes) is timed apart from finishing (which decodes images, clips and sounds, in the
loader or behind it). Times are CPU seconds of this process, so what its threads do counts, and waiting for storage does
not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from overlord.cli.collecting import Collector
from overlord.cli.output import Tell
from overlord.cli.sources import count_indexed, load_tokenizer
from overlord.core.messages import LoaderOrder, MetaRequest, Payload
from overlord.core.plan import LoadingPlan
from overlord.core.samples import BAD, SKIP, Cursor, MetaArray
from overlord.job.specs import Audio, Source
from overlord.reports.explanation import LoaderFacts, SourceCosts
from overlord.reports.summary import decoded_in
from overlord.roles.source_loader import AHEAD_BYTES, AHEAD_ROWS
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.runtimes.launching.deployment import Roles, base_weights
from overlord.transforms.samples.per_sample import MediaDecoder, decode_media
from overlord.transforms.samples.sample_kinds import make_transform

Unit = Literal["image_tokens", "samples", "tokens"]

_FINISHED = 8
"""Samples of each source that are finished."""
_BUDGET_S = 0.3
"""A source that has taken so long is not finished any further."""


class BufferWatch:
    """Steps over planned samples, and remembers how full the read buffers were and how much of images was drawn."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self.most = np.zeros(len(roles.job.sources), np.int64)
        self.image_tokens = np.zeros(len(roles.job.sources), np.int64)
        self.row_bytes = np.zeros(len(roles.job.sources), np.int64)

    def step_over(self, plan: LoadingPlan) -> None:
        """Drop what a step has in the read buffers, so that they do not grow with the steps."""
        now = np.array([one["buffer_bytes"] for one in self._roles.fleet.status().values()], np.int64)
        np.maximum(self.most, now, out=self.most)
        np.add.at(self.image_tokens, plan.draw.source, plan.draw.meta["image_tokens"])
        np.add.at(self.row_bytes, plan.draw.source, plan.draw.meta["bytes"])
        self._roles.fleet.loader_do_plan(plan, ())


@dataclass(frozen=True, slots=True)
class Timed:
    """CPU seconds and bytes of a source, for one unit of what they grow with."""

    finished: int = 0
    """Samples that were finished."""
    unit: Unit = "tokens"
    """What finishing grows with."""
    read_s: float = 0.0
    """Of a sample with media (their headers are read), or of a token of text (it is tokenized)."""
    finish_s: float = 0.0
    """Of a unit."""
    reads_media: bool = False
    """Whether its samples may have media."""
    token_bytes: float = 0.0
    """Bytes handed over of a token: its id, and whether it counts in the loss."""
    media_bytes: float = 0.0
    """Bytes of media handed over of a unit."""


def time_samples(roles: Roles, steps: int, tell: Tell) -> dict[int, Timed]:
    """Return what a sample of each source costs that the next steps may draw; nothing must have been planned yet."""
    job, state = roles.job, roles.planner.latest_state
    names, base = [source.name for source in job.sources], base_weights(job, roles.facts)
    looked_at = 1 if job.mixture.schedule == "static" else steps
    weights = np.array([job.mixture.weights_at(float(state.step + n), names, base) for n in range(looked_at)])
    drawn = np.flatnonzero(weights.any(axis=0)).tolist()
    found: dict[int, Timed] = {}
    tokenizer = load_tokenizer(job)
    for done, number in enumerate(drawn):
        decoder = make_transform(job.sources[number], tokenizer).decoder
        found[number] = _time_source(roles, number, state.cursor(number), decoder)
        tell("measuring loaders", done + 1, len(drawn))
    return found


def loader_facts(
    roles: Roles, collector: Collector, watch: BufferWatch, timed: Mapping[int, Timed], step_time_s: float
) -> LoaderFacts:
    """Return what the planned steps cost the loaders, from what samples of each source cost."""
    found: list[SourceCosts] = []
    statuses = roles.fleet.status()
    for number, source in enumerate(roles.job.sources):
        one, steps = timed.get(number, Timed()), max(collector.steps, 1)
        place = decoded_in(statuses[number])
        per_step, tokens = int(collector.samples[number]) / steps, int(collector.tokens[number]) / steps
        amounts = {"image_tokens": int(watch.image_tokens[number]) / steps, "samples": per_step, "tokens": tokens}
        found.append(
            SourceCosts(
                name=source.name,
                samples_per_step=per_step,
                measured_samples=one.finished,
                read_cpu_s=(per_step if one.reads_media else tokens) * one.read_s,
                finish_cpu_s=amounts[one.unit] * one.finish_s,
                # What travels encoded has the bytes that the loader read; they say little about its tokens.
                payload_bytes=int(watch.row_bytes[number]) / steps
                if place == "constructor"
                else tokens * one.token_bytes + amounts[one.unit] * one.media_bytes,
                decoded_in=place,
                buffer_bytes=int(watch.most[number]),
                index_bytes=count_indexed(roles.listings[source.name])[2],
            )
        )
    cpu_s = sum(one.cpu_s for one in found)
    return LoaderFacts(
        cpu_s_per_step=cpu_s,
        step_time_s=step_time_s,
        cores=max(1, math.ceil(cpu_s / step_time_s)),
        payload_bytes_per_step=sum(one.payload_bytes for one in found),
        buffer_bytes=sum(one.buffer_bytes for one in found),
        index_bytes=sum(one.index_bytes for one in found),
        measured_samples=sum(one.measured_samples for one in found),
        sources=found,
    )


def _time_source(roles: Roles, number: int, cursor: Cursor, decoder: MediaDecoder | None) -> Timed:
    count, fleet = _rows_to_read(roles, number, decoder is not None), roles.fleet
    # The first chunk opens the files, which a loader in its stride does not.
    ahead = fleet.summary_buffer([MetaRequest(number, cursor, count)])[0]
    began = time.process_time()
    delta = fleet.summary_buffer([MetaRequest(number, ahead.next_cursor, count)])[0]
    unit = _unit_of(roles.job.sources[number], decoder)
    read = max(int(delta.meta["tokens"].sum()), 1) if unit == "tokens" else len(delta.meta)
    read_s = (time.process_time() - began) / read
    chosen = _samples_to_finish(delta.meta, unit)
    # Of several samples one goes first and is not counted: what happens once (a decoder is loaded) is no part of it.
    parts = [chosen[:1], chosen[1:]] if len(chosen) > 1 else [chosen]
    timed = Timed(0, unit, read_s, reads_media=unit != "tokens")
    for part in parts:
        if not len(part):
            break
        rows = delta.meta[part]
        end = Cursor(*(int(rows[-1][name]) for name in Cursor._fields))
        began = time.process_time()
        payloads = fleet.hand_over([LoaderOrder(roles.planner.next_step, number, rows, end)])()
        media = sum(payload.media.nbytes for payload in payloads if payload.media is not None)
        others = sum(payload.nbytes for payload in payloads) - media
        _open_media(payloads, decoder)
        seconds = time.process_time() - began
        tokens = max(int(rows["tokens"].sum()), 1)
        # Samples of a source with images may have none: what they cost grows with their text.
        grows = "tokens" if unit == "image_tokens" and not rows["image_tokens"].any() else unit
        units = len(rows) if grows == "samples" else max(int(rows[grows].sum()), 1)
        timed = Timed(len(part), grows, read_s, seconds / units, unit != "tokens", others / tokens, media / units)
        if seconds > _BUDGET_S:
            break
    return timed


def _samples_to_finish(meta: MetaArray, unit: Unit) -> npt.NDArray[np.int64]:
    """Return which of some measured rows are finished: in the order of the source, sound ones with media at first."""
    drawn = np.flatnonzero((meta["flags"] & SKIP) == 0)
    drawn = drawn[np.argsort(meta["flags"][drawn] & BAD, kind="stable")]
    if unit == "image_tokens":
        drawn = drawn[np.argsort(meta["image_tokens"][drawn] == 0, kind="stable")]
    return np.sort(drawn[: _FINISHED + 1])


def _open_media(payloads: Sequence[Payload], decoder: MediaDecoder | None) -> None:
    """Decode what the loaders handed over encoded, as the constructor does; what does not decode counts as well."""
    for payload in payloads:
        if decoder is not None and payload.media is not None:
            decode_media(payload.media, decoder, SerialWorkers())


def _unit_of(source: Source, decoder: MediaDecoder | None) -> Unit:
    if decoder is None:
        return "tokens"
    # The window of a sound is as long for every sound, and is no image.
    return "samples" if isinstance(source.sample, Audio) else "image_tokens"


def _rows_to_read(roles: Roles, number: int, media: bool) -> int:
    """Return how many rows are read and measured: at least as many as a loader reads at once, and not much more."""
    files = roles.listings[roles.job.sources[number].name]
    row_bytes = files.total_bytes / (count_indexed(files)[0] or 1.0)
    least = _FINISHED + 1 if media else _FINISHED // 2
    return int(np.clip(2 * AHEAD_BYTES / max(row_bytes, 1.0), least, AHEAD_ROWS))
