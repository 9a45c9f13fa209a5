"""What a torch loader tells others: figures to W&B, TensorBoard or a function, and ranges in torch's profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overlord as ol
from overlord.integrations.torch_loader import DataLoader


class BoardWriter:
    """Has TensorBoard's method."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))


class Run:
    """Has the method of a W&B run."""

    def __init__(self) -> None:
        self.written: list[tuple[dict[str, Any], int]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        self.written.append((data, step))


def take(loader: DataLoader, steps: int) -> list[int]:
    tokens = []
    for step in loader:
        tokens.append(step.global_tokens)
        for _ in step.microbatches:
            pass
        if len(tokens) > steps:  # the figures of a step are written when the next one is taken
            break
    return tokens[:steps]


def test_figures_of_every_step_are_written(ids_job, cache):
    run, board, called = Run(), BoardWriter(), []
    for writer, options in (
        (run, {}),
        (board, {"prefix": ""}),
        (lambda d, step: called.append((d, step)), {"every": 3}),
    ):
        with DataLoader(ids_job, runtime="inline", cache=cache) as loader:
            assert loader.log_to(writer, **options) is loader
            tokens = take(loader, 6)
    assert [step for _, step in run.written] == list(range(6))
    assert [data["data/tokens"] for data, _ in run.written] == tokens
    assert all(data["data/wait_s"] > 0 for data, _ in run.written)
    shares = {name: value for name, value in run.written[0][0].items() if "share/" in name}
    assert shares == {f"data/share/{n}": pytest.approx(s) for n, s in (("a", 1 / 2), ("b", 1 / 6), ("c", 1 / 3))}
    assert not any("share/" in name for data, _ in run.written[1:] for name in data), "only where they change"
    assert [(value, step) for tag, value, step in board.written if tag == "tokens"] == list(
        zip(tokens, range(6), strict=True)
    )
    assert [step for _, step in called] == [2, 5]


def test_what_cannot_be_written_to_is_refused(ids_job):
    loader = DataLoader(ids_job, runtime="inline")
    with pytest.raises(ol.SpecError, match=r"writer is a int, which has neither add_scalar.*nor log"):
        loader.log_to(3)
    with pytest.raises(ol.SpecError, match="every is 0; nothing would be written"):
        loader.log_to(print, every=0)


def test_the_profiler_shows_where_data_was_waited_for(ids_job, cache):
    with (
        DataLoader(ids_job, runtime="inline", cache=cache) as loader,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        take(loader, 2)
    counts = {one.key: one.count for one in profiler.key_averages()}
    assert counts["overlord.step"] == 3
    assert counts["overlord.microbatch"] >= 3
