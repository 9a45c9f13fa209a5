"""How often sources are read and what that is worth, and when they will be read again, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from overlord.planning.exhaustion import SourceForecast
from overlord.planning.learning.repetition import effective_epochs
from overlord.reports.summary import number

NAMED = 3
"""Sources that a sentence names."""
ORDINALS = {2: "second", 4: "fourth", 16: "sixteenth"}


def passes(epochs: float) -> str:
    """Write how often a source was read.

    Example:
        >>> passes(0), passes(11.31), passes(6400.2)
        ('0', '11.3', '6,400')
    """
    return f"{epochs:,.1f}" if 0 < epochs < 100 else f"{epochs:,.0f}"


def worth_of(epochs: float) -> str:
    """Write what so many passes over a source are worth, in passes over new data.

    Example:
        >>> worth_of(11.3)
        'worth 8.5'
    """
    return f"worth {passes(effective_epochs(epochs))}"


def epochs_words(source: Mapping[str, Any]) -> str:
    """Return how often a source of a status was read, and what that is worth where it was repeated.

    Example:
        >>> epochs_words({"epochs": 11.3}), epochs_words({"epochs": 0.5})
        ('11.3, worth 8.5', '0.5')
    """
    epochs = source["epochs"]
    return f"{passes(epochs)}, {worth_of(epochs)}" if epochs > 1 else passes(epochs)


def repetition_words(sources: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the most repeated sources of a status, and what their passes are worth; None where none is repeated.

    Example:
        >>> repetition_words({"web": {"epochs": 0.4}, "math": {"epochs": 11.3}})
        'math: 11.3 epochs, worth 8.5'
    """
    repeated = sorted(
        ((source["epochs"], name) for name, source in sources.items() if source["epochs"] > 1), reverse=True
    )
    said = [f"{name}: {passes(epochs)} epochs, {worth_of(epochs)}" for epochs, name in repeated[:NAMED]]
    return "; ".join(said) or None


def coming(sources: Sequence[SourceForecast]) -> list[SourceForecast]:
    """Return the sources that will be read again or read up, the earliest first."""
    ahead = [source for source in sources if source.begins or source.read_up is not None]
    return sorted(
        ahead, key=lambda source: min([*source.begins.values(), *([] if source.read_up is None else [source.read_up])])
    )


def forecast_words(sources: Sequence[SourceForecast]) -> str | None:
    """Say when the first sources will be read again or read up; None where none will be.

    Example:
        >>> forecast_words([SourceForecast("web"), SourceForecast("math", {2: 13_700, 4: 41_200})])
        'math: second epoch begins at step 13,700, fourth at step 41,200.'
    """
    ahead = coming(sources)
    if not ahead:
        return None
    more = f"; {number(len(ahead) - NAMED, 'further source')} later" if len(ahead) > NAMED else ""
    return "; ".join(map(_begins_words, ahead[:NAMED])) + f"{more}."


def _begins_words(source: SourceForecast) -> str:
    about = "" if source.exact else "about "
    said = [f"{ORDINALS[epoch]} at {about}step {step:,}" for epoch, step in sorted(source.begins.items())]
    if said:
        said[0] = said[0].replace(" at ", " epoch begins at ", 1)
    if source.read_up is not None:
        said.append(f"read up at {about}step {source.read_up:,}")
    return f"{source.name}: {', '.join(said)}"
