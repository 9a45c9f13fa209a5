"""What was in a step: its rows, where they went and what they cost, their text and pictures as ranks got them.

Everything comes from a replay of the stream (`ol.replay`, or a launch from a state), in this process: the store is only
read. Texts are put together from the batches of all ranks that share a sequence, so they are what was trained on,
with any layout, mesh and hook.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text as Words

from overlord.cli.output import Tell
from overlord.cli.preview import (
    MediaItem,
    Pixels,
    Preview,
    Spans,
    first_frame,
    has_ids_only,
    mel_picture,
    sample_card,
    show_sample,
    shown_ids,
    written_tokens,
)
from overlord.cli.sources import open_each
from overlord.core.order import BEGIN, NO_GROUP, SourceOrder
from overlord.core.plan import LoadingPlan
from overlord.core.ragged import expand_ranges
from overlord.core.samples import BAD, CLIPS, FILE_SHIFT, SOUNDS, Cursor
from overlord.core.spec_errors import did_you_mean
from overlord.core.states import describe_differences
from overlord.errors import OverlordError, SpecError, StateError
from overlord.job.hook_specs import HOOK_KINDS
from overlord.job.layout_specs import Layout
from overlord.job.plain_yaml import load_yaml
from overlord.job.specs import Audio, ImageSpec, Job, Video
from overlord.job_files import JobFile, read_kept_job, refuse_kept_code
from overlord.launch_spec import Launch
from overlord.planning.costs import CostModel, llama_12b
from overlord.planning.strategies import costs_of
from overlord.readers.source_files import SourceFiles
from overlord.reports.pages import Row, render_file, terminal_table
from overlord.reports.summary import count, number, share
from overlord.roles.client import TOKEN_KEYS, Batch, Step
from overlord.runtimes.launching.deployment import order_of
from overlord.runtimes.launching.resume import (
    canonical,
    changes_of,
    refuse_kept_readers,
    with_added_sources,
    with_changes,
)
from overlord.session import Service, launch, replay
from overlord.stores.places import open_place, store_path
from overlord.stores.store import FoundLineage, kept_job, newest_lineage
from overlord.transforms.microbatches.packing_kernels import IGNORE_INDEX
from overlord.transforms.microbatches.per_microbatch import cut_runs
from overlord.transforms.samples.sample_kinds import reserve_placeholders
from overlord.transforms.samples.tokenize import TextTokenizer

SHOWN_ROWS = 40
"""Rows of the terminal's table; JSON and pages have all."""

Int64s = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


# --------------------------------------------------------------------------------------------------------------
# The rows of a step, from its plan alone.


@dataclass(frozen=True, slots=True)
class StepRow:
    """One piece of a sample, and where it goes: most samples are one piece."""

    sample: str
    """The sample's id, SOURCE:FILE:ROW@EPOCH."""
    source: str
    file: int
    row: int
    epoch: int
    first_token: int
    """The piece's first token inside its sample."""
    tokens: int
    images: int
    """Images, clips or sounds of the sample."""
    media_tokens: int
    bad: bool
    """Whether it was known when it was planned that the sample does not decode."""
    cost: int
    """By the cost model of the step, in its units."""
    ranks: tuple[int, ...]
    """All ranks that consume the piece, or a slice of it."""
    bucket: int
    microbatch: int
    position: int
    """Place inside the microbatch."""
    drawn: int
    """Place in the draw of the step."""


def rows_of(plan: LoadingPlan, cost: CostModel) -> list[StepRow]:
    """Return the pieces of a plan in the order of its buckets and microbatches, each once also where ranks share it."""
    draw, pieces, tree = plan.draw, plan.pieces, plan.mesh
    sizes = np.diff(plan.bin_offsets)
    bins = np.repeat(np.arange(len(sizes)), sizes)
    position = np.arange(len(pieces)) - plan.bin_offsets[bins]
    buckets, microbatches = bins // plan.num_microbatches, bins % plan.num_microbatches
    chosen = np.arange(len(pieces)) if plan.first_ranks is None else np.flatnonzero(plan.first_ranks == plan.buckets)
    meta, costs = draw.meta[pieces.sample], cost(pieces.length.astype(np.int64))

    @functools.cache
    def ranks(bucket: int, of: int) -> tuple[int, ...]:
        return tuple(sorted(r for one in range(bucket, bucket + of) for r in tree.consumers(plan.axis, one)))

    found: list[StepRow] = []
    for at in chosen.tolist():
        drawn, one, bucket = int(pieces.sample[at]), meta[at], int(buckets[at])
        sample = draw.sample_id(drawn)
        found.append(
            StepRow(
                sample=str(sample),
                source=sample.source,
                file=sample.file,
                row=sample.row_in_file,
                epoch=sample.epoch,
                first_token=int(one["start"]) + int(pieces.start[at]),
                tokens=int(pieces.length[at]),
                images=int(one["images"]),
                media_tokens=int(one["image_tokens"]),
                bad=bool(one["flags"] & BAD),
                cost=int(costs[at]),
                ranks=ranks(bucket, 1 if plan.cp_sizes is None else int(plan.cp_sizes[at])),
                bucket=bucket,
                microbatch=int(microbatches[at]),
                position=int(position[at]),
                drawn=drawn,
            )
        )
    return found


