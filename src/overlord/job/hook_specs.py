"""Hooks by their identity: code of the user that replaces what a role does, with the name and version that states keep.

What hooks are given, and what of their results is taken, is in `overlord/transforms/hooks.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import PlainValidator

from overlord.core.spec_errors import Fault, did_you_mean
from overlord.errors import SpecError

HookKind = Literal["loader_do_plan", "constructor_do_plan"]
HOOK_KINDS: tuple[HookKind, ...] = get_args(HookKind)
"""The options of a launch that take a hook."""

JOB_FILE_MODULE = "overlord_job_file"
"""The module of what a Python job file defines."""
UNNAMED_MODULES = ("__main__", JOB_FILE_MODULE)
"""Modules of programs and job files, which say nothing about where their code stands."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook as a launch was given it."""

    fn: Callable[..., Any]
    """A function or an object that is called, or a class: each process that runs the hook makes one object of it."""
    name: str
    version: str
    """What the user calls this state of the code: a run resumes with the same version only."""
    module: str | None = None
    """Where its code stands; None for what a program or a Python job file defines itself."""
    path: str | None = None
    """Where it can be imported from, as "module:name"; None for what lives in the launching program only."""

    @property
    def identity(self) -> dict[str, str]:
        """What a state keeps of it."""
        told = {"name": self.name, "version": self.version}
        return told if self.module is None else told | {"module": self.module}

    def written(self, kind: str) -> str:
        """Return the form that a job file holds.

        Raises:
            SpecError: It cannot be imported by a name.
        """
        if self.path is None:
            raise SpecError(
                f"{kind} is {self.name!r}, which cannot be imported as module:name, and YAML holds no code; the file "
                "would not give the same batches. Move it into a module, or keep the job in a Python file."
            )
        return self.path


def as_hook(value: object) -> Hook:
    """Return a hook in any form that a launch takes: a function, an object, a class, or "module:name".

    Raises:
        Fault: It cannot be imported or called, or has no version.
    """
    if isinstance(value, Hook):
        return value
    path = value if isinstance(value, str) else None
    found = _imported(path) if path is not None else value
    made = found if not isinstance(found, type) else None
    callable_class = isinstance(found, type) and any("__call__" in base.__dict__ for base in found.__mro__[:-1])
    if not (callable(made) or callable_class):
        raise Fault(
            "this must be a function, an object or a class of objects that can be called, or the place of one as "
            "module:name; samples could not be passed through it"
        )
    named = found if hasattr(found, "__qualname__") else type(found)
    name, module = cast("tuple[str, str]", (named.__qualname__, named.__module__))  # type: ignore[attr-defined]
    version = getattr(found, "version", None)
    if isinstance(version, bool) or not isinstance(version, (str, int)) or version == "":
        raise Fault(
            f"it has no version ({version!r:.40}): a run that is resumed after the code has changed would go on with "
            f"other batches and not be refused. Write {name}.version = '1', and another one with every change",
        )
    standing = None if module in UNNAMED_MODULES else module
    return Hook(cast("Callable[..., Any]", found), name, str(version), standing, path or _path_of(found))


def _imported(path: str) -> object:
    module, _, name = path.partition(":")
    if not module or not name:
        raise Fault("this is no place of a function: write module:name, such as my_hooks:two_crops")
    try:
        found: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Fault(
            f"there is no module {error.name!r}, so nothing would run. Put its file beside the job file, or its folder "
            "into PYTHONPATH"
        ) from error
    except Exception as error:  # whatever the user's module raises when it is imported
        raise Fault(
            f"importing {module!r} raised {type(error).__name__}: {error}; nothing would run. Correct the module"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            known = [name for name, one in getattr(found, "__dict__", {}).items() if hasattr(one, "version")]
            raise Fault(f"the module {module!r} has no {part!r}; nothing would run.{did_you_mean(part, known)}")
        found = getattr(found, part)
    return found


def _path_of(found: object) -> str | None:
    """Return where a function or class can be imported from; None for objects, and what a program defines itself."""
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    there: object = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    for part in (name or "").split("."):
        there = getattr(there, part, None)
    return f"{module}:{name}" if there is found else None


def search_beside(folder: Path, given: object) -> None:
    """Let the modules that a mapping of launch options names for hooks be found in the folder of their job file.

    The folder stays in `sys.path`: the processes of a service import from the same folders as their launcher.
    """
    options = cast("Mapping[str, object]", given) if isinstance(given, Mapping) else {}
    for kind in HOOK_KINDS:
        path = options.get(kind)
        top = path.partition(":")[0].partition(".")[0] if isinstance(path, str) else ""
        here = str(folder.absolute())
        beside = bool(top) and ((folder / f"{top}.py").is_file() or (folder / top).is_dir())
        if beside and here not in sys.path:
            sys.path.append(here)


AnyHook = Annotated[Hook, PlainValidator(as_hook, json_schema_input_type=str)]
"""A hook in any form that a launch takes."""
