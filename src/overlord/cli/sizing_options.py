"""How many workers sources have: the part of a job file's `launch` section, and of the command line, that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from overlord.core.spec_errors import Fault
from overlord.core.spec_model import Spec, Word, as_bytes, as_number, whole
from overlord.errors import SpecError
from overlord.scaling.budgets import AHEAD_BYTES, Budget

FileLoaders = int | Literal["auto"] | dict[Word, Annotated[int, Field(ge=1)]]
"""Workers of each source, as a file says it."""
Bytes = Annotated[int, BeforeValidator(as_bytes, json_schema_input_type=int | str)]


def as_loaders(value: object) -> object:
    """Return workers of each source, as a file or a command line writes them.

    Raises:
        Fault: It is neither a number, nor auto, nor numbers by name.

    Example:
        >>> as_loaders("3"), as_loaders("auto"), as_loaders({"web": 2})
        (3, 'auto', {'web': 2})
    """
    if value == "auto" or isinstance(value, dict):
        return value
    number = as_number(value)
    if not isinstance(number, int) or isinstance(value, bool) or number < 1:
        raise Fault("this must be a whole number of at least 1, auto, or numbers by source; no worker would read it")
    return number


LoadersField = Annotated[
    FileLoaders,
    BeforeValidator(
        as_loaders,
        json_schema_input_type=Annotated[int, Field(ge=1)] | Literal["auto"] | dict[Word, Annotated[int, Field(ge=1)]],
    ),
]


class BudgetOptions(Spec):
    """What a service may take of its hosts."""

    ahead: Bytes = AHEAD_BYTES
    """Bytes of samples and views held ahead of the trainers."""
    cpus: Annotated[int, whole(1, "no worker could run. Leave it out")] | None = None
    """Workers that all sources may have together; by default one for each core."""
    memory: Bytes | None = None
    """Bytes that the files and read buffers of all sources may take."""

    def budget(self) -> Budget:
        """Return it as `launch` takes it."""
        return Budget(ahead=self.ahead, cpus=self.cpus, memory=self.memory)


def loaders_of(text: str) -> int | Literal["auto"]:
    """Read --loaders.

    Raises:
        SpecError: It is no number and not auto.

    Example:
        >>> loaders_of("4"), loaders_of("auto")
        (4, 'auto')
    """
    if text == "auto":
        return "auto"
    number = as_number(text)
    if not isinstance(number, int) or number < 1:
        raise SpecError(
            f"--loaders: loaders_per_source is {text!s:.80}; nothing could run with it. Give a whole number of at "
            "least 1, or auto for what the profile asks for."
        )
    return number


def profile_path(job: Path) -> Path:
    """Return where the profile of a job file is kept.

    Example:
        >>> profile_path(Path("jobs/vlm.yaml")).as_posix()
        'jobs/vlm.profile.json'
    """
    return job.with_name(f"{job.stem}.profile.json")
