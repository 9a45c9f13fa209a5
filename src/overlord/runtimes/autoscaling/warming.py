"""Kernels loaded before a run begins, so that no step waits for a compiler.

numba keeps what it compiled beside the sources; call `warm_everything` when installing to have even the first launch
start fast.
"""

from __future__ import annotations

import numpy as np

from overlord.core.ragged import Ragged, gather_runs
from overlord.job.layout_specs import Layout
from overlord.job.sample_specs import ImageSpec
from overlord.job.specs import Audio, Chat, Job, Video
from overlord.planning.warm import warm_kernels, warm_launch
from overlord.transforms.microbatches.packing_kernels import copy_runs, warm_packing
from overlord.transforms.microbatches.positions import mrope_positions
from overlord.transforms.samples.audio import log_mel
from overlord.transforms.samples.chat import loss_in_spans
from overlord.transforms.samples.images import normalize_patches, patchify_into, resize_image
from overlord.transforms.samples.tokenize import TokenSpans


def warm_job(job: Job, layout: Layout) -> None:
    """Load what a job and a layout will need."""
    warm_common()
    if layout.positions != "plain":
        _warm_positions()
    if any(isinstance(source.sample, (ImageSpec, Video)) for source in job.sources):
        _warm_patches()
    if layout.pixels == "float32":
        normalize_patches(np.zeros((1, 3), np.uint8), layout.mean, layout.std, 1 / 255, np.empty((1, 3), np.float32))
    if any(isinstance(source.sample, Audio) for source in job.sources):
        log_mel(np.zeros(400, np.float32), mels=8, sample_rate=16000, frames=2)
    if any(isinstance(source.sample, Chat) for source in job.sources):
        _warm_spans()


def warm_common() -> None:
    """Load what every job needs."""
    warm_launch()
    warm_packing()
    for kind in (np.int32, np.int64, np.uint8):
        Ragged(np.ones(2, kind), np.arange(3)).take(np.array([1, 0]))
    gather_runs(np.zeros(1, np.uint8), np.zeros(1, np.int64), np.ones(1, np.int64))


def _warm_patches() -> None:
    patchify_into(resize_image(np.zeros((2, 2, 3), np.uint8), 1, 1), 1, 1, np.empty(3, np.uint8))


def _warm_positions() -> None:
    whole = mrope_positions(np.array([0, 4]), [0], [0], [4], [[1, 4, 4]])
    zero = np.zeros(1, np.int64)
    copy_runs(whole, np.empty(12, np.int64), zero, zero + 4, zero, 4)


def _warm_spans() -> None:
    one = Ragged(np.zeros(1, np.int32), np.arange(2))
    encoded = TokenSpans(one, np.zeros(1, np.int32), np.ones(1, np.int32))
    loss_in_spans(encoded, Ragged(np.array([0, 1]), np.array([0, 2])), np.ones(1, np.int64))


def warm_everything() -> None:
    """Compile every kernel there is."""
    warm_kernels()
    warm_packing()
    _warm_patches()
    _warm_positions()
    normalize_patches(np.zeros((1, 3), np.uint8), (0, 0, 0), (1, 1, 1), 1.0, np.empty((1, 3), np.float32))
    log_mel(np.zeros(400, np.float32), mels=8, sample_rate=16000, frames=2)
    _warm_spans()
