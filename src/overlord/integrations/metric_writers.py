"""Where the figures of a loader go: W&B, TensorBoard, or any `log(figures, step)`; and what these figures are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlord.core.spec_errors import is_whole
from overlord.errors import SpecError

Log = Callable[[dict[str, float], int], object]
"""Takes figures by name, and the step they are of."""


def log_with(writer: Any) -> Log:
    """Return how to write figures with a writer: by its `add_scalar` (TensorBoard), its `log` (W&B), or itself.

    Raises:
        SpecError: It has neither, and is no function.
    """
    if callable(add := getattr(writer, "add_scalar", None)):

        def add_each(figures: dict[str, float], step: int) -> None:
            for name, value in figures.items():
                add(name, value, step)

        return add_each
    log = getattr(writer, "log", writer)
    if not callable(log):
        raise SpecError(
            f"log_to: writer is a {type(writer).__name__}, which has neither add_scalar (as TensorBoard) nor log (as "
            "W&B) and is no function; nothing could be written. Give one of them, or a function (figures, step)."
        )
    return log


class StepLog:
    """Writes the figures of every n-th step.

    Args:
        writer: What `log_with` takes.
        every: Steps between two writes; waits are those of all steps since.
        prefix: In front of every name.
    """

    def __init__(self, writer: Any, every: int, prefix: str) -> None:
        if not is_whole(every, 1):
            raise SpecError(f"log_to: every is {every!r:.80}; nothing would be written. Give a number of steps.")
        self._log = log_with(writer)
        self._every = every
        self._prefix = prefix
        self._version: int | None = None
        self._waited_s = 0.0
        self._steps = 0

    def write(self, step: Any, waited_s: float) -> None:
        """Take a step that is over, and the seconds that its trainer waited for it; write, if it is time."""
        self._waited_s += waited_s
        self._steps += 1
        if self._steps < self._every:
            return
        figures: dict[str, float] = {
            "wait_s": self._waited_s / self._steps,
            "tokens": step.global_tokens,
            "samples": step.global_samples,
            "loss_tokens": step.global_loss_tokens,
            "microbatches": len(step.microbatches),
            "mixture_version": step.mixture_version,
        }
        if step.mixture_version != self._version:  # the mixture of hundreds of sources only where it changed
            self._version = step.mixture_version
            figures |= shares_of(dict(zip(step.source_names, step.weights, strict=True)))
        self._waited_s, self._steps = 0.0, 0
        self._log({f"{self._prefix}{name}": value for name, value in figures.items()}, step.index)


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights as shares of one, named for a log.

    Example:
        >>> shares_of({"web": 3, "code": 1})
        {'share/web': 0.75, 'share/code': 0.25}
    """
    total = sum(weights.values()) or 1.0
    return {f"share/{name}": weight / total for name, weight in weights.items()}