def cost_of(launched: Launch) -> CostModel:
    """Return the cost model of a launch's strategy; that of a 12B model where it has a function of its own."""
    backbone = costs_of(launched.strategy)[0]
    return backbone if isinstance(backbone, CostModel) else llama_12b


def parse_sample(text: str, names: Sequence[str]) -> tuple[str, int, int | None]:
    """Return source, row (file << 32 | row in the file) and epoch of a sample's id; no epoch: of any.

    Raises:
        SpecError: It is no id, or the job has no such source.

    Example:
        >>> parse_sample("web:2:7@1", ["web"]), parse_sample("a:b:0:7", ["a:b"])
        (('web', 8589934599, 1), ('a:b', 7, None))
    """
    name, *numbers = text.partition("@")[0].rsplit(":", 2)
    epoch = text.partition("@")[2]
    if len(numbers) != 2 or not all(part.isdecimal() for part in numbers) or not (epoch.isdecimal() or "@" not in text):
        raise SpecError(
            f"--sample {text}: it is not the id of a sample; none could be found. Write SOURCE:FILE:ROW@EPOCH, as "
            "`str(batch.meta.sample_ids[0])` and `overlord steps show` print it."
        )
    if name not in names:
        raise SpecError(
            f"--sample {text}: the run has no source {name!r}{did_you_mean(name, names)}. It has {', '.join(names)}."
        )
    file, row = (int(part) for part in numbers)
    return name, (file << FILE_SHIFT) + row, int(epoch) if epoch else None


# --------------------------------------------------------------------------------------------------------------
# What ranks got of it: whole sequences, from the slices of the ranks that share them.


