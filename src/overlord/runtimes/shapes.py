"""What batches of a job look like on a mesh: limits of its plans, shapes of its media; checked before anything runs."""

from __future__ import annotations

from overlord.core.draw import Limits
from overlord.core.place_tree import ClientPlaceTree
from overlord.core.spec_errors import list_some
from overlord.errors import SpecError
from overlord.job.layout_specs import Layout, bin_multiple, piece_multiple
from overlord.job.media_specs import ImageSpec
from overlord.job.specs import Audio, Job, Video
from overlord.transforms.microbatches.per_microbatch import MediaShape


def limits_of(job: Job, layout: Layout | None = None, mesh: ClientPlaceTree | None = None) -> Limits:
    """Return what plans of this job must respect."""
    layout, tp = layout or Layout(), mesh.tp if mesh is not None else 1
    return Limits(
        context_length=job.batch.context_length,
        microbatch_tokens=job.batch.microbatch_cap,
        microbatches=job.batch.microbatches,
        patches_per_token=media_shape(job).merge ** 2 if _vision(job) else 4,
        slicing=layout.slicing,
        rank_multiple=layout.rank_multiple(tp),
        row_tokens=job.batch.context_length if layout.rows != "packed" else 0,
        full_rows=layout.rows == "full",
    )


def few_samples(job: Job, mesh: ClientPlaceTree) -> str | None:
    """Say that a step has fewer samples than there are data-parallel ranks; None where it has enough."""
    samples, dp = job.batch.global_samples, mesh.dp
    if samples is None or samples >= dp:
        return None
    return (
        f"A step has global_samples={samples} for dp={dp} ranks: at least {dp - samples} of them get dummies and wait "
        f"for the others (an imbalance of up to {dp / samples:.2f}x), whatever the strategy. Give global_samples={dp} "
        "or more, or a mesh with a smaller dp."
    )


def media_shape(job: Job) -> MediaShape:
    """Return the one shape that all images, clips and sounds of a job have in a batch.

    Raises:
        SpecError: where sources differ.
    """
    vision: dict[tuple[int, int, int], list[str]] = {}
    sounds: dict[tuple[int, int], list[str]] = {}
    for source in job.sources:
        spec = source.sample
        if isinstance(spec, (ImageSpec, Video)):
            vision.setdefault((spec.patch, spec.merge, spec.temporal), []).append(source.name)
        elif isinstance(spec, Audio):
            sounds.setdefault((spec.mels, spec.seconds * 100), []).append(source.name)
    if len(vision) > 1:
        shown = "; ".join(f"patch={p}, merge={m}, temporal={t} in {_some(n)}" for (p, m, t), n in vision.items())
        raise SpecError(
            f"sources use image patches of different kinds ({shown}); one batch holds one kind. Give all sources the "
            "same patch, merge and temporal."
        )
    if len(sounds) > 1:
        shown = "; ".join(f"mels={m}, seconds={f // 100} in {_some(n)}" for (m, f), n in sounds.items())
        raise SpecError(
            f"sources use sounds of different shapes ({shown}); one batch holds one shape. Give all sources the same "
            "mels and seconds."
        )
    patch, merge, temporal = next(iter(vision), (0, 1, 1))
    mels, frames = next(iter(sounds), (0, 0))
    return MediaShape(3 * temporal * patch**2, merge, mels, frames)


def check_multiples(job: Job, layout: Layout, mesh: ClientPlaceTree) -> None:
    """Refuse a context or a memory cap that the ranks of a mesh cannot share evenly."""
    multiple = max(
        piece_multiple(layout.slicing, mesh.cp), bin_multiple(layout.slicing, layout.rank_multiple(mesh.tp), mesh.cp)
    )
    parts = [f"2 x cp={mesh.cp}"] if mesh.cp > 1 and layout.slicing != "contiguous" else []
    parts += [f"cp={mesh.cp}"] if mesh.cp > 1 and layout.slicing == "contiguous" else []
    parts += [f"tp={mesh.tp} of sequence parallelism"] if layout.sequence_parallel and mesh.tp > 1 else []
    parts += [f"block={layout.block}"] if layout.block > 1 else []
    for name, value in (("context_length", job.batch.context_length), ("microbatch_tokens", job.batch.microbatch_cap)):
        if value % multiple:
            raise SpecError(
                f"batch.{name} is {value}, which is not a multiple of {multiple} ({', '.join(parts)}): the ranks could "
                "not share a full sequence evenly. Round it to a multiple."
            )


def _some(names: list[str]) -> str:
    return f"source{'' if len(names) == 1 else 's'} {list_some(names, limit=4)}"


def _vision(job: Job) -> list[ImageSpec | Video]:
    return [s.sample for s in job.sources if isinstance(s.sample, (ImageSpec, Video))]