class Delivered:
    """The batches of one step of a service, for looking at.

    Args:
        service: A replayed, or freshly launched, inline service.
        step: The step.
        job: Its job.
        layout: The layout of its batches.
    """

    def __init__(self, service: Service, step: int, job: Job, layout: Layout) -> None:
        plan = service.plan_raw(step)
        if plan is None:
            raise StateError(f"the stream ends before step {step}; nothing is in it. Give an earlier step.")
        self.plan = plan
        self._service = service
        self._layout = layout
        self._job = job
        self._specs = {source.name: source.sample for source in job.sources}
        self._steps: dict[int, Step] = {}
        self._sequences = functools.cache(self._sequence)
        self._pictures = functools.cache(self._pictures_of)

    def step_of(self, rank: int) -> Step:
        """Return what a rank got."""
        if rank not in self._steps:
            client = self._service.client(rank)
            if client.next_step != self.plan.step:  # of a state: the stream begins there, and goes on here
                client = self._service.client(rank, self.plan.step)
            self._steps[rank] = next(client)
        return self._steps[rank]

    def ranks_of(self, rows: Sequence[StepRow]) -> list[int]:
        """Return all ranks that get, or encode, something of some pieces."""
        ranks = {rank for row in rows for rank in row.ranks}
        media, drawn = self.plan.draw.media, [row.drawn for row in rows]
        for plan, *_ in self.plan.encoders.values():
            items = self.plan.draw.media_at(plan.pieces.sample, plan.pieces.start)[0]
            ranks |= set(plan.buckets[np.isin(media.sample[items], drawn)].tolist())
        return sorted(ranks)

    def preview(self, row: StepRow, tokenizer: TextTokenizer | None) -> Preview:
        """Return a piece as its ranks got it."""
        ids, counts = self.tokens(row)
        spec, plan = self._specs[row.source], self.plan
        pictures = self._pictures(row.bucket, row.microbatch).get((row.drawn, row.first_token), ())
        media = plan.draw.media
        first = row.first_token - int(plan.draw.meta["start"][row.drawn])
        inside = np.flatnonzero(
            (media.sample == row.drawn) & (media.start >= first) & (media.start + media.length <= first + row.tokens)
        )
        items = [(int(media.start[at]) - first, int(media.length[at])) for at in inside.tolist()]
        placeholders = sum(length for _, length in items)
        spans: Spans = ()
        if tokenizer is None or has_ids_only(spec):
            text = shown_ids(ids.tolist())
        else:
            text, spans = written_tokens(tokenizer, ids, counts, items)
        part = f" tokens {row.first_token} to {row.first_token + row.tokens - 1}" if row.first_token else ""
        return Preview(
            sample=row.sample + part, tokens=row.tokens, delivered=row.tokens,
            image_tokens=0 if plan.draw.meta["flags"][row.drawn] & SOUNDS else placeholders, media_tokens=placeholders,
            loss_tokens=int(counts.sum()), text=text, spans=spans, turns=None, media=tuple(pictures),
            faults=("a stand-in took its place, since it does not decode",) * (not counts.any() and row.bad),
            skipped=False, dropped=False,
        )  # fmt: skip

    def tokens(self, row: StepRow) -> tuple[Int64s, Int64s]:
        """Return the token ids of a piece, and 1 where a token counts in the loss."""
        cu, ids, counts = self._sequences(row.bucket, row.microbatch)
        begin = int(cu[row.position])
        return ids[begin : begin + row.tokens], counts[begin : begin + row.tokens]

    def _heads(self, bucket: int) -> tuple[int, int]:
        """Return a rank of a bucket that embeds its tokens, and one that computes their loss."""
        tree, plan = self.plan.mesh, self.plan
        fetch = [rank for rank in tree.consumers(plan.axis, bucket) if tree.fetches(rank, plan.broadcast)]
        stages = {tree.coords(rank).pp: rank for rank in reversed(fetch)}
        first, last = stages.get(0), stages.get(tree.pp - 1)
        if first is None or last is None:
            raise StateError(f"no rank of bucket {bucket} fetches its tokens; their text cannot be shown.")
        return first, last

    def _sequence(self, bucket: int, microbatch: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the segments of a microbatch, its token ids, and which of them count in the loss."""
        embeds, has_loss = self._heads(bucket)
        cu, ids = self._joined(embeds, microbatch, next(k for k in TOKEN_KEYS if k in self._batch(embeds, microbatch)))
        mask = "loss_mask" if self._layout.keys == "megatron" else "labels"
        _, labels = self._joined(has_loss, microbatch, mask)
        counts = (labels > 0 if mask == "loss_mask" else labels != IGNORE_INDEX).astype(np.int64)
        if self._layout.keys != "hf":  # a label stands where it is predicted, which is one token before its own
            counts = np.concatenate([np.zeros(1, np.int64), counts[:-1]])
            counts[cu[:-1]] = 0
        return cu, ids, counts

    def _batch(self, rank: int, microbatch: int) -> Batch:
        return self.step_of(rank).microbatches[microbatch]  # type: ignore[no-any-return]

    def _joined(self, rank: int, microbatch: int, key: str) -> tuple[Int64s, Array]:
        """Return the segments of the sequence that a rank has a slice of, and a key of it put together again."""
        meta = self._batch(rank, microbatch).meta
        cu = meta.cu_seqlens.astype(np.int64)
        runs = cut_runs(cu, meta.local_cp_size, meta.slicing, rows=self._layout.rows != "packed")
        whole: Array | None = None
        for part, other in enumerate(meta.ranks):
            values, mine = self._batch(other, microbatch)[key].reshape(-1), runs.of_part(part)
            whole = np.zeros(int(cu[-1]), values.dtype) if whole is None else whole
            whole[expand_ranges(cu[mine.segment] + mine.begin, mine.length)] = values[
                expand_ranges(mine.place, mine.length)
            ]
        assert whole is not None, "a sequence has at least one rank"
        return cu, whole

    # -- pictures: what encoders got ---------------------------------------------------------------

    def _pictures_of(self, bucket: int, microbatch: int) -> dict[tuple[int, int], list[MediaItem]]:
        """Return the media of a microbatch by (drawn sample, first token of the piece)."""
        plan, media = self.plan, self.plan.draw.media
        batch = self._batch(self._heads(bucket)[0], microbatch)
        pieces = plan.bin(bucket, microbatch)
        seen = dict.fromkeys(("image", "video", "audio"), 0)
        found: dict[tuple[int, int], list[MediaItem]] = {}
        keys = (media.sample.astype(np.int64) << 32) + media.start
        for sample, start, length in zip(
            *(c.tolist() for c in (pieces.sample, pieces.start, pieces.length)), strict=True
        ):
            low, high = np.searchsorted(keys, [(sample << 32) + start, (sample << 32) + start + length]).tolist()
            flags, name = int(plan.draw.meta["flags"][sample]), plan.draw.names[plan.draw.source[sample]]
            kind = "audio" if flags & SOUNDS else "video" if flags & CLIPS else "image"
            at = (sample, start + int(plan.draw.meta["start"][sample]))
            for item in range(low, high):
                found.setdefault(at, []).append(self._item(batch, kind, seen[kind], item, name))
                seen[kind] += 1
        return found

    def _item(self, batch: Batch, kind: str, place: int, item: int, source: str) -> MediaItem:
        """Return one item: the `place`-th of its kind in the batch, or what its encoder's rank got of it."""
        encoder = "audio_encoder" if kind == "audio" else "encoder"
        if encoder in self.plan.encoders:
            return self._encoded_apart(encoder, kind, item, source)
        spec = self._specs[source]
        if kind == "audio":
            assert isinstance(spec, Audio)  # no other kind of sample gives sounds
            return _sound(batch["input_features"][place], int(batch["feature_attention_mask"][place].sum()))
        assert isinstance(spec, (ImageSpec, Video))  # no other kind of sample gives patches
        pixels, grids = (
            ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")
        )
        ends = np.cumsum(np.prod(batch[grids], axis=1))
        grid, end = batch[grids][place], int(ends[place])
        return self._patches(batch[pixels][end - int(np.prod(grid)) : end], grid, spec, kind)

    def _encoded_apart(self, encoder: str, kind: str, item: int, source: str) -> MediaItem:
        plan, spec = self.plan.encoders[encoder][0], self._specs[source]
        runs = self.plan.draw.media_at(plan.pieces.sample, plan.pieces.start)[0]
        ranks = sorted(set(plan.buckets[np.flatnonzero(runs == item)].tolist()))
        if len(ranks) != 1:
            return MediaItem(kind, f"{kind} that {len(ranks)} ranks encode", facts={"encoded_by": ranks})
        step = self.step_of(ranks[0])
        got = step.audio_encoder if kind == "audio" else step.encoder
        assert got is not None, "a plan with an encoder has inputs for every rank"
        if kind == "audio":
            place = int(np.flatnonzero(got["audio_ids"] == item)[0])
            return _sound(got["input_features"][place], int(got["feature_attention_mask"][place].sum()))
        assert isinstance(spec, (ImageSpec, Video))  # no other kind of sample gives patches
        place = int(np.flatnonzero(got["image_ids"] == item)[0])
        # Runs of one image follow each other; whole images of others lie before.
        mine = plan.bin(ranks[0], 0)
        counts = mine.length.astype(np.int64) * spec.merge**2
        begin, grid = int(counts[:place].sum()), got["image_grid_thw"][place]
        return self._patches(got["pixel_values"][begin : begin + int(np.prod(grid))], grid, spec, kind)

    def _patches(self, patches: Array, grid: Int64s, spec: ImageSpec | Video, kind: str) -> MediaItem:
        height, width = int(grid[1]) * spec.patch, int(grid[2]) * spec.patch
        facts = {"size": [width, height]} | ({"frames": int(grid[0]) * spec.temporal} if kind == "video" else {})
        words = f"{kind} {width}×{height}" + (f", {facts['frames']} frames" if kind == "video" else "")
        if patches.dtype != np.uint8:
            mean, std = (np.asarray(x, np.float32)[:, None] for x in (self._layout.mean, self._layout.std))
            floats = (patches.reshape(len(patches), 3, -1) * std + mean) * 255
            patches = np.clip(np.rint(floats), 0, 255).astype(np.uint8).reshape(len(patches), -1)
        return MediaItem(kind, words, first_frame(np.ascontiguousarray(patches), grid, spec), facts)


def _sound(mel: Array, frames: int) -> MediaItem:
    picture: Pixels | None = mel_picture(mel[:, :frames]) if frames else None
    return MediaItem("audio", f"sound of {frames} frames", picture, {"frames": frames})


# --------------------------------------------------------------------------------------------------------------
# `overlord steps show`.


@dataclass(frozen=True, slots=True)
class ShownStep:
    """A step as it is shown."""

    step: int
    mesh: str
    cost: CostModel
    digests: Mapping[str, str]
    weights: Mapping[str, float]
    rows: Sequence[StepRow]
    """Those that were asked for."""
    of: int
    """Rows of the whole step."""
    texts: Sequence[tuple[StepRow, Preview]]
    """The first of them, as ranks got them."""
    reported: Mapping[str, float]
    """What the trainer reported of the step, as far as the store has it."""

    def to_json(self) -> dict[str, Any]:
        """Return the step for a program."""
        texts = {id(row): preview.to_json() for row, preview in self.texts}
        kept = ("text", "loss_spans", "loss_tokens", "media", "faults")
        return {
            "step": self.step,
            "mesh": self.mesh,
            "cost_model": self.cost.name,
            **self.digests,
            "weights": dict(self.weights),
            "reported": dict(self.reported),
            "rows_of_step": self.of,
            "rows": [
                dataclasses.asdict(row) | {key: texts[id(row)][key] for key in kept if id(row) in texts}
                for row in self.rows
            ],
        }


@contextmanager
def open_step(
    loaded: JobFile | None,
    store: str | None,
    state: Mapping[str, Any] | None,
    step: int | None,
    given: Mapping[str, Any],
    cache: str,
    tell: Tell,
) -> Iterator[tuple[Service, int]]:
    """Yield a service that hands out a step of a run, and the step; nothing is written.

    Args:
        loaded: The job file, if one was given.
        store: The store of the run; else the state is gone on from.
        state: A state, as `client.state_dict()` returned it.
        step: The step; by default the first behind the state, or the newest of the store.
        given: Mesh, strategy and layout, where the command line gives them.
        cache: Folder of the indices.
        tell: Told how far it is.
    """
    if store is not None:
        at = lineage_of_run(store).reached - 1 if step is None else step
        tell(f"replaying step {at}", 0, 1)
        with replay(store, max(at, 0), loaded, cache=cache, **given) as service:
            tell(f"replaying step {at}", 1, 1)
            yield service, at
        return
    assert loaded is not None and state is not None, "one of store and state is given, a state with a job file"
    begin = int(state["step"])
    at = begin if step is None else step
    if at < begin:
        raise SpecError(
            f"--step {at} is before step {begin} of the state, which knows only what follows it. Give --store, or an "
            "older state."
        )
    options = loaded.call({**given, "cache": cache})
    of_run = {name: getattr(options, name) for name in ("mesh", "strategy", "layout", *HOOK_KINDS)}
    with launch(loaded.job, **of_run, runtime="inline", state=state, cache=cache) as service:
        for number in range(begin, at + 1):
            service.plan_raw(number)
            tell("planning", number - begin + 1, at - begin + 1)
        yield service, at


def lineage_of_run(store: str) -> FoundLineage:
    """Read the newest run of a store.

    Raises:
        StateError: There is none.
    """
    if "://" not in store and not Path(store).is_dir():
        raise StateError(f"the store {store!r} is no folder; it holds no run. Give the store of a run.")
    found = newest_lineage(open_place(store_path(store)))
    if found is None:
        raise StateError(f"the store {store!r} holds no snapshot of a run. Give the store of a run.")
    return found


def show_step(
    service: Service, step: int, *, rank: int | None, sample: str | None, texts: int, store: str | None
) -> ShownStep:
    """Return a step of an open service: the rows of a rank, or of a sample, or all; and the texts of the first."""
    state = service.client(0).state_dict(step)
    job = canonical(with_added_sources(service.job, state), state)
    delivered = Delivered(service, step, job, service.options.layout)
    plan, cost = delivered.plan, cost_of(service.options)
    everything = rows_of(plan, cost)
    chosen = everything
    if rank is not None:
        if not 0 <= rank < plan.mesh.world_size:
            raise SpecError(
                f"--rank {rank} is not in the mesh {plan.mesh} of step {step}; it got nothing. Give a rank from 0 to "
                f"{plan.mesh.world_size - 1}."
            )
        chosen = [row for row in chosen if rank in row.ranks]
    if sample is not None:
        name, number_in, epoch = parse_sample(sample, plan.draw.names)
        wanted = (name, number_in >> FILE_SHIFT, number_in & ((1 << FILE_SHIFT) - 1))
        chosen = [r for r in chosen if (r.source, r.file, r.row) == wanted and epoch in (None, r.epoch)]
        if not chosen:
            held = "" if rank is None else f" on rank {rank}"
            raise SpecError(
                f"--sample {sample}: it is not in step {step}{held}. Leave --step out to look for its step."
            )
    service.look_at(delivered.ranks_of(chosen[:texts]))
    tokenizer = TextTokenizer(job.tokenizer) if job.tokenizer and texts else None
    if tokenizer is not None:
        reserve_placeholders(job, tokenizer)
    records = lineage_of_run(store).records if store is not None else ()
    reports = {record["step"]: record["metrics"] for record in records if record["kind"] == "report"}
    return ShownStep(
        step=step,
        mesh=str(plan.mesh),
        cost=cost,
        digests={"order": plan.draw.digest, "plan": plan.digest},
        weights=dict(zip(plan.draw.names, plan.draw.weights, strict=True)),
        rows=chosen,
        of=len(everything),
        texts=[(row, delivered.preview(row, tokenizer)) for row in chosen[:texts]],
        reported=reports.get(step, {}),
    )


def find_sample(store: str, sample: str, loaded: JobFile | None, cache: str) -> int:
    """Return the step of a run that drew a sample.

    The place of a row in its source's order is computed, and the journal has the cursors of every step: no step is
    drawn again.

    Raises:
        SpecError: None of the steps that the store keeps drew it.
    """
    found = lineage_of_run(store)
    oldest = found.snapshots[0].state
    job = _job_of_run(store, found) if loaded is None else loaded.job
    own = job
    job = canonical(with_added_sources(own, found.newest.state), found.newest.state)
    refuse_kept_readers(job, own)
    name, row, epoch = parse_sample(sample, job.names)
    cursors = [(found.snapshots[0].step - 1, _cursor_in(oldest, name))]
    plans = ((r["step"], r["rows"] if "rows" in r else r["cursors"]) for r in found.records if r["kind"] == "plan")
    moved = {step: rows[name][:3] for step, rows in plans if name in rows}
    cursors += [(step, Cursor(*moved[step])) for step in sorted(moved) if step > cursors[0][0]]
    begin, end = cursors[0][1], cursors[-1][1]
    source = next(one for one in job.sources if one.name == name)
    opened = open_each(job, [source], Path(cache), None)[0].open_or_raise()
    for number_of in range(begin.epoch, end.epoch + 1) if epoch is None else [epoch]:
        at = _place_of(order_of(job, source, opened.files), opened.files, row, number_of, begin, end)
        if at is not None:
            return next(step for step, cursor in cursors if at < cursor)
    raise SpecError(
        f"--sample {sample}: none of the steps {found.snapshots[0].step} to {found.reached - 1} that the store "
        f"{store!r} keeps drew it. It came before them or has not come yet; `launch(keep=..)` keeps more steps."
    )


def _place_of(
    order: SourceOrder, files: SourceFiles, row: int, epoch: int, begin: Cursor, end: Cursor
) -> Cursor | None:
    """Return the place of a row in an epoch of its source, where that is between two cursors."""
    group = order.first_group(epoch) if epoch > begin.epoch or begin.group == BEGIN else begin.group
    while group != NO_GROUP and (epoch, group, 0) < end:
        blocks = order.group(epoch, group)
        slots, rows = blocks.locate(0, blocks.num_rows)
        columns = zip(blocks.files.tolist(), blocks.blocks.tolist(), blocks.first.tolist(), strict=True)
        base = np.array([(f << FILE_SHIFT) + files.row_base(f, b) + first for f, b, first in columns], np.int64)
        offsets = np.flatnonzero(base[slots] + rows == row).tolist()
        if offsets:
            place = Cursor(epoch, group, offsets[0])
            return place if begin <= place < end else None
        group = order.next_group(epoch, group)
    return None


def _cursor_in(state: Mapping[str, Any], name: str) -> Cursor:
    if name not in state["sources"]:
        return Cursor(0, BEGIN, 0)  # it came later
    row = dict(zip(state["columns"], state["sources"][name], strict=True))
    return Cursor(row["epoch"], row["group"], row["offset"])


def _job_of_run(store: str, found: FoundLineage) -> Job:
    text = open_place(store_path(store)).read(kept_job(found))
    if text is None:
        raise SpecError(f"the store {store!r} does not hold the job of its run, which has Python functions. Give JOB.")
    kept = read_kept_job(text)
    refuse_kept_code(kept, HOOK_KINDS)  # no hook runs where a sample is only looked up
    return kept.job


def step_tables(shown: ShownStep, *, pictures: bool) -> list[RenderableType]:
    """Return a step for the terminal."""
    total = sum(row.cost for row in shown.rows) or 1
    heads = ("sample", "ranks", "microbatch", "place", "tokens", "media", "epoch", "share of cost")
    chosen = _of_every_rank(shown.rows, SHOWN_ROWS)
    rows = [
        Row(
            row.sample + (f" from token {row.first_token:,}" if row.first_token else ""),
            (
                _spans(row.ranks),
                str(row.microbatch),
                str(row.position),
                f"{row.tokens:,}",
                f"{row.images} ({row.media_tokens:,})" if row.images else "",
                str(row.epoch),
                share(row.cost / total) + (" [red]bad[/red]" if row.bad else ""),
            ),
        )
        for row in chosen
    ]
    tokens = sum(row.tokens for row in shown.rows)
    title = (
        f"step {shown.step}, mesh {shown.mesh}: {number(len(shown.rows), 'row')} of {shown.of:,}, {count(tokens)} "
        f"tokens; costs by {shown.cost.name}{', the default cost function' if shown.cost == llama_12b else ''}"
    )
    # As text, not as the title of the table, whose width it would be folded to.
    parts: list[RenderableType] = [escape(title), terminal_table(None, heads, rows, left=("ranks",))]
    if len(chosen) < len(shown.rows):
        parts.append(
            f"{len(shown.rows) - len(chosen):,} more rows: --rank RANK shows all of one rank, --json and --html all of "
            "the step"
        )
    if shown.reported:
        listed = ", ".join(f"{name} {value:g}" for name, value in sorted(shown.reported.items()))
        parts.append(Words(f"reported: {listed}"))
    parts += [show_sample(preview, pictures=pictures) for _, preview in shown.texts]
    return parts


def _of_every_rank(rows: Sequence[StepRow], most: int) -> list[StepRow]:
    """Return at most so many rows in their order: the first ones of every group of ranks."""
    seen = Counter[tuple[int, ...]]()
    turns: list[tuple[int, int]] = []
    for at, row in enumerate(rows):
        turns.append((seen[row.ranks], at))
        seen[row.ranks] += 1
    return [rows[at] for at in sorted(at for _, at in sorted(turns)[:most])]


def step_page(name: str, shown: ShownStep) -> str:
    """Return a step as one HTML page: the samples of every microbatch, those that were looked into with their text."""
    texts = {id(row): sample_card(preview) for row, preview in shown.texts}
    bins: dict[tuple[tuple[int, ...], int], list[StepRow]] = {}
    for row in shown.rows:
        bins.setdefault((row.ranks, row.microbatch), []).append(row)
    sections = [
        {
            "headline": f"rank{'s' * (len(ranks) > 1)} {_spans(ranks)} · microbatch {microbatch}",
            "tokens": f"{number(len(rows), 'sample')}, {sum(row.tokens for row in rows):,} tokens",
            "samples": [texts.get(id(row)) or _bare_card(row) for row in rows],
        }
        for (ranks, microbatch), rows in bins.items()
    ]
    return render_file("preview.html", name=f"{name} · step {shown.step}", sources=sections)


def _bare_card(row: StepRow) -> dict[str, Any]:
    facts = f"{number(row.tokens, 'token')}" + (f" · {row.images} media" if row.images else "")
    return {"sample": row.sample, "facts": facts, "faults": (), "pictures": (), "parts": ()}


def _spans(numbers: Sequence[int]) -> str:
    """Return sorted numbers with runs of neighbours joined.

    Example:
        >>> _spans((0, 1, 2, 5, 8, 9))
        '0-2, 5, 8-9'
    """
    runs: list[list[int]] = []
    for one in numbers:
        if runs and one == runs[-1][-1] + 1:
            runs[-1][1:] = [one]
        else:
            runs.append([one])
    return ", ".join("-".join(map(str, run)) for run in runs)


# --------------------------------------------------------------------------------------------------------------
# `overlord steps diff`.


OF_RUNS = (
    "{name} is {old} in the first run, {new} in the second",
    "only the first run has {name} ({old})",
    "only the second run has {name} ({new})",
    "sources only in the first run: {names}",
    "sources only in the second run: {names}",
)
"""How the differences of two runs are told."""


def diff_runs(stores: tuple[str, str], cache: str, tell: Tell, first: int | None = None) -> dict[str, Any]:
    """Return where two runs differ first, and what differs there.

    The digests of all steps that both stores keep are compared first, which reads only their journals. The first step
    with a difference is then replayed from both, where that is possible.
    """
    runs = [lineage_of_run(store) for store in stores]
    orders, plans = (
        [{r["step"]: r[key] for r in run.records if r["kind"] == "plan"} for run in runs] for key in ("order", "plan")
    )
    common = sorted(step for step in orders[0].keys() & orders[1].keys() if first is None or step >= first)
    if not common:
        kept = " and ".join(f"{min(o, default=0)} to {max(o, default=0)}" if o else "none" for o in orders)
        raise SpecError(
            f"the two stores keep no step in common{'' if first is None else f' from step {first} on'} (they keep "
            f"{kept}); nothing can be compared. Launch with a larger keep."
        )
    tell("comparing digests", len(common), len(common))
    told: dict[str, Any] = {
        "stores": list(stores), "first_step": common[0], "last_step": common[-1], "steps": len(common),
        "differing_steps": sum(plans[0][step] != plans[1][step] for step in common),
        "causes": _causes(runs, common[-1]) + _launch_causes(stores, runs),
    }  # fmt: skip
    order = next((step for step in common if orders[0][step] != orders[1][step]), None)
    plan = next((step for step in common if plans[0][step] != plans[1][step]), None)
    told |= {"order_differs_at": order, "plan_differs_at": plan, "same": plan is None}
    if plan is not None:
        told["difference"] = _first_difference(stores, plan, cache, tell)
    return told


def _first_difference(stores: tuple[str, str], step: int, cache: str, tell: Tell) -> dict[str, Any]:
    """Return what differs in a step: the draw, or the place of a sample."""
    found: list[LoadingPlan] = []
    try:
        for store in stores:
            with open_step(None, store, None, step, {}, cache, tell) as (service, _):
                plan = service.plan_raw(step)
                assert plan is not None, "a step that was replayed is planned"
                found.append(plan)
    except OverlordError as error:
        return {"step": step, "what": "unknown", "why": f"it could not be replayed: {error}"}
    drawn = [[str(plan.draw.sample_id(at)) for at in range(len(plan.draw))] for plan in found]
    if drawn[0] != drawn[1]:
        at = _first_unequal(*drawn)
        shared = (Counter(drawn[0]) & Counter(drawn[1])).total()
        of_step = {"in_both": shared, "drawn": [len(one) for one in drawn]}
        return {"step": step, "what": "draw", "place": at, "samples": [_at(one, at) for one in drawn], **of_step}
    if found[0].mesh != found[1].mesh:
        return {"step": step, "what": "mesh", "meshes": [str(plan.mesh) for plan in found]}
    rows = [rows_of(plan, llama_12b) for plan in found]
    places = [[(r.ranks, r.microbatch, r.position, r.sample, r.first_token, r.tokens) for r in one] for one in rows]
    at = _first_unequal(*places)
    there = [_at(one, at) for one in rows]
    return {
        "step": step,
        "what": "placement",
        "rank": min((row.ranks[0] for row in there if row is not None), default=None),
        "microbatch": min((row.microbatch for row in there if row is not None), default=None),
        "samples": [None if row is None else row.sample for row in there],
        "rows": [None if row is None else dataclasses.asdict(row) for row in there],
    }


def _causes(runs: Sequence[FoundLineage], last: int) -> list[str]:
    """Return what was different before: the jobs, live changes and reports."""
    first, second = (run.newest.state["fingerprint"] for run in runs)
    causes = describe_differences(first, second, words=OF_RUNS)
    changes = [
        {
            json.dumps({key: value for key, value in one.items() if key != "id"}, sort_keys=True)
            for one in with_changes(run.snapshots[0].state["changes"], changes_of(run.records))
            if one["at"] <= last
        }
        for run in runs
    ]
    reports = [{r["step"]: r["metrics"] for r in run.records if r["kind"] == "report"} for run in runs]
    for number_of, name in enumerate(("first", "second")):
        mine, other = changes[number_of], changes[1 - number_of]
        causes += [f"only the {name} run was changed by {json.loads(one)}" for one in sorted(mine - other)]
    both = sorted(reports[0].keys() & reports[1].keys())
    unequal = next((step for step in both if reports[0][step] != reports[1][step]), None)
    if unequal is not None:
        causes.append(f"reports differ from step {unequal} on: {reports[0][unequal]} and {reports[1][unequal]}")
    return causes


def _launch_causes(stores: Sequence[str], runs: Sequence[FoundLineage]) -> list[str]:
    """Return what was different in the launches, as far as the stores have them: it decides where samples go."""
    launches: list[dict[str, Any]] = []
    for store, run in zip(stores, runs, strict=True):
        text = open_place(store).read(kept_job(run))
        found = _plain(text) if text is not None else {}
        kept = (found.get("launch") or {}) if isinstance(found, dict) else {}
        launches.append({key: kept.get(key) for key in ("mesh", "strategy", "layout", *HOOK_KINDS)} if kept else {})
    return describe_differences(launches[0], launches[1], "launch.", OF_RUNS) if all(launches) else []


def _plain(text: bytes) -> Any:
    """Return what a job that a store keeps holds; nothing where it is no YAML."""
    try:
        return load_yaml(text.decode())
    except (yaml.YAMLError, ValueError):
        return {}


def _first_unequal(left: Sequence[Any], right: Sequence[Any]) -> int:
    unequal = (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(unequal, min(len(left), len(right)))


def _at(values: Sequence[Any], at: int) -> Any:
    return values[at] if at < len(values) else None


def diff_lines(told: Mapping[str, Any]) -> list[RenderableType]:
    """Return the difference of two runs for the terminal."""
    first, second = told["stores"]
    steps = f"steps {told['first_step']} to {told['last_step']}, which both stores keep"
    lines: list[RenderableType] = [escape(f"first run   {first}\nsecond run  {second}")]
    if told["same"]:
        return [*lines, f"the same samples at the same places in {steps}"]
    found, order = told["difference"], told["order_differs_at"]
    step, what = found["step"], found["what"]
    where = "other samples" if order == step else "the same samples, at other places"
    lines.append(f"{where} from step {step} on, in {told['differing_steps']:,} of {told['steps']:,} steps ({steps})")
    place = ""
    if what == "unknown":
        lines.append(escape(f"step {step}: {found['why']}"))
    elif what == "draw":
        place = f"sample {found['place']} of the draw"
        of_each = " and ".join(f"{one:,}" for one in found["drawn"])
        lines.append(f"of the {of_each} samples of step {step}, {found['in_both']:,} are in both")
    elif what == "placement":
        place = f"rank {found['rank']}, microbatch {found['microbatch']}"
    for name, one in zip(("first", "second"), found.get("samples") or found.get("meshes") or (), strict=False):
        lines.append(escape(f"  {name} run, step {step}, {place or what}: {one or 'nothing'}"))
    if order is not None and order != step:
        lines.append(f"other samples from step {order} on")
    lines += [escape(f"because: {cause}") for cause in told["causes"]]
    if what != "unknown":
        rank = f" --rank {found['rank']}" if what == "placement" else ""
        lines.append(escape(f"look at it: overlord steps show --store {first} --step {step}{rank}"))
    return lines
